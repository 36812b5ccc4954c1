/* Sequences: their slots, their texts, what of these is behind, and how it is indexed. index.c has the picture. */
#include "index.h"

#include <inttypes.h>
#include <string.h>

enum { LEAST_SPARE = 8 /* less than this part of a group's text is not worth that the rest is indexed again */ };

/* ---- the list of what is behind ---- */

static void unlink_behind(rs_index *index, rs_sequence *sequence) {
    if (sequence->is_behind) {
        *(sequence->previous < 0 ? &index->first_behind : &index->sequences[sequence->previous].next) = sequence->next;
        if (sequence->next >= 0) {
            index->sequences[sequence->next].previous = sequence->previous;
        }
        sequence->is_behind = false;
    }
}

void rs_sequence_note_behind(rs_index *index, rs_sequence *sequence) {
    const bool is_behind = sequence->at.indexed < sequence->end && !sequence->is_left_out && sequence->group >= 0;
    if (is_behind == sequence->is_behind) {
        return;
    }
    unlink_behind(index, sequence);
    if (is_behind) {
        const int32_t id = (int32_t)(sequence - index->sequences);
        sequence->next = index->first_behind;
        sequence->previous = -1;
        if (sequence->next >= 0) {
            index->sequences[sequence->next].previous = id;
        }
        index->first_behind = id;
        sequence->is_behind = true;
    }
}

bool rs_behind_check(const rs_index *index) {
    int32_t num = 0;
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        num += index->sequences[i].is_behind;
    }
    int32_t previous = -1;
    for (int32_t id = index->first_behind; id >= 0; id = index->sequences[id].next) {
        if ((uint32_t)id >= index->num_sequences || !index->sequences[id].is_behind ||
            index->sequences[id].previous != previous || num-- == 0) {
            return false;
        }
        previous = id;
    }
    return num == 0;
}

/* ---- slots of sequences ---- */

rs_status rs_sequence_reserve(rs_index *index) {
    if (index->free_sequence >= 0) {
        return RS_OK;
    }
    uint64_t needed = (uint64_t)index->num_sequences + 1;
    uint64_t num_predictions = needed * (uint64_t)index->options.num_speculative_tokens;
    rs_status status = rs_reserve(&index->memory, (void **)&index->predictions, &index->predictions_capacity,
                                  num_predictions, sizeof *index->predictions);
    if (status != RS_OK) {
        return status;
    }
    return rs_reserve(&index->memory, (void **)&index->sequences, &index->sequences_capacity, needed,
                      sizeof *index->sequences);
}

rs_sequence *rs_sequence_new(rs_index *index, rs_kind kind, int32_t group) {
    int32_t id = index->free_sequence;
    if (id < 0) {
        id = (int32_t)index->num_sequences++;
    } else {
        index->free_sequence = index->sequences[id].next;
    }
    rs_sequence *sequence = index->sequences + id;
    *sequence = (rs_sequence){.kind = kind, .next = -1, .previous = -1, .group = group};
    sequence->serial = kind == RS_PROMPT ? 0 : ++index->num_serials;
    return sequence;
}

void rs_sequence_free(rs_index *index, rs_sequence *sequence) {
    unlink_behind(index, sequence);
    rs_resize(&index->memory, (void **)&sequence->text, &sequence->text_capacity, 0, sizeof *sequence->text);
    *sequence = (rs_sequence){.next = index->free_sequence};
    index->free_sequence = (int32_t)(sequence - index->sequences);
}

/* ---- sequences ---- */

/* To have it indexed from its start: the prompt, or the root. Up to `followed` it is in the automaton already. */
static void restart(rs_index *index, rs_sequence *sequence, int32_t followed) {
    sequence->at = (rs_place){.indexed = 0};
    if (sequence->start > 0) {
        sequence->at = index->sequences[index->groups[sequence->group].prompt].at;
        sequence->at.indexed = sequence->start; /* also before all of the prompt is indexed */
    }
    sequence->followed = followed;
    rs_sequence_note_behind(index, sequence);
}

void rs_sequence_cut(rs_index *index, rs_sequence *sequence, int32_t level) {
    sequence->end = level;
    sequence->num_predictions = 0;
    if (level < sequence->at.indexed) {
        restart(index, sequence, level);
        return;
    }
    if (level < sequence->followed) {
        sequence->followed = level;
    }
    rs_sequence_note_behind(index, sequence);
}

static bool forget_most_spare_text(rs_index *index);

static bool may_take_spare_text(const rs_sequence *sequence) {
    return sequence->kind == RS_RUNNING || sequence->kind == RS_PROMPT;
}

rs_status rs_sequence_write(rs_index *index, rs_sequence *sequence, const int32_t *tokens, int32_t num_tokens) {
    const uint64_t num_before = (uint64_t)(sequence->end - sequence->start);
    rs_status status;
    do {
        status = rs_reserve(&index->memory, (void **)&sequence->text, &sequence->text_capacity,
                            num_before + (uint64_t)num_tokens, sizeof *sequence->text);
    } while (status != RS_OK && may_take_spare_text(sequence) && forget_most_spare_text(index));
    if (status != RS_OK) {
        index->num_texts_left_out++;
        return status;
    }
    if (num_tokens > 0) {
        memcpy(sequence->text + num_before, tokens, (size_t)num_tokens * sizeof *tokens);
    }
    sequence->end += num_tokens;
    rs_sequence_note_behind(index, sequence);
    return RS_OK;
}

rs_status rs_sequence_open(rs_index *index, int32_t group, bool after_prompt, int32_t *sequence, rs_error *error) {
    rs_group *found = rs_find_group(index, group);
    if (found == NULL) {
        return rs_fail(error, RS_EUNKNOWN, "group=%" PRId32 ": unknown", group);
    }
    rs_group_enter(found);
    rs_status status = rs_sequence_reserve(index);
    if (status != RS_OK) {
        rs_group_leave(index, found);
        return rs_memory_error(&index->memory, error, status);
    }
    rs_sequence *opened = rs_sequence_new(index, RS_RUNNING, group);
    opened->start = opened->end = after_prompt ? index->sequences[found->prompt].end : 0;
    restart(index, opened, 0);
    *sequence = (int32_t)(opened - index->sequences);
    return RS_OK;
}

rs_status rs_group_add(rs_index *index, int32_t group, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    rs_status status = rs_check_tokens(token_ids, num_tokens, "token_ids", error);
    int32_t id;
    if (status == RS_OK) {
        status = rs_sequence_open(index, group, true, &id, error);
    }
    if (status != RS_OK) {
        return status;
    }
    rs_sequence *text = index->sequences + id;
    text->kind = RS_TEXT;
    status = rs_sequence_write(index, text, token_ids, (int32_t)num_tokens);
    if (status != RS_OK || num_tokens == 0) {
        rs_sequence_free(index, text);
    }
    rs_group_leave(index, index->groups + group);
    return rs_memory_error(&index->memory, error, status);
}

static rs_status find(const rs_index *index, int32_t sequence, rs_sequence **found, rs_error *error) {
    *found = rs_find_sequence(index, sequence);
    return *found != NULL ? RS_OK : rs_fail(error, RS_EUNKNOWN, "sequence=%" PRId32 ": unknown", sequence);
}

rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    rs_group *left = found->kind == RS_RUNNING ? index->groups + found->group : NULL;
    rs_sequence_free(index, found);
    if (left != NULL) {
        rs_group_leave(index, left);
    }
    return RS_OK;
}

rs_status rs_sequence_park(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    if (found->kind == RS_RUNNING) {
        found->kind = RS_PARKED;
        rs_group_leave(index, index->groups + found->group);
    }
    return RS_OK;
}

rs_status rs_sequence_resume(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    if (found->group < 0) {
        return rs_fail(error, RS_EINVAL, "sequence=%" PRId32 ": its group is gone", sequence);
    }
    if (found->kind == RS_PARKED) {
        found->kind = RS_RUNNING;
        found->is_resumed = true;
        found->is_left_out = false;
        rs_sequence_note_behind(index, found);
        rs_group_enter(index->groups + found->group);
    }
    return RS_OK;
}

rs_status rs_sequence_text(const rs_index *index, int32_t sequence, int32_t *tokens, int64_t capacity,
                           int64_t *num_tokens, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    *num_tokens = found->end - found->start;
    int64_t num_copied = *num_tokens < capacity ? *num_tokens : capacity;
    if (num_copied > 0) {
        memcpy(tokens, found->text, (size_t)num_copied * sizeof *tokens);
    }
    return RS_OK;
}

/* ---- indexing ---- */

void rs_sequence_leave_out(rs_index *index, rs_sequence *sequence) {
    sequence->is_left_out = true;
    index->num_texts_left_out++;
    rs_sequence_note_behind(index, sequence);
}

/* Index what the sequence's text goes on with, or go after it where it is indexed there already. */
static rs_status append(rs_index *index, rs_group *group, rs_sequence *sequence, int64_t num_tokens) {
    rs_place *at = &sequence->at;
    const int32_t *tokens = sequence->text + (at->indexed - sequence->start);
    for (int64_t i = 0; i < num_tokens; i++) {
        const int32_t token = tokens[i];
        if (at->indexed < sequence->followed) {
            at->last = *rs_find(&group->automaton, at->last, token);
        } else {
            rs_status status = rs_extend(&group->automaton, &at->last, token);
            if (status != RS_OK) {
                return status;
            }
            if (sequence->serial > 0) {
                uint32_t tags[RS_NUM_CONTEXTS];
                rs_context_tags(&at->recent, rs_own_salt(sequence->serial), tags);
                rs_contexts_learn(&index->contexts, &index->memory, tags, token);
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

/* The sequences of this group that waited for its prompt begin after it. */
static void restart_all(rs_index *index, int32_t group) {
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        rs_sequence *sequence = index->sequences + i;
        if (sequence->kind != RS_CLOSED && sequence->kind != RS_PROMPT && sequence->group == group) {
            restart(index, sequence, 0);
        }
    }
}

rs_status rs_sequence_index(rs_index *index, rs_sequence *sequence, int64_t max_tokens) {
    const int32_t group = sequence->group;
    const bool is_prompt = sequence->kind == RS_PROMPT;
    rs_status status;
    do {
        const int64_t num_behind = sequence->end - sequence->at.indexed;
        status = RS_OK;
        if (is_prompt || rs_is_whole(index, index->groups + group)) {
            status = append(index, index->groups + group, sequence, num_behind < max_tokens ? num_behind : max_tokens);
        }
    } while (status != RS_OK && may_take_spare_text(sequence) && forget_most_spare_text(index));
    rs_sequence_note_behind(index, sequence);
    if (is_prompt && sequence->at.indexed == sequence->end) {
        restart_all(index, group);
    }
    return status;
}

/* Forget all text of a group but that of its sequences, which is to be indexed again. */
static void forget_spare_text(rs_index *index, int32_t group) {
    rs_group *forgetting = index->groups + group;
    rs_automaton_reset(&forgetting->automaton);
    forgetting->num_tokens = 0;
    rs_sequence *prompt = index->sequences + forgetting->prompt;
    restart(index, prompt, 0);
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        rs_sequence *sequence = index->sequences + i;
        if (sequence->kind == RS_TEXT && sequence->group == group) {
            rs_sequence_free(index, sequence);
        }
    }
    restart_all(index, group);
}

/* Forget the spare text of the group that has most of it; false where that is little everywhere. */
static bool forget_most_spare_text(rs_index *index) {
    for (uint32_t i = 0; i < index->num_groups; i++) {
        index->groups[i].num_live = 0;
    }
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        const rs_sequence *sequence = index->sequences + i;
        if (sequence->kind != RS_CLOSED && sequence->kind != RS_TEXT && sequence->group >= 0) {
            const int32_t end = sequence->at.indexed > sequence->followed ? sequence->at.indexed : sequence->followed;
            index->groups[sequence->group].num_live += (uint64_t)(end - sequence->start);
        }
    }
    int32_t found = -1;
    uint64_t most = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        const uint64_t num_spare = group->num_tokens - group->num_live;
        if (group->open && num_spare > most && num_spare >= group->num_tokens / LEAST_SPARE) {
            most = num_spare;
            found = (int32_t)i;
        }
    }
    if (found >= 0) {
        forget_spare_text(index, found);
    }
    return found >= 0;
}
