// What the loader asks of every library: the CPU's instruction set, and the threads to run on.
#include "parallel.h"

#include <pthread.h>

#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace headgate {

bool poison = false;

// The library is not linked against an OpenMP runtime: torch brings its own, under a name that differs from
// build to build, and a second one would mean a second team of threads fighting for the same cores. The
// loader hands over torch's GOMP_parallel instead, which GNU's, Intel's and LLVM's runtimes all export.
using Team = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
static Team team = nullptr;

static void run_own_threads(void (*body)(void*), void* data, int threads) {
    struct Call {
        void (*body)(void*);
        void* data;
    } call{body, data};
    std::vector<pthread_t> helpers;
    for (int i = 1; i < threads; ++i) {
        pthread_t helper;
        auto entry = [](void* p) -> void* {
            auto& c = *static_cast<Call*>(p);
            c.body(c.data);
            return nullptr;
        };
        if (pthread_create(&helper, nullptr, entry, &call) != 0) break;
        helpers.push_back(helper);
    }
    body(data);
    for (pthread_t helper : helpers) pthread_join(helper, nullptr);
}

void run_team(void (*body)(void*), void* data, int threads) {
    if (threads <= 1)
        body(data);
    else if (team)
        team(body, data, unsigned(threads), 0);
    else
        run_own_threads(body, data, threads);
}

}  // namespace headgate

EXPORT void headgate_set_team(void* gomp_parallel) {
    headgate::team = reinterpret_cast<headgate::Team>(gomp_parallel);
}

EXPORT void headgate_set_poison(int on) { headgate::poison = on; }

// 2: AVX-512, 1: AVX2 with FMA, 0: neither. Only what setup.py compiles for is asked.
EXPORT int headgate_instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
               ? 2
               : 1;
#else
    return 0;
#endif
}
