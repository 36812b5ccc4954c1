/* Tests of what Python cannot reach: an allocator that fails, arguments that its binding refuses, damaged memory. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"
#include "draft.h"

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

/* ---- an allocator that fails: the Makefile links the core's realloc to __wrap_realloc ---- */

static int64_t allocations_until_failure;

/* Let the n-th allocation from now on fail (1: the next); 0: none. */
static void fail_allocation(int64_t nth) { allocations_until_failure = nth; }

void *__real_realloc(void *pointer, size_t num_bytes);
void *__wrap_realloc(void *pointer, size_t num_bytes);

void *__wrap_realloc(void *pointer, size_t num_bytes) {
    if (allocations_until_failure > 0 && --allocations_until_failure == 0) {
        return NULL;
    }
    return __real_realloc(pointer, num_bytes);
}

/* ---- helpers ---- */

static rs_options default_options(void) {
    return (rs_options){.num_speculative_tokens = DRAFT_LEN};
}

static rs_index *new_index(rs_options options) {
    rs_index *index = NULL;
    CHECK(rs_index_new(&options, &index, NULL) == RS_OK);
    return index;
}

static void check_valid(const rs_index *index) {
    const char *broken = rs_index_check(index);
    if (broken != NULL) {
        fprintf(stderr, "invalid: %s\n", broken);
        exit(1);
    }
}

static void check_freed(rs_automaton *a, const rs_memory *memory) {
    rs_automaton_free(a, memory);
    CHECK(memory->account->num_bytes == 0);
}

typedef struct {
    int32_t token_ids[MAX_ROWS][NUM_COLUMNS];
    int32_t sequences[MAX_ROWS], rows[MAX_ROWS], levels[MAX_ROWS], max_draft_tokens[MAX_ROWS];
    int32_t draft_tokens[MAX_ROWS][DRAFT_LEN], num_draft_tokens[MAX_ROWS];
    float survivals[MAX_ROWS][DRAFT_LEN];
    int32_t model_tokens[MAX_ROWS * DRAFT_LEN], model_confidences[MAX_ROWS * DRAFT_LEN];
    rs_batch batch;
} fixture;

static fixture *new_fixture(int32_t num_sequences) {
    fixture *f = calloc(1, sizeof *f);
    CHECK(f != NULL);
    f->batch = (rs_batch){.num_sequences = num_sequences,
                          .sequences = f->sequences,
                          .token_ids = f->token_ids[0],
                          .row_stride = NUM_COLUMNS,
                          .num_columns = NUM_COLUMNS,
                          .num_matrix_rows = MAX_ROWS,
                          .rows = f->rows,
                          .levels = f->levels,
                          .max_draft_tokens = f->max_draft_tokens,
                          .model_tokens = f->model_tokens,
                          .model_confidences = f->model_confidences,
                          .max_tokens_to_index = INT64_MAX,
                          .draft_tokens = f->draft_tokens[0],
                          .survivals = f->survivals[0],
                          .num_draft_tokens = f->num_draft_tokens};
    for (int32_t i = 0; i < num_sequences; i++) {
        f->sequences[i] = f->rows[i] = i;
        f->max_draft_tokens[i] = DRAFT_LEN;
    }
    return f;
}

/* A sequence in a group of its own. */
static int32_t open_alone(rs_index *index) {
    int32_t id;
    CHECK(rs_group_open(index, NULL, 0, &id, NULL) == RS_OK);
    CHECK(rs_sequence_open(index, id, &id, NULL) == RS_OK);
    return id;
}

/* An automaton as one number: all but capacities. */
static uint64_t fingerprint(const rs_automaton *a) {
    uint64_t hash = a->num_states;
    for (uint32_t i = 0; i < a->num_states; i++) {
        const rs_state *state = a->states + i;
        uint32_t num = 0;
        const rs_transition *others = state->block == 0 ? NULL : rs_block_entries(&a->pool, state->block, &num);
        const uint32_t words[] = {state->len, state->link, state->count, (uint32_t)state->token,
                                  state->token < 0 ? 0 : state->target, num};
        for (size_t j = 0; j < sizeof words / sizeof words[0]; j++) {
            hash = (hash ^ words[j]) * 1099511628211ULL;
        }
        for (uint32_t j = 0; j < num; j++) {
            hash = (hash ^ (uint32_t)others[j].token) * 1099511628211ULL ^ others[j].target;
        }
    }
    return hash;
}

/* ---- tests ---- */

/* What rs_automaton_extend does, after it has failed at its first, second, ... allocation and changed nothing. */
static int64_t extend_with_failures(rs_automaton *a, const rs_memory *memory, uint32_t *last, int32_t token) {
    const uint64_t before = fingerprint(a);
    const uint32_t last_before = *last;
    for (int64_t nth = 1;; nth++) {
        fail_allocation(nth);
        rs_status status = rs_automaton_extend(a, memory, last, token);
        fail_allocation(0);
        CHECK(rs_automaton_check(a) == NULL);
        if (status == RS_OK) {
            return nth - 1;
        }
        CHECK(status == RS_ENOMEM && fingerprint(a) == before && *last == last_before);
    }
}

static void test_extensions_that_fail(uint32_t alphabet) {
    rs_memory memory = {.account = &(rs_account){.num_bytes = 0}};
    rs_automaton a;
    uint32_t last[2] = {RS_ROOT, RS_ROOT};
    int64_t num_failures = 0;
    CHECK(rs_automaton_init(&a, &memory) == RS_OK);
    for (int i = 0; i < 600; i++) {
        num_failures += extend_with_failures(&a, &memory, last + random_below(2), (int32_t)random_below(alphabet));
    }
    CHECK(num_failures > 5);
    check_freed(&a, &memory);
}

enum { NUM_SEQUENCES = 4, PROMPT_LEN = 50 };

/* A life in which some allocation fails. */
typedef struct {
    rs_index *index;
    fixture *f;
    int64_t num_failures;
} life;

/* A call that has failed is made once more; then it must pass, since one allocation fails only. */
#define TWICE(l, call)                                       \
    do {                                                     \
        rs_stats before, after;                              \
        rs_index_stats((l)->index, &before);                 \
        if ((call) != RS_OK) {                               \
            (l)->num_failures++;                             \
            check_valid((l)->index);                         \
            rs_index_stats((l)->index, &after);              \
            before.num_bytes = after.num_bytes;              \
            before.num_texts_left_out = after.num_texts_left_out; \
            CHECK(memcmp(&before, &after, sizeof after) == 0); \
            CHECK((call) == RS_OK);                          \
        }                                                    \
        check_valid((l)->index);                             \
    } while (0)

/* In its group, or in a new one where that has no room for its prompt. */
static void open_row(life *l, int32_t *group, int32_t row) {
    if (rs_group_given_up(l->index) == *group) {
        TWICE(l, rs_group_open(l->index, l->f->token_ids[0], PROMPT_LEN, group, NULL));
    }
    TWICE(l, rs_sequence_open(l->index, *group, l->f->sequences + row, NULL));
}

/* What a model drafts in this step, if there is one: small tokens, and now and then none. */
static void ask_model(fixture *f) {
    f->batch.num_model_tokens = (int32_t)random_below(DRAFT_LEN + 1);
    for (int32_t i = 0; i < f->batch.num_sequences * f->batch.num_model_tokens; i++) {
        f->model_tokens[i] = (int32_t)random_below(8) - 1;
        f->model_confidences[i] = f->model_tokens[i] < 0 ? -7 : (int32_t)random_below(RS_MODEL_CONFIDENCES);
    }
}

static void check_text(const rs_index *index, const fixture *f, int32_t row) {
    static int32_t text[NUM_COLUMNS];
    int64_t num = 0;
    CHECK(rs_sequence_text(index, f->sequences[row], text, NUM_COLUMNS, &num, NULL) == RS_OK);
    CHECK(num == f->levels[row] - PROMPT_LEN);
    CHECK(memcmp(text, f->token_ids[row] + PROMPT_LEN, (size_t)num * sizeof *text) == 0);
}

/* Every row goes on, and now and then begins again, or is parked in between. One that is dropped is opened again. */
static void step_rows(life *l, int32_t *group, int num_steps) {
    fixture *f = l->f;
    for (int step = 0; step < num_steps; step++) {
        for (int i = 0; i < NUM_SEQUENCES; i++) {
            bool again = random_below(40) == 0;
            f->levels[i] = again ? PROMPT_LEN + (int32_t)random_below(20) : f->levels[i] + (int32_t)random_below(30);
            if (random_below(10) == 0) {
                CHECK(rs_sequence_park(l->index, f->sequences[i], NULL) == RS_OK);
                CHECK(rs_step(l->index, &f->batch, NULL) == RS_EINVAL);
                f->token_ids[i][PROMPT_LEN + random_below(200)] ^= 1;
                TWICE(l, rs_sequence_resume(l->index, f->sequences[i], NULL));
            }
        }
        f->batch.max_tokens_to_index = random_below(2) == 0 ? INT64_MAX : (int64_t)random_below(40);
        ask_model(f);
        CHECK(rs_step(l->index, &f->batch, NULL) == RS_OK);
        check_valid(l->index);
        int32_t num_dropped = 0;
        for (int32_t i = 0; i < NUM_SEQUENCES; i++) {
            if (f->num_draft_tokens[i] < 0) {
                num_dropped++;
                CHECK(rs_sequence_close(l->index, f->sequences[i], NULL) == RS_EUNKNOWN);
            } else {
                check_text(l->index, f, i);
            }
        }
        CHECK(num_dropped == f->batch.num_dropped);
        for (int32_t i = 0; i < NUM_SEQUENCES; i++) {
            if (f->num_draft_tokens[i] < 0) {
                open_row(l, group, i);
            }
        }
        l->num_failures += num_dropped;
    }
}

/* A group from its beginning to its end, one of its sequences closed and opened in between. */
static void live(life *l) {
    fixture *f = l->f;
    int32_t group;
    TWICE(l, rs_group_open(l->index, f->token_ids[0], PROMPT_LEN, &group, NULL));
    TWICE(l, rs_group_add(l->index, group, f->token_ids[1] + 100, 60, NULL));
    for (int32_t row = 0; row < NUM_SEQUENCES; row++) {
        f->levels[row] = PROMPT_LEN;
        open_row(l, &group, row);
    }
    step_rows(l, &group, 15);
    CHECK(rs_group_close(l->index, group, NULL) == RS_EINVAL);
    CHECK(rs_sequence_close(l->index, f->sequences[1], NULL) == RS_OK);
    f->levels[1] = PROMPT_LEN;
    TWICE(l, rs_group_set_prompt(l->index, group, f->token_ids[0], PROMPT_LEN, NULL));
    open_row(l, &group, 1);
    step_rows(l, &group, 5);
    for (int32_t row = 0; row < NUM_SEQUENCES; row++) {
        CHECK(rs_sequence_close(l->index, f->sequences[row], NULL) == RS_OK);
    }
    if (rs_group_given_up(l->index) != group) { /* it has all its texts */
        CHECK(rs_group_close(l->index, group, NULL) == RS_OK);
    }
    CHECK(rs_group_close(l->index, group, NULL) == RS_EUNKNOWN);
    check_valid(l->index);
}

static rs_index *new_index_with_failures(const rs_options *options) {
    rs_index *index = NULL;
    for (int64_t nth = 1; index == NULL; nth++) {
        fail_allocation(nth);
        rs_status status = rs_index_new(options, &index, NULL);
        fail_allocation(0);
        CHECK(status == (index == NULL ? RS_ENOMEM : RS_OK));
        CHECK(index == NULL || nth == 3);
    }
    return index;
}

/* Two groups, one after the other; the n-th allocation of it all fails, for every n. */
static void test_allocation_failures(uint32_t alphabet) {
    rs_options options = default_options();
    fixture *f = new_fixture(NUM_SEQUENCES);
    for (int32_t row = 0; row < NUM_SEQUENCES; row++) {
        for (int32_t i = 0; i < NUM_COLUMNS; i++) {
            f->token_ids[row][i] = (int32_t)random_below(alphabet);
        }
        memcpy(f->token_ids[row], f->token_ids[0], PROMPT_LEN * sizeof(int32_t));
    }
    int64_t nth = 0;
    for (bool has_failed = true; has_failed;) {
        random_state = 1;
        life l = {.index = new_index_with_failures(&options), .f = f};
        CHECK(rs_corpus_add(l.index, f->token_ids[1], NUM_COLUMNS, NULL) == RS_OK);
        fail_allocation(++nth);
        live(&l);
        has_failed = allocations_until_failure == 0;
        fail_allocation(0);
        live(&l);
        /* Only the tables and what was learned stay. */
        const rs_index *i = l.index;
        CHECK(i->account.num_bytes == sizeof *i + i->groups_capacity * sizeof *i->groups +
                                         i->slots_capacity * sizeof *i->slots +
                                         i->queue_capacity * sizeof *i->queue +
                                         i->contexts.capacity * sizeof *i->contexts.buckets +
                                         i->corpus.capacity * sizeof *i->corpus.states +
                                         i->corpus.pool.capacity * sizeof *i->corpus.pool.units);
        rs_index_free(l.index);
    }
    CHECK(nth > 40);
    free(f);
}

/* Whatever is asked of an index that is full, it stays whole: groups leave it with what is parked in them. */
static void test_full_index(uint32_t seed) {
    enum { MOST_GROUPS = 40, MOST_SEQUENCES = 60 };
    rs_options options = default_options();
    options.max_bytes = sizeof(rs_index) + 40000;
    rs_index *index = new_index(options);
    fixture *f = new_fixture(1);
    random_state = seed;
    for (int32_t i = 0; i < NUM_COLUMNS; i++) {
        f->token_ids[0][i] = (int32_t)random_below(6);
    }
    int64_t num_given_up = 0;
    for (int i = 0; i < 4000; i++) {
        const int32_t *text = f->token_ids[0] + random_below(NUM_COLUMNS / 2);
        const int32_t group = (int32_t)random_below(MOST_GROUPS), sequence = (int32_t)random_below(MOST_SEQUENCES);
        const int64_t num = random_below(random_below(20) == 0 ? 1500 : 60);
        int32_t id;
        switch (random_below(11)) {
        case 0: rs_group_open(index, text, num, &id, NULL); break;
        case 1: rs_group_set_prompt(index, group, text, num, NULL); break;
        case 2: rs_group_add(index, group, text, num, NULL); break;
        case 3: rs_sequence_open(index, group, &id, NULL); break;
        case 4: rs_sequence_close(index, sequence, NULL); break;
        case 5: rs_sequence_park(index, sequence, NULL); break;
        case 6: rs_sequence_resume(index, sequence, NULL); break;
        case 7: rs_group_close(index, group, NULL); break;
        case 8: rs_catch_up(index, num); break;
        default:
            f->sequences[0] = sequence;
            f->levels[0] = (int32_t)num + PROMPT_LEN;
            f->batch.max_tokens_to_index = (int64_t)random_below(300);
            rs_step(index, &f->batch, NULL);
        }
        while (random_below(3) > 0 && rs_group_given_up(index) >= 0) {
            num_given_up++;
        }
        check_valid(index);
    }
    CHECK(num_given_up > 20);
    rs_index_free(index);
    free(f);
}

/* A full index drops what does not fit, and only that; idle groups go first. */
static void test_budget(void) {
    rs_options options = default_options();
    options.max_bytes = sizeof(rs_index) + 60000;
    rs_index *index = new_index(options);
    fixture *f = new_fixture(2);
    int32_t idle;
    for (int32_t row = 0; row < 2; row++) {
        for (int32_t i = 0; i < NUM_COLUMNS; i++) {
            f->token_ids[row][i] = (int32_t)random_below(5);
        }
    }
    CHECK(rs_group_open(index, f->token_ids[0], 200, &idle, NULL) == RS_OK);
    for (int32_t row = 0; row < 2; row++) {
        f->sequences[row] = open_alone(index);
    }
    do {
        f->levels[0] += 7;
        f->levels[1] += 7;
        CHECK(f->levels[0] < NUM_COLUMNS);
        CHECK(rs_step(index, &f->batch, NULL) == RS_OK);
        check_valid(index);
    } while (f->batch.num_dropped == 0);
    CHECK(f->batch.num_dropped == 1);
    CHECK(rs_group_given_up(index) == idle);
    const int32_t left = f->num_draft_tokens[0] < 0 ? 0 : 1;
    f->batch.num_sequences = 1;
    f->sequences[0] = f->sequences[1 - left];
    f->rows[0] = 1 - left;
    for (int step = 0; step < 30; step++) { /* in the room of the group that is idle now */
        f->levels[0] += 7;
        CHECK(rs_step(index, &f->batch, NULL) == RS_OK && f->batch.num_dropped == 0);
    }
    CHECK(rs_group_given_up(index) >= 0 && rs_group_given_up(index) == -1);
    options.max_bytes = 10;
    rs_index *none = NULL;
    CHECK(rs_index_new(&options, &none, NULL) == RS_EBUDGET && none == NULL);
    rs_index_free(index);
    free(f);
}

/* While an old prompt is indexed, the only text after it is forgotten to make room: the prompt stays for so long (asan). */
static void test_old_prompt_in_full_index(void) {
    rs_options options = default_options();
    options.max_bytes = sizeof(rs_index) + 60000;
    rs_index *index = new_index(options);
    fixture *f = new_fixture(0);
    int32_t *text = f->token_ids[0], group;
    for (int32_t i = 0; i < 2000; i++) {
        text[i] = (int32_t)random_below(1000);
    }
    CHECK(rs_group_open(index, NULL, 0, &group, NULL) == RS_OK);
    CHECK(rs_group_add(index, group, text + 1000, 300, NULL) == RS_OK && !rs_catch_up(index, INT64_MAX));
    CHECK(rs_group_set_prompt(index, group, text, 1000, NULL) == RS_OK);
    CHECK(rs_group_add(index, group, text, 5, NULL) == RS_OK);
    CHECK(rs_group_set_prompt(index, group, text, 1, NULL) == RS_OK && index->num_sequences == 3);
    CHECK(!rs_catch_up(index, INT64_MAX) && index->num_sequences == 0 && rs_group_given_up(index) == group);
    check_valid(index);
    rs_index_free(index);
    free(f);
}

/* A state with more transitions than a list holds: found, in order, with allocations that fail in between. */
static void test_many_branches(void) {
    enum { NUM = 500 };
    rs_memory memory = {.account = &(rs_account){.num_bytes = 0}};
    rs_automaton a;
    CHECK(rs_automaton_init(&a, &memory) == RS_OK);
    uint32_t last = RS_ROOT;
    for (int32_t i = 0; i < 2 * NUM; i++) {
        extend_with_failures(&a, &memory, &last, i % 2 == 0 ? 0 : 1 + i * 64);
    }
    uint32_t after_zero = *rs_automaton_find(&a, RS_ROOT, 0);
    uint32_t num;
    const rs_transition *others = rs_block_entries(&a.pool, a.states[after_zero].block, &num);
    CHECK(num == NUM - 1);
    for (uint32_t i = 0; i < num; i++) {
        CHECK(others[i].token == (int32_t)(1 + (2 * i + 3) * 64));
    }
    CHECK(rs_automaton_find(&a, after_zero, 2) == NULL);
    check_freed(&a, &memory);
}

/* More transitions than the narrow hash index of a block can number. */
static void test_wide_blocks(void) {
    enum { NUM = RS_NARROW_UNITS + 1000 };
    rs_memory memory = {.account = &(rs_account){.num_bytes = 0}};
    rs_automaton a;
    CHECK(rs_automaton_init(&a, &memory) == RS_OK);
    uint32_t last = RS_ROOT;
    for (int32_t i = 0; i < NUM; i++) {
        CHECK(rs_automaton_extend(&a, &memory, &last, 3 * i) == RS_OK);
    }
    CHECK(rs_block_units(a.states[RS_ROOT].block) > RS_NARROW_UNITS);
    CHECK(rs_automaton_check(&a) == NULL);
    for (int32_t i = 0; i < NUM; i++) {
        CHECK(a.states[*rs_automaton_find(&a, RS_ROOT, 3 * i)].len == (uint32_t)i + 1);
        CHECK(rs_automaton_find(&a, RS_ROOT, 3 * i + 1) == NULL);
    }
    check_freed(&a, &memory);
}

/* The most frequent continuation counts only among the first RS_MAX_BRANCHES. */
static void test_max_branches(void) {
    rs_index *index = new_index(default_options());
    fixture *f = new_fixture(1);
    const int32_t id = f->sequences[0] = open_alone(index);
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
    CHECK(index->slots[id].sequence->predictions->tokens[0] == RS_MAX_BRANCHES);
    rs_index_free(index);
    free(f);
}

/* Python's binding lets none of these through. */
static void test_arguments(void) {
    rs_index *index = new_index(default_options());
    fixture *f = new_fixture(1);
    int32_t id;
    rs_error error = {.message = ""};
    CHECK(rs_group_open(index, NULL, -1, &id, &error) == RS_EINVAL);
    CHECK(strncmp(error.message, "prompt_token_ids", 16) == 0);
    CHECK(rs_group_open(index, NULL, 0, &id, NULL) == RS_OK);
    CHECK(rs_sequence_open(index, id, &id, NULL) == RS_OK);
    f->batch.min_survival = 1.5;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "min_survival=1.5", 16) == 0);
    f->batch.min_survival = 0.0;
    f->batch.num_sequences = -1;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "num_sequences=-1", 16) == 0);
    f->batch.num_sequences = 1;
    f->batch.row_stride = NUM_COLUMNS - 1;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "token_ids", 9) == 0);
    f->batch.row_stride = NUM_COLUMNS;
    f->sequences[0] = id;
    for (int32_t num = -1; num <= DRAFT_LEN + 1; num += DRAFT_LEN + 2) {
        f->batch.num_model_tokens = num;
        CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL && strncmp(error.message, "num_model_tokens=", 17) == 0);
    }
    f->batch.num_model_tokens = 2;
    f->model_confidences[1] = RS_MODEL_CONFIDENCES;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL);
    CHECK(strcmp(error.message, "model_confidences[0, 1]=12: must be between 0 and 11") == 0);
    f->model_confidences[1] = -1;
    CHECK(rs_step(index, &f->batch, &error) == RS_EINVAL);
    f->model_tokens[0] = -1; /* then what comes after counts for nothing */
    CHECK(rs_step(index, &f->batch, &error) == RS_OK && f->num_draft_tokens[0] == 0);
    rs_index_free(index);
    free(f);
}

/* A level that is no level costs its row, and no more: nothing overflows on the way (asan). */
static void test_least_level(void) {
    rs_index *index = new_index(default_options());
    fixture *f = new_fixture(2);
    const int32_t prompt[] = {1, 2, 1};
    int32_t group;
    CHECK(rs_group_open(index, prompt, 3, &group, NULL) == RS_OK);
    for (int32_t row = 0; row < 2; row++) {
        CHECK(rs_sequence_open(index, group, f->sequences + row, NULL) == RS_OK);
    }
    f->levels[0] = INT32_MIN;
    f->levels[1] = 3;
    CHECK(rs_step(index, &f->batch, NULL) == RS_OK && f->batch.num_dropped == 1);
    CHECK(f->num_draft_tokens[0] == -1 && f->num_draft_tokens[1] > 0);
    check_valid(index);
    rs_index_free(index);
    free(f);
}

/* From a row that begins again with other tokens, nothing is learned about the draft before. */
static void test_row_that_begins_again(void) {
    rs_index *index = new_index(default_options());
    fixture *f = new_fixture(1);
    f->sequences[0] = open_alone(index);
    for (int32_t i = 0; i < 20; i++) {
        f->token_ids[0][i] = i % 3;
    }
    f->levels[0] = 20;
    CHECK(rs_step(index, &f->batch, NULL) == RS_OK && f->num_draft_tokens[0] == DRAFT_LEN);
    rs_mixer *before = malloc(sizeof *before);
    CHECK(before != NULL);
    *before = index->mixer;
    f->token_ids[0][10] = 7;
    f->levels[0] = 15;
    CHECK(rs_step(index, &f->batch, NULL) == RS_OK && f->batch.num_dropped == 0);
    CHECK(memcmp(before, &index->mixer, sizeof *before) == 0);
    free(before);
    rs_index_free(index);
    free(f);
}

/* The checks find what is broken. */
static void test_checks(void) {
    rs_index *index = new_index(default_options());
    const int32_t prompt[] = {1, 2, 1, 3, 1, 2, 4, 1, 5};
    int32_t group;
    CHECK(rs_group_open(index, prompt, sizeof prompt / sizeof prompt[0], &group, NULL) == RS_OK);
    CHECK(rs_catch_up(index, 3) && !rs_catch_up(index, INT64_MAX));
    check_valid(index);
    rs_automaton *a = &index->groups[group].automaton;
    for (uint32_t i = 0; i < a->num_states; i++) {
        rs_state *state = a->states + i;
        const rs_state kept = *state;
        for (int j = kept.token < 0; j < 4; j++) {
            switch (j) {
            case 0: state->target = i; break;
            case 1: state->len++; break;
            case 2: state->link = i; break;
            default: state->token = 99, state->target = 1;
            }
            CHECK(rs_index_check(index) != NULL);
            *state = kept;
        }
    }
    index->account.num_bytes++;
    CHECK(rs_index_check(index) != NULL);
    index->account.num_bytes--;
    check_valid(index);
    rs_index_free(index);
}

/* And so they do in what was learned. */
static void test_checks_of_the_mixer(void) {
    rs_index *index = new_index(default_options());
    rs_cell *cell = index->mixer.cells + 1;
    *cell = (rs_cell){.probability = 1.0F, .num = 2};
    check_valid(index);
    rs_weights *weights = index->mixer.weights + RS_NUM_WEIGHT_SETS - 1;
    float *fields[] = {&cell->probability, &cell->inputs[RS_OWN], &cell->inputs[RS_RIVAL], &weights->bias,
                       &weights->experts[RS_OWN][0], &weights->experts[RS_RIVAL][RS_NUM_EXPERTS - 1]};
    const float wrong[] = {NAN, INFINITY, -INFINITY, 8.0F, -8.0F};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        for (size_t j = 0; j < sizeof wrong / sizeof wrong[0]; j++) {
            const float kept = *fields[i];
            *fields[i] = wrong[j];
            CHECK(rs_index_check(index) != NULL);
            *fields[i] = kept;
        }
    }
    const uint32_t nums[] = {0, 1, 251};
    for (size_t i = 0; i < sizeof nums / sizeof nums[0]; i++) {
        cell->num = nums[i];
        CHECK(rs_index_check(index) != NULL);
    }
    cell->num = 250;
    check_valid(index);
    rs_index_free(index);
}

/* What fails leaves an index that is whole, with a part of the text at most. */
static void test_corpus(uint32_t alphabet) {
    enum { NUM = 500 };
    int32_t text[NUM];
    for (int i = 0; i < NUM; i++) {
        text[i] = (int32_t)random_below(alphabet);
    }
    rs_status status = RS_ENOMEM;
    int64_t nth = 0;
    while (status == RS_ENOMEM) {
        rs_index *index = new_index(default_options());
        fail_allocation(++nth);
        status = rs_corpus_add(index, text, NUM, NULL);
        fail_allocation(0);
        check_valid(index);
        if (status == RS_OK) {
            CHECK(rs_corpus_add(index, text, -1, NULL) == RS_EINVAL && rs_corpus_add(index, NULL, 0, NULL) == RS_OK);
            open_alone(index);
            CHECK(rs_corpus_add(index, text, NUM, NULL) == RS_EINVAL);
        }
        rs_index_free(index);
    }
    CHECK(status == RS_OK && nth > 10);
    rs_options options = default_options();
    options.max_bytes = sizeof(rs_index) + (1 << 14);
    rs_index *index = new_index(options);
    CHECK(rs_corpus_add(index, text, NUM, NULL) == RS_EBUDGET);
    check_valid(index);
    rs_index_free(index);
}

int main(void) {
    const uint32_t alphabets[] = {1, 2, 4, 16, 256};
    for (size_t i = 0; i < sizeof alphabets / sizeof alphabets[0]; i++) {
        test_extensions_that_fail(alphabets[i]);
        test_allocation_failures(alphabets[i]);
    }
    for (uint32_t seed = 1; seed <= 20; seed++) {
        test_full_index(seed);
    }
    test_budget();
    test_old_prompt_in_full_index();
    test_many_branches();
    test_wide_blocks();
    test_max_branches();
    test_arguments();
    test_least_level();
    test_row_that_begins_again();
    test_checks();
    test_checks_of_the_mixer();
    test_corpus(2);
    test_corpus(100);
    puts("native tests passed");
    return 0;
}
