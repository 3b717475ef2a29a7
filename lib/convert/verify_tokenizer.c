/* SPDX-License-Identifier: Apache-2.0 */
/* verify_tokenizer.c -- the small files beside the weights, each read as a tool reads it. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "base/text.h"
#include "convert/verify.h"
#include "text/sentencepiece.h"
#include "text/tokenizer_impl.h"

enum { MAX_FILE = 256 << 20 };

typedef struct {
    lm_model_source *m;
    lm_findings *f;
    lm_err *e;
    int64_t vocab; /* of config.json; 0: unknown */
    lm_buf config; /* tokenizer_config.json if it is intact, otherwise empty */
} side;

/* A file with an invalid format is a finding; other failures end the verification. */
static lm_code report(side *s, const char *file, lm_code rc, const lm_err *why)
{
    const char *name = why->where;
    size_t n = strlen(file);

    if (rc != LM_EFORMAT) {
        if (rc)
            *s->e = *why;
        return rc;
    }
    if (strncmp(name, file, n) != 0)
        name = strcmp(name, "merges.txt") && strncmp(name, "tokenizer_", 10) ? "" : name;
    else
        name += name[n] ? n + strspn(name + n, ": ") : n;
    lm_verify_say(s->f, true, file, *name ? name : NULL, "is damaged or unsupported: %s",
                  why->what);
    return LM_OK;
}

/* *found is false too for a file that cannot be read back, which is a finding. */
static lm_code load(side *s, const char *file, lm_buf *out, bool *found)
{
    lm_err why = { 0 };
    lm_code rc = lm_model_source_file(s->m, file, MAX_FILE, out, found, &why);

    if (rc)
        *found = false;
    return report(s, file, rc, &why);
}

/* An object in JSON; *tree is NULL if it is missing or not intact. */
static lm_code load_object(side *s, const char *file, lm_buf *text, json_t **tree)
{
    lm_err why = { 0 };
    bool found = false;
    lm_code rc = load(s, file, text, &found);

    *tree = NULL;
    if (rc || !found)
        return rc;
    rc = lm_json_parse(text->len ? text->data : "", text->len, file, tree, &why);
    if (!rc && !json_is_object(*tree))
        rc = lm_fail(&why, LM_EFORMAT, file, NULL, "it is not a JSON object");
    if (rc) {
        json_decref(*tree);
        *tree = NULL;
    }
    return report(s, file, rc, &why);
}

static lm_code check_object(side *s, const char *file)
{
    lm_buf text = { 0 };
    json_t *tree;
    lm_code rc = load_object(s, file, &text, &tree);

    json_decref(tree);
    lm_buf_fini(&text);
    return rc;
}

/* Compare a loaded tokenizer with the embedding. */
static void compare_sizes(side *s, const char *file, const lm_tokenizer *t)
{
    int64_t ids = lm_tokenizer_vocab_size(t);

    if (s->vocab && ids > s->vocab)
        lm_verify_say(s->f, true, file, NULL,
                      "has %" PRId64 " id%s, and vocab_size of config.json is %" PRId64, ids,
                      lm_plural(ids), s->vocab);
    else if (ids < s->vocab / 10 * 9)
        lm_verify_say(s->f, false, file, NULL,
                      "has only %" PRId64 " id%s, and vocab_size of config.json is %" PRId64, ids,
                      lm_plural(ids), s->vocab);
}

static lm_code try_tokenizer(side *s, const char *file, const lm_buf *text)
{
    lm_buf config = { 0 };
    lm_tokenizer *t = NULL;
    lm_err why = { 0 };
    lm_code rc = lm_buf_add(&config, s->config.data, s->config.len, s->e);

    if (rc)
        return rc;
    rc = lm_tokenizer_from_text(text->len ? text->data : "", text->len, &config, file, &t, &why);
    if (!rc)
        compare_sizes(s, file, t);
    lm_tokenizer_free(t);
    lm_buf_fini(&config);
    return report(s, file, rc, &why);
}

/* An intact tokenizer of an unsupported kind is a note. */
static const char *other_kind(const json_t *tree)
{
    static const char kind[] = "WordLevel";
    const char *type = json_string_value(json_object_get(json_object_get(tree, "model"), "type"));

    return type && !strcmp(type, kind) ? kind : NULL;
}

static lm_code check_json(side *s, bool *there)
{
    static const char file[] = "tokenizer.json";
    lm_buf text = { 0 };
    json_t *tree;
    lm_code rc = load_object(s, file, &text, &tree);
    const char *other = other_kind(tree);

    *there = text.len > 0;
    if (!rc && other)
        lm_verify_say(s->f, false, file, NULL, "is not read: model type \"%s\" is not supported",
                      other);
    else if (!rc && tree)
        rc = try_tokenizer(s, file, &text);
    json_decref(tree);
    lm_buf_fini(&text);
    return rc;
}

static lm_code check_sentencepiece(side *s, bool *there)
{
    static const char file[] = "tokenizer.model";
    lm_buf text = { 0 };
    lm_sentencepiece p;
    lm_err why = { 0 };
    lm_code rc = load(s, file, &text, there);

    if (!rc && *there) {
        rc = lm_sentencepiece_parse(text.len ? text.data : "", text.len, file, &p, &why);
        if (rc == LM_EFORMAT && p.other_kind) {
            lm_verify_say(s->f, false, file, NULL, "is not read: %s", why.what);
            rc = LM_OK;
        } else if (rc) {
            rc = report(s, file, rc, &why);
        } else {
            rc = try_tokenizer(s, file, &text);
        }
        lm_sentencepiece_fini(&p);
    }
    lm_buf_fini(&text);
    return rc;
}

/* `other`: the folder has another tokenizer, so half of the pair may be missing. */
static lm_code check_pair(side *s, bool other)
{
    lm_buf vocab = { 0 }, merges = { 0 }, json = { 0 };
    json_t *tree = NULL;
    lm_err why = { 0 };
    bool listed = false;
    lm_code rc = load_object(s, "vocab.json", &vocab, &tree);

    if (!rc)
        rc = load(s, "merges.txt", &merges, &listed);
    if (!rc && !other && listed && !vocab.len)
        lm_verify_say(s->f, true, "merges.txt", NULL, "its vocab.json is missing");
    if (!rc && !other && tree && !listed)
        lm_verify_say(s->f, true, "vocab.json", NULL, "its merges.txt is missing");
    if (!rc && tree && listed) {
        rc = lm_tokenizer_join(&vocab, "merges.txt", &merges, &s->config, &json, &why);
        rc = rc ? report(s, "merges.txt", rc, &why) : try_tokenizer(s, "vocab.json", &json);
    }
    json_decref(tree);
    lm_buf_fini(&vocab);
    lm_buf_fini(&merges);
    lm_buf_fini(&json);
    return rc;
}

lm_code lm_verify_tokenizer(lm_model_source *m, int64_t vocab, lm_findings *f, lm_err *e)
{
    static const char *const objects[] = { "special_tokens_map.json", "added_tokens.json",
                                           "generation_config.json" };
    side s = { .m = m, .f = f, .e = e, .vocab = vocab };
    bool json = false, model = false;
    json_t *tree;
    lm_code rc = load_object(&s, "tokenizer_config.json", &s.config, &tree);

    if (!tree)
        s.config.len = 0;
    json_decref(tree);
    for (size_t i = 0; !rc && i < sizeof objects / sizeof *objects; i++)
        rc = check_object(&s, objects[i]);
    if (!rc)
        rc = check_json(&s, &json);
    if (!rc)
        rc = check_sentencepiece(&s, &model);
    if (!rc)
        rc = check_pair(&s, json || model);
    lm_buf_fini(&s.config);
    return rc;
}
