/* SPDX-License-Identifier: Apache-2.0 */
/* codes_simd.c -- codes with scales, a block of 256 numbers at a time.  The dynamic map is looked up by gathers. */
#include "kernels/codes.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/cpu/vrng.h"
#include "kernels/map.h"
#include "numeric/format_dynamic.h"

enum { BLOCK = LM_CODES_BLOCK, BLOCKS_AT_ONCE = 16 };

#ifdef __AVX512F__
typedef __m512i vi;
#define VI(name)               _mm512_##name
#define GATHER_F32(table, i)   _mm512_i32gather_ps(i, table, 4)
#define GATHER_BYTES(table, i) _mm512_i32gather_epi32(i, table, 1)
LM_INLINE vi vi_load(const int32_t *p)
{
    return _mm512_loadu_si512(p);
}
LM_INLINE void vi_store(int32_t *p, vi v)
{
    _mm512_storeu_si512(p, v);
}
LM_INLINE vi vi_bits(vf v)
{
    return _mm512_castps_si512(v);
}
/* k + 1 where v > mid, else k */
LM_INLINE vi vi_next(vi k, vf v, vf mid)
{
    return _mm512_mask_add_epi32(k, _mm512_cmp_ps_mask(v, mid, _CMP_GT_OQ), k,
                                 _mm512_set1_epi32(1));
}
#else
typedef __m256i vi;
#define VI(name)               _mm256_##name
#define GATHER_F32(table, i)   _mm256_i32gather_ps(table, i, 4)
#define GATHER_BYTES(table, i) _mm256_i32gather_epi32(table, i, 1)
LM_INLINE vi vi_load(const int32_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
LM_INLINE void vi_store(int32_t *p, vi v)
{
    _mm256_storeu_si256((__m256i *)p, v);
}
LM_INLINE vi vi_bits(vf v)
{
    return _mm256_castps_si256(v);
}
LM_INLINE vi vi_next(vi k, vf v, vf mid)
{
    return _mm256_sub_epi32(k, _mm256_castps_si256(_mm256_cmp_ps(v, mid, _CMP_GT_OQ)));
}
#endif

/* ---- a block: numbers in x, codes in k, both of BLOCK numbers whatever n is ---- */

typedef struct {
    float x[BLOCK];
    int32_t k[BLOCK];
    float scale, zero;
} block;

LM_INLINE vf vf_floor(vf v)
{
    vf r = vf_round(v);
    return vf_if_lt(v, r, r - vf_set(1), r);
}

/* The range of x; false: a number is not finite. */
LM_INLINE bool range_of(const block *b, float *least, float *largest)
{
    vf low = vf_load(b->x), high = low, bad = vf_set(0);
    for (int i = 0; i < BLOCK; i += VF_LANES) {
        vf v = vf_load(b->x + i);
        low = vf_min(low, v);
        high = vf_max(high, v);
        bad = vf_fma(v, vf_set(0), bad);
    }
    *largest = vf_top(high);
    *least = -vf_top(vf_set(0) - low);
    return vf_sum(bad) == 0;
}

static void encode_dynamic(block *b)
{
    float least, largest;
    bool finite = range_of(b, &least, &largest);
    float most = fmaxf(-least, largest);
    const lm_dynamic_map *m = &lm_dynamic_maps()[finite && least < 0];
    bool none = !finite || !(most > 0);
    b->scale = !finite ? NAN : none ? 0 : least < 0 ? -most : most;
    if (none) {
        for (int i = 0; i < BLOCK; i++)
            b->k[i] = m->zero;
        return;
    }
    for (int i = 0; i < BLOCK; i += VF_LANES) {
        vf v = vf_load(b->x + i) / vf_set(most);
        vi bits = vi_bits(v);
        vi cell = VI(srli_epi32)(bits & VI(set1_epi32)(0x7fffffff), LM_DYNAMIC_CELL_SHIFT);
        cell = VI(max_epi32)(VI(sub_epi32)(cell, VI(set1_epi32)(LM_DYNAMIC_CELL_LEAST)),
                             VI(set1_epi32)(0));
        vi sign = VI(srli_epi32)(bits, 31);
        vi place = VI(add_epi32)(cell, VI(mullo_epi32)(sign, VI(set1_epi32)(LM_DYNAMIC_ROOM)));
        vi k = GATHER_BYTES((const int *)(const void *)m->start, place) & VI(set1_epi32)(255);
        vi_store(b->k + i, vi_next(k, v, GATHER_F32(m->mid, k)));
    }
    for (int i = 0; b->scale > 0 && i < BLOCK; i++)
        b->k[i] += b->k[i] == m->zero && b->x[i] > 0;
}

static void decode_dynamic(block *b)
{
    const lm_dynamic_map *m = &lm_dynamic_maps()[b->scale < 0];
    vf scale = vf_set(fabsf(b->scale));
    for (int i = 0; i < BLOCK; i += VF_LANES)
        vf_store(b->x + i, GATHER_F32(m->value, vi_load(b->k + i)) * scale);
}

/* draws: those of the block, or NULL. */
static void encode_affine(block *b, float most, const uint32_t *draws)
{
    float least, largest;
    b->scale = NAN;
    b->zero = 0;
    if (!range_of(b, &least, &largest)) {
        memset(b->k, 0, sizeof b->k);
        return;
    }
    b->scale = fmaxf(largest - least, 1e-5f) / most;
    b->zero = fminf(fmaxf(-nearbyintf(least / b->scale), 0), most) + 0.0f; /* no -0 */
    float q[BLOCK];
    for (int i = 0; i < BLOCK; i += VF_LANES) {
        vf v = vf_load(b->x + i) / vf_set(b->scale), r = vf_round(v);
        if (draws) {
            vi top = VI(srli_epi32)(vi_load((const int32_t *)(const void *)draws + i), 8);
            vf down = vf_floor(v), u = VI(cvtepi32_ps)(top) * vf_set(0x1p-24f);
            r = vf_if_lt(u, v - down, down + vf_set(1), down);
        }
        vf_store(q + i, vf_min(vf_max(r + vf_set(b->zero), vf_set(0)), vf_set(most)));
    }
    for (int i = 0; i < BLOCK; i++)
        b->k[i] = (int32_t)q[i];
}

static void decode_affine(block *b)
{
    vf scale = vf_set(b->scale), zero = vf_set(b->zero);
    for (int i = 0; i < BLOCK; i += VF_LANES)
        vf_store(b->x + i, scale * (VI(cvtepi32_ps)(vi_load(b->k + i)) - zero));
}

/* ---- codes to bytes and back ---- */

static void put_codes(lm_codes_format f, uint8_t *code, const block *b, int n)
{
    if (f != LM_CODES_AFFINE4) {
        for (int i = 0; i < n; i++)
            code[i] = (uint8_t)b->k[i];
        return;
    }
    for (int i = 0; i + 1 < n; i += 2)
        code[i / 2] = (uint8_t)(b->k[i] | b->k[i + 1] << 4);
    if (n % 2)
        code[n / 2] = (uint8_t)b->k[n - 1];
}

static void get_codes(lm_codes_format f, const uint8_t *code, block *b, int n)
{
    if (f != LM_CODES_AFFINE4) {
        for (int i = 0; i < n; i++)
            b->k[i] = code[i];
    } else {
        for (int i = 0; i < n; i++)
            b->k[i] = code[i / 2] >> 4 * (i % 2) & 15;
    }
    if (n < BLOCK)
        memset(b->k + n, 0, (size_t)(BLOCK - n) * sizeof *b->k);
}

/* ---- kernels ---- */

typedef struct {
    const lm_call *call;
    const lm_codes_attr *attr;
    int64_t count;
    lm_rng rng;
    uint64_t first; /* draw of the first number */
} job;

static int in_block(const job *j, int64_t b)
{
    int64_t left = j->count - b * BLOCK;
    return left < BLOCK ? (int)left : BLOCK;
}

static void encode_blocks(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_call *c = j->call;
    lm_codes_format f = j->attr->format;
    const float *x = c->in[1].data;
    float *scale = c->out[1].data, *zero = c->out[2].data;
    uint32_t draws[BLOCK];
    block w;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int n = in_block(j, b);
        memcpy(w.x, x + b * BLOCK, (size_t)n * sizeof *x);
        for (int i = n; i < BLOCK; i++)
            w.x[i] = w.x[0];
        if (f == LM_CODES_DYNAMIC8) {
            encode_dynamic(&w);
        } else {
            for (int i = 0; j->attr->stochastic && i < BLOCK; i += VRNG_DRAWS)
                lm_philox_draws(j->rng, (j->first + (uint64_t)(b * BLOCK + i)) / 4, draws + i);
            encode_affine(&w, lm_codes_most(f), j->attr->stochastic ? draws : NULL);
            zero[b] = w.zero;
        }
        scale[b] = w.scale;
        put_codes(f, (uint8_t *)c->out[0].data + lm_codes_bytes(f, b * BLOCK), &w, n);
    }
}

static void encode(const lm_call *c)
{
    job j = { .call = c, .attr = c->attr, .count = lm_tensor_count(&c->in[1]) };
    int64_t blocks = lm_codes_blocks(j.count);
    if (!lm_map_opens(c))
        return;
    j.rng = lm_rng_make(c->step->seed, "codes", (uint64_t)j.attr->stream);
    j.first = lm_rng_first(&j.rng, (uint64_t)c->step->step, (uint64_t)blocks * BLOCK);
    lm_par_for(c->par, blocks, BLOCKS_AT_ONCE, encode_blocks, &j);
}

static void decode_blocks(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_call *c = j->call;
    lm_codes_format f = j->attr->format;
    const float *scale = c->in[1].data, *zero = c->in[2].data;
    float *y = c->out[0].data;
    block w;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int n = in_block(j, b);
        get_codes(f, (const uint8_t *)c->in[0].data + lm_codes_bytes(f, b * BLOCK), &w, n);
        w.scale = scale[b];
        if (f == LM_CODES_DYNAMIC8) {
            decode_dynamic(&w);
        } else {
            w.zero = zero[b];
            decode_affine(&w);
        }
        memcpy(y + b * BLOCK, w.x, (size_t)n * sizeof *y);
    }
}

static void decode(const lm_call *c)
{
    job j = { .call = c, .attr = c->attr, .count = lm_tensor_count(&c->out[0]) };
    lm_par_for(c->par, lm_codes_blocks(j.count), BLOCKS_AT_ONCE, decode_blocks, &j);
}

const lm_kernel LM_TABLE_NAME(codes, LM_SIMD)[] = {
    VF_KERNEL_F32("encode", encode, NULL),
    VF_KERNEL_F32("decode", decode, NULL),
    VF_KERNEL_END,
};
