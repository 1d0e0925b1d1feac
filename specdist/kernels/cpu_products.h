/* Products of packed weights with the inputs of a pass's tokens.

   Weights are packed in panels of PANEL outputs. In float32 a panel is [inputs, PANEL]; in bfloat16 it is
   [inputs / 2, PANEL, 2], as tiles take it. Without tiles its numbers are widened in registers, for all tokens
   of a group: Intel's instruction for products of pairs does half as many in a cycle as the one for float32. */

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
#define INPUTS 256 /* whose weights stay in the nearest cache until all tokens have met them */
#define AHEAD 64  /* steps from the weights in use to those that are fetched for a single group */
#define GROUPS 16 /* of tokens that share a look at the weights: their sums stay near, too */
#define MOST_SUMS 24 /* vectors */

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4)));

typedef struct {
    const void *weight; /* packed */
    const float *bias;  /* or null */
    int64_t num_inputs, num_outputs;
} Product;

int64_t panel_width(void) { return PANEL; }

/* Into the second cache, which waits for more lines at a time than the first. */
INLINE void fetch(const void *address) { __builtin_prefetch(address, 0, 2); }

INLINE float from_half(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint16_t to_half(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)(((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded) >> 16); /* NaN stays NaN */
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

/* ---- products ---- */

/* Sizes of the groups of tokens that a product works on at once, as equal as possible. */
INLINE int64_t num_groups(int64_t num_tokens) { return (num_tokens + TOKENS - 1) / TOKENS; }

INLINE int64_t first_of_group(int64_t group, int64_t num_tokens) {
    return group * num_tokens / num_groups(num_tokens);
}

/* Inputs of each group as the kernel reads them: [inputs, tokens], for bfloat16 rounded to it. */
static void pack_group(const float *inputs, int64_t size, int64_t num_tokens, float *packed, int is_half) {
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t index = 0; index < size; index++) {
            float number = inputs[token * size + index];
            packed[index * num_tokens + token] = is_half ? from_half(to_half(number)) : number;
        }
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

/* The weights of two vectors of outputs: of one input, or in bfloat16 of one of a pair. */
INLINE void read_weights(const float *weights, int which, Vector *found, int is_half) {
    for (int half = 0; half < 2; half++) {
        Integers bits = *(const Integers *)(weights + half * WIDTH);
        if (is_half)
            bits = which ? bits & (int32_t)0xffff0000 : bits << 16;
        found[half] = (Vector)bits;
    }
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
            fetch(ahead + step * stride + half * WIDTH * 4);
#pragma GCC unroll 16
        for (int panel = 0; panel < num_panels; panel++)
#pragma GCC unroll 2
            for (int which = 0; which < 1 + is_half; which++) {
                Vector read[2];
                read_weights(weights + panel * panel_size + step * PANEL, which, read, is_half);
                const float *input = inputs + (step * (1 + is_half) + which) * num_tokens;
#pragma GCC unroll 16
                for (int token = 0; token < num_tokens; token++) {
                    Vector *sum = sums + 2 * (panel * num_tokens + token), number = input[token] - (Vector){0};
                    sum[0] = fused(number, read[0], sum[0]);
                    sum[1] = fused(number, read[1], sum[1]);
                }
            }
    }
    for (int index = 0; index < num_tokens * num_panels * 2; index++)
        ((Vector *)sums_out)[index] = sums[index];
}

/* With one or two tokens two panels at once: a sum waits for its last addition. */
INLINE int panels_at_once(int64_t num_tokens) { return num_tokens <= 2 ? 2 : 1; }

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

#include "cpu_tiles.h"

/* outputs [T, num_outputs] of inputs that are packed already; this thread's share of the panels. All tokens
   meet a few weights after one another, and fetch those that come next. */
INLINE void multiply_panels(const Product *product, const float *packed, int64_t num_tokens, void *outputs, Use use,
                     int is_half, int64_t thread, int64_t num_threads) {
    int64_t size_of_step = is_half ? 2 : 1, steps = product->num_inputs / size_of_step;
    int64_t num_panels = (product->num_outputs + PANEL - 1) / PANEL, all_groups = num_groups(num_tokens);
    int64_t end = num_panels * (thread + 1) / num_threads;
    int at_once = panels_at_once(num_tokens);
    float sums[GROUPS * MOST_SUMS * WIDTH] __attribute__((aligned(64)));
    for (int64_t first_group = 0; first_group < all_groups; first_group += GROUPS) {
        int64_t groups = all_groups - first_group < GROUPS ? all_groups - first_group : GROUPS;
        int64_t together = INPUTS / size_of_step; /* steps */
        int64_t most_steps = groups == 1 ? steps : together, ahead = groups == 1 ? AHEAD : together;
        int64_t stride = (PANEL * 4 + groups - 1) / groups;
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
                    kernel(packed + (first * steps + step * size) * size_of_step, block, now, steps * PANEL, size,
                           (const char *)(block + ahead * PANEL) + group * now * stride, stride,
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

static void multiply(const Product *product, const float *packed, int64_t num_tokens, void *outputs, Use use,
                     int is_half, int64_t thread, int64_t num_threads) {
    if (is_tiled(product, is_half))
        multiply_tiles(product, packed, num_tokens, outputs, use, thread, num_threads);
    else
        multiply_panels(product, packed, num_tokens, outputs, use, is_half, thread, num_threads);
}

/* This thread's share of a product's inputs, as its kernel reads them. */
static void pack(const Product *product, const float *inputs, int64_t num_tokens, float *packed, int is_half,
                 int64_t thread, int64_t num_threads) {
    int64_t size = product->num_inputs;
    if (is_tiled(product, is_half)) {
        for (int64_t index = num_tokens * thread / num_threads * size;
             index < num_tokens * (thread + 1) / num_threads * size; index++)
            ((uint16_t *)packed)[index] = to_half(inputs[index]);
        return;
    }
    for (int64_t group = thread; group < num_groups(num_tokens); group += num_threads) {
        int64_t first = first_of_group(group, num_tokens);
        pack_group(inputs + first * size, size, first_of_group(group + 1, num_tokens) - first,
                   packed + first * size, is_half);
    }
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
