/* Tests of what Python cannot reach: an allocator that fails, null pointers, the exact undo. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "index.h"

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, #condition); \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

enum { NUM_COLUMNS = 4096, MAX_ROWS = 8, DRAFT_LEN = 4 };

static uint32_t random_state = 1;

static uint32_t random_below(uint32_t n) {
    random_state = random_state * 1664525U + 1013904223U;
    return (random_state >> 8) % n;
}

/* ---- a whole index as one number: every field but capacities and step stamps ---- */

static uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211ULL; }

static uint64_t automaton_fingerprint(const rs_automaton *a) {
    uint64_t hash = mix(a->num_states, a->num_transitions);
    for (uint32_t i = 0; i < a->num_states; i++) {
        const rs_state *state = a->states + i;
        hash = mix(mix(mix(hash, state->len), state->link), state->count);
        hash = state->token < 0 ? mix(hash, 7) : mix(mix(hash, (uint64_t)state->token), state->target);
        uint32_t num = 0;
        const rs_transition *others = state->block == 0 ? NULL : rs_block_entries(&a->pool, state->block, &num);
        for (uint32_t j = 0; j < num; j++) {
            hash = mix(mix(hash, (uint64_t)others[j].token), others[j].target);
        }
    }
    return hash;
}

static uint64_t fingerprint(const rs_index *index) {
    uint64_t hash = mix(index->num_groups, index->num_sequences);
    hash = mix(mix(hash, (uint64_t)index->free_groups.first), (uint64_t)index->free_sequences.first);
    for (uint32_t i = 0; i < index->num_groups; i++) {
        const rs_group *group = index->groups + i;
        hash = mix(mix(hash, group->open), (uint64_t)group->num_sequences);
        hash = mix(mix(hash, group->num_tokens), (uint64_t)group->next_free);
        hash = mix(mix(hash, group->prompt_last), automaton_fingerprint(&group->automaton));
        hash = mix(mix(hash, group->prompt_cursor.state), group->prompt_cursor.len);
    }
    for (uint32_t i = 0; i < index->num_sequences; i++) {
        const rs_sequence *sequence = index->sequences + i;
        hash = mix(mix(hash, sequence->open), (uint64_t)sequence->next_free);
        hash = mix(mix(hash, (uint64_t)sequence->level), sequence->last);
        hash = mix(mix(hash, (uint64_t)sequence->num_draft_tokens), (uint64_t)sequence->group);
        hash = mix(mix(hash, sequence->cursor.state), sequence->cursor.len);
    }
    hash = mix(hash, index->totals.num_drafts);
    return mix(hash, index->totals.num_accepted_tokens);
}

/* ---- helpers ---- */

static rs_options default_options(void) {
    return (rs_options){.num_speculative_tokens = DRAFT_LEN,
                        .mode = RS_MODE_FREQUENT,
                        .min_match_len = 1,
                        .max_spec_factor = 4.0,
                        .min_token_prob = 0.0};
}

/* A corpus of one random text, to be freed. */
static void *new_corpus(int64_t num_tokens, uint32_t alphabet, uint64_t *num_bytes) {
    rs_corpus_builder *builder = NULL;
    int32_t *text = calloc((size_t)num_tokens, sizeof *text);
    CHECK(text != NULL && rs_corpus_new(&builder, NULL) == RS_OK);
    for (int64_t i = 0; i < num_tokens; i++) {
        text[i] = (int32_t)random_below(alphabet);
    }
    CHECK(rs_corpus_add(builder, text, num_tokens, NULL) == RS_OK);
    *num_bytes = rs_corpus_num_bytes(builder);
    void *content = malloc((size_t)*num_bytes);
    CHECK(content != NULL && rs_corpus_write(builder, content, *num_bytes, NULL) == RS_OK);
    rs_corpus_free(builder);
    free(text);
    return content;
}

static rs_index *new_index(rs_options options) {
    rs_index *index = NULL;
    CHECK(rs_index_new(&options, &index, NULL) == RS_OK);
    return index;
}

static void check_valid(const rs_index *index) {
    rs_error error = {.message = ""};
    if (rs_index_validate(index, &error) != RS_OK) {
        fprintf(stderr, "invalid: %s\n", error.message);
        exit(1);
    }
}

typedef struct {
    int32_t token_ids[MAX_ROWS][NUM_COLUMNS];
    int32_t sequences[MAX_ROWS], rows[MAX_ROWS], levels[MAX_ROWS], max_draft_tokens[MAX_ROWS];
    int32_t draft_tokens[MAX_ROWS][DRAFT_LEN], num_draft_tokens[MAX_ROWS], match_lens[MAX_ROWS];
    float survivals[MAX_ROWS][DRAFT_LEN];
    rs_batch batch;
} fixture;

static fixture *new_fixture(int32_t num_rows) {
    fixture *f = calloc(1, sizeof *f);
    CHECK(f != NULL);
    f->batch = (rs_batch){.num_rows = num_rows,
                          .sequences = f->sequences,
                          .token_ids = f->token_ids[0],
                          .row_stride = NUM_COLUMNS,
                          .num_columns = NUM_COLUMNS,
                          .num_matrix_rows = MAX_ROWS,
                          .rows = f->rows,
                          .levels = f->levels,
                          .max_draft_tokens = f->max_draft_tokens,
                          .draft_tokens = f->draft_tokens[0],
                          .survivals = f->survivals[0],
                          .num_draft_tokens = f->num_draft_tokens,
                          .match_lens = f->match_lens};
    for (int32_t i = 0; i < num_rows; i++) {
        f->sequences[i] = f->rows[i] = i;
        f->max_draft_tokens[i] = DRAFT_LEN;
    }
    return f;
}

/* One call of some kind, so that the same call can be tried again after it failed. */
typedef struct {
    rs_index *index;
    fixture *f;
    int32_t group, sequence;
    int64_t num_prompt_tokens;
    int kind;
} operation;

static rs_status perform(operation *op, rs_error *error) {
    int32_t id;
    switch (op->kind) {
    case 0:
        return rs_group_open(op->index, op->f->token_ids[0], op->num_prompt_tokens, &id, error);
    case 1:
        return rs_sequence_open(op->index, op->group, 1, &id, error);
    case 2:
        return rs_step(op->index, &op->f->batch, error);
    default:
        return rs_index_clear(op->index, error);
    }
}

/* Fail at the first, second, ... allocation of the operation until it passes. */
static int64_t perform_with_failures(operation *op) {
    uint64_t before = fingerprint(op->index);
    for (int64_t nth = 1;; nth++) {
        rs_error error = {.message = ""};
        rs_test_fail_allocation(nth);
        rs_status status = perform(op, &error);
        rs_test_fail_allocation(0);
        check_valid(op->index);
        if (status == RS_OK) {
            return nth - 1;
        }
        CHECK(status == RS_ENOMEM);
        CHECK(strcmp(error.message, "out of memory") == 0);
        CHECK(fingerprint(op->index) == before);
    }
}

/* ---- tests ---- */

static void test_allocation_failures(rs_mode mode, uint32_t alphabet) {
    enum { NUM_SEQUENCES = 4 };
    rs_options options = default_options();
    options.mode = (int32_t)mode;
    void *content = new_corpus(2000, alphabet, &options.corpus_bytes);
    options.corpus = content;
    rs_index *index = NULL;
    CHECK(rs_index_new(&options, &index, NULL) == RS_EINVAL && index == NULL); /* corpus_margin 0 */
    options.corpus_margin = 1;
    rs_test_fail_allocation(1);
    CHECK(rs_index_new(&options, &index, NULL) == RS_ENOMEM && index == NULL);
    rs_test_fail_allocation(0);
    index = new_index(options);
    fixture *f = new_fixture(NUM_SEQUENCES);
    for (int32_t row = 0; row < NUM_SEQUENCES; row++) {
        for (int32_t i = 0; i < NUM_COLUMNS; i++) {
            f->token_ids[row][i] = (int32_t)random_below(alphabet);
        }
        memcpy(f->token_ids[row], f->token_ids[0], 50 * sizeof(int32_t));
    }
    int64_t num_failures = 0;
    operation op = {.index = index, .f = f, .num_prompt_tokens = 50};
    num_failures += perform_with_failures(&op);
    op.kind = 1;
    for (int i = 0; i < NUM_SEQUENCES; i++) {
        num_failures += perform_with_failures(&op);
        f->levels[i] = 50;
    }
    op.kind = 2;
    for (int step = 0; step < 60; step++) {
        for (int i = 0; i < NUM_SEQUENCES; i++) {
            f->levels[i] += (int32_t)random_below(30);
            if (random_below(40) == 0) {
                f->levels[i] = 50 + (int32_t)random_below(20);
            }
        }
        num_failures += perform_with_failures(&op);
    }
    CHECK(num_failures > 20);
    op.kind = 3;
    CHECK(perform_with_failures(&op) == 0);
    rs_stats stats;
    rs_index_stats(index, &stats);
    CHECK(stats.num_groups == 0);
    CHECK(stats.num_bytes == sizeof *index || mode == RS_MODE_SAM); /* which keeps what it has learned */
    rs_index_free(index);
    free(content);
    free(f);
}

static void test_budget(void) {
    rs_options options = default_options();
    options.max_bytes = 40000;
    rs_index *index = new_index(options);
    fixture *f = new_fixture(2);
    int32_t id;
    CHECK(rs_group_open(index, NULL, 0, &id, NULL) == RS_OK);
    for (int32_t row = 0; row < 2; row++) {
        CHECK(rs_sequence_open(index, id, 0, &f->sequences[row], NULL) == RS_OK);
        for (int32_t i = 0; i < NUM_COLUMNS; i++) {
            f->token_ids[row][i] = (int32_t)random_below(5);
        }
    }
    rs_status status = RS_OK;
    rs_error error = {.message = ""};
    while (status == RS_OK) {
        uint64_t before = fingerprint(index);
        f->levels[0] += 7;
        f->levels[1] += 7;
        CHECK(f->levels[0] < NUM_COLUMNS);
        status = rs_step(index, &f->batch, &error);
        CHECK((status == RS_OK) == (fingerprint(index) != before));
        check_valid(index);
    }
    CHECK(status == RS_EBUDGET && strncmp(error.message, "max_bytes=40000", 15) == 0);
    options.max_bytes = 10;
    rs_index *none = NULL;
    CHECK(rs_index_new(&options, &none, NULL) == RS_EBUDGET && none == NULL);
    rs_index_free(index);
    free(f);
}

/* A state with more transitions than a list holds: found, in order, taken back, split. */
static void test_many_branches(void) {
    enum { NUM = 500 };
    rs_memory memory = {.num_bytes = 0};
    rs_automaton a;
    CHECK(rs_automaton_init(&a, &memory, true) == RS_OK);
    rs_extension extensions[2 * NUM];
    uint64_t fingerprints[2 * NUM];
    uint32_t last = RS_ROOT;
    for (int32_t i = 0; i < 2 * NUM; i++) {
        fingerprints[i] = automaton_fingerprint(&a);
        int32_t token = i % 2 == 0 ? 0 : 1 + i * 64;
        CHECK(rs_extend(&a, last, token, extensions + i) == RS_OK);
        last = extensions[i].after;
        CHECK(rs_automaton_check(&a) == NULL);
    }
    uint32_t after_zero = *rs_find(&a, RS_ROOT, 0);
    uint32_t num;
    const rs_transition *others = rs_block_entries(&a.pool, a.states[after_zero].block, &num);
    CHECK(num == NUM - 1);
    for (uint32_t i = 0; i < num; i++) {
        CHECK(others[i].token == (int32_t)(1 + (2 * i + 3) * 64));
    }
    CHECK(rs_find(&a, after_zero, 2) == NULL);
    for (int32_t i = 2 * NUM - 1; i >= 0; i--) {
        rs_retract(&a, i % 2 == 0 ? 0 : 1 + i * 64, extensions + i);
        CHECK(automaton_fingerprint(&a) == fingerprints[i]);
        CHECK(rs_automaton_check(&a) == NULL);
    }
    CHECK(a.num_states == 1 && a.num_transitions == 0);
    rs_automaton_free(&a);
    CHECK(memory.num_bytes == 0);
}

/* More transitions than the narrow hash index of a block can number. */
static void test_wide_blocks(void) {
    enum { NUM = RS_NARROW_UNITS + 1000 };
    rs_memory memory = {.num_bytes = 0};
    rs_automaton a;
    CHECK(rs_automaton_init(&a, &memory, true) == RS_OK);
    rs_extension *extensions = malloc(NUM * sizeof *extensions);
    CHECK(extensions != NULL);
    uint32_t last = RS_ROOT;
    for (int32_t i = 0; i < NUM; i++) {
        CHECK(rs_extend(&a, last, 3 * i, extensions + i) == RS_OK);
        last = extensions[i].after;
    }
    CHECK(rs_block_units(a.states[RS_ROOT].block) > RS_NARROW_UNITS);
    CHECK(rs_automaton_check(&a) == NULL);
    for (int32_t i = 0; i < NUM; i++) {
        CHECK(*rs_find(&a, RS_ROOT, 3 * i) == extensions[i].after);
        CHECK(rs_find(&a, RS_ROOT, 3 * i + 1) == NULL);
    }
    for (int32_t i = NUM - 1; i >= 0; i--) {
        rs_retract(&a, 3 * i, extensions + i);
    }
    CHECK(rs_automaton_check(&a) == NULL);
    CHECK(a.num_states == 1 && a.num_transitions == 0);
    free(extensions);
    rs_automaton_free(&a);
    CHECK(memory.num_bytes == 0);
}

/* The most frequent follower counts only among the first RS_MAX_BRANCHES. */
static void test_max_branches(void) {
    rs_index *index = new_index(default_options());
    fixture *f = new_fixture(1);
    int32_t id;
    CHECK(rs_group_open(index, NULL, 0, &id, NULL) == RS_OK);
    CHECK(rs_sequence_open(index, id, 0, &id, NULL) == RS_OK);
    int32_t n = 0;
    for (int32_t round = 0; round < 3; round++) {
        for (int32_t i = 0; i < RS_MAX_BRANCHES + 1; i++) {
            if (round == 0 || i >= RS_MAX_BRANCHES - 1) {
                f->token_ids[0][n++] = 1000;
                f->token_ids[0][n++] = 1 + i;
            }
        }
    }
    f->token_ids[0][n++] = 2000;
    f->token_ids[0][n++] = 1000;
    f->levels[0] = n;
    CHECK(rs_step(index, &f->batch, NULL) == RS_OK);
    CHECK(f->match_lens[0] == 1);
    CHECK(f->num_draft_tokens[0] >= 1 && f->draft_tokens[0][0] == RS_MAX_BRANCHES);
    rs_index_free(index);
    free(f);
}

static void test_null_pointers(void) {
    rs_options options = default_options();
    rs_index *index = new_index(options);
    fixture *f = new_fixture(1);
    int32_t id;
    rs_error error = {.message = ""};
    CHECK(rs_index_new(NULL, &index, &error) == RS_EINVAL && strncmp(error.message, "options", 7) == 0);
    CHECK(rs_index_new(&options, NULL, NULL) == RS_EINVAL);
    CHECK(rs_group_open(NULL, NULL, 0, &id, NULL) == RS_EINVAL);
    CHECK(rs_group_open(index, NULL, 0, NULL, NULL) == RS_EINVAL);
    CHECK(rs_group_open(index, NULL, 1, &id, &error) == RS_EINVAL);
    CHECK(strncmp(error.message, "prompt_token_ids", 16) == 0);
    CHECK(rs_group_open(index, NULL, -1, &id, NULL) == RS_EINVAL);
    CHECK(rs_group_close(NULL, 0, NULL) == RS_EINVAL);
    CHECK(rs_sequence_open(NULL, 0, 0, &id, NULL) == RS_EINVAL);
    CHECK(rs_sequence_open(index, 0, 2, &id, NULL) == RS_EINVAL);
    CHECK(rs_sequence_close(NULL, 0, NULL) == RS_EINVAL);
    CHECK(rs_step(NULL, &f->batch, NULL) == RS_EINVAL);
    CHECK(rs_step(index, NULL, NULL) == RS_EINVAL);
    CHECK(rs_index_clear(NULL, NULL) == RS_EINVAL);
    CHECK(rs_index_validate(NULL, NULL) == RS_EINVAL);
    const int32_t **inputs[] = {&f->batch.sequences, &f->batch.token_ids, &f->batch.rows, &f->batch.levels,
                                &f->batch.max_draft_tokens};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) {
        const int32_t *kept = *inputs[i];
        *inputs[i] = NULL;
        CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strstr(error.message, "must not be null") != NULL);
        *inputs[i] = kept;
    }
    int32_t **outputs[] = {&f->batch.draft_tokens, &f->batch.num_draft_tokens, &f->batch.match_lens};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) {
        int32_t *kept = *outputs[i];
        *outputs[i] = NULL;
        CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strstr(error.message, "must not be null") != NULL);
        *outputs[i] = kept;
    }
    f->batch.survivals = NULL;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "survivals", 9) == 0);
    f->batch.survivals = f->survivals[0];
    f->batch.min_token_prob = 1.5;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "min_token_prob=1.5", 18) == 0);
    f->batch.min_token_prob = 0.0;
    f->batch.num_rows = 0;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "num_rows=0", 10) == 0);
    f->batch.num_rows = 1;
    f->batch.row_stride = NUM_COLUMNS - 1;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "token_ids", 9) == 0);
    rs_index_free(index);
    rs_index_free(NULL);
    free(f);
}

/* The validator finds what is broken. */
static void test_validator(void) {
    rs_index *index = new_index(default_options());
    const int32_t prompt[] = {1, 2, 1, 3, 1, 2, 4, 1, 5};
    int32_t group;
    CHECK(rs_group_open(index, prompt, sizeof prompt / sizeof prompt[0], &group, NULL) == RS_OK);
    check_valid(index);
    rs_automaton *a = &index->groups[group].automaton;
    const rs_automaton whole = *a;
    for (uint32_t i = 0; i < a->num_states; i++) {
        rs_state *state = a->states + i;
        const rs_state kept = *state;
        const rs_state broken[] = {
            {.len = kept.len + 1, .link = kept.link, .token = kept.token, .target = kept.target,
             .count = kept.count, .block = kept.block},
            {.len = kept.len, .link = i, .token = kept.token, .target = kept.target, .count = kept.count,
             .block = kept.block},
            {.len = kept.len, .link = kept.link, .token = kept.token, .target = i, .count = kept.count,
             .block = kept.block},
            {.len = kept.len, .link = kept.link, .token = 99, .target = 1, .count = kept.count,
             .block = kept.block},
        };
        for (size_t j = 0; j < sizeof broken / sizeof broken[0]; j++) {
            if (j == 2 && kept.token < 0) {
                continue;
            }
            *state = broken[j];
            CHECK(rs_index_validate(index, NULL) == RS_ECORRUPT);
            *state = kept;
        }
    }
    a->num_transitions++;
    CHECK(rs_index_validate(index, NULL) == RS_ECORRUPT);
    *a = whole;
    index->memory.num_bytes++;
    CHECK(rs_index_validate(index, NULL) == RS_ECORRUPT);
    index->memory.num_bytes--;
    check_valid(index);
    rs_index_free(index);
}

static void test_corpus_builder(void) {
    rs_corpus_builder *builder = NULL;
    const int32_t text[] = {1, 2, 1, 3, 1, 2, 4, 1, 5};
    const int64_t num = sizeof text / sizeof text[0];
    for (int64_t nth = 1; nth <= 2; nth++) {
        rs_test_fail_allocation(nth);
        CHECK(rs_corpus_new(&builder, NULL) == RS_ENOMEM && builder == NULL);
    }
    rs_test_fail_allocation(0);
    CHECK(rs_corpus_new(NULL, NULL) == RS_EINVAL);
    CHECK(rs_corpus_new(&builder, NULL) == RS_OK);
    rs_test_fail_allocation(1);
    CHECK(rs_corpus_add(builder, text, num, NULL) == RS_ENOMEM);
    rs_test_fail_allocation(0);
    rs_corpus_free(builder);
    rs_corpus_free(NULL);
    CHECK(rs_corpus_new(&builder, NULL) == RS_OK);
    CHECK(rs_corpus_add(NULL, text, num, NULL) == RS_EINVAL);
    CHECK(rs_corpus_add(builder, NULL, 1, NULL) == RS_EINVAL);
    CHECK(rs_corpus_add(builder, text, -1, NULL) == RS_EINVAL);
    CHECK(rs_corpus_add(builder, NULL, 0, NULL) == RS_OK);
    CHECK(rs_corpus_add(builder, text, num, NULL) == RS_OK);
    uint64_t content[256];
    uint64_t num_bytes = rs_corpus_num_bytes(builder);
    CHECK(num_bytes < sizeof content);
    CHECK(rs_corpus_write(NULL, content, num_bytes, NULL) == RS_EINVAL);
    CHECK(rs_corpus_write(builder, NULL, num_bytes, NULL) == RS_EINVAL);
    CHECK(rs_corpus_write(builder, content, num_bytes + 8, NULL) == RS_EINVAL);
    CHECK(rs_corpus_write(builder, (char *)content + 4, num_bytes, NULL) == RS_EINVAL);
    CHECK(rs_corpus_write(builder, content, num_bytes, NULL) == RS_OK);
    rs_corpus_free(builder);
    rs_corpus corpus;
    CHECK(!rs_corpus_open(&corpus, (char *)content + 4, num_bytes));
    CHECK(!rs_corpus_open(&corpus, content, num_bytes - 8));
    CHECK(rs_corpus_open(&corpus, content, num_bytes) && rs_corpus_check(&corpus) == NULL);
    /* Whatever field of a state or transition is wrong, the check finds it, and reads nothing beyond. */
    uint32_t *words = (uint32_t *)content;
    for (uint64_t i = sizeof(rs_corpus_head) / 4; i < num_bytes / 4; i++) {
        uint64_t of_state = (i - sizeof(rs_corpus_head) / 4) / 4;
        bool is_count = (i - sizeof(rs_corpus_head) / 4) % 4 == 2;
        if (of_state == corpus.num_states || (of_state < corpus.num_states && is_count)) {
            continue; /* the end of the states; a count may be too high by what ended there */
        }
        const uint32_t kept = words[i];
        words[i] = UINT32_MAX - 1;
        CHECK(rs_corpus_check(&corpus) != NULL);
        words[i] = kept;
    }
    CHECK(rs_corpus_check(&corpus) == NULL);
}

int main(void) {
    for (uint32_t alphabet = 1; alphabet <= 64; alphabet *= 4) {
        test_allocation_failures(RS_MODE_FREQUENT, alphabet);
        test_allocation_failures(RS_MODE_EARLIEST, alphabet);
        test_allocation_failures(RS_MODE_SAM, alphabet);
    }
    test_budget();
    test_many_branches();
    test_wide_blocks();
    test_max_branches();
    test_null_pointers();
    test_validator();
    test_corpus_builder();
    puts("native tests passed");
    return 0;
}
