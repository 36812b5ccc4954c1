/* Which text is indexed next: a heap of those of which more can be indexed.
 *
 * Invariant: it has every such text once, and `queued` is its place there. */
#include "index.h"

static bool goes_first(const rs_queue_entry *one, const rs_queue_entry *other) {
    return one->key != other->key ? one->key < other->key : one->sequence->serial < other->sequence->serial;
}

static void put(rs_index *index, uint32_t at, rs_queue_entry entry) {
    index->queue[at] = entry;
    entry.sequence->queued = at + 1;
}

/* Into the place `at`, which is free, or another that becomes free for it. */
static void sift(rs_index *index, uint32_t at, rs_queue_entry entry) {
    for (uint32_t above; at > 0 && goes_first(&entry, index->queue + (above = (at - 1) / 2)); at = above) {
        put(index, at, index->queue[above]);
    }
    for (uint32_t below; (below = 2 * at + 1) < index->num_queued; at = below) {
        below += below + 1 < index->num_queued && goes_first(index->queue + below + 1, index->queue + below);
        if (!goes_first(index->queue + below, &entry)) {
            break;
        }
        put(index, at, index->queue[below]);
    }
    put(index, at, entry);
}

static bool can_be_indexed(const rs_sequence *sequence) {
    return sequence->at.indexed < sequence->end && !sequence->is_left_out && !rs_waits_for_prompt(sequence);
}

/* Of urgent texts the one with least left goes first; then others in the order in which they came. */
static rs_queue_entry entry_of(rs_sequence *sequence) {
    const uint64_t num_left = (uint64_t)(sequence->end - sequence->at.indexed);
    return (rs_queue_entry){rs_is_urgent(sequence) ? num_left : UINT64_MAX, sequence};
}

void rs_queue_leave(rs_index *index, rs_sequence *sequence) {
    const uint32_t number = sequence->queued;
    if (number > 0) {
        sequence->queued = 0;
        const rs_queue_entry last = index->queue[--index->num_queued];
        if (last.sequence != sequence) {
            sift(index, number - 1, last);
        }
    }
}

void rs_queue_move(rs_index *index, rs_sequence *sequence) {
    if (can_be_indexed(sequence)) {
        sift(index, sequence->queued > 0 ? sequence->queued - 1 : index->num_queued++, entry_of(sequence));
    } else {
        rs_queue_leave(index, sequence);
    }
}
