#include "device_allocator.hpp"

#include <array>
#include <stdexcept>

#include "arena.hpp"
#include "c10.hpp"

#if !defined(_WIN32)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace lowtide {
namespace {

using namespace c10;

constexpr std::size_t before_methods = 2;  // the offset to the top and the type, which `dynamic_cast` reads
constexpr std::size_t most_methods = 160;  // PyTorch's classes have up to some 60

// Everything about the allocator, whose table is `words` now. Set before it is installed, then only read; never freed.
struct Hook {
    Allocator* original;
    const Method* methods;
    std::array<Method, before_methods + most_methods> words;
    Allocate allocate;
    Deleter deleter;
    std::size_t deleter_word;
    std::int64_t granularity;
};
Hook* hook = nullptr;

std::int64_t handed_out(std::size_t bytes) {
    return (static_cast<std::int64_t>(bytes) + hook->granularity - 1) / hook->granularity * hook->granularity;
}

void release_place(void* block) {
    note_freed(block);
    give_back(block);
}

// Of memory that was asked for without a `c10::DataPtr`, which tells no deleter.
void release_any(void* block) {
    if (lies_in_arena(block)) {
        release_place(block);
    } else {
        hook->deleter(block);
    }
}

DataPtr allocate(void* self, std::size_t bytes) {
    const std::int64_t wanted = handed_out(bytes);
    if (const auto [place, source] = placed(hook, wanted); place != nullptr) {
        const auto device_word = static_cast<DeviceMemory*>(source)->device_word();
        return data_ptr(place, &release_place, hook->deleter_word, device_word);
    }
    DataPtr made = hook->allocate(self, bytes);
    note_allocated(hook, made.block(), wanted);
    return made;
}

Deleter raw_deleter(const void*) {
    return &release_any;
}

// How many words can be read from `first` on, up to `most`.
std::size_t readable(const Method* first, std::size_t most) {
#if defined(_WIN32)
    throw std::runtime_error("allocators of accelerators have another layout on Windows");
#else
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(first);
    std::uintptr_t end = (begin / page + 1) * page;  // the page of `first` is there
#if defined(__APPLE__)
    char there;
#else
    unsigned char there;
#endif
    while (end < begin + most * sizeof(Method) && mincore(reinterpret_cast<void*>(end), page, &there) == 0) end += page;
    return std::min(most, (end - begin) / sizeof(Method));
#endif
}

}  // namespace

void install_device_allocator(void* allocator, const void* storage, const void* data, std::int64_t granularity) {
    auto* original = static_cast<Allocator*>(allocator);
    const Deleter deleter = original->deleter();
    const std::size_t deleter_word = find_deleter(storage, data, deleter);
    const Method* first = original->methods - before_methods;
    hook = new Hook{original, original->methods, {}, nullptr, deleter, deleter_word, granularity};
    std::copy_n(first, readable(first, hook->words.size()), hook->words.begin());
    Method* methods = hook->words.data() + before_methods;
    hook->allocate = reinterpret_cast<Allocate>(methods[allocate_entry]);
    methods[allocate_entry] = reinterpret_cast<Method>(&allocate);
    methods[raw_deleter_entry] = reinterpret_cast<Method>(&raw_deleter);
    original->methods = methods;
}

void uninstall_device_allocator() {
    hook->original->methods = hook->methods;
}

void* DeviceMemory::take(std::int64_t bytes) {
    DataPtr made;
    try {
        made = hook->allocate(hook->original, static_cast<std::size_t>(bytes));
    } catch (...) {  // in PyTorch's own type
        return nullptr;
    }
    device_word_ = made.words[3];
    reserved_ += handed_out(static_cast<std::size_t>(bytes));
    return made.block();
}

void DeviceMemory::give(void* memory, std::int64_t bytes) {
    hook->deleter(memory);
    reserved_ -= handed_out(static_cast<std::size_t>(bytes));
}

const void* DeviceMemory::allocator() const {
    return hook;
}

}  // namespace lowtide
