// GELU of a matrix, or the product of its slope there and another matrix, where no product of matrices does it on the way. Floor: each
// matrix read and written once.
// Defines: D of all; SLOPE, 0 or 1: is it the slope by `out`, which is there already? Numbers: elements.

// Of the tangent, sqrt(2 / pi), and of the cube within it.
#define STEEP 0.79788456080286535588f
#define BEND 0.044715f

extern "C" __global__ void gelu(const D::Raw* __restrict__ x, D::Raw* __restrict__ out, Numbers<1> n) {
    others_may_begin();
    after_others();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x) {
        const float v = D::load(x[i]), square = v * v, t = op_tanh(STEEP * v * fmaf(BEND, square, 1.0f));
#if SLOPE
        const float rise = 0.5f * STEEP * (1.0f - t) * (1.0f + t) * fmaf(3.0f * BEND, square, 1.0f);
        out[i] = D::store(D::load(out[i]) * fmaf(v, rise, 0.5f * (1.0f + t)));
#else
        out[i] = D::store(0.5f * v * (1.0f + t));
#endif
    }
}
