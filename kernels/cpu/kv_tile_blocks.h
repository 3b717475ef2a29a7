/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tile_blocks.h -- what both kinds of tiles need of a block: scratch, rows as whole numbers, scales, codes; included
 * by kv_blocks.h. */
#ifndef LM_KERNELS_CPU_KV_TILE_BLOCKS_H
#define LM_KERNELS_CPU_KV_TILE_BLOCKS_H

/* Most groups of a head, or of 64 tokens; most parts of a row. */
enum {
    KV_MOST_GROUPS = KV_TILE_DIM / 16,
    KV_MOST_PARTS = KV_MOST_GROUPS + KV_TILE_DIM / 64,
    KV_BLOCK_TILES = KV_BLOCK / LM_KV_TILE,
    KV_BLOCK_SUBS = KV_BLOCK / KV_SUB,
    KV_STEPS = 3 * KV_BLOCK_TILES, /* of a row and block at which lines are prefetched */
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
    p->whole = (int32_t *)(void *)(at + *bytes + 5 * of_rows);
    *bytes += 9 * of_rows;
}

static size_t tiles_scratch_of(const kv_call *k, char *at, kv_scratch *w)
{
    size_t bytes = 0, parts = attn_round64(KV_MOST_PARTS * sizeof(kv_part));
    const lm_kv_format *values = k->c->in[KV_VALUES].kv;
    if (!k->key_tiles && !k->value_tiles && !k->key_pairs && !k->value_pairs)
        return 0;
    lay_planes(&w->keys, KV_MOST_PARTS, at, &bytes);
    if (values)
        lay_planes(&w->values, 4 * lm_kv_groups(values, k->a->head_dim), at, &bytes);
    w->key_part = (kv_part *)(void *)(at + bytes);
    w->of_token = (float *)(void *)(at + bytes + parts);
    bytes += parts + (2 * KV_MOST_GROUPS * KV_BLOCK + KV_TILE_DIM) * sizeof(float);
    w->ahead = (kv_ahead *)(void *)(at + bytes);
    bytes += attn_round64(sizeof *w->ahead);
    w->product = (int32_t *)(void *)(at + bytes);
    return bytes + KV_BLOCK_TILES * KV_A;
}

/* True if all tokens of [from, to) in [lo, hi) are coded. */
static bool all_coded(const kv_side *x, int64_t from, int64_t to, int64_t lo, int64_t hi)
{
    from = from > lo ? from : lo;
    to = to < hi ? to : hi;
    return from >= x->sinks && to <= x->coded;
}

/* The columns [*x0, *x1) of [c0, c1), in steps of 64, whose tokens in [lo, hi) are coded; false: none. */
static bool coded_columns(const kv_side *side, int64_t block, int64_t c0, int64_t c1, int64_t lo,
                          int64_t hi, int64_t *x0, int64_t *x1)
{
    int64_t c = c0;
    while (c < c1 && !all_coded(side, block + c, block + c + KV_SUB, lo, hi))
        c += KV_SUB;
    *x0 = c;
    while (c < c1 && all_coded(side, block + c, block + c + KV_SUB, lo, hi))
        c += KV_SUB;
    *x1 = c;
    return *x0 < c;
}

/* ---- keys ---- */

/* Query rows as whole numbers, for scales of tokens. */
static void plane_queries(const kv_call *k, int64_t n, const kv_scratch *w)
{
    const kv_planes *p = &w->keys;
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < p->parts; i++)
            if (i == 0 || w->key_part[i].g != w->key_part[i - 1].g)
                put_group(p, r, w->key_part, p->parts, i, w->q + r * k->ld);
}

/* Set up planes and tiles for n rows, which are in w->q. */
static void start_tiles(const kv_call *k, const kv_seq *s, int64_t n, kv_scratch *w)
{
    const lm_kv_format *f = s->k.f, *g = s->v.f;
    int64_t D = in_sixteens(s->D);
    w->table[0] = k->key_tiles && f->levels == LM_KV_TABLE ? k->prep->k.whole : NULL;
    w->table[1] = k->value_tiles && g->levels == LM_KV_TABLE ? k->prep->v.whole : NULL;
    if (!k->key_tiles && !k->value_tiles)
        return;
#ifdef KV_TILES
    _tile_loadconfig(&kv_tile_config[n > 4]);
#endif
    w->keys.half = w->values.half = n > 4 ? 8 : 4;
    if (k->key_tiles) {
        bool by_channel = f->axis == LM_KV_CHANNEL;
        w->keys.parts = kv_parts_of(D, !by_channel && f->group ? f->group : D, w->key_part);
        w->keys.groups = by_channel ? 1 : lm_kv_groups(f, s->D);
        if (!by_channel)
            plane_queries(k, n, w);
    }
    if (!k->value_tiles)
        return;
    w->values.groups = g->axis == LM_KV_CHANNEL ? 1 : lm_kv_groups(g, s->D);
    w->values.parts = KV_BLOCK_SUBS * w->values.groups;
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
 * tiles outside [lo, hi), or without codes: their tokens may have no page. */
LM_INLINE void take_scales(lm_dtype t, const kv_seq *s, const kv_side *x, size_t section,
                           int64_t groups, int64_t j0, int64_t end, int64_t lo, int64_t hi,
                           float *to)
{
    int64_t size = t == LM_DTYPE_F32 ? 4 : 2;
    for (int64_t j = j0; j < end; j += LM_KV_TILE) {
        bool seen = j < hi && j + LM_KV_TILE > lo && has_codes(x, j);
        const char *p = seen ? kv_page(s, x, j) + section + j % s->T * groups * size : NULL;
        for (int64_t g = 0; g < groups; g++)
            _mm512_storeu_ps(to + g * KV_BLOCK + j - j0,
                             seen ? sixteen_scales(t, p + g * LM_KV_TILE * size)
                                  : _mm512_setzero_ps());
    }
}

static void take_scales_of(lm_dtype t, const kv_seq *s, const kv_side *x, size_t section,
                           int64_t groups, int64_t j0, int64_t end, int64_t lo, int64_t hi,
                           float *to)
{
    if (t == LM_DTYPE_F16)
        take_scales(LM_DTYPE_F16, s, x, section, groups, j0, end, lo, hi, to);
    else if (t == LM_DTYPE_BF16)
        take_scales(LM_DTYPE_BF16, s, x, section, groups, j0, end, lo, hi, to);
    else
        take_scales(LM_DTYPE_F32, s, x, section, groups, j0, end, lo, hi, to);
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
        else
            take_scales_of(f->scale, s, x, at, groups, j0, end, lo, hi, to);
    }
}

static void look_up_bytes(const uint8_t *from, int64_t lines, const uint8_t *table, uint8_t *to)
{
    __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)table));
    for (int64_t i = 0; i < lines * LM_KV_LINE; i += LM_KV_LINE)
        _mm512_storeu_si512(to + i, _mm512_shuffle_epi8(levels, _mm512_loadu_si512(from + i)));
}

/* Codes of 4 bits, or what `table` has in their place. */
LM_INLINE void spread_fours(const char *tile, const char *end, bool look_up, const uint8_t *table,
                            uint8_t *to)
{
    const __m512i four = _mm512_set1_epi8(15);
    __m512i levels =
        look_up ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)table))
                : four;
    for (; tile < end; tile += LM_KV_LINE, to += 2 * LM_KV_LINE) {
        __m512i x = _mm512_loadu_si512(tile);
        __m512i a = _mm512_and_si512(x, four);
        __m512i b = _mm512_and_si512(_mm512_srli_epi16(x, 4), four);
        _mm512_storeu_si512(to, look_up ? _mm512_shuffle_epi8(levels, a) : a);
        _mm512_storeu_si512(to + LM_KV_LINE, look_up ? _mm512_shuffle_epi8(levels, b) : b);
    }
}

static void spread_twos(const char *tile, const char *end, uint8_t *to)
{
    const __m512i two = _mm512_set1_epi8(3);
    for (; tile < end; tile += LM_KV_LINE, to += 4 * LM_KV_LINE) {
        __m512i x = _mm512_loadu_si512(tile);
        _mm512_storeu_si512(to, _mm512_and_si512(x, two));
        _mm512_storeu_si512(to + LM_KV_LINE, _mm512_and_si512(_mm512_srli_epi16(x, 2), two));
        _mm512_storeu_si512(to + 2 * LM_KV_LINE, _mm512_and_si512(_mm512_srli_epi16(x, 4), two));
        _mm512_storeu_si512(to + 3 * LM_KV_LINE, _mm512_and_si512(_mm512_srli_epi16(x, 6), two));
    }
}

/* The codes of a tile, a byte each: in place, or at `to`; table (NULL: none): what takes the place of a code. */
static const uint8_t *codes_of_tile(const lm_kv_format *f, const char *tile, int64_t lines,
                                    const uint8_t *table, uint8_t *to)
{
    const char *end = tile + lm_kv_plane_bytes(f->bits, lines);
    if (f->bits == 4 && table)
        spread_fours(tile, end, true, table, to);
    else if (f->bits == 4)
        spread_fours(tile, end, false, NULL, to);
    else if (f->bits == 2 && !table)
        spread_twos(tile, end, to);
    else if (table)
        look_up_bytes(tile_bytes(f, tile, lines, to), lines, table, to);
    else
        return tile_bytes(f, tile, lines, to);
    return to;
}

static int64_t add_stretch(kv_ahead *a, const char *from, int64_t bytes)
{
    int64_t lines = (bytes + LM_KV_LINE - 1) / LM_KV_LINE;
    a->part[a->parts].at = from;
    a->part[a->parts].lines = lines;
    a->parts += lines > 0;
    return lines;
}

/* Add what the coded tokens from j on, a block of them, have of a side; returns how many lines. */
static int64_t add_side(kv_ahead *a, const kv_seq *s, const kv_side *x, int64_t j)
{
    const lm_kv_format *f = x->f;
    int64_t n = s->T < KV_BLOCK ? s->T : KV_BLOCK, end = j + KV_BLOCK, lines = 0;
    int64_t size = f->scale == LM_DTYPE_NONE ? 0 : (int64_t)lm_dtype_size(f->scale);
    int64_t tokens = lm_kv_tile_tokens(f->values, s->T), group = f->group ? f->group : s->T;
    int64_t tile = (int64_t)lm_kv_tile_bytes(f, s->T, s->D);
    int64_t scales = f->axis == LM_KV_TOKEN ? n * lm_kv_groups(f, s->D)
                                            : (n + group - 1) / group * in_sixteens(s->D);
    for (; j < end && j < x->coded; j += n) {
        if (j + n <= x->sinks)
            continue;
        const char *page = kv_page(s, x, j);
        int64_t t = j % s->T, at = lm_kv_scale_at(f, s->T, s->D, t, 0) * size;
        lines += add_stretch(a, page + x->at.scale + at, scales * size);
        if (lm_kv_has_min(f))
            lines += add_stretch(a, page + x->at.min + at, scales * size);
        if (f->second)
            lines +=
                add_stretch(a, page + x->at.second + lm_kv_second_at(f, s->T, s->D, t, 0) * size,
                            (f->axis == LM_KV_TOKEN ? s->D : n) * size);
        lines += add_stretch(a, page + t / tokens * tile, n / tokens * tile);
    }
    return lines;
}

/* Plan what the block at j reads, for n rows. */
static void look_ahead(const kv_call *k, const kv_seq *s, int64_t j, int64_t n, kv_ahead *a)
{
    int64_t lines = 0;
    a->parts = a->part_now = a->line = a->due = 0;
    if (has_ahead(k, false))
        lines += add_side(a, s, &s->k, j);
    if (has_ahead(k, true))
        lines += add_side(a, s, &s->v, j);
    a->rate = lines * 256 / (KV_STEPS * n) + 1;
}

/* The codes of tiles [x0, x1) from token j0 on that lie within [lo, hi), a byte each; others are those of one that does. */
static void keys_of_tiles(const kv_seq *s, int64_t j0, int64_t x0, int64_t x1, int64_t lo,
                          int64_t hi, const kv_scratch *w, const uint8_t **b)
{
    const lm_kv_format *f = s->k.f;
    int64_t lines = lm_kv_tile_lines(false, s->T, s->D), some = -1;
    size_t bytes = lm_kv_tile_bytes(f, s->T, s->D);
    for (int64_t x = x0; x < x1; x++) {
        int64_t j = j0 + x * LM_KV_TILE;
        uint8_t *to = w->tile->bytes + x * lines * LM_KV_LINE;
        b[x] = NULL;
        if (j >= hi || j + LM_KV_TILE <= lo)
            continue;
        const char *tile = kv_page(s, &s->k, j) + (size_t)(j % s->T / LM_KV_TILE) * bytes;
        b[x] = codes_of_tile(f, tile, lines, w->table[0], to);
        if (f->bits == 8 && lines % 16) /* a tile reads behind the last line: memory of ours */
            b[x] = memcpy(to, b[x], (size_t)lines * LM_KV_LINE);
        some = x;
    }
    for (int64_t x = x0; x < x1; x++)
        b[x] = b[x] ? b[x] : b[some];
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

/* The codes of values of the 64 tokens around token j, a byte each; number x of a block. */
static const uint8_t *values_of_block(const kv_seq *s, int64_t j, int64_t x, const kv_scratch *w)
{
    int64_t lines = lm_kv_tile_lines(true, s->T, s->D);
    size_t bytes = lm_kv_tile_bytes(s->v.f, s->T, s->D);
    const char *tile = kv_page(s, &s->v, j) + (size_t)(j % s->T / KV_SUB) * bytes;
    return codes_of_tile(s->v.f, tile, lines, w->table[1], w->tile->bytes + x * lines * LM_KV_LINE);
}

#endif
