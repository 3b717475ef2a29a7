/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_write.c -- writes the files of a model: to a folder, to an archive, or a single file. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/archive.h"
#include "format/bundle_impl.h"
#include "format/folder.h"
#include "format/folder_run.h"
#include "format/lmz.h"
#include "format/safetensors_table.h"

struct lm_bundle_out {
    lm_bundle_kind kind;
    char *path;
    lm_bundle_opts o;
    lm_outdir *dir;
    lm_out *out; /* the only file of all other kinds */
    lm_tar *tar;
    lm_bundle_lmz_out lmz;
    int fd;        /* of the current file in a folder */
    char *where;   /* the current file, for messages */
    uint64_t left; /* of it */
    bool mute;     /* not written: to a lone .safetensors, or by a rank that has joined */
    bool packed;   /* its size does not determine that of the output */
    char **name;
    size_t n, cap;
};

static lm_bundle_kind kind_for(const char *path, const char **filter)
{
    struct stat st;

    if (lm_tar_name(path, filter) || !strcmp(path, "-"))
        return LM_BUNDLE_TAR;
    if (lm_text_ends(path, ".safetensors"))
        return LM_BUNDLE_FILE;
    if (lm_text_ends(path, ".lmz"))
        return LM_BUNDLE_LMZ;
    return !stat(path, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode) ? LM_BUNDLE_TAR
                                                                            : LM_BUNDLE_FOLDER;
}

static lm_code write_out(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    lm_bundle_out *b = ctx;
    return lm_write_all(lm_out_fd(b->out), data, bytes, b->path, e);
}

static lm_code open_one(lm_bundle_out *b, const char *path, bool force, const char *filter,
                        lm_err *e)
{
    lm_code rc = lm_out_open(path, force, &b->out, e);

    if (rc)
        b->out = NULL;
    else if (isatty(lm_out_fd(b->out)))
        return lm_fail(e, LM_EUSAGE, b->path, "pipe it into a tool or a file, or name one",
                       "a model cannot be written to a terminal");
    if (!rc && b->kind == LM_BUNDLE_TAR)
        rc = lm_tar_open(lm_out_fd(b->out), b->path, filter, b->o.level, &b->tar, e);
    if (!rc && b->kind == LM_BUNDLE_LMZ)
        rc = lm_bundle_lmz_create(&b->o, write_out, b, b->path, &b->lmz, e);
    return rc;
}

static bool own_model(const void *none, const char *name)
{
    (void)none;
    return lm_bundle_own(name);
}

/* Checked here because the message of lm_outdir_open about a run would only name one of its
 * links. */
static lm_code refuse_run(const char *path, lm_err *e)
{
    char *latest = NULL;
    lm_err none = { 0 };
    lm_code rc = LM_OK;

    if (lm_path_is_dir(path) && !lm_run_latest(path, &latest, &none) && latest)
        rc = lm_fail(e, LM_EUSAGE, path, "choose another folder",
                     "is the folder of a run, whose checkpoints (%s) would be lost", latest);
    lm_free(latest);
    return rc;
}

static lm_code open_folder(lm_bundle_out *b, const char *path, bool force, lm_err *e)
{
    lm_code rc = force ? refuse_run(path, e) : LM_OK;

    return rc ? rc
              : lm_outdir_open(path, force, b->o.own ? b->o.own : own_model, b->o.own_ctx, &b->dir,
                               e);
}

/* True for a rank that writes parts of files that another one has made. */
static bool has_joined(const lm_bundle_out *b)
{
    return b->kind == LM_BUNDLE_FOLDER && b->o.share && b->o.share->rank > 0;
}

lm_code lm_bundle_create(const char *path, bool force, const lm_bundle_opts *o, lm_bundle_out **out,
                         lm_err *e)
{
    lm_bundle_out *b = NULL;
    const char *filter = NULL;
    lm_code rc = lm_alloc_n(&b, 1, sizeof *b, "model", e);

    *out = NULL;
    if (rc)
        return rc;
    b->fd = -1;
    if (o)
        b->o = *o;
    if (lm_path_is_stdout(path))
        path = "-";
    b->kind = kind_for(path, &filter);
    b->packed = filter || b->kind == LM_BUNDLE_LMZ;
    rc = lm_strdup(&b->path, strcmp(path, "-") ? path : "standard output", e);
    b->mute = has_joined(b);
    if (!rc && b->kind != LM_BUNDLE_FOLDER)
        rc = open_one(b, path, force, filter, e);
    else if (!rc && !b->mute && (rc = open_folder(b, path, force, e)))
        b->dir = NULL;
    if (rc) {
        lm_bundle_drop(b);
        return rc;
    }
    *out = b;
    return LM_OK;
}

lm_bundle_kind lm_bundle_out_kind(const lm_bundle_out *b)
{
    return b->kind;
}

lm_code lm_bundle_room(const lm_bundle_out *b, uint64_t bytes, lm_err *e)
{
    struct statvfs fs;
    struct stat st;

    if (b->packed || has_joined(b) ||
        (b->out && (fstat(lm_out_fd(b->out), &st) || !S_ISREG(st.st_mode))) ||
        (b->out ? fstatvfs(lm_out_fd(b->out), &fs) : statvfs(lm_outdir_path(b->dir), &fs)))
        return LM_OK;
    return lm_st_check_room(&fs, bytes, b->path, e);
}

/* ---- Files ---- */

bool lm_bundle_has(const lm_bundle_out *b, const char *name)
{
    for (size_t i = 0; i < b->n; i++)
        if (!strcmp(b->name[i], name))
            return true;
    return false;
}

static lm_code check_name(lm_bundle_out *b, const char *name, lm_err *e)
{
    char show[LM_ST_SHOWN];
    lm_code rc;

    if (!lm_name_ok(name))
        return lm_fail(e, LM_EUSAGE, b->path, NULL,
                       "'%s' cannot be the name of a file in a model folder",
                       lm_st_show(name, show));
    if (lm_bundle_has(b, name))
        return lm_fail(e, LM_EUSAGE, b->path, NULL, "the file '%s' exists already",
                       lm_st_show(name, show));
    rc = lm_grow(&b->name, &b->cap, b->n + 1, sizeof *b->name, "list of files", e);
    if (!rc && !(rc = lm_strdup(&b->name[b->n], name, e)))
        b->n++;
    return rc;
}

static lm_code set_where(lm_bundle_out *b, const char *name, lm_err *e)
{
    lm_free(b->where);
    b->where = NULL;
    if (b->kind == LM_BUNDLE_FOLDER)
        return lm_path_join(&b->where, b->path, name, e);
    return b->kind == LM_BUNDLE_FILE ? lm_strdup(&b->where, b->path, e)
                                     : lm_asprintf(&b->where, e, "%s: %s", b->path, name);
}

/* Complete the last file; a file in a folder is closed (lm_outdir_commit syncs it). */
static lm_code end_file(lm_bundle_out *b, lm_err *e)
{
    lm_code rc = LM_OK;

    if (b->left)
        return lm_fail(e, LM_EBUG, b->where, NULL, "it is short of %" PRIu64 " byte%s", b->left,
                       lm_plural(b->left));
    if (b->fd >= 0 && close(b->fd))
        rc = lm_fail(e, LM_EIO, b->where, NULL, "cannot close");
    b->fd = -1;
    return rc;
}

static lm_code begin_in_folder(lm_bundle_out *b, const char *name, lm_err *e)
{
    char *path = NULL;
    lm_code rc = lm_path_join(&path, lm_outdir_path(b->dir), name, e);

    if (!rc && (b->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) < 0)
        rc = lm_fail(e, LM_EIO, b->where, NULL, "cannot create");
    lm_free(path);
    return rc;
}

/* A lone .safetensors holds one file of weights; other files are not written. */
static lm_code begin_alone(lm_bundle_out *b, const char *name, lm_err *e)
{
    b->mute = !lm_text_ends(name, ".safetensors");
    for (size_t i = 0; i + 1 < b->n && !b->mute; i++)
        if (lm_text_ends(b->name[i], ".safetensors"))
            return lm_fail(e, LM_EUSAGE, b->path, "write a folder or a tar",
                           "one file can hold only one file of tensors, not also %s", name);
    return LM_OK;
}

lm_code lm_bundle_begin(lm_bundle_out *b, const char *name, uint64_t bytes, lm_err *e)
{
    lm_code rc = end_file(b, e);

    if (!rc)
        rc = check_name(b, name, e);
    if (!rc)
        rc = set_where(b, name, e);
    if (!rc && b->kind == LM_BUNDLE_FOLDER)
        rc = has_joined(b) ? LM_OK : begin_in_folder(b, name, e);
    else if (!rc && b->kind == LM_BUNDLE_FILE)
        rc = begin_alone(b, name, e);
    else if (!rc && b->kind == LM_BUNDLE_LMZ)
        rc = lm_lmz_begin(b->lmz.w, name, bytes, e);
    else if (!rc)
        rc = lm_tar_member(b->tar, name, bytes, e);
    if (!rc)
        b->left = bytes;
    return rc;
}

lm_code lm_bundle_write(void *bundle_out, const void *data, size_t bytes, lm_err *e)
{
    lm_bundle_out *b = bundle_out;
    lm_code rc = LM_OK;

    if (bytes > b->left)
        return lm_fail(e, LM_EBUG, b->where ? b->where : b->path, NULL,
                       "%zu byte%s where %" PRIu64 " are expected", bytes, lm_plural(bytes),
                       b->left);
    if (b->mute)
        rc = LM_OK;
    else if (b->kind == LM_BUNDLE_FOLDER)
        rc = lm_write_all(b->fd, data, bytes, b->where, e);
    else if (b->kind == LM_BUNDLE_TAR)
        rc = lm_tar_write(b->tar, data, bytes, e);
    else if (b->kind == LM_BUNDLE_LMZ)
        rc = lm_lmz_write(b->lmz.w, data, bytes, e);
    else
        rc = write_out(b, data, bytes, e);
    if (!rc)
        b->left -= bytes;
    return rc;
}

lm_code lm_bundle_put(lm_bundle_out *b, const char *name, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = lm_bundle_begin(b, name, bytes, e);
    return rc ? rc : lm_bundle_write(b, data, bytes, e);
}

/* ---- Shared files ---- */

const char *lm_bundle_folder(const lm_bundle_out *b)
{
    if (b->kind != LM_BUNDLE_FOLDER)
        return NULL;
    return has_joined(b) ? b->o.share->folder : lm_outdir_path(b->dir);
}

lm_code lm_bundle_reserve(lm_bundle_out *b, const char *name, const lm_st_plan *plan, lm_err *e)
{
    char *path = NULL;
    lm_code rc = end_file(b, e);

    if (!rc)
        rc = check_name(b, name, e);
    if (!rc)
        rc = set_where(b, name, e);
    if (!rc && !has_joined(b) && !lm_path_join(&path, lm_bundle_folder(b), name, e))
        rc = lm_st_reserve(path, b->where, plan, e);
    lm_free(path);
    return rc ? rc : e->code;
}

static lm_code join(lm_bundle_out *b, const char *name, const lm_st_plan *plan, lm_st_writer **out,
                    lm_err *e)
{
    char *path = NULL;
    lm_code rc = end_file(b, e);

    if (!rc && !lm_bundle_has(b, name))
        rc = lm_fail(e, LM_EBUG, b->path, NULL, "%s is not reserved", name);
    if (!rc)
        rc = set_where(b, name, e);
    if (!rc)
        rc = lm_path_join(&path, lm_bundle_folder(b), name, e);
    if (!rc)
        rc = lm_st_join(path, b->where, plan, b->o.share, out, e);
    lm_free(path);
    return rc;
}

static lm_code sync_file(lm_bundle_out *b, const char *name, lm_err *e)
{
    char *path = NULL;
    lm_code rc = set_where(b, name, e);

    if (!rc)
        rc = lm_path_join(&path, lm_bundle_folder(b), name, e);
    int fd = rc ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (!rc && (fd < 0 || fsync(fd)))
        rc = lm_fail(e, LM_EIO, b->where, NULL, "cannot sync to disk");
    if (fd >= 0)
        close(fd);
    lm_free(path);
    return rc;
}

lm_code lm_bundle_sync(lm_bundle_out *b, lm_err *e)
{
    lm_code rc = end_file(b, e);

    for (size_t i = 0; !rc && i < b->n; i++)
        if (lm_text_ends(b->name[i], ".safetensors"))
            rc = sync_file(b, b->name[i], e);
    return rc;
}

lm_code lm_bundle_st_create(lm_bundle_out *b, const char *name, const lm_st_plan *plan,
                            lm_st_writer **out, lm_err *e)
{
    uint64_t bytes = 0;
    *out = NULL;
    if (b->o.share)
        return join(b, name, plan, out, e);
    lm_code rc = lm_st_plan_file_bytes(plan, &bytes, e);

    if (!rc)
        rc = lm_bundle_begin(b, name, bytes, e);
    return rc ? rc : lm_st_create_on(lm_bundle_write, b, b->where, plan, out, e);
}

/* ---- The end ---- */

static lm_code commit(lm_bundle_out *b, lm_err *e)
{
    lm_code rc = end_file(b, e);

    if (!rc && b->kind == LM_BUNDLE_FILE && !b->n)
        rc = lm_fail(e, LM_EBUG, b->path, NULL, "no tensors were written");
    if (!rc && b->tar) {
        lm_tar *tar = b->tar;
        b->tar = NULL;
        rc = lm_tar_close(tar, e);
    }
    if (!rc && b->lmz.w)
        rc = lm_bundle_lmz_commit(&b->lmz, e);
    if (!rc && b->out) {
        lm_out *out = b->out;
        b->out = NULL;
        rc = lm_out_commit(out, e);
    } else if (!rc && b->dir) {
        lm_outdir *dir = b->dir;
        b->dir = NULL;
        rc = lm_outdir_commit(dir, e);
    }
    return rc;
}

lm_code lm_bundle_commit(lm_bundle_out *b, lm_err *e)
{
    lm_code rc = commit(b, e);

    lm_bundle_drop(b);
    return rc;
}

void lm_bundle_drop(lm_bundle_out *b)
{
    if (!b)
        return;
    if (b->fd >= 0)
        close(b->fd);
    lm_tar_drop(b->tar);
    lm_bundle_lmz_drop(&b->lmz);
    if (b->out)
        lm_out_drop(b->out);
    if (b->dir)
        lm_outdir_drop(b->dir);
    lm_names_free(b->name, b->n);
    lm_free(b->where);
    lm_free(b->path);
    lm_free(b);
}
