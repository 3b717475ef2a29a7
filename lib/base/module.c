/* SPDX-License-Identifier: Apache-2.0 */
/* module.c -- see module.h. */
#include "base/module.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/text.h"

static lm_code not_found(const lm_module_search *s, const char *where, lm_err *e)
{
    char list[200] = "";
    size_t n = 0;

    for (int i = 0; s->folders && s->folders[i] && n < sizeof list; i++)
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i ? ", " : "", s->folders[i]);
    errno = 0;
    return lm_fail(e, LM_EIO, where, s->todo, "there is no %s in %s%s", s->file,
                   n ? list : "any folder: no folder was named", n >= sizeof list ? "..." : "");
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
                   (long long)st.st_size, lm_plural((uint64_t)st.st_size),
                   (unsigned long long)(h.e_shoff + table));
}

static lm_code load(const lm_module_search *s, const char *path, const char *where,
                    const void **out, lm_err *e)
{
    if (check_whole(path, e))
        return e->code;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* stays loaded until the process ends */

    const char *why = handle ? NULL : dlerror();

    errno = 0; /* the loader's message names the path */
    if (!handle)
        return lm_fail(e, LM_EIO, where, NULL, "cannot load the module: %s", why);
    if (!(*out = dlsym(handle, s->symbol)))
        return lm_fail(e, LM_EIO, path, NULL, "is not a module of lmutils: it has no %s",
                       s->symbol);
    const lm_module_head *head = *out;
    if (strcmp(head->version, LM_VERSION) != 0)
        return lm_fail(e, LM_EIO, path, "build both from the same source",
                       "has version %s, this program %s", head->version, LM_VERSION);
    if (head->size != s->want.size || head->contracts != s->want.contracts)
        return lm_fail(e, LM_EIO, path, "build both from the same source",
                       "was built from different sources than this program");
    return LM_OK;
}

lm_code lm_module_open(const lm_module_search *s, const char *where, const void **out, lm_err *e)
{
    for (int i = 0; s->folders && s->folders[i]; i++) {
        char path[4096];

        snprintf(path, sizeof path, "%s/%s", s->folders[i], s->file);
        if (!access(path, F_OK))
            return load(s, path, where, out, e);
    }
    return not_found(s, where, e);
}
