// Linears of one input for few rows, by weights that are streamed once: y = x w^T, in 16-bit floats on tensor cores.
// Floor: the weights' bytes over bandwidth. A block makes 16 columns; its 8 warps take turns along the depth, 512 bytes
// of each column at a time, so that 64 kB are in flight on each multiprocessor. The product does not care in which
// order depth is summed, so a lane's 16 bytes of a row are the fragments of two products as they come from memory.
// The order of sums is fixed by depth alone: a row's result does not depend on the others.
// Defines: D of x, weights and results; ROWS, 8 or 16; COUNT weights; ADD and SWIGLU (of two weights), 0 or 1.
// Numbers: rows, depth (a multiple of 8), then the columns of each weight.

#define WARPS 8
#define DEPTH 32
#define TILES (ROWS / 8)
#define SIDES (SWIGLU ? 2 : 1)
#define AHEAD (SWIGLU ? 2 : 4)

struct Pointers { const D::Raw* weight[COUNT]; D::Raw* out[COUNT]; };

extern "C" __global__ __launch_bounds__(256) void linear_rows(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, Pointers p, Numbers<2 + COUNT> n
) {
    __shared__ float parts[WARPS][SIDES][16][ROWS + 1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
    const int rows = (int)n.v[0];
    const i64 depth = n.v[1];
    int of = 0;
    i64 tile = blockIdx.x;
    if (!SWIGLU) {
#pragma unroll
        for (int i = 0; i + 1 < COUNT; ++i) {
            i64 tiles = (n.v[2 + i] + 15) / 16;
            if (of == i && tile >= tiles) { tile -= tiles; ++of; }
        }
    }
    const i64 columns = n.v[2 + of], column = tile * 16;
    const i64 upper = min(column + row, columns - 1) * depth, lower = min(column + row + 8, columns - 1) * depth;
    const D::Raw* w[SIDES];
    w[0] = p.weight[of];
    if (SWIGLU) w[SIDES - 1] = p.weight[COUNT - 1];
    const D::Raw* from[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) from[t] = x + (i64)min(row + 8 * t, rows - 1) * depth;

    float sums[SIDES][TILES][4] = {};
    for (i64 start = (warp * 4 + quarter) * 8; start - quarter * 8 < depth; start += WARPS * DEPTH * AHEAD) {
        uint4 a[AHEAD][SIDES][2], b[AHEAD][TILES];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 k = start + i * WARPS * DEPTH;
            const bool inside = k < depth;
            const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                a[i][s][0] = inside ? stream(w[s] + upper + k) : zero;
                a[i][s][1] = inside ? stream(w[s] + lower + k) : zero;
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) b[i][t] = inside ? __ldg((const uint4*)(from[t] + k)) : zero;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
#pragma unroll
            for (int s = 0; s < SIDES; ++s)
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const uint4 u = a[i][s][0], l = a[i][s][1], v = b[i][t];
                    Mma<D>::of(sums[s][t], u.x, l.x, u.y, l.y, v.x, v.y);
                    Mma<D>::of(sums[s][t], u.z, l.z, u.w, l.w, v.z, v.w);
                }
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
    if (SWIGLU) {
        const float gate = D::wrap(value), up = D::wrap(total[SIDES - 1]);
        value = gate * op_sigmoid(gate) * up;
    }
    if (ADD) value = D::load(r[place]) + D::wrap(value);
    p.out[SWIGLU ? 0 : of][place] = D::store(value);
}
