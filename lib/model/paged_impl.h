/* SPDX-License-Identifier: Apache-2.0 */
/* paged_impl.h -- shared by the files of a paged model: paged.c has the graphs and steps, paged_record.c runs
 * them, paged_choose.c chooses tokens.  Private to lib/model. */
#ifndef LM_MODEL_PAGED_IMPL_H
#define LM_MODEL_PAGED_IMPL_H

#include "graph/mirror.h"
#include "kernels/linear.h"
#include "model/cache_device.h"
#include "model/page_code.h"
#include "model/paged.h"
#include "model/rotary.h"

enum {
    FEWEST = 16, /* rows of a graph, and sequences: more than LM_GEMM_SMALL_M */
    MOST_BUCKETS = 32,
    INPUTS = 10
};
_Static_assert(FEWEST > LM_GEMM_SMALL_M, "a product of a graph has no few rows");

/* The graph of one number of rows, and its inputs: mirrors whose host side is written. */
typedef struct {
    int64_t rows;
    lm_model *m;
    lm_exec *x;
    lm_mirror inputs;
    int32_t *tokens, *pos, *used, *fresh, *first, *kind, *table, *last, *slot, *chosen;
    lm_recording *recorded;
    bool ran; /* once, without a recording */
} bucket;

/* A model by its number: its graphs, and what its rows choose in them. */
typedef struct {
    int64_t graphs;
    int32_t chosen;
} paged_number;

/* The graphs of a model. */
typedef struct {
    bucket bucket[MOST_BUCKETS]; /* the smallest first */
    lm_rotary rope;
} paged_graphs;

/* The choice of tokens: inputs and results of the kernel for each part. */
typedef struct {
    lm_mirror ask, answer, seen;
    double *u, *logprob;
    int32_t *on, *n_seen, *token;
    const lm_kernel *kernel;
    void *work;
    size_t work_bytes;
} paged_chooser;

struct lm_paged {
    lm_backend *b;
    lm_paged_opts o; /* kv: formats.plan */
    lm_cache_formats formats;
    lm_dtype dtype;
    int64_t sequences, width; /* of the graphs; pages of a sequence */
    paged_graphs **of;
    int64_t n_models; /* with graphs of their own */
    size_t cap_models;
    paged_number *number; /* of each model */
    size_t n_numbers, cap_numbers;
    int n_buckets; /* of each */
    char *pages;
    size_t bytes, *at;  /* of all pages; where each cache of the model begins */
    lm_page_code *code; /* NULL: none */
    paged_chooser choice;
    float *joined; /* [sequences,V]: logits of a step of several models; NULL: there is one */
    lm_paged_part *group; /* [sequences]: parts of a step that are of one model */
    float *logits;        /* of the last step, */
    int64_t n_parts;
    const lm_recording *replayed; /* by it */
    bool unrecorded;              /* no step is to be recorded */
    lm_err refused;
};

static inline const lm_model *paged_model(const lm_paged *g)
{
    return g->of[0]->bucket[g->n_buckets - 1].m;
}

/* Push the inputs of s and run its graph. */
lm_code paged_run(lm_paged *g, bucket *s, lm_err *e);
void paged_forget_recordings(lm_paged *g);
lm_code paged_make_chooser(lm_paged *g, lm_err *e);
void paged_drop_chooser(lm_paged *g);

#endif
