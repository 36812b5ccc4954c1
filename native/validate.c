/* Every invariant of an index, for tests. Lower modules check themselves; here are the tables, what points from one module
 * into another, and the sum of the bytes of all arrays.
 *
 * Invariants: nothing is changed; of what is broken the first that is found is named. */
#include <inttypes.h>

#include "index.h"

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

static const char *check_tables(const rs_index *index) {
    const bool hold = groups_hold(index) && slots_hold(index) && rs_queue_check(index);
    return hold ? NULL : "index: broken list of groups, sequences or slots";
}

static const char *check_sequence(const rs_index *index, const rs_sequence *sequence) {
    const int32_t indexed = sequence->at.indexed;
    if (sequence->end < sequence->start || (uint32_t)(sequence->end - sequence->start) > sequence->text_capacity) {
        return "sequence: its text is longer than there is room for";
    }
    const rs_group *group = rs_find_group(index, sequence->group, NULL);
    if (group == NULL) {
        return "sequence: its group is not open";
    }
    const rs_automaton *a = &group->automaton;
    if (sequence->at.last >= a->num_states || (rs_waits_for_prompt(sequence)
                                                   ? indexed != sequence->start
                                                   : a->states[sequence->at.last].len != (uint32_t)indexed)) {
        return "sequence: at is not the position of its text";
    }
    if (indexed < sequence->start || indexed > sequence->end || sequence->followed > sequence->end) {
        return "sequence: its levels are not in order";
    }
    const rs_sequence *prompt = sequence->prompt;
    if ((prompt == NULL) != (sequence->kind == RS_PROMPT) || sequence->start != (prompt == NULL ? 0 : prompt->end) ||
        (prompt != NULL && (prompt->kind != RS_PROMPT || prompt->group != sequence->group))) {
        return "sequence: it does not begin after a prompt of its group, or is none";
    }
    if (index->corpus.states != NULL && !rs_match_holds(&index->corpus, sequence->at.corpus, indexed)) {
        return "sequence: its match is not in the corpus";
    }
    bool fit = sequence->num_predictions >= 0 &&
               (uint32_t)sequence->num_predictions <= sequence->predictions_capacity &&
               (sequence->predictions != NULL) == (sequence->kind == RS_RUNNING);
    return fit ? NULL : "sequence: num_predictions out of range";
}

static uint64_t num_bytes_of_automaton(const rs_automaton *a) {
    return (uint64_t)a->capacity * sizeof *a->states + (uint64_t)a->pool.capacity * sizeof *a->pool.units;
}

static uint64_t num_bytes_of(const rs_index *index) {
    uint64_t num_bytes = sizeof *index +
                         (uint64_t)index->groups_capacity * sizeof *index->groups +
                         (uint64_t)index->slots_capacity * sizeof *index->slots +
                         (uint64_t)index->queue_capacity * sizeof *index->queue +
                         (uint64_t)index->contexts.capacity * sizeof *index->contexts.buckets +
                         num_bytes_of_automaton(&index->corpus);
    for (uint32_t i = 0; i < index->num_slots; i++) {
        const rs_sequence *sequence = index->slots[i].sequence;
        if (sequence != NULL) {
            num_bytes += sizeof *sequence + (uint64_t)sequence->text_capacity * sizeof *sequence->text +
                         (uint64_t)sequence->predictions_capacity * sizeof *sequence->predictions;
        }
    }
    for (uint32_t i = 0; i < index->num_groups; i++) {
        num_bytes += num_bytes_of_automaton(&index->groups[i].automaton);
    }
    return num_bytes;
}

static const char *check_bytes(const rs_index *index) {
    const rs_memory *memory = &index->memory;
    if (num_bytes_of(index) != memory->num_bytes) {
        return "index: num_bytes is wrong";
    }
    return memory->max_bytes == 0 || memory->num_bytes <= memory->max_bytes ? NULL : "index: over budget";
}

rs_status rs_index_validate(const rs_index *index, rs_error *error) {
    const char *found[] = {index->corpus.states == NULL ? NULL : rs_automaton_check(&index->corpus),
                           rs_contexts_check(&index->contexts),
                           rs_calibration_check(&index->calibration),
                           check_tables(index),
                           check_bytes(index)};
    for (size_t i = 0; i < sizeof found / sizeof found[0]; i++) {
        if (found[i] != NULL) {
            return rs_fail(error, RS_ECORRUPT, "%s", found[i]);
        }
    }
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const char *broken = index->groups[i].open ? rs_automaton_check(&index->groups[i].automaton) : NULL;
        if (broken != NULL) {
            return rs_fail(error, RS_ECORRUPT, "group %" PRIu32 ": %s", i, broken);
        }
    }
    for (uint32_t i = 0; i < index->num_slots; i++) {
        const rs_sequence *sequence = index->slots[i].sequence;
        const char *broken = sequence != NULL ? check_sequence(index, sequence) : NULL;
        if (broken != NULL) {
            return rs_fail(error, RS_ECORRUPT, "%s", broken);
        }
    }
    return RS_OK;
}
