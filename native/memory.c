/* The account of an index's bytes, growth of its arrays, and freeing in pieces.
 *
 *     discarded --> [ next | num_bytes | ......... 5 MiB ] --> [ next | num_bytes | ... ] --> NULL
 *                     rs_release cuts pieces off the end of the first, until nothing of it is left
 *
 * Invariants: num_bytes is the sum of capacity * element_size over all arrays and of what is discarded, and never
 * above max_bytes; what is discarded, and then what its owner can spare, gives way to what is needed. */
#include "memory.h"

#include <stdlib.h>

enum { LEAST_DISCARDED_BYTES = 1 << 18, PIECE_BYTES = 1 << 21 };

#ifdef RS_TEST
static int64_t allocations_until_failure;

void rs_test_fail_allocation(int64_t nth) { allocations_until_failure = nth; }

bool rs_test_has_failed(void) { return allocations_until_failure == 0; }
#endif

static void *resize_bytes(void *pointer, uint64_t num_bytes) {
#ifdef RS_TEST
    if (allocations_until_failure > 0 && --allocations_until_failure == 0) {
        return NULL;
    }
#endif
    return realloc(pointer, num_bytes);
}

/* At the beginning of the array that it is about. */
struct rs_discarded {
    rs_discarded *next;
    uint64_t num_bytes;
};

void rs_discard(rs_memory *memory, void **pointer, uint32_t *capacity, size_t element_size) {
    uint64_t num_bytes = (uint64_t)*capacity * element_size;
    if (num_bytes <= LEAST_DISCARDED_BYTES) {
        rs_resize(memory, pointer, capacity, 0, element_size);
        return;
    }
    rs_discarded *block = *pointer;
    *block = (rs_discarded){.next = memory->discarded, .num_bytes = num_bytes};
    memory->discarded = block;
    *pointer = NULL;
    *capacity = 0;
}

/* Free a piece from the end of the block that was discarded last; returns its size. */
static uint64_t release_piece(rs_memory *memory) {
    rs_discarded *block = memory->discarded;
    const rs_discarded old = *block;
    const uint64_t kept = (old.num_bytes - 1) / PIECE_BYTES * PIECE_BYTES;
    rs_discarded *shrunk = kept > 0 ? realloc(block, kept) : NULL;
    if (shrunk == NULL) { /* it is small enough, or the system refuses */
        free(block);
        memory->discarded = old.next;
        return old.num_bytes;
    }
    shrunk->num_bytes = kept;
    memory->discarded = shrunk;
    return old.num_bytes - kept;
}

void rs_release(rs_memory *memory, uint64_t num_bytes) {
    uint64_t released = 0;
    while (memory->discarded != NULL && released < num_bytes) {
        uint64_t piece = release_piece(memory);
        memory->num_bytes -= piece;
        released += piece;
    }
}

uint64_t rs_num_discarded(const rs_memory *memory) {
    uint64_t num_bytes = 0;
    for (const rs_discarded *block = memory->discarded; block != NULL; block = block->next) {
        num_bytes += block->num_bytes;
    }
    return num_bytes;
}

/* Free something that nobody needs; false where there is nothing. */
static bool make_room(rs_memory *memory) {
    if (memory->discarded == NULL && (memory->make_room == NULL || !memory->make_room(memory->owner))) {
        return false;
    }
    rs_release(memory, 1);
    return true;
}

rs_status rs_resize(rs_memory *memory, void **pointer, uint32_t *capacity, uint64_t new_size,
                    size_t element_size) {
    uint64_t old_bytes = (uint64_t)*capacity * element_size;
    if (new_size == 0) {
        free(*pointer);
        *pointer = NULL;
        *capacity = 0;
        memory->num_bytes -= old_bytes;
        return RS_OK;
    }
    if (new_size > UINT32_MAX || new_size > SIZE_MAX / element_size) {
        return RS_ENOMEM;
    }
    uint64_t new_bytes = new_size * element_size;
    const uint64_t more = new_bytes - old_bytes + memory->kept_free; /* it may be less: then this wraps twice */
    while (memory->max_bytes != 0 && memory->num_bytes + more > memory->max_bytes) {
        if (!make_room(memory)) {
            return RS_EBUDGET;
        }
    }
    void *moved;
    while ((moved = resize_bytes(*pointer, new_bytes)) == NULL) {
        if (new_bytes <= old_bytes) {
            return RS_OK;
        }
        if (!make_room(memory)) {
            return RS_ENOMEM;
        }
    }
    *pointer = moved;
    *capacity = (uint32_t)new_size;
    memory->num_bytes = memory->num_bytes - old_bytes + new_bytes;
    return RS_OK;
}

rs_status rs_reserve(rs_memory *memory, void **pointer, uint32_t *capacity, uint64_t needed,
                     size_t element_size) {
    if (needed <= *capacity) {
        return RS_OK;
    }
    /* By an eighth: the slack is part of the bytes per token. */
    uint64_t grown = (uint64_t)*capacity + *capacity / 8 + 8;
    return rs_resize(memory, pointer, capacity, grown > needed ? grown : needed, element_size);
}
