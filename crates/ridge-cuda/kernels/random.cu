// A weight of random numbers, the same that the host would make: SplitMix64 (Steele, Lea and Flood 2014) is a function
// of a counter, so each thread makes four elements of one draw. Floor: the weight written once.
// Defines: D. Numbers: elements, the generator's state.

extern "C" __global__ void random_weight(void* __restrict__ out, Numbers<2> n) {
    const i64 elements = n.v[0];
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i * 4 < elements; i += gridDim.x * (i64)blockDim.x) {
        u64 z = (u64)n.v[1] + (u64)(i + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        for (int j = 0; j < 4 && i * 4 + j < elements; ++j) {
            const u32 bits = (u32)(z >> (16 * (3 - j))) & 0xffff;
            const double sum = (double)(bits & 0xff) + (double)(bits >> 8) - 255.0;
            put<D>(out, i * 4 + j, D::wrap((float)(sum * (SCALE))));
        }
    }
}
