/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_write.c -- plans a GGUF file and writes it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/gguf.h"

struct lm_gguf_plan {
    lm_buf pairs; /* dimensions in the order of the file */
    uint64_t n_pairs;
    lm_arena *arena; /* names */
    lm_gguf_tensor *tensor;
    size_t n, cap;
    uint64_t end; /* of the tensors so far, aligned */
    lm_err *err;
    lm_code rc;
};

lm_code lm_gguf_plan_new(lm_gguf_plan **out, lm_err *e)
{
    lm_gguf_plan *p = NULL;
    lm_code rc = lm_alloc_n(&p, 1, sizeof *p, "plan of a GGUF file", e);

    *out = NULL;
    if (rc)
        return rc;
    p->err = e;
    if ((rc = lm_arena_new(&p->arena, 1 << 16, e))) {
        lm_free(p);
        return rc;
    }
    *out = p;
    return LM_OK;
}

void lm_gguf_plan_free(lm_gguf_plan *p)
{
    if (!p)
        return;
    lm_buf_fini(&p->pairs);
    lm_arena_free(p->arena);
    lm_free(p->tensor);
    lm_free(p);
}

/* ---- Pairs ---- */

static void raw(lm_gguf_plan *p, const void *data, size_t bytes)
{
    if (!p->rc && bytes)
        p->rc = lm_buf_add(&p->pairs, data, bytes, p->err);
}

static void num(lm_gguf_plan *p, uint64_t v, int bytes)
{
    uint8_t b[8];
    for (int i = 0; i < bytes; i++)
        b[i] = (uint8_t)(v >> 8 * i);
    raw(p, b, (size_t)bytes);
}

static void text(lm_gguf_plan *p, const char *s, size_t len)
{
    num(p, len, 8);
    raw(p, s, len);
}

static void key(lm_gguf_plan *p, const char *name, lm_gguf_kind kind)
{
    text(p, name, strlen(name));
    num(p, kind, 4);
    p->n_pairs++;
}

static void array(lm_gguf_plan *p, const char *name, lm_gguf_kind kind, size_t n)
{
    key(p, name, LM_GGUF_ARRAY);
    num(p, kind, 4);
    num(p, n, 8);
}

static uint32_t bits(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    return u;
}

void lm_gguf_put_u32(lm_gguf_plan *p, const char *name, uint32_t v)
{
    key(p, name, LM_GGUF_U32);
    num(p, v, 4);
}

void lm_gguf_put_f32(lm_gguf_plan *p, const char *name, float v)
{
    key(p, name, LM_GGUF_F32);
    num(p, bits(v), 4);
}

void lm_gguf_put_bool(lm_gguf_plan *p, const char *name, bool v)
{
    key(p, name, LM_GGUF_BOOL);
    num(p, v, 1);
}

void lm_gguf_put_str(lm_gguf_plan *p, const char *name, const char *s, size_t len)
{
    key(p, name, LM_GGUF_STRING);
    text(p, s, len);
}

void lm_gguf_put_strs(lm_gguf_plan *p, const char *name, const lm_gguf_text *v, size_t n)
{
    array(p, name, LM_GGUF_STRING, n);
    for (size_t i = 0; i < n; i++)
        text(p, v[i].text, v[i].len);
}

void lm_gguf_put_u8s(lm_gguf_plan *p, const char *name, const void *v, size_t n)
{
    array(p, name, LM_GGUF_U8, n);
    raw(p, v, n);
}

void lm_gguf_put_i32s(lm_gguf_plan *p, const char *name, const int32_t *v, size_t n)
{
    array(p, name, LM_GGUF_I32, n);
    for (size_t i = 0; i < n; i++)
        num(p, (uint32_t)v[i], 4);
}

void lm_gguf_put_bools(lm_gguf_plan *p, const char *name, const bool *v, size_t n)
{
    array(p, name, LM_GGUF_BOOL, n);
    for (size_t i = 0; i < n; i++)
        num(p, v[i], 1);
}

void lm_gguf_put_f32s(lm_gguf_plan *p, const char *name, const float *v, size_t n)
{
    array(p, name, LM_GGUF_F32, n);
    for (size_t i = 0; i < n; i++)
        num(p, bits(v[i]), 4);
}

/* ---- Tensors ---- */

static lm_code check_shape(const char *name, const lm_format *f, lm_gguf_tensor *t, lm_err *e)
{
    lm_tensor_size size;

    if (!f)
        return lm_fail(e, LM_EUSAGE, name, NULL, "type %" PRIu32 " is unknown", t->type);
    if (strlen(name) > LM_GGUF_MAX_NAME)
        return lm_fail(e, LM_EUSAGE, name, NULL, "the name is longer than %d bytes",
                       LM_GGUF_MAX_NAME);
    if (t->ndim < 1 || t->ndim > LM_GGUF_MAX_DIMS)
        return lm_fail(e, LM_EUSAGE, name, NULL, "%d dimension%s, 1 to %d are allowed", t->ndim,
                       lm_plural(t->ndim), LM_GGUF_MAX_DIMS);
    t->count = 1;
    for (int i = 0; i < t->ndim; i++)
        if (t->dim[i] < 1 || !lm_mul_i64_ok(t->count, t->dim[i], &t->count))
            return lm_fail(e, LM_EUSAGE, name, NULL, "a dimension is 0, or all are too large");
    if (t->dim[t->ndim - 1] % lm_format_group(f))
        return lm_fail(e, LM_EUSAGE, name, NULL,
                       "rows of %" PRId64 " numbers, %s needs a multiple of %d",
                       t->dim[t->ndim - 1], f->name, lm_format_group(f));
    if (lm_tensor_bytes(f, t->ndim, t->dim, &size, NULL) || size.all > INT64_MAX / 2)
        return lm_fail(e, LM_ELIMIT, name, NULL, "too many bytes");
    t->bytes = size.all;
    return LM_OK;
}

void lm_gguf_put_tensor(lm_gguf_plan *p, const char *name, uint32_t type, int ndim,
                        const int64_t *dim)
{
    lm_gguf_tensor t = { .type = type, .ndim = ndim, .offset = p->end };
    char *copy = NULL;

    for (int i = 0; i < ndim && i < LM_GGUF_MAX_DIMS; i++)
        t.dim[i] = dim[i];
    if (!p->rc)
        p->rc = check_shape(name, lm_format_of_gguf(type), &t, p->err);
    if (!p->rc)
        p->rc =
            lm_grow(&p->tensor, &p->cap, p->n + 1, sizeof *p->tensor, "plan of tensors", p->err);
    if (!p->rc)
        p->rc = lm_arena_strdup(p->arena, &copy, name, strlen(name), p->err);
    if (!p->rc && p->end > INT64_MAX - t.bytes - LM_GGUF_ALIGN)
        p->rc = lm_fail(p->err, LM_ELIMIT, name, NULL, "the tensors have more than 2^63 bytes");
    if (p->rc)
        return;
    t.name = copy;
    p->tensor[p->n++] = t;
    p->end = (p->end + t.bytes + LM_GGUF_ALIGN - 1) / LM_GGUF_ALIGN * LM_GGUF_ALIGN;
}

size_t lm_gguf_plan_count(const lm_gguf_plan *p)
{
    return p->n;
}

const lm_gguf_tensor *lm_gguf_plan_at(const lm_gguf_plan *p, size_t i)
{
    return &p->tensor[i];
}

lm_code lm_gguf_plan_header(lm_gguf_plan *p, lm_buf *out, lm_err *e)
{
    static const uint8_t zeros[LM_GGUF_ALIGN];
    lm_buf kept = p->pairs;
    size_t from = out->len;

    if (p->rc)
        return p->rc;
    p->pairs = (lm_buf){ 0 };
    raw(p, "GGUF", 4);
    num(p, 3, 4);
    num(p, p->n, 8);
    num(p, p->n_pairs, 8);
    raw(p, kept.data, kept.len);
    for (size_t i = 0; i < p->n; i++) {
        const lm_gguf_tensor *t = &p->tensor[i];
        text(p, t->name, strlen(t->name));
        num(p, (uint64_t)t->ndim, 4);
        for (int d = t->ndim - 1; d >= 0; d--)
            num(p, (uint64_t)t->dim[d], 8);
        num(p, t->type, 4);
        num(p, t->offset, 8);
    }
    raw(p, zeros, (LM_GGUF_ALIGN - p->pairs.len % LM_GGUF_ALIGN) % LM_GGUF_ALIGN);
    if (!p->rc)
        p->rc = lm_buf_add(out, p->pairs.data, p->pairs.len, e);
    if (p->rc)
        out->len = from;
    lm_buf_fini(&p->pairs);
    p->pairs = kept;
    return p->rc;
}

/* ---- The file ---- */

struct lm_gguf_writer {
    lm_write_fn write;
    void *ctx;
    const lm_gguf_plan *plan;
    size_t cur;
    uint64_t done; /* bytes of tensor `cur` */
};

lm_code lm_gguf_create_on(lm_write_fn write, void *ctx, lm_gguf_plan *plan, lm_gguf_writer **out,
                          lm_err *e)
{
    lm_gguf_writer *w = NULL;
    lm_buf header = { 0 };
    lm_code rc = lm_alloc_n(&w, 1, sizeof *w, "a GGUF file", e);

    *out = NULL;
    if (!rc)
        rc = lm_gguf_plan_header(plan, &header, e);
    if (!rc)
        rc = write(ctx, header.data, header.len, e);
    lm_buf_fini(&header);
    if (rc) {
        lm_free(w);
        return rc;
    }
    *w = (lm_gguf_writer){ write, ctx, plan, 0, 0 };
    *out = w;
    return LM_OK;
}

const lm_gguf_tensor *lm_gguf_next(const lm_gguf_writer *w)
{
    return w->cur < w->plan->n ? &w->plan->tensor[w->cur] : NULL;
}

lm_code lm_gguf_write(lm_gguf_writer *w, const void *data, size_t bytes, lm_err *e)
{
    static const uint8_t zeros[LM_GGUF_ALIGN];
    const lm_gguf_tensor *t = lm_gguf_next(w);
    lm_code rc;

    if (!t || bytes > t->bytes - w->done)
        return lm_fail(e, LM_EBUG, t ? t->name : "GGUF", NULL, "more bytes than planned");
    rc = w->write(w->ctx, data, bytes, e);
    w->done += bytes;
    if (rc || w->done < t->bytes)
        return rc;
    w->cur++;
    w->done = 0;
    bytes = (LM_GGUF_ALIGN - t->bytes % LM_GGUF_ALIGN) % LM_GGUF_ALIGN;
    return bytes ? w->write(w->ctx, zeros, bytes, e) : LM_OK;
}

lm_code lm_gguf_finish(lm_gguf_writer *w, lm_err *e)
{
    const lm_gguf_tensor *t = lm_gguf_next(w);
    lm_code rc = t ? lm_fail(e, LM_EBUG, t->name, NULL, "bytes are missing") : LM_OK;

    lm_gguf_drop(w);
    return rc;
}

void lm_gguf_drop(lm_gguf_writer *w)
{
    lm_free(w);
}
