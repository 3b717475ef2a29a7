/* SPDX-License-Identifier: Apache-2.0 */
/* PCRE2 behind pretok_regex.h. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pretok_regex.h"

#include <pcre2.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"

struct lm_regex {
    pcre2_code *code;
};

struct lm_regex_match {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* PCRE2's \s also matches U+180E, so \s is written as White_Space.  Refuse syntax that Oniguruma
 * reads differently. */
static lm_code translate(const char *p, size_t len, const char *where, lm_buf *out, lm_err *e)
{
    lm_code rc = LM_OK;
    bool in_class = false;

    for (size_t i = 0; i < len && !rc; i++) {
        if (p[i] == '\\' && i + 1 < len) {
            char c = p[++i];
            if (c == 'h' || c == 'H')
                return lm_fail(e, LM_EFORMAT, where, NULL,
                               "\\%c at byte %zu of the pattern is not supported", c, i - 1);
            if (c == 's')
                rc = lm_buf_add(out, "\\p{White_Space}", 15, e);
            else if (c == 'S')
                rc = lm_buf_add(out, "\\P{White_Space}", 15, e);
            else
                rc = lm_buf_add(out, p + i - 1, 2, e);
            continue;
        }
        if (p[i] == '[')
            in_class = true;
        else if (p[i] == ']')
            in_class = false;
        else if (in_class && p[i] == '&' && i + 1 < len && p[i + 1] == '&')
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "&& at byte %zu of the pattern is not supported", i);
        rc = lm_buf_add(out, p + i, 1, e);
    }
    return rc;
}

lm_code lm_regex_new(const char *pattern, size_t len, bool literal, const char *where,
                     lm_regex **out, lm_err *e)
{
    lm_buf text = { 0 };
    uint32_t flags = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
    int bad = 0;
    PCRE2_SIZE at = 0;
    lm_code rc;

    *out = NULL;
    if (!len)
        return lm_fail(e, LM_EFORMAT, where, NULL, "the pattern is empty");
    if (literal)
        rc = lm_buf_add(&text, pattern, len, e);
    else
        rc = translate(pattern, len, where, &text, e);
    if (!rc)
        rc = lm_alloc_n(out, 1, sizeof **out, "a pattern", e);
    if (!rc) {
        (*out)->code = pcre2_compile((PCRE2_SPTR)text.data, text.len,
                                     literal ? PCRE2_UTF | PCRE2_LITERAL : flags, &bad, &at, NULL);
        if (!(*out)->code) {
            char why[160] = "";
            pcre2_get_error_message(bad, (PCRE2_UCHAR *)why, sizeof why);
            rc = lm_fail(e, LM_EFORMAT, where, NULL, "bad pattern near its byte %zu: %s",
                         (size_t)at, why);
            lm_regex_free(*out);
            *out = NULL;
        } else {
            pcre2_jit_compile((*out)->code, PCRE2_JIT_COMPLETE); /* without JIT it is only slower */
        }
    }
    lm_buf_fini(&text);
    return rc;
}

void lm_regex_free(lm_regex *r)
{
    if (r)
        pcre2_code_free(r->code);
    lm_free(r);
}

lm_code lm_regex_match_new(lm_regex_match **out, lm_err *e)
{
    lm_regex_match *m;
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "pattern matching", e);

    if (rc)
        return rc;
    m = *out;
    m->data = pcre2_match_data_create(1, NULL);
    m->context = pcre2_match_context_create(NULL);
    m->stack = pcre2_jit_stack_create(32 << 10, 8 << 20, NULL);
    if (!m->data || !m->context || !m->stack) {
        lm_regex_match_free(m);
        *out = NULL;
        return lm_fail(e, LM_ELIMIT, "pattern matching", NULL, "out of memory");
    }
    pcre2_set_match_limit(m->context, 1000000);
    pcre2_jit_stack_assign(m->context, NULL, m->stack);
    return LM_OK;
}

void lm_regex_match_free(lm_regex_match *m)
{
    if (!m)
        return;
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    pcre2_jit_stack_free(m->stack);
    lm_free(m);
}

lm_code lm_regex_find(const lm_regex *r, lm_regex_match *m, const char *text, size_t len,
                      size_t from, size_t *begin, size_t *end, bool *found, lm_err *e)
{
    int n =
        pcre2_match(r->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK, m->data, m->context);

    *found = n >= 0;
    if (n >= 0) {
        PCRE2_SIZE *o = pcre2_get_ovector_pointer(m->data);
        /* \K inside a look-ahead can put the start after the end. */
        *begin = o[0] < o[1] ? o[0] : o[1];
        *end = o[1];
        return LM_OK;
    }
    if (n == PCRE2_ERROR_NOMATCH)
        return LM_OK;
    char why[160] = "";
    pcre2_get_error_message(n, (PCRE2_UCHAR *)why, sizeof why);
    return lm_fail(e, LM_ELIMIT, "pre-tokeniser pattern", "use a simpler pattern",
                   "the pattern engine stopped at byte %zu: %s", from, why);
}
