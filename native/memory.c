/* The account of an index's bytes, and growth of its arrays.
 *
 * Invariants: num_bytes is the sum of capacity * element_size over all arrays, and never above max_bytes; what make_room
 * frees gives way to what is needed. */
#include "memory.h"

#include <stdlib.h>

/* Free something that nobody needs; false where there is nothing. */
static bool make_room(const rs_account *in) { return in->make_room != NULL && in->make_room(in->owner); }

rs_status rs_resize(const rs_memory *memory, void **pointer, uint32_t *capacity, uint64_t new_size, size_t element_size) {
    rs_account *account = memory->account;
    uint64_t old_bytes = (uint64_t)*capacity * element_size;
    if (new_size == 0) {
        free(*pointer);
        *pointer = NULL;
        *capacity = 0;
        account->num_bytes -= old_bytes;
        return RS_OK;
    }
    if (new_size > UINT32_MAX || new_size > SIZE_MAX / element_size) {
        return RS_ENOMEM;
    }
    uint64_t new_bytes = new_size * element_size;
    while (account->max_bytes != 0 &&
           account->num_bytes - old_bytes + new_bytes + memory->kept_free > account->max_bytes) {
        if (!make_room(account)) {
            return RS_EBUDGET;
        }
    }
    void *moved;
    while ((moved = realloc(*pointer, new_bytes)) == NULL) {
        if (new_bytes <= old_bytes) {
            return RS_OK;
        }
        if (!make_room(account)) {
            return RS_ENOMEM;
        }
    }
    *pointer = moved;
    *capacity = (uint32_t)new_size;
    account->num_bytes = account->num_bytes - old_bytes + new_bytes;
    return RS_OK;
}

rs_status rs_reserve(const rs_memory *memory, void **pointer, uint32_t *capacity, uint64_t needed, size_t element_size) {
    if (needed <= *capacity) {
        return RS_OK;
    }
    /* By an eighth: the slack is part of the bytes per token. */
    uint64_t grown = (uint64_t)*capacity + *capacity / 8 + 8;
    return rs_resize(memory, pointer, capacity, grown > needed ? grown : needed, element_size);
}
