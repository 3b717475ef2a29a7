/* SPDX-License-Identifier: Apache-2.0 */
/* panels_bf16.c -- panels of weights, from the level on whose products read them. */
#include "kernels/cpu/panels_simd.h"
#include "kernels/cpu/tables.h"

static void some_panels(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int64_t width = c->in[0].dim[1], count = LM_PANEL * width;
    uint16_t *y = c->out[0].data;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        if (c->in[0].dtype == LM_DTYPE_F32)
            panel_of(LM_DTYPE_F32, (const float *)c->in[0].data + i * count, width, y + i * count);
        else
            panel_of(LM_DTYPE_BF16, (const uint16_t *)c->in[0].data + i * count, width,
                     y + i * count);
    _mm_sfence();
}

static void panels(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0] / LM_PANEL, 1, some_panels, (void *)(uintptr_t)c);
}

const lm_kernel lm_panels_bf16_kernels[] = {
    { "panels", LM_DTYPE_F32, LM_CPU_BF16, panels, NULL },
    { "panels", LM_DTYPE_BF16, LM_CPU_BF16, panels, NULL },
    { .op = NULL },
};
