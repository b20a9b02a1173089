// The same as `blocks_ring.cuh` for Hopper: one warp more asks the copy engine for whole columns of the tiles ahead, adds up what the other warps
// made, and hands it on, so that these have nothing to do but decode and multiply.
// Defines: those of `digits.cuh`; SLOTS, tiles in shared memory at a time. Weights have columns in multiples of 16, of whole pairs of groups.

template <class F> struct Slot {
    // From the multiple of 16 at or below a column's address to that at or above its end; an odd number of pieces of 16 bytes.
    static const u32 STRIDE = (((u64)DEPTH * F::BYTES / CHUNK + 30) / 16 | 1) * 16, BYTES = SIDES * 16 * STRIDE;
    static const int GROUPS = F::UNIT, UNIT_BYTES = F::BYTES * GROUPS / 8, UNITS = (DEPTH / 32 + GROUPS - 1) / GROUPS;
    // Groups of the last unit.
    static const int LAST = DEPTH / 32 - (UNITS - 1) * GROUPS;
};

// As of `blocks_ring.cuh`. What `store` needs of a tile is loaded `ahead`, while the tile before it is made.
template <class F, class Tiles, class Ready, class Of, class Store> __device__ inline void over_tiles(
    const Tiles& tiles, int begin, int end, u8* shared, Ready ready, Of digits_of, Store store
) {
    typedef Slot<F> S;
    __shared__ float parts[SLOTS][WARPS][SIDES][16];
    __shared__ u64 barriers[2][SLOTS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    auto filled = [&](int slot) { return shared_address(&barriers[0][slot]); };
    auto made = [&](int slot) { return shared_address(&barriers[1][slot]); };
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(filled(i), 1);
            barrier_init(made(i), WARPS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warp == WARPS) {
        auto fetch = [&](int at) {
            const int slot = (at - begin) % SLOTS;
            const Tile tile = tiles.at(at);
            u64 from[SIDES];
            u32 bytes[SIDES], all = 0;
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                const u64 first = (u64)(tile.w[s] + (tile.column + (lane & 15)) * ROW_BYTES(F));
                from[s] = first & ~15ull;
                bytes[s] = (u32)((first + ROW_BYTES(F) + 15 & ~15ull) - from[s]);
                if (lane < 16) all += bytes[s];
            }
            all = __reduce_add_sync(ALL, all);
            if (lane == 0) barrier_expect(filled(slot), all);
            __syncwarp();
            const u32 to = shared_address(shared) + slot * S::BYTES + (lane & 15) * S::STRIDE;
#pragma unroll
            for (int s = 0; s < SIDES; ++s)
                if (lane < 16) bulk_copy(to + s * 16 * S::STRIDE, (const void*)from[s], bytes[s], filled(slot));
        };
        for (int at = begin; at < min(begin + SLOTS, end); ++at) fetch(at);
        auto column_of = [&](const Tile& tile) { return tile.column + (lane & 15); };
        auto ahead = [&](int at) { return store.ahead(tiles.at(at), column_of(tiles.at(at))); };
        if (begin >= end) return;
        auto next = ahead(begin);
        for (int at = begin; at < end; ++at) {
            const int slot = (at - begin) % SLOTS, turn = (at - begin) / SLOTS;
            barrier_wait(made(slot), turn & 1);
            float sums[SIDES] = {};
#pragma unroll
            for (int s = 0; s < SIDES; ++s)
#pragma unroll
                for (int part = 0; part < WARPS; ++part) sums[s] += parts[slot][part][s][lane & 15];
            __syncwarp();
            if (at + SLOTS < end) fetch(at + SLOTS);
            const auto loaded = next;
            if (at + 1 < end) next = ahead(at + 1);
            const Tile tile = tiles.at(at);
            store(tile, column_of(tile), sums, loaded, lane < 16);
        }
        return;
    }
    ready();
    const Lane of_lane;
    // Tiles are of multiples of 16 bytes.
    u32 skew[2];
    int behind[SIDES][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        skew[i] = (of_lane.own + 8 * i) * (ROW_BYTES(F) & 15) & 15;
#pragma unroll
        for (int s = 0; s < SIDES; ++s) behind[s][i] = skew[i] & 3;
    }
#pragma unroll 1
    for (int at = begin; at < end; ++at) {
        const int slot = (at - begin) % SLOTS, turn = (at - begin) / SLOTS;
        const Digits x = digits_of(tiles.at(at));
        Totals totals = {};
        barrier_wait(filled(slot), turn & 1);
#pragma unroll 1
        for (int unit = warp; unit < S::UNITS; unit += WARPS) {
            const u8 *upper[SIDES], *lower[SIDES];
#pragma unroll
            for (int s = 0; s < SIDES; ++s) {
                const u8* of_side = shared + slot * S::BYTES + s * 16 * S::STRIDE + unit * S::UNIT_BYTES;
                upper[s] = of_side + of_lane.own * S::STRIDE + skew[0];
                lower[s] = of_side + (of_lane.own + 8) * S::STRIDE + skew[1];
            }
            if (S::UNIT_BYTES % 4)
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int s = 0; s < SIDES; ++s) behind[s][i] = skew[i] + unit * S::UNIT_BYTES & 3;
            if (S::LAST == S::GROUPS || unit < S::UNITS - 1)
                multiply<F, S::GROUPS>(upper, lower, behind, x, unit * S::GROUPS, of_lane, totals);
            else
                multiply<F, S::LAST>(upper, lower, behind, x, unit * S::GROUPS, of_lane, totals);
        }
#pragma unroll
        for (int s = 0; s < SIDES; ++s)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& total = totals.of[s][i];
                if (F::MINIMA || F::CENTRE != 0) total += (of_lane.quarter & 1) == i ? totals.corrections[s] : 0.0f;
                total += __shfl_xor_sync(ALL, total, 1);
                total += __shfl_xor_sync(ALL, total, 2);
                if (of_lane.quarter == 0) parts[slot][warp][s][of_lane.own + 8 * i] = total;
            }
        __syncwarp();
        if (lane == 0) barrier_arrive(made(slot));
    }
}
