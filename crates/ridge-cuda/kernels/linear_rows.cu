// Linears of one input for few rows, by weights that are streamed once: y = x w^T, in 16-bit floats on tensor cores, or in 8-bit codes
// with scales of both. SCALED is BY_ROWS for a scale for each row, and BY_BLOCKS for one for each 128 elements of a row of x and
// for each block of 128 x 128 of a weight. Codes of E4M3 are multiplied as f16, which holds them exactly, and those of a block are summed
// before they are scaled; integers are summed exactly within a warp's part of the depth.
// Floor: the weights' bytes over bandwidth. A block makes 16 columns; its warps take turns along the depth, 64 bytes of
// each column at a time, and a ring in shared memory keeps up to RING bytes of a block in flight. The product does not care
// in which order depth is summed, so a lane's 16 bytes of a row are the fragments of two products as they come from
// memory.
// The order of sums is fixed by depth alone: a row's result does not depend on the others.
// Rows beyond ROWS are those of further blocks.
// Defines: D of x, weights and results; SCALED, 0 without codes; CODE of codes, F8E4M3 or I8; ROWS, 8 or 16; WARPS; RING; COUNT weights;
// ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU (of two weights), 0 or 1; NORM, the threads among which a norm of the one row of x is made on
// the way, 0 for none, with its NORM_TYPE; QUANTISE, rows at most, of dtype D, that become codes on the way, 0 where x is codes.
// Numbers: rows, depth (a multiple of 8, for codes of 16), then the columns of each weight.

#define BY_ROWS 1
#define BY_BLOCKS 2
#if SCALED
typedef u8 Element;
#else
typedef D::Raw Element;
#endif
#if SCALED && !QUANTISE
typedef u8 Given;
#else
typedef D::Raw Given;
#endif
// Elements of a lane's 16 bytes, and of a warp's piece of a row.
#define PIECE (16 / (int)sizeof(Element))
#define DEPTH (4 * PIECE)
#define TILES (ROWS / 8)
#define SIDES (SWIGLU ? 2 : 1)
#define STAGES (RING / (WARPS * 32 * SIDES * 2 * 16))

struct Pointers { const Element* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };
// Of x, then of each weight.
struct Scales { const float* of[1 + COUNT]; };

// Products of a warp's piece by its fragments: `u` and `l` of 16 columns, `b` of 8 rows.
template <class C> struct Pieces {
    typedef float Sum;
    __device__ static void multiply(float* sums, uint4 u, uint4 l, uint4 b) {
        Mma<D>::of(sums, u.x, l.x, u.y, l.y, b.x, b.y);
        Mma<D>::of(sums, u.z, l.z, u.w, l.w, b.z, b.w);
    }
};
template <> struct Pieces<I8> {
    typedef int Sum;
    __device__ static void multiply(int* sums, uint4 u, uint4 l, uint4 b) {
        MmaIntegers::of(sums, u.x, l.x, u.y, l.y, b.x, b.y);
        MmaIntegers::of(sums, u.z, l.z, u.w, l.w, b.z, b.w);
    }
};
template <> struct Pieces<F8E4M3> {
    typedef float Sum;
    // 16 codes as pairs of f16.
    __device__ static void halves(uint4 codes, u32* h) {
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
    __device__ static void multiply(float* sums, uint4 u, uint4 l, uint4 b) {
        u32 upper[8], lower[8], of_x[8];
        halves(u, upper);
        halves(l, lower);
        halves(b, of_x);
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            Mma<F16>::of(sums, upper[i], lower[i], upper[i + 1], lower[i + 1], of_x[i], of_x[i + 1]);
    }
};
#if SCALED
typedef Pieces<CODE> Piece;
#else
typedef Pieces<D> Piece;
#endif

extern "C" __global__
__launch_bounds__(WARPS * 32)
void linear_rows(
    const Given* __restrict__ x, const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain, float eps, Pointers p,
    Numbers<2 + COUNT> n
#if SCALED
    , Scales scales
#endif
) {
    extern __shared__ uint4 ring[];
    __shared__ float parts[WARPS][SIDES][16][ROWS + 1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
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
    // Scales along the depth, of a row or column.
    [[maybe_unused]] const int across = SCALED == BY_BLOCKS ? (int)((depth + BLOCK - 1) / BLOCK) : 1;
    const int end = (int)n.v[0], first = blockIdx.y * ROWS;
    const i64 upper = min(column + row, columns - 1) * depth, lower = min(column + row + 8, columns - 1) * depth;
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
#if SCALED == BY_BLOCKS
    float* of_blocks = (float*)((u8*)ring + RING);
#endif
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(begin + i * WARPS * DEPTH, i);
#if SCALED == BY_BLOCKS
    // Those of the columns of this block, which one block of the weight has.
    for (int i = threadIdx.x; i < SIDES * across; i += WARPS * 32) {
        const float* from = i < across ? of_columns[0] : of_columns[SIDES - 1] - across;
        of_blocks[i] = from[column / BLOCK * across + i];
    }
#endif
    others_may_begin();
    after_others();
    // Where row `y` of this block is in x: of rows that are not there, anywhere.
    const int rows = min(end - first, QUANTISE ? QUANTISE : ROWS);
    auto place_of = [&](int y) { return (i64)first + min(y, rows - 1); };
#if NORM
    __shared__ float squares[32];
    const float unit = unit_of_row<D, NORM>(x, (int)depth, eps, squares);
#endif
#if QUANTISE
    // Every block makes the codes of its rows anew, while its first weights are on their way. Rows lie so that lanes read different banks.
    const int line = ((int)depth + 127) / 128 * 128 + 64;
    // Behind the ring there are scales of the weights' blocks, of x, and the codes.
    float* of_x = (float*)((u8*)ring + RING) + SIDES * across;
    u8* codes = (u8*)ring + RING + ((SIDES + QUANTISE) * across * 4 + 15) / 16 * 16;
#if SCALED == BY_ROWS
    __shared__ float largest[32];
#endif
#pragma unroll 1
    for (int y = 0; y < rows; ++y) {
        const D::Raw* from = x + place_of(y) * depth;
        auto values = [&](int k) {
            const uint4 part = *(const uint4*)(from + k);
#if NORM
            return normed<D, NORM_TYPE>(part, gain + k, unit);
#else
            return part;
#endif
        };
        auto magnitude = [](uint4 part) {
            const D::Raw* value = (const D::Raw*)&part;
            float most = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) most = op_max(fabsf(D::load(value[i])), most);
            return most;
        };
        auto encode = [&](int k, uint4 part, float most, float scale) {
            const D::Raw* value = (const D::Raw*)&part;
            union { uint2 whole; u8 part[8]; } c;
#pragma unroll
            for (int i = 0; i < 8; ++i) c.part[i] = Coder<CODE>::of(D::load(value[i]), most, scale);
            *(uint2*)(codes + y * line + k) = c.whole;
        };
#if SCALED == BY_BLOCKS
        // Sixteen lanes have a group of 128, whole warps together.
        for (int base = 0; base < depth; base += WARPS * 32 * 8) {
            const int k = base + threadIdx.x * 8;
            const uint4 part = k < depth ? values(k) : make_uint4(0, 0, 0, 0);
            const float most = largest_of<16>(magnitude(part)), scale = Coder<CODE>::scale_of(most);
            if (k >= depth) continue;
            encode(k, part, most, scale);
            if (lane % 16 == 0) of_x[y * across + k / BLOCK] = scale;
        }
#else
        float most = 0.0f;
        for (int k = threadIdx.x * 8; k < depth; k += WARPS * 32 * 8) most = op_max(magnitude(values(k)), most);
        most = block_reduce<Max>(most, largest);
        const float scale = Coder<CODE>::scale_of(most);
        for (int k = threadIdx.x * 8; k < depth; k += WARPS * 32 * 8) encode(k, values(k), most, scale);
        if (threadIdx.x == 0) of_x[y] = scale;
#endif
    }
    const u8* from[1] = {codes + min(row, rows - 1) * line};
#else
    const Element* from[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) from[t] = x + place_of(row + 8 * t) * depth;
#endif
#if SCALED == BY_BLOCKS
    // Scales of the two rows of x whose sums this lane has.
    const float* of_rows[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int y = 8 * t + 2 * quarter + e;
#if QUANTISE
            of_rows[t][e] = of_x + min(y, rows - 1) * across;
#else
            of_rows[t][e] = scales.of[0] + place_of(y) * across;
#endif
        }
#endif
#if QUANTISE || SCALED == BY_BLOCKS
    __syncthreads();
#endif

    Piece::Sum sums[SIDES][TILES][4] = {};
    int stage = 0;
    for (i64 k = begin; k - quarter * PIECE < depth; k += WARPS * DEPTH) {
        uint4 b[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#if QUANTISE
            b[t] = k < depth ? *(const uint4*)(from[0] + k) : make_uint4(0, 0, 0, 0);
#else
            b[t] = k < depth ? __ldg((const uint4*)(from[t] + k)) : make_uint4(0, 0, 0, 0);
#endif
#if NORM && !QUANTISE
        // One row, which every row of the tile stands for.
        if (k < depth) b[0] = normed<D, NORM_TYPE>(b[0], gain + k, unit);
#endif
#if SCALED == BY_BLOCKS
        // A piece is within a block.
        const int block = (int)((k - quarter * PIECE) / BLOCK);
        float of_piece[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int e = 0; e < 2; ++e) of_piece[t][e] = of_rows[t][e][block];
#endif
        copies_wait<STAGES - 2>();
        const int last = stage == 0 ? STAGES - 1 : stage - 1;
        fetch(k + (STAGES - 1) * WARPS * DEPTH, last);
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            const uint4* a = ring + (stage * SIDES + s) * 2 * WARPS * 32 + threadIdx.x;
            const uint4 u = a[0], l = a[WARPS * 32];
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
#if SCALED == BY_BLOCKS
                float piece[4] = {};
                Piece::multiply(piece, u, l, b[t]);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[s][t][i] = fmaf(piece[i], of_blocks[s * across + block] * of_piece[t][i & 1], sums[s][t][i]);
#else
                Piece::multiply(sums[s][t], u, l, b[t]);
#endif
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
#pragma unroll
    for (int s = 0; s < SIDES; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                parts[warp][s][row + 8 * (i >> 1)][t * 8 + quarter * 2 + (i & 1)] = (float)sums[s][t][i];
    __syncthreads();
    const int c = threadIdx.x & 15;
    for (int y = column + c < columns ? threadIdx.x >> 4 : rows; y < rows; y += WARPS * 2) {
        float total[SIDES];
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) sum += parts[i][s][c][y];
#if SCALED == BY_ROWS && QUANTISE
            sum *= of_x[y] * of_columns[s][column + c];
#elif SCALED == BY_ROWS
            sum *= scales.of[0][place_of(y)] * of_columns[s][column + c];
#endif
            total[s] = sum;
        }
        const i64 place = (i64)(first + y) * columns + column + c;
        float value = total[0];
        if (BIAS) value = value + at<BIAS_TYPE>(bias, column + c);
        if (SWIGLU) value = gated<D>(value, total[SIDES - 1]);
        if (ADD) value = D::load(r[place]) + D::wrap(value);
        out[place] = D::store(value);
    }
}
