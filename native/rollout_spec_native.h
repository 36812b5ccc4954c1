/* Drafting for rollouts: one suffix automaton per group, one call per engine step that indexes and drafts.
 *
 * This file is also the cffi cdef (native/build_native.py reads it and blanks the lines that start
 * with '#'): constants are enums, there are no function-like macros.
 *
 * An index holds groups (the samples of one prompt); a group holds the text of its prompt and of
 * its sequences. A position is a distinct prefix: siblings that begin alike share their positions.
 *
 *   match      The longest suffix w of a sequence's text (the whole text included) that has been
 *              followed by some token, in this sequence or in a sibling. match length = |w|.
 *   earliest   The draft goes on with the token that was the first ever to follow w, then with the
 *              first to follow w + that token, and so on. In a single sequence this copies what
 *              followed the earliest occurrence of w (SAM-Decoding, arXiv 2411.10666).
 *   frequent   The draft goes on with the follower c of the highest count(wc), on a tie with the
 *              one that followed w first; only the RS_MAX_BRANCHES earliest followers are looked
 *              at. Its estimated probability is count(wc) / (sum of those followers' counts + 1/4,
 *              for a follower never seen); a draft ends before the token with which the product of
 *              the probabilities falls below min_token_prob (the idea of SuffixDecoding, arXiv
 *              2411.04975).
 *   sam        Experts propose the next token: the longest match and the next shorter class above it,
 *              each with its most frequent follower, and what lately came after the last 1, 2, 3 and
 *              6 tokens in any text of the index, and after the last 1 and 2 in this sequence.
 *              The probability that a proposal is accepted is learned online, see native/evidence.h; a
 *              draft takes the best candidate at each position and ends before the token with which
 *              the product of the probabilities falls below min_token_prob. min_match_len and
 *              max_spec_factor do not apply.
 *   suffix_policy  The policy of SuffixDecoding: for every class of the text's suffixes the path of
 *              the most frequent followers, count(wc) / count(w) each, of at most
 *              floor(max_spec_factor * |w|) tokens and while their product is at least
 *              min_token_prob; the path with the largest sum of products is the draft, of equals
 *              that of the longer suffix. At most RS_MAX_SUFFIX_CLASSES classes are looked at.
 *   count(w)   How often w was indexed, each time counting weight / RS_FULL_WEIGHT of the sequence (the
 *              prompt 1), but indexing one token counts the suffixes that end with it only in the
 *              RS_COUNTED_STATES longest classes of them. A class is a set of suffixes that end at the
 *              same positions: a state of the automaton.
 *
 * corpus     What follows in a static text. Its match is the longest suffix of the sequence's text (the
 *              prompt included) that has been followed in the corpus. It has a say only where it is at
 *              least corpus_margin tokens longer than the match in the group (SAM-Decoding's choice between
 *              its two automata): in mode sam, at every position, its most frequent follower is a further
 *              expert's proposal; in the others the whole draft is the corpus's then, the most frequent
 *              follower after each token with the probability count(wc) / (count(w) + 1/4), and ends before
 *              the token with which the product falls below min_token_prob, or where a text of the corpus
 *              ended. Counts of the corpus are exact; on a tie the follower counts that came first.
 *
 * In earliest and frequent, where nothing has followed the text w + draft, the draft goes on from its longest suffix that
 * has been followed, if that is at least min_match_len long.
 *
 * No function is thread safe for one index; different indexes are independent.
 * Every function but rs_index_free, rs_corpus_free, rs_index_stats, rs_corpus_num_bytes, rs_set_levels,
 * rs_leading_tokens and rs_abi_version returns a status; a call that fails changes nothing, except that reserved memory may
 * stay reserved, and but for rs_corpus_add and rs_replay.
 * `error` may be NULL; when it is not, it is written on failure only.
 */
#ifndef ROLLOUT_SPEC_NATIVE_H
#define ROLLOUT_SPEC_NATIVE_H

#include <stdint.h>

enum {
    RS_ABI_VERSION = 10, /* raised with every change of this file */
    RS_MAX_SPECULATIVE_TOKENS = 64,
    RS_MAX_TEXT_TOKENS = (1 << 24) - 1, /* of a prompt, a sequence with its prompt, a text of a corpus */
    RS_MAX_BRANCHES = 64,
    RS_COUNTED_STATES = 8,
    RS_FULL_WEIGHT = 4,
    RS_MAX_SUFFIX_CLASSES = 64
};

typedef enum {
    RS_OK = 0,
    RS_EINVAL = 1,   /* an argument is out of range */
    RS_EUNKNOWN = 2, /* no open group or sequence has this id */
    RS_ENOMEM = 3,
    RS_EBUDGET = 4,  /* the index would grow beyond max_bytes */
    RS_ECORRUPT = 5  /* rs_index_validate found a broken invariant */
} rs_status;

typedef enum {
    RS_MODE_EARLIEST = 0,
    RS_MODE_FREQUENT = 1,
    RS_MODE_SAM = 2,
    RS_MODE_SUFFIX_POLICY = 3
} rs_mode;

typedef struct {
    int32_t num_speculative_tokens; /* 1 .. RS_MAX_SPECULATIVE_TOKENS, K below */
    int32_t mode;                   /* rs_mode */
    int32_t min_match_len;          /* >= 1, tokens */
    double max_spec_factor;         /* >= 0: draft at most floor(max_spec_factor * match length) */
    double min_token_prob;          /* 0 .. 1, every mode but earliest */
    int32_t share_contexts;         /* sam: 1: across all sequences of the index, 0: not at all */
    int32_t corpus_margin;          /* >= 1, tokens; with a corpus */
    const void *corpus;             /* what rs_corpus_write wrote, aligned to 8 bytes; NULL: none. Read only, and
                                       for as long as the index lives */
    uint64_t corpus_bytes;
    uint64_t max_bytes;             /* of the whole index; 0: no limit */
} rs_options;

typedef struct {
    int32_t row;       /* the entry of the batch that is wrong, -1 where none is */
    char message[160]; /* begins with the name of the argument */
} rs_error;

/* One engine step. Entry i is sequence sequences[i], whose tokens are the first levels[i] of row
 * rows[i] of the token matrix: token_ids[rows[i] * row_stride]. A sequence appears once at most. */
typedef struct {
    int32_t num_rows;                /* >= 1: entries */
    const int32_t *sequences;        /* [num_rows] */
    const int32_t *token_ids;        /* [num_matrix_rows][row_stride], num_columns of them readable */
    int64_t row_stride;              /* >= num_columns, tokens */
    int64_t num_columns;
    int64_t num_matrix_rows;
    const int32_t *rows;             /* [num_rows], 0 .. num_matrix_rows - 1 */
    const int32_t *levels;           /* [num_rows], prompt included, at most num_columns and RS_MAX_TEXT_TOKENS */
    const int32_t *max_draft_tokens; /* [num_rows], >= 0; 0: index only; above K means K */
    double min_token_prob;           /* 0 .. 1: of this step, where it is more than the options' */
    int32_t *draft_tokens;           /* out [num_rows][K]; beyond num_draft_tokens unspecified */
    float *survivals;                /* out [num_rows][K]: the probability that the draft up to and with this
                                        token is accepted, as the mode estimates it; 1 in earliest */
    int32_t *num_draft_tokens;       /* out [num_rows] */
    int32_t *match_lens;             /* out [num_rows]; 0 where max_draft_tokens is 0; in mode sam the group's */
    int32_t num_drafting;            /* out: entries with max_draft_tokens above 0; unchanged on failure */
} rs_batch;

/* What sequences have said, and what drafting for them has taken: a row for each. */
typedef struct {
    int32_t num_rows;
    const int32_t *sequences; /* [num_rows], with keep_text, opened with the same start; -1: the row stays as it is */
    int32_t *token_ids;       /* [num_rows][row_stride]; row i has ends[i] tokens, those before the start unspecified */
    int64_t row_stride;       /* tokens */
    int32_t *ends;            /* [num_rows] */
    int32_t *plain;           /* [num_rows]: the last token that was said while no row was allowed to draft, or this one
                                 never had been, is before it */
    int32_t *growing;         /* [num_rows], 1: the sequence was allowed to draft in its last step */
    int64_t *spent;           /* [num_rows][2]: steps in which it was allowed to draft, tokens it has drafted */
    int64_t num_row_steps;    /* out: what the first of these have grown by */
    int64_t longest;          /* out: tokens of the longest text; beyond row_stride no row was changed */
    int32_t has_drafts;       /* out, 1: of a row some came with drafts */
    int32_t begun_anew;       /* out, 1: a sequence has had fewer tokens than before; no row was changed */
} rs_heard;

/* Texts as another index decodes them: entry i of the batch has row i of `heard`. */
typedef struct {
    rs_batch batch;            /* of any number of rows; its levels and max_draft_tokens are those below */
    const rs_heard *heard;
    int32_t *levels;           /* [num_rows], in and out: the tokens that are decoded, at most ends[i] */
    int32_t *max_draft_tokens; /* [num_rows], scratch */
    double *settled;           /* [num_rows][2], in and out: what of `spent` went into the tokens that are decoded */
    int32_t max_steps;         /* >= 1 */
    int32_t max_plain_tokens;  /* >= 1: of all rows together, or one of each */
    uint64_t num_row_steps;    /* out: one for every row that a step drafted for */
    uint64_t num_draft_tokens; /* out */
    uint64_t num_tokens;       /* out: by which the levels have grown */
    double heard_row_steps;    /* out: what of `spent` went into the tokens that were now decoded, not only indexed */
    double heard_draft_tokens; /* out */
} rs_replay_rows;

typedef struct {
    uint64_t num_groups;    /* open */
    uint64_t num_sequences; /* open */
    uint64_t num_states;
    uint64_t num_transitions;
    uint64_t num_tokens;            /* indexed and not forgotten */
    uint64_t num_bytes;             /* allocated, everything included */
    uint64_t num_drafts;            /* proposed since rs_index_new; drafts of no token do not count */
    uint64_t num_draft_tokens;      /* likewise */
    uint64_t num_accepted_tokens;   /* likewise, bonus tokens excluded */
} rs_stats;

typedef struct rs_index rs_index;

int32_t rs_abi_version(void);

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error);
void rs_index_free(rs_index *index);

/* Ids are the smallest that were never used, or else those closed longest ago: an id that is not
 * open is refused, one that has been opened again cannot be told from its predecessor. */
rs_status rs_group_open(rs_index *index, const int32_t *prompt_token_ids, int64_t num_prompt_tokens,
                        int32_t *group, rs_error *error);

/* Forgets the group's text. RS_EINVAL while one of its sequences is open. */
rs_status rs_group_close(rs_index *index, int32_t group, rs_error *error);

/* after_prompt 1: the first tokens of every row of this sequence are the group's prompt, which is
 * not indexed again. 0: the sequence begins at the root, all its tokens are its own.
 * weight 1 .. RS_FULL_WEIGHT: what its text counts, in the modes that count.
 * keep_text 1: rs_sequence_text and rs_hear can be asked. */
rs_status rs_sequence_open(rs_index *index, int32_t group, int32_t after_prompt, int32_t weight, int32_t keep_text,
                           int32_t *sequence, rs_error *error);

/* The first `capacity` tokens that an open sequence has after its start (the prompt, or the root), and how
 * many there are. RS_EINVAL when its keep_text is 0. */
rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error);

/* The text stays in the group. */
rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error);

/* Index what is new in every row, then draft for every row: siblings see each other's newest tokens.
 * A level above the last one indexes the tokens between; the same level indexes nothing; a lower one
 * (a request that was started again) indexes the row from its start, as a new sequence would.
 * Acceptance: of n new tokens, at most n - 1 that equal the sequence's draft of its last step. */
rs_status rs_step(rs_index *index, rs_batch *batch, rs_error *error);

/* What the next step needs to know of num_rows rows of a token matrix, whose row r has row_levels[r] tokens: levels, and
 * max_draft_tokens, so that no draft ends beyond last_levels. These are 0 without may_draft, and for a level below 0.
 * Arrays [num_rows], but for row_levels, which has an entry for each of `rows`; that is not checked. */
void rs_set_levels(int32_t num_rows, const int32_t *rows, const int32_t *row_levels, const int32_t *last_levels,
                   int32_t may_draft, int32_t *levels, int32_t *max_draft_tokens);

/* Of the draft tokens of a step, the first numbers[i] of every entry i, or all it has, one entry after the other; tokens
 * has room for num_rows * num_speculative_tokens. Returns how many these are. */
int32_t rs_leading_tokens(const rs_index *index, const rs_batch *batch, const int32_t *numbers, int32_t *tokens);

/* Bring the rows up to date. */
rs_status rs_hear(const rs_index *index, rs_heard *heard, rs_error *error);

/* Decode texts that are known already with drafts of this index, as a target would that says them: a step drafts for
 * every row that is not at its end, keeps of each draft what the text says too and one token more, and siblings see each
 * other's tokens of the step before. Ends before the first step that would need a token of a growing row that is not
 * known yet, and where all rows are at their ends (the last tokens may not be indexed then), after max_steps at the
 * latest. So what is known when a call comes does not change what is counted in the end. Where there is
 * plain text, a call only indexes, max_plain_tokens at most or one of each row. What the sequences have spent is settled in proportion to the
 * tokens: of what is not settled yet, as much as of the tokens that were not decoded yet. What is counted when
 * a step fails stays counted, and the call can be made again. */
rs_status rs_replay(rs_index *index, rs_replay_rows *rows, rs_error *error);

/* Close all sequences and groups, in time that grows with their number only; the counters of drafts and acceptance
 * go on. */
rs_status rs_index_clear(rs_index *index, rs_error *error);

void rs_index_stats(const rs_index *index, rs_stats *stats);

/* A static corpus: add every text, then write the block that rs_options.corpus takes. It holds no pointers and is
 * in the byte order of this machine. Its first 16 bytes are the numbers of tokens (uint64_t), states and
 * transitions (uint32_t). */
typedef struct rs_corpus_builder rs_corpus_builder;

rs_status rs_corpus_new(rs_corpus_builder **builder, rs_error *error);
void rs_corpus_free(rs_corpus_builder *builder);

/* After RS_ENOMEM only rs_corpus_free may follow. */
rs_status rs_corpus_add(rs_corpus_builder *builder, const int32_t *token_ids, int64_t num_tokens, rs_error *error);

/* Of the block. */
uint64_t rs_corpus_num_bytes(const rs_corpus_builder *builder);

/* `content`, aligned to 8 bytes, has room for exactly rs_corpus_num_bytes. */
rs_status rs_corpus_write(const rs_corpus_builder *builder, void *content, uint64_t num_bytes, rs_error *error);

/* Check every invariant, in time linear in the size of the index times the length of its suffix
 * chains. RS_ECORRUPT names the first broken one. */
rs_status rs_index_validate(const rs_index *index, rs_error *error);

#endif
