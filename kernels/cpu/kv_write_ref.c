/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write_ref.c -- the definition of writes into coded caches (kernels/kv.h). */
#include "kernels/cpu/kv_write.h"
#include "kernels/cpu/tables.h"

static void encode_tokens(const kvw_side *s, int64_t from, int64_t to, float *x)
{
    for (int64_t j = from, end; j < to; j = end) {
        end = (j / s->T + 1) * s->T;
        end = end < to ? end : to;
        if (s->f)
            kvw_encode(s, j, end, x);
        else
            kvw_copy(s, j, end);
    }
}

static void write_side(const lm_call *c, const kvw_side *s, float *x)
{
    if (!kvw_has_rows(c))
        encode_tokens(s, kvw_coded_end(s, s->used), kvw_coded_end(s, s->end), x);
    for (int64_t i = 0; kvw_has_rows(c) && i < s->end - s->used; i++) {
        kvw_side one = kvw_one_row(c, s, i);
        encode_tokens(&one, one.used, one.end, x);
    }
    if (s->tail)
        kvw_keep_tail(s);
}

static void kv_write(const lm_call *c)
{
    const lm_attention_attr *a = &((const lm_kv_attr *)c->attr)->attention;
    float *ranges = c->work, *x = ranges + 2 * c->in[KVW_QKV].dim[0];
    for (int64_t n = 0; kvw_has_ranges(c) && n < c->in[KVW_QKV].dim[0]; n++)
        kvw_range_at(c, n, x, ranges);
    for (int64_t bk = 0; bk < a->batch * a->kv_heads; bk++)
        for (int values = 0; values < 2; values++) {
            kvw_side s = kvw_side_of(c, bk / a->kv_heads, bk % a->kv_heads, values);
            if (values && kvw_has_ranges(c))
                kvw_use_ranges(&s, ranges);
            write_side(c, &s, x);
        }
}

/* Ranges of rows; a page of one head, or a token of all. */
static size_t kv_write_work(const lm_call *c, int threads)
{
    const int64_t *dim = c->out[KVW_KEYS].dim;
    int64_t page = dim[2] * kvw_widest(c), token = 2 * dim[1] * dim[3];
    (void)threads;
    return (size_t)(2 * c->in[KVW_QKV].dim[0] + (page > token ? page : token)) * sizeof(float);
}

const lm_kernel lm_kv_write_ref_kernels[] = {
    { "kv_write", LM_DTYPE_NONE, LM_CPU_REF, kv_write, kv_write_work },
    { 0 },
};
