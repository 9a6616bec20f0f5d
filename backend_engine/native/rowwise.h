// What happens to a row between products, in float32. Sizes are multiples of LANES unless they are said to be any.
#pragma once

#include <cmath>

#include "vectors.h"

inline void rms_norm(const float *x, const float *weight, long size, float eps, float *out) {
    Vec squares{};
    for (long at = 0; at < size; at += LANES) squares = fused(load(x + at), load(x + at), squares);
    float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (long at = 0; at < size; at += LANES) store(out + at, load(x + at) * factor * load(weight + at));
}

// silu, or gelu by its approximation with tanh.
inline Vec activated(Vec x, bool gelu) {
    Vec exponent = gelu ? (x + x * x * x * 0.044715f) * 1.5957691216f : x;
    return x / (power_of_two(exponent * -LOG2_E) + 1.0f);
}

inline void add(float *to, const float *x, long size) {
    for (long at = 0; at < size; at += LANES) store(to + at, load(to + at) + load(x + at));
}

// A head of any size in two halves, each times its cosines plus the other half times its signed sines, all [size]. `out`
// may be `x`.
inline void turned(const float *x, const float *cosines, const float *sines, long size, float *out) {
    long half = size / 2;
    for (long at = 0; at < half; at++) {
        float low = x[at], high = x[half + at];
        out[at] = fused(high, sines[at], low * cosines[at]);
        out[half + at] = fused(low, sines[half + at], high * cosines[half + at]);
    }
}
