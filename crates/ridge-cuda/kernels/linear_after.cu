// What follows a product: a bias, a residual, or the gate of another product. Floor: each operand read and written once.
// Defines: Y, dtype of the product; D of the result; ADD, BIAS (of dtype BIAS_TYPE) and SWIGLU, 0 or 1; WIDE, elements that a thread
// makes at a time, by which rows divide. Numbers: elements, columns.

extern "C" __global__ void linear_after(
    const void* __restrict__ y, const D::Raw* __restrict__ other, const void* __restrict__ bias,
    D::Raw* __restrict__ out, Numbers<2> n
) {
    others_may_begin();
    after_others();
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * WIDE; i < n.v[0]; i += gridDim.x * (i64)blockDim.x * WIDE) {
        const auto product = elements_at<Y, WIDE>((const Y::Raw*)y + i);
        Elements<D, WIDE> others = {}, made;
        if (ADD || SWIGLU) others = elements_at<D, WIDE>(other + i);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            float value = Y::load(product.part[j]);
            if (BIAS) value = value + at<BIAS_TYPE>(bias, i % n.v[1] + j);
            if (SWIGLU) value = value * sigmoid_for<D>(value) * D::load(others.part[j]);
            if (ADD) value = D::load(others.part[j]) + D::wrap(value);
            made.part[j] = D::store(value);
        }
        *(Elements<D, WIDE>*)(out + i) = made;
    }
}
