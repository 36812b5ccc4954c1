/* One engine step, top to bottom:
 *
 *     check    every entry, before anything changes
 *     index    the new tokens of all rows into the automata of their groups, with a log to undo it
 *     commit   what all rows have generated: texts, places in the corpus, and what is learned from it
 *     draft    for all rows that may and are indexed to their end
 *
 * Invariants: a step that fails has changed nothing but capacities, since only `index` can fail after `check`, and it
 * is undone; a draft waits to be verified until the next step; siblings see each other's newest tokens. */
#include <inttypes.h>
#include <string.h>

#include "draft.h"

enum {
    TOKENS_OF_A_STEP = RS_MAX_SPECULATIVE_TOKENS + 1, /* at most, of a row that missed none */
    KEPT_EXTENSIONS = 1 << 12 /* of the undo log; a longer one is freed after the step */
};

/* Entry i's row of the token matrix. */
static const int32_t *row_tokens(const rs_batch *batch, int32_t i) {
    return batch->token_ids + batch->rows[i] * batch->row_stride;
}

/* Where the new tokens of a row begin. */
typedef struct {
    int32_t level;
    uint32_t last; /* the state of the text before */
} place;

static place first_new(const rs_index *index, const rs_sequence *sequence, int32_t level) {
    if (level >= sequence->level) {
        return (place){sequence->level, sequence->last};
    }
    if (!sequence->after_prompt) {
        return (place){0, RS_ROOT};
    }
    const rs_group *group = index->groups + sequence->group;
    return (place){group->prompt_len, group->prompt_last};
}

static uint64_t num_new_tokens(const rs_index *index, const rs_batch *batch, int32_t i) {
    const rs_sequence *sequence = index->sequences + batch->sequences[i];
    return (uint64_t)(sequence->next_level - first_new(index, sequence, sequence->next_level).level);
}

/* How far the row comes in this step: all the way, or as far as what is left of max_new_tokens takes it. */
static int32_t level_within(const rs_index *index, const rs_sequence *sequence, int32_t level, int64_t *num_left) {
    if (!rs_is_whole(index->groups + sequence->group)) {
        return sequence->level;
    }
    const int32_t first = first_new(index, sequence, level).level;
    if (level - first <= TOKENS_OF_A_STEP) {
        return level;
    }
    const int64_t most = *num_left > TOKENS_OF_A_STEP ? *num_left : TOKENS_OF_A_STEP;
    const int32_t num_new = level - first <= most ? level - first : (int32_t)most;
    *num_left -= num_new;
    return first + num_new;
}

/* ---- check ---- */

static rs_status check_batch(const rs_index *index, const rs_batch *batch, rs_error *error) {
    if (batch->num_rows < 1) {
        return rs_fail(error, RS_EINVAL, -1, "num_rows=%" PRId32 ": must be at least 1", batch->num_rows);
    }
    if (!(batch->min_survival >= 0.0 && batch->min_survival <= 1.0)) {
        return rs_fail(error, RS_EINVAL, -1, "min_survival=%g: must be between 0 and 1", batch->min_survival);
    }
    if (batch->num_matrix_rows < 1 || batch->num_columns < 0 || batch->row_stride < batch->num_columns) {
        return rs_fail(error, RS_EINVAL, -1,
                       "token_ids: %" PRId64 " rows of %" PRId64 " columns, stride %" PRId64 ": out of range",
                       batch->num_matrix_rows, batch->num_columns, batch->row_stride);
    }
    const int32_t num = batch->num_model_tokens;
    if (num < 0 || num > index->options.num_speculative_tokens) {
        return rs_fail(error, RS_EINVAL, -1, "num_model_tokens=%" PRId32 ": must be between 0 and %" PRId32, num,
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
            return rs_fail(error, RS_EINVAL, i,
                           "model_confidences[%" PRId32 ", %" PRId32 "]=%" PRId32 ": must be between 0 and %d", i, j,
                           confidence, (int)RS_MODEL_CONFIDENCES - 1);
        }
    }
    return RS_OK;
}

static rs_status check_level(const rs_index *index, const rs_batch *batch, int32_t i, rs_error *error) {
    const int32_t level = batch->levels[i];
    const int32_t start_level = rs_start_level(index, index->sequences + batch->sequences[i]);
    if (level < start_level) {
        return rs_fail(error, RS_EINVAL, i, "levels[%" PRId32 "]=%" PRId32 ": below the prompt length %" PRId32, i,
                       level, start_level);
    }
    if (level > batch->num_columns) {
        return rs_fail(error, RS_EINVAL, i, "levels[%" PRId32 "]=%" PRId32 ": token_ids has %" PRId64 " columns", i,
                       level, batch->num_columns);
    }
    if (level > RS_MAX_TEXT_TOKENS) {
        return rs_fail(error, RS_EINVAL, i, "levels[%" PRId32 "]=%" PRId32 ": must be at most %d", i, level,
                       (int)RS_MAX_TEXT_TOKENS);
    }
    return RS_OK;
}

static rs_status check_entry(const rs_index *index, const rs_batch *batch, int32_t i, int64_t *num_left,
                             rs_error *error) {
    rs_sequence *sequence = rs_find_sequence(index, batch->sequences[i]);
    if (sequence == NULL) {
        return rs_fail(error, RS_EUNKNOWN, i, "sequences[%" PRId32 "]=%" PRId32 ": unknown", i, batch->sequences[i]);
    }
    if (sequence->latest_step == index->num_steps) {
        return rs_fail(error, RS_EINVAL, i, "sequences[%" PRId32 "]=%" PRId32 ": appears twice", i,
                       batch->sequences[i]);
    }
    sequence->latest_step = index->num_steps;
    if (batch->rows[i] < 0 || batch->rows[i] >= batch->num_matrix_rows) {
        return rs_fail(error, RS_EINVAL, i, "rows[%" PRId32 "]=%" PRId32 ": token_ids has %" PRId64 " rows", i,
                       batch->rows[i], batch->num_matrix_rows);
    }
    rs_status status = check_level(index, batch, i, error);
    if (status == RS_OK) {
        status = check_confidences(batch, i, error);
    }
    if (status != RS_OK) {
        return status;
    }
    if (batch->max_draft_tokens[i] < 0) {
        return rs_fail(error, RS_EINVAL, i, "max_draft_tokens[%" PRId32 "]=%" PRId32 ": must not be negative", i,
                       batch->max_draft_tokens[i]);
    }
    const int32_t *tokens = row_tokens(batch, i);
    const int32_t level = sequence->next_level = level_within(index, sequence, batch->levels[i], num_left);
    for (int32_t position = first_new(index, sequence, level).level; position < level; position++) {
        if (tokens[position] < 0) {
            return rs_fail(error, RS_EINVAL, i,
                           "token_ids[%" PRId32 ", %" PRId32 "]=%" PRId32 ": must not be negative", batch->rows[i],
                           position, tokens[position]);
        }
    }
    return RS_OK;
}

static rs_status check(rs_index *index, const rs_batch *batch, rs_error *error) {
    index->num_steps++;
    rs_status status = check_batch(index, batch, error);
    int64_t num_left = batch->max_new_tokens > 0 ? batch->max_new_tokens : INT64_MAX;
    for (int32_t i = 0; status == RS_OK && i < batch->num_rows; i++) {
        status = check_entry(index, batch, i, &num_left, error);
    }
    return status;
}

/* ---- index ---- */

/* Room for the undo log and for the texts after this step. */
static rs_status reserve(rs_index *index, const rs_batch *batch, rs_error *error) {
    uint64_t num_new = 0;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        rs_sequence *sequence = index->sequences + batch->sequences[i];
        uint64_t text_len = (uint64_t)(sequence->next_level - rs_start_level(index, sequence));
        num_new += num_new_tokens(index, batch, i);
        rs_status status = rs_reserve(&index->memory, (void **)&sequence->text, &sequence->text_capacity, text_len,
                                      sizeof *sequence->text);
        if (status != RS_OK) {
            return rs_memory_error(&index->memory, error, status, i);
        }
    }
    rs_status status = rs_reserve(&index->memory, (void **)&index->extensions, &index->extensions_capacity, num_new,
                                  sizeof *index->extensions);
    return rs_memory_error(&index->memory, error, status, -1);
}

/* The new tokens of entry i; *num_done grows with every token, also on failure. */
static rs_status index_row(rs_index *index, const rs_batch *batch, int32_t i, uint64_t *num_done) {
    const rs_sequence *sequence = index->sequences + batch->sequences[i];
    rs_automaton *automaton = &index->groups[sequence->group].automaton;
    const int32_t *tokens = row_tokens(batch, i);
    const int32_t level = sequence->next_level;
    for (place at = first_new(index, sequence, level); at.level < level; at.level++) {
        rs_extension *extension = index->extensions + *num_done;
        rs_status status = rs_extend(automaton, at.last, tokens[at.level], extension);
        if (status != RS_OK) {
            return status;
        }
        at.last = extension->after;
        ++*num_done;
    }
    return RS_OK;
}

/* Undo the first num_done extensions of entry i, the latest first. */
static void unindex_row(rs_index *index, const rs_batch *batch, int32_t i, const rs_extension *extensions,
                        uint64_t num_done) {
    const rs_sequence *sequence = index->sequences + batch->sequences[i];
    rs_automaton *automaton = &index->groups[sequence->group].automaton;
    const int32_t *tokens = row_tokens(batch, i) + first_new(index, sequence, sequence->next_level).level;
    while (num_done-- > 0) {
        rs_retract(automaton, tokens[num_done], extensions + num_done);
    }
}

/* All rows or none. */
static rs_status index_rows(rs_index *index, const rs_batch *batch, rs_error *error) {
    uint64_t num_done = 0;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        uint64_t before = num_done;
        rs_status status = index_row(index, batch, i, &num_done);
        if (status != RS_OK) {
            rs_memory_error(&index->memory, error, status, i);
            unindex_row(index, batch, i, index->extensions + before, num_done - before);
            while (i-- > 0) {
                uint64_t num_new = num_new_tokens(index, batch, i);
                before -= num_new;
                unindex_row(index, batch, i, index->extensions + before, num_new);
            }
            return status;
        }
    }
    return RS_OK;
}

/* ---- commit ---- */

/* From the predictions that the new tokens are the outcome of: up to the first that was wrong, since those behind it
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

static void learn_contexts(rs_index *index, const rs_sequence *sequence, int32_t token) {
    uint32_t tags[RS_NUM_CONTEXTS];
    rs_context_tags(&sequence->recent, rs_own_salt(sequence), tags);
    rs_contexts_learn(&index->contexts, &index->memory, tags, token);
}

/* Returns how many tokens of entry i are new. */
static uint64_t commit_row(rs_index *index, const rs_batch *batch, int32_t i) {
    const int32_t id = batch->sequences[i];
    const int32_t *tokens = row_tokens(batch, i);
    rs_sequence *sequence = index->sequences + id;
    const int32_t level = sequence->next_level;
    if (level > sequence->level) {
        learn_outcome(index, id, tokens + sequence->level, level - sequence->level);
    } else if (level < sequence->level) {
        rs_sequence_restart(index, sequence);
    }
    const int32_t first = sequence->level;
    for (int32_t position = first; position < level; position++) {
        learn_contexts(index, sequence, tokens[position]);
        rs_recent_push(&sequence->recent, tokens[position]);
        if (index->corpus.states != NULL) {
            rs_cursor_move(&index->corpus, &sequence->cursor, tokens[position]);
        }
    }
    const uint64_t num_new = (uint64_t)(level - first);
    if (num_new > 0) {
        memcpy(sequence->text + (first - rs_start_level(index, sequence)), tokens + first,
               num_new * sizeof *sequence->text);
    }
    index->groups[sequence->group].num_tokens += num_new;
    sequence->level = level;
    return num_new;
}

static void commit_rows(rs_index *index, const rs_batch *batch) {
    const rs_extension *extensions = index->extensions;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        uint64_t num_new = commit_row(index, batch, i);
        if (num_new > 0) {
            extensions += num_new;
            index->sequences[batch->sequences[i]].last = extensions[-1].after;
        }
    }
}

/* ---- draft ---- */

static rs_model_draft model_draft(const rs_batch *batch, int32_t i) {
    const int32_t num = batch->num_model_tokens;
    const int64_t at = (int64_t)i * num;
    return num == 0 ? (rs_model_draft){.num = 0}
                    : (rs_model_draft){batch->model_tokens + at, batch->model_confidences + at, num};
}

static void draft_rows(const rs_index *index, const rs_batch *batch) {
    for (int32_t i = 0; i < batch->num_rows; i++) {
        const int64_t at = (int64_t)i * index->options.num_speculative_tokens;
        const rs_sequence *sequence = index->sequences + batch->sequences[i];
        const bool is_whole = rs_is_whole(index->groups + sequence->group) && sequence->level == batch->levels[i];
        batch->num_draft_tokens[i] = rs_draft(index, batch->sequences[i], is_whole ? batch->max_draft_tokens[i] : 0,
                                              batch->min_survival, model_draft(batch, i), batch->draft_tokens + at,
                                              batch->survivals + at);
    }
}

/* ---- the whole step ---- */

rs_status rs_step(rs_index *index, const rs_batch *batch, rs_error *error) {
    rs_status status = check(index, batch, error);
    if (status != RS_OK) {
        return status;
    }
    status = reserve(index, batch, error);
    if (status == RS_OK) {
        status = index_rows(index, batch, error);
    }
    if (status == RS_OK) {
        commit_rows(index, batch);
        draft_rows(index, batch);
    }
    if (index->extensions_capacity > KEPT_EXTENSIONS) {
        rs_resize(&index->memory, (void **)&index->extensions, &index->extensions_capacity, 0,
                  sizeof *index->extensions);
    }
    rs_release(&index->memory, 1);
    return status;
}

int32_t rs_leading_tokens(const rs_index *index, const rs_batch *batch, const int32_t *numbers, int32_t *tokens) {
    int32_t num = 0;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        const int32_t *draft = batch->draft_tokens + (int64_t)i * index->options.num_speculative_tokens;
        for (int32_t j = 0; j < numbers[i] && j < batch->num_draft_tokens[i]; j++) {
            tokens[num++] = draft[j];
        }
    }
    return num;
}
