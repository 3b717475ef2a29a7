/* SPDX-License-Identifier: Apache-2.0 */
/* file.h -- kv-cache(5): the cache of a prompt in a safetensors file.
 *
 * __metadata__, all strings:
 *   format "kv-cache"; version "1"; coding "plain", "coded" or "cachegen"
 *   model_type; weights: lm_model_source_weights_digest, 32 hexadecimal digits
 *   config: lm_config_digest, what the model computes besides; 32 hexadecimal digits
 *   rope: the rotary settings as JSON text, compared as text
 *   k_state "post_rope" (keys are rotated by their positions), "pre_rope" (those of some layers are not)
 *   layers; kv_heads and head_dim: JSON lists, a number for each layer; tokens; act: the type of plain numbers
 *   latent: a JSON list, for each layer whether it keeps latents (0: keys and values), the numbers of the rotated part of keys;
 *   its kv_heads is 1, head_dim the numbers of a latent.  absent: no layer does
 *   state, conv: JSON lists, for each layer that mixes tokens through a state the F32 numbers of that, and the numbers
 *   of the rows in front of its convolution (0: it has none); its kv_heads and head_dim are 0.  absent: there is no such layer
 *   rows: a JSON list, the tokens that each layer still has; absent: all
 *   policy (with rows): {"spec": text (kv/spec.h), "prompt": tokens of the prompt}, with which tokens were dropped;
 *   absent: it cannot be continued so that more are dropped
 *   next: the id of the token that follows, which was chosen and has no rows; absent: the cache ends with a prompt
 *   forms (coded): {"spec": text (kv/spec.h), "page": tokens, "forms": [FORM ...], "parts": [index or null ...]}, for
 *   part 2 N (keys of layer N) and 2 N + 1 (values) a form, or null for plain numbers; see file_form.c
 *   xxh3: a JSON object, for each tensor the XXH3-64 of its bytes, 16 hexadecimal digits
 *   header: XXH3-128 of all other pairs and of the table of tensors (file_header.c), 32 hexadecimal digits
 *   lmutils.history (format/provenance.h), if there is one
 * Tensors, in this order (another one is read from a file, on a stream `tables` must precede
 * chunks):
 *   token_ids I32 [tokens]
 *   positions I32 [tokens], rising; with rows: layers.N.positions I32 [kv_heads, rows of the layer], rising in each head
 *   with a policy that replaces tokens: layers.N.order I32 [kv_heads, rows], the place of each row in the cache, and
 *   if the policy has scores layers.N.mass F32 [kv_heads, rows]
 *   plain, coded: layers.N.k and its sections, layers.N.v and its sections (part.h); of latents layers.N.latent and
 *   layers.N.rotary
 *   layers.N.state F32 [numbers], layers.N.conv [numbers] in the type of the activations
 *   cachegen: for each level L: tables.level.L U8; then for each chunk C and level: chunk.C.level.L U8
 *             (cachegen.h; part 2 N is the keys of layer N, 2 N + 1 its values)
 *
 * Every byte of a file that is used has been checked: headers when it is opened, before memory for
 * rows is allocated; checksums, ids, positions and numbers when they are read.  Rows are whole only
 * after lm_kv_file_read has succeeded. */
#ifndef LM_KV_FILE_H
#define LM_KV_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/par.h"
#include "format/safetensors.h"
#include "kv/cachegen.h"
#include "kv/part.h"
#include "kv/stream.h"

enum {
    LM_KV_FILE_LAYERS = 65535 / 2,
    LM_KV_FILE_BEST = -1, /* instead of a level */
};

/* What a cache is of.  Of an open file: borrowed from it. */
typedef struct {
    const char *model_type;
    const char *weights, *config; /* 32 hexadecimal digits each */
    const char *rope;
    int64_t layers, tokens;
    const int64_t *kv_heads, *head_dim; /* [layers] */
    /* [layers], NULL: 0 of all layers */
    const int64_t *latent;       /* of a layer with latents: numbers of the rotated part */
    const int64_t *state, *conv; /* numbers of a layer's state */
    lm_dtype act;                /* F32, F16, BF16 */
    const char *history;         /* NULL: none */
    const int64_t *rows;         /* [layers]: tokens that a layer has; NULL: all */
    /* the specification with which tokens were dropped; NULL: more cannot be dropped */
    const char *policy;
    int64_t prompt;        /* tokens of its prompt */
    bool ordered, weighed; /* content.order, content.mass are there */
    bool has_next;
    int32_t next; /* the token that follows: chosen, and without rows */
    /* Of a coded cache; NULL, 0: plain. */
    const lm_kv_side *form; /* [2 layers]; without a format: plain numbers of `act` */
    int64_t page;
    const char *spec;
} lm_kv_about;

static inline int64_t lm_kv_about_rows(const lm_kv_about *a, int64_t layer)
{
    return a->rows ? a->rows[layer] : a->tokens;
}
/* Numbers of a row of part 2 N + side. */
static inline int64_t lm_kv_about_dim(const lm_kv_about *a, int64_t part)
{
    return part % 2 && a->latent && a->latent[part / 2] ? a->latent[part / 2]
                                                        : a->head_dim[part / 2];
}
/* The layer has a state instead of rows. */
static inline bool lm_kv_about_has_state(const lm_kv_about *a, int64_t layer)
{
    return a->state && a->state[layer] > 0;
}
/* Bytes of the rows [kv_heads][rows][numbers] of a part in the type `act`. */
static inline size_t lm_kv_about_bytes(const lm_kv_about *a, int64_t part)
{
    return (size_t)(a->kv_heads[part / 2] * lm_kv_about_rows(a, part / 2) *
                    lm_kv_about_dim(a, part)) *
           lm_dtype_size(a->act);
}
/* The shape of part 2 N + side; side 0: keys, 1: values. */
lm_kv_shape lm_kv_about_shape(const lm_kv_about *a, int64_t part);

/* The tokens and rows of a cache, in memory of the caller. */
typedef struct {
    int32_t *ids;       /* [tokens] */
    int32_t *positions; /* [tokens]; NULL with rows: */
    int32_t **at;       /* [layers][kv_heads, rows] */
    /* [layers][kv_heads, rows]: a permutation of each head's rows; NULL: they are in order */
    int32_t **order;
    float **mass;     /* [layers][kv_heads, rows]; NULL: none */
    lm_kv_part *part; /* [2 layers] */
    float **state;    /* [layers][numbers]; NULL: none */
    void **conv;      /* the same, in the type of the activations */
} lm_kv_content;

/* ---- Writing ---- */

typedef struct lm_kv_file lm_kv_file;

/* Write to `path` (lm_st_create), or with path NULL to `write` (lm_st_create_on with `where`).
 * Levels that were kept when the same cache was read from `from` are copied, the others are coded.
 * Fails: LM_EUSAGE for shapes or levels that do not exist; LM_ENUMERIC naming a tensor for NaN and
 * infinities, LM_EIO, LM_ELIMIT. */
typedef struct {
    const char *path;
    bool force;
    lm_write_fn write;
    void *ctx;
    const char *where;
    uint64_t *bytes;        /* those of all tensors are added to it; NULL: unwanted */
    const lm_kv_file *from; /* with levels that lm_kv_reading.keep names; NULL: none */
} lm_kv_out;
/* levels: bit L for cachegen's level L, of a plain cache with all its tokens; 0: as it is. */
lm_code lm_kv_file_write(const lm_kv_out *to, const lm_kv_about *a, const lm_kv_content *c,
                         unsigned levels, lm_cpu_level cpu, lm_par *par, lm_err *e);

/* ---- Reading ---- */

/* Open a file, or a stream (`where` names it), and check its header.  Fails: LM_EIO, LM_ELIMIT,
 * LM_EFORMAT naming the key or tensor. */
lm_code lm_kv_file_open(const char *path, lm_kv_file **out, lm_err *e);
lm_code lm_kv_file_open_on(lm_read_fn read, void *ctx, const char *where, lm_kv_file **out,
                           lm_err *e);
/* One of them: a stream if the path is one ("-", a pipe). */
lm_code lm_kv_file_open_input(const char *path, lm_kv_file **out, lm_err *e);
void lm_kv_file_close(lm_kv_file *f);
const lm_kv_about *lm_kv_file_about(const lm_kv_file *f);
unsigned lm_kv_file_levels(const lm_kv_file *f); /* as lm_kv_file_write; 0: not cachegen */
/* Bytes of chunk c at a level that is present. */
uint64_t lm_kv_file_chunk_bytes(const lm_kv_file *f, int64_t c, int level);

/* LM_EFORMAT unless the file has the cache of this model: the same type, weights, rotary and other
 * settings and shapes, at most `context` tokens.  `a`: tokens, act, history and forms are not
 * compared. */
lm_code lm_kv_file_match(const lm_kv_file *f, const lm_kv_about *a, int64_t context, lm_err *e);

typedef struct {
    int64_t vocab, context; /* ids and positions are below these */
    int level;              /* LM_KV_FILE_BEST, or the only one that is decoded */
    /* bit L: the bytes of level L, if present, stay with the file (lm_kv_out.from) */
    unsigned keep;
    /* With LM_KV_FILE_BEST and a deadline, levels are chosen by the measured bandwidth (stream.h), or rows are
     * computed.  A stream passes all levels, so the best one is decoded there; if the rest would come too late, and
     * computing it takes less time, it is computed, and the stream is not read further. */
    double deadline;    /* seconds from `begin`; 0 or INFINITY: none */
    double begin;       /* lm_now() */
    double row_seconds; /* of computing a row, until one was computed; */
    int64_t rows_behind;
    /* and how: plain rows first .. first + n - 1, from the ids and the rows before; NULL: cannot. */
    lm_code (*compute)(void *ctx, int64_t first, int64_t n, lm_err *e);
    void *ctx;
    /* [lm_cachegen_chunks(tokens)]: the level of each chunk or LM_KV_COMPUTE; NULL: unwanted */
    int *chosen;
} lm_kv_reading;

/* Read all to *c, which has room for it (image.h).  Fails: LM_EUSAGE for a level that the file
 * lacks; LM_EFORMAT naming the tensor for a wrong checksum, an early end, ids and positions out of
 * range, NaN and infinities; LM_EIO, LM_ELIMIT.  Once per file that was opened on a stream. */
lm_code lm_kv_file_read(lm_kv_file *f, const lm_kv_reading *r, const lm_kv_content *c,
                        lm_cpu_level cpu, lm_par *par, lm_err *e);

#endif
