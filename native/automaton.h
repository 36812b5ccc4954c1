/* The generalized suffix automaton of one group, grown online (Blumer et al. 1985), by several sequences in turn.
 *
 * A state is a class of suffixes that end at the same positions; len is the longest one's length, and the suffix link leads
 * to the class of the longest suffix that is not in it. Every sequence keeps the state of its whole text, `last`. That
 * text is the longest string of its state (nothing longer can end where the sequence begins), so cloning never moves it. */
#ifndef RS_AUTOMATON_H
#define RS_AUTOMATON_H

#include <stdbool.h>

#include "transitions.h"

enum { RS_ROOT = 0, RS_COUNTED_STATES = 8 /* of the longest suffixes: only these count a new token */ };
static const uint32_t RS_NO_STATE = UINT32_MAX;

typedef struct {
    uint32_t len;
    uint32_t link;   /* RS_NO_STATE: this is the root */
    int32_t token;   /* of the transition that was inserted first, < 0: there is none */
    uint32_t target; /* of the same */
    uint32_t count;  /* of its occurrences */
    uint32_t block;  /* the other transitions, 0: none */
} rs_state;

typedef struct {
    rs_state *states;
    uint32_t num_states;
    uint32_t capacity;
    rs_pool pool;
} rs_automaton;

/* The longest suffix of some text that occurs in an automaton's. Zeros: the empty one. */
typedef struct {
    uint32_t state;
    uint32_t len; /* in tokens, at most the state's */
} rs_match;

rs_status rs_automaton_init(rs_automaton *automaton, const rs_memory *memory);

void rs_automaton_free(rs_automaton *automaton, const rs_memory *memory);

/* Forget all text. */
void rs_automaton_reset(rs_automaton *automaton, const rs_memory *memory);

/* Append a token to the text whose state is *last, which moves to that of the longer text. On failure nothing changes. */
rs_status rs_automaton_extend(rs_automaton *automaton, const rs_memory *memory, uint32_t *last, int32_t token);

/* The target of the transition, NULL where there is none. Invalid after the next rs_automaton_extend. */
static inline uint32_t *rs_automaton_find(const rs_automaton *automaton, uint32_t state, int32_t token) {
    rs_state *from = automaton->states + state;
    if (from->token == token) {
        return &from->target;
    }
    if (from->block == 0) {
        return NULL;
    }
    rs_transition *found = rs_block_find(&automaton->pool, from->block, token);
    return found == NULL ? NULL : &found->target;
}

static inline void rs_match_move_up(const rs_automaton *automaton, rs_match *match) {
    match->state = automaton->states[match->state].link;
    match->len = automaton->states[match->state].len;
}

/* The text has got another token. */
static inline void rs_match_move(const rs_automaton *automaton, rs_match *match, int32_t token) {
    const uint32_t *target;
    while ((target = rs_automaton_find(automaton, match->state, token)) == NULL && match->state != RS_ROOT) {
        rs_match_move_up(automaton, match);
    }
    if (target != NULL) {
        match->state = *target;
        match->len++;
    }
}

/* To the longest suffix, the match's included, that has a continuation. */
static inline void rs_match_continue(const rs_automaton *automaton, rs_match *match) {
    while (automaton->states[match->state].token < 0 && match->state != RS_ROOT) {
        rs_match_move_up(automaton, match);
    }
}

#endif
