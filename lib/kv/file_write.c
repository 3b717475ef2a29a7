/* SPDX-License-Identifier: Apache-2.0 */
/* file_write.c -- writes kv-cache(5).  Checksums precede the data, so all coded bytes are made first. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "format/provenance.h"
#include "kv/file_impl.h"

/* The tensors in their order, with their bytes. */
typedef struct {
    kv_tensor what;
    const void *data; /* NULL: in `coded` */
    size_t bytes;
    lm_buf coded;
} piece;

typedef struct {
    const lm_kv_about *a;
    const lm_kv_content *c;
    piece *v;
    size_t n, cap;
} pieces;

static lm_code add_piece(pieces *s, kv_tensor what, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = lm_grow(&s->v, &s->cap, s->n + 1, sizeof *s->v, "tensors of a cache", e);
    if (!rc)
        s->v[s->n++] = (piece){ .what = what, .data = data, .bytes = bytes };
    return rc;
}

static const void *piece_data(const piece *p)
{
    return p->data ? p->data : p->coded.data;
}

static void free_pieces(pieces *s)
{
    for (size_t i = 0; i < s->n; i++)
        lm_buf_fini(&s->v[i].coded);
    lm_free(s->v);
}

/* ---- What is written ---- */

static lm_code add_rows(pieces *s, lm_err *e)
{
    lm_code rc = LM_OK;
    for (int64_t i = 0; i < kv_parts(s->a) && !rc; i++) {
        size_t bytes = lm_kv_about_bytes(s->a, i / 2);
        kv_tensor what = { .kind = KV_ROWS, .part = i };
        char name[KV_NAME];
        kv_tensor_name(&what, name);
        if (!kv_all_finite(s->a->act, s->c->data[i], bytes / lm_dtype_size(s->a->act)))
            return lm_fail(e, LM_ENUMERIC, name, NULL, "it has NaN or infinite numbers");
        rc = add_piece(s, what, s->c->data[i], bytes, e);
    }
    return rc;
}

/* The tables and chunks of a level. */
static lm_code code_level(pieces *s, int level, lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    lm_cachegen_part *part = NULL;
    lm_cachegen *g = NULL;
    const lm_cachegen_rows rows = { s->a->act, s->a->tokens, s->c->data };
    lm_code rc = lm_alloc_n(&part, (size_t)kv_parts(s->a), sizeof *part, "coding a cache", e);
    if (rc)
        return rc;
    kv_level_parts(s->a, level, part);
    rc = lm_cachegen_learn(part, kv_parts(s->a), &rows, par, &g, e);
    rc = rc ? rc : add_piece(s, (kv_tensor){ .kind = KV_TABLES, .level = level }, NULL, 0, e);
    rc = rc ? rc : lm_cachegen_write(g, &s->v[s->n - 1].coded, e);
    for (int64_t c = 0; c < lm_cachegen_chunks(s->a->tokens) && !rc; c++) {
        rc = add_piece(s, (kv_tensor){ .kind = KV_CHUNK, .level = level, .chunk = c }, NULL, 0, e);
        rc = rc ? rc : lm_cachegen_encode(g, &rows, c, cpu, par, &s->v[s->n - 1].coded, e);
    }
    lm_cachegen_free(g);
    lm_free(part);
    return rc;
}

/* Pieces of levels one after another, to: all tables, then for each chunk its levels. */
static lm_code order_levels(pieces *s, size_t first, int levels, lm_err *e)
{
    size_t each = (s->n - first) / (size_t)levels, to = first;
    piece *sorted = NULL;
    lm_code rc = lm_alloc_n(&sorted, s->n, sizeof *sorted, "tensors of a cache", e);
    if (rc)
        return rc;
    memcpy(sorted, s->v, first * sizeof *sorted);
    for (size_t i = 0; i < each; i++)
        for (size_t l = 0; l < (size_t)levels; l++)
            sorted[to++] = s->v[first + l * each + i];
    lm_free(s->v);
    s->v = sorted;
    s->cap = s->n;
    return LM_OK;
}

static lm_code code_levels(pieces *s, lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    size_t first = s->n;
    int levels = 0;
    lm_code rc = LM_OK;
    if (s->c->levels >> LM_CACHEGEN_LEVELS)
        return lm_fail(e, LM_EUSAGE, "", NULL, "levels 0 to %d are possible",
                       LM_CACHEGEN_LEVELS - 1);
    for (int l = 0; l < LM_CACHEGEN_LEVELS && !rc; l++)
        if (s->c->levels >> l & 1) {
            rc = code_level(s, l, cpu, par, e);
            levels++;
        }
    for (size_t i = first; i < s->n; i++)
        s->v[i].bytes = s->v[i].coded.len;
    return rc ? rc : order_levels(s, first, levels, e);
}

/* ---- The header ---- */

static lm_code meta_number(lm_st_plan *p, const char *key, int64_t v, lm_err *e)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, v);
    return lm_st_plan_meta(p, key, text, e);
}

static lm_code meta_list(lm_st_plan *p, const char *key, const int64_t *v, int64_t n, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw w;
    lm_jw_begin(&w, &text, 0, e);
    lm_jw_arr(&w, NULL);
    for (int64_t i = 0; i < n; i++)
        lm_jw_int(&w, NULL, v[i]);
    lm_jw_close_arr(&w);
    lm_code rc = lm_jw_end(&w);
    rc = rc ? rc : lm_st_plan_meta(p, key, text.data, e);
    lm_buf_fini(&text);
    return rc;
}

static lm_code meta_hashes(lm_st_plan *p, const pieces *s, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw w;
    lm_jw_begin(&w, &text, 0, e);
    lm_jw_obj(&w, NULL);
    for (size_t i = 0; i < s->n; i++) {
        char name[KV_NAME], hex[17];
        kv_tensor_name(&s->v[i].what, name);
        snprintf(hex, sizeof hex, "%016" PRIx64, lm_hash64(piece_data(&s->v[i]), s->v[i].bytes, 0));
        lm_jw_str(&w, name, hex);
    }
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    rc = rc ? rc : lm_st_plan_meta(p, "xxh3", text.data, e);
    lm_buf_fini(&text);
    return rc;
}

static lm_code make_meta(lm_st_plan *p, const pieces *s, lm_err *e)
{
    const lm_kv_about *a = s->a;
    lm_code rc = lm_st_plan_meta(p, "format", "kv-cache", e);
    rc = rc ? rc : lm_st_plan_meta(p, "version", "1", e);
    rc = rc ? rc : lm_st_plan_meta(p, "coding", s->c->levels ? "cachegen" : "plain", e);
    rc = rc ? rc : lm_st_plan_meta(p, "model_type", a->model_type, e);
    rc = rc ? rc : lm_st_plan_meta(p, "weights", a->weights, e);
    rc = rc ? rc : lm_st_plan_meta(p, "rope", a->rope, e);
    rc = rc ? rc : lm_st_plan_meta(p, "k_state", "post_rope", e);
    rc = rc ? rc : meta_number(p, "layers", a->layers, e);
    rc = rc ? rc : meta_list(p, "kv_heads", a->kv_heads, a->layers, e);
    rc = rc ? rc : meta_list(p, "head_dim", a->head_dim, a->layers, e);
    rc = rc ? rc : meta_number(p, "tokens", a->tokens, e);
    rc = rc ? rc : lm_st_plan_meta(p, "act", lm_dtype_name(a->act), e);
    rc = rc ? rc : meta_hashes(p, s, e);
    return rc || !a->history ? rc : lm_st_plan_meta(p, LM_HISTORY_KEY, a->history, e);
}

static lm_code plan_piece(lm_st_plan *p, const lm_kv_about *a, const piece *q, lm_err *e)
{
    int64_t bytes = (int64_t)q->bytes, layer = q->what.part / 2;
    char name[KV_NAME];
    kv_tensor_name(&q->what, name);
    if (q->what.kind == KV_IDS || q->what.kind == KV_POSITIONS)
        return lm_st_plan_add(p, name, LM_DTYPE_I32, 1, &a->tokens, e);
    if (q->what.kind != KV_ROWS)
        return lm_st_plan_add(p, name, LM_DTYPE_U8, 1, &bytes, e);
    int64_t dim[] = { a->kv_heads[layer], a->tokens, a->head_dim[layer] };
    return lm_st_plan_add(p, name, a->act, 3, dim, e);
}

static lm_code write_pieces(const lm_kv_out *to, const pieces *s, const lm_st_plan *p, lm_err *e)
{
    lm_st_writer *w = NULL;
    lm_code rc = to->path ? lm_st_create(to->path, to->force, p, &w, e)
                          : lm_st_create_on(to->write, to->ctx, to->where, p, &w, e);
    for (size_t i = 0; i < s->n && !rc; i++)
        rc = lm_st_write(w, piece_data(&s->v[i]), s->v[i].bytes, e);
    if (!rc)
        return lm_st_commit(w, e);
    lm_st_drop(w);
    return rc;
}

lm_code lm_kv_file_write(const lm_kv_out *to, const lm_kv_about *a, const lm_kv_content *c,
                         lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    pieces s = { .a = a, .c = c };
    lm_st_plan *p = NULL;
    size_t ids = 4 * (size_t)a->tokens;
    lm_code rc = kv_check_about(a, "", LM_EUSAGE, e);
    rc = rc ? rc : add_piece(&s, (kv_tensor){ .kind = KV_IDS }, c->ids, ids, e);
    rc = rc ? rc : add_piece(&s, (kv_tensor){ .kind = KV_POSITIONS }, c->positions, ids, e);
    if (!rc)
        rc = c->levels ? code_levels(&s, cpu, par, e) : add_rows(&s, e);
    rc = rc ? rc : lm_st_plan_new(&p, e);
    for (size_t i = 0; i < s.n && !rc; i++)
        rc = plan_piece(p, a, &s.v[i], e);
    rc = rc ? rc : make_meta(p, &s, e);
    rc = rc ? rc : write_pieces(to, &s, p, e);
    lm_st_plan_free(p);
    free_pieces(&s);
    return rc;
}
