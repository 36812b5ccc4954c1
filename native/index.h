/* The index behind the opaque handle: tables of groups and sequences, and what is learned from all of them. */
#ifndef RS_INDEX_H
#define RS_INDEX_H

#include "corpus.h"
#include "error.h"
#include "evidence.h"

typedef struct {
    bool open;
    int32_t next_free;     /* while closed; -1: none */
    int32_t num_sequences; /* open */
    int32_t prompt_len;
    int32_t prompt_level;    /* tokens of it that are indexed; until it is all, no sequence is */
    uint32_t prompt_last;    /* the state of these */
    rs_recent prompt_recent; /* their end */
    rs_cursor prompt_cursor; /* their place in the corpus */
    uint64_t num_tokens;
    rs_automaton automaton;
} rs_group;

typedef struct {
    bool open;
    int32_t next_free; /* while closed; -1: none */
    int32_t group;
    bool after_prompt;
    int32_t level;     /* tokens indexed, the prompt included if it comes after it */
    int32_t next_level; /* after the step that is running */
    uint32_t last;     /* the state of its text */
    rs_recent recent;  /* the end of its text */
    rs_cursor cursor;  /* the place of its text in the corpus */
    int32_t *text;     /* what comes after its start */
    uint32_t text_capacity;
    int32_t num_predictions; /* of the draft that is not verified yet, and perhaps one that was too unlikely for it */
    uint64_t serial;         /* of all sequences ever opened, from 1 */
    uint64_t latest_step;
} rs_sequence;

struct rs_index {
    rs_options options;
    rs_memory memory;
    rs_group *groups;
    uint32_t num_groups; /* slots, open and closed */
    uint32_t groups_capacity;
    int32_t free_group; /* the closed slot to be used next, -1: none */
    rs_sequence *sequences;
    uint32_t num_sequences; /* likewise */
    uint32_t sequences_capacity;
    int32_t free_sequence;
    rs_prediction *predictions; /* [sequences][num_speculative_tokens] */
    uint32_t predictions_capacity;
    uint64_t num_opened; /* sequences */
    uint64_t num_steps;
    rs_extension *extensions; /* of the step that is running */
    uint32_t extensions_capacity;
    rs_contexts contexts;
    rs_calibration calibration;
    rs_corpus corpus; /* states NULL: none */
};

static inline rs_group *rs_find_group(const rs_index *index, int32_t group) {
    bool known = group >= 0 && (uint32_t)group < index->num_groups && index->groups[group].open;
    return known ? index->groups + group : NULL;
}

static inline rs_sequence *rs_find_sequence(const rs_index *index, int32_t sequence) {
    bool known = sequence >= 0 && (uint32_t)sequence < index->num_sequences && index->sequences[sequence].open;
    return known ? index->sequences + sequence : NULL;
}

static inline bool rs_is_whole(const rs_group *group) { return group->prompt_level == group->prompt_len; }

/* The level at which the sequence's own text begins. */
static inline int32_t rs_start_level(const rs_index *index, const rs_sequence *sequence) {
    return sequence->after_prompt ? index->groups[sequence->group].prompt_len : 0;
}

/* Put the sequence back to its start: the prompt, or the root. */
void rs_sequence_restart(const rs_index *index, rs_sequence *sequence);

static inline rs_prediction *rs_predictions(const rs_index *index, int32_t sequence) {
    return index->predictions + (size_t)sequence * (size_t)index->options.num_speculative_tokens;
}

/* What keeps the own contexts of a sequence apart from those of others. */
static inline uint64_t rs_own_salt(const rs_sequence *sequence) { return ~(sequence->serial << 8); }

#endif
