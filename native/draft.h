/* Walks through an automaton that collect a draft, one token at a time so that the walks of several
 * rows can take turns: each waits for memory while the others run. */
#ifndef RS_DRAFT_H
#define RS_DRAFT_H

#include "index.h"

enum { RS_NUM_FETCH_STAGES = 3 };

/* The transitions of a state beyond its first, as many as are looked at. */
typedef struct {
    const rs_transition *others;
    uint32_t num;
} rs_followers;

typedef struct {
    const rs_automaton *automaton;
    uint32_t state;
    uint32_t match_len; /* of the text and draft, at `state` */
    int32_t num_left;   /* tokens that may still be drafted */
    double min_token_prob;
    rs_cursor cursor;   /* of the text and draft in the corpus, if there is one */
    bool in_corpus;     /* the draft is the corpus's; not in mode sam */
    double probability; /* that the target accepts the draft so far */
    /* mode sam only */
    rs_recent recent;
    uint64_t salt;
    uint64_t own_salt;
    uint8_t speaker;
    const uint16_t *num_live; /* of every speaker in the group */
    uint32_t shorter; /* the next class above `state` that has been followed */
    rs_followers followers[RS_NUM_MATCHES]; /* of these two; of the root, none */
    uint32_t tags[RS_NUM_CONTEXTS];
    rs_context_bucket *buckets[RS_NUM_CONTEXTS]; /* of these tags */
    rs_prediction *predictions;
    int32_t num_predictions;
} rs_walk;

/* Start behind the sequence's text; returns the match length. No walk (num_left 0) where it is too
 * short. `predictions` is where mode sam writes what it predicts at each position. */
int32_t rs_walk_start(rs_walk *walk, const rs_index *index, const rs_sequence *sequence, int32_t max_draft_tokens,
                      double min_token_prob, rs_prediction *predictions);

/* Mode sam, before each rs_walk_next: find the states that will be asked, and have fetched from memory what they
 * will be asked for. Each stage reads what the one before has had fetched: in between it is the turn of other rows. */
void rs_walk_fetch(rs_walk *walk, int stage);

/* The next draft token, -1: the draft ends here, and num_left is 0. */
int32_t rs_walk_next(rs_walk *walk, const rs_index *index);

/* The draft of mode suffix_policy, which is not made token by token; returns its length. Both outputs have
 * room for num_speculative_tokens. */
int32_t rs_suffix_policy(const rs_automaton *automaton, uint32_t last, const rs_options *options,
                         int32_t max_draft_tokens, double min_token_prob, int32_t *draft_tokens, float *survivals);

#endif
