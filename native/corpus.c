/* The static corpus: read from its block, built from texts, checked.
 *
 *     head    num_tokens | num_states | num_transitions
 *     states  [ 0: root ][ 1 ] ... [ n-1 ][ n ]                  `first` of each: where its transitions begin;
 *               |         |                 |                    those of the next one end them, so state n is there
 *               v         v                 v                    only for its `first`
 *     transitions  [ most frequent | others by token ][ ... ] ... end
 *
 * Invariants, which rs_corpus_check checks: everything points into the block, and suffix links lead to the root, so
 * that no use reads outside or goes round for ever; the first transition is on the most frequent continuation; a
 * state's strings are those of an automaton, so that the root has every token.
 *
 * While a corpus is built, the count of a state is how many texts or beginnings of texts end in it; a string occurs
 * where a beginning ends in its state or in one that links to it, and writing sums these up. */
#include "corpus.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

/* That are followed at once. Chains of text are shorter, but for runs of one token; those of a file may be of any length. */
enum { MAX_LINKS = 256 };

struct rs_corpus_builder {
    rs_memory memory;
    rs_automaton automaton; /* which does not count by itself */
    uint64_t num_tokens;
};

/* ---- reading ---- */

static uint64_t content_bytes(uint64_t num_states, uint64_t num_transitions) {
    return sizeof(rs_corpus_head) + (num_states + 1) * sizeof(rs_corpus_state) +
           num_transitions * sizeof(rs_transition);
}

/* Of a state, num of them. */
static const rs_transition *transitions_of(const rs_corpus *corpus, uint32_t state, uint32_t *num) {
    const uint32_t first = corpus->states[state].first;
    const uint32_t end = corpus->states[state + 1].first;
    *num = first < end && end <= corpus->num_transitions ? end - first : 0;
    return corpus->transitions + (*num > 0 ? first : 0);
}

bool rs_corpus_open(rs_corpus *corpus, const void *content, uint64_t num_bytes) {
    const rs_corpus_head *head = content;
    if ((uintptr_t)content % _Alignof(rs_corpus_head) != 0 || num_bytes < content_bytes(1, 0) ||
        head->num_states == 0 || num_bytes != content_bytes(head->num_states, head->num_transitions)) {
        return false;
    }
    corpus->states = (const rs_corpus_state *)(head + 1);
    corpus->transitions = (const rs_transition *)(corpus->states + head->num_states + 1);
    corpus->num_states = head->num_states;
    corpus->num_transitions = head->num_transitions;
    uint32_t num;
    const rs_transition *of_root = transitions_of(corpus, RS_ROOT, &num);
    corpus->largest_token = -1;
    if (num > 0) { /* one of them is not in the order of the others */
        corpus->largest_token = of_root[0].token > of_root[num - 1].token ? of_root[0].token : of_root[num - 1].token;
    }
    return true;
}

static const rs_transition *find(const rs_corpus *corpus, uint32_t state, int32_t token) {
    uint32_t num;
    const rs_transition *low = transitions_of(corpus, state, &num);
    const rs_transition *end = low + num;
    if (num > 0 && low->token != token) {
        low++;
        for (const rs_transition *high = end; low < high;) {
            const rs_transition *middle = low + (high - low) / 2;
            if (middle->token < token) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
    }
    return low < end && low->token == token && low->target < corpus->num_states ? low : NULL;
}

/* To a shorter suffix, the empty one where num_links have been followed. */
static void move_up(const rs_corpus *corpus, rs_cursor *cursor, int num_links) {
    const uint32_t link = corpus->states[cursor->state].link;
    const bool leads_up =
        num_links < MAX_LINKS && link < corpus->num_states && corpus->states[link].len < cursor->len;
    *cursor = leads_up ? (rs_cursor){link, corpus->states[link].len} : (rs_cursor){RS_ROOT, 0};
}

void rs_cursor_move(const rs_corpus *corpus, rs_cursor *cursor, int32_t token) {
    const rs_transition *next;
    for (int i = 0; (next = find(corpus, cursor->state, token)) == NULL && cursor->state != RS_ROOT; i++) {
        move_up(corpus, cursor, i);
    }
    if (next != NULL) {
        cursor->state = next->target;
        cursor->len++;
    }
}

const rs_transition *rs_corpus_next(const rs_corpus *corpus, uint32_t state) {
    uint32_t num;
    const rs_transition *next = transitions_of(corpus, state, &num);
    if (num == 0 || next->target >= corpus->num_states || next->token < 0 || next->token > corpus->largest_token) {
        return NULL;
    }
    const uint32_t count = corpus->states[next->target].count;
    return count > 0 && count <= corpus->states[state].count ? next : NULL;
}

rs_cursor rs_cursor_continued(const rs_corpus *corpus, rs_cursor cursor) {
    for (int i = 0; rs_corpus_next(corpus, cursor.state) == NULL && cursor.state != RS_ROOT; i++) {
        move_up(corpus, &cursor, i);
    }
    return cursor;
}

/* ---- building ---- */

rs_status rs_corpus_new(rs_corpus_builder **builder, rs_error *error) {
    rs_memory memory = {.max_bytes = 0};
    rs_corpus_builder *made = NULL;
    uint32_t capacity = 0;
    if (rs_resize(&memory, (void **)&made, &capacity, 1, sizeof *made) != RS_OK) {
        return rs_fail(error, RS_ENOMEM, "out of memory");
    }
    *made = (rs_corpus_builder){.memory = memory};
    if (rs_automaton_init(&made->automaton, &made->memory, false) != RS_OK) {
        rs_corpus_free(made);
        return rs_fail(error, RS_ENOMEM, "out of memory");
    }
    *builder = made;
    return RS_OK;
}

void rs_corpus_free(rs_corpus_builder *builder) {
    rs_automaton_free(&builder->automaton);
    rs_release(&builder->memory, UINT64_MAX);
    free(builder);
}

rs_status rs_corpus_add(rs_corpus_builder *builder, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    rs_status status = rs_check_tokens(token_ids, num_tokens, "token_ids", error);
    if (status != RS_OK) {
        return status;
    }
    rs_automaton *a = &builder->automaton;
    uint32_t last = RS_ROOT;
    for (int64_t i = 0; i < num_tokens; i++) {
        if (rs_extend(a, &last, token_ids[i]) != RS_OK) {
            return rs_fail(error, RS_ENOMEM, "out of memory");
        }
        a->states[last].count++;
        builder->num_tokens++;
    }
    return RS_OK;
}

uint64_t rs_corpus_num_bytes(const rs_corpus_builder *builder) {
    return content_bytes(builder->automaton.num_states, builder->automaton.num_transitions);
}

/* `first` counts the links to a state that are still to come. */
static void sum_occurrences(rs_corpus_state *states, uint32_t num_states) {
    const uint32_t done = UINT32_MAX;
    for (uint32_t i = 1; i < num_states; i++) {
        states[states[i].link].first++;
    }
    for (uint32_t i = 1; i < num_states; i++) {
        for (uint32_t at = i; at != RS_ROOT && states[at].first == 0; at = states[at].link) {
            rs_corpus_state *above = states + states[at].link;
            above->count += states[at].count;
            above->first--;
            states[at].first = done;
        }
    }
}

static int by_token(const void *a, const void *b) {
    int32_t left = ((const rs_transition *)a)->token;
    int32_t right = ((const rs_transition *)b)->token;
    return (left > right) - (left < right);
}

/* The transitions of a state in the order of the block; returns how many there are. */
static uint32_t write_transitions(const rs_automaton *a, uint32_t at, const rs_corpus_state *states,
                                  rs_transition *transitions) {
    const rs_state *state = a->states + at;
    if (state->token < 0) {
        return 0;
    }
    uint32_t num = 0;
    const rs_transition *others = state->block == 0 ? NULL : rs_block_entries(&a->pool, state->block, &num);
    transitions[0] = (rs_transition){.token = state->token, .target = state->target};
    if (num > 0) {
        memcpy(transitions + 1, others, num * sizeof *others);
    }
    uint32_t best = 0;
    for (uint32_t i = 1; i <= num; i++) {
        if (states[transitions[i].target].count > states[transitions[best].target].count) {
            best = i;
        }
    }
    const rs_transition most_frequent = transitions[best];
    transitions[best] = transitions[0];
    transitions[0] = most_frequent;
    qsort(transitions + 1, num, sizeof *transitions, by_token);
    return num + 1;
}

rs_status rs_corpus_write(const rs_corpus_builder *builder, void *content, uint64_t num_bytes, rs_error *error) {
    rs_corpus_head *head = content;
    if ((uintptr_t)content % _Alignof(rs_corpus_head) != 0 || num_bytes != rs_corpus_num_bytes(builder)) {
        return rs_fail(error, RS_EINVAL, "content: must be aligned and have %" PRIu64 " bytes",
                       rs_corpus_num_bytes(builder));
    }
    const rs_automaton *a = &builder->automaton;
    if (a->num_transitions > UINT32_MAX) {
        return rs_fail(error, RS_EINVAL, "corpus: %" PRIu64 " transitions are too many", a->num_transitions);
    }
    *head = (rs_corpus_head){builder->num_tokens, a->num_states, (uint32_t)a->num_transitions};
    rs_corpus_state *states = (rs_corpus_state *)(head + 1);
    rs_transition *transitions = (rs_transition *)(states + a->num_states + 1);
    for (uint32_t i = 0; i < a->num_states; i++) {
        const rs_state *state = a->states + i;
        states[i] = (rs_corpus_state){.len = state->len, .link = state->link, .count = state->count};
    }
    sum_occurrences(states, a->num_states);
    uint32_t first = 0;
    for (uint32_t i = 0; i < a->num_states; i++) {
        states[i].first = first;
        first += write_transitions(a, i, states, transitions + first);
    }
    states[a->num_states] = (rs_corpus_state){.link = RS_NO_STATE, .first = first};
    return RS_OK;
}

/* ---- checking ---- */

static const char *check_transitions(const rs_corpus *corpus, uint32_t at, uint32_t *num_solid) {
    const rs_corpus_state *state = corpus->states + at;
    uint32_t end = corpus->states[at + 1].first;
    uint64_t total = 0;
    for (uint32_t i = state->first; i < end; i++) {
        const rs_transition *transition = corpus->transitions + i;
        if (transition->token < 0 || transition->target == RS_ROOT || transition->target >= corpus->num_states) {
            return "corpus: token or target out of range";
        }
        const rs_corpus_state *target = corpus->states + transition->target;
        if (target->len < state->len + 1 || corpus->states[target->link].len > state->len) {
            return "corpus: a target does not hold the string it is reached with";
        }
        if (target->count > corpus->states[corpus->transitions[state->first].target].count) {
            return "corpus: the first transition is not on the most frequent continuation";
        }
        if (i > state->first + 1 && transition->token <= transition[-1].token) {
            return "corpus: transitions are not in the order of their tokens";
        }
        if (at != RS_ROOT && find(corpus, state->link, transition->token) == NULL) {
            return "corpus: a suffix lacks a continuation";
        }
        total += target->count;
        *num_solid += target->len == state->len + 1;
    }
    return total > state->count ? "corpus: continuations are more frequent than the state" : NULL;
}

const char *rs_corpus_check(const rs_corpus *corpus) {
    if (corpus->states[0].first != 0 || corpus->states[corpus->num_states].first != corpus->num_transitions) {
        return "corpus: transitions out of range";
    }
    for (uint32_t at = 0; at < corpus->num_states; at++) {
        const rs_corpus_state *state = corpus->states + at;
        if ((at == RS_ROOT) != (state->link == RS_NO_STATE) || (at == RS_ROOT) != (state->len == 0)) {
            return "corpus: only the root has len 0 and no suffix link";
        }
        if (at != RS_ROOT && (state->link >= corpus->num_states || state->count == 0 ||
                              corpus->states[state->link].len >= state->len)) {
            return "corpus: link or count out of range";
        }
        if (state->first > state[1].first) {
            return "corpus: transitions out of range";
        }
    }
    uint32_t num_solid = 0;
    for (uint32_t at = 0; at < corpus->num_states; at++) {
        const char *broken = check_transitions(corpus, at, &num_solid);
        if (broken != NULL) {
            return broken;
        }
    }
    return num_solid == corpus->num_states - 1
               ? NULL
               : "corpus: a state without exactly one transition from its longest string's prefix";
}

bool rs_cursor_holds(const rs_corpus *corpus, rs_cursor cursor, int32_t level) {
    if (cursor.state >= corpus->num_states || cursor.len > (uint32_t)level) {
        return false;
    }
    const rs_corpus_state *state = corpus->states + cursor.state;
    return cursor.state == RS_ROOT ? cursor.len == 0
                                   : cursor.len <= state->len && cursor.len > corpus->states[state->link].len;
}

rs_status rs_corpus_validate(const void *content, uint64_t num_bytes, rs_error *error) {
    rs_corpus corpus;
    if (!rs_corpus_open(&corpus, content, num_bytes)) {
        return rs_fail(error, RS_EINVAL, "corpus: %" PRIu64 " bytes that are no corpus", num_bytes);
    }
    const char *broken = rs_corpus_check(&corpus);
    return broken == NULL ? RS_OK : rs_fail(error, RS_ECORRUPT, "%s", broken);
}

int32_t rs_corpus_largest_token(const void *content, uint64_t num_bytes) {
    rs_corpus corpus;
    return rs_corpus_open(&corpus, content, num_bytes) ? corpus.largest_token : -1;
}
