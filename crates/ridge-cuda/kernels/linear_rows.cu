// Linears of one input for few rows, by weights that are streamed once: y = x w^T, in 16-bit floats on tensor cores, or in 8-bit codes
// with scales of both. SCALED is BY_ROWS for a scale for each row, and BY_BLOCKS for one for each 128 elements of a row of x and
// for each block of 128 x 128 of a weight. Codes of E4M3 are multiplied as f16, which holds them exactly, and those of a block are summed
// before they are scaled; integers are summed exactly within a warp's part of the depth.
// Floor: the weights' bytes over bandwidth. A tile is 16 columns, or SPANS times as many; blocks, one to a multiprocessor, take
// tiles in turn. The warps of a block take turns along the depth, 64 bytes of each column at a time, and a ring in shared memory
// keeps STAGES turns in flight, across the ends of tiles too. It is filled before the launch ahead has ended, since weights do not
// depend on it. The product does not care in which order depth is summed, so a lane's 16 bytes of a row are the fragments of two
// products as they come from memory. With STAGED, x is prepared once by each block and lies in shared memory; otherwise it is read
// where it is, AHEAD turns ahead, for SPANS times 16 columns.
// The order of sums is fixed by depth alone: a row's result does not depend on the others.
// Rows beyond ROWS are those of further blocks.
// With CACHED, weights 1 and 2 give keys and values, in heads of DIM elements, which are written to a paged cache as `rope.cu` writes them:
// keys rotated. A tile of keys has 8 columns and those 8 that are rotated with them, so each sum's other one is 8 lanes away. There are no
// rows beyond ROWS then.
// Defines: D of x, weights and results; X of x as it is given, D or before a norm f32; SCALED, 0 without codes; CODE of codes, F8E4M3 or I8; ROWS, a power of 2, at most 16; SPANS;
// STAGED, 0 or 1; VECTORS, 16 bytes of a row that each of 256 threads has at most; WARPS, a multiple of 8; STAGES; COUNT weights;
// ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU (of two weights), 0 or 1; NORM, the threads among which a norm of a row of x is made on
// the way, 0 for none, with its NORM_TYPE; QUANTISE, whether rows, of dtype D, become codes on the way, 0 where x is codes;
// CACHED, 0 or 1, with CACHE, the dtype of the cache, PAGE, the tokens of one of its blocks, DIM, a multiple of 16, and the defines of
// `angles.cuh`, PAIRS a multiple of 8. Where weights have scales of blocks, a head of keys that are rotated is within one.
// Numbers: rows, depth (a multiple of 8, for codes of 16), then the columns of each weight, then with CACHED the slots of the cache.

#define BY_ROWS 1
#define BY_BLOCKS 2
#if SCALED
typedef u8 Element;
#else
typedef D::Raw Element;
#endif
#if SCALED && !QUANTISE
typedef u8 Given;
#else
typedef X::Raw Given;
#endif
// Vectors of x as it is given for one of elements.
#define GIVEN (QUANTISE ? 1 : (int)(sizeof(Given) / sizeof(Element)))
// Elements of a lane's 16 bytes, and of a warp's piece of a row.
#define PIECE (16 / (int)sizeof(Element))
// Elements that a thread prepares at a time, which are GIVEN vectors.
#define UNIT (QUANTISE ? 8 : PIECE)
#define DEPTH (4 * PIECE)
#define TILES ((ROWS + 7) / 8)
#define SIDES (SWIGLU ? 2 : 1)
// Products of 16 columns that a tile is.
#define SLICES (SIDES * SPANS)
#define AHEAD 3
// Vectors of a stage.
#define STAGE (SLICES * 2 * WARPS * 32)
// Rows are prepared by so many groups of 256 threads.
#define TEAMS (WARPS / 8)
#define EACH ((ROWS + TEAMS - 1) / TEAMS)
// Sums of warps for two tiles, so that a warp may be a tile ahead of another; where they take much room, for one.
#define BUFFERS (ROWS == 1 ? 2 : 1)
// Rows that threads sum up at a time, and how often they do.
#define AT_ONCE (WARPS * 2 / SPANS)
#define ROUNDS ((ROWS + AT_ONCE - 1) / AT_ONCE)
// The weights whose products are keys and values.
#define KEYS 1
#define VALUES 2

struct Pointers { const Element* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };
struct Scales { const float *x, *of[COUNT]; };

// Products of a warp's piece by its fragments: `u` and `l` of 16 columns, `b` of 8 rows.
template <class C> struct Pieces {
    typedef float Sum;
    __device__ static void multiply(float* sums, uint4 u, uint4 l, uint4 b) {
        Mma<D>::of(sums, u.x, l.x, u.y, l.y, b.x, b.y);
        Mma<D>::of(sums, u.z, l.z, u.w, l.w, b.z, b.w);
    }
};
template <> struct Pieces<I8> {
    typedef int Sum;
    __device__ static void multiply(int* sums, uint4 u, uint4 l, uint4 b) {
        MmaIntegers::of(sums, u.x, l.x, u.y, l.y, b.x, b.y);
        MmaIntegers::of(sums, u.z, l.z, u.w, l.w, b.z, b.w);
    }
};
template <> struct Pieces<F8E4M3> {
    typedef float Sum;
    // 16 codes as pairs of f16.
    __device__ static void halves(uint4 codes, u32* h) {
        const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#if __CUDA_ARCH__ >= 890
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
                : "=r"(h[2 * i]), "=r"(h[2 * i + 1]) : "r"(words[i]));
#else
            // Sign, exponent and mantissa to their places in f16, whose exponents are 8 higher.
            const u32 low = __byte_perm(words[i], 0, 0x1404), high = __byte_perm(words[i], 0, 0x3424);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 two = j ? high : low, factor = 0x5c005c00u;
                const u32 bits = (two & 0x80008000u) | (two & 0x7f007f00u) >> 1;
                asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(h[2 * i + j]) : "r"(bits), "r"(factor));
            }
#endif
        }
    }
    __device__ static void multiply(float* sums, uint4 u, uint4 l, uint4 b) {
        u32 upper[8], lower[8], of_x[8];
        halves(u, upper);
        halves(l, lower);
        halves(b, of_x);
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            Mma<F16>::of(sums, upper[i], lower[i], upper[i + 1], lower[i + 1], of_x[i], of_x[i + 1]);
    }
};
#if SCALED
typedef Pieces<CODE> Piece;
#else
typedef Pieces<D> Piece;
#endif

// Which weight a tile is of, and which of its tiles.
struct Tile { int of, columns; i64 first; };

// 16 columns: eight in a row, and the eight that begin `apart` behind these.
struct Slice {
    i64 first;
    int apart;
    __device__ i64 column(int c) const { return first + (c & 7) + (c & 8 ? apart : 0); }
};

// Slice `span` of a tile.
__device__ inline Slice slice_of(Tile t, int span) {
    const i64 first = t.first + span * 16;
#if CACHED && PAIRS
    // The next eight pairs of the head.
    const int of_head = (int)first % DIM;
    if (t.of == KEYS && of_head < 2 * PAIRS) return {first - of_head / 2, PAIRS};
#endif
    return {first, 8};
}

// What belongs to weight `i` of `all`.
template <class T> __device__ inline T of_weight(const T (&all)[COUNT], int i) {
    T one = all[0];
#pragma unroll
    for (int j = 1; j < COUNT && !SWIGLU; ++j)
        if (i == j) one = all[j];
    return one;
}

// Volatile, so that it stays behind the wait for the launch ahead: what a `const __restrict__` pointer leads to is constant to the compiler.
__device__ inline uint4 load_now(const uint4* at) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    return x;
}

extern "C" __global__
__launch_bounds__(WARPS * 32)
void linear_rows(
    const Given* __restrict__ x, const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain, float eps, Pointers p,
    Numbers<2 + COUNT + CACHED> n
#if SCALED
    , Scales scales
#endif
#if CACHED
    , const int* __restrict__ positions, const int* __restrict__ slots
#endif
) {
    extern __shared__ uint4 ring[];
    __shared__ float parts[BUFFERS][WARPS][SLICES][16][ROWS == 1 ? 1 : ROWS + 1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
    const int depth = (int)n.v[1];
    int tiles = 0;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : COUNT); ++i) tiles += (int)((n.v[2 + i] + 16 * SPANS - 1) / (16 * SPANS));
    auto tile_of = [&](int tile) {
        Tile t = {0, (int)n.v[2], tile};
#pragma unroll
        for (int i = 1; i < COUNT && !SWIGLU; ++i) {
            const int before = (int)((n.v[1 + i] + 16 * SPANS - 1) / (16 * SPANS));
            if (t.of == i - 1 && t.first >= before) t = {i, (int)n.v[2 + i], t.first - before};
        }
        t.first *= 16 * SPANS;
        return t;
    };
    // A lane copies and reads its own 16 bytes of each row alone, so the ring needs no barrier.
    const u32 mine = shared_address(ring + threadIdx.x);
    const int begin = (warp * 4 + quarter) * PIECE;
    // What is fetched next: of which tile, at which depth, into which stage.
    struct { int tile, k, stage; const Element *upper[SLICES], *lower[SLICES]; } next = {(int)blockIdx.x, begin, 0};
    auto aim = [&]() {
        if (next.tile >= tiles) return;
        const Tile t = tile_of(next.tile);
        const Element* w[SIDES] = {of_weight(p.weight, t.of)};
        if (SWIGLU) w[SIDES - 1] = p.weight[COUNT - 1];
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            const Slice slice = slice_of(t, s % SPANS);
            const i64 from = slice.first + row, last = t.columns - 1;
            next.upper[s] = w[s / SPANS] + min(from, last) * depth;
            next.lower[s] = w[s / SPANS] + min(from + slice.apart, last) * depth;
        }
    };
    auto fetch = [&]() {
        if (next.tile < tiles) {
            if (next.k - quarter * PIECE < depth) {
                const bool real = next.k < depth;
                const int at = real ? next.k : 0;
#pragma unroll
                for (int s = 0; s < SLICES; ++s) {
                    const u32 to = mine + (next.stage * SLICES + s) * 2 * WARPS * 32 * 16;
                    stream_async(to, next.upper[s] + at, real);
                    stream_async(to + WARPS * 32 * 16, next.lower[s] + at, real);
                }
            }
            next.k += WARPS * DEPTH;
            // All warps take as many turns.
            if (next.k - begin >= depth) {
                next.k = begin;
                next.tile += gridDim.x;
                aim();
            }
        }
        next.stage = next.stage == STAGES - 1 ? 0 : next.stage + 1;
        copies_end();
    };
    aim();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch();
    // Behind the ring: scales of the weights' blocks, of this tile and of the next, then those of x, then x.
    [[maybe_unused]] const int across = SCALED == BY_BLOCKS ? (depth + BLOCK - 1) / BLOCK : 1;
    [[maybe_unused]] float* of_blocks = (float*)(ring + STAGES * STAGE);
    [[maybe_unused]] float* of_x = of_blocks + (SCALED == BY_BLOCKS ? 2 * SIDES * across : 0);
    [[maybe_unused]] u8* staged = (u8*)(ring + STAGES * STAGE) + (SCALED ? ((2 * SIDES + ROWS) * across * 4 + 15) / 16 * 16 : 0);
    // Rows begin in different banks.
    [[maybe_unused]] const int line = (depth * (int)sizeof(Element) + 127) / 128 * 128 + 64;
#if SCALED == BY_BLOCKS
    // One block of the weight has all columns of a tile.
    auto scales_of_tile = [&](int tile, int buffer) {
        if (tile >= tiles) return;
        const Tile t = tile_of(tile);
        const float* one = of_weight(scales.of, t.of);
        for (int i = threadIdx.x; i < SIDES * across; i += WARPS * 32) {
            const float* from = i < across ? one : scales.of[COUNT - 1] - across;
            of_blocks[buffer * SIDES * across + i] = from[t.first / BLOCK * across + i];
        }
    };
    scales_of_tile(blockIdx.x, 0);
#endif
#if NORM
    // Into L2, which is no read: the gains are wanted as soon as x is there.
    const int of_line = 128 / (int)sizeof(*gain);
    for (int k = threadIdx.x * of_line; k < depth; k += WARPS * 32 * of_line) asm volatile("prefetch.global.L2 [%0];" :: "l"(gain + k));
#endif
    others_may_begin();
    after_others();
    const int end = (int)n.v[0], first = blockIdx.y * ROWS, rows = min(end - first, ROWS);
    // Where row `y` of this block is in x: of rows that are not there, anywhere.
    [[maybe_unused]] auto place_of = [&](int y) { return (i64)first + min(y, rows - 1); };
#if STAGED
#if QUANTISE && ROWS == 1
    // By all threads.
    const Given* from = x + (i64)first * depth;
#if NORM
    __shared__ float squares[32];
    const float unit = unit_of_row<D, NORM>(from, depth, eps, squares);
#endif
    auto values = [&](int k) {
        const uint4 part = *(const uint4*)(from + k);
#if NORM
        return normed<D, NORM_TYPE>(part, gain + k, unit);
#else
        return part;
#endif
    };
#if SCALED == BY_BLOCKS
    // Sixteen lanes have a group of 128, whole warps together.
    for (int base = 0; base < depth; base += WARPS * 32 * 8) {
        const int k = base + threadIdx.x * 8;
        const uint4 part = k < depth ? values(k) : make_uint4(0, 0, 0, 0);
        const Coder<CODE> coder(largest_of<16>(largest_of_vector<D>(part)));
        if (k >= depth) continue;
        *(uint2*)(staged + k) = codes_of<CODE, D>(coder, part);
        if (lane % 16 == 0) of_x[k / BLOCK] = coder.scale;
    }
#else
    __shared__ float largest[32];
    float most = 0.0f;
    for (int k = threadIdx.x * 8; k < depth; k += WARPS * 32 * 8) most = larger(largest_of_vector<D>(values(k)), most);
    const Coder<CODE> coder(block_reduce<Max>(most, largest));
    for (int k = threadIdx.x * 8; k < depth; k += WARPS * 32 * 8) *(uint2*)(staged + k) = codes_of<CODE, D>(coder, values(k));
    if (threadIdx.x == 0) of_x[0] = coder.scale;
#endif
#else
    // Rows team by team, all of them asked for at once.
    const int team = threadIdx.x / 256, vector = threadIdx.x % 256, vectors = depth / UNIT;
    uint4 held[EACH][VECTORS][GIVEN];
#pragma unroll
    for (int j = 0; j < EACH; ++j)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int y = team + j * TEAMS;
            const bool real = y < rows && vector + i * 256 < vectors;
            const uint4* from = (const uint4*)(x + (i64)(first + y) * depth + (vector + i * 256) * UNIT);
#pragma unroll
            for (int e = 0; e < GIVEN; ++e) held[j][i][e] = real ? load_now(from + e) : make_uint4(0, 0, 0, 0);
        }
#if NORM
    // The very sums that `norm.cu` makes of rows of D.
    __shared__ float squares[EACH * TEAMS][8];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const X::Raw* part = (const X::Raw*)held[j][i];
#pragma unroll
            for (int e = 0; e < UNIT; ++e) square += X::load(part[e]) * X::load(part[e]);
        }
        for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
        if (lane == 0) squares[team + j * TEAMS][warp % 8] = square;
    }
    __syncthreads();
#endif
#if QUANTISE && SCALED == BY_ROWS
    __shared__ float largest[EACH * TEAMS][8];
#endif
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        [[maybe_unused]] const int y = team + j * TEAMS;
#if NORM
        float square = squares[y][0];
        for (int i = 1; i < NORM / 32; ++i) square += squares[y][i];
        const float unit = op_rsqrt(square / (float)depth + eps);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (y < rows && vector + i * 256 < vectors)
                held[j][i][0] = normed<D, NORM_TYPE, X>(held[j][i], gain + (vector + i * 256) * UNIT, unit);
#endif
#if QUANTISE && SCALED == BY_ROWS
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) most = larger(largest_of_vector<D>(held[j][i][0]), most);
        most = largest_of<32>(most);
        if (lane == 0) largest[y][warp % 8] = most;
#endif
    }
#if QUANTISE && SCALED == BY_ROWS
    __syncthreads();
#endif
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int y = team + j * TEAMS;
#if QUANTISE && SCALED == BY_ROWS
        float most = largest[y][0];
#pragma unroll
        for (int i = 1; i < 8; ++i) most = larger(largest[y][i], most);
        const Coder<CODE> coder(most);
        if (vector == 0) of_x[y] = coder.scale;
#endif
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int at = vector + i * 256;
#if QUANTISE && SCALED == BY_BLOCKS
            // Sixteen lanes have a group of 128.
            const Coder<CODE> coder(largest_of<16>(largest_of_vector<D>(held[j][i][0])));
            if (y < rows && at < vectors && at % 16 == 0) of_x[y * across + at / 16] = coder.scale;
#endif
            if (y >= rows || at >= vectors) continue;
#if QUANTISE
            *(uint2*)(staged + y * line + at * 8) = codes_of<CODE, D>(coder, held[j][i][0]);
#else
            *(uint4*)(staged + y * line + at * 16) = held[j][i][0];
#endif
        }
    }
#if !QUANTISE
#if SCALED
    for (int i = threadIdx.x; i < rows * across; i += WARPS * 32) of_x[i] = scales.x[(i64)first * across + i];
#endif
#endif
#endif
    const u8* of_row[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) of_row[t] = staged + min(row + 8 * t, rows - 1) * line;
    auto x_at = [&](int t, int k) { return k < depth ? *(const uint4*)(of_row[t] + k * (int)sizeof(Element)) : make_uint4(0, 0, 0, 0); };
#else
    const Element* of_row[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) of_row[t] = x + place_of(row + 8 * t) * depth;
    auto x_at = [&](int t, int k) { return k < depth ? __ldg((const uint4*)(of_row[t] + k)) : make_uint4(0, 0, 0, 0); };
    // Of the next turns, of this tile or of another: x is the same.
    int further = begin;
    uint4 ahead[AHEAD][TILES];
    auto look = [&](uint4* to) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) to[t] = x_at(t, further);
        further = further + WARPS * DEPTH - begin < depth ? further + WARPS * DEPTH : begin;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) look(ahead[i]);
#endif
#if STAGED || SCALED == BY_BLOCKS
    __syncthreads();
#endif
#if SCALED == BY_BLOCKS
    // Scales of the two rows of x whose sums this lane has.
    const float* of_rows[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#if STAGED
            of_rows[t][e] = of_x + min(8 * t + 2 * quarter + e, rows - 1) * across;
#else
            of_rows[t][e] = scales.x + place_of(8 * t + 2 * quarter + e) * across;
#endif
#endif

    int stage = 0, buffer = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, buffer ^= 1) {
#if SCALED == BY_BLOCKS
        scales_of_tile(tile + gridDim.x, buffer ^ 1);
        const float* of_columns = of_blocks + buffer * SIDES * across;
#endif
#if CACHED
        // While weights are on their way: the slots of the thread's keys or values, -1 for none, and by what keys are rotated.
        int to[ROUNDS];
        [[maybe_unused]] float cosine[ROUNDS], sine[ROUNDS];
        {
            const Tile t = tile_of(tile);
            [[maybe_unused]] const int of_head = (int)slice_of(t, (threadIdx.x >> 4) % SPANS).column(threadIdx.x & 15) % DIM;
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                const int y = (threadIdx.x >> 4) / SPANS + i * AT_ONCE;
                to[i] = -1;
                if (y >= rows || (t.of != KEYS && t.of != VALUES)) continue;
                to[i] = slots[y] < n.v[2 + COUNT] ? slots[y] : -1;
                // Of equal slots the last row's stays.
                for (int later = y + 1; later < rows; ++later)
                    if (slots[later] == to[i]) to[i] = -1;
#if PAIRS
                if (t.of == KEYS && of_head < 2 * PAIRS) angle_of(positions[y], of_head % PAIRS, cosine[i], sine[i]);
#endif
            }
        }
#endif
        Piece::Sum sums[SLICES][TILES][4] = {};
        for (int k = begin; k - begin < depth; k += WARPS * DEPTH) {
            // A piece is there or is not for all lanes of a warp.
            const bool some = k - quarter * PIECE < depth;
            uint4 b[TILES], u[SLICES], l[SLICES];
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
#if STAGED
                b[t] = x_at(t, k);
#else
                b[t] = ahead[0][t];
#pragma unroll
                for (int i = 1; i < AHEAD; ++i) ahead[i - 1][t] = ahead[i][t];
#endif
            }
#if !STAGED
            look(ahead[AHEAD - 1]);
#endif
#if SCALED == BY_BLOCKS
            // A piece is within a block.
            const int block = some ? (k - quarter * PIECE) / BLOCK : 0;
            float of_piece[TILES][2];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e) of_piece[t][e] = of_rows[t][e][block];
#endif
            copies_wait<STAGES - 2>();
            if (some) {
#pragma unroll
                for (int s = 0; s < SLICES; ++s) {
                    const uint4* a = ring + (stage * SLICES + s) * 2 * WARPS * 32 + threadIdx.x;
                    u[s] = a[0];
                    l[s] = a[WARPS * 32];
                }
            }
            // Into the stage that was read before this one.
            fetch();
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            if (!some) continue;
#pragma unroll
            for (int s = 0; s < SLICES; ++s)
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
#if SCALED == BY_BLOCKS
                    float piece[4] = {};
                    Piece::multiply(piece, u[s], l[s], b[t]);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums[s][t][i] = fmaf(piece[i], of_columns[s / SPANS * across + block] * of_piece[t][i & 1], sums[s][t][i]);
#else
                    Piece::multiply(sums[s][t], u[s], l[s], b[t]);
#endif
                }
        }
        float(*part)[SLICES][16][ROWS == 1 ? 1 : ROWS + 1] = parts[buffer % BUFFERS];
#pragma unroll
        for (int s = 0; s < SLICES; ++s)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int y = t * 8 + quarter * 2 + (i & 1);
                    if (y < ROWS) part[warp][s][row + 8 * (i >> 1)][y] = (float)sums[s][t][i];
                }
        __syncthreads();
        const Tile t = tile_of(tile);
        const int c = threadIdx.x & 15, span = (threadIdx.x >> 4) % SPANS;
        const i64 column = slice_of(t, span).column(c);
        D::Raw* out = of_weight(p.out, t.of);
        [[maybe_unused]] const void* bias = of_weight(p.bias, t.of);
#if SCALED == BY_ROWS
        const float* of_sides[SIDES] = {of_weight(scales.of, t.of)};
        if (SWIGLU) of_sides[SIDES - 1] = scales.of[COUNT - 1];
#endif
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int y = (threadIdx.x >> 4) / SPANS + round * AT_ONCE;
            if (y >= rows || column >= t.columns) continue;
            float total[SIDES];
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; ++i) sum += part[i][s * SPANS + span][c][y];
#if SCALED == BY_ROWS && STAGED
                sum *= of_x[y] * of_sides[s][column];
#elif SCALED == BY_ROWS
                sum *= scales.x[place_of(y)] * of_sides[s][column];
#endif
                total[s] = sum;
            }
            const i64 place = (i64)(first + y) * t.columns + column;
            float value = total[0];
            if (BIAS) value = value + at<BIAS_TYPE>(bias, column);
            if (SWIGLU) value = gated<D>(value, total[SIDES - 1]);
            if (ADD) value = D::load(r[place]) + D::wrap(value);
#if CACHED
            if (t.of == KEYS || t.of == VALUES) {
                value = D::wrap(value);
                const int head = (int)column / DIM, of_head = (int)column % DIM, heads = t.columns / DIM;
#if PAIRS
                if (t.of == KEYS && of_head < 2 * PAIRS) {
                    const float other = __shfl_xor_sync(0xffffu << (lane & 16), value, 8);
                    value = c < 8 ? value * cosine[round] - other * sine[round] : value * cosine[round] + other * sine[round];
                }
#endif
                const int slot = to[round];
                if (slot < 0) continue;
                const i64 line = (((i64)(slot / PAGE) * 2 + t.of - KEYS) * heads + head) * PAGE + slot % PAGE;
                ((CACHE::Raw*)out)[line * DIM + of_head] = CACHE::store(D::wrap(value));
                continue;
            }
#endif
            out[place] = D::store(value);
        }
        if (BUFFERS == 1) __syncthreads();
    }
}
