/* The life of an index and its groups. Sequences are in sequences.c, steps in step.c.
 *
 *     groups     [ 0: open ][ 1: closed ][ 2: open ]        one automaton each, and a list of sequences, the latest first
 *                     ^          ^            ^
 *                     |          |            +-- oldest_idle, a list through newer
 *                     |          +-- free_group, a list through next_free; and so is given_up
 *     slots      [ prompt of 0 ][ 1 ][ 2: closed ][ 3 ]     of sequences; each has a state in the automaton, `last`
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

/* Idle groups are in a list. */
static void unlink_idle(rs_index *index, const rs_group *group) {
    *(group->older < 0 ? &index->oldest_idle : &index->groups[group->older].newer) = group->newer;
    *(group->newer < 0 ? &index->newest_idle : &index->groups[group->newer].older) = group->older;
}

/* Its slot goes into this list. */
static void close_group(rs_index *index, int32_t id, int32_t *slots) {
    rs_group *group = index->groups + id;
    while (group->first != NULL) { /* a prompt comes after all that begins after it */
        rs_sequence_free(index, group->first);
    }
    rs_automaton_free(&group->automaton);
    *group = (rs_group){.next_free = *slots};
    *slots = id;
}

/* Close the group that has been idle longest; false where none is. */
static bool give_up_idle(void *owner) {
    rs_index *index = owner;
    const int32_t oldest = index->oldest_idle;
    if (oldest >= 0) {
        unlink_idle(index, index->groups + oldest);
        close_group(index, oldest, &index->given_up);
    }
    return oldest >= 0;
}

int32_t rs_group_given_up(rs_index *index) {
    const int32_t id = index->given_up;
    if (id >= 0) {
        index->given_up = index->groups[id].next_free;
        index->groups[id].next_free = index->free_group;
        index->free_group = id;
    }
    return id;
}

void rs_group_enter(rs_index *index, int32_t group) {
    if (index->groups[group].num_running++ == 0) {
        unlink_idle(index, index->groups + group);
    }
}

void rs_group_leave(rs_index *index, int32_t group) {
    rs_group *left = index->groups + group;
    if (--left->num_running > 0) {
        return;
    }
    if (left->is_thin) {
        close_group(index, group, &index->given_up);
        return;
    }
    left->older = index->newest_idle;
    left->newer = -1;
    *(left->older < 0 ? &index->oldest_idle : &index->groups[left->older].newer) = group;
    index->newest_idle = group;
}

static rs_status new_prompt(rs_index *index, int32_t group, const int32_t *tokens, int64_t num_tokens) {
    rs_sequence *prompt;
    rs_status status = rs_sequence_new(index, RS_PROMPT, group, NULL, tokens, num_tokens, &prompt);
    if (status == RS_OK) {
        index->groups[group].prompt = prompt;
    }
    return status;
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
    rs_group opened = {.open = true, .num_running = 1}; /* so that it does not make room itself */
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
    index->groups[slot] = opened;
    status = new_prompt(index, slot, prompt_token_ids, num_prompt_tokens);
    if (status != RS_OK) {
        close_group(index, slot, &index->free_group);
        return rs_memory_error(&index->memory, error, status);
    }
    rs_group_leave(index, slot);
    *group = slot;
    return RS_OK;
}

rs_status rs_require_group(const rs_index *index, int32_t group, rs_error *error) {
    bool is_open = rs_find_group(index, group) != NULL;
    return is_open ? RS_OK : rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
}

rs_status rs_group_set_prompt(rs_index *index, int32_t group, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                              rs_error *error) {
    rs_status status = rs_check_tokens(prompt_token_ids, num_prompt_tokens, "prompt_token_ids", error);
    if (status == RS_OK) {
        status = rs_require_group(index, group, error);
    }
    if (status != RS_OK) {
        return status;
    }
    rs_group_enter(index, group);
    rs_sequence *old = index->groups[group].prompt;
    status = new_prompt(index, group, prompt_token_ids, num_prompt_tokens);
    rs_prompt_free_if_old(index, old);
    rs_group_leave(index, group);
    return rs_memory_error(&index->memory, error, status);
}

rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error) {
    if (rs_require_group(index, group, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    const rs_group *found = index->groups + group;
    if (found->num_running > 0) {
        return rs_fail(error, RS_EINVAL, "group=%" PRId32 ": %" PRId32 " of its sequences run", group,
                       found->num_running);
    }
    unlink_idle(index, found);
    close_group(index, group, &index->free_group);
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
    made->free_group = made->given_up = made->oldest_idle = made->newest_idle = made->free_slot = -1;
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
            close_group(index, (int32_t)i, &index->free_group);
        }
    }
    rs_memory *memory = &index->memory;
    if (index->corpus.states != NULL) {
        rs_automaton_free(&index->corpus);
    }
    rs_resize(memory, (void **)&index->groups, &index->groups_capacity, 0, sizeof *index->groups);
    rs_resize(memory, (void **)&index->slots, &index->slots_capacity, 0, sizeof *index->slots);
    rs_resize(memory, (void **)&index->behind, &index->behind_capacity, 0, sizeof *index->behind);
    rs_contexts_free(&index->contexts, memory);
    free(index);
}

void rs_index_stats(const rs_index *index, rs_stats *stats) {
    *stats = (rs_stats){.num_texts_left_out = index->num_texts_left_out, .num_bytes = index->memory.num_bytes};
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        if (group->open) {
            stats->num_groups++;
            stats->num_states += group->automaton.num_states;
            stats->num_tokens += group->num_tokens;
        }
        for (const rs_sequence *each = group->first; each != NULL; each = each->next) {
            stats->num_sequences += each->kind == RS_RUNNING;
            stats->num_tokens_behind += each->is_left_out ? 0 : (uint64_t)(each->end - each->at.indexed);
        }
    }
}

/* ---- checking ---- */

static bool groups_hold(const rs_index *index) {
    int64_t num_closed = 0, num_idle = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        int32_t num_running = 0;
        for (const rs_sequence *each = group->first; each != NULL; each = each->next) {
            num_running += each->kind == RS_RUNNING;
            if (!group->open || each->group != (int32_t)i || (each->next != NULL && each->next->previous != each)) {
                return false;
            }
        }
        num_closed += !group->open;
        num_idle += group->open && num_running == 0;
        if (num_running != group->num_running) {
            return false;
        }
    }
    const int32_t lists[] = {index->free_group, index->given_up};
    for (int i = 0; i < 2; i++) {
        for (int32_t id = lists[i]; id >= 0; id = index->groups[id].next_free) {
            if (index->groups[id].open || num_closed-- == 0) {
                return false;
            }
        }
    }
    int32_t older = -1;
    for (int32_t id = index->oldest_idle; id >= 0; older = id, id = index->groups[id].newer) {
        if (index->groups[id].num_running > 0 || index->groups[id].older != older || num_idle-- == 0) {
            return false;
        }
    }
    return num_closed == 0 && num_idle == 0 && older == index->newest_idle;
}

static bool slots_hold(const rs_index *index) {
    int64_t num = (int64_t)index->num_slots - index->num_open;
    for (int32_t id = index->free_slot; id >= 0; id = index->slots[id].next_free) {
        if ((uint32_t)id >= index->num_slots || index->slots[id].sequence != NULL || num-- == 0) {
            return false;
        }
    }
    return num == 0;
}

const char *rs_tables_check(const rs_index *index) {
    const bool hold = groups_hold(index) && slots_hold(index) && rs_behind_check(index);
    return hold ? NULL : "index: broken list of groups, sequences or slots";
}
