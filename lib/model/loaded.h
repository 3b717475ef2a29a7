/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.h -- a model opened for use only: config and weights in one type, no master copy beside
 * it.
 *
 * In BF16 the matrices are rounded on their way in, so that nothing but the BF16 block and the few
 * F32 vectors is ever in memory.  On a device they go there tensor by tensor, and the host never
 * holds more than the largest of them. */
#ifndef LM_MODEL_LOADED_H
#define LM_MODEL_LOADED_H

#include "base/par.h"
#include "format/folder.h"
#include "graph/exec.h"
#include "model/model.h"

typedef struct {
    lm_model_source *src;
    lm_config config;
    lm_dtype dtype; /* of the weights: F32 or BF16 */
    int64_t first;  /* `block` holds elements [first, end) of the parameter block */
    lm_backend *b;  /* whose memory the weights are in (borrowed) */
    float *block;   /* F32: everything; BF16: the vectors behind the matrices */
    uint16_t *low;  /* BF16: elements [0, first); else NULL */
    size_t block_bytes, low_bytes;
    void *stage; /* the tensor on its way to a device; NULL: none, or memory of the host */
    size_t stage_bytes;
} lm_loaded;

/* Open a model (folder.h; `o` may be NULL) and read its config; no weights yet.  Fails: LM_EIO,
 * LM_EFORMAT; LM_EUSAGE for a lone file without config.json. */
lm_code lm_loaded_open(const char *path, const lm_bundle_opts *o, lm_loaded *out, lm_err *e);
/* Load the weights for `m`, a model of this config in any mode, whose precision decides the type,
 * into memory of `b`, which must outlive them; a stream is read to its end.  Fails as
 * lm_weights_load does. */
lm_code lm_loaded_weights(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e);
/* The same from memory of the host instead of a file: `block` as lm_weights_init fills it. */
lm_code lm_loaded_take(lm_loaded *l, const lm_model *m, const float *block, lm_backend *b,
                       lm_err *e);
/* Room for the weights of `m` in memory of `b`; they come one by one: slice i of the model from
 * count elements of `dtype` in the file's shape (weights that are merged in memory).  No config is
 * taken. */
lm_code lm_loaded_room(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e);
lm_code lm_loaded_put(lm_loaded *l, const lm_model *m, int i, lm_dtype dtype, const void *data,
                      lm_par *par, lm_err *e);
/* Bytes that the weights of `m` take. */
size_t lm_loaded_bytes(const lm_model *m);
/* Bind the parameters of an executor on the same backend. */
void lm_loaded_bind(const lm_loaded *l, const lm_model *m, lm_exec *x);
/* Before the backend is closed. */
void lm_loaded_fini(lm_loaded *l);

#endif
