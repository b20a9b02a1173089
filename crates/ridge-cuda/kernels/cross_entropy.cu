// Loss of target tokens, and its gradient from the saved logarithm of the sum of exponentials. Floor: the logits read
// once, and the gradient written once.
// A block makes a row: each thread keeps a largest logit and a sum of its own (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax"), which are joined in an order that the block's size fixes.
// Defines: D, of logits; SAVING, whether logarithms of sums are given.
// Numbers: rows, columns.

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
        for (i64 i = threadIdx.x; i < n.v[1]; i += blockDim.x) {
            const float x = at<D>(logits, row * n.v[1] + i);
            if (x > most) {
                sum = most == -INF ? 1.0f : fmaf(sum, expf(most - x), 1.0f);
                most = x;
            } else {
                sum += expf(x - most);
            }
        }
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
            const float share = expf(at<D>(logits, row * n.v[1] + i) - log);
            put<D>(dlogits, row * n.v[1] + i, known ? (share - (i == target ? 1.0f : 0.0f)) * slope : 0.0f);
        }
    }
}
