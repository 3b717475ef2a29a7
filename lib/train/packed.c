/* SPDX-License-Identifier: Apache-2.0 */
/* packed.c -- records to packed windows. */
#include "train/packed.h"

#include <inttypes.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/tokenizer_source.h"

static lm_code pack(lm_packed_set *p, int64_t size, bool join, lm_err *e)
{
    int64_t n = lm_text_examples_count(p->examples), *length = NULL;
    if (lm_alloc_n(&length, (size_t)n, sizeof *length, "lengths of examples", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        length[i] = lm_text_examples_length(p->examples, i);
    lm_code rc = lm_pack_make(length, n, size, join, &p->pack, e);
    lm_free(length);
    return rc;
}

lm_code lm_packed_read(const lm_text_examples_opts *o, int64_t seq, bool join, lm_par *par,
                       lm_packed_set *out, lm_err *e)
{
    lm_text_examples_opts how = *o;
    *out = (lm_packed_set){ .pairs = o->maker.pair };
    if (how.maker.most <= 0 || how.maker.most > seq)
        how.maker.most = seq;
    if (how.maker.pair && how.maker.eos < 0)
        return lm_fail(e, LM_EUSAGE, "pairs", "set eos_token_id in its config.json",
                       "the model has no end token");
    lm_code rc = lm_text_examples_read(&how, par, &out->examples, e);
    const lm_text_examples_stats *st = rc ? NULL : lm_text_examples_stat(out->examples);
    rc = rc           ? rc
         : out->pairs ? pack(out, st->source + st->target, false, e)
                      : pack(out, seq, join, e);
    if (rc) {
        lm_packed_fini(out);
        return rc;
    }
    out->data = (lm_packed){ .examples = out->examples, .pack = &out->pack };
    return LM_OK;
}

void lm_packed_fini(lm_packed_set *p)
{
    lm_text_examples_free(p->examples);
    lm_pack_fini(&p->pack);
    *p = (lm_packed_set){ 0 };
}

static lm_code pairs_line(const lm_text_examples_stats *st, lm_buf *out, lm_err *e)
{
    return lm_buf_addf(out, e,
                       "%" PRId64 " record%s (%s): %" PRId64 " pair%s of %" PRId64
                       " tokens, of which %.1f %% train; sources have up to %" PRId64
                       ", targets up to %" PRId64,
                       st->records, lm_plural((uint64_t)st->records), st->form, st->examples,
                       lm_plural((uint64_t)st->examples), st->ids,
                       100 * (double)st->trained / (double)st->ids, st->source, st->target);
}

lm_code lm_packed_line(const lm_packed_set *p, int64_t seq, lm_buf *out, lm_err *e)
{
    const lm_text_examples_stats *st = lm_text_examples_stat(p->examples);
    double full = (double)p->pack.used / ((double)p->pack.windows * (double)seq);
    lm_code rc = p->pairs
                     ? pairs_line(st, out, e)
                     : lm_buf_addf(out, e,
                                   "%" PRId64 " record%s (%s): %" PRId64 " example%s in %" PRId64
                                   " window%s of %" PRId64
                                   " tokens, %.1f %% full; %.1f %% of %" PRId64 " tokens train",
                                   st->records, lm_plural((uint64_t)st->records), st->form,
                                   st->examples, lm_plural((uint64_t)st->examples), p->pack.windows,
                                   lm_plural((uint64_t)p->pack.windows), seq, 100 * full,
                                   100 * (double)st->trained / (double)st->ids, st->ids);
    if (!rc && st->cut)
        rc = lm_buf_addf(out, e, "; %" PRId64 " cut by %" PRId64 " tokens in all", st->cut,
                         st->cut_ids);
    if (!rc && st->dropped)
        rc = lm_buf_addf(out, e, "; %" PRId64 " left out as too long", st->dropped);
    if (!rc && st->silent)
        rc = lm_buf_addf(out, e, "; %" PRId64 " left out without a token that trains", st->silent);
    return rc;
}

lm_code lm_packed_maker_with(const lm_tokenizer *tok, lm_model_source *m, const char *want,
                             int64_t eos, lm_text_example_maker *out, lm_err *e)
{
    lm_chat *chat = NULL;
    lm_err none = { 0 };
    lm_code rc = lm_chat_open(m, tok, want, &chat, &none);
    if (rc && (want || rc != LM_EUSAGE)) {
        *e = none;
        return rc;
    }
    out->tok = tok;
    out->chat = chat;
    out->wrap = want != NULL;
    out->eos = lm_tokenizer_eos(tok) >= 0 ? lm_tokenizer_eos(tok) : eos;
    return LM_OK;
}

lm_code lm_packed_maker(lm_model_source *m, const char *want, int64_t eos,
                        lm_text_example_maker *out, lm_err *e)
{
    lm_tokenizer *tok = NULL;
    if (lm_tokenizer_of(m, &tok, e))
        return e->code;
    if (!tok)
        return lm_fail(e, LM_EUSAGE, lm_model_source_path(m), "copy its tokenizer.json into it",
                       "the model has no tokenizer, which text needs");
    lm_code rc = lm_packed_maker_with(tok, m, want, eos, out, e);
    if (rc)
        lm_tokenizer_free(tok);
    return rc;
}

void lm_packed_maker_fini(lm_text_example_maker *m)
{
    lm_tokenizer_free((lm_tokenizer *)m->tok);
    lm_chat_free((lm_chat *)m->chat);
    m->tok = NULL;
    m->chat = NULL;
}
