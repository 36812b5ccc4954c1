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
        for (int i = 0; i < RS_NUM_INPUTS - 1; i++) {
            calibration->weights[set][i] = FIRST_WEIGHT;
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

static uint32_t total_bucket(uint64_t total) {
    uint32_t bucket = 0;
    while (bucket < RS_NUM_TOTALS - 1 && total > (1U << bucket)) {
        bucket++;
    }
    return bucket;
}

static void add(rs_calibration *calibration, rs_prediction *prediction, int expert, int32_t token, uint32_t cell,
                double prior) {
    rs_cell *found = calibration->cells + cell;
    if (found->num == 0) {
        *found = (rs_cell){.probability = prior, .num = PRIOR_OBSERVATIONS};
    }
    prediction->tokens[expert] = token;
    prediction->cells[expert] = (uint16_t)cell;
}

void rs_prediction_add_match(rs_calibration *calibration, rs_prediction *prediction, int expert, int32_t token,
                             uint32_t match_len, uint32_t count, uint64_t total) {
    uint32_t share = count == total ? RS_NUM_SHARES - 1 : (uint32_t)((uint64_t)count * (RS_NUM_SHARES - 1) / total);
    uint32_t cell = (((uint32_t)expert * RS_NUM_LENGTHS + length_bucket(match_len)) * RS_NUM_TOTALS +
                     total_bucket(total)) * RS_NUM_SHARES + share;
    double prior = (double)count / ((double)total + PRIOR_COUNT) * (1.0 - PRIOR_COUNT / (match_len + PRIOR_COUNT));
    add(calibration, prediction, expert, token, cell, prior);
    if (expert == 0) {
        prediction->weight_set = (uint16_t)(match_len < RS_NUM_WEIGHT_SETS ? match_len : RS_NUM_WEIGHT_SETS - 1);
    }
}

void rs_prediction_add_context(rs_calibration *calibration, rs_prediction *prediction, int context, int32_t token,
                               uint32_t confidence) {
    uint32_t cell = RS_NUM_MATCH_CELLS + (uint32_t)context * (RS_MAX_CONFIDENCE + 1) + confidence;
    add(calibration, prediction, RS_NUM_MATCHES + context, token, cell, confidence / (confidence + 2.0));
}

/* The mixer's inputs for one candidate: first the experts for it, then those for another token. */
static void inputs_for(const rs_calibration *calibration, const rs_prediction *prediction, int32_t candidate,
                       double inputs[RS_NUM_INPUTS]) {
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        inputs[e] = inputs[RS_NUM_EXPERTS + e] = 0.0;
        if (prediction->tokens[e] < 0) {
            continue;
        }
        double p = calibration->cells[prediction->cells[e]].probability;
        if (prediction->tokens[e] == candidate) {
            inputs[e] = stretch(calibration, p);
        } else {
            inputs[RS_NUM_EXPERTS + e] = stretch(calibration, (1.0 - p) * RIVAL_SHARE);
        }
    }
    inputs[RS_NUM_INPUTS - 1] = 1.0;
}

static double mix(const double weights[RS_NUM_INPUTS], const double inputs[RS_NUM_INPUTS]) {
    double sum = 0.0;
    for (int i = 0; i < RS_NUM_INPUTS; i++) {
        sum += weights[i] * inputs[i];
    }
    return sum;
}

static bool is_first(const rs_prediction *prediction, int expert) {
    for (int e = 0; e < expert; e++) {
        if (prediction->tokens[e] == prediction->tokens[expert]) {
            return false;
        }
    }
    return prediction->tokens[expert] >= 0;
}

double rs_predict(const rs_calibration *calibration, rs_prediction *prediction) {
    double best = 0.0;
    prediction->token = -1;
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        if (!is_first(prediction, e)) {
            continue;
        }
        double inputs[RS_NUM_INPUTS];
        inputs_for(calibration, prediction, prediction->tokens[e], inputs);
        double score = mix(calibration->weights[prediction->weight_set], inputs);
        if (prediction->token < 0 || score > best) {
            best = score;
            prediction->token = prediction->tokens[e];
        }
    }
    return prediction->token < 0 ? 0.0 : squash(best);
}

void rs_calibrate(rs_calibration *calibration, const rs_prediction *prediction, int32_t token) {
    if (prediction->token < 0) {
        return;
    }
    double inputs[RS_NUM_INPUTS];
    double *weights = calibration->weights[prediction->weight_set];
    inputs_for(calibration, prediction, prediction->token, inputs);
    double step = LEARNING_RATE * ((prediction->token == token) - squash(mix(weights, inputs)));
    for (int i = 0; i < RS_NUM_INPUTS; i++) {
        weights[i] = fmax(-MAX_WEIGHT, fmin(MAX_WEIGHT, weights[i] + step * inputs[i]));
    }
    for (int e = 0; e < RS_NUM_EXPERTS; e++) {
        if (prediction->tokens[e] < 0) {
            continue;
        }
        rs_cell *cell = calibration->cells + prediction->cells[e];
        cell->num += cell->num < MAX_OBSERVATIONS;
        cell->probability += ((prediction->tokens[e] == token) - cell->probability) / cell->num;
    }
}
