/* SPDX-License-Identifier: Apache-2.0 */
/* expcode_simd.c -- the coder's loops for processors that shift by any register (BMI2, which comes
 * with AVX2): several streams at once, as many symbols per table entry as its bits determine.
 *
 * Decoding.  A stream is a window of 64 bits, the next bit lowest, with a mark above the last: it
 * moves towards bit 0, so that the leading zeros are the bits consumed.  A refill loads eight bytes
 * and leaves 56 bits or more, enough for five entries of eleven. */
#include <immintrin.h>
#include <string.h>

#include "kernels/expcode.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#define PASTE(level) lm_exp_##level
#define NAME(level)  PASTE(level)

enum {
    STREAMS = LM_EXP_STREAMS,
    ENTRIES = 1 << LM_EXP_BITS,
    SYMBOLS = 6, /* in one entry at most: its low bytes, which are stored as they are; */
    COUNTS = 48, /* from this bit on how many bits it takes, in its last byte how many symbols */
    LOOKUPS = 56 / LM_EXP_BITS,        /* for one refill */
    ROUND_OUT = LOOKUPS * SYMBOLS + 2, /* the last store writes two bytes too many */
    ROUND_IN = 7,                      /* most bytes consumed by a round */
    GET_AT_ONCE = 8,
    PUT_AT_ONCE = 2,
};

INLINE uint64_t load64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

INLINE void store64(uint8_t *p, uint64_t x)
{
    memcpy(p, &x, 8);
}

static size_t end_of(size_t n, int stream)
{
    size_t end = lm_exp_share(n) * ((size_t)stream + 1);
    return end < n ? end : n;
}

/* ---- Counting ---- */

/* Eight tables avoid that equal neighbours wait for each other's increment. */
static void count_some(lm_exp_work *w, const uint8_t *src, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t x = load64(src + i);
        UNROLL for (int b = 0; b < 8; b++) w->count[b][x >> 8 * b & 255]++;
    }
    for (; i < n; i++)
        w->count[0][src[i]]++;
}

/* Weight 1 for each symbol in src that has none. */
static void notice(lm_exp_work *w, const uint8_t *src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!w->weight[src[i]])
            w->weight[src[i]] = 1;
}

/* The set of symbols that have a weight, by nibbles: bit (high & 7) of set[high >> 3][low]. */
static void make_set(const lm_exp_work *w, uint8_t set[2][16])
{
    memset(set, 0, 32);
    for (int s = 0; s < 256; s++)
        if (w->weight[s])
            set[s >> 7][s & 15] |= (uint8_t)(1 << (s >> 4 & 7));
}

#ifdef __AVX512BW__
enum { V = 64 };
INLINE bool any_outside(const uint8_t set[2][16], const uint8_t *src, size_t vectors)
{
    const __m512i low = _mm512_set1_epi8(15), three = _mm512_set1_epi8(7);
    const __m512i bit = _mm512_set1_epi64((long long)0x8040201008040201u);
    __m512i s0 = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)set[0]));
    __m512i s1 = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)set[1]));
    __mmask64 outside = 0;
    for (size_t i = 0; i < vectors; i++) {
        __m512i x = _mm512_loadu_si512(src + i * V), nibble = _mm512_and_si512(x, low);
        __m512i rows = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(s0, nibble),
                                                _mm512_movepi8_mask(x), s1, nibble);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(x, 4), three);
        outside |= _mm512_testn_epi8_mask(rows, _mm512_shuffle_epi8(bit, high));
    }
    return outside != 0;
}
#else
enum { V = 32 };
INLINE bool any_outside(const uint8_t set[2][16], const uint8_t *src, size_t vectors)
{
    const __m256i low = _mm256_set1_epi8(15), three = _mm256_set1_epi8(7);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    __m256i s0 = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)set[0]));
    __m256i s1 = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)set[1]));
    __m256i outside = _mm256_setzero_si256();
    for (size_t i = 0; i < vectors; i++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(src + i * V));
        __m256i nibble = _mm256_and_si256(x, low);
        __m256i rows =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(s0, nibble), _mm256_shuffle_epi8(s1, nibble), x);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), three);
        rows = _mm256_and_si256(rows, _mm256_shuffle_epi8(bit, high));
        outside = _mm256_or_si256(outside, _mm256_cmpeq_epi8(rows, _mm256_setzero_si256()));
    }
    return !_mm256_testz_si256(outside, outside);
}
#endif

static void count(lm_exp_work *w, const uint8_t *src, size_t n)
{
    enum { PART = 1024, COUNTED = 256 };
    bool sample = n >= LM_EXP_SAMPLE;
    uint8_t set[2][16];
    memset(w->count, 0, sizeof w->count);
    if (!sample)
        count_some(w, src, n);
    for (size_t i = 0; sample && i < n; i += PART)
        count_some(w, src + i, n - i < COUNTED ? n - i : COUNTED);
    for (int s = 0; s < 256; s++) {
        uint32_t sum = 0;
        for (int b = 0; b < 8; b++)
            sum += w->count[b][s];
        w->weight[s] = sample ? 4 * sum : sum;
    }
    make_set(w, set);
    for (size_t i = 0; sample && i < n; i += PART) {
        size_t part = n - i < PART ? n - i : PART;
        if (any_outside(set, src + i, part / V)) {
            notice(w, src + i, part);
            make_set(w, set);
        }
        notice(w, src + i + part / V * V, part % V);
    }
}

/* ---- Encoding ---- */

typedef struct {
    uint64_t bits; /* not yet written, the first lowest */
    unsigned held; /* how many */
    const uint8_t *src;
    uint8_t *dst;
} writer;

INLINE void push(writer *w, uint32_t entry)
{
    w->bits |= (uint64_t)(entry >> 8) << (w->held & 63);
    w->held += entry & 255;
}

INLINE void flush(writer *w)
{
    store64(w->dst, w->bits);
    w->dst += w->held >> 3;
    w->bits >>= w->held & 56;
    w->held &= 7;
}

/* `rounds` times four symbols of each of g streams.  At most 7 + 4 * 11 bits are held. */
INLINE void put_some(const uint32_t *entry, bool pairs, writer *from, int g, size_t rounds)
{
    writer w[STREAMS];
    UNROLL for (int i = 0; i < g; i++) w[i] = from[i];
    for (; rounds; rounds--) {
        UNROLL for (int i = 0; i < g; i++)
        {
            const uint8_t *s = w[i].src;
            if (pairs) {
                uint16_t a, b;
                memcpy(&a, s, 2), memcpy(&b, s + 2, 2);
                push(&w[i], entry[a]);
                push(&w[i], entry[b]);
            } else {
                UNROLL for (int k = 0; k < 4; k++) push(&w[i], entry[s[k]]);
            }
            flush(&w[i]);
            w[i].src += 4;
        }
    }
    UNROLL for (int i = 0; i < g; i++) from[i] = w[i];
}

static void put_rest(const uint32_t *entry, writer *w, const uint8_t *end)
{
    while (w->src < end) {
        push(w, entry[*w->src++]);
        for (; w->held >= 8; w->held -= 8, w->bits >>= 8)
            *w->dst++ = (uint8_t)w->bits;
    }
    if (w->held)
        *w->dst++ = (uint8_t)w->bits;
}

static void put(lm_exp_work *w, const uint8_t *src, size_t n)
{
    uint32_t one[256] = { 0 };
    int streams = lm_exp_streams(n), last = w->used[w->n_used - 1];
    /* The table of pairs costs time to build and must stay in the cache. */
    bool pairs = w->n_used <= 128 && n >= 32768;
    writer at[STREAMS];
    for (int u = 0; u < w->n_used; u++)
        one[w->used[u]] = w->length[w->used[u]] | (uint32_t)w->code[w->used[u]] << 8;
    for (int v = 0; pairs && v < w->n_used; v++) {
        uint32_t *row = w->pair + 256 * w->used[v], second = one[w->used[v]];
        /* also symbols without a code, so that the loop can be vectorised */
        for (int s = w->used[0]; s <= last; s++) {
            uint32_t first = one[s], code = first >> 8 | second >> 8 << (first & 255);
            row[s] = (first & 255) + (second & 255) + (code << 8);
        }
    }
    for (int i = 0; i < streams; i++)
        at[i] = (writer){ .src = src + lm_exp_share(n) * (size_t)i,
                          .dst = w->out + lm_exp_room(n) * (size_t)i };
    if (streams == STREAMS) {
        size_t rounds = (n - lm_exp_share(n) * (STREAMS - 1)) / 4;
        for (int i = 0; i < STREAMS; i += PUT_AT_ONCE) {
            if (pairs)
                put_some(w->pair, true, at + i, PUT_AT_ONCE, rounds);
            else
                put_some(one, false, at + i, PUT_AT_ONCE, rounds);
        }
    }
    for (int i = 0; i < streams; i++) {
        put_rest(one, &at[i], src + end_of(n, i));
        w->bytes[i] = (uint32_t)(at[i].dst - (w->out + lm_exp_room(n) * (size_t)i));
    }
}

/* ---- Decoding ---- */

typedef struct {
    uint64_t bits;
    const uint8_t *src, *src_end;
    uint8_t *dst, *dst_end;
} reader;

/* The symbols that the bits of c determine, at most SYMBOLS: an entry of w->table. */
static uint64_t entry_of(const uint16_t first[ENTRIES + 1], unsigned c, unsigned bits)
{
    uint64_t symbols = 0;
    unsigned used = 0, k = 0, length = first[c] & 255;
    for (; k < SYMBOLS && used + length <= bits; k++) {
        symbols |= (uint64_t)(first[c >> used] >> 8) << 8 * k;
        used += length;
        length = first[c >> used] & 255;
    }
    return symbols | (uint64_t)(used | k << 8) << COUNTS;
}

/* The entries of `bits` bits: a first symbol, then those of the entry of the bits behind it, which
 * lie in rest[1 << bits behind it ...].  The symbols that have a code, the shortest first: so that
 * neither the number that fit nor the number of entries of each is unpredictable. */
INLINE void join_entries(const lm_exp_work *w, const uint8_t *by_length,
                         const uint16_t first[ENTRIES + 1], const uint64_t *rest, unsigned bits,
                         uint64_t *out)
{
    for (int u = 0; u < w->n_used && w->length[by_length[u]] <= bits; u++) {
        unsigned s = by_length[u], length = w->length[s];
        uint64_t head = s + ((uint64_t)(length + (1u << 8)) << COUNTS), *to = out + w->code[s];
        const uint64_t *from = rest + (1u << (bits - length));
        for (unsigned i = 0; i < 1u << (bits - length); i++, to += 1u << length) {
            uint64_t e = from[i];
            *to = e >> (COUNTS + 8) < SYMBOLS
                      ? head + (e >> COUNTS << COUNTS) + (e << 8 & (((uint64_t)1 << COUNTS) - 1))
                      : entry_of(first, (unsigned)(to - out), bits);
        }
    }
}

static void sort_by_length(const lm_exp_work *w, uint8_t by_length[256])
{
    int at[LM_EXP_BITS + 2] = { 0 };
    for (int u = 0; u < w->n_used; u++)
        at[w->length[w->used[u]] + 1]++;
    for (int l = 1; l <= LM_EXP_BITS; l++)
        at[l + 1] += at[l];
    for (int u = 0; u < w->n_used; u++)
        by_length[at[w->length[w->used[u]]]++] = w->used[u];
}

/* first: the symbol and the length that each LM_EXP_BITS bits begin with; and w->table. */
static void fill(const lm_exp_work *w, uint16_t first[ENTRIES + 1], uint64_t table[ENTRIES])
{
    uint64_t rest[ENTRIES];
    uint8_t by_length[256];
    memset(rest, 0, sizeof rest);
    first[ENTRIES] = 0;
    sort_by_length(w, by_length);
    unsigned least = w->length[by_length[0]];
    for (int u = 0; u < w->n_used; u++) {
        int s = by_length[u];
        for (unsigned c = w->code[s]; c < ENTRIES; c += 1u << w->length[s])
            first[c] = (uint16_t)(s << 8 | w->length[s]);
    }
    for (unsigned bits = least; bits <= LM_EXP_BITS - least; bits++)
        join_entries(w, by_length, first, rest, bits, rest + (1u << bits));
    join_entries(w, by_length, first, rest, LM_EXP_BITS, table);
}

/* Rounds that all g readers can do without checking for their ends. */
INLINE size_t safe_rounds(const reader *r, int g)
{
    size_t least = SIZE_MAX;
    for (int i = 0; i < g; i++) {
        size_t in = (size_t)(r[i].src_end - r[i].src), out = (size_t)(r[i].dst_end - r[i].dst);
        in = in < 8 ? 0 : (in - 8) / ROUND_IN;
        out /= ROUND_OUT;
        in = in < out ? in : out;
        least = in < least ? in : least;
    }
    return least;
}

INLINE void refill(reader *r)
{
    unsigned gone = (unsigned)__builtin_clzll(r->bits);
    r->src += gone >> 3;
    uint64_t bits = load64(r->src);
    __asm__("bts $63, %0" : "+r"(bits) : : "cc"); /* an OR would keep the mark in a register */
    r->bits = bits >> (gone & 7);
}

/* Decode with g readers, whose windows are full, until one is near an end. */
INLINE void get_some(const uint64_t *table, reader *from, int g)
{
    reader r[STREAMS];
    UNROLL for (int i = 0; i < g; i++) r[i] = from[i];
    for (size_t rounds; (rounds = safe_rounds(r, g)) > 0;) {
        for (; rounds; rounds--) {
            UNROLL for (int k = 0; k < LOOKUPS; k++)
            {
                UNROLL for (int i = 0; i < g; i++)
                {
                    uint64_t e = table[r[i].bits & (ENTRIES - 1)];
                    store64(r[i].dst, e);
                    uint32_t c = (uint32_t)(e >> COUNTS);
                    r[i].bits >>= c & 63;
                    r[i].dst += (uint8_t)(c >> 8);
                }
            }
            UNROLL for (int i = 0; i < g; i++) refill(&r[i]);
        }
    }
    UNROLL for (int i = 0; i < g; i++) from[i] = r[i];
}

/* The end of a stream, symbol by symbol; `skip` bits of *src are consumed. */
static bool get_rest(const uint16_t *first, reader *r, unsigned skip)
{
    uint64_t bits = 0;
    unsigned held = 0;
    if (skip) {
        if (r->src == r->src_end)
            return false;
        bits = *r->src++ >> skip;
        held = 8 - skip;
    }
    while (r->dst < r->dst_end) {
        for (; held < LM_EXP_BITS && r->src < r->src_end; held += 8)
            bits |= (uint64_t)*r->src++ << held;
        unsigned e = first[bits & (ENTRIES - 1)], length = e & 255;
        if (length > held)
            return false;
        *r->dst++ = (uint8_t)(e >> 8);
        bits >>= length;
        held -= length;
    }
    return r->src == r->src_end && held < 8 && !bits;
}

static bool get(lm_exp_work *w, const uint8_t *src, uint8_t *dst, size_t n)
{
    reader r[STREAMS];
    uint16_t first[ENTRIES + 1];
    uint64_t table[ENTRIES];
    int streams = lm_exp_streams(n);
    size_t begin = 0;
    bool good = true;
    fill(w, first, table);
    for (int i = 0; i < streams; i++) {
        r[i] = (reader){ 0, src, src + w->bytes[i], dst + begin, dst + end_of(n, i) };
        src += w->bytes[i];
        begin = end_of(n, i);
        /* get_rest decodes a stream shorter than a window. */
        r[i].bits = (w->bytes[i] < 8 ? 0 : load64(r[i].src)) | (uint64_t)1 << 63;
    }
    for (int i = 0; streams == STREAMS && i < STREAMS; i += GET_AT_ONCE)
        get_some(table, r + i, GET_AT_ONCE);
    for (int i = 0; i < streams && good; i++) {
        get_some(table, &r[i], 1);
        unsigned gone = (unsigned)__builtin_clzll(r[i].bits);
        r[i].src += gone >> 3;
        good = get_rest(first, &r[i], gone & 7);
    }
    return good;
}

const lm_exp_kernels NAME(LM_SIMD) = { count, put, get };
