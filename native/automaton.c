/* The suffix automaton, online construction.
 *
 * Of the text a b b, states in boxes of their strings, transitions -->, suffix links ..>:
 *
 *                 a                b              b
 *      [ root ] -----> [ a ] ----------> [ ab ] -----> [ abb bb ]
 *        ^  |            :                  :            |   :
 *        :  |            :..> root          :            |   :
 *        :  |    b                          v      b     |   :
 *        :  +-------------------------->  [ b ] ---------+   :
 *        :                                  : ^..............:
 *        :..................................:
 *
 * [ b ] is a clone: until the second b the strings b and ab ended at the same positions and were one state.
 *
 * Invariants, which rs_automaton_check checks:
 * - A state's strings are its longest one and that one's suffixes down to, not including, the longest of its link's.
 * - Every state but the root has exactly one transition from the prefix of its longest string (a solid one).
 * - What rs_extend adds to a state's transitions is that state's latest, so that it can take it back where there is no
 *   memory for all of it. */
#include "automaton.h"

#include <string.h>

static rs_status reserve_states(rs_automaton *a, uint32_t num) {
    uint64_t needed = (uint64_t)a->num_states + num;
    return RS_RESERVE(a->memory, a->states, a->capacity, needed);
}

static void make_root(rs_automaton *a) {
    a->states[RS_ROOT] = (rs_state){.link = RS_NO_STATE, .token = -1};
    a->num_states = 1;
}

rs_status rs_automaton_init(rs_automaton *a, rs_memory *memory) {
    memset(a, 0, sizeof *a);
    a->memory = memory;
    rs_status status = reserve_states(a, 1);
    if (status == RS_OK) {
        make_root(a);
    }
    return status;
}

void rs_automaton_reset(rs_automaton *a) {
    RS_RESIZE(a->memory, a->pool.units, a->pool.capacity, 0);
    memset(&a->pool, 0, sizeof a->pool);
    RS_RESIZE(a->memory, a->states, a->capacity, 1);
    make_root(a);
}

void rs_automaton_free(rs_automaton *a) {
    RS_RESIZE(a->memory, a->states, a->capacity, 0);
    RS_RESIZE(a->memory, a->pool.units, a->pool.capacity, 0);
    memset(a, 0, sizeof *a);
}

static rs_status add_transition(rs_automaton *a, uint32_t state, int32_t token, uint32_t target) {
    rs_state *from = a->states + state;
    if (from->token < 0) {
        from->token = token;
        from->target = target;
        return RS_OK;
    }
    rs_transition transition = {.token = token, .target = target};
    return rs_block_append(&a->pool, a->memory, &from->block, transition);
}

static void remove_last_transition(rs_automaton *a, uint32_t state) {
    rs_state *from = a->states + state;
    if (from->block != 0) {
        rs_block_remove_last(&a->pool, &from->block);
    } else {
        from->token = -1;
    }
}

/* Every transition on the token from `state` up its suffix links that leads to `from` leads to `to`. */
static void redirect(rs_automaton *a, uint32_t state, int32_t token, uint32_t from, uint32_t to) {
    while (state != RS_NO_STATE) {
        uint32_t *target = rs_find(a, state, token);
        if (*target != from) {
            return;
        }
        *target = to;
        state = a->states[state].link;
    }
}

/* Split off the part of `origin` that is reached from `state` and above. Room for one more state
 * is the caller's to reserve. */
static rs_status clone_state(rs_automaton *a, uint32_t state, int32_t token, uint32_t origin) {
    uint32_t block = 0;
    if (a->states[origin].block != 0) {
        RS_TRY(rs_block_copy(&a->pool, a->memory, a->states[origin].block, &block));
    }
    uint32_t clone = a->num_states++;
    a->states[clone] = a->states[origin];
    a->states[clone].len = a->states[state].len + 1;
    a->states[clone].block = block;
    a->states[origin].link = clone;
    redirect(a, state, token, origin, clone);
    return RS_OK;
}

/* Take back the transitions to the newest state, from `state` up to (not including) `end`. */
static void remove_newest(rs_automaton *a, uint32_t state, uint32_t end) {
    while (state != end) {
        remove_last_transition(a, state);
        state = a->states[state].link;
    }
    a->num_states--;
}

/* Make a state for the text `last` + token, which has occurred nowhere. */
static rs_status create_state(rs_automaton *a, uint32_t last, int32_t token) {
    uint32_t newest = a->num_states++;
    a->states[newest] = (rs_state){.len = a->states[last].len + 1, .link = RS_ROOT, .token = -1};
    uint32_t state = last;
    uint32_t *target = NULL;
    rs_status status = RS_OK;
    while (state != RS_NO_STATE && (target = rs_find(a, state, token)) == NULL) {
        status = add_transition(a, state, token, newest);
        if (status != RS_OK) {
            remove_newest(a, last, state);
            return status;
        }
        state = a->states[state].link;
    }
    if (state != RS_NO_STATE) {
        uint32_t origin = *target;
        if (a->states[origin].len != a->states[state].len + 1) {
            status = clone_state(a, state, token, origin);
            if (status != RS_OK) {
                remove_newest(a, last, state);
                return status;
            }
            origin = a->states[origin].link;
        }
        a->states[newest].link = origin;
    }
    return RS_OK;
}

/* Walking all the way up would make long periodic texts quadratic. */
static void count_suffixes(rs_automaton *a, uint32_t state) {
    for (int i = 0; i < RS_COUNTED_STATES && state != RS_ROOT; i++) {
        a->states[state].count++;
        state = a->states[state].link;
    }
}

rs_status rs_extend(rs_automaton *a, uint32_t *last, int32_t token) {
    RS_TRY(reserve_states(a, 2));
    const uint32_t *target = rs_find(a, *last, token);
    uint32_t after = a->num_states;
    if (target == NULL) {
        RS_TRY(create_state(a, *last, token));
    } else if (a->states[*target].len == a->states[*last].len + 1) {
        after = *target;
    } else {
        RS_TRY(clone_state(a, *last, token, *target));
    }
    count_suffixes(a, after);
    *last = after;
    return RS_OK;
}

/* ---- checking ---- */

bool rs_match_holds(const rs_automaton *a, rs_match match, int32_t level) {
    if (match.state >= a->num_states || match.len > a->states[match.state].len || (int64_t)match.len > level) {
        return false;
    }
    return match.state == RS_ROOT ? match.len == 0 : match.len > a->states[a->states[match.state].link].len;
}

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
    uint64_t num_units = rs_pool_num_free(&a->pool);
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
