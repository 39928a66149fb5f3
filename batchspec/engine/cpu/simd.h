// Vectors of the processor's own width, and the two storage types (bf16, fp32).
//
// One rule makes every result independent of the batch: each output element is a single reduction in a fixed order, done
// by one thread. Tiles, threads and batch mates divide outputs among them, never a reduction. Multiply-adds are written
// out (`multiply_add`) and the compiler may not contract others, so that every copy of an inlined function rounds alike.
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

// Lanes of a vector that the processor holds in one register: the compiler keeps wider ones in memory.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define LINE_WORDS 16  // of a cache line

typedef float f32x __attribute__((vector_size(4 * LANES)));
typedef int32_t i32x __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32x __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16x __attribute__((vector_size(2 * LANES)));

INLINE i32x load_words(const void *from) { i32x v; memcpy(&v, from, sizeof v); return v; }
INLINE f32x load_floats(const float *from) { f32x v; memcpy(&v, from, sizeof v); return v; }
INLINE void store_floats(float *to, f32x v) { memcpy(to, &v, sizeof v); }
INLINE f32x splat(float x) { return x - (f32x){0}; }
INLINE i32x splat_word(int32_t x) {
#if defined(__AVX512F__)
    return (i32x)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
    return (i32x)_mm256_set1_epi32(x);
#else
    return x - (i32x){0};
#endif
}
INLINE f32x select_lanes(i32x mask, f32x yes, f32x no) { return (f32x)((mask & (i32x)yes) | (~mask & (i32x)no)); }

INLINE f32x multiply_add(f32x a, f32x b, f32x c) {  // a * b + c
#if defined(__AVX512F__)
    return (f32x)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (f32x)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// One 32-bit word holds one fp32 element, or two neighbouring bf16 elements of the reduced dimension.
INLINE long words(int is_bf16, long elements) { return is_bf16 ? elements / 2 : elements; }
INLINE long element_bytes(int is_bf16) { return is_bf16 ? 2 : 4; }
// The rows that tiles multiply: pairs of bf16 where the processor multiplies those, floats (of the same value) elsewhere.
#ifdef __AVX512BF16__
#define MULTIPLIES_PAIRS 1
#else
#define MULTIPLIES_PAIRS 0
#endif
INLINE int operand_is_bf16(int is_bf16) { return is_bf16 && MULTIPLIES_PAIRS; }
INLINE long operand_words(int is_bf16, long elements) { return words(operand_is_bf16(is_bf16), elements); }
INLINE int operands_per_word(int is_bf16) { return is_bf16 && !MULTIPLIES_PAIRS ? 2 : 1; }
INLINE void accumulate(int operands_are_bf16, f32x *sum, i32x a, f32x b) {  // sum + a . b
#if defined(__AVX512BF16__)
    if (operands_are_bf16) { *sum = (f32x)_mm512_dpbf16_ps((__m512)*sum, (__m512bh)a, (__m512bh)b); return; }
#endif
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    // written out, or the compiler moves sums between the few registers
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"((f32x)a), "x"(b));
#else
    *sum = multiply_add((f32x)a, b, *sum);
#endif
}
INLINE f32x first_of_pair(i32x pairs) { return (f32x)(pairs << 16); }
INLINE f32x second_of_pair(i32x pairs) { return (f32x)(pairs & splat_word((int32_t)0xffff0000u)); }

INLINE float widen(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }
INLINE f32x widen_lanes(u16x v) { return (f32x)(__builtin_convertvector(v, u32x) << 16); }
INLINE u16x narrow_lanes(f32x v) {  // to nearest, ties to even
#ifdef __AVX512BF16__
    return (u16x)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x bits = (u32x)v, nan = (u32x)(v != v);
    u32x rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), u16x);
#endif
}

INLINE f32x load(int is_bf16, const void *array, long index) {
    if (!is_bf16) return load_floats((const float *)array + index);
    u16x v;
    memcpy(&v, (const uint16_t *)array + index, sizeof v);
    return widen_lanes(v);
}
INLINE void store(int is_bf16, void *array, long index, f32x v) {
    if (!is_bf16) { store_floats((float *)array + index, v); return; }
    u16x narrowed = narrow_lanes(v);
    memcpy((uint16_t *)array + index, &narrowed, sizeof narrowed);
}
INLINE f32x load_some(int is_bf16, const void *array, long index, long lanes) {  // zeros for the rest
    if (lanes >= LANES) return load(is_bf16, array, index);
    char spare[LANES * sizeof(float)] = {0};
    memcpy(spare, (const char *)array + index * element_bytes(is_bf16), lanes * element_bytes(is_bf16));
    return load(is_bf16, spare, 0);
}
INLINE void store_some(int is_bf16, void *array, long index, f32x v, long lanes) {
    if (lanes >= LANES) { store(is_bf16, array, index, v); return; }
    char spare[LANES * sizeof(float)];
    store(is_bf16, spare, 0, v);
    if (lanes > 0) memcpy((char *)array + index * element_bytes(is_bf16), spare, lanes * element_bytes(is_bf16));
}
// The value that storing and loading again would give: models round between operations, so we do.
INLINE f32x round_lanes(int is_bf16, f32x v) { return is_bf16 ? widen_lanes(narrow_lanes(v)) : v; }
INLINE float load_one(int is_bf16, const void *array, long i) {
    return is_bf16 ? widen(((const uint16_t *)array)[i]) : ((const float *)array)[i];
}
// Store what the model rounds to its type (`is_bf16`) in an array of that type, or of floats.
INLINE void store_rounded(int is_bf16, int array_is_bf16, void *array, long index, f32x v) {
    if (array_is_bf16) store(1, array, index, v);
    else store_floats((float *)array + index, round_lanes(is_bf16, v));
}
INLINE void store_operand(int is_bf16, void *array, long index, f32x v) {
    store_rounded(is_bf16, operand_is_bf16(is_bf16), array, index, v);
}
INLINE void copy_to_operands(int is_bf16, void *to, const void *from, long elements) {
    if (is_bf16 == operand_is_bf16(is_bf16)) { memcpy(to, from, elements * element_bytes(is_bf16)); return; }
    long i = 0;
    for (; i + LANES <= elements; i += LANES) store_floats((float *)to + i, load(1, from, i));
    for (; i < elements; i++) {
        float x = load_one(1, from, i);
        memcpy((float *)to + i, &x, sizeof x);
    }
}
INLINE float sum_lanes(f32x v) {
    float lane[LANES];
    store_floats(lane, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}
INLINE int any_lane(i32x mask) {
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any;
}
INLINE float max_lanes(f32x v) {
    float lane[LANES], best;
    store_floats(lane, v);
    best = lane[0];
    for (int i = 1; i < LANES; i++) best = lane[i] > best ? lane[i] : best;
    return best;
}

INLINE f32x larger(f32x a, f32x b) {  // a > b ? a : b
#if defined(__AVX512F__)
    return (f32x)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (f32x)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_lanes(a > b, a, b);
#endif
}

// e^x to about 2 units in the last place; exactly 1 at 0 and 0 far below, NaN stays NaN.
INLINE f32x exponential(f32x x) {
    f32x y = larger(splat(-110.0f), x);
    f32x shifted = multiply_add(y, splat(1.44269504f), splat(12582912.0f));  // rounds to an integer in the low bits
    f32x n = shifted - 12582912.0f;
    f32x r = multiply_add(n, splat(-0.693359375f), y);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    f32x p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r + 1.0f);
#ifdef __AVX512F__
    return (f32x)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    f32x scaled = (f32x)((i32x)p + (((i32x)shifted - 0x4b400000) << 23));
    scaled = select_lanes(x > 88.0f, splat(INFINITY), select_lanes(x < -87.0f, splat(0.0f), scaled));
    return select_lanes(x != x, x, scaled);
#endif
}
INLINE f32x silu(f32x x) { return x / (exponential(-x) + 1.0f); }
INLINE f32x hyperbolic_tangent(f32x x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

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
