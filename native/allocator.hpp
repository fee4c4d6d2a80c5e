// An allocator in front of c10's own, by the layout of its classes: neither headers nor libraries of PyTorch are needed.
#pragma once

#include <cstdint>
#include <functional>

#include "counter.hpp"
#include "source.hpp"

namespace lowtide {

// `c10::GetCPUAllocator` and `c10::SetCPUAllocator`.
struct AllocatorAccess {
    void* (*get)();
    void (*set)(void* allocator, std::uint8_t priority);
};

// Puts an allocator that counts in front of PyTorch's, for the life of the process, as blocks outlive every measurement.
// `storage` is the `StorageImpl` of some tensor, and `data` the address of its bytes, by which the layout is checked; throws
// std::runtime_error where it is another. `make_room` is asked before the limit would be exceeded.
Counter& install_counter(const AllocatorAccess& access, const void* storage, const void* data,
                         std::function<bool(std::int64_t)> make_room);

// Puts PyTorch's own allocator back.
void uninstall_counter(const AllocatorAccess& access);

// Memory of the host for arenas, of which the installed counter knows; throws std::runtime_error where none is installed.
Source& host_memory();

}  // namespace lowtide
