// Which of the rows that a block writes by place stay: of equal places the last row of the launch. The block has its rows' places in a
// hash table in shared memory, and looks up there the places of all rows behind, so that these are read once a block and not once a
// row. All threads of the block take part.
// Defines: OWN, the most rows of a block, a power of two and no more than its threads.

// A quarter of the table is taken.
#define ENTRIES (4 * OWN)

struct Latest {
    // Of an entry the place, -1 where there is none, and the last row seen with it: one of the block's, or ELSEWHERE.
    int place[ENTRIES], row[ENTRIES];

    static const int ELSEWHERE = 0x7fffffff;
    // By the upper bits of the product with 2^32 over the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
    __device__ static u32 entry_of(int at) { return (u32)at * 2654435769u / (0x80000000u / ENTRIES * 2u); }

    // The empty table.
    __device__ void clear() {
        for (int i = threadIdx.x; i < ENTRIES; i += blockDim.x) place[i] = row[i] = -1;
        __syncthreads();
    }
    // The entry of a place that is not negative, after this row of the block is seen with it.
    __device__ u32 enter(int at, int own) {
        u32 entry = entry_of(at);
        for (int there; (there = atomicCAS(place + entry, -1, at)) != -1 && there != at;) entry = (entry + 1) % ENTRIES;
        atomicMax(row + entry, own);
        return entry;
    }
    // A place of a row behind the block's.
    __device__ void meet(int at) {
        for (u32 entry = entry_of(at); place[entry] != -1 && at >= 0; entry = (entry + 1) % ENTRIES)
            if (place[entry] == at) {
                row[entry] = ELSEWHERE;
                return;
            }
    }
    // Row `own` of the block, the thread's, is at `at`, or at none where that is negative; rows of the launch from `behind` on are not the
    // block's. Does the row stay?
    __device__ bool stays(int at, int own, const int* places, int behind, int rows) {
        const u32 entry = at >= 0 ? enter(at, own) : 0;
        __syncthreads();
        // Sixteen at a time from the first that lies at a multiple of 16 bytes.
        const int lead = min(behind + (-(int)((u64)(places + behind) / 4) & 3), rows);
        const int fours = (rows - lead) / 4, end = lead + 4 * fours;
        if ((int)threadIdx.x < lead - behind) meet(places[behind + threadIdx.x]);
        if ((int)threadIdx.x < rows - end) meet(places[end + threadIdx.x]);
        for (int first = threadIdx.x; first < fours; first += 4 * blockDim.x) {
            int4 four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = first + i * (int)blockDim.x;
                four[i] = at < fours ? __ldg((const int4*)(places + lead) + at) : make_int4(-1, -1, -1, -1);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                meet(four[i].x);
                meet(four[i].y);
                meet(four[i].z);
                meet(four[i].w);
            }
        }
        __syncthreads();
        return at >= 0 && row[entry] == own;
    }
};
