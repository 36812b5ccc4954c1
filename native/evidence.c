/* What experts propose becomes a probability here, and what the target then samples a lesson.
 *
 *     expert 0: token 7, cell 41 --> p = 0.8 --+
 *     expert 1: token 7, cell 17 --> p = 0.6 --+--> stretch, weigh, sum, squash --> candidate 7: 0.87
 *     expert 3: token 9, cell 90 --> p = 0.3 --+    (once for each candidate)  --> candidate 9: 0.11
 *
 * Invariants: cell 0 is nobody's and stays zero, so that experts that propose nothing add 0 to every sum; no weight
 * leaves +-MAX_WEIGHT. Sums are in one order and without fused operations, but exp and log are the C library's: machines
 * with the same one have the same survivals to the last bit, others may not. */
#include "evidence.h"

#include <math.h>
#include <string.h>

/* The constants were chosen on recorded rollouts; a factor of two in any of them costs under 1 %. */
/* What an engine begins with: each expert's weight for its own token, and against any other; sums over the selectors.
 * From recordings, as lab/record/drafters.md says: the matches, six contexts, a model, the corpus. */
static const float FIRST_WEIGHTS[RS_NUM_SIDES][RS_NUM_EXPERTS] = {
    {0.93F, 0.45F, 0.10F, 0.26F, -0.10F, -0.21F, 0.18F, 0.15F, 0.51F, 0.30F},
    {0.38F, 0.10F, -0.05F, -0.02F, 0.17F, 0.10F, 0.03F, 0.11F, 0.76F, 0.30F},
};
static const float FIRST_BIAS = 0.48F;
static const double LEARNING_RATE = 0.0133;
static const double MAX_WEIGHT = 4.0 / 3.0; /* no text, however adversarial, drives a weight beyond */
static const double RIVAL_SHARE = 0.2;      /* of what an expert leaves open, for one other token */
static const double PRIOR_COUNT = 0.5;
enum { PRIOR_OBSERVATIONS = 2, MAX_OBSERVATIONS = 250 };

static const uint32_t LENGTH_STARTS[RS_NUM_LENGTHS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64};
static const uint32_t TOTAL_STARTS[RS_NUM_TOTALS] = {1, 2, 3, 5, 9, 17};

/* ---- cells ---- */

static float stretch(const rs_mixer *mixer, double p) {
    int i = (int)(p * RS_NUM_STRETCHED);
    return mixer->stretched[i < RS_NUM_STRETCHED ? i : RS_NUM_STRETCHED - 1];
}

static double squash(double x) { return 1.0 / (1.0 + exp(-x)); }

static void set_probability(const rs_mixer *mixer, rs_cell *cell, double probability) {
    cell->probability = (float)probability;
    cell->inputs[RS_OWN] = stretch(mixer, cell->probability);
    cell->inputs[RS_RIVAL] = stretch(mixer, (1.0 - cell->probability) * RIVAL_SHARE);
}

/* The last of the ranges, which begin with these values, that the value is in. */
static uint32_t range_of(const uint32_t *starts, uint32_t num, uint32_t value) {
    uint32_t range = 0;
    for (uint32_t i = 1; i < num; i++) {
        range += value >= starts[i];
    }
    return range;
}

static uint32_t match_cell(uint32_t kind, uint32_t length, uint32_t total, uint32_t share) {
    return ((kind * RS_NUM_LENGTHS + length) * RS_NUM_TOTALS + total) * RS_NUM_SHARES + share;
}

static uint32_t context_cell(uint32_t context, uint32_t confidence) {
    return RS_NUM_MATCH_CELLS + context * (RS_MAX_CONFIDENCE + 1) + confidence;
}

static uint32_t model_cell(uint32_t depth, uint32_t confidence) {
    return RS_NUM_MATCH_CELLS + RS_NUM_CONTEXT_CELLS + depth * RS_MODEL_CONFIDENCES + confidence;
}

/* What is believed of a continuation of this kind before any was seen to be right or wrong. */
static double match_prior(uint32_t length, uint32_t total, uint32_t share) {
    double match_len = LENGTH_STARTS[length];
    double num = TOTAL_STARTS[total];
    double count = num * fmin(1.0, (share + 0.5) / (RS_NUM_SHARES - 1));
    return count / (num + PRIOR_COUNT) * (1.0 - PRIOR_COUNT / (match_len + PRIOR_COUNT));
}

static void set_prior(rs_mixer *mixer, uint32_t number, double prior) {
    mixer->cells[number].num = PRIOR_OBSERVATIONS;
    set_probability(mixer, mixer->cells + number, prior);
}

/* No match has length 0, and what has no confidence proposes nothing: their cells stay zero. */
static void set_priors(rs_mixer *mixer) {
    for (uint32_t length = 1; length < RS_NUM_LENGTHS; length++) {
        for (uint32_t total = 0; total < RS_NUM_TOTALS; total++) {
            for (uint32_t share = 0; share < RS_NUM_SHARES; share++) {
                for (uint32_t kind = 0; kind <= RS_NUM_MATCHES; kind++) {
                    set_prior(mixer, match_cell(kind, length, total, share), match_prior(length, total, share));
                }
            }
        }
    }
    for (uint32_t context = 0; context < RS_NUM_CONTEXTS; context++) {
        for (uint32_t confidence = 1; confidence <= RS_MAX_CONFIDENCE; confidence++) {
            set_prior(mixer, context_cell(context, confidence), confidence / (confidence + 2.0));
        }
    }
    for (uint32_t depth = 0; depth < RS_NUM_DEPTHS; depth++) {
        for (uint32_t confidence = 0; confidence < RS_MODEL_CONFIDENCES; confidence++) {
            set_prior(mixer, model_cell(depth, confidence), squash(confidence + 0.5 + RS_LEAST_LOG_ODDS));
        }
    }
}

void rs_mixer_init(rs_mixer *mixer) {
    memset(mixer, 0, sizeof *mixer);
    for (int set = 0; set < RS_NUM_WEIGHT_SETS; set++) {
        rs_weights *weights = mixer->weights + set;
        weights->bias = FIRST_BIAS / RS_NUM_SELECTORS;
        for (int e = 0; e < RS_NUM_EXPERTS; e++) {
            weights->experts[RS_OWN][e] = FIRST_WEIGHTS[RS_OWN][e] / RS_NUM_SELECTORS;
            weights->experts[RS_RIVAL][e] = FIRST_WEIGHTS[RS_RIVAL][e] / RS_NUM_SELECTORS;
        }
    }
    for (int i = 0; i < RS_NUM_STRETCHED; i++) {
        double p = (i + 0.5) / RS_NUM_STRETCHED;
        mixer->stretched[i] = (float)log(p / (1.0 - p));
    }
    set_priors(mixer);
}

/* ---- what is proposed ---- */

void rs_prediction_init(rs_prediction *prediction, int32_t previous) {
    memset(prediction->tokens, -1, sizeof prediction->tokens);
    memset(prediction->cells, 0, sizeof prediction->cells);
    prediction->previous = previous;
    prediction->token = -1;
}

void rs_prediction_add_match(rs_prediction *prediction, int expert, const rs_proposal *p) {
    uint32_t kind = expert == RS_CORPUS_EXPERT ? RS_NUM_MATCHES : (uint32_t)expert;
    uint32_t length = range_of(LENGTH_STARTS, RS_NUM_LENGTHS, p->match_len);
    uint32_t total = range_of(TOTAL_STARTS, RS_NUM_TOTALS, p->total);
    uint32_t share = (uint32_t)((uint64_t)p->count * (RS_NUM_SHARES - 1) / p->total);
    prediction->tokens[expert] = p->token;
    prediction->cells[expert] = (uint16_t)match_cell(kind, length, total, share);
}

void rs_prediction_add_context(rs_prediction *prediction, int context, rs_successor successor) {
    if (successor.confidence > 0) {
        prediction->tokens[RS_NUM_MATCHES + context] = successor.token;
        prediction->cells[RS_NUM_MATCHES + context] = (uint16_t)context_cell((uint32_t)context, successor.confidence);
    }
}

void rs_prediction_add_model(rs_prediction *prediction, int32_t depth, int32_t token, int32_t confidence) {
    uint32_t range = depth < RS_NUM_DEPTHS ? (uint32_t)depth : RS_NUM_DEPTHS - 1;
    prediction->tokens[RS_MODEL_EXPERT] = token;
    prediction->cells[RS_MODEL_EXPERT] = (uint16_t)model_cell(range, (uint32_t)confidence);
}

/* ---- mixing ---- */

/* Each expert's input for its own token, and for any other one; 0 where it proposes nothing, since the cell is the
 * first then, which is nobody's: no match has length 0. */
static void inputs_of(const rs_mixer *mixer, const rs_prediction *prediction, float inputs[][RS_NUM_EXPERTS]) {
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        const rs_cell *cell = mixer->cells + prediction->cells[e];
        inputs[RS_OWN][e] = cell->inputs[RS_OWN];
        inputs[RS_RIVAL][e] = cell->inputs[RS_RIVAL];
    }
}

/* A bit for every expert that proposes the candidate. */
static uint32_t proposing_experts(const rs_prediction *prediction, int32_t candidate) {
    uint32_t found = 0;
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        found |= (uint32_t)(prediction->tokens[e] == candidate) << e;
    }
    return found;
}

/* A bit for every expert that proposes anything. */
static uint32_t all_proposers(const rs_prediction *prediction) {
    return ((1U << RS_NUM_EXPERTS) - 1) & ~proposing_experts(prediction, -1);
}

/* Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4) to RS_NUM_TOKEN_SETS. */
_Static_assert(RS_NUM_TOKEN_SETS == 1 << (32 - 24), "token_hash keeps as many bits");
static uint32_t token_hash(int32_t token) { return (uint32_t)token * 0x9E3779B1U >> 24; }

static void select_weights(const rs_prediction *prediction, int32_t candidate, uint32_t proposed,
                           uint32_t sets[RS_NUM_SELECTORS]) {
    sets[0] = token_hash(prediction->previous);
    sets[1] = RS_NUM_TOKEN_SETS + token_hash(candidate);
    sets[2] = 2 * RS_NUM_TOKEN_SETS + (proposed & ((1U << RS_CORPUS_EXPERT) - 1)); /* without the corpus */
}

static float mix(const rs_mixer *mixer, uint32_t proposed, const uint32_t sets[RS_NUM_SELECTORS],
                 float inputs[][RS_NUM_EXPERTS]) {
    const rs_weights *a = mixer->weights + sets[0];
    const rs_weights *b = mixer->weights + sets[1];
    const rs_weights *c = mixer->weights + sets[2];
    float sum = a->bias + b->bias + c->bias;
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        int side = proposed >> e & 1 ? RS_OWN : RS_RIVAL;
        sum += (a->experts[side][e] + b->experts[side][e] + c->experts[side][e]) * inputs[side][e];
    }
    return sum;
}

double rs_predict(const rs_mixer *mixer, rs_prediction *prediction) {
    float inputs[RS_NUM_SIDES][RS_NUM_EXPERTS];
    uint32_t sets[RS_NUM_SELECTORS];
    uint32_t left = all_proposers(prediction); /* whose candidate is to be mixed */
    float best = -INFINITY;
    inputs_of(mixer, prediction, inputs);
    while (left != 0) {
        int32_t candidate = prediction->tokens[__builtin_ctz(left)];
        uint32_t proposed = proposing_experts(prediction, candidate);
        left &= ~proposed;
        select_weights(prediction, candidate, proposed, sets);
        float score = mix(mixer, proposed, sets, inputs);
        prediction->token = score > best ? candidate : prediction->token;
        best = score > best ? score : best;
    }
    return prediction->token < 0 ? 0.0 : squash((double)best);
}

static float bounded(double weight) {
    return (float)(weight > MAX_WEIGHT ? MAX_WEIGHT : weight < -MAX_WEIGHT ? -MAX_WEIGHT : weight);
}

static void learn_weights(rs_weights *weights, double step, uint32_t proposed, float inputs[][RS_NUM_EXPERTS]) {
    weights->bias = bounded(weights->bias + step);
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        int side = proposed >> e & 1 ? RS_OWN : RS_RIVAL;
        float *weight = weights->experts[side] + e;
        *weight = bounded(*weight + step * inputs[side][e]);
    }
}

void rs_mixer_learn(rs_mixer *mixer, const rs_prediction *prediction, int32_t token) {
    if (prediction->token < 0) {
        return;
    }
    float inputs[RS_NUM_SIDES][RS_NUM_EXPERTS];
    uint32_t sets[RS_NUM_SELECTORS];
    uint32_t proposed = proposing_experts(prediction, prediction->token);
    inputs_of(mixer, prediction, inputs);
    select_weights(prediction, prediction->token, proposed, sets);
    float score = mix(mixer, proposed, sets, inputs);
    double error = (prediction->token == token) - squash((double)score);
    for (int selector = 0; selector < RS_NUM_SELECTORS; selector++) {
        learn_weights(mixer->weights + sets[selector], LEARNING_RATE * error, proposed, inputs);
    }
    const uint32_t right = proposing_experts(prediction, token);
    for (uint32_t left = all_proposers(prediction); left != 0; left &= left - 1) {
        int e = __builtin_ctz(left);
        rs_cell *cell = mixer->cells + prediction->cells[e];
        cell->num += cell->num < MAX_OBSERVATIONS;
        double surprise = (double)(right >> e & 1) - (double)cell->probability;
        set_probability(mixer, cell, cell->probability + surprise / cell->num);
    }
}
