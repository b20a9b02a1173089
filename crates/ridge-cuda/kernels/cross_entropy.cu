// Loss of target tokens, and its gradient from the saved logarithm of the sum of exponentials. Floor: the logits read
// once, and the gradient written once.
// A block makes a row: each thread keeps a largest logit and a sum of its own (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax"), which are joined in an order that the block's size fixes.
// Defines: D, of logits; SAVING, whether logarithms of sums are given; for what is made of products in place, SOFTCAP, 0 or
// 1, with CAP.
// Numbers: rows, columns.

// Elements that a thread takes at a time: 16 bytes, where rows are whole such parts.
#define PART (16 / (int)sizeof(D::Raw))
struct __align__(16) Part { D::Raw x[PART]; };

// Calls `each` with every element of a row that is this thread's, and its place; it may change it, if `changed`.
template <bool changed, class F> __device__ inline void over_row(void* data, i64 row, i64 columns, F each) {
    D::Raw* at_row = (D::Raw*)data + row * columns;
    if (columns % PART == 0) {
        for (i64 i = threadIdx.x; i < columns / PART; i += blockDim.x) {
            Part part = ((const Part*)at_row)[i];
#pragma unroll
            for (int j = 0; j < PART; ++j) part.x[j] = D::store(each(D::load(part.x[j]), i * PART + j));
            if (changed) ((Part*)at_row)[i] = part;
        }
    } else {
        for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
            const float y = each(D::load(at_row[i]), i);
            if (changed) at_row[i] = D::store(y);
        }
    }
}

// Adds `x` to a sum of exponentials less the largest.
__device__ inline void add(float& most, float& sum, float x) {
    if (x > most) {
        sum = most == -INF ? 1.0f : fmaf(sum, expf(most - x), 1.0f);
        most = x;
    } else {
        sum += expf(x - most);
    }
}

__device__ inline void join(float& most, float& sum, float other, float others) {
    const float largest = fmaxf(most, other);
    const float mine = most == -INF ? 0.0f : expf(most - largest), its = other == -INF ? 0.0f : expf(other - largest);
    sum = sum * mine + others * its;
    most = largest;
}

extern "C" __global__ void cross_entropy(
    const void* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ loss, float* __restrict__ lse,
    Numbers<2> n
) {
    __shared__ float mosts[32], sums[32];
    for (i64 row = blockIdx.x; row < n.v[0]; row += gridDim.x) {
        float most = -INF, sum = 0.0f;
        over_row<false>((void*)logits, row, n.v[1], [&](float x, i64) { add(most, sum, x); return x; });
        for (int step = 16; step > 0; step >>= 1)
            join(most, sum, __shfl_xor_sync(0xffffffffu, most, step), __shfl_xor_sync(0xffffffffu, sum, step));
        if ((threadIdx.x & 31) == 0) { mosts[threadIdx.x >> 5] = most; sums[threadIdx.x >> 5] = sum; }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < (int)blockDim.x >> 5; ++warp) join(most, sum, mosts[warp], sums[warp]);
            const float log = logf(sum) + most;
            const int target = targets[row];
            const bool known = target >= 0 && target < n.v[1];
            loss[row] = known ? log - at<D>(logits, row * n.v[1] + target) : 0.0f;
#if SAVING
            lse[row] = log;
#endif
        }
        __syncthreads();
    }
}

extern "C" __global__ void cross_entropy_backward(
    const void* __restrict__ logits, const int* __restrict__ targets, const float* __restrict__ lse,
    const float* __restrict__ dloss, void* __restrict__ dlogits, Numbers<2> n
) {
    for (i64 row = blockIdx.x; row < n.v[0]; row += gridDim.x) {
        const int target = targets[row];
        const bool known = target >= 0 && target < n.v[1];
        const float log = lse[row], slope = known ? dloss[row] : 0.0f;
        for (i64 i = threadIdx.x; i < n.v[1]; i += blockDim.x) {
            const float share = op_exp(at<D>(logits, row * n.v[1] + i) - log);
            put<D>(dlogits, row * n.v[1] + i, known ? (share - (i == target ? 1.0f : 0.0f)) * slope : 0.0f);
        }
    }
}

#ifdef SOFTCAP
__device__ inline float capped(float x) { return SOFTCAP ? CAP * tanhf(x / CAP) : x; }

// Of products, in place: losses with the z-loss, and the cotangents of products for a cotangent of 1 of each loss.
extern "C" __global__ void loss_and_gradient(
    void* __restrict__ products, const int* __restrict__ targets, float* __restrict__ loss, float z, Numbers<2> n
) {
    __shared__ float mosts[32], sums[32];
    for (i64 row = blockIdx.x; row < n.v[0]; row += gridDim.x) {
        float most = -INF, sum = 0.0f;
        over_row<false>(products, row, n.v[1], [&](float x, i64) { add(most, sum, capped(x)); return x; });
        for (int step = 16; step > 0; step >>= 1)
            join(most, sum, __shfl_xor_sync(0xffffffffu, most, step), __shfl_xor_sync(0xffffffffu, sum, step));
        if ((threadIdx.x & 31) == 0) { mosts[threadIdx.x >> 5] = most; sums[threadIdx.x >> 5] = sum; }
        __syncthreads();
        most = mosts[0];
        sum = sums[0];
        for (int warp = 1; warp < (int)blockDim.x >> 5; ++warp) join(most, sum, mosts[warp], sums[warp]);
        const float log = logf(sum) + most;
        const int target = targets[row];
        const bool known = target >= 0 && target < n.v[1];
        if (threadIdx.x == 0)
            loss[row] = known ? log - capped(at<D>(products, row * n.v[1] + target)) + z * log * log : 0.0f;
        __syncthreads();
        const float factor = 1.0f + 2.0f * z * log;
        over_row<true>(products, row, n.v[1], [&](float product, i64 i) {
            const float x = capped(product);
            float change = fmaf(expf(x - log), factor, i == target ? -1.0f : 0.0f);
            if (SOFTCAP) change *= 1.0f - (x / CAP) * (x / CAP);
            return known ? change : 0.0f;
        });
        __syncthreads();
    }
}

extern "C" __global__ void sum_losses(const float* __restrict__ losses, float* __restrict__ out, Numbers<1> n) {
    __shared__ float shared[32];
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < n.v[0]; i += blockDim.x) sum += losses[i];
    sum = block_reduce<Sum>(sum, shared);
    if (threadIdx.x == 0) *out = sum;
}

extern "C" __global__ void rounded(const float* __restrict__ x, void* __restrict__ out, Numbers<1> n) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += (i64)gridDim.x * blockDim.x) put<D>(out, i, x[i]);
}
#endif
