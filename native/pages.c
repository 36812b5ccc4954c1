/* Bytes of arrays, below a huge page from malloc, from one on as a mapping of whole huge pages:
 *
 *     [ malloc: 1.4 MiB ]  --- grows beyond 2 MiB --->  [ 2 MiB page ][ 2 MiB page ][ 2 MiB page ]
 *                                copied once              from here on moved by mremap, never copied
 *
 * Invariants: a mapping begins at a multiple of a huge page; the number of bytes alone says which kind an array is. */
#define _GNU_SOURCE /* mremap */
#include "pages.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#ifdef __linux__
#include <sys/mman.h>

static bool is_mapped(uint64_t num_bytes) { return num_bytes >= RS_HUGE_PAGE_BYTES; }

/* Whole huge pages at a multiple of their size: where else it begins or ends there are small ones. */
static void *map(size_t num_bytes) {
    char *first = mmap(NULL, num_bytes + RS_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (first == MAP_FAILED) {
        return NULL;
    }
    size_t before = -(uintptr_t)first % RS_HUGE_PAGE_BYTES;
    if (before > 0) {
        munmap(first, before);
    }
    munmap(first + before + num_bytes, RS_HUGE_PAGE_BYTES - before);
    madvise(first + before, num_bytes, MADV_HUGEPAGE); /* without it all is the same, but slower */
    return first + before;
}

static void unmap(void *bytes, size_t num_bytes) { munmap(bytes, num_bytes); }

/* Without copying. Kernels before 6.7 choose addresses between huge pages, which would be split. */
static void *remap(void *bytes, size_t old_bytes, size_t new_bytes) {
    void *grown = mremap(bytes, old_bytes, new_bytes, 0);
    if (grown != MAP_FAILED) {
        return grown;
    }
    void *place = map(new_bytes);
    if (place == NULL) {
        return NULL;
    }
    /* Where this fails, the place may already be free, and another thread's: it is left alone. */
    void *moved = mremap(bytes, old_bytes, new_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    return moved == MAP_FAILED ? NULL : moved;
}
#else
static bool is_mapped(uint64_t num_bytes) { return (void)num_bytes, false; }
static void *map(size_t num_bytes) { return malloc(num_bytes); }
static void unmap(void *bytes, size_t num_bytes) { (void)num_bytes, free(bytes); }
static void *remap(void *bytes, size_t old_bytes, size_t new_bytes) { return (void)old_bytes, realloc(bytes, new_bytes); }
#endif

uint64_t rs_bytes_taken(uint64_t num_bytes) {
    uint64_t end = num_bytes + RS_HUGE_PAGE_BYTES - 1;
    return is_mapped(num_bytes) ? end - end % RS_HUGE_PAGE_BYTES : num_bytes;
}

void rs_bytes_free(void *bytes, uint64_t num_bytes) {
    if (is_mapped(num_bytes)) {
        unmap(bytes, (size_t)rs_bytes_taken(num_bytes));
    } else {
        free(bytes);
    }
}

void *rs_bytes_resize(void *bytes, uint64_t old_bytes, uint64_t new_bytes) {
    size_t old_taken = (size_t)rs_bytes_taken(old_bytes);
    size_t new_taken = (size_t)rs_bytes_taken(new_bytes);
    if (is_mapped(old_bytes) && is_mapped(new_bytes)) {
        return remap(bytes, old_taken, new_taken);
    }
    if (!is_mapped(old_bytes) && !is_mapped(new_bytes)) {
        return realloc(bytes, new_taken);
    }
    void *moved = is_mapped(new_bytes) ? map(new_taken) : malloc(new_taken);
    if (moved == NULL) {
        return NULL;
    }
    if (bytes != NULL) {
        memcpy(moved, bytes, (size_t)(old_bytes < new_bytes ? old_bytes : new_bytes));
        rs_bytes_free(bytes, old_bytes);
    }
    return moved;
}
