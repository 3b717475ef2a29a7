/* SPDX-License-Identifier: Apache-2.0 */
/* weights.h -- a model's parameters as one flat block: initialised, loaded from a model folder,
 * written back.
 *
 * The block holds every parameter of lm_model.param at its offset, in F32 (the master copy).  What
 * runs in BF16 reads a second block of the same offsets in BF16. */
#ifndef LM_MODEL_WEIGHTS_H
#define LM_MODEL_WEIGHTS_H

#include "base/par.h"
#include "format/folder.h"
#include "graph/exec.h"
#include "model/model.h"

/* Fresh weights from (seed, tensor name, element index): the same for any thread count or layout.
 */
void lm_weights_init(const lm_model *m, uint64_t seed, lm_par *par, float *block);

/* The source holds exactly the tensors of the model, in their shapes?  LM_EFORMAT as below. */
lm_code lm_weights_check(const lm_model *m, const lm_model_source *src, lm_err *e);
/* Load every slice from the source, converting to F32; a stream is read to its end.  Fails:
 * LM_EFORMAT when a tensor is missing, has another shape, or is unknown to the architecture
 * (named). */
lm_code lm_weights_load(const lm_model *m, lm_model_source *src, lm_par *par, float *block,
                        lm_err *e);
/* The same into a block in memory of `b`: on a device slice by slice, and no more than the largest
 * is ever on the host. */
lm_code lm_weights_load_on(const lm_model *m, lm_model_source *src, lm_backend *b, float *block,
                           lm_err *e);

/* Add all slices to a plan (in `dtype`, sorted by the plan's owner), and write slice t (as the
 * folder expects it next) from the block. */
lm_code lm_weights_plan(const lm_model *m, lm_dtype dtype, lm_st_plan *plan, lm_err *e);
lm_code lm_weights_write(const lm_model *m, const float *block, lm_folder *f, lm_err *e);

/* The flat layout for other arrays of the same shape as the parameters (optimiser states): elements
 * of slice i copied out of / into a block, in the file's shape. dst/src: slice elements in F32. */
void lm_slice_get(const lm_model *m, int i, const float *block, float *dst);
void lm_slice_put(const lm_model *m, int i, const float *src, float *block);
/* The first element of slice i in the block, and its elements in the block's order. */
int64_t lm_slice_offset(const lm_model *m, int i);
void lm_slice_turn(const lm_model *m, int i, const float *src, float *dst);
/* Slice i where it lies in the block, when it lies there in the file's shape; else NULL. */
float *lm_slice_view(const lm_model *m, int i, float *block);

/* Round the block to BF16 (n elements) on the pool. */
void lm_weights_round(const lm_model *m, const float *block, uint16_t *low, lm_par *par);
void lm_round_bf16(const float *src, uint16_t *dst, int64_t n, lm_par *par);
/* Both blocks in memory of `b`, where it is done: on its main stream. */
void lm_weights_round_on(const lm_model *m, lm_backend *b, const float *block, uint16_t *low);

/* A rotary table in memory of a backend (borrowed), filled on the host and copied there once; data
 * is NULL for a model that has none. */
typedef struct {
    lm_backend *b;
    float *data;
    size_t bytes;
} lm_rotary;
lm_code lm_rotary_new(const lm_model *m, lm_backend *b, lm_rotary *out, lm_err *e);
void lm_rotary_bind(const lm_rotary *r, const lm_model *m, lm_exec *x);
void lm_rotary_fini(lm_rotary *r);

/* Bind every PARAM of an executor: weights to `low` when it is not NULL, else to `block`, both in
 * memory of its backend.  `rope` (rope_rows * head_dim floats of the host): the rotary table is
 * filled there and bound; NULL: the model has none, or lm_rotary_bind does it. */
void lm_weights_bind(const lm_model *m, lm_exec *x, const float *block, const uint16_t *low,
                     float *rope);

#endif
