/* SPDX-License-Identifier: Apache-2.0 */
/* texts.c -- places of texts by best fit decreasing, and batches of them. */
#include "tune/align/texts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "tune/align/portion.h"

/* ---- places ---- */

typedef struct {
    int64_t rows, text; /* of a unit: all rows, its first text */
} sized;

/* The longest first, equal ones in their order. */
static int compare_sizes(const void *a, const void *b)
{
    const sized *x = a, *y = b;
    if (x->rows != y->rows)
        return x->rows < y->rows ? 1 : -1;
    return x->text < y->text ? -1 : 1;
}

/* What places are found with. */
typedef struct {
    sized *s; /* [units] */
    int64_t units, unit;
    /* windows with `left` free rows: head[left], next[window]; rows used of a window */
    int64_t *head, *next, *used;
} placing;

/* The window with the fewest free rows that are enough. */
static int64_t take_window(const placing *p, lm_texts *t, int64_t need)
{
    int64_t left = need, w;
    while (left < t->seq && p->head[left] < 0)
        left++;
    if (p->head[left] < 0) {
        w = t->windows++;
        p->used[w] = 0;
        return w;
    }
    w = p->head[left];
    p->head[left] = p->next[w];
    return w;
}

static void place_all(const placing *p, const lm_align_text *text, lm_texts *t)
{
    for (int64_t r = 0; r <= t->seq; r++)
        p->head[r] = -1;
    for (int64_t k = 0; k < p->units; k++) {
        const int64_t w = take_window(p, t, p->s[k].rows);
        for (int64_t i = p->s[k].text; i < p->s[k].text + p->unit; i++) {
            t->window[i] = w;
            t->row[i] = p->used[w];
            p->used[w] += text[i].n - 1;
        }
        const int64_t left = t->seq - p->used[w];
        p->next[w] = p->head[left];
        p->head[left] = w;
    }
}

/* The texts of each window, in the order in which they were placed. */
static void list_windows(const placing *p, lm_texts *t)
{
    for (int64_t w = 0; w <= t->windows; w++)
        t->first[w] = 0;
    for (int64_t i = 0; i < t->n; i++)
        t->first[t->window[i] + 1]++;
    for (int64_t w = 0; w < t->windows; w++)
        t->first[w + 1] += t->first[w];
    for (int64_t k = 0; k < p->units; k++) /* first[w] runs to the end of w, then moves back */
        for (int64_t i = p->s[k].text; i < p->s[k].text + p->unit; i++)
            t->order[t->first[t->window[i]]++] = i;
    for (int64_t w = t->windows; w > 0; w--)
        t->first[w] = t->first[w - 1];
    t->first[0] = 0;
}

static lm_code measure_all(const placing *p, const lm_align_text *text, int64_t seq, lm_err *e)
{
    for (int64_t k = 0; k < p->units; k++) {
        p->s[k] = (sized){ 0, k * p->unit };
        for (int64_t i = k * p->unit; i < (k + 1) * p->unit; i++) {
            p->s[k].rows += text[i].n - 1;
            if (text[i].from < 1 || text[i].from >= text[i].n || p->s[k].rows > seq)
                return lm_fail(e, LM_EUSAGE, "texts", "use longer windows, or leave it out",
                               "text %" PRId64 " has %" PRId64 " tokens, %" PRId64
                               " of them to be predicted; a window has %" PRId64
                               " rows for it and what belongs to it",
                               i + 1, text[i].n, text[i].n - text[i].from, seq);
        }
    }
    qsort(p->s, (size_t)p->units, sizeof *p->s, compare_sizes);
    return LM_OK;
}

lm_code lm_texts_place(const lm_align_text *text, int64_t n, int64_t unit, int64_t seq, lm_texts *t,
                       lm_err *e)
{
    const size_t room = (size_t)n + 1, rows = (size_t)seq + 1;
    placing p = { .units = n / unit, .unit = unit };
    lm_texts_fini(t);
    *t = (lm_texts){ .seq = seq, .n = n };
    if (!lm_alloc_n(&p.s, room, sizeof *p.s, "texts", e) &&
        !lm_alloc_n(&p.head, rows, sizeof *p.head, "texts", e) &&
        !lm_alloc_n(&p.next, room, sizeof *p.next, "texts", e) &&
        !lm_alloc_n(&p.used, room, sizeof *p.used, "texts", e) &&
        !lm_alloc_n(&t->window, room, sizeof *t->window, "texts", e) &&
        !lm_alloc_n(&t->row, room, sizeof *t->row, "texts", e) &&
        !lm_alloc_n(&t->order, room, sizeof *t->order, "texts", e) &&
        !lm_alloc_n(&t->first, room, sizeof *t->first, "texts", e) &&
        !measure_all(&p, text, seq, e)) {
        place_all(&p, text, t);
        list_windows(&p, t);
    }
    lm_free(p.s);
    lm_free(p.head);
    lm_free(p.next);
    lm_free(p.used);
    return e->code;
}

void lm_texts_fini(lm_texts *t)
{
    lm_free(t->window);
    lm_free(t->row);
    lm_free(t->order);
    lm_free(t->first);
    *t = (lm_texts){ 0 };
}

/* ---- batches ---- */

static lm_code fill_text(const lm_align_text *x, int64_t at, int64_t row, int64_t vocab,
                         lm_batch *b, lm_err *e)
{
    for (int64_t i = 0; i < x->n; i++)
        if (x->ids[i] >= vocab)
            return lm_fail(
                e, LM_EFORMAT, "tokens", "use the tokenizer that the model was trained with",
                "id %" PRIu32 " is not below the model's vocabulary of %" PRId64, x->ids[i], vocab);
    for (int64_t i = 0; i < x->n - 1; i++) {
        bool wanted = i + 1 >= x->from;
        b->tokens[at + row + i] = (int32_t)x->ids[i];
        b->targets[at + row + i] = wanted ? (int32_t)x->ids[i + 1] : -1;
        b->pos[at + row + i] = (int32_t)i;
        b->lo[at + row + i] = (int32_t)row;
        b->valid += wanted;
    }
    return LM_OK;
}

/* Rows [row, seq) without a text are one document without targets. */
static void fill_rest(int64_t at, int64_t row, lm_batch *b)
{
    for (int64_t i = row; i < b->seq; i++) {
        b->tokens[at + i] = 0;
        b->targets[at + i] = -1;
        b->pos[at + i] = (int32_t)(i - row);
        b->lo[at + i] = (int32_t)row;
    }
}

lm_code lm_texts_fill(const lm_texts *t, const lm_align_text *text, int64_t window, int64_t vocab,
                      lm_batch *b, lm_err *e)
{
    b->valid = 0;
    for (int64_t k = 0; k < b->batch; k++) {
        const int64_t w = window + k, at = k * b->seq;
        int64_t row = 0;
        for (int64_t j = w < t->windows ? t->first[w] : 0; w < t->windows && j < t->first[w + 1];
             j++) {
            const lm_align_text *x = &text[t->order[j]];
            if (fill_text(x, at, row, vocab, b, e))
                return e->code;
            row += x->n - 1;
        }
        fill_rest(at, row, b);
    }
    return LM_OK;
}

int64_t lm_texts_row(const lm_texts *t, const lm_align_text *text, int64_t i, int64_t window,
                     int64_t batch)
{
    const int64_t k = t->window[i] - window;
    return k < 0 || k >= batch ? -1 : k * t->seq + t->row[i] + text[i].from - 1;
}

/* ---- log-probabilities ---- */

/* Numbers of the windows [window, window + batch) from the rows of the batch, times `sign`. */
static void take_rows(const lm_texts *t, const lm_align_text *text, int64_t window, int64_t batch,
                      const float *rows, double sign, double *const *out)
{
    const int64_t end = window + batch < t->windows ? window + batch : t->windows;
    for (int64_t j = t->first[window]; j < t->first[end]; j++) {
        const int64_t i = t->order[j], at = lm_texts_row(t, text, i, window, batch);
        for (int64_t k = 0; k < text[i].n - text[i].from; k++)
            out[i][k] = sign * (double)rows[at + k];
    }
}

/* Those of the batches of `own`. */
static lm_code run_share(lm_evaluator *v, const lm_texts *t, const lm_align_text *text,
                         lm_portion own, double *const *logp, double *const *value, lm_err *e)
{
    const int64_t batch = v->batch.batch;
    for (int64_t w = own.first * batch; w < own.end * batch && !lm_stopping(); w += batch) {
        lm_eval_sum sum = { 0 };
        const float *rows;
        if (lm_texts_fill(t, text, w, v->model->config.vocab, &v->batch, e) ||
            lm_evaluator_run(v, &sum, &rows, e))
            return e->code;
        take_rows(t, text, w, batch, rows, -1, logp);
        if (value && lm_evaluator_values(v, &rows, e))
            return e->code;
        if (value)
            take_rows(t, text, w, batch, rows, 1, value);
    }
    return LM_OK;
}

/* ---- several ranks ---- */

/* The numbers of windows [first, end) in the order of their texts, copied to or from a list; returns how many there are. */
static int64_t copy_numbers(const lm_texts *t, const lm_align_text *text, int64_t first,
                            int64_t end, double *const *of, double *list, bool back)
{
    int64_t at = 0;
    for (int64_t j = t->first[first]; j < t->first[end]; j++) {
        const int64_t i = t->order[j], n = text[i].n - text[i].from;
        if (back)
            memcpy(of[i], list + at, (size_t)n * sizeof *list);
        else
            memcpy(list + at, of[i], (size_t)n * sizeof *list);
        at += n;
    }
    return at;
}

static int64_t bound(const lm_texts *t, int64_t window)
{
    return window < t->windows ? window : t->windows;
}

static lm_code join_numbers(lm_comm *c, const lm_texts *t, const lm_align_text *text,
                            lm_portion own, int64_t batch, double *const *of, lm_err *e)
{
    const int64_t first = bound(t, own.first * batch), end = bound(t, own.end * batch);
    double *mine = NULL;
    char *all = NULL;
    size_t room = 1, bytes;
    for (int64_t i = 0; i < t->n; i++)
        room += (size_t)(text[i].n - text[i].from);
    if (lm_alloc_n(&mine, room, sizeof *mine, "numbers of texts", e))
        return e->code;
    const int64_t n = copy_numbers(t, text, first, end, of, mine, false);
    if (!lm_portion_parts(c, mine, (size_t)n * sizeof *mine, &all, &bytes, e)) {
        memcpy(mine, all, bytes);
        copy_numbers(t, text, 0, t->windows, of, mine, true);
    }
    lm_free(all);
    lm_free(mine);
    return e->code;
}

/* ---- all of it ---- */

lm_code lm_texts_score(lm_evaluator *v, lm_comm *c, const lm_align_text *text, int64_t n,
                       double *const *logp, bool *whole, lm_err *e)
{
    return lm_texts_value(v, c, text, n, logp, NULL, whole, e);
}

lm_code lm_texts_value(lm_evaluator *v, lm_comm *c, const lm_align_text *text, int64_t n,
                       double *const *logp, double *const *value, bool *whole, lm_err *e)
{
    const int64_t batch = v->batch.batch;
    bool stops = false;
    lm_texts t = { 0 };
    *whole = false;
    if (lm_texts_place(text, n, 1, v->batch.seq, &t, e)) {
        lm_texts_fini(&t);
        return e->code;
    }
    const lm_portion own = lm_portion_own(c, (t.windows + batch - 1) / batch);
    if (!run_share(v, &t, text, own, logp, value, e) && !lm_portion_stops(c, false, &stops, e) &&
        !stops && c && !join_numbers(c, &t, text, own, batch, logp, e) && value)
        join_numbers(c, &t, text, own, batch, value, e);
    *whole = !e->code && !stops;
    lm_texts_fini(&t);
    return e->code;
}
