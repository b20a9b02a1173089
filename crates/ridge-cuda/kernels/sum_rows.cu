// Sums over all rows of a matrix, of its elements or of a cotangent times the normalised row: what comes to biases and to
// the weights of norms. Floor: the operands read once.
// Rows are cut into parts, which depend on the extents alone; a block sums COLUMNS columns of one part, and the parts are
// added in their order.
// Defines: D, of the operands; OUT, of the result; NORMED, whether rows are normalised; CENTRED, whether their mean is taken
// away.
// Numbers: rows, columns, parts.

#define COLUMNS 128
#define LINES 4

// Mean and scale of each row: a warp for each.
extern "C" __global__ void row_statistics(const void* __restrict__ x, float* __restrict__ statistics, float eps, Numbers<3> n) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, columns = (int)n.v[1];
    for (i64 row = blockIdx.x * (i64)warps + (threadIdx.x >> 5); row < n.v[0]; row += (i64)gridDim.x * warps) {
        float mean = 0.0f, square = 0.0f;
#if CENTRED
        for (int i = lane; i < columns; i += 32) mean += at<D>(x, row * columns + i);
        for (int step = 16; step > 0; step >>= 1) mean += __shfl_xor_sync(0xffffffffu, mean, step);
        mean /= (float)columns;
#endif
        for (int i = lane; i < columns; i += 32) {
            const float d = at<D>(x, row * columns + i) - mean;
            square = fmaf(d, d, square);
        }
        for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
        if (lane == 0) {
            statistics[2 * row] = mean;
            statistics[2 * row + 1] = 1.0f / sqrtf(square / (float)columns + eps);
        }
    }
}

// `x`, and with NORMED the cotangent `dy`.
extern "C" __global__ void sum_parts(
    const void* __restrict__ x, const void* __restrict__ dy, const float* __restrict__ statistics,
    float* __restrict__ parts, Numbers<3> n
) {
    __shared__ float sums[LINES][COLUMNS];
    const int line = threadIdx.x / COLUMNS, place = threadIdx.x % COLUMNS;
    const i64 column = blockIdx.x * (i64)COLUMNS + place, size = (n.v[0] + n.v[2] - 1) / n.v[2];
    const i64 first = blockIdx.y * size, end = min(first + size, n.v[0]);
    float sum = 0.0f;
    if (column < n.v[1])
#pragma unroll 8
        for (i64 row = first + line; row < end; row += LINES) {
            const float value = at<D>(x, row * n.v[1] + column);
#if NORMED
            const float mean = statistics[2 * row], scale = statistics[2 * row + 1];
            sum = fmaf(at<D>(dy, row * n.v[1] + column), (value - mean) * scale, sum);
#else
            sum += value;
#endif
        }
    sums[line][place] = sum;
    __syncthreads();
    if (line == 0 && column < n.v[1]) {
        for (int i = 1; i < LINES; ++i) sum += sums[i][place];
        parts[blockIdx.y * n.v[1] + column] = sum;
    }
}

extern "C" __global__ void sum_join(const float* __restrict__ parts, void* __restrict__ out, Numbers<3> n) {
    const i64 column = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (column >= n.v[1]) return;
    float sum = 0.0f;
    for (i64 part = 0; part < n.v[2]; ++part) sum += parts[part * n.v[1] + column];
    put<OUT>(out, column, sum);
}
