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

/* The most rows of this rank's tokens. */
static int64_t most_rows(const lm_dispatch_attr *a, int64_t rows)
{
    const int64_t n = assignments(a);
    return n < rows ? n : rows;
}

static size_t scratch_of(const lm_call *c, const lm_tensor *rows, bool back, scratch *s)
{
    const lm_dispatch_attr *a = c->attr;
    const size_t row = (size_t)rows->dim[1] * lm_dtype_size(rows->dtype);
    const size_t sizes = rounded_up(3 * (size_t)a->ranks * sizeof(size_t)),
                 places = back ? rounded_up((size_t)assignments(a) * sizeof(int32_t)) : 0,
                 tokens = rounded_up((size_t)most_rows(a, rows->dim[0]) * row),
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

static void expert_scale(const lm_call *c)
{
    const plan p = plan_of(c, 1, &c->in[0]);
    const lm_range rows = rows_at(&p, p.a->rank);
    const int64_t cols = c->in[0].dim[1];
    for (int64_t i = 0; i < rows.count; i++) {
        const int32_t a = p.from[rows.from + i];
        const double w = a < 0 ? 0 : get(&c->in[3], a);
        for (int64_t k = i * cols; k < (i + 1) * cols; k++)
            set(&c->out[0], k, a < 0 ? 0 : w * get(&c->in[0], k));
    }
}

static void expert_dot(const lm_call *c)
{
    const plan p = plan_of(c, 2, &c->in[0]);
    const lm_range rows = rows_at(&p, p.a->rank);
    const int64_t cols = c->in[0].dim[1];
    lm_tensor *d = &c->out[0];
    for (int64_t i = 0; i < lm_tensor_count(d); i++)
        set(d, i, 0);
    for (int64_t i = 0; i < rows.count; i++) {
        double sum = 0;
        for (int64_t k = i * cols; k < (i + 1) * cols; k++)
            sum += get(&c->in[0], k) * get(&c->in[1], k);
        if (p.from[rows.from + i] >= 0)
            set(d, p.from[rows.from + i], sum);
    }
}

static size_t sum_work(const lm_call *c, int threads)
{
    (void)threads;
    return scratch_of(c, &c->in[0], true, NULL);
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

/* Of a token: its rows, weighed. */
static void add_rows(const lm_call *c, const scratch *s, const char *rows, int64_t t)
{
    const lm_dispatch_attr *a = c->attr;
    const lm_tensor *weight = opt_in(c, 3);
    lm_tensor *x = &c->out[0];
    const int64_t cols = x->dim[1];
    const size_t row = (size_t)cols * lm_dtype_size(x->dtype);
    for (int64_t i = 0; i < cols; i++) {
        double wide = 0;
        float sum = 0;
        for (int64_t k = t * a->k; k < (t + 1) * a->k; k++) {
            if (s->place[k] < 0)
                continue;
            const double v = lm_get(x->dtype, rows + (size_t)s->place[k] * row, i),
                         w = weight ? get(weight, k) : 1;
            wide += w * v;
            sum += (float)w * (float)v;
        }
        set(x, t * cols + i, x->dtype == LM_DTYPE_F64 ? wide : (double)sum);
    }
}

static void expert_sum(const lm_call *c)
{
    const plan p = plan_of(c, 1, &c->in[0]);
    lm_links *l = links_of(c);
    scratch s;
    scratch_of(c, &c->in[0], true, &s);
    count_bytes(&p, s.take, s.give);
    move_own(&p, &s, s.give, s.sent, c->in[0].data, true);
    if (l)
        l->all_to_all(l, s.sent, s.give, s.got, s.take);
    find_places(&p, s.place);
    for (int64_t t = 0; t < p.mine.count; t++)
        add_rows(c, &s, l ? s.got : s.sent, t);
}

const lm_kernel lm_dispatch_ref_kernels[] = {
    { "expert_offsets", LM_DTYPE_NONE, LM_CPU_REF, expert_offsets, NULL },
    { "expert_rows", LM_DTYPE_NONE, LM_CPU_REF, expert_rows, rows_work },
    { "expert_scale", LM_DTYPE_NONE, LM_CPU_REF, expert_scale, NULL },
    { "expert_sum", LM_DTYPE_NONE, LM_CPU_REF, expert_sum, sum_work },
    { "expert_dot", LM_DTYPE_NONE, LM_CPU_REF, expert_dot, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
