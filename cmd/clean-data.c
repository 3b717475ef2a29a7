/* SPDX-License-Identifier: Apache-2.0 */
/* clean-data -- filter and deduplicate documents.  See man/man1/clean-data.1. */
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/input_opts.h"
#include "common/tool.h"
#include "format/provenance.h"
#include "text/clean_run.h"

#define DEFAULT_RULE(id, set, shape, name, dflt, max, help) { dflt, true },

static struct {
    lm_input_args in;
    lm_clean_opts clean;
    const char *rules, *language, *stop_file, *top_ngrams, *dup_ngrams;
    const char *dedup, *report, *dropped;
    int64_t ngram, bands, rows;
    double similarity;
} opt = { .in = LM_INPUT_ARGS_DEFAULT,
          .clean = { .rule = { LM_CLEAN_RULES(DEFAULT_RULE) }, .strip_citations = true },
          .rules = "none",
          .language = "none",
          .dedup = "none",
          .ngram = 5,
          .bands = 14,
          .rows = 8,
          .similarity = 0.7 };

static const char *const dedup_choices[] = { "none", "exact", "minhash", NULL };

/* One row of the table for each rule that has an option of its own. */
#define ROW_NUM(id, name, dflt, max, help) \
    LM_REAL(0, name, &opt.clean.rule[LM_RULE_##id].limit, "X", 0, max, help " [" #dflt "]"),
#define ROW_BYLANG(id, name, dflt, max, help) \
    LM_REAL(0, name, &opt.clean.rule[LM_RULE_##id].limit, "X", 0, max, help " [of --language]"),
#define ROW_FLAG(id, name, dflt, max, help) \
    LM_FLAG(0, name, &opt.clean.rule[LM_RULE_##id].on, help),
#define ROW_LIST(id, name, dflt, max, help)
#define RULE_ROW(id, set, shape, name, dflt, max, help) ROW_##shape(id, name, dflt, max, help)

static lm_tool tool;

static const lm_opt options[] = {
    LM_GROUP("Input"),
    LM_INPUT_OPTIONS(opt.in),
    LM_GROUP("What is dropped"),
    LM_STR('r', "rules", &opt.rules, "LIST", "of gopher, c4, fineweb; or all, none [none]"),
    LM_CHOICE('l', "language", &opt.language, "CODE", lm_language_codes,
              "gopher: its stop words and length of words: en, de, ... [none]"),
    LM_STR(0, "stop-words", &opt.stop_file, "FILE", "gopher: stop words, in place of its own"),
    LM_CHOICE('d', "dedup", &opt.dedup, "WAY", dedup_choices,
              "duplicates: none, exact, or minhash for near ones too [none]"),
    LM_COUNT(0, "ngram", &opt.ngram, "N", 1, 64, "minhash: words in a shingle [5]"),
    LM_COUNT(0, "bands", &opt.bands, "N", 1, 1024, "minhash: bands of the signature [14]"),
    LM_COUNT(0, "rows", &opt.rows, "N", 1, 1024, "minhash: values in a band [8]"),
    LM_REAL(0, "similarity", &opt.similarity, "X", 0, 1,
            "minhash: estimated similarity of duplicates [0.7]"),
    LM_GROUP("Report"),
    LM_STR(0, "report", &opt.report, "FILE", "write the counts of every rule there, as JSON"),
    LM_FLAG(0, "json", &tool.json, "write them to standard output, or error beside documents"),
    LM_STR(0, "dropped", &opt.dropped, "FILE", "write what is dropped there, with the rule"),
    LM_GROUP("Rules (drop a document when ...; 'line:' drops a line)"),
    LM_STR(0, "gopher-top-ngrams", &opt.top_ngrams, "X,X,X",
           "characters in the top 2-, 3-, 4-gram [0.2,0.18,0.16]"),
    LM_STR(0, "gopher-dup-ngrams", &opt.dup_ngrams, "X,...",
           "in repeated 5- to 10-grams [0.15,0.14,0.13,0.12,0.11,0.1]"),
    LM_CLEAN_RULES(RULE_ROW) LM_FLAG(0, "c4-citations", &opt.clean.strip_citations,
                                     "cut [1], [edit] and [citation needed] out of lines"),
    LM_END
};

static const char *const examples[] = {
    "clean-data -r all --language en --dedup minhash raw.jsonl.zst > clean.jsonl",
    "zcat a.jsonl.gz | clean-data -r gopher -d exact --report r.json -o clean.jsonl", NULL
};

static const char *const side[] = { "report", "dropped", NULL };

static lm_tool tool = {
    .name = "clean-data",
    .args = "[FILE ...]",
    .brief = "filter and deduplicate JSONL, plain text and archives",
    .opts = options,
    .side = side,
    .use = LM_USE_HISTORY | LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED,
    .max_args = -1,
    .filter = true,
    .examples = examples,
};

/* ---- options that are lists ---- */

static void read_rules(void)
{
    static const char *const names[] = { "gopher", "c4", "fineweb", "all", "none", NULL };
    const char *p = opt.rules;
    bool none = false, more = true;
    while (more) {
        size_t n = strcspn(p, ",");
        char word[32];
        int k = 0;
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        while (names[k] && strcmp(names[k], word) != 0)
            k++;
        if (!names[k]) {
            const char *near = lm_nearest(word, names);
            char todo[64];
            snprintf(todo, sizeof todo,
                     near ? "did you mean %s?" : "choose from gopher, c4, fineweb", near);
            lm_misuse(&tool, "--rules", todo, "unknown set of rules '%s'", word);
        }
        for (int s = 0; s < LM_CLEAN_SETS; s++)
            opt.clean.set[s] |= k == s || k == 3;
        none |= k == 4;
        more = p[n] == ',';
        p += n + more;
    }
    for (int s = 0; s < LM_CLEAN_SETS; s++)
        if (none && opt.clean.set[s])
            lm_misuse(&tool, "--rules", "leave one of them out",
                      "'none' cannot be combined with a set");
    /* FineWeb's own recipe leaves out this rule of C4: it drops much text for little gain */
    if (opt.clean.set[LM_CLEAN_FINEWEB] && !lm_given(&tool, "c4-terminal-punct"))
        opt.clean.rule[LM_RULE_LINE_PUNCT].on = false;
}

/* Parse n shares between 0 and 1 into the rules from `first` on. */
static void read_shares(const char *name, const char *list, int first, int n)
{
    double v[16];
    int got = 0;
    bool good = !list || (lm_parse_list(list, v, n, &got) && got == n);
    for (int i = 0; i < got && good; i++) {
        good = v[i] >= 0 && v[i] <= 1;
        opt.clean.rule[first + i].limit = v[i];
    }
    if (!good)
        lm_misuse(&tool, name, "separate them by commas", "%d number%s from 0 to 1 are needed", n,
                  lm_plural(n));
}

/* ---- options that go with others ---- */

static void need_set(const char *option, lm_clean_set set)
{
    static const char *const sets[LM_CLEAN_SETS] = { "gopher", "c4", "fineweb" };
    char name[64];
    if (!lm_given(&tool, option) || opt.clean.set[set])
        return;
    snprintf(name, sizeof name, "--%s", option);
    lm_misuse(&tool, name, "add the set to --rules, or leave the option out",
              "belongs to the set '%s', which is not chosen", sets[set]);
}

/* Refuse options without effect: each rule needs its set, MinHash's numbers need MinHash. */
static void check_company(void)
{
    static const char *const minhash[] = { "ngram", "bands", "rows", "similarity" };
    static const char *const gopher[] = { "gopher-top-ngrams", "gopher-dup-ngrams", "language",
                                          "stop-words" };
    for (int r = 0; r < LM_RULES; r++)
        if (r < LM_RULE_TOP_2 || r > LM_RULE_DUP_10)
            need_set(lm_clean_rule_name((lm_clean_rule)r), lm_clean_rule_set((lm_clean_rule)r));
    for (int i = 0; i < 4; i++)
        need_set(gopher[i], LM_CLEAN_GOPHER);
    need_set("c4-citations", LM_CLEAN_C4);
    for (int i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof name, "--%s", minhash[i]);
        if (lm_given(&tool, minhash[i]) && opt.dedup[0] != 'm')
            lm_misuse(&tool, name, "add --dedup minhash, or leave the option out",
                      "belongs to MinHash, which is not chosen");
    }
}

static lm_code check_stop_limit(const lm_stop_words *stop, lm_err *e)
{
    double want = opt.clean.rule[LM_RULE_STOP_WORDS].limit;

    if (!lm_given(&tool, "gopher-stop-words"))
        return LM_OK;
    if (!stop)
        return lm_fail(e, LM_EUSAGE, "--gopher-stop-words", "name a --language or --stop-words",
                       "no stop words are set");
    if (want > (double)lm_stop_words_count(stop))
        return lm_fail(e, LM_EUSAGE, "--gopher-stop-words", NULL,
                       "%g different ones are more than the %zu that are set", want,
                       lm_stop_words_count(stop));
    return LM_OK;
}

/* Thresholds that the language sets unless an option does. */
static lm_code read_language(lm_stop_words **stop, lm_err *e)
{
    static const lm_clean_rule len[] = { LM_RULE_MIN_WORD_LEN, LM_RULE_MAX_WORD_LEN };
    const lm_language *l = lm_language_find(opt.language);
    lm_buf text = { 0 };
    lm_code rc = LM_OK;

    for (int i = 0; i < 2; i++)
        if (!lm_given(&tool, lm_clean_rule_name(len[i])))
            lm_clean_word_len(&opt.clean, len[i], l);
    if (opt.stop_file)
        rc = lm_file_read(opt.stop_file, 64 << 20, &text, e);
    else if (l)
        rc = lm_buf_add(&text, l->words, strlen(l->words), e);
    if (!rc && (opt.stop_file || l))
        rc = lm_stop_words_new(text.data ? text.data : "", text.len,
                               opt.stop_file ? opt.stop_file : l->code, stop, e);
    lm_buf_fini(&text);
    opt.clean.stop = *stop;
    return rc ? rc : check_stop_limit(*stop, e);
}

/* ---- the report ---- */

static lm_code report_history(lm_jw *w, const lm_input *in, lm_err *e)
{
    lm_history_step step = lm_tool_step(&tool);
    lm_history_input *inputs = NULL;
    lm_code rc = lm_alloc_n(&inputs, (size_t)tool.argc, sizeof *inputs, "inputs", e);
    for (int i = 0; i < tool.argc && !rc; i++)
        inputs[i] = (lm_history_input){ .name = tool.argv[i], .digest = lm_input_digest(in, i) };
    step.inputs = inputs;
    step.n_inputs = (size_t)tool.argc;
    if (!rc)
        rc = lm_history_write(w, "history", &step, e);
    lm_free(inputs);
    return rc;
}

static lm_code make_report(const lm_clean_stats *st, const lm_input *in, lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_int(&w, "documents", st->documents);
    lm_jw_int(&w, "kept", st->kept);
    lm_jw_int(&w, "bytes", st->bytes_in);
    lm_jw_int(&w, "bytes_kept", st->bytes_out);
    lm_jw_int(&w, "invalid_utf8", st->invalid);
    lm_jw_int(&w, "replaced", st->replaced);
    lm_jw_int(&w, "bad_records", opt.in.bad.records);
    lm_jw_int(&w, "bad_parts", opt.in.bad.parts);
    lm_jw_int(&w, "duplicates", st->exact);
    lm_jw_int(&w, "near_duplicates", st->near);
    lm_jw_str(&w, "language", opt.language);
    lm_jw_obj(&w, "dropped");
    for (int r = 0; r < LM_RULES; r++)
        if (opt.clean.set[lm_clean_rule_set((lm_clean_rule)r)] &&
            !lm_clean_rule_is_line((lm_clean_rule)r))
            lm_jw_int(&w, lm_clean_rule_name((lm_clean_rule)r), st->dropped[r]);
    lm_jw_close_obj(&w);
    lm_jw_obj(&w, "lines_dropped");
    for (int r = 0; r < LM_RULES; r++)
        if (opt.clean.set[lm_clean_rule_set((lm_clean_rule)r)] &&
            lm_clean_rule_is_line((lm_clean_rule)r))
            lm_jw_int(&w, lm_clean_rule_name((lm_clean_rule)r), st->lines[r]);
    lm_jw_close_obj(&w);
    lm_code rc = report_history(&w, in, e);
    lm_jw_close_obj(&w);
    lm_code end = lm_jw_end(&w);
    if (!rc && !end && (!out->len || out->data[out->len - 1] != '\n'))
        rc = lm_buf_add(out, "\n", 1, e);
    return rc ? rc : end;
}

static void say_summary(const lm_clean_stats *st, double seconds)
{
    lm_buf b = { 0 };
    char in[32], out[32];
    for (int r = 0; r < LM_RULES; r++)
        if (st->dropped[r])
            lm_buf_addf(&b, NULL, ", %s %lld", lm_clean_rule_name((lm_clean_rule)r),
                        (long long)st->dropped[r]);
    if (st->exact)
        lm_buf_addf(&b, NULL, ", duplicate %lld", (long long)st->exact);
    if (st->near)
        lm_buf_addf(&b, NULL, ", near-duplicate %lld", (long long)st->near);
    if (st->bad)
        lm_buf_addf(&b, NULL, ", bad-record %lld", (long long)st->bad);
    if (st->invalid)
        lm_buf_addf(&b, NULL, ", invalid-utf8 %lld", (long long)st->invalid);
    lm_say(&tool, LM_LOG_NOTICE, "kept %lld of %lld document%s, %s of %s%s%s", (long long)st->kept,
           (long long)st->documents, lm_plural((uint64_t)st->documents),
           lm_show_bytes((double)st->bytes_out, out), lm_show_bytes((double)st->bytes_in, in),
           b.len ? "; dropped by " : "", b.len ? b.data + 2 : "");
    lm_input_args_warn(&tool, &opt.in);
    for (int r = 0; r < LM_RULES; r++)
        if (st->lines[r])
            lm_say(&tool, LM_LOG_INFO, "%s dropped %lld line%s",
                   lm_clean_rule_name((lm_clean_rule)r), (long long)st->lines[r],
                   lm_plural(st->lines[r]));
    lm_say(&tool, LM_LOG_INFO, "%.2f s, %s/s of text", seconds,
           lm_show_bytes((double)st->bytes_in / (seconds > 0 ? seconds : 1), in));
    lm_buf_fini(&b);
}

/* ---- cleaning ---- */

typedef struct {
    lm_out *out, *dropped, *report;
} outputs;

static lm_code open_outputs(outputs *o, const lm_input *in, lm_err *e)
{
    const char *out = tool.output ? tool.output : "-";
    const char *const names[] = { out, opt.dropped, opt.report };
    for (int k = 0; k < 3; k++) {
        lm_refuse_ending(&tool, names[k], LM_MAKES_TEXT);
        if (names[k])
            lm_input_args_refuse(&tool, in, names[k]);
        for (int i = 0; i < k; i++)
            if (names[k] && names[i] && !strcmp(names[k], names[i]))
                return lm_fail(e, LM_EUSAGE, names[k], "give each its own",
                               "two outputs have this name");
    }
    lm_code rc = lm_out_open(out, tool.force, &o->out, e);
    if (!rc && opt.dropped)
        rc = lm_out_open(opt.dropped, tool.force, &o->dropped, e);
    if (!rc && opt.report)
        rc = lm_out_open(opt.report, tool.force, &o->report, e);
    return rc;
}

/* True if the documents go to standard output. */
static bool to_stdout(void)
{
    return !tool.output || !strcmp(tool.output, "-");
}

static lm_code commit(lm_out **o, lm_err *e)
{
    lm_out *one = *o;
    *o = NULL;
    return one ? lm_out_commit(one, e) : LM_OK;
}

/* All outputs are on disk before the first is renamed: a full disk leaves none of them. */
static lm_code finish_all(outputs *o, lm_err *e)
{
    lm_code rc = lm_out_finish(o->out, e);
    if (!rc && o->dropped)
        rc = lm_out_finish(o->dropped, e);
    if (!rc && o->report)
        rc = lm_out_finish(o->report, e);
    return rc;
}

static lm_code finish(outputs *o, const lm_clean_stats *st, const lm_input *in, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = make_report(st, in, &text, e);
    if (!rc && o->report)
        rc = lm_write_all(lm_out_fd(o->report), text.data, text.len, lm_out_path(o->report), e);
    if (!rc)
        rc = finish_all(o, e);
    if (!rc)
        rc = commit(&o->out, e);
    if (!rc)
        rc = commit(&o->dropped, e);
    if (!rc)
        rc = commit(&o->report, e);
    if (!rc && tool.json)
        fwrite(text.data, 1, text.len, to_stdout() ? stderr : stdout);
    lm_buf_fini(&text);
    return rc;
}

static lm_code clean(lm_par *par, lm_err *e)
{
    const lm_input_opts in_opts = lm_input_args_read(&opt.in);
    const lm_dedup_opts dedup = { .near = opt.dedup[0] == 'm',
                                  .ngram = (int)opt.ngram,
                                  .bands = (int)opt.bands,
                                  .rows = (int)opt.rows,
                                  .threshold = opt.similarity,
                                  .seed = (uint64_t)tool.seed };
    outputs o = { 0 };
    lm_input *in = NULL;
    lm_clean_stats st;
    double start = lm_now();
    lm_code rc = lm_input_open(&in_opts, (const char *const *)tool.argv, tool.argc, &in, e);
    if (!rc)
        rc = open_outputs(&o, in, e);
    if (!rc)
        lm_input_files_warn(lm_input_file_list(in), &tool.sink);
    if (!rc) {
        lm_clean_job job = { .in = in,
                             .in_opts = &in_opts,
                             .clean = &opt.clean,
                             .dedup = opt.dedup[0] == 'n' ? NULL : &dedup,
                             .out = lm_out_file(o.out),
                             .out_name = lm_out_path(o.out),
                             .dropped = o.dropped ? lm_out_file(o.dropped) : NULL,
                             .dropped_name = o.dropped ? lm_out_path(o.dropped) : NULL,
                             .sink = &tool.sink };
        rc = lm_clean_stream(&job, par, &st, e);
    }
    if (!rc && !lm_stopping() && st.documents == 0)
        lm_input_args_warn(&tool, &opt.in);
    if (!rc && !lm_stopping() && st.documents == 0)
        rc = lm_fail(e, LM_EFORMAT, tool.argc == 1 ? tool.argv[0] : "inputs",
                     "give at least one document", "no document in it");
    if (!rc && !lm_stopping())
        rc = finish(&o, &st, in, e);
    if (!rc && !lm_stopping())
        say_summary(&st, lm_now() - start);
    lm_out_drop(o.out);
    lm_out_drop(o.dropped);
    lm_out_drop(o.report);
    lm_input_close(in);
    return rc;
}

int main(int argc, char **argv)
{
    lm_err err = { 0 };
    lm_par *par = NULL;
    lm_stop_words *stop = NULL;

    lm_begin(&tool, argc, argv);
    if (lm_given(&tool, "history") && !opt.report && !tool.json)
        lm_misuse(&tool, "--history", "leave it out, or add --report", "no report is written");
    lm_refuse_twice(&tool, &opt.stop_file, 1);
    read_rules();
    check_company();
    read_shares("--gopher-top-ngrams", opt.top_ngrams, LM_RULE_TOP_2, 3);
    read_shares("--gopher-dup-ngrams", opt.dup_ngrams, LM_RULE_DUP_5, 6);
    if (read_language(&stop, &err) || lm_par_new(&par, tool.threads, &err) || clean(par, &err))
        lm_complain(&tool, &err);
    lm_par_free(par);
    lm_stop_words_free(stop);
    return lm_end(&tool);
}
