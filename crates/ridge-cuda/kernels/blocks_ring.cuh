// Tiles of 16 columns of weights in block formats for one row: warps of a block take turns along the depth, 256 elements of each column at a
// time, through a ring of their own in shared memory, which runs on from one tile to the next.
// Defines: those of `digits.cuh`; STAGES of a ring; GROUPED, 1 where columns begin at any address.

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
            int behind[SIDES][2];
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                const int places = ANYWHERE ? 3 : F::GROUP == 16 ? 2 : 0;
                behind[s][0] = (int)(u64)upper[s] & places;
                behind[s][1] = (int)(u64)lower[s] & places;
            }
            multiply<F>(upper, lower, behind, x, chunk * (CHUNK / 32), lane, totals);
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
        if (warp == (at - begin) % WARPS) {
            const int c = threadIdx.x & 15;
            float sums[SIDES] = {};
#pragma unroll
            for (int s = 0; s < SIDES; ++s)
#pragma unroll
                for (int part = 0; part < WARPS; ++part) sums[s] += parts[turn][part][s][c];
            store(tile, tile.column + c, sums, (threadIdx.x & 31) < 16 && tile.column + c < tile.columns);
        }
    }
    // What comes next may use the same places.
    __syncthreads();
}
