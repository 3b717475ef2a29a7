/* attention_amx.c -- BF16 attention on AMX tiles, forward: FlashAttention-2 (arXiv:2307.08691,
 * algorithm 1) with 32 queries against blocks of 128 keys.
 *
 * S = Q K^T and P V run on tiles, the softmax in AVX-512 between them.  Keys are packed as column
 * tiles and values as pair tiles once for each key/value head, for all queries of its group.  The
 * running maximum of a row moves only when it has to grow by more than 2^8 (the factor exp2(s - m)
 * stays far inside F32 and BF16), so rows are almost never rescaled after their first block. */
#include "kernels/attention.h"

#include <math.h>

#include "kernels/cpu/attention_amx.h"
#include "kernels/cpu/attention_jobs.h"
#include "kernels/cpu/tables.h"

enum { BQ = 32, BK = 64, MAX_TILES_D = 16 };

/* Scratch of one worker; the packed keys and values follow it.  What a block touches fits into L1
 * for head size 64: that decides the speed, so the probabilities of 32 keys (an A tile) take the
 * place of the scores of the first 16 of them (a C tile). */
typedef struct {
    float s[2][BK / 16][CTILE];             /* scores [16 queries][16 keys], then probabilities */
    float l[BQ][16];                        /* lane-wise sums of p */
    float m[BQ], top[BQ];                   /* maximum in use, maximum of the block; log2 units */
    float z[BK];                            /* dropout multipliers of a row */
    uint16_t q[2 * MAX_TILES_D / 2 * TILE]; /* queries, A tiles [16 queries][32 d] */
    float acc[2 * MAX_TILES_D * CTILE];     /* output, C tiles [16 queries][16 d] */
} forward_scratch;

static int64_t blocks_of(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

static size_t scratch_bytes(const lm_attention_attr *a, int64_t keys)
{
    size_t packed = (size_t)(blocks_of(keys, BK) * BK * a->head_dim) * sizeof(uint16_t);
    return sizeof(forward_scratch) + 2 * packed;
}

static void pack_keys(const attn_job *job, int64_t keys, uint16_t *kp, uint16_t *vp)
{
    int64_t nd = job->D / 32, padded = blocks_of(keys, BK) * BK;
    for (int64_t j = 0; j < padded; j += 16)
        for (int64_t d = 0; d < nd; d++)
            pack_columns(kp + (j / 16 * nd + d) * TILE, (const uint16_t *)job->k + j * job->k_pitch,
                         job->k_pitch, 32 * d, keys - j);
    for (int64_t j = 0; j < padded; j += 32) {
        for (int64_t d = 0; d < nd; d++) {
            uint16_t *to = vp + (j / 32 * nd + d) * 2 * TILE;
            pack_pairs(to, to + TILE, (const uint16_t *)job->v + j * job->v_pitch, job->v_pitch,
                       32 * d, keys - j);
        }
    }
}

/* s = q k^T for n_tiles (even) tiles of 16 keys.  The general form computes 2 x 2 tiles at a time;
 * with two tiles of head size the queries stay in registers instead. */
static inline __attribute__((always_inline)) void
scores_wide(forward_scratch *w, const uint16_t *kp, int n_tiles, int nd)
{
    for (int t = 0; t < n_tiles; t += 2) {
        const uint16_t *k0 = kp + t * nd * TILE, *k1 = k0 + nd * TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < nd; d++) {
            _tile_loadd(4, w->q + d * TILE, 64);
            _tile_loadd(6, k0 + d * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, k1 + d * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, w->q + (nd + d) * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, w->s[0][t], 64);
        _tile_stored(1, w->s[0][t + 1], 64);
        _tile_stored(2, w->s[1][t], 64);
        _tile_stored(3, w->s[1][t + 1], 64);
    }
}

static inline __attribute__((always_inline)) void scores_64(forward_scratch *w, const uint16_t *kp,
                                                            int n_tiles)
{
    _tile_loadd(4, w->q, 64);
    _tile_loadd(5, w->q + TILE, 64);
    _tile_loadd(6, w->q + 2 * TILE, 64);
    _tile_loadd(7, w->q + 3 * TILE, 64);
    for (int t = 0; t < n_tiles; t++) {
        const uint16_t *k = kp + 2 * t * TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(2, k, 64);
        _tile_dpbf16ps(0, 4, 2);
        _tile_dpbf16ps(1, 6, 2);
        _tile_loadd(3, k + TILE, 64);
        _tile_dpbf16ps(0, 5, 3);
        _tile_dpbf16ps(1, 7, 3);
        _tile_stored(0, w->s[0][t], 64);
        _tile_stored(1, w->s[1][t], 64);
    }
}

/* acc += p v over n_steps steps of 32 keys. */
static inline __attribute__((always_inline)) void weigh(forward_scratch *w, const uint16_t *vp,
                                                        int n_steps, int nd)
{
    for (int d = 0; d < 2 * nd; d += 2) {
        float *c0 = w->acc + d * CTILE, *c1 = c0 + 2 * nd * CTILE;
        _tile_loadd(0, c0, 64);
        _tile_loadd(1, c0 + CTILE, 64);
        _tile_loadd(2, c1, 64);
        _tile_loadd(3, c1 + CTILE, 64);
        for (int t = 0; t < n_steps; t++) {
            const uint16_t *v = vp + (t * 2 * nd + d) * TILE;
            _tile_loadd(4, w->s[0][2 * t], 64);
            _tile_loadd(6, v, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, v + TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, w->s[1][2 * t], 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c0, 64);
        _tile_stored(1, c0 + CTILE, 64);
        _tile_stored(2, c1, 64);
        _tile_stored(3, c1 + CTILE, 64);
    }
}

/* Scores of row r against the v-th 16 keys. */
static inline float *score_row(forward_scratch *w, int64_t r, int v)
{
    return w->s[r / 16][v] + r % 16 * 16;
}

/* Scores that a query may not see become -inf. */
static void mask_scores(forward_scratch *w, const attn_mask *m, int64_t i0, int64_t n, int64_t j0,
                        int vecs)
{
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t r = 0; r < BQ; r++) {
        int64_t start = r < n ? attn_start(m, i0 + r) - j0 : BK;
        int64_t end = r < n ? attn_end(m, i0 + r) - j0 : 0;
        start = start < 0 ? 0 : start > BK ? BK : start;
        end = end < 0 ? 0 : end > BK ? BK : end;
        if (start == 0 && end >= 16 * vecs)
            continue;
        for (int v = 0; v < vecs; v++) {
            __m512i j = _mm512_add_epi32(lane, _mm512_set1_epi32(16 * v));
            __mmask16 seen = _mm512_cmpge_epi32_mask(j, _mm512_set1_epi32((int)start)) &
                             _mm512_cmplt_epi32_mask(j, _mm512_set1_epi32((int)end));
            _mm512_mask_storeu_ps(score_row(w, r, v), (__mmask16)~seen, none);
        }
    }
}

/* Row maxima of the block in log2 units; whether any row must move its maximum. */
static inline __attribute__((always_inline)) bool find_maxima(forward_scratch *w, int vecs,
                                                              float scale2)
{
    for (int r = 0; r < BQ; r++) {
        __m512 x = _mm512_load_ps(score_row(w, r, 0)), y = _mm512_load_ps(score_row(w, r, 1));
        for (int v = 2; v < vecs; v += 2) {
            x = _mm512_max_ps(x, _mm512_load_ps(score_row(w, r, v)));
            y = _mm512_max_ps(y, _mm512_load_ps(score_row(w, r, v + 1)));
        }
        w->top[r] = _mm512_reduce_max_ps(_mm512_max_ps(x, y));
    }
    int moved = 0;
    for (int r = 0; r < BQ; r += 16) {
        __m512 t = _mm512_mul_ps(_mm512_load_ps(w->top + r), _mm512_set1_ps(scale2));
        __m512 limit = _mm512_add_ps(_mm512_load_ps(w->m + r), _mm512_set1_ps(8.0f));
        _mm512_store_ps(w->top + r, t);
        moved |= _mm512_cmp_ps_mask(t, limit, _CMP_GT_OQ);
    }
    return moved;
}

/* Give the rows that outgrew their maximum a new one, and rescale what they have summed. */
static void move_maxima(forward_scratch *w, int nd)
{
    for (int r = 0; r < BQ; r++) {
        if (!(w->top[r] > w->m[r] + 8))
            continue;
        __m512 f = _mm512_set1_ps(w->m[r] == -INFINITY ? 0.0f : exp2f(w->m[r] - w->top[r]));
        w->m[r] = w->top[r];
        _mm512_store_ps(w->l[r], _mm512_mul_ps(_mm512_load_ps(w->l[r]), f));
        for (int d = 0; d < 2 * nd; d++) {
            float *x = w->acc + (r / 16 * 2 * nd + d) * CTILE + r % 16 * 16;
            _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), f));
        }
    }
}

/* What the tiles will read after the exponentials, brought into L1 meanwhile: a share with each
 * row. */
typedef struct {
    const char *k, *v;
    int lines; /* of 64 bytes, of each, a row */
} fetch;

static inline __attribute__((always_inline)) void fetch_some(const fetch *f, int r)
{
    for (int i = 0; i < f->lines; i++) {
        _mm_prefetch(f->v + (r * f->lines + i) * 64, _MM_HINT_T0);
        _mm_prefetch(f->k + (r * f->lines + i) * 64, _MM_HINT_T0);
    }
}

/* p = exp2(s * scale2 - m), summed into l, rounded into A tiles; times z where dropout is on. */
static inline __attribute__((always_inline)) void exponentials(forward_scratch *w, int vecs,
                                                               float scale2, const attn_drop *drop,
                                                               uint64_t draw, int64_t T, int64_t j0,
                                                               const fetch *f)
{
    const __m512 c = _mm512_set1_ps(scale2);
    for (int r = 0; r < BQ; r++) {
        __m512 m = _mm512_set1_ps(w->m[r] == -INFINITY ? 0.0f : -w->m[r]);
        fetch_some(f, r);
        __m512 l0 = _mm512_load_ps(w->l[r]), l1 = _mm512_setzero_ps();
        if (drop)
            attn_drop_fill(drop, draw + (uint64_t)(r * T), j0, 16 * vecs, w->z, 1);
        for (int v = 0; v < vecs; v += 2) {
            __m512 a = _mm512_fmadd_ps(_mm512_load_ps(score_row(w, r, v)), c, m);
            __m512 b = _mm512_fmadd_ps(_mm512_load_ps(score_row(w, r, v + 1)), c, m);
            a = fast_exp2(a);
            b = fast_exp2(b);
            l0 = _mm512_add_ps(l0, a);
            l1 = _mm512_add_ps(l1, b);
            if (drop) {
                a = _mm512_mul_ps(a, _mm512_load_ps(w->z + 16 * v));
                b = _mm512_mul_ps(b, _mm512_load_ps(w->z + 16 * v + 16));
            }
            _mm512_store_si512(score_row(w, r, v), (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        _mm512_store_ps(w->l[r], _mm512_add_ps(l0, l1));
    }
}

static void store_rows(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0, int64_t n)
{
    for (int64_t r = 0; r < n; r++) {
        float l = _mm512_reduce_add_ps(_mm512_load_ps(w->l[r]));
        __m512 inv = _mm512_set1_ps(l > 0 ? 1 / l : 0.0f);
        uint16_t *o = (uint16_t *)job->o + (i0 + r) * job->o_pitch + h * job->D;
        for (int64_t d = 0; d < job->D / 16; d += 2) {
            const float *x = w->acc + (r / 16 * (job->D / 16) + d) * CTILE + r % 16 * 16;
            __m512 a = _mm512_mul_ps(_mm512_load_ps(x), inv);
            __m512 b = _mm512_mul_ps(_mm512_load_ps(x + CTILE), inv);
            _mm512_storeu_si512(o + 16 * d, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        if (job->lse)
            job->lse[h * job->T + i0 + r] =
                l > 0 ? (w->m[r] + log2f(l)) * 0.69314718056f : -INFINITY;
    }
}

/* Queries i0 .. i0+n-1 of head h. */
static inline __attribute__((always_inline)) void
query_block(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0, int64_t n,
            const uint16_t *kp, const uint16_t *vp, int nd)
{
    const uint16_t *q = (const uint16_t *)job->q + i0 * job->q_pitch + h * job->D;
    for (int g = 0; g < BQ / 16; g++)
        for (int d = 0; d < nd; d++)
            pack_natural(w->q + (g * nd + d) * TILE, q + 16 * g * job->q_pitch, job->q_pitch,
                         32 * d, n - 16 * g);
    memset(w->acc, 0, (size_t)(4 * nd * CTILE) * sizeof(float));
    memset(w->l, 0, sizeof(w->l));
    for (int r = 0; r < BQ; r++)
        w->m[r] = -INFINITY;
    attn_span span = attn_span_of(&job->mask, i0, i0 + n);
    float scale2 = job->scale * 1.44269504088896341f;
    const attn_drop *drop = job->drop->rate > 0 ? job->drop : NULL;
    uint64_t draw = drop ? attn_drop_row(drop, job->b * job->H + h, i0, job->T) : 0;
    for (int64_t j0 = span.lo / 32 * 32; j0 < span.hi; j0 += BK) {
        int64_t width = span.hi - j0 < BK ? span.hi - j0 : BK;
        int steps = (int)blocks_of(width, 32);
        if (nd == 2)
            scores_64(w, kp + j0 / 16 * nd * TILE, 2 * steps);
        else
            scores_wide(w, kp + j0 / 16 * nd * TILE, 2 * steps, nd);
        if (j0 < span.full_lo || j0 + 32 * steps > span.full_hi || n < BQ)
            mask_scores(w, &job->mask, i0, n, j0, 2 * steps);
        if (find_maxima(w, 2 * steps, scale2))
            move_maxima(w, nd);
        const fetch next = { .k = (const char *)(kp + (j0 + BK) / 16 * nd * TILE),
                             .v = (const char *)(vp + j0 / 32 * 2 * nd * TILE),
                             .lines = nd * BK / BQ };
        if (drop)
            exponentials(w, 2 * steps, scale2, drop, draw, job->T, j0, &next);
        else
            exponentials(w, 2 * steps, scale2, NULL, 0, 0, 0, &next);
        weigh(w, vp + j0 / 32 * 2 * nd * TILE, steps, nd);
    }
    store_rows(w, job, h, i0, n);
}

static void query_block_any(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0,
                            int64_t n, const uint16_t *kp, const uint16_t *vp)
{
    if (job->D == 64)
        query_block(w, job, h, i0, n, kp, vp, 2);
    else if (job->D == 128)
        query_block(w, job, h, i0, n, kp, vp, 4);
    else
        query_block(w, job, h, i0, n, kp, vp, (int)(job->D / 32));
}

/* All queries of one key/value head's group whose block number is `part` modulo `parts`. */
static void run_job(const attn_job *job, void *scratch)
{
    forward_scratch *w = scratch;
    int64_t keys = job->mask.keys, padded = blocks_of(keys, BK) * BK;
    uint16_t *kp = (uint16_t *)(w + 1), *vp = kp + padded * job->D;
    tiles_begin();
    pack_keys(job, keys, kp, vp);
    for (int64_t h = job->h0; h < job->h1; h++) {
        for (int64_t i0 = BQ * job->part; i0 < job->queries; i0 += BQ * job->parts) {
            int64_t n = job->queries - i0 < BQ ? job->queries - i0 : BQ;
            query_block_any(w, job, h, i0, n, kp, vp);
        }
    }
    tiles_end();
}

static bool fits(const lm_attention_attr *a)
{
    return a->head_dim % 32 == 0 && a->head_dim <= 16 * MAX_TILES_D;
}

static void attention(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    if (fits(a))
        attn_run_split(c, run_job, scratch_bytes(a, a->seq), false);
    else
        attn_fallback("attention")->run(c);
}

static size_t attention_work(const lm_call *c, int threads)
{
    const lm_attention_attr *a = c->attr;
    return fits(a) ? attn_run_work(threads, scratch_bytes(a, a->seq))
                   : attn_fallback("attention")->work(c, threads);
}

const lm_kernel lm_attention_amx_kernels[] = {
    { "attention", LM_DTYPE_BF16, LM_CPU_AMX, attention, attention_work },
    { 0 },
};
