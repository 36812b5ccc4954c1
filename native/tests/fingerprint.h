/* A whole index as one number: all but capacities, step stamps and what a step needs while it runs. */
#ifndef RS_TESTS_FINGERPRINT_H
#define RS_TESTS_FINGERPRINT_H

#include <string.h>

#include "index.h"

static uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211ULL; }

static uint64_t mix_words(uint64_t hash, const void *words, size_t num_bytes) {
    for (size_t at = 0; at < num_bytes; at += sizeof(uint32_t)) {
        uint32_t word;
        memcpy(&word, (const char *)words + at, sizeof word);
        hash = mix(hash, word);
    }
    return hash;
}

static uint64_t automaton_fingerprint(const rs_automaton *a) {
    uint64_t hash = mix(a->num_states, a->num_transitions);
    for (uint32_t i = 0; i < a->num_states; i++) {
        const rs_state *state = a->states + i;
        hash = mix(mix(mix(hash, state->len), state->link), state->count);
        hash = state->token < 0 ? mix(hash, 7) : mix(mix(hash, (uint64_t)state->token), state->target);
        uint32_t num = 0;
        const rs_transition *others = state->block == 0 ? NULL : rs_block_entries(&a->pool, state->block, &num);
        hash = mix_words(mix(hash, num), others, num * sizeof *others);
    }
    return hash;
}

static uint64_t group_fingerprint(const rs_group *group) {
    uint64_t hash = mix(mix(group->open, (uint64_t)group->next_free), (uint64_t)group->prompt_len);
    hash = mix(hash, (uint64_t)group->prompt_level);
    hash = mix(mix(mix(hash, (uint64_t)group->num_sequences), group->prompt_last), group->num_tokens);
    hash = mix_words(hash, &group->prompt_recent, sizeof group->prompt_recent);
    hash = mix_words(hash, &group->prompt_cursor, sizeof group->prompt_cursor);
    return mix(hash, automaton_fingerprint(&group->automaton));
}

static uint64_t sequence_fingerprint(const rs_index *index, uint32_t id) {
    const rs_sequence *sequence = index->sequences + id;
    uint64_t hash = mix(mix(sequence->open, (uint64_t)sequence->next_free), (uint64_t)sequence->group);
    hash = mix(mix(mix(hash, sequence->after_prompt), (uint64_t)sequence->level), sequence->last);
    hash = mix(hash, sequence->serial);
    hash = mix_words(hash, &sequence->recent, sizeof sequence->recent);
    hash = mix_words(hash, &sequence->cursor, sizeof sequence->cursor);
    hash = mix(hash, (uint64_t)sequence->num_predictions);
    for (int32_t i = 0; i < sequence->num_predictions; i++) {
        const rs_prediction *prediction = rs_predictions(index, (int32_t)id) + i;
        hash = mix_words(hash, prediction->tokens, sizeof prediction->tokens);
        for (int e = 0; e < RS_NUM_EXPERTS; e++) {
            hash = mix(hash, prediction->cells[e]);
        }
        hash = mix(mix(hash, (uint64_t)prediction->previous), (uint64_t)prediction->token);
    }
    size_t text_len = sequence->open ? (size_t)(sequence->level - rs_start_level(index, sequence)) : 0;
    return mix_words(hash, sequence->text, text_len * sizeof *sequence->text);
}

static uint64_t fingerprint(const rs_index *index) {
    uint64_t hash = mix(mix(index->num_groups, index->num_sequences), index->num_opened);
    hash = mix(mix(hash, (uint64_t)index->free_group), (uint64_t)index->free_sequence);
    for (uint32_t i = 0; i < index->num_groups; i++) {
        hash = mix(hash, group_fingerprint(index->groups + i));
    }
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        hash = mix(hash, sequence_fingerprint(index, i));
    }
    const rs_contexts *contexts = &index->contexts;
    hash = mix(mix(mix(hash, contexts->capacity), contexts->num_buckets), contexts->num_used);
    hash = mix_words(hash, contexts->buckets, contexts->num_buckets * sizeof *contexts->buckets);
    return mix_words(hash, &index->calibration, sizeof index->calibration);
}

#endif
