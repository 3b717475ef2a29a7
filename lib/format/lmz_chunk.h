/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_chunk.h -- one chunk of an .lmz file: elements split into planes, each plane coded or stored.
 *
 * A chunk holds whole elements of one kind.  Encoding: (delta: combined with the same bytes of a
 * base) -> fields rotated so that the exponent fills whole bytes -> byte planes -> each plane coded
 * with the smallest of: constant, raw, our exponent coder, zstd.  The layout of the bytes is
 * described in lmz(5).  Decoding checks every length: for any input it writes at most `raw` bytes
 * and fails unless the chunk decodes to exactly that many.  It does not detect all damage: a
 * changed bit may encode other bytes or, in zstd's matches, the same bytes in another way; the
 * container's checksums detect these. */
#ifndef LM_FORMAT_LMZ_CHUNK_H
#define LM_FORMAT_LMZ_CHUNK_H

#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/err.h"
#include "numeric/dtype.h"

#define LM_LMZ_CHUNK 1048576 /* bytes of raw data in a full chunk; a multiple of every element */

/* The type of the elements; the values are part of the format. */
typedef enum {
    LM_LMZ_BYTES = 0, /* text, JSON, headers, anything unknown: zstd */
    LM_LMZ_U8 = 1,    /* elements of 1, 2, 4, 8 bytes without fields */
    LM_LMZ_U16 = 2,
    LM_LMZ_U32 = 3,
    LM_LMZ_U64 = 4,
    LM_LMZ_BF16 = 5,
    LM_LMZ_F16 = 6,
    LM_LMZ_F32 = 7,
    LM_LMZ_F64 = 8,
    LM_LMZ_F8E4M3 = 9,
    LM_LMZ_F8E5M2 = 10,
    LM_LMZ_KINDS,
} lm_lmz_kind;
lm_lmz_kind lm_lmz_kind_of(lm_dtype d); /* LM_DTYPE_NONE gives LM_LMZ_U8 */
size_t lm_lmz_kind_size(lm_lmz_kind k); /* bytes of an element */

/* How a chunk is derived from the base's chunk. */
typedef enum {
    LM_LMZ_PLAIN = 0,
    LM_LMZ_XOR = 1,
    LM_LMZ_SUB = 2, /* integer difference of the bit patterns, in sign-folded order for floats */
} lm_lmz_delta;

enum { LM_LMZ_JOINT_LEVEL = 3 };

/* Scratch and zstd contexts of one thread. */
typedef struct lm_lmz_coder lm_lmz_coder;
/* level 1..19 as zstd counts (0: 3).  From LM_LMZ_JOINT_LEVEL on exponents of BF16 are coded with
 * the leading bits of their mantissas, which is smaller.  Up to level 9 a sample decides for each
 * plane whether the exponent coder, zstd or both are tried; from 10 on always both.  `cpu` chooses
 * the kernels; every cpu level gives the same bytes. */
lm_code lm_lmz_coder_new(int level, lm_cpu_level cpu, lm_lmz_coder **out, lm_err *e);
void lm_lmz_coder_free(lm_lmz_coder *c);

/* The most bytes that encoding `raw` bytes may write: raw + a few dozen. */
size_t lm_lmz_chunk_bound(size_t raw);
/* Encode; with `base` (raw bytes, or NULL) the delta that codes best is chosen and recorded in the
 * chunk.  raw <= LM_LMZ_CHUNK, a multiple of the element's size. Deterministic. */
lm_code lm_lmz_encode(lm_lmz_coder *c, lm_lmz_kind kind, const void *src, size_t raw,
                      const void *base, void *dst, size_t cap, size_t *len, lm_err *e);
/* Fails: LM_EFORMAT for bytes that are not such a chunk, LM_EUSAGE for a delta without base. */
lm_code lm_lmz_decode(lm_lmz_coder *c, lm_lmz_kind kind, const void *src, size_t len,
                      const void *base, void *dst, size_t raw, lm_err *e);

/* The codings in an encoded chunk, for tables: coded bytes of each plane (n planes, at most
 * 8) and how ("raw", "const", "exp", "joint", "zstd").  Fails as decoding does. */
typedef struct {
    int n;
    lm_lmz_delta delta;
    struct {
        const char *coding;
        size_t raw, coded;
    } plane[8];
} lm_lmz_chunk_info;
lm_code lm_lmz_chunk_look(lm_lmz_kind kind, const void *src, size_t len, size_t raw,
                          lm_lmz_chunk_info *out, lm_err *e);

#endif
