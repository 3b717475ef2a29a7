/* SPDX-License-Identifier: Apache-2.0 */
/* rule.h -- what a method of adaptation appends to: arithmetic on matrices as nodes of a graph.
 *
 * A rule reads as its equation: each function appends one node and returns its value.  The first
 * failure is kept in *e; every later call does nothing and returns LM_NONE, as in lm_builder.  An
 * absent operand (LM_NONE) of a call that needs it is such a failure.  All numbers are F32; the
 * precision pass retypes them (F64 for merging).  Shapes are row-major. */
#ifndef LM_TUNE_RULE_H
#define LM_TUNE_RULE_H

#include "graph/graph.h"
#include "op/formula.h"

/* A CONST value that a rule made, and its numbers (F64, or I32 for `ids`), which live in the
 * rule's arena: the caller that runs the graph copies them to the value's memory in the value's
 * type. */
typedef struct {
    lm_vid value;
    const double *number;
    const int32_t *id;
    int64_t count;
} lm_rule_const;

typedef struct {
    lm_graph *g;
    lm_arena *arena; /* of the graph's owner */
    lm_err *e;
    lm_rule_const *made; /* lm_free by lm_rule_fini */
    size_t n_made, cap_made;
    void **shared; /* where rules of one graph keep values for each other; NULL: they do not */
} lm_rule;

/* A value that a rule of the same graph has kept by this key; LM_NONE: none has. */
lm_vid lm_r_kept(const lm_rule *r, const char *key);
/* Keep it: constants that modules of one shape have in common are made once.  Returns v. */
lm_vid lm_r_keep(lm_rule *r, const char *key, lm_vid v);

void lm_rule_fini(lm_rule *r);
bool lm_r_ok(const lm_rule *r);
/* Copy the constants that the rule made to memory at `data(ctx, value)`, in the types of their
 * values. */
void lm_rule_fill(const lm_rule *r, void *(*data)(void *ctx, lm_vid v), void *ctx);

int64_t lm_r_dim(const lm_rule *r, lm_vid v,
                 int i); /* dimension i of v; from the end when negative; 0 after a failure */

/* c = op(a) op(b), op: transposed where the flag says so; matrices, or batches [B,..] of them; a
 * batch of 1 is repeated. */
lm_vid lm_r_matmul(lm_rule *r, lm_vid a, bool turn_a, lm_vid b, bool turn_b);
/* The numbers of v in another shape, of as many numbers. */
lm_vid lm_r_reshape(lm_rule *r, lm_vid v, int ndim, const int64_t *dim);
lm_vid lm_r_shape2(lm_rule *r, lm_vid v, int64_t rows, int64_t cols);
/* v, through which no gradient flows. */
lm_vid lm_r_stop(lm_rule *r, lm_vid v);
/* v seen as `dim`, its dimensions in the order perm (result dimension i is dimension perm[i]), as
 * a tensor of the shape `to` (NULL: the permuted one).  Up to 6 dimensions. */
lm_vid lm_r_permute(lm_rule *r, lm_vid v, int ndim, const int64_t *dim, const int *perm,
                    int to_ndim, const int64_t *to);
lm_vid lm_r_turn(lm_rule *r, lm_vid v); /* a matrix transposed, or each of a batch */
/* y of a formula (lib/op/formula.h) over these names; operands in the shape of the largest, or
 * [R,1], [1,C], [1,1]. */
lm_vid lm_r_map(lm_rule *r, const char *text, const lm_formula_name *names, int n);
#define LM_R_MAP(r, text, ...)                                      \
    lm_r_map((r), (text), (const lm_formula_name[]){ __VA_ARGS__ }, \
             (int)(sizeof((const lm_formula_name[]){ __VA_ARGS__ }) / sizeof(lm_formula_name)))
/* The sum, or the sum of squares, of each row [R,1], or of each column [1,C], of a matrix. */
lm_vid lm_r_sum(lm_rule *r, lm_vid v, bool squares, bool of_columns);
lm_vid lm_r_row_max(lm_rule *r, lm_vid v); /* of each row, [R,1]; takes no gradient */
/* Inverses of matrices [B,n,n]. */
lm_vid lm_r_inverse(lm_rule *r, lm_vid v);
/* A tensor of the shape dim whose element i is the element ids[i] of v, counted over all of it;
 * -1: 0. */
lm_vid lm_r_gather(lm_rule *r, lm_vid v, const int32_t *ids, int ndim, const int64_t *dim);
/* The same by a value of lm_r_ids, whose numbers are in the rule's arena. */
lm_vid lm_r_ids(lm_rule *r, const int32_t *ids, int ndim, const int64_t *dim);
lm_vid lm_r_gather_by(lm_rule *r, lm_vid v, lm_vid ids);
/* A tensor of the shape dim in which number k of v is at place at[k], counted over all of it, and
 * the rest is 0.  Fails: LM_EFORMAT for a place outside, and for one that is named twice. */
lm_vid lm_r_scatter(lm_rule *r, lm_vid v, const int64_t *at, int ndim, const int64_t *dim);
/* The columns ids[0 .. n) of a matrix; ids lives as long as the graph. */
lm_vid lm_r_columns(lm_rule *r, lm_vid v, const int32_t *ids, int64_t n);
/* Two matrices of as many rows side by side. */
lm_vid lm_r_join(lm_rule *r, lm_vid a, lm_vid b);
/* Rows [row, row + rows) and columns [col, col + cols) of a matrix. */
lm_vid lm_r_part(lm_rule *r, lm_vid v, int64_t row, int64_t rows, int64_t col, int64_t cols);
/* Numbers that do not train, given as doubles, which are copied. */
lm_vid lm_r_const(lm_rule *r, int ndim, const int64_t *dim, const double *numbers);

/* The constant [n, n times] of which a product with rows repeats their n numbers. */
lm_vid lm_r_repeat(lm_rule *r, int64_t n, int64_t times);
/* The constant [n times, n] of which a product repeats n rows, each one in turn `times` (inner),
 * or all of them. */
lm_vid lm_r_spread(lm_rule *r, int64_t n, int64_t times, bool inner);

/* Dimensions for these calls. */
#define LM_DIMS(...) \
    (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / 8), ((const int64_t[]){ __VA_ARGS__ })

/* R = (1 - q)(1 + q)^-1 of skew matrices q [B,n,n] (Cayley's), or of `terms` terms of its series:
 * 1 + 2q + 2q^2 + ... with the last one single; terms 0: exact. */
lm_vid lm_r_cayley(lm_rule *r, lm_vid q, int terms);
/* Skew matrices [B,n,n] of their entries above the diagonal [B,n(n-1)/2], row by row. */
lm_vid lm_r_skew(lm_rule *r, lm_vid upper, int64_t n);
/* w R^T, R of blocks [B,n,n] along the diagonal, B n columns; one block: for all. */
lm_vid lm_r_blocks(lm_rule *r, lm_vid w, lm_vid blocks);

/* w + s d, the end of most rules. */
lm_vid lm_r_add(lm_rule *r, lm_vid w, double s, lm_vid d);
lm_vid lm_r_scale(lm_rule *r, double s, lm_vid v);

#endif
