/* SPDX-License-Identifier: Apache-2.0 */
/* vocab_union.c -- one tokenizer.json with the tokens and merges of several. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "merge/vocab_impl.h"

/* The result being built: the tree of the first tokenizer, changed in place. */
typedef struct {
    const lm_tokenizer *first;
    json_t *tree, *vocab, *merges, *added; /* the last three are borrowed from the tree */
    json_t *config;                        /* tokenizer_config.json; NULL: none */
    json_t *extra; /* tokens missing in the first -> id; also those of added_tokens */
    json_t *known_merges;
    int64_t next; /* id */
    bool changed;
    lm_err *e;
} state;

static lm_code no_memory(lm_err *e)
{
    return lm_fail(e, LM_ELIMIT, "tokenizer", NULL, "no memory for the merged vocabulary");
}

static lm_code parse(const lm_vocab_model *m, json_t **tree, lm_err *e)
{
    size_t len;
    const char *text = lm_tokenizer_json(m->tok, &len);
    return lm_json_parse(text, len, m->name, tree, e);
}

/* The form of text bytes in its tokens. */
static const char *kind_of(const json_t *tree)
{
    const json_t *decoder = json_object_get(tree, "decoder");
    const json_t *list = json_object_get(decoder, "decoders"), *d;
    size_t i;
    if (json_is_true(json_object_get(json_object_get(tree, "model"), "byte_fallback")))
        return "byte-fallback";
    const char *type = json_string_value(json_object_get(decoder, "type"));
    bool level = type && !strcmp(type, "ByteLevel");
    json_array_foreach(list, i, d)
    {
        type = json_string_value(json_object_get(d, "type"));
        level |= type && !strcmp(type, "ByteLevel");
    }
    return level ? "byte-level" : "plain";
}

static lm_code check_kind(const json_t *a, const char *a_name, const json_t *b, const char *b_name,
                          lm_sink *sink, lm_err *e)
{
    static const char *const parts[] = { "normalizer", "pre_tokenizer", "decoder", "post_processor",
                                         NULL };
    if (strcmp(kind_of(a), kind_of(b)))
        return lm_fail(e, LM_EUSAGE, b_name, "choose the tokenizer of one model",
                       "its tokenizer is %s, that of %s %s: they cannot be united", kind_of(b),
                       a_name, kind_of(a));
    for (int i = 0; parts[i]; i++)
        if (!json_equal(json_object_get(a, parts[i]), json_object_get(b, parts[i])))
            lm_log(sink, LM_LOG_WARN, "%s: the %s of its tokenizer is replaced by that of %s",
                   b_name, parts[i], a_name);
    return LM_OK;
}

/* A merge is "a b" or ["a", "b"]. */
static bool same_merge(const json_t *a, const json_t *b)
{
    const char *whole = json_string_value(json_is_string(a) ? a : b), *space;
    const json_t *pair = json_is_string(a) ? b : a;
    const char *left = json_string_value(json_array_get(pair, 0));
    const char *right = json_string_value(json_array_get(pair, 1));
    if (json_is_string(a) == json_is_string(b))
        return json_equal(a, b);
    space = whole ? strchr(whole, ' ') : NULL;
    return space && left && right && strlen(left) == (size_t)(space - whole) &&
           !strncmp(left, whole, strlen(left)) && !strcmp(right, space + 1);
}

static bool same_merges(const json_t *a, const json_t *b)
{
    const json_t *x = json_object_get(json_object_get(a, "model"), "merges");
    const json_t *y = json_object_get(json_object_get(b, "model"), "merges");
    bool same = json_array_size(x) == json_array_size(y);
    for (size_t i = 0; same && i < json_array_size(x); i++)
        same = same_merge(json_array_get(x, i), json_array_get(y, i));
    return same;
}

lm_code lm_vocab_warn_of_splits(const lm_vocab_model *first, const lm_vocab_model *other,
                                lm_sink *sink, lm_err *e)
{
    static const char *const parts[] = { "normalizer", "pre_tokenizer", NULL };
    json_t *a = NULL, *b = NULL;
    const char *part = NULL;
    lm_code rc = parse(first, &a, e);
    if (!rc)
        rc = parse(other, &b, e);
    for (int i = 0; !rc && parts[i] && !part; i++)
        if (!json_equal(json_object_get(a, parts[i]), json_object_get(b, parts[i])))
            part = parts[i];
    if (!rc && !part && !same_merges(a, b))
        part = "list of merges";
    if (part)
        lm_log(sink, LM_LOG_WARN,
               "%s: its tokenizer has the tokens of that of %s, but another %s: texts are split "
               "otherwise",
               other->name, first->name, part);
    json_decref(a);
    json_decref(b);
    return rc;
}

/* The id of a token in the result, -1: not in it so far. */
static int64_t id_of(const state *s, const char *text, size_t len)
{
    int64_t id = lm_tokenizer_id(s->first, text, len);
    const json_t *j = id < 0 ? json_object_getn(s->extra, text, len) : NULL;
    return j ? json_integer_value(j) : id;
}

static lm_code take_id(state *s, const char *text, size_t len)
{
    s->changed = true;
    return json_object_setn_new(s->extra, text, len, json_integer(s->next++)) ? no_memory(s->e)
                                                                              : LM_OK;
}

/* The tokens of another model: ids in its order, and an entry for those that are not added
 * tokens. */
static lm_code add_tokens(state *s, const lm_tokenizer *tok, const json_t *vocab)
{
    for (int64_t id = 0; id < lm_tokenizer_vocab_size(tok); id++) {
        size_t len;
        const char *text = lm_tokenizer_token(tok, (uint32_t)id, &len);
        if (!text || id_of(s, text, len) >= 0)
            continue;
        int64_t fresh = s->next;
        if (take_id(s, text, len))
            return s->e->code;
        if (json_object_getn(vocab, text, len) &&
            json_object_setn_new(s->vocab, text, len, json_integer(fresh)))
            return no_memory(s->e);
    }
    return LM_OK;
}

static bool is_added(const json_t *list, const char *content)
{
    const json_t *a;
    size_t i;
    json_array_foreach(list, i, a)
    {
        const char *c = json_string_value(json_object_get(a, "content"));
        if (c && !strcmp(c, content))
            return true;
    }
    return false;
}

/* One entry of added_tokens, and of added_tokens_decoder if tokenizer_config.json has it. */
static lm_code put_added(state *s, const json_t *entry, int64_t id)
{
    char key[24];
    json_t *copy = json_deep_copy(entry), *flags = NULL;
    json_t *decoder = json_object_get(s->config, "added_tokens_decoder");
    int n = 0;
    for (int64_t v = id; v || !n; v /= 10)
        n++;
    key[n] = 0;
    for (int64_t v = id; n; v /= 10)
        key[--n] = (char)('0' + v % 10);
    s->changed = true;
    if (!copy || json_object_set_new(copy, "id", json_integer(id)) ||
        json_array_append(s->added, copy)) {
        json_decref(copy);
        return no_memory(s->e);
    }
    if (json_is_object(decoder)) {
        flags = json_deep_copy(copy);
        if (flags)
            json_object_del(flags, "id");
        if (!flags || json_object_set_new(decoder, key, flags)) {
            json_decref(copy);
            return no_memory(s->e);
        }
    }
    json_decref(copy);
    return LM_OK;
}

static lm_code add_added(state *s, const json_t *list)
{
    const json_t *a;
    size_t i;
    json_array_foreach(list, i, a)
    {
        const json_t *c = json_object_get(a, "content");
        const char *content = json_string_value(c);
        if (content && !is_added(s->added, content) &&
            put_added(s, a, id_of(s, content, json_string_length(c))))
            return s->e->code;
    }
    return LM_OK;
}

/* ---- merges ---- */

typedef struct {
    const char *left, *right;
    size_t n_left, n_right;
} merge;

/* "left right" or ["left", "right"]. */
static bool read_merge(const json_t *j, merge *m)
{
    const json_t *a = json_array_get(j, 0), *b = json_array_get(j, 1);
    const char *text = json_string_value(j), *space = text ? strchr(text, ' ') : NULL;
    if (a && b && json_is_string(a) && json_is_string(b)) {
        *m = (merge){ json_string_value(a), json_string_value(b), json_string_length(a),
                      json_string_length(b) };
        return true;
    }
    if (!space)
        return false;
    *m = (merge){ text, space + 1, (size_t)(space - text), strlen(space + 1) };
    return true;
}

/* Store a merge; *fresh: it is new. */
static lm_code know_merge(state *s, const merge *m, bool *fresh)
{
    lm_buf key = { 0 };
    lm_code rc = lm_buf_addf(&key, s->e, "%zu ", m->n_left);
    if (!rc)
        rc = lm_buf_add(&key, m->left, m->n_left, s->e);
    if (!rc)
        rc = lm_buf_add(&key, m->right, m->n_right, s->e);
    *fresh = !rc && !json_object_getn(s->known_merges, key.data, key.len);
    if (*fresh && json_object_setn_new(s->known_merges, key.data, key.len, json_true()))
        rc = no_memory(s->e);
    lm_buf_fini(&key);
    return rc;
}

static lm_code know_merges(state *s)
{
    const json_t *j;
    size_t i;
    merge m;
    bool fresh;
    json_array_foreach(s->merges, i, j)
    {
        if (read_merge(j, &m) && know_merge(s, &m, &fresh))
            return s->e->code;
    }
    return LM_OK;
}

/* All merges as pairs: a part of one has a space in it, or the other list has pairs. */
static lm_code use_pairs(state *s)
{
    size_t i;
    json_t *j;
    merge m;
    json_array_foreach(s->merges, i, j)
    {
        if (json_is_array(j) || !read_merge(j, &m))
            continue;
        json_t *pair = json_array();
        if (!pair || json_array_append_new(pair, json_stringn(m.left, m.n_left)) ||
            json_array_append_new(pair, json_stringn(m.right, m.n_right)) ||
            json_array_set_new(s->merges, i, pair))
            return no_memory(s->e);
    }
    return LM_OK;
}

static lm_code add_merges(state *s, const json_t *list)
{
    json_t *j;
    size_t i;
    merge m;
    bool fresh, pairs = json_is_array(json_array_get(s->merges, 0)) ||
                        json_is_array(json_array_get(list, 0));
    json_array_foreach((json_t *)list, i, j)
    {
        if (!read_merge(j, &m))
            continue;
        if (know_merge(s, &m, &fresh))
            return s->e->code;
        s->changed |= fresh;
        if (fresh && json_array_append(s->merges, j))
            return no_memory(s->e);
    }
    return pairs ? use_pairs(s) : LM_OK;
}

/* ---- the union ---- */

static lm_code begin(state *s, const lm_vocab_model *m)
{
    size_t len;
    const char *config = lm_tokenizer_config_json(m->tok, &len);
    s->first = m->tok;
    s->next = lm_tokenizer_vocab_size(m->tok);
    s->extra = json_object();
    s->known_merges = json_object();
    if (parse(m, &s->tree, s->e) ||
        (config && lm_json_parse(config, len, "tokenizer_config.json", &s->config, s->e)))
        return s->e->code;
    json_t *model = json_object_get(s->tree, "model");
    s->vocab = json_object_get(model, "vocab");
    s->merges = json_object_get(model, "merges");
    if (!json_is_array(json_object_get(s->tree, "added_tokens")) &&
        json_object_set_new(s->tree, "added_tokens", json_array()))
        return no_memory(s->e);
    s->added = json_object_get(s->tree, "added_tokens");
    return s->extra && s->known_merges ? know_merges(s) : no_memory(s->e);
}

static lm_code unite_with(state *s, const lm_vocab_model *first, const lm_vocab_model *m,
                          lm_sink *sink)
{
    json_t *tree = NULL;
    size_t a_len, b_len;
    const char *a = lm_tokenizer_json(first->tok, &a_len), *b = lm_tokenizer_json(m->tok, &b_len);
    if (a_len == b_len && !memcmp(a, b, a_len))
        return LM_OK;
    lm_code rc = parse(m, &tree, s->e);
    const json_t *model = json_object_get(tree, "model");
    if (!rc)
        rc = lm_tokenizer_need_bpe(first->tok, first->name, "tokenizers are united with", s->e);
    if (!rc)
        rc = lm_tokenizer_need_bpe(m->tok, m->name, "tokenizers are united with", s->e);
    if (!rc)
        rc = check_kind(s->tree, first->name, tree, m->name, sink, s->e);
    if (!rc)
        rc = add_tokens(s, m->tok, json_object_get(model, "vocab"));
    if (!rc)
        rc = add_added(s, json_object_get(tree, "added_tokens"));
    if (!rc)
        rc = add_merges(s, json_object_get(model, "merges"));
    json_decref(tree);
    return rc;
}

/* Tokens that only the rules name become added tokens. */
static lm_code add_named(state *s, const lm_vocab_spec *spec)
{
    for (int i = 0; i < spec->n_rules; i++) {
        const char *token = spec->rules[i].token;
        if (id_of(s, token, strlen(token)) >= 0)
            continue;
        int64_t id = s->next;
        json_t *entry =
            json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)id, "content", token,
                      "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 0);
        lm_code rc = entry ? take_id(s, token, strlen(token)) : no_memory(s->e);
        if (!rc)
            rc = put_added(s, entry, id);
        json_decref(entry);
        if (rc)
            return rc;
    }
    return LM_OK;
}

static lm_code load(const state *s, lm_tokenizer **out)
{
    lm_buf json = { 0 }, config = { 0 };
    lm_jw w;
    lm_jw_begin(&w, &json, 0, s->e);
    lm_jw_json(&w, NULL, s->tree);
    lm_code rc = lm_jw_end(&w);
    if (!rc && s->config) {
        lm_jw_begin(&w, &config, 0, s->e);
        lm_jw_json(&w, NULL, s->config);
        rc = lm_jw_end(&w);
    }
    if (!rc)
        rc = lm_tokenizer_from_json(json.data, json.len, config.data, config.len,
                                    "the merged tokenizer", out, s->e);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    return rc;
}

lm_code lm_vocab_unite(const lm_vocab_spec *spec, const lm_vocab_model *model, int n, int first,
                       bool all, lm_sink *sink, lm_tokenizer **out, lm_err *e)
{
    state s = { .e = e };
    *out = NULL;
    lm_code rc = begin(&s, &model[first]);
    for (int i = 0; i < n && all && !rc; i++)
        if (i != first)
            rc = unite_with(&s, &model[first], &model[i], sink);
    if (!rc)
        rc = add_named(&s, spec);
    if (!rc && s.changed)
        rc = load(&s, out);
    json_decref(s.tree);
    json_decref(s.config);
    json_decref(s.extra);
    json_decref(s.known_merges);
    return rc;
}
