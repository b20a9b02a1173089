// The first `keep` elements along an axis in sorted order with their indices: ties by index, NaN last.
// Indices are sorted, by a bitonic network over the next power of two (Batcher 1968) in scratch memory, a block a line:
// ties broken by index make the order total, so that a network gives what a stable sort does. Indices past the end are
// above everything.
// Numbers: outer, extent, inner, keep, the power of two. Type D and DESCENDING come from the instance; SELECT, 0 or 1: few of
// many floats.

#if SELECT
// The bits of the last element that is kept are found eight at a time, by counting (Alabi et al. 2012, "Fast k-selection
// algorithms for graphics processing units"); then those before it, and the first that equal it, are sorted in shared
// memory. A block makes a line. Floor: the line read five times, mostly from the cache.
#define ROOM 2048
#define THREADS 1024

// What comes first has the smallest rank; equal numbers have one rank, NaN the largest.
__device__ inline u32 rank_of(float x) {
    if (x != x) return 0xffffffffu;
    const u32 bits = __float_as_uint(x + 0.0f), up = bits >> 31 ? ~bits : bits | 0x80000000u;
    return DESCENDING ? ~up : up;
}

extern "C" __global__ __launch_bounds__(THREADS) void select_first(
    const void* __restrict__ x, void* __restrict__ values, int* __restrict__ indices, Numbers<5> n
) {
    // Of each element that is sorted the rank and, below it, the index.
    __shared__ u64 found[ROOM];
    __shared__ u32 counts[256], bounds[2], taken;
    __shared__ int of_warps[32];
    const int extent = (int)n.v[1], keep = (int)n.v[3], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 inner = n.v[2], base = blockIdx.x / inner * extent * inner + blockIdx.x % inner;
    const int whole = (extent + THREADS - 1) / THREADS * THREADS;
    auto rank = [&](int at) { return rank_of(D::load(((const D::Raw*)x)[base + at * inner])); };
    // The rank of the last that is kept, its highest bits first, and how many of those with these bits are kept.
    u32 last = 0, wanted = keep, equal = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) counts[threadIdx.x] = 0;
        __syncthreads();
        for (int at = threadIdx.x; at < whole; at += THREADS) {
            const u32 own = at < extent ? rank(at) : 0;
            const bool counted = at < extent && (shift == 24 || own >> (shift + 8) == last >> (shift + 8));
            const u32 bin = counted ? own >> shift & 255 : 256;
            const u32 same = __match_any_sync(0xffffffffu, bin);
            if (counted && __ffs(same) - 1 == lane) atomicAdd(&counts[bin], __popc(same));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 before = 0, bin = 0;
            while (bin < 255 && before + counts[bin] < wanted) before += counts[bin++];
            bounds[0] = bin;
            bounds[1] = before;
        }
        __syncthreads();
        last |= bounds[0] << shift;
        wanted -= bounds[1];
        equal = counts[bounds[0]];
        __syncthreads();
    }
    // Those before the last, in any order: there are fewer than are kept.
    if (threadIdx.x == 0) taken = 0;
    __syncthreads();
    const bool all_equal = keep - wanted + equal <= ROOM;
    for (int at = threadIdx.x; at < extent; at += THREADS) {
        const u32 own = rank(at);
        if (own < last || (all_equal && own == last)) found[atomicAdd(&taken, 1)] = (u64)own << 32 | (u32)at;
    }
    __syncthreads();
    // Where too many equal it, its first ones in order.
    int size = (int)taken;
    for (int from = 0; !all_equal && from < extent && size < keep; from += THREADS) {
        const int at = from + threadIdx.x;
        const bool own = at < extent && rank(at) == last;
        const u32 votes = __ballot_sync(0xffffffffu, own);
        if (lane == 0) of_warps[warp] = __popc(votes);
        __syncthreads();
        int place = size + __popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < THREADS / 32; ++w) {
            if (w < warp) place += of_warps[w];
            size += of_warps[w];
        }
        if (own && place < keep) found[place] = (u64)last << 32 | (u32)at;
        __syncthreads();
    }
    size = min(size, all_equal ? ROOM : keep);
    int sorted = 1;
    while (sorted < size) sorted <<= 1;
    for (int at = size + threadIdx.x; at < sorted; at += THREADS) found[at] = ~0ull;
    __syncthreads();
    for (int run = 2; run <= sorted; run <<= 1)
        for (int apart = run >> 1; apart > 0; apart >>= 1) {
            for (int pair = threadIdx.x; pair < sorted / 2; pair += THREADS) {
                const int low = pair / apart * apart * 2 + pair % apart, high = low + apart;
                const u64 a = found[low], b = found[high];
                if ((b < a) == ((low & run) == 0)) { found[low] = b; found[high] = a; }
            }
            __syncthreads();
        }
    const i64 to = blockIdx.x / inner * keep * inner + blockIdx.x % inner;
    for (int k = threadIdx.x; k < keep; k += THREADS) {
        const int at = (int)(u32)found[k];
        ((D::Raw*)values)[to + k * inner] = ((const D::Raw*)x)[base + at * inner];
        indices[to + k * inner] = at;
    }
}
#else

__device__ inline bool is_nan(float x) { return x != x; }
__device__ inline bool is_nan(i64) { return false; }

__device__ inline bool before(const void* x, i64 base, i64 inner, i64 extent, int a, int b) {
    if (a >= extent || b >= extent) return a < b;
    const D::Sum p = (D::Sum)at<D>(x, base + a * inner), q = (D::Sum)at<D>(x, base + b * inner);
    if (is_nan(p) || is_nan(q)) return is_nan(p) == is_nan(q) ? a < b : is_nan(q);
    if (p == q) return a < b;
    return DESCENDING ? p > q : p < q;
}

extern "C" __global__ __launch_bounds__(1024) void sort(
    const void* __restrict__ x, void* __restrict__ values, int* __restrict__ indices, int* scratch, Numbers<5> n
) {
    const i64 extent = n.v[1], inner = n.v[2], keep = n.v[3], size = n.v[4];
    int* order = scratch + blockIdx.x * size;
    for (i64 line = blockIdx.x; line < n.v[0] * inner; line += gridDim.x) {
        const i64 base = line / inner * extent * inner + line % inner;
        for (i64 e = threadIdx.x; e < size; e += blockDim.x) order[e] = (int)e;
        __syncthreads();
        for (i64 run = 2; run <= size; run <<= 1)
            for (i64 apart = run >> 1; apart > 0; apart >>= 1) {
                for (i64 pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
                    const i64 low = pair / apart * apart * 2 + pair % apart, high = low + apart;
                    const int a = order[low], b = order[high];
                    const bool up = (low & run) == 0;
                    if (before(x, base, inner, extent, b, a) == up) { order[low] = b; order[high] = a; }
                }
                __syncthreads();
            }
        const i64 to = line / inner * keep * inner + line % inner;
        for (i64 k = threadIdx.x; k < keep; k += blockDim.x) {
            ((D::Raw*)values)[to + k * inner] = ((const D::Raw*)x)[base + order[k] * inner];
            indices[to + k * inner] = order[k];
        }
        __syncthreads();
    }
}
#endif
