// An accelerator's allocator with arenas: what has a place goes there, and all else where it went before.
#pragma once

#include <atomic>
#include <cstdint>

#include "source.hpp"

namespace lowtide {

// From now on, and for the life of the process, planned allocations of the accelerator's `c10::Allocator` go to their places.
// `storage` is the `StorageImpl` of some tensor of the device, and `data` the address of its bytes, by which the layout is checked;
// throws std::runtime_error where it is another. The allocator hands out multiples of `granularity` bytes.
void install_device_allocator(void* allocator, const void* storage, const void* data, std::int64_t granularity);

// Gives the allocator its own methods back.
void uninstall_device_allocator();

// Memory of one device for arenas. `take` is called while that is the current one.
class DeviceMemory final : public Source {
public:
    void* take(std::int64_t bytes) override;
    void give(void* memory, std::int64_t bytes) override;
    void fill(std::int64_t change) override { used_ += change; }
    const void* allocator() const override;
    bool libraries_keep() const override { return true; }

    // What arenas take up of the device, and what lies in them.
    std::int64_t reserved() const { return reserved_; }
    std::int64_t used() const { return used_; }
    // The last word of a `c10::DataPtr`.
    std::uintptr_t device_word() const { return device_word_; }

private:
    std::atomic<std::int64_t> reserved_ = 0;
    std::atomic<std::int64_t> used_ = 0;
    std::atomic<std::uintptr_t> device_word_ = 0;
};

}  // namespace lowtide
