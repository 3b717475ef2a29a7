/* SPDX-License-Identifier: Apache-2.0 */
/* part_order.c -- the rows of keys or values in another order: files have them in the order of the text, caches in which
 * new tokens replace others do not. */
#include <string.h>

#include "kv/part.h"

static void move_rows(int64_t rows, size_t each, const int32_t *order, bool back, const char *from,
                      char *to)
{
    for (int64_t i = 0; i < rows; i++) {
        size_t a = (size_t)(back ? i : order[i]) * each, b = (size_t)(back ? order[i] : i) * each;
        memcpy(to + b, from + a, each);
    }
}

lm_code lm_kv_part_reorder(const lm_kv_shape *s, const lm_kv_part *from, const int32_t *order,
                           bool back, const lm_kv_part *to, lm_err *e)
{
    for (int i = 0; i < LM_KV_SECTIONS; i++) {
        lm_kv_section_size z;
        if (lm_kv_section_size_of(s, (lm_kv_section)i, &z, e))
            return e->code;
        if (!z.bytes)
            continue;
        if (z.ndim < 2 || z.dim[0] != s->kv_heads || z.dim[1] != s->n)
            return lm_fail(e, LM_EUSAGE, s->form->format ? s->form->format->name : "", NULL,
                           "its rows cannot be put in another order");
        size_t head = z.bytes / (size_t)s->kv_heads;
        for (int64_t h = 0; h < s->kv_heads; h++)
            move_rows(s->n, head / (size_t)s->n, order + h * s->n, back,
                      (const char *)from->data[i] + (size_t)h * head,
                      (char *)to->data[i] + (size_t)h * head);
    }
    return LM_OK;
}
