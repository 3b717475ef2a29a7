/* SPDX-License-Identifier: Apache-2.0 */
/* answers.c -- makes answers of records. */
#include "text/answers.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/stop.h"
#include "text/record_pipe.h"

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
    size_t end[2]; /* in the record's ids */
    int64_t prompt[2];
    bool good[2];
    double margin;
    int n, cut;
    bool dropped;
} made;

/* A record at work. */
typedef struct {
    const lm_text_answers_opts *o;
    record_maker *maker;
    size_t from; /* its ids in maker->ids */
    made *m;
} work;

typedef struct {
    const lm_text_answers_opts *o;
    lm_text_answers *a;
} run;

/* ---- one record ---- */

static lm_code add_answer(const work *w, const lm_text_record *rec, const json_t *answer, bool good,
                          lm_err *e)
{
    lm_text_example *x = &w->maker->x;
    lm_ids *ids = &w->maker->ids;
    made *m = w->m;
    if (lm_text_example_answer(&w->o->maker, w->maker->scratch, rec, answer, x, e))
        return e->code;
    m->dropped |= x->dropped || x->prompt >= x->ids.n || x->ids.n < 2;
    m->cut += x->cut > 0;
    if (m->dropped)
        return LM_OK;
    if (lm_grow(&ids->v, &ids->cap, ids->n + x->ids.n, sizeof *ids->v, "token ids", e))
        return e->code;
    memcpy(ids->v + ids->n, x->ids.v, x->ids.n * sizeof *x->ids.v);
    ids->n += x->ids.n;
    m->good[m->n] = good;
    m->prompt[m->n] = x->prompt > 1 ? (int64_t)x->prompt : 1;
    m->end[m->n++] = ids->n - w->from;
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
static lm_code add_given(const work *w, lm_text_record *rec, lm_err *e)
{
    if (rec->kind == LM_RECORD_MESSAGES && split_messages(rec, e))
        return e->code;
    const json_t *answer = rec->kind == LM_RECORD_PREFERENCE ? rec->chosen
                           : rec->kind == LM_RECORD_UNPAIRED || rec->kind == LM_RECORD_COMPLETION
                               ? rec->completion
                               : NULL;
    return answer ? add_answer(w, rec, answer, true, e)
                  : lm_fail(e, LM_EFORMAT, "record", "give prompt and completion, or messages",
                            "is of the kind '%s'", lm_text_record_kind_name(rec->kind));
}

static lm_code add_record(const work *w, lm_text_record *rec, lm_err *e)
{
    if (w->o->given)
        return add_given(w, rec, e);
    if (rec->kind == LM_RECORD_PREFERENCE)
        return read_margin(rec, w->m, e) || add_answer(w, rec, rec->chosen, true, e) ||
                       add_answer(w, rec, rec->rejected, false, e)
                   ? e->code
                   : LM_OK;
    if (rec->kind == LM_RECORD_UNPAIRED && !w->o->pairs)
        return add_answer(w, rec, rec->completion, rec->good, e);
    return lm_fail(e, LM_EFORMAT, "record",
                   w->o->pairs ? "give prompt, chosen and rejected"
                               : "give prompt, completion and label, or pairs",
                   "is of the kind '%s'", lm_text_record_kind_name(rec->kind));
}

/* True if the answers of a pair are the same ids: a cut may have made them so. */
static bool are_equal(const made *m, const uint32_t *ids)
{
    size_t n = m->end[0];
    return m->n == 2 && m->end[1] - n == n && !memcmp(ids, ids + n, n * sizeof *ids);
}

/* A record_pipe's make. */
static lm_code make(void *ctx, record_maker *maker, lm_text_record *rec, void *result, lm_err *e)
{
    lm_ids *ids = &maker->ids;
    made *m = result;
    const work w = { ((const run *)ctx)->o, maker, ids->n, m };
    if (add_record(&w, rec, e))
        return e->code;
    if (m->dropped || are_equal(m, ids->v + w.from)) {
        ids->n = w.from;
        m->dropped = true;
        m->n = 0;
    }
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

/* A record_pipe's take. */
static lm_code take(void *ctx, const uint32_t *ids, size_t n, const void *result, const char *form,
                    lm_err *e)
{
    lm_text_answers *a = ((run *)ctx)->a;
    lm_text_answers_stats *st = &a->st;
    const made *m = result;
    (void)n;
    if (!st->records++)
        st->form = form;
    st->cut += m->cut;
    st->dropped += m->dropped;
    for (int k = 0; k < m->n; k++) {
        size_t begin = k ? m->end[k - 1] : 0;
        if (keep_answer(a, ids + begin, m->end[k] - begin, m, k, e))
            return e->code;
        st->good += m->good[k];
        st->bad += !m->good[k];
    }
    st->pairs += m->n == 2;
    return LM_OK;
}

static lm_code check_some(const lm_text_answers_opts *o, const lm_text_answers *a, lm_err *e)
{
    const char *name = o->n ? o->path[0] : "standard input";
    if (a->n || lm_stopping())
        return LM_OK;
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
    if (lm_alloc_n(&r.a, 1, sizeof *r.a, "answers", e))
        return e->code;
    if (record_pipe_run(&pipe, par, e) || check_some(o, r.a, e)) {
        lm_text_answers_free(r.a);
        return e->code;
    }
    finish(r.a);
    *out = r.a;
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
