#include "counter.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(_WIN32)
#include <windows.h>
#else
#include <pthread.h>
#endif

namespace lowtide {
namespace {

constexpr std::size_t most_probes = 256;  // a block that finds no slot in so many is left uncounted

}  // namespace

std::uintptr_t current_thread() {
#if defined(_WIN32)
    return GetCurrentThreadId();
#else
    return reinterpret_cast<std::uintptr_t>(reinterpret_cast<void*>(pthread_self()));
#endif
}

Counter::Counter(int bits, std::function<bool(std::int64_t)> make_room)
    : count_(std::size_t{1} << bits),
      hash_shift_(64 - bits),
      slots_(std::make_unique<Slot[]>(count_)),
      make_room_(std::move(make_room)) {}

bool Counter::grants(std::int64_t bytes) {
    if (bytes <= limit_ - allocated_.level) return true;
    return current_thread() != limited_thread_ || make_room_(bytes);
}

// A multiplicative hash: addresses are multiples of 64.
std::size_t Counter::first_slot(std::uintptr_t block) const {
    return static_cast<std::size_t>(std::uint64_t{block} * 11400714819323198485U >> hash_shift_);
}

bool Counter::enter(const void* block, std::int64_t bytes, bool reserved) {
    const auto key = reinterpret_cast<std::uintptr_t>(block);
    if (key == 0) return true;
    const std::size_t first = first_slot(key);
    for (std::size_t probe = 0; probe < std::min(most_probes, count_); ++probe) {
        Slot& slot = slot_at(first + probe);
        std::uintptr_t free = 0;
        if (!slot.block.compare_exchange_strong(free, key)) continue;
        slot.bytes = bytes;
        record(bytes, reserved);
        return true;
    }
    ++uncounted_;
    return false;
}

void Counter::leave(const void* block, bool reserved) {
    const auto key = reinterpret_cast<std::uintptr_t>(block);
    if (key == 0) return;  // a free slot has that address too
    const std::size_t first = first_slot(key);
    for (std::size_t probe = 0; probe < std::min(most_probes, count_); ++probe) {
        Slot& slot = slot_at(first + probe);
        if (slot.block != key) continue;
        const std::int64_t bytes = slot.bytes;  // before another block takes the slot
        slot.block = 0;
        record(-bytes, reserved);
        return;
    }
}

void Counter::record(std::int64_t change, bool reserved) {
    const std::int64_t level = allocated_.add(change);
    if (reserved) reserved_.add(change);
    if (logging_) write_log(level);
}

void Counter::reserve(std::int64_t change) {
    ahead_ += change;
    reserved_.add(change);
}

std::int64_t Counter::Gauge::add(std::int64_t change) {
    const std::int64_t now = level += change;
    raise_peak(now);
    return now;
}

std::int64_t Counter::Gauge::reset_peak() {
    const std::int64_t now = level;
    peak = now;
    return now;
}

void Counter::Gauge::raise_peak(std::int64_t raised) {
    std::int64_t before = peak;
    while (before < raised && !peak.compare_exchange_weak(before, raised)) {
    }
}

bool Counter::start_log(std::span<LogEntry> log) {
    if (logging_) return false;
    log_ = log;
    log_length_ = 0;
    logging_ = true;
    return true;
}

std::int64_t Counter::stop_log() {
    logging_ = false;
    while (log_writers_ > 0) std::this_thread::yield();  // the log may be gone afterwards
    return log_length_;
}

void Counter::write_log(std::int64_t level) {
    ++log_writers_;
    if (logging_) {  // still, now that `stop_log` waits for this thread
        const std::int64_t entry = log_length_++;
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        if (entry < std::ssize(log_)) log_[entry] = {std::chrono::nanoseconds(now).count(), level};
    }
    --log_writers_;
}

}  // namespace lowtide
