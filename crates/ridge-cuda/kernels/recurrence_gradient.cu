// Gradients of linear recurrences whose state is a matrix. A block takes a head of a sequence, 32 columns of the state at a time:
// four threads a column, which share its keys. A first pass over the tokens keeps the state before every n-th of n * n; the states
// of each stretch between two of them are computed again when the sweep from the last token comes to it. What is kept goes to
// scratch, where a thread reads what it wrote. Cotangents are of f64, since what is kept of a state may cancel. Sums over columns are shuffles, and one over the four warps in shared memory.
// Floor: the operands' bytes over bandwidth; long sequences are bound by the latency of a token.
// Rows of LEAST tokens and more are left to other kernels.
// Numbers: tokens, rows, groups, heads, value, n. KEY, DECAYS (1 or KEY), LOW_RANK (0 or 1) and LEAST come from the instance.

#define SLICES 4
#define COLUMNS 32
#define THREADS (SLICES * COLUMNS)
#define WARPS (THREADS / 32)
#define MINE ((KEY + SLICES - 1) / SLICES)
#define KINDS (LOW_RANK ? 5 : 3)

__device__ inline float over_slices(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__device__ inline double over_slices(double x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Over the eight columns of a warp.
__device__ inline double over_columns(double x) {
    x += __shfl_xor_sync(0xffffffff, x, 4);
    x += __shfl_xor_sync(0xffffffff, x, 8);
    return x + __shfl_xor_sync(0xffffffff, x, 16);
}

struct TokenKeys {
    // Keys behind the last are zeros.
    float q[MINE * SLICES], k[MINE * SLICES], kept[MINE * SLICES], erase[MINE * SLICES], write[MINE * SLICES];
    // What is kept in f64, for cotangents.
    double share[MINE * SLICES];
};

// The state behind a token, whose value of this column is x.
__device__ inline void advance(float (&s)[MINE], const TokenKeys& at, float x, int slice) {
    float erased = 0.0f;
    if (LOW_RANK) {
        #pragma unroll
        for (int j = 0; j < MINE; ++j) erased = fmaf(at.erase[j * SLICES + slice], s[j], erased);
        erased = over_slices(erased);
    }
    #pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const int i = j * SLICES + slice;
        float next = s[j] * at.kept[i];
        if (LOW_RANK) next = fmaf(at.write[i], erased, next);
        s[j] = fmaf(at.k[i], x, next);
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void recurrence_gradient(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
    const float* __restrict__ decay, const float* __restrict__ before, const int* __restrict__ starts,
    const float* __restrict__ erase, const float* __restrict__ write, const float* __restrict__ dy,
    const float* __restrict__ dafter, float* __restrict__ dq, float* __restrict__ dk, float* __restrict__ dv,
    float* __restrict__ ddecay, float* __restrict__ dbefore, float* __restrict__ derase, float* __restrict__ dwrite,
    float* __restrict__ scratch, Numbers<6> n
) {
    __shared__ TokenKeys at;
    __shared__ double parts[KINDS][WARPS][MINE * SLICES];
    const i64 tokens = n.v[0], rows = n.v[1], groups = n.v[2], heads = n.v[3], value = n.v[4], stretch = n.v[5];
    const i64 all = rows * heads;
    const int t = threadIdx.x, slice = t % SLICES, warp = t / 32, lane = t % 32;
    float* firsts = scratch + (i64)blockIdx.x * 2 * stretch * MINE * THREADS;
    float* states = firsts + stretch * MINE * THREADS;
    for (int i = t; i < MINE * SLICES; i += THREADS) {
        at.q[i] = at.k[i] = at.kept[i] = at.erase[i] = at.write[i] = 0.0f;
        at.share[i] = 0.0;
    }
    for (i64 piece = blockIdx.x; piece <= all; piece += gridDim.x) {
        if (piece == all) {
            // Tokens of no sequence.
            const i64 from = starts[rows] * heads, to = tokens * heads;
            for (i64 i = from * KEY + t; i < to * KEY; i += THREADS) {
                dq[i] = dk[i] = 0.0f;
                if (LOW_RANK) derase[i] = dwrite[i] = 0.0f;
            }
            for (i64 i = from * DECAYS + t; i < to * DECAYS; i += THREADS) ddecay[i] = 0.0f;
            for (i64 i = from * value + t; i < to * value; i += THREADS) dv[i] = 0.0f;
            continue;
        }
        const i64 head = piece % heads, row = piece / heads, base = piece * KEY;
        const i64 begin = max((i64)starts[row], (i64)0), end = min((i64)starts[row + 1], tokens);
        if (end - begin >= LEAST) continue;
        auto load_keys = [&](i64 token) {
            const i64 place = token * heads + head, group = (token * groups + head * groups / heads) * KEY;
            __syncthreads();
            for (int i = t; i < KEY; i += THREADS) {
                at.q[i] = q[group + i];
                at.k[i] = k[group + i];
                at.share[i] = exp((double)decay[place * DECAYS + (DECAYS == 1 ? 0 : i)]);
                at.kept[i] = (float)at.share[i];
                if (LOW_RANK) {
                    at.erase[i] = erase[place * KEY + i];
                    at.write[i] = write[place * KEY + i];
                }
            }
            __syncthreads();
        };
        for (i64 first = 0; first < value; first += COLUMNS) {
            const i64 column = first + t / SLICES;
            const bool has = column < value;
            auto state_of = [&](const float* from, int j) {
                const int i = j * SLICES + slice;
                return has && i < KEY ? from[(base + i) * value + column] : 0.0f;
            };
            auto value_of = [&](const float* x, i64 token) { return has ? x[(token * heads + head) * value + column] : 0.0f; };
            float s[MINE];
            double g[MINE];
            #pragma unroll
            for (int j = 0; j < MINE; ++j) s[j] = state_of(before, j), g[j] = state_of(dafter, j);
            for (i64 token = begin; token < end; ++token) {
                const i64 nth = token - begin;
                if (nth % stretch == 0) {
                    #pragma unroll
                    for (int j = 0; j < MINE; ++j) firsts[(nth / stretch * MINE + j) * THREADS + t] = s[j];
                }
                load_keys(token);
                advance(s, at, value_of(v, token), slice);
            }
            for (i64 part = (end - begin + stretch - 1) / stretch - 1; part >= 0; --part) {
                const i64 from = begin + part * stretch, to = min(from + stretch, end);
                #pragma unroll
                for (int j = 0; j < MINE; ++j) s[j] = firsts[(part * MINE + j) * THREADS + t];
                for (i64 token = from; token < to; ++token) {
                    #pragma unroll
                    for (int j = 0; j < MINE; ++j) states[((token - from) * MINE + j) * THREADS + t] = s[j];
                    load_keys(token);
                    advance(s, at, value_of(v, token), slice);
                }
                for (i64 token = to - 1; token >= from; --token) {
                    load_keys(token);
                    const float* old = states + (token - from) * MINE * THREADS + t;
                    const i64 place = token * heads + head;
                    const float x = value_of(v, token), d = value_of(dy, token);
                    double given = 0.0, erased = 0.0, back = 0.0;
                    #pragma unroll
                    for (int j = 0; j < MINE; ++j) {
                        const int i = j * SLICES + slice;
                        g[j] = fma((double)at.q[i], (double)d, g[j]);
                        given = fma(g[j], (double)at.k[i], given);
                        if (LOW_RANK) {
                            erased = fma((double)at.erase[i], (double)old[j * THREADS], erased);
                            back = fma((double)at.write[i], g[j], back);
                        }
                    }
                    given = over_slices(given);
                    if (has && slice == 0) dv[place * value + column] = (float)given;
                    if (LOW_RANK) {
                        erased = over_slices(erased);
                        back = over_slices(back);
                    }
                    #pragma unroll
                    for (int j = 0; j < MINE; ++j) {
                        const int i = j * SLICES + slice;
                        const float was = old[j * THREADS];
                        const double sums[5] = {over_columns((double)s[j] * d), over_columns(g[j] * x), over_columns(g[j] * was),
                                                LOW_RANK ? over_columns(was * back) : 0.0,
                                                LOW_RANK ? over_columns(g[j] * erased) : 0.0};
                        if (lane < SLICES) {
                            #pragma unroll
                            for (int kind = 0; kind < KINDS; ++kind) parts[kind][warp][i] = sums[kind];
                        }
                        g[j] *= at.share[i];
                        if (LOW_RANK) g[j] = fma((double)at.erase[i], back, g[j]);
                        s[j] = was;
                    }
                    __syncthreads();
                    auto add = [&](float* to, i64 i, double x) { to[i] = (float)(first == 0 ? x : to[i] + x); };
                    auto sum = [&](int kind, int i) {
                        return parts[kind][0][i] + parts[kind][1][i] + parts[kind][2][i] + parts[kind][3][i];
                    };
                    for (int i = t; i < KEY; i += THREADS) {
                        add(dq, place * KEY + i, sum(0, i));
                        add(dk, place * KEY + i, sum(1, i));
                        if (DECAYS != 1) add(ddecay, place * KEY + i, sum(2, i) * at.share[i]);
                        if (LOW_RANK) {
                            add(derase, place * KEY + i, sum(KINDS - 2, i));
                            add(dwrite, place * KEY + i, sum(KINDS - 1, i));
                        }
                    }
                    if (DECAYS == 1 && warp == 0) {
                        double total = 0.0;
                        for (int i = lane; i < KEY; i += 32) total += sum(2, i) * at.share[i];
                        for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(0xffffffff, total, step);
                        if (lane == 0) add(ddecay, place, total);
                    }
                }
            }
            #pragma unroll
            for (int j = 0; j < MINE; ++j) {
                const int i = j * SLICES + slice;
                if (has && i < KEY) dbefore[(base + i) * value + column] = (float)g[j];
            }
        }
    }
}
