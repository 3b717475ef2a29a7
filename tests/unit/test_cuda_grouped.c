/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped linear layers on the CUDA backend, plain and by tensor cores, against the reference in double. */
#include "gemm_case.h"
#include "kernels/grouped.h"

enum { G = 7, NO_ROW = -1 };
enum { Y, DX, DW, PRODUCTS };

typedef struct {
    int64_t n, m, k;
    int32_t cuts[G + 1];
    lm_dtype act;
    lm_acc acc;
    int shift;       /* misalignment of all operands in elements */
    int64_t nan_row; /* a row of NaN, or NO_ROW */
} trial;

/* A product of a trial, both of which must stay where they are. */
typedef struct {
    const trial *t;
    int which;
    lm_grouped_attr attr;
    kernel_case k;
} product_case;

static void make_case(const trial *t, int which, product_case *p)
{
    static const char *const ops[] = { "grouped_linear", "grouped_linear_dx", "grouped_linear_dw" };
    operand x = mat(ACT, t->n, t->k), y = mat(ACT, t->n, t->m), w = mat(ACT, G * t->m, t->k);
    *p = (product_case){ .t = t, .which = which, .attr = { G, t->m, t->acc } };
    p->k = (kernel_case){ .op = ops[which],
                          .attr = &p->attr,
                          .in = { which == Y ? x : y, which == DW ? x : w,
                                  given(vec(I32, G + 1), t->cuts) },
                          .out = { which == Y    ? y
                                   : which == DX ? x
                                                 : mat(F32, G * t->m, t->k) } };
}

/* NaN in rows of no group, which the contract excludes, and in one row. */
static void spoil(const product_case *p, instance *x)
{
    const trial *t = p->t;
    for (int i = 0; i < (p->which == DW ? 2 : 1); i++) {
        lm_tensor *to = &x->in[i];
        for (int64_t at = 0; at < lm_tensor_count(to); at++) {
            int64_t row = at / to->dim[1];
            if (row >= t->cuts[G] || row == t->nan_row)
                lm_set(to->dtype, to->data, at, NAN);
        }
    }
}

static void build_spoilt(const product_case *p, lm_dtype act, instance *x)
{
    build(&p->k, act, p->t->act, x);
    spoil(p, x);
}

/* Within the tolerance of the reference, and the same bits in every order of threads and blocks. */
static void check_product_of(const trial *t, int which, const char *path)
{
    lm_dtype result = which == DW ? LM_DTYPE_F32 : t->act;
    double tol = allowed(t->act, result, path);
    product_case p;
    instance want, first, x;
    make_case(t, which, &p);
    build_spoilt(&p, LM_DTYPE_F64, &want);
    run(&want, lm_cpu_kernel(p.k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int order = 0; order < emu_order(order); order++) {
        instance *it = order ? &x : &first;
        build_spoilt(&p, t->act, it);
        run_on_device(it, device_kernel(p.k.op, t->act), t->shift);
        double d = distance(&it->out[0], &want.out[0]);
        if (!(d <= tol))
            fail_msg("%s %s %s %lldx%lldx%lld, shift %d: relative error %.3g, allowed %.3g", path,
                     p.k.op, lm_dtype_name(t->act), (long long)t->n, (long long)t->m,
                     (long long)t->k, t->shift, d, tol);
        assert_memory_equal(it->out[0].data, first.out[0].data, bytes_of(&first.out[0]));
        if (order)
            drop(&p.k, &x);
    }
    emu_order(0);
    drop(&p.k, &first);
    drop(&p.k, &want);
}

/* On the plain path and on that of tensor cores. */
static void check_trials(const trial *t, int count)
{
    for (int path = 0; path < 2; path++) {
        open_path(paths[path]);
        for (int i = 0; i < count; i++)
            for (int which = 0; which < PRODUCTS; which++)
                check_product_of(&t[i], which, paths[path]);
        lm_backend_close(device);
    }
}

/* Groups that fill whole tiles of 64 and 128 rows and groups that do not, of one row, empty ones at both ends, rows of no
 * group, and so many rows that the sum of a weight is computed in parts. */
static void test_groups(void **state)
{
    static const trial t[] = {
        { 1500, 70, 24, { 0, 0, 64, 64, 192, 193, 1500, 1500 }, .act = LM_DTYPE_F32 },
        { 1500, 72, 24, { 0, 0, 64, 64, 192, 193, 1500, 1500 }, .act = LM_DTYPE_BF16 },
        { 1500, 24, 40, { 0, 1, 129, 257, 258, 440, 1499, 1500 }, .act = LM_DTYPE_F16 },
        { 1500, 8, 16, { 0, 0, 0, 0, 0, 0, 0, 1500 }, .act = LM_DTYPE_BF16, .acc = LM_ACC_ADD },
        { 1500, 40, 8, { 0, 3, 3, 5, 130, 130, 131, 1401 }, .act = LM_DTYPE_F16 },
        { 40, 136, 72, { 0, 0, 0, 0, 0, 0, 0, 0 }, .act = LM_DTYPE_BF16 },
        { 40, 136, 72, { 0, 0, 0, 0, 0, 0, 0, 0 }, .act = LM_DTYPE_F16, .acc = LM_ACC_ADD },
        { 7, 8, 8, { 0, 1, 2, 3, 4, 5, 6, 7 }, .act = LM_DTYPE_BF16 },
    };
    trial each[sizeof t / sizeof *t];
    (void)state;
    memcpy(each, t, sizeof t);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        each[i].nan_row = NO_ROW;
    check_trials(each, sizeof t / sizeof *t);
}

/* Sizes around those of tiles, stages and packs; operands that no load of 16 bytes can read. */
static void test_sizes(void **state)
{
    static const int64_t sizes[][2] = { { 128, 32 }, { 136, 72 }, { 264, 8 },  { 8, 264 },
                                        { 120, 96 }, { 70, 64 },  { 64, 100 }, { 1, 1 } };
    static const int shifts[] = { 0, 8, 0, 1, 4 };
    (void)state;
    for (int i = 0; i < 16; i++) {
        trial t = { 300,
                    sizes[i % 8][0],
                    sizes[i % 8][1],
                    { 0, 0, 31, 32, 160, 288, 288, 297 },
                    i % 3 ? LM_DTYPE_BF16 : LM_DTYPE_F16,
                    i % 2 ? LM_ACC_ADD : LM_ACC_FIRST,
                    shifts[i % 5],
                    NO_ROW };
        check_trials(&t, 1);
    }
}

/* A NaN affects its own row of y and dx and the weights of its own group. */
static void test_nan(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        static const int64_t rows[] = { 0, 69, 70 };
        trial t = { 200,           64,           40, { 0, 5, 5, 70, 80, 81, 199, 199 },
                    LM_DTYPE_BF16, LM_ACC_FIRST, 0,  rows[i] };
        check_trials(&t, 1);
    }
}

/* ---- on the path of tensor cores ---- */

static uint64_t switches(void)
{
    void (*counts)(uint64_t *, uint64_t *) = NULL;
    uint64_t kernels, n = 0;
    *(void **)&counts = emu_symbol("lm_emu_counts");
    if (counts)
        counts(&kernels, &n);
    return n;
}

/* Switches between threads of a product, of which tensor cores need many times those of the plain kernels. */
static uint64_t switches_of(const trial *t, int which)
{
    product_case p;
    instance x;
    make_case(t, which, &p);
    build_spoilt(&p, t->act, &x);
    uint64_t before = switches();
    run_on_device(&x, device_kernel(p.k.op, t->act), t->shift);
    drop(&p.k, &x);
    return switches() - before;
}

/* Tensor cores serve rows of 16 bytes, and only these. */
static void test_choice(void **state)
{
    trial t = { 128,           128,          128, { 0, 0, 64, 64, 128, 128, 128, 128 },
                LM_DTYPE_BF16, LM_ACC_FIRST, 0,   NO_ROW };
    (void)state;
    if (cuda_is_real())
        skip();
    open_path("tensor");
    for (int which = 0; which < PRODUCTS; which++) {
        t.m = t.k = 128, t.shift = 0;
        uint64_t served = switches_of(&t, which);
        t.shift = 1;
        assert_true(served > 4 * switches_of(&t, which));
        t.shift = 0, t.m = 124;
        assert_true(served > 4 * switches_of(&t, which));
        t.m = 128, t.k = 124;
        assert_true(served > 4 * switches_of(&t, which));
    }
    lm_backend_close(device);
}

/* The bits of a row do not depend on the rows of its group. */
static void test_places(void **state)
{
    enum { N = 300, M = 72, K = 72 };
    static double w[G * M * K];
    static const trial t[] = {
        { N, M, K, { 0, 0, 0, N, N, N, N, N }, .act = LM_DTYPE_BF16, .nan_row = NO_ROW },
        { N, M, K, { 0, 1, 20, 150, 150, 277, 299, N }, .act = LM_DTYPE_BF16, .nan_row = NO_ROW }
    };
    (void)state;
    for (int i = 0; i < G * M * K; i++) /* all groups have the same */
        w[i] = bell(lm_philox((uint64_t)(i % (M * K)), 0, 3));
    open_path("tensor");
    for (int which = Y; which <= DX; which++) {
        instance x[2];
        product_case p[2];
        for (int i = 0; i < 2; i++) {
            make_case(&t[i], which, &p[i]);
            p[i].k.in[1] = given(p[i].k.in[1], w);
            build_spoilt(&p[i], LM_DTYPE_BF16, &x[i]);
            run_on_device(&x[i], device_kernel(p[i].k.op, LM_DTYPE_BF16), 0);
        }
        assert_memory_equal(x[0].out[0].data, x[1].out[0].data, bytes_of(&x[0].out[0]));
        for (int i = 0; i < 2; i++)
            drop(&p[i].k, &x[i]);
    }
    lm_backend_close(device);
}

/* ---- recordings ---- */

/* One recording serves all offsets: those in device memory when it is replayed. */
static void check_recording(int which, lm_dtype act)
{
    trial t = { 140, 72, 40, { 0, 9, 9, 30, 31, 100, 139, 140 }, act, LM_ACC_FIRST, 0, NO_ROW };
    static const int32_t others[G + 1] = { 0, 0, 130, 130, 131, 131, 135, 138 };
    product_case p;
    instance x, d;
    lm_tensor *all[4];
    lm_recording *recording = NULL;
    lm_err e = { 0 };
    make_case(&t, which, &p);
    build_spoilt(&p, act, &x);
    const lm_kernel *kernel = device_kernel(p.k.op, act);
    d = x;
    for (int i = 0; i < 4; i++) {
        all[i] = i < 3 ? &d.in[i] : &d.out[0];
        all[i]->data = device_twin(all[i]->data, bytes_of(all[i]), 0);
    }
    d.call.in = d.in, d.call.out = d.out, d.call.stream = device->main;
    device_must(device->step(device, &p.k.step, device->main, &e), &e);
    device_must(device->record_begin(device, device->main, &e), &e);
    kernel->run(&d.call);
    device_must(device->record_end(device, device->main, &recording, &e), &e);
    for (int i = 0; i < 3; i++) {
        instance want;
        if (i == 1)
            memcpy(t.cuts, others, sizeof others);
        build(&p.k, act, act, &want);
        run_on_device(&want, kernel, 0);
        device_copy(d.in[2].data, t.cuts, sizeof t.cuts);
        device_must(device->replay(device, recording, device->main, &e), &e);
        device_copy(x.out[0].data, d.out[0].data, bytes_of(&x.out[0]));
        assert_memory_equal(x.out[0].data, want.out[0].data, bytes_of(&x.out[0]));
        drop(&p.k, &want);
    }
    device->recording_free(device, recording);
    for (int i = 0; i < 4; i++)
        device_drop(all[i]->data, bytes_of(all[i]), 0);
    drop(&p.k, &x);
}

static void test_recordings(void **state)
{
    (void)state;
    for (int path = 0; path < 2; path++) {
        open_path(paths[path]);
        for (int which = 0; which < PRODUCTS; which++)
            check_recording(which, LM_DTYPE_BF16);
        lm_backend_close(device);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups), cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_nan),    cmocka_unit_test(test_choice),
        cmocka_unit_test(test_places), cmocka_unit_test(test_recordings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
