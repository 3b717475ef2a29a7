/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_open.c -- finding, mapping and checking the files of a token dataset. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/mem.h"
#include "format/tokens_layout.h"

/* ---- Megatron ---- */

static lm_code idx_header(lm_tokens *t, const uint8_t *d, size_t size, const char *where, lm_err *e)
{
    static const struct {
        uint8_t code;
        lm_id_type type;
        int bytes;
    } types[] = { { 1, LM_ID_TYPE_U8, 1 },  { 2, LM_ID_TYPE_I8, 1 },  { 3, LM_ID_TYPE_I16, 2 },
                  { 4, LM_ID_TYPE_I32, 4 }, { 5, LM_ID_TYPE_I64, 8 }, { 8, LM_ID_TYPE_U16, 2 } };
    if (size < LM_IDX_HEADER || memcmp(d, LM_IDX_MAGIC, 9) != 0)
        return lm_fail(e, LM_EFORMAT, where, "shard the text again",
                       "not a Megatron index: it does not begin with MMIDIDX");
    int64_t version = lm_idx_i64(d + 9, 0);
    if (version != 1)
        return lm_fail(e, LM_EFORMAT, where, NULL, "index version %lld, known is 1",
                       (long long)version);
    t->id_bytes = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].code == d[17]) {
            t->type = types[i].type;
            t->id_bytes = types[i].bytes;
        }
    if (!t->id_bytes)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "type code %d is none of the integers (1 to 5, 8)", d[17]);
    return LM_OK;
}

/* Lengths and offsets against each other and against the size of the .bin. */
static lm_code idx_sequences(lm_tokens *t, const uint8_t *lengths, uint64_t bin_size,
                             const char *where, lm_err *e)
{
    uint64_t at = 0;
    for (int64_t s = 0; s < t->sequences; s++) {
        int64_t n = lm_idx_i32(lengths, s), offset = lm_idx_i64(t->offsets, s);
        if (n < 0)
            return lm_fail(e, LM_EFORMAT, where, NULL, "sequence %lld has %lld ids", (long long)s,
                           (long long)n);
        if (offset < 0 || (uint64_t)offset != at)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "sequence %lld begins at byte %lld, expected %llu", (long long)s,
                           (long long)offset, (unsigned long long)at);
        at += (uint64_t)n * (uint64_t)t->id_bytes; /* below 2^31 * 2^3 * 2^58: no overflow below */
        if (at > bin_size)
            break;
    }
    if (at != bin_size)
        return lm_fail(e, LM_EFORMAT, where, "copy both files again: they do not belong together",
                       "the index covers %s%llu bytes of ids, the .bin has %llu",
                       at > bin_size ? "at least " : "", (unsigned long long)at,
                       (unsigned long long)bin_size);
    t->count = (int64_t)(bin_size / (uint64_t)t->id_bytes);
    return LM_OK;
}

static lm_code idx_documents(lm_tokens *t, const char *where, lm_err *e)
{
    int64_t before = 0;
    if (lm_idx_i64(t->doc_seqs, 0) != 0 || lm_idx_i64(t->doc_seqs, t->docs) != t->sequences)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "documents run from sequence %lld to %lld, expected 0 to %lld",
                       (long long)lm_idx_i64(t->doc_seqs, 0),
                       (long long)lm_idx_i64(t->doc_seqs, t->docs), (long long)t->sequences);
    for (int64_t d = 0; d <= t->docs; d++) {
        int64_t s = lm_idx_i64(t->doc_seqs, d);
        if (s < before || s > t->sequences)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "document %lld begins at sequence %lld, expected %lld to %lld",
                           (long long)d, (long long)s, (long long)before, (long long)t->sequences);
        before = s;
    }
    return LM_OK;
}

lm_code lm_tokens_parse_idx(lm_tokens *t, const uint8_t *data, size_t size, uint64_t bin_size,
                            const char *where, lm_err *e)
{
    lm_code rc = idx_header(t, data, size, where, e);
    if (rc)
        return rc;
    uint64_t s = (uint64_t)lm_idx_i64(data + 18, 0), d1 = (uint64_t)lm_idx_i64(data + 26, 0);
    uint64_t body = size - LM_IDX_HEADER;
    if (s > body / 12 || d1 < 1 || d1 > body / 8 ||
        (12 * s + 8 * d1 != body && 13 * s + 8 * d1 != body))
        return lm_fail(e, LM_EFORMAT, where, "copy it again",
                       "%zu bytes do not hold the %llu sequences and %llu documents announced",
                       size, (unsigned long long)s, (unsigned long long)(d1 - 1));
    t->sequences = (int64_t)s;
    t->docs = (int64_t)d1 - 1;
    t->offsets = data + LM_IDX_HEADER + 4 * s;
    t->doc_seqs = t->offsets + 8 * s;
    rc = idx_sequences(t, data + LM_IDX_HEADER, bin_size, where, e);
    return rc ? rc : idx_documents(t, where, e);
}

static lm_code add_part(lm_tokens *t, const char *path, lm_err *e)
{
    lm_code rc = lm_grow(&t->parts, &t->cap_parts, t->n_parts + 1, sizeof *t->parts, "a shard", e);
    if (rc)
        return rc;
    lm_tokens_part *p = &t->parts[t->n_parts];
    *p = (lm_tokens_part){ .start = t->count };
    rc = lm_map_open(path, &p->map, e);
    t->n_parts += !rc;
    return rc;
}

lm_code lm_tokens_open_megatron(lm_tokens *t, const char *base, lm_err *e)
{
    lm_buf name = { 0 };
    lm_code rc = lm_buf_addf(&name, e, "%s.bin", base);
    if (!rc)
        rc = add_part(t, name.data, e);
    name.len = 0;
    if (!rc)
        rc = lm_buf_addf(&name, e, "%s.idx", base);
    if (!rc)
        rc = lm_map_open(name.data, &t->idx, e);
    if (!rc)
        rc = lm_tokens_parse_idx(t, t->idx.data, t->idx.size, t->parts[0].map.size, name.data, e);
    if (!rc) {
        t->kind = LM_TOKENS_MEGATRON;
        t->parts[0].ids = t->parts[0].map.data;
        t->parts[0].count = t->count;
    }
    lm_buf_fini(&name);
    return rc;
}

/* ---- llm.c and nanoGPT ---- */

static int32_t header_word(const lm_map *m, int i)
{
    return m->size >= LM_LLMC_HEADER ? lm_idx_i32(m->data, i) : 0;
}

static lm_code check_llmc(lm_tokens *t, lm_tokens_part *p, const char *path, lm_err *e)
{
    int32_t magic = header_word(&p->map, 0), version = header_word(&p->map, 1);
    int32_t known = magic == LM_LLMC_GPT2 ? LM_LLMC_GPT2_VERSION : LM_LLMC_LLAMA3_VERSION;
    if (magic != LM_LLMC_GPT2 && magic != LM_LLMC_LLAMA3)
        return lm_fail(e, LM_EFORMAT, path, NULL,
                       "not an llm.c shard: magic number %d, expected %d or %d", magic,
                       LM_LLMC_GPT2, LM_LLMC_LLAMA3);
    if (version != known)
        return lm_fail(e, LM_EFORMAT, path, NULL, "llm.c shard version %d, known is %d", version,
                       known);
    lm_id_type type = magic == LM_LLMC_GPT2 ? LM_ID_TYPE_U16 : LM_ID_TYPE_U32;
    if (t->n_parts > 1 && type != t->type)
        return lm_fail(e, LM_EFORMAT, path, "keep both kinds apart",
                       "this shard has another id type than the one before it");
    t->type = type;
    t->id_bytes = type == LM_ID_TYPE_U16 ? 2 : 4;
    int64_t n = header_word(&p->map, 2);
    uint64_t want = (uint64_t)(n < 0 ? 0 : n) * (uint64_t)t->id_bytes + LM_LLMC_HEADER;
    if (n < 0 || want != p->map.size)
        return lm_fail(e, LM_EFORMAT, path, "fetch or make it again",
                       "the header announces %lld ids (%llu bytes), the file has %zu bytes",
                       (long long)n, (unsigned long long)want, p->map.size);
    p->ids = p->map.data + LM_LLMC_HEADER;
    p->count = n;
    if (t->eot < 0)
        t->eot = type == LM_ID_TYPE_U16 ? 50256 : 128000;
    return LM_OK;
}

static lm_code check_part(lm_tokens *t, lm_tokens_kind kind, const char *path, lm_err *e)
{
    lm_tokens_part *p = &t->parts[t->n_parts - 1];
    int32_t magic = header_word(&p->map, 0);
    lm_code rc = LM_OK;
    if (kind == LM_TOKENS_AUTO)
        kind =
            magic == LM_LLMC_GPT2 || magic == LM_LLMC_LLAMA3 ? LM_TOKENS_LLMC : LM_TOKENS_NANOGPT;
    if (t->n_parts > 1 && kind != t->kind)
        return lm_fail(e, LM_EFORMAT, path, "keep both kinds apart",
                       "this shard is %s, the one before it is %s", lm_tokens_kind_name(kind),
                       lm_tokens_kind_name(t->kind));
    t->kind = kind;
    if (kind == LM_TOKENS_LLMC) {
        rc = check_llmc(t, p, path, e);
    } else {
        if (p->map.size % 2)
            return lm_fail(e, LM_EFORMAT, path, "fetch or make it again",
                           "%zu bytes are no whole number of 16-bit ids", p->map.size);
        t->type = LM_ID_TYPE_U16;
        t->id_bytes = 2;
        p->ids = p->map.data;
        p->count = (int64_t)(p->map.size / 2);
    }
    t->count += p->count;
    return rc;
}

/* BASE_nnnnnn.bin, sorted by number; -1 if `name` is none of them. */
static int64_t shard_number(const char *name, const char *base)
{
    size_t n = strlen(base), len = strlen(name);
    if (len != n + 11 || memcmp(name, base, n) != 0 || name[n] != '_' ||
        strcmp(name + n + 7, ".bin") != 0)
        return -1;
    int64_t v = 0;
    for (size_t i = n + 1; i < n + 7; i++) {
        if (!isdigit((unsigned char)name[i]))
            return -1;
        v = v * 10 + name[i] - '0';
    }
    return v;
}

/* Open BASE_000000.bin (or _000001, where llm.c's own training shards begin) and on; a hole in the
 * numbers is a missing shard.  None found: *found stays false. */
static lm_code open_numbered(lm_tokens *t, lm_tokens_kind kind, const char *base, bool *found,
                             lm_err *e)
{
    const char *name = lm_path_base(base);
    lm_buf dir = { 0 }, full = { 0 };
    char **names = NULL;
    size_t n = 0;
    int64_t next = -1;
    lm_code rc =
        name == base ? lm_buf_addf(&dir, e, ".") : lm_buf_add(&dir, base, (size_t)(name - base), e);
    if (!rc && lm_path_is_dir(dir.data))
        rc = lm_dir_list(dir.data, &names, &n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        int64_t k = shard_number(names[i], name);
        if (k < 0)
            continue;
        if (next < 0 ? k > 1 : k != next) {
            rc = lm_fail(e, LM_EFORMAT, base, "fetch or make it again",
                         "shard %s_%06lld.bin is missing, %s is there", name,
                         (long long)(next < 0 ? 0 : next), names[i]);
            break;
        }
        next = k + 1;
        *found = true;
        full.len = 0;
        rc = lm_buf_addf(&full, e, "%s_%06lld.bin", base, (long long)k);
        if (!rc)
            rc = add_part(t, full.data, e);
        if (!rc)
            rc = check_part(t, kind, full.data, e);
    }
    lm_names_free(names, n);
    lm_buf_fini(&dir);
    lm_buf_fini(&full);
    return rc;
}

/* ---- which files are meant ---- */

/* Without memory of its own: "cannot tell" would be taken for another format. */
static bool is_file(const char *base, const char *suffix)
{
    char path[PATH_MAX]; /* a longer one no system call takes */
    struct stat st;
    int n = snprintf(path, sizeof path, "%s%s", base, suffix);
    return n >= 0 && n < PATH_MAX && stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
}

static lm_code open_flat(lm_tokens *t, lm_tokens_kind kind, const char *path, const char *base,
                         lm_err *e)
{
    lm_buf full = { 0 };
    bool found = false;
    lm_code rc = LM_OK;
    if (is_file(path, ""))
        rc = lm_buf_addf(&full, e, "%s", path);
    else if (is_file(base, ".bin"))
        rc = lm_buf_addf(&full, e, "%s.bin", base);
    if (!rc && full.len) {
        found = true;
        rc = add_part(t, full.data, e);
        if (!rc)
            rc = check_part(t, kind, full.data, e);
    } else if (!rc) {
        rc = open_numbered(t, kind, base, &found, e);
    }
    lm_buf_fini(&full);
    if (rc || found)
        return rc;
    errno = ENOENT;
    return lm_fail(e, LM_EIO, path, "make it with shard-data",
                   "no token dataset: neither %s.bin nor %s_000000.bin", lm_path_base(base),
                   lm_path_base(base));
}

static lm_code open_any(lm_tokens *t, lm_tokens_kind kind, const char *path, lm_err *e)
{
    size_t n = strlen(path);
    bool names_idx = n > 4 && strcmp(path + n - 4, ".idx") == 0;
    bool names_bin = n > 4 && strcmp(path + n - 4, ".bin") == 0;
    char *base;
    if (lm_path_is_dir(path) && !is_file(path, ".bin"))
        return lm_fail(e, LM_EUSAGE, path, "name a dataset in it, such as its 'train'",
                       "it is a folder");
    lm_code rc = lm_strdup(&base, path, e);
    if (rc)
        return rc;
    if (names_idx || names_bin)
        base[n - 4] = 0;
    if (kind == LM_TOKENS_MEGATRON || names_idx ||
        (kind == LM_TOKENS_AUTO && is_file(base, ".idx")))
        rc = lm_tokens_open_megatron(t, base, e);
    else
        rc = open_flat(t, kind, path, base, e);
    lm_free(base);
    return rc;
}

lm_code lm_tokens_open(const char *path, lm_tokens_kind kind, int64_t eot, lm_tokens **out,
                       lm_err *e)
{
    lm_tokens *t;
    lm_code rc = lm_alloc_n(&t, 1, sizeof *t, "a token dataset", e);
    if (rc)
        return rc;
    t->eot = eot;
    rc = lm_strdup(&t->path, path, e);
    if (!rc)
        rc = open_any(t, kind, path, e);
    if (rc) {
        lm_tokens_close(t);
        return rc;
    }
    *out = t;
    return LM_OK;
}

void lm_tokens_close(lm_tokens *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < t->n_parts; i++)
        lm_map_close(&t->parts[i].map);
    if (t->idx.data)
        lm_map_close(&t->idx);
    lm_free(t->parts);
    lm_free(t->starts);
    lm_free(t->path);
    lm_free(t);
}
