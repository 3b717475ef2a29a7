/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_filters_number.c -- filters that make numbers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "text/jinja_run.h"

#define UNUSED (void)arg, (void)c

LM_JFILTER(do_abs)
{
    int64_t i;

    UNUSED;
    if (!lm_jv_is_number(v))
        return lm_jrun_fail(r, "bad operand type for abs(): '%s'", lm_jv_type(v));
    if (!lm_jv_integer(v, &i))
        *out = lm_jv_float(fabs(v->u.f));
    else if (i == INT64_MIN)
        return lm_jrun_fail(r, "an integer beyond 64 bits");
    else
        *out = lm_jv_int(i < 0 ? -i : i);
    return LM_OK;
}

/* A text as float() of Python reads it. */
static bool read_real(const lm_jstr *s, double *out)
{
    const char *p = s->s;
    size_t n = s->len, k = 0;
    char text[64];

    lm_jstr_strip(&p, &n, NULL, LM_JSTRIP_LEFT | LM_JSTRIP_RIGHT);
    for (size_t i = 0; i < n; i++) {
        if (k + 1 == sizeof text)
            return false;
        if (p[i] != '_')
            text[k++] = p[i];
    }
    text[k] = 0;
    return k && lm_parse_double(text, out);
}

static bool read_int(const lm_jstr *s, int64_t base, int64_t *out)
{
    const char *p = s->s;
    size_t n = s->len, k = 0;
    char text[80], *end;

    lm_jstr_strip(&p, &n, NULL, LM_JSTRIP_LEFT | LM_JSTRIP_RIGHT);
    if (base == 2 || base == 8 || base == 16) {
        size_t sign = n && (*p == '-' || *p == '+');
        char mark = base == 2 ? 'b' : base == 8 ? 'o' : 'x';

        if (n > sign + 2 && p[sign] == '0' && (p[sign + 1] | 0x20) == mark) {
            if (sign)
                text[k++] = *p;
            p += sign + 2;
            n -= sign + 2;
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (k + 1 == sizeof text || lm_jstr_blank((unsigned char)p[i]))
            return false;
        if (p[i] != '_')
            text[k++] = p[i];
    }
    text[k] = 0;
    if (!k || base < 2 || base > 36)
        return false;
    *out = strtoll(text, &end, (int)base);
    return !*end && end != text && !(*out == INT64_MAX || *out == INT64_MIN);
}

LM_JFILTER(do_int)
{
    int64_t base, i;
    double f = 0;
    bool have = false;
    lm_code rc = lm_jarg_int(r, &arg[1], 10, &base);

    (void)c;
    if (!rc && v->kind == LM_JV_STR)
        rc = lm_jrun_work(r, v->u.s->len);
    if (rc)
        return rc;
    *out = arg[0].kind == LM_JV_MISSING ? lm_jv_int(0) : arg[0];
    if (lm_jv_integer(v, &i) || (v->kind == LM_JV_STR && read_int(v->u.s, base, &i))) {
        *out = lm_jv_int(i);
        return LM_OK;
    }
    if (v->kind == LM_JV_FLOAT) {
        f = v->u.f;
        have = true;
    } else if (v->kind == LM_JV_STR) {
        have = read_real(v->u.s, &f);
    } else if (v->kind == LM_JV_UNDEFINED) {
        char message[200];

        return lm_jrun_fail(r, "%s", lm_jv_undefined_message(v, message, sizeof message));
    }
    if (have && isfinite(f)) {
        if (fabs(f) >= 9.2e18)
            return lm_jrun_fail(r, "an integer beyond 64 bits");
        *out = lm_jv_int((int64_t)f);
    }
    return LM_OK;
}

LM_JFILTER(do_float)
{
    double f;

    (void)c;
    *out = arg[0].kind == LM_JV_MISSING ? lm_jv_float(0) : arg[0];
    if (v->kind == LM_JV_UNDEFINED) {
        char message[200];

        return lm_jrun_fail(r, "%s", lm_jv_undefined_message(v, message, sizeof message));
    }
    if (v->kind == LM_JV_STR && lm_jrun_work(r, v->u.s->len))
        return r->err->code;
    if (lm_jv_is_number(v))
        *out = lm_jv_float(lm_jv_real(v));
    else if (v->kind == LM_JV_STR && read_real(v->u.s, &f))
        *out = lm_jv_float(f);
    return LM_OK;
}

/* round(): to even at a tie of the decimal digits that the number has, as printing it does. */
static double round_common(double f, int64_t digits)
{
    char text[400];

    if (digits < 0) {
        double ten = pow(10, (double)-digits);

        return nearbyint(f / ten) * ten;
    }
    if (!isfinite(f) || digits > 300)
        return f;
    snprintf(text, sizeof text, "%.*f", (int)digits, f);
    return strtod(text, NULL);
}

LM_JFILTER(do_round)
{
    int64_t digits, i;
    double f, ten;
    lm_code rc = lm_jarg_int(r, &arg[0], 0, &digits);

    (void)c;
    if (!rc && !lm_jv_is_number(v))
        return lm_jrun_fail(r, "type %s cannot be rounded", lm_jv_type(v));
    if (rc)
        return rc;
    f = lm_jv_real(v);
    ten = pow(10, (double)digits);
    if (arg[1].kind == LM_JV_MISSING || lm_jv_is(&arg[1], "common")) {
        if (lm_jv_integer(v, &i) && digits >= 0)
            *out = lm_jv_int(i);
        else
            *out = lm_jv_float(round_common(f, digits));
        return LM_OK;
    }
    if (lm_jv_is(&arg[1], "ceil"))
        *out = lm_jv_float(ceil(f * ten) / ten);
    else if (lm_jv_is(&arg[1], "floor"))
        *out = lm_jv_float(floor(f * ten) / ten);
    else
        return lm_jrun_fail(r, "method must be common, ceil or floor");
    return LM_OK;
}

const lm_jfilter lm_jfilters_number[] = {
    { "abs", "", do_abs },
    { "int", "default=,base=", do_int },
    { "float", "default=", do_float },
    { "round", "precision=,method=", do_round },
    { NULL, NULL, NULL },
};
