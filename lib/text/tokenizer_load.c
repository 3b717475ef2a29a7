/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_load.c -- loads a tokenizer of any kind from a path. */
#include <errno.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/foreign.h"
#include "text/added_list.h"
#include "text/sentencepiece.h"
#include "text/tokenizer_impl.h"

enum { MAX_FILE = 512 << 20 };

/* A file that cannot be a tokenizer.json is reported with its kind. */
static lm_code check_object(const char *text, size_t len, const char *where, lm_err *e)
{
    const char *todo, *what;
    size_t at = 0;

    while (at < len && strchr(" \n\r\t", text[at] ? text[at] : 'x'))
        at++;
    if (at == len || text[at] == '{')
        return LM_OK;
    what = lm_foreign_bytes(text, len, &todo);
    return lm_fail(e, LM_EFORMAT, where,
                   "name a tokenizer.json, a tokenizer.model, or a folder that holds one",
                   "is not a tokenizer: it %s%s", what ? "is " : "does not begin as JSON does",
                   what ? what : "");
}

lm_code lm_tokenizer_from_text(const char *text, size_t len, lm_buf *config, const char *where,
                               lm_tokenizer **out, lm_err *e)
{
    const lm_buf whole = { .data = (char *)(uintptr_t)text, .len = len };
    lm_buf json = { 0 };
    bool list = lm_text_ends(where, "vocab.txt");
    bool other = list || lm_text_ends(where, ".model"); /* rewritten as a tokenizer.json */
    lm_code rc = LM_OK;

    *out = NULL;
    if (list)
        rc = lm_tokenizer_bert(&whole, where, config, &json, e);
    else if (other)
        rc = lm_sentencepiece_json(text, len, where, &json, config, e);
    else
        rc = check_object(text, len, where, e);
    if (!rc)
        rc = lm_tokenizer_from_json(other ? json.data : text, other ? json.len : len,
                                    config->len ? config->data : NULL, config->len, where, out, e);
    lm_buf_fini(&json);
    return rc;
}

/* The paths to try: the tokenizer itself, its configuration, and for a folder the older files,
 * which may replace tokenizer.json. */
typedef struct {
    char *whole, *config, *added, *vocab, *merges, *model, *spiece, *list;
} paths;

static void free_paths(paths *p)
{
    lm_free(p->whole);
    lm_free(p->config);
    lm_free(p->added);
    lm_free(p->vocab);
    lm_free(p->merges);
    lm_free(p->model);
    lm_free(p->spiece);
    lm_free(p->list);
}

static lm_code find_paths(const char *path, paths *p, lm_err *e)
{
    const char *base = lm_path_base(path);
    char *dir = NULL;
    bool folder = lm_path_is_dir(path);
    lm_code rc;

    if (folder)
        rc = lm_strdup(&dir, path, e);
    else
        rc = base == path ? lm_strdup(&dir, ".", e)
                          : lm_asprintf(&dir, e, "%.*s", (int)(base - path), path);
    if (!rc)
        rc = folder ? lm_path_join(&p->whole, dir, "tokenizer.json", e)
                    : lm_strdup(&p->whole, path, e);
    if (!rc)
        rc = lm_path_join(&p->config, dir, "tokenizer_config.json", e);
    if (!rc)
        rc = lm_path_join(&p->added, dir, "added_tokens.json", e);
    if (!rc && folder)
        rc = lm_path_join(&p->vocab, dir, "vocab.json", e);
    if (!rc && folder)
        rc = lm_path_join(&p->merges, dir, "merges.txt", e);
    if (!rc && folder)
        rc = lm_path_join(&p->model, dir, "tokenizer.model", e);
    if (!rc && folder)
        rc = lm_path_join(&p->spiece, dir, "spiece.model", e);
    if (!rc && folder)
        rc = lm_path_join(&p->list, dir, "vocab.txt", e);
    lm_free(dir);
    return rc;
}

static lm_code read_added(const char *path, lm_buf *config, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = lm_file_read(path, MAX_FILE, &text, e);

    if (!rc)
        rc = lm_added_list_take(config, &text, path, e);
    lm_buf_fini(&text);
    return rc;
}

lm_code lm_tokenizer_load(const char *path, lm_tokenizer **out, lm_err *e)
{
    paths p = { 0 };
    lm_buf text = { 0 }, config = { 0 };
    const char *where;
    bool beside = strcmp(path, "-") != 0; /* a stream has no files beside it */
    lm_code rc = find_paths(path, &p, e);

    *out = NULL;
    where = rc ? path : lm_path_shown(p.whole);
    bool old = !rc && p.model && !lm_path_exists(p.whole);
    bool pair = old && lm_path_exists(p.vocab);
    const char *one = !old                      ? NULL /* the first of the files that stand alone */
                      : lm_path_exists(p.model) ? p.model
                      : lm_path_exists(p.spiece) ? p.spiece
                      : lm_path_exists(p.list)   ? p.list
                                                 : NULL;
    if (!rc && beside && lm_path_exists(p.config))
        rc = lm_file_read(p.config, MAX_FILE, &config, e);
    if (!rc && beside &&
        (old || lm_text_ends(where, ".model") || lm_text_ends(where, "vocab.txt")) &&
        lm_path_exists(p.added))
        rc = read_added(p.added, &config, e);
    if (!rc && pair && (lm_path_exists(p.merges) || !one)) {
        where = p.vocab;
        rc = lm_tokenizer_join_files(p.vocab, p.merges, &config, &text, e);
    } else if (!rc && one) {
        where = one;
        rc = lm_file_read(one, MAX_FILE, &text, e);
    } else if (!rc && old) {
        errno = ENOENT;
        rc = lm_fail(
            e, LM_EIO, path, "name a tokenizer.json or a folder that holds one",
            "has no tokenizer.json, vocab.json and merges.txt, tokenizer.model, spiece.model, "
            "nor vocab.txt");
    } else if (!rc) {
        rc = lm_file_read(p.whole, MAX_FILE, &text, e);
    }
    if (!rc)
        rc = lm_tokenizer_from_text(text.data, text.len, &config, where, out, e);
    lm_buf_fini(&text);
    lm_buf_fini(&config);
    free_paths(&p);
    return rc;
}
