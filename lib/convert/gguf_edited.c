/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_edited.c -- metadata that were edited after our conversion override the files kept with
 * them.
 *
 * The metadata are built again from the kept files; a key with another value was edited. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "convert/convert_impl.h"
#include "convert/gguf_keys.h"
#include "format/folder_json.h"

typedef struct {
    lm_import *m;
    const lm_gguf *g; /* as in the file */
    lm_gguf *was;     /* as written by our conversion */
    lm_err *e;
    char first[200]; /* description of the first edit */
    size_t n;
    bool *applied; /* of each pair of g */
} edits;

/* ---- Finding edits ---- */

/* The metadata of the kept files. */
static lm_code write_again(edits *x, bool tokenizer, lm_buf *header)
{
    lm_sink *sink = x->m->sink;
    lm_gguf_plan *p = NULL;
    lm_code rc = lm_gguf_plan_new(&p, x->e);

    if (rc)
        return rc;
    x->m->sink = NULL; /* its warnings were reported when the file was written */
    rc = lm_gguf_put_numbers(p, &x->m->config, x->e);
    if (!rc && tokenizer)
        rc = lm_gguf_put_vocab(p, x->m, x->e);
    x->m->sink = sink;
    if (!rc)
        rc = lm_gguf_plan_header(p, header, x->e);
    if (!rc)
        rc = lm_gguf_parse(header->data, header->len, x->m->path, &x->was, x->e);
    lm_gguf_plan_free(p);
    return rc;
}

static bool is_number(const lm_gguf_value *v)
{
    return !v->array && v->kind != LM_GGUF_STRING;
}

static bool same(const lm_gguf_value *a, const lm_gguf_value *b)
{
    if (is_number(a) && is_number(b)) {
        double x = lm_gguf_number(a, 0), y = lm_gguf_number(b, 0);
        return x <= y && x >= y;
    }
    return a->kind == b->kind && a->array == b->array && a->bytes == b->bytes &&
           !memcmp(a->data, b->data, a->bytes);
}

/* True if the file has another value under `key` than our conversion wrote.  A removed key does not
 * count. */
static bool edited(const edits *x, const char *key)
{
    const lm_gguf_value *now = lm_gguf_value_of(x->g, key), *was = lm_gguf_value_of(x->was, key);

    return now && !(was && same(now, was));
}

static void show(const lm_gguf_value *v, char out[40])
{
    if (!v)
        snprintf(out, 40, "absent");
    else if (is_number(v))
        snprintf(out, 40, "%.9g", lm_gguf_number(v, 0));
    else
        snprintf(out, 40, "another %s", v->array ? "list" : "text");
}

/* Mark `key` as applied. */
static void apply(edits *x, const char *key)
{
    for (size_t i = 0; i < lm_gguf_pairs(x->g); i++)
        if (lm_gguf_pair(x->g, i) == lm_gguf_value_of(x->g, key))
            x->applied[i] = true;
}

static void note(edits *x, const char *key)
{
    const lm_gguf_value *v = lm_gguf_value_of(x->g, key);
    char now[40], was[40];

    apply(x, key);
    if (x->n++)
        return;
    show(v, now);
    show(lm_gguf_value_of(x->was, key), was);
    if (is_number(v))
        snprintf(x->first, sizeof x->first, "'%.80s' is %s, not %s", key, now, was);
    else
        snprintf(x->first, sizeof x->first, "'%.80s' is %s", key, now);
}

/* ---- Applying edits ---- */

static lm_code set(edits *x, json_t *o, const char *key, json_t *v)
{
    if (!v || json_object_set_new(o, key, v))
        return lm_fail(x->e, LM_ELIMIT, x->m->path, NULL, "no memory for \"%s\"", key);
    return LM_OK;
}

static lm_code set_number(edits *x, json_t *o, const char *key, const char *gguf, bool real)
{
    int64_t whole = 0;
    double v = 0;

    if (real)
        return lm_gguf_f64_or(x->g, gguf, 0, &v, NULL, x->e)
                   ? x->e->code
                   : set(x, o, key, json_real(lm_gguf_shortest(v)));
    return lm_gguf_i64_or(x->g, gguf, 0, 0, INT64_C(1) << 40, &whole, NULL, x->e)
               ? x->e->code
               : set(x, o, key, json_integer(whole));
}

/* A key that exists in another spelling too (n_ctx) is also changed there. */
static bool is_second(const lm_arch *a, const lm_gguf_key *k)
{
    for (const lm_gguf_key *i = a->gguf_keys; i < k; i++)
        if (i->gguf && !strcmp(i->gguf, k->gguf))
            return true;
    return false;
}

/* The rotary table of layers with a window, where a config.json has one for each kind of layer; NULL: it has not. */
static json_t *near_table(json_t *tree)
{
    json_t *t = json_object_get(json_object_get(tree, "rope_parameters"), "sliding_attention");
    return json_is_object(t) ? t : NULL;
}

static lm_code take_number(edits *x, const lm_gguf_key *k)
{
    const lm_config *c = &x->m->config;
    char gguf[96];

    snprintf(gguf, sizeof gguf, "%s.%s", c->arch->gguf, k->gguf);
    if (!edited(x, gguf))
        return LM_OK;
    if (is_second(c->arch, k) && !json_object_get(x->m->tree, k->hf))
        return LM_OK;
    if (k->kind == LM_KEY_WINDOW && c->arch != &lm_arch_mistral && lm_config_window(c) <= 0)
        return lm_fail(x->e, LM_EUSAGE, x->m->path, NULL,
                       "'%s': a config.json of %s without window cannot represent it", gguf,
                       c->arch->name);
    if (!is_second(c->arch, k))
        note(x, gguf);
    json_t *near = near_table(x->m->tree);
    if (!strcmp(k->gguf, LM_GGUF_NEAR_BASE) && near)
        return set_number(x, near, "rope_theta", gguf, true);
    return set_number(x, x->m->tree, k->hf, gguf, k->kind == LM_KEY_REAL);
}

static lm_code take_numbers(edits *x)
{
    static const lm_gguf_key vocab = { .hf = "vocab_size", "vocab_size", LM_KEY_INT };
    static const lm_gguf_key window = { .hf = "sliding_window",
                                        "attention.sliding_window",
                                        LM_KEY_WINDOW };
    bool windows = !x->m->config.ropes;
    lm_code rc = LM_OK;

    for (const lm_gguf_key *k = x->m->config.arch->gguf_keys; !rc && k->hf; k++) {
        windows = windows || k->kind == LM_KEY_WINDOW;
        if (k->kind == LM_KEY_INT || k->kind == LM_KEY_REAL || k->kind == LM_KEY_HEAD_DIM ||
            k->kind == LM_KEY_WINDOW || k->kind == LM_KEY_EXPERT_FFN)
            rc = take_number(x, k);
    }
    if (!rc && !windows)
        rc = take_number(x, &window);
    return rc ? rc : take_number(x, &vocab);
}

/* Two more widths of a head: config.json has one for all. */
static lm_code take_widths(edits *x)
{
    static const char *const keys[2] = { "attention.value_length", "rope.dimension_count" };
    const lm_config *c = &x->m->config;
    bool any = false;
    char gguf[96];

    for (int i = 0; i < 2; i++) {
        snprintf(gguf, sizeof gguf, "%s.%s", c->arch->gguf, keys[i]);
        if (edited(x, gguf)) {
            any = true;
            apply(x, gguf);
        }
    }
    return any ? lm_gguf_check_head_dim(x->g, c->arch, c->layer[0].head_dim, x->e) : LM_OK;
}

/* The layers with a window. */
static lm_code take_pattern(edits *x)
{
    const lm_config *c = &x->m->config;
    json_t *types = NULL;
    bool usual = false;
    char gguf[96];

    snprintf(gguf, sizeof gguf, "%s.attention.sliding_window_pattern", c->arch->gguf);
    if (!c->arch->gguf_pattern || !edited(x, gguf))
        return LM_OK;
    if (lm_gguf_get_types(x->g, c, &types, &usual, x->e))
        return x->e->code;
    if (usual && !lm_gguf_value_of(x->was, gguf)) { /* the number that an absent key has */
        apply(x, gguf);
        json_decref(types);
        return LM_OK;
    }
    note(x, gguf);
    json_object_del(x->m->tree, "sliding_window_pattern"); /* an older key for the same */
    return set(x, x->m->tree, "layer_types", types);
}

/* Base and scaling go together: config.json has one object for both, or two keys. */
static lm_code take_rope(edits *x)
{
    static const char *const keys[] = { "freq_base",
                                        "scaling.type",
                                        "scaling.factor",
                                        "scaling.original_context_length",
                                        "scaling.attn_factor",
                                        "scaling.yarn_attn_factor",
                                        "scaling.yarn_beta_fast",
                                        "scaling.yarn_beta_slow" };
    const lm_config *c = &x->m->config;
    json_t *tree = x->m->tree, *made, *scaling;
    bool base = false, scaled = false;
    char gguf[96];
    lm_code rc;

    for (size_t i = 0; c->ropes && i < sizeof keys / sizeof *keys; i++) {
        snprintf(gguf, sizeof gguf, "%s.rope.%s", c->arch->gguf, keys[i]);
        if (!edited(x, gguf))
            continue;
        note(x, gguf);
        base = base || !i;
        scaled = scaled || i;
    }
    if (!base && !scaled)
        return LM_OK;
    made = json_object();
    rc = lm_gguf_get_rope(x->g, c->arch, c->rope[0].dim, made, x->e);
    scaling = json_object_get(made, "rope_scaling");
    /* where there are several tables, the first is that of layers without a window */
    json_t *tables = json_object_get(tree, "rope_parameters"), *in = tree;
    const char *key = "rope_parameters";
    if (json_is_object(json_object_get(tables, "full_attention"))) {
        in = tables;
        key = "full_attention";
    }
    json_t *both = json_object_get(in, key);
    if (!rc && scaled && json_is_object(both)) {
        rc = set(x, in, key, scaling ? json_incref(scaling) : json_object());
        both = json_object_get(in, key);
        if (!rc && !scaling)
            rc = set(x, both, "rope_type", json_string("default"));
    } else if (!rc && scaled) {
        rc = set(x, tree, "rope_scaling", scaling ? json_incref(scaling) : json_null());
    }
    if (!rc)
        rc = set(x, json_is_object(both) ? both : tree, "rope_theta",
                 json_incref(json_object_get(made, "rope_theta")));
    if (!rc && base && near_table(tree) && !lm_gguf_has_key(c->arch, LM_GGUF_NEAR_BASE))
        rc = set(x, near_table(tree), "rope_theta",
                 json_incref(json_object_get(made, "rope_theta")));
    json_decref(made);
    return rc;
}

static lm_code replace_side(edits *x, const char *name, lm_buf *data)
{
    for (size_t i = 0; i < x->m->n_side; i++)
        if (!strcmp(x->m->side[i].name, name)) {
            lm_buf_fini(&x->m->side[i].data);
            x->m->side[i].data = *data;
            *data = (lm_buf){ 0 };
            return LM_OK;
        }
    return lm_import_put(x->m, name, data, x->e);
}

static lm_code replace_json(edits *x, const char *name, const json_t *tree)
{
    lm_buf text = { 0 };
    lm_code rc = lm_json_pretty(tree, &text, x->e);

    if (!rc)
        rc = replace_side(x, name, &text);
    lm_buf_fini(&text);
    return rc;
}

/* A kept file as a tree; *out NULL: not kept. */
static lm_code open_side(edits *x, const char *name, json_t **out)
{
    const lm_side_file *f = lm_import_side(x->m, name);

    *out = NULL;
    return f ? lm_json_parse(f->data.data, f->data.len, name, out, x->e) : LM_OK;
}

/* Number `id` of the file's tokens. */
static lm_code token_text(edits *x, int64_t id, lm_gguf_text *out)
{
    lm_gguf_iter it = { .v = lm_gguf_value_of(x->g, "tokenizer.ggml.tokens") };
    bool found = it.v && it.v->array;

    for (int64_t i = 0; found && i <= id; i++)
        found = lm_gguf_next_str(&it, out);
    return found ? LM_OK
                 : lm_fail(x->e, LM_EFORMAT, x->m->path, NULL,
                           "a special token is number %" PRId64 ", which no token has", id);
}

/* The keys of the ids that end a text. */
static const char *const eos_keys[] = { "tokenizer.ggml.eos_token_id",
                                        "tokenizer.ggml.eot_token_id",
                                        "tokenizer.ggml.eom_token_id" };
enum { N_EOS_KEYS = sizeof eos_keys / sizeof *eos_keys };

static bool holds(const json_t *list, int64_t id)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_integer_value(json_array_get(list, i)) == id)
            return true;
    return false;
}

/* The ids of the keys in the file `g`, appended once each. */
static lm_code add_eos(edits *x, const lm_gguf *g, json_t *list)
{
    for (int i = 0; i < N_EOS_KEYS; i++) {
        int64_t id;
        /* a removed key does not count */
        const lm_gguf *from = lm_gguf_value_of(g, eos_keys[i]) ? g : x->was;
        if (lm_gguf_i64_or(from, eos_keys[i], -1, 0, x->m->config.vocab - 1, &id, NULL, x->e))
            return x->e->code;
        if (id >= 0 && !holds(list, id))
            json_array_append_new(list, json_integer(id));
    }
    return LM_OK;
}

/* eos_token_id of o, a number or a list: first the ids of the file, then its other ids, for which
 * our conversion had no key. */
static lm_code set_eos(edits *x, json_t *o)
{
    json_t *had = json_object_get(o, "eos_token_id"), *now = json_array(), *was = json_array();
    lm_code rc = add_eos(x, x->g, now);

    if (!rc)
        rc = add_eos(x, x->was, was);
    for (size_t i = 0; !rc && i < (json_is_array(had) ? json_array_size(had) : 1); i++) {
        const json_t *v = json_is_array(had) ? json_array_get(had, i) : had;
        if (json_is_integer(v) && !holds(was, json_integer_value(v)) &&
            !holds(now, json_integer_value(v)))
            json_array_append_new(now, json_integer(json_integer_value(v)));
    }
    if (!rc)
        rc = set(x, o, "eos_token_id",
                 json_incref(json_array_size(now) > 1 ? now : json_array_get(now, 0)));
    json_decref(now);
    json_decref(was);
    return rc;
}

static lm_code take_eos(edits *x, json_t *generation, bool *changed)
{
    bool any = false;

    for (int i = 0; i < N_EOS_KEYS; i++)
        if (edited(x, eos_keys[i])) {
            any = true;
            note(x, eos_keys[i]);
        }
    if (!any)
        return LM_OK;
    *changed = true;
    if (set_eos(x, x->m->tree))
        return x->e->code;
    return generation ? set_eos(x, generation) : LM_OK;
}

static lm_code take_ids(edits *x, json_t *tokenizer, json_t *generation, bool *changed)
{
    static const char *const keys[][3] = {
        { "tokenizer.ggml.bos_token_id", "bos_token_id", "bos_token" },
        { "tokenizer.ggml.eos_token_id", NULL, "eos_token" },
        { "tokenizer.ggml.padding_token_id", "pad_token_id", "pad_token" },
    };
    lm_code rc = take_eos(x, generation, changed);

    for (int i = 0; !rc && i < 3; i++) {
        lm_gguf_text text;
        int64_t id = 0;
        if (!edited(x, keys[i][0]))
            continue;
        rc = lm_gguf_i64_or(x->g, keys[i][0], 0, 0, x->m->config.vocab - 1, &id, NULL, x->e);
        if (!rc && keys[i][1]) {
            note(x, keys[i][0]);
            *changed = true;
            rc = set(x, x->m->tree, keys[i][1], json_integer(id));
        }
        if (!rc && keys[i][1] && generation)
            rc = set(x, generation, keys[i][1], json_integer(id));
        if (!rc && tokenizer && !(rc = token_text(x, id, &text)))
            rc = set(x, tokenizer, keys[i][2], json_stringn(text.text, text.len));
    }
    return rc;
}

static lm_code take_template(edits *x, json_t *tokenizer, bool *changed)
{
    static const char key[] = "tokenizer.chat_template";
    lm_gguf_text text;
    lm_buf data = { 0 };
    lm_code rc;

    if (!edited(x, key))
        return LM_OK;
    note(x, key);
    rc = lm_gguf_str(x->g, key, &text, x->e);
    if (!rc && (lm_import_side(x->m, "chat_template.jinja") || !tokenizer)) {
        rc = lm_buf_add(&data, text.text, text.len, x->e);
        if (!rc)
            rc = replace_side(x, "chat_template.jinja", &data);
    } else if (!rc) {
        *changed = true;
        rc = set(x, tokenizer, "chat_template", json_stringn(text.text, text.len));
    }
    lm_buf_fini(&data);
    return rc;
}

static lm_code take_tokens(edits *x)
{
    static const char config[] = "tokenizer_config.json", generation[] = "generation_config.json";
    json_t *tok = NULL, *gen = NULL;
    bool ids = false, template = false;
    lm_code rc = open_side(x, config, &tok);

    if (!rc)
        rc = open_side(x, generation, &gen);
    if (!rc)
        rc = take_ids(x, tok, gen, &ids);
    if (!rc)
        rc = take_template(x, tok, &template);
    if (!rc && tok && (ids || template))
        rc = replace_json(x, config, tok);
    if (!rc && gen && ids)
        rc = replace_json(x, generation, gen);
    json_decref(tok);
    json_decref(gen);
    return rc;
}

/* Report edits that no kept file can show: those of tokens, merges and kinds of tokenizer. */
static void report_others(const edits *x)
{
    const char *first = NULL;
    char more[40] = "";
    size_t n = 0;

    for (size_t i = 0; i < lm_gguf_pairs(x->g); i++) {
        const char *key = lm_gguf_pair(x->g, i)->key;
        if (x->applied[i] || !lm_gguf_value_of(x->was, key) || !edited(x, key))
            continue;
        first = first ? first : key;
        n++;
    }
    if (n > 1)
        snprintf(more, sizeof more, " (and %zu more)", n - 1);
    if (n)
        lm_log(x->m->sink, LM_LOG_WARN,
               "%s: '%.80s'%s was edited: the files kept in it do not get this change", x->m->path,
               first, more);
}

static lm_code take_all(edits *x, bool tokenizer)
{
    lm_code rc = lm_alloc_n(&x->applied, lm_gguf_pairs(x->g) + 1, 1, "a list of metadata", x->e);

    if (!rc)
        rc = take_numbers(x);
    if (!rc)
        rc = take_widths(x);
    if (!rc)
        rc = take_pattern(x);
    if (!rc)
        rc = take_rope(x);
    if (!rc && tokenizer)
        rc = take_tokens(x);
    if (!rc)
        report_others(x);
    lm_free(x->applied);
    return rc;
}

lm_code lm_gguf_take_edits(lm_import *m, const lm_gguf *g, bool tokenizer, lm_err *e)
{
    edits x = { .m = m, .g = g, .e = e };
    lm_buf header = { 0 };
    char more[40] = "";
    lm_code rc = write_again(&x, tokenizer, &header);

    if (!rc)
        rc = take_all(&x, tokenizer);
    lm_gguf_close(x.was);
    lm_buf_fini(&header);
    if (rc || !x.n)
        return rc;
    if (x.n > 1)
        snprintf(more, sizeof more, ", and %zu more", x.n - 1);
    lm_log(m->sink, LM_LOG_WARN,
           "%s: its metadata were edited (%s%s): they override the config.json kept in it", m->path,
           x.first, more);
    lm_config_fini(&m->config);
    rc = lm_config_read(m->tree, m->path, &m->config, e);
    return rc ? rc : replace_json(&x, "config.json", m->tree);
}
