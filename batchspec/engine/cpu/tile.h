// The matrix tile that everything else is built from: a few rows by 32 columns.
#define COLUMNS 32
#define HALF 16  // columns that lie side by side in memory, of a tile's two halves

// Rows of a tile, whose sums (and some operands) fill the processor's registers: 32 of AVX-512 or NEON, 16 of AVX2. The
// latter hold the sums of up to WIDE_ROWS rows over all columns, of more rows over one half after the other. From
// PREFETCHING_ROWS on a tile asks memory for what comes next; one that reads its panel once asks this many words ahead of
// where it reads, in a panel of so many steps.
#if LANES == 16
#define TILE_ROWS 12
#define WIDE_ROWS 12
#define PREFETCHING_ROWS 8
#define READ_AHEAD(steps) ((steps) * COLUMNS)  // the next panel
#else
#define TILE_ROWS 6
#define WIDE_ROWS 3
#define PREFETCHING_ROWS 1
#define READ_AHEAD(steps) 512
#endif

// What a tile multiplies `rows` rows of words with: `num_segments` runs of `steps` words (the last may be shorter), each
// with two halves of columns, `gap` words apart, per word; `ldb` words from one to the next. What comes next is asked of
// memory from `ahead` on, `ahead_bytes` (at most two lines) at every step; each strip of columns asks for its share.
typedef struct {
    const int32_t *const *segments;
    long num_segments, steps, last_steps, gap, ldb;
    const char *ahead;
    long ahead_bytes;
} Columns;

// acc[r][v] += a[r] . b[v] for one word of columns; `a` of row 3 i + j is at base[i] + j * lda.
INLINE void multiply_word(int is_bf16, int rows, int vectors, const int32_t *const base[4], long lda, const i32x *b,
                          f32x (*acc)[COLUMNS / LANES]) {
    const int parts = operands_per_word(is_bf16);
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        f32x x[COLUMNS / LANES];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            x[v] = parts == 1 ? (f32x)b[v] : part ? second_of_pair(b[v]) : first_of_pair(b[v]);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            i32x w = splat_word(base[r / 3][(r % 3) * lda + part]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) accumulate(operand_is_bf16(is_bf16), &acc[r][v], w, x[v]);
        }
    }
}

INLINE long num_steps(const Columns *columns) { return (columns->num_segments - 1) * columns->steps + columns->last_steps; }

// out[r] = a[r] . columns over `vectors` vectors from column `first` on, reduced in order.
INLINE void strip(int is_bf16, int rows, int vectors, int first, const int32_t *a, long lda, const Columns *columns,
                  float *out, long ldo) {
    f32x acc[TILE_ROWS][COLUMNS / LANES];
    const long ldb = columns->ldb, gap = columns->gap, ahead_bytes = columns->ahead_bytes;
    const int width = vectors * LANES, strips = COLUMNS / width;
    const char *ahead = columns->ahead + ahead_bytes * (first / width) / strips * num_steps(columns);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) acc[r][v] = splat(0.0f);
    for (long segment = 0, done = 0; segment < columns->num_segments; segment++) {
        const int32_t *b = columns->segments[segment];
        const long steps = segment + 1 < columns->num_segments ? columns->steps : columns->last_steps;
        for (long end = done + steps; done < end; done++, b += ldb, a += operands_per_word(is_bf16)) {
            i32x x[COLUMNS / LANES];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                const int column = first + v * LANES;
                x[v] = load_words(b + column / HALF * gap + column % HALF);
            }
            if (rows >= PREFETCHING_ROWS) {
                __builtin_prefetch(ahead, 0, 2);
                if (strips == 1) __builtin_prefetch(ahead + 64, 0, 2);
                ahead += ahead_bytes / strips;
            }
            const int32_t *const base[4] = {a, a + 3 * lda, a + 6 * lda, a + 9 * lda};
            multiply_word(is_bf16, rows, vectors, base, lda, x, acc);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store_floats(out + r * ldo + first + v * LANES, acc[r][v]);
}

// a: rows of operands with stride lda, in words; out: floats with stride ldo.
INLINE void tile(int is_bf16, int rows, const int32_t *a, long lda, const Columns *columns, float *out, long ldo) {
    const int width = rows <= WIDE_ROWS ? COLUMNS : HALF;
#pragma GCC unroll 2
    for (int first = 0; first < COLUMNS; first += width)
        strip(is_bf16, rows, width / LANES, first, a, lda, columns, out, ldo);
}

// One copy for each type and number of rows, so that the sums stay in registers.
typedef void TileFunction(const int32_t *a, long lda, const Columns *columns, float *out, long ldo);
#define TILE(rows) \
    static void tile_bf16_##rows(const int32_t *a, long lda, const Columns *c, float *out, long ldo) { tile(1, rows, a, lda, c, out, ldo); } \
    static void tile_fp32_##rows(const int32_t *a, long lda, const Columns *c, float *out, long ldo) { tile(0, rows, a, lda, c, out, ldo); }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#define FIRST_OF(type) tile_##type##_1, tile_##type##_2, tile_##type##_3, tile_##type##_4, tile_##type##_5, tile_##type##_6
#if TILE_ROWS == 12
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#define ROWS_OF(type) {FIRST_OF(type), tile_##type##_7, tile_##type##_8, tile_##type##_9, tile_##type##_10, tile_##type##_11, tile_##type##_12}
#else
#define ROWS_OF(type) {FIRST_OF(type)}
#endif
static TileFunction *const TILES[2][TILE_ROWS] = {ROWS_OF(fp32), ROWS_OF(bf16)};

// Row stride, in words, of the activations that tiles read: an odd number of cache lines, so that twelve rows never
// compete for the same cache set.
INLINE long row_words(long used) { return (((used + LINE_WORDS - 1) / LINE_WORDS) | 1) * LINE_WORDS; }
