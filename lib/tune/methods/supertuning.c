/* SPDX-License-Identifier: Apache-2.0 */
/* supertuning.c -- the largest (or smallest) entries of W train, and with r a low-rank matrix
 * beside them: W' = W + v at the places indices (counted over all of W), + (lora_alpha / r) B A.
 * Sources: arXiv:2607.09287; huggingface/peft tuners/supertuning. */
#include <math.h>
#include <string.h>

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

/* Numbers whose order is that of the entries' sizes as floats, the wanted ones highest. */
static uint32_t key_of(double w, bool top)
{
    float size = (float)fabs(w);
    uint32_t bits;

    memcpy(&bits, &size, sizeof bits);
    return top ? bits : ~bits;
}

/* The highest number such that at least `count` of the uses lie at or above it; *above: those that
 * lie above. */
static uint32_t highest(const int64_t *uses, uint32_t n, int64_t count, int64_t *above)
{
    uint32_t at = n - 1;

    for (*above = 0; at > 0 && *above + uses[at] < count; at--)
        *above += uses[at];
    return at;
}

/* The `count` largest entries, of equal ones the first, in the order of their places: by the upper
 * half of the key of the last one, then by its lower half. */
static lm_code choose(const double *w, int64_t n, bool top, int64_t count, double *places,
                      lm_err *e)
{
    enum { HALF = 1 << 16 };
    int64_t *uses = NULL, above, more, at = 0;
    uint32_t upper, least;

    if (lm_alloc_n(&uses, HALF, sizeof *uses, "sizes of weights", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        uses[key_of(w[i], top) >> 16]++;
    upper = highest(uses, HALF, count, &above);
    memset(uses, 0, HALF * sizeof *uses);
    for (int64_t i = 0; i < n; i++)
        if (key_of(w[i], top) >> 16 == upper)
            uses[key_of(w[i], top) & (HALF - 1)]++;
    least = upper << 16 | highest(uses, HALF, count - above, &more);
    more = count - above - more; /* of those that equal the last one */
    for (int64_t i = 0; i < n; i++) {
        uint32_t key = key_of(w[i], top);

        if (key > least || (key == least && more-- > 0))
            places[at++] = (double)i;
    }
    lm_free(uses);
    return LM_OK;
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t n = m->in * m->out, count = (int64_t)((double)n * (1 - m->hyper[SPARSITY]));

    (void)changed, (void)rng;
    return choose(w, n, m->hyper[TOP] > 0, count, v[PLACES], e);
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
