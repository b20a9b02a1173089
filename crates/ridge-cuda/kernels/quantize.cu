// Codes with scales of rows or of groups of them: of a tensor, of its norm, perhaps after a residual addition, or of the gate
// of an MLP. Floor: what is quantised read twice, the second time from cache, and its codes written once.
// A block makes a row. Defines: D of x, r and the sum; W of the norm's weight; SOURCE, 0 for x itself, 1 for its norm, 2 for
// the norm of its sum with r, 3 for x as the gate of r; CODE of codes, I8, F8E4M3 or F8E5M2; WHOLE, 1 where a row shares a
// scale; TENSOR, 1 where all do; VECTORS of 8 that a thread of `quantize_row` holds, 0 for the others; LANES of such threads that share a
// scale, where a row does not. Numbers: elements of a row, of a group.

#if TENSOR
// The largest magnitude of all, as the bits of a float that is not negative: NaN is above all numbers.
extern "C" __global__ void amax_of(const D::Raw* __restrict__ x, u32* __restrict__ amax, Numbers<1> n) {
    float most = 0.0f;
    others_may_begin();
    after_others();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x)
        most = op_max(fabsf(D::load(x[i])), most);
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
    const float most = __uint_as_float(amax[0]), scale = Coder<CODE>::scale_of(most);
    if (blockIdx.x == 0 && threadIdx.x == 0) scales[0] = scale;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x)
        codes[i] = Coder<CODE>::of(D::load(x[i]), most, scale);
}

// For values up to `amax`, an earlier largest magnitude; of 0 the scale is 1.
extern "C" __global__ void quantize_delayed(
    const D::Raw* __restrict__ x, const float* __restrict__ amax, u8* __restrict__ codes, float* __restrict__ scales, Numbers<1> n
) {
    others_may_begin();
    after_others();
    const float most = amax[0], scale = most > 0.0f ? Coder<CODE>::scale_of(most) : 1.0f;
    if (blockIdx.x == 0 && threadIdx.x == 0) scales[0] = scale;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x)
        codes[i] = Coder<CODE>::of(D::load(x[i]), most, scale);
}
#elif VECTORS
// A row of 16-bit floats that shares a scale is held in registers: up to VECTORS vectors of 8 elements of each thread.
union Vector { uint4 whole; D::Raw part[8]; };

extern "C" __global__ __launch_bounds__(256) void quantize_row(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const W::Raw* __restrict__ weight,
    u8* __restrict__ codes, float* __restrict__ scales, D::Raw* sum, float eps, Numbers<2> n
) {
    __shared__ float shared[32];
    const int row = (int)n.v[0];
    const i64 base = (i64)blockIdx.x * row;
    others_may_begin();
    after_others();
    // In f32, and rounded to D.
    float value[VECTORS][8];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (threadIdx.x + i * blockDim.x) * 8;
        if (at >= row) break;
        Vector v;
        v.whole = *(const uint4*)(x + base + at);
        Vector other;
        if (SOURCE >= 2) other.whole = *(const uint4*)(r + base + at);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float a = D::load(v.part[j]);
            if (SOURCE == 2) {
                other.part[j] = D::store(a + D::load(other.part[j]));
                a = D::load(other.part[j]);
            }
            if (SOURCE == 3) a = D::wrap(a * op_sigmoid(a) * D::load(other.part[j]));
            if (SOURCE == 1 || SOURCE == 2) square += a * a;
            value[i][j] = a;
        }
        if (SOURCE == 2) *(uint4*)(sum + base + at) = other.whole;
    }
#if SOURCE == 1 || SOURCE == 2
    square = block_reduce<Sum>(square, shared);
    const float unit = op_rsqrt(square / (float)row + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (threadIdx.x + i * blockDim.x) * 8;
        if (at >= row) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) value[i][j] = D::wrap(value[i][j] * unit * W::load(__ldg(weight + at + j)));
    }
#endif
#if WHOLE
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if ((threadIdx.x + i * blockDim.x) * 8 >= row) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) most = op_max(fabsf(value[i][j]), most);
    }
    most = block_reduce<Max>(most, shared);
    const float scale = Coder<CODE>::scale_of(most);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
#else
    const i64 groups = (row + LANES * 8 - 1) / (LANES * 8);
#endif
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (threadIdx.x + i * blockDim.x) * 8;
#if !WHOLE
        // Lanes that lie together have a group; those behind the row have nothing.
        if (i * blockDim.x * 8 >= row) break;
        float most = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) most = op_max(at < row ? fabsf(value[i][j]) : 0.0f, most);
        most = largest_of<LANES>(most);
        const float scale = Coder<CODE>::scale_of(most);
#endif
        if (at >= row) continue;
#if !WHOLE
        if (threadIdx.x % LANES == 0) scales[blockIdx.x * groups + at / (LANES * 8)] = scale;
#endif
        union { uint2 whole; u8 part[8]; } c;
#pragma unroll
        for (int j = 0; j < 8; ++j) c.part[j] = Coder<CODE>::of(value[i][j], most, scale);
        *(uint2*)(codes + base + at) = c.whole;
    }
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
        return D::wrap(v * op_sigmoid(v) * D::load(r[base + i]));
#else
        return v;
#endif
    };
#if WHOLE
    float most = 0.0f;
    for (int i = threadIdx.x; i < row; i += blockDim.x) most = op_max(fabsf(value(i)), most);
    most = block_reduce<Max>(most, shared);
    const float scale = Coder<CODE>::scale_of(most);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < row; i += blockDim.x) codes[base + i] = Coder<CODE>::of(value(i), most, scale);
#else
    const int groups = (row + group - 1) / group, lane = threadIdx.x & 31;
    for (int g = threadIdx.x >> 5; g < groups; g += blockDim.x >> 5) {
        const int end = min((g + 1) * group, row);
        float most = 0.0f;
        for (int i = g * group + lane; i < end; i += 32) most = op_max(fabsf(value(i)), most);
        most = largest_of<32>(most);
        const float scale = Coder<CODE>::scale_of(most);
        if (lane == 0) scales[(i64)blockIdx.x * groups + g] = scale;
        for (int i = g * group + lane; i < end; i += 32) codes[base + i] = Coder<CODE>::of(value(i), most, scale);
    }
#endif
}
#endif
