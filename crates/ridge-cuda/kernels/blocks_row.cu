// Linears of one row, or of one row of each group, by weights in block formats, read once in their own bits, on tensor cores.
// Floor: the weights' bytes over bandwidth; not far from it, the instructions that take codes out of their bits.
// Blocks stay, and make tiles of 16 columns in turn. The warps of a block take turns along the depth, 256 elements of each column at a
// time, through a ring of their own in shared memory, which runs on from one tile to the next.
// Products are of integers, and exact. Each group of 32 elements of x is fixed-point: 22 bits below its largest, in three digits of 8 bits.
// Digits of two groups are columns of the second operand, so that their products come out side by side in 6 of 8 columns; their sums are
// scaled in f32: scale * sum(code * x) - minimum * sum(x).
// Defines: D of x and results; DEPTH, a multiple of 256; WARPS; STAGES of a ring; COUNT weights; EACH_FORMAT(F), `F(i, format)` of each
// format, and FORMATS, which of them each weight has; ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU (of two weights of one format), 0 or 1;
// NORM, the threads among which a norm of the row is made, 0 for none, with its NORM_TYPE; PAIRED, 1 where the order of digits is that
// of MXFP4; STAGED, the bytes of the normed row and of the digits of x.
// Numbers: 1, DEPTH, then the columns of each weight.
// With GROUPED 1 (`grouped_blocks_row`), each of ROWS rows has the weight of its group, and rows of x are those that an index names if
// GATHERED is 1; COLUMNS are those of a weight. Its DEPTH is a multiple of 32, and there is neither ADD, BIAS nor NORM.

#define CHUNK 256
#define SIDES (SWIGLU ? 2 : 1)
#define CHUNKS ((DEPTH + CHUNK - 1) / CHUNK)
#define ROW_BYTES(F) ((u32)((u64)DEPTH * F::BYTES / CHUNK))
#define ALL 0xffffffffu

// What a tile reads and where its results go.
struct Tile {
    const u8* w[SIDES];
    i64 column, columns, row;
    int weight;
};

// The sums of a lane's two columns, of each side, and what corrects one of them.
struct Totals { float of[SIDES][2], corrections[SIDES]; };

// Copies of chunks into a ring, one tile after another.
template <class F, class Tiles> struct Ring {
    typedef Column<F> C;
    static const int BYTES = SIDES * 16 * C::STRIDE, COPIES = (16 * C::PIECES + 31) / 32;
    const Tiles& tiles;
    int tile, end, chunk, stage;
    u32 to;
    // Of each copy of this lane: how far it is behind the first column's chunk and behind its own column's, and where it goes.
    u32 behind[COPIES], within[COPIES], place[COPIES];
    const u8* from[SIDES];
    int columns;

    __device__ Ring(const Tiles& tiles, int begin, int end, u8* ring)
        : tiles(tiles), tile(begin), end(end), chunk(threadIdx.x >> 5), stage(0), to(shared_address(ring)) {
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            const u32 i = (threadIdx.x & 31) + 32 * j, c = i / C::PIECES;
            within[j] = i % C::PIECES * 16;
            behind[j] = c * ROW_BYTES(F) + within[j];
            place[j] = c * C::STRIDE + within[j];
        }
        if (chunk >= CHUNKS) tile = end;
        look();
    }
    __device__ void look() {
        if (tile >= end) return;
        const Tile t = tiles.at(tile);
#pragma unroll
        for (int s = 0; s < SIDES; ++s) from[s] = t.w[s] + t.column * ROW_BYTES(F);
        columns = (int)min(t.columns - t.column, (i64)16);
    }
    // All columns of a tile, or those that there are.
    template <bool WHOLE> __device__ void copy() {
        // Nothing behind the chunk, which may be the end of the weight, is read: zeros are written in its place.
        const int bytes = DEPTH % CHUNK && chunk == CHUNKS - 1 ? (int)(ROW_BYTES(F) % F::BYTES) : F::BYTES;
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            const u8* first = from[s] + (u32)chunk * F::BYTES;
            const u32 base = to + stage * BYTES + s * 16 * C::STRIDE;
#pragma unroll
            for (int j = 0; j < COPIES; ++j) {
                const int i = (threadIdx.x & 31) + 32 * j;
                if (i >= 16 * C::PIECES || (!WHOLE && i >= columns * C::PIECES)) continue;
                const u64 at = (u64)(first + behind[j]);
                const int left = C::ALIGNED && !GROUPED ? 16 : min(16, max(bytes + (int)(at & 15) - (int)within[j], 0));
                asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                    :: "r"(base + place[j]), "l"(C::ALIGNED ? at : at & ~15ull), "r"(left) : "memory");
            }
        }
    }
    __device__ void fetch() {
        if (tile < end) {
            if (columns == 16) copy<true>(); else copy<false>();
            chunk += WARPS;
            if (chunk >= CHUNKS) {
                chunk = threadIdx.x >> 5;
                ++tile;
                look();
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        copies_end();
    }
};

// x as digits: of each group of 32, three times 32 digits in the order in which quarters of lanes take them; its factor; and the sums of x
// of its halves.
struct Digits {
    static const int GROUP_BYTES = 96 + 4 + 8;
    u8* digits;
    float* factors;
    float2* halves;
    __device__ Digits(u8* at, int groups) : digits(at), factors((float*)(at + 96 * groups)), halves((float2*)(factors + groups)) {}

    // All of x by the threads of the block, of `lines` groups; zeros behind them, up to a whole chunk.
    template <bool INTERLEAVED> __device__ void stage(const D::Raw* x, int lines) {
        const int quarters = (lines + 7) / 8 * 32, AT_ONCE = 4;
        for (int first = threadIdx.x; first < quarters; first += AT_ONCE * WARPS * 32) {
            uint2 raw[AT_ONCE][2];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int i = first + u * WARPS * 32;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    raw[u][half] = i < lines * 4 ? *(const uint2*)(x + (i >> 2) * 32 + 4 * (i & 3) + 16 * half) : make_uint2(0, 0);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int i = first + u * WARPS * 32;
                if (i < quarters) stage<INTERLEAVED>(raw[u], i >> 2, i & 3);
            }
        }
    }
    // A quarter of a group, by the four lanes that have its quarters. INTERLEAVED digits are of both halves in turn.
    template <bool INTERLEAVED> __device__ void stage(const uint2 (&of_x)[2], int group, int quarter) {
        float v[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2 raw = of_x[half];
            v[4 * half] = D::load((u16)raw.x), v[4 * half + 1] = D::load((u16)(raw.x >> 16));
            v[4 * half + 2] = D::load((u16)raw.y), v[4 * half + 3] = D::load((u16)(raw.y >> 16));
        }
        u32 most = 0;
        float sum[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
        for (int half = 0; half < 2; ++half) sum[half] = v[4 * half] + v[4 * half + 1] + (v[4 * half + 2] + v[4 * half + 3]);
#pragma unroll
        for (int step = 1; step < 4; step <<= 1) {
            most = max(most, __shfl_xor_sync(ALL, most, step));
#pragma unroll
            for (int half = 0; half < 2; ++half) sum[half] += __shfl_xor_sync(ALL, sum[half], step);
        }
        // x = digits * 2^(exponent - 127 - 21). What is not finite makes all of the group no number.
        const u32 exponent = max(most >> 23, 27u);
        const float by = __uint_as_float((127 + 127 + 21 - min(exponent, 254u)) << 23);
        u32 words[2][3];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 e[4];
            // 2^23 + 2^22 has the integer in its last bits; bytes that carry become signed digits.
#pragma unroll
            for (int i = 0; i < 4; ++i)
                e[i] = (__float_as_uint(fmaf(v[4 * half + i], by, 12582912.0f)) - 0x4b400000u + 0x00808080u) ^ 0x00808080u;
            const u32 upper[2] = {__byte_perm(e[0], e[1], 0x6251), __byte_perm(e[2], e[3], 0x6251)};
            words[half][0] = __byte_perm(upper[0], upper[1], 0x7632);
            words[half][1] = __byte_perm(upper[0], upper[1], 0x5410);
            words[half][2] = __byte_perm(__byte_perm(e[0], e[1], 0x0040), __byte_perm(e[2], e[3], 0x0040), 0x5410);
        }
#pragma unroll
        for (int digit = 0; digit < 3; ++digit) {
            const u32 a = words[0][digit], b = words[1][digit];
            *(uint2*)(digits + group * 96 + digit * 32 + quarter * 8) =
                INTERLEAVED ? make_uint2(__byte_perm(a, b, 0x5140), __byte_perm(a, b, 0x7362)) : make_uint2(a, b);
        }
        if (quarter == 0) {
            // Of the first digit.
            factors[group] = most < 0x7f800000u ? __uint_as_float((exponent - 5) << 23) : __uint_as_float(0x7fffffffu);
            halves[group] = make_float2(sum[0], sum[1]);
        }
    }
};

// What a lane is in products: its columns of x are of group `odd` of each two, and are its first two digits or the third one.
struct Lane {
    int own, quarter, odd;
    // 1 where the lane has a digit of the even group, and of the odd one.
    u32 even_digits, odd_digits;
    // Of its first digit.
    float unit;
    int place;
    __device__ Lane() {
        const int lane = threadIdx.x & 31, digit = (lane >> 2) & 3;
        own = lane >> 2;
        quarter = lane & 3;
        odd = quarter >> 1;
        even_digits = own < 3;
        odd_digits = own >= 4 && own < 7;
        // Multiplied by, in a pipe that has less to do than the one that selects.
        asm volatile("" : "+r"(even_digits), "+r"(odd_digits));
        unit = quarter & 1 ? 1.52587890625e-5f : 1.0f;
        place = (own >> 2) * 96 + min(digit, 2) * 32 + quarter * 8;
    }
};

// Adds products of 16 rows of 32 codes with 8 columns of as many digits; below, of 16.
template <bool SIGNED> __device__ inline void add_products(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void add_products(int* c, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

// The sums of a lane's columns of x, of the rows of both its columns of the weight: of two groups of codes. Sums begin at the bits of 2^23 + 2^22,
// and so are floats without a conversion.
#define SUMS_BEGIN 0x4b400000
struct Sums {
    int of[4];
    __device__ Sums() { of[0] = of[1] = of[2] = of[3] = SUMS_BEGIN; }
    // Of column i of the weight, less those of `other`.
    __device__ float less(const Sums& other, int i) const { return join(value(i) - other.value(i), value(i + 1) - other.value(i + 1)); }
    __device__ float at(int i) const { return join(value(i) - 12582912.0f, value(i + 1) - 12582912.0f); }
    __device__ float value(int i) const { return __int_as_float(of[i]); }
    __device__ static float join(float a, float b) { return fmaf(b, 0.00390625f, a); }
};

// Adds the products of a chunk to a lane's totals; `first` is its first group of x.
template <class F> __device__ inline void multiply(
    const u8* const (&upper)[SIDES], const u8* const (&lower)[SIDES], const Digits& x, int first, const Lane& lane, Totals& totals
) {
    typedef Bytes<F> B;
    const u8* digits = x.digits + first * 96 + lane.place;
#pragma unroll
    for (int base = 0; base < CHUNK / 32; base += 2) {
        const int at = first + base + lane.odd;
        const uint2 b = *(const uint2*)(digits + base * 96);
        const u32 even[2] = {b.x * lane.even_digits, b.y * lane.even_digits};
        const u32 odd[2] = {b.x * lane.odd_digits, b.y * lane.odd_digits};
        const float factor = x.factors[at] * lane.unit;
        const float2 halves = x.halves[at];
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            if constexpr (F::GROUP == 16) {
                Sums of_half[2];
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    u32 u[2], l[2];
                    B::codes(upper[s], base + g, lane.quarter, u);
                    B::codes(lower[s], base + g, lane.quarter, l);
#pragma unroll
                    for (int half = 0; half < 2; ++half) add_products(of_half[half].of, u[half], l[half], g ? odd[half] : even[half]);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float above = B::scale(upper[s], base, lane.odd, half), below = B::scale(lower[s], base, lane.odd, half);
                    const float whole = -F::CENTRE * (half ? halves.y : halves.x);
                    totals.of[s][0] = fmaf(of_half[half].at(0) * factor, above, totals.of[s][0]);
                    totals.of[s][1] = fmaf(of_half[half].at(2) * factor, below, totals.of[s][1]);
                    totals.corrections[s] = fmaf(whole, lane.quarter & 1 ? below : above, totals.corrections[s]);
                }
            } else {
                Sums sums, negative;
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    u32 u[4], l[4];
                    const u32* by = g ? odd : even;
                    B::codes(upper[s], base + g, lane.quarter, u);
                    B::codes(lower[s], base + g, lane.quarter, l);
                    add_products<B::SIGNED>(sums.of, u[0], l[0], u[1], l[1], by[0], by[1]);
                    if (B::APART) add_products<B::SIGNED>(negative.of, u[2], l[2], u[3], l[3], by[0], by[1]);
                }
                const float above = B::scale(upper[s], base, lane.odd), below = B::scale(lower[s], base, lane.odd);
                const float of_upper = B::APART ? sums.less(negative, 0) : sums.at(0);
                const float of_lower = B::APART ? sums.less(negative, 2) : sums.at(2);
                totals.of[s][0] = fmaf(of_upper * factor, above, totals.of[s][0]);
                totals.of[s][1] = fmaf(of_lower * factor, below, totals.of[s][1]);
                if (F::MINIMA || F::CENTRE != 0) {
                    // Lanes of the first two digits have the upper column's, those of the third the lower one's.
                    const float minimum = F::MINIMA ? B::minimum(lane.quarter & 1 ? lower[s] : upper[s], base, lane.odd)
                                                    : F::CENTRE * (lane.quarter & 1 ? below : above);
                    totals.corrections[s] = fmaf(-minimum, halves.x + halves.y, totals.corrections[s]);
                }
            }
        }
    }
}

// The tiles begin .. end - 1. `ready` is called when weights are on their way, `digits_of` for x of a tile, and `store` with each tile, of a column's
// sums.
template <class F, class Tiles, class Ready, class Of, class Store> __device__ inline void over_tiles(
    const Tiles& tiles, int begin, int end, u8* shared, Ready ready, Of digits_of, Store store
) {
    typedef Ring<F, Tiles> R;
    typedef Column<F> C;
    __shared__ float parts[2][WARPS][SIDES][16];
    const int warp = threadIdx.x >> 5;
    u8* buffer = shared + warp * STAGES * R::BYTES;
    R ring(tiles, begin, end, buffer);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) ring.fetch();
    ready();
    const Lane lane;
    int stage = 0, turn = 0;
    for (int at = begin; at < end; ++at, turn ^= 1) {
        const Tile tile = tiles.at(at);
        const Digits x = digits_of(tile);
        Totals totals = {};
        for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
            copies_wait<STAGES - 2>();
            __syncwarp();
            ring.fetch();
            const u8 *upper[SIDES], *lower[SIDES];
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                auto place = [&](int c) {
                    const u8* from = tile.w[s] + (tile.column + c) * ROW_BYTES(F) + (u32)chunk * F::BYTES;
                    return buffer + stage * R::BYTES + (s * 16 + c) * C::STRIDE + C::skew(from);
                };
                upper[s] = place(lane.own);
                lower[s] = place(lane.own + 8);
            }
            multiply<F>(upper, lower, x, chunk * (CHUNK / 32), lane, totals);
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
#pragma unroll
        for (int s = 0; s < SIDES; ++s)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& total = totals.of[s][i];
                if (F::MINIMA || F::CENTRE != 0) total += (lane.quarter & 1) == i ? totals.corrections[s] : 0.0f;
                total += __shfl_xor_sync(ALL, total, 1);
                total += __shfl_xor_sync(ALL, total, 2);
                if (lane.quarter == 0) parts[turn][warp][s][lane.own + 8 * i] = total;
            }
        __syncthreads();
        // The next tile's sums have another place, so that the other warps go on.
        const int c = threadIdx.x & 31;
        if (warp == (at - begin) % WARPS && c < 16 && tile.column + c < tile.columns) {
            float sums[SIDES] = {};
#pragma unroll
            for (int s = 0; s < SIDES; ++s)
#pragma unroll
                for (int part = 0; part < WARPS; ++part) sums[s] += parts[turn][part][s][c];
            store(tile, tile.column + c, sums);
        }
    }
    // What comes next may use the same places.
    __syncthreads();
}

// The part of `of` that is this block's.
__device__ inline int part_of(int of, int block) { return (int)((i64)of * block / gridDim.x); }

#if GROUPED
#define ACROSS ((COLUMNS + 15) / 16)

struct Tiles {
    const u8* const* w;
    const int* groups;
    __device__ Tile at(int i) const {
        const int row = i / ACROSS;
        const i64 before = (i64)groups[row] * COLUMNS * ROW_BYTES(FORMATS);
        Tile tile = {{}, i % ACROSS * 16, COLUMNS, row, 0};
        for (int s = 0; s < SIDES; ++s) tile.w[s] = w[s] + before;
        return tile;
    }
};

// Numbers: rows of x, groups. Of several weights, SWIGLU's, the first is the gate.
extern "C" __global__ __launch_bounds__(WARPS * 32, 16 / WARPS) void grouped_blocks_row(
    const D::Raw* __restrict__ x, const u8* __restrict__ w,
#if SWIGLU
    const u8* __restrict__ other,
#endif
    const int* __restrict__ offsets, const int* __restrict__ index, D::Raw* __restrict__ y, Numbers<2> n
) {
    extern __shared__ uint4 shared[];
    __shared__ int group_of[ROWS], row_of[ROWS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, groups = (int)n.v[1];
    const u8* const weights[SIDES] = {w
#if SWIGLU
        , other
#endif
    };
    others_may_begin();
    after_others();
    for (int row = warp; row < ROWS; row += WARPS) {
        int below = 0;
        for (int g = lane; g < groups; g += 32) below += offsets[g + 1] <= row;
        group_of[row] = __reduce_add_sync(ALL, below);
        const int from = GATHERED ? index[row] : row;
        row_of[row] = from < n.v[0] ? from : -1;
    }
    __syncthreads();
    const int used = n.v[0] > 0 ? min(offsets[groups], ROWS) : 0, lines = DEPTH / 32, room = (lines + 7) / 8 * 8;
    const int begin = part_of(used * ACROSS, blockIdx.x), end = part_of(used * ACROSS, blockIdx.x + 1), first = begin / ACROSS;
    auto digits_of_row = [&](i64 row) {
        return Digits((u8*)shared + (row - first) * room * Digits::GROUP_BYTES, room);
    };
    const Tiles tiles = {weights, group_of};
    over_tiles<FORMATS>(
        tiles, begin, end, (u8*)shared + STAGED,
        [&] {
            for (int row = first; row * ACROSS < end; ++row) {
                Digits digits = digits_of_row(row);
                digits.stage<Bytes<FORMATS>::APART>(x + (i64)max(row_of[row], 0) * DEPTH, lines);
            }
            __syncthreads();
        },
        [&](const Tile& tile) { return digits_of_row(tile.row); },
        [&](const Tile& tile, i64 column, const float* sums) {
            const float value = SWIGLU ? gated<D>(sums[0], sums[SIDES - 1]) : sums[0];
            y[tile.row * COLUMNS + column] = D::store(row_of[tile.row] < 0 ? 0.0f : value);
        }
    );
    // Rows of no group.
    for (int i = used * COLUMNS + blockIdx.x * (WARPS * 32) + threadIdx.x; i < ROWS * COLUMNS; i += gridDim.x * WARPS * 32)
        y[i] = D::store(0.0f);
}
#else
struct Pointers { const u8* weight[COUNT]; D::Raw* out[COUNT]; const void* bias[COUNT]; };

struct Tiles {
    const Pointers& p;
    const i64* columns;
    __device__ Tile at(int i) const {
        Tile tile = {{p.weight[0]}, (i64)i * 16, columns[0], 0, 0};
        if (SWIGLU) tile.w[SIDES - 1] = p.weight[COUNT - 1];
        i64 before = (columns[0] + 15) / 16;
#pragma unroll
        for (int j = 1; j < COUNT && !SWIGLU; ++j) {
            if (i < before) continue;
            tile = {{p.weight[j]}, (i - before) * 16, columns[j], 0, j};
            before += (columns[j] + 15) / 16;
        }
        return tile;
    }
};

extern "C" __global__ __launch_bounds__(WARPS * 32, 16 / WARPS) void linear_blocks_row(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ r, const NORM_TYPE::Raw* __restrict__ gain, float eps,
    Pointers p, Numbers<2 + COUNT> n
) {
    extern __shared__ uint4 shared[];
    const int formats[] = {FORMATS};
    const Tiles tiles = {p, n.v + 2};
    const int lines = DEPTH / 32;
    Digits digits((u8*)shared, lines);
    auto ready = [&] {
        others_may_begin();
        after_others();
        const D::Raw* from = x;
#if NORM
        __shared__ float squares[32];
        const float unit = unit_of_row<D, NORM>(x, DEPTH, eps, squares);
        D::Raw* line = (D::Raw*)((u8*)shared + STAGED) - DEPTH;
        for (int k = threadIdx.x * 8; k < DEPTH; k += WARPS * 32 * 8)
            *(uint4*)(line + k) = normed<D, NORM_TYPE>(*(const uint4*)(x + k), gain + k, unit);
        __syncthreads();
        from = line;
#endif
        digits.stage<PAIRED>(from, lines);
        __syncthreads();
    };
    auto digits_of = [&](const Tile&) { return digits; };
    auto store = [&](const Tile& tile, i64 column, const float* sums) {
        float value = sums[0];
        if (BIAS) value += at<BIAS_TYPE>(p.bias[tile.weight], column);
        if (SWIGLU) value = gated<D>(value, sums[SIDES - 1]);
        if (ADD) value = D::load(r[column]) + D::wrap(value);
        p.out[tile.weight][column] = D::store(value);
    };
    int all = 0;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : COUNT); ++i) all += (int)((n.v[2 + i] + 15) / 16);
    const int begin = part_of(all, blockIdx.x), end = part_of(all, blockIdx.x + 1);
    // Weights of one format that follow each other are one run of tiles.
    int from = 0;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : COUNT); ++i) {
        if (i > 0 && formats[i] == formats[i - 1]) continue;
        int to = from;
#pragma unroll
        for (int j = i; j < (SWIGLU ? 1 : COUNT); ++j) {
            if (formats[j] != formats[i]) break;
            to += (int)((n.v[2 + j] + 15) / 16);
        }
        const int first = max(begin, from), last = min(end, to);
        switch (formats[i]) {
#define RUN(f, F) \
    case f: \
        if (i == 0) over_tiles<F>(tiles, first, last, (u8*)shared + STAGED, ready, digits_of, store); \
        else over_tiles<F>(tiles, first, last, (u8*)shared + STAGED, [] {}, digits_of, store); \
        break;
            EACH_FORMAT(RUN)
        }
        from = to;
    }
}
#endif
