// Layouts of c10's classes under the Itanium ABI, which Linux and macOS share: neither headers nor libraries of PyTorch are needed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace lowtide::c10 {

// A `c10::DataPtr` is data, then context and deleter in the standard library's order, then the device; of four words, it is
// returned through memory.
struct DataPtr {
    std::array<std::uintptr_t, 4> words;

    void* block() const { return reinterpret_cast<void*>(words[0]); }
};

// The table behind a `c10::Allocator`: two destructors, `allocate`, `is_simple_data_ptr`, `raw_deleter`, and more.
using Deleter = void (*)(void* block);
using Allocate = DataPtr (*)(void* self, std::size_t bytes);
using RawDeleter = Deleter (*)(const void* self);
using Method = void (*)();
constexpr std::size_t allocate_entry = 2;
constexpr std::size_t raw_deleter_entry = 4;

struct Allocator {
    const Method* methods;

    Deleter deleter() const { return reinterpret_cast<RawDeleter>(methods[raw_deleter_entry])(this); }
};

// At which word of a `DataPtr` the deleter stands: the words data, context and deleter follow one another in a `StorageImpl`,
// behind its table and its count of references. `storage` is that of some tensor, and `data` the address of its bytes. Throws
// std::runtime_error where the layout is another.
inline std::size_t find_deleter(const void* storage, const void* data, Deleter deleter) {
    const std::span in_storage(static_cast<const std::uintptr_t*>(storage), 8);
    const auto address = reinterpret_cast<std::uintptr_t>(data), own = reinterpret_cast<std::uintptr_t>(deleter);
    for (std::size_t first = 2; first < 6; ++first) {
        const auto words = in_storage.subspan(first, 3);
        if (std::ranges::equal(words, std::array{address, own, address})) return 1;
        if (std::ranges::equal(words, std::array{address, address, own})) return 2;
    }
    throw std::runtime_error("the layout of c10::DataPtr is not the expected one");
}

// Memory of an arena as a result of `allocate`.
inline DataPtr data_ptr(void* block, Deleter deleter, std::size_t deleter_word, std::uintptr_t device_word) {
    const auto address = reinterpret_cast<std::uintptr_t>(block);
    DataPtr made{{address, address, address, device_word}};
    made.words[deleter_word] = reinterpret_cast<std::uintptr_t>(deleter);
    return made;
}

}  // namespace lowtide::c10
