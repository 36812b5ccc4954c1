/* The life of an index, its corpus, and its numbers. */
#include "index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int32_t rs_abi_version(void) { return RS_ABI_VERSION; }

rs_status rs_index_new(const rs_options *options, rs_index **index, rs_error *error) {
    if (options->num_speculative_tokens < 1 || options->num_speculative_tokens > RS_MAX_SPECULATIVE_TOKENS) {
        return rs_fail(error, RS_EINVAL, "num_speculative_tokens=%" PRId32 ": must be between 1 and %d",
                       options->num_speculative_tokens, (int)RS_MAX_SPECULATIVE_TOKENS);
    }
    rs_account account = {.max_bytes = options->max_bytes};
    const rs_memory memory = {.account = &account};
    rs_index *made = NULL;
    RS_TRY(rs_memory_error(&memory, error, RS_NEW(&memory, made)));
    memset(made, 0, sizeof *made);
    made->options = *options;
    made->account = account;
    made->account.make_room = rs_give_up_idle;
    made->account.owner = made;
    made->memory.account = &made->account;
    made->free_group = made->given_up = made->oldest_idle = made->newest_idle = made->free_slot = -1;
    rs_mixer_init(&made->mixer);
    rs_status status = rs_memory_error(&made->memory, error, rs_contexts_init(&made->contexts, &made->memory));
    if (status != RS_OK) {
        rs_index_free(made);
        return status;
    }
    *index = made;
    return RS_OK;
}

rs_status rs_corpus_add(rs_index *index, const int32_t *token_ids, int64_t num_tokens, rs_error *error) {
    RS_TRY(rs_check_tokens(token_ids, num_tokens, "token_ids", error));
    if (index->num_groups > 0) {
        return rs_fail(error, RS_EINVAL, "corpus: must be whole before the first group is opened");
    }
    rs_status status = index->corpus.states == NULL ? rs_automaton_init(&index->corpus, &index->memory) : RS_OK;
    uint32_t last = RS_ROOT;
    for (int64_t i = 0; i < num_tokens && status == RS_OK; i++) {
        status = rs_automaton_extend(&index->corpus, &index->memory, &last, token_ids[i]);
    }
    return rs_memory_error(&index->memory, error, status);
}

void rs_index_free(rs_index *index) {
    for (uint32_t i = 0; i < index->num_groups; i++) {
        rs_group_free(index, (int32_t)i);
    }
    rs_automaton_free(&index->corpus, &index->memory);
    RS_RESIZE(&index->memory, index->groups, index->groups_capacity, 0);
    RS_RESIZE(&index->memory, index->slots, index->slots_capacity, 0);
    RS_RESIZE(&index->memory, index->queue, index->queue_capacity, 0);
    RS_RESIZE(&index->memory, index->contexts.buckets, index->contexts.capacity, 0);
    free(index);
}

void rs_index_stats(const rs_index *index, rs_stats *stats) {
    *stats = (rs_stats){.num_texts_left_out = index->num_texts_left_out, .num_bytes = index->account.num_bytes};
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        if (group->is_open) {
            stats->num_groups++;
            stats->num_states += group->automaton.num_states;
            stats->num_tokens += group->num_tokens;
        }
        for (const rs_sequence *each = group->first; each != NULL; each = each->next) {
            stats->num_sequences += each->kind == RS_RUNNING;
            stats->num_tokens_unindexed += each->is_left_out ? 0 : (uint64_t)(each->end - each->at.indexed);
        }
    }
}
