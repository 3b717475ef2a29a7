/* SPDX-License-Identifier: Apache-2.0 */
/* sample_case.h -- batches of rows for the kernel that samples tokens, on the device and with the
 * reference. */
#ifndef LM_TESTS_SAMPLE_CASE_H
#define LM_TESTS_SAMPLE_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "base/mem.h"
#include "cuda_open.h"
#include "kernels/cuda/stream.h"
#include "kernels/sample.h"

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
    must(lm_alloc_n(&p, bytes, 1, "a test operand", &e), &e);
    return p;
}

/* ---- a batch of rows ---- */

typedef struct {
    int64_t rows, vocab, seen_pitch;
    lm_sample_attr o;
    float *logits;
    int32_t *seen, *n_seen, *on;
    double *u;
    int32_t *token; /* out */
    double *logprob;
} batch;

enum { N_OPERANDS = 7 };

static inline size_t operand(const batch *b, int i, void **host, lm_tensor *t)
{
    void *const data[N_OPERANDS] = { b->logits, b->seen,  b->n_seen, b->u,
                                     b->on,     b->token, b->logprob };
    static const lm_dtype type[N_OPERANDS] = { LM_DTYPE_F32, LM_DTYPE_I32, LM_DTYPE_I32,
                                               LM_DTYPE_F64, LM_DTYPE_I32, LM_DTYPE_I32,
                                               LM_DTYPE_F64 };
    *t = (lm_tensor){ .dtype = type[i], .ndim = i < 2 ? 2 : 1, .dim = { b->rows } };
    t->dim[1] = i == 0 ? b->vocab : b->seen_pitch;
    *host = data[i];
    return (size_t)lm_tensor_count(t) * lm_dtype_size(type[i]);
}

static inline batch new_batch(int64_t rows, int64_t vocab, int64_t seen_pitch)
{
    batch b = { .rows = rows, .vocab = vocab, .seen_pitch = seen_pitch };
    size_t n = (size_t)rows;
    b.o = (lm_sample_attr){ .temperature = 1, .top_p = 1, .repetition_penalty = 1 };
    b.logits = take(n * (size_t)vocab * sizeof *b.logits);
    b.seen = take(n * (size_t)seen_pitch * sizeof *b.seen);
    b.n_seen = take(n * sizeof *b.n_seen);
    b.on = take(n * sizeof *b.on);
    b.u = take(n * sizeof *b.u);
    b.token = take(n * sizeof *b.token);
    b.logprob = take(n * sizeof *b.logprob);
    for (int64_t i = 0; i < rows; i++) {
        b.on[i] = 1;
        b.token[i] = -7;
        b.logprob[i] = 7;
    }
    return b;
}

static inline void free_batch(batch *b)
{
    for (int i = 0; i < N_OPERANDS; i++) {
        lm_tensor t;
        void *p;
        operand(b, i, &p, &t);
        lm_free(p);
    }
}

static inline void copy(void *dst, const void *src, size_t bytes)
{
    lm_err e = { 0 };
    must(device->copy(device, dst, src, bytes, device->main, &e), &e);
    must(device->sync(device, NULL, &e), &e);
}

/* Device memory followed by a guard; filled with junk if `from` is NULL. */
static inline void *device_take(size_t bytes, const void *from)
{
    lm_err e = { 0 };
    unsigned char *host = take(bytes + GUARD);
    void *p = NULL;
    memset(host, 0xff, bytes);
    if (from)
        memcpy(host, from, bytes);
    memset(host + bytes, 0x5a, GUARD);
    must(device->alloc(device, bytes + GUARD, "a test operand", &p, &e), &e);
    copy(p, host, bytes + GUARD);
    lm_free(host);
    return p;
}

static inline void device_drop(void *p, size_t bytes)
{
    unsigned char end[GUARD];
    copy(end, (char *)p + bytes, GUARD);
    for (int g = 0; g < GUARD; g++)
        assert_int_equal(end[g], 0x5a);
    device->free(device, p, bytes + GUARD);
}

/* A batch on the device. */
typedef struct {
    lm_tensor t[N_OPERANDS];
    size_t bytes[N_OPERANDS], work;
    lm_step step;
    lm_call c;
    const lm_kernel *k;
} placed;

static inline void place(batch *b, placed *p)
{
    *p = (placed){ .k = device->kernel(device, "sample", LM_DTYPE_F32) };
    p->c = (lm_call){ .attr = &b->o,
                      .in = p->t,
                      .n_in = 5,
                      .out = p->t + 5,
                      .n_out = 2,
                      .step = &p->step,
                      .stream = device->main };
    assert_non_null(p->k);
    for (int i = 0; i < N_OPERANDS; i++) {
        void *host;
        p->bytes[i] = operand(b, i, &host, &p->t[i]);
        p->t[i].data = device_take(p->bytes[i], host);
    }
    p->work = p->k->work(&p->c, device->threads);
    p->c.work = device_take(p->work, NULL);
}

/* Copy the operands from `first` on to the device, or back. */
static inline void bring(batch *b, placed *p, int first, int past, bool back)
{
    for (int i = first; i < past; i++) {
        void *host;
        lm_tensor t;
        operand(b, i, &host, &t);
        copy(back ? host : p->t[i].data, back ? p->t[i].data : host, p->bytes[i]);
    }
}

static inline void check_tickets(void)
{
    static unsigned tickets[LM_CUDA_TICKETS];
    copy(tickets, device->main->tickets, sizeof tickets);
    for (int i = 0; i < LM_CUDA_TICKETS; i++)
        if (tickets[i])
            fail_msg("ticket %d is %u afterwards", i, tickets[i]);
}

static inline void take_away(placed *p)
{
    device_drop(p->c.work, p->work);
    for (int i = 0; i < N_OPERANDS; i++)
        device_drop(p->t[i].data, p->bytes[i]);
    check_tickets();
}

static inline void run_device(batch *b)
{
    placed p;
    lm_err e = { 0 };
    place(b, &p);
    p.k->run(&p.c);
    must(device->sync(device, NULL, &e), &e);
    bring(b, &p, 5, N_OPERANDS, true);
    take_away(&p);
}

/* Compute the reference's results in `want`, which has separate outputs. */
static inline void run_reference(const batch *b, batch *want)
{
    const lm_kernel *k = lm_cpu_kernel("sample", LM_DTYPE_F32, LM_CPU_REF);
    size_t n = (size_t)b->rows;
    lm_call c;
    lm_tensor t[N_OPERANDS];
    void *p;
    *want = *b;
    want->token = take(n * sizeof *want->token);
    want->logprob = take(n * sizeof *want->logprob);
    memcpy(want->token, b->token, n * sizeof *want->token);
    memcpy(want->logprob, b->logprob, n * sizeof *want->logprob);
    for (int i = 0; i < N_OPERANDS; i++) {
        operand(want, i, &p, &t[i]);
        t[i].data = p;
    }
    c = (lm_call){ .attr = &b->o, .in = t, .n_in = 5, .out = t + 5, .n_out = 2 };
    c.work = p = take(k->work(&c, 1));
    k->run(&c);
    lm_free(p);
}

/* Returns the number of rows that got a token. */
static inline int64_t compare(const batch *b, const batch *want)
{
    const lm_sample_attr *o = &b->o;
    int64_t got = 0;
    for (int64_t i = 0; i < b->rows; i++) {
        if (want->token[i] != b->token[i])
            fail_msg("row %lld of %lld: token %d, want %d (temperature %g, top-k %lld, top-p %g, "
                     "min-p %g, penalty %g, u %.17g)",
                     (long long)i, (long long)b->vocab, b->token[i], want->token[i], o->temperature,
                     (long long)o->top_k, o->top_p, o->min_p, o->repetition_penalty, b->u[i]);
        if (!(fabs(want->logprob[i] - b->logprob[i]) <= 1e-12 * (1 + fabs(want->logprob[i]))))
            fail_msg("row %lld of %lld: logprob %.17g, want %.17g", (long long)i,
                     (long long)b->vocab, b->logprob[i], want->logprob[i]);
        got += b->on[i] && want->token[i] >= 0;
    }
    return got;
}

/* The device's results against the reference's.  Returns the number of rows that got a token. */
static inline int64_t check(batch *b)
{
    batch want;
    int64_t got;
    run_reference(b, &want);
    run_device(b);
    got = compare(b, &want);
    lm_free(want.token);
    lm_free(want.logprob);
    return got;
}

#endif
