/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_flat.c -- finds and checks shards of llm.c and nanoGPT, one file or numbered ones. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/input_kind.h"
#include "format/tokens_layout.h"

static int32_t header_word(const lm_map *m, int i)
{
    return m->size >= LM_LLMC_HEADER ? lm_idx_i32(m->data, i) : 0;
}

static lm_code check_llmc(lm_tokens *t, lm_tokens_part *p, const char *path, lm_err *e)
{
    int32_t magic = header_word(&p->map, 0), version = header_word(&p->map, 1);
    int32_t known = magic == LM_LLMC_GPT2 ? LM_LLMC_GPT2_VERSION : LM_LLMC_LLAMA3_VERSION;
    if (magic != LM_LLMC_GPT2 && magic != LM_LLMC_LLAMA3)
        return lm_fail(e, LM_EFORMAT, path, NULL,
                       "not an llm.c shard: magic number %d, expected %d or %d", magic,
                       LM_LLMC_GPT2, LM_LLMC_LLAMA3);
    if (version != known)
        return lm_fail(e, LM_EFORMAT, path, NULL, "llm.c shard version %d, supported is %d",
                       version, known);
    lm_id_type type = magic == LM_LLMC_GPT2 ? LM_ID_TYPE_U16 : LM_ID_TYPE_U32;
    if (t->n_parts > 1 && type != t->type)
        return lm_fail(e, LM_EFORMAT, path, "keep both kinds apart",
                       "this shard has another id type than the previous one");
    t->type = type;
    t->id_bytes = type == LM_ID_TYPE_U16 ? 2 : 4;
    int64_t n = header_word(&p->map, 2);
    uint64_t want = (uint64_t)(n < 0 ? 0 : n) * (uint64_t)t->id_bytes + LM_LLMC_HEADER;
    if (n < 0 || want != p->map.size)
        return lm_fail(e, LM_EFORMAT, path, "fetch or make it again",
                       "the header declares %lld id%s (%llu byte%s), the file has %zu byte%s",
                       (long long)n, lm_plural(n), (unsigned long long)want, lm_plural(want),
                       p->map.size, lm_plural(p->map.size));
    p->ids = p->map.data + LM_LLMC_HEADER;
    p->count = n;
    if (t->eot < 0)
        t->eot = type == LM_ID_TYPE_U16 ? 50256 : 128000;
    return LM_OK;
}

/* True if the first bytes look like text.  A sequence of 16-bit ids contains control characters,
 * because half of its bytes are high halves. */
static bool looks_text(const lm_map *m)
{
    enum { ENOUGH = 64, LOOK = 4096 };
    size_t n = m->size < LOOK ? m->size : LOOK;
    if (n < ENOUGH)
        return false;
    for (size_t i = 0; i < n; i++)
        if ((m->data[i] < 0x20 && !strchr("\t\n\f\r", m->data[i])) || m->data[i] == 0x7f ||
            !m->data[i])
            return false;
    return lm_utf8_valid((const char *)m->data, n) + 4 > n; /* the last character may be cut */
}

/* The upper halves of 32-bit ids have only a few low bits set, unlike every second id of 16 bits; a
 * vocabulary of less than 16 differs at the other positions. */
static bool looks_wide(const lm_map *m)
{
    enum { ENOUGH = 32, LOOK = 1 << 20, HIGH = 16 };
    size_t n = m->size / 4;
    bool any = false;
    if (m->size % 4 || n < ENOUGH)
        return false;
    for (size_t i = 0; i < n && i < LOOK; i++) {
        uint16_t half[2];
        memcpy(half, m->data + 4 * i, 4);
        if (half[1] >= HIGH)
            return false;
        any |= half[0] >= HIGH;
    }
    return any;
}

static lm_code check_raw(lm_tokens *t, lm_tokens_part *p, const char *path, lm_err *e)
{
    if (t->n_parts == 1)
        t->type = looks_wide(&p->map) ? LM_ID_TYPE_U32 : LM_ID_TYPE_U16;
    t->id_bytes = t->type == LM_ID_TYPE_U32 ? 4 : 2;
    if (p->map.size % (size_t)t->id_bytes)
        return lm_fail(e, LM_EFORMAT, path, "fetch or make it again",
                       "%zu bytes are not a whole number of %d-bit ids", p->map.size,
                       8 * t->id_bytes);
    p->ids = p->map.data;
    p->count = (int64_t)(p->map.size / (size_t)t->id_bytes);
    return LM_OK;
}

/* Neither an index nor a header nor meta.json marks these as ids. */
static lm_code check_guess(const lm_tokens_part *p, const char *path, lm_err *e)
{
    const char *known = lm_input_known_format((const char *)p->map.data, p->map.size);
    int32_t magic = p->map.size >= 4 ? lm_idx_i32(p->map.data, 0) : 0;
    if (magic == LM_LLMC_GPT2 || magic == LM_LLMC_LLAMA3)
        return lm_fail(e, LM_EFORMAT, path, "fetch or make it again",
                       "a shard of llm.c of %zu bytes: its header alone has %d", p->map.size,
                       LM_LLMC_HEADER);
    if (known)
        return lm_fail(e, LM_EFORMAT, path, "name a token dataset, as shard-data makes it",
                       "it is %s, not token ids", known);
    if (looks_text(&p->map))
        return lm_fail(e, LM_EFORMAT, path, "turn it into token ids with shard-data",
                       "it is text, not token ids");
    if (!lm_text_ends(path, ".bin"))
        return lm_fail(e, LM_EFORMAT, path,
                       "text becomes token ids by shard-data; of bare ids name the "
                       "format, nanogpt",
                       "not a token dataset: it is not named .bin and has no header of llm.c");
    return LM_OK;
}

static lm_code check_part(lm_tokens *t, lm_tokens_kind kind, const char *path, lm_err *e)
{
    lm_tokens_part *p = &t->parts[t->n_parts - 1];
    int32_t magic = header_word(&p->map, 0);
    lm_code rc = LM_OK;
    if (kind == LM_TOKENS_AUTO && (magic == LM_LLMC_GPT2 || magic == LM_LLMC_LLAMA3)) {
        kind = LM_TOKENS_LLMC;
    } else if (kind == LM_TOKENS_AUTO) {
        kind = LM_TOKENS_NANOGPT;
        rc = check_guess(p, path, e);
    }
    if (!rc && t->n_parts > 1 && kind != t->kind)
        rc = lm_fail(e, LM_EFORMAT, path, "keep both kinds apart",
                     "this shard is %s, the previous one is %s", lm_tokens_kind_name(kind),
                     lm_tokens_kind_name(t->kind));
    t->kind = kind;
    if (!rc)
        rc = kind == LM_TOKENS_LLMC ? check_llmc(t, p, path, e) : check_raw(t, p, path, e);
    t->count += rc ? 0 : p->count;
    return rc;
}

/* BASE_nnnnnn.bin, sorted by number; -1 for other names. */
static int64_t shard_number(const char *name, const char *base)
{
    size_t n = strlen(base), len = strlen(name);
    if (len != n + 11 || memcmp(name, base, n) != 0 || name[n] != '_' ||
        strcmp(name + n + 7, ".bin") != 0)
        return -1;
    int64_t v = 0;
    for (size_t i = n + 1; i < n + 7; i++) {
        if (!isdigit((unsigned char)name[i]))
            return -1;
        v = v * 10 + name[i] - '0';
    }
    return v;
}

/* The names in the folder of `base`; none if it does not exist. */
static lm_code list_folder(const char *base, char ***names, size_t *n, lm_err *e)
{
    size_t len = (size_t)(lm_path_base(base) - base);
    lm_buf dir = { 0 };
    *names = NULL;
    *n = 0;
    lm_code rc = len ? lm_buf_add(&dir, base, len, e) : lm_buf_add(&dir, ".", 1, e);
    if (!rc && lm_path_is_dir(dir.data))
        rc = lm_dir_list(dir.data, names, n, e);
    lm_buf_fini(&dir);
    return rc;
}

/* Open BASE_000000.bin (or _000001, where llm.c's own training shards begin) and on; a gap in the
 * numbers is a missing shard.  *found remains false if there is none. */
static lm_code open_numbered(lm_tokens *t, lm_tokens_kind kind, const char *base, bool *found,
                             lm_err *e)
{
    const char *name = lm_path_base(base);
    lm_buf full = { 0 };
    char **names;
    size_t n;
    int64_t next = -1;
    lm_code rc = list_folder(base, &names, &n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        int64_t k = shard_number(names[i], name);
        if (k < 0)
            continue;
        if (next < 0 ? k > 1 : k != next) {
            rc = lm_fail(e, LM_EFORMAT, base, "fetch or make it again",
                         "shard %s_%06lld.bin is missing, %s exists", name,
                         (long long)(next < 0 ? 0 : next), names[i]);
            break;
        }
        next = k + 1;
        *found = true;
        full.len = 0;
        rc = lm_buf_addf(&full, e, "%s_%06lld.bin", base, (long long)k);
        if (!rc)
            rc = lm_tokens_add_part(t, full.data, e);
        if (!rc)
            rc = check_part(t, kind, full.data, e);
    }
    lm_names_free(names, n);
    lm_buf_fini(&full);
    return rc;
}

/* Allocates nothing: a failed allocation would look like another format. */
bool lm_tokens_is_file(const char *base, const char *suffix)
{
    char path[PATH_MAX]; /* no system call accepts a longer path */
    struct stat st;
    int n = snprintf(path, sizeof path, "%s%s", base, suffix);
    return n >= 0 && n < PATH_MAX && stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
}

/* True if there is a base_nnnnnn.bin.  *other: the name of a .bin of another dataset, which the
 * caller frees, or NULL. */
static lm_code find_shards(const char *base, bool *numbered, char **other, lm_err *e)
{
    const char *name = lm_path_base(base);
    char **names;
    size_t n;
    lm_code rc = list_folder(base, &names, &n, e);
    *numbered = false;
    *other = NULL;
    for (size_t i = 0; !rc && i < n; i++) {
        *numbered |= shard_number(names[i], name) >= 0;
        if (!*other && names[i][0] != '.' && lm_text_ends(names[i], ".bin"))
            rc = lm_strdup(other, names[i], e);
    }
    lm_names_free(names, n);
    return rc;
}

static lm_code fail_absent(const char *path, const char *base, const char *other, lm_err *e)
{
    const char *name = lm_path_base(base);
    char todo[200] = "make it with shard-data";
    if (other)
        snprintf(todo, sizeof todo, "name an existing dataset, such as %.120s", other);
    errno = ENOENT;
    return lm_fail(e, LM_EIO, path, todo,
                   "no token dataset: neither %s.bin nor %s_000000.bin exists", name, name);
}

lm_code lm_tokens_open_flat(lm_tokens *t, lm_tokens_kind kind, const char *path, const char *base,
                            lm_err *e)
{
    bool file = lm_tokens_is_file(path, ""), bin = !file && lm_tokens_is_file(base, ".bin");
    bool found = file || bin, numbered;
    lm_buf full = { 0 };
    char *other;
    lm_code rc = find_shards(base, &numbered, &other, e);
    if (!rc && bin && numbered)
        rc = lm_fail(e, LM_EUSAGE, path, "remove those that are old, or name a file",
                     "ambiguous: both %s.bin and the shards %s_nnnnnn.bin exist",
                     lm_path_base(base), lm_path_base(base));
    if (!rc && found)
        rc = lm_buf_addf(&full, e, "%s%s", file ? path : base, file ? "" : ".bin");
    if (!rc && found)
        rc = lm_tokens_add_part(t, full.data, e);
    if (!rc && found)
        rc = check_part(t, kind, full.data, e);
    if (!rc && !found)
        rc = open_numbered(t, kind, base, &found, e);
    if (!rc && !found)
        rc = fail_absent(path, base, other, e);
    lm_buf_fini(&full);
    lm_free(other);
    return rc;
}

lm_code lm_tokens_there(const char *prefix, bool *there, lm_err *e)
{
    char *other = NULL;
    *there = lm_tokens_is_file(prefix, ".bin") || lm_tokens_is_file(prefix, ".idx");
    if (*there)
        return LM_OK;
    lm_code rc = find_shards(prefix, there, &other, e);
    lm_free(other);
    return rc;
}
