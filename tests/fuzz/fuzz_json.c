/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_json.c -- JSON text: a text that parses must parse again after it is printed. */
#include <stdint.h>
#include <stdlib.h>

#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *v = NULL, *again = NULL;
    lm_buf b = { 0 };
    lm_jw w;
    lm_err e = { 0 };
    int64_t n;
    const char *s;

    if (lm_json_parse((const char *)data, size, "fuzz", &v, &e))
        return 0;
    lm_json_i64_or(v, "a", 0, 0, 100, &n, "fuzz", &e);
    lm_json_str_or(v, "b", NULL, &s, "fuzz", &e);
    lm_jw_begin(&w, &b, 2, NULL);
    lm_jw_arr(&w, NULL);
    lm_jw_strn(&w, NULL, (const char *)data, size);
    lm_jw_json(&w, NULL, v);
    lm_jw_close_arr(&w);
    e = (lm_err){ 0 };
    if (lm_jw_end(&w) || (json_is_object(v) && lm_json_parse(b.data, b.len, "again", &again, &e)))
        abort();
    json_decref(again);
    json_decref(v);
    lm_buf_fini(&b);
    return 0;
}
