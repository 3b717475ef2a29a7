/* SPDX-License-Identifier: Apache-2.0 */
/* convert_gguf.c -- a GGUF file in the form of a Hugging Face model. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "convert/convert_impl.h"
#include "convert/gguf_deepseek.h"
#include "convert/gguf_meta.h"
#include "convert/pieces.h"
#include "format/safetensors_table.h"

typedef struct {
    lm_gguf *g;
    lm_model_tensor *wanted;
    size_t n;
    const lm_gguf_tensor **from; /* of wanted tensor i; the experts of a layer share one */
    const lm_gguf_tensor **also; /* its second one, where there are two pieces */
    bool *cut;                   /* they are pieces */
    size_t *wanted_of;           /* of tensor i of the plan */
    size_t cap_of;
    bool *named; /* required tensor i is in the list of original tensors */
    const lm_gguf_tensor *last;
    void *copy, *part;
    size_t cap, cap_part;
} gguf;

/* ---- Files kept by our conversion ---- */

static bool may_keep(const char *name)
{
    if (!strcmp(name, "config.json") || !strcmp(name, "generation_config.json"))
        return true;
    for (int i = 0; lm_tokenizer_files[i]; i++)
        if (!strcmp(name, lm_tokenizer_files[i]))
            return true;
    return false;
}

static lm_code take_kept(lm_import *m, const lm_gguf *g, bool tokenizer, lm_err *e)
{
    static const char *const prefixes[] = { LM_GGUF_FILE, LM_GGUF_FILE64 };
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < 2 * lm_gguf_pairs(g); i++) {
        const lm_gguf_value *v = lm_gguf_pair(g, i / 2);
        const char *prefix = prefixes[i % 2], *name = v->key + strlen(prefix);
        lm_gguf_text text;
        lm_buf data = { 0 };
        if (strncmp(v->key, prefix, strlen(prefix)) || !may_keep(name) ||
            (!tokenizer && strcmp(name, "config.json") && strcmp(name, "generation_config.json")))
            continue;
        rc = lm_gguf_str(g, v->key, &text, e);
        if (!rc && i % 2)
            rc = lm_base64_decode(text.text, text.len, v->key, &data, e);
        else if (!rc)
            rc = lm_buf_add(&data, text.text, text.len, e);
        if (!rc)
            rc = lm_import_put(m, name, &data, e);
        lm_buf_fini(&data);
    }
    return rc;
}

/* ---- Tensors ---- */

static lm_code check_whole(const lm_import *m, const lm_gguf *g, lm_err *e)
{
    int64_t parts;
    lm_gguf_text type;

    if (lm_gguf_str(g, "general.type", &type, e))
        return e->code;
    if (type.len == 7 && !memcmp(type.text, "imatrix", 7))
        return lm_fail(e, LM_EUSAGE, m->path, "give it as the importance matrix",
                       "it is an importance matrix, not a model");
    lm_code rc = lm_gguf_i64_or(g, "split.count", 1, 0, 1 << 16, &parts, NULL, e);

    if (!rc && parts > 1)
        rc = lm_fail(e, LM_EUSAGE, m->path, "join them with llama-gguf-split",
                     "it is one of %" PRId64 " parts", parts);
    return rc;
}

/* Leading axes of length 1 are ignored: llama.cpp leaves them out.  split: the tensor is one expert. */
static bool fits(const lm_model_tensor *s, const lm_gguf_tensor *t, bool split)
{
    int64_t shape[3], want[LM_GGUF_MAX_DIMS], have[LM_GGUF_MAX_DIMS];
    int n = lm_model_tensor_gguf_shape(s, shape), skip = split ? 1 : 0;

    for (int d = 0; d < LM_GGUF_MAX_DIMS; d++) {
        int w = d - (LM_GGUF_MAX_DIMS - n), h = d - (LM_GGUF_MAX_DIMS - t->ndim);
        want[d] = w >= skip ? shape[w] : 1;
        have[d] = h >= 0 ? t->dim[h] : 1;
    }
    return !memcmp(want, have, sizeof want);
}

/* Interleaved formats that can be decoded, and the other formats of weights. */
static bool is_read(const lm_format *f)
{
    return lm_format_interleaved(f) ? f->decode != NULL
                                    : f->element == LM_DTYPE_F32 || f->element == LM_DTYPE_F16 ||
                                          f->element == LM_DTYPE_BF16;
}

/* Sizes that the tensors cannot have: they must not decide how much memory is taken. */
static lm_code check_sizes(const lm_import *m, const gguf *q, lm_err *e)
{
    const lm_config *c = &m->config;
    const int64_t layers = c->layers + (c->encoder ? c->encoder->layers : 0);
    int64_t experts = 0, numbers = 0;

    if (layers > (int64_t)lm_gguf_count(q->g))
        return lm_fail(e, LM_EUSAGE, m->path, NULL, "it has %zu tensor%s for %" PRId64 " layer%s",
                       lm_gguf_count(q->g), lm_plural(lm_gguf_count(q->g)), layers,
                       lm_plural(layers));
    for (int64_t l = 0; l < c->layers; l++)
        experts += c->layer[l].moe.experts;
    for (size_t i = 0; i < lm_gguf_count(q->g) && numbers < experts; i++)
        numbers += lm_gguf_at(q->g, i)->count;
    return numbers < experts
               ? lm_fail(e, LM_EUSAGE, m->path, NULL,
                         "it has %" PRId64 " numbers for %" PRId64 " experts", numbers, experts)
               : LM_OK;
}

static lm_code check_type(const lm_import *m, const lm_gguf_tensor *t, lm_err *e)
{
    const lm_format *f = lm_format_of_gguf(t->type);
    return is_read(f) ? LM_OK
                      : lm_fail(e, LM_EUSAGE, m->path, NULL,
                                "tensor '%s' is of type %s, which cannot be decoded here", t->name,
                                f->name);
}

static lm_code wrong_shape(const lm_import *m, const lm_gguf_tensor *t, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, m->path, NULL,
                   "tensor '%s' does not have the shape that the metadata require", t->name);
}

static lm_code match_piece(const lm_import *m, const gguf *q, const lm_gguf_piece *p,
                           const lm_gguf_tensor **out, lm_err *e)
{
    const lm_gguf_tensor *t = *out = lm_gguf_find(q->g, p->name);
    int64_t dim[3];
    const int n = lm_piece_shape(p, dim);
    if (!t)
        return lm_fail(e, LM_EUSAGE, m->path, NULL, "tensor '%s' is missing", p->name);
    bool same = t->ndim == n;
    for (int d = 0; same && d < n; d++)
        same = t->dim[d] == dim[d];
    return same ? check_type(m, t, e) : wrong_shape(m, t, e);
}

/* Older files have both in one tensor, "blk.3.attn_kv_b.weight" (before the first half of 2025) or "blk.3.ssm_in.weight"
 * (before that of 2026). */
static const lm_gguf_tensor *pieces_in_one(const gguf *q, const lm_model_tensor *s)
{
    char name[LM_TENSOR_NAME];
    const char *one = s->part == LM_PART_KV_B ? "attn_kv_b" : "ssm_in";
    snprintf(name, sizeof name, "blk.%" PRId64 ".%s.weight", s->layer, one);
    return s->part == LM_PART_KV_B || s->part == LM_PART_DELTA_IN ? lm_gguf_find(q->g, name) : NULL;
}

static lm_code match_pieces(lm_import *m, gguf *q, size_t i, int pieces, lm_err *e)
{
    const lm_model_tensor *s = &q->wanted[i];
    const lm_gguf_tensor *t = pieces_in_one(q, s);
    if (t) {
        q->from[i] = t;
        return fits(s, t, false) ? check_type(m, t, e) : wrong_shape(m, t, e);
    }
    q->cut[i] = true;
    for (int k = 0; k < pieces; k++) {
        const lm_gguf_piece p = lm_piece_of(&m->config, s, k);
        if (match_piece(m, q, &p, k ? &q->also[i] : &q->from[i], e))
            return e->code;
    }
    return LM_OK;
}

/* The tensor that holds required tensor i: the stacked one of its experts, or, in older files, its own. */
static lm_code match_one(lm_import *m, gguf *q, size_t i, lm_err *e)
{
    const lm_model_tensor *s = &q->wanted[i];
    const lm_gguf_tensor *t = s->expert ? q->from[i - (size_t)s->expert] : NULL;
    char split[LM_TENSOR_NAME];
    const int pieces = lm_pieces(&m->config, s);

    if (pieces)
        return match_pieces(m, q, i, pieces, e);
    if (!t || strcmp(t->name, s->gguf) != 0)
        t = lm_gguf_find(q->g, s->gguf);
    bool one = !t && s->experts;
    if (one)
        t = lm_gguf_find(q->g, lm_model_tensor_gguf_split(s, split));
    if (!t)
        return lm_fail(e, LM_EUSAGE, m->path, NULL, "tensor '%s' is missing",
                       one && s->expert ? split : s->gguf);
    q->from[i] = t;
    return fits(s, t, one) ? check_type(m, t, e) : wrong_shape(m, t, e);
}

/* True if a tensor of the file holds required tensor i. */
static bool is_used(const gguf *q, size_t i, const char *name)
{
    return !strcmp(q->from[i]->name, name) || (q->also[i] && !strcmp(q->also[i]->name, name));
}

/* True if `name` is of one of the `further` layers behind those of the model. */
static bool is_further(const lm_import *m, const char *name, int64_t further)
{
    static const char block[] = "blk.";
    const size_t n = sizeof block - 1;
    char *end;
    if (strncmp(name, block, n) != 0 || name[n] < '0' || name[n] > '9')
        return false;
    const int64_t layer = strtoll(name + n, &end, 10);
    return *end == '.' && layer >= m->config.layers && layer - m->config.layers < further;
}

/* True if required tensors do not need the one of this name, but readers know it. */
static bool is_known(const lm_import *m, const char *name)
{
    char head[LM_TENSOR_NAME];
    return !strcmp(name, LM_GGUF_ROPE_FREQS) ||
           (m->config.tied &&
            !strcmp(name, lm_tensor_gguf_name(m->config.arch, LM_PART_OUTPUT, -1, false, head)));
}

/* The tensors that hold no required one: each must be known. */
static lm_code check_others(const lm_import *m, const gguf *q, lm_err *e)
{
    const char *first = NULL;
    char more[40] = "";
    size_t n = 0;
    int64_t further;

    if (lm_gguf_get_further(q->g, m->config.arch, &further, e))
        return e->code;
    for (size_t i = 0; i < lm_gguf_count(q->g); i++) {
        const char *name = lm_gguf_at(q->g, i)->name;
        const bool behind = is_further(m, name, further);
        bool known = behind || is_known(m, name);
        for (size_t k = 0; !known && k < q->n; k++)
            known = is_used(q, k, name);
        if (!known)
            return lm_fail(e, LM_EUSAGE, m->path, NULL,
                           "tensor '%.80s' is unknown to the architecture %s", name,
                           lm_arch_name(m->config.arch));
        if (behind && !n++)
            first = name;
    }
    if (n > 1)
        snprintf(more, sizeof more, " and %zu more", n - 1);
    if (n)
        lm_log(
            m->sink, LM_LOG_WARN,
            "%s: '%s'%s: left out: modules that predict tokens further on are not read from GGUF",
            m->path, first, more);
    return LM_OK;
}

/* Parts that GGUF has not are not looked for. */
static void drop_parts(const lm_import *m, gguf *q)
{
    size_t n = 0;
    for (size_t i = 0; i < q->n; i++)
        if (lm_part_in_gguf(m->config.arch, q->wanted[i].part))
            q->wanted[n++] = q->wanted[i];
    q->n = n;
}

static lm_code match(lm_import *m, gguf *q, lm_err *e)
{
    size_t used = 0;
    lm_code rc = check_sizes(m, q, e);

    if (!rc)
        rc = lm_model_tensors_make(&m->config, &q->wanted, &q->n, e);
    if (!rc)
        drop_parts(m, q);
    if (!rc)
        rc = lm_alloc_n(&q->from, q->n, sizeof *q->from, "tensors of a model", e);
    if (!rc)
        rc = lm_alloc_n(&q->also, q->n, sizeof *q->also, "tensors of a model", e);
    if (!rc)
        rc = lm_alloc_n(&q->cut, q->n, sizeof *q->cut, "tensors of a model", e);
    for (size_t i = 0; !rc && i < q->n; i++) {
        rc = match_one(m, q, i, e);
        used += !rc && (!i || q->from[i] != q->from[i - 1]);
        used += !rc && q->also[i];
    }
    return rc || used == lm_gguf_count(q->g) ? rc : check_others(m, q, e);
}

/* The type of an imported tensor: its own; its original type `made` if it was only widened to F32
 * for GGUF; `want` for blocks. */
static lm_dtype result_type(const lm_gguf_tensor *t, lm_dtype made, lm_dtype want)
{
    const lm_format *f = lm_format_of_gguf(t->type);

    if (lm_format_interleaved(f))
        return want != LM_DTYPE_NONE ? want : made != LM_DTYPE_NONE ? made : LM_DTYPE_BF16;
    if (t->type == LM_GGUF_TYPE_F32 && made != LM_DTYPE_NONE)
        return made;
    return f->element;
}

static lm_code add(lm_import *m, gguf *q, size_t nth, const char *name, lm_dtype made,
                   lm_dtype want, lm_err *e)
{
    const lm_model_tensor *s = &q->wanted[nth];
    size_t i = lm_st_plan_count(m->plan);
    lm_code rc =
        lm_st_plan_add(m->plan, name, result_type(q->from[nth], made, want), s->ndim, s->dim, e);

    m->quantised |= lm_format_interleaved(lm_format_of_gguf(q->from[nth]->type));
    if (!rc)
        rc = lm_grow(&q->wanted_of, &q->cap_of, i + 1, sizeof *q->wanted_of, "tensors of a model",
                     e);
    if (!rc)
        q->wanted_of[i] = nth;
    return rc;
}

/* One of the original tensors of our conversion: "BF16 model.norm.weight". */
static lm_code add_kept(lm_import *m, gguf *q, const lm_gguf_text *line, size_t *hint,
                        lm_dtype want, lm_err *e)
{
    char type[16], name[128];
    const char *space = memchr(line->text, ' ', line->len);
    size_t n = space ? (size_t)(space - line->text) : 0;

    if (!space || n >= sizeof type || line->len - n - 1 >= sizeof name)
        return lm_fail(e, LM_EFORMAT, m->path, NULL, "'%s' has an entry that names no tensor",
                       LM_GGUF_TENSORS);
    memcpy(type, line->text, n);
    type[n] = 0;
    memcpy(name, space + 1, line->len - n - 1);
    name[line->len - n - 1] = 0;
    if (lm_arch_is_buffer(m->config.arch, name))
        return LM_OK; /* in the list, but not in the file */
    lm_dtype made = lm_dtype_parse(type);
    if (made != LM_DTYPE_F32 && made != LM_DTYPE_F16 && made != LM_DTYPE_BF16)
        return lm_fail(e, LM_EFORMAT, m->path, NULL, "'%s' has an entry of type %s",
                       LM_GGUF_TENSORS, type);
    if (lm_config_ties(&m->config, name))
        return add(m, q, 0, name, made, want, e); /* the first one is the embedding */
    for (size_t k = 0; k < q->n; k++) {
        size_t at = (*hint + k) % q->n;
        if (lm_model_tensor_is(&q->wanted[at], name) && !q->named[at]) {
            *hint = at + 1;
            q->named[at] = true;
            return add(m, q, at, name, made, want, e);
        }
    }
    return lm_fail(e, LM_EFORMAT, m->path, NULL, "'%s' names '%.80s', which is not a tensor of it",
                   LM_GGUF_TENSORS, name);
}

static lm_code list_tensors(lm_import *m, gguf *q, lm_dtype want, lm_err *e)
{
    const lm_gguf_value *kept = lm_gguf_value_of(q->g, LM_GGUF_TENSORS);
    lm_gguf_iter it = { .v = kept };
    lm_gguf_text line;
    size_t hint = 0;
    lm_code rc = LM_OK;

    if (!kept || !kept->array || kept->kind != LM_GGUF_STRING) {
        for (size_t i = 0; !rc && i < q->n; i++)
            rc = add(m, q, i, q->wanted[i].hf, LM_DTYPE_NONE, want, e);
        return rc;
    }
    rc = lm_alloc_n(&q->named, q->n, sizeof *q->named, "tensors of a model", e);
    while (!rc && lm_gguf_next_str(&it, &line))
        rc = add_kept(m, q, &line, &hint, want, e);
    if (!rc && lm_st_plan_count(m->plan) < q->n)
        rc = lm_fail(e, LM_EFORMAT, m->path, NULL, "'%s' names %zu tensor%s, the file has %zu",
                     LM_GGUF_TENSORS, lm_st_plan_count(m->plan),
                     lm_plural(lm_st_plan_count(m->plan)), q->n);
    return rc;
}

/* The bytes of required tensor i in the mapped file. */
static const uint8_t *bytes_of(const gguf *q, size_t i)
{
    const lm_model_tensor *s = &q->wanted[i];
    const lm_gguf_tensor *t = q->from[i];
    bool stacked = lm_part_is_expert(s->part) && s->experts && !strcmp(t->name, s->gguf);

    return lm_gguf_data(q->g, t) +
           (stacked ? t->bytes / (uint64_t)s->experts * (uint64_t)s->expert : 0);
}

static const lm_gguf_tensor *piece_from(const gguf *q, size_t nth, int k)
{
    return k ? q->also[nth] : q->from[nth];
}

/* A tensor from its pieces. */
static lm_code load_pieces(lm_import *m, gguf *q, size_t nth, const lm_st_tensor *t, lm_err *e)
{
    const lm_model_tensor *s = &q->wanted[nth];
    const size_t size = lm_dtype_size(t->dtype);
    lm_code rc = lm_grow(&q->copy, &q->cap, t->bytes, 1, "a tensor", e);
    for (int k = 0; !rc && k < lm_pieces(&m->config, s); k++) {
        const lm_gguf_tensor *from = piece_from(q, nth, k);
        const lm_gguf_piece p = lm_piece_of(&m->config, s, k);
        lm_rows r = { .name = from->name,
                      .from = lm_format_of_gguf(from->type),
                      .to = lm_format_of_dtype(t->dtype),
                      .rows = p.outer * p.inner,
                      .cols = p.cols };
        rc = lm_grow(&q->part, &q->cap_part, (size_t)(r.rows * r.cols) * size, 1, "a tensor", e);
        r.src = lm_gguf_data(q->g, from);
        r.dst = q->part;
        rc = rc ? rc : lm_rows_convert(&r, m->par, e);
        if (!rc)
            lm_piece_move(
                &(lm_piece_job){ .piece = &p, .size = size, .whole = q->copy, .part = q->part },
                m->par);
        lm_gguf_forget(q->g, from);
    }
    return rc;
}

static lm_code load(lm_import *m, const lm_st_tensor *t, const void **data, lm_err *e)
{
    gguf *q = m->state;
    size_t nth = q->wanted_of[(size_t)(t - lm_st_plan_at(m->plan, 0))];
    const lm_model_tensor *s = &q->wanted[nth];
    const lm_gguf_tensor *from = q->from[nth];
    lm_rows r;
    lm_code rc;

    if (q->last && q->last != from)
        lm_gguf_forget(q->g, q->last);
    q->last = from;
    if (q->cut[nth]) {
        q->last = NULL;
        *data = NULL;
        rc = load_pieces(m, q, nth, t, e);
        *data = q->copy;
        return rc;
    }
    *data = bytes_of(q, nth);
    if (!lm_rows_of_tensor(s, false, lm_format_of_gguf(from->type), lm_format_of_dtype(t->dtype),
                           &r))
        return LM_OK;
    rc = lm_grow(&q->copy, &q->cap, t->bytes, 1, "a tensor", e);
    r.src = *data;
    *data = r.dst = q->copy;
    return rc ? rc : lm_rows_convert(&r, m->par, e);
}

static size_t nth_of(const lm_import *m, const lm_st_tensor *t)
{
    const gguf *q = m->state;
    return q->wanted_of[(size_t)(t - lm_st_plan_at(m->plan, 0))];
}

/* Pieces are blocks as a whole where both are of one type, and their rows can be moved. */
static const lm_format *format_of(const lm_import *m, const lm_st_tensor *t)
{
    const gguf *q = m->state;
    const size_t nth = nth_of(m, t);
    const lm_format *f = lm_format_of_gguf(q->from[nth]->type);
    const bool one = !q->also[nth] || q->also[nth]->type == q->from[nth]->type;

    if (q->wanted[nth].order == LM_ORDER_TILED_COLS && lm_format_interleaved(f))
        return lm_format_of_dtype(t->dtype); /* blocks have neighbouring columns */
    if (q->cut[nth] && !(one && lm_format_interleaved(f) && lm_piece_has_codes(&q->wanted[nth])))
        return lm_format_of_dtype(t->dtype);
    return f;
}

/* The order of t's rows when their format is kept; false: unchanged. */
static bool rows_of(const lm_import *m, const lm_st_tensor *t, lm_rows *r)
{
    const gguf *q = m->state;
    const lm_format *f = format_of(m, t);

    return lm_rows_of_tensor(&q->wanted[nth_of(m, t)], false, f, f, r);
}

static bool turned(const lm_import *m, const lm_st_tensor *t)
{
    const gguf *q = m->state;
    lm_rows r;

    if (q->cut[nth_of(m, t)])
        return lm_format_interleaved(format_of(m, t));
    return rows_of(m, t, &r) && r.turn;
}

/* Codes of the rows of transposes, from both pieces. */
static lm_code codes_of_pieces(lm_import *m, gguf *q, size_t nth, void *dst)
{
    const lm_model_tensor *s = &q->wanted[nth];
    for (int k = 0; k < lm_pieces(&m->config, s); k++) {
        const lm_gguf_tensor *from = piece_from(q, nth, k);
        const lm_gguf_piece p = lm_piece_of(&m->config, s, k);
        lm_piece_move_codes(&(lm_piece_job){ .piece = &p,
                                             .whole = dst,
                                             .part = (void *)(uintptr_t)lm_gguf_data(q->g, from) },
                            from->bytes / (size_t)(p.outer * p.inner));
        lm_gguf_forget(q->g, from);
    }
    return LM_OK;
}

static lm_code codes(lm_import *m, const lm_st_tensor *t, void *dst, lm_err *e)
{
    gguf *q = m->state;
    size_t nth = nth_of(m, t);
    lm_rows r;

    if (q->cut[nth])
        return codes_of_pieces(m, q, nth, dst);
    rows_of(m, t, &r);
    r.turn = false; /* codes stay in the file's shape */
    r.src = bytes_of(q, nth);
    r.dst = dst;
    lm_code rc = lm_rows_convert(&r, m->par, e);
    lm_gguf_forget(q->g, q->from[nth]);
    return rc;
}

static const void *codes_in_file(const lm_import *m, const lm_st_tensor *t)
{
    const gguf *q = m->state;
    const size_t nth = nth_of(m, t);
    lm_rows r;

    if (q->cut[nth])
        return q->also[nth] || !lm_format_interleaved(format_of(m, t))
                   ? NULL
                   : lm_gguf_data(q->g, q->from[nth]);
    if (rows_of(m, t, &r))
        return NULL;
    return bytes_of(q, nth);
}

static void close_file(lm_import *m)
{
    gguf *q = m->state;

    lm_gguf_close(q->g);
    lm_free(q->wanted);
    lm_free(q->from);
    lm_free(q->also);
    lm_free(q->cut);
    lm_free(q->wanted_of);
    lm_free(q->named);
    lm_free(q->copy);
    lm_free(q->part);
    lm_free(q);
}

/* ---- Config and tokenizer ---- */

static lm_code take_config(lm_import *m, const lm_gguf *g, lm_err *e)
{
    const lm_side_file *kept = lm_import_side(m, "config.json");
    lm_gguf_text arch;
    lm_code rc = lm_gguf_str(g, "general.architecture", &arch, e);

    if (!rc)
        rc = kept ? lm_json_parse(kept->data.data, kept->data.len, m->path, &m->tree, e)
                  : lm_gguf_get_config(g, &m->tree, e);
    if (!rc)
        rc = lm_config_read(m->tree, m->path, &m->config, e);
    if (rc || !kept)
        return rc;
    const char *name = m->config.arch->gguf;
    if (arch.len != strlen(name) || memcmp(arch.text, name, arch.len))
        return lm_fail(e, LM_EFORMAT, m->path, NULL,
                       "the config.json kept in it is of %s, but the file is not",
                       lm_arch_name(m->config.arch));
    return LM_OK;
}

static lm_code take_tokenizer(lm_import *m, const lm_gguf *g, const char *from, lm_err *e)
{
    static const char *const olds[] = { "vocab.json", "tokenizer.model", "spiece.model",
                                        "vocab.txt" };
    lm_buf json = { 0 }, config = { 0 };
    bool found = false;
    lm_code rc;

    if (from)
        return lm_import_tokenizer(m, from, e);
    if (lm_import_side(m, "tokenizer.json"))
        return LM_OK;
    bool older = false; /* kept */
    for (size_t i = 0; i < sizeof olds / sizeof *olds; i++)
        older = older || lm_import_side(m, olds[i]);
    rc = lm_gguf_get_vocab(g, &m->config, &json, &config, &found, e);
    if (!rc && found && !(rc = lm_import_put(m, "tokenizer.json", &json, e)))
        m->side[m->n_side - 1].made = older;
    if (!rc && found && !older && !lm_import_side(m, "tokenizer_config.json"))
        rc = lm_import_put(m, "tokenizer_config.json", &config, e);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    return rc;
}

/* Copy the text under `key` to *out; unchanged if it is absent. */
static lm_code take_note(const lm_gguf *g, const char *key, char **out, lm_err *e)
{
    lm_gguf_text note;
    lm_buf text = { 0 };
    lm_code rc = lm_gguf_str(g, key, &note, e);

    if (!rc && note.text && !(rc = lm_buf_add(&text, note.text, note.len, e)))
        rc = lm_strdup(out, text.data, e);
    lm_buf_fini(&text);
    return rc;
}

/* A config that says that a T5's head is tied, whatever it is (lm_config_see). */
static void tie_head(lm_import *m, const lm_gguf *g)
{
    char head[LM_TENSOR_NAME];
    if (m->config.encoder && !json_is_false(json_object_get(m->tree, "tie_word_embeddings")) &&
        !lm_gguf_find(g, lm_tensor_gguf_name(m->config.arch, LM_PART_OUTPUT, -1, false, head)))
        m->config.tied = true;
}

lm_code lm_import_gguf(lm_import *m, lm_map *map, const lm_import_opts *o, lm_err *e)
{
    gguf *q = NULL;
    lm_code rc = lm_alloc_n(&q, 1, sizeof *q, "a GGUF file", e);

    if (rc) {
        lm_map_close(map);
        return rc;
    }
    m->state = q;
    m->close = close_file;
    m->load = load;
    m->format_of = format_of;
    m->codes = codes;
    m->codes_in_file = codes_in_file;
    m->turned = turned;
    rc = lm_gguf_open_map(map, m->path, &q->g, e);
    if (!rc)
        rc = check_whole(m, q->g, e);
    if (!rc)
        rc = take_kept(m, q->g, !o->tokenizer, e);
    if (!rc)
        rc = take_config(m, q->g, e);
    if (!rc && lm_import_side(m, "config.json"))
        rc = lm_gguf_take_edits(m, q->g, !o->tokenizer, e);
    if (!rc)
        tie_head(m, q->g);
    if (!rc)
        rc = take_tokenizer(m, q->g, o->tokenizer, e);
    if (!rc)
        rc = match(m, q, e);
    if (!rc)
        rc = list_tensors(m, q, o->dtype, e);
    if (!rc)
        rc = take_note(q->g, LM_HISTORY_KEY, &m->history, e);
    if (!rc)
        rc = take_note(q->g, LM_SEQ_KEY, &m->seq_len, e);
    if (!rc)
        rc = take_note(q->g, "general.name", &m->name, e);
    if (!rc && !lm_import_side(m, "config.json"))
        json_object_set_new(m->tree, "torch_dtype", json_string("float32")); /* adjusted later */
    return rc;
}
