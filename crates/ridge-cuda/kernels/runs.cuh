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
#endif
#define SOME_APART (PROMPTS || FEW)
