/* SPDX-License-Identifier: Apache-2.0 */
/* codes_ref.c -- the definition of the codes family (kernels/codes.h).  What becomes a code is computed in F32, so
 * that every backend finds the same. */
#include "kernels/codes.h"

#include <math.h>

#include "base/rng.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "kernels/map.h"
#include "numeric/format_dynamic.h"

typedef struct {
    float scale, zero;
} affine;

static affine affine_of(const float *x, int64_t n, float most)
{
    float least = INFINITY, largest = -INFINITY;
    affine a = { NAN, 0 };
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            return a;
        least = x[i] < least ? x[i] : least;
        largest = x[i] > largest ? x[i] : largest;
    }
    a.scale = fmaxf(largest - least, 1e-5f) / most;
    a.zero = fminf(fmaxf(-nearbyintf(least / a.scale), 0), most) + 0.0f; /* no -0 */
    return a;
}

/* r: a draw; NULL: to nearest. */
static int affine_code(const affine *a, float x, float most, const uint32_t *r)
{
    float v = x / a->scale, down = floorf(v);
    if (isnan(v))
        return 0;
    v = !r ? nearbyintf(v) : (float)(*r >> 8) * 0x1p-24f < v - down ? down + 1 : down;
    return (int)fminf(fmaxf(v + a->zero, 0), most);
}

static void put_code(const lm_codes_attr *a, uint8_t *code, int64_t i, int value)
{
    if (a->format != LM_CODES_AFFINE4)
        code[i] = (uint8_t)value;
    else if (i % 2)
        code[i / 2] = (uint8_t)((code[i / 2] & 15) | value << 4);
    else
        code[i / 2] = (uint8_t)value;
}

static int get_code(const lm_codes_attr *a, const uint8_t *code, int64_t i)
{
    if (a->format != LM_CODES_AFFINE4)
        return code[i];
    return i % 2 ? code[i / 2] >> 4 : code[i / 2] & 15;
}

static void encode(const lm_call *c)
{
    const lm_codes_attr *a = c->attr;
    int64_t count = lm_tensor_count(&c->in[1]);
    float most = lm_codes_most(a->format);
    lm_rng rng = lm_rng_make(c->step->seed, "codes", (uint64_t)a->stream);
    uint64_t first = lm_rng_first(&rng, (uint64_t)c->step->step,
                                  (uint64_t)lm_codes_blocks(count) * LM_CODES_BLOCK);
    uint8_t *code = c->out[0].data;
    for (int64_t b = 0; lm_map_opens(c) && b < lm_codes_blocks(count); b++) {
        int64_t at = b * LM_CODES_BLOCK;
        int64_t n = count - at < LM_CODES_BLOCK ? count - at : LM_CODES_BLOCK;
        float x[LM_CODES_BLOCK], scale;
        for (int64_t i = 0; i < n; i++)
            x[i] = (float)get(&c->in[1], at + i);
        if (a->format == LM_CODES_DYNAMIC8) {
            lm_dynamic_encode(NULL, x, 1, n, n, (void *[]){ code + at, &scale }, NULL);
            set(&c->out[1], b, scale);
            continue;
        }
        affine block = affine_of(x, n, most);
        for (int64_t i = 0; i < n; i++) {
            uint32_t r = a->stochastic ? lm_rng_u32(rng, first + (uint64_t)(at + i)) : 0;
            put_code(a, code, at + i, affine_code(&block, x[i], most, a->stochastic ? &r : NULL));
        }
        set(&c->out[1], b, block.scale);
        set(&c->out[2], b, block.zero);
    }
}

static void decode(const lm_call *c)
{
    const lm_codes_attr *a = c->attr;
    int64_t count = lm_tensor_count(&c->out[0]);
    const uint8_t *code = c->in[0].data;
    for (int64_t i = 0; i < count; i++) {
        double scale = get(&c->in[1], i / LM_CODES_BLOCK);
        int k = get_code(a, code, i);
        if (a->format == LM_CODES_DYNAMIC8)
            set(&c->out[0], i, lm_dynamic_maps()[scale < 0].value[k] * fabs(scale));
        else
            set(&c->out[0], i, scale * (k - get(&c->in[2], i / LM_CODES_BLOCK)));
    }
}

const lm_kernel lm_codes_ref_kernels[] = {
    { "encode", LM_DTYPE_NONE, LM_CPU_REF, encode, NULL },
    { "decode", LM_DTYPE_NONE, LM_CPU_REF, decode, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
