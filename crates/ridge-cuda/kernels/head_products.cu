// Products of few rows by a part of the rows of each matrix of a stack, as they lie in it: what attention over latents multiplies
// queries and results with, which would else be copied in every step. Floor: the bytes of the parts over bandwidth.
// Defines: A, B (a 16-bit float) and OUT; TRANSPOSED, whether a matrix's rows are the columns of the product; ROWS, the most there are.
// Numbers: matrices, rows, columns, depth, elements between matrices, and from the first element to the first part.

#define WIDE 8

union Vector { uint4 whole; B::Raw part[WIDE]; };

#if TRANSPOSED
// A warp makes a column: lanes take 16 bytes of it at a time, and are added in an order that depth alone fixes.
extern "C" __global__ __launch_bounds__(256) void head_products(
    const A::Raw* __restrict__ a, const B::Raw* __restrict__ b, OUT::Raw* __restrict__ out, Numbers<6> n
) {
    const int lane = threadIdx.x & 31, rows = (int)n.v[1], columns = (int)n.v[2], depth = (int)n.v[3];
    const i64 at = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    others_may_begin();
    after_others();
    if (at >= n.v[0] * columns) return;
    const i64 matrix = at / columns, column = at % columns;
    const B::Raw* weights = b + matrix * n.v[4] + n.v[5] + column * depth;
    const A::Raw* x = a + matrix * rows * depth;
    float sums[ROWS] = {};
#pragma unroll 2
    for (int k = lane * WIDE; k < depth; k += 32 * WIDE) {
        Vector w;
        w.whole = __ldg((const uint4*)(weights + k));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            const Elements<A, WIDE> values = elements_at<A, WIDE>(x + r * depth + k);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) sums[r] = fmaf(A::load(values.part[e]), B::load(w.part[e]), sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        for (int step = 16; step > 0; step >>= 1) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
        if (lane == 0 && r < rows) out[(matrix * rows + r) * columns + column] = OUT::store(sums[r]);
    }
}
#else
// A block makes ACROSS columns of a matrix: SLICES of its threads share the depth, and are added in their order.
#define SLICES 16
#define ACROSS (256 / SLICES * WIDE)

extern "C" __global__ __launch_bounds__(256) void head_products(
    const A::Raw* __restrict__ a, const B::Raw* __restrict__ b, OUT::Raw* __restrict__ out, Numbers<6> n
) {
    __shared__ float parts[SLICES][ACROSS];
    const int rows = (int)n.v[1], columns = (int)n.v[2], depth = (int)n.v[3];
    const int slice = threadIdx.x / (256 / SLICES), mine = threadIdx.x % (256 / SLICES) * WIDE;
    const i64 matrix = blockIdx.y;
    const int first = blockIdx.x * ACROSS, column = min(first + mine, columns - WIDE);
    others_may_begin();
    after_others();
    const B::Raw* weights = b + matrix * n.v[4] + n.v[5] + column;
    const A::Raw* x = a + matrix * rows * depth;
    float sums[ROWS][WIDE] = {};
#pragma unroll 4
    for (int k = slice; k < depth; k += SLICES) {
        Vector w;
        w.whole = __ldg((const uint4*)(weights + (i64)k * columns));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float value = r < rows ? A::load(x[r * depth + k]) : 0.0f;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) sums[r][e] = fmaf(value, B::load(w.part[e]), sums[r][e]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
#pragma unroll
        for (int e = 0; e < WIDE; ++e) parts[slice][mine + e] = sums[r][e];
        __syncthreads();
        const int c = threadIdx.x;
        if (c < ACROSS && first + c < columns) {
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < SLICES; ++s) sum += parts[s][c];
            out[(matrix * rows + r) * columns + first + c] = OUT::store(sum);
        }
        __syncthreads();
    }
}
#endif
