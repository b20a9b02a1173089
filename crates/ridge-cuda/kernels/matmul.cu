// A product of matrices, over leading batches: [m, k] x [k, n], either side by strides, so that transposed operands are
// read where they lie. Any dtypes; floats are multiplied and summed in f32, integers in 64 bits.
// Floor: 2 m n k FLOPs over the f32 peak, or the bytes of both sides and the result over bandwidth. A block makes a tile
// of TILE x TILE from slices of DEPTH that pass through shared memory, a thread PART x PART of it in registers.
// Numbers: batches, m, n, k; strides of a by batch, row, depth; of b by batch, depth, column.
// Types A, B and OUT come from the instance.

#define TILE 64
#define DEPTH 16
#define PART 4

template <bool F> struct Accumulate;
template <> struct Accumulate<true> {
    typedef float S;
    template <class D> __device__ static float load(const void* p, i64 i) { return cast<F32, D>(at<D>(p, i)); }
    __device__ static float step(float a, float b, float sum) { return fmaf(a, b, sum); }
    __device__ static OUT::Value done(float x) { return cast<OUT, F32>(x); }
};
template <> struct Accumulate<false> {
    typedef i64 S;
    template <class D> __device__ static i64 load(const void* p, i64 i) { return (i64)at<D>(p, i); }
    __device__ static i64 step(i64 a, i64 b, i64 sum) { return op_add(sum, op_mul(a, b)); }
    __device__ static OUT::Value done(i64 x) { return cast<OUT, I64>(x); }
};
typedef Accumulate<A::is_float || B::is_float> Acc;
// Sums in 64 bits take twice the registers.
const int UNROLL = A::is_float || B::is_float ? 4 : 1;
typedef Acc::S S;

extern "C" __global__ __launch_bounds__(256, 1) void matmul(
    const void* __restrict__ a, const void* __restrict__ b, void* __restrict__ out, Numbers<10> n
) {
    __shared__ S as[DEPTH][TILE + 1], bs[DEPTH][TILE + 1];
    const i64 rows = n.v[1], columns = n.v[2], depth = n.v[3];
    // In 32 bits, which as many tiles as fit a memory never leave: a division of 64 bits is a call that spills.
    const u32 row_tiles = (u32)((rows + TILE - 1) / TILE), column_tiles = (u32)((columns + TILE - 1) / TILE);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    // The axis along which neighbouring threads read neighbouring elements.
    const bool a_by_depth = n.v[6] == 1, b_by_depth = n.v[8] == 1 && n.v[9] != 1;
    for (u32 tile = blockIdx.x; tile < (u32)n.v[0] * row_tiles * column_tiles; tile += gridDim.x) {
        const u32 line = tile / column_tiles;
        const i64 batch = line / row_tiles;
        const i64 row0 = (i64)(line % row_tiles) * TILE, column0 = (i64)(tile % column_tiles) * TILE;
        const i64 a0 = batch * n.v[4], b0 = batch * n.v[7];
        S sums[PART][PART];
        for (int i = 0; i < PART; ++i) for (int j = 0; j < PART; ++j) sums[i][j] = 0;
        for (i64 k0 = 0; k0 < depth; k0 += DEPTH) {
#pragma unroll 2
            for (int e = threadIdx.x; e < TILE * DEPTH; e += 256) {
                const int k = a_by_depth ? e % DEPTH : e / TILE, r = a_by_depth ? e / DEPTH : e % TILE;
                const bool in = row0 + r < rows && k0 + k < depth;
                as[k][r] = in ? Acc::load<A>(a, a0 + (row0 + r) * n.v[5] + (k0 + k) * n.v[6]) : (S)0;
            }
#pragma unroll 2
            for (int e = threadIdx.x; e < TILE * DEPTH; e += 256) {
                const int k = b_by_depth ? e % DEPTH : e / TILE, c = b_by_depth ? e / DEPTH : e % TILE;
                const bool in = column0 + c < columns && k0 + k < depth;
                bs[k][c] = in ? Acc::load<B>(b, b0 + (k0 + k) * n.v[8] + (column0 + c) * n.v[9]) : (S)0;
            }
            __syncthreads();
#pragma unroll UNROLL
            for (int k = 0; k < DEPTH; ++k) {
                S x[PART], y[PART];
                for (int i = 0; i < PART; ++i) { x[i] = as[k][ty + 16 * i]; y[i] = bs[k][tx + 16 * i]; }
                for (int i = 0; i < PART; ++i)
                    for (int j = 0; j < PART; ++j) sums[i][j] = Acc::step(x[i], y[j], sums[i][j]);
            }
            __syncthreads();
        }
        for (int i = 0; i < PART; ++i)
            for (int j = 0; j < PART; ++j) {
                const i64 row = row0 + ty + 16 * i, column = column0 + tx + 16 * j;
                if (row >= rows || column >= columns) continue;
                const i64 place = (batch * rows + row) * columns + column;
                OUT::Value sum = Acc::done(sums[i][j]);
                if (ADDED) sum = (OUT::Value)(sum + at<OUT>(out, place));
                put<OUT>(out, place, sum);
            }
    }
}
