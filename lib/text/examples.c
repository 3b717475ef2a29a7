/* SPDX-License-Identifier: Apache-2.0 */
/* examples.c -- ids and marks of examples, in a temporary file or in memory. */
#include "text/examples.h"

#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "text/examples_impl.h"

static lm_code fail_file(const lm_text_examples *x, lm_err *e)
{
    return lm_fail(e, LM_EIO, x->tmp, "free space on the disk", "cannot write a temporary file");
}

static lm_code open_file(lm_text_examples *x, const char *dir, lm_err *e)
{
    x->tmp = dir;
    if (!dir)
        return LM_OK;
    int fd = lm_file_unnamed(dir);
    if (fd >= 0 && (x->file = fdopen(fd, "w+")))
        return LM_OK;
    lm_fail(e, LM_EIO, dir, "choose another folder", "cannot create a temporary file");
    if (fd >= 0)
        close(fd);
    return e->code;
}

lm_code examples_new(const char *dir, lm_text_examples **out, lm_err *e)
{
    *out = NULL;
    if (lm_alloc_n(out, 1, sizeof **out, "examples", e))
        return e->code;
    lm_hash128_init(&(*out)->hash);
    if (open_file(*out, dir, e)) {
        lm_text_examples_free(*out);
        *out = NULL;
    }
    return e->code;
}

lm_code examples_append(lm_text_examples *x, const uint32_t *ids, size_t n, lm_err *e)
{
    size_t at = (size_t)x->st.ids;
    if (lm_grow(&x->end, &x->cap_end, (size_t)x->st.examples + 1, sizeof *x->end, "examples", e))
        return e->code;
    if (x->file) {
        if (fwrite(ids, sizeof *ids, n, x->file) != n)
            return fail_file(x, e);
    } else {
        if (lm_grow(&x->v, &x->cap, at + n, sizeof *x->v, "token ids", e))
            return e->code;
        for (size_t i = 0; i < n; i++)
            x->v[at + i] = ids[i];
    }
    lm_hash128_add(&x->hash, &n, sizeof n);
    lm_hash128_add(&x->hash, ids, n * sizeof *ids);
    x->st.ids += (int64_t)n;
    x->end[x->st.examples++] = x->st.ids;
    return LM_OK;
}

lm_code examples_finish(lm_text_examples *x, lm_err *e)
{
    size_t bytes = (size_t)x->st.ids * sizeof *x->v;
    if (!x->file || !bytes)
        return LM_OK;
    if (fflush(x->file))
        return fail_file(x, e);
    void *m = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fileno(x->file), 0);
    if (m == MAP_FAILED)
        return lm_fail(e, LM_EIO, x->tmp, NULL, "cannot map %zu bytes of a temporary file", bytes);
    x->v = m;
    x->mapped = bytes;
    return LM_OK;
}

void lm_text_examples_free(lm_text_examples *x)
{
    if (!x)
        return;
    if (x->mapped)
        munmap(x->v, x->mapped);
    else
        lm_free(x->v);
    if (x->file)
        fclose(x->file);
    lm_free(x->end);
    lm_free(x);
}

/* ---- reading them ---- */

int64_t lm_text_examples_count(const lm_text_examples *x)
{
    return x->st.examples;
}

const lm_text_examples_stats *lm_text_examples_stat(const lm_text_examples *x)
{
    return &x->st;
}

uint64_t lm_text_examples_digest(const lm_text_examples *x)
{
    return lm_hash128_end64(&x->hash);
}

static int64_t start_of(const lm_text_examples *x, int64_t i)
{
    return i ? x->end[i - 1] : 0;
}

int64_t lm_text_examples_length(const lm_text_examples *x, int64_t i)
{
    return x->end[i] - start_of(x, i);
}

int64_t lm_text_examples_source(const lm_text_examples *x, int64_t i)
{
    const uint32_t *ids = lm_text_examples_ids(x, i);
    const int64_t n = lm_text_examples_length(x, i);
    int64_t k = 0;
    while (k < n && !(ids[k] & LM_TOKENS_TRAINS))
        k++;
    return k - x->st.ahead;
}

const uint32_t *lm_text_examples_ids(const lm_text_examples *x, int64_t i)
{
    return x->v + start_of(x, i);
}
