/* SPDX-License-Identifier: Apache-2.0 */
/* gguf.h -- GGUF: metadata and tensors of a model in one file, as llama.cpp loads it.
 *
 * The file (github.com/ggml-org/ggml, docs/gguf.md; version 3), all little-endian:
 *  1. "GGUF", u32 version, u64 number of tensors, u64 number of pairs
 *  2. the pairs: string key, u32 kind, value.  A string is u64 length and bytes; an array is u32
 *     kind of its elements, u64 count and the elements, which may be arrays
 *  3. the tensors: string name, u32 number of dimensions (at most 4), u64 dimensions (the one that
 *     varies fastest first), u32 type, u64 offset of the data
 *  4. zeros up to a multiple of the alignment (general.alignment, 32 when absent)
 *  5. the data; offsets count from here, each tensor begins at a multiple of the alignment, right behind the previous one
 *
 * Here dimensions are in the order of safetensors and PyTorch, the slowest first.  Every number in
 * a file is checked against the file's size before use. */
#ifndef LM_FORMAT_GGUF_H
#define LM_FORMAT_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "format/safetensors.h"
#include "numeric/format.h"

#define LM_GGUF_MAX_DIMS 4
#define LM_GGUF_MAX_NAME 63 /* bytes of a tensor's name, the limit of llama.cpp */
#define LM_GGUF_ALIGN    32

typedef enum {
    LM_GGUF_U8 = 0,
    LM_GGUF_I8,
    LM_GGUF_U16,
    LM_GGUF_I16,
    LM_GGUF_U32,
    LM_GGUF_I32,
    LM_GGUF_F32,
    LM_GGUF_BOOL,
    LM_GGUF_STRING,
    LM_GGUF_ARRAY,
    LM_GGUF_U64,
    LM_GGUF_I64,
    LM_GGUF_F64,
    LM_GGUF_KINDS,
} lm_gguf_kind;

/* Types of tensors that are not quantised; all are in numeric/format.h. */
enum { LM_GGUF_TYPE_F32 = 0, LM_GGUF_TYPE_F16 = 1, LM_GGUF_TYPE_BF16 = 30 };

typedef struct {
    const char *text; /* not NUL-terminated */
    size_t len;
} lm_gguf_text;

/* One pair.  Everything is borrowed from the file. */
typedef struct {
    const char *key;   /* NUL-terminated */
    lm_gguf_kind kind; /* of the value; of the elements when it is an array */
    bool array;
    uint64_t count;      /* elements of an array; otherwise 1 */
    const uint8_t *data; /* the first element, at any address */
    uint64_t bytes;
} lm_gguf_value;

typedef struct {
    const char *name; /* NUL-terminated */
    uint32_t type;    /* known to lm_format_of_gguf */
    int ndim;
    int64_t dim[LM_GGUF_MAX_DIMS];
    int64_t count;
    uint64_t offset; /* from the start of the data */
    uint64_t bytes;
} lm_gguf_tensor;

/* ---- Reading ---- */

typedef struct lm_gguf lm_gguf;

/* Check all tables of a mapped file, which `where` names in messages; the reader owns the map from now
 * on, whatever the result.  Fails: LM_EFORMAT with the key or tensor at fault; LM_ELIMIT. */
lm_code lm_gguf_open_map(lm_map *map, const char *where, lm_gguf **out, lm_err *e);
/* The same for bytes in memory, borrowed; `where` names them in messages. */
lm_code lm_gguf_parse(const void *data, size_t size, const char *where, lm_gguf **out, lm_err *e);
void lm_gguf_close(lm_gguf *g);

const char *lm_gguf_path(const lm_gguf *g);
size_t lm_gguf_pairs(const lm_gguf *g);
const lm_gguf_value *lm_gguf_pair(const lm_gguf *g, size_t i);            /* in the file's order */
const lm_gguf_value *lm_gguf_value_of(const lm_gguf *g, const char *key); /* NULL if absent */
size_t lm_gguf_count(const lm_gguf *g);
const lm_gguf_tensor *lm_gguf_at(const lm_gguf *g, size_t i);
const lm_gguf_tensor *lm_gguf_find(const lm_gguf *g, const char *name); /* NULL if absent */
/* The bytes of t, at a multiple of the alignment when the file is mapped. */
const uint8_t *lm_gguf_data(const lm_gguf *g, const lm_gguf_tensor *t);
/* Drop its pages from the resident set: they are not needed soon. */
void lm_gguf_forget(const lm_gguf *g, const lm_gguf_tensor *t);

/* Scalars by key.  Absent: the default, and false in *given (may be NULL).  A value of another kind
 * or out of [min, max] is LM_EFORMAT with key, value and range.  Any kind of integer is accepted
 * for an integer, any number for a double. */
lm_code lm_gguf_i64_or(const lm_gguf *g, const char *key, int64_t dflt, int64_t min, int64_t max,
                       int64_t *out, bool *given, lm_err *e);
lm_code lm_gguf_f64_or(const lm_gguf *g, const char *key, double dflt, double *out, bool *given,
                       lm_err *e);
lm_code lm_gguf_bool_or(const lm_gguf *g, const char *key, bool dflt, bool *out, bool *given,
                        lm_err *e);
/* out->text NULL when absent. */
lm_code lm_gguf_str(const lm_gguf *g, const char *key, lm_gguf_text *out, lm_err *e);

/* The strings of an array one after the other; zero-initialise `it` except `v`. */
typedef struct {
    const lm_gguf_value *v;
    uint64_t i;
    size_t at;
} lm_gguf_iter;
bool lm_gguf_next_str(lm_gguf_iter *it, lm_gguf_text *out); /* false at the end */
/* Element i of an array of numbers or booleans (or of a scalar, i = 0). */
double lm_gguf_number(const lm_gguf_value *v, uint64_t i);

/* ---- A plan: what a file will hold ---- */

typedef struct lm_gguf_plan lm_gguf_plan;
/* The first failure of the void functions below is kept in *e and returned by lm_gguf_plan_header;
 * `e` must remain valid until then. */
lm_code lm_gguf_plan_new(lm_gguf_plan **out, lm_err *e);
void lm_gguf_plan_free(lm_gguf_plan *p);
void lm_gguf_put_u32(lm_gguf_plan *p, const char *key, uint32_t v);
void lm_gguf_put_f32(lm_gguf_plan *p, const char *key, float v);
void lm_gguf_put_bool(lm_gguf_plan *p, const char *key, bool v);
void lm_gguf_put_str(lm_gguf_plan *p, const char *key, const char *s, size_t len);
void lm_gguf_put_strs(lm_gguf_plan *p, const char *key, const lm_gguf_text *v, size_t n);
void lm_gguf_put_u8s(lm_gguf_plan *p, const char *key, const void *v, size_t n);
void lm_gguf_put_i32s(lm_gguf_plan *p, const char *key, const int32_t *v, size_t n);
void lm_gguf_put_bools(lm_gguf_plan *p, const char *key, const bool *v, size_t n);
void lm_gguf_put_f32s(lm_gguf_plan *p, const char *key, const float *v, size_t n);
/* Dimensions slowest first; the last must be whole blocks of the type. */
void lm_gguf_put_tensor(lm_gguf_plan *p, const char *name, uint32_t type, int ndim,
                        const int64_t *dim);
size_t lm_gguf_plan_count(const lm_gguf_plan *p);
const lm_gguf_tensor *lm_gguf_plan_at(const lm_gguf_plan *p, size_t i); /* sets the offsets */
/* Everything before the data, appended to `out`. */
lm_code lm_gguf_plan_header(lm_gguf_plan *p, lm_buf *out, lm_err *e);

/* ---- Writing ---- */

typedef struct lm_gguf_writer lm_gguf_writer;
/* Write to a stream; the header is written now.  The plan is borrowed until the writer is freed. */
lm_code lm_gguf_create_on(lm_write_fn write, void *ctx, lm_gguf_plan *plan, lm_gguf_writer **out,
                          lm_err *e);
/* The tensor whose bytes are expected next; NULL after the last. */
const lm_gguf_tensor *lm_gguf_next(const lm_gguf_writer *w);
/* The next bytes of it; zeros between tensors are added here.  Fails: LM_EBUG past its end. */
lm_code lm_gguf_write(lm_gguf_writer *w, const void *data, size_t bytes, lm_err *e);
/* Fails with LM_EBUG naming the tensor whose bytes are missing; w is freed whatever the result. */
lm_code lm_gguf_finish(lm_gguf_writer *w, lm_err *e);
void lm_gguf_drop(lm_gguf_writer *w);

#endif
