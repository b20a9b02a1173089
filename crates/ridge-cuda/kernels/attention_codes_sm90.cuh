// What `attention_sm90.cu` does over a cache of codes: its producer warps read codes, 16 bytes to a lane, and store them as f16 in the
// layout that the copy engine would leave there, so that wgmma multiplies codes as they are; f16 holds them exactly. Scales of
// keys are factors of scores. Logarithms of the scales of values are added to the exponents of weights, which with their scales are at
// most 1; sums of weights without them take the inverse of the scales.
// Floor: a tile of 128 positions at DIM 128 is 2,048 vectors of 16 codes, 16 to a producer, at some 20 (E4M3) to 30 (int8) instructions
// each: 320 to 480 issue slots of a quarter of the multiprocessor, beside some 1,200 of consumers, of at least 2,048 cycles of
// products. Shared memory is as busy: of those cycles wgmma reads in 1,280, producers store in 512, and factors of columns take 192.
// With INT8_SCORES the copy engine brings keys, and producers convert values alone, to D, with their scales (`attention_int8_sm90.cuh`).
// Defines: those of `codes.cuh`, `attention_items.cuh` and `attention_sm90.cu`.

#if CODED
typedef CODE::Raw Stored;

// Beside a tile's codes, of each two columns: the factors of their scores and the logarithms of their values' scales, and behind those
// of all columns the inverses of the scales, as a thread of wgmma reads them: four floats at a time.
// A slot more than the rings have stages, as the softmax of a tile ends after its stage of keys is free.
#if INT8_SCORES
#define SCALE_BYTES (COLUMNS * 4)
#else
#define SCALE_BYTES (COLUMNS * 12)
#endif
#define SCALE_SLOTS (STAGES + 1)
// Vectors of a producer of one side of a tile, and the rows that a warp loads at a time.
#define VECTORS (DIM / 16)
#define LOAD_ROWS (512 / DIM)

// What items, rings and scales are at in shared memory: barriers, and the first bytes; the ring of values follows that of keys.
struct Rings { u32 item_full, item_free, k_full, k_free, v_full, v_free, keys, scales; };

// The cache of a launch. `rows` of a side of a block; `scale` of scores, beside the scales of keys.
struct CodedCache {
#if INT8_SCORES
    const TensorMap* keys;
#endif
    const Stored* codes;
    const float* scales;
    const int* table;
    int columns, blocks, heads, rows;
    float scale;
};

#if !INT8_SCORES
// Does f16 hold what D holds?
template <class D> struct Fits { static const bool f16 = false; };
template <> struct Fits<F16> { static const bool f16 = true; };

// The 64 rows of q at `at`, of this warpgroup, from D to f16, each with a factor so that it fits, whose inverse goes to `of_row`. Rows of
// ordinary magnitude have the factor 1: is there another among this warp's 16?
__device__ inline bool fit_queries(u32 at, float* of_row) {
    if (Fits<D>::f16) return false;
    const int row = threadIdx.x % 128 / 2, part = threadIdx.x & 1;
    const u32 from = at + row * 128 + (SLICES == 2 ? part * (ROWS * 128) : 0);
    // Two rows of the same banks are read in different order.
    auto place = [&](int i) { return from + (((SLICES == 2 ? i ^ part * 4 : part * 4 + i) ^ (row & 7)) * 16); };
    u32 x[4 * SLICES][4];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * SLICES; ++i) {
        load_words<4>(x[i], place(i));
#pragma unroll
        for (int w = 0; w < 4; ++w)
            largest = fmaxf(largest, fmaxf(fabsf(D::load((u16)x[i][w])), fabsf(D::load((u16)(x[i][w] >> 16)))));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    const bool plain = largest == 0.0f || (largest >= 0.015625f && largest < 32768.0f);
    const float factor = plain ? 1.0f : fitting(largest);
    if (part == 0) of_row[row] = 1.0f / factor;
#pragma unroll
    for (int i = 0; i < 4 * SLICES; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w)
            x[i][w] = Mma<F16>::pack(D::load((u16)x[i][w]) * factor, D::load((u16)(x[i][w] >> 16)) * factor);
        store_shared(place(i), make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]));
    }
    stores_before_products();
    return !__all_sync(~0u, plain);
}
#endif

// What producer warps do: each brings 32 positions of every tile of this block's `count` items. `prepare` is called by one of them, for
// the items in their order, while tiles of the one before are brought; `key_of` is the key head of an item.
template <class Prepare, class KeyOf>
__device__ inline void bring_codes(
    const Rings& rings, const CodedCache& cache, const Item* items, int count, const Prepare& prepare, const KeyOf& key_of
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, four = lane & 3;
    // Neighbouring lanes have chunks in different banks.
    const int slice = SLICES == 2 ? lane >> 3 & 1 : 0;
    const int row = SLICES == 2 ? (lane >> 2 & 1) | lane >> 4 << 1 : lane >> 2;
    const Stored* from = cache.codes + (slice * 4 + four) * 16;
    const u32 to = rings.keys + warp * 4 * GROUP_BYTES + slice * SLICE_BYTES + row * 128, turned = (2 * four ^ row) * 16;
    uint4 held[VECTORS];
    auto load = [&](int i, int line, int side) {
        // All here, as eight addresses ahead, or eight lanes, take the registers of the loads.
        asm volatile("{\n .reg .b32 at_lane, own;\n .reg .b64 at;\n add.s32 at_lane, %5, %6;\n"
            "shfl.sync.idx.b32 own, %4, at_lane, 31, -1;\n add.s32 own, own, %7;\n mad.wide.s32 at, own, %8, %9;\n"
            "ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [at];\n}"
            : "=r"(held[i].x), "=r"(held[i].y), "=r"(held[i].z), "=r"(held[i].w)
            : "r"(line), "r"(row), "r"(i * LOAD_ROWS), "r"(side), "n"(DIM), "l"(from));
    };
    auto store = [&](int i, u32 tile, float of_value) {
        const u32 x[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
        u32 y[8];
#if INT8_SCORES
        const float of_row = __shfl_sync(~0u, of_value, i * LOAD_ROWS + row);
#pragma unroll
        for (int w = 0; w < 4; ++w) to_values(x[w], y + 2 * w, of_row);
#else
#pragma unroll
        for (int w = 0; w < 4; ++w) to_halves(x[w], y + 2 * w, CODE());
#endif
        // Of eight rows those of an odd load are the upper four at DIM 128.
        const int odd = SLICES == 2 ? i & 1 : 0, group = SLICES == 2 ? i / 2 : i;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_shared(tile + to + (turned ^ (half * 16 + odd * 64)) + group * GROUP_BYTES + odd * 512,
                make_uint4(y[4 * half], y[4 * half + 1], y[4 * half + 2], y[4 * half + 3]));
    };
    auto publish = [&](u32 barrier) {
        stores_before_products();
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    };
    // The item, and how many of its tiles are brought.
    int nth = -1, brought = 0;
    Cursor cursor;
    // Goes on to the next item that has a tile if this has no more; is there one?
    auto settle = [&] {
#pragma unroll 1
        while (true) {
            const bool over = nth < 0 || !cursor.some();
            // Once, and early: when a stage is free again in this item, consumers have begun it, and are done with the one before, whose
            // place the next takes.
            if ((over ? brought <= STAGES + 1 : brought == STAGES + 1) && warp == PRODUCERS - 1 && nth + 1 < count) prepare(nth + 1);
            if (!over) return true;
            __syncwarp();
            if (lane == 0 && nth >= 0) barrier_arrive(rings.item_free + 8 * (nth & 1));
            if (++nth == count) return false;
            barrier_wait(rings.item_full + 8 * (nth & 1), nth >> 1 & 1);
            brought = 0;
            cursor = Cursor(items[nth & 1]);
        }
    };
    // Of the tile that the cursor is at: where the keys of this lane's position lie, as a row of the cache. A position that nothing sees
    // takes the codes of its segment's last, as what no token has written may be no number, and 0 times that is none; of such the
    // row's complement is given.
    auto find = [&] {
        const int* row = cache.table + (i64)cursor.segment.id * cache.columns;
        const int position = cursor.start + warp * 32 + lane, last = cursor.segment.end - 1;
        const int block = row[min(position, last) / BLOCK], last_block = row[last / BLOCK];
        const bool some = (u32)block < (u32)cache.blocks;
        const int from = some ? block : (u32)last_block < (u32)cache.blocks ? last_block : 0;
        const int line = (from * 2 * cache.heads + key_of(nth)) * BLOCK + (some ? min(position, last) : last) % BLOCK;
        return some && position <= last ? line : ~line;
    };
    // What is found of the next tile, if it is of the same item.
    int found = 0;
    for (u32 tile = 0; settle(); ++tile) {
        const u32 stage = tile % STAGES, parity = ~(tile / STAGES) & 1, slot = tile % SCALE_SLOTS * SCALE_BYTES;
        if (brought == 0) found = find();
        const int line = max(found, ~found);
        const float of_key = found >= 0 ? cache.scales[line] : 0.0f;
        const float of_value = found >= 0 ? cache.scales[line + cache.rows] : 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) load(i, line, INT8_SCORES ? cache.rows : 0);
        cursor.next();
        ++brought;
        if (cursor.some()) found = find();
        barrier_wait(rings.k_free + 8 * stage, parity);
#if INT8_SCORES
        const float factor = of_key * cache.scale * (SOFTCAP ? 2.0f * LOG2E / CAP : LOG2E);
        bring_keys(cache.keys, rings.keys + stage * KEY_BYTES, rings.scales + slot, rings.k_full + 8 * stage, line, factor);
#else
        const float scale = scale_of_values(of_value);
        // From a lane's number that is read again: registers are short.
        u32 column;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(column));
        const u32 of_column = rings.scales + slot + column / 2 * 16 + (column & 1) * 4;
        const u32 of_weight = rings.scales + slot + COLUMNS * 8 + (column / 16 * 4 + column / 2 % 4) * 16 + column / 8 % 2 * 8
            + (column & 1) * 4;
        asm volatile("st.shared.f32 [%0], %1;" :: "r"(of_column), "f"(of_key * cache.scale * (SOFTCAP ? 2.0f * LOG2E / CAP : LOG2E)) : "memory");
        asm volatile("st.shared.f32 [%0], %1;" :: "r"(of_column + 8), "f"(log2_of(scale)) : "memory");
        asm volatile("st.shared.f32 [%0], %1;" :: "r"(of_weight), "f"(__fdividef(1.0f, scale)) : "memory");
        // The registers of keys take values at once.
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            store(i, stage * SIDE_BYTES, 1.0f);
            load(i, line, cache.rows);
        }
        publish(rings.k_full + 8 * stage);
#endif
        barrier_wait(rings.v_free + 8 * stage, parity);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store(i, STAGES * KEY_BYTES + stage * SIDE_BYTES, of_value);
        publish(rings.v_full + 8 * stage);
    }
}
#endif
