// Threads that run a job's stages one after another. A stage is cut into tasks, of which threads take some as they come.
//
// There is no barrier: whoever ends a stage's last task finishes the stage and opens the next one. So a thread that the
// system does not run holds nobody up unless it is in the middle of a task, and a job ends even if no thread but the
// caller's ever runs. Within a job, threads without a task spin, then yield; between jobs they spin a little, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

constexpr int MOST_TASKS = (1 << 20) - 1;

class Job {
  public:
    virtual ~Job() = default;
    virtual int stages() const = 0;
    virtual int tasks(int stage) const = 0;                // 1 to MOST_TASKS
    virtual void run(int stage, int first, int last) = 0;  // tasks first .. last - 1; in any order, by any thread
    virtual void finish(int stage) = 0;                    // by one thread, after all tasks of the stage and before the next stage
};

class Team {
  public:
    Team() = default;
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;
    ~Team() { resize(1); }

    // Runs a job on `threads` threads, the caller's among them. One job at a time.
    void run(Job &job, int threads) {
        if (job.stages() == 0) return;
        resize(threads);
        job_ = &job;
        first_ = stage_of(word_.load(std::memory_order_relaxed));
        open(first_, job.tasks(0));
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (sleeping_ > 0) wake_.notify_all();
        }
        work();
    }

  private:
    // A word is the number of a stage, of all that ever were (modulo 2^24), how many tasks it has, and the next one to
    // take. A stage without tasks is the pause between jobs.
    static uint32_t stage_of(uint64_t word) { return (uint32_t)(word >> 40); }
    static uint32_t tasks_of(uint64_t word) { return (uint32_t)(word >> 20) & MOST_TASKS; }
    static uint32_t next_of(uint64_t word) { return (uint32_t)word & MOST_TASKS; }

    void open(uint32_t stage, int tasks) {
        done_.store(0, std::memory_order_relaxed);
        word_.store((uint64_t)stage << 40 | (uint64_t)tasks << 20, std::memory_order_release);
    }

    // Takes part in the current job until it ends.
    void work() {
        for (int waited = 0;;) {
            uint64_t word = word_.load(std::memory_order_acquire);
            uint32_t tasks = tasks_of(word);
            if (tasks == 0) return;
            uint32_t next = next_of(word);
            if (next == tasks) {
                pause(waited++);
                continue;
            }
            // Many at first, to meet seldom; few towards the end, to end together.
            uint32_t taken = (tasks - next) / (2 * (uint32_t)size_);
            taken = taken ? taken : 1;
            if (!word_.compare_exchange_weak(word, word + taken, std::memory_order_acquire)) continue;
            waited = 0;
            // Until this task is done, neither the stage nor the job can end.
            int stage = (int)((stage_of(word) - first_) & 0xffffff);
            job_->run(stage, (int)next, (int)(next + taken));
            if (done_.fetch_add(taken, std::memory_order_acq_rel) + taken == tasks) {
                job_->finish(stage);
                bool last = stage + 1 == job_->stages();
                open(stage_of(word) + 1, last ? 0 : job_->tasks(stage + 1));
            }
        }
    }

    static void pause(int waited) {
        if (waited > SPINS) {
            std::this_thread::yield();
            return;
        }
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void serve() {
        for (int waited = 0;;) {
            if (tasks_of(word_.load(std::memory_order_acquire)) > 0) {
                work();
                waited = 0;
            } else if (waited++ < SPINS) {
                pause(0);
            } else {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_++;
                wake_.wait(lock, [this] { return ended_ || tasks_of(word_.load(std::memory_order_acquire)) > 0; });
                sleeping_--;
                if (ended_) return;
                waited = 0;
            }
        }
    }

    void resize(int threads) {
        if (threads == size_) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ended_ = true;
            wake_.notify_all();
        }
        for (std::thread &helper : helpers_) helper.join();
        helpers_.clear();
        ended_ = false;
        try {
            for (int thread = 1; thread < threads; thread++) helpers_.emplace_back(&Team::serve, this);
        } catch (const std::system_error &) {  // no more threads to be had: those that there are do it
        }
        size_ = threads;
    }

    static constexpr int SPINS = 4000;  // some 100 microseconds: from one call of a step to the next one

    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) Job *job_ = nullptr;
    uint32_t first_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_;
    int sleeping_ = 0;
    bool ended_ = false;
    int size_ = 1;
    std::vector<std::thread> helpers_;
};
