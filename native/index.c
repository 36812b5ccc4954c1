/* The life of an index, its groups and its sequences. Steps are in step.c.
 *
 *     groups     [ 0: open ][ 1: closed ][ 2: open ]        one automaton each
 *                     ^          ^
 *                     |          +-- free_group, a list through next_free
 *     sequences  [ 0 ][ 1 ][ 2: closed ][ 3 ]               a state in the group's automaton each, `last`
 *
 * Invariants: an id is a slot of its table; every closed slot is in the table's list once; a group has as many open
 * sequences as it says. What fails leaves everything as it was, but for capacities. */
#include "index.h"

#include <inttypes.h>
#include <string.h>

int32_t rs_abi_version(void) { return RS_ABI_VERSION; }

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error) {
    if (options->num_speculative_tokens < 1 || options->num_speculative_tokens > RS_MAX_SPECULATIVE_TOKENS) {
        return rs_fail(error, RS_EINVAL, -1, "num_speculative_tokens=%" PRId32 ": must be between 1 and %d",
                       options->num_speculative_tokens, (int)RS_MAX_SPECULATIVE_TOKENS);
    }
    rs_memory memory = {.max_bytes = options->max_bytes};
    rs_index *made = NULL;
    uint32_t capacity = 0;
    rs_status status = rs_resize(&memory, (void **)&made, &capacity, 1, sizeof *made);
    if (status != RS_OK) {
        return rs_memory_error(&memory, error, status, -1);
    }
    memset(made, 0, sizeof *made);
    made->options = *options;
    made->memory = memory;
    made->free_group = made->free_sequence = -1;
    rs_calibration_init(&made->calibration);
    if (options->corpus != NULL && !rs_corpus_open(&made->corpus, options->corpus, options->corpus_bytes)) {
        status = rs_fail(error, RS_EINVAL, -1, "corpus: %" PRIu64 " bytes that are no corpus", options->corpus_bytes);
    } else {
        status = rs_memory_error(&made->memory, error, rs_contexts_init(&made->contexts, &made->memory), -1);
    }
    if (status != RS_OK) {
        rs_index_free(made);
        return status;
    }
    *index = made;
    return RS_OK;
}

static void free_text(rs_index *index, rs_sequence *sequence) {
    rs_resize(&index->memory, (void **)&sequence->text, &sequence->text_capacity, 0, sizeof *sequence->text);
}

void rs_index_clear(rs_index *index) {
    for (uint32_t i = 0; i < index->num_groups; i++) {
        if (index->groups[i].open) {
            rs_automaton_free(&index->groups[i].automaton);
        }
    }
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        free_text(index, index->sequences + i);
    }
    rs_memory *memory = &index->memory;
    rs_resize(memory, (void **)&index->groups, &index->groups_capacity, 0, sizeof *index->groups);
    rs_resize(memory, (void **)&index->sequences, &index->sequences_capacity, 0, sizeof *index->sequences);
    rs_resize(memory, (void **)&index->predictions, &index->predictions_capacity, 0, sizeof *index->predictions);
    rs_resize(memory, (void **)&index->extensions, &index->extensions_capacity, 0, sizeof *index->extensions);
    index->num_groups = index->num_sequences = 0;
    index->free_group = index->free_sequence = -1;
}

void rs_index_free(rs_index *index) {
    rs_index_clear(index);
    rs_release(&index->memory, UINT64_MAX);
    rs_contexts_free(&index->contexts, &index->memory);
    rs_memory memory = index->memory;
    void *block = index;
    uint32_t capacity = 1;
    rs_resize(&memory, &block, &capacity, 0, sizeof *index);
}

/* ---- groups ---- */

/* Up to max_tokens more of it. */
static rs_status index_prompt(rs_index *index, rs_group *group, const int32_t *tokens, int64_t max_tokens) {
    for (; max_tokens > 0 && !rs_is_whole(group); max_tokens--) {
        const int32_t token = tokens[group->prompt_level];
        rs_extension extension;
        rs_status status = rs_extend(&group->automaton, group->prompt_last, token, &extension);
        if (status != RS_OK) {
            return status;
        }
        group->prompt_last = extension.after;
        rs_recent_push(&group->prompt_recent, token);
        if (index->corpus.states != NULL) {
            rs_cursor_move(&index->corpus, &group->prompt_cursor, token);
        }
        group->prompt_level++;
        group->num_tokens++;
    }
    return RS_OK;
}

rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                        int32_t *group, rs_error *error) {
    return rs_group_open_part(index, prompt_token_ids, num_prompt_tokens, num_prompt_tokens, group, error);
}

rs_status rs_group_open_part(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                             int64_t num_indexed, int32_t *group, rs_error *error) {
    rs_status status = rs_check_tokens(prompt_token_ids, num_prompt_tokens, "prompt_token_ids", error);
    if (status != RS_OK) {
        return status;
    }
    if (index->free_group < 0) {
        status = rs_reserve(&index->memory, (void **)&index->groups, &index->groups_capacity,
                            (uint64_t)index->num_groups + 1, sizeof *index->groups);
        if (status != RS_OK) {
            return rs_memory_error(&index->memory, error, status, -1);
        }
    }
    rs_group opened = {.open = true, .next_free = -1, .prompt_len = (int32_t)num_prompt_tokens};
    status = rs_automaton_init(&opened.automaton, &index->memory, true);
    if (status == RS_OK) {
        status = index_prompt(index, &opened, prompt_token_ids, num_indexed);
    }
    if (status != RS_OK) {
        rs_automaton_free(&opened.automaton);
        return rs_memory_error(&index->memory, error, status, -1);
    }
    *group = index->free_group;
    if (*group < 0) {
        *group = (int32_t)index->num_groups++;
    } else {
        index->free_group = index->groups[*group].next_free;
    }
    index->groups[*group] = opened;
    return RS_OK;
}

rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error) {
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "group=%" PRId32 ": unknown", group);
    }
    if (found->num_sequences > 0) {
        return rs_fail(error, RS_EINVAL, -1, "group=%" PRId32 ": %" PRId32 " of its sequences are open", group,
                       found->num_sequences);
    }
    rs_automaton_free(&found->automaton);
    *found = (rs_group){.next_free = index->free_group};
    index->free_group = group;
    return RS_OK;
}

rs_status rs_group_extend(rs_index *index, int32_t group, const int32_t *prompt_token_ids, int64_t max_tokens,
                          int64_t *num_left, rs_error *error) {
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "group=%" PRId32 ": unknown", group);
    }
    rs_status status = index_prompt(index, found, prompt_token_ids, max_tokens);
    *num_left = found->prompt_len - found->prompt_level;
    for (uint32_t i = 0; *num_left == 0 && i < index->num_sequences; i++) {
        rs_sequence *sequence = index->sequences + i;
        if (sequence->open && sequence->group == group && sequence->level == rs_start_level(index, sequence)) {
            rs_sequence_restart(index, sequence); /* it waited for the end of the prompt */
        }
    }
    return rs_memory_error(&index->memory, error, status, -1);
}

/* ---- sequences ---- */

void rs_sequence_restart(const rs_index *index, rs_sequence *sequence) {
    const rs_group *group = index->groups + sequence->group;
    if (sequence->after_prompt) {
        sequence->level = group->prompt_len;
        sequence->last = group->prompt_last;
        sequence->recent = group->prompt_recent;
        sequence->cursor = group->prompt_cursor;
    } else {
        sequence->level = 0;
        sequence->last = RS_ROOT;
        sequence->recent = (rs_recent){.num = 0};
        sequence->cursor = (rs_cursor){.len = 0};
    }
}

static rs_status reserve_sequence(rs_index *index) {
    uint64_t needed = (uint64_t)index->num_sequences + 1;
    uint64_t num_predictions = needed * (uint64_t)index->options.num_speculative_tokens;
    rs_status status = rs_reserve(&index->memory, (void **)&index->predictions, &index->predictions_capacity,
                                  num_predictions, sizeof *index->predictions);
    if (status != RS_OK) {
        return status;
    }
    return rs_reserve(&index->memory, (void **)&index->sequences, &index->sequences_capacity, needed,
                      sizeof *index->sequences);
}

rs_status rs_sequence_open(rs_index *index, int32_t group, int32_t after_prompt, int32_t *sequence, rs_error *error) {
    if (after_prompt != 0 && after_prompt != 1) {
        return rs_fail(error, RS_EINVAL, -1, "after_prompt=%" PRId32 ": must be 0 or 1", after_prompt);
    }
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "group=%" PRId32 ": unknown", group);
    }
    int32_t slot = index->free_sequence;
    if (slot >= 0) {
        index->free_sequence = index->sequences[slot].next_free;
    } else {
        rs_status status = reserve_sequence(index);
        if (status != RS_OK) {
            return rs_memory_error(&index->memory, error, status, -1);
        }
        slot = (int32_t)index->num_sequences++;
    }
    rs_sequence *opened = index->sequences + slot;
    *opened = (rs_sequence){.open = true,
                            .next_free = -1,
                            .group = group,
                            .after_prompt = after_prompt != 0,
                            .serial = ++index->num_opened};
    rs_sequence_restart(index, opened);
    found->num_sequences++;
    *sequence = slot;
    return RS_OK;
}

rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found = rs_find_sequence(index, sequence);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "sequence=%" PRId32 ": unknown", sequence);
    }
    index->groups[found->group].num_sequences--;
    free_text(index, found);
    *found = (rs_sequence){.next_free = index->free_sequence};
    index->free_sequence = sequence;
    return RS_OK;
}

rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error) {
    const rs_sequence *found = rs_find_sequence(index, sequence);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, -1, "sequence=%" PRId32 ": unknown", sequence);
    }
    *num_tokens = found->level - rs_start_level(index, found);
    int64_t num_copied = *num_tokens < capacity ? *num_tokens : capacity;
    if (num_copied > 0) {
        memcpy(tokens, found->text, (size_t)num_copied * sizeof *tokens);
    }
    return RS_OK;
}

void rs_index_stats(const rs_index *index, rs_stats *stats) {
    *stats = (rs_stats){.num_bytes = index->memory.num_bytes};
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        if (group->open) {
            stats->num_groups++;
            stats->num_sequences += (uint64_t)group->num_sequences;
            stats->num_states += group->automaton.num_states;
            stats->num_tokens += group->num_tokens;
        }
    }
}
