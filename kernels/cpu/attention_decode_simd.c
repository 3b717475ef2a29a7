/* SPDX-License-Identifier: Apache-2.0 */
/* attention_decode_simd.c -- attention of a few new rows over a long cache (one token a sequence
 * when generating).  Bound by reading the cache: each block of 256 keys is read once for all query
 * heads that share it, what follows it is prefetched, and the blocks of one sequence are spread over
 * the threads.  Partial results are merged in the order of the blocks, so the bits do not depend on
 * threads.  The instances for caches in one piece and for pages differ in addresses alone. */
#include "kernels/attention.h"

#include "kernels/cpu/attention_few.h"

enum {
    DECODE_BLOCK = 256,
    AHEAD = 4096 /* bytes between a key and the one that is prefetched */
};

/* One partial result: maximum, sum, weighted values (lv floats). */
typedef struct {
    const lm_call *c;
    const lm_attention_attr *a;
    attn_seqs s;
    attn_biases bias;
    int64_t few;                 /* most rows of a sequence */
    int64_t blocks, group, rows; /* rows: of partial results a block = few * group */
    int64_t ld, lv;              /* D and E in whole vectors */
    int64_t line;                /* numbers from one value of the cache to the next */
    float *partial;              /* [B*K][blocks][rows][lv + PAD] */
    float *scratch;              /* [threads][SHARE][ld + DECODE_BLOCK] */
} decode;

static decode decode_of(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    decode d = { .c = c, .a = a, .s = attn_seqs_of(c) };
    d.bias = attn_biases_of(c, 7, a);
    d.few = d.s.ragged ? 1 : a->seq;
    d.blocks = padded(attn_room(&d.s), DECODE_BLOCK) / DECODE_BLOCK;
    d.group = a->heads / a->kv_heads;
    d.rows = d.few * d.group;
    d.ld = padded(a->head_dim, PAD);
    d.lv = padded(lm_attention_value_dim(a), PAD);
    d.line = d.s.values ? lm_attention_value_dim(a) : a->head_dim;
    d.partial = c->work;
    if (c->work)
        d.scratch = d.partial + a->batch * a->kv_heads * d.blocks * d.rows * (d.lv + PAD);
    return d;
}

static int64_t scratch_floats(const decode *d)
{
    return SHARE * (d->ld + DECODE_BLOCK);
}

LM_INLINE float *partial_at(const decode *d, int64_t bk, int64_t block, int64_t row)
{
    return d->partial + ((bk * d->blocks + block) * d->rows + row) * (d->lv + PAD);
}

/* Keys or values of a block: in one piece, or where there are pages in pieces of LM_PAGE_UNIT. */
typedef struct {
    const void *all; /* position 0 of the block */
    const char *const *piece;
} lines;

enum { PIECES = DECODE_BLOCK / LM_PAGE_UNIT };

/* Element 0 of line j is number line_at of line_base. */
LM_INLINE const void *line_base(bool paged, lines x, int64_t j)
{
    return paged ? x.piece[j / LM_PAGE_UNIT] : x.all;
}

LM_INLINE int64_t line_at(bool paged, int64_t j, int64_t D)
{
    return (paged ? j % LM_PAGE_UNIT : j) * D;
}

/* The end of keys or values that are read in order, and what is read after them; of pages: lines before `to`, then
 * those of `then` from `from` on. */
typedef struct {
    const char *end, *next;
} reading;
typedef struct {
    lines then;
    int64_t to, from;
} reading_pages;

/* Prefetch to the second level what is read AHEAD bytes after `from`. */
LM_INLINE void fetch(const reading *r, const char *from, int64_t bytes)
{
    const char *p = from + AHEAD;
    if (p >= r->end)
        p = r->next + (p - r->end);
    for (int64_t at = 0; at < bytes; at += 64)
        _mm_prefetch(p + at, _MM_HINT_T1);
}

/* The same of line j of pages, lines of `line` bytes, from byte `at` of it on. */
LM_INLINE void fetch_line(const reading_pages *r, lines x, int64_t j, int64_t at, int64_t bytes,
                          int64_t line)
{
    j += AHEAD / line + 1;
    if (j >= r->to) {
        j += r->from - r->to;
        x = r->then;
    }
    if (j >= DECODE_BLOCK)
        return;
    const char *p = x.piece[j / LM_PAGE_UNIT] + j % LM_PAGE_UNIT * line + at;
    for (int64_t b = 0; b < bytes; b += 64)
        _mm_prefetch(p + b, _MM_HINT_T1);
}

/* Scores of keys [from, to) for R query rows into s[R][DECODE_BLOCK]. */
LM_INLINE void score_keys(lm_dtype t, bool paged, int R, const float *q, int64_t ld, lines k,
                          int64_t from, int64_t to, int64_t D, float *s, lines then)
{
    const int n = VF_LANES / R; /* keys whose sums are made together */
    int64_t j = from, size = (int64_t)lm_dtype_size(t);
    reading after = { attn_at(k.all, to * D, (size_t)size),
                      attn_at(then.all, from * D, (size_t)size) };
    reading_pages pages = { then, to, from };
    vf x[SHARE], all[VF_LANES];
    for (; j + n <= to; j += n) {
        float sums[VF_LANES];
#pragma GCC unroll 16
        for (int i = 0; i < n; i++) {
            if (paged)
                fetch_line(&pages, k, j + i, 0, D * size, D * size);
            else
                fetch(&after, attn_at(k.all, (j + i) * D, (size_t)size), D * size);
            times_key(t, R, q, ld, line_base(paged, k, j + i), line_at(paged, j + i, D), D, x);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                all[place[r * n + i]] = x[r];
        }
        vf_sums(all, sums);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            memcpy(s + r * DECODE_BLOCK + j, sums + r * n, (size_t)n * sizeof *sums);
    }
    for (; j < to; j++) {
        times_key(t, R, q, ld, line_base(paged, k, j), line_at(paged, j, D), D, x);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            s[r * DECODE_BLOCK + j] = vf_sum(x[r]);
    }
}

/* W vectors from column d on of acc[r] = sum over keys [from, to) of p[r][j] v[j], for R rows; values have E numbers, and
 * lie `line` apart. */
LM_INLINE void weigh_part(lm_dtype t, bool paged, int R, int W, const float *p, lines v,
                          int64_t from, int64_t to, int64_t E, int64_t line, int64_t d,
                          float *const acc[SHARE], const reading *after, const reading_pages *pages)
{
    int64_t size = (int64_t)lm_dtype_size(t);
    vf x[SHARE][8];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < W; i++)
            x[r][i] = vf_zero();
    for (int64_t j = from; j < to; j++) {
        const void *base = line_base(paged, v, j);
        int64_t at = line_at(paged, j, line);
        if (paged)
            fetch_line(pages, v, j, d * size, W * VF_LANES * size, line * size);
        else
            fetch(after, attn_at(v.all, j * line + d, (size_t)size), W * VF_LANES * size);
#pragma GCC unroll 8
        for (int i = 0; i < W; i++) {
            vf y = row_part(t, base, at, d + i * VF_LANES, E);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                x[r][i] = vf_fma(vf_set(p[r * DECODE_BLOCK + j]), y, x[r][i]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < W; i++)
            vf_store(acc[r] + d + i * VF_LANES, x[r][i]);
}

LM_INLINE void weigh_keys(lm_dtype t, bool paged, int R, const float *p, lines v, int64_t from,
                          int64_t to, int64_t E, int64_t line, float *const acc[SHARE], lines then)
{
    const int wide = R <= 2 && VF_LANES == 16 ? 8 : 4;
    reading after = { attn_at(v.all, to * line, lm_dtype_size(t)), then.all };
    reading_pages pages = { then, to, 0 };
    int64_t d = 0;
    for (; d + wide * VF_LANES <= E; d += wide * VF_LANES)
        weigh_part(t, paged, R, wide, p, v, from, to, E, line, d, acc, &after, &pages);
    for (; d + 4 * VF_LANES <= E; d += 4 * VF_LANES)
        weigh_part(t, paged, R, 4, p, v, from, to, E, line, d, acc, &after, &pages);
    for (; d < E; d += VF_LANES)
        weigh_part(t, paged, R, 1, p, v, from, to, E, line, d, acc, &after, &pages);
}

/* Softmax numerators of s[from..to) in place; returns their sum. */
LM_INLINE float exp_keys(lm_dtype t, float *s, int64_t from, int64_t to, float *max)
{
    vf top = vf_set(-INFINITY), l = vf_zero();
    VF_FOR(j, n, to - from, {
        vf v = vf_get_any(LM_DTYPE_F32, s + from, j, n);
        top = vf_max(top, n < VF_LANES ? vf_keep_n(v, n, top) : v);
    });
    *max = vf_top(top);
    vf shift = vf_set(*max == -INFINITY ? 0.0f : *max); /* blocks may hide all */
    VF_FOR(j, n, to - from, {
        vf p = vf_exp(vf_get_any(LM_DTYPE_F32, s + from, j, n) - shift);
        l += n < VF_LANES ? vf_keep_n(p, n, vf_zero()) : p;
        vf_put_any(LM_DTYPE_F32, s + from, j, vf_round_to(t, p), n);
    });
    return vf_sum(l);
}

/* A block of keys of one sequence and key/value head. */
typedef struct {
    attn_mask mask;
    int64_t b, kv, row, fresh, j0; /* row: the first of the sequence */
    const void *k, *v;             /* in one piece, or: */
    const char *k_piece[PIECES], *v_piece[PIECES];
} unit;

LM_INLINE lines keys_of(const unit *x)
{
    return (lines){ x->k, x->k_piece };
}

LM_INLINE lines values_of(const unit *x)
{
    return (lines){ x->v, x->v_piece };
}

/* The pieces of the block that hold positions. */
static void set_pieces(const decode *d, unit *x, size_t size)
{
    int64_t run;
    const lm_tensor *cache = d->c->out;
    for (int64_t j = 0; j < DECODE_BLOCK && x->j0 + j < x->mask.keys; j += LM_PAGE_UNIT) {
        int64_t at = attn_cache_row(&d->s, d->a->kv_heads, x->kv, x->b, x->j0 + j, &run);
        x->k_piece[j / LM_PAGE_UNIT] = attn_at(cache[1].data, at * d->a->head_dim, size);
        x->v_piece[j / LM_PAGE_UNIT] = attn_at(cache[d->s.values ? 2 : 1].data, at * d->line, size);
    }
}

/* Sets of *x what the instance for such caches reads. */
LM_INLINE void set_unit(bool paged, const decode *d, int64_t u, unit *x)
{
    const lm_attention_attr *a = d->a;
    size_t size = lm_dtype_size(d->c->in[0].dtype);
    int64_t bk = u / d->blocks, block = u % d->blocks, at;
    x->b = bk / a->kv_heads;
    x->kv = bk % a->kv_heads;
    x->j0 = block * DECODE_BLOCK;
    x->row = attn_first(&d->s, x->b);
    x->fresh = attn_is_prompt(&d->s, x->b) ? 0 : d->s.fresh[x->b];
    x->mask = attn_cached_mask(a, d->s.used[x->b], x->fresh);
    if (paged) {
        set_pieces(d, x, size);
        return;
    }
    at = bk * d->s.page + x->j0;
    x->k = attn_at(d->c->out[1].data, at * a->head_dim, size);
    x->v = attn_at(d->c->out[d->s.values ? 2 : 1].data, at * d->line, size);
}

/* The keys [*from, *to) of the unit that new row i sees. */
static void seen_by(const unit *x, int64_t i, int64_t *from, int64_t *to)
{
    *from = attn_start(&x->mask, i) - x->j0;
    *to = attn_end(&x->mask, i) - x->j0;
    *from = *from < 0 ? 0 : *from;
    *to = i >= x->fresh ? 0 : *to > DECODE_BLOCK ? DECODE_BLOCK : *to;
}

/* The same from the first to the last that one of query heads [h, h + n) sees. */
static void seen_by_heads(const unit *x, int64_t i, int64_t h, int64_t n, int64_t *from,
                          int64_t *to)
{
    int64_t first = *to, last = *from;
    if (!x->mask.blocks || *from >= *to)
        return;
    for (int64_t r = 0; r < n; r++) {
        int64_t lo = x->j0 + *from, hi = x->j0 + *to;
        attn_narrow(&x->mask, h + r, i, &lo, &hi);
        first = lo < hi && lo - x->j0 < first ? lo - x->j0 : first;
        last = lo < hi && hi - x->j0 > last ? hi - x->j0 : last;
    }
    *from = first;
    *to = last;
}

/* Query heads [h, h + R) of new row i, which see keys [from, to); part: their partial results. */
LM_INLINE void attend(lm_dtype t, bool paged, int R, const decode *d, const unit *x, int64_t i,
                      int64_t h, int64_t from, int64_t to, float *const part[SHARE], float *scratch,
                      const unit *next)
{
    const lm_attention_attr *a = d->a;
    int64_t D = a->head_dim;
    float *q = scratch, *s = q + SHARE * d->ld, *acc[SHARE];
    pack_rows(t, q, d->ld, R,
              attn_at(d->c->in[0].data, (x->row + i) * d->s.pitch + h * D, lm_dtype_size(t)), D, R,
              D, (float)a->scale);
    score_keys(t, paged, R, q, d->ld, keys_of(x), from, to, D, s, values_of(x));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        float *row = s + r * DECODE_BLOCK;
        if (d->bias.table)
            add_bias_line(row + from, &d->bias, h + r, x->j0 + from - x->mask.off - i, to - from);
        if (a->soft_cap > 0) { /* whole vectors: the block has room for them */
            int64_t first = from / VF_LANES * VF_LANES;
            cap_scores(row + first, padded(to, VF_LANES) - first, (float)a->soft_cap);
        }
        if (x->mask.blocks)
            attn_hide(&x->mask, h + r, i, x->j0 + from, to - from, -INFINITY, row + from);
        part[r][1] = exp_keys(t, row, from, to, &part[r][0]);
        acc[r] = part[r] + PAD;
    }
    weigh_keys(t, paged, R, s, values_of(x), from, to, lm_attention_value_dim(a), d->line, acc,
               keys_of(next));
}

LM_INLINE void decode_units(lm_dtype t, bool paged, void *ctx, int64_t begin, int64_t end,
                            int worker)
{
    const decode *d = ctx;
    float *scratch = d->scratch + worker * scratch_floats(d);
    for (int64_t u = begin; u < end; u++) {
        unit x, after;
        set_unit(paged, d, u, &x);
        set_unit(paged, d, u + 1 < end ? u + 1 : u, &after);
        for (int64_t row = 0, n; row < d->rows; row += n) {
            int64_t i = row / d->group, left = d->group - row % d->group, from, to;
            float *part[SHARE] = { NULL };
            seen_by(&x, i, &from, &to);
            n = left >= SHARE ? SHARE : left >= 2 ? 2 : 1;
            for (int64_t r = 0; r < n; r++) {
                part[r] = partial_at(d, u / d->blocks, u % d->blocks, row + r);
                part[r][0] = -INFINITY;
                part[r][1] = 0;
            }
            int64_t h = x.kv * d->group + row % d->group;
            seen_by_heads(&x, i, h, n, &from, &to);
            if (from >= to)
                continue;
            const unit *next = row + n < d->rows ? &x : &after;
            if (n == SHARE)
                attend(t, paged, SHARE, d, &x, i, h, from, to, part, scratch, next);
            else if (n == 2)
                attend(t, paged, 2, d, &x, i, h, from, to, part, scratch, next);
            else
                attend(t, paged, 1, d, &x, i, h, from, to, part, scratch, next);
        }
    }
}

/* Merge the blocks of output rows [begin, end), numbered (b*K + kv)*rows + row. */
LM_INLINE void merge_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const decode *d = ctx;
    const lm_attention_attr *a = d->a;
    int64_t E = lm_attention_value_dim(a);
    float *lse = d->c->n_out > 3 ? d->c->out[3].data : NULL;
    const float *sinks = attn_f32(d->c, 6);
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / d->rows, row = u % d->rows, b = bk / a->kv_heads;
        int64_t h = bk % a->kv_heads * d->group + row % d->group, i = row / d->group;
        float m = -INFINITY, l = 0, fade = 1;
        if (d->s.ragged && (attn_is_prompt(&d->s, b) || d->s.fresh[b] == 0))
            continue;
        for (int64_t n = 0; n < d->blocks; n++)
            m = fmaxf(m, partial_at(d, bk, n, row)[0]);
        for (int64_t n = 0; n < d->blocks; n++) {
            float *p = partial_at(d, bk, n, row);
            p[0] = p[1] > 0 ? expf(p[0] - m) : 0.0f; /* from here on: the factor of the block */
            l += p[0] * p[1];
        }
        if (sinks && i < d->s.fresh[b])
            fade = attn_add_sink(sinks[h], &m, &l);
        int64_t head = (attn_first(&d->s, b) + i) * a->heads + h, at = head * E;
        if (lse)
            lse[head] = attn_row_lse(a->undivided, m, l);
        const vf by = vf_set(attn_row_factor(a->undivided, fade, m, l));
        VF_FOR(x, live, E, {
            vf sum = vf_zero();
            for (int64_t n = 0; n < d->blocks; n++) {
                const float *p = partial_at(d, bk, n, row);
                if (p[0] > 0)
                    sum = vf_fma(vf_set(p[0]), vf_load(p + PAD + x), sum);
            }
            vf_put_any(t, d->c->out[0].data, at + x, sum * by, live);
        });
    }
}
VF_TYPED(merge_rows)

#define DECODE(name, type, paged)                                       \
    static void name(void *ctx, int64_t begin, int64_t end, int worker) \
    {                                                                   \
        decode_units(type, paged, ctx, begin, end, worker);             \
    }
DECODE(decode_f32, LM_DTYPE_F32, false)
DECODE(decode_bf16, LM_DTYPE_BF16, false)
DECODE(decode_paged_f32, LM_DTYPE_F32, true)
DECODE(decode_paged_bf16, LM_DTYPE_BF16, true)

void attention_decode_run(const lm_call *c)
{
    decode d = decode_of(c);
    lm_dtype t = c->in[0].dtype;
    int64_t units = d.a->batch * d.a->kv_heads;
    int64_t grain = units * d.blocks / (16 * lm_par_threads(c->par)); /* read without a break */
    lm_par_fn run = t == LM_DTYPE_BF16 ? decode_bf16 : decode_f32;
    if (d.s.paged)
        run = t == LM_DTYPE_BF16 ? decode_paged_bf16 : decode_paged_f32;
    lm_par_for(c->par, units * d.blocks, grain, run, &d);
    lm_par_for(c->par, units * d.rows, 8, VF_PICK(merge_rows, t), &d);
}

size_t attention_decode_bytes(const lm_call *c, int threads)
{
    decode d =
        decode_of(&(lm_call){ .attr = c->attr, .in = c->in, .n_in = c->n_in, .out = c->out });
    int64_t n = d.a->batch * d.a->kv_heads * d.blocks * d.rows * (d.lv + PAD);
    return (size_t)(n + threads * scratch_floats(&d)) * sizeof(float);
}
