/* SPDX-License-Identifier: Apache-2.0 */
/* map.h -- a formula over the elements of tensors, and sums and maxima over their parts, for the rules of
 * optimisers (lib/op/formula.h makes the programs).
 *
 * map     in  gate [1] F64 (optional), numbers [K] F64 (optional), x0 .. x11 of any float dtype, each
 *             of the shape of y0, or one number, or, where y0 is [R,C], [R,1] or [1,C] (repeated)
 *         out y0 .. y5, all of one shape, of any float dtype; may alias an x of that shape
 *         A program: first steps over single numbers (constants, `numbers`, operands of one number), in
 *         double, once a call; then steps over the elements, in F32 (reference: in double), each rounded.
 *         All x are read before a y is written at that place.  gate NaN: nothing is written.
 *         Differentiable in the x (lib/op/formula_gradient.c).
 *         min and max take the second number when one is NaN; a NaN is not less, nor different from 0.
 *
 * reduce  in  x [N,C] (or, over all, of any shape) of any float dtype
 *         out y F32: over `all` [1]; over each `row` [N,1]; over each `column` [1,C]; over each `block` of
 *             attr.rows rows [N/rows,1]
 *         sum, sum of squares, maximum, maximum of magnitudes; `mean`: the sum divided by the number of
 *         its terms.  Sums in double over fixed pieces, added in order: the same bits for any number of
 *         threads.  A number that is not finite makes a maximum NaN.
 *
 * Tolerance: relative L2 1e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_MAP_H
#define LM_KERNELS_MAP_H

#include "kernels/kernel.h"

enum {
    LM_MAP_X = 12,       /* operands x */
    LM_MAP_Y = 6,        /* operands y */
    LM_MAP_FIRST_X = 2,  /* number of x0 among the inputs */
    LM_MAP_STEPS = 64,   /* of both kinds */
    LM_MAP_SINGLES = 64, /* single numbers */
    LM_MAP_CONSTANTS = 24,
    LM_MAP_TILES = 16,    /* registers of elements */
    LM_MAP_SINGLE = 0x80, /* bit of an operand of a step: a single number, not a register */
};

typedef enum {
    LM_MAP_LOAD, /* the elements of x `a` */
    LM_MAP_MOVE, /* a */
    LM_MAP_NEG,
    LM_MAP_ABS,
    LM_MAP_SQRT,
    LM_MAP_ROUND, /* to the nearest whole number, ties to even */
    LM_MAP_ADD,   /* a + b, and so on */
    LM_MAP_SUB,
    LM_MAP_MUL,
    LM_MAP_DIV,
    LM_MAP_MIN,
    LM_MAP_MAX,
    LM_MAP_LESS,  /* a < b: 1, else 0 */
    LM_MAP_WHERE, /* |a| > 0: b, else c */
    LM_MAP_EXP,   /* natural */
    LM_MAP_LOG,
    LM_MAP_SIN, /* of radians */
    LM_MAP_COS,
    LM_MAP_TANH,
    LM_MAP_ERF, /* 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to a */
} lm_map_code;

typedef struct {
    uint8_t code, to, a, b, c; /* registers, or LM_MAP_SINGLE + number of a single number */
} lm_map_step;

/* A value of `single` to begin with; the constants' come first. */
typedef enum { LM_MAP_NUMBER, LM_MAP_OPERAND } lm_map_origin;
typedef struct {
    uint8_t origin, at, to; /* numbers[at] or x[at] [0] */
} lm_map_fetch;

typedef struct {
    /* n_single steps over single numbers, then the others */
    uint8_t n_constants, n_fetched, n_single, n_steps;
    uint8_t n_tiles;        /* registers in use */
    uint8_t from[LM_MAP_Y]; /* the result for each y, numbered like an operand of a step */
    /* 1 + the step whose result may be stored in y at once, because no later step reads the x that y may
     * alias; 0: store after all steps. */
    uint8_t direct[LM_MAP_Y];
    lm_map_fetch fetch[LM_MAP_SINGLES];
    lm_map_step step[LM_MAP_STEPS];
    double constant[LM_MAP_CONSTANTS];
} lm_map_program;

typedef struct {
    lm_map_program program;
    char text[480]; /* the formula, for dumps */
} lm_map_attr;

typedef enum { LM_REDUCE_SUM, LM_REDUCE_SQUARES, LM_REDUCE_MAX, LM_REDUCE_ABS_MAX } lm_reduce_kind;
typedef enum { LM_OVER_ALL, LM_OVER_ROW, LM_OVER_COLUMN, LM_OVER_BLOCK } lm_reduce_over;

typedef struct {
    lm_reduce_kind kind;
    lm_reduce_over over;
    int64_t rows; /* of a block */
    bool mean;    /* of sums */
} lm_reduce_attr;

/* Of a call on the host: whether the gate lets it write; the single numbers, after their steps. */
bool lm_map_opens(const lm_call *c);
void lm_map_singles(const lm_call *c, double single[LM_MAP_SINGLES]);

/* The parts of a reduction: `parts` results, of `terms` numbers each. */
typedef struct {
    int64_t rows, cols, parts, terms;
} lm_reduce_sizes;
static inline lm_reduce_sizes lm_reduce_sizes_of(const lm_reduce_attr *a, const lm_tensor *x)
{
    int64_t rows = x->ndim ? x->dim[0] : 1, cols = lm_tensor_count(x) / rows;
    int64_t parts = a->over == LM_OVER_ROW      ? rows
                    : a->over == LM_OVER_COLUMN ? cols
                    : a->over == LM_OVER_BLOCK  ? rows / a->rows
                                                : 1;
    return (lm_reduce_sizes){ rows, cols, parts, rows * cols / parts };
}

#endif
