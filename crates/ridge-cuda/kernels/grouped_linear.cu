// Products of groups of rows, each with a weight of its own; where groups begin is read on the device, and no weight of a
// group without rows is. Rows behind the last group become zeros.
// Defines: X, W and Y of x, weights and results; GATHERED, 0 or 1: are the rows of x those that `index` names?; BLOCKED, 1 for weights in
// blocks, which are then bytes, with their FORMAT; GATED, 1 for two weights, `w` of gates and `other`, whose products are gated.

#define SIDES (GATED ? 2 : 1)

#if TILED
// Many rows, in 16-bit floats on tensor cores. Floor: the operations over the rate of mma.sync.
// A block makes ROWS rows of one group by COLUMNS columns. Which group and which of its rows, it finds out from the
// offsets: the launch has as many blocks as there can be tiles. X is Y, and W unless weights are in blocks, which are decoded to X.
// Numbers: rows, rows of x, groups, columns, depth (a multiple of 8).

#define ROWS 64
#define COLUMNS 64
#define DEPTH 32
#define HALF ((ROWS + SIDES * COLUMNS) * DEPTH * 2)
#if BLOCKED
typedef u8 Stored;
#else
typedef X::Raw Stored;
#endif

// Where 16-byte chunk `c` of row `r` lies: eight rows' chunks in different banks.
__device__ inline u32 chunk(int r, int c) { return (u32)(r * (DEPTH / 8) + (c ^ (r >> 1 & 3))) * 16; }

extern "C" __global__ __launch_bounds__(128) void grouped_tiles(
    const X::Raw* __restrict__ x, const Stored* __restrict__ w,
#if GATED
    const Stored* __restrict__ other,
#endif
    const int* __restrict__ offsets, const int* __restrict__ index, X::Raw* __restrict__ y, Numbers<5> n
) {
    __shared__ __align__(128) u8 room[2 * HALF];
    others_may_begin();
    after_others();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int groups = (int)n.v[2], column = blockIdx.x * COLUMNS;
    const i64 columns = n.v[3], depth = n.v[4];
    // The group that has tile `tile`: each warp goes through the groups, 32 at a time.
    int tile = blockIdx.y, group = -1;
    for (int base = 0; base < groups && group < 0; base += 32) {
        const int g = base + lane;
        const int own = g < groups ? (offsets[g + 1] - offsets[g] + ROWS - 1) / ROWS : 0;
        int upto = own;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int lower = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += lower;
        }
        const u32 behind = __ballot_sync(0xffffffffu, tile < upto);
        if (behind) {
            const int first = __ffs(behind) - 1;
            group = base + first;
            tile -= __shfl_sync(0xffffffffu, upto - own, first);
        } else {
            tile -= __shfl_sync(0xffffffffu, upto, 31);
        }
    }
    if (group < 0) {
        const i64 from = offsets[groups] + (i64)tile * ROWS, end = min(from + ROWS, n.v[0]);
        for (i64 i = from + (threadIdx.x >> 6); i < end; i += 2)
            if (column + (threadIdx.x & 63) < columns) y[i * columns + column + (threadIdx.x & 63)] = X::store(0.0f);
        return;
    }
    const int first = offsets[group] + tile * ROWS, end = min(first + ROWS, offsets[group + 1]);
    const u32 base = shared_address(room);
    // What this thread brings: a chunk of two rows of x and of two of the weight, or a quarter of a group of two columns.
    const int part = threadIdx.x & 3;
    const X::Raw* of_x[2];
    const Stored* of_w[2][SIDES];
    bool real[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = i * 32 + (threadIdx.x >> 2);
        int row = first + r < end ? (GATHERED ? index[first + r] : first + r) : -1;
        real[i][0] = row >= 0 && row < n.v[1];
        real[i][1] = column + r < columns;
        of_x[i] = x + (real[i][0] ? row : 0) * depth;
        const i64 of_column = group * columns + (real[i][1] ? column + r : 0);
#if BLOCKED
        const i64 before = of_column * (depth * FORMAT::BYTES / 256);
#else
        const i64 before = of_column * depth;
#endif
        of_w[i][0] = w + before;
#if GATED
        of_w[i][1] = other + before;
#endif
    }
    auto fetch = [&](i64 k, int half) {
        const i64 at = k + part * 8;
        const bool in = at < depth;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 to = base + half * HALF + chunk(i * 32 + (threadIdx.x >> 2), part);
            copy_async(to, of_x[i] + (in ? at : 0), in && real[i][0]);
#pragma unroll
            for (int side = 0; side < SIDES; ++side) {
                const u32 place = (ROWS + side * COLUMNS) * DEPTH * 2;
#if BLOCKED
                uint2 values[2];
                decoded<FORMAT, X>(of_w[i][side] + k / 256 * FORMAT::BYTES, (int)(k / 32 & 7), part, values);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const u32 within = chunk(i * 32 + (threadIdx.x >> 2), 2 * h + part / 2) + part % 2 * 8;
                    *(uint2*)(room + half * HALF + place + within) = values[h];
                }
#else
                copy_async(to + place, of_w[i][side] + (in ? at : 0), in && real[i][1]);
#endif
            }
        }
        copies_end();
    };
    // A warp makes 32 rows by 32 columns.
    const int upper = (warp >> 1) * 32, left = (warp & 1) * 32;
    float sums[SIDES][2][4][4] = {};
    fetch(0, 0);
    int half = 0;
    for (i64 k = 0; k < depth; k += DEPTH, half ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (k + DEPTH < depth) fetch(k + DEPTH, half ^ 1);
        const u32 a_base = base + half * HALF, b_base = a_base + ROWS * DEPTH * 2;
#pragma unroll
        for (int s = 0; s < DEPTH / 16; ++s) {
            u32 a[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) load_matrices(a[i], a_base + chunk(upper + i * 16 + (lane & 15), s * 2 + (lane >> 4)));
#pragma unroll
            for (int side = 0; side < SIDES; ++side) {
                u32 b[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 place = chunk(left + i * 16 + (lane & 7) + (lane >> 4) * 8, s * 2 + (lane >> 3 & 1));
                    load_matrices(b[i], b_base + side * COLUMNS * DEPTH * 2 + place);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const u32* of = b[c >> 1] + (c & 1) * 2;
                        Mma<X>::of(sums[side][i][c], a[i][0], a[i][1], a[i][2], a[i][3], of[0], of[1]);
                    }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const i64 row = first + upper + i * 16 + (lane >> 2) + 8 * (e >> 1);
                const i64 at = column + left + c * 8 + (lane & 3) * 2 + (e & 1);
                if (row >= end || at >= columns) continue;
#if GATED
                y[row * columns + at] = X::store(gated<X>(sums[0][i][c][e], sums[1][i][c][e]));
#else
                y[row * columns + at] = X::store(sums[0][i][c][e]);
#endif
            }
}
#else
// Few rows in a group, of any dtype, by weights that are plain or codes with scales. Floor: the bytes of the weights that
// groups reach over bandwidth.
// A warp makes a column of a group for ROWS rows at a time: each lane takes VECTOR elements of the weight, and lanes are
// added in an order that depth alone fixes, so that a row's result does not depend on the others.
// Further defines, without blocks: VECTOR; WIDE, 0 or 1: can as many elements of x be read at once?; SCALED, 0 or 1.
// Numbers: rows, rows of x, groups, columns, depth; then of scales: those of a group, columns that share some, those of
// such columns, and elements of a column that share one.

#define ROWS 8
// As `find_group`, by warps that have a column each; false where there is nothing left to do.
__device__ inline bool find_group_of_column(
    const int* offsets, int groups, i64 rows, i64 columns, i64 column, Y::Raw* y, int& group
) {
    const GroupKind kind = find_group(offsets, groups, group);
    if (kind == ROWS_BEHIND)
        for (i64 i = offsets[groups] + (threadIdx.x & 31); i < rows; i += 32) y[i * columns + column] = Y::store(0.0f);
    return kind == A_GROUP;
}

// Where ROWS rows of x are, from row `first` of a group on; -1 for those that are not there.
__device__ inline void find_rows(const int* index, int first, int end, i64 of_x, int* rows) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        rows[r] = first + r < end ? (GATHERED ? index[first + r] : first + r) : -1;
        if (rows[r] >= of_x) rows[r] = -1;
    }
}

// Adds up the lanes' sums of ROWS rows and stores them, gated if they are of two weights.
__device__ inline void store_sums(float (*sums)[ROWS], int first, int end, i64 columns, i64 column, Y::Raw* y) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (first + r >= end) break;
#pragma unroll
        for (int side = 0; side < SIDES; ++side)
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) sums[side][r] += __shfl_xor_sync(0xffffffffu, sums[side][r], step);
        if ((threadIdx.x & 31) == 0)
            y[(first + r) * columns + column] = Y::store(GATED ? gated<Y>(sums[0][r], sums[SIDES - 1][r]) : sums[0][r]);
    }
}

#if BLOCKED
// Weights in blocks, decoded exactly. A lane takes a quarter of a group of 32 elements, a warp 256 at a time.
// Numbers: rows, rows of x, groups, columns, depth (a multiple of the block).

// Four elements of x.
template <class D> __device__ inline void four(const typename D::Raw* from, float* to) {
    union { uint2 whole[sizeof(typename D::Raw) / 2]; typename D::Raw part[4]; } values;
#pragma unroll
    for (int i = 0; i < (int)sizeof(typename D::Raw) / 2; ++i) values.whole[i] = __ldg((const uint2*)from + i);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = (float)D::load(values.part[e]);
}

// A quarter of a group, exactly.
__device__ inline void values_of(const u8* chunk, int group, int quarter, float* values) {
    u32 codes[4];
    FORMAT::codes<F16>(chunk, group, quarter, codes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float scale, minimum;
        FORMAT::scale(chunk, FORMAT::GROUP == 16 ? group * 2 + half : group, scale, minimum);
        // Pairs are (0, 2) and (1, 3).
        const float2 even = pair_of<FORMAT, F16>(codes[2 * half], scale, minimum);
        const float2 odd = pair_of<FORMAT, F16>(codes[2 * half + 1], scale, minimum);
        values[4 * half] = even.x;
        values[4 * half + 1] = odd.x;
        values[4 * half + 2] = even.y;
        values[4 * half + 3] = odd.y;
    }
}

extern "C" __global__ __launch_bounds__(256, 2) void grouped_blocks(
    const X::Raw* __restrict__ x, const u8* __restrict__ w,
#if GATED
    const u8* __restrict__ other,
#endif
    const int* __restrict__ offsets, const int* __restrict__ index, Y::Raw* __restrict__ y, Numbers<5> n
) {
    const int lane = threadIdx.x & 31, quarter = lane & 3, groups = (int)n.v[2];
    const i64 columns = n.v[3], depth = n.v[4], column = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    others_may_begin();
    after_others();
    int group;
    if (column >= columns || !find_group_of_column(offsets, groups, n.v[0], columns, column, y, group)) return;
    const int begin = offsets[group], end = offsets[group + 1];
    const i64 before = (group * columns + column) * (depth * FORMAT::BYTES / 256);
    for (int first = begin; first < end; first += ROWS) {
        int rows[ROWS];
        find_rows(index, first, end, n.v[1], rows);
        float sums[SIDES][ROWS] = {};
#pragma unroll 2
        for (i64 k = lane / 4 * 32; k < depth; k += 256) {
            const i64 at = before + k / 256 * FORMAT::BYTES;
            float weight[SIDES][8];
            values_of(w + at, lane >> 2, quarter, weight[0]);
#if GATED
            values_of(other + at, lane >> 2, quarter, weight[1]);
#endif
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (rows[r] < 0) continue;
                const X::Raw* from = x + rows[r] * depth + k + quarter * 4;
                float values[8];
                four<X>(from, values);
                four<X>(from + 16, values + 4);
#pragma unroll
                for (int side = 0; side < SIDES; ++side)
#pragma unroll
                    for (int e = 0; e < 8; ++e) sums[side][r] = fmaf(values[e], weight[side][e], sums[side][r]);
            }
        }
        store_sums(sums, first, end, columns, column, y);
    }
}
#else
// Vectors that are on their way at a time.
#define AHEAD (VECTOR >= 16 ? 2 / SIDES : 4 / SIDES)

// VECTOR elements, read 16 bytes at a time where they lie so.
template <class Raw, bool ONCE> union Vector;
template <class Raw> union Vector<Raw, true> {
    uint4 whole[VECTOR * sizeof(Raw) / 16 + !(VECTOR * sizeof(Raw) / 16)];
    Raw part[VECTOR];
    __device__ void read(const Raw* from) {
#pragma unroll
        for (int i = 0; i < (int)(VECTOR * sizeof(Raw) / 16); ++i) whole[i] = __ldg((const uint4*)from + i);
    }
};
template <class Raw> union Vector<Raw, false> {
    Raw part[VECTOR];
    __device__ void read(const Raw* from) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) part[v] = from[v];
    }
};

extern "C" __global__ __launch_bounds__(256, 2) void grouped_rows(
    const X::Raw* __restrict__ x, const W::Raw* __restrict__ w,
#if GATED
    const W::Raw* __restrict__ other,
#else
    const float* __restrict__ scales,
#endif
    const int* __restrict__ offsets, const int* __restrict__ index, Y::Raw* __restrict__ y, Numbers<9> n
) {
    const int lane = threadIdx.x & 31, groups = (int)n.v[2];
    const i64 columns = n.v[3], depth = n.v[4], column = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    others_may_begin();
    after_others();
    int group;
    if (column >= columns || !find_group_of_column(offsets, groups, n.v[0], columns, column, y, group)) return;
    const int begin = offsets[group], end = offsets[group + 1];
    const W::Raw* weights[SIDES] = {w + (group * columns + column) * depth};
#if GATED
    weights[1] = other + (group * columns + column) * depth;
#elif SCALED
    const float* of_column = scales + group * n.v[5] + column / n.v[6] * n.v[7];
#endif
    for (int first = begin; first < end; first += ROWS) {
        int rows[ROWS];
        find_rows(index, first, end, n.v[1], rows);
        float sums[SIDES][ROWS] = {};
#pragma unroll 1
        for (i64 step = lane * VECTOR; step < depth; step += AHEAD * 32 * VECTOR) {
            // Where a lane's part is behind the last element, it reads the first again and adds nothing.
            i64 at[AHEAD];
            Vector<W::Raw, (VECTOR > 1)> raw[AHEAD][SIDES];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const i64 k = step + u * 32 * VECTOR;
                at[u] = k < depth ? k : 0;
#pragma unroll
                for (int side = 0; side < SIDES; ++side) raw[u][side].read(weights[side] + at[u]);
            }
            float weight[AHEAD][SIDES][VECTOR];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
#pragma unroll
                for (int side = 0; side < SIDES; ++side)
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v) {
                        weight[u][side][v] = (float)W::load(raw[u][side].part[v]);
#if SCALED
                        weight[u][side][v] *= of_column[(at[u] + v) / n.v[8]];
#endif
                    }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int row = rows[r];
                if (row < 0) continue;
                Vector<X::Raw, WIDE> values[AHEAD];
#pragma unroll
                for (int u = 0; u < AHEAD; ++u) values[u].read(x + row * depth + at[u]);
#pragma unroll
                for (int u = 0; u < AHEAD; ++u) {
                    if (step + u * 32 * VECTOR >= depth) break;
#pragma unroll
                    for (int side = 0; side < SIDES; ++side)
#pragma unroll
                        for (int v = 0; v < VECTOR; ++v)
                            sums[side][r] = fmaf(X::load(values[u].part[v]), weight[u][side][v], sums[side][r]);
                }
            }
        }
        store_sums(sums, first, end, columns, column, y);
    }
}
#endif
#endif
