// Linear recurrences whose state is a matrix, token by token. A block has some columns of the state of a head of a sequence in
// registers: four threads a column, which share its keys, so that a sum over the keys is two shuffles. Floor: the
// operands' bytes over bandwidth; long sequences are bound by the latency of a token, about a microsecond.
// Numbers: tokens, rows, groups, heads, value, lines of the states' table. LINES; KEY, DECAYS (1 or KEY) and LOW_RANK (0 or 1) come from the instance, and LEAST: rows of
// so many tokens or more are another kernel's. With GATED q, k, v and y are of dtype OPERAND, values are multiplied by a weight of their head in place of
// `erase`, and the part of low rank is that of the delta rule: what is erased is k times its decay, and -weight k is written.

#define SLICES 4
#define COLUMNS 32
#define MINE ((KEY + SLICES - 1) / SLICES)
#ifndef GATED
#define GATED 0
typedef F32 OPERAND;
#endif

__device__ inline float over_slices(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__device__ inline float over_slices(Compensated sum) {
#pragma unroll
    for (int step = 1; step < SLICES; step *= 2) sum.add_other(step);
    return sum.value();
}

extern "C" __global__ __launch_bounds__(SLICES * COLUMNS) void recurrence(
    const OPERAND::Raw* __restrict__ q, const OPERAND::Raw* __restrict__ k, const OPERAND::Raw* __restrict__ v,
    const float* __restrict__ decay, const float* __restrict__ before, const int* __restrict__ starts,
    const float* __restrict__ erase, const float* __restrict__ write, const int* __restrict__ lines,
    OPERAND::Raw* __restrict__ y, float* __restrict__ after, Numbers<6> n
) {
    // Keys behind the last are zeros.
    __shared__ float qs[MINE * SLICES], ks[MINE * SLICES], kept[MINE * SLICES], from[MINE * SLICES], to[MINE * SLICES];
    const i64 tokens = n.v[0], rows = n.v[1], groups = n.v[2], heads = n.v[3], value = n.v[4];
    const i64 tiles = (value + COLUMNS - 1) / COLUMNS, all = rows * heads * tiles;
    const int t = threadIdx.x, slice = t % SLICES;
    others_may_begin();
    after_others();
    for (int i = t; i < MINE * SLICES; i += SLICES * COLUMNS) qs[i] = ks[i] = kept[i] = from[i] = to[i] = 0.0f;
    for (i64 block = blockIdx.x; block <= all; block += gridDim.x) {
        if (block == all) {
            // Tokens of no sequence.
            for (i64 i = starts[rows] * heads * value + t; i < tokens * heads * value; i += SLICES * COLUMNS)
                y[i] = OPERAND::store(0.0f);
            continue;
        }
        const i64 head = block / tiles % heads, row = block / tiles / heads;
        // Bounds as the kernels of chunks have them.
        if (min((i64)starts[row + 1], tokens) - max(starts[row], 0) >= LEAST) continue;
        const i64 column = block % tiles * COLUMNS + t / SLICES;
        const bool has = column < value;
        const i64 from_line = line_of(lines, n.v[5], row, 0), to_line = line_of(lines, n.v[5], row, 1);
        const i64 base = (from_line * heads + head) * KEY, to_base = (to_line * heads + head) * KEY;
        float s[MINE];
        #pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const int i = j * SLICES + slice;
            s[j] = has && i < KEY && from_line >= 0 ? before[(base + i) * value + column] : 0.0f;
        }
        const i64 end = min((i64)starts[row + 1], tokens);
        for (i64 token = max(starts[row], 0); token < end; ++token) {
            const i64 at = token * heads + head, group = (token * groups + head * groups / heads) * KEY;
            const float weight = GATED ? erase[at] : 1.0f;
            __syncthreads();
            for (int i = t; i < KEY; i += SLICES * COLUMNS) {
                qs[i] = OPERAND::load(q[group + i]);
                ks[i] = OPERAND::load(k[group + i]);
                kept[i] = op_exp(decay[at * DECAYS + (DECAYS == 1 ? 0 : i)]);
                if (LOW_RANK) {
                    from[i] = GATED ? ks[i] * kept[i] : erase[at * KEY + i];
                    to[i] = GATED ? -weight * ks[i] : write[at * KEY + i];
                }
            }
            __syncthreads();
            const float x = has ? OPERAND::load(v[at * value + column]) * weight : 0.0f;
            float erased = 0.0f;
            Compensated sum;
            if (LOW_RANK) {
                #pragma unroll
                for (int j = 0; j < MINE; ++j) erased = fmaf(from[j * SLICES + slice], s[j], erased);
                erased = over_slices(erased);
            }
            #pragma unroll
            for (int j = 0; j < MINE; ++j) {
                const int i = j * SLICES + slice;
                float next = s[j] * kept[i];
                if (LOW_RANK) next = fmaf(to[i], erased, next);
                s[j] = fmaf(ks[i], x, next);
                sum.add_product(qs[i], s[j]);
            }
            const float result = over_slices(sum);
            if (has && slice == 0) y[at * value + column] = OPERAND::store(result);
        }
        #pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const int i = j * SLICES + slice;
            if (has && i < KEY && to_line >= 0) after[(to_base + i) * value + column] = s[j];
        }
    }
}

// Heads of one value whose keys decay by themselves, as channels of Mamba-1: a block has COLUMNS heads of a group. Nothing is shared but by
// cache, and tokens are read AHEAD at a time.
#define AHEAD 4

#if !LOW_RANK && DECAYS == KEY && !GATED
extern "C" __global__ __launch_bounds__(SLICES * COLUMNS) void recurrence_channels(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
    const float* __restrict__ decay, const float* __restrict__ before, const int* __restrict__ starts,
    const int* __restrict__ lines, float* __restrict__ y, float* __restrict__ after, Numbers<5> n
) {
    others_may_begin();
    after_others();
    const i64 tokens = n.v[0], rows = n.v[1], groups = n.v[2], heads = n.v[3], tiles = (heads + COLUMNS - 1) / COLUMNS;
    const int t = threadIdx.x, slice = t % SLICES;
    if (blockIdx.x == tiles * rows) {
        // Tokens of no sequence.
        for (i64 i = starts[rows] * heads + t; i < tokens * heads; i += SLICES * COLUMNS) y[i] = 0.0f;
        return;
    }
    const i64 row = blockIdx.x / tiles, mine = blockIdx.x % tiles * COLUMNS + t / SLICES;
    const bool has = mine < heads;
    const i64 head = has ? mine : heads - 1, group = head * groups / heads;
    const i64 from_line = line_of(lines, n.v[4], row, 0), to_line = line_of(lines, n.v[4], row, 1);
    const i64 base = (from_line * heads + head) * KEY, to_base = (to_line * heads + head) * KEY;
    float s[MINE];
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const int i = j * SLICES + slice;
        s[j] = i < KEY && from_line >= 0 ? before[base + i] : 0.0f;
    }
    const i64 end = min((i64)starts[row + 1], tokens);
    for (i64 token = max(starts[row], 0); token < end; token += AHEAD) {
        float qs[AHEAD][MINE], ks[AHEAD][MINE], rates[AHEAD][MINE], x[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const i64 at = min(token + a, end - 1);
            x[a] = v[at * heads + head];
#pragma unroll
            for (int j = 0; j < MINE; ++j) {
                const int i = min(j * SLICES + slice, KEY - 1);
                const bool is = j * SLICES + slice < KEY;
                qs[a][j] = is ? q[(at * groups + group) * KEY + i] : 0.0f;
                ks[a][j] = is ? k[(at * groups + group) * KEY + i] : 0.0f;
                rates[a][j] = decay[(at * heads + head) * KEY + i];
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (token + a >= end) break;
            Compensated sum;
#pragma unroll
            for (int j = 0; j < MINE; ++j) {
                s[j] = fmaf(ks[a][j], x[a], s[j] * op_exp(rates[a][j]));
                sum.add_product(qs[a][j], s[j]);
            }
            const float result = over_slices(sum);
            if (has && slice == 0) y[(token + a) * heads + head] = result;
        }
    }
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const int i = j * SLICES + slice;
        if (has && i < KEY && to_line >= 0) after[to_base + i] = s[j];
    }
}
#endif
