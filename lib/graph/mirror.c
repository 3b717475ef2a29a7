/* SPDX-License-Identifier: Apache-2.0 */
/* mirror.c -- twins of arrays. */
#include "graph/mirror.h"

#include <string.h>

lm_code lm_mirror_new(lm_backend *b, size_t bytes, const char *purpose, lm_mirror *m, lm_err *e)
{
    *m = (lm_mirror){ .b = b, .bytes = bytes };
    if (b->host_alloc(b, bytes, purpose, &m->host, e))
        return e->code;
    if (b->host_memory)
        m->dev = m->host;
    else if (b->alloc(b, bytes, purpose, &m->dev, e))
        lm_mirror_fini(m);
    return e->code;
}

void lm_mirror_fini(lm_mirror *m)
{
    if (m->dev && m->dev != m->host)
        m->b->free(m->b, m->dev, m->bytes);
    if (m->host)
        m->b->host_free(m->b, m->host, m->bytes);
    memset(m, 0, sizeof *m);
}

lm_code lm_mirror_push(lm_mirror *m, size_t bytes, lm_stream *s, lm_err *e)
{
    return m->dev == m->host ? LM_OK
                             : m->b->copy(m->b, m->dev, m->host, bytes, s ? s : m->b->main, e);
}

lm_code lm_mirror_pull(lm_mirror *m, size_t bytes, lm_stream *s, lm_err *e)
{
    return m->dev == m->host ? LM_OK
                             : m->b->copy(m->b, m->host, m->dev, bytes, s ? s : m->b->main, e);
}
