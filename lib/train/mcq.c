/* SPDX-License-Identifier: Apache-2.0 */
/* mcq.c -- multiple choice. */
#include "train/mcq.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "train/hellaswag.h"

enum { MOST_ENDINGS = 32, BLOCK = 256 /* questions between two flushes */ };

typedef struct {
    int n, label;
    lm_score score[MOST_ENDINGS];
    size_t bytes[MOST_ENDINGS];
} question;

typedef struct {
    const lm_tokenizer *tok;
    lm_tok_scratch *scratch;
    lm_scorer *s;
    int64_t seq;
    lm_ids ctx, all;
    lm_buf text, clean; /* an ending with its space; what HellaSwag's text becomes */
    question *q;
    int n_q;
    lm_mcq_sum *sum;
} mcq;

static const char as_written[] =
    "write {\"ctx\": \"...\", \"endings\": [\"...\", \"...\"], \"label\": 0}";

static lm_code read_label(const json_t *o, int n, const char *where, int *label, lm_err *e)
{
    const json_t *v = json_object_get(o, "label");
    long long got = -1;
    char end;
    if (json_is_integer(v))
        got = json_integer_value(v);
    else if (!json_is_string(v) || sscanf(json_string_value(v), "%lld%c", &got, &end) != 1)
        return lm_fail(e, LM_EFORMAT, where, as_written, "\"label\" is missing or no number");
    if (got < 0 || got >= n)
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"label\" is %lld, with %d ending%s", got, n,
                       lm_plural(n));
    *label = (int)got;
    return LM_OK;
}

static lm_code add_ending(mcq *m, question *q, int i, const char *text, size_t len, lm_err *e)
{
    size_t keep = m->ctx.n, add;
    m->text.len = 0;
    m->all.n = 0;
    if (lm_buf_add(&m->text, " ", 1, e) || lm_buf_add(&m->text, text, len, e) ||
        lm_tokenizer_encode(m->tok, m->scratch, m->text.data, m->text.len, false, &m->all, e))
        return e->code;
    add = m->all.n;
    if (add > (size_t)m->seq)
        return lm_fail(e, LM_EUSAGE, "an ending", "give longer windows",
                       "has %zu token%s, windows hold %lld", add, lm_plural(add),
                       (long long)m->seq);
    if (keep + add > (size_t)m->seq + 1) {
        keep = (size_t)m->seq + 1 - add;
        m->sum->cut += i == 0;
    }
    if (lm_grow(&m->all.v, &m->all.cap, keep + add, sizeof *m->all.v, "ids", e))
        return e->code;
    memmove(m->all.v + keep, m->all.v, add * sizeof *m->all.v);
    memcpy(m->all.v, m->ctx.v + (m->ctx.n - keep), keep * sizeof *m->all.v);
    q->score[i] = (lm_score){ 0 };
    q->bytes[i] = len ? len : 1;
    return lm_scorer_add(m->s, m->all.v, (int64_t)(keep + add), (int64_t)keep, &q->score[i], e);
}

/* The ids of the context; *hella: it has HellaSwag's fields. */
static lm_code read_context(mcq *m, const json_t *o, const char *where, bool *hella, lm_err *e)
{
    const char *part[4], *const keys[4] = { "ctx", "activity_label", "ctx_a", "ctx_b" };
    for (int i = 0; i < 4; i++)
        if (lm_json_str_or(o, keys[i], NULL, &part[i], where, e))
            return e->code;
    const char *ctx = part[0];
    *hella = part[1] && part[2] && part[3];
    if (*hella) {
        m->clean.len = 0;
        if (lm_hellaswag_context(part[1], part[2], part[3], &m->clean, e))
            return e->code;
        ctx = m->clean.data;
    }
    if (!ctx || !*ctx)
        return lm_fail(e, LM_EFORMAT, where, as_written, "\"ctx\" is missing or empty");
    m->ctx.n = 0;
    return lm_tokenizer_encode(m->tok, m->scratch, ctx, strlen(ctx), true, &m->ctx, e);
}

static lm_code add_question(mcq *m, const json_t *o, const char *where, lm_err *e)
{
    question *q = &m->q[m->n_q];
    const json_t *endings = json_object_get(o, "endings");
    bool hella = false;
    if (read_context(m, o, where, &hella, e))
        return e->code;
    q->n = (int)json_array_size(endings);
    if (q->n < 2 || q->n > MOST_ENDINGS)
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"endings\" is not a list of 2 to %d",
                       MOST_ENDINGS);
    if (read_label(o, q->n, where, &q->label, e))
        return e->code;
    for (int i = 0; i < q->n; i++) {
        const json_t *s = json_array_get(endings, (size_t)i);
        if (!json_is_string(s))
            return lm_fail(e, LM_EFORMAT, where, NULL, "an ending is not a string");
        const char *text = json_string_value(s);
        size_t len = json_string_length(s);
        if (hella) {
            m->clean.len = 0;
            if (lm_hellaswag_clean(text, len, &m->clean, e))
                return e->code;
            text = m->clean.data;
            len = m->clean.len;
        }
        if (add_ending(m, q, i, text, len, e)) {
            lm_err_in(e, "%s", where);
            return e->code;
        }
    }
    m->n_q++;
    return LM_OK;
}

static void judge(const question *q, lm_mcq_sum *sum)
{
    int best = 0, best_norm = 0;
    for (int i = 1; i < q->n; i++) {
        if (q->score[i].nll < q->score[best].nll)
            best = i;
        if (q->score[i].nll / (double)q->bytes[i] <
            q->score[best_norm].nll / (double)q->bytes[best_norm])
            best_norm = i;
    }
    sum->questions++;
    sum->right += best == q->label;
    sum->right_norm += best_norm == q->label;
    sum->nll += q->score[q->label].nll;
    sum->tokens += q->score[q->label].tokens;
}

static lm_code judge_batch(mcq *m, lm_err *e)
{
    if (lm_scorer_flush(m->s, e))
        return e->code;
    for (int i = 0; i < m->n_q; i++)
        judge(&m->q[i], m->sum);
    m->n_q = 0;
    return LM_OK;
}

static lm_code read_all(mcq *m, lm_input *in, lm_sink *sink, lm_err *e)
{
    lm_doc doc = { 0 };
    bool got = true;
    lm_code rc = LM_OK;
    while (!rc && !lm_stop_here() && !(rc = lm_input_next(in, &doc, &got, e)) && got) {
        char where[300];
        json_t *o = NULL;
        snprintf(where, sizeof where, "%.250s:%lld", doc.source, (long long)doc.line);
        rc = lm_json_parse(doc.raw.data, doc.raw.len, where, &o, e);
        if (!rc)
            rc = add_question(m, o, where, e);
        json_decref(o);
        if (!rc && m->n_q == BLOCK)
            rc = judge_batch(m, e);
        lm_progress(sink, "evaluate", (double)doc.index + 1, 0, "questions", NULL);
    }
    lm_doc_fini(&doc);
    return rc || lm_stopping() ? rc : judge_batch(m, e);
}

lm_code lm_mcq_run(lm_input *in, const lm_tokenizer *tok, lm_scorer *s, int64_t seq, lm_sink *sink,
                   lm_mcq_sum *out, lm_err *e)
{
    mcq m = { .tok = tok, .s = s, .seq = seq, .sum = out };
    memset(out, 0, sizeof *out);
    lm_code rc = lm_alloc_n(&m.q, BLOCK, sizeof *m.q, "questions", e);
    if (!rc)
        rc = lm_tok_scratch_new(tok, &m.scratch, e);
    if (!rc)
        rc = read_all(&m, in, sink, e);
    lm_ids_fini(&m.ctx);
    lm_ids_fini(&m.all);
    lm_buf_fini(&m.text);
    lm_buf_fini(&m.clean);
    lm_tok_scratch_free(m.scratch);
    lm_free(m.q);
    return rc;
}
