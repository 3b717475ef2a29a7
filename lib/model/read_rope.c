/* SPDX-License-Identifier: Apache-2.0 */
/* read_rope.c -- reads the rotary tables of a config.json. */
#include <inttypes.h>
#include <string.h>

#include "model/arch_read.h"

/* The object with the scaling of positions, and its key.  Old files have rope_scaling, newer ones
 * rope_parameters, which holds rope_theta too.  NULL: none. */
static lm_code rope_object(const json_t *o, const char *where, const json_t **s, const char **key,
                           lm_err *e)
{
    static const char *const keys[2] = { "rope_parameters", "rope_scaling" };
    const json_t *found[2];
    const char *inner;
    json_t *v;

    *s = NULL;
    *key = keys[0];
    for (int i = 0; i < 2; i++) {
        found[i] = json_object_get(o, keys[i]);
        found[i] = json_is_null(found[i]) ? NULL : found[i];
        if (found[i] && !json_is_object(found[i]))
            return lm_read_bad(where, keys[i], e, "is not an object");
        if (found[i] && !*s) {
            *s = found[i];
            *key = keys[i];
        }
    }
    if (found[0] && found[1] &&
        !json_equal((json_t *)(uintptr_t)found[0], (json_t *)(uintptr_t)found[1]))
        return lm_fail(e, LM_EUSAGE, where, "keep one of them",
                       "\"rope_parameters\" and \"rope_scaling\" differ");
    json_object_foreach((json_t *)(uintptr_t)*s, inner, v)
    {
        if (json_is_object(v))
            return lm_fail(e, LM_EUSAGE, where, NULL,
                           "\"%s\": a separate set for \"%s\" is not supported", *key, inner);
    }
    return LM_OK;
}

/* Without a type, only keys of all types are allowed: the type of a scaling is not guessed. */
static lm_code check_untyped(const json_t *s, const char *where, const char *key, lm_err *e)
{
    static const char *const harmless[] = { "rope_theta", "partial_rotary_factor", "rope_type",
                                            "type" };
    const char *inner;
    json_t *v;

    json_object_foreach((json_t *)(uintptr_t)s, inner, v)
    {
        bool fine = json_is_null(v);
        for (size_t i = 0; !fine && i < sizeof harmless / sizeof *harmless; i++)
            fine = !strcmp(inner, harmless[i]);
        if (!fine)
            return lm_fail(e, LM_EUSAGE, where,
                           "add \"rope_type\": default, linear, dynamic, llama3 or yarn",
                           "\"%s\" has \"%s\", but no \"rope_type\"", key, inner);
    }
    return LM_OK;
}

static lm_code read_rope_numbers(const json_t *s, const char *where, lm_rope_config *r, lm_err *e)
{
    if (lm_json_f64_or(s, "rope_theta", r->theta, &r->theta, where, e) ||
        lm_json_f64_or(s, "factor", 0, &r->factor, where, e) ||
        lm_json_f64_or(s, "low_freq_factor", 1, &r->low_freq, where, e) ||
        lm_json_f64_or(s, "high_freq_factor", 4, &r->high_freq, where, e) ||
        lm_json_f64_or(s, "beta_fast", 32, &r->beta_fast, where, e) ||
        lm_json_f64_or(s, "beta_slow", 1, &r->beta_slow, where, e) ||
        lm_json_f64_or(s, "attention_factor", 0, &r->attention, where, e) ||
        lm_json_f64_or(s, "mscale", 0, &r->mscale, where, e) ||
        lm_json_f64_or(s, "mscale_all_dim", 0, &r->mscale_all_dim, where, e) ||
        lm_json_bool_or(s, "truncate", true, &r->truncate, where, e))
        return e->code;
    return lm_json_i64_or(s, "original_max_position_embeddings", 0, 0, INT64_C(1) << 40,
                          &r->original, where, e);
}

/* Old files say "type", newer "rope_type". */
static lm_code read_rope_type(const json_t *s, const char *where, const char *key,
                              lm_rope_config *r, lm_err *e)
{
    static const struct {
        const char *name;
        lm_rope_type type;
    } types[] = { { "default", LM_ROPE_DEFAULT },
                  { "linear", LM_ROPE_LINEAR },
                  { "dynamic", LM_ROPE_DYNAMIC },
                  { "llama3", LM_ROPE_LLAMA3 },
                  { "yarn", LM_ROPE_YARN } };
    const char *type = NULL, *old = NULL;

    if (lm_json_str_or(s, "type", NULL, &old, where, e) ||
        lm_json_str_or(s, "rope_type", old, &type, where, e))
        return e->code;
    if (!type)
        return check_untyped(s, where, key, e);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(type, types[i].name) != 0)
            continue;
        r->type = types[i].type;
        if (r->type != LM_ROPE_DEFAULT && !(r->factor >= 1))
            return lm_fail(e, LM_EUSAGE, where, NULL, "\"%s.factor\": is missing or below 1", key);
        if (r->type == LM_ROPE_LLAMA3 && (!(r->high_freq > r->low_freq) || !r->original))
            return lm_read_bad(where, key, e,
                               "llama3 needs original_max_position_embeddings and "
                               "high_freq_factor > low_freq_factor");
        return LM_OK;
    }
    return lm_fail(e, LM_EUSAGE, where, "default, linear, dynamic, llama3 and yarn are supported",
                   "unknown rope_type \"%s\"", type);
}

/* partial_rotary_factor of an object or the config itself, `absent` without the key.  Architectures without partial rotation
 * have `absent` 1, and allow nothing else. */
static lm_code read_partial(const json_t *s, const char *where, double absent, bool some,
                            double *partial, lm_err *e)
{
    if (lm_json_f64_or(s, "partial_rotary_factor", absent, partial, where, e))
        return e->code;
    if (!some && (*partial < 1 || *partial > 1))
        return lm_read_bad(where, "partial_rotary_factor", e, "only 1 is supported");
    return LM_OK;
}

/* Read one object of rope_parameters or rope_scaling, `key` of the config, to *r, whose type and theta are set. */
static lm_code read_object(const json_t *s, const char *where, const char *key, lm_rope_config *r,
                           lm_err *e)
{
    if (read_rope_numbers(s, where, r, e))
        return e->code;
    return read_rope_type(s, where, key, r, e);
}

/* Table 0, and the part of a head that it rotates. */
static lm_code read_rope(const json_t *o, const char *where, double theta, double absent, bool some,
                         double *partial, lm_config *c, lm_err *e)
{
    const json_t *s = NULL;
    const char *key;

    c->ropes = 1;
    c->rope[0].type = LM_ROPE_DEFAULT;
    if (rope_object(o, where, &s, &key, e) || read_partial(o, where, absent, some, partial, e) ||
        (s && read_partial(s, where, *partial, some, partial, e)) ||
        lm_json_f64_or(o, "rope_theta", theta, &c->rope[0].theta, where, e))
        return e->code;
    return s ? read_object(s, where, key, &c->rope[0], e) : LM_OK;
}

lm_code lm_read_rope(const json_t *o, const char *where, double theta, lm_config *c, lm_err *e)
{
    double partial;
    return read_rope(o, where, theta, 1, false, &partial, c, e);
}

lm_code lm_read_partial_rope(const json_t *o, const char *where, double theta, double absent,
                             lm_config *c, lm_err *e)
{
    double partial;
    if (read_rope(o, where, theta, absent, true, &partial, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++) {
        lm_layer *y = &c->layer[l];
        const bool in_range = partial > 0 && partial <= 1;
        y->rotary = in_range ? (int64_t)((double)y->head_dim * partial) : 0;
        if (y->rotary < 2 || y->rotary % 2)
            return lm_fail(e, LM_EUSAGE, where, NULL,
                           "\"partial_rotary_factor\": %g of \"head_dim\" %" PRId64
                           " is not an even number of at most that",
                           partial, y->head_dim);
    }
    return LM_OK;
}

/* One of two tables, from an object of rope_parameters (NULL: none) or from `key` of the config
 * itself. */
static lm_code read_table(const json_t *o, const char *where, const json_t *s, const char *key,
                          double theta, lm_rope_config *r, lm_err *e)
{
    double partial;
    r->type = LM_ROPE_DEFAULT;
    if (lm_json_f64_or(o, key, theta, &r->theta, where, e))
        return e->code;
    if (!s || json_is_null(s))
        return LM_OK;
    if (!json_is_object(s))
        return lm_read_bad(where, "rope_parameters", e, "holds something that is not an object");
    return read_partial(s, where, 1, false, &partial, e) ||
                   read_object(s, where, "rope_parameters", r, e)
               ? e->code
               : LM_OK;
}

lm_code lm_read_two_ropes(const json_t *o, const char *where, double theta, const char *near_key,
                          double near_theta, lm_config *c, lm_err *e)
{
    static const char *const kinds[2] = { "full_attention", "sliding_attention" };
    const json_t *both = json_object_get(o, "rope_parameters"), *of[2];

    for (int i = 0; i < 2; i++)
        of[i] = json_object_get(both, kinds[i]);
    if (json_object_size(both) && !of[0] && !of[1])
        return lm_fail(e, LM_EUSAGE, where,
                       "give it a \"full_attention\" and a \"sliding_attention\"",
                       "\"rope_parameters\" has no set for a kind of layer");
    if (of[0] || of[1]) {
        const json_t *scaling = json_object_get(o, "rope_scaling");
        if (scaling && !json_is_null(scaling))
            return lm_fail(e, LM_EUSAGE, where, "keep one of them",
                           "\"rope_parameters\" and \"rope_scaling\" are both given");
        if (read_table(o, where, of[0], "rope_theta", theta, &c->rope[0], e))
            return e->code;
    } else if (lm_read_rope(o, where, theta, c, e)) {
        return e->code;
    }
    c->ropes = 2;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].rope = c->layer[l].window > 0;
    return read_table(o, where, of[1], near_key, near_theta, &c->rope[1], e);
}
