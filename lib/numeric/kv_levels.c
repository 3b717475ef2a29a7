/* SPDX-License-Identifier: Apache-2.0 */
/* kv_levels.c -- scales and codes of a group of numbers, the tables of levels, and bounds of the error. */
#include <math.h>

#include "numeric/ggml_blocks.h"
#include "numeric/kv_impl.h"

static double float8_most(const lm_kv_format *f)
{
    return f->float8 == LM_DTYPE_F8E5M2 ? 57344.0 : 448.0;
}

static double top_code(const lm_kv_format *f)
{
    return (double)((1 << f->bits) - 1);
}

double lm_kv_level(const lm_kv_format *f, unsigned code)
{
    uint8_t byte = (uint8_t)code;
    switch (f->levels) {
    case LM_KV_SYM:
        return (double)code - (double)(1 << (f->bits - 1));
    case LM_KV_TABLE:
        return (double)f->table[code];
    case LM_KV_FLOAT8:
        return lm_get(f->float8, &byte, 0);
    case LM_KV_ASYM:
        break;
    }
    return (double)code;
}

/* The index of the level nearest to x, the first of two. */
static unsigned nearest_level(const lm_kv_format *f, double x)
{
    unsigned best = 0;
    for (int i = 1; i < f->n_table; i++)
        if (fabs(x - (double)f->table[i]) < fabs(x - (double)f->table[best]))
            best = (unsigned)i;
    return best;
}

unsigned lm_kv_code_of(const lm_kv_format *f, lm_kv_scale by, double x)
{
    double half = (double)(1 << (f->bits - 1)), y = by.s != 0 ? (x - by.m) / by.s : 0;
    uint8_t byte;
    if (!isfinite(by.s) || !isfinite(y))
        return 0;
    switch (f->levels) {
    case LM_KV_SYM:
        return (unsigned)(lm_kv_limited(rint(y), -half, half - 1) + half);
    case LM_KV_TABLE:
        return nearest_level(f, y);
    case LM_KV_FLOAT8:
        lm_set(f->float8, &byte, 0, lm_kv_limited(y, -float8_most(f), float8_most(f)));
        return byte;
    case LM_KV_ASYM:
        break;
    }
    return (unsigned)lm_kv_limited(rint(y), 0, top_code(f));
}

double lm_kv_stored(lm_dtype scale, double v)
{
    double cell;
    if (scale == LM_DTYPE_F16)
        v = isnan(v) ? v : lm_kv_limited(v, -65504, 65504);
    lm_set(scale, &cell, 0, v);
    return lm_get(scale, &cell, 0);
}

/* ---- ggml's formats ---- */

enum { BLOCK = 32, Q5_0 = 22, Q5_1 = 24 };

static void fifth_bits(const uint8_t *p, unsigned *code)
{
    for (int i = 0; i < BLOCK; i++)
        code[i] |= (unsigned)(p[i / 8] >> i % 8 & 1) << 4;
}

/* Take scale, minimum and codes out of a block of ggml's. */
static lm_kv_scale from_block(const lm_kv_format *f, const uint8_t *p, unsigned code[BLOCK])
{
    bool minima = f->levels == LM_KV_ASYM;
    const uint8_t *codes = p + (minima ? 4 : 2) + (f->bits == 5 ? 4 : 0);
    uint8_t q[BLOCK];
    if (f->bits == 8) {
        for (int i = 0; i < BLOCK; i++)
            code[i] = (unsigned)((int)(int8_t)codes[i] + 128);
    } else {
        lm_unpack4(codes, q);
        for (int i = 0; i < BLOCK; i++)
            code[i] = q[i];
        if (f->bits == 5)
            fifth_bits(codes - 4, code);
    }
    return (lm_kv_scale){ (double)lm_get_f16(p), minima ? (double)lm_get_f16(p + 2) : 0 };
}

/* A short group is filled up with its last number. */
static lm_kv_scale code_block(const lm_kv_format *f, const double *x, int64_t n, unsigned *code)
{
    uint8_t block[2 + BLOCK + 4];
    unsigned all[BLOCK] = { 0 };
    float v[BLOCK];
    for (int64_t i = 0; i < BLOCK; i++)
        v[i] = (float)x[i < n ? i : n - 1];
    if (f->levels == LM_KV_TABLE)
        lm_iq4_nl_encode(v, BLOCK, block);
    else if (f->bits == 8)
        lm_q8_0_encode(v, BLOCK, block);
    else if (f->levels == LM_KV_SYM)
        (f->bits == 4 ? lm_q4_0_encode : lm_q5_0_encode)(v, BLOCK, block);
    else
        (f->bits == 4 ? lm_q4_1_encode : lm_q5_1_encode)(v, BLOCK, block);
    lm_kv_scale by = from_block(f, block, all);
    memcpy(code, all, (size_t)n * sizeof *code);
    return by;
}

/* ---- groups ---- */

typedef struct {
    double least, most, squares;
    bool finite;
} extent;

static extent extent_of(const double *x, int64_t n)
{
    extent r = { x[0], x[0], 0, true };
    for (int64_t i = 0; i < n; i++) {
        r.finite = r.finite && isfinite(x[i]);
        r.least = fmin(r.least, x[i]);
        r.most = fmax(r.most, x[i]);
        r.squares += x[i] * x[i];
    }
    return r;
}

/* Scale and minimum over numbers in [least, most], before they are rounded. */
static lm_kv_scale over_range(const lm_kv_format *f, double least, double most)
{
    double largest = fmax(fabs(least), fabs(most));
    switch (f->levels) {
    case LM_KV_SYM:
        return (lm_kv_scale){ largest / (top_code(f) / 2), 0 };
    case LM_KV_ASYM:
        return (lm_kv_scale){ (most - least) / top_code(f), least };
    case LM_KV_FLOAT8:
        return (lm_kv_scale){ largest / float8_most(f), 0 };
    case LM_KV_TABLE:
        break;
    }
    if (f->zero)
        return (lm_kv_scale){ (most - least) / 2, (most + least) / 2 };
    return (lm_kv_scale){ largest, 0 };
}

/* The scale with which the codes decode to numbers with this sum of squares. */
static double renormed(const lm_kv_format *f, double squares, const unsigned *code, int64_t n,
                       double s)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += lm_kv_level(f, code[i]) * lm_kv_level(f, code[i]);
    return sum > 0 ? lm_kv_stored(f->scale, sqrt(squares / sum)) : s;
}

static lm_kv_scale rounded_scale(const lm_kv_format *f, lm_kv_scale by)
{
    return (lm_kv_scale){ lm_kv_stored(f->scale, by.s),
                          by.m != 0 ? lm_kv_stored(f->scale, by.m) : 0 };
}

lm_kv_scale lm_kv_code_group(const lm_kv_format *f, const double *x, int64_t n, const float *range,
                             unsigned *code)
{
    extent r = extent_of(x, n);
    lm_kv_scale by;
    if (f->ggml)
        return code_block(f, x, n, code);
    if (!r.finite)
        by = (lm_kv_scale){ NAN, 0 };
    else if (f->levels == LM_KV_TABLE && f->norm)
        by = (lm_kv_scale){ sqrt(r.squares / (double)n), 0 };
    else if (range)
        by = over_range(f, (double)range[0], (double)range[1]);
    else
        by = over_range(f, r.least, r.most);
    by = rounded_scale(f, by);
    for (int64_t i = 0; i < n; i++)
        code[i] = lm_kv_code_of(f, by, x[i]);
    if (r.finite && f->renorm)
        by.s = renormed(f, r.squares, code, n, by.s);
    return by;
}

lm_kv_scale lm_kv_fixed(const lm_kv_format *f, int64_t kv, int64_t D, int64_t d)
{
    return over_range(f, (double)f->lower[kv * D + d], (double)f->upper[kv * D + d]);
}

void lm_kv_level_numbers(const lm_kv_format *f, float level[256])
{
    for (unsigned code = 0; code < 1u << f->bits; code++)
        level[code] = (float)lm_kv_level(f, code);
}

void lm_kv_fixed_scales(const lm_kv_format *f, int64_t n, float *s, float *m)
{
    for (int64_t i = 0; i < n; i++) {
        lm_kv_scale by = lm_kv_fixed(f, 0, 0, i);
        s[i] = (float)by.s;
        m[i] = (float)by.m;
    }
}

/* ---- bounds ---- */

/* The largest error of a number v that is rounded to the type. */
static double rounding(lm_dtype scale, double v)
{
    switch (scale) {
    case LM_DTYPE_F16:
        return fmax(fabs(v) * 0x1p-11, 0x1p-25);
    case LM_DTYPE_BF16:
        return fabs(v) * 0x1p-8 + 0x1p-134;
    case LM_DTYPE_F32:
        return fabs(v) * 0x1p-24 + 0x1p-150;
    default:
        return 0;
    }
}

/* Half of the largest gap between two levels of the table, or beyond them within [-1, 1]. */
static double half_gap(const lm_kv_format *f, bool ends)
{
    double most = 0;
    for (int i = 1; i < f->n_table; i++)
        most = fmax(most, ((double)f->table[i] - (double)f->table[i - 1]) / 2);
    if (ends)
        most = fmax(most, fmax((double)f->table[0] + 1, 1 - (double)f->table[f->n_table - 1]));
    return most;
}

/* A table over numbers of variance 1: the group's scale is between largest / sqrt(n) and largest. */
static double normal_bound(const lm_kv_format *f, int64_t n, double largest)
{
    double end = fmin(-(double)f->table[0], (double)f->table[f->n_table - 1]), least = INFINITY;
    double plain = fmax(half_gap(f, false) * largest, largest * (1 - end / sqrt((double)n)));
    if (!f->renorm)
        return plain;
    for (int i = 0; i < f->n_table; i++)
        least = fmin(least, fabs((double)f->table[i]));
    return least > 0 ? largest * (1 + end / least) : (double)INFINITY;
}

static double ggml_bound(const lm_kv_format *f, double largest, double lo, double hi)
{
    double s = (hi - lo) / top_code(f);
    if (f->levels == LM_KV_TABLE)
        return 0.3 * largest; /* observed at most 0.2: the search may choose to cut the ends */
    if (f->levels == LM_KV_ASYM)
        return s / 2 + rounding(f->scale, lo) + top_code(f) * rounding(f->scale, s);
    if (f->bits == 8)
        return largest / 254 + 127 * rounding(f->scale, largest / 127);
    s = largest /
        (double)(1 << (f->bits - 1)); /* the lowest code has one step more than the highest */
    return s + (double)(1 << (f->bits - 1)) * rounding(f->scale, s);
}

double lm_kv_bound(const lm_kv_format *f, int64_t n, double lo, double hi)
{
    double largest = fmax(fabs(lo), fabs(hi)),
           last = largest * 0x1p-22; /* the results' own rounding */
    lm_kv_scale by = over_range(f, lo, hi);
    double ds = rounding(f->scale, by.s), dm = rounding(f->scale, by.m);
    if (f->ggml)
        return ggml_bound(f, largest, lo, hi) + last;
    switch (f->levels) {
    case LM_KV_FLOAT8:
        if (f->scale == LM_DTYPE_NONE)
            by.s = f->constant;
        last += fmax(0, largest - float8_most(f) * (by.s - ds));
        return fmax(largest * (f->float8 == LM_DTYPE_F8E5M2 ? 0x1p-3 : 0x1p-4),
                    (by.s + ds) * (f->float8 == LM_DTYPE_F8E5M2 ? 0x1p-17 : 0x1p-10)) +
               last;
    case LM_KV_TABLE:
        if (f->norm)
            return normal_bound(f, n, largest) + 4 * rounding(f->scale, largest) + last;
        return half_gap(f, true) * (by.s + ds) + dm + ds + last;
    case LM_KV_SYM:
    case LM_KV_ASYM:
        break;
    }
    return (by.s + ds) / 2 + dm + top_code(f) * ds + last;
}

/* ---- tables ---- */

static double normal_density(double x)
{
    return exp(-x * x / 2) * 0.39894228040143267794;
}

/* P(X > x) of the standard normal distribution, without cancellation in the tail. */
static double above(double x)
{
    return erfc(x * 0.70710678118654752440) / 2;
}

/* The mean of a normally distributed number that lies in [a, b], 0 <= a < b. */
static double mean_within(double a, double b)
{
    return (normal_density(a) - normal_density(b)) / (above(a) - above(b));
}

/* Lloyd's two conditions by turns, of the positive half: borders in the middle of levels, levels at the means
 * between borders.  Converges linearly; the best table is symmetric (the density is log-concave). */
void lm_kv_normal_table(int bits, float *table)
{
    int half = 1 << (bits - 1);
    double level[LM_KV_MAX_TABLE / 2];
    for (int i = 0; i < half; i++)
        level[i] = 3.0 * ((double)i + 0.5) / (double)half;
    for (int round = 0; round < 20000; round++) {
        double moved = 0, from = 0;
        for (int i = 0; i < half; i++) {
            double to = i + 1 < half ? (level[i] + level[i + 1]) / 2 : 40;
            double mean = mean_within(from, to);
            moved = fmax(moved, fabs(mean - level[i]));
            level[i] = mean;
            from = to;
        }
        if (moved < 1e-14)
            break;
    }
    for (int i = 0; i < half; i++) {
        table[half + i] = (float)level[i];
        table[half - 1 - i] = -(float)level[i];
    }
}

void lm_kv_iq4_table(float table[16])
{
    uint8_t block[18] = { 0, 0x3c }; /* the scale 1 */
    float y[32];
    for (int i = 0; i < 16; i++)
        block[2 + i] = (uint8_t)i;
    lm_iq4_nl_decode(block, 32, y);
    memcpy(table, y, 16 * sizeof *table);
}
