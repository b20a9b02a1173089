// Products of groups of rows on Hopper's tensor cores, each with a weight of its own; where groups begin is read on the device, and no
// weight of a group without rows is. Rows behind the last group become zeros. Sums are in f32, in the order of depth.
// Floor: the bytes of the weights that groups reach over bandwidth, or the operations of tiles over the rate of tensor cores.
// A block makes tiles of ROWS rows of one group by COLUMNS columns, one after another, the tiles of a group's rows next to each other, so
// that a weight is read from memory once. A warpgroup brings slices of DEPTH into a ring of STAGES: rows of x, which may lie anywhere, by
// copies of 16 bytes, and weights by the copy engine. Weights in blocks come as they are stored, chunks of 256 elements, to a ring of RAW
// stages, by a warpgroup of its own, and DECODERS warpgroups decode them to D into the first ring. Each of CONSUMERS warpgroups multiplies 64 rows of every tile.
// Defines: D, a 16-bit float; GATHERED, 0 or 1: are the rows of x those that `index` names?; CONSUMERS; COLUMNS; STAGES; ATOMS; GROUPS; BLOCKED, 1
// for weights in blocks, with their FORMAT, RAW, DECODERS, warpgroups, and RESIDENT, blocks of a multiprocessor; SCALED, 1 for weights of codes
// with scales, which are decoded as blocks are, with SPAN, elements of a column that share a scale, 0 where all do; GATED, 1 for two weights, whose products of a tile are gated: the first half of a tile's
// columns is of `w`, the gate, and the other of `other`.
// Numbers: rows, rows of x, columns, depth (a multiple of 8, of the block with blocks); with SCALED the scales of a group, columns that share
// some, and those of such columns. For other architectures it is empty, and is not
// launched.

// Elements of depth of a slice: ATOMS times 64, which are 128 bytes of each row or column.
#define DEPTH (64 * ATOMS)
#define LINE 128
#define ROWS (64 * CONSUMERS)
#define SIDES (GATED ? 2 : 1)
// Columns of a tile's results.
#define WIDTH (COLUMNS / SIDES)
#define SLICE_X (ROWS * LINE * ATOMS)
#define SLICE (SLICE_X + COLUMNS * LINE * ATOMS)
// Warpgroups before the consumers, and rows of x that a thread copies 16 bytes of.
#define OTHERS (BLOCKED ? 2 + DECODERS : 1)
#define COPIES (ROWS / 16)
#if !BLOCKED
#define RAW 0
#endif

#if BLOCKED
#define WEIGHT(w) const u8* __restrict__ w
#define CHUNK 256
// 16-byte pieces of a chunk of a column, from the multiple of 16 at or below its address, and bytes from one column to the next: an odd
// number of pieces puts what the lanes of a warp read at once into different banks.
#define PIECES ((FORMAT::BYTES + 15 + 15) / 16)
#define STRIDE ((PIECES | 1) * 16)
#define RAW_BYTES (COLUMNS * STRIDE)
// Columns that a thread decodes groups of.
#define DECODED (COLUMNS / (64 * DECODERS))
#if SCALED
#define ENTRY grouped_codes_sm90
#else
#define ENTRY grouped_blocks_sm90
#endif
#else
#define ENTRY grouped_sm90
#define WEIGHT(w) const __grid_constant__ TensorMap w
#endif

extern "C" __global__ __launch_bounds__(128 * (CONSUMERS + OTHERS), BLOCKED ? RESIDENT : 1) void ENTRY(
    WEIGHT(w),
#if GATED
    WEIGHT(other),
#endif
#if SCALED
    const float* __restrict__ scales,
#endif
    const D::Raw* __restrict__ x, const int* __restrict__ offsets, const int* __restrict__ index, D::Raw* __restrict__ y,
    const Numbers<4 + 3 * SCALED> n
) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * STAGES + 2 * RAW];
    // Tiles of rows before each group.
    __shared__ int before[GROUPS + 1];
    const u32 ring = (shared_address(shared) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
#if BLOCKED
    const u32 raw = ring + STAGES * SLICE;
    // The weight of a line of a tile.
#if GATED
    auto side_of = [&](int line) { return line < WIDTH ? w : other; };
#else
    auto side_of = [&](int) { return w; };
#endif
#endif
#if BLOCKED
    const u32 raw_full = empty + 8 * STAGES, raw_empty = raw_full + 8 * RAW;
#endif
    const int rows = (int)n.v[0], columns = (int)n.v[2], depth = (int)n.v[3];
    const int across = (columns + WIDTH - 1) / WIDTH, slices = (depth + DEPTH - 1) / DEPTH;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            // The copy of the weight or the warps that decode it, and a thread's copies of x.
            barrier_init(full + 8 * s, (BLOCKED ? 4 * DECODERS : 1) + 128);
            barrier_init(empty + 8 * s, 4 * CONSUMERS);
        }
#if BLOCKED
        for (int s = 0; s < RAW; ++s) {
            barrier_init(raw_full + 8 * s, 128);
            barrier_init(raw_empty + 8 * s, 4 * DECODERS);
        }
#endif
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
        column = rest / own * WIDTH;
    };
    if (threadIdx.x < 128) {
#if !BLOCKED
        if (CONSUMERS > 1) registers_lower<72>();
        if (threadIdx.x == 0) {
            prefetch_map(&w);
#if GATED
            prefetch_map(&other);
#endif
        }
#endif
        const int part = threadIdx.x % 8, line = threadIdx.x / 8;
        u32 at = 0;
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
#if !BLOCKED
                if (threadIdx.x == 0) {
                    barrier_expect(full + 8 * stage, COLUMNS * LINE);
                    copy_box(to + SLICE_X, &w, full + 8 * stage, s * DEPTH, group * columns + column);
#if GATED
                    copy_box(to + SLICE_X + WIDTH * LINE, &other, full + 8 * stage, s * DEPTH, group * columns + column);
#endif
                }
#endif
#pragma unroll
                for (int i = 0; i < COPIES; ++i) {
                    const int r = line + 16 * i;
                    // Rows of x that are out of range are zeros; those of no group are not stored.
                    if (first + r >= end) continue;
#pragma unroll
                    for (int a = 0; a < ATOMS; ++a) {
                        const int k = s * DEPTH + 64 * a;
                        const bool real = k + part * 8 < depth && from[i] != nullptr;
                        copy_async(to + (a * ROWS + r) * LINE + ((part ^ (r & 7)) * 16), real ? from[i] + k : x, real);
                    }
                }
                copies_arrive(full + 8 * stage);
            }
        }
        copies_wait<0>();
#if BLOCKED
    } else if (warpgroup == 1) {
        const int own = threadIdx.x - 128, chunks = (depth + CHUNK - 1) / CHUNK;
        const i64 row_bytes = (i64)depth * FORMAT::BYTES / CHUNK;
        u32 at = 0;
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            int group, first, end, column;
            find(t, group, first, end, column);
            for (int c = 0; c < chunks; ++c, ++at) {
                const u32 stage = at % RAW, to = raw + stage * RAW_BYTES;
                const int bytes = min(FORMAT::BYTES, (int)(row_bytes - (i64)c * FORMAT::BYTES));
                barrier_wait(raw_empty + 8 * stage, ~(at / RAW) & 1);
                for (int i = own; i < COLUMNS * PIECES; i += 128) {
                    const int line = i / PIECES, piece = i % PIECES;
                    const u8* from = side_of(line)
                        + ((i64)group * columns + min(column + line % WIDTH, columns - 1)) * row_bytes + (i64)c * FORMAT::BYTES;
                    const u8* begin = from - ((u64)from & 15);
                    // Nothing behind the column, which may be the end of the weight, is read.
                    const int left = (int)(from + bytes - begin) - 16 * piece;
                    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                        :: "r"(to + line * STRIDE + 16 * piece), "l"(left > 0 ? begin + 16 * piece : begin),
                           "r"(min(16, max(left, 0))) : "memory");
                }
                copies_arrive(raw_full + 8 * stage);
            }
        }
        copies_wait<0>();
    } else if (warpgroup < OTHERS) {
        const int groups = depth / 32, g = threadIdx.x % 2;
        const i64 row_bytes = (i64)depth * FORMAT::BYTES / CHUNK;
        u32 at = 0, chunk_at = 0;
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            int group, first, end, column;
            find(t, group, first, end, column);
#if SCALED
            const float* of_column[DECODED];
#pragma unroll
            for (int i = 0; i < DECODED; ++i) {
                const int line = i * 64 * DECODERS + (threadIdx.x - 256) / 2;
                of_column[i] = scales + group * n.v[4] + min(column + line, columns - 1) / (int)n.v[5] * n.v[6];
            }
#endif
            for (int s = 0; s < slices; ++s, ++at) {
                const u32 stage = at % STAGES, to = ring + stage * SLICE + SLICE_X, from = chunk_at % RAW;
                const int within = s % (CHUNK / DEPTH);
#if SCALED
                // On their way while the codes are waited for.
                float factor[DECODED][ATOMS];
#pragma unroll
                for (int i = 0; i < DECODED; ++i)
#pragma unroll
                    for (int a = 0; a < ATOMS; ++a) {
                        const int k = min(s * DEPTH + 64 * a + 32 * g, depth - 1);
                        factor[i][a] = __ldg(of_column[i] + (SPAN ? k / (SPAN ? SPAN : 1) : 0));
                    }
#endif
                if (within == 0) barrier_wait(raw_full + 8 * from, chunk_at / RAW & 1);
                barrier_wait(empty + 8 * stage, ~(at / STAGES) & 1);
                // A thread has one of two groups of a column.
#pragma unroll
                for (int i = 0; i < DECODED; ++i) {
                    const int line = i * 64 * DECODERS + (threadIdx.x - 256) / 2;
                    // Where a column begins within 16 bytes.
                    const u32 place = (u32)(group * columns + min(column + line % WIDTH, columns - 1)) * (u32)row_bytes
                        + s / (CHUNK / DEPTH) * FORMAT::BYTES;
                    const u32 skew = (u32)(u64)side_of(line) + place & 15;
                    const u8* chunk = shared + (raw - shared_address(shared)) + from * RAW_BYTES + line * STRIDE + skew;
#pragma unroll
                    for (int a = 0; a < ATOMS; ++a) {
                        uint4 values[4];
#if SCALED
                        FORMAT::decoded<D>(chunk, 2 * (ATOMS * within + a) + g, factor[i][a], values);
#else
                        Group<FORMAT, D>::decoded(chunk, 2 * (ATOMS * within + a) + g, values);
#endif
#pragma unroll
                        for (int part = 0; part < 4; ++part) {
                            // What lies behind the last group is nothing.
                            if (2 * (ATOMS * s + a) + g >= groups) values[part] = make_uint4(0, 0, 0, 0);
                            store_shared(to + (a * COLUMNS + line) * LINE + (4 * g + part ^ line & 7) * 16, values[part]);
                        }
                    }
                }
                stores_before_products();
                __syncwarp();
                if (lane == 0) barrier_arrive(full + 8 * stage);
                if (within == CHUNK / DEPTH - 1 || s == slices - 1) {
                    if (lane == 0) barrier_arrive(raw_empty + 8 * from);
                    ++chunk_at;
                }
            }
        }
#endif
    } else {
        if (CONSUMERS > 1 && !BLOCKED) registers_raise<216>();
        const int part = warpgroup - OTHERS;
        u32 at = 0;
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            int group, first, end, column;
            find(t, group, first, end, column);
            float d[COLUMNS / 2];
            for (int s = 0; s < slices; ++s, ++at) {
                const u32 stage = at % STAGES, from = ring + stage * SLICE;
                barrier_wait(full + 8 * stage, at / STAGES & 1);
                // Rows of x were not copied by the copy engine.
                stores_before_products();
                products_begin();
#pragma unroll
                for (int a = 0; a < ATOMS; ++a) {
                    const u64 left = swizzled(from + (a * ROWS + part * 64) * LINE);
                    const u64 right = swizzled(from + SLICE_X + a * COLUMNS * LINE);
#pragma unroll
                    for (int k = 0; k < LINE / 32; ++k)
                        Wgmma<D, COLUMNS>::of(d, left + 2 * k, right + 2 * k, s > 0 || a > 0 || k > 0);
                }
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
                for (int j = 0; j < WIDTH / 8; ++j) {
                    const int c = column + 8 * j + 2 * (lane % 4), at = 4 * j + 2 * half;
#if GATED
                    const u32 pair = Mma<D>::pack(gated<D>(d[at], d[at + COLUMNS / 4]), gated<D>(d[at + 1], d[at + 1 + COLUMNS / 4]));
#else
                    const u32 pair = Mma<D>::pack(d[at], d[at + 1]);
#endif
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
        const int own = threadIdx.x - 128 * OTHERS, threads = 128 * CONSUMERS;
        for (i64 i = behind + (i64)blockIdx.x * threads + own; i < all; i += (i64)gridDim.x * threads) y[i] = 0;
    }
#endif
}
