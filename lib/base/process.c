/* SPDX-License-Identifier: Apache-2.0 */
/* process.c -- see process.h. */
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"

/* The first bytes of a file of /proc; "" if it cannot be read.  Returns 0, or why not (an errno). */
static int read_file(const char *path, char *buf, size_t size)
{
    int sys = errno, fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, buf, size - 1) : -1;
    int why = n < 0 ? errno : 0;

    buf[n > 0 ? n : 0] = 0;
    if (fd >= 0)
        close(fd);
    errno = sys;
    return why;
}

/* Fields 3 (the state) and 22 (the start) of /proc/PID/stat; the second field, in parentheses, may hold anything.  Returns 0, or
 * why the file cannot be read. */
static int read_stat(int64_t pid, char *state, uint64_t *start)
{
    char path[64], stat[1024], *at;

    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    int why = read_file(path, stat, sizeof stat);
    at = strrchr(stat, ')');
    *state = at && at[1] ? at[2] : 0;

    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    *start = at ? strtoull(at, NULL, 10) : 0;
    return why;
}

uint64_t lm_process_start(int64_t pid)
{
    uint64_t start;
    char state;

    read_stat(pid, &state, &start);
    return start;
}

lm_process_state lm_process_look(int64_t pid, uint64_t start)
{
    uint64_t now;
    char state;
    int why = read_stat(pid, &state, &now);

    /* Too many open files, for example, say nothing about the other process. */
    if (why)
        return why == ENOENT || why == ESRCH ? LM_PROCESS_ENDED : LM_PROCESS_RUNS;
    if ((start && now != start) || state == 'Z' || state == 'X')
        return LM_PROCESS_ENDED;
    return state == 'T' || state == 't' ? LM_PROCESS_STOPPED : LM_PROCESS_RUNS;
}

/* boot_id is random and made at each boot, so it names the machine as well. */
uint64_t lm_boot_hash(void)
{
    char id[256];

    read_file("/proc/sys/kernel/random/boot_id", id, sizeof id);
    if (!id[0] && gethostname(id, sizeof id - 1))
        id[0] = 0;
    return lm_hash_str(id);
}
