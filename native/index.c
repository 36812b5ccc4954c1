/* The life of an index, its groups and its sequences. Steps are in step.c.
 *
 *     groups     [ 0: open ][ 1: closed ][ 2: open ]        one automaton each
 *                     ^          ^
 *                     |          +-- free_group, a list through next_free
 *     sequences  [ prompt of 0 ][ 1 ][ 2: closed ][ 3 ]     a state in the group's automaton each, `last`
 *                                     ^
 *                                     +-- free_sequence, a list through next, and so is first_behind
 *
 *     a sequence's text, and its levels:  start ....... at.level ....... level
 *                                                indexed       | is behind
 *
 * Invariants: an id is a slot of its table; every closed slot is in the table's list once, but for those of groups that
 * were given up and not named since; a group has as many running sequences as it says, and is idle while it has
 * none. What fails leaves everything as it was, but for capacities, idle groups and spare text. */
#include "index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_SPARE = 8 /* less than this part of a group's text is not worth that the rest is indexed again */ };

/* ---- the list of what is behind ---- */

static void unlink_behind(rs_index *index, rs_sequence *sequence) {
    if (sequence->is_behind) {
        *(sequence->previous < 0 ? &index->first_behind : &index->sequences[sequence->previous].next) = sequence->next;
        if (sequence->next >= 0) {
            index->sequences[sequence->next].previous = sequence->previous;
        }
        sequence->is_behind = false;
        index->num_behind--;
    }
}

/* After any change: whether something of it is not indexed, and may have room. */
static void note_behind(rs_index *index, rs_sequence *sequence) {
    const bool is_behind = sequence->at.level < sequence->level && !sequence->has_no_room && sequence->group >= 0;
    if (is_behind == sequence->is_behind) {
        return;
    }
    unlink_behind(index, sequence);
    if (is_behind) {
        const int32_t id = (int32_t)(sequence - index->sequences);
        sequence->next = index->first_behind;
        sequence->previous = -1;
        if (sequence->next >= 0) {
            index->sequences[sequence->next].previous = id;
        }
        index->first_behind = id;
        sequence->is_behind = true;
        index->num_behind++;
    }
}

/* ---- slots of sequences ---- */

static rs_status reserve_sequence(rs_index *index) {
    if (index->free_sequence >= 0) {
        return RS_OK;
    }
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

/* A sequence of this kind in a slot that was reserved, at the root. */
static rs_sequence *new_sequence(rs_index *index, rs_kind kind, int32_t group) {
    int32_t id = index->free_sequence;
    if (id < 0) {
        id = (int32_t)index->num_sequences++;
    } else {
        index->free_sequence = index->sequences[id].next;
    }
    rs_sequence *sequence = index->sequences + id;
    *sequence = (rs_sequence){.kind = kind, .next = -1, .previous = -1, .group = group};
    sequence->serial = kind == RS_PROMPT ? 0 : ++index->num_serials;
    return sequence;
}

void rs_sequence_free(rs_index *index, rs_sequence *sequence) {
    unlink_behind(index, sequence);
    rs_resize(&index->memory, (void **)&sequence->text, &sequence->text_capacity, 0, sizeof *sequence->text);
    *sequence = (rs_sequence){.next = index->free_sequence};
    index->free_sequence = (int32_t)(sequence - index->sequences);
}

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
            note_behind(index, sequence);
        } else {
            rs_sequence_free(index, sequence);
        }
    }
    index->num_idle -= group->idle_since > 0;
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

static void set_idle(rs_index *index, rs_group *group) {
    group->idle_since = ++index->num_idle_ever;
    index->num_idle++;
}

void rs_group_enter(rs_index *index, rs_group *group) {
    index->num_idle -= group->idle_since > 0;
    group->idle_since = 0;
    group->num_running++;
}

void rs_group_leave(rs_index *index, rs_group *group) {
    if (--group->num_running == 0) {
        set_idle(index, group);
        if (index->sequences[group->prompt].has_no_room) {
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
        status = reserve_sequence(index);
    }
    if (status == RS_OK) {
        status = rs_automaton_init(&opened.automaton, &index->memory, true);
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
    rs_sequence *prompt = new_sequence(index, RS_PROMPT, slot);
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

/* ---- sequences ---- */

/* To have it indexed from its start: the prompt, or the root. */
static void restart(rs_index *index, rs_sequence *sequence) {
    sequence->at = (rs_place){.level = 0};
    if (sequence->start > 0) {
        sequence->at = index->sequences[index->groups[sequence->group].prompt].at;
        sequence->at.level = sequence->start; /* also before all of the prompt is indexed */
    }
    sequence->followed = 0;
    note_behind(index, sequence);
}

void rs_sequence_cut(rs_index *index, rs_sequence *sequence, int32_t level) {
    sequence->level = level;
    sequence->num_predictions = 0;
    if (level < sequence->at.level) {
        restart(index, sequence);
        sequence->followed = level;
    } else if (level < sequence->followed) {
        sequence->followed = level;
    }
    note_behind(index, sequence);
}

static bool spare_text_leaves(rs_index *index);

static bool is_worth_spare_text(const rs_sequence *sequence) {
    return sequence->kind == RS_RUNNING || sequence->kind == RS_PROMPT;
}

rs_status rs_sequence_write(rs_index *index, rs_sequence *sequence, const int32_t *tokens, int32_t num_tokens) {
    const uint64_t num_before = (uint64_t)(sequence->level - sequence->start);
    rs_status status;
    do {
        status = rs_reserve(&index->memory, (void **)&sequence->text, &sequence->text_capacity,
                            num_before + (uint64_t)num_tokens, sizeof *sequence->text);
    } while (status != RS_OK && is_worth_spare_text(sequence) && spare_text_leaves(index));
    if (status != RS_OK) {
        index->num_texts_left_out++;
        return status;
    }
    if (num_tokens > 0) {
        memcpy(sequence->text + num_before, tokens, (size_t)num_tokens * sizeof *tokens);
    }
    sequence->level += num_tokens;
    note_behind(index, sequence);
    return RS_OK;
}

rs_status rs_sequence_open(rs_index *index, int32_t group, bool after_prompt, int32_t *sequence, rs_error *error) {
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
    }
    rs_group_enter(index, found);
    rs_status status = reserve_sequence(index);
    if (status != RS_OK) {
        rs_group_leave(index, found);
        return rs_memory_error(&index->memory, error, status);
    }
    rs_sequence *opened = new_sequence(index, RS_RUNNING, group);
    opened->start = opened->level = after_prompt ? index->sequences[found->prompt].level : 0;
    restart(index, opened);
    *sequence = (int32_t)(opened - index->sequences);
    return RS_OK;
}

rs_status rs_group_add(rs_index *index, int32_t group, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    rs_status status = rs_check_tokens(token_ids, num_tokens, "token_ids", error);
    int32_t id;
    if (status == RS_OK) {
        status = rs_sequence_open(index, group, true, &id, error);
    }
    if (status != RS_OK) {
        return status;
    }
    rs_sequence *text = index->sequences + id;
    text->kind = RS_TEXT;
    status = rs_sequence_write(index, text, token_ids, (int32_t)num_tokens);
    if (status != RS_OK || num_tokens == 0) {
        rs_sequence_free(index, text);
    }
    rs_group_leave(index, index->groups + group);
    return rs_memory_error(&index->memory, error, status);
}

static rs_status find(const rs_index *index, int32_t sequence, rs_sequence **found, rs_error *error) {
    *found = rs_find_sequence(index, sequence);
    return *found != NULL ? RS_OK : rs_fail(error, RS_EUNKNOWN, "sequence=%" PRId32 ": unknown", sequence);
}

rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    rs_group *left = found->kind == RS_RUNNING ? index->groups + found->group : NULL;
    rs_sequence_free(index, found);
    if (left != NULL) {
        rs_group_leave(index, left);
    }
    return RS_OK;
}

rs_status rs_sequence_park(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    if (found->kind == RS_RUNNING) {
        found->kind = RS_PARKED;
        rs_group_leave(index, index->groups + found->group);
    }
    return RS_OK;
}

rs_status rs_sequence_resume(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    if (found->group < 0) {
        return rs_fail(error, RS_EINVAL, "sequence=%" PRId32 ": its group is gone", sequence);
    }
    if (found->kind == RS_PARKED) {
        found->kind = RS_RUNNING;
        found->is_resumed = true;
        found->has_no_room = false;
        note_behind(index, found);
        rs_group_enter(index, index->groups + found->group);
    }
    return RS_OK;
}

rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    *num_tokens = found->level - found->start;
    int64_t num_copied = *num_tokens < capacity ? *num_tokens : capacity;
    if (num_copied > 0) {
        memcpy(tokens, found->text, (size_t)num_copied * sizeof *tokens);
    }
    return RS_OK;
}

/* ---- indexing ---- */

void rs_sequence_leave_out(rs_index *index, rs_sequence *sequence) {
    sequence->has_no_room = true;
    index->num_texts_left_out++;
    note_behind(index, sequence);
}

/* Index what the sequence's text goes on with, or go after it where it is indexed there already. */
static rs_status append(rs_index *index, rs_group *group, rs_sequence *sequence, int64_t num_tokens) {
    rs_place *at = &sequence->at;
    const int32_t *tokens = sequence->text + (at->level - sequence->start);
    for (int64_t i = 0; i < num_tokens; i++) {
        const int32_t token = tokens[i];
        if (at->level < sequence->followed) {
            at->last = *rs_find(&group->automaton, at->last, token);
        } else {
            rs_status status = rs_extend(&group->automaton, &at->last, token);
            if (status != RS_OK) {
                return status;
            }
            if (sequence->serial > 0) {
                uint32_t tags[RS_NUM_CONTEXTS];
                rs_context_tags(&at->recent, rs_own_salt(sequence->serial), tags);
                rs_contexts_learn(&index->contexts, &index->memory, tags, token);
            }
            group->num_tokens++;
        }
        rs_recent_push(&at->recent, token);
        if (index->corpus.states != NULL) {
            rs_cursor_move(&index->corpus, &at->cursor, token);
        }
        at->level++;
    }
    return RS_OK;
}

/* The sequences of this group that waited for its prompt begin after it. */
static void restart_all(rs_index *index, int32_t group) {
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        rs_sequence *sequence = index->sequences + i;
        if (sequence->kind != RS_CLOSED && sequence->kind != RS_PROMPT && sequence->group == group) {
            restart(index, sequence);
        }
    }
}

rs_status rs_sequence_index(rs_index *index, rs_sequence *sequence, int64_t max_tokens) {
    const int32_t group = sequence->group;
    const bool is_prompt = sequence->kind == RS_PROMPT;
    rs_status status;
    do {
        const int64_t num_behind = sequence->level - sequence->at.level;
        status = RS_OK;
        if (is_prompt || rs_is_whole(index, index->groups + group)) {
            status = append(index, index->groups + group, sequence, num_behind < max_tokens ? num_behind : max_tokens);
        }
    } while (status != RS_OK && is_worth_spare_text(sequence) && spare_text_leaves(index));
    note_behind(index, sequence);
    if (is_prompt && sequence->at.level == sequence->level) {
        restart_all(index, group);
    }
    return status;
}

/* Forget all text of a group but that of its sequences, which is to be indexed again. */
static void forget_spare_text(rs_index *index, int32_t group) {
    rs_group *forgetting = index->groups + group;
    rs_automaton_reset(&forgetting->automaton);
    forgetting->num_tokens = 0;
    rs_sequence *prompt = index->sequences + forgetting->prompt;
    restart(index, prompt);
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        rs_sequence *sequence = index->sequences + i;
        if (sequence->kind == RS_TEXT && sequence->group == group) {
            rs_sequence_free(index, sequence);
        }
    }
    restart_all(index, group);
}

/* Let all text but that of its sequences leave the group that has most of it; false where that is little everywhere. */
static bool spare_text_leaves(rs_index *index) {
    for (uint32_t i = 0; i < index->num_groups; i++) {
        index->groups[i].num_live = 0;
    }
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        const rs_sequence *sequence = index->sequences + i;
        if (sequence->kind != RS_CLOSED && sequence->kind != RS_TEXT && sequence->group >= 0) {
            const int32_t end = sequence->at.level > sequence->followed ? sequence->at.level : sequence->followed;
            index->groups[sequence->group].num_live += (uint64_t)(end - sequence->start);
        }
    }
    int32_t found = -1;
    uint64_t most = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        const uint64_t num_spare = group->num_tokens - group->num_live;
        if (group->open && num_spare > most && num_spare >= group->num_tokens / LEAST_SPARE) {
            most = num_spare;
            found = (int32_t)i;
        }
    }
    if (found >= 0) {
        forget_spare_text(index, found);
    }
    return found >= 0;
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
    rs_resize(memory, (void **)&index->groups, &index->groups_capacity, 0, sizeof *index->groups);
    rs_resize(memory, (void **)&index->sequences, &index->sequences_capacity, 0, sizeof *index->sequences);
    rs_resize(memory, (void **)&index->predictions, &index->predictions_capacity, 0, sizeof *index->predictions);
    index->num_groups = index->num_sequences = 0;
    index->num_idle = index->num_given_up = 0;
    index->free_group = index->free_sequence = index->first_behind = -1;
}

void rs_index_free(rs_index *index) {
    rs_index_clear(index);
    rs_release(&index->memory, UINT64_MAX);
    rs_contexts_free(&index->contexts, &index->memory);
    free(index);
}

void rs_index_stats(const rs_index *index, rs_stats *stats) {
    *stats = (rs_stats){.num_texts_left_out = index->num_texts_left_out, .num_bytes = index->memory.num_bytes};
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        const rs_sequence *sequence = index->sequences + i;
        stats->num_sequences += sequence->kind == RS_RUNNING;
        if (sequence->is_behind) {
            stats->num_tokens_behind += (uint64_t)(sequence->level - sequence->at.level);
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

/* Every closed slot is in its list exactly once. */
static bool free_slots_hold(const rs_index *index, bool groups) {
    uint32_t num_slots = groups ? index->num_groups : index->num_sequences;
    uint32_t num_closed = 0;
    for (uint32_t i = 0; i < num_slots; i++) {
        num_closed += groups ? !index->groups[i].open && !index->groups[i].given_up
                             : index->sequences[i].kind == RS_CLOSED;
    }
    uint32_t num_listed = 0;
    int32_t slot = groups ? index->free_group : index->free_sequence;
    for (; slot >= 0 && num_listed <= num_closed; num_listed++) {
        if ((uint32_t)slot >= num_slots ||
            (groups ? index->groups[slot].open : index->sequences[slot].kind != RS_CLOSED)) {
            return false;
        }
        slot = groups ? index->groups[slot].next_free : index->sequences[slot].next;
    }
    return num_listed == num_closed;
}

/* Every sequence that is behind is in the list of these exactly once. */
static bool list_of_behind_holds(const rs_index *index) {
    int32_t num = 0;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        num += index->sequences[i].is_behind;
    }
    int32_t previous = -1;
    for (int32_t id = index->first_behind; id >= 0; id = index->sequences[id].next) {
        if ((uint32_t)id >= index->num_sequences || !index->sequences[id].is_behind ||
            index->sequences[id].previous != previous || num-- == 0) {
            return false;
        }
        previous = id;
    }
    return num == 0;
}

const char *rs_tables_check(const rs_index *index) {
    int64_t num_running = 0;
    int32_t num_behind = 0;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        num_running += index->sequences[i].kind == RS_RUNNING;
        num_behind += index->sequences[i].is_behind;
    }
    int32_t num_idle = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        num_running -= group->num_running;
        num_idle += group->idle_since > 0;
        if (group->open ? group->given_up || (group->idle_since > 0) != (group->num_running == 0)
                        : group->idle_since > 0 || group->num_running > 0) {
            return "group: it is not open, idle or given up";
        }
    }
    if (num_running != 0 || num_idle != index->num_idle || num_behind != index->num_behind) {
        return "index: num_running, num_idle or num_behind is wrong";
    }
    const bool hold = free_slots_hold(index, true) && free_slots_hold(index, false) && list_of_behind_holds(index);
    return hold ? NULL : "index: broken list of slots";
}
