/* A draft: what may come after a sequence's text, token by token.
 *
 * A continuation of a string is a token that came after it, in the text of any sequence of the group. The match is the
 * longest suffix of the sequence's text, the whole text included, that has a continuation. Strings that end at the same
 * positions are one class, a state of the automaton.
 *
 * At each position several experts propose a token: the match, and its longest suffix in a shorter class that has a
 * continuation, each with its most frequent one (on a tie the one that came first); what lately came after the last 1, 2,
 * 3 and 6 tokens in any text of the index, but prompts and corpus, and after the last 1 and 2 in this sequence; a model,
 * while the draft is its own; and the corpus, with the most frequent continuation of the match there, where that is longer
 * than the group's.
 *
 * The draft takes the best proposal. evidence.h says how the probability is learned that it is accepted. The draft ends
 * before the token with which the product of the probabilities, the survival, falls below min_survival. */
#ifndef RS_DRAFT_H
#define RS_DRAFT_H

#include "index.h"

enum { RS_MAX_BRANCHES = 64 /* continuations of a match that are looked at: the earliest */ };

/* What a model drafts after a sequence's text. */
typedef struct {
    const int32_t *tokens;
    const int32_t *confidences;
    int32_t num; /* of both; 0: there is no model */
} rs_model_draft;

/* Draft up to max_draft_tokens after the sequence's text, and no further than the survival min_survival. Writes the
 * tokens and their survivals; returns how many there are. It changes nothing but the predictions of this sequence, so
 * the drafts of several do not depend on their order. */
int32_t rs_draft(rs_index *index, rs_sequence *sequence, int32_t max_draft_tokens, double min_survival,
                 rs_model_draft model, int32_t *tokens, float *survivals);

#endif
