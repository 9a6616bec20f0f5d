// Attention of many rows over their keys, in float32: blocks of rows and keys with an online softmax (arXiv:2307.08691).
//
// Scores of a tile of rows are computed for a few vectors of keys at once, the rows' elements being broadcast, so keys
// lie transposed; query heads that share a key/value head are rows of one block. Blocks of keys begin at multiples of
// their size and sums run in the order of keys: what a row yields does not depend on the rows beside it or on threads.
#pragma once

#include <algorithm>
#include <utility>

#include "attention.h"

constexpr int SCORE_VECS = 3, SCORE_KEYS = SCORE_VECS * LANES;  // keys of a score tile
constexpr int SCORE_ROWS = ACCUMULATORS / SCORE_VECS;
constexpr int VALUE_VECS = ACCUMULATORS >= 24 ? 4 : 2;
constexpr int VALUE_ROWS = ACCUMULATORS / VALUE_VECS;
constexpr int BLOCK_ROWS = 192, KEY_BLOCK = 96;  // multiples of every tile
static_assert(BLOCK_ROWS % SCORE_ROWS == 0 && BLOCK_ROWS % VALUE_ROWS == 0 && KEY_BLOCK % SCORE_KEYS == 0);

template <int STEP, int... LANE>
inline void exchange(Vec &a, Vec &b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    Vec low = __builtin_shufflevector(a, b, (LANE & STEP ? (LANE ^ STEP) + LANES : LANE)...);
    Vec high = __builtin_shufflevector(a, b, (LANE & STEP ? LANE + LANES : LANE ^ STEP)...);
#else
    Vec low = __builtin_shuffle(a, b, Ints{(LANE & STEP ? (LANE ^ STEP) + LANES : LANE)...});
    Vec high = __builtin_shuffle(a, b, Ints{(LANE & STEP ? LANE + LANES : LANE ^ STEP)...});
#endif
    a = low, b = high;
}

// Swaps rows and columns of a square of vectors.
template <int STEP = LANES / 2>
inline void transpose(Vec (&square)[LANES]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) exchange<STEP>(square[i], square[i + STEP], std::make_integer_sequence<int, LANES>{});
    if constexpr (STEP > 1) transpose<STEP / 2>(square);
}

// The rows of one request that are computed together, as far as one key/value head is concerned: row r of a block is
// query head r % group of the request's row r / group. It sees keys first[r] .. last[r] - 1.
class RowBlock {
  public:
    static size_t floats(long dim) {
        return (BLOCK_ROWS * 2 + KEY_BLOCK * 2) * dim + BLOCK_ROWS * (KEY_BLOCK + LANES + 1);
    }

    // `space` has floats(dim), aligned to 64 bytes.
    RowBlock(float *space, long dim)
        : dim_(dim), queries_(space), out_(queries_ + BLOCK_ROWS * dim), keys_(out_ + BLOCK_ROWS * dim),
          values_(keys_ + KEY_BLOCK * dim), scores_(values_ + KEY_BLOCK * dim),
          totals_(scores_ + BLOCK_ROWS * KEY_BLOCK), tops_(totals_ + BLOCK_ROWS * LANES) {}

    // `rows` rows of `group` heads at `q`, which get `out`, both `stride` floats from one row to the next; each sees
    // its `visible` keys, or with a window the last ones of them.
    void attend(const float *q, float *out, long stride, int rows, int group, const int32_t *visible, int window,
                const float *k, const float *v, const Keys &where, float scale) {
        rows_ = rows * group;
        for (int row = 0; row < rows_; row++) {
            last_[row] = visible[row / group];
            first_[row] = window ? std::max(0, last_[row] - window) : 0;
        }
        for (int row = 0; row < rows_; row += SCORE_ROWS) score_keys_[row / SCORE_ROWS] = seen(row, row + SCORE_ROWS);
        for (int row = 0; row < rows_; row += VALUE_ROWS) value_keys_[row / VALUE_ROWS] = seen(row, row + VALUE_ROWS);
        auto [from, to] = seen(0, rows_);
        take_queries(q, stride, group, scale * LOG2_E);
        std::memset(out_, 0, rows_ * dim_ * sizeof(float));
        std::fill(tops_, tops_ + rows_, -INFINITY);
        std::fill(totals_, totals_ + rows_ * LANES, 0.0f);
        for (int start = from / KEY_BLOCK * KEY_BLOCK; start < to; start += KEY_BLOCK) {
            int count = std::min(KEY_BLOCK, to - start);
            take_keys(k, v, where, start, count);
            multiply_keys(start, count);
            weigh(start, count);
            add_values(start, count);
        }
        for (int row = 0; row < rows_; row++) {
            float total = sum(load(totals_ + row * LANES));
            for (long d = 0; d < dim_; d += LANES)
                store(out + row / group * stride + row % group * dim_ + d, load(out_ + row * dim_ + d) / total);
        }
    }

  private:
    struct Span {
        int first, last;
    };

    // The keys that some of the rows row .. end - 1 see.
    Span seen(int row, int end) const {
        end = std::min(end, rows_);
        return {*std::min_element(first_ + row, first_ + end), *std::max_element(last_ + row, last_ + end)};
    }

    // A tile's rows beside each other, element by element. Rows beyond the last are zeros.
    void take_queries(const float *q, long stride, int group, float scale) {
        for (int tile = 0; tile < rows_; tile += SCORE_ROWS) {
            float *to = queries_ + tile * dim_;
            for (int r = 0; r < SCORE_ROWS; r++) {
                const float *from = q + (tile + r) / group * stride + (tile + r) % group * dim_;
                for (long d = 0; d < dim_; d++) to[d * SCORE_ROWS + r] = tile + r < rows_ ? from[d] * scale : 0.0f;
            }
        }
    }

    // A block of keys in tiles [dim][SCORE_KEYS], the last one repeated behind it, and its values [count][dim].
    void take_keys(const float *k, const float *v, const Keys &where, int start, int count) {
        long places[KEY_BLOCK + LANES];
        where.find(start, start + count, places);
        std::fill(places + count, places + count + LANES, places[count - 1]);
        for (int key = 0; key < count; key += LANES) {
            int following = std::min(key + 2 * LANES, count);
            for (int i = key + LANES; i < following; i++) prefetch(k + places[i], dim_);
            for (int i = key; i < std::min(key + LANES, count); i++) prefetch(v + places[i], dim_);
            float *to = keys_ + key / SCORE_KEYS * SCORE_KEYS * dim_ + key % SCORE_KEYS;
            for (long d = 0; d < dim_; d += LANES) {
                Vec square[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) square[i] = load(k + places[key + i] + d);
                transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) store(to + (d + i) * SCORE_KEYS, square[i]);
            }
        }
        for (int key = 0; key < count; key++)
            for (long d = 0; d < dim_; d += LANES) store(values_ + key * dim_ + d, load(v + places[key] + d));
    }

    void multiply_keys(int start, int count) {
        for (int key = 0; key < count; key += SCORE_KEYS)
            for (int row = 0; row < rows_; row += SCORE_ROWS) {
                Span keys = score_keys_[row / SCORE_ROWS];
                int ahead = std::min(keys.last - start, count) - key;
                if (ahead > 0 && start + key + SCORE_KEYS > keys.first)
                    score_tile_of(ahead, queries_ + row * dim_, keys_ + key * dim_, scores_ + row * KEY_BLOCK + key);
            }
    }

    // As many vectors of keys as there are keys ahead.
    template <int VECS = 1>
    void score_tile_of(int ahead, const float *queries, const float *keys, float *scores) const {
        if constexpr (VECS < SCORE_VECS)
            if (ahead > VECS * LANES) return score_tile_of<VECS + 1>(ahead, queries, keys, scores);
        score_tile<VECS>(queries, keys, scores);
    }

    template <int VECS>
    void score_tile(const float *queries, const float *keys, float *scores) const {
        Vec sums[SCORE_ROWS][VECS];
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_ROWS; r++)
#pragma GCC unroll 3
            for (int i = 0; i < VECS; i++) sums[r][i] = Vec{};
        for (long d = 0; d < dim_; d++, queries += SCORE_ROWS, keys += SCORE_KEYS) {
            Vec key[VECS];
#pragma GCC unroll 3
            for (int i = 0; i < VECS; i++) {
                key[i] = load(keys + i * LANES);
                hold(key[i]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < SCORE_ROWS; r++) {
                Vec query = all(queries[r]);
                hold(query);
#pragma GCC unroll 3
                for (int i = 0; i < VECS; i++) sums[r][i] = fused(query, key[i], sums[r][i]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_ROWS; r++)
#pragma GCC unroll 3
            for (int i = 0; i < VECS; i++) store(scores + r * KEY_BLOCK + i * LANES, sums[r][i]);
    }

    // Scores become weights, zeros where a row sees nothing; what was summed up shrinks to the new maximum.
    void weigh(int start, int count) {
        int padded = (count + LANES - 1) / LANES * LANES;
        for (int row = 0; row < rows_; row++) {
            float *scores = scores_ + row * KEY_BLOCK;
            int first = std::max(first_[row] - start, 0), last = std::min(last_[row] - start, count);
            if (first >= last) {
                std::memset(scores, 0, padded * sizeof(float));
                continue;
            }
            bool cut = first > 0 || last < padded;
            if (cut) {
                std::fill(scores, scores + first, -INFINITY);
                std::fill(scores + last, scores + padded, -INFINITY);
            }
            Vec top = load(scores);
            for (int at = LANES; at < padded; at += LANES) top = larger(load(scores + at), top);
            float before = tops_[row], fresh = std::max(before, largest(top));
            Vec total = load(totals_ + row * LANES);
            if (fresh > before) {
                float shrink = std::exp2(before - fresh);
                for (long d = 0; d < dim_; d += LANES) store(out_ + row * dim_ + d, load(out_ + row * dim_ + d) * shrink);
                total *= shrink;
                tops_[row] = fresh;
            }
            for (int at = 0; at < padded; at += LANES) {
                Vec weight = power_of_two(load(scores + at) - fresh);
                store(scores + at, weight);
                total += weight;
            }
            store(totals_ + row * LANES, total);
            if (cut) {
                std::fill(scores, scores + first, 0.0f);
                std::fill(scores + last, scores + padded, 0.0f);
            }
        }
    }

    void add_values(int start, int count) {
        for (int row = 0; row < rows_; row += VALUE_ROWS) {
            Span keys = value_keys_[row / VALUE_ROWS];
            int first = std::max(keys.first - start, 0), last = std::min(keys.last - start, count);
            long d = 0;
            for (; d + VALUE_VECS * LANES <= dim_; d += VALUE_VECS * LANES) value_tile<VALUE_VECS>(row, d, first, last);
            for (; d < dim_; d += LANES) value_tile<1>(row, d, first, last);
        }
    }

    template <int VECS>
    void value_tile(int row, long d, int first, int last) {
        Vec sums[VALUE_ROWS][VECS];
        float *out = out_ + row * dim_ + d;
        const float *weights = scores_ + row * KEY_BLOCK, *value = values_ + first * dim_ + d;
#pragma GCC unroll 8
        for (int r = 0; r < VALUE_ROWS; r++)
#pragma GCC unroll 4
            for (int i = 0; i < VECS; i++) sums[r][i] = load(out + r * dim_ + i * LANES);
        for (int key = first; key < last; key++, value += dim_) {
            Vec values[VECS];
#pragma GCC unroll 4
            for (int i = 0; i < VECS; i++) {
                values[i] = load(value + i * LANES);
                hold(values[i]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < VALUE_ROWS; r++) {
                Vec weight = all(weights[r * KEY_BLOCK + key]);
                hold(weight);
#pragma GCC unroll 4
                for (int i = 0; i < VECS; i++) sums[r][i] = fused(weight, values[i], sums[r][i]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < VALUE_ROWS; r++)
#pragma GCC unroll 4
            for (int i = 0; i < VECS; i++) store(out + r * dim_ + i * LANES, sums[r][i]);
    }

    const long dim_;
    float *queries_, *out_, *keys_, *values_, *scores_, *totals_, *tops_;  // totals by lane
    int rows_ = 0;
    int32_t first_[BLOCK_ROWS], last_[BLOCK_ROWS];
    Span score_keys_[BLOCK_ROWS / SCORE_ROWS], value_keys_[BLOCK_ROWS / VALUE_ROWS];
};
