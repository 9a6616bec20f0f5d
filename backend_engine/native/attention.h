// Attention of one row over a run of its keys, for the query heads that share a key/value head. Online softmax
// (arXiv:2205.14135) in float32; the parts of a row that were computed over different runs are merged afterwards.
#pragma once

#include <cmath>
#include <cstring>

#include "vectors.h"

constexpr int PART_KEYS = 256;  // keys of a part: a constant, or results would depend on the number of threads
constexpr int BLOCK_KEYS = 64;  // keys whose scores are computed before their values are read
constexpr int AHEAD_KEYS = 16;  // how far ahead keys are asked for
constexpr int MOST_GROUP = 4;   // heads that go over the keys together
constexpr int MOST_DIM = 256;

// Where the keys of a request lie: key j in slot pages[j / page_size] * page_size + j % page_size.
struct Keys {
    const int32_t *pages;
    long page_size;
    long stride;  // elements from one slot to the next

    // Where the keys first .. last - 1 lie.
    void find(long first, long last, long *places) const {
        for (long key = first, page = first / page_size; key < last; page++) {
            long slot = pages[page] * page_size - page * page_size, end = (page + 1) * page_size;
            for (end = end < last ? end : last; key < end; key++) *places++ = (slot + key) * stride;
        }
    }
};

// The maximum of a part's scores, the sum of their exponentials above it, and the values weighed by these.
struct Part {
    float top = -INFINITY;
    float total = 0;
};

template <class Stored, int HEADS, int KEYS>
inline void scores_of(const float *const (&queries)[MOST_GROUP], const Stored *k, const long *places, long dim,
                      float scale, float *scores) {
    Vec sums[HEADS][KEYS];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) sums[h][j] = Vec{};
    for (long d = 0; d < dim; d += LANES) {
        Vec query[HEADS];
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) query[h] = load(queries[h] + d);
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) {
            Vec key = load(k + places[j] + d);
            hold(key);
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) sums[h][j] = fused(query[h], key, sums[h][j]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
        float totals[KEYS];
        sums_of<KEYS>(sums[h], totals);
        for (int j = 0; j < KEYS; j++) scores[h * BLOCK_KEYS + j] = totals[j] * scale;
    }
}

// Asks for a key or value that will be read soon: heads of one slot lie apart, so the processor does not foresee it.
template <class Stored>
inline void prefetch(const Stored *from, long dim) {
    for (long d = 0; d < dim; d += 64 / (long)sizeof(Stored)) __builtin_prefetch(from + d);
}

template <class Stored, int HEADS, int VECS>
inline void add_values(const float (*weights)[BLOCK_KEYS], const Stored *v, const long *places, int keys, long d,
                       const float (&shrink)[MOST_GROUP], float *const (&out)[MOST_GROUP]) {
    Vec sums[HEADS][VECS];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) sums[h][i] = load(out[h] + d + i * LANES) * shrink[h];
    for (int j = 0; j < keys; j++) {
        Vec value[VECS];
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) value[i] = load(v + places[j] + d + i * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
            for (int i = 0; i < VECS; i++) sums[h][i] = fused(all(weights[h][j]), value[i], sums[h][i]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) store(out[h] + d + i * LANES, sums[h][i]);
}

// Keys first .. last - 1 for HEADS query heads; `out[h]` [dim] receives the weighed values.
template <class Stored, int HEADS>
void attend_heads(const float *const (&queries)[MOST_GROUP], const Stored *k, const Stored *v, const Keys &keys,
                  long first, long last, long dim, float scale, Part *parts, float *const (&out)[MOST_GROUP]) {
    constexpr int VECS = ACCUMULATORS >= 24 ? 4 : 2;
    alignas(64) float scores[HEADS][BLOCK_KEYS];
    long places[PART_KEYS];
    keys.find(first, last, places);
    for (int h = 0; h < HEADS; h++) {
        parts[h] = Part{};
        std::memset(out[h], 0, dim * sizeof(float));
    }
    for (long start = 0; start < last - first; start += BLOCK_KEYS) {
        int count = (int)(last - first - start < BLOCK_KEYS ? last - first - start : BLOCK_KEYS);
        const long *here = places + start;
        int j = 0;
        for (; j + 4 <= count; j += 4) {
            for (int i = j; i < j + 4; i++) {
                prefetch(v + here[i], dim);
                if (start + i + AHEAD_KEYS < last - first) prefetch(k + here[i + AHEAD_KEYS], dim);
            }
            scores_of<Stored, HEADS, 4>(queries, k, here + j, dim, scale, scores[0] + j);
        }
        for (; j < count; j++) scores_of<Stored, HEADS, 1>(queries, k, here + j, dim, scale, scores[0] + j);
        float shrink[MOST_GROUP];
        for (int h = 0; h < HEADS; h++) {
            for (j = count; j % LANES; j++) scores[h][j] = -INFINITY;
            Vec top = all(-INFINITY);
            for (int i = 0; i < j; i += LANES) top = larger(top, load(scores[h] + i));
            float fresh = largest(top);
            fresh = fresh > parts[h].top ? fresh : parts[h].top;
            Vec total{};
            for (int i = 0; i < j; i += LANES) {
                Vec weight = power_of_two((load(scores[h] + i) - fresh) * LOG2_E);
                store(scores[h] + i, weight);
                total += weight;
            }
            shrink[h] = parts[h].total > 0 ? std::exp(parts[h].top - fresh) : 0.0f;
            parts[h].total = parts[h].total * shrink[h] + sum(total);
            parts[h].top = fresh;
        }
        long d = 0;
        for (; d + VECS * LANES <= dim; d += VECS * LANES)
            add_values<Stored, HEADS, VECS>(scores, v, here, count, d, shrink, out);
        for (; d < dim; d += LANES) add_values<Stored, HEADS, 1>(scores, v, here, count, d, shrink, out);
    }
}

// `heads` query heads at `q` [heads, dim] over keys first .. last - 1 of their key/value head, whose slot 0 is at `k`
// and `v`; `out` is [heads, dim], `parts` [heads].
template <class Stored>
void attend(const float *q, int heads, const Stored *k, const Stored *v, const Keys &keys, long first, long last,
            long dim, float scale, Part *parts, float *out) {
    for (int head = 0; head < heads; head += MOST_GROUP) {
        int here = heads - head < MOST_GROUP ? heads - head : MOST_GROUP;
        const float *queries[MOST_GROUP];
        float *outs[MOST_GROUP];
        for (int h = 0; h < here; h++) queries[h] = q + (head + h) * dim, outs[h] = out + (head + h) * dim;
        Part *mine = parts + head;
        switch (here) {
            case 1: attend_heads<Stored, 1>(queries, k, v, keys, first, last, dim, scale, mine, outs); break;
            case 2: attend_heads<Stored, 2>(queries, k, v, keys, first, last, dim, scale, mine, outs); break;
            case 3: attend_heads<Stored, 3>(queries, k, v, keys, first, last, dim, scale, mine, outs); break;
            default: attend_heads<Stored, 4>(queries, k, v, keys, first, last, dim, scale, mine, outs);
        }
    }
}

// Takes a head's next part with its values [dim] into the ones before it.
inline void absorb(Part &into, float *into_values, const Part &part, const float *values, long dim) {
    float top = into.top > part.top ? into.top : part.top;
    float before = into.total > 0 ? std::exp(into.top - top) : 0.0f, after = std::exp(part.top - top);
    for (long d = 0; d < dim; d += LANES)
        store(into_values + d, load(into_values + d) * before + load(values + d) * after);
    into = {top, into.total * before + part.total * after};
}

inline void divide(float *x, float by, long dim) {
    for (long d = 0; d < dim; d += LANES) store(x + d, load(x + d) / by);
}

// A whole row: as `attend` over keys first .. last - 1, part by part; `out` [heads, dim] is its attention.
template <class Stored>
void attend_row(const float *q, int heads, const Stored *k, const Stored *v, const Keys &keys, long first, long last,
                long dim, float scale, float *out) {
    Part parts[MOST_GROUP], sofar[MOST_GROUP];
    alignas(64) float values[MOST_GROUP * MOST_DIM];
    for (int done = 0; done < heads; done += MOST_GROUP, q += MOST_GROUP * dim, out += MOST_GROUP * dim) {
        int here = heads - done < MOST_GROUP ? heads - done : MOST_GROUP;
        std::memset(out, 0, here * dim * sizeof(float));
        for (int h = 0; h < here; h++) sofar[h] = Part{};
        for (long start = first / PART_KEYS * PART_KEYS; start < last; start += PART_KEYS) {
            long from = start < first ? first : start, to = start + PART_KEYS < last ? start + PART_KEYS : last;
            attend(q, here, k, v, keys, from, to, dim, scale, parts, values);
            for (int h = 0; h < here; h++) absorb(sofar[h], out + h * dim, parts[h], values + h * dim, dim);
        }
        for (int h = 0; h < here; h++) divide(out + h * dim, sofar[h].total, dim);
    }
}
