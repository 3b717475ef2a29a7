/* SPDX-License-Identifier: Apache-2.0 */
/* file_impl.h -- names and limits of the tensors of kv-cache(5), checksums of headers.  Private to lib/kv. */
#ifndef LM_KV_FILE_IMPL_H
#define LM_KV_FILE_IMPL_H

#include "base/json.h"
#include "kv/file.h"

typedef enum {
    KV_IDS,
    KV_POSITIONS, /* of all layers; */
    KV_AT,        /* of one; */
    KV_ORDER,     /* of one */
    KV_MASS,
    KV_ROWS,
    KV_STATE, /* of one layer, */
    KV_CONV,  /* and the rows of its convolution */
    KV_TABLES,
    KV_CHUNK,
    KV_UNKNOWN
} kv_tensor_kind;

/* A tensor of a file by its name. */
typedef struct {
    kv_tensor_kind kind;
    int64_t part, chunk;   /* KV_ROWS, others of a layer (2 N); KV_CHUNK */
    lm_kv_section section; /* KV_ROWS */
    bool latent;           /* KV_ROWS: of a layer with latents */
    int level;             /* KV_TABLES, KV_CHUNK */
} kv_tensor;

enum { KV_NAME = 64 }; /* bytes of a name */

/* The checked bytes of a tensor in levels. */
typedef struct {
    void *data; /* NULL: not kept */
    size_t bytes;
} kv_kept;

struct lm_kv_file {
    char *where;
    lm_st *st; /* or */
    lm_st_stream *stream;
    bool passed; /* the stream was read */
    int fd;      /* of lm_kv_file_open_input; -1: none */
    lm_kv_about about;
    int64_t *kv_heads, *head_dim, *latent, *state, *conv, *rows;
    lm_arena *arena; /* of forms */
    json_t *hashes;
    unsigned levels;
    kv_kept *kept[LM_CACHEGEN_LEVELS]; /* [1 + chunks]: tables and chunks of a level; NULL: none */
};

static inline int64_t kv_parts(const lm_kv_about *a)
{
    return 2 * a->layers;
}
/* The tensor of a section of a part. */
static inline kv_tensor kv_section_of(const lm_kv_about *a, int64_t part, lm_kv_section section)
{
    return (kv_tensor){ .kind = KV_ROWS,
                        .part = part,
                        .section = section,
                        .latent = a->latent && a->latent[part / 2] };
}
/* Numbers of a layer's state (KV_STATE), or of the rows of its convolution. */
static inline int64_t kv_state_numbers(const lm_kv_about *a, kv_tensor_kind kind, int64_t layer)
{
    const int64_t *of = kind == KV_STATE ? a->state : a->conv;
    return of ? of[layer] : 0;
}
void kv_tensor_name(const kv_tensor *t, char name[KV_NAME]);
/* What a tensor of that name holds; KV_UNKNOWN for other names. */
kv_tensor kv_tensor_of(const char *name);
/* Shapes, types and limits of a cache; `code` is that of the failure. */
lm_code kv_check_about(const lm_kv_about *a, const char *where, lm_code code, lm_err *e);
/* Bytes of a tensor of a file; 0: it is absent. */
uint64_t kv_tensor_bytes(const lm_kv_file *f, kv_tensor what);
/* The kept tables (KV_TABLES) or chunk of a level; NULL: the level was not kept. */
kv_kept *kv_kept_of(const lm_kv_file *f, const kv_tensor *what);
/* The forms of a cache as JSON text, and back: sets form, page and spec of f->about, whose numbers
 * lie in f->arena.  Fails: LM_EFORMAT. */
lm_code kv_forms_write(const lm_kv_about *a, lm_buf *out, lm_err *e);
lm_code kv_forms_read(lm_kv_file *f, const char *text, lm_err *e);
/* What a header says: that of an open file, or of one that will be written. */
typedef struct {
    const void *of;
    bool (*meta_at)(const void *of, size_t i, const char **key, const char **value);
    const lm_st_tensor *(*tensor_at)(const void *of, size_t i);
    size_t tensors;
} kv_header;
#define KV_HEADER_KEY "header"
#define KV_DATA_KEY   "data" /* of calibrations: the checksum of all numbers */
/* The checksum of a header, 32 hexadecimal digits (file_header.c).  Fails: LM_ELIMIT. */
lm_code kv_header_digest(const kv_header *from, char hex[33], lm_err *e);
/* The parts of a cache at a level; [kv_parts]. */
void kv_level_parts(const lm_kv_about *a, int level, lm_cachegen_part *part);
/* True if n numbers are finite. */
bool kv_all_finite(lm_dtype d, const void *x, size_t n);

#endif
