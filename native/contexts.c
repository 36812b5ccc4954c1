/* The table of contexts: hashed, in buckets of four, grown bucket by bucket.
 *
 *     tag:  | identity, 28 bits                    | confidence, 4 bits |
 *           its lower bits choose the bucket; a context is in its bucket or nowhere
 *
 *     buckets   0 .. half-1                half .. num_buckets-1    num_buckets .. capacity-1
 *               [    ][    ][    ][    ]   [    ][    ]             (not in use: what belongs there is still
 *                  |                          ^                      in the bucket `half` below)
 *                  +---- split_bucket --------+
 *
 * Invariants, which tests/checks.c checks: of a bucket the free slots come last; a used slot has confidence >= 1
 * and is where rs_context_bucket_of and rs_context_find look for it. */
#include "contexts.h"

#include <string.h>

enum { FIRST_NUM_BUCKETS = 1 << 8, BUDGET_SHARE = 8, SPLITS_PER_TOKEN = 8 };

rs_status rs_contexts_init(rs_contexts *contexts, const rs_memory *memory) {
    memset(contexts, 0, sizeof *contexts);
    RS_TRY(RS_RESIZE(memory, contexts->buckets, contexts->capacity, FIRST_NUM_BUCKETS));
    memset(contexts->buckets, 0, FIRST_NUM_BUCKETS * sizeof *contexts->buckets);
    contexts->num_buckets = FIRST_NUM_BUCKETS;
    return RS_OK;
}

/* One round of a multiplicative hash; the constants are those of splitmix64 (Steele et al. 2014). */
static uint64_t add_to_hash(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
    return hash ^ (hash >> 29);
}

static uint32_t tag_of(uint64_t hash, uint64_t salt) {
    hash = (hash ^ salt) * 0xBF58476D1CE4E5B9U;
    uint32_t tag = (uint32_t)(hash >> 32) & ~(uint32_t)RS_MAX_CONFIDENCE;
    return tag == 0 ? RS_MAX_CONFIDENCE + 1 : tag;
}

/* By words of 8 bytes, as rs_context_tags reads them: a read across two narrower writes would wait for both. */
void rs_recent_push(rs_recent *recent, int32_t token) {
    uint64_t pushed = (uint32_t)token;
    for (int i = 0; i < RS_LONGEST_CONTEXT / 2; i++) {
        uint64_t pair = recent->pairs[i];
        recent->pairs[i] = pair << 32 | pushed;
        pushed = pair >> 32;
    }
    recent->num += recent->num < RS_LONGEST_CONTEXT;
}

void rs_context_tags(const rs_recent *recent, uint64_t own_salt, uint32_t tags[RS_NUM_CONTEXTS]) {
    static const int lengths[RS_NUM_CONTEXTS] = {1, 2, 3, RS_LONGEST_CONTEXT, 2, 1};
    enum { NUM_SHARED = 4 };
    uint64_t hashes[RS_LONGEST_CONTEXT + 1] = {0}; /* of the last so many tokens */
    for (int length = 1; length <= RS_LONGEST_CONTEXT; length++) {
        uint64_t pair = recent->pairs[(length - 1) / 2];
        hashes[length] = add_to_hash(hashes[length - 1], length % 2 == 0 ? pair >> 32 : (uint32_t)pair);
    }
    for (int i = 0; i < RS_NUM_CONTEXTS; i++) {
        uint64_t length = (uint64_t)lengths[i];
        tags[i] = tag_of(hashes[length], i < NUM_SHARED ? length : own_salt - length);
    }
    for (int i = 0; recent->num < RS_LONGEST_CONTEXT && i < RS_NUM_CONTEXTS; i++) {
        tags[i] = (uint64_t)lengths[i] <= recent->num ? tags[i] : 0;
    }
}

/* The slot to give to a new context: a free one, or else the least confident. */
static uint32_t weakest(const rs_context_bucket *bucket) {
    uint32_t found = 0;
    for (uint32_t way = 1; way < RS_CONTEXT_WAYS; way++) {
        bool is_weaker = (bucket->tags[way] & RS_MAX_CONFIDENCE) < (bucket->tags[found] & RS_MAX_CONFIDENCE);
        found = is_weaker ? way : found;
    }
    return found;
}

/* A successor that comes again is believed more, one that does not half as much, and gives way in the end. Returns
 * whether a free slot was taken. */
static bool learn_in(rs_context_bucket *bucket, uint32_t tag, int32_t token) {
    uint32_t way = rs_context_find(bucket, tag);
    if (way == RS_CONTEXT_WAYS) {
        way = weakest(bucket);
        const bool is_free = bucket->tags[way] == 0;
        bucket->tags[way] = tag | 1;
        bucket->tokens[way] = token;
        return is_free;
    }
    const uint32_t confidence = bucket->tags[way] & RS_MAX_CONFIDENCE;
    if (bucket->tokens[way] == token) {
        bucket->tags[way] += confidence < RS_MAX_CONFIDENCE;
    } else if (confidence > 1) {
        bucket->tags[way] = tag | confidence / 2;
    } else {
        bucket->tokens[way] = token;
    }
    return false;
}

static void double_capacity(rs_contexts *contexts, const rs_memory *memory) {
    uint64_t capacity = 2 * (uint64_t)contexts->capacity;
    uint64_t max_bytes = memory->account->max_bytes;
    bool fits = max_bytes == 0 || capacity * sizeof *contexts->buckets <= max_bytes / BUDGET_SHARE;
    if (fits && capacity <= RS_MAX_CONTEXT_BUCKETS) {
        /* Where there is no memory for it, the table stays as it is. */
        RS_RESIZE(memory, contexts->buckets, contexts->capacity, capacity);
    }
}

/* Take one bucket more into use and move to it what belongs there. Without a branch, since half of all slots do; those
 * that are free come last and stay. */
static void split_bucket(rs_contexts *contexts) {
    const uint32_t half = contexts->capacity / 2;
    rs_context_bucket *parent = contexts->buckets + contexts->num_buckets - half; /* its new one is `half` after it */
    const rs_context_bucket kept = *parent;
    memset(parent, 0, sizeof *parent);
    memset(parent + half, 0, sizeof *parent);
    uint32_t num_moved = 0;
    for (uint32_t way = 0; way < RS_CONTEXT_WAYS; way++) {
        uint32_t moves = kept.tags[way] / (RS_MAX_CONFIDENCE + 1) & half; /* by 0 or `half` buckets */
        uint32_t num_before = moves == 0 ? way - num_moved : num_moved;
        parent[moves].tags[num_before] = kept.tags[way];
        parent[moves].tokens[num_before] = kept.tokens[way];
        num_moved += moves != 0;
    }
    contexts->num_buckets++;
}

static void grow(rs_contexts *contexts, const rs_memory *memory) {
    const uint32_t capacity = contexts->capacity;
    for (int i = 0; i < SPLITS_PER_TOKEN && contexts->num_buckets < capacity; i++) {
        split_bucket(contexts);
    }
    uint64_t num_slots = (uint64_t)contexts->num_buckets * RS_CONTEXT_WAYS;
    if (contexts->num_buckets == capacity && contexts->num_used >= num_slots / 8 * 7) {
        double_capacity(contexts, memory);
    }
}

void rs_contexts_learn(rs_contexts *contexts, const rs_memory *memory, const uint32_t tags[RS_NUM_CONTEXTS], int32_t token) {
    for (int i = 0; i < RS_NUM_CONTEXTS; i++) {
        contexts->num_used += tags[i] != 0 && learn_in(rs_context_bucket_of(contexts, tags[i]), tags[i], token);
    }
    grow(contexts, memory);
}
