/* SPDX-License-Identifier: Apache-2.0 */
/* names.c -- the list of all tensors of a model, and their orders of elements in GGUF. */
#include "convert/names.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

typedef struct {
    lm_model_tensor *v;
    size_t n, cap;
    lm_err *e;
} list;

static lm_code add(void *ctx, const lm_model_tensor *t)
{
    list *l = ctx;

    if (lm_grow(&l->v, &l->cap, l->n + 1, sizeof *l->v, "list of tensors", l->e))
        return l->e->code;
    l->v[l->n++] = *t;
    return LM_OK;
}

static lm_code make(const lm_config *c, bool ahead, lm_model_tensor **out, size_t *n, lm_err *e)
{
    list l = { .e = e };
    lm_code rc = lm_model_tensors_walk(c, add, &l);

    if (!rc && ahead)
        rc = lm_ahead_tensors_walk(c, add, &l);
    if (rc) {
        lm_free(l.v);
        return rc;
    }
    *out = l.v;
    *n = l.n;
    return LM_OK;
}

lm_code lm_model_tensors_make(const lm_config *c, lm_model_tensor **out, size_t *n, lm_err *e)
{
    return make(c, false, out, n, e);
}

lm_code lm_model_tensors_make_all(const lm_config *c, lm_model_tensor **out, size_t *n, lm_err *e)
{
    return make(c, true, out, n, e);
}

const lm_config *lm_model_tensor_config(const lm_config *c, const lm_model_tensor *s)
{
    const char *stack = c->encoder ? c->encoder->arch->gguf_stack : NULL;
    return stack && !strncmp(s->gguf, stack, strlen(stack)) ? c->encoder : c;
}

void lm_model_tensor_gguf_dim(const lm_model_tensor *s, int64_t dim[2])
{
    bool turn = s->order == LM_ORDER_CONV1D;

    dim[0] = s->dim[turn];
    dim[1] = s->dim[s->ndim == 3 ? 2 : !turn];
}

int lm_model_tensor_gguf_shape(const lm_model_tensor *s, int64_t dim[3])
{
    int64_t matrix[2];
    int n = 0;

    lm_model_tensor_gguf_dim(s, matrix);
    if (s->experts)
        dim[n++] = s->experts;
    if (s->ndim >= 2 && s->part != LM_PART_SHARED_SWITCH)
        dim[n++] = matrix[0];
    dim[n++] = s->ndim >= 2 ? matrix[1] : s->dim[0];
    return n;
}

const char *lm_model_tensor_gguf_split(const lm_model_tensor *s, char out[LM_TENSOR_NAME])
{
    const char *end = strstr(s->gguf, "_exps.");
    int n = end ? (int)(end - s->gguf) : 0;

    snprintf(out, LM_TENSOR_NAME, "%.*s.%" PRId64 ".weight", n < 60 ? n : 60, s->gguf, s->expert);
    return out;
}

const char *lm_model_tensor_gguf_piece(const lm_model_tensor *s, int k, char out[LM_TENSOR_NAME])
{
    const char *comma = strchr(s->gguf, ','), *first = comma, *end = strrchr(s->gguf, '.');
    while (first > s->gguf && first[-1] != '.')
        first--;
    const char *from = k ? comma + 1 : first, *to = k ? end : comma;
    snprintf(out, LM_TENSOR_NAME, "%.*s%.*s%s", (int)(first - s->gguf), s->gguf, (int)(to - from),
             from, end);
    return out;
}

bool lm_model_tensor_moves(const lm_model_tensor *s)
{
    return s->order == LM_ORDER_ROPE || s->order == LM_ORDER_QKV || s->order == LM_ORDER_TILED;
}

/* The row of [I,K,D] whose numbers stand at row r of [K,I,D]. */
static int64_t turned_row(int64_t r, int64_t I, int64_t K, int64_t D)
{
    return (r / D % I * K + r / D / I) * D + r % D;
}

/* The row of [I,K,D], behind the first `lead` rows, whose numbers stand at row r of [K,I,D]. */
static int64_t tiled_row(int64_t r, int64_t lead, int64_t rows, int64_t I, int64_t K)
{
    return r < lead ? r : lead + turned_row(r - lead, I, K, (rows - lead) / (I * K));
}

int64_t lm_model_tensor_hf_col(const lm_model_tensor *s, int64_t k)
{
    return tiled_row(k, 0, s->dim[1], s->groups, s->heads / s->groups);
}

int64_t lm_model_tensor_gguf_col(const lm_model_tensor *s, int64_t k)
{
    return tiled_row(k, 0, s->dim[1], s->heads / s->groups, s->groups);
}

int64_t lm_model_tensor_hf_row(const lm_model_tensor *s, int64_t r)
{
    int64_t d = s->dim[0] / s->heads, head = r / d, i = r % d;

    if (s->order == LM_ORDER_TILED)
        return tiled_row(r, s->lead, s->dim[0], s->groups, s->heads / s->groups);
    if (s->order == LM_ORDER_QKV)
        return turned_row(r, s->heads, 3, d / 3);
    return head * d + (i % 2) * (d / 2) + i / 2;
}

int64_t lm_model_tensor_gguf_row(const lm_model_tensor *s, int64_t r)
{
    int64_t d = s->dim[0] / s->heads, head = r / d, i = r % d;

    if (s->order == LM_ORDER_TILED)
        return tiled_row(r, s->lead, s->dim[0], s->heads / s->groups, s->groups);
    if (s->order == LM_ORDER_QKV)
        return turned_row(r, 3, s->heads, d / 3);
    return head * d + 2 * (i % (d / 2)) + i / (d / 2);
}
