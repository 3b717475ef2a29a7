/* SPDX-License-Identifier: Apache-2.0 */
/* Gaussian attention, as its operators make it, against P_ij = exp(-|q_i - k_j|^2 / (2 sqrt D)) by the words of the
 * definition, in double and from differences of numbers: forward, backward, and through caches cut at every position. */
#include "attention_case.h"
#include "kernels/gaussian.h"

typedef struct {
    int64_t batch, seq, heads, kv, dim, window;
    bool causal, divided;
    lo_kind kind;
    double spread; /* of queries and keys */
} gauss;

static int64_t short_row(const gauss *s)
{
    return (s->heads + 2 * s->kv) * s->dim;
}

static lm_gaussian_attr rows_attr(const gauss *s)
{
    return (lm_gaussian_attr){ s->heads, s->kv, s->dim, !s->divided };
}

static lm_attention_attr scores_attr(const gauss *s)
{
    lm_attention_attr a = attr_of(s->batch, s->seq, s->heads, s->kv, s->dim);
    a.head_dim = s->dim + LM_GAUSSIAN_MORE;
    a.value_dim = s->dim;
    a.window = s->window;
    a.causal = s->causal;
    a.undivided = !s->divided;
    return a;
}

static lm_tensor matrix(lm_dtype d, int64_t rows, int64_t cols)
{
    lm_tensor t = { .dtype = d, .ndim = 2, .dim = { rows, cols } };
    t.data = take((size_t)(rows * cols) * lm_dtype_size(d));
    return t;
}

/* Numbers that all types hold: BF16's. */
static lm_tensor drawn(lm_dtype d, int64_t rows, int64_t cols, double by, int which)
{
    operand o = { .kind = ACT };
    lm_tensor t = matrix(d, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++) {
        uint16_t cell;
        lm_set(LM_DTYPE_BF16, &cell, 0, by * value_at(&o, which, i));
        lm_set(d, t.data, i, lm_get(LM_DTYPE_BF16, &cell, 0));
    }
    return t;
}

static lm_tensor drawn_qkv(const gauss *s, lm_dtype d)
{
    lm_tensor t = drawn(d, s->batch * s->seq, short_row(s), s->spread, 1);
    lm_tensor v = drawn(d, s->batch * s->seq, short_row(s), 1, 2);
    const size_t size = lm_dtype_size(d);
    const int64_t values = (s->heads + s->kv) * s->dim;
    for (int64_t i = 0; i < t.dim[0]; i++)
        memcpy((char *)t.data + (size_t)(i * t.dim[1] + values) * size,
               (char *)v.data + (size_t)(i * t.dim[1] + values) * size,
               (size_t)(s->kv * s->dim) * size);
    lm_free(v.data);
    return t;
}

/* ---- the definition ---- */

typedef struct {
    double *o, *dqkv; /* [B*T,H*D], [B*T,(H+2K)D] */
} exact;

static double at(const lm_tensor *t, int64_t i)
{
    return lm_get(t->dtype, t->data, i);
}

static bool sees(const gauss *s, const int32_t *lo, const int32_t *hi, int64_t b, int64_t i,
                 int64_t j)
{
    const int64_t n = b * s->seq + i;
    const bool near = i - j < s->window && (s->causal || j - i < s->window);
    return (!s->causal || j <= i) && (!lo || j >= lo[n]) && (!hi || j < hi[n]) &&
           (s->window == 0 || near);
}

static void define_row(const gauss *s, const lm_tensor *qkv, const lm_tensor *dout,
                       const int32_t *lo, const int32_t *hi, int64_t b, int64_t h, int64_t i,
                       double *p, exact *x)
{
    const int64_t D = s->dim, W = short_row(s), T = s->seq, kv = h / (s->heads / s->kv);
    const int64_t q = (b * T + i) * W + h * D, out = ((b * T + i) * s->heads + h) * D;
    const double root = sqrt((double)D);
    double sum = 0, sum_dp = 0, *dp = p + T;
    for (int64_t j = 0; j < T; j++) {
        const int64_t k = (b * T + j) * W + (s->heads + kv) * D, v = k + s->kv * D;
        double far = 0;
        p[j] = dp[j] = 0;
        if (!sees(s, lo, hi, b, i, j))
            continue;
        for (int64_t d = 0; d < D; d++) {
            const double away = at(qkv, q + d) - at(qkv, k + d);
            far += away * away;
            dp[j] += at(dout, out + d) * at(qkv, v + d);
        }
        sum += p[j] = exp(-far / (2 * root));
    }
    for (int64_t j = 0; s->divided && sum > 0 && j < T; j++)
        p[j] /= sum;
    for (int64_t j = 0; s->divided && j < T; j++)
        sum_dp += p[j] * dp[j];
    for (int64_t j = 0; j < T; j++) {
        const int64_t k = (b * T + j) * W + (s->heads + kv) * D, v = k + s->kv * D;
        const double ds = p[j] * (dp[j] - sum_dp);
        for (int64_t d = 0; d < D; d++) {
            const double away = at(qkv, q + d) - at(qkv, k + d);
            x->o[out + d] += p[j] * at(qkv, v + d);
            x->dqkv[q + d] -= ds * away / root;
            x->dqkv[k + d] += ds * away / root;
            x->dqkv[v + d] += p[j] * at(dout, out + d);
        }
    }
}

static exact define(const gauss *s, const lm_tensor *qkv, const lm_tensor *dout, const int32_t *lo,
                    const int32_t *hi)
{
    const size_t n = (size_t)(s->batch * s->seq), wide = (size_t)short_row(s);
    exact x = { take(n * (size_t)(s->heads * s->dim) * sizeof(double)),
                take(n * wide * sizeof(double)) };
    double *p = take(2 * (size_t)s->seq * sizeof *p);
    memset(x.o, 0, n * (size_t)(s->heads * s->dim) * sizeof *x.o);
    memset(x.dqkv, 0, n * wide * sizeof *x.dqkv);
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t i = 0; i < s->seq; i++)
                define_row(s, qkv, dout, lo, hi, b, h, i, p, &x);
    lm_free(p);
    return x;
}

/* ---- the operators ---- */

static void run_op(const char *op, int level, lm_dtype act, const void *attr, const lm_tensor *in,
                   int n_in, lm_tensor *out, int n_out)
{
    static const lm_step step = { .seed = 3 };
    static lm_par *par;
    const lm_kernel *k = lm_cpu_kernel(op, act, (lm_cpu_level)level);
    lm_call c = { .attr = attr, .in = in, .n_in = n_in, .out = out, .n_out = n_out, .step = &step };
    lm_err e = { 0 };
    assert_non_null(k);
    if (!par)
        assert_int_equal(lm_par_new(&par, 2, &e), 0);
    const size_t bytes = k->work ? k->work(&c, 2) : 0;
    c.par = par;
    c.work = take(bytes);
    memset(c.work, 0xff, bytes);
    k->run(&c);
    lm_free(c.work);
}

static double far_from(const lm_tensor *got, const double *want)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < lm_tensor_count(got); i++) {
        const double x = at(got, i) - want[i];
        diff += x * x;
        norm += want[i] * want[i];
    }
    return sqrt(diff / norm);
}

static lm_tensor longer(const gauss *s, int level, const lm_tensor *qkv)
{
    const lm_gaussian_attr a = rows_attr(s);
    lm_tensor y = matrix(qkv->dtype, qkv->dim[0], lm_gaussian_row(&a));
    run_op("gaussian_rows", level, qkv->dtype, &a, qkv, 1, &y, 1);
    return y;
}

/* o, and in *lse what goes with it. */
static lm_tensor attend(const gauss *s, int level, const lm_tensor *y, const int32_t *lo,
                        const int32_t *hi, lm_tensor *lse)
{
    const lm_attention_attr a = scores_attr(s);
    const int64_t n = s->batch * s->seq;
    lm_tensor in[3] = { *y }, out[2] = { matrix(y->dtype, n, s->heads * s->dim) };
    const lm_tensor rows = { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { n } };
    for (int i = 0; i < 2; i++) {
        const int32_t *list = i ? hi : lo;
        in[1 + i] = list ? rows : (lm_tensor){ 0 };
        in[1 + i].data = (void *)(uintptr_t)list;
    }
    out[1] =
        matrix(y->dtype == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_F32, s->batch * s->heads, s->seq);
    run_op("attention", level, y->dtype, &a, in, 3, out, 2);
    *lse = out[1];
    return out[0];
}

static void check_at(const gauss *s, lm_dtype act, int level)
{
    const double most[2] = { act == LM_DTYPE_F64   ? 1e-12
                             : act == LM_DTYPE_F32 ? 4e-6
                                                   : 1.2e-2,
                             act == LM_DTYPE_F64   ? 1e-12
                             : act == LM_DTYPE_F32 ? 8e-6
                                                   : 2e-2 };
    const int64_t n = s->batch * s->seq;
    int32_t *lo = NULL, *hi = NULL;
    if (s->kind != WHOLE) {
        lo = take((size_t)n * sizeof *lo);
        memcpy(lo, starts(s->kind, s->batch, s->seq), (size_t)n * sizeof *lo);
    }
    if (s->kind != WHOLE && !s->causal) {
        hi = take((size_t)n * sizeof *hi);
        memcpy(hi, ends(s->kind, s->batch, s->seq), (size_t)n * sizeof *hi);
    }
    lm_tensor qkv = drawn_qkv(s, act), dout = drawn(act, n, s->heads * s->dim, 1, 5), lse;
    exact want = define(s, &qkv, &dout, lo, hi);
    lm_tensor y = longer(s, level, &qkv), o = attend(s, level, &y, lo, hi, &lse);
    lm_tensor dy = matrix(act, n, y.dim[1]), dqkv = matrix(act, n, short_row(s));
    const lm_attention_attr a = scores_attr(s);
    const lm_gaussian_attr g = rows_attr(s);
    lm_tensor in[6] = { dout, y, o, lse };
    const lm_tensor rows = { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { n } };
    in[4] = lo ? rows : (lm_tensor){ 0 };
    in[5] = hi ? rows : (lm_tensor){ 0 };
    in[4].data = lo;
    in[5].data = hi;
    run_op("attention_dx", level, act, &a, in, 6, &dy, 1);
    run_op("gaussian_rows_dx", level, act, &g, (lm_tensor[]){ dy, y }, 2, &dqkv, 1);
    const double far[2] = { far_from(&o, want.o), far_from(&dqkv, want.dqkv) };
    for (int i = 0; i < 2; i++)
        if (!(far[i] <= most[i]))
            fail_msg("%s %s %s, T %d H %d K %d D %d window %d kind %d: relative error %.2g",
                     i ? "gradient" : "output", lm_dtype_name(act),
                     lm_cpu_level_name((lm_cpu_level)level), (int)s->seq, (int)s->heads, (int)s->kv,
                     (int)s->dim, (int)s->window, s->kind, far[i]);
    void *all[] = { qkv.data,  dout.data, y.data, o.data, lse.data, dy.data,
                    dqkv.data, lo,        hi,     want.o, want.dqkv };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        lm_free(all[i]);
}

static void against_definition(void **state)
{
    (void)state;
    static const gauss cases[] = {
        { .batch = 1, .seq = 70, .heads = 2, .kv = 1, .dim = 64, .causal = true, .spread = 1 },
        { .batch = 2, .seq = 33, .heads = 6, .kv = 2, .dim = 16, .causal = true, .spread = 0.6 },
        { .batch = 1, .seq = 90, .heads = 2, .kv = 2, .dim = 32, .spread = 1 },
        { .batch = 2,
          .seq = 80,
          .heads = 3,
          .kv = 1,
          .dim = 24,
          .window = 13,
          .causal = true,
          .spread = 1 },
        { .batch = 2,
          .seq = 75,
          .heads = 4,
          .kv = 2,
          .dim = 64,
          .causal = true,
          .kind = DOCUMENTS,
          .spread = 0.5 },
        { .batch = 1,
          .seq = 75,
          .heads = 2,
          .kv = 1,
          .dim = 40,
          .window = 20,
          .kind = DOCUMENTS,
          .spread = 1 },
        { .batch = 1,
          .seq = 65,
          .heads = 2,
          .kv = 2,
          .dim = 128,
          .causal = true,
          .kind = BLIND,
          .spread = 0.7 },
        { .batch = 1, .seq = 5, .heads = 1, .kv = 1, .dim = 1, .causal = true, .spread = 1 },
    };
    static const lm_dtype types[] = { LM_DTYPE_F64, LM_DTYPE_F32, LM_DTYPE_BF16 };
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        gauss s = cases[i / 2];
        s.divided = i % 2;
        for (int t = 0; t < 3; t++)
            for (int level = LM_CPU_REF; level <= (int)lm_cpu_detect(); level++)
                check_at(&s, types[t], types[t] == LM_DTYPE_F64 ? (int)LM_CPU_REF : level);
    }
}

/* Queries far from all keys: weights below F32's exponentials give zeros, with finite gradients; of divided rows those of
 * the nearest key remain. */
static void far_queries(void **state)
{
    (void)state;
    for (int level = LM_CPU_REF; level <= (int)lm_cpu_detect(); level++) {
        gauss s = {
            .batch = 1, .seq = 40, .heads = 1, .kv = 1, .dim = 16, .causal = true, .spread = 60
        };
        for (int divided = 0; divided < 2; divided++) {
            s.divided = divided;
            lm_tensor qkv = drawn_qkv(&s, LM_DTYPE_F32), lse;
            lm_tensor y = longer(&s, level, &qkv), o = attend(&s, level, &y, NULL, NULL, &lse);
            double sum = 0;
            for (int64_t i = 0; i < lm_tensor_count(&o); i++) {
                assert_true(isfinite(at(&o, i)));
                sum += fabs(at(&o, i));
            }
            assert_int_equal(sum > 0, divided);
            for (int64_t i = 0; !divided && i < lm_tensor_count(&lse); i++)
                assert_true(at(&lse, i) == 0);
            lm_free(qkv.data);
            lm_free(y.data);
            lm_free(o.data);
            lm_free(lse.data);
        }
    }
}

/* ---- caches ---- */

enum { PAGE = 16 };

/* Rows [from, from + n) of the sequence through the caches. */
static void cached_step(const gauss *s, int level, const lm_tensor *qkv, int64_t from, int64_t n,
                        lm_tensor caches[2], lm_tensor *table, lm_tensor *o)
{
    int32_t used = (int32_t)from, fresh = (int32_t)n;
    const size_t size = lm_dtype_size(qkv->dtype);
    lm_tensor part = *qkv, number = { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 } };
    part.dim[0] = n;
    part.data = (char *)qkv->data + (size_t)(from * qkv->dim[1]) * size;
    lm_tensor y = longer(s, level, &part);
    lm_attention_attr a = scores_attr(s);
    a.seq = n;
    lm_tensor in[6] = { y, number, number };
    in[1].data = &used;
    in[2].data = &fresh;
    in[5] = *table;
    lm_tensor out[4] = { *o, caches[0], caches[1], { 0 } };
    out[0].dim[0] = n;
    out[0].data = (char *)o->data + (size_t)(from * o->dim[1]) * size;
    run_op("attention_cached", level, qkv->dtype, &a, in, 6, out, 4);
    lm_free(y.data);
}

static void check_cached(const gauss *s, lm_dtype act, int level, bool paged)
{
    const int64_t T = s->seq, width = (T + PAGE - 1) / PAGE;
    int32_t order[8];
    lm_tensor qkv = drawn_qkv(s, act), dout = drawn(act, T, s->heads * s->dim, 1, 5);
    lm_tensor caches[2], table = { 0 }, o = matrix(act, T, s->heads * s->dim);
    exact want = define(s, &qkv, &dout, NULL, NULL);
    for (int i = 0; i < 2; i++) {
        caches[i] = (lm_tensor){ .dtype = act, .ndim = 4, .dim = { 1, s->kv, T, s->dim } };
        if (!i)
            caches[i].dim[3] += LM_GAUSSIAN_MORE;
        if (paged) {
            caches[i].dim[0] = width + 1;
            caches[i].dim[2] = PAGE;
        }
        caches[i].data = take((size_t)lm_tensor_count(&caches[i]) * lm_dtype_size(act));
    }
    if (paged) {
        table = (lm_tensor){ .dtype = LM_DTYPE_I32, .ndim = 2, .dim = { 1, width } };
        table.data = order;
        for (int64_t i = 0; i < width; i++)
            order[i] = (int32_t)(width - i);
    }
    for (int64_t split = 1; split <= T; split++) {
        cached_step(s, level, &qkv, 0, split, caches, &table, &o);
        for (int64_t i = split; i < T; i++)
            cached_step(s, level, &qkv, i, 1, caches, &table, &o);
        const double far = far_from(&o, want.o);
        if (!(far <= (act == LM_DTYPE_F32 ? 4e-6 : 1.2e-2)))
            fail_msg("%s %s, cut at %d of %d%s: relative error %.2g", lm_dtype_name(act),
                     lm_cpu_level_name((lm_cpu_level)level), (int)split, (int)T,
                     paged ? ", pages" : "", far);
    }
    void *all[] = {
        qkv.data, dout.data, caches[0].data, caches[1].data, o.data, want.o, want.dqkv
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        lm_free(all[i]);
}

static void through_caches(void **state)
{
    (void)state;
    static const gauss cases[] = {
        { .batch = 1, .seq = 37, .heads = 4, .kv = 2, .dim = 32, .causal = true, .spread = 0.8 },
        { .batch = 1,
          .seq = 37,
          .heads = 2,
          .kv = 1,
          .dim = 12,
          .causal = true,
          .window = 9,
          .spread = 0.8 },
    };
    for (int i = 0; i < 16; i++) {
        gauss s = cases[i / 8];
        s.divided = i % 2;
        for (int level = LM_CPU_REF; level <= (int)lm_cpu_detect(); level++)
            check_cached(&s, i / 2 % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, level, i / 4 % 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_definition),
        cmocka_unit_test(far_queries),
        cmocka_unit_test(through_caches),
    };
    return cmocka_run_group_tests_name("kernels_gaussian", tests, NULL, NULL);
}
