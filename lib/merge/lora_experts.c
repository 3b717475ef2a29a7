/* SPDX-License-Identifier: Apache-2.0 */
/* lora_experts.c -- adapters of parameters that hold the weights of all experts: W_e + s B_e A_e on each tensor of the
 * base that holds experts, or rows of one (tune/experts.h). */
#include <string.h>

#include "base/mem.h"
#include "merge/lora_impl.h"

lm_code lm_lora_bind_params(lm_lora *l, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_tune_folder_params(l->folder); i++) {
        const lm_tune_param *p = lm_tune_folder_param(l->folder, i);

        for (size_t k = 0; !rc && k < p->stack.n; k++) {
            const char *name = p->stack.slice[k].base->name;
            lm_lora_change *c = NULL;

            rc = lm_lora_change_of(l, name, strlen(name), "", &c, e);
            if (!rc && (c->whole || lm_lora_adds(c)))
                rc = lm_fail(e, LM_EUSAGE, l->path, "merge it with the program that made it",
                             "it changes '%.150s' in two ways", name);
            if (!rc) {
                c->param = p;
                c->slice = &p->stack.slice[k];
            }
        }
    }
    return rc;
}

static void turn(const double *v, int64_t rows, int64_t cols, double *out)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            out[j * rows + i] = v[i * cols + j];
}

/* One expert, whose weights in the tensor begin at element `at`.  left, right: B_e [out,r] and A_e [r,in]; turned: room
 * for both, transposed. */
static lm_code add_expert(const lm_lora *l, const lm_lora_change *c, int64_t expert, int64_t at,
                          double *left, double *right, double *turned, const lm_st_tensor *t,
                          const void *w, void *out, lm_par *par, lm_err *e)
{
    const lm_tune_param *p = c->param;
    int64_t r = p->rank, in = p->stack.in;
    size_t into = lm_dtype_size(lm_lora_dtype(t->dtype));
    lm_lora_sum s = { .l = left + c->slice->row * r,
                      .r = right,
                      .m = in,
                      .rank = r,
                      .scale = p->scale,
                      .w = (const char *)w + (size_t)at * lm_dtype_size(t->dtype),
                      .from = t->dtype,
                      .into = t->dtype,
                      .out = (char *)out + (size_t)at * into };
    lm_code rc = lm_tune_param_expert(l->st, p, expert, left, right, e);

    if (!rc && p->stack.turned) {
        turn(right, r, in, turned);
        turn(left, p->stack.out, r, turned + in * r);
        s.l = turned;
        s.r = turned + in * r;
        s.m = p->stack.out;
    }
    if (!rc)
        lm_lora_sum_rows(&s, p->stack.turned ? in : c->slice->rows, par);
    return rc;
}

lm_code lm_lora_add_param(const lm_lora *l, const lm_lora_change *c, const lm_st_tensor *t,
                          const void *w, void *out, lm_par *par, lm_err *e)
{
    const lm_tune_stack *s = &c->param->stack;
    int64_t first = c->slice->expert < 0 ? 0 : c->slice->expert;
    int64_t end = c->slice->expert < 0 ? s->experts : first + 1;
    size_t sides = (size_t)((s->out + s->in) * c->param->rank);
    double *room = NULL;
    lm_code rc = lm_alloc_n(&room, 2 * sides, sizeof *room, "adapter", e);

    for (int64_t x = first; !rc && x < end; x++)
        rc = add_expert(l, c, x, (x - first) * s->out * s->in, room, room + s->out * c->param->rank,
                        room + sides, t, w, out, par, e);
    lm_free(room);
    return rc;
}

bool lm_lora_experts_line(const lm_lora *l, char *out, size_t size)
{
    return lm_tune_folder_params_line(l->folder, out, size);
}
