/* Room for urgent texts: idle text that leaves the index, and a part of the budget that others do not take. */
#include "index.h"

enum {
    LEAST_IDLE = 8, /* less than this part of a group's text is not worth that the rest is indexed again */
    KEPT_FREE = 8   /* this part of the budget is for urgent texts */
};

/* Forget all text of a group but that of its running sequences, which is to be indexed again. */
static void forget_idle_text(rs_index *index, rs_group *group) {
    rs_automaton_reset(&group->automaton);
    group->num_tokens = 0;
    group->give_up_when_idle = true;
    for (rs_sequence *each = group->first; each != NULL; each = each->next) {
        each->is_left_out |= each->kind == RS_PARKED; /* until it runs again */
        if (each->kind == RS_PROMPT) { /* prompts first: a text begins where its prompt is */
            rs_sequence_restart(index, each, 0);
        }
    }
    for (rs_sequence **each = &group->first; *each != NULL;) {
        if ((*each)->kind == RS_CLOSING) {
            rs_sequence_free(index, *each); /* and perhaps its prompt, further on */
        } else {
            rs_sequence_restart(index, *each, 0);
            each = &(*each)->next;
        }
    }
}

/* Forget the idle text of the group that has most of it; false where that is little everywhere. */
static bool forget_most_idle_text(rs_index *index) {
    rs_group *found = NULL;
    uint64_t most = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        rs_group *group = index->groups + i;
        uint64_t num_idle = group->num_tokens;
        for (const rs_sequence *each = group->first; each != NULL; each = each->next) {
            if (rs_is_urgent(each)) {
                const int32_t end = each->at.indexed > each->counted_end ? each->at.indexed : each->counted_end;
                num_idle -= (uint64_t)(end - each->start);
            }
        }
        if (num_idle > most && num_idle >= group->num_tokens / LEAST_IDLE) {
            most = num_idle;
            found = group;
        }
    }
    if (found != NULL) {
        forget_idle_text(index, found);
    }
    return found != NULL;
}

bool rs_make_room_for(rs_index *index, rs_sequence *sequence) {
    sequence->num_after++; /* so that it stays, if it is an old prompt of which only idle text has been left */
    const bool made = rs_is_urgent(sequence) && forget_most_idle_text(index);
    sequence->num_after--;
    return made;
}

void rs_keep_free(rs_index *index, const rs_sequence *sequence) {
    const uint64_t max_bytes = index->memory.max_bytes;
    const bool keeps = max_bytes > 0 && sequence != NULL && !rs_is_urgent(sequence);
    index->memory.kept_free = keeps ? (max_bytes - sizeof *index) / KEPT_FREE : 0;
}
