// RWKV-4's weighted average, token by token: a thread has a channel of a sequence, and its sums in registers. The largest exponent is
// kept as the key that it comes from and how many tokens ago, so that it is rounded once, however a
// prompt is cut. Floor: keys, values and outputs over
// bandwidth; long sequences are bound by the latency of a token's four exponentials.
// Numbers: tokens, rows, channels.

#define THREADS 128
// The largest exponent where there was no token.
#define LOWEST -1e30f

extern "C" __global__ __launch_bounds__(THREADS) void wkv(
    const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ w, const float* __restrict__ u,
    const float* __restrict__ before, const int* __restrict__ starts, float* __restrict__ y, float* __restrict__ after,
    Numbers<3> n
) {
    const i64 tokens = n.v[0], rows = n.v[1], channels = n.v[2];
    const i64 tiles = (channels + THREADS - 1) / THREADS, all = rows * tiles;
    for (i64 block = blockIdx.x; block <= all; block += gridDim.x) {
        if (block == all) {
            // Tokens of no sequence.
            for (i64 i = starts[rows] * channels + threadIdx.x; i < tokens * channels; i += THREADS) y[i] = 0.0f;
            continue;
        }
        const i64 row = block / tiles, channel = block % tiles * THREADS + threadIdx.x;
        if (channel >= channels) continue;
        const i64 state = row * 4 * channels + channel;
        const float decay = w[channel], bonus = u[channel];
        float with = before[state], without = before[state + channels];
        float key = without == 0.0f ? LOWEST : before[state + 2 * channels], age = before[state + 3 * channels];
        const i64 end = min((i64)starts[row + 1], tokens);
        for (i64 token = max(starts[row], 0); token < end; ++token) {
            const float x = k[token * channels + channel], value = v[token * channels + channel];
            const float largest = fmaf(age, decay, key), own = x + bonus, most = fmaxf(largest, own);
            const float old = op_exp(largest - most), now = op_exp(own - most);
            y[token * channels + channel] = fmaf(old, with, now * value) / fmaf(old, without, now);
            age += 1.0f;
            const float decayed = fmaf(age, decay, key);
            if (decayed > x) {
                const float part = op_exp(x - decayed);
                with = fmaf(part, value, with);
                without += part;
            } else {
                const float part = op_exp(decayed - x);
                with = fmaf(part, with, value);
                without = fmaf(part, without, 1.0f);
                key = x;
                age = 0.0f;
            }
        }
        after[state] = with;
        after[state + channels] = without;
        after[state + 2 * channels] = key;
        after[state + 3 * channels] = age;
    }
}
