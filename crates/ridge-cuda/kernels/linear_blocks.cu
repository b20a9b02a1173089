// Linears of one input for few rows by weights in block formats, read once in their own bits: y = x w^T on tensor cores.
// Floor: the weights' bytes over bandwidth.
// A block makes 16 columns; its warps take turns along the depth, 256 elements of each column at a time, through a ring of
// their own in shared memory. Codes are multiplied as exact integers, and the sums of a group of codes are scaled in f32:
// scale * sum(code * x) - minimum * sum(x), where the sum of x comes from a product with ones.
// The order of sums is fixed by depth alone: a row's result does not depend on the others.
// Defines: D of x and results; ROWS, 8, 16 or 32; WARPS; STAGES of a ring; COUNT weights; EACH_FORMAT(F), `F(i, format)` of each
// format, and FORMATS, which of them each weight has; ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU (of two weights of one format),
// 0 or 1.
// Numbers: rows, depth (a multiple of 256), then the columns of each weight.
// With GROUPED 1 (`grouped_blocks_rows`), groups of rows have weights of their own, and rows of x are those that an index names if GATHERED
// is 1. Its depth is a multiple of 32, and there is neither ADD nor BIAS.

#define CHUNK 256
#define TILES (ROWS / 8)
#define SIDES (SWIGLU ? 2 : 1)

struct Pointers { const u8* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };

// Scale and minimum of each group of a chunk of 16 columns, by group and column.
template <class F> struct Scales { float2 of[CHUNK / F::GROUP][16]; };

// `row_of` gives where rows of x are, once other launches have ended.
template <class F, class R> __device__ inline void sums_of_columns(
    R row_of, const u8* const* w, i64 column, i64 columns, i64 depth, u8* shared, float sums[SIDES][TILES][4]
) {
    typedef Column<F> C;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
    const int chunks = (int)((depth + CHUNK - 1) / CHUNK), stage_bytes = SIDES * 16 * C::STRIDE;
    const i64 row_bytes = depth * F::BYTES / CHUNK;
    u8* ring = shared + warp * (STAGES * stage_bytes + SIDES * (int)sizeof(Scales<F>));
    Scales<F>* scales = (Scales<F>*)(ring + STAGES * stage_bytes);
    auto chunk_of = [&](int s, int c, int chunk) {
        return w[s] + min(column + c, columns - 1) * row_bytes + (i64)chunk * F::BYTES;
    };
    auto fetch = [&](int chunk, int stage) {
        if (chunk < chunks) {
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                const u32 to = shared_address(ring) + stage * stage_bytes + s * 16 * C::STRIDE;
#pragma unroll
                for (int base = 0; base < 16 * C::PIECES; base += 32) {
                    const int i = base + lane, c = i / C::PIECES, piece = i % C::PIECES;
                    if (i >= 16 * C::PIECES) break;
                    const u8* from = chunk_of(s, c, chunk);
                    const u8* at = from - C::skew(from) + 16 * piece;
                    // Nothing behind the chunk, which may be the end of the weight, is read.
                    const int bytes = GROUPED ? min(F::BYTES, (int)(row_bytes - (i64)chunk * F::BYTES)) : F::BYTES;
                    const int left = (int)(from + bytes - at);
                    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                        :: "r"(to + c * C::STRIDE + 16 * piece), "l"(left > 0 ? at : from - C::skew(from)),
                           "r"(C::ALIGNED ? 16 : min(16, max(left, 0))) : "memory");
                }
            }
        }
        copies_end();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(warp + i * WARPS, i);
    others_may_begin();
    after_others();
    const D::Raw* from[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) from[t] = row_of(row + 8 * t) + 4 * quarter;

    int stage = 0;
    for (int chunk = warp; chunk < chunks; chunk += WARPS) {
        copies_wait<STAGES - 2>();
        __syncwarp();
        fetch(chunk + (STAGES - 1) * WARPS, stage == 0 ? STAGES - 1 : stage - 1);
        const u8 *upper[SIDES], *lower[SIDES];
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            const u8* at = ring + stage * stage_bytes + s * 16 * C::STRIDE;
            auto place = [&](int c) { return at + c * C::STRIDE + C::skew(chunk_of(s, c, chunk)); };
            upper[s] = place(row);
            lower[s] = place(row + 8);
            const u8* mine = place(lane & 15);
#pragma unroll
            for (int base = 0; base < CHUNK / F::GROUP; base += 2) {
                const int group = base + (lane >> 4);
                float scale, minimum;
                F::scale(mine, group, scale, minimum);
                if (F::SHIFTED) minimum = fmaf(scale, (float)(Half<D>::OFFSET + F::CENTRE), minimum);
                scales[s].of[group][lane & 15] = make_float2(scale, minimum);
            }
        }
        __syncwarp();
// Groups share words with others; more rows take registers that several groups at a time would need.
#pragma unroll(ROWS > 16 || (F::GROUP == 16 && ROWS == 8) ? 2 : ROWS > 8 ? 8 : 4)
        for (int group = 0; group < CHUNK / 32; ++group) {
            if (GROUPED && chunk * CHUNK + group * 32 >= depth) break;
            u32 b[TILES][4];
            // Of each group of codes: both sides need them.
            float ones[32 / F::GROUP][TILES][4];
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const D::Raw* at = from[t] + chunk * CHUNK + group * 32;
#pragma unroll
                for (int half = 0; half < 2; ++half) pair_up(__ldg((const uint2*)(at + 16 * half)), b[t] + 2 * half);
            }
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                u32 u[4], l[4];
                F::template codes<D>(upper[s], group, quarter, u);
                F::template codes<D>(lower[s], group, quarter, l);
#pragma unroll
                for (int part = 0; part < 32 / F::GROUP; ++part) {
                    const int g = group * (32 / F::GROUP) + part, i = 2 * part;
                    const float2 above = scales[s].of[g][row], below = scales[s].of[g][row + 8];
                    const u32 one = Half<D>::UNIT;
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        float sum[4] = {};
                        Mma<D>::of(sum, u[i], l[i], u[i + 1], l[i + 1], b[t][i], b[t][i + 1]);
                        if (F::GROUP == 32) Mma<D>::of(sum, u[2], l[2], u[3], l[3], b[t][2], b[t][3]);
                        float(&whole)[4] = ones[part][t];
                        if ((F::MINIMA || F::SHIFTED) && s == 0) {
                            whole[0] = whole[1] = whole[2] = whole[3] = 0.0f;
                            Mma<D>::of(whole, one, one, one, one, b[t][i], b[t][i + 1]);
                            if (F::GROUP == 32) Mma<D>::of(whole, one, one, one, one, b[t][2], b[t][3]);
                        }
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            float& total = sums[s][t][e];
                            total = fmaf(e < 2 ? above.x : below.x, sum[e], total);
                            if (F::MINIMA || F::SHIFTED) total = fmaf(e < 2 ? -above.y : -below.y, whole[e & 1], total);
                        }
                    }
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        // The next chunk's scales take the place of these.
        __syncwarp();
    }
}

// The warps' sums, where all can read them.
__device__ inline void give_sums(float sums[SIDES][TILES][4], float (*parts)[SIDES][16][ROWS + 1]) {
    const int warp = threadIdx.x >> 5, row = (threadIdx.x & 31) >> 2, quarter = threadIdx.x & 3;
#pragma unroll
    for (int s = 0; s < SIDES; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                parts[warp][s][row + 8 * (i >> 1)][t * 8 + quarter * 2 + (i & 1)] = sums[s][t][i];
    __syncthreads();
}

// The sum over warps of column `c` of row `y`.
__device__ inline float sum_of(float (*parts)[SIDES][16][ROWS + 1], int side, int c, int y) {
    float total = 0.0f;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) total += parts[part][side][c][y];
    return total;
}

#if GROUPED
// Numbers: rows, rows of x, groups, columns, depth. Of several weights, SWIGLU's, the first is the gate.
extern "C" __global__ __launch_bounds__(WARPS * 32, 16 / WARPS) void grouped_blocks_rows(
    const D::Raw* __restrict__ x, const u8* __restrict__ w,
#if SWIGLU
    const u8* __restrict__ other,
#endif
    const int* __restrict__ offsets, const int* __restrict__ index, D::Raw* __restrict__ y, Numbers<5> n
) {
    extern __shared__ uint4 shared[];
    __shared__ float parts[WARPS][SIDES][16][ROWS + 1];
    const int groups = (int)n.v[2];
    const i64 columns = n.v[3], depth = n.v[4], column = (i64)blockIdx.x * 16;
    others_may_begin();
    after_others();
    int group;
    const GroupKind kind = find_group(offsets, groups, group);
    if (kind == NO_GROUP) return;
    if (kind == ROWS_BEHIND) {
        for (i64 i = offsets[groups] + (threadIdx.x >> 4); i < n.v[0]; i += WARPS * 2)
            if (column + (threadIdx.x & 15) < columns) y[i * columns + column + (threadIdx.x & 15)] = D::store(0.0f);
        return;
    }
    const i64 before = group * columns * (depth * FORMATS::BYTES / CHUNK);
    const u8* weights[SIDES] = {w + before};
#if SWIGLU
    weights[1] = other + before;
#endif
    const int begin = offsets[group], end = offsets[group + 1];
    for (int first = begin; first < end; first += ROWS) {
        // Rows that are not there, or not in x, are any row, and zeros in the end.
        auto place_of = [&](int r) {
            const int at = first + r < end ? (GATHERED ? index[first + r] : first + r) : -1;
            return at < n.v[1] ? at : -1;
        };
        auto row_of = [&](int r) { return x + max(place_of(r), 0) * depth; };
        float sums[SIDES][TILES][4] = {};
        if (n.v[1] > 0) sums_of_columns<FORMATS>(row_of, weights, column, columns, depth, (u8*)shared, sums);
        give_sums(sums, parts);
        for (int i = threadIdx.x; i < 16 * min(ROWS, end - first); i += WARPS * 32) {
            const int c = i & 15, r = i >> 4;
            if (column + c >= columns) continue;
            float value = sum_of(parts, 0, c, r);
            if (SWIGLU) value = gated<D>(value, sum_of(parts, SIDES - 1, c, r));
            y[(i64)(first + r) * columns + column + c] = D::store(place_of(r) < 0 ? 0.0f : value);
        }
        __syncthreads();
    }
}
#else
extern "C" __global__ __launch_bounds__(WARPS * 32, ROWS == 8 ? 2 : 1) void linear_blocks(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const void* gain, float eps, Pointers p, Numbers<2 + COUNT> n
) {
    extern __shared__ uint4 shared[];
    __shared__ float parts[WARPS][SIDES][16][ROWS + 1];
    const int formats[] = {FORMATS};
    const int rows = (int)n.v[0];
    const i64 depth = n.v[1];
    auto row_of = [&](int r) { return x + (i64)min(r, rows - 1) * depth; };
    // Which weight, and which tile of its columns.
    i64 tile = blockIdx.x, columns = n.v[2];
    const u8* w[SIDES] = {p.weight[0]};
    D::Raw* out = p.out[0];
    const void* bias = p.bias[0];
    int format = formats[0];
    if (SWIGLU) w[SIDES - 1] = p.weight[COUNT - 1];
    i64 before = (columns + 15) / 16;
#pragma unroll
    for (int i = 1; i < COUNT && !SWIGLU; ++i) {
        if ((i64)blockIdx.x < before) continue;
        tile = blockIdx.x - before;
        columns = n.v[2 + i];
        w[0] = p.weight[i];
        out = p.out[i];
        bias = p.bias[i];
        format = formats[i];
        before += (columns + 15) / 16;
    }
    const i64 column = tile * 16;
    float sums[SIDES][TILES][4] = {};
    switch (format) {
#define SUMS(i, F) \
    case i: sums_of_columns<F>(row_of, w, column, columns, depth, (u8*)shared, sums); break;
        EACH_FORMAT(SUMS)
    }
    give_sums(sums, parts);
    for (int i = threadIdx.x; i < 16 * rows; i += WARPS * 32) {
        const int c = i & 15, y = i >> 4;
        if (column + c >= columns) continue;
        const i64 place = (i64)y * columns + column + c;
        float value = sum_of(parts, 0, c, y);
        if (BIAS) value = value + at<BIAS_TYPE>(bias, column + c);
        if (SWIGLU) value = gated<D>(value, sum_of(parts, SIDES - 1, c, y));
        if (ADD) value = D::load(r[place]) + D::wrap(value);
        out[place] = D::store(value);
    }
}
#endif
