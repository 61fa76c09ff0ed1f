/* Attention of requests that bring few rows each, over keys and values in blocks (target/few_rows.py).

       row i of a request, key head h:   o_i = sum_n softmax_n(q_i k_n / scale) v_n     over the n that row i sees

   All requests and key heads are one parallel loop. A row's sums are taken in the same order whatever other rows,
   requests and threads there are, so its result is the same to the last bit. Sixteen keys at a time: products of a query
   with each, then sums of neighbours until one vector holds the sixteen scores.

   Compiled with OpenMP by the C compiler of the machine. PyTorch has loaded the OpenMP library before, so both share
   its threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define CHUNKS 4 /* vectors of a head that are summed in registers */

typedef float Lanes __attribute__((vector_size(4 * LANES)));

/* `first_*`: where a request's part of an array begins. `low`: the first position that a row sees, row by row.
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

static inline Lanes load(const float *from, int64_t count) {
    Lanes x = {0};
    if (count >= LANES)
        memcpy(&x, from, sizeof x);
    else
        for (int64_t i = 0; i < count; i++) x[i] = from[i];
    return x;
}

static inline void store(float *to, Lanes x, int64_t count) {
    if (count >= LANES)
        memcpy(to, &x, sizeof x);
    else
        for (int64_t i = 0; i < count; i++) to[i] = x[i];
}

/* Sums of neighbours: those of a, then those of b. */
static inline Lanes neighbours(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* exp(x) for x <= 0, within 2 units in the last place (Cephes' expf); 0 below -87, where float32 ends. */
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

static inline __attribute__((always_inline)) Lanes four_scores(const float *const *key, const Lanes *query, int64_t E) {
    Lanes products[4];
    for (int j = 0; j < 4; j++) {
        products[j] = query[0] * load(key[j], E);
        for (int64_t c = 1; c * LANES < E; c++) products[j] += query[c] * load(key[j] + c * LANES, E - c * LANES);
    }
    return neighbours(neighbours(products[0], products[1]), neighbours(products[2], products[3]));
}

/* A position: its block among those of the request, and its place in the block. */
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

/* Rows of request r and key head h. E is head_dim, where it is a constant the compiler unrolls what runs over it. */
static inline __attribute__((always_inline)) void attend_head(const Requests *all, const Shapes *shapes, int64_t r,
                                                              int64_t h, const float *q, const float *keys,
                                                              const float *values, float *out, void *scratch,
                                                              const int64_t E) {
    const int64_t G = shapes->groups, T = all->rows[r], Q = T * G, past = all->past[r], first = all->first_row[r];
    const int64_t *blocks = all->blocks + all->first_block[r], *lows = all->low + first, size = all->block_size;
    const uint8_t *sees = all->sees + all->first_seen[r];
    int64_t low = past;
    for (int64_t t = 0; t < T; t++) low = lows[t] < low ? lows[t] : low;
    const int64_t N = past + T - low, S = (N + LANES - 1) / LANES * LANES, C = (E + LANES - 1) / LANES;
    Lanes *queries = scratch, *sums = queries + Q * C;
    float *scores = (float *)(sums + Q * C);
    const float *at[LANES];
    keys += h * shapes->head_stride;
    values += h * shapes->head_stride;
    for (int64_t i = 0; i < Q; i++)
        for (int64_t c = 0; c < C; c++) {
            const float *from = q + (first + i / G) * shapes->query_row + (h * G + i % G) * shapes->query_head;
            queries[i * C + c] = load(from + c * LANES, E - c * LANES) * shapes->scale;
            sums[i * C + c] = (Lanes){0};
        }
    Place place = {low / size, low % size};
    for (int64_t n = 0; n < S; n += LANES) {
        /* Behind the last key comes a key again, for scores that nobody reads. */
        for (int64_t j = 0; j < LANES; j++) at[j] = keys + (n + j < N ? next_slot(&place, blocks, size) * E : at[0] - keys);
        for (int64_t i = 0; i < Q; i++) {
            const Lanes *query = queries + i * C;
            const Lanes a = four_scores(at, query, E), b = four_scores(at + 4, query, E);
            const Lanes c = four_scores(at + 8, query, E), d = four_scores(at + 12, query, E);
            store(scores + i * S + n, neighbours(neighbours(a, b), neighbours(c, d)), LANES);
        }
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
    for (int64_t n = 0; n < N; n += LANES) {
        const int64_t count = N - n < LANES ? N - n : LANES;
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

/* q: [T, heads, E] with strides; keys, values: [kv_heads, slots, E]; out: [T, heads, E]. 0, or 1 without memory. */
int attend(const Requests *all, const Shapes *shapes, const float *q, const float *keys, const float *values, float *out,
           int threads) {
    const int64_t lanes = (shapes->head_dim + LANES - 1) / LANES * LANES;
    const int64_t floats = all->widest * shapes->groups * 2 * lanes; /* queries and sums; scores come per request */
    int64_t most = 0;
    int failed = 0;
    for (int64_t r = 0; r < all->requests; r++) {
        const int64_t positions = all->past[r] + all->rows[r] + LANES;
        const int64_t scores = all->rows[r] * shapes->groups * positions;
        most = scores > most ? scores : most;
    }
    const size_t bytes = (sizeof(float) * (floats + most) / sizeof(Lanes) + 1) * sizeof(Lanes);
#pragma omp parallel num_threads(threads)
    {
        void *scratch = aligned_alloc(sizeof(Lanes), bytes);
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
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
    return failed;
}
