/* What experts propose becomes a probability here, and what the target then samples a lesson.
 *
 *     expert 0: token 7, cell 41 --> p = 0.8 --+
 *     expert 1: token 7, cell 17 --> p = 0.6 --+--> stretch, weigh, sum, squash --> candidate 7: 0.87
 *     expert 3: token 9, cell 90 --> p = 0.3 --+    (once for each candidate)  --> candidate 9: 0.11
 *
 * Invariants: cell 0 is nobody's and stays zero, so that experts that propose nothing add 0 to every sum without a branch;
 * a cell is used from its prior on; no weight leaves +-MAX_WEIGHT. */
#include "evidence.h"

#include <math.h>
#include <string.h>

/* The constants were chosen on recorded rollouts; a factor of two in any of them costs under 1 %. */
static const float FIRST_WEIGHT = 0.1F;
static const double LEARNING_RATE = 0.0133;
static const double MAX_WEIGHT = 4.0 / 3.0; /* no text, however adversarial, drives a weight beyond */
static const double RIVAL_SHARE = 0.2;      /* of what an expert leaves open, for one other token */
static const double PRIOR_COUNT = 0.5;
enum { PRIOR_OBSERVATIONS = 2, MAX_OBSERVATIONS = 250, NUM_SHORT = 8 /* match lengths with a cell each */ };

/* The vectors that gcc and clang have for every machine; left to themselves they make none of `mix`. */
enum { NUM_LANES = 4 };
typedef float lanes __attribute__((vector_size(NUM_LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t mask __attribute__((vector_size(NUM_LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

_Static_assert((int)RS_CORPUS_EXPERT == 2 * NUM_LANES, "a lane for every expert but the corpus");
_Static_assert(RS_NUM_WEIGHT_SETS == 1 << RS_CORPUS_EXPERT, "a set for every choice of experts but the corpus");

void rs_calibration_init(rs_calibration *calibration) {
    memset(calibration, 0, sizeof *calibration);
    for (int selector = 0; selector < RS_NUM_SELECTORS; selector++) {
        for (int set = 0; set < RS_NUM_WEIGHT_SETS; set++) {
            rs_weights *weights = calibration->weights[selector] + set;
            for (int e = 0; e < RS_NUM_EXPERTS; e++) {
                weights->experts[0][e] = weights->experts[1][e] = FIRST_WEIGHT;
            }
        }
    }
    for (int i = 0; i < RS_NUM_STRETCHED; i++) {
        double p = (i + 0.5) / RS_NUM_STRETCHED;
        calibration->stretched[i] = (float)log(p / (1.0 - p));
    }
}

void rs_prediction_init(rs_prediction *prediction, int32_t previous) {
    memset(prediction->tokens, -1, sizeof prediction->tokens);
    memset(prediction->cells, 0, sizeof prediction->cells);
    prediction->previous = previous;
    prediction->token = -1;
}

static float stretch(const rs_calibration *calibration, double p) {
    int i = (int)(p * RS_NUM_STRETCHED);
    return calibration->stretched[i < RS_NUM_STRETCHED ? i : RS_NUM_STRETCHED - 1];
}

static double squash(double x) { return 1.0 / (1.0 + exp(-x)); }

/* Both without a branch, which could not be foreseen. */
static uint32_t length_bucket(uint32_t match_len) {
    static const uint32_t ends[RS_NUM_LENGTHS - 1 - NUM_SHORT] = {12, 16, 24, 32, 64};
    uint32_t bucket = NUM_SHORT;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        bucket += match_len >= ends[i];
    }
    return match_len < NUM_SHORT ? match_len : bucket;
}

static uint32_t total_bucket(uint32_t total) {
    const uint32_t most = (1U << (RS_NUM_TOTALS - 1)) - 1;
    return 31U - (uint32_t)__builtin_clz(2 * (total - 1 < most ? total - 1 : most) + 1);
}

/* Whether the expert's cell was never used before; then the caller sets its prior. */
static bool add(rs_calibration *calibration, rs_prediction *prediction, int expert, int32_t token, uint32_t cell) {
    prediction->tokens[expert] = token;
    prediction->cells[expert] = (uint16_t)cell;
    return calibration->cells[cell].num == 0;
}

static void set_probability(const rs_calibration *calibration, rs_cell *cell, double probability) {
    cell->probability = (float)probability;
    cell->inputs[0] = stretch(calibration, cell->probability);
    cell->inputs[1] = stretch(calibration, (1.0 - cell->probability) * RIVAL_SHARE);
}

static void set_prior(rs_calibration *calibration, const rs_prediction *prediction, int expert, double prior) {
    rs_cell *cell = calibration->cells + prediction->cells[expert];
    cell->num = PRIOR_OBSERVATIONS;
    set_probability(calibration, cell, prior);
}

void rs_prediction_add_match(rs_calibration *calibration, rs_prediction *prediction, int expert,
                             const rs_proposal *p) {
    uint32_t kind = expert == RS_CORPUS_EXPERT ? RS_NUM_MATCHES : (uint32_t)expert;
    uint32_t share = p->count * (RS_NUM_SHARES - 1) / p->total;
    uint32_t row = (kind * RS_NUM_LENGTHS + length_bucket(p->match_len)) * RS_NUM_TOTALS + total_bucket(p->total);
    if (add(calibration, prediction, expert, p->token, row * RS_NUM_SHARES + share)) {
        set_prior(calibration, prediction, expert,
                  p->count / (p->total + PRIOR_COUNT) * (1.0 - PRIOR_COUNT / (p->match_len + PRIOR_COUNT)));
    }
}

void rs_prediction_add_context(rs_calibration *calibration, rs_prediction *prediction, int context, int32_t token,
                               uint32_t confidence) {
    const bool known = confidence > 0;
    uint32_t cell = (RS_NUM_MATCH_CELLS + (uint32_t)context * (RS_MAX_CONFIDENCE + 1) + confidence) *
                    (uint32_t)known;
    if (add(calibration, prediction, RS_NUM_MATCHES + context, token, cell) & known) {
        set_prior(calibration, prediction, RS_NUM_MATCHES + context, confidence / (confidence + 2.0));
    }
}

/* Each expert's input for its own token, and for any other one; 0 where it proposes nothing, since the cell is the
 * first then, which is nobody's: no match has length 0. */
static void inputs_of(const rs_calibration *calibration, const rs_prediction *prediction,
                      float inputs[2][RS_NUM_EXPERTS]) {
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        const rs_cell *cell = calibration->cells + prediction->cells[e];
        inputs[0][e] = cell->inputs[0];
        inputs[1][e] = cell->inputs[1];
    }
}

/* A bit for every expert that proposes the candidate. */
static uint32_t proposers(const rs_prediction *prediction, int32_t candidate) {
    const mask bits[] = {{1, 2, 4, 8}, {16, 32, 64, 128}};
    mask found = {0};
    for (int e = 0; e < RS_CORPUS_EXPERT; e += NUM_LANES) {
        found |= (*(const mask *)(prediction->tokens + e) == candidate) & bits[e / NUM_LANES];
    }
    uint32_t corpus = prediction->tokens[RS_CORPUS_EXPERT] == candidate;
    return rs_any_lane((rs_context_lanes)found) | corpus << RS_CORPUS_EXPERT;
}

/* A bit for every expert that proposes anything. */
static uint32_t all_proposers(const rs_prediction *prediction) {
    return ((1U << RS_NUM_EXPERTS) - 1) & ~proposers(prediction, -1);
}

/* Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4) to RS_NUM_WEIGHT_SETS. */
static uint32_t token_hash(int32_t token) { return (uint32_t)token * 0x9E3779B1U >> 24; }

static void select_weights(const rs_prediction *prediction, int32_t candidate, uint32_t proposed,
                           uint32_t sets[RS_NUM_SELECTORS]) {
    sets[0] = token_hash(prediction->previous);
    sets[1] = token_hash(candidate);
    sets[2] = proposed & (RS_NUM_WEIGHT_SETS - 1); /* without the corpus */
}

static lanes load(const float *values) { return *(const lanes *)values; }

static float mix(const rs_calibration *calibration, const rs_prediction *prediction, int32_t candidate,
                 const uint32_t sets[RS_NUM_SELECTORS], float inputs[2][RS_NUM_EXPERTS]) {
    enum { CORPUS = RS_CORPUS_EXPERT };
    const rs_weights *a = calibration->weights[0] + sets[0];
    const rs_weights *b = calibration->weights[1] + sets[1];
    const rs_weights *c = calibration->weights[2] + sets[2];
    lanes sums = {0.0F};
    for (int e = 0; e < CORPUS; e += NUM_LANES) {
        const mask own = *(const mask *)(prediction->tokens + e) == candidate;
        for (int rival = 0; rival < 2; rival++) {
            lanes weights = load(a->experts[rival] + e) + load(b->experts[rival] + e) + load(c->experts[rival] + e);
            sums += weights * (lanes)((mask)load(inputs[rival] + e) & (rival ? ~own : own));
        }
    }
    int rival = prediction->tokens[CORPUS] != candidate;
    float corpus = (a->experts[rival][CORPUS] + b->experts[rival][CORPUS] + c->experts[rival][CORPUS]) *
                   inputs[rival][CORPUS];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + (corpus + (a->bias + b->bias + c->bias));
}

double rs_predict(const rs_calibration *calibration, rs_prediction *prediction) {
    float inputs[2][RS_NUM_EXPERTS];
    uint32_t sets[RS_NUM_SELECTORS];
    uint32_t left = all_proposers(prediction); /* whose candidate is to be mixed */
    float best = -INFINITY;
    inputs_of(calibration, prediction, inputs);
    while (left != 0) {
        int32_t candidate = prediction->tokens[__builtin_ctz(left)];
        uint32_t proposed = proposers(prediction, candidate);
        left &= ~proposed;
        select_weights(prediction, candidate, proposed, sets);
        float score = mix(calibration, prediction, candidate, sets, inputs);
        prediction->token = score > best ? candidate : prediction->token;
        best = score > best ? score : best;
    }
    return prediction->token < 0 ? 0.0 : squash((double)best);
}

static float bounded(double weight) {
    return (float)(weight > MAX_WEIGHT ? MAX_WEIGHT : weight < -MAX_WEIGHT ? -MAX_WEIGHT : weight);
}

static void learn_weights(rs_weights *weights, double step, uint32_t proposed, float inputs[2][RS_NUM_EXPERTS]) {
    weights->bias = bounded(weights->bias + step);
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        int rival = !(proposed >> e & 1);
        float *weight = weights->experts[rival] + e;
        *weight = bounded(*weight + step * inputs[rival][e]);
    }
}

void rs_calibrate(rs_calibration *calibration, const rs_prediction *prediction, int32_t token) {
    if (prediction->token < 0) {
        return;
    }
    float inputs[2][RS_NUM_EXPERTS];
    uint32_t sets[RS_NUM_SELECTORS];
    uint32_t proposed = proposers(prediction, prediction->token);
    inputs_of(calibration, prediction, inputs);
    select_weights(prediction, prediction->token, proposed, sets);
    float score = mix(calibration, prediction, prediction->token, sets, inputs);
    double error = (prediction->token == token) - squash((double)score);
    for (int selector = 0; selector < RS_NUM_SELECTORS; selector++) {
        learn_weights(calibration->weights[selector] + sets[selector], LEARNING_RATE * error, proposed, inputs);
    }
    const uint32_t right = proposers(prediction, token);
    for (uint32_t left = all_proposers(prediction); left != 0; left &= left - 1) {
        int e = __builtin_ctz(left);
        rs_cell *cell = calibration->cells + prediction->cells[e];
        cell->num += cell->num < MAX_OBSERVATIONS;
        double surprise = (double)(right >> e & 1) - (double)cell->probability;
        set_probability(calibration, cell, cell->probability + surprise / cell->num);
    }
}

/* False for what is no number, too. */
static bool within(float value, float low, float high) { return value >= low && value <= high; }

static bool weights_hold(const rs_weights *weights) {
    const float most = (float)MAX_WEIGHT;
    bool hold = within(weights->bias, -most, most);
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        hold = hold && within(weights->experts[0][e], -most, most) && within(weights->experts[1][e], -most, most);
    }
    return hold;
}

static bool cell_holds(const rs_calibration *calibration, const rs_cell *cell) {
    const float low = calibration->stretched[0];
    const float high = calibration->stretched[RS_NUM_STRETCHED - 1];
    if (cell->num == 0) {
        return cell->probability == 0.0F && cell->inputs[0] == 0.0F && cell->inputs[1] == 0.0F;
    }
    return cell->num >= PRIOR_OBSERVATIONS && cell->num <= MAX_OBSERVATIONS && within(cell->probability, 0.0F, 1.0F) &&
           within(cell->inputs[0], low, high) && within(cell->inputs[1], low, high);
}

const char *rs_calibration_check(const rs_calibration *calibration) {
    if (calibration->cells[0].num != 0) {
        return "calibration: the cell of no expert was used";
    }
    for (int i = 0; i < RS_NUM_CELLS; i++) {
        if (!cell_holds(calibration, calibration->cells + i)) {
            return "calibration: a probability out of bounds";
        }
    }
    for (int selector = 0; selector < RS_NUM_SELECTORS; selector++) {
        for (int set = 0; set < RS_NUM_WEIGHT_SETS; set++) {
            if (!weights_hold(calibration->weights[selector] + set)) {
                return "calibration: a weight out of bounds";
            }
        }
    }
    return NULL;
}
