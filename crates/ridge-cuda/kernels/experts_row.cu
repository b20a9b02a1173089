// Products of single rows by weights of their groups, in block formats: experts of a few tokens. `digits.cuh`, and `blocks_bulk.cuh` or
// `blocks_ring.cuh`.
// Floor: the bytes of the weights of groups that have rows over bandwidth; not far from it, the instructions that take codes out of their bits.
// Blocks stay, and make tiles of 16 columns of a row in turn.
// Defines: D of x and results; DEPTH, a multiple of 32; COLUMNS of a weight; ROWS; FORMATS, the format; WARPS; STAGED, the bytes of the digits
// of x; BULK, 1 with SLOTS or 0 with STAGES; SWIGLU, 1 where a gate and what it is multiplied with are made; GATHERED, 1 where rows of x are
// those that an index names; ONE_X, 1 where x has one row;
// BIAS, 1 where each group has a bias, of BIAS_TYPE, for each weight; CLAMPED, 1 where the gate is `clamped_swiglu` of ALPHA and LIMIT;
// SUM, 1 where rows are added up by weight for each of TOKENS tokens, TOP_K of them each, and with ADD 1 to r. GROUPED is 1.
// Numbers: rows of x, groups. Of several weights the first is the gate.

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

#if CLAMPED
__device__ inline float through_gate(float gate, float up) {
    const float g = op_min(gate, LIMIT), u = op_min(op_max(up, -LIMIT), LIMIT);
    return (u + 1.0f) * (g * op_sigmoid(g * ALPHA));
}
#else
__device__ inline float through_gate(float gate, float up) { return gated<D>(gate, up); }
#endif

// The results of tiles.
struct Results {
    const int *group_of, *row_of;
#if BIAS
    const BIAS_TYPE::Raw* bias[SIDES];
#endif
#if SUM
    float* y;
#else
    D::Raw* y;
#endif
    struct Biases { float of[SIDES]; };
    __device__ Biases ahead(const Tile& tile, i64 column) const {
        Biases biases = {};
#if BIAS
        const i64 at = (i64)group_of[tile.row] * COLUMNS + column;
#pragma unroll
        for (int s = 0; s < SIDES; ++s)
            if (column < COLUMNS) biases.of[s] = BIAS_TYPE::load(bias[s][at]);
#endif
        return biases;
    }
    __device__ void operator()(const Tile& tile, i64 column, const float* sums, const Biases& biases, bool mine) const {
        float value[SIDES];
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            value[s] = row_of[tile.row] < 0 ? 0.0f : sums[s];
            if (BIAS) value[s] = D::wrap(D::wrap(value[s]) + biases.of[s]);
        }
        const float result = SWIGLU ? through_gate(value[0], value[SIDES - 1]) : value[0];
#if SUM
        if (mine) y[tile.row * COLUMNS + column] = D::wrap(result);
#else
        if (mine) y[tile.row * COLUMNS + column] = D::store(result);
#endif
    }
    __device__ void operator()(const Tile& tile, i64 column, const float* sums, bool mine) const {
        (*this)(tile, column, sums, ahead(tile, column), mine);
    }
};

#if SUM
// The sums of 16 columns from `column` on, by a warp, of values that blocks have stored.
__device__ inline void add_up(
    const float* values, const int* places, const float* weights, const D::Raw* r, D::Raw* out, i64 column, int used
) {
    const int lane = threadIdx.x & 31;
    const i64 c = column + (lane & 15);
    if (c >= COLUMNS) return;
    for (int token = lane >> 4; token < TOKENS; token += 2) {
        float value[TOP_K], weight[TOP_K];
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            const int place = places[token * TOP_K + k];
            weight[k] = weights[token * TOP_K + k];
            // A row of no group is zeros.
            const bool is = place >= 0 && place < ROWS;
            value[k] = is && place < used ? __ldcg(values + place * COLUMNS + c) : 0.0f;
            if (!is) weight[k] = 0.0f;
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) sum = fmaf(weight[k], value[k], sum);
        const i64 at = token * COLUMNS + c;
        if (ADD) sum = D::load(r[at]) + D::wrap(sum);
        out[at] = D::store(sum);
    }
}
#endif

extern "C" __global__ __launch_bounds__((WARPS + BULK) * 32, BULK ? 1 : 16 / WARPS) void grouped_blocks_row(
    const D::Raw* __restrict__ x, const u8* __restrict__ w,
#if SWIGLU
    const u8* __restrict__ other,
#endif
    const int* __restrict__ offsets, const int* __restrict__ index, D::Raw* __restrict__ y,
#if BIAS
    const BIAS_TYPE::Raw* __restrict__ bias,
#if SWIGLU
    const BIAS_TYPE::Raw* __restrict__ other_bias,
#endif
#endif
#if SUM
    const int* __restrict__ places, const float* __restrict__ weights, const D::Raw* __restrict__ r, float* values, u32* stored,
#endif
    Numbers<2> n
) {
    extern __shared__ uint4 shared[];
    __shared__ int group_of[ROWS], row_of[ROWS];
#if SUM
    __shared__ int places_of[ROWS];
    __shared__ float weight_of[ROWS];
#endif
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, groups = (int)n.v[1];
    const u8* const by[SIDES] = {w
#if SWIGLU
        , other
#endif
    };
    others_may_begin();
    after_others();
    const int in_groups = offsets[groups];
    for (int row = warp; row < ROWS; row += WARPS) {
        int below = 0;
        for (int g = lane; g < groups; g += 32) below += offsets[g + 1] <= row;
        const int from = GATHERED ? index[row] : row;
        group_of[row] = __reduce_add_sync(ALL, below);
        row_of[row] = from < n.v[0] ? from : -1;
#if SUM
        places_of[row] = places[row];
        weight_of[row] = weights[row];
#endif
    }
    __syncthreads();
    const int used = n.v[0] > 0 ? min(in_groups, ROWS) : 0, lines = DEPTH / 32, room = (lines + 7) / 8 * 8;
    const int begin = part_of(used * ACROSS, blockIdx.x), end = part_of(used * ACROSS, blockIdx.x + 1), first = begin / ACROSS;
    auto digits_of_row = [&](i64 row) {
        return Digits((u8*)shared + (ONE_X ? 0 : row - first) * room * Digits::GROUP_BYTES, room);
    };
    const Tiles tiles = {by, group_of};
    const Results store = {
        group_of, row_of,
#if BIAS
        {bias
#if SWIGLU
            , other_bias
#endif
        },
#endif
#if SUM
        values
#else
        y
#endif
    };
    over_tiles<FORMATS>(
        tiles, begin, end, (u8*)shared + STAGED,
        [&] {
            for (int row = first; row * ACROSS < end && !(ONE_X && row > first); ++row) {
                Digits digits = digits_of_row(row);
                digits.stage<Bytes<FORMATS>::APART>(x + (ONE_X ? 0 : (i64)max(row_of[row], 0) * DEPTH), lines);
            }
#if BULK
            group_wait(1, WARPS * 32);
#else
            __syncthreads();
#endif
        },
        [&](const Tile& tile) { return digits_of_row(tile.row); },
        store
    );
#if SUM
    // The block that makes the last of a tile's rows adds them up.
    __syncthreads();
    for (int at = begin + warp; at < end; at += WARPS + BULK) {
        const i64 column = tiles.at(at).column;
        u32* counter = stored + column / 16;
        bool last = false;
        if (lane == 0) {
            __threadfence();
            last = atomicAdd(counter, 1) == used - 1;
            if (last) *counter = 0;
            __threadfence();
        }
        if (__any_sync(ALL, last)) add_up(values, places_of, weight_of, r, y, column, used);
    }
    if (used == 0 && warp == 0)
        for (int tile = blockIdx.x; tile < ACROSS; tile += gridDim.x) add_up(values, places_of, weight_of, r, y, tile * 16, 0);
#else
    // Rows of no group.
    for (int i = used * COLUMNS + blockIdx.x * ((WARPS + BULK) * 32) + threadIdx.x; i < ROWS * COLUMNS; i += gridDim.x * (WARPS + BULK) * 32)
        y[i] = D::store(0.0f);
#endif
}
