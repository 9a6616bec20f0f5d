// Vectors as wide as the machine's registers, by the vector extensions of GCC and clang. What these cannot say is named
// for each machine: a product and a sum rounded once, and for x86 products of 16-bit integers added up in pairs.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BW__)
constexpr int LANES = 16, ACCUMULATORS = 24;
#elif defined(__AVX2__)
constexpr int LANES = 8, ACCUMULATORS = 12;
#elif defined(__aarch64__)
constexpr int LANES = 4, ACCUMULATORS = 24;
#else
constexpr int LANES = 4, ACCUMULATORS = 12;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));  // twice as many
typedef int16_t HalfShorts __attribute__((vector_size(LANES * 2)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES * 2)));  // of Shorts

struct Bf16 {
    uint16_t bits;
};

template <class To, class From>
inline To read(const From *from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline Vec load(const float *from) { return read<Vec>(from); }

inline Vec load(const Bf16 *from) {  // a bfloat16 is the upper half of a float
    return (Vec)(__builtin_convertvector(read<Halves>(from), Words) << 16);
}

inline void store(float *to, Vec value) { std::memcpy(to, &value, sizeof value); }

inline void store(Bf16 *to, Vec value) {  // to the nearest, ties to even, as torch rounds
    Words bits = (Words)value;
    Halves rounded = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
    std::memcpy(to, &rounded, sizeof rounded);
}

inline Vec all(float value) { return value - Vec{}; }

// a * b + c, rounded once where the machine can. Said by name where rows are added up: left to itself a compiler rounds
// once in one shape of a tile and twice in another (GCC avoids chains of such instructions on some processors).
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512BW__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__SSE2__) && defined(__FMA__)
    return (Vec)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Keeps a value in a register, where a compiler would load it from memory again for each use.
template <class Value>
inline void hold(Value &value) {
#if defined(__AVX512BW__)
    asm("" : "+v"(value));
#elif defined(__SSE2__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    (void)value;
#endif
}

inline Shorts widened(const int8_t *from) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_cvtepi8_epi16(read<__m256i>(from));
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtepi8_epi16(read<__m128i>(from));
#else
    return __builtin_convertvector(read<Bytes>(from), Shorts);
#endif
}

// Adds the products of neighbours to a lane: lane i gets a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
inline void add_pairs(Ints &sums, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
    sums = (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    sums += (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    sums += (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    sums += (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    Ints left = (Ints)a, right = (Ints)b;
    sums += ((left << 16) >> 16) * ((right << 16) >> 16) + (left >> 16) * (right >> 16);
#endif
}

template <int STEP, class Value, int... LANE>
inline Value swapped(Value value, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(value, value, (LANE ^ STEP)...);
#else
    return __builtin_shuffle(value, Ints{(LANE ^ STEP)...});
#endif
}

// Adds up lanes, always in the same order.
template <int STEP = LANES / 2, class Value>
inline auto sum(Value value) {
    value += swapped<STEP>(value, std::make_integer_sequence<int, LANES>{});
    if constexpr (STEP == 1)
        return value[0];
    else
        return sum<STEP / 2>(value);
}

// Lanes of `a` and of `b` folded to half as many, side by side: where a lane's number has STEP it is b's, else a's.
template <int STEP, class Value, int... LANE>
inline Value folded(Value a, Value b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (LANE + (LANE & STEP ? LANES : 0))...) +
           __builtin_shufflevector(a, b, ((LANE ^ STEP) + (LANE & STEP ? LANES : 0))...);
#else
    return __builtin_shuffle(a, b, Ints{(LANE + (LANE & STEP ? LANES : 0))...}) +
           __builtin_shuffle(a, b, Ints{((LANE ^ STEP) + (LANE & STEP ? LANES : 0))...});
#endif
}

template <int COUNT, int STEP = LANES / 2>
inline Vec all_folded(const Vec (&values)[COUNT]) {
    if constexpr (COUNT > 1) {
        Vec half[COUNT / 2];
#pragma GCC unroll 8
        for (int i = 0; i < COUNT / 2; i++)
            half[i] = folded<STEP>(values[i], values[i + COUNT / 2], std::make_integer_sequence<int, LANES>{});
        return all_folded<COUNT / 2, STEP / 2>(half);
    } else if constexpr (STEP > 0) {
        const Vec once[1] = {values[0] + swapped<STEP>(values[0], std::make_integer_sequence<int, LANES>{})};
        return all_folded<1, STEP / 2>(once);
    } else {
        return values[0];
    }
}

// The sums of COUNT vectors, each added up in the order of `sum`, in a third of the instructions.
template <int COUNT>
inline void sums_of(const Vec (&values)[COUNT], float (&out)[COUNT]) {
    constexpr int TOGETHER = COUNT > 4 && LANES >= 8 ? 8 : COUNT > 2 ? 4 : COUNT;
#pragma GCC unroll 8
    for (int first = 0; first < COUNT; first += TOGETHER) {
        Vec some[TOGETHER];
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; i++) some[i] = first + i < COUNT ? values[first + i] : Vec{};
        Vec sums = all_folded<TOGETHER>(some);
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; i++)
            if (first + i < COUNT) out[first + i] = sums[i * (LANES / TOGETHER)];
    }
}

template <class Value>
inline Value larger(Value a, Value b) {
    return a > b ? a : b;
}

template <int STEP = LANES / 2, class Value>
inline auto largest(Value value) {
    value = larger(value, swapped<STEP>(value, std::make_integer_sequence<int, LANES>{}));
    if constexpr (STEP == 1)
        return value[0];
    else
        return largest<STEP / 2>(value);
}

inline Vec magnitude(Vec value) { return (Vec)((Words)value & 0x7fffffffu); }

// 2^x to about two units in the last place; x counts as at least -126 and at most 127. The polynomial
// has the least relative error, 7.5e-8, for a rest of at most half a unit.
inline Vec power_of_two(Vec x) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: its sum's low bits are the whole part
    x = larger(all(-126.0f), x);  // in this order: NaN stays NaN
    x = x > 127.0f ? all(127.0f) : x;
    Vec shifted = x + rounder, rest = x - (shifted - rounder);
    Vec power = all(0.00132764718f);
    power = fused(power, rest, all(0.00967554133f));
    power = fused(power, rest, all(0.0555071327f));
    power = fused(power, rest, all(0.240221197f));
    power = fused(power, rest, all(0.693146967f));
    power = fused(power, rest, all(1.00000007f));
    return (Vec)((Ints)power + ((Ints)shifted << 23));
}

constexpr float LOG2_E = 1.44269504f;
