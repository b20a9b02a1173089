// Codes with scales: how a number becomes a code, as the meaning of `quantize` has it, and how tensor cores multiply codes.

// `of(x, amax, scale)` is the code of x in a unit whose largest magnitude is `amax`, and whose scale is `scale_of(amax)`. Where an
// element lies just between two codes every operation counts.
template <class C> struct Coder;
template <> struct Coder<F8E4M3> {
    __device__ static float scale_of(float amax) { return amax / 448.0f; }
    __device__ static u8 of(float x, float, float scale) { return code_of_f8(x / (scale == 0.0f ? 1.0f : scale)); }
};
template <> struct Coder<F8E5M2> {
    __device__ static float scale_of(float amax) { return amax / 57344.0f; }
    __device__ static u8 of(float x, float, float scale) { return code_of_e5m2(x / (scale == 0.0f ? 1.0f : scale)); }
};
template <> struct Coder<I8> {
    __device__ static float scale_of(float amax) { return amax / 127.0f; }
    __device__ static u8 of(float x, float amax, float) {
        const float nearest = floorf(x * (127.0f / 128.0f) / (amax == 0.0f ? 1.0f : amax) * 128.0f + 0.5f);
        if (nearest != nearest) return 0;
        return (u8)(i8)(int)fminf(fmaxf(nearest, -127.0f), 127.0f);
    }
};

// Elements of a row of a group that shares a scale, and of the side of a square block that does.
#define BLOCK 128

// The largest of SPAN lanes that lie together; NaN if there is one.
template <int SPAN> __device__ inline float largest_of(float x) {
#pragma unroll
    for (int step = SPAN / 2; step > 0; step >>= 1) x = op_max(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
