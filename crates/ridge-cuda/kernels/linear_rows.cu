// Linears of one input for few rows, by weights that are streamed once: y = x w^T, in 16-bit floats on tensor cores.
// Floor: the weights' bytes over bandwidth. A block makes 16 columns; its warps take turns along the depth, 64 bytes of
// each column at a time, and a ring in shared memory keeps up to 64 kB of a block in flight. The product does not care
// in which order depth is summed, so a lane's 16 bytes of a row are the fragments of two products as they come from
// memory.
// The order of sums is fixed by depth alone: a row's result does not depend on the others.
// Defines: D of x, weights and results; ROWS, 8 or 16; WARPS, 8 or 16; COUNT weights; ADD, BIAS (of dtype BIAS_TYPE)
// and SWIGLU (of two weights), 0 or 1; NORM, the threads among which a norm of the one row of x is made on the way, 0 for none, with its NORM_TYPE.
// Numbers: rows, depth (a multiple of 8), then the columns of each weight.

#define DEPTH 32
#define TILES (ROWS / 8)
#define SIDES (SWIGLU ? 2 : 1)
#define STAGES (65536 / (WARPS * 32 * SIDES * 2 * 16))

struct Pointers { const D::Raw* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };

extern "C" __global__ __launch_bounds__(WARPS * 32) void linear_rows(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain, float eps,
    Pointers p, Numbers<2 + COUNT> n
) {
    extern __shared__ uint4 ring[];
    __shared__ float parts[WARPS][SIDES][16][ROWS + 1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
    const int rows = (int)n.v[0];
    const i64 depth = n.v[1];
    // Which weight, and which tile of its columns.
    i64 tile = blockIdx.x, columns = n.v[2];
    const D::Raw* w[SIDES] = {p.weight[0]};
    D::Raw* out = p.out[0];
    const void* bias = p.bias[0];
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
        before += (columns + 15) / 16;
    }
    const i64 column = tile * 16;
    const i64 upper = min(column + row, columns - 1) * depth, lower = min(column + row + 8, columns - 1) * depth;
    const D::Raw* from[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) from[t] = x + (i64)min(row + 8 * t, rows - 1) * depth;

    float sums[SIDES][TILES][4] = {};
    // A lane copies and reads its own 16 bytes of each row alone, so the ring needs no barrier.
    const u32 mine = shared_address(ring + threadIdx.x);
    const i64 begin = (warp * 4 + quarter) * 8;
    auto fetch = [&](i64 k, int stage) {
        if (k - quarter * 8 < depth) {
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
    int stage = 0;
    for (i64 k = begin; k - quarter * 8 < depth; k += WARPS * DEPTH) {
        uint4 b[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
            b[t] = k < depth ? __ldg((const uint4*)(from[t] + k)) : make_uint4(0, 0, 0, 0);
#if NORM
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
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                Mma<D>::of(sums[s][t], u.x, l.x, u.y, l.y, b[t].x, b[t].y);
                Mma<D>::of(sums[s][t], u.z, l.z, u.w, l.w, b[t].z, b[t].w);
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
                parts[warp][s][row + 8 * (i >> 1)][t * 8 + quarter * 2 + (i & 1)] = sums[s][t][i];
    __syncthreads();
    const int c = threadIdx.x & 15, y = threadIdx.x >> 4;
    if (y >= rows || y >= ROWS || column + c >= columns) return;
    float total[SIDES];
#pragma unroll
    for (int s = 0; s < SIDES; ++s) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += parts[i][s][c][y];
        total[s] = sum;
    }
    const i64 place = (i64)y * columns + column + c;
    float value = total[0];
    if (BIAS) value = value + at<BIAS_TYPE>(bias, column + c);
    if (SWIGLU) {
        const float gate = D::wrap(value), up = D::wrap(total[SIDES - 1]);
        value = gate * op_sigmoid(gate) * up;
    }
    if (ADD) value = D::load(r[place]) + D::wrap(value);
    out[place] = D::store(value);
}
