/* SPDX-License-Identifier: Apache-2.0 */
/* sample_ref.c -- the next token of each row of logits; contract: kernels/sample.h. */
#include "kernels/sample.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* One row, in the scratch of its thread. */
typedef struct {
    const lm_sample_attr *o;
    int64_t vocab;
    const float *plain; /* logits of the model */
    const float *logit; /* logits after the penalty */
    float *penalised;
    double *weight; /* of each id: exp((logit - max) / temperature) */
    int32_t *order; /* candidates; a heap while they are being ranked */
    uint64_t *paid; /* a bit for each id: the penalty has been applied */
} row;

static size_t paid_words(int64_t vocab)
{
    return (size_t)(vocab + 63) / 64;
}

static size_t row_bytes(int64_t vocab)
{
    size_t n = (size_t)vocab * (sizeof(double) + sizeof(float) + sizeof(int32_t)) +
               paid_words(vocab) * sizeof(uint64_t);
    return (n + 63) / 64 * 64;
}

static void penalise(row *r, const int32_t *seen, int64_t n)
{
    double penalty = r->o->repetition_penalty;
    memcpy(r->penalised, r->plain, (size_t)r->vocab * sizeof *r->plain);
    memset(r->paid, 0, paid_words(r->vocab) * sizeof *r->paid);
    for (int64_t i = 0; i < n; i++) {
        int32_t id = seen[i];
        if (id < 0 || id >= r->vocab || (r->paid[id / 64] >> id % 64 & 1))
            continue;
        r->paid[id / 64] |= (uint64_t)1 << id % 64;
        float *x = &r->penalised[id];
        *x = (float)(*x > 0 ? *x / penalty : *x * penalty);
    }
    r->logit = r->penalised;
}

enum { LANES = 16 }; /* numbers at a time, in loops that compilers make vectors of */

/* The first of the greatest numbers. */
static int64_t likeliest(const float *x, int64_t n)
{
    float most[LANES], top = -INFINITY;
    int64_t i = 0;
    for (int k = 0; k < LANES; k++)
        most[k] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            most[k] = x[i + k] > most[k] ? x[i + k] : most[k];
    for (int k = 0; k < LANES; k++)
        top = most[k] > top ? most[k] : top;
    for (; i < n; i++)
        top = x[i] > top ? x[i] : top;
    for (i = 0; i + LANES <= n; i += LANES) {
        int here = 0;
        for (int k = 0; k < LANES; k++)
            here |= x[i + k] == top;
        if (here)
            break;
    }
    while (i < n - 1 && x[i] != top)
        i++;
    return i;
}

static double log_softmax(const float *x, int64_t n, int64_t i)
{
    double sum = 0, top = x[likeliest(x, n)];
    for (int64_t k = 0; k < n; k++)
        sum += exp(x[k] - top); /* at least 1 */
    return x[i] - top - log1p(sum - 1);
}

/* ---- ranking: a heap with the heaviest candidate on top ---- */

static bool before(const row *r, int32_t a, int32_t b)
{
    return r->weight[a] > r->weight[b] || (r->weight[a] == r->weight[b] && a < b);
}

static void sift(row *r, int64_t i, int64_t n)
{
    int32_t *h = r->order, x = h[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(r, h[child + 1], h[child]))
            child++;
        if (!before(r, h[child], x))
            break;
        h[i] = h[child];
    }
    h[i] = x;
}

/* Rank candidates until there are `most`, or their weight reaches `enough`; they are moved to the
 * back of r->order, the heaviest last.  Returns their number. */
static int64_t rank(row *r, int64_t most, double enough)
{
    int64_t n = r->vocab, got = 0;
    double sum = 0;
    for (int64_t i = n / 2 - 1; i >= 0; i--)
        sift(r, i, n);
    while (got < most && got < r->vocab && (!got || sum < enough)) {
        int32_t top = r->order[0];
        r->order[0] = r->order[--n];
        sift(r, 0, n);
        r->order[n] = top;
        sum += r->weight[top];
        got++;
    }
    return got;
}

/* The ranked candidates kept by all three limits; the heaviest is the last of r->order. */
static int64_t truncate_ranked(row *r, double all)
{
    const lm_sample_attr *o = r->o;
    const int32_t *heaviest = r->order + r->vocab - 1;
    int64_t k = o->top_k > 0 && o->top_k < r->vocab ? o->top_k : r->vocab, n;
    if (k < r->vocab) { /* top-p is a share of what top-k left */
        n = rank(r, k, INFINITY);
        all = 0;
        for (int64_t i = 0; i < n; i++)
            all += r->weight[heaviest[-i]];
        double sum = 0;
        for (int64_t i = 0; i < n; i++)
            if ((sum += r->weight[heaviest[-i]]) >= o->top_p * all) {
                n = i + 1;
                break;
            }
    } else {
        n = rank(r, k, o->top_p < 1 ? o->top_p * all : INFINITY);
    }
    while (n > 1 && r->weight[heaviest[1 - n]] < o->min_p)
        n--;
    return n;
}

static int64_t draw_ranked(const row *r, int64_t n, double u)
{
    const int32_t *heaviest = r->order + r->vocab - 1;
    double all = 0, sum = 0;
    for (int64_t i = 0; i < n; i++)
        all += r->weight[heaviest[-i]];
    for (int64_t i = 0; i < n; i++)
        if ((sum += r->weight[heaviest[-i]]) > u * all)
            return heaviest[-i];
    return heaviest[1 - n];
}

static int64_t draw_plain(const row *r, double all, double u)
{
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < r->vocab; i++) {
        if (r->weight[i] > 0)
            last = i;
        if ((sum += r->weight[i]) > u * all)
            return i;
    }
    return last;
}

/* NaN or +Inf somewhere. */
static bool unusable(const float *x, int64_t n)
{
    int64_t i = 0;
    int bad = 0;
    for (; i + LANES <= n && !bad; i += LANES)
        for (int k = 0; k < LANES; k++)
            bad |= !(x[i + k] < INFINITY);
    for (; i < n; i++)
        bad |= !(x[i] < INFINITY);
    return bad;
}

/* Logits after the penalty, and the likeliest id; -1: they are not usable. */
static int64_t prepare(row *r, const int32_t *seen, int64_t n_seen)
{
    if (unusable(r->plain, r->vocab))
        return -1;
    r->logit = r->plain;
    if (r->o->repetition_penalty != 1)
        penalise(r, seen, n_seen);
    int64_t got = likeliest(r->logit, r->vocab);
    return r->logit[got] == -INFINITY ? -1 : got;
}

/* The weights of all ids, and their sum; top: the likeliest id. */
static double weigh(row *r, int64_t top)
{
    double all = 0, most = r->logit[top];
    for (int64_t i = 0; i < r->vocab; i++) {
        r->weight[i] = exp((r->logit[i] - most) / r->o->temperature);
        r->order[i] = (int32_t)i;
        all += r->weight[i];
    }
    return all;
}

static bool has_limits(const lm_sample_attr *o)
{
    return o->top_k > 0 || o->top_p < 1 || o->min_p > 0;
}

static int64_t choose(row *r, const int32_t *seen, int64_t n_seen, double u)
{
    int64_t got = prepare(r, seen, n_seen);
    if (got < 0 || r->o->temperature <= 0)
        return got;
    double all = weigh(r, got);
    return has_limits(r->o) ? draw_ranked(r, truncate_ranked(r, all), u) : draw_plain(r, all, u);
}

static void sample_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int64_t vocab = width(&c->in[0]);
    char *mine = (char *)c->work + (size_t)worker * row_bytes(vocab);
    const lm_tensor *seen = opt_in(c, 1), *n_seen = opt_in(c, 2);
    const int32_t *on = c->in[4].data;
    const double *u = c->in[3].data;
    row r = { .o = c->attr, .vocab = vocab, .weight = (double *)mine };
    r.paid = (uint64_t *)(r.weight + vocab);
    r.penalised = (float *)(r.paid + paid_words(vocab));
    r.order = (int32_t *)(r.penalised + vocab);
    for (int64_t b = begin; b < end; b++) {
        if (!on[b])
            continue;
        r.plain = (const float *)c->in[0].data + b * vocab;
        int64_t id = choose(&r, seen ? (const int32_t *)seen->data + b * width(seen) : NULL,
                            seen ? ((const int32_t *)n_seen->data)[b] : 0, u[b]);
        ((int32_t *)c->out[0].data)[b] = (int32_t)id;
        if (id >= 0 && opt_out(c, 1))
            ((double *)c->out[1].data)[b] = log_softmax(r.plain, vocab, id);
    }
}

static void sample(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], 1, sample_rows, (void *)(uintptr_t)c);
}

/* ---- drafts ---- */

/* The distribution of which `choose` draws; false: the logits are not usable. */
static bool spread(row *r, const int32_t *seen, int64_t n_seen, double *p)
{
    const int64_t top = prepare(r, seen, n_seen);
    memset(p, 0, (size_t)r->vocab * sizeof *p);
    if (top < 0)
        return false;
    if (r->o->temperature <= 0) {
        p[top] = 1;
        return true;
    }
    double all = weigh(r, top), kept = 0;
    const int64_t n = has_limits(r->o) ? truncate_ranked(r, all) : r->vocab;
    for (int64_t i = 0; i < n; i++)
        kept += r->weight[r->order[r->vocab - 1 - i]];
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = r->order[r->vocab - 1 - i];
        p[id] = r->weight[id] / kept;
    }
    return true;
}

/* Of max(0, p - q); where that is 0 throughout, of p. */
static int64_t draw_rest(const double *p, const double *q, int64_t n, double u)
{
    double all = 0, sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++)
        all += p[i] > q[i] ? p[i] - q[i] : 0;
    const bool none = !(all > 0);
    for (int64_t i = 0; i < n; i++) {
        const double rest = none ? p[i] : p[i] > q[i] ? p[i] - q[i] : 0;
        last = rest > 0 ? i : last;
        if ((sum += rest) > u * (none ? 1 : all))
            return i;
    }
    return last;
}

static size_t accept_bytes(int64_t vocab)
{
    return row_bytes(vocab) + (2 * (size_t)vocab * sizeof(double) + 63) / 64 * 64;
}

static void accept_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int64_t vocab = width(&c->in[0]);
    char *mine = (char *)c->work + (size_t)worker * accept_bytes(vocab);
    const lm_tensor *seen = opt_in(c, 1), *n_seen = opt_in(c, 2);
    double *p = (double *)(mine + row_bytes(vocab)), *q = p + vocab;
    row r = { .o = c->attr, .vocab = vocab, .weight = (double *)mine };
    r.paid = (uint64_t *)(r.weight + vocab);
    r.penalised = (float *)(r.paid + paid_words(vocab));
    r.order = (int32_t *)(r.penalised + vocab);
    for (int64_t b = begin; b < end; b++) {
        if (!((const int32_t *)c->in[4].data)[b])
            continue;
        const int32_t *ids = seen ? (const int32_t *)seen->data + b * width(seen) : NULL;
        const int64_t n = seen ? ((const int32_t *)n_seen->data)[b] : 0;
        const int32_t drafted = ((const int32_t *)c->in[5].data)[b];
        int64_t id = -1;
        r.plain = (const float *)c->in[6].data + b * vocab;
        const bool fair = spread(&r, ids, n, q) && drafted >= 0 && q[drafted] > 0;
        r.plain = (const float *)c->in[0].data + b * vocab;
        if (spread(&r, ids, n, p))
            id = fair && ((const double *)c->in[7].data)[b] * q[drafted] < p[drafted]
                     ? drafted
                     : draw_rest(p, q, vocab, ((const double *)c->in[3].data)[b]);
        ((int32_t *)c->out[0].data)[b] = (int32_t)id;
        if (id >= 0 && opt_out(c, 1))
            ((double *)c->out[1].data)[b] = log_softmax(r.plain, vocab, id);
    }
}

static void sample_accept(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], 1, accept_rows, (void *)(uintptr_t)c);
}

static size_t accept_work(const lm_call *c, int threads)
{
    return accept_bytes(width(&c->in[0])) * (size_t)(c->in[0].dim[0] == 1 ? 1 : threads);
}

static size_t sample_work(const lm_call *c, int threads)
{
    return row_bytes(width(&c->in[0])) * (size_t)(c->in[0].dim[0] == 1 ? 1 : threads);
}

const lm_kernel lm_sample_ref_kernels[] = {
    { "sample", LM_DTYPE_NONE, LM_CPU_REF, sample, sample_work },
    { "sample_accept", LM_DTYPE_NONE, LM_CPU_REF, sample_accept, accept_work },
    { 0 },
};
