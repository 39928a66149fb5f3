// The CPU kernels behind batchspec.engine.cpu: a plain C interface, loaded with ctypes.
#include "simd.h"
#include "tile.h"
#include "linear.h"
#include "attention.h"

// A decoder layer: norm, QKV, rotary embedding, attention, output, norm, gated feed-forward; residual after each half.
typedef struct {
    Attention attention;
    int64_t hidden_size, intermediate_size;
    Linear qkv, output, gate_up, down;
    const void *input_norm, *post_attention_norm, *query_norm, *key_norm;  // the last two may be null
    float input_norm_eps, post_attention_norm_eps, query_norm_eps, key_norm_eps;
} Layer;

// RMSNorm over `size` elements, rounded where transformers rounds.
static void rms_norm(int is_bf16, const void *in, const void *weight, float eps, long size, int out_is_bf16, void *out) {
    f32x squares = splat(0.0f);
    for (long i = 0; i < size; i += LANES) {
        f32x x = load(is_bf16, in, i);
        squares = multiply_add(x, x, squares);
    }
    f32x scale = splat(1.0f / sqrtf(sum_lanes(squares) / size + eps));
    for (long i = 0; i < size; i += LANES)
        store_rounded(is_bf16, out_is_bf16, out, i,
                      load(is_bf16, weight, i) * round_lanes(is_bf16, load(is_bf16, in, i) * scale));
}

// Rotate one head in place, x * cos + rotate_half(x) * sin, rounded where transformers rounds.
INLINE void rotate(int is_bf16, void *head, const void *cos, const void *sin, long dim) {
    for (long i = 0, half = dim / 2; i < half; i += LANES) {
        long lanes = min_long(LANES, half - i), j = i + half;
        f32x x = load_some(is_bf16, head, i, lanes), y = load_some(is_bf16, head, j, lanes);
        f32x cos_x = load_some(is_bf16, cos, i, lanes), sin_x = load_some(is_bf16, sin, i, lanes);
        f32x cos_y = load_some(is_bf16, cos, j, lanes), sin_y = load_some(is_bf16, sin, j, lanes);
        f32x first = round_lanes(is_bf16, x * cos_x) + round_lanes(is_bf16, -y * sin_x);
        f32x second = round_lanes(is_bf16, y * cos_y) + round_lanes(is_bf16, x * sin_y);
        store_some(is_bf16, head, i, first, lanes);
        store_some(is_bf16, head, j, second, lanes);
    }
}

static long sequence_of(const Step *step, long row) {
    long low = 0, high = step->num_seqs;
    while (high - low > 1) {
        long middle = (low + high) / 2;
        if (step->query_starts[middle] <= row) low = middle; else high = middle;
    }
    return low;
}

// out may be hidden.
static void decode_layer(int threads, const Layer *layer, const Step *step, const void *hidden, const void *cos,
                         const void *sin, void *key_pool, void *value_pool, void *out) {
    const Attention *at = &layer->attention;
    const int is_bf16 = at->is_bf16, operands_are_bf16 = operand_is_bf16(is_bf16);
    const long rows = step->num_rows, size = layer->hidden_size, dim = at->head_dim, bytes = element_bytes(is_bf16);
    const long per_word = operands_are_bf16 ? 2 : 1, num_heads = at->num_heads, kv_heads = at->num_kv_heads;
    const long ldn = row_words(operand_words(is_bf16, size)), ldm = row_words(operand_words(is_bf16, num_heads * dim));
    const long lda = row_words(operand_words(is_bf16, layer->intermediate_size)), ldq = (num_heads + 2 * kv_heads) * dim;
    const long attended = step->query_starts[step->num_seqs];
    char *normed = scratch(SCRATCH_NORMED, rows * ldn * 4), *mixed = scratch(SCRATCH_MIXED, rows * ldm * 4);
    char *activated = scratch(SCRATCH_ACTIVATED, rows * lda * 4), *qkv = scratch(SCRATCH_QKV, (rows * ldq + COLUMNS) * bytes);
    char *middle = scratch(SCRATCH_HIDDEN, rows * size * bytes);
    Plan plan = plan_attention(at, step, threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            rms_norm(is_bf16, (const char *)hidden + r * size * bytes, layer->input_norm, layer->input_norm_eps, size,
                     operands_are_bf16, normed + r * ldn * 4);
        linear(is_bf16, &layer->qkv, PLAIN, rows, (const int32_t *)normed, ldn, NULL, qkv, ldq);
#pragma omp barrier
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            if (r >= attended) { memset(mixed + r * ldm * 4, 0, ldm * 4); continue; }
            char *row = qkv + r * ldq * bytes, *keys = row + num_heads * dim * bytes, *values = keys + kv_heads * dim * bytes;
            for (char *head = row; head < values; head += dim * bytes) {
                const void *norm = head < keys ? layer->query_norm : layer->key_norm;
                float eps = head < keys ? layer->query_norm_eps : layer->key_norm_eps;
                if (norm) rms_norm(is_bf16, head, norm, eps, dim, is_bf16, head);
                const char *row_cos = (const char *)cos + r * dim * bytes, *row_sin = (const char *)sin + r * dim * bytes;
                if (is_bf16) rotate(1, head, row_cos, row_sin, dim);
                else rotate(0, head, row_cos, row_sin, dim);
            }
            long seq = sequence_of(step, r), position = step->first_positions[seq] + r - step->query_starts[seq];
            write_kv(at, step, seq, position, r + 1 == step->query_starts[seq + 1], keys, values, key_pool, value_pool);
        }
        attend(at, step, &plan, qkv, ldq, key_pool, value_pool, operands_are_bf16, mixed, ldm * per_word);
        linear(is_bf16, &layer->output, ADD_RESIDUAL, rows, (const int32_t *)mixed, ldm, hidden, middle, size);
#pragma omp barrier
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            rms_norm(is_bf16, middle + r * size * bytes, layer->post_attention_norm, layer->post_attention_norm_eps, size,
                     operands_are_bf16, normed + r * ldn * 4);
        linear(is_bf16, &layer->gate_up, SILU_MUL, rows, (const int32_t *)normed, ldn, NULL, activated, lda * per_word);
#pragma omp barrier
        linear(is_bf16, &layer->down, ADD_RESIDUAL, rows, (const int32_t *)activated, lda, middle, out, size);
    }
}

// Consecutive layers, each with K and V pools of its own.
void batchspec_layers(int threads, int64_t num_layers, const Layer *layers, const Step *step, const void *hidden,
                      const void *cos, const void *sin, void *const *key_pools, void *const *value_pools, void *out) {
    for (int64_t i = 0; i < num_layers; i++)
        decode_layer(threads, &layers[i], step, i ? out : hidden, cos, sin, key_pools[i], value_pools[i], out);
}

void batchspec_attention(int threads, const Attention *at, const Step *step, const void *queries, const void *keys,
                         const void *values, void *key_pool, void *value_pool, void *out) {
    const long dim = at->head_dim, bytes = element_bytes(at->is_bf16), attended = step->query_starts[step->num_seqs];
    Plan plan = plan_attention(at, step, threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < step->num_rows; r++) {
            if (r >= attended) { memset((char *)out + r * at->num_heads * dim * bytes, 0, at->num_heads * dim * bytes); continue; }
            long seq = sequence_of(step, r), position = step->first_positions[seq] + r - step->query_starts[seq];
            long element = r * at->num_kv_heads * dim;
            write_kv(at, step, seq, position, r + 1 == step->query_starts[seq + 1], (const char *)keys + element * bytes,
                     (const char *)values + element * bytes, key_pool, value_pool);
        }
        attend(at, step, &plan, queries, at->num_heads * dim, key_pool, value_pool, at->is_bf16, out, at->num_heads * dim);
    }
}

// out[num_rows, columns] = in[num_rows, in_features] . weight + bias
void batchspec_linear(int threads, int64_t is_bf16, const Linear *weight, int64_t num_rows, const void *in, void *out) {
    long in_features = weight->in_features, lda = row_words(operand_words(is_bf16, in_features));
    int32_t *rows = scratch(SCRATCH_NORMED, num_rows * lda * sizeof(int32_t));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < num_rows; r++)
            copy_to_operands(is_bf16, rows + r * lda, (const char *)in + r * in_features * element_bytes(is_bf16), in_features);
        linear(is_bf16, weight, PLAIN, num_rows, rows, lda, NULL, out, weight->num_columns);
    }
}

// The column of each row's largest value; the lowest such column where several are equal.
void batchspec_argmax(int threads, int64_t is_bf16, int64_t num_rows, int64_t columns, const void *in, int64_t *out) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < num_rows; r++) {
        const char *row = (const char *)in + r * columns * element_bytes(is_bf16);
        long whole = columns / LANES * LANES, c = 0;
        f32x top = splat(-INFINITY);
        for (; c < whole; c += LANES) {
            f32x x = load(is_bf16, row, c);
            top = select_lanes(x > top, x, top);
        }
        float best = max_lanes(top);
        for (; c < columns; c++) best = load_one(is_bf16, row, c) > best ? load_one(is_bf16, row, c) : best;
        for (c = 0; c < whole && !any_lane(load(is_bf16, row, c) == best); c += LANES) {}
        while (c < columns - 1 && load_one(is_bf16, row, c) != best) c++;
        out[r] = c;
    }
}
