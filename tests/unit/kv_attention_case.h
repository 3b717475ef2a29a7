/* SPDX-License-Identifier: Apache-2.0 */
/* kv_attention_case.h -- calls of kv_attention: ragged rows over caches in every format, and the distance of results. */
#ifndef LM_TESTS_KV_ATTENTION_CASE_H
#define LM_TESTS_KV_ATTENTION_CASE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "kernels/kv.h"
#include "kernels/rope.h"
#include "numeric/code_rows.h"

#include "kv_formats_case.h"

enum { QKV, USED, FRESH, FIRST, KIND, TABLE, KEYS, VALUES, SLOT, KTAIL, VTAIL, ROPE, PLACE, N_IN };

/* A call with memory of its own. */
typedef struct {
    lm_kv_attr attr;
    lm_kv_format format[2];
    lm_tensor in[N_IN], out[2];
    lm_call call;
} trial;

static inline void *take(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    assert_int_equal(lm_alloc_n(&p, bytes, 1, "a test operand", &e), LM_OK);
    memset(p, 0, bytes);
    return p;
}

static inline lm_tensor made(lm_dtype d, int ndim, const int64_t *dim, const lm_kv_format *f)
{
    lm_tensor t = { .dtype = d, .ndim = ndim, .kv = f };
    memcpy(t.dim, dim, (size_t)ndim * sizeof *dim);
    t.data = take(lm_stored_bytes(&t) + 64);
    return t;
}

static inline void fill(lm_tensor *t, uint64_t seed, double size)
{
    lm_rng r = lm_rng_make(7, "kv kernel", seed);
    for (int64_t i = 0; i < lm_tensor_count(t); i++)
        lm_set(t->dtype, t->data, i, size * lm_rng_normal(r, (uint64_t)i));
}

/* Numbers of the channels of a cache: sizes and offsets differ. */
static inline float number(lm_rng r, int64_t i, int64_t d)
{
    return (float)(lm_rng_normal(r, (uint64_t)i) * (d % 5 == 2 ? 2 : 0.7) + (d % 9 == 4 ? 1.5 : 0));
}

static inline void encode(lm_tensor *t, uint64_t seed)
{
    int64_t T = t->dim[2], D = t->dim[3];
    size_t bytes = lm_kv_page_bytes(t->kv, T, D);
    float *x = take((size_t)(T * D) * sizeof *x), range[2 * 256];
    for (int64_t i = 0; i < T; i++) {
        range[2 * i] = -2;
        range[2 * i + 1] = 2.5f;
    }
    for (int64_t p = 0; p < t->dim[0] * t->dim[1]; p++) {
        lm_rng r = lm_rng_make(8, "kv page", seed + (uint64_t)p);
        for (int64_t i = 0; i < T * D; i++)
            x[i] = number(r, i, i % D);
        lm_kv_encode(t->kv, T, D, p % t->dim[1], x, D, 0, T, range,
                     (char *)t->data + (size_t)p * bytes);
    }
    lm_free(x);
}

typedef struct {
    int64_t B, H, K, D, T, P, window, sinks[2], residual[2];
    int64_t used[4], fresh[4], kind[4];
    double soft_cap;
    int64_t rotary; /* keys are stored before their rotation; 0: behind it */
} shape;

static inline int64_t rows_of(const shape *s)
{
    int64_t n = 2;
    for (int64_t b = 0; b < s->B; b++)
        n += s->fresh[b] + (b == 1); /* a gap of a row behind the second */
    return n;
}

/* True if a side has tokens of sequence b in its page p: plain ones, or codes. */
static inline bool is_page(const trial *t, const shape *s, int64_t b, int64_t p)
{
    bool some = false;
    for (int i = 0; i < 2; i++) {
        const lm_kv_format *f = t->in[KEYS + i].kv;
        int64_t from = f ? s->sinks[i] : 0, to = s->used[b];
        to = f ? lm_kv_coded(f, s->T, s->residual[i], to) : to;
        from = from > p * s->T ? from : p * s->T;
        some = some || from < (to < (p + 1) * s->T ? to : (p + 1) * s->T);
    }
    return some;
}

static inline void set_ints(trial *t, const shape *s)
{
    int32_t *used = t->in[USED].data, *fresh = t->in[FRESH].data, *first = t->in[FIRST].data;
    int32_t *kind = t->in[KIND].data, *table = t->in[TABLE].data, *slot = t->in[SLOT].data;
    for (int64_t b = 0; b < s->B; b++) {
        used[b] = (int32_t)s->used[b];
        fresh[b] = (int32_t)s->fresh[b];
        kind[b] = (int32_t)s->kind[b];
        first[b + 1] = first[b] + fresh[b] + (b == 1);
        if (slot)
            slot[b] = (int32_t)(s->B - 1 - b);
        for (int64_t p = 0; p < s->P; p++) /* from behind; what is not used is no page */
            table[b * s->P + p] =
                is_page(t, s, b, p) ? (int32_t)(s->B * s->P - 1 - b * s->P - p) : -1000000;
    }
}

/* Cosines and sines of numbers with a factor, and any places. */
static inline void set_rope(trial *t, const shape *s)
{
    int64_t half = s->rotary / 2, rows = s->P * s->T + 5;
    t->in[ROPE] = made(LM_DTYPE_F32, 2, (int64_t[]){ rows, s->rotary }, NULL);
    t->in[PLACE] = made(LM_DTYPE_I32, 2, (int64_t[]){ s->B, s->P * s->T }, NULL);
    float *rope = t->in[ROPE].data;
    int32_t *place = t->in[PLACE].data;
    for (int64_t i = 0; i < rows * half; i++) {
        double angle = (double)(i / half) * pow(500, -(double)(i % half) / (double)half);
        rope[i / half * s->rotary + i % half] = (float)(1.1 * cos(angle));
        rope[i / half * s->rotary + half + i % half] = (float)(1.1 * sin(angle));
    }
    for (int64_t i = 0; i < s->B * s->P * s->T; i++)
        place[i] =
            i % (s->P * s->T) < s->used[i / (s->P * s->T)] ? (int32_t)(i * 7 % rows) : -1000000;
}

static inline void open_trial(trial *t, const shape *s, lm_dtype act, const lm_kv_format *k,
                              const lm_kv_format *v)
{
    int64_t n = rows_of(s);
    *t = (trial){ .format = { *k, *v } };
    t->format[0].values = false;
    t->format[1].values = true;
    t->attr = (lm_kv_attr){ .attention = { .batch = s->B,
                                           .heads = s->H,
                                           .kv_heads = s->K,
                                           .head_dim = s->D,
                                           .window = s->window,
                                           .causal = true,
                                           .scale = 1 / sqrt((double)s->D),
                                           .soft_cap = s->soft_cap },
                            .residual = { s->residual[0], s->residual[1] },
                            .sinks = { s->sinks[0], s->sinks[1] } };
    t->in[QKV] = made(act, 2, (int64_t[]){ n, (s->H + 2 * s->K) * s->D }, NULL);
    t->in[USED] = made(LM_DTYPE_I32, 1, (int64_t[]){ s->B }, NULL);
    t->in[FRESH] = made(LM_DTYPE_I32, 1, (int64_t[]){ s->B }, NULL);
    t->in[FIRST] = made(LM_DTYPE_I32, 1, (int64_t[]){ s->B + 1 }, NULL);
    t->in[KIND] = made(LM_DTYPE_I32, 1, (int64_t[]){ s->B }, NULL);
    t->in[TABLE] = made(LM_DTYPE_I32, 2, (int64_t[]){ s->B, s->P }, NULL);
    for (int i = 0; i < 2; i++) {
        const lm_kv_format *f = is_plain(&t->format[i]) ? NULL : &t->format[i];
        int64_t R = s->sinks[i] + s->residual[i];
        t->in[KEYS + i] = made(act, 4, (int64_t[]){ s->B * s->P, s->K, s->T, s->D }, f);
        if (f)
            encode(&t->in[KEYS + i], (uint64_t)i * 1000);
        else
            fill(&t->in[KEYS + i], 40 + (uint64_t)i, 1);
        if (R == 0)
            continue;
        t->in[KTAIL + i] = made(act, 4, (int64_t[]){ s->B, s->K, R, s->D }, NULL);
        fill(&t->in[KTAIL + i], 20 + (uint64_t)i, 1);
        if (!t->in[SLOT].data)
            t->in[SLOT] = made(LM_DTYPE_I32, 1, (int64_t[]){ s->B }, NULL);
    }
    if (s->rotary)
        set_rope(t, s);
    fill(&t->in[QKV], 3, 1.5);
    set_ints(t, s);
    t->out[0] = made(act, 2, (int64_t[]){ n, s->H * s->D }, NULL);
    t->out[1] = made(LM_DTYPE_F32, 2, (int64_t[]){ n, s->H }, NULL);
    t->call = (lm_call){ .attr = &t->attr, .in = t->in, .n_in = N_IN, .out = t->out, .n_out = 2 };
}

static inline void close_trial(trial *t)
{
    for (int i = 0; i < N_IN; i++)
        lm_free(t->in[i].data);
    lm_free(t->out[0].data);
    lm_free(t->out[1].data);
}

/* The outputs' distance from those of the definition, relative. */
static inline double distance(const lm_tensor *t, const float *want)
{
    double error = 0, all = 1e-12;
    for (int64_t i = 0; i < lm_tensor_count(t); i++) {
        double a = lm_get(t->dtype, t->data, i), b = (double)want[i];
        if (a == b)
            continue;
        if (!isfinite(a) || !isfinite(b))
            return INFINITY;
        error += (a - b) * (a - b);
        all += b * b;
    }
    return sqrt(error / all);
}

static inline float *results(const lm_tensor *t)
{
    float *y = take((size_t)lm_tensor_count(t) * sizeof *y);
    lm_convert(t->dtype, t->data, LM_DTYPE_F32, y, lm_tensor_count(t));
    return y;
}

/* ---- calls ---- */

enum { CALLS = 2 * N_FORMATS + 1 };

/* The i-th of the calls, with the formats of keys and values: the last with plain ones. */
static inline shape format_shape(int i, const lm_kv_format *f[2])
{
    static const int64_t dims[] = { 64, 128, 20, 80, 256 };
    const lm_kv_format *k = &formats[i == 2 * N_FORMATS ? N_FORMATS - 1 : i % N_FORMATS];
    const lm_kv_format *v = &formats[i == 2 * N_FORMATS ? N_FORMATS - 1 : (i * 7 + 7) % N_FORMATS];
    f[0] = k;
    f[1] = v;
    int64_t T = i % 4 == 0 ? 64 : i % 4 == 1 ? 128 : i % 4 == 2 ? 32 : 16;
    if ((k->group > T && k->axis == LM_KV_CHANNEL) || (v->group > T && v->axis == LM_KV_CHANNEL))
        T = 64;
    shape s = { .B = 3,
                .K = 1 + i % 2,
                .D = dims[(i + i / N_FORMATS) % 5],
                .T = T,
                .P = 512 / T,
                .used = { 77, 300, 420 },
                .fresh = { 20, 1, 3 - 2 * (i % 2) },
                .kind = { 0, 1, i % 2 },
                .window = i % 5 == 3 ? 150 : 0,
                .rotary = i % 3 == 1 ? dims[(i + i / N_FORMATS) % 5] / (1 + i / 3 % 2) : 0,
                .soft_cap = i % 7 == 2 ? 3 : 0 };
    s.H = s.K * (1 + i % 6);
    for (int side = 0; side < 2; side++) {
        bool steps = !is_plain(f[side]) && lm_kv_step(f[side], T) > 1;
        if (is_plain(f[side]))
            continue;
        s.residual[side] = steps || (i + side) % 3 == 0 ? T : 0;
        s.sinks[side] = (i / 2 + side) % 4 == 1 ? (steps ? T : 3) : 0;
    }
    return s;
}

#endif
