/* SPDX-License-Identifier: Apache-2.0 */
/* examples_read.c -- makes examples of records. */
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "text/examples_impl.h"
#include "text/record_pipe.h"

typedef struct {
    size_t cut, trained, prompt;
    bool dropped;
    lm_text_record_kind kind;
} made;

typedef struct {
    const lm_text_examples_opts *o;
    lm_text_examples *x;
} run;

static lm_code make(void *ctx, record_maker *m, lm_text_record *rec, void *result, lm_err *e)
{
    const run *r = ctx;
    const lm_text_example *x = &m->x;
    lm_ids *ids = &m->ids;
    if (lm_text_example_make(&r->o->maker, m->scratch, rec, &m->x, e) ||
        lm_grow(&ids->v, &ids->cap, ids->n + x->ids.n, sizeof *ids->v, "token ids", e))
        return e->code;
    /* The first id follows nothing: it is never predicted. */
    for (size_t k = 0; k < x->ids.n; k++)
        ids->v[ids->n++] = x->ids.v[k] | (k && x->trains[k] ? LM_TOKENS_TRAINS : 0);
    *(made *)result = (made){ .cut = x->cut,
                              .trained = x->trained - (x->ids.n && x->trains[0]),
                              .prompt = x->prompt,
                              .dropped = x->dropped,
                              .kind = rec->kind };
    return LM_OK;
}

static lm_code take(void *ctx, const uint32_t *ids, size_t n, const void *result, const char *form,
                    lm_err *e)
{
    lm_text_examples *x = ((run *)ctx)->x;
    lm_text_examples_stats *st = &x->st;
    const made *m = result;
    if (!st->records++)
        st->form = form;
    st->kind[m->kind]++;
    if (m->dropped) {
        st->dropped++;
        return LM_OK;
    }
    st->cut += m->cut > 0;
    st->cut_ids += (int64_t)m->cut;
    if (!m->trained) {
        st->silent++;
        return LM_OK;
    }
    st->trained += (int64_t)m->trained;
    st->source = (int64_t)m->prompt > st->source ? (int64_t)m->prompt : st->source;
    const int64_t target = (int64_t)(n - m->prompt);
    st->target = target > st->target ? target : st->target;
    return examples_append(x, ids, n, e);
}

static lm_code check_some(const lm_text_examples_opts *o, const lm_text_examples *x, lm_err *e)
{
    const lm_text_examples_stats *st = &x->st;
    const char *name = o->n ? o->path[0] : "standard input";
    if (st->examples || lm_stopping())
        return LM_OK;
    if (st->dropped)
        return lm_fail(e, LM_EUSAGE, name, "use longer windows, or cut examples",
                       "every example is longer than %lld tokens", (long long)o->maker.most);
    return lm_fail(e, LM_EUSAGE, name, "train on all of the text, or check where answers begin",
                   "no example has a token that is trained (%lld record%s)", (long long)st->records,
                   lm_plural((uint64_t)st->records));
}

lm_code lm_text_examples_read(const lm_text_examples_opts *o, lm_par *par, lm_text_examples **out,
                              lm_err *e)
{
    run r = { .o = o };
    const record_pipe pipe = { .path = o->path,
                               .n = o->n,
                               .map = o->map,
                               .maker = &o->maker,
                               .limit = o->limit,
                               .sink = o->sink,
                               .result = sizeof(made),
                               .make = make,
                               .take = take,
                               .ctx = &r };
    *out = NULL;
    if (examples_new(o->tmp, &r.x, e))
        return e->code;
    r.x->st.ahead = o->maker.pair && o->maker.unseen ? o->maker.virtuals : 0;
    if (record_pipe_run(&pipe, par, e) || check_some(o, r.x, e) || examples_finish(r.x, e))
        lm_text_examples_free(r.x);
    else
        *out = r.x;
    return e->code;
}
