/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tile_blocks.h -- scores of 64 tokens and weighted values of 256 by tiles; included by kv_pairs.h. */
#ifndef LM_KERNELS_CPU_KV_TILE_BLOCKS_H
#define LM_KERNELS_CPU_KV_TILE_BLOCKS_H

/* Most groups of a head, or of 64 tokens; most parts of a row. */
enum {
    KV_MOST_GROUPS = KV_TILE_DIM / 16,
    KV_MOST_PARTS = KV_MOST_GROUPS + KV_TILE_DIM / 64,
    KV_MOST_VALUE_PARTS = 4 * KV_MOST_GROUPS,
};

static int64_t in_sixteens(int64_t n)
{
    return (n + 15) / 16 * 16;
}

static void lay_planes(kv_planes *p, int64_t parts, char *at, size_t *bytes)
{
    size_t of_rows = attn_round64((size_t)(KV_ROWS * KV_MOST_GROUPS) * sizeof(float));
    p->plane = (int8_t *)(at + *bytes);
    *bytes += (size_t)(KV_ROWS / 8 * parts) * KV_A;
    p->unit = (float *)(void *)(at + *bytes);
    p->sum = (float *)(void *)(at + *bytes + of_rows);
    p->whole = (int32_t *)(void *)(at + *bytes + 2 * of_rows);
    *bytes += 3 * of_rows;
}

static size_t tiles_scratch_of(const kv_call *k, char *at, kv_scratch *w)
{
    size_t bytes = 0, parts = attn_round64(KV_MOST_VALUE_PARTS * sizeof(kv_part));
    const lm_kv_format *values = k->c->in[KV_VALUES].kv;
    if (!k->key_tiles && !k->value_tiles && !k->key_pairs && !k->value_pairs)
        return 0;
    lay_planes(&w->keys, KV_MOST_PARTS, at, &bytes);
    if (values)
        lay_planes(&w->values, 4 * lm_kv_groups(values, k->a->head_dim), at, &bytes);
    w->key_part = (kv_part *)(void *)(at + bytes);
    w->value_part = (kv_part *)(void *)(at + bytes + parts);
    w->of_token = (float *)(void *)(at + bytes + 2 * parts);
    bytes += 2 * parts + (2 * KV_MOST_GROUPS * KV_BLOCK + KV_TILE_DIM) * sizeof(float);
    w->product = (int32_t *)(void *)(at + bytes);
    return bytes + 4 * KV_A;
}

/* True if all tokens of [from, to) in [lo, hi) are coded. */
static bool all_coded(const kv_side *x, int64_t from, int64_t to, int64_t lo, int64_t hi)
{
    from = from > lo ? from : lo;
    to = to < hi ? to : hi;
    return from >= x->sinks && to <= x->coded;
}

/* ---- keys ---- */

/* Query rows as whole numbers; by_channel: times the scales of the channels in w->tile, and with their minima. */
static void plane_queries(const kv_call *k, const kv_seq *s, bool by_channel, int64_t n,
                          const kv_scratch *w)
{
    const kv_planes *p = &w->keys;
    float *x = w->of_token + 2 * KV_MOST_GROUPS * KV_BLOCK;
    int64_t D = in_sixteens(s->D);
    for (int64_t r = 0; r < n; r++) {
        const float *q = w->q + r * k->ld;
        __m512 least = _mm512_setzero_ps();
        for (int64_t d = 0; by_channel && d < D; d += 16) {
            __mmask16 live = vf_lanes(s->D - d < 16 ? s->D - d : 16);
            __m512 v = _mm512_loadu_ps(q + d);
            _mm512_storeu_ps(x + d, _mm512_maskz_mul_ps(live, v, _mm512_loadu_ps(w->tile->cs + d)));
            least = _mm512_mask3_fmadd_ps(v, _mm512_loadu_ps(w->tile->cm + d), least, live);
        }
        for (int64_t i = 0; i < p->parts; i++)
            if (i == 0 || w->key_part[i].g != w->key_part[i - 1].g)
                put_group(p, r, w->key_part, p->parts, i, by_channel ? x : q);
        if (by_channel)
            p->sum[r] = _mm512_reduce_add_ps(least);
    }
    clear_rows_from(p, n);
}

/* Set up planes and tiles for n rows, which are in w->q. */
static void start_tiles(const kv_call *k, const kv_seq *s, int64_t n, kv_scratch *w)
{
    const lm_kv_format *f = s->k.f, *g = s->v.f;
    int64_t D = in_sixteens(s->D);
    if (!k->key_tiles && !k->value_tiles)
        return;
    _tile_loadconfig(&kv_tile_config[n > 4]);
    w->keys.half = w->values.half = n > 4 ? 8 : 4;
    if (k->key_tiles) {
        bool by_channel = f->axis == LM_KV_CHANNEL;
        w->keys.parts = kv_parts_of(D, !by_channel && f->group ? f->group : D, w->key_part);
        w->keys.groups = by_channel ? 1 : lm_kv_groups(f, s->D);
        if (!by_channel)
            plane_queries(k, s, false, n, w);
    }
    if (!k->value_tiles)
        return;
    if (g->axis == LM_KV_CHANNEL) {
        w->values.parts =
            kv_parts_of(KV_SUB, g->group && g->group < KV_SUB ? g->group : KV_SUB, w->value_part);
        w->values.groups = w->values.parts;
        return;
    }
    w->values.groups = lm_kv_groups(g, s->D);
    w->values.parts = 4 * w->values.groups;
    for (int64_t i = 0; i < w->values.parts; i++)
        w->value_part[i] = (kv_part){ i / 4, i % 4 * KV_SUB, i % 4 * KV_SUB + KV_SUB };
}

/* Sixteen stored scales. */
LM_INLINE __m512 sixteen_scales(lm_dtype t, const char *p)
{
    if (t == LM_DTYPE_F32)
        return _mm512_loadu_ps(p);
    __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)p);
    if (t == LM_DTYPE_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Scales (or minima), in the section at byte `section` of pages, of the tokens [j0, to) by group: to[g][KV_BLOCK]; 0 of
 * tiles outside [lo, hi). */
LM_INLINE void take_scales(lm_dtype t, const kv_seq *s, const kv_side *x, size_t section,
                           int64_t groups, int64_t j0, int64_t end, int64_t lo, int64_t hi,
                           float *to)
{
    int64_t size = t == LM_DTYPE_F32 ? 4 : 2;
    for (int64_t j = j0; j < end; j += LM_KV_TILE) {
        bool seen = j < hi && j + LM_KV_TILE > lo;
        const char *p = seen ? kv_page(s, x, j) + section + j % s->T * groups * size : NULL;
        for (int64_t g = 0; g < groups; g++)
            _mm512_storeu_ps(to + g * KV_BLOCK + j - j0,
                             seen ? sixteen_scales(t, p + g * LM_KV_TILE * size)
                                  : _mm512_setzero_ps());
    }
}

/* The same number for all of them. */
static void same_for_all(float v, int64_t groups, int64_t n, float *to)
{
    for (int64_t g = 0; g < groups; g++)
        for (int64_t i = 0; i < n; i += LM_KV_TILE)
            _mm512_storeu_ps(to + g * KV_BLOCK + i, _mm512_set1_ps(v));
}

/* Scales and minima of a side of the tokens [j0, end) by group. */
static void scales_of_tokens(const kv_seq *s, const kv_side *x, int64_t groups, int64_t j0,
                             int64_t end, int64_t lo, int64_t hi, const kv_scratch *w)
{
    const lm_kv_format *f = x->f;
    float *to = w->of_token;
    for (int part = 0; part < 2; part++, to += KV_MOST_GROUPS * KV_BLOCK) {
        size_t at = part ? x->at.min : x->at.scale;
        if (part && !lm_kv_has_min(f))
            same_for_all(0, groups, end - j0, to);
        else if (f->scale == LM_DTYPE_NONE)
            same_for_all(f->head ? f->head[s->kv] : (float)f->constant, groups, end - j0, to);
        else if (f->scale == LM_DTYPE_F16)
            take_scales(LM_DTYPE_F16, s, x, at, groups, j0, end, lo, hi, to);
        else if (f->scale == LM_DTYPE_BF16)
            take_scales(LM_DTYPE_BF16, s, x, at, groups, j0, end, lo, hi, to);
        else
            take_scales(LM_DTYPE_F32, s, x, at, groups, j0, end, lo, hi, to);
    }
}

/* Rows [r0, r0 + half) of group g over `tiles` tiles of codes at b, whose products are in w->product: add scores to
 * columns of `out` from x tiles on. */
static void add_scores(const kv_seq *s, int64_t r0, int64_t n, int64_t g, int64_t x, int64_t tiles,
                       bool add, const kv_scratch *w, float *out)
{
    const lm_kv_format *f = s->k.f;
    const kv_planes *p = &w->keys;
    bool by_channel = f->axis == LM_KV_CHANNEL, minima = lm_kv_has_min(f);
    const float *scale = w->of_token + g * KV_BLOCK, *least = scale + KV_MOST_GROUPS * KV_BLOCK;
    int64_t rows = n - r0 < p->half ? n - r0 : p->half;
    int32_t offset = code_offset(f);
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = (r0 + r) * p->groups + g;
        for (int64_t i = 0; i < tiles; i++) {
            float *to = out + (r0 + r) * KV_BLOCK + (x + i) * LM_KV_TILE;
            __m512 v = product_row(w->product + i * (KV_A / 4), r, p->half, offset, p->whole[at],
                                   p->unit[at]);
            __m512 before = add ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
            if (!by_channel)
                v = v * _mm512_loadu_ps(scale + (x + i) * LM_KV_TILE);
            if (minima)
                v = _mm512_fmadd_ps(by_channel ? _mm512_set1_ps(1)
                                               : _mm512_loadu_ps(least + (x + i) * LM_KV_TILE),
                                    _mm512_set1_ps(p->sum[at]), v);
            _mm512_storeu_ps(to, before + v);
        }
    }
}

/* Scores of tiles [x, x + tiles) of the block, whose codes begin at b[x]. */
static void score_run(const kv_seq *s, const uint8_t *const *b, int64_t x, int64_t tiles, int64_t n,
                      const kv_scratch *w, float *out)
{
    const kv_planes *p = &w->keys;
    const kv_part *part = w->key_part;
    for (int64_t r0 = 0; r0 < n; r0 += p->half) {
        const int8_t *a = p->plane + r0 / p->half * p->parts * KV_A;
        for (int64_t first = 0, last; first < p->parts; first = last) {
            int64_t g = part[first].g;
            for (last = first + 1; last < p->parts && part[last].g == g;)
                last++;
            KV_MULTIPLY(0, a, part, first, last, b[x]);
            if (tiles > 1)
                KV_MULTIPLY(1, a, part, first, last, b[x + 1]);
            if (tiles > 2)
                KV_MULTIPLY(2, a, part, first, last, b[x + 2]);
            if (tiles > 3)
                KV_MULTIPLY(3, a, part, first, last, b[x + 3]);
            _tile_stored(0, w->product, 64);
            _tile_stored(1, w->product + KV_A / 4, 64);
            _tile_stored(2, w->product + KV_A / 2, 64);
            _tile_stored(3, w->product + KV_A / 4 * 3, 64);
            add_scores(s, r0, n, g, x, tiles, first > 0, w, out);
        }
    }
}

/* The codes of the tiles of the block within [lo, hi), a byte each; others are those of one that is. */
static void keys_of_block(const kv_seq *s, int64_t j0, int64_t lo, int64_t hi, const kv_scratch *w,
                          const uint8_t *b[4])
{
    const lm_kv_format *f = s->k.f;
    int64_t lines = lm_kv_tile_lines(false, s->T, s->D), some = -1;
    size_t bytes = lm_kv_tile_bytes(f, s->T, s->D);
    for (int64_t x = 0; x < 4; x++) {
        int64_t j = j0 + x * LM_KV_TILE;
        uint8_t *to = w->tile->bytes + x * lines * LM_KV_LINE;
        b[x] = NULL;
        if (j >= hi || j + LM_KV_TILE <= lo)
            continue;
        const char *tile = kv_page(s, &s->k, j) + (size_t)(j % s->T / LM_KV_TILE) * bytes;
        fetch_bytes(tile + KV_AHEAD, (int64_t)bytes);
        b[x] = tile_bytes(f, tile, lines, to);
        if (f->bits == 8 && lines % 16) /* a tile reads behind the last line: memory of ours */
            b[x] = memcpy(to, b[x], (size_t)lines * LM_KV_LINE);
        some = x;
    }
    for (int64_t x = 0; x < 4; x++)
        b[x] = b[x] ? b[x] : b[some];
}

static void score_tiles(const kv_call *k, const kv_seq *s, int64_t j0, int64_t lo, int64_t hi,
                        int64_t n, const kv_scratch *w, float *out)
{
    const kv_side *x = &s->k;
    const lm_kv_format *f = x->f;
    const uint8_t *b[4];
    keys_of_block(s, j0, lo, hi, w, b);
    if (f->axis == LM_KV_TOKEN) {
        scales_of_tokens(s, x, w->keys.groups, j0, j0 + KV_SUB, lo, hi, w);
        score_run(s, b, 0, 4, n, w, out);
        return;
    }
    int64_t of = f->group ? f->group : s->T, run = of < KV_SUB ? of / LM_KV_TILE : 4;
    for (int64_t i = 0; i < 4; i += run) { /* tokens that share the scales of channels */
        int64_t j = j0 + i * LM_KV_TILE;
        if (j >= hi || j + run * LM_KV_TILE <= lo)
            continue;
        j = j > lo ? j : lo;
        prepare_scales(s, x, &k->prep->k, kv_page(s, x, j), j % s->T, w->tile);
        plane_queries(k, s, true, n, w);
        score_run(s, b, i, run, n, w, out);
    }
}

/* ---- values ---- */

/* x: numerators of row r in columns [c0, c1) times the scales of group g of tokens; those that are 0 stay so, whatever
 * the scale.  Returns the sum of the numerators times the minima. */
LM_INLINE float scaled_numerators(const kv_scratch *w, int64_t r, int64_t c0, int64_t c1, int64_t g,
                                  float *x)
{
    const float *scale = w->of_token + g * KV_BLOCK - c0;
    const float *least = scale + KV_MOST_GROUPS * KV_BLOCK;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = c0; i < c1; i += 16) {
        __m512 v = _mm512_loadu_ps(w->s + r * KV_BLOCK + i);
        __mmask16 some = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        _mm512_storeu_ps(x + i, _mm512_maskz_mul_ps(some, v, _mm512_loadu_ps(scale + i)));
        sum = _mm512_mask3_fmadd_ps(v, _mm512_loadu_ps(least + i), sum, some);
    }
    return _mm512_reduce_add_ps(sum);
}

/* Scaled numerators in columns [c0, c1) as whole numbers. */
static void plane_numerators(const kv_scratch *w, int64_t n, int64_t c0, int64_t c1, int64_t g)
{
    const kv_planes *p = &w->values;
    float x[KV_BLOCK];
    if (c1 - c0 < KV_BLOCK)
        memset(x, 0, sizeof x);
    for (int64_t r = 0; r < n; r++) {
        float minima = scaled_numerators(w, r, c0, c1, g, x);
        put_group(p, r, w->value_part, p->parts, 4 * g, x);
        p->sum[r * p->groups + g] = minima; /* in place of the sum of x */
    }
}

/* acc += the products in w->product of `tiles` times 16 channels from d on with the rows from r0 on, tile i of them of
 * group[i]; by_channel: times the channels' scales. */
static void add_values(const kv_call *c, const kv_seq *s, int64_t r0, int64_t n, int64_t d,
                       int64_t tiles, const int64_t *group, const kv_scratch *w)
{
    const lm_kv_format *f = s->v.f;
    const kv_planes *p = &w->values;
    bool by_channel = f->axis == LM_KV_CHANNEL, minima = lm_kv_has_min(f);
    int64_t rows = n - r0 < p->half ? n - r0 : p->half;
    int32_t offset = code_offset(f);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < tiles; i++) {
            int64_t at = (r0 + r) * p->groups + group[i];
            float *to = w->acc + (r0 + r) * c->ld + d + 16 * i;
            __m512 v = product_row(w->product + i * (KV_A / 4), r, p->half, offset, p->whole[at],
                                   p->unit[at]);
            __m512 sum = _mm512_set1_ps(minima ? p->sum[at] : 0);
            if (by_channel) {
                v = v * _mm512_loadu_ps(w->tile->cs + d + 16 * i);
                sum = sum * _mm512_loadu_ps(w->tile->cm + d + 16 * i);
            }
            _mm512_storeu_ps(to, _mm512_loadu_ps(to) + (v + sum));
        }
}

/* Tile `to` = the sum over 64 tokens each, number x in [x0, x1), of rows at a + x KV_A times codes at b[x] + at. */
#define KV_WEIGH(to, a, b, at, x0, x1)           \
    do {                                         \
        _tile_zero(to);                          \
        for (int64_t x_ = x0; x_ < (x1); x_++) { \
            _tile_loadd(4, (a) + x_ * KV_A, 64); \
            _tile_loadd(5, (b)[x_] + (at), 64);  \
            _tile_dpbsud(to, 4, 5);              \
        }                                        \
    } while (0)

/* All rows times all channels: the codes of 64 tokens at each of b[x0] .. b[x1 - 1]; 16 channels from d on are multiplied
 * with the `each` parts of group first + d / channels. */
static void weigh_run(const kv_call *c, const kv_seq *s, const uint8_t *const *b, int64_t x0,
                      int64_t x1, int64_t n, int64_t first, int64_t channels, int64_t each,
                      const kv_scratch *w)
{
    const kv_planes *p = &w->values;
    int64_t D = in_sixteens(s->D);
    for (int64_t r0 = 0; r0 < n; r0 += p->half) {
        const int8_t *a = p->plane + r0 / p->half * p->parts * KV_A;
        for (int64_t d = 0; d < D; d += 64) {
            int64_t tiles = D - d < 64 ? (D - d) / 16 : 4, g[4], at = d / 16 * KV_A;
            for (int64_t i = 0; i < 4; i++)
                g[i] = first + (i < tiles ? (d + 16 * i) / channels : 0);
            KV_WEIGH(0, a + g[0] * each * KV_A, b, at, x0, x1);
            if (tiles > 1)
                KV_WEIGH(1, a + g[1] * each * KV_A, b, at + KV_A, x0, x1);
            if (tiles > 2)
                KV_WEIGH(2, a + g[2] * each * KV_A, b, at + 2 * KV_A, x0, x1);
            if (tiles > 3)
                KV_WEIGH(3, a + g[3] * each * KV_A, b, at + 3 * KV_A, x0, x1);
            _tile_stored(0, w->product, 64);
            _tile_stored(1, w->product + KV_A / 4, 64);
            _tile_stored(2, w->product + KV_A / 2, 64);
            _tile_stored(3, w->product + KV_A / 4 * 3, 64);
            add_values(c, s, r0, n, d, tiles, g, w);
        }
    }
}

/* The codes of values of the 64 tokens around token j, a byte each; number x of a block. */
static const uint8_t *values_of_block(const kv_seq *s, int64_t j, int64_t x, const kv_scratch *w)
{
    int64_t lines = lm_kv_tile_lines(true, s->T, s->D);
    size_t bytes = lm_kv_tile_bytes(s->v.f, s->T, s->D);
    const char *tile = kv_page(s, &s->v, j) + (size_t)(j % s->T / KV_SUB) * bytes;
    fetch_bytes(tile + KV_AHEAD, (int64_t)bytes);
    return tile_bytes(s->v.f, tile, lines, w->tile->bytes + x * lines * LM_KV_LINE);
}

/* w->acc += numerators in columns [c0, c1) of the block of 256 times values with scales of tokens. */
static void weigh_by_token(const kv_call *k, const kv_seq *s, int64_t block, int64_t c0, int64_t c1,
                           int64_t lo, int64_t hi, int64_t n, const kv_scratch *w)
{
    const lm_kv_format *f = s->v.f;
    const kv_planes *p = &w->values;
    const uint8_t *b[4] = { NULL };
    scales_of_tokens(s, &s->v, p->groups, block + c0, block + c1, lo, hi, w);
    for (int64_t g = 0; g < p->groups; g++)
        plane_numerators(w, n, c0, c1, g);
    clear_rows_from(p, n);
    for (int64_t x = c0 / KV_SUB; x < c1 / KV_SUB; x++) {
        int64_t j = block + x * KV_SUB;
        b[x] = values_of_block(s, j > lo ? j : lo, x, w);
    }
    weigh_run(k, s, b, c0 / KV_SUB, c1 / KV_SUB, n, 0, f->group ? f->group : in_sixteens(s->D), 4,
              w);
}

/* w->acc += numerators of the 64 tokens from j0 on, in columns of `from`, times values with scales of channels. */
static void weigh_by_channel(const kv_call *k, const kv_seq *s, int64_t j0, int64_t lo, int64_t hi,
                             int64_t n, const kv_scratch *w, const float *from)
{
    const kv_planes *p = &w->values;
    int64_t first = j0 > lo ? j0 : lo, t = first % s->T / KV_SUB * KV_SUB;
    const uint8_t *b = values_of_block(s, first, 0, w);
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < p->parts; i++)
            put_group(p, r, w->value_part, p->parts, i, from + r * KV_BLOCK);
    clear_rows_from(p, n);
    for (int64_t i = 0; i < p->parts; i++) { /* the scales of a group of tokens at a time */
        if (j0 + w->value_part[i].from >= hi || j0 + w->value_part[i].to <= lo)
            continue;
        prepare_scales(s, &s->v, &k->prep->v, kv_page(s, &s->v, first), t + w->value_part[i].from,
                       w->tile);
        weigh_run(k, s, &b, 0, 1, n, i, in_sixteens(s->D), 1, w);
    }
}

#endif
