/* SPDX-License-Identifier: Apache-2.0 */
/* file_open.c -- opens kv-cache(5) and checks everything that its header says. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/stream.h"
#include "base/text.h"
#include "format/provenance.h"
#include "format/safetensors_table.h"
#include "kv/file_impl.h"

static const char *meta(const lm_kv_file *f, const char *key)
{
    return f->st ? lm_st_meta(f->st, key) : lm_st_stream_meta(f->stream, key);
}

static const lm_st_tensor *find_tensor(const lm_kv_file *f, const char *name)
{
    return f->st ? lm_st_find(f->st, name) : lm_st_stream_find(f->stream, name);
}

static size_t count_tensors(const lm_kv_file *f)
{
    return f->st ? lm_st_count(f->st) : lm_st_stream_count(f->stream);
}

static const lm_st_tensor *tensor_at(const lm_kv_file *f, size_t i)
{
    return f->st ? lm_st_at(f->st, i) : lm_st_stream_at(f->stream, i);
}

/* ---- Metadata ---- */

static lm_code need(const lm_kv_file *f, const char *key, const char **value, lm_err *e)
{
    *value = meta(f, key);
    if (*value)
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, f->where, "write it again", "__metadata__ has no '%s'", key);
}

/* `key` must be one of the texts a, b and c; NULL: fewer. */
static lm_code need_word(const lm_kv_file *f, const char *key, const char *a, const char *b,
                         const char *c, lm_err *e)
{
    const char *value;
    char show[LM_ST_SHOWN];
    lm_code rc = need(f, key, &value, e);
    if (rc || !strcmp(value, a) || (b && !strcmp(value, b)) || (c && !strcmp(value, c)))
        return rc;
    return lm_fail(e, LM_EFORMAT, f->where, "write it again with this version",
                   "%s is '%s', this version reads %s%s%s%s%s", key, lm_st_show(value, show), a,
                   c   ? ", "
                   : b ? " and "
                       : "",
                   b ? b : "", c ? " and " : "", c ? c : "");
}

static lm_code need_count(const lm_kv_file *f, const char *key, int64_t *out, lm_err *e)
{
    const char *text;
    char *end = NULL, show[LM_ST_SHOWN];
    lm_code rc = need(f, key, &text, e);
    if (rc)
        return rc;
    bool digits = *text >= '1' && *text <= '9' && strlen(text) <= 10;
    *out = digits ? strtoll(text, &end, 10) : 0;
    if (digits && !*end)
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                   "%s is '%s', not a number from 1 on", key, lm_st_show(text, show));
}

/* The token that follows, if there is one. */
static lm_code read_next(lm_kv_file *f, lm_err *e)
{
    const char *text = meta(f, "next");
    char *end, show[LM_ST_SHOWN];
    if (!text)
        return LM_OK;
    bool digits = *text >= '0' && *text <= '9' && strlen(text) <= 10;
    int64_t id = digits ? strtoll(text, &end, 10) : 0;
    if (!digits || *end || id > INT32_MAX)
        return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                       "next is '%s', not an id", lm_st_show(text, show));
    f->about.has_next = true;
    f->about.next = (int32_t)id;
    return LM_OK;
}

static bool is_hex(const char *s, size_t digits)
{
    return strlen(s) == digits && strspn(s, "0123456789abcdef") == digits;
}

static lm_code need_list(lm_kv_file *f, const char *key, int64_t **out, lm_err *e)
{
    const char *text;
    json_t *list = NULL;
    lm_code rc = need(f, key, &text, e);
    rc = rc ? rc : lm_json_parse(text, strlen(text), f->where, &list, e);
    if (!rc && (!json_is_array(list) || json_array_size(list) != (size_t)f->about.layers))
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                     "%s is not a list of %lld numbers", key, (long long)f->about.layers);
    rc = rc ? rc : lm_alloc_n(out, (size_t)f->about.layers, sizeof **out, "layers of a cache", e);
    for (int64_t i = 0; i < f->about.layers && !rc; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        (*out)[i] = json_integer_value(v);
        if (!json_is_integer(v))
            rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                         "%s is not a list of %lld numbers", key, (long long)f->about.layers);
    }
    json_decref(list);
    return rc;
}

static lm_code read_hashes(lm_kv_file *f, lm_err *e)
{
    const char *text;
    lm_code rc = need(f, "xxh3", &text, e);
    rc = rc ? rc : lm_json_parse(text, strlen(text), f->where, &f->hashes, e);
    if (!rc && !json_is_object(f->hashes))
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                     "xxh3 is not a JSON object");
    return rc;
}

/* Each tensor has a checksum, and each checksum is of a tensor. */
static lm_code check_hashes(const lm_kv_file *f, lm_err *e)
{
    char show[LM_ST_SHOWN];
    lm_code rc = LM_OK;
    if (json_object_size(f->hashes) > count_tensors(f))
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                     "xxh3 has the checksum of a tensor that is not there");
    for (size_t i = 0; i < count_tensors(f) && !rc; i++) {
        const char *hex = json_string_value(json_object_get(f->hashes, tensor_at(f, i)->name));
        if (!hex || !is_hex(hex, 16))
            rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                         "xxh3 has no checksum of tensor '%s'",
                         lm_st_show(tensor_at(f, i)->name, show));
    }
    return rc;
}

static bool file_meta_at(const void *of, size_t i, const char **key, const char **value)
{
    const lm_kv_file *f = of;
    return f->st ? lm_st_meta_at(f->st, i, key, value)
                 : lm_st_stream_meta_at(f->stream, i, key, value);
}

static const lm_st_tensor *file_tensor_at(const void *of, size_t i)
{
    return tensor_at(of, i);
}

/* All that the header says, against its checksum; nothing else of it is read before. */
static lm_code check_header(const lm_kv_file *f, lm_err *e)
{
    const kv_header h = { f, file_meta_at, file_tensor_at, count_tensors(f) };
    const char *want;
    char hex[33];
    lm_code rc = need(f, KV_HEADER_KEY, &want, e);
    rc = rc ? rc : kv_header_digest(&h, hex, e);
    if (rc || !strcmp(hex, want))
        return rc;
    return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                   "the checksum of its header is wrong");
}

/* With which policy tokens were dropped; its text is kept beside the forms. */
static lm_code read_policy(lm_kv_file *f, lm_err *e)
{
    const char *text = meta(f, "policy"), *spec = NULL;
    json_t *o = NULL;
    char *own = NULL;
    if (!text)
        return LM_OK;
    lm_code rc = lm_json_parse(text, strlen(text), f->where, &o, e);
    if (!rc && (!json_is_object(o) || !f->rows))
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                     "policy is not an object beside rows");
    rc = rc ? rc : lm_json_str_or(o, "spec", NULL, &spec, f->where, e);
    rc = rc ? rc : lm_json_i64(o, "prompt", 1, f->about.tokens, &f->about.prompt, f->where, e);
    if (!rc && !spec)
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again", "policy has no spec");
    if (!rc && !f->arena)
        rc = lm_arena_new(&f->arena, 1 << 12, e);
    rc = rc ? rc : lm_arena_strdup(f->arena, &own, spec, strlen(spec), e);
    f->about.policy = own;
    json_decref(o);
    return rc;
}

/* Each part has a tensor at least, besides ids and positions: before its form is read. */
static lm_code check_count(const lm_kv_file *f, lm_err *e)
{
    int64_t least = kv_parts(&f->about) + 2;
    if ((int64_t)count_tensors(f) >= least)
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                   "it has %zu tensor%s, %lld layers have %lld or more", count_tensors(f),
                   lm_plural(count_tensors(f)), (long long)f->about.layers, (long long)least);
}

/* What is stored: the rows of layers, and their forms. */
static lm_code read_form_of(lm_kv_file *f, lm_err *e)
{
    lm_kv_about *a = &f->about;
    const char *text = NULL;
    bool coded = !strcmp(meta(f, "coding"), "coded"), pre_rope = false;
    bool chunks = !strcmp(meta(f, "coding"), "cachegen");
    if (chunks && (a->latent || a->state))
        return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                       "a cache in chunks has latents or states");
    if (meta(f, "rows") && chunks)
        return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                       "a cache in chunks has all its tokens");
    if (meta(f, "rows") && need_list(f, "rows", &f->rows, e))
        return e->code;
    a->rows = f->rows;
    if (read_policy(f, e))
        return e->code;
    if (coded && (need(f, "forms", &text, e) || check_count(f, e) || kv_forms_read(f, text, e)))
        return e->code;
    for (int64_t i = 0; i < kv_parts(a) && a->form; i++)
        pre_rope = pre_rope || a->form[i].pre_rope;
    if (pre_rope != !strcmp(meta(f, "k_state"), "pre_rope"))
        return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                       "k_state and forms differ");
    return LM_OK;
}

static lm_code read_meta(lm_kv_file *f, lm_err *e)
{
    lm_kv_about *a = &f->about;
    const char *act = NULL, *format = meta(f, "format");
    if (!format || strcmp(format, "kv-cache"))
        return lm_fail(e, LM_EFORMAT, f->where, "give a saved cache",
                       "it is not a cache: __metadata__ lacks format 'kv-cache'");
    lm_code rc = need_word(f, "version", "1", NULL, NULL, e);
    rc = rc ? rc : check_header(f, e);
    rc = rc ? rc : need_word(f, "coding", "plain", "coded", "cachegen", e);
    rc = rc ? rc : need_word(f, "k_state", "post_rope", "pre_rope", NULL, e);
    rc = rc ? rc : read_hashes(f, e);
    rc = rc ? rc : need(f, "model_type", &a->model_type, e);
    rc = rc ? rc : need(f, "weights", &a->weights, e);
    rc = rc ? rc : need(f, "config", &a->config, e);
    rc = rc ? rc : need(f, "rope", &a->rope, e);
    rc = rc ? rc : need(f, "act", &act, e);
    rc = rc ? rc : need_count(f, "layers", &a->layers, e);
    rc = rc ? rc : need_count(f, "tokens", &a->tokens, e);
    rc = rc ? rc : read_next(f, e);
    if (!rc && !(is_hex(a->weights, 32) && is_hex(a->config, 32)))
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                     "%s is not a digest of 32 hexadecimal digits",
                     is_hex(a->weights, 32) ? "config" : "weights");
    if (!rc && a->layers > LM_KV_FILE_LAYERS)
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again",
                     "%lld layers, %d are possible", (long long)a->layers, LM_KV_FILE_LAYERS);
    rc = rc ? rc : need_list(f, "kv_heads", &f->kv_heads, e);
    rc = rc ? rc : need_list(f, "head_dim", &f->head_dim, e);
    rc = rc || !meta(f, "latent") ? rc : need_list(f, "latent", &f->latent, e);
    rc = rc || !meta(f, "state") ? rc : need_list(f, "state", &f->state, e);
    rc = rc || !meta(f, "conv") ? rc : need_list(f, "conv", &f->conv, e);
    if (rc)
        return rc;
    a->kv_heads = f->kv_heads, a->head_dim = f->head_dim;
    a->latent = f->latent, a->state = f->state, a->conv = f->conv;
    a->act = lm_dtype_parse(act);
    a->history = meta(f, LM_HISTORY_KEY);
    if (kv_check_about(a, f->where, LM_EFORMAT, e) || read_form_of(f, e))
        return e->code;
    return kv_check_about(a, f->where, LM_EFORMAT, e);
}

/* ---- Tensors ---- */

static bool shape_is(const lm_st_tensor *t, lm_dtype d, int ndim, const int64_t *dim)
{
    bool same = t->dtype == d && t->ndim == ndim;
    for (int i = 0; i < ndim && same; i++)
        same = t->dim[i] == dim[i];
    return same;
}

/* No more bytes than tables, or a chunk, can have: bounds what a reader allocates. */
static bool size_possible(const lm_kv_file *f, const kv_tensor *what, const lm_st_tensor *t)
{
    const lm_kv_about *a = &f->about;
    uint64_t most = 4;
    for (int64_t i = 0; i < kv_parts(a); i++) {
        uint64_t channels = (uint64_t)(a->kv_heads[i / 2] * lm_kv_about_dim(a, i));
        /* a table is 2 + 3 * 255 bytes or less, a channel has a mean and two of them */
        most += what->kind == KV_TABLES ? 4 + 12 + channels * (5 + 2 * 767)
                                        : 4 + (uint64_t)LM_CACHEGEN_CHUNK * (2 + 2 * channels) + 32;
    }
    return t->dtype == LM_DTYPE_U8 && t->ndim == 1 && t->bytes <= most;
}

static bool is_chunked(const lm_kv_file *f)
{
    return !strcmp(meta(f, "coding"), "cachegen");
}

/* A section of a part.  Of outliers there may be fewer than possible. */
static bool section_possible(const lm_kv_file *f, const kv_tensor *what, const lm_st_tensor *t)
{
    const lm_kv_shape s = lm_kv_about_shape(&f->about, what->part);
    lm_kv_section_size z;
    if (lm_kv_section_size_of(&s, what->section, &z, NULL) || !z.bytes)
        return false;
    if (what->section == LM_KV_SP_INDEX || what->section == LM_KV_SP_VALUE)
        return t->dtype == z.dtype && t->ndim == 1 && t->dim[0] <= z.dim[0];
    return shape_is(t, z.dtype, z.ndim, z.dim);
}

static lm_code check_tensor(const lm_kv_file *f, const lm_st_tensor *t, lm_err *e)
{
    const lm_kv_about *a = &f->about;
    kv_tensor what = kv_tensor_of(t->name);
    int64_t layer = what.part / 2;
    char show[LM_ST_SHOWN];
    bool good = false, chunked = is_chunked(f);
    if (what.kind == KV_IDS || (what.kind == KV_POSITIONS && !a->rows))
        good = shape_is(t, LM_DTYPE_I32, 1, &a->tokens);
    else if ((what.kind == KV_AT && a->rows) || (what.kind == KV_ORDER && a->policy) ||
             (what.kind == KV_MASS && a->policy))
        good = layer < a->layers && shape_is(t, what.kind == KV_MASS ? LM_DTYPE_F32 : LM_DTYPE_I32,
                                             2, (int64_t[]){ a->kv_heads[layer], a->rows[layer] });
    else if (what.kind == KV_ROWS)
        good = !chunked && layer < a->layers && what.latent == (a->latent && a->latent[layer]) &&
               section_possible(f, &what, t);
    else if (what.kind == KV_STATE || what.kind == KV_CONV)
        good = layer < a->layers && kv_state_numbers(a, what.kind, layer) > 0 &&
               shape_is(t, what.kind == KV_STATE ? LM_DTYPE_F32 : a->act, 1,
                        (int64_t[]){ kv_state_numbers(a, what.kind, layer) });
    else if (what.kind == KV_TABLES || what.kind == KV_CHUNK)
        good = chunked && what.level < LM_CACHEGEN_LEVELS &&
               what.chunk < lm_cachegen_chunks(a->tokens) && size_possible(f, &what, t);
    if (good)
        return LM_OK;
    return lm_fail(
        e, LM_EFORMAT, f->where, "fetch or write it again",
        "tensor '%s' does not belong to a cache of %lld layers and %lld tokens, or has a "
        "wrong type or shape",
        lm_st_show(t->name, show), (long long)a->layers, (long long)a->tokens);
}

static lm_code need_tensor(const lm_kv_file *f, kv_tensor what, lm_err *e)
{
    char name[KV_NAME];
    kv_tensor_name(&what, name);
    if (find_tensor(f, name))
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again", "tensor '%s' is missing",
                   name);
}

/* Every section of all parts. */
static lm_code need_parts(const lm_kv_file *f, lm_err *e)
{
    const lm_kv_about *a = &f->about;
    lm_code rc = LM_OK;
    for (int64_t i = 0; i < kv_parts(a) * LM_KV_SECTIONS && !rc; i++) {
        const kv_tensor what =
            kv_section_of(a, i / LM_KV_SECTIONS, (lm_kv_section)(i % LM_KV_SECTIONS));
        const lm_kv_shape s = lm_kv_about_shape(a, what.part);
        lm_kv_section_size z;
        rc = lm_kv_section_size_of(&s, what.section, &z, e);
        if (!rc && z.bytes)
            rc = need_tensor(f, what, e);
    }
    for (int64_t i = 0; i < 2 * a->layers && !rc; i++) {
        const kv_tensor what = { .kind = i % 2 ? KV_CONV : KV_STATE, .part = i / 2 * 2 };
        if (kv_state_numbers(a, what.kind, i / 2))
            rc = need_tensor(f, what, e);
    }
    return rc;
}

static lm_code need_positions(const lm_kv_file *f, lm_err *e)
{
    lm_code rc = LM_OK;
    if (!f->about.rows)
        return need_tensor(f, (kv_tensor){ .kind = KV_POSITIONS }, e);
    for (int64_t i = 0; i < f->about.layers && !rc; i++)
        rc = need_tensor(f, (kv_tensor){ .kind = KV_AT, .part = 2 * i }, e);
    for (int64_t i = 0; i < f->about.layers && !rc && f->about.ordered; i++)
        rc = need_tensor(f, (kv_tensor){ .kind = KV_ORDER, .part = 2 * i }, e);
    for (int64_t i = 0; i < f->about.layers && !rc && f->about.weighed; i++)
        rc = need_tensor(f, (kv_tensor){ .kind = KV_MASS, .part = 2 * i }, e);
    return rc;
}

static lm_code check_tensors(lm_kv_file *f, lm_err *e)
{
    bool chunked = is_chunked(f);
    lm_code rc = LM_OK;
    for (size_t i = 0; i < count_tensors(f) && !rc; i++) {
        kv_tensor what = kv_tensor_of(tensor_at(f, i)->name);
        rc = check_tensor(f, tensor_at(f, i), e);
        if (!rc && (what.kind == KV_TABLES || what.kind == KV_CHUNK))
            f->levels |= 1u << what.level;
        f->about.ordered |= what.kind == KV_ORDER;
        f->about.weighed |= what.kind == KV_MASS;
    }
    rc = rc ? rc : need_tensor(f, (kv_tensor){ .kind = KV_IDS }, e);
    rc = rc ? rc : need_positions(f, e);
    if (!rc && !chunked)
        rc = need_parts(f, e);
    if (!rc && chunked && !f->levels)
        rc = lm_fail(e, LM_EFORMAT, f->where, "fetch or write it again", "it has no level");
    for (int l = 0; l < LM_CACHEGEN_LEVELS && !rc; l++) {
        if (!(f->levels >> l & 1))
            continue;
        rc = need_tensor(f, (kv_tensor){ .kind = KV_TABLES, .level = l }, e);
        for (int64_t c = 0; c < lm_cachegen_chunks(f->about.tokens) && !rc; c++)
            rc = need_tensor(f, (kv_tensor){ .kind = KV_CHUNK, .level = l, .chunk = c }, e);
    }
    return rc;
}

/* ---- Opening ---- */

static lm_code check_file(lm_kv_file *f, lm_err *e)
{
    lm_code rc = read_meta(f, e);
    rc = rc ? rc : check_hashes(f, e);
    return rc ? rc : check_tensors(f, e);
}

/* An lm_read_fn of a descriptor. */
static lm_code read_fd(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    const lm_kv_file *f = ctx;
    ssize_t n;
    do
        n = read(f->fd, dst, cap);
    while (n < 0 && errno == EINTR);
    *got = n > 0 ? (size_t)n : 0;
    return n < 0 ? lm_fail(e, LM_EIO, f->where, NULL, "cannot read") : LM_OK;
}

/* From a file, from `read`, or with neither from the descriptor `fd`, which it owns. */
static lm_code open_any(const char *path, int fd, lm_read_fn reader, void *ctx, const char *where,
                        lm_kv_file **out, lm_err *e)
{
    lm_kv_file *f = NULL;
    lm_code rc = lm_alloc_n(&f, 1, sizeof *f, "a cache", e);
    *out = NULL;
    if (rc) {
        if (fd >= 0)
            close(fd);
        return rc;
    }
    f->fd = fd;
    rc = lm_strdup(&f->where, where, e);
    if (!rc)
        rc = path ? lm_st_open(path, &f->st, e)
                  : lm_st_stream_open(reader ? reader : read_fd, reader ? ctx : f, where,
                                      &f->stream, e);
    rc = rc ? rc : check_file(f, e);
    if (rc)
        lm_kv_file_close(f);
    else
        *out = f;
    return rc;
}

lm_code lm_kv_file_open(const char *path, lm_kv_file **out, lm_err *e)
{
    return open_any(path, -1, NULL, NULL, path, out, e);
}

lm_code lm_kv_file_open_input(const char *path, lm_kv_file **out, lm_err *e)
{
    const char *where = lm_path_shown(path);
    *out = NULL;
    if (!lm_stream_is(path))
        return lm_kv_file_open(path, out, e);
    int fd = strcmp(path, "-") ? open(path, O_RDONLY | O_CLOEXEC)
                               : fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return lm_fail(e, LM_EIO, where, NULL, "cannot open");
    return open_any(NULL, fd, NULL, NULL, where, out, e);
}

lm_code lm_kv_file_open_on(lm_read_fn read, void *ctx, const char *where, lm_kv_file **out,
                           lm_err *e)
{
    return open_any(NULL, -1, read, ctx, where, out, e);
}

void lm_kv_file_close(lm_kv_file *f)
{
    if (!f)
        return;
    lm_st_close(f->st);
    lm_st_stream_close(f->stream);
    if (f->fd >= 0)
        close(f->fd);
    for (int l = 0; l < LM_CACHEGEN_LEVELS; l++) {
        for (int64_t i = 0; f->kept[l] && i <= lm_cachegen_chunks(f->about.tokens); i++)
            lm_free(f->kept[l][i].data);
        lm_free(f->kept[l]);
    }
    json_decref(f->hashes);
    lm_free(f->kv_heads);
    lm_free(f->head_dim);
    lm_free(f->latent);
    lm_free(f->state);
    lm_free(f->conv);
    lm_free(f->rows);
    lm_arena_free(f->arena);
    lm_free(f->where);
    lm_free(f);
}

const lm_kv_about *lm_kv_file_about(const lm_kv_file *f)
{
    return &f->about;
}

unsigned lm_kv_file_levels(const lm_kv_file *f)
{
    return f->levels;
}

kv_kept *kv_kept_of(const lm_kv_file *f, const kv_tensor *what)
{
    kv_kept *k = f->kept[what->level];
    return k && what->kind == KV_CHUNK ? &k[1 + what->chunk] : k;
}

uint64_t kv_tensor_bytes(const lm_kv_file *f, kv_tensor what)
{
    char name[KV_NAME];
    kv_tensor_name(&what, name);
    const lm_st_tensor *t = find_tensor(f, name);
    return t ? t->bytes : 0;
}

uint64_t lm_kv_file_chunk_bytes(const lm_kv_file *f, int64_t c, int level)
{
    return kv_tensor_bytes(f, (kv_tensor){ .kind = KV_CHUNK, .chunk = c, .level = level });
}

/* ---- The model ---- */

/* A cache of another model, from which nothing follows for this one. */
static lm_code other_model(const lm_kv_file *f, lm_err *e, const char *what, ...) LM_PRINTF(3, 4);
static lm_code other_model(const lm_kv_file *f, lm_err *e, const char *what, ...)
{
    char text[200];
    va_list ap;
    va_start(ap, what);
    vsnprintf(text, sizeof text, what, ap);
    va_end(ap);
    return lm_fail(e, LM_EFORMAT, f->where,
                   "give the model that wrote it, or compute the text again", "%s", text);
}

lm_code lm_kv_file_match(const lm_kv_file *f, const lm_kv_about *a, int64_t context, lm_err *e)
{
    const lm_kv_about *b = &f->about;
    char show[LM_ST_SHOWN];
    if (strcmp(a->model_type, b->model_type))
        return other_model(f, e, "it is the cache of a model of type '%s', not '%s'",
                           lm_st_show(b->model_type, show), a->model_type);
    bool same = a->layers == b->layers;
    for (int64_t i = 0; i < a->layers && same; i++)
        same = a->kv_heads[i] == b->kv_heads[i] && a->head_dim[i] == b->head_dim[i] &&
               lm_kv_about_dim(a, 2 * i + 1) == lm_kv_about_dim(b, 2 * i + 1) &&
               kv_state_numbers(a, KV_STATE, i) == kv_state_numbers(b, KV_STATE, i) &&
               kv_state_numbers(a, KV_CONV, i) == kv_state_numbers(b, KV_CONV, i);
    if (!same)
        return other_model(f, e, "it is the cache of another model: layers and heads differ");
    if (strcmp(a->weights, b->weights))
        return other_model(f, e, "it is the cache of another model: of weights %s, not %s",
                           b->weights, a->weights);
    if (strcmp(a->rope, b->rope))
        return lm_fail(e, LM_EFORMAT, f->where, "give the config.json of that model",
                       "its keys were rotated with other settings: %s, the model has %s",
                       lm_st_show(b->rope, show), a->rope);
    if (strcmp(a->config, b->config))
        return lm_fail(e, LM_EFORMAT, f->where, "give the config.json of that model",
                       "it was computed with other settings of norms, attention or scales");
    if (b->tokens > context)
        return lm_fail(e, LM_EFORMAT, f->where, "give a larger context",
                       "it has %lld tokens, the context %lld", (long long)b->tokens,
                       (long long)context);
    return LM_OK;
}
