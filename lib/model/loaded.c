/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.c -- weights for use, in one format. */
#include "model/loaded.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "model/arch.h"
#include "model/store_impl.h"
#include "numeric/code_rows.h"

lm_code lm_loaded_take(lm_model_source *src, lm_loaded *l, lm_err *e)
{
    *l = (lm_loaded){ .src = src };
    const json_t *config = lm_model_source_config(l->src);
    if (!config)
        lm_fail(e, LM_EUSAGE, lm_model_source_path(l->src), "name the folder that holds the model",
                "a lone file has no config.json");
    else if (!lm_config_read(config, lm_model_source_path(l->src), &l->config, e))
        lm_config_see(&l->config, l->src);
    if (e->code)
        lm_loaded_fini(l);
    return e->code;
}

lm_code lm_loaded_open(const char *path, const lm_bundle_opts *o, lm_loaded *l, lm_err *e)
{
    lm_model_source *src = NULL;
    memset(l, 0, sizeof *l);
    return lm_model_source_open(path, o, &src, e) ? e->code : lm_loaded_take(src, l, e);
}

/* Bytes of the weights, each in its own format, and of those that can be read in the mapped file. */
static void count_bytes(const lm_model_source *src, lm_dtype precision, size_t *all,
                        size_t *in_file)
{
    *all = *in_file = 0;
    for (size_t k = 0; k < lm_model_source_count(src); k++) {
        const lm_st_tensor *t = lm_model_source_at(src, k);
        bool turned;
        const lm_format *f = lm_model_source_format(src, t, &turned);
        lm_tensor_size size = { .all = t->bytes };
        bool coded = f && t->ndim == 2 && !turned && lm_format_codes(f, t->dim[1]) &&
                     !lm_tensor_bytes(f, t->ndim, t->dim, &size, NULL) &&
                     size.all < lm_plain_bytes(precision, t->count);
        *all = lm_add_ok(*all, size.all, all) ? *all : SIZE_MAX;
        if (coded && lm_model_source_codes_in_file(src, t))
            *in_file += size.all;
    }
}

lm_code lm_loaded_place(lm_loaded *l, lm_place asked, lm_dtype precision, const lm_backend *b,
                        size_t available, bool *moved, lm_err *e)
{
    size_t all, in_file;
    count_bytes(l->src, precision, &all, &in_file);
    *moved = asked == LM_PLACE_AUTO && b->host_memory && in_file && all > available;
    l->codes_space = *moved || asked == LM_PLACE_FILE ? LM_SPACE_FILE : LM_SPACE_HOST;
    if (asked != LM_PLACE_FILE || (b->host_memory && in_file))
        return LM_OK;
    if (!b->host_memory)
        return lm_fail(e, LM_EUSAGE, lm_model_source_path(l->src), "read them into memory",
                       "weights on a device cannot be read in a file");
    return lm_fail(e, LM_EUSAGE, lm_model_source_path(l->src), "read them into memory",
                   "no weight can be read in the file: they take as many bytes there as numbers of "
                   "%s, are in another order, or are compressed",
                   lm_dtype_name(precision));
}

lm_code lm_loaded_weights(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e)
{
    const lm_store_opts o = { .par = l->par, .base = l->base };
    if (lm_model_check(m, l->src, e) || lm_store_new(m, b, &o, &l->store, e))
        return e->code;
    if (l->base && !lm_store_borrows(l->store)) { /* of its own, then: all of them */
        lm_store_free(l->store);
        if (lm_store_new(m, b, &(lm_store_opts){ .par = l->par }, &l->store, e))
            return e->code;
    }
    if (!lm_store_borrows(l->store) && lm_store_load(l->store, l->src, e))
        return e->code;
    for (int k = 0; l->adapter && k < l->adapter->joined; k++)
        if (lm_store_load_joined(l->store, k + 1, l->adapter->each[k], e))
            return e->code;
    return l->adapter && !l->adapter->joined
               ? lm_store_load_adapter(l->store, l->adapter->tensors, e)
               : LM_OK;
}

void lm_loaded_build(const lm_loaded *l, lm_build *b)
{
    b->mesh = l->mesh;
    b->lay = l->lay;
    b->codes = l->mesh ? NULL : l->src; /* parts of rows of codes have no place: they are decoded */
    b->codes_space = l->codes_space;
    if (!l->adapter)
        return;
    b->adapt = l->adapter->adapt;
    b->trainable = l->adapter->replaces;
    b->ctx = l->adapter->ctx;
    b->chosen = l->adapter->joined > 0;
}

/* True if tensor i is stored in more bytes than the source has it in, because it was decoded. */
static bool was_decoded(const lm_loaded *l, int i, const lm_format *from)
{
    const lm_slice *t = &l->store->model->slice[i];
    const lm_store_block *kept = store_own(l->store, i);
    lm_tensor_size a, b;
    return kept && t->ndim == 2 && from != kept->format && from->decode &&
           !lm_tensor_bytes(from, t->ndim, t->dim, &a, NULL) &&
           !lm_tensor_bytes(kept->format, t->ndim, t->dim, &b, NULL) && a.all < b.all;
}

/* Bytes of the weights that are read in the file. */
static double bytes_in_file(const lm_loaded *l)
{
    const lm_model *m = l->store->model;
    double sum = 0;
    for (int i = 0; i < m->n_slices; i++) {
        const struct lm_code_run *r = store_run(m, i);
        int64_t dim[] = { m->slice[i].rows, store_width(m, &m->slice[i]) };
        lm_tensor_size size;
        if (r && r->in_file && !lm_tensor_bytes(r->format, 2, dim, &size, NULL))
            sum += (double)size.all;
    }
    return sum;
}

/* Append "; decoded when loaded: q4_k, q6_k". */
static void add_decoded(const lm_loaded *l, char *out, size_t len)
{
    const lm_format *seen[LM_STORE_BLOCKS] = { NULL };
    int n = 0, at = 0;
    bool turned;
    for (size_t k = 0; k < lm_model_source_count(l->src); k++) {
        const lm_st_tensor *t = lm_model_source_at(l->src, k);
        const lm_format *f = lm_model_source_format(l->src, t, &turned);
        int i = lm_model_slice(l->store->model, t->name);
        if (!f || i < 0 || !was_decoded(l, i, f))
            continue;
        for (at = 0; at < n && seen[at] != f; at++)
            ;
        if (at < n || n == LM_STORE_BLOCKS || len >= LM_LOADED_TEXT)
            continue;
        len += (size_t)snprintf(out + len, LM_LOADED_TEXT - len, "%s%s",
                                n ? ", " : "; decoded when loaded: ", lm_format_show(f));
        seen[n++] = f;
    }
}

const char *lm_loaded_text(const lm_loaded *l, char out[LM_LOADED_TEXT])
{
    size_t len = 0;
    char bytes[32];
    if (!l->store || !l->src)
        return NULL;
    double file = bytes_in_file(l);
    for (int k = 0; k < l->store->n_blocks && len < LM_LOADED_TEXT; k++)
        len += (size_t)snprintf(out + len, LM_LOADED_TEXT - len, "%s%s %s",
                                k ? ", " : "weights: ", lm_format_show(l->store->block[k].format),
                                lm_show_bytes((double)l->store->block[k].bytes, bytes));
    if (file > 0 && len < LM_LOADED_TEXT)
        len += (size_t)snprintf(out + len, LM_LOADED_TEXT - len, "; in the file %s",
                                lm_show_bytes(file, bytes));
    add_decoded(l, out, len);
    return out;
}

size_t lm_loaded_bytes(const lm_model *m)
{
    const lm_store_opts o = { 0 };
    lm_err unseen = { 0 };
    size_t bytes[LM_KEPT_ROLES];
    lm_store_outlook(m, &o, bytes, &unseen);
    return bytes[LM_KEPT_PARAM];
}

void lm_loaded_fini(lm_loaded *l)
{
    lm_store_free(l->store);
    lm_model_source_close(l->src);
    lm_config_fini(&l->config);
    memset(l, 0, sizeof *l);
}
