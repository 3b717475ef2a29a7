/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_keys.c -- see gguf_keys.h. */
#include "convert/gguf_keys.h"

#include <stdio.h>
#include <string.h>

const char *lm_gguf_key_of(char buf[LM_GGUF_KEY], const char *arch, const char *rest)
{
    snprintf(buf, LM_GGUF_KEY, "%s.%s", arch, rest);
    return buf;
}

bool lm_gguf_has_key(const lm_arch *a, const char *gguf)
{
    for (const lm_gguf_key *k = a->gguf_keys; k->hf; k++)
        if (!strcmp(k->gguf, gguf))
            return true;
    return false;
}

lm_code lm_gguf_no_words(const lm_import *m, const char *what, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, m->path, NULL, "GGUF's %s has no %s", m->config.arch->gguf, what);
}

lm_code lm_gguf_whole(lm_gguf_reader *r, const char *rest, int64_t dflt, int64_t *out, bool *given)
{
    bool there;
    lm_code rc = lm_gguf_i64_or(r->g, lm_gguf_key_of(r->key, r->arch, rest), dflt, 0,
                                INT64_C(1) << 40, out, &there, r->e);

    if (given)
        *given = there;
    if (!rc && !there && dflt < 0)
        rc = lm_fail(r->e, LM_EFORMAT, lm_gguf_path(r->g), NULL, "'%s' is missing", r->key);
    return rc;
}

void lm_gguf_set_int(lm_gguf_reader *r, const char *key, int64_t v)
{
    json_object_set_new(r->o, key, json_integer(v));
}
