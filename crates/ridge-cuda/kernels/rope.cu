// Rotary position embedding, and the writing of keys and values to a paged cache. Floor: each element read and written
// once. A block makes HEADS heads of a token.
// Defines: D of what is rotated; DIM; HEADS of a block; those of `rotate.cuh`; WRITE, 0 or 1; with it CACHE, the dtype
// of the cache, BLOCK, the tokens of one of its blocks, and SIDES, 2 or 1: with one there is no v; and CODED, 0 or 1: is the cache of codes, whose
// scales are written too: of each key and value of a head, its largest magnitude over that of a code.
// Numbers: tokens, heads, slots of the cache.

// Elements that are rotated together: 16 bytes, where heads and what is rotated of them are whole ones; else single ones.
#define WIDE_WHOLE (16 / (int)sizeof(D::Raw))
#define WIDE (PAIRS % WIDE_WHOLE == 0 && DIM % WIDE_WHOLE == 0 ? WIDE_WHOLE : 1)
// Units of a head: two vectors that are rotated with each other, or one that is not rotated.
#define UNITS (DIM / WIDE - PAIRS / WIDE)

// Elements at .. at + WIDE of a head.
__device__ inline void elements_of(Head head, int at, float (&to)[WIDE]) {
#if LATENT
    if (at < 2 * PAIRS) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i) to[i] = head[at + i];
        return;
    }
    at -= 2 * PAIRS;
#endif
    const Elements<D, WIDE> x = elements_at<D, WIDE>(head.x + at);
#if NORM
    const Elements<NORM_TYPE, WIDE> gain = elements_at<NORM_TYPE, WIDE>(head.gain + at);
#endif
#pragma unroll
    for (int i = 0; i < WIDE; ++i) {
        to[i] = D::load(x.part[i]);
#if NORM
        to[i] = D::wrap(to[i] * head.unit * NORM_TYPE::load(gain.part[i]));
#endif
    }
}

// Gives `put(at, elements)` the vectors of a unit of a head, rotated.
template <class Put> __device__ inline void rotate_unit(Head head, int unit, const float* cosine, const float* sine, Put put) {
    float low[WIDE];
#if PAIRS
    if (unit < PAIRS / WIDE) {
        const int at = unit * WIDE;
        float high[WIDE], first[WIDE], second[WIDE];
        elements_of(head, at, low);
        elements_of(head, at + PAIRS, high);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            first[i] = low[i] * cosine[at + i] - high[i] * sine[at + i];
            second[i] = high[i] * cosine[at + i] + low[i] * sine[at + i];
        }
        put(at, first);
        put(at + PAIRS, second);
        return;
    }
#endif
    const int at = unit * WIDE + PAIRS;
    elements_of(head, at, low);
    put(at, low);
}

#if NORM
// Elements of a head that are normed.
#if LATENT
#define NORMED (DIM - 2 * PAIRS)
#else
#define NORMED DIM
#endif
// The factors of heads first .. end of the token at `x`, a warp each; the block must meet before it takes them.
__device__ inline void units_of(const D::Raw* x, int first, int end, float eps, float* unit) {
    const int lane = threadIdx.x & 31;
    for (int head = first + (threadIdx.x >> 5); head < end; head += blockDim.x >> 5) {
        float square = 0.0f;
        for (int e = lane; e < NORMED; e += 32) square += D::load(x[head * DIM + e]) * D::load(x[head * DIM + e]);
        for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
        if (lane == 0) unit[head - first] = op_rsqrt(square / (float)NORMED + eps);
    }
}
#endif

#if WRITE
#if CODED
#define LARGEST_CODE (CACHE::is_float ? 448.0f : 127.0f)
// The nearest code: of integers the upper one of two, else the even one.
__device__ inline int code_of(float x, I8) { return (int)fminf(fmaxf(floorf(x + 0.5f), -127.0f), 127.0f); }
__device__ inline u8 code_of(float x, F8E4M3) { return code_of_f8(x); }
#endif
extern "C" __global__ __launch_bounds__(256) void kv_write(
    CACHE::Raw* __restrict__ cache, const D::Raw* __restrict__ k, const D::Raw* __restrict__ v,
    const int* __restrict__ positions, const int* __restrict__ slots,
#if CODED
    float* __restrict__ scales,
#endif
#if NORM
    const NORM_TYPE::Raw* __restrict__ gain, float eps,
#endif
    Numbers<3> n
) {
    __shared__ float cosine[PAIRS + 1], sine[PAIRS + 1];
    others_may_begin();
    const int token = blockIdx.x, tokens = (int)n.v[0], heads = (int)n.v[1];
    const int start = blockIdx.y * HEADS * DIM, end = min(start + HEADS * DIM, heads * DIM);
    // Few tokens wait for one load after another: what the launch ahead has no part in is done before it has ended.
    const int slot = slots[token];
#if PAIRS
    angles_ahead(positions[token], cosine, sine);
#endif
    // Of equal slots the last token's stays.
    bool later = false;
    const int lead = min(token + 1 + (-(int)((u64)(slots + token + 1) / 4) & 3), tokens);
    for (int t = token + 1 + threadIdx.x; t < lead; t += blockDim.x) later |= slots[t] == slot;
    for (int t = lead + 4 * threadIdx.x; t < tokens; t += 4 * blockDim.x) {
        if (t + 4 <= tokens) {
            const int4 four = *(const int4*)(slots + t);
            later |= four.x == slot || four.y == slot || four.z == slot || four.w == slot;
        } else {
            for (int i = t; i < tokens; ++i) later |= slots[i] == slot;
        }
    }
    after_others();
#if NORM
    __shared__ float unit[HEADS];
    units_of(k + (i64)token * heads * DIM, start / DIM, end / DIM, eps, unit);
#endif
    if (__syncthreads_or(later) || slot < 0 || slot >= n.v[2]) return;
#if CODED
    // A warp for each row.
    const int lane = threadIdx.x & 31, rows = (end - start) / DIM * SIDES;
    for (int r = threadIdx.x >> 5; r < rows; r += blockDim.x >> 5) {
        const int head = start / DIM + r / SIDES, of_side = r % SIDES;
        const i64 from = ((i64)token * heads + head) * DIM;
#if NORM
        const Head of = {k + from, gain, unit[head - start / DIM]};
#else
        const Head of = {k + from};
#endif
        auto element = [&](int e) { return of_side ? D::load(v[from + e]) : D::wrap(rotated(of, e, cosine, sine)); };
        float largest = 0.0f;
        for (int e = lane; e < DIM; e += 32) largest = op_max(largest, fabsf(element(e)));
        for (int step = 16; step > 0; step >>= 1) largest = op_max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        const float scale = largest / LARGEST_CODE, divisor = scale == 0.0f ? 1.0f : scale;
        const i64 to = (((i64)(slot / BLOCK) * SIDES + of_side) * heads + head) * BLOCK + slot % BLOCK;
        for (int e = lane; e < DIM; e += 32) cache[to * DIM + e] = (CACHE::Raw)code_of(element(e) / divisor, CACHE());
        if (lane == 0) scales[to] = scale;
    }
#else
    const i64 side = (i64)heads * BLOCK * DIM, base = (i64)(slot / BLOCK) * SIDES * side + (slot % BLOCK) * DIM;
    for (int i = start / DIM * UNITS + threadIdx.x; i < end / DIM * UNITS; i += blockDim.x) {
        const int head = i / UNITS;
        const i64 from = ((i64)token * heads + head) * DIM, to = base + (i64)head * BLOCK * DIM;
#if NORM
        const Head of = {k + from, gain, unit[head - start / DIM]};
#else
        const Head of = {k + from};
#endif
        rotate_unit(of, i % UNITS, cosine, sine, [&](int at, const float (&x)[WIDE]) {
            Elements<CACHE, WIDE> key;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) key.part[e] = CACHE::store(D::wrap(x[e]));
            *(Elements<CACHE, WIDE>*)(cache + to + at) = key;
            if (SIDES > 1) {
                const Elements<D, WIDE> of_v = elements_at<D, WIDE>(v + from + at);
                Elements<CACHE, WIDE> value;
#pragma unroll
                for (int e = 0; e < WIDE; ++e) value.part[e] = CACHE::store(D::load(of_v.part[e]));
                *(Elements<CACHE, WIDE>*)(cache + side + to + at) = value;
            }
        });
    }
#endif
}
#else
extern "C" __global__ __launch_bounds__(256) void rope(
    const D::Raw* __restrict__ x, const int* __restrict__ positions, D::Raw* __restrict__ out,
#if NORM
    const NORM_TYPE::Raw* __restrict__ gain, float eps,
#endif
    Numbers<2> n
) {
    __shared__ float cosine[PAIRS + 1], sine[PAIRS + 1];
    others_may_begin();
    const int token = blockIdx.x, heads = (int)n.v[1];
    const int first = blockIdx.y * HEADS * DIM, end = min(first + HEADS * DIM, heads * DIM);
    angles_ahead(positions[token], cosine, sine);
    after_others();
#if NORM
    __shared__ float unit[HEADS];
    units_of(x + (i64)token * heads * DIM, first / DIM, end / DIM, eps, unit);
#endif
    __syncthreads();
    for (int i = first / DIM * UNITS + threadIdx.x; i < end / DIM * UNITS; i += blockDim.x) {
        const int head = i / UNITS;
        const i64 from = ((i64)token * heads + head) * DIM;
#if NORM
        const Head of = {x + from, gain, unit[head - first / DIM]};
#else
        const Head of = {x + from};
#endif
        rotate_unit(of, i % UNITS, cosine, sine, [&](int at, const float (&y)[WIDE]) {
            Elements<D, WIDE> made;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) made.part[e] = D::store(y[e]);
            *(Elements<D, WIDE>*)(out + from + at) = made;
        });
    }
}
#endif
