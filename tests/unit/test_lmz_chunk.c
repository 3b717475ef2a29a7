/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks of .lmz files: every kind and shape of data is restored, the same bytes on every
 * processor, never larger than the limit; damaged chunks never cause accesses outside the
 * buffers. */
#include <malloc.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "format/lmz_chunk.h"

enum data { NORMAL, CONSTANT, UNIFORM, SPIKES, NANS, SPARSE, ROWS, DATA_KINDS };
static const size_t counts[] = { 0, 1, 3, 255, 256, 4095, 4096, 4099, 30001 };
enum { N_COUNTS = sizeof counts / sizeof *counts, FULL = LM_LMZ_CHUNK };

static const lm_dtype type_of[LM_LMZ_KINDS] = { LM_DTYPE_U8,     LM_DTYPE_U8,    LM_DTYPE_I16,
                                                LM_DTYPE_I32,    LM_DTYPE_I64,   LM_DTYPE_BF16,
                                                LM_DTYPE_F16,    LM_DTYPE_F32,   LM_DTYPE_F64,
                                                LM_DTYPE_F8E4M3, LM_DTYPE_F8E5M2 };

static uint64_t word(uint64_t i)
{
    return lm_rng_u64(lm_rng_make(7, "chunk", 0), i);
}

/* Normal numbers from a pool, because drawing each would take longer than the tests. */
static double normal(uint64_t w)
{
    enum { POOL = 8191 };
    static double pool[POOL];
    if (!pool[0])
        for (uint64_t i = 0; i < POOL; i++)
            pool[i] = lm_rng_normal(lm_rng_make(1, "pool", 0), i);
    return pool[w % POOL];
}

/* AMX adds no kernels here. */
static lm_cpu_level top_level(void)
{
    return lm_cpu_detect() < LM_CPU_AVX512 ? lm_cpu_detect() : LM_CPU_AVX512;
}

/* n elements of the kind in an allocation of exactly that size: ASan detects accesses beyond it. */
static uint8_t *make(lm_lmz_kind kind, enum data data, size_t n, uint64_t seed)
{
    static const uint64_t nans[] = { 0x8000000000000000, 0x7ff0000000000001, 0xfff8000000000123,
                                     0x7fc0000180008001, 0xffffffffffffffff, 0x0000000100010001 };
    size_t size = lm_lmz_kind_size(kind);
    uint8_t *x = malloc(n * size + 1);
    bool real = lm_dtype_is_float(type_of[kind]);
    for (size_t i = 0; i < n; i++) {
        uint64_t u = 0, w = word(i + (seed << 40));
        double v = normal(w >> 20);
        if (data == NORMAL || data == SPARSE || data == ROWS)
            lm_set(type_of[kind], &u, 0, real ? 0.02 * v : floor(30 + 10 * v));
        if (data == SPARSE && w % 20)
            u = 0;
        else if (data == CONSTANT)
            u = 0x3c3d3e3f40414243;
        else if (data == UNIFORM)
            u = w;
        else if (data == SPIKES)
            u = w % 1000 ? 0 : w >> 7;
        else if (data == NANS)
            u = nans[w % 6] >> (w % 3 ? 0 : 64 - 8 * size);
        memcpy(x + i * size, &u, size);
        if (data == ROWS && i >= 333)
            memcpy(x + i * size, x + (i - 333) * size, size);
    }
    return x;
}

static lm_lmz_coder *coder(int level, lm_cpu_level cpu)
{
    static lm_lmz_coder *made[20][LM_CPU_AMX + 1];
    lm_err e = { 0 };
    if (!made[level][cpu])
        assert_int_equal(lm_lmz_coder_new(level, cpu, &made[level][cpu], &e), 0);
    return made[level][cpu];
}

static size_t encode(lm_lmz_coder *c, lm_lmz_kind kind, const void *x, size_t raw, const void *base,
                     uint8_t *out)
{
    size_t len = 0;
    lm_err e = { 0 };
    assert_int_equal(lm_lmz_encode(c, kind, x, raw, base, out, lm_lmz_chunk_bound(raw), &len, &e),
                     0);
    assert_true(len <= raw + 1);
    return len;
}

/* Encode and decode on every processor level, and check the chunk's description. */
static size_t round_trip(int level, lm_lmz_kind kind, const uint8_t *x, size_t raw,
                         const uint8_t *base)
{
    uint8_t *first = malloc(lm_lmz_chunk_bound(raw)), *out = malloc(lm_lmz_chunk_bound(raw));
    uint8_t *back = malloc(raw + 1), *exact;
    size_t len = encode(coder(level, LM_CPU_REF), kind, x, raw, base, first), sum = 0;
    lm_lmz_chunk_info info;
    lm_err e = { 0 };
    exact = malloc(len);
    memcpy(exact, first, len);
    for (lm_cpu_level cpu = LM_CPU_REF; cpu <= top_level(); cpu++) {
        lm_lmz_coder *c = coder(level, cpu);
        assert_int_equal(encode(c, kind, x, raw, base, out), len);
        assert_memory_equal(out, first, len);
        memset(back, 0xa5, raw + 1);
        if (lm_lmz_decode(c, kind, exact, len, base, back, raw, &e))
            fail_msg("kind %d, %zu bytes: %s", kind, raw, e.what);
        if (raw)
            assert_memory_equal(back, x, raw);
        assert_int_equal(back[raw], 0xa5);
    }
    assert_int_equal(lm_lmz_chunk_look(kind, exact, len, raw, &info, &e), 0);
    for (int k = 0; k < info.n; k++)
        sum += info.plane[k].coded;
    assert_int_equal(len, first[0] & 0x80 ? 1 + sum
                          : first[0] == 4 ? 6 + sum
                                          : 1 + 4 * (size_t)info.n + sum);
    free(first), free(out), free(back), free(exact);
    return len;
}

static void every_kind_of_data_is_restored(void **state)
{
    (void)state;
    for (lm_lmz_kind kind = 0; kind < LM_LMZ_KINDS; kind++) {
        for (int d = 0; d < DATA_KINDS; d++) {
            for (int i = 0; i < N_COUNTS; i++) {
                uint8_t *x = make(kind, (enum data)d, counts[i], 1);
                round_trip(3, kind, x, counts[i] * lm_lmz_kind_size(kind), NULL);
                free(x);
            }
        }
    }
}

static void full_chunks_of_every_kind(void **state)
{
    (void)state;
    for (lm_lmz_kind kind = 0; kind < LM_LMZ_KINDS; kind++) {
        uint8_t *x = make(kind, NORMAL, FULL / lm_lmz_kind_size(kind), 1);
        round_trip(1, kind, x, FULL, NULL);
        free(x);
        x = make(kind, UNIFORM, FULL / lm_lmz_kind_size(kind), 1);
        assert_true(round_trip(1, kind, x, FULL, NULL) <= FULL + FULL / 1000);
        free(x);
    }
}

static void high_levels_are_not_larger(void **state)
{
    (void)state;
    for (lm_lmz_kind kind = 0; kind < LM_LMZ_KINDS; kind++) {
        for (int d = 0; d < DATA_KINDS; d++) {
            uint8_t *x = make(kind, (enum data)d, 20000, 1);
            size_t raw = 20000 * lm_lmz_kind_size(kind);
            size_t low = round_trip(3, kind, x, raw, NULL);
            assert_true(round_trip(12, kind, x, raw, NULL) <= low + low / 50 + 32);
            free(x);
        }
    }
}

/* A neighbour: most elements moved by a few units in the last place. */
static uint8_t *moved(lm_lmz_kind kind, const uint8_t *x, size_t n)
{
    size_t size = lm_lmz_kind_size(kind);
    uint8_t *y = malloc(n * size + 1);
    for (size_t i = 0; i < n; i++) {
        uint64_t u = 0;
        memcpy(&u, x + i * size, size);
        u += word(i) % 7 - 3;
        memcpy(y + i * size, &u, size);
    }
    return y;
}

static void differences_are_restored_and_smaller(void **state)
{
    (void)state;
    for (lm_lmz_kind kind = 0; kind < LM_LMZ_KINDS; kind++) {
        for (int d = 0; d < DATA_KINDS; d++) {
            for (int i = 1; i < N_COUNTS; i++) {
                uint8_t *x = make(kind, (enum data)d, counts[i], 1), *y = moved(kind, x, counts[i]);
                size_t raw = counts[i] * lm_lmz_kind_size(kind);
                size_t plain = round_trip(3, kind, y, raw, NULL);
                size_t delta = round_trip(3, kind, y, raw, x);
                if (counts[i] > 4000 && d == NORMAL)
                    assert_true(delta < plain);
                free(x), free(y);
            }
        }
    }
}

/* With an unrelated base the chunk is not stored as a difference. */
static void unrelated_base_is_not_used(void **state)
{
    (void)state;
    uint8_t *x = make(LM_LMZ_BF16, NORMAL, 100000, 1), *y = make(LM_LMZ_BF16, UNIFORM, 100000, 2);
    assert_int_equal(round_trip(3, LM_LMZ_BF16, x, 200000, y),
                     round_trip(3, LM_LMZ_BF16, x, 200000, NULL));
    free(x), free(y);
}

/* The entropy of exponents and mantissas is 65.4 %, of exponents and eight bits more 65.9; codes of
 * whole bits add 0.3 to either. */
static void normal_bf16_reaches_its_bound(void **state)
{
    (void)state;
    uint8_t *x = make(LM_LMZ_BF16, NORMAL, FULL / 2, 5);
    size_t joint = round_trip(3, LM_LMZ_BF16, x, FULL, NULL);
    size_t planes = round_trip(1, LM_LMZ_BF16, x, FULL, NULL);
    assert_true((double)joint < 0.658 * FULL);
    assert_true((double)planes < 0.664 * FULL && (double)planes > 0.66 * FULL);
    free(x);
}

/* Exponents from one end to the other: most are escapes, or there are none; zeros, infinities and
 * every NaN among them; and small chunks, for which the head of the code counts. */
static void joint_pairs_of_any_exponents(void **state)
{
    (void)state;
    for (int far = 0; far < 4; far++) {
        for (size_t n = 1; n < 70000; n = n * 3 + 1) {
            uint8_t *x = make(LM_LMZ_BF16, NORMAL, n, 9);
            for (size_t i = 0; i < n; i++) {
                uint64_t w = word(i + 77);
                uint16_t odd = far == 0   ? (uint16_t)(w >> 5)
                               : far == 1 ? (uint16_t)(0x7f80 | w >> 50)
                               : far == 2 ? (uint16_t)(w >> 63 << 15 | (w >> 9 & 0xff))
                                          : 0;
                if (far ? w % 40 == 0 : w % 2 == 0)
                    memcpy(x + 2 * i, &odd, 2);
            }
            round_trip(3, LM_LMZ_BF16, x, 2 * n, NULL);
            assert_true(round_trip(10, LM_LMZ_BF16, x, 2 * n, NULL) <=
                        round_trip(1, LM_LMZ_BF16, x, 2 * n, NULL));
            free(x);
        }
    }
}

/* The previous content of a coder's memory does not change the bytes. */
static void old_memory_changes_nothing(void **state)
{
    static const size_t sizes[] = { 4000, 100000, FULL };
    lm_lmz_coder *dirty[2];
    lm_err e = { 0 };
    (void)state;
    mallopt(M_MMAP_THRESHOLD, 30000000); /* fresh pages would be zeros */
    for (int k = 0; k < 2; k++) {
        mallopt(M_PERTURB, k ? 0xa5 : 0xff); /* 0x5a; zeros */
        assert_int_equal(lm_lmz_coder_new(3, lm_cpu_detect(), &dirty[k], &e), 0);
    }
    mallopt(M_PERTURB, 0);
    for (lm_lmz_kind kind = 0; kind < LM_LMZ_KINDS; kind++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            uint8_t *x = make(kind, NORMAL, sizes[i] / lm_lmz_kind_size(kind), 3);
            uint8_t *out[2] = { malloc(lm_lmz_chunk_bound(sizes[i])),
                                malloc(lm_lmz_chunk_bound(sizes[i])) };
            size_t len = encode(dirty[0], kind, x, sizes[i], NULL, out[0]);
            assert_int_equal(encode(dirty[1], kind, x, sizes[i], NULL, out[1]), len);
            assert_memory_equal(out[0], out[1], len);
            free(x), free(out[0]), free(out[1]);
        }
    }
    lm_lmz_coder_free(dirty[0]);
    lm_lmz_coder_free(dirty[1]);
}

/* The description of a stored chunk has no other field than "stored". */
static void stored_chunks_are_raw(void **state)
{
    static const uint8_t stored[5] = { 0x80, 1, 2, 3, 4 };
    lm_lmz_chunk_info info;
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_lmz_chunk_look(LM_LMZ_BF16, stored, 5, 4, &info, &e), 0);
    assert_true(info.n == 1 && !strcmp(info.plane[0].coding, "raw") && info.plane[0].coded == 4);
}

/* Mantissas that look random would be stored raw; if they repeat, zstd still compresses them. */
static void repeated_noise_is_compressed(void **state)
{
    enum { ROW = 16384 };
    static const lm_lmz_kind kinds[] = { LM_LMZ_BF16, LM_LMZ_F32, LM_LMZ_U16, LM_LMZ_F8E4M3 };
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        size_t size = lm_lmz_kind_size(kinds[k]), row = ROW * size;
        uint8_t *x = make(kinds[k], kinds[k] == LM_LMZ_F8E4M3 ? UNIFORM : NORMAL, FULL / size, 77);
        if (kinds[k] == LM_LMZ_U16)
            for (size_t i = 0; i < FULL / size; i++)
                x[2 * i] = (uint8_t)(word(i) >> 13);
        size_t once = round_trip(3, kinds[k], x, FULL, NULL);
        for (size_t at = row; at < FULL; at += row)
            memcpy(x + at, x, row);
        size_t again = round_trip(3, kinds[k], x, FULL, NULL);
        assert_true(again < once / 4);
        free(x);
    }
}

/* Nine of ten elements unchanged: in runs, which zstd finds, or anywhere, at about a bit each. */
static void unchanged_elements_cost_little(void **state)
{
    size_t n = FULL / 2;
    uint8_t *base = make(LM_LMZ_BF16, NORMAL, n, 3), *x = malloc(FULL);
    (void)state;
    for (int runs = 0; runs < 2; runs++) {
        memcpy(x, base, FULL);
        for (size_t i = 0; i < n; i++)
            if (runs ? i % 5000 < 500 : word(i) % 10 == 0)
                x[2 * i] ^= (uint8_t)(1 + (word(i) >> 40) % 7);
        size_t len = round_trip(3, LM_LMZ_BF16, x, FULL, base);
        assert_true(runs ? len < FULL / 20 : len < FULL / 12);
    }
    free(base);
    free(x);
}

static void same_values_cost_nothing(void **state)
{
    (void)state;
    for (lm_lmz_kind kind = 0; kind < LM_LMZ_KINDS; kind++) {
        size_t size = lm_lmz_kind_size(kind);
        uint8_t *x = make(kind, CONSTANT, FULL / size, 5);
        assert_int_equal(round_trip(3, kind, x, FULL, NULL), 1 + 5 * size);
        free(x);
        x = make(kind, ROWS, FULL / 4 / size, 5);
        assert_true(round_trip(3, kind, x, FULL / 4, NULL) < FULL / 40);
        assert_int_equal(round_trip(3, kind, x, FULL / 4, x), 1 + 5 * size);
        free(x);
    }
}

/* Flipped bits and short lengths: refused, or other bytes; never an access outside the buffers.
 * zstd can encode a match in several ways, so a flip there may change nothing. */
static void damage_is_contained(void **state)
{
    (void)state;
    static const struct {
        lm_lmz_kind kind;
        enum data data;
        size_t n;
        bool matches;
    } cases[] = { { LM_LMZ_BF16, NORMAL, 300, false },   { LM_LMZ_BF16, NORMAL, 4200, false },
                  { LM_LMZ_BF16, NORMAL, 30001, false }, { LM_LMZ_F32, SPARSE, 4200, true },
                  { LM_LMZ_F8E4M3, NORMAL, 500, false }, { LM_LMZ_BYTES, SPIKES, 900, true },
                  { LM_LMZ_U64, ROWS, 700, true } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t *x = make(cases[i].kind, cases[i].data, cases[i].n, 1);
        size_t raw = cases[i].n * lm_lmz_kind_size(cases[i].kind);
        uint8_t *out = malloc(lm_lmz_chunk_bound(raw)), *back = malloc(raw);
        size_t len = encode(coder(3, LM_CPU_REF), cases[i].kind, x, raw, NULL, out), same = 0;
        size_t step = len < 1000 ? 1 : len < 10000 ? 13 : 811; /* of the large ones some */
        for (size_t bit = 0; bit < 8 * len + len; bit += step) {
            size_t cut = bit < 8 * len ? len : bit - 8 * len;
            uint8_t *bad = malloc(cut ? cut : 1);
            int answer[4];
            memcpy(bad, out, cut);
            if (cut == len)
                bad[bit / 8] ^= (uint8_t)(1 << bit % 8);
            for (lm_cpu_level cpu = LM_CPU_REF; cpu <= top_level(); cpu++) {
                lm_err e = { 0 };
                answer[cpu] =
                    lm_lmz_decode(coder(3, cpu), cases[i].kind, bad, cut, x, back, raw, &e);
                assert_true(answer[cpu] == answer[0]);
                assert_true(answer[cpu] == LM_OK || e.what[0]);
                same += !answer[cpu] && !memcmp(back, x, raw);
            }
            free(bad);
        }
        assert_true(same == 0 || cases[i].matches);
        free(x), free(out), free(back);
    }
}

/* ---- Damaged chunks of exponents and leading bits ---- */

/* Decode on every processor level, which must agree; *back: the elements. */
static int decode_all(const uint8_t *src, size_t len, size_t n, uint8_t *back)
{
    uint8_t *exact = malloc(len + !len);
    int answer = 0;
    memcpy(exact, src, len);
    for (lm_cpu_level cpu = LM_CPU_REF; cpu <= top_level() + (lm_cpu_detect() > top_level());
         cpu++) {
        uint8_t *out = malloc(2 * n);
        lm_err e = { 0 };
        memset(out, 0, 2 * n);
        int code = lm_lmz_decode(coder(3, cpu), LM_LMZ_BF16, exact, len, NULL, out, 2 * n, &e);
        assert_true(!code || e.what[0]);
        assert_true(cpu == LM_CPU_REF || code == answer);
        if (cpu == LM_CPU_REF)
            memcpy(back, out, 2 * n);
        else if (!code)
            assert_memory_equal(back, out, 2 * n);
        answer = code;
        free(out);
    }
    free(exact);
    return answer;
}

/* Five elements by hand: exponents 0 (group 0) and 120 (group 1), m = 2, and the pairs a, b, where
 * bit i of `pairs` says which of them pair i is; a < b, in different rows. */
static int decode_by_hand(uint8_t a, uint8_t b, uint8_t pairs, const uint8_t *list, size_t listed,
                          uint8_t back[10])
{
    uint8_t chunk[80] = { 4, 120, 2, 0, 0, 0, 0, 0, 0x11, 0x11, 1, 2, 3, 0x84, 0x25 };
    size_t at = 15, first = at + 8, count = 0;
    chunk[at + a / 32] |= (uint8_t)((a % 16 + 1) << (a / 16 % 2 * 4));
    chunk[at + b / 32] |= (uint8_t)((b % 16 + 1) << (b / 16 % 2 * 4));
    count = a % 16 + 1u;
    chunk[first + (count - 1) / 2] |= (uint8_t)(1 << (count - 1) % 2 * 4);
    count += b % 16 + 1u;
    chunk[first + (count - 1) / 2] |= (uint8_t)(1 << (count - 1) % 2 * 4);
    size_t len = first + (count + 1) / 2;
    chunk[len++] = pairs;
    chunk[3] = (uint8_t)(len - at);
    if (listed)
        memcpy(chunk + len, list, listed);
    return decode_all(chunk, len + listed, 5, back);
}

static void pairs_by_hand(void **state)
{
    static const uint8_t right[10] = { 1, 0x3c, 2, 0x3c, 3, 0, 4, 0x80, 0x25, 0x00 };
    static const struct {
        uint8_t a, b, pairs, list[5];
        size_t listed;
        bool good;
    } cases[] = {
        { 0, 0x11, 1, { 0 }, 0, true },
        { 0, 0x11, 4, { 0 }, 0, false }, /* odd: nothing behind the last */
        { 0, 0x12, 1, { 0 }, 0, false }, /* a group of m */
        { 0, 0x21, 1, { 0 }, 0, false },
        { 0, 0x1e, 1, { 0 }, 0, false },
        { 0, 0xf1, 1, { 0 }, 0, false },             /* an escape with a code */
        { 0, 0x11, 1, { 0 }, 1, false },             /* a list for no pair */
        { 0, 0xf0, 1, { 0xff, 120, 240 }, 3, true }, /* two escapes */
        { 0, 0xf0, 1, { 0xff, 120 }, 2, false },     /* an exponent is missing */
        { 0, 0xf0, 1, { 0xff }, 1, false },
        { 0, 0xf0, 1, { 0 }, 0, false },                 /* no list */
        { 0, 0xf0, 1, { 0xff, 120, 240, 0 }, 4, false }, /* one too many */
        { 0, 0xf0, 1, { 0x2f, 120 }, 2, false },         /* groups without members */
        { 0, 0xf0, 1, { 0x02 }, 1, false },
        { 0, 0xf0, 1, { 0xe1 }, 1, false },
        { 0, 0xf0, 4, { 0x0f, 9 }, 2, true }, /* the last, of one element */
        { 0, 0xf0, 4, { 0x1f, 9 }, 2, false },
        { 0, 0xf0, 4, { 0xff, 9, 9 }, 3, false },
        { 0, 0xf0, 4, { 0xf1, 9 }, 2, false },
        { 0, 0xf0, 1, { 0xf0, 7 }, 2, true },
        { 0, 0xf0, 8, { 0 }, 0, false }, /* a bit behind the last code */
    };
    uint8_t back[10];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (decode_by_hand(cases[i].a, cases[i].b, cases[i].pairs, cases[i].list, cases[i].listed,
                           back) != (cases[i].good ? LM_OK : LM_EFORMAT))
            fail_msg("case %zu is %s", i, cases[i].good ? "refused" : "taken");
    assert_int_equal(decode_by_hand(0, 0x11, 1, NULL, 0, back), LM_OK);
    assert_memory_equal(back, right, 10);
}

/* Every value of every byte of the head and of the pairs' head; every length; of an odd number of
 * elements with escapes, and with 15 indexes. */
static void damaged_joint_heads(void **state)
{
    static const size_t sizes[] = { 8191, 24579 };
    (void)state;
    for (size_t k = 0; k < 2; k++) {
        size_t n = sizes[k], len, pairs;
        uint8_t *x = make(LM_LMZ_BF16, NORMAL, n, 4), *back = malloc(2 * n);
        uint8_t *out = malloc(lm_lmz_chunk_bound(2 * n));
        for (size_t i = 0; i < n; i++)
            if (word(i) % 50 == 0)
                x[2 * i + 1] = (uint8_t)(word(i) >> 30);
        len = encode(coder(3, LM_CPU_REF), LM_LMZ_BF16, x, 2 * n, NULL, out);
        assert_int_equal(out[0], 4);
        assert_int_equal(out[2], 15);
        pairs = 6 + 2 * (size_t)out[2] + n;
        for (size_t at = 1; at < pairs + 40; at = at == 35 ? pairs : at + 1) {
            uint8_t was = out[at];
            bool always = at < 6; /* low, m and c have one right value */
            for (int v = 0; v < 256; v += 1 + (at > 6 && k) * 16) {
                out[at] = (uint8_t)v;
                int code = decode_all(out, len, n, back);
                if (v == was)
                    assert_int_equal(code, LM_OK);
                else if (!code && (at < 6 || at >= pairs)) /* not every group occurs */
                    assert_memory_not_equal(back, x, 2 * n);
                if (always && at != 1 && v != was)
                    assert_int_equal(code, LM_EFORMAT);
                if (at == 1 && (!v || v > 242))
                    assert_int_equal(code, LM_EFORMAT);
            }
            out[at] = was;
        }
        for (int i = 0; i < 15; i++) { /* two groups that are one: five members, three */
            uint8_t was = out[6 + i];
            out[6 + i] = (uint8_t)((was & 15) == was >> 4 ? was ^ 1 : (was & 15) * 17);
            assert_int_equal(decode_all(out, len, n, back), LM_EFORMAT);
            out[6 + i] = (uint8_t)(was | 15); /* the group of escapes has no members */
            assert_int_equal(decode_all(out, len, n, back), LM_EFORMAT);
            out[6 + i] = was;
        }
        for (size_t cut = 0; cut < len; cut += cut < 60 || cut > len - 60 ? 1 : 997)
            assert_int_equal(decode_all(out, cut, n, back), LM_EFORMAT);
        assert_int_equal(decode_all(out, len, n - 1, back), LM_EFORMAT);
        assert_int_equal(decode_all(out, len, n - 2, back), LM_EFORMAT);
        free(x), free(back), free(out);
    }
}

static void misuse_is_refused(void **state)
{
    (void)state;
    lm_lmz_coder *none, *c = coder(3, LM_CPU_REF);
    uint8_t x[64] = { 0 }, out[128];
    lm_lmz_chunk_info info;
    size_t len;
    lm_err e = { 0 };
    assert_int_equal(lm_lmz_coder_new(20, LM_CPU_REF, &none, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_lmz_encode(c, LM_LMZ_F32, x, 63, NULL, out, 128, &len, &e), LM_EFORMAT);
    e = (lm_err){ 0 };
    assert_int_equal(lm_lmz_encode(c, LM_LMZ_F32, x, 64, NULL, out, 65, &len, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    uint8_t delta[] = { 1, 0, 1, 0, 0, 0, 1, 0, 0, 5, 5 };
    assert_int_equal(lm_lmz_decode(c, LM_LMZ_BF16, delta, sizeof delta, NULL, x, 64, &e),
                     LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_lmz_chunk_look(LM_LMZ_BF16, delta, sizeof delta - 1, 64, &info, &e),
                     LM_EFORMAT);
    e = (lm_err){ 0 };
    assert_int_equal(lm_lmz_chunk_look(LM_LMZ_KINDS, delta, sizeof delta, 64, &info, &e),
                     LM_EFORMAT);
    assert_int_equal(lm_lmz_kind_of(LM_DTYPE_NONE), LM_LMZ_U8);
    for (lm_lmz_kind k = LM_LMZ_U8; k < LM_LMZ_KINDS; k++)
        assert_int_equal(lm_lmz_kind_of(type_of[k]), k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_data_is_restored),
        cmocka_unit_test(full_chunks_of_every_kind),
        cmocka_unit_test(high_levels_are_not_larger),
        cmocka_unit_test(differences_are_restored_and_smaller),
        cmocka_unit_test(unrelated_base_is_not_used),
        cmocka_unit_test(normal_bf16_reaches_its_bound),
        cmocka_unit_test(joint_pairs_of_any_exponents),
        cmocka_unit_test(old_memory_changes_nothing),
        cmocka_unit_test(stored_chunks_are_raw),
        cmocka_unit_test(repeated_noise_is_compressed),
        cmocka_unit_test(unchanged_elements_cost_little),
        cmocka_unit_test(same_values_cost_nothing),
        cmocka_unit_test(damage_is_contained),
        cmocka_unit_test(pairs_by_hand),
        cmocka_unit_test(damaged_joint_heads),
        cmocka_unit_test(misuse_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
