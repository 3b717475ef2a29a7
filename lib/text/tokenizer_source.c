/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_source.c -- see tokenizer_source.h. */
#include "text/tokenizer_source.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "text/added_list.h"
#include "text/tokenizer_impl.h"
#include "text/tokenizer_match.h"

enum { MAX_FILE = 256 << 20 };

typedef lm_code reading(lm_model_source *m, const char *name, size_t limit, lm_buf *out,
                        bool *found, lm_err *e);

/* tokenizer_config.json, with what added_tokens.json lists when `added`. */
static lm_code read_config(lm_model_source *m, bool added, lm_buf *config, lm_err *e)
{
    lm_buf list = { 0 };
    char where[300];
    bool there;
    lm_code rc = lm_model_source_file_now(m, "tokenizer_config.json", MAX_FILE, config, &there, e);

    if (rc || !added)
        return rc;
    snprintf(where, sizeof where, "%.200s: added_tokens.json", lm_model_source_path(m));
    rc = lm_model_source_file_now(m, "added_tokens.json", MAX_FILE, &list, &there, e);
    if (!rc && there)
        rc = lm_added_list_take(config, &list, where, e);
    lm_buf_fini(&list);
    return rc;
}

lm_code lm_tokenizer_text(lm_model_source *m, bool spool, lm_buf *json, lm_buf *config,
                          const char **from, lm_err *e)
{
    static const char *const alone[] = { "tokenizer.model", "spiece.model", "vocab.txt" };
    reading *read = spool ? lm_model_source_file : lm_model_source_file_now;
    lm_buf vocab = { 0 }, merges = { 0 };
    bool found = false, pair = false;
    char where[300];
    lm_code rc = read(m, "tokenizer.json", MAX_FILE, json, &found, e);

    *from = found ? "tokenizer.json" : NULL;
    if (!rc && !found)
        rc = read(m, "vocab.json", MAX_FILE, &vocab, &pair, e);
    if (!rc && pair)
        rc = read(m, "merges.txt", MAX_FILE, &merges, &pair, e);
    for (int i = 0; !rc && !found && !pair && i < 3; i++) {
        rc = read(m, alone[i], MAX_FILE, json, &found, e);
        *from = found ? alone[i] : NULL;
    }
    if (pair && !*from)
        *from = "vocab.json";
    if (!rc && *from)
        rc = read_config(m, strcmp(*from, "tokenizer.json") != 0, config, e);
    snprintf(where, sizeof where, "%.200s: merges.txt", lm_model_source_path(m));
    if (!rc && pair)
        rc = lm_tokenizer_join(&vocab, where, &merges, config, json, e);
    lm_buf_fini(&vocab);
    lm_buf_fini(&merges);
    return rc;
}

static lm_code load_own(lm_model_source *m, bool spool, lm_tokenizer **out, lm_err *e)
{
    lm_buf json = { 0 }, config = { 0 };
    const char *from = NULL;
    char where[300];
    lm_code rc = lm_tokenizer_text(m, spool, &json, &config, &from, e);

    *out = NULL;
    snprintf(where, sizeof where, "%.200s: %s", lm_model_source_path(m), from ? from : "");
    if (!rc && from)
        rc = lm_tokenizer_from_text(json.data, json.len, &config, where, out, e);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    return rc;
}

lm_code lm_tokenizer_of(lm_model_source *m, lm_tokenizer **out, lm_err *e)
{
    return load_own(m, true, out, e);
}

/* An unreadable tokenizer of the model does not exclude the one that replaces it. */
static lm_code check_replacement(const char *path, lm_model_source *m, int64_t vocab,
                                 const lm_tokenizer *t, lm_err *e)
{
    lm_err ignored = { 0 };
    lm_tokenizer *own = NULL;
    if (load_own(m, false, &own, &ignored))
        own = NULL;
    const lm_token_reader r = { .name = lm_model_source_path(m), .vocab = vocab, .tok = own };
    lm_code rc = lm_token_reader_accepts(&r, t, path, e);
    lm_tokenizer_free(own);
    return rc;
}

lm_code lm_tokenizer_choose(const char *path, lm_model_source *m, int64_t vocab, unsigned how,
                            lm_tokenizer **out, lm_err *e)
{
    const char *where = path ? path : lm_model_source_path(m);
    lm_code rc = path ? lm_tokenizer_load(path, out, e) : lm_tokenizer_of(m, out, e);

    if (!rc && !*out && how & LM_TOKENIZER_NEEDED)
        rc = lm_fail(e, LM_EUSAGE, where, "name a tokenizer",
                     "the model has no tokenizer, which text needs");
    if (rc || !*out)
        return rc;
    int64_t ids = lm_tokenizer_vocab_size(*out);
    if (ids > vocab)
        rc = lm_fail(e, LM_EUSAGE, where, "use the tokenizer that the model was trained with",
                     "it has %" PRId64 " id%s, the model's vocabulary is %" PRId64, ids,
                     lm_plural(ids), vocab);
    if (!rc && path && how & LM_TOKENIZER_CHECKED)
        rc = check_replacement(path, m, vocab, *out, e);
    if (rc) {
        lm_tokenizer_free(*out);
        *out = NULL;
    }
    return rc;
}

lm_code lm_tokenizer_is_of(lm_model_source *m, const lm_tokenizer *tok, bool *same, lm_err *e)
{
    lm_tokenizer *own = NULL;
    *same = false;
    if (lm_tokenizer_of(m, &own, e))
        return e->code;
    *same = !own;
    if (own) {
        const lm_tokens_tokenizer a = lm_tokenizer_identity(own), b = lm_tokenizer_identity(tok);
        *same = a.ids == b.ids && a.digest == b.digest;
    }
    lm_tokenizer_free(own);
    return LM_OK;
}
