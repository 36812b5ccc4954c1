/* Drafting for rollouts: one suffix automaton per group, one call per engine step that indexes and drafts.
 *
 * This file is also the cffi cdef (native/build_native.py reads it and blanks the lines that start
 * with '#'): constants are enums, there are no function-like macros.
 *
 * An index holds groups (the samples of one prompt). A group holds the text of its prompt and of its sequences. It may get
 * another prompt: then its sequences that are there stay after theirs.
 *
 *   continuation  Of a string: a token that came after it, in the text of any sequence of the group.
 *   match     The longest suffix w of a sequence's text (the whole text included) that has a continuation. The match
 *             length is |w|.
 *   class     A set of strings that end at the same positions: a state of the automaton.
 *   count(w)  How often w was indexed. Indexing a token counts the suffixes that end with it, but only in the
 *             RS_COUNTED_STATES longest classes of them.
 *   expert    A place where the next token may be found. There are: the match, and the longest suffix of it in a
 *             shorter class that has a continuation, each with its most frequent one c (the highest count(wc); on a
 *             tie the one that came first; only the RS_MAX_BRANCHES earliest are looked at); what lately came after
 *             the last 1, 2, 3 and 6 tokens in any text of the index, but prompts and corpus, and after the last 1 and 2 in
 *             this sequence; a model, where the caller has one; and the corpus.
 *   corpus    Texts that belong to no group and are there before the first. Its match is the longest suffix of the
 *             sequence's text that has a continuation in it. It proposes the most frequent one, where its match is longer
 *             than the group's.
 *   model     Drafts a few tokens after each text, and says how sure it is of each. It proposes its next token as long as
 *             the draft is its own; after another token it proposes nothing.
 *   draft     At each position the experts' best proposal. native/evidence.h says how the probability that it is
 *             accepted is learned. A draft ends before the token with which the product of the probabilities, the
 *             survival, falls below min_survival.
 *
 * No function is thread safe for one index; different indexes are independent.
 * A function that fails changes nothing, but memory may stay reserved, idle groups and spare text (below) be gone, and
 * num_texts_left_out count. After rs_corpus_add a part of the text may be there.
 * `error` is written on failure only. It may be NULL.
 * An array of no tokens may be NULL too; no other pointer may.
 *
 * A sequence runs or is parked; a parked one has its place until it runs again or is closed. A text is behind while not all
 * of it is indexed: rs_catch_up goes on with it.
 *
 * A group without a running sequence is idle. Where an index is full it gives up the group that has been idle longest, in
 * whatever call that is, with what is parked in it; rs_group_given_up names it. Where none is idle, a group that holds more
 * than its running sequences' text forgets the rest, its spare text, and indexes theirs again. What is parked there is
 * indexed when it runs again. Texts without a sequence and parked ones leave an eighth of the budget to those that run.
 * A group that has lost a text so, or had no room for one, is given up once it is idle.
 */
#ifndef ROLLOUT_SPEC_NATIVE_H
#define ROLLOUT_SPEC_NATIVE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    RS_ABI_VERSION = 28, /* raised when what this file declares changes */
    RS_MAX_SPECULATIVE_TOKENS = 64,
    RS_MAX_TEXT_TOKENS = (1 << 24) - 1, /* of a prompt, a sequence with its prompt, a text of the corpus */
    RS_MAX_BRANCHES = 64,
    RS_COUNTED_STATES = 8,
    /* Confidence c is of log-odds from RS_LEAST_LOG_ODDS + c to one more; the first and the last range are open. */
    RS_MODEL_CONFIDENCES = 12,
    RS_LEAST_LOG_ODDS = -4
};

typedef enum {
    RS_OK = 0,
    RS_EINVAL = 1,   /* an argument is out of range */
    RS_EUNKNOWN = 2, /* no open group or sequence has this id */
    RS_ENOMEM = 3,
    RS_EBUDGET = 4,  /* the index would grow beyond max_bytes, and nothing more may leave it */
    RS_ECORRUPT = 5  /* rs_index_validate found a broken invariant */
} rs_status;

typedef struct {
    int32_t num_speculative_tokens; /* 1 .. RS_MAX_SPECULATIVE_TOKENS, K below */
    uint64_t max_bytes;             /* of the whole index; 0: no limit */
} rs_options;

typedef struct {
    char message[160]; /* begins with the name of the argument */
} rs_error;

/* One engine step. Entry i is sequence sequences[i], whose tokens are the first levels[i] of row
 * rows[i] of the token matrix: token_ids[rows[i] * row_stride]. A sequence appears once at most. */
typedef struct {
    int32_t num_rows;                /* >= 0: entries */
    const int32_t *sequences;        /* [num_rows] */
    const int32_t *token_ids;        /* [num_matrix_rows][row_stride], num_columns of them readable */
    int64_t row_stride;              /* >= num_columns, tokens */
    int64_t num_columns;
    int64_t num_matrix_rows;
    const int32_t *rows;             /* [num_rows], 0 .. num_matrix_rows - 1 */
    const int32_t *levels;           /* [num_rows], prompt included, at most num_columns and RS_MAX_TEXT_TOKENS */
    const int32_t *max_draft_tokens; /* [num_rows], >= 0; 0: index only; above K means K */
    int64_t max_tokens;              /* to index of what is behind, before the drafts */
    double min_survival;             /* 0 .. 1: the least survival that is drafted */
    int32_t num_model_tokens;          /* m, 0 .. K: of a model's drafts; 0: no model, and the next two are not read */
    const int32_t *model_tokens;       /* [num_rows][m]; negative: it proposes nothing from there on */
    const int32_t *model_confidences;  /* [num_rows][m], 0 .. RS_MODEL_CONFIDENCES - 1, where there is a token */
    int32_t *draft_tokens;           /* out [num_rows][K]; beyond num_draft_tokens unspecified */
    float *survivals;                /* out [num_rows][K]: the estimated probability that the draft up to and with
                                        this token is accepted */
    int32_t *num_draft_tokens;       /* out [num_rows]; -1: the row is dropped, its sequence is closed */
    int32_t num_dropped;             /* out: rows */
    int32_t num_behind;              /* out: rows that draft nothing, as something of them is not indexed */
} rs_batch;

typedef struct {
    uint64_t num_groups;    /* open */
    uint64_t num_sequences; /* that run */
    uint64_t num_states;    /* this and the next two: without the corpus */
    uint64_t num_tokens;    /* indexed and not forgotten */
    uint64_t num_tokens_behind;  /* of prompts and sequences: not indexed yet */
    uint64_t num_texts_left_out; /* ever: for which there was no memory */
    uint64_t num_bytes;     /* allocated, everything included */
} rs_stats;

typedef struct rs_index rs_index;

int32_t rs_abi_version(void);

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error);
void rs_index_free(rs_index *index);

/* Add a text to the corpus. RS_EINVAL: a group has been opened. After RS_ENOMEM or RS_EBUDGET a part of it may be there. */
rs_status rs_corpus_add(rs_index *index, const int32_t *token_ids, int64_t num_tokens, rs_error *error);

/* The prompt is copied, and is behind. So are the group's sequences until all of it is indexed.
 * The id is that of the group closed last, or else the smallest that was never used.
 * An id that is not open is refused. One that was opened again cannot be told from its predecessor. */
rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens, int32_t *group,
                        rs_error *error);

/* From now on what is opened in the group, or added to it, begins after this prompt, which is copied and is behind. */
rs_status rs_group_set_prompt(rs_index *index, int32_t group, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                              rs_error *error);

/* This text, which is copied, follows the group's prompt, and is behind. */
rs_status rs_group_add(rs_index *index, int32_t group, const int32_t *token_ids, int64_t num_tokens, rs_error *error);

/* Index up to max_tokens of what is behind; returns whether there is more to index. Rows and prompts go first, those of
 * which least is left before others; then parked sequences and texts in the order in which they came. A text for
 * which there is no memory is left out: the next step drops its row, or the rows whose prompt it is. */
bool rs_catch_up(rs_index *index, int64_t max_tokens);

/* A group that was given up and not named yet, -1: none. Only then its id may be used again. */
int32_t rs_group_given_up(rs_index *index);

/* Forgets the group's text and closes what is parked in it. RS_EINVAL while one of its sequences runs. */
rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error);

/* The first tokens of every row of this sequence are the group's prompt, which is not indexed again. */
rs_status rs_sequence_open(rs_index *index, int32_t group, int32_t *sequence, rs_error *error);

/* From now on a running sequence is in no batch. */
rs_status rs_sequence_park(rs_index *index, int32_t sequence, rs_error *error);

/* A parked sequence may be in batches again. What its row and its text begin with is kept, and indexed only as far as it
 * was not. */
rs_status rs_sequence_resume(rs_index *index, int32_t sequence, rs_error *error);

/* The first `capacity` tokens that an open sequence has after its prompt, indexed or not, and how many there are. */
rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error);

/* The text stays in the group; what of it is behind is indexed yet. */
rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error);

/* Take over what is new in every row and index it, catch up, then draft for every row: siblings see each other's newest
 * tokens. A level above the last one indexes the tokens between; the same level indexes nothing; of a lower one (a request
 * that was started again) what its text and the row begin with is kept.
 *
 * A row is dropped where there is no memory for it, a new token is negative, or its level is below the prompt's length,
 * above num_columns or RS_MAX_TEXT_TOKENS. Its sequence is closed then; what of it had room stays in the group.
 *
 * A row that has got more than RS_MAX_SPECULATIVE_TOKENS + 1 tokens is behind, and has no draft while it is. */
rs_status rs_step(rs_index *index, rs_batch *batch, rs_error *error);

void rs_index_stats(const rs_index *index, rs_stats *stats);

/* Check every invariant, in time linear in the size of the index times the length of its suffix
 * chains. RS_ECORRUPT names the first broken one. */
rs_status rs_index_validate(const rs_index *index, rs_error *error);

#endif
