/* SPDX-License-Identifier: Apache-2.0 */
/* cache_rope.c -- rotates keys of caches by positions, and back. */
#include "model/cache_rope.h"

#include <math.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/config.h"

enum { MOST_POSITIONS = 1 << 22 };
static const char where[] = "rope";

typedef struct {
    lm_config config; /* its tables alone */
    int64_t *layer;   /* the table of each layer; -1: none */
    int64_t rows[LM_MOST_ROPES];
    float *table[LM_MOST_ROPES];
} key_rotation;

/* ---- Settings ---- */

static lm_code read_type(const json_t *o, lm_rope_type *out, lm_err *e)
{
    static const char *const names[] = { [LM_ROPE_DEFAULT] = "default",
                                         [LM_ROPE_LINEAR] = "linear",
                                         [LM_ROPE_DYNAMIC] = "dynamic",
                                         [LM_ROPE_LLAMA3] = "llama3",
                                         [LM_ROPE_YARN] = "yarn" };
    const char *type = NULL;
    if (lm_json_str_or(o, "type", "", &type, where, e))
        return e->code;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(type, names[i])) {
            *out = (lm_rope_type)i;
            return LM_OK;
        }
    return lm_fail(e, LM_EFORMAT, where, NULL, "a table of an unknown type");
}

/* The members that lm_rope_text writes. */
static lm_code read_table(const json_t *o, int i, int64_t widest, key_rotation *k, lm_err *e)
{
    lm_rope_config *r = &k->config.rope[i];
    int64_t trained = 0;
    lm_code rc = read_type(o, &r->type, e);
    rc = rc ? rc : lm_json_i64(o, "dim", 2, widest, &r->dim, where, e);
    const struct {
        const char *key;
        double *to;
    } reals[] = { { "theta", &r->theta },
                  { "factor", &r->factor },
                  { "low_freq", &r->low_freq },
                  { "high_freq", &r->high_freq },
                  { "beta_fast", &r->beta_fast },
                  { "beta_slow", &r->beta_slow },
                  { "attention", &r->attention },
                  { "mscale", &r->mscale },
                  { "mscale_all_dim", &r->mscale_all_dim } };
    for (size_t j = 0; j < sizeof reals / sizeof *reals && !rc; j++)
        rc = lm_json_f64_or(o, reals[j].key, 0, reals[j].to, where, e);
    rc = rc ? rc : lm_json_bool_or(o, "truncate", false, &r->truncate, where, e);
    rc = rc ? rc : lm_json_i64_or(o, "original", 0, 0, INT32_MAX, &r->original, where, e);
    rc = rc ? rc : lm_json_i64_or(o, "max_positions", 0, 0, MOST_POSITIONS, &trained, where, e);
    rc = rc ? rc : lm_json_i64_or(o, "positions", 0, 0, MOST_POSITIONS, &k->rows[i], where, e);
    if (!rc && r->type != LM_ROPE_DEFAULT && !(r->factor > 0))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "a table has no factor above 0");
    if (!rc && (r->dim % 2 || !(r->theta > 0) || (r->type == LM_ROPE_DYNAMIC && !trained)))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "a table has no width, base or positions");
    if (trained)
        k->config.max_positions = trained;
    return rc;
}

static lm_code read_settings(const lm_kv_about *a, const json_t *root, key_rotation *k, lm_err *e)
{
    const json_t *tables = json_object_get(root, "tables");
    const json_t *layers = json_object_get(root, "layers");
    size_t n = json_array_size(tables);
    int64_t widest = 0;
    for (int64_t l = 0; l < a->layers; l++)
        widest = a->head_dim[l] > widest ? a->head_dim[l] : widest;
    if (!json_is_object(root) || n > LM_MOST_ROPES ||
        (n && json_array_size(layers) != (size_t)a->layers))
        return lm_fail(e, LM_EFORMAT, where, NULL, "it has no table for each layer");
    for (size_t i = 0; i < n; i++)
        if (read_table(json_array_get(tables, i), (int)i, widest, k, e))
            return e->code;
    k->config.ropes = (int)n;
    for (int64_t l = 0; l < a->layers; l++) {
        const json_t *v = json_array_get(layers, (size_t)l);
        k->layer[l] = json_is_integer(v) ? json_integer_value(v) : -1;
        if (k->layer[l] < -1 || k->layer[l] >= (int64_t)n ||
            (k->layer[l] >= 0 && k->config.rope[k->layer[l]].dim > a->head_dim[l]))
            return lm_fail(e, LM_EFORMAT, where, NULL, "layer %lld has no table for its heads",
                           (long long)l);
    }
    return LM_OK;
}

/* ---- Tables ---- */

static int64_t last_position(const lm_kv_image *m)
{
    const lm_kv_about *a = &m->about;
    int64_t last = 0;
    for (int64_t t = 0; t < a->tokens && !a->rows; t++)
        last = m->content.positions[t] > last ? m->content.positions[t] : last;
    for (int64_t l = 0; l < a->layers && a->rows; l++)
        for (int64_t i = 0; i < a->kv_heads[l] * a->rows[l]; i++)
            last = m->content.at[l][i] > last ? m->content.at[l][i] : last;
    return last;
}

static bool is_used(const key_rotation *k, int64_t layers, int table)
{
    for (int64_t l = 0; l < layers; l++)
        if (k->layer[l] == table)
            return true;
    return false;
}

/* Pairs that keys can be rotated by, and back. */
static bool can_turn(const float *table, int64_t rows, int64_t dim)
{
    for (int64_t p = 0; p < rows; p++, table += dim)
        for (int64_t j = 0; j < dim / 2; j++) {
            double c = (double)table[j], s = (double)table[dim / 2 + j], norm = c * c + s * s;
            if (!isfinite(norm) || !(norm > 0))
                return false;
        }
    return true;
}

/* The rows that the cache needs.  Tables of the dynamic type are those of the context that they were made for. */
static lm_code make_table(key_rotation *k, int i, int64_t need, lm_err *e)
{
    int64_t context = k->rows[i] ? k->rows[i] : need, dim = k->config.rope[i].dim;
    if (need > context || need > MOST_POSITIONS)
        return lm_fail(e, LM_EFORMAT, where, NULL, "a position is %lld, tables have %lld at most",
                       (long long)(need - 1),
                       (long long)(need > context ? context : MOST_POSITIONS));
    if (lm_alloc_n(&k->table[i], (size_t)(need * dim), sizeof(float), "a rotary table", e))
        return e->code;
    lm_rope_rows(&k->config, i, context, need, k->table[i]);
    return can_turn(k->table[i], need, dim)
               ? LM_OK
               : lm_fail(e, LM_EFORMAT, where, NULL, "a table has numbers that rotate no key");
}

/* The tables that layers have. */
static lm_code make_tables(const lm_kv_image *m, key_rotation *k, lm_err *e)
{
    int64_t need = last_position(m) + 1;
    for (int i = 0; i < k->config.ropes; i++)
        if (is_used(k, m->about.layers, i) && make_table(k, i, need, e))
            return e->code;
    return LM_OK;
}

/* A lm_kv_turn: a pair (x, y) to (c x - s y, s x + c y), or back; c^2 + s^2 may differ from 1 (YaRN). */
static void turn_key(const void *ctx, int64_t layer, int32_t position, bool back, double *head)
{
    const key_rotation *k = ctx;
    int64_t i = k->layer[layer];
    if (i < 0)
        return;
    int64_t R = k->config.rope[i].dim;
    const float *row = k->table[i] + position * R;
    for (int64_t j = 0; j < R / 2; j++) {
        double c = (double)row[j], s = (double)row[R / 2 + j];
        double x = head[j], y = head[R / 2 + j];
        double norm = back ? c * c + s * s : 1;
        s = back ? -s : s;
        head[j] = (c * x - s * y) / norm;
        head[R / 2 + j] = (s * x + c * y) / norm;
    }
}

/* ---- Conversion ---- */

static bool rotates(const lm_kv_image *m, const lm_kv_plan *plan)
{
    bool differs = false;
    if (m->about.rows) /* tokens were dropped: their keys may have other positions in the cache */
        return false;
    for (int64_t i = 0; i < 2 * m->about.layers; i += 2) {
        bool from = m->about.form && m->about.form[i].pre_rope;
        bool to = plan && i < 2 * plan->layers && plan->side[i].pre_rope;
        differs = differs || from != to;
    }
    return differs;
}

lm_code lm_cache_convert(const lm_kv_image *m, const lm_kv_plan *plan, lm_cpu_level cpu,
                         lm_par *par, lm_kv_image **out, lm_err *e)
{
    key_rotation k = { 0 };
    json_t *root = NULL;
    *out = NULL;
    if (!rotates(m, plan))
        return lm_kv_image_convert(m, plan, cpu, par, out, e);
    lm_code rc = lm_json_parse(m->about.rope, strlen(m->about.rope), where, &root, e);
    rc = rc ? rc
            : lm_alloc_n(&k.layer, (size_t)m->about.layers, sizeof *k.layer, "rotary tables", e);
    rc = rc ? rc : read_settings(&m->about, root, &k, e);
    rc = rc ? rc : make_tables(m, &k, e);
    const lm_kv_turn turn = { turn_key, &k };
    rc = rc ? rc : lm_kv_image_convert_turned(m, plan, &turn, cpu, par, out, e);
    for (int i = 0; i < LM_MOST_ROPES; i++)
        lm_free(k.table[i]);
    lm_free(k.layer);
    json_decref(root);
    return rc;
}
