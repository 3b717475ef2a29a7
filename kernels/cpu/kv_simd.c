/* SPDX-License-Identifier: Apache-2.0 */
/* kv_simd.c -- attention over coded caches: 64 tokens at a time are decoded into the first-level cache as floats
 * (kv_wide.h), and multiplied with rows of queries; the softmax goes by 256.  In BF16 on AVX512-VNNI and AMX most codes are
 * multiplied as they are (kv_blocks.h).
 *
 * New tokens have few rows and many keys: a unit is 1024 keys for all query heads that share them, and the partial results
 * are merged in the order of the keys.  Blocks and units lie at multiples of 64, 256 and 1024 positions, so the bits of a
 * row depend neither on threads nor on the rows beside it.  Rows of prompts: kv_prompt.h. */
#include "kernels/kv.h"

#include "base/cpu.h"
#include "kernels/cpu/attention_few.h"
#include "kernels/cpu/kv_wide.h"

enum {
    KV_BLOCK = 256, /* keys of a block */
    KV_UNIT = 1024, /* keys of a unit of new tokens */
    KV_ROWS = 64,   /* rows that go through a unit together */
};

#ifdef __AVX512F__
#define KV_CODES /* products with codes as they are */
#include "kernels/cpu/kv_tiles.h"
#endif

typedef struct {
    kv_levels k, v;
} kv_prepared;

typedef struct {
    const lm_call *c;
    const lm_kv_attr *attr;
    const lm_attention_attr *a;
    const kv_prepared *prep;
    attn_biases bias;
    bool latent;
    int64_t group, ld, lv, room, units, few,
        most; /* lv: of values; few, most: rows of new tokens, of a prompt, of a sequence */
    int64_t keys, parts; /* of a prompt: most of a sequence; jobs of a key/value head */
    bool key_tiles, value_tiles, key_pairs,
        value_pairs; /* codes can be operands as they are, or as BF16 (kv_amx.c) */
    float *partial;  /* [B*K][units][few*group][lv + PAD]: maximum, sum; values */
    char *scratch;
    size_t scratch_bytes;
} kv_call;

/* Scratch of a worker; floats are aligned to 64 bytes. */
typedef struct {
    kv_tile_scratch *tile;
    float *kt, *v, *q, *s, *acc, *m, *l;
    int64_t lv; /* from row to row of v */
#ifdef KV_CODES
    kv_planes keys, values;
    kv_rows key_rows, value_rows;
    uint16_t *pairs;
    kv_part *key_part;
    kv_ahead *ahead;
    const uint8_t *table[2]; /* of keys, of values: what takes the place of codes; NULL: nothing */
    float *of_token;         /* scales and minima of 64 tokens by group, and a row of numbers */
    int32_t *product;
#endif
} kv_scratch;

/* True if the codes of a side are operands of tiles, and are prefetched on the way. */
static bool has_ahead(const kv_call *k, bool values)
{
    return values ? k->value_tiles || k->value_pairs : k->key_tiles || k->key_pairs;
}

#ifdef KV_CODES
static size_t tiles_scratch_of(const kv_call *k, char *at, kv_scratch *w);
#endif
#ifdef KV_TILES
static size_t pairs_scratch_of(const kv_call *k, char *at, kv_scratch *w);
static bool kv_has_pairs(const lm_kv_format *f, int64_t T, int64_t D);
#endif

static size_t prompt_bytes(const kv_call *k);

static size_t scratch_of(const kv_call *k, char *at, kv_scratch *w)
{
    int64_t D = k->a->head_dim;
    int64_t floats[] = { D * KV_SUB,      KV_SUB * k->lv, KV_ROWS * k->ld, KV_ROWS * KV_BLOCK,
                         KV_ROWS * k->lv, KV_ROWS,        KV_ROWS };
    float **to[] = { &w->kt, &w->v, &w->q, &w->s, &w->acc, &w->m, &w->l };
    size_t bytes = attn_round64(sizeof *w->tile);
    w->tile = (kv_tile_scratch *)(void *)at;
    w->lv = k->lv;
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        *to[i] = (float *)(void *)(at + bytes);
        bytes += attn_round64((size_t)floats[i] * sizeof(float));
    }
#ifdef KV_CODES
    bytes += tiles_scratch_of(k, at + bytes, w);
#endif
#ifdef KV_TILES
    bytes += pairs_scratch_of(k, at + bytes, w);
#endif
    return bytes;
}

static size_t prepared_bytes(const lm_call *c)
{
    return attn_round64(sizeof(kv_prepared)) + fixed_bytes(&c->in[KV_KEYS]) +
           fixed_bytes(&c->in[KV_VALUES]);
}

/* Shapes alone, and where scratch lies in the call's work. */
static kv_call kv_call_of(const lm_call *c)
{
    const lm_kv_attr *attr = c->attr;
    const lm_attention_attr *a = &attr->attention;
    bool ragged = c->in[KV_FIRST].ndim > 0;
    kv_call k = { .c = c, .attr = attr, .a = a, .prep = c->work };
    kv_scratch w;
    k.bias = attn_biases_of(c, KV_BIAS, a);
    k.group = a->heads / a->kv_heads;
    k.latent = attr->latent;
    k.ld = padded(a->head_dim, PAD);
    k.lv = padded(lm_attention_value_dim(a), PAD);
    k.few = ragged ? 1 : a->seq <= ATTN_FEW_ROWS ? a->seq : 0;
    k.most = ragged ? c->in[KV_QKV].dim[0] : a->seq > ATTN_FEW_ROWS ? a->seq : 0;
    k.room = c->in[KV_TABLE].dim[1] * c->in[KV_KEYS].dim[2] + k.few;
    k.units = (k.room + KV_UNIT - 1) / KV_UNIT;
#ifdef KV_CODES
    const lm_tensor *x = &c->in[KV_KEYS], *y = &c->in[KV_VALUES];
    bool low = c->in[KV_QKV].dtype == LM_DTYPE_BF16 && lm_cpu_has_vnni();
    bool ready = !kv_has_rope(c) && !k.latent; /* keys are multiplied as they are stored */
    k.key_tiles = low && ready && kv_has_tiles(x->kv, x->dim[2], a->head_dim);
    k.value_tiles = low && !k.latent && kv_has_tiles(y->kv, y->dim[2], a->head_dim);
#endif
#ifdef KV_TILES
    k.key_pairs = ready && !k.key_tiles && kv_has_pairs(x->kv, x->dim[2], a->head_dim);
    k.value_pairs = !k.latent && !k.value_tiles && kv_has_pairs(y->kv, y->dim[2], a->head_dim);
#endif
    k.keys = c->in[KV_TABLE].dim[1] * c->in[KV_KEYS].dim[2] + k.most;
    k.scratch_bytes =
        attn_more(k.few ? scratch_of(&k, NULL, &w) : 0, k.most ? prompt_bytes(&k) : 0);
    if (c->work) {
        k.partial = (float *)(void *)((char *)c->work + prepared_bytes(c));
        k.scratch =
            (char *)(k.partial + a->batch * a->kv_heads * k.units * k.few * k.group * (k.lv + PAD));
    }
    return k;
}

/* ---- keys and values of 64 tokens ---- */

/* True if some of the 16 tokens from j on are coded. */
LM_INLINE bool has_codes(const kv_side *x, int64_t j)
{
    int64_t from = j > x->sinks ? j : x->sinks, to = j + LM_KV_TILE;
    to = to < x->coded ? to : x->coded;
    return from < to;
}

#ifdef KV_CODES
/* The 16 keys from j on, turned; false: some are coded. */
LM_INLINE bool turn_plain(lm_dtype t, const kv_seq *s, int64_t j, float *kt)
{
    const void *row[LM_KV_TILE];
    __m512i v[LM_KV_TILE];
    for (int64_t i = 0; i < LM_KV_TILE; i++)
        if (!(row[i] = kv_plain(s, &s->k, j + i)))
            return false;
    for (int64_t d = 0; d < s->D; d += 16) {
        int64_t live = s->D - d < 16 ? s->D - d : 16;
        for (int64_t i = 0; i < LM_KV_TILE; i++)
            v[i] = _mm512_castps_si512(vf_get_any(t, row[i], d, live));
        transpose16(v);
        for (int64_t i = 0; i < live; i++)
            _mm512_storeu_si512(kt + (d + i) * KV_SUB, v[i]);
    }
    return true;
}
#endif

/* Keys [j0, j0 + 64) below hi of a side, turned: kt[s->D][64]. */
LM_INLINE void turn_side(lm_dtype t, const kv_seq *s, const kv_levels *l, int64_t j0, int64_t hi,
                         kv_tile_scratch *tile, float *kt)
{
    for (int64_t j = j0; j < hi && j < j0 + KV_SUB; j += LM_KV_TILE) {
#ifdef KV_CODES
        if (j + LM_KV_TILE <= hi && turn_plain(t, s, j, kt + (j - j0)))
            continue;
#endif
        if (has_codes(&s->k, j))
            wide_keys(s, l, j, tile, kt + (j - j0));
        for (int64_t i = j; i < j + LM_KV_TILE && i < hi; i++) {
            const void *plain = kv_plain(s, &s->k, i);
            for (int64_t d = 0; plain && d < s->D; d++)
                kt[d * KV_SUB + i - j0] = t == LM_DTYPE_BF16
                                              ? lm_bf16_to_f32(((const uint16_t *)plain)[d])
                                              : ((const float *)plain)[d];
        }
    }
}

/* Keys [j0, j0 + 64) below hi, turned; those before lo are any. */
LM_INLINE void load_keys(lm_dtype t, const kv_call *k, const kv_seq *s, int64_t j0, int64_t lo,
                         int64_t hi, const kv_scratch *w)
{
    if (k->latent) {
        const kv_seq content = kv_part_of(k->c, s, 0), rest = kv_part_of(k->c, s, 1);
        turn_side(t, &content, &k->prep->k, j0, hi, w->tile, w->kt);
        turn_side(t, &rest, &k->prep->v, j0, hi, w->tile, w->kt + content.D * KV_SUB);
        return;
    }
    turn_side(t, s, &k->prep->k, j0, hi, w->tile, w->kt);
    if (kv_has_rope(k->c)) {
        int64_t end = hi < s->used ? hi : s->used;
        rotate_keys(k->c, s, j0, lo > j0 ? lo : j0, end < j0 + KV_SUB ? end : j0 + KV_SUB, w->kt);
    }
}

/* The values of latents are numbers of their keys, which load_keys has turned: eight rows of them at a time. */
LM_INLINE void turn_back(const kv_call *k, int64_t j0, int64_t lo, int64_t hi, const kv_scratch *w)
{
    const int64_t E = k->a->value_dim;
    for (int64_t j = 0; j < KV_SUB; j += 8) {
        float *v = w->v + j * w->lv;
        for (int64_t d = 0; d < E; d++)
            for (int64_t i = 0; i < 8; i++)
                v[i * w->lv + d] = w->kt[d * KV_SUB + j + i];
        for (int64_t i = 0; i < 8; i++) {
            const bool seen = j0 + j + i >= lo && j0 + j + i < hi;
            memset(v + i * w->lv + (seen ? E : 0), 0,
                   (size_t)(seen ? k->lv - E : k->lv) * sizeof *v);
        }
    }
}

/* Values [j0, j0 + 64); rows outside [lo, hi) are zeros.  Of latents: behind load_keys of the same tokens. */
LM_INLINE void load_values(lm_dtype t, const kv_call *k, const kv_seq *s, int64_t j0, int64_t lo,
                           int64_t hi, const kv_scratch *w)
{
    const uint8_t *bytes = NULL;
    if (k->latent) {
        turn_back(k, j0, lo, hi, w);
        return;
    }
    for (int64_t j = j0; j < j0 + KV_SUB; j += LM_KV_TILE) {
        float *v = w->v + (j - j0) * w->lv;
        if (j < hi && has_codes(&s->v, j))
            wide_values(s, &k->prep->v, j, w->tile, &bytes, v, w->lv);
        else
            bytes = NULL;
        for (int64_t i = 0; i < LM_KV_TILE; i++, v += w->lv) {
            bool seen = j + i >= lo && j + i < hi;
            const void *plain = seen ? kv_plain(s, &s->v, j + i) : NULL;
            if (!seen)
                memset(v, 0, (size_t)k->lv * sizeof *v);
            else if (plain)
                pack_rows(t, v, w->lv, 1, plain, s->D, 1, s->D, 1);
        }
    }
}

#ifdef KV_CODES
#include "kernels/cpu/kv_blocks.h"
#endif
#ifdef KV_TILES
#include "kernels/cpu/kv_pairs.h"
#endif

/* ---- rows ---- */

/* Turn the scores of a row in columns [c0, c1), whole vectors, of which [from, to) are visible, into numerators, and
 * scale what the row has so far. */
LM_INLINE void softmax_part(const lm_attention_attr *a, float *s, int64_t c0, int64_t c1,
                            int64_t from, int64_t to, float *m, float *l, float *acc, int64_t ld)
{
    vf top = vf_set(-INFINITY), sum = vf_zero();
    if (from >= to) {
        memset(s + c0, 0, (size_t)(c1 - c0) * sizeof *s);
        return;
    }
    if (a->soft_cap > 0)
        cap_scores(s + c0, c1 - c0, (float)a->soft_cap);
    for (int64_t x = c0; x < c1; x += VF_LANES)
        top = vf_max(keep_range(vf_load(s + x), x, from, to, vf_set(-INFINITY)), top);
    float now = fmaxf(*m, vf_top(top)), factor = now == *m ? 1 : expf(*m - now);
    for (int64_t x = c0; x < c1; x += VF_LANES) {
        vf p = keep_range(vf_exp(vf_load(s + x) - vf_set(now)), x, from, to, vf_zero());
        vf_store(s + x, p);
        sum = sum + p;
    }
    *m = now;
    *l = *l * factor + vf_sum(sum);
    for (int64_t d = 0; factor != 1 && d < ld; d += VF_LANES)
        vf_store(acc + d, vf_load(acc + d) * vf_set(factor));
}

#ifdef KV_CODES
/* The same where all columns are visible and there is no cap; exponentials as those of plain prompts (attention_amx.h). */
LM_INLINE void softmax_of_all(float *s, int64_t c0, int64_t c1, float *m, float *l, float *acc,
                              int64_t ld, kv_ahead *ahead)
{
    const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
    __m512 top[2] = { _mm512_set1_ps(-INFINITY), _mm512_set1_ps(-INFINITY) };
    __m512 sum[2] = { _mm512_setzero_ps(), _mm512_setzero_ps() };
    for (int64_t x = c0; x < c1; x += 32)
        for (int i = 0; i < 2; i++)
            top[i] = _mm512_max_ps(_mm512_loadu_ps(s + x + 16 * i), top[i]);
    float most = _mm512_reduce_max_ps(_mm512_max_ps(top[0], top[1]));
    float now = fmaxf(*m, most), factor = now == *m ? 1 : expf(*m - now);
    const __m512 less = _mm512_set1_ps(now) * log2e;
    stay_awake();
    for (int64_t x = c0; x < c1; x += 32)
        for (int i = 0; i < 2; i++) {
            fetch_some(ahead);
            __m512 p = fast_exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s + x + 16 * i), log2e, less));
            _mm512_storeu_ps(s + x + 16 * i, p);
            sum[i] = _mm512_add_ps(sum[i], p);
        }
    *m = now;
    *l = *l * factor + _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
    for (int64_t d = 0; factor != 1 && d < ld; d += 16)
        _mm512_storeu_ps(acc + d, _mm512_mul_ps(_mm512_loadu_ps(acc + d), _mm512_set1_ps(factor)));
}
#endif

/* Scores of R rows from row r on with the plain keys [j0, j0 + 64), those from `end` on being any. */
LM_INLINE void score_plain(lm_dtype t, int R, const kv_call *k, const kv_seq *s, int64_t r,
                           int64_t j0, int64_t end, const kv_scratch *w, float *out)
{
    const int n = VF_LANES / R; /* keys whose sums are made together */
    const float *q = w->q + r * k->ld;
    for (int64_t j = j0; j < end; j += n) {
        vf x[SHARE], all[VF_LANES];
        float sums[VF_LANES];
#pragma GCC unroll 16
        for (int i = 0; i < n; i++) {
            const char *row = kv_plain(s, &s->k, j + i < end ? j + i : end - 1);
            fetch_bytes(row + KV_AHEAD, (int64_t)s->row_bytes);
            times_key(t, R, q, k->ld, row, 0, s->D, x);
#pragma GCC unroll 4
            for (int i2 = 0; i2 < R; i2++)
                all[place[i2 * n + i]] = x[i2];
        }
        vf_sums(all, sums);
#pragma GCC unroll 4
        for (int i = 0; i < R; i++)
            memcpy(out + (r + i) * KV_BLOCK + j - j0, sums + i * n, (size_t)n * sizeof *sums);
    }
}

/* The same of n rows. */
LM_INLINE void score_plain_rows(lm_dtype t, const kv_call *k, const kv_seq *s, int64_t j0,
                                int64_t end, int64_t n, const kv_scratch *w, float *out)
{
    int64_t r = 0;
    end = end < j0 + KV_SUB ? end : j0 + KV_SUB;
    for (; SHARE == 4 && r + 4 <= n; r += 4)
        score_plain(t, SHARE, k, s, r, j0, end, w, out);
    for (; r + 2 <= n; r += 2)
        score_plain(t, 2, k, s, r, j0, end, w, out);
    for (; r < n; r++)
        score_plain(t, 1, k, s, r, j0, end, w, out);
}

/* Scores of n rows with the tokens [j0, j0 + 64) below hi: columns of `out`, rows KV_BLOCK apart. */
LM_INLINE void score_sub(lm_dtype t, const kv_call *k, const kv_seq *s, int64_t j0, int64_t lo,
                         int64_t hi, int64_t n, const kv_scratch *w, float *out)
{
#ifdef KV_TILES
    if (k->key_pairs && all_coded(&s->k, j0, j0 + KV_SUB, lo, hi)) {
        score_pairs(k, s, j0, lo, hi, n, w, out);
        return;
    }
#endif
    if (!s->k.f && !kv_has_rope(k->c) && !k->latent) {
        score_plain_rows(t, k, s, j0, hi, n, w, out);
        return;
    }
    load_keys(t, k, s, j0, lo, hi, w);
    mm(&(mm_args){ .m = n,
                   .n = KV_SUB,
                   .k = s->D,
                   .a = w->q,
                   .a_row = k->ld,
                   .a_k = 1,
                   .b = w->kt,
                   .ldb = KV_SUB,
                   .c = out,
                   .ldc = KV_BLOCK });
}

/* w->acc += numerators p, rows KV_BLOCK apart, of n rows times the values [j0, j0 + 64). */
LM_INLINE void weigh_sub(lm_dtype t, const kv_call *k, const kv_seq *s, int64_t j0, int64_t lo,
                         int64_t hi, int64_t n, const kv_scratch *w, const float *p)
{
    if (k->latent)
        load_keys(t, k, s, j0, lo, hi, w);
    load_values(t, k, s, j0, lo, hi, w);
    mm(&(mm_args){ .m = n,
                   .n = k->lv,
                   .k = KV_SUB,
                   .a = p,
                   .a_row = KV_BLOCK,
                   .a_k = 1,
                   .b = w->v,
                   .ldb = w->lv,
                   .c = w->acc,
                   .ldc = k->lv,
                   .add = true });
}

/* Into the second level: scales and the first codes of the 256 tokens from j on. */
LM_INLINE void fetch_block(const kv_seq *s, const kv_side *x, int64_t j)
{
    const lm_kv_format *f = x->f;
    if (!f)
        return;
    int64_t n = s->T < KV_BLOCK ? s->T : KV_BLOCK,
            end = j + KV_BLOCK < x->coded ? j + KV_BLOCK : x->coded;
    int64_t size = f->scale == LM_DTYPE_NONE ? 0 : (int64_t)lm_dtype_size(f->scale);
    int64_t group = f->group ? f->group : s->T;
    int64_t scales = f->axis == LM_KV_TOKEN ? n * lm_kv_groups(f, s->D)
                                            : (n + group - 1) / group * padded(s->D, 16);
    for (; j < end; j += n) {
        if (j + n <= x->sinks)
            continue;
        const char *page = kv_page(s, x, j);
        int64_t t = j % s->T, at = lm_kv_scale_at(f, s->T, s->D, t, 0) * size;
        fetch_bytes(page + x->at.scale + at, scales * size);
        if (lm_kv_has_min(f))
            fetch_bytes(page + x->at.min + at, scales * size);
        fetch_bytes(page + (size_t)(t / lm_kv_tile_tokens(f->values, s->T)) *
                               lm_kv_tile_bytes(f, s->T, s->D),
                    1024);
    }
}

/* Rows [r0, r0 + n) over the tokens of [lo, hi) in the block of 256 at block. */
LM_INLINE void attend_block(lm_dtype t, const kv_call *k, const kv_seq *s, int64_t r0, int64_t n,
                            int64_t block, int64_t lo, int64_t hi, const kv_scratch *w)
{
    int64_t c0 = lo > block ? (lo - block) / KV_SUB * KV_SUB : 0;
    int64_t c1 = hi - block < KV_BLOCK ? padded(hi - block, KV_SUB) : KV_BLOCK;
    int64_t x0 = c1, x1 = c1; /* columns of codes that are operands of tiles */
    if (!has_ahead(k, true) && !k->latent)
        fetch_block(s, &s->v, block);
#ifdef KV_CODES
    if (has_ahead(k, false) || has_ahead(k, true))
        look_ahead(k, s, block + KV_BLOCK, n, w->ahead);
    if (k->key_tiles && coded_columns(&s->k, block, c0, c1, lo, hi, &x0, &x1))
        score_codes(k, s, block, x0, x1, lo, hi, n, w);
#endif
    for (int64_t c = c0; c < c1; c += KV_SUB)
        if (c < x0 || c >= x1)
            score_sub(t, k, s, block + c, lo, hi, n, w, w->s + c);
    for (int64_t r = 0; r < n; r++) {
        int64_t i = (r0 + r) / k->group;
        int64_t f = attn_start(&s->mask, i) - block, e = attn_end(&s->mask, i) - block;
        if (k->bias.table)
            add_bias_line(w->s + r * KV_BLOCK + c0, &k->bias,
                          s->kv * k->group + (r0 + r) % k->group, block + c0 - s->used - i,
                          c1 - c0);
#ifdef KV_CODES
        if (f <= 0 && e >= KV_BLOCK && k->a->soft_cap == 0 && has_ahead(k, false)) {
            softmax_of_all(w->s + r * KV_BLOCK, c0, c1, &w->m[r], &w->l[r], w->acc + r * k->lv,
                           k->lv, w->ahead);
            continue;
        }
#endif
        softmax_part(k->a, w->s + r * KV_BLOCK, c0, c1, f < c0 ? c0 : f, e < c1 ? e : c1, &w->m[r],
                     &w->l[r], w->acc + r * k->lv, k->lv);
    }
    x0 = x1 = c1;
    if (!has_ahead(k, false) && !k->latent)
        fetch_block(s, &s->k, block + KV_BLOCK);
#ifdef KV_CODES
    if (k->value_tiles && coded_columns(&s->v, block, c0, c1, lo, hi, &x0, &x1))
        weigh_codes(k, s, block, x0, x1, lo, hi, n, w);
#endif
#ifdef KV_TILES
    if (k->value_pairs && all_coded(&s->v, block, block + KV_BLOCK, lo, hi)) {
        weigh_pairs(k, s, block, c0, c1, lo, hi, n, w);
        return;
    }
#endif
    for (int64_t c = c0; c < c1; c += KV_SUB)
        if (c < x0 || c >= x1)
            weigh_sub(t, k, s, block + c, lo, hi, n, w, w->s + c);
}

/* Rows [r0, r0 + n) of a sequence, row r being query head r % group of new row r / group, over the keys in [from, to)
 * that they see: w->m, w->l, w->acc. */
LM_INLINE void attend_rows(lm_dtype t, const kv_call *k, const kv_seq *s, int64_t r0, int64_t n,
                           int64_t from, int64_t to, kv_scratch *w)
{
    const lm_attention_attr *a = k->a;
    int64_t D = s->D, i0 = r0 / k->group, i1 = (r0 + n - 1) / k->group;
    int64_t lo = attn_start(&s->mask, i0), hi = attn_end(&s->mask, i1);
    lo = lo > from ? lo : from;
    hi = hi < to ? hi : to;
    for (int64_t r = 0; r < n; r++) {
        int64_t head = s->kv * k->group + (r0 + r) % k->group, row = s->row + (r0 + r) / k->group;
        int64_t at = row * lm_kv_row_heads(k->attr) + head * D;
        pack_rows(t, w->q + r * k->ld, k->ld, 1,
                  attn_at(k->c->in[KV_QKV].data, at, lm_dtype_size(t)), D, 1, D, (float)a->scale);
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
    memset(w->acc, 0, (size_t)(n * k->lv) * sizeof *w->acc);
#ifdef KV_CODES
    start_tiles(k, s, n, w);
#endif
#ifdef KV_TILES
    start_pairs(k, s, n, w);
#endif
    for (int64_t block = lo / KV_BLOCK * KV_BLOCK; block < hi; block += KV_BLOCK)
        attend_block(t, k, s, r0, n, block, lo, hi, w);
}

static kv_scratch worker_scratch(const kv_call *k, int worker)
{
    kv_scratch w;
    scratch_of(k, k->scratch + (size_t)worker * k->scratch_bytes, &w);
    return w;
}

static void store_lse(const kv_call *k, int64_t at, float m, float l)
{
    if (k->c->n_out > 1 && k->c->out[1].data)
        ((float *)k->c->out[1].data)[at] = l > 0 ? m + logf(l) : -INFINITY;
}

#include "kernels/cpu/kv_prompt.h"

/* ---- new tokens ---- */

LM_INLINE float *partial_at(const kv_call *k, int64_t bk, int64_t unit, int64_t row)
{
    return k->partial + ((bk * k->units + unit) * k->few * k->group + row) * (k->lv + PAD);
}

LM_INLINE void token_units(lm_dtype t, void *ctx, int64_t begin, int64_t end, int worker)
{
    const kv_call *k = ctx;
    kv_scratch w = worker_scratch(k, worker);
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / k->units, unit = u % k->units, b = bk / k->a->kv_heads;
        int64_t fresh = attn_i32(k->c, KV_FRESH)[b], from = unit * KV_UNIT;
        if (kv_is_prompt(k->c, b) || from >= kv_held(k->c, b))
            continue;
        kv_seq s = kv_seq_of(k->c, b, bk % k->a->kv_heads);
        for (int64_t r0 = 0, n; r0 < fresh * k->group; r0 += n) {
            n = fresh * k->group - r0 < KV_ROWS ? fresh * k->group - r0 : KV_ROWS;
            attend_rows(t, k, &s, r0, n, from, from + KV_UNIT, &w);
            for (int64_t r = 0; r < n; r++) {
                float *to = partial_at(k, bk, unit, r0 + r);
                to[0] = w.m[r];
                to[1] = w.l[r];
                memcpy(to + PAD, w.acc + r * k->lv, (size_t)k->lv * sizeof *to);
            }
        }
    }
}

/* Merge the units of rows [begin, end), numbered (b K + kv) few group + row. */
LM_INLINE void merge_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const kv_call *k = ctx;
    int64_t E = lm_attention_value_dim(k->a), rows = k->few * k->group;
    const float *sinks = attn_f32(k->c, KV_SINKS);
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / rows, row = u % rows, b = bk / k->a->kv_heads;
        int64_t fresh = attn_i32(k->c, KV_FRESH)[b];
        if (kv_is_prompt(k->c, b) || row >= fresh * k->group)
            continue;
        int64_t units = (kv_held(k->c, b) + KV_UNIT - 1) / KV_UNIT;
        float m = -INFINITY, l = 0, fade = 1;
        for (int64_t n = 0; n < units; n++)
            m = fmaxf(m, partial_at(k, bk, n, row)[0]);
        for (int64_t n = 0; n < units; n++) {
            float *p = partial_at(k, bk, n, row);
            p[0] = p[1] > 0 ? expf(p[0] - m) : 0.0f; /* from here on: the factor of the unit */
            l += p[0] * p[1];
        }
        int64_t head = bk % k->a->kv_heads * k->group + row % k->group;
        int64_t at = (kv_first(k->c, b) + row / k->group) * k->a->heads + head;
        if (sinks)
            fade = attn_add_sink(sinks[head], &m, &l);
        store_lse(k, at, m, l);
        VF_FOR(d, live, E, {
            vf sum = vf_zero();
            for (int64_t n = 0; n < units; n++) {
                const float *p = partial_at(k, bk, n, row);
                if (p[0] > 0)
                    sum = vf_fma(vf_set(p[0]), vf_load(p + PAD + d), sum);
            }
            vf_put_any(t, k->c->out[0].data, at * E + d, sum * vf_set(l > 0 ? fade / l : 0), live);
        });
    }
}
VF_TYPED(merge_rows)

#define KV_UNITS(name)                                                         \
    static void name##_f32(void *ctx, int64_t begin, int64_t end, int worker)  \
    {                                                                          \
        name(LM_DTYPE_F32, ctx, begin, end, worker);                           \
    }                                                                          \
    static void name##_bf16(void *ctx, int64_t begin, int64_t end, int worker) \
    {                                                                          \
        name(LM_DTYPE_BF16, ctx, begin, end, worker);                          \
    }
KV_UNITS(token_units)

static void kv_attention(const lm_call *c)
{
    kv_call k = kv_call_of(c);
    lm_dtype t = c->in[KV_QKV].dtype;
    int64_t heads = k.a->batch * k.a->kv_heads;
    int64_t grain = heads * k.units / (16 * lm_par_threads(c->par));
    kv_prepared *prep = c->work;
    char *room = (char *)c->work + attn_round64(sizeof *prep);
    room = prepare_side(&c->in[KV_KEYS], &prep->k, room);
    prepare_side(&c->in[KV_VALUES], &prep->v, room);
    lm_kv_clear_rows(c);
    if (k.few) {
        lm_par_for(c->par, heads * k.units, grain, VF_PICK(token_units, t), &k);
        lm_par_for(c->par, heads * k.few * k.group, 8, VF_PICK(merge_rows, t), &k);
    }
    if (k.most) {
        int64_t prompts = 0;
        for (int64_t b = 0; b < k.a->batch; b++)
            prompts += kv_is_prompt(c, b);
        k.parts = attn_parts(prompts * k.a->kv_heads, (k.most + 31) / 32, lm_par_threads(c->par));
        lm_par_for(c->par, heads * k.parts, 1, prompt_units, &k);
    }
}

static size_t kv_attention_work(const lm_call *c, int threads)
{
    lm_call shapes = *c;
    shapes.work = NULL;
    kv_call k = kv_call_of(&shapes);
    int64_t n = k.a->batch * k.a->kv_heads * k.units * k.few * k.group * (k.lv + PAD);
    return prepared_bytes(c) + (size_t)n * sizeof(float) + (size_t)threads * k.scratch_bytes;
}

const lm_kernel LM_TABLE_NAME(kv, LM_SIMD)[] = {
#ifndef KV_TILES
    { "kv_attention", LM_DTYPE_F32, LM_SIMD_LEVEL, kv_attention, kv_attention_work },
#endif
    { "kv_attention", LM_DTYPE_BF16, LM_SIMD_LEVEL, kv_attention, kv_attention_work },
    { 0 },
};
