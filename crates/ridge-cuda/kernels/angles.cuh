// Angles of rotary positions. An angle is taken in f64 and brought to one turn before its sine and cosine are taken in f32: at
// position 10^6 an angle in f32 would be off by a thirtieth of a radian.
// Defines: PAIRS that are rotated, 0 for none; FREQUENCIES, radians a position; SCALE.

#if PAIRS
__constant__ double frequency[PAIRS] = {FREQUENCIES};

// By what pair `i` is rotated at a position.
__device__ inline void angle_of(int position, int i, float& cosine, float& sine) {
    const double turn = 6.283185307179586476925, angle = (double)position * frequency[i];
    float s, c;
    sincosf((float)(angle - turn * rint(angle * (1.0 / turn))), &s, &c);
    cosine = (float)((double)c * SCALE);
    sine = (float)((double)s * SCALE);
}
#endif
