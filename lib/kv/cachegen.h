/* SPDX-License-Identifier: Apache-2.0 */
/* cachegen.h -- key-value caches coded for streaming, after CacheGen (arXiv:2310.07240).
 *
 * A cache is cut into chunks of 256 tokens, which are decoded one after another; each is coded at
 * several levels, of which a reader chooses one (stream.h).  A part is the keys or the values of
 * a layer, [heads][tokens][width]; all its numbers of a token, heads * width, are its channels.
 *
 * The quantiser, in F32, for each part and token; half = bins / 2 - 1 is the largest code:
 *   anchor      the first token of every 10 of a chunk, with 256 bins:  d = x
 *   difference  the other nine, with the bins of the level:             d = x - y(anchor)
 *   scale       s = the least BF16 number >= max |d| over the channels; 0 if that is below 2^-100
 *   code        q = round(d (half / s)) to nearest, ties to even: -half .. half; 0 for s = 0
 *   decoded     y = q (s / half), plus y(anchor) for a difference, rounded to the cache's type
 * so |x - y| <= s / (2 half), besides the roundings of F32 and of the type.  Other implementations:
 * the published code has no differences and one scale for each token; its bins are those of level
 * 1.
 *
 * Codes are entropy-coded (kernels/rans.h) with the distributions of the whole cache at that level,
 * of anchors and of differences apart.  Each channel has its own distribution, or shares one with
 * channels of about the same entropy: as many are kept as make the whole smallest.  Anchors are
 * coded relative to the channel's mean code, modulo 255, so that channels with different means can
 * share.
 *
 * Tables, all numbers little-endian:
 *   1. u32 parts, then u32 bytes of each part's tables
 *   2. for each part: u32 channels, u16 bins, u16 tables for anchors - 1, u16 tables for differences - 1, u16 0
 *      u8 mean code of each channel's anchors, 0..254
 *      the table of each channel for anchors, then for differences: u8 for at most 256, else u16
 *      the tables for anchors (255 symbols), then for differences (bins - 1):
 *        u8 first and u8 last symbol that occurs; the frequencies of first..last out of 2^14, 7 bits
 *        a byte, the lowest first, bit 7: more follow
 * A chunk:
 *   1. u32 tokens, then u32 bytes of each part's stream
 *   2. the streams: u16 scale of each token (BF16 bits), then the codes as kernels/rans.h defines */
#ifndef LM_KV_CACHEGEN_H
#define LM_KV_CACHEGEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/cpu.h"
#include "base/err.h"
#include "base/par.h"
#include "numeric/dtype.h"

enum {
    LM_CACHEGEN_LEVELS = 4,
    LM_CACHEGEN_GROUP = 10,
    LM_CACHEGEN_CHUNK = 256,
    LM_CACHEGEN_BINS = 64, /* most bins of a difference */
    LM_CACHEGEN_CHANNELS = 65536,
};

typedef struct {
    int64_t heads, width;
    int bins; /* of differences: even, 4..LM_CACHEGEN_BINS */
} lm_cachegen_part;

/* Bins of a level, 0 (finest) .. LM_CACHEGEN_LEVELS - 1, for the keys or values of a layer.
 *   level                                0    1    2   3
 *   keys, first third of the layers     64   32   16   8
 *   keys, second third                  64   32   16   8
 *   keys, last third                    64   16    8   4
 *   values, first sixteenth (rounded up) 64  32   16   8
 *   values, the other layers            32   16    8   4 */
int lm_cachegen_bins(int level, bool values, int64_t layer, int64_t layers);
/* "0, 2" for levels with bits 0 and 2; returns `text`. */
enum { LM_CACHEGEN_SHOWN = 4 * LM_CACHEGEN_LEVELS };
const char *lm_cachegen_show_levels(unsigned levels, char text[LM_CACHEGEN_SHOWN]);

/* The numbers of a cache: data[part] has [heads][tokens][width] in F32, F16 or BF16. */
typedef struct {
    lm_dtype dtype;
    int64_t tokens;
    void *const *data;
} lm_cachegen_rows;

/* The tables of one level. */
typedef struct lm_cachegen lm_cachegen;

/* Make the tables for these rows.  Fails: LM_EUSAGE for a part or dtype outside the limits above;
 * LM_ENUMERIC naming the part and token for NaN, infinities and numbers beyond BF16's largest;
 * LM_ELIMIT.  par may be NULL; here and below, results depend neither on it nor on `cpu`. */
lm_code lm_cachegen_learn(const lm_cachegen_part *part, int64_t parts, const lm_cachegen_rows *rows,
                          lm_par *par, lm_cachegen **out, lm_err *e);
void lm_cachegen_free(lm_cachegen *g);
/* Append the tables to `out`, and read them back: of exactly these parts, from bytes of any
 * content.  Fails: LM_EFORMAT. */
lm_code lm_cachegen_write(const lm_cachegen *g, lm_buf *out, lm_err *e);
lm_code lm_cachegen_read(const lm_cachegen_part *part, int64_t parts, const void *bytes, size_t len,
                         lm_cachegen **out, lm_err *e);

/* Chunks of a cache of `tokens` tokens, and the tokens of chunk c. */
int64_t lm_cachegen_chunks(int64_t tokens);
int64_t lm_cachegen_chunk_tokens(int64_t tokens, int64_t c);
/* Append chunk c of the rows that g was made for to `out`.  Fails: as lm_cachegen_learn; LM_EUSAGE
 * if the tables lack a code that occurs. */
lm_code lm_cachegen_encode(const lm_cachegen *g, const lm_cachegen_rows *rows, int64_t c,
                           lm_cpu_level cpu, lm_par *par, lm_buf *out, lm_err *e);
/* Decode exactly `len` bytes of any content to chunk c of rows->data; nothing else is written
 * there.  Numbers beyond the largest of the type become the largest.  Fails: LM_EFORMAT,
 * LM_ELIMIT. */
lm_code lm_cachegen_decode(const lm_cachegen *g, const void *bytes, size_t len,
                           const lm_cachegen_rows *rows, int64_t c, lm_cpu_level cpu, lm_par *par,
                           lm_err *e);

#endif
