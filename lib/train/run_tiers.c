/* SPDX-License-Identifier: Apache-2.0 */
/* run_tiers.c -- see run_tiers.h. */
#include "train/run_tiers.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/owner.h"
#include "format/folder_run.h"
#include "train/run.h"

static const char of_run[] = "tiers.json", of_folder[] = "tier.json";
enum { FILE_LIMIT = 1 << 16 };

void lm_run_tiers_close(lm_run_tiers *t, bool failed)
{
    for (int i = 0; i < t->n; i++) {
        lm_lock_drop(t->at[i].lock);
        t->at[i].lock = NULL;
        if (failed && t->at[i].made)
            rmdir(t->at[i].folder);
    }
}

void lm_run_tiers_fini(lm_run_tiers *t)
{
    lm_run_tiers_close(t, false);
    for (int i = 0; i < t->n; i++)
        lm_free(t->at[i].folder);
    *t = (lm_run_tiers){ 0 };
}

/* ---- files that connect a run and its tiers ---- */

static lm_code read_file(const char *dir, const char *name, json_t **out, lm_err *e)
{
    char *path = NULL;
    *out = NULL;
    lm_code rc = lm_path_join(&path, dir, name, e);
    if (!rc && lm_path_exists(path))
        rc = lm_json_load(path, FILE_LIMIT, out, e);
    lm_free(path);
    return rc;
}

static lm_code write_file(const char *dir, const char *name, const json_t *o, lm_err *e)
{
    char *path = NULL;
    lm_buf text = { 0 };
    lm_out *f = NULL;
    lm_jw w;
    lm_jw_begin(&w, &text, 0, e);
    lm_jw_json(&w, NULL, o);
    lm_code rc = lm_jw_end(&w);
    rc = rc ? rc : lm_buf_add(&text, "\n", 1, e);
    rc = rc ? rc : lm_path_join(&path, dir, name, e);
    rc = rc ? rc : lm_out_open(path, true, &f, e);
    if (!rc && fwrite(text.data, 1, text.len, lm_out_file(f)) != text.len) {
        rc = lm_fail_write(path, e);
        lm_out_drop(f);
    } else if (!rc) {
        rc = lm_out_commit(f, e);
    }
    lm_free(path);
    lm_buf_fini(&text);
    return rc;
}

static const char *text_of(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static bool same_id(const json_t *a, const json_t *b)
{
    return *text_of(a, "id") && !strcmp(text_of(a, "id"), text_of(b, "id"));
}

static bool lists(const json_t *mine, const char *folder)
{
    const json_t *tier;
    size_t i;
    bool has = false;
    json_array_foreach(json_object_get(mine, "tiers"), i, tier) has |=
        !strcmp(text_of(tier, "folder"), folder);
    return has;
}

/* The run that the folder names still is there, and has it as a tier; true also where that cannot be read. */
static bool has_owner(const char *folder, const json_t *its)
{
    json_t *mine = NULL;
    lm_err unread = { 0 };
    const bool has = read_file(text_of(its, "run"), of_run, &mine, &unread) ||
                     (same_id(mine, its) && lists(mine, folder));
    json_decref(mine);
    return has;
}

/* The folder is a tier of the run, which may have been moved; not if it was copied, and the first of both still is there. */
static bool is_tier_of(const char *folder, const json_t *its, const char *run, const json_t *mine)
{
    return same_id(mine, its) &&
           (lm_path_same(text_of(its, "run"), run) || !has_owner(folder, its));
}

/* Number k of the tiers of a run whose tiers.json is `mine`: its folder if that still is one, otherwise NULL. */
static const char *tier_at(const char *run, const json_t *mine, size_t k)
{
    const char *folder = text_of(json_array_get(json_object_get(mine, "tiers"), k), "folder");
    json_t *its = NULL;
    lm_err unread = { 0 };
    const bool is = lm_path_is_dir(folder) && !read_file(folder, of_folder, &its, &unread) &&
                    is_tier_of(folder, its, run, mine);
    json_decref(its);
    return is ? folder : NULL;
}

/* A resumed run keeps its id. */
static void id_of(const json_t *mine, int64_t from, char id[24])
{
    char text[LM_OWNER_TAG + 40], tag[LM_OWNER_TAG];
    if (from >= 0 && *text_of(mine, "id")) {
        snprintf(id, 24, "%.23s", text_of(mine, "id"));
    } else {
        snprintf(text, sizeof text, "%s %.9f", lm_owner_tag(tag), lm_now());
        snprintf(id, 24, "%016" PRIx64, lm_hash_str(text));
    }
}

static lm_code real_path(const char *path, char out[PATH_MAX], lm_err *e)
{
    return realpath(path, out) ? LM_OK : lm_fail(e, LM_EIO, path, NULL, "cannot be read");
}

static void add_folder(json_t *list, const char *folder)
{
    json_array_append_new(list, json_pack("{s:s}", "folder", folder));
}

/* Former places in which nothing is behind `from`. */
static lm_code add_former(const lm_run_tiers *t, const char *run, const json_t *mine, int64_t from,
                          json_t *list, lm_err *e)
{
    const size_t n = json_array_size(json_object_get(mine, "tiers"));
    for (size_t k = 0; k < n; k++) {
        const char *folder = tier_at(run, mine, k);
        char *newest = NULL;
        bool again = !folder;
        for (int i = 0; i < t->n && !again; i++)
            again = lm_path_same(folder, t->at[i].folder);
        if (again)
            continue;
        if (lm_run_newest(folder, &newest, e))
            return e->code;
        if (newest && lm_run_step_of(newest) <= from)
            add_folder(list, folder);
        lm_free(newest);
    }
    return LM_OK;
}

static lm_code connect(const lm_run_tiers *t, const char *run, int64_t from, lm_err *e)
{
    char id[24], real[PATH_MAX];
    json_t *list = json_array(), *all = NULL, *mine = NULL;
    if (real_path(run, real, e) || read_file(run, of_run, &mine, e) ||
        (from >= 0 && add_former(t, run, mine, from, list, e)))
        goto end;
    id_of(mine, from, id);
    for (int i = 0; i < t->n && !e->code; i++) {
        json_t *o = json_pack("{s:i,s:s,s:s}", "version", 1, "id", id, "run", real);
        write_file(t->at[i].folder, of_folder, o, e);
        json_decref(o);
        add_folder(list, t->at[i].folder);
    }
    if (!t->n && !mine)
        goto end;
    all = json_pack("{s:i,s:s,s:O}", "version", 1, "id", id, "tiers", list);
    if (!e->code)
        all ? write_file(run, of_run, all, e) : lm_fail(e, LM_ELIMIT, of_run, NULL, "no memory");
end:
    json_decref(list);
    json_decref(all);
    json_decref(mine);
    return e->code;
}

/* ---- memory ---- */

static lm_code memory_root(char **out, lm_err *e)
{
    return lm_asprintf(out, e, "/dev/shm/lmutils-%u", (unsigned)geteuid());
}

static bool is_in_memory(const char *folder)
{
    char *root = NULL;
    lm_err unmade = { 0 };
    bool is = !memory_root(&root, &unmade) && !strncmp(folder, root, strlen(root)) &&
              folder[strlen(root)] == '/';
    lm_free(root);
    return is;
}

/* The folder that a resumed run has already; NULL: it has none. */
static lm_code find_memory(const char *run, char **out, lm_err *e)
{
    json_t *mine = NULL;
    *out = NULL;
    lm_code rc = read_file(run, of_run, &mine, e);
    const size_t n = json_array_size(json_object_get(mine, "tiers"));
    for (size_t k = 0; k < n && !rc && !*out; k++) {
        const char *folder = tier_at(run, mine, k);
        if (folder && is_in_memory(folder))
            rc = lm_strdup(out, folder, e);
    }
    json_decref(mine);
    return rc;
}

/* By the path of the run; another name if a run that had this path, and was moved, has that folder. */
static lm_code choose_memory(const char *run, char **out, lm_err *e)
{
    char real[PATH_MAX], *root = NULL;
    bool taken = true;
    if (real_path(run, real, e) || memory_root(&root, e))
        return e->code;
    for (uint64_t k = 0; taken && !e->code; k++) {
        json_t *its = NULL;
        lm_err unread = { 0 };
        lm_free(*out);
        *out = NULL;
        if (lm_asprintf(out, e, "%s/%016" PRIx64, root, lm_hash_str(real) + k))
            break;
        taken = !read_file(*out, of_folder, &its, &unread) && its &&
                strcmp(text_of(its, "run"), real) != 0 && has_owner(*out, its);
        json_decref(its);
    }
    lm_free(root);
    return e->code;
}

lm_code lm_run_tiers_place(lm_run_tiers *t, const char *run, int64_t from, lm_err *e)
{
    for (int i = 0; i < t->n; i++) {
        lm_run_tier *at = &t->at[i];
        if (at->memory && !at->folder &&
            ((from >= 0 && find_memory(run, &at->folder, e)) ||
             (!at->folder && choose_memory(run, &at->folder, e))))
            return e->code;
    }
    return LM_OK;
}

/* Anybody may make names in /dev/shm. */
static lm_code open_root(char **root, lm_err *e)
{
    struct stat st;
    if (memory_root(root, e))
        return e->code;
    mkdir(*root, 0700);
    if (lstat(*root, &st))
        return lm_fail(e, LM_EIO, *root, "mount a tmpfs at /dev/shm, or give folders only",
                       "cannot be made");
    return S_ISDIR(st.st_mode) && st.st_uid == geteuid() && !(st.st_mode & 077)
               ? LM_OK
               : lm_fail(e, LM_EUSAGE, *root, "remove it, or give folders only",
                         "is not a folder of this user alone");
}

/* Remove folders whose runs are gone, or have them no longer; not that of the run itself, which may have been moved. */
static lm_code sweep(const char *root, const char *run, int64_t from, lm_err *e)
{
    lm_err ignored = { 0 };
    char **names = NULL;
    size_t n = 0;
    json_t *mine = NULL;
    if (from >= 0 && read_file(run, of_run, &mine, e))
        return e->code;
    lm_dir_list(root, &names, &n, &ignored);
    for (size_t i = 0; i < n; i++) {
        char *dir = NULL, *lock = NULL;
        json_t *o = NULL;
        lm_err unread = { 0 };
        if (!lm_path_join(&dir, root, names[i], &unread) &&
            !lm_path_join(&lock, dir, ".train.lock", &unread) &&
            !read_file(dir, of_folder, &o, &unread) && o && !same_id(mine, o) &&
            !has_owner(dir, o) && !lm_lock_check(lock, dir, &unread))
            lm_rm_rf(dir, &unread);
        json_decref(o);
        lm_free(dir);
        lm_free(lock);
    }
    lm_names_free(names, n);
    json_decref(mine);
    return LM_OK;
}

/* ---- a training ---- */

static lm_code open_memory(const lm_run_tiers *t, const char *run, int64_t from, lm_err *e)
{
    char *root = NULL;
    lm_code rc = LM_OK;
    if (lm_run_tiers_in_memory(t))
        rc = open_root(&root, e) ? e->code : sweep(root, run, from, e);
    lm_free(root);
    return rc;
}

static lm_code open_one(lm_run_tier *t, int64_t from, bool force, lm_sink *sink, lm_err *e)
{
    t->made = !lm_path_exists(t->folder);
    return lm_run_open(t->folder, from, force, sink, &t->lock, e);
}

/* A folder that is another run's tier is replaced by force only. */
static lm_code check_owner(const lm_run_tier *t, const char *run, bool force, lm_err *e)
{
    json_t *mine = NULL, *its = NULL;
    char *newest = NULL;
    if (!lm_path_is_dir(t->folder))
        return LM_OK;
    lm_code rc = read_file(run, of_run, &mine, e);
    rc = rc ? rc : read_file(t->folder, of_folder, &its, e);
    rc = rc ? rc : lm_run_newest(t->folder, &newest, e);
    if (!rc && newest && its && !is_tier_of(t->folder, its, run, mine) && !force)
        rc = lm_fail(e, LM_EUSAGE, t->folder, "choose another folder, or allow replacing the run",
                     "holds checkpoints of the run in %.120s", text_of(its, "run"));
    json_decref(mine);
    json_decref(its);
    lm_free(newest);
    return rc;
}

/* The folder is that of the run, or that of an earlier place, by another name. */
static lm_code check_apart(const lm_run_tiers *t, int i, const char *run, lm_err *e)
{
    const char *folder = t->at[i].folder;
    if (lm_path_same(folder, run))
        return lm_fail(e, LM_EUSAGE, folder, "leave it out, or choose another folder",
                       "is the folder of the run itself");
    for (int k = 0; k < i; k++)
        if (lm_path_same(folder, t->at[k].folder))
            return lm_fail(e, LM_EUSAGE, folder, "give each once", "is given twice");
    return LM_OK;
}

/* A run that was killed before its folder had a checkpoint is one, too. */
static lm_code check_former(const char *run, lm_err *e)
{
    char *newest = NULL, todo[256];
    lm_code rc = lm_run_tiers_newest(run, &newest, e);
    if (!rc && newest) {
        snprintf(todo, sizeof todo,
                 "resume the run in %.120s, choose another folder, or allow replacing the run",
                 run);
        rc = lm_fail(e, LM_EUSAGE, run, todo, "holds a run already (%.160s)", newest);
    }
    lm_free(newest);
    return rc;
}

lm_code lm_run_tiers_open(lm_run_tiers *t, const char *run, int64_t from, bool force, lm_sink *sink,
                          lm_err *e)
{
    if ((from < 0 && !force && check_former(run, e)) || open_memory(t, run, from, e) ||
        lm_run_tiers_place(t, run, from, e))
        return e->code;
    for (int i = 0; i < t->n; i++)
        if (check_apart(t, i, run, e) || check_owner(&t->at[i], run, force, e) ||
            open_one(&t->at[i], from, force, sink, e))
            return e->code;
    return LM_OK;
}

lm_code lm_run_tiers_claim(const lm_run_tiers *t, const char *run, int64_t from, lm_err *e)
{
    for (int i = 0; i < t->n; i++)
        if (lm_run_claim_aside(t->at[i].folder, from, e))
            return e->code;
    lm_code rc = connect(t, run, from, e);
    if (!rc && from < 0) { /* memory of the run that was replaced */
        char *root = NULL;
        rc = memory_root(&root, e) ? e->code : sweep(root, run, from, e);
        lm_free(root);
    }
    return rc;
}

void lm_run_tiers_end(const lm_run_tiers *t, const char *run)
{
    lm_err ignored = { 0 };
    json_t *mine = NULL;
    read_file(run, of_run, &mine, &ignored);
    const size_t n = json_array_size(json_object_get(mine, "tiers"));
    for (int i = 0; i < t->n; i++)
        if (t->at[i].memory)
            lm_rm_rf(t->at[i].folder, &ignored);
    for (size_t k = 0; k < n; k++) {
        const char *folder = tier_at(run, mine, k);
        if (folder && is_in_memory(folder))
            lm_rm_rf(folder, &ignored);
    }
    json_decref(mine);
}

/* ---- resuming ---- */

/* The newest checkpoint of one folder, if it is newer than *best. */
static lm_code look_into(const char *folder, int64_t *best, char **out, lm_err *e)
{
    char *name = NULL, *path = NULL;
    lm_code rc = lm_run_newest(folder, &name, e);
    if (!rc && name && lm_run_step_of(name) > *best) {
        rc = lm_path_join(&path, folder, name, e);
        if (!rc) {
            *best = lm_run_step_of(name);
            lm_free(*out);
            *out = path;
        }
    }
    lm_free(name);
    return rc;
}

lm_code lm_run_tiers_newest(const char *run, char **out, lm_err *e)
{
    json_t *mine = NULL;
    int64_t best = -1;
    *out = NULL;
    lm_code rc = look_into(run, &best, out, e);
    rc = rc ? rc : read_file(run, of_run, &mine, e);
    const size_t n = json_array_size(json_object_get(mine, "tiers"));
    for (size_t k = 0; k < n && !rc; k++) {
        const char *folder = tier_at(run, mine, k);
        rc = folder ? look_into(folder, &best, out, e) : LM_OK;
    }
    json_decref(mine);
    return rc;
}

lm_code lm_run_tiers_run_of(const char *folder, char **out, lm_err *e)
{
    json_t *its = NULL, *o = NULL;
    *out = NULL;
    lm_code rc = read_file(folder, of_folder, &its, e);
    const char *run = text_of(its, "run");
    if (!rc && *run && lm_path_is_dir(run) && !(rc = read_file(run, of_run, &o, e)) &&
        same_id(o, its))
        rc = lm_strdup(out, run, e);
    json_decref(its);
    json_decref(o);
    return rc;
}
