// The first `keep` elements along an axis in sorted order with their indices: ties by index, NaN last.
// Indices are sorted, by a bitonic network over the next power of two (Batcher 1968) in scratch memory, a block a line:
// ties broken by index make the order total, so that a network gives what a stable sort does. Indices past the end are
// above everything.
// Numbers: outer, extent, inner, keep, the power of two. Type D and DESCENDING come from the instance.

__device__ inline bool is_nan(float x) { return x != x; }
__device__ inline bool is_nan(i64) { return false; }

__device__ inline bool before(const void* x, i64 base, i64 inner, i64 extent, int a, int b) {
    if (a >= extent || b >= extent) return a < b;
    const D::Sum p = (D::Sum)at<D>(x, base + a * inner), q = (D::Sum)at<D>(x, base + b * inner);
    if (is_nan(p) || is_nan(q)) return is_nan(p) == is_nan(q) ? a < b : is_nan(q);
    if (p == q) return a < b;
    return DESCENDING ? p > q : p < q;
}

extern "C" __global__ __launch_bounds__(1024) void sort(
    const void* __restrict__ x, void* __restrict__ values, int* __restrict__ indices, int* scratch, Numbers<5> n
) {
    const i64 extent = n.v[1], inner = n.v[2], keep = n.v[3], size = n.v[4];
    int* order = scratch + blockIdx.x * size;
    for (i64 line = blockIdx.x; line < n.v[0] * inner; line += gridDim.x) {
        const i64 base = line / inner * extent * inner + line % inner;
        for (i64 e = threadIdx.x; e < size; e += blockDim.x) order[e] = (int)e;
        __syncthreads();
        for (i64 run = 2; run <= size; run <<= 1)
            for (i64 apart = run >> 1; apart > 0; apart >>= 1) {
                for (i64 pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
                    const i64 low = pair / apart * apart * 2 + pair % apart, high = low + apart;
                    const int a = order[low], b = order[high];
                    const bool up = (low & run) == 0;
                    if (before(x, base, inner, extent, b, a) == up) { order[low] = b; order[high] = a; }
                }
                __syncthreads();
            }
        const i64 to = line / inner * keep * inner + line % inner;
        for (i64 k = threadIdx.x; k < keep; k += blockDim.x) {
            ((D::Raw*)values)[to + k * inner] = ((const D::Raw*)x)[base + order[k] * inner];
            indices[to + k * inner] = order[k];
        }
        __syncthreads();
    }
}
