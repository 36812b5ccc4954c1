/* The index behind the opaque handle: tables of groups and sequences, and what is learned from all of them. */
#ifndef RS_INDEX_H
#define RS_INDEX_H

#include "error.h"
#include "evidence.h"
#include "waiting.h"

typedef struct {
    bool open;
    bool given_up;         /* closed, but its slot is not free until rs_group_given_up has named it */
    int32_t next_free;     /* while closed; -1: none */
    int32_t num_sequences; /* open */
    uint64_t idle_since;   /* what num_idle_ever was when it became idle, 0: it has sequences */
    int32_t prompt_len;
    rs_place prompt; /* until it is indexed as a whole, no sequence is */
    uint64_t num_tokens;
    rs_automaton automaton;
} rs_group;

typedef struct {
    bool open;
    int32_t next_free; /* while closed; -1: none */
    int32_t group;
    bool after_prompt;
    rs_place at;   /* its level has the prompt in it, if it comes after it */
    int32_t *text; /* what comes after its start */
    uint32_t text_capacity;
    int32_t num_predictions; /* of the draft that is not verified yet, and perhaps one that was too unlikely for it */
    uint64_t serial;         /* of all texts ever begun, from 1 */
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
    rs_waiting *waiting;
    int32_t num_idle;       /* groups */
    int32_t num_given_up;   /* groups that rs_group_given_up has not named yet */
    uint64_t num_idle_ever; /* how often a group became idle */
    uint64_t num_serials;
    uint64_t num_steps;
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

static inline bool rs_is_whole(const rs_group *group) { return group->prompt.level == group->prompt_len; }

/* The level at which the sequence's own text begins. */
static inline int32_t rs_start_level(const rs_index *index, const rs_sequence *sequence) {
    return sequence->after_prompt ? index->groups[sequence->group].prompt_len : 0;
}

/* Put the sequence back to its start: the prompt, or the root. */
void rs_sequence_restart(const rs_index *index, rs_sequence *sequence);

/* Index what a text goes on with, as far as there is room. serial 0: a prompt, from which no context learns. */
rs_status rs_append(rs_index *index, rs_group *group, rs_place *at, uint64_t serial, const int32_t *tokens,
                    int64_t num_tokens);

/* While somebody is in a group, it is not given up. */
void rs_group_enter(rs_index *index, rs_group *group);
void rs_group_leave(rs_index *index, rs_group *group);

/* Check what groups and sequences say of each other, and the closed slots: NULL, or what is broken. */
const char *rs_tables_check(const rs_index *index);

static inline rs_prediction *rs_predictions(const rs_index *index, int32_t sequence) {
    return index->predictions + (size_t)sequence * (size_t)index->options.num_speculative_tokens;
}

/* What keeps the own contexts of a text apart from those of others. */
static inline uint64_t rs_own_salt(uint64_t serial) { return ~(serial << 8); }

#endif
