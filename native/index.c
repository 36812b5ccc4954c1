#include "index.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int32_t rs_abi_version(void) { return RS_ABI_VERSION; }

rs_status rs_fail(rs_error *error, rs_status status, int32_t row, const char *format, ...) {
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->message, sizeof error->message, format, arguments);
        va_end(arguments);
        error->row = row;
    }
    return status;
}

rs_status rs_memory_error(const rs_index *index, rs_error *error, rs_status status, int32_t row) {
    if (status == RS_EBUDGET) {
        return rs_fail(error, status, row, "max_bytes=%" PRIu64 ": reached, %" PRIu64 " bytes are in use",
                       index->memory.max_bytes, index->memory.num_bytes);
    }
    return status == RS_OK ? status : rs_fail(error, status, row, "out of memory");
}

static rs_status check_options(const rs_options *options, rs_error *error) {
    if (options->num_speculative_tokens < 1 || options->num_speculative_tokens > RS_MAX_SPECULATIVE_TOKENS) {
        return rs_fail(error, RS_EINVAL, -1, "num_speculative_tokens=%" PRId32 ": must be between 1 and %d",
                       options->num_speculative_tokens, (int)RS_MAX_SPECULATIVE_TOKENS);
    }
    if (options->mode < RS_MODE_EARLIEST || options->mode > RS_MODE_SUFFIX_POLICY) {
        return rs_fail(error, RS_EINVAL, -1, "mode=%" PRId32 ": unknown", options->mode);
    }
    if (options->min_match_len < 1) {
        return rs_fail(error, RS_EINVAL, -1, "min_match_len=%" PRId32 ": must be at least 1", options->min_match_len);
    }
    if (!(options->max_spec_factor >= 0.0 && isfinite(options->max_spec_factor))) {
        return rs_fail(error, RS_EINVAL, -1, "max_spec_factor=%g: must be finite and not negative",
                       options->max_spec_factor);
    }
    if (!(options->min_token_prob >= 0.0 && options->min_token_prob <= 1.0)) {
        return rs_fail(error, RS_EINVAL, -1, "min_token_prob=%g: must be between 0 and 1", options->min_token_prob);
    }
    if (options->share_contexts != 0 && options->share_contexts != 1) {
        return rs_fail(error, RS_EINVAL, -1, "share_contexts=%" PRId32 ": must be 0 or 1", options->share_contexts);
    }
    if (options->corpus != NULL && options->corpus_margin < 1) {
        return rs_fail(error, RS_EINVAL, -1, "corpus_margin=%" PRId32 ": must be at least 1", options->corpus_margin);
    }
    return RS_OK;
}

static void free_text(rs_index *index, rs_sequence *sequence) {
    rs_resize(&index->memory, (void **)&sequence->text, &sequence->text_capacity, 0, sizeof *sequence->text);
}

/* What mode sam learns, in every text and for as long as the index lives. */
static rs_status make_experience(rs_index *index) {
    if (index->options.mode != RS_MODE_SAM) {
        return RS_OK;
    }
    rs_status status = rs_resize(&index->memory, (void **)&index->calibration, &index->calibration_capacity, 1,
                                 sizeof *index->calibration);
    if (status == RS_OK) {
        rs_calibration_init(index->calibration);
        status = rs_contexts_init(&index->contexts, &index->memory);
    }
    return status;
}

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error) {
    if (options == NULL || index == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "%s: must not be null", options == NULL ? "options" : "index");
    }
    rs_status status = check_options(options, error);
    if (status != RS_OK) {
        return status;
    }
    rs_memory memory = {.max_bytes = options->max_bytes};
    rs_index *made = NULL;
    uint32_t capacity = 0;
    status = rs_resize(&memory, (void **)&made, &capacity, 1, sizeof *made);
    if (status != RS_OK) {
        rs_index nothing = {.memory = memory};
        return rs_memory_error(&nothing, error, status, -1);
    }
    memset(made, 0, sizeof *made);
    made->options = *options;
    made->memory = memory;
    made->free_groups = made->free_sequences = (rs_free_slots){.first = -1, .newest = -1};
    if (options->corpus != NULL && !rs_corpus_open(&made->corpus, options->corpus, options->corpus_bytes)) {
        rs_index_free(made);
        return rs_fail(error, RS_EINVAL, -1, "corpus: %" PRIu64 " bytes that are no corpus", options->corpus_bytes);
    }
    status = make_experience(made);
    if (status != RS_OK) {
        rs_memory_error(made, error, status, -1);
        rs_index_free(made);
        return status;
    }
    *index = made;
    return RS_OK;
}

/* What is large of it is freed later, as that of a closed group is. */
static void forget_everything(rs_index *index) {
    for (uint32_t i = 0; i < index->num_groups; i++) {
        if (index->groups[i].open) {
            rs_automaton_discard(&index->groups[i].automaton);
        }
    }
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        free_text(index, index->sequences + i);
    }
    rs_memory *memory = &index->memory;
    rs_resize(memory, (void **)&index->groups, &index->groups_capacity, 0, sizeof *index->groups);
    rs_resize(memory, (void **)&index->sequences, &index->sequences_capacity, 0, sizeof *index->sequences);
    rs_resize(memory, (void **)&index->drafts, &index->drafts_capacity, 0, sizeof *index->drafts);
    rs_resize(memory, (void **)&index->predictions, &index->predictions_capacity, 0, sizeof *index->predictions);
    rs_resize(memory, (void **)&index->extensions, &index->extensions_capacity, 0, sizeof *index->extensions);
    index->num_groups = index->num_sequences = 0;
    index->free_groups = index->free_sequences = (rs_free_slots){.first = -1, .newest = -1};
}

void rs_index_free(rs_index *index) {
    if (index == NULL) {
        return;
    }
    forget_everything(index);
    rs_release(&index->memory, UINT64_MAX);
    rs_contexts_free(&index->contexts, &index->memory);
    rs_resize(&index->memory, (void **)&index->calibration, &index->calibration_capacity, 0,
              sizeof *index->calibration);
    rs_memory memory = index->memory;
    void *block = index;
    uint32_t capacity = 1;
    rs_resize(&memory, &block, &capacity, 0, sizeof *index);
}

rs_status rs_index_clear(rs_index *index, rs_error *error) {
    if (index == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "index: must not be null");
    }
    forget_everything(index);
    return RS_OK;
}

/* The slot is not taken until take_slot. */
static rs_status find_group_slot(rs_index *index, int32_t *slot) {
    if (index->free_groups.first >= 0) {
        *slot = index->free_groups.first;
        return RS_OK;
    }
    *slot = (int32_t)index->num_groups;
    return rs_reserve(&index->memory, (void **)&index->groups, &index->groups_capacity,
                      (uint64_t)index->num_groups + 1, sizeof *index->groups);
}

static rs_status find_sequence_slot(rs_index *index, int32_t *slot) {
    if (index->free_sequences.first >= 0) {
        *slot = index->free_sequences.first;
        return RS_OK;
    }
    uint64_t needed = (uint64_t)index->num_sequences + 1;
    uint64_t draft_len = (uint64_t)index->options.num_speculative_tokens;
    *slot = (int32_t)index->num_sequences;
    rs_status status = rs_reserve(&index->memory, (void **)&index->drafts, &index->drafts_capacity,
                                  needed * draft_len, sizeof *index->drafts);
    if (status == RS_OK) {
        uint64_t num_predictions = needed * (uint64_t)rs_predictions_per_sequence(index);
        status = rs_reserve(&index->memory, (void **)&index->predictions, &index->predictions_capacity,
                            num_predictions, sizeof *index->predictions);
    }
    if (status == RS_OK) {
        status = rs_reserve(&index->memory, (void **)&index->sequences, &index->sequences_capacity, needed,
                            sizeof *index->sequences);
    }
    return status;
}

static void take_slot(rs_free_slots *slots, uint32_t *num_slots, int32_t slot, int32_t next_free) {
    if (slots->first != slot) {
        ++*num_slots;
        return;
    }
    slots->first = next_free;
    if (next_free < 0) {
        slots->newest = -1;
    }
}

rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                        int32_t *group, rs_error *error) {
    if (index == NULL || group == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "%s: must not be null", index == NULL ? "index" : "group");
    }
    if (num_prompt_tokens < 0 || num_prompt_tokens > RS_MAX_TEXT_TOKENS) {
        return rs_fail(error, RS_EINVAL, -1, "num_prompt_tokens=%" PRId64 ": out of range", num_prompt_tokens);
    }
    if (prompt_token_ids == NULL && num_prompt_tokens > 0) {
        return rs_fail(error, RS_EINVAL, -1, "prompt_token_ids: must not be null");
    }
    for (int64_t i = 0; i < num_prompt_tokens; i++) {
        if (prompt_token_ids[i] < 0) {
            return rs_fail(error, RS_EINVAL, -1, "prompt_token_ids[%" PRId64 "]=%" PRId32 ": must not be negative", i,
                           prompt_token_ids[i]);
        }
    }
    int32_t slot;
    rs_group opened = {.open = true, .next_free = -1, .prompt_len = (int32_t)num_prompt_tokens};
    rs_status status = find_group_slot(index, &slot);
    if (status == RS_OK) {
        status = rs_automaton_init(&opened.automaton, &index->memory, index->options.mode != RS_MODE_EARLIEST);
    }
    rs_extension extension = {.after = RS_ROOT};
    for (int64_t i = 0; i < num_prompt_tokens && status == RS_OK; i++) {
        status = rs_extend(&opened.automaton, opened.prompt_last, prompt_token_ids[i], RS_FULL_WEIGHT, RS_PROMPT,
                           &extension);
        opened.prompt_last = extension.after;
        rs_recent_push(&opened.prompt_end, prompt_token_ids[i]);
        if (index->corpus.states != NULL) {
            rs_cursor_move(&index->corpus, &opened.prompt_cursor, prompt_token_ids[i]);
        }
    }
    if (status != RS_OK) {
        if (opened.automaton.memory != NULL) {
            rs_automaton_free(&opened.automaton);
        }
        return rs_memory_error(index, error, status, -1);
    }
    opened.num_tokens = (uint64_t)num_prompt_tokens;
    bool reused = index->free_groups.first == slot;
    take_slot(&index->free_groups, &index->num_groups, slot, reused ? index->groups[slot].next_free : -1);
    index->groups[slot] = opened;
    *group = slot;
    return RS_OK;
}

rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error) {
    if (index == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "index: must not be null");
    }
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "group=%" PRId32 ": unknown", group);
    }
    if (found->num_sequences > 0) {
        return rs_fail(error, RS_EINVAL, -1, "group=%" PRId32 ": %" PRId32 " of its sequences are open", group,
                       found->num_sequences);
    }
    rs_automaton_discard(&found->automaton);
    *found = (rs_group){.next_free = -1};
    if (index->free_groups.newest >= 0) {
        index->groups[index->free_groups.newest].next_free = group;
    } else {
        index->free_groups.first = group;
    }
    index->free_groups.newest = group;
    return RS_OK;
}

static uint8_t new_speaker(rs_group *group, int32_t weight) {
    if (weight < RS_FULL_WEIGHT) {
        return RS_OLDER_POLICIES;
    }
    return (uint8_t)(RS_FIRST_SEQUENCE + group->num_speakers++ % (RS_NUM_SPEAKERS - RS_FIRST_SEQUENCE));
}

rs_status rs_sequence_open(rs_index *index, int32_t group, int32_t after_prompt, int32_t weight, int32_t keep_text,
                           int32_t *sequence, rs_error *error) {
    if (index == NULL || sequence == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "%s: must not be null", index == NULL ? "index" : "sequence");
    }
    if (after_prompt != 0 && after_prompt != 1) {
        return rs_fail(error, RS_EINVAL, -1, "after_prompt=%" PRId32 ": must be 0 or 1", after_prompt);
    }
    if (keep_text != 0 && keep_text != 1) {
        return rs_fail(error, RS_EINVAL, -1, "keep_text=%" PRId32 ": must be 0 or 1", keep_text);
    }
    if (weight < 1 || weight > RS_FULL_WEIGHT) {
        return rs_fail(error, RS_EINVAL, -1, "weight=%" PRId32 ": must be between 1 and %d", weight, RS_FULL_WEIGHT);
    }
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "group=%" PRId32 ": unknown", group);
    }
    int32_t slot;
    rs_status status = find_sequence_slot(index, &slot);
    if (status != RS_OK) {
        return rs_memory_error(index, error, status, -1);
    }
    rs_sequence opened = {.open = true,
                          .next_free = -1,
                          .group = group,
                          .speaker = new_speaker(found, weight),
                          .weight = (uint32_t)weight,
                          .keep_text = keep_text != 0,
                          .serial = ++index->num_opened};
    if (after_prompt) {
        opened.start = opened.last = found->prompt_last;
        opened.start_level = opened.level = found->prompt_len;
        opened.recent = found->prompt_end;
        opened.cursor = found->prompt_cursor;
    }
    opened.plain = true;
    opened.plain_level = opened.level;
    bool reused = index->free_sequences.first == slot;
    take_slot(&index->free_sequences, &index->num_sequences, slot, reused ? index->sequences[slot].next_free : -1);
    index->sequences[slot] = opened;
    found->num_sequences++;
    found->num_live[opened.speaker]++;
    *sequence = slot;
    return RS_OK;
}

rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error) {
    if (index == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "index: must not be null");
    }
    rs_sequence *found = rs_find_sequence(index, sequence);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "sequence=%" PRId32 ": unknown", sequence);
    }
    index->groups[found->group].num_sequences--;
    index->groups[found->group].num_live[found->speaker]--;
    free_text(index, found);
    *found = (rs_sequence){.next_free = -1};
    if (index->free_sequences.newest >= 0) {
        index->sequences[index->free_sequences.newest].next_free = sequence;
    } else {
        index->free_sequences.first = sequence;
    }
    index->free_sequences.newest = sequence;
    return RS_OK;
}

rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error) {
    if (index == NULL || num_tokens == NULL || (tokens == NULL && capacity > 0)) {
        return rs_fail(error, RS_EINVAL, -1, "%s: must not be null",
                       index == NULL ? "index" : num_tokens == NULL ? "num_tokens" : "tokens");
    }
    const rs_sequence *found = rs_find_sequence(index, sequence);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "sequence=%" PRId32 ": unknown", sequence);
    }
    if (!found->keep_text) {
        return rs_fail(error, RS_EINVAL, -1, "keep_text=0: the sequence keeps no text");
    }
    if (capacity < 0) {
        return rs_fail(error, RS_EINVAL, -1, "capacity=%" PRId64 ": must not be negative", capacity);
    }
    *num_tokens = found->level - found->start_level;
    int64_t num_copied = *num_tokens < capacity ? *num_tokens : capacity;
    if (num_copied > 0) {
        memcpy(tokens, found->text, (size_t)num_copied * sizeof *tokens);
    }
    return RS_OK;
}

void rs_index_stats(const rs_index *index, rs_stats *stats) {
    *stats = index->totals;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        if (group->open) {
            stats->num_groups++;
            stats->num_sequences += (uint64_t)group->num_sequences;
            stats->num_states += group->automaton.num_states;
            stats->num_transitions += group->automaton.num_transitions;
            stats->num_tokens += group->num_tokens;
        }
    }
    stats->num_bytes = index->memory.num_bytes;
}
