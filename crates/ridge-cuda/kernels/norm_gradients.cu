// The whole gradient of layer norm or RMS norm: the cotangent of the input, alone or added to another, and the sums over all
// rows that come to the weight and to biases. Floor: each row read and written once.
// Blocks stay and take rows in turn. THREADS make a row, which they copy to shared memory STAGES rows ahead; each thread owns
// columns and keeps their sums in registers. Blocks' sums are added by a second launch, so that their order depends on extents alone.
// Defines: D of rows; W of the weight; ADD, 0 or 1; CENTRED, whether the mean is taken away (layer norm); OF_DY, OF_OUT, OF_R,
// whether the sum of dy, of the result, of what it is added to is wanted; OUT0 to OUT3, of the sums, in that order after the
// weight's; VECTORS of 16 bytes that a thread holds; THREADS of a row; LINES, rows that a block makes at a time; RESIDENT,
// blocks of a multiprocessor; STAGES.
// Numbers: rows, elements of a row; of the second launch: parts, elements of a row.

#define WIDE (16 / (int)sizeof(D::Raw))
#define OPERANDS (2 + ADD)
#define KINDS (1 + OF_DY + OF_OUT + OF_R)
#define JOIN_LINES 8

// 16 bytes of a row.
union Vector { u32 word[4]; uint4 whole; D::Raw part[WIDE]; };

// Calls `each` with the number of every vector of the row that is this thread's, and with the place of its first element.
template <class F> __device__ inline void over_vectors(int row, F each) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int place = (v * THREADS + (int)threadIdx.x % THREADS) * WIDE;
        if (place < row) each(v, place);
    }
}

// Both sums over the threads of a row. `shared` has two halves, used in turn, so that a barrier for each reduction suffices.
__device__ inline float2 row_sums(float2 x, float2 (*shared)[32], int& half) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        x.x += __shfl_xor_sync(0xffffffffu, x.x, step);
        x.y += __shfl_xor_sync(0xffffffffu, x.y, step);
    }
#if THREADS > 32
    if (threadIdx.x % 32 == 0) shared[half][threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[half][0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) {
        x.x += shared[half][warp].x;
        x.y += shared[half][warp].y;
    }
    half ^= 1;
#endif
    return x;
}

// With n the normalised row and g = dy * weight: scale (g - mean(g) - n mean(g n)), without mean(g) unless CENTRED; added
// to `r` if ADD. `parts`: the sums of each block, [KINDS, blocks, elements of a row].
extern "C" __global__ __launch_bounds__(THREADS * LINES, RESIDENT) void norm_gradients(
    const D::Raw* __restrict__ x, const W::Raw* __restrict__ weight, const D::Raw* __restrict__ dy,
    const D::Raw* __restrict__ r, D::Raw* __restrict__ out, float* __restrict__ parts, float eps, Numbers<2> n
) {
    // Rows on their way, [LINES, STAGES, OPERANDS, VECTORS, THREADS]; a thread reads only what it copied itself.
    extern __shared__ uint4 ring[];
    __shared__ float2 shared[2][32];
    others_may_begin();
    after_others();
    const int row = (int)n.v[1];
    const u32 own = shared_address(ring)
        + (threadIdx.x / THREADS * (STAGES * OPERANDS * VECTORS * THREADS) + threadIdx.x % THREADS) * 16;
    const auto spot = [&](int stage, int operand, int v) {
        return own + ((stage * OPERANDS + operand) * VECTORS + v) * (THREADS * 16);
    };
    const auto copy = [&](i64 line, int stage) {
        if (line < n.v[0]) {
            over_vectors(row, [&](int v, int place) {
                const i64 from = line * row + place;
                copy_async(spot(stage, 0, v), x + from, true);
                copy_async(spot(stage, 1, v), dy + from, true);
#if ADD
                copy_async(spot(stage, 2, v), r + from, true);
#endif
            });
        }
        copies_end();
    };

    float sum[KINDS][VECTORS][WIDE] = {};
    const i64 step = gridDim.x * (i64)LINES;
    i64 line = blockIdx.x * (i64)LINES + threadIdx.x / THREADS;
    int half = 0, stage = 0;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) copy(line + s * step, s);
    for (; line < n.v[0]; line += step) {
        copies_wait<STAGES - 1>();
        // x, later without its mean. The cotangent is read from shared memory again each time.
        float held[VECTORS][WIDE];
        float2 total = {0.0f, 0.0f};
        over_vectors(row, [&](int v, int place) {
            Vector a;
            load_words<4>(a.word, spot(stage, 0, v));
#pragma unroll
            for (int i = 0; i < WIDE; ++i) held[v][i] = D::load(a.part[i]);
#if CENTRED
            Vector b;
            load_words<4>(b.word, spot(stage, 1, v));
            const Elements<W, WIDE> w = elements_at<W, WIDE>(weight + place);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                total.x += held[v][i];
                total.y = fmaf(D::load(b.part[i]), W::load(w.part[i]), total.y);
            }
#endif
        });
#if CENTRED
        total = row_sums(total, shared, half);
#endif
        const float mean = total.x / (float)row, all = total.y / (float)row;
        total = {0.0f, 0.0f};
        over_vectors(row, [&](int v, int place) {
            Vector b;
            load_words<4>(b.word, spot(stage, 1, v));
            const Elements<W, WIDE> w = elements_at<W, WIDE>(weight + place);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                held[v][i] -= mean;
                total.x = fmaf(held[v][i], held[v][i], total.x);
                total.y = fmaf(D::load(b.part[i]) * W::load(w.part[i]), held[v][i], total.y);
            }
        });
        total = row_sums(total, shared, half);
        const float scale = op_rsqrt(total.x / (float)row + eps), along = total.y * scale / (float)row;
        over_vectors(row, [&](int v, int place) {
            Vector b, o;
            load_words<4>(b.word, spot(stage, 1, v));
#if ADD
            Vector c;
            load_words<4>(c.word, spot(stage, 2, v));
#endif
            const Elements<W, WIDE> w = elements_at<W, WIDE>(weight + place);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                const float cotangent = D::load(b.part[i]), normed = held[v][i] * scale;
                sum[0][v][i] = fmaf(cotangent, normed, sum[0][v][i]);
                if (OF_DY) sum[OF_DY][v][i] += cotangent;
                float dx = D::wrap((cotangent * W::load(w.part[i]) - all - normed * along) * scale);
#if ADD
                const float other = D::load(c.part[i]);
                if (OF_R) sum[OF_DY + OF_OUT + OF_R][v][i] += other;
                dx = D::wrap(other + dx);
#endif
                if (OF_OUT) sum[OF_DY + OF_OUT][v][i] += dx;
                o.part[i] = D::store(dx);
            }
            *(uint4*)(out + line * row + place) = o.whole;
        });
        copy(line + STAGES * step, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // The lines of a block, in their order.
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind) {
        float* part = parts + (kind * (i64)gridDim.x + blockIdx.x) * row;
#if LINES > 1
        float* room = (float*)ring;
        __syncthreads();
        over_vectors(row, [&](int v, int place) {
#pragma unroll
            for (int i = 0; i < WIDE; ++i) room[threadIdx.x / THREADS * row + place + i] = sum[kind][v][i];
        });
        __syncthreads();
        for (int column = threadIdx.x; column < row; column += THREADS * LINES) {
            float joined = room[column];
#pragma unroll
            for (int l = 1; l < LINES; ++l) joined += room[l * row + column];
            part[column] = joined;
        }
#else
        over_vectors(row, [&](int v, int place) {
#pragma unroll
            for (int i = 0; i < WIDE; ++i) part[place + i] = sum[kind][v][i];
        });
#endif
    }
}

// Adds the parts of each kind: a block for 32 columns of one.
extern "C" __global__ __launch_bounds__(32 * JOIN_LINES) void norm_gradients_join(
    const float* __restrict__ parts, void* __restrict__ out0, void* __restrict__ out1, void* __restrict__ out2,
    void* __restrict__ out3, Numbers<2> n
) {
    __shared__ float sums[JOIN_LINES][32];
    others_may_begin();
    after_others();
    const int line = threadIdx.x / 32, lane = threadIdx.x % 32, kind = blockIdx.y;
    const i64 column = blockIdx.x * (i64)32 + lane;
    const float* own = parts + kind * n.v[0] * n.v[1] + column;
    float sum = 0.0f;
    if (column < n.v[1])
#pragma unroll 16
        for (i64 part = line; part < n.v[0]; part += JOIN_LINES) sum += own[part * n.v[1]];
    sums[line][lane] = sum;
    __syncthreads();
    if (line != 0 || column >= n.v[1]) return;
    for (int l = 1; l < JOIN_LINES; ++l) sum += sums[l][lane];
    if (kind == 0) put<OUT0>(out0, column, sum);
    if (kind == 1) put<OUT1>(out1, column, sum);
    if (kind == 2) put<OUT2>(out2, column, sum);
    if (kind == 3) put<OUT3>(out3, column, sum);
}
