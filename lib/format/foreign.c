/* SPDX-License-Identifier: Apache-2.0 */
/* foreign.c -- see foreign.h. */
#include "format/foreign.h"

#include <string.h>

#include "base/text.h"

static const char pickle[] = "a pickle of Python, which is not read";
static const char save_again[] =
    "save it with safetensors: from_pretrained(DIR).save_pretrained(NEW) of transformers";

/* Names of files of weights, in the order in which they are looked for. */
static const struct {
    const char *begin, *end, *what, *todo;
} kinds[] = {
    { "pytorch_model", ".bin", pickle, save_again },
    { "pytorch_model", ".bin.index.json", pickle, save_again },
    { "adapter_model", ".safetensors", "the weights of an adapter", "write MODEL+ADAPTER" },
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
