/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_peer -- llama.cpp on a GGUF file, for test_gguf.py: built against an installed llama.cpp.
 *
 *   gguf_peer logits FILE ID...        F32 logits of every position on standard output
 *   gguf_peer decoded FILE N ID...     the same of a decoder, whose source are the first N ids
 *   gguf_peer states FILE ID...        F32 states of every position
 *   gguf_peer tokenize FILE            ids of standard input, one line
 *   gguf_peer quantize FILE OUT FTYPE  llama_ftype as a number; PURE=1 in the environment:
 *                                     one type */
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void quiet(enum ggml_log_level level, const char *text, void *ctx)
{
    (void)ctx;
    if (level >= GGML_LOG_LEVEL_WARN)
        fputs(text, stderr);
}

static struct llama_model *load(const char *path, bool vocab_only)
{
    struct llama_model_params p = llama_model_default_params();
    struct llama_model *m;
    p.vocab_only = vocab_only;
    m = llama_model_load_from_file(path, p);
    if (!m)
        exit(1);
    return m;
}

static struct llama_context *context_of(struct llama_model *m, int n, bool states)
{
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t)n > 64 ? (uint32_t)n : 64;
    p.n_batch = p.n_ubatch = p.n_ctx;
    p.n_threads = p.n_threads_batch = 1;
    p.type_k = p.type_v = GGML_TYPE_F32;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.embeddings = states;
    if (states)
        p.pooling_type = LLAMA_POOLING_TYPE_NONE;
    struct llama_context *c = llama_init_from_model(m, p);
    if (!c)
        exit(1);
    return c;
}

static struct llama_batch batch_of(char **ids, int n)
{
    struct llama_batch b = llama_batch_init(n, 0, 1);
    for (int i = 0; i < n; i++) {
        b.token[i] = atoi(ids[i]);
        b.pos[i] = i;
        b.n_seq_id[i] = 1;
        b.seq_id[i][0] = 0;
        b.logits[i] = 1;
    }
    b.n_tokens = n;
    return b;
}

/* source: how many of the ids are for the encoder. */
static int logits(const char *path, int source, char **ids, int n)
{
    struct llama_model *m = load(path, false);
    struct llama_context *c = context_of(m, n, false);
    size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(m));
    if (source && llama_encode(c, batch_of(ids, source)))
        return 1;
    if (llama_decode(c, batch_of(ids + source, n - source)))
        return 1;
    for (int i = 0; i < n - source; i++)
        fwrite(llama_get_logits_ith(c, i), sizeof(float), vocab, stdout);
    return 0;
}

static int states(const char *path, char **ids, int n)
{
    struct llama_model *m = load(path, false);
    struct llama_context *c = context_of(m, n, true);
    if (llama_encode(c, batch_of(ids, n)))
        return 1;
    for (int i = 0; i < n; i++)
        fwrite(llama_get_embeddings_ith(c, i), sizeof(float), (size_t)llama_model_n_embd(m),
               stdout);
    return 0;
}

static int tokenize(const char *path)
{
    const struct llama_vocab *v = llama_model_get_vocab(load(path, true));
    static char text[1 << 20];
    static llama_token tok[1 << 20];
    int n = (int)fread(text, 1, sizeof text, stdin);

    n = llama_tokenize(v, text, n, tok, 1 << 20, true, true);
    for (int i = 0; i < n; i++)
        printf("%d ", tok[i]);
    printf("\n");
    return n < 0;
}

int main(int argc, char **argv)
{
    llama_log_set(quiet, NULL);
    llama_backend_init();
    if (argc > 3 && !strcmp(argv[1], "logits"))
        return logits(argv[2], 0, argv + 3, argc - 3);
    if (argc > 5 && !strcmp(argv[1], "decoded"))
        return logits(argv[2], atoi(argv[3]), argv + 4, argc - 4);
    if (argc > 3 && !strcmp(argv[1], "states"))
        return states(argv[2], argv + 3, argc - 3);
    if (argc == 3 && !strcmp(argv[1], "tokenize"))
        return tokenize(argv[2]);
    if (argc == 5 && !strcmp(argv[1], "quantize")) {
        struct llama_model_quantize_params p = llama_model_quantize_default_params();
        p.ftype = (enum llama_ftype)atoi(argv[4]);
        p.nthread = 1;
        p.pure = getenv("PURE") != NULL;
        return llama_model_quantize(argv[2], argv[3], &p) != 0;
    }
    return 2;
}
