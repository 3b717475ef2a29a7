/* The CUDA kernel that chooses tokens against the reference on the same numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "base/mem.h"
#include "base/rng.h"
#include "cuda_open.h"
#include "kernels/sample.h"

enum { GUARD = 64 };

static void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static void *take(size_t bytes)
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

static size_t operand(const batch *b, int i, void **host, lm_tensor *t)
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

static batch new_batch(int64_t rows, int64_t vocab, int64_t seen_pitch)
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

static void free_batch(batch *b)
{
    for (int i = 0; i < N_OPERANDS; i++) {
        lm_tensor t;
        void *p;
        operand(b, i, &p, &t);
        lm_free(p);
    }
}

static void copy(void *dst, const void *src, size_t bytes)
{
    lm_err e = { 0 };
    must(device->copy(device, dst, src, bytes, device->main, &e), &e);
    must(device->sync(device, NULL, &e), &e);
}

/* Device memory with a guard behind it; what is not given is junk. */
static void *device_take(size_t bytes, const void *from)
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

static void device_drop(void *p, size_t bytes)
{
    unsigned char end[GUARD];
    copy(end, (char *)p + bytes, GUARD);
    for (int g = 0; g < GUARD; g++)
        assert_int_equal(end[g], 0x5a);
    device->free(device, p, bytes + GUARD);
}

static void run_device(batch *b)
{
    const lm_kernel *k = device->kernel(device, "sample", LM_DTYPE_F32);
    lm_tensor t[N_OPERANDS];
    void *host[N_OPERANDS];
    size_t bytes[N_OPERANDS], work;
    lm_step step = { 0 };
    lm_err e = { 0 };
    lm_call c = { .attr = &b->o, .in = t, .n_in = 5, .out = t + 5, .n_out = 2, .step = &step };
    assert_non_null(k);
    for (int i = 0; i < N_OPERANDS; i++) {
        bytes[i] = operand(b, i, &host[i], &t[i]);
        t[i].data = device_take(bytes[i], host[i]);
    }
    c.stream = device->main;
    work = k->work(&c, device->threads);
    c.work = device_take(work, NULL);
    k->run(&c);
    must(device->sync(device, NULL, &e), &e);
    device_drop(c.work, work);
    for (int i = 0; i < N_OPERANDS; i++) {
        if (i >= 5)
            copy(host[i], t[i].data, bytes[i]);
        device_drop(t[i].data, bytes[i]);
    }
}

/* The device's results against the reference's.  Returns how many rows got a token. */
static int64_t check(batch *b)
{
    const lm_kernel *k = lm_cpu_kernel("sample", LM_DTYPE_F32, LM_CPU_REF);
    const lm_sample_attr *o = &b->o;
    size_t n = (size_t)b->rows;
    int64_t got = 0;
    batch want = *b;
    lm_call c;
    lm_tensor t[N_OPERANDS];
    void *p;
    want.token = take(n * sizeof *want.token);
    want.logprob = take(n * sizeof *want.logprob);
    memcpy(want.token, b->token, n * sizeof *want.token);
    memcpy(want.logprob, b->logprob, n * sizeof *want.logprob);
    for (int i = 0; i < N_OPERANDS; i++) {
        operand(&want, i, &p, &t[i]);
        t[i].data = p;
    }
    c = (lm_call){ .attr = o, .in = t, .n_in = 5, .out = t + 5, .n_out = 2 };
    c.work = p = take(k->work(&c, 1));
    k->run(&c);
    lm_free(p);
    run_device(b);
    for (int64_t i = 0; i < b->rows; i++) {
        if (want.token[i] != b->token[i])
            fail_msg("row %lld of %lld: token %d, want %d (temperature %g, top-k %lld, top-p %g, "
                     "min-p %g, penalty %g, u %.17g)",
                     (long long)i, (long long)b->vocab, b->token[i], want.token[i], o->temperature,
                     (long long)o->top_k, o->top_p, o->min_p, o->repetition_penalty, b->u[i]);
        if (!(fabs(want.logprob[i] - b->logprob[i]) <= 1e-12 * (1 + fabs(want.logprob[i]))))
            fail_msg("row %lld of %lld: logprob %.17g, want %.17g", (long long)i,
                     (long long)b->vocab, b->logprob[i], want.logprob[i]);
        got += b->on[i] && want.token[i] >= 0;
    }
    lm_free(want.token);
    lm_free(want.logprob);
    return got;
}

/* ---- made-up rows ---- */

static double bell(lm_rng r, uint64_t at)
{
    double sum = -6;
    for (uint64_t k = 0; k < 12; k++)
        sum += lm_rng_uniform(r, at * 12 + k);
    return sum;
}

/* Rows of many kinds: smooth, with ties, flat, peaked, half of them -Inf, and unusable ones. */
static void fill_row(batch *b, int64_t row, lm_rng r, uint64_t kind)
{
    float *x = b->logits + row * b->vocab;
    uint64_t base = (uint64_t)(row * b->vocab);
    for (int64_t i = 0; i < b->vocab; i++) {
        double z = bell(r, base + (uint64_t)i);
        switch (kind) {
        case 0:
            z = rint(z * 2) / 2; /* ties */
            break;
        case 1:
            z = 0.25;
            break;
        case 2:
            z *= 12;
            break;
        case 3:
            z = z > 0 ? -INFINITY : z;
            break;
        case 4:
            z *= 1e-9; /* different logits, the same weights */
            break;
        case 5:
            z *= 400; /* most weights are 0 */
            break;
        default:
            z *= 2;
        }
        x[i] = (float)z;
    }
    int64_t at = (int64_t)lm_rng_below(r, base, (uint64_t)b->vocab);
    if (kind == 9)
        x[at] = NAN;
    if (kind == 10)
        x[at] = INFINITY;
    if (kind == 11)
        for (int64_t i = 0; i < b->vocab; i++)
            x[i] = -INFINITY;
    if (kind == 12)
        x[at] = 40;
    b->u[row] = lm_rng_uniform(r, base + 1);
    b->n_seen[row] = (int32_t)lm_rng_below(r, base + 2, (uint64_t)b->seen_pitch + 1);
    for (int64_t i = 0; i < b->seen_pitch; i++) /* some are there twice, some do not exist */
        b->seen[row * b->seen_pitch + i] =
            (int32_t)lm_rng_below(r, base + 3 + (uint64_t)i, (uint64_t)b->vocab + 2) - 1;
}

static void pick_options(lm_sample_attr *o, int64_t vocab, lm_rng r)
{
    static const double warm[] = { 1, 0.7, 0, 2.5, 30 }, top[] = { 0.9, 0.5, 0.99, 0, 1 - 1e-13 };
    static const double min[] = { 0.05, 0.5, 1, 1.5, 1e-9 };
    o->temperature = warm[lm_rng_below(r, 0, 5)];
    o->top_k = lm_rng_below(r, 1, 2) ? 1 + (int64_t)lm_rng_below(r, 2, (uint64_t)vocab + 3) : 0;
    if (lm_rng_below(r, 3, 3) == 0) /* small, as people choose it */
        o->top_k = 1 + (int64_t)lm_rng_below(r, 4, 50);
    o->top_p = lm_rng_below(r, 5, 2) ? top[lm_rng_below(r, 6, 5)] : 1;
    o->min_p = lm_rng_below(r, 7, 3) ? 0 : min[lm_rng_below(r, 8, 5)];
    o->repetition_penalty = lm_rng_below(r, 9, 2) ? 1.3 : 1;
}

/* `batches` of `rows`, widths from `least` to `most`. */
static int64_t sweep(uint64_t seed, int batches, int64_t rows, int64_t least, int64_t most)
{
    int64_t got = 0;
    for (int k = 0; k < batches; k++) {
        lm_rng r = lm_rng_make(seed, "rows", (uint64_t)k);
        uint64_t span = (uint64_t)(most - least) + 1;
        batch b = new_batch(rows, least + (int64_t)lm_rng_below(r, 0, span), 9);
        pick_options(&b.o, b.vocab, lm_rng_make(seed, "options", (uint64_t)k));
        for (int64_t i = 0; i < rows; i++) {
            fill_row(&b, i, r, lm_rng_below(r, (uint64_t)i + 1, 16));
            b.on[i] = lm_rng_below(r, (uint64_t)(i + rows) + 1, 8) != 0;
        }
        emu_order(k % 3);
        got += check(&b);
        free_batch(&b);
    }
    return got;
}

static void small_rows(void **state)
{
    (void)state;
    assert_true(sweep(1, 60, 40, 1, 20) > 1000);
    assert_true(sweep(2, 40, 40, 21, 700) > 700);
}

static void wider_than_what_is_ranked_at_once(void **state)
{
    (void)state;
    assert_true(sweep(3, 40, 4, 2049, 6000) > 50);
}

static void whole_vocabularies(void **state)
{
    (void)state;
    assert_true(sweep(4, 8, 2, 50257, 50257) > 2);
}

/* Every limit alone, where it falls between equal weights, and with u where sums are exact. */
static void ties_are_cut_by_id(void **state)
{
    enum { V = 16 };
    (void)state;
    for (int k = 0; k < 4; k++) {
        batch b = new_batch(2 * V, V, 1);
        for (int64_t i = 0; i < b.rows; i++) {
            for (int v = 0; v < V; v++)
                b.logits[i * V + v] = v % 2 ? 1 : -INFINITY;
            b.u[i] = (double)i / (2 * V);
        }
        b.o.top_k = k == 1 ? 4 : 0;
        b.o.top_p = k == 2 ? 0.5 : 1;
        b.o.min_p = k == 3 ? 1 : 0;
        assert_int_equal(check(&b), 2 * V);
        for (int64_t i = 0; i < b.rows; i++) {
            int64_t left = k == 1 || k == 2 ? 4 : 8;
            assert_int_equal(b.token[i], i * left / (2 * V) * 2 + 1);
        }
        free_batch(&b);
    }
}

/* Two weights, more of the heavy one than are ranked at once: a limit just past them takes one of the
 * light ones, the first. */
static void a_limit_just_past_a_level(void **state)
{
    enum { V = 7000, HEAVY = 3000 };
    const double all = HEAVY + (V - HEAVY) * exp(-1);
    (void)state;
    for (int k = 0; k < 4; k++) {
        batch b = new_batch(2, V, 1);
        for (int64_t i = 0; i < 2 * V; i++)
            b.logits[i] = i % V < V - HEAVY ? 1 : 2;
        b.o.top_k = k == 0 ? HEAVY + 1 : k == 1 ? HEAVY : 0;
        b.o.top_p = k == 2 ? (HEAVY + 0.3) / all : k == 3 ? (HEAVY - 0.3) / all : 1;
        b.u[0] = 0.99999;
        b.u[1] = 0.5;
        assert_int_equal(check(&b), 2);
        assert_int_equal(b.token[0], k % 2 ? V - 1 : 0);
        free_batch(&b);
    }
}

/* Near 1, u times the sum is the sum: the last token that has a weight. */
static void the_largest_draw(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        batch b = new_batch(8, 100, 1);
        for (int64_t i = 0; i < b.rows; i++) {
            fill_row(&b, i, lm_rng_make(5, "last", (uint64_t)i), 7);
            for (int v = 90; v < 100; v++)
                b.logits[i * 100 + v] = -INFINITY;
            b.u[i] = 1 - 0x1p-53;
            b.n_seen[i] = 0;
        }
        b.o.top_k = k ? 80 : 0;
        assert_int_equal(check(&b), 8);
        free_batch(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_rows),
        cmocka_unit_test(wider_than_what_is_ranked_at_once),
        cmocka_unit_test(whole_vocabularies),
        cmocka_unit_test(ties_are_cut_by_id),
        cmocka_unit_test(a_limit_just_past_a_level),
        cmocka_unit_test(the_largest_draw),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
