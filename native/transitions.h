/* The transitions of a state beyond its first: blocks of a pool, in order of insertion.
 *
 * A block has 2^k units and is aligned to its size, so one uint32_t names both: offset * 2 + 2^k, whose lowest set bit is
 * the size; 0 is no block. Up to RS_LINEAR_UNITS units a block is a list that ends with the first token < 0. A larger one is
 * a header unit (token = number of entries), the entries, and after them a hash index of 2^k slots (entry number, 0: free):
 * uint16_t in the last quarter up to RS_NARROW_UNITS units, uint32_t in the second half of a larger one. */
#ifndef RS_TRANSITIONS_H
#define RS_TRANSITIONS_H

#include "memory.h"

enum { RS_LINEAR_UNITS = 16, RS_NARROW_UNITS = 1 << 16, RS_NUM_BLOCK_SIZES = 31 };

typedef struct {
    int32_t token;
    uint32_t target;
} rs_transition;

typedef struct {
    rs_transition *units;
    uint32_t top; /* units handed out so far, free blocks included */
    uint32_t capacity;
    uint32_t free_blocks[RS_NUM_BLOCK_SIZES]; /* by log2 of the size; linked through unit.target */
} rs_pool;

static inline uint32_t rs_block_units(uint32_t block) { return block & (~block + 1U); }

static inline uint32_t rs_block_offset(uint32_t block) { return (block - rs_block_units(block)) >> 1; }

/* The entries of a block, num of them. Invalid after the pool has grown. */
static inline rs_transition *rs_block_entries(const rs_pool *pool, uint32_t block, uint32_t *num) {
    uint32_t num_units = rs_block_units(block);
    rs_transition *units = pool->units + rs_block_offset(block);
    if (num_units > RS_LINEAR_UNITS) {
        *num = (uint32_t)units->token;
        return units + 1;
    }
    uint32_t n = 0;
    while (n < num_units && units[n].token >= 0) {
        n++;
    }
    *num = n;
    return units;
}

rs_transition *rs_block_find_indexed(rs_transition *units, uint32_t num_units, int32_t token);

/* NULL where the block has no transition on the token. */
static inline rs_transition *rs_block_find(const rs_pool *pool, uint32_t block, int32_t token) {
    uint32_t num_units = rs_block_units(block);
    rs_transition *units = pool->units + rs_block_offset(block);
    if (num_units > RS_LINEAR_UNITS) {
        return rs_block_find_indexed(units, num_units, token);
    }
    for (uint32_t i = 0; i < num_units; i++) {
        if (units[i].token == token) {
            return units + i;
        }
    }
    return NULL;
}

/* Append a transition on a token that is not in *block (0: make a block). May move the block. */
rs_status rs_block_append(rs_pool *pool, const rs_memory *memory, uint32_t *block, rs_transition transition);

/* Take back the latest append; frees the block (*block = 0) when it was its only one. */
void rs_block_remove_last(rs_pool *pool, uint32_t *block);

/* A copy with the same entries, in the smallest block they fit in. */
rs_status rs_block_copy(rs_pool *pool, const rs_memory *memory, uint32_t block, uint32_t *copy);

#endif
