/* Groups: which are open, which are idle, who is in them; and what callers ask of them and of their sequences.
 *
 *     groups     [ 0: open ][ 1: closed ][ 2: open ]        one automaton each, and a list of sequences
 *                     ^          ^            ^
 *                     |          |            +-- oldest_idle, a list through newer
 *                     |          +-- free_group, a list through next_closed; and so is given_up
 *
 * Invariants: an id is a slot of its table; every closed slot is in free_group once, or in given_up while nobody knows that
 * the group was given up; between calls num_inside counts a group's running sequences, and it is idle while that is 0. */
#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "index.h"

rs_status rs_check_group(const rs_index *index, int32_t group, rs_error *error) {
    const bool is_open = group >= 0 && (uint32_t)group < index->num_groups && index->groups[group].is_open;
    return is_open ? RS_OK : rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
}

/* ---- which are open, and which are idle ---- */

static void unlink_idle(rs_index *index, const rs_group *group) {
    *(group->older < 0 ? &index->oldest_idle : &index->groups[group->older].newer) = group->newer;
    *(group->newer < 0 ? &index->newest_idle : &index->groups[group->newer].older) = group->older;
}

/* Its slot becomes the first of this list. */
static void close_group(rs_index *index, int32_t id, int32_t *list) {
    rs_group *group = index->groups + id;
    while (group->first != NULL) { /* not a prompt before what begins after it */
        rs_sequence_free(index, group->first);
    }
    rs_automaton_free(&group->automaton, &index->memory);
    *group = (rs_group){.next_closed = *list};
    *list = id;
}

void rs_group_free(rs_index *index, int32_t group) { close_group(index, group, &index->free_group); }

void rs_group_give_up(rs_index *index, int32_t group) {
    assert(index->groups[group].num_inside == 0);
    unlink_idle(index, index->groups + group);
    close_group(index, group, &index->given_up);
}

int32_t rs_group_given_up(rs_index *index) {
    const int32_t id = index->given_up;
    if (id >= 0) {
        index->given_up = index->groups[id].next_closed;
        index->groups[id].next_closed = index->free_group;
        index->free_group = id;
    }
    return id;
}

void rs_group_enter(rs_index *index, int32_t group) {
    if (index->groups[group].num_inside++ == 0) {
        unlink_idle(index, index->groups + group);
    }
}

void rs_group_leave(rs_index *index, int32_t group) {
    rs_group *left = index->groups + group;
    assert(left->num_inside > 0);
    if (--left->num_inside > 0) {
        return;
    }
    left->older = index->newest_idle;
    left->newer = -1;
    *(left->older < 0 ? &index->oldest_idle : &index->groups[left->older].newer) = group;
    index->newest_idle = group;
    if (left->give_up_when_idle) {
        rs_group_give_up(index, group);
    }
}

/* ---- what callers ask of groups ---- */

rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens, int32_t *group,
                        rs_error *error) {
    RS_TRY(rs_check_tokens(prompt_token_ids, num_prompt_tokens, "prompt_token_ids", error));
    const rs_memory *memory = &index->memory;
    if (index->free_group < 0) {
        const uint64_t num = (uint64_t)index->num_groups + 1;
        RS_TRY(rs_memory_error(memory, error, RS_RESERVE(memory, index->groups, index->groups_capacity, num)));
    }
    rs_group opened = {.is_open = true, .num_inside = 1}; /* so that it is not given up itself */
    RS_TRY(rs_memory_error(memory, error, rs_automaton_init(&opened.automaton, memory)));
    int32_t slot = index->free_group;
    if (slot < 0) {
        slot = (int32_t)index->num_groups++;
    } else {
        index->free_group = index->groups[slot].next_closed;
    }
    index->groups[slot] = opened;
    rs_sequence *prompt;
    rs_status status = rs_sequence_new(index, RS_PROMPT, slot, prompt_token_ids, num_prompt_tokens, &prompt);
    if (status != RS_OK) {
        rs_group_free(index, slot);
        return rs_memory_error(memory, error, status);
    }
    rs_group_leave(index, slot);
    *group = slot;
    return RS_OK;
}

rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error) {
    RS_TRY(rs_check_group(index, group, error));
    const rs_group *found = index->groups + group;
    if (found->num_inside > 0) {
        return rs_fail(error, RS_EINVAL, "group=%" PRId32 ": %" PRId32 " of its sequences run", group,
                       found->num_inside);
    }
    unlink_idle(index, found);
    rs_group_free(index, group);
    return RS_OK;
}

/* Enter the group for a new sequence, and leave it again unless that one runs. */
static rs_status add_sequence(rs_index *index, rs_kind kind, int32_t group, const int32_t *tokens, int64_t num_tokens,
                     rs_sequence **added, rs_error *error) {
    RS_TRY(rs_check_tokens(tokens, num_tokens, kind == RS_PROMPT ? "prompt_token_ids" : "token_ids", error));
    RS_TRY(rs_check_group(index, group, error));
    if (kind == RS_UNNAMED && num_tokens == 0) {
        return RS_OK;
    }
    rs_group_enter(index, group);
    rs_status status = rs_sequence_new(index, kind, group, tokens, num_tokens, added);
    if (status != RS_OK || kind != RS_RUNNING) {
        rs_group_leave(index, group);
    }
    return rs_memory_error(&index->memory, error, status);
}

rs_status rs_group_set_prompt(rs_index *index, int32_t group, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                              rs_error *error) {
    return add_sequence(index, RS_PROMPT, group, prompt_token_ids, num_prompt_tokens, &(rs_sequence *){NULL}, error);
}

rs_status rs_group_add(rs_index *index, int32_t group, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    return add_sequence(index, RS_UNNAMED, group, token_ids, num_tokens, &(rs_sequence *){NULL}, error);
}

/* ---- what they ask of sequences ---- */

rs_status rs_sequence_open(rs_index *index, int32_t group, int32_t *sequence, rs_error *error) {
    rs_sequence *opened;
    RS_TRY(add_sequence(index, RS_RUNNING, group, NULL, 0, &opened, error));
    *sequence = opened->id;
    return RS_OK;
}

static rs_status find_sequence(const rs_index *index, int32_t sequence, rs_sequence **found, rs_error *error) {
    *found = rs_find_sequence(index, sequence);
    return *found != NULL ? RS_OK : rs_fail(error, RS_EUNKNOWN, "sequence=%" PRId32 ": unknown", sequence);
}

rs_status rs_sequence_park(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    RS_TRY(find_sequence(index, sequence, &found, error));
    if (found->kind == RS_RUNNING) {
        rs_sequence_stop(index, found, RS_PARKED);
        rs_group_leave(index, found->group);
    }
    return RS_OK;
}

rs_status rs_sequence_resume(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    RS_TRY(find_sequence(index, sequence, &found, error));
    if (found->kind == RS_RUNNING) {
        return RS_OK;
    }
    rs_group_enter(index, found->group);
    rs_status status = rs_sequence_run(index, found);
    if (status != RS_OK) {
        rs_group_leave(index, found->group);
    }
    return rs_memory_error(&index->memory, error, status);
}

rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    RS_TRY(find_sequence(index, sequence, &found, error));
    const int32_t group = found->group;
    const bool runs = found->kind == RS_RUNNING;
    rs_sequence_stop(index, found, RS_UNNAMED);
    rs_sequence_free_unneeded(index, found);
    if (runs) {
        rs_group_leave(index, group);
    }
    return RS_OK;
}

rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error) {
    rs_sequence *found;
    RS_TRY(find_sequence(index, sequence, &found, error));
    *num_tokens = found->end - found->start;
    int64_t num_copied = *num_tokens < capacity ? *num_tokens : capacity;
    if (num_copied > 0) {
        memcpy(tokens, found->tokens, (size_t)num_copied * sizeof *tokens);
    }
    return RS_OK;
}
