/* SPDX-License-Identifier: Apache-2.0 */
/* Ragged rows and pages of attention_cached (kernels/attention.h) at every level: against the definition, and the same
 * bits for any pages, any cut of prompts, and any company. */
#include "attention_pages_case.h"

static const story stories[] = {
    { 3, { 530, 90, 260 }, 4, 2, 64, 0, 0 }, { 3, { 290, 33, 17 }, 4, 2, 64, 130, 0 },
    { 2, { 280, 75 }, 7, 1, 128, 0, 5 },     { 4, { 40, 110, 1, 70 }, 3, 3, 24, 50, 0 },
    { 2, { 120, 40 }, 2, 1, 80, 0, 0 },      { 2, { 70, 65 }, 2, 2, 256, 20, 0 },
};
enum { STORIES = sizeof stories / sizeof *stories };

static void on_host(instance *x, const lm_kernel *kernel)
{
    run(x, kernel, pool_of(2));
}

static telling begin(const story *s, lm_dtype act, int level, int64_t page)
{
    telling t =
        begin_telling(s, act, lm_cpu_kernel("attention_cached", act, (lm_cpu_level)level), page);
    t.runner = on_host;
    return t;
}

/* The kernels of all levels and types, once each; the slow definition for short stories alone. */
static bool kernel_is(int i, const story *s, lm_dtype *act, int *level)
{
    *act = i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    *level = i / 2;
    const lm_kernel *k = lm_cpu_kernel("attention_cached", *act, (lm_cpu_level)*level);
    return k->level == *level && (*level > 0 || s->length[0] < 150);
}

/* The definition in double, on the numbers of `x`. */
static telling tell_exactly(const telling *x, int64_t tokens)
{
    telling t = begin(x->s, LM_DTYPE_F64, LM_CPU_REF, 0);
    for (int64_t b = 0; b < x->s->batch; b++)
        for (int64_t i = 0; i < lm_tensor_count(&x->qkv[b]); i++)
            lm_set(LM_DTYPE_F64, t.qkv[b].data, i, lm_get(x->act, x->qkv[b].data, i));
    tell_all(&t, tokens, 1, true);
    return t;
}

static void ragged_is_right(void **state)
{
    (void)state;
    for (int i = 0; i < STORIES; i++) {
        telling exact[2] = { 0 };
        for (int k = 0; k < 2 * ((int)lm_cpu_detect() + 1); k++) {
            lm_dtype act;
            int level;
            if (!kernel_is(k, &stories[i], &act, &level))
                continue;
            telling t = begin(&stories[i], act, level, i % 2 ? 16 : 0);
            tell_all(&t, 12, 5 + (uint64_t)i, false);
            if (!exact[k % 2].s)
                exact[k % 2] = tell_exactly(&t, 12);
            check_definition(&t, &exact[k % 2]);
            end_telling(&t);
        }
        end_telling(&exact[0]);
        end_telling(&exact[1]);
    }
}

/* Pages of 16 to 256 positions in any order, and every cut of the prompts, give the bits of caches in one piece. */
static void pages_and_cuts(void **state)
{
    static const int64_t pages[] = { 16, 64, 256 };
    (void)state;
    for (int i = 0; i < STORIES; i++) {
        lm_dtype act;
        int level;
        for (int k = 0; k < 2 * ((int)lm_cpu_detect() + 1); k++) {
            if (!kernel_is(k, &stories[i], &act, &level))
                continue;
            telling whole = begin(&stories[i], act, level, 0);
            tell_all(&whole, 12, 0, true);
            for (int p = 0; p < 3; p++) {
                telling t = begin(&stories[i], act, level, pages[p]);
                tell_all(&t, 12, (uint64_t)(p + 1), p == 2);
                check_same_story(&t, &whole, "pages");
                end_telling(&t);
            }
            end_telling(&whole);
        }
    }
}

/* The same with blocks of keys. */
static void blocks(void **state)
{
    for (int i = 1; i < 3; i++) {
        story_blocks = blocks_at(i);
        ragged_is_right(state);
        pages_and_cuts(state);
    }
    story_blocks = (lm_attention_blocks){ 0 };
}

/* Rows of the same number for all, as without pages; and the bits of a prompt are those of ragged rows. */
static void even_rows(void **state)
{
    static const int64_t seqs[] = { 1, 4, 9, 300 };
    (void)state;
    for (int i = 0; i < 2 * STORIES; i++) {
        const story *s = &stories[i / 2];
        lm_dtype act;
        int level;
        for (int k = 0; k < 2 * ((int)lm_cpu_detect() + 1); k++) {
            if (!kernel_is(k, s, &act, &level))
                continue;
            int64_t seq = seqs[(i + k) % 4];
            telling plain = begin(s, act, level, 0), paged = begin(s, act, level, i % 2 ? 16 : 128),
                    ragged = begin(s, act, level, 0);
            while (memcmp(paged.used,
                          (int32_t[]){ (int32_t)s->length[0], (int32_t)s->length[1],
                                       (int32_t)s->length[2], (int32_t)s->length[3] },
                          sizeof paged.used)) {
                tell_even(&plain, seq);
                tell_even(&paged, seq);
            }
            tell_all(&ragged, seq > 4 ? 0 : s->length[0] + s->length[1] + 999, 3, true);
            check_same_story(&paged, &plain, "rows of one number");
            check_same_story(&ragged, &plain, "ragged rows");
            end_telling(&plain);
            end_telling(&paged);
            end_telling(&ragged);
        }
    }
}

/* A sequence has the same bits in company as alone. */
static void company(void **state)
{
    (void)state;
    for (int i = 0; i < STORIES; i++) {
        lm_dtype act;
        int level;
        for (int k = 0; k < 2 * ((int)lm_cpu_detect() + 1); k++) {
            if (!kernel_is(k, &stories[i], &act, &level))
                continue;
            telling all = begin(&stories[i], act, level, 16);
            tell_all(&all, 20, 9, false);
            for (int64_t b = 0; b < stories[i].batch; b++) {
                story alone = stories[i];
                alone.batch = 1;
                alone.length[0] = stories[i].length[b];
                telling t = begin(&alone, act, level, 64);
                memcpy(t.qkv[0].data, all.qkv[b].data, bytes_of(&t.qkv[0]));
                tell_all(&t, 20, 10, false);
                telling one = all; /* as the only sequence */
                one.s = &alone;
                one.o[0] = all.o[b];
                one.lse[0] = all.lse[b];
                check_same_story(&t, &one, "alone");
                end_telling(&t);
            }
            end_telling(&all);
        }
    }
}

/* Two sequences share the pages of a common beginning. */
static void shared_pages(void **state)
{
    enum { SHARED = 64 };
    static const story two = { 2, { 130, 100 }, 4, 2, 64, 0, 0 };
    const lm_rows_kind kinds[2] = { LM_ROWS_PROMPT, LM_ROWS_PROMPT };
    (void)state;
    for (int k = 0; k < 2 * ((int)lm_cpu_detect() + 1); k++) {
        lm_dtype act;
        int level;
        if (!kernel_is(k, &two, &act, &level))
            continue;
        telling own = begin(&two, act, level, 16), t = begin(&two, act, level, 16);
        memcpy(own.qkv[1].data, own.qkv[0].data, SHARED * row_bytes(&own.qkv[0]));
        memcpy(t.qkv[1].data, own.qkv[1].data, bytes_of(&own.qkv[1]));
        tell_all(&own, 4, 2, true);
        tell_ragged(&t, (int64_t[]){ SHARED, 0 }, kinds);
        for (int p = 0; p < SHARED / 16; p++)
            t.table[t.width + p] = t.table[p];
        t.used[1] = SHARED;
        memcpy(t.o[1].data, own.o[1].data, SHARED * row_bytes(&own.o[1]));
        memcpy(t.lse[1].data, own.lse[1].data, SHARED * row_bytes(&own.lse[1]));
        tell_all(&t, 4, 2, true);
        check_same_story(&t, &own, "shared pages");
        end_telling(&own);
        end_telling(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ragged_is_right), cmocka_unit_test(pages_and_cuts),
        cmocka_unit_test(even_rows),       cmocka_unit_test(company),
        cmocka_unit_test(shared_pages),    cmocka_unit_test(blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
