#include <inttypes.h>
#include <string.h>

#include "index.h"

/* Whether the rows can be brought up to date; if not, `longest` or `begun_anew` says why. */
static rs_status check_heard(const rs_index *index, rs_heard *heard, rs_error *error) {
    for (int32_t i = 0; i < heard->num_rows; i++) {
        if (heard->sequences[i] == -1) {
            continue;
        }
        const rs_sequence *sequence = rs_find_sequence(index, heard->sequences[i]);
        if (sequence == NULL) {
            return rs_fail(error, RS_EUNKNOWN, i, "sequences[%" PRId32 "]=%" PRId32 ": unknown", i, heard->sequences[i]);
        }
        if (!sequence->keep_text) {
            return rs_fail(error, RS_EINVAL, i, "sequences[%" PRId32 "]=%" PRId32 ": keeps no text", i,
                           heard->sequences[i]);
        }
        int32_t start = sequence->start_level, end = heard->ends[i];
        bool fits = end == start || end <= heard->row_stride;
        if (!sequence->begun_anew && !(end >= start && end <= sequence->level && fits)) {
            return rs_fail(error, RS_EINVAL, i, "ends[%" PRId32 "]=%" PRId32 ": out of range", i, heard->ends[i]);
        }
        if (sequence->level > heard->longest) {
            heard->longest = sequence->level;
        }
        heard->begun_anew |= sequence->begun_anew;
    }
    return RS_OK;
}

static void hear_row(rs_heard *heard, int32_t i, const rs_sequence *sequence) {
    int32_t end = heard->ends[i];
    if (sequence->level > end) {
        memcpy(heard->token_ids + i * heard->row_stride + end, sequence->text + (end - sequence->start_level),
               (size_t)(sequence->level - end) * sizeof *sequence->text);
    }
    heard->ends[i] = sequence->level;
    heard->plain[i] = sequence->plain_level;
    heard->growing[i] = sequence->drafts;
    int64_t *spent = heard->spent + 2 * i;
    heard->num_row_steps += sequence->num_row_steps - spent[0];
    spent[0] = sequence->num_row_steps;
    spent[1] = sequence->num_drafted;
}

rs_status rs_hear(const rs_index *index, rs_heard *heard, rs_error *error) {
    if (index == NULL || heard == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "%s: must not be null", index == NULL ? "index" : "heard");
    }
    if (heard->sequences == NULL || heard->token_ids == NULL || heard->ends == NULL || heard->plain == NULL ||
        heard->growing == NULL || heard->spent == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "heard: an array is null");
    }
    heard->num_row_steps = heard->longest = heard->begun_anew = 0;
    rs_status status = check_heard(index, heard, error);
    if (status != RS_OK || heard->begun_anew != 0 || heard->longest > heard->row_stride) {
        return status;
    }
    heard->has_drafts = 0;
    for (int32_t i = 0; i < heard->num_rows; i++) {
        if (heard->sequences[i] != -1) {
            hear_row(heard, i, index->sequences + heard->sequences[i]);
        }
        heard->has_drafts |= heard->plain[i] < heard->ends[i];
    }
    return RS_OK;
}

static rs_status check_rows(const rs_replay_rows *rows, rs_error *error) {
    const rs_heard *heard = rows->heard;
    if (heard == NULL || heard->ends == NULL || heard->plain == NULL || heard->growing == NULL || heard->spent == NULL ||
        rows->levels == NULL || rows->max_draft_tokens == NULL || rows->settled == NULL ||
        rows->batch.levels != rows->levels || rows->batch.max_draft_tokens != rows->max_draft_tokens) {
        return rs_fail(error, RS_EINVAL, -1, "rows: an array is null, or not the batch's");
    }
    if (rows->batch.num_rows != heard->num_rows) {
        return rs_fail(error, RS_EINVAL, -1, "num_rows=%" PRId32 ": %" PRId32 " are heard", rows->batch.num_rows,
                       heard->num_rows);
    }
    if (rows->max_steps < 1 || rows->max_plain_tokens < 1) {
        return rs_fail(error, RS_EINVAL, -1, "max_steps=%" PRId32 ", max_plain_tokens=%" PRId32 ": must be at least 1",
                       rows->max_steps, rows->max_plain_tokens);
    }
    for (int32_t i = 0; i < heard->num_rows; i++) {
        int32_t end = heard->ends[i];
        if (rows->levels[i] < 0 || end < rows->levels[i] || end > rows->batch.num_columns || end < heard->plain[i]) {
            return rs_fail(error, RS_EINVAL, i, "ends[%" PRId32 "]=%" PRId32 ": out of range", i, end);
        }
    }
    return RS_OK;
}

/* The next tokens of row i are decoded: their part of what is not settled yet is settled. */
static void advance(rs_replay_rows *rows, int32_t i, int32_t num_tokens, bool came_with_drafts) {
    double part = num_tokens / (double)(rows->heard->ends[i] - rows->levels[i]);
    double settled[2];
    for (int k = 0; k < 2; k++) {
        settled[k] = part * ((double)rows->heard->spent[2 * i + k] - rows->settled[2 * i + k]);
        rows->settled[2 * i + k] += settled[k];
    }
    if (came_with_drafts) {
        rows->heard_row_steps += settled[0];
        rows->heard_draft_tokens += settled[1];
    }
    rows->levels[i] += num_tokens;
    rows->num_tokens += (uint64_t)num_tokens;
}

static bool is_plain(const rs_replay_rows *rows, int32_t i) { return rows->levels[i] < rows->heard->plain[i]; }

static rs_status index_plain(rs_index *index, rs_replay_rows *rows, int32_t num_plain, rs_error *error) {
    int32_t most = rows->max_plain_tokens / num_plain;
    most = most > 0 ? most : 1;
    for (int32_t i = 0; i < rows->batch.num_rows; i++) {
        rows->max_draft_tokens[i] = 0;
        if (is_plain(rows, i)) {
            int32_t num_left = rows->heard->plain[i] - rows->levels[i];
            advance(rows, i, num_left < most ? num_left : most, false);
        }
    }
    return rs_step(index, &rows->batch, error);
}

/* Whether row i may take a step: at its end it need not, and a growing text must be known as far as a draft reaches. */
typedef enum { AT_END, READY, NOT_KNOWN } row_state;

static row_state state_of(const rs_index *index, const rs_replay_rows *rows, int32_t i) {
    int32_t num_left = rows->heard->ends[i] - rows->levels[i];
    if (rows->heard->growing[i] != 0 && num_left <= index->options.num_speculative_tokens) {
        return NOT_KNOWN;
    }
    return num_left > 0 ? READY : AT_END;
}

/* For how many rows the next step drafts; 0: there is none. */
static uint64_t plan_step(const rs_index *index, const rs_replay_rows *rows) {
    uint64_t num_ready = 0;
    for (int32_t i = 0; i < rows->batch.num_rows; i++) {
        row_state state = state_of(index, rows, i);
        if (state == NOT_KNOWN) {
            return 0;
        }
        rows->max_draft_tokens[i] = state == READY ? index->options.num_speculative_tokens : 0;
        num_ready += state == READY;
    }
    return num_ready;
}

static void verify_row(const rs_index *index, rs_replay_rows *rows, int32_t i) {
    const rs_batch *batch = &rows->batch;
    const int32_t *draft = batch->draft_tokens + (int64_t)i * index->options.num_speculative_tokens;
    int32_t num_left = rows->heard->ends[i] - rows->levels[i];
    rows->num_draft_tokens += (uint64_t)batch->num_draft_tokens[i];
    if (num_left > 0) {
        const int32_t *said = rs_row_tokens(batch, i) + rows->levels[i];
        advance(rows, i, 1 + rs_num_accepted(draft, batch->num_draft_tokens[i], said, num_left), true);
    }
}

rs_status rs_replay(rs_index *index, rs_replay_rows *rows, rs_error *error) {
    if (index == NULL || rows == NULL) {
        return rs_fail(error, RS_EINVAL, -1, "%s: must not be null", index == NULL ? "index" : "rows");
    }
    rs_status status = check_rows(rows, error);
    if (status != RS_OK) {
        return status;
    }
    rows->num_row_steps = rows->num_draft_tokens = rows->num_tokens = 0;
    rows->heard_row_steps = rows->heard_draft_tokens = 0.0;
    int32_t num_plain = 0;
    for (int32_t i = 0; i < rows->batch.num_rows; i++) {
        num_plain += is_plain(rows, i);
    }
    if (num_plain > 0) {
        return index_plain(index, rows, num_plain, error);
    }
    for (int32_t step = 0; step < rows->max_steps; step++) {
        uint64_t num_ready = plan_step(index, rows);
        if (num_ready == 0) {
            break;
        }
        status = rs_step(index, &rows->batch, error);
        if (status != RS_OK) {
            return status;
        }
        rows->num_row_steps += num_ready;
        for (int32_t i = 0; i < rows->batch.num_rows; i++) {
            verify_row(index, rows, i);
        }
    }
    return RS_OK;
}
