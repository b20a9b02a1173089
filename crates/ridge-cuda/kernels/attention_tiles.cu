// Causal attention over a paged cache for prompts, on tensor cores (Dao 2023, "FlashAttention-2", section 3). Floor:
// 4 * pairs * heads * DIM operations over the rate of mma.sync; keys and values come through L2.
// A block makes ROWS tokens of one head, 16 to a warp, which stay in registers; keys and values pass through shared
// memory, COLUMNS positions at a time, the next while these are multiplied. Tokens of several sequences may meet in a
// block: it goes through the sequences one after another.
// Defines: D, a 16-bit float, of q, cache and result; DIM; SHARE, query heads of a key head; BLOCK, tokens of a cache
// block; what `codes.cuh` takes: codes become f16 on their way to shared memory; WINDOW, 0 for none; SOFTCAP, 0 or 1, with CAP;
// SINKS, as in attention.cu; FEW: tokens in runs of fewer are left out, 0 for none.
// Numbers: tokens, query heads, blocks of a sequence, cache blocks.

#define WARPS 8
#define ROWS (WARPS * 16)
#define COLUMNS 64
#define CHUNKS (DIM / 8)
#define SIDE_BYTES (COLUMNS * DIM * 2)
#define MASKED -1.0e30f
#define LOG2E 1.44269504088896340736f
// Of a row: a token that another kernel takes.
#define LEFT_OUT -2
#if CODED
typedef CODE::Raw Stored;
#else
typedef D::Raw Stored;
#endif
typedef Mma<Multiplied> Product;

// Where 16-byte chunk `c` of row `r` lies in shared memory: eight rows' chunks in different banks.
__device__ inline u32 chunk(int r, int c) { return (u32)(r * CHUNKS + (c ^ (r & 7))) * 16; }

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void attention_tiles(
    const D::Raw* __restrict__ q, const Stored* __restrict__ cache, const int* __restrict__ table,
    const int* __restrict__ ids, const int* __restrict__ positions,
#if CODED
    const float* __restrict__ scales,
#endif
#if SINKS
    const SINK::Raw* __restrict__ sinks,
#endif
    D::Raw* __restrict__ out, float scale, Numbers<4> n
) {
    extern __shared__ __align__(1024) u8 room[];
    __shared__ int row_id[ROWS], row_position[ROWS];
#if CODED
    // Of a tile's positions the scales of keys and of values, and the logarithms of these.
    __shared__ float of_side[2][2][COLUMNS], log_of_value[2][COLUMNS];
#endif
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
        int id = real ? ids[token + threadIdx.x] : -1;
#if FEW
        if (real && is_apart(ids, positions, nullptr, (int)n.v[0], (int)token + threadIdx.x)) id = LEFT_OUT;
#endif
        row_id[threadIdx.x] = id;
        row_position[threadIdx.x] = real ? positions[token + threadIdx.x] : 0;
    }
    // Fragments of the warp's 16 rows of q.
    u32 query[DIM / 16][4];
#if CODED
    float of_score[2];
#endif
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = warp * 16 + upper + 8 * (i & 1), e = k * 16 + pair * 2 + 8 * (i >> 1);
            query[k][i] = r < count ? *(const u32*)(q + ((token + r) * heads + head) * DIM + e) : 0;
        }
#if CODED
    // As f16, near 1.
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
            for (int i = y; i < 4; i += 2)
                largest = fmaxf(largest, fmaxf(fabsf(D::load((u16)query[k][i])), fabsf(D::load((u16)(query[k][i] >> 16)))));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float factor = fitting(largest);
        of_score[y] = 1.0f / factor;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
            for (int i = y; i < 4; i += 2)
                query[k][i] = Product::pack(D::load((u16)query[k][i]) * factor, D::load((u16)(query[k][i] >> 16)) * factor);
    }
#endif
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
        // Where the keys of a position lie, as a row of the cache.
        auto line_of = [&](int p) {
            const i64 block = p < end ? row[p / BLOCK] : -1;
            return block >= 0 && block < n.v[3] ? (block * 2 * keys + key) * BLOCK + p % BLOCK : -1;
        };
#if CODED
        // Codes go through registers.
        uint4 held[2][DIM / 64];
        float held_scale;
        auto fetch = [&](int start) {
#pragma unroll
            for (int i = 0; i < DIM / 64; ++i) {
                const int at = i * WARPS * 32 + threadIdx.x, r = at / (DIM / 16), c = at % (DIM / 16);
                const i64 line = line_of(start + r);
#pragma unroll
                for (int s = 0; s < 2; ++s)
                    held[s][i] = line >= 0 ? *(const uint4*)(cache + line * DIM + s * side + c * 16) : make_uint4(0, 0, 0, 0);
            }
            if (threadIdx.x < 2 * COLUMNS) {
                const i64 line = line_of(start + threadIdx.x % COLUMNS);
                held_scale = line >= 0 ? scales[line + threadIdx.x / COLUMNS * (keys * BLOCK)] : 0.0f;
            }
        };
        auto keep_held = [&](int half) {
#pragma unroll
            for (int i = 0; i < DIM / 64; ++i) {
                const int at = i * WARPS * 32 + threadIdx.x, r = at / (DIM / 16), c = at % (DIM / 16);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const u32 x[4] = {held[s][i].x, held[s][i].y, held[s][i].z, held[s][i].w};
                    u32 y[8];
#pragma unroll
                    for (int w = 0; w < 4; ++w) to_halves(x[w], y + 2 * w, CODE());
                    const u32 to = base + (half * 2 + s) * SIDE_BYTES;
#pragma unroll
                    for (int w = 0; w < 2; ++w)
                        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                            :: "r"(to + chunk(r, 2 * c + w)), "r"(y[4 * w]), "r"(y[4 * w + 1]), "r"(y[4 * w + 2]), "r"(y[4 * w + 3])
                            : "memory");
                }
            }
            if (threadIdx.x < 2 * COLUMNS) {
                const int of = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
                const float x = of ? scale_of_values(held_scale) : held_scale;
                of_side[half][of][column] = x;
                if (of) log_of_value[half][column] = log2_of(x);
            }
        };
        __syncthreads();
        fetch(first);
        keep_held(0);
#else
        auto fetch = [&](int start, int half) {
#pragma unroll
            for (int i = 0; i < COLUMNS * CHUNKS / (WARPS * 32); ++i) {
                const int r = (i * WARPS * 32 + threadIdx.x) / CHUNKS, c = threadIdx.x % CHUNKS;
                const i64 line = line_of(start + r);
                const D::Raw* from = cache + max(line, (i64)0) * DIM + c * 8;
                copy_async(base + half * 2 * SIDE_BYTES + chunk(r, c), from, line >= 0);
                copy_async(base + (half * 2 + 1) * SIDE_BYTES + chunk(r, c), from + side, line >= 0);
            }
            copies_end();
        };
        __syncthreads();
        fetch(first, 0);
#endif
        int half = 0;
        for (int start = first; start < end; start += COLUMNS, half ^= 1) {
#if CODED
            __syncthreads();
            if (start + COLUMNS < end) fetch(start + COLUMNS);
#else
            copies_wait<0>();
            __syncthreads();
            if (start + COLUMNS < end) fetch(start + COLUMNS, half ^ 1);
#endif
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
                    Product::of(score[c * 2], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
                    Product::of(score[c * 2 + 1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
                }
#if CODED
            // Scores are taken in powers of two from the softmax on, so that logarithms of scales can be added.
            const float2* of_keys = (const float2*)of_side[half][0];
            const float2* of_values = (const float2*)of_side[half][1];
            const float2* logs = (const float2*)log_of_value[half];
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c) {
                const float2 of = of_keys[c * 4 + pair];
#pragma unroll
                for (int i = 0; i < 4; ++i) score[c][i] *= (i & 1 ? of.y : of.x) * of_score[i >> 1] * (SOFTCAP ? 1.0f : scale * LOG2E);
            }
#endif
#if SOFTCAP
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // The hyperbolic tangent by one power and one division.
                    const float e = power(score[c][i] * (scale * (2.0f * 1.44269504088896340736f / CAP)));
                    score[c][i] = (CAP - __fdividef(2.0f * CAP, e + 1.0f)) * (CODED ? LOG2E : 1.0f);
                }
#endif
            const float factor = CODED ? 1.0f : SOFTCAP ? LOG2E : scale * LOG2E;
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
                for (int c = 0; c < COLUMNS / 8; ++c) {
#if CODED
                    const float2 log = logs[c * 4 + pair];
                    largest = fmaxf(largest, fmaxf(score[c][y * 2] + log.x, score[c][y * 2 + 1] + log.y));
#else
                    largest = fmaxf(largest, fmaxf(score[c][y * 2], score[c][y * 2 + 1]));
#endif
                }
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                moved |= largest != most[y];
                // Where nothing was seen yet, masked scores are the largest: they weigh nothing all the same.
                shift[y] = largest <= 0.5f * MASKED ? 0.0f : -largest * factor;
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
#if CODED
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c) {
                const float2 of = of_values[c * 4 + pair];
#pragma unroll
                for (int i = 0; i < 4; ++i) score[c][i] *= i & 1 ? of.y : of.x;
            }
#endif
            if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
                for (int e = 0; e < DIM / 8; ++e)
#pragma unroll
                    for (int i = 0; i < 4; ++i) value[e][i] *= keep[i >> 1];
            }
#pragma unroll
            for (int c = 0; c < COLUMNS / 16; ++c) {
                const u32 a0 = Product::pack(score[c * 2][0], score[c * 2][1]);
                const u32 a1 = Product::pack(score[c * 2][2], score[c * 2][3]);
                const u32 a2 = Product::pack(score[c * 2 + 1][0], score[c * 2 + 1][1]);
                const u32 a3 = Product::pack(score[c * 2 + 1][2], score[c * 2 + 1][3]);
#pragma unroll
                for (int e = 0; e < DIM / 16; ++e) {
                    u32 b[4];
                    load_matrices_transposed(b, (v_row ^ (e * 32)) + c * 16 * DIM * 2);
                    Product::of(value[e * 2], a0, a1, a2, a3, b[0], b[1]);
                    Product::of(value[e * 2 + 1], a0, a1, a2, a3, b[2], b[3]);
                }
            }
#if CODED
            if (start + COLUMNS < end) keep_held(half ^ 1);
#endif
        }
    }
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 1);
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 2);
#if SINKS
        const float sink_factor = CODED ? 1.0f : SOFTCAP ? LOG2E : scale * LOG2E;
        if (total[y] != 0.0f) total[y] += power(SINK::load(sinks[head]) * LOG2E - most[y] * sink_factor);
#endif
        const float share = total[y] == 0.0f ? 0.0f : 1.0f / total[y];
        if (mine[y] >= count || my_id[y] == LEFT_OUT) continue;
        D::Raw* to = out + ((token + mine[y]) * heads + head) * DIM;
#pragma unroll
        for (int e = 0; e < DIM / 8; ++e)
            *(u32*)(to + e * 8 + pair * 2) = Mma<D>::pack(value[e][y * 2] * share, value[e][y * 2 + 1] * share);
    }
}
