// GELU of a matrix in its tanh approximation, or a matrix times the derivative there, where no product does it in its epilogue. Floor: each
// matrix read and written once.
// Defines: D of all; WIDE, elements of a thread at a time; BACKWARD: 0 writes GELU of `x` to `out`, 1 multiplies `out` by the derivative at
// `x`. Numbers: groups of WIDE elements.

#define SQRT_2_OVER_PI 0.79788456080286535588f
#define CUBIC 0.044715f

struct alignas(WIDE * sizeof(D::Raw)) Group { D::Raw part[WIDE]; };

extern "C" __global__ void gelu(const Group* __restrict__ x, Group* __restrict__ out, Numbers<1> n) {
    others_may_begin();
    after_others();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x) {
        const Group at = x[i];
#if BACKWARD
        Group y = out[i];
#else
        Group y;
#endif
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const float v = D::load(at.part[j]), square = v * v, t = op_tanh(SQRT_2_OVER_PI * v * fmaf(CUBIC, square, 1.0f));
#if BACKWARD
            // tanh is 1 long before the square overflows.
            const float steep = fmaf(3.0f * CUBIC, fminf(square, 1.0e4f), 1.0f);
            const float slope = 0.5f * SQRT_2_OVER_PI * (1.0f - t) * (1.0f + t) * steep;
            y.part[j] = D::store(D::load(y.part[j]) * fmaf(v, slope, 0.5f * (1.0f + t)));
#else
            y.part[j] = D::store(0.5f * v * (1.0f + t));
#endif
        }
        out[i] = y;
    }
}
