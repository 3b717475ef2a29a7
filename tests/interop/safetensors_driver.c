/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_driver -- the library's readers and writers for test_safetensors.py.
 *
 *   resave IN OUT          read IN, plan and sort its tensors, write OUT: the reference's bytes
 *   stream OUT < IN        the same through the forward-only reader, in the order of IN
 *   folder IN OUT BYTES    copy a model folder in shards of at most BYTES
 *   as DTYPE IN OUT        convert every tensor */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/folder.h"
#include "format/folder_run.h"

static lm_err e;

static void must(lm_code rc)
{
    if (!rc)
        return;
    fprintf(stderr, "%s: %s\n", e.where, e.what);
    lm_out_drop_all();
    exit(1);
}

static lm_code read_stdin(void *ctx, void *dst, size_t cap, size_t *got, lm_err *err)
{
    ssize_t n = read(0, dst, cap);
    (void)ctx;
    (void)err;
    *got = n < 0 ? 0 : (size_t)n;
    return LM_OK;
}

static void resave(const char *in, const char *out, lm_dtype as)
{
    lm_st *s;
    lm_st_plan *p;
    lm_st_writer *w;
    const lm_st_tensor *t;
    const char *k, *v;

    must(lm_st_open(in, &s, &e));
    must(lm_st_plan_new(&p, &e));
    for (size_t i = 0; lm_st_meta_at(s, i, &k, &v); i++)
        must(lm_st_plan_meta(p, k, v, &e));
    for (size_t i = 0; i < lm_st_count(s); i++) {
        t = lm_st_at(s, i);
        if (as != LM_DTYPE_NONE && t->dtype != LM_DTYPE_NONE)
            must(lm_st_plan_add(p, t->name, as, t->ndim, t->dim, &e));
        else
            must(lm_st_plan_add_like(p, t, &e));
    }
    lm_st_plan_sort(p);
    must(lm_st_create(out, true, p, &w, &e));
    while ((t = lm_st_next(w))) {
        const lm_st_tensor *from = lm_st_find(s, t->name);
        if (as == LM_DTYPE_NONE || from->dtype == LM_DTYPE_NONE) {
            must(lm_st_write(w, lm_st_data(s, from), from->bytes, &e));
            continue;
        }
        uint8_t *data = malloc((size_t)from->count * 8 + 1);
        must(lm_st_load(s, from, LM_DTYPE_F64, data, &e));
        must(lm_st_write_as(w, LM_DTYPE_F64, data, from->count, &e));
        free(data);
    }
    must(lm_st_commit(w, &e));
    lm_st_plan_free(p);
    lm_st_close(s);
}

static void stream(const char *out)
{
    lm_st_stream *s;
    lm_st_plan *p;
    lm_st_writer *w;
    const lm_st_tensor *t;
    const char *k, *v;

    must(lm_st_stream_open(read_stdin, NULL, "standard input", &s, &e));
    must(lm_st_plan_new(&p, &e));
    for (size_t i = 0; lm_st_stream_meta_at(s, i, &k, &v); i++)
        must(lm_st_plan_meta(p, k, v, &e));
    for (size_t i = 0; i < lm_st_stream_count(s); i++)
        must(lm_st_plan_add_like(p, lm_st_stream_at(s, i), &e));
    must(lm_st_create(out, true, p, &w, &e));
    for (;;) {
        char chunk[1000];
        must(lm_st_stream_next(s, &t, &e));
        if (!t)
            break;
        for (uint64_t at = 0; at < t->bytes;) {
            size_t n = t->bytes - at < sizeof chunk ? (size_t)(t->bytes - at) : sizeof chunk;
            must(lm_st_stream_read(s, chunk, n, &e));
            must(lm_st_write(w, chunk, n, &e));
            at += n;
        }
    }
    must(lm_st_commit(w, &e));
    lm_st_plan_free(p);
    lm_st_stream_close(s);
}

static void folder(const char *in, const char *out, uint64_t shard)
{
    lm_model_source *m;
    lm_st_plan *p;
    lm_folder *f;
    const lm_st_tensor *t;

    must(lm_model_source_open(in, NULL, &m, &e));
    must(lm_st_plan_new(&p, &e));
    for (size_t i = 0; i < lm_model_source_count(m); i++)
        must(lm_st_plan_add_like(p, lm_model_source_at(m, i), &e));
    lm_folder_spec spec = { .config = lm_model_source_config(m),
                            .plan = p,
                            .tokenizer = lm_model_source_dir(m),
                            .max_shard_bytes = shard };
    must(lm_folder_create(out, false, NULL, &spec, &f, &e));
    while ((t = lm_folder_next(f))) {
        const lm_st_tensor *from = lm_model_source_find(m, t->name);
        must(lm_folder_write(f, lm_model_source_data(m, from), from->bytes, &e));
    }
    must(lm_folder_commit(f, &e));
    lm_st_plan_free(p);
    lm_model_source_close(m);
}

int main(int argc, char **argv)
{
    if (argc == 4 && !strcmp(argv[1], "resave"))
        resave(argv[2], argv[3], LM_DTYPE_NONE);
    else if (argc == 3 && !strcmp(argv[1], "stream"))
        stream(argv[2]);
    else if (argc == 5 && !strcmp(argv[1], "folder"))
        folder(argv[2], argv[3], strtoull(argv[4], NULL, 10));
    else if (argc == 5 && !strcmp(argv[1], "as"))
        resave(argv[3], argv[4], lm_dtype_parse(argv[2]));
    else if (argc == 4 && !strcmp(argv[1], "publish"))
        must(lm_run_publish(argv[2], argv[3], &e));
    else
        return 2;
    return 0;
}
