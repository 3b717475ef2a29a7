/* SPDX-License-Identifier: Apache-2.0 */
/* folder_json.c -- see folder_json.h. */
#include "format/folder_json.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static lm_code put_value(const json_t *v, int depth, lm_buf *out, lm_err *e);

static lm_code put_text(lm_buf *out, const char *s, lm_err *e)
{
    return lm_buf_add(out, s, strlen(s), e);
}

static lm_code put_string(const char *s, size_t len, lm_buf *out, lm_err *e)
{
    lm_jw w;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_strn(&w, NULL, s, len);
    if (w.rc)
        return w.rc;
    return LM_OK;
}

static lm_code put_real(double v, lm_buf *out, lm_err *e)
{
    char buf[40];

    lm_json_real(v, buf);
    return put_text(out, buf, e);
}

static lm_code put_line(lm_buf *out, int depth, lm_err *e)
{
    return lm_buf_addf(out, e, "\n%*s", 2 * depth, "");
}

static lm_code put_object(const json_t *v, int depth, lm_buf *out, lm_err *e)
{
    const char *key;
    json_t *member;
    bool first = true;
    lm_code rc = put_text(out, "{", e);

    json_object_foreach((json_t *)(uintptr_t)v, key, member)
    {
        if (!rc && !first)
            rc = put_text(out, ",", e);
        first = false;
        if (rc || (rc = put_line(out, depth + 1, e)) ||
            (rc = put_string(key, strlen(key), out, e)) || (rc = put_text(out, ": ", e)) ||
            (rc = put_value(member, depth + 1, out, e)))
            return rc;
    }
    if (!rc && !first)
        rc = put_line(out, depth, e);
    return rc ? rc : put_text(out, "}", e);
}

static lm_code put_array(const json_t *v, int depth, lm_buf *out, lm_err *e)
{
    size_t n = json_array_size(v);
    lm_code rc = put_text(out, "[", e);

    for (size_t i = 0; !rc && i < n; i++) {
        if (i)
            rc = put_text(out, ",", e);
        if (!rc)
            rc = put_line(out, depth + 1, e);
        if (!rc)
            rc = put_value(json_array_get(v, i), depth + 1, out, e);
    }
    if (!rc && n)
        rc = put_line(out, depth, e);
    return rc ? rc : put_text(out, "]", e);
}

static lm_code put_value(const json_t *v, int depth, lm_buf *out, lm_err *e)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return put_object(v, depth, out, e);
    case JSON_ARRAY:
        return put_array(v, depth, out, e);
    case JSON_STRING:
        return put_string(json_string_value(v), json_string_length(v), out, e);
    case JSON_INTEGER:
        return lm_buf_addf(out, e, "%" PRId64, (int64_t)json_integer_value(v));
    case JSON_REAL:
        return put_real(json_real_value(v), out, e);
    case JSON_TRUE:
        return put_text(out, "true", e);
    case JSON_FALSE:
        return put_text(out, "false", e);
    default:
        return put_text(out, "null", e);
    }
}

lm_code lm_json_pretty(const json_t *tree, lm_buf *out, lm_err *e)
{
    lm_code rc = put_value(tree, 0, out, e);
    return rc ? rc : put_text(out, "\n", e);
}

static bool set_type(json_t *part, const char *name)
{
    static const char *const keys[] = { "dtype", "torch_dtype" };
    bool changed = false;

    for (int i = 0; i < 2; i++) {
        const char *have = json_string_value(json_object_get(part, keys[i]));
        if (have && strcmp(have, name))
            changed |= !json_object_set_new(part, keys[i], json_string(name));
    }
    return changed;
}

bool lm_config_set_dtype(json_t *config, const char *name)
{
    static const char suffix[] = "_config";
    bool changed = set_type(config, name);
    const char *key;
    json_t *part;

    json_object_foreach(config, key, part)
    {
        size_t n = strlen(key), tail = sizeof suffix - 1;
        if (n > tail && !strcmp(key + n - tail, suffix) && strcmp(key, "quantization_config"))
            changed |= set_type(part, name);
    }
    return changed;
}
