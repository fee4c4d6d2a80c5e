// The counter under many threads, for the thread sanitizer: blocks that one thread enters and another takes out, a log that is
// started and stopped meanwhile, a limit that comes and goes. Ends with 1 and says why where numbers do not add up.
#include <array>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "counter.hpp"

namespace {

constexpr int threads = 4, rounds = 200, blocks = 32;
constexpr std::int64_t block_bytes = 64;

void* block_at(int number) {
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(number + 1) * 64);
}

// Every block is entered by one thread and taken out by the next one, in step.
void hand_over(lowtide::Counter& counter) {
    std::vector<std::thread> workers;
    std::vector<std::atomic<int>> turns(threads);
    for (int worker = 0; worker < threads; ++worker) {
        workers.emplace_back([&, worker] {
            std::atomic<int>& taken = turns[(worker + threads - 1) % threads];
            for (int round = 0; round < rounds; ++round) {
                for (int block = 0; block < blocks; ++block) {
                    counter.grants(block_bytes);
                    counter.enter(block_at(worker * blocks + block), block_bytes);
                }
                turns[worker] = round + 1;
                while (taken <= round) std::this_thread::yield();
                const int before = (worker + threads - 1) % threads;
                for (int block = 0; block < blocks; ++block) counter.leave(block_at(before * blocks + block));
                while (counter.level() > threads * blocks * block_bytes) std::this_thread::yield();
            }
        });
    }
    for (std::thread& worker : workers) worker.join();
}

bool check(const char* what, std::int64_t found, std::int64_t expected) {
    if (found != expected) std::printf("%s: %lld, not %lld\n", what, (long long)found, (long long)expected);
    return found == expected;
}

}  // namespace

int main() {
    lowtide::Counter counter(14, [](std::int64_t) { return true; });
    std::atomic<bool> running = true;
    std::thread watcher([&] {
        while (running) {
            std::array<lowtide::LogEntry, 64> log;  // gone as soon as the log has stopped
            counter.start_log(log);
            counter.set_limit(block_bytes);
            counter.set_limited_thread(lowtide::current_thread());
            std::this_thread::yield();
            counter.set_limit(lowtide::Counter::no_limit);
            counter.stop_log();
        }
    });
    hand_over(counter);
    running = false;
    watcher.join();
    const bool level = check("level", counter.level(), 0);
    const bool uncounted = check("uncounted", counter.uncounted(), 0);
    return level && uncounted && counter.peak() >= blocks * block_bytes ? 0 : 1;
}
