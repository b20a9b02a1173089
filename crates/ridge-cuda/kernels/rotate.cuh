// Rotary positions. An angle is taken in f64 and brought to one turn before its sine and cosine are taken in f32: at
// position 10^6 an angle in f32 would be off by a thirtieth of a radian.
// Defines: D of what is rotated; PAIRS that are rotated, 0 for none; FREQUENCIES, radians a position; SCALE; NORM, 1 where heads are
// normed by their root mean square before, with NORM_TYPE of what they are multiplied with.

#if PAIRS
__constant__ double frequency[PAIRS] = {FREQUENCIES};

__device__ inline void angles(int position, float* cosine, float* sine) {
    for (int i = threadIdx.x; i < PAIRS; i += blockDim.x) {
        const double turn = 6.283185307179586476925, angle = (double)position * frequency[i];
        float s, c;
        sincosf((float)(angle - turn * rint(angle * (1.0 / turn))), &s, &c);
        cosine[i] = (float)((double)c * SCALE);
        sine[i] = (float)((double)s * SCALE);
    }
    __syncthreads();
}
#endif

// A head, with its factor and gains where it is normed.
struct Head {
    const D::Raw* x;
#if NORM
    const NORM_TYPE::Raw* gain;
    float unit;
    __device__ float operator[](int i) const { return D::wrap(D::load(x[i]) * unit * NORM_TYPE::load(gain[i])); }
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
