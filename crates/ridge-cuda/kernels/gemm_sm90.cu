// A product on Hopper's tensor cores: [m, k] x [n, k]^T, summed in f32 in the order of k, of 16-bit floats or, if SCALED, of 8-bit
// codes with scales: SCALED is BY_ROWS for a scale for each row of both sides, and BY_BLOCKS for one for each 128 elements of a row of
// the left side and for each block of 128 x 128 of the right sides. Tensor cores add products of 8-bit floats with fewer bits than f32
// has, so the sums of some slices are added up in f32, with scales of blocks those of each slice, which is as deep as a block (as in
// DeepSeek's DeepGEMM). Integers are summed exactly within a block's part of the depth.
// Floor: 2 m n k FLOPs over the tensor cores' peak, or the bytes of both sides and the result over bandwidth.
// A block makes tiles of ROWS x COLUMNS, one after another: the first warp copies slices of DEPTH of both sides into a
// ring of STAGES, and each of CONSUMERS warpgroups multiplies 64 rows of every tile or, with ALTERNATE, every other tile,
// so that one multiplies while the other stores. Neighbouring tiles share rows, so that L2 holds
// what they read. With SWIGLU the columns of a tile are half of one matrix and half of another, gate and value.
// Where tiles are fewer than multiprocessors, SPLIT blocks of a cluster take a part of k each, and then each adds up a part of the
// tile's columns, which the others write to its shared memory; the order of sums is that of k. With PAIR two blocks of a cluster
// make tiles of the same columns in neighbouring rows, and each copies half of the right side's slices for both.
// Of the left side HELD rows of a tile are copied, fewer than ROWS where it has no more: the rows behind them are whatever lies there, and
// are not stored. Then two blocks share a multiprocessor, of which one may be of the next launch.
// COUNT right sides have a result each.
// The first slices of the right sides, which are weights, are copied before earlier launches have ended.
// Numbers: m, k, and n of each right side. D of 16-bit operands and results, SCALED, CODE of codes, F8E4M3 or I8 (by rows alone), CONSUMERS, COLUMNS, HELD, STAGES, ALTERNATE, SPLIT, PAIR, COUNT, ADD, SWIGLU, BIAS (of codes, with BIAS_TYPE) and OUT_WIDE, whether
// the result is in f32, come from the instance; n and k divide by 8, k of codes by 16. For other architectures it is empty, and is not launched.

#define BY_ROWS 1
#define BY_BLOCKS 2
#if SCALED
typedef CODE Operand;
#else
typedef D Operand;
#endif
typedef Accumulator<Operand>::Of Accumulated;
// Bytes of a row of a slice, which is swizzled so, and the elements of it.
#define LINE 128
#define DEPTH (LINE / (int)sizeof(Operand::Raw))
// Bytes of the left side that L2 keeps beside what passes through it.
#define KEPT (32 << 20)
#define PARTS (ALTERNATE ? 2 : 1)
#define ROWS (64 * (ALTERNATE ? PARTS : CONSUMERS))
#define WIDTH (SWIGLU ? COLUMNS / 2 : COLUMNS)
#define SLICE_A (HELD * LINE)
// Bytes from eight rows of the left side to the next eight: the same rows again where there are no others.
#define GROUPS_A (HELD == 8 ? 0 : 8 * LINE)
#define SLICE (SLICE_A + COLUMNS * LINE)
#define CLUSTER (PAIR ? 2 : SPLIT)
// Rows of the tiles that a cluster makes at a time.
#define BAND (PAIR ? 2 * ROWS : ROWS)
// Slices of codes whose products tensor cores add up. With sums of 128 elements, one slice, a product of depth 4096 is off by 0.19 %
// with a gate, its rounding to bf16 included, with these by 0.23 %, and with all of them 0.38 %; adding up costs 5 to 10 % of the rate.
#define PROMOTE (!Operand::is_float ? 1 << 30 : SCALED == BY_BLOCKS ? 1 : 4)
// Columns of a tile that are within a block of the right side, pieces of a side of a tile, and those of all its sides.
#define BLOCK 128
#define PIECE (WIDTH % 128 == 0 ? 128 : WIDTH % 64 == 0 ? 64 : 32)
#define SIDES (SWIGLU ? 2 : 1)
#define PIECES (SIDES * WIDTH / PIECE)

__device__ inline u32 pack(float low, float high) { return Mma<D>::pack(low, high); }
__device__ inline float low(u32 x) { return D::load((u16)x); }
__device__ inline float high(u32 x) { return D::load((u16)(x >> 16)); }

__device__ inline float gated(float gate, float up) { return gate * sigmoid_for<D>(gate) * up; }

// Columns of a tile that a block adds up and stores.
#define SHARE (COLUMNS / SPLIT)

struct Outputs { void* out[COUNT]; };
// Scales of the left side, and of each right side; then biases, where there are any.
struct Scales {
    const float* left;
    const float* right[SWIGLU ? 2 : COUNT];
#if BIAS
    const BIAS_TYPE::Raw* bias[COUNT];
#endif
};

#if SCALED == BY_BLOCKS
// Scales of one slice: of a thread's two rows, and of the pieces of a tile's columns.
struct SliceScales {
    float left[2], right[PIECES];
};

// Where the scales of a tile are; each has `slices` along the depth.
struct TileScales {
    const float* left[2];
    const float* right[PIECES];
    __device__ TileScales(const float* left_side, const float* const* right_sides, i64 row, i64 column, i64 m, i64 n, int slices, int begin) {
#pragma unroll
        // What lies outside scales nothing that is stored.
        for (int half = 0; half < 2; ++half) left[half] = left_side + min(row + 8 * half, m - 1) * slices + begin;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const i64 at = min(column + p % (PIECES / SIDES) * PIECE, n - 1);
            right[p] = right_sides[p / (PIECES / SIDES)] + at / BLOCK * slices + begin;
        }
    }
    __device__ static float read(const float* at) {
        float x;
        // Volatile, so that it is issued here, a slice ahead of its use.
        asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(at));
        return x;
    }
    __device__ void of(SliceScales& scales, int s) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) scales.left[half] = read(left[half] + s);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) scales.right[p] = read(right[p] + s);
    }
};

// Adds the sums of a slice.
__device__ inline void promote(float* d, const float* sums, const SliceScales& scales) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const float factors[2] = {scales.left[0] * scales.right[p], scales.left[1] * scales.right[p]};
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) {
            float& sum = d[p * (PIECE / 2) + i];
            sum = fmaf(sums[p * (PIECE / 2) + i], factors[i / 2 % 2], sum);
        }
    }
}
#endif

// Where tile `t` begins: rows in groups, columns within a group, and of which right side.
struct Tiles {
    u32 rows, columns, group, before[COUNT];
    __device__ Tiles(const Numbers<2 + COUNT>& n) : rows((u32)((n.v[0] + BAND - 1) / BAND)), columns(0) {
        group = (u32)max((i64)4, min((i64)32, KEPT / (n.v[1] * BAND * (i64)sizeof(Operand::Raw))));
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            before[i] = columns;
            columns += (u32)((n.v[2 + i] + WIDTH - 1) / WIDTH);
        }
    }
    __device__ u32 all() const { return rows * columns; }
    __device__ void of(u32 t, int& row, int& column, int& side) const {
        const u32 above = t / (group * columns) * group, rest = t - above * columns, high = min(rows - above, group);
        row = (int)((above + rest % high) * BAND);
        const u32 at = rest / high;
        u32 from = 0;
        side = 0;
#pragma unroll
        for (int i = 1; i < COUNT; ++i)
            if (at >= before[i]) side = i, from = before[i];
        column = (int)((at - from) * WIDTH);
    }
};

// Scales of pairs of columns that are loaded at a time.
#define LOADS (WIDTH / SPLIT / 8 % 6 == 0 ? 6 : 4)

// A warpgroup's sums to memory; `left` and `right` are scales, `up` those of the other matrix of a gate.
__device__ inline void store(
    float* d, void* out, const void* r, i64 row, i64 column, i64 m, i64 n, int lane,
    const float* left, const float* right, const float* up, const void* bias
) {
#if SCALED == BY_ROWS
    // Many at once, so that their latencies overlap; what lies outside scales nothing that is stored.
    const int last_row = (int)(m - 1), pairs = (int)((n - column) / 2) - 1;
    const float of_rows[2] = {left[min((int)row + lane / 4, last_row)], left[min((int)row + lane / 4 + 8, last_row)]};
    // The columns of a whole tile may lie outside.
    if (pairs < 0) return;
#pragma unroll
    for (int from = 0; from < WIDTH / SPLIT / 8; from += LOADS) {
        float2 of_columns[LOADS];
#if SWIGLU
        float2 of_up[LOADS];
#endif
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const int c = min(4 * (from + j) + lane % 4, pairs);
            of_columns[j] = ((const float2*)(right + column))[c];
#if SWIGLU
            of_up[j] = ((const float2*)(up + column))[c];
#endif
        }
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* s = d + 4 * (from + j) + 2 * half;
                s[0] *= of_rows[half] * of_columns[j].x;
                s[1] *= of_rows[half] * of_columns[j].y;
#if SWIGLU
                s[WIDTH / 2] *= of_rows[half] * of_up[j].x;
                s[WIDTH / 2 + 1] *= of_rows[half] * of_up[j].y;
#endif
            }
    }
#endif
#if BIAS
#pragma unroll
    for (int j = 0; j < WIDTH / SPLIT / 8; ++j) {
        const i64 c = min(column + 8 * j + 2 * (lane % 4), n - 2);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float more = at<BIAS_TYPE>(bias, c + e);
            d[4 * j + e] += more;
            d[4 * j + 2 + e] += more;
        }
    }
#endif
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i64 at = row + lane / 4 + 8 * half;
#if OUT_WIDE
#pragma unroll
        for (int j = 0; j < WIDTH / SPLIT / 8; ++j) {
            const i64 c = column + 8 * j + 2 * (lane % 4);
            const float* s = d + 4 * j + 2 * half;
            if (at < m && c < n) *(float2*)((float*)out + at * n + c) = make_float2(s[0], s[1]);
        }
#else
#pragma unroll
        for (int j = 0; j < WIDTH / SPLIT / 8; j += 4) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* s = d + 4 * (j + i) + 2 * half;
                v[i] = pack(s[0], s[1]);
#if SWIGLU
                const u32 up = pack(s[WIDTH / 2], s[WIDTH / 2 + 1]);
                v[i] = pack(gated(low(v[i]), low(up)), gated(high(v[i]), high(up)));
#endif
            }
            quad_transpose(v, lane);
            const i64 c = column + 8 * (j + lane % 4);
            if (at < m && c < n) {
#if ADD
                const uint4 x = *(const uint4*)((const u16*)r + at * n + c);
                const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = pack(low(w[i]) + low(v[i]), high(w[i]) + high(v[i]));
#endif
                *(uint4*)((u16*)out + at * n + c) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
#endif
    }
}

extern "C" __global__
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(128 * (CONSUMERS + 1), HELD < 64 ? 2 : 1) void gemm_sm90(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
#if COUNT > 1 || SWIGLU
    const __grid_constant__ TensorMap b1,
#endif
#if COUNT > 2
    const __grid_constant__ TensorMap b2,
#endif
    const Outputs outputs, const void* __restrict__ r, const Numbers<2 + COUNT> n
#if SCALED
    , const Scales scales
#endif
) {
#if !SCALED
    const Scales scales = {};
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * STAGES + 4];
    const u32 ring = (shared_address(shared) + 1023) & ~1023u, full = shared_address(barriers);
    const u32 empty = full + 8 * STAGES, turns_at = empty + 8 * STAGES;
#if SPLIT > 1
    const u32 parts_come = turns_at + 16, parts_free = turns_at + 24, parts = ring + STAGES * SLICE;
#endif
    const Tiles tiles(n);
    const int slices = (int)((n.v[1] + DEPTH - 1) / DEPTH);
    const int rank = (int)(blockIdx.x % CLUSTER), nth_part = SPLIT > 1 ? rank : 0;
    const int begin = slices * nth_part / SPLIT, end = slices * (nth_part + 1) / SPLIT, own = end - begin;
    const u32 first_tile = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, (PAIR ? 2 : 1) * (ALTERNATE ? 4 : 4 * CONSUMERS));
        }
        for (int g = 0; g < 2; ++g) barrier_init(turns_at + 8 * g, 4);
#if SPLIT > 1
        barrier_init(parts_come, CONSUMERS);
        barrier_init(parts_free, (SPLIT - 1) * 4 * CONSUMERS);
#endif
        barriers_ready();
    }
    __syncthreads();
#if CLUSTER > 1
    cluster_arrive();
#endif
#if PAIR
    // The other block copies to this one's ring.
    cluster_wait();
#endif
    others_may_begin();
    // A slice of the ring is free, in both blocks that have a part of it.
    auto slice_read = [&](u32 stage) {
#if PAIR
        if (lane < 2) arrive_of_reader(of_rank(empty + 8 * stage, lane));
#else
        if (lane == 0) barrier_arrive(empty + 8 * stage);
#endif
    };
    if (group == 0) {
#if CONSUMERS > 1
        registers_lower<56>();
#endif
        if (threadIdx.x == 0) {
            prefetch_map(&a);
            prefetch_map(&b);
            auto fetch_right = [&](u32 to, u32 done, int s, int column, int side) {
                const TensorMap* map = &b;
#if COUNT > 1
                if (side == 1) map = &b1;
#endif
#if COUNT > 2
                if (side == 2) map = &b2;
#endif
#if PAIR
#if SWIGLU
                if (rank == 1) map = &b1;
#endif
                copy_box_to_both(to + SLICE_A + rank * (COLUMNS / 2) * LINE, map, done, s * DEPTH,
                    SWIGLU ? column : column + rank * (COLUMNS / 2));
#else
                copy_box(to + SLICE_A, map, done, s * DEPTH, column);
#if SWIGLU
                copy_box(to + SLICE_A + WIDTH * LINE, &b1, done, s * DEPTH, column);
#endif
#endif
            };
            // Slices of the first tile whose right sides are on their way.
            const u32 ahead = first_tile < tiles.all() ? min(own, STAGES) : 0;
            int row, column, side;
            tiles.of(first_tile, row, column, side);
            for (u32 s = 0; s < ahead; ++s) {
                barrier_expect(full + 8 * s, SLICE);
                fetch_right(ring + s * SLICE, full + 8 * s, begin + (int)s, column, side);
            }
            after_others();
            u32 at = 0;
            for (u32 t = first_tile; t < tiles.all(); t += stride) {
                tiles.of(t, row, column, side);
                for (int s = begin; s < end; ++s, ++at) {
                    const u32 stage = at % STAGES, to = ring + stage * SLICE, done = full + 8 * stage;
                    if (at >= ahead) {
                        barrier_wait(empty + 8 * stage, ~(at / STAGES) & 1);
                        barrier_expect(done, SLICE);
                        fetch_right(to, done, s, column, side);
                    }
                    copy_box(to, &a, done, s * DEPTH, PAIR ? row + rank * ROWS : row);
                }
            }
        } else {
            after_others();
        }
    } else {
        after_others();
#if CONSUMERS > 1
        registers_raise<224>();
#endif
        // Of tiles in turn, each warpgroup's own, while the other stores; or 64 rows of every tile.
        const int turn = ALTERNATE ? group - 1 : 0, turns = ALTERNATE ? CONSUMERS : 1, part = ALTERNATE ? 0 : group - 1;
        u32 at = turn * own;
#if SPLIT > 1
        u32 nth = 0;
#endif
        for (u32 t = first_tile + turn * stride; t < tiles.all(); t += turns * stride) {
            int row, column, side;
            tiles.of(t, row, column, side);
            const i64 first = row + (PAIR ? rank * ROWS : 0) + part * 64 + threadIdx.x / 32 % 4 * 16;
            void* out = outputs.out[0];
            i64 columns = n.v[2];
            const float* right[SIDES] = {scales.right[0]};
            if (SWIGLU) right[SIDES - 1] = scales.right[SIDES - 1];
            const void* bias = nullptr;
#if BIAS
            bias = scales.bias[0];
#pragma unroll
            for (int i = 1; i < COUNT; ++i)
                if (side == i) bias = scales.bias[i];
#endif
#pragma unroll
            for (int i = 1; i < COUNT; ++i)
                if (side == i) out = outputs.out[i], columns = n.v[2 + i], right[0] = scales.right[i];
            float d[PARTS][COLUMNS / 2];
#if SCALED
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) d[0][i] = 0.0f;
#endif
#if SCALED == BY_BLOCKS
            const TileScales of_tile(scales.left, right, first + lane / 4, column, n.v[0], columns, slices, begin);
            SliceScales of_slice, of_next;
            of_tile.of(of_next, 0);
#endif
#if ALTERNATE
            // A slice is waited for when the one before it in its place has come: parity tells no more.
            barrier_wait(turns_at + 8 * turn, (t / (turns * stride) + turn + 1) & 1);
#endif
            for (int s = 0; s < own;) {
#if SCALED
                // Products of codes are added up in f32 after so many slices.
                const int until = PROMOTE == 1 ? s + 1 : PROMOTE < own - s ? s + PROMOTE : own;
                Accumulated sums[1][COLUMNS / 2];
#else
                const int until = own;
                auto& sums = d;
#endif
                for (const int first = s; s < until; ++s, ++at) {
                    const u32 stage = at % STAGES, from = ring + stage * SLICE;
                    barrier_wait(full + 8 * stage, at / STAGES & 1);
#if ALTERNATE
                    if (s == own - 1 && lane == 0) barrier_arrive(turns_at + 8 * (turn ^ 1));
#endif
                    const u64 x = swizzled(from + part * 64 * LINE, GROUPS_A), w = swizzled(from + SLICE_A);
                    products_begin();
#pragma unroll
                    for (int k = 0; k < LINE / 32; ++k)
#pragma unroll
                        for (int i = 0; i < PARTS; ++i)
                            Wgmma<Operand, COLUMNS>::of(sums[i], x + i * (64 * LINE >> 4) + 2 * k, w + 2 * k, s > first || k > 0);
                    products_end();
#if SCALED == BY_BLOCKS
                    of_slice = of_next;
                    of_tile.of(of_next, min(s + 1, own - 1));
#endif
                    // The slice before is multiplied now, and its place in the ring free.
                    products_wait<1>();
                    if (s > first) slice_read((at - 1) % STAGES);
                }
                products_wait<0>();
                slice_read((at - 1) % STAGES);
#if SCALED
                products_done<COLUMNS / 2>(sums[0]);
#if SCALED == BY_BLOCKS
                promote(d[0], sums[0], of_slice);
#else
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i)
                    // Integers are summed at once.
                    d[0][i] = Operand::is_float ? d[0][i] + sums[0][i] : (float)sums[0][i];
#endif
#endif
            }
            at += (turns - 1) * own;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) products_done<COLUMNS / 2>(d[i]);
#if SPLIT > 1
            // A block's parts of others lie one behind another, for each warpgroup, 16 bytes of each thread together.
            const u32 mine = parts + part * (SPLIT - 1) * (64 * SHARE * 4) + threadIdx.x % 128 * 16;
            if (threadIdx.x % 128 == 0) barrier_expect(parts_come, (SPLIT - 1) * 64 * SHARE * 4);
            if (nth == 0) cluster_wait();
            else wait_for_cluster(parts_free, ~nth & 1);
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) {
                if (other == rank) continue;
                const u32 to = of_rank(mine + (rank - (rank > other)) * (64 * SHARE * 4), other);
                const u32 done = of_rank(parts_come, other);
#pragma unroll
                for (int i = 0; i < SHARE / 8; ++i) store_remote(to + i * 2048, d[0] + other * (SHARE / 2) + 4 * i, done);
            }
            wait_for_cluster(parts_come, nth & 1);
            float total[SHARE / 2];
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) {
                if (other == rank) {
#pragma unroll
                    for (int q = 0; q < SPLIT; ++q)
                        if (q == other)
#pragma unroll
                            for (int i = 0; i < SHARE / 2; ++i) {
                                const float x = d[0][q * (SHARE / 2) + i];
                                total[i] = other == 0 ? x : total[i] + x;
                            }
                } else {
                    const u32 from = mine + (other - (other > rank)) * (64 * SHARE * 4);
#pragma unroll
                    for (int i = 0; i < SHARE / 8; ++i) {
                        float x[4];
                        load_shared(x, from + i * 2048);
#pragma unroll
                        for (int j = 0; j < 4; ++j) total[4 * i + j] = other == 0 ? x[j] : total[4 * i + j] + x[j];
                    }
                }
            }
            __syncwarp();
            if (lane == 0 && t + stride < tiles.all())
#pragma unroll
                for (int other = 0; other < SPLIT; ++other)
                    if (other != rank) arrive_remote(of_rank(parts_free, other));
            store(total, out, r, first, column + rank * SHARE, n.v[0], columns, lane, scales.left, right[0], right[SIDES - 1], bias);
            ++nth;
#else
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                store(d[i], out, r, first + 64 * i, column, n.v[0], columns, lane, scales.left, right[0], right[SIDES - 1], bias);
#endif
        }
    }
#if PAIR
    __syncwarp();
    cluster_arrive();
    cluster_wait();
#endif
#if SPLIT > 1
    // Shared memory stays while others write to it.
    if (group == 0 || first_tile >= tiles.all()) cluster_wait();
    cluster_arrive();
    cluster_wait();
#endif
#endif
}
