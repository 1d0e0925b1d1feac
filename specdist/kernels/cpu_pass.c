/* A pass of a Llama-like model on a CPU: all layers in one call, keys and values read where they lie.

   A sum's order depends on nothing but the model: not on the other tokens of the pass, nor on the number of
   threads. So a token's logits are the same bits alone, in a verification block, or in a batch.

   Structures and names as in cpu_library.py. */

#include "cpu_products.h"

#define KEYS 16 /* whose scores are held at a time */
#define QUERIES 8 /* tokens of a sequence that read its keys together */

typedef struct {
    Product qkv, output, gate_up, down;
    const float *norm_before_attention, *norm_before_mlp, *query_norm, *key_norm; /* the last two or null */
    void *keys, *values;                                                          /* [places, G, D] */
    int64_t window;                                                               /* 0: none */
    int64_t group;                                                                /* whose pages it has */
    float scale;
} Layer;

typedef struct {
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_width, mlp_size, page_size;
    int64_t is_half, num_threads;
    float epsilon, head_epsilon;
    const Layer *layers;
    const float *final_norm;
    const void *embeddings; /* [V, E] */
    Product head;
} Model;

typedef struct {
    int64_t num_tokens, num_logits, table_width;
    const int64_t *token_ids, *slots, *positions, *logits_index;
    const int64_t *rotations; /* the positions of tokens in their sequences, not among their visible keys */
    const int32_t *page_tables[2]; /* of each group of layers: [slots, table_width] */
    const void *cosines, *sines; /* [positions, D] of the model's type */
    void *hidden, *logits;     /* [N, E], [N, V]; logits may be null */
    float *workspace;
} Batch;

INLINE float exponential(float x) {
    /* Cephes' expf: x = n log 2 + r, and a polynomial of r; to 2 units in the last place. Exactly 0 below -87. */
    float is_positive = x < -87.0f ? 0.0f : 1.0f;
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float number; } power = {((int32_t)n + 127) << 23};
    return p * power.number * is_positive;
}

/* ---- norms, rotation, attention ---- */

static void normalize(const float *inputs, const float *weight, int64_t size, float epsilon, float *outputs) {
    float squares[WIDTH] = {0}, total = 0.0f;
    int64_t index = 0;
    for (; index + WIDTH <= size; index += WIDTH)
        for (int lane = 0; lane < WIDTH; lane++)
            squares[lane] += inputs[index + lane] * inputs[index + lane];
    for (; index < size; index++)
        squares[0] += inputs[index] * inputs[index];
    for (int lane = 0; lane < WIDTH; lane++)
        total += squares[lane];
    float factor = 1.0f / sqrtf(total / (float)size + epsilon);
    for (index = 0; index < size; index++)
        outputs[index] = inputs[index] * factor * weight[index];
}

static void rotate(float *head, const void *cosines, const void *sines, int64_t width, int is_half) {
    int64_t half = width / 2;
    for (int64_t index = 0; index < half; index++) {
        float first = head[index], second = head[index + half];
        head[index] = first * number_at(cosines, index, is_half) - second * number_at(sines, index, is_half);
        head[index + half] = second * number_at(cosines, index + half, is_half) +
                             first * number_at(sines, index + half, is_half);
    }
}

typedef float Keys __attribute__((vector_size(4 * KEYS)));
typedef int32_t KeyBits __attribute__((vector_size(4 * KEYS)));

/* The state of a query's softmax over the keys so far. */
typedef struct {
    float highest, total;
    int32_t first, last; /* the keys that it sees */
} Softmax;

/* So many numbers from an index on, as a vector; the rest of it is zeros. A head's width is a multiple of 8. */
INLINE Vector numbers_at(const void *numbers, int64_t index, int64_t count, int is_half) {
#if defined(__AVX512BW__)
    __mmask16 mask = count >= WIDTH ? 0xffff : 0xff;
    if (!is_half)
        return (Vector)_mm512_maskz_loadu_ps(mask, (const float *)numbers + index);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)numbers + index);
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
    (void)count;
    if (!is_half)
        return *(const Unaligned *)((const float *)numbers + index);
    typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2)));
    typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
    return (Vector)(__builtin_convertvector(*(const Halves *)((const uint16_t *)numbers + index), Bits) << 16);
#endif
}

INLINE void put_numbers(float *numbers, int64_t count, Vector found) {
    if (count >= WIDTH)
        *(Unaligned *)numbers = found;
    else
        memcpy(numbers, &found, 32);
}

/* The sum of each of KEYS vectors. */
INLINE Keys sums_of(const Vector *vectors) {
#if WIDTH == KEYS
#define HALVES(from, to, gap, low, high)                                                                     \
    for (int each = 0; each < gap; each++)                                                                   \
        to[each] = __builtin_shufflevector(from[each], from[each + gap], low) +                              \
                   __builtin_shufflevector(from[each], from[each + gap], high);
    Vector eights[8], fours[4], twos[2], ones[1];
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
    HALVES(vectors, eights, 8, LOW8, HIGH8)
    HALVES(eights, fours, 4, LOW4, HIGH4)
    HALVES(fours, twos, 2, LOW2, HIGH2)
    HALVES(twos, ones, 1, LOW1, HIGH1)
    return ones[0];
#else
    Keys sums;
    for (int each = 0; each < KEYS; each++) {
        float total = 0.0f;
        for (int lane = 0; lane < WIDTH; lane++)
            total += vectors[each][lane];
        sums[each] = total;
    }
    return sums;
#endif
}

INLINE float largest_of(Keys numbers) {
#if WIDTH == KEYS
    return _mm512_reduce_max_ps((__m512)numbers);
#else
    float largest = numbers[0];
    for (int key = 1; key < KEYS; key++)
        largest = numbers[key] > largest ? numbers[key] : largest;
    return largest;
#endif
}

INLINE float total_of(Keys numbers) {
#if WIDTH == KEYS
    return _mm512_reduce_add_ps((__m512)numbers);
#else
    float total = 0.0f;
    for (int key = 0; key < KEYS; key++)
        total += numbers[key];
    return total;
#endif
}

INLINE Keys choose(KeyBits is_first, Keys one, Keys other) {
    return (Keys)((is_first & (KeyBits)one) | (~is_first & (KeyBits)other));
}

/* Turns products with keys into their weights; returns what becomes of the sum so far. Called, so that it is
   the same code for one query as for several: compilers do not fuse everywhere alike. */
static __attribute__((noinline)) float weigh(Softmax *softmax, Keys *weights, int32_t begin, float scale) {
    const Keys zeros = {0};
    KeyBits keys;
    for (int32_t key = 0; key < KEYS; key++)
        keys[key] = begin + key;
    KeyBits is_visible = (keys >= softmax->first) & (keys <= softmax->last);
    Keys scores = choose(is_visible, *weights * scale, zeros - INFINITY);
    float most = largest_of(scores);
    most = most > softmax->highest ? most : softmax->highest;
    if (most == -INFINITY) {
        *weights = zeros;
        return 1.0f;
    }
    /* As exponential(). */
    Keys x = scores - most;
    KeyBits is_zero = x < -87.0f;
    x = choose(is_zero, zeros, x);
    Keys n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    Keys r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Keys p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Keys power = (Keys)((__builtin_convertvector(n, KeyBits) + 127) << 23);
    *weights = choose(is_zero, zeros, p * power);
    float factor = exponential(softmax->highest - most);
    softmax->total = softmax->total * factor + total_of(*weights);
    softmax->highest = most;
    return factor;
}

/* Takes a query over the next keys: its products with them, their weights, and the sum of values. */
INLINE void attend_block(Softmax *softmax, const float *query, const void *keys, const void *values,
                         const int64_t *rows, int32_t begin, int count, int64_t D, float scale, float *output,
                         int is_half, int parts) {
    Vector products[KEYS];
    for (int key = 0; key < count; key++) {
        Vector sum = {0};
#pragma GCC unroll 8
        for (int64_t index = 0; index < D; index += WIDTH)
            sum = fused(numbers_at(query, index, D - index, 0), numbers_at(keys, rows[key] + index, D - index, is_half),
                        sum);
        products[key] = sum;
    }
    for (int key = count; key < KEYS; key++)
        products[key] = (Vector){0};
    Keys weights = sums_of(products);
    float factor = weigh(softmax, &weights, begin, scale);
    for (int64_t index = 0; index < D; index += parts * WIDTH) {
        Vector sums[4];
        for (int part = 0; part < parts; part++)
            sums[part] = numbers_at(output, index + part * WIDTH, D - index - part * WIDTH, 0) * factor;
        for (int key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++)
                sums[part] = fused(weights[key] - (Vector){0},
                                   numbers_at(values, rows[key] + index + part * WIDTH, D - index - part * WIDTH,
                                              is_half), sums[part]);
        for (int part = 0; part < parts; part++)
            put_numbers(output + index + part * WIDTH, D - index - part * WIDTH, sums[part]);
    }
}

/* The same with what compilers should know: the width, and how many vectors of it to sum at once. */
INLINE void attend_known(Softmax *softmax, const float *query, const void *keys, const void *values,
                         const int64_t *rows, int32_t begin, int count, int64_t D, float scale, float *output,
                         int is_half) {
#define KNOWN(width, parts)                                                                                  \
    attend_block(softmax, query, keys, values, rows, begin, count, width, scale, output, is_half, parts)
    if (D == 64)
        KNOWN(64, 64 / WIDTH < 4 ? 64 / WIDTH : 4);
    else if (D == 128)
        KNOWN(128, 4);
    else
        KNOWN(D, 1);
}

/* Where the vectors of the keys from `begin` on are, from that of key/value head `head` on; returns of how many
   keys: KEYS, or fewer up to the last. */
INLINE int find_rows(const Model *model, const int32_t *pages, int64_t begin, int64_t last, int64_t head,
                     int64_t *rows) {
    int count = (int)(begin + KEYS <= last ? KEYS : last + 1 - begin);
    for (int key = 0; key < count; key++) {
        int64_t page = (begin + key) / model->page_size, at = (begin + key) % model->page_size;
        rows[key] = ((pages[page] * model->page_size + at) * model->num_kv_heads + head) * model->head_width;
    }
    return count;
}

/* Consecutive tokens of a sequence, from `position` on, over the keys of key/value heads head .. end_head.
   Queries are `stride` numbers apart. */
INLINE void attend(const Model *model, const Layer *layer, const int32_t *pages, const float *queries, int64_t stride,
                   int64_t position, int num_queries, int64_t head, int64_t end_head, float *outputs, int is_half) {
    int64_t D = model->head_width, G = model->num_kv_heads, H = model->num_heads, repeats = H / G;
    int64_t num_heads = end_head - head, num_items = num_heads * repeats, last = position + num_queries - 1;
    Softmax softmaxes[QUERIES * num_items];
    for (int query = 0; query < num_queries; query++) {
        int64_t own = position + query;
        for (int64_t item = 0; item < num_items; item++)
            softmaxes[query * num_items + item] = (Softmax){
                -INFINITY, 0.0f, (int32_t)(layer->window && own >= layer->window ? own - layer->window + 1 : 0),
                (int32_t)own};
        memset(outputs + (query * H + head * repeats) * D, 0, (size_t)(num_items * D) * 4);
    }
    /* What several queries read is converted once. */
    int is_converted = is_half && num_queries * repeats > 1;
    float numbers[is_converted ? 2 * KEYS * D : 1];
    /* Blocks begin at multiples of KEYS whatever the query, so that sums have the same order. */
    int64_t first = softmaxes[0].first / KEYS * KEYS, size = is_half ? 2 : 4, rows[KEYS], next_rows[KEYS];
    int count = find_rows(model, pages, first, last, head, rows), next_count;
    for (int64_t begin = first; begin <= last; begin += KEYS, count = next_count) {
        next_count = begin + KEYS <= last ? find_rows(model, pages, begin + KEYS, last, head, next_rows) : 0;
        for (int64_t own = head; own < end_head; own++) {
            const void *keys = layer->keys, *values = layer->values;
            int64_t own_rows[KEYS], nth = own - head;
            for (int key = 0; key < count; key++)
                own_rows[key] = rows[key] + nth * D;
            /* Each head fetches a share of the next keys, all heads of a key in the order of their addresses. */
            for (int64_t key = next_count * nth / num_heads; key < next_count * (nth + 1) / num_heads; key++)
                for (int64_t byte = 0; byte < num_heads * D * size; byte += 64) {
                    fetch((const char *)keys + next_rows[key] * size + byte);
                    fetch((const char *)values + next_rows[key] * size + byte);
                }
            if (is_converted)
                for (int key = 0; key < count; own_rows[key] = key * D, key++)
                    for (int64_t index = 0; index < D; index += WIDTH) {
                        int64_t place = own_rows[key] + index;
                        float *to = numbers + key * D + index;
                        put_numbers(to, D - index, numbers_at(keys, place, D - index, 1));
                        put_numbers(to + KEYS * D, D - index, numbers_at(values, place, D - index, 1));
                    }
            for (int64_t item = 0; item < num_queries * repeats; item++) {
                int64_t query = item / repeats, each = own * repeats + item % repeats;
                Softmax *softmax = softmaxes + query * num_items + each - head * repeats;
                const float *numbers_of = queries + query * stride + each * D;
                float *output = outputs + (query * H + each) * D;
                if (is_half && !is_converted)
                    attend_known(softmax, numbers_of, keys, values, own_rows, (int32_t)begin, count, D, layer->scale,
                                 output, 1);
                else
                    attend_known(softmax, numbers_of, is_converted ? numbers : keys,
                                 is_converted ? numbers + KEYS * D : values, own_rows, (int32_t)begin, count, D,
                                 layer->scale, output, 0);
            }
        }
        memcpy(rows, next_rows, sizeof rows);
    }
    for (int query = 0; query < num_queries; query++)
        for (int64_t item = 0; item < num_items; item++) {
            float *output = outputs + (query * H + head * repeats + item) * D;
            float factor = 1.0f / softmaxes[query * num_items + item].total;
            for (int64_t index = 0; index < D; index++)
                output[index] *= factor;
        }
}

/* How many tokens from this one on read the same sequence at consecutive positions, at most QUERIES. */
INLINE int num_together(const Batch *batch, int64_t token) {
    int count = 1;
    while (count < QUERIES && token + count < batch->num_tokens &&
           batch->slots[token + count] == batch->slots[token] &&
           batch->positions[token + count] == batch->positions[token] + count)
        count++;
    return count;
}

/* ---- the pass ---- */

INLINE int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

/* Numbers per token of what goes into a product, and of what comes out of a layer's first two. */
INLINE int64_t widest_input(const Model *model) {
    return larger(larger(model->mlp_size, model->num_heads * model->head_width), model->hidden_size);
}

INLINE int64_t widest_output(const Model *model) {
    return larger((model->num_heads + 2 * model->num_kv_heads) * model->head_width, 2 * model->mlp_size);
}

int64_t num_workspace_numbers(const Model *model, int64_t num_tokens) {
    return num_tokens * (model->hidden_size + 2 * widest_input(model) + widest_output(model));
}

INLINE void run_thread(const Model *model, const Batch *batch, int64_t thread, int64_t num_threads, int is_half) {
    int64_t T = batch->num_tokens, E = model->hidden_size, D = model->head_width, F = model->mlp_size;
    int64_t H = model->num_heads, G = model->num_kv_heads, num_all = H + 2 * G;
    int64_t begin = T * thread / num_threads, end = T * (thread + 1) / num_threads;
    float *residual = batch->workspace, *narrow = residual + T * E;
    float *packed = narrow + T * widest_input(model), *wide = packed + T * widest_input(model);
#define BARRIER _Pragma("omp barrier")

    for (int64_t token = begin; token < end; token++)
        for (int64_t index = 0; index < E; index++)
            residual[token * E + index] =
                number_at(model->embeddings, batch->token_ids[token] * E + index, is_half);
    for (int64_t number = 0; number < model->num_layers; number++) {
        const Layer *layer = model->layers + number;
        for (int64_t token = begin; token < end; token++)
            normalize(residual + token * E, layer->norm_before_attention, E, model->epsilon, narrow + token * E);
        BARRIER
        pack(&layer->qkv, narrow, T, packed, is_half, thread, num_threads);
        BARRIER
        multiply(&layer->qkv, packed, T, wide, WRITE, is_half, thread, num_threads);
        BARRIER
        for (int64_t token = begin; token < end; token++) {
            int64_t position = batch->positions[token];
            const int32_t *pages = batch->page_tables[layer->group] + batch->slots[token] * batch->table_width;
            int64_t place = (int64_t)pages[position / model->page_size] * model->page_size + position % model->page_size;
            for (int64_t head = 0; head < H + G; head++) {
                float *numbers = wide + (token * num_all + head) * D;
                const float *norm = head < H ? layer->query_norm : layer->key_norm;
                if (norm)
                    normalize(numbers, norm, D, model->head_epsilon, numbers);
                const char *row_c = (const char *)batch->cosines + batch->rotations[token] * D * (is_half ? 2 : 4);
                const char *row_s = (const char *)batch->sines + batch->rotations[token] * D * (is_half ? 2 : 4);
                rotate(numbers, row_c, row_s, D, is_half);
            }
            const float *keys = wide + (token * num_all + H) * D;
            for (int64_t index = 0; index < G * D; index++) {
                put(layer->keys, place * G * D + index, keys[index], is_half);
                put(layer->values, place * G * D + index, keys[G * D + index], is_half);
            }
        }
        BARRIER
        int64_t is_split = G % num_threads == 0; /* each thread has some heads, or else some tokens */
        int64_t head = is_split ? G * thread / num_threads : 0, end_head = is_split ? head + G / num_threads : G;
        for (int64_t token = 0, tile = 0, count; token < T; token += count, tile++) {
            count = num_together(batch, token);
            if (is_split || tile % num_threads == thread)
                attend(model, layer, batch->page_tables[layer->group] + batch->slots[token] * batch->table_width,
                       wide + token * num_all * D, num_all * D, batch->positions[token], (int)count, head, end_head,
                       narrow + token * H * D, is_half);
        }
        BARRIER
        pack(&layer->output, narrow, T, packed, is_half, thread, num_threads);
        BARRIER
        multiply(&layer->output, packed, T, residual, ADD, is_half, thread, num_threads);
        BARRIER
        for (int64_t token = begin; token < end; token++)
            normalize(residual + token * E, layer->norm_before_mlp, E, model->epsilon, narrow + token * E);
        BARRIER
        pack(&layer->gate_up, narrow, T, packed, is_half, thread, num_threads);
        BARRIER
        multiply(&layer->gate_up, packed, T, wide, WRITE, is_half, thread, num_threads);
        BARRIER
        for (int64_t token = begin; token < end; token++) {
            const float *gates = wide + token * 2 * F, *ups = gates + F;
            float *products = narrow + token * F;
            for (int64_t index = 0; index < F; index++)
                products[index] = gates[index] / (1.0f + exponential(-gates[index])) * ups[index];
        }
        BARRIER
        pack(&layer->down, narrow, T, packed, is_half, thread, num_threads);
        BARRIER
        multiply(&layer->down, packed, T, residual, ADD, is_half, thread, num_threads);
        BARRIER
    }
    int64_t N = batch->num_logits;
    for (int64_t index = N * thread / num_threads; index < N * (thread + 1) / num_threads; index++) {
        normalize(residual + batch->logits_index[index] * E, model->final_norm, E, model->epsilon,
                  narrow + index * E);
        for (int64_t each = 0; each < E; each++)
            put(batch->hidden, index * E + each, narrow[index * E + each], is_half);
    }
    if (!batch->logits)
        return;
    BARRIER
    pack(&model->head, narrow, N, packed, is_half, thread, num_threads);
    BARRIER
    multiply(&model->head, packed, N, batch->logits, WRITE_RESULT, is_half, thread, num_threads);
}

static void run_team(const Model *model, const Batch *batch, int64_t thread, int64_t num_threads) {
    if (model->is_half) {
        run_thread(model, batch, thread, num_threads, 1);
        free_tiles();
    } else {
        run_thread(model, batch, thread, num_threads, 0);
    }
}

int omp_get_thread_num(void);
int omp_get_num_threads(void);

void run_pass(const Model *model, const Batch *batch) {
#pragma omp parallel num_threads((int)model->num_threads)
    run_team(model, batch, omp_get_thread_num(), omp_get_num_threads());
}
