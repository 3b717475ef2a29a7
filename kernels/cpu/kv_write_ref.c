/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write_ref.c -- the definition of writes into coded caches (kernels/kv.h). */
#include "kernels/cpu/kv_write.h"
#include "kernels/cpu/tables.h"

static void write_side(const kvw_side *s, float *x)
{
    for (int64_t j = kvw_coded_end(s, s->used), to, end = kvw_coded_end(s, s->end); j < end;
         j = to) {
        to = (j / s->T + 1) * s->T;
        to = to < end ? to : end;
        if (s->f)
            kvw_encode(s, j, to, x);
        else
            kvw_copy(s, j, to);
    }
    if (s->tail)
        kvw_keep_tail(s);
}

static void kv_write(const lm_call *c)
{
    const lm_attention_attr *a = &((const lm_kv_attr *)c->attr)->attention;
    for (int64_t bk = 0; bk < a->batch * a->kv_heads; bk++)
        for (int values = 0; values < 2; values++) {
            kvw_side s = kvw_side_of(c, bk / a->kv_heads, bk % a->kv_heads, values);
            write_side(&s, c->work);
        }
}

/* A page of one head. */
static size_t kv_write_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)(c->out[KVW_KEYS].dim[2] * c->out[KVW_KEYS].dim[3]) * sizeof(float);
}

const lm_kernel lm_kv_write_ref_kernels[] = {
    { "kv_write", LM_DTYPE_NONE, LM_CPU_REF, kv_write, kv_write_work },
    { 0 },
};
