/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA kernel that samples tokens against the reference on the same numbers. */
#include "base/rng.h"
#include "sample_case.h"

/* ---- random rows ---- */

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
    for (int64_t i = 0; i < b->seen_pitch; i++) /* some occur twice, some do not exist */
        b->seen[row * b->seen_pitch + i] =
            (int32_t)lm_rng_below(r, base + 3 + (uint64_t)i, (uint64_t)b->vocab + 2) - 1;
}

static void pick_options(lm_sample_attr *o, int64_t vocab, lm_rng r)
{
    static const double warm[] = { 1, 0.7, 0, 2.5, 30 }, top[] = { 0.9, 0.5, 0.99, 0, 1 - 1e-13 };
    static const double min[] = { 0.05, 0.5, 1, 1.5, 1e-9 };
    o->temperature = warm[lm_rng_below(r, 0, 5)];
    o->top_k = lm_rng_below(r, 1, 2) ? 1 + (int64_t)lm_rng_below(r, 2, (uint64_t)vocab + 3) : 0;
    if (lm_rng_below(r, 3, 3) == 0) /* small, as usual */
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

/* Every limit alone, at a boundary between equal weights, and with u at which sums are exact. */
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

/* Two different weights, with more tokens of the larger one than are ranked in one pass: a limit
 * just above their sum also takes the first token with the smaller weight. */
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

/* For u near 1, u times the sum rounds to the sum: the last token with a weight is chosen. */
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

/* ---- rows that many blocks share ---- */

/* Approximately normal logits; ids that were seen are among the likely ones and in all
 * stretches. */
static void fill_wide(batch *b, uint64_t seed)
{
    lm_rng r = lm_rng_make(seed, "wide rows", 0);
    for (int64_t i = 0; i < b->rows * b->vocab; i++) {
        uint64_t x = lm_rng_u64(r, (uint64_t)i);
        int64_t sum = (int64_t)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48));
        b->logits[i] = (float)(sum - 2 * 65535) / 8192;
    }
    r = lm_rng_make(seed, "draws", 0);
    for (int64_t i = 0; i < b->rows; i++) {
        b->u[i] = lm_rng_uniform(r, (uint64_t)i);
        b->n_seen[i] = (int32_t)b->seen_pitch;
        for (int64_t k = 0; k < b->seen_pitch; k++) {
            uint64_t at = (uint64_t)(b->rows + i * b->seen_pitch + k);
            b->seen[i * b->seen_pitch + k] = (int32_t)lm_rng_below(r, at, (uint64_t)b->vocab);
        }
    }
}

/* Usual limits, and wide ones. */
static const lm_sample_attr usual[] = {
    { 0.8, 50, 0.95, 0, 1.1 }, { 1, 0, 1, 0, 1 },        { 0, 0, 1, 0, 1.3 },
    { 1, 0, 0.9, 0, 1 },       { 0.7, 0, 1, 0.05, 1.2 }, { 2, 40, 1, 0, 1 },
    { 1, 0, 0.5, 0.3, 1 },     { 0, 0, 1, 0, 1 },        { 30, 20, 1, 0, 1 },
    { 1.5, 0, 0.3, 0, 1.1 },   { 1, 1, 1, 0, 1 },        { 4, 200, 0.9, 0.2, 1 },
};
enum { N_USUAL = sizeof usual / sizeof *usual };

static void vocabularies_of_models(void **state)
{
    static const int64_t vocab[] = { 50257, 128256, 262144 }, rows[] = { 1, 2, 8, 1, 2 };
    int at = 0;
    (void)state;
    for (int v = 0; v < 3; v++)
        for (int k = 0; k < 5; k++, at += 5) {
            batch b = new_batch(rows[k], vocab[v], 30);
            fill_wide(&b, (uint64_t)(v * 9 + k));
            b.o = usual[at % N_USUAL];
            emu_order(k % 3);
            assert_int_equal(check(&b), rows[k]);
            free_batch(&b);
        }
    emu_order(0);
}

/* All options on rows of several stretches, the last a ragged one. */
static void all_limits_over_stretches(void **state)
{
    (void)state;
    for (int k = 0; k < 2 * N_USUAL; k++) {
        batch b = new_batch(1 + k % 3, 9000 + 131 * k, 700);
        fill_wide(&b, 100 + (uint64_t)k);
        for (int64_t i = 0; i < b.rows * b.vocab && k % 4 == 1; i++)
            b.logits[i] = rintf(b.logits[i] * 4) / 4; /* ties */
        b.o = usual[k % N_USUAL];
        emu_order(k % 3);
        assert_int_equal(check(&b), b.rows);
        free_batch(&b);
    }
    emu_order(0);
}

/* Rows so flat that a coarse histogram of the weights does not separate a small group. */
static void flat_rows(void **state)
{
    static const double flat[] = { 1e-2, 1e-6, 1e-9, 0 };
    (void)state;
    for (int k = 0; k < 8; k++) {
        batch b = new_batch(1, 5000, 1);
        fill_wide(&b, 200 + (uint64_t)k);
        for (int64_t i = 0; i < b.vocab; i++)
            b.logits[i] *= (float)flat[k / 2];
        b.o.top_k = k % 2 ? 0 : 11;
        b.o.top_p = k % 2 ? 0.004 : 1;
        assert_int_equal(check(&b), 1);
        free_batch(&b);
    }
}

/* An unusable number at the beginning or the end of a row does not affect other rows. */
static void unusable_logits_anywhere(void **state)
{
    enum { V = 6011, ROWS = 8 };
    (void)state;
    for (int k = 0; k < 3; k++) {
        batch b = new_batch(ROWS, V, 1);
        fill_wide(&b, 300);
        b.logits[1 * V + V - 1] = NAN;
        b.logits[2 * V] = NAN;
        b.logits[3 * V + V - 1] = INFINITY;
        b.logits[4 * V + 2048] = INFINITY;
        for (int64_t i = 0; i < V; i++) {
            b.logits[5 * V + i] = -INFINITY;
            b.logits[6 * V + i] = i == V - 1 ? -3e38f : -INFINITY;
        }
        b.on[7] = 0;
        b.o = usual[k];
        emu_order(k);
        assert_int_equal(check(&b), 2);
        for (int i = 1; i < 6; i++)
            assert_int_equal(b.token[i], -1);
        assert_int_equal(b.token[6], V - 1);
        assert_int_equal(b.token[7], -7);
        free_batch(&b);
    }
    emu_order(0);
}

static void only_inactive_rows(void **state)
{
    batch b = new_batch(3, 5000, 1);
    (void)state;
    fill_wide(&b, 400);
    for (int i = 0; i < 3; i++)
        b.on[i] = 0;
    assert_int_equal(check(&b), 0);
    free_batch(&b);
}

/* Ids at the borders of tiles and stretches, repeated ids, and ids that do not exist. */
static void seen_ids_at_borders(void **state)
{
    enum { V = 4500 };
    static const int32_t ids[] = { 0,    127,  128, 2047, 2048, 4095,   4096,     4499,
                                   2048, 4500, -1,  4499, 5000, 100000, INT32_MIN };
    enum { N = sizeof ids / sizeof *ids };
    (void)state;
    for (int k = 0; k < N; k++) {
        batch b = new_batch(1, V, N + 1);
        for (int i = 0; i < V; i++)
            b.logits[i] = -1;
        for (int i = 0; i < N; i++)
            if (ids[i] >= 0 && ids[i] < V)
                b.logits[ids[i]] = 4 - (float)i / 16;
        memcpy(b.seen, ids, sizeof ids);
        b.n_seen[0] = k;
        b.o.temperature = k % 2;
        b.o.repetition_penalty = 5;
        b.u[0] = 0.3;
        assert_int_equal(check(&b), 1);
        free_batch(&b);
    }
}

/* A row has the same bits alone and among others, where it has fewer blocks, and in any order of
 * blocks. */
static void rows_are_independent(void **state)
{
    enum { V = 20000, ROWS = 9, AT = 6 };
    (void)state;
    for (int k = 0; k < N_USUAL; k += 2) {
        batch all = new_batch(ROWS, V, 3), one = new_batch(1, V, 3);
        int orders;
        fill_wide(&all, 500 + (uint64_t)k);
        memcpy(one.logits, all.logits + AT * V, V * sizeof *one.logits);
        memcpy(one.seen, all.seen + AT * 3, 3 * sizeof *one.seen);
        one.u[0] = all.u[AT];
        one.n_seen[0] = all.n_seen[AT];
        all.o = one.o = usual[k];
        check(&all);
        orders = emu_order(0);
        for (int order = 0; order < orders; order++) {
            emu_order(order);
            run_device(&one);
            assert_int_equal(one.token[0], all.token[AT]);
            assert_memory_equal(one.logprob, all.logprob + AT, sizeof *one.logprob);
        }
        emu_order(0);
        free_batch(&all);
        free_batch(&one);
    }
}

/* Recorded once and replayed on other numbers; launches are counted under the emulation. */
static void replays(void **state)
{
    void (*counts)(uint64_t *, uint64_t *) = NULL;
    (void)state;
    *(void **)&counts = emu_symbol("lm_emu_counts");
    for (int k = 0; k < 3; k++) {
        batch b = new_batch(3, 10000, 5), want;
        placed p;
        lm_recording *r = NULL;
        lm_err e = { 0 };
        b.o = usual[k];
        place(&b, &p);
        must(device->record_begin(device, device->main, &e), &e);
        p.k->run(&p.c);
        must(device->record_end(device, device->main, &r, &e), &e);
        for (int round = 0; round < 3; round++) {
            uint64_t before = 0, after = 0, switches;
            fill_wide(&b, (uint64_t)(600 + 3 * k + round));
            b.on[round] = 0;
            bring(&b, &p, 0, N_OPERANDS, false);
            if (counts)
                counts(&before, &switches);
            must(device->replay(device, r, device->main, &e), &e);
            must(device->sync(device, NULL, &e), &e);
            if (counts) {
                counts(&after, &switches);
                assert_int_equal(after - before, b.o.temperature > 0 ? 2 : 1);
            }
            run_reference(&b, &want);
            bring(&b, &p, 5, N_OPERANDS, true);
            compare(&b, &want);
            lm_free(want.token);
            lm_free(want.logprob);
            check_tickets();
        }
        device->recording_free(device, r);
        take_away(&p);
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
        cmocka_unit_test(vocabularies_of_models),
        cmocka_unit_test(all_limits_over_stretches),
        cmocka_unit_test(flat_rows),
        cmocka_unit_test(unusable_logits_anywhere),
        cmocka_unit_test(only_inactive_rows),
        cmocka_unit_test(seen_ids_at_borders),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(replays),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
