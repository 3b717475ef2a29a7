/* SPDX-License-Identifier: Apache-2.0 */
/* Writes into coded caches on the CUDA backend: the bits of the definition in every format, for prompts, new tokens and
 * ragged rows, in pages that were used before, and for any order of threads and blocks. */
#include "cuda_case.h"

#include "base/rng.h"
#include "kernels/kv.h"
#include "numeric/code_rows.h"

#include "kv_formats_case.h"

enum { QKV, USED, FRESH, FIRST, TABLE, SLOT, ROW, N_IN };
enum { KEYS, VALUES, KTAIL, VTAIL, N_OUT };
enum { TRIALS = 400, CALLS = 4, HEADS = 2, MOST_D = 160, MOST_T = 192, BATCH = 2 };
enum { CODED = N_FORMATS - 1 }; /* formats without the plain one */

typedef struct {
    lm_kv_attr attr;
    lm_kv_format f[2], on_device[2];
    lm_dtype act;
    int64_t H, K, D, T, P, seq, rows;
    int number;
    bool plain[2], replaces;
    lm_tensor in[N_IN], host[N_OUT], device[N_OUT];
    float *ranges; /* on the device: lower, upper, head */
} trial;

static lm_tensor made(lm_dtype d, int ndim, const int64_t *dim, const lm_kv_format *f)
{
    lm_tensor t = { .dtype = d, .ndim = ndim, .kv = f };
    memcpy(t.dim, dim, (size_t)ndim * sizeof *dim);
    t.data = take(lm_stored_bytes(&t));
    memset(t.data, 0, lm_stored_bytes(&t));
    return t;
}

static void check_guard(const void *p, size_t bytes)
{
    for (size_t i = 0; i < GUARD; i++)
        assert_int_equal(((const unsigned char *)p)[bytes + i], 0x5a);
}

static lm_tensor twin(const lm_tensor *t)
{
    lm_tensor d = *t;
    if (t->data)
        d.data = device_twin(t->data, lm_stored_bytes(t) + GUARD, 0);
    return d;
}

static void drop_twin(lm_tensor *t)
{
    if (t->data)
        device_drop(t->data, lm_stored_bytes(t) + GUARD, 0);
}

/* Pages of an earlier use: every token has codes, and outliers are full. */
static void make_dirty(const trial *t, lm_tensor *c)
{
    size_t bytes = lm_kv_page_bytes(c->kv, t->T, t->D);
    static float x[MOST_T * MOST_D];
    for (int64_t i = 0; i < t->T * t->D; i++)
        x[i] = (float)(i % 7) - 3.0f + (i % 5 ? 0.0f : 9.0f);
    for (int64_t p = 0; p < c->dim[0] * t->K; p++)
        lm_kv_encode(c->kv, t->T, t->D, p % t->K, x, t->D, 0, t->T, NULL,
                     (char *)c->data + (size_t)p * bytes);
}

#define DRAW(k, n) ((int64_t)lm_rng_below(r, (uint64_t)(k), (uint64_t)(n)))

static void draw_sizes(trial *t, lm_rng r)
{
    static const int64_t dims[] = { 4, 20, 32, 64, 80, 128, 160 },
                         tokens[] = { 16, 32, 64, 128, 192 };
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    t->act = acts[DRAW(0, 3)];
    for (int s = 0; s < 2; s++)
        t->f[s] = formats[s ? DRAW(1, CODED) : t->number % CODED];
    if (t->f[0].outliers && !t->f[0].lower) { /* for values alone */
        t->f[1] = t->f[0];
        t->f[0] = formats[0];
    }
    t->f[1].values = true;
    t->K = 1 + DRAW(2, HEADS);
    t->H = t->K * (1 + DRAW(3, 2));
    t->D = dims[DRAW(4, 7)];
    t->T = tokens[DRAW(5, 5)];
    for (int s = 0; s < 2; s++) /* long groups, many outliers */
        if (lm_kv_page_bytes(&t->f[s], t->T, t->D) == SIZE_MAX)
            t->T = t->D = 64;
    t->P = 1 + DRAW(6, 3);
    t->seq = DRAW(7, 2) ? 0 : 1 + DRAW(8, 70);
    t->rows = t->seq ? BATCH * t->seq : 2 + DRAW(8, 140);
    t->attr.attention = (lm_attention_attr){ .batch = BATCH,
                                             .seq = t->seq,
                                             .heads = t->H,
                                             .kv_heads = t->K,
                                             .head_dim = t->D,
                                             .causal = true };
    bool replaces = DRAW(50, 3) == 0;
    for (int s = 0; s < 2; s++)
        replaces &= lm_kv_step(&t->f[s], t->T) == 1 && t->f[s].outliers == 0;
    for (int s = 0; s < 2; s++) {
        const bool steps = lm_kv_step(&t->f[s], t->T) > 1;
        t->plain[s] = DRAW(13 + s, 8) == 0;
        if (t->plain[s] || replaces)
            continue;
        t->attr.residual[s] = steps ? t->T * (1 + DRAW(9 + 20 * s, 2))
                                    : DRAW(9 + 20 * s, 2) * (1 + DRAW(10 + 20 * s, 40));
        t->attr.sinks[s] = DRAW(11 + 20 * s, 2) ? (steps ? t->T : 1 + DRAW(12 + 20 * s, 20)) : 0;
    }
    if (t->f[1].levels == LM_KV_TABLE && t->f[1].zero && !t->f[1].lower && !t->plain[1]) {
        t->attr.token_range = t->f[1].outliers || DRAW(51, 2);
        t->attr.outliers = DRAW(52, 3) ? 0.05 : 0;
    }
    t->replaces = replaces;
}

static void open_trial(trial *t, int i)
{
    lm_rng r = lm_rng_make(4, "cuda kv", (uint64_t)i);
    size_t range = sizeof range_low;
    *t = (trial){ .number = i };
    draw_sizes(t, r);
    t->in[QKV] = made(t->act, 2, (int64_t[]){ t->rows, (t->H + 2 * t->K) * t->D }, NULL);
    t->in[USED] = made(LM_DTYPE_I32, 1, (int64_t[]){ BATCH }, NULL);
    t->in[FRESH] = made(LM_DTYPE_I32, 1, (int64_t[]){ BATCH }, NULL);
    if (!t->seq)
        t->in[FIRST] = made(LM_DTYPE_I32, 1, (int64_t[]){ BATCH + 1 }, NULL);
    if (t->replaces)
        t->in[ROW] = made(LM_DTYPE_I32, 2, (int64_t[]){ t->rows, t->K }, NULL);
    t->in[TABLE] = made(LM_DTYPE_I32, 2, (int64_t[]){ BATCH, t->P }, NULL);
    for (int64_t p = 0; p < BATCH * t->P; p++)
        ((int32_t *)t->in[TABLE].data)[p] = (int32_t)(BATCH * t->P - 1 - p);
    t->ranges = device_twin(range_low, 2 * range + sizeof head_scale, 0);
    device_copy((char *)t->ranges + range, range_high, range);
    device_copy((char *)t->ranges + 2 * range, head_scale, sizeof head_scale);
    for (int s = 0; s < 2; s++) {
        assert_true(lm_kv_page_bytes(&t->f[s], t->T, t->D) != SIZE_MAX);
        t->on_device[s] = t->f[s]; /* its arrays are where the pages are */
        if (t->f[s].lower) {
            t->on_device[s].lower = t->ranges;
            t->on_device[s].upper = t->ranges + CASE_RANGES;
        }
        if (t->f[s].head)
            t->on_device[s].head = t->ranges + 2 * CASE_RANGES;
        int64_t R = t->attr.residual[s] + t->attr.sinks[s];
        t->host[s] = made(t->act, 4, (int64_t[]){ BATCH * t->P, t->K, t->T, t->D },
                          t->plain[s] ? NULL : &t->f[s]);
        if (!t->plain[s])
            make_dirty(t, &t->host[s]);
        if (R)
            t->host[KTAIL + s] = made(t->act, 4, (int64_t[]){ BATCH + 1, t->K, R, t->D }, NULL);
    }
    if (t->host[KTAIL].data || t->host[VTAIL].data) {
        t->in[SLOT] = made(LM_DTYPE_I32, 1, (int64_t[]){ BATCH }, NULL);
        memcpy(t->in[SLOT].data, (int32_t[]){ 2, 0 }, 8);
    }
    for (int o = 0; o < N_OUT; o++) {
        t->device[o] = twin(&t->host[o]);
        if (o < 2 && !t->plain[o])
            t->device[o].kv = &t->on_device[o];
    }
}

static void close_trial(trial *t)
{
    for (int i = 0; i < N_IN; i++)
        lm_free(t->in[i].data);
    for (int i = 0; i < N_OUT; i++) {
        drop_twin(&t->device[i]);
        lm_free(t->host[i].data);
    }
    device_drop(t->ranges, 2 * sizeof range_low + sizeof head_scale, 0);
}

/* The rows of call number `call`: parts of prompts, new tokens, nothing. */
static void draw_rows(trial *t, int call)
{
    lm_rng r = lm_rng_make(6, "cuda kv rows", (uint64_t)(t->number * CALLS + call));
    int32_t *used = t->in[USED].data, *fresh = t->in[FRESH].data, *first = t->in[FIRST].data;
    int64_t left = t->rows;
    for (int b = 0; b < BATCH; b++) {
        used[b] += fresh[b];
        int64_t most = t->seq ? t->seq : left, room = t->P * t->T - used[b];
        most = most < room ? most : room;
        fresh[b] = (int32_t)(DRAW(10 + b, 4) ? DRAW(b, most + 1) : most < 1 ? most : 1);
        left -= fresh[b];
        if (first) {
            first[0] = 0;
            first[b + 1] = first[b] + fresh[b];
        }
    }
    for (int64_t i = 0; t->replaces && i < t->rows * t->K; i++)
        ((int32_t *)t->in[ROW].data)[i] =
            (int32_t)DRAW(1000 + i, t->P * t->T < 40 ? 9 : t->P * t->T);
    for (int64_t i = 0; i < lm_tensor_count(&t->in[QKV]); i++)
        lm_set(t->act, t->in[QKV].data, i, lm_rng_normal(r, (uint64_t)(100 + i)));
    /* A number that is not finite; in balanced tiles it makes many scales NaN, of either sign. */
    if (DRAW(20, 5) == 0 && !t->f[0].second && !t->f[1].second)
        lm_set(t->act, t->in[QKV].data, DRAW(21, lm_tensor_count(&t->in[QKV])), (double)INFINITY);
    for (int64_t i = 0; DRAW(22, 5) == 0 && i < lm_tensor_count(&t->in[QKV]);
         i++) /* constant rows */
        lm_set(t->act, t->in[QKV].data, i, (double)(i % 2) - 1);
}

static void on_host(trial *t)
{
    lm_call c = { .attr = &t->attr, .in = t->in, .n_in = N_IN, .out = t->host, .n_out = N_OUT };
    const lm_kernel *k = lm_cpu_kernel("kv_write", t->act, LM_CPU_REF);
    c.work = take(k->work(&c, 1));
    k->run(&c);
    lm_free(c.work);
}

static void on_device(trial *t)
{
    lm_step step = { 0 };
    lm_err e = { 0 };
    lm_tensor in[N_IN];
    for (int i = 0; i < N_IN; i++)
        in[i] = twin(&t->in[i]);
    lm_call c = { .attr = &t->attr,
                  .in = in,
                  .n_in = N_IN,
                  .out = t->device,
                  .n_out = N_OUT,
                  .stream = device->main };
    const lm_kernel *k = device_kernel("kv_write", t->act);
    size_t bytes = k->work(&c, device->threads);
    void *junk = take(bytes);
    memset(junk, 0xff, bytes);
    c.work = device_twin(junk, bytes + GUARD, 0);
    device_must(device->step(device, &step, device->main, &e), &e);
    k->run(&c);
    device_must(device->sync(device, NULL, &e), &e);
    device_copy(junk, c.work, bytes + GUARD);
    check_guard(junk, bytes);
    device_drop(c.work, bytes + GUARD, 0);
    lm_free(junk);
    for (int i = 0; i < N_IN; i++)
        drop_twin(&in[i]);
}

/* Outliers behind the counted ones are any. */
static void clear_unused(const trial *t, int side, char *pages)
{
    const lm_kv_format *f = &t->f[side];
    size_t bytes = lm_kv_page_bytes(f, t->T, t->D);
    lm_kv_sections at;
    lm_kv_page(f, t->T, t->D, &at, NULL);
    for (int64_t p = 0; p < BATCH * t->P * t->K && f->outliers; p++) {
        uint16_t *o = (uint16_t *)(void *)(pages + (size_t)p * bytes + at.outliers);
        for (int64_t i = *o; i < f->outliers; i++)
            o[1 + i] = o[1 + f->outliers + i] = 0;
    }
}

static void compare(const trial *t, int call)
{
    static const char *const names[] = { "keys", "values", "tail of keys", "tail of values" };
    for (int i = 0; i < N_OUT; i++) {
        size_t bytes = t->host[i].data ? lm_stored_bytes(&t->host[i]) : 0;
        char *got = take(bytes), *want = take(bytes);
        if (bytes) {
            device_copy(got, t->device[i].data, bytes + GUARD);
            memcpy(want, t->host[i].data, bytes);
        }
        if (i < 2 && !t->plain[i]) {
            clear_unused(t, i, got);
            clear_unused(t, i, want);
        }
        for (size_t k = 0; k < bytes; k++)
            if (got[k] != want[k])
                fail_msg("trial %d, call %d, %s of %s (D %lld, T %lld, %s): byte %zu of %zu is "
                         "%02x, not %02x",
                         t->number, call, names[i], t->f[i % 2].name, (long long)t->D,
                         (long long)t->T, lm_dtype_name(t->act), k, bytes, (unsigned char)got[k],
                         (unsigned char)want[k]);
        check_guard(got, bytes);
        lm_free(got);
        lm_free(want);
    }
}

static void same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < TRIALS; i++) {
        trial t;
        open_trial(&t, i);
        for (int call = 0; call < CALLS; call++) {
            emu_order((i + call) % 3);
            draw_rows(&t, call);
            on_host(&t);
            on_device(&t);
            compare(&t, call);
        }
        close_trial(&t);
    }
    emu_order(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(same_bits) };
    fill_ranges();
    return cmocka_run_group_tests_name("cuda_kv_write", tests, open_device, close_device);
}
