/* SPDX-License-Identifier: Apache-2.0 */
/* lmz.h -- .lmz, the lossless compressed form of a bundle.
 *
 * Files follow one another; a .safetensors file is cut at its tensors, so that each chunk holds
 * elements of one type (lmz_chunk.h).  Each chunk has its XXH3 of the raw bytes, each file its
 * XXH3-128, the index and the whole file theirs; the index at the end makes every chunk of every
 * tensor reachable with two reads; without it (a pipe) the same file is read forward.  A delta
 * holds the digest of its base and the path to it.  Layout: lmz(5), which is enough to write
 * another reader. */
#ifndef LM_FORMAT_LMZ_H
#define LM_FORMAT_LMZ_H

#include "base/par.h"
#include "base/progress.h"
#include "format/bundle.h"
#include "format/lmz_chunk.h"

#define LM_LMZ_MAX_CHAIN 8 /* longest chain of deltas up to a whole file */

/* The first bytes of every .lmz: which distinguish it from a tar or a .safetensors. */
#define LM_LMZ_MAGIC       "\x89LMZ\r\n\x1a\n"
#define LM_LMZ_MAGIC_BYTES 8

/* ---- Writing: bytes are pushed, chunks are coded on the pool ---- */

typedef struct {
    int level;             /* 1..19; 0: 3 */
    lm_par *par;           /* NULL: on the caller's thread */
    lm_bundle *base;       /* random access, borrowed until the writer is freed; NULL: no delta */
    const char *base_name; /* how a reader finds it: a path relative to the .lmz, or absolute */
    /* warned of a .safetensors that does not parse; its bytes are stored unchanged */
    lm_sink *sink;
} lm_lmz_opts;

/* How an .lmz at `path` ("-" or NULL: on a pipe, which is read in the current folder) names the
 * base at `base`: relative to its own folder, which must exist, so that both can be moved
 * together. */
lm_code lm_lmz_base_name(const char *path, const char *base, char **out, lm_err *e);

typedef struct lm_lmz_writer lm_lmz_writer;
/* Begin an .lmz on `write`, which is called on any thread of the pool, one call at a time; `where`
 * names it in messages.  The bytes are the same for any number of threads.  With a base, its digest
 * is computed (lm_bundle_digest: a folder is read once).  Fails: LM_EUSAGE for a base without
 * random access or whose own chain is LM_LMZ_MAX_CHAIN long already. */
lm_code lm_lmz_create_on(lm_write_fn write, void *ctx, const char *where, const lm_lmz_opts *o,
                         lm_lmz_writer **out, lm_err *e);
/* Begin a file of exactly `bytes` bytes; the previous one must be complete (else LM_EBUG).  Fails:
 * LM_EUSAGE for a name that is not plain or is a duplicate. */
lm_code lm_lmz_begin(lm_lmz_writer *w, const char *name, uint64_t bytes, lm_err *e);
/* The next bytes of it, in pieces of any size: an lm_write_fn with ctx = lm_lmz_writer. */
lm_code lm_lmz_write(void *writer, const void *data, size_t bytes, lm_err *e);
/* Index and footer; w is freed whatever the result. */
lm_code lm_lmz_close(lm_lmz_writer *w, lm_err *e);
void lm_lmz_drop(lm_lmz_writer *w);

/* ---- Reading ---- */

typedef struct lm_lmz lm_lmz;

/* One run of chunks of one kind: a tensor, a safetensors header, a whole small file. */
typedef struct {
    const char *file;
    const char *tensor;          /* NULL: a header or a plain file */
    const char *dtype;           /* "BF16"; NULL as above */
    uint64_t offset, raw, coded; /* offset inside the file; bytes */
    uint64_t first, chunks;      /* in the list of chunks of the file */
    lm_lmz_kind kind;
    bool delta; /* a delta against the base's tensor of this name */
} lm_lmz_part;

typedef struct {
    bool delta;
    int chain;             /* steps to a whole file: 0 for a whole one */
    const char *base_name; /* delta only */
    char base_digest[33];  /* of the base, 32 hex digits */
    char digest[33];       /* of this bundle's content: names and bytes of its files */
    uint64_t raw, coded;   /* bytes of all files; of the .lmz */
} lm_lmz_info;

/* Open a file by its index.  `o` may be NULL; if it is a delta, its base (that of `o`, otherwise
 * the one named in the file) is opened.  Fails: LM_EFORMAT naming the damaged part; LM_EUSAGE for a
 * base that is missing or has another digest (both are shown). */
lm_code lm_lmz_open(const char *path, const lm_bundle_opts *o, lm_lmz **out, lm_err *e);
/* Read forward from a stream; then lm_lmz_next and lm_lmz_read only. */
lm_code lm_lmz_stream_open(lm_read_fn read, void *ctx, const char *where, const lm_bundle_opts *o,
                           lm_lmz **out, lm_err *e);
/* As lm_lmz_open, for tables: the base of a delta is not opened, and reading tensors that need it
 * fails. */
lm_code lm_lmz_open_index(const char *path, const lm_bundle_opts *o, lm_lmz **out, lm_err *e);
void lm_lmz_free(lm_lmz *z);
const lm_lmz_info *lm_lmz_about(const lm_lmz *z);

size_t lm_lmz_files(const lm_lmz *z);
const lm_bundle_file *lm_lmz_file(const lm_lmz *z, size_t i);
lm_code lm_lmz_pread(const lm_lmz *z, size_t file, uint64_t from, void *dst, size_t bytes,
                     lm_err *e); /* any thread; decodes on the pool when the range is long */
size_t lm_lmz_parts(const lm_lmz *z);
const lm_lmz_part *lm_lmz_part_at(const lm_lmz *z, size_t i);
/* Bytes and codings of the planes of a part, over all of its chunks. */
lm_code lm_lmz_part_planes(const lm_lmz *z, size_t part, lm_lmz_chunk_info *sum, lm_err *e);

/* Forward, in a stream (chunks are decoded ahead on the pool) or a file: go to the next file, *f =
 * NULL at the end, which for a stream means that every checksum was correct; read its bytes. */
lm_code lm_lmz_next(lm_lmz *z, const lm_bundle_file **f, lm_err *e);
lm_code lm_lmz_read(void *z, void *dst, size_t cap, size_t *got, lm_err *e); /* lm_read_fn */

/* Decode everything and compare every checksum; the first fault, named by file, tensor and chunk.
 * With `each`, it is called for every fault and the check continues; LM_EFORMAT at the end if there
 * were any.  Not for a stream (reading it to its end is the check). */
typedef struct {
    const char *file;        /* NULL: the .lmz itself (its records, index, digest) */
    const lm_lmz_part *part; /* NULL: not in a part */
    uint64_t chunk;          /* the first damaged one, counted in the part; UINT64_MAX: none */
    uint64_t chunks;         /* number of consecutive chunks */
    const char *what;
} lm_lmz_fault;
typedef void (*lm_lmz_fault_fn)(void *ctx, const lm_lmz_fault *f);
lm_code lm_lmz_verify(lm_lmz *z, lm_lmz_fault_fn each, void *ctx, lm_sink *sink, lm_err *e);

/* Open the intact parts of a damaged file: by its index if that is intact, otherwise by reading the
 * records and searching for the next intact one after damage.  Reading a lost part fails with its
 * name; lm_lmz_verify lists them.  A missing base is not a failure here: tensors that need it are
 * lost.  Fails: LM_EIO; LM_EFORMAT if nothing of an .lmz is found. */
lm_code lm_lmz_salvage(const char *path, const lm_bundle_opts *o, lm_lmz **out, lm_err *e);

/* Digest of a bundle's content, 32 hex digits: XXH3-128 over its files (names sorted bytewise) as
 * name, NUL, XXH3-128 of the bytes.  The same for a folder, its tar and its .lmz (whose footer
 * holds it, so nothing is read). */
lm_code lm_bundle_digest(lm_bundle *b, char out[33], lm_sink *sink, lm_err *e);

#endif
