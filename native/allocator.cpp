#include "allocator.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "arena.hpp"

namespace lowtide {
namespace {

constexpr int table_bits = 18;          // blocks alive at a time: 4 MiB of table, touched only as used
constexpr std::size_t refused = std::size_t{1} << 62;  // bytes that no allocator has: the original one refuses them in its
                                                       // own way, with its own exception

// Layouts of c10 under the Itanium ABI, which Linux and macOS share. A `c10::DataPtr` is data, then context and deleter in
// the standard library's order, then the device; of four words, it is returned through memory.
struct DataPtr {
    std::array<std::uintptr_t, 4> words;
};

// The table behind a `c10::Allocator`: two destructors, `allocate`, `is_simple_data_ptr`, `raw_deleter`, and more.
using Deleter = void (*)(void* block);
using Allocate = DataPtr (*)(void* self, std::size_t bytes);
using RawDeleter = Deleter (*)(const void* self);
using Method = void (*)();
constexpr std::size_t allocate_entry = 2;
constexpr std::size_t raw_deleter_entry = 4;
using Methods = std::array<Method, 16>;

struct Allocator {
    const Method* methods;
};

// Everything about the installed allocator. Set before it is installed, then only read; never freed.
struct Hook {
    Allocator ours;
    Methods methods;
    Allocator* original;
    Allocate allocate;
    Deleter deleter;
    std::size_t deleter_word;
    std::uintptr_t device_word;
    Counter counter;
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

DataPtr in_arena(void* block, std::int64_t bytes) {
    hook->counter.enter(block, bytes, false);
    const auto address = reinterpret_cast<std::uintptr_t>(block);
    DataPtr made{{address, address, address, hook->device_word}};
    made.words[hook->deleter_word] = reinterpret_cast<std::uintptr_t>(&release);
    return made;
}

DataPtr allocate(void*, std::size_t bytes) {
    const auto wanted = static_cast<std::int64_t>(bytes);
    const bool granted = hook->counter.grants(wanted);
    if (void* place = granted ? placed(wanted) : nullptr; place != nullptr) return in_arena(place, wanted);
    DataPtr made = hook->allocate(hook->original, granted ? bytes : refused);
    void* block = reinterpret_cast<void*>(made.words[0]);
    if (block != nullptr && hook->counter.enter(block, wanted)) {
        made.words[hook->deleter_word] = reinterpret_cast<std::uintptr_t>(&release);
    }
    note_allocated(block, wanted);
    return made;
}

Deleter raw_deleter(const void*) {
    return &release;
}

// At which word of a `DataPtr` the deleter stands: the words data, context and deleter follow one another in a `StorageImpl`,
// behind its table and its count of references.
std::size_t find_deleter(std::span<const std::uintptr_t> storage, std::uintptr_t data, Deleter deleter) {
    const auto address = reinterpret_cast<std::uintptr_t>(deleter);
    for (std::size_t first = 2; first < 6; ++first) {
        const auto words = storage.subspan(first, 3);
        if (std::ranges::equal(words, std::array{data, address, data})) return 1;
        if (std::ranges::equal(words, std::array{data, data, address})) return 2;
    }
    throw std::runtime_error("the layout of c10::DataPtr is not the expected one");
}

}  // namespace

Counter& install_counter(const AllocatorAccess& access, const void* storage, const void* data,
                         std::function<bool(std::int64_t)> make_room) {
    auto* original = static_cast<Allocator*>(access.get());
    Methods methods;
    std::copy_n(original->methods, methods.size(), methods.begin());
    const auto deleter = reinterpret_cast<RawDeleter>(methods[raw_deleter_entry])(original);
    const std::span words(static_cast<const std::uintptr_t*>(storage), 8);
    const std::size_t deleter_word = find_deleter(words, reinterpret_cast<std::uintptr_t>(data), deleter);
    const auto allocate_original = reinterpret_cast<Allocate>(methods[allocate_entry]);
    methods[allocate_entry] = reinterpret_cast<Method>(&allocate);
    methods[raw_deleter_entry] = reinterpret_cast<Method>(&raw_deleter);
    const DataPtr example = allocate_original(original, 1);
    deleter(reinterpret_cast<void*>(example.words[0]));
    hook = new Hook{{},           methods,          original, allocate_original, deleter,
                    deleter_word, example.words[3], {table_bits, std::move(make_room)}};
    hook->ours.methods = hook->methods.data();
    access.set(&hook->ours, 0);
    return hook->counter;
}

void uninstall_counter(const AllocatorAccess& access) {
    access.set(hook->original, 0);
}

}  // namespace lowtide
