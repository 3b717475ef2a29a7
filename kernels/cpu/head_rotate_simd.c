/* SPDX-License-Identifier: Apache-2.0 */
/* head_rotate_simd.c -- the rotation of heads (head_turn.h). */
#include <math.h>

#include "kernels/cpu/head_turn.h"
#include "kernels/cpu/tables.h"

LM_INLINE void rotate_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_head_rotate_attr *a = c->attr;
    int64_t D = a->head_dim, P = lm_head_rotate_part(a), block = P & -P,
            size = t == LM_DTYPE_BF16 ? 2 : 4;
    int64_t heads[3] = { a->heads, a->kv_heads, a->kv_heads };
    bool turned[3] = { a->q, a->k, a->v };
    const char *x = (const char *)c->in[0].data + begin * (a->heads + 2 * a->kv_heads) * D * size;
    char *y = (char *)c->out[0].data + (x - (const char *)c->in[0].data);
    vf scale = vf_set((float)(1 / sqrt((double)block)));
    for (int64_t row = begin; row < end; row++)
        for (int part = 0; part < 3; part++) {
            int64_t bytes = heads[part] * D * size;
            for (int64_t h = 0; h < heads[part] && turned[part]; h++) {
                turn_head(t, x + h * D * size, t, y + h * D * size, P, block, scale);
                if (P < D && x != y)
                    memcpy(y + (h * D + P) * size, x + (h * D + P) * size,
                           (size_t)((D - P) * size));
            }
            if (!turned[part] && x != y)
                memcpy(y, x, (size_t)bytes);
            x += bytes;
            y += bytes;
        }
}
VF_TYPED(rotate_rows)

static void head_rotate(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(rotate_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(head_rotate, LM_SIMD)[] = {
    VF_KERNEL("head_rotate", head_rotate, NULL),
    VF_KERNEL_END,
};
