/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch_ref.c -- rows of tokens to the ranks of their experts and back, on the host.
 *
 * What a rank sends to another lies in the order of the plan's rows, and so does what it gets: both sides count the rows in
 * `from`, and no counts travel. */
#include "kernels/dispatch.h"

#include <string.h>

#include "kernels/comm.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/portions.h"

static lm_links *links_of(const lm_call *c)
{
    const lm_dispatch_attr *a = c->attr;
    return c->step && c->step->links ? c->step->links[a->axis] : NULL;
}

/* What a rank holds of tokens or experts. */
static lm_range held(const lm_dispatch_attr *a, int64_t len, int64_t rank)
{
    static const lm_portions whole;
    lm_range r = { 0 };
    lm_portions_at(&whole, len, (int)a->ranks, (int)rank, 0, &r);
    return r;
}

/* The plan as this rank sees it. */
typedef struct {
    const lm_dispatch_attr *a;
    const int32_t *from, *offsets;
    lm_range mine; /* its tokens */
    size_t bytes;  /* of a row */
} plan;

static plan plan_of(const lm_call *c, int from, const lm_tensor *rows)
{
    const lm_dispatch_attr *a = c->attr;
    return (plan){ .a = a,
                   .from = c->in[from].data,
                   .offsets = c->in[from + 1].data,
                   .mine = held(a, a->tokens, a->rank),
                   .bytes = (size_t)rows->dim[1] * lm_dtype_size(rows->dtype) };
}

/* Rows of the plan that a rank's experts have. */
static lm_range rows_at(const plan *p, int64_t rank)
{
    const lm_range e = held(p->a, p->a->experts, rank);
    const int64_t begin = p->offsets[e.from];
    return (lm_range){ begin, p->offsets[e.from + e.count] - begin };
}

static bool is_in(const lm_range *r, int64_t i)
{
    return i >= r->from && i < r->from + r->count;
}

/* The token of a row; -1: none. */
static int64_t token_of(const plan *p, int64_t row)
{
    return p->from[row] < 0 ? -1 : p->from[row] / p->a->k;
}

/* ---- scratch: bytes for each rank in both directions, places of runs, and rows of both directions ---- */

typedef struct {
    size_t *give, *take, *at;
    int32_t *
        place; /* of each assignment of this rank's tokens: the number of its row among those that return; -1: none */
    char *sent, *got;
} scratch;

static size_t rounded_up(size_t n)
{
    return (n + 63) / 64 * 64;
}

/* Assignments of this rank's tokens. */
static int64_t assignments(const lm_dispatch_attr *a)
{
    return held(a, a->tokens, a->rank).count * a->k;
}

/* The most rows of this rank's tokens, of so many of the plan. */
static int64_t most_rows(const lm_dispatch_attr *a, int64_t rows)
{
    const int64_t n = assignments(a);
    return n < rows ? n : rows;
}

/* rows: of the experts.  Operand 1 is `from`. */
static size_t scratch_of(const lm_call *c, const lm_tensor *rows, bool back, scratch *s)
{
    const lm_dispatch_attr *a = c->attr;
    const size_t row = (size_t)rows->dim[1] * lm_dtype_size(rows->dtype);
    const size_t sizes = rounded_up(3 * (size_t)a->ranks * sizeof(size_t)),
                 places = back ? rounded_up((size_t)assignments(a) * sizeof(int32_t)) : 0,
                 tokens = rounded_up((size_t)most_rows(a, c->in[1].dim[0]) * row),
                 experts = rounded_up((size_t)rows->dim[0] * row);
    if (s) {
        s->give = c->work;
        s->take = s->give + a->ranks;
        s->at = s->take + a->ranks;
        s->place = (int32_t *)(void *)((char *)c->work + sizes);
        s->sent = (char *)c->work + sizes + places;
        s->got = s->sent + (back ? experts : tokens);
    }
    return sizes + places + tokens + experts;
}

/* Bytes of rows of tokens `t` with experts of `rank`. */
static size_t bytes_between(const plan *p, const lm_range *t, int64_t rank)
{
    const lm_range rows = rows_at(p, rank);
    size_t sum = 0;
    for (int64_t r = rows.from; r < rows.from + rows.count; r++)
        sum += is_in(t, token_of(p, r)) ? p->bytes : 0;
    return sum;
}

/* What this rank sends to each other one, or gets: as the rank of tokens, and as that of experts. */
static void count_bytes(const plan *p, size_t *of_tokens, size_t *of_experts)
{
    for (int64_t r = 0; r < p->a->ranks; r++) {
        const lm_range other = held(p->a, p->a->tokens, r);
        of_tokens[r] = bytes_between(p, &p->mine, r);
        of_experts[r] = bytes_between(p, &other, p->a->rank);
    }
}

/* Rows of this rank's experts in the order of the ranks of their tokens, `runs`, from y or into it. */
static void move_own(const plan *p, const scratch *s, const size_t *bytes, char *runs, char *y,
                     bool out)
{
    const lm_range rows = rows_at(p, p->a->rank);
    s->at[0] = 0;
    for (int64_t r = 1; r < p->a->ranks; r++)
        s->at[r] = s->at[r - 1] + bytes[r - 1];
    for (int64_t i = 0; i < rows.count; i++, y += p->bytes) {
        const int64_t t = token_of(p, rows.from + i);
        if (t < 0) {
            if (!out)
                memset(y, 0, p->bytes);
            continue;
        }
        int64_t rank = 0;
        for (lm_range h = held(p->a, p->a->tokens, rank); !is_in(&h, t);)
            h = held(p->a, p->a->tokens, ++rank);
        memcpy(out ? runs + s->at[rank] : y, out ? y : runs + s->at[rank], p->bytes);
        s->at[rank] += p->bytes;
    }
}

/* ---- to the experts ---- */

static size_t rows_work(const lm_call *c, int threads)
{
    (void)threads;
    return scratch_of(c, &c->out[0], false, NULL);
}

/* The first row, of none: what reads all rows of a tensor finds a number. */
static void clear_first(const lm_tensor *y)
{
    memset(y->data, 0, (size_t)y->dim[1] * lm_dtype_size(y->dtype));
}

/* Rows of this rank's tokens, in the order of the plan. */
static void pack_tokens(const plan *p, const char *x, char *to)
{
    const int64_t rows = p->offsets[p->a->experts];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t t = token_of(p, r);
        if (!is_in(&p->mine, t))
            continue;
        memcpy(to, x + (size_t)(t - p->mine.from) * p->bytes, p->bytes);
        to += p->bytes;
    }
}

static void expert_rows(const lm_call *c)
{
    const plan p = plan_of(c, 1, &c->out[0]);
    lm_links *l = links_of(c);
    scratch s;
    scratch_of(c, &c->out[0], false, &s);
    count_bytes(&p, s.give, s.take);
    pack_tokens(&p, c->in[0].data, s.sent);
    if (l)
        l->all_to_all(l, s.sent, s.give, s.got, s.take);
    move_own(&p, &s, s.take, l ? s.got : s.sent, c->out[0].data, false);
    if (!rows_at(&p, p.a->rank).count)
        clear_first(&c->out[0]);
}

static void expert_offsets(const lm_call *c)
{
    const lm_expert_offsets_attr *a = c->attr;
    const int32_t *from = (const int32_t *)c->in[0].data + a->first;
    int32_t *to = c->out[0].data;
    for (int64_t i = 0; i <= a->count; i++)
        to[i] = from[i] - from[0];
}

/* ---- on the way back ---- */

/* Rows of a call, to be worked on by several threads; what is not F32 passes through scratch of each. */
typedef struct {
    const lm_call *c;
    const plan *p;
    lm_range rows;
    const int32_t *place; /* expert_sum */
    const char *got;
    float *room; /* two rows for each worker; unused in F64 */
    int64_t cols;
} job;

enum { GRAIN = 1 << 15 }; /* numbers */

static int64_t grain_of(int64_t cols)
{
    return 1 + GRAIN / (cols + 1);
}

static size_t room_of(int64_t cols, int threads)
{
    return rounded_up((size_t)(2 * cols * threads) * sizeof(float));
}

static void scale_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_tensor *y = &j->c->in[0];
    lm_tensor *z = &j->c->out[0];
    float *room = j->room + 2 * j->cols * worker, *made = room + j->cols;
    for (int64_t i = begin; i < end; i++) {
        const int32_t a = j->p->from[j->rows.from + i];
        const double w = a < 0 ? 0 : get(&j->c->in[3], a);
        for (int64_t k = i * j->cols; y->dtype == LM_DTYPE_F64 && k < (i + 1) * j->cols; k++)
            set(z, k, a < 0 ? 0 : w * get(y, k));
        if (y->dtype == LM_DTYPE_F64)
            continue;
        const float *row = as_f32(y->dtype, y->data, i * j->cols, j->cols, room);
        for (int64_t k = 0; k < j->cols; k++)
            made[k] = a < 0 ? 0 : (float)w * row[k];
        lm_convert(LM_DTYPE_F32, made, z->dtype,
                   (char *)z->data + (size_t)(i * j->cols) * lm_dtype_size(z->dtype), j->cols);
    }
}

static size_t local_work(const lm_call *c, int threads)
{
    return room_of(c->in[0].dim[1], threads);
}

static void expert_scale(const lm_call *c)
{
    const plan p = plan_of(c, 1, &c->in[0]);
    job j = { .c = c, .p = &p, .rows = rows_at(&p, p.a->rank), .cols = c->in[0].dim[1] };
    j.room = c->work;
    lm_par_for(c->par, j.rows.count, grain_of(j.cols), scale_rows, &j);
    if (!j.rows.count)
        clear_first(&c->out[0]);
}

static void dot_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_tensor *x = &j->c->in[0], *y = &j->c->in[1];
    float *room = j->room + 2 * j->cols * worker;
    for (int64_t i = begin; i < end; i++) {
        double sum = 0;
        if (j->p->from[j->rows.from + i] < 0)
            continue;
        if (x->dtype == LM_DTYPE_F64) {
            for (int64_t k = i * j->cols; k < (i + 1) * j->cols; k++)
                sum += get(x, k) * get(y, k);
        } else {
            const float *a = as_f32(x->dtype, x->data, i * j->cols, j->cols, room),
                        *b = as_f32(y->dtype, y->data, i * j->cols, j->cols, room + j->cols);
            for (int64_t k = 0; k < j->cols; k++)
                sum += (double)a[k] * (double)b[k];
        }
        set(&j->c->out[0], j->p->from[j->rows.from + i], sum);
    }
}

static void expert_dot(const lm_call *c)
{
    const plan p = plan_of(c, 2, &c->in[0]);
    job j = { .c = c, .p = &p, .rows = rows_at(&p, p.a->rank), .cols = c->in[0].dim[1] };
    j.room = c->work;
    memset(c->out[0].data, 0, (size_t)lm_tensor_count(&c->out[0]) * lm_dtype_size(c->out[0].dtype));
    lm_par_for(c->par, j.rows.count, grain_of(j.cols), dot_rows, &j);
}

static size_t sum_work(const lm_call *c, int threads)
{
    return scratch_of(c, &c->in[0], true, NULL) + room_of(c->in[0].dim[1], threads);
}

/* Where the rows of this rank's assignments come to lie: in the order of the plan. */
static void find_places(const plan *p, int32_t *place)
{
    const int64_t rows = p->offsets[p->a->experts];
    int32_t n = 0;
    for (int64_t i = 0; i < assignments(p->a); i++)
        place[i] = -1;
    for (int64_t r = 0; r < rows; r++)
        if (is_in(&p->mine, token_of(p, r)))
            place[p->from[r] - p->mine.from * p->a->k] = n++;
}

/* Of a token in F64: its rows, weighed. */
static void add_wide(const job *j, int64_t t)
{
    const lm_tensor *weight = opt_in(j->c, 3);
    const int64_t k = j->p->a->k;
    for (int64_t i = 0; i < j->cols; i++) {
        double sum = 0;
        for (int64_t a = t * k; a < (t + 1) * k; a++)
            if (j->place[a] >= 0)
                sum += (weight ? get(weight, a) : 1) *
                       lm_get(LM_DTYPE_F64, j->got, j->place[a] * j->cols + i);
        set(&j->c->out[0], t * j->cols + i, sum);
    }
}

static void add_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_tensor *weight = opt_in(j->c, 3);
    lm_tensor *x = &j->c->out[0];
    float *room = j->room + 2 * j->cols * worker, *sum = room + j->cols;
    const int64_t k = j->p->a->k;
    for (int64_t t = begin; t < end; t++) {
        if (x->dtype == LM_DTYPE_F64) {
            add_wide(j, t);
            continue;
        }
        memset(sum, 0, (size_t)j->cols * sizeof *sum);
        for (int64_t a = t * k; a < (t + 1) * k; a++) {
            const float w = weight ? (float)get(weight, a) : 1;
            if (j->place[a] < 0)
                continue;
            const float *row = as_f32(x->dtype, j->got, j->place[a] * j->cols, j->cols, room);
            for (int64_t i = 0; i < j->cols; i++)
                sum[i] += w * row[i];
        }
        lm_convert(LM_DTYPE_F32, sum, x->dtype,
                   (char *)x->data + (size_t)(t * j->cols) * lm_dtype_size(x->dtype), j->cols);
    }
}

static void expert_sum(const lm_call *c)
{
    const plan p = plan_of(c, 1, &c->in[0]);
    lm_links *l = links_of(c);
    scratch s;
    const size_t used = scratch_of(c, &c->in[0], true, &s);
    count_bytes(&p, s.take, s.give);
    move_own(&p, &s, s.give, s.sent, c->in[0].data, true);
    if (l)
        l->all_to_all(l, s.sent, s.give, s.got, s.take);
    find_places(&p, s.place);
    job j = {
        .c = c, .p = &p, .place = s.place, .got = l ? s.got : s.sent, .cols = c->in[0].dim[1]
    };
    j.room = (float *)(void *)((char *)c->work + used);
    lm_par_for(c->par, p.mine.count, grain_of(j.cols), add_rows, &j);
}

const lm_kernel lm_dispatch_ref_kernels[] = {
    { "expert_offsets", LM_DTYPE_NONE, LM_CPU_REF, expert_offsets, NULL },
    { "expert_rows", LM_DTYPE_NONE, LM_CPU_REF, expert_rows, rows_work },
    { "expert_scale", LM_DTYPE_NONE, LM_CPU_REF, expert_scale, local_work },
    { "expert_sum", LM_DTYPE_NONE, LM_CPU_REF, expert_sum, sum_work },
    { "expert_dot", LM_DTYPE_NONE, LM_CPU_REF, expert_dot, local_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
