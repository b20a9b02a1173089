// Groups of rows whose offsets are read on the device.

enum GroupKind { NO_GROUP, A_GROUP, ROWS_BEHIND };

// The group of this block, whose number is blockIdx.y. Where there are fewer rows than groups, a block has the group whose first row is the
// one of its number. The last block has the rows behind the last group.
__device__ inline GroupKind find_group(const int* offsets, int groups, int& group) {
    const int lane = threadIdx.x & 31, last = gridDim.y - 1, number = blockIdx.y;
    group = number;
    if (number == last) return ROWS_BEHIND;
    if (last >= groups) return A_GROUP;
    int below = 0;
    for (int g = lane; g < groups; g += 32) below += offsets[g + 1] <= number;
    group = __reduce_add_sync(0xffffffffu, below);
    return group < groups && offsets[group] == number ? A_GROUP : NO_GROUP;
}
