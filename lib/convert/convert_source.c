/* SPDX-License-Identifier: Apache-2.0 */
/* convert_source.c -- a GGUF file as a model source (convert_source.h). */
#include "convert/convert_source.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/source_made.h"

static lm_code load(void *ctx, const lm_st_tensor *t, const void **data, lm_err *e)
{
    lm_import *m = ctx;
    return m->load(m, t, data, e);
}

static const lm_format *format(void *ctx, const lm_st_tensor *t, bool *turned)
{
    lm_import *m = ctx;
    *turned = m->turned(m, t);
    return m->format_of(m, t);
}

static lm_code codes(void *ctx, const lm_st_tensor *t, void *dst, lm_err *e)
{
    lm_import *m = ctx;
    return m->codes(m, t, dst, e);
}

static const void *codes_in_file(void *ctx, const lm_st_tensor *t)
{
    const lm_import *m = ctx;
    return m->codes_in_file(m, t);
}

static const char *meta(void *ctx, const char *key)
{
    const lm_import *m = ctx;
    if (!strcmp(key, LM_SEQ_KEY))
        return m->seq_len;
    return strcmp(key, LM_HISTORY_KEY) ? NULL : m->history;
}

static void close_import(void *ctx)
{
    lm_import_close(ctx);
    lm_free(ctx);
}

static const lm_source_maker maker = { .load = load,
                                       .format = format,
                                       .codes = codes,
                                       .codes_in_file = codes_in_file,
                                       .meta = meta,
                                       .close = close_import };

bool lm_is_gguf(const char *path)
{
    char head[4];
    struct stat st;
    lm_model_format format;
    lm_err unseen = { 0 };
    if (!strcmp(path, "-"))
        return !lm_model_format_tell(path, &format, &unseen) && format == LM_FORMAT_GGUF;
    /* a pipe must not be opened for inspection */
    bool file = !stat(path, &st) && S_ISREG(st.st_mode);
    int fd = file ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    bool is =
        fd >= 0 && (lm_text_ends(path, ".gguf") ||
                    (pread(fd, head, sizeof head, 0) == sizeof head && !memcmp(head, "GGUF", 4)));
    if (fd >= 0)
        close(fd);
    return is;
}

/* The side files of lm_import, by the names of files in a folder. */
static lm_code list_files(const lm_import *m, lm_folder_files *out, lm_err *e)
{
    for (size_t i = 0; i < m->n_side; i++) {
        if (lm_grow(&out->v, &out->cap, out->n + 1, sizeof *out->v, "files", e))
            return e->code;
        out->v[out->n++] =
            (struct lm_folder_file){ .name = m->side[i].name, .data = m->side[i].data };
    }
    return LM_OK;
}

lm_code lm_gguf_source_open(const char *path, bool tokenizer, const lm_bundle_opts *how,
                            lm_model_source **out, lm_err *e)
{
    const lm_import_opts o = { .par = how->par,
                               .sink = how->sink,
                               .bundle = how,
                               .tokenizer = tokenizer ? NULL : "none",
                               .dtype = LM_DTYPE_F32,
                               .no_digest = true };
    lm_folder_files files = { 0 };
    lm_import *m = NULL;

    *out = NULL;
    if (lm_alloc_n(&m, 1, sizeof *m, "a model", e))
        return e->code;
    if (!lm_import_open(path, LM_FORMAT_GGUF, &o, m, e) && !list_files(m, &files, e)) {
        const lm_source_parts parts = { .path = m->path,
                                        .config = m->tree,
                                        .small = &files,
                                        .plan = m->plan,
                                        .by = &maker,
                                        .ctx = m };
        lm_model_source_make(&parts, out, e);
    }
    lm_free(files.v); /* names and data belong to the import */
    if (!*out)
        close_import(m);
    return *out ? LM_OK : e->code;
}
