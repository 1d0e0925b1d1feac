/* Products in bfloat16 with AMX: tiles of 16 tokens by 16 outputs, in registers of their own.

   A tile sums pairs in its own order, so a model's products are either all of them, for one token as for many,
   or none. Panels are those of the other kernels: of two tiles of weights side by side. */

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16           /* rows of a tile, and numbers in a row of sums */
#define TILE_INPUTS 32    /* of a row of inputs: 16 pairs */
#define BLOCK_BYTES 2048  /* weights of a panel that meet so many inputs */
#define AHEAD_BYTES 8192  /* from the weights in use to those that are fetched */
#define ASK_PERMISSION 0x1023
#define TILE_DATA 18

static int are_tiles_in_use = 0;

/* Asks the system for tiles, or does without; returns whether they are used. Not during a pass. */
int64_t use_tiles(int64_t is_wanted) {
    are_tiles_in_use = is_wanted && syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
    return are_tiles_in_use;
}

INLINE int is_tiled(const Product *product, int is_half) {
    return is_half && are_tiles_in_use && product->num_inputs % TILE_INPUTS == 0;
}

/* Tiles 0 to 3 have sums, 4 and 5 inputs of so many tokens, 6 and 7 weights. */
static void shape_tiles(int64_t num_rows) {
    struct { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes[tile] = 64;
        shapes.rows[tile] = tile < 6 ? (uint8_t)num_rows : TILE;
    }
    _tile_loadconfig(&shapes);
}

static void free_tiles(void) {
    if (are_tiles_in_use)
        _tile_release();
}

/* The sums [rows, PANEL] of a panel for `rows` tokens, or for twice as many. */
INLINE void tiles_of(const char *inputs, const char *weights, int64_t num_inputs, int64_t rows, int is_double,
                     int is_fetching, float *sums) {
    int64_t row_bytes = num_inputs * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (is_double) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t input = 0; input < num_inputs; input += TILE_INPUTS, weights += BLOCK_BYTES) {
        for (int64_t line = 0; is_fetching && line < BLOCK_BYTES; line += 64)
            __builtin_prefetch(weights + AHEAD_BYTES + line);
        _tile_loadd(6, weights, PANEL * 4);
        _tile_loadd(7, weights + 64, PANEL * 4);
        _tile_loadd(4, inputs + input * 2, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (is_double) {
            _tile_loadd(5, inputs + input * 2 + rows * row_bytes, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + TILE, PANEL * 4);
    if (is_double) {
        _tile_stored(2, sums + rows * PANEL, PANEL * 4);
        _tile_stored(3, sums + rows * PANEL + TILE, PANEL * 4);
    }
}

/* As multiply(). The last group of tokens may read rows beyond its own, whose sums are left out. */
static void multiply_tiles(const Product *product, const float *packed, int64_t num_tokens, void *outputs, Use use,
                           int64_t thread, int64_t num_threads) {
    int64_t size = product->num_inputs, num_panels = (product->num_outputs + PANEL - 1) / PANEL;
    int64_t groups = (num_tokens + TILE - 1) / TILE, rows = groups ? (num_tokens + groups - 1) / groups : 0;
    float sums[2 * TILE * PANEL] __attribute__((aligned(64)));
    if (!groups)
        return;
    shape_tiles(rows);
    for (int64_t panel = num_panels * thread / num_threads; panel < num_panels * (thread + 1) / num_threads; panel++) {
        const char *weights = (const char *)product->weight + panel * size * PANEL * 2;
        for (int64_t group = 0; group < groups; group += 2) {
            int64_t first = group * rows, left = num_tokens - first;
            const char *inputs = (const char *)packed + first * size * 2;
            if (group + 1 < groups)
                tiles_of(inputs, weights, size, rows, 1, group == 0, sums);
            else
                tiles_of(inputs, weights, size, rows, 0, group == 0, sums);
            use_sums(product, sums, panel, 1, first, (int)(left < 2 * rows ? left : 2 * rows), outputs, use, 1);
        }
    }
}
#else
int64_t use_tiles(int64_t is_wanted) {
    (void)is_wanted;
    return 0;
}

#define is_tiled(product, is_half) 0
#define multiply_tiles(...)
#define free_tiles()
#endif
