/* SPDX-License-Identifier: Apache-2.0 */
/* blend_body.h -- the loops of blend.h for one type of reals; included by blend_loops.h with
 *   REAL       float or double
 *   BITS       the unsigned type of its size
 *   FN(name)   the names of its functions
 * and with FN(load) defined there.
 *
 * Each loop is written so that a compiler can vectorise it: no call, no branch, explicit lanes of
 * sums. */

#define MAGNITUDE ((BITS) ~(BITS)0 >> 1)

static inline BITS FN(bits_of)(REAL x)
{
    BITS u;
    memcpy(&u, &x, sizeof u);
    return u & MAGNITUDE;
}

/* Run BODY over a block of src as reals `x`: directly from memory for the frequent types. */
#define FROM_SOURCE(BODY)                                   \
    do {                                                    \
        if (t == LM_DTYPE_BF16) {                           \
            const half_at *s = (const half_at *)src + at;   \
            ahead(s + n, 2 * n);                            \
            for (int64_t i = 0; i < n; i++) {               \
                REAL x = (REAL)from_bf16(s[i]);             \
                BODY;                                       \
            }                                               \
        } else if (t == LM_DTYPE_F32) {                     \
            const float_at *s = (const float_at *)src + at; \
            ahead(s + n, 4 * n);                            \
            for (int64_t i = 0; i < n; i++) {               \
                REAL x = (REAL)s[i];                        \
                BODY;                                       \
            }                                               \
        } else {                                            \
            REAL cell[256];                                 \
            for (int64_t k = 0; k < n; k += 256) {          \
                int64_t m = n - k < 256 ? n - k : 256;      \
                FN(load)(t, src, at + k, cell, m);          \
                for (int64_t j = 0; j < m; j++) {           \
                    REAL x = cell[j];                       \
                    int64_t i = k + j;                      \
                    BODY;                                   \
                }                                           \
            }                                               \
        }                                                   \
    } while (0)

static void FN(start)(lm_dtype t, const void *src, int64_t at, double w, void *acc, int64_t n)
{
    REAL *restrict a = acc;
    REAL c = (REAL)w;
    FROM_SOURCE(a[i] = c * x);
}

static void FN(add)(lm_dtype t, const void *src, int64_t at, double w, void *acc, int64_t n)
{
    REAL *restrict a = acc;
    REAL c = (REAL)w;
    FROM_SOURCE(a[i] += c * x);
}

static void FN(delta)(lm_dtype t, const void *src, int64_t at, const void *base, void *d, int64_t n)
{
    const REAL *restrict b = base;
    REAL *restrict o = d;
    FROM_SOURCE(o[i] = x - b[i]);
}

static void FN(add_delta)(lm_dtype t, const void *src, int64_t at, const void *base, double w,
                          void *acc, int64_t n)
{
    const REAL *restrict b = base;
    REAL *restrict a = acc;
    REAL c = (REAL)w;
    FROM_SOURCE(a[i] += c * (x - b[i]));
}

static void FN(fill)(void *x, double v, int64_t n)
{
    REAL *restrict a = x;
    for (int64_t i = 0; i < n; i++)
        a[i] = (REAL)v;
}

static void FN(scale)(void *x, double by, int64_t n)
{
    REAL *restrict a = x;
    REAL c = (REAL)by;
    for (int64_t i = 0; i < n; i++)
        a[i] *= c;
}

static void FN(axpy)(const void *x, double w, void *acc, int64_t n)
{
    const REAL *restrict b = x;
    REAL *restrict a = acc;
    REAL c = (REAL)w;
    for (int64_t i = 0; i < n; i++)
        a[i] += c * b[i];
}

static void FN(mul)(const void *x, void *y, int64_t n)
{
    const REAL *restrict b = x;
    REAL *restrict a = y;
    for (int64_t i = 0; i < n; i++)
        a[i] *= b[i];
}

static void FN(div)(const void *x, void *y, int64_t n)
{
    const REAL *restrict b = x;
    REAL *restrict a = y;
    for (int64_t i = 0; i < n; i++)
        a[i] /= b[i];
}

static void FN(at_least)(void *x, double least, int64_t n)
{
    REAL *restrict a = x;
    REAL c = (REAL)least;
    for (int64_t i = 0; i < n; i++)
        a[i] = a[i] < c ? c : a[i];
}

static double FN(dot)(const void *a, const void *b, int64_t n)
{
    const REAL *p = a, *q = b;
    double lane[LANES] = { 0 };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += (double)p[i + l] * (double)q[i + l];
    for (int l = 0; i + l < n; l++)
        lane[l] += (double)p[i + l] * (double)q[i + l];
    return tree(lane);
}

static double FN(sum_abs)(const void *a, int64_t n)
{
    const REAL *p = a;
    double lane[LANES] = { 0 };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += fabs((double)p[i + l]);
    for (int l = 0; i + l < n; l++)
        lane[l] += fabs((double)p[i + l]);
    return tree(lane);
}

static void FN(keep_bits)(void *d, uint64_t lo, uint64_t hi, double scale, int64_t n)
{
    REAL *restrict a = d;
    REAL c = (REAL)scale;
    BITS from = lo > MAGNITUDE ? MAGNITUDE : (BITS)lo; /* no finite bound above: see `none` */
    BITS below = hi > MAGNITUDE ? MAGNITUDE + 1 : (BITS)hi, none = lo > MAGNITUDE;
    for (int64_t i = 0; i < n; i++) {
        BITS b = FN(bits_of)(a[i]);
        BITS kept = (BITS)(b >= from) & (BITS)(b < below) & (none ^ 1);
        REAL v = a[i] * c;
        a[i] = kept ? v : 0;
    }
}

static void FN(keep_drawn)(void *d, const uint32_t *draw, uint64_t below, double scale, int64_t n)
{
    REAL *restrict a = d;
    REAL c = (REAL)scale;
    uint32_t least = (uint32_t)below;
    if (below > UINT32_MAX) {
        FN(scale)(d, scale, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        REAL v = a[i] * c;
        a[i] = draw[i] < least ? v : 0;
    }
}

static void FN(keep_each)(void *d, const void *m, int64_t n)
{
    REAL *restrict a = d;
    const REAL *restrict by = m;
    for (int64_t i = 0; i < n; i++) {
        REAL v = a[i] * by[i];
        a[i] = by[i] > 0 ? v : 0;
    }
}

static void FN(choose)(const void *m, const void *x, void *y, int64_t n)
{
    const REAL *restrict by = m;
    const REAL *restrict a = x;
    REAL *restrict b = y;
    for (int64_t i = 0; i < n; i++)
        b[i] = by[i] == 0 ? a[i] : b[i];
}

static void FN(bits)(const void *x, uint64_t *out, int64_t n)
{
    const REAL *a = x;
    for (int64_t i = 0; i < n; i++)
        out[i] = FN(bits_of)(a[i]);
}

static void FN(histogram)(const void *x, uint64_t lo, uint64_t hi, int shift, uint32_t *count,
                          int64_t n)
{
    const REAL *a = x;
    for (int64_t i = 0; i < n; i++) {
        uint64_t b = FN(bits_of)(a[i]);
        if (b >= lo && b < hi)
            count[(b - lo) >> shift]++;
    }
}

/* 64 bytes of reals, so that votes and sums stay in registers over the models.  Comparisons give
 * lanes of all ones or zeros. */
typedef REAL FN(vec) __attribute__((vector_size(64)));
typedef BITS FN(vec_bits) __attribute__((vector_size(64)));
enum { FN(VEC) = 64 / (int)sizeof(REAL) };

/* v = the first n of p, the rest 0. */
static inline __attribute__((always_inline)) void FN(vec_load)(FN(vec) * v, const REAL *p,
                                                               int64_t n)
{
    if (n == FN(VEC)) {
        memcpy(v, p, sizeof *v);
    } else {
        memset(v, 0, sizeof *v);
        memcpy(v, p, (size_t)n * sizeof *p);
    }
}

/* The terms as reals: converted once per block, not once per vector. */
typedef struct {
    int k;
    const REAL *w;
    bool normalize;
    REAL floor, lambda;
} FN(terms);

static inline __attribute__((always_inline)) void FN(agree_vec)(const FN(terms) * t,
                                                                lm_blend_vote by, const REAL *d,
                                                                int64_t stride, const REAL *base,
                                                                REAL *out, int64_t n)
{
    FN(vec) x, v, vote = { 0 }, sum = { 0 }, weight = { 0 }, b;
    const FN(vec_bits) sign = ~((FN(vec_bits)){ 0 } + MAGNITUDE);
    const FN(vec) zero = { 0 }, one = zero + 1;
    for (int m = 0; m < t->k; m++) {
        FN(vec_load)(&x, d + m * stride, n);
        v = t->w[m] * x;
        if (by == LM_BLEND_BY_SUM)
            vote += x;
        else if (by == LM_BLEND_BY_COUNT)
            vote += (FN(vec))((FN(vec_bits))(v > zero) & (FN(vec_bits))one) -
                    (FN(vec))((FN(vec_bits))(v < zero) & (FN(vec_bits))one);
        else
            vote += v;
    }
    FN(vec_bits) turn = ~(FN(vec_bits))(vote >= zero) & sign;
    for (int m = 0; m < t->k; m++) {
        FN(vec_load)(&x, d + m * stride, n);
        v = t->w[m] * x;
        FN(vec_bits) voted_out = (FN(vec_bits))((FN(vec))((FN(vec_bits))v ^ turn) <= zero);
        sum += (FN(vec))((FN(vec_bits))v & ~voted_out);
        weight += (FN(vec))((FN(vec_bits))(zero + t->w[m]) & ~voted_out);
    }
    if (t->normalize) {
        FN(vec) least = zero + (t->floor > 0 ? t->floor : 1);
        FN(vec_bits) few = (FN(vec_bits))(t->floor > 0 ? weight < least : weight == zero);
        weight = (FN(vec))(((FN(vec_bits))weight & ~few) | ((FN(vec_bits))least & few));
        sum /= weight;
    }
    FN(vec_load)(&b, base, n);
    b += t->lambda * sum;
    memcpy(out, &b, (size_t)n * sizeof *out);
}

static void FN(agree)(const lm_blend_terms *t, const void *d, int64_t stride, const void *base,
                      void *out, int64_t n)
{
    const REAL *x = d, *b = base;
    REAL *o = out, w[LM_BLEND_MOST];
    const FN(terms) real = { t->k, w, t->normalize, (REAL)t->floor, (REAL)t->lambda };
    int64_t i = 0;
    for (int m = 0; m < t->k; m++)
        w[m] = (REAL)t->w[m];
#define OVER(by, len) FN(agree_vec)(&real, by, x + i, stride, b + i, o + i, len)
#define ALL(by)                                \
    do {                                       \
        for (; i + FN(VEC) <= n; i += FN(VEC)) \
            OVER(by, FN(VEC));                 \
        if (i < n)                             \
            OVER(by, n - i);                   \
    } while (0)
    if (t->vote == LM_BLEND_BY_SUM)
        ALL(LM_BLEND_BY_SUM);
    else if (t->vote == LM_BLEND_BY_COUNT)
        ALL(LM_BLEND_BY_COUNT);
    else
        ALL(LM_BLEND_BY_WEIGHT);
#undef OVER
#undef ALL
}

/* A strip that fits the first-level cache. */
enum { FN(STRIP) = 1024 / (int)sizeof(REAL) };

/* Deviations from the first row keep equal rows at a variance of exactly 0. */
static void FN(variance)(int k, const void *d, int64_t stride, void *out, int64_t n)
{
    const REAL *x = d;
    REAL *restrict o = out;
    REAL mean[FN(STRIP)], v[FN(STRIP)], one = (REAL)1 / (REAL)k;
    for (int64_t at = 0; at < n; at += FN(STRIP)) {
        int64_t len = n - at < FN(STRIP) ? n - at : FN(STRIP);
        for (int64_t i = 0; i < len; i++)
            mean[i] = v[i] = 0;
        for (int m = 1; m < k; m++)
            for (int64_t i = 0; i < len; i++)
                mean[i] += x[m * stride + at + i] - x[at + i];
        for (int64_t i = 0; i < len; i++)
            mean[i] *= one;
        for (int m = 0; m < k; m++)
            for (int64_t i = 0; i < len; i++) {
                REAL e = x[m * stride + at + i] - x[at + i] - mean[i];
                v[i] += e * e;
            }
        for (int64_t i = 0; i < len; i++)
            o[at + i] = v[i] * one;
    }
}

static void FN(near)(double t, const void *base, const void *x, void *out, int64_t n)
{
    const REAL *b = base, *a = x;
    REAL *o = out;
    REAL c = (REAL)t, least = (REAL)1e-6;
    for (int64_t i = 0; i < n; i++) {
        REAL gap = b[i] - a[i];
        gap = gap < 0 ? -gap : gap;
        REAL s = c / (gap < least ? least : gap);
        s = s < 0 ? 0 : s > 1 ? 1 : s;
        REAL far = s * a[i] + (1 - s) * b[i];
        /* elements taken whole are not rounded; NaN in either operand propagates */
        o[i] = s == 1 ? a[i] : far;
    }
}

#undef MAGNITUDE
#undef FROM_SOURCE
