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
 * Invariants, which rs_automaton_check of tests/checks.c checks:
 * - A state's strings are its longest one and that one's suffixes down to, not including, the longest of its link's.
 * - Every state but the root has exactly one transition from the prefix of its longest string (a solid one).
 * - What rs_automaton_extend adds to a state's transitions is that state's latest, so that it can take it back where there
 *   is no memory for all of it. */
#include "automaton.h"

#include <string.h>

static void make_root(rs_automaton *a) {
    a->states[RS_ROOT] = (rs_state){.link = RS_NO_STATE, .token = -1};
    a->num_states = 1;
}

rs_status rs_automaton_init(rs_automaton *a, const rs_memory *memory) {
    memset(a, 0, sizeof *a);
    RS_TRY(RS_RESERVE(memory, a->states, a->capacity, 1));
    make_root(a);
    return RS_OK;
}

void rs_automaton_reset(rs_automaton *a, const rs_memory *memory) {
    RS_RESIZE(memory, a->pool.units, a->pool.capacity, 0);
    memset(&a->pool, 0, sizeof a->pool);
    RS_RESIZE(memory, a->states, a->capacity, 1);
    make_root(a);
}

void rs_automaton_free(rs_automaton *a, const rs_memory *memory) {
    RS_RESIZE(memory, a->states, a->capacity, 0);
    RS_RESIZE(memory, a->pool.units, a->pool.capacity, 0);
    memset(a, 0, sizeof *a);
}

static rs_status add_transition(rs_automaton *a, const rs_memory *memory, uint32_t state, int32_t token, uint32_t target) {
    rs_state *from = a->states + state;
    if (from->token < 0) {
        from->token = token;
        from->target = target;
        return RS_OK;
    }
    rs_transition transition = {.token = token, .target = target};
    return rs_block_append(&a->pool, memory, &from->block, transition);
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
        uint32_t *target = rs_automaton_find(a, state, token);
        if (*target != from) {
            return;
        }
        *target = to;
        state = a->states[state].link;
    }
}

/* Split off the part of `origin` that is reached from `state` and above. The caller has reserved room for a state. */
static rs_status clone_state(rs_automaton *a, const rs_memory *memory, uint32_t state, int32_t token, uint32_t origin) {
    uint32_t block = 0;
    if (a->states[origin].block != 0) {
        RS_TRY(rs_block_copy(&a->pool, memory, a->states[origin].block, &block));
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
static rs_status create_state(rs_automaton *a, const rs_memory *memory, uint32_t last, int32_t token) {
    uint32_t newest = a->num_states++;
    a->states[newest] = (rs_state){.len = a->states[last].len + 1, .link = RS_ROOT, .token = -1};
    uint32_t state = last;
    uint32_t *target = NULL;
    rs_status status = RS_OK;
    while (status == RS_OK && state != RS_NO_STATE && (target = rs_automaton_find(a, state, token)) == NULL) {
        status = add_transition(a, memory, state, token, newest);
        state = status == RS_OK ? a->states[state].link : state;
    }
    if (status == RS_OK && state != RS_NO_STATE) {
        const uint32_t origin = *target;
        const bool is_solid = a->states[origin].len == a->states[state].len + 1;
        status = is_solid ? RS_OK : clone_state(a, memory, state, token, origin);
        a->states[newest].link = is_solid ? origin : a->states[origin].link; /* the clone */
    }
    if (status != RS_OK) {
        remove_newest(a, last, state);
    }
    return status;
}

/* Walking all the way up would make long periodic texts quadratic. */
static void count_suffixes(rs_automaton *a, uint32_t state) {
    for (int i = 0; i < RS_COUNTED_STATES && state != RS_ROOT; i++) {
        a->states[state].count++;
        state = a->states[state].link;
    }
}

rs_status rs_automaton_extend(rs_automaton *a, const rs_memory *memory, uint32_t *last, int32_t token) {
    RS_TRY(RS_RESERVE(memory, a->states, a->capacity, (uint64_t)a->num_states + 2));
    const uint32_t *target = rs_automaton_find(a, *last, token);
    uint32_t after = a->num_states;
    if (target == NULL) {
        RS_TRY(create_state(a, memory, *last, token));
    } else if (a->states[*target].len == a->states[*last].len + 1) {
        after = *target;
    } else {
        RS_TRY(clone_state(a, memory, *last, token, *target));
    }
    count_suffixes(a, after);
    *last = after;
    return RS_OK;
}
