/* SPDX-License-Identifier: Apache-2.0 */
/* verify.c -- checks that files and tensors have a reader; see verify.h. */
#include "convert/verify.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "convert/names.h"
#include "format/foreign.h"
#include "format/fp8_source.h"
#include "model/fused.h"
#include "model/preset.h"

void lm_verify_say(lm_findings *f, bool fault, const char *file, const char *name, const char *fmt,
                   ...)
{
    char what[700];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    *(fault ? &f->faults : &f->notes) += 1;
    f->say(f->ctx, &(lm_finding){ fault, file, name, what });
}

/* ---- Files ---- */

static bool is_opened(const lm_model_source *m, const char *name)
{
    for (size_t i = 0; i < lm_model_source_files(m); i++)
        if (!strcmp(lm_model_source_file_at(m, i), name))
            return true;
    return false;
}

/* Weights that another program reads, but not a loader of this folder. */
static const char *reader_of(const char *name)
{
    return !strncmp(name, "optimizer", 9)        ? "train"
           : !strncmp(name, "adapter_model", 13) ? "peft"
           : !strncmp(name, "consolidated", 12)  ? "mistral-inference"
                                                 : NULL;
}

static void check_files(const lm_model_source *m, lm_findings *f)
{
    static const char index[] = "model.safetensors.index.json";
    lm_bundle *b = lm_model_source_bundle(m);
    bool single = is_opened(m, "model.safetensors");

    for (size_t i = 0; i < lm_bundle_count(b); i++) {
        const char *name = lm_bundle_at(b, i)->name, *what, *todo;
        if (!strcmp(name, index) && single)
            lm_verify_say(f, false, name, NULL, "is not read: model.safetensors comes first");
        if ((what = lm_foreign_name(name, &todo)) && !lm_text_ends(name, ".safetensors"))
            lm_verify_say(f, false, name, NULL, "lies beside the weights that are read: %s", what);
        if (!lm_text_ends(name, ".safetensors") || is_opened(m, name))
            continue;
        if (reader_of(name))
            lm_verify_say(f, false, name, NULL, "is read by %s alone", reader_of(name));
        else
            lm_verify_say(f, true, name, NULL, "is read by no loader: %s",
                          single ? "model.safetensors comes first" : "the index does not name it");
    }
}

/* ---- Tensors ---- */

typedef struct {
    const lm_model_source *m;
    const lm_config *c;
    lm_model_tensor *wanted;
    const lm_model_tensor **sorted; /* by bare name */
    bool *seen;                     /* of each */
    size_t n;
    lm_findings *f;
} parts;

/* GPT-2's files have names with and without this prefix. */
static const char *bare(const char *name)
{
    return strncmp(name, "transformer.", 12) ? name : name + 12;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(bare((*(const lm_model_tensor *const *)a)->hf),
                  bare((*(const lm_model_tensor *const *)b)->hf));
}

static int by_key(const void *key, const void *wanted)
{
    return strcmp(bare(key), bare((*(const lm_model_tensor *const *)wanted)->hf));
}

static const lm_model_tensor *wanted_named(const parts *p, const char *name)
{
    char now[LM_TENSOR_NAME];
    const lm_model_tensor **at = bsearch(lm_arch_present_name(p->c->arch, name, now), p->sorted,
                                         p->n, sizeof(lm_model_tensor *), by_key);
    return at ? *at : NULL;
}

static void check_shape(const parts *p, const lm_st_tensor *t, const lm_model_tensor *s)
{
    const char *file = lm_model_source_file_of(p->m, t);
    bool same = t->ndim == s->ndim;

    for (int i = 0; same && i < s->ndim; i++)
        same = t->dim[i] == s->dim[i];
    if (same || !lm_dtype_is_float(t->dtype)) /* packed weights have another shape */
        return;
    if (s->ndim == 1)
        lm_verify_say(p->f, true, file, t->name,
                      "its shape is not the [%" PRId64 "] of config.json", s->dim[0]);
    else if (s->ndim == 3)
        lm_verify_say(p->f, true, file, t->name,
                      "its shape is not the [%" PRId64 ",%" PRId64 ",%" PRId64 "] of config.json",
                      s->dim[0], s->dim[1], s->dim[2]);
    else
        lm_verify_say(p->f, true, file, t->name,
                      "its shape is not the [%" PRId64 ",%" PRId64 "] of config.json", s->dim[0],
                      s->dim[1]);
}

/* The tensors that a fused one holds. */
static void check_fused(parts *p, const lm_fused *f, const lm_st_tensor *t)
{
    const char *file = lm_model_source_file_of(p->m, t);
    char name[LM_TENSOR_NAME];
    lm_err why = { 0 };

    if (lm_fused_check(f, t, file, &why))
        lm_verify_say(p->f, true, file, t->name, "%s", why.what);
    for (int64_t k = 0; k < lm_fused_count(f); k++) {
        lm_fused_name(p->c, f, k, name);
        const lm_model_tensor *s = wanted_named(p, name);
        if (p->seen[s - p->wanted])
            lm_verify_say(p->f, true, file, t->name, "occurs twice, also under another name");
        p->seen[s - p->wanted] = true;
    }
}

static void check_tensor(parts *p, const lm_st_tensor *t)
{
    const char *file = lm_model_source_file_of(p->m, t);
    char plain[512];
    bool packed = lm_verify_is_packed(t->name, plain, sizeof plain);
    const lm_model_tensor *s = wanted_named(p, packed ? plain : t->name);
    lm_fused fused;
    lm_part of;

    if (!s && lm_fused_find(p->c, t->name, &fused)) {
        check_fused(p, &fused, t);
        return;
    }
    if (s && p->seen[s - p->wanted])
        lm_verify_say(p->f, true, file, t->name, "occurs twice, also under another name");
    if (s) {
        p->seen[s - p->wanted] = true;
        if (!packed)
            check_shape(p, t, s);
    } else if (lm_arch_is_buffer(p->c->arch, t->name)) {
        lm_verify_say(p->f, false, file, t->name, "is not read: a table that is recomputed");
    } else if (lm_config_ties(p->c, t->name)) {
        lm_verify_say(p->f, false, file, t->name,
                      "is not read: config.json ties the head to the embedding");
    } else if (lm_ahead_is_copy(p->c, t->name, &of)) {
        lm_verify_say(p->f, false, file, t->name, "is a copy of %s",
                      of == LM_PART_EMBED ? "the embedding" : "the head");
    } else if (lm_arch_is_noise(p->c->arch, t->name)) {
        lm_verify_say(p->f, false, file, t->name,
                      "is not read: config.json does not ask for noise of the router");
    } else if (lm_ahead_layer(p->c, t->name) < 0 && lm_config_passes_over(p->c, t->name)) {
        lm_verify_say(p->f, false, file, t->name,
                      lm_config_bidirectional(p->c)
                          ? "is not read: it is of another head than that of masked tokens"
                          : "is not read: it is of a layer that predicts tokens further on");
    } else if (!lm_verify_is_scale(t->name)) {
        lm_verify_say(p->f, true, file, t->name, "is read by no part of a %s model",
                      lm_arch_name(p->c->arch));
    }
}

static lm_code check_parts(const lm_model_source *m, const lm_config *c, lm_findings *f, lm_err *e)
{
    parts p = { .m = m, .c = c, .f = f };
    bool ahead = false; /* transformers saves the key without the tensors */
    for (size_t i = 0; !ahead && i < lm_model_source_count(m); i++)
        ahead = lm_ahead_layer(c, lm_model_source_at(m, i)->name) >= 0;
    lm_code rc = ahead ? lm_model_tensors_make_all(c, &p.wanted, &p.n, e)
                       : lm_model_tensors_make(c, &p.wanted, &p.n, e);

    if (!rc)
        rc = lm_alloc_n(&p.sorted, p.n, sizeof(lm_model_tensor *), "names of tensors", e);
    if (!rc)
        rc = lm_alloc_n(&p.seen, p.n, 1, "names of tensors", e);
    for (size_t i = 0; !rc && i < p.n; i++)
        p.sorted[i] = &p.wanted[i];
    if (!rc)
        qsort(p.sorted, p.n, sizeof(lm_model_tensor *), by_name);
    for (size_t i = 0; !rc && i < lm_model_source_count(m); i++)
        check_tensor(&p, lm_model_source_at(m, i));
    for (size_t i = 0; !rc && i < p.n; i++)
        if (!p.seen[i])
            lm_verify_say(f, true, "", p.wanted[i].hf, "is missing");
    lm_free(p.wanted);
    lm_free(p.sorted);
    lm_free(p.seen);
    return rc;
}

/* ---- The model ---- */

/* True if a weight is in a quantised form. */
static bool is_quantised(const lm_model_source *m)
{
    char plain[512];

    for (size_t i = 0; i < lm_model_source_count(m); i++) {
        const char *name = lm_model_source_at(m, i)->name;
        if (lm_verify_is_scale(name) || lm_verify_is_packed(name, plain, sizeof plain))
            return true;
    }
    return false;
}

/* Tools that compute refuse the key for any weights. */
static void check_quantization(const lm_model_source *m, const json_t *config, lm_findings *f)
{
    static const char key[] = "quantization_config";
    const json_t *v = json_object_get(config, key);

    if (v && !json_is_null(v) && !lm_fp8_in_blocks(config))
        lm_verify_say(f, false, "config.json", key,
                      is_quantised(m) ? "all tools that compute with the model refuse it"
                                      : "all tools that compute with the model refuse it, and no "
                                        "weight is quantised: remove the key");
}

/* The architecture of a quantised model is read without its quantisation. */
static lm_code check_model(const lm_model_source *m, int64_t *vocab, lm_findings *f, lm_err *e)
{
    const json_t *config = lm_model_source_config(m);
    lm_config c;
    lm_err why = { 0 };
    json_t *plain;
    lm_code rc;

    if (!config) {
        lm_verify_say(f, false, "", NULL, "no config.json: the use of its tensors is not checked");
        return LM_OK;
    }
    plain = json_copy((json_t *)(uintptr_t)config);
    if (!plain)
        return lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for a copy");
    json_object_del(plain, "quantization_config");
    rc = lm_config_read(plain, "config.json", &c, &why);
    json_decref(plain);
    if (rc == LM_ELIMIT) {
        *e = why;
        return rc;
    }
    if (rc) {
        const char *type = json_string_value(json_object_get(config, "model_type"));
        bool known = type && lm_config_keys(type);
        lm_verify_say(f, known, "config.json", NULL,
                      known ? "is refused by all tools that compute with the model: %s"
                            : "the use of tensors and keys is not checked: %s",
                      why.what);
        return LM_OK;
    }
    lm_config_see(&c, m);
    *vocab = c.vocab;
    lm_verify_keys(config, f);
    check_quantization(m, config, f);
    rc = check_parts(m, &c, f, e);
    lm_config_fini(&c);
    return rc;
}

lm_code lm_model_verify(lm_model_source *m, lm_findings *f, lm_err *e)
{
    int64_t vocab = 0;
    lm_code rc = lm_model_source_spool(m, e);

    if (rc)
        return rc;
    if (lm_model_source_config(m))
        check_files(m, f);
    rc = check_model(m, &vocab, f, e);
    if (!rc)
        lm_verify_scales(m, f);
    if (!rc && lm_model_source_config(m))
        rc = lm_verify_tokenizer(m, vocab, f, e);
    return rc;
}
