/* SPDX-License-Identifier: Apache-2.0 */
/* kv_wide.h -- tiles of a coded cache as floats, in vectors: keys turned (a row for each channel), values as they are.
 * Serves every format.  Lines of codes (numeric/kv_format.h) are such that a vector of 32-bit words holds the same
 * channel of 16 tokens of keys, or the same token of 16 channels of values, in each byte. */
#ifndef LM_KERNELS_CPU_KV_WIDE_H
#define LM_KERNELS_CPU_KV_WIDE_H

#include <math.h>

#include "kernels/cpu/attention_jobs.h"
#include "kernels/cpu/kv_seq.h"
#include "kernels/cpu/simd.h"

enum {
    KV_SUB = 64,     /* tokens that are decoded together */
    KV_AHEAD = 2048, /* bytes between codes and those that are prefetched */
    KV_SCALES = 64,  /* groups of a head that are prepared: LM_KV_MAX_DIM / 16 */
};

/* How codes become levels. */
typedef enum { KV_LINEAR /* code + level[0] */, KV_FLOAT, KV_LOOK_UP } kv_kind;

/* What a side's format needs for every tile, prepared once a call. */
typedef struct {
    float level[256];
    const float *s, *m; /* fixed scales and minima of channels, [K,D]; NULL: stored */
    kv_kind kind;
    int mantissa;                /* KV_FLOAT: bits of it, */
    float least;                 /* and the number of code 1 */
    int bias;                    /* difference of exponents to those of F32 */
    bool sixteen;                /* KV_LOOK_UP: at most 16 levels */
    uint8_t whole[16];           /* KV_LOOK_UP: levels that are whole numbers, 128 more */
    uint8_t low[128], high[128]; /* bytes of the levels as BF16, without the sign of KV_FLOAT */
} kv_levels;

/* Scratch of a worker. */
typedef struct {
    uint8_t bytes[KV_SUB * LM_KV_MAX_DIM + LM_KV_LINE];       /* codes of a tile, a byte each */
    float s[KV_SCALES][LM_KV_TILE], m[KV_SCALES][LM_KV_TILE]; /* of tokens, by group */
    float cs[LM_KV_MAX_DIM], cm[LM_KV_MAX_DIM];               /* of channels */
    float second[LM_KV_MAX_DIM]; /* of channels, or of the tile's tokens */
} kv_tile_scratch;

/* Bytes of the prepared scales of a side, beside its kv_levels. */
static inline size_t fixed_bytes(const lm_tensor *t)
{
    return t->kv && t->kv->lower
               ? attn_round64(2 * (size_t)(t->dim[1] * t->dim[3] + 16) * sizeof(float))
               : 0;
}

/* Prepare a side; `room` is for its scales.  Returns the end of what was used. */
static inline char *prepare_side(const lm_tensor *t, kv_levels *l, char *room)
{
    int64_t n = t->dim[1] * t->dim[3];
    if (!t->kv)
        return room;
    lm_kv_levels levels = t->kv->levels;
    bool e4m3 = t->kv->float8 == LM_DTYPE_F8E4M3;
    *l = (kv_levels){ .kind = levels == LM_KV_TABLE    ? KV_LOOK_UP
                              : levels == LM_KV_FLOAT8 ? KV_FLOAT
                                                       : KV_LINEAR,
                      .mantissa = e4m3 ? 3 : 2,
                      .least = e4m3 ? 0x1p-9f : 0x1p-16f,
                      .bias = e4m3 ? 127 - 7 : 127 - 15,
                      .sixteen = t->kv->bits <= 4 };
    lm_kv_level_numbers(t->kv, l->level);
    for (int i = 0; i < 16 && levels == LM_KV_TABLE; i++)
        l->whole[i] = (uint8_t)(fmaxf(fminf(l->level[i], 127), -128) + 128);
    for (int i = 0; i < 128; i++) {
        uint16_t bits = lm_f32_to_bf16(l->level[i]);
        l->low[i] = (uint8_t)bits;
        l->high[i] = (uint8_t)(bits >> 8);
    }
    if (!t->kv->lower)
        return room;
    float *s = (float *)(void *)room, *m = s + n + 16;
    lm_kv_fixed_scales(t->kv, n, s, m);
    l->s = s;
    l->m = m;
    return room + fixed_bytes(t);
}

/* Into the second level. */
LM_INLINE void fetch_bytes(const char *p, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += LM_KV_LINE)
        _mm_prefetch(p + i, _MM_HINT_T1);
}

/* Eight stored scales. */
LM_INLINE __m256 eight_scales(lm_dtype t, const char *from)
{
    if (t == LM_DTYPE_F32)
        return _mm256_loadu_ps((const float *)(const void *)from);
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)from);
    if (t == LM_DTYPE_F16)
        return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

LM_INLINE void load_scales_of(lm_dtype t, const char *p, int64_t n, float *to)
{
    for (int64_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(to + i, eight_scales(t, p + (t == LM_DTYPE_F32 ? 4 : 2) * i));
}

/* n stored scales from number `at` on; whole vectors may be read and written. */
LM_INLINE void load_scales(lm_dtype t, const char *p, int64_t at, int64_t n, float *to)
{
    if (t == LM_DTYPE_F32)
        load_scales_of(LM_DTYPE_F32, p + 4 * at, n, to);
    else if (t == LM_DTYPE_F16)
        load_scales_of(LM_DTYPE_F16, p + 2 * at, n, to);
    else
        load_scales_of(LM_DTYPE_BF16, p + 2 * at, n, to);
}

LM_INLINE void same_scales(float v, float to[LM_KV_TILE])
{
    for (int i = 0; i < LM_KV_TILE; i += VF_LANES)
        vf_store(to + i, vf_set(v));
}

/* Spread a plane of `bits` bits over bytes, shifted up by `up`, or added to them. */
LM_INLINE void spread_plane(const uint8_t *unit, int64_t lines, int bits, int up, bool add,
                            uint8_t *to)
{
    const __m128i high = _mm_cvtsi32_si128(up);
    int each = 8 / bits;
    for (int64_t i = 0; i < lines; i += each, unit += LM_KV_LINE)
        for (int k = 0; k < each && i + k < lines; k++) {
            __m128i down = _mm_cvtsi32_si128(bits * k);
            uint8_t *line = to + (i + k) * LM_KV_LINE;
#ifdef __AVX512F__
            __m512i x = _mm512_srl_epi16(_mm512_loadu_si512(unit), down);
            x = _mm512_and_si512(x, _mm512_set1_epi8((char)((1 << bits) - 1)));
            x = _mm512_sll_epi16(x, high);
            _mm512_storeu_si512(line, add ? _mm512_or_si512(_mm512_loadu_si512(line), x) : x);
#else
            const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
            for (int b = 0; b < LM_KV_LINE; b += 32) {
                __m256i *at = (__m256i *)(void *)(line + b);
                __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(unit + b));
                x = _mm256_and_si256(_mm256_srl_epi16(x, down), mask);
                x = _mm256_sll_epi16(x, high);
                _mm256_storeu_si256(at, add ? _mm256_or_si256(_mm256_loadu_si256(at), x) : x);
            }
#endif
        }
}

/* The codes of a tile as lines of bytes: in place, or in scratch. */
LM_INLINE const uint8_t *tile_bytes(const lm_kv_format *f, const char *tile, int64_t lines,
                                    uint8_t *scratch)
{
    const uint8_t *p = (const uint8_t *)tile;
    int low = lm_kv_low_bits(f->bits);
    if (f->bits == 8)
        return p;
    if (low == 4)
        spread_plane(p, lines, 4, 0, false, scratch);
    else if (low == 2)
        spread_plane(p, lines, 2, 0, false, scratch);
    else
        spread_plane(p, lines, 1, 0, false, scratch);
    p += lm_kv_plane_bytes(low, lines);
    if (f->bits - low == 1)
        spread_plane(p, lines, 1, low, true, scratch);
    else if (f->bits - low == 2)
        spread_plane(p, lines, 2, low, true, scratch);
    return scratch;
}

/* The levels of byte `byte` of VF_LANES words. */
LM_INLINE vf levels_at(kv_kind kind, const kv_levels *l, const uint8_t *words, int byte)
{
#ifdef __AVX512F__
    __m512i x = _mm512_srl_epi32(_mm512_loadu_si512(words), _mm_cvtsi32_si128(8 * byte));
    x = _mm512_and_si512(x, _mm512_set1_epi32(255));
    if (kind == KV_LINEAR)
        return _mm512_cvtepi32_ps(x) + vf_set(l->level[0]);
    if (kind == KV_LOOK_UP && l->sixteen)
        return _mm512_permutexvar_ps(x, _mm512_loadu_ps(l->level));
    if (kind == KV_LOOK_UP)
        return _mm512_i32gather_ps(x, l->level, 4);
    __m512i low = _mm512_and_si512(x, _mm512_set1_epi32(127));
    __m512i bits = _mm512_sll_epi32(low, _mm_cvtsi32_si128(23 - l->mantissa));
    bits = _mm512_add_epi32(bits, _mm512_set1_epi32(l->bias << 23));
    __mmask16 tiny = _mm512_cmplt_epi32_mask(low, _mm512_set1_epi32(1 << l->mantissa));
    vf y = _mm512_mask_mul_ps(_mm512_castsi512_ps(bits), tiny, _mm512_cvtepi32_ps(low),
                              vf_set(l->least));
    __m512i sign = _mm512_slli_epi32(_mm512_sub_epi32(x, low), 24);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(y), sign));
#else
    __m256i x = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)(const void *)words),
                                 _mm_cvtsi32_si128(8 * byte));
    x = _mm256_and_si256(x, _mm256_set1_epi32(255));
    if (kind == KV_LINEAR)
        return _mm256_cvtepi32_ps(x) + vf_set(l->level[0]);
    if (kind == KV_LOOK_UP)
        return _mm256_i32gather_ps(l->level, x, 4);
    __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(127));
    __m256i bits = _mm256_sll_epi32(low, _mm_cvtsi32_si128(23 - l->mantissa));
    bits = _mm256_add_epi32(bits, _mm256_set1_epi32(l->bias << 23));
    __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(1 << l->mantissa), low);
    vf y = _mm256_blendv_ps(_mm256_castsi256_ps(bits), _mm256_cvtepi32_ps(low) * vf_set(l->least),
                            _mm256_castsi256_ps(tiny));
    __m256i sign = _mm256_slli_epi32(_mm256_sub_epi32(x, low), 24);
    return _mm256_or_ps(y, _mm256_castsi256_ps(sign));
#endif
}

/* Scales and minima of the 16 tokens from t on in w->s, w->m (LM_KV_TOKEN), or of their channels in w->cs, w->cm. */
LM_INLINE void prepare_scales(const kv_seq *s, const kv_side *x, const kv_levels *l,
                              const char *page, int64_t t, kv_tile_scratch *w)
{
    const lm_kv_format *f = x->f;
    bool minima = lm_kv_has_min(f);
    int64_t D = s->D, groups = lm_kv_groups(f, D);
    if (f->axis == LM_KV_CHANNEL && l->s) {
        memcpy(w->cs, l->s + s->kv * D, (size_t)D * sizeof *w->cs);
        memcpy(w->cm, l->m + s->kv * D, (size_t)D * sizeof *w->cm);
    } else if (f->axis == LM_KV_CHANNEL) {
        int64_t at = lm_kv_scale_at(f, s->T, D, t, 0);
        load_scales(f->scale, page + x->at.scale, at, D, w->cs);
        if (minima)
            load_scales(f->scale, page + x->at.min, at, D, w->cm);
        else
            memset(w->cm, 0, (size_t)D * sizeof *w->cm);
    } else {
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = (t / LM_KV_TILE * groups + g) * LM_KV_TILE;
            if (f->scale != LM_DTYPE_NONE)
                load_scales(f->scale, page + x->at.scale, at, LM_KV_TILE, w->s[g]);
            else
                same_scales(f->head ? f->head[s->kv] : (float)f->constant, w->s[g]);
            if (minima)
                load_scales(f->scale, page + x->at.min, at, LM_KV_TILE, w->m[g]);
            else
                same_scales(0, w->m[g]);
        }
    }
    if (f->second && f->axis == LM_KV_TOKEN)
        load_scales(f->scale, page + x->at.second, lm_kv_second_at(f, s->T, D, t, 0), D, w->second);
    else if (f->second)
        load_scales(f->scale, page + x->at.second, t, LM_KV_TILE, w->second);
}

/* A vector of numbers from its levels: token and channel of the first lane; by_token: lanes are tokens. */
LM_INLINE vf numbers_of(bool by_channel, bool by_token, const lm_kv_format *f,
                        const kv_tile_scratch *w, vf level, int64_t t, int64_t d, int64_t g)
{
    vf y;
    if (by_channel)
        y = by_token ? vf_fma(vf_set(w->cs[d]), level, vf_set(w->cm[d]))
                     : vf_fma(vf_load(w->cs + d), level, vf_load(w->cm + d));
    else
        y = by_token ? vf_fma(vf_load(w->s[g] + t), level, vf_load(w->m[g] + t))
                     : vf_fma(vf_set(w->s[g][t]), level, vf_set(w->m[g][t]));
    if (f->second)
        y = y * (by_channel == by_token ? vf_load(w->second + (by_token ? t : d))
                                        : vf_set(w->second[by_token ? d : t]));
    return y;
}

/* Lines of a tile of keys to kt[d][KV_SUB], 16 columns. */
LM_INLINE void turn_keys(kv_kind kind, bool by_channel, const kv_seq *s, const lm_kv_format *f,
                         const kv_levels *l, const uint8_t *bytes, const kv_tile_scratch *w,
                         float *kt)
{
    int64_t group = !by_channel && f->group ? f->group : s->D;
    for (int64_t g = 0, d0 = 0; d0 < s->D; g++, d0 += group)
        for (int64_t d = d0; d < d0 + group && d < s->D; d++)
            for (int64_t h = 0; h < LM_KV_TILE; h += VF_LANES) {
                vf level = levels_at(kind, l, bytes + d / 4 * LM_KV_LINE + 4 * h, (int)(d % 4));
                vf_store(kt + d * KV_SUB + h, numbers_of(by_channel, true, f, w, level, h, d, g));
            }
}

/* Lines of 16 tokens of values to v[t][ld]; `line`: the first of these tokens; lines from one 16 channels to the
 * next: `step`. */
LM_INLINE void spread_values(kv_kind kind, bool by_channel, const kv_seq *s, const lm_kv_format *f,
                             const kv_levels *l, const uint8_t *line, int64_t step,
                             const kv_tile_scratch *w, float *v, int64_t ld)
{
    int64_t group = !by_channel && f->group ? f->group : s->D;
    for (int64_t d = 0; d < s->D; d += 16, line += step * LM_KV_LINE)
        for (int64_t t = 0; t < LM_KV_TILE; t++)
            for (int64_t h = 0; h < 16; h += VF_LANES) {
                vf level = levels_at(kind, l, line + t / 4 * LM_KV_LINE + 4 * h, (int)(t % 4));
                vf_store(v + t * ld + d + h,
                         numbers_of(by_channel, false, f, w, level, t, d + h, d / group));
            }
}

/* Replace the outliers of tokens [t, t + 16) of the page: number (token i, channel d) lies at to[i * row + d * col]. */
static inline void patch_outliers(const kv_seq *s, const kv_side *x, const char *page, int64_t t,
                                  float *to, int64_t row, int64_t col)
{
    const uint16_t *list = (const uint16_t *)(const void *)(page + x->at.outliers);
    const uint16_t *index = list + 1, *value = index + x->f->outliers;
    int64_t lo = 0, hi = *list, first = t * s->D;
    while (lo < hi) { /* the first that is not before these tokens */
        int64_t mid = (lo + hi) / 2;
        if (index[mid] < first)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < *list && index[lo] < first + LM_KV_TILE * s->D; lo++) {
        int64_t i = index[lo] - first;
        to[i / s->D * row + i % s->D * col] = lm_f16_to_f32(value[lo]);
    }
}

LM_INLINE vf gather_floats(const float *p, const int32_t *at)
{
#ifdef __AVX512F__
    return _mm512_i32gather_ps(_mm512_loadu_si512(at), p, 4);
#else
    return _mm256_i32gather_ps(p, _mm256_loadu_si256((const __m256i *)(const void *)at), 4);
#endif
}

/* Rotate cached keys [from, to) of kt, whose first column is token j0. */
static inline void rotate_keys(const lm_call *c, const kv_seq *s, int64_t j0, int64_t from,
                               int64_t to, float *kt)
{
    const float *rope = c->in[KV_ROPE].data;
    int64_t R = c->in[KV_ROPE].dim[1], half = R / 2;
    int32_t at[KV_SUB] = { 0 };
    for (int64_t j = from; j < to; j++)
        at[j - j0] = (int32_t)((s->place ? s->place[j] : j) * R);
    for (int64_t d = 0; d < half; d++)
        for (int64_t h = 0; h < KV_SUB; h += VF_LANES) {
            float *p = kt + d * KV_SUB + h, *q = p + half * KV_SUB;
            vf u = vf_load(p), v = vf_load(q);
            vf cs = gather_floats(rope + d, at + h), sn = gather_floats(rope + half + d, at + h);
            vf_store(p, keep_range(u * cs - v * sn, h, from - j0, to - j0, u));
            vf_store(q, keep_range(v * cs + u * sn, h, from - j0, to - j0, v));
        }
}

/* Decode the 16 tokens from j on (a multiple of 16, in a page): keys to kt[D][KV_SUB]. */
static inline void wide_keys(const kv_seq *s, const kv_levels *l, int64_t j, kv_tile_scratch *w,
                             float *kt)
{
    const kv_side *x = &s->k;
    const lm_kv_format *f = x->f;
    const char *page = kv_page(s, x, j);
    int64_t t = j % s->T, lines = lm_kv_tile_lines(false, s->T, s->D);
    size_t size = lm_kv_tile_bytes(f, s->T, s->D);
    const char *tile = page + (size_t)(t / LM_KV_TILE) * size;
    const uint8_t *bytes = tile_bytes(f, tile, lines, w->bytes);
    fetch_bytes(tile + KV_AHEAD, (int64_t)size);
    prepare_scales(s, x, l, page, t, w);
    bool by_channel = f->axis == LM_KV_CHANNEL;
    if (l->kind == KV_LINEAR && by_channel)
        turn_keys(KV_LINEAR, true, s, f, l, bytes, w, kt);
    else if (l->kind == KV_LINEAR)
        turn_keys(KV_LINEAR, false, s, f, l, bytes, w, kt);
    else if (l->kind == KV_FLOAT)
        turn_keys(KV_FLOAT, by_channel, s, f, l, bytes, w, kt);
    else
        turn_keys(KV_LOOK_UP, by_channel, s, f, l, bytes, w, kt);
    if (f->outliers)
        patch_outliers(s, x, page, t, kt, 1, KV_SUB);
}

/* The same of values, to v[16][ld]; *bytes: the codes of the tile if the call before has unpacked it, else NULL. */
static inline void wide_values(const kv_seq *s, const kv_levels *l, int64_t j, kv_tile_scratch *w,
                               const uint8_t **bytes, float *v, int64_t ld)
{
    const kv_side *x = &s->v;
    const lm_kv_format *f = x->f;
    const char *page = kv_page(s, x, j);
    int64_t t = j % s->T, tokens = lm_kv_tile_tokens(true, s->T);
    int64_t lines = lm_kv_tile_lines(true, s->T, s->D);
    if (!*bytes || t % tokens == 0) {
        size_t size = lm_kv_tile_bytes(f, s->T, s->D);
        const char *tile = page + (size_t)(t / tokens) * size;
        *bytes = tile_bytes(f, tile, lines, w->bytes);
        fetch_bytes(tile + KV_AHEAD, (int64_t)size);
    }
    const uint8_t *line = *bytes + t % tokens / 4 * LM_KV_LINE;
    prepare_scales(s, x, l, page, t, w);
    bool by_channel = f->axis == LM_KV_CHANNEL;
    if (l->kind == KV_LINEAR && by_channel)
        spread_values(KV_LINEAR, true, s, f, l, line, tokens / 4, w, v, ld);
    else if (l->kind == KV_LINEAR)
        spread_values(KV_LINEAR, false, s, f, l, line, tokens / 4, w, v, ld);
    else if (l->kind == KV_FLOAT)
        spread_values(KV_FLOAT, by_channel, s, f, l, line, tokens / 4, w, v, ld);
    else
        spread_values(KV_LOOK_UP, by_channel, s, f, l, line, tokens / 4, w, v, ld);
    if (f->outliers)
        patch_outliers(s, x, page, t, v, ld, 1);
}

#endif
