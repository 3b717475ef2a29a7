/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_write.c -- writing token datasets; see tokens.h.
 *
 * Memory stays small at any size: the lengths of the sequences are written directly to the .idx,
 * and read back once at the end to compute the offsets; one bit per sequence marks the ends of
 * documents. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/mem.h"
#include "format/tokens_layout.h"

enum { BLOCK = 4096, SHARDS_MAX = 900 }; /* shards stay open until all are complete */

struct lm_tokens_writer {
    lm_tokens_kind kind;
    lm_id_type type;
    int id_bytes;
    int64_t vocab, shard_tokens;
    bool force, finished;
    char *prefix;
    lm_out **bins; /* the shards; Megatron: one */
    size_t n_bins, cap_bins;
    int64_t in_shard;                          /* ids in the last one */
    lm_out *idx, *mask;                        /* mask NULL: no loss marks */
    int64_t total, sequences, docs, open_seqs; /* open_seqs: since the last lm_tokens_end_doc */
    uint8_t *ends;                             /* bit s: sequence s is the last of its document */
    size_t cap_ends;
};

static lm_code write_failed(lm_out *o, lm_err *e)
{
    return lm_fail_write(lm_out_path(o), e);
}

static lm_code put_bytes(lm_out *o, const void *p, size_t n, lm_err *e)
{
    return fwrite(p, 1, n, lm_out_file(o)) == n ? LM_OK : write_failed(o, e);
}

bool lm_tokens_own(const char *base, const char *name)
{
    size_t n = strlen(base);
    if (strncmp(name, base, n) != 0)
        return false;
    name += n;
    if (strcmp(name, ".bin") == 0 || strcmp(name, ".idx") == 0 || strcmp(name, ".mask") == 0)
        return true;
    return name[0] == '_' && strspn(name + 1, "0123456789") == 6 && strcmp(name + 7, ".bin") == 0;
}

/* Files of an earlier dataset of this name, in any format: a reader would mix them with the new
 * ones. Without force they are refused, with it removed.  In the order of names a .bin precedes its
 * .idx, and the first of several shards the others, so that the remaining files are never a
 * dataset. */
static lm_code clear_old(const char *prefix, bool force, lm_err *e)
{
    const char *base = lm_path_base(prefix);
    size_t dir_len = (size_t)(base - prefix), n = 0;
    char **names = NULL;
    lm_buf path = { 0 };
    lm_code rc = lm_buf_add(&path, dir_len ? prefix : ".", dir_len ? dir_len : 1, e);
    if (!rc && lm_path_is_dir(path.data))
        rc = lm_dir_list(path.data, &names, &n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        if (!lm_tokens_own(base, names[i]))
            continue;
        path.len = 0;
        rc = lm_buf_addf(&path, e, "%.*s%s", (int)dir_len, prefix, names[i]);
        if (rc)
            break;
        if (!force)
            rc = lm_fail(e, LM_EUSAGE, path.data, "allow replacing it", "exists already");
        else if (unlink(path.data))
            rc = lm_fail(e, LM_EIO, path.data, "remove it: it belongs to an older dataset",
                         "cannot remove");
    }
    lm_names_free(names, n);
    lm_buf_fini(&path);
    return rc;
}

static lm_code open_target(const char *prefix, const char *suffix, bool force, lm_out **out,
                           lm_err *e)
{
    lm_buf name = { 0 };
    lm_code rc = lm_buf_addf(&name, e, "%s%s", prefix, suffix);
    if (!rc)
        rc = lm_out_open(name.data, force, out, e);
    lm_buf_fini(&name);
    return rc;
}

/* Open the next .bin; close_shard fills in the header of llm.c. */
static lm_code open_shard(lm_tokens_writer *w, lm_err *e)
{
    static const char header[LM_LLMC_HEADER];
    char suffix[32] = ".bin";
    if (w->n_bins >= SHARDS_MAX)
        return lm_fail(e, LM_ELIMIT, w->prefix, "allow more ids in each",
                       "more than %d shards of %lld ids", SHARDS_MAX, (long long)w->shard_tokens);
    if (w->shard_tokens)
        snprintf(suffix, sizeof suffix, "_%06zu.bin", w->n_bins);
    lm_code rc = lm_grow(&w->bins, &w->cap_bins, w->n_bins + 1, sizeof *w->bins, "shards", e);
    if (!rc)
        rc = open_target(w->prefix, suffix, w->force, &w->bins[w->n_bins], e);
    if (rc)
        return rc;
    w->n_bins++;
    w->in_shard = 0;
    return w->kind == LM_TOKENS_LLMC ? put_bytes(w->bins[w->n_bins - 1], header, sizeof header, e)
                                     : LM_OK;
}

static lm_code close_shard(lm_tokens_writer *w, lm_err *e)
{
    lm_out *o = w->bins[w->n_bins - 1];
    if (fflush(lm_out_file(o)))
        return write_failed(o, e);
    if (w->kind != LM_TOKENS_LLMC)
        return LM_OK;
    bool small = w->type == LM_ID_TYPE_U16;
    int32_t h[3] = { small ? LM_LLMC_GPT2 : LM_LLMC_LLAMA3,
                     small ? LM_LLMC_GPT2_VERSION : LM_LLMC_LLAMA3_VERSION, (int32_t)w->in_shard };
    return pwrite(lm_out_fd(o), h, sizeof h, 0) == sizeof h ? LM_OK : write_failed(o, e);
}

static lm_code choose_type(lm_tokens_writer *w, lm_err *e)
{
    if (w->kind == LM_TOKENS_MEGATRON)
        w->type = w->vocab < LM_IDX_U16_BELOW ? LM_ID_TYPE_U16 : LM_ID_TYPE_I32;
    else
        w->type = w->vocab <= 65536 ? LM_ID_TYPE_U16 : LM_ID_TYPE_U32;
    w->id_bytes = w->type == LM_ID_TYPE_U16 ? 2 : 4;
    if (w->kind == LM_TOKENS_NANOGPT && w->vocab > 65536)
        return lm_fail(e, LM_EUSAGE, w->prefix, "write Megatron or llm.c shards",
                       "nanoGPT shards hold 16-bit ids, the vocabulary has %lld",
                       (long long)w->vocab);
    if (w->vocab < 1 || w->vocab > INT32_MAX)
        return lm_fail(e, LM_EUSAGE, w->prefix, NULL, "a vocabulary of %lld ids",
                       (long long)w->vocab);
    return LM_OK;
}

lm_code lm_tokens_clear(const char *prefix, bool force, lm_err *e)
{
    return clear_old(prefix, force, e);
}

lm_code lm_tokens_create(const char *prefix, const lm_tokens_writer_opts *o, lm_tokens_writer **out,
                         lm_err *e)
{
    static const char header[LM_IDX_HEADER];
    lm_tokens_writer *w;
    lm_code rc = lm_alloc_n(&w, 1, sizeof *w, "a token writer", e);
    if (rc)
        return rc;
    w->kind = o->kind == LM_TOKENS_AUTO ? LM_TOKENS_MEGATRON : o->kind;
    w->vocab = o->vocab;
    w->shard_tokens = w->kind == LM_TOKENS_MEGATRON ? 0 : o->shard_tokens;
    w->force = o->force;
    rc = lm_strdup(&w->prefix, prefix, e);
    if (!rc)
        rc = choose_type(w, e);
    if (!rc)
        rc = w->force ? LM_OK : clear_old(prefix, false, e);
    if (!rc)
        rc = open_shard(w, e);
    if (!rc && w->kind == LM_TOKENS_MEGATRON) {
        rc = open_target(prefix, ".idx", w->force, &w->idx, e);
        if (!rc)
            rc = put_bytes(w->idx, header, sizeof header, e);
    }
    if (!rc && o->mask)
        rc = w->idx ? open_target(prefix, ".mask", w->force, &w->mask, e)
                    : lm_fail(e, LM_EUSAGE, prefix, "write Megatron shards",
                              "%s shards have no loss marks", lm_tokens_kind_name(w->kind));
    if (rc) {
        lm_tokens_drop(w);
        return rc;
    }
    *out = w;
    return LM_OK;
}

/* Append ids to the current shard, checked and narrowed. */
static lm_code put_ids(lm_tokens_writer *w, const uint32_t *ids, int64_t n, lm_err *e)
{
    uint8_t buf[BLOCK * 4], marks[BLOCK];
    lm_code rc = LM_OK;
    for (int64_t at = 0; at < n && !rc; at += BLOCK) {
        int64_t k = n - at < BLOCK ? n - at : BLOCK;
        for (int64_t i = 0; i < k; i++) {
            uint32_t id = ids[at + i] & (w->mask ? LM_TOKENS_ID : UINT32_MAX);
            marks[i] = (uint8_t)(ids[at + i] >> 31);
            if ((int64_t)id >= w->vocab)
                return lm_fail(e, LM_EFORMAT, w->prefix,
                               "use the tokenizer that the ids were made with",
                               "id %u does not fit a vocabulary of %lld", id, (long long)w->vocab);
            if (w->id_bytes == 2) {
                uint16_t v = (uint16_t)id;
                memcpy(buf + 2 * i, &v, 2);
            } else {
                memcpy(buf + 4 * i, &id, 4);
            }
        }
        rc = put_bytes(w->bins[w->n_bins - 1], buf, (size_t)k * (size_t)w->id_bytes, e);
        if (!rc && w->mask)
            rc = put_bytes(w->mask, marks, (size_t)k, e);
    }
    w->in_shard += n;
    w->total += n;
    return rc;
}

/* llm.c and nanoGPT: a new shard begins at the size limit, also inside a document. */
static lm_code put_flat(lm_tokens_writer *w, const uint32_t *ids, int64_t n, lm_err *e)
{
    int64_t limit = w->kind == LM_TOKENS_LLMC ? INT32_MAX : INT64_MAX;
    bool cut = w->shard_tokens > 0 && w->shard_tokens < limit;
    limit = cut ? w->shard_tokens : limit;
    lm_code rc = LM_OK;
    while (n > 0 && !rc) {
        if (w->in_shard == limit) {
            if (!w->shard_tokens)
                return lm_fail(e, LM_ELIMIT, w->prefix, "set a number of ids for each shard",
                               "one llm.c shard holds at most %d ids", INT32_MAX);
            rc = close_shard(w, e);
            if (!rc)
                rc = open_shard(w, e);
            if (rc)
                break;
        }
        int64_t k = limit - w->in_shard < n ? limit - w->in_shard : n;
        rc = put_ids(w, ids, k, e);
        ids += k;
        n -= k;
    }
    return rc;
}

static lm_code put_sequence(lm_tokens_writer *w, const uint32_t *ids, int32_t n, lm_err *e)
{
    size_t cap = w->cap_ends, need = (size_t)w->sequences / 8 + 1;
    lm_code rc = lm_grow(&w->ends, &w->cap_ends, need, 1, "ends of documents", e);
    if (rc)
        return rc;
    if (w->cap_ends > cap)
        memset(w->ends + cap, 0, w->cap_ends - cap);
    rc = put_bytes(w->idx, &n, 4, e);
    if (!rc)
        rc = put_ids(w, ids, n, e);
    w->sequences++;
    w->open_seqs++;
    return rc;
}

lm_code lm_tokens_put(lm_tokens_writer *w, const uint32_t *ids, int64_t n, lm_err *e)
{
    lm_code rc = LM_OK;
    if (w->kind != LM_TOKENS_MEGATRON) {
        w->open_seqs++;
        return put_flat(w, ids, n, e);
    }
    do {
        int32_t k = n > INT32_MAX ? INT32_MAX : (int32_t)n;
        rc = put_sequence(w, ids, k, e);
        ids += k;
        n -= k;
    } while (n > 0 && !rc);
    return rc;
}

lm_code lm_tokens_end_doc(lm_tokens_writer *w, lm_err *e)
{
    lm_code rc = LM_OK;
    if (w->kind == LM_TOKENS_MEGATRON) {
        if (!w->open_seqs)
            rc = put_sequence(w, NULL, 0, e);
        if (!rc)
            w->ends[(w->sequences - 1) / 8] |= (uint8_t)(1u << ((w->sequences - 1) % 8));
    }
    w->open_seqs = 0;
    w->docs++;
    return rc;
}

int64_t lm_tokens_written(const lm_tokens_writer *w)
{
    return w->total;
}

int64_t lm_tokens_written_docs(const lm_tokens_writer *w)
{
    return w->docs;
}

/* Write the offsets behind the lengths, which are read back from the file. */
static lm_code put_offsets(lm_tokens_writer *w, lm_err *e)
{
    int32_t lengths[BLOCK];
    int64_t at = 0;
    for (int64_t s = 0; s < w->sequences; s += BLOCK) {
        size_t k = w->sequences - s < BLOCK ? (size_t)(w->sequences - s) : BLOCK;
        if (pread(lm_out_fd(w->idx), lengths, 4 * k, LM_IDX_HEADER + 4 * s) != (ssize_t)(4 * k))
            return lm_fail(e, LM_EIO, lm_out_path(w->idx), NULL, "cannot read back");
        for (size_t i = 0; i < k; i++) {
            lm_code rc = put_bytes(w->idx, &at, 8, e);
            if (rc)
                return rc;
            at += (int64_t)lengths[i] * w->id_bytes;
        }
    }
    return LM_OK;
}

static lm_code finish_idx(lm_tokens_writer *w, lm_err *e)
{
    uint8_t h[LM_IDX_HEADER] = LM_IDX_MAGIC;
    int64_t version = 1, first = 0, docs1 = w->docs + 1;
    if (fflush(lm_out_file(w->idx)))
        return write_failed(w->idx, e);
    lm_code rc = put_offsets(w, e);
    if (!rc)
        rc = put_bytes(w->idx, &first, 8, e);
    for (int64_t s = 0; s < w->sequences && !rc; s++) {
        int64_t next = s + 1;
        if (w->ends[s / 8] >> (s % 8) & 1)
            rc = put_bytes(w->idx, &next, 8, e);
    }
    if (rc)
        return rc;
    memcpy(h + 9, &version, 8);
    h[17] = w->type == LM_ID_TYPE_U16 ? 8 : 4;
    memcpy(h + 18, &w->sequences, 8);
    memcpy(h + 26, &docs1, 8);
    if (fflush(lm_out_file(w->idx)) || pwrite(lm_out_fd(w->idx), h, sizeof h, 0) != sizeof h)
        return write_failed(w->idx, e);
    return LM_OK;
}

lm_code lm_tokens_finish(lm_tokens_writer *w, lm_err *e)
{
    lm_code rc = LM_OK;
    if (w->finished)
        return LM_OK;
    if (w->open_seqs)
        rc = lm_tokens_end_doc(w, e);
    if (!rc)
        rc = close_shard(w, e);
    if (!rc && w->idx)
        rc = finish_idx(w, e);
    for (size_t i = 0; i < w->n_bins && !rc; i++)
        rc = lm_out_finish(w->bins[i], e);
    if (!rc && w->idx)
        rc = lm_out_finish(w->idx, e);
    if (!rc && w->mask)
        rc = lm_out_finish(w->mask, e);
    w->finished = !rc;
    return rc;
}

static lm_code publish(lm_out **o, lm_err *e)
{
    lm_out *out = *o;
    *o = NULL;
    return lm_out_commit(out, e);
}

/* The file without which a reader finds no dataset is renamed last: the .bin of Megatron, because
 * alone it could be read as ids of another format; the first of several shards. */
lm_code lm_tokens_commit(lm_tokens_writer *w, lm_err *e)
{
    lm_code rc = lm_tokens_finish(w, e);
    if (!rc && w->force)
        rc = clear_old(w->prefix, true, e);
    if (!rc && w->mask)
        rc = publish(&w->mask, e);
    if (!rc && w->idx)
        rc = publish(&w->idx, e);
    for (size_t i = w->n_bins; i-- > 0 && !rc;)
        rc = publish(&w->bins[i], e);
    lm_tokens_drop(w);
    return rc;
}

void lm_tokens_drop(lm_tokens_writer *w)
{
    if (!w)
        return;
    for (size_t i = 0; i < w->n_bins; i++)
        if (w->bins[i])
            lm_out_drop(w->bins[i]);
    if (w->idx)
        lm_out_drop(w->idx);
    if (w->mask)
        lm_out_drop(w->mask);
    lm_free(w->bins);
    lm_free(w->ends);
    lm_free(w->prefix);
    lm_free(w);
}
