/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_kv_spec.c -- specifications of caches: any text gives a canonical text that is its own, or one error; each
 * layer and side then has one form, or there is one error. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kv/spec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LAYERS = 6 };

static void bind_spec(const lm_kv_spec *s, int64_t head_dim)
{
    lm_kv_site site[LAYERS];
    lm_kv_plan *p;
    lm_err e = { 0 };
    for (int l = 0; l < LAYERS; l++)
        site[l] = (lm_kv_site){ .layer = l,
                                .layers = LAYERS,
                                .kv_heads = 2,
                                .head_dim = head_dim,
                                .window = l % 2 ? 128 : 0,
                                .max_positions = 1024,
                                .act = LM_DTYPE_BF16,
                                .rope = true };
    if (lm_kv_spec_bind(s, site, LAYERS, NULL, &p, &e)) {
        if (!e.what[0] || p)
            abort();
        return;
    }
    if (p->page % 64 || p->page > LM_KV_MAX_TOKENS || !(lm_kv_plan_bytes(p, site) > 0))
        abort();
    for (int i = 0; i < 2 * LAYERS; i++)
        if (p->side[i].format && lm_kv_page_bytes(p->side[i].format, p->page, head_dim) == SIZE_MAX)
            abort();
    lm_kv_plan_free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_kv_spec *s = NULL, *again = NULL;
    lm_err e = { 0 };
    char *text = malloc(size + 1);
    memcpy(text, data, size);
    text[size] = 0;
    if (lm_kv_spec_parse(text, &s, &e)) {
        if (!e.what[0] || s)
            abort();
    } else {
        if (lm_kv_spec_parse(lm_kv_spec_text(s), &again, &e) ||
            strcmp(lm_kv_spec_text(s), lm_kv_spec_text(again)))
            abort();
        bind_spec(s, 64);
        bind_spec(again, 80);
    }
    lm_kv_spec_free(s);
    lm_kv_spec_free(again);
    free(text);
    return 0;
}
