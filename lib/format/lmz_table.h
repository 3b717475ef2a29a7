/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_table.h -- the contents of an .lmz, in memory: files, their parts, their chunks; shared by
 * writer, readers and salvage; private to lib/format.
 *
 * Every entry is checked against earlier ones when it is added, so readers of the table need no
 * checks. */
#ifndef LM_FORMAT_LMZ_TABLE_H
#define LM_FORMAT_LMZ_TABLE_H

#include "base/mem.h"
#include "format/lmz_layout.h"

typedef struct {
    lm_bundle_file *pub; /* valid as long as the table */
    lmz_file_type type;
    bool whole;         /* its end record was read: the digest is known */
    uint8_t digest[16]; /* XXH3-128 of its bytes */
    uint64_t at, end;   /* positions of the records of its begin and end; 0: lost */
    uint64_t covered;   /* bytes of it that belong to parts so far */
    size_t first_part, parts, first_chunk, chunks;
} lmz_file;

typedef struct {
    lm_lmz_part pub;
    uint32_t file, number; /* number in the file */
    unsigned flags;
    const char *base_file; /* NULL: no delta */
    uint64_t base_from;
    uint64_t at; /* position of its record */
} lmz_part;

/* In the order of file and offset: looked up by bisection, as a damaged file has gaps. */
typedef struct {
    uint64_t at;     /* position of its record */
    uint64_t offset; /* in the file */
    uint32_t part;   /* in the table */
    uint32_t coded;
} lmz_chunk;

typedef struct {
    lm_arena *arena; /* all strings and lm_bundle_files */
    lmz_file *file;
    lmz_part *part;
    lmz_chunk *chunk;
    size_t files, files_cap, parts, parts_cap, chunks, chunks_cap;
    uint32_t *cell; /* open addressing over file names: index + 1 */
    size_t cells;
    uint64_t raw; /* of all files */
} lmz_table;      /* zero-initialise */

void lmz_table_fini(lmz_table *t);

/* Append; `where` names the .lmz.  Failures are LM_EFORMAT (a name that is not plain or a
 * duplicate, a part that does not begin where the previous one ended, a kind out of range) or
 * `code` for names.  With `gaps` parts and chunks may be missing. */
lm_code lmz_table_file(lmz_table *t, const lmz_file_rec *r, uint64_t at, const char *where,
                       lm_code code, lm_err *e);
lm_code lmz_table_part(lmz_table *t, const lmz_part_rec *r, uint64_t at, bool gaps,
                       const char *where, lm_err *e);
lm_code lmz_table_chunk(lmz_table *t, const lmz_chunk_rec *r, uint64_t at, bool gaps,
                        const char *where, lm_err *e);
lm_code lmz_table_end(lmz_table *t, const lmz_end_rec *r, bool gaps, const char *where, lm_err *e);

/* Set name and size of a placeholder for a file whose beginning is lost. */
lm_code lmz_table_rename(lmz_table *t, size_t f, lmz_str name, uint64_t bytes, const char *where,
                         lm_err *e);
/* The chunk of file f that begins at `offset`; NULL if there is none. */
const lmz_chunk *lmz_table_chunk_at(const lmz_table *t, size_t f, uint64_t offset);
/* The part of file f that byte `at` belongs to (never an empty one); NULL if it is lost. */
const lmz_part *lmz_table_part_at(const lmz_table *t, size_t f, uint64_t at);
/* Fill in its records, for writing and comparing them. */
lmz_file_rec lmz_file_record(const lmz_table *t, size_t f);
lmz_part_rec lmz_part_record(const lmz_part *p);
lmz_end_rec lmz_end_record(const lmz_table *t, size_t f);
/* Raw bytes of the chunk of p that begins at `offset` of its file. */
size_t lmz_chunk_raw(const lmz_part *p, uint64_t offset);
uint64_t lmz_chunks_of(uint64_t raw);

/* Digest of the content from those of the files. */
lm_code lmz_table_digest(const lmz_table *t, uint8_t out[16], lm_err *e);

/* The index: its bytes before compression. */
lm_code lmz_table_to_index(const lmz_table *t, lm_buf *out, lm_err *e);
/* Decode it and compute the position of every record: the first is at `first`, the last ends at
 * `last`. */
lm_code lmz_table_from_index(lmz_table *t, const void *index, size_t bytes, uint64_t first,
                             uint64_t last, const char *where, lm_err *e);

/* "FILE: model.safetensors: tensor 'x', chunk 3" for messages; part may be NULL, chunk UINT64_MAX. */
#define LMZ_SHOWN 256
const char *lmz_show(char buf[LMZ_SHOWN], const char *where, const char *file,
                     const lm_lmz_part *part, uint64_t chunk);

/* Digest of files (name, XXH3-128 of the bytes), in the order of their names. */
typedef struct {
    const char *name;
    uint8_t digest[16];
} lmz_named_digest;
void lmz_content_digest(lmz_named_digest *d, size_t n, uint8_t out[16]);

#endif
