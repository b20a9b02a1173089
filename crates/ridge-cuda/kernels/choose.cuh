// A router's choice of experts.
// Defines: EXPERTS; TOP_K, at most 32; SIGMOID, NORMALISE; BIAS, 0 or 1, is something added to the scores where experts are chosen by them, of
// OFFSET_TYPE.
#define EACH ((EXPERTS + 31) / 32)

// A float as a number of the same order; NaN, below all others, as 0.
__device__ inline u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A token's experts by one warp, of which a lane has every 32nd, from the logits that `logit(expert)` gives: ids, once more in `chosen` if
// it is not null, and weights.
template <class Logits> __device__ inline void choose(
    Logits logit, const OFFSET_TYPE::Raw* more, float scale, int* ids, float* weights, int* chosen
) {
    const u32 all = 0xffffffffu;
    const int lane = threadIdx.x & 31;
    float score[EACH], most = -INF;
    u32 order[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = lane + 32 * i;
        score[i] = expert < EXPERTS ? logit(expert) : -INF;
        most = score[i] > most ? score[i] : most;
    }
    float total = 0.0f;
    if (!SIGMOID) {
        for (int step = 16; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(all, most, step));
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = lane + 32 * i;
        // Powers of logits less the largest have the order of the logits, but where they vanish.
        order[i] = ordered(score[i]);
        score[i] = expert >= EXPERTS ? 0.0f : SIGMOID ? op_sigmoid(score[i]) : expf(score[i] - most);
        if (SIGMOID) order[i] = ordered(score[i]);
        total += score[i];
    }
    if (!SIGMOID) {
        for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(all, total, step);
#pragma unroll
        for (int i = 0; i < EACH; ++i) score[i] = score[i] / total;
    }
#if BIAS
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (lane + 32 * i < EXPERTS) order[i] = ordered(score[i] + OFFSET_TYPE::load(more[lane + 32 * i]));
#endif
    u32 taken = 0;
    float mine = 0.0f, sum = 0.0f;
    for (int choice = 0; choice < TOP_K; ++choice) {
        u32 best = 0;
        float of_best = 0.0f;
        int which = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool better = which == 0x7fffffff || order[i] > best;
            if (lane + 32 * i < EXPERTS && !(taken >> i & 1) && better) {
                best = order[i];
                of_best = score[i];
                which = lane + 32 * i;
            }
        }
        // The first of those that are largest.
        const u32 largest = __reduce_max_sync(all, best);
        which = __reduce_min_sync(all, best == largest ? which : 0x7fffffff);
        of_best = __shfl_sync(all, of_best, which & 31);
        if ((which & 31) == lane) taken |= 1u << (which >> 5);
        if (lane == choice) {
            mine = of_best;
            ids[choice] = which;
            if (chosen) chosen[choice] = which;
        }
        sum += of_best;
    }
    if (lane < TOP_K) weights[lane] = (NORMALISE ? mine / sum : mine) * scale;
}
