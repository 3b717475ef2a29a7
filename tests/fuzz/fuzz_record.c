/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_record.c -- one line of tuning data: what is accepted has the members of its kind, and renaming columns keeps the
 * reader in bounds. */
#include <stdint.h>
#include <stdlib.h>

#include "text/records.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool is_text(const json_t *v)
{
    return json_is_string(v) || json_array_size(v) > 0;
}

/* Every message has a role; prompts may have become empty lists only by sharing, which is refused. */
static bool is_whole(const lm_text_record *r)
{
    switch (r->kind) {
    case LM_RECORD_TEXT:
        return json_is_string(r->text);
    case LM_RECORD_MESSAGES:
        return json_array_size(r->messages) > 0;
    case LM_RECORD_PROMPT:
        return is_text(r->prompt);
    case LM_RECORD_COMPLETION:
    case LM_RECORD_UNPAIRED:
        return is_text(r->prompt) && is_text(r->completion);
    case LM_RECORD_PREFERENCE:
        return is_text(r->prompt) && json_typeof(r->chosen) == json_typeof(r->rejected) &&
               !json_equal(r->chosen, r->rejected);
    case LM_RECORD_STEPWISE:
        return is_text(r->prompt) && json_array_size(r->steps) == json_array_size(r->right);
    default:
        return false;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static lm_text_record_map map;
    lm_text_record r;
    lm_err e = { 0 };
    if (!map.n && lm_text_record_map_add(&map, "prompt=a,completion=b.c", &e))
        abort();
    for (int renamed = 0; renamed < 2; renamed++) {
        e = (lm_err){ 0 };
        lm_code rc =
            lm_text_record_read((const char *)data, size, renamed ? &map : NULL, "f", &r, &e);
        if (!rc && !is_whole(&r))
            abort();
        if (rc && (!e.code || r.line))
            abort();
        lm_text_record_fini(&r);
    }
    return 0;
}
