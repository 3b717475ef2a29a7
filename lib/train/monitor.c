/* SPDX-License-Identifier: Apache-2.0 */
/* monitor.c -- percentiles of gradients and the size of updates. */
#include "train/monitor.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "graph/mirror.h"
#include "numeric/select.h"

/* Each costs three cache misses; with this number the 99th percentile is accurate to a few
 * percent. */
enum { SAMPLE = 16384 };

struct lm_monitor {
    int64_t count, stride;
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
    m->stride = lm_monitor_stride(n);
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

/* ---- stages ---- */

/* What a rank gives beside the sizes of its sampled gradients. */
typedef struct {
    double moved, size; /* sums of squares, of as many elements as the samples stand for */
    int64_t count, stride;
} part;

typedef struct {
    float size; /* of the gradient */
    int64_t weight;
} weighed;

/* Whether this rank counts a parameter: of the stages that have the same one does. */
static bool counts(const lm_model *m, int param)
{
    for (int k = 0; k < m->n_slices; k++)
        if (m->slice[k].param == param)
            return !m->slice[k].cut.ranks || m->slice[k].cut.counts;
    return true;
}

/* The samples of the parameters that this rank counts, each with the padding behind it, which one rank samples as well;
 * out: sizes of their gradients. */
static part take_part(const lm_monitor *m, const lm_model *model, float *out)
{
    const float *before = m->before.host, *grad = m->grad.host, *after = m->after.host;
    part own = { .stride = m->stride };
    for (int p = 0; p < model->n_params; p++) {
        const lm_param *at = &model->param[p];
        const int64_t end =
            at->offset + (at->count + LM_BLOCK_ALIGN - 1) / LM_BLOCK_ALIGN * LM_BLOCK_ALIGN;
        if (!at->trains || !counts(model, p))
            continue;
        for (int64_t i = (at->offset + m->stride - 1) / m->stride;
             i < m->count && i * m->stride < end; i++) {
            const double d = (double)after[i] - before[i];
            own.moved += d * d * (double)m->stride;
            own.size += (double)before[i] * before[i] * (double)m->stride;
            out[own.count++] = fabsf(grad[i]);
        }
    }
    return own;
}

static int by_size(const void *a, const void *b)
{
    const float x = ((const weighed *)a)->size, y = ((const weighed *)b)->size;
    return (x > y) - (x < y);
}

/* The first size up to which samples have more than `share` of all weight but one. */
static double at_share(const weighed *w, int64_t n, int64_t all, double share)
{
    const int64_t k = (int64_t)(share * (double)(all - 1));
    int64_t sum = 0, i = 0;
    while (i + 1 < n && (sum += w[i].weight) <= k)
        i++;
    return n ? (double)w[i].size : 0;
}

static void read_parts(const part *of, int ranks, const float *sizes, weighed *w,
                       lm_monitor_reading *out)
{
    double moved = 0, size = 0;
    int64_t n = 0, all = 0;
    for (int r = 0; r < ranks; r++) {
        moved += of[r].moved;
        size += of[r].size;
        all += of[r].count * of[r].stride;
        for (int64_t i = 0; i < of[r].count; i++, n++)
            w[n] = (weighed){ sizes[n], of[r].stride };
    }
    qsort(w, (size_t)n, sizeof *w, by_size);
    out->p50 = at_share(w, n, all, 0.50);
    out->p90 = at_share(w, n, all, 0.90);
    out->p99 = at_share(w, n, all, 0.99);
    out->max = n ? (double)w[n - 1].size : 0;
    out->update_ratio = size > 0 ? sqrt(moved / size) : 0;
}

lm_code lm_monitor_read_stages(lm_monitor *m, const lm_model *model, lm_comm *c,
                               lm_monitor_reading *out, lm_err *e)
{
    const int ranks = lm_comm_size(c);
    float *own = NULL, *sizes = NULL;
    size_t *bytes = NULL, n = 0;
    part mine, *each = NULL;
    weighed *w = NULL;
    if (lm_alloc_n(&own, (size_t)m->count + 1, sizeof *own, "monitors", e) ||
        lm_alloc_n(&bytes, (size_t)ranks, sizeof *bytes, "monitors", e))
        goto end;
    mine = take_part(m, model, own);
    if (lm_comm_gather_each(c, &mine, sizeof mine, (void *)&each, e))
        goto end;
    for (int r = 0; r < ranks; r++) {
        n += (size_t)each[r].count;
        bytes[r] = (size_t)each[r].count * sizeof *own;
    }
    if (lm_alloc_n(&sizes, n + 1, sizeof *sizes, "monitors", e) ||
        lm_alloc_n(&w, n + 1, sizeof *w, "monitors", e) ||
        lm_comm_all_gather(c, own, sizes, bytes, e))
        goto end;
    read_parts(each, ranks, sizes, w, out);
end:
    lm_free(own);
    lm_free(bytes);
    lm_free(each);
    lm_free(sizes);
    lm_free(w);
    return e->code;
}
