#include "allocator.hpp"

#include <algorithm>
#include <array>
#include <new>

#include "arena.hpp"
#include "c10.hpp"

namespace lowtide {
namespace {

using namespace c10;

constexpr int table_bits = 18;          // blocks alive at a time: 4 MiB of table, touched only as used
constexpr std::size_t refused = std::size_t{1} << 62;  // bytes that no allocator has: the original one refuses them in its
                                                       // own way, with its own exception
constexpr std::align_val_t page{4096};

// What is reserved is recorded in the counter.
class HostMemory final : public Source {
public:
    explicit HostMemory(Counter& counter) : counter_(counter) {}

    void* take(std::int64_t bytes) override {
        void* memory = ::operator new(static_cast<std::size_t>(bytes), page, std::nothrow);
        if (memory != nullptr) counter_.reserve(bytes);
        return memory;
    }
    void give(void* memory, std::int64_t bytes) override {
        counter_.reserve(-bytes);
        ::operator delete(memory, page);
    }
    const void* allocator() const override { return this; }

private:
    Counter& counter_;
};

// Everything about the installed allocator. Set before it is installed, then only read; never freed.
struct Hook {
    Allocator ours;
    std::array<Method, 16> methods;
    Allocator* original;
    Allocate allocate;
    Deleter deleter;
    std::size_t deleter_word;
    std::uintptr_t device_word;
    Counter counter;
    HostMemory memory{counter};
};
Hook* hook = nullptr;

void release(void* block) {
    note_freed(block);
    if (lies_in_arena(block)) {
        hook->counter.leave(block, false);
        if (give_back(block)) return;
    } else {
        hook->counter.leave(block);
    }
    hook->deleter(block);
}

DataPtr allocate(void*, std::size_t bytes) {
    const auto wanted = static_cast<std::int64_t>(bytes);
    const bool granted = hook->counter.grants(wanted);
    if (void* place = granted ? placed(&hook->memory, wanted).block : nullptr; place != nullptr) {
        hook->counter.enter(place, wanted, false);
        return data_ptr(place, &release, hook->deleter_word, hook->device_word);
    }
    DataPtr made = hook->allocate(hook->original, granted ? bytes : refused);
    if (made.block() != nullptr && hook->counter.enter(made.block(), wanted)) {
        made.words[hook->deleter_word] = reinterpret_cast<std::uintptr_t>(&release);
    }
    note_allocated(&hook->memory, made.block(), wanted);
    return made;
}

Deleter raw_deleter(const void*) {
    return &release;
}

}  // namespace

Counter& install_counter(const AllocatorAccess& access, const void* storage, const void* data,
                         std::function<bool(std::int64_t)> make_room) {
    auto* original = static_cast<Allocator*>(access.get());
    std::array<Method, 16> methods;
    std::copy_n(original->methods, methods.size(), methods.begin());
    const Deleter deleter = original->deleter();
    const std::size_t deleter_word = find_deleter(storage, data, deleter);
    const auto allocate_original = reinterpret_cast<Allocate>(methods[allocate_entry]);
    methods[allocate_entry] = reinterpret_cast<Method>(&allocate);
    methods[raw_deleter_entry] = reinterpret_cast<Method>(&raw_deleter);
    const DataPtr example = allocate_original(original, 1);
    deleter(example.block());
    hook = new Hook{{},           methods,          original, allocate_original, deleter,
                    deleter_word, example.words[3], {table_bits, std::move(make_room)}};
    hook->ours.methods = hook->methods.data();
    access.set(&hook->ours, 0);
    return hook->counter;
}

void uninstall_counter(const AllocatorAccess& access) {
    access.set(hook->original, 0);
}

Source& host_memory() {
    if (hook == nullptr) throw std::runtime_error("arenas need the counter, which is not installed");
    return hook->memory;
}

}  // namespace lowtide
