/* SPDX-License-Identifier: Apache-2.0 */
/* Attention at every level against the definition; the definition against finite differences. */
#include "attention_case.h"
#include "kernels/cpu/attention_plan.h"
#include "op/attention_blocks.h"

static void check_both(const lm_attention_attr *a, lo_kind kind)
{
    kernel_case f = forward_of(a, kind);
    check_case(&f);
    instance y;
    run_forward(&f, LM_DTYPE_F64, &y);
    f.in[0] = given(f.in[0], y.in[0].data);
    kernel_case b = backward_of(&f, &y);
    check_case(&b);
    drop(&f, &y);
}

static void ragged_shapes(void **state)
{
    (void)state;
    static const int64_t shapes[][5] = {
        { 1, 1, 1, 1, 8 },   { 2, 3, 2, 1, 16 },    { 1, 31, 4, 2, 64 },  { 2, 33, 3, 3, 32 },
        { 1, 65, 2, 1, 80 }, { 1, 127, 2, 1, 128 }, { 1, 70, 2, 2, 256 }, { 1, 129, 3, 1, 96 },
        { 3, 17, 2, 2, 24 }, { 1, 64, 1, 1, 64 },   { 1, 517, 1, 1, 32 }, { 1, 200, 1, 1, 64 },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t *s = shapes[i];
        lm_attention_attr a = attr_of(s[0], s[1], s[2], s[3], s[4]);
        check_both(&a, WHOLE);
    }
}

/* Value heads of another size than key heads, the greatest those of latent attention. */
static void value_heads(void **state)
{
    (void)state;
    static const int64_t dims[][2] = { { 192, 128 }, { 20, 7 }, { 16, 40 }, { 96, 64 },
                                       { 576, 512 }, { 33, 1 }, { 64, 32 }, { 130, 18 } };
    for (int i = 0; i < 24; i++) {
        const int64_t *d = dims[i % 8];
        lm_attention_attr a = attr_of(1 + i % 2, d[0] > 200 ? 70 : 130 + i, 3 - i % 2, 1, d[0]);
        a.value_dim = d[1];
        a.dropout = i / 8 == 1 ? 0.2 : 0;
        a.soft_cap = i / 8 == 2 ? 0.5 : 0;
        a.window = i % 3 == 1 ? 30 : 0;
        a.site = 2;
        check_both(&a, (lo_kind)(i % 4));
    }
}

static void masks(void **state)
{
    (void)state;
    static const int64_t windows[] = { 0, 1, 7, 40, 64, 1000 };
    for (int w = 0; w < 6; w++) {
        for (int causal = 0; causal < 2; causal++) {
            for (int kind = 0; kind < 3; kind++) {
                lm_attention_attr a = attr_of(1, 203 - 30 * w, 2, 1, w % 2 ? 32 : 64);
                a.window = windows[w];
                a.causal = causal;
                check_both(&a, (lo_kind)kind);
            }
        }
    }
}

/* The keys that each query sees, of the mask that all kernels read, by the words of the contract. */
static void visible_keys(void **state)
{
    (void)state;
    enum { T = 23 };
    for (int n = 0; n < 16; n++) {
        lm_attention_attr a = attr_of(1, T, 1, 1, 8);
        const int32_t *lo = n & 4 ? starts(DOCUMENTS, 1, T) : NULL;
        const int32_t *hi = n & 8 ? ends(DOCUMENTS, 1, T) : NULL;
        a.causal = n & 1;
        a.window = n & 2 ? 4 : 0;
        attn_mask m = attn_mask_of(&a, lo, hi, 0);
        for (int64_t i = 0; i < T; i++)
            for (int64_t j = 0; j < T; j++) {
                bool near = i - j < a.window && (a.causal || j - i < a.window);
                bool want = (!a.causal || j <= i) && j >= (lo ? lo[i] : 0) &&
                            j < (hi ? hi[i] : T) && (a.window == 0 || near);
                assert_int_equal(j >= attn_start(&m, i) && j < attn_end(&m, i), want);
            }
    }
}

/* Blocks of keys, in one document and in several, over many tiles. */
static void blocks(void **state)
{
    (void)state;
    for (int i = 0; i < 3 * BLOCKS; i++) {
        lm_attention_attr a = attr_of(1 + i % 2, 517 - 20 * i, i % 3 ? 3 : 4, i % 3 ? 1 : 2, 24);
        a.blocks = blocks_at(i);
        a.dropout = i % 5 == 1 ? 0.2 : 0;
        a.soft_cap = i % 5 == 2 ? 0.5 : 0;
        a.value_dim = i % 7 == 3 ? 40 : 0;
        check_both(&a, (lo_kind)(i % 4));
    }
}

/* Blocks of which all are local give the bits of attention without. */
static void all_blocks(void **state)
{
    (void)state;
    for (int level = -1; level <= (int)lm_cpu_detect(); level++) {
        const lm_dtype act = level < 0 ? LM_DTYPE_F64 : LM_DTYPE_F32;
        const lm_kernel *kernel =
            lm_cpu_kernel("attention", act, (lm_cpu_level)(level < 0 ? 0 : level));
        lm_attention_attr dense = attr_of(1, 300, 2, 1, 32), sparse = dense;
        sparse.blocks = (lm_attention_blocks){ .size = 16, .local = 19 };
        kernel_case k = forward_of(&dense, DOCUMENTS), l = forward_of(&sparse, DOCUMENTS);
        instance x, y;
        build(&k, act, act, &x);
        build(&l, act, act, &y);
        run(&x, kernel, NULL);
        run(&y, kernel, NULL);
        assert_memory_equal(x.out[0].data, y.out[0].data, bytes_of(&x.out[0]));
        sparse.blocks.local = 2;
        run(&y, kernel, NULL);
        assert_true(distance(&x.out[0], &y.out[0]) > 1e-2);
        drop(&l, &y);
        drop(&k, &x);
    }
}

/* Documents in a row give what each gives alone: blocks are counted from their first tokens. */
static void blocks_of_documents(void **state)
{
    (void)state;
    enum { T = 300, H = 4, D = 16, ROW = (H + 2 * 2) * D };
    static const int64_t cut[] = { 0, 101, 264, T };
    static int32_t lo[T];
    for (int d = 0; d < 3; d++)
        for (int64_t i = cut[d]; i < cut[d + 1]; i++)
            lo[i] = (int32_t)cut[d];
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        const lm_kernel *kernel = lm_cpu_kernel("attention", LM_DTYPE_F32, (lm_cpu_level)level);
        lm_attention_attr all = attr_of(1, T, H, 2, D);
        all.blocks = (lm_attention_blocks){ .size = 16, .local = 2, .global = 1, .stride = 4 };
        kernel_case k = forward_of(&all, WHOLE);
        k.in[1] = given(vec(I32, T), lo);
        instance x;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        run(&x, kernel, NULL);
        for (int d = 0; d < 3; d++) {
            lm_attention_attr one = all;
            one.seq = cut[d + 1] - cut[d];
            kernel_case l = forward_of(&one, WHOLE);
            instance y;
            build(&l, LM_DTYPE_F32, LM_DTYPE_F32, &y);
            memcpy(y.in[0].data, (float *)x.in[0].data + cut[d] * ROW, bytes_of(&y.in[0]));
            run(&y, kernel, NULL);
            lm_tensor part = x.out[0];
            part.dim[0] = one.seq;
            part.data = (float *)x.out[0].data + cut[d] * H * D;
            assert_true(distance(&part, &y.out[0]) < 2e-6);
            drop(&l, &y);
        }
        drop(&k, &x);
    }
}

/* Many short documents, in sequences so long that threads divide the gradients of a head. */
static void packed(void **state)
{
    (void)state;
    static const struct {
        int64_t batch, seq, heads, kv, dim, window;
        double cap, dropout;
    } cases[] = {
        { 1, 700, 1, 1, 64, 0, 0, 0 },    { 1, 517, 3, 1, 80, 0, 0, 0 },
        { 2, 300, 2, 2, 96, 0, 0, 0.2 },  { 1, 450, 2, 1, 128, 40, 0, 0 },
        { 1, 390, 1, 1, 7, 0, 0, 0.2 },   { 1, 420, 3, 3, 24, 0, 0.5, 0 },
        { 1, 580, 1, 1, 72, 100, 50, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_attention_attr a =
            attr_of(cases[i].batch, cases[i].seq, cases[i].heads, cases[i].kv, cases[i].dim);
        a.window = cases[i].window;
        a.soft_cap = cases[i].cap;
        a.dropout = cases[i].dropout;
        a.site = 3;
        check_both(&a, SHORT);
        a.causal = false;
        check_both(&a, SHORT);
        check_both(&a, OPEN);
    }
}

/* Queries and keys that are NaN reach the results that read them, and no others: runs stop by what they see.  (NaN of
 * values may reach others that read the same block of keys: 0 times NaN.) */
static void not_finite(void **state)
{
    (void)state;
    enum { T = 70, H = 2, D = 64, WIDTH = (H + 2) * D };
    static const int64_t at[][2] = { { 17, 70 }, { 40, H * D + 3 }, { 69, 0 } };
    static double x[T * WIDTH];
    for (int i = 0; i < 6; i++) {
        lm_attention_attr a = attr_of(1, T, H, 1, D);
        kernel_case k = forward_of(&a, i % 2 ? DOCUMENTS : WHOLE);
        for (int64_t j = 0; j < T * WIDTH; j++)
            x[j] = value_at(&k.in[0], 0, j);
        x[at[i / 2][0] * WIDTH + at[i / 2][1]] = NAN;
        k.in[0] = given(k.in[0], x);
        check_nan(&k, LM_DTYPE_F32);
        check_nan(&k, LM_DTYPE_BF16);
    }
}

/* Products of BF16 have kernels of their own where the processor has them; F32 does not. */
static void levels(void **state)
{
    (void)state;
    static const char *const ops[] = { "attention", "attention_dx", "attention_cached" };
    for (int i = 0; i < 3; i++)
        for (int level = LM_CPU_REF; level <= LM_CPU_AMX; level++) {
            int plain = level < LM_CPU_AVX512 ? level : LM_CPU_AVX512;
            assert_int_equal(lm_cpu_kernel(ops[i], LM_DTYPE_BF16, (lm_cpu_level)level)->level,
                             level);
            assert_int_equal(lm_cpu_kernel(ops[i], LM_DTYPE_F32, (lm_cpu_level)level)->level,
                             plain);
        }
}

/* A soft cap that scores reach to half and more, with masks and with dropout. */
static void capped(void **state)
{
    (void)state;
    static const int64_t dims[] = { 8, 24, 64, 128, 256 };
    for (int i = 0; i < 10; i++) {
        lm_attention_attr a = attr_of(2, i % 2 ? 75 : 128, 2, 1, dims[i % 5]);
        a.soft_cap = i % 3 ? 0.5 : 50;
        a.dropout = i > 6 ? 0.3 : 0;
        a.window = i % 4 == 1 ? 20 : 0;
        check_both(&a, (lo_kind)(i % 3));
    }
}

static void dropped(void **state)
{
    (void)state;
    static const int64_t dims[] = { 8, 64, 128 };
    for (int i = 0; i < 3; i++) {
        /* Rows of 75 draws begin inside a Philox block, rows of 128 do not. */
        lm_attention_attr a = attr_of(2, i == 1 ? 128 : 75, 2, 1, dims[i]);
        a.dropout = 0.3;
        a.site = 5;
        check_both(&a, (lo_kind)i);
    }
}

/* Scores far apart: one key has nearly all the weight, those of the others underflow. */
static void sharp_scores(void **state)
{
    (void)state;
    lm_attention_attr a = attr_of(1, 90, 2, 1, 64);
    a.scale = 40;
    kernel_case k = forward_of(&a, WHOLE);
    k.tol_f32 = 1e-4; /* errors of the scores themselves: 40 * 1e-6 and more */
    check_case(&k);
}

/* With q = 0 and v_j = e_j the output is the row of multipliers itself. */
static void dropout_draws(void **state)
{
    (void)state;
    enum { T = 8, D = 8 };
    lm_attention_attr a = attr_of(2, T, 2, 2, D);
    a.dropout = 0.4;
    a.site = 9;
    double qkv[2 * T * 6 * D] = { 0 };
    for (int n = 0; n < 2 * T; n++)
        for (int h = 4; h < 6; h++)
            qkv[(n * 6 + h) * D + n % T] = 1;
    kernel_case k = forward_of(&a, WHOLE);
    k.in[0] = given(k.in[0], qkv);
    lm_rng rng = lm_rng_make(lm_rng_key(11, 65539, 70001), "attention dropout", 9);
    instance y;
    run_forward(&k, LM_DTYPE_F64, &y);
    for (uint64_t n = 0; n < 2 * 2 * T * T; n++) {
        uint64_t bh = n / (T * T), i = n / T % T, j = n % T;
        double keep = lm_rng_u32(rng, n) >= (uint32_t)(0.4 * 0x1p32) ? 1 / 0.6 : 0;
        double want = j <= i ? keep / (double)(i + 1) : 0;
        double got = ((double *)y.out[0].data)[((bh / 2 * T + i) * 2 + bh % 2) * D + j];
        assert_true(fabs(got - want) < 1e-6);
    }
    drop(&k, &y);
}

/* 256 heads in all and 4,096 tokens: 2^32 draws per micro-batch, so a 64-bit index over steps,
 * micro-batches and draws would repeat after 2^16 steps. */
static void dropout_never_repeats(void **state)
{
    (void)state;
    enum { N = 256 };
    static const int64_t steps[][2] = { { 3, 0 }, { 3 + (1 << 16), 0 }, { 3, 1 << 16 },
                                        { 4, 0 }, { 1 << 30, 0 },       { 3, 1 } };
    static float z[6][N];
    lm_attention_attr a = attr_of(16, 4096, 16, 16, 64);
    a.dropout = 0.5;
    for (int k = 0; k < 6; k++) {
        lm_step step = { .seed = 11, .step = steps[k][0], .micro = steps[k][1] };
        attn_drop d = attn_drop_of(&(lm_call){ .attr = &a, .step = &step });
        attn_drop_fill(&d, lm_attention_draw(&d.origin, 15, 15, 4095), 0, N, z[k]);
        for (int m = 0; m < k; m++) {
            int same = 0;
            for (int j = 0; j < N; j++)
                same += z[m][j] == z[k][j];
            assert_in_range(same, N / 2 - 48, N / 2 + 48); /* six standard deviations */
        }
    }
}

static void gradient(void **state)
{
    (void)state;
    for (int i = 0; i < 9; i++) {
        lm_attention_attr a = attr_of(2, 7, 4, 2, 8);
        a.causal = i < 7;
        a.soft_cap = i == 4 ? 0.7 : 0;
        a.value_dim = i == 5 ? 5 : i == 6 ? 11 : 0;
        a.window = i == 1 || i == 7 ? 3 : 0;
        a.dropout = i == 2 ? 0.25 : 0;
        kernel_case f = forward_of(&a, i == 3 ? BLIND : i == 1 || i == 8 ? DOCUMENTS : WHOLE);
        instance y, g;
        run_forward(&f, LM_DTYPE_F64, &y);
        f.in[0] = given(f.in[0], y.in[0].data);
        kernel_case b = backward_of(&f, &y);
        build(&b, LM_DTYPE_F64, LM_DTYPE_F64, &g);
        run(&g, lm_cpu_kernel("attention_dx", LM_DTYPE_F64, LM_CPU_REF), NULL);
        check_slope(&f, 0, 0, &g.in[0], &g.out[0]);
        drop(&b, &g);
        drop(&f, &y);
    }
}

/* attention_cached: S positions per sequence, of which `used` are filled; `fresh` of the rows are
 * real. */
static void build_cached(const kernel_case *k, lm_dtype act, lm_dtype narrow, instance *x,
                         int64_t S)
{
    const lm_attention_attr *a = k->attr;
    build(k, act, narrow, x);
    for (int o = 1; o < 3; o++) {
        int64_t dim = o == 1 ? a->head_dim : lm_attention_value_dim(a);
        if (!x->out[o].data)
            continue;
        x->out[o].ndim = 4;
        memcpy(x->out[o].dim, (int64_t[]){ a->batch, a->kv_heads, S, dim }, 32);
    }
}

/* values: there is a vcache. */
static kernel_case cached_with(const lm_attention_attr *a, int64_t S, const int32_t *used,
                               const int32_t *fresh, bool values)
{
    int64_t n = a->batch * a->seq;
    kernel_case k = { .op = "attention_cached", .attr = a };
    k.in[0] = mat(ACT, n, lm_attention_row(a, values));
    k.in[1] = given(vec(I32, a->batch), used);
    k.in[2] = given(vec(I32, a->batch), fresh);
    k.out[0] = mat(ACT, n, a->heads * lm_attention_value_dim(a));
    k.out[1] = mat(ACT, a->batch * a->kv_heads * S, a->head_dim);
    if (values)
        k.out[2] = mat(ACT, a->batch * a->kv_heads * S, lm_attention_value_dim(a));
    return k;
}

static kernel_case cached_of(const lm_attention_attr *a, int64_t S, const int32_t *used,
                             const int32_t *fresh)
{
    return cached_with(a, S, used, fresh, true);
}

static void check_cached(const kernel_case *k, int64_t S)
{
    for (int bf = 0; bf < 2; bf++) {
        lm_dtype act = bf ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        instance want, first, x;
        build_cached(k, LM_DTYPE_F64, act, &want, S);
        run(&want, lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
            for (int threads = 1; threads <= 3; threads++) {
                instance *it = threads == 1 ? &first : &x;
                build_cached(k, act, act, it, S);
                run(it, lm_cpu_kernel(k->op, act, (lm_cpu_level)level), pool_of(threads));
                for (int o = 0; o < (k->out[2].kind == ABSENT ? 2 : 3); o++) {
                    double d = distance(&it->out[o], &want.out[o]);
                    double tol = o ? 0 : bf ? 1e-2 : 2e-6; /* the caches hold copies */
                    if (d > tol)
                        fail_msg("cached %s %s out %d: relative error %.3g", lm_dtype_name(act),
                                 lm_cpu_level_name((lm_cpu_level)level), o, d);
                    assert_memory_equal(it->out[o].data, first.out[o].data,
                                        bytes_of(&first.out[o]));
                }
                if (threads > 1)
                    drop(k, &x);
            }
            drop(k, &first);
        }
        drop(k, &want);
    }
}

static void cached(void **state)
{
    (void)state;
    static const int64_t shapes[][5] = {
        /* T, H, K, D, S */
        { 1, 4, 2, 64, 600 }, { 1, 3, 1, 24, 300 }, { 2, 2, 2, 128, 40 }, { 37, 4, 2, 64, 100 },
        { 9, 2, 1, 80, 64 },  { 1, 7, 1, 128, 90 }, { 3, 10, 2, 72, 33 }, { 150, 4, 2, 16, 400 },
    };
    for (int i = 0; i < 8; i++) {
        const int64_t *s = shapes[i];
        int32_t T = (int32_t)s[0], S = (int32_t)s[4];
        const int32_t used[3] = { 0, S / 2, S - T }, fresh[3] = { T, T > 1 ? T / 2 : 0, T };
        lm_attention_attr a = attr_of(3, T, s[1], s[2], s[3]);
        for (int w = 0; w < 3 + BLOCKS; w++) {
            a.window = w == 1 ? 21 : 0;
            a.soft_cap = w == 2 || w == 5 ? 0.5 : 0;
            a.blocks = w < 3 ? (lm_attention_blocks){ 0 } : blocks_at(w);
            kernel_case k = cached_of(&a, S, used, fresh);
            check_cached(&k, S);
        }
    }
}

/* Value heads of another size, and keys whose first numbers are the values. */
static void cached_values(void **state)
{
    (void)state;
    static const int64_t shapes[][6] = {
        /* T, H, K, D, E, S */
        { 1, 6, 1, 576, 512, 300 }, { 40, 3, 1, 576, 512, 90 }, { 1, 4, 2, 192, 128, 600 },
        { 37, 4, 2, 192, 128, 80 }, { 3, 5, 1, 72, 40, 33 },    { 9, 2, 1, 21, 13, 64 },
        { 1, 3, 1, 24, 24, 50 },    { 20, 2, 2, 64, 64, 50 },
    };
    for (int i = 0; i < 8; i++) {
        const int64_t *s = shapes[i];
        int32_t T = (int32_t)s[0], S = (int32_t)s[5];
        const int32_t used[3] = { 0, S / 2, S - T }, fresh[3] = { T, T > 1 ? T / 2 : 0, T };
        lm_attention_attr a = attr_of(3, T, s[1], s[2], s[3]);
        a.value_dim = s[4];
        a.window = i % 3 == 1 ? 21 : 0;
        for (int values = 0; values < 2; values++) {
            kernel_case k = cached_with(&a, S, used, fresh, values);
            check_cached(&k, S);
        }
    }
}

/* Without a vcache, the result is that with the first numbers of the keys as values. */
static void values_of_keys(void **state)
{
    (void)state;
    enum { T = 5, H = 2, D = 12, E = 8, S = 9, WIDTH = (H + 1) * D };
    const int32_t used[1] = { 3 }, fresh[1] = { T };
    lm_attention_attr a = attr_of(1, T, H, 1, D);
    a.value_dim = E;
    kernel_case k = cached_with(&a, S, used, fresh, true),
                l = cached_with(&a, S, used, fresh, false);
    const lm_kernel *ref = lm_cpu_kernel("attention_cached", LM_DTYPE_F64, LM_CPU_REF);
    instance x, y;
    build_cached(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x, S);
    build_cached(&l, LM_DTYPE_F64, LM_DTYPE_F64, &y, S);
    for (int i = 0; i < T; i++) {
        double *row = (double *)x.in[0].data + i * (WIDTH + E);
        memcpy(row, (double *)y.in[0].data + i * WIDTH, WIDTH * sizeof *row);
        memcpy(row + WIDTH, row + H * D, E * sizeof *row);
    }
    for (int j = 0; j < S; j++) {
        memcpy((double *)x.out[1].data + j * D, (double *)y.out[1].data + j * D,
               D * sizeof(double));
        memcpy((double *)x.out[2].data + j * E, (double *)y.out[1].data + j * D,
               E * sizeof(double));
    }
    run(&x, ref, NULL);
    run(&y, ref, NULL);
    assert_memory_equal(x.out[0].data, y.out[0].data, T * H * E * sizeof(double));
    drop(&l, &y);
    drop(&k, &x);
}

/* The bits of a head of a decoded row are the same whether it reads the keys alone or with others. */
static void shared_keys(void **state)
{
    (void)state;
    enum { H = 7, D = 72, S = 300 };
    const int32_t used[1] = { S - 1 }, fresh[1] = { 1 };
    lm_attention_attr together = attr_of(1, 1, H, 1, D), single = attr_of(1, 1, 1, 1, D);
    for (int i = 0; i < 2 * ((int)lm_cpu_detect() + 1); i++) {
        lm_dtype act = i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        const lm_kernel *kernel = lm_cpu_kernel("attention_cached", act, (lm_cpu_level)(i / 2));
        kernel_case k = cached_of(&together, S, used, fresh),
                    l = cached_of(&single, S, used, fresh);
        size_t head = D * lm_dtype_size(act);
        instance all, one;
        build_cached(&k, act, act, &all, S);
        build_cached(&l, act, act, &one, S);
        run(&all, kernel, NULL);
        for (int h = 0; h < H; h++) {
            memcpy(one.in[0].data, (char *)all.in[0].data + (size_t)h * head, head);
            memcpy((char *)one.in[0].data + head, (char *)all.in[0].data + H * head, 2 * head);
            for (int o = 1; o < 3; o++)
                memcpy(one.out[o].data, all.out[o].data, bytes_of(&all.out[o]));
            run(&one, kernel, NULL);
            assert_memory_equal(one.out[0].data, (char *)all.out[0].data + (size_t)h * head, head);
        }
        drop(&l, &one);
        drop(&k, &all);
    }
}

/* The definition: with an empty cache the result equals attention; its last row equals the result
 * of decoding that row alone. */
static void cached_is_uncached(void **state)
{
    (void)state;
    enum { T = 9, W = 4 * 8 };
    const int32_t none[2] = { 0, 0 }, all[2] = { T, T }, before[2] = { T - 1, T - 1 };
    const int32_t one[2] = { 1, 1 }, most[2] = { T - 1, T - 1 };
    lm_attention_attr a = attr_of(2, T, 2, 1, 8), b = attr_of(2, 1, 2, 1, 8);
    kernel_case f = forward_of(&a, WHOLE), k = cached_of(&a, T, none, all);
    instance y, x, z, u;
    const lm_kernel *ref = lm_cpu_kernel("attention_cached", LM_DTYPE_F64, LM_CPU_REF);
    run_forward(&f, LM_DTYPE_F64, &y);
    build_cached(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x, T);
    run(&x, ref, NULL);
    assert_true(distance(&x.out[0], &y.out[0]) < 1e-14);
    /* All but the last row, then the last. */
    kernel_case l = cached_of(&a, T, none, most), m = cached_of(&b, T, before, one);
    build_cached(&l, LM_DTYPE_F64, LM_DTYPE_F64, &z, T);
    run(&z, ref, NULL);
    build_cached(&m, LM_DTYPE_F64, LM_DTYPE_F64, &u, T);
    for (int o = 1; o < 3; o++)
        memcpy(u.out[o].data, z.out[o].data, bytes_of(&z.out[o]));
    for (int s = 0; s < 2; s++)
        memcpy((double *)u.in[0].data + s * W, (double *)x.in[0].data + (s * T + T - 1) * W,
               W * sizeof(double));
    run(&u, ref, NULL);
    for (int s = 0; s < 2; s++)
        for (int d = 0; d < 16; d++)
            assert_true(fabs(((double *)u.out[0].data)[s * 16 + d] -
                             ((double *)y.out[0].data)[(s * T + T - 1) * 16 + d]) < 1e-14);
    drop(&m, &u);
    drop(&l, &z);
    drop(&k, &x);
    drop(&f, &y);
}

/* The keys that each token of a text sees are together its pairs. */
static void keys_of_blocks_add_up(void **state)
{
    (void)state;
    static const lm_attention_blocks cases[] = {
        { .size = 16, .local = 2 },
        { .size = 16, .local = 1, .global = 2 },
        { .size = 32, .local = 2, .global = 1, .stride = 3 },
        { .size = 16, .local = 1, .stride = 4, .homogeneous = true },
    };
    for (int i = 0; i < 4; i++) {
        double sum = 0;
        for (int64_t n = 1; n < 400; n++) {
            sum += lm_attention_block_keys(&cases[i], 3, n);
            assert_true(fabs(sum - lm_attention_block_pairs(&cases[i], 3, n)) < 1e-6 * sum);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ragged_shapes),
        cmocka_unit_test(value_heads),
        cmocka_unit_test(masks),
        cmocka_unit_test(visible_keys),
        cmocka_unit_test(blocks),
        cmocka_unit_test(all_blocks),
        cmocka_unit_test(blocks_of_documents),
        cmocka_unit_test(packed),
        cmocka_unit_test(levels),
        cmocka_unit_test(not_finite),
        cmocka_unit_test(keys_of_blocks_add_up),
        cmocka_unit_test(capped),
        cmocka_unit_test(dropped),
        cmocka_unit_test(sharp_scores),
        cmocka_unit_test(dropout_draws),
        cmocka_unit_test(gradient),
        cmocka_unit_test(dropout_never_repeats),
        cmocka_unit_test(cached),
        cmocka_unit_test(cached_is_uncached),
        cmocka_unit_test(cached_values),
        cmocka_unit_test(values_of_keys),
        cmocka_unit_test(shared_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
