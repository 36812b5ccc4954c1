/* A draft, token by token. At every position all experts are asked, the best proposal is taken, and the walk moves to
 * where text + draft is then in everything that will be asked next:
 *
 *     text .. x y | d1 d2 ?     experts:  the match in the group's automaton: `match`
 *                 ^                       the next shorter class with a continuation: `shorter`
 *                 draft                   contexts: the last 1, 2, 3, 6 tokens, wherever; the last 2, 1 here
 *                                         a model, while d1 d2 are what it drafted itself
 *                                         the corpus, where its match is longer than `match`
 *
 * Invariants: `match` and `shorter` are at the root or have continuations, `shorter` is above `match`; a walk makes no more
 * predictions than max_draft_tokens. */
#include "draft.h"

typedef struct {
    const rs_index *index;
    const rs_automaton *automaton;
    rs_match match;       /* of the text and draft, in the group's automaton */
    uint32_t shorter;     /* the next class above the match's with a continuation */
    rs_recent recent;     /* the end of the text and draft */
    uint64_t own_salt;
    rs_match corpus;      /* of the text and draft, in the corpus, if there is one */
    rs_model_draft model; /* none after a token that is not its own */
    int32_t depth;        /* of the draft, in tokens */
} walk;

/* To the longest suffix that has a continuation; then every shorter one has it too. */
static void move_to_continued(walk *w) {
    rs_match_continue(w->automaton, &w->match);
    w->shorter = w->match.state == RS_ROOT ? RS_ROOT : w->automaton->states[w->match.state].link;
}

static walk start(const rs_index *index, const rs_sequence *sequence, rs_model_draft model) {
    const rs_automaton *a = &index->groups[sequence->group].automaton;
    walk w = {.index = index,
              .automaton = a,
              .match = {sequence->at.last, a->states[sequence->at.last].len},
              .recent = sequence->at.recent,
              .own_salt = rs_own_salt(sequence->serial),
              .corpus = sequence->at.corpus,
              .model = model};
    move_to_continued(&w);
    return w;
}

/* ---- what the experts propose ---- */

/* The most frequent continuation of a match that has one; among equals, the one that was inserted first. */
static rs_proposal most_frequent(const rs_automaton *a, rs_match match) {
    const rs_state *state = a->states + match.state;
    uint32_t num = 0;
    const rs_transition *others = state->block == 0 ? NULL : rs_block_entries(&a->pool, state->block, &num);
    rs_proposal best = {.token = state->token, .match_len = match.len, .count = a->states[state->target].count};
    best.total = best.count;
    for (uint32_t i = 0; i < num && i < RS_MAX_BRANCHES - 1; i++) {
        uint32_t count = a->states[others[i].target].count;
        best.total += count;
        best.token = count > best.count ? others[i].token : best.token;
        best.count = count > best.count ? count : best.count;
    }
    return best;
}

static void ask_matches(const walk *w, rs_prediction *prediction) {
    const rs_automaton *a = w->automaton;
    const rs_match matches[RS_NUM_MATCHES] = {[RS_LONGEST_MATCH] = w->match,
                                              [RS_SHORTER_MATCH] = {w->shorter, a->states[w->shorter].len}};
    for (int expert = 0; expert < RS_NUM_MATCHES && matches[expert].state != RS_ROOT; expert++) {
        const rs_proposal proposal = most_frequent(a, matches[expert]);
        rs_prediction_add_match(prediction, expert, &proposal);
    }
}

static void ask_contexts(const walk *w, const uint32_t tags[RS_NUM_CONTEXTS], rs_prediction *prediction) {
    for (int context = 0; context < RS_NUM_CONTEXTS; context++) {
        const rs_context_bucket *bucket = rs_context_bucket_of(&w->index->contexts, tags[context]);
        rs_prediction_add_context(prediction, context, rs_context_successor(bucket, tags[context]));
    }
}

static void ask_corpus(const walk *w, rs_prediction *prediction) {
    rs_match match = w->corpus;
    rs_match_continue(&w->index->corpus, &match);
    if (match.len > w->match.len) {
        const rs_proposal proposal = most_frequent(&w->index->corpus, match);
        rs_prediction_add_match(prediction, RS_CORPUS_EXPERT, &proposal);
    }
}

static void ask(const walk *w, rs_prediction *prediction) {
    uint32_t tags[RS_NUM_CONTEXTS];
    rs_context_tags(&w->recent, w->own_salt, tags);
    for (int context = 0; context < RS_NUM_CONTEXTS; context++) { /* their buckets come while the matches are asked */
        __builtin_prefetch(rs_context_bucket_of(&w->index->contexts, tags[context]));
    }
    rs_prediction_init(prediction, rs_recent_last(&w->recent));
    ask_matches(w, prediction);
    ask_contexts(w, tags, prediction);
    if (w->index->corpus.states != NULL) {
        ask_corpus(w, prediction);
    }
    if (w->depth < w->model.num && w->model.tokens[w->depth] >= 0) {
        rs_prediction_add_model(prediction, w->depth, w->model.tokens[w->depth], w->model.confidences[w->depth]);
    }
}

/* ---- one token further ---- */

static void move(walk *w, int32_t token) {
    if (w->depth < w->model.num && w->model.tokens[w->depth] != token) {
        w->model.num = 0;
    }
    w->depth++;
    rs_recent_push(&w->recent, token);
    rs_match_move(w->automaton, &w->match, token);
    move_to_continued(w);
    if (w->index->corpus.states != NULL) {
        rs_match_move(&w->index->corpus, &w->corpus, token);
    }
}

int32_t rs_draft(rs_index *index, rs_sequence *sequence, int32_t max_draft_tokens, double min_survival,
                 rs_model_draft model, int32_t *tokens, float *survivals) {
    rs_prediction *predictions = sequence->predictions;
    walk w = start(index, sequence, model);
    double survival = 1.0;
    sequence->num_predictions = 0;
    int32_t i = 0;
    for (; i < max_draft_tokens && i < index->options.num_speculative_tokens; i++) {
        if (i > 0) {
            move(&w, tokens[i - 1]);
        }
        ask(&w, predictions + i);
        survival *= rs_predict(&index->mixer, predictions + i);
        sequence->num_predictions += predictions[i].token >= 0;
        if (predictions[i].token < 0 || survival < min_survival) {
            break;
        }
        tokens[i] = predictions[i].token;
        survivals[i] = (float)survival;
    }
    return i;
}
