// A step of AdamW whose moments are codes of 8 bits with a scale for each block of 256 elements, a warp for each block. Floor:
// parameter, codes and scales read and written once, the gradient read once.
// Defines: BETA1, BETA2, EPS and DECAY, f64; MAPS, the bits of the values of the codes, signed and unsigned, and TREES, those of
// the borders between them as search trees, 512 of each.
// Numbers: blocks. Outputs may be inputs: a warp has read all of its block before it writes.

struct Factors { float correct1, correct2, lr, keep; };
struct Tables { float map[512], tree[512]; };

__device__ const u32 VALUES[1024] = {MAPS, TREES};

// A lane has eight elements: four of each half of a block.
struct __align__(4) FourCodes { u8 x[4]; };

__device__ inline void decode(float* x, const u8* codes, i64 at, float scale, const float* map) {
    for (int half = 0; half < 2; ++half) {
        const FourCodes four = *(const FourCodes*)(codes + at + 128 * half);
        for (int i = 0; i < 4; ++i) x[4 * half + i] = map[four.x[i]] * scale;
    }
}

// The codes nearest to x over the largest magnitude of the block, which becomes the scale.
__device__ inline void encode(const float* x, u8* codes, i64 at, float* scale, const float* tree) {
    float most = 0.0f;
    for (int i = 0; i < 8; ++i) most = op_max(most, fabsf(x[i]));
    for (int step = 16; step > 0; step >>= 1) most = op_max(most, __shfl_xor_sync(0xffffffffu, most, step));
    const float divisor = op_max(most, 1.17549435e-38f);
    int node[8];
    float relative[8];
    for (int i = 0; i < 8; ++i) node[i] = 1, relative[i] = x[i] / divisor;
#pragma unroll
    for (int level = 0; level < 8; ++level)
#pragma unroll
        for (int i = 0; i < 8; ++i) node[i] = 2 * node[i] + (relative[i] > tree[node[i]]);
    for (int half = 0; half < 2; ++half) {
        FourCodes four;
        for (int i = 0; i < 4; ++i) four.x[i] = (u8)node[4 * half + i];
        *(FourCodes*)(codes + at + 128 * half) = four;
    }
    if ((threadIdx.x & 31) == 0) *scale = most;
}

extern "C" __global__ __launch_bounds__(256) void adamw8(
    const float* p, const float* g, const u8* m, const float* m_scale, const u8* v, const float* v_scale,
    const float* lr, const float* step, float* next_p, u8* next_m, float* next_m_scale, u8* next_v, float* next_v_scale,
    Numbers<1> n
) {
    __shared__ Factors shared;
    __shared__ Tables tables;
    for (int i = threadIdx.x; i < 512; i += blockDim.x) {
        tables.map[i] = __uint_as_float(VALUES[i]);
        tables.tree[i] = __uint_as_float(VALUES[512 + i]);
    }
    if (threadIdx.x == 0) {
        // In f64, since the differences lose digits where a beta is close to 1.
        shared.correct1 = (float)(1.0 / (1.0 - pow(BETA1, (double)*step)));
        shared.correct2 = (float)(1.0 / (1.0 - pow(BETA2, (double)*step)));
        shared.lr = *lr;
        shared.keep = (float)(1.0 - (double)*lr * DECAY);
    }
    __syncthreads();
    const Factors f = shared;
    const i64 warps = (i64)gridDim.x * (blockDim.x >> 5);
    for (i64 block = (blockIdx.x * (i64)blockDim.x + threadIdx.x) >> 5; block < n.v[0]; block += warps) {
        const i64 at = block * 256 + (threadIdx.x & 31) * 4;
        alignas(16) float ps[8], gs[8];
        float ms[8], vs[8];
        for (int half = 0; half < 2; ++half) {
            *(float4*)(ps + 4 * half) = *(const float4*)(p + at + 128 * half);
            *(float4*)(gs + 4 * half) = *(const float4*)(g + at + 128 * half);
        }
        decode(ms, m, at, m_scale[block], tables.map);
        decode(vs, v, at, v_scale[block], tables.map + 256);
        for (int i = 0; i < 8; ++i) {
            // Rounded as the op has it, since a code may hang on a bit.
            ms[i] = ms[i] * (float)BETA1 + gs[i] * (float)(1.0 - BETA1);
            vs[i] = vs[i] * (float)BETA2 + gs[i] * gs[i] * (float)(1.0 - BETA2);
            const float direction = ms[i] * f.correct1 / (sqrtf(vs[i] * f.correct2) + (float)EPS);
            ps[i] = fmaf(ps[i], f.keep, -(f.lr * direction));
        }
        for (int half = 0; half < 2; ++half) *(float4*)(next_p + at + 128 * half) = *(float4*)(ps + 4 * half);
        encode(ms, next_m, at, next_m_scale + block, tables.tree);
        encode(vs, next_v, at, next_v_scale + block, tables.tree + 256);
    }
}
