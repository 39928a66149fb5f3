// Linear layers over weights packed as panels of 32 output columns: [panels][words of one row][32 columns].
typedef struct {
    int64_t in_features, num_columns;  // columns before rounding up to whole panels
    const int32_t *panels;
    const float *bias;  // [panels * 32], or null
} Linear;

// What happens to a product before it is stored. SILU_MUL: a panel is 16 gate and the 16 matching up columns.
typedef enum { PLAIN, ADD_RESIDUAL, SILU_MUL } Epilogue;

INLINE f32x silu16(f32x x) { return x / (exp16(-x) + 1.0f); }

INLINE void store_columns(int is_bf16, void *out, long index, f32x v, long columns) {
    if (columns >= LANES) { store16(is_bf16, out, index, v); return; }
    char spare[LANES * sizeof(float)];
    store16(is_bf16, spare, 0, v);
    if (columns > 0) memcpy((char *)out + index * element_bytes(is_bf16), spare, columns * element_bytes(is_bf16));
}

// Store the sums of `rows` rows and one panel. residual and out: elements with stride ldo.
INLINE void finish_tile(int is_bf16, const Linear *w, Epilogue epilogue, long first_row, long rows, long panel,
                        float (*sums)[COLUMNS], const void *residual, void *out, long ldo) {
    long column = panel * COLUMNS;
    for (long r = 0; r < rows; r++) {
        f32x left = load_floats(sums[r]), right = load_floats(sums[r] + LANES);
        if (w->bias) {
            left += load_floats(w->bias + column);
            right += load_floats(w->bias + column + LANES);
        }
        if (epilogue == SILU_MUL) {
            f32x gate = round16(is_bf16, silu16(round16(is_bf16, left)));
            store16(is_bf16, out, (first_row + r) * ldo + panel * LANES, gate * round16(is_bf16, right));
            continue;
        }
        long index = (first_row + r) * ldo + column;
        if (epilogue == ADD_RESIDUAL) {
            left = round16(is_bf16, left) + load16(is_bf16, residual, index);
            right = round16(is_bf16, right) + load16(is_bf16, residual, index + LANES);
        }
        store_columns(is_bf16, out, index, left, w->num_columns - column);
        store_columns(is_bf16, out, index + LANES, right, w->num_columns - column - LANES);
    }
}

// out[row, column] for all rows, by every thread of the enclosing parallel region: each takes its share of the panels.
// a: rows of words with stride lda. No barrier at the end.
static void linear(int is_bf16, const Linear *w, Epilogue epilogue, long num_rows, const int32_t *a, long lda,
                   const void *residual, void *out, long ldo) {
    long thread = omp_get_thread_num(), threads = omp_get_num_threads(), steps = words(is_bf16, w->in_features);
    long panels = (w->num_columns + COLUMNS - 1) / COLUMNS;
    long large_tiles = max_long(1, (num_rows + TILE_ROWS - PREFETCHING_ROWS) / TILE_ROWS);
    float sums[TILE_ROWS][COLUMNS];
    for (long panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++) {
        const int32_t *b = w->panels + panel * steps * COLUMNS;
        // The next panel comes from memory while this one is multiplied, each large tile asking for its part.
        long next_bytes = steps * COLUMNS * sizeof *b / large_tiles;
        Columns columns = {&b, 1, steps, steps, LANES, COLUMNS, (const char *)(b + steps * COLUMNS), next_bytes / steps};
        for (long row = 0; row < num_rows; row += TILE_ROWS, columns.ahead += next_bytes) {
            long rows = min_long(TILE_ROWS, num_rows - row);
            TILES[is_bf16][rows - 1](a + row * lda, lda, &columns, sums[0], COLUMNS);
            if (is_bf16) finish_tile(1, w, epilogue, row, rows, panel, sums, residual, out, ldo);
            else finish_tile(0, w, epilogue, row, rows, panel, sums, residual, out, ldo);
        }
    }
}
