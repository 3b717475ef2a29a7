/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code_ggml.h -- codes of ggml's formats in groups of 32 (numeric/ggml_simple.c,
 * numeric/ggml_iq4.c), in the same steps of F32; included by kv_code_simd.c.  Zeros whose sign
 * would depend on the order, short groups, and groups of iq4_nl whose sums could overflow are
 * left to the definition. */
#ifndef LM_KERNELS_CPU_KV_CODE_GGML_H
#define LM_KERNELS_CPU_KV_CODE_GGML_H

enum { BLOCK = 32, BLOCK_VECTORS = BLOCK / VF_LANES };

/* A group: numbers that are not finite are 0. */
typedef struct {
    vf v[BLOCK_VECTORS];
} ggml_block;

LM_INLINE vf take_finite(vf v)
{
#ifdef __AVX512F__
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v - v, vf_zero(), _CMP_EQ_OQ), v);
#else
    return _mm256_and_ps(v, _mm256_cmp_ps(v - v, vf_zero(), _CMP_EQ_OQ));
#endif
}

LM_INLINE unsigned lanes_equal(vf a, vf b)
{
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
#else
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
#endif
}

/* The first number of largest magnitude. */
LM_INLINE float extreme_of(const ggml_block *b, const float *x)
{
    vf most = vf_abs(b->v[0]);
    for (int i = 1; i < BLOCK_VECTORS; i++)
        most = vf_max(most, vf_abs(b->v[i]));
    float top = vf_top(most);
    if (top == 0)
        return 0;
    for (int i = 0; i < BLOCK_VECTORS; i++) {
        unsigned same = lanes_equal(vf_abs(b->v[i]), vf_set(top));
        if (same)
            return x[i * VF_LANES + __builtin_ctz(same)];
    }
    return 0;
}

LM_INLINE vf truncated(vf v)
{
#ifdef __AVX512F__
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#else
    return _mm256_round_ps(v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#endif
}

/* Codes 0 .. top: (x - from) / d + half, truncated. */
LM_INLINE void block_codes(const ggml_block *b, float from, float d, float half, float top,
                           uint8_t *code)
{
    vf by = vf_set(d != 0 ? 1.0f / d : 0.0f);
    for (int i = 0; i < BLOCK_VECTORS; i++) {
        vf q = (b->v[i] - vf_set(from)) * by + vf_set(half);
        put_whole(code + i * VF_LANES, vf_min(vf_max(q, vf_zero()), vf_set(top)));
    }
}

/* Halves away from zero. */
LM_INLINE void block_bytes(const ggml_block *b, float d, uint8_t *code)
{
    vf by = vf_set(d != 0 ? 1.0f / d : 0.0f), one = vf_set(1);
    for (int i = 0; i < BLOCK_VECTORS; i++) {
        vf y = b->v[i] * by, whole = truncated(y), off = vf_abs(y - whole);
        whole = whole + vf_if_lt(off, vf_set(0.5f), vf_zero(), vf_if_lt(y, vf_zero(), -one, one));
        whole = vf_min(vf_max(whole, vf_set(-127)), vf_set(127)); /* NaN: -127 */
        put_whole(code + i * VF_LANES, whole + vf_set(128));
    }
}

static void put_half(const coder *w, size_t section, int64_t t, int64_t d, float v)
{
    uint16_t *to = (uint16_t *)(void *)(w->page + section);
    v = fminf(fmaxf(v, -65504), 65504);
    to[lm_kv_scale_at(w->f, w->T, w->D, t, d)] = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
}

/* The 32 numbers of token t from channel d on; false: the definition has to code them. */
static bool code_block(const coder *w, int64_t t, int64_t d, const float *x, uint8_t *code)
{
    int bits = w->f->bits;
    float top = (float)((1 << bits) - 1), from = 0, half = 0.5f, by;
    ggml_block b;
    for (int i = 0; i < BLOCK_VECTORS; i++)
        b.v[i] = take_finite(vf_load(x + i * VF_LANES));
    if (w->f->levels == LM_KV_ASYM) {
        vf lo = b.v[0], hi = b.v[0];
        for (int i = 1; i < BLOCK_VECTORS; i++) {
            lo = vf_min(lo, b.v[i]);
            hi = vf_max(hi, b.v[i]);
        }
        from = -vf_top(vf_zero() - lo);
        if (from == 0)
            return false;
        by = (vf_top(hi) - from) / top;
        put_half(w, w->at.min, t, d, from);
    } else if (bits == 8) {
        by = fabsf(extreme_of(&b, x)) / 127.0f;
    } else {
        by = extreme_of(&b, x) / -(float)(1 << (bits - 1));
        half = (float)(1 << (bits - 1)) + 0.5f;
    }
    put_half(w, w->at.scale, t, d, by);
    if (bits == 8)
        block_bytes(&b, by, code);
    else
        block_codes(&b, from, by, half, top, code);
    return true;
}

/* ---- iq4_nl ---- */

enum { IQ4_TRIES = 7 };
static const float iq4_values[16]
    __attribute__((aligned(64))) = { -127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113 };
/* Between two values; exact, as the definition's differences are there. */
static const float iq4_middles[16]
    __attribute__((aligned(64))) = { -115.5f, -93.5f, -74,   -57,   -42, -28.5f, -16, -4.5f,
                                     7,       19,     31.5f, 45.5f, 61,  79,     101, INFINITY };

/* The value nearest to each lane, the higher of two. */
LM_INLINE vf nearest_iq4(vf f)
{
#ifdef __AVX512F__
    __m512 middle = _mm512_load_ps(iq4_middles);
    __m512i at = _mm512_setzero_si512();
    for (int half = 8; half > 0; half /= 2) { /* so many middles are not above f */
        __m512i next = _mm512_add_epi32(at, _mm512_set1_epi32(half));
        __m512 m = _mm512_permutexvar_ps(_mm512_sub_epi32(next, _mm512_set1_epi32(1)), middle);
        at = _mm512_mask_mov_epi32(at, _mm512_cmp_ps_mask(f, m, _CMP_GE_OQ), next);
    }
    return _mm512_permutexvar_ps(at, _mm512_load_ps(iq4_values));
#else
    vf out = vf_set(iq4_values[0]);
    for (int k = 0; k < 15; k++)
        out = vf_if_lt(f, vf_set(iq4_middles[k]), out, vf_set(iq4_values[k + 1]));
    return out;
#endif
}

/* VF_LANES groups, number i of lane l being x[i][l]: their scales; false: sums could overflow. */
LM_INLINE bool iq4_scales(const vf x[BLOCK], vf *out)
{
    vf most = vf_zero(), best = vf_zero(), scale_now = vf_zero(), tiny = vf_set(1e-15f);
    for (int i = 0; i < BLOCK; i++)
        most = vf_if_lt(vf_abs(most), vf_abs(x[i]), x[i], most);
    if (!(vf_top(vf_abs(most)) < 1e5f))
        return false;
    vf safe = vf_if_lt(vf_abs(most), tiny, vf_set(1), most);
    for (int k = -1; k <= 2 * IQ4_TRIES; k++) {
        vf by = k < 0 ? vf_set(1) / (-safe / vf_set(-127))
                      : vf_set((float)(k - IQ4_TRIES) - 127.0f) / safe;
        vf xq = vf_zero(), q2 = vf_zero();
        for (int i = 0; i < BLOCK; i++) {
            vf q = nearest_iq4(by * x[i]), wq = x[i] * x[i] * q;
            xq = xq + wq * x[i];
            q2 = q2 + wq * q;
        }
        vf now = vf_if_lt(vf_zero(), q2, xq / q2, vf_zero());
        if (k < 0) {
            scale_now = now;
            best = now * xq;
            continue;
        }
        vf better = vf_if_lt(vf_zero(), q2, best * q2 - xq * xq, vf_zero()); /* if below 0 */
        scale_now = vf_if_lt(better, vf_zero(), now, scale_now);
        best = vf_if_lt(better, vf_zero(), scale_now * xq, best);
    }
    *out = vf_if_lt(vf_abs(most), tiny, vf_zero(), scale_now);
    return true;
}

/* Whole groups [g, g + n) of the tokens from t on, n at most VF_LANES, `groups` a token; rows x
 * are `pitch` apart.  False: the definition has to code them. */
static bool code_iq4(const coder *w, int64_t t, int64_t g, int64_t n, int64_t groups,
                     const float *x, int64_t pitch, uint8_t *code)
{
    float turned[BLOCK][VF_LANES], scale_of[VF_LANES];
    vf v[BLOCK], by;
    for (int64_t l = 0; l < VF_LANES; l++) {
        int64_t at = g + (l < n ? l : n - 1);
        const float *from = x + at / groups * pitch + at % groups * BLOCK;
        for (int64_t i = 0; i < BLOCK; i++)
            turned[i][l] = from[i];
    }
    for (int i = 0; i < BLOCK; i++)
        v[i] = take_finite(vf_load(turned[i]));
    if (!iq4_scales(v, &by))
        return false;
    vf_store(scale_of, by);
    for (int64_t at = g; at < g + n; at++) {
        int64_t k = at / groups, d = at % groups * BLOCK;
        float one = scale_of[at - g];
        vf inverse = vf_set(one != 0 ? 1.0f / one : 0.0f);
        put_half(w, w->at.scale, t + k, d, one);
        for (int64_t i = 0; i < BLOCK; i += VF_LANES) {
            vf f = inverse * take_finite(vf_load(x + k * pitch + d + i)), c = vf_zero();
            for (int m = 0; m < 15; m++)
                c = vf_if_lt(f, vf_set(iq4_middles[m]), c, vf_set((float)(m + 1)));
            put_whole(code + k * w->ld + d + i, c);
        }
    }
    return true;
}

/* The group of token t from channel d on, by the definition. */
static void block_plainly(const coder *w, int64_t t, int64_t d, const float *x, uint8_t *code)
{
    uint32_t wide[LM_KV_MAX_DIM];
    int64_t n = w->D - d < BLOCK ? w->D - d : BLOCK;
    code_plainly(w, t, d, n, NULL, x, wide);
    for (int64_t i = d; i < d + n; i++)
        code[i] = (uint8_t)wide[i];
}

/* n tokens from t on, n <= 16. */
static void code_blocks(const coder *w, int64_t t, int64_t n, const float *x, int64_t pitch,
                        uint8_t *code)
{
    int64_t groups = w->D / BLOCK;
    bool iq4 = w->f->levels == LM_KV_TABLE;
    for (int64_t g = 0, some; iq4 && g < n * groups; g += some) {
        some = n * groups - g < VF_LANES ? n * groups - g : VF_LANES;
        if (code_iq4(w, t, g, some, groups, x, pitch, code))
            continue;
        for (int64_t i = g; i < g + some; i++)
            block_plainly(w, t + i / groups, i % groups * BLOCK, x + i / groups * pitch,
                          code + i / groups * w->ld);
    }
    for (int64_t k = 0; k < n; k++) {
        const float *row = x + k * pitch;
        for (int64_t d = iq4 ? groups * BLOCK : 0; d < w->D; d += BLOCK)
            if (iq4 || w->D - d < BLOCK || !code_block(w, t + k, d, row + d, code + k * w->ld + d))
                block_plainly(w, t + k, d, row, code + k * w->ld);
        memset(code + k * w->ld + w->D, 0, (size_t)(w->ld - w->D));
    }
}

#endif
