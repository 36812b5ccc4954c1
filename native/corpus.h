/* A static corpus: the suffix automaton of given texts, frozen into a block of memory without
 * pointers, so that a file that is mapped read-only is the automaton, and all engines of a machine
 * share its pages (the static automaton of SAM-Decoding, arXiv 2411.10666).
 *
 * The block, aligned to 8 bytes and in the byte order of the machine: rs_corpus_head, the states and
 * one more that only ends the transitions of the last, all transitions. Of a state's transitions the
 * one on its most frequent continuation comes first, on a tie the one that came first of all; the
 * others are in ascending order of their tokens. Counts are exact.
 *
 * Reading trusts no byte of the block, since opening it does not read it through and a file may be changed later: what is
 * followed is compared with its bounds first, and a place that breaks them has no continuation and no link but the root.
 * A walk up ends after a fixed number of links. */
#ifndef RS_CORPUS_H
#define RS_CORPUS_H

#include "automaton.h"

typedef struct {
    uint64_t num_tokens;
    uint32_t num_states;
    uint32_t num_transitions;
} rs_corpus_head;

typedef struct {
    uint32_t len;
    uint32_t link;  /* RS_NO_STATE: this is the root */
    uint32_t count; /* how often its strings occur in the texts */
    uint32_t first; /* of its transitions; those of the next state come after */
} rs_corpus_state;

typedef struct {
    const rs_corpus_state *states; /* NULL: there is no corpus */
    const rs_transition *transitions;
    uint32_t num_states;
    uint32_t num_transitions;
    int32_t largest_token; /* of the root's transitions, which are on all; nothing above it is drafted */
} rs_corpus;

/* The longest suffix of a text that occurs in the corpus. Zeros: the empty one. */
typedef struct {
    uint32_t state;
    uint32_t len; /* in tokens, at most the state's */
} rs_cursor;

/* False where the block is not of the length that it says itself. */
bool rs_corpus_open(rs_corpus *corpus, const void *content, uint64_t num_bytes);

/* The text has got another token. */
void rs_cursor_move(const rs_corpus *corpus, rs_cursor *cursor, int32_t token);

/* The longest suffix, the cursor's included, that has a continuation. */
rs_cursor rs_cursor_continued(const rs_corpus *corpus, rs_cursor cursor);

/* The transition on the most frequent continuation, NULL where there is none. */
const rs_transition *rs_corpus_next(const rs_corpus *corpus, uint32_t state);

/* Check every invariant, in time linear in the size of the block: NULL, or what is broken. */
const char *rs_corpus_check(const rs_corpus *corpus);

/* Whether the cursor can be that of a text of `level` tokens. */
bool rs_cursor_holds(const rs_corpus *corpus, rs_cursor cursor, int32_t level);

#endif
