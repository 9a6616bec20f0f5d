// A decoder's step for few rows, in one call: embedding, layers, last norm; and the head's product, in another.
#include <algorithm>
#include <new>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "floats.h"
#include "rowwise.h"
#include "step.h"
#include "team.h"

namespace {

enum Stage { QKV, ATTEND, OUT, GATE_UP, DOWN, STAGES };

class AnyModel {
  public:
    virtual ~AnyModel() = default;
    virtual int step(const StepSpec &step) = 0;
    virtual int logits(const float *hidden, int rows, float *out, int threads) = 0;
};

int tasks_for(long outputs) { return (int)((outputs + TASK_OUTPUTS - 1) / TASK_OUTPUTS); }

template <class Weight, class Stored>
class Model : public AnyModel, public Job {
  public:
    explicit Model(const ModelSpec &spec)
        : m(spec), layers_(spec.layer, spec.layer + spec.layers), queries_(m.heads * m.head_dim),
          keys_(m.kv_heads * m.head_dim) {
        residual_.fit(MOST_ROWS * m.hidden);
        normed_.fit(MOST_ROWS * m.hidden);
        added_.fit(MOST_ROWS * m.hidden);
        qkv_.fit(MOST_ROWS * (queries_ + 2 * keys_));
        attended_.fit(MOST_ROWS * queries_);
        inner_.fit(MOST_ROWS * m.ffn);
        space_.fit(MOST_ROWS * std::max(std::max((long)m.hidden, queries_), (long)m.ffn));
        steps_.fit(MOST_ROWS);
        turns_.fit(MOST_ROWS * 2 * m.head_dim);
        sofar_.resize(MOST_ROWS * m.heads);
    }

    int step(const StepSpec &step) override {
        std::lock_guard<std::mutex> lock(mutex_);
        s = &step;
        if (int wrong = check()) return wrong;
        rows_ = step.rows;
        threads_ = step.threads;
        for (int request = 0; request < step.requests; request++)
            for (int row = step.query_start[request]; row < step.query_start[request + 1]; row++) {
                request_[row] = request;
                visible_[row] = step.visible[row];
            }
        for (int row = 0; row < rows_; row++) {
            embed(step.ids[row], &residual_[row * m.hidden]);
            rms_norm(&residual_[row * m.hidden], layers_[0].input_norm, m.hidden, m.eps, &normed_[row * m.hidden]);
        }
        get_ready(normed_, m.hidden);
        make_room();
        // Without logit rows nothing is needed but the last layer's keys and values.
        stages_ = m.layers * STAGES - (step.logit_rows ? 0 : STAGES - 1);
        team_.run(*this, threads_);
        return DONE;
    }

    int logits(const float *hidden, int rows, float *out, int threads) override {
        std::lock_guard<std::mutex> lock(mutex_);
        rows_ = rows;
        scores_ = out;
        ready_ = ready(Rows<Weight>{}, hidden, rows, m.hidden, space_.data(), steps_.data());
        stages_ = 1;
        team_.run(*this, threads);
        scores_ = nullptr;
        return DONE;
    }

    int stages() const override { return stages_; }

    int tasks(int stage) const override {
        if (scores_) return tasks_for(m.vocab);
        switch (stage % STAGES) {
            case QKV: return tasks_for(queries_ + 2 * keys_);
            case ATTEND: return (whole_rows_ ? rows_ : (int)part_row_.size()) * m.kv_heads;
            case GATE_UP: return tasks_for(m.ffn);
            default: return tasks_for(m.hidden);
        }
    }

    void run(int stage, int first, int last) override {
        if (scores_) return multiply(m.head, first, last, m.vocab, scores_);
        const LayerSpec &layer = layers_[stage / STAGES];
        switch (stage % STAGES) {
            case QKV: return multiply(layer.qkv, first, last, queries_ + 2 * keys_, qkv_.data());
            case ATTEND:
                for (int task = first; task < last; task++) attend_task(stage / STAGES, task);
                return;
            case OUT: return multiply(layer.out, first, last, m.hidden, added_.data());
            case GATE_UP:
                for (int task = first; task < last; task++) gate_up(layer, task);
                return;
            default: return multiply(layer.down, first, last, m.hidden, added_.data());
        }
    }

    void finish(int stage) override {
        if (scores_) return;
        int index = stage / STAGES;
        bool last = index + 1 == m.layers;
        const LayerSpec &layer = layers_[index];
        switch (stage % STAGES) {
            case QKV:
                rotate_and_write(index);
                if (last) keep_logit_rows();
                plan_attention(layer);
                return;
            case ATTEND:
                if (!whole_rows_) merge_parts();
                return get_ready(attended_, queries_);
            case OUT:
                add(layer.out_norm, layer.post_norm, normed_.data());
                return get_ready(normed_, m.hidden);
            case GATE_UP: return get_ready(inner_, m.ffn);
            default:
                if (last) return add(layer.down_norm, m.norm, s->hidden);
                add(layer.down_norm, layers_[index + 1].input_norm, normed_.data());
                get_ready(normed_, m.hidden);
        }
    }

  private:
    int check() const {
        long pages = s->slots / s->page_size;
        for (int row = 0; row < s->rows; row++) {
            if (s->ids[row] < 0 || s->ids[row] >= m.vocab) return WRONG_ID;
            if (s->row_slots[row] < 0 || s->row_slots[row] >= s->slots) return WRONG_PLACE;
        }
        for (int kept = 0; kept < s->logit_rows; kept++) {
            int64_t row = s->logit_row[kept];
            if (row < 0 || row >= s->rows || (kept && row <= s->logit_row[kept - 1])) return WRONG_PLACE;
        }
        for (int request = 0; request < s->requests; request++) {
            long most = 0;
            for (int row = s->query_start[request]; row < s->query_start[request + 1]; row++) {
                if (s->visible[row] < 1) return WRONG_PLACE;
                most = s->visible[row] > most ? s->visible[row] : most;
            }
            long used = (most + s->page_size - 1) / s->page_size;
            if (used > s->pages_width) return WRONG_PLACE;
            for (long page = 0; page < used; page++) {
                int32_t number = s->page_table[(long)request * s->pages_width + page];
                if (number < 0 || number >= pages) return WRONG_PLACE;
            }
        }
        return DONE;
    }

    void embed(long id, float *out) const {
        const Weight *row = (const Weight *)m.embedding.weight + id * m.hidden;
        if constexpr (std::is_same_v<Weight, int8_t>) {
            float scale = m.embedding.scales[id];
            for (long at = 0; at < m.hidden; at++) out[at] = row[at] * scale * m.embedding_scale;
        } else {
            for (long at = 0; at < m.hidden; at += LANES) store(out + at, load(row + at) * m.embedding_scale);
        }
    }

    void get_ready(const Floats &x, long inputs) {
        ready_ = ready(Rows<Weight>{}, x.data(), rows_, inputs, space_.data(), steps_.data());
    }

    void multiply(const Matrix &matrix, long task, long last_task, long outputs, float *out) const {
        for (; task < last_task; task++) {
            long first = task * TASK_OUTPUTS, last = std::min(first + TASK_OUTPUTS, outputs);
            product<Weight>(matrix, ready_, rows_, first, last, out + first, outputs);
        }
    }

    void gate_up(const LayerSpec &layer, int task) {
        alignas(64) float gate[MOST_ROWS * TASK_OUTPUTS], up[MOST_ROWS * TASK_OUTPUTS];
        long first = (long)task * TASK_OUTPUTS, last = std::min(first + TASK_OUTPUTS, (long)m.ffn);
        product<Weight>(layer.gate_up, ready_, rows_, first, last, gate, TASK_OUTPUTS);
        product<Weight>(layer.gate_up, ready_, rows_, m.ffn + first, m.ffn + last, up, TASK_OUTPUTS);
        for (int row = 0; row < rows_; row++) {
            float *out = &inner_[row * (long)m.ffn + first];
            const float *g = gate + row * TASK_OUTPUTS, *u = up + row * TASK_OUTPUTS;
            for (long at = 0; at < last - first; at += LANES) {
                alignas(64) float part[3][LANES] = {};
                long count = std::min((long)LANES, last - first - at);
                std::memcpy(part[0], g + at, count * sizeof(float));
                std::memcpy(part[1], u + at, count * sizeof(float));
                store(part[2], activated(load(part[0]), m.gelu) * load(part[1]));
                std::memcpy(out + at, part[2], count * sizeof(float));
            }
        }
    }

    // Queries and keys are normed by head where the family does so, and turned; keys and values go to the pool.
    void rotate_and_write(int index) {
        const LayerSpec &layer = layers_[index];
        if (index == 0 || layer.inverse_frequencies != layers_[index - 1].inverse_frequencies) make_turns(layer);
        Stored *k = keys_of(index), *v = k + s->slots * keys_;
        for (int row = 0; row < rows_; row++) {
            float *heads = &qkv_[row * (queries_ + 2 * keys_)];
            const float *cosines = &turns_[row * 2 * m.head_dim], *sines = cosines + m.head_dim;
            for (int head = 0; head < m.heads + m.kv_heads; head++) {
                float *x = heads + head * m.head_dim;
                if (layer.qk_norm) rms_norm(x, layer.qk_norm + head * m.head_dim, m.head_dim, m.eps, x);
                turned(x, cosines, sines, m.head_dim, x);
            }
            long slot = s->row_slots[row] * keys_;
            for (long at = 0; at < keys_; at += LANES) {
                store(k + slot + at, load(heads + queries_ + at));
                store(v + slot + at, load(heads + queries_ + keys_ + at));
            }
        }
    }

    void make_turns(const LayerSpec &layer) {
        long half = m.head_dim / 2;
        for (int row = 0; row < rows_; row++) {
            float *cosines = &turns_[row * 2 * m.head_dim], *sines = cosines + m.head_dim;
            for (long i = 0; i < half; i++) {
                float angle = (float)s->positions[row] * layer.inverse_frequencies[i];
                cosines[i] = cosines[half + i] = std::cos(angle) * layer.rope_scaling;
                sines[half + i] = std::sin(angle) * layer.rope_scaling;
                sines[i] = -sines[half + i];
            }
        }
    }

    Stored *keys_of(int index) const { return (Stored *)s->pool + (long)index * 2 * s->slots * keys_; }

    // From the last layer's attention on, nobody needs the other rows.
    void keep_logit_rows() {
        long width = queries_ + 2 * keys_;
        for (int kept = 0; kept < s->logit_rows; kept++) {
            long row = (long)s->logit_row[kept];
            if (row == kept) continue;
            std::memmove(&qkv_[kept * width], &qkv_[row * width], queries_ * sizeof(float));
            std::memmove(&residual_[kept * (long)m.hidden], &residual_[row * m.hidden], m.hidden * sizeof(float));
            request_[kept] = request_[row];
            visible_[kept] = visible_[row];
        }
        rows_ = s->logit_rows;
    }

    long first_key(int row) const { return window_ ? std::max(0, visible_[row] - window_) : 0; }

    // Nothing may be allocated while threads run: an exception of theirs would end the process.
    void make_room() {
        size_t most = 0;
        for (int row = 0; row < rows_; row++) most += visible_[row] / PART_KEYS + 2;
        whole_rows_ = rows_ * m.kv_heads >= 8 * threads_ || most * m.kv_heads > MOST_TASKS;
        if (whole_rows_) return;
        part_row_.reserve(most);
        part_start_.reserve(most);
        if (parts_.size() < most * m.heads) parts_.resize(most * m.heads);
        values_.fit(most * queries_);
    }

    // Rows are tasks of their own where there are enough of them; else their parts are. The result is the same.
    void plan_attention(const LayerSpec &layer) {
        window_ = layer.window;
        part_row_.clear();
        part_start_.clear();
        if (whole_rows_) return;
        for (int row = 0; row < rows_; row++)
            for (long start = first_key(row) / PART_KEYS * PART_KEYS; start < visible_[row]; start += PART_KEYS) {
                part_row_.push_back(row);
                part_start_.push_back(start);
            }
    }

    void attend_task(int index, int task) {
        int kv_head = task % m.kv_heads, group = m.heads / m.kv_heads, first = kv_head * group;
        long number = task / m.kv_heads;
        if (!whole_rows_) {
            Part *parts = &parts_[number * m.heads + first];
            float *values = &values_[number * queries_ + (long)first * m.head_dim];
            return attend_part(index, part_row_[number], first, group, part_start_[number], parts, values);
        }
        int row = (int)number;
        const Stored *k = keys_of(index) + kv_head * m.head_dim, *v = k + s->slots * keys_;
        const float *q = &qkv_[row * (queries_ + 2 * keys_) + (long)first * m.head_dim];
        attend_row(q, group, k, v, keys_of_row(row), first_key(row), visible_[row], m.head_dim, m.scale,
                   &attended_[row * queries_ + (long)first * m.head_dim]);
    }

    Keys keys_of_row(int row) const {
        return {s->page_table + (long)request_[row] * s->pages_width, s->page_size, keys_};
    }

    // Some heads, all of one key/value head, over the keys of one part.
    void attend_part(int index, int row, int head, int heads, long start, Part *parts, float *values) const {
        long first = std::max(start, first_key(row)), last = std::min(start + PART_KEYS, (long)visible_[row]);
        const Stored *k = keys_of(index) + head / (m.heads / m.kv_heads) * m.head_dim, *v = k + s->slots * keys_;
        const float *q = &qkv_[row * (queries_ + 2 * keys_) + (long)head * m.head_dim];
        attend(q, heads, k, v, keys_of_row(row), first, last, m.head_dim, m.scale, parts, values);
    }

    void merge_parts() {
        std::memset(attended_.data(), 0, rows_ * queries_ * sizeof(float));
        std::fill(sofar_.begin(), sofar_.begin() + rows_ * m.heads, Part{});
        for (size_t part = 0; part < part_row_.size(); part++)
            for (int h = 0; h < m.heads; h++) {
                long at = part_row_[part] * m.heads + h, from = part * m.heads + h;
                absorb(sofar_[at], &attended_[at * m.head_dim], parts_[from], &values_[from * m.head_dim], m.head_dim);
            }
        for (long at = 0; at < rows_ * m.heads; at++) divide(&attended_[at * m.head_dim], sofar_[at].total, m.head_dim);
    }

    // Adds what a product gave to the residual, through a norm of its own where there is one; `out` is the norm of it.
    void add(const float *first, const float *second, float *out) {
        for (long row = 0; row < rows_; row++) {
            float *residual = &residual_[row * m.hidden], *added = &added_[row * m.hidden];
            if (first) rms_norm(added, first, m.hidden, m.eps, added);
            for (long at = 0; at < m.hidden; at += LANES) store(residual + at, load(residual + at) + load(added + at));
            rms_norm(residual, second, m.hidden, m.eps, out + row * m.hidden);
        }
    }

    const ModelSpec m;
    const std::vector<LayerSpec> layers_;
    const long queries_, keys_;  // widths of a row's queries and keys
    const StepSpec *s = nullptr;
    float *scores_ = nullptr;  // where logits go, while these are computed
    int rows_ = 0, stages_ = 0, threads_ = 1, window_ = 0;
    bool whole_rows_ = false;
    Rows<Weight> ready_{};
    Floats residual_, normed_, added_, qkv_, attended_, inner_, space_, steps_, turns_, values_;
    std::vector<Part> parts_, sofar_;
    std::vector<int> part_row_;
    std::vector<long> part_start_;
    int request_[MOST_ROWS] = {}, visible_[MOST_ROWS] = {};
    std::mutex mutex_;
    Team team_;
};

// Products of int8 matrices with any number of rows, for steps that are not run here.
class Products : public Job {
  public:
    void product(const Matrix &matrix, const float *x, int rows, long inputs, long outputs, float *out, int threads) {
        std::lock_guard<std::mutex> lock(mutex_);
        space_.fit((rows * inputs + 1) / 2);
        steps_.fit(rows);
        matrix_ = matrix, rows_ = rows, outputs_ = outputs, out_ = out;
        ready_ = ready(Rows<int8_t>{}, x, rows, inputs, space_.data(), steps_.data());
        team_.run(*this, threads);
    }

    int stages() const override { return 1; }
    int tasks(int) const override { return tasks_for(outputs_); }
    void finish(int) override {}

    void run(int, int task, int last_task) override {
        for (; task < last_task; task++) {
            long first = (long)task * TASK_OUTPUTS, last = std::min(first + TASK_OUTPUTS, outputs_);
            ::product<int8_t>(matrix_, ready_, rows_, first, last, out_ + first, outputs_);
        }
    }

  private:
    Matrix matrix_{};
    int rows_ = 0;
    long outputs_ = 0;
    float *out_ = nullptr;
    Rows<int8_t> ready_{};
    Floats space_, steps_;
    std::mutex mutex_;
    Team team_;
};

}  // namespace

extern "C" {

void *promptsluice_open_products() { return new (std::nothrow) Products; }

void promptsluice_close_products(void *products) { delete static_cast<Products *>(products); }

int promptsluice_product(void *products, const Matrix *matrix, const float *x, int rows, int64_t inputs,
                         int64_t outputs, float *out, int threads) {
    try {
        static_cast<Products *>(products)->product(*matrix, x, rows, inputs, outputs, out, threads);
        return DONE;
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}

int promptsluice_lanes() { return LANES; }

void *promptsluice_open(const ModelSpec *spec) {
    try {
        switch (spec->kind) {
            case 0: return static_cast<AnyModel *>(new Model<float, float>(*spec));
            case 1: return static_cast<AnyModel *>(new Model<Bf16, Bf16>(*spec));
            default: return static_cast<AnyModel *>(new Model<int8_t, float>(*spec));
        }
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void promptsluice_close(void *model) { delete static_cast<AnyModel *>(model); }

int promptsluice_step(void *model, const StepSpec *step) {
    try {
        return static_cast<AnyModel *>(model)->step(*step);
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}

int promptsluice_logits(void *model, const float *hidden, int rows, float *out, int threads) {
    try {
        return static_cast<AnyModel *>(model)->logits(hidden, rows, out, threads);
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}
}
