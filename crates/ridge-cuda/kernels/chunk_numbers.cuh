// Chunks of CHUNK tokens of the rows of a step, all of which have a number. Numbers: tokens, rows, groups, heads, value, lines of the states' table,
// unit, extra, numbers of chunks. Rows of fewer than LEAST tokens, 16 where it is not defined, are left to another kernel. Chunk c of row r has number
// starts[r] / unit + r * extra + c.

#define CHUNK 64
#ifndef LEAST
#define LEAST 16
#endif

// The sums of the logarithms of decays up to each token of a chunk, by one warp: in f64, since differences of sums are wanted. What is below the
// logarithm of the smallest number leaves nothing, as lower ones do. Tokens before `from` decay by nothing.
__device__ inline void add_up(double* sums, const float* rates, i64 stride, int count, int from = 0) {
    const int lane = threadIdx.x & 31;
    double part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = 2 * lane + i;
        const double rate = t >= from && t < count ? rates[t * stride] : 0.0;
        part[i] = rate < -110.0 ? -110.0 : rate;
    }
    double sum = part[0] + part[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    sums[2 * lane] = sum - part[1];
    sums[2 * lane + 1] = sum;
}
// What the float nearest to the logarithm leaves out is some 1e-6 of a small share.
__device__ inline float kept(double log) {
    const float high = (float)log, share = op_exp(high);
    return fmaf(share, (float)(log - high), share);
}

// Where a block's chunk is: its row's number, its first token and number of tokens.
struct Chunk {
    i64 number, first;
    int count, head, column, columns;
};
__device__ inline i64 number_of(const int* starts, int row, const i64* n) {
    return max(starts[row], 0) / n[6] + row * n[7];
}
// The chunk of this block, which has `width` of a head's values; false where its number has none.
__device__ inline bool find_chunk(Chunk& c, const int* starts, const i64* n, int width) {
    const i64 heads = n[3], value = n[4], tiles = (value + width - 1) / width;
    c.column = (int)(blockIdx.x % tiles) * width;
    c.columns = (int)min((i64)width, value - c.column);
    c.head = (int)(blockIdx.x / tiles % heads);
    c.number = blockIdx.x / tiles / heads;
    int low = 0, high = (int)n[1];
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (number_of(starts, middle, n) <= c.number) low = middle; else high = middle;
    }
    const i64 start = max(starts[low], 0), end = min((i64)starts[low + 1], n[0]);
    c.first = start + (c.number - number_of(starts, low, n)) * CHUNK;
    c.count = (int)min((i64)CHUNK, end - c.first);
    return end - start >= LEAST && c.first >= start && c.count > 0;
}
