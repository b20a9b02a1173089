// The positions of a paged cache that an indexer scores best (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1): scores to scratch
// memory, then a selection from each token's. Tokens that see no more positions than are kept have no scores.
// Defines: D of q, W of the weights of heads, CACHE of the keys; DIM; HEADS; BLOCK, tokens of a cache block; TOP, positions that
// are kept; TILE, positions of a tile, a multiple of 32; SCALES, 0 or 1: do keys have a scale each?
// Numbers: blocks of a sequence, sequences, cache blocks.

#define STRIDE (DIM | 1)
// Heads whose sums a thread has in registers.
#define GROUP 16
#define PADDED ((HEADS + GROUP - 1) / GROUP * GROUP)
#define THREADS 1024

// Positions that the token sees.
__device__ inline int positions_seen(int id, int position, const Numbers<3>& n) {
    if (id < 0 || id >= n.v[1] || position < 0) return 0;
    return (int)min((i64)position + 1, n.v[0] * BLOCK);
}

// Floor: the keys of a sequence read once for each of its tokens, mostly from the cache, and 2 DIM operations a (query, key) pair
// of each head. A block makes every gridDim.y-th tile of a token's positions, a thread one of its positions: keys and queries are
// in shared memory in f32, the queries transposed, so that all lanes read one of them and keys of different banks.
extern "C" __global__ __launch_bounds__(TILE) void index_scores(
    const D::Raw* __restrict__ q, const W::Raw* __restrict__ w, const CACHE::Raw* __restrict__ cache,
    const int* __restrict__ table, const int* __restrict__ ids, const int* __restrict__ positions,
#if SCALES
    const float* __restrict__ scales,
#endif
    float* __restrict__ scores, Numbers<3> n
) {
    extern __shared__ __align__(16) float room[];
    float* queries = room;
    float* keys = room + DIM * PADDED;
    __shared__ float weights[PADDED];
    others_may_begin();
    after_others();
    const i64 token = blockIdx.x, width = n.v[0] * BLOCK;
    const int id = ids[token], seen = positions_seen(id, positions[token], n);
    if (seen <= TOP || (i64)blockIdx.y * TILE >= seen) return;
    const int* row = table + id * n.v[0];
    for (int i = threadIdx.x; i < DIM * PADDED; i += TILE) {
        const int h = i % PADDED, d = i / PADDED;
        queries[i] = h < HEADS ? D::load(q[(token * HEADS + h) * DIM + d]) : 0.0f;
    }
    for (int h = threadIdx.x; h < PADDED; h += TILE) weights[h] = h < HEADS ? W::load(w[token * HEADS + h]) : 0.0f;
    for (int start = blockIdx.y * TILE; start < seen; start += gridDim.y * TILE) {
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * DIM; i += TILE) {
            const int p = start + i / DIM, d = i % DIM;
            const i64 block = p < seen ? row[p / BLOCK] : -1;
            const bool real = block >= 0 && block < n.v[2];
            keys[i / DIM * STRIDE + d] = real ? (float)CACHE::load(cache[(block * BLOCK + p % BLOCK) * DIM + d]) : 0.0f;
        }
        __syncthreads();
        const float* key = keys + threadIdx.x * STRIDE;
        float score = 0.0f;
        for (int group = 0; group < PADDED; group += GROUP) {
            float sums[GROUP] = {};
#pragma unroll 4
            for (int d = 0; d < DIM; ++d) {
                const float4* of = (const float4*)(queries + d * PADDED + group);
                const float k = key[d];
#pragma unroll
                for (int i = 0; i < GROUP / 4; ++i) {
                    const float4 four = of[i];
                    sums[i * 4] = fmaf(four.x, k, sums[i * 4]);
                    sums[i * 4 + 1] = fmaf(four.y, k, sums[i * 4 + 1]);
                    sums[i * 4 + 2] = fmaf(four.z, k, sums[i * 4 + 2]);
                    sums[i * 4 + 3] = fmaf(four.w, k, sums[i * 4 + 3]);
                }
            }
#pragma unroll
            for (int i = 0; i < GROUP; ++i) score = fmaf(weights[group + i], fmaxf(sums[i], 0.0f), score);
        }
        const int p = start + threadIdx.x;
        if (p >= seen) continue;
#if SCALES
        // A positive factor of a key is one of its score.
        const i64 block = row[p / BLOCK];
        if (block >= 0 && block < n.v[2]) score *= scales[block * BLOCK + p % BLOCK];
#endif
        scores[token * width + p] = score;
    }
}

// The order of scores as that of integers: 0 for a NaN, which is below all, and one number for both zeros.
__device__ inline u32 rank_of(float x) {
    if (x != x) return 0;
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// How many of the block's threads before this one have `flag`, and of all.
__device__ inline int count_before(bool flag, int* of_warps, int& all) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 votes = __ballot_sync(0xffffffffu, flag);
    __syncthreads();
    if (lane == 0) of_warps[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1));
    all = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i < warp) before += of_warps[i];
        all += of_warps[i];
    }
    return before;
}

// Floor: the scores of a token read five times, mostly from the cache. A block makes a token: the bits of the last score that is
// kept are found eight at a time, by counting, and then the positions of the better ones and of the first that equal it are
// written in order.
extern "C" __global__ __launch_bounds__(THREADS) void index_select(
    const int* __restrict__ ids, const int* __restrict__ positions, const float* __restrict__ scores,
    int* __restrict__ out, Numbers<3> n
) {
    __shared__ u32 counts[256], bounds[2];
    __shared__ int of_warps[THREADS / 32];
    others_may_begin();
    after_others();
    const i64 token = blockIdx.x;
    const int seen = positions_seen(ids[token], positions[token], n), lane = threadIdx.x & 31;
    const float* of = scores + token * n.v[0] * BLOCK;
    int* to = out + token * TOP;
    if (seen <= TOP) {
        for (int k = threadIdx.x; k < TOP; k += THREADS) to[k] = k < seen ? k : -1;
        return;
    }
    const int whole = (seen + THREADS - 1) / THREADS * THREADS;
    // The rank of the last that is kept, its highest bits first, and how many of that rank are.
    u32 last = 0, of_last = TOP;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) counts[threadIdx.x] = 0;
        __syncthreads();
        for (int at = threadIdx.x; at < whole; at += THREADS) {
            const u32 rank = at < seen ? rank_of(of[at]) : 0;
            const bool counted = at < seen && (shift == 24 || rank >> (shift + 8) == last >> (shift + 8));
            const u32 bin = counted ? rank >> shift & 255 : 256;
            const u32 same = __match_any_sync(0xffffffffu, bin);
            if (counted && __ffs(same) - 1 == lane) atomicAdd(&counts[bin], __popc(same));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 above = 0, bin = 255;
            while (bin > 0 && above + counts[bin] < of_last) above += counts[bin--];
            bounds[0] = bin;
            bounds[1] = above;
        }
        __syncthreads();
        last |= bounds[0] << shift;
        of_last -= bounds[1];
        __syncthreads();
    }
    int tied = 0, kept = 0;
    for (int from = 0; from < seen && kept < TOP; from += THREADS) {
        const int at = from + threadIdx.x;
        const u32 rank = at < seen ? rank_of(of[at]) : 0;
        int all;
        const bool equal = rank != 0 && rank == last;
        const int before = tied + count_before(equal, of_warps, all);
        tied += all;
        const bool keeps = rank != 0 && (rank > last || (equal && before < (int)of_last));
        const int place = kept + count_before(keeps, of_warps, all);
        kept += all;
        if (keeps) to[place] = at;
    }
    for (int k = kept + threadIdx.x; k < TOP; k += THREADS) to[k] = -1;
}
