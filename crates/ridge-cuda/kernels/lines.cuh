// Where the states of rows are. Defines: LINES, 1 where they are lines of a table: a row reads one of `lines` and writes the other; 0 where
// they are in the order of rows.

// The line that a row reads, or else writes, of `count`; -1 where there is none.
__device__ inline i64 line_of(const int* lines, i64 count, i64 row, int written) {
#if LINES
    const int line = lines[2 * row + written];
    return line < count ? line : -1;
#else
    return row;
#endif
}
