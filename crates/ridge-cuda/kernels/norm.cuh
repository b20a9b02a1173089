// Root-mean-square norm of one row by a block that needs it on the way, with the very sums that `norm.cu` makes.

// The factor of a row, from the first THREADS threads of the block; given to all. The row is whole vectors.
template <class D, int THREADS> __device__ inline float unit_of_row(
    const typename D::Raw* x, int row, float eps, float* shared
) {
    const int wide = 16 / (int)sizeof(typename D::Raw);
    float square = 0.0f;
    if (threadIdx.x < THREADS) {
        for (int at = threadIdx.x * wide; at < row; at += THREADS * wide) {
            union { uint4 whole; typename D::Raw part[16 / sizeof(typename D::Raw)]; } a;
            a.whole = *(const uint4*)(x + at);
#pragma unroll
            for (int i = 0; i < wide; ++i) square += D::load(a.part[i]) * D::load(a.part[i]);
        }
        for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
        if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = square;
    }
    __syncthreads();
    square = shared[0];
    for (int warp = 1; warp < THREADS / 32; ++warp) square += shared[warp];
    return op_rsqrt(square / (float)row + eps);
}

// A vector of the row, normed and rounded to D; the row is of Row, which is D or f32.
template <class D, class W, class Row = D> __device__ inline uint4 normed(
    const uint4 (&x)[sizeof(typename Row::Raw) / sizeof(typename D::Raw)], const typename W::Raw* gain, float unit
) {
    const int wide = 16 / (int)sizeof(typename D::Raw);
    union { uint4 whole; typename D::Raw part[wide]; } a;
    const typename Row::Raw* from = (const typename Row::Raw*)x;
    const Elements<W, wide> gains = elements_at<W, wide>(gain);
#pragma unroll
    for (int i = 0; i < wide; ++i) a.part[i] = D::store(Row::load(from[i]) * unit * W::load(gains.part[i]));
    return a.whole;
}
template <class D, class W> __device__ inline uint4 normed(uint4 x, const typename W::Raw* gain, float unit) {
    const uint4 one[1] = {x};
    return normed<D, W, D>(one, gain, unit);
}
