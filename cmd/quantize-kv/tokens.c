/* SPDX-License-Identifier: Apache-2.0 */
/* tokens.c -- the model and the tokens that calibrations and reports run through it. */
#include "format/tokens.h"
#include "base/mem.h"
#include "base/stop.h"
#include "common/model.h"
#include "format/input.h"
#include "quantize-kv/model.h"
#include "text/tokenizer_match.h"
#include "text/tokenizer_source.h"
#include "train/window.h"

static lm_code read_text(const kv_work *w, const char *path, size_t most, lm_ids *out, lm_err *e)
{
    const lm_input_opts o = { 0 };
    lm_tok_scratch *scratch = NULL;
    lm_input *in = NULL;
    lm_doc doc = { 0 };
    bool got = true;

    if (!w->tok)
        return lm_fail(e, LM_EUSAGE, w->path, "give token shards, or --tokenizer",
                       "it has no tokenizer for the text");
    lm_code rc = lm_tok_scratch_new(w->tok, &scratch, e);
    if (!rc)
        rc = lm_input_open(&o, &path, 1, &in, e);
    while (!rc && out->n < most && !lm_stopping()) {
        rc = lm_input_read(in, &doc, &got, e);
        if (rc || !got)
            break;
        rc = lm_tokenizer_encode(w->tok, scratch, doc.text, doc.len, true, out, e);
    }
    if (out->n > most)
        out->n = most;
    lm_doc_fini(&doc);
    lm_input_close(in);
    lm_tok_scratch_free(scratch);
    return rc;
}

static lm_code read_shards(const kv_work *w, const char *path, size_t most, lm_ids *out, lm_err *e)
{
    int64_t vocab = w->model.config.vocab;
    const lm_token_reader r = { .name = w->path, .vocab = vocab, .tok = w->tok };
    lm_tokens *t = NULL;
    lm_code rc =
        lm_tokens_open(path, LM_TOKENS_AUTO, w->tok ? lm_tokenizer_eos(w->tok) : -1, &t, e);

    if (!rc && w->o->check_tokenizer)
        rc = lm_token_reader_check(&r, t, e);
    if (!rc) {
        size_t n = (size_t)lm_tokens_count(t);
        n = n < most ? n : most;
        rc = lm_grow(&out->v, &out->cap, n + 1, sizeof *out->v, "tokens", e);
        if (!rc)
            rc = lm_tokens_read(t, 0, (int64_t)n, vocab, out->v, e);
        out->n = rc ? 0 : n;
    }
    lm_tokens_close(t);
    return rc;
}

lm_code kv_read_tokens(const kv_work *w, const char *path, size_t most, lm_ids *out, lm_err *e)
{
    return lm_input_is_text(path) ? read_text(w, path, most, out, e)
                                  : read_shards(w, path, most, out, e);
}

lm_code kv_work_open(kv_work *w, int64_t windows, lm_err *e)
{
    const kv_model_options *o = w->o;
    unsigned how = o->check_tokenizer ? LM_TOKENIZER_CHECKED : 0u;

    if (lm_par_new(&w->par, w->tool->threads, e) ||
        lm_open_model(w->tool, w->path, o->tokenizer, w->par, &w->model, e) ||
        lm_tokenizer_choose(o->tokenizer, w->model.src, w->model.config.vocab, how, &w->tok, e))
        return e->code;
    w->seq = o->seq;
    if (!w->seq && lm_window_default(w->model.src, w->model.config.max_positions, &w->seq, NULL, e))
        return e->code;
    if (kv_read_tokens(w, w->data, (size_t)(windows * w->seq), &w->ids, e))
        return e->code;
    w->windows = (int64_t)w->ids.n / w->seq;
    if (!w->windows && !lm_stopping())
        return lm_fail(e, LM_EUSAGE, w->data, "give more, or a smaller --seq-len",
                       "%zu tokens, fewer than a window of %lld", w->ids.n, (long long)w->seq);
    return LM_OK;
}

void kv_work_close(kv_work *w)
{
    lm_loaded_fini(&w->model);
    lm_tokenizer_free(w->tok);
    lm_par_free(w->par);
    lm_ids_fini(&w->ids);
}
