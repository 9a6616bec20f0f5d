// What steps of many rows do between their products, which torch runs: attention, and the work row by row.
#include "prefill.h"

#include <atomic>
#include <mutex>
#include <new>

#include "floats.h"
#include "rowwise.h"
#include "step.h"
#include "team.h"

namespace {

constexpr int LEAST_BLOCK = 16;  // query heads times rows from which on keys are worth being transposed
constexpr int ROWS_AT_ONCE = 8;  // of the work row by row, a task

// Some rows of a request, for one key/value head.
struct Task {
    int request, row, rows, kv_head;
    bool block;  // whether they are computed together
    long keys;
};

class Attention : public Job {
  public:
    // Tasks and their memory are made before any thread runs: an exception of theirs would end the process.
    Attention(const AttendSpec &spec, std::vector<Task> &tasks, std::vector<Floats> &spaces)
        : s(spec), group_(s.heads / s.kv_heads), tasks_(tasks), spaces_(spaces), taken_(spaces.size()) {
        tasks_.clear();
        for (int request = 0; request < s.requests; request++) {
            int start = s.query_start[request], stop = s.query_start[request + 1];
            bool block = (stop - start) * group_ >= LEAST_BLOCK && group_ <= BLOCK_ROWS;
            for (int row = start, rows, most = rows_of_task(stop - start); row < stop; row += rows) {
                rows = std::min(stop - row, most);
                long keys = rows * (long)*std::max_element(s.visible + row, s.visible + row + rows);
                for (int head = 0; head < s.kv_heads; head++)
                    tasks_.push_back({request, row, rows, head, block, keys});
            }
        }
        std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task &a, const Task &b) { return a.keys > b.keys; });
        for (Floats &space : spaces_) space.fit((long)RowBlock::floats(s.head_dim));
    }

    static int check(const AttendSpec &s) {
        long pages = s.slots / s.page_size;
        for (int request = 0; request < s.requests; request++) {
            long most = 0;
            for (int row = s.query_start[request]; row < s.query_start[request + 1]; row++) {
                if (s.visible[row] < 1) return WRONG_PLACE;
                most = std::max(most, (long)s.visible[row]);
            }
            long used = (most + s.page_size - 1) / s.page_size;
            if (used > s.pages_width) return WRONG_PLACE;
            for (long page = 0; page < used; page++) {
                int32_t number = s.page_table[(long)request * s.pages_width + page];
                if (number < 0 || number >= pages) return WRONG_PLACE;
            }
        }
        return DONE;
    }

    int stages() const override { return tasks_.empty() ? 0 : 1; }
    int tasks(int) const override { return (int)tasks_.size(); }
    void finish(int) override {}

    void run(int, int first, int last) override {
        size_t space = 0;
        while (taken_[space].exchange(true, std::memory_order_acquire)) space = (space + 1) % taken_.size();
        for (; first < last; first++) attend(tasks_[first], spaces_[space].data());
        taken_[space].store(false, std::memory_order_release);
    }

  private:
    // Few enough for each thread to get several tasks, if that leaves blocks worth their keys' transposition.
    int rows_of_task(int rows) const {
        int most = std::max(1, BLOCK_ROWS / group_), least = (4 * LEAST_BLOCK + group_ - 1) / group_;
        return std::min(std::max((int)((long)rows * s.kv_heads / (8 * s.threads)), least), most);
    }

    void attend(const Task &task, float *space) const {
        Keys keys{s.page_table + (long)task.request * s.pages_width, s.page_size, (long)s.kv_heads * s.head_dim};
        long head = (long)task.kv_head * group_ * s.head_dim, width = (long)s.heads * s.head_dim;
        const float *q = s.q + task.row * width + head;
        const float *k = s.k + task.kv_head * s.head_dim, *v = s.v + task.kv_head * s.head_dim;
        float *out = s.out + task.row * width + head;
        const int32_t *visible = s.visible + task.row;
        if (task.block)
            return RowBlock(space, s.head_dim)
                .attend(q, out, width, task.rows, group_, visible, s.window, k, v, keys, s.scale);
        for (int row = 0; row < task.rows; row++, q += width, out += width) {
            long first = s.window ? std::max(0, visible[row] - s.window) : 0;
            attend_row(q, group_, k, v, keys, first, visible[row], s.head_dim, s.scale, out);
        }
    }

    const AttendSpec &s;
    const int group_;
    std::vector<Task> &tasks_;
    std::vector<Floats> &spaces_;
    std::vector<std::atomic<bool>> taken_;
};

// `work(first, last)` for all rows, some at once.
template <class Work>
class RowByRow : public Job {
  public:
    RowByRow(int rows, Work work) : rows_(rows), work_(work) {}
    int stages() const override { return rows_ ? 1 : 0; }
    int tasks(int) const override { return (rows_ + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; }
    void finish(int) override {}
    void run(int, int first, int last) override {
        work_((long)first * ROWS_AT_ONCE, std::min((long)last * ROWS_AT_ONCE, (long)rows_));
    }

  private:
    const int rows_;
    const Work work_;
};

// One caller at a time; others wait.
class Prefill {
  public:
    int attend(const AttendSpec &spec) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (int wrong = Attention::check(spec)) return wrong;
        if ((int)spaces_.size() < spec.threads) spaces_.resize(spec.threads);
        Attention attention(spec, tasks_, spaces_);
        team_.run(attention, spec.threads);
        return DONE;
    }

    template <class Work>
    void each(int rows, int threads, Work work) {
        std::lock_guard<std::mutex> lock(mutex_);
        RowByRow<Work> job(rows, work);
        team_.run(job, threads);
    }

  private:
    std::vector<Task> tasks_;
    std::vector<Floats> spaces_;
    std::mutex mutex_;
    Team team_;
};

}  // namespace

extern "C" {

void promptsluice_share_threads(void *pool) { Team::use(reinterpret_cast<Pool>(pool)); }

void *promptsluice_open_prefill() { return new (std::nothrow) Prefill; }

void promptsluice_close_prefill(void *prefill) { delete static_cast<Prefill *>(prefill); }

int promptsluice_attend(void *prefill, const AttendSpec *spec) {
    try {
        return static_cast<Prefill *>(prefill)->attend(*spec);
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}

// The activation of the first half of each row [2 * size], times its second half.
void promptsluice_gated(void *prefill, const float *gate_up, int rows, int64_t size, int gelu, float *out,
                        int threads) {
    static_cast<Prefill *>(prefill)->each(rows, threads, [=](long first, long last) {
        for (long row = first; row < last; row++) {
            const float *gate = gate_up + row * 2 * size, *up = gate + size;
            for (long at = 0; at < size; at += LANES)
                store(out + row * size + at, activated(load(gate + at), gelu) * load(up + at));
        }
    });
}

// Adds `x`, normed by `first` if there is one, to `residual`; `out` is its norm. All [rows, size], weights [size].
void promptsluice_add_norm(void *prefill, const float *x, float *residual, const float *first_norm, const float *norm,
                           float eps, int rows, int64_t size, float *out, int threads) {
    static_cast<Prefill *>(prefill)->each(rows, threads, [=](long first, long last) {
        for (long at = first * size; at < last * size; at += size) {
            if (first_norm) rms_norm(x + at, first_norm, size, eps, out + at);
            add(residual + at, first_norm ? out + at : x + at, size);
            rms_norm(residual + at, norm, size, eps, out + at);
        }
    });
}

int promptsluice_turn(void *prefill, const TurnSpec *spec, int threads) {
    TurnSpec s = *spec;
    for (int row = 0; row < s.rows; row++)
        if (s.slots[row] < 0 || s.slots[row] >= s.pool_slots) return WRONG_PLACE;
    static_cast<Prefill *>(prefill)->each(s.rows, threads, [s](long first, long last) {
        long dim = s.head_dim, keys = s.kv_heads * dim;
        alignas(64) float normed[MOST_DIM];
        for (long row = first; row < last; row++) {
            const float *head = s.qkv + row * (s.heads + 2 * s.kv_heads) * dim;
            float *k = s.k + s.slots[row] * keys, *v = s.v + s.slots[row] * keys;
            for (long number = 0; number < s.heads + s.kv_heads; number++, head += dim) {
                float *out = number < s.heads ? s.q + (row * s.heads + number) * dim : k + (number - s.heads) * dim;
                if (s.norm) rms_norm(head, s.norm + number * dim, dim, s.eps, normed);
                turned(s.norm ? normed : head, s.cosines + row * dim, s.sines + row * dim, dim, out);
            }
            std::memcpy(v, head, keys * sizeof(float));
        }
    });
    return DONE;
}
}
