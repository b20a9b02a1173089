// Logits as a row asks for them: biases, penalties of what was said, of continuing it, and forbidden tokens. A block makes
// SLICE logits of a row and looks at all of the row's list or history for them, so no two blocks write one logit and sums
// have one order. Rows that ask for nothing are copied. Floor: the logits read and written once.
// Defines: D of the logits, and BIAS, PENALTIES, DRY with DEPTH, the longest repetition that counts, or FORBID.

#define SLICE 2048
#define THREADS 256

#if PENALTIES || DRY
// A row's tokens, in blocks of a history. A block that is not there holds zeros.
struct Said {
    const int *history, *table;
    i64 blocks;
    int block_size;
    __device__ int at(int position) const {
        const int block = table[position / block_size];
        return block >= 0 && block < blocks ? history[(i64)block * block_size + position % block_size] : 0;
    }
};
#endif

#if BIAS
// Numbers: elements of a row, biases of a row.
extern "C" __global__ __launch_bounds__(THREADS) void logit_bias(
    const D::Raw* __restrict__ x, const int* __restrict__ ids, const float* __restrict__ values, float* __restrict__ y,
    Numbers<2> n
) {
    __shared__ int listed[THREADS];
    __shared__ float added[THREADS];
    const i64 row = blockIdx.y, vocab = n.v[0];
    const int first = blockIdx.x * SLICE, biases = (int)n.v[1];
    float logit[SLICE / THREADS];
#pragma unroll
    for (int i = 0; i < SLICE / THREADS; ++i) {
        const int at = first + i * THREADS + threadIdx.x;
        logit[i] = at < vocab ? D::load(x[row * vocab + at]) : 0.0f;
    }
    for (int from = 0; from < biases; from += THREADS) {
        const int nth = from + threadIdx.x;
        const int id = nth < biases ? ids[row * biases + nth] : -1;
        const bool ours = id >= first && id < first + SLICE && id < vocab;
        if (!__syncthreads_or(ours)) continue;
        listed[threadIdx.x] = ours ? id - first : -1;
        added[threadIdx.x] = ours ? values[row * biases + nth] : 0.0f;
        __syncthreads();
        for (int j = 0; j < THREADS; ++j) {
            const int slot = listed[j];
            if (slot < 0 || slot % THREADS != threadIdx.x) continue;
#pragma unroll
            for (int i = 0; i < SLICE / THREADS; ++i)
                if (slot / THREADS == i) logit[i] += added[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < SLICE / THREADS; ++i) {
        const int at = first + i * THREADS + threadIdx.x;
        if (at < vocab) y[row * vocab + at] = logit[i];
    }
}
#elif PENALTIES
// Numbers: elements of a row, blocks of the history, tokens of a block, blocks of a row.
extern "C" __global__ __launch_bounds__(THREADS) void penalties(
    const D::Raw* __restrict__ x, const int* __restrict__ history, const int* __restrict__ table,
    const int* __restrict__ lengths, const int* __restrict__ prompts, const float* __restrict__ repetitions,
    const float* __restrict__ frequencies, const float* __restrict__ presences, float* __restrict__ y, Numbers<4> n
) {
    // Of each token how often the answer has it, and in the highest bit whether anything has.
    __shared__ u32 counts[SLICE];
    const i64 row = blockIdx.y, vocab = n.v[0];
    const int first = blockIdx.x * SLICE;
    const float repetition = repetitions[row], frequency = frequencies[row], presence = presences[row];
    const bool asks = !(repetition == 1.0f && frequency == 0.0f && presence == 0.0f);
    if (asks) {
        for (int i = threadIdx.x; i < SLICE; i += THREADS) counts[i] = 0;
        __syncthreads();
        const Said said = {history, table + row * n.v[3], n.v[1], (int)n.v[2]};
        const int length = (int)min((i64)max(lengths[row], 0), n.v[2] * n.v[3]), prompt = prompts[row];
        for (int position = threadIdx.x; position < length; position += THREADS) {
            const int id = said.at(position);
            if (id < first || id >= first + SLICE) continue;
            if (position >= prompt) atomicAdd(&counts[id - first], 1);
            atomicOr(&counts[id - first], 0x80000000u);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < SLICE && first + i < vocab; i += THREADS) {
        float logit = D::load(x[row * vocab + first + i]);
        if (asks && counts[i]) {
            const u32 times = counts[i] & 0x7fffffffu;
            logit = logit > 0.0f ? logit / repetition : logit * repetition;
            if (times) logit = logit - (float)times * frequency - presence;
        }
        y[row * vocab + first + i] = logit;
    }
}
#elif DRY
// Numbers: elements of a row, blocks of the history, tokens of a block, blocks of a row, breakers of a row.
extern "C" __global__ __launch_bounds__(THREADS) void dry(
    const D::Raw* __restrict__ x, const int* __restrict__ history, const int* __restrict__ table,
    const int* __restrict__ lengths, const float* __restrict__ multipliers, const float* __restrict__ bases,
    const int* __restrict__ alloweds, const int* __restrict__ ranges, const int* __restrict__ breakers,
    float* __restrict__ y, Numbers<5> n
) {
    __shared__ int longest[SLICE], tail[DEPTH];
    const i64 row = blockIdx.y, vocab = n.v[0];
    const int first = blockIdx.x * SLICE;
    const float multiplier = multipliers[row], base = bases[row];
    const int allowed = alloweds[row], range = ranges[row];
    const int length = (int)min((i64)max(lengths[row], 0), n.v[2] * n.v[3]);
    const int start = range > 0 ? max(length - range, 0) : 0;
    // Not a number asks for nothing.
    const bool asks = multiplier > 0.0f && length > start;
    if (asks) {
        const Said said = {history, table + row * n.v[3], n.v[1], (int)n.v[2]};
        const int* of_row = breakers + row * n.v[4];
        auto breaks = [&](int id) {
            for (int i = 0; i < (int)n.v[4]; ++i)
                if (of_row[i] == id) return true;
            return false;
        };
        for (int i = threadIdx.x; i < SLICE; i += THREADS) longest[i] = 0;
        // The last tokens from the end on; a breaker, or what is before the first, is like none.
        if (threadIdx.x < DEPTH) {
            const int position = length - 1 - threadIdx.x, id = position >= start ? said.at(position) : -1;
            tail[threadIdx.x] = id < 0 || breaks(id) ? -1 : id;
        }
        __syncthreads();
        for (int position = start + threadIdx.x; position < length - 1; position += THREADS) {
            const int next = said.at(position + 1);
            if (next < first || next >= first + SLICE) continue;
            int same = 0;
            while (same < DEPTH && position - same >= start && tail[same] >= 0 && said.at(position - same) == tail[same])
                ++same;
            if (same > 0 && !breaks(next)) atomicMax(&longest[next - first], same);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < SLICE && first + i < vocab; i += THREADS) {
        float logit = D::load(x[row * vocab + first + i]);
        if (asks && longest[i] > 0 && longest[i] >= allowed)
            logit -= multiplier * powf(base, (float)longest[i] - (float)allowed);
        y[row * vocab + first + i] = logit;
    }
}
#else
// Numbers: elements of a row, words of a row.
extern "C" __global__ __launch_bounds__(THREADS) void forbid_tokens(
    const D::Raw* __restrict__ x, const u32* __restrict__ words, float* __restrict__ y, Numbers<2> n
) {
    const i64 row = blockIdx.y, vocab = n.v[0];
    const int first = blockIdx.x * SLICE;
    for (int i = threadIdx.x; i < SLICE && first + i < vocab; i += THREADS) {
        const int token = first + i;
        const u32 word = token / 32 < n.v[1] ? words[row * n.v[1] + token / 32] : 0;
        y[row * vocab + token] = word >> token % 32 & 1 ? -INF : D::load(x[row * vocab + token]);
    }
}
#endif
