// The chunks of rows in turn, and what they give, of gated recurrences in bf16: recurrence_gated.cuh says how.

// How `gated_states` divides a chunk: its warps each have keys of the state, and with DELTA 16 tokens of u.
#define STATE_WARPS 4
#define STATE_THREADS (STATE_WARPS * 32)
#define OF_WARP (DEPTH / STATE_WARPS)
#define MY_STEPS (OF_WARP / 16)
#define HALVES (8 / STATE_WARPS)
// What a block has of a chunk in shared memory, in bytes: keys, values, factors and the system; and chunks that are on their way or there.
#define KEYS_BYTES (CHUNK * DEPTH * 2)
#define VALUES_BYTES (CHUNK * TILE * 2)
#define FACTORS_BYTES (2 * CHUNK * 4)
#define SYSTEM_BYTES (DELTA ? TRIANGLE * 3 * 512 : 0)
#define STAGE (KEYS_BYTES + VALUES_BYTES + FACTORS_BYTES + SYSTEM_BYTES)
#define STAGES 2

extern "C" __global__ __launch_bounds__(STATE_THREADS) void gated_states(
    const u16* __restrict__ k, const u16* __restrict__ v, const float* __restrict__ before, const int* __restrict__ starts,
    const int* __restrict__ lines, const Factors* __restrict__ factors, const uint4* __restrict__ systems,
    uint4* __restrict__ states, uint2* __restrict__ updates, float* __restrict__ after, Numbers<9> n
) {
    extern __shared__ __align__(128) u8 room[];
#if DELTA
    // What the keys of each warp give of S^T k; and what follows from it, by blocks of tokens, parts, and halves of 8 tokens.
    float4 (*erased)[2 * BLOCKS][32] = (float4(*)[2 * BLOCKS][32])(room + STAGES * STAGE);
    __shared__ uint2 rest[BLOCKS][3][2][32], added[BLOCKS][3][2][32];
#endif
    others_may_begin();
    after_others();
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], tiles = (value + TILE - 1) / TILE;
    const int tile = (int)(blockIdx.x % tiles), column = tile * TILE, columns = min(TILE, (int)value - column);
    const i64 head = blockIdx.x / tiles % heads;
    const int row = (int)(blockIdx.x / tiles / heads);
    const i64 start = max(starts[row], 0), end = min((i64)starts[row + 1], n.v[0]);
    if (end - start < LEAST) return;
    const i64 from_line = line_of(lines, n.v[5], row, 0), to_line = line_of(lines, n.v[5], row, 1);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, in_tile = lane >> 2, pair = (lane & 3) * 2;
    const int my_keys = warp * OF_WARP, chunks = (int)((end - start + CHUNK - 1) / CHUNK);
    const i64 number = number_of(starts, row, n.v);
    const u16* of_k = k + (start * groups + head * groups / heads) * KEY;
    const u16* of_v = v + (start * heads + head) * value + column;
    const u32 stages = shared_address(room);
    const auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            const u32 to = stages + chunk % STAGES * STAGE;
            const i64 first = (i64)chunk * CHUNK, nth = (number + chunk) * heads + head;
            const int count = (int)min((i64)CHUNK, end - start - first);
            fetch_keys<STATE_THREADS>(to, of_k + first * groups * KEY, groups * KEY, count);
            fetch_values<TILE, STATE_THREADS>(to + KEYS_BYTES, of_v + first * heads * value, heads * value, count, columns);
            const u32 behind = to + KEYS_BYTES + VALUES_BYTES;
            fetch_whole<STATE_THREADS>(behind, factors[nth].from_start, FACTORS_BYTES);
            if (DELTA) fetch_whole<STATE_THREADS>(behind + FACTORS_BYTES, systems + nth * TRIANGLE * 96, SYSTEM_BYTES);
        }
        copies_end();
    };
#pragma unroll
    for (int chunk = 0; chunk < STAGES - 1; ++chunk) fetch(chunk);
    // The state transposed: this warp's keys, 8 to a tile.
    float s[2 * MY_STEPS][4];
#pragma unroll
    for (int i = 0; i < 2 * MY_STEPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int key = my_keys + i * 8 + pair + (e & 1), at = in_tile + (e >> 1) * 8;
            const bool is = key < KEY && at < columns && from_line >= 0;
            s[i][e] = is ? before[((from_line * heads + head) * KEY + key) * value + column + at] : 0.0f;
        }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(chunk + STAGES - 1);
        const int stage = chunk % STAGES * STAGE;
        const u32 keys = stages + stage, values = keys + KEYS_BYTES;
        const float* from_start = (const float*)(room + stage + KEYS_BYTES + VALUES_BYTES);
        const float* to_end = from_start + CHUNK;
        const i64 nth = ((number + chunk) * heads + head) * tiles + tile;
        u32 parts[MY_STEPS][3][4];
#pragma unroll
        for (int step = 0; step < MY_STEPS; ++step) {
            parts_of_tile<3>(s + 2 * step, parts[step]);
#pragma unroll
            for (int p = 0; p < 2; ++p)
                states[((nth * STEPS + warp * MY_STEPS + step) * 2 + p) * 32 + lane] = four_words(parts[step][p]);
        }
#if DELTA
        const uint4* system = (const uint4*)(to_end + CHUNK);
        // What the tokens erase, of this warp's keys.
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            float sum[2][4] = {};
#pragma unroll
            for (int step = 0; step < MY_STEPS; ++step) {
                u32 b[4];
                load_matrices(b, keys_at(keys, block * 16 + right_row(), my_keys + step * 16 + right_column()));
#pragma unroll
                for (int half = 0; half < 2; ++half) product_of_thirds(sum[half], parts[step], b[2 * half], b[2 * half + 1]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                erased[warp][2 * block + half][lane] = make_float4(sum[half][0], sum[half][1], sum[half][2], sum[half][3]);
        }
        __syncthreads();
        // V less it, of this warp's tokens.
        const int mine = HALVES == 2 ? warp : warp >> 1, half_of_mine = HALVES == 2 ? 0 : warp & 1;
        {
            u32 v_words[4];
            load_matrices_transposed(v_words, values_at<TILE>(values, mine * 16 + right_row(), right_column()));
#pragma unroll
            for (int i = 0; i < HALVES; ++i) {
                const int half = half_of_mine + i;
                float4 sum = erased[0][2 * mine + half][lane];
#pragma unroll
                for (int other = 1; other < STATE_WARPS; ++other) {
                    const float4 more = erased[other][2 * mine + half][lane];
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                const float2 by = *(const float2*)(from_start + mine * 16 + half * 8 + pair);
                const u32 low = half ? v_words[2] : v_words[0], high = half ? v_words[3] : v_words[1];
                u32 part[3][2];
                parts_of<3>(
                    fmaf(-by.x, sum.x, __uint_as_float(low << 16)), fmaf(-by.y, sum.y, __uint_as_float(low & 0xffff0000)),
                    &part[0][0], 2
                );
                parts_of<3>(
                    fmaf(-by.x, sum.z, __uint_as_float(high << 16)), fmaf(-by.y, sum.w, __uint_as_float(high & 0xffff0000)),
                    &part[0][1], 2
                );
#pragma unroll
                for (int p = 0; p < 3; ++p) rest[mine][p][half][lane] = make_uint2(part[p][0], part[p][1]);
            }
        }
        __syncthreads();
        // u of those tokens.
        {
            float u[HALVES][4] = {};
            const uint4* of_mine = system + mine * (mine + 1) / 2 * 96 + lane;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                if (block > mine) break;
                u32 a[3][4];
                uint4 b[3];
#pragma unroll
                for (int p = 0; p < 3; ++p) {
                    *(uint2*)a[p] = rest[block][p][0][lane];
                    *(uint2*)(a[p] + 2) = rest[block][p][1][lane];
                    b[p] = of_mine[(block * 3 + p) * 32];
                }
#pragma unroll
                for (int i = 0; i < HALVES; ++i) {
                    const int half = half_of_mine + i;
                    float high[4] = {}, middle[4] = {}, low[4] = {};
                    const auto add = [&](float* to, int x, int y) {
                        product(to, a[x], half ? b[y].z : b[y].x, half ? b[y].w : b[y].y);
                    };
                    add(low, 0, 2);
                    add(middle, 0, 1);
                    add(high, 0, 0);
                    add(low, 1, 1);
                    add(middle, 1, 0);
                    add(low, 2, 0);
#pragma unroll
                    for (int e = 0; e < 4; ++e) u[i][e] += high[e] + (middle[e] + low[e]);
                }
            }
#pragma unroll
            for (int i = 0; i < HALVES; ++i) {
                const int half = half_of_mine + i;
                u32 part[3][2];
                const auto halves_of = [&] {
                    parts_of<3>(u[i][0], u[i][1], &part[0][0], 2);
                    parts_of<3>(u[i][2], u[i][3], &part[0][1], 2);
                };
                halves_of();
#pragma unroll
                for (int p = 0; p < 2; ++p)
                    updates[(((nth * BLOCKS + mine) * 2 + p) * 2 + half) * 32 + lane] = make_uint2(part[p][0], part[p][1]);
                const float2 by = *(const float2*)(to_end + mine * 16 + half * 8 + pair);
#pragma unroll
                for (int e = 0; e < 4; ++e) u[i][e] *= e & 1 ? by.y : by.x;
                halves_of();
#pragma unroll
                for (int p = 0; p < 3; ++p) added[mine][p][half][lane] = make_uint2(part[p][0], part[p][1]);
            }
        }
        __syncthreads();
#endif
        const float remains = from_start[CHUNK - 1];
#pragma unroll
        for (int i = 0; i < 2 * MY_STEPS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][e] *= remains;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            u32 a[3][4];
#if DELTA
#pragma unroll
            for (int p = 0; p < 3; ++p) {
                *(uint2*)a[p] = added[block][p][0][lane];
                *(uint2*)(a[p] + 2) = added[block][p][1][lane];
            }
#else
            u32 words[4];
            load_matrices_transposed(words, values_at<TILE>(values, block * 16 + right_row(), right_column()));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 by = *(const float2*)(to_end + block * 16 + (i >> 1) * 8 + pair);
                parts_of<3>(__uint_as_float(words[i] << 16) * by.x, __uint_as_float(words[i] & 0xffff0000) * by.y, &a[0][i], 4);
            }
#endif
#pragma unroll
            for (int step = 0; step < MY_STEPS; ++step) {
                u32 b[4];
                load_matrices_transposed(b, keys_at(keys, block * 16 + left_row(), my_keys + step * 16 + left_column()));
#pragma unroll
                for (int half = 0; half < 2; ++half) product_of_thirds(s[2 * step + half], a, b[2 * half], b[2 * half + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * MY_STEPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int key = my_keys + i * 8 + pair + (e & 1), at = in_tile + (e >> 1) * 8;
            const bool is = key < KEY && at < columns && to_line >= 0;
            if (is) after[((to_line * heads + head) * KEY + key) * value + column + at] = s[i][e];
        }
}

// Bytes of the states of COLUMNS columns, of half the keys, in two parts; and of what tokens add to the columns.
#define STATES_BYTES (COLUMNS * DEPTH * 2)
#define ADDED_BYTES (CHUNK * COLUMNS * (DELTA ? 4 : 2))

extern "C" __global__ __launch_bounds__(THREADS, KEY > 128 ? 2 : DELTA ? 3 : 4) void gated_outputs(
    const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, const int* __restrict__ starts,
    const Factors* __restrict__ factors, const uint4* __restrict__ states, const uint2* __restrict__ updates, u16* __restrict__ y,
    Numbers<9> n
) {
    extern __shared__ __align__(128) u8 room[];
    __shared__ float2 sums[CHUNK];
    __shared__ float weights[CHUNK];
    others_may_begin();
    after_others();
    Chunk c;
    if (!find_chunk(c, starts, n.v, COLUMNS)) return;
    const i64 groups = n.v[2], heads = n.v[3], value = n.v[4], tiles = (value + TILE - 1) / TILE;
    const i64 nth = c.number * heads + c.head, at_values = (c.first * heads + c.head) * value + c.column;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, pair = (lane & 3) * 2;
    const i64 at_keys = (c.first * groups + c.head * groups / heads) * KEY;
    const int tile = c.column / TILE, some = min(COLUMNS / TILE, (int)tiles - tile);
    // The states of the second half of the keys take the place of the keys of tokens.
    const u32 queries = shared_address(room), keys = queries + KEYS_BYTES, state = keys + KEYS_BYTES;
    const u32 values = state + STATES_BYTES;
    const auto fetch_states = [&](u32 to, int half) {
        constexpr int OF_TILE = STEPS / 2 * 64;
        const uint4* from = states + (nth * tiles + tile) * 2 * OF_TILE + half * OF_TILE;
        for (int i = 0; i < some; ++i) fetch_whole(to + i * OF_TILE * 16, from + i * 2 * OF_TILE, OF_TILE * 16);
    };
    fetch_keys(queries, q + at_keys, groups * KEY, c.count);
    fetch_keys(keys, k + at_keys, groups * KEY, c.count);
    copies_end();
    fetch_states(state, 0);
    if (DELTA)
        fetch_whole(values, updates + (nth * tiles + tile) * BLOCKS * 128, some * BLOCKS * 1024);
    else
        fetch_values<COLUMNS>(values, v + at_values, heads * value, c.count, c.columns);
    copies_end();
    const Factors& f = factors[nth];
    if (threadIdx.x < CHUNK) {
        sums[threadIdx.x] = f.sums[threadIdx.x];
        weights[threadIdx.x] = f.weights[threadIdx.x];
    }
    copies_wait<1>();
    __syncthreads();
    // Products of queries and keys, 16 tokens to a warp, with the tokens up to them.
    float score[2 * BLOCKS][4] = {};
#pragma unroll 2
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        load_matrices(a, keys_at(queries, warp * 16 + left_row(), step * 16 + left_column()));
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (block > warp) break;
            u32 b[4];
            load_matrices(b, keys_at(keys, block * 16 + right_row(), step * 16 + right_column()));
            product(score[2 * block], a, b[0], b[1]);
            product(score[2 * block + 1], a, b[2], b[3]);
        }
    }
    __syncthreads();
    fetch_states(keys, 1);
    copies_end();
    copies_wait<1>();
    __syncthreads();
    float out[COLUMNS / 8][4] = {};
    const auto multiply_states = [&](u32 from, int first) {
#pragma unroll 2
        for (int step = 0; step < STEPS / 2; ++step) {
            u32 a[4];
            load_matrices(a, keys_at(queries, warp * 16 + left_row(), (first + step) * 16 + left_column()));
#pragma unroll
            for (int i = 0; i < COLUMNS / TILE; ++i)
#pragma unroll
                for (int p = 1; p >= 0; --p) {
                    u32 b[4];
                    load_words<4>(b, from + (((i * (STEPS / 2) + step) * 2 + p) * 32 + lane) * 16);
                    product(out[2 * i], a, b[0], b[2]);
                    product(out[2 * i + 1], a, b[1], b[3]);
                }
        }
    };
    multiply_states(state, 0);
    copies_wait<0>();
    __syncthreads();
    multiply_states(keys, STEPS / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int s = warp * 16 + row + half * 8;
        const float from_start = f.from_start[s];
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i) {
            out[i][half * 2] *= from_start;
            out[i][half * 2 + 1] *= from_start;
        }
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        if (block > warp) break;
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int s = warp * 16 + row + (i & 1) * 8, j = block * 16 + (i >> 1) * 8 + pair;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float log = (sums[s].x - sums[j + e].x) + (sums[s].y - sums[j + e].y);
                const float by = DELTA ? __expf(log) : __expf(log) * weights[j + e];
                x[e] = j + e <= s ? score[2 * block + (i >> 1)][(i & 1) * 2 + e] * by : 0.0f;
            }
            parts_of<2>(x[0], x[1], &a[0][i], 4);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS / TILE; ++i) {
#if DELTA
            u32 part[2][2][2];
#pragma unroll
            for (int p = 0; p < 4; ++p)
                load_words<2>(part[p >> 1][p & 1], values + ((((i * BLOCKS + block) * 2 + (p >> 1)) * 2 + (p & 1)) * 32 + lane) * 8);
            const auto add = [&](int x, int y) {
                product(out[2 * i], a[x], part[y][0][0], part[y][1][0]);
                product(out[2 * i + 1], a[x], part[y][0][1], part[y][1][1]);
            };
            add(0, 1);
            add(1, 0);
            add(0, 0);
#else
            u32 b[4];
            load_matrices_transposed(b, values_at<COLUMNS>(values, block * 16 + left_row(), i * TILE + left_column()));
#pragma unroll
            for (int p = 1; p >= 0; --p) {
                product(out[2 * i], a[p], b[0], b[1]);
                product(out[2 * i + 1], a[p], b[2], b[3]);
            }
#endif
        }
    }
    // This warp's queries make room for its tokens of y, whose rows of 128 bytes are stored whole.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u8* at = room + keys_at(0, warp * 16 + row + half * 8, i * 8) + pair * 2;
            *(u32*)at = Mma<BF16>::pack(out[i][half * 2], out[i][half * 2 + 1]);
        }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * COLUMNS / 8; i += 32) {
        const int s = warp * 16 + i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8;
        if (s < c.count && column < c.columns)
            *(uint4*)(y + at_values + s * heads * value + column) = *(const uint4*)(room + keys_at(0, s, column));
    }
}
