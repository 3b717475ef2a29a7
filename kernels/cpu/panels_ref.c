/* SPDX-License-Identifier: Apache-2.0 */
/* panels_ref.c -- the definition of the panels family (kernels/panels.h). */
#include "kernels/panels.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void panels(const lm_call *c)
{
    const lm_tensor *x = &c->in[0];
    int64_t width = x->dim[1];
    for (int64_t i = 0; i < lm_tensor_count(x); i++)
        set(&c->out[0], lm_panel_at(i / width, i % width, width), get(x, i));
}

const lm_kernel lm_panels_ref_kernels[] = {
    { "panels", LM_DTYPE_NONE, LM_CPU_REF, panels, NULL },
    { .op = NULL },
};
