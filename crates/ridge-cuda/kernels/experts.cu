// Around the products of experts: the router's choice, pairs of tokens and experts in the order of experts, and the sum of
// what experts gave. Nothing is read back to the host. Floor: a launch each.
// Defines: ROUTER, with D of logits and those of `choose.cuh`; or PERMUTATION, with TOP_K; or none
// of them, with D, TOP_K, VECTOR and ADD, 1 where the sum is added to `r`.

#if ROUTER
// A warp makes a token. Numbers: tokens.
extern "C" __global__ __launch_bounds__(128) void moe_router(
    const D::Raw* __restrict__ logits, const OFFSET_TYPE::Raw* __restrict__ bias, int* __restrict__ ids, float* __restrict__ weights,
    float scale, Numbers<1> n
) {
    others_may_begin();
    after_others();
    const i64 token = (i64)blockIdx.x * 4 + (threadIdx.x >> 5);
    if (token >= n.v[0]) return;
    choose(
        [&](int expert) { return D::load(logits[token * EXPERTS + expert]); }, bias, scale, ids + token * TOP_K,
        weights + token * TOP_K, nullptr
    );
}
#elif PERMUTATION
// A block makes an expert: it counts the pairs of experts before, and puts its own behind these, in their order. One block
// more makes what goes to no expert. Numbers: pairs, experts.
extern "C" __global__ __launch_bounds__(256) void expert_permutation(
    const int* __restrict__ ids, const int* __restrict__ seq_ids, int* __restrict__ rows, int* __restrict__ places,
    int* __restrict__ offsets, Numbers<2> n
) {
    __shared__ int lower[8], counts[8];
    others_may_begin();
    after_others();
    const int pairs = (int)n.v[0], experts = (int)n.v[1], mine = blockIdx.x;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    auto expert = [&](int pair) {
        const int id = ids[pair];
        return id < 0 || id >= experts || seq_ids[pair / TOP_K] < 0 ? experts : id;
    };
    // A warp goes over pairs that follow each other, so that it needs no other's counts but where it begins.
    const int share = (pairs + 8 * 32 - 1) / (8 * 32) * 32, begin = min(warp * share, pairs), end = min(begin + share, pairs);
    int before = 0, own = 0;
    for (int pair = begin + lane; pair < end; pair += 32) {
        const int of = expert(pair);
        before += of < mine;
        own += of == mine;
    }
    before = __reduce_add_sync(0xffffffffu, before);
    own = __reduce_add_sync(0xffffffffu, own);
    if (lane == 0) {
        lower[warp] = before;
        counts[warp] = own;
    }
    __syncthreads();
    before = 0;
    for (int w = 0; w < 8; ++w) before += lower[w];
    if (threadIdx.x == 0) offsets[mine] = before;
    if (mine == experts) {
        for (int pair = threadIdx.x; pair < pairs; pair += 256) {
            if (expert(pair) == experts) places[pair] = -1;
            if (pair >= before) rows[pair] = -1;
        }
        return;
    }
    int next = before;
    for (int w = 0; w < warp; ++w) next += counts[w];
    for (int base = begin; base < end; base += 32) {
        const int pair = base + lane;
        const bool is = pair < end && expert(pair) == mine;
        const u32 votes = __ballot_sync(0xffffffffu, is);
        if (is) {
            const int place = next + __popc(votes & ((1u << lane) - 1));
            places[pair] = place;
            rows[place] = pair / TOP_K;
        }
        next += __popc(votes);
    }
}
#else
// A thread makes VECTOR elements of a token at a time. Numbers: rows of y, elements of a row.
union Vector { uint4 whole; D::Raw part[16 / sizeof(D::Raw)]; };

extern "C" __global__ __launch_bounds__(256) void expert_combine(
    const D::Raw* __restrict__ y, const int* __restrict__ places, const float* __restrict__ weights,
    const D::Raw* __restrict__ r, D::Raw* __restrict__ out, Numbers<2> n
) {
    const i64 hidden = n.v[1];
    others_may_begin();
    after_others();
    int place[TOP_K + !TOP_K];
    float weight[TOP_K + !TOP_K];
#pragma unroll
    for (int i = 0; i < TOP_K; ++i) {
        place[i] = places[(i64)blockIdx.x * TOP_K + i];
        weight[i] = weights[(i64)blockIdx.x * TOP_K + i];
        if (place[i] >= n.v[0]) place[i] = -1;
    }
    for (i64 e = threadIdx.x * VECTOR; e < hidden; e += blockDim.x * VECTOR) {
        float sum[VECTOR] = {};
#pragma unroll
        for (int i = 0; i < TOP_K; ++i) {
            if (place[i] < 0) continue;
            const D::Raw* from = y + place[i] * hidden + e;
            Vector x;
            if (VECTOR > 1) x.whole = *(const uint4*)from; else x.part[0] = *from;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sum[v] = fmaf(weight[i], D::load(x.part[v]), sum[v]);
        }
        Vector x;
        const i64 at = blockIdx.x * hidden + e;
#if ADD
        if (VECTOR > 1) x.whole = *(const uint4*)(r + at); else x.part[0] = r[at];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum[v] = D::load(x.part[v]) + D::wrap(sum[v]);
#endif
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) x.part[v] = D::store(sum[v]);
        D::Raw* to = out + at;
        if (VECTOR > 1) *(uint4*)to = x.whole; else *to = x.part[0];
    }
}
#endif
