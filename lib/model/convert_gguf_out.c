/* convert_gguf_out.c -- a model written as a GGUF file. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/base64.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "model/convert_impl.h"
#include "model/gguf_meta.h"

/* ---- Which type each tensor gets ---- */

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };
enum { KEEP = -1 };

/* file_type: llama.cpp's number for the file as a whole (include/llama.h). */
typedef struct {
    const char *name;
    int type; /* of weights in general */
    int file_type;
    char mix; /* 0: all weights alike; 'S', 'M': llama.cpp's mixtures of that size */
} recipe;

static const recipe recipes[] = {
    { "keep", KEEP, 0, 0 },
    { "f32", LM_GGUF_TYPE_F32, 0, 0 },
    { "f16", LM_GGUF_TYPE_F16, 1, 0 },
    { "bf16", LM_GGUF_TYPE_BF16, 32, 0 },
    { "q8_0", Q8_0, 7, 0 },
    { "q4_0", Q4_0, 2, 0 },
    { "q4_1", Q4_1, 3, 0 },
    { "q5_0", Q5_0, 8, 0 },
    { "q5_1", Q5_1, 9, 0 },
    { "q4_k", Q4_K, 14, 0 },
    { "q5_k", Q5_K, 16, 0 },
    { "q6_k", Q6_K, 18, 0 },
    { "q4_k_s", Q4_K, 14, 'S' },
    { "q4_k_m", Q4_K, 15, 'M' },
    { "q5_k_s", Q5_K, 16, 'S' },
    { "q5_k_m", Q5_K, 17, 'M' },
};

const char *const lm_gguf_types[] = { "keep",   "f32",    "f16",    "bf16",   "q8_0", "q4_0",
                                      "q4_1",   "q5_0",   "q5_1",   "q4_k",   "q5_k", "q6_k",
                                      "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", NULL };

static lm_code find_recipe(const char *name, const recipe **out, lm_err *e)
{
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
        if (!strcasecmp(recipes[i].name, name ? name : "keep")) {
            *out = &recipes[i];
            return LM_OK;
        }
    return lm_fail(e, LM_EUSAGE, "--type", lm_nearest(name, lm_gguf_types),
                   "'%s' is no type of a GGUF file", name);
}

/* The layers whose matrices are worth more bits (llama.cpp, src/llama-quant.cpp). */
static bool more_bits(int64_t i, int64_t n)
{
    return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
}

/* llama.cpp's mixtures, without importance matrix. */
static int mix_type(const recipe *r, const lm_slot *s, const lm_config *c, int64_t cols)
{
    bool m = r->mix == 'M';

    switch (s->role) {
    case LM_ROLE_OUTPUT:
        return cols % 256 ? Q8_0 : Q6_K;
    case LM_ROLE_EMBED:
        return !c->tied ? r->type : cols % 256 ? Q8_0 : Q6_K;
    case LM_ROLE_V:
    case LM_ROLE_QKV: {
        int type = m && more_bits(s->layer, c->layers)     ? Q6_K
                   : !m && r->type == Q4_K && s->layer < 4 ? Q5_K
                                                           : r->type;
        bool shared = c->arch == LM_ARCH_LLAMA && c->layers == 80 && c->heads != c->kv_heads;
        return shared && type == Q4_K ? Q5_K : type;
    }
    case LM_ROLE_DOWN:
        return m && more_bits(s->layer, c->layers)                 ? Q6_K
               : !m && r->type == Q4_K && s->layer < c->layers / 8 ? Q5_K
                                                                   : r->type;
    default:
        return r->type;
    }
}

/* A row that is no whole number of blocks takes the next larger type of smaller blocks, as
 * llama.cpp's does; no blocks at all, the source's type. */
static int fall_back(int type, int64_t cols, int own)
{
    const lm_ggml_type *t = lm_ggml_of((uint32_t)type);

    if (!t || cols % t->block == 0)
        return type;
    type = type == Q4_K ? Q5_0 : type == Q5_K ? Q5_1 : type == Q6_K ? Q8_0 : own;
    t = lm_ggml_of((uint32_t)type);
    return t && cols % t->block ? own : type;
}

static int plain_type(lm_dtype d)
{
    return d == LM_DTYPE_F16    ? LM_GGUF_TYPE_F16
           : d == LM_DTYPE_BF16 ? LM_GGUF_TYPE_BF16
                                : LM_GGUF_TYPE_F32;
}

static int choose(const recipe *r, const lm_slot *s, const lm_st_tensor *t, const lm_config *c)
{
    int64_t dim[2];
    int own = plain_type(t->dtype), type;

    if (s->ndim == 1 || s->role == LM_ROLE_POSITION)
        return LM_GGUF_TYPE_F32; /* llama.cpp computes with no other */
    if (r->type == KEEP)
        return own;
    lm_slot_gguf_dim(s, dim);
    type = r->mix ? mix_type(r, s, c, dim[1]) : r->type;
    return fall_back(type, dim[1], own);
}

/* ---- Metadata ---- */

static void put_text(lm_gguf_plan *p, const char *key, const char *s)
{
    lm_gguf_put_str(p, key, s, strlen(s));
}

/* The last part of the path, without ".gguf", ".tar" and the like. */
static void put_name(lm_gguf_plan *p, const lm_import *m, const char *given)
{
    char name[256];
    size_t n = strlen(m->path);

    if (!given) {
        while (n > 1 && m->path[n - 1] == '/')
            n--;
        snprintf(name, sizeof name, "%.*s", (int)(n < 4096 ? n : 4096), m->path);
        const char *base = lm_path_base(name);
        given = !strcmp(base, ".") || !strcmp(m->path, "standard input")
                    ? lm_arch_name(m->config.arch)
                    : base;
    }
    n = strlen(given);
    lm_gguf_put_str(p, "general.name", given, lm_utf8_valid(given, n));
}

static int own_file_type(const lm_slotted *s)
{
    uint64_t bytes[3] = { 0 };
    static const int types[3] = { 0, 1, 32 };
    int most = 0;

    for (size_t i = 0; i < s->n; i++)
        if (s->slot[i].ndim == 2) {
            lm_dtype d = s->from[i]->dtype;
            int k = d == LM_DTYPE_F16 ? 1 : d == LM_DTYPE_BF16 ? 2 : 0;
            if ((bytes[k] += s->from[i]->bytes) > bytes[most])
                most = k;
        }
    return types[most];
}

/* Files that cannot be made again from the metadata, and the types of the tensors. */
static lm_code put_originals(lm_gguf_plan *p, const lm_import *m, lm_err *e)
{
    lm_gguf_text *line = NULL;
    lm_buf text = { 0 }, coded = { 0 };
    size_t n = lm_st_plan_count(m->plan), k = 0;
    char key[300];
    lm_code rc = lm_alloc_n(&line, n, sizeof *line, "list of tensors", e);

    for (size_t i = 0; !rc && i < m->n_side; i++) {
        const lm_side_file *f = &m->side[i];
        if (f->made)
            continue;
        bool utf8 = lm_utf8_valid(f->data.data, f->data.len) == f->data.len;
        coded.len = 0;
        snprintf(key, sizeof key, "%s%.200s", utf8 ? LM_GGUF_FILE : LM_GGUF_FILE64, f->name);
        if (!utf8)
            rc = lm_base64_encode(f->data.data, f->data.len, &coded, e);
        if (!rc)
            lm_gguf_put_str(p, key, utf8 ? f->data.data : coded.data,
                            utf8 ? f->data.len : coded.len);
    }
    for (int pass = 0; !rc && pass < 2; pass++) /* the buffer first: lines point into it */
        for (size_t i = 0, at = 0; !rc && i < n; i++) {
            const lm_st_tensor *t = lm_st_plan_at(m->plan, i);
            size_t len = strlen(t->dtype_name) + 1 + strlen(t->name);
            if (!pass)
                rc = lm_buf_addf(&text, e, "%s %s", t->dtype_name, t->name);
            else
                line[k++] = (lm_gguf_text){ text.data + at, len };
            at += len;
        }
    if (!rc)
        lm_gguf_put_strs(p, LM_GGUF_TENSORS, line, k);
    lm_buf_fini(&coded);
    lm_buf_fini(&text);
    lm_free(line);
    return rc;
}

static lm_code put_all(lm_gguf_plan *p, const lm_import *m, const lm_slotted *s, const recipe *r,
                       const lm_export_opts *o, lm_err *e)
{
    lm_buf chain = { 0 };
    lm_code rc;

    put_text(p, "general.architecture", lm_gguf_arch(m->config.arch));
    put_text(p, "general.type", "model");
    put_name(p, m, o->name);
    lm_gguf_put_u32(p, "general.file_type",
                    (uint32_t)(r->type == KEEP ? own_file_type(s) : r->file_type));
    lm_gguf_put_u32(p, "general.quantization_version", 2);
    rc = lm_gguf_put_config(p, m, e);
    if (!rc)
        rc = lm_gguf_put_vocab(p, m, e);
    if (!rc && o->originals)
        rc = put_originals(p, m, e);
    if (!rc)
        rc = lm_export_history(m, o, &chain, e);
    if (!rc)
        lm_gguf_put_str(p, LM_HISTORY_KEY, chain.data, chain.len);
    lm_buf_fini(&chain);
    return rc;
}

/* ---- Tensors ---- */

/* The head of a tied model is the embedding; a file that has it twice must have it alike. */
static lm_code check_tied(lm_import *m, const lm_slotted *s, lm_err *e)
{
    const lm_st_tensor *head = NULL, *embed = s->from[0];
    const void *a, *b;
    void *copy = NULL;
    bool same = false;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < lm_st_plan_count(m->plan); i++)
        if (s->slot_of[i] == LM_SLOT_TIED)
            head = lm_st_plan_at(m->plan, i);
    if (!head)
        return LM_OK;
    if (m->spool)
        rc = m->spool(m, e);
    if (!rc && head->dtype == embed->dtype && head->bytes == embed->bytes) {
        rc = lm_alloc_n(&copy, head->bytes, 1, "a tensor", e);
        if (!rc && !(rc = m->load(m, head, &a, e)))
            memcpy(copy, a, head->bytes);
        if (!rc && !(rc = m->load(m, embed, &b, e)))
            same = !memcmp(copy, b, head->bytes);
        lm_free(copy);
    }
    if (!rc && !same)
        rc =
            lm_fail(e, LM_EFORMAT, m->path, "set \"tie_word_embeddings\" to false, or leave it out",
                    "the model is tied, but '%s' is not '%s'", head->name, embed->name);
    return rc;
}

static void plan_tensors(lm_gguf_plan *p, const lm_import *m, const lm_slotted *s, const recipe *r)
{
    int64_t dim[2];

    for (size_t i = 0; i < lm_st_plan_count(m->plan); i++) {
        if (s->slot_of[i] < 0)
            continue;
        const lm_slot *slot = &s->slot[s->slot_of[i]];
        lm_slot_gguf_dim(slot, dim);
        lm_gguf_put_tensor(p, slot->gguf,
                           (uint32_t)choose(r, slot, lm_st_plan_at(m->plan, i), &m->config),
                           slot->ndim, slot->ndim == 2 ? dim : slot->dim);
    }
    if (m->config.rope.type == LM_ROPE_LLAMA3)
        lm_gguf_put_tensor(p, LM_GGUF_ROPE_FREQS, LM_GGUF_TYPE_F32, 1,
                           &(int64_t){ m->config.head_dim / 2 });
}

typedef struct {
    lm_import *m;
    const lm_slotted *s;
    lm_gguf_writer *w;
    void *cast;
    size_t cap;
} writer;

static lm_code write_tensor(writer *w, const lm_slot *s, const lm_st_tensor *t, lm_err *e)
{
    const lm_gguf_tensor *want = lm_gguf_next(w->w);
    const lm_ggml_type *block = lm_ggml_of(want->type);
    lm_row_type to = { block ? LM_DTYPE_NONE : lm_gguf_type_of(want->type)->dtype, block };
    const void *data;
    lm_rows r;
    lm_code rc = w->m->load(w->m, t, &data, e);

    if (!rc && lm_rows_of_slot(s, true, (lm_row_type){ t->dtype, NULL }, to, &r)) {
        rc = lm_grow(&w->cast, &w->cap, want->bytes, 1, "a tensor", e);
        r.src = data;
        r.dst = w->cast;
        if (!rc)
            rc = lm_rows_convert(&r, w->m->par, e);
        data = w->cast;
    }
    return rc ? rc : lm_gguf_write(w->w, data, want->bytes, e);
}

static lm_code write_rope(writer *w, lm_err *e)
{
    float *f = NULL;
    lm_code rc = lm_alloc_n(&f, (size_t)w->m->config.head_dim / 2, sizeof *f, "rotary factors", e);

    if (!rc) {
        lm_gguf_rope_factors(&w->m->config, f);
        rc = lm_gguf_write(w->w, f, (size_t)w->m->config.head_dim / 2 * sizeof *f, e);
    }
    lm_free(f);
    return rc;
}

static lm_code write_tensors(writer *w, uint64_t total, lm_err *e)
{
    double done = 0;
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && !lm_stopping() && i < lm_st_plan_count(w->m->plan); i++) {
        const lm_st_tensor *t = lm_st_plan_at(w->m->plan, i);
        if (w->s->slot_of[i] < 0)
            continue;
        rc = write_tensor(w, &w->s->slot[w->s->slot_of[i]], t, e);
        done += (double)t->bytes;
        lm_progress(w->m->sink, "convert", done, (double)total, "bytes", t->name);
    }
    if (!rc && !lm_stopping() && w->m->config.rope.type == LM_ROPE_LLAMA3)
        rc = write_rope(w, e);
    return rc;
}

static uint64_t plan_bytes(const lm_gguf_plan *p)
{
    size_t n = lm_gguf_plan_count(p);
    const lm_gguf_tensor *last = n ? lm_gguf_plan_at(p, n - 1) : NULL;

    return last ? last->offset + last->bytes : 0;
}

lm_code lm_export_gguf(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e)
{
    const recipe *r = NULL;
    lm_slotted s = { 0 };
    lm_gguf_plan *plan = NULL;
    lm_out *out = NULL;
    writer w = { .m = m, .s = &s };
    lm_code rc = find_recipe(o->type, &r, e);

    if (!rc)
        rc = lm_slotted_make(m, &s, e);
    if (!rc)
        rc = check_tied(m, &s, e);
    if (!rc)
        rc = lm_gguf_plan_new(&plan, e);
    if (!rc)
        rc = put_all(plan, m, &s, r, o, e);
    if (!rc) {
        plan_tensors(plan, m, &s, r);
        rc = lm_export_open(path, o->force, plan_bytes(plan), &out, e);
    }
    if (!rc)
        rc = lm_gguf_create_on(lm_export_write, out, plan, &w.w, e);
    if (!rc)
        rc = write_tensors(&w, lm_st_plan_data_bytes(m->plan), e);
    if (!rc && m->end && !lm_stopping())
        rc = m->end(m, e);
    if (!rc && !lm_stopping()) {
        rc = lm_gguf_finish(w.w, e);
        w.w = NULL;
    }
    lm_gguf_drop(w.w);
    if (!rc && !lm_stopping())
        rc = lm_out_commit(out, e);
    else
        lm_out_drop(out);
    lm_free(w.cast);
    lm_gguf_plan_free(plan);
    lm_slotted_fini(&s);
    return rc;
}
