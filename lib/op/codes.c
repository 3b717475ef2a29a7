/* SPDX-License-Identifier: Apache-2.0 */
/* codes.c -- numbers in few bits with scales. */
#include "kernels/codes.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static const char *const format_words[] = { "dynamic8", "affine8", "affine4" };
static const lm_field encode_fields[] = { { LM_ATTR_WORD(lm_codes_attr, format, format_words) },
                                          { LM_ATTR_FLAG(lm_codes_attr, stochastic) },
                                          { LM_ATTR_INT(lm_codes_attr, stream, 0) },
                                          { 0 } };
static const lm_field decode_fields[] = { { LM_ATTR_WORD(lm_codes_attr, format, format_words) },
                                          { 0 } };

/* Whether the planes have room for just the numbers of x. */
static lm_code fits(const char *op, const lm_codes_attr *a, const lm_tensor *x,
                    const lm_tensor *code, const lm_tensor *scale, const lm_tensor *zero, lm_err *e)
{
    int64_t n = lm_tensor_count(x);
    if (lm_tensor_count(code) != lm_codes_bytes(a->format, n))
        return lm_expect(false, op, e, "code has %lld bytes for %lld numbers of %s",
                         (long long)lm_tensor_count(code), (long long)n, format_words[a->format]);
    if (scale->dim[0] != lm_codes_blocks(n))
        return lm_expect(false, op, e, "scale has %lld numbers for %lld blocks",
                         (long long)scale->dim[0], (long long)lm_codes_blocks(n));
    return lm_expect(lm_absent(zero) == (a->format == LM_CODES_DYNAMIC8), op, e,
                     "zero belongs to affine formats, and to all of them");
}

static lm_code encode_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_codes_attr *a = c->attr;
    (void)want;
    if (a->stochastic && a->format == LM_CODES_DYNAMIC8)
        return lm_expect(false, "encode", e, "dynamic8 is not rounded by chance");
    return fits("encode", a, &c->in[1], &c->out[0], &c->out[1], &c->out[2], e);
}

static lm_code decode_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return fits("decode", c->attr, &c->out[0], &c->in[0], &c->in[1], &c->in[2], e);
}

static void codes_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

/* The numbers, their codes, scales and zero points. */
static lm_codes_attr example_of(lm_rng r, int i, lm_tensor t[4])
{
    int64_t rows = lm_example_size(r, i, 0, 40), cols = lm_example_size(r, i, 1, 700);
    lm_codes_attr a = { .format = (lm_codes_format)(i % 3),
                        .stochastic = i % 3 && lm_example_draw(r, i, 2, 2),
                        .stream = i };
    int64_t n = rows * cols;
    t[0] = lm_shape2(LM_DTYPE_F32, rows, cols);
    t[1] = lm_shape1(LM_DTYPE_U8, lm_codes_bytes(a.format, n));
    t[2] = lm_shape1(LM_DTYPE_F32, lm_codes_blocks(n));
    t[3] = t[2];
    if (a.format == LM_CODES_DYNAMIC8)
        t[3].ndim = 0;
    return a;
}

static void encode_example(lm_rng r, int i, lm_example *x)
{
    lm_tensor t[4];
    lm_codes_attr a = example_of(r, i, t);
    *x = (lm_example){ .n_in = 2, .want = a.format == LM_CODES_DYNAMIC8 ? 3 : 7 };
    x->in[1] = t[0];
    if (lm_example_draw(r, i, 3, 2))
        x->in[0] = lm_shape1(lm_example_draw(r, i, 4, 2) ? LM_DTYPE_F64 : LM_DTYPE_F32, 1);
    for (int k = 0; k < 3; k++)
        x->out[k] = t[1 + k];
    lm_example_attr(x, &a);
}

static void decode_example(lm_rng r, int i, lm_example *x)
{
    lm_tensor t[4];
    lm_codes_attr a = example_of(r, i, t);
    *x = (lm_example){ .n_in = 3, .want = 1 };
    for (int k = 0; k < 3; k++)
        x->in[k] = t[1 + k];
    x->out[0] = t[0];
    lm_example_attr(x, &a);
}

static void decode_fill(lm_rng r, const lm_call *c)
{
    uint8_t *code = c->in[0].data;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++)
        code[i] = (uint8_t)lm_rng_u32(r, (uint64_t)i);
}

const lm_op lm_op_encode = {
    .name = "encode",
    .attr_size = sizeof(lm_codes_attr),
    .in = { { "gate", "1", LM_ANY_TYPE | LM_OPTIONAL | LM_FIXED }, { "x", "~", LM_FIXED } },
    .out = { { "code", "*", LM_CODES | LM_GIVEN },
             { "scale", "S", LM_GIVEN },
             { "zero", "S", LM_GIVEN | LM_OPTIONAL } },
    .fields = encode_fields,
    .split = "",
    .prec = LM_PREC_DENY,
    .shape = encode_shape,
    .cost = codes_cost,
    .example = encode_example,
};

const lm_op lm_op_decode = {
    .name = "decode",
    .attr_size = sizeof(lm_codes_attr),
    .in = { { "code", "~", LM_CODES },
            { "scale", "S", LM_FIXED },
            { "zero", "S", LM_FIXED | LM_OPTIONAL } },
    .out = { { "y", "*", LM_GIVEN } },
    .fields = decode_fields,
    .split = "",
    .prec = LM_PREC_DENY,
    .shape = decode_shape,
    .cost = codes_cost,
    .example = decode_example,
    .fill = decode_fill,
};
