/* SPDX-License-Identifier: Apache-2.0 */
/* formula_impl.h -- a formula between its text and its program: steps whose results are values, each made once.
 * formula.c makes them of the text,
 * formula_gradient.c of another program, formula_program.c the program of them.  Private to lib/op. */
#ifndef LM_OP_FORMULA_IMPL_H
#define LM_OP_FORMULA_IMPL_H

#include "op/formula.h"

enum {
    NAMES = 48,
    WORD = 32,
    FORMULA_STEPS = 4 * LM_MAP_STEPS,
    FORMULA_SINGLES = 2 * LM_MAP_SINGLES
};

typedef struct {
    bool single;
    int at; /* number among the singles, or of the step */
} formula_value;

typedef struct {
    char name[WORD];
    formula_value v;
} formula_binding;

typedef struct {
    lm_map_code code;
    formula_value in[3];
    bool single;
} formula_step;

/* What a single number is before steps over them. */
typedef struct {
    enum { A_CONSTANT, A_NUMBER, AN_OPERAND, A_STEP } kind;
    double constant;
    int at;
} formula_single;

typedef struct {
    const lm_formula *f;
    const char *at;
    formula_binding bound[NAMES];
    int n_bound;
    formula_step step[FORMULA_STEPS];
    int n_steps;
    formula_single single[FORMULA_SINGLES];
    int n_single;
    lm_err *e;
} formula_compiler;

/* LM_EBUG with the place in the text, in c->e; the value stands for any. */
formula_value formula_fail(formula_compiler *c, const char *what);
/* The value of one operation, or of a single number that has no value yet. */
formula_value formula_emit(formula_compiler *c, lm_map_code code, formula_value a, formula_value b,
                           formula_value d);
formula_value formula_new_single(formula_compiler *c, formula_single s);
formula_value formula_constant(formula_compiler *c, double x);
/* Singles, registers and steps of the program, whose results are given. */
void formula_program(formula_compiler *c, const formula_value *result, lm_map_program *p);

#endif
