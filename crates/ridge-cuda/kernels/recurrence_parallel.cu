// Linear recurrences whose state is a matrix, without a part of low rank, all chunks of CHUNK tokens at once on tensor cores (Yang et al. 2024,
// "Gated Linear Attention", section 4.3; Dao and Gu 2024, "Transformers are SSMs", section 6). Three launches: `recurrence_states` computes what each chunk
// adds to the state, and what remains of the state over it; `recurrence_pass` turns sums of chunks into states before them, element by element;
// `recurrence_outputs` computes y of each chunk from the state before it and from its own tokens. With S the state before a chunk, and
// d(j, t) the product of the decays of tokens j + 1 to t, of each key:
//
//   y_t = S^T (d(-1, t) q_t) + sum over j <= t of (sum over keys of q_t d(j, t) k_j) v_j
//   S' = diag(d(-1, last)) S + sum over j of (d(j, last) k_j) v_j^T
//
// Where each key decays by itself, products of decays are taken within blocks of BLOCK tokens and between them, always forwards, so nothing
// overflows and nothing is divided: token t of block I has q_t d(start of I, t), token j of an earlier block J has k_j d(j, end of J), and
// what is between the blocks multiplies the former. Within a block weights are sums of f32 products.
// Tensor cores add without rounding: products are of bf16 in three parts, as in recurrence_chunks.cu. Floor: q, k and decays and
// v are read twice, y and after it the states of chunks are moved four times; 4 KEY value + CHUNK (KEY + value) operations for each token and
// head at a sixth of the rate of bf16.
// Rows of fewer than LEAST tokens are left to another kernel. Chunk c of row r has number starts[r] / unit + r * extra + c.
// Defines: KEY; DECAYS, 1 or KEY; WARPS, 4 or 8, and 8 where each key decays by itself; COLUMNS, of the state to a block; WIDE, whether a head's values are a multiple of 4. Numbers:
// tokens, rows, groups, heads, value, lines of the states' table, unit, extra, numbers of chunks. LINES, as in lines.cuh.

#define THREADS (WARPS * 32)
#define CHUNK 64
#define LEAST 16
#define BLOCK 16
#define BLOCKS (CHUNK / BLOCK)
// Keys that are taken at once: a thread has one of them, of a block of tokens.
#define SLICE (THREADS / BLOCKS)
// Strides in shared memory for which the lanes of a warp are at distinct banks: of keys' floats of a block, of parts of tokens and of values in 16 bits, and
// of weights in f32.
#define OF_BLOCK (BLOCK + 4)
#define OF_TOKENS (CHUNK + 8)
#define OF_VALUES (COLUMNS + 8)
#define OF_WEIGHTS (CHUNK + 8)
#define BY_KEY (DECAYS > 1)

// Two floats as sums of three pairs of bf16, the highest first.
__device__ inline void thirds(float x, float y, u32* part, int apart = 1) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const u32 both = Mma<BF16>::pack(x, y);
        part[i * apart] = both;
        x -= __uint_as_float(both << 16);
        y -= __uint_as_float(both & 0xffff0000);
    }
}

// Adds to TILES tiles of 16 x 8 the product of a tile of 16 x 16 in three parts and of 16 rows in planes of PLANE elements, whose lane's address is
// `right`. Products of less than 2^-24 of the whole are left out.
template <int TILES, int PLANE> __device__ inline void multiply(float (*sum)[4], const u32 (*left)[4], u32 right) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
        u32 b[3][4];
#pragma unroll
        for (int i = 0; i < 3; ++i) load_matrices_transposed(b[i], right + i * PLANE * 2 + tile * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float high[4] = {}, low[4] = {};
            const auto add = [&](float* to, int i, int j) {
                Mma<BF16>::of(to, left[i][0], left[i][1], left[i][2], left[i][3], b[j][2 * half], b[j][2 * half + 1]);
            };
            add(low, 0, 2);
            add(low, 1, 1);
            add(low, 2, 0);
            add(low, 0, 1);
            add(low, 1, 0);
            add(high, 0, 0);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[tile + half][e] += high[e] + low[e];
        }
    }
}

// The row of a tile of 16 x 16 that this lane gives to load_matrices, and its column.
__device__ inline int matrix_row() { return threadIdx.x & 15; }
__device__ inline int matrix_column() { return (threadIdx.x & 16) >> 1; }

// Four floats from `column` on of a row of `real` ones; zeros behind them.
__device__ inline float4 four(const float* row, int column, int real) {
#if WIDE
    return column < real ? *(const float4*)(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#else
    float4 x;
    x.x = column < real ? row[column] : 0.0f;
    x.y = column + 1 < real ? row[column + 1] : 0.0f;
    x.z = column + 2 < real ? row[column + 2] : 0.0f;
    x.w = column + 3 < real ? row[column + 3] : 0.0f;
    return x;
#endif
}

// ROWS rows of COLUMNS values on their way from memory to planes of OF_VALUES to a row.
template <int ROWS> struct Values {
    static const int PIECES = ROWS * (COLUMNS / 4) / THREADS;
    float4 x[PIECES];
    // They are `stride` apart; `count` of them exist, and `real` values of each.
    __device__ void fetch(const float* from, int stride, int count, int real) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = i * THREADS + threadIdx.x, row = at / (COLUMNS / 4), column = at % (COLUMNS / 4) * 4;
            x[i] = four(from + row * stride, column, row < count ? real : 0);
        }
    }
    __device__ void put(u16* to) const {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = i * THREADS + threadIdx.x, row = at / (COLUMNS / 4), column = at % (COLUMNS / 4) * 4;
            u32 part[3][2];
            thirds(x[i].x, x[i].y, &part[0][0], 2);
            thirds(x[i].z, x[i].w, &part[0][1], 2);
#pragma unroll
            for (int p = 0; p < 3; ++p)
                *(uint2*)(to + (p * ROWS + row) * OF_VALUES + column) = make_uint2(part[p][0], part[p][1]);
        }
    }
};

// One key of the tokens of a block, as planes of OF_TOKENS tokens to a key.
__device__ inline void put_keys(u16* to, const float* x, int block, int key) {
    u32 part[3][BLOCK / 2];
#pragma unroll
    for (int t = 0; t < BLOCK; t += 2) thirds(x[t], x[t + 1], &part[0][t / 2], BLOCK / 2);
#pragma unroll
    for (int p = 0; p < 3; ++p)
#pragma unroll
        for (int t = 0; t < BLOCK; t += 8)
            *(uint4*)(to + (p * SLICE + key) * OF_TOKENS + block * BLOCK + t) =
                make_uint4(part[p][t / 2], part[p][t / 2 + 1], part[p][t / 2 + 2], part[p][t / 2 + 3]);
}

// One key of the tokens of a block, as floats: OF_BLOCK to a key.
__device__ inline void put_block(float* to, const float* x, int block, int key) {
    float4* at = (float4*)(to + (block * SLICE + key) * OF_BLOCK);
#pragma unroll
    for (int t = 0; t < BLOCK; t += 4) at[t / 4] = make_float4(x[t], x[t + 1], x[t + 2], x[t + 3]);
}

// The sums of the logarithms of decays up to each token of a chunk, by one warp: in f64, since differences of sums are wanted. What is below the
// logarithm of the smallest number leaves nothing, as lower ones do.
__device__ inline void add_up(double* sums, const float* rates, i64 stride, int count) {
    const int lane = threadIdx.x & 31;
    double part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = 2 * lane + i;
        part[i] = t < count ? fmax((double)rates[t * stride], -110.0) : 0.0;
    }
    double sum = part[0] + part[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    sums[2 * lane] = sum - part[1];
    sums[2 * lane + 1] = sum;
}
__device__ inline float kept(double log) { return op_exp((float)log); }

// What remains of one key over each token of a block, instead of the logarithms of its decays. Multiplies `x`, one key of the tokens, by what remains
// of them at the block's end, and gives what remains over the whole block.
__device__ inline float keep_to_end(float* x, float* rates) {
    float product = 1.0f;
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i) {
        x[i] *= product;
        rates[i] = op_exp(rates[i]);
        product *= rates[i];
    }
    return product;
}

// Where a block's chunk is: its row's number, its first token and number of tokens.
struct Chunk {
    i64 number, first;
    int count, head, column, columns;
};
__device__ inline i64 number_of(const int* starts, int row, const i64* n) {
    return max(starts[row], 0) / n[6] + row * n[7];
}
// The chunk of this block; false where its number has none.
__device__ inline bool find_chunk(Chunk& c, const int* starts, const i64* n) {
    const i64 heads = n[3], value = n[4], tiles = (value + COLUMNS - 1) / COLUMNS;
    c.column = (int)(blockIdx.x % tiles) * COLUMNS;
    c.columns = (int)min((i64)COLUMNS, value - c.column);
    c.head = (int)(blockIdx.x / tiles % heads);
    c.number = blockIdx.x / tiles / heads;
    int low = 0, high = (int)n[1];
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (number_of(starts, middle, n) <= c.number) low = middle; else high = middle;
    }
    const i64 start = max(starts[low], 0), end = min((i64)starts[low + 1], n[0]);
    c.first = start + (c.number - number_of(starts, low, n)) * CHUNK;
    c.count = (int)min((i64)CHUNK, end - c.first);
    return end - start >= LEAST && c.first >= start && c.count > 0;
}

// One key of the tokens of a block, `stride` apart; zeros where there is none.
__device__ inline void fetch_key(float* x, const float* from, int stride, int count, bool is) {
#pragma unroll
    for (int t = 0; t < BLOCK; ++t) x[t] = is && t < count ? from[t * stride] : 0.0f;
}

// What chunks add to the state, and what remains of it. How the warps divide a slice of the state: its keys, and two halves of the columns.
#define S_ROWS (SLICE / BLOCK)
#define S_TILES (COLUMNS / 16)

extern "C" __global__ __launch_bounds__(THREADS) void recurrence_states(
    const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ decay, const int* __restrict__ starts,
    float* __restrict__ states, Numbers<9> n
) {
    extern __shared__ __align__(16) u16 planes[];
    __shared__ float totals[BLOCKS][SLICE], to_end[CHUNK];
    __shared__ double sums[CHUNK];
    others_may_begin();
    after_others();
    Chunk c;
    if (!find_chunk(c, starts, n.v)) return;
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], group = c.head * groups / heads;
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31, block = t / SLICE, mine = t % SLICE, rest = c.count - block * BLOCK;
    const i64 nth = c.number * heads + c.head, token = c.first + block * BLOCK;
    float* remains = states + n.v[8] * heads * KEY * value + nth * DECAYS;
    u16* vs = planes;
    u16* ks = vs + 3 * CHUNK * OF_VALUES;
    float x[BLOCK], rates[BLOCK];
    const auto fetch_keys = [&](int first) {
        const int key = first + mine;
        fetch_key(x, k + (token * groups + group) * KEY + key, (int)groups * KEY, rest, key < KEY);
        if (BY_KEY) fetch_key(rates, decay + (token * heads + c.head) * KEY + key, (int)heads * KEY, rest, key < KEY);
    };
    Values<CHUNK> values;
    values.fetch(v + (c.first * heads + c.head) * value + c.column, (int)(heads * value), c.count, c.columns);
    fetch_keys(0);
    values.put(vs);
    if (!BY_KEY) {
        if (warp == 0) {
            add_up(sums, decay + c.first * heads + c.head, heads, c.count);
            __syncwarp();
            const double last = sums[CHUNK - 1];
#pragma unroll
            for (int i = 0; i < CHUNK; i += 32) to_end[lane + i] = kept(last - sums[lane + i]);
            if (lane == 0 && c.column == 0) remains[0] = kept(last);
        }
        __syncthreads();
    }
    const int row = warp % S_ROWS * 16, column = warp / S_ROWS * (COLUMNS / 2);
    for (int first = 0; first < KEY; first += SLICE) {
        if (BY_KEY) {
            const float total = keep_to_end(x, rates);
            totals[block][mine] = total;
            __syncthreads();
            float behind = 1.0f;
#pragma unroll
            for (int b = 1; b < BLOCKS; ++b) if (b > block) behind *= totals[b][mine];
            if (block == 0 && first + mine < KEY && c.column == 0) remains[first + mine] = behind * total;
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) x[i] *= behind;
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) x[i] *= to_end[block * BLOCK + i];
        }
        put_keys(ks, x, block, mine);
        __syncthreads();
        if (first + SLICE < KEY) fetch_keys(first + SLICE);
        float sum[S_TILES][4] = {};
        const u32 left = shared_address(ks + (row + matrix_row()) * OF_TOKENS + matrix_column());
        const u32 right = shared_address(vs + matrix_row() * OF_VALUES + column + matrix_column());
#pragma unroll
        for (int at = 0; at < CHUNK; at += 16) {
            u32 a[3][4];
#pragma unroll
            for (int p = 0; p < 3; ++p) load_matrices(a[p], left + (p * SLICE * OF_TOKENS + at) * 2);
            multiply<S_TILES, CHUNK * OF_VALUES>(sum, a, right + at * OF_VALUES * 2);
        }
        float* out = states + nth * KEY * value + c.column;
#pragma unroll
        for (int tile = 0; tile < S_TILES; ++tile)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int i = first + row + (lane >> 2) + e * 4, at = column + tile * 8 + (lane & 3) * 2;
                if (i >= KEY) continue;
                if (WIDE) {
                    if (at < c.columns) *(float2*)(out + i * value + at) = make_float2(sum[tile][e], sum[tile][e + 1]);
                } else {
                    if (at < c.columns) out[i * value + at] = sum[tile][e];
                    if (at + 1 < c.columns) out[i * value + at + 1] = sum[tile][e + 1];
                }
            }
        __syncthreads();
    }
}

// States before chunks instead of what chunks add to them: a thread has PIECE values of one key, and reads AHEAD chunks at once.
#define PIECE (WIDE ? 4 : 1)
#define AHEAD 8

extern "C" __global__ __launch_bounds__(128) void recurrence_pass(
    const float* __restrict__ before, const int* __restrict__ starts, const int* __restrict__ lines, float* __restrict__ states,
    float* __restrict__ after, Numbers<9> n
) {
    others_may_begin();
    after_others();
    typedef Elements<F32, PIECE> Piece;
    const i64 heads = n.v[3], value = n.v[4], size = KEY * value, pieces = size / PIECE;
    const i64 at = (i64)blockIdx.x * 128 + threadIdx.x, head = at / pieces % heads, in_head = at % pieces * PIECE;
    const int row = (int)(at / pieces / heads);
    if (row >= n.v[1]) return;
    const i64 start = max(starts[row], 0), end = min((i64)starts[row + 1], n.v[0]);
    if (end - start < LEAST) return;
    const int chunks = (int)((end - start + CHUNK - 1) / CHUNK);
    const i64 from_line = line_of(lines, n.v[5], row, 0), to_line = line_of(lines, n.v[5], row, 1);
    const i64 number = number_of(starts, row, n.v) * heads + head;
    float* state = states + number * size + in_head;
    const float* remains = states + n.v[8] * heads * size + number * DECAYS + (BY_KEY ? in_head / value : 0);
    Piece s = {};
    if (from_line >= 0) s = elements_at<F32, PIECE>(before + (from_line * heads + head) * size + in_head);
    for (int first = 0; first < chunks; first += AHEAD) {
        Piece added[AHEAD];
        float by[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 chunk = min(first + i, chunks - 1) * heads;
            added[i] = elements_at<F32, PIECE>(state + chunk * size);
            by[i] = remains[chunk * DECAYS];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= chunks) break;
            *(Piece*)(state + (first + i) * heads * size) = s;
#pragma unroll
            for (int e = 0; e < PIECE; ++e) s.part[e] = fmaf(s.part[e], by[i], added[i].part[e]);
        }
    }
    if (to_line >= 0) *(Piece*)(after + (to_line * heads + head) * size + in_head) = s;
}

// How the warps divide y: blocks of tokens, and columns.
#define Y_TILES (COLUMNS * BLOCKS / WARPS / 8)
#if BY_KEY
// Pairs of different blocks, of which a warp computes one pair's weights.
#define PAIRS (BLOCKS * (BLOCKS - 1) / 2)
// Threads that share the weights of a token within its block.
#define SHARES (THREADS / CHUNK)
#else
// Blocks whose products with a block of y a warp computes.
#define TURNS (BLOCKS * BLOCKS / WARPS)
#endif

// 16 keys of the tokens of a block as a left operand, multiplied by `by`, which has SLICE floats to a block, of blocks `low` to `high`.
__device__ inline void take_left(u32 (*left)[4], const float* keys, const float* by, int low, int high) {
    const int row = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 factor = make_float2(1.0f, 1.0f);
        if (BY_KEY)
            for (int block = low; block < high; ++block) {
                const float2 total = *(const float2*)(by + block * SLICE + pair + half * 8);
                factor.x *= total.x;
                factor.y *= total.y;
            }
        const float* at = keys + (pair + half * 8) * OF_BLOCK + row;
#pragma unroll
        for (int i = 0; i < 2; ++i) thirds(at[i * 8] * factor.x, at[OF_BLOCK + i * 8] * factor.y, &left[0][half * 2 + i], 4);
    }
}

extern "C" __global__ __launch_bounds__(THREADS, WARPS == 8 ? 2 : 3) void recurrence_outputs(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
    const float* __restrict__ decay, const int* __restrict__ starts, const float* __restrict__ states, float* __restrict__ y,
    Numbers<9> n
) {
    // Keys of a slice, over which weights lie later; and what the threads of a block share, over which planes of values lie.
    extern __shared__ __align__(16) float room[];
    __shared__ float totals[BLOCKS][SLICE];
#if !BY_KEY
    __shared__ double sums[CHUNK];
#endif
    others_may_begin();
    after_others();
    Chunk c;
    if (!find_chunk(c, starts, n.v)) return;
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], group = c.head * groups / heads;
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31, block = t / SLICE, mine = t % SLICE, rest = c.count - block * BLOCK;
    const i64 token = c.first + block * BLOCK;
    float* scaled = room;
    u16* ks = (u16*)(scaled + BLOCKS * SLICE * OF_BLOCK);
    float* weights = room;
    u16* vs = ks + 3 * SLICE * OF_TOKENS;
#if BY_KEY
    float* raw_q = (float*)vs;
    float* raw_k = raw_q + BLOCKS * SLICE * OF_BLOCK;
    float* decays = raw_k + BLOCKS * SLICE * OF_BLOCK;
#endif
    const int y_block = warp % BLOCKS, y_column = warp / BLOCKS * Y_TILES * 8;
    float out[Y_TILES][4] = {};
#if BY_KEY
    // Blocks (1, 0), (2, 0), (2, 1), (3, 0)...
    const int later = warp < 1 ? 1 : warp < 3 ? 2 : 3, earlier = warp - later * (later - 1) / 2;
    const int of_share = t % BLOCK, share = t / BLOCK % SHARES, shared_block = t / BLOCK / SHARES;
    float between[2][4] = {}, within[BLOCK] = {};
    // A token's own weight, which may be all of a sum that cancels.
    Compensated own;
#else
    // Of blocks of tokens in turn with the other warps of this block of y.
    const int turn = warp / BLOCKS;
    float score[2 * TURNS][4] = {};
    if (warp == 0) add_up(sums, decay + c.first * heads + c.head, heads, c.count);
#endif
    // What is read of a slice: one key of the tokens of a block, and the state.
    float x[BLOCK], z[BLOCK];
#if BY_KEY
    float rates[BLOCK];
#endif
    Values<SLICE> state;
    const auto fetch_slice = [&](int first) {
        const int key = first + mine;
        const bool is = key < KEY;
        fetch_key(x, q + (token * groups + group) * KEY + key, (int)groups * KEY, rest, is);
        fetch_key(z, k + (token * groups + group) * KEY + key, (int)groups * KEY, rest, is);
#if BY_KEY
        fetch_key(rates, decay + (token * heads + c.head) * KEY + key, (int)heads * KEY, rest, is);
#endif
        const float* from = states + ((c.number * heads + c.head) * KEY + first) * value + c.column;
        state.fetch(from, (int)value, KEY - first, c.columns);
    };
    Values<CHUNK> values;
    for (int first = 0; first < KEY; first += SLICE) {
        fetch_slice(first);
#if BY_KEY
        put_block(raw_q, x, block, mine);
        put_block(raw_k, z, block, mine);
        totals[block][mine] = keep_to_end(z, rates);
        float product = 1.0f;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            product *= rates[i];
            x[i] *= product;
        }
        put_block(decays, rates, block, mine);
#endif
        put_block(scaled, x, block, mine);
        put_keys(ks, z, block, mine);
#if BY_KEY
        __syncthreads();
        if (warp < PAIRS) {
            const u32 right = shared_address(ks + matrix_row() * OF_TOKENS + earlier * BLOCK + matrix_column());
#pragma unroll 2
            for (int at = 0; at < SLICE; at += 16) {
                u32 left[3][4];
                take_left(left, scaled + (later * SLICE + at) * OF_BLOCK, totals[0] + at, earlier + 1, later);
                multiply<2, SLICE * OF_TOKENS>(between, left, right + at * OF_TOKENS * 2);
            }
        }
#pragma unroll 2
        for (int i = share; i < SLICE; i += SHARES) {
            const int at = (shared_block * SLICE + i) * OF_BLOCK;
            const float of_k = raw_k[at + of_share];
            own.add_product(raw_q[at + of_share], of_k);
            float product = 0.0f;
#pragma unroll
            for (int s = 0; s < BLOCK; s += 4) {
                const float4 qs = *(const float4*)(raw_q + at + s), by = *(const float4*)(decays + at + s);
                const float of_q[4] = {qs.x, qs.y, qs.z, qs.w}, of_decay[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    product = s + e == of_share ? of_k : product * of_decay[e];
                    within[s + e] = fmaf(of_q[e], product, within[s + e]);
                }
            }
        }
        __syncthreads();
#endif
        state.put(vs);
        __syncthreads();
        if (first + SLICE >= KEY)
            values.fetch(v + (c.first * heads + c.head) * value + c.column, (int)(heads * value), c.count, c.columns);
        const u32 right = shared_address(vs + matrix_row() * OF_VALUES + y_column + matrix_column());
#if !BY_KEY
        const u32 of_keys = shared_address(ks + matrix_row() * OF_TOKENS + matrix_column());
#endif
#pragma unroll 1
        for (int at = 0; at < SLICE; at += 16) {
            u32 left[3][4];
            take_left(left, scaled + (y_block * SLICE + at) * OF_BLOCK, totals[0] + at, 0, y_block);
            multiply<Y_TILES, SLICE * OF_VALUES>(out, left, right + at * OF_VALUES * 2);
#if !BY_KEY
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int earlier = i * (WARPS / BLOCKS) + turn;
                if (earlier > y_block) continue;
                multiply<2, SLICE * OF_TOKENS>(score + 2 * i, left, of_keys + (at * OF_TOKENS + earlier * BLOCK) * 2);
            }
#endif
        }
        __syncthreads();
    }
    values.put(vs);
    const int row = lane >> 2, pair = (lane & 3) * 2;
#if BY_KEY
    if (warp < PAIRS)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int s = later * BLOCK + row + (e >> 1) * 8, j = earlier * BLOCK + tile * 8 + pair + (e & 1);
                weights[s * OF_WEIGHTS + j] = between[tile][e];
            }
    // Two shares are in one warp, and two warps have a block's.
    const int j = shared_block * BLOCK + of_share;
#pragma unroll
    for (int s = 0; s < BLOCK; ++s) within[s] += __shfl_xor_sync(0xffffffff, within[s], BLOCK);
    own.add_other(BLOCK);
#pragma unroll
    for (int turn = 0; turn < SHARES; turn += 2) {
        if (turn > 0) __syncthreads();
        if (share == turn)
#pragma unroll
            for (int s = 0; s < BLOCK; ++s) {
                float* weight = weights + (shared_block * BLOCK + s) * OF_WEIGHTS + j;
                const float sum = s == of_share ? own.value() : within[s];
                *weight = turn > 0 ? *weight + sum : sum;
            }
    }
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int s = y_block * BLOCK + row + half * 8;
        const float from_start = kept(sums[s]);
#pragma unroll
        for (int tile = 0; tile < Y_TILES; ++tile) {
            out[tile][half * 2] *= from_start;
            out[tile][half * 2 + 1] *= from_start;
        }
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int earlier = i * (WARPS / BLOCKS) + turn;
            if (earlier > y_block) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = earlier * BLOCK + (e >> 1) * 8 + pair + (e & 1);
                const float product = score[2 * i + (e >> 1)][half * 2 + (e & 1)];
                weights[s * OF_WEIGHTS + j] = j <= s ? product * kept(sums[s] - sums[j]) : 0.0f;
            }
        }
    }
#endif
    __syncthreads();
    const u32 right = shared_address(vs + matrix_row() * OF_VALUES + y_column + matrix_column());
    // Tokens behind a block have no weight.
#pragma unroll 1
    for (int at = 0; at < (y_block + 1) * BLOCK; at += 16) {
        u32 left[3][4];
        const float* from = weights + (y_block * BLOCK + row) * OF_WEIGHTS + at + pair;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = *(const float2*)(from + (i & 1) * 8 * OF_WEIGHTS + (i >> 1) * 8);
            thirds(two.x, two.y, &left[0][i], 4);
        }
        multiply<Y_TILES, CHUNK * OF_VALUES>(out, left, right + at * OF_VALUES * 2);
    }
#pragma unroll
    for (int tile = 0; tile < Y_TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int s = y_block * BLOCK + row + e * 4, at = y_column + tile * 8 + pair;
            if (s >= c.count) continue;
            float* to = y + ((c.first + s) * heads + c.head) * value + c.column + at;
            if (WIDE) {
                if (at < c.columns) *(float2*)to = make_float2(out[tile][e], out[tile][e + 1]);
            } else {
                if (at < c.columns) to[0] = out[tile][e];
                if (at + 1 < c.columns) to[1] = out[tile][e + 1];
            }
        }
}
