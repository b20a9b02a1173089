// Products of groups of rows, each with a weight of its own; where groups begin is read on the device, and no weight of a
// group without rows is. Rows behind the last group become zeros.
// Defines: X, W and Y of x, weights and results; GATHERED, 0 or 1: are the rows of x those that `index` names?; BLOCKED, 1 for weights in
// blocks, which are then bytes, with their FORMAT.

#if TILED
// Many rows, in 16-bit floats on tensor cores. Floor: the operations over the rate of mma.sync.
// A block makes ROWS rows of one group by COLUMNS columns. Which group and which of its rows, it finds out from the
// offsets: the launch has as many blocks as there can be tiles. X is Y, and W unless weights are in blocks, which are decoded to X.
// Numbers: rows, rows of x, groups, columns, depth (a multiple of 8).

#define ROWS 64
#define COLUMNS 64
#define DEPTH 32
#define HALF ((ROWS + COLUMNS) * DEPTH * 2)
#if BLOCKED
typedef u8 Stored;
#else
typedef X::Raw Stored;
#endif

// Where 16-byte chunk `c` of row `r` lies: eight rows' chunks in different banks.
__device__ inline u32 chunk(int r, int c) { return (u32)(r * (DEPTH / 8) + (c ^ (r >> 1 & 3))) * 16; }

extern "C" __global__ __launch_bounds__(128) void grouped_tiles(
    const X::Raw* __restrict__ x, const Stored* __restrict__ w, const int* __restrict__ offsets,
    const int* __restrict__ index, X::Raw* __restrict__ y, Numbers<5> n
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
    const Stored* of_w[2];
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
        of_w[i] = w + of_column * (depth * FORMAT::BYTES / 256);
#else
        of_w[i] = w + of_column * depth;
#endif
    }
    auto fetch = [&](i64 k, int half) {
        const i64 at = k + part * 8;
        const bool in = at < depth;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 to = base + half * HALF + chunk(i * 32 + (threadIdx.x >> 2), part);
            copy_async(to, of_x[i] + (in ? at : 0), in && real[i][0]);
#if BLOCKED
            uint2 values[2];
            decoded<FORMAT, X>(of_w[i] + k / 256 * FORMAT::BYTES, (int)(k / 32 & 7), part, values);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 place = chunk(i * 32 + (threadIdx.x >> 2), 2 * h + part / 2) + part % 2 * 8;
                *(uint2*)(room + half * HALF + ROWS * DEPTH * 2 + place) = values[h];
            }
#else
            copy_async(to + ROWS * DEPTH * 2, of_w[i] + (in ? at : 0), in && real[i][1]);
#endif
        }
        copies_end();
    };
    // A warp makes 32 rows by 32 columns.
    const int upper = (warp >> 1) * 32, left = (warp & 1) * 32;
    float sums[2][4][4] = {};
    fetch(0, 0);
    int half = 0;
    for (i64 k = 0; k < depth; k += DEPTH, half ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (k + DEPTH < depth) fetch(k + DEPTH, half ^ 1);
        const u32 a_base = base + half * HALF, b_base = a_base + ROWS * DEPTH * 2;
#pragma unroll
        for (int s = 0; s < DEPTH / 16; ++s) {
            u32 a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                load_matrices(a[i], a_base + chunk(upper + i * 16 + (lane & 15), s * 2 + (lane >> 4)));
                load_matrices(b[i], b_base + chunk(left + i * 16 + (lane & 7) + (lane >> 4) * 8, s * 2 + (lane >> 3 & 1)));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    Mma<X>::of(sums[i][c], a[i][0], a[i][1], a[i][2], a[i][3], b[c >> 1][(c & 1) * 2], b[c >> 1][(c & 1) * 2 + 1]);
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
                if (row < end && at < columns) y[row * columns + at] = X::store(sums[i][c][e]);
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
// The group of this block; false where it has none. Where there are fewer rows than groups, a block has the group whose first row is the one of its
// number. The last block clears the rows behind the last group.
__device__ inline bool find_group(
    const int* offsets, int groups, i64 rows, i64 columns, i64 column, Y::Raw* y, int& group
) {
    const int lane = threadIdx.x & 31, last = gridDim.y - 1, number = blockIdx.y;
    group = number;
    if (number == last) {
        for (i64 i = offsets[groups] + lane; i < rows; i += 32) y[i * columns + column] = Y::store(0.0f);
        return false;
    }
    if (last >= groups) return true;
    int below = 0;
    for (int g = lane; g < groups; g += 32) below += offsets[g + 1] <= number;
    group = __reduce_add_sync(0xffffffffu, below);
    return group < groups && offsets[group] == number;
}

// Where ROWS rows of x are, from row `first` of a group on; -1 for those that are not there.
__device__ inline void find_rows(const int* index, int first, int end, i64 of_x, int* rows) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        rows[r] = first + r < end ? (GATHERED ? index[first + r] : first + r) : -1;
        if (rows[r] >= of_x) rows[r] = -1;
    }
}

// Adds up the lanes' sums of ROWS rows and stores them.
__device__ inline void store_sums(const float* sums, int first, int end, i64 columns, i64 column, Y::Raw* y) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (first + r >= end) break;
        float sum = sums[r];
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if ((threadIdx.x & 31) == 0) y[(first + r) * columns + column] = Y::store(sum);
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

extern "C" __global__ __launch_bounds__(256, 2) void grouped_blocks(
    const X::Raw* __restrict__ x, const u8* __restrict__ w, const int* __restrict__ offsets, const int* __restrict__ index,
    Y::Raw* __restrict__ y, Numbers<5> n
) {
    const int lane = threadIdx.x & 31, quarter = lane & 3, groups = (int)n.v[2];
    const i64 columns = n.v[3], depth = n.v[4], column = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    others_may_begin();
    after_others();
    int group;
    if (column >= columns || !find_group(offsets, groups, n.v[0], columns, column, y, group)) return;
    const int begin = offsets[group], end = offsets[group + 1];
    const u8* weights = w + (group * columns + column) * (depth * FORMAT::BYTES / 256);
    for (int first = begin; first < end; first += ROWS) {
        int rows[ROWS];
        find_rows(index, first, end, n.v[1], rows);
        float sums[ROWS] = {};
#pragma unroll 2
        for (i64 k = lane / 4 * 32; k < depth; k += 256) {
            const u8* chunk = weights + k / 256 * FORMAT::BYTES;
            u32 codes[4];
            FORMAT::codes<F16>(chunk, lane >> 2, quarter, codes);
            float weight[8];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float scale, minimum;
                FORMAT::scale(chunk, FORMAT::GROUP == 16 ? (lane >> 2) * 2 + half : lane >> 2, scale, minimum);
                // Pairs are (0, 2) and (1, 3).
                const float2 even = pair_of<FORMAT, F16>(codes[2 * half], scale, minimum);
                const float2 odd = pair_of<FORMAT, F16>(codes[2 * half + 1], scale, minimum);
                weight[4 * half] = even.x;
                weight[4 * half + 1] = odd.x;
                weight[4 * half + 2] = even.y;
                weight[4 * half + 3] = odd.y;
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (rows[r] < 0) continue;
                const X::Raw* from = x + rows[r] * depth + k + quarter * 4;
                float values[8];
                four<X>(from, values);
                four<X>(from + 16, values + 4);
#pragma unroll
                for (int e = 0; e < 8; ++e) sums[r] = fmaf(values[e], weight[e], sums[r]);
            }
        }
        store_sums(sums, first, end, columns, column, y);
    }
}
#else
// Vectors that are on their way at a time.
#define AHEAD (VECTOR >= 16 ? 2 : 4)

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
    const X::Raw* __restrict__ x, const W::Raw* __restrict__ w, const float* __restrict__ scales,
    const int* __restrict__ offsets, const int* __restrict__ index, Y::Raw* __restrict__ y, Numbers<9> n
) {
    const int lane = threadIdx.x & 31, groups = (int)n.v[2];
    const i64 columns = n.v[3], depth = n.v[4], column = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    others_may_begin();
    after_others();
    int group;
    if (column >= columns || !find_group(offsets, groups, n.v[0], columns, column, y, group)) return;
    const int begin = offsets[group], end = offsets[group + 1];
    const W::Raw* weights = w + (group * columns + column) * depth;
    const float* of_column = SCALED ? scales + group * n.v[5] + column / n.v[6] * n.v[7] : scales;
    for (int first = begin; first < end; first += ROWS) {
        int rows[ROWS];
        find_rows(index, first, end, n.v[1], rows);
        float sums[ROWS] = {};
#pragma unroll 1
        for (i64 step = lane * VECTOR; step < depth; step += AHEAD * 32 * VECTOR) {
            // Where a lane's part is behind the last element, it reads the first again and adds nothing.
            i64 at[AHEAD];
            Vector<W::Raw, (VECTOR > 1)> raw[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const i64 k = step + u * 32 * VECTOR;
                at[u] = k < depth ? k : 0;
                raw[u].read(weights + at[u]);
            }
            float weight[AHEAD][VECTOR];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    weight[u][v] = (float)W::load(raw[u].part[v]);
                    if (SCALED) weight[u][v] *= of_column[(at[u] + v) / n.v[8]];
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
                    for (int v = 0; v < VECTOR; ++v) sums[r] = fmaf(X::load(values[u].part[v]), weight[u][v], sums[r]);
                }
            }
        }
        store_sums(sums, first, end, columns, column, y);
    }
}
#endif
#endif
