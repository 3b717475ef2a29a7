/* SPDX-License-Identifier: Apache-2.0 */
/* osf.c -- the lesser singular directions of W train, the largest k stay: W' = H H^T W + U diag(s)
 * V, where the columns of H [out,k] are the base's k largest left singular vectors, and U
 * [out,n-k], s [n-k], V [n-k,in] start as the others, n the lesser side.
 *
 * The gradient of U is projected off the columns of H, that of V off the rows of H^T W, which are
 * the k largest right singular vectors but for their lengths: directions that stay are not trained
 * again by those that do.
 *
 * H follows from the base; it may be in the file.  Sources: arXiv:2504.07097; huggingface/peft
 * tuners/osf. */
#include <string.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "effective_rank", 0, 0, 1e9, "directions that stay; 0: half of them", LM_WHOLE },
    { 0 },
};
enum { U, S, V, HIGH };

static const char *const refused[] = { "target_svd_config", NULL };

static int64_t least_of(const lm_tune_module *m)
{
    return m->in < m->out ? m->in : m->out;
}

static int64_t kept_of(const lm_tune_module *m)
{
    int64_t k = (int64_t)m->hyper[0], n = least_of(m);

    return k ? (k < n ? k : n) : n / 2;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t k = kept_of(m), rest = least_of(m) - k;
    lm_tune_tensor *t;

    *n = 0;
    if (k < 1 || rest < 1)
        return lm_fail(e, LM_EUSAGE, m->name, "use a smaller effective_rank",
                       "%lld of its %lld directions stay", (long long)k, (long long)least_of(m));
    lm_tune_tensor_add(out, n, "osf_svd_params.U_low", m->out, rest, LM_TUNE_BASE, 0);
    lm_tune_tensor_add(out, n, "osf_svd_params.S_low", rest, 0, LM_TUNE_BASE, 0);
    lm_tune_tensor_add(out, n, "osf_svd_params.V_low", rest, m->in, LM_TUNE_BASE, 0);
    t = lm_tune_tensor_add(out, n, "osf_U_high", m->out, k, LM_TUNE_BASE, 0);
    t->frozen = t->absent = true;
    return LM_OK;
}

/* The largest directions; with the others where v has room for them. */
static lm_code divide(const lm_tune_module *m, const double *w, double *const *v, bool all,
                      lm_err *e)
{
    int64_t k = kept_of(m), rest = least_of(m) - k;
    lm_tune_svd s;
    lm_code rc = lm_tune_svd_of(w, m->out, m->in, &s, e);

    for (int64_t i = 0; !rc && i < m->out; i++) {
        for (int64_t c = 0; c < k; c++)
            v[HIGH][i * k + c] = s.left[c * m->out + i];
        for (int64_t c = 0; all && c < rest; c++)
            v[U][i * rest + c] = s.left[(k + c) * m->out + i];
    }
    for (int64_t c = 0; !rc && all && c < rest; c++) {
        v[S][c] = s.value[k + c];
        for (int64_t j = 0; j < m->in; j++)
            v[V][c * m->in + j] = s.right[j * s.n + k + c];
    }
    lm_tune_svd_fini(&s);
    return rc;
}

static lm_code derive(const lm_tune_module *m, double *w, double *const *v, const bool *given,
                      lm_err *e)
{
    return given[HIGH] ? LM_OK : divide(m, w, v, false, e);
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    (void)changed, (void)rng;
    return divide(m, w, v, true, e);
}

/* U, with a gradient that is projected off the columns of `high`: what is subtracted is 0, as U - U
 * is, and has the gradient of the projection. */
static lm_vid project_left(lm_rule *r, lm_vid u, lm_vid high)
{
    lm_vid none = LM_R_MAP(r, "y = u - w", LM_IS("u", u), LM_IS("w", lm_r_stop(r, u)));

    return lm_r_add(r, u, -1,
                    lm_r_matmul(r, high, false, lm_r_matmul(r, high, true, none, false), false));
}

/* V likewise, off the rows of `rows`, which are at right angles. */
static lm_vid project_right(lm_rule *r, lm_vid v, lm_vid rows)
{
    lm_vid none = LM_R_MAP(r, "y = v - w", LM_IS("v", v), LM_IS("w", lm_r_stop(r, v)));
    lm_vid squares = lm_r_shape2(r, lm_r_sum(r, rows, true, false), 1, lm_r_dim(r, rows, 0));
    lm_vid part = LM_R_MAP(r, "y = x / max(q, 1e-30)", LM_IS("q", squares),
                           LM_IS("x", lm_r_matmul(r, none, false, rows, true)));

    return lm_r_add(r, v, -1, lm_r_matmul(r, part, false, rows, false));
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    lm_vid rows = lm_r_matmul(r, p[HIGH], true, w, false);
    lm_vid kept = lm_r_matmul(r, p[HIGH], false, rows, false);
    lm_vid left = LM_R_MAP(r, "y = u * s", LM_IS("u", project_left(r, p[U], p[HIGH])),
                           LM_IS("s", lm_r_shape2(r, p[S], 1, lm_r_dim(r, p[S], 0))));

    (void)m;
    return lm_r_add(r, kept, 1, lm_r_matmul(r, left, false, project_right(r, p[V], rows), false));
}

const lm_tune_method lm_tune_osf = {
    .peft_type = "OSF",
    .name = "osf",
    .about = "the lesser singular directions of the weights",
    .prefix = "osf_",
    .is = LM_TUNE_DIVIDES,
    .hyper = hyper,
    .refused = refused,
    .extra = "{\"effective_rank\": null}",
    .tensors = tensors,
    .weight = weight,
    .start = start,
    .derive = derive,
};
