/* Drafting for rollouts: one suffix automaton per group, one call per engine step that indexes and drafts.
 *
 * This file is also the cffi cdef (native/build_native.py reads it and blanks the lines that start
 * with '#'): constants are enums, there are no function-like macros.
 *
 * An index has groups: the samples of one prompt. A group has the text of its prompt and of its sequences. rs_step takes
 * over what the sequences have said and drafts what may come next (native/draft.h says how), from all text of the group,
 * from what lately came after the last few tokens in any text of the index, from what a model drafts, and from the
 * corpus: texts that belong to no group.
 *
 * Text is copied at once, and indexed when there is time: in the step that brings it, if that is little, or else by
 * rs_catch_up. A row drafts nothing while its text, or its prompt, is unindexed.
 *
 * A sequence runs, so that it may be in steps, or it is parked: it keeps its text until it runs again or is closed. A group
 * in which none runs is idle. When a call needs memory beyond max_bytes, these are freed, the first first:
 * 1. Idle groups, the one that has been idle longest first, with what is parked in them. rs_group_given_up names them.
 * 2. Text that belongs to no running sequence, in the group that has most of it. The rest of that group is indexed again;
 *    what is parked there is indexed when it runs again. The group is given up once it is idle.
 * 3. The text that needs the memory. Its row is dropped; if it had been left to rs_catch_up, its group is given up once idle.
 * Texts without a sequence and parked ones leave an eighth of the budget to those that run.
 *
 * No function is thread safe for one index; different indexes are independent.
 * A function that fails changes no text but the corpus. Memory may stay reserved, and what is said above may have left.
 * `error` is written on failure only. It may be NULL, and so may an array of no tokens; no other pointer may.
 */
#ifndef ROLLOUT_SPEC_NATIVE_H
#define ROLLOUT_SPEC_NATIVE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    RS_ABI_VERSION = 30, /* raised when what this file declares changes */
    RS_MAX_SPECULATIVE_TOKENS = 64,
    RS_MAX_TEXT_TOKENS = (1 << 24) - 1, /* of a prompt, a sequence with its prompt, a text of the corpus */
    /* Confidence c is of log-odds from RS_LEAST_LOG_ODDS + c to one more; the first and the last range are open. */
    RS_MODEL_CONFIDENCES = 12,
    RS_LEAST_LOG_ODDS = -4
};

typedef enum {
    RS_OK = 0,
    RS_EINVAL = 1,   /* an argument is out of range */
    RS_EUNKNOWN = 2, /* no open group or sequence has this id */
    RS_ENOMEM = 3,
    RS_EBUDGET = 4   /* the index would grow beyond max_bytes, and nothing more may leave it */
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
    int32_t num_sequences;           /* >= 0, in this step */
    const int32_t *sequences;        /* [num_sequences] */
    const int32_t *token_ids;        /* [num_matrix_rows][row_stride], num_columns of them readable */
    int64_t row_stride;              /* >= num_columns, tokens */
    int64_t num_columns;
    int64_t num_matrix_rows;
    const int32_t *rows;             /* [num_sequences], 0 .. num_matrix_rows - 1 */
    const int32_t *levels;           /* [num_sequences], prompt included, at most num_columns and RS_MAX_TEXT_TOKENS */
    const int32_t *max_draft_tokens; /* [num_sequences], >= 0; 0: index only; above K means K */
    int64_t max_tokens_to_index;     /* of unindexed text, before the drafts */
    double min_survival;             /* 0 .. 1: the least survival that is drafted */
    int32_t num_model_tokens;        /* m, 0 .. K: of a model's drafts; 0: no model, and the next two are not read */
    const int32_t *model_tokens;     /* [num_sequences][m]; negative: it proposes nothing from there on */
    const int32_t *model_confidences; /* [num_sequences][m], 0 .. RS_MODEL_CONFIDENCES - 1, where there is a token */
    int32_t *draft_tokens;           /* out [num_sequences][K]; beyond num_draft_tokens unspecified */
    float *survivals;                /* out [num_sequences][K]: how likely the draft is accepted up to and with this token */
    int32_t *num_draft_tokens;       /* out [num_sequences]; -1: the row is dropped, its sequence is closed */
    int32_t num_dropped;             /* out: rows */
    int32_t num_unindexed;           /* out: rows that draft nothing, as something of them is unindexed */
} rs_batch;

typedef struct {
    uint64_t num_groups;    /* open */
    uint64_t num_sequences; /* that run */
    uint64_t num_states;    /* this and the next two: without the corpus */
    uint64_t num_tokens;    /* indexed and not forgotten */
    uint64_t num_tokens_unindexed;
    uint64_t num_texts_left_out; /* ever: prompts, sequences and others for which there was no memory */
    uint64_t num_bytes;     /* allocated, everything included */
} rs_stats;

typedef struct rs_index rs_index;

int32_t rs_abi_version(void);

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error);
void rs_index_free(rs_index *index);

/* Add a text to the corpus. RS_EINVAL: a group has been opened. After RS_ENOMEM or RS_EBUDGET a part of it may be there. */
rs_status rs_corpus_add(rs_index *index, const int32_t *token_ids, int64_t num_tokens, rs_error *error);

/* Until all of the prompt is indexed, none of the group's sequences is.
 * The id is that of the group closed last, or else the smallest that was never used.
 * An id that is not open is refused. One that was opened again cannot be told from its predecessor. */
rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens, int32_t *group,
                        rs_error *error);

/* From now on what is opened in the group, or added to it, begins after this prompt. What is there stays after its own.
 * If that takes the room of other text of an idle group, the group is given up. */
rs_status rs_group_set_prompt(rs_index *index, int32_t group, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                              rs_error *error);

/* Add a text that follows the group's prompt. */
rs_status rs_group_add(rs_index *index, int32_t group, const int32_t *token_ids, int64_t num_tokens, rs_error *error);

/* Index up to so many tokens; returns whether there is more to index. Rows and prompts go first, those of which least is left
 * before others; then parked sequences and texts in the order in which they came. Where there is no memory for a text, the
 * next step drops its row, or the rows whose prompt it is. */
bool rs_catch_up(rs_index *index, int64_t max_tokens_to_index);

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

/* The text stays in the group; what of it is unindexed is still indexed. */
rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error);

/* Take over what is new in every row and index it, catch up, then draft for every row: siblings see each other's newest
 * tokens. A level above the last one indexes the tokens between; the same level indexes nothing; of a lower one (a request
 * that was started again) what its text and the row begin with is kept.
 *
 * A row is dropped where there is no memory for it, a new token is negative, or its level is below the prompt's length,
 * above num_columns or RS_MAX_TEXT_TOKENS. Its sequence is closed then; what of it had room stays in the group.
 *
 * A row that has got more than RS_MAX_SPECULATIVE_TOKENS + 1 tokens is left to rs_catch_up. */
rs_status rs_step(rs_index *index, rs_batch *batch, rs_error *error);

void rs_index_stats(const rs_index *index, rs_stats *stats);

#endif
