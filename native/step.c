#include <inttypes.h>
#include <string.h>

#include "draft.h"

enum {
    WALKS_AT_A_TIME = 16,
    KEPT_EXTENSIONS = 1 << 12 /* of a step's undo log; a longer one is freed after the step */
};

static rs_status check_batch(const rs_batch *batch, rs_error *error) {
    const struct {
        const char *name;
        const void *pointer;
    } arrays[] = {
        {"sequences", batch->sequences},       {"token_ids", batch->token_ids},
        {"rows", batch->rows},                 {"levels", batch->levels},
        {"max_draft_tokens", batch->max_draft_tokens}, {"draft_tokens", batch->draft_tokens},
        {"survivals", batch->survivals},       {"num_draft_tokens", batch->num_draft_tokens},
        {"match_lens", batch->match_lens},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if (arrays[i].pointer == NULL) {
            return rs_fail(error, RS_EINVAL, -1, "%s: must not be null", arrays[i].name);
        }
    }
    if (batch->num_rows < 1) {
        return rs_fail(error, RS_EINVAL, -1, "num_rows=%" PRId32 ": must be at least 1", batch->num_rows);
    }
    if (!(batch->min_token_prob >= 0.0 && batch->min_token_prob <= 1.0)) {
        return rs_fail(error, RS_EINVAL, -1, "min_token_prob=%g: must be between 0 and 1", batch->min_token_prob);
    }
    if (batch->num_matrix_rows < 1 || batch->num_columns < 0 || batch->row_stride < batch->num_columns) {
        return rs_fail(error, RS_EINVAL, -1,
                       "token_ids: %" PRId64 " rows of %" PRId64 " columns, stride %" PRId64 ": out of range",
                       batch->num_matrix_rows, batch->num_columns, batch->row_stride);
    }
    return RS_OK;
}

static int32_t first_new(const rs_sequence *sequence, int32_t level) {
    return level >= sequence->level ? sequence->level : sequence->start_level;
}

static rs_status check_row(const rs_index *index, const rs_batch *batch, int32_t i, uint64_t *num_new,
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
    int32_t level = batch->levels[i];
    if (level < sequence->start_level) {
        return rs_fail(error, RS_EINVAL, i, "levels[%" PRId32 "]=%" PRId32 ": below the prompt length %" PRId32, i,
                       level, sequence->start_level);
    }
    if (level > batch->num_columns) {
        return rs_fail(error, RS_EINVAL, i, "levels[%" PRId32 "]=%" PRId32 ": token_ids has %" PRId64 " columns", i,
                       level, batch->num_columns);
    }
    if (level > RS_MAX_TEXT_TOKENS) {
        return rs_fail(error, RS_EINVAL, i, "levels[%" PRId32 "]=%" PRId32 ": must be at most %d", i, level,
                       (int)RS_MAX_TEXT_TOKENS);
    }
    if (batch->max_draft_tokens[i] < 0) {
        return rs_fail(error, RS_EINVAL, i, "max_draft_tokens[%" PRId32 "]=%" PRId32 ": must not be negative", i,
                       batch->max_draft_tokens[i]);
    }
    const int32_t *tokens = rs_row_tokens(batch, i);
    for (int32_t position = first_new(sequence, level); position < level; position++) {
        if (tokens[position] < 0) {
            return rs_fail(error, RS_EINVAL, i,
                           "token_ids[%" PRId32 ", %" PRId32 "]=%" PRId32 ": must not be negative", batch->rows[i],
                           position, tokens[position]);
        }
    }
    *num_new += (uint64_t)(level - first_new(sequence, level));
    return RS_OK;
}

/* Index the new tokens of entry i; *num_done grows with every token, also on failure. */
static rs_status index_row(rs_index *index, const rs_batch *batch, int32_t i, uint64_t *num_done) {
    const rs_sequence *sequence = index->sequences + batch->sequences[i];
    rs_automaton *automaton = &index->groups[sequence->group].automaton;
    const int32_t *tokens = rs_row_tokens(batch, i);
    int32_t level = batch->levels[i];
    uint32_t last = level >= sequence->level ? sequence->last : sequence->start;
    for (int32_t position = first_new(sequence, level); position < level; position++) {
        rs_extension *extension = index->extensions + *num_done;
        rs_status status = rs_extend(automaton, last, tokens[position], sequence->weight, sequence->speaker,
                                     extension);
        if (status != RS_OK) {
            return status;
        }
        last = extension->after;
        ++*num_done;
    }
    return RS_OK;
}

/* Undo the first num_done extensions of entry i, the latest first. */
static void unindex_row(rs_index *index, const rs_batch *batch, int32_t i, const rs_extension *extensions,
                        uint64_t num_done) {
    const rs_sequence *sequence = index->sequences + batch->sequences[i];
    rs_automaton *automaton = &index->groups[sequence->group].automaton;
    const int32_t *tokens = rs_row_tokens(batch, i) + first_new(sequence, batch->levels[i]);
    while (num_done-- > 0) {
        rs_retract(automaton, tokens[num_done], sequence->weight, extensions + num_done);
    }
}

static uint64_t num_new_tokens(const rs_index *index, const rs_batch *batch, int32_t i) {
    const rs_sequence *sequence = index->sequences + batch->sequences[i];
    return (uint64_t)(batch->levels[i] - first_new(sequence, batch->levels[i]));
}

/* Room for the texts after this step. */
static rs_status reserve_texts(rs_index *index, const rs_batch *batch, rs_error *error) {
    for (int32_t i = 0; i < batch->num_rows; i++) {
        rs_sequence *sequence = index->sequences + batch->sequences[i];
        if (!sequence->keep_text) {
            continue;
        }
        uint64_t needed = (uint64_t)(batch->levels[i] - sequence->start_level);
        rs_status status = rs_reserve(&index->memory, (void **)&sequence->text, &sequence->text_capacity, needed,
                                      sizeof *sequence->text);
        if (status != RS_OK) {
            return rs_memory_error(index, error, status, i);
        }
    }
    return RS_OK;
}

/* All rows or none. */
static rs_status index_rows(rs_index *index, const rs_batch *batch, rs_error *error) {
    uint64_t num_done = 0;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        uint64_t before = num_done;
        rs_status status = index_row(index, batch, i, &num_done);
        if (status != RS_OK) {
            rs_memory_error(index, error, status, i);
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

/* What the target has said of the predictions, up to where it first said something else. */
static void calibrate(rs_index *index, int32_t id, const int32_t *new_tokens, int32_t num_new) {
    const rs_prediction *predictions = index->predictions + (size_t)id * (size_t)rs_predictions_per_sequence(index);
    for (int32_t i = 0; i < index->sequences[id].num_predictions && i < num_new; i++) {
        rs_calibrate(index->calibration, predictions + i, new_tokens[i]);
        if (predictions[i].token != new_tokens[i]) {
            return;
        }
    }
}

static void learn(rs_index *index, rs_sequence *sequence, int32_t token, rs_lessons *lessons) {
    rs_lesson *lesson = lessons->lessons + lessons->num++;
    rs_context_tags(&sequence->recent, rs_salt(index, sequence), rs_own_salt(sequence), lesson->tags);
    rs_contexts_fetch(&index->contexts, lesson->tags, lesson->buckets);
    lesson->token = token;
    rs_recent_push(&sequence->recent, token);
    if (lessons->num == RS_MAX_LESSONS) {
        rs_contexts_learn(&index->contexts, &index->memory, lessons);
    }
}

/* Mode sam: learn from the new tokens of entry i. */
static void learn_row(rs_index *index, const rs_batch *batch, int32_t i, rs_lessons *lessons) {
    int32_t id = batch->sequences[i];
    rs_sequence *sequence = index->sequences + id;
    const int32_t *tokens = rs_row_tokens(batch, i);
    int32_t level = batch->levels[i];
    if (level > sequence->level) {
        calibrate(index, id, tokens + sequence->level, level - sequence->level);
    }
    if (level < sequence->level) {
        const rs_group *group = index->groups + sequence->group;
        sequence->recent = sequence->start_level > 0 ? group->prompt_end : (rs_recent){.num = 0};
    }
    for (int32_t position = first_new(sequence, level); position < level; position++) {
        learn(index, sequence, tokens[position], lessons);
    }
}

/* Move the sequence's place in the corpus along the new tokens of entry i. */
static void follow_corpus(rs_index *index, const rs_batch *batch, int32_t i) {
    rs_sequence *sequence = index->sequences + batch->sequences[i];
    const int32_t *tokens = rs_row_tokens(batch, i);
    int32_t level = batch->levels[i];
    if (level < sequence->level) {
        const rs_group *group = index->groups + sequence->group;
        sequence->cursor = sequence->start_level > 0 ? group->prompt_cursor : (rs_cursor){.len = 0};
    }
    for (int32_t position = first_new(sequence, level); position < level; position++) {
        rs_cursor_move(&index->corpus, &sequence->cursor, tokens[position]);
    }
}

static void commit_row(rs_index *index, const rs_batch *batch, int32_t i, uint64_t num_new) {
    int32_t id = batch->sequences[i];
    rs_sequence *sequence = index->sequences + id;
    int32_t level = batch->levels[i];
    if (level > sequence->level) {
        const int32_t *draft = index->drafts + (size_t)id * (size_t)index->options.num_speculative_tokens;
        index->totals.num_accepted_tokens +=
            (uint64_t)rs_num_accepted(draft, sequence->num_draft_tokens, rs_row_tokens(batch, i) + sequence->level,
                                      level - sequence->level);
    }
    if (level < sequence->level) {
        sequence->begun_anew = true;
        sequence->last = sequence->start;
        sequence->plain_level = sequence->start_level;
    }
    if (sequence->keep_text && num_new > 0) {
        int32_t first = first_new(sequence, level);
        memcpy(sequence->text + (first - sequence->start_level), rs_row_tokens(batch, i) + first,
               (size_t)num_new * sizeof *sequence->text);
    }
    index->groups[sequence->group].num_tokens += num_new;
    if (num_new > 0 && sequence->plain) {
        sequence->plain_level = level;
    }
    sequence->level = level;
    sequence->num_draft_tokens = 0;
    sequence->num_predictions = 0;
}

static void commit_rows(rs_index *index, const rs_batch *batch) {
    const rs_extension *extensions = index->extensions;
    rs_lessons lessons = {.num = 0};
    for (int32_t i = 0; i < batch->num_rows; i++) {
        uint64_t num_new = num_new_tokens(index, batch, i);
        if (index->options.mode == RS_MODE_SAM) {
            learn_row(index, batch, i, &lessons);
        }
        if (index->corpus.states != NULL) {
            follow_corpus(index, batch, i);
        }
        commit_row(index, batch, i, num_new);
        if (num_new > 0) {
            extensions += num_new;
            index->sequences[batch->sequences[i]].last = extensions[-1].after;
        }
    }
    if (index->options.mode == RS_MODE_SAM) {
        rs_contexts_learn(&index->contexts, &index->memory, &lessons);
    }
}

static double price(const rs_index *index, const rs_batch *batch) {
    return batch->min_token_prob > index->options.min_token_prob ? batch->min_token_prob
                                                                 : index->options.min_token_prob;
}

/* The draft of mode suffix_policy is not made token by token. */
static void draft_row_by_suffix(rs_index *index, const rs_batch *batch, int32_t i) {
    const rs_sequence *sequence = index->sequences + batch->sequences[i];
    int64_t at = (int64_t)i * index->options.num_speculative_tokens;
    batch->num_draft_tokens[i] = rs_suffix_policy(&index->groups[sequence->group].automaton, sequence->last,
                                                  &index->options, batch->max_draft_tokens[i], price(index, batch),
                                                  batch->draft_tokens + at, batch->survivals + at);
}

static void fetch_for_walks(rs_walk *const *walking, int32_t num) {
    for (int stage = 0; stage < RS_NUM_FETCH_STAGES; stage++) {
        for (int32_t i = 0; i < num; i++) {
            rs_walk_fetch(walking[i], stage);
        }
    }
}

/* Draft for entries first .. end - 1, at most WALKS_AT_A_TIME, their walks taking turns. */
static void draft_rows(rs_index *index, const rs_batch *batch, int32_t first, int32_t end) {
    const int32_t draft_len = index->options.num_speculative_tokens;
    rs_walk walks[WALKS_AT_A_TIME];
    rs_walk *walking[WALKS_AT_A_TIME]; /* those that go on */
    int32_t num_walking = 0;
    for (int32_t i = first; i < end; i++) {
        rs_walk *walk = walks + (i - first);
        walk->num_left = walk->num_predictions = 0;
        batch->num_draft_tokens[i] = 0;
        batch->match_lens[i] = 0;
        if (batch->max_draft_tokens[i] > 0) {
            int32_t id = batch->sequences[i];
            rs_prediction *predictions = index->predictions == NULL ? NULL :
                index->predictions + (size_t)id * (size_t)rs_predictions_per_sequence(index);
            batch->match_lens[i] = rs_walk_start(walk, index, index->sequences + id, batch->max_draft_tokens[i],
                                                 price(index, batch), predictions);
            if (index->options.mode == RS_MODE_SUFFIX_POLICY && !walk->in_corpus) {
                walk->num_left = 0;
                draft_row_by_suffix(index, batch, i);
            }
        }
        walking[num_walking] = walk;
        num_walking += walk->num_left > 0;
    }
    while (num_walking > 0) {
        if (index->options.mode == RS_MODE_SAM) {
            fetch_for_walks(walking, num_walking);
        }
        int32_t num_left = 0;
        for (int32_t w = 0; w < num_walking; w++) {
            rs_walk *walk = walking[w];
            int64_t i = first + (walk - walks);
            int64_t at = i * draft_len + batch->num_draft_tokens[i];
            /* Where there is none, what is written is behind the draft. */
            batch->draft_tokens[at] = rs_walk_next(walk, index);
            batch->survivals[at] = (float)walk->probability;
            batch->num_draft_tokens[i] += batch->draft_tokens[at] >= 0;
            walking[num_left] = walk;
            num_left += walk->num_left > 0;
        }
        num_walking = num_left;
    }
    for (int32_t i = first; i < end; i++) {
        index->sequences[batch->sequences[i]].num_predictions = walks[i - first].num_predictions;
    }
}

static void draft_all(rs_index *index, const rs_batch *batch) {
    for (int32_t first = 0; first < batch->num_rows; first += WALKS_AT_A_TIME) {
        int32_t left = batch->num_rows - first;
        draft_rows(index, batch, first, first + (left < WALKS_AT_A_TIME ? left : WALKS_AT_A_TIME));
    }
}

static int32_t num_drafting(const rs_batch *batch) {
    int32_t num = 0;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        num += batch->max_draft_tokens[i] > 0;
    }
    return num;
}

static void remember_draft(rs_index *index, const rs_batch *batch, int32_t i, bool any) {
    const size_t draft_len = (size_t)index->options.num_speculative_tokens;
    int32_t id = batch->sequences[i];
    int32_t num = batch->num_draft_tokens[i];
    if (num > 0) {
        memcpy(index->drafts + (size_t)id * draft_len, batch->draft_tokens + (size_t)i * draft_len,
               (size_t)num * sizeof *index->drafts);
        index->totals.num_drafts++;
        index->totals.num_draft_tokens += (uint64_t)num;
    }
    rs_sequence *sequence = index->sequences + id;
    sequence->num_draft_tokens = num;
    sequence->drafts = batch->max_draft_tokens[i] > 0;
    sequence->num_row_steps += sequence->drafts;
    /* One that has no room left for a draft, among others that draft, is only at its end. */
    sequence->plain = !any || sequence->num_row_steps == 0;
    sequence->num_drafted += num;
}

rs_status rs_step(rs_index *index, rs_batch *batch, rs_error *error) {
    if (index == NULL || batch == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "%s: must not be null", index == NULL ? "index" : "batch");
    }
    rs_status status = check_batch(batch, error);
    uint64_t num_new = 0;
    index->num_steps++;
    for (int32_t i = 0; i < batch->num_rows && status == RS_OK; i++) {
        status = check_row(index, batch, i, &num_new, error);
    }
    if (status != RS_OK) {
        return status;
    }
    status = rs_reserve(&index->memory, (void **)&index->extensions, &index->extensions_capacity, num_new,
                        sizeof *index->extensions);
    if (status != RS_OK) {
        return rs_memory_error(index, error, status, -1);
    }
    status = reserve_texts(index, batch, error);
    if (status == RS_OK) {
        status = index_rows(index, batch, error);
    }
    if (status == RS_OK) {
        commit_rows(index, batch);
        draft_all(index, batch);
        batch->num_drafting = num_drafting(batch);
        for (int32_t i = 0; i < batch->num_rows; i++) {
            remember_draft(index, batch, i, batch->num_drafting > 0);
        }
    }
    if (index->extensions_capacity > KEPT_EXTENSIONS) {
        rs_resize(&index->memory, (void **)&index->extensions, &index->extensions_capacity, 0,
                  sizeof *index->extensions);
    }
    rs_release(&index->memory, 1);
    return status;
}

void rs_set_levels(int32_t num_rows, const int32_t *rows, const int32_t *row_levels, const int32_t *last_levels,
                   int32_t may_draft, int32_t *levels, int32_t *max_draft_tokens) {
    for (int32_t i = 0; i < num_rows; i++) {
        int32_t level = row_levels[rows[i]];
        levels[i] = level;
        /* A level below 0 is for rs_step to refuse. */
        max_draft_tokens[i] = may_draft && level >= 0 && level < last_levels[i] ? last_levels[i] - level : 0;
    }
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
