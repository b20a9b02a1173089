// A product of at most ROWS rows with a matrix whose depth lies in memory order, as weights do: [m, k] x [n, k]^T. The
// matrix is read once and everything else stays in cache. Floor: the matrix's bytes over bandwidth.
// A warp makes a column of the result for all rows: each lane takes 16 bytes of the matrix at a time, and lanes are
// added in an order that depth alone fixes, so that a row's result does not depend on the others.
// Numbers: batches, m, n, k. Types A, B (floats) and OUT, and ROWS, come from the instance; k divides by VECTOR, and
// there are fewer than 2^31 columns.

#define VECTOR (16 / (int)sizeof(B::Raw))

extern "C" __global__ __launch_bounds__(256, 1) void matmul_rows(
    const void* __restrict__ a, const void* __restrict__ b, void* __restrict__ out, Numbers<4> n
) {
    const i64 m = n.v[1], depth = n.v[3];
    const u32 columns = (u32)n.v[2], all = (u32)n.v[0] * columns, warps = gridDim.x * (blockDim.x / 32);
    const int lane = threadIdx.x & 31;
    for (u32 c = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; c < all; c += warps) {
        const i64 batch = c / columns, column = c % columns;
        const B::Raw* weights = (const B::Raw*)b + (i64)c * depth;
        const A::Raw* x = (const A::Raw*)a + batch * m * depth;
        float sums[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sums[r] = 0.0f;
#pragma unroll 2
        for (i64 k = lane * VECTOR; k < depth; k += 32 * VECTOR) {
            union { uint4 whole; B::Raw part[VECTOR]; } w;
            w.whole = __ldg((const uint4*)(weights + k));
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (r < m) {
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v)
                        sums[r] = fmaf(A::load(x[r * depth + k + v]), B::load(w.part[v]), sums[r]);
                }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float sum = sums[r];
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (lane == 0 && r < m) put<OUT>(out, (batch * m + r) * columns + column, cast<OUT, F32>(sum));
        }
    }
}
