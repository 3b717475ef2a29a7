/* SPDX-License-Identifier: Apache-2.0 */
/* attention_pages_case.h -- sequences that go through attention_cached in steps of ragged rows, with caches in one piece
 * or in pages of any order; what they gave, by sequence and position, for comparing to the bit. */
#ifndef LM_TESTS_ATTENTION_PAGES_CASE_H
#define LM_TESTS_ATTENTION_PAGES_CASE_H

#include "attention_case.h"

enum { MOST_SEQS = 4 };

/* Sequences of given lengths. */
typedef struct {
    int64_t batch, length[MOST_SEQS], heads, kv_heads, dim, window;
    double soft_cap;
} story;

/* Of all stories without a window from here on. */
static lm_attention_blocks story_blocks;

/* A story that is being run.  page 0: caches in one piece. */
typedef struct {
    const story *s;
    lm_dtype act;
    const lm_kernel *kernel;
    void (*runner)(instance *x, const lm_kernel *kernel);
    int64_t page, width, room;
    int32_t used[MOST_SEQS];
    int32_t *table;
    lm_tensor qkv[MOST_SEQS], o[MOST_SEQS], lse[MOST_SEQS]; /* of all positions */
    lm_tensor keys, values;
} telling;

static inline lm_tensor room_for(lm_dtype d, int ndim, int64_t a, int64_t b, int64_t c, int64_t e)
{
    lm_tensor t = { .dtype = d, .ndim = ndim, .dim = { a, b, c, e } };
    t.data = take(bytes_of(&t));
    return t;
}

static inline void scatter(lm_tensor *t, int which)
{
    operand o = { .kind = ACT };
    for (int64_t i = 0; i < lm_tensor_count(t); i++)
        lm_set(t->dtype, t->data, i, value_at(&o, which, i));
}

static inline telling begin_telling(const story *s, lm_dtype act, const lm_kernel *kernel,
                                    int64_t page)
{
    telling t = { .s = s, .act = act, .kernel = kernel, .page = page, .width = 1 };
    int64_t row = (s->heads + 2 * s->kv_heads) * s->dim, pages = s->batch;
    for (int64_t b = 0; b < s->batch; b++) {
        t.room = s->length[b] > t.room ? s->length[b] : t.room;
        t.qkv[b] = room_for(act, 2, s->length[b], row, 0, 0);
        t.o[b] = room_for(act, 2, s->length[b], s->heads * s->dim, 0, 0);
        t.lse[b] = room_for(type_of(F32, act), 2, s->length[b], s->heads, 0, 0);
        scatter(&t.qkv[b], (int)b);
    }
    if (page) {
        t.width = (t.room + page - 1) / page;
        pages = s->batch * t.width + 3;
        pages += pages % 7 == 0; /* then multiples of 7 reach every page */
        t.table = take((size_t)(s->batch * t.width) * sizeof *t.table);
        for (int64_t b = 0; b < s->batch; b++) /* entries past the end of a sequence are no pages */
            for (int64_t p = 0; p < t.width; p++)
                t.table[b * t.width + p] =
                    p * page < s->length[b] ? (int32_t)((b + p * s->batch) * 7 % pages) : -1;
    }
    t.keys = room_for(act, 4, pages, s->kv_heads, page ? page : t.room, s->dim);
    t.values = room_for(act, 4, pages, s->kv_heads, page ? page : t.room, s->dim);
    scatter(&t.keys, 20);
    scatter(&t.values, 21);
    return t;
}

static inline void end_telling(telling *t)
{
    for (int64_t b = 0; b < t->s->batch; b++) {
        lm_free(t->qkv[b].data);
        lm_free(t->o[b].data);
        lm_free(t->lse[b].data);
    }
    lm_free(t->keys.data);
    lm_free(t->values.data);
    lm_free(t->table);
}

static inline void *row_of(const lm_tensor *t, int64_t i)
{
    return (char *)t->data + (size_t)(i * t->dim[1]) * lm_dtype_size(t->dtype);
}

static inline size_t row_bytes(const lm_tensor *t)
{
    return (size_t)t->dim[1] * lm_dtype_size(t->dtype);
}

/* The attributes and the caches of a step of `rows` rows; they are the telling's own memory. */
static inline void step_call(const telling *t, lm_attention_attr *a, instance *x, int64_t seq,
                             int64_t rows)
{
    const story *s = t->s;
    memset(x, 0, sizeof *x);
    *a = attr_of(s->batch, seq, s->heads, s->kv_heads, s->dim);
    a->window = s->window;
    a->soft_cap = s->soft_cap;
    if (!s->window)
        a->blocks = story_blocks;
    x->in[0] = room_for(t->act, 2, rows, t->qkv[0].dim[1], 0, 0);
    scatter(&x->in[0], 3);
    x->in[1] = room_for(LM_DTYPE_I32, 1, s->batch, 0, 0, 0);
    x->in[2] = room_for(LM_DTYPE_I32, 1, s->batch, 0, 0, 0);
    if (t->page) {
        x->in[5] = room_for(LM_DTYPE_I32, 2, s->batch, t->width, 0, 0);
        memcpy(x->in[5].data, t->table, bytes_of(&x->in[5]));
    }
    x->out[0] = room_for(t->act, 2, rows, s->heads * s->dim, 0, 0);
    scatter(&x->out[0], 4);
    x->out[1] = t->keys;
    x->out[2] = t->values;
    x->out[3] = room_for(type_of(F32, t->act), 2, rows, s->heads, 0, 0);
    x->call =
        (lm_call){ .attr = a, .in = x->in, .n_in = 6, .out = x->out, .n_out = 4, .step = NULL };
}

/* Keep what the n rows from `row` on gave for sequence b, and check that the rows behind them to `end` gave none. */
static inline void keep_rows(telling *t, const instance *x, int64_t b, int64_t row, int64_t n,
                             int64_t end)
{
    memcpy(row_of(&t->o[b], t->used[b]), row_of(&x->out[0], row), (size_t)n * row_bytes(&t->o[b]));
    memcpy(row_of(&t->lse[b], t->used[b]), row_of(&x->out[3], row),
           (size_t)n * row_bytes(&t->lse[b]));
    t->used[b] += (int32_t)n;
    for (int64_t i = row + n; i < end; i++) {
        for (int64_t d = 0; d < x->out[0].dim[1]; d++)
            assert_true(lm_get(t->act, row_of(&x->out[0], i), d) == 0);
        for (int64_t h = 0; h < x->out[3].dim[1]; h++)
            assert_true(lm_get(x->out[3].dtype, row_of(&x->out[3], i), h) == -INFINITY);
    }
}

static inline void end_step(instance *x)
{
    for (int i = 0; i < 6; i++)
        lm_free(x->in[i].data);
    lm_free(x->out[0].data);
    lm_free(x->out[3].data);
}

static inline void copy_fresh(const telling *t, instance *x, int64_t b, int64_t row, int64_t n)
{
    ((int32_t *)x->in[1].data)[b] = t->used[b];
    ((int32_t *)x->in[2].data)[b] = (int32_t)n;
    memcpy(row_of(&x->in[0], row), row_of(&t->qkv[b], t->used[b]),
           (size_t)n * row_bytes(&t->qkv[b]));
}

/* The next n[b] rows of each sequence, of kind[b], and some rows of none. */
static inline void tell_ragged(telling *t, const int64_t *n, const lm_rows_kind *kind)
{
    int64_t rows = 0, row = 0, batch = t->s->batch, spare = 2;
    lm_attention_attr a;
    instance x;
    for (int64_t b = 0; b < batch; b++)
        rows += n[b];
    step_call(t, &a, &x, 0, rows + spare);
    x.in[3] = room_for(LM_DTYPE_I32, 1, batch + 1, 0, 0, 0);
    x.in[4] = room_for(LM_DTYPE_I32, 1, batch, 0, 0, 0);
    int32_t *first = x.in[3].data;
    for (int64_t b = 0; b < batch; row += n[b++]) {
        first[b] = (int32_t)row;
        ((int32_t *)x.in[4].data)[b] = (int32_t)kind[b];
        copy_fresh(t, &x, b, row, n[b]);
    }
    first[batch] = (int32_t)row;
    t->runner(&x, t->kernel);
    for (int64_t b = 0; b < batch; b++)
        keep_rows(t, &x, b, first[b], n[b], b + 1 < batch ? first[b + 1] : rows + spare);
    end_step(&x);
}

/* The next rows of each sequence, up to `seq` of them, as rows of the same number. */
static inline void tell_even(telling *t, int64_t seq)
{
    int64_t batch = t->s->batch, n[MOST_SEQS];
    lm_attention_attr a;
    instance x;
    step_call(t, &a, &x, seq, batch * seq);
    for (int64_t b = 0; b < batch; b++) {
        n[b] = t->s->length[b] - t->used[b];
        n[b] = n[b] < seq ? n[b] : seq;
        copy_fresh(t, &x, b, b * seq, n[b]);
    }
    t->runner(&x, t->kernel);
    for (int64_t b = 0; b < batch; b++)
        keep_rows(t, &x, b, b * seq, n[b], (b + 1) * seq);
    end_step(&x);
}

/* Tell the whole story in steps that random numbers draw: of each sequence so many rows, and none now and then.  A
 * sequence is a prompt except for its last `tokens` rows, which come one a step.  whole: the prompt at once. */
static inline void tell_all(telling *t, int64_t tokens, uint64_t seed, bool whole)
{
    for (uint64_t step = 0;; step++) {
        lm_rng r = lm_rng_make(seed, "steps", step);
        int64_t n[MOST_SEQS], all = 0;
        lm_rows_kind kind[MOST_SEQS];
        for (int64_t b = 0; b < t->s->batch; b++) {
            int64_t left = t->s->length[b] - t->used[b], of_prompt = left - tokens;
            kind[b] = of_prompt > 0 ? LM_ROWS_PROMPT : LM_ROWS_TOKEN;
            int64_t most = of_prompt > 0 ? of_prompt : left > 0 ? 1 : 0;
            uint64_t draw = lm_rng_below(r, (uint64_t)b, 4);
            int64_t take_now = draw == 0   ? 0
                               : draw == 1 ? 1 + (int64_t)lm_rng_below(r, 50 + (uint64_t)b, 6)
                                           : 1 + (int64_t)lm_rng_below(r, 90 + (uint64_t)b, 150);
            n[b] = whole || take_now > most ? most : take_now;
            all += left;
        }
        if (!all)
            return;
        tell_ragged(t, n, kind);
    }
}

static inline void check_same_story(const telling *x, const telling *y, const char *what)
{
    for (int64_t b = 0; b < x->s->batch; b++) {
        for (int64_t i = 0; i < x->s->length[b]; i++)
            if (memcmp(row_of(&x->o[b], i), row_of(&y->o[b], i), row_bytes(&x->o[b])) ||
                memcmp(row_of(&x->lse[b], i), row_of(&y->lse[b], i), row_bytes(&x->lse[b])))
                fail_msg("%s, %s %d, D %d, window %d: sequence %d has other bits at position %d",
                         what, lm_dtype_name(x->act), x->kernel->level, (int)x->s->dim,
                         (int)x->s->window, (int)b, (int)i);
    }
}

/* Against the definition in double. */
static inline void check_definition(const telling *x, const telling *exact)
{
    double tol = x->act == LM_DTYPE_F32 ? 2e-6 : 1e-2;
    for (int64_t b = 0; b < x->s->batch; b++) {
        double d = distance(&x->o[b], &exact->o[b]), l = distance(&x->lse[b], &exact->lse[b]);
        if (d > tol || l > tol)
            fail_msg("%s %d, D %d, window %d: errors of o %.3g, of lse %.3g", lm_dtype_name(x->act),
                     x->kernel->level, (int)x->s->dim, (int)x->s->window, d, l);
    }
}

#endif
