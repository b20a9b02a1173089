// Causal attention for prompts on Hopper's tensor cores (Shah et al. 2024, "FlashAttention-3", section 3): over a paged cache,
// or over keys and values that lie as q does. Floor: 4 * pairs * heads * DIM FLOPs over the tensor cores' peak.
// Prediction: a tile of 128 x 128 at DIM 128 is 2,048 cycles of wgmma and 1,024 of ex2 at 16 a cycle, which overlap; the diagonal
// tiles compute twice what is seen, so 16,384 tokens run at the rate of two products, some 640 TFLOP/s, and 4,096 at 560. At
// DIM 64 products and powers take 1,024 cycles each, and some 450 TFLOP/s remain.
// A block takes (ROWS tokens, query head) items in turn, long ones first, in alternating directions so that sums of lengths are
// even. Its first three warps are producers, of keys, of values and of q: they have the copy engine bring tiles of COLUMNS positions
// into two rings, a box for each cache block; the third divides an item's tokens into segments of one sequence. Each of CONSUMERS
// warpgroups multiplies 64 rows: it issues the scores of the next tile, then the values of this one, and takes the next tile's
// softmax meanwhile. The warpgroups issue in turn, so that the softmax of one falls under the products of another.
// A cache of codes goes through the registers of four producer warps (`attention_codes_sm90.cuh`), and wgmma multiplies f16.
// q is rotated in shared memory by those who multiply it, by a table of `rotary_table.cu`: each (ROWS tokens, query head) is met once.
// Defines: PAIRS of each head that are rotated, 0 for none; D, a 16-bit float, of q, cache and result; DIM, 64 or 128; SHARE, query heads of a key head; BLOCK, tokens of a cache
// block, a multiple of 8 that divides COLUMNS; PAGED, 0 or 1; WINDOW, 0 for none; SOFTCAP, 0 or 1, with CAP; SINKS, as in attention.cu; FEW: tokens in runs of
// fewer are left out, 0 for none, and PROMPTS, whether tokens behind their sequences' prompts are (runs.cuh); LSE, 0 or 1, whether the logarithms of the sums of powers are stored as well, 0 of rows that see
// nothing; CONSUMERS; STAGES; what `codes.cuh` takes: of codes CONSUMERS is 2, and PAGED 1. Where keys are not paged nothing is done if `scattered`: tokens of a sequence must follow each other.
// Numbers: tokens, query heads, blocks of a sequence, cache blocks. For other architectures it is empty, and is not launched.

// Tiles of tokens that are sorted by length.
#define MAX_SORTED 512
#define MASKED -1.0e30f
// Registers of a thread, of which a block has 504 for each three or 512 for each four: producers of codes convert them.
#define PRODUCER_REGISTERS (CODED ? 88 : CONSUMERS == 2 ? 40 : 32)
#define CONSUMER_REGISTERS (CODED ? 208 : CONSUMERS == 2 ? 232 : 160)

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

extern "C" __global__ __launch_bounds__(128 * (CONSUMERS + 1), 1) void attention_sm90(
    const __grid_constant__ TensorMap q,
#if CODED
    const Stored* __restrict__ cache,
#else
    const __grid_constant__ TensorMap cache,
#endif
#if !PAGED
    const __grid_constant__ TensorMap values, const int* __restrict__ scattered,
#endif
    const int* __restrict__ table, const int* __restrict__ ids, const int* __restrict__ positions,
#if CODED
    const float* __restrict__ scales,
#endif
#if SINKS
    const SINK::Raw* __restrict__ sinks,
#endif
#if PROMPTS
    const int* __restrict__ prompts,
#endif
#if PAIRS
    const float* __restrict__ turns,
#endif
    D::Raw* __restrict__ out,
#if LSE
    float* __restrict__ lse,
#endif
    float scale, Numbers<4> n
) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[4 + 4 * STAGES];
    __shared__ Item items[2];
    __shared__ int lengths[MAX_SORTED];
    __shared__ u16 order[MAX_SORTED];
    const u32 room = (shared_address(shared) + 1023) & ~1023u, k_ring = room + 2 * Q_BYTES;
    const u32 v_ring = k_ring + STAGES * SIDE_BYTES;
#if CODED
    const u32 of_columns = v_ring + STAGES * SIDE_BYTES;
    __shared__ float of_rows[ROWS];
#endif
    const u32 item_full = shared_address(barriers), item_free = item_full + 16;
    const u32 k_full = item_free + 16, k_free = k_full + 8 * STAGES;
    const u32 v_full = k_free + 8 * STAGES, v_free = v_full + 8 * STAGES;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const int tokens = (int)n.v[0], heads = (int)n.v[1];
    const int tiles = (tokens + ROWS - 1) / ROWS, all = tiles * heads;
    // Of the last round some blocks have none.
    const int rounds = (all + (int)gridDim.x - 1) / (int)gridDim.x;
    const int block_items = rounds > 0 && item_of(rounds - 1, all) < 0 ? rounds - 1 : rounds;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            barrier_init(item_full + 8 * s, 32);
            barrier_init(item_free + 8 * s, 128 * CONSUMERS + (CODED ? PRODUCERS : 64));
        }
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(k_full + 8 * s, CODED ? PRODUCERS : 1);
            barrier_init(v_full + 8 * s, CODED ? PRODUCERS : 1);
            barrier_init(k_free + 8 * s, CONSUMERS);
            barrier_init(v_free + 8 * s, CONSUMERS);
        }
        barriers_ready();
    }
    __syncthreads();
    others_may_begin();
    after_others();
#if !PAGED
    if (*scattered) return;
#endif
#if PROMPTS
    // Steps without a token of a prompt are most of them.
    bool some_prompt = false;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) some_prompt |= ids[t] >= 0 && positions[t] < prompts[ids[t]];
    if (!__syncthreads_or(some_prompt)) {
        for (int t = blockIdx.x; t < tokens; t += gridDim.x)
            for (int i = threadIdx.x; ids[t] < 0 && i < heads * (DIM / 8); i += blockDim.x)
                *(uint4*)(out + ((i64)t * heads * (DIM / 8) + i) * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
#else
    const int* prompts = nullptr;
#endif
    // The tiles of tokens by what they see, from the longest on, as a few of their rows tell.
    const bool sorted = tiles <= MAX_SORTED;
    if (sorted) {
        for (int t = threadIdx.x; t < tiles; t += blockDim.x) {
            int most = 0;
#pragma unroll
            for (int i = 1; i <= 4; ++i) most = max(most, positions[min(t * ROWS + ROWS / 4 * i, tokens) - 1]);
            lengths[t] = WINDOW > 0 ? min(most, WINDOW) : most;
        }
        __syncthreads();
        for (int t = threadIdx.x; t < tiles; t += blockDim.x) {
            int rank = 0;
            for (int other = 0; other < tiles; ++other)
                rank += lengths[other] > lengths[t] || (lengths[other] == lengths[t] && other < t);
            order[rank] = (u16)t;
        }
        __syncthreads();
    }
    auto token_of = [&](int at) { return (sorted ? order[at / heads] : tiles - 1 - at / heads) * ROWS; };
    // An item into its place, by one warp: what rows see, and their q.
    auto prepare = [&](int nth) {
        const int at = item_of(nth, all), token = token_of(at), slot = nth & 1;
        const u32 full = item_full + 8 * slot;
        barrier_wait(item_free + 8 * slot, ~(nth >> 1) & 1);
        divide(items[slot], ids, positions, prompts, token, tokens, n.v[2] * BLOCK);
        // Every lane has written a part of the item.
        if (lane != 0) {
            barrier_arrive(full);
        } else {
            barrier_expect(full, Q_BYTES);
#pragma unroll
            for (int s = 0; s < SLICES; ++s)
                copy_box(room + slot * Q_BYTES + s * (ROWS * 128), &q, full, at % heads * DIM + s * 64, token);
        }
        __syncwarp();
    };
    if (group == 0) {
        registers_lower<PRODUCER_REGISTERS>();
#if CODED
        const Rings rings = {item_full, item_free, k_full, k_free, v_full, v_free, k_ring, of_columns};
        const CodedCache coded = {cache, scales, table, (int)n.v[2], (int)n.v[3], heads / SHARE, heads / SHARE * BLOCK, scale};
        bring_codes(rings, coded, items, block_items, prepare, [&](int nth) { return item_of(nth, all) % heads / SHARE; });
#else
        const int warp = threadIdx.x / 32;
        u32 count = 0;
        if (warp == 2) {
            if (lane == 0) prefetch_map(&q);
            for (int nth = 0; nth < block_items; ++nth) prepare(nth);
            return;
        }
        if (warp > 2) return;
        if (lane == 0) {
            prefetch_map(&cache);
#if !PAGED
            prefetch_map(&values);
#endif
        }
        const u32 ring = warp == 0 ? k_ring : v_ring, full = warp == 0 ? k_full : v_full, free = warp == 0 ? k_free : v_free;
        u32 stage = 0, parity = 1;
        for (int nth = 0; nth < block_items; ++nth) {
            const int at = item_of(nth, all);
            const int key = at % heads / SHARE, slot = count & 1;
            barrier_wait(item_full + 8 * slot, count >> 1 & 1);
            ++count;
#if PAGED
            // Lanes know the groups of eight cache rows where the tile's blocks begin; past the cache are zeros.
            const int keys = heads / SHARE, past = (int)(n.v[3] * 2 * keys * (BLOCK / 8));
            auto line_of = [&](const Cursor& c) {
                const int p = c.start + lane * BLOCK;
                const bool seen = c.some() && lane < COLUMNS / BLOCK && p < c.segment.end;
                const int block = seen ? table[(i64)c.segment.id * n.v[2] + p / BLOCK] : -1;
                return block >= 0 && block < n.v[3] ? ((block * 2 + warp) * keys + key) * (BLOCK / 8) : past;
            };
#endif
            Cursor cursor(items[slot]);
#if PAGED
            int line = line_of(cursor);
#endif
            while (cursor.some()) {
                const u32 to = ring + stage * SIDE_BYTES, done = full + 8 * stage;
#if PAGED
                const int mine = line;
#else
                const int row = cursor.segment.id + cursor.start;
#endif
                cursor.next();
#if PAGED
                line = line_of(cursor);
#endif
                barrier_wait(free + 8 * stage, parity);
                if (lane == 0) barrier_expect(done, SIDE_BYTES);
                __syncwarp();
#if PAGED
                if (lane < COLUMNS / BLOCK) copy_groups(to + lane * (BLOCK / 8 * GROUP_BYTES), &cache, done, mine);
#else
                if (lane == 0) {
#pragma unroll
                    for (int s = 0; s < SLICES; ++s)
                        copy_box(to + s * SLICE_BYTES, warp == 0 ? &cache : &values, done, key * DIM + s * 64, row);
                }
#endif
                __syncwarp();
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            barrier_arrive(item_free + 8 * slot);
        }
#endif
    } else {
        registers_raise<CONSUMER_REGISTERS>();
        const int own = group - 1, warp = threadIdx.x / 32 % 4, pair = lane & 3;
        const int first_row = own * 64 + warp * 16 + lane / 4;
        if (own == CONSUMERS - 1) group_arrive(1, 256);
        // One number for both, less 1 for values, makes ptxas wait for each wgmma (its message C7520): a third of the rate.
        u32 count = 0, k_at = 0, v_at = 0;
        for (int nth = 0; nth < block_items; ++nth) {
            const int at = item_of(nth, all);
            const int slot = count & 1;
#if !CODED
            const int head = at % heads, token = token_of(at);
#endif
            const Item& item = items[slot];
#if PAIRS
            const int first_token = token_of(at) + own * 64;
            // On their way before the queries are there. Of rows behind the last token any will do.
            const Turns by = turns_of(turns + (i64)min(first_token, tokens - 1) * (2 * PAIRS), max(tokens - first_token, 1));
#endif
            barrier_wait(item_full + 8 * slot, count >> 1 & 1);
            ++count;
#if !CODED
            const int position[2] = {item.position[first_row], item.position[first_row + 8]};
#endif
#if PAIRS
            rotate_rows(room + slot * Q_BYTES + own * 64 * 128, by);
            group_wait(4 + own, 128);
#endif
            const u64 x = swizzled(room + slot * Q_BYTES + own * 64 * 128);
#if CODED
            const bool fitted = fit_queries(room + slot * Q_BYTES + own * 64 * 128, of_rows + own * 64);
            group_wait(4 + own, 128);
#endif
            float score[COLUMNS / 2], value[DIM / 2];
            u32 weight[COLUMNS / 4];
            float most[2] = {MASKED, MASKED}, total[2] = {0.0f, 0.0f}, keep[2];

            auto scores = [&](u32 stage) {
                const u64 w = swizzled(k_ring + stage * SIDE_BYTES, GROUP_BYTES);
#pragma unroll
                for (int k = 0; k < DIM / 16; ++k)
                    Wgmma<Multiplied, COLUMNS>::of(score, x + k / 4 * (ROWS * 128 >> 4) + k % 4 * 2,
                        w + k / 4 * (SLICE_BYTES >> 4) + k % 4 * 2, k > 0);
                products_end();
            };
            auto values_of = [&](u32 stage, int add) {
                const u64 w = swizzled_columns(v_ring + stage * SIDE_BYTES, SLICE_BYTES, GROUP_BYTES);
#pragma unroll
                for (int k = 0; k < COLUMNS / 16; ++k)
                    WgmmaRows<Multiplied, DIM>::of(value, weight + 4 * k, w + k * (2 * GROUP_BYTES >> 4), k > 0 ? 1 : add);
                products_end();
            };
            // Rows of the last cache block that no token has written yet: anything times 0 must be 0.
            auto clear = [&](u32 stage, int from) {
#if !CODED
                const int to = (from + BLOCK - 1) / BLOCK * BLOCK;
                if (!PAGED || from >= COLUMNS || from == to) return;
                for (int i = threadIdx.x % 128; i < (to - from) * 8 * SLICES; i += 128) {
                    const int r = from + i / (8 * SLICES), chunk = i % (8 * SLICES);
                    const u32 place = v_ring + stage * SIDE_BYTES + r / 8 * GROUP_BYTES + chunk / 8 * SLICE_BYTES
                        + r % 8 * 128 + chunk % 8 * 16;
                    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" :: "r"(place), "r"(0) : "memory");
                }
                stores_before_products();
                group_wait(4 + own, 128);
#endif
            };
            // Scores to powers, with the new maximum and sum of each row; of the tile that is so many from the first.
            auto softmax = [&](const Cursor& c, u32 nth_tile) {
#if CODED
                const u32 of_tile = of_columns + nth_tile % SCALE_SLOTS * SCALE_BYTES + pair * 16;
                if (fitted) {
                    const float of_row[2] = {of_rows[first_row], of_rows[first_row + 8]};
#pragma unroll
                    for (int i = 0; i < COLUMNS / 2; ++i) score[i] *= of_row[i >> 1 & 1];
                }
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; ++j) {
                    u32 of[4];
                    load_words<4>(of, of_tile + j * 64);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float& s = score[j * 4 + i];
                        const float factor = __uint_as_float(of[i & 1]), log = __uint_as_float(of[2 + (i & 1)]);
#if SOFTCAP
                        const float e = power(s * factor);
                        s = CAP * LOG2E + log - __fdividef(2.0f * CAP * LOG2E, e + 1.0f);
#else
                        s = fmaf(s, factor, log);
#endif
                    }
                }
                const float factor = 1.0f;
#elif SOFTCAP
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) {
#if LSE
                    // Of full precision: an error here is one of the logarithm.
                    score[i] = CAP * tanhf(score[i] * (scale / CAP));
#else
                    // The hyperbolic tangent by one power and one division.
                    const float e = power(score[i] * (scale * (2.0f * LOG2E / CAP)));
                    score[i] = CAP - __fdividef(2.0f * CAP, e + 1.0f);
#endif
                }
                const float factor = LOG2E;
#else
                const float factor = scale * LOG2E;
#endif
                const int low = c.segment.rows & 0xffff, high = c.segment.rows >> 16;
#if CODED
                // Read again for each tile: registers are short.
                const int position[2] = {item.position[first_row], item.position[first_row + 8]};
#endif
                int begin[2], end[2];
                bool cut = false;
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    const int r = first_row + 8 * y;
                    end[y] = r >= low && r < high ? min(position[y] + 1, c.segment.end) - c.start : 0;
                    begin[y] = WINDOW > 0 ? position[y] - WINDOW + 1 - c.start : 0;
                    cut |= end[y] < COLUMNS || begin[y] > 0;
                }
                if (__any_sync(~0u, cut)) {
#pragma unroll
                    for (int y = 0; y < 2; ++y)
#pragma unroll
                        for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                const int p = j * 8 + pair * 2 + i;
                                if (p >= end[y] || (WINDOW > 0 && p < begin[y])) score[j * 4 + y * 2 + i] = MASKED;
                            }
                }
#if CODED
                float shifts[2];
#endif
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    float largest = most[y];
#pragma unroll
                    for (int j = 0; j < COLUMNS / 8; ++j)
                        largest = fmaxf(largest, fmaxf(score[j * 4 + y * 2], score[j * 4 + y * 2 + 1]));
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                    // Where nothing was seen yet, masked scores are the largest: they weigh nothing all the same.
                    const float shift = largest == MASKED ? 0.0f : -largest * factor;
                    keep[y] = power((most[y] - largest) * factor);
                    most[y] = largest;
#if CODED
                    shifts[y] = shift;
                }
                float sum[2] = {0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < COLUMNS / 16; ++j) {
                    // Weights have the scales of values: sums have not.
                    u32 inverse[4];
                    load_words<4>(inverse, of_tile + COLUMNS * 8 + j * 64);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        float& s = score[j * 8 + i];
                        s = power(s + shifts[i >> 1 & 1]);
                        sum[i >> 1 & 1] = fmaf(s, __uint_as_float(inverse[i >> 2 << 1 | (i & 1)]), sum[i >> 1 & 1]);
                    }
                }
#pragma unroll
                for (int y = 0; y < 2; ++y) total[y] = fmaf(total[y], keep[y], sum[y]);
#else
                    float sum = 0.0f;
#pragma unroll
                    for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            float& s = score[j * 4 + y * 2 + i];
                            s = power(fmaf(s, factor, shift));
                            sum += s;
                        }
                    total[y] = fmaf(total[y], keep[y], sum);
                }
#endif
            };
            auto pack = [&] {
#pragma unroll
                for (int i = 0; i < COLUMNS / 4; ++i) weight[i] = Mma<Multiplied>::pack(score[2 * i], score[2 * i + 1]);
            };

            Cursor cursor(item);
            const bool some = cursor.some();
            if (some) {
                barrier_wait(k_full + 8 * (k_at % STAGES), k_at / STAGES & 1);
                products_begin();
                scores(k_at % STAGES);
                products_wait<0>();
                products_done<COLUMNS / 2>(score);
                if (threadIdx.x % 128 == 0) barrier_arrive(k_free + 8 * (k_at % STAGES));
                ++k_at;
                softmax(cursor, k_at - 1);
                pack();
                int add = 0;
                int left = cursor.segment.end - cursor.start;
                for (cursor.next(); cursor.some(); cursor.next()) {
                    const u32 k_stage = k_at % STAGES, v_stage = v_at % STAGES;
                    barrier_wait(k_full + 8 * k_stage, k_at / STAGES & 1);
                    group_wait(1 + own, 256);
                    products_begin();
                    scores(k_stage);
                    barrier_wait(v_full + 8 * v_stage, v_at / STAGES & 1);
                    clear(v_stage, left);
                    values_of(v_stage, add);
                    group_arrive(1 + (own + 1) % CONSUMERS, 256);
                    products_wait<1>();
                    products_done<COLUMNS / 2>(score);
                    if (threadIdx.x % 128 == 0) barrier_arrive(k_free + 8 * k_stage);
                    softmax(cursor, k_at);
                    products_wait<0>();
                    products_done<DIM / 2>(value);
                    if (threadIdx.x % 128 == 0) barrier_arrive(v_free + 8 * v_stage);
                    pack();
                    if (__any_sync(~0u, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
                        for (int i = 0; i < DIM / 2; ++i) value[i] *= keep[i >> 1 & 1];
                    }
                    ++k_at, ++v_at;
                    add = 1;
                    left = cursor.segment.end - cursor.start;
                }
                const u32 stage = v_at % STAGES;
                barrier_wait(v_full + 8 * stage, v_at / STAGES & 1);
                clear(stage, left);
                products_begin();
                values_of(stage, add);
                products_wait<0>();
                products_done<DIM / 2>(value);
                if (threadIdx.x % 128 == 0) barrier_arrive(v_free + 8 * stage);
                ++v_at;
            }
#if CODED
            const int head = at % heads, token = token_of(at);
            const int position[2] = {item.position[first_row], item.position[first_row + 8]};
#endif
            // Each thread has read the item, and says so for itself: racecheck knows nothing of reads that a named barrier orders before
            // another thread's arrival. The warpgroup meets since of_rows, too, is written again for the next item.
            group_wait(4 + own, 128);
            barrier_arrive(item_free + 8 * slot);
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                total[y] += __shfl_xor_sync(~0u, total[y], 1);
                total[y] += __shfl_xor_sync(~0u, total[y], 2);
#if SINKS
                if (total[y] != 0.0f)
                    total[y] += power(SINK::load(sinks[head]) * LOG2E - most[y] * (CODED ? 1.0f : SOFTCAP ? LOG2E : scale * LOG2E));
#endif
                const float share = total[y] == 0.0f ? 0.0f : 1.0f / total[y];
                const i64 row = (i64)(token + first_row + 8 * y) * heads + head;
#pragma unroll
                for (int j = 0; j < DIM / 8; j += 4) {
                    u32 v[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* s = value + 4 * (j + i) + 2 * y;
                        v[i] = some ? Mma<D>::pack(s[0] * share, s[1] * share) : 0;
                    }
                    quad_transpose(v, lane);
                    if (position[y] != LEFT_OUT)
                        *(uint4*)(out + row * DIM + 8 * (j + pair)) = make_uint4(v[0], v[1], v[2], v[3]);
                }
#if LSE
                if (pair == 0 && position[y] != LEFT_OUT)
#if SOFTCAP
                    lse[row] = total[y] == 0.0f ? 0.0f : most[y] + logf(total[y]);
#else
                    lse[row] = total[y] == 0.0f ? 0.0f : most[y] * scale + logf(total[y]);
#endif
#endif
            }
        }
    }
#endif
}
