/* SPDX-License-Identifier: Apache-2.0 */
/* dims.c -- checks operands against the letters of their operator's table (lm_operand.dims): the
 * first occurrence of a letter, inputs first, binds its size; the shapes of the outputs follow. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "graph/op.h"
#include "numeric/kv_format.h"

enum { LETTERS = 26, SHOWN = 96 };

typedef struct {
    const lm_op *op;
    int64_t size[LETTERS];
    bool bound[LETTERS];
    const lm_tensor *any; /* the first operand of any shape */
    const char *any_name;
    lm_err *e;
} binding;

/* ---- the value of a dimension ---- */

/* sum = product { + product }; product = factor { factor }; factor = number | letter | ( sum ).  A
 * value beyond 2^63 is -1, which no dimension equals. */
static int64_t read_sum(const char **at, const int64_t *size);

static int64_t times(int64_t a, int64_t b)
{
    int64_t product;
    return a < 0 || b < 0 || !lm_mul_i64_ok(a, b, &product) ? -1 : product;
}

static int64_t read_factor(const char **at, const int64_t *size)
{
    int64_t v = 0;
    if (**at == '(') {
        ++*at;
        v = read_sum(at, size);
        ++*at;
        return v;
    }
    if (**at >= 'A' && **at <= 'Z')
        return size[*(*at)++ - 'A'];
    for (; **at >= '0' && **at <= '9'; ++*at)
        v = v * 10 + (**at - '0');
    return v;
}

static int64_t read_sum(const char **at, const int64_t *size)
{
    int64_t sum = 0;
    for (;;) {
        int64_t product = 1;
        while (**at && **at != ',' && **at != '+' && **at != ')')
            product = times(product, read_factor(at, size));
        sum = sum < 0 || product < 0 || sum > INT64_MAX - product ? -1 : sum + product;
        if (**at != '+')
            return sum;
        ++*at;
    }
}

static size_t dim_length(const char *dim)
{
    size_t n = 0;
    while (dim[n] && dim[n] != ',')
        n++;
    return n;
}

static int rank_of(const char *dims)
{
    int n = 1;
    for (const char *p = dims; *p; p++)
        n += *p == ',';
    return n;
}

/* The only letter of the dimension without a size so far; 0: all have one, -1: several have
 * none. */
static int unbound_letter(const binding *b, const char *dim)
{
    int found = 0;
    for (size_t i = 0; dim[i] && dim[i] != ','; i++) {
        bool letter = dim[i] >= 'A' && dim[i] <= 'Z';
        if (letter && !b->bound[dim[i] - 'A'] && dim[i] != found)
            found = found ? -1 : dim[i];
    }
    return found;
}

/* Bind the letter to the size for which the dimension, a linear function of it, equals `want`. */
static bool solve(binding *b, const char *dim, int letter, int64_t want)
{
    int64_t *x = &b->size[letter - 'A'], at_0, at_1;
    const char *p = dim;
    *x = 0;
    at_0 = read_sum(&p, b->size);
    p = dim;
    *x = 1;
    at_1 = read_sum(&p, b->size);
    if (at_0 < 0 || at_1 <= at_0 || want < at_0 || (want - at_0) % (at_1 - at_0))
        return false;
    *x = (want - at_0) / (at_1 - at_0);
    b->bound[letter - 'A'] = true;
    return true;
}

/* ---- operands ---- */

static const char *show(const lm_tensor *t, char out[SHOWN])
{
    int n = snprintf(out, SHOWN, "%s[", lm_dtype_name(t->dtype));
    for (int i = 0; i < t->ndim && n < SHOWN - 24; i++)
        n += snprintf(out + n, (size_t)(SHOWN - n), i ? ",%" PRId64 : "%" PRId64, t->dim[i]);
    snprintf(out + n, (size_t)(SHOWN - n), "]");
    return out;
}

static lm_code fit_any(binding *b, const lm_operand *o, const lm_tensor *t)
{
    char have[SHOWN], want[SHOWN];
    if (!b->any) {
        b->any = t;
        b->any_name = o->name;
    }
    if (lm_same_shape(b->any, t))
        return LM_OK;
    return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is %s, but %s is %s", o->name,
                   show(t, have), b->any_name, show(b->any, want));
}

/* A coded cache only where one can be. */
static lm_code fit_kv(const binding *b, const lm_operand *o, const lm_tensor *t)
{
    lm_kv_sections s;
    if (t->kv && !(o->is & LM_KV))
        return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is a coded cache", o->name);
    return t->kv && t->ndim == 4 ? lm_kv_page(t->kv, t->dim[2], t->dim[3], &s, b->e) : LM_OK;
}

static lm_code fit(binding *b, const lm_operand *o, const lm_tensor *t)
{
    const char *dim = o->dims;
    char have[SHOWN];
    if (fit_kv(b, o, t))
        return b->e->code;
    if (o->dims[0] == '*')
        return fit_any(b, o, t);
    if (o->dims[0] == '~')
        return LM_OK;
    if (t->ndim != rank_of(o->dims))
        return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is %s, not [%s]", o->name,
                       show(t, have), o->dims);
    for (int i = 0; i < t->ndim; i++, dim += dim_length(dim) + 1) {
        int letter = unbound_letter(b, dim);
        const char *p = dim;
        int64_t want = letter ? -1 : read_sum(&p, b->size);
        if (letter > 0 ? solve(b, dim, letter, t->dim[i]) : want == t->dim[i])
            continue;
        if (letter)
            return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is %s, not [%s]", o->name,
                           show(t, have), o->dims);
        if (want < 0)
            return lm_fail(b->e, LM_ELIMIT, b->op->name, NULL,
                           "%.*s of %s is negative or too large", (int)dim_length(dim), dim,
                           o->name);
        return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is %s, not [%s]: %.*s is %" PRId64,
                       o->name, show(t, have), o->dims, (int)dim_length(dim), dim, want);
    }
    return LM_OK;
}

static void bind_attributes(binding *b, const void *attr)
{
    for (const lm_field *f = b->op->fields; f && f->name; f++)
        if (f->letter) {
            memcpy(&b->size[f->letter - 'A'], (const char *)attr + f->at, sizeof(int64_t));
            b->bound[f->letter - 'A'] = true;
        }
    for (const lm_field *f = b->op->fields; f && f->name; f++)
        if (f->letter && f->otherwise && b->size[f->letter - 'A'] == 0)
            b->size[f->letter - 'A'] = b->size[f->otherwise - 'A'];
}

static void bind_known(binding *b, const lm_call *c)
{
    for (int i = 0; b->op->letter && i < LETTERS; i++) {
        const int64_t size = b->op->letter(c, (char)('A' + i));
        if (size >= 0) {
            b->size[i] = size;
            b->bound[i] = true;
        }
    }
}

static lm_code check_type(const binding *b, const lm_operand *o, const lm_tensor *t, lm_dtype act)
{
    lm_dtype want = o->is & LM_IDS        ? LM_DTYPE_I32
                    : o->is & LM_CODES    ? LM_DTYPE_U8
                    : o->is & LM_DOUBLE   ? LM_DTYPE_F64
                    : o->is & LM_ACT_TYPE ? act
                                          : lm_wide(act);
    if ((o->is & LM_ANY_TYPE) && lm_dtype_is_float(t->dtype))
        return LM_OK;
    if (t->dtype == want)
        return LM_OK;
    return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is of %s, not of %s", o->name,
                   lm_dtype_name(t->dtype), lm_dtype_name(want));
}

static lm_code fit_inputs(binding *b, const lm_call *c, lm_dtype act)
{
    for (int i = 0; i < lm_op_ins(b->op); i++) {
        const lm_operand *o = &b->op->in[i];
        if (lm_absent(&c->in[i])) {
            if (!(o->is & LM_OPTIONAL))
                return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is missing", o->name);
            continue;
        }
        if (fit(b, o, &c->in[i]) || check_type(b, o, &c->in[i], act))
            return b->e->code;
    }
    return LM_OK;
}

static lm_code make_output(const binding *b, const lm_operand *o, lm_tensor *t, lm_dtype act)
{
    const char *dim = o->dims;
    if (o->is & LM_DOUBLE)
        t->dtype = LM_DTYPE_F64;
    else if (o->is & LM_IDS)
        t->dtype = LM_DTYPE_I32;
    else if (o->is & LM_CODES)
        t->dtype = LM_DTYPE_U8;
    else if (!(o->is & LM_ANY_TYPE))
        t->dtype = o->is & LM_ACT_TYPE ? act : lm_wide(act);
    else if (!lm_dtype_is_float(t->dtype))
        return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "the type of %s is not given", o->name);
    if (o->dims[0] == '*') {
        t->ndim = b->any->ndim;
        memcpy(t->dim, b->any->dim, sizeof t->dim);
        return LM_OK;
    }
    t->ndim = rank_of(o->dims);
    for (int i = 0; i < t->ndim; i++, dim += dim_length(dim) + 1) {
        const char *p = dim;
        if (unbound_letter(b, dim))
            return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "no operand determines %.*s of %s",
                           (int)dim_length(dim), dim, o->name);
        t->dim[i] = read_sum(&p, b->size);
    }
    return LM_OK;
}

static lm_code fit_outputs(binding *b, lm_call *c, unsigned want, lm_dtype act)
{
    for (int i = 0; i < lm_op_outs(b->op); i++) {
        const lm_operand *o = &b->op->out[i];
        if (!(want >> i & 1)) {
            if (!(o->is & LM_OPTIONAL))
                return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s cannot be left out", o->name);
            c->out[i] = (lm_tensor){ .dtype = LM_DTYPE_NONE };
            continue;
        }
        if (o->is & LM_GIVEN) {
            if (lm_absent(&c->out[i]))
                return lm_fail(b->e, LM_EBUG, b->op->name, NULL, "%s is not given", o->name);
            if (fit(b, o, &c->out[i]))
                return b->e->code;
        }
        if (make_output(b, o, &c->out[i], act))
            return b->e->code;
    }
    return LM_OK;
}

static lm_code bind_call(binding *b, lm_call *c, unsigned want)
{
    lm_dtype act = lm_op_act(b->op, c);
    bind_attributes(b, c->attr);
    bind_known(b, c);
    return fit_inputs(b, c, act) ? b->e->code : fit_outputs(b, c, want, act);
}

lm_code lm_op_shape(const lm_op *op, lm_call *c, unsigned want, lm_err *e)
{
    binding b = { .op = op, .e = e };
    if (bind_call(&b, c, want))
        return e->code;
    return op->shape ? op->shape(c, want, e) : LM_OK;
}

lm_code lm_op_letters(const lm_op *op, const lm_call *c, int64_t size[LM_LETTERS], lm_err *e)
{
    binding b = { .op = op, .e = e };
    lm_tensor out[LM_MAX_OUT];
    lm_call copy = *c;
    unsigned want = 0;
    for (int i = 0; i < c->n_out; i++) {
        out[i] = c->out[i];
        want |= (unsigned)!lm_absent(&out[i]) << i;
    }
    copy.out = out;
    if (bind_call(&b, &copy, want))
        return e->code;
    memcpy(size, b.size, sizeof b.size);
    return LM_OK;
}
