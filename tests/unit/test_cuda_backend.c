/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend itself: memory, streams, marks, recordings, step numbers, failures; on the
 * emulated device, or with LM_TEST_CUDA=real on a GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cuda_open.h"
#include "kernels/cuda/stream.h"

enum { N = 4096 };

typedef struct {
    lm_backend *b;
    lm_err e;
} place;

static void check(place *p, lm_code rc)
{
    if (rc)
        fail_msg("%s: %s", p->e.where, p->e.what);
}

static int open_place(void **state)
{
    static place p;
    p = (place){ 0 };
    check(&p, cuda_open("plain", true, &p.b, &p.e));
    *state = &p;
    return 0;
}

static int close_place(void **state)
{
    lm_backend_close(((place *)*state)->b);
    return 0;
}

static void *device_block(place *p, size_t bytes)
{
    void *out = NULL;
    check(p, p->b->alloc(p->b, bytes, "a test", &out, &p->e));
    return out;
}

static void *pinned_block(place *p, size_t bytes)
{
    void *out = NULL;
    check(p, p->b->host_alloc(p->b, bytes, "a test", &out, &p->e));
    return out;
}

static lm_stream *another_stream(place *p)
{
    lm_stream *s = NULL;
    check(p, p->b->stream_new(p->b, &s, &p->e));
    assert_non_null(s);
    assert_ptr_not_equal(s, p->b->main);
    return s;
}

static void put(place *p, void *dst, const void *src, size_t bytes, lm_stream *s)
{
    check(p, p->b->copy(p->b, dst, src, bytes, s, &p->e));
}

static void wait_for(place *p, lm_stream *s)
{
    check(p, p->b->sync(p->b, s, &p->e));
}

static void count_up(unsigned char *x, int from)
{
    for (int i = 0; i < N; i++)
        x[i] = (unsigned char)(i * 7 + from);
}

static size_t unused(place *p)
{
    size_t free_bytes = 0, total = 0;
    check(p, p->b->memory(p->b, &free_bytes, &total, &p->e));
    assert_in_range(free_bytes, 1, total);
    return free_bytes;
}

/* As much memory is free as `before`.  A GPU keeps loaded code, allocates whole blocks, and may be
 * used by other programs, so there the check is approximate. */
static void must_be_free(place *p, size_t before)
{
    if (cuda_is_real())
        assert_true(unused(p) + ((size_t)512 << 20) >= before);
    else
        assert_int_equal(unused(p), before);
}

/* ---- properties ---- */

static void test_facts(void **state)
{
    place *p = *state;
    assert_string_equal(p->b->name, "cuda:0");
    assert_string_equal(p->b->detail, "plain");
    assert_non_null(strstr(p->b->device, "sm_"));
    assert_non_null(strstr(p->b->device, "driver "));
    assert_false(p->b->host_memory);
    assert_null(p->b->par);
    assert_non_null(p->b->main);
    assert_int_equal(p->b->threads, p->b->main->sms);
    assert_int_equal(p->b->cpu, lm_cpu_detect());
    assert_true(p->b->main->deterministic);
    assert_true(p->b->peak_flops(p->b, LM_DTYPE_BF16) >= 0);
    assert_non_null(p->b->kernel(p->b, "linear", LM_DTYPE_BF16));
    assert_null(p->b->kernel(p->b, "linear", LM_DTYPE_F64));
    assert_null(p->b->kernel(p->b, "no such operator", LM_DTYPE_F32));
}

static void test_paths(void **state)
{
    static const char *const names[] = { "plain", "tensor", "tf32" };
    place *p = *state;
    size_t before = unused(p);

    for (int i = 0; i < 3; i++) {
        place q = { 0 };
        check(&q, cuda_open(names[i], true, &q.b, &q.e));
        assert_int_equal(q.b->main->level, i);
        assert_int_equal(strncmp(q.b->detail, names[i], strlen(names[i])), 0);
        assert_int_equal(strstr(q.b->detail, "cuBLASLt") != NULL, i > 0);
        assert_int_equal(q.b->main->lt != NULL, i > 0);
        assert_null(another_stream(&q)->lt); /* products share one workspace */
        lm_backend_close(q.b);
        must_be_free(p, before);
    }
}

static void test_refusals(void **state)
{
    static const struct {
        const char *device, *kernels;
        lm_code code;
        const char *says;
    } bad[] = {
        { "cuda:x", NULL, LM_EUSAGE, "no such device" },
        { "cudaa", NULL, LM_EUSAGE, "no such device" },
        { "cuda:", NULL, LM_EUSAGE, "no such device" },
        { "gpu", NULL, LM_EUSAGE, "no such device" },
        { "cuda:99", NULL, LM_EIO, "this machine has" },
        { "cuda", "fast", LM_EUSAGE, "unknown path 'fast'" },
    };
    static const char *const nowhere[] = { "/no/such/folder", "/nor/this", NULL };
    lm_backend *b;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };
        char path[4096];
        const char *const modules[] = { path, NULL };
        cuda_modules(path);
        const lm_backend_opts o = { .device = bad[i].device,
                                    .kernels = bad[i].kernels,
                                    .modules = modules };
        assert_int_equal(lm_backend_open(&o, &b, &e), bad[i].code);
        assert_non_null(strstr(e.what, bad[i].says));
        assert_null(b);
    }
    for (int i = 0; i < 2; i++) {
        lm_err e = { 0 };
        const lm_backend_opts o = { .device = "cuda:1", .modules = i ? nowhere : NULL };
        assert_int_equal(lm_backend_open(&o, &b, &e), LM_EIO);
        assert_non_null(strstr(e.what, i ? "/no/such/folder, /nor/this" : "no folder was named"));
        assert_int_equal(e.sys, 0);
    }
}

/* ---- memory ---- */

static void test_memory(void **state)
{
    place *p = *state;
    size_t before = unused(p);
    unsigned char *a = device_block(p, N), *b = device_block(p, N), *pin = pinned_block(p, N);
    static unsigned char plain[N], back[N];
    void *big = device_block(p, (size_t)64 << 20);

    assert_true(unused(p) + ((size_t)64 << 20) <= before);
    p->b->free(p->b, big, (size_t)64 << 20);
    for (int i = 0; i < N; i++)
        assert_int_equal(pin[i], 0);
    memset(back, 1, N);
    put(p, back, a, N, p->b->main);
    wait_for(p, NULL);
    for (int i = 0; i < N; i++)
        assert_int_equal(back[i], 0);

    count_up(plain, 1);
    put(p, a, plain, N, p->b->main); /* host to device to device to pinned to device to host */
    put(p, b, a, N, p->b->main);
    put(p, pin, b, N, p->b->main);
    check(p, p->b->zero(p->b, a, N / 2, p->b->main, &p->e));
    put(p, back, a, N, p->b->main);
    wait_for(p, p->b->main);
    assert_memory_equal(pin, plain, N);
    for (int i = 0; i < N; i++)
        assert_int_equal(back[i], i < N / 2 ? 0 : plain[i]);
    put(p, a, a, 0, p->b->main);
    p->b->free(p->b, a, N);
    p->b->free(p->b, b, N);
    p->b->free(p->b, NULL, 0);
    p->b->host_free(p->b, pin, N);
    must_be_free(p, before);
}

/* A request for more memory than the device has fails with both numbers; the device still works. */
static void test_no_room(void **state)
{
    place *p = *state;
    lm_err e = { 0 };
    void *x = &x;
    char asked[32];
    size_t bytes = (size_t)1 << 50;

    assert_int_equal(p->b->alloc(p->b, bytes, "the activations", &x, &e), LM_ELIMIT);
    snprintf(asked, sizeof asked, "%zu bytes", bytes);
    assert_non_null(strstr(e.what, "the activations"));
    assert_non_null(strstr(e.what, asked));
    assert_non_null(strstr(e.what, "free"));
    assert_string_not_equal(e.todo, "");
    assert_null(x);
    wait_for(p, NULL);
    x = device_block(p, N);
    p->b->free(p->b, x, N);
}

/* ---- order ---- */

static void test_follow(void **state)
{
    place *p = *state;
    lm_stream *side = another_stream(p);
    unsigned char *pin = pinned_block(p, N), *out = pinned_block(p, N), *dev = device_block(p, N);

    for (int round = 0; round < 20; round++) {
        count_up(pin, round);
        put(p, dev, pin, N, side);
        check(p, p->b->follow(p->b, p->b->main, side, &p->e));
        put(p, out, dev, N, p->b->main);
        check(p, p->b->follow(p->b, side, p->b->main, &p->e)); /* the next round's copy */
        wait_for(p, p->b->main);
        assert_memory_equal(out, pin, N);
    }
    wait_for(p, side);
    p->b->free(p->b, dev, N);
    p->b->host_free(p->b, pin, N);
    p->b->host_free(p->b, out, N);
    p->b->stream_free(p->b, side);
    p->b->stream_free(p->b, NULL);
}

/* The host runs far ahead of the device; each step still reads its own numbers. */
static void test_steps(void **state)
{
    enum { RUNS = 200 };
    place *p = *state;
    lm_stream *side = another_stream(p);
    lm_step *out = pinned_block(p, RUNS * sizeof *out);
    lm_stream *s[] = { p->b->main, side };

    assert_ptr_not_equal(p->b->main->step, side->step);
    for (int i = 0; i < RUNS; i++) {
        lm_step now = { .seed = 42, .step = i, .micro = 3 * i };
        check(p, p->b->step(p->b, &now, s[i % 2], &p->e));
        put(p, &out[i], s[i % 2]->step, sizeof now, s[i % 2]);
    }
    wait_for(p, NULL);
    for (int i = 0; i < RUNS; i++) {
        assert_int_equal(out[i].seed, 42);
        assert_int_equal(out[i].step, i);
        assert_int_equal(out[i].micro, 3 * i);
    }
    p->b->host_free(p->b, out, RUNS * sizeof *out);
    p->b->stream_free(p->b, side);
}

/* ---- time ---- */

static void test_marks(void **state)
{
    enum { MARKS = 5 };
    place *p = *state;
    lm_marks *m = NULL;
    double at[MARKS];
    size_t bytes = (size_t)16 << 20;
    void *dev = device_block(p, bytes);

    check(p, p->b->marks_new(p->b, MARKS, &m, &p->e));
    for (int round = 0; round < 2; round++) { /* they may be set again */
        p->b->range(p->b, "marks");
        for (int i = 0; i < MARKS; i++) {
            p->b->mark(p->b, m, i, p->b->main);
            check(p, p->b->zero(p->b, dev, bytes, p->b->main, &p->e));
        }
        p->b->range(p->b, NULL);
        check(p, p->b->marks_read(p->b, m, MARKS, at, &p->e));
        assert_true(at[0] == 0);
        for (int i = 1; i < MARKS; i++)
            assert_true(at[i] >= at[i - 1] && at[i] < 60);
        assert_true(at[MARKS - 1] > 0);
    }
    p->b->marks_free(p->b, m);
    p->b->marks_free(p->b, NULL);
    p->b->free(p->b, dev, bytes);
}

/* ---- recordings ---- */

static void test_recording(void **state)
{
    place *p = *state;
    lm_stream *s = p->b->main, *side = another_stream(p);
    unsigned char *from = device_block(p, N), *to = device_block(p, N);
    lm_step *seen = device_block(p, sizeof *seen), back, now = { .seed = 1, .step = 10 };
    static unsigned char host[N], want[N];
    lm_recording *r = NULL;

    check(p, p->b->step(p->b, &now, s, &p->e));
    check(p, p->b->record_begin(p->b, s, &p->e));
    now.step = 11;
    check(p, p->b->step(p->b, &now, s, &p->e)); /* no effect: the numbers of the replay are used */
    put(p, to, from, N, s);
    check(p, p->b->follow(p->b, side, s, &p->e));
    put(p, seen, s->step, sizeof *seen, side);
    check(p, p->b->follow(p->b, s, side, &p->e));
    check(p, p->b->record_end(p->b, s, &r, &p->e));

    for (int round = 0; round < 3; round++) {
        count_up(want, round);
        put(p, from, want, N, s);
        now.step = 20 + round;
        check(p, p->b->step(p->b, &now, s, &p->e));
        if (round == 0) { /* recording does not execute the kernels */
            put(p, host, to, N, s);
            wait_for(p, s);
            for (int i = 0; i < N; i++)
                assert_int_equal(host[i], 0);
        }
        check(p, p->b->replay(p->b, r, s, &p->e));
        put(p, host, to, N, s);
        put(p, &back, seen, sizeof back, s);
        wait_for(p, NULL);
        assert_memory_equal(host, want, N);
        assert_int_equal(back.step, 20 + round);
    }
    p->b->recording_free(p->b, r);
    p->b->recording_free(p->b, NULL);
    p->b->stream_free(p->b, side);
    p->b->free(p->b, from, N);
    p->b->free(p->b, to, N);
    p->b->free(p->b, seen, sizeof *seen);
}

/* After a call that cannot be recorded, the rest of the recording fails; the device still works. */
static void test_spoiled_recording(void **state)
{
    place *p = *state;
    lm_stream *s = p->b->main;
    unsigned char *dev = device_block(p, N);
    static unsigned char host[N], want[N];
    lm_recording *r;
    lm_err e[3] = { { 0 } };

    count_up(want, 3);
    check(p, p->b->record_begin(p->b, s, &p->e));
    assert_int_equal(p->b->sync(p->b, s, &e[0]), LM_EIO);
    assert_int_equal(p->b->copy(p->b, dev, dev + N / 2, N / 2, s, &e[1]), LM_EIO);
    assert_int_equal(p->b->record_end(p->b, s, &r, &e[2]), LM_EIO);
    assert_null(r);
    for (int i = 0; i < 3; i++)
        assert_non_null(strstr(e[i].what, "cudaErrorStreamCapture"));
    put(p, dev, want, N, s);
    put(p, host, dev, N, s);
    wait_for(p, NULL);
    assert_memory_equal(host, want, N);
    p->b->free(p->b, dev, N);
}

/* ---- the end ---- */

static void test_close_frees(void **state)
{
    place *p = *state, q = { 0 };
    size_t before = unused(p);

    for (int i = 0; i < 3; i++) {
        check(&q, cuda_open("plain", false, &q.b, &q.e));
        assert_false(q.b->main->deterministic);
        another_stream(&q);
        lm_backend_close(q.b);
        must_be_free(p, before);
    }
}

/* y += x on the device, the smallest kernel. */
static void run_kernel(place *p, void *memory)
{
    const lm_kernel *k = p->b->kernel(p->b, "add", LM_DTYPE_F32);
    lm_step step = { 0 };
    lm_tensor t = { .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { 16 }, .data = memory };
    lm_tensor in[] = { t, t }, out[] = { t };
    lm_call c = {
        .in = in, .n_in = 2, .out = out, .n_out = 1, .stream = p->b->main, .step = &step
    };
    assert_non_null(k);
    k->run(&c);
}

/* The device is lost during a kernel: the next wait and all later calls report it. */
static void test_loss(void **state)
{
    place p = { 0 };
    void (*vanish)(uint64_t), (*reset)(void), (*quiet)(bool);
    char first[256];
    void *x, *pin;
    lm_stream *side;
    lm_marks *m = NULL;
    size_t n, total;
    double at[1];
    const lm_step step = { 0 };

    (void)state;
    check(&p, cuda_open("plain", true, &p.b, &p.e));
    *(void **)&vanish = emu_symbol("lm_emu_fail");
    *(void **)&reset = emu_symbol("lm_emu_reset");
    *(void **)&quiet = emu_symbol("lm_emu_quiet");
    if (!vanish || !reset || !quiet) {
        lm_backend_close(p.b);
        skip();
    }
    quiet(true);
    x = device_block(&p, N);
    pin = pinned_block(&p, N);
    side = another_stream(&p);
    check(&p, p.b->marks_new(p.b, 1, &m, &p.e));
    run_kernel(&p, x);
    wait_for(&p, NULL);
    vanish(1);
    run_kernel(&p, x);
    assert_int_equal(p.b->sync(p.b, p.b->main, &p.e), LM_EIO);
    assert_string_equal(p.e.where, "cuda:0");
    assert_int_equal(p.e.sys, 0);
    snprintf(first, sizeof first, "%s", strchr(p.e.what, ':'));

#define STAYS(call)                                      \
    do {                                                 \
        lm_err e = { 0 };                                \
        assert_int_equal((call), LM_EIO);                \
        assert_string_equal(strchr(e.what, ':'), first); \
    } while (0)
    STAYS(p.b->sync(p.b, NULL, &e));
    STAYS(p.b->copy(p.b, x, pin, N, p.b->main, &e));
    STAYS(p.b->zero(p.b, x, N, side, &e));
    STAYS(p.b->alloc(p.b, N, "more", &(void *){ NULL }, &e));
    STAYS(p.b->host_alloc(p.b, N, "more", &(void *){ NULL }, &e));
    STAYS(p.b->memory(p.b, &n, &total, &e));
    STAYS(p.b->stream_new(p.b, &(lm_stream *){ NULL }, &e));
    STAYS(p.b->follow(p.b, side, p.b->main, &e));
    STAYS(p.b->step(p.b, &step, p.b->main, &e));
    STAYS(p.b->record_begin(p.b, p.b->main, &e));
    STAYS(p.b->marks_read(p.b, m, 1, at, &e));
    p.b->mark(p.b, m, 0, p.b->main);
    p.b->marks_free(p.b, m);
    p.b->free(p.b, x, N);
    p.b->host_free(p.b, pin, N);
    vanish(0);
    reset(); /* after a reset the backend stays unusable, because its data are lost */
    STAYS(p.b->sync(p.b, NULL, &e));
    lm_backend_close(p.b); /* while the other stream still exists */
    quiet(false);
    check(&p, (p.e.code = 0, cuda_open("plain", true, &p.b, &p.e)));
    wait_for(&p, NULL);
    lm_backend_close(p.b);
}

int main(void)
{
#define HERE(test) cmocka_unit_test_setup_teardown(test, open_place, close_place)
    const struct CMUnitTest tests[] = {
        HERE(test_facts),
        HERE(test_paths),
        cmocka_unit_test(test_refusals),
        HERE(test_memory),
        HERE(test_no_room),
        HERE(test_follow),
        HERE(test_steps),
        HERE(test_marks),
        HERE(test_recording),
        HERE(test_spoiled_recording),
        HERE(test_close_frees),
        cmocka_unit_test(test_loss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
