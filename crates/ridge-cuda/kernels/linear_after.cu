// What follows a product: a bias, a residual, or the gate of another product. Floor: each operand read and written once.
// Defines: Y, dtype of the product; D of the result; ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU, 0 or 1.
// Numbers: elements, columns.

extern "C" __global__ void linear_after(
    const void* __restrict__ y, const D::Raw* __restrict__ other, const void* __restrict__ bias,
    D::Raw* __restrict__ out, Numbers<2> n
) {
    others_may_begin();
    after_others();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n.v[0]; i += gridDim.x * (i64)blockDim.x) {
        float value = at<Y>(y, i);
        if (BIAS) value = value + at<BIAS_TYPE>(bias, i % n.v[1]);
        if (SWIGLU) value = value * op_sigmoid(value) * D::load(other[i]);
        if (ADD) value = D::load(other[i]) + D::wrap(value);
        out[i] = D::store(value);
    }
}
