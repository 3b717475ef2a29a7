/* SPDX-License-Identifier: Apache-2.0 */
/* folder_write.c -- adapters as PEFT writes them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/text.h"
#include "tune/folder_impl.h"

/* ---- adapter_config.json ---- */

/* A string of Python's json.dumps: everything beyond ASCII as \uXXXX. */
static lm_code put_text(lm_buf *out, const char *s, lm_err *e)
{
    json_t *v = json_string(s);
    char *text = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_ENSURE_ASCII) : NULL;
    lm_code rc = text ? lm_buf_add(out, text, strlen(text), e)
                      : lm_fail(e, LM_EFORMAT, lm_tune_config_file, NULL, "a string is not UTF-8");

    free(text); /* jansson's own */
    json_decref(v);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static lm_code put_value(lm_buf *out, const json_t *v, int depth, lm_err *e);

static lm_code put_line(lm_buf *out, int depth, lm_err *e)
{
    return lm_buf_addf(out, e, "\n%*s", 2 * depth, "");
}

static lm_code put_object(lm_buf *out, const json_t *o, int depth, lm_err *e)
{
    const char **keys = NULL, *key;
    size_t n = 0;
    json_t *v;
    lm_code rc = lm_alloc_n(&keys, json_object_size(o) + 1, sizeof *keys, "keys", e);

    json_object_foreach((json_t *)(uintptr_t)o, key, v) if (!rc) keys[n++] = key;
    if (!rc)
        qsort(keys, n, sizeof *keys, by_name);
    rc = rc ? rc : lm_buf_add(out, "{", 1, e);
    for (size_t i = 0; !rc && i < n; i++) {
        rc = i ? lm_buf_add(out, ",", 1, e) : LM_OK;
        rc = rc ? rc : put_line(out, depth + 1, e);
        rc = rc ? rc : put_text(out, keys[i], e);
        rc = rc ? rc : lm_buf_add(out, ": ", 2, e);
        rc = rc ? rc : put_value(out, json_object_get(o, keys[i]), depth + 1, e);
    }
    rc = rc || !n ? rc : put_line(out, depth, e);
    lm_free(keys);
    return rc ? rc : lm_buf_add(out, "}", 1, e);
}

static lm_code put_array(lm_buf *out, const json_t *a, int depth, lm_err *e)
{
    const json_t *v;
    size_t i;
    lm_code rc = lm_buf_add(out, "[", 1, e);

    json_array_foreach((json_t *)(uintptr_t)a, i, v)
    {
        rc = rc || !i ? rc : lm_buf_add(out, ",", 1, e);
        rc = rc ? rc : put_line(out, depth + 1, e);
        rc = rc ? rc : put_value(out, v, depth + 1, e);
    }
    rc = rc || !json_array_size(a) ? rc : put_line(out, depth, e);
    return rc ? rc : lm_buf_add(out, "]", 1, e);
}

static lm_code put_value(lm_buf *out, const json_t *v, int depth, lm_err *e)
{
    char number[40];

    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return put_object(out, v, depth, e);
    case JSON_ARRAY:
        return put_array(out, v, depth, e);
    case JSON_STRING:
        return put_text(out, json_string_value(v), e);
    case JSON_REAL:
        lm_json_real(json_real_value(v), number);
        return lm_buf_add(out, number, strlen(number), e);
    case JSON_INTEGER:
        return lm_buf_addf(out, e, "%lld", (long long)json_integer_value(v));
    default: {
        const char *word = json_is_true(v) ? "true" : json_is_false(v) ? "false" : "null";

        return lm_buf_add(out, word, strlen(word), e);
    }
    }
}

lm_code lm_tune_config_text(const json_t *config, lm_buf *out, lm_err *e)
{
    return put_value(out, config, 0, e);
}

/* A default as PEFT's type: a flag, a word, a whole number, a real one. */
static json_t *value_of(const lm_hyper *h)
{
    bool whole = h->words && !strcmp(h->words, LM_WHOLE);
    char word[64];

    if (!h->words || whole)
        return whole || (strstr(h->name, "alpha") && h->value == floor(h->value))
                   ? json_integer((json_int_t)h->value)
                   : json_real(h->value);
    lm_hyper_show(h, h->value, word);
    return !strcmp(word, "true")    ? json_true()
           : !strcmp(word, "false") ? json_false()
                                    : json_string(word);
}

const char *lm_tune_task(const lm_arch *a)
{
    return a && lm_arch_part(a, LM_PART_CROSS_Q) ? "SEQ_2_SEQ_LM" : "CAUSAL_LM";
}

lm_code lm_tune_config_new(const lm_tune_method *t, const char *base, const char *task,
                           json_t **out, lm_err *e)
{
    static const char *const empty[] = { "auto_mapping",        "exclude_modules", "layers_pattern",
                                         "layers_to_transform", "modules_to_save", "revision",
                                         "target_modules" };
    json_t *c = *out = json_object(), *more = NULL;
    int bad = !c;
    lm_code rc = LM_OK;

    if (t->extra)
        rc = lm_json_parse(t->extra, strlen(t->extra), t->name, &more, e);
    for (size_t i = 0; !bad && i < sizeof empty / sizeof *empty; i++)
        bad |= json_object_set_new(c, empty[i], json_null());
    bad = bad || json_object_set_new(c, "peft_type", json_string(t->peft_type)) ||
          json_object_set_new(c, "task_type", json_string(task)) ||
          json_object_set_new(c, "inference_mode", json_true()) ||
          json_object_set_new(c, "base_model_name_or_path", base ? json_string(base) : json_null());
    for (int i = 0; !bad && t->hyper[i].name; i++) {
        const char *name = t->hyper[i].name;

        bad |= json_object_set_new(c, name, value_of(&t->hyper[i]));
        if (!strcmp(name, "r"))
            bad |= json_object_set_new(c, "rank_pattern", json_object());
        if (!strcmp(name, "alpha") || !strcmp(name, "lora_alpha"))
            bad |= json_object_set_new(c, "alpha_pattern", json_object());
    }
    bad = bad || (more && json_object_update(c, more));
    json_decref(more);
    if (!rc && bad)
        rc = lm_fail(e, LM_ELIMIT, lm_tune_config_file, NULL, "no memory");
    if (rc) {
        json_decref(c);
        *out = NULL;
    }
    return rc;
}

/* ---- Tensors ---- */

lm_code lm_tune_tensor_name(const lm_tune_module *m, const lm_tune_tensor *t, char **out, lm_err *e)
{
    return t->shared ? lm_asprintf(out, e, "base_model.%s", t->suffix)
                     : lm_asprintf(out, e, "base_model.model.%s.%s", m->name, t->suffix);
}

static lm_code plan_tensors(const lm_tune_saved *t, size_t n, lm_st_plan **out, lm_err *e)
{
    lm_code rc = lm_st_plan_new(out, e);

    for (size_t i = 0; !rc && i < n; i++)
        rc = lm_st_plan_add(*out, t[i].name, t[i].dtype, t[i].ndim, t[i].dim, e);
    rc = rc ? rc : lm_st_plan_meta(*out, "format", "pt", e);
    if (!rc)
        lm_st_plan_sort(*out);
    return rc;
}

static int by_tensor(const void *a, const void *b)
{
    return strcmp((*(const lm_tune_saved *const *)a)->name,
                  (*(const lm_tune_saved *const *)b)->name);
}

static int to_tensor(const void *name, const void *b)
{
    return strcmp(name, (*(const lm_tune_saved *const *)b)->name);
}

/* Ends the writer. */
static lm_code fill(lm_st_writer *w, const lm_tune_saved *t, size_t n, lm_err *e)
{
    const lm_tune_saved **sorted = NULL;
    lm_code rc = lm_alloc_n(&sorted, n, sizeof *sorted, "an adapter", e);

    for (size_t i = 0; !rc && i < n; i++)
        sorted[i] = &t[i];
    if (!rc && n)
        qsort(sorted, n, sizeof *sorted, by_tensor);
    for (const lm_st_tensor *next; !rc && (next = lm_st_next(w));) {
        const lm_tune_saved *const *at = bsearch(next->name, sorted, n, sizeof *sorted, to_tensor);

        rc = lm_st_write(w, (*at)->data, (size_t)next->bytes, e);
        if (!rc && !next->bytes)
            break;
    }
    lm_free(sorted);
    if (!rc)
        return lm_st_commit(w, e);
    lm_st_drop(w);
    return rc;
}

static lm_code add_bytes(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    return lm_buf_add(ctx, data, bytes, e);
}

lm_code lm_tune_tensors_bytes(const lm_tune_saved *t, size_t n, lm_buf *out, lm_err *e)
{
    lm_st_plan *plan = NULL;
    lm_st_writer *w = NULL;
    lm_code rc = plan_tensors(t, n, &plan, e);

    rc = rc ? rc : lm_st_create_on(add_bytes, out, lm_tune_weights_file, plan, &w, e);
    rc = rc ? rc : fill(w, t, n, e);
    lm_st_plan_free(plan);
    return rc;
}

static lm_code read_bytes(void *ctx, uint64_t from, void *dst, size_t bytes, lm_err *e)
{
    const lm_buf *file = ctx;

    (void)e;
    memcpy(dst, file->data + from, bytes);
    return LM_OK;
}

lm_code lm_tune_tensors_open(lm_buf *file, const char *path, lm_st **out, lm_err *e)
{
    lm_st_io io = { read_bytes, file, file->len, (const uint8_t *)file->data };

    return lm_st_open_on(&io, path, out, e);
}

lm_code lm_tune_folder_write(lm_bundle_out *out, const json_t *config, const lm_tune_saved *t,
                             size_t n, lm_err *e)
{
    lm_st_plan *plan = NULL;
    lm_st_writer *w = NULL;
    lm_buf text = { 0 };
    lm_code rc = plan_tensors(t, n, &plan, e);

    rc = rc ? rc : lm_tune_config_text(config, &text, e);
    rc = rc ? rc : lm_bundle_put(out, lm_tune_config_file, text.data, text.len, e);
    rc = rc ? rc : lm_bundle_st_create(out, lm_tune_weights_file, plan, &w, e);
    rc = rc ? rc : fill(w, t, n, e);
    lm_buf_fini(&text);
    lm_st_plan_free(plan);
    return rc;
}
