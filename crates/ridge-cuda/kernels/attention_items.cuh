// What the blocks of `attention_sm90.cu` work on: items of (ROWS tokens, query head), and the tiles of COLUMNS positions of each.
// Defines: DIM, 64 or 128; CONSUMERS, warpgroups of 64 rows; BLOCK; PAGED; WINDOW; and what `runs.cuh` takes.

#define ROWS (64 * CONSUMERS)
#define COLUMNS 128
// Warps of the first warpgroup.
#define PRODUCERS 4
#define SLICES (DIM / 64)
#define Q_BYTES (ROWS * DIM * 2)
#define SIDE_BYTES (COLUMNS * DIM * 2)
// In shared memory, from eight positions to the next eight, and from 64 columns of them to the next 64.
#define GROUP_BYTES (PAGED ? SLICES * 1024 : 1024)
#define SLICE_BYTES (PAGED ? 1024 : COLUMNS * 128)
#define LOG2E 1.44269504088896340736f
// Of a tile of keys: of codes where scores are products of int8.
#define KEY_BYTES (INT8_SCORES ? COLUMNS * DIM : SIDE_BYTES)
// Of a row: padding, whose result is 0, and a token that another kernel takes.
#define PADDING -1
#define LEFT_OUT -2

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rows [low, high) of an item, packed, are of one sequence, and see positions from `first`, where a tile begins, up to `end`. `id` is
// the sequence's row of the table, or where keys are not paged the token of its position 0.
struct alignas(16) Segment { int rows, id, first, end; };

// What the producer tells of an item.
struct Item { int segments, id[ROWS], position[ROWS]; Segment segment[ROWS]; };

// Items of a block: the i-th of all in the order of work, or -1.
__device__ inline int item_of(int round, int all) {
    const int at = round * (int)gridDim.x + (round & 1 ? (int)gridDim.x - 1 - (int)blockIdx.x : (int)blockIdx.x);
    return at < all ? at : -1;
}

// The tiles of an item in their order.
struct Cursor {
    const Item* item;
    int at, start;
    Segment segment;
    __device__ Cursor() {}
    __device__ Cursor(const Item& of) : item(&of), at(0), start(0) {
        if (of.segments > 0) begin();
    }
    __device__ void begin() { segment = item->segment[at]; start = segment.first; }
    __device__ bool some() const { return at < item->segments; }
    __device__ void next() {
        start += COLUMNS;
        if (start < segment.end) return;
        if (++at < item->segments) begin();
    }
};

// The segments and positions of an item's rows, by one warp.
__device__ inline void divide(
    Item& item, const int* ids, const int* positions, const int* prompts, int token, int tokens, i64 visible
) {
    const int lane = threadIdx.x % 32, rows = min(ROWS, tokens - token);
#pragma unroll 1
    for (int r = lane; r < ROWS; r += 32) {
        const int t = token + r;
        bool taken = t < tokens;
        const int id = taken ? ids[t] : -1, position = taken ? positions[t] : -1;
#if SOME_APART
        taken = taken && !is_apart(ids, positions, prompts, tokens, t);
#endif
        item.position[r] = !taken ? LEFT_OUT : id < 0 || position < 0 ? PADDING : position;
        item.id[r] = !taken || position < 0 ? -1 : id;
    }
    __syncwarp();
    int segments = 0;
#pragma unroll 1
    for (int low = 0; low < rows;) {
        int own = item.id[low], high = rows, least = 0x7fffffff, last = -1;
#pragma unroll 1
        for (int r = low + 1; r < rows; r += 32) {
            const u32 others = __ballot_sync(~0u, r + lane < rows && item.id[min(r + lane, ROWS - 1)] != own);
            if (others) { high = r + __ffs(others) - 1; break; }
        }
        if (own >= 0) {
#pragma unroll 1
            for (int r = low + lane; r < high; r += 32) {
                least = min(least, item.position[r]);
                last = max(last, item.position[r]);
            }
            least = __reduce_min_sync(~0u, least);
            last = __reduce_max_sync(~0u, last);
            int end = last + 1;
#if PAGED
            end = (int)min((i64)end, visible);
#else
            // The token of position 0 of this sequence.
            own = token + low - item.position[low];
#endif
            const int first = WINDOW > 0 ? max(0, least - WINDOW + 1) / COLUMNS * COLUMNS : 0;
            if (first < end) {
                if (lane == 0) item.segment[segments] = Segment{low | high << 16, own, first, end};
                ++segments;
            }
        }
        low = high;
    }
    if (lane == 0) item.segments = segments;
}
