/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_case.h -- runs one kernel on random operands and compares it with the reference in double.
 *
 * A case names the operator, its attributes and its operands.  check_case runs every level that
 * this machine has, for F32 and BF16, with 1, 2 and 3 threads (which must give the same bits),
 * guard bytes after each output, and compares with the F64 reference on the same inputs. */
#ifndef LM_TESTS_KERNEL_CASE_H
#define LM_TESTS_KERNEL_CASE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/par.h"
#include "base/rng.h"
#include "kernels/kernel.h"

enum kind { ABSENT, ACT, F32, F64, I32, COPY_BF16 };
enum fill {
    NORMAL,
    POSITIVE,
    ZERO,
    IDS
}; /* IDS: 0 .. limit-1; negative limit: about a third is -1 */

typedef struct {
    enum kind kind;
    int64_t rows, cols; /* cols 0: one dimension */
    enum fill fill;
    int64_t limit;
    /* content to use instead of a fill, in the type of the operand for act = F64 */
    const void *data;
    int alias; /* outputs: 1 + index of the input that shares its memory; 0 none */
} operand;

static inline operand mat(enum kind kind, int64_t rows, int64_t cols)
{
    return (operand){ .kind = kind, .rows = rows, .cols = cols };
}

static inline operand vec(enum kind kind, int64_t n)
{
    return (operand){ .kind = kind, .rows = n };
}

static inline operand filled(operand o, enum fill fill, int64_t limit)
{
    o.fill = fill;
    o.limit = limit;
    return o;
}

static inline operand given(operand o, const void *data)
{
    o.data = data;
    return o;
}

static inline operand over(operand o, int input) /* shares the memory of in[input] */
{
    o.alias = input + 1;
    return o;
}

typedef struct {
    const char *op;
    const void *attr;
    operand in[6], out[4];
    double tol_f32, tol_bf16;
    lm_step step;
} kernel_case;

enum { GUARD = 64 };

static inline lm_dtype type_of(enum kind k, lm_dtype act)
{
    switch (k) {
    case ACT:
        return act;
    case F32:
        return act == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_F32;
    case F64:
        return LM_DTYPE_F64;
    case I32:
        return LM_DTYPE_I32;
    case COPY_BF16:
        return act == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_BF16;
    default:
        return LM_DTYPE_NONE;
    }
}

static inline void *take(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    assert_int_equal(lm_alloc_n(&p, bytes + GUARD, 1, "a test operand", &e), 0);
    memset((char *)p + bytes, 0x5a, GUARD);
    return p;
}

static inline lm_tensor shape_of(const operand *o, lm_dtype act)
{
    lm_tensor t = { .dtype = type_of(o->kind, act) };
    if (o->kind == ABSENT)
        return t;
    t.ndim = o->cols ? 2 : 1;
    t.dim[0] = o->rows;
    t.dim[1] = o->cols;
    return t;
}

/* Approximately normal: the sum of four uniform numbers. */
static inline double bell(lm_u32x4 x)
{
    double sum = (double)x.v[0] + x.v[1] + x.v[2] + x.v[3];
    return (sum * 0x1p-32 - 2) * 1.7320508;
}

static inline double value_at(const operand *o, int which, int64_t i)
{
    enum { POOL = 16381 }; /* a prime, so that rows of no shape are equal */
    static double bells[POOL];
    if (!bells[0])
        for (int k = 0; k < POOL; k++)
            bells[k] = bell(lm_philox((uint64_t)k, 0, 7));
    if (o->fill == ZERO)
        return 0;
    if (o->fill == NORMAL)
        return bells[(i + 1237 * which) % POOL];
    lm_u32x4 x = lm_philox((uint64_t)i, (uint64_t)which, 7);
    if (o->fill == POSITIVE)
        return 0.1 + x.v[0] * 0x1p-32;
    if (o->limit < 0 && x.v[1] % 3 == 0)
        return -1;
    return x.v[0] % (uint32_t)(o->limit < 0 ? -o->limit : o->limit);
}

/* Inputs are rounded to `narrow` first, so that every act gets the same numbers. */
static inline lm_tensor make(const operand *o, int which, lm_dtype act, lm_dtype narrow)
{
    lm_tensor t = shape_of(o, act);
    if (o->kind == ABSENT)
        return t;
    int64_t n = lm_tensor_count(&t);
    t.data = take((size_t)n * lm_dtype_size(t.dtype));
    for (int64_t i = 0; i < n; i++) {
        double cell, v = o->data ? lm_get(type_of(o->kind, LM_DTYPE_F64), o->data, i)
                                 : value_at(o, which, i);
        if (o->kind == ACT) {
            lm_set(narrow, &cell, 0, v);
            v = lm_get(narrow, &cell, 0);
        } else if (o->kind == F32) {
            v = (float)v;
        }
        lm_set(t.dtype, t.data, i, v);
    }
    return t;
}

typedef struct {
    lm_tensor in[6], out[4];
    lm_call call;
} instance;

/* An instance of a case for one act; aliased outputs share the input's memory. */
static inline void build(const kernel_case *k, lm_dtype act, lm_dtype narrow, instance *x)
{
    memset(x, 0, sizeof *x);
    for (int i = 0; i < 6; i++)
        x->in[i] = make(&k->in[i], i, act, narrow);
    for (int i = 0; i < 4; i++) {
        if (k->out[i].alias)
            x->out[i] = x->in[k->out[i].alias - 1];
        else
            x->out[i] = make(&k->out[i], 10 + i, act, narrow);
    }
    x->call = (lm_call){
        .attr = k->attr, .in = x->in, .n_in = 6, .out = x->out, .n_out = 4, .step = &k->step
    };
}

static inline void run(instance *x, const lm_kernel *kernel, lm_par *par)
{
    x->call.par = par;
    x->call.work = take(kernel->work ? kernel->work(&x->call, lm_par_threads(par)) : 0);
    if (kernel->work) /* kernels must not rely on the content of scratch memory */
        memset(x->call.work, 0xff, kernel->work(&x->call, lm_par_threads(par)));
    kernel->run(&x->call);
    if (kernel->work) {
        size_t bytes = kernel->work(&x->call, lm_par_threads(par));
        for (int g = 0; g < GUARD; g++)
            assert_int_equal(((unsigned char *)x->call.work)[bytes + (size_t)g], 0x5a);
    }
    lm_free(x->call.work);
}

static inline void drop(const kernel_case *k, instance *x)
{
    for (int i = 0; i < 6; i++)
        lm_free(x->in[i].data);
    for (int i = 0; i < 4; i++)
        if (!k->out[i].alias)
            lm_free(x->out[i].data);
}

static inline size_t bytes_of(const lm_tensor *t)
{
    return (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype);
}

/* Relative L2 distance of two tensors: 0 where both are NaN, infinite if only one is NaN.
 */
static inline double distance(const lm_tensor *got, const lm_tensor *want)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < lm_tensor_count(want); i++) {
        double a = lm_get(got->dtype, got->data, i), b = lm_get(want->dtype, want->data, i);
        if ((isnan(a) && isnan(b)) || a == b) {
            norm += isfinite(b) ? b * b : 0;
            continue;
        }
        if (!isfinite(a) || !isfinite(b))
            return INFINITY;
        diff += (a - b) * (a - b);
        norm += b * b;
    }
    return diff == 0 ? 0 : sqrt(diff / (norm > 0 ? norm : 1));
}

/* One pool for each size, kept for the whole program. */
static inline lm_par *pool_of(int threads)
{
    static lm_par *pools[4];
    lm_err e = { 0 };
    if (!pools[threads])
        assert_int_equal(lm_par_new(&pools[threads], threads, &e), 0);
    return pools[threads];
}

static inline void check_level(const kernel_case *k, lm_dtype act, lm_cpu_level level,
                               const instance *want, double tol)
{
    const lm_kernel *kernel = lm_cpu_kernel(k->op, act, level);
    instance first, x;
    if (!kernel || kernel->level != (int)level)
        return;
    for (int threads = 1; threads <= (level == LM_CPU_REF ? 1 : 3); threads++) {
        instance *it = threads == 1 ? &first : &x;
        build(k, act, act, it);
        run(it, kernel, pool_of(threads));
        for (int o = 0; o < 4; o++) {
            lm_tensor *t = &it->out[o];
            if (k->out[o].kind == ABSENT)
                continue;
            for (int g = 0; g < GUARD; g++)
                assert_int_equal(((unsigned char *)t->data)[bytes_of(t) + (size_t)g], 0x5a);
            if (threads > 1)
                assert_memory_equal(t->data, first.out[o].data, bytes_of(t));
            double d = threads > 1 ? 0 : distance(t, &want->out[o]);
            if (d > tol)
                fail_msg("%s %s %s out %d of %lld x %lld: relative error %.3g, allowed %.3g", k->op,
                         lm_dtype_name(act), lm_cpu_level_name(level), o, (long long)k->out[o].rows,
                         (long long)k->out[o].cols, d, tol);
        }
        if (threads > 1)
            drop(k, &x);
    }
    drop(k, &first);
}

static inline void check_case(const kernel_case *k)
{
    for (int bf = 0; bf < 2; bf++) {
        lm_dtype act = bf ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        instance want;
        build(k, LM_DTYPE_F64, act, &want);
        run(&want, lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++)
            check_level(k, act, (lm_cpu_level)level, &want, bf ? k->tol_bf16 : k->tol_f32);
        drop(k, &want);
    }
}

/* The derivative of <weight, forward output o> by input i along a random direction, by central
 * differences in double. */
static inline double slope(const kernel_case *k, int i, int o, const lm_tensor *weight, int seed,
                           double h)
{
    double side[2];
    for (int s = 0; s < 2; s++) {
        instance x;
        build(k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
        for (int64_t e = 0; e < lm_tensor_count(&x.in[i]); e++) {
            double d = bell(lm_philox((uint64_t)e, 99, (uint64_t)seed));
            ((double *)x.in[i].data)[e] += (s ? h : -h) * d;
        }
        run(&x, lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        side[s] = 0;
        for (int64_t e = 0; e < lm_tensor_count(&x.out[o]); e++)
            side[s] += ((double *)x.out[o].data)[e] * (weight ? ((double *)weight->data)[e] : 1);
        drop(k, &x);
    }
    return (side[1] - side[0]) / (2 * h);
}

/* The analytic gradient `grad` of <weight, out o> in input i agrees with finite differences. */
static inline void check_slope(const kernel_case *k, int i, int o, const lm_tensor *weight,
                               const lm_tensor *grad)
{
    for (int seed = 1; seed <= 5; seed++) {
        double want = slope(k, i, o, weight, seed, 1e-5), got = 0, norm = 0;
        for (int64_t e = 0; e < lm_tensor_count(grad); e++) {
            double d = bell(lm_philox((uint64_t)e, 99, (uint64_t)seed));
            double g = ((double *)grad->data)[e];
            got += g * d;
            norm += g * g;
        }
        if (fabs(got - want) > 1e-6 * sqrt(norm) + 1e-9)
            fail_msg("%s: gradient of input %d: %.12g, finite differences %.12g", k->op, i, got,
                     want);
    }
}

/* The first output of every level has NaN where the definition has it. */
static inline void check_nan(const kernel_case *k, lm_dtype act)
{
    instance want, got;
    build(k, LM_DTYPE_F64, act, &want);
    run(&want, lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++) {
        build(k, act, act, &got);
        run(&got, lm_cpu_kernel(k->op, act, (lm_cpu_level)level), NULL);
        if (!(distance(&got.out[0], &want.out[0]) < k->tol_bf16))
            fail_msg("%s %s: other results are NaN", lm_dtype_name(act),
                     lm_cpu_level_name((lm_cpu_level)level));
        drop(k, &got);
    }
    drop(k, &want);
}

#endif
