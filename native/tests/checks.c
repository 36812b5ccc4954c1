/* Each part of an index by itself, the tables, what points from one part into another, and the sum of the bytes of all
 * arrays. The bounds and the order of the queue are said here once more, apart from the core's. */
#include "checks.h"

static const float MOST_WEIGHT = 4.0F / 3.0F;
enum { LEAST_OBSERVATIONS = 2, MOST_OBSERVATIONS = 250 };

/* ---- the automaton ---- */

/* The number of units in the free lists; UINT64_MAX: a list is broken. */
static uint64_t num_free_units(const rs_pool *pool) {
    uint64_t num_free = 0;
    for (uint32_t k = 0; k < RS_NUM_BLOCK_SIZES; k++) {
        for (uint32_t block = pool->free_blocks[k]; block != 0;) {
            uint32_t offset = rs_block_offset(block);
            num_free += rs_block_units(block);
            if (rs_block_units(block) != 1U << k || offset + (1U << k) > pool->top || num_free > pool->top) {
                return UINT64_MAX;
            }
            block = pool->units[offset].target;
        }
    }
    return num_free;
}

/* Transition `token` of state `from` to `target`. NULL, or what is broken. */
static const char *check_transition(const rs_automaton *a, uint32_t from, int32_t token, uint32_t target,
                                    uint64_t *num_solid) {
    const rs_state *state = a->states + from;
    if (token < 0 || target == RS_ROOT || target >= a->num_states) {
        return "transition: token or target out of range";
    }
    const uint32_t *found = rs_automaton_find(a, from, token);
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
        const uint32_t *above = rs_automaton_find(a, state->link, token);
        if (above == NULL || (*above != target && *above != to->link)) {
            return "transition: the suffix link's transition leads elsewhere";
        }
    }
    return NULL;
}

static const char *check_state(const rs_automaton *a, uint32_t at, uint64_t *num_solid) {
    const rs_state *state = a->states + at;
    if ((at == RS_ROOT) != (state->link == RS_NO_STATE) || (at == RS_ROOT) != (state->len == 0)) {
        return "state: only the root has len 0 and no suffix link";
    }
    if (at != RS_ROOT && (state->link >= a->num_states || a->states[state->link].len >= state->len)) {
        return "state: the suffix link does not lead to a shorter state";
    }
    if (at != RS_ROOT && (state->count == 0 || state->count > UINT32_MAX / 2)) {
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
    return broken;
}

const char *rs_automaton_check(const rs_automaton *a) {
    if (a->num_states < 1 || a->num_states > a->capacity || a->pool.top > a->pool.capacity) {
        return "automaton: more states or blocks than there is room for";
    }
    uint64_t num_solid = 0;
    uint64_t num_units = num_free_units(&a->pool);
    if (num_units == UINT64_MAX) {
        return "pool: broken free list";
    }
    for (uint32_t at = 0; at < a->num_states; at++) {
        const char *broken = check_state(a, at, &num_solid);
        if (broken != NULL) {
            return broken;
        }
        num_units += a->states[at].block == 0 ? 0 : rs_block_units(a->states[at].block);
    }
    if (num_solid != a->num_states - 1) {
        return "automaton: a state without exactly one transition from its longest string's prefix";
    }
    return num_units == a->pool.top ? NULL : "pool: blocks are lost or used twice";
}

/* ---- what was learned ---- */

static const char *check_contexts(const rs_contexts *contexts) {
    uint32_t num_used = 0;
    for (uint32_t i = 0; i < contexts->num_buckets * RS_CONTEXT_WAYS; i++) {
        const rs_context_bucket *bucket = contexts->buckets + i / RS_CONTEXT_WAYS;
        uint32_t way = i % RS_CONTEXT_WAYS;
        uint32_t tag = bucket->tags[way];
        if (tag == 0) {
            continue;
        }
        num_used++;
        if ((tag & RS_MAX_CONFIDENCE) == 0 || bucket->tokens[way] < 0 ||
            rs_context_bucket_of(contexts, tag) != bucket || rs_context_find(bucket, tag) != way) {
            return "contexts: a slot that is neither free nor in its place";
        }
    }
    return num_used == contexts->num_used ? NULL : "contexts: num_used is wrong";
}

/* False for what is no number, too. */
static bool within(float value, float low, float high) { return value >= low && value <= high; }

static bool weights_hold(const rs_weights *weights) {
    bool hold = within(weights->bias, -MOST_WEIGHT, MOST_WEIGHT);
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        hold = hold && within(weights->experts[RS_OWN][e], -MOST_WEIGHT, MOST_WEIGHT) &&
               within(weights->experts[RS_RIVAL][e], -MOST_WEIGHT, MOST_WEIGHT);
    }
    return hold;
}

static bool cell_holds(const rs_mixer *mixer, const rs_cell *cell) {
    const float low = mixer->stretched[0];
    const float high = mixer->stretched[RS_NUM_STRETCHED - 1];
    if (cell->num == 0) {
        return cell->probability == 0.0F && cell->inputs[RS_OWN] == 0.0F && cell->inputs[RS_RIVAL] == 0.0F;
    }
    return cell->num >= LEAST_OBSERVATIONS && cell->num <= MOST_OBSERVATIONS &&
           within(cell->probability, 0.0F, 1.0F) && within(cell->inputs[RS_OWN], low, high) &&
           within(cell->inputs[RS_RIVAL], low, high);
}

static const char *check_mixer(const rs_mixer *mixer) {
    if (mixer->cells[0].num != 0) {
        return "mixer: the cell of no expert was used";
    }
    for (int i = 0; i < RS_NUM_CELLS; i++) {
        if (!cell_holds(mixer, mixer->cells + i)) {
            return "mixer: a probability out of bounds";
        }
    }
    for (int set = 0; set < RS_NUM_WEIGHT_SETS; set++) {
        if (!weights_hold(mixer->weights + set)) {
            return "mixer: a weight out of bounds";
        }
    }
    return NULL;
}

/* ---- the queue ---- */

static bool can_be_indexed(const rs_sequence *sequence) {
    return sequence->at.indexed < sequence->end && !sequence->is_left_out && !rs_waits_for_prompt(sequence);
}

static uint64_t key_of(const rs_sequence *sequence) {
    const bool is_urgent = sequence->kind == RS_RUNNING || sequence->kind == RS_PROMPT;
    return is_urgent ? (uint64_t)(sequence->end - sequence->at.indexed) : UINT64_MAX;
}

static bool goes_first(const rs_queue_entry *one, const rs_queue_entry *other) {
    return one->key != other->key ? one->key < other->key : one->sequence->serial < other->sequence->serial;
}

/* Whether everything that can be indexed is in the queue exactly once, in its order. */
static bool queue_holds(const rs_index *index) {
    uint32_t num = 0;
    for (uint32_t i = 0; i < index->num_slots; i++) {
        num += index->slots[i].sequence != NULL && can_be_indexed(index->slots[i].sequence);
    }
    bool holds = num == index->num_queued;
    for (uint32_t at = 0; at < index->num_queued && holds; at++) {
        const rs_queue_entry *entry = index->queue + at, *above = index->queue + (at - (at > 0)) / 2;
        holds = can_be_indexed(entry->sequence) && entry->sequence->queued == at + 1 &&
                entry->key == key_of(entry->sequence) && !goes_first(entry, above);
    }
    return holds;
}

/* ---- the tables ---- */

static bool groups_hold(const rs_index *index) {
    int64_t num_closed = 0, num_idle = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        int32_t num_running = 0;
        for (const rs_sequence *each = group->first; each != NULL; each = each->next) {
            num_running += each->kind == RS_RUNNING;
            if (!group->is_open || each->group != (int32_t)i ||
                (each->next != NULL && (each->next->previous != each || each->next->serial >= each->serial))) {
                return false;
            }
        }
        num_closed += !group->is_open;
        num_idle += group->is_open && num_running == 0;
        if (num_running != group->num_inside) {
            return false;
        }
    }
    const int32_t lists[] = {index->free_group, index->given_up};
    for (int i = 0; i < 2; i++) {
        for (int32_t id = lists[i]; id >= 0; id = index->groups[id].next_closed) {
            if (index->groups[id].is_open || num_closed-- == 0) {
                return false;
            }
        }
    }
    int32_t older = -1;
    for (int32_t id = index->oldest_idle; id >= 0; older = id, id = index->groups[id].newer) {
        if (index->groups[id].num_inside > 0 || index->groups[id].older != older || num_idle-- == 0) {
            return false;
        }
    }
    return num_closed == 0 && num_idle == 0 && older == index->newest_idle;
}

static bool slots_hold(const rs_index *index) {
    int64_t num = (int64_t)index->num_slots - index->num_sequences;
    for (int32_t id = index->free_slot; id >= 0; id = index->slots[id].next_free) {
        if ((uint32_t)id >= index->num_slots || index->slots[id].sequence != NULL || num-- == 0) {
            return false;
        }
    }
    return num == 0;
}

static const char *check_tables(const rs_index *index) {
    const bool hold = groups_hold(index) && slots_hold(index) && queue_holds(index);
    return hold ? NULL : "index: broken list of groups, sequences or slots";
}

/* ---- a sequence ---- */

/* Whether the match can be that of a text of `level` tokens. */
static bool match_holds(const rs_automaton *a, rs_match match, int32_t level) {
    if (match.state >= a->num_states || match.len > a->states[match.state].len || (int64_t)match.len > level) {
        return false;
    }
    return match.state == RS_ROOT ? match.len == 0 : match.len > a->states[a->states[match.state].link].len;
}

static const char *check_sequence(const rs_index *index, const rs_sequence *sequence) {
    const int32_t indexed = sequence->at.indexed;
    if (sequence->end < sequence->start || (uint32_t)(sequence->end - sequence->start) > sequence->tokens_capacity) {
        return "sequence: its text is longer than there is room for";
    }
    if (rs_check_group(index, sequence->group, NULL) != RS_OK) {
        return "sequence: its group is not open";
    }
    const rs_automaton *a = &index->groups[sequence->group].automaton;
    if (sequence->at.last >= a->num_states || (rs_waits_for_prompt(sequence)
                                                   ? indexed != sequence->start
                                                   : a->states[sequence->at.last].len != (uint32_t)indexed)) {
        return "sequence: at is not the position of its text";
    }
    if (indexed < sequence->start || indexed > sequence->end || sequence->counted_end > sequence->end) {
        return "sequence: its levels are not in order";
    }
    const rs_sequence *prompt = sequence->prompt;
    if ((prompt == NULL) != (sequence->kind == RS_PROMPT) || sequence->start != (prompt == NULL ? 0 : prompt->end) ||
        (prompt != NULL && (prompt->kind != RS_PROMPT || prompt->group != sequence->group ||
                            prompt->serial >= sequence->serial))) {
        return "sequence: it does not begin after a prompt of its group, or is none";
    }
    if (index->corpus.states != NULL && !match_holds(&index->corpus, sequence->at.corpus, indexed)) {
        return "sequence: its match is not in the corpus";
    }
    bool fit = sequence->num_predictions >= 0 &&
               (uint32_t)sequence->num_predictions <= sequence->predictions_capacity &&
               (sequence->predictions != NULL) == (sequence->kind == RS_RUNNING);
    return fit ? NULL : "sequence: num_predictions out of range";
}

/* ---- the bytes ---- */

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
            num_bytes += sizeof *sequence + (uint64_t)sequence->tokens_capacity * sizeof *sequence->tokens +
                         (uint64_t)sequence->predictions_capacity * sizeof *sequence->predictions;
        }
    }
    for (uint32_t i = 0; i < index->num_groups; i++) {
        num_bytes += num_bytes_of_automaton(&index->groups[i].automaton);
    }
    return num_bytes;
}

static const char *check_bytes(const rs_index *index) {
    const rs_account *account = &index->account;
    if (num_bytes_of(index) != account->num_bytes) {
        return "index: num_bytes is wrong";
    }
    return account->max_bytes == 0 || account->num_bytes <= account->max_bytes ? NULL : "index: over budget";
}

const char *rs_index_check(const rs_index *index) {
    const char *found[] = {index->corpus.states == NULL ? NULL : rs_automaton_check(&index->corpus),
                           check_contexts(&index->contexts),
                           check_mixer(&index->mixer),
                           check_tables(index),
                           check_bytes(index)};
    const char *broken = NULL;
    for (size_t i = 0; i < sizeof found / sizeof found[0] && broken == NULL; i++) {
        broken = found[i];
    }
    for (uint32_t i = 0; i < index->num_groups && broken == NULL; i++) {
        broken = index->groups[i].is_open ? rs_automaton_check(&index->groups[i].automaton) : NULL;
    }
    for (uint32_t i = 0; i < index->num_slots && broken == NULL; i++) {
        const rs_sequence *sequence = index->slots[i].sequence;
        broken = sequence != NULL ? check_sequence(index, sequence) : NULL;
    }
    return broken;
}
