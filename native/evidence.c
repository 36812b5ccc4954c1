#include "evidence.h"

#include <math.h>
#include <string.h>

/* The constants were chosen on recorded rollouts; a factor of two in any of them costs under 1 %. */
static const double FIRST_WEIGHT = 0.3;
static const double LEARNING_RATE = 0.04;
static const double MAX_WEIGHT = 4.0;     /* no text, however adversarial, drives a weight beyond */
static const double RIVAL_SHARE = 0.5;    /* of what an expert leaves open, for one other token */
static const double PRIOR_COUNT = 0.5;
enum { PRIOR_OBSERVATIONS = 2, MAX_OBSERVATIONS = 250 };

void rs_calibration_init(rs_calibration *calibration) {
    memset(calibration, 0, sizeof *calibration);
    for (int set = 0; set < RS_NUM_WEIGHT_SETS; set++) {
        rs_weights *weights = calibration->weights + set;
        for (int e = 0; e < RS_NUM_EXPERTS; e++) {
            weights->experts[0][e] = weights->experts[1][e] = FIRST_WEIGHT;
        }
    }
    for (int i = 0; i < RS_NUM_STRETCHED; i++) {
        double p = (i + 0.5) / RS_NUM_STRETCHED;
        calibration->stretched[i] = log(p / (1.0 - p));
    }
}

static double stretch(const rs_calibration *calibration, double p) {
    int i = (int)(p * RS_NUM_STRETCHED);
    return calibration->stretched[i < RS_NUM_STRETCHED ? i : RS_NUM_STRETCHED - 1];
}

static double squash(double x) { return 1.0 / (1.0 + exp(-x)); }

static uint32_t length_bucket(uint32_t match_len) {
    static const uint32_t ends[] = {12, 16, 24, 32, 64};
    if (match_len < 8) {
        return match_len;
    }
    uint32_t bucket = 8;
    while (bucket < RS_NUM_LENGTHS - 1 && match_len >= ends[bucket - 8]) {
        bucket++;
    }
    return bucket;
}

static uint32_t total_bucket(uint32_t total) {
    uint32_t bucket = 0;
    while (bucket < RS_NUM_TOTALS - 1 && total > (1U << bucket)) {
        bucket++;
    }
    return bucket;
}

/* Whether the expert's cell has been used before; if not, the caller sets its prior. */
static bool add(rs_calibration *calibration, rs_prediction *prediction, int expert, int32_t token, uint32_t cell) {
    prediction->tokens[expert] = token;
    prediction->cells[expert] = (uint16_t)cell;
    return calibration->cells[cell].num > 0;
}

static void set_prior(rs_calibration *calibration, const rs_prediction *prediction, int expert, double prior) {
    calibration->cells[prediction->cells[expert]] = (rs_cell){.probability = prior, .num = PRIOR_OBSERVATIONS};
}

void rs_prediction_add_match(rs_calibration *calibration, rs_prediction *prediction, int expert, int32_t token,
                             uint32_t match_len, uint32_t count, uint32_t total) {
    uint32_t share = count == total ? RS_NUM_SHARES - 1 : count * (RS_NUM_SHARES - 1) / total;
    uint32_t kind = expert == RS_CORPUS_EXPERT ? RS_NUM_MATCHES : (uint32_t)expert;
    uint32_t cell = ((kind * RS_NUM_LENGTHS + length_bucket(match_len)) * RS_NUM_TOTALS +
                     total_bucket(total)) * RS_NUM_SHARES + share;
    if (!add(calibration, prediction, expert, token, cell)) {
        set_prior(calibration, prediction, expert,
                  (double)count / (total + PRIOR_COUNT) * (1.0 - PRIOR_COUNT / (match_len + PRIOR_COUNT)));
    }
    if (expert == 0) {
        prediction->weight_set = (uint16_t)(match_len < RS_NUM_WEIGHT_SETS ? match_len : RS_NUM_WEIGHT_SETS - 1);
    }
}

void rs_prediction_add_context(rs_calibration *calibration, rs_prediction *prediction, int context, int32_t token,
                               uint32_t confidence) {
    uint32_t cell = RS_NUM_MATCH_CELLS + (uint32_t)context * (RS_MAX_CONFIDENCE + 1) + confidence;
    if (!add(calibration, prediction, RS_NUM_MATCHES + context, token, cell)) {
        set_prior(calibration, prediction, RS_NUM_MATCHES + context, confidence / (confidence + 2.0));
    }
}

/* The corpus is most often none or not asked, and comes last. */
static int num_asked(const rs_prediction *prediction) {
    return prediction->tokens[RS_CORPUS_EXPERT] < 0 ? RS_CORPUS_EXPERT : RS_NUM_EXPERTS;
}

/* What each expert says for its own token, and for any other one: the mixer's inputs. */
static void inputs_of(const rs_calibration *calibration, const rs_prediction *prediction,
                      double inputs[2][RS_NUM_EXPERTS]) {
    const int num = num_asked(prediction);
    for (int e = 0; e < num; e++) {
        inputs[0][e] = inputs[1][e] = 0.0;
        if (prediction->tokens[e] >= 0) {
            double p = calibration->cells[prediction->cells[e]].probability;
            inputs[0][e] = stretch(calibration, p);
            inputs[1][e] = stretch(calibration, (1.0 - p) * RIVAL_SHARE);
        }
    }
}

static double mix(const rs_weights *weights, const rs_prediction *prediction, double inputs[2][RS_NUM_EXPERTS],
                  int32_t candidate) {
    double sum = weights->bias;
    const int num = num_asked(prediction);
    for (int e = 0; e < num; e++) {
        int rival = prediction->tokens[e] != candidate;
        sum += weights->experts[rival][e] * inputs[rival][e];
    }
    return sum;
}

double rs_predict(const rs_calibration *calibration, rs_prediction *prediction) {
    const rs_weights *weights = calibration->weights + prediction->weight_set;
    double inputs[2][RS_NUM_EXPERTS];
    double best = 0.0;
    prediction->token = -1;
    inputs_of(calibration, prediction, inputs);
    const int num = num_asked(prediction);
    for (int e = 0; e < num; e++) {
        int32_t candidate = prediction->tokens[e];
        if (candidate < 0 || candidate == prediction->token) {
            continue;
        }
        double score = mix(weights, prediction, inputs, candidate);
        if (prediction->token < 0 || score > best) {
            best = score;
            prediction->token = candidate;
        }
    }
    return prediction->token < 0 ? 0.0 : squash(best);
}

static double bounded(double weight) { return fmax(-MAX_WEIGHT, fmin(MAX_WEIGHT, weight)); }

void rs_calibrate(rs_calibration *calibration, const rs_prediction *prediction, int32_t token) {
    if (prediction->token < 0) {
        return;
    }
    rs_weights *weights = calibration->weights + prediction->weight_set;
    double inputs[2][RS_NUM_EXPERTS];
    inputs_of(calibration, prediction, inputs);
    double score = mix(weights, prediction, inputs, prediction->token);
    double step = LEARNING_RATE * ((prediction->token == token) - squash(score));
    weights->bias = bounded(weights->bias + step);
    const int num = num_asked(prediction);
    for (int e = 0; e < num; e++) {
        if (prediction->tokens[e] < 0) {
            continue;
        }
        int rival = prediction->tokens[e] != prediction->token;
        double *weight = weights->experts[rival] + e;
        *weight = bounded(*weight + step * inputs[rival][e]);
        rs_cell *cell = calibration->cells + prediction->cells[e];
        cell->num += cell->num < MAX_OBSERVATIONS;
        cell->probability += ((prediction->tokens[e] == token) - cell->probability) / cell->num;
    }
}
