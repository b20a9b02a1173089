// Root-mean-square norm of rows, alone, after a residual addition, or opened by a gate. Floor: each row read and written once.
// A block makes a row, or each of LINES warps one, which stays in registers; sums have an order that the row's length fixes.
// Defines: D of x, r and their sum; O of the result; W of the weight; ADD, 0 or 1; GATE, 1 where the norm is multiplied by SiLU of a gate
// of G; VECTORS of 16 bytes that a thread holds; THREADS of a row; LINES; WHOLE, 1 where all of a row's threads hold VECTORS.
// Numbers: elements of a row, rows.

#define WIDE (16 / (int)sizeof(D::Raw))

union Vector { uint4 whole; D::Raw part[WIDE]; };

// A norm, rounded to D on its way to O.
template <class From, class To> struct Rounded {
    __device__ static typename To::Raw store(float x) { return To::store(From::wrap(x)); }
};
template <class To> struct Rounded<To, To> {
    __device__ static typename To::Raw store(float x) { return To::store(x); }
};

extern "C" __global__ __launch_bounds__(THREADS * LINES, 1) void rms_norm(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const W::Raw* __restrict__ weight,
    const G::Raw* __restrict__ gate, O::Raw* __restrict__ out, D::Raw* __restrict__ sum, float eps, Numbers<2> n
) {
    others_may_begin();
    after_others();
    const int row = (int)n.v[0], thread = threadIdx.x % THREADS;
    const i64 line = (i64)blockIdx.x * LINES + threadIdx.x / THREADS, base = line * row;
    if (LINES > 1 && line >= n.v[1]) return;
    // All are on their way before the first is used.
    Vector a[VECTORS], b[VECTORS];
    Elements<G, WIDE> gates[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = (v * THREADS + thread) * WIDE;
        if (!WHOLE && at >= row) continue;
        a[v].whole = *(const uint4*)(x + base + at);
        if (ADD) b[v].whole = *(const uint4*)(r + base + at);
        if (GATE) gates[v] = elements_at<G, WIDE>(gate + base + at);
    }
    float square = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = (v * THREADS + thread) * WIDE;
        if (!WHOLE && at >= row) continue;
        if (ADD) {
#pragma unroll
            for (int i = 0; i < WIDE; ++i) a[v].part[i] = D::store(D::load(a[v].part[i]) + D::load(b[v].part[i]));
            *(uint4*)(sum + base + at) = a[v].whole;
        }
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            const float x = D::load(a[v].part[i]);
            square += x * x;
        }
    }
#if LINES > 1
    for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
#else
    __shared__ float shared[32];
    square = block_reduce<Sum>(square, shared);
#endif
    const float scale = op_rsqrt(square / (float)row + eps);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = (v * THREADS + thread) * WIDE;
        if (!WHOLE && at >= row) continue;
        // Converted again: what the sum took of all vectors would take twice the registers.
        asm volatile("" : "+r"(a[v].whole.x), "+r"(a[v].whole.y), "+r"(a[v].whole.z), "+r"(a[v].whole.w));
        const Elements<W, WIDE> gain = elements_at<W, WIDE>(weight + at);
        Elements<O, WIDE> made;
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            const float normed = D::load(a[v].part[i]) * scale * W::load(gain.part[i]);
            if (GATE) {
                const float opened = G::load(gates[v].part[i]);
                made.part[i] = O::store(opened * op_sigmoid(opened) * D::wrap(normed));
            } else {
                made.part[i] = Rounded<D, O>::store(normed);
            }
        }
        *(Elements<O, WIDE>*)(out + base + at) = made;
    }
}
