/* Sequences: their slots, their texts, what of these is behind, and how it is indexed. index.c has the picture. */
#include "index.h"

#include <inttypes.h>
#include <string.h>

enum {
    LEAST_SPARE = 8, /* less than this part of a group's text is not worth that the rest is indexed again */
    KEPT_FREE = 8    /* this part of the budget is for what runs */
};

static bool may_take_spare_text(const rs_sequence *sequence) {
    return sequence->kind == RS_RUNNING || sequence->kind == RS_PROMPT;
}

/* ---- the queue of what is behind: a heap ---- */

static bool goes_first(const rs_behind *one, const rs_behind *other) {
    return one->key != other->key ? one->key < other->key : one->sequence->serial < other->sequence->serial;
}

static void put(rs_index *index, uint32_t at, rs_behind entry) {
    index->behind[at] = entry;
    entry.sequence->behind = at + 1;
}

/* Into the place `at`, which is free, or another that becomes free for it. */
static void sift(rs_index *index, uint32_t at, rs_behind entry) {
    for (uint32_t above; at > 0 && goes_first(&entry, index->behind + (above = (at - 1) / 2)); at = above) {
        put(index, at, index->behind[above]);
    }
    for (uint32_t below; (below = 2 * at + 1) < index->num_behind; at = below) {
        below += below + 1 < index->num_behind && goes_first(index->behind + below + 1, index->behind + below);
        if (!goes_first(index->behind + below, &entry)) {
            break;
        }
        put(index, at, index->behind[below]);
    }
    put(index, at, entry);
}

static bool is_behind(const rs_sequence *sequence) {
    return sequence->at.indexed < sequence->end && !sequence->is_left_out && !rs_waits_for_prompt(sequence);
}

/* What runs and prompts go first, of these the one with least left; then others in the order in which they came. */
static rs_behind entry_of(rs_sequence *sequence) {
    const uint64_t num_left = (uint64_t)(sequence->end - sequence->at.indexed);
    return (rs_behind){may_take_spare_text(sequence) ? num_left : UINT64_MAX, sequence};
}

void rs_sequence_note_behind(rs_index *index, rs_sequence *sequence) {
    const uint32_t at = sequence->behind;
    if (is_behind(sequence)) {
        sift(index, at > 0 ? at - 1 : index->num_behind++, entry_of(sequence));
    } else if (at > 0) {
        sequence->behind = 0;
        const rs_behind last = index->behind[--index->num_behind];
        if (last.sequence != sequence) {
            sift(index, at - 1, last);
        }
    }
}

bool rs_behind_check(const rs_index *index) {
    uint32_t num = 0;
    for (uint32_t i = 0; i < index->num_slots; i++) {
        num += index->slots[i].sequence != NULL && is_behind(index->slots[i].sequence);
    }
    bool holds = num == index->num_behind;
    for (uint32_t at = 0; at < index->num_behind && holds; at++) {
        const rs_behind *entry = index->behind + at, *above = index->behind + (at - (at > 0)) / 2;
        holds = is_behind(entry->sequence) && entry->sequence->behind == at + 1 &&
                entry->key == entry_of(entry->sequence).key && !goes_first(entry, above);
    }
    return holds;
}

/* ---- their slots ---- */

/* To have it indexed from its start. Up to `followed` it is in the automaton already. */
static void restart(rs_index *index, rs_sequence *sequence, int32_t followed) {
    sequence->at = (rs_place){.indexed = 0};
    if (sequence->prompt != NULL) {
        sequence->at = sequence->prompt->at;
        sequence->at.indexed = sequence->start; /* also before all of the prompt is indexed */
    }
    sequence->followed = followed;
    rs_sequence_note_behind(index, sequence);
}

static rs_status reserve_predictions(rs_index *index, rs_sequence *sequence) {
    return rs_resize(&index->memory, (void **)&sequence->predictions, &sequence->predictions_capacity,
                     (uint64_t)index->options.num_speculative_tokens, sizeof *sequence->predictions);
}

static void free_predictions(rs_index *index, rs_sequence *sequence) {
    sequence->num_predictions = 0;
    rs_resize(&index->memory, (void **)&sequence->predictions, &sequence->predictions_capacity, 0,
              sizeof *sequence->predictions);
}

rs_status rs_sequence_new(rs_index *index, rs_kind kind, int32_t group, rs_sequence *prompt, const int32_t *tokens,
                          int64_t num_tokens, rs_sequence **made) {
    rs_memory *memory = &index->memory;
    rs_sequence sequence = {.kind = kind, .group = group, .prompt = prompt};
    uint32_t one = 0;
    *made = NULL;
    rs_status status = rs_reserve(memory, (void **)&index->behind, &index->behind_capacity,
                                  (uint64_t)index->num_open + 1, sizeof *index->behind);
    if (status == RS_OK && index->free_slot < 0) {
        status = rs_reserve(memory, (void **)&index->slots, &index->slots_capacity, (uint64_t)index->num_slots + 1,
                            sizeof *index->slots);
    }
    if (status == RS_OK && kind == RS_RUNNING) {
        status = reserve_predictions(index, &sequence);
    }
    if (status == RS_OK) {
        status = rs_resize(memory, (void **)made, &one, 1, sizeof **made);
    }
    if (status != RS_OK) {
        free_predictions(index, &sequence);
        return status;
    }
    sequence.id = index->free_slot; /* only now: idle groups may have made room, and given back theirs */
    if (sequence.id < 0) {
        sequence.id = (int32_t)index->num_slots++;
    } else {
        index->free_slot = index->slots[sequence.id].next_free;
    }
    if (prompt != NULL) {
        prompt->num_after++;
    }
    index->num_open++;
    sequence.serial = ++index->num_serials;
    sequence.start = sequence.end = prompt == NULL ? 0 : prompt->end;
    sequence.next = index->groups[group].first;
    if (sequence.next != NULL) {
        sequence.next->previous = *made;
    }
    **made = sequence;
    index->groups[group].first = index->slots[sequence.id].sequence = *made;
    restart(index, *made, 0);
    status = rs_sequence_write(index, *made, tokens, num_tokens);
    if (status != RS_OK) {
        rs_sequence_free(index, *made);
        index->num_serials--;
    }
    return status;
}

void rs_sequence_free(rs_index *index, rs_sequence *sequence) {
    sequence->is_left_out = true;
    rs_sequence_note_behind(index, sequence);
    *(sequence->previous == NULL ? &index->groups[sequence->group].first : &sequence->previous->next) = sequence->next;
    if (sequence->next != NULL) {
        sequence->next->previous = sequence->previous;
    }
    index->slots[sequence->id] = (rs_slot){.sequence = NULL, .next_free = index->free_slot};
    index->free_slot = sequence->id;
    index->num_open--;
    rs_resize(&index->memory, (void **)&sequence->text, &sequence->text_capacity, 0, sizeof *sequence->text);
    free_predictions(index, sequence);
    rs_sequence *prompt = sequence->prompt;
    uint32_t one = 1;
    rs_resize(&index->memory, (void **)&sequence, &one, 0, sizeof *sequence);
    if (prompt != NULL) {
        prompt->num_after--;
        rs_prompt_free_if_old(index, prompt);
    }
}

void rs_prompt_free_if_old(rs_index *index, rs_sequence *prompt) {
    if (prompt->num_after == 0 && index->groups[prompt->group].prompt != prompt) {
        rs_sequence_free(index, prompt);
    }
}

/* ---- sequences ---- */

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

/* What does not run leaves a part of the budget to what does. */
static void keep_free(rs_index *index, const rs_sequence *sequence) {
    const uint64_t max_bytes = index->memory.max_bytes;
    const bool keeps = max_bytes > 0 && sequence != NULL && !may_take_spare_text(sequence);
    index->memory.kept_free = keeps ? (max_bytes - sizeof *index) / KEPT_FREE : 0;
}

rs_status rs_sequence_write(rs_index *index, rs_sequence *sequence, const int32_t *tokens, int64_t num_tokens) {
    const uint64_t num_before = (uint64_t)(sequence->end - sequence->start);
    rs_status status;
    keep_free(index, sequence);
    do {
        status = rs_reserve(&index->memory, (void **)&sequence->text, &sequence->text_capacity,
                            num_before + (uint64_t)num_tokens, sizeof *sequence->text);
    } while (status != RS_OK && may_take_spare_text(sequence) && forget_most_spare_text(index));
    keep_free(index, NULL);
    if (status != RS_OK) {
        index->num_texts_left_out++;
        return status;
    }
    if (num_tokens > 0) {
        memcpy(sequence->text + num_before, tokens, (size_t)num_tokens * sizeof *tokens);
    }
    sequence->end += (int32_t)num_tokens;
    rs_sequence_note_behind(index, sequence);
    return RS_OK;
}

/* A group has been entered for a sequence that could not be had. */
static rs_status leave(rs_index *index, int32_t group, rs_status status, rs_error *error) {
    rs_group_leave(index, group);
    return rs_memory_error(&index->memory, error, status);
}

rs_status rs_sequence_open(rs_index *index, int32_t group, int32_t *sequence, rs_error *error) {
    if (rs_require_group(index, group, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    rs_sequence *opened;
    rs_group_enter(index, group);
    rs_status status = rs_sequence_new(index, RS_RUNNING, group, index->groups[group].prompt, NULL, 0, &opened);
    if (status != RS_OK) {
        return leave(index, group, status, error);
    }
    *sequence = opened->id;
    return RS_OK;
}

rs_status rs_group_add(rs_index *index, int32_t group, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    rs_status status = rs_check_tokens(token_ids, num_tokens, "token_ids", error);
    if (status == RS_OK) {
        status = rs_require_group(index, group, error);
    }
    if (status != RS_OK || num_tokens == 0) {
        return status;
    }
    rs_sequence *text;
    rs_group_enter(index, group);
    status = rs_sequence_new(index, RS_TEXT, group, index->groups[group].prompt, token_ids, num_tokens, &text);
    return leave(index, group, status, error);
}

static rs_status find(const rs_index *index, int32_t sequence, rs_sequence **found, rs_error *error) {
    *found = rs_find_sequence(index, sequence);
    return *found != NULL ? RS_OK : rs_fail(error, RS_EUNKNOWN, "sequence=%" PRId32 ": unknown", sequence);
}

int32_t rs_sequence_common(const rs_sequence *sequence, const int32_t *tokens, int32_t level) {
    int32_t common = sequence->start;
    while (common < level && common < sequence->end && tokens[common] == sequence->text[common - sequence->start]) {
        common++;
    }
    return common;
}

rs_status rs_sequence_close(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    const int32_t group = found->group;
    const bool runs = found->kind == RS_RUNNING;
    if (found->at.indexed < found->end && !found->is_left_out) {
        free_predictions(index, found);
        found->kind = RS_TEXT;
        rs_sequence_note_behind(index, found);
    } else {
        rs_sequence_free(index, found);
    }
    if (runs) {
        rs_group_leave(index, group);
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
        free_predictions(index, found);
        rs_sequence_note_behind(index, found);
        rs_group_leave(index, found->group);
    }
    return RS_OK;
}

rs_status rs_sequence_resume(rs_index *index, int32_t sequence, rs_error *error) {
    rs_sequence *found;
    if (find(index, sequence, &found, error) != RS_OK) {
        return RS_EUNKNOWN;
    }
    if (found->kind == RS_PARKED) {
        rs_group_enter(index, found->group);
        rs_status status = reserve_predictions(index, found);
        if (status != RS_OK) {
            return leave(index, found->group, status, error);
        }
        found->kind = RS_RUNNING;
        found->is_resumed = true;
        found->is_left_out = false;
        rs_sequence_note_behind(index, found);
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
            if (sequence->kind != RS_PROMPT) {
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

rs_status rs_sequence_index(rs_index *index, rs_sequence *sequence, int64_t max_tokens) {
    rs_group *group = index->groups + sequence->group;
    rs_status status;
    keep_free(index, sequence);
    do {
        const int64_t num_behind = sequence->end - sequence->at.indexed;
        status = RS_OK;
        if (!rs_waits_for_prompt(sequence)) {
            status = append(index, group, sequence, num_behind < max_tokens ? num_behind : max_tokens);
        }
    } while (status != RS_OK && may_take_spare_text(sequence) && forget_most_spare_text(index));
    keep_free(index, NULL);
    rs_sequence_note_behind(index, sequence);
    if (sequence->kind == RS_PROMPT && sequence->at.indexed == sequence->end) {
        for (rs_sequence *each = group->first; each != NULL; each = each->next) {
            if (each->prompt == sequence) {
                restart(index, each, 0);
            }
        }
    }
    return status;
}

/* ---- spare text ---- */

/* Forget all text of a group but that of its running sequences, which is to be indexed again. */
static void forget_spare_text(rs_index *index, rs_group *group) {
    rs_automaton_reset(&group->automaton);
    group->num_tokens = 0;
    group->is_thin = true;
    for (rs_sequence *each = group->first; each != NULL; each = each->next) {
        each->is_left_out |= each->kind == RS_PARKED; /* until it runs again */
        if (each->kind == RS_PROMPT) {
            restart(index, each, 0);
        }
    }
    for (rs_sequence **each = &group->first; *each != NULL;) {
        if ((*each)->kind == RS_TEXT) {
            rs_sequence_free(index, *each); /* and perhaps its prompt, further on */
        } else {
            restart(index, *each, 0);
            each = &(*each)->next;
        }
    }
}

/* Forget the spare text of the group that has most of it; false where that is little everywhere. */
static bool forget_most_spare_text(rs_index *index) {
    rs_group *found = NULL;
    uint64_t most = 0;
    for (uint32_t i = 0; i < index->num_groups; i++) {
        rs_group *group = index->groups + i;
        uint64_t num_spare = group->num_tokens;
        for (const rs_sequence *each = group->first; each != NULL; each = each->next) {
            if (may_take_spare_text(each)) {
                const int32_t end = each->at.indexed > each->followed ? each->at.indexed : each->followed;
                num_spare -= (uint64_t)(end - each->start);
            }
        }
        if (num_spare > most && num_spare >= group->num_tokens / LEAST_SPARE) {
            most = num_spare;
            found = group;
        }
    }
    if (found != NULL) {
        forget_spare_text(index, found);
    }
    return found != NULL;
}
