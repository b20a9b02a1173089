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
