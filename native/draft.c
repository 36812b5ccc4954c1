#include "draft.h"

/* The longest suffix, `state` included, that has been followed; the root where none has. */
static uint32_t followed_suffix(const rs_automaton *a, uint32_t state) {
    while (a->states[state].token < 0 && state != RS_ROOT) {
        state = a->states[state].link;
    }
    return state;
}

int32_t rs_walk_start(rs_walk *walk, const rs_automaton *a, uint32_t last, const rs_options *options,
                      int32_t max_draft_tokens) {
    uint32_t state = followed_suffix(a, last);
    uint32_t match_len = a->states[state].len;
    *walk = (rs_walk){.automaton = a, .state = state, .probability = 1.0};
    if (match_len >= (uint32_t)options->min_match_len) {
        int32_t most = options->num_speculative_tokens;
        if (most > max_draft_tokens) {
            most = max_draft_tokens;
        }
        double by_match = options->max_spec_factor * match_len;
        walk->num_left = by_match < most ? (int32_t)by_match : most;
    }
    return (int32_t)match_len;
}

/* Occurrences set aside for a follower that was never seen. */
static const double UNSEEN_COUNT = 0.25;

/* The most frequent follower of the state; returns its estimated probability. */
static double most_frequent(const rs_automaton *a, const rs_state *state, int32_t *token, uint32_t *target) {
    uint32_t best = a->states[state->target].count;
    uint64_t total = best;
    uint32_t num = 0;
    const rs_transition *others = state->block == 0 ? NULL : rs_block_entries(&a->pool, state->block, &num);
    if (num > RS_MAX_BRANCHES - 1) {
        num = RS_MAX_BRANCHES - 1;
    }
    for (uint32_t i = 0; i < num; i++) {
        uint32_t count = a->states[others[i].target].count;
        total += count;
        if (count > best) {
            best = count;
            *token = others[i].token;
            *target = others[i].target;
        }
    }
    return (double)best / ((double)total + UNSEEN_COUNT);
}

int32_t rs_walk_next(rs_walk *walk, const rs_options *options) {
    const rs_automaton *a = walk->automaton;
    uint32_t at = followed_suffix(a, walk->state);
    const rs_state *state = a->states + at;
    int32_t token = -1;
    if (state->len >= (uint32_t)options->min_match_len) {
        token = state->token;
        uint32_t target = state->target;
        if (options->mode == RS_MODE_FREQUENT) {
            walk->probability *= most_frequent(a, state, &token, &target);
            if (walk->probability < options->min_token_prob) {
                token = -1;
            }
        }
        walk->state = target;
        __builtin_prefetch(a->states + target);
    }
    walk->num_left = token < 0 ? 0 : walk->num_left - 1;
    return token;
}
