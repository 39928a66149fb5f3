// Linear layers over weights packed as panels of 32 output columns: [panels][words of one row][32 columns].
typedef struct {
    int64_t in_features, num_columns;  // columns before rounding up to whole panels
    const int32_t *panels;
    const float *bias;  // [panels * 32], or null
} Linear;

// What happens to a product before it is stored. SILU_MUL: a panel is 16 gate and the 16 matching up columns,
// and the product is the next linear's operand.
typedef enum { PLAIN, ADD_RESIDUAL, SILU_MUL } Epilogue;

// Store the sums of `rows` rows and one panel. residual and out: elements with stride ldo.
INLINE void finish_tile(int is_bf16, const Linear *w, Epilogue epilogue, long first_row, long rows, long panel,
                        float (*sums)[COLUMNS], const void *residual, void *out, long ldo) {
    for (long r = 0; r < rows; r++)
        for (long i = 0, column = panel * COLUMNS; i < (epilogue == SILU_MUL ? HALF : COLUMNS); i += LANES, column += LANES) {
            f32x sum = load_floats(sums[r] + i);
            if (w->bias) sum += load_floats(w->bias + column);
            if (epilogue == SILU_MUL) {
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

// out[row, column] for all rows, by every thread of the enclosing parallel region: each takes its share of the panels.
// a: rows of operands with stride lda, in words. No barrier at the end.
static void linear(int is_bf16, const Linear *w, Epilogue epilogue, long num_rows, const int32_t *a, long lda,
                   const void *residual, void *out, long ldo) {
    long thread = omp_get_thread_num(), threads = omp_get_num_threads(), steps = words(is_bf16, w->in_features);
    long panels = (w->num_columns + COLUMNS - 1) / COLUMNS;
    long large_tiles = max_long(1, (num_rows + TILE_ROWS - PREFETCHING_ROWS) / TILE_ROWS);
    float sums[TILE_ROWS][COLUMNS];
    for (long panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++) {
        // The next panel comes from memory while this one is multiplied, each large tile asking for its part.
        const int32_t *b = w->panels + panel * steps * COLUMNS;
        const int32_t *ahead = b + (num_rows <= WIDE_ROWS ? READ_AHEAD(steps) : steps * COLUMNS);
        long next_bytes = steps * COLUMNS * sizeof *b / large_tiles;
        Columns columns = {&b, 1, steps, steps, HALF, COLUMNS, (const char *)ahead, next_bytes / steps};
        for (long row = 0; row < num_rows; row += TILE_ROWS, columns.ahead += next_bytes) {
            long rows = min_long(TILE_ROWS, num_rows - row);
            TILES[is_bf16][rows - 1](a + row * lda, lda, &columns, sums[0], COLUMNS);
            if (is_bf16) finish_tile(1, w, epilogue, row, rows, panel, sums, residual, out, ldo);
            else finish_tile(0, w, epilogue, row, rows, panel, sums, residual, out, ldo);
        }
    }
}
