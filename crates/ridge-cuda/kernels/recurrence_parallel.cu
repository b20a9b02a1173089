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
// Floor: k, v and decays are read twice, q once, all but v for every COLUMNS values of a head; y and after it the states of chunks are moved four times; 4 KEY value + CHUNK (KEY + value)
// operations for each token and head at a sixth of the rate of bf16, with GATED at a third to half. GLA's shape (16 heads, 64 keys, 128 values), 16,384 tokens,
// GATED: 0.30 GB of operands and 0.54 of states, 0.25 ms at 3.3 TB/s. Defines and numbers: recurrence_blocks.cuh. LINES, as in lines.cuh.
// With MIRRORED tokens run backwards, and a token's decay takes effect behind it, as with cotangents of the state (recurrence_gradient_keys.cu):
// `recurrence_states` takes q for k and dy for v, what is passed from the last chunk to the first are cotangents of the state behind each, and
// `recurrence_outputs` makes dv of k for q, q for k, and dy for v.
#define STEP (MIRRORED ? -1 : 1)

// What chunks add to the state, and what remains of it. How the warps divide a slice of the state: its keys, and two halves of the columns.
#define S_ROWS (SLICE / BLOCK)
#define S_TILES (COLUMNS / 16)

extern "C" __global__ __launch_bounds__(THREADS) void recurrence_states(
    const Raw* __restrict__ k, const Raw* __restrict__ v, const float* __restrict__ weight, const float* __restrict__ decay,
    const int* __restrict__ starts, float* __restrict__ states, Numbers<9> n
) {
    extern __shared__ __align__(16) u16 planes[];
    __shared__ float totals[BLOCKS][SLICE], to_end[CHUNK];
    __shared__ double sums[CHUNK];
    others_may_begin();
    after_others();
    Chunk c;
    if (!find_chunk(c, starts, n.v, COLUMNS)) return;
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], group = c.head * groups / heads;
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31, block = t / SLICE, mine = t % SLICE, rest = c.count - block * BLOCK;
    const i64 nth = c.number * heads + c.head, token = c.first + block * BLOCK;
    float* remains = states + n.v[8] * heads * KEY * value + nth * DECAYS;
    u16* vs = planes;
    u16* ks = vs + VALUE_PARTS * CHUNK * OF_VALUES;
    float x[BLOCK], decays[BLOCK];
    const auto fetch_keys = [&](int first) {
        const int key = first + mine;
        fetch_key(x, k + (token * groups + group) * KEY + key, (int)groups * KEY, rest, key < KEY);
        weigh_key(x, weight, c, token, heads, rest);
#if BY_KEY
        fetch_decays(decays, decay, c, token, heads, key, rest);
#endif
    };
    Values<CHUNK, VALUE_PARTS, Operand> values;
    values.fetch(v + (c.first * heads + c.head) * value + c.column, (int)(heads * value), c.count, c.columns);
    fetch_keys(0);
    values.put(vs);
    if (!BY_KEY) {
        if (warp == 0) {
            add_up(sums, decay + c.first * heads + c.head, heads, c.count);
            __syncwarp();
            const double last = sums[CHUNK - 1];
#pragma unroll
            for (int i = 0; i < CHUNK; i += 32) to_end[lane + i] = kept(MIRRORED ? sums[lane + i] : last - sums[lane + i]);
            if (lane == 0 && c.column == 0) remains[0] = kept(last);
        }
        __syncthreads();
    }
    const int row = warp % S_ROWS * 16, column = warp / S_ROWS * (COLUMNS / 2);
    for (int first = 0; first < KEY; first += SLICE) {
        if (BY_KEY) {
            // Of what is between the block and the chunk's end, or with MIRRORED its beginning.
            const float total = MIRRORED ? keep_from_start(x, decays) : keep_to_end(x, decays);
            totals[block][mine] = total;
            __syncthreads();
            float behind = 1.0f;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) if (MIRRORED ? b < block : b > block) behind *= totals[b][mine];
            if (block == (MIRRORED ? BLOCKS - 1 : 0) && first + mine < KEY && c.column == 0) remains[first + mine] = behind * total;
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) x[i] *= behind;
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) x[i] *= to_end[block * BLOCK + i];
        }
        put_keys<KEY_PARTS>(ks, x, block, mine);
        __syncthreads();
        if (first + SLICE < KEY) fetch_keys(first + SLICE);
        float sum[S_TILES][4] = {};
        const u32 left = shared_address(ks + (row + matrix_row()) * OF_TOKENS + matrix_column());
        const u32 right = shared_address(vs + matrix_row() * OF_VALUES + column + matrix_column());
#pragma unroll
        for (int at = 0; at < CHUNK; at += 16) {
            u32 a[KEY_PARTS][4];
#pragma unroll
            for (int p = 0; p < KEY_PARTS; ++p) load_matrices(a[p], left + (p * SLICE * OF_TOKENS + at) * 2);
            multiply<S_TILES, CHUNK * OF_VALUES, KEY_PARTS, VALUE_PARTS>(sum, a, right + at * OF_VALUES * 2);
        }
        float* out = states + nth * KEY * value + c.column;
#pragma unroll
        for (int tile = 0; tile < S_TILES; ++tile)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int i = first + row + (lane >> 2) + e * 4, at = column + tile * 8 + (lane & 3) * 2;
                if (i >= KEY) continue;
                put_two(out + i * value, at, c.columns, sum[tile][e], sum[tile][e + 1]);
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
    const auto place = [&](int nth) { return (MIRRORED ? chunks - 1 - nth : nth) * heads; };
    for (int first = 0; first < chunks; first += AHEAD) {
        Piece added[AHEAD];
        float by[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 chunk = place(min(first + i, chunks - 1));
            added[i] = elements_at<F32, PIECE>(state + chunk * size);
            by[i] = remains[chunk * DECAYS];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= chunks) break;
            *(Piece*)(state + place(first + i) * size) = s;
#pragma unroll
            for (int e = 0; e < PIECE; ++e) s.part[e] = fmaf(s.part[e], by[i], added[i].part[e]);
        }
    }
    if (to_line >= 0) *(Piece*)(after + (to_line * heads + head) * size + in_head) = s;
}

extern "C" __global__ __launch_bounds__(THREADS, WARPS == 8 ? 2 : 3) void recurrence_outputs(
    const Raw* __restrict__ q, const Raw* __restrict__ k, const Raw* __restrict__ v, const float* __restrict__ weight,
    const float* __restrict__ decay, const int* __restrict__ starts, const float* __restrict__ states, Raw* __restrict__ y,
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
    if (!find_chunk(c, starts, n.v, COLUMNS)) return;
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], group = c.head * groups / heads;
    const int t = threadIdx.x, warp = t >> 5, block = t / SLICE, mine = t % SLICE, rest = c.count - block * BLOCK;
    // Of the first token, and of the first of this thread's block.
    const i64 begin = MIRRORED ? c.first + c.count - 1 : c.first, token = begin + STEP * block * BLOCK;
    float* scaled = room;
    u16* ks = (u16*)(scaled + BLOCKS * SLICE * OF_BLOCK);
    float* weights = room;
    u16* vs = ks + Y_PARTS * SLICE * OF_TOKENS;
    const int y_block = warp % BLOCKS, y_column = warp / BLOCKS * Y_TILES * 8;
    float out[Y_TILES][4] = {};
#if BY_KEY
    float* raw_q = (float*)vs;
    float* raw_k = raw_q + BLOCKS * SLICE * OF_BLOCK;
    float* decays = raw_k + BLOCKS * SLICE * OF_BLOCK;
    Weights of_v;
#else
    // Of blocks of tokens in turn with the other warps of this block of y.
    const int turn = warp / BLOCKS;
    float score[2 * TURNS][4] = {};
    if (warp == 0) add_up(sums, decay + (begin + MIRRORED) * heads + c.head, STEP * heads, c.count, MIRRORED);
#endif
    for (int first = 0; first < KEY; first += SLICE) {
        const int key = first + mine;
        const bool is = key < KEY;
        float x[BLOCK], z[BLOCK];
        fetch_key(x, q + (token * groups + group) * KEY + key, STEP * (int)groups * KEY, rest, is);
        fetch_key(z, k + (token * groups + group) * KEY + key, STEP * (int)groups * KEY, rest, is);
        weigh_key(z, weight, c, token, heads, rest);
        Values<SLICE, Y_PARTS, F32> state;
        state.fetch(states + ((c.number * heads + c.head) * KEY + first) * value + c.column, (int)value, KEY - first, c.columns);
#if BY_KEY
        float shares[BLOCK];
        fetch_decays<STEP>(shares, decay, c, token, heads, key, rest);
        put_block(raw_q, x, block, mine);
        put_block(raw_k, z, block, mine);
        put_block(decays, shares, block, mine);
        totals[block][mine] = keep_to_end(z, shares);
        float product = 1.0f;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            product *= shares[i];
            x[i] *= product;
        }
#endif
        put_block(scaled, x, block, mine);
        put_keys<Y_PARTS>(ks, z, block, mine);
#if BY_KEY
        __syncthreads();
        of_v.add(scaled, ks, totals[0], raw_q, raw_k, decays);
        __syncthreads();
#endif
        state.put(vs);
        __syncthreads();
        const u32 right = shared_address(vs + matrix_row() * OF_VALUES + y_column + matrix_column());
#if !BY_KEY
        const u32 of_keys = shared_address(ks + matrix_row() * OF_TOKENS + matrix_column());
#endif
#pragma unroll 1
        for (int at = 0; at < SLICE; at += 16) {
            u32 left[Y_PARTS][4];
            take_left(left, scaled + (y_block * SLICE + at) * OF_BLOCK, totals[0] + at, 0, y_block);
            multiply<Y_TILES, SLICE * OF_VALUES, Y_PARTS, Y_PARTS>(out, left, right + at * OF_VALUES * 2);
#if !BY_KEY
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int earlier = i * (WARPS / BLOCKS) + turn;
                if (earlier > y_block) continue;
                multiply<2, SLICE * OF_TOKENS, Y_PARTS, Y_PARTS>(score + 2 * i, left, of_keys + (at * OF_TOKENS + earlier * BLOCK) * 2);
            }
#endif
        }
        __syncthreads();
    }
    const i64 at_values = (begin * heads + c.head) * value + c.column;
    Values<CHUNK, VALUE_PARTS, Operand> values;
    values.fetch(v + at_values, STEP * (int)(heads * value), c.count, c.columns);
    values.put(vs);
#if BY_KEY
    of_v.put(weights);
#else
    const int row = (t & 31) >> 2, pair = (t & 3) * 2;
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
    weigh(out, weights, right, y_block);
    put_rows(y + at_values, STEP * heads * value, out, y_block, y_column, c.count, c.columns);
}
