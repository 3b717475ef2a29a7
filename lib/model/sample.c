/* sample.c -- sampling from logits. */
#include "model/sample.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/mem.h"

struct lm_sampler {
    int64_t vocab;
    float *logit;    /* after the penalty */
    double *weight;  /* of each id: exp((logit - max) / temperature) */
    int32_t *order;  /* candidates; a heap while they are being ranked */
    uint32_t *stamp; /* == turn: the penalty has been paid */
    uint32_t turn;
};

lm_code lm_sampler_new(int64_t vocab, lm_sampler **out, lm_err *e)
{
    lm_sampler *s = NULL;
    size_t n = (size_t)vocab;
    *out = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "a sampler", e))
        return e->code;
    s->vocab = vocab;
    if (lm_alloc_n(&s->logit, n, sizeof *s->logit, "a sampler", e) ||
        lm_alloc_n(&s->weight, n, sizeof *s->weight, "a sampler", e) ||
        lm_alloc_n(&s->order, n, sizeof *s->order, "a sampler", e) ||
        lm_alloc_n(&s->stamp, n, sizeof *s->stamp, "a sampler", e)) {
        lm_sampler_free(s);
        return e->code;
    }
    *out = s;
    return LM_OK;
}

void lm_sampler_free(lm_sampler *s)
{
    if (!s)
        return;
    lm_free(s->logit);
    lm_free(s->weight);
    lm_free(s->order);
    lm_free(s->stamp);
    lm_free(s);
}

static void penalise(lm_sampler *s, double penalty, const uint32_t *seen, int64_t n)
{
    if (!++s->turn) {
        memset(s->stamp, 0, (size_t)s->vocab * sizeof *s->stamp);
        s->turn = 1;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t id = seen[i];
        if (id >= s->vocab || s->stamp[id] == s->turn)
            continue;
        s->stamp[id] = s->turn;
        s->logit[id] = (float)(s->logit[id] > 0 ? s->logit[id] / penalty : s->logit[id] * penalty);
    }
}

static int64_t likeliest(const float *x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

static double log_softmax(const float *x, int64_t n, int64_t i)
{
    double sum = 0, top = x[likeliest(x, n)];
    for (int64_t k = 0; k < n; k++)
        sum += exp(x[k] - top); /* at least 1 */
    return x[i] - top - log1p(sum - 1);
}

/* ---- ranking: a heap with the heaviest candidate on top ---- */

static bool before(const lm_sampler *s, int32_t a, int32_t b)
{
    return s->weight[a] > s->weight[b] || (s->weight[a] == s->weight[b] && a < b);
}

static void sift(lm_sampler *s, int64_t i, int64_t n)
{
    int32_t *h = s->order, x = h[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(s, h[child + 1], h[child]))
            child++;
        if (!before(s, h[child], x))
            break;
        h[i] = h[child];
    }
    h[i] = x;
}

/* Put candidates in order until `most` are, or their weight reaches `enough`; they end up at the
 * back of s->order, the heaviest last.  Returns their number. */
static int64_t rank(lm_sampler *s, int64_t most, double enough)
{
    int64_t n = s->vocab, got = 0;
    double sum = 0;
    for (int64_t i = n / 2 - 1; i >= 0; i--)
        sift(s, i, n);
    while (got < most && got < s->vocab && (!got || sum < enough)) {
        int32_t top = s->order[0];
        s->order[0] = s->order[--n];
        sift(s, 0, n);
        s->order[n] = top;
        sum += s->weight[top];
        got++;
    }
    return got;
}

/* The ranked candidates kept by all three limits; *kept is the first of them (the heaviest), going
 * down. */
static int64_t truncate_ranked(lm_sampler *s, const lm_sample_opts *o, double all)
{
    int64_t k = o->top_k > 0 && o->top_k < s->vocab ? o->top_k : s->vocab, n;
    if (k < s->vocab) { /* top-p is a share of what top-k left */
        n = rank(s, k, INFINITY);
        all = 0;
        for (int64_t i = 0; i < n; i++)
            all += s->weight[s->order[s->vocab - 1 - i]];
        double sum = 0;
        for (int64_t i = 0; i < n; i++)
            if ((sum += s->weight[s->order[s->vocab - 1 - i]]) >= o->top_p * all) {
                n = i + 1;
                break;
            }
    } else {
        n = rank(s, k, o->top_p < 1 ? o->top_p * all : INFINITY);
    }
    while (n > 1 && s->weight[s->order[s->vocab - n]] < o->min_p)
        n--;
    return n;
}

static int64_t draw_ranked(lm_sampler *s, int64_t n, double u)
{
    const int32_t *heaviest = s->order + s->vocab - 1;
    double all = 0, sum = 0;
    for (int64_t i = 0; i < n; i++)
        all += s->weight[heaviest[-i]];
    for (int64_t i = 0; i < n; i++)
        if ((sum += s->weight[heaviest[-i]]) > u * all)
            return heaviest[-i];
    return heaviest[-(n - 1)];
}

static int64_t draw_plain(const lm_sampler *s, double all, double u)
{
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < s->vocab; i++) {
        if (s->weight[i] > 0)
            last = i;
        if ((sum += s->weight[i]) > u * all)
            return i;
    }
    return last;
}

/* NaN or +Inf somewhere. */
static bool unusable(const float *x, int64_t n)
{
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= !(x[i] < INFINITY);
    return bad;
}

int64_t lm_sample(lm_sampler *s, const lm_sample_opts *o, const float *logits, const uint32_t *seen,
                  int64_t n_seen, double u, double *logprob)
{
    int64_t got;
    if (unusable(logits, s->vocab))
        return -1;
    memcpy(s->logit, logits, (size_t)s->vocab * sizeof *s->logit);
    if (o->repetition_penalty != 1)
        penalise(s, o->repetition_penalty, seen, n_seen);
    got = likeliest(s->logit, s->vocab);
    if (s->logit[got] == -INFINITY)
        return -1;
    if (o->temperature > 0) {
        double all = 0, top = s->logit[got];
        for (int64_t i = 0; i < s->vocab; i++) {
            s->weight[i] = exp((s->logit[i] - top) / o->temperature);
            s->order[i] = (int32_t)i;
            all += s->weight[i];
        }
        if (o->top_k > 0 || o->top_p < 1 || o->min_p > 0)
            got = draw_ranked(s, truncate_ranked(s, o, all), u);
        else
            got = draw_plain(s, all, u);
    }
    if (logprob)
        *logprob = log_softmax(logits, s->vocab, got);
    return got;
}

double lm_sample_draw(uint64_t seed, int64_t prompt, int64_t position)
{
    return lm_rng_uniform(lm_rng_make(seed, "sample", (uint64_t)prompt), (uint64_t)position);
}
