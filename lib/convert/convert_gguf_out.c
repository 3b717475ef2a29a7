/* SPDX-License-Identifier: Apache-2.0 */
/* convert_gguf_out.c -- writes a model as a GGUF file. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/base64.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "convert/convert_impl.h"
#include "convert/convert_types.h"
#include "convert/gguf_meta.h"
#include "convert/pieces.h"
#include "format/folder_json.h"

/* ---- Metadata ---- */

static void put_text(lm_gguf_plan *p, const char *key, const char *s)
{
    lm_gguf_put_str(p, key, s, strlen(s));
}

/* Remove the ending of a model's file: .gguf, .tar.zst, ... */
static void cut_ending(char *name)
{
    static const char *const endings[] = { ".gguf", ".safetensors", ".lmz", ".bin", ".tar" };
    char *tar = strstr(name, ".tar.");

    if (tar && tar > name && !strchr(tar + 5, '.'))
        *tar = 0;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (lm_text_ends(name, endings[i]))
            name[strlen(name) - strlen(endings[i])] = 0;
}

/* The given name, otherwise that of a GGUF, otherwise the last part of the path. */
static lm_code put_name(lm_gguf_plan *p, const lm_import *m, const char *given, lm_err *e)
{
    const char *name = given ? given : m->name ? m->name : "";
    char *path = NULL;

    if (!*name) {
        if (lm_strdup(&path, m->path, e))
            return e->code;
        for (size_t n = strlen(path); n > 1 && path[n - 1] == '/';)
            path[--n] = 0;
        cut_ending(path);
        name = lm_path_base(path);
        if (!*name || !strcmp(name, ".") || !strcmp(name, "..") || !strcmp(name, "standard input"))
            name = lm_arch_name(m->config.arch);
    }
    lm_gguf_put_str(p, "general.name", name, lm_utf8_valid(name, strlen(name)));
    lm_free(path);
    return LM_OK;
}

/* The config without the modules that predict tokens further on, the noise of routers, or a head, which are left out. */
static lm_code put_config(lm_gguf_plan *p, const lm_import *m, const lm_side_file *f, lm_err *e)
{
    json_t *tree = NULL;
    lm_buf text = { 0 };
    lm_code rc = lm_json_parse(f->data.data, f->data.len, m->path, &tree, e);
    rc = rc ? rc : lm_config_drop_ahead(tree, e);
    rc = rc ? rc : lm_config_drop_noise(tree, e);
    if (!rc && m->config.head_transform)
        json_object_set_new(tree, "architectures", json_pack("[s]", "BertModel"));
    rc = rc ? rc : lm_json_pretty(tree, &text, e);
    if (!rc)
        lm_gguf_put_str(p, LM_GGUF_FILE "config.json", text.data, text.len);
    json_decref(tree);
    lm_buf_fini(&text);
    return rc;
}

/* True if tensor i of the source is in the file, or follows from it. */
static bool is_held(const lm_import *m, const lm_match *s, size_t i)
{
    return s->wanted_of[i] >= 0 || (s->wanted_of[i] == LM_TENSOR_TIED && !m->config.head_transform);
}

/* Keep files that cannot be rebuilt from the metadata, and the types of the tensors. */
static lm_code put_originals(lm_gguf_plan *p, const lm_import *m, const lm_match *s, lm_err *e)
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
        if ((m->config.ahead || m->config.head_transform || lm_config_learns_noise(&m->config)) &&
            !strcmp(f->name, "config.json")) {
            rc = put_config(p, m, f, e);
            continue;
        }
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
            if (!is_held(m, s, i))
                continue;
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

/* The source of the importance matrix, under the keys of llama-quantize. */
static void put_importance(lm_gguf_plan *p, const lm_export_opts *o)
{
    const char *dataset = lm_imatrix_dataset(o->imatrix);

    put_text(p, "quantize.imatrix.file", o->imatrix_name);
    if (dataset)
        put_text(p, "quantize.imatrix.dataset", dataset);
    lm_gguf_put_u32(p, "quantize.imatrix.entries_count", (uint32_t)lm_imatrix_count(o->imatrix));
    if (lm_imatrix_chunks(o->imatrix))
        lm_gguf_put_u32(p, "quantize.imatrix.chunks_count",
                        (uint32_t)lm_imatrix_chunks(o->imatrix));
}

enum { MXFP4_FILE = 38 /* llama.cpp's LLAMA_FTYPE_MOSTLY_MXFP4_MOE */ };

/* Blocks of the source, whose codes are copied where tensors keep their types; NULL: plain numbers. */
static const lm_format *codes_of(const lm_import *m, const lm_st_tensor *t,
                                 const lm_model_tensor *s)
{
    const lm_format *f =
        m->format_of && m->codes && lm_piece_has_codes(s) ? m->format_of(m, t) : NULL;
    return f && lm_format_interleaved(f) ? f : NULL;
}

static uint32_t file_type(const lm_import *m, const lm_match *s, const lm_gguf_recipe *r)
{
    for (size_t i = 0; lm_gguf_recipe_keeps(r) && i < s->n; i++)
        if (codes_of(m, s->from[i], &s->wanted[i]))
            return MXFP4_FILE;
    return lm_gguf_recipe_file_type(r, s->wanted, s->n, s->from);
}

static lm_code put_all(lm_gguf_plan *p, const lm_import *m, const lm_match *s,
                       const lm_gguf_recipe *r, const lm_export_opts *o, lm_err *e)
{
    lm_buf chain = { 0 };
    lm_code rc;

    put_text(p, "general.architecture", m->config.arch->gguf);
    put_text(p, "general.type", "model");
    rc = put_name(p, m, o->name, e);
    lm_gguf_put_u32(p, "general.file_type", file_type(m, s, r));
    lm_gguf_put_u32(p, "general.quantization_version", 2);
    if (!rc)
        rc = lm_gguf_put_config(p, m, e);
    if (!rc)
        rc = lm_gguf_put_vocab(p, m, e);
    if (!rc && o->originals)
        rc = put_originals(p, m, s, e);
    if (!rc)
        rc = lm_export_history(m, o, &chain, e);
    if (!rc && o->imatrix)
        put_importance(p, o);
    if (!rc && chain.len)
        lm_gguf_put_str(p, LM_HISTORY_KEY, chain.data, chain.len);
    if (!rc && m->seq_len)
        put_text(p, LM_SEQ_KEY, m->seq_len);
    lm_buf_fini(&chain);
    return rc;
}

/* ---- Tensors ---- */

/* The tensors of the file in their order, each by its first required tensor: the experts of a layer are one, and one
 * tensor may be two. */
typedef struct {
    size_t *first, n, cap;
    int *piece; /* -1: the whole */
    size_t cap_pieces;
    bool scattered; /* the source has experts in another order */
} file_order;

static int64_t part_count(const lm_match *s, size_t first)
{
    return lm_part_is_expert(s->wanted[first].part) ? s->wanted[first].experts : 1;
}

static lm_code add_order(file_order *p, size_t first, int piece, lm_err *e)
{
    if (lm_grow(&p->first, &p->cap, p->n + 1, sizeof *p->first, "list of tensors", e) ||
        lm_grow(&p->piece, &p->cap_pieces, p->n + 1, sizeof *p->piece, "list of tensors", e))
        return e->code;
    p->first[p->n] = first;
    p->piece[p->n++] = piece;
    return LM_OK;
}

/* In the order in which the source has the first of each. */
static lm_code make_order(const lm_import *m, const lm_match *s, file_order *p, lm_err *e)
{
    bool *begun = NULL;
    lm_code rc = lm_alloc_n(&begun, s->n, sizeof *begun, "list of tensors", e);

    for (size_t i = 0; !rc && i < lm_st_plan_count(m->plan); i++) {
        if (s->wanted_of[i] < 0)
            continue;
        size_t at = (size_t)s->wanted_of[i], first = at - (size_t)s->wanted[at].expert;
        p->scattered |= s->from[at] != s->from[first] + s->wanted[at].expert;
        const int pieces = lm_pieces(&m->config, &s->wanted[first]);
        for (int k = pieces ? 0 : -1; !rc && !begun[first] && k < pieces; k++)
            rc = add_order(p, first, k, e);
        p->scattered |= pieces > 1; /* it is read twice */
        begun[first] = true;
    }
    lm_free(begun);
    return rc;
}

/* The type of a tensor's numbers in the source; F32 where experts differ. */
static lm_dtype part_dtype(const lm_match *s, size_t first)
{
    lm_dtype d = s->from[first]->dtype;

    for (int64_t k = 1; k < part_count(s, first); k++)
        d = s->from[first + (size_t)k]->dtype == d ? d : LM_DTYPE_F32;
    return d;
}

/* The head of a tied model is the embedding; a file that has both must have them equal. */
static lm_code check_tied(lm_import *m, const lm_match *s, lm_err *e)
{
    const lm_st_tensor *head = NULL, *embed = s->from[0];
    const void *a, *b;
    void *copy = NULL;
    bool same = false;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < lm_st_plan_count(m->plan); i++)
        if (s->wanted_of[i] == LM_TENSOR_TIED && lm_st_plan_at(m->plan, i)->ndim == embed->ndim)
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
        rc = lm_fail(e, LM_EUSAGE, m->path, "set \"tie_word_embeddings\" to false, or leave it out",
                     "the model is tied, but '%s' is not '%s'", head->name, embed->name);
    return rc;
}

/* Parts that GGUF has not are left out. */
static lm_code leave_parts(const lm_import *m, lm_match *s, lm_err *e)
{
    int64_t *now = NULL;
    size_t n = 0;
    if (lm_alloc_n(&now, s->n, sizeof *now, "list of tensors", e))
        return e->code;
    for (size_t k = 0; k < s->n; k++) {
        now[k] = lm_part_in_gguf(m->config.arch, s->wanted[k].part) ? (int64_t)n : LM_TENSOR_LEFT;
        if (now[k] < 0)
            continue;
        s->wanted[n] = s->wanted[k];
        s->from[n++] = s->from[k];
    }
    for (size_t i = 0; i < lm_st_plan_count(m->plan); i++)
        if (s->wanted_of[i] >= 0)
            s->wanted_of[i] = now[s->wanted_of[i]];
    s->n = n;
    lm_free(now);
    return LM_OK;
}

/* What is left out: buffers, layers that predict tokens further on, noise of routers, heads. */
typedef enum { IS_BUFFER, IS_FURTHER, IS_NOISE, IS_HEAD, LEFT_OUT } left_out;

static left_out kind_of(const lm_import *m, const char *name, int64_t wanted)
{
    return lm_arch_is_noise(m->config.arch, name)    ? IS_NOISE
           : wanted == LM_TENSOR_LEFT                ? IS_HEAD
           : lm_config_passes_over(&m->config, name) ? IS_FURTHER
                                                     : IS_BUFFER;
}

/* Say of the first tensor of a kind that is left out, and of how many more. */
static void say_left_out(const lm_import *m, const lm_match *s, left_out kind)
{
    static const char *const why[LEFT_OUT] = {
        [IS_BUFFER] = "every reader recomputes this buffer",
        [IS_FURTHER] = "modules that predict tokens further on are not written to GGUF",
        [IS_NOISE] = "noise of routers, which serves training alone, is not written to GGUF",
        [IS_HEAD] = "GGUF has no head of such a model",
    };
    const lm_st_tensor *first = NULL;
    size_t n = 0;
    char more[40] = "";

    for (size_t i = 0; i < lm_st_plan_count(m->plan); i++) {
        const lm_st_tensor *t = lm_st_plan_at(m->plan, i);
        const int64_t to = s->wanted_of[i];
        const bool one = to == LM_TENSOR_IGNORED || to == LM_TENSOR_LEFT;
        if (one && kind_of(m, t->name, to) == kind && !n++)
            first = t;
    }
    if (n > 1)
        snprintf(more, sizeof more, " and %zu more", n - 1);
    if (first)
        lm_log(m->sink, kind == IS_BUFFER ? LM_LOG_INFO : LM_LOG_WARN, "%s: '%s'%s: left out: %s",
               m->path, first->name, more, why[kind]);
}

/* Report tensors that did not get the requested type. */
typedef struct {
    const lm_model_tensor *first;
    uint32_t type; /* of it */
    size_t n;
} misfits;

static void say_misfits(const lm_import *m, const misfits *f, const char *asked)
{
    const lm_model_tensor *s = f->first;
    char more[40] = "";
    int64_t dim[2];

    if (!s)
        return;
    lm_model_tensor_gguf_dim(s, dim);
    if (f->n > 1)
        snprintf(more, sizeof more, " and %zu more", f->n - 1);
    lm_log(m->sink, LM_LOG_WARN,
           "%s: '%s'%s: rows of %" PRId64 " numbers do not fit %s, %s instead", m->path, s->gguf,
           more, dim[1], asked, lm_format_show(lm_format_of_gguf(f->type)));
}

/* Warn of tensors that are quantised a second time: errors add up. */
static void say_twice(const lm_import *m, const lm_gguf_plan *p, const lm_match *s,
                      const file_order *b)
{
    const lm_st_tensor *first = NULL;
    const lm_gguf_tensor *to = NULL;
    size_t n = 0;
    char more[40] = "";

    for (size_t i = 0; m->format_of && i < b->n && i < lm_gguf_plan_count(p); i++) {
        const lm_st_tensor *t = s->from[b->first[i]];
        const lm_gguf_tensor *want = lm_gguf_plan_at(p, i);
        if (!lm_format_interleaved(m->format_of(m, t)) ||
            m->format_of(m, t) == lm_format_of_gguf(want->type) ||
            !lm_format_interleaved(lm_format_of_gguf(want->type)) || n++)
            continue;
        first = t;
        to = want;
    }
    if (!first)
        return;
    if (n > 1)
        snprintf(more, sizeof more, " and %zu more", n - 1);
    lm_log(
        m->sink, LM_LOG_WARN,
        "%s: '%s'%s: quantised twice, %s decoded to %s, then to %s: better convert the original of "
        "this file",
        m->path, to->name, more, m->format_of(m, first)->name, first->dtype_name,
        lm_format_of_gguf(to->type)->name);
}

/* True if there are divisors of the rotary frequencies, LM_GGUF_ROPE_FREQS. */
static bool has_factors(const lm_config *c)
{
    return c->ropes && c->rope[0].type == LM_ROPE_LLAMA3;
}

static lm_gguf_piece piece_of(const lm_import *m, const lm_model_tensor *s, int k)
{
    if (k >= 0)
        return lm_piece_of(&m->config, s, k);
    return (lm_gguf_piece){ .outer = 0 };
}

/* s, or a piece of it as a matrix. */
static lm_model_tensor tensor_as(const lm_model_tensor *s, const lm_gguf_piece *p)
{
    lm_model_tensor t = *s;
    if (!p)
        return t;
    snprintf(t.gguf, sizeof t.gguf, "%s", p->name);
    t.ndim = 2;
    t.dim[0] = p->outer * p->inner;
    t.dim[1] = p->cols;
    return t;
}

static void plan_tensors(lm_gguf_plan *p, const lm_import *m, const lm_match *s,
                         const file_order *b, const lm_gguf_rule *rule, const char *asked)
{
    misfits blocks = { 0 }, plain = { 0 };
    int64_t dim[3];
    bool fell_back;

    for (size_t i = 0; i < b->n; i++) {
        const lm_model_tensor *want = &s->wanted[b->first[i]];
        const lm_gguf_piece piece = piece_of(m, want, b->piece[i]);
        const lm_model_tensor as = tensor_as(want, b->piece[i] < 0 ? NULL : &piece);
        const lm_format *codes = codes_of(m, s->from[b->first[i]], want);
        uint32_t type =
            lm_gguf_recipe_type(rule, &m->config, &as, part_dtype(s, b->first[i]), &fell_back);
        misfits *f = lm_format_interleaved(lm_format_of_gguf(type)) ? &blocks : &plain;
        if (codes && lm_gguf_recipe_keeps(rule->recipe))
            type = codes->gguf;
        if (fell_back && !f->n++) {
            f->first = want;
            f->type = type;
        }
        int ndim =
            b->piece[i] < 0 ? lm_model_tensor_gguf_shape(want, dim) : lm_piece_shape(&piece, dim);
        lm_gguf_put_tensor(p, as.gguf, type, ndim, dim);
    }
    for (int kind = 0; kind < LEFT_OUT; kind++)
        say_left_out(m, s, (left_out)kind);
    say_misfits(m, &blocks, asked);
    say_misfits(m, &plain, asked);
    say_twice(m, p, s, b);
    const int64_t pairs = m->config.rope[0].dim / 2;
    if (has_factors(&m->config))
        lm_gguf_put_tensor(p, LM_GGUF_ROPE_FREQS, LM_GGUF_TYPE_F32, 1, &pairs);
}

/* Warn of importance of tensors that the model lacks (except a head that may be tied): it belongs
 * to a model with more layers. */
static void check_others(const lm_import *m, const lm_gguf_plan *p, const lm_imatrix *im)
{
    size_t n, others = lm_imatrix_count(im);

    for (size_t i = 0; i < lm_gguf_plan_count(p); i++)
        others -= lm_imatrix_find(im, lm_gguf_plan_at(p, i)->name, &n) != NULL;
    if (others > 1)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: the importance matrix has %zu tensors that the model lacks: it was made for "
               "another model",
               m->path, others);
}

/* True if t is this weight outside the layers. */
static bool is_weight(const lm_import *m, const lm_gguf_tensor *t, lm_part part)
{
    char name[LM_TENSOR_NAME];
    return !strcmp(t->name, lm_tensor_gguf_name(m->config.arch, part, -1, false, name));
}

/* Check that every matrix that becomes blocks has importance for each of its columns. */
static lm_code check_importance(const lm_import *m, const lm_gguf_plan *p, const lm_imatrix *im,
                                lm_err *e)
{
    const char *first = NULL;
    char more[40] = "";
    size_t missing = 0;

    for (size_t i = 0; i < lm_gguf_plan_count(p); i++) {
        const lm_gguf_tensor *t = lm_gguf_plan_at(p, i);
        size_t n = 0;
        if (!lm_format_weighs(lm_format_of_gguf(t->type)))
            continue;
        if (!lm_imatrix_find(im, t->name, &n)) {
            bool often = is_weight(m, t, LM_PART_EMBED) || is_weight(m, t, LM_PART_OUTPUT);
            if (!often && !missing++)
                first = t->name;
        } else {
            int64_t cols =
                t->dim[t->ndim - 1] * (t->ndim == 3 ? t->dim[0] : 1); /* of all experts */
            if (n != (size_t)cols)
                return lm_fail(e, LM_EUSAGE, "importance matrix", "give one made for this model",
                               "'%s' has %zu column%s in the importance matrix, %" PRId64
                               " in the model",
                               t->name, n, lm_plural(n), cols);
        }
    }
    if (missing > 1)
        snprintf(more, sizeof more, " and %zu more", missing - 1);
    if (missing)
        lm_log(m->sink, LM_LOG_WARN, "%s: '%s'%s: not in the importance matrix, quantised without",
               m->path, first, more);
    check_others(m, p, im);
    return LM_OK;
}

typedef struct {
    lm_import *m;
    const lm_match *s;
    const file_order *order;
    const lm_imatrix *imatrix; /* NULL: no importance */
    lm_gguf_writer *w;
    void *cast, *part;
    size_t cap, cap_part;
} writer;

/* Rows in the type of the file, and their bytes. */
static lm_code write_rows(writer *w, lm_rows *r, const void *data, const float *importance,
                          size_t bytes, lm_err *e)
{
    lm_code rc = lm_grow(&w->cast, &w->cap, bytes, 1, "a tensor", e);
    r->src = data;
    r->dst = w->cast;
    r->importance = importance;
    rc = rc ? rc : lm_rows_convert(r, w->m->par, e);
    return rc ? rc : lm_gguf_write(w->w, w->cast, bytes, e);
}

/* Codes of the source as they are, their rows in the order of the piece. */
static lm_code write_codes(writer *w, const lm_gguf_piece *p, const lm_st_tensor *t, lm_err *e)
{
    const lm_gguf_tensor *want = lm_gguf_next(w->w);
    const size_t row = want->bytes / (size_t)(p->outer * p->inner);
    const size_t all = row * (size_t)(p->outer * p->step);
    if (lm_grow(&w->cast, &w->cap, all, 1, "codes of a tensor", e) ||
        lm_grow(&w->part, &w->cap_part, want->bytes, 1, "codes of a tensor", e) ||
        w->m->codes(w->m, t, w->cast, e))
        return e->code;
    lm_piece_move_codes(
        &(lm_piece_job){ .piece = p, .whole = w->cast, .part = w->part, .out = true }, row);
    return lm_gguf_write(w->w, w->part, want->bytes, e);
}

/* One of the tensors that a tensor becomes. */
static lm_code write_piece(writer *w, const lm_model_tensor *s, int k, const lm_st_tensor *t,
                           lm_err *e)
{
    const lm_gguf_tensor *want = lm_gguf_next(w->w);
    const lm_gguf_piece p = piece_of(w->m, s, k);
    const lm_model_tensor as = tensor_as(s, &p);
    const lm_format *from = lm_format_of_dtype(t->dtype), *to = lm_format_of_gguf(want->type);
    const size_t size = lm_dtype_size(t->dtype);
    const void *data = NULL;
    size_t n;

    if (codes_of(w->m, t, s) == to && lm_format_interleaved(to))
        return write_codes(w, &p, t, e);
    if (lm_grow(&w->part, &w->cap_part, (size_t)(as.dim[0] * p.cols) * size, 1, "a tensor", e) ||
        w->m->load(w->m, t, &data, e))
        return e->code;
    lm_piece_move(&(lm_piece_job){ .piece = &p,
                                   .size = size,
                                   .whole = (void *)(uintptr_t)data,
                                   .part = w->part,
                                   .out = true },
                  w->m->par);
    if (from == to)
        return lm_gguf_write(w->w, w->part, want->bytes, e);
    const float *importance = w->imatrix ? lm_imatrix_find(w->imatrix, want->name, &n) : NULL;
    const size_t matrix = (size_t)(p.inner * p.cols) * size, bytes = want->bytes / (size_t)p.outer;
    lm_code rc = LM_OK;
    for (int64_t o = 0; !rc && o < p.outer; o++) {
        lm_rows r = { .name = s->hf, .from = from, .to = to, .rows = p.inner, .cols = p.cols };
        rc = write_rows(w, &r, (const char *)w->part + (size_t)o * matrix,
                        importance ? importance + o * p.cols : NULL, bytes, e);
    }
    return rc;
}

/* A tensor, or one expert's part of it. */
static lm_code write_tensor(writer *w, const lm_model_tensor *s, const lm_st_tensor *t, lm_err *e)
{
    const lm_gguf_tensor *want = lm_gguf_next(w->w);
    const size_t bytes = want->bytes / (s->experts ? (size_t)s->experts : 1);
    const float *importance;
    const void *data;
    size_t n;
    lm_rows r;
    lm_code rc = w->m->load(w->m, t, &data, e);

    if (!rc && lm_rows_of_tensor(s, true, lm_format_of_dtype(t->dtype),
                                 lm_format_of_gguf(want->type), &r)) {
        importance = w->imatrix ? lm_imatrix_find(w->imatrix, want->name, &n) : NULL;
        return write_rows(w, &r, data, importance ? importance + s->expert * s->dim[1] : NULL,
                          bytes, e);
    }
    return rc ? rc : lm_gguf_write(w->w, data, bytes, e);
}

static lm_code write_rope(writer *w, lm_err *e)
{
    const lm_rope_config *r = &w->m->config.rope[0];
    float *f = NULL;
    lm_code rc = lm_alloc_n(&f, (size_t)r->dim / 2, sizeof *f, "rotary factors", e);

    if (!rc) {
        lm_gguf_rope_factors(r, f);
        rc = lm_gguf_write(w->w, f, (size_t)r->dim / 2 * sizeof *f, e);
    }
    lm_free(f);
    return rc;
}

static lm_code write_tensors(writer *w, uint64_t total, lm_err *e)
{
    double done = 0;
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < w->order->n; i++)
        for (int64_t k = 0; !rc && !lm_stopping() && k < part_count(w->s, w->order->first[i]);
             k++) {
            size_t at = w->order->first[i] + (size_t)k;
            const lm_st_tensor *t = w->s->from[at];
            const int piece = w->order->piece[i];
            rc = piece < 0 ? write_tensor(w, &w->s->wanted[at], t, e)
                           : write_piece(w, &w->s->wanted[at], piece, t, e);
            done += (double)t->bytes;
            lm_progress(w->m->sink, "convert", done, (double)total, "bytes", t->name);
        }
    if (!rc && !lm_stopping() && has_factors(&w->m->config))
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
    lm_gguf_rule rule = { .pure = o->pure, .importance = o->imatrix != NULL };
    lm_match s = { 0 };
    file_order order = { 0 };
    lm_gguf_plan *plan = NULL;
    lm_out *out = NULL;
    writer w = { .m = m, .s = &s, .order = &order, .imatrix = o->imatrix };
    lm_code rc = lm_gguf_recipe_find(o->type, &rule.recipe, e);

    if (!rc && !*m->config.arch->gguf)
        rc = lm_fail(e, LM_EUSAGE, m->path, NULL, "models of type %s are not converted to GGUF",
                     lm_arch_name(m->config.arch));
    if (!rc)
        rc = lm_match_make(m, &s, e);
    if (!rc)
        rc = leave_parts(m, &s, e);
    if (!rc)
        rc = check_tied(m, &s, e);
    if (!rc)
        rc = make_order(m, &s, &order, e);
    if (!rc && order.scattered && m->spool)
        rc = m->spool(m, e);
    if (!rc)
        rc = lm_gguf_plan_new(&plan, e);
    if (!rc)
        rc = put_all(plan, m, &s, rule.recipe, o, e);
    if (!rc) {
        plan_tensors(plan, m, &s, &order, &rule, o->type);
        rc = o->imatrix ? check_importance(m, plan, o->imatrix, e) : LM_OK;
    }
    if (!rc)
        rc = lm_export_open(path, o->force, plan_bytes(plan), &out, e);
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
    lm_free(w.part);
    lm_gguf_plan_free(plan);
    lm_free(order.first);
    lm_free(order.piece);
    lm_match_fini(&s);
    return rc;
}
