// Rows along an axis by index or by place: the element (o, k, i) is at (o * extent + k) * inner + i. Elements move as
// they are, `RAW` being the unsigned integer of their size. Floor: what is read and written over bandwidth.

#ifdef GATHER
// Rows of `data` by index; zeros where it is out of range. Numbers: outer, extent, inner, indices.
extern "C" __global__ void gather(
    const RAW* __restrict__ data, const void* __restrict__ indices, RAW* __restrict__ out, Numbers<4> n
) {
    const i64 extent = n.v[1], inner = n.v[2], count = n.v[3], total = n.v[0] * count * inner;
    for (i64 e = blockIdx.x * (i64)blockDim.x + threadIdx.x; e < total; e += (i64)gridDim.x * blockDim.x) {
        const i64 row = at<INDEX>(indices, e / inner % count);
        out[e] = row >= 0 && row < extent ? data[(e / inner / count * extent + row) * inner + e % inner] : (RAW)0;
    }
}
#endif

#ifdef SCATTER
// `data` with rows replaced or, if ADD, added to, in the order of the indices; one out of range is dropped. A thread an
// element looks through all indices, so that sums have one order. Numbers: outer, extent, inner, indices.
extern "C" __global__ void scatter(
    const void* __restrict__ data, const void* __restrict__ indices, const void* __restrict__ updates,
    void* __restrict__ out, Numbers<4> n
) {
    const i64 extent = n.v[1], inner = n.v[2], count = n.v[3], total = n.v[0] * extent * inner;
    for (i64 e = blockIdx.x * (i64)blockDim.x + threadIdx.x; e < total; e += (i64)gridDim.x * blockDim.x) {
        const i64 row = e / inner % extent, from = e / inner / extent * count * inner + e % inner;
#if ADD
        D::Sum sum = (D::Sum)at<D>(data, e);
        for (i64 k = 0; k < count; ++k)
            if (at<INDEX>(indices, k) == row) sum = op_add(sum, (D::Sum)at<D>(updates, from + k * inner));
        put<D>(out, e, D::wrap(sum));
#else
        i64 last = -1;
        for (i64 k = 0; k < count; ++k) if (at<INDEX>(indices, k) == row) last = k;
        ((D::Raw*)out)[e] = last < 0 ? ((const D::Raw*)data)[e] : ((const D::Raw*)updates)[from + last * inner];
#endif
    }
}
#endif

#ifdef ROWS
// `data` of f32 with rows added to in the order of the indices; one out of range is dropped. A block makes 256 columns of
// ROWS rows: all of it look through the indices, a chunk at a time, and then add what was found, each thread in its column,
// so that sums have one order. Numbers: extent, inner, indices.
extern "C" __global__ __launch_bounds__(256) void scatter_rows(
    const float* __restrict__ data, const void* __restrict__ indices, const float* __restrict__ updates,
    float* __restrict__ out, Numbers<3> n
) {
    __shared__ int places[1024], rows[1024], totals[8];
    const i64 extent = n.v[0], inner = n.v[1], count = n.v[2], first = blockIdx.x * (i64)ROWS;
    const i64 column = blockIdx.y * 256 + threadIdx.x, end = min(first + ROWS, extent);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool real = column < inner;
    if (real) for (i64 row = first; row < end; ++row) out[row * inner + column] = data[row * inner + column];
    float sum = ROWS == 1 && real ? data[first * inner + column] : 0.0f;
    for (i64 chunk = 0; chunk < count; chunk += 1024) {
        int mine[4], found = 0;
        for (int i = 0; i < 4; ++i) {
            const i64 k = chunk + threadIdx.x * 4 + i, row = k < count ? (i64)at<INDEX>(indices, k) : -1;
            mine[i] = row >= first && row < end ? (int)(row - first) : -1;
            found += mine[i] >= 0;
        }
        int before = found;
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) totals[warp] = before;
        __syncthreads();
        int at_place = before - found, total = 0;
        for (int w = 0; w < 8; ++w) { if (w < warp) at_place += totals[w]; total += totals[w]; }
        for (int i = 0; i < 4; ++i)
            if (mine[i] >= 0) { places[at_place] = threadIdx.x * 4 + i; rows[at_place++] = mine[i]; }
        __syncthreads();
        if (real) {
#pragma unroll 8
            for (int i = 0; i < total; ++i) {
                const float x = updates[(chunk + places[i]) * inner + column];
                if (ROWS == 1) sum += x;
                else out[(first + rows[i]) * inner + column] += x;
            }
        }
        __syncthreads();
    }
    if (ROWS == 1 && real) out[first * inner + column] = sum;
}
#endif

#ifdef PAD
// Numbers: outer, extent, inner, extent of the output, rows in front, the bits of the value.
extern "C" __global__ void pad(const RAW* __restrict__ x, RAW* __restrict__ out, Numbers<6> n) {
    const i64 extent = n.v[1], inner = n.v[2], wide = n.v[3], total = n.v[0] * wide * inner;
    for (i64 e = blockIdx.x * (i64)blockDim.x + threadIdx.x; e < total; e += (i64)gridDim.x * blockDim.x) {
        const i64 row = e / inner % wide - n.v[4];
        out[e] = row >= 0 && row < extent ? x[(e / inner / wide * extent + row) * inner + e % inner] : (RAW)n.v[5];
    }
}
#endif
