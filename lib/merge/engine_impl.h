/* SPDX-License-Identifier: Apache-2.0 */
/* engine_impl.h -- shared by the parts of the engine.  Private to lib/merge. */
#ifndef LM_MERGE_ENGINE_IMPL_H
#define LM_MERGE_ENGINE_IMPL_H

#include "merge/engine.h"

/* A reused buffer; a larger one replaces it. */
typedef struct {
    void *data;
    size_t bytes;
} lm_merge_buf;

/* Buffers of one operand. */
typedef struct {
    const void *data;
    lm_dtype dtype;
    lm_merge_buf read, made; /* bytes that no source maps; the result of a LoRA or a vocabulary */
    lm_merge_buf next;       /* output of the vocabulary */
} lm_merge_held;

struct lm_merge_engine {
    const lm_merge_plan *plan;
    lm_par *par;
    lm_cpu_level cpu;
    lm_sink *sink;
    lm_merge_held *held; /* [n_held]: base, then models */
    int n_held;
    lm_merge_operand *operand; /* [n_held] */
    lm_vocab_table *table;     /* [inputs] */
    size_t *met;               /* [inputs]: number of tensors that a stream has returned */
    lm_merge_buf work;
};

lm_code lm_merge_buf_need(lm_merge_buf *b, size_t bytes, lm_err *e);
void lm_merge_buf_fini(lm_merge_buf *b);

/* The bytes of a ref for the merge (with LoRA tensors that replace it, without added ones),
 * borrowed or read into `read`. */
lm_code lm_engine_fetch(lm_merge_engine *g, const lm_merge_ref *ref, lm_merge_buf *read,
                        const void **data, lm_err *e);

/* Fetch and prepare the operands of tensor t, which is not copied ... */
lm_code lm_engine_hold(lm_merge_engine *g, const lm_merge_tensor *t, lm_err *e);
/* ... merge elements [at, at + n) into out; all of them unless the method works by pieces ... */
lm_code lm_engine_part(lm_merge_engine *g, const lm_merge_tensor *t, int64_t at, int64_t n,
                       const double *weight, lm_dtype dtype, void *out, lm_err *e);
/* ... and release them, also after a failure. */
void lm_engine_release(lm_merge_engine *g, const lm_merge_tensor *t);

#endif
