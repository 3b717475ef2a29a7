/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_open.c -- finds, maps and checks the files of a token dataset. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/stream.h"
#include "base/text.h"
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
        return lm_fail(e, LM_EFORMAT, where, NULL, "index version %lld, supported is 1",
                       (long long)version);
    t->id_bytes = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].code == d[17]) {
            t->type = types[i].type;
            t->id_bytes = types[i].bytes;
        }
    if (!t->id_bytes)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "type code %d is not one of the integers (1 to 5, 8)", d[17]);
    return LM_OK;
}

/* Check lengths and offsets against each other and against the size of the .bin. */
static lm_code idx_sequences(lm_tokens *t, const uint8_t *lengths, uint64_t bin_size,
                             const char *where, lm_err *e)
{
    uint64_t at = 0;
    for (int64_t s = 0; s < t->sequences; s++) {
        int64_t n = lm_idx_i32(lengths, s), offset = lm_idx_i64(t->offsets, s);
        if (n < 0)
            return lm_fail(e, LM_EFORMAT, where, NULL, "sequence %lld has %lld id%s", (long long)s,
                           (long long)n, lm_plural(n));
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
                       "the index covers %s%llu byte%s of ids, the .bin has %llu",
                       at > bin_size ? "at least " : "", (unsigned long long)at, lm_plural(at),
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
        return lm_fail(
            e, LM_EFORMAT, where, "copy it again",
            "%zu bytes do not hold the %llu sequence%s and %llu document%s that it declares", size,
            (unsigned long long)s, lm_plural(s), (unsigned long long)(d1 - 1), lm_plural((d1 - 1)));
    t->sequences = (int64_t)s;
    t->docs = (int64_t)d1 - 1;
    t->offsets = data + LM_IDX_HEADER + 4 * s;
    t->doc_seqs = t->offsets + 8 * s;
    rc = idx_sequences(t, data + LM_IDX_HEADER, bin_size, where, e);
    return rc ? rc : idx_documents(t, where, e);
}

lm_code lm_tokens_add_part(lm_tokens *t, const char *path, lm_err *e)
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

/* Map and check base.bin + base.idx into t. */
static lm_code open_megatron(lm_tokens *t, const char *base, lm_err *e)
{
    lm_buf name = { 0 };
    lm_code rc = lm_buf_addf(&name, e, "%s.bin", base);
    if (!rc)
        rc = lm_tokens_add_part(t, name.data, e);
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

/* Map base.mask, if it is there: one byte for each id. */
static lm_code open_mask(lm_tokens *t, const char *base, lm_err *e)
{
    lm_buf name = { 0 };
    if (!lm_tokens_is_file(base, ".mask"))
        return LM_OK;
    lm_code rc = lm_buf_addf(&name, e, "%s.mask", base);
    if (!rc)
        rc = lm_map_open(name.data, &t->mask, e);
    if (!rc && t->mask.size != (uint64_t)t->count)
        rc = lm_fail(e, LM_EFORMAT, name.data, "copy it again with its .bin, or remove it",
                     "%llu loss mark%s for %lld id%s", (unsigned long long)t->mask.size,
                     lm_plural(t->mask.size), (long long)t->count, lm_plural((uint64_t)t->count));
    lm_buf_fini(&name);
    return rc;
}

/* ---- choosing the files ---- */

/* Compare with the count in meta.json: missing shards at the end are not detected otherwise. */
static lm_code check_meta(const lm_tokens *t, lm_err *e)
{
    const lm_tokens_meta *m = &t->meta;
    if (!m->there || m->tokens == t->count)
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, t->path,
                   "copy the whole folder again; remove meta.json if it is of other data",
                   "its files hold %lld id%s, meta.json beside them has %lld", (long long)t->count,
                   lm_plural(t->count), (long long)m->tokens);
}

/* The kind of base.*, from meta.json unless it is given. */
static lm_code find_kind(lm_tokens *t, lm_tokens_kind *kind, const char *base, bool names_idx,
                         lm_err *e)
{
    bool there = false;
    if (lm_tokens_meta_read(base, &t->meta, e) || lm_tokens_there(base, &there, e))
        return e->code;
    if (!there || (*kind != LM_TOKENS_AUTO && *kind != t->meta.kind))
        t->meta = (lm_tokens_meta){ .eos = -1 };
    if (t->meta.there) {
        *kind = t->meta.kind;
        t->eot = t->meta.eos >= 0 ? t->meta.eos : t->eot;
    } else if (names_idx || (*kind == LM_TOKENS_AUTO && lm_tokens_is_file(base, ".idx"))) {
        *kind = LM_TOKENS_MEGATRON;
    }
    if (t->meta.there && *kind == LM_TOKENS_MEGATRON && !lm_tokens_is_file(base, ".idx"))
        return lm_fail(e, LM_EFORMAT, t->path, "copy it again from where the .bin came from",
                       "%s.idx is missing: by meta.json it is a Megatron dataset",
                       lm_path_base(base));
    return LM_OK;
}

/* A folder is not a dataset; the message names those in it. */
static lm_code fail_folder(const char *path, lm_err *e)
{
    char *train = NULL, *val = NULL, todo[256] = "name a dataset in it, such as its 'train'";
    lm_code rc = lm_tokens_in_folder(path, &train, &val, e);

    if (!rc && (train || val))
        snprintf(todo, sizeof todo, "name its dataset '%.80s'%s%.80s%s",
                 lm_path_base(train ? train : val), train && val ? " or '" : "",
                 train && val ? lm_path_base(val) : "", train && val ? "'" : "");
    if (!rc)
        rc = lm_fail(e, LM_EUSAGE, path, todo, "it is a folder");
    lm_free(train);
    lm_free(val);
    return rc;
}

static lm_code open_any(lm_tokens *t, lm_tokens_kind kind, const char *path, lm_err *e)
{
    size_t n = strlen(path);
    bool names_idx = n > 4 && strcmp(path + n - 4, ".idx") == 0;
    bool names_bin = n > 4 && strcmp(path + n - 4, ".bin") == 0;
    char *base;
    if (lm_stream_is(path))
        return lm_fail(e, LM_EUSAGE, path, "name a dataset on a disk",
                       "token ids cannot be read from a stream");
    if (lm_path_is_dir(path) && !lm_tokens_is_file(path, ".bin"))
        return fail_folder(path, e);
    lm_code rc = lm_strdup(&base, path, e);
    if (rc)
        return rc;
    if (names_idx || names_bin)
        base[n - 4] = 0;
    rc = find_kind(t, &kind, base, names_idx, e);
    if (!rc)
        rc = kind == LM_TOKENS_MEGATRON ? open_megatron(t, base, e)
                                        : lm_tokens_open_flat(t, kind, path, base, e);
    if (!rc && kind == LM_TOKENS_MEGATRON)
        rc = open_mask(t, base, e);
    lm_free(base);
    return rc ? rc : check_meta(t, e);
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
    if (t->mask.data)
        lm_map_close(&t->mask);
    lm_free(t->parts);
    lm_free(t->starts);
    lm_free(t->path);
    lm_free(t);
}
