// Causal attention over a paged cache for prompts, on tensor cores (Dao 2023, "FlashAttention-2", section 3). Floor:
// 4 * pairs * heads * DIM operations over the rate of mma.sync; keys and values come through L2.
// A block makes ROWS tokens of one head, 16 to a warp, which stay in registers; keys and values pass through shared
// memory, COLUMNS positions at a time, the next while these are multiplied. Tokens of several sequences may meet in a
// block: it goes through the sequences one after another.
// Defines: D, a 16-bit float, of q, cache and result; DIM; SHARE, query heads of a key head; BLOCK, tokens of a cache
// block; WINDOW, 0 for none; SOFTCAP, 0 or 1, with CAP; SINKS, as in attention.cu.
// Numbers: tokens, query heads, blocks of a sequence, cache blocks.

#define WARPS 8
#define ROWS (WARPS * 16)
#define COLUMNS 64
#define CHUNKS (DIM / 8)
#define SIDE_BYTES (COLUMNS * DIM * 2)
#define MASKED -1.0e30f

// Where 16-byte chunk `c` of row `r` lies in shared memory: eight rows' chunks in different banks.
__device__ inline u32 chunk(int r, int c) { return (u32)(r * CHUNKS + (c ^ (r & 7))) * 16; }

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void attention_tiles(
    const D::Raw* __restrict__ q, const D::Raw* __restrict__ cache, const int* __restrict__ table,
    const int* __restrict__ ids, const int* __restrict__ positions,
#if SINKS
    const float* __restrict__ sinks,
#endif
    D::Raw* __restrict__ out, float scale, Numbers<4> n
) {
    extern __shared__ __align__(1024) u8 room[];
    __shared__ int row_id[ROWS], row_position[ROWS];
    others_may_begin();
    after_others();
    const u32 base = shared_address(room);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, upper = lane >> 2, pair = lane & 3;
    const int heads = (int)n.v[1], keys = heads / SHARE, head = blockIdx.y, key = head / SHARE;
    const i64 side = (i64)keys * BLOCK * DIM;
    // Late tokens see most: they begin first.
    const i64 token = (i64)(gridDim.x - 1 - blockIdx.x) * ROWS;
    const int count = (int)min((i64)ROWS, n.v[0] - token);
    if (threadIdx.x < ROWS) {
        const bool real = threadIdx.x < count;
        row_id[threadIdx.x] = real ? ids[token + threadIdx.x] : -1;
        row_position[threadIdx.x] = real ? positions[token + threadIdx.x] : 0;
    }
    // Fragments of the warp's 16 rows of q.
    u32 query[DIM / 16][4];
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = warp * 16 + upper + 8 * (i & 1), e = k * 16 + pair * 2 + 8 * (i >> 1);
            query[k][i] = r < count ? *(const u32*)(q + ((token + r) * heads + head) * DIM + e) : 0;
        }
    float value[DIM / 8][4] = {}, most[2] = {MASKED, MASKED}, total[2] = {0.0f, 0.0f};
    __syncthreads();
    const int mine[2] = {warp * 16 + upper, warp * 16 + upper + 8};
    const int my_id[2] = {row_id[mine[0]], row_id[mine[1]]};
    const int my_position[2] = {row_position[mine[0]], row_position[mine[1]]};

    for (int segment = 0; segment < count;) {
        // Rows [segment, next) are of one sequence.
        const int id = row_id[segment];
        int next = count, least = 0x7fffffff, last = -1;
#pragma unroll
        for (int i = ROWS / 32 - 1; i >= 0; --i) {
            const int r = i * 32 + lane;
            const u32 others = __ballot_sync(0xffffffffu, r > segment && r < count && row_id[r] != id);
            if (others) next = i * 32 + __ffs(others) - 1;
        }
#pragma unroll
        for (int i = 0; i < ROWS / 32; ++i) {
            const int r = i * 32 + lane;
            const bool in = r >= segment && r < next;
            least = min(least, __reduce_min_sync(0xffffffffu, in ? row_position[r] : 0x7fffffff));
            last = max(last, __reduce_max_sync(0xffffffffu, in ? row_position[r] : -1));
        }
        const bool whole = segment == 0 && next == ROWS;
        segment = next;
        if (id < 0) continue;
        const int end = (int)min((i64)last + 1, n.v[2] * BLOCK);
        const int first = WINDOW > 0 ? max(0, least - WINDOW + 1) / COLUMNS * COLUMNS : 0;
        const int* row = table + (i64)id * n.v[2];
        auto fetch = [&](int start, int half) {
#pragma unroll
            for (int i = 0; i < COLUMNS * CHUNKS / (WARPS * 32); ++i) {
                const int r = (i * WARPS * 32 + threadIdx.x) / CHUNKS, c = threadIdx.x % CHUNKS, p = start + r;
                const i64 block = p < end ? row[p / BLOCK] : -1;
                const bool real = block >= 0 && block < n.v[3];
                const D::Raw* from = cache + (real ? block * 2 * side + ((i64)key * BLOCK + p % BLOCK) * DIM + c * 8 : 0);
                copy_async(base + half * 2 * SIDE_BYTES + chunk(r, c), from, real);
                copy_async(base + (half * 2 + 1) * SIDE_BYTES + chunk(r, c), from + side, real);
            }
            copies_end();
        };
        __syncthreads();
        fetch(first, 0);
        int half = 0;
        for (int start = first; start < end; start += COLUMNS, half ^= 1) {
            copies_wait<0>();
            __syncthreads();
            if (start + COLUMNS < end) fetch(start + COLUMNS, half ^ 1);
            // A chunk's place is the first chunk's with bits of its number turned.
            const u32 k_row = base + half * 2 * SIDE_BYTES + chunk((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
            const u32 v_row = base + (half * 2 + 1) * SIDE_BYTES + chunk(lane & 15, lane >> 4);
            float score[COLUMNS / 8][4] = {};
#pragma unroll
            for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
                for (int c = 0; c < COLUMNS / 16; ++c) {
                    u32 b[4];
                    load_matrices(b, (k_row ^ (k * 32)) + c * 16 * DIM * 2);
                    Mma<D>::of(score[c * 2], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
                    Mma<D>::of(score[c * 2 + 1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
                }
#if SOFTCAP
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // The hyperbolic tangent by one power and one division.
                    const float e = power(score[c][i] * (scale * (2.0f * 1.44269504088896340736f / CAP)));
                    score[c][i] = CAP - __fdividef(2.0f * CAP, e + 1.0f);
                }
            const float factor = 1.44269504088896340736f;
#else
            const float factor = scale * 1.44269504088896340736f;
#endif
            if (!(whole && WINDOW == 0 && start + COLUMNS <= least + 1)) {
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    // The row sees [low, high) of this tile's columns.
                    const int high = my_id[y] == id ? min(my_position[y] + 1, end) - start : 0;
                    const int low = WINDOW > 0 ? my_position[y] - WINDOW + 1 - start : 0;
#pragma unroll
                    for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int p = c * 8 + pair * 2 + i;
                            if (p >= high || (WINDOW > 0 && p < low)) score[c][y * 2 + i] = MASKED;
                        }
                }
            }
            bool moved = false;
            float keep[2], shift[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                float largest = most[y];
#pragma unroll
                for (int c = 0; c < COLUMNS / 8; ++c)
                    largest = fmaxf(largest, fmaxf(score[c][y * 2], score[c][y * 2 + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                moved |= largest != most[y];
                // Where nothing was seen yet, masked scores are the largest: they weigh nothing all the same.
                shift[y] = largest == MASKED ? 0.0f : -largest * factor;
                keep[y] = power((most[y] - largest) * factor);
                most[y] = largest;
                total[y] *= keep[y];
            }
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    score[c][i] = power(fmaf(score[c][i], factor, shift[i >> 1]));
                    total[i >> 1] += score[c][i];
                }
            if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
                for (int e = 0; e < DIM / 8; ++e)
#pragma unroll
                    for (int i = 0; i < 4; ++i) value[e][i] *= keep[i >> 1];
            }
#pragma unroll
            for (int c = 0; c < COLUMNS / 16; ++c) {
                const u32 a0 = Mma<D>::pack(score[c * 2][0], score[c * 2][1]);
                const u32 a1 = Mma<D>::pack(score[c * 2][2], score[c * 2][3]);
                const u32 a2 = Mma<D>::pack(score[c * 2 + 1][0], score[c * 2 + 1][1]);
                const u32 a3 = Mma<D>::pack(score[c * 2 + 1][2], score[c * 2 + 1][3]);
#pragma unroll
                for (int e = 0; e < DIM / 16; ++e) {
                    u32 b[4];
                    load_matrices_transposed(b, (v_row ^ (e * 32)) + c * 16 * DIM * 2);
                    Mma<D>::of(value[e * 2], a0, a1, a2, a3, b[0], b[1]);
                    Mma<D>::of(value[e * 2 + 1], a0, a1, a2, a3, b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 1);
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 2);
#if SINKS
        const float sink_factor = (SOFTCAP ? 1.0f : scale) * 1.44269504088896340736f;
        if (total[y] != 0.0f) total[y] += power(sinks[head] * 1.44269504088896340736f - most[y] * sink_factor);
#endif
        const float share = total[y] == 0.0f ? 0.0f : 1.0f / total[y];
        if (mine[y] >= count) continue;
        D::Raw* to = out + ((token + mine[y]) * heads + head) * DIM;
#pragma unroll
        for (int e = 0; e < DIM / 8; ++e)
            *(u32*)(to + e * 8 + pair * 2) = Mma<D>::pack(value[e][y * 2] * share, value[e][y * 2 + 1] * share);
    }
}
