/* One engine step.
 *
 *     check        waiting texts      rows 0 .. n-1            drafts 0 .. n-1
 *     [ all rows ] [ a few tokens ]   [ new tokens of each ]   [ from what all have now ]
 *          |                               |
 *          +-- wrong: no text changes      +-- does not fit, or is no text: this row is left out
 *
 * Invariants: what is wrong about the call is found before anything changes; a row that is left out has closed its
 * sequence, so that its group can make room for the rows after it; siblings see each other's newest tokens. */
#include <inttypes.h>
#include <string.h>

#include "draft.h"

enum { TOKENS_OF_A_STEP = RS_MAX_SPECULATIVE_TOKENS + 1 /* at most, of a row that missed none */ };

/* ---- check ---- */

static rs_status check_batch(const rs_index *index, const rs_batch *batch, rs_error *error) {
    if (batch->num_rows < 0) {
        return rs_fail(error, RS_EINVAL, "num_rows=%" PRId32 ": must not be negative", batch->num_rows);
    }
    if (!(batch->min_survival >= 0.0 && batch->min_survival <= 1.0)) {
        return rs_fail(error, RS_EINVAL, "min_survival=%g: must be between 0 and 1", batch->min_survival);
    }
    if (batch->num_matrix_rows < 0 || batch->num_columns < 0 || batch->row_stride < batch->num_columns) {
        return rs_fail(error, RS_EINVAL,
                       "token_ids: %" PRId64 " rows of %" PRId64 " columns, stride %" PRId64 ": out of range",
                       batch->num_matrix_rows, batch->num_columns, batch->row_stride);
    }
    const int32_t num = batch->num_model_tokens;
    if (num < 0 || num > index->options.num_speculative_tokens) {
        return rs_fail(error, RS_EINVAL, "num_model_tokens=%" PRId32 ": must be between 0 and %" PRId32, num,
                       index->options.num_speculative_tokens);
    }
    return RS_OK;
}

/* Only where there is a token. */
static rs_status check_confidences(const rs_batch *batch, int32_t i, rs_error *error) {
    const int64_t first = (int64_t)i * batch->num_model_tokens;
    for (int32_t j = 0; j < batch->num_model_tokens && batch->model_tokens[first + j] >= 0; j++) {
        const int32_t confidence = batch->model_confidences[first + j];
        if (confidence < 0 || confidence >= RS_MODEL_CONFIDENCES) {
            return rs_fail(error, RS_EINVAL,
                           "model_confidences[%" PRId32 ", %" PRId32 "]=%" PRId32 ": must be between 0 and %d", i, j,
                           confidence, (int)RS_MODEL_CONFIDENCES - 1);
        }
    }
    return RS_OK;
}

static rs_status check_entry(rs_index *index, const rs_batch *batch, int32_t i, rs_error *error) {
    rs_sequence *sequence = rs_find_sequence(index, batch->sequences[i]);
    if (sequence == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "sequences[%" PRId32 "]=%" PRId32 ": unknown", i, batch->sequences[i]);
    }
    if (sequence->latest_step == index->num_steps) {
        return rs_fail(error, RS_EINVAL, "sequences[%" PRId32 "]=%" PRId32 ": appears twice", i, batch->sequences[i]);
    }
    sequence->latest_step = index->num_steps;
    if (batch->rows[i] < 0 || batch->rows[i] >= batch->num_matrix_rows) {
        return rs_fail(error, RS_EINVAL, "rows[%" PRId32 "]=%" PRId32 ": token_ids has %" PRId64 " rows", i,
                       batch->rows[i], batch->num_matrix_rows);
    }
    if (batch->max_draft_tokens[i] < 0) {
        return rs_fail(error, RS_EINVAL, "max_draft_tokens[%" PRId32 "]=%" PRId32 ": must not be negative", i,
                       batch->max_draft_tokens[i]);
    }
    return check_confidences(batch, i, error);
}

static rs_status check(rs_index *index, const rs_batch *batch, rs_error *error) {
    index->num_steps++;
    rs_status status = check_batch(index, batch, error);
    for (int32_t i = 0; status == RS_OK && i < batch->num_rows; i++) {
        status = check_entry(index, batch, i, error);
    }
    return status;
}

/* ---- waiting texts ---- */

/* Up to max_tokens of the first text that waits. */
static rs_status append_first(rs_index *index, rs_waiting *first, int64_t max_tokens) {
    rs_group *group = index->groups + first->group;
    rs_place *at = first->is_prompt ? &group->prompt : &first->at;
    if (!first->is_prompt && first->serial == 0) {
        first->serial = ++index->num_serials;
        first->at = group->prompt;
    }
    const int32_t num_left = first->num_tokens - first->num_indexed;
    const int32_t before = at->level;
    rs_status status = rs_append(index, group, at, first->serial, first->tokens + first->num_indexed,
                                 num_left < max_tokens ? num_left : max_tokens);
    first->num_indexed += at->level - before;
    for (uint32_t i = 0; first->is_prompt && rs_is_whole(group) && i < index->num_sequences; i++) {
        if (index->sequences[i].open && index->sequences[i].group == first->group) {
            rs_sequence_restart(index, index->sequences + i); /* it waited for the prompt */
        }
    }
    return status;
}

/* Index up to max_tokens of the texts that wait. Where there is no room, the group's are dropped. */
static void append_waiting(rs_index *index, int64_t max_tokens) {
    while (index->waiting != NULL && max_tokens > 0) {
        rs_waiting *first = index->waiting;
        rs_group *group = index->groups + first->group;
        max_tokens += first->num_indexed;
        rs_group_enter(index, group);
        rs_status status = append_first(index, first, max_tokens - first->num_indexed);
        max_tokens -= first->num_indexed;
        if (status != RS_OK) {
            rs_waiting_drop(&index->waiting, &index->memory, first->group);
        } else if (first->num_indexed == first->num_tokens) {
            rs_waiting_drop_first(&index->waiting, &index->memory);
        }
        rs_group_leave(index, group);
    }
}

/* ---- rows ---- */

/* From the predictions that the new tokens are the outcome of: up to the first that was wrong, since those after it
 * are about a text that did not come. */
static void learn_outcome(rs_index *index, int32_t id, const int32_t *new_tokens, int32_t num_new) {
    const rs_sequence *sequence = index->sequences + id;
    const rs_prediction *predictions = rs_predictions(index, id);
    for (int32_t i = 0; i < sequence->num_predictions && i < num_new; i++) {
        rs_calibrate(&index->calibration, predictions + i, new_tokens[i]);
        if (predictions[i].token != new_tokens[i]) {
            return;
        }
    }
}

/* Whether the row can have its level, and there is text from `first` up to `end`. */
static bool holds_text(const rs_batch *batch, int32_t i, int32_t first, int32_t end) {
    const int32_t *tokens = batch->token_ids + batch->rows[i] * batch->row_stride;
    bool holds = batch->levels[i] <= batch->num_columns && batch->levels[i] <= RS_MAX_TEXT_TOKENS;
    for (int32_t position = first; holds && position < end; position++) {
        holds = tokens[position] >= 0;
    }
    return holds;
}

/* Index what is new of a row: all of it, or as far as *num_left lets it. False where it must be left out. */
static bool index_row(rs_index *index, const rs_batch *batch, int32_t i, int64_t *num_left) {
    rs_sequence *sequence = index->sequences + batch->sequences[i];
    rs_group *group = index->groups + sequence->group;
    if (!rs_is_whole(group)) {
        return true; /* it waits for its prompt */
    }
    const int32_t start = rs_start_level(index, sequence);
    if (batch->levels[i] < start) {
        return false; /* whatever it is: INT32_MIN, too */
    }
    const int32_t first = batch->levels[i] >= sequence->at.level ? sequence->at.level : start;
    int64_t num_new = (int64_t)batch->levels[i] - first;
    if (num_new > TOKENS_OF_A_STEP) {
        const int64_t most = *num_left > TOKENS_OF_A_STEP ? *num_left : TOKENS_OF_A_STEP;
        num_new = num_new < most ? num_new : most;
        *num_left -= num_new;
    }
    const int32_t end = first + (int32_t)num_new;
    if (!holds_text(batch, i, first, end) ||
        rs_reserve(&index->memory, (void **)&sequence->text, &sequence->text_capacity, (uint64_t)(end - start),
                   sizeof *sequence->text) != RS_OK) {
        return false;
    }
    const int32_t *tokens = batch->token_ids + batch->rows[i] * batch->row_stride + first;
    if (first == sequence->at.level) {
        learn_outcome(index, batch->sequences[i], tokens, (int32_t)num_new);
    } else {
        rs_sequence_restart(index, sequence);
    }
    if (num_new == 0) {
        return true;
    }
    memcpy(sequence->text + (first - start), tokens, (size_t)num_new * sizeof *tokens);
    return rs_append(index, group, &sequence->at, sequence->serial, tokens, num_new) == RS_OK;
}

/* Returns how many rows were left out. */
static int32_t index_rows(rs_index *index, const rs_batch *batch) {
    int64_t num_left = batch->max_new_tokens > 0 ? batch->max_new_tokens : INT64_MAX;
    int32_t num_left_out = 0;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        batch->num_draft_tokens[i] = 0;
        if (!index_row(index, batch, i, &num_left)) {
            batch->num_draft_tokens[i] = -1;
            num_left_out++;
            rs_sequence_close(index, batch->sequences[i], NULL);
        }
    }
    return num_left_out;
}

/* ---- draft ---- */

/* What the model drafts for entry i. */
static rs_model_draft model_draft(const rs_batch *batch, int32_t i) {
    const int32_t num = batch->num_model_tokens;
    const int64_t at = (int64_t)i * num;
    return num == 0 ? (rs_model_draft){.num = 0}
                    : (rs_model_draft){batch->model_tokens + at, batch->model_confidences + at, num};
}

static void draft_rows(const rs_index *index, const rs_batch *batch) {
    for (int32_t i = 0; i < batch->num_rows; i++) {
        if (batch->num_draft_tokens[i] < 0) {
            continue;
        }
        const rs_sequence *sequence = index->sequences + batch->sequences[i];
        const int64_t at = (int64_t)i * index->options.num_speculative_tokens;
        const bool is_whole = rs_is_whole(index->groups + sequence->group) && sequence->at.level == batch->levels[i];
        batch->num_draft_tokens[i] =
            rs_draft(index, batch->sequences[i], is_whole ? batch->max_draft_tokens[i] : 0, batch->min_survival,
                     model_draft(batch, i), batch->draft_tokens + at, batch->survivals + at);
    }
}

/* ---- the whole step ---- */

rs_status rs_step(rs_index *index, rs_batch *batch, rs_error *error) {
    rs_status status = check(index, batch, error);
    if (status != RS_OK) {
        return status;
    }
    append_waiting(index, batch->max_waiting_tokens);
    batch->num_left_out = index_rows(index, batch);
    draft_rows(index, batch);
    rs_release(&index->memory, 1);
    return RS_OK;
}
