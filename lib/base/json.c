/* SPDX-License-Identifier: Apache-2.0 */
/* json.c -- reading: jansson's parser with our limits and our messages. */
#include "base/json.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"

enum { DEEPEST = 512 };

/* Checked before parsing because the parser recurses; brackets inside strings do not count. */
static bool too_deep(const char *text, size_t len)
{
    int depth = 0;
    bool quoted = false;

    for (size_t i = 0; i < len; i++) {
        char c = text[i];

        if (quoted) {
            if (c == '\\')
                i++;
            else if (c == '"')
                quoted = false;
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            if (++depth > DEEPEST)
                return true;
        } else if (c == '}' || c == ']') {
            depth--;
        }
    }
    return false;
}

/* jansson's lexer ignores a failed allocation and drops the current character; then it may reach one of its assertions, or
 * the end of its memory.  So the parser is left at once: what it had allocated is lost. */
static _Thread_local jmp_buf *parser;

static void *allocate_json(size_t n)
{
    void *p = NULL;

    if (lm_realloc_n(&p, n, 1, "JSON", NULL) && parser)
        longjmp(*parser, 1);
    return p;
}

static void watch(void)
{
    json_set_alloc_funcs(allocate_json, lm_free);
}

lm_code lm_json_parse(const char *text, size_t len, const char *where, json_t **out, lm_err *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    json_error_t j;
    jmp_buf here;
    const char *nul = len ? memchr(text, 0, len) : NULL;

    if (nul) /* the parser ignores a NUL byte behind a number */
        return lm_fail(e, LM_EFORMAT, where, NULL, "not valid JSON: a NUL byte at offset %td",
                       nul - text);
    if (too_deep(text, len))
        return lm_fail(e, LM_EFORMAT, where, NULL, "JSON nested deeper than %d", DEEPEST);
    pthread_once(&once, watch);
    *out = NULL;
    if (setjmp(here)) {
        parser = NULL;
        return lm_fail(e, LM_ELIMIT, where, NULL, "no memory for a JSON text of %zu bytes", len);
    }
    parser = &here;
    *out = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &j);
    parser = NULL;
    if (*out)
        return LM_OK;
    for (char *s = j.text; *s; s++) /* the text may quote raw bytes of the input */
        *s = *s < ' ' || *s > '~' ? '?' : *s;
    return lm_fail(e, LM_EFORMAT, where, NULL, "not valid JSON, line %d column %d: %s", j.line,
                   j.column, j.text);
}

static lm_code check_number(const char *text, size_t n, const char *where, lm_err *e)
{
    char one[400]; /* longer than any double that is written without an exponent */
    double v;

    snprintf(one, sizeof one, "%.*s", n < sizeof one ? (int)n : (int)sizeof one - 1, text);
    if (n < sizeof one && lm_parse_double(one, &v))
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, where, NULL, "%.40s%s does not fit a double", one,
                   n > 40 ? "..." : "");
}

lm_code lm_json_check_numbers(const char *text, const char *where, lm_err *e)
{
    lm_code rc = LM_OK;

    for (const char *c = text; *c && !rc; c++) {
        if (*c == '"') {
            for (c++; *c && *c != '"'; c++)
                c += *c == '\\' && c[1];
            if (!*c)
                break;
        } else if (*c == '-' || (*c >= '0' && *c <= '9')) {
            size_t n = strspn(c, "+-.0123456789eE");

            rc = check_number(c, n, where, e);
            c += n - 1;
        }
    }
    return rc;
}

lm_code lm_json_load(const char *path, size_t limit, json_t **out, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = lm_file_read(path, limit, &text, e);

    if (!rc)
        rc = lm_json_parse(text.data, text.len, path, out, e);
    lm_buf_fini(&text);
    return rc;
}

/* The member, or NULL when it is absent or null. */
static lm_code find_member(const json_t *obj, const char *key, const json_t **out,
                           const char *where, lm_err *e)
{
    if (!json_is_object(obj))
        return lm_fail(e, LM_EFORMAT, where, NULL, "a JSON object is needed to hold '%s'", key);
    *out = json_object_get(obj, key);
    if (json_is_null(*out))
        *out = NULL;
    return LM_OK;
}

static const char *type_name(const json_t *v)
{
    static const char *const names[] = { "an object",     "an array", "a string", "an integer",
                                         "a real number", "true",     "false",    "null" };

    return names[json_typeof(v)];
}

static lm_code wrong_type(const json_t *v, const char *key, const char *need, const char *where,
                          lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, where, NULL, "'%s' is %s, %s is needed", key, type_name(v), need);
}

static lm_code check_int(const json_t *v, const char *key, int64_t min, int64_t max, int64_t *out,
                         const char *where, lm_err *e)
{
    int64_t n;

    if (!json_is_integer(v))
        return wrong_type(v, key, "an integer", where, e);
    n = json_integer_value(v);
    if (n < min || n > max)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "'%s' is %" PRId64 ", %" PRId64 " to %" PRId64 " is possible", key, n, min,
                       max);
    *out = n;
    return LM_OK;
}

lm_code lm_json_i64(const json_t *obj, const char *key, int64_t min, int64_t max, int64_t *out,
                    const char *where, lm_err *e)
{
    const json_t *v = NULL;
    lm_code rc = find_member(obj, key, &v, where, e);

    if (rc)
        return rc;
    if (!v)
        return lm_fail(e, LM_EFORMAT, where, NULL, "'%s' is missing", key);
    return check_int(v, key, min, max, out, where, e);
}

lm_code lm_json_i64_or(const json_t *obj, const char *key, int64_t dflt, int64_t min, int64_t max,
                       int64_t *out, const char *where, lm_err *e)
{
    const json_t *v = NULL;
    lm_code rc = find_member(obj, key, &v, where, e);

    if (rc)
        return rc;
    if (v)
        return check_int(v, key, min, max, out, where, e);
    *out = dflt;
    return LM_OK;
}

lm_code lm_json_f64_or(const json_t *obj, const char *key, double dflt, double *out,
                       const char *where, lm_err *e)
{
    const json_t *v = NULL;
    lm_code rc = find_member(obj, key, &v, where, e);

    if (rc)
        return rc;
    if (v && !json_is_number(v))
        return wrong_type(v, key, "a number", where, e);
    *out = v ? json_number_value(v) : dflt;
    return LM_OK;
}

lm_code lm_json_bool_or(const json_t *obj, const char *key, bool dflt, bool *out, const char *where,
                        lm_err *e)
{
    const json_t *v = NULL;
    lm_code rc = find_member(obj, key, &v, where, e);

    if (rc)
        return rc;
    if (v && !json_is_boolean(v))
        return wrong_type(v, key, "true or false", where, e);
    *out = v ? json_is_true(v) : dflt;
    return LM_OK;
}

lm_code lm_json_str_or(const json_t *obj, const char *key, const char *dflt, const char **out,
                       const char *where, lm_err *e)
{
    const json_t *v = NULL;
    lm_code rc = find_member(obj, key, &v, where, e);

    if (rc)
        return rc;
    if (v && !json_is_string(v))
        return wrong_type(v, key, "a string", where, e);
    if (v && strlen(json_string_value(v)) != json_string_length(v))
        return lm_fail(e, LM_EFORMAT, where, NULL, "'%s' holds a NUL character", key);
    *out = v ? json_string_value(v) : dflt;
    return LM_OK;
}
