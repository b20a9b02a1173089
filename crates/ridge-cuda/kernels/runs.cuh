// Which tokens of a step attention takes one by one; others go by tiles. With PROMPTS those behind their sequence's prompt, whose
// lengths `prompts` has; else those in runs of fewer than FEW tokens of one sequence, and none where FEW is 0.
// Defines: PROMPTS, 0 or 1; FEW.

#if PROMPTS
__device__ inline bool is_apart(const int* ids, const int* positions, const int* prompts, int, int token) {
    const int id = ids[token];
    return id >= 0 && positions[token] >= prompts[id];
}
#elif FEW
__device__ inline bool is_apart(const int* ids, const int*, const int*, int tokens, int token) {
    const int id = ids[token];
    int run = 1;
    // Unrolled, it took registers of the threads beside it that compute attention.
#pragma unroll 1
    for (int t = token - 1; t >= 0 && run < FEW && ids[t] == id; --t) ++run;
#pragma unroll 1
    for (int t = token + 1; t < tokens && run < FEW && ids[t] == id; ++t) ++run;
    return run < FEW;
}

// By a warp, of tokens start .. start + 32 BATCH and of 32 on either side, at which a run begins, a bit each; `start` is a multiple of
// 32, and lanes have the ids of the tokens from it on. What is outside of the step is a run of its own.
template <int BATCH> __device__ inline void edges_of(
    u32 (&edges)[BATCH + 2], const int* ids, int tokens, int start, const int (&id)[BATCH]
) {
    const int lane = threadIdx.x & 31, behind = start + BATCH * 32 + lane;
    const int next = behind < tokens ? ids[behind] : -1;
    int last = start > 0 ? ids[start - 32 + lane] : -1;
    // Of the first token it is not known: nothing within a run's few tokens of `start`.
    edges[0] = __ballot_sync(~0u, last != __shfl_up_sync(~0u, last, 1));
#pragma unroll
    for (int b = 0; b <= BATCH; ++b) {
        const int t = start + b * 32 + lane, own = b < BATCH ? id[b] : next;
        const int previous = __shfl_up_sync(~0u, own, 1), first = __shfl_sync(~0u, last, 31);
        edges[b + 1] = __ballot_sync(~0u, t == 0 || t >= tokens || own != (lane == 0 ? first : previous));
        last = own;
    }
}

// Tokens of the run of this lane's token, whose 32 tokens the second of three entries of edges is of; 32 or more where it is longer.
__device__ inline int run_at(const u32* edges) {
    const int lane = threadIdx.x & 31;
    const u32 up_to = __funnelshift_rc(edges[0], edges[1], lane + 1), behind = __funnelshift_rc(edges[1], edges[2], lane + 1);
    return __clz(up_to) + 1 + (behind ? __ffs(behind) - 1 : 32);
}
#endif
#define SOME_APART (PROMPTS || FEW)
