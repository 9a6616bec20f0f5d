// Products of a few rows with a matrix [outputs, inputs] of float32, bfloat16 or int8 weights.
//
// A sum runs along the inputs in the lanes of one vector, whatever the rows and outputs beside it: what a row yields
// depends neither on other rows nor on how the outputs are cut into tasks. Weights are read from memory once.
#pragma once

#include <cmath>

#include "vectors.h"

constexpr int TASK_OUTPUTS = 24;  // a multiple of the outputs of every tile
// How far ahead weights are asked for, into the second cache: a core alone keeps too few reads of memory going.
constexpr long AHEAD = 16384;
constexpr int MOST_TILE_ROWS = ACCUMULATORS / 3;

struct Matrix {
    const void *weight;   // [outputs, inputs]
    const float *scales;  // [outputs], of int8 weights only
    const float *bias;    // [outputs] or null
};

// How rows stand ready for a kind of weight, and how a step of the sum goes: AT_ONCE inputs of one output.
template <class Weight>
struct Kind;

template <>
struct Kind<float> {
    static constexpr int AT_ONCE = LANES;
    typedef float Input;
    typedef Vec Sum;
    typedef Vec Loaded;
    static Loaded weights(const float *from) { return load(from); }
    static Loaded inputs(const Input *from) { return load(from); }
    static void add(Sum &sums, Loaded weights, Loaded inputs) { sums = fused(weights, inputs, sums); }
    static Vec total(Sum sums) { return sums; }
};

template <>
struct Kind<Bf16> {  // a pair of weights is a 32-bit word; inputs at even places come before those at odd ones
    static constexpr int AT_ONCE = 2 * LANES;
    typedef float Input;
    typedef Vec Sum;
    struct Loaded {
        Vec even, odd;
    };
    static Loaded weights(const Bf16 *from) {
        Words pairs = read<Words>(from);
        return {(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000u)};
    }
    static Loaded inputs(const Input *from) { return {load(from), load(from + LANES)}; }
    static void add(Sum &sums, Loaded weights, Loaded inputs) {
        sums = fused(weights.even, inputs.even, sums);
        sums = fused(weights.odd, inputs.odd, sums);
    }
    static Vec total(Sum sums) { return sums; }
};

template <>
struct Kind<int8_t> {  // inputs are 16-bit steps of a row's largest magnitude; sums of integers are exact
    static constexpr int AT_ONCE = 2 * LANES;
    typedef int16_t Input;
    typedef Ints Sum;
    typedef Shorts Loaded;
    static Loaded weights(const int8_t *from) { return widened(from); }
    static Loaded inputs(const Input *from) { return read<Shorts>(from); }
    static void add(Sum &sums, Loaded weights, Loaded inputs) { add_pairs(sums, weights, inputs); }
    static Vec total(Sum sums) { return __builtin_convertvector(sums, Vec); }  // all lanes together may exceed 32 bits
};

// Rows that stand ready: `steps[r]` is what a unit of row r's integers is worth, null for floats.
template <class Weight>
struct Rows {
    const typename Kind<Weight>::Input *x;
    long inputs;
    const float *steps;

    Rows from(int row) const { return {x + row * inputs, inputs, steps ? steps + row : nullptr}; }
};

inline Rows<float> ready(Rows<float>, const float *x, int, long inputs, void *, float *) { return {x, inputs, nullptr}; }

inline Rows<Bf16> ready(Rows<Bf16>, const float *x, int rows, long inputs, void *space, float *) {
    float *to = (float *)space;
    for (long at = 0; at < rows * inputs; at += 2 * LANES)
        for (int i = 0; i < LANES; i++) to[at + i] = x[at + 2 * i], to[at + LANES + i] = x[at + 2 * i + 1];
    return {to, inputs, nullptr};
}

// As many steps as leave the sum of a lane within 32 bits; at most 15 bits.
inline float most_steps(long inputs) {
    float fits = 2147483000.0f / (2 * 127) / (inputs / (2 * LANES));
    return fits < 32767.0f ? std::floor(fits) : 32767.0f;
}

inline Rows<int8_t> ready(Rows<int8_t>, const float *x, int rows, long inputs, void *space, float *steps) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    int16_t *to = (int16_t *)space;
    float most = most_steps(inputs);
    for (int row = 0; row < rows; row++, x += inputs, to += inputs) {
        Ints top{};  // the bits of magnitudes have the order of their values, and behind all of these that of NaN
        for (long at = 0; at < inputs; at += LANES) top = larger(top, (Ints)magnitude(load(x + at)));
        int32_t bits = largest(top);
        float peak = read<float>(&bits), factor = peak > 0 ? most / peak : 0.0f;
        for (long at = 0; at < inputs; at += LANES) {
            Ints whole = __builtin_convertvector((load(x + at) * factor + rounder) - rounder, Ints);
            HalfShorts narrow = __builtin_convertvector(whole, HalfShorts);
            std::memcpy(to + at, &narrow, sizeof narrow);
        }
        steps[row] = peak / most;
    }
    return {(const int16_t *)space, inputs, steps};
}

constexpr int tile_outputs(int rows) { return ACCUMULATORS / rows < 8 ? ACCUMULATORS / rows : 8; }

// ROWS rows of `x` times OUTPUTS rows of `weight`.
template <class Weight, int ROWS, int OUTPUTS>
inline void tile(const Weight *weight, const typename Kind<Weight>::Input *x, long inputs,
                 float (&out)[ROWS][OUTPUTS]) {
    using K = Kind<Weight>;
    typename K::Sum sums[ROWS][OUTPUTS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) sums[r][o] = typename K::Sum{};
    for (long at = 0; at < inputs; at += K::AT_ONCE) {
        typename K::Loaded weights[OUTPUTS];
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) {
            weights[o] = K::weights(weight + o * inputs + at);
            if (at * sizeof(Weight) % 64 == 0)
                __builtin_prefetch((const char *)(weight + o * inputs + at) + AHEAD, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            typename K::Loaded row = K::inputs(x + r * inputs + at);
            if constexpr (sizeof row == sizeof(Vec)) hold(row);
#pragma GCC unroll 8
            for (int o = 0; o < OUTPUTS; o++) K::add(sums[r][o], weights[o], row);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        Vec totals[OUTPUTS];
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) totals[o] = K::total(sums[r][o]);
        sums_of<OUTPUTS>(totals, out[r]);
    }
}

template <class Weight, int ROWS, int OUTPUTS>
inline void tile_into(const Matrix &matrix, const Rows<Weight> &rows, long output, float *out, long stride) {
    float sums[ROWS][OUTPUTS];
    tile<Weight, ROWS, OUTPUTS>((const Weight *)matrix.weight + output * rows.inputs, rows.x, rows.inputs, sums);
    for (int o = 0; o < OUTPUTS; o++) {
        float scale = matrix.scales ? matrix.scales[output + o] : 1.0f;
        float bias = matrix.bias ? matrix.bias[output + o] : 0.0f;
        for (int r = 0; r < ROWS; r++) {
            float step = rows.steps ? rows.steps[r] : 1.0f;
            out[r * stride + o] = fused(sums[r][o], scale * step, bias);
        }
    }
}

template <class Weight, int ROWS>
void tiles(const Matrix &matrix, const Rows<Weight> &rows, long first, long last, float *out, long stride) {
    constexpr int OUTPUTS = tile_outputs(ROWS);
    long at = first;
    for (; at + OUTPUTS <= last; at += OUTPUTS)
        tile_into<Weight, ROWS, OUTPUTS>(matrix, rows, at, out + at - first, stride);
    for (; at < last; at++) tile_into<Weight, ROWS, 1>(matrix, rows, at, out + at - first, stride);
}

template <class Weight, int ROWS = MOST_TILE_ROWS>
void tiles_of(int count, const Matrix &matrix, const Rows<Weight> &rows, long first, long last, float *out,
              long stride) {
    if constexpr (ROWS > 0) {
        if (count == ROWS)
            tiles<Weight, ROWS>(matrix, rows, first, last, out, stride);
        else
            tiles_of<Weight, ROWS - 1>(count, matrix, rows, first, last, out, stride);
    }
}

// Outputs first .. last - 1 of `count` rows; output o of row r goes to out[r * stride + o - first].
template <class Weight>
void product(const Matrix &matrix, const Rows<Weight> &rows, int count, long first, long last, float *out,
             long stride) {
    for (int row = 0; row < count; row += MOST_TILE_ROWS) {
        int here = count - row < MOST_TILE_ROWS ? count - row : MOST_TILE_ROWS;
        tiles_of<Weight>(here, matrix, rows.from(row), first, last, out + row * stride, stride);
    }
}
