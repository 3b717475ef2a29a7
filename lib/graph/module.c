/* SPDX-License-Identifier: Apache-2.0 */
/* module.c -- backends by name: the CPU's, and those in modules that are loaded on request. */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/text.h"
#include "graph/backend.h"

#define MODULE "libcore-cuda.so"

static lm_code not_found(const lm_backend_opts *o, lm_err *e)
{
    char where[200] = "";
    size_t n = 0;

    for (int i = 0; o->modules && o->modules[i] && n < sizeof where; i++)
        n += (size_t)snprintf(where + n, sizeof where - n, "%s%s", i ? ", " : "", o->modules[i]);
    errno = 0;
    return lm_fail(e, LM_EIO, o->device, "'make cuda' builds it where nvcc is",
                   "there is no " MODULE " in %s%s", n ? where : "any folder: no folder was named",
                   n >= sizeof where ? "..." : "");
}

/* A truncated file would end the process by a signal while it is loaded, because the loader maps
 * the ranges that the file's header names.  The table of sections lies at the end of a library, so
 * its presence shows that the file is complete.  The loader itself reports files that cannot be
 * read or are not libraries for this machine. */
static lm_code check_whole(const char *path, lm_err *e)
{
    Elf64_Ehdr h;
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool read_it = fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) &&
                   pread(fd, &h, sizeof h, 0) == (ssize_t)sizeof h;

    if (fd >= 0)
        close(fd);
    errno = 0;
    if (!read_it || memcmp(h.e_ident, ELFMAG, SELFMAG) || h.e_ident[EI_CLASS] != ELFCLASS64 ||
        h.e_ident[EI_DATA] != ELFDATA2LSB)
        return LM_OK;
    uint64_t size = (uint64_t)st.st_size, table = (uint64_t)h.e_shnum * h.e_shentsize;
    if (h.e_shoff <= size && table <= size - h.e_shoff)
        return LM_OK;
    return lm_fail(e, LM_EIO, path, "build it again, or copy it again",
                   "is truncated: it has %lld byte%s, its table of sections ends at %llu",
                   (long long)st.st_size, lm_plural(st.st_size),
                   (unsigned long long)(h.e_shoff + table));
}

static lm_code load(const lm_backend_opts *o, const char *path, const lm_module **out, lm_err *e)
{
    if (check_whole(path, e))
        return e->code;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* stays loaded until the process ends */

    const char *why = handle ? NULL : dlerror();

    errno = 0; /* the loader's message names the path */
    if (!handle)
        return lm_fail(e, LM_EIO, o->device, NULL, "cannot load the module: %s", why);
    if (!(*out = dlsym(handle, LM_MODULE_SYMBOL)))
        return lm_fail(e, LM_EIO, path, NULL, "is not a module of lmutils: it has no %s",
                       LM_MODULE_SYMBOL);
    if (strcmp((*out)->version, LM_VERSION) != 0)
        return lm_fail(e, LM_EIO, path, "build both from the same source",
                       "has version %s, this program %s", (*out)->version, LM_VERSION);
    if ((*out)->backend_size != sizeof(lm_backend) || (*out)->contracts != LM_CONTRACTS)
        return lm_fail(e, LM_EIO, path, "build both from the same source",
                       "was built from different sources than this program");
    return LM_OK;
}

static lm_code find_module(const lm_backend_opts *o, const lm_module **out, lm_err *e)
{
    for (int i = 0; o->modules && o->modules[i]; i++) {
        char path[4096];

        snprintf(path, sizeof path, "%s/%s", o->modules[i], MODULE);
        if (!access(path, F_OK))
            return load(o, path, out, e);
    }
    return not_found(o, e);
}

lm_code lm_backend_open(const lm_backend_opts *o, lm_backend **out, lm_err *e)
{
    const lm_module *m = NULL;
    lm_code rc;

    *out = NULL;
    if (!strcmp(o->device, "cpu"))
        return lm_backend_cpu(o->cpu, o->par, out, e);
    if (!lm_device_named(o->device))
        return lm_fail(e, LM_EUSAGE, o->device, "choose from cpu, cuda, cuda:0, cuda:1, ...",
                       "no such device");
    rc = find_module(o, &m, e);
    rc = rc ? rc : m->open(o, out, e);
    if (!rc)
        (*out)->cpu = o->cpu;
    return rc;
}
