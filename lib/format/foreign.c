/* SPDX-License-Identifier: Apache-2.0 */
/* foreign.c -- see foreign.h. */
#include "format/foreign.h"

#include <errno.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"

static const char pickle[] = "a pickle of Python, which is not read";
static const char save_again[] =
    "save it with safetensors: from_pretrained(DIR).save_pretrained(NEW) of transformers";

/* Names of files of weights, in the order of the search. */
static const struct {
    const char *begin, *end, *what, *todo;
} kinds[] = {
    { "pytorch_model", ".bin", pickle, save_again },
    { "pytorch_model", ".bin.index.json", pickle, save_again },
    { "adapter_model", ".safetensors", "the weights of an adapter",
      "merge-models MODEL+ADAPTER merges it into its base" },
    { "adapter_model", ".bin", pickle,
      "save it with PEFT's save_pretrained(..., safe_serialization=True)" },
    { "consolidated", ".pth", pickle, "fetch the model in the form of transformers" },
    { "", ".pth", pickle, save_again },
    { "", ".pt", pickle, save_again },
    { "", ".ckpt", pickle, save_again },
    { "", ".gguf", "a model of llama.cpp", "convert-model makes a model folder of it" },
    { "tf_model", ".h5", "a model of TensorFlow", save_again },
    { "flax_model", ".msgpack", "a model of Flax", save_again },
    { "", ".onnx", "a model of ONNX", "fetch the model in the form of transformers" },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static bool is_kind(const char *name, int k)
{
    return !strncmp(name, kinds[k].begin, strlen(kinds[k].begin)) &&
           lm_text_ends(name, kinds[k].end);
}

const char *lm_foreign_in(const lm_bundle *b, const char **todo)
{
    for (int k = 0; k < KINDS; k++)
        for (size_t i = 0; i < lm_bundle_count(b); i++) {
            const char *name = lm_bundle_at(b, i)->name;

            *todo = kinds[k].todo;
            if (is_kind(name, k))
                return name;
        }
    return NULL;
}

const char *lm_foreign_name(const char *path, const char **todo)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;

    for (int k = 0; k < KINDS; k++) {
        *todo = kinds[k].todo;
        if (is_kind(name, k))
            return kinds[k].what;
    }
    return NULL;
}

static const char make_tokens[] =
    "name the model first; clean-data, train-tokenizer and shard-data read text";
static const char name_model[] = "name the model first: train MODEL DATA, eval-model MODEL DATA";

static const struct {
    const char *magic;
    size_t n;
    const char *what, *todo;
} magics[] = {
    { "GGUF", 4, "a model of llama.cpp", "convert-model makes a model folder of it" },
    { "PK\3\4", 4, pickle, save_again },
    { "\x80\2", 2, pickle, save_again },
    { "\x80\3", 2, pickle, save_again },
    { "\x80\4", 2, pickle, save_again },
    { "\x80\5", 2, pickle, save_again },
    { "MMIDIDX\0", 8, "the index of a token dataset", name_model },
    { "\xF8\xD7\x34\x01", 4, "a token shard of llm.c", name_model },
    { "\xE1\xD8\x34\x01", 4, "a token shard of llm.c", name_model },
    { "\x36\xD7\x34\x01", 4, "a model of llm.c", "convert-model makes a model folder of it" },
    { "\x93NUMPY", 6, "an array of NumPy", "save it with safetensors.numpy" },
    { "\x89HDF", 4, "a model of TensorFlow", save_again },
};

/* Objects of JSON by a key in their first bytes, in this order. */
static const struct {
    const char *key, *what, *todo;
} objects[] = {
    { "\"model_type\"", "a config.json without weights",
      "init-model makes a model with fresh weights from it" },
    { "\"added_tokens\"", "a tokenizer.json", "name a model, not its tokenizer" },
    { "\"weight_map\"", "the index of shards", "name its folder" },
    { "\"event\"", "the metrics of a run", "plot-run draws them" },
    { "\"messages\"", "text in JSONL", make_tokens },
    { "\"prompt\"", "text in JSONL", make_tokens },
    { "\"text\"", "text in JSONL", make_tokens },
};

static const char *json_kind(const char *s, size_t n, const char **todo)
{
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
        *todo = objects[i].todo;
        if (memmem(s, n, objects[i].key, strlen(objects[i].key)))
            return objects[i].what;
    }
    *todo = "name a folder, a .safetensors file, a tar or an .lmz";
    return "JSON";
}

/* True if s is printable, except for a character that the end of s cuts. */
static bool is_text(const char *s, size_t n)
{
    size_t valid = lm_utf8_valid(s, n);

    for (size_t i = 0; i < valid; i++)
        if ((unsigned char)s[i] < ' ' && !strchr("\t\n\r\f\v\b", s[i] ? s[i] : 'x'))
            return false;
    return n - valid < 4;
}

const char *lm_foreign_bytes(const void *data, size_t n, const char **todo)
{
    const char *s = data;
    size_t at = 0;

    for (size_t i = 0; i < sizeof magics / sizeof *magics; i++) {
        *todo = magics[i].todo;
        if (n >= magics[i].n && !memcmp(s, magics[i].magic, magics[i].n))
            return magics[i].what;
    }
    n = n < 65536 ? n : 65536;
    if (!n || !is_text(s, n))
        return NULL;
    while (at < n && (s[at] == ' ' || s[at] == '\n' || s[at] == '\r' || s[at] == '\t'))
        at++;
    if (at < n && s[at] == '{')
        return json_kind(s, n, todo);
    *todo = make_tokens;
    return "plain text";
}

bool lm_foreign_dataset(const char *path)
{
    int why = errno;
    char *index = NULL;
    size_t n = strlen(path) - (lm_text_ends(path, ".bin") ? 4 : 0);
    bool there = !lm_asprintf(&index, NULL, "%.*s.idx", (int)(n < 4096 ? n : 4096), path) &&
                 lm_path_exists(index);

    lm_free(index);
    errno = why;
    return there;
}

const char *lm_foreign_files(const lm_bundle *b, const char **todo)
{
    for (size_t i = 0; i < lm_bundle_count(b); i++)
        if (lm_text_ends(lm_bundle_at(b, i)->name, ".idx")) {
            *todo = name_model;
            return "a token dataset";
        }
    *todo = "init-model makes a model with fresh weights from a config and a tokenizer";
    if (lm_bundle_find(b, "config.json"))
        return "a config.json without weights";
    if (lm_bundle_find(b, "tokenizer.json"))
        return "a tokenizer without a model";
    return NULL;
}
