/* SPDX-License-Identifier: Apache-2.0 */
/* factor_ref.c -- orthonormal bases by LAPACK.  Matrices go to it column by column, in double.
 *
 * A call of LAPACK runs on one thread.  Products and reflections are calls for chunks of rows or columns
 * of a fixed size, side by side, so the bits do not depend on the number of threads. */
#include "kernels/factor.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/lapack.h"

/* ---- scratch ---- */

/* Reflections of a panel, which are applied together; columns and rows of a chunk. */
enum { QR_PANEL = 32, CHUNK = 128 };

static size_t doubles(int64_t n)
{
    return (size_t)n * sizeof(double);
}

/* Numbers that orthonormal columns take beside the matrix and the result. */
static int64_t qr_room(int64_t k, int threads)
{
    return k + k * QR_PANEL + QR_PANEL * QR_PANEL + (int64_t)threads * CHUNK * QR_PANEL;
}

static size_t qr_work(const lm_call *c, int threads)
{
    int64_t n = c->in[0].dim[0], k = c->in[0].dim[1];
    return n > INT32_MAX / QR_PANEL ? SIZE_MAX : doubles(2 * n * k + qr_room(k, threads));
}

/* Numbers that the eigenvectors of [n, n] take beside the matrix; as many integers at most. */
static int64_t eigen_room(int64_t n)
{
    return 1 + 6 * n + 2 * n * n;
}

static size_t eigen_work(int64_t n, int64_t before)
{
    if (n > 16384) /* 2 n n is an int */
        return SIZE_MAX;
    return doubles(before + n * n + n + eigen_room(n)) + (size_t)(3 + 5 * n) * sizeof(int);
}

static size_t eigh_work(const lm_call *c, int threads)
{
    (void)threads;
    return eigen_work(c->in[0].dim[0], 0);
}

static size_t next_work(const lm_call *c, int threads)
{
    int64_t n = c->in[0].dim[0];
    return n > INT32_MAX / QR_PANEL ? SIZE_MAX : doubles(4 * n * n + n + qr_room(n, threads));
}

static size_t svd_work(const lm_call *c, int threads)
{
    const lm_svd_attr *a = c->attr;
    (void)threads;
    return eigen_work(c->in[0].dim[a->right], lm_tensor_count(&c->in[0]));
}

/* ---- common ---- */

static bool all_finite(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] - x[i];
    return sum == 0;
}

static void fill(lm_tensor *t, double v)
{
    for (int64_t i = 0; i < lm_tensor_count(t); i++)
        set(t, i, v);
}

static void fill_nan(lm_tensor *t)
{
    fill(t, NAN);
}

/* Eigenvectors of the symmetric matrix at `work`, column by column, rising; NULL when there are none. */
static const double *eigenvectors(double *work, int64_t n)
{
    const lm_lapack *la;
    double *w = work + n * n, *room = w + n;
    lm_err e = { 0 };
    if (!all_finite(work, n * n) || lm_lapack_load(&la, &e))
        return NULL;
    int info = la->dsyevd(LM_LAPACK_COLUMNS, 'V', 'L', (int)n, work, (int)n, w, room,
                          (int)eigen_room(n), (int *)(room + eigen_room(n)), (int)(3 + 5 * n));
    return info ? NULL : work;
}

/* Vector k becomes t[at + i * pitch], with its largest number positive. */
static void put_vector(lm_tensor *t, int64_t at, int64_t pitch, const double *v, int64_t n)
{
    int64_t top = 0;
    for (int64_t i = 1; i < n; i++)
        top = fabs(v[i]) > fabs(v[top]) ? i : top;
    for (int64_t i = 0; i < n; i++)
        set(t, at + i * pitch, v[top] < 0 ? -v[i] : v[i]);
}

/* ---- kernels ---- */

/* Reflections that make the columns of a [n, k] triangular, by panels, and a panel's application to columns from
 * `first` on of `to` [n, k]. */
typedef struct {
    const lm_lapack *la;
    int64_t n, k;
    double *a, *tau, *triangle, *panel, *work; /* triangle: of all panels; work: of each thread */
    double *to;
    int64_t first, at, width; /* the panel's columns */
    char as;
} reflections;

static void reflect_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const reflections *r = ctx;
    r->la->dlarfb(LM_LAPACK_COLUMNS, 'L', r->as, 'F', 'C', (int)(r->n - r->at), (int)(end - begin),
                  (int)r->width, r->a + r->at * r->n + r->at, (int)r->n,
                  r->triangle + r->at * QR_PANEL, QR_PANEL,
                  r->to + (r->first + begin) * r->n + r->at, (int)r->n,
                  r->work + (int64_t)worker * CHUNK * QR_PANEL, CHUNK);
}

static void set_panel(reflections *r, int64_t at)
{
    r->at = at;
    r->width = r->k - at < QR_PANEL ? r->k - at : QR_PANEL;
}

static bool make_reflections(reflections *r, lm_par *par)
{
    r->to = r->a;
    r->as = 'T';
    for (int64_t at = 0; at < r->k; at += QR_PANEL) {
        double *corner = r->a + at * r->n + at;
        set_panel(r, at);
        if (r->la->dgeqrf(LM_LAPACK_COLUMNS, (int)(r->n - at), (int)r->width, corner, (int)r->n,
                          r->tau + at, r->panel, QR_PANEL * QR_PANEL))
            return false;
        r->la->dlarft(LM_LAPACK_COLUMNS, 'F', 'C', (int)(r->n - at), (int)r->width, corner,
                      (int)r->n, r->tau + at, r->triangle + at * QR_PANEL, QR_PANEL);
        r->first = at + r->width;
        lm_par_for(par, r->k - r->first, CHUNK, reflect_chunk, r);
    }
    return true;
}

/* Columns of the identity through all reflections, the last ones first. */
static void apply_reflections(reflections *r, lm_par *par, double *q)
{
    r->to = q;
    r->as = 'N';
    for (int64_t i = 0; i < r->n * r->k; i++)
        q[i] = i / r->n == i % r->n;
    for (int64_t at = (r->k - 1) / QR_PANEL * QR_PANEL; at >= 0; at -= QR_PANEL) {
        set_panel(r, at);
        r->first = at;
        lm_par_for(par, r->k - at, CHUNK, reflect_chunk, r);
    }
}

/* q: an orthonormal basis of the columns of a [n, k], one column after another.  False: a number is not finite,
 * or LAPACK failed.  room: qr_room numbers. */
static bool orthonormalise(lm_par *par, double *a, int64_t n, int64_t k, double *q, double *room)
{
    reflections r = { .n = n, .k = k, .a = a, .tau = room };
    lm_err e = { 0 };
    r.triangle = r.tau + k;
    r.panel = r.triangle + k * QR_PANEL;
    r.work = r.panel + QR_PANEL * QR_PANEL;
    if (!all_finite(a, n * k) || lm_lapack_load(&r.la, &e) || !make_reflections(&r, par))
        return false;
    apply_reflections(&r, par, q);
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; a[j * n + j] < 0 && i < n; i++) /* of r's diagonal */
            q[j * n + i] = -q[j * n + i];
    return true;
}

static void qr(const lm_call *c)
{
    const lm_tensor *x = &c->in[0];
    int64_t n = x->dim[0], k = x->dim[1];
    double *a = c->work, *q = a + n * k;
    for (int64_t i = 0; i < n * k; i++)
        a[i % k * n + i / k] = get(x, i);
    if (!orthonormalise(c->par, a, n, k, q, q + n * k)) {
        fill_nan(&c->out[0]);
        return;
    }
    for (int64_t i = 0; i < n * k; i++)
        set(&c->out[0], i, q[i % k * n + i / k]);
}

/* order[j]: the column that comes j-th when their numbers fall; equal ones stay in order. */
static void sort_columns(const double *value, int64_t n, double *order)
{
    for (int64_t k = 0; k < n; k++) {
        int64_t j = k;
        for (; j > 0 && value[(int64_t)order[j - 1]] < value[k]; j--)
            order[j] = order[j - 1];
        order[j] = (double)k;
    }
}

/* The product of a and b, as they lie or transposed; its chunks are rows. */
typedef struct {
    const lm_lapack *la;
    int a_as, b_as, cols, inner;
    const double *a, *b;
    int64_t lda, ldb;
    double *out;
} product;

static void multiply_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const product *p = ctx;
    (void)worker;
    p->la->dgemm(LM_BLAS_ROWS, p->a_as, p->b_as, (int)(end - begin), p->cols, p->inner, 1,
                 p->a + begin * (p->a_as == LM_BLAS_PLAIN ? p->lda : 1), (int)p->lda, p->b,
                 (int)p->ldb, 0, p->out + begin * p->cols, p->cols);
}

static void eigh_next(const lm_call *c)
{
    int64_t n = c->in[0].dim[0];
    double *x = c->work, *q = x + n * n, *xq = q + n * n, *sorted = xq + n * n;
    double *value = sorted + n * n, *order = value, *room = value + n;
    const lm_lapack *la = NULL;
    lm_err e = { 0 };
    bool ok = !lm_lapack_load(&la, &e);
    for (int64_t i = 0; i < n * n; i++) {
        x[i] = get(&c->in[0], i);
        q[i] = get(&c->in[1], i);
    }
    product p = { la, LM_BLAS_PLAIN, LM_BLAS_PLAIN, (int)n, (int)n, x, q, n, n, xq };
    if (ok)
        lm_par_for(c->par, n, CHUNK, multiply_chunk, &p);
    for (int64_t j = 0; j < n; j++) {
        room[j] = 0;
        for (int64_t i = 0; i < n; i++)
            room[j] += q[i * n + j] * xq[i * n + j];
    }
    sort_columns(room, n, order);
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < n; i++)
            sorted[j * n + i] = xq[i * n + (int64_t)order[j]];
    for (int64_t i = 0; i < n * n; i++)
        set(&c->out[1], i, (int64_t)order[i % n] == i / n);
    if (!ok || !orthonormalise(c->par, sorted, n, n, x, room)) {
        fill_nan(&c->out[0]);
        return;
    }
    for (int64_t i = 0; i < n * n; i++)
        set(&c->out[0], i, x[i % n * n + i / n]);
}

static void eigh(const lm_call *c)
{
    const lm_tensor *x = &c->in[0];
    int64_t n = x->dim[0];
    double *a = c->work;
    for (int64_t i = 0; i < n * n; i++)
        a[i] = get(x, i / n >= i % n ? i : i % n * n + i / n);
    const double *v = eigenvectors(a, n);
    if (!v)
        fill_nan(&c->out[0]);
    for (int64_t k = 0; v && k < n; k++)
        put_vector(&c->out[0], k, n, v + (n - 1 - k) * n, n);
}

static void svd(const lm_call *c)
{
    const lm_svd_attr *attr = c->attr;
    const lm_tensor *x = &c->in[0];
    int64_t rows = x->dim[0], cols = x->dim[1], n = attr->right ? cols : rows;
    double *a = c->work, *gram = a + rows * cols;
    bool due = !opt_in(c, 1) || get(&c->in[1], 0) != 0;
    const lm_lapack *la;
    const double *v = NULL;
    lm_err e = { 0 };
    for (int64_t i = 0; due && i < rows * cols; i++)
        a[i] = get(x, i);
    if (due && all_finite(a, rows * cols) && !lm_lapack_load(&la, &e)) {
        product p = { la,
                      attr->right ? LM_BLAS_TRANSPOSED : LM_BLAS_PLAIN,
                      attr->right ? LM_BLAS_PLAIN : LM_BLAS_TRANSPOSED,
                      (int)n,
                      (int)(attr->right ? rows : cols),
                      a,
                      a,
                      cols,
                      cols,
                      gram };
        lm_par_for(c->par, n, CHUNK, multiply_chunk, &p);
        v = eigenvectors(gram, n);
    }
    for (int i = 0; !v && i < c->n_out; i++)
        if (opt_out(c, i))
            fill(&c->out[i], due ? NAN : 0);
    if (v && opt_out(c, 1))
        put_vector(&c->out[1], 0, 1, v + (n - 1) * n, n);
    for (int64_t k = 0; v && k < attr->rank; k++)
        put_vector(&c->out[0], attr->right ? k * n : k, attr->right ? 1 : attr->rank,
                   v + (n - 1 - k) * n, n);
}

const lm_kernel lm_factor_ref_kernels[] = {
    { "qr", LM_DTYPE_NONE, LM_CPU_REF, qr, qr_work },
    { "eigh", LM_DTYPE_NONE, LM_CPU_REF, eigh, eigh_work },
    { "eigh_next", LM_DTYPE_NONE, LM_CPU_REF, eigh_next, next_work },
    { "svd", LM_DTYPE_NONE, LM_CPU_REF, svd, svd_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
