/* Walks through an automaton that collect a draft, one token at a time so that the walks of several
 * rows can take turns: each waits for memory while the others run. A walk changes nothing but itself and the predictions
 * of its sequence, so it does not matter in which turns. */
#ifndef RS_DRAFT_H
#define RS_DRAFT_H

#include "index.h"

enum { RS_NUM_FETCH_STAGES = 3 };

/* The transitions of a state beyond its first, as many as are looked at. */
typedef struct {
    const rs_transition *others;
    uint32_t num;
} rs_continuations;

typedef struct {
    const rs_automaton *automaton;
    uint32_t state;
    uint32_t match_len; /* of the text and draft, at `state` */
    uint32_t shorter;   /* the next class above `state` with a continuation */
    rs_continuations continuations[RS_NUM_MATCHES]; /* of these two; of the root, none */
    rs_recent recent; /* the end of the text and draft */
    uint64_t own_salt;
    uint32_t tags[RS_NUM_CONTEXTS];
    rs_context_bucket *buckets[RS_NUM_CONTEXTS]; /* of these tags */
    rs_cursor cursor;                            /* of the text and draft in the corpus, if there is one */
    int32_t num_left;                            /* tokens that may still be drafted */
    double min_token_prob;
    double survival; /* the probability that the target accepts the draft so far */
    rs_prediction *predictions;
    int32_t num_predictions;
} rs_walk;

/* Start behind the sequence's text, for at least one token. */
void rs_walk_start(rs_walk *walk, const rs_index *index, int32_t sequence, int32_t max_draft_tokens,
                   double min_token_prob);

/* Before each rs_walk_next: find the states that will be asked, and have fetched from memory what they will be asked
 * for. Each stage reads what the one before has had fetched: in between it is the turn of other rows. */
void rs_walk_fetch(rs_walk *walk, int stage);

/* The next draft token, -1: the draft ends here. Then, and after the last one, num_left is 0. */
int32_t rs_walk_next(rs_walk *walk, const rs_index *index);

#endif
