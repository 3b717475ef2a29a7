/* SPDX-License-Identifier: Apache-2.0 */
/* file_write.c -- writes kv-cache(5).  Checksums precede the data, so all coded bytes are made first. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "format/provenance.h"
#include "kv/file_impl.h"
#include "numeric/format.h"

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

static lm_code add_section(pieces *s, int64_t part, lm_kv_section i, lm_err *e)
{
    const lm_kv_shape shape = lm_kv_about_shape(s->a, part);
    const lm_kv_part *p = &s->c->part[part];
    const kv_tensor what = kv_section_of(s->a, part, i);
    lm_kv_section_size z;
    char name[KV_NAME];
    if (lm_kv_section_size_of(&shape, i, &z, e) || !z.bytes)
        return e->code;
    size_t bytes = z.bytes;
    if (i == LM_KV_SP_INDEX || i == LM_KV_SP_VALUE)
        bytes = 2 * (size_t)lm_kv_part_outliers(&shape, p);
    kv_tensor_name(&what, name);
    if (lm_kv_section_is_float(i) &&
        !kv_all_finite(z.dtype, p->data[i], bytes / lm_dtype_size(z.dtype)))
        return lm_fail(e, LM_ENUMERIC, name, NULL, "it has NaN or infinite numbers");
    return add_piece(s, what, p->data[i], bytes, e);
}

static lm_code add_state(pieces *s, int64_t layer, kv_tensor_kind kind, lm_err *e)
{
    const kv_tensor what = { .kind = kind, .part = 2 * layer };
    const int64_t n = kv_state_numbers(s->a, kind, layer);
    const lm_dtype type = kind == KV_STATE ? LM_DTYPE_F32 : s->a->act;
    char name[KV_NAME];
    if (!n)
        return LM_OK;
    const void *data = kind == KV_STATE ? (void *)s->c->state[layer] : s->c->conv[layer];
    kv_tensor_name(&what, name);
    if (!kv_all_finite(type, data, (size_t)n))
        return lm_fail(e, LM_ENUMERIC, name, NULL, "it has NaN or infinite numbers");
    return add_piece(s, what, data, lm_plain_bytes(type, n), e);
}

static lm_code add_parts(pieces *s, lm_err *e)
{
    lm_code rc = LM_OK;
    for (int64_t i = 0; i < kv_parts(s->a) * LM_KV_SECTIONS && !rc; i++)
        rc = add_section(s, i / LM_KV_SECTIONS, (lm_kv_section)(i % LM_KV_SECTIONS), e);
    for (int64_t i = 0; i < 2 * s->a->layers && !rc; i++)
        rc = add_state(s, i / 2, i % 2 ? KV_CONV : KV_STATE, e);
    return rc;
}

static lm_code add_positions(pieces *s, lm_err *e)
{
    const lm_kv_about *a = s->a;
    lm_code rc = LM_OK;
    if (!a->rows)
        return add_piece(s, (kv_tensor){ .kind = KV_POSITIONS }, s->c->positions,
                         4 * (size_t)a->tokens, e);
    for (int64_t i = 0; i < a->layers && !rc; i++)
        rc = add_piece(s, (kv_tensor){ .kind = KV_AT, .part = 2 * i }, s->c->at[i],
                       4 * (size_t)(a->kv_heads[i] * a->rows[i]), e);
    for (int64_t i = 0; i < a->layers && !rc && a->ordered; i++)
        rc = add_piece(s, (kv_tensor){ .kind = KV_ORDER, .part = 2 * i }, s->c->order[i],
                       4 * (size_t)(a->kv_heads[i] * a->rows[i]), e);
    for (int64_t i = 0; i < a->layers && !rc && a->weighed; i++)
        rc = add_piece(s, (kv_tensor){ .kind = KV_MASS, .part = 2 * i }, s->c->mass[i],
                       4 * (size_t)(a->kv_heads[i] * a->rows[i]), e);
    return rc;
}

/* The tables and chunks of a level. */
static lm_code code_level(pieces *s, void *const *data, int level, lm_cpu_level cpu, lm_par *par,
                          lm_err *e)
{
    lm_cachegen_part *part = NULL;
    lm_cachegen *g = NULL;
    const lm_cachegen_rows rows = { s->a->act, s->a->tokens, data };
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

/* The tables and chunks of a level as they are in another file; false: it has not kept them. */
static bool is_kept(const lm_kv_file *f, int level)
{
    const kv_kept *k = f ? f->kept[level] : NULL;
    bool all = k != NULL;
    for (int64_t i = 0; all && i <= lm_cachegen_chunks(f->about.tokens); i++)
        all = k[i].data != NULL;
    return all;
}

static lm_code copy_level(pieces *s, const lm_kv_file *f, int level, lm_err *e)
{
    int64_t chunks = lm_cachegen_chunks(f->about.tokens);
    lm_code rc = LM_OK;
    if (f->about.tokens != s->a->tokens || f->about.layers != s->a->layers)
        return lm_fail(e, LM_EUSAGE, f->where, NULL, "its levels are those of another cache");
    for (int64_t i = -1; i < chunks && !rc; i++) {
        kv_tensor what = { .kind = i < 0 ? KV_TABLES : KV_CHUNK, .level = level };
        what.chunk = i < 0 ? 0 : i;
        const kv_kept *k = kv_kept_of(f, &what);
        rc = add_piece(s, what, k->data, k->bytes, e);
    }
    return rc;
}

static lm_code check_levels(const lm_kv_about *a, unsigned levels, lm_err *e)
{
    if (levels >> LM_CACHEGEN_LEVELS)
        return lm_fail(e, LM_EUSAGE, "", NULL, "levels 0 to %d are possible",
                       LM_CACHEGEN_LEVELS - 1);
    if (a->latent || a->state)
        return lm_fail(e, LM_EUSAGE, "", "code it with another method",
                       "levels are of keys and values, not of %s",
                       a->latent ? "latents" : "states");
    if (a->form || a->rows)
        return lm_fail(e, LM_EUSAGE, "", "decode it first",
                       "a cache with %s cannot be coded in levels",
                       a->form ? "codes" : "dropped tokens");
    return LM_OK;
}

static lm_code add_levels(pieces *s, unsigned levels, const lm_kv_file *from, lm_cpu_level cpu,
                          lm_par *par, lm_err *e)
{
    size_t first = s->n;
    int n = 0;
    void **data = NULL;
    lm_code rc = check_levels(s->a, levels, e);
    rc = rc ? rc : lm_alloc_n(&data, (size_t)kv_parts(s->a), sizeof *data, "coding a cache", e);
    for (int64_t i = 0; i < kv_parts(s->a) && !rc; i++)
        data[i] = s->c->part[i].data[LM_KV_PLAIN];
    for (int l = 0; l < LM_CACHEGEN_LEVELS && !rc; l++)
        if (levels >> l & 1) {
            rc = is_kept(from, l) ? copy_level(s, from, l, e) : code_level(s, data, l, cpu, par, e);
            n++;
        }
    for (size_t i = first; i < s->n; i++)
        s->v[i].bytes = s->v[i].data ? s->v[i].bytes : s->v[i].coded.len;
    lm_free(data);
    return rc ? rc : order_levels(s, first, n, e);
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

static void add_hash(lm_jw *w, const char *name, const void *data, size_t bytes)
{
    char hex[17];
    snprintf(hex, sizeof hex, "%016" PRIx64, lm_hash64(data, bytes, 0));
    lm_jw_str(w, name, hex);
}

static lm_code meta_hashes(lm_st_plan *p, const pieces *s, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw w;
    lm_jw_begin(&w, &text, 0, e);
    lm_jw_obj(&w, NULL);
    for (size_t i = 0; i < s->n; i++) {
        char name[KV_NAME];
        kv_tensor_name(&s->v[i].what, name);
        add_hash(&w, name, piece_data(&s->v[i]), s->v[i].bytes);
    }
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    rc = rc ? rc : lm_st_plan_meta(p, "xxh3", text.data, e);
    lm_buf_fini(&text);
    return rc;
}

static bool plan_meta_at(const void *of, size_t i, const char **key, const char **value)
{
    return lm_st_plan_meta_at(of, i, key, value);
}

static const lm_st_tensor *plan_tensor_at(const void *of, size_t i)
{
    return lm_st_plan_at(of, i);
}

/* The checksum of the header, when all else is in it. */
static lm_code meta_header(lm_st_plan *p, lm_err *e)
{
    const kv_header h = { p, plan_meta_at, plan_tensor_at, lm_st_plan_count(p) };
    char hex[33];
    lm_code rc = kv_header_digest(&h, hex, e);
    return rc ? rc : lm_st_plan_meta(p, KV_HEADER_KEY, hex, e);
}

static lm_code meta_policy(lm_st_plan *p, const lm_kv_about *a, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw w;
    lm_jw_begin(&w, &text, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "spec", a->policy);
    lm_jw_int(&w, "prompt", a->prompt);
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    rc = rc ? rc : lm_st_plan_meta(p, "policy", text.data, e);
    lm_buf_fini(&text);
    return rc;
}

static bool has_pre_rope(const lm_kv_about *a)
{
    bool any = false;
    for (int64_t i = 0; i < kv_parts(a) && a->form; i++)
        any = any || a->form[i].pre_rope;
    return any;
}

static lm_code make_meta(lm_st_plan *p, const pieces *s, unsigned levels, lm_err *e)
{
    const lm_kv_about *a = s->a;
    lm_buf forms = { 0 };
    lm_code rc = lm_st_plan_meta(p, "format", "kv-cache", e);
    rc = rc ? rc : lm_st_plan_meta(p, "version", "1", e);
    rc = rc ? rc
            : lm_st_plan_meta(p, "coding",
                              levels    ? "cachegen"
                              : a->form ? "coded"
                                        : "plain",
                              e);
    rc = rc ? rc : lm_st_plan_meta(p, "model_type", a->model_type, e);
    rc = rc ? rc : lm_st_plan_meta(p, "weights", a->weights, e);
    rc = rc ? rc : lm_st_plan_meta(p, "config", a->config, e);
    rc = rc ? rc : lm_st_plan_meta(p, "rope", a->rope, e);
    rc = rc ? rc : lm_st_plan_meta(p, "k_state", has_pre_rope(a) ? "pre_rope" : "post_rope", e);
    rc = rc ? rc : meta_number(p, "layers", a->layers, e);
    rc = rc ? rc : meta_list(p, "kv_heads", a->kv_heads, a->layers, e);
    rc = rc ? rc : meta_list(p, "head_dim", a->head_dim, a->layers, e);
    rc = rc || !a->latent ? rc : meta_list(p, "latent", a->latent, a->layers, e);
    rc = rc || !a->state ? rc : meta_list(p, "state", a->state, a->layers, e);
    rc = rc || !a->conv ? rc : meta_list(p, "conv", a->conv, a->layers, e);
    rc = rc ? rc : meta_number(p, "tokens", a->tokens, e);
    rc = rc ? rc : lm_st_plan_meta(p, "act", lm_dtype_name(a->act), e);
    if (!rc && a->has_next)
        rc = meta_number(p, "next", a->next, e);
    if (!rc && a->rows)
        rc = meta_list(p, "rows", a->rows, a->layers, e);
    if (!rc && a->policy)
        rc = meta_policy(p, a, e);
    if (!rc && a->form)
        rc = kv_forms_write(a, &forms, e);
    if (!rc && a->form)
        rc = lm_st_plan_meta(p, "forms", forms.data, e);
    rc = rc ? rc : meta_hashes(p, s, e);
    lm_buf_fini(&forms);
    if (!rc && a->history)
        rc = lm_st_plan_meta(p, LM_HISTORY_KEY, a->history, e);
    return rc ? rc : meta_header(p, e);
}

static lm_code plan_piece(lm_st_plan *p, const lm_kv_about *a, const piece *q, lm_err *e)
{
    int64_t bytes = (int64_t)q->bytes, layer = q->what.part / 2;
    lm_kv_section_size z;
    char name[KV_NAME];
    kv_tensor_name(&q->what, name);
    if (q->what.kind == KV_IDS || q->what.kind == KV_POSITIONS)
        return lm_st_plan_add(p, name, LM_DTYPE_I32, 1, &a->tokens, e);
    if (q->what.kind == KV_AT || q->what.kind == KV_ORDER || q->what.kind == KV_MASS)
        return lm_st_plan_add(p, name, q->what.kind == KV_MASS ? LM_DTYPE_F32 : LM_DTYPE_I32, 2,
                              (int64_t[]){ a->kv_heads[layer], a->rows[layer] }, e);
    if (q->what.kind == KV_STATE || q->what.kind == KV_CONV)
        return lm_st_plan_add(p, name, q->what.kind == KV_STATE ? LM_DTYPE_F32 : a->act, 1,
                              (int64_t[]){ kv_state_numbers(a, q->what.kind, layer) }, e);
    if (q->what.kind != KV_ROWS)
        return lm_st_plan_add(p, name, LM_DTYPE_U8, 1, &bytes, e);
    const lm_kv_shape s = lm_kv_about_shape(a, q->what.part);
    if (lm_kv_section_size_of(&s, q->what.section, &z, e))
        return e->code;
    if (q->what.section == LM_KV_SP_INDEX || q->what.section == LM_KV_SP_VALUE)
        z.dim[0] = bytes / 2;
    return lm_st_plan_add(p, name, z.dtype, z.ndim, z.dim, e);
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
                         unsigned levels, lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    pieces s = { .a = a, .c = c };
    lm_st_plan *p = NULL;
    lm_code rc = kv_check_about(a, "", LM_EUSAGE, e);
    rc = rc ? rc : add_piece(&s, (kv_tensor){ .kind = KV_IDS }, c->ids, 4 * (size_t)a->tokens, e);
    rc = rc ? rc : add_positions(&s, e);
    if (!rc)
        rc = levels ? add_levels(&s, levels, to->from, cpu, par, e) : add_parts(&s, e);
    rc = rc ? rc : lm_st_plan_new(&p, e);
    for (size_t i = 0; i < s.n && !rc; i++)
        rc = plan_piece(p, a, &s.v[i], e);
    rc = rc ? rc : make_meta(p, &s, levels, e);
    for (size_t i = 0; i < s.n && to->bytes && !rc; i++)
        *to->bytes += s.v[i].bytes;
    rc = rc ? rc : write_pieces(to, &s, p, e);
    lm_st_plan_free(p);
    free_pieces(&s);
    return rc;
}
