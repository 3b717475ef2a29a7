/* SPDX-License-Identifier: Apache-2.0 */
/* monitor.c -- percentiles of gradients and the size of updates. */
#include "train/monitor.h"

#include <math.h>

#include "base/mem.h"
#include "graph/mirror.h"
#include "numeric/select.h"

/* Each costs three cache misses; with this number the 99th percentile is accurate to a few
 * percent. */
enum { SAMPLE = 16384 };

struct lm_monitor {
    int64_t count;
    lm_mirror before, grad, after;
};

/* An odd stride, so that samples do not fall into one column. */
int64_t lm_monitor_stride(int64_t n)
{
    return n > SAMPLE ? n / SAMPLE | 1 : 1;
}

int64_t lm_monitor_count(int64_t n)
{
    int64_t count = n / lm_monitor_stride(n);
    return count < SAMPLE ? count : SAMPLE;
}

size_t lm_monitor_bytes(int64_t n)
{
    return 3 * (size_t)lm_monitor_count(n) * sizeof(float);
}

lm_code lm_monitor_new(lm_backend *b, int64_t n, lm_monitor **out, lm_err *e)
{
    lm_monitor *m = NULL;
    *out = NULL;
    if (lm_alloc_n(&m, 1, sizeof *m, "monitors", e))
        return e->code;
    m->count = lm_monitor_count(n);
    size_t bytes = (size_t)m->count * sizeof(float);
    if (lm_mirror_new(b, bytes, "monitors", &m->before, e) ||
        lm_mirror_new(b, bytes, "monitors", &m->grad, e) ||
        lm_mirror_new(b, bytes, "monitors", &m->after, e)) {
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
    lm_mirror_fini(&m->before);
    lm_mirror_fini(&m->grad);
    lm_mirror_fini(&m->after);
    lm_free(m);
}

void lm_monitor_bind(const lm_monitor *m, const lm_update_values *v, lm_exec *x)
{
    lm_exec_bind(x, v->before, m->before.dev);
    lm_exec_bind(x, v->grads, m->grad.dev);
    lm_exec_bind(x, v->after, m->after.dev);
}

float *lm_monitor_samples(const lm_monitor *m, int k)
{
    return k == 0 ? m->before.dev : k == 1 ? m->grad.dev : m->after.dev;
}

lm_code lm_monitor_before(lm_monitor *m, lm_err *e)
{
    return lm_mirror_pull(&m->before, m->before.bytes, NULL, e)
               ? e->code
               : lm_mirror_pull(&m->grad, m->grad.bytes, NULL, e);
}

lm_code lm_monitor_after(lm_monitor *m, lm_err *e)
{
    return lm_mirror_pull(&m->after, m->after.bytes, NULL, e);
}

void lm_monitor_read(lm_monitor *m, lm_monitor_reading *out)
{
    const float *before = m->before.host, *after = m->after.host;
    float *grad = m->grad.host;
    double moved = 0, size = 0, last = (double)(m->count - 1);
    for (int64_t i = 0; i < m->count; i++) {
        double d = (double)after[i] - before[i];
        moved += d * d;
        size += (double)before[i] * before[i];
        grad[i] = fabsf(grad[i]);
    }
    int64_t k50 = (int64_t)(0.50 * last), k90 = (int64_t)(0.90 * last),
            k99 = (int64_t)(0.99 * last), n = m->count;
    out->p50 = lm_select_nth(grad, 0, n, k50);
    out->p90 = lm_select_nth(grad, k50, n, k90);
    out->p99 = lm_select_nth(grad, k90, n, k99);
    out->max = lm_select_nth(grad, k99, n, n - 1);
    out->update_ratio = size > 0 ? sqrt(moved / size) : 0;
}
