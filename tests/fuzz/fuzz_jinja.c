/* SPDX-License-Identifier: Apache-2.0 */
/* A chat template, and behind a line with "===" the JSON of its variables. */
#include <string.h>

#include "base/json.h"
#include "text/jinja.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    static const char line[] = "\n===\n";
    const lm_jinja_limits l = { .steps = 200000, .output = 1 << 20, .memory = 16 << 20, .now = 1 };
    const unsigned char *cut = memmem(data, size, line, sizeof line - 1);
    size_t n = cut ? (size_t)(cut - data) : size;
    lm_text_spans spans = { 0 };
    lm_jinja *t = NULL;
    json_t *vars = NULL;
    lm_buf out = { 0 };
    lm_err e = { 0 }, bad = { 0 };

    if (cut && lm_json_parse((const char *)cut + sizeof line - 1, size - n - (sizeof line - 1),
                             "vars", &vars, &bad))
        vars = NULL;
    if (!lm_jinja_compile((const char *)data, n, "template", &t, &e))
        (void)lm_jinja_render(t, json_is_object(vars) ? vars : NULL, &l, &out, &spans, &e);
    if (out.len > 1 << 20)
        __builtin_trap();
    lm_jinja_free(t);
    json_decref(vars);
    lm_text_spans_fini(&spans);
    lm_buf_fini(&out);
    return 0;
}
