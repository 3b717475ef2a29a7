/* SPDX-License-Identifier: Apache-2.0 */
/* attention_bf16.c -- BF16 attention by dot products of pairs on vectors, forward: FlashAttention-2
 * (arXiv:2307.08691, algorithm 1) with 16 queries against blocks of 64 keys.
 *
 * Scores and outputs are computed transposed, queries in lanes: maxima and sums of the softmax are
 * plain vectors, and the probabilities of two keys woven together are a B operand of the output.
 * Keys (as rows) and values (turned) are packed once for each key/value head, for all queries of
 * its group.  The running maximum of a row moves only when it has to grow by more than 2^8, as in
 * attention_amx.c; the bits of a row depend on its position and its keys alone. */
#include "kernels/attention.h"

#include "kernels/cpu/attention_drop.h"
#include "kernels/cpu/attention_pairs.h"

/* Scratch of one worker; what its pointers name follows it. */
typedef struct {
    float s[KEYS][LANES];
    uint16_t p[KEYS / 32][HALF];      /* probabilities, a B operand */
    uint32_t kept[KEYS / 32][LANES];  /* dropout: bit k of [i][query]: key 32 i + k stays */
    int32_t start[LANES], end[LANES]; /* keys that each query sees, */
    uint32_t seen[KEYS];              /* if bit `query` is set for the key of the block */
    float *o;                         /* [E rounded up to 16][16] */
    uint16_t *q;                      /* B operands of 32 queries */
    uint16_t *k, *v;                  /* A operands: [D/32][height][32], [height/32][E][32] */
    uint16_t *piece;                  /* 32 rows of values of pages */
    attn_bias_lines bias;             /* of the head */
    int64_t height, rows;             /* keys rounded up to KEYS, E to 16 */
    float scale2;                     /* of what the exponential takes: scores, or their tanh */
    float cap_by;                     /* scale / soft_cap; 0: no soft cap */
} forward_scratch;

static size_t place(forward_scratch *w, char *at, int64_t D, int64_t E, int64_t keys)
{
    int64_t height = up_to(keys, KEYS), rows = up_to(E, LANES), deep = up_to(D, ROW);
    size_t o = attn_round64(sizeof *w), q = o + (size_t)(rows * LANES) * sizeof(float);
    size_t k = q + (size_t)(2 * LANES * deep) * sizeof(uint16_t);
    size_t v = k + (size_t)(height * deep) * sizeof(uint16_t);
    size_t piece = v + (size_t)(height * rows) * sizeof(uint16_t);
    size_t bias = piece + attn_round64((size_t)(ROW * E) * sizeof(uint16_t));
    if (w) {
        w->height = height;
        w->rows = rows;
        w->o = (float *)(void *)(at + o);
        w->q = (uint16_t *)(void *)(at + q);
        w->k = (uint16_t *)(void *)(at + k);
        w->v = (uint16_t *)(void *)(at + v);
        w->piece = (uint16_t *)(void *)(at + piece);
        w->bias.x = (float *)(void *)(at + bias);
    }
    return bias + (size_t)attn_bias_numbers(keys, keys) * sizeof(float);
}

static size_t scratch_bytes(const lm_attention_attr *a, int64_t keys)
{
    return place(NULL, NULL, a->head_dim, lm_attention_value_dim(a), keys);
}

static void pack_keys(forward_scratch *w, const attn_job *job)
{
    int64_t keys = job->mask.keys;
    pack_a_rows(w->k, w->height, 0, job->k, job->k_pitch, keys, job->D);
    for (int64_t j = 0; j < keys; j += ROW)
        pack_a_turned(w->v + j * w->rows, (const uint16_t *)job->v + j * job->v_pitch, job->v_pitch,
                      keys - j, job->E);
}

/* The same of pages: 32 values may be in two of them. */
static void pack_pages(forward_scratch *w, const attn_job *job)
{
    int64_t keys = job->mask.keys, D = job->D, E = job->E, run;
    for (int64_t j = 0; j < keys; j += run) {
        const uint16_t *k = attn_piece(job, job->k, D, sizeof *k, j, keys, &run);
        pack_a_rows(w->k, w->height, j, k, D, run, D);
    }
    for (int64_t j = 0; j < keys; j += ROW) {
        int64_t end = keys - j < ROW ? keys : j + ROW;
        for (int64_t i = j; i < end; i += run) {
            const uint16_t *v = attn_piece(job, job->v, job->v_pitch, sizeof *v, i, end, &run);
            for (int64_t x = 0; x < run; x++)
                memcpy(w->piece + (i - j + x) * E, v + x * job->v_pitch, (size_t)E * sizeof *v);
        }
        pack_a_turned(w->v + j * w->rows, w->piece, E, end - j, E);
    }
}

/* Masks and caps the scores of the block at j0; their greatest of each query. */
static inline __attribute__((always_inline)) __m512
greatest(forward_scratch *w, int64_t j0, const key_range *k, bool masked, bool capped)
{
    const __m512 none = _mm512_set1_ps(-INFINITY), by = _mm512_set1_ps(w->cap_by);
    __m512 top[2] = { none, none };
    __m512i start = _mm512_load_si512(w->start), end = _mm512_load_si512(w->end);
    for (int64_t r = k->r0; r < k->r1; r += 2)
        for (int i = 0; i < 2; i++) {
            __m512 s = _mm512_load_ps(w->s[r + i]);
            if (capped)
                s = lm_tanh16(_mm512_mul_ps(s, by));
            if (masked)
                s = _mm512_mask_mov_ps(
                    none, (__mmask16)(seers(j0 + r + i, start, end) & w->seen[r + i]), s);
            if (capped || masked)
                _mm512_store_ps(w->s[r + i], s);
            top[i] = _mm512_max_ps(top[i], s);
        }
    return _mm512_max_ps(top[0], top[1]);
}

static __m512 greatest_any(forward_scratch *w, int64_t j0, const key_range *k)
{
    if (w->cap_by > 0)
        return greatest(w, j0, k, true, true);
    return k->masked ? greatest(w, j0, k, true, false) : greatest(w, j0, k, false, false);
}

/* What is kept for each query while its keys pass, besides the output. */
typedef struct {
    __m512 m, l; /* maximum in use, log2 units; sum of the probabilities */
} softmax;

/* Give the queries that outgrew their maximum a new one, and rescale what they have summed. */
static inline void move_maxima(forward_scratch *w, softmax *x, __m512 top)
{
    __mmask16 moved =
        _mm512_cmp_ps_mask(top, _mm512_add_ps(x->m, _mm512_set1_ps(8.0f)), _CMP_GT_OQ);
    if (!moved)
        return;
    __m512 f = fast_exp2(_mm512_sub_ps(x->m, top)); /* 0 of -inf */
    f = _mm512_mask_mov_ps(_mm512_set1_ps(1), moved, f);
    x->m = _mm512_mask_mov_ps(x->m, moved, top);
    x->l = _mm512_mul_ps(x->l, f);
    for (int64_t d = 0; d < w->rows; d++)
        _mm512_store_ps(w->o + d * LANES, _mm512_mul_ps(_mm512_load_ps(w->o + d * LANES), f));
}

/* p = exp2(s * scale2 - m), summed, rounded and woven; times Z/(1-p) where dropout is on. */
static inline __attribute__((always_inline)) void
exponentials(forward_scratch *w, softmax *x, const key_range *k, const attn_drop *drop)
{
    const __m512 c = _mm512_set1_ps(w->scale2), keep = _mm512_set1_ps(drop ? drop->keep : 1);
    __mmask16 none = _mm512_cmp_ps_mask(x->m, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    __m512 m = _mm512_mask_mov_ps(x->m, none, _mm512_setzero_ps());
    __m512 l[2] = { _mm512_setzero_ps(), _mm512_setzero_ps() };
    for (int64_t r = k->r0; r < k->r1; r += 2) {
        __m512 p[2];
        for (int i = 0; i < 2; i++) {
            p[i] = fast_exp2(_mm512_fmsub_ps(_mm512_load_ps(w->s[r + i]), c, m));
            l[i] = _mm512_add_ps(l[i], p[i]);
            if (drop)
                p[i] = _mm512_maskz_mul_ps(keepers(w->kept, r + i), p[i], keep);
        }
        _mm512_store_si512(w->p[r / 32] + r % 32 / 2 * ROW,
                           weave((__m512i)_mm512_cvtne2ps_pbh(p[1], p[0])));
    }
    x->l = _mm512_add_ps(x->l, _mm512_add_ps(l[0], l[1]));
}

/* The sink of a head is added; the factors of the outputs beside 1 / l. */
static __m512 add_sinks(softmax *x, float sink)
{
    float m[LANES], l[LANES], fade[LANES];
    _mm512_storeu_ps(m, x->m);
    _mm512_storeu_ps(l, x->l);
    for (int i = 0; i < LANES; i++)
        fade[i] = attn_add_sink2(sink, &m[i], &l[i]);
    x->m = _mm512_loadu_ps(m);
    x->l = _mm512_loadu_ps(l);
    return _mm512_loadu_ps(fade);
}

/* Queries i0 .. i0+15 of head h, whose B operand is q. */
static void query_group(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0,
                        const uint16_t *q)
{
    const attn_drop *drop = job->drop->rate > 0 ? job->drop : NULL;
    attn_span span = group_span(&job->mask, i0, job->queries, w->start, w->end);
    softmax x = { _mm512_set1_ps(-INFINITY), _mm512_setzero_ps() };
    uint64_t draw = drop ? lm_attention_draw(&drop->origin, job->b, h, i0) : 0;
    int64_t D = job->D, E = job->E, last = job->queries - i0 < LANES ? job->queries - i0 : LANES;
    memset(w->o, 0, (size_t)(w->rows * LANES) * sizeof(float));
    for (int64_t j0 = span.lo / KEYS * KEYS; j0 < span.hi; j0 += KEYS) {
        key_range k = range_of(&span, 0, job->mask.keys, j0);
        if (k.r0 >= k.r1 ||
            (job->mask.blocks && !open_keys(&job->mask, h, i0, job->queries, j0, &k, w->seen)))
            continue;
        product(&(pair_product){ w->k + j0 * ROW, q, w->height * ROW, 2 * HALF, w->s[0], LANES, 0,
                                 (D + 1) / 2, false,
                                 attn_bias_row(&w->bias, j0 - job->mask.off - i0) },
                k.r0, k.r1);
        move_maxima(w, &x, _mm512_mul_ps(greatest_any(w, j0, &k), _mm512_set1_ps(w->scale2)));
        if (drop) {
            attn_kept_queries(drop, draw + (uint64_t)j0, (uint64_t)attn_drop_pitch(drop), LANES,
                              w->kept[0], w->kept[1]);
            exponentials(w, &x, &k, drop);
        } else {
            exponentials(w, &x, &k, NULL);
        }
        product(&(pair_product){ w->v + j0 * w->rows, w->p[0], w->rows * ROW, HALF, w->o, LANES,
                                 k.r0 / 2, k.r1 / 2, true, NULL },
                0, up_to(E, UNIT));
    }
    __m512 fade = job->sinks ? add_sinks(&x, job->sinks[h]) : _mm512_set1_ps(1);
    __mmask16 some = _mm512_cmp_ps_mask(x.l, _mm512_setzero_ps(), _CMP_GT_OQ);
    __m512 by = job->undivided ? _mm512_maskz_mov_ps(some, fast_exp2(x.m))
                               : _mm512_maskz_div_ps(some, fade, x.l);
    store_turned(w->o, by, (uint16_t *)job->o + i0 * job->o_pitch + h * E, job->o_pitch, 0, last,
                 E);
    if (job->lse) {
        float m[LANES], l[LANES];
        _mm512_storeu_ps(m, x.m);
        _mm512_storeu_ps(l, x.l);
        for (int64_t i = 0; i < last; i++)
            job->lse[h * job->lse_head + (i0 + i) * job->lse_row] =
                attn_row_lse2(job->undivided, m[i], l[i]);
    }
}

/* The biases of head h, by the scale, which its scores are multiplied by later. */
static void load_biases(forward_scratch *w, const attn_job *job, int64_t h)
{
    int64_t keys = up_to(job->mask.keys, KEYS);
    w->bias.turned = true;
    w->bias.first = keys - 1 - job->mask.off;
    attn_bias_fill(&w->bias, &job->bias, h, 1 / job->scale, attn_bias_numbers(keys, job->queries));
}

/* All queries of one key/value head's group whose block of 32 has a number that is `part` modulo
 * `parts`. */
static void run_job(const attn_job *job, void *scratch)
{
    forward_scratch *w = scratch;
    int64_t keys = job->mask.keys, D = job->D, padded = up_to(keys, UNIT) - keys;
    place(w, scratch, D, job->E, keys);
    w->scale2 = (job->soft_cap > 0 ? job->soft_cap : job->scale) * 1.44269504088896341f;
    w->cap_by = job->soft_cap > 0 ? job->scale / job->soft_cap : 0;
    if (job->pages)
        pack_pages(w, job);
    else
        pack_keys(w, job);
    clear_a_rows(w->k, w->height, keys, padded, D);
    memset(w->seen, 0xff, sizeof w->seen);
    if (!job->bias.table)
        w->bias.x = NULL;
    for (int64_t h = job->h0; h < job->h1; h++) {
        if (w->bias.x)
            load_biases(w, job, h);
        for (int64_t i0 = 2 * LANES * job->part; i0 < job->queries; i0 += 2 * LANES * job->parts) {
            const uint16_t *q = (const uint16_t *)job->q + i0 * job->q_pitch + h * D;
            pack_b_rows(w->q, q, job->q_pitch, job->queries - i0, D);
            query_group(w, job, h, i0, w->q);
            if (i0 + LANES < job->queries)
                query_group(w, job, h, i0 + LANES, w->q + HALF);
        }
    }
}

static void attention(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    attn_run_split(c, run_job, scratch_bytes(a, a->seq), NULL);
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
        lm_attention_decode_avx512(c);
    if (k.prompts)
        attn_run_split(c, run_job, scratch_bytes(c->attr, attn_room(&s)), &s);
}

static size_t attention_cached_work(const lm_call *c, int threads)
{
    attn_seqs s = attn_seqs_of(c);
    attn_kinds k = attn_kinds_of(&s);
    size_t few = k.tokens ? lm_attention_decode_work_avx512(c, threads) : 0;
    size_t many = k.prompts ? attn_run_work(threads, scratch_bytes(c->attr, attn_room(&s))) : 0;
    return attn_more(few, many);
}

const lm_kernel lm_attention_bf16_kernels[] = {
    { "attention", LM_DTYPE_BF16, LM_CPU_BF16, attention, attention_work },
    { "attention_dx", LM_DTYPE_BF16, LM_CPU_BF16, lm_attention_dx_bf16, lm_attention_dx_bf16_work },
    { "attention_cached", LM_DTYPE_BF16, LM_CPU_BF16, attention_cached, attention_cached_work },
    { 0 },
};
