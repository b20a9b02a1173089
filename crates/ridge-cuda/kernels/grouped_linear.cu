// Products of groups of rows, each with a weight of its own; where groups begin is read on the device, and no weight of a
// group without rows is. Rows behind the last group become zeros.
// Defines: X, W and Y of x, weights and results; GATHERED, 0 or 1: are the rows of x those that `index` names?

#if TILED
// Many rows, in 16-bit floats on tensor cores. Floor: the operations over the rate of mma.sync.
// A block makes ROWS rows of one group by COLUMNS columns. Which group and which of its rows, it finds out from the
// offsets: the launch has as many blocks as there can be tiles. X is W is Y.
// Numbers: rows, rows of x, groups, columns, depth (a multiple of 8).

#define ROWS 64
#define COLUMNS 64
#define DEPTH 32
#define HALF ((ROWS + COLUMNS) * DEPTH * 2)

// Where 16-byte chunk `c` of row `r` lies: eight rows' chunks in different banks.
__device__ inline u32 chunk(int r, int c) { return (u32)(r * (DEPTH / 8) + (c ^ (r >> 1 & 3))) * 16; }

extern "C" __global__ __launch_bounds__(128) void grouped_tiles(
    const X::Raw* __restrict__ x, const X::Raw* __restrict__ w, const int* __restrict__ offsets,
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
    // What this thread brings: a chunk of two rows of x and of two of the weight.
    const int part = threadIdx.x & 3;
    const X::Raw *of_x[2], *of_w[2];
    bool real[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = i * 32 + (threadIdx.x >> 2);
        int row = first + r < end ? (GATHERED ? index[first + r] : first + r) : -1;
        real[i][0] = row >= 0 && row < n.v[1];
        real[i][1] = column + r < columns;
        of_x[i] = x + (real[i][0] ? row : 0) * depth;
        of_w[i] = w + (group * columns + (real[i][1] ? column + r : 0)) * depth;
    }
    auto fetch = [&](i64 k, int half) {
        const i64 at = k + part * 8;
        const bool in = at < depth;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 to = base + half * HALF + chunk(i * 32 + (threadIdx.x >> 2), part);
            copy_async(to, of_x[i] + (in ? at : 0), in && real[i][0]);
            copy_async(to + ROWS * DEPTH * 2, of_w[i] + (in ? at : 0), in && real[i][1]);
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
// Further defines: MXFP4, 0 or 1, for blocks of that format (VECTOR elements of x are then 16 bytes); VECTOR; WIDE, 0 or 1: can as many elements of x be read at once?; SCALED, 0 or 1.
// Numbers: rows, rows of x, groups, columns, depth; then of scales: those of a group, columns that share some, those of
// such columns, and elements of a column that share one.

#define ROWS 8
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

#if MXFP4
// Weights of blocks of 32 elements, an exponent and 16 bytes of codes of E2M1, at any address. Each lane takes a block at a time. A block's
// values are exact in f32.
// Numbers: rows, rows of x, groups, columns, depth (a multiple of 32).
#define BLOCK_BYTES 17

// Twice the value of each of the eight codes of 4 bits of a word, multiplied by `scale`, to every second element: a byte has an element of the
// lower half of the block and one of the upper.
__device__ inline void decode(u32 codes, float scale, float* lower, float* upper) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 code = codes >> (4 * i) & 15u, magnitude = 0xc8643210u >> (4 * (code & 7u)) & 15u;
        const float value = (__uint_as_float(0x4b000000u | magnitude) - 8388608.0f) * scale;
        (i & 1 ? upper : lower)[i >> 1] = code & 8u ? -value : value;
    }
}

extern "C" __global__ __launch_bounds__(256, 2) void grouped_mxfp4(
    const X::Raw* __restrict__ x, const u8* __restrict__ w, const int* __restrict__ offsets, const int* __restrict__ index,
    Y::Raw* __restrict__ y, Numbers<5> n
) {
    const int lane = threadIdx.x & 31, groups = (int)n.v[2];
    const i64 columns = n.v[3], depth = n.v[4], column = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    others_may_begin();
    after_others();
    int group;
    if (column >= columns || !find_group(offsets, groups, n.v[0], columns, column, y, group)) return;
    const int begin = offsets[group], end = offsets[group + 1];
    const u8* weights = w + (group * columns + column) * (depth / 32 * BLOCK_BYTES);
    for (int first = begin; first < end; first += ROWS) {
        int rows[ROWS];
        find_rows(index, first, end, n.v[1], rows);
        float sums[ROWS] = {};
#pragma unroll 1
        for (i64 block = lane; block < depth / 32; block += 32) {
            const u8* at = weights + block * BLOCK_BYTES;
            const u32 skew = (u32)((u64)at & 3u) * 8;
            const u32* words = (const u32*)(at - skew / 8);
            u32 word[5];
#pragma unroll
            for (int i = 0; i < 5; ++i) word[i] = __ldg(words + i);
            const u32 exponent = word[0] >> skew & 255u;
            const float scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
            float weight[32];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // The codes behind the exponent: shifted by 8 bits more, a whole word if that makes 32.
                const u32 codes = skew == 24 ? word[i + 1] : __funnelshift_r(word[i], word[i + 1], skew + 8);
                decode(codes, scale, weight + 4 * i, weight + 16 + 4 * i);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (rows[r] < 0) continue;
                const X::Raw* from = x + rows[r] * depth + block * 32;
#pragma unroll
                for (int v = 0; v < 32; v += VECTOR) {
                    Vector<X::Raw, true> values;
                    values.read(from + v);
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) sums[r] = fmaf(X::load(values.part[e]), weight[v + e], sums[r]);
                }
            }
        }
        store_sums(sums, first, end, columns, column, y);
    }
}
#else
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
