/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over coded caches: every format at every level against the definition, the definition against plain
 * attention over the same numbers, and bits that must not depend on the rows beside a row. */
#include "base/cpu.h"
#include "base/par.h"

#include "kv_attention_case.h"

static lm_par *pool[4];

static void run(trial *t, const lm_kernel *k, int threads)
{
    size_t bytes = k->work ? k->work(&t->call, threads) : 0;
    lm_err e = { 0 };
    if (!pool[threads])
        assert_int_equal(lm_par_new(&pool[threads], threads, &e), LM_OK);
    t->call.work = take(bytes + 64);
    memset(t->call.work, 0xff, bytes);
    memset((char *)t->call.work + bytes, 0x5a, 64);
    memset(t->out[0].data, 0xff, lm_stored_bytes(&t->out[0]));
    t->call.par = pool[threads];
    k->run(&t->call);
    for (int i = 0; i < 64; i++)
        assert_int_equal(((char *)t->call.work)[bytes + (size_t)i], 0x5a);
    lm_free(t->call.work);
}

static const lm_kernel *level_kernel(lm_dtype act, lm_cpu_level level)
{
    return lm_cpu_kernel("kv_attention", act, level);
}

static void check(const shape *s, const lm_kv_format *k, const lm_kv_format *v)
{
    for (int low = 0; low < 2; low++) {
        lm_dtype act = low ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        trial t;
        open_trial(&t, s, act, k, v);
        run(&t, level_kernel(act, LM_CPU_REF), 1);
        float *o = results(&t.out[0]), *lse = results(&t.out[1]);
        for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++) {
            void *bits = NULL;
            for (int threads = 1; threads < 4; threads += 2) {
                run(&t, level_kernel(act, (lm_cpu_level)level), threads);
                double d = distance(&t.out[0], o), dl = distance(&t.out[1], lse);
                if (!(d <= (low ? 1e-2 : 2e-6)) || !(dl <= (low ? 1e-3 : 2e-6)))
                    fail_msg("%s %s keys %s values %s D %d T %d: %g, lse %g", lm_dtype_name(act),
                             lm_cpu_level_name(level), k->name, v->name, (int)s->D, (int)s->T, d,
                             dl);
                if (bits)
                    assert_memory_equal(bits, t.out[0].data, lm_stored_bytes(&t.out[0]));
                else
                    memcpy(bits = take(lm_stored_bytes(&t.out[0])), t.out[0].data,
                           lm_stored_bytes(&t.out[0]));
            }
            lm_free(bits);
        }
        lm_free(o);
        lm_free(lse);
        close_trial(&t);
    }
}

static void test_formats(void **state)
{
    (void)state;
    for (int i = 0; i < CALLS; i++) {
        const lm_kv_format *f[2];
        shape s = format_shape(i, f);
        check(&s, f[0], f[1]);
    }
}

/* Sinks that fill pages, whose entries of the table are not read. */
static void test_pages_of_sinks(void **state)
{
    (void)state;
    for (int i = 0; i < N_FORMATS; i++) {
        const lm_kv_format *f = &formats[i];
        int64_t T = f->axis == LM_KV_CHANNEL && f->group > 16 ? 64 : 16 << i % 3;
        shape s = { .B = 3,
                    .H = 4,
                    .K = 2,
                    .D = 64,
                    .T = T,
                    .P = 512 / T,
                    .used = { 350, 290, 405 },
                    .fresh = { 1, 9, 1 },
                    .kind = { 1, 0, 1 },
                    .residual = { T, T },
                    .sinks = { 128, 192 } };
        if (is_plain(f))
            continue;
        check(&s, f, f);
    }
}

/* ---- coded caches against plain ones that hold the same numbers ---- */

/* Row j of a side: plain from its pages or its tail, or decoded from its page. */
static void cached_row(const trial *t, const shape *s, int64_t b, int64_t kv, int side, int64_t j,
                       float *to)
{
    const lm_tensor *pages = &t->in[KEYS + side], *tail = &t->in[KTAIL + side];
    const lm_kv_format *f = pages->kv;
    int64_t sinks = s->sinks[side], residual = s->residual[side], T = s->T;
    int64_t page = ((int32_t *)t->in[TABLE].data)[b * s->P + j / T] * s->K + kv;
    bool in_pages = !f || (j >= sinks && j < lm_kv_coded(f, T, residual, s->used[b]));
    int64_t row = j < sinks || residual == 0 ? j : sinks + j % residual;
    int64_t at = ((s->B - 1 - b) * s->K + kv) * (sinks + residual) + row;
    if (f && in_pages)
        lm_kv_decode(f, T, s->D, kv,
                     (const char *)pages->data + (size_t)page * lm_kv_page_bytes(f, T, s->D), j % T,
                     1, to, s->D);
    for (int64_t d = 0; d < s->D && !(f && in_pages); d++)
        to[d] = (float)(in_pages ? lm_get(pages->dtype, pages->data, (page * T + j % T) * s->D + d)
                                 : lm_get(tail->dtype, tail->data, at * s->D + d));
}

/* The rows of sequence b over a plain cache. */
static lm_tensor plain_output(const trial *t, const shape *s, int64_t b, lm_cpu_level level)
{
    lm_attention_attr a = t->attr.attention;
    lm_dtype act = t->in[QKV].dtype;
    const lm_kernel *k = lm_cpu_kernel("attention_cached", act, level);
    int32_t used = (int32_t)s->used[b], fresh = (int32_t)s->fresh[b];
    int64_t width = (s->H + 2 * s->K) * s->D, room = used + fresh;
    float x[256];
    lm_tensor in[3] = { t->in[QKV], made(LM_DTYPE_I32, 1, (int64_t[]){ 1 }, NULL),
                        made(LM_DTYPE_I32, 1, (int64_t[]){ 1 }, NULL) };
    lm_tensor out[3] = { made(act, 2, (int64_t[]){ fresh, s->H * s->D }, NULL) };
    in[0].data = (char *)in[0].data +
                 (size_t)(((int32_t *)t->in[FIRST].data)[b] * width) * lm_dtype_size(act);
    in[0].dim[0] = fresh;
    memcpy(in[1].data, &used, 4);
    memcpy(in[2].data, &fresh, 4);
    a.batch = 1;
    a.seq = fresh;
    for (int i = 0; i < 2; i++) {
        out[1 + i] = made(act, 4, (int64_t[]){ 1, s->K, room, s->D }, NULL);
        for (int64_t kv = 0; kv < s->K; kv++)
            for (int64_t j = 0; j < used; j++) {
                cached_row(t, s, b, kv, i, j, x);
                for (int64_t d = 0; d < s->D; d++)
                    lm_set(act, out[1 + i].data, (kv * room + j) * s->D + d, x[d]);
            }
    }
    lm_call c = { .attr = &a, .in = in, .n_in = 3, .out = out, .n_out = 3, .par = pool[1] };
    c.work = take(k->work(&c, 1));
    k->run(&c);
    lm_free(c.work);
    for (int i = 1; i < 3; i++) {
        lm_free(out[i].data);
        lm_free(in[i].data);
    }
    return out[0];
}

static void test_plain(void **state)
{
    lm_kv_format f = {
        .name = "whole numbers", .bits = 5, .scale = LM_DTYPE_NONE, .constant = 0.25
    };
    shape s = { .B = 2,
                .H = 4,
                .K = 2,
                .D = 32,
                .T = 16,
                .P = 4,
                .used = { 37, 8 },
                .fresh = { 5, 1 },
                .kind = { 0, 1 },
                .sinks = { 3, 3 },
                .residual = { 6, 6 },
                .window = 30 };
    trial t;
    (void)state;
    open_trial(&t, &s, LM_DTYPE_F32, &f, &f);
    run(&t, level_kernel(LM_DTYPE_F32, LM_CPU_REF), 1);
    for (int64_t b = 0; b < 2; b++) { /* each sequence alone, in a plain cache */
        int64_t at = ((int32_t *)t.in[FIRST].data)[b];
        lm_tensor o = plain_output(&t, &s, b, LM_CPU_REF);
        assert_true(distance(&o, (float *)t.out[0].data + at * s.H * s.D) < 1e-6);
        lm_free(o.data);
    }
    close_trial(&t);
}

/* Rows of a prompt have the bits of those behind a plain cache with the same numbers, in F32 and where tiles round
 * the numbers to BF16. */
static void test_prompt(void **state)
{
    static const char *const names[] = { "int8", "int6",         "int4",  "kivi", "channel 4",
                                         "e5m2", "int8 channel", "heads", "plain" };
    (void)state;
    for (int i = 0; i < 2 * N_FORMATS; i++) {
        const lm_kv_format *f = &formats[i / 2];
        lm_dtype act = i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        bool named = false;
        for (size_t n = 0; n < sizeof names / sizeof *names; n++)
            named |= !strcmp(names[n], f->name);
        shape s = { .B = 2,
                    .H = 6,
                    .K = 2,
                    .D = i / 2 % 2 ? 64 : 96,
                    .T = 64,
                    .P = 6,
                    .used = { 299, 70 },
                    .fresh = { 40, 9 },
                    .residual = { 64, 64 },
                    .sinks = { i / 2 % 3 ? 0 : 64, i / 2 % 3 ? 0 : 64 },
                    .window = i / 2 % 4 == 2 ? 100 : 0,
                    .soft_cap = i / 2 % 4 == 3 ? 3 : 0 };
        trial t;
        if (!named)
            continue;
        if (is_plain(f))
            memset(s.residual, 0, sizeof s.residual);
        if (is_plain(f))
            memset(s.sinks, 0, sizeof s.sinks);
        open_trial(&t, &s, act, f, f);
        for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++) {
            if (act == LM_DTYPE_BF16 && level < LM_CPU_AMX)
                continue;
            run(&t, level_kernel(act, (lm_cpu_level)level), 1);
            for (int64_t b = 0; b < 2; b++) {
                lm_tensor o = plain_output(&t, &s, b, (lm_cpu_level)level);
                size_t row = (size_t)(s.H * s.D) * lm_dtype_size(act);
                assert_memory_equal((char *)t.out[0].data +
                                        (size_t)((int32_t *)t.in[FIRST].data)[b] * row,
                                    o.data, lm_stored_bytes(&o));
                lm_free(o.data);
            }
        }
        close_trial(&t);
    }
}

/* ---- keys that are stored before their rotation ---- */

/* The cached keys of a plain side, rotated by the operator rope. */
static void rotate_cache(trial *t, const shape *s)
{
    lm_rope_attr attr = { 0, s->K, s->D, s->rotary, false };
    int32_t *table = t->in[TABLE].data, *place = t->in[PLACE].data, pos;
    lm_tensor x = made(LM_DTYPE_F32, 2, (int64_t[]){ 1, 2 * s->D }, NULL);
    lm_tensor in[3] = { x,
                        { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 }, .data = &pos },
                        t->in[ROPE] };
    lm_call c = { .attr = &attr, .in = in, .n_in = 3, .out = &x, .n_out = 1, .par = pool[1] };
    attr.kv_heads = 1;
    for (int64_t b = 0; b < s->B; b++)
        for (int64_t i = 0; i < s->used[b] * s->K; i++) {
            int64_t j = i / s->K, page = table[b * s->P + j / s->T] * s->K + i % s->K;
            float *row = (float *)t->in[KEYS].data + (page * s->T + j % s->T) * s->D;
            pos = place[b * s->P * s->T + j];
            memcpy(x.data, row, (size_t)s->D * sizeof *row);
            lm_cpu_kernel("rope", LM_DTYPE_F32, LM_CPU_REF)->run(&c);
            memcpy(row, x.data, (size_t)s->D * sizeof *row);
        }
    lm_free(x.data);
}

static void test_rotation(void **state)
{
    static const int64_t rotary[] = { 64, 32, 16, 2 };
    (void)state;
    for (int i = 0; i < 8; i++) {
        shape s = { .B = 2,
                    .H = 4,
                    .K = 2,
                    .D = 64,
                    .T = 16,
                    .P = 12,
                    .used = { 170, 40 },
                    .fresh = { 1, 9 },
                    .kind = { 1, 0 },
                    .window = i % 2 ? 100 : 0,
                    .rotary = rotary[i / 2] };
        lm_kv_format plain = { .name = "plain" };
        for (int level = LM_CPU_REF; level <= (int)lm_cpu_detect(); level++) {
            trial t;
            open_trial(&t, &s, LM_DTYPE_F32, &plain, &plain);
            run(&t, level_kernel(LM_DTYPE_F32, (lm_cpu_level)level), 1);
            float *o = results(&t.out[0]);
            rotate_cache(&t, &s);
            lm_free(t.in[ROPE].data);
            lm_free(t.in[PLACE].data);
            t.in[ROPE] = t.in[PLACE] = (lm_tensor){ 0 };
            run(&t, level_kernel(LM_DTYPE_F32, (lm_cpu_level)level), 1);
            double d = distance(&t.out[0], o);
            if (!(d <= 1e-6))
                fail_msg("%s R %d: %g", lm_cpu_level_name(level), (int)s.rotary, d);
            lm_free(o);
            close_trial(&t);
        }
    }
}

/* ---- half of the weight on one key, the rest spread over all others ---- */

static void test_sharp(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        const lm_kv_format *f = &formats[i == 0   ? 0
                                         : i == 1 ? 5
                                         : i == 2 ? 6
                                         : i == 3 ? 11
                                         : i == 4 ? 2
                                                  : 9];
        shape s = { .B = 1,
                    .H = 3,
                    .K = 1,
                    .D = 64,
                    .T = 64,
                    .P = 8,
                    .used = { 448 },
                    .fresh = { 1 },
                    .kind = { 1 },
                    .residual = { lm_kv_step(f, 64) > 1 ? 64 : 0,
                                  lm_kv_step(f, 64) > 1 ? 64 : 0 } };
        float x[64 * 64];
        trial t;
        open_trial(&t, &s, LM_DTYPE_BF16, f, f);
        for (int64_t k = 0; k < 3 * 64; k++)
            lm_set(LM_DTYPE_BF16, t.in[QKV].data, k, 1);
        for (int64_t k = 3 * 64; k < 4 * 64; k++)
            lm_set(LM_DTYPE_BF16, t.in[QKV].data, k, 0);
        for (int p = 0; p < 8; p++) {
            for (int k = 0; k < 64 * 64; k++)
                x[k] = p == 3 && k / 64 == 20 ? 6.0f / 8 : 0;
            lm_kv_encode(&t.format[0], 64, 64, 0, x, 64, 0, 64, NULL,
                         (char *)t.in[KEYS].data +
                             (size_t)p * lm_kv_page_bytes(&t.format[0], 64, 64));
        }
        run(&t, level_kernel(LM_DTYPE_BF16, LM_CPU_REF), 1);
        float *o = results(&t.out[0]);
        for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++) {
            run(&t, level_kernel(LM_DTYPE_BF16, (lm_cpu_level)level), 1);
            double d = distance(&t.out[0], o);
            if (!(d <= 1e-2))
                fail_msg("%s %s: %g", f->name, lm_cpu_level_name(level), d);
        }
        lm_free(o);
        close_trial(&t);
    }
}

/* ---- sums of whole numbers are exact: with dot products of bytes and with tiles the bits are the same ---- */

static void test_whole(void **state)
{
    static const char *const names[] = {
        "int8", "int8 asym", "int4",   "int4 head",   "int3",
        "int2", "kivi",      "iq4_nl", "k4 balanced", "channel 4"
    };
    (void)state;
    if (lm_cpu_detect() < LM_CPU_AMX || !lm_cpu_has_vnni())
        skip();
    for (int i = 0; i < N_FORMATS; i++) {
        const lm_kv_format *f = &formats[i];
        bool named = false;
        for (size_t n = 0; n < sizeof names / sizeof *names; n++)
            named |= !strcmp(names[n], f->name);
        for (int64_t rows = 1; named && rows < 13; rows += rows < 3 ? 1 : 3) {
            shape s = { .B = 2,
                        .K = 2,
                        .D = i % 2 ? 64 : 80,
                        .H = 2 * rows,
                        .T = 64,
                        .P = 9,
                        .used = { 576, 200 },
                        .fresh = { 1, 1 },
                        .kind = { 1, 1 },
                        .window = i % 3 ? 0 : 300 };
            trial t;
            for (int side = 0; side < 2; side++)
                s.residual[side] = lm_kv_step(f, s.T) > 1 ? 64 : 0;
            open_trial(&t, &s, LM_DTYPE_BF16, f, f);
            run(&t, level_kernel(LM_DTYPE_BF16, LM_CPU_AVX512), 1);
            size_t bytes = lm_stored_bytes(&t.out[0]);
            char *o = take(bytes);
            memcpy(o, t.out[0].data, bytes);
            run(&t, level_kernel(LM_DTYPE_BF16, LM_CPU_AMX), 1);
            assert_memory_equal(o, t.out[0].data, bytes);
            lm_free(o);
            close_trial(&t);
        }
    }
}

/* ---- rows do not depend on the rows beside them, or on tokens that are not theirs ---- */

static void test_alone(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        lm_dtype act = i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        const lm_kv_format *f = &formats[i / 2 == 0 ? 0 : i / 2 == 1 ? 5 : i / 2 == 2 ? 13 : 9];
        shape s = { .B = 3,
                    .H = 8,
                    .K = 2,
                    .D = 64,
                    .T = 64,
                    .P = 8,
                    .used = { 130, 300, 420 },
                    .fresh = { 40, 1, 1 },
                    .kind = { 0, 1, 1 },
                    .residual = { 64, 64 } };
        trial t;
        for (int level = LM_CPU_REF; level <= (int)lm_cpu_detect(); level++) {
            const lm_kernel *k = level_kernel(act, (lm_cpu_level)level);
            open_trial(&t, &s, act, f, f);
            run(&t, k, 1);
            size_t bytes = lm_stored_bytes(&t.out[0]), row = (size_t)(8 * 64) * lm_dtype_size(act);
            char *all = take(bytes);
            memcpy(all, t.out[0].data, bytes);
            /* what lies behind the tokens of the last page is not read as a number */
            for (int64_t b = 0; b < 3; b++)
                for (int64_t kv = 0; kv < 2; kv++)
                    for (int64_t j = s.used[b] - 64; j < (s.used[b] + 63) / 64 * 64; j++) {
                        float nan[64];
                        int64_t page = ((int32_t *)t.in[TABLE].data)[b * s.P + j / 64];
                        for (int d = 0; d < 64; d++)
                            nan[d] = NAN;
                        for (int side = 0; side < 2 && page >= 0; side++)
                            lm_kv_encode(&t.format[side], 64, 64, kv, nan, 64, j % 64, 1, NULL,
                                         (char *)t.in[KEYS + side].data +
                                             (size_t)(page * 2 + kv) *
                                                 lm_kv_page_bytes(&t.format[side], 64, 64));
                    }
            run(&t, k, 1);
            assert_memory_equal(all, t.out[0].data, bytes);
            /* the same without the sequences beside it */
            int32_t *fresh = t.in[FRESH].data;
            fresh[0] = fresh[2] = 0;
            run(&t, k, 3);
            assert_memory_equal(all + 40 * row, (char *)t.out[0].data + 40 * row, row);
            for (int32_t n = 3; n < 40; n += 16) { /* fewer rows of the prompt */
                fresh[0] = n;
                run(&t, k, 1);
                assert_memory_equal(all, t.out[0].data, (size_t)n * row);
            }
            close_trial(&t);
            lm_free(all);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),  cmocka_unit_test(test_pages_of_sinks),
        cmocka_unit_test(test_plain),    cmocka_unit_test(test_prompt),
        cmocka_unit_test(test_rotation), cmocka_unit_test(test_sharp),
        cmocka_unit_test(test_whole),    cmocka_unit_test(test_alone),
    };
    fill_ranges();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 0; i < 4; i++)
        lm_par_free(pool[i]);
    return failed;
}
