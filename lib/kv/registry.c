/* SPDX-License-Identifier: Apache-2.0 */
/* registry.c -- the list of methods, and their second names; what all forms have in common. */
#include <ctype.h>
#include <string.h>

#include "kernels/kv.h"
#include "kv/list.h"
#include "kv/methods/methods.h"

#define POINTER(name) &lm_kv_##name,

static const lm_kv_method *const methods[] = { LM_KV_METHODS(POINTER) };

/* Second names, and the methods with keys that they stand for; the last ones as vLLM has them. */
#define ALIASES(X)                                                  \
    X(fp8, "fp8_e4m3")                                              \
    X(k8v4, "turboquant:kbits=8")                                   \
    X(k4v4, "turboquant")                                           \
    X(k4v3, "turboquant:vbits=3")                                   \
    X(k3v4, "turboquant:kbits=3")                                   \
    X(k3v3, "turboquant:kbits=3,vbits=3")                           \
    X(k4v2, "kvarn")                                                \
    X(turboquant_k8v4, "turboquant:kbits=8,rotate=keys")            \
    X(turboquant_4bit_nc, "turboquant:rotate=keys")                 \
    X(turboquant_k3v4_nc, "turboquant:kbits=3,rotate=keys")         \
    X(turboquant_3bit_nc, "turboquant:kbits=3,vbits=3,rotate=keys") \
    X(kvarn_k4v2_g128, "kvarn")                                     \
    X(kvarn_k4v2_g64, "kvarn:group=64")                             \
    X(kvarn_k4v4_g128, "kvarn:vbits=4")                             \
    X(kvarn_k4v4_g64, "kvarn:vbits=4,group=64")

#define ALIAS(name, text)      { #name, text },
#define METHOD_NAME(name)      #name,
#define ALIAS_NAME(name, text) #name,

static const struct {
    const char *name, *text;
} aliases[] = { ALIASES(ALIAS) };

const char *const lm_kv_names[] = { LM_KV_METHODS(METHOD_NAME) ALIASES(ALIAS_NAME) NULL };
const char *const lm_kv_file_names[] = { LM_KV_CODES(METHOD_NAME) LM_KV_CACHEGEN,
                                         ALIASES(ALIAS_NAME) NULL };

const lm_kv_method *lm_kv_method_at(int i)
{
    return i >= 0 && i < (int)(sizeof methods / sizeof *methods) ? methods[i] : NULL;
}

const char *lm_kv_alias_at(int i, const char **text)
{
    if (i < 0 || i >= (int)(sizeof aliases / sizeof *aliases))
        return NULL;
    *text = aliases[i].text;
    return aliases[i].name;
}

/* True if the names are equal in any case and with '-' for '_'; b ends at its end or at ':'. */
static bool is_same(const char *a, const char *b)
{
    for (; *a && *b && *b != ':'; a++, b++)
        if ((*a == '-' ? '_' : tolower((unsigned char)*a)) != *b)
            return false;
    return !*a && (!*b || *b == ':');
}

const lm_kv_method *lm_kv_method_find(const char *name, const char **keys)
{
    *keys = "";
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (is_same(name, methods[i]->name))
            return methods[i];
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        if (!is_same(name, aliases[i].name))
            continue;
        for (size_t k = 0; k < sizeof methods / sizeof *methods; k++)
            if (is_same(methods[k]->name, aliases[i].text)) {
                *keys = strchr(aliases[i].text, ':');
                *keys = *keys ? *keys + 1 : "";
                return methods[k];
            }
    }
    return NULL;
}

lm_code lm_kv_put_format(const lm_kv_format *f, const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    lm_kv_format *own;
    char *name;
    if (lm_arena_alloc(q->arena, &own, 1, sizeof *own, e) ||
        lm_arena_strdup(q->arena, &name, q->name, strlen(q->name), e))
        return e->code;
    *own = *f;
    own->name = name;
    own->values = q->side == LM_KV_V;
    out->format = own;
    return LM_OK;
}

int64_t lm_kv_side_coded(const lm_kv_side *s, int64_t n)
{
    return s->format ? lm_kv_coded(s->format, LM_KV_MAX_TOKENS, s->residual, n) : 0;
}
