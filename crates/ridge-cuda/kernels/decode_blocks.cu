// The values of a weight in a block format as plain elements. Floor: both once over bandwidth.
// A thread takes the eight elements of a group of 32 that a quarter of a warp's lanes holds.
// Defines: D of the values; FORMAT; PARTS, 2 where a row is followed by what rounding left of it.
// Numbers: groups of 32 elements, those of a row.

extern "C" __global__ void decode_blocks(const u8* __restrict__ w, D::Raw* __restrict__ out, Numbers<2> n) {
    others_may_begin();
    after_others();
    const i64 all = n.v[0] * 4, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        const int quarter = (int)(i & 3);
        const i64 place = i >> 2, row = place / n.v[1], within = place % n.v[1];
        const u8* chunk = w + row * (n.v[1] * FORMAT::BYTES / 8) + (within >> 3) * FORMAT::BYTES;
        const int group = (int)(within & 7);
        u32 codes[4];
        FORMAT::codes<D>(chunk, group, quarter, codes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int part = FORMAT::GROUP == 16 ? group * 2 + half : group;
            float scale, minimum;
            FORMAT::scale(chunk, part, scale, minimum);
            u32 pairs[PARTS][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 pair = codes[2 * half + e];
                const float2 values = pair_of<FORMAT, D>(pair, scale, minimum);
                pairs[0][e] = Mma<D>::pack(values.x, values.y);
#if PARTS == 2
                const float left = values.x - D::load((u16)pairs[0][e]), right = values.y - D::load((u16)(pairs[0][e] >> 16));
                pairs[1][e] = Mma<D>::pack(left, right);
#endif
            }
            // Pairs are (0, 2) and (1, 3).
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const u32 a = pairs[p][0], b = pairs[p][1];
                const i64 to = ((row * PARTS + p) * n.v[1] + within) * 32 + half * 16 + quarter * 4;
                *(uint2*)(out + to) = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
            }
        }
    }
}

// Each row of x twice, one behind the other, for both parts. Numbers: rows, 16-byte vectors of a row.
extern "C" __global__ void twice(const uint4* __restrict__ x, uint4* __restrict__ out, Numbers<2> n) {
    others_may_begin();
    after_others();
    const i64 all = n.v[0] * n.v[1], step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        const i64 row = i / n.v[1], place = row * 2 * n.v[1] + i % n.v[1];
        out[place] = out[place + n.v[1]] = x[i];
    }
}
