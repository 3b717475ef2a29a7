/* SPDX-License-Identifier: Apache-2.0 */
/* Every operator of the registry on the CUDA backend, in every type and on every path of its
 * kernels, against the reference in double.
 *
 * Operands are in device memory, followed by guards.  Under the emulation each node also runs with
 * the threads and blocks in other orders, which must not change a bit; a race would.  Calls that a
 * joined operator refuses are skipped, but some call of each must run on the plain path. */
#include "cuda_open.h"
#include "kernels/attention.h"
#include "op_trial.h"

enum { MOST_OPS = 256, EXAMPLES = 12, CACHES = 11 };

static lm_backend *backend;
static bool op_met[MOST_OPS];

static void *device_take(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    must(backend->alloc(backend, bytes + GUARD, "a test operand", &p, &e), &e);
    return p;
}

static void to_device(void *dst, const void *src, size_t bytes)
{
    lm_err e = { 0 };
    must(backend->copy(backend, dst, src, bytes, backend->main, &e), &e);
    must(backend->sync(backend, NULL, &e), &e);
}

static void from_device(void *dst, const void *src, size_t bytes)
{
    to_device(dst, src, bytes); /* copy takes either side */
}

/* The operands of a node on the device: copies of those of `o`, guards included. */
static void send_operands(const operands *o, operands *d)
{
    *d = *o;
    for (int i = 0; i < o->call.n_in + o->call.n_out; i++) {
        bool in = i < o->call.n_in;
        const lm_tensor *from = in ? &o->in[i] : &o->out[i - o->call.n_in];
        lm_tensor *to = in ? &d->in[i] : &d->out[i - o->call.n_in];
        if (!from->data)
            continue;
        to->data = device_take(bytes_of(from));
        to_device(to->data, from->data, bytes_of(from) + GUARD);
    }
    d->call.in = d->in;
    d->call.out = d->out;
    d->call.stream = backend->main;
}

static void drop_device(operands *d)
{
    for (int i = 0; i < d->call.n_in; i++)
        if (d->in[i].data)
            backend->free(backend, d->in[i].data, bytes_of(&d->in[i]) + GUARD);
    for (int i = 0; i < d->call.n_out; i++)
        if (d->out[i].data)
            backend->free(backend, d->out[i].data, bytes_of(&d->out[i]) + GUARD);
}

/* Run the kernel on d and copy its outputs, and every guard, to the memory of o. */
static void run_on_device(const lm_kernel *k, const lm_step *step, operands *o, operands *d)
{
    lm_err e = { 0 };
    size_t bytes = k->work ? k->work(&d->call, backend->threads) : 0;
    unsigned char guard[GUARD];
    d->call.par = NULL;
    d->call.work = bytes ? device_take(bytes) : NULL;
    if (bytes) {
        void *junk = take(bytes);
        memset(junk, 0xff, bytes); /* NaN: kernels must not rely on scratch */
        to_device(d->call.work, junk, bytes + GUARD);
        lm_free(junk);
    }
    must(backend->step(backend, step, backend->main, &e), &e);
    k->run(&d->call);
    if (backend->sync(backend, NULL, &e))
        fail_msg("%s: %s: %s", k->op, e.where, e.what);
    for (int i = 0; i < d->call.n_out; i++)
        if (d->out[i].data)
            from_device(o->out[i].data, d->out[i].data, bytes_of(&d->out[i]) + GUARD);
    for (int i = 0; i < d->call.n_in; i++) {
        if (!d->in[i].data)
            continue;
        from_device(guard, (char *)d->in[i].data + bytes_of(&d->in[i]), GUARD);
        for (int b = 0; b < GUARD; b++)
            if (guard[b] != 0x5a)
                fail_msg("%s: written past the end of input %d", k->op, i);
    }
    if (bytes) {
        from_device(guard, (char *)d->call.work + bytes, GUARD);
        for (int b = 0; b < GUARD; b++)
            if (guard[b] != 0x5a)
                fail_msg("%s: written past the end of its scratch", k->op);
        backend->free(backend, d->call.work, bytes + GUARD);
    }
}

/* Operators of the host alone. */
static bool is_hosts(const lm_op *op)
{
    static const lm_op *const hosts[] = {
        &lm_op_collect,        &lm_op_deal,       &lm_op_panels,         &lm_op_all_reduce,
        &lm_op_reduce_scatter, &lm_op_all_gather, &lm_op_all_to_all,     &lm_op_part,
        &lm_op_once,           &lm_op_part_ids,   &lm_op_gather_begin,   &lm_op_gather_end,
        &lm_op_ring_pass,      &lm_op_ring_rows,  &lm_op_ring_add,       &lm_op_ring_mask,
        &lm_op_ring_merge,     &lm_op_sum_shared, &lm_op_expert_offsets, &lm_op_expert_rows,
        &lm_op_expert_scale,   &lm_op_expert_sum, &lm_op_expert_dot
    };
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        if (op == hosts[i])
            return true;
    return false;
}

/* Only joined operators may refuse a call. */
static bool is_joined(const lm_op *op)
{
    static const lm_op *const joined[] = { &lm_op_linear_act, &lm_op_linear_act_dx,
                                           &lm_op_norm_linear, &lm_op_norm_dx_dw,
                                           &lm_op_attention_step };
    for (size_t i = 0; i < sizeof joined / sizeof *joined; i++)
        if (op == joined[i])
            return true;
    return false;
}

/* Run and check one node; its results stay in memory for the next ones. */
static void check_node(trial *t, const lm_node *n)
{
    lm_dtype act = lm_node_act(t->g, n);
    const lm_kernel *k = backend->kernel(backend, n->op->name, act);
    operands o, exact, shaken, alike, d;
    void *before[LM_MAX_OUT], *one[LM_MAX_OUT];
    if (!k)
        fail_msg("no kernel %s for %s", n->op->name, lm_dtype_name(act));
    bind(t, n, &o);
    if (is_joined(n->op) && !backend->joins(backend, n->op->name, act, &o.call))
        return;
    by_reference(&o, n->op->name, act, true, 0, &exact);
    by_reference(&o, n->op->name, act, true, 0x1p-22, &shaken);
    by_reference(&o, n->op->name, act, false, 0, &alike);
    for (int i = 0; i < n->n_out; i++) {
        size_t bytes = o.out[i].data ? bytes_of(&o.out[i]) : 0;
        before[i] = bytes ? take(bytes) : NULL;
        one[i] = bytes ? take(bytes) : NULL;
        if (bytes)
            memcpy(before[i], o.out[i].data, bytes);
    }
    for (int order = 0; order < emu_order(order); order++) {
        for (int i = 0; i < n->n_out; i++)
            if (before[i])
                memcpy(o.out[i].data, before[i], bytes_of(&o.out[i]));
        send_operands(&o, &d);
        run_on_device(k, &t->step, &o, &d);
        drop_device(&d);
        if (!order)
            check_outputs(t, n, backend->detail, false, &o, &exact, &shaken, &alike);
        for (int i = 0; i < n->n_out; i++) {
            if (!one[i])
                continue;
            if (!guard_holds(o.out[i].data, bytes_of(&o.out[i])))
                fail_msg("%s (example %d of %s): written past the end of output %d", n->op->name,
                         t->example, t->op->name, i);
            if (!order)
                memcpy(one[i], o.out[i].data, bytes_of(&o.out[i]));
            else if (memcmp(one[i], o.out[i].data, bytes_of(&o.out[i])))
                fail_msg("%s (example %d of %s) %s: other bits when threads run in another order",
                         n->op->name, t->example, t->op->name, lm_dtype_name(act));
        }
    }
    for (int i = 0; i < n->n_out; i++) {
        lm_free(before[i]);
        lm_free(one[i]);
    }
    drop_operands(&exact);
    drop_operands(&shaken);
    drop_operands(&alike);
    for (int j = 0; lm_op_at(j); j++)
        op_met[j] |= lm_op_at(j) == n->op;
}

static void walk(const char *kernels)
{
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    const char *only = getenv("LM_TEST_OP"); /* one operator and its gradients */
    const lm_op *op;
    lm_err e = { 0 };
    must(cuda_open(kernels, true, &backend, &e), &e);
    for (int j = 0; (op = lm_op_at(j)); j++)
        for (int i = 0;
             op->example && i < EXAMPLES && !is_hosts(op) && (!only || !strcmp(only, op->name));
             i++) {
            trial t;
            open_trial(&t, op, i, acts[i % 3]);
            for (int turn = 0; turn < 3; turn++) {
                t.step.more =
                    turn > 0; /* weight gradients: replaced, then added to, then replaced again */
                if (turn == 2)
                    make_fresh(&t);
                for (size_t k = 0; k < t.g->n_nodes; k++)
                    check_node(&t, &t.g->node[k]);
            }
            close_trial(&t);
        }
    emu_order(0);
    lm_backend_close(backend);
    for (int j = 0; (op = lm_op_at(j)) && !only; j++)
        if (!op_met[j] && !is_hosts(op))
            fail_msg("operator %s was never run", op->name);
}

/* Caches of heads of several sizes, also those that no tile serves, and of keys that hold the values. */
static void cache_example(lm_rng r, int i, lm_example *x)
{
    static const struct {
        int64_t seq, heads, kv_heads, dim, value_dim;
        bool values;
        int page; /* 0: one piece */
    } cases[CACHES] = {
        { 1, 5, 1, 576, 512, false, 0 },  { 20, 3, 1, 576, 512, false, 0 },
        { 0, 5, 1, 576, 512, false, 32 }, { 1, 9, 1, 192, 128, true, 0 },
        { 0, 2, 2, 192, 128, true, 16 },  { 21, 2, 1, 72, 40, false, 0 },
        { 0, 3, 1, 21, 13, false, 0 },    { 0, 1, 1, 320, 300, true, 16 },
        { 1, 2, 1, 40, 72, true, 0 },     { 8, 1, 1, 40, 24, true, 16 },
        { 20, 2, 1, 576, 512, false, 0 },
    };
    (void)r;
    lm_attention_attr a = { .batch = 3,
                            .seq = cases[i].seq,
                            .heads = cases[i].heads,
                            .kv_heads = cases[i].kv_heads,
                            .head_dim = cases[i].dim,
                            .value_dim = cases[i].value_dim,
                            .causal = true,
                            .scale = 0.1 };
    const bool ragged = a.seq == 0;
    const int64_t page = cases[i].page;
    *x = (lm_example){ .n_in = 6, .want = (cases[i].values ? 7 : 3) | (i % 2 ? 8 : 0) };
    x->in[0] =
        lm_shape2(LM_DTYPE_F32, ragged ? 40 : 3 * a.seq, lm_attention_row(&a, cases[i].values));
    x->in[1] = x->in[2] = lm_shape1(LM_DTYPE_I32, a.batch);
    if (ragged) {
        x->in[3] = lm_shape1(LM_DTYPE_I32, a.batch + 1);
        x->in[4] = lm_shape1(LM_DTYPE_I32, a.batch);
    }
    if (page)
        x->in[5] = lm_shape2(LM_DTYPE_I32, a.batch, 160 / page);
    x->out[1] = (lm_tensor){ .dtype = LM_DTYPE_NONE,
                             .ndim = 4,
                             .dim = { page ? a.batch * 160 / page + 1 : a.batch, a.kv_heads,
                                      page ? page : 160, a.head_dim } };
    if (cases[i].values) {
        x->out[2] = x->out[1];
        x->out[2].dim[3] = a.value_dim;
    }
    memcpy(x->attr, &a, sizeof a);
}

static void test_caches(void **state)
{
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    const char *only = getenv("LM_TEST_OP");
    (void)state;
    for (int tensor = 0; tensor < 2 && (!only || !strcmp(only, "attention_cached")); tensor++) {
        lm_op op = lm_op_attention_cached;
        lm_err e = { 0 };
        op.example = cache_example;
        must(cuda_open(tensor ? "tensor" : "plain", true, &backend, &e), &e);
        for (int i = 0; i < CACHES; i++)
            for (int act = tensor; act < 3; act++) {
                trial t;
                open_trial(&t, &op, i, acts[act]);
                for (size_t k = 0; k < t.g->n_nodes; k++)
                    check_node(&t, &t.g->node[k]);
                close_trial(&t);
            }
        emu_order(0);
        lm_backend_close(backend);
    }
}

static void test_plain(void **state)
{
    (void)state;
    walk("plain");
}

static void test_tensor(void **state)
{
    (void)state;
    walk("tensor");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_tensor),
        cmocka_unit_test(test_caches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
