// Sums over all rows of a matrix, of its elements or of a cotangent times the normalised row: what comes to biases and to
// the weights of norms. Floor: the operands read once.
// Rows are cut into parts, which depend on the extents alone; a block sums 32 * WIDE columns of one part, and the parts are
// added in one order.
// Defines: D, of the operands; OUT, of the result; WIDE, columns that a thread takes at a time, which divide the columns, 16 bytes
// of them or 1; NORMED, whether rows are normalised; CENTRED, whether their mean is taken away.
// Numbers: rows, columns, parts.

#define LINES 8

struct alignas(WIDE * sizeof(D::Raw)) Chunk { D::Raw part[WIDE]; };

// Mean and scale of each row: a warp for each.
extern "C" __global__ void row_statistics(const void* __restrict__ x, float* __restrict__ statistics, float eps, Numbers<3> n) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, columns = (int)n.v[1], chunks = columns / WIDE;
    for (i64 row = blockIdx.x * (i64)warps + (threadIdx.x >> 5); row < n.v[0]; row += (i64)gridDim.x * warps) {
        const Chunk* own = (const Chunk*)x + row * chunks;
        float mean = 0.0f, square = 0.0f;
#if CENTRED
        for (int i = lane; i < chunks; i += 32) {
            const Chunk c = own[i];
#pragma unroll
            for (int w = 0; w < WIDE; ++w) mean += D::load(c.part[w]);
        }
        for (int step = 16; step > 0; step >>= 1) mean += __shfl_xor_sync(0xffffffffu, mean, step);
        mean /= (float)columns;
#endif
        for (int i = lane; i < chunks; i += 32) {
            const Chunk c = own[i];
#pragma unroll
            for (int w = 0; w < WIDE; ++w) {
                const float d = D::load(c.part[w]) - mean;
                square = fmaf(d, d, square);
            }
        }
        for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
        if (lane == 0) {
            statistics[2 * row] = mean;
            statistics[2 * row + 1] = 1.0f / sqrtf(square / (float)columns + eps);
        }
    }
}

// `x`, and with NORMED the cotangent `dy`.
extern "C" __global__ __launch_bounds__(32 * LINES) void sum_parts(
    const void* __restrict__ x, const void* __restrict__ dy, const float* __restrict__ statistics,
    float* __restrict__ parts, Numbers<3> n
) {
    __shared__ float sums[LINES][32 * WIDE];
    const int line = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 chunks = n.v[1] / WIDE, place = blockIdx.x * (i64)32 + lane, size = (n.v[0] + n.v[2] - 1) / n.v[2];
    const i64 first = blockIdx.y * size, end = min(first + size, n.v[0]);
    float sum[WIDE] = {};
    if (place < chunks)
#pragma unroll 4
        for (i64 row = first + line; row < end; row += LINES) {
            const Chunk a = ((const Chunk*)x)[row * chunks + place];
#if NORMED
            const Chunk b = ((const Chunk*)dy)[row * chunks + place];
            const float2 of = ((const float2*)statistics)[row];
#pragma unroll
            for (int w = 0; w < WIDE; ++w) sum[w] = fmaf(D::load(b.part[w]), (D::load(a.part[w]) - of.x) * of.y, sum[w]);
#else
#pragma unroll
            for (int w = 0; w < WIDE; ++w) sum[w] += D::load(a.part[w]);
#endif
        }
#pragma unroll
    for (int w = 0; w < WIDE; ++w) sums[line][w * 32 + lane] = sum[w];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * WIDE; i += 32 * LINES) {
        float all = 0.0f;
#pragma unroll
        for (int l = 0; l < LINES; ++l) all += sums[l][i];
        const i64 column = (blockIdx.x * (i64)32 + i % 32) * WIDE + i / 32;
        if (column < n.v[1]) parts[blockIdx.y * n.v[1] + column] = all;
    }
}

// A block for 32 columns.
extern "C" __global__ __launch_bounds__(32 * LINES) void sum_join(const float* __restrict__ parts, void* __restrict__ out, Numbers<3> n) {
    __shared__ float sums[LINES][32];
    const int line = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 column = blockIdx.x * (i64)32 + lane;
    float sum = 0.0f;
    if (column < n.v[1])
#pragma unroll 8
        for (i64 part = line; part < n.v[2]; part += LINES) sum += parts[part * n.v[1] + column];
    sums[line][lane] = sum;
    __syncthreads();
    if (line != 0 || column >= n.v[1]) return;
    for (int l = 1; l < LINES; ++l) sum += sums[l][lane];
    put<OUT>(out, column, sum);
}
