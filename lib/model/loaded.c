/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.c -- weights for use, in one format. */
#include "model/loaded.h"

#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "numeric/code_rows.h"

lm_code lm_loaded_take(lm_model_source *src, lm_loaded *l, lm_err *e)
{
    *l = (lm_loaded){ .src = src };
    const json_t *config = lm_model_source_config(l->src);
    if (!config)
        lm_fail(e, LM_EUSAGE, lm_model_source_path(l->src), "name the folder that holds the model",
                "a lone file has no config.json");
    else
        lm_config_read(config, lm_model_source_path(l->src), &l->config, e);
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
    return lm_fail(e, LM_EUSAGE, lm_model_source_path(l->src), "read them into memory",
                   b->host_memory
                       ? "no weight can be read in the file: they are numbers, are in another "
                         "order there, or are compressed"
                       : "weights on a device cannot be read in a file");
}

lm_code lm_loaded_weights(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e)
{
    const lm_store_opts o = { .par = l->par };
    if (lm_model_check(m, l->src, e) || lm_store_new(m, b, &o, &l->store, e))
        return e->code;
    return lm_store_load(l->store, l->src, e);
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
