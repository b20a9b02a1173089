// What blocks of `blocks_rows.cu` divide, and what lies in their shared memory: rings of weights, and x as the fragments of products.

#define CHUNK 256
#define GROUPS (CHUNK / 32)
#define CHUNKS (DEPTH / CHUNK)
#define TILES (ROWS / 8)
#define SLICES 2
// Columns of a tile of results.
#define COLUMNS (SWIGLU ? 16 : 32)
#define ROW_BYTES(F) ((u32)((u64)DEPTH * F::BYTES / CHUNK))
// Sums of a tile: rows of a slice, far enough apart that a warp's stores are to different banks.
#define LINE 20
#define SUMS (SLICES * ROWS * LINE)
// Chunks of the depth that a block of a cluster has at most.
#define OWN_CHUNKS ((CHUNKS + CLUSTER - 1) / CLUSTER)
#define KEYS 1
#define ALL 0xffffffffu

struct Pointers { const u8* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };

// Where a tile's slices are, and how many columns each has.
struct Tile {
    const u8* w[SLICES];
    i64 column[SLICES], columns;
    int weight;
};

struct Tiles {
    const Pointers& p;
    const i64* columns;
    __device__ static int of(i64 columns) { return (int)((columns + COLUMNS - 1) / COLUMNS); }
    __device__ Tile at(int i) const {
        int weight = 0, before = 0;
#pragma unroll
        for (int j = 1; j < COUNT && !SWIGLU; ++j) {
            const int until = before + (weight == j - 1 ? of(columns[j - 1]) : 0);
            if (weight == j - 1 && i >= until) weight = j, before = until;
        }
        Tile tile;
        tile.weight = weight;
        const i64 first = (i64)(i - before) * COLUMNS;
#if CACHED && PAIRS
        const int of_head = (int)(first % DIM);
        const bool turned = weight == KEYS && of_head < 2 * PAIRS;
#endif
        const u8* w = p.weight[0];
        tile.columns = columns[0];
#pragma unroll
        for (int j = 1; j < COUNT && !SWIGLU; ++j)
            if (weight == j) w = p.weight[j], tile.columns = columns[j];
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            tile.w[s] = SWIGLU && s ? p.weight[COUNT - 1] : w;
            tile.column[s] = first + (SWIGLU ? 0 : 16 * s);
#if CACHED && PAIRS
            if (turned) tile.column[s] = first - of_head / 2 + PAIRS * s;
#endif
        }
        return tile;
    }
};

// Chunks of the depth that a block has.
struct Depth {
    int first, count;
    __device__ explicit Depth(int rank) : first(CHUNKS * rank / CLUSTER), count(CHUNKS * (rank + 1) / CLUSTER - first) {}
};

// Where the part of warp `warp` begins, of so many chunks.
__device__ inline int part_of(int chunks, int warp) { return chunks * warp / WARPS; }

// Copies of a warp's chunks into its ring: tiles begin .. end - 1, batch by batch.
template <class F> struct Ring {
    typedef Column<F> C;
    static const int SLICE_BYTES = 16 * C::STRIDE, BYTES = SLICES * SLICE_BYTES, COPIES = (16 * C::PIECES + 31) / 32;
    const Tiles& tiles;
    int rank, batch, end, tile, chunk, left, stage;
    u32 to;
    // Of each copy of this lane: how far it is behind the first column's chunk, and where it goes.
    u32 behind[COPIES], place[COPIES];
    const u8* from[SLICES];
    int columns[SLICES];

    __device__ Ring(const Tiles& tiles, int rank, int begin, int end, u8* ring)
        : tiles(tiles), rank(rank), batch(begin), end(end), stage(0), to(shared_address(ring)) {
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            const u32 i = (threadIdx.x & 31) + 32 * j, c = i / C::PIECES, within = i % C::PIECES * 16;
            behind[j] = c * ROW_BYTES(F) + within;
            place[j] = c * C::STRIDE + within;
        }
        enter();
    }
    // The first batch from this one on of which the warp has a part.
    __device__ void enter() {
        const int warp = threadIdx.x >> 5;
        for (; batch < end; batch += BATCH) {
            const Depth depth(rank);
            const int all = min(BATCH, end - batch) * depth.count, first = part_of(all, warp);
            left = part_of(all, warp + 1) - first;
            if (left > 0) {
                tile = batch + first / depth.count;
                chunk = depth.first + first % depth.count;
                look();
                return;
            }
        }
    }
    __device__ void look() {
        const Tile t = tiles.at(tile);
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            from[s] = t.w[s] + t.column[s] * ROW_BYTES(F);
            columns[s] = (int)min(max(t.columns - t.column[s], (i64)0), (i64)16);
        }
    }
    __device__ void fetch() {
        if (batch < end) {
#pragma unroll
            for (int s = 0; s < SLICES; ++s) {
                const u8* first = from[s] + (u32)chunk * F::BYTES;
                const u32 base = to + stage * BYTES + s * SLICE_BYTES;
#pragma unroll
                for (int j = 0; j < COPIES; ++j)
                    if ((int)(threadIdx.x & 31) + 32 * j < columns[s] * C::PIECES) stream_async(base + place[j], first + behind[j], true);
            }
            const Depth depth(rank);
            if (--left == 0) {
                batch += BATCH;
                enter();
            } else if (++chunk == depth.first + depth.count) {
                chunk = depth.first;
                ++tile;
                look();
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        copies_end();
    }
};

// x of a block: of each chunk and tile of 8 rows the fragments of groups, a lane's four words together, and those of the sums of groups; then of
// each chunk and row what its scaled elements are multiplied by to be x, those together that a quarter of lanes has.
struct Fragments {
    static const int CHUNK_BYTES = TILES * (GROUPS * 512 + 256) + ROWS * 4;
    uint4* of;
    uint2* sums;
    float* factors;
    __device__ Fragments(u8* at)
        : of((uint4*)at), sums((uint2*)(at + OWN_CHUNKS * TILES * GROUPS * 512)), factors((float*)(at + OWN_CHUNKS * TILES * (GROUPS * 512 + 256))) {}

    // Volatile, so that it stays behind the wait for the launch ahead.
    __device__ static uint2 load(const D::Raw* at) {
        uint2 x;
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(at) : "memory");
        return x;
    }
    __device__ void stage(const D::Raw* x, const NORM_TYPE::Raw* gain, int rows, Depth depth, float* squares) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, quarter = lane & 3;
#pragma unroll 1
        for (int i = warp; i < depth.count * TILES; i += WARPS) {
            const int chunk = i / TILES, tile = i % TILES, y = tile * 8 + row, first = (depth.first + chunk) * CHUNK + 4 * quarter;
            const D::Raw* at = x + (i64)y * DEPTH + first;
            uint2 raw[GROUPS][2];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int half = 0; half < 2; ++half) raw[g][half] = y < rows ? load(at + 32 * g + 16 * half) : make_uint2(0, 0);
            // As fragments have them.
            float v[GROUPS][2][4], most_of = 0.0f;
            [[maybe_unused]] float square = 0.0f;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float(&of)[4] = v[g][half];
                    const uint2 r = raw[g][half];
                    of[0] = D::load((u16)r.x), of[2] = D::load((u16)(r.x >> 16)), of[1] = D::load((u16)r.y), of[3] = D::load((u16)(r.y >> 16));
#if NORM
                    const Elements<NORM_TYPE, 4> gains = elements_at<NORM_TYPE, 4>(gain + first + 32 * g + 16 * half);
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        square = fmaf(of[e], of[e], square);
                        of[e] *= NORM_TYPE::load(gains.part[e >> 1 | (e & 1) << 1]);
                    }
#endif
#pragma unroll
                    for (int e = 0; e < 4; ++e) most_of = fmaxf(most_of, fabsf(of[e]));
                }
            most_of = fmaxf(most_of, __shfl_xor_sync(ALL, most_of, 1));
            most_of = fmaxf(most_of, __shfl_xor_sync(ALL, most_of, 2));
            // Elements are less than 2^(exponent - 126). What is infinite makes all of the chunk no number.
            const u32 most = __float_as_uint(most_of), exponent = max(most >> 23, 27u);
            const float by = __uint_as_float((263 - min(exponent, 254u)) << 23);
            float sums_of[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                u32 words[4];
                sums_of[g] = 0.0f;
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float low = v[g][half][2 * j] * by, high = v[g][half][2 * j + 1] * by;
                        words[2 * half + j] = Mma<F16>::pack(low, high);
                        sums_of[g] += low + high;
                    }
                of[((chunk * GROUPS + g) * TILES + tile) * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
            }
            // The sums of groups 2 quarter and 2 quarter + 1.
            float four[4], two[2];
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const float mine = quarter & 2 ? sums_of[4 + g] : sums_of[g], other = quarter & 2 ? sums_of[g] : sums_of[4 + g];
                four[g] = mine + __shfl_xor_sync(ALL, other, 2);
            }
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                const float mine = quarter & 1 ? four[2 + g] : four[g], other = quarter & 1 ? four[g] : four[2 + g];
                two[g] = mine + __shfl_xor_sync(ALL, other, 1);
            }
            const u32 upper = Mma<F16>::pack(two[0], two[1]);
            const u32 lower = Mma<F16>::pack(two[0] - F16::load((u16)upper), two[1] - F16::load((u16)(upper >> 16)));
            sums[(chunk * TILES + tile) * 32 + lane] = make_uint2(upper, lower);
#if NORM
            square += __shfl_xor_sync(ALL, square, 1);
            square += __shfl_xor_sync(ALL, square, 2);
            if (quarter == 0) squares[chunk * ROWS + y] = square;
#endif
            if (quarter == 0)
                factors[chunk * ROWS + (row >> 1) * 2 * TILES + 2 * tile + (row & 1)] =
                    most < 0x7f800000u ? __uint_as_float((exponent - 9) << 23) : QNAN;
        }
    }
};
