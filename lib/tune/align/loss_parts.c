/* SPDX-License-Identifier: Apache-2.0 */
/* loss_parts.c -- what several losses of alignment compute: sums over completions, counts,
 * metrics. */
#include <float.h>
#include <string.h>

#include "tune/align/loss_impl.h"

/* ---- sums ---- */

int64_t lm_align_length(const lm_align_seq *q)
{
    int64_t n = q->mask ? 0 : q->n;
    for (int64_t t = 0; q->mask && t < q->n; t++)
        n += q->mask[t] != 0;
    return n;
}

double lm_align_sum(const lm_align_seq *q, const double *x)
{
    double sum = 0;
    for (int64_t t = 0; t < q->n; t++)
        if (lm_align_counts_token(q, t))
            sum += x[t];
    return sum;
}

void lm_align_spread(lm_align_seq *q, double d)
{
    for (int64_t t = 0; t < q->n; t++)
        if (lm_align_counts_token(q, t))
            q->dlogp[t] += d;
}

double lm_align_sft(lm_align_batch *b, bool whole, double weight)
{
    int64_t total = whole ? b->counts->sft_whole : b->counts->sft;
    double each = weight / (double)(total > 0 ? total : 1), sum = 0;
    for (int64_t i = 0; i < b->n; i += 2) {
        lm_align_seq *q = &b->seq[i];
        for (int64_t t = 0; t < q->n; t++)
            if (whole || lm_align_counts_token(q, t)) {
                sum -= q->logp[t];
                q->dlogp[t] -= each;
            }
    }
    return sum * each;
}

void lm_align_count(const lm_align_seq *seq, int64_t n, lm_align_counts *add)
{
    for (int64_t i = 0; i < n; i++) {
        if (seq[i].mismatched)
            continue;
        int64_t length = lm_align_length(&seq[i]);
        add->sequences++;
        add->tokens += length;
        add->sft += i % 2 == 0 ? length : 0;
        add->sft_whole += i % 2 == 0 ? seq[i].n : 0;
    }
}

/* ---- entropies ---- */

/* An entropy is at least 0: negative values are rounding errors. */
static double entropy_of(const lm_align_seq *q, int64_t t)
{
    return q->entropy[t] > 0 ? q->entropy[t] : 0;
}

/* Tokens of the micro-batch with an entropy of at most x. */
static double count_to(const lm_align_batch *b, double x)
{
    double n = 0;
    for (int64_t i = 0; i < b->n; i++)
        for (int64_t t = 0; t < b->seq[i].n; t++)
            n += lm_align_counts_token(&b->seq[i], t) && entropy_of(&b->seq[i], t) <= x;
    return n;
}

/* The entropy that k of the tokens, in their order, are before: by bisection of the bits, which
 * have the order of the numbers. */
static double entropy_at(const lm_align_batch *b, double k)
{
    double x = DBL_MAX;
    uint64_t least = 0, most;
    memcpy(&most, &x, sizeof most);
    while (least < most) {
        const uint64_t middle = least + (most - least) / 2;
        memcpy(&x, &middle, sizeof x);
        if (count_to(b, x) > k)
            most = middle;
        else
            least = middle + 1;
    }
    memcpy(&x, &least, sizeof x);
    return x;
}

double lm_align_certain_below(const lm_align_batch *b, double share)
{
    double n, at, first;
    for (int64_t i = 0; i < b->n; i++)
        if (!b->seq[i].entropy)
            return 0;
    n = count_to(b, DBL_MAX);
    if (share >= 1 || n < 1)
        return 0;
    at = (1 - share) * (n - 1);
    first = entropy_at(b, floor(at));
    return first + (at - floor(at)) * (entropy_at(b, ceil(at)) - first);
}

bool lm_align_is_certain(const lm_align_seq *q, int64_t t, double bound)
{
    return bound > 0 && entropy_of(q, t) < bound;
}

/* ---- metrics ---- */

void lm_align_note(lm_align_metrics *m, const char *name, double sum, double weight,
                   lm_align_fold fold)
{
    int i = 0;
    if (!m || weight == 0 || isnan(sum))
        return;
    while (i < m->n && strcmp(m->item[i].name, name) != 0)
        i++;
    if (i == LM_ALIGN_METRICS)
        return;
    lm_align_metric *x = &m->item[i];
    if (i == m->n) {
        *x = (lm_align_metric){ name, sum, weight, fold };
        m->n++;
    } else if (fold == LM_ALIGN_MEAN) {
        x->sum += sum;
        x->weight += weight;
    } else {
        x->sum = fold == LM_ALIGN_LEAST ? fmin(x->sum, sum) : fmax(x->sum, sum);
    }
}

void lm_align_join(lm_align_metrics *m, const lm_align_metrics *more)
{
    for (int i = 0; i < more->n; i++)
        lm_align_note(m, more->item[i].name, more->item[i].sum, more->item[i].weight,
                      more->item[i].fold);
}

double lm_align_value(const lm_align_metric *m)
{
    return m->fold == LM_ALIGN_MEAN ? m->sum / m->weight : m->sum;
}

void lm_align_note_entropy(lm_align_batch *b)
{
    for (int64_t i = 0; b->metrics && i < b->n; i++)
        if (b->seq[i].entropy && !b->seq[i].mismatched)
            lm_align_note(b->metrics, "entropy", lm_align_sum(&b->seq[i], b->seq[i].entropy),
                          (double)lm_align_length(&b->seq[i]), LM_ALIGN_MEAN);
}

void lm_align_note_pair(lm_align_batch *b, const lm_align_pair_note *x)
{
    lm_align_metrics *m = b->metrics;
    lm_align_note(m, "rewards/chosen", x->reward[0], 1, LM_ALIGN_MEAN);
    lm_align_note(m, "rewards/rejected", x->reward[1], 1, LM_ALIGN_MEAN);
    lm_align_note(m, "rewards/accuracies", x->reward[0] > x->reward[1], 1, LM_ALIGN_MEAN);
    lm_align_note(m, "rewards/margins", x->reward[0] - x->reward[1], 1, LM_ALIGN_MEAN);
    lm_align_note(m, "logps/chosen", x->logp[0], 1, LM_ALIGN_MEAN);
    lm_align_note(m, "logps/rejected", x->logp[1], 1, LM_ALIGN_MEAN);
}
