/* Walks through an automaton that collect a draft, one token at a time so that the walks of several
 * rows can take turns: each waits for memory while the others run. */
#ifndef RS_DRAFT_H
#define RS_DRAFT_H

#include "automaton.h"

typedef struct {
    const rs_automaton *automaton;
    uint32_t state;
    int32_t num_left; /* tokens that may still be drafted */
    double probability;
} rs_walk;

/* Start behind `last`; returns the match length. No walk (num_left 0) where it is too short. */
int32_t rs_walk_start(rs_walk *walk, const rs_automaton *automaton, uint32_t last, const rs_options *options,
                      int32_t max_draft_tokens);

/* The next draft token, -1: the draft ends here, and num_left is 0. */
int32_t rs_walk_next(rs_walk *walk, const rs_options *options);

#endif
