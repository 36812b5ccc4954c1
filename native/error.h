/* Statuses with a message, for whoever called the library. */
#ifndef RS_ERROR_H
#define RS_ERROR_H

#include "memory.h"

/* Write the error, if any is wanted, and return status. */
rs_status rs_fail(rs_error *error, rs_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The message for a status of rs_resize, rs_reserve or rs_automaton_extend; RS_OK passes. */
rs_status rs_memory_error(const rs_memory *memory, rs_error *error, rs_status status);

/* Whether all tokens are >= 0; if not, the error names the first that is not, an element of the array `name`. */
rs_status rs_check_tokens(const int32_t *tokens, int64_t num_tokens, const char *name, rs_error *error);

#endif
