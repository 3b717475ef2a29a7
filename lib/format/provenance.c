/* SPDX-License-Identifier: Apache-2.0 */
/* provenance.c -- the chain of steps as JSON text. */
#include "format/provenance.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"

/* An argument with hidden paths: "-o/tmp/x/m" and "--output=/tmp/x/m" keep the option and the last
 * part of the path. */
static lm_code put_arg(lm_jw *w, const char *key, const char *arg, bool hide, lm_err *e)
{
    const char *slash = hide ? strrchr(arg, '/') : NULL, *start;
    size_t end = strlen(arg);
    char *text = NULL;
    lm_code rc;

    if (!slash) {
        lm_jw_str(w, key, arg);
        return LM_OK;
    }
    while (end > 1 && arg[end - 1] == '/') /* "m0/" becomes m0 */
        end--;
    slash = memrchr(arg, '/', end);
    start = strchr(arg, '=');
    if (arg[0] == '-' && start && slash && start < slash)
        start++;
    else
        start = arg[0] == '-' && arg[1] && arg[1] != '-' ? arg + 2 : arg;
    if (!slash)
        slash = start - 1;
    rc = lm_asprintf(&text, e, "%.*s%.*s", (int)(start - arg), arg, (int)(arg + end - slash - 1),
                     slash + 1);
    if (!rc)
        lm_jw_str(w, key, text);
    lm_free(text);
    return rc;
}

static lm_code put_step(lm_jw *w, const lm_history_step *s, lm_err *e)
{
    lm_code rc = LM_OK;
    char hex[17];

    lm_jw_obj(w, NULL);
    lm_jw_str(w, "tool", s->tool);
    lm_jw_str(w, "version", s->version);
    lm_jw_arr(w, "argv");
    lm_jw_str(w, NULL, s->tool);
    for (int i = 1; !rc && i < s->argc; i++)
        rc = put_arg(w, NULL, s->argv[i], s->hide_paths, e);
    lm_jw_close_arr(w);
    lm_jw_arr(w, "inputs");
    for (size_t i = 0; !rc && i < s->n_inputs; i++) {
        lm_jw_obj(w, NULL);
        rc = put_arg(w, "name", s->inputs[i].name, s->hide_paths, e);
        snprintf(hex, sizeof hex, "%016" PRIx64, s->inputs[i].digest);
        if (s->inputs[i].digest)
            lm_jw_str(w, s->inputs[i].kind ? s->inputs[i].kind : "xxh3", hex);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
    return rc;
}

lm_code lm_history_add(const char *before, const lm_history_step *step, lm_buf *out, lm_err *e)
{
    json_t *chain = NULL;
    lm_err malformed = { 0 }; /* an invalid text is left out */
    lm_code rc = LM_OK;
    lm_jw w;

    if (step->none)
        return LM_OK;
    if (before)
        rc = lm_json_parse(before, strlen(before), LM_HISTORY_KEY, &chain, &malformed);
    if (rc == LM_ELIMIT) {
        *e = malformed;
        return rc;
    }
    lm_jw_begin(&w, out, 0, e);
    lm_jw_arr(&w, NULL);
    for (size_t i = 0; json_is_array(chain) && i < json_array_size(chain); i++)
        lm_jw_json(&w, NULL, json_array_get(chain, i));
    rc = put_step(&w, step, e);
    lm_jw_close_arr(&w);
    json_decref(chain);
    lm_code end = lm_jw_end(&w);
    return rc ? rc : end;
}

lm_code lm_history_write(lm_jw *w, const char *name, const lm_history_step *step, lm_err *e)
{
    if (step->none)
        return LM_OK;
    lm_jw_arr(w, name);
    lm_code rc = put_step(w, step, e);
    lm_jw_close_arr(w);
    return rc;
}

lm_code lm_history_plan(const char *before, const lm_history_step *step, lm_st_plan *plan,
                        lm_err *e)
{
    lm_buf chain = { 0 };
    lm_code rc = lm_history_add(before, step, &chain, e);

    if (!rc && chain.len)
        rc = lm_st_plan_meta(plan, LM_HISTORY_KEY, chain.data, e);
    lm_buf_fini(&chain);
    return rc;
}

enum { WINDOW = 4 << 20 };

/* In pieces that are dropped from the resident set after use: a model may be larger than memory. */
static lm_code digest_file(const char *path, uint64_t *out, lm_err *e)
{
    lm_hash128 h;
    lm_map map;
    lm_code rc = lm_map_open(path, &map, e);

    if (rc)
        return rc;
    lm_hash128_init(&h);
    for (size_t at = 0; at < map.size; at += WINDOW) {
        size_t n = map.size - at < WINDOW ? map.size - at : WINDOW;
        lm_hash128_add(&h, map.data + at, n);
        madvise((void *)(uintptr_t)(map.data + at), n, MADV_DONTNEED);
    }
    *out = lm_hash128_end64(&h);
    lm_map_close(&map);
    return LM_OK;
}

lm_code lm_digest_path(const char *path, uint64_t *out, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    lm_buf all = { 0 };
    lm_code rc;

    if (!lm_path_is_dir(path))
        return digest_file(path, out, e);
    rc = lm_dir_list(path, &names, &n, e);
    for (size_t i = 0; !rc && i < n; i++) {
        char *file = NULL;
        uint64_t digest = 0;
        rc = lm_path_join(&file, path, names[i], e);
        if (!rc && !lm_path_is_dir(file) && lm_path_exists(file)) {
            rc = digest_file(file, &digest, e);
            if (!rc)
                rc = lm_buf_add(&all, names[i], strlen(names[i]) + 1, e);
            if (!rc)
                rc = lm_buf_add(&all, &digest, sizeof digest, e);
        }
        lm_free(file);
    }
    if (!rc)
        *out = lm_hash64(all.data ? all.data : "", all.len, 0);
    lm_names_free(names, n);
    lm_buf_fini(&all);
    return rc;
}
