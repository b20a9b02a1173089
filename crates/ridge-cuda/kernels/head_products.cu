// Products of few rows by a part of the rows of each matrix of a stack, as they lie in it: what attention over latents multiplies
// queries and results with, which would else be copied in every step. Rows and results lie among other columns, by the distances that are
// given. With PAIRS, what becomes a query is whole: ahead of each row's product there is its part that is rotated.
// Floor: the bytes of the parts over bandwidth.
// Defines: A, B (a 16-bit float) and OUT; TRANSPOSED, whether a matrix's rows are the columns of the product; ROWS, the most there are;
// ACROSS, columns of a block where it is not; those of `angles.cuh`, and with PAIRS, which needs products that are not transposed,
// INTERLEAVED, whether the elements of a pair are neighbours before they are rotated.
// Numbers: matrices, rows, columns, depth, elements between matrices, and between rows and matrices of x and of the product.

#define WIDE 8
// Vectors of weights that are on their way at a time, the first of them ahead of the launch before.
#define AHEAD 4

union Vector { uint4 whole; B::Raw part[WIDE]; };

#if TRANSPOSED
// A warp makes a column: lanes take 16 bytes of it at a time, and are added in an order that depth alone fixes.
extern "C" __global__ __launch_bounds__(256) void head_products(
    const A::Raw* __restrict__ a, const B::Raw* __restrict__ b, OUT::Raw* __restrict__ out, Numbers<9> n
) {
    const int lane = threadIdx.x & 31, rows = (int)n.v[1], columns = (int)n.v[2], depth = (int)n.v[3];
    const i64 at = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    others_may_begin();
    const i64 matrix = at / columns, column = at % columns;
    const B::Raw* weights = b + matrix * n.v[4] + column * depth;
    const A::Raw* x = a + matrix * n.v[6];
    Vector w[AHEAD];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int k = first + i * 32 * WIDE;
            if (k < depth && matrix < n.v[0]) w[i].whole = __ldg((const uint4*)(weights + k));
        }
    };
    fetch(lane * WIDE);
    after_others();
    if (matrix >= n.v[0]) return;
    float sums[ROWS] = {};
    for (int first = lane * WIDE; first < depth; first += AHEAD * 32 * WIDE) {
        if (first >= AHEAD * 32 * WIDE) fetch(first);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int k = first + i * 32 * WIDE;
            if (k >= depth) break;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= rows) break;
                const Elements<A, WIDE> values = elements_at<A, WIDE>(x + r * n.v[5] + k);
#pragma unroll
                for (int e = 0; e < WIDE; ++e) sums[r] = fmaf(A::load(values.part[e]), B::load(w[i].part[e]), sums[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        for (int step = 16; step > 0; step >>= 1) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
        if (lane == 0 && r < rows) out[r * n.v[7] + matrix * n.v[8] + column] = OUT::store(sums[r]);
    }
}
#else
// A block makes ACROSS columns of a matrix: SLICES of its threads share the depth, and are added in their order.
#define SLICES (256 * WIDE / ACROSS)

extern "C" __global__ __launch_bounds__(256) void head_products(
    const A::Raw* __restrict__ a, const B::Raw* __restrict__ b, OUT::Raw* __restrict__ out,
#if PAIRS
    const A::Raw* __restrict__ turned, const int* __restrict__ positions,
#endif
    Numbers<9> n
) {
    __shared__ float parts[SLICES][ACROSS];
    const int rows = (int)n.v[1], columns = (int)n.v[2], depth = (int)n.v[3];
    const int slice = threadIdx.x / (256 / SLICES), mine = threadIdx.x % (256 / SLICES) * WIDE;
    const i64 matrix = blockIdx.y;
    const int first = blockIdx.x * ACROSS, column = min(first + mine, columns - WIDE);
    others_may_begin();
#if PAIRS
    if (first >= columns) {
        after_others();
        for (int i = threadIdx.x; i < rows * PAIRS; i += blockDim.x) {
            const int r = i / PAIRS, pair = i % PAIRS;
            const A::Raw* x = turned + r * n.v[5] + matrix * n.v[6];
            const float low = A::load(x[INTERLEAVED ? 2 * pair : pair]), high = A::load(x[INTERLEAVED ? 2 * pair + 1 : pair + PAIRS]);
            float cosine, sine;
            angle_of(positions[r], pair, cosine, sine);
            OUT::Raw* y = out + r * n.v[7] + matrix * n.v[8] + pair - 2 * PAIRS;
            y[0] = OUT::store(low * cosine - high * sine);
            y[PAIRS] = OUT::store(high * cosine + low * sine);
        }
        return;
    }
#endif
    const B::Raw* weights = b + matrix * n.v[4] + column;
    const A::Raw* x = a + matrix * n.v[6];
    Vector w[AHEAD];
    auto fetch = [&](int from) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (from + i * SLICES < depth) w[i].whole = __ldg((const uint4*)(weights + (i64)(from + i * SLICES) * columns));
    };
    fetch(slice);
    after_others();
    float sums[ROWS][WIDE] = {};
    for (int from = slice; from < depth; from += AHEAD * SLICES) {
        if (from >= AHEAD * SLICES) fetch(from);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int k = from + i * SLICES;
            if (k >= depth) break;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float value = r < rows ? A::load(x[r * n.v[5] + k]) : 0.0f;
#pragma unroll
                for (int e = 0; e < WIDE; ++e) sums[r][e] = fmaf(value, B::load(w[i].part[e]), sums[r][e]);
            }
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
            out[r * n.v[7] + matrix * n.v[8] + first + c] = OUT::store(sum);
        }
        __syncthreads();
    }
}
#endif
