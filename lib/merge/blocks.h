/* SPDX-License-Identifier: Apache-2.0 */
/* blocks.h -- shared by the merge methods: blocks of a tensor, sums over it, and weighted sums of
 * models into the output.
 *
 * A tensor is divided into chunks of LM_MERGE_CHUNK elements for any number of threads; a worker
 * processes a chunk block by block in its own `cells`, rows of LM_MERGE_STRIDE reals.  Sums are
 * kept for each chunk and added in their order.  Private to lib/merge. */
#ifndef LM_MERGE_BLOCKS_H
#define LM_MERGE_BLOCKS_H

#include "kernels/blend.h"
#include "merge/method.h"

enum {
    LM_MERGE_CHUNK = 64 * LM_BLEND_BLOCK,
    /* of rows of cells: not a power of two, so that the same column of each row does not fall into
     * the same set of a cache */
    LM_MERGE_STRIDE = LM_BLEND_BLOCK + 16,
    LM_MERGE_MOST_MODELS = LM_BLEND_MOST,
};

/* Float or double: double as soon as one input has more than 16 bits. */
bool lm_merge_wide(const lm_merge_job *j);
static inline const lm_blend *lm_merge_loops(const lm_merge_job *j)
{
    return lm_blend_at(j->cpu, lm_merge_wide(j));
}
static inline int64_t lm_merge_chunks(int64_t n)
{
    return (n + LM_MERGE_CHUNK - 1) / LM_MERGE_CHUNK;
}
/* The last dimension and the number of its rows; a scalar is one row of one. */
int64_t lm_merge_cols(const lm_merge_job *j);
int64_t lm_merge_rows(const lm_merge_job *j);

/* Scratch memory allocated in order, each piece on its own cache lines.  With at = NULL only the
 * size is counted, so the same function lays it out and returns its size. */
typedef struct {
    char *at;
    size_t used;
} lm_merge_scratch;
void *lm_merge_take(lm_merge_scratch *s, size_t n, size_t size);
/* `rows` rows of cells for each worker. */
void *lm_merge_take_cells(lm_merge_scratch *s, int rows, int threads);

typedef struct lm_merge_walk lm_merge_walk;
/* Elements at .. at + n - 1 (n <= LM_BLEND_BLOCK) in the cells of one worker; adds to sums. */
typedef void (*lm_merge_block)(const lm_merge_walk *w, int64_t at, int64_t n, void *cells,
                               double *sums);
struct lm_merge_walk {
    const lm_merge_job *job;
    const lm_blend *loops;
    const void *ctx;
    lm_merge_block block;
    void *cells; /* of all workers */
    int rows;    /* of cells of each */
    int n_sums;
    double *parts; /* [chunks, n_sums] */
};
/* Walk the tensor; sums [n_sums], unless NULL, get the totals. */
void lm_merge_go(const lm_merge_walk *w, double *sums);
/* Row r of a worker's cells. */
static inline void *lm_merge_cell(const lm_blend *b, void *cells, int r)
{
    return (char *)cells + (size_t)r * LM_MERGE_STRIDE * b->real;
}
static inline void *lm_merge_cells_of(void *cells, int rows, int worker)
{
    return (char *)cells + (size_t)worker * (size_t)rows * LM_MERGE_STRIDE * sizeof(double);
}

/* A model's own bits if the type is the same, otherwise one rounding. */
void lm_merge_copy(const lm_merge_job *j, const lm_merge_operand *from);

/* out = sum c_i x_i, or base + sum c_i (x_i - base), over n operands; those with c_i = 0 are left
 * out.  One operand alone with c = 1 is copied.  Scratch: lm_merge_sum_work. */
typedef struct {
    const lm_merge_operand *const *of; /* [n] */
    int n;
    const double *c; /* [n] */
    const lm_merge_operand *base;
} lm_merge_sum;
size_t lm_merge_sum_work(int threads);
void lm_merge_sum_run(const lm_merge_job *j, const lm_merge_sum *s, void *work);
/* Elements at .. at + n - 1 of it; two rows of cells. */
void lm_merge_sum_block(const lm_merge_job *j, const lm_blend *b, const lm_merge_sum *s, int64_t at,
                        int64_t n, void *cells);

/* The models as a list of n pointers. */
void lm_merge_list(const lm_merge_job *j, const lm_merge_operand **of);
/* Parameter p of model i, or `none` when it was not given. */
static inline double lm_merge_of(const lm_merge_job *j, int i, lm_merge_param p, double none)
{
    double v = j->model[i].param[p];
    return v == v ? v : none;
}
/* True if the sum of weights is only rounding error (0.1 + 0.2 - 0.3). */
bool lm_merge_cancels(const double *w, int n);
static inline bool lm_merge_true(const lm_merge_job *j, lm_merge_param p)
{
    return j->param[p] == j->param[p] && j->param[p] != 0;
}

#endif
