/* Texts that wait to be indexed a part in each step: the rest of a prompt, or one that follows the prompt of its group. */
#ifndef RS_WAITING_H
#define RS_WAITING_H

#include "corpus.h"
#include "contexts.h"

/* How far a text is indexed, and where it is there. Zeros: the empty one. */
typedef struct {
    int32_t level;    /* tokens of it */
    uint32_t last;    /* their state */
    rs_recent recent; /* their end */
    rs_cursor cursor; /* their place in the corpus */
} rs_place;

/* One text; a queue has prompts first, else the order in which they came. NULL: nothing waits. */
typedef struct rs_waiting {
    struct rs_waiting *next;
    int32_t group;
    bool is_prompt;
    rs_place at;     /* of a text after the prompt */
    uint64_t serial; /* of the same, 0: nothing of it is indexed yet */
    int32_t num_tokens;
    int32_t num_indexed;
    int32_t tokens[];
} rs_waiting;

/* Let these tokens, which are copied, wait. On failure nothing changes, except that idle groups may be gone. */
rs_status rs_waiting_add(rs_waiting **queue, rs_memory *memory, int32_t group, bool is_prompt, const int32_t *tokens,
                         int64_t num_tokens);

/* Every text of the group; of every group where it is -1. */
void rs_waiting_drop(rs_waiting **queue, rs_memory *memory, int32_t group);

/* The first text, of which nothing is left. */
void rs_waiting_drop_first(rs_waiting **queue, rs_memory *memory);

/* Of the texts that wait, without what is indexed. */
uint64_t rs_waiting_num_tokens(const rs_waiting *queue);

uint64_t rs_waiting_num_bytes(const rs_waiting *queue);

#endif
