/* SPDX-License-Identifier: Apache-2.0 */
/* folder.c -- an adapter's files, and its tensors bound to the modules of a base
 * (folder_bind.c). */
#include "tune/folder.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/text.h"
#include "format/safetensors_table.h"
#include "tune/attach_impl.h"
#include "tune/folder_impl.h"

enum { MAX_CONFIG = 16 << 20, FIRST_FILES = 64 };

const char lm_tune_config_file[] = "adapter_config.json",
           lm_tune_weights_file[] = "adapter_model.safetensors";

/* For an archive that is read forward: an adapter's small files come first; a model has its
 * configuration, or a large file, before any file of an adapter. */
static bool begins_as_adapter(lm_bundle *b, lm_err *e)
{
    const lm_bundle_file *f = NULL;

    for (int i = 0; i < FIRST_FILES && !lm_bundle_next(b, &f, e) && f; i++) {
        if (!strcmp(f->name, lm_tune_config_file) || !strcmp(f->name, lm_tune_weights_file))
            return true;
        if (!strcmp(f->name, "config.json") || f->bytes > MAX_CONFIG)
            return false;
    }
    return false;
}

bool lm_tune_folder_is(const char *path, const lm_bundle_opts *o)
{
    lm_err ignored = { 0 };
    lm_bundle *b = NULL;
    char *file = NULL;
    struct stat st;
    bool there;

    if (lm_path_is_dir(path)) {
        there = !lm_path_join(&file, path, lm_tune_config_file, &ignored) && lm_path_exists(file);
        lm_free(file);
        return there;
    }
    if (stat(path, &st) || !S_ISREG(st.st_mode) || lm_bundle_open(path, o, &b, &ignored))
        return false;
    there = lm_bundle_random(b) ? lm_bundle_find(b, lm_tune_config_file) != NULL
                                : begins_as_adapter(b, &ignored);
    lm_bundle_close(b);
    return there;
}

lm_code lm_tune_no_adapter(const lm_bundle *b, const char *path, lm_err *e)
{
    bool has_config = lm_bundle_find(b, lm_tune_config_file) != NULL;

    if (!has_config && lm_bundle_find(b, "config.json"))
        return lm_fail(e, LM_EUSAGE, path, "name it in place of the model",
                       "it is a whole model, not an adapter");
    return lm_fail(e, LM_EUSAGE, path, "give a folder that PEFT or peft-tune saved", "it has no %s",
                   has_config ? lm_tune_weights_file : lm_tune_config_file);
}

/* adapter_config.json. */
static lm_code read_config(lm_tune_folder *f, const lm_bundle_opts *o, lm_err *e)
{
    lm_buf text = { 0 };
    char where[256];
    lm_code rc = lm_bundle_open(f->path, o, &f->files, e);

    if (!rc)
        rc = lm_bundle_spool(f->files, e);
    if (!rc && !lm_bundle_find(f->files, lm_tune_config_file))
        return lm_tune_no_adapter(f->files, f->path, e);
    if (!rc)
        rc = lm_bundle_load(f->files, lm_tune_config_file, MAX_CONFIG, &text, e);
    if (!rc)
        lm_bundle_where(f->files, lm_bundle_find(f->files, lm_tune_config_file), where);
    if (!rc)
        rc = lm_json_parse(text.data ? text.data : "", text.len, where, &f->config, e);
    if (!rc && !json_is_object(f->config))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "it is not a JSON object");
    lm_buf_fini(&text);
    return rc;
}

/* The header of the weights. */
static lm_code read_weights(lm_tune_folder *f, lm_err *e)
{
    if (lm_bundle_find(f->files, lm_tune_weights_file))
        return lm_bundle_st(f->files, lm_tune_weights_file, &f->st, e);
    return lm_bundle_find(f->files, "adapter_model.bin")
               ? lm_fail(e, LM_EUSAGE, f->path,
                         "save it with PEFT's save_pretrained(..., safe_serialization=True)",
                         "adapter_model.bin is a pickle of Python, which is not read")
               : lm_fail(e, LM_EFORMAT, f->path, "copy all files of the adapter", "it has no %s",
                         lm_tune_weights_file);
}

/* Kinds that depend on the input, or that are not layers: they run beside the base, and have no
 * other form. */
static bool stands_apart(const char *type)
{
    static const char *const kinds[] = {
        "LILY",
        "POLY",
        "XLORA",
        "SHADOW",
        "ADAPTION_PROMPT",
        "PREFIX_TUNING",
        "CARTRIDGE",
        "PROMPT_TUNING",
        "P_TUNING",
        "CPT",
        "MULTITASK_PROMPT_TUNING",
    };

    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kinds[i], type))
            return true;
    return false;
}

/* Why adapters of a kind that has no method are refused; NULL: the kind is not known. */
static const char *why_refused(const char *type)
{
    static const struct {
        const char *type, *why;
    } kinds[] = {
        /* PEFT keeps A and B out of the file (buffers that are not persistent) and computes them
         * again.  Between them stands a rotation, which flipped signs of a pair of vectors change.
         * Signs differ by library, type and device: of 20 matrices of 24x24 to 1024x256, PyTorch
         * 2.15's on the CPU in F32 (MKL's sgesdd) and in F64 differ in 15, and so do those in F32
         * of OpenBLAS; nothing in the file says which were used. */
        { "PSOFT", "turns singular vectors of the base that are not in its file, and whose signs "
                   "are those of the library and the device that computed them" },
    };

    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kinds[i].type, type))
            return kinds[i].why;
    return stands_apart(type) ? "is not a change of weights" : NULL;
}

/* A kind that runs beside the base here as well, where a model is used. */
static lm_code fail_beside(const lm_tune_folder *f, const char *type, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, f->path, "use it beside its base, with generate or eval-model",
                   "an adapter of type '%.40s' is not a change of weights: it cannot be merged",
                   type);
}

/* AdapterHub's files have no type: Houlsby's are behind attention and MLP, Pfeiffer's behind one of
 * them. */
static const char *neck_type(const lm_tune_folder *f)
{
    const json_t *c = json_object_get(f->config, "config");
    bool both = json_is_true(json_object_get(c, "mh_adapter")) &&
                json_is_true(json_object_get(c, "output_adapter"));
    return both ? "houlsby (a bottleneck)" : "pfeiffer (a bottleneck)";
}

static lm_code read_method(lm_tune_folder *f, lm_err *e)
{
    const char *type = NULL;
    double values[64];
    lm_code rc = lm_json_str_or(f->config, "peft_type", "", &type, f->path, e);

    if (rc)
        return rc;
    f->method = lm_tune_method_of(type);
    if (!*type && lm_attach_bottleneck_is(f->config))
        return fail_beside(f, neck_type(f), e);
    if (lm_attach_virtual_is(type))
        return fail_beside(f, type, e);
    if (!f->method && !*type)
        return lm_fail(e, LM_EFORMAT, f->path, NULL, "does not say its peft_type");
    if (!f->method)
        return why_refused(type) ? lm_fail(e, LM_EUSAGE, f->path, "use the program that made it",
                                           "an adapter of type '%.40s' %s", type, why_refused(type))
                                 : lm_fail(e, LM_EUSAGE, f->path, "use the program that made it",
                                           "adapters of type '%.40s' are not known", type);
    rc = lm_tune_check_config(f->method, f->config, f->path, e);
    return rc ? rc : lm_tune_read_hyper(f->method, f->config, NULL, f->path, values, e);
}

/* True for a kind of the registry. */
static bool has_method(const lm_tune_folder *f)
{
    const char *type = json_string_value(json_object_get(f->config, "peft_type"));
    return type && lm_tune_method_of(type);
}

/* any: kinds without a method too. */
static lm_code open_folder(const char *path, const lm_bundle_opts *o, bool any,
                           lm_tune_folder **out, lm_err *e)
{
    lm_tune_folder *f = NULL;
    lm_code rc = lm_alloc_n(&f, 1, sizeof *f, "adapter", e);

    *out = NULL;
    if (rc)
        return rc;
    rc = lm_strdup(&f->path, path, e);
    rc = rc ? rc : lm_arena_new(&f->arena, 1 << 16, e);
    rc = rc ? rc : read_config(f, o, e);
    if (!rc && (!any || has_method(f)))
        rc = read_method(f, e);
    rc = rc ? rc : read_weights(f, e);
    if (!rc && !lm_st_count(f->st))
        rc = lm_fail(e, LM_EFORMAT, path, "save the adapter again", "%s holds no tensors",
                     lm_tune_weights_file);
    if (rc)
        lm_tune_folder_close(f);
    else
        *out = f;
    return rc;
}

lm_code lm_tune_folder_open(const char *path, const lm_bundle_opts *o, lm_tune_folder **out,
                            lm_err *e)
{
    return open_folder(path, o, false, out, e);
}

lm_code lm_tune_folder_open_any(const char *path, const lm_bundle_opts *o, lm_tune_folder **out,
                                lm_err *e)
{
    return open_folder(path, o, true, out, e);
}

void lm_tune_folder_close(lm_tune_folder *f)
{
    if (!f)
        return;
    lm_free(f->part);
    lm_free(f->whole);
    lm_free(f->level);
    lm_free(f->param);
    lm_st_close(f->st);
    lm_bundle_close(f->files);
    json_decref(f->config);
    json_decref(f->tokens);
    lm_arena_free(f->arena);
    lm_free(f->path);
    lm_free(f);
}

const char *lm_tune_folder_path(const lm_tune_folder *f)
{
    return f->path;
}

const lm_tune_method *lm_tune_folder_method(const lm_tune_folder *f)
{
    return f->method;
}

const char *lm_tune_folder_task(const lm_tune_folder *f)
{
    const char *own = json_string_value(json_object_get(f->config, "task_type"));
    return own ? own : lm_tune_task(NULL);
}

const json_t *lm_tune_folder_config(const lm_tune_folder *f)
{
    return f->config;
}

const lm_st *lm_tune_folder_tensors(const lm_tune_folder *f)
{
    return f->st;
}

lm_bundle *lm_tune_folder_files(const lm_tune_folder *f)
{
    return f->files;
}

size_t lm_tune_folder_parts(const lm_tune_folder *f)
{
    return f->n_parts;
}

const lm_tune_part *lm_tune_folder_part(const lm_tune_folder *f, size_t i)
{
    return &f->part[i];
}

size_t lm_tune_folder_wholes(const lm_tune_folder *f)
{
    return f->n_wholes;
}

const lm_tune_whole *lm_tune_folder_whole(const lm_tune_folder *f, size_t i)
{
    return &f->whole[i];
}

size_t lm_tune_folder_params(const lm_tune_folder *f)
{
    return f->n_params;
}

const lm_tune_param *lm_tune_folder_param(const lm_tune_folder *f, size_t i)
{
    return &f->param[i];
}
