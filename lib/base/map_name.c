/* SPDX-License-Identifier: Apache-2.0 */
/* map_name.c -- which file an address is mapped from, by /proc/self/maps.  Async-signal-safe: no
 * stdio, no memory. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"

/* A line so far: "START-END PERMS OFFSET DEV INODE      PATH". */
typedef struct {
    uintptr_t begin, end, at; /* the address to find */
    int field;                /* 0 START, 1 END, then the others */
    char before;
    char *out;
    size_t room, n;
} scan;

static void take_digit(uintptr_t *v, char c)
{
    int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 0;

    *v = *v << 4 | (uintptr_t)digit;
}

/* True when the line of the address has ended. */
static bool take_char(scan *s, char c)
{
    enum { PATH = 6 };

    if (c == '\n') {
        if (s->at >= s->begin && s->at < s->end)
            return true;
        *s = (scan){ .at = s->at, .out = s->out, .room = s->room };
        return false;
    }
    if (s->field < PATH && (c == ' ' || (c == '-' && s->field == 0)))
        s->field += s->before != ' ';
    else if (s->field == 0)
        take_digit(&s->begin, c);
    else if (s->field == 1)
        take_digit(&s->end, c);
    else if (s->field == PATH && s->n + 1 < s->room && (s->n || c != ' '))
        s->out[s->n++] = c;
    s->before = c;
    return false;
}

bool lm_map_name(const void *at, char *out, size_t room)
{
    scan s = { .at = (uintptr_t)at, .out = out, .room = room };
    char block[1024];
    bool found = false;
    ssize_t got;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);

    while (fd >= 0 && !found &&
           ((got = read(fd, block, sizeof block)) > 0 || (got < 0 && errno == EINTR)))
        for (ssize_t i = 0; i < got && !found; i++)
            found = take_char(&s, block[i]);
    if (fd >= 0)
        close(fd);
    out[found ? s.n : 0] = 0;
    return out[0] == '/';
}
