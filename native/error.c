/* Error messages: each begins with the name of the argument that it is about, so that a binding can pass it on. */
#include "error.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

rs_status rs_fail(rs_error *error, rs_status status, const char *format, ...) {
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->message, sizeof error->message, format, arguments);
        va_end(arguments);
    }
    return status;
}

rs_status rs_memory_error(const rs_memory *memory, rs_error *error, rs_status status) {
    if (status == RS_EBUDGET) {
        return rs_fail(error, status, "max_bytes=%" PRIu64 ": reached, %" PRIu64 " bytes are in use",
                       memory->account->max_bytes, memory->account->num_bytes);
    }
    return status == RS_OK ? status : rs_fail(error, status, "out of memory");
}

rs_status rs_check_tokens(const int32_t *tokens, int64_t num_tokens, const char *name, rs_error *error) {
    if (num_tokens < 0 || num_tokens > RS_MAX_TEXT_TOKENS) {
        return rs_fail(error, RS_EINVAL, "%s: %" PRId64 " tokens: out of range", name, num_tokens);
    }
    for (int64_t i = 0; i < num_tokens; i++) {
        if (tokens[i] < 0) {
            return rs_fail(error, RS_EINVAL, "%s[%" PRId64 "]=%" PRId32 ": must not be negative", name, i, tokens[i]);
        }
    }
    return RS_OK;
}
