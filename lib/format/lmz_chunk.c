/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_chunk.c -- the planes of a chunk, and the coding of each.
 *
 * Layout of a chunk of `raw` bytes, n = raw / e elements of e bytes (by its kind; BYTES: e = 1):
 *   1. u8 head: 0x80 stored, the raw bytes follow without 2 and 3; 4, BF16 only: the layout at
 *      the head of lmz_joint.h; else the delta: 0 plain, 1 XOR, 2 SUB.  Other values are errors
 *   2. for each of the e planes, least significant byte first:
 *      u8 coding: 0 constant, 1 raw, 2 exponent coder, 3 zstd;  u24 little-endian: coded bytes
 *   3. the coded planes in that order, nothing after them:
 *      constant: one byte, the value of all n
 *      raw: the n bytes
 *      exponent coder: the layout at the head of kernels/expcode.h
 *      zstd: one frame (RFC 8878) whose content is the n bytes
 * The bytes of the planes are defined at the head of kernels/planes.h; BF16, F16, F32, F64 and
 * the F8 kinds are its fields.  A chunk of 0 bytes is stored. */
#include "format/lmz_chunk.h"

#include <math.h>
#include <string.h>
#include <zstd.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/lmz_joint.h"
#include "kernels/expcode.h"
#include "kernels/planes.h"

enum { STORED = 0x80, CONST = 0, RAW = 1, EXP = 2, ZSTD = 3, CODINGS };
/* Below this share of the most frequent symbol, matches gain nothing over its code of one bit
 * (measured on deltas of checkpoints: the same size at 0.90, half of it at 0.97). */
static const double SPARSE = 0.92;
enum { SAMPLE = 4096, BLOCK = 256 }; /* elements sampled for the decision, in blocks */

struct lm_lmz_coder {
    int level;
    const lm_planes_kernels *planes;
    const lm_exp_kernels *exp;
    const lm_joint_kernels *joint;
    ZSTD_CCtx *pack;
    ZSTD_DCtx *unpack;
    lm_exp_work work;
    lm_joint_places places[LM_JOINT_ROOM(LM_LMZ_CHUNK / 2)];
    uint32_t clog[SAMPLE + 1];        /* 2^16 c log2(c) / 4096 */
    uint8_t plane[LM_LMZ_CHUNK + 64]; /* the planes one after another */
    uint8_t sample[2][8 * SAMPLE];    /* gathered elements, of the chunk and of its base */
};

static const struct {
    uint8_t size;
    bool field;
} kinds[LM_LMZ_KINDS] = {
    [LM_LMZ_BYTES] = { 1, false }, [LM_LMZ_U8] = { 1, false },    [LM_LMZ_U16] = { 2, false },
    [LM_LMZ_U32] = { 4, false },   [LM_LMZ_U64] = { 8, false },   [LM_LMZ_BF16] = { 2, true },
    [LM_LMZ_F16] = { 2, true },    [LM_LMZ_F32] = { 4, true },    [LM_LMZ_F64] = { 8, true },
    [LM_LMZ_F8E4M3] = { 1, true }, [LM_LMZ_F8E5M2] = { 1, true },
};

lm_lmz_kind lm_lmz_kind_of(lm_dtype d)
{
    switch (d) {
    case LM_DTYPE_F64:
        return LM_LMZ_F64;
    case LM_DTYPE_F32:
        return LM_LMZ_F32;
    case LM_DTYPE_F16:
        return LM_LMZ_F16;
    case LM_DTYPE_BF16:
        return LM_LMZ_BF16;
    case LM_DTYPE_F8E4M3:
        return LM_LMZ_F8E4M3;
    case LM_DTYPE_F8E5M2:
        return LM_LMZ_F8E5M2;
    case LM_DTYPE_I64:
    case LM_DTYPE_U64:
        return LM_LMZ_U64;
    case LM_DTYPE_I32:
    case LM_DTYPE_U32:
        return LM_LMZ_U32;
    case LM_DTYPE_I16:
    case LM_DTYPE_U16:
        return LM_LMZ_U16;
    default:
        return LM_LMZ_U8;
    }
}

size_t lm_lmz_kind_size(lm_lmz_kind k)
{
    return (unsigned)k < LM_LMZ_KINDS ? kinds[k].size : 1;
}

size_t lm_lmz_chunk_bound(size_t raw)
{
    return raw + 1 + 4 * LM_PLANES_MAX;
}

/* ---- The coder ---- */

lm_code lm_lmz_coder_new(int level, lm_cpu_level cpu, lm_lmz_coder **out, lm_err *e)
{
    lm_lmz_coder *c = NULL;
    *out = NULL;
    if (level < 0 || level > 19)
        return lm_fail(e, LM_EUSAGE, "lmz", "levels are 1 to 19", "no compression level %d", level);
    if (lm_realloc_n(&c, 1, sizeof *c, "the buffers of a chunk coder", e))
        return e->code;
    c->clog[SAMPLE] = 0; /* the rest is scratch and needs no initial value */
    c->level = level ? level : 3;
    c->planes = lm_planes_at(cpu);
    c->exp = lm_exp_at(cpu);
    c->joint = lm_joint_at(cpu);
    c->pack = ZSTD_createCCtx();
    c->unpack = ZSTD_createDCtx();
    if (!c->pack || !c->unpack ||
        ZSTD_isError(ZSTD_CCtx_setParameter(c->pack, ZSTD_c_compressionLevel, c->level)) ||
        ZSTD_isError(ZSTD_CCtx_setParameter(c->pack, ZSTD_c_contentSizeFlag, 0))) {
        lm_lmz_coder_free(c);
        return lm_fail(e, LM_ELIMIT, "lmz", "use fewer threads", "no memory for a zstd context");
    }
    *out = c;
    return LM_OK;
}

void lm_lmz_coder_free(lm_lmz_coder *c)
{
    if (!c)
        return;
    ZSTD_freeCCtx(c->pack);
    ZSTD_freeDCtx(c->unpack);
    lm_free(c);
}

/* Made at the first encoding: many decoders have a short life and never need it. */
static void fill_clog(lm_lmz_coder *c)
{
    if (c->clog[SAMPLE])
        return;
    c->clog[0] = 0;
    for (int i = 1; i <= SAMPLE; i++)
        c->clog[i] = (uint32_t)lrint(i * log2(i) * 65536 / SAMPLE);
}

/* ---- Statistics of a sample ---- */

typedef struct {
    double bits;  /* entropy of a symbol, order 0, bias corrected */
    double top;   /* share of the most frequent symbol */
    int distinct; /* different symbols */
    bool runs;    /* the most frequent symbol follows itself more often than by chance */
} guess;

/* Below this entropy words repeat by chance, and only runs justify a search for matches. */
static const double FEW_BITS = 1.5;

/* `count` of the m sampled symbols p are the most frequent one. */
static bool has_runs(const uint8_t *p, size_t m, uint8_t likeliest, uint32_t count)
{
    uint32_t after = 0;
    for (size_t i = 1; i < m; i++)
        after += p[i - 1] == likeliest && p[i] == likeliest;
    double top = (double)count / (double)m, stays = (double)after / (double)count;
    return stays >= (1 + top) / 2;
}

/* From the planes of m sampled elements, m <= SAMPLE. */
static guess look_at(lm_lmz_coder *c, const uint8_t *p, size_t m)
{
    guess g = { 0 };
    uint32_t top = 0;
    uint64_t sum = 0;
    /* four tables, so that equal neighbours do not wait for each other */
    uint16_t part[4][256] = { 0 };
    uint32_t n[256];
    uint8_t likeliest = 0;
    for (size_t i = 0; i < m; i++)
        part[i & 3][p[i]]++;
    for (int s = 0; s < 256; s++) {
        n[s] = (uint32_t)part[0][s] + part[1][s] + part[2][s] + part[3][s];
        g.distinct += n[s] > 0;
        likeliest = n[s] > top ? (uint8_t)s : likeliest;
        top = n[s] > top ? n[s] : top;
        sum += c->clog[n[s]];
    }
    if (!m)
        return g;
    double scale = (double)SAMPLE / (65536.0 * (double)m);
    g.bits = (double)c->clog[m] * scale - (double)sum * scale;
    g.bits += (g.distinct - 1) / (2 * (double)m * 0.6931471805599453); /* Miller and Madow, 1955 */
    g.top = (double)top / (double)m;
    g.runs = g.bits < FEW_BITS && has_runs(p, m, likeliest, top);
    return g;
}

/* Copy m of n elements in blocks spread over all of them; returns m. */
static size_t gather(uint8_t *out, const uint8_t *x, size_t n, size_t size)
{
    if (n <= SAMPLE) {
        memcpy(out, x, n * size);
        return n;
    }
    for (size_t i = 0; i < SAMPLE / BLOCK; i++) {
        size_t at = (n - BLOCK) * i / (SAMPLE / BLOCK - 1);
        memcpy(out + i * BLOCK * size, x + at * size, BLOCK * size);
    }
    return SAMPLE;
}

static void lay_out(uint8_t *p, size_t n, int planes, uint8_t *plane[LM_PLANES_MAX])
{
    for (size_t k = 0; k < (size_t)planes; k++)
        plane[k] = p + k * n;
}

/* The delta whose planes have the lowest estimated size, and their statistics. */
static lm_planes_delta choose_delta(lm_lmz_coder *c, lm_planes_form f, const void *src,
                                    const void *base, size_t n, guess best[LM_PLANES_MAX])
{
    size_t size = (size_t)f.size, m = gather(c->sample[0], src, n, size);
    lm_planes_delta chosen = LM_PLANES_NONE;
    double least = INFINITY;
    uint8_t *plane[LM_PLANES_MAX];
    if (base)
        gather(c->sample[1], base, n, size);
    lay_out(c->plane, m, f.size, plane);
    for (int d = LM_PLANES_NONE; d <= (base ? LM_PLANES_SUB : LM_PLANES_NONE); d++) {
        guess g[LM_PLANES_MAX];
        double bits = 0;
        f.delta = (lm_planes_delta)d;
        c->planes->split(f, c->sample[0], c->sample[1], m, plane);
        for (int k = 0; k < f.size; k++) {
            g[k] = look_at(c, plane[k], m);
            bits += g[k].bits;
        }
        if (bits < least) {
            least = bits;
            chosen = f.delta;
            memcpy(best, g, sizeof g);
        }
    }
    return chosen;
}

/* ---- Encoding ---- */

typedef struct {
    uint8_t coding;
    size_t len;
} coded;

static void put_head(uint8_t *at, coded p)
{
    at[0] = p.coding;
    at[1] = (uint8_t)p.len;
    at[2] = (uint8_t)(p.len >> 8);
    at[3] = (uint8_t)(p.len >> 16);
}

/* True if matches are likely: contents that repeat, such as rows or runs of zeros.  Words that
 * begin with a given byte, at any offset, are compared with earlier ones; in p, the most random
 * plane, two are equal only where the elements are. */
static bool repeats(const uint8_t *p, size_t n)
{
    enum { PARTS = 4, HITS = 64, CELLS = 1024 };
    uint64_t seen[CELLS] = { 0 }, word;
    unsigned hits = 0, equal = 0;
    for (size_t part = 0; n >= 64 && part < PARTS; part++) {
        const uint8_t *at = p + n / PARTS * part, *end = at + n / PARTS - 8;
        int begin = part & 1 ? p[n / 2] : 0; /* a byte that occurs; runs of zeros */
        for (int i = 0; i < HITS && at < end && (at = memchr(at, begin, (size_t)(end - at))); i++) {
            memcpy(&word, at, 8);
            uint64_t cell = (word | 1) * 0x9e3779b97f4a7c15u >> 54;
            equal += seen[cell] == (word | 1);
            seen[cell] = word | 1;
            hits++;
            at += 8;
        }
    }
    return equal * 8 > hits;
}

static bool by_chance(const guess *g)
{
    return g->bits < FEW_BITS && !g->runs;
}

/* The coding of a plane, chosen by the statistics of its sample. */
typedef struct {
    bool huffman, zstd;
    size_t worth; /* a larger result is kept raw */
} attempt;

static bool try_all(const lm_lmz_coder *c, lm_lmz_kind kind)
{
    return c->level >= 10 || kind == LM_LMZ_BYTES;
}

static bool promising(const guess *g)
{
    return g->bits < 7.92;
}

static attempt attempt_for(const lm_lmz_coder *c, lm_lmz_kind kind, const guess *g, bool repeating,
                           size_t n)
{
    bool all = try_all(c, kind);
    return (attempt){
        .huffman = all || promising(g),
        .zstd = kind == LM_LMZ_BYTES || repeating || g->top > SPARSE ||
                (promising(g) && (all || !kinds[kind].field)),
        .worth = c->level >= 10 ? n : n - n / 128,
    };
}

/* The number of leading planes that are kept raw, unless contents repeat: they are split directly
 * into the output. */
static int raw_planes(const lm_lmz_coder *c, lm_lmz_kind kind, lm_planes_form f,
                      const guess g[LM_PLANES_MAX])
{
    int k = 0;
    while (!try_all(c, kind) && k < f.size && !promising(&g[k]))
        k++;
    return k;
}

/* Code the n bytes p into dst, which has room for n.  When p is dst, the plane is kept raw. */
static coded encode_plane(lm_lmz_coder *c, attempt a, const uint8_t *p, size_t n, uint8_t *dst)
{
    size_t planned = 0, best = a.worth;
    if (p[0] == p[n - 1] && !memcmp(p, p + 1, n - 1)) {
        dst[0] = p[0];
        return (coded){ CONST, 1 };
    }
    if (a.huffman)
        planned = lm_exp_plan(c->exp, &c->work, p, n);
    if (planned >= best)
        planned = 0;
    best = planned ? planned : best;
    if (a.zstd) {
        size_t z = ZSTD_compress2(c->pack, dst, best, p, n);
        if (!ZSTD_isError(z) && z < best)
            return (coded){ ZSTD, z };
    }
    planned = planned ? lm_exp_write(c->exp, &c->work, p, n, dst, a.worth) : 0;
    if (planned)
        return (coded){ EXP, planned };
    if (dst != p)
        memcpy(dst, p, n);
    return (coded){ RAW, n };
}

/* ---- BF16, exponents and leading bits together ---- */

/* Smaller chunks are planned both ways, because the estimated gain is about the size of the code's
 * head. */
enum { SURE = 65536 };

static lmz_joint joint_of(lm_lmz_coder *c)
{
    return (lmz_joint){ c->joint, c->exp, &c->work, c->plane, c->places, { 0 } };
}

/* Code a chunk this way if that is smaller than by planes, with estimates g: returns its bytes in
 * dst, otherwise 0. */
static size_t encode_joint(lm_lmz_coder *c, const void *src, size_t n, const guess g[2],
                           uint8_t *dst)
{
    lmz_joint j = joint_of(c);
    bool both = n < SURE || c->level >= 10;
    size_t planes = SIZE_MAX, planned;

    if (c->level < LM_LMZ_JOINT_LEVEL || promising(&g[0]) || !promising(&g[1]))
        return 0;
    double bits = lmz_joint_choose(&j, src, n);
    if (bits > 8 + g[1].bits + (both ? 0.1 : 0))
        return 0;
    if (both) {
        uint8_t *plane[LM_PLANES_MAX];
        lay_out(c->plane, n, 2, plane);
        c->planes->split((lm_planes_form){ 2, true, LM_PLANES_NONE }, src, NULL, n, plane);
        planned = lm_exp_plan(c->exp, &c->work, plane[1], n);
        planes = planned ? 9 + n + planned : planes;
    }
    const uint8_t *rest = lmz_joint_split(&j, src, n, dst);
    if (!rest || repeats(rest, n))
        return 0;
    planned = lmz_joint_plan(&j, n);
    return planned && planned < planes ? lmz_joint_write(&j, src, n, dst) : 0;
}

static lm_code check_kind(lm_lmz_kind kind, size_t raw, lm_err *e)
{
    if ((unsigned)kind >= LM_LMZ_KINDS)
        return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL, "no kind of elements %d", (int)kind);
    if (raw > LM_LMZ_CHUNK || raw % kinds[kind].size)
        return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL,
                       "%zu raw byte%s: expected at most %d, a multiple of %d", raw, lm_plural(raw),
                       LM_LMZ_CHUNK, kinds[kind].size);
    return LM_OK;
}

/* Code n elements plane by plane, each with its estimated best coding; returns the bytes in
 * `out`. */
static size_t encode_planes(lm_lmz_coder *c, lm_lmz_kind kind, lm_planes_form f,
                            const guess g[LM_PLANES_MAX], const void *src, const void *base,
                            size_t n, uint8_t *out)
{
    const uint8_t *from[LM_PLANES_MAX];
    uint8_t *plane[LM_PLANES_MAX];
    size_t at = 1 + 4 * (size_t)f.size;
    lay_out(c->plane, n, f.size, plane);
    bool whole = f.size == 1 && !f.delta; /* the chunk is its only plane */
    int placed = whole ? 0 : raw_planes(c, kind, f, g);
    for (int k = 0; k < placed; k++)
        plane[k] = out + at + (size_t)k * n;
    if (!whole)
        c->planes->split(f, src, base, n, plane);
    for (int k = 0; k < f.size; k++)
        from[k] = whole ? src : plane[k];
    int noisy = 0;
    for (int k = 1; k < f.size; k++)
        noisy = g[k].bits > g[noisy].bits ? k : noisy;
    bool again = !by_chance(&g[noisy]) && repeats(from[noisy], n);
    for (int k = 0; again && k < placed; k++) /* zstd may be needed after all */
        from[k] = memcpy(c->plane + (size_t)k * n, plane[k], n);
    for (int k = 0; k < f.size; k++) {
        attempt a = attempt_for(c, kind, &g[k], again, n);
        coded p = encode_plane(c, a, from[k], n, out + at);
        put_head(out + 1 + 4 * k, p);
        at += p.len;
        again = again && (p.coding == ZSTD || p.coding == CONST);
    }
    return at;
}

lm_code lm_lmz_encode(lm_lmz_coder *c, lm_lmz_kind kind, const void *src, size_t raw,
                      const void *base, void *dst, size_t cap, size_t *len, lm_err *e)
{
    uint8_t *out = dst;
    guess g[LM_PLANES_MAX];
    if (check_kind(kind, raw, e))
        return e->code;
    if (cap < lm_lmz_chunk_bound(raw))
        return lm_fail(e, LM_EUSAGE, "lmz chunk", NULL, "room for %zu byte%s, %zu are needed", cap,
                       lm_plural(cap), lm_lmz_chunk_bound(raw));
    lm_planes_form f = { .size = kinds[kind].size, .field = kinds[kind].field };
    size_t n = raw / (size_t)f.size, at = 1 + 4 * (size_t)f.size;
    if (raw) {
        fill_clog(c);
        f.delta = choose_delta(c, f, src, base, n, g);
        if (kind == LM_LMZ_BF16 && !f.delta && (*len = encode_joint(c, src, n, g, out)))
            return LM_OK;
        at = encode_planes(c, kind, f, g, src, base, n, out);
    }
    out[0] = (uint8_t)f.delta;
    if (at > raw) {
        out[0] = STORED;
        if (raw)
            memcpy(out + 1, src, raw);
        at = raw + 1;
    }
    *len = at;
    return LM_OK;
}

/* ---- Decoding ---- */

typedef struct {
    lm_planes_form form;
    bool stored, joint;
    lmz_joint_parts parts; /* the head of a joint chunk, which has no planes */
    struct {
        int coding;
        const uint8_t *at;
        size_t len;
    } plane[LM_PLANES_MAX];
} parsed;

static lm_code parse(lm_lmz_kind kind, const uint8_t *src, size_t len, size_t raw, parsed *p,
                     lm_err *e)
{
    if (check_kind(kind, raw, e))
        return e->code;
    p->form = (lm_planes_form){ .size = kinds[kind].size, .field = kinds[kind].field };
    size_t n = raw / (size_t)p->form.size, at = 1 + 4 * (size_t)p->form.size;
    p->stored = len > 0 && src[0] == STORED;
    p->joint = !p->stored && kind == LM_LMZ_BF16 && len > 0 && src[0] == LMZ_JOINT;
    if (p->stored) {
        if (len == raw + 1)
            return LM_OK;
        return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL, "%zu stored byte%s, expected %zu", len - 1,
                       lm_plural(len - 1), raw);
    }
    if (p->joint) {
        if (n && lmz_joint_parse(src, len, n, &p->parts))
            return LM_OK;
        return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL,
                       "%zu bytes cannot hold %zu elements with joint exponents", len, n);
    }
    if (len < at || src[0] > LM_LMZ_SUB || !n)
        return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL,
                       "%zu byte%s cannot hold the head of a chunk", len, lm_plural(len));
    p->form.delta = (lm_planes_delta)src[0];
    for (int k = 0; k < p->form.size; k++) {
        const uint8_t *h = src + 1 + 4 * k;
        size_t bytes = h[1] | (size_t)h[2] << 8 | (size_t)h[3] << 16;
        bool fits = h[0] == CONST ? bytes == 1 : h[0] == RAW ? bytes == n : h[0] < CODINGS;
        if (!fits || bytes > len - at)
            return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL,
                           "plane %d: coding %d of %zu bytes with %zu left", k, h[0], bytes,
                           len - at);
        p->plane[k].coding = h[0];
        p->plane[k].at = src + at;
        p->plane[k].len = bytes;
        at += bytes;
    }
    if (at != len)
        return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL, "%zu byte%s behind the last plane",
                       len - at, lm_plural(len - at));
    return LM_OK;
}

static bool decode_plane(lm_lmz_coder *c, int coding, const uint8_t *src, size_t len, uint8_t *dst,
                         size_t n)
{
    if (coding == CONST)
        memset(dst, src[0], n);
    else if (coding == EXP)
        return lm_exp_read(c->exp, &c->work, LM_EXP_SPAN, src, len, dst, n);
    else if (coding == ZSTD)
        return ZSTD_decompressDCtx(c->unpack, dst, n, src, len) == n;
    return true;
}

lm_code lm_lmz_decode(lm_lmz_coder *c, lm_lmz_kind kind, const void *src, size_t len,
                      const void *base, void *dst, size_t raw, lm_err *e)
{
    static const char *const how[CODINGS] = { "const", "raw", "exp", "zstd" };
    const uint8_t *from[LM_PLANES_MAX];
    uint8_t *plane[LM_PLANES_MAX];
    parsed p;
    if (parse(kind, src, len, raw, &p, e))
        return e->code;
    if (p.stored) {
        if (raw)
            memcpy(dst, (const uint8_t *)src + 1, raw);
        return LM_OK;
    }
    if (p.form.delta && !base)
        return lm_fail(e, LM_EUSAGE, "lmz chunk", "give the base with which it was made",
                       "it is a delta, and no base is given");
    size_t n = raw / (size_t)p.form.size;
    if (p.joint) {
        lmz_joint j = joint_of(c);
        return lmz_joint_decode(&j, &p.parts, n, dst)
                   ? LM_OK
                   : lm_fail(e, LM_EFORMAT, "lmz chunk", NULL,
                             "its exponents and leading bits do not decode");
    }
    bool whole = p.form.size == 1 && !p.form.delta; /* the only plane is the chunk */
    lay_out(whole ? dst : c->plane, n, p.form.size, plane);
    for (int k = 0; k < p.form.size; k++) {
        from[k] = p.plane[k].coding == RAW ? p.plane[k].at : plane[k];
        if (!decode_plane(c, p.plane[k].coding, p.plane[k].at, p.plane[k].len, plane[k], n))
            return lm_fail(e, LM_EFORMAT, "lmz chunk", NULL, "plane %d (%s) does not decode", k,
                           how[p.plane[k].coding]);
    }
    if (!whole)
        c->planes->join(p.form, from, base, n, dst);
    else if (from[0] != dst)
        memcpy(dst, from[0], n);
    return LM_OK;
}

lm_code lm_lmz_chunk_look(lm_lmz_kind kind, const void *src, size_t len, size_t raw,
                          lm_lmz_chunk_info *out, lm_err *e)
{
    static const char *const how[CODINGS] = { "const", "raw", "exp", "zstd" };
    parsed p;
    memset(out, 0, sizeof *out);
    if (parse(kind, src, len, raw, &p, e))
        return e->code;
    if (p.joint) {
        out->n = 2;
        out->plane[0].coding = how[RAW];
        out->plane[0].raw = out->plane[0].coded = out->plane[1].raw = raw / 2;
        out->plane[1].coding = "joint";
        out->plane[1].coded = len - 6 - raw / 2;
        return LM_OK;
    }
    out->n = p.stored ? 1 : p.form.size;
    out->delta = p.stored ? LM_LMZ_PLAIN : (lm_lmz_delta)p.form.delta;
    for (int k = 0; k < out->n; k++) {
        out->plane[k].coding = p.stored ? how[RAW] : how[p.plane[k].coding];
        out->plane[k].raw = raw / (size_t)out->n;
        out->plane[k].coded = p.stored ? raw : p.plane[k].len;
    }
    return LM_OK;
}
