/* SPDX-License-Identifier: Apache-2.0 */
/* generate_keep.h -- shared by generate_policy.c, which chooses tokens, and generate_encode.c, which stores their rows.
 * Private to lib/model. */
#ifndef LM_MODEL_GENERATE_KEEP_H
#define LM_MODEL_GENERATE_KEEP_H

#include "kv/merge.h"
#include "model/build.h"
#include "model/generate_impl.h"

/* A layer that keeps some tokens. */
typedef struct {
    int64_t number;      /* among the layers without a window */
    int64_t heads, room; /* key/value heads; tokens of whole pages of a slot */
    int64_t *used;       /* of each slot: tokens in its caches */
    int32_t *at;         /* [slots][heads][room]: the position of each */
    int32_t *last;       /* [slots][heads]: the row of the last step's token */
    /* offsets of masses [slots][heads][room + 1], and of a prompt [heads][context] */
    size_t mass, prompt;
} kept_layer;

/* Calls of kernels that store rows: operands, numbers, scratch. */
typedef struct {
    const lm_kernel *gather, *rotate, *write;
    lm_mirror numbers; /* at, run [heads][rows]; count; used */
    int32_t *at, *run, *count, *used;
    lm_mirror weight; /* of merging [heads][context] */
    void *rows;       /* [rows, (H+2K)D] */
    size_t row_bytes; /* of all of them */
    void *work;
    size_t work_bytes;
    /* merging: keys of a head in numbers of the backend's type, and as floats */
    void *stored;
    float *key;
    int32_t *run_of, *first; /* of a token; [heads][context]: of each run */
    lm_kv_joint *joint;
    double *weights;
} keep_encoder;

struct generator_keep {
    const lm_kv_policy *p;
    int64_t limited; /* layers without a window */
    int64_t layers, batch, context, most_new, most_heads;
    int64_t *rows; /* of each layer: lm_build.kept */
    kept_layer *layer;
    int64_t *n; /* of each slot: tokens of its prompt */
    /* of the prompt that runs: tokens behind the first ones that left the cache of prompts */
    int64_t dropped;
    bool *pending; /* the last step's token is not among those of the layers yet */
    char *cache;   /* of prompts */
    size_t cache_bytes;
    size_t *cache_at; /* of each cache of a graph of prompts */
    lm_mirror mass, prompt, from;
    bool *keep; /* room for selections */
    double *work;
    float *random;
    keep_encoder encode;
};

/* Masses [n] of the prompt, on the host after a pull. */
float *generator_prompt_mass(const generator_keep *k, int64_t layer, int64_t head);

/* Of a head of a slot: the masses [room + 1] of its rows on the host, and their positions [room]. */
float *generator_kept_mass(const generator_keep *k, int64_t layer, int64_t slot, int64_t head);
int32_t *generator_kept_positions(const kept_layer *y, int64_t slot, int64_t head);

/* ---- generate_encode.c ---- */

lm_code generator_encode_open(lm_generator *g, lm_err *e);
void generator_encode_close(lm_generator *g);
/* Store the prompt's rows at the first n positions of each head of the layer into the slot's pages. */
lm_code generator_encode_rows(lm_generator *g, int64_t slot, int64_t layer, int64_t n, lm_err *e);
/* Merge similar neighbours instead; *n: the tokens that are left, with their positions. */
lm_code generator_encode_merged(lm_generator *g, int64_t slot, int64_t layer, int64_t *n,
                                lm_err *e);

#endif
