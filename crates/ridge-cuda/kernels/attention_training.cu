// Attention over a step's own tokens and its gradient, on tensor cores (Dao 2023, "FlashAttention-2", sections 3.1 and
// 3.2). Floor: 4 * pairs * heads * DIM operations forward, 10 backward, over the rate of mma.sync; the gradient takes 14
// here: scores are made once for the cotangents of queries and once for those of keys and values, so that every sum is of
// one block and has one order.
// A block makes ROWS tokens of one head, 16 to a warp; the other side passes through shared memory, COLUMNS tokens at a
// time, the next while these are multiplied. Tokens see those of equal id, so a block goes over the tokens between the
// first and the last that share an id with it: those between them are masked.
// Defines: WARPS of a block; COLUMNS; D, a 16-bit float; DIM; SHARE, query heads of a key head; CAUSAL; WINDOW, 0 for none; SOFTCAP, 0 or 1, with CAP;
// SAVING, whether logarithms of sums are given; FOR_KEYS, whose cotangents a block of the gradient makes;
// IF_SCATTERED, whether another kernel takes sequences whose tokens follow each other; DROPPED, 0 or 1, whether shares are dropped
// whose 12 random bits are below THRESHOLD, and the others multiplied by KEPT; IN_BLOCKS, 0 or the tokens of a block of sequences that are
// longer than DENSE, of which tokens see the first and the last block and those beside their own, and the first block with shares of e^MORE.
// Numbers: tokens, query heads.

#ifndef WARPS
#define WARPS 8
#endif
#define ROWS (WARPS * 16)
#ifndef COLUMNS
#define COLUMNS 64
#endif
#define CHUNKS (DIM / 8)
#define SIDE_BYTES (COLUMNS * DIM * 2)
#define MASKED -1.0e30f
// Windows reach to both sides where tokens see those behind them.
#define BOTH_SIDES (WINDOW > 0 && !CAUSAL)
#ifndef IN_BLOCKS
#define IN_BLOCKS 0
#endif
#define LOG2_E 1.44269504088896340736f

// Where chunk c of 16 bytes of row r lies: lines of 128 bytes have a part of a row, a row or two, their chunks in an order that differs
// between neighbours, so that the rows of a matrix are in different banks.
__device__ inline u32 chunk(int r, int c) {
    constexpr int together = CHUNKS < 8 ? 8 / CHUNKS : 1;
    const int line = r / together;
    return (u32)(line * CHUNKS * together + (((r % together) * CHUNKS + c) ^ (line & 7))) * 16;
}

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Where the sequences of tokens [first, last] begin and end, or more where ids share a place.
__device__ inline void reach(const int* ids, const int* bounds, int tokens, int first, int last, int& from, int& to) {
    from = tokens;
    to = 0;
    for (int t = first + (int)(threadIdx.x & 31); t <= last; t += 32)
        if (ids[t] >= 0) {
            from = min(from, bounds[2 * (ids[t] % tokens)]);
            to = max(to, bounds[2 * (ids[t] % tokens) + 1]);
        }
    from = __reduce_min_sync(0xffffffffu, from);
    to = __reduce_max_sync(0xffffffffu, to);
}

extern "C" __global__ void bounds_clear(int* __restrict__ bounds, int* __restrict__ scattered, Numbers<1> n) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *scattered = 0;
    for (i64 t = blockIdx.x * (i64)blockDim.x + threadIdx.x; t < n.v[0]; t += (i64)gridDim.x * blockDim.x) {
        bounds[2 * t] = (int)n.v[0];
        bounds[2 * t + 1] = 0;
    }
}

// The first token of each id and the one behind its last, at the id's place modulo the number of tokens.
extern "C" __global__ void bounds_find(const int* __restrict__ ids, int* __restrict__ bounds, Numbers<1> n) {
    for (i64 t = blockIdx.x * (i64)blockDim.x + threadIdx.x; t < n.v[0]; t += (i64)gridDim.x * blockDim.x) {
        if (ids[t] < 0) continue;
        int* to = bounds + 2 * (ids[t] % (int)n.v[0]);
        asm volatile("red.global.min.s32 [%0], %1;" :: "l"(to), "r"((int)t) : "memory");
        asm volatile("red.global.max.s32 [%0], %1;" :: "l"(to + 1), "r"((int)t + 1) : "memory");
    }
}

// Each token's place in its sequence, -1 for those of none, and whether tokens of some sequence do not follow each other.
extern "C" __global__ void positions_find(
    const int* __restrict__ ids, const int* __restrict__ bounds, int* __restrict__ positions, int* __restrict__ scattered,
    Numbers<1> n
) {
    for (i64 t = blockIdx.x * (i64)blockDim.x + threadIdx.x; t < n.v[0]; t += (i64)gridDim.x * blockDim.x) {
        const int id = ids[t], position = id < 0 ? -1 : (int)t - bounds[2 * (id % (int)n.v[0])];
        positions[t] = position;
        if (id >= 0 && position != 0 && (t == 0 || ids[t - 1] != id)) *scattered = 1;
    }
}

// Fragments of a warp's 16 rows of `x`, of which row r lies `stride` elements behind row r - 1.
__device__ inline void fragments(u32 (*to)[4], const D::Raw* x, i64 stride, int row, int count, int pair) {
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = row + 8 * (i & 1), e = k * 16 + pair * 2 + 8 * (i >> 1);
            to[k][i] = r < count ? *(const u32*)(x + r * stride + e) : 0;
        }
}

// COLUMNS rows of `x` from `start` on, below `end`, to shared memory.
__device__ inline void fetch(u32 to, const D::Raw* x, i64 stride, int start, int end) {
#pragma unroll
    for (int i = 0; i < COLUMNS * CHUNKS / (WARPS * 32); ++i) {
        const int r = (i * WARPS * 32 + threadIdx.x) / CHUNKS, c = threadIdx.x % CHUNKS;
        const bool real = start + r < end;
        copy_async(to + chunk(r, c), x + (real ? (start + r) * stride + c * 8 : 0), real);
    }
}

// Products of a warp's rows with COLUMNS rows in shared memory.
__device__ inline void multiply(float (*score)[4], const u32 (*row)[4], u32 at, int lane) {
    const u32 from = at + chunk((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
        for (int c = 0; c < COLUMNS / 16; ++c) {
            u32 b[4];
            load_matrices(b, (from ^ (k * 32)) + c * 16 * DIM * 2);
            Mma<D>::of(score[c * 2], row[k][0], row[k][1], row[k][2], row[k][3], b[0], b[1]);
            Mma<D>::of(score[c * 2 + 1], row[k][0], row[k][1], row[k][2], row[k][3], b[2], b[3]);
        }
}

// Adds to `sum` the rows in shared memory, weighed.
__device__ inline void weigh(float (*sum)[4], const float (*weight)[4], u32 at, int lane) {
    const u32 from = at + chunk(lane & 15, lane >> 4);
#pragma unroll
    for (int c = 0; c < COLUMNS / 16; ++c) {
        const u32 a0 = Mma<D>::pack(weight[c * 2][0], weight[c * 2][1]);
        const u32 a1 = Mma<D>::pack(weight[c * 2][2], weight[c * 2][3]);
        const u32 a2 = Mma<D>::pack(weight[c * 2 + 1][0], weight[c * 2 + 1][1]);
        const u32 a3 = Mma<D>::pack(weight[c * 2 + 1][2], weight[c * 2 + 1][3]);
#pragma unroll
        for (int e = 0; e < DIM / 16; ++e) {
            u32 b[4];
            load_matrices_transposed(b, (from ^ (e * 32)) + c * 16 * DIM * 2);
            Mma<D>::of(sum[e * 2], a0, a1, a2, a3, b[0], b[1]);
            Mma<D>::of(sum[e * 2 + 1], a0, a1, a2, a3, b[2], b[3]);
        }
    }
}

// From a product to a score, which is scaled already if it is capped.
__device__ inline float scored(float x, float scale) {
#if SOFTCAP
    // Of full precision: an error here is one of the score.
    return CAP * tanhf(x * (scale / CAP));
#else
    return x;
#endif
}

#if DROPPED
#define RANDOM_PARAMETERS const i64* __restrict__ seed, const i64* __restrict__ head_numbers,
// The bits of keys `place` and `place` + 8, of which 16 divides the first but for its lower three bits.
__device__ inline u32 random_of(i64 seed, i64 head, int query, int place) {
    return philox_word(seed, 3, head, query, place / 16 * 8 + place % 8);
}
__device__ inline float factor_of_first(u32 word) { return word >> 20 >= THRESHOLD ? KEPT : 0.0f; }
__device__ inline float factor_of_second(u32 word) { return ((word >> 8) & 0xfff) >= THRESHOLD ? KEPT : 0.0f; }
#else
#define RANDOM_PARAMETERS
#endif

// What a score is multiplied by for a power of 2.
__device__ inline float factor_of(float scale) { return SOFTCAP ? LOG2_E : scale * LOG2_E; }

// Does query `q` see key `k`, of equal ids?
__device__ inline bool sees(int q, int k) {
    return (!CAUSAL || k <= q) && (WINDOW == 0 || k > q - WINDOW) && (!BOTH_SIDES || k < q + WINDOW);
}

#if IN_BLOCKS
// A sequence that is seen by blocks: where it begins, and the number of its last block.
struct Sequence {
    int from, last;
    bool dense;
    __device__ Sequence(const int* bounds, int tokens, int id) {
        from = bounds[2 * (id % tokens)];
        const int length = bounds[2 * (id % tokens) + 1] - from;
        last = (length - 1) / IN_BLOCKS;
        dense = length <= DENSE;
    }
    __device__ int block(int token) const { return (token - from) / IN_BLOCKS; }
    // Do tokens of this block see all?
    __device__ bool sees_all(int block) const { return dense || block == 0 || block == last; }
    // Do tokens of blocks `low` to `high`, none of which sees all, see one of the COLUMNS tokens from `start` on?
    __device__ bool reaches(int low, int high, int start) const {
        const int least = max(0, block(max(start, from))), most = block(start + COLUMNS - 1);
        return least == 0 || most >= last || (most >= low - 1 && least <= high + 1);
    }
};
#endif

// The id of all of a warp's rows, or -1 where they have several.
__device__ inline int common_id(const int* mine) {
    const int id = __shfl_sync(0xffffffffu, mine[0], 0);
    return __all_sync(0xffffffffu, mine[0] == id && mine[1] == id) ? id : -1;
}

// Are all of the COLUMNS tokens from `start` on below `end` and of `id`?
__device__ inline bool all_of(const int* ids, int id, int start, int end) {
    bool same = id >= 0;
#pragma unroll
    for (int i = threadIdx.x & 31; i < COLUMNS; i += 32) same &= start + i < end && ids[start + i] == id;
    return __all_sync(0xffffffffu, same);
}

extern "C" __global__ __launch_bounds__(WARPS * 32, DIM > 64 ? 1 : 2) void attention_forward(
    const D::Raw* __restrict__ q, const D::Raw* __restrict__ k, const D::Raw* __restrict__ v, const int* __restrict__ ids,
    const int* __restrict__ bounds, const int* __restrict__ scattered, RANDOM_PARAMETERS D::Raw* __restrict__ out,
    float* __restrict__ lse, float scale, Numbers<2> n
) {
#if IF_SCATTERED
    if (!*scattered) return;
#endif
    extern __shared__ __align__(1024) u8 room[];
    const u32 base = shared_address(room);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, upper = lane >> 2, pair = lane & 3;
    const int tokens = (int)n.v[0], heads = (int)n.v[1], head = blockIdx.y, keys = heads / SHARE, key = head / SHARE;
    // Late tokens see most: they begin first.
    const int token = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, count = min(ROWS, tokens - token);
    const int mine[2] = {token + warp * 16 + upper, token + warp * 16 + upper + 8};
    const int my_id[2] = {mine[0] < tokens ? ids[mine[0]] : -1, mine[1] < tokens ? ids[mine[1]] : -1};
    u32 query[DIM / 16][4];
    fragments(query, q + ((i64)token * heads + head) * DIM, (i64)heads * DIM, warp * 16 + upper, count, pair);
    const int common = common_id(my_id), row0 = token + warp * 16;
    const float factor = factor_of(scale);
    float value[DIM / 8][4] = {}, most[2] = {MASKED, MASKED}, total[2] = {0.0f, 0.0f};
#if IN_BLOCKS
    const Sequence my_sequence[2] = {{bounds, tokens, max(my_id[0], 0)}, {bounds, tokens, max(my_id[1], 0)}};
    const int my_block[2] = {my_sequence[0].block(mine[0]), my_sequence[1].block(mine[1])};
#endif

    int first, end;
    reach(ids, bounds, tokens, token, token + count - 1, first, end);
    if (CAUSAL) end = min(end, token + count);
    if (WINDOW > 0) first = max(first, token - WINDOW + 1);
    if (BOTH_SIDES) end = min(end, token + count - 1 + WINDOW);
    first = first / COLUMNS * COLUMNS;
#if IN_BLOCKS
    // Keys are passed over that none of the block's tokens sees, if these are of one sequence.
    const int block_id = ids[token];
    const bool of_one = block_id >= 0 && ids[token + count - 1] == block_id;
    const Sequence sequence(bounds, tokens, max(block_id, 0));
    const int low = sequence.block(token), high = sequence.block(token + count - 1);
    const bool skips = of_one && !sequence.dense && low > 0 && high < sequence.last;
    auto after = [&](int start) {
        do start += COLUMNS;
        while (skips && start < end && !sequence.reaches(low, high, start));
        return start;
    };
#else
    auto after = [&](int start) { return start + COLUMNS; };
#endif
    const i64 stride = (i64)keys * DIM;
    const D::Raw *of_k = k + (i64)key * DIM, *of_v = v + (i64)key * DIM;
    auto load = [&](int start, int half) {
        fetch(base + half * 2 * SIDE_BYTES, of_k, stride, start, end);
        fetch(base + (half * 2 + 1) * SIDE_BYTES, of_v, stride, start, end);
        copies_end();
    };
    if (first < end) load(first, 0);
    int half = 0;
    for (int start = first, next; start < end; start = next, half ^= 1) {
        copies_wait<0>();
        __syncthreads();
        next = after(start);
        if (next < end) load(next, half ^ 1);
        float score[COLUMNS / 8][4] = {};
        multiply(score, query, base + half * 2 * SIDE_BYTES, lane);
#if SOFTCAP
#pragma unroll
        for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[c][i] = scored(score[c][i], scale);
#endif
        const bool whole = all_of(ids, common, start, end) && (!CAUSAL || start + COLUMNS <= row0 + 1)
            && (WINDOW == 0 || start > row0 + 15 - WINDOW) && (!BOTH_SIDES || start + COLUMNS - 1 < row0 + WINDOW) && !IN_BLOCKS;
        if (!whole) {
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c) {
                const int column = start + c * 8 + pair * 2;
                const int id[2] = {column < end ? ids[column] : -1, column + 1 < end ? ids[column + 1] : -1};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    bool seen = id[i & 1] >= 0 && id[i & 1] == my_id[i >> 1] && sees(mine[i >> 1], column + (i & 1));
#if IN_BLOCKS
                    if (seen && !my_sequence[i >> 1].sees_all(my_block[i >> 1])) {
                        const Sequence& of = my_sequence[i >> 1];
                        const int block = of.block(column + (i & 1));
                        seen = block == 0 || block == of.last || abs(block - my_block[i >> 1]) <= 1;
                        if (block == 0) score[c][i] += MORE / scale;
                    }
#endif
                    if (!seen) score[c][i] = MASKED;
                }
            }
        }
        bool moved = false;
        float keep[2];
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            float largest = most[y];
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c) largest = fmaxf(largest, fmaxf(score[c][y * 2], score[c][y * 2 + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            moved |= largest != most[y];
            // Where nothing was seen yet, masked scores are the largest: they weigh nothing all the same.
            const float shift = largest == MASKED ? 0.0f : -largest * factor;
            keep[y] = power((most[y] - largest) * factor);
            most[y] = largest;
            total[y] *= keep[y];
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
                for (int i = y * 2; i < y * 2 + 2; ++i) {
                    score[c][i] = power(fmaf(score[c][i], factor, shift));
                    total[y] += score[c][i];
                }
        }
        if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
            for (int e = 0; e < DIM / 8; ++e)
#pragma unroll
                for (int i = 0; i < 4; ++i) value[e][i] *= keep[i >> 1];
        }
#if DROPPED
#pragma unroll
        for (int c = 0; c < COLUMNS / 8; c += 2)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 word = random_of(*seed, head_numbers[head], mine[i >> 1], start + c * 8 + pair * 2 + (i & 1));
                score[c][i] *= factor_of_first(word);
                score[c + 1][i] *= factor_of_second(word);
            }
#endif
        weigh(value, score, base + (half * 2 + 1) * SIDE_BYTES, lane);
    }
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 1);
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 2);
        if (mine[y] >= tokens) continue;
        const float share = total[y] == 0.0f ? 0.0f : 1.0f / total[y];
        D::Raw* to = out + ((i64)mine[y] * heads + head) * DIM;
#pragma unroll
        for (int e = 0; e < DIM / 8; ++e)
            *(u32*)(to + e * 8 + pair * 2) = Mma<D>::pack(value[e][y * 2] * share, value[e][y * 2 + 1] * share);
#if SAVING
        if (pair == 0) lse[(i64)mine[y] * heads + head] = total[y] == 0.0f ? 0.0f : most[y] * (factor / LOG2_E) + logf(total[y]);
#endif
    }
}

// sum(dy * y) of each token and head: a warp for each.
extern "C" __global__ void attention_along(
    const D::Raw* __restrict__ y, const D::Raw* __restrict__ dy, float* __restrict__ along, Numbers<2> n
) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (i64 row = blockIdx.x * (i64)warps + (threadIdx.x >> 5); row < n.v[0] * n.v[1]; row += (i64)gridDim.x * warps) {
        float sum = 0.0f;
        for (int e = lane; e < DIM; e += 32) sum = fmaf(D::load(y[row * DIM + e]), D::load(dy[row * DIM + e]), sum);
        for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) along[row] = sum;
    }
}

// FOR_KEYS: cotangents of ROWS keys and values of one key head, over the queries of its heads that see them; otherwise
// those of ROWS queries of one head, over the keys that they see. Rows are a block's own tokens, columns the others.
extern "C" __global__ __launch_bounds__(WARPS * 32, DIM > 64 ? 1 : 3) void attention_backward(
    const D::Raw* __restrict__ q, const D::Raw* __restrict__ k, const D::Raw* __restrict__ v, const int* __restrict__ ids,
    const int* __restrict__ bounds, const D::Raw* __restrict__ dy, const float* __restrict__ lse,
    const float* __restrict__ along, RANDOM_PARAMETERS D::Raw* __restrict__ first_out, D::Raw* __restrict__ second_out,
    float scale, Numbers<2> n
) {
    extern __shared__ __align__(1024) u8 room[];
#if FOR_KEYS
    // Of the queries that pass: logarithms of sums, and sums of dy * y.
    __shared__ __align__(16) float statistics[2][2][COLUMNS];
#endif
    const u32 base = shared_address(room);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, upper = lane >> 2, pair = lane & 3;
    const int tokens = (int)n.v[0], heads = (int)n.v[1], keys = heads / SHARE;
    const int key = FOR_KEYS ? blockIdx.y : blockIdx.y / SHARE;
    // Early keys are seen by most, late queries see most: they begin first.
    const int block = FOR_KEYS ? blockIdx.x : (int)(gridDim.x - 1 - blockIdx.x);
    const int token = block * ROWS, count = min(ROWS, tokens - token);
    const int mine[2] = {token + warp * 16 + upper, token + warp * 16 + upper + 8};
    const int my_id[2] = {mine[0] < tokens ? ids[mine[0]] : -1, mine[1] < tokens ? ids[mine[1]] : -1};
    const i64 q_stride = (i64)heads * DIM, k_stride = (i64)keys * DIM;

    const int common = common_id(my_id), row0 = token + warp * 16;
    const float factor = factor_of(scale);
    // Of scores, and of cotangents with values.
    u32 row[2][DIM / 16][4];
    float sum[1 + FOR_KEYS][DIM / 8][4] = {};
    int first, end;
    reach(ids, bounds, tokens, token, token + count - 1, first, end);
#if FOR_KEYS
    if (CAUSAL) first = max(first, token);
    if (WINDOW > 0) end = min(end, token + count - 1 + WINDOW);
    if (BOTH_SIDES) first = max(first, token - WINDOW + 1);
    fragments(row[0], k + token * k_stride + (i64)key * DIM, k_stride, warp * 16 + upper, count, pair);
    fragments(row[1], v + token * k_stride + (i64)key * DIM, k_stride, warp * 16 + upper, count, pair);
#else
    if (CAUSAL) end = min(end, token + count);
    if (WINDOW > 0) first = max(first, token - WINDOW + 1);
    if (BOTH_SIDES) end = min(end, token + count - 1 + WINDOW);
#endif
    first = first / COLUMNS * COLUMNS;
    for (int head = FOR_KEYS ? key * SHARE : blockIdx.y; head < (FOR_KEYS ? (key + 1) * SHARE : (int)blockIdx.y + 1); ++head) {
        const D::Raw *of_q = q + (i64)head * DIM, *of_dy = dy + (i64)head * DIM;
#if FOR_KEYS
        const D::Raw *left = of_q, *right = of_dy;
        const i64 stride = q_stride;
#else
        const D::Raw *left = k + (i64)key * DIM, *right = v + (i64)key * DIM;
        const i64 stride = k_stride;
        fragments(row[0], of_q + token * q_stride, q_stride, warp * 16 + upper, count, pair);
        fragments(row[1], of_dy + token * q_stride, q_stride, warp * 16 + upper, count, pair);
        float my_lse[2], my_along[2];
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            const i64 at = (i64)min(mine[y], tokens - 1) * heads + head;
            my_lse[y] = lse[at] * LOG2_E;
            my_along[y] = along[at];
        }
#endif
        auto load = [&](int start, int half) {
            fetch(base + half * 2 * SIDE_BYTES, left, stride, start, end);
            fetch(base + (half * 2 + 1) * SIDE_BYTES, right, stride, start, end);
#if FOR_KEYS
            if (threadIdx.x < 2 * COLUMNS) {
                const int c = threadIdx.x % COLUMNS, which = threadIdx.x / COLUMNS;
                const float* from = (which ? along : lse) + (i64)min(start + c, tokens - 1) * heads + head;
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                    :: "r"(shared_address(&statistics[half][which][c])), "l"(from) : "memory");
            }
#endif
            copies_end();
        };
        __syncthreads();
        if (first < end) load(first, 0);
        int half = 0;
        for (int start = first; start < end; start += COLUMNS, half ^= 1) {
            copies_wait<0>();
            __syncthreads();
            if (start + COLUMNS < end) load(start + COLUMNS, half ^ 1);
            const u32 at_left = base + half * 2 * SIDE_BYTES, at_right = at_left + SIDE_BYTES;
            float score[COLUMNS / 8][4] = {}, change[COLUMNS / 8][4] = {};
            multiply(score, row[0], at_left, lane);
            multiply(change, row[1], at_right, lane);
            const bool below = start + COLUMNS - 1 < row0 + WINDOW, above = start > row0 + 15 - WINDOW;
            const bool inside = (!CAUSAL || (FOR_KEYS ? start >= row0 + 15 : start + COLUMNS <= row0 + 1))
                && (WINDOW == 0 || (BOTH_SIDES ? below && above : FOR_KEYS ? below : above));
            const bool whole = all_of(ids, common, start, end) && inside;
#if DROPPED && !FOR_KEYS
            u32 words[4];
#endif
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c) {
                const int column = start + c * 8 + pair * 2;
#if DROPPED && FOR_KEYS
                u32 words[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) words[i] = random_of(*seed, head_numbers[head], column + i, mine[0]);
#elif DROPPED
                if (c % 2 == 0)
#pragma unroll
                    for (int i = 0; i < 4; ++i) words[i] = random_of(*seed, head_numbers[head], mine[i >> 1], column + (i & 1));
#endif
                int id[2] = {-1, -1};
                if (!whole) {
                    id[0] = column < end ? ids[column] : -1;
                    id[1] = column + 1 < end ? ids[column + 1] : -1;
                }
#if FOR_KEYS
                const float2 logs = *(const float2*)&statistics[half][0][c * 8 + pair * 2];
                const float2 alongs = *(const float2*)&statistics[half][1][c * 8 + pair * 2];
                const float of_lse[2] = {logs.x * LOG2_E, logs.y * LOG2_E}, of_along[2] = {alongs.x, alongs.y};
#endif
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int other = column + (i & 1);
                    const bool seen = whole || (id[i & 1] >= 0 && id[i & 1] == my_id[i >> 1]
                        && (FOR_KEYS ? sees(other, mine[i >> 1]) : sees(mine[i >> 1], other)));
                    const float s = scored(score[c][i], scale);
                    float slope = scale;
#if SOFTCAP
                    slope *= 1.0f - (s / CAP) * (s / CAP);
#endif
                    float kept = 1.0f;
#if DROPPED
                    kept = (FOR_KEYS ? i < 2 : c % 2 == 0) ? factor_of_first(words[FOR_KEYS ? i & 1 : i]) : factor_of_second(words[FOR_KEYS ? i & 1 : i]);
                    change[c][i] *= kept;
#endif
#if FOR_KEYS
                    const float share = seen ? power(fmaf(s, factor, -of_lse[i & 1])) : 0.0f;
                    change[c][i] = share * (change[c][i] - of_along[i & 1]) * slope;
#else
                    const float share = seen ? power(fmaf(s, factor, -my_lse[i >> 1])) : 0.0f;
                    change[c][i] = share * (change[c][i] - my_along[i >> 1]) * slope;
#endif
                    score[c][i] = share * kept;
                }
            }
            weigh(sum[0], change, at_left, lane);
#if FOR_KEYS
            weigh(sum[1], score, at_right, lane);
#endif
        }
    }
    const int width = FOR_KEYS ? keys : heads;
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        if (mine[y] >= tokens) continue;
        const i64 at = ((i64)mine[y] * width + blockIdx.y) * DIM + pair * 2;
#pragma unroll
        for (int e = 0; e < DIM / 8; ++e) {
            *(u32*)(first_out + at + e * 8) = Mma<D>::pack(sum[0][e][y * 2], sum[0][e][y * 2 + 1]);
#if FOR_KEYS
            *(u32*)(second_out + at + e * 8) = Mma<D>::pack(sum[1][e][y * 2], sum[1][e][y * 2 + 1]);
#endif
        }
    }
}
