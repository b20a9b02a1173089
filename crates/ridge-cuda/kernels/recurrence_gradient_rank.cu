// The gradient of a linear recurrence with a part of low rank, as that of one without, of two tokens for each (CHUNK of recurrence_gradient_keys.cu are 32
// of these). With u_t = S_(t-1)^T erase_t and w_t = G_t^T write_t, where G_t is the cotangent of S_t,
//
//   S_t = diag(decay_t) S_(t-1) + write_t u_t^T + k_t v_t^T,   G_(t-1) = diag(decay_t) G_t + erase_t w_t^T + q_(t-1) dy_(t-1)^T
//
// are sums of what is known: u comes of the recurrence itself, w of the same one backwards, with erase for write, and q and dy of the token before for k and v. Token 2 t of
// the other adds write_(t-1) u_(t-1)^T and is read by erase_t, with the cotangent w_t; token 2 t + 1 decays, adds k_t v_t^T and is read by q_t. What
// is then missing is what q_t reads of write_t u_t^T: dy_t u_t times write_t in dq_t, and times q_t in dwrite_t; and for a row's last token what the
// cotangent of the state behind the row reads of it. Three launches, of a block for each token: `rank_backwards` turns operands for w, `rank_apart` makes those of two tokens for each, and
// `rank_together` gives what they give to the token.
// Floor: all of them move bytes: 16 KEY + 14 value floats for each token and head.
// Rows of fewer than LEAST tokens are left to another kernel. Numbers: tokens, rows, groups, heads, value. Defines: KEY, LEAST.

#define THREADS 256

// The row of this block's token; false where it has none or is of another kernel.
__device__ inline bool find_row(const int* starts, const i64* n, int& row, i64& start, i64& end) {
    int low = 0, high = (int)n[1];
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= (i64)blockIdx.x) low = middle; else high = middle;
    }
    row = low;
    start = max(starts[low], 0);
    end = min((i64)starts[low + 1], n[0]);
    return (i64)blockIdx.x >= start && (i64)blockIdx.x < end && end - start >= LEAST;
}

// All of a token's floats; zeros where there is none.
__device__ inline void copy(float* to, i64 to_token, const float* from, i64 token, bool is, i64 count) {
    for (i64 i = threadIdx.x; i < count; i += THREADS) to[to_token * count + i] = is ? from[token * count + i] : 0.0f;
}

extern "C" __global__ __launch_bounds__(THREADS) void rank_backwards(
    const float* __restrict__ q, const float* __restrict__ decay, const int* __restrict__ starts, const float* __restrict__ erase,
    const float* __restrict__ write, const float* __restrict__ dy, const float* __restrict__ dafter, float* __restrict__ back_k,
    float* __restrict__ back_v, float* __restrict__ back_decay, float* __restrict__ back_before, float* __restrict__ back_erase,
    float* __restrict__ back_write, Numbers<5> n
) {
    others_may_begin();
    after_others();
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], token = blockIdx.x;
    int row;
    i64 start, end;
    if (!find_row(starts, n.v, row, start, end)) return;
    const i64 to = start + end - 1 - token;
    copy(back_k, to, q, token - 1, token > start, groups * KEY);
    copy(back_v, to, dy, token - 1, token > start, heads * value);
    copy(back_decay, to, decay, token, true, heads);
    copy(back_erase, to, write, token, true, heads * KEY);
    copy(back_write, to, erase, token, true, heads * KEY);
    if (token + 1 < end) return;
    for (i64 i = threadIdx.x; i < heads * KEY * value; i += THREADS) {
        const i64 column = i % value, key = i / value % KEY, head = i / value / KEY, at = row * heads * KEY * value + i;
        back_before[at] = fmaf(q[(token * groups + head * groups / heads) * KEY + key], dy[(token * heads + head) * value + column], dafter[at]);
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void rank_apart(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ decay,
    const int* __restrict__ starts, const float* __restrict__ erase, const float* __restrict__ write, const float* __restrict__ dy,
    const float* __restrict__ u, const float* __restrict__ back_w, float* __restrict__ both_q, float* __restrict__ both_k,
    float* __restrict__ both_v, float* __restrict__ both_decay, int* __restrict__ both_starts, float* __restrict__ both_dy, Numbers<5> n
) {
    others_may_begin();
    after_others();
    const i64 tokens = n.v[0], groups = n.v[2], heads = n.v[3], value = n.v[4], token = blockIdx.x;
    if (token == 0)
        for (i64 i = threadIdx.x; i <= n.v[1]; i += THREADS) both_starts[i] = (int)(2 * min(max((i64)starts[i], (i64)0), tokens));
    int row;
    i64 start, end;
    if (!find_row(starts, n.v, row, start, end)) return;
    const bool has = token > start;
    copy(both_q, 2 * token, erase, token, true, heads * KEY);
    copy(both_k, 2 * token, write, token - 1, has, heads * KEY);
    copy(both_v, 2 * token, u, token - 1, has, heads * value);
    copy(both_dy, 2 * token, back_w, start + end - 1 - token, true, heads * value);
    copy(both_decay, 2 * token, decay, token, false, heads);
    for (i64 i = threadIdx.x; i < heads * KEY; i += THREADS) {
        const i64 at = (token * groups + i / KEY * groups / heads) * KEY + i % KEY;
        both_q[(2 * token + 1) * heads * KEY + i] = q[at];
        both_k[(2 * token + 1) * heads * KEY + i] = k[at];
    }
    copy(both_v, 2 * token + 1, v, token, true, heads * value);
    copy(both_dy, 2 * token + 1, dy, token, true, heads * value);
    copy(both_decay, 2 * token + 1, decay, token, true, heads);
}

// The sum over a warp of products.
__device__ inline float dot(const float* a, const float* b, i64 count) {
    Compensated sum;
    for (i64 i = threadIdx.x & 31; i < count; i += 32) sum.add_product(a[i], b[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum.add_other(step);
    return sum.value();
}

extern "C" __global__ __launch_bounds__(THREADS) void rank_together(
    const float* __restrict__ q, const int* __restrict__ starts, const float* __restrict__ write, const float* __restrict__ dy,
    const float* __restrict__ dafter, const float* __restrict__ u, const float* __restrict__ both_dq, const float* __restrict__ both_dk,
    const float* __restrict__ both_dv, const float* __restrict__ both_ddecay, float* __restrict__ dq, float* __restrict__ dk,
    float* __restrict__ dv, float* __restrict__ ddecay, float* __restrict__ derase, float* __restrict__ dwrite, Numbers<5> n
) {
    others_may_begin();
    after_others();
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], token = blockIdx.x;
    int row;
    i64 start, end;
    if (!find_row(starts, n.v, row, start, end)) return;
    const bool last = token + 1 == end;
    copy(dk, token, both_dk, 2 * token + 1, true, heads * KEY);
    copy(derase, token, both_dq, 2 * token, true, heads * KEY);
    copy(dv, token, both_dv, 2 * token + 1, true, heads * value);
    copy(ddecay, token, both_ddecay, 2 * token + 1, true, heads);
    const int lane = threadIdx.x & 31;
    for (i64 head = threadIdx.x / 32; head < heads; head += THREADS / 32) {
        const i64 place = token * heads + head, group = (token * groups + head * groups / heads) * KEY;
        const float* mine = u + place * value;
        const float share = dot(dy + place * value, mine, value);
        for (i64 i = lane; i < KEY; i += 32) {
            dq[place * KEY + i] = fmaf(share, write[place * KEY + i], both_dq[((2 * token + 1) * heads + head) * KEY + i]);
            if (!last) dwrite[place * KEY + i] = fmaf(share, q[group + i], both_dk[((2 * token + 2) * heads + head) * KEY + i]);
        }
        if (last)
            for (i64 i = 0; i < KEY; ++i) {
                const float behind = dot(dafter + ((row * heads + head) * KEY + i) * value, mine, value);
                if (lane == 0) dwrite[place * KEY + i] = fmaf(share, q[group + i], behind);
            }
    }
}
