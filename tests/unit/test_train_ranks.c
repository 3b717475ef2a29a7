/* SPDX-License-Identifier: Apache-2.0 */
/* test_train_ranks.c -- ranks that are threads: the same weights, states and losses for any number of them with the same
 * leaves; the order of the sums of leaves; a rank that fails ends all of them. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "train_case.h"

#include "base/rng.h"
#include "comm/comm_impl.h"
#include "train/trainer_impl.h"

static lm_backend *backend;
static lm_par *one_thread;

static const char gpt2_text[] =
    "{\"model_type\":\"gpt2\",\"vocab_size\":64,\"n_embd\":32,\"n_head\":2,\"n_positions\":64,"
    "\"n_layer\":2,\"resid_pdrop\":0.2,\"embd_pdrop\":0.1,\"attn_pdrop\":0.3}";
static const char mixture_text[] =
    "{\"model_type\":\"mixtral\",\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":24,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"output_router_logits\":true,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"initializer_range\":0.02}";

/* With matrices of several blocks of the norms, which ranks can have parts of. */
static const char wide_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":128,\"intermediate_size\":2048,"
    "\"num_hidden_layers\":1,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"initializer_range\":0.02}";

enum { LLAMA, DROPOUT, MIXTURE, WIDE, MODELS };
static tiny_model tiny[MODELS];

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    train_begin();
    ok(lm_par_new(&one_thread, 1, &e), &e);
    ok(lm_backend_cpu(lm_cpu_detect(), one_thread, &backend, &e), &e);
    tiny_model_make(&tiny[LLAMA], llama_text, "llama");
    tiny_model_make(&tiny[DROPOUT], gpt2_text, "gpt2");
    tiny_model_make(&tiny[MIXTURE], mixture_text, "mixture");
    tiny_model_make(&tiny[WIDE], wide_text, "wide");
    return 0;
}

static int end(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++)
        tiny_model_fini(&tiny[i]);
    lm_backend_close(backend);
    lm_par_free(one_thread);
    return train_end();
}

/* ---- the tree of leaves ---- */

/* Against the tree of the ranks: n leaves of one rank, each a number of its own. */
static void leaves_are_added_as_ranks(void **state)
{
    enum { MOST = 13, N = 70 };
    static float leaf[MOST][N], sum[N], want[N];
    static double number[MOST], total, want_total;
    lm_err e = { 0 };
    (void)state;
    for (int k = 0; k < MOST; k++) {
        lm_rng r = lm_rng_make(5, "leaf", (uint64_t)k);
        for (int i = 0; i < N; i++)
            leaf[k][i] = (float)lm_rng_normal(r, (uint64_t)i);
        number[k] = lm_rng_normal(r, N);
    }
    for (int n = 1; n <= MOST; n++) {
        const lm_leaf_block block[LM_LEAF_BLOCKS] = { { "gradients", LM_DTYPE_F32, N, sum },
                                                      { "losses", LM_DTYPE_F64, 1, &total } };
        const void *part[MOST], *part_number[MOST];
        lm_leaves *l = NULL;
        ok(lm_leaves_new(backend, block, n, &l, &e), &e);
        for (int step = 0; step < 2; step++)
            for (int k = 0; k < n; k++) {
                memcpy(sum, leaf[k], sizeof sum);
                total = number[k];
                part[k] = leaf[k];
                part_number[k] = &number[k];
                ok(lm_leaves_add(l, k, &(lm_step){ .more = true }, &e), &e);
            }
        lm_comm_tree(part, n, 0, N, LM_DTYPE_F32, LM_COMM_SUM, want);
        lm_comm_tree(part_number, n, 0, 1, LM_DTYPE_F64, LM_COMM_SUM, &want_total);
        assert_memory_equal(sum, want, sizeof sum);
        assert_memory_equal(&total, &want_total, sizeof total);
        lm_leaves_free(l);
    }
    assert_int_equal(lm_leaves_copies(1), 0);
    assert_int_equal(lm_leaves_copies(2), 1);
    assert_int_equal(lm_leaves_copies(7), 2);
    assert_int_equal(lm_leaves_copies(8), 3);
}

static void which_ranks_fit(void **state)
{
    (void)state;
    assert_true(lm_ranks_fit(1, 1, 1));
    assert_true(lm_ranks_fit(1, 6, 3));
    assert_true(lm_ranks_fit(3, 6, 3));
    assert_true(lm_ranks_fit(3, 12, 6));
    assert_false(lm_ranks_fit(2, 6, 6)); /* three leaves each */
    assert_false(lm_ranks_fit(4, 6, 6));
    assert_false(lm_ranks_fit(1, 6, 4));
    assert_false(lm_ranks_fit(2, 6, 1));
    assert_false(lm_ranks_fit(0, 6, 1));
}

/* ---- whole trainings ---- */

static lm_groups optimizer(const char *text)
{
    lm_groups g;
    lm_err e = { 0 };
    ok(lm_groups_parse(text, NULL, 1e-2, &g, &e), &e);
    return g;
}

static lm_trainer_opts options(const char *optim, int64_t accumulate, int64_t leaves, int ranks)
{
    return (lm_trainer_opts){ .batch = 1,
                              .seq = T,
                              .accumulate = accumulate,
                              .leaves = leaves,
                              .mesh = { .size = { ranks } },
                              .steps = 4,
                              .precision = { .low = LM_DTYPE_F32 },
                              .documents = true,
                              .dropout = true,
                              .groups = optimizer(optim),
                              .schedule = { .kind = LM_SCHED_CONSTANT, .lr = 1e-2 },
                              .clip_norm = 1,
                              .eval_every = 2,
                              .log_every = 1 };
}

/* What remains of a run: weights and states one behind another, and losses. */
typedef struct {
    lm_train_result r;
    char *data;
    size_t bytes;
} outcome;

static void keep(outcome *x, const lm_store *s, lm_kept role)
{
    lm_err e = { 0 };
    const lm_store_block *k;
    for (int i = 0; (k = lm_store_find(s, role, i)); i++) {
        ok(lm_realloc_n(&x->data, x->bytes + k->bytes, 1, "test", &e), &e);
        memcpy(x->data + x->bytes, k->data, k->bytes);
        x->bytes += k->bytes;
    }
}

static lm_code try_train(const lm_trainer_opts *o, tiny_model *m, outcome *x, lm_err *e)
{
    const lm_trainer_io io = {
        .config = &m->config, .weights = m->source, .train = tokens, .val = tokens
    };
    lm_trainer *t = NULL;
    *x = (outcome){ 0 };
    if (!lm_trainer_train(o, &io, backend, NULL, NULL, &t, &x->r, e)) {
        keep(x, t->s.store, LM_KEPT_PARAM);
        keep(x, t->s.store, LM_KEPT_OPT);
    }
    lm_trainer_free(t);
    return e->code;
}

static outcome train(const lm_trainer_opts *o, tiny_model *m)
{
    lm_err e = { 0 };
    outcome x;
    ok(try_train(o, m, &x, &e), &e);
    return x;
}

static void check_same(const outcome *a, const outcome *b)
{
    assert_int_equal(a->bytes, b->bytes);
    assert_memory_equal(a->data, b->data, a->bytes);
    assert_memory_equal(&a->r.loss, &b->r.loss, sizeof a->r.loss);
    assert_memory_equal(&a->r.val_loss, &b->r.val_loss, sizeof a->r.val_loss);
    assert_int_equal(a->r.tokens, b->r.tokens);
    assert_true(a->r.flops == b->r.flops);
}

/* Runs of the numbers of ranks (0 at the end) have the bits of one. */
static void check_ranks(tiny_model *m, const char *optim, int64_t accumulate, int64_t leaves,
                        const int *ranks)
{
    lm_trainer_opts o = options(optim, accumulate, leaves, 1);
    outcome one = train(&o, m);
    assert_true(isfinite(one.r.loss) && isfinite(one.r.val_loss));
    for (; *ranks; ranks++) {
        o.mesh.size[LM_AXIS_DP] = *ranks;
        outcome many = train(&o, m);
        check_same(&one, &many);
        lm_free(many.data);
    }
    lm_free(one.data);
}

static void ranks_do_not_change_bits(void **state)
{
    static const char *const optims[] = { "adamw",     "sgd",
                                          "lion",      "muon;embed|norm=adamw",
                                          "adafactor", "adamw8bit:min-8bit-size=1" };
    (void)state;
    for (size_t i = 0; i < sizeof optims / sizeof *optims; i++)
        check_ranks(&tiny[LLAMA], optims[i], 4, 4, (int[]){ 2, 4, 0 });
    check_ranks(&tiny[DROPOUT], "adamw", 8, 4, (int[]){ 2, 4, 0 });
    check_ranks(&tiny[MIXTURE], "adamw", 4, 4, (int[]){ 2, 4, 0 });
}

static void leaves_of_any_number(void **state)
{
    (void)state;
    check_ranks(&tiny[LLAMA], "adamw", 6, 6, (int[]){ 3, 6, 0 });
    check_ranks(&tiny[LLAMA], "adamw", 5, 5, (int[]){ 5, 0 });
    check_ranks(&tiny[LLAMA], "adamw", 8, 8, (int[]){ 1, 2, 4, 8, 0 });
    check_ranks(&tiny[LLAMA], "adamw", 6, 2, (int[]){ 2, 0 }); /* three micro-batches a leaf */
}

/* The order of sums follows from the leaves: otherwise this test could see nothing. */
static void leaves_change_bits(void **state)
{
    lm_trainer_opts o = options("sgd", 8, 1, 1);
    outcome a = train(&o, &tiny[LLAMA]);
    o.leaves = 4;
    outcome b = train(&o, &tiny[LLAMA]);
    (void)state;
    assert_int_equal(a.bytes, b.bytes);
    assert_memory_not_equal(a.data, b.data, a.bytes);
    assert_true(fabs(a.r.loss - b.r.loss) < 1e-5);
    lm_free(a.data);
    lm_free(b.data);
}

/* ---- ranks that share the update ---- */

static lm_trainer *make_trained(const lm_trainer_opts *o, tiny_model *m, lm_train_result *r)
{
    const lm_trainer_io io = {
        .config = &m->config, .weights = m->source, .train = tokens, .val = tokens
    };
    lm_trainer *t = NULL;
    lm_err e = { 0 };
    ok(lm_trainer_train(o, &io, backend, NULL, NULL, &t, r, &e), &e);
    return t;
}

static char *get(const lm_store *s, const lm_store_block *k, int i)
{
    char *x = NULL;
    lm_err e = { 0 };
    ok(lm_alloc_n(&x, (size_t)lm_store_count(s, k, i) + 1, 8, "test", &e), &e);
    ok(lm_store_get(s, k, i, x, &e), &e);
    return x;
}

/* What rank 0 of several has: rows of the tensors that are its own.  Returns the number of tensors of which it has a part. */
static int check_own(const lm_trainer *many, const lm_trainer *one, lm_kept role)
{
    const lm_store *a = many->s.store, *b = one->s.store;
    const lm_store_block *k;
    int parts = 0;
    for (int n = 0; (k = lm_store_find(a, role, n)); n++)
        for (int i = 0; i < lm_store_tensors(a, k); i++) {
            const lm_store_block *whole = lm_store_find(b, role, n);
            const int tensor = k->state ? k->state->part[i].tensor : i;
            const lm_store_own *own = &lm_update_own(many->program->update)[tensor];
            const int64_t count = lm_store_count(a, k, i), all = lm_store_count(b, whole, i),
                          rows = many->program->train->slice[tensor].rows;
            const size_t size = lm_dtype_size(k->format->element);
            const bool part = count > 0 && count < all;
            char *x = get(a, k, i), *y = get(b, whole, i);
            assert_true(count == (part || own->rows == rows ? all / rows * own->rows : 0) ||
                        count == all);
            assert_memory_equal(x, y + (part ? (size_t)(all / rows * own->row) * size : 0),
                                (size_t)count * size);
            parts += part;
            lm_free(x);
            lm_free(y);
        }
    return parts;
}

static size_t kept_bytes(const lm_trainer *t, lm_kept role)
{
    size_t kept[LM_KEPT_ROLES];
    lm_store_bytes(t->s.store, kept);
    return kept[role];
}

static void check_level(const lm_trainer_opts *o, tiny_model *m, const lm_trainer *one,
                        const lm_train_result *want, bool cut, int *parts)
{
    const size_t ranks = (size_t)o->mesh.size[LM_AXIS_DP];
    lm_train_result r;
    lm_trainer *many = make_trained(o, m, &r);
    assert_memory_equal(&r.loss, &want->loss, sizeof r.loss);
    assert_memory_equal(&r.val_loss, &want->val_loss, sizeof r.val_loss);
    assert_memory_equal(&many->last.norm, &one->last.norm, sizeof one->last.norm);
    assert_memory_equal(&many->last.reading, &one->last.reading, sizeof one->last.reading);
    *parts += check_own(many, one, LM_KEPT_PARAM);
    *parts += check_own(many, one, LM_KEPT_OPT);
    assert_true(!cut ||
                kept_bytes(many, LM_KEPT_OPT) * ranks < kept_bytes(one, LM_KEPT_OPT) * 5 / 4);
    assert_true(!cut || (o->zero < 3 && o->precision.low == LM_DTYPE_F32) ||
                kept_bytes(many, LM_KEPT_PARAM) * ranks < kept_bytes(one, LM_KEPT_PARAM) * 5 / 4);
    assert_true(!cut || o->zero < 3 ||
                kept_bytes(many, LM_KEPT_DERIVED) * ranks <=
                    kept_bytes(one, LM_KEPT_DERIVED) * 5 / 4);
    lm_trainer_free(many);
}

static void check_zero(tiny_model *m, const char *optim, lm_dtype low, bool cut, const int *ranks)
{
    lm_trainer_opts o = options(optim, 4, 4, 1);
    lm_train_result want;
    int parts = 0;
    o.steps = 3;
    o.precision.low = low;
    lm_trainer *one = make_trained(&o, m, &want);
    for (; *ranks; ranks++)
        for (o.zero = 1; o.zero <= 3; o.zero++) {
            o.mesh.size[LM_AXIS_DP] = *ranks;
            o.gather_ahead = *ranks / 2 - 1;
            check_level(&o, m, one, &want, cut, &parts);
        }
    assert_int_equal(parts > 0, cut);
    lm_trainer_free(one);
}

/* Of gradients a rank keeps its own: the memory of whole pages of others is given back. */
static void gradients_of_others_are_dropped(void **state)
{
    enum { PAGE = 1 << 14 }; /* elements, more than there are in a page */
    lm_trainer_opts o = options("adamw", 4, 4, 4);
    lm_train_result r;
    (void)state;
    for (o.zero = 1; o.zero <= 2; o.zero++) {
        lm_trainer *t = make_trained(&o, &tiny[WIDE], &r);
        const lm_store_block *g = lm_store_find(t->s.store, LM_KEPT_GRAD, 0);
        const int64_t *bound = lm_update_bounds(t->program->update);
        const float *x = g->data;
        int64_t own = 0, others = 0;
        for (int64_t i = bound[0]; i < bound[1]; i++)
            own += x[i] != 0;
        for (int64_t i = bound[1] + PAGE; i < g->count - PAGE; i++)
            others += x[i] != 0;
        assert_true(own > (bound[1] - bound[0]) / 2);
        assert_true(o.zero == 1 ? others > g->count / 4 : others < g->count / 100);
        lm_trainer_free(t);
    }
}

/* Ranges and times of buckets: all elements once, the embedding's until the end. */
static void buckets_are_whole(void **state)
{
    lm_program *p = NULL;
    lm_bucket *b;
    lm_err e = { 0 };
    int n;
    const lm_trainer_opts o = options("adamw", 4, 4, 1);
    (void)state;
    ok(lm_trainer_program(&o, &tiny[WIDE].config, false, backend, &p, &e), &e);
    const int64_t count = p->train->train_end;
    ok(lm_buckets_make(p->train, count, &b, &n, &e), &e);
    assert_true(n >= 3);
    int64_t sum = 0, largest = 0;
    for (int i = 0; i < n; i++) {
        assert_true(b[i].from < b[i].end && b[i].first <= b[i].last);
        assert_true(i == 0 || b[i - 1].last <= b[i].last);
        sum += b[i].end - b[i].from;
        largest = b[i].end - b[i].from > largest ? b[i].end - b[i].from : largest;
        for (int k = 0; k < i; k++)
            assert_true(b[k].end <= b[i].from || b[i].end <= b[k].from);
    }
    assert_int_equal(sum, count);
    const int64_t most = lm_buckets_most(b, n, 4);
    assert_true(most >= largest && most < count);
    assert_int_equal(lm_buckets_most(b, n, 1), count);
    lm_free(b);
    lm_program_free(p);
}

/* The nodes between which a gathered copy lives, and the layer that reads it. */
typedef struct {
    size_t begin, end;
    int layer;
} copy_life;

/* Copies in the order in which they begin, which is that of their ends; nothing else reads a shared parameter. */
static size_t find_lives(const lm_graph *g, copy_life *life, size_t most)
{
    size_t n = 0, ended = 0;
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *x = &g->node[k];
        const bool begins = x->op == &lm_op_gather_begin, ends = x->op == &lm_op_gather_end;
        for (int i = 0; i < x->n_in; i++)
            assert_true(x->in[i] < 0 || g->value[x->in[i]].role != LM_ROLE_PARAM || begins);
        if (begins) {
            assert_true(n < most);
            life[n++] = (copy_life){ .begin = k };
        }
        if (ends) {
            assert_true(ended < n && g->node[life[ended].begin].out[0] == x->in[0]);
            life[ended].layer = x->layer;
            for (size_t r = k; r < g->n_nodes; r++)
                for (int i = 0; i < g->node[r].n_in; i++)
                    life[ended].end = g->node[r].in[i] == x->out[0] ? r : life[ended].end;
            assert_true(life[ended++].end > k);
        }
    }
    assert_int_equal(ended, n);
    return n;
}

/* The most layers that are whole at a time. */
static int most_layers(const lm_graph *g, const copy_life *life, size_t n)
{
    int most = 0;
    for (size_t k = 0; k < g->n_nodes; k++) {
        int now = 0, last = INT_MIN;
        for (size_t i = 0; i < n; i++)
            if (life[i].begin <= k && k <= life[i].end && life[i].layer != last) {
                last = life[i].layer;
                now++;
            }
        most = now > most ? now : most;
    }
    return most;
}

/* Layers are gathered so many ahead, and no more are whole at a time. */
static void weights_are_gathered_ahead(void **state)
{
    enum { MOST = 256 };
    static copy_life life[MOST];
    lm_trainer_opts o = options("adamw", 4, 4, 4);
    size_t before = 0;
    (void)state;
    o.zero = 3;
    for (o.gather_ahead = 0; o.gather_ahead < 3; o.gather_ahead++) {
        lm_program *p = NULL;
        lm_err e = { 0 };
        ok(lm_trainer_program(&o, &tiny[WIDE].config, true, backend, &p, &e), &e);
        const size_t n = find_lives(p->train->graph, life, MOST);
        assert_true(n > 0);
        assert_int_equal(most_layers(p->train->graph, life, n), 1 + o.gather_ahead);
        assert_true(find_lives(p->eval->graph, life, MOST) > 0);
        assert_true(p->train_plan.lower_bound > before);
        before = p->train_plan.lower_bound;
        lm_program_free(p);
    }
}

static void shared_updates_do_not_change_bits(void **state)
{
    (void)state;
    for (int i = 0; lm_optim_at(i); i++)
        check_zero(&tiny[LLAMA], lm_optim_at(i)->name, LM_DTYPE_F32, false, (int[]){ 2, 0 });
    check_zero(&tiny[DROPOUT], "adamw:ema=0.9", LM_DTYPE_BF16, false, (int[]){ 2, 4, 0 });
    check_zero(&tiny[MIXTURE], "adamw", LM_DTYPE_F32, false, (int[]){ 4, 0 });
    check_zero(&tiny[WIDE], "adamw", LM_DTYPE_BF16, true, (int[]){ 2, 4, 0 });
    check_zero(&tiny[WIDE], "schedule-free", LM_DTYPE_BF16, false, (int[]){ 4, 0 });
    check_zero(&tiny[WIDE], "lion:ema=0.9", LM_DTYPE_F32, true, (int[]){ 4, 0 });
    check_zero(&tiny[WIDE], "adafactor", LM_DTYPE_BF16, false, (int[]){ 4, 0 });
}

/* ---- refusals and failures ---- */

static void what_does_not_fit_is_refused(void **state)
{
    lm_err e = { 0 };
    lm_trainer_opts o = options("adamw", 6, 6, 2);
    outcome x;
    (void)state;
    assert_int_equal(try_train(&o, &tiny[LLAMA], &x, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "2 do not fit steps of 6 micro-batches in 6 leaves"));
}

/* All ranks meet the number that is not finite; one of them says so. */
static void a_failure_is_reported_once(void **state)
{
    lm_err e = { 0 };
    lm_trainer_opts o = options("sgd", 4, 4, 4);
    outcome x;
    (void)state;
    o.schedule.lr = 1e38;
    o.clip_norm = 0;
    o.steps = 30;
    assert_int_equal(try_train(&o, &tiny[LLAMA], &x, &e), LM_ENUMERIC);
    assert_int_equal(strncmp(e.where, "rank 0 of 4: step ", 18), 0);
}

static lm_code fail_ready(void *ctx, lm_err *e)
{
    (void)ctx;
    return lm_fail(e, LM_EIO, "here", NULL, "cannot begin");
}

static void a_rank_that_cannot_begin_ends_the_others(void **state)
{
    lm_err e = { 0 };
    lm_trainer_opts o = options("adamw", 4, 4, 4);
    const lm_trainer_io io = {
        .config = &tiny[LLAMA].config, .weights = tiny[LLAMA].source, .train = tokens, .val = tokens
    };
    lm_trainer *t = NULL;
    lm_train_result r;
    (void)state;
    assert_int_equal(lm_trainer_train(&o, &io, backend, fail_ready, NULL, &t, &r, &e), LM_EIO);
    assert_string_equal(e.where, "rank 0 of 4: here");
    lm_trainer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leaves_are_added_as_ranks),
        cmocka_unit_test(which_ranks_fit),
        cmocka_unit_test(ranks_do_not_change_bits),
        cmocka_unit_test(leaves_of_any_number),
        cmocka_unit_test(leaves_change_bits),
        cmocka_unit_test(weights_are_gathered_ahead),
        cmocka_unit_test(shared_updates_do_not_change_bits),
        cmocka_unit_test(gradients_of_others_are_dropped),
        cmocka_unit_test(buckets_are_whole),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(a_failure_is_reported_once),
        cmocka_unit_test(a_rank_that_cannot_begin_ends_the_others),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
