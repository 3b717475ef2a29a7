/* SPDX-License-Identifier: Apache-2.0 */
/* peanut.c -- the change as a small network applied to W itself: h = f(W^T A^T), then `depth`
 * encoders and as many decoders, h <- f(h E^T), h <- f(h D^T) + the h that its encoder took, and
 * W' = W + scaling B h^T. A [r,out], E, D [r,r], B [out,r].  Sources: arXiv:2410.01870;
 * huggingface/peft tuners/peanut. */
#include <math.h>
#include <stdio.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 32, 1, 1e6, "width of the network", LM_WHOLE },
    { "depth", 0, 0, 30, "encoders, and decoders", LM_WHOLE },
    { "scaling", 1, -1e9, 1e9, "scale", NULL },
    { "act_fn", 0, 0, 3, "function between the layers", "relu silu sigmoid tanh" },
    { 0 },
};
enum { R, DEPTH, SCALE, FUNCTION };
enum { A, B, MORE };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];
    char name[48];

    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "peanut_A.weight", r, m->out, LM_TUNE_UNIFORM,
                       1 / sqrt((double)m->out));
    lm_tune_tensor_add(out, n, "peanut_B.weight", m->out, r, LM_TUNE_ZEROS, 0);
    for (int i = 0; i < 2 * (int)m->hyper[DEPTH]; i++) {
        snprintf(name, sizeof name, "peanut_%s.%d.weight", i % 2 ? "decoders" : "encoders", i / 2);
        lm_tune_tensor_add(out, n, name, r, r, LM_TUNE_UNIFORM, 1 / sqrt((double)r));
    }
    return LM_OK;
}

static lm_vid function(lm_rule *r, const lm_tune_module *m, lm_vid x)
{
    static const char *const text[] = { "y = max(x, 0)", "y = x / " LM_SIGMOID_DIVISOR("x"),
                                        "y = 1 / " LM_SIGMOID_DIVISOR("x"), "y = tanh(x)" };

    return LM_R_MAP(r, text[(int)m->hyper[FUNCTION]], LM_IS("x", x));
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int depth = (int)m->hyper[DEPTH];
    lm_vid kept[32], h = function(r, m, lm_r_matmul(r, w, true, p[A], true));

    for (int i = 0; i < depth; i++) {
        kept[i] = h;
        h = function(r, m, lm_r_matmul(r, h, false, p[MORE + 2 * i], true));
    }
    for (int i = 0; i < depth; i++)
        h = lm_r_add(r, function(r, m, lm_r_matmul(r, h, false, p[MORE + 2 * i + 1], true)), 1,
                     kept[depth - 1 - i]);
    return lm_r_add(r, w, m->hyper[SCALE], lm_r_matmul(r, p[B], false, h, true));
}

const lm_tune_method lm_tune_peanut = {
    .peft_type = "PEANUT",
    .name = "peanut",
    .about = "a small network applied to the weights",
    .prefix = "peanut_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
