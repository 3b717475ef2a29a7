/* SPDX-License-Identifier: Apache-2.0 */
/* file_form.c -- forms of keys and values as JSON in kv-cache(5).
 *
 * A FORM is an object; members with the value in brackets are left out:
 *   name [""]; rotate, pre_rope [false]; residual, sinks [0]; share [-1] (lm_kv_side.outliers)
 *   bits: of a code; absent: plain numbers, and nothing of what follows
 *   axis ["token"] "channel"; levels "sym" "asym" "table" "float8"; group, span, outliers [0]
 *   scale ["none"], float8 ["none"]: types; ggml, norm, renorm, zero, second [false]; constant [0]
 *   table: its levels; lower, upper, head: the fixed ranges of channels and scales of heads (numeric/kv_format.h) */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "format/safetensors_table.h"
#include "kv/file_impl.h"

static const char *const levels_name[] = { "sym", "asym", "table", "float8" };

/* ---- Writing ---- */

static void write_count(lm_jw *w, const char *key, int64_t v)
{
    if (v)
        lm_jw_int(w, key, v);
}

static void write_flag(lm_jw *w, const char *key, bool v)
{
    if (v)
        lm_jw_bool(w, key, true);
}

static void write_type(lm_jw *w, const char *key, lm_dtype d)
{
    if (d == LM_DTYPE_F64 || d == LM_DTYPE_NONE) /* 0: not set */
        return;
    lm_jw_str(w, key, lm_dtype_name(d));
}

static void write_floats(lm_jw *w, const char *key, const float *x, int64_t n)
{
    if (!x)
        return;
    lm_jw_arr(w, key);
    for (int64_t i = 0; i < n; i++)
        lm_jw_f32(w, NULL, (double)x[i]);
    lm_jw_close_arr(w);
}

static void write_format(lm_jw *w, const lm_kv_format *f, int64_t kv_heads, int64_t head_dim)
{
    lm_jw_int(w, "bits", f->bits);
    if (f->axis == LM_KV_CHANNEL)
        lm_jw_str(w, "axis", "channel");
    lm_jw_str(w, "levels", levels_name[f->levels]);
    write_count(w, "group", f->group);
    write_type(w, "scale", f->scale);
    if (f->levels == LM_KV_FLOAT8)
        write_type(w, "float8", f->float8);
    write_flag(w, "ggml", f->ggml);
    write_flag(w, "norm", f->norm);
    write_flag(w, "renorm", f->renorm);
    write_flag(w, "zero", f->zero);
    write_flag(w, "second", f->second);
    write_count(w, "span", f->span);
    write_count(w, "outliers", f->outliers);
    if (f->constant != 0)
        lm_jw_f64(w, "constant", f->constant);
    write_floats(w, "table", f->levels == LM_KV_TABLE ? f->table : NULL, f->n_table);
    write_floats(w, "lower", f->lower, kv_heads * head_dim);
    write_floats(w, "upper", f->upper, kv_heads * head_dim);
    write_floats(w, "head", f->head, kv_heads);
}

static lm_code write_form(const lm_kv_about *a, int64_t part, lm_buf *out, lm_err *e)
{
    const lm_kv_side *s = &a->form[part];
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    if (s->format && s->format->name)
        lm_jw_str(&w, "name", s->format->name);
    write_flag(&w, "rotate", s->rotate);
    write_flag(&w, "pre_rope", s->pre_rope);
    write_count(&w, "residual", s->format ? s->residual : 0);
    write_count(&w, "sinks", s->format ? s->sinks : 0);
    if (s->format && s->outliers >= 0)
        lm_jw_f64(&w, "share", s->outliers);
    if (s->format)
        write_format(&w, s->format, a->kv_heads[part / 2], lm_kv_about_dim(a, part));
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

static bool is_plain(const lm_kv_side *s)
{
    return !s->format && !s->pre_rope && !s->rotate;
}

/* The texts of different forms one behind another, with their ends; index[part]: which, -1: plain. */
typedef struct {
    lm_buf text;
    size_t *end;
    int64_t *index, n;
} form_texts;

static lm_code find_forms(const lm_kv_about *a, form_texts *t, lm_err *e)
{
    size_t parts = (size_t)kv_parts(a);
    lm_code rc = lm_alloc_n(&t->end, parts + 1, sizeof *t->end, "forms", e);
    rc = rc ? rc : lm_alloc_n(&t->index, parts, sizeof *t->index, "forms", e);
    for (int64_t i = 0; i < (int64_t)parts && !rc; i++) {
        size_t begin = t->text.len, len;
        t->index[i] = -1;
        if (is_plain(&a->form[i]))
            continue;
        rc = write_form(a, i, &t->text, e);
        if (rc)
            break;
        len = t->text.len - begin;
        int64_t k = 0;
        while (k < t->n && (t->end[k + 1] - t->end[k] != len ||
                            memcmp(t->text.data + t->end[k], t->text.data + begin, len)))
            k++;
        t->index[i] = k;
        if (k == t->n)
            t->end[++t->n] = t->text.len;
        else
            t->text.len = begin;
    }
    return rc;
}

lm_code kv_forms_write(const lm_kv_about *a, lm_buf *out, lm_err *e)
{
    form_texts t = { 0 };
    lm_code rc = find_forms(a, &t, e);
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "spec", a->spec);
    lm_jw_int(&w, "page", a->page);
    lm_jw_arr(&w, "forms");
    for (int64_t k = 0; k < t.n && !rc; k++)
        lm_jw_raw(&w, t.text.data + t.end[k], t.end[k + 1] - t.end[k]);
    lm_jw_close_arr(&w);
    lm_jw_arr(&w, "parts");
    for (int64_t i = 0; i < kv_parts(a) && !rc; i++)
        if (t.index[i] < 0)
            lm_jw_raw(&w, "null", 4);
        else
            lm_jw_int(&w, NULL, t.index[i]);
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    rc = rc ? rc : lm_jw_end(&w);
    lm_buf_fini(&t.text);
    lm_free(t.end);
    lm_free(t.index);
    return rc;
}

/* ---- Reading ---- */

/* A form that is read; the first failure counts. */
typedef struct {
    const lm_kv_file *f;
    const json_t *from;
    lm_err *e;
    lm_code rc;
} form_reader;

static int64_t read_count(form_reader *r, const char *key)
{
    int64_t v = 0;
    if (!r->rc)
        r->rc = lm_json_i64_or(r->from, key, 0, 0, 1 << 20, &v, r->f->where, r->e);
    return v;
}

static bool read_flag(form_reader *r, const char *key)
{
    bool v = false;
    if (!r->rc)
        r->rc = lm_json_bool_or(r->from, key, false, &v, r->f->where, r->e);
    return v;
}

static double read_real(form_reader *r, const char *key, double otherwise)
{
    double v = otherwise;
    if (!r->rc)
        r->rc = lm_json_f64_or(r->from, key, otherwise, &v, r->f->where, r->e);
    return v;
}

/* The place of a word in a list. */
static int read_word(form_reader *r, const char *key, const char *const *list, int n,
                     const char *otherwise)
{
    const char *word = otherwise;
    char show[LM_ST_SHOWN];
    if (!r->rc)
        r->rc = lm_json_str_or(r->from, key, otherwise, &word, r->f->where, r->e);
    for (int i = 0; i < n && !r->rc; i++)
        if (word && !strcmp(word, list[i]))
            return i;
    if (!r->rc)
        r->rc = lm_fail(r->e, LM_EFORMAT, r->f->where, "fetch or write it again",
                        "forms: %s is '%s'", key, word ? lm_st_show(word, show) : "");
    return 0;
}

static lm_dtype read_type(form_reader *r, const char *key)
{
    static const char *const names[] = { "none", "f32", "f16", "bf16", "f8e4m3", "f8e5m2" };
    static const lm_dtype types[] = { LM_DTYPE_NONE, LM_DTYPE_F32,    LM_DTYPE_F16,
                                      LM_DTYPE_BF16, LM_DTYPE_F8E4M3, LM_DTYPE_F8E5M2 };
    return types[read_word(r, key, names, 6, "none")];
}

static void read_floats(form_reader *r, const char *key, int64_t n, float *x)
{
    const json_t *list = json_object_get(r->from, key);
    bool good = json_is_array(list) && (int64_t)json_array_size(list) == n;
    for (int64_t i = 0; i < n && good; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        x[i] = (float)json_number_value(v);
        good = json_is_number(v) && isfinite(x[i]);
    }
    if (!good && !r->rc)
        r->rc = lm_fail(r->e, LM_EFORMAT, r->f->where, "fetch or write it again",
                        "forms: %s is not a list of %lld numbers", key, (long long)n);
}

/* NULL if there are none. */
static const float *read_numbers(form_reader *r, const char *key, int64_t n)
{
    float *x = NULL;
    if (r->rc || !json_object_get(r->from, key))
        return NULL;
    r->rc = lm_arena_alloc(r->f->arena, &x, (size_t)n, sizeof *x, r->e);
    if (!r->rc)
        read_floats(r, key, n, x);
    return x;
}

static void read_format(form_reader *r, int64_t part, lm_kv_format *f)
{
    static const char *const axes[] = { "token", "channel" };
    const lm_kv_about *a = &r->f->about;
    int64_t K = a->kv_heads[part / 2], D = lm_kv_about_dim(a, part);
    f->values = part % 2 && !(a->latent && a->latent[part / 2]);
    f->bits = (int)read_count(r, "bits");
    f->axis = (lm_kv_axis)read_word(r, "axis", axes, 2, "token");
    f->levels = (lm_kv_levels)read_word(r, "levels", levels_name, 4, NULL);
    f->group = (int)read_count(r, "group");
    f->scale = read_type(r, "scale");
    f->float8 = read_type(r, "float8");
    f->ggml = read_flag(r, "ggml");
    f->norm = read_flag(r, "norm");
    f->renorm = read_flag(r, "renorm");
    f->zero = read_flag(r, "zero");
    f->second = read_flag(r, "second");
    f->span = (int)read_count(r, "span");
    f->outliers = (int)read_count(r, "outliers");
    f->constant = read_real(r, "constant", 0);
    f->lower = read_numbers(r, "lower", K * D);
    f->upper = read_numbers(r, "upper", K * D);
    f->head = read_numbers(r, "head", K);
    if (f->levels != LM_KV_TABLE || r->rc)
        return;
    f->n_table = f->bits >= 1 && f->bits <= 5 ? 1 << f->bits : 0;
    read_floats(r, "table", f->n_table, f->table);
}

static lm_code read_form(const lm_kv_file *f, const json_t *from, int64_t part, lm_kv_side *out,
                         lm_err *e)
{
    form_reader r = { f, from, e, LM_OK };
    lm_kv_format *format = NULL;
    const char *name = "";
    char *own;
    *out = (lm_kv_side){ .plain = f->about.act, .outliers = -1 };
    if (!json_is_object(from))
        return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                       "forms: one of them is not an object");
    out->rotate = read_flag(&r, "rotate");
    out->pre_rope = read_flag(&r, "pre_rope");
    out->residual = read_count(&r, "residual");
    out->sinks = read_count(&r, "sinks");
    out->outliers = read_real(&r, "share", -1);
    if (r.rc || !json_object_get(from, "bits"))
        return r.rc;
    if (lm_json_str_or(from, "name", "", &name, f->where, e) ||
        lm_arena_strdup(f->arena, &own, name, strlen(name), e) ||
        lm_arena_alloc(f->arena, &format, 1, sizeof *format, e))
        return e->code;
    read_format(&r, part, format);
    format->name = own;
    out->format = format;
    return r.rc;
}

/* A part that names a form, and all by which its format is read. */
typedef struct {
    int64_t form, kv_heads, head_dim, side, part;
} form_use;

static int by_form(const void *a, const void *b)
{
    const int64_t *x = a, *y = b;
    for (int i = 0; i < 5; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

static bool same_use(const form_use *a, const form_use *b)
{
    return a->form == b->form && a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->side == b->side;
}

/* The parts with forms to use[0 .. *n); sides of the others are plain. */
static lm_code list_uses(const lm_kv_file *f, const json_t *parts, int64_t forms, lm_kv_side *side,
                         form_use *use, int64_t *n, lm_err *e)
{
    const lm_kv_about *a = &f->about;
    *n = 0;
    for (int64_t i = 0; i < kv_parts(a); i++) {
        const json_t *v = json_array_get(parts, (size_t)i);
        json_int_t k = json_integer_value(v);
        side[i] = (lm_kv_side){ .plain = a->act, .outliers = -1 };
        if (json_is_null(v))
            continue;
        if (!json_is_integer(v) || k < 0 || k >= forms)
            return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                           "forms: part %lld has no form", (long long)i);
        use[(*n)++] = (form_use){ k, a->kv_heads[i / 2], lm_kv_about_dim(a, i), i % 2, i };
    }
    return LM_OK;
}

/* The form of each part.  A form is read once for all parts of equal shape that name it, so that no header can ask for
 * much more memory than it has bytes. */
static lm_code read_parts(lm_kv_file *f, const json_t *forms, const json_t *parts, lm_err *e)
{
    int64_t n = kv_parts(&f->about), uses;
    lm_kv_side *side;
    form_use *use;
    if (!json_is_array(forms) || !json_is_array(parts) || (int64_t)json_array_size(parts) != n)
        return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                       "forms: parts is not a list of %lld forms", (long long)n);
    if (lm_arena_alloc(f->arena, &side, (size_t)n, sizeof *side, e) ||
        lm_alloc_n(&use, (size_t)n, sizeof *use, "forms", e))
        return e->code;
    lm_code rc = list_uses(f, parts, (int64_t)json_array_size(forms), side, use, &uses, e);
    if (!rc)
        qsort(use, (size_t)uses, sizeof *use, by_form);
    for (int64_t i = 0; i < uses && !rc; i++)
        if (i && same_use(&use[i], &use[i - 1]))
            side[use[i].part] = side[use[i - 1].part];
        else
            rc = read_form(f, json_array_get(forms, (size_t)use[i].form), use[i].part,
                           &side[use[i].part], e);
    lm_free(use);
    f->about.form = side;
    return rc;
}

lm_code kv_forms_read(lm_kv_file *f, const char *text, lm_err *e)
{
    json_t *root = NULL;
    const char *spec = NULL;
    char *own;
    lm_code rc = lm_json_parse(text, strlen(text), f->where, &root, e);
    if (!rc && !json_is_object(root))
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                     "forms is not a JSON object");
    rc = rc || f->arena ? rc : lm_arena_new(&f->arena, 1 << 14, e);
    rc = rc ? rc : lm_json_str_or(root, "spec", "", &spec, f->where, e);
    rc = rc ? rc : lm_json_i64(root, "page", 1, LM_KV_MAX_TOKENS, &f->about.page, f->where, e);
    rc = rc ? rc : lm_arena_strdup(f->arena, &own, spec, strlen(spec), e);
    if (!rc)
        f->about.spec = own;
    rc = rc ? rc : read_parts(f, json_object_get(root, "forms"), json_object_get(root, "parts"), e);
    json_decref(root);
    return rc;
}
