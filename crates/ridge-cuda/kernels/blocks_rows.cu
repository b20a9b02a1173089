// Linears of one input for several rows by weights of blocks of 256 whose groups of 32 have small integers as scales (Q4_K, Q5_K), read once
// in their own bits, on Hopper: y = x w^T on tensor cores.
// Floor: the weights' bytes over bandwidth; not far from it, the instructions that take codes out of their bits.
// A code times its group's integer scale has 11 bits at most, which f16 holds exactly. Codes are taken as subnormal numbers, by a mask, and
// multiplied by their scale two at a time; products of a whole block of 256 are then added up by tensor cores, with no more to do for a group.
// So that x is f16 too, each 256 elements of a row are scaled by a power of two, which puts the largest just below 2^10: what has less than the
// 8 or 11 bits that it came with is less than 2^-23 of that. Minima, 6-bit integers as well, are multiplied by the sums of x of their groups,
// each in two f16 that have 22 bits of it, in one more product. What comes out is scaled in f32.
// A cluster has tiles that follow each other, of two slices of 16 columns, and each of its blocks a part of the depth, of which x lies in
// shared memory as the fragments of products. What a block has of a batch, chunks of 256 elements of one tile after another, is divided
// among its warps evenly, each of which has a ring of its own that runs on from one tile and batch to the next.
// The sums of a warp's part of a tile are added up in the order of the depth, in shared memory, which holds a batch of tiles; then each block
// of a cluster makes a part of the results.
// A norm multiplies x by its gains as it comes, and results by the factor of their row, when squares of all the depth are known.
// The order of sums is fixed by shapes alone: a row's result does not depend on the others.
// Defines: D of x and results; ROWS, 8 or 16; DEPTH, a multiple of 256; CLUSTER, 1 or 2;
// WARPS; STAGES of a ring; RING, the bytes of a warp's; BATCH; COUNT weights; EACH_FORMAT(F), `F(i, format)` of each format, and
// FORMATS, which of them each weight has; ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU (of two weights of one format), 0 or 1; NORM, whether x
// is normed on the way, 0 or 1, with NORM_TYPE, the dtype of gains; CACHED, 0 or 1, with CACHE, the dtype of a cache, PAGE, the tokens of one of
// its blocks, DIM, a multiple of 32, and the defines of `angles.cuh`, PAIRS a multiple of 16.
// With CACHED, weights 1 and 2 give keys and values, in heads of DIM elements, which are written to a paged cache as `rope.cu` writes them:
// keys rotated. The slices of a tile of keys are of 16 pairs, the one of their first elements and the other of those rotated with them.
// Numbers: rows, DEPTH, then the columns of each weight, then with CACHED the slots of the cache.

__device__ inline u32 times(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// What a lane has of a column's block: its scales' bytes, two words of them, its minima of groups 2 quarter and 2 quarter + 1, as subnormal
// numbers, and the factors of both.
struct Header {
    u32 scales[2], minima;
    float scale, minimum;
    __device__ Header(const u8* chunk, int quarter) {
        u32 w[4];
        load_words<4>(w, shared_address(chunk));
        scales[0] = w[1] & 0x3f3f3f3fu;
        scales[1] = (w[3] & 0x0f0f0f0fu) | (w[1] >> 2 & 0x30303030u);
        const u32 of_minima = quarter & 2 ? (w[3] >> 4 & 0x0f0f0f0fu) | (w[2] >> 2 & 0x30303030u) : w[2] & 0x3f3f3f3fu;
        minima = __byte_perm(of_minima, 0, quarter & 1 ? 0x4342 : 0x4140);
        // Scaled codes have 2^-19 and minima 2^-24.
        scale = F16::load((u16)w[0]) * 524288.0f;
        minimum = F16::load((u16)(w[0] >> 16)) * 16777216.0f;
    }
    // What codes of a group, subnormal numbers as they are (those of odd groups sixteen times as large), are multiplied by, twice.
    __device__ u32 factors(int group) const {
        const u32 above = __byte_perm(scales[group >> 2], 0x64, 0x4040 + (group & 3) * 0x0101);
        return group & 1 ? Half<F16>::fma(above, 0x40004000, 0xe800e800) : Half<F16>::fma(above, 0x50005000, 0xf800f800);
    }
};

// Adds the products of a chunk to a lane's sums: of columns `row` and `row + 8` of each slice and rows 2 quarter, 2 quarter + 1 of each tile.
template <class F> __device__ inline void multiply(
    const u8* at, const uint4* x, const uint2* sums_of_x, const float* factors, float (&total)[SLICES][TILES][4]
) {
    const int lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
    const u8* upper = at + row * Column<F>::STRIDE;
    const int below = 8 * Column<F>::STRIDE;
    float sum[SLICES][TILES][4] = {};
    const Header headers[SLICES][2] = {
        {Header(upper, quarter), Header(upper + below, quarter)},
        {Header(upper + Ring<F>::SLICE_BYTES, quarter), Header(upper + Ring<F>::SLICE_BYTES + below, quarter)},
    };
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        uint4 b[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t) b[t] = x[(group * TILES + t) * 32 + lane];
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            u32 codes[2][4];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const u32 by = headers[s][side].factors(group);
                F::subnormal(upper + s * Ring<F>::SLICE_BYTES + side * below, group, quarter, codes[side]);
#pragma unroll
                for (int i = 0; i < 4; ++i) codes[side][i] = times(codes[side][i], by);
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                Mma<F16>::of(sum[s][t], codes[0][0], codes[1][0], codes[0][1], codes[1][1], b[t].x, b[t].y);
                Mma<F16>::of(sum[s][t], codes[0][2], codes[1][2], codes[0][3], codes[1][3], b[t].z, b[t].w);
            }
        }
    }
    float by[2 * TILES];
    load_words<2 * TILES>((u32*)by, shared_address(factors + quarter * 2 * TILES));
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const uint2 b = sums_of_x[t * 32 + lane];
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            const Header &above = headers[s][0], &under = headers[s][1];
            float minimum[4] = {};
            Mma<F16>::of(minimum, above.minima, under.minima, above.minima, under.minima, b.x, b.y);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Header& header = headers[s][e >> 1];
                const float value = fmaf(-header.minimum, minimum[e], header.scale * sum[s][t][e]);
                total[s][t][e] = fmaf(by[2 * t + (e & 1)], value, total[s][t][e]);
            }
        }
    }
}

// What a block has in shared memory: rings, x, the sums of the tiles of a batch and of each warp's first part, and for a norm the
// squares of rows, of all chunks and of each.
struct Shared {
    u8* rings;
    Fragments x;
    float *sums, *squares;
    __device__ Shared(u8* at)
        : rings(at), x(at + WARPS * RING), sums((float*)(at + WARPS * RING + OWN_CHUNKS * Fragments::CHUNK_BYTES)),
          squares(sums + (BATCH + WARPS) * SUMS) {}
};

__device__ inline void meet_cluster() {
#if CLUSTER > 1
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
}

// The sum of what blocks of the cluster have at the same place, in their order.
__device__ inline float sum_of_cluster(const float* at) {
#if CLUSTER > 1
    float sums[CLUSTER], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i)
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(sums[i]) : "r"(of_rank(shared_address(at), i)) : "memory");
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) sum += sums[i];
    return sum;
#else
    return *at;
#endif
}

// The tiles begin .. end - 1 of the cluster. `ready` is called when weights are on their way, `prepare` where x is wanted, and
// `store` with the sums of both slices of a batch's tiles.
template <class F, class Ready, class Prepare, class Store> __device__ inline void over_tiles(
    const Tiles& tiles, int rank, int begin, int end, const Shared& shared, Ready ready, Prepare prepare, Store store
) {
    typedef Ring<F> R;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
    u8* buffer = shared.rings + warp * RING;
    R ring(tiles, rank, begin, end, buffer);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) ring.fetch();
    ready();
    int stage = 0;
    for (int batch = begin; batch < end; batch += BATCH) {
        prepare();
        const Depth depth(rank);
        const int all = min(BATCH, end - batch) * depth.count, first = part_of(all, warp), last = part_of(all, warp + 1);
        int tile = batch + first / depth.count, chunk = first % depth.count;
        // What another warp has begun has a place of its own.
        bool apart = chunk > 0;
        float total[SLICES][TILES][4] = {};
        for (int i = first; i < last; ++i) {
            copies_wait<STAGES - 2>();
            __syncwarp();
            ring.fetch();
            multiply<F>(
                buffer + stage * R::BYTES, shared.x.of + chunk * GROUPS * TILES * 32, shared.x.sums + chunk * TILES * 32,
                shared.x.factors + chunk * ROWS, total
            );
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            if (++chunk < depth.count && i + 1 < last) continue;
            float* to = shared.sums + (apart ? BATCH + warp : tile - batch) * SUMS;
#pragma unroll
            for (int s = 0; s < SLICES; ++s)
#pragma unroll
                for (int y = 0; y < TILES; ++y)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& at = to[(s * ROWS + y * 8 + quarter * 2 + (e & 1)) * LINE + row + 8 * (e >> 1)];
                        at = total[s][y][e];
                        total[s][y][e] = 0.0f;
                    }
            apart = false;
            chunk = 0;
            ++tile;
        }
        __syncthreads();
#pragma unroll 1
        for (int w = 1; w < WARPS; ++w) {
            const int of_w = part_of(all, w);
            if (of_w % depth.count == 0 || of_w >= part_of(all, w + 1)) continue;
            float *to = shared.sums + of_w / depth.count * SUMS, *from = shared.sums + (BATCH + w) * SUMS;
            for (int e = threadIdx.x; e < SUMS; e += WARPS * 32) to[e] += from[e];
        }
        meet_cluster();
        store(batch, min(BATCH, end - batch));
        // The next batch's sums take the place of these.
        meet_cluster();
    }
}

extern "C" __global__
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(WARPS * 32, 1) void linear_blocks_rows(
    const D::Raw* x, const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain, float eps, Pointers p, Numbers<2 + COUNT + CACHED> n
#if CACHED
    , const int* __restrict__ positions, const int* __restrict__ slots
#endif
) {
    extern __shared__ uint4 memory[];
    const Shared shared((u8*)memory);
    const int formats[] = {FORMATS};
    const int rank = (int)(blockIdx.x % CLUSTER), cluster = (int)(blockIdx.x / CLUSTER), clusters = (int)(gridDim.x / CLUSTER);
    const int rows = (int)n.v[0];
    const Tiles tiles = {p, n.v + 2};
    auto ready = [] {
        others_may_begin();
        after_others();
    };
    bool prepared = false;
    auto prepare = [&] {
        if (prepared) return;
        prepared = true;
        __syncthreads();
        Fragments fragments = shared.x;
        const Depth depth(rank);
        fragments.stage(x, gain, rows, depth, shared.squares + ROWS);
        __syncthreads();
#if NORM
        // Others read this behind the barrier before results.
        if (threadIdx.x < ROWS) {
            float sum = 0.0f;
            for (int i = 0; i < depth.count; ++i) sum += shared.squares[(1 + i) * ROWS + threadIdx.x];
            shared.squares[threadIdx.x] = sum;
        }
#endif
    };
    auto store = [&](int batch, int count) {
        const int of_tile = COLUMNS * ROWS;
        for (int i = rank * WARPS * 32 + threadIdx.x; i < count * of_tile; i += CLUSTER * WARPS * 32) {
            const int of = i / of_tile, c = i % 16, line = i % of_tile / 16, y = line % ROWS, slice = line / ROWS;
            const Tile tile = tiles.at(batch + of);
            const i64 column = tile.column[0] + (slice ? tile.column[1] - tile.column[0] : 0) + c;
            if (y >= rows || column >= tile.columns) continue;
            const float* at = shared.sums + of * SUMS + y * LINE + c;
            float unit = 1.0f;
#if NORM
            unit = op_rsqrt(sum_of_cluster(shared.squares + y) / (float)DEPTH + eps);
#endif
            D::Raw* out = p.out[0];
            const void* bias = p.bias[0];
#pragma unroll
            for (int j = 1; j < COUNT && !SWIGLU; ++j)
                if (tile.weight == j) out = p.out[j], bias = p.bias[j];
            const i64 place = (i64)y * tile.columns + column;
            float value = unit * sum_of_cluster(at + slice * ROWS * LINE);
            if (BIAS) value = value + ::at<BIAS_TYPE>(bias, column);
            if (SWIGLU) value = gated<D>(value, unit * sum_of_cluster(at + ROWS * LINE));
            if (ADD) value = D::load(r[place]) + D::wrap(value);
#if CACHED
            if (tile.weight >= KEYS) {
                value = D::wrap(value);
                const int head = (int)column / DIM, of_head = (int)column % DIM, heads = (int)tile.columns / DIM;
#if PAIRS
                if (tile.weight == KEYS && of_head < 2 * PAIRS) {
                    float cosine, sine, other = unit * sum_of_cluster(at + (1 - slice) * ROWS * LINE);
                    if (BIAS) other = other + ::at<BIAS_TYPE>(bias, column + (slice ? -PAIRS : PAIRS));
                    other = D::wrap(other);
                    angle_of(positions[y], of_head % PAIRS, cosine, sine);
                    value = slice ? value * cosine + other * sine : value * cosine - other * sine;
                }
#endif
                // Of equal slots the last row's stays.
                const int slot = slots[y];
                bool last = slot >= 0 && slot < n.v[2 + COUNT];
                for (int later = y + 1; later < rows; ++later) last = last && slots[later] != slot;
                if (!last) continue;
                const i64 line = (((i64)(slot / PAGE) * 2 + tile.weight - KEYS) * heads + head) * PAGE + slot % PAGE;
                ((CACHE::Raw*)out)[line * DIM + of_head] = CACHE::store(D::wrap(value));
                continue;
            }
#endif
            out[place] = D::store(value);
        }
    };
    int all = 0;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : COUNT); ++i) all += Tiles::of(n.v[2 + i]);
    const int begin = (int)((i64)all * cluster / clusters), end = (int)((i64)all * (cluster + 1) / clusters);
    // Weights of one format that follow each other are one run of tiles.
    int from = 0;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : COUNT); ++i) {
        if (i > 0 && formats[i] == formats[i - 1]) continue;
        int to = from;
#pragma unroll
        for (int j = i; j < (SWIGLU ? 1 : COUNT); ++j) {
            if (formats[j] != formats[i]) break;
            to += Tiles::of(n.v[2 + j]);
        }
        const int first = max(begin, from), last = min(end, to);
        switch (formats[i]) {
#define RUN(f, F) \
    case f: \
        if (i == 0) over_tiles<F>(tiles, rank, first, last, shared, ready, prepare, store); \
        else over_tiles<F>(tiles, rank, first, last, shared, [] {}, prepare, store); \
        break;
            EACH_FORMAT(RUN)
        }
        from = to;
    }
}
