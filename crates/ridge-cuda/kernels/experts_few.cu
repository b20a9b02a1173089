// Experts of a few tokens, in which launches cost more than bytes: all of a router in one launch, from the residual addition to
// the order of the pairs; and the last product of experts with the sum of what they give.
// Defines: ROUTE, with those of the router; or OPEN, with those of gate and up; or none, with those of the last product.

#define WIDE (16 / (int)sizeof(D::Raw))
#define ALL 0xffffffffu

union Vector { uint4 whole; D::Raw part[WIDE]; };

#if ROUTE
// Floor: the router's weights over bandwidth; in truth the latencies of a launch, of two sums over a block, and of the
// blocks' meeting. A block makes the logits of WARPS experts for a token, a warp each, from x, which every block norms for itself; the
// last of the blocks chooses. Weights are read while the launch before ends.
// Defines: D; NORM_TYPE of the norm's weight; HIDDEN, whole vectors; TOKENS, the most there are; OFFSET, 1 where `more`, of OFFSET_TYPE,
// is added to the logits; what `choose.cuh` takes, which adds it to the scores that experts are chosen by if BIAS is 1.
// Numbers: tokens. `counter` is 0, and is 0 again in the end; `logits` has a place for each of each token.
#define WARPS 8
#define LANE_VECTORS ((HIDDEN / WIDE + 31) / 32)
#define HELD (LANE_VECTORS < 16 ? LANE_VECTORS : 16)
#define THREAD_VECTORS ((HIDDEN / WIDE + 255) / 256)

extern "C" __global__ __launch_bounds__(32 * WARPS) void expert_route(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain,
    const D::Raw* __restrict__ w, const OFFSET_TYPE::Raw* __restrict__ more, const int* __restrict__ seq_ids,
    int* __restrict__ rows, int* __restrict__ places, int* __restrict__ offsets, int* __restrict__ ids,
    float* __restrict__ weights, D::Raw* __restrict__ normed, D::Raw* __restrict__ sum, float* logits, u32* counter,
    float eps, float scale, Numbers<1> n
) {
    __shared__ __align__(16) D::Raw line[HIDDEN];
    __shared__ float shared[32];
    __shared__ int expert_of[TOKENS * TOP_K], counts[EXPERTS + 1];
    __shared__ bool last;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = blockIdx.x * WARPS + warp;
    const D::Raw* column = w + (i64)min(expert, EXPERTS - 1) * HIDDEN;
    Vector held[HELD];
#pragma unroll
    for (int v = 0; v < HELD; ++v) held[v].whole = __ldg((const uint4*)column + min(v * 32 + lane, HIDDEN / WIDE - 1));
    others_may_begin();
    after_others();
    const int token = blockIdx.y;
    const i64 base = (i64)token * HIDDEN;
    const bool mine = blockIdx.x == 0;
    Vector a[THREAD_VECTORS], b[THREAD_VECTORS];
#pragma unroll
    for (int v = 0; v < THREAD_VECTORS; ++v) {
        const int at = (v * 256 + threadIdx.x) * WIDE;
        if (at >= HIDDEN) continue;
        a[v].whole = *(const uint4*)(x + base + at);
        b[v].whole = *(const uint4*)(r + base + at);
    }
    float square = 0.0f;
#pragma unroll
    for (int v = 0; v < THREAD_VECTORS; ++v) {
        const int at = (v * 256 + threadIdx.x) * WIDE;
        if (at >= HIDDEN) continue;
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            a[v].part[i] = D::store(D::load(a[v].part[i]) + D::load(b[v].part[i]));
            square += D::load(a[v].part[i]) * D::load(a[v].part[i]);
        }
        if (mine) *(uint4*)(sum + base + at) = a[v].whole;
    }
    const float unit = op_rsqrt(block_reduce<Sum>(square, shared) / (float)HIDDEN + eps);
#pragma unroll
    for (int v = 0; v < THREAD_VECTORS; ++v) {
        const int at = (v * 256 + threadIdx.x) * WIDE;
        if (at >= HIDDEN) continue;
        const Elements<NORM_TYPE, WIDE> by = elements_at<NORM_TYPE, WIDE>(gain + at);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) a[v].part[i] = D::store(D::load(a[v].part[i]) * unit * NORM_TYPE::load(by.part[i]));
        *(uint4*)(line + at) = a[v].whole;
        if (mine) *(uint4*)(normed + base + at) = a[v].whole;
    }
    __syncthreads();
    float product = 0.0f;
#pragma unroll
    for (int v = 0; v < LANE_VECTORS; ++v) {
        const int at = (v * 32 + lane) * WIDE;
        if (at >= HIDDEN) continue;
        Vector k, l;
        if (v < HELD) k = held[v < HELD ? v : 0]; else k.whole = __ldg((const uint4*)(column + at));
        l.whole = *(const uint4*)(line + at);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) product = fmaf(D::load(k.part[i]), D::load(l.part[i]), product);
    }
    for (int step = 16; step > 0; step >>= 1) product += __shfl_xor_sync(ALL, product, step);
#if OFFSET
    product += OFFSET_TYPE::load(more[min(expert, EXPERTS - 1)]);
#endif
    if (lane == 0 && expert < EXPERTS) logits[token * EXPERTS + expert] = D::wrap(product);
    // The last block has the logits of all.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(counter, 1) == gridDim.x * gridDim.y - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    for (int e = threadIdx.x; e <= EXPERTS; e += 256) counts[e] = 0;
    const int tokens = (int)n.v[0];
    for (int token = warp; token < tokens; token += WARPS)
        choose(
            [&](int expert) { return __ldcg(logits + token * EXPERTS + expert); }, more, scale, ids + token * TOP_K,
            weights + token * TOP_K, expert_of + token * TOP_K
        );
    __syncthreads();
    // Pairs in the order of experts, and of one expert in their own; those of padding to none.
    const int pairs = tokens * TOP_K;
    for (int pair = threadIdx.x; pair < pairs; pair += 256) {
        if (seq_ids[pair / TOP_K] < 0) expert_of[pair] = EXPERTS;
        atomicAdd(&counts[expert_of[pair]], 1);
    }
    __syncthreads();
    if (warp == 0) {
        int before = 0;
        for (int base = 0; base <= EXPERTS; base += 32) {
            const int e = base + lane, own = e <= EXPERTS ? counts[e] : 0;
            int upto = own;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const int lower = __shfl_up_sync(ALL, upto, step);
                if (lane >= step) upto += lower;
            }
            if (e <= EXPERTS) offsets[e] = counts[e] = before + upto - own;
            before += __shfl_sync(ALL, upto, 31);
        }
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += 256) {
        const int of = expert_of[pair];
        int place = counts[of];
        for (int other = 0; other < pair; ++other) place += expert_of[other] == of;
        places[pair] = of < EXPERTS ? place : -1;
        // Behind those of experts there is no token.
        rows[place] = of < EXPERTS ? pair / TOP_K : -1;
    }
}
#else
// Calls `each(group, begin, end)` with the groups that have rows which are this warp's: every WARPS-th of them.
template <class F> __device__ inline void over_groups(const int* offsets, i64 rows, F each) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int nth = 0;
    for (int base = 0; base < GROUPS; base += 32) {
        const int g = base + lane;
        const int from = g < GROUPS ? offsets[g] : 0, to = g < GROUPS ? (int)min((i64)offsets[g + 1], rows) : 0;
        for (u32 some = __ballot_sync(ALL, to > from); some; some &= some - 1, ++nth) {
            if (nth % WARPS != warp) continue;
            const int of = __ffs(some) - 1;
            each(base + of, __shfl_sync(ALL, from, of), __shfl_sync(ALL, to, of));
        }
    }
}

// Adds to `sums` of up to ROWS rows of x, at `of_x`, null where there is none, their products with COUNT columns of a weight.
template <int COUNT, int ROWS> __device__ inline void multiply(
    const D::Raw* const (&column)[COUNT], const D::Raw* const (&of_x)[ROWS], float (&sums)[ROWS][COUNT]
) {
#pragma unroll 1
    for (int k = (threadIdx.x & 31) * WIDE; k < DEPTH; k += AHEAD * 32 * WIDE) {
        Vector held[AHEAD][COUNT];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
#pragma unroll
            for (int c = 0; c < COUNT; ++c) {
                const int at = k + u * 32 * WIDE;
                held[u][c].whole = __ldg((const uint4*)(column[c] + (at < DEPTH ? at : k)));
            }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (!of_x[i]) continue;
            Vector x[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const int at = k + u * 32 * WIDE;
                x[u].whole = *(const uint4*)(of_x[i] + (at < DEPTH ? at : k));
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                if (k + u * 32 * WIDE >= DEPTH) break;
#pragma unroll
                for (int c = 0; c < COUNT; ++c)
#pragma unroll
                    for (int e = 0; e < WIDE; ++e)
                        sums[i][c] = fmaf(D::load(x[u].part[e]), D::load(held[u][c].part[e]), sums[i][c]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int c = 0; c < COUNT; ++c)
            for (int step = 16; step > 0; step >>= 1) sums[i][c] += __shfl_xor_sync(ALL, sums[i][c], step);
}

#if OPEN
// Gate and up of experts. Floor: the bytes of the weights that experts reach over bandwidth. A block makes COLUMNS of the result for all
// rows: its warps take the experts that have rows in turn.
// Defines: D; GROUPS; MOST rows of a group; DEPTH, whole vectors; WARPS; COLUMNS; AHEAD, vectors of a column that are on their way at
// a time; BLOCKS of a multiprocessor.
// Numbers: rows, rows of x, columns.
#define ROWS (MOST < 2 ? MOST : 2)

extern "C" __global__ __launch_bounds__(32 * WARPS, BLOCKS) void expert_open(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ gate, const D::Raw* __restrict__ up,
    const int* __restrict__ offsets, const int* __restrict__ index, D::Raw* __restrict__ y, Numbers<3> n
) {
    const int lane = threadIdx.x & 31, column = blockIdx.x * COLUMNS;
    const i64 rows = n.v[0], of_x = n.v[1], columns = n.v[2];
    others_may_begin();
    after_others();
    over_groups(offsets, rows, [&](int group, int begin, int end) {
        const D::Raw* weight[2 * COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const i64 at = (group * columns + min((i64)column + c, columns - 1)) * DEPTH;
            weight[c] = gate + at;
            weight[COLUMNS + c] = up + at;
        }
        for (int first = begin; first < end; first += ROWS) {
            const D::Raw* row[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int of = first + i < end ? index[first + i] : -1;
                row[i] = of >= 0 && of < of_x ? x + (i64)of * DEPTH : nullptr;
            }
            float sums[ROWS][2 * COLUMNS] = {};
            multiply(weight, row, sums);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (lane == c && first + i < end && column + c < columns)
                        y[(first + i) * columns + column + c] = D::store(gated<D>(sums[i][c], sums[i][COLUMNS + c]));
        }
    });
    // Rows of no expert.
    for (i64 i = offsets[GROUPS] + threadIdx.x / COLUMNS; i < rows; i += 32 * WARPS / COLUMNS)
        if (column + threadIdx.x % COLUMNS < columns) y[i * columns + column + threadIdx.x % COLUMNS] = D::store(0.0f);
}
#else
// Floor: the bytes of the weights that experts reach over bandwidth. A block makes COLUMNS of the result for all tokens: its warps
// take the experts that have rows in turn, and each row's products wait in shared memory. What a token's experts give is added in the order
// of its choice, as `expert_combine` adds it, so that its bits do not depend on what others choose.
// Defines: D; GROUPS; TOP_K; TOKENS, the most there are; DEPTH, whole vectors; ADD, of r and s, which is added first: 0, 1 or 2; WARPS;
// COLUMNS; AHEAD; BLOCKS, as above.
// Numbers: tokens, columns, rows of x.
#define ROWS (TOKENS < 2 ? TOKENS : 2)

extern "C" __global__ __launch_bounds__(32 * WARPS, BLOCKS) void expert_sum(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ w, const int* __restrict__ offsets,
    const int* __restrict__ places, const float* __restrict__ weights, const D::Raw* __restrict__ r,
    const D::Raw* __restrict__ s, D::Raw* __restrict__ out, Numbers<3> n
) {
    __shared__ float products[TOKENS * TOP_K][COLUMNS];
    const int lane = threadIdx.x & 31, tokens = (int)n.v[0], column = blockIdx.x * COLUMNS;
    const i64 columns = n.v[1];
    others_may_begin();
    after_others();
    const int rows = (int)min(n.v[2], (i64)TOKENS * TOP_K);
    // Rows of no expert give zeros.
    for (int i = threadIdx.x; i < rows * COLUMNS; i += 32 * WARPS) (&products[0][0])[i] = 0.0f;
    __syncthreads();
    over_groups(offsets, rows, [&](int group, int begin, int end) {
        const D::Raw* weight[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) weight[c] = w + (group * columns + min((i64)column + c, columns - 1)) * DEPTH;
        for (int first = begin; first < end; first += ROWS) {
            const D::Raw* row[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) row[i] = first + i < end ? x + (i64)(first + i) * DEPTH : nullptr;
            float sums[ROWS][COLUMNS] = {};
            multiply(weight, row, sums);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (lane == c && first + i < end) products[first + i][c] = D::wrap(sums[i][c]);
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * COLUMNS; i += 32 * WARPS) {
        const int token = i / COLUMNS, c = i % COLUMNS;
        if (column + c >= columns) continue;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            const int place = places[token * TOP_K + k];
            if (place >= 0 && place < rows) sum = fmaf(weights[token * TOP_K + k], products[place][c], sum);
        }
        const i64 at = token * columns + column + c;
#if ADD == 2
        sum = D::load(s[at]) + D::wrap(sum);
#endif
#if ADD
        sum = D::load(r[at]) + D::wrap(sum);
#endif
        out[at] = D::store(sum);
    }
}
#endif
#endif
