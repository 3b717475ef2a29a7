/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_adapter.c -- adapters of any method: a configuration and tensors are bound to a small base, applied to its weights and
 * biases, and attached; or refused with one error.
 *
 * The first line of the input is adapter_config.json.  Each line up to an empty one is a tensor: its name, its type and its
 * dimensions ("lora_A.weight F32 2,8").  The rest is repeated to give the numbers.  So inputs stay files of safetensors whose
 * headers are sound: fuzz_safetensors has the others. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "kernels/cpu/tables.h"
#include "kernels/peak.h"
#include "model/config.h"
#include "tune/apply.h"
#include "tune/attach.h"

#define LAYER "model.layers.0."
enum { MAX_TENSORS = 64, MAX_BYTES = 1 << 16, INNER = 12 };

/* ---- What is linked: the definitions of the operators that rules use ---- */

static const lm_kernel *const tables[] = { lm_arrange_ref_kernels, lm_elementwise_ref_kernels,
                                           lm_embed_ref_kernels,   lm_factor_ref_kernels,
                                           lm_map_ref_kernels,     lm_matmul_ref_kernels };

const lm_kernel *lm_cpu_kernel(const char *op, lm_dtype act, lm_cpu_level max)
{
    const lm_kernel *any = NULL;
    (void)max;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const lm_kernel *k = tables[t]; k->op; k++)
            if (!strcmp(k->op, op) && (k->act == act || (!any && k->act == LM_DTYPE_NONE)))
                any = k;
    return any;
}

double lm_cpu_peak(lm_dtype act, lm_cpu_level level, lm_par *par)
{
    (void)act, (void)level, (void)par;
    return 1;
}

/* ---- The files ---- */

static lm_config config;
static lm_tune_bases bases;
static char dir[] = "/tmp/lm-fuzz-XXXXXX";

static void path_of(const char *name, char out[80])
{
    snprintf(out, 80, "%s/%s", dir, name);
}

static void put(const char *name, const void *data, size_t size)
{
    char path[80];
    path_of(name, path);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f))
        abort();
}

static void remove_all(void)
{
    static const char *const names[] = { "adapter_config.json", "adapter_model.safetensors",
                                         "config.json", "model.safetensors" };
    char path[80];
    for (int i = 0; i < 4; i++) {
        path_of(names[i], path);
        unlink(path);
    }
    rmdir(dir);
}

/* The line at *at, without its end, which becomes a 0; NULL: there is none, or it is empty. */
static char *next_line(char **at, const char *end)
{
    char *line = *at, *stop = memchr(line, '\n', (size_t)(end - line));
    if (!stop || stop == line)
        return NULL;
    *stop = 0;
    *at = stop + 1;
    return line;
}

/* "NAME TYPE 2,8" as an entry of the header, whose bytes begin at *offset; false: it is none. */
static bool add_entry(char *line, size_t *offset, json_t *header)
{
    char *type = strchr(line, ' '), *dims = type ? strchr(type + 1, ' ') : NULL;
    if (!dims || json_object_size(header) >= MAX_TENSORS)
        return false;
    *type++ = *dims++ = 0;
    const lm_dtype dtype = lm_dtype_parse(type);
    if (dtype == LM_DTYPE_NONE)
        return false;
    size_t bytes = lm_dtype_size(dtype);
    json_t *shape = json_array();
    for (char *p = dims; *p;) {
        const unsigned long long n = strtoull(p, &dims, 10);
        bytes *= (size_t)n;
        if (dims == p || n > MAX_BYTES || bytes > MAX_BYTES)
            bytes = SIZE_MAX;
        json_array_append_new(shape, json_integer((json_int_t)n));
        p = *dims == ',' && bytes < SIZE_MAX ? dims + 1 : dims + strlen(dims);
    }
    json_t *entry = json_pack("{s:s,s:o,s:[I,I]}", "dtype", lm_dtype_st_name(dtype), "shape", shape,
                              "data_offsets", (json_int_t)*offset, (json_int_t)(*offset + bytes));
    if (bytes > MAX_BYTES || *offset + bytes > MAX_BYTES || json_object_set(header, line, entry)) {
        json_decref(entry);
        return false;
    }
    json_decref(entry);
    *offset += bytes;
    return true;
}

/* A file of the entries of `header`, whose numbers are `have` bytes again and again. */
static void put_tensors(const char *name, const json_t *header, size_t bytes, const char *numbers,
                        size_t have)
{
    char *printed = json_dumps(header, JSON_COMPACT);
    const size_t n = strlen(printed);
    unsigned char *file = calloc(8 + n + bytes, 1);
    for (int i = 0; i < 8; i++)
        file[i] = (unsigned char)(n >> 8 * i);
    memcpy(file + 8, printed, n);
    for (size_t i = 0; have && i < bytes; i++)
        file[8 + n + i] = (unsigned char)numbers[i % have];
    put(name, file, 8 + n + bytes);
    free(file);
    free(printed);
}

/* Both files; false: the input is not of this form. */
static bool write_files(char *text, size_t size)
{
    char *at = text, *config_line = next_line(&at, text + size), *line;
    json_t *header = json_object();
    size_t bytes = 0;
    bool sound = config_line != NULL;
    while (sound && (line = next_line(&at, text + size)))
        sound = add_entry(line, &bytes, header);
    sound = sound && at < text + size && *at++ == '\n';
    if (sound) {
        put("adapter_config.json", config_line, strlen(config_line));
        put_tensors("adapter_model.safetensors", header, bytes, at, (size_t)(text + size - at));
    }
    json_decref(header);
    return sound;
}

/* A Llama of one layer, which the inputs name. */
static void prepare(void)
{
    static const char text[] =
        "{\"model_type\":\"llama\",\"vocab_size\":10,\"hidden_size\":8,\"intermediate_size\":12,"
        "\"num_hidden_layers\":1,\"num_attention_heads\":2,\"max_position_embeddings\":32,"
        "\"num_key_value_heads\":1}";
    static const char *const tensors[] = {
        "model.embed_tokens.weight F32 10,8",
        LAYER "input_layernorm.weight F32 8",
        LAYER "self_attn.q_proj.weight F32 8,8",
        LAYER "self_attn.q_proj.bias F32 8",
        LAYER "self_attn.k_proj.weight F32 4,8",
        LAYER "mlp.up_proj.weight F32 12,8",
        LAYER "mlp.up_proj.bias F32 12",
        LAYER "mlp.down_proj.weight F32 8,12",
        "lm_head.weight F32 10,8",
    };
    lm_err e = { 0 };
    static json_t *tree; /* lives as long as the process, as the source does */
    static lm_model_source *source;
    json_t *header = json_object();
    size_t bytes = 0;
    char line[80];
    if (!mkdtemp(dir) || lm_json_parse(text, sizeof text - 1, "config", &tree, &e) ||
        lm_config_read(tree, "config", &config, &e))
        abort();
    atexit(remove_all);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        snprintf(line, sizeof line, "%s", tensors[i]);
        if (!add_entry(line, &bytes, header))
            abort();
    }
    put("config.json", text, sizeof text - 1);
    put_tensors("model.safetensors", header, bytes, "\0\0\0\x3f", 4);
    json_decref(header);
    if (lm_model_source_open(dir, NULL, &source, &e) ||
        lm_tune_bases_read(source, false, &bases, &e))
        abort();
}

/* ---- What is done with them ---- */

static void check(lm_code rc, const lm_err *e)
{
    if (!rc != !e->what[0])
        abort();
}

static void apply(const lm_tune_folder *f, const lm_tune_part *p)
{
    const size_t rows = (size_t)p->base->out, n = rows * (size_t)(p->base->in ? p->base->in : 1);
    double w[INNER * INNER], out[INNER * INNER], b[INNER];
    lm_tune_loaded l;
    lm_err e = { 0 };
    bool any;
    for (size_t i = 0; i < n; i++)
        w[i] = (double)(i * 7 % 11) / 11 - 0.4;
    for (size_t i = 0; i < rows; i++)
        b[i] = (double)i / 8;
    const lm_code rc = lm_tune_load(f, p, &l, &e);
    check(rc, &e);
    if (rc)
        return;
    check(lm_tune_weight(&l, w, out, NULL, &e), &e);
    e = (lm_err){ 0 };
    check(lm_tune_bias(&l, w, p->base->bias ? b : NULL, out, &any, NULL, &e), &e);
    lm_tune_loaded_fini(&l);
}

static void attach(const lm_tune_folder *f)
{
    lm_attach *a = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_attach_new(&bases, &config, lm_tune_folder_config(f), "a", &a, &e);
    rc = rc ? rc : lm_attach_read_ids(a, lm_tune_folder_tensors(f), &e);
    check(rc, &e);
    lm_attach_free(a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_tune_folder *f = NULL;
    lm_err e = { 0 };
    char *text = malloc(size + 1);
    if (!config.layers)
        prepare();
    memcpy(text, data, size);
    text[size] = 0;
    if (write_files(text, size)) {
        lm_code rc = lm_tune_folder_open_any(dir, NULL, &f, &e);
        if (!rc)
            attach(f);
        if (!rc && lm_tune_folder_method(f))
            rc = lm_tune_folder_bind(f, &bases, &e);
        check(rc, &e);
        for (size_t i = 0; !rc && i < lm_tune_folder_parts(f); i++)
            apply(f, lm_tune_folder_part(f, i));
        lm_tune_folder_close(f);
    }
    free(text);
    return 0;
}
