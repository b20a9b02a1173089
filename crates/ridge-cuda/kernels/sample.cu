// The next token of each row of logits, without sorting them. Floor: the logits read once; a row of a vocabulary is one
// block's, and stays in L2 while it is read again.
// Weights are whole multiples of 2^-40, so that sums do not depend on the order of additions. What a sorted list would
// tell (the k-th token, where a running sum passes a bound) is found by histograms of ever finer bins, until a bin's
// tokens can be sorted in shared memory, or are all equal.
// Defines: D of the logits. Numbers: tokens of the vocabulary.

#define THREADS 1024
#define BINS 2048
#define LEVELS 40
#define ALL 0xffffffffffffffffull

struct Level { float high, inverse; int bin; };

__shared__ u64 sums[BINS], order[THREADS], amount[THREADS], warps[32];
__shared__ u32 counts[BINS];
__shared__ Level levels[LEVELS];
__shared__ struct { int bin; u32 count; u64 before, found; } crossing;
__shared__ u32 collected;

struct Row {
    const D::Raw* logits;
    int vocab;
    float largest, divisor, min_p;
    // The last token that top-k and top-p keep, and the first of all.
    u64 bound, first;
    // Typical sampling: distances up to `far` are kept.
    float log_total, entropy, far;
    bool typical;
};

// Ascending where logits descend, then by id; the two zeros are equal.
__device__ inline u64 rank_of(float x, u32 id) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return (u64)(bits >> 31 ? bits : ~bits & 0x7fffffffu) << 32 | id;
}
__device__ inline float logit_of(u64 rank) {
    const u32 bits = (u32)(rank >> 32);
    return __uint_as_float(bits >> 31 ? bits : ~bits & 0x7fffffffu);
}

__device__ inline float exponent(const Row& row, float x) { return (x - row.largest) / row.divisor; }
__device__ inline float distance(const Row& row, float x) {
    return fabsf(-row.entropy - (exponent(row, x) - row.log_total));
}

// The weight of a token that is kept, in units of 2^-40; 0 for others.
__device__ inline u64 units(const Row& row, float x, int id) {
    const float weight = expf(exponent(row, x));
    const u64 rank = rank_of(x, id);
    if (rank > row.bound || !(weight >= row.min_p || rank == row.first)) return 0;
    if (row.typical && !(distance(row, x) <= row.far)) return 0;
    return __float2ull_rz(weight * 1099511627776.0f);
}

__device__ inline u64 block_sum(u64 x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
    __syncthreads();
    u64 sum = 0;
    for (int i = 0; i < 32; ++i) sum += warps[i];
    return sum;
}

// The sum of this thread's `x` and all before it.
__device__ inline u64 block_scan(u64 x) {
    const int lane = threadIdx.x & 31;
    for (int step = 1; step < 32; step <<= 1) {
        const u64 before = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += before;
    }
    __syncthreads();
    if (lane == 31) warps[threadIdx.x >> 5] = x;
    __syncthreads();
    for (int i = 0; i < (threadIdx.x >> 5); ++i) x += warps[i];
    return x;
}

__device__ inline int bin_of(const Level& level, float x) {
    return max(0, min((int)((level.high - x) * level.inverse), BINS - 1));
}

// What a search orders tokens by, the largest first, and what it sums. `by_distance`: the nearest first. `counting`:
// tokens, not weights.
struct Search { bool by_distance, counting; };

// A token's value and amount, if it takes part and is in the bins found so far.
__device__ inline bool part(const Row& row, Search search, int depth, int id, float& value, u64& much) {
    const float x = at<D>(row.logits, id);
    if (x == -INF) return false;
    much = search.counting ? (u64)(rank_of(x, id) <= row.bound) : units(row, x, id);
    if (much == 0) return false;
    value = search.by_distance ? -distance(row, x) : x;
    for (int i = 0; i < depth; ++i)
        if (bin_of(levels[i], value) != levels[i].bin) return false;
    return true;
}

// The rank, by the search's order, of the first token at which the running sum reaches `target`; ALL if none does.
__device__ u64 find(const Row& row, Search search, u64 target) {
    u64 before = 0;
    __shared__ float low_high[2][32];
    for (int depth = 0; depth < LEVELS; ++depth) {
        float value, low = INF, high = -INF;
        u64 much;
        for (int id = threadIdx.x; id < row.vocab; id += THREADS)
            if (part(row, search, depth, id, value, much)) { low = fminf(low, value); high = fmaxf(high, value); }
        __syncthreads();
        low = block_reduce<Min>(low, low_high[0]);
        high = block_reduce<Max>(high, low_high[1]);
        if (low > high) return ALL;
        if (low == high) {
            // Equals, by id.
            u64 seen = before;
            for (int start = 0; start < row.vocab; start += THREADS) {
                const int id = start + threadIdx.x;
                const bool here = id < row.vocab && part(row, search, depth, id, value, much);
                const u64 sum = seen + block_scan(here ? much : 0);
                if (threadIdx.x == 0) crossing.found = ALL;
                __syncthreads();
                if (here && sum >= target && sum - much < target) crossing.found = rank_of(value, id);
                if (threadIdx.x == THREADS - 1) crossing.before = sum;
                __syncthreads();
                if (crossing.found != ALL) return crossing.found;
                seen = crossing.before;
            }
            return ALL;
        }
        if (threadIdx.x == 0) levels[depth] = {high, (float)BINS / (high - low), 0};
        for (int b = threadIdx.x; b < BINS; b += THREADS) { sums[b] = 0; counts[b] = 0; }
        if (threadIdx.x == 0) { crossing.bin = -1; collected = 0; }
        __syncthreads();
        for (int id = threadIdx.x; id < row.vocab; id += THREADS)
            if (part(row, search, depth, id, value, much)) {
                const int b = bin_of(levels[depth], value);
                atomicAdd(&sums[b], much);
                atomicAdd(&counts[b], 1u);
            }
        __syncthreads();
        const u64 own[2] = {sums[threadIdx.x * 2], sums[threadIdx.x * 2 + 1]};
        u64 sum = before + block_scan(own[0] + own[1]) - own[0] - own[1];
        for (int i = 0; i < 2; ++i) {
            if (sum < target && sum + own[i] >= target) {
                crossing.bin = threadIdx.x * 2 + i;
                crossing.count = counts[threadIdx.x * 2 + i];
                crossing.before = sum;
            }
            sum += own[i];
        }
        __syncthreads();
        if (crossing.bin < 0) return ALL;
        before = crossing.before;
        if (threadIdx.x == 0) levels[depth].bin = crossing.bin;
        __syncthreads();
        if (crossing.count > THREADS) continue;
        // Few enough to sort.
        order[threadIdx.x] = ALL;
        amount[threadIdx.x] = 0;
        __syncthreads();
        for (int id = threadIdx.x; id < row.vocab; id += THREADS)
            if (part(row, search, depth + 1, id, value, much)) {
                const u32 to = atomicAdd(&collected, 1u);
                order[to] = rank_of(value, id);
                amount[to] = much;
            }
        __syncthreads();
        for (int size = 2; size <= THREADS; size <<= 1)
            for (int step = size >> 1; step > 0; step >>= 1) {
                const int other = threadIdx.x ^ step;
                const bool up = (threadIdx.x & size) == 0;
                if (other > threadIdx.x && (order[threadIdx.x] > order[other]) == up) {
                    const u64 o = order[threadIdx.x], a = amount[threadIdx.x];
                    order[threadIdx.x] = order[other]; amount[threadIdx.x] = amount[other];
                    order[other] = o; amount[other] = a;
                }
                __syncthreads();
            }
        const u64 much_here = amount[threadIdx.x], end = before + block_scan(much_here);
        if (threadIdx.x == 0) crossing.found = ALL;
        __syncthreads();
        if (end >= target && end - much_here < target) crossing.found = order[threadIdx.x];
        __syncthreads();
        const u64 found = crossing.found;
        __syncthreads();
        return found;
    }
    return ALL;
}

__device__ inline u64 total_units(const Row& row) {
    u64 sum = 0;
    for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
        const float x = at<D>(row.logits, id);
        if (x != -INF) sum += units(row, x, id);
    }
    return block_sum(sum);
}

// At least 1: the first token is always kept.
__device__ inline u64 share(float p, u64 total) {
    return max((u64)1, (u64)ceil((double)op_max(p, 0.0f) * (double)total));
}

extern "C" __global__ __launch_bounds__(THREADS) void sample_token(
    const D::Raw* __restrict__ logits, const float* __restrict__ temperature, const int* __restrict__ top_k,
    const float* __restrict__ top_p, const float* __restrict__ min_p, const float* __restrict__ typical_p,
    const i64* __restrict__ seed, const i64* __restrict__ sequence, const i64* __restrict__ position,
    int* __restrict__ out, Numbers<1> n
) {
    others_may_begin();
    after_others();
    const int r = blockIdx.x;
    Row row;
    row.vocab = (int)n.v[0];
    row.logits = logits + (i64)r * row.vocab;
    u64 first = ALL;
    int bad = 0, possible = 0;
    for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
        const float x = at<D>(row.logits, id);
        bad |= !(x <= 3.402823466e+38f);
        possible |= x >= -3.402823466e+38f;
        first = min(first, rank_of(x, id));
    }
    for (int step = 16; step > 0; step >>= 1) first = min(first, __shfl_xor_sync(0xffffffffu, first, step));
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = first;
    bad = __syncthreads_or(bad);
    possible = __syncthreads_or(possible);
    for (int i = 0; i < 32; ++i) first = min(first, warps[i]);
    __syncthreads();
    const bool warm = temperature[r] > 0.0f;
    if (bad || !possible || !warm) {
        if (threadIdx.x == 0) out[r] = bad || !possible ? -1 : (int)(u32)first;
        return;
    }
    row.first = first;
    row.largest = logit_of(first);
    row.divisor = temperature[r];
    row.bound = ALL;
    row.min_p = -INF;
    row.typical = false;
    if (top_k[r] > 0 && top_k[r] < row.vocab) row.bound = find(row, {false, true}, (u64)top_k[r]);
    if (top_p[r] < 1.0f) {
        const u64 total = total_units(row);
        row.bound = min(row.bound, find(row, {false, false}, share(top_p[r], total)));
    }
    row.min_p = min_p[r];
    u64 total = total_units(row);
    if (typical_p[r] < 1.0f) {
        const float whole = (float)((double)total / 1099511627776.0);
        __shared__ float shared[32];
        row.log_total = logf(whole);
        float sum = 0.0f;
        for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
            const float x = at<D>(row.logits, id);
            if (x == -INF || units(row, x, id) == 0) continue;
            const float log_p = exponent(row, x) - row.log_total;
            sum += expf(exponent(row, x)) / whole * log_p;
        }
        row.entropy = -block_reduce<Sum>(sum, shared);
        const u64 rank = find(row, {true, false}, share(typical_p[r], total));
        row.far = rank == ALL ? INF : -logit_of(rank);
        row.typical = true;
        total = total_units(row);
    }
    const u64 u = (u64)(philox_uniform(seed[r], 0, sequence[r], position[r], 0) * 16777216.0f);
    const u64 passed = (total >> 24) * u + (((total & 0xffffff) * u) >> 24);
    const u64 rank = find(row, {false, false}, passed + 1);
    if (threadIdx.x == 0) out[r] = (int)(u32)(rank == ALL ? first : rank);
}
