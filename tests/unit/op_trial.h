/* SPDX-License-Identifier: Apache-2.0 */
/* op_trial.h -- an operator's example as a graph with memory, and the comparison of its results
 * with the reference; for the walks over the registry on the CPU and on a device.
 *
 * An example makes a graph of one node (or two that share their parameters); its backward is
 * appended by the operator's own rule.  Operands are in host memory, followed by guards. */
#ifndef LM_TESTS_OP_TRIAL_H
#define LM_TESTS_OP_TRIAL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "graph/passes.h"
#include "kernels/arrange.h"
#include "numeric/code_rows.h"
#include "numeric/kv_format.h"
#include "op/ops.h"

enum { GUARD = 64 };

static inline void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static inline void *take(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    must(lm_alloc_n(&p, bytes + GUARD, 1, "a test operand", &e), &e);
    memset((char *)p + bytes, 0x5a, GUARD);
    return p;
}

static inline bool guard_holds(const void *p, size_t bytes)
{
    for (size_t i = 0; i < GUARD; i++)
        if (((const unsigned char *)p)[bytes + i] != 0x5a)
            return false;
    return true;
}

static inline size_t bytes_of(const lm_tensor *t)
{
    return lm_stored_bytes(t);
}

static inline lm_par *pool_of(int threads)
{
    static lm_par *pools[4];
    lm_err e = { 0 };
    if (!pools[threads])
        must(lm_par_new(&pools[threads], threads, &e), &e);
    return pools[threads];
}

/* ---- an example as a graph with memory ---- */

typedef struct {
    const lm_op *op;
    lm_example ex;
    lm_dtype act;
    int example;
    lm_graph *g;
    size_t n_forward; /* nodes */
    int uses;         /* nodes of the operator, without the sums */
    lm_vid root, seed;
    lm_vid *grads; /* by value */
    size_t n_values;
    void **mem; /* by value */
    lm_step step;
} trial;

static inline bool is_param(const lm_op *op, int i)
{
    return (op->in[i].is & LM_LOW_PARAM) || !(op->in[i].is & LM_ACT_TYPE);
}

static inline lm_vid input(trial *t, int i, lm_role role)
{
    lm_err e = { 0 };
    lm_vid v = LM_NONE;
    lm_tensor s = t->ex.in[i];
    if (lm_absent(&s))
        return LM_NONE;
    unsigned is = t->op->in[i].is;
    if (is & LM_DOUBLE)
        s.dtype = LM_DTYPE_F64;
    else if (lm_dtype_is_float(s.dtype) && (!(is & LM_ANY_TYPE) || t->act == LM_DTYPE_F64))
        s.dtype = is & LM_ACT_TYPE ? t->act : lm_wide(t->act);
    must(lm_graph_value(t->g, role, s, NULL, &v, &e), &e);
    return v;
}

/* Append the operator once; its parameters are those of `shared`, if given. */
static inline void append_use(trial *t, const lm_vid *shared, lm_vid *in, lm_vid *out)
{
    lm_err e = { 0 };
    for (int i = 0; i < lm_op_ins(t->op); i++) {
        bool fl = lm_dtype_is_float(t->ex.in[i].dtype), fixed = t->op->in[i].is & LM_FIXED;
        bool param = fl && !fixed && is_param(t->op, i);
        in[i] = shared && param ? shared[i] : input(t, i, param ? LM_ROLE_PARAM : LM_ROLE_INPUT);
    }
    for (int i = 0; i < lm_op_outs(t->op); i++) {
        lm_tensor s = t->ex.out[i];
        out[i] = t->ex.want >> i & 1 ? LM_NONE : LM_SKIP;
        if (lm_absent(&s))
            continue;
        bool state = s.dtype == LM_DTYPE_NONE;
        s.dtype = state || t->act == LM_DTYPE_F64 ? t->act : s.dtype;
        must(lm_graph_value(t->g, state ? LM_ROLE_STATE : LM_ROLE_ACT, s, NULL, &out[i], &e), &e);
    }
    must(lm_graph_append(t->g, t->op, t->ex.attr, in, out, &e), &e);
    t->uses++;
}

static inline lm_vid plus(trial *t, lm_vid a, lm_vid b)
{
    lm_err e = { 0 };
    lm_vid in[2] = { a, b }, out = LM_NONE;
    must(lm_graph_append(t->g, &lm_op_add, NULL, in, &out, &e), &e);
    return out;
}

static inline lm_vid beside(trial *t, lm_vid a, lm_vid b)
{
    lm_err e = { 0 };
    lm_join_attr attr = { .rows = false };
    lm_vid in[LM_JOIN_PARTS] = { a, b }, out = LM_NONE;
    for (int i = 2; i < LM_JOIN_PARTS; i++)
        in[i] = LM_NONE;
    must(lm_graph_append(t->g, &lm_op_join, &attr, in, &out, &e), &e);
    return out;
}

/* The sum of all outputs into which gradients flow, and which are of the type of the first: one value to
 * differentiate.  Rows of another width stand beside it. */
static inline lm_vid gathered(trial *t, const lm_vid *out)
{
    lm_vid root = out[0];
    for (int i = 1; i < lm_op_outs(t->op); i++)
        if (out[i] >= 0 && !(t->op->out[i].is & LM_SAVED) &&
            t->g->value[out[i]].t.dtype == t->g->value[out[0]].t.dtype)
            root = lm_same_shape(&t->g->value[out[i]].t, &t->g->value[root].t)
                       ? plus(t, root, out[i])
                       : beside(t, root, out[i]);
    return root;
}

static inline void add_backward(trial *t)
{
    lm_err e = { 0 };
    lm_vid wrt[2 * LM_MAX_IN];
    lm_backward b = { .root = t->root, .seed = LM_NONE, .wrt = wrt };
    for (size_t k = 0; k < (size_t)t->uses; k++)
        for (int i = 0; i < lm_op_ins(t->op); i++) {
            lm_vid v = t->g->node[k].in[i];
            if (v >= 0 && lm_dtype_is_float(t->g->value[v].t.dtype) &&
                !(t->op->in[i].is & LM_FIXED))
                wrt[b.n_wrt++] = v;
        }
    must(lm_graph_value(t->g, LM_ROLE_INPUT, t->g->value[t->root].t, "seed", &t->seed, &e), &e);
    b.seed = t->seed;
    t->grads = take(t->g->n_values * sizeof *t->grads);
    b.grads = t->grads;
    must(lm_pass_backward(t->g, &b, &e), &e);
    for (int i = 0; i < b.n_wrt; i++)
        if (t->grads[wrt[i]] == LM_NONE)
            fail_msg("%s example %d: an input has no gradient", t->op->name, t->example);
}

static inline void fill(trial *t)
{
    lm_rng r = lm_rng_make(5, "operands", (uint64_t)t->example);
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    t->n_values = t->g->n_values;
    t->mem = take(t->n_values * sizeof *t->mem);
    for (size_t v = 0; v < t->n_values; v++) {
        const lm_value *x = &t->g->value[v];
        t->mem[v] = take(bytes_of(&x->t));
        lm_rng mine = lm_rng_make(5, "operand", (uint64_t)t->example * 64 + v);
        for (int64_t i = 0; lm_dtype_is_float(x->t.dtype) && !x->t.kv && i < lm_tensor_count(&x->t);
             i++)
            lm_set(x->t.dtype, t->mem[v], i, lm_rng_normal(mine, (uint64_t)i));
    }
    for (int k = 0; t->op->fill && k < t->uses; k++) {
        lm_call c = lm_node_call(t->g, &t->g->node[k], in, out);
        for (int i = 0; i < c.n_in; i++)
            in[i].data = t->g->node[k].in[i] >= 0 ? t->mem[t->g->node[k].in[i]] : NULL;
        for (int i = 0; i < c.n_out; i++)
            out[i].data = t->g->node[k].out[i] >= 0 ? t->mem[t->g->node[k].out[i]] : NULL;
        t->op->fill(r, &c);
    }
}

static inline void open_trial(trial *t, const lm_op *op, int example, lm_dtype act)
{
    lm_err e = { 0 };
    lm_vid in[2][LM_MAX_IN], out[2][LM_MAX_OUT];
    *t = (trial){ .op = op,
                  .act = act,
                  .example = example,
                  .seed = LM_NONE,
                  .step = { .seed = 7, .step = 3, .micro = 5 } };
    op->example(lm_rng_make(11, "examples", 0), example, &t->ex);
    must(lm_graph_new(&t->g, &e), &e);
    append_use(t, NULL, in[0], out[0]);
    bool twice = op->grad && example % 3 == 2;
    if (twice)
        append_use(t, in[0], in[1], out[1]);
    if (op->grad) {
        t->root = gathered(t, out[0]);
        if (twice)
            t->root = plus(t, t->root, gathered(t, out[1]));
    }
    t->n_forward = t->g->n_nodes;
    if (op->grad)
        add_backward(t);
    fill(t);
}

/* From here on weight gradients are those of weights that were computed: they replace what is there in every micro-batch. */
static inline void make_fresh(trial *t)
{
    for (size_t k = 0; k < t->g->n_nodes; k++)
        for (const lm_field *f = t->g->node[k].op->fields; f && f->name; f++)
            if (f->word == lm_acc_words)
                *(lm_acc *)(void *)((char *)t->g->node[k].attr + f->at) = LM_ACC_FRESH;
}

static inline void close_trial(trial *t)
{
    for (size_t v = 0; v < t->n_values; v++) {
        if (!guard_holds(t->mem[v], bytes_of(&t->g->value[v].t)))
            fail_msg("%s example %d: written past the end of a value", t->op->name, t->example);
        lm_free(t->mem[v]);
    }
    lm_free(t->mem);
    lm_free(t->grads);
    lm_graph_free(t->g);
}

/* ---- one node by one kernel ---- */

typedef struct {
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_call call;
} operands;

static inline void bind(const trial *t, const lm_node *n, operands *o)
{
    o->call = lm_node_call(t->g, n, o->in, o->out);
    for (int i = 0; i < n->n_in; i++)
        o->in[i].data = n->in[i] >= 0 ? t->mem[n->in[i]] : NULL;
    for (int i = 0; i < n->n_out; i++)
        o->out[i].data = n->out[i] >= 0 ? t->mem[n->out[i]] : NULL;
    o->call.step = &t->step;
}

static inline void run_kernel(const lm_kernel *k, operands *o, int threads)
{
    lm_par *par = pool_of(threads);
    size_t bytes = k->work ? k->work(&o->call, threads) : 0;
    o->call.par = par;
    o->call.work = take(bytes);
    memset(o->call.work, 0xff, bytes); /* NaN: kernels must not rely on scratch */
    k->run(&o->call);
    if (!guard_holds(o->call.work, bytes))
        fail_msg("%s: written past the end of its scratch", k->op);
    lm_free(o->call.work);
}

static inline lm_tensor copy_as(const lm_tensor *t, lm_dtype d)
{
    lm_tensor c = *t;
    if (!t->data)
        return c;
    if (t->kv) {
        c.data = take(bytes_of(t));
        memcpy(c.data, t->data, bytes_of(t));
        return c;
    }
    c.dtype = lm_dtype_is_float(t->dtype) ? d : t->dtype;
    c.data = take(bytes_of(&c));
    for (int64_t i = 0; i < lm_tensor_count(t); i++)
        lm_set(c.dtype, c.data, i, lm_get(t->dtype, t->data, i));
    return c;
}

/* Results of the reference for the current operands, in double or in their own types; each number
 * of the inputs is first changed by a factor of up to 1 + `shake`. */
static inline void by_reference(const operands *o, const char *op, lm_dtype act, bool in_double,
                                double shake, operands *want)
{
    *want = *o;
    for (int i = 0; i < o->call.n_in; i++)
        want->in[i] = copy_as(&o->in[i], in_double ? LM_DTYPE_F64 : o->in[i].dtype);
    for (int i = 0; shake > 0 && i < o->call.n_in; i++)
        for (int64_t k = 0;
             want->in[i].dtype == LM_DTYPE_F64 && !o->in[i].kv && k < lm_tensor_count(&o->in[i]);
             k++) {
            double *x = want->in[i].data;
            x[k] *=
                1 +
                shake * (2 * lm_rng_uniform(lm_rng_make(3, "shake", (uint64_t)i), (uint64_t)k) - 1);
        }
    for (int i = 0; i < o->call.n_out; i++)
        want->out[i] = copy_as(&o->out[i], in_double ? LM_DTYPE_F64 : o->out[i].dtype);
    want->call.in = want->in;
    want->call.out = want->out;
    run_kernel(lm_cpu_kernel(op, in_double ? LM_DTYPE_F64 : act, LM_CPU_REF), want, 1);
}

static inline void drop_operands(operands *o)
{
    for (int i = 0; i < o->call.n_in; i++)
        lm_free(o->in[i].data);
    for (int i = 0; i < o->call.n_out; i++)
        lm_free(o->out[i].data);
}

/* The numbers of a coded cache. */
static inline float *decoded(const lm_tensor *t)
{
    int64_t T = t->dim[2], D = t->dim[3];
    size_t bytes = lm_kv_page_bytes(t->kv, T, D);
    float *y = take((size_t)lm_tensor_count(t) * sizeof *y);
    for (int64_t p = 0; p < t->dim[0] * t->dim[1]; p++)
        lm_kv_decode(t->kv, T, D, p % t->dim[1], (const char *)t->data + (size_t)p * bytes, 0, T,
                     y + p * T * D, D);
    return y;
}

static inline double distance(const lm_tensor *got, const lm_tensor *want, double floor)
{
    double diff = 0, norm = 0;
    if (want->kv) {
        lm_tensor a = *got, b = *want;
        a.kv = b.kv = NULL;
        a.dtype = b.dtype = LM_DTYPE_F32;
        a.data = decoded(got);
        b.data = decoded(want);
        diff = distance(&a, &b, floor);
        lm_free(a.data);
        lm_free(b.data);
        return diff;
    }
    for (int64_t i = 0; i < lm_tensor_count(want); i++) {
        double a = lm_get(got->dtype, got->data, i), b = lm_get(want->dtype, want->data, i);
        if (a == b || (isnan(a) && isnan(b))) {
            norm += isfinite(b) ? b * b : 0;
            continue;
        }
        if (!isfinite(a) || !isfinite(b))
            return INFINITY;
        diff += (a - b) * (a - b);
        norm += b * b;
    }
    floor *= floor * (double)lm_tensor_count(want);
    return diff == 0 ? 0 : sqrt(diff / (norm > floor ? norm : floor));
}

/* Some examples are ill-conditioned: in a sum that cancels, or in a LayerNorm of two columns,
 * inputs that differ by a few roundings give results that differ by more than the tolerance.  There
 * a kernel may differ by 8 times that difference.
 *
 * The reference in BF16 rounds where its header says so, and so may kernels.  Therefore a kernel
 * must be near one of the two references, and the reference in BF16 may be farther from the one in
 * double. */
static inline void check_outputs(const trial *t, const lm_node *n, const char *path, bool is_ref,
                                 const operands *o, const operands *exact, const operands *shaken,
                                 const operands *alike)
{
    bool low = t->act == LM_DTYPE_BF16 || t->act == LM_DTYPE_F16;
    for (int i = 0; i < n->n_out; i++) {
        if (!o->out[i].data)
            continue;
        low |= o->out[i].dtype == LM_DTYPE_BF16 || o->out[i].dtype == LM_DTYPE_F16;
        double tol = n->op->tolerance[low] > 0 ? n->op->tolerance[low] : low ? 4e-3 : 1e-6;
        double d = distance(&o->out[i], &exact->out[i], 1e-2);
        if (!low)
            tol = fmax(tol, 8 * distance(&shaken->out[i], &exact->out[i], 1e-2));
        if (low && is_ref)
            tol *= 5;
        else if (low)
            d = fmin(d, distance(&o->out[i], &alike->out[i], 1e-2));
        if (!(d <= tol))
            fail_msg("%s (example %d of %s) %s %s, output %d: relative error %.3g, allowed %.3g",
                     n->op->name, t->example, t->op->name, lm_dtype_name(t->act), path, i, d, tol);
    }
}

#endif
