/* SPDX-License-Identifier: Apache-2.0 */
/* combine.c -- several LoRA adapters of one base as one. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "tune/apply.h"
#include "tune/convert.h"
#include "tune/lora_set.h"
#include "tune/methods.h"

/* One module: its factors in each adapter that changes it. */
typedef struct {
    const lm_tune_module *m;
    int64_t rank, all;    /* of the first; of all together */
    double *left, *right; /* [out,all], [all,in]: w s B, A side by side */
} stack;

static lm_code rank_of(const lm_tune_folder *f, const lm_tune_part *p, int64_t *rank, lm_err *e)
{
    const lm_tune_method *t = p->method;
    lm_code rc = t->low_rank ? t->low_rank(&p->module, NULL, rank, NULL, NULL, e) : LM_OK;

    if (!rc && (!t->low_rank || !*rank))
        rc = lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f), "convert it to a plain LoRA first",
                     "adapters of %s have no factors that add up", t->name);
    return rc;
}

/* Factors of adapter i into columns (rows) `at` on of the stack. */
static lm_code add_factors(stack *k, const lm_tune_folder *f, const lm_tune_part *p, int64_t rank,
                           int64_t at, double on_left, double on_right, lm_err *e)
{
    const lm_tune_module *m = &p->module;
    double *left = NULL, *right = NULL;
    lm_tune_loaded l;
    lm_code rc = lm_tune_load(f, p, &l, e);

    if (rc)
        return rc;
    rc = lm_alloc_n(&left, (size_t)(m->out * rank), sizeof *left, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&right, (size_t)(m->in * rank), sizeof *right, "an adapter", e);
    rc = rc ? rc : l.method->low_rank(&l.m, l.v, &rank, left, right, e);
    for (int64_t i = 0; !rc && i < m->out; i++)
        for (int64_t c = 0; c < rank; c++)
            k->left[i * k->all + at + c] += on_left * left[i * rank + c];
    for (int64_t c = 0; !rc && c < rank; c++)
        for (int64_t j = 0; j < m->in; j++)
            k->right[(at + c) * m->in + j] += on_right * right[c * m->in + j];
    lm_free(left);
    lm_free(right);
    lm_tune_loaded_fini(&l);
    return rc;
}

/* PEFT's linear combination: A by sqrt(w s), B by sign and sqrt(w s); factors here have s in B. */
static lm_code fill(stack *k, lm_tune_folder *const *f, const double *weight, int n,
                    lm_tune_combination how, const lm_tune_base *b, lm_err *e)
{
    bool sum = how == LM_TUNE_COMBINE_LINEAR;
    int64_t at = 0;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < n; i++) {
        const lm_tune_part *p = lm_tune_folder_part_of(f[i], b->name);
        int64_t rank = 0;
        double s, root;

        if (!p)
            continue;
        rc = rank_of(f[i], p, &rank, e);
        if (!rc && sum && rank != k->rank)
            rc = lm_fail(e, LM_EUSAGE, b->name, "use cat or svd",
                         "its ranks are %lld and %lld, whose factors do not add up",
                         (long long)k->rank, (long long)rank);
        s = lm_tune_lora_scale(&p->module);
        root = sqrt(fabs(weight[i] * s));
        rc = rc ? rc
                : add_factors(k, f[i], p, rank, sum ? 0 : at,
                              sum ? (weight[i] < 0 ? -root : root) / s : weight[i], sum ? root : 1,
                              e);
        at += rank;
    }
    return rc;
}

/* The sum of the stack's products, for its singular values. */
static lm_code split(lm_lora_set *s, const stack *k, lm_err *e)
{
    const lm_tune_module *m = k->m;
    double *d = NULL;
    lm_code rc = lm_alloc_n(&d, (size_t)(m->out * m->in), sizeof *d, "an adapter", e);

    for (int64_t i = 0; !rc && i < m->out; i++)
        for (int64_t c = 0; c < k->all; c++)
            for (int64_t j = 0; j < m->in; j++)
                d[i * m->in + j] += k->left[i * k->all + c] * k->right[c * m->in + j];
    rc = rc ? rc : lm_lora_set_split(s, m, d, e);
    lm_free(d);
    return rc;
}

static lm_code combine_one(lm_lora_set *s, lm_tune_folder *const *f, const double *weight, int n,
                           lm_tune_combination how, const lm_tune_part *first, lm_err *e)
{
    stack k = { .m = &first->module };
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < n; i++) {
        const lm_tune_part *p = lm_tune_folder_part_of(f[i], first->base->name);
        int64_t rank = 0;

        if (!p)
            continue;
        rc = rank_of(f[i], p, &rank, e);
        k.rank = k.rank ? k.rank : rank;
        k.all = how == LM_TUNE_COMBINE_LINEAR ? k.rank : k.all + rank;
    }
    rc = rc ? rc : lm_alloc_n(&k.left, (size_t)(k.m->out * k.all), sizeof *k.left, "an adapter", e);
    rc =
        rc ? rc : lm_alloc_n(&k.right, (size_t)(k.m->in * k.all), sizeof *k.right, "an adapter", e);
    rc = rc ? rc : fill(&k, f, weight, n, how, first->base, e);
    if (!rc)
        rc = how == LM_TUNE_COMBINE_SVD ? split(s, &k, e)
                                        : lm_lora_set_add(s, k.m, k.all, k.left, k.right, 0, 1, e);
    lm_free(k.left);
    lm_free(k.right);
    return rc;
}

lm_code lm_tune_combine(lm_tune_folder *const *f, const double *weight, int n,
                        lm_tune_combination how, const lm_tune_lora_opts *o, lm_bundle_out *out,
                        lm_tune_lora_report *report, lm_err *e)
{
    const char *base =
        json_string_value(json_object_get(lm_tune_folder_config(f[0]), "base_model_name_or_path"));
    lm_lora_set s;
    lm_code rc = lm_lora_set_new(o, lm_tune_folder_task(f[0]), report, &s, e);

    for (int i = 0; !rc && i < n; i++)
        if (strcmp(lm_tune_folder_method(f[i])->peft_type, "LORA") || lm_tune_folder_wholes(f[i]))
            rc = lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f[i]),
                         "convert it to a plain LoRA first", "%s",
                         lm_tune_folder_wholes(f[i]) ? "it has modules_to_save, which do not add up"
                                                     : "it is not a LoRA");
    for (int i = 0; !rc && i < n; i++)
        rc = lm_tune_folder_refuse_rows(f[i], "merge them into the base one after the other", e);
    for (int i = 0; !rc && i < n; i++)
        for (size_t k = 0; !rc && k < lm_tune_folder_parts(f[i]); k++) {
            const lm_tune_part *p = lm_tune_folder_part(f[i], k);
            bool seen = false;

            for (int j = 0; j < i && !seen; j++)
                seen = lm_tune_folder_part_of(f[j], p->base->name) != NULL;
            if (!seen)
                rc = combine_one(&s, f, weight, n, how, p, e);
        }
    rc = rc ? rc : lm_tune_params_combine(f, weight, n, how, &s, e);
    rc = rc ? rc : lm_lora_set_nest(&s, e);
    rc = rc ? rc : lm_lora_set_write(&s, o->base ? o->base : base, out, e);
    lm_lora_set_fini(&s);
    return rc;
}
