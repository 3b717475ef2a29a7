/* SPDX-License-Identifier: Apache-2.0 */
/* adamss.c -- low ranks for clusters of outputs: [W', b'] = [W, b] + M V, where V [r,in] (with a
 * bias [r,in+1]) spans what torch.svd_lowrank takes for the largest r right singular vectors, and
 * rows of M [out,r] that belong to cluster k are B_k A_k.
 *
 * The file has V, A and B, but not the clusters. These are made again as PEFT makes them: rows of
 * the left singular vectors of [W, b], by the k-means of scikit-learn (1.3 or newer) from a seed.
 * Neither depends on signs or on the choice of a basis. The numbers of rows that the file has for
 * each cluster show whether they came out the same; where r is all of the outputs, all rows are
 * equally far from each other, and rounding decides: this is refused.
 *
 * A new adapter has for V the r right singular vectors, for A_k those of the cluster's rows of the
 * left ones, and zeros for B_k.  Subspaces are not dropped in training (use_asa), which PEFT does
 * in a callback alone. Source: huggingface/peft tuners/adamss. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "numeric/lapack.h"
#include "tune/methods.h"
#include "tune/torch_rng.h"

static const lm_hyper hyper[] = {
    { "r", 100, 1, 1e6, "dimensions of the subspace", LM_WHOLE },
    { "num_subspaces", 5, 1, 38, "clusters of outputs", LM_WHOLE },
    { "subspace_rank", 1, 1, 1e6, "most rank of a cluster", LM_WHOLE },
    { "random_seed", 0, 0, 4294967295.0, "of the subspace", LM_WHOLE },
    { "use_dynamic_rank", 0, 0, 1, "ranks by svd_threshold", "false true" },
    { "svd_threshold", 0.1, 0, 1, "least value of a rank, beside the largest", NULL },
    { 0 },
};
enum { R, CLUSTERS, RANK, SEED, DYNAMIC, THRESHOLD };
enum { BASIS, LABELS, RANKS, FIRST }; /* FIRST + 2 k: A_k; FIRST + 2 k + 1: B_k */
enum { ITERATIONS = 2, ROUNDS = 10, KMEANS_SEED = 123456789 };

static int64_t width_of(const lm_tune_module *m)
{
    return m->in + m->has_bias;
}

static int64_t rank_of(const lm_tune_module *m)
{
    int64_t least = m->out < width_of(m) ? m->out : width_of(m);

    return (int64_t)m->hyper[R] < least ? (int64_t)m->hyper[R] : least;
}

static int64_t clusters_of(const lm_tune_module *m)
{
    return (int64_t)m->hyper[CLUSTERS] < m->out ? (int64_t)m->hyper[CLUSTERS] : m->out;
}

static int64_t rows_of(const int64_t *label, int64_t n, int64_t k)
{
    int64_t rows = 0;

    for (int64_t i = 0; i < n; i++)
        rows += label[i] == k;
    return rows;
}

/* The clusters and their ranks, which are not in files. */
static void add_derived(lm_tune_tensor *out, int *n, const char *name, int64_t count)
{
    lm_tune_tensor *t = lm_tune_tensor_add(out, n, name, count, 0, LM_TUNE_BASE, 0);

    t->frozen = t->absent = t->ids = true;
}

/* A_k and B_k, of which a file has the shapes; without one they follow from the clusters. */
static lm_code add_cluster(const lm_tune_module *m, int64_t k, lm_tune_tensor *out, int *n,
                           lm_err *e)
{
    bool known = m->ids && m->ids[LABELS] && m->ids[RANKS];
    int64_t rows = known ? rows_of(m->ids[LABELS], m->out, k) : LM_TUNE_ANY;
    int64_t rank = known ? m->ids[RANKS][k] : LM_TUNE_ANY;
    char name[48];

    if (known && rows < 1)
        return lm_fail(e, LM_EUSAGE, m->name, "use a smaller num_subspaces",
                       "cluster %lld has no outputs", (long long)k);
    snprintf(name, sizeof name, "adamss_A.%lld", (long long)k);
    lm_tune_tensor_add(out, n, name, rank, rank_of(m), LM_TUNE_BASE, 0);
    snprintf(name, sizeof name, "adamss_B.%lld", (long long)k);
    lm_tune_tensor_add(out, n, name, rows, rank, LM_TUNE_ZEROS, 0);
    return LM_OK;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = rank_of(m);
    lm_code rc = LM_OK;
    char todo[48];

    *n = 0;
    snprintf(todo, sizeof todo, "use an r of at most %lld", (long long)m->out - 1);
    if (r >= m->out)
        return lm_fail(e, LM_EUSAGE, m->name, r > 1 ? todo : "leave it out of the targets",
                       "adamss of rank %lld for %lld outputs clusters rows that are equally far "
                       "apart, so that rounding decides",
                       (long long)r, (long long)m->out);
    lm_tune_tensor_add(out, n, "adamss_newB", r, width_of(m), LM_TUNE_BASE, 0)->frozen = true;
    add_derived(out, n, "adamss_labels", m->out);
    add_derived(out, n, "adamss_ranks", clusters_of(m));
    for (int64_t k = 0; !rc && k < clusters_of(m); k++)
        rc = add_cluster(m, k, out, n, e);
    return rc;
}

/* ---- The clusters ---- */

/* A basis [out,r] of the space of left singular vectors, as torch.svd_lowrank projects x; on the
 * wide side of x, right [n,r] is one of the right ones (NULL: not asked for). */
static lm_code find_bases(const lm_tune_module *m, const double *x, double *left, double *right,
                          lm_err *e)
{
    int64_t n = width_of(m), r = rank_of(m), room = (m->out > n ? m->out : n) * r;
    bool tall = m->out >= n;
    double *a = NULL, *b = NULL;
    const lm_lapack *la = NULL;
    lm_torch_rng g;
    lm_code rc = lm_lapack_load(&la, e);

    rc = rc ? rc : lm_alloc_n(&a, (size_t)room, sizeof *a, "clusters", e);
    rc = rc ? rc : lm_alloc_n(&b, (size_t)room, sizeof *b, "clusters", e);
    if (!rc) {
        lm_torch_rng_seed(&g, (uint64_t)m->hyper[SEED]);
        lm_torch_normal(&g, (tall ? n : m->out) * r, tall ? b : a);
    }
    /* a [out,r] and b [n,r] in turn; the tall side is multiplied first */
    for (int i = 0; !rc && i < 2 * ITERATIONS + 2 - tall; i++) {
        bool to_left = tall ? i % 2 == 0 : i % 2 == 1;
        double *from = to_left ? b : a, *to = to_left ? a : b;

        la->dgemm(LM_BLAS_ROWS, to_left ? LM_BLAS_PLAIN : LM_BLAS_TRANSPOSED, LM_BLAS_PLAIN,
                  (int)(to_left ? m->out : n), (int)r, (int)(to_left ? n : m->out), 1, x, (int)n,
                  from, (int)r, 0, to, (int)r);
        lm_tune_orthonormalise(to, to_left ? m->out : n, r);
    }
    if (!rc)
        memcpy(left, a, (size_t)(m->out * r) * sizeof *left);
    if (!rc && right)
        memcpy(right, b, (size_t)(n * r) * sizeof *right);
    lm_free(a);
    lm_free(b);
    return rc;
}

/* A number in [0,1) as numpy's RandomState draws it. */
static double draw(lm_torch_rng *g)
{
    uint32_t a = lm_torch_rng_u32(g) >> 5, b = lm_torch_rng_u32(g) >> 6;

    return (a * 67108864.0 + b) / 9007199254740992.0;
}

/* `count` different rows of n, as RandomState.choice(n, count, replace=False, p=1/n): numbers
 * drawn together are looked up in the sums of what is left, and repeated ones are drawn again. */
static lm_code choose_rows(int64_t n, int64_t count, int64_t *out, lm_err *e)
{
    double *sum = NULL, x[64];
    bool *taken = NULL;
    int64_t have = 0;
    lm_torch_rng g;
    lm_code rc = lm_alloc_n(&sum, (size_t)n, sizeof *sum, "clusters", e);

    rc = rc ? rc : lm_alloc_n(&taken, (size_t)n, sizeof *taken, "clusters", e);
    lm_torch_rng_seed(&g, KMEANS_SEED);
    while (!rc && have < count) {
        double all = 0;
        int64_t more = count - have;

        for (int64_t i = 0; i < more; i++)
            x[i] = draw(&g);
        for (int64_t i = 0; i < n; i++)
            sum[i] = all += taken[i] ? 0 : (double)(1 / (float)n);
        for (int64_t i = 0; i < more; i++) {
            int64_t at = 0;

            while (at < n - 1 && sum[at] / all <= x[i])
                at++;
            if (!taken[at])
                out[have++] = at;
            taken[at] = true;
        }
    }
    lm_free(sum);
    lm_free(taken);
    return rc;
}

/* Which of k centres [k,r] is nearest to each row; true: as before. */
static bool assign(const double *x, int64_t n, int64_t r, const double *centre, int64_t k,
                   double *label)
{
    bool same = true;

    for (int64_t i = 0; i < n; i++) {
        double best = INFINITY;
        int64_t at = 0;

        for (int64_t c = 0; c < k; c++) {
            double d = 0;

            for (int64_t j = 0; j < r; j++)
                d += (x[i * r + j] - centre[c * r + j]) * (x[i * r + j] - centre[c * r + j]);
            if (d < best) {
                best = d;
                at = c;
            }
        }
        same = same && label[i] == (double)at;
        label[i] = (double)at;
    }
    return same;
}

/* Means of clusters; the sum of squares by which they move. An empty one stays: then sizes differ
 * from the file's, as no file has a cluster without rows. */
static double move_centres(const double *x, int64_t n, int64_t r, const double *label, int64_t k,
                           double *centre, double *room)
{
    double moved = 0;

    for (int64_t c = 0; c < k; c++) {
        int64_t count = 0;

        memset(room, 0, (size_t)r * sizeof *room);
        for (int64_t i = 0; i < n; i++)
            if (label[i] == (double)c) {
                count++;
                for (int64_t j = 0; j < r; j++)
                    room[j] += x[i * r + j];
            }
        for (int64_t j = 0; count && j < r; j++) {
            double d = room[j] / (double)count - centre[c * r + j];

            centre[c * r + j] += d;
            moved += d * d;
        }
    }
    return moved;
}

/* Columns of x [n,r] about 0; the mean of their variances. */
static double centre_columns(double *x, int64_t n, int64_t r)
{
    double all = 0;

    for (int64_t j = 0; j < r; j++) {
        double mean = 0;

        for (int64_t i = 0; i < n; i++)
            mean += x[i * r + j] / (double)n;
        for (int64_t i = 0; i < n; i++) {
            x[i * r + j] -= mean;
            all += x[i * r + j] * x[i * r + j];
        }
    }
    return all / (double)(n * r);
}

/* Lloyd's iteration from rows that a seed chooses. */
static lm_code cluster(double *x, int64_t n, int64_t r, int64_t k, double *label, lm_err *e)
{
    double *centre = NULL, tolerance = 1e-4 * centre_columns(x, n, r);
    int64_t first[64];
    lm_code rc = lm_alloc_n(&centre, (size_t)((k + 1) * r), sizeof *centre, "clusters", e);

    rc = rc ? rc : choose_rows(n, k, first, e);
    for (int64_t c = 0; !rc && c < k; c++)
        memcpy(centre + c * r, x + first[c] * r, (size_t)r * sizeof *centre);
    for (int64_t i = 0; !rc && i < n; i++)
        label[i] = -1;
    for (int round = 0; !rc && round < ROUNDS; round++) {
        bool same = assign(x, n, r, centre, k, label);
        double moved = move_centres(x, n, r, label, k, centre, centre + k * r);

        if (same)
            break;
        if (moved <= tolerance || round == ROUNDS - 1) {
            assign(x, n, r, centre, k, label);
            break;
        }
    }
    lm_free(centre);
    return rc;
}

/* [W, b] [out,n] */
static lm_code widen(const lm_tune_module *m, const double *w, double **out, lm_err *e)
{
    int64_t n = width_of(m);

    if (m->has_bias && !m->bias)
        return lm_fail(e, LM_EBUG, m->name, NULL, "its bias was not read");
    if (lm_alloc_n(out, (size_t)(m->out * n), sizeof **out, "clusters", e))
        return e->code;
    for (int64_t i = 0; i < m->out; i++) {
        memcpy(*out + i * n, w + i * m->in, (size_t)m->in * sizeof **out);
        if (m->has_bias)
            (*out)[i * n + m->in] = m->bias[i];
    }
    return LM_OK;
}

/* Singular values and vectors of the rows u [out,r] of cluster k. */
static lm_code divide_cluster(const lm_tune_module *m, const double *u, const double *label,
                              int64_t k, lm_tune_svd *s, lm_err *e)
{
    int64_t r = rank_of(m), n = 0;
    double *rows = NULL;
    lm_code rc = lm_alloc_n(&rows, (size_t)(m->out * r), sizeof *rows, "a cluster", e);

    for (int64_t i = 0; !rc && i < m->out; i++)
        if (label[i] == (double)k)
            memcpy(rows + r * n++, u + r * i, (size_t)r * sizeof *rows);
    rc = rc ? rc : lm_tune_svd_of(rows, n, r, s, e);
    lm_free(rows);
    return rc;
}

/* Ranks of the clusters: what PEFT counts are values of the Gram matrix, squares of those of
 * rows. */
static lm_code find_ranks(const lm_tune_module *m, const double *u, const double *label,
                          double *out, lm_err *e)
{
    int64_t most = (int64_t)m->hyper[RANK];
    double least = sqrt(m->hyper[THRESHOLD]);
    lm_code rc = LM_OK;

    for (int64_t k = 0; !rc && k < clusters_of(m); k++) {
        int64_t rows = 0, rank = 1;
        lm_tune_svd s = { 0 };

        for (int64_t i = 0; i < m->out; i++)
            rows += label[i] == (double)k;
        if (m->hyper[DYNAMIC] && rows)
            rc = divide_cluster(m, u, label, k, &s, e);
        while (!rc && rank < rows && rank < most && rank < rank_of(m) &&
               (!m->hyper[DYNAMIC] || s.value[rank] > least * s.value[0]))
            rank++;
        out[k] = (double)rank;
        lm_tune_svd_fini(&s);
    }
    return rc;
}

static lm_code derive(const lm_tune_module *m, double *w, double *const *v, const bool *given,
                      lm_err *e)
{
    double *x = NULL, *u = NULL, *room = NULL;
    size_t n = (size_t)(m->out * rank_of(m));
    lm_code rc = widen(m, w, &x, e);

    (void)given;
    rc = rc ? rc : lm_alloc_n(&u, n, sizeof *u, "clusters", e);
    rc = rc ? rc : lm_alloc_n(&room, n, sizeof *room, "clusters", e);
    rc = rc ? rc : find_bases(m, x, u, NULL, e);
    if (!rc)
        memcpy(room, u, n * sizeof *u);
    rc = rc ? rc : cluster(room, m->out, rank_of(m), clusters_of(m), v[LABELS], e);
    rc = rc ? rc : find_ranks(m, u, v[LABELS], v[RANKS], e);
    lm_free(x);
    lm_free(u);
    lm_free(room);
    return rc;
}

/* ---- A new adapter ---- */

/* x [rows,r] = a [rows,r] b [r,r]; b by columns if `turned`. */
static void rotate(const double *a, const double *b, bool turned, int64_t rows, int64_t r,
                   double *x)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < r; c++) {
            double sum = 0;

            for (int64_t k = 0; k < r; k++)
                sum += a[i * r + k] * b[turned ? c * r + k : k * r + c];
            x[i * r + c] = sum;
        }
}

/* Singular vectors of x in the space that find_bases found: u [out,r], and by rows v [r,n]. */
static lm_code find_vectors(const lm_tune_module *m, const double *x, double *u, double *v,
                            lm_err *e)
{
    int64_t n = width_of(m), r = rank_of(m);
    bool tall = m->out >= n;
    double *left = NULL, *right = NULL, *part = NULL, *turned = NULL;
    lm_tune_svd s = { 0 };
    const lm_lapack *la = NULL;
    lm_code rc = lm_lapack_load(&la, e);

    rc = rc ? rc : lm_alloc_n(&left, (size_t)(m->out * r), sizeof *left, "vectors", e);
    rc = rc ? rc : lm_alloc_n(&right, (size_t)(n * r), sizeof *right, "vectors", e);
    rc = rc ? rc : lm_alloc_n(&turned, (size_t)(n * r), sizeof *turned, "vectors", e);
    rc = rc ? rc : lm_alloc_n(&part, (size_t)((tall ? n : m->out) * r), sizeof *part, "vectors", e);
    rc = rc ? rc : find_bases(m, x, left, right, e);
    if (!rc && tall) /* left' x [r,n] */
        la->dgemm(LM_BLAS_ROWS, LM_BLAS_TRANSPOSED, LM_BLAS_PLAIN, (int)r, (int)n, (int)m->out, 1,
                  left, (int)r, x, (int)n, 0, part, (int)n);
    else if (!rc) /* x right [out,r] */
        la->dgemm(LM_BLAS_ROWS, LM_BLAS_PLAIN, LM_BLAS_PLAIN, (int)m->out, (int)r, (int)n, 1, x,
                  (int)n, right, (int)r, 0, part, (int)r);
    rc = rc ? rc : lm_tune_svd_of(part, tall ? r : m->out, tall ? n : r, &s, e);
    if (!rc && tall) {
        rotate(left, s.left, true, m->out, r, u);
        memcpy(turned, s.right, (size_t)(n * r) * sizeof *turned);
    } else if (!rc) {
        for (int64_t i = 0; i < m->out * r; i++)
            u[i] = s.left[i % r * m->out + i / r];
        rotate(right, s.right, false, n, r, turned);
    }
    for (int64_t i = 0; !rc && i < n * r; i++)
        v[i % r * n + i / r] = turned[i];
    lm_tune_svd_fini(&s);
    lm_free(left);
    lm_free(right);
    lm_free(part);
    lm_free(turned);
    return rc;
}

static lm_code begins(const json_t *config, lm_err *e)
{
    return json_is_true(json_object_get(config, "use_asa"))
               ? lm_fail(e, LM_EUSAGE, "use_asa", "set it to false",
                         "subspaces are not dropped in training here")
               : LM_OK;
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t r = rank_of(m);
    double *x = NULL, *u = NULL;
    lm_code rc = widen(m, w, &x, e);

    (void)changed, (void)rng;
    for (int64_t i = 0; !rc && i < m->out; i++)
        v[LABELS][i] = (double)m->ids[LABELS][i];
    rc = rc ? rc : lm_alloc_n(&u, (size_t)(m->out * r), sizeof *u, "vectors", e);
    rc = rc ? rc : find_vectors(m, x, u, v[BASIS], e);
    for (int64_t k = 0; !rc && k < clusters_of(m); k++) {
        lm_tune_svd s = { 0 };

        rc = divide_cluster(m, u, v[LABELS], k, &s, e);
        for (int64_t i = 0; !rc && i < m->ids[RANKS][k] * r; i++)
            v[FIRST + 2 * k][i] = s.right[i % r * s.n + i / r];
        lm_tune_svd_fini(&s);
    }
    lm_free(x);
    lm_free(u);
    return rc;
}

/* ---- The rule ---- */

/* B_k A_k [rows,r] in the rows of its cluster: [out,r]. */
static lm_vid place_cluster(lm_rule *r, const lm_tune_module *m, int64_t k, lm_vid part)
{
    int64_t rows = lm_r_dim(r, part, 0), rank = lm_r_dim(r, part, 1), n = 0, *at = NULL;
    const int64_t *label = m->ids[LABELS];

    n = rows_of(label, m->out, k);
    if (lm_r_ok(r) && n != rows)
        lm_fail(r->e, LM_EUSAGE, m->name,
                "use the base on which it was trained, or merge it with PEFT",
                "cluster %lld has %lld outputs, and %lld in the adapter's file", (long long)k,
                (long long)n, (long long)rows);
    if (!lm_r_ok(r) || lm_alloc_n(&at, (size_t)(rows * rank), sizeof *at, "places", r->e))
        return LM_NONE;
    n = 0;
    for (int64_t i = 0; i < m->out; i++)
        for (int64_t j = 0; label[i] == k && j < rank; j++)
            at[n++] = i * rank + j;
    part = lm_r_scatter(r, part, at, LM_DIMS(m->out, rank));
    lm_free(at);
    return part;
}

/* M V [out,in+1] */
static lm_vid change(lm_rule *r, const lm_tune_module *m, const lm_vid *p)
{
    lm_vid all = LM_NONE;

    for (int64_t k = 0; k < clusters_of(m); k++) {
        lm_vid part = lm_r_matmul(r, p[FIRST + 2 * k + 1], false, p[FIRST + 2 * k], false);

        part = place_cluster(r, m, k, part);
        all = k ? lm_r_add(r, all, 1, part) : part;
    }
    return lm_r_matmul(r, all, false, p[BASIS], false);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    return lm_r_add(r, w, 1, lm_r_part(r, change(r, m, p), 0, m->out, 0, m->in));
}

static lm_vid bias(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p)
{
    (void)w;
    if (b < 0)
        return b;
    return lm_r_add(r, b, 1, lm_r_turn(r, lm_r_part(r, change(r, m, p), 0, m->out, m->in, 1)));
}

const lm_tune_method lm_tune_adamss = {
    .peft_type = "ADAMSS",
    .name = "adamss",
    .about = "low ranks for clusters of outputs",
    .prefix = "adamss_",
    .is = LM_TUNE_MIXES | LM_TUNE_DIVIDES,
    .hyper = hyper,
    .extra = "{\"init_weights\": \"orthogonal\", \"use_asa\": false}",
    .begins = begins,
    .tensors = tensors,
    .weight = weight,
    .bias = bias,
    .start = start,
    .derive = derive,
};
