#include "contexts.h"

#include <stdbool.h>
#include <string.h>

enum { FIRST_NUM_SLOTS = 1 << 10, BUDGET_SHARE = 8, SPLITS_PER_LESSON = 8 };

rs_status rs_contexts_init(rs_contexts *contexts, rs_memory *memory) {
    memset(contexts, 0, sizeof *contexts);
    rs_status status = rs_resize(memory, (void **)&contexts->slots, &contexts->num_slots, FIRST_NUM_SLOTS,
                                 sizeof *contexts->slots);
    if (status == RS_OK) {
        memset(contexts->slots, 0, FIRST_NUM_SLOTS * sizeof *contexts->slots);
        contexts->num_buckets = FIRST_NUM_SLOTS / RS_CONTEXT_WAYS;
    }
    return status;
}

void rs_contexts_free(rs_contexts *contexts, rs_memory *memory) {
    rs_resize(memory, (void **)&contexts->slots, &contexts->num_slots, 0, sizeof *contexts->slots);
    contexts->num_buckets = contexts->num_used = 0;
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
        if (length <= 2) {
            tags[6 - length] = tag_of(hash, own_salt - (uint64_t)length);
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

/* Without a branch: those of learning could not be foreseen. */
static uint32_t choose(bool condition, uint32_t one, uint32_t other) {
    return other ^ ((one ^ other) & (0U - (uint32_t)condition));
}

/* Half a bucket, in one of the vectors that gcc and clang have for every machine: tag, token, tag, token. */
typedef int32_t lanes __attribute__((vector_size(2 * sizeof(rs_context_slot)), aligned(sizeof(int32_t)), may_alias));

/* In the tags' lanes: the number of the way, plus RS_CONTEXT_WAYS times the confidence + 1 if it is not the tag's. */
static lanes ranks(lanes slots, uint32_t tag, int32_t first_way) {
    const lanes ways = {first_way, 0, first_way + 1, 0};
    lanes others = (slots & ~RS_MAX_CONFIDENCE) != (int32_t)tag;
    return (((slots & RS_MAX_CONFIDENCE) + 1) & others) * RS_CONTEXT_WAYS + ways;
}

/* The context's slot in its bucket, or the weakest; *confidence is 0 then. */
static rs_context_slot *find_or_take(rs_context_slot *bucket, uint32_t tag, uint32_t *confidence) {
    const lanes *halves = (const lanes *)bucket;
    lanes low = ranks(halves[0], tag, 0);
    lanes high = ranks(halves[1], tag, 2);
    lanes lower = low < high;
    lanes both = (low & lower) | (high & ~lower);
    uint32_t least = (uint32_t)(both[0] < both[2] ? both[0] : both[2]);
    rs_context_slot *slot = bucket + least % RS_CONTEXT_WAYS;
    *confidence = choose(least < RS_CONTEXT_WAYS, slot->tag & RS_MAX_CONFIDENCE, 0);
    return slot;
}

/* A successor that comes again is believed more, one that does not half as much, and gives way in the end. */
static void learn_in(rs_contexts *contexts, uint32_t tag, int32_t token) {
    uint32_t confidence;
    rs_context_slot *slot = find_or_take(rs_context_bucket(contexts, tag), tag, &confidence);
    contexts->num_used += slot->tag == 0;
    uint32_t grown = confidence + (confidence < RS_MAX_CONFIDENCE);
    uint32_t shrunk = choose(confidence > 1, confidence / 2, 1);
    slot->tag = tag | choose(slot->token == token, grown, shrunk);
    slot->token = (int32_t)choose(confidence > 1, (uint32_t)slot->token, (uint32_t)token);
}

static void double_slots(rs_contexts *contexts, rs_memory *memory) {
    uint64_t num_slots = 2 * (uint64_t)contexts->num_slots;
    bool fits = memory->max_bytes == 0 ||
                num_slots * sizeof *contexts->slots <= memory->max_bytes / BUDGET_SHARE;
    if (fits && num_slots <= RS_MAX_CONTEXT_SLOTS) {
        /* Where there is no memory for it, the table stays as it is. */
        rs_resize(memory, (void **)&contexts->slots, &contexts->num_slots, num_slots, sizeof *contexts->slots);
    }
}

/* Take one bucket more into use and move to it what belongs there. */
static void split_bucket(rs_contexts *contexts) {
    uint32_t half = contexts->num_slots / 2;
    rs_context_slot *added = contexts->slots + contexts->num_buckets * RS_CONTEXT_WAYS;
    rs_context_slot kept[RS_CONTEXT_WAYS];
    memcpy(kept, added - half, sizeof kept);
    memset(added - half, 0, sizeof kept);
    memset(added, 0, sizeof kept);
    contexts->num_buckets++;
    for (int way = 0; way < RS_CONTEXT_WAYS && kept[way].tag != 0; way++) {
        *weakest(rs_context_bucket(contexts, kept[way].tag)) = kept[way]; /* free: there is room for all in each */
    }
}

static void grow(rs_contexts *contexts, rs_memory *memory) {
    uint32_t num_buckets = contexts->num_slots / RS_CONTEXT_WAYS;
    for (int i = 0; i < SPLITS_PER_LESSON && contexts->num_buckets < num_buckets; i++) {
        split_bucket(contexts);
    }
    if (contexts->num_buckets == num_buckets && contexts->num_used >= contexts->num_slots / 8 * 7) {
        double_slots(contexts, memory);
    }
}

void rs_contexts_learn(rs_contexts *contexts, rs_memory *memory, const rs_lesson *lesson) {
    for (int i = 0; i < RS_NUM_CONTEXTS; i++) {
        if (lesson->tags[i] != 0) {
            learn_in(contexts, lesson->tags[i], lesson->token);
        }
    }
    grow(contexts, memory);
}

const char *rs_contexts_check(const rs_contexts *contexts) {
    uint32_t num_used = 0;
    for (uint32_t i = 0; i < contexts->num_buckets * RS_CONTEXT_WAYS; i++) {
        const rs_context_slot *slot = contexts->slots + i;
        if (slot->tag == 0) {
            continue;
        }
        num_used++;
        if ((slot->tag & RS_MAX_CONFIDENCE) == 0 || slot->token < 0 || rs_context_find(rs_context_bucket(contexts, slot->tag), slot->tag) != slot) {
            return "contexts: a slot that is neither free nor in its place";
        }
    }
    return num_used == contexts->num_used ? NULL : "contexts: num_used is wrong";
}
