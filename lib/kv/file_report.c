/* SPDX-License-Identifier: Apache-2.0 */
/* file_report.c -- lists of what cache files hold. */
#include "kv/file_report.h"

#include <inttypes.h>
#include <string.h>

#include "base/text.h"
#include "format/safetensors_table.h"
#include "kv/file_impl.h"

/* Bytes of a part, and its numbers. */
static uint64_t part_bytes(const lm_kv_file *f, int64_t part)
{
    uint64_t sum = 0;
    for (int i = 0; i < LM_KV_SECTIONS; i++)
        sum += kv_tensor_bytes(f, kv_section_of(&f->about, part, (lm_kv_section)i));
    return sum;
}

static double part_numbers(const lm_kv_about *a, int64_t part)
{
    return (double)a->kv_heads[part / 2] * (double)lm_kv_about_dim(a, part) *
           (double)lm_kv_about_rows(a, part / 2);
}

static uint64_t level_bytes(const lm_kv_file *f, int level)
{
    uint64_t sum = kv_tensor_bytes(f, (kv_tensor){ .kind = KV_TABLES, .level = level });
    for (int64_t c = 0; c < lm_cachegen_chunks(f->about.tokens); c++)
        sum += lm_kv_file_chunk_bytes(f, c, level);
    return sum;
}

static const char *form_name(const lm_kv_about *a, int64_t part)
{
    const lm_kv_side *s = a->form ? &a->form[part] : NULL;
    return s && s->format ? s->format->name : lm_dtype_name(a->act);
}

/* Numbers and bytes of the state of a layer. */
static double state_numbers(const lm_kv_about *a, int64_t layer)
{
    return (double)(kv_state_numbers(a, KV_STATE, layer) + kv_state_numbers(a, KV_CONV, layer));
}
static uint64_t state_bytes(const lm_kv_file *f, int64_t layer)
{
    return kv_tensor_bytes(f, (kv_tensor){ .kind = KV_STATE, .part = 2 * layer }) +
           kv_tensor_bytes(f, (kv_tensor){ .kind = KV_CONV, .part = 2 * layer });
}

const char *lm_kv_part_name(const lm_kv_about *a, int64_t part)
{
    static const char *const name[2][2] = { { "k", "v" }, { "latent", "rotary" } };
    return name[a->latent && a->latent[part / 2]][part % 2];
}

static double all_numbers(const lm_kv_about *a)
{
    double sum = 0;
    for (int64_t i = 0; i < kv_parts(a); i++)
        sum += part_numbers(a, i);
    for (int64_t i = 0; i < a->layers; i++)
        sum += state_numbers(a, i);
    return sum;
}

static uint64_t all_parts(const lm_kv_file *f)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < kv_parts(&f->about); i++)
        sum += part_bytes(f, i);
    for (int64_t i = 0; i < f->about.layers; i++)
        sum += state_bytes(f, i);
    return sum;
}

/* ---- JSON ---- */

static void write_state(lm_jw *w, const lm_kv_file *f, int64_t layer)
{
    lm_jw_obj(w, NULL);
    lm_jw_int(w, "layer", layer);
    lm_jw_str(w, "side", "state");
    lm_jw_str(w, "form", lm_dtype_name(LM_DTYPE_F32));
    lm_jw_int(w, "bytes", (int64_t)state_bytes(f, layer));
    lm_jw_close_obj(w);
}

static void write_parts(lm_jw *w, const lm_kv_file *f)
{
    lm_jw_arr(w, "parts");
    for (int64_t i = 0; i < kv_parts(&f->about); i++) {
        uint64_t bytes = part_bytes(f, i);
        if (lm_kv_about_has_state(&f->about, i / 2)) {
            if (i % 2)
                write_state(w, f, i / 2);
            continue;
        }
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "layer", i / 2);
        lm_jw_str(w, "side", lm_kv_part_name(&f->about, i));
        lm_jw_str(w, "form", form_name(&f->about, i));
        lm_jw_int(w, "tokens", lm_kv_about_rows(&f->about, i / 2));
        lm_jw_int(w, "bytes", (int64_t)bytes);
        lm_jw_f64(w, "bits", 8 * (double)bytes / part_numbers(&f->about, i));
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

static void write_levels(lm_jw *w, const lm_kv_file *f)
{
    lm_jw_arr(w, "levels");
    for (int l = 0; l < LM_CACHEGEN_LEVELS; l++) {
        if (!(f->levels >> l & 1))
            continue;
        uint64_t bytes = level_bytes(f, l);
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "level", l);
        lm_jw_int(w, "bytes", (int64_t)bytes);
        lm_jw_f64(w, "bits", 8 * (double)bytes / all_numbers(&f->about));
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

static lm_code report_json(const lm_kv_file *f, lm_buf *out, lm_err *e)
{
    const lm_kv_about *a = &f->about;
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "file", f->where);
    lm_jw_str(&w, "coding", f->levels ? "cachegen" : a->form ? "coded" : "plain");
    if (a->spec)
        lm_jw_str(&w, "method", a->spec);
    lm_jw_str(&w, "model_type", a->model_type);
    lm_jw_str(&w, "weights", a->weights);
    lm_jw_str(&w, "act", lm_dtype_name(a->act));
    lm_jw_int(&w, "layers", a->layers);
    lm_jw_int(&w, "tokens", a->tokens);
    if (a->has_next)
        lm_jw_int(&w, "next", a->next);
    if (f->levels) {
        write_levels(&w, f);
    } else {
        lm_jw_int(&w, "bytes", (int64_t)all_parts(f));
        lm_jw_f64(&w, "bits", 8 * (double)all_parts(f) / all_numbers(a));
        write_parts(&w, f);
    }
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) ? e->code : lm_buf_add(out, "\n", 1, e);
}

/* ---- Text ---- */

static lm_code add_part(const lm_kv_file *f, int64_t i, lm_buf *out, lm_err *e)
{
    uint64_t bytes = part_bytes(f, i);
    const int64_t rows = lm_kv_about_rows(&f->about, i / 2);
    char shown[32], form[LM_ST_SHOWN];
    if (lm_kv_about_has_state(&f->about, i / 2))
        return i % 2 ? LM_OK
                     : lm_buf_addf(out, e, "layers.%" PRId64 ".state\t\t%s\t\t%s\n", i / 2,
                                   lm_show_bytes((double)state_bytes(f, i / 2), shown),
                                   lm_dtype_name(LM_DTYPE_F32));
    return lm_buf_addf(out, e, "layers.%" PRId64 ".%s\t%" PRId64 " token%s\t%s\t%.2f bits\t%s\n",
                       i / 2, lm_kv_part_name(&f->about, i), rows, lm_plural((uint64_t)rows),
                       lm_show_bytes((double)bytes, shown),
                       8 * (double)bytes / part_numbers(&f->about, i),
                       lm_st_show(form_name(&f->about, i), form));
}

static lm_code add_level(const lm_kv_file *f, int level, lm_buf *out, lm_err *e)
{
    uint64_t bytes = level_bytes(f, level);
    char shown[32];
    return lm_buf_addf(out, e, "level %d\t%" PRId64 " chunks\t%s\t%.2f bits\n", level,
                       lm_cachegen_chunks(f->about.tokens), lm_show_bytes((double)bytes, shown),
                       8 * (double)bytes / all_numbers(&f->about));
}

static lm_code report_text(const lm_kv_file *f, lm_buf *out, lm_err *e)
{
    const lm_kv_about *a = &f->about;
    char shown[32], model[LM_ST_SHOWN], method[LM_ST_SHOWN];
    lm_code rc =
        lm_buf_addf(out, e, "%s: %s, %" PRId64 " layer%s, %" PRId64 " token%s, %s", f->where,
                    lm_st_show(a->model_type, model), a->layers, lm_plural((uint64_t)a->layers),
                    a->tokens, lm_plural((uint64_t)a->tokens),
                    f->levels ? "cachegen"
                    : a->form ? lm_st_show(a->spec, method)
                              : lm_dtype_name(a->act));
    if (!rc && !f->levels)
        rc = lm_buf_addf(out, e, ", %s, %.2f bits a number",
                         lm_show_bytes((double)all_parts(f), shown),
                         8 * (double)all_parts(f) / all_numbers(a));
    rc = rc ? rc : lm_buf_add(out, "\n", 1, e);
    for (int64_t i = 0; i < kv_parts(a) && !f->levels && !rc; i++)
        rc = add_part(f, i, out, e);
    for (int l = 0; l < LM_CACHEGEN_LEVELS && !rc; l++)
        if (f->levels >> l & 1)
            rc = add_level(f, l, out, e);
    return rc;
}

lm_code lm_kv_file_report(const lm_kv_file *f, bool json, lm_buf *out, lm_err *e)
{
    return json ? report_json(f, out, e) : report_text(f, out, e);
}
