/* The queue of waiting texts, a list.
 *
 *     [ prompt of group 3 ] --> [ prompt of group 0 ] --> [ response in group 7 ] --> [ response in group 3 ] --> NULL
 *
 * Invariant: a prompt comes before every text that is none, since no text of a group is indexed before its prompt. */
#include "waiting.h"

#include <string.h>

static uint32_t num_bytes_of(int32_t num_tokens) {
    return (uint32_t)(sizeof(rs_waiting) + (size_t)num_tokens * sizeof(int32_t));
}

rs_status rs_waiting_add(rs_waiting **queue, rs_memory *memory, int32_t group, bool is_prompt, const int32_t *tokens,
                         int64_t num_tokens) {
    void *made = NULL;
    uint32_t capacity = 0;
    rs_status status = rs_resize(memory, &made, &capacity, num_bytes_of((int32_t)num_tokens), 1);
    if (status != RS_OK) {
        return status;
    }
    rs_waiting *waiting = made;
    *waiting = (rs_waiting){.group = group, .is_prompt = is_prompt, .num_tokens = (int32_t)num_tokens};
    memcpy(waiting->tokens, tokens, (size_t)num_tokens * sizeof *tokens);
    rs_waiting **at = queue;
    while (*at != NULL && ((*at)->is_prompt || !is_prompt)) {
        at = &(*at)->next;
    }
    waiting->next = *at;
    *at = waiting;
    return RS_OK;
}

void rs_waiting_drop_first(rs_waiting **queue, rs_memory *memory) {
    void *dropped = *queue;
    uint32_t num_bytes = num_bytes_of((*queue)->num_tokens);
    *queue = (*queue)->next;
    rs_resize(memory, &dropped, &num_bytes, 0, 1);
}

void rs_waiting_drop(rs_waiting **queue, rs_memory *memory, int32_t group) {
    while (*queue != NULL) {
        if (group >= 0 && (*queue)->group != group) {
            queue = &(*queue)->next;
        } else {
            rs_waiting_drop_first(queue, memory);
        }
    }
}

uint64_t rs_waiting_num_tokens(const rs_waiting *queue) {
    uint64_t num_tokens = 0;
    for (; queue != NULL; queue = queue->next) {
        num_tokens += (uint64_t)(queue->num_tokens - queue->num_indexed);
    }
    return num_tokens;
}

uint64_t rs_waiting_num_bytes(const rs_waiting *queue) {
    uint64_t num_bytes = 0;
    for (; queue != NULL; queue = queue->next) {
        num_bytes += num_bytes_of(queue->num_tokens);
    }
    return num_bytes;
}
