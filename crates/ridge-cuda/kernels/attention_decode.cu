// Causal attention over a paged cache on tensor cores, each token for itself: for steps of few tokens a sequence. Floor: the
// bytes of the keys and values that the tokens see, read once for all query heads that share them, over the bandwidth.
// The work is (token, key head) units of STEP positions a step, laid end to end and divided evenly over the blocks of the
// grid, which compute their shares from the positions (stream-K: Osama et al. 2023, section 4): long and short sequences
// balance whatever the batch. A unit that lies in one block is complete; others leave a piece in each of their blocks, and the
// block that is the last to leave one puts them together.
// With SPAN the sums of a unit have one order, whatever the grid and the other units: a unit is cut into spans of so many
// positions, of which each is computed for itself, and their results are folded one by one in order. A block takes whole
// spans, folds those that a unit begins with, and leaves a piece for each span of a unit that began in an earlier block.
// A warp takes 16 positions at a time through a ring of its own in shared memory, so warps never wait for each other. The
// query heads that share a key head are the rows of a 16-row matrix tile.
// Defines: D, a 16-bit float, of q, cache and result; DIM, a multiple of 16; SHARE, query heads of a key head; HEADS of a
// unit, at most 16; BLOCK, tokens of a cache block; PAIRS of q that are rotated on the way, and what `rotate.cuh` takes;
// what `codes.cuh` takes; of codes DIM is a multiple of 64; WINDOW, 0 for none; SOFTCAP, 0 or 1, with CAP; SINKS, 0 or 1: is there a score of each head without a value; FEW and PROMPTS: which tokens are taken (runs.cuh), all where both are 0; SPAN,
// a multiple of STEP, or 0; WARPS; STAGES of a ring;
// MAX_BLOCKS of the grid. `counters` are zeros, one for each block, and are zeros again in the end. Shared memory holds the
// rings, or the warps' results, or what weighs the pieces of a unit, with SPAN the results of the spans so far, and an int for
// each token and one more. Numbers: tokens, query heads, blocks of a sequence, cache blocks, pieces of a block.

#if CODED
typedef CODE::Raw Stored;
#else
typedef D::Raw Stored;
#endif
// 16-byte chunks of a row of the cache, and elements of one.
#define WIDE (16 / (int)sizeof(Stored))
#define CHUNKS (DIM / WIDE)
#define STEP (WARPS * 16)
// Positions of what the grid divides.
#define GRAIN (SPAN ? SPAN : STEP)
#define PARTS ((SHARE + HEADS - 1) / HEADS)
// Steps up to which a unit is no later as a whole than in pieces that are put together.
#define SHORT 4
#define MASKED -1.0e30f
// Steps that a block asks for before the launch ahead of it has ended.
#define AHEAD 4
// Tokens of a lane of which what is known of them is loaded at once, on the way to the prefix sums: those among prompts are few of many.
#define BATCH (SOME_APART ? 8 : 1)
// Rows of a tile that are heads: the upper half of a matrix tile is empty for 8 heads or fewer.
#define HALVES (HEADS > 8 ? 2 : 1)
// Eight rows' chunks must be in different banks: turned where a row is a multiple of 128 bytes, else by an odd stride.
#define ROW_CHUNKS (CHUNKS % 8 == 0 || CODED ? CHUNKS : CHUNKS | 1)
#define SIDE_BYTES (16 * ROW_CHUNKS * 16)
// Keys, values, and of codes the scales of both.
#define STAGE_BYTES (2 * SIDE_BYTES + (CODED ? 128 : 0))
#define RING_BYTES (WARPS * STAGES * STAGE_BYTES)
#define RESULT_BYTES (WARPS * HEADS * DIM * 4)
#define WEIGHT_BYTES (HEADS * MAX_BLOCKS * 4)
#define MAX_OF(a, b) ((a) > (b) ? (a) : (b))
#define ROOM_BYTES MAX_OF(RING_BYTES, MAX_OF(RESULT_BYTES, WEIGHT_BYTES))
// Pieces of a block.
#define HELD (SPAN ? (int)n.v[4] : 2)
#define FOLDED_BYTES (SPAN ? HEADS * DIM * 4 : 0)

#if CODED
// Rows are read four lanes to one as keys, by their neighbours too, and every other row as values.
__device__ inline u32 chunk(int r, int c) {
    return (u32)(r * CHUNKS + (CHUNKS % 8 == 0 ? c ^ ((r & 1) << 2 | (r >> 1 & 3) << 1) & 7 : c ^ (r >> 1 & 3))) * 16;
}
#else
__device__ inline u32 chunk(int r, int c) { return (u32)(r * ROW_CHUNKS + (CHUNKS % 8 == 0 ? c ^ (r & 7) : c)) * 16; }
#endif

// Bytes of a value that a lane loads at a time.
#define VALUE_BYTES (DIM % 128 == 0 ? 16 : 8)

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A block's pieces in scratch memory: of the unit it begins within, and of the one it ends within; with SPAN of the one it ends
// within, then of each span of the one it begins within. Each has the maximum and sum of every head in front of its values.
struct alignas(16) Piece { float most[HEADS], total[HEADS]; float4 value[HEADS][DIM / 4]; };

// A row's result over some positions: the largest score, the sum of powers and an element of the sum of values.
struct Folded { float most, total, value; };

// The result over the positions of `a` and of those of `b` behind them.
__device__ inline Folded fold(Folded a, Folded b) {
    const float largest = fmaxf(a.most, b.most);
    const float of_a = power(a.most - largest), of_b = power(b.most - largest);
    return {largest, fmaf(b.total, of_b, a.total * of_a), fmaf(b.value, of_b, a.value * of_a)};
}

// `all` steps in their order over the blocks, as evenly as they divide: the first `extra` blocks have one more than `each`.
struct Division {
    int blocks, each, extra;
    __device__ Division(int all, int most) {
        blocks = max(1, min(most, all));
        each = all / blocks;
        extra = all % blocks;
    }
    // The first step of a block.
    __device__ int begin(int block) const { return block * each + min(block, extra); }
    // The block that has a step.
    __device__ int block_of(int step) const {
        const int longer = extra * (each + 1);
        return step < longer ? step / (each + 1) : extra + (step - longer) / each;
    }
};

extern "C" __global__ __launch_bounds__(WARPS * 32, CODED ? 3 : 2) void attention_decode(
    const D::Raw* __restrict__ q, const Stored* __restrict__ cache, const int* __restrict__ table,
    const int* __restrict__ ids, const int* __restrict__ positions,
#if CODED
    const float* __restrict__ scales,
#endif
#if SINKS
    const SINK::Raw* __restrict__ sinks,
#endif
#if PROMPTS
    const int* __restrict__ prompts,
#endif
    D::Raw* __restrict__ out, Piece* pieces, u32* counters, float scale,
#if NORM
    const NORM_TYPE::Raw* __restrict__ gain, float eps,
#endif
    Numbers<5> n
) {
    extern __shared__ __align__(1024) u8 room[];
#if !PROMPTS
    const int* prompts = nullptr;
#endif
    // Steps of all key heads of the tokens before each token.
    int* before = (int*)(room + ROOM_BYTES + FOLDED_BYTES);
    __shared__ int sums[WARPS];
    __shared__ float maxima[WARPS][HEADS], totals[WARPS][HEADS];
    __shared__ bool last;
#if SPAN
    // Of the spans so far of the unit that the block is in.
    float* folded = (float*)(room + ROOM_BYTES);
    __shared__ float folded_most[HEADS], folded_total[HEADS];
#endif
#if PAIRS
    __shared__ float cosine[PAIRS], sine[PAIRS];
#endif
    others_may_begin();
#if PROMPTS
    after_others();
#endif
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, upper = lane >> 2, pair = lane & 3;
    const int tokens = (int)n.v[0], heads = (int)n.v[1], keys = heads / SHARE, units = keys * PARTS;
    const i64 side = (i64)keys * BLOCK * DIM;
    const u32 ring = shared_address(room) + warp * STAGES * STAGE_BYTES;
    auto first_of = [&](int position) { return WINDOW > 0 ? max(0, position - WINDOW + 1) : 0; };
    auto end_of = [&](int id, int position) { return id < 0 ? 0 : (int)min((i64)position + 1, n.v[2] * BLOCK); };

    // Prefix sums of steps: a range of tokens to a warp, BATCH of them to a lane at a time.
    const int each = (tokens + WARPS * 32 - 1) / (WARPS * 32) * 32, from = warp * each, to = min(from + each, tokens);
    int sum = 0;
    bool longer = false, empty = false;
#pragma unroll 1
    for (int start = from; start < to; start += BATCH * 32) {
        int id[BATCH], position[BATCH];
        bool taken[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int t = start + b * 32 + lane;
            taken[b] = t < to;
            // Runs go on behind what is this warp's.
            id[b] = t < (FEW && !PROMPTS ? tokens : to) ? ids[t] : -1;
#if PROMPTS || !FEW
            position[b] = taken[b] ? positions[t] : 0;
#endif
        }
#if PROMPTS
        int prompt[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) prompt[b] = id[b] >= 0 ? prompts[id[b]] : 0;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) taken[b] = id[b] >= 0 && position[b] >= prompt[b];
#elif FEW
        u32 edges[BATCH + 2];
        edges_of<BATCH>(edges, ids, tokens, start, id);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            taken[b] = taken[b] && run_at(edges + b) < FEW;
            position[b] = taken[b] ? positions[start + b * 32 + lane] : 0;
        }
#endif
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (start + b * 32 >= to) break;
            int own = 0;
            if (taken[b]) {
                const int seen = end_of(id[b], position[b]) - first_of(position[b]);
                own = max(0, (seen + GRAIN - 1) / GRAIN) * units;
                longer |= own > SHORT * units;
                empty |= own == 0;
            }
            int scan = own;
            if (!SOME_APART || __any_sync(~0u, own > 0)) {
#pragma unroll
                for (int step = 1; step < 32; step <<= 1) {
                    const int other = __shfl_up_sync(~0u, scan, step);
                    if (lane >= step) scan += other;
                }
            }
            if (start + b * 32 + lane < to) before[start + b * 32 + lane] = sum + scan - own;
            sum += __shfl_sync(~0u, scan, 31);
        }
    }
    if (lane == 0) sums[warp] = sum;
#if SOME_APART
    const bool any_empty = __syncthreads_or(empty);
#else
    // It is seen in the end.
    const bool any_empty = true;
    __syncthreads();
#endif
    int base = 0;
    for (int w = 0; w < warp; ++w) base += sums[w];
    if (base > 0)
        for (int t = from + lane; t < to; t += 32) before[t] += base;
    if (threadIdx.x == WARPS * 32 - 1) before[tokens] = base + sum;
    const bool any_longer = __syncthreads_or(longer);
    const int all = before[tokens];
    // Few short units are a block each.
    const bool by_unit = !SPAN && !any_longer && tokens * units <= (int)gridDim.x;
    const Division division(all, gridDim.x);
    int low = 0, high = 0;
    if ((int)blockIdx.x < (by_unit ? tokens * units : division.blocks)) {
        low = division.begin(blockIdx.x);
        high = division.begin(blockIdx.x + 1);
    }
    if (by_unit && high > 0) {
        const int of = blockIdx.x / units, steps = (before[of + 1] - before[of]) / units;
        low = before[of] + (blockIdx.x - of * units) * steps;
        high = low + steps;
    }
    // The last token that begins at a step or before.
    auto token_at = [&](int step) {
        int token = 0;
        for (int span = tokens; span > 1;) {
            const int half = span / 2;
            if (before[token + half] <= step) token += half;
            span -= half;
        }
        return token;
    };
    int token = low < high ? token_at(low) : 0;
    // What a block has of a unit from a step of its on.
    struct Part { int steps, begin, key, nth, position, stop, first, end; const int* row; };
    auto part_at = [&](int at) {
        Part part;
        part.steps = (before[token + 1] - before[token]) / units;
        part.nth = (at - before[token]) / part.steps;
        part.begin = before[token] + part.nth * part.steps;
        part.key = part.nth / PARTS;
        part.position = positions[token];
        part.stop = SPAN ? at + 1 : min(high, part.begin + part.steps);
        const int id = ids[token], seen = first_of(part.position);
        part.first = seen + (at - part.begin) * GRAIN;
        part.end = min(end_of(id, part.position), seen + (part.stop - part.begin) * GRAIN);
        part.row = table + (i64)max(id, 0) * n.v[2];
        return part;
    };
    // Lanes 0 to 15, and 16 to 31, know where the keys of a tile's positions lie, as a row of the cache.
    auto line_at = [&](const Part& part, int start) {
        const int p = start + (lane & 15);
        const i64 block = p < part.end ? part.row[p / BLOCK] : -1;
        return block >= 0 && block < n.v[3] ? (int)((block * 2 * keys + part.key) * BLOCK + p % BLOCK) : -1;
    };
#if PAIRS
    int rotated_at = -1;
#endif
#if !PROMPTS
    if (low < high) {
        // All but the step's own tokens is in the cache already: on its way to the L2 cache while the launch ahead ends.
        const Part part = part_at(low);
#pragma unroll 1
        for (int s = 0, start = part.first + warp * 16; s < AHEAD && start < part.end; ++s, start += STEP) {
            const int line = line_at(part, start);
            const u8* from = (const u8*)(cache + (i64)line * DIM + (lane >> 4) * side);
            for (int byte = 0; line >= 0 && byte < DIM * (int)sizeof(Stored); byte += 128)
                asm volatile("prefetch.global.L2 [%0];" :: "l"(from + byte));
        }
#if PAIRS
        rotated_at = token;
        angles(part.position, cosine, sine);
#endif
    }
    after_others();
#endif
    if (low == high && !any_empty) return;

    for (int at = low; at < high;) {
        // The next token that has steps.
        if (before[token + 1] <= at && before[++token + 1] <= at) token = token_at(at);
        const Part part = part_at(at);
        const int steps = part.steps, begin = part.begin, stop = part.stop, first = part.first, end = part.end;
        const int key = part.key, head = key * SHARE + part.nth % PARTS * HEADS;
        const int real = min(HEADS, (key + 1) * SHARE - head);
        const bool whole = SPAN ? begin >= low && begin + steps <= high : at == begin && stop == begin + steps;
        auto line_of = [&](int start) { return line_at(part, start); };
        auto fetch = [&](int line, int stage) {
            const u32 to = ring + stage * STAGE_BYTES;
#if CODED
            const int own = __shfl_sync(0xffffffffu, line, lane & 15);
            copy_word(to + 2 * SIDE_BYTES + lane * 4, scales + max(own, 0) + (lane >> 4) * keys * BLOCK, own >= 0);
#endif
#pragma unroll
            for (int i = 0; i < CHUNKS / 2; ++i) {
                const int r = (i * 32 + lane) / CHUNKS, c = (i * 32 + lane) % CHUNKS;
                const int of = __shfl_sync(0xffffffffu, line, r);
                const Stored* from = cache + (i64)max(of, 0) * DIM + c * WIDE;
                stream_async(to + chunk(r, c), from, of >= 0);
                stream_async(to + SIDE_BYTES + chunk(r, c), from + side, of >= 0);
            }
        };
        int start = first + warp * 16;
        {
            int lines[STAGES - 1];
#pragma unroll
            for (int s = 0; s < STAGES - 1; ++s) lines[s] = line_of(start + s * STEP);
#pragma unroll
            for (int s = 0; s < STAGES - 1; ++s) {
                if (start + s * STEP < end) fetch(lines[s], s);
                copies_end();
            }
        }
        int ahead = line_of(start + (STAGES - 1) * STEP);
#if PAIRS
        if (token != rotated_at) angles(part.position, cosine, sine);
        rotated_at = token;
#endif
        u32 query[DIM / 16][HALVES][2];
#if NORM
        // Four lanes have a head.
        float unit[HALVES];
#pragma unroll
        for (int y = 0; y < HALVES; ++y) {
            const D::Raw* from = q + ((i64)token * heads + head + min(upper + 8 * y, real - 1)) * DIM + pair * 2;
            float square = 0.0f;
#pragma unroll
            for (int e = 0; e < DIM; e += 8) {
                const u32 two = *(const u32*)(from + e);
                const float low = D::load((u16)two), high = D::load((u16)(two >> 16));
                square += low * low + high * high;
            }
            square += __shfl_xor_sync(0xffffffffu, square, 1);
            square += __shfl_xor_sync(0xffffffffu, square, 2);
            unit[y] = op_rsqrt(square / (float)DIM + eps);
        }
#endif
#if CODED
        // Elements as the keys' words have them, and their largest magnitude.
        float element[DIM / 16][HALVES][2][2], of_score[HALVES] = {};
#endif
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
            for (int y = 0; y < HALVES; ++y)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int h = upper + 8 * y;
                    const int e = CODED ? k / 4 * 64 + pair * 16 + k % 4 * 4 + 2 * i : k * 16 + pair * 2 + 8 * i;
                    const D::Raw* from = q + ((i64)token * heads + head + min(h, real - 1)) * DIM;
#if PAIRS
#if NORM
                    const Head of = {from, gain, unit[y]};
#else
                    const Head of = {from};
#endif
                    const u32 two = Mma<D>::pack(rotated(of, e, cosine, sine), rotated(of, e + 1, cosine, sine));
#else
                    const u32 two = *(const u32*)(from + e);
#endif
#if CODED
                    float* x = element[k][y][i];
                    x[0] = h < real ? D::load((u16)two) : 0.0f;
                    x[1] = h < real ? D::load((u16)(two >> 16)) : 0.0f;
                    of_score[y] = fmaxf(of_score[y], fmaxf(fabsf(x[0]), fabsf(x[1])));
#else
                    query[k][y][i] = h < real ? two : 0;
#endif
                }
#if CODED
#pragma unroll
        for (int y = 0; y < HALVES; ++y) {
            of_score[y] = fmaxf(of_score[y], __shfl_xor_sync(0xffffffffu, of_score[y], 1));
            of_score[y] = fmaxf(of_score[y], __shfl_xor_sync(0xffffffffu, of_score[y], 2));
            const float factor = fitting(of_score[y]);
            of_score[y] = 1.0f / factor;
#pragma unroll
            for (int k = 0; k < DIM / 16; ++k)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    query[k][y][i] = Mma<F16>::pack(element[k][y][i][0] * factor, element[k][y][i][1] * factor);
        }
#endif
        float value[DIM / 8][4] = {}, most[HALVES], total[HALVES];
#pragma unroll
        for (int y = 0; y < HALVES; ++y) {
            most[y] = MASKED;
            total[y] = 0.0f;
        }
        for (int stage = 0; start < end; start += STEP) {
            copies_wait<STAGES - 2>();
            __syncwarp();
            {
                const int later = start + (STAGES - 1) * STEP, to = stage == 0 ? STAGES - 1 : stage - 1;
                if (later < end) fetch(ahead, to);
                copies_end();
                ahead = line_of(later + STEP);
            }
            const u32 k_side = ring + stage * STAGE_BYTES, v_side = k_side + SIDE_BYTES;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            float score[2][4] = {};
#if CODED
            // A lane has 16 codes of a key in a row, for four steps of a product.
#pragma unroll
            for (int j = 0; j < DIM / 64; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    u32 codes[4];
                    load_words<4>(codes, k_side + chunk(upper + 8 * c, j * 4 + pair));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int k = j * 4 + i;
                        u32 b[2];
                        to_halves(codes[i], b, CODE());
                        const u32 a1 = HALVES > 1 ? query[k][HALVES - 1][0] : 0, a3 = HALVES > 1 ? query[k][HALVES - 1][1] : 0;
                        Mma<F16>::of(score[c], query[k][0][0], a1, query[k][0][1], a3, b[0], b[1]);
                    }
                }
            float of_key[2][2], of_value[2][2], log_of_value[2][2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                load_words<2>((u32*)of_key[c], k_side + 2 * SIDE_BYTES + (c * 8 + pair * 2) * 4);
                load_words<2>((u32*)of_value[c], k_side + 2 * SIDE_BYTES + 64 + (c * 8 + pair * 2) * 4);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    of_value[c][i] = scale_of_values(of_value[c][i]);
                    log_of_value[c][i] = log2_of(of_value[c][i]);
                }
            }
#else
#pragma unroll
            for (int k = 0; k < DIM / 16; ++k) {
                u32 b[4];
                load_matrices(b, k_side + chunk((lane & 7) + (lane >> 4) * 8, k * 2 + ((lane >> 3) & 1)));
                const u32 a1 = HALVES > 1 ? query[k][HALVES - 1][0] : 0, a3 = HALVES > 1 ? query[k][HALVES - 1][1] : 0;
                Mma<D>::of(score[0], query[k][0][0], a1, query[k][0][1], a3, b[0], b[1]);
                Mma<D>::of(score[1], query[k][0][0], a1, query[k][0][1], a3, b[2], b[3]);
            }
#endif
            bool moved = false;
            float keep[HALVES];
#pragma unroll
            for (int y = 0; y < HALVES; ++y) {
                float largest = most[y];
#pragma unroll
                for (int c = 0; c < 2; ++c)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        // By powers of two from here on.
                        float& x = score[c][y * 2 + i];
#if CODED
                        x *= of_key[c][i] * of_score[y];
#endif
#if SOFTCAP
                        const float e = power(x * (scale * (2.0f * 1.44269504088896340736f / CAP)));
                        x = (CAP - __fdividef(2.0f * CAP, e + 1.0f)) * 1.44269504088896340736f;
#else
                        x *= scale * 1.44269504088896340736f;
#endif
                        if (start + c * 8 + pair * 2 + i >= end) x = MASKED;
#if CODED
                        // Weights with their scales are at most 1.
                        largest = fmaxf(largest, x + log_of_value[c][i]);
#else
                        largest = fmaxf(largest, x);
#endif
                    }
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                moved |= largest != most[y];
                keep[y] = power(most[y] - largest);
                most[y] = largest;
                total[y] *= keep[y];
#pragma unroll
                for (int c = 0; c < 2; ++c)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        // Every tile has a position that is seen, so the largest is a score.
                        score[c][y * 2 + i] = power(score[c][y * 2 + i] - largest);
                        total[y] += score[c][y * 2 + i];
#if CODED
                        score[c][y * 2 + i] *= of_value[c][i];
#endif
                    }
            }
            if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
                for (int e = 0; e < DIM / 8; ++e)
#pragma unroll
                    for (int y = 0; y < HALVES; ++y) {
                        value[e][y * 2] *= keep[y];
                        value[e][y * 2 + 1] *= keep[y];
                    }
            }
            typedef Mma<Multiplied> Product;
            const u32 a0 = Product::pack(score[0][0], score[0][1]), a2 = Product::pack(score[1][0], score[1][1]);
            const u32 a1 = HALVES > 1 ? Product::pack(score[0][2], score[0][3]) : 0;
            const u32 a3 = HALVES > 1 ? Product::pack(score[1][2], score[1][3]) : 0;
#if CODED
            // A lane has an eighth of the elements of four values, a column of each product.
#pragma unroll
            for (int w = 0; w < DIM / 8; w += VALUE_BYTES) {
                u32 codes[4][VALUE_BYTES / 4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int at = upper * (DIM / 8) + w;
                    load_words<VALUE_BYTES / 4>(codes[r], v_side + chunk(pair * 2 + (r & 1) + (r >> 1) * 8, at / 16) + at % 16);
                }
#pragma unroll
                for (int j = 0; j < VALUE_BYTES / 4; ++j)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        u32 low[2], high[2];
                        const u32 from = half ? 0x7362 : 0x5140;
                        to_halves(__byte_perm(codes[0][j], codes[1][j], from), low, CODE());
                        to_halves(__byte_perm(codes[2][j], codes[3][j], from), high, CODE());
                        const int e = w + j * 4 + half * 2;
                        Product::of(value[e], a0, a1, a2, a3, low[0], high[0]);
                        Product::of(value[e + 1], a0, a1, a2, a3, low[1], high[1]);
                    }
            }
#else
#pragma unroll
            for (int e = 0; e < DIM / 16; ++e) {
                u32 b[4];
                load_matrices_transposed(b, v_side + chunk(lane & 15, e * 2 + (lane >> 4)));
                Mma<D>::of(value[e * 2], a0, a1, a2, a3, b[0], b[1]);
                Mma<D>::of(value[e * 2 + 1], a0, a1, a2, a3, b[2], b[3]);
            }
#endif
        }
        // The warps' results, joined in their order through shared memory.
        copies_wait<0>();
        __syncthreads();
        float* values = (float*)room;
#pragma unroll
        for (int y = 0; y < HALVES; ++y) {
            const int h = upper + 8 * y;
            total[y] += __shfl_xor_sync(0xffffffffu, total[y], 1);
            total[y] += __shfl_xor_sync(0xffffffffu, total[y], 2);
            if (h >= HEADS) continue;
            if (pair == 0) {
                maxima[warp][h] = most[y];
                totals[warp][h] = total[y];
            }
#pragma unroll
            for (int e = 0; e < DIM / 8; ++e) {
                float* to = values + (warp * HEADS + h) * DIM;
#if CODED
                to[pair * 2 * (DIM / 8) + e] = value[e][y * 2];
                to[(pair * 2 + 1) * (DIM / 8) + e] = value[e][y * 2 + 1];
#else
                *(float2*)(to + e * 8 + pair * 2) = make_float2(value[e][y * 2], value[e][y * 2 + 1]);
#endif
            }
        }
        __syncthreads();
        // Has the block all of the unit from its beginning on, and is it done with it?
        const bool leads = !(begin < low), leaves = !SPAN || stop == begin + steps || stop == high;
        Piece* piece = pieces + (i64)blockIdx.x * HELD + (SPAN ? (leads ? 0 : 1 + at - low) : leads ? 1 : 0);
        for (int i = threadIdx.x; i < real * DIM; i += WARPS * 32) {
            const int h = i / DIM, e = i % DIM;
            float largest = MASKED, sum = 0.0f, result = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, maxima[w][h]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float factor = power(maxima[w][h] - largest);
                sum += totals[w][h] * factor;
                result += values[(w * HEADS + h) * DIM + e] * factor;
            }
#if SPAN
            if (leads) {
                if (at > begin) {
                    const Folded all = fold({folded_most[h], folded_total[h], folded[i]}, {largest, sum, result});
                    largest = all.most, sum = all.total, result = all.value;
                }
                folded[i] = result;
                if (!leaves) continue;
            }
#endif
            if (whole) {
#if SINKS
                if (sum != 0.0f) sum += power(SINK::load(sinks[head + h]) * 1.44269504088896340736f - largest);
#endif
                out[((i64)token * heads + head + h) * DIM + e] = D::store(sum == 0.0f ? 0.0f : result / sum);
            } else {
                ((float*)piece->value[h])[e] = result;
                if (e == 0) {
                    piece->most[h] = largest;
                    piece->total[h] = sum;
                }
            }
        }
        if (!whole && leaves) {
            // Again, so that registers are free meanwhile: the block in which the unit begins, and how many have a piece of it.
            const Division division(before[tokens], gridDim.x);
            const int from = division.block_of(begin), count = division.block_of(begin + steps - 1) - from + 1;
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                last = atomicAdd(counters + from, 1) == count - 1;
                if (last) counters[from] = 0;
            }
            __syncthreads();
            if (last) {
                __threadfence();
#if SPAN
                // What the first block folded, then spans one by one.
                const int folded_by_first = division.begin(from + 1) - begin, entries = 1 + steps - folded_by_first;
                auto piece_of = [&](int entry) {
                    const int span = begin + folded_by_first + entry - 1, block = entry == 0 ? from : division.block_of(span);
                    return pieces + (i64)block * HELD + (entry == 0 ? 0 : 1 + span - division.begin(block));
                };
                // By what `fold` multiplies the sum so far and an entry, which takes the place of the entry's maximum and sum.
                for (int h = warp; h < real; h += WARPS) {
                    float largest = MASKED, sum = 0.0f;
                    for (int first = 0; first < entries; first += 32) {
                        Piece* mine = piece_of(min(first + lane, entries - 1));
                        const float of_mine = __ldcg(mine->most + h), sum_of_mine = __ldcg(mine->total + h);
                        float before = 0.0f, own = 1.0f;
                        for (int i = 0; i < min(32, entries - first); ++i) {
                            const float next = __shfl_sync(~0u, of_mine, i), next_sum = __shfl_sync(~0u, sum_of_mine, i);
                            if (first + i == 0) {
                                largest = next, sum = next_sum;
                                continue;
                            }
                            const float most = fmaxf(largest, next);
                            const float of_sum = power(largest - most), of_next = power(next - most);
                            sum = fmaf(next_sum, of_next, sum * of_sum);
                            largest = most;
                            if (i == lane) before = of_sum, own = of_next;
                        }
                        if (first + lane < entries) {
                            mine->most[h] = before;
                            mine->total[h] = own;
                        }
                    }
#if SINKS
                    if (sum != 0.0f) sum += power(SINK::load(sinks[head + h]) * 1.44269504088896340736f - largest);
#endif
                    if (lane == 0) totals[0][h] = sum;
                }
                __threadfence();
                __syncthreads();
                for (int i = threadIdx.x; i < real * (DIM / 4); i += WARPS * 32) {
                    const int h = i / (DIM / 4), e = i % (DIM / 4);
                    float4 all = __ldcg(&piece_of(0)->value[h][e]);
#pragma unroll 4
                    for (int entry = 1; entry < entries; ++entry) {
                        const Piece* of = piece_of(entry);
                        const float4 x = __ldcg(&of->value[h][e]);
                        const float before = __ldcg(of->most + h), own = __ldcg(of->total + h);
                        all.x = fmaf(x.x, own, all.x * before);
                        all.y = fmaf(x.y, own, all.y * before);
                        all.z = fmaf(x.z, own, all.z * before);
                        all.w = fmaf(x.w, own, all.w * before);
                    }
                    const float sum = totals[0][h];
                    const bool some = sum != 0.0f;
                    *(uint2*)(out + ((i64)token * heads + head + h) * DIM + e * 4) = make_uint2(
                        Mma<D>::pack(some ? all.x / sum : 0.0f, some ? all.y / sum : 0.0f),
                        Mma<D>::pack(some ? all.z / sum : 0.0f, some ? all.w / sum : 0.0f));
                }
#else
                auto piece_of = [&](int i) { return pieces + (i64)(from + i) * HELD + (i == 0 ? 1 : 0); };
                float* weights = (float*)room;
                for (int h = warp; h < real; h += WARPS) {
                    float largest = MASKED, sum = 0.0f;
                    for (int i = lane; i < count; i += 32) {
                        weights[h * count + i] = __ldcg(piece_of(i)->most + h);
                        largest = fmaxf(largest, weights[h * count + i]);
                    }
#pragma unroll
                    for (int step = 16; step > 0; step >>= 1)
                        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
                    for (int i = lane; i < count; i += 32) {
                        const float factor = power(weights[h * count + i] - largest);
                        weights[h * count + i] = factor;
                        sum += __ldcg(piece_of(i)->total + h) * factor;
                    }
#pragma unroll
                    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
#if SINKS
                    if (sum != 0.0f) sum += power(SINK::load(sinks[head + h]) * 1.44269504088896340736f - largest);
#endif
                    if (lane == 0) totals[0][h] = sum == 0.0f ? 0.0f : 1.0f / sum;
                }
                __syncthreads();
                for (int i = threadIdx.x; i < real * (DIM / 4); i += WARPS * 32) {
                    const int h = i / (DIM / 4), e = i % (DIM / 4);
                    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
                    for (int j = 0; j < count; ++j) {
                        const float4 x = __ldcg(&piece_of(j)->value[h][e]);
                        const float w = weights[h * count + j];
                        sum.x = fmaf(x.x, w, sum.x);
                        sum.y = fmaf(x.y, w, sum.y);
                        sum.z = fmaf(x.z, w, sum.z);
                        sum.w = fmaf(x.w, w, sum.w);
                    }
                    const float inverse = totals[0][h];
                    *(uint2*)(out + ((i64)token * heads + head + h) * DIM + e * 4) = make_uint2(
                        Mma<D>::pack(sum.x * inverse, sum.y * inverse), Mma<D>::pack(sum.z * inverse, sum.w * inverse));
                }
#endif
            }
        }
        __syncthreads();
#if SPAN
        if (leads && !leaves && threadIdx.x < HEADS) {
            const int h = threadIdx.x;
            float largest = MASKED, sum = 0.0f;
            for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, maxima[w][h]);
            for (int w = 0; w < WARPS; ++w) sum += totals[w][h] * power(maxima[w][h] - largest);
            Folded all = {largest, sum, 0.0f};
            if (at > begin) all = fold({folded_most[h], folded_total[h], 0.0f}, all);
            folded_most[h] = all.most;
            folded_total[h] = all.total;
        }
#endif
        at = stop;
    }
    // Tokens that see nothing, such as those that fill up a bucket, have no steps. Their results are zeros.
    for (int first = blockIdx.x + warp * 32 * gridDim.x; any_empty && first < tokens; first += WARPS * 32 * gridDim.x) {
        const int t = first + lane * gridDim.x;
        bool empty = t < tokens && before[t] == before[t + 1];
#if SOME_APART
        empty = empty && is_apart(ids, positions, prompts, tokens, t);
#endif
        for (u32 some = __ballot_sync(~0u, empty); some != 0; some &= some - 1) {
            uint4* to = (uint4*)(out + (i64)(first + (__ffs(some) - 1) * (int)gridDim.x) * heads * DIM);
            for (int i = lane; i < heads * DIM / 8; i += 32) to[i] = make_uint4(0, 0, 0, 0);
        }
    }
}
