/* SPDX-License-Identifier: Apache-2.0 */
/* test_sample.c -- sampling: limits, penalty, distribution, counted draws. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "graph/op.h"
#include "kernels/sample.h"
#include "model/sample.h"

enum { V = 6 };
static const float logits[V] = { 0.5f, 3.0f, -1.0f, 2.0f, 3.0f, -INFINITY };
static const lm_sample_attr plain = { .temperature = 1, .top_p = 1, .repetition_penalty = 1 };

/* One row through the kernel; logprob may be NULL. */
static int64_t choose(const lm_sample_attr *o, const float *x, const uint32_t *seen, int n_seen,
                      double u, double *logprob)
{
    double room[64];
    int32_t n = n_seen, on = 1, token = -2;
    lm_tensor in[5] = { lm_shape2(LM_DTYPE_F32, 1, V),
                        { 0 },
                        { 0 },
                        lm_shape1(LM_DTYPE_F64, 1),
                        lm_shape1(LM_DTYPE_I32, 1) };
    lm_tensor out[2] = { lm_shape1(LM_DTYPE_I32, 1), { 0 } };
    const lm_kernel *k = lm_cpu_kernel("sample", LM_DTYPE_F32, LM_CPU_REF);
    lm_call c = { .attr = o, .in = in, .n_in = 5, .out = out, .n_out = 2, .work = room };
    in[0].data = (void *)(uintptr_t)x;
    if (seen) {
        in[1] = lm_shape2(LM_DTYPE_I32, 1, n_seen);
        in[1].data = (void *)(uintptr_t)seen;
        in[2] = lm_shape1(LM_DTYPE_I32, 1);
        in[2].data = &n;
    }
    in[3].data = &u;
    in[4].data = &on;
    out[0].data = &token;
    if (logprob) {
        out[1] = lm_shape1(LM_DTYPE_F64, 1);
        out[1].data = logprob;
    }
    assert_true(k->work(&c, 1) <= sizeof room);
    k->run(&c);
    return token;
}

/* The ids that an even grid of draws selects, as a bit mask; share[i]: the share of each. */
static unsigned spread(const lm_sample_attr *o, double *share)
{
    enum { N = 20000 };
    unsigned mask = 0;
    memset(share, 0, V * sizeof *share);
    for (int i = 0; i < N; i++) {
        int64_t id = choose(o, logits, NULL, 0, (i + 0.5) / N, NULL);
        assert_in_range(id, 0, V - 1);
        mask |= 1u << id;
        share[id] += 1.0 / N;
    }
    return mask;
}

static void greedy_takes_the_first_of_the_largest(void **state)
{
    lm_sample_attr o = plain;
    (void)state;
    o.temperature = 0;
    assert_int_equal(choose(&o, logits, NULL, 0, 0.99, NULL), 1);
}

static void nan_gives_no_token(void **state)
{
    const float nan[V] = { 1, 2, NAN, 3 }, inf[V] = { 1, INFINITY };
    const float none[V] = { -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    (void)state;
    for (int t = 0; t < 2; t++) {
        lm_sample_attr o = plain;
        o.temperature = t;
        assert_int_equal(choose(&o, nan, NULL, 0, 0.5, NULL), -1);
        assert_int_equal(choose(&o, inf, NULL, 0, 0.5, NULL), -1);
        assert_int_equal(choose(&o, none, NULL, 0, 0.5, NULL), -1);
    }
}

static void plain_sampling_follows_the_softmax(void **state)
{
    const double t[3] = { 1, 0.5, 2 };
    double share[V], sum;
    (void)state;
    for (int k = 0; k < 3; k++) {
        lm_sample_attr o = plain;
        o.temperature = t[k];
        assert_int_equal(spread(&o, share), 0x1f);
        sum = 0;
        for (int i = 0; i < V; i++)
            sum += exp(logits[i] / t[k]);
        for (int i = 0; i < V; i++)
            assert_true(fabs(share[i] - exp(logits[i] / t[k]) / sum) < 2e-4);
    }
}

static void limits_keep_the_likeliest(void **state)
{
    lm_sample_attr o = plain;
    double share[V];
    (void)state;
    o.top_k = 1;
    assert_int_equal(spread(&o, share), 1 << 1); /* of equal ones the lower id */
    o.top_k = 3;
    assert_int_equal(spread(&o, share), 1 << 1 | 1 << 4 | 1 << 3);
    assert_true(fabs(share[3] - exp(-1) / (2 + exp(-1))) < 2e-4);
    o.top_k = 100;
    assert_int_equal(spread(&o, share), 0x1f);
    o = plain;
    o.top_p = 0.4; /* 3.0 has 0.406 of all */
    assert_int_equal(spread(&o, share), 1 << 1);
    o.top_p = 0.45;
    assert_int_equal(spread(&o, share), 1 << 1 | 1 << 4);
    o.top_p = 0;
    assert_int_equal(spread(&o, share), 1 << 1);
    o = plain;
    o.min_p = 0.36; /* e^-1 = 0.368 stays, e^-2.5 goes */
    assert_int_equal(spread(&o, share), 1 << 1 | 1 << 4 | 1 << 3);
    o.min_p = 1;
    assert_int_equal(spread(&o, share), 1 << 1 | 1 << 4);
}

static void top_p_is_a_share_of_what_top_k_left(void **state)
{
    lm_sample_attr o = plain;
    double share[V];
    (void)state;
    o.top_k = 2;
    o.top_p = 0.49; /* of two equal ones the first has a half */
    assert_int_equal(spread(&o, share), 1 << 1);
    o.top_p = 0.51;
    assert_int_equal(spread(&o, share), 1 << 1 | 1 << 4);
}

static void the_penalty_counts_each_token_once(void **state)
{
    const uint32_t seen[4] = { 1, 4, 1, 1 };
    lm_sample_attr o = plain;
    (void)state;
    o.temperature = 0;
    o.repetition_penalty = 1.4; /* 3 / 1.4 = 2.14 > 2; twice would be 1.53 */
    assert_int_equal(choose(&o, logits, seen, 4, 0, NULL), 1);
    o.repetition_penalty = 1.6;
    assert_int_equal(choose(&o, logits, seen, 4, 0, NULL), 3);
    const uint32_t three[3] = { 1, 4, 3 };
    o.repetition_penalty = 100; /* 0.5 is untouched */
    assert_int_equal(choose(&o, logits, three, 3, 0, NULL), 0);
    const float low[V] = { -1, -1.5f, -9, -9, -9, -9 };
    const uint32_t zero = 0;
    o.repetition_penalty = 2; /* -1 becomes -2 */
    assert_int_equal(choose(&o, low, &zero, 1, 0, NULL), 1);
}

static void the_probability_is_that_of_the_model(void **state)
{
    lm_sample_attr o = plain;
    double p, sum = 0;
    (void)state;
    o.temperature = 0.3;
    o.top_k = 1;
    int64_t id = choose(&o, logits, NULL, 0, 0.5, &p);
    for (int i = 0; i < V; i++)
        sum += exp(logits[i]);
    assert_int_equal(id, 1);
    assert_true(fabs(p - (3 - log(sum))) < 1e-12);
}

/* Rows of a batch, some of them inactive, give the same tokens as single rows. */
static void rows_are_independent(void **state)
{
    enum { B = 5 };
    const lm_sample_attr o = { 0.7, 4, 0.95, 0.01, 1.3 };
    const lm_kernel *k = lm_cpu_kernel("sample", LM_DTYPE_F32, LM_CPU_REF);
    float x[B * V];
    uint32_t seen[B * 3];
    double u[B], logprob[B], room[3 * 64];
    int32_t n[B], on[B], token[B];
    lm_par *par;
    lm_err e = { 0 };
    (void)state;
    for (int b = 0; b < B; b++) {
        for (int i = 0; i < V; i++)
            x[b * V + i] = logits[(i + b) % V];
        for (int i = 0; i < 3; i++)
            seen[b * 3 + i] = (uint32_t)(b + i) % V;
        u[b] = 0.17 * b;
        n[b] = b % 4;
        on[b] = b != 2;
        token[b] = -7;
    }
    lm_tensor in[5] = { lm_shape2(LM_DTYPE_F32, B, V), lm_shape2(LM_DTYPE_I32, B, 3),
                        lm_shape1(LM_DTYPE_I32, B), lm_shape1(LM_DTYPE_F64, B),
                        lm_shape1(LM_DTYPE_I32, B) };
    lm_tensor out[2] = { lm_shape1(LM_DTYPE_I32, B), lm_shape1(LM_DTYPE_F64, B) };
    void *data[7] = { x, seen, n, u, on, token, logprob };
    for (int i = 0; i < 7; i++)
        (i < 5 ? &in[i] : &out[i - 5])->data = data[i];
    assert_int_equal(lm_par_new(&par, 3, &e), LM_OK);
    lm_call c = { &o, in, 5, out, 2, room, par, NULL, NULL };
    assert_true(k->work(&c, 3) <= sizeof room);
    k->run(&c);
    lm_par_free(par);
    for (int b = 0; b < B; b++) {
        double p = 0;
        if (b == 2) {
            assert_int_equal(token[b], -7);
            continue;
        }
        assert_int_equal(token[b], choose(&o, x + b * V, seen + 3 * b, n[b], u[b], &p));
        assert_true(p == logprob[b]);
    }
}

static void draws_are_counted(void **state)
{
    (void)state;
    for (int64_t i = 0; i < 100; i++) {
        double u = lm_sample_draw(7, 3, 0, i);
        assert_true(u >= 0 && u < 1);
        assert_true(u == lm_sample_draw(7, 3, 0, i));
        assert_true(u != lm_sample_draw(7, 4, 0, i));
        assert_true(u != lm_sample_draw(8, 3, 0, i));
        assert_true(u != lm_sample_draw(7, 3, 0, i + 1));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_first_of_the_largest),
        cmocka_unit_test(nan_gives_no_token),
        cmocka_unit_test(plain_sampling_follows_the_softmax),
        cmocka_unit_test(limits_keep_the_likeliest),
        cmocka_unit_test(top_p_is_a_share_of_what_top_k_left),
        cmocka_unit_test(the_penalty_counts_each_token_once),
        cmocka_unit_test(the_probability_is_that_of_the_model),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(draws_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
