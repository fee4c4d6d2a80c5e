// Where the memory of arenas comes from, and whose allocations have their places in it: one of PyTorch's allocators.
#pragma once

#include <cstdint>

namespace lowtide {

// Lives for ever, since tensors in an arena may outlive whatever else there is.
class Source {
public:
    virtual ~Source() = default;

    // So much memory; null where there is none. May wait for the interpreter.
    virtual void* take(std::int64_t bytes) = 0;
    virtual void give(void* memory, std::int64_t bytes) = 0;
    // So many bytes more, or less, lie in arenas.
    virtual void fill(std::int64_t) {}
    // By which the allocations are known that are its own.
    virtual const void* allocator() const = 0;
    // Whether operators allocate what their libraries keep for ever: no place may go to that.
    virtual bool libraries_keep() const { return false; }
};

}  // namespace lowtide
