/* From what several experts propose to one draft token and the probability that it is accepted.
 *
 * How often an expert's proposals were right is counted in a cell, one for each kind of circumstance (match length, count,
 * and share of the continuation; confidence; depth and confidence). The experts' probabilities are combined by logistic
 * mixing with weights that are learned online, as in the PAQ compressors (Mahoney, Adaptive weighing of context models,
 * 2005). A weight is the sum of three, looked up by the token before, by the candidate, and by which of the experts propose
 * it: some tokens are more predictable than others, and so are some coalitions. Everything is learned from what the target
 * then samples, and only then: a cell begins with the prior of its circumstance, so that asking changes nothing. */
#ifndef RS_EVIDENCE_H
#define RS_EVIDENCE_H

#include "contexts.h"

enum {
    RS_LONGEST_MATCH = 0, /* experts in the group's automaton: the match, and the next shorter class with a continuation */
    RS_SHORTER_MATCH,
    RS_NUM_MATCHES,
    RS_MODEL_EXPERT = RS_NUM_MATCHES + RS_NUM_CONTEXTS,
    RS_CORPUS_EXPERT,
    RS_NUM_EXPERTS,
    RS_NUM_LENGTHS = 14,
    RS_NUM_TOTALS = 6,
    RS_NUM_SHARES = 9,
    RS_NUM_MATCH_CELLS = (RS_NUM_MATCHES + 1) * RS_NUM_LENGTHS * RS_NUM_TOTALS * RS_NUM_SHARES,
    RS_NUM_CONTEXT_CELLS = RS_NUM_CONTEXTS * (RS_MAX_CONFIDENCE + 1),
    RS_NUM_DEPTHS = 8, /* of a model's tokens, the last and those after it in one */
    RS_NUM_CELLS = RS_NUM_MATCH_CELLS + RS_NUM_CONTEXT_CELLS + RS_NUM_DEPTHS * RS_MODEL_CONFIDENCES,
    RS_NUM_SELECTORS = 3,      /* the token before, the candidate, who proposes it */
    RS_NUM_TOKEN_SETS = 256,   /* of weights: what tokens are hashed to, for each of the first two */
    RS_NUM_WEIGHT_SETS = 2 * RS_NUM_TOKEN_SETS + (1 << RS_CORPUS_EXPERT), /* the last: experts but the corpus */
    RS_NUM_STRETCHED = 1024,
    RS_OWN = 0, RS_RIVAL, RS_NUM_SIDES /* what an expert says for its own token, and against any other one */
};

/* What is learned is kept in single precision, which halves its bytes, and learned in double. */
typedef struct {
    float probability;
    float inputs[RS_NUM_SIDES]; /* to the mixer */
    uint32_t num;    /* observations, up to a limit; the prior stands for some */
} rs_cell;

/* How much each expert counts, for its own token and against a rival. */
typedef struct {
    float experts[RS_NUM_SIDES][RS_NUM_EXPERTS];
    float bias;
} rs_weights;

typedef struct {
    rs_cell cells[RS_NUM_CELLS]; /* the first is never used: it stands for experts that propose nothing */
    rs_weights weights[RS_NUM_WEIGHT_SETS]; /* of each selector, one after the other */
    float stretched[RS_NUM_STRETCHED]; /* ln(p / (1 - p)) at p = (i + 0.5) / RS_NUM_STRETCHED */
} rs_mixer;

/* What the experts propose at one position. */
typedef struct {
    int32_t tokens[RS_NUM_EXPERTS]; /* -1: none */
    uint16_t cells[RS_NUM_EXPERTS];
    int32_t previous; /* the token before, -1: none */
    int32_t token;    /* the one chosen, -1: no expert proposes any */
} rs_prediction;

void rs_mixer_init(rs_mixer *mixer);

/* No expert has proposed anything after `previous` yet. */
void rs_prediction_init(rs_prediction *prediction, int32_t previous);

/* Of an expert in an automaton: the most frequent continuation of its match. */
typedef struct {
    int32_t token;
    uint32_t match_len;
    uint32_t count;
    uint32_t total; /* of the counts of all continuations */
} rs_proposal;

/* An expert with a match: of the group's automaton, or RS_CORPUS_EXPERT. */
void rs_prediction_add_match(rs_prediction *prediction, int expert, const rs_proposal *proposal);

void rs_prediction_add_context(rs_prediction *prediction, int context, rs_successor successor);

/* `depth` tokens of the draft are before it, all of them the model's. */
void rs_prediction_add_model(rs_prediction *prediction, int32_t depth, int32_t token, int32_t confidence);

/* Choose prediction->token; returns the probability that the target samples it. */
double rs_predict(const rs_mixer *mixer, rs_prediction *prediction);

/* The target has sampled `token` at the position. */
void rs_mixer_learn(rs_mixer *mixer, const rs_prediction *prediction, int32_t token);

#endif
