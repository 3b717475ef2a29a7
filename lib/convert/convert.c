/* SPDX-License-Identifier: Apache-2.0 */
/* convert.c -- detects formats, and calls their readers and writers. */
#include "convert/convert.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "convert/convert_impl.h"
#include "format/safetensors_table.h"
#include "text/sentencepiece.h"
#include "text/tokenizer.h"

const char *const lm_model_formats[] = { "auto", "hf", "gguf", "llmc", "llama2c", NULL };

lm_model_format lm_model_format_of(const char *name)
{
    for (int i = 0; lm_model_formats[i]; i++)
        if (!strcmp(lm_model_formats[i], name))
            return (lm_model_format)i;
    return LM_FORMAT_AUTO;
}

/* ---- Small files ---- */

lm_code lm_import_put(lm_import *m, const char *name, lm_buf *data, lm_err *e)
{
    lm_code rc = lm_grow(&m->side, &m->cap_side, m->n_side + 1, sizeof *m->side, "small files", e);
    lm_side_file *f;

    if (rc)
        return rc;
    f = &m->side[m->n_side];
    memset(f, 0, sizeof *f);
    rc = lm_strdup(&f->name, name, e);
    if (!rc && !data->data)
        rc = lm_buf_add(data, "", 0, e);
    if (rc)
        return rc;
    f->data = *data;
    *data = (lm_buf){ 0 };
    m->n_side++;
    return LM_OK;
}

const lm_side_file *lm_import_side(const lm_import *m, const char *name)
{
    for (size_t i = 0; i < m->n_side; i++)
        if (!strcmp(m->side[i].name, name))
            return &m->side[i];
    return NULL;
}

/* Check that it is the JSON of a tokenizer of any kind: a folder may hold one that is not supported
 * here. */
static lm_code check_tokenizer(const lm_buf *text, const char *path, lm_err *e)
{
    json_t *tree = NULL;
    lm_code rc =
        lm_json_parse(text->len ? text->data : "", text->len, lm_path_shown(path), &tree, e);

    if (!rc && !json_is_object(json_object_get(tree, "model")))
        rc = lm_fail(e, LM_EFORMAT, lm_path_shown(path),
                     "name a tokenizer.json, a tokenizer.model, or a folder that holds one",
                     "is not a tokenizer: \"model\" is missing or not an object");
    json_decref(tree);
    return rc;
}

static lm_code put_file(lm_import *m, const char *name, const char *path, lm_err *e)
{
    lm_buf data = { 0 };
    lm_code rc = lm_file_read(path, LM_SIDE_MAX, &data, e);

    if (!rc && !strcmp(name, "tokenizer.json"))
        rc = check_tokenizer(&data, path, e);
    if (!rc)
        rc = lm_import_put(m, name, &data, e);
    lm_buf_fini(&data);
    return rc;
}

/* GPT-2's pair of files in a folder, BERT's or T5's file, as a tokenizer.json; *made false: it has none. */
static lm_code join_pair(const char *dir, lm_buf *json, bool *made, lm_err *e)
{
    static const char *const known[] = { "merges.txt", "vocab.txt", "spiece.model" };
    char *merges = NULL;
    lm_tokenizer *t = NULL;
    size_t len = 0;
    lm_code rc = LM_OK;

    *made = false;
    for (size_t i = 0; !rc && !*made && i < sizeof known / sizeof *known; i++) {
        rc = lm_path_join(&merges, dir, known[i], e);
        *made = !rc && lm_path_exists(merges);
        lm_free(merges);
        merges = NULL;
    }
    if (rc || !*made)
        return rc;
    rc = lm_tokenizer_load(dir, &t, e);
    if (!rc) {
        const char *text = lm_tokenizer_json(t, &len);
        rc = lm_buf_add(json, text, len, e);
    }
    lm_tokenizer_free(t);
    return rc;
}

lm_code lm_import_join(lm_import *m, const char *dir, lm_err *e)
{
    lm_buf json = { 0 };
    bool made = false;
    lm_code rc = LM_OK;

    if (!lm_import_side(m, "tokenizer.json"))
        rc = join_pair(dir, &json, &made, e);
    if (!rc && made && !(rc = lm_import_put(m, "tokenizer.json", &json, e)))
        m->side[m->n_side - 1].made = true;
    lm_buf_fini(&json);
    return rc;
}

/* A lone SentencePiece file becomes a tokenizer.json, which every reader accepts. */
static lm_code take_pieces(lm_import *m, const char *from, lm_err *e)
{
    lm_buf data = { 0 }, json = { 0 }, config = { 0 };
    lm_code rc = lm_file_read(from, LM_SIDE_MAX, &data, e);

    if (!rc)
        rc = lm_sentencepiece_json(data.data, data.len, from, &json, &config, e);
    if (!rc)
        rc = lm_import_put(m, "tokenizer.json", &json, e);
    if (!rc)
        rc = lm_import_put(m, "tokenizer_config.json", &config, e);
    lm_buf_fini(&data);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    return rc;
}

lm_code lm_import_tokenizer(lm_import *m, const char *from, lm_err *e)
{
    lm_code rc;

    if (!strcmp(from, "none"))
        return LM_OK;
    if (lm_strdup(&m->tokenizer, lm_path_shown(from), e))
        return e->code;
    if (!lm_path_is_dir(from) && lm_text_ends(from, ".bin"))
        return lm_import_tokenizer_bin(m, from, e);
    if (!lm_path_is_dir(from) && lm_text_ends(from, ".model"))
        return take_pieces(m, from, e);
    if (!lm_path_is_dir(from))
        return put_file(m, "tokenizer.json", from, e);
    rc = LM_OK;
    for (int i = 0; !rc && lm_tokenizer_files[i]; i++) {
        char *path = NULL;
        rc = lm_path_join(&path, from, lm_tokenizer_files[i], e);
        if (!rc && lm_path_exists(path))
            rc = put_file(m, lm_tokenizer_files[i], path, e);
        lm_free(path);
    }
    if (!rc)
        rc = lm_import_join(m, from, e);
    if (!rc && !lm_import_side(m, "tokenizer.json") && !lm_import_side(m, "tokenizer.model"))
        rc = lm_fail(e, LM_EUSAGE, from, NULL, "there is no tokenizer in this folder");
    return rc;
}

/* ---- Opening ---- */

enum { PEEK = 256, ENOUGH = 28 }; /* first bytes; so many identify every format */

/* The bytes of a pipe or socket that are there, without consuming them. */
static ssize_t peek_once(bool is_socket, uint8_t *head)
{
    int copy[2];

    if (is_socket)
        return recv(STDIN_FILENO, head, PEEK, MSG_PEEK | MSG_DONTWAIT);
    if (pipe2(copy, O_CLOEXEC))
        return -1;
    ssize_t got = tee(STDIN_FILENO, copy[1], PEEK, SPLICE_F_NONBLOCK);
    if (got > 0)
        got = read(copy[0], head, (size_t)got);
    close(copy[0]);
    close(copy[1]);
    return got;
}

/* The same as soon as they are enough, or the writer has ended. */
static ssize_t peek_pipe(bool is_socket, uint8_t *head)
{
    const short ended = POLLHUP | POLLRDHUP | POLLERR;
    struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN | POLLRDHUP };

    while (!lm_stopping()) {
        int ready = poll(&in, 1, 50);
        if (ready < 0 && errno != EINTR)
            break;
        if (ready <= 0)
            continue;
        ssize_t got = peek_once(is_socket, head);
        if (got <= 0 || got >= ENOUGH || in.revents & ended)
            return got;
        poll(NULL, 0, 2); /* more bytes do not change that the pipe is readable */
    }
    return 0;
}

/* The first bytes of standard input, without consuming them; *n = 0 if that is not possible. */
static lm_code peek_stdin(uint8_t *head, size_t *n, lm_err *e)
{
    struct stat st;
    ssize_t got = 0;

    *n = 0;
    if (fstat(STDIN_FILENO, &st))
        return lm_fail(e, LM_EIO, "standard input", NULL, "cannot be read");
    if (S_ISREG(st.st_mode)) {
        off_t at = lseek(STDIN_FILENO, 0, SEEK_CUR);
        got = at < 0 ? 0 : pread(STDIN_FILENO, head, PEEK, at);
    } else if (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode)) { /* ssh gives its commands sockets */
        got = peek_pipe(S_ISSOCK(st.st_mode), head);
    }
    *n = got > 0 ? (size_t)got : 0;
    return LM_OK;
}

/* Copy standard input to an unnamed file, and map it. */
static lm_code spool_stdin(const lm_bundle_opts *o, lm_map *map, lm_sink *sink, lm_err *e)
{
    const char *dir = o && o->tmpdir ? o->tmpdir : "/var/tmp";
    char name[64], buf[1 << 16];
    int fd = lm_file_unnamed(dir);
    lm_code rc = LM_OK;
    double bytes = 0;

    if (fd < 0)
        return lm_fail(e, LM_EIO, dir, "name another folder in LM_TMPDIR",
                       "cannot make a file to store standard input");
    while (!rc && !lm_stopping()) {
        ssize_t n = read(STDIN_FILENO, buf, sizeof buf);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = lm_fail(e, LM_EIO, "standard input", NULL, "cannot read");
        if (n <= 0)
            break;
        bytes += (double)n;
        rc = lm_write_all(fd, buf, (size_t)n, dir, e);
        lm_progress(sink, "standard input", bytes, 0, "bytes", NULL);
    }
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    if (!rc)
        rc = lm_map_open(name, map, e);
    close(fd);
    return rc;
}

static lm_model_format by_head(const uint8_t *head, size_t n, uint64_t size)
{
    if (n >= 4 && !memcmp(head, "GGUF", 4))
        return LM_FORMAT_GGUF;
    if (lm_is_llmc(head, n))
        return LM_FORMAT_LLMC;
    if (n >= 28 && lm_is_llama2c(head, size))
        return LM_FORMAT_LLAMA2C;
    return LM_FORMAT_HF;
}

/* If the content is not recognised, use the name: the reader of that format then reports the
 * damage. */
static lm_model_format by_name(const char *path, const uint8_t *head, size_t n)
{
    if (lm_text_ends(path, ".gguf"))
        return LM_FORMAT_GGUF;
    if (lm_text_ends(path, ".bin") && lm_has_llama2c_header(head, n))
        return LM_FORMAT_LLAMA2C;
    return LM_FORMAT_HF;
}

lm_code lm_model_format_tell(const char *path, lm_model_format *from, lm_err *e)
{
    uint8_t head[PEEK] = { 0 };
    size_t n = 0;
    struct stat st;
    lm_map map;
    lm_code rc;

    if (!strcmp(path, "-")) {
        rc = peek_stdin(head, &n, e);
        if (rc)
            return rc;
        *from = by_head(head, n, 0);
        return LM_OK;
    }
    *from = LM_FORMAT_HF;
    if (stat(path, &st) || !S_ISREG(st.st_mode))
        return LM_OK; /* a folder; its reader reports missing files */
    rc = lm_map_open(path, &map, e);
    if (rc)
        return rc;
    n = map.size < PEEK ? map.size : PEEK;
    memcpy(head, map.data, n);
    *from = by_head(head, n, map.size);
    if (*from == LM_FORMAT_HF)
        *from = by_name(path, head, n);
    lm_map_close(&map);
    return LM_OK;
}

static lm_code open_mapped(lm_import *m, const char *path, const lm_import_opts *o, lm_err *e)
{
    lm_map map = { 0 };
    lm_code rc =
        strcmp(path, "-") ? lm_map_open(path, &map, e) : spool_stdin(o->bundle, &map, o->sink, e);

    if (rc)
        return rc;
    if (m->format == LM_FORMAT_GGUF)
        rc = lm_import_gguf(m, &map, o, e);
    else if (m->format == LM_FORMAT_LLMC)
        rc = lm_import_llmc(m, &map, e);
    else
        rc = lm_import_llama2c(m, &map, e);
    if (!rc && o->tokenizer && m->format != LM_FORMAT_GGUF)
        rc = lm_import_tokenizer(m, o->tokenizer, e);
    if (!rc && strcmp(path, "-") && !o->no_digest)
        rc = lm_digest_path(path, &m->digest, e);
    return rc;
}

lm_code lm_import_open(const char *path, lm_model_format from, const lm_import_opts *o,
                       lm_import *m, lm_err *e)
{
    lm_code rc = lm_strdup(&m->path, lm_path_shown(path), e);

    m->par = o->par;
    m->sink = o->sink;
    if (!rc && from == LM_FORMAT_AUTO)
        rc = lm_model_format_tell(path, &from, e);
    m->format = from;
    if (!rc)
        rc = lm_st_plan_new(&m->plan, e);
    if (rc)
        return rc;
    return from == LM_FORMAT_HF ? lm_import_hf(m, path, o, e) : open_mapped(m, path, o, e);
}

void lm_import_close(lm_import *m)
{
    if (m->close)
        m->close(m);
    for (size_t i = 0; i < m->n_side; i++) {
        lm_free(m->side[i].name);
        lm_buf_fini(&m->side[i].data);
    }
    lm_free(m->side);
    lm_st_plan_free(m->plan);
    lm_config_fini(&m->config);
    json_decref(m->tree);
    lm_free(m->name);
    lm_free(m->tokenizer);
    lm_free(m->history);
    lm_free(m->seq_len);
    lm_free(m->path);
    memset(m, 0, sizeof *m);
}

/* ---- Tensors by their part in the model ---- */

bool lm_model_tensor_is(const lm_model_tensor *s, const char *name)
{
    return !strcmp(s->hf, name) || !strcmp(lm_arch_rootless(s->hf), name);
}

static lm_code check_wanted(const lm_import *m, const lm_model_tensor *s, const lm_st_tensor *t,
                            lm_err *e)
{
    bool fits = t->ndim == s->ndim;
    char have[LM_ST_SHAPE], want[LM_ST_SHAPE];

    for (int d = 0; fits && d < s->ndim; d++)
        fits = t->dim[d] == s->dim[d];
    if (!fits)
        return lm_fail(e, LM_EUSAGE, m->path, NULL,
                       "tensor '%s' has the shape [%s], the config requires [%s]", t->name,
                       lm_st_show_shape(t->ndim, t->dim, have),
                       lm_st_show_shape(s->ndim, s->dim, want));
    if (t->dtype != LM_DTYPE_F32 && t->dtype != LM_DTYPE_F16 && t->dtype != LM_DTYPE_BF16)
        return lm_fail(e, LM_EUSAGE, m->path, "convert it to F32, F16 or BF16 first",
                       "tensor '%s' is of type %s", t->name, t->dtype_name);
    return LM_OK;
}

static lm_code place(const lm_import *m, lm_match *s, size_t i, size_t *hint, lm_err *e)
{
    const lm_st_tensor *t = lm_st_plan_at(m->plan, i);
    char show[LM_ST_SHOWN], now[LM_TENSOR_NAME];
    const char *name = lm_arch_present_name(m->config.arch, t->name, now);

    for (size_t k = 0; k < s->n; k++) { /* usually the one behind the last one found */
        size_t at = (*hint + k) % s->n;
        if (!lm_model_tensor_is(&s->wanted[at], name))
            continue;
        if (s->from[at])
            return lm_fail(e, LM_EUSAGE, m->path, NULL, "tensor '%s' occurs twice", t->name);
        s->from[at] = t;
        s->wanted_of[i] = (int64_t)at;
        *hint = at + 1;
        return check_wanted(m, &s->wanted[at], t, e);
    }
    s->wanted_of[i] = lm_config_ties(&m->config, t->name) ? LM_TENSOR_TIED : LM_TENSOR_IGNORED;
    if (s->wanted_of[i] == LM_TENSOR_IGNORED && !lm_arch_is_buffer(m->config.arch, t->name) &&
        !lm_config_passes_over(&m->config, t->name))
        return lm_fail(e, LM_EUSAGE, m->path, NULL, "tensor '%s' is unknown to %s",
                       lm_st_show(t->name, show), lm_arch_name(m->config.arch));
    return LM_OK;
}

/* GGUF of some architectures has no head, nor have models from it. */
static bool is_needed(const lm_import *m, const lm_model_tensor *s)
{
    const lm_arch *a = m->config.arch;
    return !*a->gguf || lm_part_in_gguf(a, s->part);
}

lm_code lm_match_make(const lm_import *m, lm_match *s, lm_err *e)
{
    size_t n = lm_st_plan_count(m->plan), hint = 0;
    lm_code rc = lm_model_tensors_make(&m->config, &s->wanted, &s->n, e);

    if (!rc)
        rc = lm_alloc_n(&s->wanted_of, n, sizeof *s->wanted_of, "tensors of a model", e);
    if (!rc)
        rc = lm_alloc_n(&s->from, s->n, sizeof *s->from, "tensors of a model", e);
    for (size_t i = 0; !rc && i < n; i++)
        rc = place(m, s, i, &hint, e);
    for (size_t k = 0; !rc && k < s->n; k++)
        if (!s->from[k] && is_needed(m, &s->wanted[k]))
            rc = lm_fail(e, LM_EUSAGE, m->path, NULL, "tensor '%s' is missing", s->wanted[k].hf);
    return rc;
}

void lm_match_fini(lm_match *s)
{
    lm_free(s->wanted);
    lm_free(s->wanted_of);
    lm_free(s->from);
}

/* ---- Exporting ---- */

lm_model_format lm_export_format(const char *path, const lm_import *m)
{
    if (!strcmp(path, "-"))
        return m->format == LM_FORMAT_HF ? LM_FORMAT_GGUF : LM_FORMAT_HF;
    if (lm_text_ends(path, ".gguf"))
        return LM_FORMAT_GGUF;
    if (lm_text_ends(path, ".bin"))
        return m->config.arch == &lm_arch_gpt2 ? LM_FORMAT_LLMC : LM_FORMAT_LLAMA2C;
    return LM_FORMAT_HF;
}

lm_code lm_export(lm_import *m, const char *path, lm_model_format to, const lm_export_opts *o,
                  lm_err *e)
{
    switch (to == LM_FORMAT_AUTO ? lm_export_format(path, m) : to) {
    case LM_FORMAT_GGUF:
        return lm_export_gguf(m, path, o, e);
    case LM_FORMAT_LLMC:
        return lm_export_llmc(m, path, o, e);
    case LM_FORMAT_LLAMA2C:
        return lm_export_llama2c(m, path, o, e);
    default:
        return lm_export_hf(m, path, o, e);
    }
}

lm_code lm_export_history(const lm_import *m, const lm_export_opts *o, lm_buf *out, lm_err *e)
{
    return lm_history_add(m->history, o->step, out, e);
}

lm_code lm_export_open(const char *path, bool force, uint64_t bytes, lm_out **out, lm_err *e)
{
    struct statvfs fs;
    struct stat st;
    lm_code rc = lm_out_open(path, force, out, e);

    if (rc)
        return rc;
    if (!fstat(lm_out_fd(*out), &st) && S_ISREG(st.st_mode) && !fstatvfs(lm_out_fd(*out), &fs))
        rc = lm_st_check_room(&fs, bytes, lm_out_path(*out), e);
    if (rc) {
        lm_out_drop(*out);
        *out = NULL;
    }
    return rc;
}

lm_code lm_export_write(void *out, const void *data, size_t bytes, lm_err *e)
{
    return lm_write_all(lm_out_fd(out), data, bytes, lm_out_path(out), e);
}
