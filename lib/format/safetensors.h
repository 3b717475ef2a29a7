/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.h -- tensors in one file: reading, streaming, planning and writing.
 *
 * The file (github.com/huggingface/safetensors, "Format"):
 *  1. 8 bytes: N, the size of the header, little-endian u64, at most 100,000,000
 *  2. N bytes: a JSON object, UTF-8, beginning with '{', padded at its end with spaces (white space
 *     before the '{' is read too, as the reference library does, and never written):
 *     {"__metadata__": {KEY: STRING, ...}, NAME: {"dtype": "F32", "shape": [2,3], "data_offsets":
 * [0,24]}, ...}
 *  3. the data: row-major little-endian elements; offsets count from here; tensors cover it
 * exactly, without holes, overlaps or trailing bytes
 *
 * Opening reads only the header; every number in it is checked against the size of the file before
 * use.  A tensor's bytes are borrowed from the mapping, copied, or converted. */
#ifndef LM_FORMAT_SAFETENSORS_H
#define LM_FORMAT_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "numeric/dtype.h"

#define LM_ST_MAX_HEADER 100000000 /* bytes, the reference library's limit */
#define LM_ST_MAX_DIMS   8

/* One tensor of a file or a plan.  Strings are borrowed from their owner. */
typedef struct {
    const char *name;
    /* LM_DTYPE_NONE: a type that is copied but has no arithmetic (F4, F8_E8M0 ...) */
    lm_dtype dtype;
    const char *dtype_name; /* as in the file: "BF16" */
    int ndim;               /* 0: a scalar, count 1 */
    int64_t dim[LM_ST_MAX_DIMS];
    int64_t count;   /* elements, the product of dim */
    uint64_t offset; /* of the first byte, from the start of the data */
    uint64_t bytes;
} lm_st_tensor;

/* ---- A file, random access ---- */

typedef struct lm_st lm_st;

/* Open `path`, read and check the header.  Fails: LM_EIO; LM_EFORMAT with the name of the tensor
 * for any violation of the format; LM_ELIMIT for more than LM_ST_MAX_DIMS dimensions.  All
 * accessors are thread-safe. */
lm_code lm_st_open(const char *path, lm_st **out, lm_err *e);
/* The same for `bytes` bytes elsewhere (a member of an archive): pread copies a range of them, map
 * (NULL where nothing is mapped) returns all of them. */
typedef struct {
    lm_code (*pread)(void *ctx, uint64_t from, void *dst, size_t bytes, lm_err *e); /* any thread */
    void *ctx;
    uint64_t bytes;
    const uint8_t *map;
} lm_st_io;
lm_code lm_st_open_on(const lm_st_io *io, const char *where, lm_st **out, lm_err *e);
void lm_st_close(lm_st *s);
const char *lm_st_path(const lm_st *s);
uint64_t lm_st_file_bytes(const lm_st *s);
size_t lm_st_count(const lm_st *s);
const lm_st_tensor *lm_st_at(const lm_st *s, size_t i);           /* in the order of the data */
const lm_st_tensor *lm_st_find(const lm_st *s, const char *name); /* NULL if absent */
/* __metadata__: the value of `key` (NULL if absent), or the i-th pair in file order (false past the
 * end). */
const char *lm_st_meta(const lm_st *s, const char *key);
bool lm_st_meta_at(const lm_st *s, size_t i, const char **key, const char **value);
/* The bytes of t, borrowed from a read-only mapping of the file until lm_st_close; NULL where
 * nothing is mapped.  Aligned to 8 and to the element in files written like those of the reference
 * library; in other files at any address (lm_st_load and lm_st_read accept any). */
const void *lm_st_data(const lm_st *s, const lm_st_tensor *t);
/* Drop the mapped bytes of t from this process's resident set: they are not needed soon. */
void lm_st_forget(const lm_st *s, const lm_st_tensor *t);
/* Copy `bytes` bytes of t from byte `from` on to dst, with pread (without mapping pages into the
 * process).  Fails: LM_EUSAGE outside the tensor, LM_EIO. */
lm_code lm_st_read(const lm_st *s, const lm_st_tensor *t, uint64_t from, void *dst, size_t bytes,
                   lm_err *e);
/* All elements of t converted to `to` at dst (t->count elements), in bounded memory.
 * Fails: LM_EUSAGE if t->dtype is LM_DTYPE_NONE, LM_EIO. */
lm_code lm_st_load(const lm_st *s, const lm_st_tensor *t, lm_dtype to, void *dst, lm_err *e);

/* ---- A stream, forward only: a pipe, an archive member ---- */

/* Read up to `cap` bytes to dst; *got = 0 only at the end. */
typedef lm_code (*lm_read_fn)(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e);

typedef struct lm_st_stream lm_st_stream;
/* Read and check the header from `read`; `where` names the stream in messages. */
lm_code lm_st_stream_open(lm_read_fn read, void *ctx, const char *where, lm_st_stream **out,
                          lm_err *e);
void lm_st_stream_close(lm_st_stream *s);
size_t lm_st_stream_count(const lm_st_stream *s);
const lm_st_tensor *lm_st_stream_at(const lm_st_stream *s, size_t i);
const lm_st_tensor *lm_st_stream_find(const lm_st_stream *s, const char *name); /* NULL if absent */
uint64_t lm_st_stream_data_at(const lm_st_stream *s); /* bytes before the data: length and header */
uint64_t lm_st_stream_bytes(const lm_st_stream *s);   /* size of the file, from the header */
const char *lm_st_stream_meta(const lm_st_stream *s, const char *key);
bool lm_st_stream_meta_at(const lm_st_stream *s, size_t i, const char **key, const char **value);
/* Go on to the next tensor, skipping the rest of this one; *t = NULL after the last, where trailing
 * bytes are LM_EFORMAT.  A stream that ends early is LM_EFORMAT naming the tensor. */
lm_code lm_st_stream_next(lm_st_stream *s, const lm_st_tensor **t, lm_err *e);
/* The next `bytes` bytes of the current tensor. */
lm_code lm_st_stream_read(lm_st_stream *s, void *dst, size_t bytes, lm_err *e);

/* ---- A plan: which tensors a file will hold, in which order ---- */

typedef struct lm_st_plan lm_st_plan;
lm_code lm_st_plan_new(lm_st_plan **out, lm_err *e);
void lm_st_plan_free(lm_st_plan *p);
/* Fails: LM_EUSAGE for a name used twice, not UTF-8, empty or "__metadata__", and for negative or
 * overflowing dimensions.  Strings are copied. */
lm_code lm_st_plan_add(lm_st_plan *p, const char *name, lm_dtype dtype, int ndim,
                       const int64_t *dim, lm_err *e);
lm_code lm_st_plan_add_like(lm_st_plan *p, const lm_st_tensor *t,
                            lm_err *e); /* any dtype; copied only */
/* Pairs are written in the order of addition; a key given again gets the new value in its old
 * place. */
lm_code lm_st_plan_meta(lm_st_plan *p, const char *key, const char *value, lm_err *e);
/* The reference library's order: dtype descending in its own list (U64 first, BOOL last), then name
 * bytewise; every tensor is then aligned.  Without it the order of addition is kept. */
void lm_st_plan_sort(lm_st_plan *p);
size_t lm_st_plan_count(const lm_st_plan *p);
const lm_st_tensor *lm_st_plan_at(const lm_st_plan *p, size_t i); /* sets the offsets */
uint64_t lm_st_plan_data_bytes(const lm_st_plan *p);
bool lm_st_plan_meta_at(const lm_st_plan *p, size_t i, const char **key, const char **value);
/* The length field and the padded header, appended to `out`: the data starts at a multiple of 8. */
lm_code lm_st_plan_header(const lm_st_plan *p, lm_buf *out, lm_err *e);
/* Bytes of the whole file: header and data. */
lm_code lm_st_plan_file_bytes(const lm_st_plan *p, uint64_t *out, lm_err *e);

/* ---- Writing ---- */

typedef lm_code (*lm_write_fn)(void *ctx, const void *data, size_t bytes, lm_err *e);

typedef struct lm_st_writer lm_st_writer;
/* A file (temporary and rename as in base/file.h) that will hold `plan`; the plan is borrowed until
 * the writer is freed.  The header is written now. */
lm_code lm_st_create(const char *path, bool force, const lm_st_plan *plan, lm_st_writer **out,
                     lm_err *e);
/* The same to a stream. */
lm_code lm_st_create_on(lm_write_fn write, void *ctx, const char *where, const lm_st_plan *plan,
                        lm_st_writer **out, lm_err *e);
/* The tensor whose bytes are expected next; NULL after the last. */
const lm_st_tensor *lm_st_next(const lm_st_writer *w);
/* The next bytes of the data, in any chunks, in the order of the plan; chunks may cross tensors and
 * come from any thread, one at a time.  Fails: LM_EBUG for more bytes than planned, LM_EIO. */
lm_code lm_st_write(lm_st_writer *w, const void *data, size_t bytes, lm_err *e);
/* `count` elements of `from`, converted to the dtype of lm_st_next(w); must not cross its end. */
lm_code lm_st_write_as(lm_st_writer *w, lm_dtype from, const void *data, int64_t count, lm_err *e);
/* Publish; fails with LM_EBUG naming the tensor if bytes are missing.  w is freed whatever the
 * result. */
lm_code lm_st_commit(lm_st_writer *w, lm_err *e);
void lm_st_drop(lm_st_writer *w);

/* ---- Writing by several ranks: processes, or threads ---- */

/* One of those that write parts of the same files. */
typedef struct {
    int rank, ranks;
    const char *folder; /* rank > 0: the folder that rank 0 has made (bundle.h); borrowed */
    uint64_t wrote;     /* bytes of tensors that this rank has written are added here */
} lm_st_share;

/* Make the file `path`, which does not exist, for `plan` at its full size, with its header; `where` names it in messages. */
lm_code lm_st_reserve(const char *path, const char *where, const lm_st_plan *plan, lm_err *e);
/* A writer of this rank's part of such a file, as lm_st_create's: all ranks go through all tensors, and lm_st_write and _as
 * write the bytes that are dealt to this one.  The end (lm_st_commit) does not sync.  Fails: LM_EIO if it is not there;
 * LM_EBUG if the plan has other tensors than the file. */
lm_code lm_st_join(const char *path, const char *where, const lm_st_plan *plan, lm_st_share *share,
                   lm_st_writer **out, lm_err *e);
/* True: the rest of the next tensor is dealt to other ranks, and the writer has moved behind it.  False for a file that is not
 * shared. */
bool lm_st_pass(lm_st_writer *w);
/* Of the next tensor, which is not dealt: `count` elements of `from` that this rank alone has, from element `at` of it on; in
 * any order, and lm_st_end_own moves behind the tensor. */
lm_code lm_st_write_own(lm_st_writer *w, lm_dtype from, const void *data, int64_t count, int64_t at,
                        lm_err *e);
void lm_st_end_own(lm_st_writer *w);

#endif
