// Reductions, scans and the index of the largest along an axis: the element (o, k, i) of an operand is at
// (o * extent + k) * inner + i. Floor: the operand's bytes and the result's over bandwidth.
// Numbers: outer, extent, inner. Type D and combination OP come from the instance.

#ifdef REDUCE
// A thread an output element, neighbours reading neighbours.
extern "C" __global__ void reduce(const void* __restrict__ x, void* __restrict__ out, Numbers<3> n) {
    const i64 extent = n.v[1], inner = n.v[2], total = n.v[0] * inner;
    for (i64 e = blockIdx.x * (i64)blockDim.x + threadIdx.x; e < total; e += (i64)gridDim.x * blockDim.x) {
        const i64 base = e / inner * extent * inner + e % inner;
        D::Sum sum = start<OP, D>();
        for (i64 k = 0; k < extent; ++k) sum = OP::of(sum, (D::Sum)at<D>(x, base + k * inner));
        put<D>(out, e, D::wrap(sum));
    }
}
#endif

#ifdef SCAN
// A block a line: a piece of it at a time, by doubling steps in shared memory, with what came before carried along.
extern "C" __global__ __launch_bounds__(256) void scan(
    const void* __restrict__ x, void* __restrict__ out, Numbers<3> n
) {
    __shared__ D::Sum part[256];
    const i64 extent = n.v[1], inner = n.v[2];
    const int t = threadIdx.x;
    for (i64 line = blockIdx.x; line < n.v[0] * inner; line += gridDim.x) {
        const i64 base = line / inner * extent * inner + line % inner;
        D::Sum before = start<OP, D>();
        for (i64 k0 = 0; k0 < extent; k0 += 256) {
            const i64 k = k0 + t;
            part[t] = k < extent ? (D::Sum)at<D>(x, base + k * inner) : start<OP, D>();
            __syncthreads();
            for (int step = 1; step < 256; step <<= 1) {
                D::Sum left = t >= step ? part[t - step] : start<OP, D>();
                __syncthreads();
                if (t >= step) part[t] = OP::of(left, part[t]);
                __syncthreads();
            }
            if (k < extent) put<D>(out, base + k * inner, D::wrap(OP::of(before, part[t])));
            before = OP::of(before, part[255]);
            __syncthreads();
        }
    }
}
#endif

#ifdef ARGMAX
// A block a line. Of equals the first; a NaN is above all numbers; 0 of none.
__device__ inline bool above(float a, float b) { return a > b || (a != a && b == b); }
__device__ inline bool above(i64 a, i64 b) { return a > b; }

extern "C" __global__ __launch_bounds__(256) void argmax(
    const void* __restrict__ x, int* __restrict__ out, Numbers<3> n
) {
    __shared__ D::Sum values[256];
    __shared__ i64 places[256];
    const i64 extent = n.v[1], inner = n.v[2];
    const int t = threadIdx.x;
    for (i64 line = blockIdx.x; line < n.v[0] * inner; line += gridDim.x) {
        const i64 base = line / inner * extent * inner + line % inner;
        // -1 where there is none yet.
        i64 place = -1;
        D::Sum best = 0;
        for (i64 k = t; k < extent; k += 256) {
            const D::Sum value = (D::Sum)at<D>(x, base + k * inner);
            if (place < 0 || above(value, best)) { best = value; place = k; }
        }
        values[t] = best;
        places[t] = place;
        __syncthreads();
        for (int half = 128; half > 0; half >>= 1) {
            if (t < half && places[t + half] >= 0) {
                const D::Sum a = values[t], b = values[t + half];
                const i64 p = places[t], q = places[t + half];
                if (p < 0 || above(b, a) || (!above(a, b) && q < p)) { values[t] = b; places[t] = q; }
            }
            __syncthreads();
        }
        if (t == 0) out[line] = places[0] < 0 ? 0 : (int)places[0];
        __syncthreads();
    }
}
#endif
