// Loss of target tokens, and its gradient from the saved logarithm of the sum of exponentials. Floor: the logits read
// once, and the gradient written once.
// A block makes a row: each thread keeps a largest logit and a sum of its own (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax"), which are joined in an order that the block's size fixes.
// Defines: D, of logits; SAVING, whether logarithms of sums are given; for what is made of products in place, SOFTCAP, 0 or
// 1, with CAP.
// Numbers: rows, columns; for what is made in place, the elements from one row to the next, which are zero behind the
// columns of a gradient.

// Elements that a thread takes at a time: 16 bytes, where rows are whole such parts.
#define PART (16 / (int)sizeof(D::Raw))
struct __align__(16) Part { D::Raw x[PART]; };

// Replaces every element of a row that is this thread's by what `each` makes of it and its place.
template <class F> __device__ inline void over_row(void* data, i64 row, i64 stride, F each) {
    D::Raw* at_row = (D::Raw*)data + row * stride;
    if (stride % PART == 0) {
        for (i64 i = threadIdx.x; i < stride / PART; i += blockDim.x) {
            Part part = ((const Part*)at_row)[i];
#pragma unroll
            for (int j = 0; j < PART; ++j) part.x[j] = D::store(each(D::load(part.x[j]), i * PART + j));
            ((Part*)at_row)[i] = part;
        }
    } else {
        for (i64 i = threadIdx.x; i < stride; i += blockDim.x) at_row[i] = D::store(each(D::load(at_row[i]), i));
    }
}

// Adds `count` numbers to a sum of exponentials less the largest, which is moved once for all of them.
template <int count> __device__ inline void add(float& most, float& sum, const float (&x)[count]) {
    float largest = most;
#pragma unroll
    for (int j = 0; j < count; ++j) largest = fmaxf(largest, x[j]);
    // Numbers that are all -INF add nothing; NaN does, which fmaxf passes over.
    const float base = largest == -INF ? 0.0f : largest;
    if (largest > most) {
        sum *= expf(most - base);
        most = largest;
    }
#pragma unroll
    for (int j = 0; j < count; ++j) sum += expf(x[j] - base);
}

// The largest of what `value` makes of the elements of a row that are this thread's, and the sum of exponentials less it.
template <class F>
__device__ inline void sum_row(const void* data, i64 row, i64 columns, i64 stride, float& most, float& sum, F value) {
    const D::Raw* at_row = (const D::Raw*)data + row * stride;
    if (stride % PART == 0) {
        for (i64 i = threadIdx.x; i < (columns + PART - 1) / PART; i += blockDim.x) {
            const Part part = ((const Part*)at_row)[i];
            float x[PART];
#pragma unroll
            for (int j = 0; j < PART; ++j) x[j] = i * PART + j < columns ? value(D::load(part.x[j])) : -INF;
            add(most, sum, x);
        }
    } else {
        for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
            const float x[1] = {value(D::load(at_row[i]))};
            add(most, sum, x);
        }
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
        sum_row(logits, row, n.v[1], n.v[1], most, sum, [](float x) { return x; });
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
    void* __restrict__ products, const int* __restrict__ targets, float* __restrict__ loss, float z, Numbers<3> n
) {
    __shared__ float mosts[32], sums[32];
    for (i64 row = blockIdx.x; row < n.v[0]; row += gridDim.x) {
        float most = -INF, sum = 0.0f;
        sum_row(products, row, n.v[1], n.v[2], most, sum, [](float x) { return capped(x); });
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
            loss[row] = known ? log - capped(at<D>(products, row * n.v[2] + target)) + z * log * log : 0.0f;
        __syncthreads();
        const float factor = 1.0f + 2.0f * z * log;
        over_row(products, row, n.v[2], [&](float product, i64 i) {
            const float x = capped(product);
            float change = fmaf(expf(x - log), factor, i == target ? -1.0f : 0.0f);
            if (SOFTCAP) change *= 1.0f - (x / CAP) * (x / CAP);
            return known && i < n.v[1] ? change : 0.0f;
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

// Numbers: elements, elements of the result, which are zero behind those.
extern "C" __global__ void padded(const void* __restrict__ x, void* __restrict__ out, Numbers<2> n) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[1]; i += (i64)gridDim.x * blockDim.x)
        ((D::Raw*)out)[i] = i < n.v[0] ? ((const D::Raw*)x)[i] : D::store(0.0f);
}

extern "C" __global__ void rounded(const float* __restrict__ x, void* __restrict__ out, Numbers<1> n) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += (i64)gridDim.x * blockDim.x) put<D>(out, i, x[i]);
}
#endif
