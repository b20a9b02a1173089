// Gated recurrences in bf16 whose keys decay alike, in chunks of CHUNK tokens on tensor cores (Dao and Gu 2024, "Transformers are SSMs", section 6;
// Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", section 3.3). With S the state before a chunk, w weights of tokens, G_t the sum of the
// logarithms of decays up to token t, and E_t = exp(G_t):
//
//   u_t = w_t v_t, and with DELTA u_t = w_t (v_t - E_t S^T k_t - sum over j < t of exp(G_t - G_j) (k_t . k_j) u_j)
//   y_t = E_t S^T q_t + sum over j <= t of exp(G_t - G_j) (q_t . k_j) u_j
//   S' = E_last S + sum over j of exp(G_last - G_j) k_j u_j^T
//
// The system of u does not depend on the state: u = A (V - diag(E) K S), with A the inverse of a unit triangle times diag(w). Three launches:
// `gated_systems` computes sums of decays, and A, of all chunks at once; `gated_states` takes the chunks of a row in turn, TILE columns of a
// head's state to a block, and stores S, and u with DELTA; `gated_outputs` computes y of all chunks at once.
// q, k and v are one part of bf16 each, so products of two are exact. The state and what becomes of it are f32 in three parts of bf16, so the
// state is as exact as one that is computed in f32; y is rounded to bf16, so it takes S, u and weights in two parts, of 16 bits.
// The state is kept transposed: a warp's results of one product, of 16 columns by 8 keys or tokens to a tile, are operands of the next as they
// are. What goes from one launch to another lies in the order of fragments: 16 bytes for each lane.
// Floors for 16,384 tokens in one row, 16 heads of 128 keys and values, on an H200: states 0.4 GB, by the chain of 256 chunks 0.2 ms; outputs
// 0.6 GB, 0.15 ms.
// Defines: KEY, a multiple of 8, at most 256; DELTA. Numbers: chunk_numbers.cuh. LINES, as in lines.cuh. A head's values are a multiple of 8.

#define WARPS 4
#define THREADS (WARPS * 32)
// Keys in whole tiles, and pieces of 16 bytes of a token's keys.
#define DEPTH ((KEY + 63) / 64 * 64)
#define STEPS (DEPTH / 16)
#define PIECES (DEPTH / 8)
// Columns of the state to a block that goes from chunk to chunk, and to one that computes outputs.
#define TILE 16
#define COLUMNS 64
// Tokens in tiles of 16, and tiles of the lower triangle.
#define BLOCKS (CHUNK / 16)
#define TRIANGLE (BLOCKS * (BLOCKS + 1) / 2)
#define OF_SYSTEM (CHUNK + 4)

// Of a chunk and head: G in two parts; E; exp(G_last - G), times w without DELTA; w.
struct Factors {
    float2 sums[CHUNK];
    float from_start[CHUNK], to_end[CHUNK], weights[CHUNK];
};

// Two floats as sums of PARTS pairs of bf16, the highest first.
template <int PARTS> __device__ inline void parts_of(float x, float y, u32* part, int apart) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const u32 both = Mma<BF16>::pack(x, y);
        part[i * apart] = both;
        x -= __uint_as_float(both << 16);
        y -= __uint_as_float(both & 0xffff0000);
    }
}
// A tile of 16 x 16, in two results of 16 x 8, as a left operand in PARTS parts.
template <int PARTS> __device__ inline void parts_of_tile(const float (*tile)[4], u32 (*part)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) parts_of<PARTS>(tile[i >> 1][(i & 1) * 2], tile[i >> 1][(i & 1) * 2 + 1], &part[0][i], 4);
}
__device__ inline uint4 four_words(const u32* x) { return make_uint4(x[0], x[1], x[2], x[3]); }

__device__ inline void product(float* sum, const u32* a, u32 b0, u32 b1) {
    Mma<BF16>::of(sum, a[0], a[1], a[2], a[3], b0, b1);
}
// Adds to `sum` the product of `a` in three parts and of b in one. Tensor cores truncate what they add, so the highest part, whose
// products are exact, is added in f32.
__device__ inline void product_of_thirds(float* sum, const u32 (*a)[4], u32 b0, u32 b1) {
    float high[4] = {}, low[4] = {};
    product(low, a[2], b0, b1);
    product(low, a[1], b0, b1);
    product(high, a[0], b0, b1);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += high[e] + low[e];
}

// Tiles of CHUNK tokens by DEPTH keys: pieces of 16 bytes of eight neighbouring tokens lie in different banks.
__device__ inline u32 keys_at(u32 tile, int token, int key) {
    return tile + (token * PIECES + ((key >> 3) ^ (token & 7))) * 16;
}
template <int COUNT = THREADS> __device__ inline void fetch_keys(u32 tile, const u16* from, i64 stride, int count) {
#pragma unroll 4
    for (int i = threadIdx.x; i < CHUNK * PIECES; i += COUNT) {
        const int token = i / PIECES, key = i % PIECES * 8;
        const bool is = token < count && key < KEY;
        copy_async(keys_at(tile, token, key), from + (is ? token * stride + key : 0), is);
    }
}
// CHUNK tokens by WIDTH values, of which `real` are there.
template <int WIDTH> __device__ inline u32 values_at(u32 tile, int token, int column) {
    const int apart = WIDTH == 16 ? (token >> 2) & 1 : token & 7;
    return tile + (token * (WIDTH / 8) + ((column >> 3) ^ apart)) * 16;
}
template <int WIDTH, int COUNT = THREADS> __device__ inline void fetch_values(u32 tile, const u16* from, i64 stride, int count, int real) {
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK * WIDTH / 8; i += COUNT) {
        const int token = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
        const bool is = token < count && column < real;
        copy_async(values_at<WIDTH>(tile, token, column), from + (is ? token * stride + column : 0), is);
    }
}
template <int COUNT = THREADS> __device__ inline void fetch_whole(u32 to, const void* from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += COUNT * 16) copy_async(to + i, (const char*)from + i, true);
}

// The addresses that this lane gives to load_matrices for 16 x 16 elements: of a left operand, or of a right one whose rows are its columns; of
// a right operand in its own order, transposed; of a left one by columns, transposed.
__device__ inline int left_row() { return threadIdx.x & 15; }
__device__ inline int left_column() { return (threadIdx.x & 16) >> 1; }
__device__ inline int right_row() { return (threadIdx.x & 7) + ((threadIdx.x & 16) >> 1); }
__device__ inline int right_column() { return threadIdx.x & 8; }

extern "C" __global__ __launch_bounds__(THREADS) void gated_systems(
    const u16* __restrict__ k, const float* __restrict__ weight, const float* __restrict__ decay, const int* __restrict__ starts,
    Factors* __restrict__ factors, uint4* __restrict__ systems, Numbers<9> n
) {
    __shared__ double sums[CHUNK];
    __shared__ float weights[CHUNK];
    others_may_begin();
    after_others();
    Chunk c;
    if (!find_chunk(c, starts, n.v, (int)n.v[4])) return;
    const i64 heads = n.v[3], nth = c.number * heads + c.head;
    const int t = threadIdx.x, warp = t >> 5;
#if DELTA
    const i64 groups = n.v[2];
    const int lane = t & 31, row = lane >> 2, pair = (lane & 3) * 2;
    extern __shared__ __align__(128) u8 room[];
    float* of = (float*)room;
    float* inverse = of + CHUNK * OF_SYSTEM;
    // The inverse takes the place of the keys.
    const u32 keys = shared_address(inverse);
    fetch_keys(keys, k + (c.first * groups + c.head * groups / heads) * KEY, groups * KEY, c.count);
    copies_end();
#endif
    if (warp == 0) add_up(sums, decay + c.first * heads + c.head, heads, c.count);
    if (t >= CHUNK) weights[t - CHUNK] = t - CHUNK < c.count ? weight[(c.first + t - CHUNK) * heads + c.head] : 0.0f;
    copies_wait<0>();
    __syncthreads();
    if (t < CHUNK) {
        const float high = (float)sums[t];
        factors[nth].sums[t] = make_float2(high, (float)(sums[t] - high));
        factors[nth].from_start[t] = kept(sums[t]);
        factors[nth].weights[t] = weights[t];
        factors[nth].to_end[t] = kept(sums[CHUNK - 1] - sums[t]) * (DELTA ? 1.0f : weights[t]);
    }
#if DELTA
    // Rows of the triangle, 16 to a warp; stored by columns.
    float sum[2 * BLOCKS][4] = {};
#pragma unroll 2
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        load_matrices(a, keys_at(keys, warp * 16 + left_row(), step * 16 + left_column()));
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (block > warp) break;
            u32 b[4];
            load_matrices(b, keys_at(keys, block * 16 + right_row(), step * 16 + right_column()));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float part[4] = {};
                product(part, a, b[2 * half], b[2 * half + 1]);
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[2 * block + half][e] += part[e];
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < 2 * BLOCKS; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int s = warp * 16 + row + (e >> 1) * 8, j = tile * 8 + pair + (e & 1);
            of[j * OF_SYSTEM + s] = j < s ? weights[s] * sum[tile][e] * kept(sums[s] - sums[j]) : 0.0f;
        }
    __syncthreads();
    // The inverse X of the triangle L, by blocks of 16: of those on the diagonal a column to a thread; then those ever further below it,
    // X_ij = -X_ii times the sum over k of L_ik X_kj, which is kept above the diagonal.
    if (t < CHUNK) {
        const int first = t & ~15;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = i == (t & 15) ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < 15; ++i) {
            const float* column = of + (first + i) * OF_SYSTEM + first;
#pragma unroll
            for (int r = 0; r < 16; r += 4) {
                // What lies on and above the diagonal is 0.
                if (r + 3 <= i) continue;
                const float4 four = *(const float4*)(column + r);
                x[r] = fmaf(-four.x, x[i], x[r]);
                x[r + 1] = fmaf(-four.y, x[i], x[r + 1]);
                x[r + 2] = fmaf(-four.z, x[i], x[r + 2]);
                x[r + 3] = fmaf(-four.w, x[i], x[r + 3]);
            }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) inverse[(first + i) * OF_SYSTEM + t] = x[i];
    }
    __syncthreads();
    const int column = t & 15, row_of_four = (t >> 4 & 3) * 4;
#pragma unroll 1
    for (int apart = 1; apart < BLOCKS; ++apart) {
        for (int j = t >> 6; j + apart < BLOCKS; j += 2) {
            const int i = j + apart;
            float x[4] = {};
#pragma unroll 8
            for (int at = j * 16; at < i * 16; ++at) {
                const float by = inverse[at * OF_SYSTEM + j * 16 + column];
                const float4 four = *(const float4*)(of + at * OF_SYSTEM + i * 16 + row_of_four);
                x[0] = fmaf(four.x, by, x[0]);
                x[1] = fmaf(four.y, by, x[1]);
                x[2] = fmaf(four.z, by, x[2]);
                x[3] = fmaf(four.w, by, x[3]);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) inverse[(j * 16 + row_of_four + r) * OF_SYSTEM + i * 16 + column] = x[r];
        }
        __syncthreads();
        for (int j = t >> 6; j + apart < BLOCKS; j += 2) {
            const int i = j + apart;
            float x[4] = {};
#pragma unroll
            for (int at = 0; at < 16; at += 4) {
                const float* by = inverse + (j * 16 + at) * OF_SYSTEM + i * 16 + column;
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float4 four = *(const float4*)(inverse + (i * 16 + row_of_four + r) * OF_SYSTEM + i * 16 + at);
                    x[r] = fmaf(-four.x, by[0], x[r]);
                    x[r] = fmaf(-four.y, by[OF_SYSTEM], x[r]);
                    x[r] = fmaf(-four.z, by[2 * OF_SYSTEM], x[r]);
                    x[r] = fmaf(-four.w, by[3 * OF_SYSTEM], x[r]);
                }
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) inverse[(i * 16 + row_of_four + r) * OF_SYSTEM + j * 16 + column] = x[r];
        }
        __syncthreads();
    }
    for (int block = warp; block < TRIANGLE; block += WARPS) {
        const int later = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3, earlier = block - later * (later + 1) / 2;
        u32 part[3][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int s = later * 16 + row + (i >> 1) * 8, j = earlier * 16 + pair + (i & 1) * 8;
            const float2 two = *(const float2*)(inverse + s * OF_SYSTEM + j);
            parts_of<3>(two.x * weights[j], two.y * weights[j + 1], &part[0][i], 4);
        }
#pragma unroll
        for (int p = 0; p < 3; ++p) systems[((nth * TRIANGLE + block) * 3 + p) * 32 + lane] = four_words(part[p]);
    }
#endif
}
