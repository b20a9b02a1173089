// Linears of one input for few rows, by weights that are streamed once: y = x w^T, in 16-bit floats on tensor cores. Where
// both are codes of E4M3 with a scale for each row, the codes are multiplied as f16, which holds them exactly.
// Floor: the weights' bytes over bandwidth. A block makes 16 columns; its warps take turns along the depth, 64 bytes of
// each column at a time, and a ring in shared memory keeps up to 64 kB of a block in flight. The product does not care
// in which order depth is summed, so a lane's 16 bytes of a row are the fragments of two products as they come from
// memory.
// The order of sums is fixed by depth alone: a row's result does not depend on the others.
// Defines: D of x, weights and results; SCALED, 1 for codes; ROWS, 8 or 16; WARPS, 8 or 16; COUNT weights; ADD, BIAS (of
// dtype BIAS_TYPE) and SWIGLU (of two weights), 0 or 1; NORM, the threads among which a norm of the one row of x is made on
// the way, 0 for none, with its NORM_TYPE; QUANTISE, 1 where the one row, of dtype D, becomes codes on the way.
// Numbers: rows, depth (a multiple of 8, for codes of 16), then the columns of each weight.

#if SCALED
typedef u8 Element;
#else
typedef D::Raw Element;
#endif
// Elements of a lane's 16 bytes, and of a warp's piece of a row.
#define PIECE (16 / (int)sizeof(Element))
#define DEPTH (4 * PIECE)
#define TILES (ROWS / 8)
#define SIDES (SWIGLU ? 2 : 1)
#define STAGES (65536 / (WARPS * 32 * SIDES * 2 * 16))

struct Pointers { const Element* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };
// Of x, then of each weight.
struct RowScales { const float* of[1 + COUNT]; };

#if SCALED
// 16 codes of E4M3 as pairs of f16.
__device__ inline void halves(uint4 codes, u32* h) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if __CUDA_ARCH__ >= 890
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
            : "=r"(h[2 * i]), "=r"(h[2 * i + 1]) : "r"(words[i]));
#else
        // Sign, exponent and mantissa to their places in f16, whose exponents are 8 higher.
        const u32 low = __byte_perm(words[i], 0, 0x1404), high = __byte_perm(words[i], 0, 0x3424);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32 two = j ? high : low, factor = 0x5c005c00u;
            const u32 bits = (two & 0x80008000u) | (two & 0x7f007f00u) >> 1;
            asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(h[2 * i + j]) : "r"(bits), "r"(factor));
        }
#endif
    }
}
#endif

extern "C" __global__ __launch_bounds__(WARPS * 32) void linear_rows(
#if SCALED && !QUANTISE
    const u8* __restrict__ x,
#else
    const D::Raw* __restrict__ x,
#endif
    const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain, float eps, Pointers p, Numbers<2 + COUNT> n
#if SCALED
    , RowScales scales
#endif
) {
    extern __shared__ uint4 ring[];
    __shared__ float parts[WARPS][SIDES][16][ROWS + 1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
    const int rows = (int)n.v[0];
    const i64 depth = n.v[1];
    // Which weight, and which tile of its columns.
    i64 tile = blockIdx.x, columns = n.v[2];
    const Element* w[SIDES] = {p.weight[0]};
    D::Raw* out = p.out[0];
    const void* bias = p.bias[0];
    if (SWIGLU) w[SIDES - 1] = p.weight[COUNT - 1];
#if SCALED
    const float* of_columns[SIDES] = {scales.of[1]};
    if (SWIGLU) of_columns[SIDES - 1] = scales.of[COUNT];
#endif
    i64 before = (columns + 15) / 16;
#pragma unroll
    for (int i = 1; i < COUNT && !SWIGLU; ++i) {
        if ((i64)blockIdx.x < before) continue;
        tile = blockIdx.x - before;
        columns = n.v[2 + i];
        w[0] = p.weight[i];
        out = p.out[i];
        bias = p.bias[i];
#if SCALED
        of_columns[0] = scales.of[1 + i];
#endif
        before += (columns + 15) / 16;
    }
    const i64 column = tile * 16;
    const i64 upper = min(column + row, columns - 1) * depth, lower = min(column + row + 8, columns - 1) * depth;
#if !QUANTISE
    const Element* from[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) from[t] = x + (i64)min(row + 8 * t, rows - 1) * depth;
#endif

    float sums[SIDES][TILES][4] = {};
    // A lane copies and reads its own 16 bytes of each row alone, so the ring needs no barrier.
    const u32 mine = shared_address(ring + threadIdx.x);
    const i64 begin = (warp * 4 + quarter) * PIECE;
    auto fetch = [&](i64 k, int stage) {
        if (k - quarter * PIECE < depth) {
            const i64 at = k < depth ? k : 0;
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                const u32 to = mine + (stage * SIDES + s) * 2 * WARPS * 32 * 16;
                stream_async(to, w[s] + upper + at, k < depth);
                stream_async(to + WARPS * 32 * 16, w[s] + lower + at, k < depth);
            }
        }
        copies_end();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(begin + i * WARPS * DEPTH, i);
    others_may_begin();
    after_others();
#if NORM
    __shared__ float squares[32];
    const float unit = unit_of_row<D, NORM>(x, (int)depth, eps, squares);
#endif
#if QUANTISE
    // Every block makes the codes of the one row anew, while its first weights are on their way.
    __shared__ float largest[32];
    u8* codes = (u8*)(ring + 4096);
    auto values = [&](int k) {
        const uint4 part = *(const uint4*)(x + k);
#if NORM
        return normed<D, NORM_TYPE>(part, gain + k, unit);
#else
        return part;
#endif
    };
    float most = 0.0f;
    for (int k = threadIdx.x * 8; k < depth; k += WARPS * 32 * 8) {
        const uint4 part = values(k);
        const D::Raw* value = (const D::Raw*)&part;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = op_max(fabsf(D::load(value[i])), most);
    }
    most = block_reduce<Max>(most, largest);
    const float of_row = most / 448.0f, divisor = of_row == 0.0f ? 1.0f : of_row;
    for (int k = threadIdx.x * 8; k < depth; k += WARPS * 32 * 8) {
        const uint4 part = values(k);
        const D::Raw* value = (const D::Raw*)&part;
        union { uint2 whole; u8 part[8]; } c;
#pragma unroll
        for (int i = 0; i < 8; ++i) c.part[i] = code_of_f8(D::load(value[i]) / divisor);
        *(uint2*)(codes + k) = c.whole;
    }
    __syncthreads();
#endif
    int stage = 0;
    for (i64 k = begin; k - quarter * PIECE < depth; k += WARPS * DEPTH) {
        uint4 b[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#if QUANTISE
            b[t] = k < depth ? *(const uint4*)(codes + k) : make_uint4(0, 0, 0, 0);
#else
            b[t] = k < depth ? __ldg((const uint4*)(from[t] + k)) : make_uint4(0, 0, 0, 0);
#endif
#if NORM && !QUANTISE
        // One row, which every row of the tile stands for.
        if (k < depth) b[0] = normed<D, NORM_TYPE>(b[0], gain + k, unit);
#endif
        copies_wait<STAGES - 2>();
        const int last = stage == 0 ? STAGES - 1 : stage - 1;
        fetch(k + (STAGES - 1) * WARPS * DEPTH, last);
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            const uint4* a = ring + (stage * SIDES + s) * 2 * WARPS * 32 + threadIdx.x;
            const uint4 u = a[0], l = a[WARPS * 32];
#if SCALED
            u32 upper_half[8], lower_half[8];
            halves(u, upper_half);
            halves(l, lower_half);
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                u32 x_half[8];
                halves(b[t], x_half);
#pragma unroll
                for (int i = 0; i < 8; i += 2)
                    Mma<F16>::of(
                        sums[s][t], upper_half[i], lower_half[i], upper_half[i + 1], lower_half[i + 1], x_half[i], x_half[i + 1]
                    );
            }
#else
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                Mma<D>::of(sums[s][t], u.x, l.x, u.y, l.y, b[t].x, b[t].y);
                Mma<D>::of(sums[s][t], u.z, l.z, u.w, l.w, b[t].z, b[t].w);
            }
#endif
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
#pragma unroll
    for (int s = 0; s < SIDES; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                parts[warp][s][row + 8 * (i >> 1)][t * 8 + quarter * 2 + (i & 1)] = sums[s][t][i];
    __syncthreads();
    const int c = threadIdx.x & 15;
    if (column + c >= columns) return;
    for (int y = threadIdx.x >> 4; y < rows; y += WARPS * 2) {
        float total[SIDES];
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) sum += parts[i][s][c][y];
#if QUANTISE
            sum *= of_row * of_columns[s][column + c];
#elif SCALED
            sum *= scales.of[0][y] * of_columns[s][column + c];
#endif
            total[s] = sum;
        }
        const i64 place = (i64)y * columns + column + c;
        float value = total[0];
        if (BIAS) value = value + at<BIAS_TYPE>(bias, column + c);
        if (SWIGLU) value = gated<D>(value, total[SIDES - 1]);
        if (ADD) value = D::load(r[place]) + D::wrap(value);
        out[place] = D::store(value);
    }
}
