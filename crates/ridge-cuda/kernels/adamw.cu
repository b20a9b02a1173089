// A step of AdamW in place, and of the copy that forward and backward read. Floor: parameter and moments read and written
// once, the gradient read once and the copy written once.
// Defines: G of the gradient; COPY, 0 or 1, with C of the copy; BETA1, BETA2, EPS and DECAY, f64.
// Numbers: elements.

struct Factors { float correct1, correct2, lr, keep, scale; };

__device__ inline void update(const Factors& f, float g, float& p, float& m, float& v) {
    g *= f.scale;
    m = fmaf(m, (float)BETA1, g * (float)(1.0 - BETA1));
    v = fmaf(v, (float)BETA2, g * g * (float)(1.0 - BETA2));
    const float direction = m * f.correct1 / (sqrtf(v * f.correct2) + (float)EPS);
    p = fmaf(p, f.keep, -(f.lr * direction));
}

extern "C" __global__ __launch_bounds__(256) void adamw_update(
    float* __restrict__ p, float* __restrict__ m, float* __restrict__ v, const G::Raw* __restrict__ g,
    const float* __restrict__ lr, const float* __restrict__ step, const float* __restrict__ scale,
    C::Raw* __restrict__ copy, Numbers<1> n
) {
    __shared__ Factors shared;
    if (threadIdx.x == 0) {
        // In f64, since the differences lose digits where a beta is close to 1.
        shared.correct1 = (float)(1.0 / (1.0 - pow(BETA1, (double)*step)));
        shared.correct2 = (float)(1.0 / (1.0 - pow(BETA2, (double)*step)));
        shared.lr = *lr;
        shared.keep = (float)(1.0 - (double)*lr * DECAY);
        shared.scale = *scale;
    }
    __syncthreads();
    const Factors f = shared;
    const i64 fours = n.v[0] / 4, first = blockIdx.x * (i64)blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < fours; i += stride) {
        float4 ps = ((const float4*)p)[i], ms = ((const float4*)m)[i], vs = ((const float4*)v)[i];
        struct __align__(4 * sizeof(G::Raw)) { G::Raw x[4]; } gs;
        gs = ((const decltype(gs)*)g)[i];
        update(f, G::load(gs.x[0]), ps.x, ms.x, vs.x);
        update(f, G::load(gs.x[1]), ps.y, ms.y, vs.y);
        update(f, G::load(gs.x[2]), ps.z, ms.z, vs.z);
        update(f, G::load(gs.x[3]), ps.w, ms.w, vs.w);
        ((float4*)p)[i] = ps;
        ((float4*)m)[i] = ms;
        ((float4*)v)[i] = vs;
#if COPY
        struct __align__(4 * sizeof(C::Raw)) { C::Raw x[4]; } cs = {C::store(ps.x), C::store(ps.y), C::store(ps.z), C::store(ps.w)};
        ((decltype(cs)*)copy)[i] = cs;
#endif
    }
    for (i64 i = fours * 4 + first; i < n.v[0]; i += stride) {
        update(f, G::load(g[i]), p[i], m[i], v[i]);
#if COPY
        copy[i] = C::store(p[i]);
#endif
    }
}
