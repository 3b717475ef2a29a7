/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code_balance.h -- codes with scales along both axes (numeric/kv_balance.c), on vectors;
 * included by kv_code_simd.c.
 *
 * The standard deviations of rows and columns follow from sums of x and x^2 times the factors of
 * the other axis, so a round reads the tile twice and divides nothing.  The factors differ from
 * the definition's in their last digits: a tile in which these could choose another round,
 * stored scale or code is left to the definition, so the bits are the same.  A line is a token,
 * a lane a channel: of keys rows are lanes, of values rows are lines. */
#ifndef LM_KERNELS_CPU_KV_CODE_BALANCE_H
#define LM_KERNELS_CPU_KV_CODE_BALANCE_H

enum { BALANCE_ROUNDS = 8, BALANCE_LINES = 256 /* most lines of a tile */ };

/* How far factors may be from the definition's, of their size: each of 16 deviations is wrong by
 * less than 256 roundings of 2^-53 times x^2 over the variance. */
#define BALANCE_NEAR 1e-12
#define BALANCE_MOST 1e-8 /* above it the definition is asked */

typedef struct {
    const float *x;
    int64_t pitch, lines, lanes, ld;                       /* ld: lanes up to a multiple of 16 */
    double line[BALANCE_LINES], lane[LM_KV_MAX_DIM];       /* 1 / scale */
    double of_line[BALANCE_LINES], of_lane[LM_KV_MAX_DIM]; /* deviations */
    double near;                                           /* of the factors */
} balance;

enum { HALF_LANES = VF_LANES / 2 };

LM_INLINE void vd_put(double *p, vd v)
{
#ifdef __AVX512F__
    _mm512_storeu_pd(p, v);
#else
    _mm256_storeu_pd(p, v);
#endif
}

/* The deviation of n numbers with this sum and this sum of squares, times `by`. */
static double deviation(balance *b, double sum, double squares, int64_t n, double by)
{
    double rest = squares - sum * sum / (double)n;
    if (n < 2)
        return 1;
    if (squares == 0)
        return 0;
    if (!(rest > 0) || !isfinite(squares))
        b->near = INFINITY;
    else
        b->near = fmax(b->near, BALANCE_NEAR * squares / rest);
    return by * sqrt(rest / (double)(n - 1));
}

/* Deviations of all lanes. */
static void find_lanes(balance *b)
{
    enum { AT_ONCE = 8 };
    double sum[LM_KV_MAX_DIM], squares[LM_KV_MAX_DIM];
    for (int64_t d = 0; d < b->ld; d += AT_ONCE * HALF_LANES) {
        int64_t n = (b->ld - d) / HALF_LANES < AT_ONCE ? (b->ld - d) / HALF_LANES : AT_ONCE;
        vd p[AT_ONCE], q[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++)
            p[i] = q[i] = vd_all(0);
        for (int64_t t = 0; t < b->lines; t++) {
            const float *x = b->x + t * b->pitch + d;
            vd by = vd_all(b->line[t]);
            for (int64_t i = 0; i < n; i += 2) {
                vf v = vf_load(x + i * HALF_LANES);
                vd y = vf_low_f64(v) * by, z = vf_high_f64(v) * by;
                p[i] = p[i] + y;
                q[i] = vd_fma(y, y, q[i]);
                p[i + 1] = p[i + 1] + z;
                q[i + 1] = vd_fma(z, z, q[i + 1]);
            }
        }
        for (int64_t i = 0; i < n; i++) {
            vd_put(sum + d + i * HALF_LANES, p[i]);
            vd_put(squares + d + i * HALF_LANES, q[i]);
        }
    }
    for (int64_t d = 0; d < b->lanes; d++)
        b->of_lane[d] = deviation(b, sum[d], squares[d], b->lines, b->lane[d]);
}

static void find_lines(balance *b)
{
    for (int64_t t = 0; t < b->lines; t++) {
        const float *x = b->x + t * b->pitch;
        vd p[2] = { vd_all(0), vd_all(0) }, q[2] = { vd_all(0), vd_all(0) };
        for (int64_t d = 0; d < b->ld; d += VF_LANES) {
            vf v = vf_load(x + d);
            vd y = vf_low_f64(v) * vd_at(b->lane + d);
            vd z = vf_high_f64(v) * vd_at(b->lane + d + HALF_LANES);
            p[0] = p[0] + y;
            q[0] = vd_fma(y, y, q[0]);
            p[1] = p[1] + z;
            q[1] = vd_fma(z, z, q[1]);
        }
        b->of_line[t] =
            deviation(b, vd_sum(p[0] + p[1]), vd_sum(q[0] + q[1]), b->lanes, b->line[t]);
    }
}

static double limited(double v, double least, double most)
{
    return v < least ? least : v > most ? most : v;
}

/* Divide n lines or lanes by their deviations, which are then those of what is left. */
static void divide(double *inverse, double *dev, int64_t n)
{
    const double least = 0.74081822068171786607,
                 most = 22026.465794806716517; /* exp(-0.3), exp(10) */
    for (int64_t i = 0; i < n; i++) {
        double was = inverse[i];
        inverse[i] = limited(was / limited(dev[i], 1e-3, 1e3), 1 / most, 1 / least);
        dev[i] *= inverse[i] / was;
    }
}

static double spread(const double *dev, int64_t n)
{
    double least = INFINITY, most = 0;
    for (int64_t i = 0; i < n; i++) {
        least = fmin(least, dev[i]);
        most = fmax(most, dev[i]);
    }
    return most / fmax(least, 1e-8);
}

/* The largest relative difference of n factors. */
static double difference(const double *a, const double *b, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs(a[i] - b[i]) / a[i]);
    return most;
}

/* Divide columns, then rows. */
static void next_round(balance *b, bool by_channel)
{
    if (by_channel) {
        divide(b->line, b->of_line, b->lines);
        find_lanes(b);
        divide(b->lane, b->of_lane, b->lanes);
        find_lines(b);
    } else {
        divide(b->lane, b->of_lane, b->lanes);
        find_lines(b);
        divide(b->line, b->of_line, b->lines);
        find_lanes(b);
    }
}

/* Set the factors to those of the best round, and b->near; rounds that are as good as the best,
 * but for b->near, may be the definition's choice: then their factors have to be near, too.
 * False: the definition has to find it. */
static bool find_balance(balance *b, bool by_channel)
{
    double line[BALANCE_LINES], lane[LM_KV_MAX_DIM], best = (double)INFINITY, apart = 0;
    for (int64_t i = 0; i < BALANCE_LINES; i++)
        b->line[i] = line[i] = 1;
    for (int64_t i = 0; i < LM_KV_MAX_DIM; i++)
        b->lane[i] = lane[i] = 1;
    b->near = BALANCE_NEAR;
    find_lines(b);
    find_lanes(b);
    for (int round = 0; round <= BALANCE_ROUNDS && b->near < BALANCE_MOST; round++) {
        double now = spread(b->of_line, b->lines) + spread(b->of_lane, b->lanes);
        if (fabs(now - best) <= 8 * b->near * now) {
            apart += difference(line, b->line, b->lines) + difference(lane, b->lane, b->lanes);
        } else if (now < best) {
            apart = 0;
            best = now;
            memcpy(line, b->line, sizeof line);
            memcpy(lane, b->lane, sizeof lane);
        }
        if (round < BALANCE_ROUNDS)
            next_round(b, by_channel);
    }
    memcpy(b->line, line, sizeof line);
    memcpy(b->lane, lane, sizeof lane);
    b->near += apart;
    return b->near < BALANCE_MOST;
}

/* Store v, which is right but for `near` of it; false if the definition's could be another
 * number. */
static bool store_about(lm_dtype t, char *section, int64_t at, double v, double near)
{
    double now = stored(t, v);
    put_stored(t, section, at, now);
    return isfinite(v) && now == stored(t, v * (1 - near)) && now == stored(t, v * (1 + near));
}

/* Scale and minimum of balanced numbers in [least, most], whose rows are `by` times as large;
 * false: not sure. */
static bool store_part(const coder *w, const balance *b, int64_t t, int64_t d, double least,
                       double most, double by, lm_kv_scale *out)
{
    double top = (double)((1 << w->f->bits) - 1), range = most - least;
    double near = b->near * (2 + (fabs(least) + fabs(most)) / range);
    int64_t at = lm_kv_scale_at(w->f, w->T, w->D, t, d);
    *out = (lm_kv_scale){ range / top, least };
    return range / top > 2e-10 &&
           store_about(w->f->scale, w->page + w->at.scale, at, range / top / by, near) &&
           store_about(w->f->scale, w->page + w->at.min, at, least / by, 2 * b->near);
}

/* The code of balanced numbers y; false: not sure. */
LM_INLINE bool code_balanced(double top, vd y, vd m, vd inverse, vd near, vd *code)
{
    vd q = (y - m) * inverse;
#ifdef __AVX512F__
    vd n = _mm512_roundscale_pd(q, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *code = _mm512_min_pd(_mm512_max_pd(n, _mm512_setzero_pd()), _mm512_set1_pd(top));
    return _mm512_cmp_pd_mask(_mm512_abs_pd(q - n) + near, _mm512_set1_pd(0.5), _CMP_LT_OQ) == 0xff;
#else
    vd n = _mm256_round_pd(q, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *code = _mm256_min_pd(_mm256_max_pd(n, _mm256_setzero_pd()), _mm256_set1_pd(top));
    vd off = _mm256_andnot_pd(_mm256_set1_pd(-0.0), q - n);
    return _mm256_movemask_pd(_mm256_cmp_pd(off + near, _mm256_set1_pd(0.5), _CMP_LT_OQ)) == 0xf;
#endif
}

LM_INLINE vd vd_lower(vd a, vd b)
{
#ifdef __AVX512F__
    return _mm512_min_pd(a, b);
#else
    return _mm256_min_pd(a, b);
#endif
}

LM_INLINE vd vd_higher(vd a, vd b)
{
#ifdef __AVX512F__
    return _mm512_max_pd(a, b);
#else
    return _mm256_max_pd(a, b);
#endif
}

/* Codes of a line: scales of each lane, or of all in [d, d + n). */
LM_INLINE bool code_line(const coder *w, const balance *b, int64_t k, int64_t d, int64_t n,
                         bool by_channel, const double *m, const double *inverse,
                         const double *near, uint8_t *code)
{
    double top = (double)((1 << w->f->bits) - 1);
    vd line = vd_all(b->line[k]);
    bool sure = true;
    for (int64_t i = d; i < d + n; i += VF_LANES) {
        vf v = vf_load(b->x + k * b->pitch + i);
        vd c[2];
        for (int h = 0; h < 2; h++) {
            int64_t at = i + h * HALF_LANES;
            vd y = (h ? vf_high_f64(v) : vf_low_f64(v)) * vd_at(b->lane + at) * line;
            bool one = by_channel ? code_balanced(top, y, vd_at(m + at), vd_at(inverse + at),
                                                  vd_at(near + at), &c[h])
                                  : code_balanced(top, y, vd_all(*m), vd_all(*inverse),
                                                  vd_all(*near), &c[h]);
            sure = sure && one;
        }
        put_whole(code + i, join_halves(c[0], c[1]));
    }
    return sure;
}

/* How far a quotient may be from the definition's. */
static double unsure_part(const balance *b, double top, lm_kv_scale by)
{
    return 4 * b->near * (1 + top + fabs(by.m) / by.s);
}

/* Scales of the channels of a tile of keys. */
static bool scale_lanes(const coder *w, const balance *b, int64_t t, double *m, double *inverse,
                        double *near)
{
    double top = (double)((1 << w->f->bits) - 1), least[LM_KV_MAX_DIM], most[LM_KV_MAX_DIM];
    bool sure = true;
    for (int64_t d = 0; d < b->ld; d += HALF_LANES) {
        vd lo = vd_all((double)INFINITY), hi = vd_all(-(double)INFINITY), lane = vd_at(b->lane + d);
        for (int64_t k = 0; k < b->lines; k++) {
            const float *x = b->x + k * b->pitch + d / VF_LANES * VF_LANES;
            vf v = vf_load(x);
            vd y = (d % VF_LANES ? vf_high_f64(v) : vf_low_f64(v)) * vd_all(b->line[k]) * lane;
            lo = vd_lower(lo, y);
            hi = vd_higher(hi, y);
        }
        vd_put(least + d, lo);
        vd_put(most + d, hi);
    }
    for (int64_t d = 0; d < b->ld; d++) {
        lm_kv_scale by = { 1, 0 };
        if (d < b->lanes)
            sure = store_part(w, b, t, d, least[d], most[d], b->lane[d], &by) && sure;
        m[d] = by.m;
        inverse[d] = 1 / by.s;
        near[d] = unsure_part(b, top, by);
    }
    return sure;
}

/* Codes of a group of a token's values, with their scale. */
static bool code_values(const coder *w, const balance *b, int64_t t, int64_t k, int64_t d,
                        int64_t n, uint8_t *code)
{
    double lo = (double)INFINITY, hi = -(double)INFINITY, top = (double)((1 << w->f->bits) - 1);
    double y[LM_KV_MAX_DIM];
    lm_kv_scale by;
    for (int64_t i = d; i < d + n; i += VF_LANES) {
        vf v = vf_load(b->x + k * b->pitch + i);
        vd_put(y + i, vf_low_f64(v) * vd_at(b->lane + i));
        vd_put(y + i + HALF_LANES, vf_high_f64(v) * vd_at(b->lane + i + HALF_LANES));
    }
    for (int64_t i = d; i < d + n; i++) {
        lo = y[i] < lo ? y[i] : lo;
        hi = y[i] > hi ? y[i] : hi;
    }
    if (!store_part(w, b, t + k, d, lo * b->line[k], hi * b->line[k], b->line[k], &by))
        return false;
    double inverse = 1 / by.s, near = unsure_part(b, top, by);
    return code_line(w, b, k, d, n, false, &by.m, &inverse, &near, code);
}

/* The tokens of a group or a span from token t on; false: the definition has to code them. */
static bool encode_balanced(const coder *w, int64_t t, int64_t n, const float *x, int64_t pitch)
{
    bool by_channel = w->f->axis == LM_KV_CHANNEL, sure;
    balance b = { .x = x, .pitch = pitch, .lines = n, .lanes = w->D, .ld = w->ld };
    double m[LM_KV_MAX_DIM], inverse[LM_KV_MAX_DIM], near[LM_KV_MAX_DIM];
    uint8_t code[KV_PATCH];
    int64_t group = !by_channel && w->f->group ? w->f->group : w->D;
    if (n > BALANCE_LINES || w->D % 16 || !find_balance(&b, by_channel))
        return false;
    sure = !by_channel || scale_lanes(w, &b, t, m, inverse, near);
    for (int64_t k = 0; k < n && sure; k++) {
        uint8_t *to = code + k % LM_KV_TILE * w->ld;
        if (by_channel)
            sure = code_line(w, &b, k, 0, w->D, true, m, inverse, near, to);
        for (int64_t d = 0; !by_channel && d < w->D && sure; d += group)
            sure = code_values(w, &b, t, k, d, d + group < w->D ? group : w->D - d, to);
        if (k % LM_KV_TILE == LM_KV_TILE - 1)
            put_tokens(w, t + k + 1 - LM_KV_TILE, LM_KV_TILE, code);
    }
    int64_t columns = by_channel ? n : w->D;
    for (int64_t c = 0; c < columns && sure; c++)
        sure = store_about(
            w->f->scale, w->page + w->at.second,
            lm_kv_second_at(w->f, w->T, w->D, by_channel ? t + c : t, by_channel ? 0 : c),
            1 / (by_channel ? b.line[c] : b.lane[c]), b.near);
    return sure;
}

#endif
