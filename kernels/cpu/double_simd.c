/* SPDX-License-Identifier: Apache-2.0 */
/* double_simd.c -- what rules of adapters run in F64 when they are merged: products, formulas and permutations.
 *
 * Each gives the bits of its reference: a sum is made in order of k with a rounding behind every product and every sum,
 * in as many columns at once as the registers hold. */
#include <math.h>
#include <string.h>

#include "kernels/arrange.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/map.h"
#include "kernels/matmul.h"

/* ---- matmul: panels of B by bands of rows ---- */

enum { LANES = sizeof(vd) / sizeof(double), WIDE = 2 * LANES, TALL = 4, BAND = 256 };

typedef struct {
    const lm_call *call;
    lm_matmul_sizes s;
    bool turn_a, turn_b;
    int64_t panels, bands;
} product;

static product product_of(const lm_call *c)
{
    const lm_matmul_attr *attr = c->attr;
    product p = { .call = c, .turn_a = attr->turn_a, .turn_b = attr->turn_b };
    p.s = lm_matmul_sizes_of(attr, &c->in[0], &c->in[1]);
    p.panels = (p.s.n + WIDE - 1) / WIDE;
    p.bands = (p.s.m + BAND - 1) / BAND;
    return p;
}

/* Columns [col, col + n) of op(b), row by row; zeros beside them. */
static void pack(const product *p, const double *b, int64_t col, int64_t n, double *to)
{
    for (int64_t k = 0; k < p->s.k; k++, to += WIDE)
        for (int64_t j = 0; j < WIDE; j++)
            to[j] = j >= n ? 0 : p->turn_b ? b[(col + j) * p->s.k + k] : b[k * p->s.n + col + j];
}

/* Up to TALL rows of C in a panel's columns; rows beyond `rows` repeat the last one. */
static void multiply_rows(const product *p, const double *a, int64_t rows, const double *b,
                          double c[TALL][WIDE])
{
    int64_t step = p->turn_a ? p->s.m : 1, pitch = p->turn_a ? 1 : p->s.k;
    const double *row[TALL];
    vd sum[TALL][2] = { { { 0 } } };
    for (int i = 0; i < TALL; i++)
        row[i] = a + (i < rows ? i : rows - 1) * pitch;
    for (int64_t k = 0; k < p->s.k; k++, b += WIDE) {
        vd left, right;
        memcpy(&left, b, sizeof left);
        memcpy(&right, b + LANES, sizeof right);
        for (int i = 0; i < TALL; i++) {
            double x = row[i][k * step];
            sum[i][0] += x * left;
            sum[i][1] += x * right;
        }
    }
    memcpy(c, sum, sizeof sum);
}

static void multiply_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const product *p = ctx;
    const lm_matmul_sizes *s = &p->s;
    double *packed = (double *)p->call->work + (size_t)worker * (size_t)(s->k * WIDE);
    for (int64_t i = begin; i < end; i++) {
        int64_t batch = i / (p->panels * p->bands), panel = i / p->bands % p->panels;
        int64_t from = i % p->bands * BAND, to = from + BAND < s->m ? from + BAND : s->m;
        int64_t col = panel * WIDE, n = s->n - col < WIDE ? s->n - col : WIDE;
        const double *a = (const double *)p->call->in[0].data + batch * s->stride_a;
        double *c = (double *)p->call->out[0].data + batch * s->m * s->n, tile[TALL][WIDE];
        pack(p, (const double *)p->call->in[1].data + batch * s->stride_b, col, n, packed);
        for (int64_t row = from; row < to; row += TALL) {
            int64_t rows = to - row < TALL ? to - row : TALL;
            multiply_rows(p, a + row * (p->turn_a ? 1 : s->k), rows, packed, tile);
            for (int64_t r = 0; r < rows; r++)
                memcpy(c + (row + r) * s->n + col, tile[r], (size_t)n * sizeof *c);
        }
    }
}

static void matmul(const lm_call *c)
{
    product p = product_of(c);
    lm_par_for(c->par, p.s.batch * p.panels * p.bands, 1, multiply_span, &p);
}

static size_t matmul_work(const lm_call *c, int threads)
{
    product p = product_of(c);
    return (size_t)threads * (size_t)(p.s.k * WIDE) * sizeof(double);
}

/* ---- map: a step of the program at a time on a run of elements ---- */

enum { RUN = 128 };

typedef struct {
    const lm_call *call;
    const lm_map_program *p;
    double single[LM_MAP_SINGLES];
} formula;

/* Elements [from, from + n) of y's shape from x, which may be repeated along rows or columns. */
static void load_run(const lm_tensor *x, const lm_tensor *y, int64_t from, int64_t n, double *out)
{
    const double *d = x->data;
    int64_t count = lm_tensor_count(x), cols = y->ndim ? y->dim[y->ndim - 1] : 1;
    if (count == lm_tensor_count(y)) {
        memcpy(out, d + from, (size_t)n * sizeof *out);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        out[i] = d[count == 1 ? 0 : x->dim[0] == 1 ? (from + i) % cols : (from + i) / cols];
}

static const double *operand_run(const formula *f, uint8_t which, double (*tile)[RUN], double *room,
                                 int64_t n)
{
    if (!(which & LM_MAP_SINGLE))
        return tile[which];
    for (int64_t i = 0; i < n; i++)
        room[i] = f->single[which & ~LM_MAP_SINGLE];
    return room;
}

#define EACH(expression)              \
    for (int64_t i = 0; i < n; i++) { \
        y[i] = (expression);          \
    }                                 \
    return

/* One step; y may be one of the operands. */
static void step_run(lm_map_code code, const double *a, const double *b, const double *c, double *y,
                     int64_t n)
{
    switch (code) {
    case LM_MAP_LOAD:
    case LM_MAP_MOVE:
        EACH(a[i]);
    case LM_MAP_NEG:
        EACH(-a[i]);
    case LM_MAP_ABS:
        EACH(fabs(a[i]));
    case LM_MAP_SQRT:
        EACH(sqrt(a[i]));
    case LM_MAP_ROUND:
        EACH(nearbyint(a[i]));
    case LM_MAP_ADD:
        EACH(a[i] + b[i]);
    case LM_MAP_SUB:
        EACH(a[i] - b[i]);
    case LM_MAP_MUL:
        EACH(a[i] * b[i]);
    case LM_MAP_DIV:
        EACH(a[i] / b[i]);
    case LM_MAP_MIN:
        EACH(a[i] < b[i] ? a[i] : b[i]);
    case LM_MAP_MAX:
        EACH(a[i] > b[i] ? a[i] : b[i]);
    case LM_MAP_LESS:
        EACH(a[i] < b[i]);
    case LM_MAP_EXP:
        EACH(exp(a[i]));
    case LM_MAP_LOG:
        EACH(log(a[i]));
    case LM_MAP_SIN:
        EACH(sin(a[i]));
    case LM_MAP_COS:
        EACH(cos(a[i]));
    case LM_MAP_TANH:
        EACH(tanh(a[i]));
    case LM_MAP_ERF:
        EACH(erf(a[i]));
    case LM_MAP_WHERE:
        EACH(fabs(a[i]) > 0 ? b[i] : c[i]);
    }
}

static void map_run(const formula *f, int64_t from, int64_t n, double (*tile)[RUN])
{
    const lm_call *c = f->call;
    double room[3][RUN];
    for (int k = f->p->n_single; k < f->p->n_steps; k++) {
        const lm_map_step *s = &f->p->step[k];
        if (s->code == LM_MAP_LOAD)
            load_run(&c->in[LM_MAP_FIRST_X + s->a], &c->out[0], from, n, tile[s->to]);
        else
            step_run(s->code, operand_run(f, s->a, tile, room[0], n),
                     operand_run(f, s->b, tile, room[1], n), operand_run(f, s->c, tile, room[2], n),
                     tile[s->to], n);
    }
    for (int k = 0; k < LM_MAP_Y && k < c->n_out; k++)
        if (c->out[k].data)
            memcpy((double *)c->out[k].data + from, operand_run(f, f->p->from[k], tile, room[0], n),
                   (size_t)n * sizeof(double));
}

static void map_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    double tile[LM_MAP_TILES][RUN] = { { 0 } };
    (void)worker;
    for (int64_t i = begin; i < end; i += RUN)
        map_run(ctx, i, end - i < RUN ? end - i : RUN, tile);
}

static void map(const lm_call *c)
{
    formula f = { .call = c, .p = &((const lm_map_attr *)c->attr)->program };
    if (!lm_map_opens(c))
        return;
    lm_map_singles(c, f.single);
    lm_par_for(c->par, lm_tensor_count(&c->out[0]), 64 * RUN, map_span, &f);
}

/* ---- permute: places counted on, as on an odometer ---- */

typedef struct {
    const double *in;
    double *out;
    const lm_permute_attr *attr;
    int64_t pitch[LM_PERMUTE_DIMS]; /* of the result's dimensions in the operand */
    int64_t size[LM_PERMUTE_DIMS];
} moving;

static void move_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const moving *m = ctx;
    int last = m->attr->ndim - 1;
    int64_t at[LM_PERMUTE_DIMS] = { 0 }, left = begin, from = 0;
    (void)worker;
    for (int d = last; d >= 0; d--) {
        at[d] = left % m->size[d];
        left /= m->size[d];
        from += at[d] * m->pitch[d];
    }
    for (int64_t i = begin; i < end; i++) {
        m->out[i] = m->in[from];
        int d = last;
        at[d]++;
        from += m->pitch[d];
        for (; d > 0 && at[d] == m->size[d]; d--) {
            from += m->pitch[d - 1] - at[d] * m->pitch[d];
            at[d] = 0;
            at[d - 1]++;
        }
    }
}

static void permute(const lm_call *c)
{
    const lm_permute_attr *a = c->attr;
    moving m = { .in = c->in[0].data, .out = c->out[0].data, .attr = a };
    int64_t pitch[LM_PERMUTE_DIMS] = { 0 }, step = 1;
    for (int i = a->ndim - 1; i >= 0; i--) {
        pitch[i] = step;
        step *= a->dim[i];
    }
    for (int i = 0; i < a->ndim; i++) {
        m.pitch[i] = pitch[a->perm[i]];
        m.size[i] = a->dim[a->perm[i]];
    }
    lm_par_for(c->par, lm_tensor_count(&c->out[0]), 64 * RUN, move_span, &m);
}

/* A kernel of F64. */
#define DOUBLE_KERNEL(op, run, work)               \
    {                                              \
        op, LM_DTYPE_F64, LM_SIMD_LEVEL, run, work \
    }

const lm_kernel LM_TABLE_NAME(double, LM_SIMD)[] = {
    DOUBLE_KERNEL("matmul", matmul, matmul_work),
    DOUBLE_KERNEL("map", map, NULL),
    DOUBLE_KERNEL("permute", permute, NULL),
    VF_KERNEL_END,
};
