// Causal attention over a paged KV cache.
//
// Inside a block of the pool, 16 tokens form a tile that `tile()` reads without any transposition, per KV head:
// keys [words of a head][16 tokens], values [words of the 16 tokens][head_dim] (bf16: the word of a token pair).
// A row walks its keys in partitions of 256 tokens at fixed absolute positions: maximum, exponentials, sum and mixed
// values of each partition, merged in order. Whether one thread walks them all or several do, the operations are the same.
#define TILE_TOKENS HALF
#define PARTITION 256
#define PROBABILITY_WORDS (PARTITION + LINE_WORDS)  // row stride: an odd number of cache lines

typedef struct {
    int64_t num_seqs, num_rows, max_blocks, block_tokens;
    const int32_t *query_starts;     // [num_seqs + 1]
    const int32_t *first_positions;  // [num_seqs]
    const int32_t *block_tables;     // [num_seqs, max_blocks]
} Step;

typedef struct {
    int64_t is_bf16, num_heads, num_kv_heads, head_dim, window;  // window 0: every earlier token is visible
    float scale, softcap;                                        // softcap 0: none
} Attention;

// Rows of one sequence that are handled together, and where their running states lie (in floats).
typedef struct { int32_t seq, row, num_rows, first_position, first_partition, num_partitions; int64_t state; } Unit;

INLINE long tile_offset(const Attention *at, const Step *step, long seq, long position, long kv_head) {  // in elements
    long block = step->block_tables[seq * step->max_blocks + position / step->block_tokens];
    long tile_index = (block * step->block_tokens + position % step->block_tokens) / TILE_TOKENS;
    return (tile_index * at->num_kv_heads + kv_head) * TILE_TOKENS * at->head_dim;
}

// Put one row's keys and values, [num_kv_heads, head_dim] each, at `position` of its sequence.
static void write_kv(const Attention *at, const Step *step, long seq, long position, int is_last, const void *keys,
                     const void *values, void *key_pool, void *value_pool) {
    long dim = at->head_dim, lane = position % TILE_TOKENS;
    for (long head = 0; head < at->num_kv_heads; head++) {
        long offset = tile_offset(at, step, seq, position, head);
        if (at->is_bf16) {
            const uint16_t *key = (const uint16_t *)keys + head * dim, *value = (const uint16_t *)values + head * dim;
            uint16_t *key_tile = (uint16_t *)key_pool + offset, *value_tile = (uint16_t *)value_pool + offset;
            for (long d = 0; d < dim; d += 2) memcpy(key_tile + d * TILE_TOKENS + 2 * lane, key + d, 4);
            uint16_t *pair = value_tile + lane / 2 * 2 * dim;
            for (long d = 0; d < dim; d++) pair[2 * d + lane % 2] = value[d];
            // the partner of a last even token is read with weight zero, which mends no NaN of a former owner
            if (is_last && lane % 2 == 0)
                for (long d = 0; d < dim; d++) pair[2 * d + 1] = 0;
        } else {
            float *key_tile = (float *)key_pool + offset, *value_tile = (float *)value_pool + offset;
            for (long d = 0; d < dim; d++) key_tile[d * TILE_TOKENS + lane] = ((const float *)keys)[head * dim + d];
            memcpy(value_tile + lane * dim, (const float *)values + head * dim, dim * sizeof(float));
        }
    }
}

// The state of a row: maximum, sum, then head_dim mixed values. A row that has seen no key has maximum -inf.
INLINE long state_floats(const Attention *at) { return row_words(at->head_dim + LINE_WORDS); }
INLINE float *mixed_values(float *state) { return state + LINE_WORDS; }
static void clear_state(const Attention *at, float *state) {
    memset(state, 0, state_floats(at) * sizeof(float));
    state[0] = -INFINITY;
}
// Scales of the state so far and of what is merged into it; updates maximum and sum.
INLINE void merge_sums(float *state, float maximum, float sum, f32x *keep, f32x *add) {
    f32x top = splat(state[0] > maximum ? state[0] : maximum);
    *keep = exponential(splat(state[0]) - top);
    *add = exponential(splat(maximum) - top);
    state[0] = top[0];
    state[1] = multiply_add(splat(state[1]), *keep, splat(sum) * *add)[0];
}
INLINE f32x merge_values(f32x state, f32x keep, f32x values, f32x add) { return multiply_add(state, keep, values * add); }

// Hide what row `position` may not see and exponentiate; returns the largest scaled score, -inf where it sees nothing.
INLINE float soften(int is_bf16, const Attention *at, long position, long begin, long tiles, float *scores,
                    void *probabilities, float *sum) {
    i32x lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const long oldest = at->window ? position - at->window + 1 : 0;
    const float scale = at->softcap ? 1.0f : at->scale;
    f32x top = splat(-INFINITY), total = splat(0.0f);
    if (at->softcap)
        for (long t = 0; t < tiles * TILE_TOKENS; t += LANES)
            store_floats(scores + t, hyperbolic_tangent(load_floats(scores + t) * (at->scale / at->softcap)) * at->softcap);
    for (long t = 0; t < tiles * TILE_TOKENS; t += LANES) {
        f32x s = load_floats(scores + t);
        if (begin + t + LANES - 1 > position || begin + t < oldest) {
            i32x key_position = lane + (int)(begin + t);
            s = select_lanes((key_position <= (int)position) & (key_position >= (int)oldest), s, splat(-INFINITY));
            store_floats(scores + t, s);
        }
        top = larger(s, top);
    }
    float maximum = max_lanes(top) * scale;
    f32x factor = splat(scale), shift = splat(maximum == -INFINITY ? 0.0f : -maximum);
    for (long t = 0; t < tiles * TILE_TOKENS; t += LANES) {
        f32x p = exponential(multiply_add(load_floats(scores + t), factor, shift));
        total += p;
        store_operand(is_bf16, probabilities, t, p);
    }
    *sum = sum_lanes(total);
    return maximum;
}

INLINE void prefetch(const int32_t *from, long words) {
    for (long i = 0; i < words; i += LINE_WORDS) __builtin_prefetch(from + i, 0, 2);
}

// Merge keys [begin, end), of one partition, into the states of `rows` query rows from `first_row` of the unit on.
static void attend_tile(const Attention *at, const Step *step, const Unit *unit, long kv_head, long first_row, long rows,
                        long begin, long end, const int32_t *queries, long ldq, const void *key_pool,
                        const void *value_pool, float *states) {
    const int is_bf16 = at->is_bf16;
    const long group = at->num_heads / at->num_kv_heads, dim = at->head_dim, tiles = (end - begin + TILE_TOKENS - 1) / TILE_TOKENS;
    const long last_tokens = end - begin - (tiles - 1) * TILE_TOKENS;
    const int32_t *keys[PARTITION / TILE_TOKENS + 1], *values[PARTITION / TILE_TOKENS];
    float sums[TILE_ROWS][COLUMNS], scores[TILE_ROWS][PARTITION + TILE_TOKENS];
    int32_t probabilities[TILE_ROWS][PROBABILITY_WORDS];
    f32x keep[TILE_ROWS], add[TILE_ROWS];

    for (long t = 0; t < tiles; t++) {
        long word = words(is_bf16, tile_offset(at, step, unit->seq, begin + t * TILE_TOKENS, kv_head));
        keys[t] = (const int32_t *)key_pool + word;
        values[t] = (const int32_t *)value_pool + word;
    }
    keys[tiles] = keys[tiles - 1];  // the pair of an odd last tile: computed twice, used once
    for (long t = 0; t < tiles; t += 2) {
        if (first_row == 0)  // later rows find the partition in cache
            for (long i = t; i < min_long(t + 2, tiles); i++) {
                if (i + 2 < tiles) prefetch(keys[i + 2], words(is_bf16, TILE_TOKENS * dim));
                prefetch(values[i], words(is_bf16, TILE_TOKENS * dim));
            }
        Columns columns = {keys + t, 1, words(is_bf16, dim), words(is_bf16, dim), keys[t + 1] - keys[t], TILE_TOKENS, (const char *)keys[t], 0};
        TILES[is_bf16][rows - 1](queries, ldq, &columns, scores[0] + t * TILE_TOKENS, PARTITION + TILE_TOKENS);
    }
    for (long r = 0; r < rows; r++) {
        long position = unit->first_position + (first_row + r) / group;
        float sum, maximum = is_bf16 ? soften(1, at, position, begin, tiles, scores[r], probabilities[r], &sum)
                                     : soften(0, at, position, begin, tiles, scores[r], probabilities[r], &sum);
        keep[r] = splat(1.0f), add[r] = splat(0.0f);
        if (maximum != -INFINITY) merge_sums(states + (first_row + r) * state_floats(at), maximum, sum, &keep[r], &add[r]);
    }
    for (long d = 0; d < dim; d += COLUMNS) {
        const int32_t *segments[PARTITION / TILE_TOKENS];
        long right = d + HALF < dim ? HALF : 0;  // 0: an odd half, computed twice and stored once
        for (long t = 0; t < tiles; t++) segments[t] = values[t] + d;
        Columns columns = {segments, tiles, words(is_bf16, TILE_TOKENS), words(is_bf16, last_tokens + is_bf16), right, dim, (const char *)segments[0], 0};
        TILES[is_bf16][rows - 1](probabilities[0], PROBABILITY_WORDS, &columns, sums[0], COLUMNS);
        for (long r = 0; r < rows; r++) {
            float *mixed = mixed_values(states + (first_row + r) * state_floats(at)) + d;
            for (long i = 0; i < right + HALF; i += LANES)
                store_floats(mixed + i, merge_values(load_floats(mixed + i), keep[r], load_floats(sums[r] + i), add[r]));
        }
    }
}

// Walk `num_partitions` partitions for one KV head of a unit, from empty states to `states`.
static void attend_unit(const Attention *at, const Step *step, const Unit *unit, long kv_head, long first_partition,
                        long num_partitions, const void *queries, long ldq_elements, int32_t *packed,
                        const void *key_pool, const void *value_pool, float *states) {
    long group = at->num_heads / at->num_kv_heads, num_rows = unit->num_rows * group;
    long ldq = row_words(operand_words(at->is_bf16, at->head_dim));
    for (long i = 0; i < num_rows; i++) {
        long element = (unit->row + i / group) * ldq_elements + (kv_head * group + i % group) * at->head_dim;
        copy_to_operands(at->is_bf16, packed + i * ldq, (const char *)queries + element * element_bytes(at->is_bf16), at->head_dim);
        clear_state(at, states + i * state_floats(at));
    }
    for (long p = first_partition; p < first_partition + num_partitions; p++)
        for (long i = 0; i < num_rows; i += TILE_ROWS) {
            long rows = min_long(TILE_ROWS, num_rows - i);
            long oldest_row = unit->first_position + i / group, newest_row = unit->first_position + (i + rows - 1) / group;
            long begin = p * PARTITION, end = min_long(begin + PARTITION, newest_row + 1);
            long first_visible = at->window ? oldest_row - at->window + 1 : 0;
            if (first_visible > begin) begin = min_long(first_visible / TILE_TOKENS * TILE_TOKENS, begin + PARTITION);
            if (begin >= end) continue;
            attend_tile(at, step, unit, kv_head, i, rows, begin, end, packed + i * ldq, ldq, key_pool, value_pool, states);
        }
}

static void store_unit(const Attention *at, const Unit *unit, long kv_head, float *states, int out_is_bf16, void *out,
                       long ldo) {
    long group = at->num_heads / at->num_kv_heads;
    for (long i = 0; i < unit->num_rows * group; i++) {
        float *state = states + i * state_floats(at);
        long element = (unit->row + i / group) * ldo + (kv_head * group + i % group) * at->head_dim;
        for (long d = 0; d < at->head_dim; d += LANES)
            store_rounded(at->is_bf16, out_is_bf16, out, element + d, load_floats(mixed_values(state) + d) / state[1]);
    }
}

#define UNIT_STATES 192  // query rows times heads of a group: their states stay in cache beside a partition of K and V

typedef struct { Unit *units; long num_units; int split; float *states, *own_states; int32_t *own_queries; long own; } Plan;

// Divide the step's rows into units, and say where states go. Called outside parallel regions.
static Plan plan_attention(const Attention *at, const Step *step, int threads) {
    long group = at->num_heads / at->num_kv_heads, unit_rows = UNIT_STATES / group > 0 ? UNIT_STATES / group : 1;
    Plan plan = {.units = scratch(SCRATCH_UNITS, (step->num_rows + step->num_seqs) * sizeof(Unit))};
    long num_states = 0;
    for (long seq = 0; seq < step->num_seqs; seq++)
        for (long row = step->query_starts[seq]; row < step->query_starts[seq + 1]; row += unit_rows) {
            long rows = min_long(unit_rows, step->query_starts[seq + 1] - row);
            long first = step->first_positions[seq] + row - step->query_starts[seq];
            long visible = at->window && first >= at->window ? first - at->window + 1 : 0;
            Unit *unit = &plan.units[plan.num_units++];
            *unit = (Unit){seq, row, rows, first, visible / PARTITION, 0, num_states * state_floats(at)};
            unit->num_partitions = (first + rows - 1) / PARTITION + 1 - unit->first_partition;
            num_states += unit->num_partitions * at->num_kv_heads * rows * group;
        }
    // too few heads and sequences to share among the threads: share their partitions too
    plan.split = threads > 1 && plan.num_units * at->num_kv_heads < 4 * threads;
    plan.own = unit_rows * group;
    long own_floats = threads * plan.own * state_floats(at);
    plan.own_states = scratch(SCRATCH_STATES, (own_floats + plan.split * num_states * state_floats(at)) * sizeof(float));
    plan.states = plan.own_states + own_floats;
    plan.own_queries = scratch(SCRATCH_QUERIES, threads * plan.own * row_words(at->head_dim) * sizeof(int32_t));
    return plan;
}

// out[row, head, dim] of all rows, by every thread of the enclosing parallel region; ends with a barrier.
static void attend(const Attention *at, const Step *step, const Plan *plan, const void *queries, long ldq,
                   const void *key_pool, const void *value_pool, int out_is_bf16, void *out, long ldo) {
    long group = at->num_heads / at->num_kv_heads, heads = at->num_kv_heads, floats = state_floats(at);
    float *own_states = plan->own_states + omp_get_thread_num() * plan->own * floats;
    int32_t *own_queries = plan->own_queries + omp_get_thread_num() * plan->own * row_words(at->head_dim);
    if (!plan->split) {
#pragma omp for schedule(dynamic)
        for (long item = 0; item < plan->num_units * heads; item++) {
            const Unit *unit = &plan->units[item / heads];
            attend_unit(at, step, unit, item % heads, unit->first_partition, unit->num_partitions, queries, ldq, own_queries,
                        key_pool, value_pool, own_states);
            store_unit(at, unit, item % heads, own_states, out_is_bf16, out, ldo);
        }
        return;
    }
    for (long u = 0; u < plan->num_units; u++) {
        const Unit *unit = &plan->units[u];
        long rows = unit->num_rows * group;
#pragma omp for schedule(dynamic) nowait
        for (long item = 0; item < unit->num_partitions * heads; item++)
            attend_unit(at, step, unit, item % heads, unit->first_partition + item / heads, 1, queries, ldq, own_queries,
                        key_pool, value_pool, plan->states + unit->state + item * rows * floats);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (long item = 0; item < plan->num_units * heads; item++) {
        const Unit *unit = &plan->units[item / heads];
        long rows = unit->num_rows * group;
        for (long i = 0; i < rows; i++) clear_state(at, own_states + i * floats);
        for (long p = 0; p < unit->num_partitions; p++)
            for (long i = 0; i < rows; i++) {
                float *part = plan->states + unit->state + ((p * heads + item % heads) * rows + i) * floats;
                float *state = own_states + i * floats;
                f32x keep, add;
                if (part[0] == -INFINITY) continue;
                merge_sums(state, part[0], part[1], &keep, &add);
                for (long d = 0; d < at->head_dim; d += LANES)
                    store_floats(mixed_values(state) + d, merge_values(load_floats(mixed_values(state) + d), keep,
                                                                       load_floats(mixed_values(part) + d), add));
            }
        store_unit(at, unit, item % heads, own_states, out_is_bf16, out, ldo);
    }
}
