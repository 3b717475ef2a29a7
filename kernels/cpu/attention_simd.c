/* SPDX-License-Identifier: Apache-2.0 */
/* attention_simd.c -- attention on vectors in F32 (BF16 is widened when packed), forward:
 * FlashAttention-2 (arXiv:2307.08691, algorithm 1), 48 queries against blocks of 64 keys. */
#include "kernels/attention.h"

#include "kernels/cpu/attention_drop.h"
#include "kernels/cpu/attention_simd.h"

/* Scratch of one worker: the block, then keys (transposed in blocks) and values. */
typedef struct {
    float s[BR][BC], z[BC];
    float m[BR], l[BR];
    float *q, *o;   /* [BR][ld] */
    float *kt, *v;  /* [keys/BC][D][BC], [keys][ld] */
    int64_t ld, lv; /* the greater of D and E, and E, in whole vectors */
} forward_scratch;

static int64_t greater_dim(const lm_attention_attr *a)
{
    int64_t E = lm_attention_value_dim(a);
    return a->head_dim > E ? a->head_dim : E;
}

static size_t scratch_bytes(const lm_attention_attr *a, int64_t keys)
{
    int64_t ld = padded(greater_dim(a), PAD), n = padded(keys, BC);
    return attn_round64(sizeof(forward_scratch)) +
           (size_t)(2 * BR * ld + n * (ld + a->head_dim)) * sizeof(float);
}

/* Running maximum, sum and rescaling of one row; leaves probabilities in its scores. */
LM_INLINE void softmax_row(lm_dtype t, forward_scratch *w, int64_t r, int64_t from, int64_t to,
                           bool dropped)
{
    vf none = vf_set(-INFINITY), top = none;
    float *s = w->s[r];
    for (int64_t j = 0; j < BC; j += VF_LANES) {
        vf v = keep_range(vf_load(s + j), j, from, to, none);
        vf_store(s + j, v);
        top = vf_max(top, v);
    }
    float m = vf_top(top);
    if (m > w->m[r]) {
        vf f = vf_set(w->m[r] == -INFINITY ? 0.0f : expf(w->m[r] - m));
        for (int64_t d = 0; d < w->lv; d += VF_LANES)
            vf_store(w->o + r * w->ld + d, vf_load(w->o + r * w->ld + d) * f);
        w->l[r] *= w->m[r] == -INFINITY ? 0.0f : expf(w->m[r] - m);
        w->m[r] = m;
    }
    vf shift = vf_set(w->m[r] == -INFINITY ? 0.0f : w->m[r]), l = vf_zero();
    for (int64_t j = 0; j < BC; j += VF_LANES) {
        vf p = vf_exp(vf_load(s + j) - shift);
        l += p;
        if (dropped)
            p *= vf_load(w->z + j);
        vf_store(s + j, vf_round_to(t, p));
    }
    w->l[r] += vf_sum(l);
}

LM_INLINE void store_rows(lm_dtype t, forward_scratch *w, const attn_job *job, int64_t h,
                          int64_t i0, int64_t n)
{
    for (int64_t r = 0; r < n; r++) {
        float fade = job->sinks ? attn_add_sink(job->sinks[h], &w->m[r], &w->l[r]) : 1;
        vf inv = vf_set(attn_row_factor(job->undivided, fade, w->m[r], w->l[r]));
        int64_t at = (i0 + r) * job->o_pitch + h * job->E;
        VF_FOR(d, live, job->E,
               { vf_put_any(t, job->o, at + d, vf_load(w->o + r * w->ld + d) * inv, live); });
        if (job->lse)
            job->lse[h * job->lse_head + (i0 + r) * job->lse_row] =
                attn_row_lse(job->undivided, w->m[r], w->l[r]);
    }
}

LM_INLINE void query_block(lm_dtype t, forward_scratch *w, const attn_job *job, int64_t h,
                           int64_t i0, int64_t n)
{
    int64_t D = job->D, ld = w->ld;
    attn_span span = attn_span_of(&job->mask, i0, i0 + n);
    const attn_drop *drop = job->drop->rate > 0 ? job->drop : NULL;
    uint64_t draw = drop ? lm_attention_draw(&drop->origin, job->b, h, i0) : 0;
    pack_rows(t, w->q, ld, n, attn_at(job->q, i0 * job->q_pitch + h * D, lm_dtype_size(t)),
              job->q_pitch, n, D, job->scale);
    memset(w->o, 0, (size_t)(n * ld) * sizeof(float));
    for (int64_t r = 0; r < n; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
    for (int64_t j0 = span.lo / BC * BC; j0 < span.hi; j0 += BC) {
        if (!attn_open(&job->mask, h, i0, i0 + n, j0, j0 + BC))
            continue;
        mm(&(mm_args){ n, BC, D, w->q, ld, 1, w->kt + j0 * D, BC, w->s[0], BC, false });
        if (job->bias.table)
            add_biases(w->s, &job->bias, h, job->mask.off + i0, n, j0);
        if (job->soft_cap > 0)
            cap_scores(w->s[0], n * BC, job->soft_cap);
        for (int64_t r = 0; r < n; r++) {
            int64_t from, to;
            visible(&job->mask, i0 + r, j0, &from, &to);
            if (job->mask.blocks)
                attn_hide(&job->mask, h, i0 + r, j0, BC, -INFINITY, w->s[r]);
            if (drop)
                attn_drop_fill64(drop, draw + (uint64_t)(r * attn_drop_pitch(drop) + j0), w->z);
            softmax_row(t, w, r, from, to, drop != NULL);
        }
        int64_t width = span.hi - j0 < BC ? span.hi - j0 : BC;
        mm(&(mm_args){ n, w->lv, width, w->s[0], BC, 1, w->v + j0 * ld, ld, w->o, ld, true });
    }
    store_rows(t, w, job, h, i0, n);
}

/* `dim` numbers of each key or value of pages into to[n][ld], zeros behind them; `line` numbers lie between them. */
LM_INLINE void pack_pages(lm_dtype t, float *to, int64_t ld, int64_t n, const attn_job *job,
                          const void *cache, int64_t line, int64_t dim)
{
    int64_t keys = job->mask.keys, size = (int64_t)lm_dtype_size(t), run;
    for (int64_t j = 0; j < keys; j += run) {
        const void *from = attn_piece(job, cache, line, (size_t)size, j, keys, &run);
        pack_rows(t, to + j * ld, ld, run, from, line, run, dim, 1);
    }
    memset(to + keys * ld, 0, (size_t)((n - keys) * ld) * sizeof *to);
}

/* The keys or the values of the job into to[n][ld]. */
LM_INLINE void pack_side(lm_dtype t, float *to, int64_t ld, int64_t n, const attn_job *job,
                         const void *x, int64_t pitch, int64_t dim)
{
    if (job->pages)
        pack_pages(t, to, ld, n, job, x, pitch, dim);
    else
        pack_rows(t, to, ld, n, x, pitch, job->mask.keys, dim, 1);
}

LM_INLINE void run_job(lm_dtype t, const attn_job *job, void *scratch)
{
    forward_scratch *w = scratch;
    int64_t D = job->D, n = padded(job->mask.keys, BC);
    w->ld = padded(D > job->E ? D : job->E, PAD);
    w->lv = padded(job->E, PAD);
    w->q = (float *)((char *)scratch + attn_round64(sizeof *w));
    w->o = w->q + BR * w->ld;
    w->v = w->o + BR * w->ld;
    w->kt = w->v + n * w->ld;
    if (job->pack) {
        job->pack(job, attn_start(&job->mask, 0), w->kt, w->v);
    } else {
        pack_side(t, w->v, w->ld, n, job, job->k, job->k_pitch, D);
        pack_turned(w->kt, n, w->v, w->ld, D);
        pack_side(t, w->v, w->ld, n, job, job->v, job->v_pitch, job->E);
    }
    for (int64_t h = job->h0; h < job->h1; h++) {
        for (int64_t i0 = BR * job->part; i0 < job->queries; i0 += BR * job->parts) {
            int64_t rows = job->queries - i0 < BR ? job->queries - i0 : BR;
            query_block(t, w, job, h, i0, rows);
        }
    }
}

static void job_f32(const attn_job *job, void *scratch)
{
    run_job(LM_DTYPE_F32, job, scratch);
}

static void job_bf16(const attn_job *job, void *scratch)
{
    run_job(LM_DTYPE_BF16, job, scratch);
}

static attn_job_fn job_for(const lm_call *c)
{
    return c->in[0].dtype == LM_DTYPE_BF16 ? job_bf16 : job_f32;
}

static void attention(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    attn_run_split(c, job_for(c), scratch_bytes(a, a->seq), NULL);
}

static size_t attention_work(const lm_call *c, int threads)
{
    const lm_attention_attr *a = c->attr;
    return attn_run_work(threads, scratch_bytes(a, a->seq));
}

static void attention_cached(const lm_call *c)
{
    attn_seqs s = attn_seqs_of(c);
    attn_kinds k = attn_kinds_of(&s);
    attn_append(c);
    if (k.tokens)
        attention_decode_run(c);
    if (k.prompts)
        attn_run_split(c, job_for(c), scratch_bytes(c->attr, attn_room(&s)), &s);
}

static size_t attention_cached_work(const lm_call *c, int threads)
{
    attn_seqs s = attn_seqs_of(c);
    attn_kinds k = attn_kinds_of(&s);
    size_t few = k.tokens ? attention_decode_bytes(c, threads) : 0;
    size_t many = k.prompts ? attn_run_work(threads, scratch_bytes(c->attr, attn_room(&s))) : 0;
    return attn_more(few, many);
}

size_t LM_ATTN_NAME(attention_packed_bytes, LM_SIMD)(const lm_attention_attr *a, int64_t keys)
{
    return scratch_bytes(a, keys);
}

void LM_ATTN_NAME(attention_packed, LM_SIMD)(lm_dtype act, const attn_job *job, void *scratch)
{
    if (act == LM_DTYPE_BF16)
        job_bf16(job, scratch);
    else
        job_f32(job, scratch);
}

#define KERNELS_OF(type)                                                                        \
    { "attention", type, LM_SIMD_LEVEL, attention, attention_work },                            \
        { "attention_dx", type, LM_SIMD_LEVEL, attention_dx_run, attention_dx_bytes },          \
        { "attention_dbias", type, LM_SIMD_LEVEL, attention_dbias_run, attention_dbias_bytes }, \
    {                                                                                           \
        "attention_cached", type, LM_SIMD_LEVEL, attention_cached, attention_cached_work        \
    }

const lm_kernel LM_TABLE_NAME(attention, LM_SIMD)[] = {
    KERNELS_OF(LM_DTYPE_F32),
    KERNELS_OF(LM_DTYPE_BF16),
    { 0 },
};
