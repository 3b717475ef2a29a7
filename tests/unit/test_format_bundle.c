/* SPDX-License-Identifier: Apache-2.0 */
/* Bundles: the same files through every form, in order and at random; spooled streams; atomic
 * outputs; malformed archives. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/bundle.h"
#include "format/folder.h"

static char dir[64], path[256], said[4096];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    said[0] = 0;
    return mkdtemp(dir) ? 0 : -1;
}

static int drop_dir(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_rm_rf(dir, &e);
}

static const char *in(const char *name)
{
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%d: %s: %s: %s", rc, e->where, e->what, e->todo);
}

/* A shell command in the folder. */
static void sh(const char *text)
{
    char cmd[1200];
    snprintf(cmd, sizeof cmd, "cd %s && { %s; }", dir, text);
    if (system(cmd))
        fail_msg("%s", cmd);
}

static void listen(lm_sink *s, lm_log_level level, const char *text)
{
    (void)s, (void)level;
    strncat(said, text, sizeof said - strlen(said) - 2);
    strcat(said, "\n");
}

static lm_sink sink = { .log = listen };
static lm_bundle_opts opts(void)
{
    return (lm_bundle_opts){ .tmpdir = dir, .sink = &sink };
}

/* Standard input becomes what a command writes to a pipe; back with pipe_end. */
static int saved_stdin = -1;
static FILE *feeder;
static void pipe_from(const char *text)
{
    char cmd[1200];
    snprintf(cmd, sizeof cmd, "cd %s && { %s; }", dir, text);
    saved_stdin = dup(STDIN_FILENO);
    feeder = popen(cmd, "r");
    assert_non_null(feeder);
    assert_true(dup2(fileno(feeder), STDIN_FILENO) == STDIN_FILENO);
}

/* The status of the feeder: not 0 when its pipe was closed before it had written all. */
static int pipe_end(void)
{
    dup2(saved_stdin, STDIN_FILENO);
    close(saved_stdin);
    return pclose(feeder);
}

/* ---- The model under test: t0..t7; element i of tensor k is 10000 k + i, 4000 f32 each ---- */

enum { TENSORS = 8, COUNT = 4000 };

static void write_model(const char *name, uint64_t shard_bytes)
{
    lm_bundle_opts o = opts();
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    lm_err e = { 0 };
    char tensor[16];
    int64_t dim[] = { 40, 100 };
    json_t *config = json_pack("{s:s}", "model_type", "llama");

    must(lm_st_plan_new(&p, &e), &e);
    for (int k = 0; k < TENSORS; k++) {
        snprintf(tensor, sizeof tensor, "t%d", k);
        must(lm_st_plan_add(p, tensor, LM_DTYPE_F32, 2, dim, &e), &e);
    }
    lm_folder_spec spec = { .config = config, .plan = p, .max_shard_bytes = shard_bytes };
    must(lm_folder_create(in(name), false, &o, &spec, &f, &e), &e);
    must(lm_folder_put(f, "tokenizer.json", "{}\n", 3, &e), &e);
    for (const lm_st_tensor *t; (t = lm_folder_next(f));) {
        float x[COUNT];
        for (int i = 0; i < COUNT; i++)
            x[i] = (float)(10000 * (t->name[1] - '0') + i);
        must(lm_folder_write(f, x, sizeof x / 2, &e), &e);
        if (t->name[1] == '3') /* amid the weights: kept until they are complete */
            must(lm_folder_put(f, "state.json", "{\"a\":1}", 7, &e), &e);
        must(lm_folder_write(f, x + COUNT / 2, sizeof x / 2, &e), &e);
    }
    must(lm_folder_put(f, "late.txt", "late", 4, &e), &e);
    must(lm_folder_commit(f, &e), &e);
    lm_st_plan_free(p);
    json_decref(config);
}

static void check_tensor(const lm_model_source *m, const lm_st_tensor *t)
{
    lm_err e = { 0 };
    double x[COUNT];
    float y[100];
    const void *all = NULL;
    int k = t->name[1] - '0';

    must(lm_model_source_load(m, t, LM_DTYPE_F64, x, &e), &e);
    for (int i = 0; i < COUNT; i++)
        assert_true(x[i] == 10000 * k + i);
    must(lm_model_source_read(m, t, 4 * 1234, y, sizeof y, &e), &e);
    assert_true(y[99] == (float)(10000 * k + 1333));
    must(lm_model_source_borrow(m, t, &all, &e), &e);
    assert_true(all || lm_model_source_random(m)); /* of a stream it is held anyway */
    if (all)
        assert_memory_equal((const char *)all + 4 * 1234, y, sizeof y);
    must(lm_model_source_peek(m, t, 4 * 1235, y, sizeof y, &e), &e);
    assert_true(y[98] == (float)(10000 * k + 1333));
}

static void check_in_order(lm_model_source *m)
{
    const lm_st_tensor *t;
    lm_err e = { 0 };
    int seen = 0;

    for (;;) {
        must(lm_model_source_next(m, &t, &e), &e);
        if (!t)
            break;
        check_tensor(m, t);
        seen++;
    }
    assert_int_equal(seen, TENSORS);
    must(lm_model_source_finish(m, &e), &e);
}

static const char *const forms[] = { "m",        "m.tar",     "m.tar.gz",  "m.tar.zst",
                                     "m.tar.xz", "m.tar.bz2", "m.tar.lz4", "m.lmz" };
enum { FORMS = sizeof forms / sizeof *forms };

static lm_model_source *open_model(const char *name)
{
    static lm_bundle_opts o;
    lm_model_source *m = NULL;
    lm_err e = { 0 };

    o = opts();
    must(lm_model_source_open(strcmp(name, "-") ? in(name) : "-", &o, &m, &e), &e);
    return m;
}

static void test_every_form(void **state)
{
    (void)state;
    for (int i = 0; i < FORMS; i++) {
        char cat[64];
        bool found;
        lm_buf text = { 0 };
        lm_err e = { 0 };
        write_model(forms[i], 0);
        lm_model_source *m = open_model(forms[i]);
        check_in_order(m);
        must(lm_model_source_file(m, "late.txt", 100, &text, &found, &e), &e);
        assert_true(found);
        assert_string_equal(text.data, "late");
        lm_buf_fini(&text);
        lm_model_source_close(m);
        assert_int_equal(said[0], 0); /* in order: nothing is spooled, not even under a filter */
        if (!strcmp(forms[i], "m"))
            continue;
        snprintf(cat, sizeof cat, "cat %s", forms[i]);
        pipe_from(cat);
        m = open_model("-");
        assert_string_equal(lm_model_source_path(m), "standard input");
        assert_false(lm_model_source_random(m));
        check_in_order(m);
        must(lm_model_source_file(m, "state.json", 100, &text, &found, &e), &e);
        assert_true(found); /* it came behind the weights, before the end */
        lm_buf_fini(&text);
        lm_model_source_close(m);
        assert_int_equal(pipe_end(), 0);
        assert_int_equal(said[0], 0);
    }
}

/* The tars are those that tar(1) reads, and their bytes do not depend on the clock. */
static void test_tars_of_other_programs(void **state)
{
    (void)state;
    write_model("m", 0);
    write_model("a.tar", 0);
    sh("mkdir x && tar -C x -xf a.tar && diff -r x m && touch -d @7 m/* && tar -cf b.tar m && tar "
       "-C "
       "m -cf c.tar . && (cd m && tar -czf ../d.tar.gz *)");
    for (const char *const *name = (const char *const[]){ "b.tar", "c.tar", "d.tar.gz", NULL };
         *name; name++) {
        lm_model_source *m = open_model(*name);
        check_in_order(m);
        lm_model_source_close(m);
    }
    sleep(1);
    write_model("b.tar.gz", 0);
    sh("gunzip -c b.tar.gz | cmp - a.tar && cp b.tar.gz c.tar.gz && rm b.tar.gz");
    write_model("b.tar.gz", 0);
    sh("cmp b.tar.gz c.tar.gz");
}

static void test_spooled(void **state)
{
    lm_err e = { 0 };
    double x[COUNT];
    (void)state;

    write_model("m.tar", 0);
    pipe_from("cat m.tar");
    lm_model_source *m = open_model("-");
    const lm_st_tensor *t2 = lm_model_source_find(m, "t2"), *t0 = lm_model_source_find(m, "t0"),
                       *t6 = lm_model_source_find(m, "t6");
    check_tensor(m, t0);
    assert_false(lm_model_source_random(m));
    assert_null(lm_model_source_data(m, t0));
    check_tensor(m, t6); /* out of order: the rest goes to disk */
    assert_non_null(strstr(said, "spooled to"));
    assert_true(lm_model_source_random(m));
    check_tensor(m, t2);
    check_tensor(m, t0); /* still in memory */
    assert_non_null(lm_model_source_data(m, t2));
    assert_true(lm_model_source_aligned(m, t2));
    lm_model_source_forget(m, t2);
    check_tensor(m, t2);
    lm_model_source_close(m);
    assert_int_equal(pipe_end(), 0);
    sh("test $(ls -A | wc -l) -eq 1"); /* no spool is left */

    pipe_from("cat m.tar");
    m = open_model("-");
    check_tensor(m, lm_model_source_at(m, 0));
    check_tensor(m, lm_model_source_at(m, 1));
    assert_int_equal(lm_model_source_load(m, lm_model_source_at(m, 0), LM_DTYPE_F64, x, &e),
                     LM_EUSAGE);
    assert_non_null(strstr(e.what, "was read already"));
    lm_model_source_close(m);
    pipe_end();
}

/* Shards, and weights before config.json, cannot be read in one pass. */
static void test_spooled_at_once(void **state)
{
    (void)state;
    write_model("s", 40000);
    sh("tar -cf s.tar -C s . && test $(ls s/*.safetensors | wc -l) -eq 4 && "
       "tar -czf r.tar.gz -C s $(cd s; ls -r)");
    write_model("m", 0);
    sh("tar -cf n.tar -C m model.safetensors config.json");
    for (const char *const *c =
             (const char *const[]){ "cat s.tar", "cat r.tar.gz", "cat n.tar", NULL };
         *c; c++) {
        said[0] = 0;
        pipe_from(*c);
        lm_model_source *m = open_model("-");
        assert_true(lm_model_source_random(m));
        assert_non_null(strstr(said, "spooled to"));
        check_in_order(m);
        lm_model_source_close(m);
        assert_int_equal(pipe_end(), 0);
    }
}

static void test_late_files(void **state)
{
    lm_err e = { 0 };
    lm_buf text = { 0 };
    bool found = true;
    (void)state;

    write_model("m", 0);
    sh("tar -cf m.tar -C m config.json model.safetensors tokenizer.json");
    pipe_from("cat m.tar");
    lm_model_source *m = open_model("-");
    must(lm_model_source_file(m, "tokenizer.json", 100, &text, &found, &e), &e);
    assert_true(found);
    assert_non_null(strstr(said, "spooled"));
    lm_buf_fini(&text);
    check_in_order(m);
    lm_model_source_close(m);
    pipe_end();

    pipe_from("cat m.tar");
    m = open_model("-");
    must(lm_model_source_file_now(m, "tokenizer.json", 100, &text, &found, &e), &e);
    assert_false(found);
    assert_int_equal(lm_model_source_finish(m, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "tokenizer.json follows the weights"));
    lm_model_source_close(m);
    pipe_end();
}

/* The tokenizer of a stream is copied, wherever it is in the stream. */
static void test_tokenizer_from(void **state)
{
    static const char *const order[] = { "config.json tokenizer.json model.safetensors",
                                         "config.json model.safetensors tokenizer.json" };
    (void)state;
    write_model("m", 0);
    for (int i = 0; i < 2; i++) {
        char cmd[256], out[32];
        lm_err e = { 0 };
        lm_st_plan *p = NULL;
        lm_folder *f = NULL;
        const lm_st_tensor *t;
        snprintf(cmd, sizeof cmd, "tar -cf - -C m %s", order[i]);
        snprintf(out, sizeof out, "out%d.tar", i);
        pipe_from(cmd);
        lm_model_source *m = open_model("-");
        must(lm_st_plan_new(&p, &e), &e);
        for (size_t k = 0; k < lm_model_source_count(m); k++)
            must(lm_st_plan_add_like(p, lm_model_source_at(m, k), &e), &e);
        lm_folder_spec spec = {
            .config = lm_model_source_config(m), .tokenizer_from = m, .plan = p, .keep_order = true
        };
        must(lm_folder_create(in(out), false, NULL, &spec, &f, &e), &e);
        while (!lm_model_source_next(m, &t, &e) && t) {
            float x[COUNT];
            must(lm_model_source_read(m, t, 0, x, sizeof x, &e), &e);
            must(lm_folder_write(f, x, sizeof x, &e), &e);
        }
        must(lm_folder_commit(f, &e), &e);
        lm_st_plan_free(p);
        lm_model_source_close(m);
        assert_int_equal(pipe_end(), 0);
        assert_int_equal(said[0], 0);
        m = open_model(out);
        check_in_order(m);
        assert_non_null(lm_bundle_find(lm_model_source_bundle(m), "tokenizer.json"));
        lm_model_source_close(m);
    }
}

static void test_lone(void **state)
{
    lm_err e = { 0 };
    lm_bundle *b = NULL;
    (void)state;

    write_model("m.safetensors", 0);
    must(lm_bundle_open(in("m.safetensors"), NULL, &b, &e), &e);
    assert_int_equal(lm_bundle_kind_of(b), LM_BUNDLE_FILE);
    assert_int_equal(lm_bundle_count(b), 1);
    assert_string_equal(lm_bundle_at(b, 0)->name, "m.safetensors");
    lm_bundle_close(b);
    pipe_from("cat m.safetensors");
    lm_model_source *m = open_model("-");
    assert_null(lm_model_source_config(m));
    check_in_order(m);
    lm_model_source_close(m);
    assert_int_equal(pipe_end(), 0);
    sh("mv m.safetensors plain"); /* the form follows from the content */
    m = open_model("plain");
    check_in_order(m);
    lm_model_source_close(m);
}

/* ---- What is refused ---- */

/* Open and read all of `name` (NULL: of the pipe from `feed`): this failure. */
static void refuse(const char *feed, const char *name, lm_code code, const char *message)
{
    lm_bundle_opts o = opts();
    lm_err e = { 0 };
    lm_model_source *m = NULL;
    char all[800];

    if (!name)
        pipe_from(feed);
    lm_code rc = lm_model_source_open(name ? in(name) : "-", &o, &m, &e);
    if (!rc)
        rc = lm_model_source_finish(m, &e);
    lm_model_source_close(m);
    if (!name)
        pipe_end();
    snprintf(all, sizeof all, "%s: %s: %s", e.where, e.what, e.todo);
    if (rc != code || !strstr(all, message))
        fail_msg("%s: %d '%s' instead of %d '%s'", name ? name : feed, rc, all, code, message);
}

/* As a file and through a pipe. */
static void refuse_both(const char *name, const char *message)
{
    char cat[300];
    snprintf(cat, sizeof cat, "cat %s", name);
    refuse(NULL, name, LM_EFORMAT, message);
    refuse(cat, NULL, LM_EFORMAT, message);
}

/* "name=bytes " of every file of `of`, read forward; the failure of the walk. */
static lm_code list_files(const char *of, char out[400], lm_err *e)
{
    lm_bundle_opts o = opts();
    lm_bundle *b = NULL;
    const lm_bundle_file *f;
    char data[4096];
    size_t got = 1;
    lm_code rc = lm_bundle_open(of, &o, &b, e);

    *out = 0;
    while (!rc && !(rc = lm_bundle_next(b, &f, e)) && f) {
        size_t n = strlen(out);
        snprintf(out + n, 400 - n, "%s=", f->name);
        got = 1;
        while (!rc && got && !(rc = lm_bundle_read(b, data, sizeof data, &got, e))) {
            n = strlen(out);
            snprintf(out + n, 400 - n, "%.*s", (int)got, data);
        }
        strncat(out, " ", 399 - strlen(out));
    }
    lm_bundle_close(b);
    return rc;
}

static void check_files(const char *make, const char *tar, const char *want)
{
    lm_err e = { 0 };
    char got[400], cat[300];

    sh(make);
    for (int piped = 0; piped < 2; piped++) {
        snprintf(cat, sizeof cat, "cat %s", tar);
        if (piped)
            pipe_from(cat);
        lm_code rc = list_files(piped ? "-" : in(tar), got, &e);
        if (piped)
            pipe_end();
        if (rc || strcmp(got, want) != 0)
            fail_msg("%s%s: '%s' instead of '%s': %s", tar, piped ? ", piped" : "", got, want,
                     e.what);
    }
}

/* tar stores a file that it meets again as a hard link, as each file of a run under tar -h: in a
 * checkpoint first, or beside it first. */
static void test_hard_links(void **state)
{
    lm_err e = { 0 };
    char got[400];
    (void)state;
    sh("mkdir -p r/step-000002 r/step-000001 && printf one > r/step-000001/config.json && "
       "printf two > r/step-000002/config.json && printf w > r/step-000002/a.safetensors && "
       "printf s > r/step-000002/state.json && printf s > r/step-000001/state.json && "
       "ln -s step-000002 r/latest && ln -s latest/config.json latest/a.safetensors r");
    check_files("tar -chf below.tar r/latest r/config.json r/a.safetensors r/step-000001 "
                "r/step-000002",
                "below.tar", "config.json=two a.safetensors=w ");
    check_files("tar -chf beside.tar r/config.json r/step-000002 r/a.safetensors r/latest",
                "beside.tar", "config.json=two a.safetensors=w ");
    check_files("tar --sort=name -chf dotted.tar -C r .", "dotted.tar",
                "a.safetensors=w config.json=two ");
    /* of a file that was read, only in a map */
    sh("mkdir k && printf x > k/a.json && ln k/a.json k/b.json && tar -cf twin.tar k/a.json "
       "k/b.json");
    if (list_files(in("twin.tar"), got, &e) || strcmp(got, "a.json=x b.json=x ") != 0)
        fail_msg("'%s': %s", got, e.what);
    refuse("cat twin.tar", NULL, LM_EUSAGE,
           "its member 'k/b.json' is a link to 'k/a.json', whose bytes have passed in the stream");
    /* nothing but members before it */
    sh("cp twin.tar lone.tar && tar --delete -f lone.tar k/a.json && tar -cPf outside.tar "
       "--transform='flags=h;s,^k/a.json$,/etc/passwd,' k/a.json k/b.json");
    refuse_both("lone.tar", "'k/b.json' is a link to 'k/a.json', which is not before it");
    refuse_both("outside.tar", "is a link to '/etc/passwd', which is not before it");
    /* in a folder that is skipped, whatever they name */
    sh("mkdir -p f/sub && printf x > f/a.json && printf y > f/sub/y && ln f/sub/y f/sub/z && "
       "printf y > f/.h && ln f/.h f/.i && tar -cf skipped.tar f/a.json f/sub/y f/sub/z f/.h f/.i "
       "&& "
       "tar --delete -f skipped.tar f/sub/y f/.h");
    check_files("true", "skipped.tar", "a.json=x ");
}

static void test_bad_tars(void **state)
{
    (void)state;
    write_model("m", 0);
    sh("tar -cPf abs.tar $PWD/m/config.json m/model.safetensors");
    refuse_both("abs.tar", "has an unsafe");
    sh("tar -cPf up.tar --transform='s,m/,../,' m");
    refuse_both("up.tar", "has an unsafe");
    sh("cp -r m l && ln -s /etc/passwd l/a.json && tar -cf link.tar l");
    refuse_both("link.tar", "link or a device");
    sh("rm l/a.json && mkfifo l/a && tar -cf pipe.tar l");
    refuse_both("pipe.tar", "link or a device");
    sh("tar -cf twice.tar -C m config.json model.safetensors && tar -rf twice.tar -C m "
       "config.json");
    refuse_both("twice.tar", "'config.json' twice");
    sh("mkdir two && cp m/config.json two && tar -cf two.tar m/model.safetensors two/config.json");
    refuse_both("two.tar", "different folders");
    /* 10 TB: base-256 of 10^13 in the size field, and its checksum made right */
    sh("tar --format=ustar -cf huge.tar -C m config.json && printf "
       "'\\200\\0\\0\\0\\0\\0\\011\\030\\116\\162\\240\\0' | dd of=huge.tar bs=1 seek=124 "
       "conv=notrunc 2> dd.err && printf '        ' | dd of=huge.tar bs=1 seek=148 conv=notrunc 2> "
       "dd.err && s=$(head -c 512 huge.tar | od -An -v -tu1 | tr -s ' ' '\\n' | awk '{s+=$1} END "
       "{printf \"%06o\", s}') && printf \"$s\\0 \" | dd of=huge.tar bs=1 seek=148 conv=notrunc 2> "
       "dd.err");
    refuse(NULL, "huge.tar", LM_EFORMAT, "has 9728"); /* what follows the header in the file */
    refuse("cat huge.tar", NULL, LM_EFORMAT, "Truncated");
}

static void test_truncated(void **state)
{
    (void)state;
    write_model("m", 0);
    write_model("m.tar", 0);
    write_model("m.tar.gz", 0);
    write_model("m.lmz", 0);
    sh("head -c 60000 m.tar > a.tar && head -c 30000 m.tar.gz > a.tar.gz && "
       "head -c 30000 m/model.safetensors > a.safetensors && head -c 4 m/model.safetensors > b && "
       "head -c $(($(stat -c %s m.lmz) / 2)) m.lmz > a.lmz");
    refuse(NULL, "a.tar", LM_EFORMAT, "truncated");
    refuse("cat a.tar", NULL, LM_EFORMAT, "runcated");
    refuse(NULL, "a.tar.gz", LM_EFORMAT, "damaged or truncated gzip");
    refuse("cat a.tar.gz", NULL, LM_EFORMAT, "damaged or truncated gzip");
    refuse(NULL, "a.safetensors", LM_EFORMAT, "header says");
    refuse("cat a.safetensors", NULL, LM_EFORMAT, "before the end of t1");
    refuse("cat a.lmz", NULL, LM_EFORMAT, "standard input");
    refuse("cat b", NULL, LM_EUSAGE, "is not a model");
    refuse("printf ''", NULL, LM_EFORMAT, "it is empty");
    refuse("echo hello", NULL, LM_EUSAGE, "is not a model");
    sh("echo hello > b");
    refuse(NULL, "b", LM_EUSAGE, "is not a model");
    /* cut between members, where a decoder takes the end for the end */
    sh("n=$(tar -tRvf m.tar | awk '/late.txt/ {print $2}' | tr -d :) && head -c $((n * 512)) m.tar "
       "> "
       "cut.tar");
    refuse_both("cut.tar", "no end mark");
    sh("printf xx >> m/model.safetensors");
    refuse("cat m/model.safetensors", NULL, LM_EFORMAT, "bytes follow the last tensor");
    sh("tar -cf long.tar -C m config.json model.safetensors");
    refuse("cat long.tar", NULL, LM_EFORMAT, "header says");
}

/* ---- Outputs ---- */

static void test_outputs_whole_or_not(void **state)
{
    (void)state;
    for (int i = 0; i < FORMS; i++) {
        lm_bundle_opts o = opts();
        lm_bundle_out *b = NULL;
        lm_err e = { 0 };
        must(lm_bundle_create(in(forms[i]), false, &o, &b, &e), &e);
        must(lm_bundle_put(b, "a.json", "{}", 2, &e), &e);
        assert_int_equal(lm_bundle_put(b, "a.json", "{}", 2, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
        assert_int_equal(lm_bundle_put(b, "../b", "{}", 2, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
        must(lm_bundle_begin(b, "c", 5, &e), &e);
        assert_int_equal(lm_bundle_write(b, "123456", 6, &e), LM_EBUG);
        e = (lm_err){ 0 };
        must(lm_bundle_write(b, "1234", 4, &e), &e);
        assert_int_equal(lm_bundle_begin(b, "d", 0, &e), LM_EBUG);
        assert_false(lm_path_exists(in(forms[i])));
        e = (lm_err){ 0 };
        if (i % 2)
            assert_int_equal(lm_bundle_commit(b, &e), LM_EBUG);
        else
            lm_bundle_drop(b);
        sh("test -z \"$(ls -A)\"");
    }
}

static void test_lone_output(void **state)
{
    lm_err e = { 0 };
    lm_bundle_out *b = NULL;
    (void)state;

    must(lm_bundle_create(in("m.safetensors"), false, NULL, &b, &e), &e);
    must(lm_bundle_put(b, "config.json", "{}", 2, &e), &e);
    must(lm_bundle_put(b, "model.safetensors", "abc", 3, &e), &e);
    assert_int_equal(lm_bundle_put(b, "optimizer.safetensors", "abc", 3, &e), LM_EUSAGE);
    lm_bundle_drop(b);
    e = (lm_err){ 0 };
    must(lm_bundle_create(in("m.safetensors"), false, NULL, &b, &e), &e);
    must(lm_bundle_put(b, "config.json", "{}", 2, &e), &e);
    must(lm_bundle_put(b, "model.safetensors", "abc", 3, &e), &e);
    must(lm_bundle_commit(b, &e), &e);
    sh("test \"$(cat m.safetensors)\" = abc");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_form, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_tars_of_other_programs, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_spooled, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_spooled_at_once, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_late_files, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_tokenizer_from, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_lone, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_hard_links, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_bad_tars, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_truncated, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_outputs_whole_or_not, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_lone_output, make_dir, drop_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
