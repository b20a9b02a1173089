// Rotary position embedding, and the writing of keys and values to a paged cache. Floor: each element read and written
// once. A block makes HEADS heads of a token.
// Defines: D of what is rotated; DIM; HEADS of a block; those of `rotate.cuh`; WRITE, 0 or 1; with it CACHE, the dtype
// of the cache, BLOCK, the tokens of one of its blocks, and SIDES, 2 or 1: with one there is no v.
// Numbers: tokens, heads, slots of the cache.

#if WRITE
extern "C" __global__ __launch_bounds__(256) void kv_write(
    CACHE::Raw* __restrict__ cache, const D::Raw* __restrict__ k, const D::Raw* __restrict__ v,
    const int* __restrict__ positions, const int* __restrict__ slots, Numbers<3> n
) {
    __shared__ float cosine[PAIRS + 1], sine[PAIRS + 1];
    others_may_begin();
    after_others();
    const int token = blockIdx.x, tokens = (int)n.v[0], heads = (int)n.v[1];
    const int slot = slots[token];
    // Of equal slots the last token's stays.
    bool later = false;
    for (int t = token + 1 + threadIdx.x; t < tokens; t += blockDim.x) later |= slots[t] == slot;
    if (__syncthreads_or(later) || slot < 0 || slot >= n.v[2]) return;
#if PAIRS
    angles(positions[token], cosine, sine);
#endif
    const i64 side = (i64)heads * BLOCK * DIM, base = (i64)(slot / BLOCK) * SIDES * side + (slot % BLOCK) * DIM;
    const int start = blockIdx.y * HEADS * DIM, end = min(start + HEADS * DIM, heads * DIM);
    for (int i = start + threadIdx.x; i < end; i += blockDim.x) {
        const int head = i / DIM, e = i % DIM;
        const i64 from = (i64)token * heads * DIM + head * DIM, to = base + (i64)head * BLOCK * DIM + e;
        cache[to] = CACHE::store(D::wrap(rotated(k + from, e, cosine, sine)));
        if (SIDES > 1) cache[side + to] = CACHE::store(D::load(v[from + e]));
    }
}
#else
extern "C" __global__ __launch_bounds__(256) void rope(
    const D::Raw* __restrict__ x, const int* __restrict__ positions, D::Raw* __restrict__ out, Numbers<2> n
) {
    __shared__ float cosine[PAIRS + 1], sine[PAIRS + 1];
    others_may_begin();
    after_others();
    const int token = blockIdx.x, heads = (int)n.v[1];
    angles(positions[token], cosine, sine);
    const int first = blockIdx.y * HEADS * DIM, end = min(first + HEADS * DIM, heads * DIM);
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
        const i64 from = (i64)token * heads * DIM + i / DIM * DIM;
        out[from + i % DIM] = D::store(rotated(x + from, i % DIM, cosine, sine));
    }
}
#endif
