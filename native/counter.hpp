// The counter below PyTorch's CPU allocator, without PyTorch and without Python; what it is for stands in
// `lowtide.memory.cpu_allocator`. All of it may be called from every thread at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>

namespace lowtide {

// What the counter writes per event while a log runs.
struct LogEntry {
    std::int64_t time_ns;  // of the monotonic clock
    std::int64_t level;
};

// Level and peak of the bytes in blocks that are alive and of the memory that is reserved for them. The blocks'
// sizes are kept in a table of open addressing without locks.
class Counter {
public:
    static constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();

    // Room for 2^`bits` blocks. `make_room` is asked before a block would exceed the limit.
    Counter(int bits, std::function<bool(std::int64_t)> make_room);

    // Whether a block of so many bytes may be handed out: always, but to the limited thread.
    bool grants(std::int64_t bytes);
    // Enters a block; false where it found no place and stays uncounted. Null is no block. `reserved`: of memory of its own, not of
    // some that was reserved before.
    bool enter(const void* block, std::int64_t bytes, bool reserved = true);
    // Takes a block out of the table; blocks that are not known are passed over.
    void leave(const void* block, bool reserved = true);
    // Memory is reserved for blocks to come, or given up.
    void reserve(std::int64_t change);

    std::int64_t level() const { return allocated_.level; }
    std::int64_t peak() const { return allocated_.peak; }
    std::int64_t reserved() const { return reserved_.level; }
    std::int64_t reserved_peak() const { return reserved_.peak; }
    std::int64_t ahead() const { return ahead_; }
    std::int64_t uncounted() const { return uncounted_; }
    std::int64_t reset_peak() { return allocated_.reset_peak(); }
    void raise_peak(std::int64_t peak) { allocated_.raise_peak(peak); }
    std::int64_t reset_reserved_peak() { return reserved_.reset_peak(); }
    void raise_reserved_peak(std::int64_t peak) { reserved_.raise_peak(peak); }
    void set_limit(std::int64_t bytes) { limit_ = bytes; }
    std::uintptr_t limited_thread() const { return limited_thread_; }
    void set_limited_thread(std::uintptr_t thread) { limited_thread_ = thread; }

    // From now on every event is written to `log`, as far as it goes; false where a log runs already.
    bool start_log(std::span<LogEntry> log);
    // The number of events seen, which may be more than were written. Nothing is written after it returns.
    std::int64_t stop_log();

private:
    struct Slot {
        std::atomic<std::uintptr_t> block = 0;  // 0 where the slot is free
        std::int64_t bytes = 0;                 // of the last block that it was for
    };

    struct Gauge {
        std::atomic<std::int64_t> level = 0;
        std::atomic<std::int64_t> peak = 0;

        std::int64_t add(std::int64_t change);
        std::int64_t reset_peak();
        void raise_peak(std::int64_t peak);
    };

    std::size_t first_slot(std::uintptr_t block) const;
    Slot& slot_at(std::size_t slot) { return slots_[slot & (count_ - 1)]; }
    void record(std::int64_t change, bool reserved);
    void write_log(std::int64_t level);

    std::size_t count_;
    int hash_shift_;
    std::unique_ptr<Slot[]> slots_;
    std::function<bool(std::int64_t)> make_room_;
    Gauge allocated_;
    Gauge reserved_;                       // blocks outside what was reserved, and what was
    std::atomic<std::int64_t> ahead_ = 0;  // reserved for blocks to come
    std::atomic<std::int64_t> uncounted_ = 0;
    std::atomic<std::int64_t> limit_ = no_limit;
    std::atomic<std::uintptr_t> limited_thread_ = 0;
    std::span<LogEntry> log_;
    std::atomic<bool> logging_ = false;
    std::atomic<std::int64_t> log_length_ = 0;
    std::atomic<int> log_writers_ = 0;
};

// The running thread, as Python's `threading.get_ident` numbers it.
std::uintptr_t current_thread();

}  // namespace lowtide
