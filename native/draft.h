/* A walk through everything that was indexed, which collects the draft after a sequence's text. */
#ifndef RS_DRAFT_H
#define RS_DRAFT_H

#include "index.h"

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
