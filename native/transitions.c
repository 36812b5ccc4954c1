/* Blocks of transitions, from a pool with buddies' sizes: lists of free blocks by size, larger ones split in halves.
 *
 *     list, 4 units:      [ t0 ][ t1 ][ t2 ][ -1 ]                        ends with the first token < 0
 *     indexed, 32 units:  [ num ][ t0 ][ t1 ] ... [ t22 ][ 32 uint16_t ]  slots of a hash index over the entries
 *
 * Invariants: entries stay in the order of insertion; a block is aligned to its size; every unit below `top` is in a
 * block of one state or in one free list; free blocks are not joined again. */
#include "transitions.h"

#include <string.h>

static uint32_t log2_of(uint32_t power_of_two) { return (uint32_t)__builtin_ctz(power_of_two); }

static void push_free(rs_pool *pool, uint32_t offset, uint32_t k) {
    pool->units[offset].token = -1;
    pool->units[offset].target = pool->free_blocks[k];
    pool->free_blocks[k] = offset * 2 + (1U << k);
}

static void free_block(rs_pool *pool, uint32_t block) {
    push_free(pool, rs_block_offset(block), log2_of(rs_block_units(block)));
}

static uint32_t pop_free(rs_pool *pool, uint32_t k) {
    uint32_t block = pool->free_blocks[k];
    uint32_t offset = rs_block_offset(block);
    pool->free_blocks[k] = pool->units[offset].target;
    return offset;
}

/* The offset of 2^k free units, split off a larger free block or from the top of the pool. */
static rs_status take_units(rs_pool *pool, const rs_memory *memory, uint32_t k, uint32_t *offset) {
    for (uint32_t j = k; j < RS_NUM_BLOCK_SIZES; j++) {
        if (pool->free_blocks[j] != 0) {
            *offset = pop_free(pool, j);
            while (j > k) {
                j--;
                push_free(pool, *offset + (1U << j), j);
            }
            return RS_OK;
        }
    }
    uint64_t size = (uint64_t)1 << k;
    uint64_t aligned = ((uint64_t)pool->top + size - 1) & ~(size - 1);
    if (aligned + size > (uint64_t)1 << 31) {
        return RS_ENOMEM;
    }
    RS_TRY(RS_RESERVE(memory, pool->units, pool->capacity, aligned + size));
    while (pool->top < aligned) {
        uint32_t gap = pool->top & (~pool->top + 1U);
        push_free(pool, pool->top, log2_of(gap));
        pool->top += gap;
    }
    *offset = pool->top;
    pool->top += (uint32_t)size;
    return RS_OK;
}

/* Where the hash index of a block begins; what is before it are the header and the entries. */
static uint32_t first_index_unit(uint32_t num_units) {
    return num_units > RS_NARROW_UNITS ? num_units / 2 : num_units / 4 * 3;
}

static uint32_t get_slot(const rs_transition *units, uint32_t num_units, uint32_t slot) {
    const void *slots = units + first_index_unit(num_units);
    return num_units > RS_NARROW_UNITS ? ((const uint32_t *)slots)[slot] : ((const uint16_t *)slots)[slot];
}

static void set_slot(rs_transition *units, uint32_t num_units, uint32_t slot, uint32_t entry) {
    void *slots = units + first_index_unit(num_units);
    if (num_units > RS_NARROW_UNITS) {
        ((uint32_t *)slots)[slot] = entry;
    } else {
        ((uint16_t *)slots)[slot] = (uint16_t)entry;
    }
}

/* num_units is also the number of slots of the index. */
static uint32_t first_slot(int32_t token, uint32_t num_units) {
    uint32_t hash = (uint32_t)token * 2654435769U;
    return (hash ^ (hash >> 15)) & (num_units - 1);
}

/* Where the entry is, or, for entry 0, the first free slot. */
static uint32_t find_slot(const rs_transition *units, uint32_t num_units, int32_t token, uint32_t entry) {
    uint32_t slot = first_slot(token, num_units);
    while (get_slot(units, num_units, slot) != entry) {
        slot = (slot + 1) & (num_units - 1);
    }
    return slot;
}

static void insert_indexed(rs_transition *units, uint32_t num_units, rs_transition transition) {
    uint32_t entry = (uint32_t)++units->token;
    set_slot(units, num_units, find_slot(units, num_units, transition.token, 0), entry);
    units[entry] = transition;
}

rs_transition *rs_block_find_indexed(rs_transition *units, uint32_t num_units, int32_t token) {
    uint32_t slot = first_slot(token, num_units);
    uint32_t entry;
    while ((entry = get_slot(units, num_units, slot)) != 0) {
        if (units[entry].token == token) {
            return units + entry;
        }
        slot = (slot + 1) & (num_units - 1);
    }
    return NULL;
}

/* The most entries of a block. */
static uint32_t room_of(uint32_t num_units) {
    return num_units > RS_LINEAR_UNITS ? first_index_unit(num_units) - 1 : num_units;
}

static uint32_t units_for(uint32_t num_entries) {
    uint32_t num_units = 1;
    while (room_of(num_units) < num_entries) {
        num_units *= 2;
    }
    return num_units;
}

/* A block with room for `room` entries, the entries of `block` (0: none) copied into it. */
static rs_status rehouse(rs_pool *pool, const rs_memory *memory, uint32_t block, uint32_t room, uint32_t *result) {
    uint32_t num_units = units_for(room);
    uint32_t offset;
    RS_TRY(take_units(pool, memory, log2_of(num_units), &offset));
    rs_transition *units = pool->units + offset;
    uint32_t num = 0;
    const rs_transition *entries = block == 0 ? NULL : rs_block_entries(pool, block, &num);
    if (num_units > RS_LINEAR_UNITS) {
        memset(units, 0, num_units * sizeof *units);
        for (uint32_t i = 0; i < num; i++) {
            insert_indexed(units, num_units, entries[i]);
        }
    } else {
        if (num > 0) {
            memcpy(units, entries, num * sizeof *units);
        }
        for (uint32_t i = num; i < num_units; i++) {
            units[i].token = -1;
        }
    }
    *result = offset * 2 + num_units;
    return RS_OK;
}

rs_status rs_block_append(rs_pool *pool, const rs_memory *memory, uint32_t *block, rs_transition transition) {
    uint32_t num = 0;
    uint32_t room = 0;
    if (*block != 0) {
        rs_block_entries(pool, *block, &num);
        room = room_of(rs_block_units(*block));
    }
    if (num == room) {
        uint32_t larger;
        RS_TRY(rehouse(pool, memory, *block, num + 1, &larger));
        if (*block != 0) {
            free_block(pool, *block);
        }
        *block = larger;
    }
    uint32_t num_units = rs_block_units(*block);
    rs_transition *units = pool->units + rs_block_offset(*block);
    if (num_units > RS_LINEAR_UNITS) {
        insert_indexed(units, num_units, transition);
    } else {
        units[num] = transition;
    }
    return RS_OK;
}

void rs_block_remove_last(rs_pool *pool, uint32_t *block) {
    uint32_t num;
    rs_transition *entries = rs_block_entries(pool, *block, &num);
    uint32_t num_units = rs_block_units(*block);
    if (num == 1) {
        free_block(pool, *block);
        *block = 0;
    } else if (num_units > RS_LINEAR_UNITS) {
        /* The latest entry is at the end of every probe sequence it is in: its slot just empties. */
        rs_transition *units = entries - 1;
        set_slot(units, num_units, find_slot(units, num_units, units[num].token, num), 0);
        entries[-1].token--;
    } else {
        entries[num - 1].token = -1;
    }
}

rs_status rs_block_copy(rs_pool *pool, const rs_memory *memory, uint32_t block, uint32_t *copy) {
    uint32_t num;
    rs_block_entries(pool, block, &num);
    return rehouse(pool, memory, block, num, copy);
}
