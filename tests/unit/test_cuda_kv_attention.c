/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over coded caches on the CUDA backend, on the plain and on the tensor-core path: every format against the
 * definition, with the same bits for any order of threads and blocks, for rows with or without others beside them, and for
 * any cut of a prompt over the same cache. */
#include "kv_attention_case.h"

#include "cuda_open.h"

/* Paths: `device` is one of them. */
static lm_backend *plain, *tensor;

static void device_must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static void copy(void *dst, const void *src, size_t bytes)
{
    lm_err e = { 0 };
    device_must(device->copy(device, dst, src, bytes, device->main, &e), &e);
    device_must(device->sync(device, NULL, &e), &e);
}

enum { GUARD = 64 };

static void *device_take(size_t bytes, int fill)
{
    lm_err e = { 0 };
    void *p = NULL, *host = take(bytes + GUARD);
    memset(host, fill, bytes);
    memset((char *)host + bytes, 0x5a, GUARD);
    device_must(device->alloc(device, bytes + GUARD, "a test operand", &p, &e), &e);
    copy(p, host, bytes + GUARD);
    lm_free(host);
    return p;
}

static void device_drop(void *p, size_t bytes)
{
    char guard[GUARD];
    copy(guard, (char *)p + bytes, GUARD);
    for (int i = 0; i < GUARD; i++)
        assert_int_equal(guard[i], 0x5a);
    device->free(device, p, bytes + GUARD);
}

/* The arrays of the formats, where the pages are. */
static float *ranges[3];

static lm_kv_format device_format(const lm_kv_format *f)
{
    lm_kv_format d = *f;
    d.lower = f->lower ? ranges[0] : NULL;
    d.upper = f->upper ? ranges[1] : NULL;
    d.head = f->head ? ranges[2] : NULL;
    return d;
}

/* Run t on the device: its outputs are those of the device then. */
static void run(trial *t)
{
    lm_tensor in[N_IN], out[2];
    lm_kv_format f[2] = { device_format(&t->format[0]), device_format(&t->format[1]) };
    lm_step step = { 0 };
    lm_err e = { 0 };
    lm_call c = t->call;
    const lm_kernel *k = device->kernel(device, "kv_attention", t->in[QKV].dtype);
    assert_non_null(k);
    for (int i = 0; i < N_IN; i++) {
        in[i] = t->in[i];
        if (in[i].data) {
            in[i].data = device_take(lm_stored_bytes(&in[i]), 0);
            copy(in[i].data, t->in[i].data, lm_stored_bytes(&in[i]));
        }
        if (in[i].kv)
            in[i].kv = &f[i - KEYS];
    }
    for (int i = 0; i < 2; i++) {
        out[i] = t->out[i];
        out[i].data = device_take(lm_stored_bytes(&out[i]), 0xff);
    }
    c.in = in;
    c.out = out;
    c.stream = device->main;
    const size_t bytes = k->work(&c, device->threads);
    c.work = device_take(bytes, 0xff);
    device_must(device->step(device, &step, device->main, &e), &e);
    k->run(&c);
    device_must(device->sync(device, NULL, &e), &e);
    device_drop(c.work, bytes);
    for (int i = 0; i < 2; i++) {
        copy(t->out[i].data, out[i].data, lm_stored_bytes(&out[i]));
        device_drop(out[i].data, lm_stored_bytes(&out[i]));
    }
    for (int i = 0; i < N_IN; i++)
        if (in[i].data)
            device_drop(in[i].data, lm_stored_bytes(&in[i]));
}

static void run_host(trial *t)
{
    const lm_kernel *k = lm_cpu_kernel("kv_attention", t->in[QKV].dtype, LM_CPU_REF);
    t->call.work = take(k->work(&t->call, 1));
    k->run(&t->call);
    lm_free(t->call.work);
}

static void check(const shape *s, lm_dtype act, const lm_kv_format *const f[2], int number)
{
    const bool low = act != LM_DTYPE_F32;
    trial t;
    open_trial(&t, s, act, f[0], f[1]);
    run_host(&t);
    float *o = results(&t.out[0]), *lse = results(&t.out[1]);
    size_t bytes = lm_stored_bytes(&t.out[0]);
    void *bits = take(bytes);
    for (int order = 0; order < 2; order++) { /* backward or shuffled */
        emu_order(order ? 1 + number % 2 : 0);
        run(&t);
        const double d = distance(&t.out[0], o), dl = distance(&t.out[1], lse);
        if (!(d <= (low ? 1e-2 : 2e-6)) || !(dl <= (low ? 1e-3 : 2e-6)))
            fail_msg("%d: %s %s keys %s values %s D %d T %d: %g, lse %g", number, device->detail,
                     lm_dtype_name(act), f[0]->name, f[1]->name, (int)s->D, (int)s->T, d, dl);
        if (order)
            assert_memory_equal(bits, t.out[0].data, bytes);
        memcpy(bits, t.out[0].data, bytes);
    }
    emu_order(0);
    lm_free(bits);
    lm_free(o);
    lm_free(lse);
    close_trial(&t);
}

static void test_formats(void **state)
{
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    (void)state;
    for (int i = 0; i < CALLS; i++) {
        const lm_kv_format *f[2];
        const shape s = format_shape(i, f);
        check(&s, acts[i % 3], f, i);
    }
}

/* The same by tensor cores and integers. */
static void test_formats_tensor(void **state)
{
    (void)state;
    device = tensor;
    for (int i = 0; i < CALLS; i++) {
        const lm_kv_format *f[2];
        const shape s = format_shape(i, f);
        check(&s, i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F16, f, i);
    }
    device = plain;
}

/* Prompts that end in the first tile: what lies behind them in shared memory is multiplied by zeros. */
static void test_short(void **state)
{
    static const int64_t dims[] = { 64, 20, 256, 128 };
    (void)state;
    device = tensor;
    for (int i = 0; i < 4; i++) {
        const lm_kv_format *f[2] = { &formats[i], &formats[(5 * i) % N_FORMATS] };
        const shape s = { .B = 2,
                          .H = 4,
                          .K = 2,
                          .D = dims[i],
                          .T = 32,
                          .P = 2,
                          .used = { 0, 12 },
                          .fresh = { 9, 17 },
                          .residual = { 32, 32 } };
        check(&s, i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F16, f, i);
    }
    device = plain;
}

/* Numbers that are scales times whole codes. */
static bool is_whole(const lm_kv_format *f)
{
    return !is_plain(f) && (f->levels == LM_KV_SYM || f->levels == LM_KV_ASYM) &&
           f->scale != LM_DTYPE_NONE;
}

/* New tokens over integers: all pairs of neighbours among such formats, groups of heads, edges of parts, windows; the bits
 * are not those of the plain path, so that path was not chosen. */
static void test_integers(void **state)
{
    static const int64_t dims[] = { 64, 128, 16, 80, 256 };
    const lm_kv_format *whole[N_FORMATS];
    int n = 0;
    (void)state;
    for (int i = 0; i < N_FORMATS; i++)
        if (is_whole(&formats[i]))
            whole[n++] = &formats[i];
    for (int i = 0; i < 3 * n; i++) {
        const lm_kv_format *f[2] = { whole[i % n], whole[(i + i / n) % n] };
        shape s = { .B = 2,
                    .K = 1 + i % 2,
                    .D = dims[i % 5],
                    .T = i % 3 ? 64 : 192,
                    .P = i % 3 ? 7 : 3,
                    .used = { 400 + i % 3, 330 + i % 70 },
                    .fresh = { 1, 1 },
                    .kind = { 1, 1 },
                    .window = i % 4 == 3 ? 300 : 0,
                    .soft_cap = i % 7 == 2 ? 3 : 0 };
        s.H = s.K * (i % 3 == 0 ? 1 : i % 3 == 1 ? 3 : 11);
        for (int side = 0; side < 2; side++) {
            const bool steps = lm_kv_step(f[side], s.T) > 1;
            s.residual[side] = steps || (i + side) % 3 == 0 ? s.T : 0;
            s.sinks[side] = (i / 2 + side) % 4 == 1 ? (steps ? s.T : 3) : 0;
        }
        device = tensor;
        check(&s, i % 2 ? LM_DTYPE_F16 : LM_DTYPE_BF16, f, i);
        trial t;
        open_trial(&t, &s, LM_DTYPE_F16, f[0], f[1]);
        run(&t);
        const size_t bytes = lm_stored_bytes(&t.out[1]);
        void *lse = take(bytes);
        memcpy(lse, t.out[1].data, bytes);
        device = plain;
        run(&t);
        assert_memory_not_equal(lse, t.out[1].data, bytes);
        lm_free(lse);
        close_trial(&t);
    }
}

/* Heads of up to 1024 numbers, many heads of queries, new tokens in numbers that are those of all sequences. */
static void test_shapes(void **state)
{
    static const int64_t dims[] = { 264, 512, 1024, 4, 300 };
    (void)state;
    for (int i = 0; i < 10; i++) {
        const lm_kv_format *f[2] = { &formats[i % 5 == 0 ? 5 : 0], &formats[i % 2 ? 0 : 9] };
        shape s = { .B = 2,
                    .K = 1 + i % 2,
                    .D = dims[i % 5],
                    .T = 64,
                    .P = 5,
                    .used = { 300, 70 + i },
                    .fresh = { 1, 18 },
                    .kind = { 1, 0 },
                    .residual = { i % 3 ? 10 : 0, i % 3 ? 0 : 40 } };
        s.H = s.K * (i < 5 ? 11 : 5);
        check(&s, i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, f, i);
    }
}

/* Rows of one number for all sequences, without first and kind: up to four are new tokens. */
static void test_even(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        static const int64_t seqs[] = { 1, 3, 4, 5, 21, 1 };
        const int64_t seq = seqs[i];
        const shape s = { .B = 2,
                          .H = 4,
                          .K = 2,
                          .D = 64,
                          .T = 32,
                          .P = 10,
                          .used = { 200, 31 },
                          .fresh = { seq, seq - (i > 1) },
                          .window = i == 5 ? 40 : 0 };
        trial t;
        open_trial(&t, &s, LM_DTYPE_F32, &formats[5], &formats[9]);
        lm_free(t.in[FIRST].data);
        lm_free(t.in[KIND].data);
        t.in[FIRST] = t.in[KIND] = (lm_tensor){ 0 };
        t.attr.attention.seq = seq;
        t.in[QKV].dim[0] = t.out[0].dim[0] = t.out[1].dim[0] = 2 * seq;
        run_host(&t);
        float *o = results(&t.out[0]);
        run(&t);
        if (!(distance(&t.out[0], o) <= 2e-6))
            fail_msg("%d rows: %g", (int)seq, distance(&t.out[0], o));
        lm_free(o);
        close_trial(&t);
    }
}

/* The bits of a row do not depend on the sequences beside it. */
static void test_alone(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        const lm_kv_format *f = &formats[i % 4 == 0 ? 0 : i % 4 == 1 ? 5 : i % 4 == 2 ? 13 : 9];
        device = i < 4 ? plain : tensor;
        const shape s = { .B = 3,
                          .H = 8,
                          .K = 2,
                          .D = 64,
                          .T = 64,
                          .P = 8,
                          .used = { 130, 300, 420 },
                          .fresh = { 40, 1, 1 },
                          .kind = { 0, 1, 1 },
                          .residual = { 64, 64 } };
        const lm_dtype act = i % 2 || i >= 4 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        trial t;
        open_trial(&t, &s, act, f, f);
        run(&t);
        const size_t bytes = lm_stored_bytes(&t.out[0]),
                     row = (size_t)(8 * 64) * lm_dtype_size(act);
        char *all = take(bytes);
        memcpy(all, t.out[0].data, bytes);
        int32_t *fresh = t.in[FRESH].data;
        fresh[0] = fresh[2] = 0;
        run(&t);
        assert_memory_equal(all + 40 * row, (char *)t.out[0].data + 40 * row, row);
        lm_free(all);
        close_trial(&t);
    }
    device = plain;
}

static int open_all(void **state)
{
    const float *const from[3] = { range_low, range_high, head_scale };
    const size_t bytes[3] = { sizeof range_low, sizeof range_high, sizeof head_scale };
    fill_ranges();
    lm_err e = { 0 };
    if (open_device(state) || cuda_open("tensor", true, &tensor, &e))
        return 1;
    plain = device;
    for (int i = 0; i < 3; i++) {
        ranges[i] = device_take(bytes[i], 0);
        copy(ranges[i], from[i], bytes[i]);
    }
    return 0;
}

static int close_all(void **state)
{
    device_drop(ranges[0], sizeof range_low);
    device_drop(ranges[1], sizeof range_high);
    device_drop(ranges[2], sizeof head_scale);
    lm_backend_close(tensor);
    device = plain;
    return close_device(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats), cmocka_unit_test(test_formats_tensor),
        cmocka_unit_test(test_short),   cmocka_unit_test(test_integers),
        cmocka_unit_test(test_shapes),  cmocka_unit_test(test_even),
        cmocka_unit_test(test_alone)
    };
    return cmocka_run_group_tests_name("cuda_kv_attention", tests, open_all, close_all);
}
