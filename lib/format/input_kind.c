/* SPDX-License-Identifier: Apache-2.0 */
/* input_kind.c -- see input_kind.h. */
#include "format/input_kind.h"

#include <string.h>

#include "base/text.h"
#include "format/jsonl.h"

enum { LOOK = 4096 };

static const struct {
    const char *magic;
    size_t n;
    const char *what, *cure;
} others[] = {
    { "PAR1", 4, "Parquet", "write it as JSONL, such as with pandas or duckdb" },
    { "ARROW1", 6, "Arrow", "write it as JSONL, such as with datasets' to_json" },
    { "Obj\1", 4, "Avro", "write it as JSONL" },
    { "\x89HDF\r\n", 6, "HDF5", "write its text as JSONL" },
    { "SQLite format 3", 15, "an SQLite database", "write its text as JSONL" },
    { "\x93NUMPY", 6, "a NumPy array", "write its text as JSONL, or its ids as a token dataset" },
    { "\x80\2}", 3, "a pickle", "write its text as JSONL" },
    { "\x80\3}", 3, "a pickle", "write its text as JSONL" },
    { "\x80\4\x95", 3, "a pickle", "write its text as JSONL" },
    { "\x80\5\x95", 3, "a pickle", "write its text as JSONL" },
    { "%PDF-", 5, "a PDF", "extract the text first, such as with pdftotext" },
    { "{\\rtf", 5, "RTF", "convert it to plain text first" },
    { "\xD0\xCF\x11\xE0", 4, "an Office document", "convert it to plain text first" },
    { "\x89PNG", 4, "a picture", "leave it out" },
    { "\xFF\xD8\xFF", 3, "a picture", "leave it out" },
    { "GIF8", 4, "a picture", "leave it out" },
    { "\x7F"
      "ELF",
      4, "a program", "leave it out" },
    { "GGUF", 4, "a GGUF model", "leave it out" },
    { "MMIDIDX", 7, "the index of a token dataset", "name the dataset where shards are read" },
    { "\x88\xD8\x34\x01", 4, "a token shard of llm.c", "name it where shards are read" },
    { "\xA1\xD9\x34\x01", 4, "a token shard of llm.c", "name it where shards are read" },
    { "\xC6\xD7\x34\x01", 4, "a model of llm.c", "leave it out" },
};

/* Formats that can contain text, but not token ids. */
static const struct {
    const char *magic;
    size_t n;
    const char *what;
} packed[] = {
    { "\x1f\x8b", 2, "compressed (gzip)" },
    { "\x28\xb5\x2f\xfd", 4, "compressed (zstd)" },
    { "BZh", 3, "compressed (bzip2)" },
    { "\xfd"
      "7zXZ",
      5, "compressed (xz)" },
    { "\x04\x22\x4d\x18", 4, "compressed (lz4)" },
    { "LZIP", 4, "compressed (lzip)" },
    { "PK\3\4", 4, "a ZIP archive or a PyTorch checkpoint" },
    { "7z\xbc\xaf", 4, "a 7z archive" },
    { "Rar!", 4, "a RAR archive" },
};

static bool is_space(char c)
{
    return c && strchr(" \t\r\n\f\v", c);
}

static bool ends(const char *s, size_t n, const char *tail)
{
    size_t t = strlen(tail);
    return n >= t && memcmp(s + n - t, tail, t) == 0;
}

/* Length of the name without the suffix of a compressor. */
static size_t plain_length(const char *name)
{
    static const char *const suffix[] = {
        ".zst", ".gz", ".xz", ".bz2", ".lz4", ".lzma", ".lz", ".Z"
    };
    size_t n = strlen(name);
    for (size_t k = 0; k < sizeof suffix / sizeof *suffix; k++)
        if (ends(name, n, suffix[k]))
            return n - strlen(suffix[k]);
    return n;
}

/* '[' and then an object: JSON, but not a line of it each. */
static bool is_array(const char *p, size_t n)
{
    size_t i = 0;
    while (i < n && is_space(p[i]))
        i++;
    if (i >= n || p[i++] != '[')
        return false;
    while (i < n && is_space(p[i]))
        i++;
    return i < n && p[i] == '{';
}

/* Only UTF-16 and UTF-32 text contains zero bytes. */
static lm_code refuse_zeros(const char *name, const char *p, size_t n, lm_err *e)
{
    size_t zeros[2] = { 0 };
    for (size_t i = 0; i < n; i++)
        zeros[i % 2] += p[i] == 0;
    size_t more = zeros[0] > zeros[1] ? zeros[0] : zeros[1];
    if (!more)
        return LM_OK;
    if (zeros[0] * zeros[1] == 0 && more * 4 >= n)
        return lm_fail(e, LM_EFORMAT, name, "convert it with iconv -t UTF-8",
                       "it is UTF-16, not UTF-8");
    return lm_fail(e, LM_EFORMAT, name, "leave it out, or have it read as text",
                   "it is not text: it holds zero bytes");
}

/* A header of up to 16 MiB. */
static bool is_safetensors(const char *p, size_t n)
{
    return n > 10 && p[8] == '{' && !memcmp(p + 3, "\0\0\0\0\0", 5);
}

const char *lm_input_known_format(const char *p, size_t n)
{
    for (size_t k = 0; k < sizeof others / sizeof *others; k++)
        if (n >= others[k].n && memcmp(p, others[k].magic, others[k].n) == 0)
            return others[k].what;
    for (size_t k = 0; k < sizeof packed / sizeof *packed; k++)
        if (n >= packed[k].n && memcmp(p, packed[k].magic, packed[k].n) == 0)
            return packed[k].what;
    return is_safetensors(p, n) ? "safetensors" : NULL;
}

static lm_code refuse_others(const char *name, const char *p, size_t n, lm_err *e)
{
    for (size_t k = 0; k < sizeof others / sizeof *others; k++)
        if (n >= others[k].n && memcmp(p, others[k].magic, others[k].n) == 0)
            return lm_fail(e, LM_EFORMAT, name, others[k].cure, "it is %s, not text",
                           others[k].what);
    if (is_safetensors(p, n))
        return lm_fail(e, LM_EFORMAT, name, "leave it out", "it is safetensors, not text");
    if (is_array(p, n))
        return lm_fail(e, LM_EFORMAT, name, "convert it to lines: jq -c '.[]'",
                       "it is a JSON array, not a JSON object a line");
    return refuse_zeros(name, p, n, e);
}

/* JSONL named as text would be read as one document, with all its brackets. */
static lm_code refuse_records(const char *name, const char *p, size_t n, lm_err *e)
{
    size_t begin, end;
    const char *line = memchr(p, '\n', n);
    if (!line || lm_utf8_valid(p, (size_t)(line - p)) != (size_t)(line - p))
        return LM_OK;
    lm_jsonl_fault f = lm_jsonl_find(p, (size_t)(line - p), "text", &begin, &end);
    if (f.what && f.kind == LM_JSONL_MALFORMED)
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, name, "rename it, or have it read as JSONL or as text",
                   "its name is that of text, but its lines are JSON");
}

lm_code lm_input_recognise(lm_input_kind asked, const char *name, const char *p, size_t n,
                           bool *jsonl, lm_err *e)
{
    size_t len = plain_length(name), i = 0;
    n = n < LOOK ? n : LOOK;
    *jsonl = asked == LM_INPUT_JSONL;
    if (asked == LM_INPUT_TEXT)
        return LM_OK;
    lm_code rc = refuse_others(name, p, n, e);
    if (rc || *jsonl)
        return rc;
    while (i < n && is_space(p[i]))
        i++;
    *jsonl = i < n && p[i] == '{';
    if (ends(name, len, ".txt") || ends(name, len, ".text"))
        rc = refuse_records(name, p, n, e);
    else if (ends(name, len, ".csv") || ends(name, len, ".tsv"))
        rc = lm_fail(e, LM_EFORMAT, name, "write it as JSONL, or have it read as text",
                     "it is a table, not text");
    else
        *jsonl |= ends(name, len, ".jsonl") || ends(name, len, ".ndjson");
    if (ends(name, len, ".txt") || ends(name, len, ".text"))
        *jsonl = false;
    return rc;
}
