/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_safetensors -- any bytes as a safetensors file: mapped, and as a stream.  The tensors of an
 * accepted file must cover the data exactly, and a plan of them must give the same header. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "format/safetensors_table.h"

typedef struct {
    const uint8_t *p;
    size_t left;
} memory;

static lm_code read_memory(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    memory *m = ctx;
    size_t n = cap < m->left ? cap : m->left;
    (void)e;
    memcpy(dst, m->p, n);
    m->p += n;
    m->left -= n;
    *got = n;
    return LM_OK;
}

/* True if the stream reader accepts the file to its end. */
static bool stream_accepts(const uint8_t *data, size_t size)
{
    memory m = { data, size };
    lm_st_stream *s = NULL;
    const lm_st_tensor *t = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_st_stream_open(read_memory, &m, "fuzz", &s, &e);

    do {
        uint8_t first;
        if (!rc)
            rc = lm_st_stream_next(s, &t, &e);
        if (!rc && t && t->bytes && t->count % 2)
            rc = lm_st_stream_read(s, &first, 1, &e);
    } while (!rc && t);
    lm_st_stream_close(s);
    if (rc && (!e.what[0] || e.code != rc))
        abort();
    return !rc;
}

static void check_plan(const lm_st_table *t)
{
    lm_st_plan *p = NULL;
    lm_st_table again = { 0 };
    lm_buf out = { 0 };
    lm_err e = { 0 };
    uint64_t at = 0;

    if (lm_st_plan_new(&p, &e))
        abort();
    for (size_t i = 0; i < t->n; i++) {
        if (t->tensor[i].offset != at)
            abort();
        at += t->tensor[i].bytes;
        if (!t->tensor[i].name[0] ? 0 : lm_st_plan_add_like(p, &t->tensor[i], &e))
            abort();
        if (lm_st_table_find(t, t->tensor[i].name) != &t->tensor[i])
            abort();
    }
    if (lm_st_plan_header(p, &out, &e) || out.len % 8 ||
        lm_st_table_parse(&again, out.data + 8, out.len - 8, lm_st_plan_data_bytes(p), "again",
                          &e) ||
        again.n != lm_st_plan_count(p))
        abort();
    lm_st_plan_sort(p);
    lm_st_table_fini(&again);
    lm_st_plan_free(p);
    lm_buf_fini(&out);
}

/* A header that the scan accepts must be JSON with exactly these tensors. */
static void check_scan(const char *text, size_t len)
{
    lm_st_table t = { 0 };
    lm_err e = { 0 };
    json_t *root = NULL;

    if (!lm_st_table_scan(&t, text, len))
        return;
    if (lm_json_parse(text, len, "fuzz", &root, &e) || !json_is_object(root) ||
        json_object_size(root) != t.n + (json_object_get(root, "__metadata__") != NULL))
        abort();
    for (size_t i = 0; i < t.n; i++) {
        const json_t *x = json_object_get(root, t.tensor[i].name);
        const json_t *shape = json_object_get(x, "shape");
        if (strcmp(json_string_value(json_object_get(x, "dtype")), t.tensor[i].dtype_name) ||
            json_array_size(shape) != (size_t)t.tensor[i].ndim)
            abort();
        for (int k = 0; k < t.tensor[i].ndim; k++)
            if (json_integer_value(json_array_get(shape, (size_t)k)) != t.tensor[i].dim[k])
                abort();
    }
    json_decref(root);
    lm_st_table_fini(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_st_table t = { 0 };
    lm_err e = { 0 };
    uint64_t header;
    bool whole = false;

    if (size >= 8 && !lm_st_header_length(data, "fuzz", &header, &e) && header <= size - 8) {
        check_scan((const char *)data + 8, header);
        whole =
            !lm_st_table_parse(&t, (const char *)data + 8, header, size - 8 - header, "fuzz", &e);
        if (whole)
            check_plan(&t);
        lm_st_table_fini(&t);
    }
    if (stream_accepts(data, size) != whole)
        abort();
    return 0;
}
