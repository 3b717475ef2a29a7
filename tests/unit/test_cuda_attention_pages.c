/* SPDX-License-Identifier: Apache-2.0 */
/* Ragged rows and pages of attention_cached on the CUDA backend, on the plain and on the tensor-core path: against the
 * definition, and the same bits for any pages, any cut of prompts, and any order of blocks. */
#include "cuda_case.h"

#include "attention_pages_case.h"

static lm_backend *plain, *tensor;
static int shift; /* of the operands, in elements: an odd one allows no wide accesses */

static void on_device(instance *x, const lm_kernel *kernel)
{
    lm_step step = { 0 };
    x->call.step = &step;
    run_on_device(x, kernel, shift);
}

/* F32, BF16 and F16 on the plain path, BF16 on the other. */
enum { PATHS = 4 };

static telling begin(const story *s, int path, int64_t page)
{
    static const lm_dtype acts[PATHS] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16,
                                          LM_DTYPE_BF16 };
    device = path == 3 ? tensor : plain;
    telling t = begin_telling(s, acts[path], device_kernel("attention_cached", acts[path]), page);
    t.runner = on_device;
    return t;
}

static void on_host(instance *x, const lm_kernel *kernel)
{
    run(x, kernel, NULL);
}

static void compare_with_definition(const telling *t, int64_t tokens)
{
    telling exact = begin_telling(t->s, LM_DTYPE_F64,
                                  lm_cpu_kernel("attention_cached", LM_DTYPE_F64, LM_CPU_REF), 0);
    exact.runner = on_host;
    for (int64_t b = 0; b < t->s->batch; b++)
        for (int64_t i = 0; i < lm_tensor_count(&t->qkv[b]); i++)
            lm_set(LM_DTYPE_F64, exact.qkv[b].data, i, lm_get(t->act, t->qkv[b].data, i));
    tell_all(&exact, tokens, 1, true);
    check_definition(t, &exact);
    end_telling(&exact);
}

static const story some[] = {
    { 3, { 150, 70, 40 }, 4, 2, 64, 0, 0 }, { 2, { 170, 33 }, 4, 2, 64, 60, 0 },
    { 2, { 140, 20 }, 7, 1, 128, 0, 5 },    { 3, { 40, 1, 70 }, 3, 3, 24, 30, 0 },
    { 2, { 60, 18 }, 9, 1, 80, 0, 0 },      { 2, { 50, 35 }, 2, 2, 256, 20, 0 },
    { 2, { 40, 21 }, 3, 1, 264, 0, 0 },     { 2, { 19, 9 }, 2, 1, 1024, 12, 5 },
};
enum { SOME = sizeof some / sizeof *some };

static void ragged_and_pages(void **state)
{
    (void)state;
    for (int i = 0; i < SOME * PATHS; i++) {
        const story *s = &some[i / PATHS];
        shift = i % 5 == 4;
        telling whole = begin(s, i % PATHS, 0);
        tell_all(&whole, 5, 0, true);
        compare_with_definition(&whole, 5);
        for (int p = 0; p < 3; p++) {
            emu_order(p);
            telling t = begin(s, i % PATHS, p == 2 ? 64 : 16);
            tell_all(&t, 5, (uint64_t)(p + 1), p == 2);
            check_same_story(&t, &whole, "pages");
            end_telling(&t);
        }
        emu_order(0);
        end_telling(&whole);
    }
    shift = 0;
}

/* The same with blocks of keys. */
static void blocks(void **state)
{
    for (int i = 1; i < 3; i++) {
        story_blocks = blocks_at(i);
        ragged_and_pages(state);
    }
    story_blocks = (lm_attention_blocks){ 0 };
}

/* Rows of the same number for all: pages give the bits of one piece. */
static void even_rows(void **state)
{
    static const int64_t seqs[] = { 60, 9, 200, 1 };
    (void)state;
    for (int i = 0; i < SOME * PATHS; i++) {
        const story *s = &some[i / PATHS];
        int64_t seq = seqs[(i + i / PATHS) % 4];
        telling one = begin(s, i % PATHS, 0), t = begin(s, i % PATHS, 16);
        while (one.used[0] < s->length[0] || one.used[1] < s->length[1] ||
               one.used[2] < s->length[2]) {
            tell_even(&one, seq);
            tell_even(&t, seq);
        }
        check_same_story(&t, &one, "rows of one number");
        compare_with_definition(&t, seq == 1 ? 999 : 0);
        end_telling(&one);
        end_telling(&t);
    }
}

/* Without lse, caches in one piece run the kernels of graphs without ragged rows and pages: the same bits. */
static void without_statistics(void **state)
{
    (void)state;
    for (int i = 0; i < SOME * PATHS; i++) {
        const story *s = &some[i / PATHS];
        int64_t seq = i % 2 ? 80 : 1;
        telling t = begin(s, i % PATHS, 0);
        lm_attention_attr a;
        instance x, y;
        for (int k = 0; k < 2; k++) {
            instance *z = k ? &y : &x;
            step_call(&t, &a, z, seq, s->batch * seq);
            for (int64_t b = 0; b < s->batch; b++) {
                t.used[b] = (int32_t)(s->length[b] / 3);
                copy_fresh(&t, z, b, b * seq, s->length[b] / 3 < seq ? s->length[b] / 3 : seq);
            }
            lm_tensor lse = z->out[3];
            if (k)
                z->out[3] = (lm_tensor){ 0 };
            on_device(z, t.kernel);
            z->out[3] = lse;
        }
        assert_memory_equal(x.out[0].data, y.out[0].data, bytes_of(&x.out[0]));
        end_step(&x);
        end_step(&y);
        end_telling(&t);
    }
}

static int open_devices(void **state)
{
    (void)state;
    lm_err e = { 0 };
    device_must(cuda_open("plain", true, &plain, &e), &e);
    device_must(cuda_open("tensor", true, &tensor, &e), &e);
    return 0;
}

static int close_devices(void **state)
{
    (void)state;
    lm_backend_close(tensor);
    lm_backend_close(plain);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ragged_and_pages),
        cmocka_unit_test(blocks),
        cmocka_unit_test(even_rows),
        cmocka_unit_test(without_statistics),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
