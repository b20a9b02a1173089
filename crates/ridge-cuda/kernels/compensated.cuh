// A sum and what its roundings lost (Ogita, Rump, Oishi 2005, "Accurate Sum and Dot Product", algorithm 5.3): a sum may cancel to what the
// roundings of its products leave.
struct Compensated {
    float high = 0.0f, low = 0.0f;
    __device__ void add(float x) {
        const float sum = high + x, part = sum - high;
        low += (high - (sum - part)) + (x - part);
        high = sum;
    }
    __device__ void add_product(float a, float b) {
        const float x = a * b;
        low += fmaf(a, b, -x);
        add(x);
    }
    // Adds the sum of the lane whose number differs in bit `lane`.
    __device__ void add_other(int lane) {
        const float other = __shfl_xor_sync(0xffffffff, high, lane);
        low += __shfl_xor_sync(0xffffffff, low, lane);
        add(other);
    }
    __device__ float value() const { return high + low; }
};
