/* SPDX-License-Identifier: Apache-2.0 */
/* map.c -- formulas over the elements of tensors, and sums and maxima of their parts. */
#include "kernels/map.h"

#include "op/append.h"
#include "op/example.h"
#include "op/formula.h"
#include "op/ops.h"

static const char *const kind_words[] = { "sum", "squares", "max", "abs_max" };
static const char *const over_words[] = { "all", "row", "column", "block" };
static const lm_field map_fields[] = {
    { "text", offsetof(lm_map_attr, text), LM_FIELD_TEXT, 0, NULL, false, 0 }, { 0 }
};
static const lm_field reduce_fields[] = { { LM_ATTR_WORD(lm_reduce_attr, kind, kind_words) },
                                          { LM_ATTR_WORD(lm_reduce_attr, over, over_words) },
                                          { LM_ATTR_INT(lm_reduce_attr, rows, 0) },
                                          { LM_ATTR_FLAG(lm_reduce_attr, mean) },
                                          { 0 } };

/* ---- map ---- */

/* Whether x is of the shape of y, one number, or repeated along one dimension of a matrix. */
static bool spreads(const lm_tensor *x, const lm_tensor *y)
{
    if (lm_same_shape(x, y) || lm_tensor_count(x) == 1)
        return true;
    return x->ndim == 2 && y->ndim == 2 && (x->dim[0] == y->dim[0] || x->dim[0] == 1) &&
           (x->dim[1] == y->dim[1] || x->dim[1] == 1);
}

/* The types that formulas are made for (F64: the reference, and single numbers). */
static bool is_served(const lm_tensor *t)
{
    return lm_absent(t) || t->dtype == LM_DTYPE_F32 || t->dtype == LM_DTYPE_BF16 ||
           t->dtype == LM_DTYPE_F64;
}

static lm_code map_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    for (int i = 0; i < c->n_in + c->n_out; i++)
        if (!is_served(i < c->n_in ? &c->in[i] : &c->out[i - c->n_in]))
            return lm_expect(false, "map", e, "an operand is neither of f32 nor of bf16");
    for (int i = LM_MAP_FIRST_X; i < LM_MAP_FIRST_X + LM_MAP_X; i++)
        if (!lm_absent(&c->in[i]) && !spreads(&c->in[i], &c->out[0]))
            return lm_expect(false, "map", e,
                             "x%d has a shape that cannot be repeated to that of y0",
                             i - LM_MAP_FIRST_X);
    return LM_OK;
}

static void map_cost(const lm_call *c, lm_cost *out)
{
    const lm_map_program *p = &((const lm_map_attr *)c->attr)->program;
    out->flops = (double)lm_tensor_count(&c->out[0]) * (p->n_steps - p->n_single);
    out->bytes = lm_call_bytes(c);
}

/* What operands and formulas of examples are made of.  The first SMOOTH have a derivative almost everywhere; those
 * of the others are 0 between jumps. */
enum { SMOOTH = 9, TEXTS = 15 };
static const struct {
    const char *text;
    int results;
} examples[TEXTS] = {
    { "y = a + b", 1 },
    { "y = b1*a + (1 - b1)*b; z = y / (sqrt(y*y + n1*n1) + 1e-8)", 2 },
    { "k = max(-0.5, min(0.5, n0*b)); y = a*(1 - 0.1*b1) - k", 1 },
    { "y = where(a < b, -a, abs(b)) * c; z = b/(2 + a*a)", 2 },
    { "t = 2 - s; y = t*a + s*b - n1/n0; z = c", 2 },
    { "y = exp(-a*a)*c + s*s; z = log(1 + b*b)", 2 },
    { "y = a*cos(b) - c*sin(b); z = a*sin(b) + c*cos(b)", 2 },
    { "y = tanh(a*c) + erf(b*s)", 1 },
    { "y = a/(1 + exp(-a)) - c*b; z = exp(0.1*s)*b*b", 2 },
    { "y = b1*a + (1 - b1)*b; z = y / (sqrt(y*y / n1) + 1e-8)", 2 },
    { "y = a + b", 1 },
    { "k = max(-0.5, min(0.5, n0*b)); y = a*(1 - 0.1*b1) - k", 1 },
    { "y = where(a < b, sign(a), abs(b)) * c; z = round(-a*4)", 2 },
    { "y = a - c*erf(b); z = sin(8*a) + tanh(c)", 2 },
    { "t = 2 - s; y = t*a + s*b - n1/n0; z = c", 2 },
};

/* Operands: a as y is, b repeated (or not), c, s one number each. */
static void map_example(lm_rng r, int i, lm_example *x)
{
    /* Few numbers where derivatives are compared with differences: kinks are far from all of them. */
    int64_t rows = lm_example_size(r, i, 0, i < SMOOTH ? 5 : 40);
    int64_t cols = lm_example_size(r, i, 1, i < SMOOTH ? 40 : 700);
    if (i % TEXTS >= SMOOTH && i % 5 == 0)
        cols += 2000;
    lm_tensor whole = lm_shape2(LM_DTYPE_F32, rows, cols);
    lm_tensor spread[] = { whole, lm_shape2(LM_DTYPE_F32, 1, cols),
                           lm_shape2(LM_DTYPE_F32, rows, 1),
                           lm_shape2(i % 3 ? LM_DTYPE_BF16 : LM_DTYPE_F64, 1, 1) };
    lm_formula_operand names[] = { { "a", 0, &whole },
                                   { "b", 1, &spread[lm_example_draw(r, i, 2, 4)] },
                                   { "c", 2, &spread[lm_example_draw(r, i, 3, 4)] },
                                   { "s", 3, &spread[3] } };
    const lm_formula f = { .text = examples[i % TEXTS].text,
                           .operand = names,
                           .n_operands = 4,
                           .constant = (const lm_formula_constant[]){ { "b1", 0.9 } },
                           .n_constants = 1,
                           .number = (const char *const[]){ "n0", "n1" },
                           .n_numbers = 2,
                           .result = (const char *const[]){ "y", "z" },
                           .n_results = examples[i % TEXTS].results };
    lm_map_attr attr;
    lm_err e = { 0 };
    *x = (lm_example){ .n_in = LM_MAP_FIRST_X + 4, .want = f.n_results == 2 ? 3 : 1 };
    lm_formula_compile(&f, &attr, &e); /* the texts above are right */
    lm_example_attr(x, &attr);
    x->in[0] = lm_shape1(LM_DTYPE_F64, lm_example_draw(r, i, 4, 2) ? 1 : 0);
    if (!x->in[0].dim[0])
        x->in[0] = (lm_tensor){ 0 };
    x->in[1] = lm_shape1(LM_DTYPE_F64, 2);
    whole.dtype = lm_example_draw(r, i, 5, 3) ? LM_DTYPE_F32 : LM_DTYPE_BF16;
    for (int k = 0; k < 4; k++)
        x->in[LM_MAP_FIRST_X + k] = *names[k].shape;
    x->out[0] = x->out[1] = lm_shape2(LM_DTYPE_F32, rows, cols);
    if (lm_example_draw(r, i, 7, 3) == 0)
        x->out[0].dtype = LM_DTYPE_BF16;
    if (lm_example_draw(r, i, 6, 3) == 0)
        x->out[1].dtype = LM_DTYPE_BF16;
    if (f.n_results == 1)
        x->out[1] = (lm_tensor){ 0 };
}

#define X(name)                              \
    {                                        \
        name, "~", LM_ANY_TYPE | LM_OPTIONAL \
    }
#define Y(name)                              \
    {                                        \
        name, "*", LM_ANY_TYPE | LM_OPTIONAL \
    }
const lm_op lm_op_map = {
    .name = "map",
    .attr_size = sizeof(lm_map_attr),
    .in = { { "gate", "1", LM_ANY_TYPE | LM_OPTIONAL | LM_FIXED },
            { "numbers", "K", LM_DOUBLE | LM_OPTIONAL | LM_FIXED },
            X("x0"),
            X("x1"),
            X("x2"),
            X("x3"),
            X("x4"),
            X("x5"),
            X("x6"),
            X("x7"),
            X("x8"),
            X("x9"),
            X("x10"),
            X("x11") },
    .out = { { "y0", "*", LM_ANY_TYPE | LM_GIVEN }, Y("y1"), Y("y2"), Y("y3"), Y("y4"), Y("y5") },
    .fields = map_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_DENY,
    .shape = map_shape,
    .grad = lm_map_grad,
    .cost = map_cost,
    .example = map_example,
};

/* ---- reduce ---- */

static lm_code reduce_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_reduce_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    (void)want;
    if (!is_served(x))
        return lm_expect(false, "reduce", e, "x is neither of f32 nor of bf16");
    if (a->over != LM_OVER_ALL && x->ndim != 2)
        return lm_expect(false, "reduce", e, "x is no matrix");
    if (a->over == LM_OVER_BLOCK && (a->rows < 1 || x->dim[0] % a->rows))
        return lm_expect(false, "reduce", e,
                         "the rows of x are not a whole number of blocks of %lld",
                         (long long)a->rows);
    int64_t parts = lm_reduce_sizes_of(a, x).parts;
    lm_dtype wide = lm_wide(x->dtype);
    c->out[0] = a->over == LM_OVER_ALL      ? lm_shape1(wide, 1)
                : a->over == LM_OVER_COLUMN ? lm_shape2(wide, 1, parts)
                                            : lm_shape2(wide, parts, 1);
    return LM_OK;
}

static void reduce_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void reduce_example(lm_rng r, int i, lm_example *x)
{
    int64_t rows = lm_example_size(r, i, 0, 70), cols = lm_example_size(r, i, 1, 300);
    lm_reduce_attr a = { .kind = (lm_reduce_kind)(i % 4),
                         .over = (lm_reduce_over)(i / 4 % 4),
                         .rows = 1 + (int64_t)lm_example_draw(r, i, 2, 4),
                         .mean = i % 4 < 2 && lm_example_draw(r, i, 3, 2) };
    if (a.over == LM_OVER_BLOCK)
        rows *= a.rows;
    else if (a.over == LM_OVER_ALL && lm_example_draw(r, i, 4, 2))
        cols = 2000 + cols;
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape2(lm_example_draw(r, i, 5, 3) ? LM_DTYPE_F32 : LM_DTYPE_BF16, rows, cols);
    lm_example_attr(x, &a);
}

/* Rows by themselves, and sums over rows. */
static const char *reduce_form(const lm_call *c, int i)
{
    const lm_reduce_attr *a = c->attr;
    const bool sums = (a->kind == LM_REDUCE_SUM || a->kind == LM_REDUCE_SQUARES) && !a->mean;
    if (i)
        return NULL;
    if (a->over == LM_OVER_ROW)
        return "00";
    return sums && a->over != LM_OVER_BLOCK ? "0+" : NULL;
}

const lm_op lm_op_reduce = {
    .name = "reduce",
    .attr_size = sizeof(lm_reduce_attr),
    .in = { { "x", "*", LM_ANY_TYPE } },
    .out = { { "y", "*", 0 } },
    .fields = reduce_fields,
    .split = "",
    .form = reduce_form,
    .prec = LM_PREC_DENY,
    .shape = reduce_shape,
    .grad = lm_reduce_grad,
    .cost = reduce_cost,
    .example = reduce_example,
};
