// Chunks of linear recurrences on tensor cores: what the kernels of recurrence_parallel.cu have in common. Tensor cores add without
// rounding, so products are of bf16 in three parts, 8 bits each: sums of the highest parts' products are all but exact, and f32 additions, which
// round, add them up (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores", does so with two parts of TF32, whose
// products have too many bits for that).
// With GATED q, k, v and y are bf16 and each key decays by itself. Values are one part, so that products with them are exact; keys that are added to the
// state are three, so that it is as exact as one computed in f32; what only becomes y, which is rounded to bf16, is two parts, of 16 bits.
// Defines: KEY; DECAYS, 1 or KEY; WARPS, 4 or 8, and 8 where each key decays by itself; COLUMNS, of the
// state to a block; WIDE, whether a head's values are a multiple of 4, and with GATED one of 8; GATED. Numbers: chunk_numbers.cuh.

#define THREADS (WARPS * 32)
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
// Parts of keys that are added to the state, of values, and of what only becomes y.
#define KEY_PARTS 3
#if GATED
#define VALUE_PARTS 1
#define Y_PARTS 2
typedef BF16 Operand;
#else
#define VALUE_PARTS 3
#define Y_PARTS 3
typedef F32 Operand;
#endif
typedef Operand::Raw Raw;

// Two floats as sums of PARTS pairs of bf16, the highest first.
template <int PARTS> __device__ inline void parts_of(float x, float y, u32* part, int apart = 1) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const u32 both = Mma<BF16>::pack(x, y);
        part[i * apart] = both;
        x -= __uint_as_float(both << 16);
        y -= __uint_as_float(both & 0xffff0000);
    }
}

// Adds to TILES tiles of 16 x 8 the product of a tile of 16 x 16 in LEFT parts and of 16 rows in RIGHT planes of PLANE elements, whose lane's
// address is `right`; with ACROSS, of 16 columns of rows so many elements apart. Products beyond the accuracy of the operand of more parts are
// left out.
template <int TILES, int PLANE, int LEFT, int RIGHT, int ACROSS = 0>
__device__ inline void multiply(float (*sum)[4], const u32 (*left)[4], u32 right) {
    constexpr int ORDERS = LEFT > RIGHT ? LEFT : RIGHT;
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
        u32 b[RIGHT][4];
#pragma unroll
        for (int i = 0; i < RIGHT; ++i) {
            if (ACROSS > 0) load_matrices(b[i], right + i * PLANE * 2 + tile * 16 * ACROSS);
            else load_matrices_transposed(b[i], right + i * PLANE * 2 + tile * 16);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float high[4] = {}, low[4] = {};
            // Sums for y in bf16 may be truncated.
            float* to = ORDERS == 2 ? sum[tile + half] : low;
#pragma unroll
            for (int order = ORDERS - 1; order >= 0; --order)
#pragma unroll
                for (int i = 0; i <= order; ++i) {
                    const int j = order - i;
                    if (i >= LEFT || j >= RIGHT) continue;
                    Mma<BF16>::of(
                        ORDERS > 2 && order == 0 ? high : to, left[i][0], left[i][1], left[i][2], left[i][3], b[j][2 * half],
                        b[j][2 * half + 1]
                    );
                }
            if (ORDERS > 2)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[tile + half][e] += high[e] + low[e];
        }
    }
}

// The row of a tile of 16 x 16 that this lane gives to load_matrices, and its column.
__device__ inline int matrix_row() { return threadIdx.x & 15; }
__device__ inline int matrix_column() { return (threadIdx.x & 16) >> 1; }
// The same for a right operand whose rows are columns of the product.
__device__ inline int across_row() { return (threadIdx.x & 7) + ((threadIdx.x & 16) >> 1); }
__device__ inline int across_column() { return threadIdx.x & 8; }

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

// ROWS rows of COLUMNS floats on their way from memory to PARTS planes of OF_VALUES to a row.
template <int ROWS, int PARTS, class Element> struct Values {
    static constexpr int PIECES = ROWS * (COLUMNS / 4) / THREADS;
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
            u32 part[PARTS][2];
            parts_of<PARTS>(x[i].x, x[i].y, &part[0][0], 2);
            parts_of<PARTS>(x[i].z, x[i].w, &part[0][1], 2);
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                *(uint2*)(to + (p * ROWS + row) * OF_VALUES + column) = make_uint2(part[p][0], part[p][1]);
        }
    }
};
// Values of bf16 are their only part.
template <int ROWS> struct Values<ROWS, 1, BF16> {
    static constexpr int PIECES = ROWS * (COLUMNS / 8) / THREADS;
    uint4 x[PIECES];
    __device__ void fetch(const u16* from, int stride, int count, int real) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = i * THREADS + threadIdx.x, row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
            x[i] = row < count && column < real ? *(const uint4*)(from + row * stride + column) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void put(u16* to) const {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = i * THREADS + threadIdx.x, row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
            *(uint4*)(to + row * OF_VALUES + column) = x[i];
        }
    }
};

// One key of the tokens of a block, as planes of OF_TOKENS tokens to a key.
template <int PARTS> __device__ inline void put_keys(u16* to, const float* x, int block, int key) {
    u32 part[PARTS][BLOCK / 2];
#pragma unroll
    for (int t = 0; t < BLOCK; t += 2) parts_of<PARTS>(x[t], x[t + 1], &part[0][t / 2], BLOCK / 2);
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
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

// Multiplies one key of the tokens of a block by what remains of them at the block's end, and gives what remains over the whole block.
__device__ inline float keep_to_end(float* x, const float* decays) {
    float product = 1.0f;
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i) {
        x[i] *= product;
        product *= decays[i];
    }
    return product;
}

// The same by what remains of them from the block's beginning, over themselves too.
__device__ inline float keep_from_start(float* x, const float* decays) {
    float product = 1.0f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        product *= decays[i];
        x[i] *= product;
    }
    return product;
}

// One key of the tokens of a block, `stride` apart; zeros where there is none.
template <class Element = Operand>
__device__ inline void fetch_key(float* x, const typename Element::Raw* from, int stride, int count, bool is) {
#pragma unroll
    for (int t = 0; t < BLOCK; ++t) x[t] = is && t < count ? Element::load(from[t * stride]) : 0.0f;
}
// With GATED: multiplies it by the weights of the tokens, which might as well multiply their values.
__device__ inline void weigh_key(float* x, const float* weight, const Chunk& c, i64 token, i64 heads, int count) {
#if GATED
    const float* from = weight + token * heads + c.head;
#pragma unroll
    for (int t = 0; t < BLOCK; ++t) x[t] *= t < count ? from[t * heads] : 0.0f;
#endif
}
// What remains of one key over each token of a block; with WAY -1, over the tokens behind those from `token` on backwards, and nothing is lost
// over what is behind the last of the chunk.
template <int WAY = 1>
__device__ inline void fetch_decays(float* x, const float* decay, const Chunk& c, i64 token, i64 heads, int key, int count) {
    const float* from = decay + (token * heads + c.head) * DECAYS + (BY_KEY ? key : 0);
    const bool last = WAY < 0 && token == c.first + c.count - 1;
    if (WAY < 0) from += heads * DECAYS;
#pragma unroll
    for (int t = 0; t < BLOCK; ++t) {
        const bool is = key < KEY && t < count && !(t == 0 && last);
        x[t] = op_exp(is ? from[t * WAY * (int)heads * DECAYS] : 0.0f);
    }
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
        for (int i = 0; i < 2; ++i) parts_of<Y_PARTS>(at[i * 8] * factor.x, at[OF_BLOCK + i * 8] * factor.y, &left[0][half * 2 + i], 4);
    }
}


#if BY_KEY
// Weights of a chunk's tokens in y: between blocks, a pair of which a warp has, and within blocks, a token of which SHARES threads have.
struct Weights {
    float between[2][4] = {}, within[BLOCK] = {};
    // A token's own weight, which may be all of a sum that cancels; more than y in bf16 shows.
    Compensated own;
    int later, earlier, token, share, block;
    __device__ Weights() {
        const int warp = threadIdx.x / 32;
        // Blocks (1, 0), (2, 0), (2, 1), (3, 0)...
        later = warp < 1 ? 1 : warp < 3 ? 2 : 3;
        earlier = warp - later * (later - 1) / 2;
        token = threadIdx.x % BLOCK;
        share = threadIdx.x / BLOCK % SHARES;
        block = threadIdx.x / BLOCK / SHARES;
    }
    // Adds those of a slice: `scaled` times `right` between blocks, and `left` times `keys` within.
    __device__ void add(
        const float* scaled, const u16* right, const float* totals, const float* left, const float* keys, const float* decays
    ) {
        if (threadIdx.x / 32 < PAIRS) {
            const u32 from = shared_address(right + matrix_row() * OF_TOKENS + earlier * BLOCK + matrix_column());
#pragma unroll 2
            for (int at = 0; at < SLICE; at += 16) {
                u32 a[Y_PARTS][4];
                take_left(a, scaled + (later * SLICE + at) * OF_BLOCK, totals + at, earlier + 1, later);
                multiply<2, SLICE * OF_TOKENS, Y_PARTS, Y_PARTS>(between, a, from + at * OF_TOKENS * 2);
            }
        }
#pragma unroll 2
        for (int i = share; i < SLICE; i += SHARES) {
            const int at = (block * SLICE + i) * OF_BLOCK;
            const float of_key = keys[at + token];
            if (!GATED) own.add_product(left[at + token], of_key);
            float product = 0.0f;
#pragma unroll
            for (int s = 0; s < BLOCK; s += 4) {
                const float4 four_left = *(const float4*)(left + at + s), four_by = *(const float4*)(decays + at + s);
                const float of_left[4] = {four_left.x, four_left.y, four_left.z, four_left.w};
                const float by[4] = {four_by.x, four_by.y, four_by.z, four_by.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    product = s + e == token ? of_key : product * by[e];
                    within[s + e] = fmaf(of_left[e], product, within[s + e]);
                }
            }
        }
    }
    // Stores them; all threads of the block call it.
    __device__ void put(float* weights) {
        const int row = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
        if (threadIdx.x / 32 < PAIRS)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int s = later * BLOCK + row + (e >> 1) * 8, j = earlier * BLOCK + tile * 8 + pair + (e & 1);
                    weights[s * OF_WEIGHTS + j] = between[tile][e];
                }
        // Two shares are in one warp, and two warps have a block's.
        const int j = block * BLOCK + token;
#pragma unroll
        for (int s = 0; s < BLOCK; ++s) within[s] += __shfl_xor_sync(0xffffffff, within[s], BLOCK);
        if (!GATED) own.add_other(BLOCK);
#pragma unroll
        for (int turn = 0; turn < SHARES; turn += 2) {
            if (turn > 0) __syncthreads();
            if (share == turn)
#pragma unroll
                for (int s = 0; s < BLOCK; ++s) {
                    float* weight = weights + (block * BLOCK + s) * OF_WEIGHTS + j;
                    const float sum = !GATED && s == token ? own.value() : within[s];
                    *weight = turn > 0 ? *weight + sum : sum;
                }
        }
    }
};
#endif

// Adds to a block of y the values of tokens up to it by their weights.
__device__ inline void weigh(float (*out)[4], const float* weights, u32 values, int block) {
    const int row = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
#pragma unroll 1
    for (int at = 0; at < (block + 1) * BLOCK; at += 16) {
        u32 left[Y_PARTS][4];
        const float* from = weights + (block * BLOCK + row) * OF_WEIGHTS + at + pair;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = *(const float2*)(from + (i & 1) * 8 * OF_WEIGHTS + (i >> 1) * 8);
            parts_of<Y_PARTS>(two.x, two.y, &left[0][i], 4);
        }
        multiply<Y_TILES, CHUNK * OF_VALUES, Y_PARTS, VALUE_PARTS>(out, left, values + at * OF_VALUES * 2);
    }
}

// Stores two neighbouring values of a row of `real`.
__device__ inline void put_two(u16* row, int column, int real, float x, float y) {
    if (column < real) *(u32*)(row + column) = Mma<BF16>::pack(x, y);
}
__device__ inline void put_two(float* row, int column, int real, float x, float y) {
    if (WIDE) {
        if (column < real) *(float2*)(row + column) = make_float2(x, y);
    } else {
        if (column < real) row[column] = x;
        if (column + 1 < real) row[column + 1] = y;
    }
}

// Stores a block of y, `stride` between tokens.
__device__ inline void put_rows(Raw* to, i64 stride, const float (*out)[4], int block, int from, int count, int real) {
    const int row = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int tile = 0; tile < Y_TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int s = block * BLOCK + row + e * 4;
            if (s < count) put_two(to + s * stride, from + tile * 8 + pair, real, out[tile][e], out[tile][e + 1]);
        }
}
