// What lies between the two products of a Mamba-2 layer for rows of few tokens, in one launch: a short causal convolution with SiLU, rounded to D, and
// a gated linear recurrence of what it gives, both states in place; with FACTORS also the steps softplus(dt + offset), at least `least`, and
// log decays -step exp(rate); with GATE the skip of the input and the gate, swiglu(z, y + skip x). A block has COLUMNS columns of the state
// of a head of a sequence, whose sums are those of `recurrence.cu`, and convolves what it needs: the columns of x, and q and k of the head's
// group. The blocks of a group convolve the same q and k, so the state of these channels is written by the block that is last to have read it;
// nobody waits for it. States and taps do not depend on the launch ahead, and are read before it has ended.
// Floor: the states' bytes over bandwidth.
// Defines: D of x, the convolution's states and what it gives; W of taps; TAPS; BIAS, SILU, FACTORS and GATE, 0 or 1; BIAS_TYPE; STEP_TYPE and RATE_TYPE
// of offsets and rates, SKIP_TYPE; KEY, a multiple of 4; LINES of `lines.cuh`. Numbers: tokens, rows, groups, heads, values of a head, lines of the
// recurrence's table and of the convolution's, channels, elements from a token of x to the next, where channels, z and dt begin in it, and the first
// channel of the recurrence's x, q and k. `counters` are zeros, one for each row and group, and are zeros again in the end.

#define SLICES 4
#define COLUMNS 32
#define THREADS (SLICES * COLUMNS)
#define MINE (KEY / SLICES)
#define KEPT (TAPS - 1)
// Channels of a block, its columns of x first, and those of a thread.
#define ALL (COLUMNS + 2 * KEY)
#define CHANNELS ((ALL + THREADS - 1) / THREADS)

__device__ inline float over_slices(Compensated sum) {
#pragma unroll
    for (int step = 1; step < SLICES; step *= 2) sum.add_other(step);
    return sum.value();
}

__device__ inline float finish(float sum, float bias) {
    if (BIAS) sum = sum + bias;
    return D::wrap(SILU ? sum * op_sigmoid(sum) : sum);
}

// log(1 + exp(x)) as the graph's primitives have it.
__device__ inline float softplus(float x) {
    const float e = op_exp(-fabsf(x)), u = 1.0f + e;
    return fmaxf(x, 0.0f) + (u == 1.0f ? e : op_log(u) * e / (u - 1.0f));
}

extern "C" __global__ __launch_bounds__(THREADS, MINE > 32 ? 2 : 4) void conv_recurrence(
    const volatile D::Raw* x, const W::Raw* __restrict__ w, const BIAS_TYPE::Raw* __restrict__ bias, const D::Raw* kept_before,
    const int* __restrict__ lines, const int* __restrict__ starts, const float* before,
    const volatile STEP_TYPE::Raw* step, const volatile RATE_TYPE::Raw* rate, const volatile SKIP_TYPE::Raw* skip, void* y, D::Raw* convolved,
    D::Raw* kept_after, float* after, u32* counters, float least, Numbers<15> n
) {
    __shared__ float qs[KEY], ks[KEY], xs[COLUMNS];
    __shared__ bool last;
    const i64 tokens = n.v[0], rows = n.v[1], groups = n.v[2], heads = n.v[3], value = n.v[4], channels = n.v[7];
    const i64 tiles = (value + COLUMNS - 1) / COLUMNS, width = heads * value;
    const int t = threadIdx.x, slice = t % SLICES;
    others_may_begin();
    auto gate_of = [&](i64 token, i64 column) { return GATE ? D::load(x[token * n.v[8] + n.v[10] + column]) : 0.0f; };
    auto put = [&](i64 token, i64 column, float of_y, float of_x, float of_skip, float z) {
        const i64 at = token * width + column;
#if GATE
        ((float*)y)[at] = gated<F32>(z, D::wrap(of_y) + of_x * of_skip);
#else
        ((D::Raw*)y)[at] = D::store(of_y);
        convolved[at] = D::store(of_x);
#endif
    };
    if (blockIdx.x == rows * heads * tiles) {
        // Tokens of no sequence.
        after_others();
        const i64 first = max(starts[rows], 0);
        for (i64 i = t; i < (tokens - first) * width; i += THREADS) {
            const i64 column = i % width;
            const float of_x = finish(0.0f, BIAS ? BIAS_TYPE::load(bias[n.v[12] + column]) : 0.0f);
            const i64 token = first + i / width;
            put(token, column, 0.0f, of_x, GATE ? SKIP_TYPE::load(skip[column / value]) : 0.0f, gate_of(token, column));
        }
        return;
    }
    const i64 tile = blockIdx.x % tiles, head = blockIdx.x / tiles % heads, row = blockIdx.x / tiles / heads;
    const i64 group = head * groups / heads, column = tile * COLUMNS + t / SLICES;
    const bool has = column < value;
    const i64 from_line = line_of(lines, n.v[5], row, 0), to_line = line_of(lines, n.v[5], row, 1);
    const i64 kept_from = line_of(lines, n.v[6], row, 0), kept_to = line_of(lines, n.v[6], row, 1);
    const i64 base = (from_line * heads + head) * KEY, to_base = (to_line * heads + head) * KEY;
    float s[MINE];
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const int i = j * SLICES + slice;
        s[j] = has && from_line >= 0 ? before[(base + i) * value + column] : 0.0f;
    }
    // This thread's channels, -1 for none; their taps and the inputs before.
    int channel[CHANNELS];
    float tap[CHANNELS][TAPS], offset[CHANNELS];
    D::Raw past[CHANNELS][KEPT];
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        const int i = t + j * THREADS;
        if (i < COLUMNS) channel[j] = tile * COLUMNS + i < value ? (int)(n.v[12] + head * value + tile * COLUMNS) + i : -1;
        else if (i < COLUMNS + KEY) channel[j] = (int)(n.v[13] + group * KEY) + i - COLUMNS;
        else channel[j] = i < ALL ? (int)(n.v[14] + group * KEY) + i - COLUMNS - KEY : -1;
        const bool is = channel[j] >= 0;
        offset[j] = BIAS && is ? BIAS_TYPE::load(bias[channel[j]]) : 0.0f;
#pragma unroll
        for (int k = 0; k < TAPS; ++k) tap[j][k] = is ? W::load(w[channel[j] * TAPS + k]) : 0.0f;
#pragma unroll
        for (int k = 0; k < KEPT; ++k)
            past[j][k] = is && kept_from >= 0 ? kept_before[(kept_from * KEPT + k) * channels + channel[j]] : D::store(0.0f);
    }
    const i64 end = min((i64)starts[row + 1], tokens);
    after_others();
#if FACTORS
    const float slope = -op_exp(RATE_TYPE::load(rate[head]));
#endif
    const float of_skip = GATE ? SKIP_TYPE::load(skip[head]) : 0.0f;
    for (i64 token = max(starts[row], 0); token < end; ++token) {
        // What the end of this turn wants is asked for first.
        const float z = has && slice == 0 ? gate_of(token, head * value + column) : 0.0f;
        float result[CHANNELS];
#pragma unroll
        for (int j = 0; j < CHANNELS; ++j) {
            if (channel[j] < 0) continue;
            const D::Raw now = x[token * n.v[8] + n.v[9] + channel[j]];
            float sum = D::load(now) * tap[j][KEPT];
#pragma unroll
            for (int back = 1; back < TAPS; ++back) sum = sum + D::load(past[j][KEPT - back]) * tap[j][KEPT - back];
            result[j] = finish(sum, offset[j]);
#pragma unroll
            for (int k = 0; k + 1 < KEPT; ++k) past[j][k] = past[j][k + 1];
            past[j][KEPT - 1] = now;
        }
#if FACTORS
        const float dt = D::load(x[token * n.v[8] + n.v[11] + head]);
        const float of_head = fmaxf(softplus(dt + STEP_TYPE::load(step[head])), least), log_decay = of_head * slope;
#else
        const float of_head = step[token * heads + head], log_decay = rate[token * heads + head];
#endif
        const float keep = op_exp(log_decay);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < CHANNELS; ++j) {
            const int i = t + j * THREADS;
            if (channel[j] < 0) continue;
            if (i < COLUMNS) xs[i] = result[j];
            else if (i < COLUMNS + KEY) qs[i - COLUMNS] = result[j];
            else ks[i - COLUMNS - KEY] = result[j];
        }
        __syncthreads();
        const float of_x = has ? xs[t / SLICES] : 0.0f, added = of_x * of_head;
        Compensated sum;
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const int i = j * SLICES + slice;
            s[j] = fmaf(ks[i], added, s[j] * keep);
            sum.add_product(qs[i], s[j]);
        }
        const float of_y = over_slices(sum);
        if (has && slice == 0) put(token, head * value + column, of_y, of_x, of_skip, z);
    }
    // All threads of the block have what was kept in registers.
    __syncthreads();
    if (t == 0) {
        const u32 others = (u32)(heads / groups * tiles);
        u32* counter = counters + row * groups + group;
        __threadfence();
        last = atomicAdd(counter, 1) == others - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        if (channel[j] < 0 || kept_to < 0 || !(last || t + j * THREADS < COLUMNS)) continue;
#pragma unroll
        for (int k = 0; k < KEPT; ++k) kept_after[(kept_to * KEPT + k) * channels + channel[j]] = past[j][k];
    }
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const int i = j * SLICES + slice;
        if (has && to_line >= 0) after[(to_base + i) * value + column] = s[j];
    }
}
