/* SPDX-License-Identifier: Apache-2.0 */
/* inject.c -- preloaded into a tool: makes the n-th call of one kind fail, or its clock run faster.
 *
 * LM_INJECT=KIND:N with KIND malloc, write, pwrite, fsync, rename, unlink or mmap; N counts from 1.  Those of pwrite are writes
 * at a place in a file alone.
 * LM_INJECT_KILL: the process is killed in place of that call.
 * LM_INJECT_LOG=FILE gets one line when the failure has happened.
 * LM_INJECT_CLOCK=F: the monotonic clock runs F times as fast, for tests of periodic actions.
 *
 * Streams on descriptors call an internal write of libc, so for "write" fwrite and fflush on them count too.
 * Memory counts if the program, or a library that it is linked with, asks for it.  Others end the process when they get
 * none: the dynamic linker, and libraries that are opened later (libarchive, LAPACK). */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char spec[32]; /* LM_INJECT */
static const char *kind;
static long target;
static atomic_long count;
static long clock_speed = 1;

enum { MOST_OBJECTS = 32 };
static struct {
    uintptr_t from, to;
} object[MOST_OBJECTS]; /* the program and its libraries, as addresses */
static int objects;

static int add_object(struct dl_phdr_info *o, size_t size, void *ctx)
{
    uintptr_t from = UINTPTR_MAX, to = 0;

    (void)size, (void)ctx;
    if (strstr(o->dlpi_name, "/ld-") || objects == MOST_OBJECTS)
        return 0;
    for (int i = 0; i < o->dlpi_phnum; i++) {
        uintptr_t at = o->dlpi_addr + o->dlpi_phdr[i].p_vaddr;

        if (o->dlpi_phdr[i].p_type != PT_LOAD)
            continue;
        from = at < from ? at : from;
        to = at + o->dlpi_phdr[i].p_memsz > to ? at + o->dlpi_phdr[i].p_memsz : to;
    }
    object[objects].from = from;
    object[objects++].to = to;
    return 0;
}

__attribute__((constructor)) static void start(void)
{
    const char *s = getenv("LM_INJECT"), *colon = s ? strchr(s, ':') : NULL;

    if (getenv("LM_INJECT_CLOCK"))
        clock_speed = atol(getenv("LM_INJECT_CLOCK"));
    if (colon && strlen(s) < sizeof spec) {
        dl_iterate_phdr(add_object, NULL);
        target = atol(colon + 1);
        strcpy(spec, s);
        unsetenv("LM_INJECT"); /* programs that the tool starts are left alone */
        kind = spec;           /* last: from here on calls are counted */
    }
}

static bool fails(const char *what, int error)
{
    const char *log;
    int fd;

    if (!kind || strncmp(kind, what, strlen(what)) || atomic_fetch_add(&count, 1) + 1 != target)
        return false;
    log = getenv("LM_INJECT_LOG");
    fd = log ? open(log, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (fd >= 0) {
        syscall(SYS_write, fd, "failed\n", 7);
        close(fd);
    }
    if (getenv("LM_INJECT_KILL"))
        raise(SIGKILL);
    errno = error;
    return true;
}

/* The next definition of this function, that of libc. */
#define NEXT(name) ((__typeof__(&name))(uintptr_t)dlsym(RTLD_NEXT, #name))

/* caller: where the call returns to */
static bool no_memory(const void *caller)
{
    for (int i = 0; i < objects; i++)
        if ((uintptr_t)caller >= object[i].from && (uintptr_t)caller < object[i].to)
            return fails("malloc", ENOMEM);
    return false;
}

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t align, size_t n);

void *malloc(size_t n)
{
    return no_memory(__builtin_return_address(0)) ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return no_memory(__builtin_return_address(0)) ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return no_memory(__builtin_return_address(0)) ? NULL : __libc_realloc(p, n);
}

int posix_memalign(void **out, size_t align, size_t n)
{
    *out = no_memory(__builtin_return_address(0)) ? NULL : __libc_memalign(align, n);
    return *out ? 0 : ENOMEM;
}

void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    if (fails("mmap", ENOMEM))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}

ssize_t write(int fd, const void *data, size_t n)
{
    return fails("write", ENOSPC) ? -1 : syscall(SYS_write, fd, data, n);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    return fails("write", ENOSPC) || fails("pwrite", ENOSPC)
               ? -1
               : syscall(SYS_pwrite64, fd, data, n, at);
}

/* A stream on a descriptor; not one of fopencookie, whose functions call write themselves. */
static bool on_descriptor(FILE *f)
{
    return f && f != stderr && fileno(f) >= 0;
}

ssize_t pwritev(int fd, const struct iovec *piece, int n, off_t at)
{
    return fails("write", ENOSPC) ? -1 : syscall(SYS_pwritev, fd, piece, n, at, 0);
}

size_t fwrite(const void *data, size_t size, size_t n, FILE *f)
{
    if (on_descriptor(f) && fails("write", ENOSPC)) {
        f->_flags |= 0x20; /* glibc's error mark, what ferror reads */
        return 0;
    }
    return NEXT(fwrite)(data, size, n, f);
}

int fflush(FILE *f)
{
    return on_descriptor(f) && fails("write", ENOSPC) ? EOF : NEXT(fflush)(f);
}

int fsync(int fd)
{
    return fails("fsync", EIO) ? -1 : (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
    return fails("rename", EACCES) ? -1 : NEXT(rename)(from, to);
}

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    return fails("rename", EACCES) ? -1
                                   : (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, flags);
}

int unlink(const char *path)
{
    return fails("unlink", EACCES) ? -1 : (int)syscall(SYS_unlink, path);
}

int clock_gettime(clockid_t id, struct timespec *t)
{
    int rc = (int)syscall(SYS_clock_gettime, id, t);

    if (!rc && id == CLOCK_MONOTONIC && clock_speed > 1) {
        __int128 ns = ((__int128)t->tv_sec * 1000000000 + t->tv_nsec) * clock_speed;
        t->tv_sec = (time_t)(ns / 1000000000);
        t->tv_nsec = (long)(ns % 1000000000);
    }
    return rc;
}
