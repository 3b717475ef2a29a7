/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_layout.h -- the bytes of an .lmz file other than its coded chunks; private to lib/format.
 *
 * All numbers are little-endian.  lmz(5) describes the same for other readers.
 *  1. header: magic 8, version u16, flags u8 (1: delta), chain u8, chunk bytes u32, base digest 16,
 *     length n of the base's name u32, zero u32, the name n, XXH3-64 of all this
 *  2. records, one after another: mark F5 'L' 'Z' TYPE, length n of the fields u32, fields n,
 *     XXH3-64 of mark, length and fields; after 'C' and 'I' the coded bytes they announce
 *       F  a file begins     P  a part of it (a tensor)   C  a chunk of the part
 *       E  the file ends     I  the index                 Z  the footer, the last record
 *  3. nothing after the footer, whose size is fixed, so that it is found from the end
 * The position of each record follows from the earlier ones: the index holds no positions. */
#ifndef LM_FORMAT_LMZ_LAYOUT_H
#define LM_FORMAT_LMZ_LAYOUT_H

#include "format/lmz.h"

enum {
    LMZ_VERSION = 2, /* the newest: chunks may have the head LMZ_JOINT; 1 is read as well */
    LMZ_HEADER = 48, /* without the base's name */
    LMZ_BASE_NAME = 4096,
    LMZ_NAME = 65535, /* longest name of a tensor */
    LMZ_DTYPE = 32,
    LMZ_HEAD = 8,    /* of a record: mark and length */
    LMZ_AROUND = 16, /* mark, length and check */
    LMZ_FIELDS = 70000,
    LMZ_CHUNK_RECORD = 60,    /* without the coded bytes */
    LMZ_INDEX_RECORD = 40,    /* likewise */
    LMZ_INDEX_MOST = 1 << 30, /* bytes: the chunks of 256 TB */
    LMZ_FOOTER = 88,
};

typedef enum { LMZ_FILE_PLAIN = 0, LMZ_FILE_SAFETENSORS = 1 } lmz_file_type;
enum { LMZ_PART_NAMED = 1, LMZ_PART_DELTA = 2 }; /* flags of a part, and of its chunks */

typedef struct {
    const char *p; /* not terminated */
    size_t n;
} lmz_str;

typedef struct {
    int version; /* 1 or 2; writing: 0 is the newest */
    bool delta;
    int chain;
    uint8_t base_digest[16];
    lmz_str base_name;
} lmz_header;

typedef struct {
    uint32_t file;
    lmz_file_type type;
    uint64_t bytes;
    lmz_str name;
} lmz_file_rec;

typedef struct {
    uint32_t file, part;
    lm_lmz_kind kind;
    unsigned flags;
    uint64_t offset, raw; /* in the file */
    lmz_str dtype, name;
    lmz_str base_file; /* offset of the base's bytes in the base's file */
    uint64_t base_from;
} lmz_part_rec;

typedef struct {
    uint32_t file, part;
    uint64_t offset; /* in the file */
    uint32_t raw, coded;
    lm_lmz_kind kind;
    unsigned flags;
    uint64_t raw_check, coded_check; /* XXH3-64 */
} lmz_chunk_rec;

typedef struct {
    uint32_t file;
    uint64_t bytes;
    uint8_t digest[16]; /* XXH3-128 of the file */
    lmz_str name;
} lmz_end_rec;

typedef struct {
    uint64_t raw, coded, coded_check;
} lmz_index_rec;

typedef struct {
    uint64_t index_at, index_bytes; /* its record with the coded bytes */
    uint64_t raw;                   /* bytes of all files */
    uint64_t bytes;                 /* of the whole .lmz */
    uint32_t files;
    uint8_t content[16]; /* lm_bundle_digest */
    uint8_t records[16]; /* XXH3-128 over the checks of the header and all records before this */
} lmz_footer;

/* ---- Writing: appended to `out` ---- */
lm_code lmz_put_header(lm_buf *out, const lmz_header *h, lm_err *e);
lm_code lmz_put_file(lm_buf *out, const lmz_file_rec *r, lm_err *e);
lm_code lmz_put_part(lm_buf *out, const lmz_part_rec *r, lm_err *e);
lm_code lmz_put_end(lm_buf *out, const lmz_end_rec *r, lm_err *e);
lm_code lmz_put_index(lm_buf *out, const lmz_index_rec *r, lm_err *e);
lm_code lmz_put_footer(lm_buf *out, const lmz_footer *r, lm_err *e);
void lmz_put_chunk(uint8_t out[LMZ_CHUNK_RECORD], const lmz_chunk_rec *r);

/* ---- Reading ---- */

/* Bytes of the whole header from its first LMZ_HEADER; 0 if it is not a header.  A later version
 * gives 0 too; lmz_header_version returns it. */
size_t lmz_header_size(const uint8_t *p);
int lmz_header_version(const uint8_t *p); /* 0: no magic */
bool lmz_get_header(const uint8_t *p, size_t n, lmz_header *h);

/* Bytes of a whole record (without coded bytes) from its first LMZ_HEAD; 0 if it is not a
 * record. */
size_t lmz_record_size(const uint8_t *p);
char lmz_record_type(const uint8_t *p);
/* True if all fields are in range and the check is correct; strings point into p.  The caller
 * checks consistency with earlier records. */
bool lmz_record_ok(const uint8_t *p, size_t n);
bool lmz_get_file(const uint8_t *p, size_t n, lmz_file_rec *r);
bool lmz_get_part(const uint8_t *p, size_t n, lmz_part_rec *r);
bool lmz_get_chunk(const uint8_t *p, size_t n, lmz_chunk_rec *r);
bool lmz_get_end(const uint8_t *p, size_t n, lmz_end_rec *r);
bool lmz_get_index(const uint8_t *p, size_t n, lmz_index_rec *r);
bool lmz_get_footer(const uint8_t *p, size_t n, lmz_footer *r);

size_t lmz_file_size(size_t name);
size_t lmz_part_size(const lmz_part_rec *r);
size_t lmz_end_size(size_t name);

/* ---- Fields ---- */
static inline void lmz_store(uint8_t *p, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}
static inline uint64_t lmz_fetch(const uint8_t *p, int bytes)
{
    uint64_t v = 0;
    for (int i = bytes - 1; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}
/* A cursor that records an access past the end. */
typedef struct {
    const uint8_t *p;
    size_t left;
    bool bad;
} lmz_cursor;
uint64_t lmz_take(lmz_cursor *c, int bytes);
lmz_str lmz_take_str(lmz_cursor *c, size_t n);
const uint8_t *lmz_take_bytes(lmz_cursor *c, size_t n); /* NULL past the end */
lm_code lmz_add(lm_buf *out, uint64_t v, int bytes, lm_err *e);

#endif
