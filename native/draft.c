/* A draft, token by token. At every position all experts are asked, the best proposal is taken, and the walk moves to
 * where text + draft is then in everything that will be asked next:
 *
 *     text .. x y | d1 d2 ?        experts:  0  the match in the group's automaton: `state`
 *                 ^                          1  the next shorter class with a continuation: `shorter`
 *                 draft                      2  contexts: the last 1, 2, 3, 6 tokens, wherever; the last 2, 1 here
 *                                            .. the corpus, where its match is longer than expert 0's
 *
 * Invariants: after a fetch `state` and `shorter` are the root or have continuations, `shorter` is above `state`, and
 * `continuations` are theirs; a walk makes no more predictions than max_draft_tokens. */
#include "draft.h"

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* The longest suffix, `state` included, that has a continuation; the root where none has. */
static uint32_t continued_suffix(const rs_automaton *a, uint32_t state) {
    while (a->states[state].token < 0 && state != RS_ROOT) {
        state = a->states[state].link;
    }
    return state;
}

static void move_to_continued(rs_walk *walk) {
    uint32_t state = continued_suffix(walk->automaton, walk->state);
    if (state != walk->state) {
        walk->state = state;
        walk->match_len = walk->automaton->states[state].len;
    }
}

static void find_contexts(rs_walk *walk, const rs_index *index) {
    rs_context_tags(&walk->recent, walk->own_salt, walk->tags);
    rs_contexts_fetch(&index->contexts, walk->tags, walk->buckets);
}

void rs_walk_start(rs_walk *walk, const rs_index *index, int32_t id, int32_t max_draft_tokens,
                   double min_token_prob) {
    const rs_sequence *sequence = index->sequences + id;
    walk->automaton = &index->groups[sequence->group].automaton;
    walk->state = sequence->last;
    walk->match_len = walk->automaton->states[sequence->last].len;
    walk->recent = sequence->recent;
    walk->own_salt = rs_own_salt(sequence);
    walk->cursor = sequence->cursor;
    walk->num_left = least(index->options.num_speculative_tokens, max_draft_tokens);
    walk->min_token_prob = min_token_prob;
    walk->survival = 1.0;
    walk->predictions = rs_predictions(index, id);
    walk->num_predictions = 0;
    move_to_continued(walk);
    find_contexts(walk, index);
}

/* ---- what is asked for is fetched first ---- */

static rs_continuations continuations_of(const rs_automaton *a, const rs_state *state) {
    rs_continuations continuations = {NULL, 0};
    if (state->block != 0) {
        continuations.others = rs_block_entries(&a->pool, state->block, &continuations.num);
    }
    continuations.num = continuations.num < RS_MAX_BRANCHES - 1 ? continuations.num : RS_MAX_BRANCHES - 1;
    return continuations;
}

/* The target of its first transition, and where the others are. Inlined for the reason that contexts.h gives. */
__attribute__((always_inline)) static inline void fetch_transitions(const rs_automaton *a, uint32_t at) {
    const rs_state *state = a->states + at;
    __builtin_prefetch(a->states + state->target);
    __builtin_prefetch(a->pool.units + rs_block_offset(state->block));
}

/* The targets of the others; the root is not asked, and may have more continuations than any. */
__attribute__((always_inline)) static inline rs_continuations fetch_continuations(const rs_automaton *a, uint32_t at) {
    if (at == RS_ROOT) {
        return (rs_continuations){NULL, 0};
    }
    rs_continuations continuations = continuations_of(a, a->states + at);
    for (uint32_t i = 0; i < continuations.num; i++) {
        __builtin_prefetch(a->states + continuations.others[i].target);
    }
    return continuations;
}

void rs_walk_fetch(rs_walk *walk, int stage) {
    const rs_automaton *a = walk->automaton;
    if (stage == 0) {
        move_to_continued(walk);
        walk->shorter = walk->state == RS_ROOT ? RS_ROOT : a->states[walk->state].link;
        fetch_transitions(a, walk->state);
        __builtin_prefetch(a->states + walk->shorter);
    } else if (stage == 1) {
        walk->shorter = continued_suffix(a, walk->shorter);
        fetch_transitions(a, walk->shorter);
    } else {
        walk->continuations[0] = fetch_continuations(a, walk->state);
        walk->continuations[1] = fetch_continuations(a, walk->shorter);
    }
}

/* ---- what the experts propose ---- */

/* The most frequent continuation of the state, which has one; among equals, the one that was inserted first. */
static rs_proposal most_frequent(const rs_automaton *a, const rs_state *state, rs_continuations continuations) {
    uint32_t best = a->states[state->target].count;
    uint32_t total = best;
    uint32_t chosen = 0; /* the number of the transition, from 1; 0: the first */
    for (uint32_t i = 0; i < continuations.num; i++) {
        uint32_t count = a->states[continuations.others[i].target].count;
        total += count;
        chosen = count > best ? i + 1 : chosen;
        best = count > best ? count : best;
    }
    int32_t token = chosen > 0 ? continuations.others[chosen - 1].token : state->token;
    return (rs_proposal){.token = token, .count = best, .total = total};
}

static void ask_matches(const rs_walk *walk, rs_prediction *prediction) {
    const rs_automaton *a = walk->automaton;
    const uint32_t states[RS_NUM_MATCHES] = {walk->state, walk->shorter};
    const uint32_t match_lens[RS_NUM_MATCHES] = {walk->match_len, a->states[walk->shorter].len};
    for (int expert = 0; expert < RS_NUM_MATCHES && states[expert] != RS_ROOT; expert++) {
        rs_proposal proposal = most_frequent(a, a->states + states[expert], walk->continuations[expert]);
        proposal.match_len = match_lens[expert];
        rs_prediction_add_match(prediction, expert, &proposal);
    }
}

static void ask_contexts(const rs_walk *walk, rs_prediction *prediction) {
    for (int context = 0; context < RS_NUM_CONTEXTS; context++) {
        rs_prediction_add_context(prediction, context,
                                  rs_context_successor(walk->buckets[context], walk->tags[context]));
    }
}

static void ask_corpus(const rs_walk *walk, const rs_index *index, rs_prediction *prediction) {
    const rs_corpus *corpus = &index->corpus;
    rs_cursor match = rs_cursor_continued(corpus, walk->cursor);
    const rs_transition *next = rs_corpus_next(corpus, match.state);
    if (match.len > walk->match_len && next != NULL) {
        const rs_proposal proposal = {.token = next->token,
                                      .match_len = match.len,
                                      .count = corpus->states[next->target].count,
                                      .total = corpus->states[match.state].count};
        rs_prediction_add_match(prediction, RS_CORPUS_EXPERT, &proposal);
    }
}

/* ---- one token further ---- */

/* In the automaton, to the longest suffix of text + draft + token that is in it. */
static void move_match(rs_walk *walk, int32_t token) {
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

static void move(rs_walk *walk, const rs_index *index, int32_t token) {
    rs_recent_push(&walk->recent, token);
    find_contexts(walk, index);
    move_match(walk, token);
    if (index->corpus.states != NULL) {
        rs_cursor_move(&index->corpus, &walk->cursor, token);
        __builtin_prefetch(index->corpus.states + walk->cursor.state);
    }
}

int32_t rs_walk_next(rs_walk *walk, const rs_index *index) {
    rs_prediction *prediction = walk->predictions + walk->num_predictions;
    rs_prediction_init(prediction, rs_recent_last(&walk->recent));
    ask_matches(walk, prediction);
    ask_contexts(walk, prediction);
    if (index->corpus.states != NULL) {
        ask_corpus(walk, index, prediction);
    }
    walk->survival *= rs_predict(&index->calibration, prediction);
    walk->num_predictions += prediction->token >= 0;
    if (prediction->token < 0 || walk->survival < walk->min_token_prob) {
        walk->num_left = 0;
        return -1;
    }
    if (--walk->num_left > 0) {
        move(walk, index, prediction->token);
    }
    return prediction->token;
}
