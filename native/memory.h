/* Every allocation of an index goes through one account, which keeps the byte budget. */
#ifndef RS_MEMORY_H
#define RS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rollout_spec_native.h"

typedef struct {
    uint64_t num_bytes; /* allocated */
    uint64_t max_bytes; /* 0: no limit */
    bool (*make_room)(void *owner); /* frees something; false: nothing. NULL: nobody is asked */
    void *owner;
} rs_account;

/* What somebody may allocate: all that is left of the account but `kept_free` bytes. */
typedef struct {
    rs_account *account;
    uint64_t kept_free;
} rs_memory;

/* Resize the array *pointer from *capacity to new_size elements; 0 frees it. *capacity is new_size then. On failure
 * nothing changes. Only growth fails: where the allocator refuses to shrink the array, it keeps its size. */
rs_status rs_resize(const rs_memory *memory, void **pointer, uint32_t *capacity, uint64_t new_size, size_t element_size);

/* Make room for `needed` elements; grows geometrically. */
rs_status rs_reserve(const rs_memory *memory, void **pointer, uint32_t *capacity, uint64_t needed, size_t element_size);

/* Return the status from the function that this stands in, unless it is RS_OK. */
#define RS_TRY(status)                    \
    do {                                  \
        const rs_status tried = (status); \
        if (tried != RS_OK) {             \
            return tried;                 \
        }                                 \
    } while (0)

/* rs_resize and rs_reserve of an array and its capacity by their names. */
#define RS_RESIZE(memory, array, capacity, new_size) \
    rs_resize(memory, (void **)&(array), &(capacity), new_size, sizeof *(array))
#define RS_RESERVE(memory, array, capacity, needed) \
    rs_reserve(memory, (void **)&(array), &(capacity), needed, sizeof *(array))
/* One struct, not initialized, for a pointer that is NULL; and back to that. */
#define RS_NEW(memory, pointer) rs_resize(memory, (void **)&(pointer), &(uint32_t){0}, 1, sizeof *(pointer))
#define RS_DELETE(memory, pointer) rs_resize(memory, (void **)&(pointer), &(uint32_t){1}, 0, sizeof *(pointer))

#endif
