/* monitor.c -- percentiles of gradients and the size of updates. */
#include "train/monitor.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"

enum { SAMPLE = 65536 };

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
    m->stride = n > SAMPLE ? n / SAMPLE : 1;
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

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

void lm_monitor_after(lm_monitor *m, const float *param, lm_monitor_reading *out)
{
    double moved = 0, size = 0, last = (double)(m->count - 1);
    for (int64_t i = 0; i < m->count; i++) {
        double d = (double)param[i * m->stride] - m->before[i];
        moved += d * d;
        size += (double)m->before[i] * m->before[i];
    }
    qsort(m->grad, (size_t)m->count, sizeof *m->grad, ascending);
    out->p50 = m->grad[(int64_t)(0.50 * last)];
    out->p90 = m->grad[(int64_t)(0.90 * last)];
    out->p99 = m->grad[(int64_t)(0.99 * last)];
    out->max = m->grad[m->count - 1];
    out->update_ratio = size > 0 ? sqrt(moved / size) : 0;
}
