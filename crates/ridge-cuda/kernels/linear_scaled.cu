// Products of codes with scales by codes with scales, of any granularity: for shapes and GPUs that cuBLASLt has nothing for.
// Floor: not aimed at; a warp makes an element of y. Both operands are decoded to f32 as the meaning has it.
// Defines: X and W of codes; Y of y; B of the bias; BIAS, 0 or 1. Numbers: rows, columns, depth; then for x and for w rows
// and columns that share a scale, and scales of a row of them.
extern "C" __global__ void linear_scaled(
    const X::Raw* __restrict__ x, const float* __restrict__ xs, const W::Raw* __restrict__ w, const float* __restrict__ ws,
    const B::Raw* __restrict__ bias, Y::Raw* __restrict__ y, Numbers<9> n
) {
    const i64 columns = n.v[1], depth = n.v[2], all = n.v[0] * columns, warps = blockDim.x >> 5;
    const int lane = threadIdx.x & 31;
    for (i64 at = blockIdx.x * warps + (threadIdx.x >> 5); at < all; at += gridDim.x * warps) {
        const i64 row = at / columns, column = at % columns;
        const float* of_x = xs + row / n.v[3] * n.v[5];
        const float* of_w = ws + column / n.v[6] * n.v[8];
        float sum = 0.0f;
        for (i64 k = lane; k < depth; k += 32) {
            float a = (float)X::load(x[row * depth + k]) * of_x[k / n.v[4]];
            float b = (float)W::load(w[column * depth + k]) * of_w[k / n.v[7]];
            sum = fmaf(a, b, sum);
        }
        for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) y[at] = Y::store(BIAS ? sum + B::load(bias[column]) : sum);
    }
}
