/* SPDX-License-Identifier: Apache-2.0 */
/* table.c -- see table.h. */
#include "compress/table.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/inspect_text.h"

/* Totals of the parts of one dtype; parts other than tensors count as "other". */
typedef struct {
    const char *dtype;
    uint64_t tensors, raw, coded;
} group;

static const char *dtype_of(const lm_lmz_part *p)
{
    return p->tensor ? p->dtype : "other";
}

static lm_code sum_groups(const lm_lmz *z, group **out, size_t *n, lm_err *e)
{
    size_t cap = 0;
    *out = NULL;
    *n = 0;
    for (size_t i = 0; i < lm_lmz_parts(z); i++) {
        const lm_lmz_part *p = lm_lmz_part_at(z, i);
        size_t k = 0;
        while (k < *n && strcmp((*out)[k].dtype, dtype_of(p)))
            k++;
        if (k == *n) {
            if (lm_grow(out, &cap, *n + 1, sizeof **out, "table", e))
                return e->code;
            (*out)[(*n)++] = (group){ .dtype = dtype_of(p) };
        }
        (*out)[k].tensors++;
        (*out)[k].raw += p->raw;
        (*out)[k].coded += p->coded;
    }
    return LM_OK;
}

/* Coded bytes as a fraction of the raw bytes. */
static double ratio(uint64_t coded, uint64_t raw)
{
    return raw ? (double)coded / (double)raw : 1;
}

/* ---- text ---- */

static void add_sizes(lm_text *x, uint64_t raw, uint64_t coded)
{
    char a[32], b[32];
    lm_text_addf(x, "%12s %12s %7.1f %%", lm_show_bytes((double)raw, a),
                 lm_show_bytes((double)coded, b), 100 * ratio(coded, raw));
}

static void add_planes(lm_text *x, const lm_lmz_chunk_info *info)
{
    lm_text_addf(x, "%10s", "");
    for (int i = 0; i < info->n; i++)
        lm_text_addf(x, "  %d: %s %.1f %%", i, info->plane[i].coding,
                     100 * ratio(info->plane[i].coded, info->plane[i].raw));
    lm_text_add(x, "\n");
}

/* The label of a part without a name. */
static const char *role_of(const lm_lmz *z, size_t i)
{
    const lm_lmz_part *p = lm_lmz_part_at(z, i);
    if (p->tensor)
        return "";
    if (p->offset)
        return " (tensors, joined)";
    return p->raw && i + 1 < lm_lmz_parts(z) && !strcmp(lm_lmz_part_at(z, i + 1)->file, p->file)
               ? " (header)"
               : "";
}

static void add_part(lm_text *x, const lm_lmz *z, size_t i, const lm_table_opts *o)
{
    const lm_lmz_part *p = lm_lmz_part_at(z, i);
    lm_lmz_chunk_info info;
    lm_text_addf(x, "%-8.8s ", dtype_of(p));
    add_sizes(x, p->raw, p->coded);
    lm_text_add(x, p->delta ? "  d  " : "     ");
    lm_text_clean(x, p->tensor ? p->tensor : p->file);
    lm_text_addf(x, "%s\n", role_of(z, i));
    if (!o->planes || !p->tensor || x->rc)
        return;
    if (lm_lmz_part_planes(z, i, &info, x->err))
        x->rc = x->err->code;
    else
        add_planes(x, &info);
}

static void add_text(lm_text *x, const lm_lmz *z, const char *path, const group *g, size_t n,
                     const lm_table_opts *o)
{
    const lm_lmz_info *info = lm_lmz_about(z);
    lm_text_addf(x, "%s\ndigest     %s\n", path, info->digest);
    if (info->delta) {
        lm_text_add(x, "base       ");
        lm_text_clean(x, info->base_name);
        lm_text_addf(x, " (digest %s, %d %s to a whole one)\n", info->base_digest, info->chain,
                     info->chain == 1 ? "step" : "steps");
    }
    lm_text_addf(x, "files      %zu\n\n%-8s %12s %12s %9s     %s\n", lm_lmz_files(z), "dtype",
                 "raw", "coded", "ratio", "tensors");
    for (size_t i = 0; i < n; i++) {
        lm_text_addf(x, "%-8s ", g[i].dtype);
        add_sizes(x, g[i].raw, g[i].coded);
        lm_text_addf(x, "     %" PRIu64 "\n", g[i].tensors);
    }
    lm_text_addf(x, "%-8s ", "all");
    add_sizes(x, info->raw, info->coded);
    lm_text_add(x, "\n");
    if (o->parts)
        lm_text_add(x, "\n");
    for (size_t i = 0; o->parts && !x->rc && i < lm_lmz_parts(z); i++)
        add_part(x, z, i, o);
}

/* ---- JSON ---- */

static void json_sizes(lm_jw *w, uint64_t raw, uint64_t coded)
{
    lm_jw_int(w, "raw", (int64_t)raw);
    lm_jw_int(w, "coded", (int64_t)coded);
    lm_jw_f64(w, "ratio", ratio(coded, raw));
}

static lm_code json_planes(lm_jw *w, const lm_lmz *z, size_t i, lm_err *e)
{
    lm_lmz_chunk_info info;
    if (lm_lmz_part_planes(z, i, &info, e))
        return e->code;
    lm_jw_arr(w, "planes");
    for (int k = 0; k < info.n; k++) {
        lm_jw_obj(w, NULL);
        lm_jw_str(w, "coding", info.plane[k].coding);
        json_sizes(w, info.plane[k].raw, info.plane[k].coded);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
    return LM_OK;
}

static lm_code json_parts(lm_jw *w, const lm_lmz *z, bool planes, lm_err *e)
{
    lm_code rc = LM_OK;
    lm_jw_arr(w, "parts");
    for (size_t i = 0; !rc && i < lm_lmz_parts(z); i++) {
        const lm_lmz_part *p = lm_lmz_part_at(z, i);
        lm_jw_obj(w, NULL);
        lm_jw_str(w, "file", p->file);
        lm_jw_str(w, "tensor", p->tensor);
        lm_jw_str(w, "dtype", p->dtype);
        json_sizes(w, p->raw, p->coded);
        lm_jw_int(w, "chunks", (int64_t)p->chunks);
        lm_jw_bool(w, "delta", p->delta);
        if (planes && p->tensor)
            rc = json_planes(w, z, i, e);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
    return rc;
}

static lm_code add_json(lm_buf *out, const lm_lmz *z, const char *path, const group *g, size_t n,
                        const lm_table_opts *o, lm_err *e)
{
    const lm_lmz_info *info = lm_lmz_about(z);
    lm_code rc = LM_OK;
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "path", path);
    lm_jw_str(&w, "digest", info->digest);
    lm_jw_str(&w, "base", info->delta ? info->base_name : NULL);
    lm_jw_str(&w, "base_digest", info->delta ? info->base_digest : NULL);
    lm_jw_int(&w, "chain", info->chain);
    json_sizes(&w, info->raw, info->coded);
    lm_jw_arr(&w, "files");
    for (size_t i = 0; i < lm_lmz_files(z); i++) {
        lm_jw_obj(&w, NULL);
        lm_jw_str(&w, "name", lm_lmz_file(z, i)->name);
        lm_jw_int(&w, "bytes", (int64_t)lm_lmz_file(z, i)->bytes);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    lm_jw_arr(&w, "dtypes");
    for (size_t i = 0; i < n; i++) {
        lm_jw_obj(&w, NULL);
        lm_jw_str(&w, "dtype", g[i].dtype);
        lm_jw_int(&w, "tensors", (int64_t)g[i].tensors);
        json_sizes(&w, g[i].raw, g[i].coded);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    if (o->parts)
        rc = json_parts(&w, z, o->planes, e);
    lm_jw_close_obj(&w);
    if (!rc)
        rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}

lm_code lm_lmz_table(const lm_lmz *z, const char *path, const lm_table_opts *o, lm_buf *out,
                     lm_err *e)
{
    group *g = NULL;
    size_t n = 0;
    lm_text x = { out, e, LM_OK };
    lm_code rc = sum_groups(z, &g, &n, e);
    if (!rc && o->json)
        rc = add_json(out, z, path, g, n, o, e);
    else if (!rc)
        add_text(&x, z, path, g, n, o);
    lm_free(g);
    return rc ? rc : x.rc;
}
