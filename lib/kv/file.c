/* SPDX-License-Identifier: Apache-2.0 */
/* file.c -- names, shapes and limits of kv-cache(5), for its writer and its reader. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "kv/file_impl.h"

static const char *const side_name[2][2] = { { "k", "v" }, { "latent", "rotary" } };

void kv_tensor_name(const kv_tensor *t, char name[KV_NAME])
{
    switch (t->kind) {
    case KV_IDS:
        snprintf(name, KV_NAME, "token_ids");
        break;
    case KV_POSITIONS:
        snprintf(name, KV_NAME, "positions");
        break;
    case KV_ROWS:
        snprintf(name, KV_NAME, "layers.%lld.%s%s", (long long)(t->part / 2),
                 side_name[t->latent][t->part % 2], lm_kv_section_suffix(t->section));
        break;
    case KV_STATE:
    case KV_CONV:
        snprintf(name, KV_NAME, "layers.%lld.%s", (long long)(t->part / 2),
                 t->kind == KV_STATE ? "state" : "conv");
        break;
    case KV_AT:
        snprintf(name, KV_NAME, "layers.%lld.positions", (long long)(t->part / 2));
        break;
    case KV_ORDER:
        snprintf(name, KV_NAME, "layers.%lld.order", (long long)(t->part / 2));
        break;
    case KV_MASS:
        snprintf(name, KV_NAME, "layers.%lld.mass", (long long)(t->part / 2));
        break;
    case KV_TABLES:
        snprintf(name, KV_NAME, "tables.level.%d", t->level);
        break;
    case KV_CHUNK:
        snprintf(name, KV_NAME, "chunk.%lld.level.%d", (long long)t->chunk, t->level);
        break;
    default:
        name[0] = 0;
    }
}

/* A number of up to nine digits; *at moves behind it. */
static bool read_number(const char **at, int64_t *v)
{
    int digits = 0;
    for (*v = 0; **at >= '0' && **at <= '9' && digits < 9; (*at)++, digits++)
        *v = 10 * *v + (**at - '0');
    return digits > 0;
}

static bool skip(const char **at, const char *text)
{
    size_t n = strlen(text);
    if (strncmp(*at, text, n))
        return false;
    *at += n;
    return true;
}

/* A tensor of a layer, by what follows its number. */
static kv_tensor layer_tensor(int64_t layer, const char *p)
{
    static const struct {
        const char *name;
        kv_tensor_kind kind;
    } whole[] = { { "positions", KV_AT },
                  { "order", KV_ORDER },
                  { "mass", KV_MASS },
                  { "state", KV_STATE },
                  { "conv", KV_CONV } };
    kv_tensor t = { .kind = KV_ROWS, .part = 2 * layer };
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        if (!strcmp(p, whole[i].name))
            t.kind = whole[i].kind;
    if (t.kind != KV_ROWS)
        return t;
    for (int i = 0; i < 4; i++) {
        const char *at = p;
        if (!skip(&at, side_name[i / 2][i % 2]) || (*at && *at != '.'))
            continue;
        t.latent = i / 2;
        t.part = 2 * layer + i % 2;
        for (int s = 0; s < LM_KV_SECTIONS; s++)
            if (!strcmp(at, lm_kv_section_suffix((lm_kv_section)s)))
                t.section = (lm_kv_section)s;
    }
    return t;
}

kv_tensor kv_tensor_of(const char *name)
{
    kv_tensor t = { .kind = KV_UNKNOWN };
    int64_t layer, level;
    char again[KV_NAME];
    const char *p = name;
    if (!strcmp(name, "token_ids")) {
        t.kind = KV_IDS;
    } else if (!strcmp(name, "positions")) {
        t.kind = KV_POSITIONS;
    } else if (skip(&p, "layers.") && read_number(&p, &layer) && *p++ == '.') {
        t = layer_tensor(layer, p);
    } else if (skip(&p, "tables.level.") && read_number(&p, &level)) {
        t.kind = KV_TABLES;
        t.level = (int)level;
    } else if (skip(&p, "chunk.") && read_number(&p, &t.chunk) && skip(&p, ".level.") &&
               read_number(&p, &level)) {
        t.kind = KV_CHUNK;
        t.level = (int)level;
    }
    kv_tensor_name(&t, again);
    if (strcmp(again, name)) /* a number with zeros in front, or a text behind */
        t.kind = KV_UNKNOWN;
    return t;
}

/* A layer has rows of heads, latents, or a state. */
static lm_code check_layer(const lm_kv_about *a, int64_t i, const char *where, lm_code code,
                           lm_err *e)
{
    const int64_t most = LM_CACHEGEN_CHANNELS, heads = a->kv_heads[i], dim = a->head_dim[i],
                  latent = a->latent ? a->latent[i] : 0, state = kv_state_numbers(a, KV_STATE, i),
                  conv = kv_state_numbers(a, KV_CONV, i);
    if (!a->state != !a->conv)
        return lm_fail(e, code, where, NULL, "it has one of state and conv");
    if (a->state && a->rows)
        return lm_fail(
            e, code, where, NULL,
            "it has \"state\" and \"rows\": no tokens are dropped beside states of layers");
    if (state || conv) {
        if (heads || dim || latent || state < 1 || state > INT32_MAX || conv < 0 ||
            conv > INT32_MAX)
            return lm_fail(e, code, where, NULL,
                           "layer %lld has a state of %lld and %lld numbers beside %lld heads",
                           (long long)i, (long long)state, (long long)conv, (long long)heads);
        return LM_OK;
    }
    if (heads < 1 || dim < 1 || heads > most || dim > most || heads * dim > most)
        return lm_fail(e, code, where, NULL,
                       "layer %lld has %lld heads of %lld numbers, together 1 to %d are possible",
                       (long long)i, (long long)heads, (long long)dim, LM_CACHEGEN_CHANNELS);
    if (latent < 0 || latent > most || (latent && heads != 1))
        return lm_fail(e, code, where, NULL,
                       "layer %lld has %lld latents with a rotated part of %lld numbers",
                       (long long)i, (long long)heads, (long long)latent);
    if (a->rows && (a->rows[i] < 1 || a->rows[i] > a->tokens))
        return lm_fail(e, code, where, NULL, "layer %lld has %lld of %lld tokens", (long long)i,
                       (long long)a->rows[i], (long long)a->tokens);
    return LM_OK;
}

lm_code kv_check_about(const lm_kv_about *a, const char *where, lm_code code, lm_err *e)
{
    if (a->layers < 1 || a->layers > LM_KV_FILE_LAYERS)
        return lm_fail(e, code, where, NULL, "a cache of %lld layers, 1 to %d are possible",
                       (long long)a->layers, LM_KV_FILE_LAYERS);
    if (a->tokens < 1 || a->tokens > INT32_MAX)
        return lm_fail(e, code, where, NULL, "a cache of %lld tokens, 1 to %d are possible",
                       (long long)a->tokens, INT32_MAX);
    if (a->act != LM_DTYPE_F32 && a->act != LM_DTYPE_F16 && a->act != LM_DTYPE_BF16)
        return lm_fail(e, code, where, NULL, "a cache in %s, f32, f16 and bf16 are possible",
                       a->act == LM_DTYPE_NONE ? "an unknown type" : lm_dtype_name(a->act));
    for (int64_t i = 0; i < a->layers; i++)
        if (check_layer(a, i, where, code, e))
            return code;
    if (a->policy ? !a->rows || a->prompt < 1 || a->prompt > a->tokens : a->ordered || a->weighed)
        return lm_fail(e, code, where, NULL,
                       "a policy, with a prompt of 1 to %lld tokens, goes with rows that stay",
                       (long long)a->tokens);
    for (int64_t i = 0; i < kv_parts(a) && a->form; i++) {
        lm_kv_shape s = lm_kv_about_shape(a, i);
        if (lm_kv_about_has_state(a, i / 2) && s.form->format)
            return lm_fail(e, code, where, NULL, "layer %lld has a state, and a form of rows",
                           (long long)(i / 2));
        if (a->latent && a->latent[i / 2] > 0 && s.form->pre_rope)
            return lm_fail(e, code, where, NULL,
                           "layer %lld has latents, which are not rotated by positions, and the "
                           "form of keys before that",
                           (long long)(i / 2));
        if (lm_kv_shape_check(&s, e)) {
            e->code = code;
            lm_err_in(e, "%s%sforms", where, *where ? ": " : "");
            return code;
        }
    }
    return LM_OK;
}

lm_kv_shape lm_kv_about_shape(const lm_kv_about *a, int64_t part)
{
    static const lm_kv_side plain;
    return (lm_kv_shape){ .form = a->form ? &a->form[part] : &plain,
                          .act = a->act,
                          .page = a->form && a->form[part].format ? a->page : 0,
                          .kv_heads = a->kv_heads[part / 2],
                          .head_dim = lm_kv_about_dim(a, part),
                          .n = lm_kv_about_rows(a, part / 2) };
}

void kv_level_parts(const lm_kv_about *a, int level, lm_cachegen_part *part)
{
    for (int64_t i = 0; i < kv_parts(a); i++)
        part[i] = (lm_cachegen_part){ a->kv_heads[i / 2], lm_kv_about_dim(a, i),
                                      lm_cachegen_bins(level, i % 2, i / 2, a->layers) };
}

bool kv_all_finite(lm_dtype d, const void *x, size_t n)
{
    uint32_t infinite = d == LM_DTYPE_F16 ? 0x7c00 : d == LM_DTYPE_BF16 ? 0x7f80 : 0x7f800000;
    uint32_t most = 0;
    const char *p = x;
    if (d == LM_DTYPE_F32) {
        for (size_t i = 0; i < n; i++) {
            uint32_t u;
            memcpy(&u, p + 4 * i, 4);
            u &= 0x7fffffff;
            most = u > most ? u : most;
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            uint16_t u;
            memcpy(&u, p + 2 * i, 2);
            u &= 0x7fff;
            most = u > most ? u : most;
        }
    }
    return most < infinite;
}
