// The short causal convolution of recurrent models over the sequences of a step, and the inputs behind the step. A thread makes an element of
// one or the other. Floor: x, y and both states once over bandwidth; the taps' other reads of x come from cache.
// Defines: D of x and the states, W of the weight, TAPS. Numbers: tokens, channels, sequences.

#define KEPT (TAPS - 1)

extern "C" __global__ void causal_conv1d(
    const D::Raw* __restrict__ x, const W::Raw* __restrict__ w, const D::Raw* __restrict__ state, const int* __restrict__ ids,
    const int* __restrict__ starts, float* __restrict__ y, D::Raw* __restrict__ behind, Numbers<3> n
) {
    others_may_begin();
    after_others();
    const i64 channels = n.v[1], made = n.v[0] * channels, all = made + n.v[2] * KEPT * channels;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < all; i += gridDim.x * (i64)blockDim.x) {
        const i64 row = (i < made ? i : i - made) / channels, c = (i < made ? i : i - made) - row * channels;
        if (i < made) {
            const int id = ids[row];
            float sum = 0.0f;
            if (id >= 0 && id < n.v[2]) {
                const i64 into = row - starts[id];
                float input[TAPS];
#pragma unroll
                for (int back = 0; back < TAPS; ++back)
                    input[back] = D::load(
                        into >= back ? x[(row - back) * channels + c] : state[(id * KEPT + KEPT + into - back) * channels + c]
                    );
                sum = input[0] * W::load(w[c * TAPS + KEPT]);
#pragma unroll
                for (int back = 1; back < TAPS; ++back) sum = sum + input[back] * W::load(w[c * TAPS + KEPT - back]);
            }
            y[i] = sum;
        } else {
            const i64 sequence = row / KEPT, nth = row % KEPT, count = starts[sequence + 1] - starts[sequence];
            const i64 back = KEPT - nth;
            behind[i - made] = back <= count ? x[(starts[sequence + 1] - back) * channels + c]
                                             : state[(sequence * KEPT + nth + count) * channels + c];
        }
    }
}
