// Threads that run a job's stages one after another. A stage is cut into tasks, of which threads take some as they come.
//
// Between stages there is no barrier: whoever ends a stage's last task finishes the stage and opens the next one. So a
// thread that the system does not run holds nobody up unless it is in the middle of a task. Threads without a task
// spin, then yield.
//
// The threads are those of a pool, where one was given (`use`): then the pool says how they wait between jobs, and a job
// begins and ends with all of them. Else a team has its own: between jobs they spin a little, then sleep, and a job ends
// even if no thread but the caller's ever runs.
//
// A fork copies a team without its threads. The copy is seen by its process number, and hires threads of its own: the
// others' handles and what they slept on are left as they are, for to join or to destroy them is to wait forever.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
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

// The threads of an OpenMP library: runs `work` with `data` on this many, the caller's among them (GOMP_parallel).
using Pool = void (*)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

class Team {
  public:
    // All teams of this process use the threads of `pool` instead of their own: what runs between jobs may have it
    // leave threads spinning, on processors that a team's own would have to share with them.
    static void use(Pool pool) {
        pool_process_ = getpid();
        pool_.store(pool, std::memory_order_release);
    }

    Team() = default;
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;
    ~Team() { resize(1); }

    // Runs a job on `threads` threads, the caller's among them, or on fewer if there are no more. One job at a time.
    void run(Job &job, int threads) {
        if (job.stages() == 0) return;
        if (job.stages() == 1 && job.tasks(0) == 1) {  // nobody else is worth waking
            job.run(0, 0, 1);
            return job.finish(0);
        }
        Pool pool = pool_.load(std::memory_order_acquire);
        if (getpid() != pool_process_) pool = nullptr;  // a fork is without the pool's threads, which that does not know
        resize(pool ? 1 : threads);
        sharing_ = threads;
        job_ = &job;
        first_ = stage_of(word_.load(std::memory_order_relaxed));
        open(first_, job.tasks(0));
        if (pool) return pool([](void *team) { static_cast<Team *>(team)->work(); }, this, (unsigned)threads, 0);
        Crew &crew = *crew_;
        {
            std::lock_guard<std::mutex> lock(crew.mutex);
            if (crew.sleeping > 0) crew.wake.notify_all();
        }
        work();
    }

  private:
    struct Crew {
        const pid_t process = getpid();
        std::mutex mutex;
        std::condition_variable wake;
        int sleeping = 0;
        bool ended = false;
        std::vector<std::thread> threads;
    };

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
            uint32_t taken = (tasks - next) / (2 * (uint32_t)sharing_);
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

    void serve(Crew &crew) {
        for (int waited = 0;;) {
            if (tasks_of(word_.load(std::memory_order_acquire)) > 0) {
                work();
                waited = 0;
            } else if (waited++ < SPINS) {
                pause(0);
            } else {
                std::unique_lock<std::mutex> lock(crew.mutex);
                crew.sleeping++;
                crew.wake.wait(lock, [&] { return crew.ended || tasks_of(word_.load(std::memory_order_acquire)) > 0; });
                crew.sleeping--;
                if (crew.ended) return;
                waited = 0;
            }
        }
    }

    void resize(int threads) {
        if (crew_->process != getpid()) {
            static_cast<void>(crew_.release());
            crew_.reset(new Crew);
            size_ = 1;
        }
        if (threads == size_) return;
        {
            std::lock_guard<std::mutex> lock(crew_->mutex);
            crew_->ended = true;
            crew_->wake.notify_all();
        }
        for (std::thread &helper : crew_->threads) helper.join();
        crew_->threads.clear();
        crew_->ended = false;
        size_ = threads;
        try {
            crew_->threads.reserve(threads - 1);
            for (int thread = 1; thread < threads; thread++)
                crew_->threads.emplace_back(&Team::serve, this, std::ref(*crew_));
        } catch (const std::exception &) {  // neither threads nor memory to be had: those that there are do it
        }
    }

    static constexpr int SPINS = 4000;  // some 100 microseconds: from one call of a step to the next one

    inline static std::atomic<Pool> pool_{nullptr};
    inline static pid_t pool_process_ = 0;

    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) Job *job_ = nullptr;
    uint32_t first_ = 0;
    int sharing_ = 1;  // threads that the current job was given
    int size_ = 1;     // of the crew, and the caller
    std::unique_ptr<Crew> crew_{new Crew};
};
