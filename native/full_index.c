/* Making room in a full index: what an allocation may free, and who is safe from it. This is the whole rule:
 *
 * 1. An allocation that does not fit frees idle groups, with what is parked in them, until it does (rs_give_up_idle).
 *    Safe is a group that somebody has entered, with its sequences: so whoever allocates for a group enters it first.
 * 2. Where that was not enough for an urgent text, rs_sequence_write and rs_sequence_index call rs_make_room_for, and try
 *    again. It frees idle text of one group, perhaps of their own, and with it unnamed texts and their old prompts.
 *    Safe are that group's prompt, what runs or is parked, with its prompt, and that text itself; but all are indexed anew.
 * 3. What is allocated for a text that is not urgent leaves a part of the budget free (rs_memory_for).
 *
 * Asserts hold callers to it in native/tests; the product is built without them. */
#include <assert.h>

#include "index.h"

enum {
    LEAST_IDLE = 8, /* less than one part in so many of a group's text is not worth that the rest is indexed anew */
    KEPT_FREE = 8   /* one part in so many of the budget is for urgent texts */
};

bool rs_give_up_idle(void *owner) {
    rs_index *index = owner;
    const int32_t oldest = index->oldest_idle;
    if (oldest >= 0) {
        rs_group_give_up(index, oldest);
    }
    return oldest >= 0;
}

static uint64_t num_idle_tokens(const rs_group *group) {
    uint64_t num_idle = group->num_tokens;
    for (const rs_sequence *each = group->first; each != NULL; each = each->next) {
        if (rs_is_urgent(each)) {
            const int32_t end = each->at.indexed > each->counted_end ? each->at.indexed : each->counted_end;
            num_idle -= (uint64_t)(end - each->start);
        }
    }
    return num_idle;
}

bool rs_make_room_for(rs_index *index, rs_sequence *sequence) {
    int32_t found = -1;
    uint64_t most = 0;
    for (int32_t id = 0; rs_is_urgent(sequence) && id < (int32_t)index->num_groups; id++) {
        const uint64_t num_idle = num_idle_tokens(index->groups + id);
        if (num_idle > most && num_idle >= index->groups[id].num_tokens / LEAST_IDLE) {
            most = num_idle;
            found = id;
        }
    }
    if (found >= 0) {
        rs_forget_idle_text(index, found, sequence);
    }
    return found >= 0;
}

rs_memory rs_memory_for(rs_index *index, const rs_sequence *sequence) {
    assert(index->groups[sequence->group].num_inside > 0);
    const uint64_t max_bytes = index->account.max_bytes;
    const bool keeps = max_bytes > 0 && !rs_is_urgent(sequence);
    return (rs_memory){.account = &index->account, .kept_free = keeps ? (max_bytes - sizeof *index) / KEPT_FREE : 0};
}
