#include "contexts.h"

#include <stdbool.h>
#include <string.h>

enum { FIRST_NUM_SLOTS = 1 << 10, BUDGET_SHARE = 8 };

rs_status rs_contexts_init(rs_contexts *contexts, rs_memory *memory) {
    memset(contexts, 0, sizeof *contexts);
    rs_status status = rs_resize(memory, (void **)&contexts->slots, &contexts->num_slots, FIRST_NUM_SLOTS,
                                 sizeof *contexts->slots);
    if (status == RS_OK) {
        memset(contexts->slots, 0, FIRST_NUM_SLOTS * sizeof *contexts->slots);
    }
    return status;
}

void rs_contexts_free(rs_contexts *contexts, rs_memory *memory) {
    rs_resize(memory, (void **)&contexts->slots, &contexts->num_slots, 0, sizeof *contexts->slots);
    contexts->num_used = 0;
}

/* One round of a multiplicative hash; the constants are those of splitmix64 (Steele et al. 2014). */
static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
    return hash ^ (hash >> 29);
}

static uint32_t tag_of(uint64_t hash, uint64_t salt) {
    hash = (hash ^ salt) * 0xBF58476D1CE4E5B9U;
    uint32_t tag = (uint32_t)(hash >> 32) & ~(uint32_t)RS_MAX_CONFIDENCE;
    return tag == 0 ? RS_MAX_CONFIDENCE + 1 : tag;
}

void rs_recent_push(rs_recent *recent, int32_t token) {
    memmove(recent->tokens + 1, recent->tokens, sizeof recent->tokens - sizeof *recent->tokens);
    recent->tokens[0] = token;
    recent->num += recent->num < RS_LONGEST_CONTEXT;
}

void rs_context_tags(const rs_recent *recent, uint64_t salt, uint64_t own_salt, uint32_t tags[RS_NUM_CONTEXTS]) {
    uint64_t hash = 0;
    memset(tags, 0, RS_NUM_CONTEXTS * sizeof *tags);
    for (int length = 1; length <= recent->num; length++) {
        hash = mix(hash, (uint64_t)(uint32_t)recent->tokens[length - 1]);
        if (length <= 3) {
            tags[length - 1] = tag_of(hash, salt + (uint64_t)length);
        }
        if (length == 2) {
            tags[4] = tag_of(hash, own_salt);
        }
        if (length == RS_LONGEST_CONTEXT) {
            tags[3] = tag_of(hash, salt + (uint64_t)length);
        }
    }
}

/* The slot to give to a new context: a free one, or else the least confident. */
static rs_context_slot *weakest(rs_context_slot *bucket) {
    rs_context_slot *found = bucket;
    for (int way = 0; way < RS_CONTEXT_WAYS; way++) {
        if ((bucket[way].tag & RS_MAX_CONFIDENCE) < (found->tag & RS_MAX_CONFIDENCE)) {
            found = bucket + way;
        }
    }
    return found;
}

static void learn_in(rs_contexts *contexts, uint32_t tag, int32_t token) {
    rs_context_slot *slot = rs_context_find(contexts, tag);
    if (slot == NULL) {
        slot = weakest(rs_context_bucket(contexts, tag));
        contexts->num_used += slot->tag == 0;
        *slot = (rs_context_slot){.tag = tag | 1, .token = token};
        return;
    }
    uint32_t confidence = slot->tag & RS_MAX_CONFIDENCE;
    if (slot->token == token) {
        slot->tag += confidence < RS_MAX_CONFIDENCE;
    } else if (confidence > 1) {
        slot->tag--;
    } else {
        slot->token = token;
    }
}

void rs_contexts_learn(rs_contexts *contexts, const rs_lesson *lesson) {
    for (int i = 0; i < RS_NUM_CONTEXTS; i++) {
        if (lesson->tags[i] != 0) {
            learn_in(contexts, lesson->tags[i], lesson->token);
        }
    }
}

void rs_contexts_grow(rs_contexts *contexts, rs_memory *memory) {
    uint64_t num_slots = 2 * (uint64_t)contexts->num_slots;
    uint64_t num_bytes = num_slots * sizeof *contexts->slots;
    bool fits = memory->max_bytes == 0 || num_bytes <= memory->max_bytes / BUDGET_SHARE;
    if (contexts->num_used < contexts->num_slots / 8 * 7 || num_slots > RS_MAX_CONTEXT_SLOTS || !fits) {
        return;
    }
    rs_contexts grown = {0};
    if (rs_resize(memory, (void **)&grown.slots, &grown.num_slots, num_slots, sizeof *grown.slots) != RS_OK) {
        return;
    }
    memset(grown.slots, 0, num_bytes);
    for (uint32_t i = 0; i < contexts->num_slots; i++) {
        const rs_context_slot *slot = contexts->slots + i;
        if (slot->tag != 0) {
            *weakest(rs_context_bucket(&grown, slot->tag)) = *slot; /* free: a bucket is split in two */
        }
    }
    grown.num_used = contexts->num_used;
    rs_contexts_free(contexts, memory);
    *contexts = grown;
}

const char *rs_contexts_check(const rs_contexts *contexts) {
    uint32_t num_used = 0;
    for (uint32_t i = 0; i < contexts->num_slots; i++) {
        const rs_context_slot *slot = contexts->slots + i;
        if (slot->tag == 0) {
            continue;
        }
        num_used++;
        if ((slot->tag & RS_MAX_CONFIDENCE) == 0 || slot->token < 0 || rs_context_find(contexts, slot->tag) != slot) {
            return "contexts: a slot that is neither free nor in its place";
        }
    }
    return num_used == contexts->num_used ? NULL : "contexts: num_used is wrong";
}
