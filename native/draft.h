/* A draft: what may come after a sequence's text, token by token.
 *
 * A continuation of a string is a token that came after it, in the text of any sequence of the group. The match is the
 * longest suffix of the sequence's text, the whole included, that has one. Strings that end at the same positions are a
 * class, one state of the automaton. At each position experts propose a token, as draft.c pictures: a match proposes its
 * most frequent continuation, on a tie the one that came first. The best proposal is drafted; evidence.h says how the
 * probability is learned that it is accepted. A draft ends before the token with which the product of these, the survival,
 * falls below min_survival. */
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
