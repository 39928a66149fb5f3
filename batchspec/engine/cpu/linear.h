// Linear layers over weights packed as panels of 32 output columns: [panels][words of one row][32 columns].
typedef struct {
    int64_t in_features, num_columns;  // columns before rounding up to whole panels
    const int32_t *panels;
    const float *bias;  // [panels * 32], or null
} Linear;

// What happens to a product before it is stored. SILU_MUL: a panel is 16 gate and the 16 matching up columns,
// and the product is the next layer's operand.
typedef enum { PLAIN, ADD_RESIDUAL, SILU_MUL } Epilogue;

// Store the sums of `rows` rows and one panel. residual and out: elements with stride ldo.
INLINE void finish_tile(int is_bf16, const Linear *w, Epilogue epilogue, long first_row, long rows, long panel,
                        float (*sums)[COLUMNS], const void *residual, void *out, long ldo) {
    for (long r = 0; r < rows; r++)
        for (long i = 0, column = panel * COLUMNS; i < COLUMNS; i += LANES, column += LANES) {
            f32x sum = load_floats(sums[r] + i);
            if (w->bias) sum += load_floats(w->bias + column);
            if (epilogue == SILU_MUL) {
                if (i >= HALF) break;
                f32x up = load_floats(sums[r] + HALF + i);
                if (w->bias) up += load_floats(w->bias + column + HALF);
                f32x gate = round_lanes(is_bf16, silu(round_lanes(is_bf16, sum)));
                store_operand(is_bf16, out, (first_row + r) * ldo + panel * HALF + i, gate * round_lanes(is_bf16, up));
                continue;
            }
            long index = (first_row + r) * ldo + column;
            if (epilogue == ADD_RESIDUAL) sum = round_lanes(is_bf16, sum) + load(is_bf16, residual, index);
            store_some(is_bf16, out, index, sum, w->num_columns - column);
        }
}

// From this many rows on a panel of pairs is unpacked once, not by every tile, where the processor multiplies no pairs.
#define UNPACKING_ROWS (MULTIPLIES_PAIRS ? INT64_MAX : 16 * TILE_ROWS)

// Room for a panel per thread, unpacked. To be called outside parallel regions, before `linear`.
static void reserve_panels(int threads, long in_features) {
    if (!MULTIPLIES_PAIRS) scratch(SCRATCH_PANELS, threads * in_features * COLUMNS * sizeof(float));
}

// [words][COLUMNS] pairs to [elements][COLUMNS] floats.
static void unpack(const int32_t *pairs, long words, float *to) {
    for (long word = 0; word < words; word++, to += 2 * COLUMNS)
        for (long i = 0; i < COLUMNS; i += LANES) {
            i32x x = load_words(pairs + word * COLUMNS + i);
            store_floats(to + i, first_of_pair(x));
            store_floats(to + COLUMNS + i, second_of_pair(x));
        }
}

// out[row, column] for all rows, by every thread of the enclosing parallel region: each takes its share of the panels.
// a: rows of operands with stride lda, in words. No barrier at the end.
static void linear(int is_bf16, const Linear *w, Epilogue epilogue, long num_rows, const int32_t *a, long lda,
                   const void *residual, void *out, long ldo) {
    long thread = omp_get_thread_num(), threads = omp_get_num_threads(), steps = words(is_bf16, w->in_features);
    long panels = (w->num_columns + COLUMNS - 1) / COLUMNS;
    long large_tiles = max_long(1, (num_rows + TILE_ROWS - PREFETCHING_ROWS) / TILE_ROWS);
    int unpacks = is_bf16 && num_rows >= UNPACKING_ROWS;
    float sums[TILE_ROWS][COLUMNS], *unpacked = (float *)scratch(SCRATCH_PANELS, 0) + thread * w->in_features * COLUMNS;
    for (long panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++) {
        // The next panel comes from memory while this one is multiplied, each large tile asking for its part.
        const int32_t *b = w->panels + panel * steps * COLUMNS, *ahead = b + steps * COLUMNS;
        long next_bytes = steps * COLUMNS * sizeof *b / large_tiles, tile_steps = unpacks ? 2 * steps : steps;
        if (ONLY_TILE_AHEAD && num_rows <= TILE_ROWS) ahead = b + ONLY_TILE_AHEAD;
        if (unpacks) {
            unpack(b, steps, unpacked);
            b = (const int32_t *)unpacked;
        }
        Columns columns = {&b, 1, tile_steps, tile_steps, HALF, COLUMNS, (const char *)ahead, next_bytes / tile_steps};
        for (long row = 0; row < num_rows; row += TILE_ROWS, columns.ahead += next_bytes) {
            long rows = min_long(TILE_ROWS, num_rows - row);
            TILES[is_bf16 && !unpacks][rows - 1](a + row * lda, lda, &columns, sums[0], COLUMNS);
            if (is_bf16) finish_tile(1, w, epilogue, row, rows, panel, sums, residual, out, ldo);
            else finish_tile(0, w, epilogue, row, rows, panel, sums, residual, out, ldo);
        }
    }
}
