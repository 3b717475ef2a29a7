/* SPDX-License-Identifier: Apache-2.0 */
/* out.c -- output files that appear whole or not at all. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/temps.h"
#include "base/writer.h"

struct lm_out {
    lm_temp temp; /* path NULL: written in place */
    FILE *file;
    lm_writer *writer; /* of the stream */
    lm_writer own;
    int fd;
    bool borrowed; /* standard output stays open */
    bool failed;   /* not to be published */
    char *name;    /* as given */
};

static lm_code open_target(lm_out *o, const char *path, bool force, lm_err *e)
{
    struct stat st;
    lm_code rc;

    if (lm_path_is_stdout(path)) {
        o->borrowed = true;
        o->fd = STDOUT_FILENO;
        o->file = stdout;
        o->writer = lm_writer_stdout();
        return LM_OK;
    }
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        if (S_ISDIR(st.st_mode))
            return lm_fail(e, LM_EUSAGE, path, "name a file", "this is a folder");
        o->fd = open(path, O_WRONLY | O_CLOEXEC); /* pipe or device */
        if (o->fd < 0)
            return lm_fail(e, LM_EIO, path, NULL, "cannot open for writing");
    } else {
        rc = lm_temp_init(&o->temp, path, force, e);
        rc = rc ? rc : lm_temp_create(&o->temp, o->name, &o->fd, e);
        if (rc)
            return rc;
    }
    o->own.fd = o->fd;
    o->writer = &o->own;
    o->file = lm_writer_open(o->writer);
    if (!o->file)
        return lm_fail(e, LM_EIO, path, NULL, "cannot open a stream");
    return LM_OK;
}

lm_code lm_out_open(const char *path, bool force, lm_out **out, lm_err *e)
{
    lm_out *o;
    lm_code rc = lm_alloc_n(&o, 1, sizeof *o, "an output file", e);

    if (rc)
        return rc;
    o->fd = -1;
    rc = lm_strdup(&o->name, lm_path_is_stdout(path) ? "standard output" : path, e);
    rc = rc ? rc : open_target(o, path, force, e);
    if (rc) {
        lm_out_drop(o);
        return rc;
    }
    *out = o;
    return LM_OK;
}

FILE *lm_out_file(lm_out *o)
{
    return o->file;
}

int lm_out_fd(lm_out *o)
{
    return o->fd;
}

const char *lm_out_path(const lm_out *o)
{
    return o->name;
}

/* Flush, sync and check the file; the stream is closed in any case. */
lm_code lm_out_finish(lm_out *o, lm_err *e)
{
    lm_code rc = LM_OK;
    bool bad;

    if (!o->file) /* finished already */
        return o->failed ? lm_fail(e, LM_EBUG, o->name, NULL, "published after a failure") : LM_OK;
    errno = 0;
    bad = fflush(o->file);
    if (bad || ferror(o->file)) {
        errno = o->writer->error ? o->writer->error : errno ? errno : EIO;
        rc = lm_fail_write(o->name, e);
    }
    if (!rc && o->temp.path && fsync(o->fd))
        rc = lm_fail(e, LM_EIO, o->name, NULL, "cannot sync to disk");
    if (o->borrowed)
        return rc;
    if (!rc && o->temp.path)
        rc = lm_temp_hold(&o->temp, o->fd, e);
    if (fclose(o->file) && !rc)
        rc = lm_fail(e, LM_EIO, o->name, NULL, "cannot close");
    o->file = NULL;
    o->fd = -1;
    o->failed = rc != LM_OK;
    return rc;
}

lm_code lm_out_commit(lm_out *o, lm_err *e)
{
    lm_code rc = lm_out_finish(o, e);

    if (!rc && o->temp.path)
        rc = lm_temp_publish(&o->temp, e);
    lm_out_drop(o);
    return rc;
}

void lm_out_drop(lm_out *o)
{
    if (!o)
        return;
    if (!o->borrowed) {
        if (o->file)
            fclose(o->file);
        else if (o->fd >= 0)
            close(o->fd);
    }
    lm_temp_fini(&o->temp);
    lm_free(o->name);
    lm_free(o);
}

lm_code lm_out_try(const char *path, bool force, lm_err *e)
{
    lm_out *o = NULL;
    if (!lm_out_open(path, force, &o, e))
        lm_out_drop(o);
    return e->code;
}
