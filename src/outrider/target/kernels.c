/* Kernels for the costly parts of a CPU forward with few rows (target/kernels.py). In float32:

   products     y = x W^T + b                    weights read once, at the speed of memory, for up to some ten rows;
                                                 they may be bfloat16
   layers       the parts of a Llama layer before and after its attention, around the products
   attention    requests with few rows each attend to keys and values in pages; also in bfloat16

   In bfloat16 also: RMS norms.

   The order of a row's sums does not depend on other rows, requests or threads, so its result is the same to the last
   bit.

   Compiled with OpenMP by the C compiler of the machine. PyTorch has loaded the OpenMP library before, so both share
   its threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* LANES: floats of the processor's vectors. GCC keeps wider ones in memory, which made attention ten times as slow. */
#ifdef __AVX512F__ /* 32 registers */
#define LANES 16
#define VECTORS 2 /* vectors of a panel's outputs: the halves of a word, if weights are bfloat16 */
#define GROUP 8   /* rows whose sums are in registers */
#define CHUNKS 4  /* vectors of a head whose sums are in registers, for two rows at once */
#else             /* 16 registers: 4 rows of 3 vectors would need all, and GCC 12's code then takes 1.5 times as long */
#define LANES 8
#define VECTORS 2
#define GROUP 6
#define CHUNKS 4
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Lanes load(const float *from, int64_t count) {
    if (count >= LANES) return *(const Loose *)from;
    float part[LANES] __attribute__((aligned(4 * LANES))) = {0};
    memcpy(part, from, sizeof(float) * count);
    return *(const Loose *)part;
}

static inline void store(float *to, Lanes x, int64_t count) {
    if (count >= LANES)
        *(Loose *)to = x;
    else
        memcpy(to, &x, sizeof(float) * count);
}

/* A bfloat16 is the upper half of a float32, so a word of two of them is two floats after a shift and a mask: rows of
   bfloat16 are pairs of vectors, of their even elements and of the odd ones. */
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

static inline Lanes even_half(Words x) { return (Lanes)(x << 16); }
static inline Lanes odd_half(Words x) { return (Lanes)(x & 0xffff0000u); }

static inline float widened(uint16_t x) {
    union { uint32_t bits; float value; } word = {.bits = (uint32_t)x << 16};
    return word.value;
}

/* Round to nearest, ties to even; the upper halves are the results. */
static inline Words rounded(Lanes x) {
    const Words bits = (Words)x;
    return bits + 0x7fff + (bits >> 16 & 1);
}

static inline Words joined(Lanes even, Lanes odd) { return rounded(even) >> 16 | (rounded(odd) & 0xffff0000u); }

/* `count` elements, up to twice LANES. */
static inline Words load_words(const uint16_t *from, int64_t count) {
    if (count >= 2 * LANES) return *(const LooseWords *)from;
    uint16_t part[2 * LANES] __attribute__((aligned(4 * LANES))) = {0};
    memcpy(part, from, sizeof(uint16_t) * count);
    return *(const LooseWords *)part;
}

static inline void store_words(uint16_t *to, Words x, int64_t count) {
    if (count >= 2 * LANES)
        *(LooseWords *)to = x;
    else
        memcpy(to, &x, sizeof(uint16_t) * count);
}

/* Compute exp(x) for x <= 0, within 2 units in the last place (Cephes' expf); 0 below -87, where float32 ends. */
static inline float exponential(float x) {
    const float bounded = x > -87.0f ? x : -87.0f;
    const float n = rintf(bounded * 1.44269504f);
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = {.bits = ((int32_t)n + 127) * (1 << 23)};
    return x > -87.0f ? p * power.value : 0.0f;
}

/* Compute tanh(x) within 2 units in the last place (Cephes' tanhf). */
static inline float hyperbolic_tangent(float x) {
    const float size = fabsf(x), z = x * x, e = exponential(-2.0f * size), far = (1.0f - e) / (1.0f + e);
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return size < 0.625f ? p * z * x + x : copysignf(far, x);
}

/* ------------------------------------------------------------------------------------------------------------------
   Products. W is packed into panels of WIDTH outputs, [panel, in, WIDTH], and a panel is read in blocks of DEPTH inputs,
   which stay in the first cache while all rows pass over them, GROUP rows at a time with their sums in registers.
   Meanwhile the next block is fetched from memory, spread evenly over the groups: one to eight rows then cost as
   much as reading the weights. bfloat16 weights halve the reads, and a panel's two vectors are the halves of one vector
   of words. Groups of rows and vectors as in Goto and van de Geijn, "Anatomy of high-performance matrix
   multiplication" (TOMS 2008).
   ------------------------------------------------------------------------------------------------------------------ */

#define WIDTH (LANES * VECTORS)
#define DEPTH 128
#define UNROLLED 4
#define ROWS 64                             /* whose sums of a panel are kept at once */
#define CACHE_LINE 16                       /* floats */
#define LINES (UNROLLED * WIDTH / CACHE_LINE) /* of UNROLLED inputs of a panel in float32 */

int64_t panel_width(void) { return WIDTH; }

/* sums [rows, WIDTH] += x [rows, depth] times weights [depth, WIDTH]; `lines` of `next` are fetched per UNROLLED inputs. */
static inline __attribute__((always_inline)) void add_products(float *sums, const float *x, int64_t x_row,
                                                               const void *weights, int64_t depth, const float *next,
                                                               const int rows, const int lines, const int halved) {
    Lanes sum[GROUP][VECTORS];
    int64_t k = 0;
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < VECTORS; v++) sum[i][v] = *(const Lanes *)(sums + i * WIDTH + v * LANES);
#define ADD(k)                                                                                            \
    do {                                                                                                  \
        Lanes w[VECTORS];                                                                                \
        if (halved) {                                                                                    \
            const Words words = *(const Words *)((const uint16_t *)weights + (k) * WIDTH);               \
            w[0] = even_half(words);                                                                     \
            w[1] = odd_half(words);                                                                      \
        } else                                                                                           \
            for (int v = 0; v < VECTORS; v++)                                                            \
                w[v] = *(const Lanes *)((const float *)weights + (k) * WIDTH + v * LANES);               \
        for (int i = 0; i < rows; i++)                                                                    \
            for (int v = 0; v < VECTORS; v++) sum[i][v] += x[i * x_row + (k)] * w[v];                     \
    } while (0)
    for (; k + UNROLLED <= depth; k += UNROLLED) {
        for (int line = 0; line < lines; line++) __builtin_prefetch(next + line * CACHE_LINE, 0, 2);
        next += lines * CACHE_LINE;
        for (int u = 0; u < UNROLLED; u++) ADD(k + u);
    }
    for (; k < depth; k++) ADD(k);
#undef ADD
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < VECTORS; v++) *(Lanes *)(sums + i * WIDTH + v * LANES) = sum[i][v];
}

static inline __attribute__((always_inline)) void add_block(float *sums, const float *x, int64_t x_row, int64_t rows,
                                                            const void *weights, int64_t depth, const int lines,
                                                            const int halved) {
    const float *next = (const float *)weights + (halved ? depth * WIDTH / 2 : depth * WIDTH);
    const int64_t groups = (rows + GROUP - 1) / GROUP, group = (rows + groups - 1) / groups;
    for (int64_t i = 0; i < rows; i += group, next += lines * CACHE_LINE * (depth / UNROLLED)) {
#define CASE(count)                                                                                       \
    case count:                                                                                           \
        add_products(sums + i * WIDTH, x + i * x_row, x_row, weights, depth, next, count, lines, halved); \
        break
        switch (rows - i < group ? rows - i : group) {
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
            CASE(5);
            CASE(6);
#if GROUP == 8
            CASE(7);
            CASE(8);
#endif
        }
#undef CASE
    }
}

/* A packed matrix of float32, or of bfloat16 if `halved`; `bias`: NULL or [out]. */
typedef struct {
    const void *weights;
    const float *bias;
    int64_t in, out, halved;
} Matrix;

/* The groups of rows of a block fetch the next block in memory, unless `fetched`: it is in the second-level cache. */
static inline __attribute__((always_inline)) void add_share(float *sums, const float *x, int64_t x_row, int64_t rows,
                                                            const void *weights, int64_t depth, int64_t fetched,
                                                            const int halved) {
    const int64_t groups = (rows + GROUP - 1) / GROUP;
    const int lines = halved ? LINES / 2 : LINES;
    if (fetched)
        add_block(sums, x, x_row, rows, weights, depth, 0, halved);
    else if (groups == 1)
        add_block(sums, x, x_row, rows, weights, depth, lines, halved);
    else if (groups == 2)
        add_block(sums, x, x_row, rows, weights, depth, (lines + 1) / 2, halved);
    else if (groups <= 4)
        add_block(sums, x, x_row, rows, weights, depth, (lines + 3) / 4, halved);
    else
        add_block(sums, x, x_row, rows, weights, depth, 1, halved);
}

/* Compute y [rows, out] = x W^T + b, or += if `add`; the threads of the enclosing parallel region share the panels. */
static void multiply(const Matrix *matrix, const float *x, float *y, int64_t rows, const int add) {
    const int64_t in = matrix->in, out = matrix->out, panels = (out + WIDTH - 1) / WIDTH;
    float sums[ROWS * WIDTH] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        const int64_t first = p * WIDTH, width = out - first < WIDTH ? out - first : WIDTH;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t count = rows - row < ROWS ? rows - row : ROWS;
            memset(sums, 0, sizeof(float) * count * WIDTH);
            for (int64_t k = 0; k < in; k += DEPTH) {
                const int64_t depth = in - k < DEPTH ? in - k : DEPTH;
                const int64_t at = (p * in + k) * WIDTH;
                const float *from = x + row * in + k;
                if (matrix->halved)
                    add_share(sums, from, in, count, (const uint16_t *)matrix->weights + at, depth, row > 0, 1);
                else
                    add_share(sums, from, in, count, (const float *)matrix->weights + at, depth, row > 0, 0);
            }
            for (int64_t i = 0; i < count; i++) {
                const float *sum = sums + i * WIDTH;
                float *to = y + (row + i) * out + first;
                for (int64_t n = 0; n < width; n++) {
                    const float value = matrix->bias == NULL ? sum[n] : sum[n] + matrix->bias[first + n];
                    to[n] = add ? to[n] + value : value;
                }
            }
        }
    }
}

void product(const Matrix *matrix, const float *x, float *y, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
    multiply(matrix, x, y, rows, 0);
}

/* ------------------------------------------------------------------------------------------------------------------
   A Llama or Qwen3 layer around its attention.
   ------------------------------------------------------------------------------------------------------------------ */

/* `q_norm`, `k_norm`: NULL or [head_dim]. `qkv` has heads + 2 kv_heads heads, `gate_up` 2 inner outputs. */
typedef struct {
    Matrix qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    int64_t hidden, inner, heads, kv_heads, head_dim;
    float eps;
} Layer;

#define STRIP 256 /* of a row, for one thread */

static inline void normalise(float *to, const float *x, const float *weights, int64_t count, float eps) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; i++) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(squares / count + eps);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] = x[i] * scale * weights[i];
}

static void normalise_rows(float *to, const float *x, const float *weights, int64_t rows, int64_t count, float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) normalise(to + row * count, x + row * count, weights, count, eps);
}

/* Rotary positions, half-split: x [E] in place; the sines of the first half are negative. */
static inline void rotate(float *x, const float *cosine, const float *sine, int64_t E) {
    const int64_t half = E / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] + b * sine[i];
        x[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

/* The memory of keys and values: [kv_heads, slots, head_dim] each, `head_stride` floats from head to head. Row t's are
   written to slots[t]. */
typedef struct {
    float *keys, *values;
    const int64_t *slots;
    int64_t head_stride;
} Cache;

/* The threads of the enclosing parallel region share the work. `cache`: NULL, or also receives keys and values. */
static void project(const Layer *layer, const float *hidden, const float *cosine, const float *sine, float *normed,
                    float *qkv, int64_t rows, const Cache *cache) {
    const int64_t E = layer->head_dim, turned = layer->heads + layer->kv_heads, all = turned + layer->kv_heads;
    normalise_rows(normed, hidden, layer->input_norm, rows, layer->hidden, layer->eps);
    multiply(&layer->qkv, normed, qkv, rows, 0);
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < all; head++) {
            float *x = qkv + (row * all + head) * E;
            const float *norm = head < layer->heads ? layer->q_norm : layer->k_norm;
            if (head < turned) {
                if (norm != NULL) normalise(x, x, norm, E, layer->eps);
                rotate(x, cosine + row * E, sine + row * E, E);
            }
            if (cache != NULL && head >= layer->heads) {
                float *kept = head < turned ? cache->keys + (head - layer->heads) * cache->head_stride
                                            : cache->values + (head - turned) * cache->head_stride;
                memcpy(kept + cache->slots[row] * E, x, sizeof(float) * E);
            }
        }
}

/* As `project`. scratch: rows * (hidden + 3 inner). */
static void feed_forward(const Layer *layer, const float *attention, float *hidden, float *scratch, int64_t rows) {
    const int64_t inner = layer->inner, parts = (inner + STRIP - 1) / STRIP;
    float *normed = scratch, *gate_up = normed + rows * layer->hidden, *active = gate_up + rows * 2 * inner;
    multiply(&layer->o, attention, hidden, rows, 1);
    normalise_rows(normed, hidden, layer->post_norm, rows, layer->hidden, layer->eps);
    multiply(&layer->gate_up, normed, gate_up, rows, 0);
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = part * STRIP, count = inner - first < STRIP ? inner - first : STRIP;
            const float *gate = gate_up + row * 2 * inner + first, *up = gate + inner;
            float *to = active + row * inner + first;
#pragma omp simd
            for (int64_t i = 0; i < count; i++) {
                const float e = exponential(-fabsf(gate[i]));
                to[i] = gate[i] * up[i] * (gate[i] < 0.0f ? e : 1.0f) / (1.0f + e);
            }
        }
    multiply(&layer->down, active, hidden, rows, 1);
}

/* qkv [rows, heads + 2 kv_heads, head_dim] of hidden [rows, hidden]: queries and keys normed and rotated.
   cosine, sine: [rows, head_dim]; normed: [rows, hidden], scratch. */
void before_attention(const Layer *layer, const float *hidden, const float *cosine, const float *sine, float *normed,
                      float *qkv, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
    project(layer, hidden, cosine, sine, normed, qkv, rows, NULL);
}

/* Add the output projection of attention [rows, heads * head_dim], then the MLP, to hidden [rows, hidden].
   scratch: rows * (hidden + 3 inner). */
void after_attention(const Layer *layer, const float *attention, float *hidden, float *scratch, int64_t rows,
                     int threads) {
#pragma omp parallel num_threads(threads)
    feed_forward(layer, attention, hidden, scratch, rows);
}

/* ------------------------------------------------------------------------------------------------------------------
   Attention of requests with few rows each over their pages of one pool, in float32 or, if `halved`, in bfloat16 with
   float32 sums (target/paged_attention.py has the pages and what rows see).

       row i of a request, key head h:   o_i = sum_n softmax_n(cap(scale q_i k_n)) v_n     over the n that row i sees

   cap(s) is s or softcap tanh(s / softcap); a sink is one more term of the softmax's sum, without a value. Requests, key
   heads and tiles of TILE query rows (tokens times query heads) are one parallel loop, and a tile reads each key once.
   KEYS keys at a time are transposed, so that vectors sum their products with a query; of bfloat16 the words, which hold
   two elements each.

   Scores are in the order of positions, from a multiple of KEYS on, without rows that are not seen. So a row has the same
   bits alone, behind other rows, beside other requests and in every tree that its path is part of.
   ------------------------------------------------------------------------------------------------------------------ */

#define KEYS 16      /* that are transposed at once */
#define TILE 64      /* query rows */
#define MOST_SEEN 64 /* rows of a request: bits of a word */

/* `sees`: rows of its request as bits; of these a row sees none behind it. */
typedef struct {
    int64_t position;
    uint64_t sees;
} Row;

typedef struct {
    int64_t first_row, rows, past, first_page;
} Request;

/* Position p of a request is in slot p % page_size of its page p / page_size, its new rows in the slots from `past` on. */
typedef struct {
    int64_t requests, page_size;
    const Request *request;
    const Row *row;
    const int64_t *pages;
} Requests;

/* Strides of heads, slots and rows are in elements. `window`: visible positions with the row's, 0: all; `softcap` 0: none;
   `sinks`: NULL or [heads]. */
typedef struct {
    int64_t kv_heads, groups, key_dim, value_dim, key_head, key_slot, value_head, value_slot, query_row, query_head, window;
    float scale, softcap;
    const float *sinks;
} Shapes;

#define FIRST(k, d) ((k) & (d) ? LANES + (k) - (d) : (k))
#define SECOND(k, d) ((k) & (d) ? LANES + (k) : (k) + (d))
#define FOUR(mask, k, d) mask(k, d), mask(k + 1, d), mask(k + 2, d), mask(k + 3, d)
#define EIGHT(mask, k, d) FOUR(mask, k, d), FOUR(mask, k + 4, d)
#if LANES == 16
#define LANES_OF(mask, d) ((Words){EIGHT(mask, 0, d), EIGHT(mask, 8, d)})
#else
#define LANES_OF(mask, d) ((Words){EIGHT(mask, 0, d)})
#endif

/* transposed [words, KEYS] of the words of KEYS keys: vectors exchange blocks of 1, 2, 4, .. words. */
static inline __attribute__((always_inline)) void transpose(uint32_t *transposed, const char *const *key,
                                                            int64_t words) {
    int64_t w = 0;
#ifndef __clang__ /* which has no __builtin_shuffle */
    for (; w + LANES <= words; w += LANES)
        for (int64_t j = 0; j < KEYS; j += LANES) {
            Words x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = *(const LooseWords *)(key[j + i] + sizeof(uint32_t) * w);
#define EXCHANGE(d)                                                          \
    for (int i = 0; i < LANES; i++)                                          \
        if (!(i & d)) {                                                      \
            const Words a = x[i], b = x[i + d];                              \
            x[i] = __builtin_shuffle(a, b, LANES_OF(FIRST, d));              \
            x[i + d] = __builtin_shuffle(a, b, LANES_OF(SECOND, d));         \
        }
            EXCHANGE(1)
            EXCHANGE(2)
            EXCHANGE(4)
#if LANES == 16
            EXCHANGE(8)
#endif
#undef EXCHANGE
            for (int i = 0; i < LANES; i++) *(LooseWords *)(transposed + (w + i) * KEYS + j) = x[i];
        }
#endif
    for (; w < words; w++)
        for (int64_t j = 0; j < KEYS; j++)
            memcpy(transposed + w * KEYS + j, key[j] + sizeof(uint32_t) * w, sizeof(uint32_t));
}

/* scores [rows (1 to GROUP), KEYS] of queries [rows, E] with KEYS keys, whose word w of key j is transposed[w][j]. */
static inline __attribute__((always_inline)) void score(float *scores, int64_t scores_row, const float *queries,
                                                        int64_t queries_row, const uint32_t *transposed, const int rows,
                                                        const int64_t E, const int halved) {
    Lanes sum[GROUP][KEYS / LANES];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < KEYS / LANES; v++) sum[i][v] = (Lanes){0};
    for (int64_t w = 0; w < (halved ? E / 2 : E); w++)
        for (int v = 0; v < KEYS / LANES; v++) {
            const Words keys = *(const LooseWords *)(transposed + w * KEYS + v * LANES);
            if (halved) {
                const Lanes even = even_half(keys), odd = odd_half(keys);
                for (int i = 0; i < rows; i++) sum[i][v] += queries[i * queries_row + 2 * w] * even;
                for (int i = 0; i < rows; i++) sum[i][v] += queries[i * queries_row + 2 * w + 1] * odd;
            } else
                for (int i = 0; i < rows; i++) sum[i][v] += queries[i * queries_row + w] * (Lanes)keys;
        }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < KEYS / LANES; v++) store(scores + i * scores_row + v * LANES, sum[i][v], LANES);
}

static inline __attribute__((always_inline)) void score_rows(float *scores, int64_t scores_row, const float *queries,
                                                             int64_t queries_row, const uint32_t *transposed,
                                                             int64_t rows, const int64_t E, const int halved) {
    const int64_t groups = (rows + GROUP - 1) / GROUP, group = (rows + groups - 1) / groups;
    for (int64_t i = 0; i < rows; i += group) {
        float *to = scores + i * scores_row;
        const float *from = queries + i * queries_row;
#define CASE(count)                                                                        \
    case count:                                                                            \
        score(to, scores_row, from, queries_row, transposed, count, E, halved);            \
        break
        switch (rows - i < group ? rows - i : group) {
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
            CASE(5);
            CASE(6);
#if GROUP == 8
            CASE(7);
            CASE(8);
#endif
        }
#undef CASE
    }
}

/* The first position that a row sees under a sliding window. */
static inline int64_t lowest(const Row *row, int64_t window) {
    return window > 0 && row->position >= window ? row->position + 1 - window : 0;
}

/* Turn the scores of row t, [S] by slots from `low` on, into the weights of the values in these slots; `sink`: NULL or its
   head's. */
static void weigh(float *scores, const Shapes *shapes, const Row *rows, int64_t t, int64_t past, int64_t low, int64_t S,
                  const float *sink) {
    const int64_t from = lowest(rows + t, shapes->window), hidden = (from < past ? from : past) - low;
    float *own = scores + past - low, kept[MOST_SEEN], most = sink == NULL ? -INFINITY : *sink, total = 0.0f;
    if (shapes->softcap > 0.0f) {
        const float cap = shapes->softcap;
#pragma omp simd
        for (int64_t n = 0; n < S; n++) scores[n] = cap * hyperbolic_tangent(scores[n] / cap);
    }
    /* Its own rows move from slots to positions, where those that it does not see leave no gap. */
    memcpy(kept, own, sizeof(float) * (t + 1));
    for (int64_t n = 0; n < hidden; n++) scores[n] = -INFINITY;
    for (int64_t n = past - low; n < S; n++) scores[n] = -INFINITY;
#define SEEN(j) ((rows[t].sees >> (j) & 1) && rows[j].position >= from)
    for (int64_t j = 0; j <= t; j++)
        if (SEEN(j)) scores[rows[j].position - low] = kept[j];
#pragma omp simd reduction(max : most)
    for (int64_t n = 0; n < S; n++) most = scores[n] > most ? scores[n] : most;
#pragma omp simd reduction(+ : total)
    for (int64_t n = 0; n < S; n++) {
        scores[n] = exponential(scores[n] - most);
        total += scores[n];
    }
    if (sink != NULL) total += exponential(*sink - most);
    const float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t n = 0; n < S; n++) scores[n] *= inverse;
    for (int64_t j = 0; j <= t; j++) kept[j] = SEEN(j) ? scores[rows[j].position - low] : 0.0f;
#undef SEEN
    memset(own, 0, sizeof(float) * (S - (past - low)));
    memcpy(own, kept, sizeof(float) * (t + 1));
}

/* A position: its page of the request, and its place in the page. */
typedef struct {
    int64_t page, place;
} Place;

/* Addresses of the next KEYS slots; those behind the first `count` repeat the first. They are fetched: processors do not
   by themselves across pages, quickly enough. */
static inline void next_slots(const char **at, Place *place, const int64_t *pages, int64_t size, const char *memory,
                              int64_t slot_bytes, int64_t row_bytes, int64_t count) {
    for (int64_t j = 0; j < KEYS; j++) {
        if (j >= count) {
            at[j] = at[0];
            continue;
        }
        at[j] = memory + (pages[place->page] * size + place->place) * slot_bytes;
        if (++place->place == size) *place = (Place){place->page + 1, 0};
        for (int64_t b = 0; b < row_bytes; b += sizeof(float) * CACHE_LINE) __builtin_prefetch(at[j] + b, 0, 2);
    }
}

/* sums of `rows` (1 or 2) rows += weights times values, in CHUNKS vectors from `offset` bytes on, with `left` elements. */
static inline __attribute__((always_inline)) void add_values(Lanes *sums, int64_t sums_row, const float *weights,
                                                             int64_t weights_row, const char *const *value,
                                                             int64_t offset, int64_t count, const int rows,
                                                             const int64_t left, const int halved) {
    const int64_t vectors = halved ? (left + 2 * LANES - 1) / (2 * LANES) * 2 : (left + LANES - 1) / LANES;
    Lanes sum[2][CHUNKS], x[CHUNKS];
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < CHUNKS; k++)
            if (k < vectors) sum[i][k] = sums[i * sums_row + k];
    for (int64_t j = 0; j < count; j++) {
        for (int k = 0; k < CHUNKS; k += 1 + halved)
            if (k < vectors) {
                if (halved) {
                    const Words words = load_words((const uint16_t *)(value[j] + offset) + k * LANES, left - k * LANES);
                    x[k] = even_half(words), x[k + 1] = odd_half(words);
                } else
                    x[k] = load((const float *)(value[j] + offset) + k * LANES, left - k * LANES);
            }
        for (int k = 0; k < CHUNKS; k++)
            if (k < vectors)
                for (int i = 0; i < rows; i++) sum[i][k] += weights[i * weights_row + j] * x[k];
    }
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < CHUNKS; k++)
            if (k < vectors) sums[i * sums_row + k] = sum[i][k];
}

static inline __attribute__((always_inline)) void add_rows(Lanes *sums, int64_t sums_row, const float *weights,
                                                           int64_t weights_row, const char *const *value, int64_t offset,
                                                           int64_t count, int64_t rows, const int64_t left,
                                                           const int halved) {
    int64_t i = 0;
    for (; i + 1 < rows; i += 2)
        add_values(sums + i * sums_row, sums_row, weights + i * weights_row, weights_row, value, offset, count, 2, left,
                   halved);
    if (i < rows)
        add_values(sums + i * sums_row, sums_row, weights + i * weights_row, weights_row, value, offset, count, 1, left,
                   halved);
}

/* Query rows `begin` and on of a request and key head h. E and F are key_dim and value_dim; if they are constants, the
   compiler unrolls loops over them. */
static inline __attribute__((always_inline)) void attend_tile(const Requests *all, const Shapes *shapes, int64_t r,
                                                              int64_t h, int64_t begin, const char *q, const char *keys,
                                                              const char *values, char *out, void *scratch,
                                                              const int64_t E, const int64_t F, const int halved) {
    const int64_t G = shapes->groups, bytes = halved ? sizeof(uint16_t) : sizeof(float), size = all->page_size;
    const Request *request = all->request + r;
    const Row *rows = all->row + request->first_row;
    const int64_t *pages = all->pages + request->first_page, past = request->past, rest = request->rows * G - begin;
    const int64_t Q = rest < TILE ? rest : TILE, first = begin / G, last = (begin + Q - 1) / G;
    const int64_t C = (E + LANES - 1) / LANES, words = halved ? E / 2 : E;
    const int64_t V = halved ? (F + 2 * LANES - 1) / (2 * LANES) * 2 : (F + LANES - 1) / LANES;
    int64_t low = past;
    for (int64_t t = first; t <= last; t++) {
        const int64_t from = lowest(rows + t, shapes->window);
        low = from < low ? from : low;
    }
    low = low / KEYS * KEYS;
    const int64_t N = past + last + 1 - low, S = (N + KEYS - 1) / KEYS * KEYS;
    float *queries = scratch;
    Lanes *sums = (Lanes *)(queries + Q * C * LANES);
    uint32_t *transposed = (uint32_t *)(sums + Q * V);
    float *scores = (float *)(transposed + words * KEYS);
    const char *at[2][KEYS]; /* of this block and of the next, which is fetched meanwhile */
    keys += h * shapes->key_head * bytes;
    values += h * shapes->value_head * bytes;
    for (int64_t i = 0; i < Q; i++) {
        const int64_t row = request->first_row + (begin + i) / G, head = h * G + (begin + i) % G;
        const char *from = q + (row * shapes->query_row + head * shapes->query_head) * bytes;
        for (int64_t e = 0; e < E; e++) {
            const float x = halved ? widened(((const uint16_t *)from)[e]) : ((const float *)from)[e];
            queries[i * C * LANES + e] = x * shapes->scale;
        }
        for (int64_t c = 0; c < V; c++) sums[i * V + c] = (Lanes){0};
    }
    Place place = {low / size, low % size};
    next_slots(at[0], &place, pages, size, keys, shapes->key_slot * bytes, E * bytes, N);
    for (int64_t n = 0; n < N; n += KEYS) {
        if (n + KEYS < N)
            next_slots(at[n / KEYS % 2 ^ 1], &place, pages, size, keys, shapes->key_slot * bytes, E * bytes,
                       N - n - KEYS);
        transpose(transposed, at[n / KEYS % 2], words);
        score_rows(scores + n, S, queries, C * LANES, transposed, Q, E, halved);
    }
    for (int64_t i = 0; i < Q; i++) {
        const float *sink = shapes->sinks == NULL ? NULL : shapes->sinks + h * G + (begin + i) % G;
        weigh(scores + i * S, shapes, rows, (begin + i) / G, past, low, S, sink);
    }
    place = (Place){low / size, low % size};
    next_slots(at[0], &place, pages, size, values, shapes->value_slot * bytes, F * bytes, N);
    for (int64_t n = 0; n < N; n += KEYS) {
        const char *const *value = at[n / KEYS % 2];
        const int64_t count = N - n < KEYS ? N - n : KEYS;
        if (n + KEYS < N)
            next_slots(at[n / KEYS % 2 ^ 1], &place, pages, size, values, shapes->value_slot * bytes, F * bytes,
                       N - n - KEYS);
        for (int64_t c = 0; c < V; c += CHUNKS) {
            const int64_t left = F - c * LANES, offset = c * LANES * bytes;
            if (left >= CHUNKS * LANES)
                add_rows(sums + c, V, scores + n, S, value, offset, count, Q, CHUNKS * LANES, halved);
            else
                add_rows(sums + c, V, scores + n, S, value, offset, count, Q, left, halved);
        }
    }
    for (int64_t i = 0; i < Q; i++) {
        const int64_t row = request->first_row + (begin + i) / G, head = h * G + (begin + i) % G;
        char *to = out + (row * shapes->kv_heads * G + head) * F * bytes;
        for (int64_t c = 0; c < V; c += 1 + halved)
            if (halved)
                store_words((uint16_t *)to + c * LANES, joined(sums[i * V + c], sums[i * V + c + 1]), F - c * LANES);
            else
                store((float *)to + c * LANES, sums[i * V + c], F - c * LANES);
    }
}

static int64_t most_rows(const Requests *all) {
    int64_t most = 0;
    for (int64_t r = 0; r < all->requests; r++) most = all->request[r].rows > most ? all->request[r].rows : most;
    return most;
}

/* Bytes of scratch that a thread needs for these requests: queries, sums, transposed keys and scores of a tile. */
static size_t scratch_bytes(const Requests *all, const Shapes *shapes) {
    const int64_t rows = most_rows(all) * shapes->groups, E = shapes->key_dim, F = shapes->value_dim;
    int64_t most = 0;
    for (int64_t r = 0; r < all->requests; r++) {
        const int64_t past = all->request[r].past, seen = shapes->window + KEYS;
        const int64_t positions = (shapes->window > 0 && seen < past ? seen : past) + all->request[r].rows + KEYS;
        most = positions > most ? positions : most;
    }
    const int64_t floats = (rows < TILE ? rows : TILE) * (E + F + 3 * LANES + most) + E * KEYS;
    return (sizeof(float) * floats / sizeof(Lanes) + 1) * sizeof(Lanes);
}

static inline __attribute__((always_inline)) void attend_tiles(const Requests *all, const Shapes *shapes, const char *q,
                                                               const char *keys, const char *values, char *out,
                                                               size_t bytes, int *failed, const int halved) {
    const int64_t E = shapes->key_dim, F = shapes->value_dim;
    const int64_t tiles = (most_rows(all) * shapes->groups + TILE - 1) / TILE;
    void *scratch = aligned_alloc(sizeof(Lanes), bytes);
    if (scratch == NULL) {
#pragma omp atomic write
        *failed = 1;
    }
#pragma omp for schedule(dynamic, 1) collapse(3)
    for (int64_t r = 0; r < all->requests; r++)
        for (int64_t h = 0; h < shapes->kv_heads; h++)
            for (int64_t tile = 0; tile < tiles; tile++) {
                if (scratch == NULL || tile * TILE >= all->request[r].rows * shapes->groups) continue;
                if (E == 64 && F == 64)
                    attend_tile(all, shapes, r, h, tile * TILE, q, keys, values, out, scratch, 64, 64, halved);
                else if (E == 128 && F == 128)
                    attend_tile(all, shapes, r, h, tile * TILE, q, keys, values, out, scratch, 128, 128, halved);
                else
                    attend_tile(all, shapes, r, h, tile * TILE, q, keys, values, out, scratch, E, F, halved);
            }
    free(scratch);
}

/* The threads of the enclosing parallel region share the work. */
static void attend_floats(const Requests *all, const Shapes *shapes, const void *q, const void *keys, const void *values,
                          void *out, size_t bytes, int *failed) {
    attend_tiles(all, shapes, q, keys, values, out, bytes, failed, 0);
}

static void attend_halves(const Requests *all, const Shapes *shapes, const void *q, const void *keys, const void *values,
                          void *out, size_t bytes, int *failed) {
    attend_tiles(all, shapes, q, keys, values, out, bytes, failed, 1);
}

/* q: [T, heads, key_dim] with strides; keys, values: [kv_heads, slots, key_dim or value_dim] with strides; out: [T, heads,
   value_dim]; all are bfloat16 with even dims, if `halved`. 0, or 1 without memory. */
int attend(const Requests *all, const Shapes *shapes, const void *q, const void *keys, const void *values, void *out,
           int halved, int threads) {
    const size_t bytes = scratch_bytes(all, shapes);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        if (halved)
            attend_halves(all, shapes, q, keys, values, out, bytes, &failed);
        else
            attend_floats(all, shapes, q, keys, values, out, bytes, &failed);
    }
    return failed;
}

/* ------------------------------------------------------------------------------------------------------------------
   bfloat16: RMS norms.
   ------------------------------------------------------------------------------------------------------------------ */

typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
/* Use halves, because a loop over lanes would go through memory. */
static inline float lanes_sum(Lanes x) {
    Eight low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char *)&x + sizeof(Lanes) - sizeof high, sizeof high);
    if (LANES == 16) low += high;
    Four l, h;
    memcpy(&l, &low, sizeof l);
    memcpy(&h, (const char *)&low + sizeof l, sizeof h);
    l += h;
    return (l[0] + l[2]) + (l[1] + l[3]);
}

/* RMS norm of rows in bfloat16, [rows, count], count a multiple of twice LANES; sums are float32. */
void normalise_bfloat16(const uint16_t *x, const uint16_t *weights, uint16_t *to, int64_t rows, int64_t count, float eps,
                        int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *from = x + row * count;
        Lanes squares = {0};
        for (int64_t i = 0; i < count; i += 2 * LANES) {
            const Words words = *(const LooseWords *)(from + i);
            squares += even_half(words) * even_half(words) + odd_half(words) * odd_half(words);
        }
        const float scale = 1.0f / sqrtf(lanes_sum(squares) / count + eps);
        for (int64_t i = 0; i < count; i += 2 * LANES) {
            const Words words = *(const LooseWords *)(from + i), weight = *(const LooseWords *)(weights + i);
            *(LooseWords *)(to + row * count + i) = joined(even_half(words) * scale * even_half(weight),
                                                           odd_half(words) * scale * odd_half(weight));
        }
    }
}

/* Compute a whole layer, hidden [rows, hidden] in place, for requests with few rows, in one parallel region.
   scratch: rows * (2 hidden + 3 inner + (2 heads + 2 kv_heads) head_dim). 0, or 1 without memory. */
int whole_layer(const Layer *layer, const Requests *all, const Cache *cache, float scale, float *hidden,
                const float *cosine, const float *sine, float *scratch, int64_t rows, int threads) {
    const int64_t E = layer->head_dim, width = (layer->heads + 2 * layer->kv_heads) * E;
    const Shapes shapes = {.kv_heads = layer->kv_heads,
                           .groups = layer->heads / layer->kv_heads,
                           .key_dim = E,
                           .value_dim = E,
                           .key_head = cache->head_stride,
                           .key_slot = E,
                           .value_head = cache->head_stride,
                           .value_slot = E,
                           .query_row = width,
                           .query_head = E,
                           .scale = scale};
    const size_t bytes = scratch_bytes(all, &shapes);
    float *qkv = scratch + rows * layer->hidden, *attended = qkv + rows * width;
    float *inner = attended + rows * layer->heads * E;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        project(layer, hidden, cosine, sine, scratch, qkv, rows, cache);
        attend_floats(all, &shapes, qkv, cache->keys, cache->values, attended, bytes, &failed);
        feed_forward(layer, attended, hidden, inner, rows);
    }
    return failed;
}
