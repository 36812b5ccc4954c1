/* The index behind the opaque handle: tables of groups and sequences. */
#ifndef RS_INDEX_H
#define RS_INDEX_H

#include "corpus.h"
#include "evidence.h"

/* Whose a text is. All sequences of less than full weight are one speaker; each of the others is its own, by
 * the order of opening. In a group of more than RS_NUM_SPEAKERS some are taken for one another. */
enum { RS_PROMPT = 0, RS_OLDER_POLICIES = 1, RS_FIRST_SEQUENCE = 2, RS_NUM_SPEAKERS = 256 };

typedef struct {
    bool open;
    int32_t next_free; /* while closed; -1: none */
    int32_t prompt_len;
    int32_t num_sequences; /* open */
    uint32_t prompt_last;
    rs_recent prompt_end;
    rs_cursor prompt_cursor;
    uint64_t num_tokens;
    uint32_t num_speakers; /* sequences of full weight ever opened */
    uint16_t num_live[RS_NUM_SPEAKERS]; /* open sequences */
    rs_automaton automaton;
} rs_group;

typedef struct {
    bool open;
    int32_t next_free; /* while closed; -1: none */
    int32_t group;
    uint8_t speaker;
    uint32_t weight;     /* of each of its tokens */
    int32_t start_level; /* prompt length or 0 */
    uint32_t start;
    int32_t level; /* tokens indexed, those before start_level included */
    uint32_t last;
    int32_t num_draft_tokens; /* of the draft that is not verified yet */
    int32_t num_predictions;  /* of the same */
    rs_recent recent;         /* the end of its text */
    rs_cursor cursor;         /* of its text in the corpus */
    bool keep_text;
    int32_t *text;            /* behind start_level, with keep_text */
    uint32_t text_capacity;
    bool begun_anew;          /* at some time */
    bool drafts;              /* allowed in its last step */
    bool plain;               /* its next tokens are: no row was allowed to draft then, or it never was */
    int32_t plain_level;      /* the last plain token is before it */
    int64_t num_row_steps;    /* in which it was allowed to draft */
    int64_t num_drafted;      /* tokens */
    uint64_t serial;          /* of all sequences ever opened, from 1 */
    uint64_t latest_step;
} rs_sequence;

/* Closed slots, the one closed longest ago first. */
typedef struct {
    int32_t first; /* -1: none */
    int32_t newest;
} rs_free_slots;

struct rs_index {
    rs_options options;
    rs_memory memory;
    rs_group *groups;
    uint32_t num_groups; /* slots in use or closed */
    uint32_t groups_capacity;
    rs_free_slots free_groups;
    rs_sequence *sequences;
    uint32_t num_sequences; /* slots in use or closed */
    uint32_t sequences_capacity;
    rs_free_slots free_sequences;
    int32_t *drafts; /* [sequences][num_speculative_tokens] */
    uint32_t drafts_capacity;
    rs_prediction *predictions; /* in mode sam, [sequences][num_speculative_tokens + 1] */
    uint32_t predictions_capacity;
    rs_contexts contexts;        /* in mode sam */
    rs_calibration *calibration; /* in mode sam */
    uint32_t calibration_capacity;
    uint64_t num_opened; /* sequences */
    rs_extension *extensions; /* of the step that is running */
    uint32_t extensions_capacity;
    uint64_t num_steps;
    rs_corpus corpus; /* states NULL: none */
    rs_stats totals; /* the counters of drafts and acceptance only */
};

/* Write the error, if any is wanted, and return status. */
rs_status rs_fail(rs_error *error, rs_status status, int32_t row, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* The message for a status of rs_reserve or rs_extend; RS_OK passes. */
rs_status rs_memory_error(const rs_index *index, rs_error *error, rs_status status, int32_t row);

static inline int32_t rs_predictions_per_sequence(const rs_index *index) {
    return index->options.mode == RS_MODE_SAM ? index->options.num_speculative_tokens + 1 : 0;
}

/* What keeps the contexts of a sequence from being shared, or does not. */
static inline uint64_t rs_salt(const rs_index *index, const rs_sequence *sequence) {
    return index->options.share_contexts ? 0 : sequence->serial << 8;
}

static inline uint64_t rs_own_salt(const rs_sequence *sequence) { return ~(sequence->serial << 8); }

static inline rs_group *rs_find_group(const rs_index *index, int32_t group) {
    bool known = group >= 0 && (uint32_t)group < index->num_groups && index->groups[group].open;
    return known ? index->groups + group : NULL;
}

static inline rs_sequence *rs_find_sequence(const rs_index *index, int32_t sequence) {
    bool known = sequence >= 0 && (uint32_t)sequence < index->num_sequences && index->sequences[sequence].open;
    return known ? index->sequences + sequence : NULL;
}

/* Entry i's row of the token matrix. */
static inline const int32_t *rs_row_tokens(const rs_batch *batch, int32_t i) {
    return batch->token_ids + batch->rows[i] * batch->row_stride;
}

/* Of n new tokens the last is the target's own; those before it are the accepted draft tokens. */
static inline int32_t rs_num_accepted(const int32_t *draft, int32_t num_draft_tokens, const int32_t *new_tokens,
                                      int32_t n) {
    int32_t most = num_draft_tokens < n - 1 ? num_draft_tokens : n - 1;
    int32_t num = 0;
    while (num < most && draft[num] == new_tokens[num]) {
        num++;
    }
    return num;
}

#endif
