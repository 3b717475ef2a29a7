/* SPDX-License-Identifier: Apache-2.0 */
/* kv_format.h -- formats of a coded cache: keys and values of attention in 1 to 8 bits with scales, in the order
 * of memory that kernels multiply from.
 *
 * A coded cache is a tensor [pages, K, T, D] with `kv` set (tensor.h): K key/value heads of pages * K * T tokens of D
 * numbers.  A page of one head is a block of bytes (lm_kv_page): T tokens, T = 16, 32 or a multiple of 64.
 * The number of token t and channel d is, in double, rounded once to F32,
 *   (s * level(code) + m) * second
 * s and m belong to a group: `group` adjacent channels of a token (LM_KV_TOKEN), or `group` adjacent tokens of a
 * channel (LM_KV_CHANNEL); a group that does not divide the head has a short last group.  m is 0 without minima, second
 * is 1 without second scales, which run along the other axis.  Outliers replace this number by one of their own.
 *
 * Order of codes.  A tile is 16 tokens of keys, or min(T, 64) tokens of values; the codes of a tile are lines of 64
 * bytes, one byte a code, in which the operands of dot products of four bytes lie side by side:
 *   keys    line d / 4: token t % 16 has the bytes 4 (t % 16) .. + 3, channels 4 (d / 4) .. + 3
 *   values  line (d / 16) (tile / 4) + (t % tile) / 4: channel d % 16 has the bytes 4 (d % 16) .. + 3, four tokens
 * Fewer than 8 bits: a unit of 64 bytes holds 8 / bits successive lines, line i of it at bit bits * i of each byte.
 * 3, 5 and 6 bits are planes of 2 + 1, 4 + 1 and 4 + 2 bits, the low bits first, each plane of a tile in whole units.
 * Channels beyond D and bits that no code has are 0.  Codes are unsigned: those of LM_KV_SYM are raised by 2^(bits-1).
 *
 * Behind the codes, each section at a multiple of 64 bytes, P = D rounded up to a multiple of 16:
 *   scales and minima     LM_KV_TOKEN [T/16][groups][16], LM_KV_CHANNEL [T/group][P]
 *   second scales         LM_KV_TOKEN [T/span][P], LM_KV_CHANNEL [T]
 *   outliers              count U16; index U16 [outliers], t * D + d, rising; value F16 [outliers]
 * Files have an order of their own. */
#ifndef LM_NUMERIC_KV_FORMAT_H
#define LM_NUMERIC_KV_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "numeric/dtype.h"

/* What has a scale of its own. */
typedef enum { LM_KV_TOKEN, LM_KV_CHANNEL } lm_kv_axis;

typedef enum {
    LM_KV_SYM,   /* level = code - 2^(bits-1); s = largest magnitude / ((2^bits - 1) / 2) */
    LM_KV_ASYM,  /* level = code; s = (most - least) / (2^bits - 1), m = least */
    LM_KV_TABLE, /* level = table[code], the nearest (the first of two) */
    LM_KV_FLOAT8, /* level = the number of the code in `float8`; s = largest magnitude / its largest number */
} lm_kv_levels;

enum {
    LM_KV_TILE = 16,      /* tokens whose keys lie in one tile */
    LM_KV_LINE = 64,      /* bytes of a line, and of a unit */
    LM_KV_MAX_TABLE = 32, /* 5 bits */
    LM_KV_MAX_DIM = 1024,
    LM_KV_MAX_TOKENS = 4096, /* of a page */
};

typedef struct lm_kv_format lm_kv_format;
struct lm_kv_format {
    const char *name; /* "int4:group=32", for dumps and files */
    bool values;      /* codes in the order of values; otherwise of keys */
    int bits;         /* 1 to 6, 8 */
    lm_kv_axis axis;
    lm_kv_levels levels;
    int group; /* channels (LM_KV_TOKEN) or tokens (LM_KV_CHANNEL) with one scale; 0: the head, the page */
    lm_dtype scale;  /* of scales and minima: F16, BF16, F32; NONE: not stored, see below */
    lm_dtype float8; /* LM_KV_FLOAT8: F8E4M3 or F8E5M2 */
    /* Scales, minima and codes as ggml's formats have them: q4_0, q5_0, q8_0 (LM_KV_SYM), q4_1, q5_1 (LM_KV_ASYM), iq4_nl
     * (LM_KV_TABLE with lm_kv_iq4_table).  LM_KV_TOKEN, groups of 32, F16. */
    bool ggml;
    /* LM_KV_TABLE.  norm: levels are those of numbers of variance 1, s is the root mean square of the group; renorm: s is
     * then chosen so that the decoded group has the group's norm.  Otherwise levels lie in [-1, 1]: with `zero` this
     * interval stands for least to most, m their mean and s half their difference; else for - to + largest magnitude. */
    bool norm, renorm, zero;
    /* Scales along the other axis, found by turns so that the standard deviations of rows and columns are near 1: of the
     * channels of `span` tokens (LM_KV_TOKEN; 0: the page), of the tokens of a group (LM_KV_CHANNEL).  LM_KV_ASYM. */
    bool second;
    int span;
    int outliers; /* most in a page of one head; 0: none.  Numbers beyond the range of their group (`lower`, or the
                   * range given to lm_kv_encode); the largest are kept, measured by (x - mean) / half the range */
    int n_table;                  /* 2^bits */
    float table[LM_KV_MAX_TABLE]; /* LM_KV_TABLE: levels, rising */
    /* scale NONE: s and m follow from fixed ranges [K,D] of channels (LM_KV_CHANNEL; borrowed), or s is that of
     * the head in `head` [K] (borrowed), or `constant`.  Of a cache in memory of a device these arrays are there, too. */
    const float *lower, *upper, *head;
    double constant;
};

/* Bytes from the beginning of a page to a section; `all` is the page.  Absent sections have no bytes. */
typedef struct {
    size_t codes, scale, min, second, outliers, all;
} lm_kv_sections;

/* Check a format for pages of T tokens of D numbers and lay its sections out.  Fails: LM_EUSAGE naming the
 * format and what does not fit. */
lm_code lm_kv_page(const lm_kv_format *f, int64_t T, int64_t D, lm_kv_sections *out, lm_err *e);
/* Bytes of a page of one head; SIZE_MAX if lm_kv_page fails. */
size_t lm_kv_page_bytes(const lm_kv_format *f, int64_t T, int64_t D);
/* Tokens that are encoded together: 1, a group, a span. */
int64_t lm_kv_step(const lm_kv_format *f, int64_t T);
/* True if groups have minima (m). */
static inline bool lm_kv_has_min(const lm_kv_format *f)
{
    return f->levels == LM_KV_ASYM || (f->levels == LM_KV_TABLE && f->zero);
}

/* ---- encoding and decoding: plain C, double inside, one rounding at each store ---- */

/* Encode x [n,D], rows `pitch` numbers apart, as tokens at .. at + n of the page of key/value head `kv`; at and n are
 * multiples of lm_kv_step.  Bytes of other tokens are not changed, except that more outliers than there is room for push
 * the smallest out, which leaves them their code at the end of the range.
 * range (optional, LM_KV_TOKEN with `zero`): least and most of each token [n,2] instead of those of its groups.
 * A page is cleared (zeros) before it is used; to use it anew, its outliers alone must be.  A group with a number that
 * is not finite has the scale NaN, and is read as NaN; ggml's formats take such numbers as 0, formats without
 * stored scales as their code 0. */
void lm_kv_encode(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const float *x,
                  int64_t pitch, int64_t at, int64_t n, const float *range, void *page);
void lm_kv_decode(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const void *page,
                  int64_t at, int64_t n, float *y, int64_t pitch);
/* Least and most of the numbers of one token, x [n], that lie strictly within the quantiles outliers / 2 and
 * 1 - outliers / 2 (linear interpolation): the range of a token's values of all heads in KVQuant (arXiv:2401.18079).  Work
 * [n].  Numbers that are not finite are ignored. */
void lm_kv_token_range(double outliers, const float *x, int64_t n, float range[2], float *work);
/* The largest error of a number in a group of n numbers in [lo, hi], without second scales and outliers; for
 * iq4_nl, whose scale is searched for, that of the search's first try. */
double lm_kv_bound(const lm_kv_format *f, int64_t n, double lo, double hi);

/* The level of each code. */
void lm_kv_level_numbers(const lm_kv_format *f, float level[256]);
/* Scales and minima of formats with fixed ranges of channels: n channels, heads one behind another. */
void lm_kv_fixed_scales(const lm_kv_format *f, int64_t n, float *s, float *m);

/* ---- tables ---- */

/* The 2^bits levels (1 to 5 bits) with the least mean square error for normally distributed numbers of
 * variance 1 (Lloyd-Max), rising. */
void lm_kv_normal_table(int bits, float *table);
/* The 16 values of iq4_nl. */
void lm_kv_iq4_table(float table[16]);

/* ---- parts of the definition, for kernels ---- */

/* The scale and minimum of a group, as stored. */
typedef struct {
    double s, m;
} lm_kv_scale;

/* The code of (x - m) / s; 0 for a scale or a quotient that is not finite. */
unsigned lm_kv_code_of(const lm_kv_format *f, lm_kv_scale by, double x);
/* v rounded to the type of the scales; the largest number of F16 for larger ones. */
double lm_kv_stored(lm_dtype scale, double v);
/* Scale and codes of the n numbers of a group; range (least and most) instead of that of the numbers, or NULL. */
lm_kv_scale lm_kv_code_group(const lm_kv_format *f, const double *x, int64_t n, const float *range,
                             unsigned *code);

/* ---- the order of memory, for kernels ---- */

static inline int64_t lm_kv_tile_tokens(bool values, int64_t T)
{
    return !values ? (int64_t)LM_KV_TILE : T < 64 ? T : 64;
}
/* Lines of the codes of a tile. */
static inline int64_t lm_kv_tile_lines(bool values, int64_t T, int64_t D)
{
    return values ? (D + 15) / 16 * (lm_kv_tile_tokens(true, T) / 4) : (D + 3) / 4;
}
/* Bits of the low plane: all of them, or of 3, 5 and 6 bits 2, 4 and 4. */
static inline int lm_kv_low_bits(int bits)
{
    return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits;
}
/* Bytes of a plane of `bits` (1, 2, 4, 8) bits of a tile. */
static inline size_t lm_kv_plane_bytes(int bits, int64_t lines)
{
    int64_t each = 8 / bits;
    return (size_t)((lines + each - 1) / each) * LM_KV_LINE;
}
static inline size_t lm_kv_tile_bytes(const lm_kv_format *f, int64_t T, int64_t D)
{
    int64_t lines = lm_kv_tile_lines(f->values, T, D);
    int low = lm_kv_low_bits(f->bits);
    return lm_kv_plane_bytes(low, lines) +
           (f->bits > low ? lm_kv_plane_bytes(f->bits - low, lines) : 0);
}
/* Groups of a token (LM_KV_TOKEN). */
static inline int64_t lm_kv_groups(const lm_kv_format *f, int64_t D)
{
    return f->group ? (D + f->group - 1) / f->group : 1;
}
/* The place of the scale and minimum of token t, channel d among those of the page. */
static inline int64_t lm_kv_scale_at(const lm_kv_format *f, int64_t T, int64_t D, int64_t t,
                                     int64_t d)
{
    if (f->axis == LM_KV_CHANNEL)
        return t / (f->group ? f->group : T) * ((D + 15) / 16 * 16) + d;
    int64_t g = f->group ? d / f->group : 0;
    return (t / LM_KV_TILE * lm_kv_groups(f, D) + g) * LM_KV_TILE + t % LM_KV_TILE;
}
static inline int64_t lm_kv_second_at(const lm_kv_format *f, int64_t T, int64_t D, int64_t t,
                                      int64_t d)
{
    return f->axis == LM_KV_CHANNEL ? t : t / (f->span ? f->span : T) * ((D + 15) / 16 * 16) + d;
}

#endif
