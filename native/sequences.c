/* Sequences: their slots, their texts, and how these are indexed.
 *
 *     slots      [ prompt of 0 ][ 1 ][ 2: closed ][ 3 ]     each open one has a state in its group's automaton, `last`
 *
 *     a text     start ....... at.indexed ....... end       in levels: tokens of its row, with the prompt
 *                      indexed          unindexed
 *
 * Invariants: every closed slot is in the list of free ones once. */
#include <assert.h>
#include <string.h>

#include "index.h"

/* ---- their slots ---- */

static rs_status reserve_predictions(rs_index *index, rs_sequence *sequence) {
    return RS_RESIZE(&index->memory, sequence->predictions, sequence->predictions_capacity,
                     (uint64_t)index->options.num_speculative_tokens);
}

static void free_predictions(rs_index *index, rs_sequence *sequence) {
    sequence->num_predictions = 0;
    RS_RESIZE(&index->memory, sequence->predictions, sequence->predictions_capacity, 0);
}

/* Memory for one like `sequence`, but for its tokens. Its predictions stay reserved on failure. */
static rs_status reserve_sequence(rs_index *index, rs_sequence *sequence, rs_sequence **made) {
    const rs_memory *memory = &index->memory;
    RS_TRY(RS_RESERVE(memory, index->queue, index->queue_capacity, (uint64_t)index->num_sequences + 1));
    if (index->free_slot < 0) {
        RS_TRY(RS_RESERVE(memory, index->slots, index->slots_capacity, (uint64_t)index->num_slots + 1));
    }
    if (sequence->kind == RS_RUNNING) {
        RS_TRY(reserve_predictions(index, sequence));
    }
    return RS_NEW(memory, *made);
}

/* It gets a slot, and is the first of its group. */
static void link_sequence(rs_index *index, rs_sequence *sequence) {
    rs_group *group = index->groups + sequence->group;
    sequence->id = index->free_slot; /* only now: idle groups may have made room, and given back theirs */
    if (sequence->id < 0) {
        sequence->id = (int32_t)index->num_slots++;
    } else {
        index->free_slot = index->slots[sequence->id].next_free;
    }
    index->num_sequences++;
    sequence->serial = ++index->num_serials;
    if (sequence->prompt != NULL) {
        sequence->prompt->num_after++;
    }
    sequence->next = group->first;
    if (sequence->next != NULL) {
        sequence->next->previous = sequence;
    }
    group->first = index->slots[sequence->id].sequence = sequence;
}

rs_status rs_sequence_new(rs_index *index, rs_kind kind, int32_t group, const int32_t *tokens, int64_t num_tokens,
                          rs_sequence **made) {
    assert(index->groups[group].num_inside > 0);
    rs_sequence *const old = index->groups[group].prompt, *const prompt = kind == RS_PROMPT ? NULL : old;
    rs_sequence sequence = {.kind = kind, .group = group, .prompt = prompt};
    sequence.start = sequence.end = prompt == NULL ? 0 : prompt->end;
    *made = NULL;
    rs_status status = reserve_sequence(index, &sequence, made);
    if (status != RS_OK) {
        free_predictions(index, &sequence);
        index->num_texts_left_out++;
        return status;
    }
    **made = sequence;
    link_sequence(index, *made);
    rs_sequence_restart(index, *made, 0);
    status = rs_sequence_write(index, *made, tokens, num_tokens);
    if (status != RS_OK) {
        rs_sequence_free(index, *made);
        index->num_serials--; /* no text has begun */
        index->num_texts_left_out++;
    } else if (kind == RS_PROMPT) {
        index->groups[group].prompt = *made;
        if (old != NULL) {
            rs_sequence_free_unneeded(index, old);
        }
    }
    return status;
}

void rs_sequence_free(rs_index *index, rs_sequence *sequence) {
    rs_queue_leave(index, sequence);
    *(sequence->previous == NULL ? &index->groups[sequence->group].first : &sequence->previous->next) = sequence->next;
    if (sequence->next != NULL) {
        sequence->next->previous = sequence->previous;
    }
    index->slots[sequence->id] = (rs_slot){.sequence = NULL, .next_free = index->free_slot};
    index->free_slot = sequence->id;
    index->num_sequences--;
    RS_RESIZE(&index->memory, sequence->tokens, sequence->tokens_capacity, 0);
    free_predictions(index, sequence);
    rs_sequence *prompt = sequence->prompt;
    RS_DELETE(&index->memory, sequence);
    if (prompt != NULL) {
        prompt->num_after--;
        rs_sequence_free_unneeded(index, prompt);
    }
}

void rs_sequence_free_unneeded(rs_index *index, rs_sequence *sequence) {
    const bool is_old = sequence->num_after == 0 && index->groups[sequence->group].prompt != sequence;
    const bool is_done = sequence->at.indexed == sequence->end || sequence->is_left_out;
    if ((sequence->kind == RS_PROMPT && is_old) || (sequence->kind == RS_UNNAMED && is_done)) {
        rs_sequence_free(index, sequence);
    }
}

/* ---- their texts ---- */

rs_status rs_sequence_run(rs_index *index, rs_sequence *sequence) {
    assert(index->groups[sequence->group].num_inside > 0);
    RS_TRY(reserve_predictions(index, sequence));
    sequence->kind = RS_RUNNING;
    sequence->is_resumed = true;
    sequence->is_left_out = false;
    rs_queue_move(index, sequence);
    return RS_OK;
}

void rs_sequence_stop(rs_index *index, rs_sequence *sequence, rs_kind kind) {
    free_predictions(index, sequence);
    sequence->kind = kind;
    rs_queue_move(index, sequence);
}

void rs_sequence_leave_out(rs_index *index, rs_sequence *sequence) {
    sequence->is_left_out = index->groups[sequence->group].give_up_when_idle = true;
    index->num_texts_left_out++;
    rs_queue_move(index, sequence);
}

void rs_sequence_cut(rs_index *index, rs_sequence *sequence, int32_t level) {
    sequence->end = level;
    sequence->num_predictions = 0;
    sequence->is_resumed = false;
    if (level < sequence->at.indexed) {
        rs_sequence_restart(index, sequence, level);
    } else if (level < sequence->counted_end) {
        sequence->counted_end = level;
    }
    rs_queue_move(index, sequence);
}

rs_status rs_sequence_write(rs_index *index, rs_sequence *sequence, const int32_t *tokens, int64_t num_tokens) {
    const rs_memory memory = rs_memory_for(index, sequence);
    const uint64_t num_before = (uint64_t)(sequence->end - sequence->start);
    rs_status status;
    do {
        status = RS_RESERVE(&memory, sequence->tokens, sequence->tokens_capacity, num_before + (uint64_t)num_tokens);
    } while (status != RS_OK && rs_make_room_for(index, sequence));
    RS_TRY(status);
    if (num_tokens > 0) {
        memcpy(sequence->tokens + num_before, tokens, (size_t)num_tokens * sizeof *tokens);
    }
    sequence->end += (int32_t)num_tokens;
    rs_queue_move(index, sequence);
    return RS_OK;
}

void rs_forget_idle_text(rs_index *index, int32_t id, rs_sequence *kept) {
    rs_group *group = index->groups + id;
    rs_automaton_reset(&group->automaton, &index->memory);
    group->num_tokens = 0;
    group->give_up_when_idle = true;
    kept->num_after++; /* one more than there are: so it is not freed with the last of them, if it is a prompt */
    for (rs_sequence *each = group->first; each != NULL; each = each->next) {
        each->is_left_out |= each->kind == RS_PARKED; /* until it runs again */
        if (each->kind == RS_PROMPT) { /* prompts first: a text begins where its prompt is */
            rs_sequence_restart(index, each, 0);
        }
    }
    for (rs_sequence **each = &group->first; *each != NULL;) {
        if ((*each)->kind == RS_UNNAMED) {
            rs_sequence_free(index, *each); /* and perhaps its prompt, further on */
        } else {
            rs_sequence_restart(index, *each, 0);
            each = &(*each)->next;
        }
    }
    kept->num_after--;
}

/* ---- indexing ---- */

void rs_sequence_restart(rs_index *index, rs_sequence *sequence, int32_t counted_end) {
    sequence->at = sequence->prompt == NULL ? (rs_position){.indexed = 0} : sequence->prompt->at;
    sequence->at.indexed = sequence->start; /* also before all of the prompt is indexed */
    sequence->counted_end = counted_end;
    rs_queue_move(index, sequence);
}

/* Index what the sequence's text goes on with, or go after it where it is indexed there already. */
static rs_status append(rs_index *index, rs_group *group, rs_sequence *sequence, int64_t num_tokens) {
    const rs_memory memory = rs_memory_for(index, sequence);
    rs_position *at = &sequence->at;
    const int32_t *tokens = sequence->tokens + (at->indexed - sequence->start);
    for (int64_t i = 0; i < num_tokens; i++) {
        const int32_t token = tokens[i];
        if (at->indexed < sequence->counted_end) {
            at->last = *rs_automaton_find(&group->automaton, at->last, token);
        } else {
            RS_TRY(rs_automaton_extend(&group->automaton, &memory, &at->last, token));
            if (sequence->kind != RS_PROMPT) {
                uint32_t tags[RS_NUM_CONTEXTS];
                rs_context_tags(&at->recent, rs_own_salt(sequence->serial), tags);
                rs_contexts_learn(&index->contexts, &memory, tags, token);
            }
            group->num_tokens++;
        }
        rs_recent_push(&at->recent, token);
        if (index->corpus.states != NULL) {
            rs_match_move(&index->corpus, &at->corpus, token);
        }
        at->indexed++;
    }
    return RS_OK;
}

rs_status rs_sequence_index(rs_index *index, rs_sequence *sequence, int64_t max_tokens_to_index) {
    rs_group *group = index->groups + sequence->group;
    rs_status status;
    do {
        const int64_t num_left = sequence->end - sequence->at.indexed;
        const int64_t num = num_left < max_tokens_to_index ? num_left : max_tokens_to_index;
        status = rs_waits_for_prompt(sequence) ? RS_OK : append(index, group, sequence, num);
    } while (status != RS_OK && rs_make_room_for(index, sequence));
    rs_queue_move(index, sequence);
    if (sequence->kind == RS_PROMPT && sequence->at.indexed == sequence->end) {
        for (rs_sequence *each = group->first; each != NULL; each = each->next) {
            if (each->prompt == sequence) {
                rs_sequence_restart(index, each, 0);
            }
        }
    }
    return status;
}
