// The sines and cosines of rotary positions, for a kernel that rotates on its way and meets a token more than once. Floor: 8 bytes written
// for each pair. A token has PAIRS cosines and as many sines, in the order of `rotate_tile.cuh`.
// Defines: those of `angles.cuh`, with PAIRS a multiple of 8. Numbers: tokens.

extern "C" __global__ __launch_bounds__(256) void rotary_table(
    const int* __restrict__ positions, float* __restrict__ table, Numbers<1> n
) {
    others_may_begin();
    after_others();
    const i64 all = n.v[0] * PAIRS;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < all; i += gridDim.x * (i64)blockDim.x) {
        // Neighbouring threads write side by side.
        const int at = (int)(i % PAIRS), pair = at % (PAIRS / 2) / 4 * 8 + at / (PAIRS / 2) * 4 + at % 4;
        float* to = table + (i - at) * 2 + at;
        angle_of(positions[i / PAIRS], pair, to[0], to[PAIRS]);
    }
}
