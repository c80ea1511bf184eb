// Running work on torch's own threads, and memory that a thread keeps between calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>

namespace headgate {

// Fill memory with NaN before it is used, so that tests see what is read before it is written.
extern bool poison;

// Calls body(data) in `threads` threads at once, the caller's among them, and returns when all are done.
void run_team(void (*body)(void*), void* data, int threads);

// work(index) for every index below count. Threads take the next index when they are free, lowest first, so
// put the longest work first. The result may not depend on which thread does what; then it depends on no
// thread count either.
template <class Work>
void parallel_for(int64_t count, int threads, const Work& work) {
    struct Shared {
        const Work& work;
        int64_t count;
        std::atomic<int64_t> next;
    } shared{work, count, {0}};
    if (threads > count) threads = int(count);
    run_team(
        [](void* data) {
            auto& s = *static_cast<Shared*>(data);
            for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.work(i);
        },
        &shared, threads);
}

// Memory whose content is undefined, freed by std::free.
inline float* allocate(size_t count) {
    count = (std::max<size_t>(1, count) + 1023) / 1024 * 1024;
    auto* memory = static_cast<float*>(std::aligned_alloc(4096, count * sizeof(float)));
    if (!memory) std::abort();
    if (poison) std::fill(memory, memory + count, std::numeric_limits<float>::quiet_NaN());
    return memory;
}

// A thread's working memory: grows, and stays for the next call, since fresh pages would cost more than the
// kernels' own traffic. What it holds is whatever was left in it.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    float* floats(size_t count) {
        if (count > size_) {
            std::free(memory_);
            memory_ = allocate(size_ = count);
        }
        if (poison) std::fill(memory_, memory_ + count, std::numeric_limits<float>::quiet_NaN());
        return memory_;
    }
    static Scratch& of_thread() {
        thread_local Scratch scratch;
        return scratch;
    }

private:
    float* memory_ = nullptr;
    size_t size_ = 0;
};

// Hands out consecutive pieces of one allocation, each on a cache line of its own.
class Pieces {
public:
    explicit Pieces(float* memory) : next_(memory) {}
    float* take(size_t count) {
        float* piece = next_;
        next_ += rounded(count);
        return piece;
    }
    static size_t rounded(size_t count) { return (count + 15) / 16 * 16; }

private:
    float* next_;
};

}  // namespace headgate
