/* SPDX-License-Identifier: Apache-2.0 */
/* tokens.c -- the model and the tokens that calibrations and reports run through it. */
#include "format/tokens.h"

#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/model.h"
#include "format/input.h"
#include "quantize-kv/model.h"
#include "text/tokenizer_match.h"
#include "text/tokenizer_source.h"
#include "train/window.h"

/* How documents become ids: one after another, or as whole windows of `seq` ids each, what is left of a document or
 * shorter than a window being left out. */
typedef struct {
    const kv_work *w;
    int64_t seq; /* 0: documents are joined */
    size_t most; /* ids */
    lm_ids *out;
    int64_t longest; /* document */
} reading;

/* The ids of a document of n that are taken. */
static int64_t take(reading *r, int64_t n)
{
    int64_t room = (int64_t)(r->most - r->out->n);

    r->longest = n > r->longest ? n : r->longest;
    if (r->seq)
        n -= n % r->seq;
    return n < room ? n : room;
}

static lm_code read_text(reading *r, const char *path, lm_err *e)
{
    const lm_input_opts o = { 0 };
    lm_tok_scratch *scratch = NULL;
    lm_input *in = NULL;
    lm_doc doc = { 0 };
    lm_ids *out = r->out;
    bool got = true;

    if (!r->w->tok)
        return lm_fail(e, LM_EUSAGE, r->w->path, "give token shards, or --tokenizer",
                       "it has no tokenizer for the text");
    lm_code rc = lm_tok_scratch_new(r->w->tok, &scratch, e);
    if (!rc)
        rc = lm_input_open(&o, &path, 1, &in, e);
    while (!rc && out->n < r->most && !lm_stopping()) {
        size_t before = out->n;
        rc = lm_input_read(in, &doc, &got, e);
        if (rc || !got)
            break;
        rc = lm_tokenizer_encode(r->w->tok, scratch, doc.text, doc.len, true, out, e);
        int64_t n = (int64_t)(out->n - before);
        out->n = before;
        out->n += (size_t)take(r, n);
    }
    lm_doc_fini(&doc);
    lm_input_close(in);
    lm_tok_scratch_free(scratch);
    return rc;
}

/* Ids [at, at + n) of the dataset, as many as are taken. */
static lm_code add_ids(reading *r, const lm_tokens *t, int64_t at, int64_t n, lm_err *e)
{
    lm_ids *out = r->out;
    size_t taken = (size_t)take(r, n);

    if (lm_grow(&out->v, &out->cap, out->n + taken + 1, sizeof *out->v, "tokens", e) ||
        lm_tokens_read(t, at, (int64_t)taken, r->w->model.config.vocab, out->v + out->n, e))
        return e->code;
    out->n += taken;
    return LM_OK;
}

static lm_code read_shards(reading *r, const char *path, lm_err *e)
{
    const kv_work *w = r->w;
    const lm_token_reader reader = { .name = w->path,
                                     .vocab = w->model.config.vocab,
                                     .tok = w->tok };
    lm_tokens *t = NULL;
    lm_code rc =
        lm_tokens_open(path, LM_TOKENS_AUTO, w->tok ? lm_tokenizer_eos(w->tok) : -1, &t, e);

    if (!rc && w->o->check_tokenizer)
        rc = lm_token_reader_check(&reader, t, e);
    if (!rc && !r->seq)
        rc = add_ids(r, t, 0, lm_tokens_count(t), e);
    if (!rc && r->seq)
        rc = lm_tokens_index(t, w->par, e);
    int64_t docs = rc || !r->seq ? 0 : lm_tokens_docs(t);
    for (int64_t d = 0; d < docs && r->out->n < r->most && !rc && !lm_stopping(); d++) {
        int64_t at = lm_tokens_doc_start(t, d);
        rc = add_ids(r, t, at, lm_tokens_doc_start(t, d + 1) - at, e);
    }
    lm_tokens_close(t);
    return rc;
}

static lm_code read_any(reading *r, const char *path, lm_err *e)
{
    return lm_input_is_text(path) ? read_text(r, path, e) : read_shards(r, path, e);
}

lm_code kv_read_tokens(const kv_work *w, const char *path, size_t most, lm_ids *out, lm_err *e)
{
    reading r = { .w = w, .most = most, .out = out };

    return read_any(&r, path, e);
}

/* ---- windows ---- */

/* Windows of the documents.  Where all are shorter, windows run across documents, unless --documents is given; standard
 * input cannot be read again. */
static lm_code read_windows(kv_work *w, int64_t windows, lm_err *e)
{
    bool documents = w->o->documents;
    reading r = {
        .w = w, .seq = documents ? w->seq : 0, .most = (size_t)(windows * w->seq), .out = &w->ids
    };
    lm_code rc = read_any(&r, w->data, e);

    if (!rc && documents && !w->ids.n && r.longest && !lm_stopping()) {
        if (lm_given(w->tool, "documents") || !strcmp(w->data, "-"))
            return lm_fail(e, LM_EUSAGE, w->data, "give a smaller --seq-len, or --no-documents",
                           "no document has %lld tokens, the longest %lld", (long long)w->seq,
                           (long long)r.longest);
        lm_say(w->tool, LM_LOG_NOTICE,
               "%s: no document has %lld tokens, the longest %lld: windows run across documents",
               w->data, (long long)w->seq, (long long)r.longest);
        r.seq = 0;
        rc = read_any(&r, w->data, e);
    }
    w->windows = (int64_t)w->ids.n / w->seq;
    if (!rc && !w->windows && !lm_stopping())
        return lm_fail(e, LM_EUSAGE, w->data, "give more, or a smaller --seq-len",
                       "%zu token%s, fewer than a window of %lld", w->ids.n, lm_plural(w->ids.n),
                       (long long)w->seq);
    return rc;
}

lm_code kv_work_open(kv_work *w, int64_t windows, lm_err *e)
{
    const kv_model_options *o = w->o;
    unsigned how = o->check_tokenizer ? LM_TOKENIZER_CHECKED : 0u;

    if (lm_par_new(&w->par, w->tool->threads, e) ||
        lm_open_model(w->tool, w->path, o->tokenizer, w->par, &w->model, e) ||
        lm_tokenizer_choose(o->tokenizer, w->model.src, w->model.config.vocab, how, &w->tok, e))
        return e->code;
    if (o->seq > w->model.config.max_positions)
        return lm_fail(e, LM_EUSAGE, "--seq-len", "give at most as many",
                       "%lld, but the model was made for %lld position%s", (long long)o->seq,
                       (long long)w->model.config.max_positions,
                       lm_plural(w->model.config.max_positions));
    w->seq = o->seq;
    if (!w->seq && lm_window_default(w->model.src, w->model.config.max_positions, &w->seq, NULL, e))
        return e->code;
    return read_windows(w, windows, e);
}

void kv_work_close(kv_work *w)
{
    lm_loaded_fini(&w->model);
    lm_tokenizer_free(w->tok);
    lm_par_free(w->par);
    lm_ids_fini(&w->ids);
}
