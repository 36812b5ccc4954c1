/* The life of an index and its groups. Sequences are in sequences.c, steps in step.c.
 *
 *     groups     [ 0: open ][ 1: closed ][ 2: open ]        one automaton each
 *                     ^          ^
 *                     |          +-- free_group, a list through next_free
 *     sequences  [ prompt of 0 ][ 1 ][ 2: closed ][ 3 ]     a state in the group's automaton each, `last`
 *                                     ^
 *                                     +-- free_sequence, a list through next, and so is first_behind
 *
 *     a sequence's text:  start ....... at.indexed ....... end    in levels: tokens of its row, with the prompt
 *                                indexed         | is behind
 *
 * Invariants: an id is a slot of its table; every closed slot is in the table's list once, but for those of groups that
 * were given up and not named since; a group has as many running sequences as it says, and is idle while it has
 * none. What fails leaves everything as it was, but for capacities, idle groups and spare text. */
#include "index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- groups ---- */

/* Its slot is not free yet. */
static void close_group(rs_index *index, rs_group *group) {
    const int32_t id = (int32_t)(group - index->groups);
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        rs_sequence *sequence = index->sequences + i;
        if (sequence->kind == RS_CLOSED || sequence->group != id) {
            continue;
        }
        if (sequence->kind == RS_PARKED) {
            sequence->group = -1;
            rs_sequence_note_behind(index, sequence);
        } else {
            rs_sequence_free(index, sequence);
        }
    }
    rs_automaton_free(&group->automaton);
    *group = (rs_group){.next_free = -1};
}

static void free_slot(rs_index *index, int32_t group) {
    index->groups[group].next_free = index->free_group;
    index->free_group = group;
}

static void give_up(rs_index *index, rs_group *group) {
    close_group(index, group);
    group->given_up = true;
    index->num_given_up++;
}

/* Close the group that has been idle longest; false where none is. */
static bool give_up_idle(void *owner) {
    rs_index *index = owner;
    rs_group *oldest = NULL;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        rs_group *group = index->groups + i;
        if (group->idle_since > 0 && (oldest == NULL || group->idle_since < oldest->idle_since)) {
            oldest = group;
        }
    }
    if (oldest != NULL) {
        give_up(index, oldest);
    }
    return oldest != NULL;
}

int32_t rs_group_given_up(rs_index *index) {
    for (uint32_t i = 0; index->num_given_up > 0 && i < index->num_groups; i++) {
        if (index->groups[i].given_up) {
            index->groups[i].given_up = false;
            index->num_given_up--;
            free_slot(index, (int32_t)i);
            return (int32_t)i;
        }
    }
    return -1;
}

void rs_group_enter(rs_group *group) {
    group->idle_since = 0;
    group->num_running++;
}

void rs_group_leave(rs_index *index, rs_group *group) {
    if (--group->num_running == 0) {
        group->idle_since = ++index->num_idle_ever;
        if (index->sequences[group->prompt].is_left_out) {
            give_up(index, group); /* nothing can be drafted in it */
        }
    }
}

rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens, int32_t *group,
                        rs_error *error) {
    rs_status status = rs_check_tokens(prompt_token_ids, num_prompt_tokens, "prompt_token_ids", error);
    if (status != RS_OK) {
        return status;
    }
    if (index->free_group < 0) {
        status = rs_reserve(&index->memory, (void **)&index->groups, &index->groups_capacity,
                            (uint64_t)index->num_groups + 1, sizeof *index->groups);
    }
    rs_group opened = {.open = true, .next_free = -1, .num_running = 1}; /* so that it does not make room itself */
    if (status == RS_OK) {
        status = rs_sequence_reserve(index);
    }
    if (status == RS_OK) {
        status = rs_automaton_init(&opened.automaton, &index->memory);
    }
    if (status != RS_OK) {
        return rs_memory_error(&index->memory, error, status);
    }
    int32_t slot = index->free_group;
    if (slot < 0) {
        slot = (int32_t)index->num_groups++;
    } else {
        index->free_group = index->groups[slot].next_free;
    }
    rs_sequence *prompt = rs_sequence_new(index, RS_PROMPT, slot);
    opened.prompt = (int32_t)(prompt - index->sequences);
    index->groups[slot] = opened;
    status = rs_sequence_write(index, prompt, prompt_token_ids, (int32_t)num_prompt_tokens);
    if (status != RS_OK) {
        close_group(index, index->groups + slot);
        free_slot(index, slot);
        return rs_memory_error(&index->memory, error, status);
    }
    rs_group_leave(index, index->groups + slot);
    *group = slot;
    return RS_OK;
}

rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error) {
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
    }
    if (found->num_running > 0) {
        return rs_fail(error, RS_EINVAL, "group=%" PRId32 ": %" PRId32 " of its sequences run", group,
                       found->num_running);
    }
    close_group(index, found);
    free_slot(index, group);
    return RS_OK;
}

/* ---- the index ---- */

int32_t rs_abi_version(void) { return RS_ABI_VERSION; }

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error) {
    if (options->num_speculative_tokens < 1 || options->num_speculative_tokens > RS_MAX_SPECULATIVE_TOKENS) {
        return rs_fail(error, RS_EINVAL, "num_speculative_tokens=%" PRId32 ": must be between 1 and %d",
                       options->num_speculative_tokens, (int)RS_MAX_SPECULATIVE_TOKENS);
    }
    rs_memory memory = {.max_bytes = options->max_bytes};
    rs_index *made = NULL;
    uint32_t capacity = 0;
    rs_status status = rs_resize(&memory, (void **)&made, &capacity, 1, sizeof *made);
    if (status != RS_OK) {
        return rs_memory_error(&memory, error, status);
    }
    memset(made, 0, sizeof *made);
    made->options = *options;
    made->memory = memory;
    made->memory.make_room = give_up_idle;
    made->memory.owner = made;
    made->free_group = made->free_sequence = made->first_behind = -1;
    rs_calibration_init(&made->calibration);
    status = rs_memory_error(&made->memory, error, rs_contexts_init(&made->contexts, &made->memory));
    if (status != RS_OK) {
        rs_index_free(made);
        return status;
    }
    *index = made;
    return RS_OK;
}

rs_status rs_corpus_add(rs_index *index, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    rs_status status = rs_check_tokens(token_ids, num_tokens, "token_ids", error);
    if (status != RS_OK) {
        return status;
    }
    if (index->num_groups > 0) {
        return rs_fail(error, RS_EINVAL, "corpus: must be whole before the first group is opened");
    }
    if (index->corpus.states == NULL) {
        status = rs_automaton_init(&index->corpus, &index->memory);
    }
    uint32_t last = RS_ROOT;
    for (int64_t i = 0; i < num_tokens && status == RS_OK; i++) {
        status = rs_extend(&index->corpus, &last, token_ids[i]);
    }
    return rs_memory_error(&index->memory, error, status);
}

void rs_index_free(rs_index *index) {
    for (uint32_t i = 0; i < index->num_groups; i++) {
        if (index->groups[i].open) {
            rs_automaton_free(&index->groups[i].automaton);
        }
    }
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        if (index->sequences[i].kind != RS_CLOSED) {
            rs_sequence_free(index, index->sequences + i);
        }
    }
    rs_memory *memory = &index->memory;
    if (index->corpus.states != NULL) {
        rs_automaton_free(&index->corpus);
    }
    rs_resize(memory, (void **)&index->groups, &index->groups_capacity, 0, sizeof *index->groups);
    rs_resize(memory, (void **)&index->sequences, &index->sequences_capacity, 0, sizeof *index->sequences);
    rs_resize(memory, (void **)&index->predictions, &index->predictions_capacity, 0, sizeof *index->predictions);
    rs_release(memory, UINT64_MAX);
    rs_contexts_free(&index->contexts, memory);
    free(index);
}

void rs_index_stats(const rs_index *index, rs_stats *stats) {
    *stats = (rs_stats){.num_texts_left_out = index->num_texts_left_out, .num_bytes = index->memory.num_bytes};
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        const rs_sequence *sequence = index->sequences + i;
        stats->num_sequences += sequence->kind == RS_RUNNING;
        if (sequence->is_behind) {
            stats->num_tokens_behind += (uint64_t)(sequence->end - sequence->at.indexed);
        }
    }
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        if (group->open) {
            stats->num_groups++;
            stats->num_states += group->automaton.num_states;
            stats->num_tokens += group->num_tokens;
        }
    }
}

/* ---- checking ---- */

/* Every slot that a new group may take is in their list exactly once. */
static bool free_groups_hold(const rs_index *index) {
    int64_t num = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        num += !index->groups[i].open && !index->groups[i].given_up;
    }
    for (int32_t id = index->free_group; id >= 0; id = index->groups[id].next_free) {
        if ((uint32_t)id >= index->num_groups || index->groups[id].open || num-- == 0) {
            return false;
        }
    }
    return num == 0;
}

static bool free_sequences_hold(const rs_index *index) {
    int64_t num = 0;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        num += index->sequences[i].kind == RS_CLOSED;
    }
    for (int32_t id = index->free_sequence; id >= 0; id = index->sequences[id].next) {
        if ((uint32_t)id >= index->num_sequences || index->sequences[id].kind != RS_CLOSED || num-- == 0) {
            return false;
        }
    }
    return num == 0;
}

const char *rs_tables_check(const rs_index *index) {
    int64_t num_running = 0;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        num_running += index->sequences[i].kind == RS_RUNNING;
    }
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        num_running -= group->num_running;
        if (group->open ? group->given_up || (group->idle_since > 0) != (group->num_running == 0)
                        : group->idle_since > 0 || group->num_running > 0) {
            return "group: it is not open, idle or given up";
        }
    }
    if (num_running != 0) {
        return "index: num_running is wrong";
    }
    const bool hold = free_groups_hold(index) && free_sequences_hold(index) && rs_behind_check(index);
    return hold ? NULL : "index: broken list of slots";
}
