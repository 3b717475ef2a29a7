/* SPDX-License-Identifier: Apache-2.0 */
/* attention_plan.h -- what the CPU attention kernels share: which keys a query sees, and the
 * dropout draw.  Contract: kernels/attention.h.
 *
 * A mask speaks of one sequence: query i sits at position off + i among keys 0 .. keys-1 and sees
 * those from attn_start(m, i) up to, not including, attn_end(m, i); none when start >= end. */
#ifndef LM_KERNELS_CPU_ATTENTION_PLAN_H
#define LM_KERNELS_CPU_ATTENTION_PLAN_H

#include "base/rng.h"
#include "kernels/attention.h"

typedef struct {
    int64_t off, keys, window;
    bool causal;
    const int32_t *lo, *hi;            /* [queries] or NULL */
    const lm_attention_blocks *blocks; /* NULL: none (attention_blocks.h) */
    int64_t heads;                     /* with blocks */
} attn_mask;

static inline int64_t attn_start(const attn_mask *m, int64_t i)
{
    int64_t s = m->lo && m->lo[i] > 0 ? m->lo[i] : 0;
    int64_t w = m->window > 0 ? m->off + i - m->window + 1 : 0;
    return s > w ? s : w;
}

static inline int64_t attn_end(const attn_mask *m, int64_t i)
{
    int64_t e = m->off + i + (m->causal ? 1 : m->window);
    if ((!m->causal && m->window <= 0) || e > m->keys)
        e = m->keys;
    return m->hi && m->hi[i] < e ? m->hi[i] : e;
}

/* What queries i0 .. i1-1 see together: any of them sees [lo, hi), all of them [full_lo, full_hi).
 */
typedef struct {
    int64_t lo, hi, full_lo, full_hi;
} attn_span;

static inline attn_span attn_span_of(const attn_mask *m, int64_t i0, int64_t i1)
{
    attn_span s = { .lo = attn_start(m, i0), .hi = attn_end(m, i1 - 1) };
    s.full_lo = attn_start(m, i1 - 1);
    s.full_hi = attn_end(m, i0);
    for (int64_t i = i0; (m->lo || m->hi) && i < i1; i++) {
        int64_t v = attn_start(m, i), e = attn_end(m, i);
        s.lo = v < s.lo ? v : s.lo;
        s.full_lo = v > s.full_lo ? v : s.full_lo;
        s.hi = e > s.hi ? e : s.hi;
        s.full_hi = e < s.full_hi ? e : s.full_hi;
    }
    return s;
}

/* Dropout of one call.  Nothing is dropped when `rate` is 0. */
typedef struct {
    lm_rng rng;
    uint32_t threshold;
    float keep; /* 1/(1-p) */
    double rate;
    lm_attention_origin origin;
    uint32_t keys[20]; /* of the ten rounds of Philox */
} attn_drop;

static inline attn_drop attn_drop_of(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    attn_drop d = { .rate = a->dropout, .keep = 1, .origin = lm_attention_origin_of(a) };
    if (a->dropout > 0) {
        d.rng = lm_rng_make(
            lm_rng_key(c->step->seed, (uint64_t)c->step->step, (uint64_t)c->step->micro),
            "attention dropout", (uint64_t)a->site);
        d.threshold = (uint32_t)(a->dropout * 0x1p32);
        d.keep = (float)(1 / (1 - a->dropout));
        for (uint32_t i = 0; i < 10; i++) {
            d.keys[2 * i] = (uint32_t)d.rng.key + i * 0x9E3779B9u;
            d.keys[2 * i + 1] = (uint32_t)(d.rng.key >> 32) + i * 0xBB67AE85u;
        }
    }
    return d;
}

/* Draws between those of a query and of the next one. */
static inline int64_t attn_drop_pitch(const attn_drop *d)
{
    return d->origin.seq;
}

/* Z/(1-p) of keys j0 .. j0+n-1 of that row: the definition; attention_drop.h is the fast form. */
static inline void attn_drop_fill(const attn_drop *d, uint64_t row, int64_t j0, int64_t n, float *z)
{
    for (int64_t j = 0; j < n;) {
        uint64_t at = row + (uint64_t)(j0 + j);
        lm_u32x4 r = lm_philox(at / 4, d->rng.hi, d->rng.key); /* four draws share a block */
        for (uint64_t k = at % 4; k < 4 && j < n; k++, j++)
            z[j] = r.v[k] >= d->threshold ? d->keep : 0.0f;
    }
}

static inline const int32_t *attn_i32(const lm_call *c, int i)
{
    return i < c->n_in ? c->in[i].data : NULL;
}

static inline const float *attn_f32(const lm_call *c, int i)
{
    return i < c->n_in ? c->in[i].data : NULL;
}

static inline attn_mask attn_mask_of(const lm_attention_attr *a, const int32_t *lo,
                                     const int32_t *hi, int64_t b)
{
    return (attn_mask){ .keys = a->seq,
                        .window = a->window,
                        .causal = a->causal,
                        .blocks = a->blocks.size > 0 ? &a->blocks : NULL,
                        .heads = a->heads,
                        .lo = lo ? lo + b * a->seq : NULL,
                        .hi = hi ? hi + b * a->seq : NULL };
}

/* The mask of sequence b of attention_cached. */
static inline attn_mask attn_cached_mask(const lm_attention_attr *a, int64_t used, int64_t fresh)
{
    return (attn_mask){ .off = used,
                        .keys = used + (a->reads ? 0 : fresh),
                        .window = a->window,
                        .causal = a->causal,
                        .blocks = a->blocks.size > 0 ? &a->blocks : NULL,
                        .heads = a->heads };
}

#endif
