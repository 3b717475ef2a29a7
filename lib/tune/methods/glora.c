/* SPDX-License-Identifier: Apache-2.0 */
/* glora.c -- W' = W + W o A + B; b' = b + b o D + E + W C.  A and B: low rank (Xd Xu), one number
 * for each output, or one number; C [in]: low rank, or a vector; D and E: a vector [out], or one
 * number.  C, D and E where the module has a bias. Sources: arXiv:2306.07967; huggingface/peft
 * tuners/glora. */
#include <math.h>
#include <stdio.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "rank", LM_WHOLE },
    { "config_A_B", 0, 0, 3, "form of A and B", "lora vector constant none" },
    { "config_C", 0, 0, 2, "form of C", "lora vector none" },
    { "config_D_E", 0, 0, 2, "form of D and E", "constant vector none" },
    { 0 },
};
enum { R, FORM_AB, FORM_C, FORM_DE };
enum { LORA, VECTOR, CONSTANT };
/* Each path has places for Xd, Xu, X, and for the zeros that peft saves where there is nothing. */
enum { XD, XU, X, ZEROS, PLACES };

static void add_path(lm_tune_tensor *out, int *n, char name, int64_t rows, int64_t cols, int64_t r,
                     int form, int64_t x_rows, int64_t x_cols, int64_t zero_cols)
{
    char text[32];
    lm_tune_tensor *t;

    snprintf(text, sizeof text, "glora_%c.Xd", name);
    lm_tune_tensor_add(out, n, text, rows, r, LM_TUNE_ZEROS, 0)->off = form != LORA;
    snprintf(text, sizeof text, "glora_%c.Xu", name);
    lm_tune_tensor_add(out, n, text, r, cols, LM_TUNE_UNIFORM, 1 / sqrt((double)cols))->off =
        form != LORA;
    snprintf(text, sizeof text, "glora_%c.X", name);
    lm_tune_tensor_add(out, n, text, x_rows, x_cols, LM_TUNE_ZEROS, 0)->off =
        form != VECTOR && form != CONSTANT;
    snprintf(text, sizeof text, "glora_%c.zeros", name);
    t = lm_tune_tensor_add(out, n, text, rows, zero_cols, LM_TUNE_ZEROS, 0);
    t->off = form >= 0 && form <= CONSTANT;
    t->absent = t->frozen = true;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];
    int ab = (int)m->hyper[FORM_AB];
    int c = !m->has_bias || m->hyper[FORM_C] == 2 ? -1 : (int)m->hyper[FORM_C];
    int de = !m->has_bias || m->hyper[FORM_DE] == 2 ? -1
             : m->hyper[FORM_DE] == 1               ? VECTOR
                                                    : CONSTANT;

    (void)e;
    *n = 0;
    for (char x = 'A'; x <= 'B'; x++)
        add_path(out, n, x, m->out, m->in, r, ab, ab == VECTOR ? m->out : 1, ab == VECTOR, m->in);
    add_path(out, n, 'C', m->in, 1, r, c, m->in, 1, 1);
    for (char x = 'D'; x <= 'E'; x++)
        add_path(out, n, x, m->out, 0, r, de, de == VECTOR ? m->out : 1, 0, 0);
    return LM_OK;
}

/* A path as a matrix; LM_NONE: there is none. */
static lm_vid path(lm_rule *r, const lm_vid *p, int64_t rows, int64_t cols)
{
    if (p[XD] >= 0)
        return lm_r_matmul(r, p[XD], false, p[XU], false);
    if (p[X] < 0)
        return LM_NONE;
    return lm_r_dim(r, p[X], 0) == 1 ? lm_r_shape2(r, p[X], 1, 1)
                                     : lm_r_shape2(r, p[X], rows, cols);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    lm_vid a = path(r, p, m->out, 1), b = path(r, p + PLACES, m->out, 1);

    return a < 0 ? w
                 : LM_R_MAP(r, "y = w + w * a + b", LM_IS("w", w), LM_IS("a", a), LM_IS("b", b));
}

static lm_vid bias(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p)
{
    lm_vid c = path(r, p + 2 * PLACES, m->in, 1), d = path(r, p + 3 * PLACES, 1, m->out),
           e = path(r, p + 4 * PLACES, 1, m->out);

    if (b < 0)
        return b;
    if (d >= 0)
        b = LM_R_MAP(r, "y = b + b * d + e", LM_IS("b", b), LM_IS("d", d), LM_IS("e", e));
    return c < 0 ? b : lm_r_add(r, b, 1, lm_r_turn(r, lm_r_matmul(r, w, false, c, false)));
}

const lm_tune_method lm_tune_glora = {
    .peft_type = "GLORA",
    .name = "glora",
    .about = "scales and additions of weights and biases",
    .prefix = "glora_",
    .is = LM_TUNE_MIXES,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .bias = bias,
};
