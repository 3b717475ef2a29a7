/* SPDX-License-Identifier: Apache-2.0 */
/* ending.c -- refuses output names with the ending of a format that the tool does not write:
 * model.zip would become a folder, text.jsonl.zst plain text. */
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "common/tool.h"
#include "format/archive.h"

typedef struct {
    const char *end, *what;
    bool text; /* text, or a general ending (.bin): refused for folders and models only */
} known;

static const known endings[] = {
    { ".zip", "a ZIP archive", false },
    { ".7z", "a 7z archive", false },
    { ".rar", "a RAR archive", false },
    { ".cpio", "a cpio archive", false },
    { ".tar", "a tar archive", false },
    { ".tgz", "a tar archive", false },
    { ".tzst", "a tar archive", false },
    { ".txz", "a tar archive", false },
    { ".tbz2", "a tar archive", false },
    { ".gz", "gzip data", false },
    { ".zst", "Zstandard data", false },
    { ".xz", "xz data", false },
    { ".lzma", "LZMA data", false },
    { ".bz2", "bzip2 data", false },
    { ".lz4", "LZ4 data", false },
    { ".br", "Brotli data", false },
    { ".gguf", "a GGUF model", false },
    { ".ggml", "a GGML model", false },
    { ".safetensors", "a safetensors file", false },
    { ".lmz", "an .lmz file", false },
    { ".pt", "a PyTorch file", false },
    { ".pth", "a PyTorch file", false },
    { ".ckpt", "a PyTorch file", false },
    { ".onnx", "an ONNX model", false },
    { ".npy", "a NumPy array", false },
    { ".npz", "a NumPy archive", false },
    { ".h5", "an HDF5 file", false },
    { ".pkl", "a Python pickle", false },
    { ".msgpack", "a MessagePack file", false },
    { ".parquet", "a Parquet file", false },
    { ".arrow", "an Arrow file", false },
    { ".bin", "a binary file", true },
    { ".idx", "an index of tokens", true },
    { ".json", "a JSON file", true },
    { ".jsonl", "a JSONL file", true },
    { ".yaml", "a YAML file", true },
    { ".yml", "a YAML file", true },
    { ".txt", "a text file", true },
    { ".csv", "a CSV file", true },
};

static const known *find_known(const char *path)
{
    size_t n = strlen(path);

    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t k = strlen(endings[i].end);
        if (n > k && path[n - k - 1] != '/' && !strcasecmp(path + n - k, endings[i].end))
            return &endings[i];
    }
    return NULL;
}

static bool writes(lm_product makes, const char *path, const known *k)
{
    const char *filter, *end = path + strlen(path) - strlen(k->end);

    switch (makes) {
    case LM_MAKES_MODEL:
        return lm_tar_name(path, &filter) || !strcmp(end, ".safetensors") || !strcmp(end, ".lmz");
    case LM_MAKES_LMZ:
        return !strcmp(end, ".lmz");
    case LM_MAKES_GGUF:
        return !strcmp(end, ".gguf");
    case LM_MAKES_BIN:
        return !strcmp(end, ".bin");
    case LM_MAKES_FOLDER:
        return false;
    default:
        return k->text;
    }
}

void lm_refuse_ending(lm_tool *t, const char *output, lm_product makes)
{
    static const char *const todo[] = {
        [LM_MAKES_TEXT] = "write to standard output and through a pipe, or choose another name",
        [LM_MAKES_FOLDER] = "name a folder; with a '/' at its end any name is one",
        [LM_MAKES_MODEL] =
            ("name a folder (any name with a '/' at its end), a .tar, .tar.gz, .tar.zst, .tar.xz, "
             ".tar.bz2, .tar.lz4, .safetensors or .lmz"),
        [LM_MAKES_LMZ] = "name an .lmz",
        [LM_MAKES_GGUF] = "name a .gguf",
        [LM_MAKES_BIN] = "name a .bin",
    };
    const known *k = output ? find_known(output) : NULL;
    struct stat st;

    if (makes == LM_MAKES_OTHER || !k || writes(makes, output, k) ||
        (!stat(output, &st) && (!S_ISREG(st.st_mode) || makes == LM_MAKES_FOLDER)))
        return; /* a file instead of a folder is refused with that reason */
    lm_misuse(t, output, todo[makes], "has the name of %s, which is not written here", k->what);
}
