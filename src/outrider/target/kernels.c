/* Kernels for the costly parts of a CPU forward with few rows (target/kernels.py). In float32:

   products     y = x W^T + b                    weights read once, at the speed of memory, for up to some ten rows;
                                                 they may be bfloat16
   layers       the parts of a Llama layer before and after its attention, around the products
   attention    requests with few rows each attend to keys and values in blocks

   In bfloat16: RMS norms, and attention of one new token per sequence of a batch.

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

/* A bfloat16 is the upper half of a float32, so a word of two of them is two floats after a shift and a mask. */
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

static inline Lanes even_half(Words x) { return (Lanes)(x << 16); }
static inline Lanes odd_half(Words x) { return (Lanes)(x & 0xffff0000u); }

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
   Attention.

       row i of a request, key head h:   o_i = sum_n softmax_n(q_i k_n / scale) v_n     over the n that row i sees

   All requests and key heads are one parallel loop. KEYS keys at a time are transposed, so that vectors sum
   their products with a query.
   ------------------------------------------------------------------------------------------------------------------ */

#define KEYS 16 /* that are transposed at once */

/* `first_*`: index of a request's part of an array. `low`: the first position that a row sees, row by row.
   `sees`: which of the request's new rows a row sees, [rows, rows]. Sizes are in floats. */
typedef struct {
    int64_t requests, block_size, widest;
    const int64_t *first_row, *rows, *past, *first_block, *first_seen, *low, *blocks;
    const uint8_t *sees;
} Requests;

typedef struct {
    int64_t kv_heads, groups, head_dim, head_stride, query_row, query_head;
    float scale;
} Shapes;

/* scores [rows (1 to 4), KEYS] of queries [rows, E] with KEYS keys, whose element e of key j is transposed[e][j]. */
static inline __attribute__((always_inline)) void score(float *scores, int64_t scores_row, const float *queries,
                                                        int64_t queries_row, const float *transposed, const int rows,
                                                        const int64_t E) {
    Lanes sum[4][KEYS / LANES];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < KEYS / LANES; v++) sum[i][v] = (Lanes){0};
    for (int64_t e = 0; e < E; e++)
        for (int v = 0; v < KEYS / LANES; v++) {
            const Lanes keys = *(const Lanes *)(transposed + e * KEYS + v * LANES);
            for (int i = 0; i < rows; i++) sum[i][v] += queries[i * queries_row + e] * keys;
        }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < KEYS / LANES; v++) store(scores + i * scores_row + v * LANES, sum[i][v], LANES);
}

/* A position: its block of the request, and its place in the block. */
typedef struct {
    int64_t block, place;
} Place;

static inline int64_t next_slot(Place *at, const int64_t *blocks, int64_t size) {
    const int64_t slot = blocks[at->block] * size + at->place;
    if (++at->place == size) *at = (Place){at->block + 1, 0};
    return slot;
}

/* sums of `rows` (1 or 2) rows += scores times values, in the vectors c .. c + CHUNKS - 1 of E. */
static inline __attribute__((always_inline)) void add_values(Lanes *sums, int64_t sums_row, const float *scores,
                                                             int64_t scores_row, const float *const *value,
                                                             int64_t count, int64_t c, const int rows, const int64_t E) {
    Lanes sum[2][CHUNKS];
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < CHUNKS; k++)
            if ((c + k) * LANES < E) sum[i][k] = sums[i * sums_row + k];
    for (int64_t j = 0; j < count; j++)
        for (int k = 0; k < CHUNKS; k++)
            if ((c + k) * LANES < E) {
                const Lanes x = load(value[j] + (c + k) * LANES, E - (c + k) * LANES);
                for (int i = 0; i < rows; i++) sum[i][k] += scores[i * scores_row + j] * x;
            }
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < CHUNKS; k++)
            if ((c + k) * LANES < E) sums[i * sums_row + k] = sum[i][k];
}

/* Rows of request r and key head h. E is head_dim; if it is a constant, the compiler unrolls loops over it. */
static inline __attribute__((always_inline)) void attend_head(const Requests *all, const Shapes *shapes, int64_t r,
                                                              int64_t h, const float *q, const float *keys,
                                                              const float *values, float *out, void *scratch,
                                                              const int64_t E) {
    const int64_t G = shapes->groups, T = all->rows[r], Q = T * G, past = all->past[r], first = all->first_row[r];
    const int64_t *blocks = all->blocks + all->first_block[r], *lows = all->low + first, size = all->block_size;
    const uint8_t *sees = all->sees + all->first_seen[r];
    int64_t low = past;
    for (int64_t t = 0; t < T; t++) low = lows[t] < low ? lows[t] : low;
    const int64_t N = past + T - low, S = (N + KEYS - 1) / KEYS * KEYS, C = (E + LANES - 1) / LANES;
    Lanes *queries = scratch, *sums = queries + Q * C;
    float *transposed = (float *)(sums + Q * C), *scores = transposed + E * KEYS;
    const float *at[KEYS];
    keys += h * shapes->head_stride;
    values += h * shapes->head_stride;
    for (int64_t i = 0; i < Q; i++)
        for (int64_t c = 0; c < C; c++) {
            const float *from = q + (first + i / G) * shapes->query_row + (h * G + i % G) * shapes->query_head;
            queries[i * C + c] = load(from + c * LANES, E - c * LANES) * shapes->scale;
            sums[i * C + c] = (Lanes){0};
        }
    Place place = {low / size, low % size};
    for (int64_t n = 0; n < S; n += KEYS) {
        /* Fill the block by repeating its first key; those scores are not read. */
        for (int64_t j = 0; j < KEYS; j++) at[j] = keys + (n + j < N ? next_slot(&place, blocks, size) * E : at[0] - keys);
        for (int64_t e = 0; e < E; e++)
            for (int64_t j = 0; j < KEYS; j++) transposed[e * KEYS + j] = at[j][e];
        int64_t i = 0;
        for (; i + 4 <= Q; i += 4)
            score(scores + i * S + n, S, (const float *)(queries + i * C), C * LANES, transposed, 4, E);
        for (; i < Q; i++) score(scores + i * S + n, S, (const float *)(queries + i * C), C * LANES, transposed, 1, E);
    }
    for (int64_t i = 0; i < Q; i++) {
        float *row = scores + i * S, most = -INFINITY, total = 0.0f;
        const int64_t t = i / G;
        for (int64_t n = 0; n < lows[t] - low; n++) row[n] = -INFINITY;
        for (int64_t j = 0; j < T; j++)
            if (!sees[t * T + j]) row[past - low + j] = -INFINITY;
        for (int64_t n = N; n < S; n++) row[n] = -INFINITY;
#pragma omp simd reduction(max : most)
        for (int64_t n = 0; n < S; n++) most = row[n] > most ? row[n] : most;
#pragma omp simd reduction(+ : total)
        for (int64_t n = 0; n < S; n++) {
            row[n] = exponential(row[n] - most);
            total += row[n];
        }
        const float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t n = 0; n < S; n++) row[n] *= inverse;
    }
    place = (Place){low / size, low % size};
    for (int64_t n = 0; n < N; n += KEYS) {
        const int64_t count = N - n < KEYS ? N - n : KEYS;
        for (int64_t j = 0; j < count; j++) at[j] = values + next_slot(&place, blocks, size) * E;
        for (int64_t c = 0; c < C; c += CHUNKS) {
            int64_t i = 0;
            for (; i + 1 < Q; i += 2) add_values(sums + i * C + c, C, scores + i * S + n, S, at, count, c, 2, E);
            if (i < Q) add_values(sums + i * C + c, C, scores + i * S + n, S, at, count, c, 1, E);
        }
    }
    for (int64_t i = 0; i < Q; i++)
        for (int64_t c = 0; c < C; c++) {
            float *to = out + (((first + i / G) * shapes->kv_heads + h) * G + i % G) * E + c * LANES;
            store(to, sums[i * C + c], E - c * LANES);
        }
}

/* Bytes of scratch that a thread needs for these requests. */
static size_t scratch_bytes(const Requests *all, const Shapes *shapes) {
    const int64_t lanes = (shapes->head_dim + LANES - 1) / LANES * LANES;
    /* Queries, sums and transposed keys; scores come per request. */
    const int64_t floats = all->widest * shapes->groups * 2 * lanes + shapes->head_dim * KEYS;
    int64_t most = 0;
    for (int64_t r = 0; r < all->requests; r++) {
        const int64_t positions = all->past[r] + all->rows[r] + KEYS;
        const int64_t scores = all->rows[r] * shapes->groups * positions;
        most = scores > most ? scores : most;
    }
    return (sizeof(float) * (floats + most) / sizeof(Lanes) + 1) * sizeof(Lanes);
}

/* The threads of the enclosing parallel region share the work. */
static void attend_all(const Requests *all, const Shapes *shapes, const float *q, const float *keys,
                       const float *values, float *out, size_t bytes, int *failed) {
    void *scratch = aligned_alloc(sizeof(Lanes), bytes);
    if (scratch == NULL) {
#pragma omp atomic write
        *failed = 1;
    }
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t r = 0; r < all->requests; r++)
        for (int64_t h = 0; h < shapes->kv_heads; h++) {
            if (scratch == NULL) continue;
            if (shapes->head_dim == 64)
                attend_head(all, shapes, r, h, q, keys, values, out, scratch, 64);
            else if (shapes->head_dim == 128)
                attend_head(all, shapes, r, h, q, keys, values, out, scratch, 128);
            else
                attend_head(all, shapes, r, h, q, keys, values, out, scratch, shapes->head_dim);
        }
    free(scratch);
}

/* q: [T, heads, E] with strides; keys, values: [kv_heads, slots, E]; out: [T, heads, E]. 0, or 1 without memory. */
int attend(const Requests *all, const Shapes *shapes, const float *q, const float *keys, const float *values, float *out,
           int threads) {
    const size_t bytes = scratch_bytes(all, shapes);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    attend_all(all, shapes, q, keys, values, out, bytes, &failed);
    return failed;
}

/* ------------------------------------------------------------------------------------------------------------------
   bfloat16: RMS norms, and attention of one new token per sequence, for plain decoding of a batch.

   The even elements of a row and the odd ones are two vectors, and sums are kept in these two halves until they are
   written. Every key and value is read once for all queries of its head, in the order of memory; left padding is
   skipped.
   ------------------------------------------------------------------------------------------------------------------ */

#define STEP_QUERIES 4 /* whose sums are in registers */
#define STEP_WORDS (64 / LANES) /* vectors of words of a head, at most */
#define STEP_AHEAD 32 /* keys and values that are fetched ahead; processors do not by themselves, quickly enough */

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

/* Round to nearest, ties to even; the upper halves are the results. */
static inline Words rounded(Lanes x) {
    const Words bits = (Words)x;
    return bits + 0x7fff + (bits >> 16 & 1);
}

static inline Words joined(Lanes even, Lanes odd) { return rounded(even) >> 16 | (rounded(odd) & 0xffff0000u); }

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

/* `rows` queries (1 to STEP_QUERIES) of one key head over the N keys and values in `blocks` from `start` on;
   scores: [rows, N]. */
static inline __attribute__((always_inline)) void step_queries(const Shapes *shapes, const uint16_t *q,
                                                               const uint16_t *keys, const uint16_t *values,
                                                               const int64_t *blocks, int64_t size, Place start,
                                                               uint16_t *out, float *scores, int64_t N,
                                                               const int rows, const int64_t E) {
    const int64_t C = E / (2 * LANES);
    Lanes even[STEP_QUERIES][STEP_WORDS], odd[STEP_QUERIES][STEP_WORDS];
    for (int i = 0; i < rows; i++)
        for (int64_t c = 0; c < C; c++) {
            const Words x = *(const LooseWords *)(q + i * shapes->query_head + 2 * c * LANES);
            even[i][c] = even_half(x) * shapes->scale, odd[i][c] = odd_half(x) * shapes->scale;
        }
    Place place = start;
    for (int64_t n = 0; n < N; n++) {
        Lanes sum[STEP_QUERIES];
        const uint16_t *key = keys + next_slot(&place, blocks, size) * E;
        for (int64_t e = 0; e < E; e += 2 * CACHE_LINE) __builtin_prefetch(key + STEP_AHEAD * E + e, 0, 2);
        for (int64_t c = 0; c < C; c++) {
            const Words x = *(const LooseWords *)(key + 2 * c * LANES);
            for (int i = 0; i < rows; i++) {
                const Lanes products = even[i][c] * even_half(x) + odd[i][c] * odd_half(x);
                sum[i] = c == 0 ? products : sum[i] + products;
            }
        }
        for (int i = 0; i < rows; i++) scores[i * N + n] = lanes_sum(sum[i]);
    }
    for (int i = 0; i < rows; i++) {
        float *row = scores + i * N, most = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : most)
        for (int64_t n = 0; n < N; n++) most = row[n] > most ? row[n] : most;
#pragma omp simd reduction(+ : total)
        for (int64_t n = 0; n < N; n++) {
            row[n] = exponential(row[n] - most);
            total += row[n];
        }
        const float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t n = 0; n < N; n++) row[n] *= inverse;
        for (int64_t c = 0; c < C; c++) even[i][c] = odd[i][c] = (Lanes){0};
    }
    place = start;
    for (int64_t n = 0; n < N; n++) {
        const uint16_t *value = values + next_slot(&place, blocks, size) * E;
        for (int64_t e = 0; e < E; e += 2 * CACHE_LINE) __builtin_prefetch(value + STEP_AHEAD * E + e, 0, 2);
        for (int64_t c = 0; c < C; c++) {
            const Words x = *(const LooseWords *)(value + 2 * c * LANES);
            for (int i = 0; i < rows; i++) {
                even[i][c] += scores[i * N + n] * even_half(x);
                odd[i][c] += scores[i * N + n] * odd_half(x);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (int64_t c = 0; c < C; c++) *(LooseWords *)(out + i * E + 2 * c * LANES) = joined(even[i][c], odd[i][c]);
}

static inline __attribute__((always_inline)) void step_head(const Requests *all, const Shapes *shapes, int64_t r,
                                                            int64_t h, const uint16_t *q, const uint16_t *keys,
                                                            const uint16_t *values, uint16_t *out, float *scores,
                                                            const int64_t E) {
    const int64_t G = shapes->groups, row = all->first_row[r], low = all->low[row], N = all->past[r] + 1 - low;
    const int64_t *blocks = all->blocks + all->first_block[r], size = all->block_size;
    const Place start = {low / size, low % size};
    keys += h * shapes->head_stride;
    values += h * shapes->head_stride;
    for (int64_t g = 0; g < G; g += STEP_QUERIES) {
        const uint16_t *from = q + row * shapes->query_row + (h * G + g) * shapes->query_head;
        uint16_t *to = out + ((row * shapes->kv_heads + h) * G + g) * E;
        if (g + 4 <= G)
            step_queries(shapes, from, keys, values, blocks, size, start, to, scores, N, 4, E);
        else if (g + 3 == G)
            step_queries(shapes, from, keys, values, blocks, size, start, to, scores, N, 3, E);
        else if (g + 2 == G)
            step_queries(shapes, from, keys, values, blocks, size, start, to, scores, N, 2, E);
        else
            step_queries(shapes, from, keys, values, blocks, size, start, to, scores, N, 1, E);
    }
}

/* As `attend` in bfloat16, for requests of one row each; E 64 or 128. */
int attend_step(const Requests *all, const Shapes *shapes, const uint16_t *q, const uint16_t *keys,
                const uint16_t *values, uint16_t *out, int threads) {
    int64_t most = 0;
    for (int64_t r = 0; r < all->requests; r++) most = all->past[r] + 1 > most ? all->past[r] + 1 : most;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scores = malloc(sizeof(float) * STEP_QUERIES * most);
        if (scores == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 4) collapse(2)
        for (int64_t r = 0; r < all->requests; r++)
            for (int64_t h = 0; h < shapes->kv_heads; h++) {
                if (scores == NULL) continue;
                if (shapes->head_dim == 64)
                    step_head(all, shapes, r, h, q, keys, values, out, scores, 64);
                else
                    step_head(all, shapes, r, h, q, keys, values, out, scores, 128);
            }
        free(scores);
    }
    return failed;
}

/* Compute a whole layer, hidden [rows, hidden] in place, for requests with few rows, in one parallel region.
   scratch: rows * (2 hidden + 3 inner + (2 heads + 2 kv_heads) head_dim). 0, or 1 without memory. */
int whole_layer(const Layer *layer, const Requests *all, const Cache *cache, float scale, float *hidden,
                const float *cosine, const float *sine, float *scratch, int64_t rows, int threads) {
    const int64_t E = layer->head_dim, width = (layer->heads + 2 * layer->kv_heads) * E;
    const Shapes shapes = {.kv_heads = layer->kv_heads,
                           .groups = layer->heads / layer->kv_heads,
                           .head_dim = E,
                           .head_stride = cache->head_stride,
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
        attend_all(all, &shapes, qkv, cache->keys, cache->values, attended, bytes, &failed);
        feed_forward(layer, attended, hidden, inner, rows);
    }
    return failed;
}
