// Linears of one row by weights in block formats, read once in their own bits, on tensor cores: `digits.cuh`, `blocks_ring.cuh`.
// Floor: the weights' bytes over bandwidth; not far from it, the instructions that take codes out of their bits.
// Blocks stay, and make tiles of 16 columns in turn.
// Defines: D of x and results; DEPTH, a multiple of 256; WARPS; STAGES of a ring; COUNT weights; EACH_FORMAT(F), `F(i, format)` of each
// format, and FORMATS, which of them each weight has; ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU (of two weights of one format), 0 or 1;
// NORM, the threads among which a norm of the row is made, 0 for none, with its NORM_TYPE; PAIRED, 1 where the order of digits is that
// of MXFP4; STAGED, the bytes of the normed row and of the digits of x; GROUPED, 0.
// Numbers: 1, DEPTH, then the columns of each weight.

struct Pointers { const u8* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };

struct Tiles {
    const Pointers& p;
    const i64* columns;
    __device__ Tile at(int i) const {
        Tile tile = {{p.weight[0]}, (i64)i * 16, columns[0], 0, 0};
        if (SWIGLU) tile.w[SIDES - 1] = p.weight[COUNT - 1];
        i64 before = (columns[0] + 15) / 16;
#pragma unroll
        for (int j = 1; j < COUNT && !SWIGLU; ++j) {
            if (i < before) continue;
            tile = {{p.weight[j]}, (i - before) * 16, columns[j], 0, j};
            before += (columns[j] + 15) / 16;
        }
        return tile;
    }
};

extern "C" __global__ __launch_bounds__(WARPS * 32, 16 / WARPS) void linear_blocks_row(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain, float eps,
    Pointers p, Numbers<2 + COUNT> n
) {
    extern __shared__ uint4 shared[];
    const int formats[] = {FORMATS};
    const Tiles tiles = {p, n.v + 2};
    const int lines = DEPTH / 32;
    Digits digits((u8*)shared, lines);
    auto ready = [&] {
        others_may_begin();
        after_others();
        const D::Raw* from = x;
#if NORM
        __shared__ float squares[32];
        const float unit = unit_of_row<D, NORM>(x, DEPTH, eps, squares);
        D::Raw* line = (D::Raw*)((u8*)shared + STAGED) - DEPTH;
        for (int k = threadIdx.x * 8; k < DEPTH; k += WARPS * 32 * 8)
            *(uint4*)(line + k) = normed<D, NORM_TYPE>(*(const uint4*)(x + k), gain + k, unit);
        __syncthreads();
        from = line;
#endif
        digits.stage<PAIRED>(from, lines);
        __syncthreads();
    };
    auto digits_of = [&](const Tile&) { return digits; };
    auto store = [&](const Tile& tile, i64 column, const float* sums, bool mine) {
        if (!mine) return;
        float value = sums[0];
        if (BIAS) value += at<BIAS_TYPE>(p.bias[tile.weight], column);
        if (SWIGLU) value = gated<D>(value, sums[SIDES - 1]);
        if (ADD) value = D::load(r[column]) + D::wrap(value);
        p.out[tile.weight][column] = D::store(value);
    };
    int all = 0;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : COUNT); ++i) all += (int)((n.v[2 + i] + 15) / 16);
    const int begin = part_of(all, blockIdx.x), end = part_of(all, blockIdx.x + 1);
    // Weights of one format that follow each other are one run of tiles.
    int from = 0;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : COUNT); ++i) {
        if (i > 0 && formats[i] == formats[i - 1]) continue;
        int to = from;
#pragma unroll
        for (int j = i; j < (SWIGLU ? 1 : COUNT); ++j) {
            if (formats[j] != formats[i]) break;
            to += (int)((n.v[2 + j] + 15) / 16);
        }
        const int first = max(begin, from), last = min(end, to);
        switch (formats[i]) {
#define RUN(f, F) \
    case f: \
        if (i == 0) over_tiles<F>(tiles, first, last, (u8*)shared + STAGED, ready, digits_of, store); \
        else over_tiles<F>(tiles, first, last, (u8*)shared + STAGED, [] {}, digits_of, store); \
        break;
            EACH_FORMAT(RUN)
        }
        from = to;
    }
}
