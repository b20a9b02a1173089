// A router's choice of experts.
// Defines: EXPERTS; TOP_K, at most 32; SIGMOID, NORMALISE; BIAS, 0 or 1, is something added to the scores where experts are chosen by them, of
// OFFSET_TYPE; EXPERT_GROUPS, at most 32, of which KEPT have the experts that are chosen from: those whose BEST scores have the largest
// sums; 1 where there is no such choice.
#define EACH ((EXPERTS + 31) / 32)

// A float as a number of the same order; NaN, below all others, as 0.
__device__ inline u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The float that `ordered` gave the number of.
__device__ inline float of_order(u32 order) {
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

#if EXPERT_GROUPS > 1
// Puts experts outside of the kept groups below all others.
__device__ inline void within_groups(u32 (&order)[EACH]) {
    const u32 all = 0xffffffffu;
    const int lane = threadIdx.x & 31, size = EXPERTS / EXPERT_GROUPS;
    // Lane g has the sum of group g.
    float mine = 0.0f;
#pragma unroll
    for (int group = 0; group < EXPERT_GROUPS; ++group) {
        float sum = 0.0f;
        u32 taken = 0;
#pragma unroll
        for (int choice = 0; choice < BEST; ++choice) {
            u32 best = 0;
            int which = 0x7fffffff;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (32 * i + 31 < group * size || 32 * i >= (group + 1) * size) continue;
                const int expert = lane + 32 * i;
                const bool within = expert >= group * size && expert < (group + 1) * size && !(taken >> i & 1);
                if (within && (which == 0x7fffffff || order[i] > best)) {
                    best = order[i];
                    which = expert;
                }
            }
            const u32 largest = __reduce_max_sync(all, best);
            sum += of_order(largest);
            if (choice + 1 == BEST) break;
            which = __reduce_min_sync(all, best == largest ? which : 0x7fffffff);
            if ((which & 31) == lane) taken |= 1u << (which >> 5);
        }
        if (lane == group) mine = sum;
    }
    const u32 own = ordered(mine);
    int before = 0;
#pragma unroll
    for (int group = 0; group < EXPERT_GROUPS; ++group) {
        const u32 other = __shfl_sync(all, own, group);
        before += other > own || (other == own && group < lane);
    }
    const u32 kept = __ballot_sync(all, lane < EXPERT_GROUPS && before < KEPT);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (lane + 32 * i < EXPERTS && !(kept >> (lane + 32 * i) / size & 1)) order[i] = ordered(-3.0e38f);
}
#endif

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
#if EXPERT_GROUPS > 1
    within_groups(order);
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
