// Layer norm of rows, alone or after a residual addition, and the cotangent of the input of layer norm and RMS norm, alone
// or added to another. Floor: each row read and written once.
// THREADS make a row, which stays in registers: a warp up to WARP_VECTORS of `norm_rows.rs`, LINES of them a block, else a
// block. Sums have an order that the row's length fixes.
// Defines: D of rows; W of the weight, B of the bias; ADD, 0 or 1; CENTRED, whether the mean is taken away (layer norm);
// VECTORS of 16 bytes that a thread holds; THREADS of a row; LINES, rows of a block.
// Numbers: rows, elements of a row.

#define WIDE (16 / (int)sizeof(D::Raw))

union Vector { uint4 whole; D::Raw part[WIDE]; };

// The sum over the threads of a row.
__device__ inline float row_sum(float x, float* shared) {
    if (THREADS > 32) return block_reduce<Sum>(x, shared);
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Calls `each` with the number of every vector of the row that is this thread's, and with the place of its first element.
template <class F> __device__ inline void over_vectors(int row, F each) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = (v * THREADS + (int)threadIdx.x % THREADS) * WIDE;
        if (at < row) each(v, at);
    }
}

__device__ inline void read_row(float (*held)[WIDE], const D::Raw* x, int row) {
    over_vectors(row, [&](int v, int at) {
        Vector a;
        a.whole = *(const uint4*)(x + at);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) held[v][i] = D::load(a.part[i]);
    });
}

// Takes away the mean if CENTRED; gives the scale. In two passes: a difference of squares would cancel where the mean is large.
__device__ inline float normalise(float (*held)[WIDE], int row, float eps, float* shared) {
#if CENTRED
    float sum = 0.0f;
    over_vectors(row, [&](int v, int) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i) sum += held[v][i];
    });
    const float mean = row_sum(sum, shared) / (float)row;
#else
    const float mean = 0.0f;
#endif
    float square = 0.0f;
    over_vectors(row, [&](int v, int) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            held[v][i] -= mean;
            square = fmaf(held[v][i], held[v][i], square);
        }
    });
    return op_rsqrt(row_sum(square, shared) / (float)row + eps);
}

extern "C" __global__ __launch_bounds__(THREADS * LINES, 1) void layer_norm(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const W::Raw* __restrict__ weight,
    const B::Raw* __restrict__ bias, D::Raw* __restrict__ out, D::Raw* __restrict__ sum, float eps, Numbers<2> n
) {
    __shared__ float shared[32];
    others_may_begin();
    after_others();
    const i64 line = blockIdx.x * (i64)LINES + threadIdx.x / THREADS;
    if (line >= n.v[0]) return;
    const int row = (int)n.v[1];
    const i64 base = line * row;
    float held[VECTORS][WIDE];
#if ADD
    over_vectors(row, [&](int v, int at) {
        Vector a, b;
        a.whole = *(const uint4*)(x + base + at);
        b.whole = *(const uint4*)(r + base + at);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            a.part[i] = D::store(D::load(a.part[i]) + D::load(b.part[i]));
            held[v][i] = D::load(a.part[i]);
        }
        *(uint4*)(sum + base + at) = a.whole;
    });
#else
    read_row(held, x + base, row);
#endif
    const float scale = normalise(held, row, eps, shared);
    over_vectors(row, [&](int v, int at) {
        Vector a;
#pragma unroll
        for (int i = 0; i < WIDE; ++i)
            a.part[i] = D::store(fmaf(held[v][i] * scale, W::load(__ldg(weight + at + i)), B::load(__ldg(bias + at + i))));
        *(uint4*)(out + base + at) = a.whole;
    });
}

// With n the normalised row and g = dy * weight: scale (g - mean(g) - n mean(g n)), without mean(g) unless CENTRED; added
// to `r` if ADD.
extern "C" __global__ __launch_bounds__(THREADS * LINES, 1) void norm_input_gradient(
    const D::Raw* __restrict__ x, const W::Raw* __restrict__ weight, const D::Raw* __restrict__ dy,
    const D::Raw* __restrict__ r, D::Raw* __restrict__ out, float eps, Numbers<2> n
) {
    __shared__ float shared[32];
    others_may_begin();
    after_others();
    const i64 line = blockIdx.x * (i64)LINES + threadIdx.x / THREADS;
    if (line >= n.v[0]) return;
    const int row = (int)n.v[1];
    const i64 base = line * row;
    float held[VECTORS][WIDE], coming[VECTORS][WIDE];
    read_row(held, x + base, row);
    read_row(coming, dy + base, row);
    const float scale = normalise(held, row, eps, shared);
    float all = 0.0f, along = 0.0f;
    over_vectors(row, [&](int v, int at) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            held[v][i] *= scale;
            coming[v][i] *= W::load(__ldg(weight + at + i));
            all += coming[v][i];
            along = fmaf(coming[v][i], held[v][i], along);
        }
    });
    along = row_sum(along, shared) / (float)row;
    all = CENTRED ? row_sum(all, shared) / (float)row : 0.0f;
    over_vectors(row, [&](int v, int at) {
        Vector a, b;
#if ADD
        b.whole = *(const uint4*)(r + base + at);
#endif
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            a.part[i] = D::store((coming[v][i] - all - held[v][i] * along) * scale);
#if ADD
            a.part[i] = D::store(D::load(b.part[i]) + D::load(a.part[i]));
#endif
        }
        *(uint4*)(out + base + at) = a.whole;
    });
}
