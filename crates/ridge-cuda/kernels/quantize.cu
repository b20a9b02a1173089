// Codes with scales of rows or of groups of them: of a tensor, of its norm, perhaps after a residual addition, or of the gate
// of an MLP. Floor: what is quantised read twice, the second time from cache, and its codes written once.
// A block makes a row. Defines: D of x, r and the sum; W of the norm's weight; SOURCE, 0 for x itself, 1 for its norm, 2 for
// the norm of its sum with r, 3 for x as the gate of r; CODE of codes, I8, F8E4M3 or F8E5M2; WHOLE, 1 where a row shares a
// scale; TENSOR, 1 where all do; VECTORS of 8 that a thread of `quantize_row` holds, 0 for the others; LANES of such threads that share a
// scale, where a row does not; THREADS of a block of `quantize_row` at most. Numbers: elements of a row, of a group.

#if TENSOR
// The largest magnitude of all, as the bits of a float that is not negative: NaN is above all numbers.
extern "C" __global__ void amax_of(const D::Raw* __restrict__ x, u32* __restrict__ amax, Numbers<1> n) {
    float most = 0.0f;
    others_may_begin();
    after_others();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x)
        most = larger(D::load(x[i]), most);
    most = largest_of<32>(most);
    if ((threadIdx.x & 31) == 0) atomicMax(amax, most != most ? 0x7fc00000u : __float_as_uint(most));
}

extern "C" __global__ void quantize_all(
    const D::Raw* __restrict__ x, const volatile u32* amax, u8* __restrict__ codes, float* __restrict__ scales, Numbers<1> n
) {
    others_may_begin();
    after_others();
    // Volatile: the compiler moves a plain load of a constant address to before the wait, and would read what the launch before
    // has not written yet.
    const Coder<CODE> coder(__uint_as_float(amax[0]));
    if (blockIdx.x == 0 && threadIdx.x == 0) scales[0] = coder.scale;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x)
        codes[i] = (u8)coder.pair(D::load(x[i]), 0.0f);
}

// For values up to `amax`, an earlier largest magnitude; of 0 the scale is 1.
extern "C" __global__ void quantize_delayed(
    const D::Raw* __restrict__ x, const float* __restrict__ amax, u8* __restrict__ codes, float* __restrict__ scales, Numbers<1> n
) {
    others_may_begin();
    after_others();
    const float most = amax[0];
    const Coder<CODE> coder(most > 0.0f ? most : Coder<CODE>::UNIT, false);
    if (blockIdx.x == 0 && threadIdx.x == 0) scales[0] = coder.scale;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x)
        codes[i] = (u8)coder.pair(D::load(x[i]), 0.0f);
}
#elif VECTORS
// A row of 16-bit floats that shares a scale is held in registers: up to VECTORS vectors of 8 elements of each thread.
union Vector { uint4 whole; D::Raw part[8]; };

// Between two uses of a vector it is kept as it is, not as eight floats.
__device__ inline void keep(Vector& v) { asm volatile("" : "+r"(v.whole.x), "+r"(v.whole.y), "+r"(v.whole.z), "+r"(v.whole.w)); }

extern "C" __global__ __launch_bounds__(THREADS, THREADS > 256 ? 1 : VECTORS <= 4 ? 6 : SOURCE == 0 ? 4 : 2) void quantize_row(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const W::Raw* __restrict__ weight,
    u8* __restrict__ codes, float* __restrict__ scales, D::Raw* sum, float eps, Numbers<2> n
) {
    [[maybe_unused]] __shared__ float squares[32], largest[32];
    const int row = (int)n.v[0], warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const i64 base = (i64)blockIdx.x * row;
    auto at = [&](int i) { return (int)(threadIdx.x + i * blockDim.x) * 8; };
    // Gains are weights, and are on their way before the launch ahead has ended.
    [[maybe_unused]] Elements<W, 8> gain[VECTORS];
#if SOURCE == 1 || SOURCE == 2
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        if (at(i) < row) gain[i] = elements_at<W, 8>(weight + at(i));
#endif
    others_may_begin();
    after_others();
    // All are on their way before the first is used; what lies behind the row is zeros.
    Vector value[VECTORS];
    [[maybe_unused]] Vector other[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        value[i].whole = other[i].whole = make_uint4(0, 0, 0, 0);
        if (at(i) < row) value[i].whole = *(const uint4*)(x + base + at(i));
        if (SOURCE >= 2 && at(i) < row) other[i].whole = *(const uint4*)(r + base + at(i));
    }
#if SOURCE == 3
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float gate = D::load(value[i].part[j]);
            value[i].part[j] = D::store(gate * sigmoid_for<D>(gate) * D::load(other[i].part[j]));
        }
#endif
#if SOURCE == 1 || SOURCE == 2
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#if SOURCE == 2
#pragma unroll
        for (int j = 0; j < 8; ++j)
            value[i].part[j] = D::store(D::load(value[i].part[j]) + D::load(other[i].part[j]));
        if (at(i) < row) *(uint4*)(sum + base + at(i)) = value[i].whole;
#endif
#pragma unroll
        for (int j = 0; j < 8; ++j) square += D::load(value[i].part[j]) * D::load(value[i].part[j]);
    }
    // In the order of `norm.cu`.
    for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = squares[0];
    for (int w = 1; w < warps; ++w) square += squares[w];
    const float unit = op_rsqrt(square / (float)row + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        keep(value[i]);
        if (at(i) >= row) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) value[i].part[j] = D::store(D::load(value[i].part[j]) * unit * W::load(gain[i].part[j]));
    }
#endif
#if WHOLE
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) most = larger(largest_of_vector<D>(value[i].whole), most);
    most = largest_of<32>(most);
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    const Coder<CODE> coder(largest_of<32>(lane < warps ? largest[lane] : 0.0f));
    if (threadIdx.x == 0) scales[blockIdx.x] = coder.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        keep(value[i]);
        if (at(i) < row) *(uint2*)(codes + base + at(i)) = codes_of<CODE, D>(coder, value[i].whole);
    }
#else
    const i64 groups = (row + LANES * 8 - 1) / (LANES * 8);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        // Lanes that lie together have a group.
        const Coder<CODE> coder(largest_of<LANES>(largest_of_vector<D>(value[i].whole)));
        if (at(i) >= row) continue;
        if (threadIdx.x % LANES == 0) scales[blockIdx.x * groups + at(i) / (LANES * 8)] = coder.scale;
        *(uint2*)(codes + base + at(i)) = codes_of<CODE, D>(coder, value[i].whole);
    }
#endif
}
#else
extern "C" __global__ void quantize(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const W::Raw* __restrict__ weight,
    u8* __restrict__ codes, float* __restrict__ scales, D::Raw* sum, float eps, Numbers<2> n
) {
    __shared__ float shared[32];
    const int row = (int)n.v[0], group = (int)n.v[1];
    const i64 base = (i64)blockIdx.x * row;
    others_may_begin();
    after_others();
    float unit = 1.0f;
    const D::Raw* from = x;
#if SOURCE == 2
    for (int i = threadIdx.x; i < row; i += blockDim.x)
        sum[base + i] = D::store(D::load(x[base + i]) + D::load(r[base + i]));
    __syncthreads();
    from = sum;
#endif
#if SOURCE == 1 || SOURCE == 2
    float square = 0.0f;
    for (int i = threadIdx.x; i < row; i += blockDim.x) square += D::load(from[base + i]) * D::load(from[base + i]);
    square = block_reduce<Sum>(square, shared);
    unit = op_rsqrt(square / (float)row + eps);
#endif
    auto value = [&](int i) -> float {
        float v = D::load(from[base + i]);
#if SOURCE == 1 || SOURCE == 2
        return D::wrap(v * unit * W::load(weight[i]));
#elif SOURCE == 3
        return D::wrap(v * sigmoid_for<D>(v) * D::load(r[base + i]));
#else
        return v;
#endif
    };
#if WHOLE
    float most = 0.0f;
    for (int i = threadIdx.x; i < row; i += blockDim.x) most = larger(value(i), most);
    const Coder<CODE> coder(block_reduce<Max>(most, shared));
    if (threadIdx.x == 0) scales[blockIdx.x] = coder.scale;
    for (int i = threadIdx.x; i < row; i += blockDim.x) codes[base + i] = (u8)coder.pair(value(i), 0.0f);
#else
    const int groups = (row + group - 1) / group, lane = threadIdx.x & 31;
    for (int g = threadIdx.x >> 5; g < groups; g += blockDim.x >> 5) {
        const int end = min((g + 1) * group, row);
        float most = 0.0f;
        for (int i = g * group + lane; i < end; i += 32) most = larger(value(i), most);
        const Coder<CODE> coder(largest_of<32>(most));
        if (lane == 0) scales[(i64)blockIdx.x * groups + g] = coder.scale;
        for (int i = g * group + lane; i < end; i += 32) codes[base + i] = (u8)coder.pair(value(i), 0.0f);
    }
#endif
}
#endif
