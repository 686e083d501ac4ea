// Threads and the memory that they work in.
#pragma once

#include <new>

#include <sched.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "ringattn_cpu.h"
#include "simd.h"

namespace ringattn::RA_LEVEL {

// Runs body(rank, size) on each of `size` threads, 1 <= size <= threads.
template <class Body>
static inline void parallel(int threads, const Body &body) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
    body(omp_get_thread_num(), omp_get_num_threads());
#else
    body(0, 1);
#endif
}

// Hands out 0, 1, 2, ... to whichever thread asks.
class Counter {
    int64_t next_ = 0;

  public:
    int64_t take() {
        return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
    }
};

// Holds the threads of a team until all have come; may be used again at once.
class Barrier {
    int waiting_ = 0, generation_ = 0;

  public:
    void wait(int size) {
        if (size == 1) return;
        const int generation = __atomic_load_n(&generation_, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(&waiting_, 1, __ATOMIC_ACQ_REL) == size) {
            __atomic_store_n(&waiting_, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&generation_, generation + 1, __ATOMIC_RELEASE);
            return;
        }
        // Spin for about the length of a phase, then leave the processor to whom we wait for.
        for (int spins = 0; __atomic_load_n(&generation_, __ATOMIC_ACQUIRE) == generation; spins++)
            if (spins >= 2000) sched_yield();
    }
};

// Cuts arrays out of one piece of memory. Without memory it only counts.
class Arena {
    char *memory_;
    int64_t used_ = 0;

  public:
    static constexpr int64_t ALIGNMENT = 64;

    explicit Arena(void *memory = nullptr) : memory_((char *)memory) {}

    template <class T>
    T *take(int64_t count) {
        T *const array = memory_ ? (T *)(memory_ + used_) : nullptr;
        used_ += (count * (int64_t)sizeof(T) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        return array;
    }

    int64_t used() const {
        return used_;
    }
};

// Some objects T(args, arena), each with the arrays that it takes from the arena, in memory that no two share.
template <class T>
class Workspace {
    int64_t bytes_ = 0;
    char *memory_;

  public:
    Workspace(int64_t count, const ra_args &args) {
        Arena arena;
        arena.take<T>(1);
        T counted(args, arena);
        bytes_ = arena.used();
        memory_ = (char *)aligned_alloc(Arena::ALIGNMENT, count * bytes_);
        for (int64_t i = 0; memory_ && i < count; i++) {
            Arena piece(memory_ + i * bytes_);
            new (piece.take<T>(1)) T(args, piece);
        }
    }
    ~Workspace() {
        free(memory_); // a T has nothing to destroy
    }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    bool is_allocated() const {
        return memory_ != nullptr;
    }
    T &operator[](int64_t i) {
        return *(T *)(memory_ + i * bytes_);
    }
};

} // namespace ringattn::RA_LEVEL
