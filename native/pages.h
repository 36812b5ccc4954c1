/* The bytes of an array: the allocator's, or from a huge page on a mapping of its own in huge pages. What looks up
 * states and contexts jumps about in arrays of many MiB, and with small pages nearly every jump waits for the page
 * table as well. */
#ifndef RS_PAGES_H
#define RS_PAGES_H

#include <stdint.h>

enum { RS_HUGE_PAGE_BYTES = 1 << 21 };

/* As realloc; old_bytes is what it was made with. NULL, and nothing changes, where there is no memory. */
void *rs_bytes_resize(void *bytes, uint64_t old_bytes, uint64_t new_bytes);

void rs_bytes_free(void *bytes, uint64_t num_bytes);

/* What so many bytes take: whole huge pages, where these are used. */
uint64_t rs_bytes_taken(uint64_t num_bytes);

#endif
