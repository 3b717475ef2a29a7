/* SPDX-License-Identifier: Apache-2.0 */
/* data.c -- finds and opens the datasets of a training. */
#include "train/data.h"

#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "format/source.h"
#include "text/tokenizer_match.h"
#include "text/tokenizer_source.h"
#include "train/feed.h"

lm_code lm_data_find(const char *data, const char *val, char **train_out, char **val_out, lm_err *e)
{
    *train_out = *val_out = NULL;
    lm_code rc = lm_path_is_dir(data) ? lm_tokens_in_folder(data, train_out, val_out, e)
                                      : lm_strdup(train_out, data, e);
    if (!rc && !*train_out) /* for the error message of opening it */
        rc = lm_path_join(train_out, data, "train", e);
    if (rc || !val)
        return rc;
    lm_free(*val_out);
    *val_out = NULL;
    return lm_strdup(val_out, val, e);
}

lm_code lm_data_there(const char *path, lm_err *e)
{
    lm_tokens *t = NULL;
    bool there = false;
    if (lm_input_is_text(path) || lm_input_is_text_name(path))
        return lm_source_there(&path, 1, e);
    lm_code rc = lm_tokens_there(path, &there, e);
    if (!rc && !there && !lm_path_exists(path)) /* for its error message */
        rc = lm_tokens_open(path, LM_TOKENS_AUTO, -1, &t, e);
    lm_tokens_close(t);
    return rc;
}

static lm_code check_model(const lm_data_opts *o, const lm_tokens *data, lm_err *e)
{
    lm_tokenizer *tok = NULL;
    lm_code rc = lm_tokens_made_with(data).ids ? lm_tokenizer_of(o->m, &tok, e) : LM_OK;
    const lm_token_reader r = { .name = lm_model_source_path(o->m), .vocab = o->vocab, .tok = tok };
    if (!rc)
        rc = lm_token_reader_check(&r, data, e);
    lm_tokenizer_free(tok);
    return rc;
}

/* Ids of another tokenizer are usually found in the first and last window; all others are checked
 * when they are read. */
static lm_code check_ends(const lm_data_opts *o, const lm_tokens *data, lm_err *e)
{
    int64_t count = lm_tokens_count(data), n = count < o->seq + 1 ? count : o->seq + 1;
    uint32_t *ids = NULL;
    lm_code rc = lm_alloc_n(&ids, (size_t)n + 1, sizeof *ids, "a window of ids", e);
    if (!rc)
        rc = lm_tokens_read(data, 0, n, o->vocab, ids, e);
    if (!rc)
        rc = lm_tokens_read(data, count - n, n, o->vocab, ids, e);
    lm_free(ids);
    return rc;
}

lm_code lm_data_open(const char *path, const lm_data_opts *o, lm_par *par, lm_tokens **out,
                     lm_err *e)
{
    lm_code rc = lm_tokens_open(path, o->kind, o->eos, out, e);
    if (!rc && o->m)
        rc = check_model(o, *out, e);
    if (!rc)
        rc = lm_feed_enough(*out, o->seq, e);
    if (!rc)
        rc = check_ends(o, *out, e);
    return rc ? rc : lm_tokens_index(*out, par, e);
}

lm_code lm_data_digest(const lm_tokens *data, uint64_t *out, lm_err *e)
{
    enum { PLACES = 64, IDS = 256 };
    const int64_t count = lm_tokens_count(data), n = count < IDS ? count : IDS;
    uint32_t ids[IDS];
    *out = lm_hash64(&count, sizeof count, 0);
    for (int64_t i = 0; i < PLACES; i++) {
        const double share = (double)i / (PLACES - 1);
        if (lm_tokens_read(data, (int64_t)(share * (double)(count - n)), n, INT64_MAX, ids, e))
            return e->code;
        *out = lm_hash64(ids, (size_t)n * sizeof *ids, *out);
    }
    return LM_OK;
}

lm_code lm_data_id_bytes(lm_model_source *m, int64_t vocab, uint16_t **out, lm_err *e)
{
    lm_tokenizer *t = NULL;
    lm_code rc = lm_tokenizer_of(m, &t, e);

    *out = NULL;
    if (rc || !t)
        return rc;
    rc = lm_alloc_n(out, (size_t)vocab, sizeof **out, "token lengths", e);
    for (int64_t i = 0; !rc && i < vocab; i++)
        (*out)[i] = (uint16_t)lm_tokenizer_id_bytes(t, (uint32_t)i);
    lm_tokenizer_free(t);
    return rc;
}
