// The gradient of attention over a step's own tokens on Hopper's tensor cores (Dao 2023, "FlashAttention-2", section 3.2; Shah
// et al. 2024, "FlashAttention-3", section 3). Floor: 10 * pairs * heads * DIM FLOPs over the tensor cores' peak; 14 are computed,
// as scores are made once for the cotangents of queries and once for those of keys and values, so that every sum is of one block
// and has one order.
// A block takes items, ROWS tokens of one head, from a counter, long ones first. One warp takes the items and has the copy
// engine bring their rows; another brings the tokens of the other side to a ring, COLUMNS at a time. Each of CONSUMERS
// warpgroups multiplies 64 rows: scores and the cotangents of shares from shared memory, whose results stay in registers as the
// left side of the products that are summed. The scores of the next tile are issued behind the last product of this one.
// Tokens see those of equal id, so a block goes over the tokens between the first and the last that share an id with it: those
// between them are masked.
// Defines: D, a 16-bit float; DIM, 64 or 128; SHARE, query heads of a key head; CAUSAL; WINDOW, 0 for none; SOFTCAP, 0 or 1, with
// CAP; FOR_KEYS, whose cotangents are made; COLUMNS; CONSUMERS, 2; SLOTS, items whose rows fit; STAGES of the ring.
// Numbers: tokens, query heads. For other architectures it is empty, and is not launched.

#define ROWS (64 * CONSUMERS)
#define SLICES (DIM / 64)
#define ROW_BYTES (ROWS * DIM * 2)
#define SIDE_BYTES (COLUMNS * DIM * 2)
// Tokens are padded with ones of no sequence, so that a tile's statistics are all there.
#define PADDED(tokens) (((tokens) + 255) / 256 * 256)
#define MASKED -1.0e30f
// Windows reach to both sides where tokens see those behind them.
#define BOTH_SIDES (WINDOW > 0 && !CAUSAL)
#define LOG2E 1.44269504088896340736f

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Of each head and padded token the logarithm of its sum of powers of 2, infinite where it sees nothing, and in another such matrix
// the sum of its dy * y; and ids of padded tokens. A lane takes 16 bytes.
extern "C" __global__ void attention_statistics(
    const D::Raw* __restrict__ y, const D::Raw* __restrict__ dy, const float* __restrict__ lse, const int* __restrict__ ids,
    float* __restrict__ statistics, int* __restrict__ padded_ids, Numbers<2> n
) {
    others_may_begin();
    after_others();
    const int tokens = (int)n.v[0], heads = (int)n.v[1], padded = PADDED(tokens), lane = threadIdx.x % (DIM / 8);
    const i64 rows = (i64)padded * heads, lines = (i64)gridDim.x * blockDim.x / (DIM / 8);
    for (i64 row = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / (DIM / 8); row < rows; row += lines) {
        const int token = (int)(row / heads), head = (int)(row % heads), id = token < tokens ? ids[token] : -1;
        float sum = 0.0f;
        if (id >= 0) {
            const uint4 a = ((const uint4*)y)[row * (DIM / 8) + lane], b = ((const uint4*)dy)[row * (DIM / 8) + lane];
            const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum = fmaf(D::load((u16)left[i]), D::load((u16)right[i]), sum);
                sum = fmaf(D::load((u16)(left[i] >> 16)), D::load((u16)(right[i] >> 16)), sum);
            }
        }
#pragma unroll
        for (int step = DIM / 16; step > 0; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) {
            statistics[(i64)head * padded + token] = id < 0 ? INF : lse[row] * LOG2E;
            statistics[(i64)(heads + head) * padded + token] = sum;
            if (head == 0) padded_ids[token] = id;
        }
    }
}

// Rows from `token` on of one head, key heads for keys; the other side's tokens [first, end).
struct __align__(16) Item { int token, head, first, end; };

extern "C" __global__ __launch_bounds__(128 * (CONSUMERS + 1), 1) void attention_backward_sm90(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    const __grid_constant__ TensorMap dy, const int* __restrict__ ids, const int* __restrict__ bounds,
    const float* __restrict__ statistics, u32* __restrict__ counters, D::Raw* __restrict__ first_out,
    D::Raw* __restrict__ second_out, float scale, Numbers<2> n
) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * SLOTS + 3 * STAGES];
    __shared__ Item items[SLOTS];
    __shared__ __align__(16) int ring_ids[STAGES][COLUMNS];
#if FOR_KEYS
    __shared__ __align__(16) float ring_lse[STAGES][COLUMNS], ring_along[STAGES][COLUMNS];
#endif
    const u32 room = (shared_address(shared) + 1023) & ~1023u, ring = room + SLOTS * 2 * ROW_BYTES;
    const u32 item_full = shared_address(barriers), item_free = item_full + 8 * SLOTS;
    const u32 left_full = item_free + 8 * SLOTS, right_full = left_full + 8 * STAGES, free = right_full + 8 * STAGES;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const int tokens = (int)n.v[0], heads = (int)n.v[1], keys = heads / SHARE, padded = PADDED(tokens);
    const int across = FOR_KEYS ? keys : heads, all = (tokens + ROWS - 1) / ROWS * across;
    const TensorMap &left = FOR_KEYS ? q : k, &right = FOR_KEYS ? dy : v;
    const TensorMap &left_rows = FOR_KEYS ? k : q, &right_rows = FOR_KEYS ? v : dy;
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; ++s) {
            barrier_init(item_full + 8 * s, 1);
            barrier_init(item_free + 8 * s, CONSUMERS + 1);
        }
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(left_full + 8 * s, 1);
            barrier_init(right_full + 8 * s, 1);
            barrier_init(free + 8 * s, 4 * CONSUMERS);
        }
        barriers_ready();
    }
    __syncthreads();
    others_may_begin();
    after_others();
    if (group == 0) {
        registers_lower<24>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) {
#pragma unroll 1
            for (u32 count = 0;; ++count) {
                u32 at = 0;
                if (lane == 0) at = atomicAdd(counters, 1u);
                at = __shfl_sync(~0u, at, 0);
                Item item = {-1, 0, 0, 0};
                if ((int)at < all) {
                    // Early keys are seen by most, late queries see most.
                    const int tile = FOR_KEYS ? (int)at / across : all / across - 1 - (int)at / across;
                    item.token = tile * ROWS;
                    item.head = (int)at % across;
                    const int last = min(item.token + ROWS, tokens);
                    int from = tokens, to = 0;
#pragma unroll 1
                    for (int t = item.token + lane; t < last; t += 32) {
                        const int id = ids[t];
                        if (id < 0) continue;
                        from = min(from, bounds[2 * (id % tokens)]);
                        to = max(to, bounds[2 * (id % tokens) + 1]);
                    }
                    from = __reduce_min_sync(~0u, from);
                    to = __reduce_max_sync(~0u, to);
                    if (FOR_KEYS) {
                        if (CAUSAL) from = max(from, item.token);
                        if (WINDOW > 0) to = min(to, last - 1 + WINDOW);
                        if (BOTH_SIDES) from = max(from, item.token - WINDOW + 1);
                    } else {
                        if (CAUSAL) to = min(to, last);
                        if (WINDOW > 0) from = max(from, item.token - WINDOW + 1);
                        if (BOTH_SIDES) to = min(to, last - 1 + WINDOW);
                    }
                    item.first = from / COLUMNS * COLUMNS;
                    item.end = to;
                }
                const u32 slot = count % SLOTS, full = item_full + 8 * slot;
                barrier_wait(item_free + 8 * slot, ~(count / SLOTS) & 1);
                if (lane == 0) {
                    items[slot] = item;
                    if (item.token < 0) {
                        barrier_arrive(full);
                    } else {
                        barrier_expect(full, 2 * ROW_BYTES);
                        const u32 to = room + slot * 2 * ROW_BYTES;
#pragma unroll
                        for (int s = 0; s < SLICES; ++s) {
                            copy_box(to + s * (ROWS * 128), &left_rows, full, item.head * DIM + s * 64, item.token);
                            copy_box(to + ROW_BYTES + s * (ROWS * 128), &right_rows, full, item.head * DIM + s * 64, item.token);
                        }
                    }
                }
                __syncwarp();
                if (item.token < 0) break;
            }
            if (lane == 0) {
                // The last block leaves the counters as they were.
                if (atomicAdd(counters + 1, 1u) == gridDim.x - 1) counters[0] = counters[1] = 0;
            }
        } else if (warp == 1 && lane == 0) {
            u32 stage = 0, parity = 1;
#pragma unroll 1
            for (u32 count = 0;; ++count) {
                const u32 slot = count % SLOTS;
                barrier_wait(item_full + 8 * slot, count / SLOTS & 1);
                const Item item = items[slot];
                barrier_arrive(item_free + 8 * slot);
                if (item.token < 0) break;
#pragma unroll 1
                for (int h = 0; h < (FOR_KEYS ? SHARE : 1); ++h) {
                    const int head = FOR_KEYS ? item.head * SHARE + h : item.head / SHARE;
#pragma unroll 1
                    for (int start = item.first; start < item.end; start += COLUMNS) {
                        const u32 to = ring + stage * 2 * SIDE_BYTES, done = left_full + 8 * stage;
                        barrier_wait(free + 8 * stage, parity);
                        barrier_expect(done, SIDE_BYTES + COLUMNS * (FOR_KEYS ? 12 : 4));
#pragma unroll
                        for (int s = 0; s < SLICES; ++s) copy_box(to + s * (COLUMNS * 128), &left, done, head * DIM + s * 64, start);
                        bulk_copy(shared_address(ring_ids[stage]), ids + start, COLUMNS * 4, done);
#if FOR_KEYS
                        bulk_copy(shared_address(ring_lse[stage]), statistics + (i64)head * padded + start, COLUMNS * 4, done);
                        bulk_copy(shared_address(ring_along[stage]), statistics + (i64)(heads + head) * padded + start, COLUMNS * 4, done);
#endif
                        barrier_expect(right_full + 8 * stage, SIDE_BYTES);
#pragma unroll
                        for (int s = 0; s < SLICES; ++s)
                            copy_box(to + SIDE_BYTES + s * (COLUMNS * 128), &right, right_full + 8 * stage, head * DIM + s * 64, start);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                }
            }
        }
    } else {
        registers_raise<240>();
        const int own = group - 1, warp = threadIdx.x / 32 % 4, pair = lane & 3;
        const int first_row = own * 64 + warp * 16 + lane / 4;
        u32 stage = 0, parity = 0;
        for (u32 count = 0;; ++count) {
            const u32 slot = count % SLOTS;
            barrier_wait(item_full + 8 * slot, count / SLOTS & 1);
            const Item item = items[slot];
            if (item.token < 0) break;
            const int mine[2] = {item.token + first_row, item.token + first_row + 8};
            const int my_id[2] = {ids[mine[0]], ids[mine[1]]};
            // The id of all of the warp's rows, or -1 where they have several.
            int common = __shfl_sync(~0u, my_id[0], 0);
            if (!__all_sync(~0u, my_id[0] == common && my_id[1] == common)) common = -1;
            const int row0 = item.token + own * 64 + warp * 16;
#if !FOR_KEYS
            float my_lse[2], my_along[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                my_lse[y] = statistics[(i64)item.head * padded + mine[y]];
                my_along[y] = statistics[(i64)(heads + item.head) * padded + mine[y]];
            }
#endif
            const u32 rows_at = room + slot * 2 * ROW_BYTES + own * 64 * 128;
            const u64 row[2] = {swizzled(rows_at), swizzled(rows_at + ROW_BYTES)};
            float score[COLUMNS / 2], change[COLUMNS / 2], sum[1 + FOR_KEYS][DIM / 2];
            u32 change_of[COLUMNS / 4];
#if FOR_KEYS
            u32 share_of[COLUMNS / 4];
#endif

            auto product = [&](float* to, u64 rows, u32 at) {
                const u64 w = swizzled(at);
#pragma unroll
                for (int e = 0; e < DIM / 16; ++e)
                    Wgmma<D, COLUMNS>::of(to, rows + e / 4 * (ROWS * 128 >> 4) + e % 4 * 2,
                        w + e / 4 * (COLUMNS * 128 >> 4) + e % 4 * 2, e > 0);
                products_end();
            };
            auto weigh = [&](float* to, const u32* weight, u32 at, int add) {
                const u64 w = swizzled_columns(at, COLUMNS * 128, 1024);
#pragma unroll
                for (int c = 0; c < COLUMNS / 16; ++c) WgmmaRows<D, DIM>::of(to, weight + 4 * c, w + c * (2048 >> 4), c > 0 ? 1 : add);
                products_end();
            };
            const float factor = SOFTCAP ? LOG2E : scale * LOG2E;
            const int tiles = item.first < item.end ? (item.end - item.first + COLUMNS - 1) / COLUMNS * (FOR_KEYS ? SHARE : 1) : 0;
            int start = item.first, add = 0;
            for (int tile = 0; tile < tiles; ++tile) {
                const u32 at_left = ring + stage * 2 * SIDE_BYTES, at_right = at_left + SIDE_BYTES;
                barrier_wait(left_full + 8 * stage, parity);
                // Where the tile is behind the diagonal of all of the warpgroup's rows nothing is seen.
                const int wg_row = item.token + own * 64;
                if (CAUSAL && (FOR_KEYS ? start + COLUMNS <= wg_row : start > wg_row + 63)) {
                    barrier_wait(right_full + 8 * stage, parity);
                    if (lane == 0) barrier_arrive(free + 8 * stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                    start += COLUMNS;
                    if (start >= item.end) start = item.first;
                    continue;
                }
                products_begin();
                product(score, row[0], at_left);
                barrier_wait(right_full + 8 * stage, parity);
                product(change, row[1], at_right);
                // Are all of the tile's tokens of the rows' sequence, and seen?
                const bool below = start + COLUMNS - 1 < row0 + WINDOW, above = start > row0 + 15 - WINDOW;
                bool whole = common >= 0 && (!CAUSAL || (FOR_KEYS ? start >= row0 + 15 : start + COLUMNS <= row0 + 1))
                    && (WINDOW == 0 || (BOTH_SIDES ? below && above : FOR_KEYS ? below : above));
#pragma unroll
                for (int c = 0; c < COLUMNS; c += 32) whole = whole && ring_ids[stage][c + lane] == common;
                whole = __all_sync(~0u, whole);
                products_wait<1>();
                products_done<COLUMNS / 2>(score);
#if SOFTCAP
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) {
                    // The hyperbolic tangent by one power and one division.
                    const float e = power(score[i] * (scale * (2.0f * LOG2E / CAP)));
                    score[i] = CAP - __fdividef(2.0f * CAP, e + 1.0f);
                }
#endif
                if (!whole) {
#pragma unroll
                    for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int p = c * 8 + pair * 2 + (i & 1), other = start + p, row_token = mine[i >> 1], id = ring_ids[stage][p];
                            const int from = FOR_KEYS ? other : row_token, to = FOR_KEYS ? row_token : other;
                            const bool seen = id >= 0 && id == my_id[i >> 1] && (!CAUSAL || to <= from) && (WINDOW == 0 || to > from - WINDOW)
                                && (!BOTH_SIDES || to < from + WINDOW);
                            if (!seen) score[c * 4 + i] = MASKED;
                        }
                }
                // Scores to shares, which are multiplied by the slope of the cap behind their own product.
#pragma unroll
                for (int c = 0; c < COLUMNS / 8; ++c) {
#if FOR_KEYS
                    const float2 of_lse = *(const float2*)&ring_lse[stage][c * 8 + pair * 2];
#endif
                    float share[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
#if FOR_KEYS
                        const float lse = i & 1 ? of_lse.y : of_lse.x;
#else
                        const float lse = my_lse[i >> 1];
#endif
                        float& s = score[c * 4 + i];
                        share[i] = power(fmaf(s, factor, -lse));
#if SOFTCAP
                        s = share[i] * fmaxf(1.0f - (s / CAP) * (s / CAP), 0.0f);
#else
                        s = share[i];
#endif
                    }
#if FOR_KEYS
#pragma unroll
                    for (int i = 0; i < 2; ++i) share_of[c * 2 + i] = Mma<D>::pack(share[2 * i], share[2 * i + 1]);
#endif
                }
#if FOR_KEYS
                products_begin();
                weigh(sum[1], share_of, at_right, add);
                products_wait<1>();
#else
                products_wait<0>();
#endif
                products_done<COLUMNS / 2>(change);
#pragma unroll
                for (int c = 0; c < COLUMNS / 8; ++c) {
#if FOR_KEYS
                    const float2 of_along = *(const float2*)&ring_along[stage][c * 8 + pair * 2];
#endif
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
#if FOR_KEYS
                        const float along = i & 1 ? of_along.y : of_along.x;
#else
                        const float along = my_along[i >> 1];
#endif
                        float& d = change[c * 4 + i];
                        d = score[c * 4 + i] * (d - along);
                    }
                }
#pragma unroll
                for (int i = 0; i < COLUMNS / 4; ++i) change_of[i] = Mma<D>::pack(change[2 * i], change[2 * i + 1]);
                products_begin();
                weigh(sum[0], change_of, at_left, add);
                products_wait<0>();
                products_done<DIM / 2>(sum[0]);
#if FOR_KEYS
                products_done<DIM / 2>(sum[1]);
#endif
                // Each warp for itself, as each reads statistics and ids.
                if (lane == 0) barrier_arrive(free + 8 * stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
                add = 1;
                start += COLUMNS;
                if (start >= item.end) start = item.first;
            }
            // All of this warpgroup has read the item.
            group_wait(1 + own, 128);
            if (threadIdx.x % 128 == 0) barrier_arrive(item_free + 8 * slot);
#pragma unroll
            for (int o = 0; o < 1 + FOR_KEYS; ++o)
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    D::Raw* out = (o ? second_out : first_out) + ((i64)mine[y] * across + item.head) * DIM;
                    const float times = o ? 1.0f : scale;
#pragma unroll
                    for (int j = 0; j < DIM / 8; j += 4) {
                        u32 x[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float* s = sum[o] + 4 * (j + i) + 2 * y;
                            x[i] = add ? Mma<D>::pack(s[0] * times, s[1] * times) : 0;
                        }
                        quad_transpose(x, lane);
                        if (mine[y] < tokens) *(uint4*)(out + 8 * (j + pair)) = make_uint4(x[0], x[1], x[2], x[3]);
                    }
                }
        }
    }
#endif
}
