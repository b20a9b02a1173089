// A product of 16-bit floats on Hopper's tensor cores: [m, k] x [n, k]^T, summed in f32 in the order of k.
// Floor: 2 m n k FLOPs over the tensor cores' peak, or the bytes of both sides and the result over bandwidth.
// A block makes tiles of ROWS x COLUMNS, one after another: the first warp copies slices of DEPTH of both sides into a
// ring of STAGES, and each of CONSUMERS warpgroups multiplies 64 rows of every tile or, with ALTERNATE, every other tile,
// so that one multiplies while the other stores. Neighbouring tiles share rows, so that L2 holds
// what they read. With SWIGLU the columns of a tile are half of one matrix and half of another, gate and value.
// Numbers: m, n, k. D, CONSUMERS, COLUMNS, STAGES, ALTERNATE, ADD, SWIGLU and OUT_WIDE, whether the result is in
// f32, come from the instance; n and k divide by 8. For other architectures it is empty, and is not launched.

#define DEPTH 64
#define GROUP 8
#define PARTS (ALTERNATE ? 2 : 1)
#define ROWS (64 * (ALTERNATE ? PARTS : CONSUMERS))
#define WIDTH (SWIGLU ? COLUMNS / 2 : COLUMNS)
#define SLICE_A (ROWS * DEPTH * 2)
#define SLICE (SLICE_A + COLUMNS * DEPTH * 2)

__device__ inline u32 pack(float low, float high) { return Mma<D>::pack(low, high); }
__device__ inline float low(u32 x) { return D::load((u16)x); }
__device__ inline float high(u32 x) { return D::load((u16)(x >> 16)); }

__device__ inline float gated(float gate, float up) { return gate * op_sigmoid(gate) * up; }

// Where tile `t` begins: rows in groups, columns within a group.
struct Tiles {
    u32 rows, columns;
    __device__ Tiles(i64 m, i64 n) : rows((u32)((m + ROWS - 1) / ROWS)), columns((u32)((n + WIDTH - 1) / WIDTH)) {}
    __device__ u32 all() const { return rows * columns; }
    __device__ void of(u32 t, int& row, int& column) const {
        const u32 group = t / (GROUP * columns), rest = t - group * GROUP * columns;
        const u32 high = min(rows - group * GROUP, (u32)GROUP);
        row = (int)((group * GROUP + rest % high) * ROWS);
        column = (int)(rest / high * WIDTH);
    }
};

// A warpgroup's sums to memory.
__device__ inline void store(const float* d, void* out, const void* r, i64 row, i64 column, i64 m, i64 n, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i64 at = row + lane / 4 + 8 * half;
#if OUT_WIDE
#pragma unroll
        for (int j = 0; j < WIDTH / 8; ++j) {
            const i64 c = column + 8 * j + 2 * (lane % 4);
            const float* s = d + 4 * j + 2 * half;
            if (at < m && c < n) *(float2*)((float*)out + at * n + c) = make_float2(s[0], s[1]);
        }
#else
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j += 4) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* s = d + 4 * (j + i) + 2 * half;
                v[i] = pack(s[0], s[1]);
#if SWIGLU
                const u32 up = pack(s[WIDTH / 2], s[WIDTH / 2 + 1]);
                v[i] = pack(gated(low(v[i]), low(up)), gated(high(v[i]), high(up)));
#endif
            }
            quad_transpose(v, lane);
            const i64 c = column + 8 * (j + lane % 4);
            if (at < m && c < n) {
#if ADD
                const uint4 x = *(const uint4*)((const u16*)r + at * n + c);
                const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = pack(low(w[i]) + low(v[i]), high(w[i]) + high(v[i]));
#endif
                *(uint4*)((u16*)out + at * n + c) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
#endif
    }
}

extern "C" __global__ __launch_bounds__(128 * (CONSUMERS + 1), 1) void gemm_sm90(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
#if SWIGLU
    const __grid_constant__ TensorMap up,
#endif
    void* __restrict__ out, const void* __restrict__ r, Numbers<3> n
) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * STAGES + 2];
    const u32 ring = (shared_address(shared) + 1023) & ~1023u, full = shared_address(barriers);
    const u32 empty = full + 8 * STAGES, turns_at = empty + 8 * STAGES;
    const Tiles tiles(n.v[0], n.v[1]);
    const int slices = (int)((n.v[2] + DEPTH - 1) / DEPTH);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, ALTERNATE ? 4 : 4 * CONSUMERS);
        }
        for (int g = 0; g < 2; ++g) barrier_init(turns_at + 8 * g, 4);
        barriers_ready();
    }
    __syncthreads();
    others_may_begin();
    after_others();
    if (group == 0) {
#if CONSUMERS > 1
        registers_lower<40>();
#endif
        if (threadIdx.x == 0) {
            prefetch_map(&a);
            prefetch_map(&b);
            u32 at = 0;
            for (u32 t = blockIdx.x; t < tiles.all(); t += gridDim.x) {
                int row, column;
                tiles.of(t, row, column);
                for (int s = 0; s < slices; ++s, ++at) {
                    const u32 stage = at % STAGES, to = ring + stage * SLICE, done = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, ~(at / STAGES) & 1);
                    barrier_expect(done, SLICE);
                    copy_box(to, &a, done, s * DEPTH, row);
                    copy_box(to + SLICE_A, &b, done, s * DEPTH, column);
#if SWIGLU
                    copy_box(to + SLICE_A + WIDTH * DEPTH * 2, &up, done, s * DEPTH, column);
#endif
                }
            }
        }
    } else {
#if CONSUMERS > 1
        registers_raise<232>();
#endif
        // Of tiles in turn, each warpgroup's own, while the other stores; or 64 rows of every tile.
        const int turn = ALTERNATE ? group - 1 : 0, turns = ALTERNATE ? CONSUMERS : 1, part = ALTERNATE ? 0 : group - 1;
        u32 at = turn * slices;
        for (u32 t = blockIdx.x + turn * gridDim.x; t < tiles.all(); t += turns * gridDim.x) {
            int row, column;
            tiles.of(t, row, column);
            float d[PARTS][COLUMNS / 2];
#if ALTERNATE
            // A slice is waited for when the one before it in its place has come: parity tells no more.
            barrier_wait(turns_at + 8 * turn, (t / (turns * gridDim.x) + turn + 1) & 1);
#endif
            for (int s = 0; s < slices; ++s, ++at) {
                const u32 stage = at % STAGES, from = ring + stage * SLICE;
                barrier_wait(full + 8 * stage, at / STAGES & 1);
#if ALTERNATE
                if (s == slices - 1 && lane == 0) barrier_arrive(turns_at + 8 * (turn ^ 1));
#endif
                const u64 x = swizzled(from + part * 64 * DEPTH * 2), w = swizzled(from + SLICE_A);
                products_begin();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; ++k)
#pragma unroll
                    for (int i = 0; i < PARTS; ++i)
                        Wgmma<D, COLUMNS>::of(d[i], x + i * (64 * DEPTH * 2 >> 4) + 2 * k, w + 2 * k, s > 0 || k > 0);
                products_end();
                // The slice before is multiplied now, and its place in the ring free.
                products_wait<1>();
                if (s > 0 && lane == 0) barrier_arrive(empty + 8 * ((at - 1) % STAGES));
            }
            products_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * ((at - 1) % STAGES));
            at += (turns - 1) * slices;
            const i64 first = row + part * 64 + threadIdx.x / 32 % 4 * 16;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                products_done<COLUMNS / 2>(d[i]);
                store(d[i], out, r, first + 64 * i, column, n.v[0], n.v[1], lane);
            }
        }
    }
#endif
}
