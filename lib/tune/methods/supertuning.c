/* SPDX-License-Identifier: Apache-2.0 */
/* supertuning.c -- the largest (or smallest) entries of W train, and with r a low-rank matrix
 * beside them: W' = W + v at the places indices (counted over all of W), + (lora_alpha / r) B A.
 * Sources: arXiv:2607.09287; huggingface/peft tuners/supertuning. */
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "sparsity", 0.99, 0, 1, "share of entries that do not train", NULL },
    { "select_top", 1, 0, 1, "the largest train, not the smallest", "false true" },
    { "r", 0, 0, 1e6, "rank of the matrix beside them", LM_WHOLE },
    { "lora_alpha", 0, -1e9, 1e9, "its scale: lora_alpha / r", NULL },
    { "lora_dropout", 0, 0, 1, "share of its inputs dropped in training", NULL },
    { 0 },
};
enum { SPARSITY, TOP, R, ALPHA };
enum { VALUES, PLACES, A, B };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t count = (int64_t)((double)(m->in * m->out) * (1 - m->hyper[SPARSITY]));
    int64_t r = (int64_t)m->hyper[R];
    lm_tune_tensor *t;

    *n = 0;
    if (count < 1)
        return lm_fail(e, LM_EUSAGE, m->name, "use a smaller sparsity",
                       "sparsity %g leaves none of its %lld entries", m->hyper[SPARSITY],
                       (long long)(m->in * m->out));
    lm_tune_tensor_add(out, n, "supertuning_values", count, 0, LM_TUNE_ZEROS, 0);
    t = lm_tune_tensor_add(out, n, "supertuning_indices", count, 0, LM_TUNE_BASE, 0);
    t->ids = t->frozen = true;
    lm_tune_tensor_add(out, n, "supertuning_lora_A.weight", r, m->in, LM_TUNE_UNIFORM,
                       1 / sqrt((double)m->in))
        ->off = !r;
    lm_tune_tensor_add(out, n, "supertuning_lora_B.weight", m->out, r, LM_TUNE_ZEROS, 0)->off = !r;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    w = lm_r_add(r, w, 1, lm_r_scatter(r, p[VALUES], m->ids[PLACES], LM_DIMS(m->out, m->in)));
    return p[A] < 0 ? w
                    : lm_r_add(r, w, m->hyper[ALPHA] / m->hyper[R],
                               lm_r_matmul(r, p[B], false, p[A], false));
}

typedef struct {
    double size;
    int64_t at;
} entry;

/* The largest first, of equal ones the first. */
static int by_size(const void *a, const void *b)
{
    const entry *x = a, *y = b;

    return x->size != y->size ? (x->size < y->size ? 1 : -1) : (x->at > y->at) - (x->at < y->at);
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t n = m->in * m->out, count = (int64_t)((double)n * (1 - m->hyper[SPARSITY]));
    entry *all = NULL;
    lm_code rc = lm_alloc_n(&all, (size_t)n, sizeof *all, "sizes of weights", e);

    (void)changed, (void)rng;
    for (int64_t i = 0; !rc && i < n; i++)
        all[i] = (entry){ m->hyper[TOP] > 0 ? fabs(w[i]) : -fabs(w[i]), i };
    if (!rc)
        qsort(all, (size_t)n, sizeof *all, by_size);
    for (int64_t i = 0; !rc && i < count; i++)
        v[PLACES][i] = (double)all[i].at;
    lm_free(all);
    return rc;
}

const lm_tune_method lm_tune_supertuning = {
    .peft_type = "SUPERTUNING",
    .name = "supertuning",
    .about = "the largest entries of the weights",
    .prefix = "supertuning_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .extra = "{\"r\": null, \"lora_alpha\": null}",
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
