/* SPDX-License-Identifier: Apache-2.0 */
/* rule.h -- what optimisers' files are written with: formulas over a tensor and its states, products, sums.
 * Private to lib/train.
 *
 * A formula (op/formula.h) knows these names by itself:
 *   p       the parameter; writing it writes the copy in BF16, too
 *   g       the gradient, clipped by norm and by value
 *   scale   the factor of clipping by norm
 *   weight_decay   that of the table, 0 for tensors without decay
 *   every other hyper-parameter, and every number of the step (lm_optim.number)
 * and nothing is written in a step whose norm or loss is not finite. */
#ifndef LM_TRAIN_OPTIM_RULE_H
#define LM_TRAIN_OPTIM_RULE_H

#include "kernels/codes.h"
#include "kernels/map.h"
#include "op/formula.h"
#include "train/optim/optims.h"

/* Append a formula; names: those of states and activations, ended by one without name; NULL: none.
 *     lm_rule(u, t, "m = beta1*m + (1 - beta1)*g", NAMES(LM_IS("m", m)), e) */
lm_code lm_rule(lm_update *u, const lm_update_tensor *t, const char *text,
                const lm_formula_name *names, lm_err *e);
#define NAMES(...)            \
    (const lm_formula_name[]) \
    {                         \
        __VA_ARGS__,          \
        {                     \
            .name = NULL      \
        }                     \
    }

/* States of t's shape, [rows,1] and [1,cols] of a matrix, or one number. */
lm_code lm_rule_state(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                      lm_err *e);
lm_code lm_rule_rows(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                     lm_err *e);
lm_code lm_rule_columns(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                        lm_err *e);
lm_code lm_rule_number(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                       lm_err *e);

/* A sum, or mean, or largest number of the elements of x, of its rows or of its columns (kernels/map.h). */
lm_code lm_rule_reduce(lm_update *u, lm_reduce_kind kind, lm_reduce_over over, bool mean, lm_vid x,
                       lm_vid *out, lm_err *e);

/* Products of matrices, activations or states: a b', a b, a' b (the last in F32 of factors of any type). */
lm_code lm_rule_abt(lm_update *u, lm_vid a, lm_vid b, lm_vid *out, lm_err *e);
lm_code lm_rule_ab(lm_update *u, lm_vid a, lm_vid b, lm_vid *out, lm_err *e);
lm_code lm_rule_atb(lm_update *u, lm_vid a, lm_vid b, lm_vid *out, lm_err *e);

/* u becomes the nearest orthonormal matrix of [rows,cols], near enough for steps: `steps` rounds of
 * X = a X + (b A + c A A) X with A = X X', of X = u / |u|, with the coefficients of Muon, or (polar) of the
 * Polar Express; in bf16 or f32. */
typedef struct {
    int steps;
    bool polar, bf16;
} lm_orthogonal;
lm_code lm_rule_orthogonal(lm_update *u, const lm_update_tensor *t, const lm_orthogonal *o,
                           lm_vid x, lm_vid *out, lm_err *e);

/* q of x by an operator of factor.h, without its optional operands. */
lm_code lm_rule_basis(lm_update *u, const lm_op *op, const void *attr, lm_vid x, lm_vid *out,
                      lm_err *e);

/* Is t a matrix inside a layer: what rules for whole matrices serve? */
bool lm_rule_is_hidden(const lm_update_tensor *t);
/* How many matrices a tensor holds (q, k and v in one: 3), one of them as a tensor, and part k of a state that
 * holds as many of `shape` end to end. */
int lm_rule_n_pieces(const lm_update_tensor *t);
lm_code lm_rule_piece(lm_update *u, const lm_update_tensor *t, int k, lm_update_tensor *out,
                      lm_err *e);
lm_code lm_rule_part(lm_update *u, lm_vid state, int k, lm_tensor shape, lm_vid *out, lm_err *e);
/* The step of AdamW for the tensors that such a rule does not serve, with its own hyper-parameters, which the
 * table begins with, and numbers lm_rule_bias.  rate: its learning rate as a multiple of lr. */
lm_code lm_rule_adamw(lm_update *u, const lm_update_tensor *t, double rate, lm_err *e);
#define ADAMW_FOR_OTHERS                                                               \
    { "adam_beta1", 0.9, 0, 0.9999999, "of AdamW for all but hidden matrices", NULL }, \
        { "adam_beta2", 0.95, 0, 0.9999999, "likewise", NULL },                        \
        { "adam_eps", 1e-8, 0, 1, "likewise", NULL },                                  \
    {                                                                                  \
        "adam_rate", 0, 0, 1000, "its rate beside lr; 0: as the scaling asks", NULL    \
    }

/* average.c: the nodes of t's average, whatever its rule is (lm_optim_use.ema); and how much of it step t (from 0)
 * keeps, which is the number behind those of the rule. */
lm_code lm_rule_average(lm_update *u, const lm_update_tensor *t, lm_err *e);
double lm_rule_average_keeps(double ema, int64_t t);

/* A state of `shape` in codes with scales (kernels/codes.h): as states name[0] U8, name[1] scales and, of affine
 * formats, name[2] zero points; read to an activation, and written of one. */
typedef struct {
    lm_codes_format format;
    lm_tensor shape;
    lm_vid code, scale, zero;
} lm_rule_codes;
lm_code lm_rule_coded(lm_update *u, const lm_update_tensor *t, const char *const name[3],
                      lm_codes_format format, lm_tensor shape, lm_rule_codes *out, lm_err *e);
lm_code lm_rule_decode(lm_update *u, const lm_rule_codes *c, lm_vid *out, lm_err *e);

/* First and second moments of `shape`: states exp_avg and exp_avg_sq, or (coded) state1, absmax1, state2 and absmax2
 * of dynamic8, which are read to m and v before the step and written after it. */
typedef struct {
    lm_vid m, v;
    bool coded;
    lm_rule_codes first, second;
} lm_rule_moments;
lm_code lm_rule_moments_make(lm_update *u, const lm_update_tensor *t, lm_tensor shape, bool coded,
                             lm_rule_moments *out, lm_err *e);
/* Elements [at, at + n) of coded ones; `at` is a multiple of LM_CODES_BLOCK. */
lm_code lm_rule_moments_span(lm_update *u, const lm_rule_moments *all, int64_t at, int64_t n,
                             lm_rule_moments *out, lm_err *e);
lm_code lm_rule_moments_read(lm_update *u, lm_rule_moments *x, lm_err *e);
lm_code lm_rule_moments_write(lm_update *u, const lm_rule_moments *x, lm_err *e);

/* Numbers of a step for rules with beta1 and beta2 first in their tables: lr and the bias corrections
 * bc1 = 1 - beta1^t, bc2 = 1 - beta2^t. */
void lm_rule_bias(const double *h, double lr, int64_t t, double *out);
extern const char *const lm_rule_bias_names[]; /* lr, bc1, bc2 */
enum { LM_RULE_BIAS = 3 };

/* Hyper-parameters that many have. */
#define BETA_1(x)                                      \
    {                                                  \
        "beta1", x, 0, 0.9999999, "first moment", NULL \
    }
#define BETA_2(x)                                       \
    {                                                   \
        "beta2", x, 0, 0.9999999, "second moment", NULL \
    }
#define EPS(x)                                    \
    {                                             \
        "eps", x, 0, 1, "added to the root", NULL \
    }
#define DECAY(x)                                           \
    {                                                      \
        "weight_decay", x, 0, 10, "on matrices only", NULL \
    }

#endif
