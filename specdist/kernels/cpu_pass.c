/* A pass of a Llama-like model on a CPU: all layers in one call, keys and values read where they lie.

   A sum's order depends on nothing but the model: not on the other tokens of the pass, nor on the number of
   threads. So a token's logits are the same bits alone, in a verification block, or in a batch.

   Weights are packed in panels of PANEL outputs. In float32 a panel is [inputs, PANEL]; in bfloat16 it is
   [inputs / 2, PANEL, 2], as the instruction for products of pairs takes it. Names as in cpu_pass.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Numbers in a vector, and tokens whose sums with two vectors of outputs fit into the registers. */
#if defined(__AVX512F__)
#define WIDTH 16
#define TOKENS 12
#elif defined(__AVX__)
#define WIDTH 8
#define TOKENS 6
#else
#define WIDTH 4
#define TOKENS 6
#endif
#define PANEL (2 * WIDTH)
#define STEPS 256 /* of inputs whose weights stay in the nearest cache until all tokens have met them */
#define GROUPS 16 /* of tokens that share a look at the weights: their sums stay near, too */
#define MOST_SUMS 24 /* vectors */
#define KEYS 16 /* whose scores are held at a time */
#define QUERIES 8 /* tokens of a sequence that read its keys together */

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef float Eight __attribute__((vector_size(32)));
typedef float UnalignedEight __attribute__((vector_size(32), aligned(4)));

typedef struct {
    const void *weight; /* packed */
    const float *bias;  /* or null */
    int64_t num_inputs, num_outputs;
} Product;

typedef struct {
    Product qkv, output, gate_up, down;
    const float *norm_before_attention, *norm_before_mlp, *query_norm, *key_norm; /* the last two or null */
    void *keys, *values;                                                          /* [places, G, D] */
    int64_t window;                                                               /* 0: none */
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
    const int32_t *page_table; /* [slots, table_width] */
    const void *cosines, *sines; /* [positions, D] of the model's type */
    void *hidden, *logits;     /* [N, E], [N, V]; logits may be null */
    float *workspace;
} Batch;

int64_t panel_width(void) { return PANEL; }

INLINE float from_half(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint16_t to_half(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40); /* NaN stays NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float number_at(const void *numbers, int64_t index, int is_half) {
    return is_half ? from_half(((const uint16_t *)numbers)[index]) : ((const float *)numbers)[index];
}

INLINE void put(void *numbers, int64_t index, float number, int is_half) {
    if (is_half)
        ((uint16_t *)numbers)[index] = to_half(number);
    else
        ((float *)numbers)[index] = number;
}

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

/* ---- products ---- */

/* Sizes of the groups of tokens that a product works on at once, as equal as possible. */
INLINE int64_t num_groups(int64_t num_tokens) { return (num_tokens + TOKENS - 1) / TOKENS; }

INLINE int64_t first_of_group(int64_t group, int64_t num_tokens) {
    return group * num_tokens / num_groups(num_tokens);
}

/* Inputs of each group as the kernel reads them: [inputs, tokens], or in bfloat16 [inputs / 2, tokens, 2]. */
static void pack_group(const float *inputs, int64_t size, int64_t num_tokens, float *packed, int is_half) {
    if (is_half) {
        uint16_t *pairs = (uint16_t *)packed;
        for (int64_t token = 0; token < num_tokens; token++)
            for (int64_t index = 0; index < size; index += 2) {
                uint16_t *pair = pairs + (index / 2 * num_tokens + token) * 2;
                pair[0] = to_half(inputs[token * size + index]);
                pair[1] = to_half(inputs[token * size + index + 1]);
            }
        return;
    }
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t index = 0; index < size; index++)
            packed[index * num_tokens + token] = inputs[token * size + index];
}

/* As an instruction: compilers do not fuse every sum of products, and the same sums must have the same bits. */
INLINE Vector fused(Vector one, Vector other, Vector sum) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#else
    return one * other + sum;
#endif
}

INLINE Eight fused_eight(Eight one, Eight other, Eight sum) {
#if defined(__FMA__)
    return (Eight)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#else
    return one * other + sum;
#endif
}

INLINE void add_products(Vector *sums, const float *input, const float *weights, int is_half) {
    if (!is_half) {
        for (int half = 0; half < 2; half++)
            sums[half] = fused(*input - (Vector){0}, *(const Vector *)(weights + half * WIDTH), sums[half]);
        return;
    }
#if defined(__AVX512BF16__)
    int32_t pair;
    memcpy(&pair, input, 4);
    __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
    for (int half = 0; half < 2; half++)
        sums[half] = (Vector)_mm512_dpbf16_ps((__m512)sums[half], inputs,
                                              (__m512bh)_mm512_load_si512(weights + half * WIDTH));
#else
    uint32_t pair;
    memcpy(&pair, input, 4);
    union { uint32_t bits; float number; } first = {pair << 16}, second = {pair & 0xffff0000u};
    for (int half = 0; half < 2; half++) {
        Integers pairs = *(const Integers *)(weights + half * WIDTH);
        sums[half] = fused(first.number - (Vector){0}, (Vector)(pairs << 16), sums[half]);
        sums[half] = fused(second.number - (Vector){0}, (Vector)(pairs & (int32_t)0xffff0000), sums[half]);
    }
#endif
}

/* Adds the products of so many steps to the sums of `num_panels` panels, for a group of tokens. Several panels
   only hide latency. A panel alone fetches weights `ahead` meanwhile, `stride` bytes further at each step. */
INLINE void panels_of(const float *inputs, const float *weights, int64_t steps, int64_t panel_size, int num_tokens,
                      int num_panels, const char *ahead, int64_t stride, float *sums_out, int is_half) {
    Vector sums[MOST_SUMS];
    for (int index = 0; index < num_tokens * num_panels * 2; index++)
        sums[index] = ((const Vector *)sums_out)[index];
    for (int64_t step = 0; step < steps; step++) {
        for (int half = 0; half < 2 && num_panels == 1; half++)
            __builtin_prefetch(ahead + step * stride + half * WIDTH * 4);
#pragma GCC unroll 16
        for (int panel = 0; panel < num_panels; panel++)
#pragma GCC unroll 16
            for (int token = 0; token < num_tokens; token++)
                add_products(sums + 2 * (panel * num_tokens + token), inputs + step * num_tokens + token,
                             weights + panel * panel_size + step * PANEL, is_half);
    }
    for (int index = 0; index < num_tokens * num_panels * 2; index++)
        ((Vector *)sums_out)[index] = sums[index];
}

/* With one or two tokens several panels at once: a sum waits for its last addition. */
INLINE int panels_at_once(int64_t num_tokens) { return num_tokens == 1 ? 4 : num_tokens == 2 ? 2 : 1; }

#define SIZE(count)                                                                                          \
    case count:                                                                                              \
        panels_of(inputs, weights, steps, panel_size, count, is_single ? 1 : panels_at_once(count), ahead,   \
                  stride, sums, is_half);                                                                    \
        break;
#define ARGUMENTS                                                                                            \
    const float *inputs, const float *weights, int64_t steps, int64_t panel_size, int num_tokens,            \
        const char *ahead, int64_t stride, float *sums
/* The number of tokens is a constant in each case, so that the sums are registers. */
INLINE void panels_of_any(ARGUMENTS, int is_single, int is_half) {
    switch (num_tokens) {
        SIZE(1) SIZE(2) SIZE(3) SIZE(4) SIZE(5) SIZE(6) SIZE(7) SIZE(8) SIZE(9) SIZE(10) SIZE(11) SIZE(12)
    }
}

typedef void Kernel(ARGUMENTS);
#define KERNEL(name, is_single, is_half)                                                                     \
    static void name(ARGUMENTS) {                                                                            \
        panels_of_any(inputs, weights, steps, panel_size, num_tokens, ahead, stride, sums, is_single, is_half); \
    }
KERNEL(panels_float, 0, 0)
KERNEL(panels_half, 0, 1)
KERNEL(panel_float, 1, 0)
KERNEL(panel_half, 1, 1)

typedef enum { WRITE, ADD, WRITE_RESULT } Use;

/* What becomes of the sums of panels from this one on, for a group of tokens. */
INLINE void use_sums(const Product *product, float *sums, int64_t panel, int num_panels, int64_t first, int size,
                     void *outputs, Use use, int is_half) {
    for (int each = 0; each < num_panels; each++) {
        int64_t column = (panel + each) * PANEL;
        int64_t width = product->num_outputs - column < PANEL ? product->num_outputs - column : PANEL;
        for (int token = 0; token < size; token++) {
            float *found = sums + (each * size + token) * PANEL;
            int64_t place = (first + token) * product->num_outputs + column;
            if (product->bias)
                for (int64_t index = 0; index < width; index++)
                    found[index] += product->bias[column + index];
            if (use == ADD)
                for (int64_t index = 0; index < width; index++)
                    ((float *)outputs)[place + index] += found[index];
            else if (use == WRITE || !is_half)
                memcpy((float *)outputs + place, found, (size_t)width * 4);
            else
                for (int64_t index = 0; index < width; index++)
                    put(outputs, place + index, found[index], 1);
        }
    }
}

/* outputs [T, num_outputs] of inputs that are packed already; this thread's share of the panels. All tokens
   meet a few weights after one another, and fetch those that come next. */
static void multiply(const Product *product, const float *packed, int64_t num_tokens, void *outputs, Use use,
                     int is_half, int64_t thread, int64_t num_threads) {
    int64_t steps = is_half ? product->num_inputs / 2 : product->num_inputs;
    int64_t num_panels = (product->num_outputs + PANEL - 1) / PANEL, all_groups = num_groups(num_tokens);
    int64_t end = num_panels * (thread + 1) / num_threads;
    int at_once = panels_at_once(num_tokens);
    float sums[GROUPS * MOST_SUMS * WIDTH] __attribute__((aligned(64)));
    for (int64_t first_group = 0; first_group < all_groups; first_group += GROUPS) {
        int64_t groups = all_groups - first_group < GROUPS ? all_groups - first_group : GROUPS;
        int64_t most_steps = groups == 1 ? steps : STEPS, stride = (PANEL * 4 + groups - 1) / groups;
        for (int64_t panel = num_panels * thread / num_threads; panel < end;) {
            int count = end - panel >= at_once ? at_once : 1;
            Kernel *kernel = is_half ? (count == 1 ? panel_half : panels_half)
                                     : (count == 1 ? panel_float : panels_float);
            const float *weights = (const float *)product->weight + panel * steps * PANEL;
            memset(sums, 0, (size_t)(groups * MOST_SUMS * WIDTH * 4));
            for (int64_t step = 0, now; step < steps; step += now) {
                now = steps - step < most_steps ? steps - step : most_steps;
                const float *block = weights + step * PANEL;
                for (int64_t group = 0; group < groups; group++) {
                    int64_t first = first_of_group(first_group + group, num_tokens);
                    int size = (int)(first_of_group(first_group + group + 1, num_tokens) - first);
                    kernel(packed + first * steps + step * size, block, now, steps * PANEL, size,
                           (const char *)(block + STEPS * PANEL) + group * now * stride, stride,
                           sums + group * MOST_SUMS * WIDTH);
                }
            }
            for (int64_t group = 0; group < groups; group++) {
                int64_t first = first_of_group(first_group + group, num_tokens);
                int size = (int)(first_of_group(first_group + group + 1, num_tokens) - first);
                use_sums(product, sums + group * MOST_SUMS * WIDTH, panel, count, first, size, outputs, use, is_half);
            }
            panel += count;
        }
    }
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

INLINE Eight eight_at(const void *numbers, int64_t index, int is_half) {
    if (!is_half)
        return *(const UnalignedEight *)((const float *)numbers + index);
    typedef uint16_t Halves __attribute__((vector_size(16), aligned(2)));
    typedef uint32_t Bits __attribute__((vector_size(32)));
    return (Eight)(__builtin_convertvector(*(const Halves *)((const uint16_t *)numbers + index), Bits) << 16);
}

INLINE float sum_of(Eight numbers) {
    Eight halves = numbers + __builtin_shufflevector(numbers, numbers, 4, 5, 6, 7, 0, 1, 2, 3);
    Eight quarters = halves + __builtin_shufflevector(halves, halves, 2, 3, 0, 1, 6, 7, 4, 5);
    return quarters[0] + quarters[1];
}

/* Consecutive tokens of a sequence, from `position` on, over the keys of key/value heads head .. end_head. A
   head's width is a multiple of eight. Queries are `stride` numbers apart. */
INLINE void attend(const Model *model, const Layer *layer, const int32_t *pages, const float *queries, int64_t stride,
                   int64_t position, int num_queries, int64_t head, int64_t end_head, float *outputs, int is_half) {
    int64_t D = model->head_width, G = model->num_kv_heads, repeats = model->num_heads / G;
    int64_t num_own = (end_head - head) * repeats, first_query = head * repeats;
    float highest[QUERIES * num_own], totals[QUERIES * num_own], scores[QUERIES * num_own][KEYS];
    int64_t firsts[QUERIES], last = position + num_queries - 1;
    for (int query = 0; query < num_queries; query++) {
        int64_t own = position + query;
        firsts[query] = layer->window && own >= layer->window ? own - layer->window + 1 : 0;
        memset(outputs + query * model->num_heads * D + first_query * D, 0, (size_t)(num_own * D) * 4);
    }
    for (int64_t item = 0; item < num_queries * num_own; item++) {
        highest[item] = -INFINITY;
        totals[item] = 0.0f;
    }
    /* Blocks begin at multiples of KEYS whatever the query, so that sums have the same order. */
    for (int64_t begin = firsts[0] / KEYS * KEYS; begin <= last; begin += KEYS) {
        int64_t high = begin + KEYS <= last ? begin + KEYS : last + 1, rows[KEYS];
        for (int64_t key = begin; key < high; key++) {
            int64_t place = (int64_t)pages[key / model->page_size] * model->page_size + key % model->page_size;
            int64_t row = rows[key - begin] = (place * G + head) * D;
            for (int64_t index = 0; index < (end_head - head) * D; index += is_half ? 32 : 16)
                __builtin_prefetch((const char *)layer->values + (row + index) * (is_half ? 2 : 4));
            for (int64_t own = 0; own < num_own; own++)
                for (int query = 0; query < num_queries; query++) {
                    const float *numbers = queries + query * stride + (first_query + own) * D;
                    Eight sums = {0};
                    for (int64_t index = 0; index < D; index += 8)
                        sums = fused_eight(*(const UnalignedEight *)(numbers + index),
                                           eight_at(layer->keys, row + own / repeats * D + index, is_half), sums);
                    int is_visible = key <= position + query && key >= firsts[query];
                    scores[query * num_own + own][key - begin] = is_visible ? sum_of(sums) * layer->scale : -INFINITY;
                }
        }
        for (int64_t item = 0; item < num_queries * num_own; item++) {
            float *weights = scores[item], most = highest[item], total = 0.0f;
            for (int64_t key = high - begin; key < KEYS; key++)
                weights[key] = -INFINITY;
            for (int key = 0; key < KEYS; key++)
                most = weights[key] > most ? weights[key] : most;
            if (most == -INFINITY)
                continue;
            float factor = exponential(highest[item] - most);
            for (int key = 0; key < KEYS; key++)
                weights[key] = exponential(weights[key] - most);
            for (int key = 0; key < KEYS; key++)
                total += weights[key];
            totals[item] = totals[item] * factor + total;
            highest[item] = most;
            int64_t own = item % num_own, shift = own / repeats * D;
            float *output = outputs + (item / num_own * model->num_heads + first_query + own) * D;
            for (int64_t index = 0; index < D; index += 32) {
                Eight sums[4];
                int count = D - index < 32 ? (int)(D - index) / 8 : 4;
                for (int part = 0; part < count; part++)
                    sums[part] = *(UnalignedEight *)(output + index + part * 8) * factor;
                for (int64_t key = 0; key < high - begin; key++)
                    for (int part = 0; part < count; part++)
                        sums[part] = fused_eight(
                            weights[key] - (Eight){0},
                            eight_at(layer->values, rows[key] + shift + index + part * 8, is_half), sums[part]);
                for (int part = 0; part < count; part++)
                    *(UnalignedEight *)(output + index + part * 8) = sums[part];
            }
        }
    }
    for (int query = 0; query < num_queries; query++)
        for (int64_t own = 0; own < num_own; own++) {
            float *output = outputs + (query * model->num_heads + first_query + own) * D;
            for (int64_t index = 0; index < D; index++)
                output[index] /= totals[query * num_own + own];
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
#define PACK(inputs, size, count)                                                                            \
    for (int64_t group = thread; group < num_groups(count); group += num_threads) {                          \
        int64_t first = first_of_group(group, count);                                                        \
        pack_group((inputs) + first * (size), size, first_of_group(group + 1, count) - first,                \
                   packed + first * (is_half ? (size) / 2 : (size)), is_half);                               \
    }

    for (int64_t token = begin; token < end; token++)
        for (int64_t index = 0; index < E; index++)
            residual[token * E + index] =
                number_at(model->embeddings, batch->token_ids[token] * E + index, is_half);
    for (int64_t number = 0; number < model->num_layers; number++) {
        const Layer *layer = model->layers + number;
        for (int64_t token = begin; token < end; token++)
            normalize(residual + token * E, layer->norm_before_attention, E, model->epsilon, narrow + token * E);
        BARRIER
        PACK(narrow, E, T)
        BARRIER
        multiply(&layer->qkv, packed, T, wide, WRITE, is_half, thread, num_threads);
        BARRIER
        for (int64_t token = begin; token < end; token++) {
            int64_t position = batch->positions[token];
            const int32_t *pages = batch->page_table + batch->slots[token] * batch->table_width;
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
                attend(model, layer, batch->page_table + batch->slots[token] * batch->table_width,
                       wide + token * num_all * D, num_all * D, batch->positions[token], (int)count, head, end_head,
                       narrow + token * H * D, is_half);
        }
        BARRIER
        PACK(narrow, H * D, T)
        BARRIER
        multiply(&layer->output, packed, T, residual, ADD, is_half, thread, num_threads);
        BARRIER
        for (int64_t token = begin; token < end; token++)
            normalize(residual + token * E, layer->norm_before_mlp, E, model->epsilon, narrow + token * E);
        BARRIER
        PACK(narrow, E, T)
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
        PACK(narrow, F, T)
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
    PACK(narrow, E, N)
    BARRIER
    multiply(&model->head, packed, N, batch->logits, WRITE_RESULT, is_half, thread, num_threads);
}

static void run_team(const Model *model, const Batch *batch, int64_t thread, int64_t num_threads) {
    if (model->is_half)
        run_thread(model, batch, thread, num_threads, 1);
    else
        run_thread(model, batch, thread, num_threads, 0);
}

int omp_get_thread_num(void);
int omp_get_num_threads(void);

void run_pass(const Model *model, const Batch *batch) {
#pragma omp parallel num_threads((int)model->num_threads)
    run_team(model, batch, omp_get_thread_num(), omp_get_num_threads());
}

/* Packs [num_outputs, num_inputs] into panels; outputs beyond the last are zeros. */
void pack_weight(const void *weight, int64_t num_outputs, int64_t num_inputs, int64_t is_half, void *packed) {
    int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t input = 0; input < num_inputs; input++)
            for (int64_t output = 0; output < PANEL; output++) {
                int64_t row = panel * PANEL + output, from = row * num_inputs + input;
                if (is_half)
                    ((uint16_t *)packed)[((panel * (num_inputs / 2) + input / 2) * PANEL + output) * 2 + input % 2] =
                        row < num_outputs ? ((const uint16_t *)weight)[from] : 0;
                else
                    ((float *)packed)[(panel * num_inputs + input) * PANEL + output] =
                        row < num_outputs ? ((const float *)weight)[from] : 0.0f;
            }
}
