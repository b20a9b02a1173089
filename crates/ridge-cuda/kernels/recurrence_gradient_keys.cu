// Gradients by q, k and decays of linear recurrences without a part of low rank, all chunks of CHUNK tokens at once on tensor cores (Yang et al. 2024,
// "Gated Linear Attention", section 4.4). recurrence_parallel.cu computes states before chunks, mirrored the cotangents of those behind
// chunks, and dv. With S the state before a chunk, G the cotangent of the state behind it, and d(j, t) the product of the decays of tokens j + 1 to t, of each key:
//
//   dq_t = d(-1, t) S dy_t + sum over j <= t of (dy_t v_j) d(j, t) k_j
//   dk_t = d(t, last) G v_t + sum over u >= t of (dy_u v_t) d(t, u) q_u
//   dlog_decay_t = sum of what S and tokens j < t give to G and tokens u >= t: k_j d(j, u) (dy_u v_j) q_u between tokens
//
// The last is what q_u dq_u and k_j dk_j sum up to and their differences too, but these cancel where little is kept; here whatever passes token t is added
// up, so that no more is lost than of the sums themselves. Products of decays are taken within blocks of BLOCK tokens and between them, always
// forwards. Sums over earlier blocks for the tokens of one go from the first to the last, decaying on their way (Horner's scheme); sums over
// later ones likewise. Within a block a thread has one key. A block of threads has a chunk of a head. Where all keys of a head decay alike, products of
// decays are those of sums of their logarithms in f64: a product of 64 rounded decays has an error that is beyond that of other sums.
// Floor: all operands, S and G are read once, dy and v for every SLICE keys; results are written once; 6 KEY value + CHUNK (2 KEY + value) operations for each token and head at a
// sixth of the rate of bf16. Defines, with COLUMNS 32 and 8 WARPS, and numbers: recurrence_blocks.cuh.

// Floats of a row of products of tokens, and tiles of half a slice and of half a chunk.
#define OF_PAIRS (CHUNK + 4)
#define HALF (SLICE / 2)
#define TILES (HALF / 8)
#define PARTS 3

// One key of the tokens of a block by factors of the tokens.
__device__ inline void multiply_tokens(float* x, const float* by) {
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) x[i] *= by[i];
}

// An element as the sum of its parts.
__device__ inline float whole(const u16* planes, int key, int token) {
    float x = 0.0f;
#pragma unroll
    for (int p = PARTS - 1; p >= 0; --p) x += BF16::load(planes[(p * SLICE + key) * OF_TOKENS + token]);
    return x;
}

// Products of dy of 16 tokens and v of 16 earlier ones, as a left operand: the rows are those of dy, or, with BACK, of v.
template <bool BACK> __device__ inline void take_pairs(u32 (*left)[4], const float* pairs, int later, int earlier) {
    const int row = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
    const float* from = pairs + later * BLOCK * OF_PAIRS + earlier * BLOCK;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = row + (i & 1) * 8, at = pair + (i >> 1) * 8;
        const float x = BACK ? from[at * OF_PAIRS + r] : from[r * OF_PAIRS + at];
        const float y = BACK ? from[(at + 1) * OF_PAIRS + r] : from[r * OF_PAIRS + at + 1];
        parts_of<PARTS>(x, y, &left[0][i], 4);
    }
}

// Multiplies the keys of `sum`, HALF from `from` on, by `total`.
__device__ inline void decay_keys(float (*sum)[4], const float* total, int from) {
    const int pair = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const float2 by = *(const float2*)(total + from + tile * 8 + pair);
        sum[tile][0] *= by.x;
        sum[tile][1] *= by.y;
        sum[tile][2] *= by.x;
        sum[tile][3] *= by.y;
    }
}

// The sums over a block's tokens of `sum` times `planes`, for each key of HALF from `from` on.
__device__ inline void over_tokens(float* to, const float (*sum)[4], const u16* planes, int from, int block) {
    const int lane = threadIdx.x & 31, row = lane >> 2, pair = (lane & 3) * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int key = from + tile * 8 + pair + e, token = block * BLOCK + row;
            float x = sum[tile][e] * whole(planes, key, token);
            x = fmaf(sum[tile][2 + e], whole(planes, key, token + 8), x);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
            if (row == 0) to[key] = x;
        }
}

// Keys' sums as put_block has them.
__device__ inline void put_sums(float* to, const float (*sum)[4], int from, int block) {
    const int row = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            to[(block * SLICE + from + tile * 8 + pair + (e & 1)) * OF_BLOCK + row + (e >> 1) * 8] = sum[tile][e];
}
__device__ inline void take_sums(float* x, const float* from, int block, int key) {
    const float4* at = (const float4*)(from + (block * SLICE + key) * OF_BLOCK);
#pragma unroll
    for (int t = 0; t < BLOCK; t += 4) {
        const float4 four_sums = at[t / 4];
        x[t] = four_sums.x, x[t + 1] = four_sums.y, x[t + 2] = four_sums.z, x[t + 3] = four_sums.w;
    }
}

// The sum over a warp of each of BLOCK numbers, to every second lane one.
__device__ inline float over_warp(float* x) {
#pragma unroll
    for (int step = 16, n = BLOCK / 2; n > 0; step /= 2, n /= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + n], step);
            x[i] = (upper ? x[i + n] : x[i]) + other;
        }
    }
    return x[0] + __shfl_xor_sync(0xffffffff, x[0], 1);
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void recurrence_gradient_keys(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ decay,
    const int* __restrict__ starts, const float* __restrict__ dy, const float* __restrict__ states, const float* __restrict__ cotangents,
    float* __restrict__ dq, float* __restrict__ dk, float* __restrict__ ddecay, Numbers<9> n
) {
    extern __shared__ __align__(16) float room[];
    // By keys of the slice: decays over blocks; what S gives to G; what S and blocks before one give to a later block, and what a block gives to G.
    __shared__ float totals[BLOCKS][SLICE], through[SLICE], across[BLOCKS][BLOCKS][SLICE], to_end[BLOCKS][SLICE];
#if !BY_KEY
    // Sums of logarithms of decays; what remains over the tokens of a block up to each and behind each; and sums over keys, of two warps each.
    __shared__ double logs[CHUNK];
    __shared__ float over[CHUNK], behind[CHUNK], alike[2][CHUNK];
#endif
    others_may_begin();
    after_others();
    Chunk c;
    if (!find_chunk(c, starts, n.v, (int)n.v[4])) return;
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], group = c.head * groups / heads;
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31, block = t / SLICE, mine = t % SLICE, rest = c.count - block * BLOCK;
    const i64 token = c.first + block * BLOCK;
    // The warp's part of products: a block of tokens, and half of the keys or of other tokens.
    const int rows = warp % BLOCKS, half = warp / BLOCKS * HALF;
    // dy v of tokens of different blocks; and of one block, those of a token of v side by side, decayed where all keys decay alike.
    float* pairs = room;
    float* within = pairs + CHUNK * OF_PAIRS;
    u16* dys = (u16*)(within + BLOCKS * BLOCK * OF_BLOCK);
    u16* vs = dys + PARTS * CHUNK * OF_VALUES;
    u16* ss = vs + PARTS * CHUNK * OF_VALUES;
    u16* gs = ss + PARTS * SLICE * OF_VALUES;
    // Later over them: k to the end of its block and q from the beginning; and then sums over other blocks.
    u16* ks = dys;
    u16* qs = ks + PARTS * SLICE * OF_TOKENS;
    float* of_earlier = (float*)dys;
    float* of_later = of_earlier + BLOCKS * SLICE * OF_BLOCK;
    const i64 at_values = (c.first * heads + c.head) * value, at_states = (c.number * heads + c.head) * KEY * value;
    const int stride = (int)(heads * value);
#if !BY_KEY
    if (warp == 0) {
        add_up(logs, decay + c.first * heads + c.head, heads, c.count);
        __syncwarp();
#pragma unroll
        for (int i = lane; i < CHUNK; i += 32) {
            const int start = i / BLOCK * BLOCK;
            over[i] = kept(logs[i] - (start > 0 ? logs[start - 1] : 0.0));
            behind[i] = kept(logs[start + BLOCK - 1] - logs[i]);
        }
    }
#endif
    for (int first = 0; first < KEY; first += SLICE) {
        const int key = first + mine;
        float of_s[TILES][4] = {}, of_g[TILES][4] = {};
        {
            float pair[TILES][4] = {}, both[Values<SLICE, PARTS, F32>::PIECES] = {};
            for (int column = 0; column < value; column += COLUMNS) {
                const int real = (int)min((i64)COLUMNS, value - column);
                __syncthreads();
                {
                    Values<CHUNK, PARTS, F32> values;
                    Values<SLICE, PARTS, F32> s, g;
                    s.fetch(states + at_states + first * value + column, (int)value, KEY - first, real);
                    g.fetch(cotangents + at_states + first * value + column, (int)value, KEY - first, real);
#pragma unroll
                    for (int i = 0; i < s.PIECES; ++i) {
                        both[i] = fmaf(s.x[i].x, g.x[i].x, both[i]);
                        both[i] = fmaf(s.x[i].y, g.x[i].y, both[i]);
                        both[i] = fmaf(s.x[i].z, g.x[i].z, both[i]);
                        both[i] = fmaf(s.x[i].w, g.x[i].w, both[i]);
                    }
                    s.put(ss);
                    g.put(gs);
                    values.fetch(dy + at_values + column, stride, c.count, real);
                    values.put(dys);
                    values.fetch(v + at_values + column, stride, c.count, real);
                    values.put(vs);
                }
                __syncthreads();
                const int left_row = (rows * BLOCK + matrix_row()) * OF_VALUES + matrix_column();
                const int right_row = (half + across_row()) * OF_VALUES + across_column();
#pragma unroll 1
                for (int at = 0; at < COLUMNS; at += 16) {
                    u32 left[PARTS][4];
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) load_matrices(left[p], shared_address(dys + p * CHUNK * OF_VALUES + left_row + at));
                    multiply<TILES, SLICE * OF_VALUES, PARTS, PARTS, OF_VALUES>(of_s, left, shared_address(ss + right_row + at));
                    if (first == 0 && half < (rows + 1) * BLOCK)
                        multiply<TILES, CHUNK * OF_VALUES, PARTS, PARTS, OF_VALUES>(pair, left, shared_address(vs + right_row + at));
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) load_matrices(left[p], shared_address(vs + p * CHUNK * OF_VALUES + left_row + at));
                    multiply<TILES, SLICE * OF_VALUES, PARTS, PARTS, OF_VALUES>(of_g, left, shared_address(gs + right_row + at));
                }
            }
            if (first == 0)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int u = rows * BLOCK + (lane >> 2) + (e >> 1) * 8, j = half + tile * 8 + (lane & 3) * 2 + (e & 1);
                        if (j / BLOCK < rows) pairs[u * OF_PAIRS + j] = pair[tile][e];
                        if (j / BLOCK != rows) continue;
#if BY_KEY
                        within[j * OF_BLOCK + u % BLOCK] = pair[tile][e];
#else
                        within[j * OF_BLOCK + u % BLOCK] = j <= u ? pair[tile][e] * kept(logs[u] - logs[j]) : 0.0f;
#endif
                    }
#pragma unroll
            for (int i = 0; i < Values<SLICE, PARTS, F32>::PIECES; ++i) {
#pragma unroll
                for (int step = 1; step < COLUMNS / 4; step *= 2) both[i] += __shfl_xor_sync(0xffffffff, both[i], step);
                const int at = i * THREADS + t;
                if (at % (COLUMNS / 4) == 0) through[at / (COLUMNS / 4)] = both[i];
            }
        }
        float of_q[BLOCK], of_k[BLOCK];
        fetch_key(of_q, q + (token * groups + group) * KEY + key, (int)groups * KEY, rest, key < KEY);
        fetch_key(of_k, k + (token * groups + group) * KEY + key, (int)groups * KEY, rest, key < KEY);
#if BY_KEY
        float decays[BLOCK];
        fetch_decays(decays, decay, c, token, heads, key, rest);
        const auto keep_to = [&](float* x) { return keep_to_end(x, decays); };
        const auto keep_from = [&](float* x) { keep_from_start(x, decays); };
#else
        const auto keep_to = [&](float* x) {
            multiply_tokens(x, behind + block * BLOCK);
            return over[block * BLOCK + BLOCK - 1];
        };
        const auto keep_from = [&](float* x) { multiply_tokens(x, over + block * BLOCK); };
#endif
        __syncthreads();
        {
            float x[BLOCK];
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) x[i] = of_k[i];
            totals[block][mine] = keep_to(x);
            put_keys<PARTS>(ks, x, block, mine);
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) x[i] = of_q[i];
            keep_from(x);
            put_keys<PARTS>(qs, x, block, mine);
        }
        __syncthreads();
        const int right_row = (half + across_row()) * OF_TOKENS + across_column();
        for (int b = 0; b < rows; ++b) {
            over_tokens(across[b][rows], of_s, qs, half, rows);
            decay_keys(of_s, totals[b], half);
            u32 left[PARTS][4];
            take_pairs<false>(left, pairs, rows, b);
            multiply<TILES, SLICE * OF_TOKENS, PARTS, PARTS, OF_TOKENS>(of_s, left, shared_address(ks + right_row + b * BLOCK));
        }
        over_tokens(to_end[rows], of_g, ks, half, rows);
        for (int b = BLOCKS - 1; b > rows; --b) {
            decay_keys(of_g, totals[b], half);
            u32 left[PARTS][4];
            take_pairs<true>(left, pairs, b, rows);
            multiply<TILES, SLICE * OF_TOKENS, PARTS, PARTS, OF_TOKENS>(of_g, left, shared_address(qs + right_row + b * BLOCK));
        }
        __syncthreads();
        put_sums(of_earlier, of_s, half, rows);
        put_sums(of_later, of_g, half, rows);
        __syncthreads();
        // What passes over this block: from S and earlier blocks to G and later ones. In f64, as other sums of a thread that go to one element, since they may
        // cancel to what roundings leave.
        double passing = through[mine];
        float product = totals[block][mine];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            passing *= totals[b][mine];
            if (b < block) passing += to_end[b][mine];
        }
#pragma unroll
        for (int b = 1; b < BLOCKS; ++b)
            if (b > block) {
                passing = fma((double)across[block][b][mine], (double)product, passing);
                product *= totals[b][mine];
            }
        float sums[BLOCK], later[BLOCK], passed[BLOCK];
        take_sums(sums, of_earlier, block, mine);
        take_sums(later, of_later, block, mine);
        keep_from(sums);
        keep_to(later);
        const i64 place = (token * heads + c.head) * KEY + key;
        const int next = (int)heads * KEY;
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) {
            double of_token = passing, of_key = later[j];
            passing = fma((double)of_k[j], of_key, passing);
#if BY_KEY
            float product = 1.0f;
#endif
#pragma unroll
            for (int u = j / 4 * 4; u < BLOCK; u += 4) {
                const float4 four_pairs = *(const float4*)(within + (block * BLOCK + j) * OF_BLOCK + u);
                const float of_pair[4] = {four_pairs.x, four_pairs.y, four_pairs.z, four_pairs.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (u + e < j) continue;
#if BY_KEY
                    if (u + e > j) product *= decays[u + e];
                    const float share = of_pair[e] * product;
#else
                    const float share = of_pair[e];
#endif
                    of_token = fma((double)of_q[u + e], (double)sums[u + e], of_token);
                    sums[u + e] = fmaf(share, of_k[j], sums[u + e]);
                    of_key = fma((double)share, (double)of_q[u + e], of_key);
                }
            }
            passed[j] = (float)of_token;
            if (key < KEY && j < rest) {
                dk[place + j * next] = (float)of_key;
                if (BY_KEY) ddecay[place + j * next] = passed[j];
            }
        }
#pragma unroll
        for (int j = 0; j < BLOCK; ++j)
            if (key < KEY && j < rest) dq[place + j * next] = sums[j];
#if !BY_KEY
        {
            const float sum = over_warp(passed);
            float* to = &alike[warp % 2][block * BLOCK + lane / 2];
            if (lane % 2 == 0) *to = first == 0 ? sum : *to + sum;
        }
#endif
    }
#if !BY_KEY
    __syncthreads();
    if (t < c.count) ddecay[(c.first + t) * heads + c.head] = alike[0][t] + alike[1][t];
#endif
}
