/* The index behind the opaque handle: tables of groups and sequences, and what is learned from all of them. */
#ifndef RS_INDEX_H
#define RS_INDEX_H

#include "automaton.h"
#include "error.h"
#include "evidence.h"

/* How far a text is indexed, and where it is there. Zeros: the empty one. */
typedef struct {
    int32_t indexed;  /* the level up to which it is */
    uint32_t last;    /* the state of its tokens up to there */
    rs_recent recent; /* their end */
    rs_match corpus;  /* the longest suffix of them that is in the corpus */
} rs_place;

typedef struct {
    bool open;
    bool given_up;       /* closed, but its slot is not free until rs_group_given_up has named it */
    int32_t next_free;   /* while closed; -1: none */
    int32_t num_running; /* sequences; during a call also what has entered the group, so that it stays */
    uint64_t idle_since; /* what num_idle_ever was when it became idle, 0: it has running sequences */
    int32_t prompt;      /* a sequence; until it is indexed as a whole, no other of the group is */
    uint64_t num_tokens;
    uint64_t num_live; /* of them, of its sequences: as forget_most_spare_text last counted */
    rs_automaton automaton;
} rs_group;

/* What runs is in the batches of steps. What is parked may run again. A text closes itself when it is indexed. */
typedef enum { RS_CLOSED, RS_PROMPT, RS_RUNNING, RS_PARKED, RS_TEXT } rs_kind;

typedef struct {
    rs_kind kind;
    bool is_behind;    /* something of it is not indexed, nor left out: it is in the list of these */
    bool is_left_out;  /* there was no memory for more of it: the next step drops its row */
    bool is_resumed;   /* the next step compares its row with its text */
    int32_t next;      /* in the list of those that are closed, or in that of those that are behind; -1: none */
    int32_t previous;  /* in the list of those that are behind; -1: none */
    int32_t group;     /* -1: given up; it is parked, and nothing is left of it but its text */
    int32_t start;     /* the level at which its text begins: the prompt's length, or 0 */
    int32_t end;       /* the level at which its text ends */
    int32_t followed;  /* up to this level the text is in the automaton already, and is not counted again */
    rs_place at;
    int32_t *text;
    uint32_t text_capacity;
    int32_t num_predictions; /* of the draft that is not verified yet, and perhaps one that was too unlikely for it */
    uint64_t serial;         /* of all texts ever begun, from 1; 0: a prompt, from which no context learns */
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
    int32_t first_behind; /* of the list of those that are, -1: none */
    rs_prediction *predictions; /* [sequences][num_speculative_tokens] */
    uint32_t predictions_capacity;
    int32_t num_given_up;   /* groups that rs_group_given_up has not named yet */
    uint64_t num_idle_ever; /* how often a group became idle */
    uint64_t num_serials;
    uint64_t num_texts_left_out; /* ever, for want of memory */
    uint64_t num_steps;
    rs_contexts contexts;
    rs_calibration calibration;
    rs_automaton corpus; /* states NULL: none */
};

static inline rs_group *rs_find_group(const rs_index *index, int32_t group) {
    bool known = group >= 0 && (uint32_t)group < index->num_groups && index->groups[group].open;
    return known ? index->groups + group : NULL;
}

/* One that runs or is parked: only these have callers. */
static inline rs_sequence *rs_find_sequence(const rs_index *index, int32_t sequence) {
    rs_sequence *found = sequence >= 0 && (uint32_t)sequence < index->num_sequences ? index->sequences + sequence : NULL;
    return found != NULL && (found->kind == RS_RUNNING || found->kind == RS_PARKED) ? found : NULL;
}

/* Whether the group's prompt is indexed. */
static inline bool rs_is_whole(const rs_index *index, const rs_group *group) {
    const rs_sequence *prompt = index->sequences + group->prompt;
    return prompt->at.indexed == prompt->end;
}

/* Have a slot ready, so that rs_sequence_new cannot fail. */
rs_status rs_sequence_reserve(rs_index *index);

/* A sequence of this kind in a slot that was reserved, at the root. */
rs_sequence *rs_sequence_new(rs_index *index, rs_kind kind, int32_t group);

/* After any change: whether something of it is not indexed, nor left out. */
void rs_sequence_note_behind(rs_index *index, rs_sequence *sequence);

/* Whether every sequence that is behind is in the list of these exactly once. */
bool rs_behind_check(const rs_index *index);

/* Its text ends at this level now, which is not below its start. */
void rs_sequence_cut(rs_index *index, rs_sequence *sequence, int32_t level);

/* Its text goes on with these tokens, which are not indexed yet. Idle groups make room, and then spare text. */
rs_status rs_sequence_write(rs_index *index, rs_sequence *sequence, const int32_t *tokens, int32_t num_tokens);

/* Index up to max_tokens of what is behind of a sequence whose prompt is whole, as far as there is room. For what runs and
 * for prompts spare text makes room: then it may be behind again. */
rs_status rs_sequence_index(rs_index *index, rs_sequence *sequence, int64_t max_tokens);

/* Its slot is closed; its group does not learn of it. */
void rs_sequence_free(rs_index *index, rs_sequence *sequence);

/* There is no memory for more of it. */
void rs_sequence_leave_out(rs_index *index, rs_sequence *sequence);

/* While somebody is in a group, it is not given up. A running sequence is, from rs_sequence_open or _resume to _close or
 * _park; rs_group_add leaves for its text. */
void rs_group_enter(rs_group *group);
void rs_group_leave(rs_index *index, rs_group *group);

/* Check what groups and sequences say of each other, and the closed slots: NULL, or what is broken. */
const char *rs_tables_check(const rs_index *index);

static inline rs_prediction *rs_predictions(const rs_index *index, int32_t sequence) {
    return index->predictions + (size_t)sequence * (size_t)index->options.num_speculative_tokens;
}

/* What keeps the own contexts of a text apart from those of others. */
static inline uint64_t rs_own_salt(uint64_t serial) { return ~(serial << 8); }

#endif
