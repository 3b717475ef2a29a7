/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_arith.c -- + - * / // % ** with Python's meaning for numbers, texts and lists. */
#include <math.h>
#include <string.h>

#include "text/jinja_run.h"

static const char *const signs[] = {
    [LM_JOP_ADD] = "+",    [LM_JOP_SUB] = "-", [LM_JOP_MUL] = "*",  [LM_JOP_DIV] = "/",
    [LM_JOP_FLOOR] = "//", [LM_JOP_MOD] = "%", [LM_JOP_POW] = "**",
};

static lm_code too_large(lm_jrun *r)
{
    return lm_jrun_fail(r, "an integer beyond 64 bits");
}

static lm_code power(lm_jrun *r, int64_t a, int64_t b, int64_t *out)
{
    int64_t result = 1;

    while (b > 0) {
        if ((b & 1) && __builtin_mul_overflow(result, a, &result))
            return too_large(r);
        b >>= 1;
        if (b && __builtin_mul_overflow(a, a, &a))
            return too_large(r);
    }
    *out = result;
    return LM_OK;
}

static lm_code integers(lm_jrun *r, lm_jop op, int64_t a, int64_t b, lm_jval *out)
{
    int64_t v = 0;
    bool over = false;
    lm_code rc = LM_OK;

    if (!b && (op == LM_JOP_DIV || op == LM_JOP_FLOOR || op == LM_JOP_MOD))
        return lm_jrun_fail(r, op == LM_JOP_DIV ? "division by zero"
                                                : "integer division or modulo by zero");
    switch (op) {
    case LM_JOP_ADD:
        over = __builtin_add_overflow(a, b, &v);
        break;
    case LM_JOP_SUB:
        over = __builtin_sub_overflow(a, b, &v);
        break;
    case LM_JOP_MUL:
        over = __builtin_mul_overflow(a, b, &v);
        break;
    case LM_JOP_DIV:
        *out = lm_jv_float((double)a / (double)b);
        return LM_OK;
    case LM_JOP_FLOOR:
        over = a == INT64_MIN && b == -1;
        v = over ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
        break;
    case LM_JOP_MOD:
        v = b == -1 ? 0 : a % b;
        v += v && (v < 0) != (b < 0) ? b : 0;
        break;
    default:
        if (b < 0) {
            if (!a)
                return lm_jrun_fail(r, "0.0 cannot be raised to a negative power");
            *out = lm_jv_float(pow((double)a, (double)b));
            return LM_OK;
        }
        rc = power(r, a, b, &v);
        break;
    }
    *out = lm_jv_int(v);
    return over ? too_large(r) : rc;
}

static lm_code reals(lm_jrun *r, lm_jop op, double a, double b, lm_jval *out)
{
    double v = 0;

    if (b == 0 && (op == LM_JOP_DIV || op == LM_JOP_FLOOR || op == LM_JOP_MOD))
        return lm_jrun_fail(r, "float division by zero");
    switch (op) {
    case LM_JOP_ADD:
        v = a + b;
        break;
    case LM_JOP_SUB:
        v = a - b;
        break;
    case LM_JOP_MUL:
        v = a * b;
        break;
    case LM_JOP_DIV:
        v = a / b;
        break;
    case LM_JOP_FLOOR:
    case LM_JOP_MOD: {
        double rest = fmod(a, b);

        if (rest != 0 && (rest < 0) != (b < 0))
            rest += b;
        v = op == LM_JOP_MOD ? (rest != 0 ? rest : copysign(0, b)) : nearbyint((a - rest) / b);
        break;
    }
    default:
        v = pow(a, b);
        if (isnan(v) && !isnan(a) && !isnan(b))
            return lm_jrun_fail(r, "complex numbers are not supported");
        if (isinf(v) && isfinite(a) && isfinite(b))
            return lm_jrun_fail(r, "a power that 64 bits cannot hold");
        break;
    }
    *out = lm_jv_float(v);
    return LM_OK;
}

static lm_code join_text(lm_jrun *r, const lm_jstr *a, const lm_jstr *b, lm_jval *out)
{
    lm_jval left, right;
    bool safe = a->safe || b->safe;
    char *text = NULL;
    lm_code rc = LM_OK;

    if (safe) {
        rc = lm_jstr_escape(r, a, &left);
        if (!rc)
            rc = lm_jstr_escape(r, b, &right);
        if (rc)
            return rc;
        a = left.u.s;
        b = right.u.s;
    }
    rc = lm_jrun_alloc(r, &text, a->len + b->len + 1, 1);
    if (rc)
        return rc;
    memcpy(text, a->s, a->len);
    memcpy(text + a->len, b->s, b->len);
    return lm_jv_part(r, a, text, a->len + b->len, out);
}

static lm_code join(lm_jrun *r, const lm_jval *a, const lm_jval *b, lm_jval *out)
{
    lm_code rc;

    if (a->kind == LM_JV_STR)
        return join_text(r, a->u.s, b->u.s, out);
    rc = lm_jv_seq(r, a->kind, a->u.seq->n + b->u.seq->n, out);
    if (rc)
        return rc;
    if (a->u.seq->n)
        memcpy(out->u.seq->v, a->u.seq->v, a->u.seq->n * sizeof *a->u.seq->v);
    if (b->u.seq->n)
        memcpy(out->u.seq->v + a->u.seq->n, b->u.seq->v, b->u.seq->n * sizeof *b->u.seq->v);
    out->u.seq->n = a->u.seq->n + b->u.seq->n;
    return LM_OK;
}

static lm_code repeat(lm_jrun *r, const lm_jval *v, int64_t times, lm_jval *out)
{
    size_t n = v->kind == LM_JV_STR ? v->u.s->len : v->u.seq->n, all;
    char *text = NULL;
    lm_code rc;

    if (times < 0)
        times = 0;
    if (!lm_mul_ok(n, (size_t)times, &all))
        return lm_jrun_fail(r, "a repetition that memory cannot hold");
    if (!n)
        times = 0;
    if (v->kind == LM_JV_STR) {
        rc = lm_jrun_alloc(r, &text, all + 1, 1);
        for (int64_t i = 0; !rc && i < times; i++)
            memcpy(text + (size_t)i * n, v->u.s->s, n);
        return rc ? rc : lm_jv_lend(r, text, all, out);
    }
    rc = lm_jv_seq(r, v->kind, all, out);
    for (int64_t i = 0; !rc && i < times; i++)
        memcpy(out->u.seq->v + (size_t)i * n, v->u.seq->v, n * sizeof *v->u.seq->v);
    if (!rc)
        out->u.seq->n = all;
    return rc;
}

static bool repeats(const lm_jval *v)
{
    return v->kind == LM_JV_STR || v->kind == LM_JV_LIST || v->kind == LM_JV_TUPLE;
}

lm_code lm_jrun_binary(lm_jrun *r, lm_jop op, const lm_jval *a, const lm_jval *b, lm_jval *out)
{
    char message[256];
    int64_t i, j;

    if (lm_jv_integer(a, &i) && lm_jv_integer(b, &j))
        return integers(r, op, i, j, out);
    if (lm_jv_is_number(a) && lm_jv_is_number(b))
        return reals(r, op, lm_jv_real(a), lm_jv_real(b), out);
    if (op == LM_JOP_MOD && a->kind == LM_JV_STR)
        return lm_jformat_percent(r, a->u.s, b, out);
    if (op == LM_JOP_ADD && a->kind == b->kind && repeats(a))
        return join(r, a, b, out);
    if (op == LM_JOP_MUL && repeats(a) && lm_jv_integer(b, &j))
        return repeat(r, a, j, out);
    if (op == LM_JOP_MUL && repeats(b) && lm_jv_integer(a, &i))
        return repeat(r, b, i, out);
    if (a->kind == LM_JV_UNDEFINED || b->kind == LM_JV_UNDEFINED)
        return lm_jrun_fail(
            r, "%s",
            lm_jv_undefined_message(a->kind == LM_JV_UNDEFINED ? a : b, message, sizeof message));
    if (op == LM_JOP_ADD && repeats(a))
        return lm_jrun_fail(r, "can only concatenate %s (not \"%s\") to %s", lm_jv_type(a),
                            lm_jv_type(b), lm_jv_type(a));
    return lm_jrun_fail(r, "unsupported operand type(s) for %s: '%s' and '%s'", signs[op],
                        lm_jv_type(a), lm_jv_type(b));
}
