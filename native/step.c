/* One engine step.
 *
 *     check        rows 0 .. n-1            unindexed text   drafts 0 .. n-1
 *     [ all rows ] [ new tokens of each ]   [ a few tokens ] [ from what all have now ]
 *          |            |
 *          |            +-- does not fit, or is no text: this row is dropped
 *          +-- wrong: no text changes
 *
 * Invariants: what is wrong about the call is found before any text changes; a row that is dropped has closed its
 * sequence, so that its group can make room for the rows after it; siblings see each other's newest tokens. */
#include <inttypes.h>
#include <string.h>

#include "draft.h"

enum { TOKENS_OF_A_STEP = RS_MAX_SPECULATIVE_TOKENS + 1 /* at most, of a row that missed none */ };

/* ---- check ---- */

static rs_status check_batch(const rs_index *index, const rs_batch *batch, rs_error *error) {
    if (batch->num_sequences < 0) {
        return rs_fail(error, RS_EINVAL, "num_sequences=%" PRId32 ": must not be negative", batch->num_sequences);
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

/* Marks its sequence with the step's number, so that one which appears twice is found. */
static rs_status check_entry(const rs_index *index, const rs_batch *batch, int32_t i, rs_error *error) {
    rs_sequence *sequence = rs_find_sequence(index, batch->sequences[i]);
    if (sequence == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "sequences[%" PRId32 "]=%" PRId32 ": unknown", i, batch->sequences[i]);
    }
    if (sequence->kind == RS_PARKED) {
        return rs_fail(error, RS_EINVAL, "sequences[%" PRId32 "]=%" PRId32 ": is parked", i, batch->sequences[i]);
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

static rs_status count_and_check(rs_index *index, const rs_batch *batch, rs_error *error) {
    index->num_steps++;
    RS_TRY(check_batch(index, batch, error));
    for (int32_t i = 0; i < batch->num_sequences; i++) {
        RS_TRY(check_entry(index, batch, i, error));
    }
    return RS_OK;
}

/* ---- rows ---- */

/* From the predictions of the draft before, now that its outcome has come: up to the first that was wrong, since those after
 * it are about another text. */
static void learn_outcome(rs_index *index, const rs_sequence *sequence, const int32_t *new_tokens, int32_t num_new) {
    const rs_prediction *predictions = sequence->predictions;
    for (int32_t i = 0; i < sequence->num_predictions && i < num_new; i++) {
        rs_mixer_learn(&index->mixer, predictions + i, new_tokens[i]);
        if (predictions[i].token != new_tokens[i]) {
            return;
        }
    }
}

/* The level up to which the row tokens[0 .. level), which begins with the sequence's prompt, and its text agree. */
static int32_t common_level(const rs_sequence *sequence, const int32_t *tokens, int32_t level) {
    int32_t common = sequence->start;
    while (common < level && common < sequence->end && tokens[common] == sequence->tokens[common - sequence->start]) {
        common++;
    }
    return common;
}

/* Take over what is new of a row, and index it unless that is much. False where it must be dropped. */
static bool take_row(rs_index *index, const rs_batch *batch, int32_t i) {
    rs_sequence *sequence = rs_find_sequence(index, batch->sequences[i]);
    const int32_t *tokens = batch->token_ids + batch->rows[i] * batch->row_stride;
    const int32_t level = batch->levels[i];
    if (level < sequence->start || level > batch->num_columns || level > RS_MAX_TEXT_TOKENS ||
        sequence->is_left_out || sequence->prompt->is_left_out) {
        return false;
    }
    if (sequence->is_resumed || level < sequence->end) {
        rs_sequence_cut(index, sequence, common_level(sequence, tokens, level));
    }
    const int32_t first = sequence->end, num_new = level - first;
    if (rs_check_tokens(tokens + first, num_new, "", NULL) != RS_OK) {
        return false;
    }
    const bool is_left = rs_is_unindexed(sequence) || num_new > TOKENS_OF_A_STEP; /* to rs_catch_up */
    learn_outcome(index, sequence, tokens + first, num_new);
    rs_status status = rs_sequence_write(index, sequence, tokens + first, num_new);
    if (status == RS_OK && !is_left) {
        status = rs_sequence_index(index, sequence, num_new);
    }
    index->num_texts_left_out += status != RS_OK;
    return status == RS_OK;
}

/* Returns how many rows were dropped. */
static int32_t take_rows(rs_index *index, const rs_batch *batch) {
    int32_t num_dropped = 0;
    for (int32_t i = 0; i < batch->num_sequences; i++) {
        batch->num_draft_tokens[i] = 0;
        if (!take_row(index, batch, i)) {
            batch->num_draft_tokens[i] = -1;
            num_dropped++;
            rs_sequence *dropped = rs_find_sequence(index, batch->sequences[i]);
            const int32_t group = dropped->group;
            rs_sequence_free(index, dropped);
            rs_group_leave(index, group);
        }
    }
    return num_dropped;
}

/* ---- unindexed text ---- */

bool rs_catch_up(rs_index *index, int64_t max_tokens_to_index) {
    while (index->num_queued > 0 && max_tokens_to_index > 0) {
        rs_sequence *first = index->queue[0].sequence;
        const int32_t group = first->group, before = first->at.indexed;
        rs_group_enter(index, group);
        if (rs_sequence_index(index, first, max_tokens_to_index) != RS_OK) {
            rs_sequence_leave_out(index, first);
        }
        max_tokens_to_index -= first->at.indexed > before ? first->at.indexed - before : 0;
        rs_sequence_free_unneeded(index, first);
        rs_group_leave(index, group);
    }
    return index->num_queued > 0;
}

/* ---- draft ---- */

/* What the model drafts for entry i. */
static rs_model_draft model_draft(const rs_batch *batch, int32_t i) {
    const int32_t num = batch->num_model_tokens;
    const int64_t at = (int64_t)i * num;
    return num == 0 ? (rs_model_draft){.num = 0}
                    : (rs_model_draft){batch->model_tokens + at, batch->model_confidences + at, num};
}

/* Returns how many rows are unindexed. */
static int32_t draft_rows(rs_index *index, rs_batch *batch) {
    int32_t num_unindexed = 0;
    for (int32_t i = 0; i < batch->num_sequences; i++) {
        if (batch->num_draft_tokens[i] < 0) {
            continue;
        }
        rs_sequence *sequence = rs_find_sequence(index, batch->sequences[i]);
        const int64_t at = (int64_t)i * index->options.num_speculative_tokens;
        const bool is_unindexed = rs_is_unindexed(sequence);
        num_unindexed += is_unindexed;
        batch->num_draft_tokens[i] =
            rs_draft(index, sequence, is_unindexed ? 0 : batch->max_draft_tokens[i], batch->min_survival,
                     model_draft(batch, i), batch->draft_tokens + at, batch->survivals + at);
    }
    return num_unindexed;
}

/* ---- the whole step ---- */

rs_status rs_step(rs_index *index, rs_batch *batch, rs_error *error) {
    RS_TRY(count_and_check(index, batch, error));
    batch->num_dropped = take_rows(index, batch);
    rs_catch_up(index, batch->max_tokens_to_index);
    batch->num_unindexed = draft_rows(index, batch);
    return RS_OK;
}
