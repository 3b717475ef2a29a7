/* SPDX-License-Identifier: Apache-2.0 */
/* answers.c -- makes answers of records on all threads, in the order of the records. */
#include "text/answers.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "text/doc_batch.h"

struct lm_text_answers {
    lm_ids ids;
    lm_text_answer *answer; /* ids are set when all are read */
    size_t *begin;          /* of each in ids */
    size_t n, cap, cap_begin;
    lm_text_answers_stats st;
    uint64_t digest;
};

/* The two or fewer answers of a record. */
typedef struct {
    size_t end[2]; /* in ids */
    int64_t prompt[2];
    bool good[2];
    double margin;
    int n, cut;
    bool dropped;
    const char *form;
} made;

typedef struct {
    lm_doc_batch docs; /* first, for the pool */
    lm_ids ids;
    made of[LM_BATCH_DOCS];
    lm_text_example x;
} batch;

typedef struct {
    const lm_text_answers_opts *o;
    lm_input *in;
    lm_text_answers *a;
    lm_text_example_scratch **scratch; /* by worker */
    lm_doc_pool pool;
} run;

static void fini_batch(void *item)
{
    lm_ids_fini(&((batch *)item)->ids);
    lm_text_example_fini(&((batch *)item)->x);
}

static lm_code read_batch(void *ctx, void **item, lm_err *e)
{
    run *r = ctx;
    return lm_doc_pool_read(&r->pool, r->in, item, e);
}

static void drop_batch(void *ctx, void *item)
{
    lm_doc_pool_give(&((run *)ctx)->pool, item);
}

/* ---- one record ---- */

static lm_code add_answer(run *r, batch *b, made *m, const lm_text_record *rec,
                          const json_t *answer, bool good, int worker, lm_err *e)
{
    lm_text_example *x = &b->x;
    if (lm_text_example_answer(&r->o->maker, r->scratch[worker], rec, answer, x, e))
        return e->code;
    m->dropped |= x->dropped || x->prompt >= x->ids.n || x->ids.n < 2;
    m->cut += x->cut > 0;
    if (m->dropped)
        return LM_OK;
    if (lm_grow(&b->ids.v, &b->ids.cap, b->ids.n + x->ids.n, sizeof *b->ids.v, "token ids", e))
        return e->code;
    memcpy(b->ids.v + b->ids.n, x->ids.v, x->ids.n * sizeof *x->ids.v);
    b->ids.n += x->ids.n;
    m->good[m->n] = good;
    m->prompt[m->n] = x->prompt > 1 ? (int64_t)x->prompt : 1;
    m->end[m->n++] = b->ids.n;
    return LM_OK;
}

static lm_code read_margin(const lm_text_record *rec, made *m, lm_err *e)
{
    const json_t *v = rec->line ? json_object_get(rec->line, "margin") : NULL;
    m->margin = v ? json_number_value(v) : 0;
    return !v || (json_is_number(v) && isfinite(m->margin))
               ? LM_OK
               : lm_fail(e, LM_EFORMAT, "margin", NULL, "is not a number");
}

/* Messages as a prompt and the assistant's last turn. */
static lm_code split_messages(lm_text_record *rec, lm_err *e)
{
    size_t last = json_array_size(rec->messages);
    const char *role = NULL;
    while (last-- > 0) {
        role = json_string_value(json_object_get(json_array_get(rec->messages, last), "role"));
        if (role && !strcmp(role, "assistant"))
            break;
        role = NULL;
    }
    if (!role || last == 0)
        return lm_fail(e, LM_EFORMAT, "messages", NULL, "%s",
                       role ? "nothing is before the assistant's turn"
                            : "have no turn of the assistant");
    rec->prompt = json_array();
    rec->completion = json_array();
    for (size_t i = 0; i <= last; i++)
        json_array_append(i < last ? rec->prompt : rec->completion,
                          json_array_get(rec->messages, i));
    rec->kind = LM_RECORD_COMPLETION;
    return json_array_size(rec->prompt) == last && json_array_size(rec->completion) == 1
               ? LM_OK
               : lm_fail(e, LM_ELIMIT, "messages", NULL, "no memory for them");
}

/* The one answer of a record that is taken as it is. */
static lm_code add_given(run *r, batch *b, made *m, lm_text_record *rec, int worker, lm_err *e)
{
    if (rec->kind == LM_RECORD_MESSAGES && split_messages(rec, e))
        return e->code;
    const json_t *answer = rec->kind == LM_RECORD_PREFERENCE ? rec->chosen
                           : rec->kind == LM_RECORD_UNPAIRED || rec->kind == LM_RECORD_COMPLETION
                               ? rec->completion
                               : NULL;
    return answer ? add_answer(r, b, m, rec, answer, true, worker, e)
                  : lm_fail(e, LM_EFORMAT, "record", "give prompt and completion, or messages",
                            "is of the kind '%s'", lm_text_record_kind_name(rec->kind));
}

static lm_code add_record(run *r, batch *b, made *m, lm_text_record *rec, int worker, lm_err *e)
{
    if (r->o->given)
        return add_given(r, b, m, rec, worker, e);
    if (rec->kind == LM_RECORD_PREFERENCE)
        return read_margin(rec, m, e) || add_answer(r, b, m, rec, rec->chosen, true, worker, e) ||
                       add_answer(r, b, m, rec, rec->rejected, false, worker, e)
                   ? e->code
                   : LM_OK;
    if (rec->kind == LM_RECORD_UNPAIRED && !r->o->pairs)
        return add_answer(r, b, m, rec, rec->completion, rec->good, worker, e);
    return lm_fail(e, LM_EFORMAT, "record",
                   r->o->pairs ? "give prompt, chosen and rejected"
                               : "give prompt, completion and label, or pairs",
                   "is of the kind '%s'", lm_text_record_kind_name(rec->kind));
}

/* True if the answers of a pair are the same ids: a cut may have made them so. */
static bool are_equal(const batch *b, const made *m, size_t from)
{
    size_t n = m->end[0] - from;
    return m->n == 2 && m->end[1] - m->end[0] == n &&
           !memcmp(b->ids.v + from, b->ids.v + m->end[0], n * sizeof *b->ids.v);
}

static lm_code work_doc(run *r, batch *b, int i, int worker, lm_err *e)
{
    const lm_doc *d = &b->docs.doc[i];
    lm_text_record rec = { 0 };
    made *m = &b->of[i];
    size_t from = b->ids.n;
    *m = (made){ .n = 0 };
    if (lm_text_record_of_doc(d, r->o->map, &rec, e))
        return e->code;
    m->form = rec.form;
    lm_code rc = add_record(r, b, m, &rec, worker, e);
    if (rc)
        lm_err_in(e, "%s:%lld", d->source, (long long)d->line);
    else
        m->dropped |= are_equal(b, m, from);
    if (m->dropped) {
        b->ids.n = from;
        m->n = 0;
    }
    lm_text_record_fini(&rec);
    return rc;
}

static lm_code work_batch(void *ctx, void *item, int worker, lm_err *e)
{
    batch *b = item;
    b->ids.n = 0;
    for (int i = 0; i < b->docs.n; i++)
        if (work_doc(ctx, b, i, worker, e))
            return e->code;
    return LM_OK;
}

/* ---- all records ---- */

static lm_code keep_answer(lm_text_answers *a, const uint32_t *ids, size_t n, const made *m, int k,
                           lm_err *e)
{
    if (lm_grow(&a->ids.v, &a->ids.cap, a->ids.n + n, sizeof *a->ids.v, "token ids", e) ||
        lm_grow(&a->answer, &a->cap, a->n + 1, sizeof *a->answer, "answers", e) ||
        lm_grow(&a->begin, &a->cap_begin, a->n + 1, sizeof *a->begin, "answers", e))
        return e->code;
    memcpy(a->ids.v + a->ids.n, ids, n * sizeof *ids);
    a->begin[a->n] = a->ids.n;
    a->answer[a->n++] = (lm_text_answer){
        .n = (int64_t)n, .prompt = m->prompt[k], .good = m->good[k], .margin = m->margin
    };
    a->ids.n += n;
    a->st.longest = (int64_t)n > a->st.longest ? (int64_t)n : a->st.longest;
    return LM_OK;
}

static lm_code keep_record(lm_text_answers *a, const batch *b, const made *m, size_t from,
                           lm_err *e)
{
    lm_text_answers_stats *st = &a->st;
    if (!st->records++)
        st->form = m->form;
    st->cut += m->cut;
    st->dropped += m->dropped;
    for (int k = 0; k < m->n; k++) {
        size_t begin = k ? m->end[k - 1] : from;
        if (keep_answer(a, b->ids.v + begin, m->end[k] - begin, m, k, e))
            return e->code;
        st->good += m->good[k];
        st->bad += !m->good[k];
    }
    st->pairs += m->n == 2;
    return LM_OK;
}

static lm_code write_batch(void *ctx, void *item, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    size_t from = 0;
    char note[48];
    lm_code rc = LM_OK;
    for (int i = 0; i < b->docs.n && !rc; i++) {
        const made *m = &b->of[i];
        if (!r->o->limit || r->a->st.records < r->o->limit)
            rc = keep_record(r->a, b, m, from, e);
        from = m->n ? m->end[m->n - 1] : from;
    }
    lm_doc_pool_give(&r->pool, b);
    lm_input_stats in = lm_input_stat(r->in);
    snprintf(note, sizeof note, "%" PRId64 " records", r->a->st.records);
    lm_progress(r->o->sink, "reading", (double)in.bytes, (double)in.total, "bytes", note);
    return rc;
}

static lm_code run_pipe(run *r, lm_par *par, lm_err *e)
{
    int n = lm_par_threads(par);
    lm_pipe_ops ops = { .read = read_batch,
                        .work = work_batch,
                        .write = write_batch,
                        .drop = drop_batch,
                        .ctx = r,
                        .depth = 2 * n + 2 };
    lm_doc_pool_init(&r->pool, sizeof(batch), fini_batch);
    lm_code rc = lm_alloc_n(&r->scratch, (size_t)n, sizeof *r->scratch, "scratch", e);
    for (int i = 0; i < n && !rc; i++)
        rc = lm_text_example_scratch_new(&r->o->maker, &r->scratch[i], e);
    if (!rc)
        rc = lm_par_pipe(par, &ops, e);
    for (int i = 0; i < n && r->scratch; i++)
        lm_text_example_scratch_free(r->scratch[i]);
    lm_doc_pool_fini(&r->pool);
    lm_free(r->scratch);
    return rc;
}

static lm_code check_some(const lm_text_answers_opts *o, const lm_text_answers *a, lm_err *e)
{
    const char *name = o->n ? o->path[0] : "standard input";
    if (a->n || lm_stopping())
        return LM_OK;
    if (!a->st.records)
        return lm_fail(e, LM_EUSAGE, name, "give at least one", "holds no record");
    return lm_fail(e, LM_EUSAGE, name, "allow longer texts",
                   "no record is left: %" PRId64 " are longer than %" PRId64
                   " tokens, or have no answer",
                   a->st.dropped, o->maker.most);
}

static void finish(lm_text_answers *a)
{
    a->digest = lm_hash64(a->ids.v, a->ids.n * sizeof *a->ids.v, 0);
    a->st.ids = (int64_t)a->ids.n;
    for (size_t i = 0; i < a->n; i++) {
        lm_text_answer *x = &a->answer[i];
        const struct {
            int64_t n, prompt, good;
            double margin;
        } about = { x->n, x->prompt, x->good, x->margin };
        x->ids = a->ids.v + a->begin[i];
        a->digest = lm_hash64(&about, sizeof about, a->digest);
    }
}

lm_code lm_text_answers_read(const lm_text_answers_opts *o, lm_par *par, lm_text_answers **out,
                             lm_err *e)
{
    const lm_input_opts in = { .kind = LM_INPUT_AUTO };
    lm_text_answers *a = NULL;
    run r = { .o = o };
    *out = NULL;
    if (lm_alloc_n(&a, 1, sizeof *a, "answers", e))
        return e->code;
    r.a = a;
    lm_code rc = lm_input_open(&in, o->path, o->n, &r.in, e);
    rc = rc ? rc : run_pipe(&r, par, e);
    lm_input_close(r.in);
    rc = rc ? rc : check_some(o, a, e);
    if (rc) {
        lm_text_answers_free(a);
        return rc;
    }
    finish(a);
    *out = a;
    return LM_OK;
}

void lm_text_answers_free(lm_text_answers *a)
{
    if (!a)
        return;
    lm_ids_fini(&a->ids);
    lm_free(a->answer);
    lm_free(a->begin);
    lm_free(a);
}

int64_t lm_text_answers_count(const lm_text_answers *a)
{
    return (int64_t)a->n;
}

const lm_text_answer *lm_text_answers_at(const lm_text_answers *a, int64_t i)
{
    return &a->answer[i];
}

const lm_text_answers_stats *lm_text_answers_stat(const lm_text_answers *a)
{
    return &a->st;
}

uint64_t lm_text_answers_digest(const lm_text_answers *a)
{
    return a->digest;
}
