// Codes with scales of rows or of groups of them: of a tensor, of its norm, perhaps after a residual addition, or of the gate
// of an MLP. Floor: what is quantised read twice, the second time from cache, and its codes written once.
// A block makes a row. Defines: D of x, r and the sum; W of the norm's weight; SOURCE, 0 for x itself, 1 for its norm, 2 for
// the norm of its sum with r, 3 for x as the gate of r; CODE of codes, I8, F8E4M3 or F8E5M2; WHOLE, 1 where a row shares a
// scale; TENSOR, 1 where all do; VECTORS of 8 that a thread of `quantize_row` holds, 0 for the others; LANES of such threads that share a
// scale, where a row does not; THREADS of a block of `quantize_row` at most, and RESIDENT such blocks; ROLES of each
// of its warps. Numbers: elements of a row, of a group.

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
// A row of 16-bit floats is held in registers. Its vectors of 8 elements are shared out as `norm.cu` shares them out over the warps of a
// block, so that sums of squares are the very same: a warp here has the vectors of ROLES of those warps, VECTORS of each. With two,
// half as many threads take the divisions of a row, and more rows are on their way at once.
union Vector { uint4 whole; u32 word[4]; D::Raw part[8]; };

// Between two uses of a vector it is kept as it is, not as eight floats.
__device__ inline void keep(Vector& v) { asm volatile("" : "+r"(v.whole.x), "+r"(v.whole.y), "+r"(v.whole.z), "+r"(v.whole.w)); }

#define HELD (ROLES * VECTORS)

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void quantize_row(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const W::Raw* __restrict__ weight,
    u8* __restrict__ codes, float* __restrict__ scales, D::Raw* sum, float eps, Numbers<2> n
) {
    [[maybe_unused]] __shared__ float squares[32], largest[32];
    const int row = (int)n.v[0], lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const i64 base = (i64)blockIdx.x * row;
    auto at = [&](int i) { return (lane + 32 * (warp + i * warps)) * 8; };
    // Gains are weights, and are on their way before the launch ahead has ended, where a thread has room for them.
    [[maybe_unused]] Elements<W, 8> gain[ROLES > 1 ? 1 : VECTORS];
#if (SOURCE == 1 || SOURCE == 2) && ROLES == 1
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        if (at(i) < row) gain[i] = elements_at<W, 8>(weight + at(i));
#endif
    others_may_begin();
    after_others();
    // All are on their way before the first is used; what lies behind the row is zeros.
    Vector value[HELD];
    [[maybe_unused]] Vector other[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        value[i].whole = other[i].whole = make_uint4(0, 0, 0, 0);
        if (at(i) < row) value[i].whole = *(const uint4*)(x + base + at(i));
        if (SOURCE >= 2 && at(i) < row) other[i].whole = *(const uint4*)(r + base + at(i));
    }
#if SOURCE == 3
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float gate = D::load(value[i].part[j]);
            value[i].part[j] = D::store(gate * sigmoid_for<D>(gate) * D::load(other[i].part[j]));
        }
#endif
#if SOURCE == 1 || SOURCE == 2
    float square[ROLES];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#if SOURCE == 2
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 a = pair_of(value[i].word[j], D()), b = pair_of(other[i].word[j], D());
            value[i].part[2 * j] = D::store(a.x + b.x);
            value[i].part[2 * j + 1] = D::store(a.y + b.y);
        }
        if (at(i) < row) *(uint4*)(sum + base + at(i)) = value[i].whole;
#endif
        float& of_role = square[i % ROLES];
        if (i < ROLES) of_role = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 a = pair_of(value[i].word[j], D());
            of_role += a.x * a.x;
            of_role += a.y * a.y;
        }
    }
    // In the order of `norm.cu`.
#pragma unroll
    for (int role = 0; role < ROLES; ++role) {
        for (int step = 16; step > 0; step >>= 1) square[role] += __shfl_xor_sync(~0u, square[role], step);
        if (lane == 0) squares[warp + role * warps] = square[role];
    }
    __syncthreads();
    float all = squares[0];
    for (int w = 1; w < warps * ROLES; ++w) all += squares[w];
    const float unit = op_rsqrt(all / (float)row + eps);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        keep(value[i]);
#if ROLES > 1
        Elements<W, 8> gains = {};
        if (at(i) < row) gains = elements_at<W, 8>(weight + at(i));
#else
        if (at(i) >= row) continue;
        const Elements<W, 8>& gains = gain[i];
#endif
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 a = pair_of(value[i].word[j], D());
            value[i].part[2 * j] = D::store(a.x * unit * W::load(gains.part[2 * j]));
            value[i].part[2 * j + 1] = D::store(a.y * unit * W::load(gains.part[2 * j + 1]));
        }
    }
#endif
#if WHOLE
    u32 larger_pair = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) larger_pair = larger_two(larger_of_vector<D>(value[i].whole), larger_pair, D());
    const float2 two = pair_of(larger_pair, D());
    const float most = largest_of<32>(larger(two.x, larger(two.y, 0.0f)));
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    const Coder<CODE> coder(largest_of<32>(lane < warps ? largest[lane] : 0.0f));
    if (threadIdx.x == 0) scales[blockIdx.x] = coder.scale;
    if (!coder.divisor.near) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (at(i) < row) *(uint2*)(codes + base + at(i)) = codes_by_division<CODE, D>(coder, value[i].whole);
        return;
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        keep(value[i]);
        if (at(i) < row) *(uint2*)(codes + base + at(i)) = codes_nearby<CODE, D>(coder, value[i].whole);
    }
#else
    const i64 groups = (row + LANES * 8 - 1) / (LANES * 8);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
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
