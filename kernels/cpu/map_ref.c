/* SPDX-License-Identifier: Apache-2.0 */
/* map_ref.c -- the definition of the map family (kernels/map.h). */
#include "kernels/map.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* ---- map ---- */

bool lm_map_opens(const lm_call *c)
{
    const lm_tensor *gate = opt_in(c, 0);
    return !gate || !isnan(get(gate, 0));
}

static double step_value(lm_map_code code, double a, double b, double c)
{
    switch (code) {
    case LM_MAP_LOAD:
    case LM_MAP_MOVE:
        return a;
    case LM_MAP_NEG:
        return -a;
    case LM_MAP_ABS:
        return fabs(a);
    case LM_MAP_SQRT:
        return sqrt(a);
    case LM_MAP_ROUND:
        return nearbyint(a);
    case LM_MAP_ADD:
        return a + b;
    case LM_MAP_SUB:
        return a - b;
    case LM_MAP_MUL:
        return a * b;
    case LM_MAP_DIV:
        return a / b;
    case LM_MAP_MIN:
        return a < b ? a : b;
    case LM_MAP_MAX:
        return a > b ? a : b;
    case LM_MAP_LESS:
        return a < b;
    case LM_MAP_EXP:
        return exp(a);
    case LM_MAP_LOG:
        return log(a);
    case LM_MAP_SIN:
        return sin(a);
    case LM_MAP_COS:
        return cos(a);
    case LM_MAP_TANH:
        return tanh(a);
    case LM_MAP_ERF:
        return erf(a);
    case LM_MAP_WHERE:
        break;
    }
    return fabs(a) > 0 ? b : c;
}

static double operand(uint8_t which, const double *single, const double *tile)
{
    return which & LM_MAP_SINGLE ? single[which & ~LM_MAP_SINGLE] : tile[which];
}

void lm_map_singles(const lm_call *c, double single[LM_MAP_SINGLES])
{
    const lm_map_program *p = &((const lm_map_attr *)c->attr)->program;
    for (int i = 0; i < p->n_constants; i++)
        single[i] = p->constant[i];
    for (int i = 0; i < p->n_fetched; i++) {
        const lm_map_fetch *f = &p->fetch[i];
        single[f->to] = f->origin == LM_MAP_NUMBER ? get(&c->in[1], f->at)
                                                   : get(&c->in[LM_MAP_FIRST_X + f->at], 0);
    }
    for (int i = 0; i < p->n_single; i++) {
        const lm_map_step *s = &p->step[i];
        single[s->to & ~LM_MAP_SINGLE] =
            step_value(s->code, operand(s->a, single, NULL), operand(s->b, single, NULL),
                       operand(s->c, single, NULL));
    }
}

/* Where element i of y is in x, which may be repeated along rows or columns. */
static int64_t place_in(const lm_tensor *x, const lm_tensor *y, int64_t i)
{
    if (lm_tensor_count(x) == lm_tensor_count(y))
        return i;
    if (lm_tensor_count(x) == 1)
        return 0;
    int64_t cols = width(y);
    return x->dim[0] == 1 ? i % cols : i / cols;
}

static void map(const lm_call *c)
{
    const lm_map_program *p = &((const lm_map_attr *)c->attr)->program;
    double single[LM_MAP_SINGLES] = { 0 }, tile[LM_MAP_TILES] = { 0 };
    if (!lm_map_opens(c))
        return;
    lm_map_singles(c, single);
    for (int64_t i = 0; i < lm_tensor_count(&c->out[0]); i++) {
        for (int k = p->n_single; k < p->n_steps; k++) {
            const lm_map_step *s = &p->step[k];
            const lm_tensor *x = &c->in[LM_MAP_FIRST_X + s->a];
            tile[s->to] = s->code == LM_MAP_LOAD ? get(x, place_in(x, &c->out[0], i))
                                                 : step_value(s->code, operand(s->a, single, tile),
                                                              operand(s->b, single, tile),
                                                              operand(s->c, single, tile));
        }
        for (int k = 0; k < LM_MAP_Y; k++)
            if (opt_out(c, k))
                set(&c->out[k], i, operand(p->from[k], single, tile));
    }
}

/* ---- reduce ---- */

static double with(lm_reduce_kind kind, double so_far, double x)
{
    if (kind == LM_REDUCE_SUM)
        return so_far + x;
    if (kind == LM_REDUCE_SQUARES)
        return so_far + x * x;
    if (!isfinite(x))
        return NAN;
    x = kind == LM_REDUCE_ABS_MAX ? fabs(x) : x;
    return isnan(so_far) || x <= so_far ? so_far : x;
}

static void reduce(const lm_call *c)
{
    const lm_reduce_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    lm_reduce_sizes n = lm_reduce_sizes_of(a, x);
    bool column = a->over == LM_OVER_COLUMN;
    for (int64_t p = 0; p < n.parts; p++) {
        double r = a->kind == LM_REDUCE_MAX ? -INFINITY : 0;
        for (int64_t k = 0; k < n.terms; k++)
            r = with(a->kind, r, get(x, column ? k * n.cols + p : p * n.terms + k));
        set(&c->out[0], p, a->mean ? r / (double)n.terms : r);
    }
}

const lm_kernel lm_map_ref_kernels[] = {
    { "map", LM_DTYPE_NONE, LM_CPU_REF, map, NULL },
    { "reduce", LM_DTYPE_NONE, LM_CPU_REF, reduce, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
