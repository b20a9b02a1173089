// Products of groups of rows on Hopper's tensor cores, each with a weight of its own; where groups begin is read on the device, and no
// weight of a group without rows is. Rows behind the last group become zeros. Sums are in f32, in the order of depth.
// Floor: the bytes of the weights that groups reach over bandwidth, or the operations of tiles over the rate of tensor cores.
// A block makes tiles of ROWS rows of one group by COLUMNS columns, one after another, the tiles of a group's rows next to each other, so
// that a weight is read from memory once. The first warpgroup brings slices of DEPTH into a ring of STAGES: weights by the copy
// engine, and rows of x, which may lie anywhere, by copies of 16 bytes. Each of CONSUMERS warpgroups multiplies 64 rows of every tile.
// Defines: D, a 16-bit float; GATHERED, 0 or 1: are the rows of x those that `index` names?; CONSUMERS; COLUMNS; STAGES; GROUPS.
// Numbers: rows, rows of x, columns, depth (a multiple of 8). For other architectures it is empty, and is not launched.

#define DEPTH 64
#define LINE 128
#define ROWS (64 * CONSUMERS)
#define SLICE_X (ROWS * LINE)
#define SLICE (SLICE_X + COLUMNS * LINE)
// Slices of x on their way while later ones are asked for.
#define LAG (STAGES - 2)
// Rows of x that a thread copies 16 bytes of.
#define COPIES (ROWS / 16)

extern "C" __global__ __launch_bounds__(128 * (CONSUMERS + 1)) void grouped_sm90(
    const __grid_constant__ TensorMap w, const D::Raw* __restrict__ x, const int* __restrict__ offsets,
    const int* __restrict__ index, D::Raw* __restrict__ y, const Numbers<4> n
) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * STAGES];
    // Tiles of rows before each group.
    __shared__ int before[GROUPS + 1];
    const u32 ring = (shared_address(shared) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    const int rows = (int)n.v[0], columns = (int)n.v[2], depth = (int)n.v[3];
    const int across = (columns + COLUMNS - 1) / COLUMNS, slices = (depth + DEPTH - 1) / DEPTH;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            // The copy of the weight, and a warp's share of x.
            barrier_init(full + 8 * s, 1 + 4);
            barrier_init(empty + 8 * s, 4 * CONSUMERS);
        }
        barriers_ready();
    }
    others_may_begin();
    after_others();
    if (threadIdx.x < 32) {
        int all = 0;
        for (int base = 0; base < GROUPS; base += 32) {
            const int g = base + lane;
            const int own = g < GROUPS ? (offsets[g + 1] - offsets[g] + ROWS - 1) / ROWS : 0;
            int upto = own;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const int lower = __shfl_up_sync(~0u, upto, step);
                if (lane >= step) upto += lower;
            }
            if (g < GROUPS) before[g] = all + upto - own;
            all += __shfl_sync(~0u, upto, 31);
        }
        if (lane == 0) before[GROUPS] = all;
    }
    __syncthreads();
    const int tiles = before[GROUPS] * across;
    // Tile `t`: its group, rows and first column.
    auto find = [&](int t, int& group, int& first, int& end, int& column) {
        int low = 0, high = GROUPS;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (before[middle] * across <= t) low = middle; else high = middle;
        }
        const int own = before[low + 1] - before[low], rest = t - before[low] * across;
        group = low;
        first = offsets[low] + rest % own * ROWS;
        end = min(first + ROWS, offsets[low + 1]);
        column = rest / own * COLUMNS;
    };
    if (warpgroup == 0) {
        if (CONSUMERS > 1) registers_lower<72>();
        if (threadIdx.x == 0) prefetch_map(&w);
        const int part = threadIdx.x % 8, line = threadIdx.x / 8;
        // Slices asked for, and those whose rows of x have been announced.
        u32 at = 0, told = 0;
        auto tell = [&]() {
            stores_before_products();
            __syncwarp();
            if (lane == 0) barrier_arrive(full + 8 * (told % STAGES));
            ++told;
        };
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            int group, first, end, column;
            find(t, group, first, end, column);
            const D::Raw* from[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int place = first + line + 16 * i;
                const int row = place < end ? (GATHERED ? index[place] : place) : -1;
                from[i] = row >= 0 && row < n.v[1] ? x + (i64)row * depth + part * 8 : nullptr;
            }
            for (int s = 0; s < slices; ++s, ++at) {
                const u32 stage = at % STAGES, to = ring + stage * SLICE;
                barrier_wait(empty + 8 * stage, ~(at / STAGES) & 1);
                if (threadIdx.x == 0) {
                    barrier_expect(full + 8 * stage, COLUMNS * LINE);
                    copy_box(to + SLICE_X, &w, full + 8 * stage, s * DEPTH, group * columns + column);
                }
                const bool in = s * DEPTH + part * 8 < depth;
#pragma unroll
                for (int i = 0; i < COPIES; ++i) {
                    const int r = line + 16 * i;
                    // Rows of x that are out of range are zeros; those of no group are not stored.
                    if (first + r < end) {
                        const bool real = in && from[i] != nullptr;
                        copy_async(to + r * LINE + ((part ^ (r & 7)) * 16), real ? from[i] + s * DEPTH : x, real);
                    }
                }
                copies_end();
                if (at >= LAG) {
                    copies_wait<LAG>();
                    tell();
                }
            }
        }
        copies_wait<0>();
        while (told < at) tell();
    } else {
        if (CONSUMERS > 1) registers_raise<216>();
        const int part = warpgroup - 1;
        u32 at = 0;
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            int group, first, end, column;
            find(t, group, first, end, column);
            float d[COLUMNS / 2];
            for (int s = 0; s < slices; ++s, ++at) {
                const u32 stage = at % STAGES, from = ring + stage * SLICE;
                barrier_wait(full + 8 * stage, at / STAGES & 1);
                const u64 left = swizzled(from + part * 64 * LINE), right = swizzled(from + SLICE_X);
                products_begin();
#pragma unroll
                for (int k = 0; k < LINE / 32; ++k) Wgmma<D, COLUMNS>::of(d, left + 2 * k, right + 2 * k, s > 0 || k > 0);
                products_end();
                // The slice before is multiplied now, and its place in the ring free.
                products_wait<1>();
                if (s > 0 && lane == 0) barrier_arrive(empty + 8 * ((at - 1) % STAGES));
            }
            products_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * ((at - 1) % STAGES));
            products_done<COLUMNS / 2>(d);
            const int top = first + part * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = top + 8 * half;
                if (row >= end) continue;
                D::Raw* to = y + (i64)row * columns;
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; ++j) {
                    const int c = column + 8 * j + 2 * (lane % 4);
                    const u32 pair = Mma<D>::pack(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
                    if (!(columns & 1)) {
                        if (c < columns) *(u32*)(to + c) = pair;
                    } else {
                        if (c < columns) to[c] = (D::Raw)pair;
                        if (c + 1 < columns) to[c + 1] = (D::Raw)(pair >> 16);
                    }
                }
            }
        }
        // Rows of no group.
        const i64 behind = (i64)max(offsets[GROUPS], 0) * columns, all = (i64)rows * columns;
        const int own = threadIdx.x - 128, threads = 128 * CONSUMERS;
        for (i64 i = behind + (i64)blockIdx.x * threads + own; i < all; i += (i64)gridDim.x * threads) y[i] = 0;
    }
#endif
}
