// Causal attention over a paged cache, each token for itself: for steps of few tokens a sequence, and for any dtype
// and width of heads. Floor: the sequence's keys and values read once for all query heads that share them.
// A block makes one token's HEADS query heads of one key head, over one of the equal spans that the token's own positions
// are cut into (the third axis of the grid, so that long contexts fill the GPU); `attention_join` puts spans together.
// How many spans there are at most is a number of the launch; how long they are follows from the token's position, so a
// table wider than the sequence costs nothing. Groups of LANES lanes take a position each, and keep a running maximum,
// sum and weighted values of their own, which are joined in a fixed order. Where a token has a selection of positions, those
// take the place of all that it sees, and a warp passes over those that are none.
// Defines: D of q and the result; CACHE; DIM; SHARE, query heads of a key head; HEADS of a block; BLOCK, tokens of a
// cache block; SIDES of the cache, keys and values or one for both; CODED, 0 or 1: are there scales of keys and values; PAIRS of q that are rotated on the way, 0 for none, and what `rotate.cuh` takes; WINDOW, 0 for none; SOFTCAP, 0 or 1, with CAP; SINKS, 0 or 1: is there a score of each head without a value; SELECTED, 0 or the
// columns of the selection, which takes the place of `positions`; -1 is none; WIDE, elements of a lane's load; LANES of a position.
// Numbers: tokens, query heads, blocks of a sequence, cache blocks, spans.

#define MASKED -3.0e38f
#define CHUNKS ((DIM + WIDE * LANES - 1) / (WIDE * LANES))
#define GROUPS (256 / LANES)
// Loads ahead; decoding bytes takes registers.
#define AHEAD (sizeof(CACHE::Raw) == 1 ? 2 : 4)
#define PARTS ((SHARE + HEADS - 1) / HEADS)
// Positions that a block takes at a time, of which spans are multiples.
#define STEP (GROUPS * AHEAD)

struct alignas(WIDE * sizeof(CACHE::Raw)) Piece { CACHE::Raw part[WIDE]; };

__device__ inline float bent(float score) {
#if SOFTCAP
    return CAP * tanhf(score * (1.0f / CAP));
#else
    return score;
#endif
}

// The weight of a score less the largest: in 16 bits by the quick power of two, whose error is far below a rounding.
__device__ inline float power(float x) {
    if (sizeof(D::Raw) > 2) return expf(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896340736f));
    return y;
}

#if JOIN
// Numbers: tokens, query heads, spans. A block makes one head of a token.
extern "C" __global__ void attention_join(const float* __restrict__ partial, D::Raw* __restrict__ out,
#if SINKS
    const SINK::Raw* __restrict__ sinks,
#endif
    Numbers<3> n
) {
    __shared__ float weights[SPANS], totals[SPANS];
    others_may_begin();
    after_others();
    const i64 at = blockIdx.x;
    const int spans = (int)n.v[2];
    const float* of = partial + at * spans * (DIM + 2);
    for (int s = threadIdx.x; s < spans; s += blockDim.x) {
        weights[s] = of[s * (DIM + 2)];
        totals[s] = of[s * (DIM + 2) + 1];
    }
    __syncthreads();
    // Spans without positions are the last ones, and have no values.
    float most = MASKED, total = 0.0f;
    int used = 0;
    for (int s = 0; s < spans; ++s) {
        most = op_max(most, weights[s]);
        if (weights[s] != MASKED) used = s + 1;
    }
    __syncthreads();
    for (int s = threadIdx.x; s < spans; s += blockDim.x) weights[s] = power(weights[s] - most);
    __syncthreads();
    for (int s = 0; s < used; ++s) total += totals[s] * weights[s];
#if SINKS
    if (total != 0.0f) total += power(SINK::load(sinks[at % n.v[1]]) - most);
#endif
    const float scale = total == 0.0f ? 1.0f : 1.0f / total;
    for (int e = threadIdx.x; e < DIM; e += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < used; ++s) sum += of[s * (DIM + 2) + 2 + e] * weights[s];
        out[at * DIM + e] = D::store(sum * scale);
    }
}
#else
extern "C" __global__ __launch_bounds__(256, 1) void attention(
    const D::Raw* __restrict__ q, const CACHE::Raw* __restrict__ cache, const int* __restrict__ table,
    const int* __restrict__ ids, const int* __restrict__ positions,
#if CODED
    const float* __restrict__ scales,
#endif
#if SINKS
    const SINK::Raw* __restrict__ sinks,
#endif
    D::Raw* __restrict__ out, float* __restrict__ partial, float scale, Numbers<5> n
) {
    others_may_begin();
    after_others();
    __shared__ float maxima[GROUPS][HEADS], totals[GROUPS][HEADS], values[GROUPS][HEADS][DIM];
    others_may_begin();
    after_others();
    const int heads = (int)n.v[1], keys = heads / SHARE, span = blockIdx.z, spans = (int)n.v[4];
    const i64 token = blockIdx.x;
    const int key = blockIdx.y / PARTS, head = key * SHARE + blockIdx.y % PARTS * HEADS;
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int id = ids[token], position = SELECTED ? SELECTED - 1 : positions[token];
    const i64 side = (i64)keys * BLOCK * DIM;
    const int* row = table + (i64)max(id, 0) * n.v[2];
    // Positions [first, end) of this span, of which all groups take one at a time.
    int first = WINDOW > 0 ? max(0, position - WINDOW + 1) : 0;
    int end = id < 0 ? 0 : SELECTED ? SELECTED : (int)min((i64)position + 1, n.v[2] * BLOCK);
    if (spans > 1) {
        const i64 steps = (max(0, end - first) + STEP - 1) / STEP, each = (steps + spans - 1) / spans * STEP;
        const i64 start = first + span * each;
        end = (int)min((i64)end, start + each);
        if (start >= end) {
            for (int h = threadIdx.x; h < HEADS && head + h < (key + 1) * SHARE; h += blockDim.x) {
                float* to = partial + ((token * heads + head + h) * spans + span) * (DIM + 2);
                to[0] = MASKED;
                to[1] = 0.0f;
            }
            return;
        }
        first = (int)start;
    }

#if PAIRS
    __shared__ float cosine[PAIRS], sine[PAIRS];
    angles(position, cosine, sine);
#endif
    float query[HEADS][CHUNKS][WIDE], value[HEADS][CHUNKS][WIDE], most[HEADS], total[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        most[h] = MASKED;
        total[h] = 0.0f;
        const D::Raw* from = q + (token * heads + min(head + h, heads - 1)) * DIM;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                const int e = (c * LANES + lane) * WIDE + i;
#if PAIRS
                query[h][c][i] = e < DIM ? D::wrap(rotated({from}, e, cosine, sine)) * scale : 0.0f;
#else
                query[h][c][i] = e < DIM ? D::load(from[e]) * scale : 0.0f;
#endif
                value[h][c][i] = 0.0f;
            }
    }
    for (int start = first; start < end; start += STEP) {
        Piece ks[AHEAD][CHUNKS], vs[AHEAD][CHUNKS];
        bool seen[AHEAD];
#if CODED
        float of_key[AHEAD], of_value[AHEAD];
#endif
#if SELECTED
        bool some = false;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int nth = start + a * GROUPS + group, p = nth < end ? positions[token * SELECTED + nth] : -1;
            some |= p >= 0 && p < n.v[2] * BLOCK;
        }
        if (!__any_sync(0xffffffffu, some)) continue;
#endif
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            int p = start + a * GROUPS + group;
            seen[a] = p < end;
#if SELECTED
            p = seen[a] ? positions[token * SELECTED + p] : 0;
            seen[a] = seen[a] && p >= 0 && p < n.v[2] * BLOCK;
            p = seen[a] ? p : 0;
#endif
            const i64 block = seen[a] ? row[p / BLOCK] : 0;
            const CACHE::Raw* from = cache + block * SIDES * side + ((i64)key * BLOCK + p % BLOCK) * DIM;
#if CODED
            const bool there = seen[a] && block >= 0 && block < n.v[3];
            const float* scale_of = scales + (block * SIDES * keys + key) * BLOCK + p % BLOCK;
            of_key[a] = there ? scale_of[0] : 0.0f;
            of_value[a] = there ? scale_of[(SIDES - 1) * keys * BLOCK] : 0.0f;
#endif
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int e = (c * LANES + lane) * WIDE;
                const bool real = seen[a] && e < DIM && block >= 0 && block < n.v[3];
                ks[a][c] = real ? *(const Piece*)(from + e) : Piece();
                vs[a][c] = real ? *(const Piece*)(from + (SIDES - 1) * side + e) : Piece();
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float score[AHEAD], largest = most[h];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                score[a] = 0.0f;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                    for (int i = 0; i < WIDE; ++i)
                        score[a] = fmaf(query[h][c][i], CACHE::load(ks[a][c].part[i]), score[a]);
            }
#pragma unroll
            for (int step = LANES / 2; step > 0; step >>= 1)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) score[a] += __shfl_xor_sync(0xffffffffu, score[a], step);
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
#if CODED
                score[a] *= of_key[a];
#endif
                score[a] = seen[a] ? bent(score[a]) : MASKED;
                largest = op_max(largest, score[a]);
            }
            const float keep = power(most[h] - largest);
            most[h] = largest;
            total[h] *= keep;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < WIDE; ++i) value[h][c][i] *= keep;
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                float weight = score[a] == MASKED ? 0.0f : power(score[a] - largest);
                total[h] += weight;
#if CODED
                weight *= of_value[a];
#endif
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                    for (int i = 0; i < WIDE; ++i)
                        value[h][c][i] = fmaf(weight, CACHE::load(vs[a][c].part[i]), value[h][c][i]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        if (lane == 0) { maxima[group][h] = most[h]; totals[group][h] = total[h]; }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                const int e = (c * LANES + lane) * WIDE + i;
                if (e < DIM) values[group][h][e] = value[h][c][i];
            }
    }
    __syncthreads();
    // Each group's factor, in the place of its maximum.
    __shared__ float largest_of[HEADS], all_of[HEADS];
    if (threadIdx.x < HEADS) {
        float largest = MASKED, all = 0.0f;
        for (int g = 0; g < GROUPS; ++g) largest = op_max(largest, maxima[g][threadIdx.x]);
        for (int g = 0; g < GROUPS; ++g) {
            const float factor = power(maxima[g][threadIdx.x] - largest);
            all += totals[g][threadIdx.x] * factor;
            maxima[g][threadIdx.x] = factor;
        }
        largest_of[threadIdx.x] = largest;
        all_of[threadIdx.x] = all;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * DIM; i += blockDim.x) {
        const int h = i / DIM, e = i % DIM;
        if (head + h >= (key + 1) * SHARE) break;
        float sum = 0.0f;
#pragma unroll 8
        for (int g = 0; g < GROUPS; ++g) sum += values[g][h][e] * maxima[g][h];
        const float largest = largest_of[h], all = all_of[h];
        const i64 at = token * heads + head + h;
        if (spans == 1) {
#if SINKS
            const float whole = all + power(SINK::load(sinks[head + h]) - largest);
#else
            const float whole = all;
#endif
            out[at * DIM + e] = D::store(all == 0.0f ? 0.0f : sum / whole);
        } else {
            float* to = partial + (at * spans + span) * (DIM + 2);
            if (e == 0) { to[0] = largest; to[1] = all; }
            to[2 + e] = sum;
        }
    }
}
#endif
