/* SPDX-License-Identifier: Apache-2.0 */
/* formula.h -- elementwise arithmetic as text, compiled to the program of a `map` node.
 *
 *     m = beta1*m + (1 - beta1)*g;
 *     v = beta2*v + (1 - beta2)*g*g;
 *     p = p - lr*(m/bc1) / (sqrt(v/bc2) + eps)
 *
 * Statements end with `;` or the end of the text.  A statement gives a name a value: a tensor that is an
 * operand of the formula (it is written; from there on the name is the new value), a new tensor that
 * the caller asks for, or a name of the formula's own.  Operators: + - * / < (1 or 0), signs and brackets;
 * functions sqrt, abs, sign, round, min, max, exp, log, sin, cos, tanh, erf, where(condition, then, else).  Names: operands
 * (in the shape of the result, rows [R,1] or columns [1,C] of it, or one number), constants, numbers of the step.  A matrix
 * [1,1] that is not F64 is a column of one row, not one number.
 *
 * What depends on single numbers alone is computed once a call, in double; so (1 - beta2) is exact
 * where F32 would lose digits. */
#ifndef LM_OP_FORMULA_H
#define LM_OP_FORMULA_H

#include "graph/graph.h"
#include "kernels/map.h"

/* Text of 1 + exp(-x), which divides for a sigmoid.  Bounded, because the gradient of a quotient by infinity is not a
 * number; NaN stays NaN, as min takes the second one. */
#define LM_SIGMOID_DIVISOR(x) "(1 + exp(min(40, -" x ")))"

typedef struct {
    const char *name;
    int x; /* the operand's number in `map` */
    const lm_tensor *shape;
} lm_formula_operand;

typedef struct {
    const char *name;
    double value;
} lm_formula_constant;

typedef struct {
    const char *text;
    const lm_formula_operand *operand;
    int n_operands;
    const lm_formula_constant *constant;
    int n_constants;
    const char *const *number; /* names of the step's numbers, in order */
    int n_numbers;
    const char *const *result; /* the names whose values y0, y1, ... are */
    int n_results;
} lm_formula;

/* The attributes of a `map` node for the formula; operands without a place in the text are left alone.
 * Fails: LM_EBUG naming the place in the text (formulas are part of the program, not input). */
lm_code lm_formula_compile(const lm_formula *f, lm_map_attr *out, lm_err *e);

/* The formula of the gradients of another's results, by the rules of differentiation; of sign, round and comparisons
 * it is 0, of min, max and abs at a tie that of the second number, or 0.  p: the program; seeds: bit k where the gradient of
 * y_k is given; x[i], i < n: the operands whose gradients become y0, y1, ... of the result, each with as many elements
 * as a result of p has, so that one of fewer is their sum over where it repeats.
 * source[i]: what operand x_i of the new program is: operand source[i] of p, or LM_MAP_X + k for the gradient of y_k; -1
 * past the last.  Fails: LM_EBUG when the result is too long for a program. */
lm_code lm_formula_gradient(const lm_map_program *p, unsigned seeds, const int *x, int n,
                            lm_map_attr *out, int source[LM_MAP_X], lm_err *e);

/* Whether the text has the name: 0 no, 1 in expressions, 2 a statement gives it a value. */
int lm_formula_mentions(const char *text, const char *name);

/* A name of a formula that is appended to a graph. */
typedef struct {
    const char *name;
    lm_vid value; /* an operand; LM_NONE: one of the following */
    lm_vid *made; /* a new activation of the shape of the result, in F32 or `made_type` */
    lm_dtype made_type;
    double constant;
} lm_formula_name;
#define LM_IS(name, vid)                      \
    {                                         \
        (name), (vid), NULL, LM_DTYPE_NONE, 0 \
    }
#define LM_CONSTANT(name, x)                      \
    {                                             \
        (name), LM_NONE, NULL, LM_DTYPE_NONE, (x) \
    }
#define LM_MAKES(name, vid)                     \
    {                                           \
        (name), LM_NONE, (vid), LM_DTYPE_F32, 0 \
    }
#define LM_MAKES_AS(name, vid, t)      \
    {                                  \
        (name), LM_NONE, (vid), (t), 0 \
    }

/* Append the formula as one node.  Names that the text does not mention are allowed.  The result has the
 * shape of the largest operand.  number: names of the entries of `numbers`; gate and numbers may be
 * LM_NONE.  Fails: LM_EBUG as above; for memory. */
typedef struct {
    const lm_formula_name *name;
    int n_names;
    const char *const *number;
    int n_numbers;
    lm_vid numbers, gate;
} lm_formula_scope;
lm_code lm_formula_append(lm_graph *g, const char *text, const lm_formula_scope *scope, lm_err *e);

#endif
