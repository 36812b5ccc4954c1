/* The life of an index, its groups and its sequences. Steps are in step.c.
 *
 *     groups     [ 0: open ][ 1: closed ][ 2: open ]        one automaton each
 *                     ^          ^
 *                     |          +-- free_group, a list through next_free
 *     sequences  [ 0 ][ 1 ][ 2: closed ][ 3 ]               a state in the group's automaton each, `last`
 *
 * Invariants: an id is a slot of its table; every closed slot is in the table's list once, but for those of groups that
 * were given up and not named since; a group has as many open sequences as it says, and is idle while it has
 * none. What fails leaves everything as it was, but for capacities and idle groups. */
#include "index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- groups ---- */

/* Its slot is not free yet. */
static void close_group(rs_index *index, rs_group *group) {
    rs_waiting_drop(&index->waiting, &index->memory, (int32_t)(group - index->groups));
    index->num_idle -= group->idle_since > 0;
    rs_automaton_free(&group->automaton);
    *group = (rs_group){.next_free = -1};
}

static void free_slot(rs_index *index, int32_t group) {
    index->groups[group].next_free = index->free_group;
    index->free_group = group;
}

/* Close the group that has been idle longest; false where none is. The only place where an index gives up text. */
static bool give_up_idle(void *owner) {
    rs_index *index = owner;
    rs_group *oldest = NULL;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        rs_group *group = index->groups + i;
        if (group->idle_since > 0 && (oldest == NULL || group->idle_since < oldest->idle_since)) {
            oldest = group;
        }
    }
    if (oldest == NULL) {
        return false;
    }
    close_group(index, oldest);
    oldest->given_up = true;
    index->num_given_up++;
    return true;
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

static void set_idle(rs_index *index, rs_group *group) {
    group->idle_since = ++index->num_idle_ever;
    index->num_idle++;
}

void rs_group_enter(rs_index *index, rs_group *group) {
    index->num_idle -= group->idle_since > 0;
    group->idle_since = 0;
    group->num_sequences++;
}

void rs_group_leave(rs_index *index, rs_group *group) {
    if (--group->num_sequences == 0) {
        set_idle(index, group);
    }
    while (index->num_idle > index->options.max_idle_groups) {
        give_up_idle(index);
    }
}

rs_status rs_append(rs_index *index, rs_group *group, rs_place *at, uint64_t serial, const int32_t *tokens,
                    int64_t num_tokens) {
    for (int64_t i = 0; i < num_tokens; i++) {
        const int32_t token = tokens[i];
        rs_status status = rs_extend(&group->automaton, &at->last, token);
        if (status != RS_OK) {
            return status;
        }
        if (serial > 0) {
            uint32_t tags[RS_NUM_CONTEXTS];
            rs_context_tags(&at->recent, rs_own_salt(serial), tags);
            rs_contexts_learn(&index->contexts, &index->memory, tags, token);
        }
        rs_recent_push(&at->recent, token);
        if (index->corpus.states != NULL) {
            rs_cursor_move(&index->corpus, &at->cursor, token);
        }
        at->level++;
        group->num_tokens++;
    }
    return RS_OK;
}

rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                        int64_t max_tokens, int32_t *group, rs_error *error) {
    rs_status status = rs_check_tokens(prompt_token_ids, num_prompt_tokens, "prompt_token_ids", error);
    if (status != RS_OK) {
        return status;
    }
    if (max_tokens < 0) {
        return rs_fail(error, RS_EINVAL, "max_tokens=%" PRId64 ": must not be negative", max_tokens);
    }
    if (index->free_group < 0) {
        status = rs_reserve(&index->memory, (void **)&index->groups, &index->groups_capacity,
                            (uint64_t)index->num_groups + 1, sizeof *index->groups);
        if (status != RS_OK) {
            return rs_memory_error(&index->memory, error, status);
        }
    }
    const int32_t slot = index->free_group < 0 ? (int32_t)index->num_groups : index->free_group;
    const int64_t now = num_prompt_tokens < max_tokens ? num_prompt_tokens : max_tokens;
    rs_group opened = {.open = true, .next_free = -1, .prompt_len = (int32_t)num_prompt_tokens};
    status = rs_automaton_init(&opened.automaton, &index->memory, true);
    if (status == RS_OK) {
        status = rs_append(index, &opened, &opened.prompt, 0, prompt_token_ids, now);
    }
    if (status == RS_OK && now < num_prompt_tokens) {
        status = rs_waiting_add(&index->waiting, &index->memory, slot, true, prompt_token_ids + now,
                                num_prompt_tokens - now);
    }
    if (status != RS_OK) {
        rs_automaton_free(&opened.automaton);
        return rs_memory_error(&index->memory, error, status);
    }
    if (index->free_group < 0) {
        index->num_groups++;
    } else {
        index->free_group = index->groups[slot].next_free;
    }
    index->groups[slot] = opened;
    set_idle(index, index->groups + slot);
    *group = slot;
    return RS_OK;
}

rs_status rs_group_add(rs_index *index, int32_t group, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    if (rs_find_group(index, group) == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
    }
    rs_status status = rs_check_tokens(token_ids, num_tokens, "token_ids", error);
    if (status != RS_OK || num_tokens == 0) {
        return status;
    }
    rs_group_enter(index, index->groups + group);
    status = rs_waiting_add(&index->waiting, &index->memory, group, false, token_ids, num_tokens);
    rs_group_leave(index, index->groups + group);
    return rs_memory_error(&index->memory, error, status);
}

rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error) {
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
    }
    if (found->num_sequences > 0) {
        return rs_fail(error, RS_EINVAL, "group=%" PRId32 ": %" PRId32 " of its sequences are open", group,
                       found->num_sequences);
    }
    close_group(index, found);
    free_slot(index, group);
    return RS_OK;
}

/* ---- sequences ---- */

void rs_sequence_restart(const rs_index *index, rs_sequence *sequence) {
    sequence->at = sequence->after_prompt ? index->groups[sequence->group].prompt : (rs_place){.level = 0};
    sequence->at.level = rs_start_level(index, sequence); /* also before all of the prompt is indexed */
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

rs_status rs_sequence_open(rs_index *index, int32_t group, bool after_prompt, int32_t *sequence, rs_error *error) {
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
    }
    rs_group_enter(index, found);
    if (index->free_sequence < 0) {
        rs_status status = reserve_sequence(index);
        if (status != RS_OK) {
            rs_group_leave(index, found);
            return rs_memory_error(&index->memory, error, status);
        }
        *sequence = (int32_t)index->num_sequences++;
    } else {
        *sequence = index->free_sequence;
        index->free_sequence = index->sequences[*sequence].next_free;
    }
    rs_sequence *opened = index->sequences + *sequence;
    *opened = (rs_sequence){.open = true,
                            .next_free = -1,
                            .group = group,
                            .after_prompt = after_prompt,
                            .serial = ++index->num_serials};
    rs_sequence_restart(index, opened);
    return RS_OK;
}

static void free_text(rs_index *index, rs_sequence *sequence) {
    rs_resize(&index->memory, (void **)&sequence->text, &sequence->text_capacity, 0, sizeof *sequence->text);
}

rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found = rs_find_sequence(index, sequence);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "sequence=%" PRId32 ": unknown", sequence);
    }
    rs_group *group = index->groups + found->group;
    free_text(index, found);
    *found = (rs_sequence){.next_free = index->free_sequence};
    index->free_sequence = sequence;
    rs_group_leave(index, group);
    return RS_OK;
}

rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error) {
    const rs_sequence *found = rs_find_sequence(index, sequence);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "sequence=%" PRId32 ": unknown", sequence);
    }
    *num_tokens = found->at.level - rs_start_level(index, found);
    int64_t num_copied = *num_tokens < capacity ? *num_tokens : capacity;
    if (num_copied > 0) {
        memcpy(tokens, found->text, (size_t)num_copied * sizeof *tokens);
    }
    return RS_OK;
}

/* ---- the index ---- */

int32_t rs_abi_version(void) { return RS_ABI_VERSION; }

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error) {
    if (options->num_speculative_tokens < 1 || options->num_speculative_tokens > RS_MAX_SPECULATIVE_TOKENS) {
        return rs_fail(error, RS_EINVAL, "num_speculative_tokens=%" PRId32 ": must be between 1 and %d",
                       options->num_speculative_tokens, (int)RS_MAX_SPECULATIVE_TOKENS);
    }
    if (options->max_idle_groups < 0) {
        return rs_fail(error, RS_EINVAL, "max_idle_groups=%" PRId32 ": must not be negative", options->max_idle_groups);
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
    made->free_group = made->free_sequence = -1;
    rs_calibration_init(&made->calibration);
    if (options->corpus != NULL && !rs_corpus_open(&made->corpus, options->corpus, options->corpus_bytes)) {
        status = rs_fail(error, RS_EINVAL, "corpus: %" PRIu64 " bytes that are no corpus", options->corpus_bytes);
    } else {
        status = rs_memory_error(&made->memory, error, rs_contexts_init(&made->contexts, &made->memory));
    }
    if (status != RS_OK) {
        rs_index_free(made);
        return status;
    }
    *index = made;
    return RS_OK;
}

void rs_index_clear(rs_index *index) {
    rs_waiting_drop(&index->waiting, &index->memory, -1);
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
    index->num_groups = index->num_sequences = 0;
    index->num_idle = index->num_given_up = 0;
    index->free_group = index->free_sequence = -1;
}

void rs_index_free(rs_index *index) {
    rs_index_clear(index);
    rs_release(&index->memory, UINT64_MAX);
    rs_contexts_free(&index->contexts, &index->memory);
    free(index);
}

void rs_index_stats(const rs_index *index, rs_stats *stats) {
    *stats = (rs_stats){.num_waiting_tokens = rs_waiting_num_tokens(index->waiting),
                        .num_bytes = index->memory.num_bytes};
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

/* ---- checking ---- */

/* Every closed slot is in its list exactly once. */
static bool free_slots_hold(const rs_index *index, bool groups) {
    uint32_t num_slots = groups ? index->num_groups : index->num_sequences;
    uint32_t num_closed = 0;
    for (uint32_t i = 0; i < num_slots; i++) {
        num_closed += groups ? !index->groups[i].open && !index->groups[i].given_up : !index->sequences[i].open;
    }
    uint32_t num_listed = 0;
    int32_t slot = groups ? index->free_group : index->free_sequence;
    for (; slot >= 0 && num_listed <= num_closed; num_listed++) {
        bool open = (uint32_t)slot >= num_slots || (groups ? index->groups[slot].open : index->sequences[slot].open);
        if (open) {
            return false;
        }
        slot = groups ? index->groups[slot].next_free : index->sequences[slot].next_free;
    }
    return num_listed == num_closed;
}

const char *rs_tables_check(const rs_index *index) {
    int64_t num_sequences = 0;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        num_sequences += index->sequences[i].open;
    }
    int32_t num_idle = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        num_sequences -= group->num_sequences;
        num_idle += group->idle_since > 0;
        if (group->open ? group->given_up || (group->idle_since > 0) != (group->num_sequences == 0)
                        : group->idle_since > 0 || group->num_sequences > 0) {
            return "group: it is not open, idle or given up";
        }
    }
    if (num_sequences != 0 || num_idle != index->num_idle) {
        return "groups: num_sequences or num_idle is wrong";
    }
    const bool hold = free_slots_hold(index, true) && free_slots_hold(index, false);
    return hold ? NULL : "index: broken list of closed slots";
}
