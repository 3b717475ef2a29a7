/* SPDX-License-Identifier: Apache-2.0 */
/* Three ranks that write one checkpoint: of tensors that all have, each what is dealt to it; of tensors of which each has rows
 * or columns, as they are or transposed in files, each its own.  The files have the bytes that one rank writes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/file.h"
#include "comm/threads.h"
#include "model/build.h"
#include "model_run.h"

enum { RANKS = 3, TENSORS = 12 };

static char folder[] = "/tmp/test_shared.XXXXXX";

/* A tensor in memory, and what a rank has of it. */
static const struct layout {
    const char *name;
    int64_t rows, cols; /* cols 0: a vector */
    bool transposed;
    int64_t stack;
    int dim; /* below 0: all of it */
    lm_portions pieces;
} layouts[TENSORS] = {
    { "rows", 301, 40, false, 1, 0, { 0 } },
    { "columns", 40, 301, false, 1, 1, { 0 } },
    { "turned.rows", 301, 40, true, 1, 0, { 0 } },
    { "turned.columns", 40, 301, true, 1, 1, { 0 } },
    { "packed", 168, 20, true, 1, 0, { .n = 1, .run = { { 3, 56, 8 } } } },
    { "unpacked", 12, 168, false, 1, 1, { .n = 1, .run = { { 3, 56, 8 } } } },
    { "shared", 16, 30, false, 1, 0, { .n = 1, .run = { { 1, 16, 16 } } } },
    { "vector", 301, 0, false, 1, 0, { 0 } },
    { "stack.columns", 12, 35, true, 3, 1, { 0 } },
    { "stack.matrices", 12, 35, true, 3, 0, { .n = 1, .run = { { 1, 12, 4 } } } },
    { "whole", 70, 90, true, 1, -1, { 0 } },
    { "norm", 5000, 0, false, 1, -1, { 0 } },
};

typedef struct {
    lm_model m;
    lm_store *store;
    struct lm_state_part part[TENSORS];
    lm_store_state state;
} side;

static lm_backend *backend;

static int64_t part_of(const struct layout *l, int dim, int64_t whole, int rank)
{
    return rank < 0 || l->dim != dim ? whole : lm_portions_count(&l->pieces, whole, RANKS, rank);
}

static void add(lm_builder *b, const struct layout *l, int rank)
{
    const int64_t rows = part_of(l, 0, l->rows, rank),
                  cols = part_of(l, 1, l->cols ? l->cols : 1, rank);
    lm_model *m = b->m;
    lm_b_param(b, l->cols ? 2 : 1, (int64_t[]){ rows, cols }, l->name);
    lm_b_slice(b, rows, l->transposed, LM_INIT_NORMAL, 1, "%s", l->name);
    if (l->stack > 1)
        lm_b_stack(b, l->stack * rows / l->rows);
    lm_slice *s = &m->slice[m->n_slices - 1];
    if (rank < 0 || l->dim < 0)
        return;
    s->cut = (lm_cut){ .ranks = RANKS,
                       .rank = rank,
                       .dim = l->dim,
                       .whole = l->dim ? l->cols : l->rows,
                       .pieces = l->pieces,
                       .writes = rank == 0 || !lm_portions_shared(&l->pieces, RANKS) };
    /* files know the whole tensor */
    if (l->stack > 1)
        s->dim[l->dim] = l->dim ? l->cols : l->stack;
    else
        s->dim[l->transposed ? !l->dim : l->dim] = s->cut.whole;
}

/* rank below 0: the whole model. */
static void make(side *x, int rank)
{
    lm_err e = { 0 };
    memset(x, 0, sizeof *x);
    lm_model *m = &x->m;
    lm_builder b = { .m = m, .e = &e };
    m->build = (lm_build){ .mode = LM_MODE_EVAL };
    must(lm_graph_new(&m->graph, &e), &e);
    b.arena = m->graph->arena;
    for (int i = 0; i < TENSORS; i++)
        add(&b, &layouts[i], rank);
    must(lm_b_place(&b), &e);
    x->state = (lm_store_state){ .name = "exp_avg", .format = LM_DTYPE_F32, .count = m->block };
    x->state.part = x->part;
    for (int i = 0; i < TENSORS; i++) {
        const lm_slice *s = &m->slice[i];
        const lm_param *p = &m->param[s->param];
        if (layouts[i].stack == 1)
            x->part[x->state.n_parts++] =
                (struct lm_state_part){ .tensor = i,
                                        .at = p->offset,
                                        .shape = m->graph->value[p->value].t,
                                        .turned = s->transposed };
    }
    const lm_store_opts o = { .master = true, .grads = true, .state = &x->state, .n_states = 1 };
    must(lm_store_new(m, backend, &o, &x->store, &e), &e);
}

static void drop(side *x)
{
    lm_store_free(x->store);
    lm_graph_free(x->m.graph);
    lm_free(x->m.param);
    lm_free(x->m.slice);
    lm_free(x->m.index);
}

/* Whole row or column that this one of a rank's part is. */
static int64_t place(const struct layout *l, int dim, int64_t whole, int rank, int64_t at)
{
    lm_range r;
    for (int64_t k = 0; rank >= 0 && l->dim == dim; k++) {
        assert_true(lm_portions_at(&l->pieces, whole, RANKS, rank, k, &r));
        if (at < r.count)
            return r.from + at;
        at -= r.count;
    }
    return at;
}

/* Numbers that say where they are. */
static void fill(const side *x, int rank)
{
    float *param = lm_store_flat(x->store, LM_KEPT_PARAM, 0),
          *state = lm_store_flat(x->store, LM_KEPT_OPT, 0);
    for (int i = 0; i < TENSORS; i++) {
        const struct layout *l = &layouts[i];
        const lm_slice *s = &x->m.slice[i];
        const int64_t at = x->m.param[s->param].offset, cols = x->m.param[s->param].count / s->rows;
        for (int64_t r = 0; r < s->rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                const int64_t row = place(l, 0, l->rows, rank, r),
                              col = place(l, 1, l->cols, rank, c);
                param[at + r * cols + c] = (float)(i * 100000 + row * 300 + col);
                state[at + r * cols + c] = -param[at + r * cols + c];
            }
    }
}

/* *out: the plan of the weights; the caller frees it. */
static lm_folder *create(const side *x, const char *path, const lm_bundle_opts *o, lm_st_plan **out,
                         uint64_t *bytes)
{
    lm_err e = { 0 };
    lm_st_plan *plan, *states;
    lm_folder *f;
    must(lm_st_plan_new(&plan, &e), &e);
    *out = plan;
    must(lm_st_plan_new(&states, &e), &e);
    must(lm_model_plan(&x->m, LM_TENSORS_ALL, LM_DTYPE_F32, plan, &e), &e);
    must(lm_store_plan_states(x->store, states, &e), &e);
    lm_folder_spec spec = { .plan = plan, .max_shard_bytes = 200000 };
    must(lm_folder_create(path, false, o, &spec, &f, &e), &e);
    must(lm_folder_reserve(f, "optimizer.safetensors", states, &e), &e);
    must(lm_folder_put(f, "config.json", "{}", 2, &e), &e);
    *bytes = lm_st_plan_data_bytes(plan) + lm_st_plan_data_bytes(states);
    lm_st_plan_free(states);
    return f;
}

static void write_alone(const char *path)
{
    lm_err e = { 0 };
    side x;
    lm_st_plan *plan;
    uint64_t bytes;
    make(&x, -1);
    fill(&x, -1);
    lm_folder *f = create(&x, path, NULL, &plan, &bytes);
    must(lm_store_write(x.store, f, &e), &e);
    must(lm_store_write_states(x.store, f, &e), &e);
    must(lm_folder_commit(f, &e), &e);
    lm_st_plan_free(plan);
    drop(&x);
}

static lm_code write_part(void *ctx, lm_comm *c, lm_err *e)
{
    const int rank = lm_comm_rank(c);
    char made[4096] = "";
    side x;
    lm_st_plan *plan = NULL;
    lm_folder *f = NULL;
    uint64_t bytes = 0, parts[RANKS];
    lm_st_share share = { .rank = rank, .ranks = RANKS, .folder = made };
    const lm_bundle_opts o = { .share = &share };
    make(&x, rank);
    fill(&x, rank);
    if (rank == 0) {
        f = create(&x, ctx, &o, &plan, &bytes);
        snprintf(made, sizeof made, "%s", lm_folder_made(f));
    }
    must(lm_comm_broadcast(c, made, sizeof made, 0, e), e);
    if (rank > 0)
        f = create(&x, ctx, &o, &plan, &bytes);
    must(lm_store_write(x.store, f, e), e);
    must(lm_store_write_states(x.store, f, e), e);
    must(lm_folder_sync(f, e), e);
    if (rank > 0)
        must(lm_folder_commit(f, e), e);
    size_t each[RANKS];
    for (int r = 0; r < RANKS; r++)
        each[r] = sizeof share.wrote;
    must(lm_comm_all_gather(c, &share.wrote, parts, each, e), e);
    assert_true(parts[0] + parts[1] + parts[2] == bytes);
    for (int r = 0; r < RANKS; r++) /* uneven, but no rank is idle */
        assert_true(parts[r] > bytes / 4 && parts[r] < bytes / 2);
    if (rank == 0)
        must(lm_folder_commit(f, e), e);
    lm_st_plan_free(plan);
    drop(&x);
    return LM_OK;
}

static void same_files(const char *a, const char *b)
{
    lm_err e = { 0 };
    char **names, path[256];
    size_t n;
    must(lm_dir_list(a, &names, &n, &e), &e);
    assert_int_equal(n, 5); /* two shards and their index, states, config.json */
    for (size_t i = 0; i < n; i++) {
        lm_buf x = { 0 }, y = { 0 };
        snprintf(path, sizeof path, "%s/%s", a, names[i]);
        must(lm_file_read(path, 1 << 24, &x, &e), &e);
        snprintf(path, sizeof path, "%s/%s", b, names[i]);
        must(lm_file_read(path, 1 << 24, &y, &e), &e);
        assert_int_equal(x.len, y.len);
        assert_memory_equal(x.data, y.data, x.len);
        lm_buf_fini(&x);
        lm_buf_fini(&y);
    }
    lm_names_free(names, n);
}

static void the_bytes_of_one_rank(void **state)
{
    lm_err e = { 0 };
    char one[64], three[64];
    (void)state;
    snprintf(one, sizeof one, "%s/one", folder);
    snprintf(three, sizeof three, "%s/three", folder);
    write_alone(one);
    must(lm_threads_run(RANKS, 0, write_part, three, &e), &e);
    same_files(one, three);
}

/* Sums over rows or columns would need sums over ranks. */
static void other_states_are_refused(void **state)
{
    lm_err e = { 0 };
    side x;
    lm_st_plan *plan;
    (void)state;
    make(&x, 1);
    x.part[0].shape = (lm_tensor){ .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { 40 } };
    must(lm_st_plan_new(&plan, &e), &e);
    assert_int_equal(lm_store_plan_states(x.store, plan, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "\"exp_avg.rows\""));
    lm_st_plan_free(plan);
    drop(&x);
}

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    assert_non_null(mkdtemp(folder));
    must(lm_backend_cpu(lm_cpu_detect(), NULL, &backend, &e), &e);
    return 0;
}

static int end(void **state)
{
    lm_err e = { 0 };
    (void)state;
    lm_backend_close(backend);
    return lm_rm_rf(folder, &e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bytes_of_one_rank),
        cmocka_unit_test(other_states_are_refused),
    };
    return cmocka_run_group_tests_name("store_shared", tests, begin, end);
}
