/* What came after the last few tokens, in every text of the index but prompts and corpus: a table of hashed contexts.
 *
 * It knows what a group cannot: the wording that a policy uses under every prompt, and, under the own contexts, what one
 * sequence has generated before. A successor gives way when others come instead, so the table ages by itself. It is like
 * Token Recycling's (arXiv 2408.08696), but filled from text instead of logits, and has contexts of several tokens. */
#ifndef RS_CONTEXTS_H
#define RS_CONTEXTS_H

#include "memory.h"

enum {
    RS_NUM_CONTEXTS = 6,    /* the last 1, 2, 3, 6 tokens of any such text; the last 2, 1 of this sequence */
    RS_LONGEST_CONTEXT = 6, /* tokens */
    RS_MAX_CONFIDENCE = 15,
    RS_CONTEXT_WAYS = 4, /* slots of a bucket */
    RS_MAX_CONTEXT_BUCKETS = 1 << 20
};

/* The slots in which a context may be. Of a tag the upper 28 bits identify the context and are not 0, the lower 4 are
 * the confidence, >= 1. A free slot is all zeros. */
typedef struct {
    uint32_t tags[RS_CONTEXT_WAYS];
    int32_t tokens[RS_CONTEXT_WAYS];
} rs_context_bucket;

/* The end of a text. */
typedef struct {
    uint64_t pairs[RS_LONGEST_CONTEXT / 2]; /* of tokens, the latest first and in the lower half */
    uint64_t num;                           /* of its tokens, at most RS_LONGEST_CONTEXT */
} rs_recent;

/* When the capacity doubles, buckets are split off one by one, a few with every lesson (linear hashing, Litwin 1980),
 * so that no step waits for all of them. */
typedef struct {
    rs_context_bucket *buckets;
    uint32_t capacity;    /* buckets, a power of two, or 0 */
    uint32_t num_buckets; /* in use */
    uint32_t num_used;    /* slots */
} rs_contexts;

rs_status rs_contexts_init(rs_contexts *contexts, const rs_memory *memory);

void rs_recent_push(rs_recent *recent, int32_t token);

/* Its last token, -1: it has none. */
static inline int32_t rs_recent_last(const rs_recent *recent) {
    return recent->num > 0 ? (int32_t)recent->pairs[0] : -1;
}

/* The tags of the contexts that the next token has. Sequences with different own_salts share no own context. */
void rs_context_tags(const rs_recent *recent, uint64_t own_salt, uint32_t tags[RS_NUM_CONTEXTS]);

/* The token came after these contexts. Twice the buckets when most slots are used, at most an eighth of the byte budget.
 * Idle groups leave the index for that, as for any text: in time they fill every budget, so the table would never grow
 * beside them. Where none is left and there is no memory, it stays as it is. */
void rs_contexts_learn(rs_contexts *contexts, const rs_memory *memory, const uint32_t tags[RS_NUM_CONTEXTS], int32_t token);

/* The bucket for this tag. */
static inline rs_context_bucket *rs_context_bucket_of(const rs_contexts *contexts, uint32_t tag) {
    uint32_t mask = contexts->capacity - 1;
    uint32_t bucket = (tag >> 4) & mask;
    /* A bucket that is not split off yet is still part of the one in the lower half. */
    bucket &= bucket < contexts->num_buckets ? mask : mask >> 1;
    return contexts->buckets + bucket;
}

/* The context's slot in its bucket; RS_CONTEXT_WAYS: it has none. */
static inline uint32_t rs_context_find(const rs_context_bucket *bucket, uint32_t tag) {
    uint32_t way = 0;
    while (way < RS_CONTEXT_WAYS && (bucket->tags[way] ^ tag) > RS_MAX_CONFIDENCE) {
        way++;
    }
    return way;
}

/* What came after a context. */
typedef struct {
    int32_t token;       /* -1: nothing did, or the text is too short for the context */
    uint32_t confidence; /* 0: the same */
} rs_successor;

/* Of the context with this tag, 0: none. */
static inline rs_successor rs_context_successor(const rs_context_bucket *bucket, uint32_t tag) {
    uint32_t way = tag == 0 ? RS_CONTEXT_WAYS : rs_context_find(bucket, tag);
    if (way == RS_CONTEXT_WAYS) {
        return (rs_successor){-1, 0};
    }
    return (rs_successor){bucket->tokens[way], bucket->tags[way] & RS_MAX_CONFIDENCE};
}

#endif
