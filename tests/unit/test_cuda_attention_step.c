/* SPDX-License-Identifier: Apache-2.0 */
/* Decoding attention joined with the norm and the rotation before it (attention_step) on the CUDA
 * backend: the same results as its parts in sequence, and the selection of the block that
 * combines. */
#include "cuda_case.h"
#include "kernels/attention.h"
#include "kernels/cuda/stream.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

enum { N_IN = 7, N_OUT = 3, POSITIONS = 900, QKV = 0, USED, FRESH, POS, TABLE, WQ, WK };

typedef struct {
    int64_t batch, heads, kv_heads, dim, room, window, rotary; /* rotary 0: no rotation */
    bool norm;
} shape;

/* Operands on the host, and the shape that they were made for. */
typedef struct {
    lm_attention_step_attr attr;
    lm_tensor in[N_IN], out[N_OUT];
    lm_dtype act;
} operands;

/* Of all shapes without a window from here on. */
static lm_attention_blocks step_blocks;

/* ---- operands ---- */

static lm_tensor tensor(lm_dtype d, int ndim, int64_t a, int64_t b, int64_t c, int64_t e)
{
    lm_tensor t = { .dtype = d, .ndim = ndim, .dim = { a, b, c, e } };
    t.data = take(bytes_of(&t));
    return t;
}

static void fill_normal(lm_tensor *t, int which)
{
    operand o = { .kind = ACT };
    for (int64_t i = 0; i < lm_tensor_count(t); i++)
        lm_set(t->dtype, t->data, i, value_at(&o, which, i));
}

static void fill_table(lm_tensor *t)
{
    int64_t half = t->dim[1] / 2;
    for (int64_t p = 0; p < t->dim[0]; p++)
        for (int64_t j = 0; j < half; j++) {
            double angle = (double)p * pow(1e4, -(double)j / (double)half);
            lm_set(t->dtype, t->data, p * 2 * half + j, cos(angle));
            lm_set(t->dtype, t->data, p * 2 * half + half + j, sin(angle));
        }
}

/* Lengths of the caches: empty, nearly full, one key before and after the end of a part, and
 * lengths between; every fifth sequence is inactive. */
static void fill_lengths(const shape *s, operands *x)
{
    const int64_t lengths[] = { s->room - 1, 0, 127, 128, s->room / 2, 129, 1, s->room * 2 / 3 };
    for (int64_t b = 0; b < s->batch; b++) {
        int64_t used = lengths[b % 8] < s->room ? lengths[b % 8] : s->room - 1;
        ((int32_t *)x->in[USED].data)[b] = (int32_t)used;
        ((int32_t *)x->in[FRESH].data)[b] = b % 5 != 4;
        ((int32_t *)x->in[POS].data)[b] = (int32_t)((used + b) % POSITIONS);
    }
}

static operands operands_of(const shape *s, lm_dtype act)
{
    const lm_dtype f32 = act == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_F32;
    operands x = { .act = act };
    x.attr.attention = (lm_attention_attr){ .batch = s->batch,
                                            .seq = 1,
                                            .heads = s->heads,
                                            .kv_heads = s->kv_heads,
                                            .head_dim = s->dim,
                                            .window = s->window,
                                            .causal = true,
                                            .scale = 1 / sqrt((double)s->dim) };
    if (!s->window)
        x.attr.attention.blocks = step_blocks;
    x.attr.rotary_dim = s->rotary;
    x.attr.eps = s->norm ? 1e-6 : 0;
    x.in[QKV] = tensor(act, 2, s->batch, (s->heads + 2 * s->kv_heads) * s->dim, 0, 0);
    fill_normal(&x.in[QKV], QKV);
    for (int i = USED; i <= POS; i++)
        x.in[i] = tensor(LM_DTYPE_I32, 1, s->batch, 0, 0, 0);
    fill_lengths(s, &x);
    if (s->rotary) {
        x.in[TABLE] = tensor(f32, 2, POSITIONS, s->rotary, 0, 0);
        fill_table(&x.in[TABLE]);
    }
    for (int i = WQ; s->norm && i <= WK; i++) {
        x.in[i] = tensor(f32, 1, s->dim, 0, 0, 0);
        fill_normal(&x.in[i], i);
    }
    x.out[0] = tensor(act, 2, s->batch, s->heads * s->dim, 0, 0);
    for (int i = 0; i < N_OUT; i++) {
        if (i)
            x.out[i] = tensor(act, 4, s->batch, s->kv_heads, s->room, s->dim);
        fill_normal(&x.out[i], 10 + i);
    }
    return x;
}

static void let_go(operands *x)
{
    for (int i = 0; i < N_IN; i++)
        lm_free(x->in[i].data);
    for (int i = 0; i < N_OUT; i++)
        lm_free(x->out[i].data);
}

/* The same numbers in double, for the definition. */
static operands in_double(const operands *x)
{
    operands y = *x;
    y.act = LM_DTYPE_F64;
    for (int i = 0; i < N_IN + N_OUT; i++) {
        const lm_tensor *from = i < N_IN ? &x->in[i] : &x->out[i - N_IN];
        lm_tensor *to = i < N_IN ? &y.in[i] : &y.out[i - N_IN];
        if (!from->data)
            continue;
        to->dtype = lm_dtype_is_float(from->dtype) ? LM_DTYPE_F64 : from->dtype;
        to->data = take(bytes_of(to));
        for (int64_t k = 0; k < lm_tensor_count(from); k++)
            lm_set(to->dtype, to->data, k, lm_get(from->dtype, from->data, k));
    }
    return y;
}

/* ---- on the device ---- */

/* Operands on the device, and scratch. */
typedef struct {
    operands x;
    void *work;
    size_t bytes;
} guest;

static guest send(const operands *x)
{
    guest d = { .x = *x };
    for (int i = 0; i < N_IN; i++)
        if (x->in[i].data)
            d.x.in[i].data = device_twin(x->in[i].data, bytes_of(&x->in[i]), 0);
    for (int i = 0; i < N_OUT; i++)
        d.x.out[i].data = device_twin(x->out[i].data, bytes_of(&x->out[i]) + GUARD, 0);
    lm_call c = { .attr = &d.x.attr, .in = d.x.in, .n_in = N_IN, .out = d.x.out, .n_out = N_OUT };
    d.bytes = device_kernel("attention_step", x->act)->work(&c, device->threads);
    void *junk = take(d.bytes);
    memset(junk, 0xff, d.bytes); /* kernels must not rely on scratch */
    d.work = device_twin(junk, d.bytes + GUARD, 0);
    lm_free(junk);
    return d;
}

/* Copy the results to the memory of x. */
static void fetch(operands *x, const guest *d)
{
    unsigned char guard[GUARD];
    for (int i = 0; i < N_OUT; i++) {
        device_copy(x->out[i].data, d->x.out[i].data, bytes_of(&x->out[i]) + GUARD);
        for (int g = 0; g < GUARD; g++)
            assert_int_equal(((unsigned char *)x->out[i].data)[bytes_of(&x->out[i]) + (size_t)g],
                             0x5a);
    }
    device_copy(guard, (char *)d->work + d->bytes, GUARD);
    for (int g = 0; g < GUARD; g++)
        assert_int_equal(guard[g], 0x5a);
}

static void take_leave(guest *d)
{
    for (int i = 0; i < N_IN; i++)
        if (d->x.in[i].data)
            device_drop(d->x.in[i].data, bytes_of(&d->x.in[i]), 0);
    for (int i = 0; i < N_OUT; i++)
        device_drop(d->x.out[i].data, bytes_of(&d->x.out[i]) + GUARD, 0);
    device_drop(d->work, d->bytes + GUARD, 0);
}

static void put(const guest *d, const char *op, const void *attr, const lm_tensor *in, int n_in,
                lm_tensor *out, int n_out)
{
    const lm_step step = { 0 };
    lm_call c = { .attr = attr,
                  .in = in,
                  .n_in = n_in,
                  .out = out,
                  .n_out = n_out,
                  .work = d->work,
                  .stream = device->main,
                  .step = &step };
    device_kernel(op, d->x.act)->run(&c);
}

static void put_step(guest *d)
{
    put(d, "attention_step", &d->x.attr, d->x.in, N_IN, d->x.out, N_OUT);
}

/* head_norm, rope and attention_cached, with their intermediate results in memory. */
static void put_parts(guest *d)
{
    const lm_attention_attr *a = &d->x.attr.attention;
    const lm_head_norm_attr norm = { a->heads,      a->kv_heads,  a->head_dim,
                                     d->x.attr.eps, LM_ACC_FIRST, false };
    const lm_rope_attr rope = { a->heads, a->kv_heads, a->head_dim, d->x.attr.rotary_dim, false };
    lm_tensor qkv = d->x.in[QKV],
              stat = tensor(LM_DTYPE_F32, 2, a->batch, a->heads + a->kv_heads, 0, 0);
    void *host = stat.data;
    size_t bytes = bytes_of(&qkv), stat_bytes = bytes_of(&stat);
    stat.data = device_twin(host, stat_bytes, 0);
    void *junk = take(bytes);
    qkv.data = device_twin(junk, bytes, 0);
    lm_free(junk);
    lm_free(host);

    lm_tensor now = d->x.in[QKV];
    if (d->x.in[WQ].data) {
        lm_tensor in[3] = { now, d->x.in[WQ], d->x.in[WK] }, out[2] = { qkv, stat };
        put(d, "head_norm", &norm, in, 3, out, 2);
        now = qkv;
    }
    if (d->x.in[TABLE].data) {
        lm_tensor in[3] = { now, d->x.in[POS], d->x.in[TABLE] }, out[1] = { qkv };
        put(d, "rope", &rope, in, 3, out, 1);
        now = qkv;
    }
    lm_tensor in[3] = { now, d->x.in[USED], d->x.in[FRESH] };
    put(d, "attention_cached", a, in, 3, d->x.out, N_OUT);
    lm_err e = { 0 };
    device_must(device->sync(device, NULL, &e), &e);
    device_drop(qkv.data, bytes, 0);
    device_drop(stat.data, stat_bytes, 0);
}

/* Every ticket counter of the stream is reset to its initial value. */
static void check_tickets(void)
{
    static unsigned tickets[LM_CUDA_TICKETS];
    device_copy(tickets, device->main->tickets, sizeof tickets);
    for (int i = 0; i < LM_CUDA_TICKETS; i++)
        if (tickets[i])
            fail_msg("ticket %d is %u afterwards", i, tickets[i]);
}

/* Run the step on the operands, in their memory, `runs` times; repeated runs give the same
 * result. */
static void run_step(operands *x, int runs)
{
    guest d = send(x);
    for (int i = 0; i < runs; i++)
        put_step(&d);
    fetch(x, &d);
    take_leave(&d);
    check_tickets();
}

/* ---- comparing ---- */

static void check_same(const operands *x, const operands *y, const char *what)
{
    for (int i = 0; i < N_OUT; i++)
        if (memcmp(x->out[i].data, y->out[i].data, bytes_of(&x->out[i])))
            fail_msg("%s: other bits of output %d (relative error %.3g)", what, i,
                     distance(&x->out[i], &y->out[i]));
}

/* As check_same.  On a real device the compiler may contract other products in the joined kernel
 * than in its parts, so the last digit may differ there. */
static void check_alike(const operands *x, const operands *y, const char *what)
{
    double tol = x->act == LM_DTYPE_F32 ? 2e-6 : 1e-2;
    if (!cuda_is_real())
        check_same(x, y, what);
    for (int i = 0; i < N_OUT; i++)
        assert_true(distance(&x->out[i], &y->out[i]) <= tol);
}

static void check_definition(const operands *got, operands *x, const char *what)
{
    double tol = x->act == LM_DTYPE_F32 ? 2e-6 : 1e-2;
    operands want = in_double(x);
    const lm_kernel *ref = lm_cpu_kernel("attention_step", LM_DTYPE_F64, LM_CPU_REF);
    lm_call c = {
        .attr = &want.attr, .in = want.in, .n_in = N_IN, .out = want.out, .n_out = N_OUT
    };
    c.work = take(ref->work(&c, 1));
    ref->run(&c);
    for (int i = 0; i < N_OUT; i++) {
        double d = distance(&got->out[i], &want.out[i]);
        if (!(d <= tol))
            fail_msg("%s %s: output %d: relative error %.3g, allowed %.3g", what,
                     lm_dtype_name(x->act), i, d, tol);
    }
    lm_free(c.work);
    let_go(&want);
}

/* Inactive rows: zeros, and unchanged caches. */
static void check_rest(const operands *got, const operands *before)
{
    const lm_attention_attr *a = &got->attr.attention;
    size_t row = bytes_of(&got->out[0]) / (size_t)a->batch;
    size_t cache = bytes_of(&got->out[1]) / (size_t)a->batch;
    for (int64_t b = 0; b < a->batch; b++) {
        if (((int32_t *)got->in[FRESH].data)[b])
            continue;
        const char *o = (char *)got->out[0].data + (size_t)b * row;
        for (size_t i = 0; i < row; i++)
            assert_int_equal(o[i], 0);
        for (int i = 1; i < N_OUT; i++)
            assert_memory_equal((char *)got->out[i].data + (size_t)b * cache,
                                (char *)before->out[i].data + (size_t)b * cache, cache);
    }
}

/* ---- shapes ---- */

static const shape shapes[] = {
    /* B, H, K, D, S, window, R, norm */
    { 3, 1, 1, 64, 1, 0, 64, true },      { 5, 2, 1, 64, 300, 0, 64, true },
    { 2, 3, 1, 80, 260, 0, 80, true },    { 2, 4, 1, 96, 400, 0, 96, false },
    { 3, 10, 2, 128, 385, 0, 128, true }, { 2, 6, 1, 128, 300, 0, 64, true },
    { 2, 7, 1, 64, 270, 100, 32, false }, { 3, 8, 1, 64, 520, 140, 64, true },
    { 2, 9, 1, 64, 300, 0, 64, true },    { 2, 17, 1, 16, 300, 0, 16, true },
    { 3, 2, 2, 256, 300, 0, 256, true },  { 2, 4, 2, 256, 270, 0, 128, true },
    { 2, 2, 1, 7, 300, 0, 6, true },      { 6, 4, 2, 33, 140, 0, 32, true },
    { 3, 2, 2, 8, 700, 3, 8, true },      { 8, 3, 3, 24, 700, 0, 24, true },
    { 3, 4, 2, 40, 300, 1, 20, true },    { 2, 2, 1, 320, 300, 0, 320, true },
    { 5, 4, 2, 64, 300, 0, 0, true },     { 5, 4, 2, 64, 300, 0, 0, false },
    { 1, 2, 1, 1, 800, 0, 0, true },      { 2, 5, 1, 2, 300, 129, 2, true },
    { 5, 2, 1, 8, 6700, 0, 8, true },     { 3, 9, 1, 8, 8500, 4300, 8, false },
    { 1, 1, 1, 3, 4097, 0, 0, false },    { 2, 3, 1, 8, 9000, 4096, 0, false },
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void describe(char *to, size_t room, const shape *s)
{
    snprintf(to, room, "B %d, H %d, K %d, D %d, S %d, window %d, R %d, norm %d", (int)s->batch,
             (int)s->heads, (int)s->kv_heads, (int)s->dim, (int)s->room, (int)s->window,
             (int)s->rotary, s->norm);
}

/* The joined form against its parts in sequence, and against the definition. */
static void test_parts(void **state)
{
    static const lm_dtype acts[] = { LM_DTYPE_BF16, LM_DTYPE_F32, LM_DTYPE_F16 };
    (void)state;
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        const shape *s = &shapes[i / 2];
        lm_dtype act = acts[(i / 2 + i % 2) % 3];
        char what[128];
        describe(what, sizeof what, s);
        operands before = operands_of(s, act), one = operands_of(s, act), by = operands_of(s, act);
        run_step(&one, 1);
        guest d = send(&by);
        put_parts(&d);
        fetch(&by, &d);
        take_leave(&d);
        check_alike(&one, &by, what);
        check_definition(&one, &before, what);
        check_rest(&one, &before);
        let_go(&before);
        let_go(&one);
        let_go(&by);
    }
}

/* The same bits for any order of blocks, and any number of runs. */
static void test_orders(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i += 3) {
        operands first = operands_of(&shapes[i], LM_DTYPE_BF16);
        char what[128];
        describe(what, sizeof what, &shapes[i]);
        run_step(&first, 1);
        for (int order = 0; order < emu_order(order); order++) {
            operands x = operands_of(&shapes[i], LM_DTYPE_BF16);
            run_step(&x, 2);
            check_same(&x, &first, what);
            let_go(&x);
        }
        emu_order(0);
        let_go(&first);
    }
}

/* The same with blocks of keys, of which parts of a cache show none. */
static void test_blocks(void **state)
{
    step_blocks = (lm_attention_blocks){ .size = 48, .local = 2, .stride = 9 };
    test_parts(state);
    test_orders(state);
    step_blocks = (lm_attention_blocks){ .size = 16, .local = 1, .global = 1 };
    test_parts(state);
    step_blocks = (lm_attention_blocks){ 0 };
}

/* ---- joining ---- */

static uint64_t launches(void)
{
    void (*counts)(uint64_t *, uint64_t *) = NULL;
    uint64_t kernels = 0, switches;
    *(void **)&counts = emu_symbol("lm_emu_counts");
    if (counts)
        counts(&kernels, &switches);
    return kernels;
}

/* A block that computes several parts, some of the same head, must not wait for its own parts. */
static void test_few_blocks(void **state)
{
    const shape s = { 2, 4, 2, 16, 5000, 0, 16, true };
    int sms = device->main->sms;
    operands before = operands_of(&s, LM_DTYPE_BF16);
    operands many = operands_of(&s, LM_DTYPE_BF16), few = operands_of(&s, LM_DTYPE_BF16);
    (void)state;
    run_step(&many, 1);
    check_definition(&many, &before, "many blocks");
    device->main->sms = 1; /* fewer blocks than a head has parts */
    run_step(&few, 1);
    device->main->sms = sms;
    check_same(&few, &many, "few blocks");
    let_go(&before);
    let_go(&many);
    let_go(&few);
}

/* So many keys that parts are combined on two levels: in one launch, or, if there are too few
 * tickets, in two launches with the same bits. */
static void test_long_cache(void **state)
{
    const shape s = { 1, 2, 2, 1, 131072 + 700, 0, 0, false };
    operands before = operands_of(&s, LM_DTYPE_F32);
    operands one = operands_of(&s, LM_DTYPE_F32), two = operands_of(&s, LM_DTYPE_F32);
    unsigned *tickets = device->main->tickets;
    uint64_t ran[3];
    (void)state;
    ran[0] = launches();
    run_step(&one, 1);
    ran[1] = launches();
    check_definition(&one, &before, "a long cache");
    device->main->tickets = NULL;
    guest d = send(&two);
    put_step(&d);
    fetch(&two, &d);
    take_leave(&d);
    device->main->tickets = tickets;
    ran[2] = launches();
    check_same(&two, &one, "without tickets");
    if (!cuda_is_real()) {
        assert_int_equal(ran[1] - ran[0], 1);
        assert_int_equal(ran[2] - ran[1], 2);
    }
    let_go(&before);
    let_go(&one);
    let_go(&two);
}

/* One launch for as many heads as there are tickets; for more heads two launches with the same
 * bits. */
static void test_tickets(void **state)
{
    const shape some = { LM_CUDA_TICKETS / 2, 2, 2, 8, 260, 0, 8, true };
    shape more = some;
    uint64_t ran[3];
    (void)state;
    more.batch++;
    operands x = operands_of(&some, LM_DTYPE_BF16), y = operands_of(&more, LM_DTYPE_BF16);
    for (int64_t i = 0; i < 2; i++) /* most sequences are short */
        for (int64_t b = 40; b < some.batch - 8 + i * 9; b++)
            ((int32_t *)(i ? y : x).in[USED].data)[b] = (int32_t)b % 3;
    for (int i = 1; i < N_OUT; i++) /* the caches of one are the beginning of the other's */
        assert_memory_equal(x.out[i].data, y.out[i].data, bytes_of(&x.out[i]));
    memcpy(y.in[USED].data, x.in[USED].data, bytes_of(&x.in[USED]));
    ran[0] = launches();
    run_step(&x, 1);
    ran[1] = launches();
    run_step(&y, 1);
    ran[2] = launches();
    if (!cuda_is_real()) {
        assert_int_equal(ran[1] - ran[0], 1);
        assert_int_equal(ran[2] - ran[1], 2);
    }
    for (int i = 0; i < N_OUT; i++)
        assert_memory_equal(x.out[i].data, y.out[i].data, bytes_of(&x.out[i]));
    let_go(&x);
    let_go(&y);
}

/* A recording reads the current lengths of the caches: each replay gives the token of a single
 * run. */
static void test_replay(void **state)
{
    const shape s = { 4, 4, 1, 32, 400, 0, 32, true };
    operands x = operands_of(&s, LM_DTYPE_BF16), y = operands_of(&s, LM_DTYPE_BF16);
    guest d[2] = { send(&x), send(&y) };
    lm_recording *r = NULL;
    lm_err e = { 0 };
    (void)state;
    device_must(device->record_begin(device, device->main, &e), &e);
    put_step(&d[0]);
    device_must(device->record_end(device, device->main, &r, &e), &e);
    for (int i = 0; i < 4; i++) {
        int32_t used[4] = { 126 + i, 255 + i, i, 396 + i }, fresh[4] = { 1, i != 2, i > 0, 1 };
        for (int k = 0; k < 2; k++) {
            device_copy(d[k].x.in[USED].data, used, sizeof used);
            device_copy(d[k].x.in[POS].data, used, sizeof used);
            device_copy(d[k].x.in[FRESH].data, fresh, sizeof fresh);
        }
        device_must(device->replay(device, r, device->main, &e), &e);
        put_step(&d[1]);
        fetch(&x, &d[0]);
        fetch(&y, &d[1]);
        check_same(&x, &y, "a replay");
        check_tickets();
    }
    device->recording_free(device, r);
    for (int k = 0; k < 2; k++)
        take_leave(&d[k]);
    let_go(&x);
    let_go(&y);
}

/* Heads that do not fit into shared memory are refused. */
static void test_too_wide(void **state)
{
    (void)state;
    for (int wide = 0; wide < 2; wide++) {
        lm_attention_step_attr a = { .attention = {
                                         .batch = 1, .seq = 1, .heads = 1, .kv_heads = 1 } };
        lm_tensor in[N_IN] = { { .dtype = LM_DTYPE_F32 } },
                  out[N_OUT] = { { .dtype = LM_DTYPE_F32 } };
        lm_call c = { .attr = &a, .in = in, .n_in = N_IN, .out = out, .n_out = N_OUT };
        a.attention.head_dim = wide ? 3040 : 3000;
        out[1] = (lm_tensor){ .ndim = 4, .dim = { 1, 1, 64, a.attention.head_dim } };
        assert_int_equal(device_kernel("attention_step", LM_DTYPE_F32)->work(&c, 1) == SIZE_MAX,
                         wide);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts),      cmocka_unit_test(test_orders),
        cmocka_unit_test(test_few_blocks), cmocka_unit_test(test_tickets),
        cmocka_unit_test(test_replay),     cmocka_unit_test(test_too_wide),
        cmocka_unit_test(test_long_cache), cmocka_unit_test(test_blocks),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
