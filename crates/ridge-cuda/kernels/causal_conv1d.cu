// The short causal convolution of recurrent models over the sequences of a step, with a bias and SiLU behind it, and the inputs behind the
// step. A block has some channels of the first HEAD tokens of a sequence, which see its state, and of the state behind the step; or of TOKENS
// tokens of the step, of which it makes those whose inputs are all in the step, and those of no sequence. So a state is read and written by one
// thread, and both may be in one place. Floor: x, y and both states once over bandwidth; inputs of a thread stay in registers.
// Defines: D of x and the states; W of the weight; TAPS; LINES as of `lines.cuh`; FACTOR, 1 where the input is a product of two, rounded; BIAS,
// with its BIAS_TYPE, and SILU, 0 or 1; WIDE, 1 or 2, the channels of a thread. Numbers: tokens, channels, sequences, lines; elements from a
// token of x to the next and before its first channel, and those of the factor.

#define KEPT (TAPS - 1)
#define HEAD (KEPT > 4 ? KEPT : 4)
#define TOKENS 16
#define THREADS 128

typedef Elements<D, WIDE> Input;

struct Channels {
    float tap[WIDE][TAPS], bias[WIDE];

    // `input(at, back)`: the input of channel `at` so many tokens before.
    template <class F> __device__ void make(float* y, F input) const {
        Elements<F32, WIDE> out;
#pragma unroll
        for (int at = 0; at < WIDE; ++at) {
            float sum = input(at, 0) * tap[at][KEPT];
#pragma unroll
            for (int back = 1; back < TAPS; ++back) sum = sum + input(at, back) * tap[at][KEPT - back];
            out.part[at] = finish(at, sum);
        }
        *(Elements<F32, WIDE>*)y = out;
    }
    __device__ void make_none(float* y) const {
        Elements<F32, WIDE> out;
#pragma unroll
        for (int at = 0; at < WIDE; ++at) out.part[at] = finish(at, 0.0f);
        *(Elements<F32, WIDE>*)y = out;
    }
    __device__ float finish(int at, float sum) const {
        if (BIAS) sum = sum + bias[at];
        return SILU ? sum * op_sigmoid(sum) : sum;
    }
};

extern "C" __global__ __launch_bounds__(THREADS) void causal_conv1d(
    const D::Raw* __restrict__ x, const D::Raw* __restrict__ factor, const volatile W::Raw* w,
    const volatile BIAS_TYPE::Raw* bias, const D::Raw* before, const int* __restrict__ lines, const int* __restrict__ ids,
    const int* __restrict__ starts, float* __restrict__ y, D::Raw* after, Numbers<8> n
) {
    const i64 tokens = n.v[0], channels = n.v[1], rows = n.v[2];
    const i64 across = (channels + THREADS * WIDE - 1) / (THREADS * WIDE), piece = blockIdx.x / across;
    const i64 c = ((blockIdx.x % across) * THREADS + threadIdx.x) * WIDE;
    const bool has = c < channels;
    others_may_begin();
    after_others();
    // Volatile, since taps and biases may be results of the launch ahead.
    Channels all;
#pragma unroll
    for (int at = 0; at < WIDE; ++at) {
        all.bias[at] = BIAS && has ? BIAS_TYPE::load(bias[c + at]) : 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) all.tap[at][tap] = has ? W::load(w[(c + at) * TAPS + tap]) : 0.0f;
    }
    auto input_at = [&](i64 token) {
        Input in = elements_at<D, WIDE>(x + token * n.v[4] + n.v[5] + c);
#if FACTOR
        const Input other = elements_at<D, WIDE>(factor + token * n.v[6] + n.v[7] + c);
#pragma unroll
        for (int at = 0; at < WIDE; ++at) in.part[at] = D::store(D::load(in.part[at]) * D::load(other.part[at]));
#endif
        return in;
    };
    const Input zeros = {};
    if (piece < rows) {
        if (!has) return;
        const i64 begin = max(starts[piece], 0), end = min((i64)starts[piece + 1], tokens), count = max(end - begin, (i64)0);
        const i64 from = line_of(lines, n.v[3], piece, 0), to = line_of(lines, n.v[3], piece, 1);
        // The state, then tokens.
        Input in[KEPT + HEAD];
#pragma unroll
        for (int nth = 0; nth < KEPT; ++nth)
            in[nth] = from >= 0 ? *(const Input*)(before + (from * KEPT + nth) * channels + c) : zeros;
#pragma unroll
        for (int nth = 0; nth < HEAD; ++nth) in[KEPT + nth] = nth < count ? input_at(begin + nth) : zeros;
        if (to >= 0) {
            Input kept[KEPT];
#pragma unroll
            for (int nth = 0; nth < KEPT; ++nth) {
                // Of the state and the tokens behind it, the last.
                const i64 at = count + nth;
                if (at >= KEPT + HEAD) {
                    kept[nth] = input_at(begin + at - KEPT);
                } else {
                    kept[nth] = in[nth];
#pragma unroll
                    for (int other = nth + 1; other < KEPT + HEAD; ++other)
                        if (other == at) kept[nth] = in[other];
                }
            }
#pragma unroll
            for (int nth = 0; nth < KEPT; ++nth) *(Input*)(after + (to * KEPT + nth) * channels + c) = kept[nth];
        }
#pragma unroll
        for (int nth = 0; nth < HEAD; ++nth)
            if (nth < count)
                all.make(y + (begin + nth) * channels + c, [&](int at, int back) { return D::load(in[KEPT + nth - back].part[at]); });
        return;
    }
    const i64 first = (piece - rows) * TOKENS;
    const int lane = threadIdx.x % 32;
    const bool real = lane < TOKENS && first + lane < tokens;
    const int id = real ? ids[first + lane] : -1;
    const bool known = id >= 0 && id < rows;
    const u32 inner = __ballot_sync(0xffffffffu, known && first + lane - starts[known ? id : 0] >= HEAD);
    const u32 none = __ballot_sync(0xffffffffu, real && !known);
    if (!has || (inner | none) == 0) return;
    Input in[KEPT + TOKENS];
#pragma unroll
    for (int nth = 0; nth < KEPT + TOKENS; ++nth) {
        const i64 token = first - KEPT + nth;
        in[nth] = inner != 0 && token >= 0 && token < tokens ? input_at(token) : zeros;
    }
#pragma unroll
    for (int nth = 0; nth < TOKENS; ++nth) {
        float* to = y + (first + nth) * channels + c;
        if (inner >> nth & 1) all.make(to, [&](int at, int back) { return D::load(in[KEPT + nth - back].part[at]); });
        else if (none >> nth & 1) all.make_none(to);
    }
}
