// Linear recurrences whose state is a matrix, with a part of low rank and keys that decay alike, CHUNK tokens at a time on tensor cores (Yang,
// Kautz, Hatamizadeh 2024, "Gated Delta Networks", section 3.3). With S the state before a chunk, G_t the sum of its logarithms of decays up to token t, and E_t = exp(G_t):
//
//   u_t = E_(t-1) erase_t^T S + sum over j < t of exp(G_(t-1) - G_j) ((erase_t . k_j) v_j + (erase_t . write_j) u_j)
//   y_t = E_t q_t^T S + sum over j <= t of exp(G_t - G_j) ((q_t . k_j) v_j + (q_t . write_j) u_j)
//   S' = E_last S + sum over j of exp(G_last - G_j) (k_j v_j^T + write_j u_j^T)
//
// Sums of products of keys do not depend on the state: `recurrence_scores` makes them for all chunks at once, and solves the
// triangular system of u, so that u = R X + N V with X of rows E_(t-1) erase_t^T S. Then `recurrence_chunks` takes the chunks of a head
// in turn, COLUMNS of its state to a block.
// Tensor cores add without rounding, so products are of bf16 in three parts, 8 bits each: sums of the highest parts' products are all but exact, and
// f32 additions, which round, add them up (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores", does so with two
// parts of TF32, whose products have too many bits for that). Floor: for each token and head 8 KEY value + 8 CHUNK value operations at a
// sixth of the rate of bf16.
// Rows of fewer than LEAST tokens, half a chunk, are left to another kernel. Chunk c of row r has number starts[r] / LEAST + c, so that there are no more
// numbers than tokens allow: from floor(a / 16) on, a row of n >= 16 tokens at a has floor((a + n) / 16) - floor(a / 16) >= ceil(n / 32) of its own.
// Defines: KEY; WIDE, whether a head's values are a multiple of 4; UPDATES, whether `recurrence_chunks` gives u in place of y. Numbers: tokens, rows, groups, heads, value, and of
// `recurrence_chunks` the lines of the states' table. LINES, as in lines.cuh.

#define WARPS 4
#define CHUNK 32
#define LEAST (CHUNK / 2)
#define COLUMNS 32
#define THREADS (WARPS * 32)
// Keys in whole tiles; those behind the last are zeros.
#define DEPTH (KEY <= 32 ? 32 : KEY <= 64 ? 64 : KEY <= 128 ? 128 : 256)
// Strides in shared memory such that the lanes of a warp read fragments from distinct banks: by rows, and by columns.
#define BY_ROW (DEPTH + 8)
#define BY_COLUMN (DEPTH + 4)
#define OF_VALUES (COLUMNS + 4)
#define OF_SCORES (CHUNK + 8)

// Two floats as sums of three pairs of bf16, the highest first.
__device__ inline void thirds(float2 two, u32* part) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        part[i] = Mma<BF16>::pack(two.x, two.y);
        two.x -= __uint_as_float(part[i] << 16);
        two.y -= __uint_as_float(part[i] & 0xffff0000);
    }
}

// Two floats of shared memory, DISTANCE apart: at once if they are next to each other, the first at a multiple of 8 bytes.
template <int DISTANCE> __device__ inline float2 neighbours(const float* at) {
    return DISTANCE == 1 ? *(const float2*)at : make_float2(at[0], at[DISTANCE]);
}

// Adds to TILES tiles of 16 x 8 the product of 16 rows of `a` with their columns of `b`, over `depth` elements, a multiple of 16. Element
// (row, k) of `a` lies at row * A_ROW + k * A_DEEP, element (k, column) of `b` at k * B_DEEP + column * B_COLUMN. With SCALED, element k of
// `scale` multiplies those of `a`.
template <int TILES, int A_ROW, int A_DEEP, int B_DEEP, int B_COLUMN, bool SCALED = false>
__device__ inline void multiply(float (*sum)[4], const float* a, const float* b, int depth, const float* scale = nullptr) {
    const int group = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
    a += group * A_ROW + pair * A_DEEP;
    b += pair * B_DEEP + group * B_COLUMN;
#pragma unroll 1
    for (int k = 0; k < depth; k += 16, a += 16 * A_DEEP, b += 16 * B_DEEP) {
        u32 left[4][3];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 two = neighbours<A_DEEP>(a + (i & 1) * 8 * A_ROW + (i >> 1) * 8 * A_DEEP);
            if (SCALED) {
                const float2 by = neighbours<1>(scale + k + pair + (i >> 1) * 8);
                two.x *= by.x;
                two.y *= by.y;
            }
            thirds(two, left[i]);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            u32 right[2][3];
#pragma unroll
            for (int i = 0; i < 2; ++i) thirds(neighbours<B_DEEP>(b + tile * 8 * B_COLUMN + i * 8 * B_DEEP), right[i]);
            // By order of magnitude, so that one does not wait for the other; products of less than 2^-24 of the whole are left out.
            float of[3][4] = {};
#pragma unroll
            for (int order = 0; order < 3; ++order)
#pragma unroll
                for (int i = 0; i <= order; ++i)
                    Mma<BF16>::of(
                        of[order], left[0][i], left[1][i], left[2][i], left[3][i], right[0][order - i], right[1][order - i]
                    );
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[tile][i] += of[0][i] + (of[1][i] + of[2][i]);
        }
    }
}

// ROWS rows of WIDTH floats, `stride` apart in memory, to rows TO_STRIDE apart in shared memory; `count` of them exist, and `real` floats of each:
// the others are zeros. BY_FOUR: both are multiples of 4, and rows begin at 16 bytes.
template <int ROWS, int WIDTH, int TO_STRIDE, bool BY_FOUR>
__device__ inline void fetch(float* to, const float* from, i64 stride, int count, int real) {
    constexpr int PIECE = BY_FOUR ? 4 : 1, PIECES = WIDTH / PIECE;
#pragma unroll 2
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * PIECE;
        const bool is = row < count && column < real;
        const u32 target = shared_address(to + row * TO_STRIDE + column);
        const float* source = from + (is ? row * stride + column : 0);
        if (BY_FOUR)
            copy_async(target, source, is);
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                :: "r"(target), "l"(source), "r"(is ? 4 : 0) : "memory");
    }
}
// The keys of a chunk.
template <int TO_STRIDE> __device__ inline void fetch_keys(float* to, const float* from, i64 stride, int count) {
    fetch<CHUNK, DEPTH, TO_STRIDE, KEY % 4 == 0>(to, from, stride, count, KEY);
}

// The sum of the logarithms of decays up to this lane's token of a chunk: in f64, since differences of sums are wanted. What is below the
// logarithm of the smallest number leaves nothing, as lower ones do.
__device__ inline double add_up(const float* rates, i64 stride, int count) {
    const int lane = threadIdx.x & 31;
    double sum = lane < count ? rates[lane * stride] : 0.0;
    // Not by fmax, which would hide a NaN.
    if (sum < -110.0) sum = -110.0;
#pragma unroll
    for (int step = 1; step < CHUNK; step *= 2) {
        const double other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    return sum;
}
__device__ inline float kept(double log) { return op_exp((float)log); }

// The chunk of this number: its row, first token and number of tokens; false where it has none.
__device__ inline bool find_chunk(const int* starts, int rows, i64 tokens, i64 number, i64& first, int& count) {
    int low = 0, high = rows;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (max(starts[middle], 0) / LEAST <= number) low = middle; else high = middle;
    }
    const i64 start = max(starts[low], 0), end = min((i64)starts[low + 1], tokens);
    first = start + (number - start / LEAST) * CHUNK;
    count = (int)min((i64)CHUNK, end - first);
    return end - start >= LEAST && first >= start && count > 0;
}

// What the state does not change, of a chunk and head: matrices of CHUNK x CHUNK, then of each token what remains of the state at it, and of what
// it brought at the chunk's end.
#define SCORES 4
#define OF_CHUNK (SCORES * CHUNK * CHUNK + 2 * CHUNK)

// The weights of V and u in y, N and R.
extern "C" __global__ __launch_bounds__(THREADS, 1) void recurrence_scores(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ decay, const int* __restrict__ starts,
    const float* __restrict__ erase, const float* __restrict__ write, float* __restrict__ scores, Numbers<6> n
) {
    extern __shared__ __align__(16) float room[];
    others_may_begin();
    after_others();
    __shared__ double sums[CHUNK];
    const i64 tokens = n.v[0], groups = n.v[2], heads = n.v[3], number = blockIdx.x / heads;
    const i64 head = blockIdx.x % heads, group = head * groups / heads;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
    i64 first;
    int count;
    if (!find_chunk(starts, (int)n.v[1], tokens, number, first, count)) return;
    float* qs = room;
    float* ks = qs + CHUNK * BY_ROW;
    fetch_keys<BY_ROW>(qs, q + (first * groups + group) * KEY, groups * KEY, count);
    fetch_keys<BY_ROW>(ks, k + (first * groups + group) * KEY, groups * KEY, count);
    float* es = ks + CHUNK * BY_ROW;
    float* ws = es + CHUNK * BY_ROW;
    float* solved = ws + CHUNK * BY_ROW;
    float* of_v = solved + CHUNK * OF_SCORES;
    float* of_u = of_v + CHUNK * OF_SCORES;
    fetch_keys<BY_ROW>(es, erase + (first * heads + head) * KEY, heads * KEY, count);
    fetch_keys<BY_ROW>(ws, write + (first * heads + head) * KEY, heads * KEY, count);
    copies_end();
    float* out = scores + (number * heads + head) * OF_CHUNK;
    if (warp == 0) {
        const double sum = add_up(decay + first * heads + head, heads, count);
        float* factors = out + SCORES * CHUNK * CHUNK;
        sums[lane] = sum;
        factors[lane] = kept(sum);
        factors[CHUNK + lane] = kept(__shfl_sync(0xffffffff, sum, CHUNK - 1) - sum);
    }
    copies_wait<0>();
    __syncthreads();
    // A warp for each pair of q or erase with k or write.
    const bool erases = warp >= 2, writes = warp & 1;
    float sum[2][4][4] = {};
#pragma unroll
    for (int m = 0; m < 2; ++m)
        multiply<4, BY_ROW, 1, 1, BY_ROW>(sum[m], (erases ? es : qs) + m * 16 * BY_ROW, writes ? ws : ks, DEPTH);
    float* to = erases ? (writes ? of_u : of_v) : out + (writes ? CHUNK * CHUNK : 0);
    const int stride = erases ? OF_SCORES : CHUNK;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int tile = 0; tile < 4; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = m * 16 + row + (i >> 1) * 8, j = tile * 8 + column + (i & 1), behind = erases ? t - 1 : t;
                to[t * stride + j] = j <= behind ? sum[m][tile][i] * kept(sums[max(behind, 0)] - sums[j]) : 0.0f;
            }
    __syncthreads();
    // Column `lane` of R, the inverse of the unit triangle 1 - of_u.
    if (warp == 0) {
        float r[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            float x = t == lane ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < t; ++j) x = fmaf(of_u[t * OF_SCORES + j], r[j], x);
            r[t] = x;
            solved[t * OF_SCORES + lane] = x;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS) {
        const int t = i / CHUNK, j = i % CHUNK;
        float x = 0.0f;
        for (int s = j + 1; s <= t; ++s) x = fmaf(solved[t * OF_SCORES + s], of_v[s * OF_SCORES + j], x);
        out[2 * CHUNK * CHUNK + i] = x;
        out[3 * CHUNK * CHUNK + i] = solved[t * OF_SCORES + j];
    }
}

// How the warps divide CHUNK rows of COLUMNS, and the state's DEPTH rows.
#define Y_ROWS (CHUNK / 16)
#define Y_TILES (COLUMNS / 8 * Y_ROWS / WARPS)
#define S_ROWS (DEPTH / 16 < WARPS ? DEPTH / 16 : WARPS)
#define S_TILES (COLUMNS / 8 * S_ROWS / WARPS)
#define S_PARTS (DEPTH / 16 / S_ROWS)
// Each of a thread's elements of y or S, and where it lies.
#define EACH_OF_Y _Pragma("unroll") for (int tile = 0; tile < Y_TILES; ++tile) _Pragma("unroll") for (int e = 0; e < 4; ++e)
#define Y_ROW (y_row + in_tile + (e >> 1) * 8)
#define Y_COLUMN (y_column + tile * 8 + pair + (e & 1))
#define EACH_OF_STATE \
    _Pragma("unroll") for (int part = 0; part < S_PARTS; ++part) \
        _Pragma("unroll") for (int tile = 0; tile < S_TILES; ++tile) _Pragma("unroll") for (int e = 0; e < 4; ++e)
#define S_ROW (part * S_ROWS * 16 + s_row + in_tile + (e >> 1) * 8)
#define S_COLUMN (s_column + tile * 8 + pair + (e & 1))

extern "C" __global__ __launch_bounds__(THREADS, 1) void recurrence_chunks(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
    const float* __restrict__ decay, const float* __restrict__ before, const int* __restrict__ starts,
    const float* __restrict__ erase, const float* __restrict__ write, const float* __restrict__ scores,
    const int* __restrict__ lines, float* __restrict__ y, float* __restrict__ after, Numbers<6> n
) {
    extern __shared__ __align__(16) float room[];
    others_may_begin();
    after_others();
    const int tokens = (int)n.v[0], groups = (int)n.v[2], heads = (int)n.v[3], value = (int)n.v[4];
    const int tiles = (value + COLUMNS - 1) / COLUMNS;
    const int head = (int)(blockIdx.x / tiles % heads), row = (int)(blockIdx.x / tiles / heads);
    const int column = (int)(blockIdx.x % tiles) * COLUMNS, columns = min(COLUMNS, value - column);
    const int start = max(starts[row], 0), end = min(starts[row + 1], tokens);
    if (end - start < LEAST) return;
    const int group = (int)((i64)head * groups / heads);
    const i64 from_line = line_of(lines, n.v[5], row, 0), to_line = line_of(lines, n.v[5], row, 1);
    const i64 base = (from_line * heads + head) * KEY, to_base = (to_line * heads + head) * KEY;
    float* state = room;
    float* qs = state + DEPTH * OF_VALUES;
    float* ks = qs + CHUNK * BY_ROW;
    float* vs = ks + CHUNK * BY_COLUMN;
    float* weights = vs + CHUNK * OF_VALUES;
    float* from_start = weights + SCORES * CHUNK * OF_SCORES;
    float* to_end = from_start + CHUNK;
    float* es = from_start + 2 * CHUNK;
    float* ws = es + CHUNK * BY_ROW;
    float* xs = ws + CHUNK * BY_COLUMN;
    float* us = xs + CHUNK * OF_VALUES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, in_tile = lane >> 2, pair = (lane & 3) * 2;
    const int y_row = warp % Y_ROWS * 16, y_column = warp / Y_ROWS * Y_TILES * 8;
    const int s_row = warp % S_ROWS * 16, s_column = warp / S_ROWS * S_TILES * 8;

    const auto scores_of = [&](int first) {
        return scores + ((i64)(start / LEAST + (first - start) / CHUNK) * heads + head) * OF_CHUNK;
    };
    const auto fetch_rows = [&](int first) {
        const int count = min(CHUNK, end - first);
        if (!UPDATES) fetch_keys<BY_ROW>(qs, q + ((i64)first * groups + group) * KEY, (i64)groups * KEY, count);
        fetch_keys<BY_ROW>(es, erase + ((i64)first * heads + head) * KEY, (i64)heads * KEY, count);
        const float* of_chunk = scores_of(first);
        fetch<SCORES * CHUNK, CHUNK, OF_SCORES, true>(weights, of_chunk, CHUNK, SCORES * CHUNK, CHUNK);
        fetch<1, CHUNK, CHUNK, true>(from_start, of_chunk + SCORES * CHUNK * CHUNK, CHUNK, 1, CHUNK);
        copies_end();
    };
    const auto fetch_columns = [&](int first) {
        const int count = min(CHUNK, end - first);
        fetch<1, CHUNK, CHUNK, true>(to_end, scores_of(first) + SCORES * CHUNK * CHUNK + CHUNK, CHUNK, 1, CHUNK);
        fetch_keys<BY_COLUMN>(ks, k + ((i64)first * groups + group) * KEY, (i64)groups * KEY, count);
        fetch<CHUNK, COLUMNS, OF_VALUES, WIDE>(vs, v + ((i64)first * heads + head) * value + column, (i64)heads * value, count, columns);
        fetch_keys<BY_COLUMN>(ws, write + ((i64)first * heads + head) * KEY, (i64)heads * KEY, count);
        copies_end();
    };
    float s[S_PARTS][S_TILES][4];
    fetch_rows(start);
    fetch_columns(start);
    EACH_OF_STATE {
        const int i = S_ROW, c = S_COLUMN;
        s[part][tile][e] = i < KEY && c < columns && from_line >= 0 ? before[(base + i) * value + column + c] : 0.0f;
        state[i * OF_VALUES + c] = s[part][tile][e];
    }
    for (int first = start; first < end; first += CHUNK) {
        const int count = min(CHUNK, end - first);
        copies_wait<1>();
        __syncthreads();
        float out[Y_TILES][4] = {};
        if (!UPDATES) multiply<Y_TILES, BY_ROW, 1, OF_VALUES, 1>(out, qs + y_row * BY_ROW, state + y_column, DEPTH);
        EACH_OF_Y out[tile][e] *= from_start[Y_ROW];
        float erased[Y_TILES][4] = {};
        multiply<Y_TILES, BY_ROW, 1, OF_VALUES, 1>(erased, es + y_row * BY_ROW, state + y_column, DEPTH);
        EACH_OF_Y {
            const int t = Y_ROW;
            xs[t * OF_VALUES + Y_COLUMN] = t == 0 ? erased[tile][e] : erased[tile][e] * from_start[t - 1];
        }
        copies_wait<0>();
        __syncthreads();
        // Tokens behind a row of y have weight 0.
        if (!UPDATES) multiply<Y_TILES, OF_SCORES, 1, OF_VALUES, 1>(out, weights + y_row * OF_SCORES, vs + y_column, y_row + 16);
        float u[Y_TILES][4] = {};
        const float* of_v = weights + 2 * CHUNK * OF_SCORES + y_row * OF_SCORES;
        multiply<Y_TILES, OF_SCORES, 1, OF_VALUES, 1>(u, of_v, vs + y_column, y_row + 16);
        multiply<Y_TILES, OF_SCORES, 1, OF_VALUES, 1>(u, of_v + CHUNK * OF_SCORES, xs + y_column, y_row + 16);
        EACH_OF_Y us[Y_ROW * OF_VALUES + Y_COLUMN] = u[tile][e];
        __syncthreads();
        if (!UPDATES)
            multiply<Y_TILES, OF_SCORES, 1, OF_VALUES, 1>(
                out, weights + (CHUNK + y_row) * OF_SCORES, us + y_column, y_row + 16
            );
        EACH_OF_Y {
            const int t = Y_ROW, c = Y_COLUMN;
            if (t < count && c < columns)
                y[((i64)(first + t) * heads + head) * value + column + c] = UPDATES ? u[tile][e] : out[tile][e];
        }
        const float remains = from_start[CHUNK - 1];
        __syncthreads();
        const bool goes_on = first + CHUNK < end;
        if (goes_on) fetch_rows(first + CHUNK);
        EACH_OF_STATE s[part][tile][e] *= remains;
#pragma unroll
        for (int part = 0; part < S_PARTS; ++part) {
            const int at = part * S_ROWS * 16 + s_row;
            multiply<S_TILES, 1, BY_COLUMN, OF_VALUES, 1, true>(s[part], ks + at, vs + s_column, CHUNK, to_end);
            multiply<S_TILES, 1, BY_COLUMN, OF_VALUES, 1, true>(s[part], ws + at, us + s_column, CHUNK, to_end);
        }
        EACH_OF_STATE state[S_ROW * OF_VALUES + S_COLUMN] = s[part][tile][e];
        __syncthreads();
        if (goes_on) fetch_columns(first + CHUNK);
    }
    EACH_OF_STATE {
        const int i = S_ROW, c = S_COLUMN;
        if (i < KEY && c < columns && to_line >= 0) after[(to_base + i) * value + column + c] = s[part][tile][e];
    }
}
