#include "memory.h"

#include <stdbool.h>
#include <stdlib.h>

enum { LARGE_BYTES = 1 << 18 };

#ifdef RS_TEST
static int64_t allocations_until_failure;

void rs_test_fail_allocation(int64_t nth) { allocations_until_failure = nth; }

static void *resize_block(void *pointer, size_t num_bytes) {
    if (allocations_until_failure > 0 && --allocations_until_failure == 0) {
        return NULL;
    }
    return realloc(pointer, num_bytes);
}
#else
#define resize_block realloc
#endif

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
    if (new_bytes > old_bytes && memory->max_bytes != 0 &&
        new_bytes - old_bytes > memory->max_bytes - memory->num_bytes) {
        return RS_EBUDGET;
    }
    void *moved = resize_block(*pointer, (size_t)new_bytes);
    if (moved == NULL) {
        return new_bytes > old_bytes ? RS_ENOMEM : RS_OK;
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
    /* The slack is part of the bytes per token; large arrays move by remapping, not copying. */
    bool large = (uint64_t)*capacity * element_size > LARGE_BYTES;
    uint64_t grown = *capacity + (uint64_t)*capacity / (large ? 16 : 4) + 8;
    return rs_resize(memory, pointer, capacity, grown > needed ? grown : needed, element_size);
}
