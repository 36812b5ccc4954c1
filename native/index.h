/* The index behind the opaque handle: tables of groups and sequences, and what is learned from all of them.
 *
 * index.c and step.c call groups.c; step.c and groups.c call sequences.c, which calls queue.c; step.c calls draft.c. Against that
 * order any allocation may call full_index.c, which frees idle groups and idle text: it says who is safe from that.
 *
 * A comment in a struct names the file that writes the fields below it, as long as the struct lives, alone or with another
 * that it names; other files call functions of theirs. */
#ifndef RS_INDEX_H
#define RS_INDEX_H

#include "automaton.h"
#include "error.h"
#include "evidence.h"

/* How far a text is indexed. Zeros: the empty one. */
typedef struct {
    int32_t indexed;  /* the level up to which it is */
    uint32_t last;    /* the state of its tokens up to there */
    rs_recent recent; /* their end */
    rs_match corpus;  /* the longest suffix of them that is in the corpus */
} rs_position;

/* A sequence holds a text. What runs is in the batches of steps. What is parked may run again. What is unnamed, a text of
 * rs_group_add or of what was closed, no user of the library can ask for: it is freed when it is indexed. */
typedef enum { RS_PROMPT, RS_RUNNING, RS_PARKED, RS_UNNAMED } rs_kind;

typedef struct rs_sequence rs_sequence;
struct rs_sequence {
    /* sequences.c, unless a field names another */
    rs_kind kind;
    bool is_left_out; /* there is no memory for more of it, until it runs again: the next step drops its row */
    bool is_resumed;  /* the next step compares its row with its text */
    int32_t id, group;
    rs_sequence *prompt;          /* after which it begins; NULL: it is one itself */
    rs_sequence *next, *previous; /* of its group; NULL: none */
    uint32_t queued;              /* queue.c: its number in the queue, from 1; 0: it is not there */
    int32_t num_after;            /* of a prompt: sequences that begin after it */
    int32_t start, end;           /* the levels at which its text begins, which is the prompt's length, and ends */
    int32_t counted_end;          /* up to this level the automaton has the text: it is followed, not counted again */
    rs_position at;
    int32_t *tokens; /* of its text, after the prompt */
    uint32_t tokens_capacity, predictions_capacity;
    rs_prediction *predictions; /* [num_speculative_tokens], only while it runs; draft.c fills them */
    int32_t num_predictions;    /* and draft.c: of the draft that is not verified yet, perhaps one too unlikely for it */
    uint64_t serial;            /* of all texts ever begun, from 1 */
    uint64_t latest_step;       /* step.c: in which it was */
};

typedef struct {
    /* groups.c */
    bool is_open;
    int32_t next_closed;  /* while it is closed: in the list of free slots, or of those given up; -1: none */
    int32_t num_inside;   /* who has entered the group: its running sequences, and callers */
    int32_t older, newer; /* while it is idle, in the list of these: idle for longer, for less; -1: none */
    /* sequences.c */
    bool give_up_when_idle; /* it has lost a text, or had no memory for one */
    rs_sequence *prompt;    /* the latest; until a prompt is indexed as a whole, nothing that begins after it is */
    rs_sequence *first;     /* of its sequences, the latest first: a prompt after all that begins after it; NULL: none */
    uint64_t num_tokens;    /* in the automaton */
    rs_automaton automaton;
} rs_group;

typedef struct {
    rs_sequence *sequence; /* NULL: closed */
    int32_t next_free;
} rs_slot;

typedef struct {
    uint64_t key; /* the least goes first, of equal ones that with the least serial */
    rs_sequence *sequence;
} rs_queue_entry;

struct rs_index {
    /* index.c */
    rs_options options;
    rs_account account;  /* memory.c writes its numbers */
    rs_memory memory;    /* all that is left of the account */
    rs_automaton corpus; /* states NULL: none */
    /* groups.c */
    rs_group *groups;
    uint32_t num_groups, groups_capacity; /* slots, open and closed */
    int32_t free_group;                   /* the closed slot to be used next, -1: none */
    int32_t given_up;                     /* the first that rs_group_given_up has not named yet, -1: none */
    int32_t oldest_idle, newest_idle;     /* -1: none */
    /* sequences.c */
    rs_slot *slots;
    uint32_t num_slots, slots_capacity;
    int32_t free_slot; /* to be used next, -1: none */
    uint32_t num_sequences; /* of all kinds */
    uint64_t num_serials;
    rs_contexts contexts;
    uint64_t num_texts_left_out; /* and step.c, if they are of rows */
    /* queue.c */
    rs_queue_entry *queue; /* a heap of the unindexed texts that can be indexed */
    uint32_t num_queued, queue_capacity; /* sequences.c reserves the latter */
    /* step.c */
    uint64_t num_steps;
    rs_mixer mixer;
};

/* ---- groups.c ---- */

/* Whether there is an open group with this id; if not, the error says so. */
rs_status rs_check_group(const rs_index *index, int32_t group, rs_error *error);

/* While somebody is in a group, it is not given up. A running sequence is, from rs_sequence_open or _resume to _close or
 * _park; others are during a call. */
void rs_group_enter(rs_index *index, int32_t group);
void rs_group_leave(rs_index *index, int32_t group);

/* Close an idle group, which rs_group_given_up is to name. */
void rs_group_give_up(rs_index *index, int32_t group);

/* Close a group, whoever is in it. */
void rs_group_free(rs_index *index, int32_t group);

/* ---- sequences.c ---- */

/* One that runs or is parked: users of the library know only these. NULL: there is none. */
static inline rs_sequence *rs_find_sequence(const rs_index *index, int32_t sequence) {
    rs_sequence *found = sequence >= 0 && (uint32_t)sequence < index->num_slots ? index->slots[sequence].sequence : NULL;
    return found != NULL && (found->kind == RS_RUNNING || found->kind == RS_PARKED) ? found : NULL;
}

/* Whether it begins after a prompt that is not indexed as a whole. */
static inline bool rs_waits_for_prompt(const rs_sequence *sequence) {
    return sequence->prompt != NULL && sequence->prompt->at.indexed < sequence->prompt->end;
}

static inline bool rs_is_unindexed(const rs_sequence *sequence) {
    return sequence->at.indexed < sequence->end || rs_waits_for_prompt(sequence);
}

/* A sequence with these tokens after the prompt of its group, which does not leave the index meanwhile. A prompt takes the
 * place of the group's. */
rs_status rs_sequence_new(rs_index *index, rs_kind kind, int32_t group, const int32_t *tokens, int64_t num_tokens,
                          rs_sequence **made);

/* Frees it, and its prompt if nobody needs that any more. Does not call rs_group_leave. */
void rs_sequence_free(rs_index *index, rs_sequence *sequence);

/* Frees what nobody needs: a prompt that is not its group's any more, and after which nothing begins; what is unnamed, once
 * it is indexed or left out. */
void rs_sequence_free_unneeded(rs_index *index, rs_sequence *sequence);

/* It runs again. */
rs_status rs_sequence_run(rs_index *index, rs_sequence *sequence);

/* It runs no more: it is parked or unnamed. */
void rs_sequence_stop(rs_index *index, rs_sequence *sequence, rs_kind kind);

/* There is no memory for more of it. */
void rs_sequence_leave_out(rs_index *index, rs_sequence *sequence);

/* Its row has its text up to this level, which is not below its start: its text ends there now. */
void rs_sequence_cut(rs_index *index, rs_sequence *sequence, int32_t level);

/* Its text goes on with these tokens, which are unindexed. */
rs_status rs_sequence_write(rs_index *index, rs_sequence *sequence, const int32_t *tokens, int64_t num_tokens);

/* Index up to so many tokens of a text, unless its prompt is unindexed, as far as there is room. Where idle text has made
 * room, it may be unindexed again. */
rs_status rs_sequence_index(rs_index *index, rs_sequence *sequence, int64_t max_tokens_to_index);

/* To have it indexed from its start. Up to counted_end it is in the automaton already. */
void rs_sequence_restart(rs_index *index, rs_sequence *sequence, int32_t counted_end);

/* Forget all text of a group but that of its running sequences, which is to be indexed anew. `kept` stays, whatever goes. */
void rs_forget_idle_text(rs_index *index, int32_t group, rs_sequence *kept);

/* What keeps the own contexts of a text apart from those of others. */
static inline uint64_t rs_own_salt(uint64_t serial) { return ~(serial << 8); }

/* ---- queue.c ---- */

/* What runs, and prompts: they are indexed first, and idle text makes room for them. */
static inline bool rs_is_urgent(const rs_sequence *sequence) {
    return sequence->kind == RS_RUNNING || sequence->kind == RS_PROMPT;
}

/* To its place in the queue, after any change; out of it if no more of it can be indexed. */
void rs_queue_move(rs_index *index, rs_sequence *sequence);
void rs_queue_leave(rs_index *index, rs_sequence *sequence);

/* ---- full_index.c ---- */

/* Give up the group that has been idle longest; false where none is. `owner` is the index. */
bool rs_give_up_idle(void *owner);

/* An allocation for this text has failed: whether idle text has made room for it. */
bool rs_make_room_for(rs_index *index, rs_sequence *sequence);

/* What may be allocated for this text, whose group the caller has entered. */
rs_memory rs_memory_for(rs_index *index, const rs_sequence *sequence);

#endif
