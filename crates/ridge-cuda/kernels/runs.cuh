// Which tokens of a step attention takes one by one: those in runs of fewer than FEW tokens of one sequence, and none where FEW
// is 0. Others go by tiles.
// Defines: FEW.

#if FEW
__device__ inline bool is_few(const int* ids, int tokens, int token) {
    const int id = ids[token];
    int run = 1;
    for (int t = token - 1; t >= 0 && run < FEW && ids[t] == id; --t) ++run;
    for (int t = token + 1; t < tokens && run < FEW && ids[t] == id; ++t) ++run;
    return run < FEW;
}
#endif
