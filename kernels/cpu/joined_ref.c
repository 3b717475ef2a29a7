/* SPDX-License-Identifier: Apache-2.0 */
/* joined_ref.c -- the definition of the joined operators: the parts one after the other, with
 * results in double unless the contract rounds them. */
#include "kernels/attention.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

/* Run the reference of `op`, which needs no scratch, as a part of c. */
static void run_part(const lm_call *c, const char *op, const void *attr, const lm_tensor *in,
                     int n_in, lm_tensor *out, int n_out)
{
    lm_call part = *c;
    part.attr = attr;
    part.in = in;
    part.n_in = n_in;
    part.out = out;
    part.n_out = n_out;
    lm_cpu_kernel(op, LM_DTYPE_NONE, LM_CPU_REF)->run(&part);
}

/* Allocate a matrix in scratch and advance it. */
static lm_tensor scratch(char **at, lm_dtype d, int64_t rows, int64_t cols)
{
    lm_tensor t = { .dtype = d, .ndim = 2, .dim = { rows, cols }, .data = *at };
    *at += (size_t)(rows * cols) * sizeof(double);
    return t;
}

/* ---- linear_act ---- */

static size_t linear_act_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)lm_tensor_count(&c->out[0]) * sizeof(double);
}

static void linear_act(const lm_call *c)
{
    const lm_linear_act_attr *a = c->attr;
    const lm_gelu_attr gelu = { a->act == LM_ACT_GELU_EXACT };
    char *at = c->work;
    lm_tensor sum = scratch(&at, LM_DTYPE_F64, c->out[0].dim[0], c->out[0].dim[1]);

    run_part(c, "linear", NULL, c->in, c->n_in, &sum, 1);
    run_part(c, "gelu", &gelu, &sum, 1, &c->out[0], 1);
    if (opt_out(c, 1))
        run_part(c, "cast", NULL, &sum, 1, &c->out[1], 1);
}

static void linear_act_dx(const lm_call *c)
{
    const lm_linear_act_attr *a = c->attr;
    const lm_gelu_attr gelu = { a->act == LM_ACT_GELU_EXACT };
    char *at = c->work;
    lm_tensor in[2] = { scratch(&at, LM_DTYPE_F64, c->out[0].dim[0], c->out[0].dim[1]), c->in[2] };

    run_part(c, "linear_dx", NULL, c->in, 2, &in[0], 1);
    run_part(c, "gelu_dx", &gelu, in, 2, &c->out[0], 1);
}

/* ---- norm_linear ---- */

static size_t norm_linear_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)(c->in[0].dim[0] * (c->in[0].dim[1] + 2 + c->in[4].dim[0])) * sizeof(double);
}

static void norm_linear(const lm_call *c)
{
    const lm_norm_linear_attr *a = c->attr;
    const lm_norm_attr norm = { .kind = a->kind, .eps = a->eps, .plus_one = a->plus_one };
    const lm_gelu_attr gelu = { a->act == LM_ACT_GELU_EXACT };
    const char *const then[] = { "cast", "gelu", "gelu", "swiglu", "geglu" };
    int64_t rows = c->in[0].dim[0];
    char *at = c->work;
    lm_tensor out[3] = { scratch(&at, c->in[0].dtype, rows, c->in[0].dim[1]),
                         scratch(&at, LM_DTYPE_F64, rows, 2), c->out[1] };
    lm_tensor sum = scratch(&at, LM_DTYPE_F64, rows, c->in[4].dim[0]);

    run_part(c, "norm", &norm, c->in, 4, out, 3);
    run_part(c, "linear", NULL, (lm_tensor[]){ out[0], c->in[4], c->in[5] }, 3, &sum, 1);
    run_part(c, then[a->act], &gelu, &sum, 1, &c->out[0], 1);
}

/* ---- norm_dx_dw: ds may lie over dy, which dw reads ---- */

static void norm_dx_dw(const lm_call *c)
{
    run_part(c, "norm_dw", c->attr, (lm_tensor[]){ c->in[0], c->in[1], c->in[3] }, 3, &c->out[1],
             c->n_out - 1);
    run_part(c, "norm_dx", c->attr, c->in, c->n_in, &c->out[0], 1);
}

/* ---- attention_step ---- */

/* The row for attention, after norm and rotation, and its scratch. */
typedef struct {
    lm_tensor qkv, stat;
    lm_call attend; /* its scratch follows these */
} step_parts;

static step_parts parts_of(const lm_call *c)
{
    const lm_attention_step_attr *a = c->attr;
    char *at = c->work;
    step_parts p = { .attend = *c };

    p.qkv = scratch(&at, c->in[0].dtype, c->in[0].dim[0], c->in[0].dim[1]);
    p.stat =
        scratch(&at, LM_DTYPE_F64, c->in[0].dim[0], a->attention.heads + a->attention.kv_heads);
    p.attend.attr = &a->attention;
    p.attend.n_in = 3;
    p.attend.work = at;
    return p;
}

static size_t attention_step_work(const lm_call *c, int threads)
{
    step_parts p = parts_of(c);
    const lm_kernel *k = lm_cpu_kernel("attention_cached", LM_DTYPE_NONE, LM_CPU_REF);

    return (size_t)(lm_tensor_count(&p.qkv) + lm_tensor_count(&p.stat)) * sizeof(double) +
           k->work(&p.attend, threads);
}

static void attention_step(const lm_call *c)
{
    const lm_attention_step_attr *a = c->attr;
    const lm_attention_attr *s = &a->attention;
    const lm_head_norm_attr norm = { .heads = s->heads,
                                     .kv_heads = s->kv_heads,
                                     .head_dim = s->head_dim,
                                     .eps = a->eps,
                                     .plus_one = a->plus_one };
    const lm_rope_attr rope = { s->heads, s->kv_heads, s->head_dim, a->rotary_dim, false };
    step_parts p = parts_of(c);
    lm_tensor made[2] = { p.qkv, p.stat }, in[7] = { c->in[0], c->in[1], c->in[2] };

    if (opt_in(c, 5)) {
        run_part(c, "head_norm", &norm, (lm_tensor[]){ in[0], c->in[5], c->in[6] }, 3, made, 2);
        in[0] = made[0];
    }
    if (opt_in(c, 4)) {
        run_part(c, "rope", &rope, (lm_tensor[]){ in[0], c->in[3], c->in[4] }, 3, made, 1);
        in[0] = made[0];
    }
    if (opt_in(c, 7))
        in[6] = c->in[7];
    p.attend.in = in;
    p.attend.n_in = 7;
    lm_cpu_kernel("attention_cached", LM_DTYPE_NONE, LM_CPU_REF)->run(&p.attend);
}

const lm_kernel lm_joined_ref_kernels[] = {
    { "linear_act", LM_DTYPE_NONE, LM_CPU_REF, linear_act, linear_act_work },
    { "linear_act_dx", LM_DTYPE_NONE, LM_CPU_REF, linear_act_dx, linear_act_work },
    { "norm_linear", LM_DTYPE_NONE, LM_CPU_REF, norm_linear, norm_linear_work },
    { "norm_dx_dw", LM_DTYPE_NONE, LM_CPU_REF, norm_dx_dw, NULL },
    { "attention_step", LM_DTYPE_NONE, LM_CPU_REF, attention_step, attention_step_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
