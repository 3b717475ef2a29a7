/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.h -- a model opened for use only: its config, and its weights in one format without a
 * master copy. */
#ifndef LM_MODEL_LOADED_H
#define LM_MODEL_LOADED_H

#include "model/adapt.h"
#include "model/store.h"

/* An adapter that is attached to the graphs of a model (model/adapt.h).  All borrowed, for the model's life. */
typedef struct {
    const lm_adapt *adapt;
    bool (*replaces)(void *ctx,
                     const char *tensor); /* tensors of the checkpoint that it brings its own of */
    void *ctx;
    const lm_st *tensors;
    /* that stand in front of each text: ids from the size of the vocabulary on */
    int64_t virtual_tokens;
    bool predicts; /* the last of them has a state, which predicts the first token of the text */
    /* Several adapters of which each row chooses one (lm_build.chosen): their number, and in place of `tensors` those of each,
     * which have the names "k:NAME" in the model, k from 1 on. */
    int joined;
    const lm_st *const *each;
} lm_loaded_adapter;

typedef struct {
    lm_model_source *src; /* NULL: the weights come from elsewhere */
    lm_config config;
    lm_par *par;          /* threads of the host that load (borrowed); NULL: the backend's */
    lm_space codes_space; /* for lm_build; set by lm_loaded_place */
    const lm_loaded_adapter *adapter; /* NULL: none */
    /* A store of the same model without adapter, whose weights are read where this model reads them likewise; it must
     * live longer.  NULL: none. */
    const lm_store *base;
    /* The ranks that share the weights, and the layouts (lm_build.mesh and lay, borrowed); NULL: this one has all. */
    const lm_mesh *mesh;
    lm_code (*lay)(const lm_build *b, lm_graph *g, lm_axis axis, lm_err *e);
    lm_store *store; /* NULL: not loaded yet */
} lm_loaded;

/* Open a model (folder.h; `o` may be NULL) and read its config; no weights yet.  Fails: LM_EIO,
 * LM_EFORMAT; LM_EUSAGE for a lone file without config.json, and as lm_config_read. */
lm_code lm_loaded_open(const char *path, const lm_bundle_opts *o, lm_loaded *out, lm_err *e);
/* The same for an open source, which the model then owns, whatever the result. */
lm_code lm_loaded_take(lm_model_source *src, lm_loaded *out, lm_err *e);
/* Decide whether weights in fewer bytes than numbers of `precision` are read in the mapped file
 * (lm_build.codes_space): as asked, or for LM_PLACE_AUTO if the weights take more than `available`
 * bytes and some can be read there; *moved then is true.  Reading in a file costs nothing at start
 * and no memory of its own, but its pages are 4 KiB: decoding takes about 15 % longer.
 * Fails: LM_EUSAGE when the file is asked for, and no weight can be read there. */
typedef enum { LM_PLACE_AUTO, LM_PLACE_MEMORY, LM_PLACE_FILE } lm_place;
lm_code lm_loaded_place(lm_loaded *l, lm_place asked, lm_dtype precision, const lm_backend *b,
                        size_t available, bool *moved, lm_err *e);
/* What the weights mean for a graph of this model: codes, codes_space, adapt, trainable, ctx, mesh and lay of *b. */
void lm_loaded_build(const lm_loaded *l, lm_build *b);
/* Load the weights for `m`, a model of this config in any mode, whose precision determines the
 * formats, to memory of `b`, which must outlive them; a stream is read to its end.  Fails as
 * lm_store_load does. */
lm_code lm_loaded_weights(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e);
/* The formats of the weights in memory, "weights: q4_k 3.2 GiB, f32 1.1 MiB", then the bytes of those
 * that are read in the file, then the source's formats that were decoded when loaded although they
 * take fewer bytes, because the backend has no kernels for them.  To be called directly after
 * lm_loaded_weights; NULL if it was not. */
enum { LM_LOADED_TEXT = 1024 };
const char *lm_loaded_text(const lm_loaded *l, char out[LM_LOADED_TEXT]);
/* Bytes of the weights of `m`. */
size_t lm_loaded_bytes(const lm_model *m);
/* Called before the backend is closed. */
void lm_loaded_fini(lm_loaded *l);

#endif
