/* monitor.c -- percentiles of gradients and the size of updates. */
#include "train/monitor.h"

#include <math.h>

#include "base/mem.h"

/* Each costs three cache misses; of so many the 99th percentile is good to a few percent. */
enum { SAMPLE = 16384 };

struct lm_monitor {
    int64_t n, stride, count;
    float *before, *grad;
};

lm_code lm_monitor_new(int64_t n, lm_monitor **out, lm_err *e)
{
    lm_monitor *m = NULL;
    *out = NULL;
    if (lm_alloc_n(&m, 1, sizeof *m, "monitors", e))
        return e->code;
    m->n = n;
    /* Odd: widths are even, and a sample of one column is none. */
    m->stride = n > SAMPLE ? n / SAMPLE | 1 : 1;
    m->count = n / m->stride < SAMPLE ? n / m->stride : SAMPLE;
    if (lm_alloc_n(&m->before, (size_t)m->count, sizeof(float), "monitors", e) ||
        lm_alloc_n(&m->grad, (size_t)m->count, sizeof(float), "monitors", e)) {
        lm_monitor_free(m);
        return e->code;
    }
    *out = m;
    return LM_OK;
}

void lm_monitor_free(lm_monitor *m)
{
    if (!m)
        return;
    lm_free(m->before);
    lm_free(m->grad);
    lm_free(m);
}

void lm_monitor_before(lm_monitor *m, const float *param, const float *grad)
{
    for (int64_t i = 0; i < m->count; i++) {
        m->before[i] = param[i * m->stride];
        m->grad[i] = fabsf(grad[i * m->stride]);
    }
}

/* Element k of x[from, n) as if sorted; what lies before it is no larger, behind it no smaller
 * (C. A. R. Hoare, Algorithm 65: Find). */
static float select_nth(float *x, int64_t from, int64_t n, int64_t k)
{
    int64_t lo = from, hi = n - 1;
    while (lo < hi) {
        float pivot = x[lo + (hi - lo) / 2];
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (x[i] < pivot)
                i++;
            while (pivot < x[j])
                j--;
            if (i > j)
                break;
            float t = x[i];
            x[i++] = x[j];
            x[j--] = t;
        }
        if (k <= j)
            hi = j;
        else if (k >= i)
            lo = i;
        else
            break;
    }
    return x[k];
}

void lm_monitor_after(lm_monitor *m, const float *param, lm_monitor_reading *out)
{
    double moved = 0, size = 0, last = (double)(m->count - 1);
    for (int64_t i = 0; i < m->count; i++) {
        double d = (double)param[i * m->stride] - m->before[i];
        moved += d * d;
        size += (double)m->before[i] * m->before[i];
    }
    int64_t k50 = (int64_t)(0.50 * last), k90 = (int64_t)(0.90 * last),
            k99 = (int64_t)(0.99 * last), n = m->count;
    out->p50 = select_nth(m->grad, 0, n, k50);
    out->p90 = select_nth(m->grad, k50, n, k90);
    out->p99 = select_nth(m->grad, k90, n, k99);
    out->max = select_nth(m->grad, k99, n, n - 1);
    out->update_ratio = size > 0 ? sqrt(moved / size) : 0;
}
