// Sixteen-lane vectors, the two storage types (bf16, fp32), and the matrix tile that everything else is built from.
//
// One rule makes every result independent of the batch: each output element is a single reduction in a fixed order, done
// by one thread. Tiles, threads and batch mates divide outputs among them, never a reduction. Multiply-adds are written
// out (`fma16`) and the compiler may not contract others, so that every copy of an inlined function rounds alike.
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define COLUMNS 32  // of one tile: two vectors
#ifdef __AVX512F__
#define TILE_ROWS 12  // 24 accumulators, 2 columns vectors and a broadcast row fit 32 registers
#else
#define TILE_ROWS 2
#endif
#define PREFETCHING_ROWS 8

typedef float f32x __attribute__((vector_size(64)));
typedef int32_t i32x __attribute__((vector_size(64)));
typedef uint32_t u32x __attribute__((vector_size(64)));
typedef uint16_t u16x __attribute__((vector_size(32)));

INLINE i32x load_words(const void *from) { i32x v; memcpy(&v, from, sizeof v); return v; }
INLINE f32x load_floats(const float *from) { f32x v; memcpy(&v, from, sizeof v); return v; }
INLINE void store_floats(float *to, f32x v) { memcpy(to, &v, sizeof v); }
INLINE f32x splat(float x) { return x - (f32x){0}; }
INLINE i32x splat_word(int32_t x) {
#ifdef __AVX512F__
    return (i32x)_mm512_set1_epi32(x);
#else
    return x - (i32x){0};
#endif
}
INLINE f32x select16(i32x mask, f32x yes, f32x no) { return (f32x)((mask & (i32x)yes) | (~mask & (i32x)no)); }

INLINE f32x fma16(f32x a, f32x b, f32x c) {
#if defined(__AVX512F__)
    return (f32x)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
    z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]), z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
    memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}

// One 32-bit word holds one fp32 element, or two neighbouring bf16 elements of the reduced dimension.
INLINE long words(int is_bf16, long elements) { return is_bf16 ? elements / 2 : elements; }
INLINE long element_bytes(int is_bf16) { return is_bf16 ? 2 : 4; }

// acc + a . b, word by word.
INLINE f32x dot(int is_bf16, f32x acc, i32x a, i32x b) {
    if (!is_bf16) return fma16((f32x)a, (f32x)b, acc);
#ifdef __AVX512BF16__
    return (f32x)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    const i32x high = splat_word((int32_t)0xffff0000u);
    acc = fma16((f32x)(a << 16), (f32x)(b << 16), acc);
    return fma16((f32x)(a & high), (f32x)(b & high), acc);
#endif
}

INLINE float widen(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }
INLINE uint16_t narrow(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? rounded : 0x7fc0;
}
INLINE f32x widen16(u16x v) { return (f32x)(__builtin_convertvector(v, u32x) << 16); }
INLINE u16x narrow16(f32x v) {
#ifdef __AVX512BF16__
    return (u16x)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x bits = (u32x)v, nan = (u32x)(v != v);
    u32x rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), u16x);
#endif
}

INLINE f32x load16(int is_bf16, const void *array, long index) {
    if (!is_bf16) return load_floats((const float *)array + index);
    u16x v;
    memcpy(&v, (const uint16_t *)array + index, sizeof v);
    return widen16(v);
}
INLINE void store16(int is_bf16, void *array, long index, f32x v) {
    if (!is_bf16) { store_floats((float *)array + index, v); return; }
    u16x narrowed = narrow16(v);
    memcpy((uint16_t *)array + index, &narrowed, sizeof narrowed);
}
// The value that storing and loading again would give: models round between operations, so we do.
INLINE f32x round16(int is_bf16, f32x v) { return is_bf16 ? widen16(narrow16(v)) : v; }
INLINE float load1(int is_bf16, const void *array, long i) {
    return is_bf16 ? widen(((const uint16_t *)array)[i]) : ((const float *)array)[i];
}
INLINE float round1(int is_bf16, float x) { return is_bf16 ? widen(narrow(x)) : x; }

INLINE float sum16(f32x v) {
    float lane[LANES];
    store_floats(lane, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}
INLINE int any16(i32x mask) {
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any;
}
INLINE float max16(f32x v) {
    float lane[LANES], best;
    store_floats(lane, v);
    best = lane[0];
    for (int i = 1; i < LANES; i++) best = lane[i] > best ? lane[i] : best;
    return best;
}

INLINE f32x larger16(f32x a, f32x b) {  // a > b ? a : b
#ifdef __AVX512F__
    return (f32x)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select16(a > b, a, b);
#endif
}

// e^x to about 2 units in the last place; exactly 1 at 0 and 0 far below, NaN stays NaN.
INLINE f32x exp16(f32x x) {
    f32x y = larger16(splat(-110.0f), x);
    f32x shifted = fma16(y, splat(1.44269504f), splat(12582912.0f));  // rounds to an integer in the low bits
    f32x n = shifted - 12582912.0f;
    f32x r = fma16(n, splat(-0.693359375f), y);
    r = fma16(n, splat(2.12194440e-4f), r);
    f32x p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r + 1.0f);
#ifdef __AVX512F__
    return (f32x)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    f32x scaled = (f32x)((i32x)p + (((i32x)shifted - 0x4b400000) << 23));
    scaled = select16(x > 88.0f, splat(INFINITY), select16(x < -87.0f, splat(0.0f), scaled));
    return select16(x != x, x, scaled);
#endif
}

// What the tile function multiplies `rows` rows of words with: `num_segments` runs of `steps` words (the last may be shorter), each
// with two vectors of columns, `gap` words apart, per word; `ldb` words from one to the next. A tile that multiplies for
// longer than it reads asks memory for what comes next: from `ahead` on, `ahead_bytes` further at every step.
typedef struct {
    const int32_t *const *segments;
    long num_segments, steps, last_steps, gap, ldb;
    const char *ahead;
    long ahead_bytes;
} Columns;

// out[r] = a[r] . columns, reduced in order. a: rows of words with stride lda; out: floats with stride ldo.
INLINE void tile(int is_bf16, int rows, const int32_t *a, long lda, const Columns *columns, float *out, long ldo) {
    f32x acc[TILE_ROWS][2];
    const int32_t *a3 = a + 3 * lda, *a6 = a + 6 * lda, *a9 = a + 9 * lda;
    const long ldb = columns->ldb, gap = columns->gap, ahead_bytes = columns->ahead_bytes;
    const char *ahead = columns->ahead;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = splat(0.0f);
    for (long segment = 0, done = 0; segment < columns->num_segments; segment++) {
        const int32_t *b = columns->segments[segment];
        const long steps = segment + 1 < columns->num_segments ? columns->steps : columns->last_steps;
        for (long end = done + steps; done < end; done++, b += ldb) {
            i32x x = load_words(b), y = load_words(b + gap);
            if (rows >= PREFETCHING_ROWS) {
                __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + 64, 0, 2);
                ahead += ahead_bytes;
            }
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const int32_t *base = r < 3 ? a : r < 6 ? a3 : r < 9 ? a6 : a9;
                i32x w = splat_word(base[(r % 3) * lda + done]);
                acc[r][0] = dot(is_bf16, acc[r][0], w, x);
                acc[r][1] = dot(is_bf16, acc[r][1], w, y);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) store_floats(out + r * ldo, acc[r][0]), store_floats(out + r * ldo + LANES, acc[r][1]);
}

// One copy for each type and number of rows, so that the sums stay in registers.
typedef void TileFunction(const int32_t *a, long lda, const Columns *columns, float *out, long ldo);
#define TILE(rows) \
    static void tile_bf16_##rows(const int32_t *a, long lda, const Columns *c, float *out, long ldo) { tile(1, rows, a, lda, c, out, ldo); } \
    static void tile_fp32_##rows(const int32_t *a, long lda, const Columns *c, float *out, long ldo) { tile(0, rows, a, lda, c, out, ldo); }
TILE(1) TILE(2)
#if TILE_ROWS == 12
TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#define ROWS_OF(type) {tile_##type##_1, tile_##type##_2, tile_##type##_3, tile_##type##_4, tile_##type##_5, tile_##type##_6, \
                       tile_##type##_7, tile_##type##_8, tile_##type##_9, tile_##type##_10, tile_##type##_11, tile_##type##_12}
#else
#define ROWS_OF(type) {tile_##type##_1, tile_##type##_2}
#endif
static TileFunction *const TILES[2][TILE_ROWS] = {ROWS_OF(fp32), ROWS_OF(bf16)};

INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

// Row stride, in words, of the activations that tiles read: an odd number of cache lines, so that twelve rows never
// compete for the same cache set.
INLINE long row_words(long used) { return (((used + LANES - 1) / LANES) | 1) * LANES; }

// Buffers that only grow. Calls into this library never overlap: they hold Python's interpreter lock.
enum { SCRATCH_NORMED, SCRATCH_QKV, SCRATCH_MIXED, SCRATCH_HIDDEN, SCRATCH_ACTIVATED, SCRATCH_UNITS, SCRATCH_STATES,
       SCRATCH_QUERIES, NUM_SCRATCH };
static void *scratch(int which, size_t bytes) {
    static struct { void *memory; size_t bytes; } held[NUM_SCRATCH];
    if (held[which].bytes < bytes) {
        bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
        free(held[which].memory);
        held[which].memory = aligned_alloc(64, bytes);
        held[which].bytes = bytes;
        if (!held[which].memory) abort();
        memset(held[which].memory, 0, bytes);
    }
    return held[which].memory;
}
