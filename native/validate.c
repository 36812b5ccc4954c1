/* Every invariant of an index, for tests. Each module checks itself; here is what points from one into another, and the
 * sum of the bytes of all arrays.
 *
 * Invariants: nothing is changed; of what is broken the first that is found is named. */
#include <inttypes.h>

#include "index.h"

static const char *check_sequence(const rs_index *index, const rs_sequence *sequence) {
    const int32_t indexed = sequence->at.indexed;
    if (sequence->end < sequence->start || (uint32_t)(sequence->end - sequence->start) > sequence->text_capacity) {
        return "sequence: its text is longer than there is room for";
    }
    const rs_group *group = rs_find_group(index, sequence->group);
    if (group == NULL) {
        return "sequence: its group is not open";
    }
    const rs_automaton *a = &group->automaton;
    if (sequence->at.last >= a->num_states || (rs_waits_for_prompt(sequence)
                                                   ? indexed != sequence->start
                                                   : a->states[sequence->at.last].len != (uint32_t)indexed)) {
        return "sequence: at is not the place of its text";
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
                         (uint64_t)index->behind_capacity * sizeof *index->behind +
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
                           rs_tables_check(index),
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
