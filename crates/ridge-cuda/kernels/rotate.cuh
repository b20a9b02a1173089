// Heads that are rotated by the angles of `angles.cuh`.
// Defines: those of `angles.cuh`; D of what is rotated; NORM, 1 where heads are normed by their root mean square before, with NORM_TYPE of
// what they are multiplied with; LATENT, 1 where a row is no head yet: a latent, which is normed, and what is rotated behind it, which goes
// ahead of it, with INTERLEAVED, 1 where neighbours are pairs.

#if PAIRS
// Those of a position; the block must meet before it takes them.
__device__ inline void angles_ahead(int position, float* cosine, float* sine) {
    for (int i = threadIdx.x; i < PAIRS; i += blockDim.x) angle_of(position, i, cosine[i], sine[i]);
}

__device__ inline void angles(int position, float* cosine, float* sine) {
    angles_ahead(position, cosine, sine);
    __syncthreads();
}
#endif

// A head, with its factor and gains where it is normed.
struct Head {
    const D::Raw* x;
#if NORM
    const NORM_TYPE::Raw* gain;
    float unit;
#if LATENT
    __device__ float operator[](int i) const {
        if (i >= 2 * PAIRS) return D::wrap(D::load(x[i - 2 * PAIRS]) * unit * NORM_TYPE::load(gain[i - 2 * PAIRS]));
        return D::load(x[DIM - 2 * PAIRS + (INTERLEAVED ? i % PAIRS * 2 + i / PAIRS : i)]);
    }
#else
    __device__ float operator[](int i) const { return D::wrap(D::load(x[i]) * unit * NORM_TYPE::load(gain[i])); }
#endif
#else
    __device__ float operator[](int i) const { return D::load(x[i]); }
#endif
};

// Element i of a head, rotated.
__device__ inline float rotated(Head x, int i, const float* cosine, const float* sine) {
#if PAIRS
    if (i < PAIRS) return x[i] * cosine[i] - x[i + PAIRS] * sine[i];
    if (i < 2 * PAIRS) return x[i] * cosine[i - PAIRS] + x[i - PAIRS] * sine[i - PAIRS];
#endif
    return x[i];
}
