// What a step knows of its tokens: positions and slots, embedded rows, changed elements of tables, and which candidates
// are accepted. Floor: a launch. Defines: LAYOUT with BLOCK, the tokens of a cache block; ACCEPT with DEPTH, the most
// candidates of a path; TABLE_WRITE with ELEMENT, the type of an element,
// and OWN of `latest.cuh`, which is in front, the threads of a block; or EMBED with TABLE and D, dtypes of table and
// rows.

#if LAYOUT
// Numbers: tokens, sequences, blocks of a sequence.
extern "C" __global__ __launch_bounds__(256) void token_layout(
    const int* __restrict__ ids, const int* __restrict__ starts, const int* __restrict__ lengths,
    const int* __restrict__ table, int* __restrict__ positions, int* __restrict__ slots, Numbers<3> n
) {
    others_may_begin();
    after_others();
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= n.v[0]) return;
    int position = 0, slot = -1;
    const int id = ids[token];
    if (id >= 0 && id < n.v[1]) {
        position = (int)((u32)lengths[id] + (u32)token - (u32)starts[id]);
        const int nth = position / BLOCK;
        const int block = position >= 0 && nth < n.v[2] ? table[id * n.v[2] + nth] : -1;
        if (block >= 0) slot = (int)((u32)block * BLOCK + (u32)(position % BLOCK));
    }
    positions[token] = position;
    slots[token] = slot;
}
#elif ACCEPT
// Numbers: lines. One block makes all. A line's flags: 1 it is accepted, 2 a child of it is.
extern "C" __global__ __launch_bounds__(256) void accept_candidates(
    const int* __restrict__ next, const int* __restrict__ tokens, const int* __restrict__ parents, int* ends, Numbers<1> n
) {
    others_may_begin();
    after_others();
    const int lines = (int)n.v[0];
    for (int line = threadIdx.x; line < lines; line += blockDim.x) {
        int at = line, accepted = 0;
        for (int step = 0; step <= DEPTH; step++) {
            const int parent = parents[at];
            accepted = parent == -1;
            if (parent < 0 || parent >= lines || next[parent] != tokens[at]) break;
            at = parent;
        }
        ends[line] = accepted;
    }
    __syncthreads();
    for (int line = threadIdx.x; line < lines; line += blockDim.x) {
        const int parent = parents[line];
        if ((ends[line] & 1) && parent >= 0 && parent < lines) atomicOr(&ends[parent], 2);
    }
    __syncthreads();
    for (int line = threadIdx.x; line < lines; line += blockDim.x) ends[line] = ends[line] == 1;
}
#elif TABLE_WRITE
// Numbers: changes, places of the table, elements of a place, changes of a block, of which blocks of a column of the grid make each a
// part. Of equal places the last value stays.
extern "C" __global__ __launch_bounds__(OWN) void table_write(
    const ELEMENT* __restrict__ values, const int* __restrict__ places, ELEMENT* __restrict__ table, Numbers<4> n
) {
    __shared__ Latest latest;
    __shared__ int place_of[OWN];
    others_may_begin();
    latest.clear();
    after_others();
    const int changes = (int)n.v[0], count = (int)n.v[3], first = blockIdx.x * count, behind = min(first + count, changes);
    const int own = threadIdx.x;
    int place = first + own < behind ? places[first + own] : -1;
    if (place >= n.v[1]) place = -1;
    const bool stays = latest.stays(place, own, places, behind, changes);
    place_of[own] = stays ? place : -1;
    __syncthreads();
    const i64 row = n.v[2];
    for (i64 i = (i64)blockIdx.y * OWN + own; i < (behind - first) * row; i += (i64)gridDim.y * OWN) {
        // Several are short.
        const int change = count > 1 ? (int)i / (int)row : 0;
        if (place_of[change] >= 0) table[place_of[change] * row + i - change * row] = values[first * row + i];
    }
}
#else
// Numbers: rows of the table, elements of a row. A block makes a token.
extern "C" __global__ __launch_bounds__(256) void embedding(
    const TABLE::Raw* __restrict__ table, const int* __restrict__ ids, D::Raw* __restrict__ out, Numbers<2> n
) {
    others_may_begin();
    after_others();
    const i64 id = ids[blockIdx.x], row = n.v[1];
    const bool known = id >= 0 && id < n.v[0];
    for (i64 i = threadIdx.x; i < row; i += blockDim.x)
        out[blockIdx.x * row + i] = D::store(known ? cast<D, TABLE>(TABLE::load(table[id * row + i])) : 0.0f);
}
#endif
