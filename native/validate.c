/* Every invariant of an index, for tests: an automaton is checked state by state, what points from one table into
 * another is looked up there, and the bytes of all arrays are summed.
 *
 * Invariants: nothing is changed; of what is broken the first that is found is named. */
#include <inttypes.h>

#include "index.h"

/* Transition `token` of state `from` to `target`. NULL, or what is broken. */
static const char *check_transition(const rs_automaton *a, uint32_t from, int32_t token, uint32_t target,
                                    uint64_t *num_solid) {
    const rs_state *state = a->states + from;
    if (token < 0 || target == RS_ROOT || target >= a->num_states) {
        return "transition: token or target out of range";
    }
    const uint32_t *found = rs_find(a, from, token);
    if (found == NULL || *found != target) {
        return "transition: is not the one found under its token";
    }
    const rs_state *to = a->states + target;
    if (to->len < state->len + 1 || to->link == RS_NO_STATE) {
        return "transition: target is too short";
    }
    *num_solid += to->len == state->len + 1;
    if (from != RS_ROOT) {
        if (a->states[to->link].len > a->states[state->link].len + 1) {
            return "transition: target does not hold all strings it is reached with";
        }
        const uint32_t *above = rs_find(a, state->link, token);
        if (above == NULL || (*above != target && *above != to->link)) {
            return "transition: the suffix link's transition leads elsewhere";
        }
    }
    return NULL;
}

static const char *check_state(const rs_automaton *a, uint32_t at, uint64_t *num_transitions, uint64_t *num_solid) {
    const rs_state *state = a->states + at;
    if ((at == RS_ROOT) != (state->link == RS_NO_STATE) || (at == RS_ROOT) != (state->len == 0)) {
        return "state: only the root has len 0 and no suffix link";
    }
    if (at != RS_ROOT && (state->link >= a->num_states || a->states[state->link].len >= state->len)) {
        return "state: the suffix link does not lead to a shorter state";
    }
    if (at != RS_ROOT && a->counts && (state->count == 0 || state->count > UINT32_MAX / 2)) {
        return "state: occurrence count out of range";
    }
    if (state->token < 0) {
        return state->block == 0 ? NULL : "state: a block without a first transition";
    }
    const char *broken = check_transition(a, at, state->token, state->target, num_solid);
    uint32_t num = 0;
    const rs_transition *others = NULL;
    if (state->block != 0) {
        if (rs_block_offset(state->block) + rs_block_units(state->block) > a->pool.top) {
            return "state: block out of range";
        }
        others = rs_block_entries(&a->pool, state->block, &num);
        if (num == 0) {
            return "state: empty block";
        }
    }
    for (uint32_t i = 0; i < num && broken == NULL; i++) {
        broken = check_transition(a, at, others[i].token, others[i].target, num_solid);
    }
    *num_transitions += num + 1;
    return broken;
}

const char *rs_automaton_check(const rs_automaton *a) {
    if (a->num_states < 1 || a->num_states > a->capacity || a->pool.top > a->pool.capacity) {
        return "automaton: more states or blocks than there is room for";
    }
    uint64_t num_transitions = 0;
    uint64_t num_solid = 0;
    uint64_t num_units = rs_pool_num_free(&a->pool);
    if (num_units == UINT64_MAX) {
        return "pool: broken free list";
    }
    for (uint32_t at = 0; at < a->num_states; at++) {
        const char *broken = check_state(a, at, &num_transitions, &num_solid);
        if (broken != NULL) {
            return broken;
        }
        num_units += a->states[at].block == 0 ? 0 : rs_block_units(a->states[at].block);
    }
    if (num_transitions != a->num_transitions) {
        return "automaton: num_transitions is wrong";
    }
    if (num_solid != a->num_states - 1) {
        return "automaton: a state without exactly one transition from its longest string's prefix";
    }
    return num_units == a->pool.top ? NULL : "pool: blocks are lost or used twice";
}

static bool cursor_holds(const rs_index *index, const rs_sequence *sequence) {
    const rs_corpus *corpus = &index->corpus;
    rs_cursor cursor = sequence->at.cursor;
    if (cursor.state >= corpus->num_states || cursor.len > (uint32_t)sequence->at.level) {
        return false;
    }
    const rs_corpus_state *state = corpus->states + cursor.state;
    return cursor.state == RS_ROOT ? cursor.len == 0
                                   : cursor.len <= state->len && cursor.len > corpus->states[state->link].len;
}

static const char *check_sequence(const rs_index *index, const rs_sequence *sequence) {
    const rs_group *group = rs_find_group(index, sequence->group);
    if (group == NULL) {
        return "sequence: its group is not open";
    }
    const rs_automaton *a = &group->automaton;
    const int32_t start_level = rs_start_level(index, sequence);
    const int32_t level = sequence->at.level;
    if (sequence->at.last >= a->num_states ||
        (rs_is_whole(group) ? a->states[sequence->at.last].len != (uint32_t)level : level != start_level)) {
        return "sequence: at is not the place of its text";
    }
    if (level < start_level || (uint32_t)(level - start_level) > sequence->text_capacity) {
        return "sequence: its text is longer than there is room for";
    }
    if (index->corpus.states != NULL && !cursor_holds(index, sequence)) {
        return "sequence: its cursor is not in the corpus";
    }
    bool fit = sequence->num_predictions >= 0 &&
               sequence->num_predictions <= index->options.num_speculative_tokens;
    return fit ? NULL : "sequence: num_predictions out of range";
}

static uint64_t num_bytes_of(const rs_index *index) {
    uint64_t num_bytes = sizeof *index + rs_num_discarded(&index->memory) +
                         (uint64_t)index->groups_capacity * sizeof *index->groups +
                         (uint64_t)index->sequences_capacity * sizeof *index->sequences +
                         (uint64_t)index->predictions_capacity * sizeof *index->predictions +
                         (uint64_t)index->contexts.capacity * sizeof *index->contexts.buckets;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        num_bytes += (uint64_t)index->sequences[i].text_capacity * sizeof *index->sequences[i].text;
    }
    for (const rs_waiting *waiting = index->waiting; waiting != NULL; waiting = waiting->next) {
        num_bytes += rs_waiting_bytes(waiting->num_tokens);
    }
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_automaton *a = &index->groups[i].automaton;
        num_bytes += (uint64_t)a->capacity * sizeof *a->states + (uint64_t)a->pool.capacity * sizeof *a->pool.units;
    }
    return num_bytes;
}

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

static const char *check_tables(const rs_index *index) {
    int64_t num_sequences = 0;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        if (index->sequences[i].open) {
            const char *broken = check_sequence(index, index->sequences + i);
            if (broken != NULL) {
                return broken;
            }
            num_sequences++;
        }
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
    for (const rs_waiting *waiting = index->waiting; waiting != NULL; waiting = waiting->next) {
        const rs_group *group = rs_find_group(index, waiting->group);
        if (group == NULL || waiting->num_indexed >= waiting->num_tokens ||
            (waiting->is_prompt && group->prompt.level + waiting->num_tokens - waiting->num_indexed != group->prompt_len)) {
            return "waiting: its group is not open, or nothing is left of it";
        }
    }
    if (!free_slots_hold(index, true) || !free_slots_hold(index, false)) {
        return "index: broken list of closed slots";
    }
    const rs_memory *memory = &index->memory;
    if (num_bytes_of(index) != memory->num_bytes) {
        return "index: num_bytes is wrong";
    }
    return memory->max_bytes == 0 || memory->num_bytes <= memory->max_bytes ? NULL : "index: over budget";
}

rs_status rs_index_validate(const rs_index *index, rs_error *error) {
    const char *broken = index->corpus.states == NULL ? NULL : rs_corpus_check(&index->corpus);
    if (broken == NULL) {
        broken = check_tables(index);
    }
    if (broken == NULL) {
        broken = rs_contexts_check(&index->contexts);
    }
    if (broken == NULL) {
        broken = rs_calibration_check(&index->calibration);
    }
    if (broken != NULL) {
        return rs_fail(error, RS_ECORRUPT, "%s", broken);
    }
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        if (!group->open) {
            continue;
        }
        const rs_automaton *a = &group->automaton;
        broken = rs_automaton_check(a);
        if (broken == NULL && (group->prompt.last >= a->num_states ||
                               a->states[group->prompt.last].len != (uint32_t)group->prompt.level)) {
            broken = "group: prompt is not the place of its prompt";
        }
        if (broken != NULL) {
            return rs_fail(error, RS_ECORRUPT, "group %" PRIu32 ": %s", i, broken);
        }
    }
    return RS_OK;
}
