/* SPDX-License-Identifier: Apache-2.0 */
/* bench_tokenizer -- encoding and decoding with the GPT-2 vocabulary on one core, next to the
 * `tokenizers` library when the Python named by PYTHON has it; with --threads N also on N threads.
 * Then the same with WordPiece and Unigram vocabularies learned from the texts.
 *
 * bench_tokenizer [--quick] [--threads N] [--tokenizer PATH] [TEXT ...].  PATH: a tokenizer.json,
 * or a folder with GPT-2's pair of files; that one alone.  The text is cut at line ends into
 * documents of about 4 KB, the same for both. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/par.h"
#include "text/bpe_train.h"
#include "text/tokenizer.h"

static const char *const usual[] = { "../shared/data/wikitext-2/valid.txt",
                                     "../shared/data/wikitext-2/test.txt",
                                     "../shared/data/tinyshakespeare.txt" };
static const char peer[] =
    "import sys,time\n"
    "try:\n"
    "    import tokenizers\n"
    "    from tokenizers import Tokenizer,models,pre_tokenizers\n"
    "except ImportError:\n"
    "    sys.exit(0)\n"
    "d=sys.argv[1]\n"
    "if d.endswith('.json'):\n"
    "    t=Tokenizer.from_file(d)\n"
    "else:\n"
    "    t=Tokenizer(models.BPE.from_file(d+'/vocab.json',d+'/merges.txt'))\n"
    "    t.pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)\n"
    "docs=open(sys.argv[2],encoding='utf-8',newline='').read().split('\\0')\n"
    "best=1e9\n"
    "for _ in range(3):\n"
    "    s=time.perf_counter(); t.encode_batch_fast(docs,add_special_tokens=False)\n"
    "    best=min(best,time.perf_counter()-s)\n"
    "print(tokenizers.__version__,sum(len(x.encode()) for x in docs)/best/1e6)\n";

typedef struct {
    lm_buf text; /* documents with a NUL after each */
    size_t n;
} corpus;

static void die(const lm_err *e)
{
    fprintf(stderr, "bench_tokenizer: %s: %s\n", e->where, e->what);
    exit(1);
}

static void add_file(corpus *c, const char *path, lm_err *e)
{
    lm_buf b = { 0 };

    if (lm_file_read(path, (size_t)1 << 32, &b, e))
        die(e);
    for (size_t at = 0, end; at < b.len; at = end) {
        end = at + 4096 < b.len ? at + 4096 : b.len;
        const char *cut = memchr(b.data + end, '\n', b.len - end);
        end = cut && end < b.len ? (size_t)(cut - b.data) + 1 : b.len;
        if (lm_buf_add(&c->text, b.data + at, end - at, e) || lm_buf_add(&c->text, "", 1, e))
            die(e);
        c->n++;
    }
    lm_buf_fini(&b);
}

static double encode_all(const lm_tokenizer *t, lm_tok_scratch *s, const corpus *c, lm_ids *ids,
                         lm_err *e)
{
    double start = lm_now();

    ids->n = 0;
    for (size_t at = 0; at < c->text.len;) {
        size_t len = strlen(c->text.data + at);
        if (lm_tokenizer_encode(t, s, c->text.data + at, len, false, ids, e))
            die(e);
        at += len + 1;
    }
    return lm_now() - start;
}

typedef struct {
    const lm_tokenizer *t;
    const corpus *c;
    size_t *at; /* of each document */
    lm_tok_scratch *scratch[256];
    lm_ids ids[256];
} crew;

static void encode_part(void *ctx, int64_t begin, int64_t end, int worker)
{
    crew *w = ctx;
    lm_err e = { 0 };

    w->ids[worker].n = 0;
    for (int64_t i = begin; i < end; i++) {
        const char *text = w->c->text.data + w->at[i];
        if (lm_tokenizer_encode(w->t, w->scratch[worker], text, strlen(text), false,
                                &w->ids[worker], &e))
            die(&e);
    }
}

/* Seconds of the best round on many threads. */
static double encode_threads(const lm_tokenizer *t, const corpus *c, int threads, int rounds)
{
    static crew w;
    lm_par *par = NULL;
    lm_err e = { 0 };
    double best = 1e9;

    w.t = t;
    w.c = c;
    if (lm_par_new(&par, threads, &e) || lm_alloc_n(&w.at, c->n, sizeof *w.at, "documents", &e))
        die(&e);
    for (size_t i = 0, at = 0; i < c->n; i++, at += strlen(c->text.data + at) + 1)
        w.at[i] = at;
    for (int i = 0; i < threads; i++)
        if (lm_tok_scratch_new(t, &w.scratch[i], &e))
            die(&e);
    for (int i = 0; i < rounds; i++) {
        double start = lm_now();
        lm_par_for(par, (int64_t)c->n, 8, encode_part, &w);
        best = lm_now() - start < best ? lm_now() - start : best;
    }
    for (int i = 0; i < threads; i++) {
        lm_tok_scratch_free(w.scratch[i]);
        lm_ids_fini(&w.ids[i]);
    }
    lm_free(w.at);
    lm_par_free(par);
    return best;
}

/* MB/s of the peer, 0 if it is not available. */
static double run_peer(const char *tokenizer, const corpus *c, int threads, char *version)
{
    const char *python = getenv("PYTHON");
    char text[] = "/tmp/bench_tokenizer.XXXXXX", command[4096];
    double rate = 0;
    int fd = python && *python ? mkstemp(text) : -1;
    lm_err e = { 0 };

    if (fd < 0)
        return 0;
    if (lm_write_all(fd, c->text.data, c->text.len - 1, text, &e))
        die(&e);
    snprintf(command, sizeof command,
             "TOKENIZERS_PARALLELISM=%s RAYON_NUM_THREADS=%d %s -c \"%s\" %s %s",
             threads > 1 ? "true" : "false", threads, python, peer, tokenizer, text);
    FILE *p = popen(command, "r");
    if (p && fscanf(p, "%31s %lf", version, &rate) != 2)
        rate = 0;
    if (p)
        pclose(p);
    unlink(text);
    return rate;
}

/* Encode and decode with one tokenizer, and print the rates. */
static void measure(const char *path, const corpus *c, int rounds, int threads)
{
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_ids ids = { 0 };
    lm_buf back = { 0 };
    lm_err e = { 0 };
    double start = lm_now();

    if (lm_tokenizer_load(path, &t, &e))
        die(&e);
    double load = lm_now() - start;
    if (lm_tok_scratch_new(t, &s, &e))
        die(&e);
    double mb = (double)(c->text.len - c->n) / 1e6, cold = encode_all(t, s, c, &ids, &e);
    double warm = cold, decode = 1e9;
    for (int i = 0; i < rounds; i++) {
        double now = encode_all(t, s, c, &ids, &e);
        warm = now < warm ? now : warm;
    }
    for (int i = 0; i < rounds; i++) {
        back.len = 0;
        start = lm_now();
        if (lm_tokenizer_decode(t, ids.v, ids.n, false, &back, &e))
            die(&e);
        decode = lm_now() - start < decode ? lm_now() - start : decode;
    }
    printf("%s, %.2f MB in %zu documents, %.3f bytes a token; vocabulary loaded in %.0f ms\n",
           lm_tokenizer_model(t), mb, c->n, mb * 1e6 / (double)ids.n, load * 1e3);
    printf("%-24s %8.1f MB/s\n", "encode, empty cache", mb / cold);
    printf("%-24s %8.1f MB/s\n", "encode", mb / warm);
    printf("%-24s %8.1f MB/s\n", "decode", mb / decode);
    for (int n = 1; n <= threads && n <= 256; n = n < threads ? threads : n + 1) {
        char version[32] = "";
        double rate = run_peer(path, c, n, version), own = mb / warm;
        if (n > 1) {
            own = mb / encode_threads(t, c, n, rounds);
            printf("encode, %3d threads      %8.1f MB/s\n", n, own);
        }
        if (rate > 0)
            printf("tokenizers %-13s %8.1f MB/s   encode here is %.1f times that\n", version, rate,
                   own / rate);
        else
            printf("tokenizers: not installed for PYTHON, no ratio\n");
    }
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    lm_ids_fini(&ids);
    lm_buf_fini(&back);
}

/* A vocabulary of 16,000 tokens, learned from the texts, in a temporary file. */
static void measure_learned(lm_train_model model, const corpus *c, int rounds, int threads)
{
    static const char *const special[] = { "[UNK]", "<unk>" };
    const lm_bpe_train_opts o = { .model = model,
                                  .limit_alphabet = 1000,
                                  .vocab_size = 16000,
                                  .special = special,
                                  .n_special = 2 };
    char path[] = "/tmp/bench_tokenizer.XXXXXX.json";
    lm_bpe_trainer *t = NULL;
    lm_bpe_train_stats stats;
    lm_buf json = { 0 };
    lm_err e = { 0 };
    int fd = mkstemps(path, 5);

    if (fd < 0 || lm_bpe_trainer_new(&o, 1, &t, &e))
        die(&e);
    double start = lm_now();
    for (size_t at = 0; at < c->text.len; at += strlen(c->text.data + at) + 1)
        if (lm_bpe_trainer_add(t, 0, c->text.data + at, strlen(c->text.data + at), &e))
            die(&e);
    if (lm_bpe_trainer_finish(t, NULL, &json, &stats, &e) ||
        lm_write_all(fd, json.data, json.len, path, &e))
        die(&e);
    printf("\nlearned in %.1f s on one core\n", lm_now() - start);
    measure(path, c, rounds, threads);
    unlink(path);
    lm_bpe_trainer_free(t);
    lm_buf_fini(&json);
}

int main(int argc, char **argv)
{
    const char *path = "../shared/data/gpt2-tokenizer";
    corpus c = { 0 };
    lm_err e = { 0 };
    int rounds = 10, threads = 1;
    bool own = false;

    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            rounds = 3;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--tokenizer") && i + 1 < argc)
            own = (path = argv[++i]);
        else
            add_file(&c, argv[i], &e);
    }
    bool given = c.n > 0;
    for (size_t i = 0; !given && i < 3; i++)
        if (lm_path_exists(usual[i]))
            add_file(&c, usual[i], &e);
    if (!lm_path_exists(path) || !c.n) {
        printf("skipped: %s or the texts beside it are not there\n", path);
        return 0;
    }
    measure(path, &c, rounds, threads);
    if (!own) {
        measure_learned(LM_TRAIN_WORDPIECE, &c, rounds, threads);
        measure_learned(LM_TRAIN_UNIGRAM, &c, rounds, threads);
    }
    lm_buf_fini(&c.text);
    return 0;
}
