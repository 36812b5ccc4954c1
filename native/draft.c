#include "draft.h"

#include <string.h>

/* The longest suffix, `state` included, that has been followed; the root where none has. */
static uint32_t followed_suffix(const rs_automaton *a, uint32_t state) {
    while (a->states[state].token < 0 && state != RS_ROOT) {
        state = a->states[state].link;
    }
    return state;
}

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* Move up to the longest suffix that has been followed. */
static void move_to_followed(rs_walk *walk) {
    uint32_t state = followed_suffix(walk->automaton, walk->state);
    if (state != walk->state) {
        walk->state = state;
        walk->match_len = walk->automaton->states[state].len;
    }
}

static void find_contexts(rs_walk *walk, const rs_index *index) {
    rs_context_tags(&walk->recent, walk->salt, walk->own_salt, walk->tags);
    rs_contexts_fetch(&index->contexts, walk->tags, walk->buckets);
}

static bool corpus_match_is_longer(const rs_walk *walk, const rs_index *index, rs_cursor match) {
    return match.len >= (uint64_t)walk->match_len + (uint32_t)index->options.corpus_margin;
}

/* Every mode but sam: into the corpus, if it has the longer match. */
static void choose_automaton(rs_walk *walk, const rs_index *index) {
    rs_cursor match = rs_cursor_followed(&index->corpus, walk->cursor);
    if (corpus_match_is_longer(walk, index, match)) {
        walk->in_corpus = true;
        walk->cursor = match;
        walk->match_len = match.len;
    }
}

int32_t rs_walk_start(rs_walk *walk, const rs_index *index, const rs_sequence *sequence, int32_t max_draft_tokens,
                      double min_token_prob, rs_prediction *predictions) {
    const rs_options *options = &index->options;
    const rs_automaton *a = &index->groups[sequence->group].automaton;
    walk->automaton = a;
    walk->cursor = sequence->cursor;
    walk->in_corpus = false;
    walk->state = sequence->last;
    walk->match_len = a->states[sequence->last].len;
    walk->min_token_prob = min_token_prob;
    walk->probability = 1.0;
    walk->num_predictions = 0;
    move_to_followed(walk);
    int32_t most = least(options->num_speculative_tokens, max_draft_tokens);
    if (options->mode == RS_MODE_SAM) {
        walk->recent = sequence->recent;
        walk->salt = rs_salt(index, sequence);
        walk->own_salt = rs_own_salt(sequence);
        walk->speaker = sequence->speaker;
        walk->num_live = index->groups[sequence->group].num_live;
        walk->predictions = predictions;
        walk->num_left = most;
        find_contexts(walk, index);
    } else {
        if (index->corpus.states != NULL) {
            choose_automaton(walk, index);
        }
        double by_match = options->max_spec_factor * walk->match_len;
        bool too_short = walk->match_len < (uint32_t)options->min_match_len;
        walk->num_left = too_short ? 0 : by_match < most ? (int32_t)by_match : most;
    }
    return (int32_t)walk->match_len;
}

/* Occurrences of full weight set aside for a follower that was never seen. */
static const double UNSEEN_COUNT = 0.25;

static rs_followers followers_of(const rs_automaton *a, const rs_state *state) {
    rs_followers followers = {NULL, 0};
    if (state->block != 0) {
        followers.others = rs_block_entries(&a->pool, state->block, &followers.num);
    }
    followers.num = followers.num < RS_MAX_BRANCHES - 1 ? followers.num : RS_MAX_BRANCHES - 1;
    return followers;
}

/* The most frequent follower of the state, which has one. */
typedef struct {
    int32_t token;
    uint32_t target;
    uint32_t count;
    uint32_t total; /* of all followers that are looked at */
} rs_choice;

/* Among equals, the one that was inserted first. */
static rs_choice most_frequent(const rs_automaton *a, const rs_state *state, rs_followers followers) {
    uint32_t best = a->states[state->target].count;
    uint32_t total = best;
    uint32_t chosen = 0; /* the number of the transition, from 1; 0: the first */
    for (uint32_t i = 0; i < followers.num; i++) {
        uint32_t count = a->states[followers.others[i].target].count;
        total += count;
        chosen = count > best ? i + 1 : chosen;
        best = count > best ? count : best;
    }
    int32_t token = chosen > 0 ? followers.others[chosen - 1].token : state->token;
    uint32_t target = chosen > 0 ? followers.others[chosen - 1].target : state->target;
    return (rs_choice){.token = token, .target = target, .count = best, .total = total};
}

/* Modes earliest and frequent. */
static int32_t next_of_match(rs_walk *walk, const rs_options *options) {
    const rs_automaton *a = walk->automaton;
    move_to_followed(walk);
    const rs_state *state = a->states + walk->state;
    if (state->len < (uint32_t)options->min_match_len) {
        return -1;
    }
    int32_t token = state->token;
    uint32_t target = state->target;
    if (options->mode == RS_MODE_FREQUENT) {
        rs_choice choice = most_frequent(a, state, followers_of(a, state));
        walk->probability *= (double)choice.count / (choice.total + UNSEEN_COUNT * RS_FULL_WEIGHT);
        if (walk->probability < walk->min_token_prob) {
            return -1;
        }
        token = choice.token;
        target = choice.target;
    }
    walk->state = target;
    walk->match_len++;
    __builtin_prefetch(a->states + target);
    return token;
}

/* Every mode but sam. */
static int32_t next_of_corpus(rs_walk *walk, const rs_corpus *corpus) {
    uint32_t state = walk->cursor.state;
    const rs_transition *next = rs_corpus_next(corpus, state);
    if (next == NULL) {
        return -1;
    }
    walk->probability *= corpus->states[next->target].count / (corpus->states[state].count + UNSEEN_COUNT);
    if (walk->probability < walk->min_token_prob) {
        return -1;
    }
    walk->cursor.state = next->target;
    __builtin_prefetch(corpus->states + next->target);
    return next->token;
}

/* The target of its first transition, and where the others are. Inlined for the reason that contexts.h gives. */
__attribute__((always_inline)) static inline void fetch_transitions(const rs_automaton *a, uint32_t at) {
    const rs_state *state = a->states + at;
    __builtin_prefetch(a->states + state->target);
    __builtin_prefetch(a->pool.units + rs_block_offset(state->block));
}

/* The targets of the others; the root is not asked, and may have more followers than any. */
__attribute__((always_inline)) static inline rs_followers fetch_followers(const rs_automaton *a, uint32_t at) {
    if (at == RS_ROOT) {
        return (rs_followers){NULL, 0};
    }
    rs_followers followers = followers_of(a, a->states + at);
    for (uint32_t i = 0; i < followers.num; i++) {
        __builtin_prefetch(a->states + followers.others[i].target);
    }
    return followers;
}

void rs_walk_fetch(rs_walk *walk, int stage) {
    const rs_automaton *a = walk->automaton;
    if (stage == 0) {
        move_to_followed(walk);
        walk->shorter = walk->state == RS_ROOT ? RS_ROOT : a->states[walk->state].link;
        fetch_transitions(a, walk->state);
        __builtin_prefetch(a->states + walk->shorter);
    } else if (stage == 1) {
        walk->shorter = followed_suffix(a, walk->shorter);
        fetch_transitions(a, walk->shorter);
    } else {
        walk->followers[0] = fetch_followers(a, walk->state);
        walk->followers[1] = fetch_followers(a, walk->shorter);
    }
}

static void ask_corpus(const rs_walk *walk, const rs_index *index, rs_prediction *prediction) {
    const rs_corpus *corpus = &index->corpus;
    rs_cursor match = rs_cursor_followed(corpus, walk->cursor);
    if (corpus_match_is_longer(walk, index, match)) {
        const rs_transition *next = rs_corpus_next(corpus, match.state);
        const rs_proposal proposal = {.token = next->token,
                                      .match_len = match.len,
                                      .count = corpus->states[next->target].count,
                                      .total = corpus->states[match.state].count,
                                      .unit = 1};
        rs_prediction_add_match(index->calibration, prediction, RS_CORPUS_EXPERT, &proposal);
    }
}

static rs_source source_of(const rs_walk *walk, uint32_t speaker) {
    if (speaker == walk->speaker || speaker == RS_PROMPT) {
        return RS_OWN_TEXT;
    }
    if (speaker == RS_OLDER_POLICIES) {
        return RS_OLDER_POLICY;
    }
    return walk->num_live[speaker] > 0 ? RS_LIVE_SIBLING : RS_FINISHED_SIBLING;
}

static void ask_experts(rs_walk *walk, const rs_index *index, rs_prediction *prediction) {
    const rs_automaton *a = walk->automaton;
    rs_prediction_init(prediction, rs_recent_last(&walk->recent));
    const uint32_t states[RS_NUM_MATCHES] = {walk->state, walk->shorter};
    for (int expert = 0; expert < RS_NUM_MATCHES && states[expert] != RS_ROOT; expert++) {
        rs_choice choice = most_frequent(a, a->states + states[expert], walk->followers[expert]);
        const rs_proposal proposal = {.token = choice.token,
                                      .match_len = expert == 0 ? walk->match_len : a->states[states[expert]].len,
                                      .count = choice.count,
                                      .total = choice.total,
                                      .unit = RS_FULL_WEIGHT,
                                      .source = source_of(walk, a->states[choice.target].speaker)};
        rs_prediction_add_match(index->calibration, prediction, expert, &proposal);
    }
    for (int context = 0; context < RS_NUM_CONTEXTS; context++) {
        rs_successor successor = rs_context_successor(walk->buckets[context], walk->tags[context]);
        rs_prediction_add_context(index->calibration, prediction, context, successor.token, successor.confidence);
    }
    if (index->corpus.states != NULL) {
        ask_corpus(walk, index, prediction);
    }
}

/* To the longest suffix of text + draft + token that is in the automaton. */
static void move_along(rs_walk *walk, int32_t token) {
    const rs_automaton *a = walk->automaton;
    const uint32_t *target;
    while ((target = rs_find(a, walk->state, token)) == NULL && walk->state != RS_ROOT) {
        walk->state = a->states[walk->state].link;
        walk->match_len = a->states[walk->state].len;
    }
    if (target != NULL) {
        walk->state = *target;
        walk->match_len++;
        __builtin_prefetch(a->states + *target);
    }
}

static int32_t next_of_experts(rs_walk *walk, const rs_index *index) {
    rs_prediction *prediction = walk->predictions + walk->num_predictions;
    ask_experts(walk, index, prediction);
    walk->probability *= rs_predict(index->calibration, prediction);
    if (prediction->token < 0) {
        return -1;
    }
    walk->num_predictions++;
    if (walk->probability < walk->min_token_prob) {
        return -1;
    }
    if (walk->num_left > 1) {
        rs_recent_push(&walk->recent, prediction->token);
        find_contexts(walk, index);
        move_along(walk, prediction->token);
        if (index->corpus.states != NULL) {
            rs_cursor_move(&index->corpus, &walk->cursor, prediction->token);
            __builtin_prefetch(index->corpus.states + walk->cursor.state);
        }
    }
    return prediction->token;
}

int32_t rs_walk_next(rs_walk *walk, const rs_index *index) {
    int32_t token;
    if (index->options.mode == RS_MODE_SAM) {
        token = next_of_experts(walk, index);
    } else if (walk->in_corpus) {
        token = next_of_corpus(walk, &index->corpus);
    } else {
        token = next_of_match(walk, &index->options);
    }
    walk->num_left = token < 0 ? 0 : walk->num_left - 1;
    return token;
}

/* One path of mode suffix_policy: its length, and the sum of its probabilities. */
static int32_t suffix_path(const rs_automaton *a, uint32_t at, double min_token_prob, int32_t most, int32_t *path,
                           float *survivals, double *score) {
    double probability = 1.0;
    int32_t num = 0;
    *score = 0.0;
    while (num < most && a->states[at].token >= 0) {
        rs_choice choice = most_frequent(a, a->states + at, followers_of(a, a->states + at));
        /* The counts of a class and of those that follow it may differ by what was not counted. */
        uint32_t of = a->states[at].count > choice.count ? a->states[at].count : choice.count;
        probability *= (double)choice.count / of;
        if (probability < min_token_prob) {
            break;
        }
        survivals[num] = (float)probability;
        path[num++] = choice.token;
        *score += probability;
        at = choice.target;
    }
    return num;
}

int32_t rs_suffix_policy(const rs_automaton *a, uint32_t last, const rs_options *options, int32_t max_draft_tokens,
                         double min_token_prob, int32_t *draft_tokens, float *survivals) {
    int32_t most = least(options->num_speculative_tokens, max_draft_tokens);
    int32_t num_best = 0;
    double best = 0.0;
    uint32_t state = followed_suffix(a, last);
    for (int i = 0; i < RS_MAX_SUFFIX_CLASSES && state != RS_ROOT; i++) {
        int32_t path[RS_MAX_SPECULATIVE_TOKENS];
        float path_survivals[RS_MAX_SPECULATIVE_TOKENS];
        double by_match = options->max_spec_factor * a->states[state].len;
        int32_t longest = by_match < most ? (int32_t)by_match : most;
        if (longest <= best) {
            break; /* no probability is above 1, and a shorter suffix may draft no more than this one */
        }
        double score;
        int32_t num = suffix_path(a, state, min_token_prob, longest, path, path_survivals, &score);
        if (score > best && a->states[state].len >= (uint32_t)options->min_match_len) {
            best = score;
            num_best = num;
            memcpy(draft_tokens, path, (size_t)num * sizeof *path);
            memcpy(survivals, path_survivals, (size_t)num * sizeof *path_survivals);
        }
        state = a->states[state].link;
    }
    return num_best;
}
