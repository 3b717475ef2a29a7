/* SPDX-License-Identifier: Apache-2.0 */
/* serve.c -- generate --serve-batch. */
#include "generate/serve.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/model.h"
#include "kv/tier_file.h"
#include "model/tiers.h"

/* ---- options ---- */

/* The last ':' of --kv-disk ends the folder. */
static void split_disk(void)
{
    static char dir[PATH_MAX];
    const char *text = opt.serve.disk, *colon = strrchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : 0;
    if (n < 1 || n >= sizeof dir || !lm_parse_bytes(colon + 1, &opt.serve.disk_bytes) ||
        opt.serve.disk_bytes < 1)
        lm_misuse(&tool, "--kv-disk", "give a folder and a size such as cache/:40G",
                  "\"%s\" is not DIR:SIZE", text);
    memcpy(dir, text, n);
    if (!lm_path_is_dir(dir))
        lm_misuse(&tool, "--kv-disk", "make it, or name another", "%s is not a folder", dir);
    opt.serve.dir = dir;
}

/* Sizes that the machine does not have are refused before anything is read. */
static void check_tiers(void)
{
    char need[32], have[32];
    struct statvfs fs;
    double memory = (double)lm_mem_available(), host = (double)opt.serve.host;
    if (memory > 0 && host > memory)
        lm_misuse(&tool, "--kv-host", "give at most as much", "%s, but %s of memory are free",
                  lm_show_bytes(host, need), lm_show_bytes(memory, have));
    if (!opt.serve.disk || statvfs(opt.serve.dir, &fs))
        return;
    double room = (double)fs.f_bavail * (double)fs.f_frsize, disk = (double)opt.serve.disk_bytes;
    if (disk > room)
        lm_misuse(&tool, "--kv-disk", "give at most as much, or name another folder",
                  "%s, but %s has %s free", lm_show_bytes(disk, need), opt.serve.dir,
                  lm_show_bytes(room, have));
}

void generate_check_serve(void)
{
    static const char *const only[] = { "kv-memory", "kv-host", "kv-disk", "kv-down", "metrics" };
    char option[32];
    for (int i = 0; i < 5 && !opt.serve.batch; i++)
        if (lm_given(&tool, only[i])) {
            snprintf(option, sizeof option, "--%s", only[i]);
            lm_misuse(&tool, option, "give --serve-batch N, too", "has no effect without it");
        }
    if (opt.serve.batch && lm_given(&tool, "batch-size"))
        lm_misuse(&tool, "--batch-size", "give one of them",
                  "cannot be combined with --serve-batch");
    if (opt.serve.down && !opt.serve.host && !opt.serve.disk)
        lm_misuse(&tool, "--kv-down", "give --kv-host or --kv-disk, too",
                  "has no effect without a further place for pages");
    if (opt.serve.disk)
        split_disk();
    check_tiers();
    if (tool.metrics && !strcmp(tool.metrics, "-") && (!tool.output || !strcmp(tool.output, "-")))
        lm_misuse(&tool, "--metrics", "name a file, or give -o",
                  "the answers are written to standard output");
    if (tool.metrics) {
        lm_refuse_same(&tool, tool.metrics, tool.argv[0]);
        lm_refuse_ending(&tool, tool.metrics, LM_MAKES_TEXT);
        for (int i = 1; i < tool.argc; i++)
            lm_refuse_text(&tool, tool.metrics, tool.argv[i]);
    }
    if (opt.any_order && opt.prompt.n && !tool.json)
        lm_misuse(&tool, "--as-they-come", "add --json", "plain text has no numbers of prompts");
}

/* ---- sizes ---- */

static void say_sizes(const generate_work *w)
{
    char pages[32], one[32], coded[32];
    const lm_serve_room *r = &w->room;
    if (w->down.plan)
        lm_say(&tool, LM_LOG_INFO, "--kv-down %s: a page takes %s in host and disk, %s here",
               w->down.plan->text, lm_show_bytes((double)r->size.below, coded),
               lm_show_bytes((double)r->size.page, one));
    lm_say(&tool, LM_LOG_INFO,
           "%" PRId64 " texts at a time, %" PRId64 " pages of %" PRId64
           " tokens (%s each, %s in all), %" PRId64 " of the host, %" PRId64
           " of the disk; bookkeeping: %zu bytes for each in use",
           r->pages.sequences, r->pages.pages, r->pages.page,
           lm_show_bytes((double)r->size.page, one),
           lm_show_bytes((double)r->pages.pages * (double)r->size.page, pages), r->tiers.host,
           r->tiers.disk,
           lm_sched_page_cost(r->pages.page) + (r->tiers.disk ? lm_tier_file_page_cost() : 0));
}

/* Texts that wait because of the plain tokens of those at work. */
static void say_fewer(const generate_work *w, int64_t asked)
{
    char tail[32];
    const lm_serve_room *r = &w->room;
    if (r->pages.sequences < asked)
        lm_say(&tool, LM_LOG_NOTICE,
               "%s: the memory holds %" PRId64 " of %" PRId64
               " texts at a time, each with %s of plain tokens; the others wait",
               opt.serve.memory ? "--kv-memory" : "--serve-batch", r->pages.sequences, asked,
               lm_show_bytes((double)r->size.tail, tail));
}

/* A cache that is coded already in the same way is not coded again below the device. */
static lm_code open_down(generate_work *w, lm_dtype type, lm_err *e)
{
    lm_code rc = !opt.serve.down ? LM_OK
                                 : lm_cache_plan_open(opt.serve.down, &w->model.config, type,
                                                      w->model.src, &w->down, e);
    if (rc)
        generate_name_spec("--kv-down", e);
    else if (w->down.plan && w->caches.plan && !strcmp(w->down.plan->text, w->caches.plan->text))
        lm_cache_plan_fini(&w->down);
    return rc;
}

/* Pages on the host; those of a device are in its memory. */
static lm_code check_memory(const generate_work *w, lm_err *e)
{
    char need[32], have[32];
    double memory = (double)lm_mem_available(), asked = (double)opt.serve.memory;
    if (!w->backend->host_memory || !(memory > 0) || asked <= memory)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "--kv-memory", "give at most as much",
                   "%s, but %s of memory are free", lm_show_bytes(asked, need),
                   lm_show_bytes(memory, have));
}

lm_code generate_open_served(generate_work *w, lm_dtype type, lm_err *e)
{
    if (open_down(w, type, e) || check_memory(w, e))
        return e->code;
    int64_t all = opt.prompt.n * opt.samples, batch = opt.serve.batch;
    const lm_serve_sizes ask = { .sequences = !w->in && all < batch ? all : batch,
                                 .context = w->context,
                                 .shorter = w->in && !opt.context,
                                 .memory = (size_t)opt.serve.memory,
                                 .host = (size_t)opt.serve.host,
                                 .disk = (size_t)opt.serve.disk_bytes,
                                 .kv = w->caches.plan,
                                 .state_codes = w->states.plan,
                                 .down = w->down.plan,
                                 .name = { opt.serve.memory ? "--kv-memory" : "--serve-batch",
                                           "--kv-host", "--kv-disk" } };
    if (w->caches.plan && w->caches.plan->policy)
        return lm_fail(e, LM_EUSAGE, "--kv", "leave the policy, or --serve-batch, out",
                       "tokens cannot be dropped from pages that texts share");
    if (lm_serve_choose(&w->model, type, w->backend, &ask, &w->room, e)) {
        if (w->down.plan && !strcmp(e->where, w->down.plan->text))
            lm_err_in(e, "--kv-down");
        if (!strcmp(e->where, "states"))
            generate_name_spec("--states", e);
        return e->code;
    }
    w->room.tiers.dir = opt.serve.dir;
    w->context = w->room.pages.context;
    if (lm_paged_new(&w->model, type, &w->room.pages, w->backend, &w->paged, e) ||
        generate_serve_adapters(w, e))
        return e->code;
    say_fewer(w, ask.sequences);
    say_sizes(w);
    return LM_OK;
}

/* ---- metrics ---- */

lm_code generate_open_metrics(generate_work *w, lm_err *e)
{
    const lm_metrics_mode mode = tool.force ? LM_METRICS_REPLACE : LM_METRICS_NEW;
    if (!tool.metrics)
        return LM_OK;
    if (tool.output && strcmp(tool.output, "-")) /* the answers do not depend on their reader */
        lm_outlast_readers(&tool);
    return lm_metrics_open(tool.metrics, mode, &tool.sink, &w->metrics, e);
}

static lm_code begin_metrics(const generate_work *w, lm_err *e)
{
    lm_metrics_begin_run(w->metrics, tool.name, LM_VERSION, tool.full_argc, tool.full_argv,
                         tool.seed);
    lm_metrics_str(w->metrics, "device", w->backend->name);
    lm_metrics_int(w->metrics, "texts", w->room.pages.sequences);
    lm_metrics_int(w->metrics, "page_tokens", w->room.pages.page);
    lm_metrics_int(w->metrics, "page_bytes", (int64_t)w->room.size.page);
    return lm_metrics_end(w->metrics, e);
}

lm_code generate_close_metrics(generate_work *w, lm_code rc, lm_err *e)
{
    lm_err second = { 0 };
    lm_metrics *m = w->metrics;
    w->metrics = NULL;
    lm_metrics_begin(m, "end");
    lm_metrics_str(m, "status", rc ? "failed" : lm_stopping() ? "stopped" : "done");
    lm_metrics_int(m, "step", w->kv.sched.steps);
    lm_metrics_f64(m, "seconds", w->kv.seconds);
    lm_metrics_end(m, &second);
    if (!rc)
        lm_metrics_settle(m);
    lm_metrics_close(m, &second);
    if (second.code && !rc)
        *e = second;
    return rc ? rc : second.code;
}

/* ---- the work ---- */

static void warn(void *ctx, const lm_err *why)
{
    (void)ctx;
    lm_say(&tool, LM_LOG_WARN, "--kv-disk: %s: %s%s%s: the disk is no longer used", why->where,
           why->what, why->sys ? ": " : "", why->sys ? strerror(why->sys) : "");
}

lm_code generate_serve(generate_work *w, const lm_complete_opts *o, const lm_complete_hooks *h,
                       lm_err *e)
{
    const lm_serve_opts how = {
        .tiers = w->room.tiers, .measure = true, .warn = warn, .metrics = w->metrics
    };
    if (w->metrics && begin_metrics(w, e))
        return e->code;
    return lm_serve_run(w->paged, &how, w->tok, o, h, &w->st, &w->kv, e);
}

/* ---- the report ---- */

static double share(double a, double b)
{
    return b > 0 ? a / b : 0;
}

lm_code generate_serve_record(generate_work *w, lm_err *e)
{
    const lm_serve_stats *k = &w->kv;
    lm_jw j;
    w->line.len = 0;
    lm_jw_begin(&j, &w->line, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_obj(&j, "kv");
    if (w->caches.plan)
        lm_jw_str(&j, "spec", w->caches.plan->text);
    lm_jw_f64(&j, "bytes_per_token", (double)k->page_bytes / (double)w->room.pages.page);
    lm_jw_int(&j, "pages", w->room.pages.pages);
    lm_jw_int(&j, "hits", k->sched.hits);
    lm_jw_f64(&j, "hit_rate", share((double)k->sched.hits, (double)k->sched.pages));
    lm_jw_obj(&j, "moves");
    lm_jw_int(&j, "down", k->tiers.down);
    lm_jw_int(&j, "up", k->tiers.up);
    lm_jw_int(&j, "out", k->tiers.out);
    lm_jw_int(&j, "in", k->tiers.in);
    lm_jw_int(&j, "bytes", (int64_t)k->tiers.bytes);
    lm_jw_int(&j, "saved_bytes", (int64_t)k->tiers.saved);
    lm_jw_close_obj(&j);
    lm_jw_f64(&j, "stalls_seconds", k->tiers.stalls);
    lm_jw_obj(&j, "copies");
    lm_jw_int(&j, "pages", k->tiers.copied);
    lm_jw_f64(&j, "seconds", k->tiers.copy_seconds);
    lm_jw_close_obj(&j);
    lm_jw_int(&j, "waits", k->sched.waits);
    lm_jw_int(&j, "recomputed", k->sched.dropped_rows);
    lm_jw_int(&j, "peak_bytes", (int64_t)k->peak_bytes);
    lm_jw_close_obj(&j);
    lm_jw_close_obj(&j);
    if (lm_jw_end(&j) || lm_buf_add(&w->line, "\n", 1, e))
        return e->code;
    return generate_write(w, w->line.data, w->line.len, e);
}

void generate_serve_summary(const generate_work *w)
{
    const lm_serve_stats *k = &w->kv;
    const lm_complete_stats *s = &w->st;
    char bytes[32], moved[32];
    lm_say(&tool, LM_LOG_NOTICE,
           "prompt %" PRId64 " token%s, new %" PRId64 " token%s; in all %.1f new tokens/s",
           s->prompt_tokens, lm_plural((uint64_t)s->prompt_tokens), s->new_tokens,
           lm_plural((uint64_t)s->new_tokens), share((double)s->new_tokens, k->seconds));
    lm_say(&tool, LM_LOG_INFO,
           "caches: %s at most, %.0f %% of prompts' pages found, %s moved, %.2f s of stalls, "
           "%" PRId64 " tokens computed again, pages take %.2f %% of the time",
           lm_show_bytes((double)k->peak_bytes, bytes),
           100 * share((double)k->sched.hits, (double)k->sched.pages),
           lm_show_bytes(k->tiers.bytes, moved), k->tiers.stalls, k->sched.dropped_rows,
           100 * share(k->pages_seconds, k->seconds));
}
