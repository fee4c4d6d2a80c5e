// "hosted": an accelerator for tests, whose memory is the host's and whose operators are the CPU's.
//
// To PyTorch it is another device: tensors, generators, streams, events and an allocator of its own, with statistics and a size.
// An operator is run by the CPU's kernel on the same memory. While it runs, what the CPU's allocator is asked for is memory of
// the device, so results and scratch alike are counted there, as on a real accelerator. Nothing runs asynchronously.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kHosted = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kGranularity = 256;  // other than CUDA's
constexpr size_t kHeader = 64;
constexpr size_t kTotal = size_t{8} << 30;

thread_local c10::DeviceIndex current_index = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

// --- memory ----------------------------------------------------------------------------------------------------------

struct Pool {
    size_t total = kTotal;
    c10::CachingAllocator::Stat bytes;
    c10::CachingAllocator::Stat requested;
};
std::array<Pool, kDevices> pools;
std::mutex pools_mutex;

struct Header {
    size_t bytes, requested;
    c10::DeviceIndex index;
};

void release(void* data) {
    if (data == nullptr) {
        return;
    }
    auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader);
    {
        std::lock_guard<std::mutex> lock(pools_mutex);
        pools[header->index].bytes.decrease(header->bytes);
        pools[header->index].requested.decrease(header->requested);
    }
    std::free(header);
}

c10::DataPtr take(size_t requested, c10::DeviceIndex index, c10::Device device) {
    if (requested == 0) {
        return {nullptr, nullptr, &release, device};
    }
    const size_t bytes = (requested + kGranularity - 1) / kGranularity * kGranularity;
    {
        std::lock_guard<std::mutex> lock(pools_mutex);
        Pool& pool = pools[index];
        const size_t free = pool.total - static_cast<size_t>(pool.bytes.current);
        TORCH_CHECK_WITH(OutOfMemoryError, bytes <= free, "hosted:", int(index), " is out of memory: tried to allocate ", bytes,
                         " bytes, ", free, " are free");
        pool.bytes.increase(bytes);
        pool.requested.increase(requested);
    }
    char* block = static_cast<char*>(std::aligned_alloc(64, kHeader + bytes));
    new (block) Header{bytes, requested, index};
    return {block + kHeader, block + kHeader, &release, device};
}

struct HostedAllocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t bytes) override { return take(bytes, current_index, {kHosted, current_index}); }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        std::lock_guard<std::mutex> lock(pools_mutex);
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = pools[index].bytes;
        stats.requested_bytes[0] = pools[index].requested;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex index) override {
        std::lock_guard<std::mutex> lock(pools_mutex);
        pools[index].bytes.reset_accumulated();
    }
    void resetPeakStats(c10::DeviceIndex index) override {
        std::lock_guard<std::mutex> lock(pools_mutex);
        pools[index].bytes.reset_peak();
        pools[index].requested.reset_peak();
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        std::lock_guard<std::mutex> lock(pools_mutex);
        return {pools[index].total - pools[index].bytes.current, pools[index].total};
    }
};
HostedAllocator allocator;
REGISTER_ALLOCATOR(kHosted, &allocator);

// The CPU's allocator while an operator of the device runs: what the device's allocator hands out, whoever is in front of it by
// now, under the CPU's name.
struct InsideAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const auto before = std::exchange(current_index, index);
        c10::DataPtr made = c10::GetAllocator(kHosted)->allocate(bytes);
        current_index = before;
        void* const data = made.get();
        const auto deleter = made.get_deleter();
        return {data, made.release_context(), deleter, at::kCPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return c10::GetAllocator(kHosted)->raw_deleter(); }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
    c10::DeviceIndex index = 0;
};
InsideAllocator inside;

// --- random numbers --------------------------------------------------------------------------------------------------

struct HostedGenerator final : c10::GeneratorImpl {
    explicit HostedGenerator(c10::DeviceIndex index)
        : GeneratorImpl({kHosted, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          own(c10::make_intrusive<at::CPUGeneratorImpl>()) {}
    void set_current_seed(uint64_t seed) override { own->set_current_seed(seed); }
    void set_offset(uint64_t offset) override { own->set_offset(offset); }
    uint64_t get_offset() const override { return own->get_offset(); }
    uint64_t current_seed() const override { return own->current_seed(); }
    uint64_t seed() override { return own->seed(); }
    void set_state(const c10::TensorImpl& state) override { own->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own->get_state(); }
    HostedGenerator* clone_impl() const override {
        auto* copy = new HostedGenerator(device_.index());
        copy->own->set_state(*own->get_state());
        return copy;
    }
    c10::intrusive_ptr<at::CPUGeneratorImpl> own;
};

const at::Generator& default_generator(int64_t index) {
    static const std::array<at::Generator, kDevices> generators = {at::make_generator<HostedGenerator>(0),
                                                                    at::make_generator<HostedGenerator>(1)};
    return generators.at(index);
}

void exchange(at::CPUGeneratorImpl& one, at::CPUGeneratorImpl& other) {
    const auto engine = one.engine();
    const auto single = one.next_float_normal_sample();
    const auto twice = one.next_double_normal_sample();
    one.set_engine(other.engine());
    one.set_next_float_normal_sample(other.next_float_normal_sample());
    one.set_next_double_normal_sample(other.next_double_normal_sample());
    other.set_engine(engine);
    other.set_next_float_normal_sample(single);
    other.set_next_double_normal_sample(twice);
}

// --- devices, streams, events ----------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

struct HostedGuard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kHosted; }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {kHosted, current_index}; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() < kDevices, "there are ", kDevices, " hosted devices, and none is ", device);
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.has_index()) {
            current_index = device.index();
        }
    }
    c10::Stream getStream(c10::Device device) const override {
        const auto index = device.has_index() ? device.index() : current_index;
        return c10::Stream(c10::Stream::UNSAFE, {kHosted, index}, current_streams[index]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::UNSAFE, {kHosted, device.has_index() ? device.index() : current_index}, 0);
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        static std::atomic<c10::StreamId> last{0};
        return c10::Stream(c10::Stream::UNSAFE, {kHosted, device.has_index() ? device.index() : current_index}, ++last);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream before = getStream(stream.device());
        current_streams[stream.device_index()] = stream.id();
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeDevice(c10::DeviceIndex) const override {}
    void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
        if (*event == nullptr) {
            *event = new Clock::time_point();
        }
        *static_cast<Clock::time_point*>(*event) = Clock::now();
    }
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
    double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
        const auto time = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(start);
        return std::chrono::duration<double, std::milli>(time).count();
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, HostedGuard);

struct HostedHooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    c10::DeviceIndex getCurrentDevice() const override { return current_index; }
    void setCurrentDevice(c10::DeviceIndex index) const override { HostedGuard().setDevice({kHosted, index}); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return HostedGuard().exchangeDevice({kHosted, index}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
    at::Device getDeviceFromPtr(void* data) const override {
        return {kHosted, reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader)->index};
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
        return default_generator(index < 0 ? current_index : index);
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override {
        return at::make_generator<HostedGenerator>(index < 0 ? current_index : index);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        const auto device = storage.device();
        c10::DataPtr fresh = take(bytes, device.index(), device);
        if (bytes != 0 && storage.nbytes() != 0 && storage.data() != nullptr) {
            std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
        }
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    }
};

// --- operators -------------------------------------------------------------------------------------------------------

std::recursive_mutex operators_mutex;  // the CPU's allocator and generator are one for all threads

// The operands of one operator as the CPU sees them, and its results as the device does.
class Call {
public:
    explicit Call(torch::jit::Stack& stack) {
        for (auto& value : stack) {
            find_device(value);
        }
    }

    c10::DeviceIndex index = current_index;

    c10::IValue to_cpu(const c10::IValue& value) {
        if (value.isTensor()) {
            return to_cpu(value.toTensor());
        }
        if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& each : value.toTensorVector()) {
                list.push_back(to_cpu(each));
            }
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
                list.push_back(each.has_value() ? std::optional<at::Tensor>(to_cpu(*each)) : std::nullopt);
            }
            return list;
        }
        if (value.isStorage() && value.toStorage().device_type() == kHosted) {
            return cpu_storage(value.toStorage());
        }
        if (value.isDevice() && value.toDevice().type() == kHosted) {
            return c10::Device(at::kCPU);
        }
        if (value.isGenerator() && value.toGenerator().device().type() == kHosted) {
            return at::Generator(value.toGenerator().get<HostedGenerator>()->own);
        }
        return value;
    }

    c10::IValue to_device(const c10::IValue& value) {
        if (value.isTensor()) {
            return to_device(value.toTensor());
        }
        if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& each : value.toTensorVector()) {
                list.push_back(to_device(each));
            }
            return list;
        }
        return value;
    }

    // Operands that the operator resized or gave another storage.
    void settle() {
        for (auto& [cpu, device] : storages_of_cpu_) {
            if (cpu->data() != device.data() || cpu->nbytes() != device.nbytes()) {
                const size_t bytes = cpu->nbytes();
                if (cpu->data() != device.data()) {
                    device.unsafeGetStorageImpl()->set_data_ptr_noswap(taken_over(*cpu));
                }
                device.unsafeGetStorageImpl()->set_nbytes(bytes);
            }
        }
        for (auto& [cpu, device] : tensors_) {
            c10::TensorImpl* impl = device.unsafeGetTensorImpl();
            if (!impl->storage().is_alias_of(device_storage(cpu.storage()))) {
                impl->set_storage_keep_dtype(device_storage(cpu.storage()));
            }
            if (cpu.sizes() != device.sizes() || cpu.strides() != device.strides() ||
                cpu.storage_offset() != device.storage_offset()) {
                impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
            }
        }
    }

private:
    void find_device(const c10::IValue& value) {
        const auto seen = [&](c10::Device device) {
            if (device.type() == kHosted && device.has_index()) {
                index = device.index();
            }
        };
        if (value.isTensor() && value.toTensor().defined()) {
            seen(value.toTensor().device());
        } else if (value.isTensorList()) {
            for (const at::Tensor& each : value.toTensorVector()) {
                seen(each.device());
            }
        } else if (value.isDevice()) {
            seen(value.toDevice());
        }
    }

    at::Tensor to_cpu(const at::Tensor& tensor) {
        if (!tensor.defined()) {
            return tensor;
        }
        if (tensor.device().type() != kHosted) {
            if (tensor.has_storage()) {
                foreign_.insert({tensor.storage().unsafeGetStorageImpl(), tensor});
            }
            return tensor;
        }
        for (auto& [cpu, device] : tensors_) {
            if (device.is_same(tensor)) {
                return cpu;
            }
        }
        at::Tensor cpu = at::detail::make_tensor<c10::TensorImpl>(
            cpu_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
        cpu.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        mark(cpu, tensor);
        tensors_.emplace_back(cpu, tensor);
        return cpu;
    }

    // A number of Python's decides less about the type of a result.
    static void mark(const at::Tensor& made, const at::Tensor& like) {
        if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
            made.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
    }

    c10::Storage cpu_storage(const c10::Storage& device) {
        auto found = cpu_of_storages_.find(device.unsafeGetStorageImpl());
        if (found != cpu_of_storages_.end()) {
            return found->second;
        }
        void* data = device.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
        c10::Storage cpu(c10::Storage::use_byte_size_t(), device.nbytes(), c10::DataPtr(data, at::kCPU), &inside, true);
        cpu_of_storages_.insert({device.unsafeGetStorageImpl(), cpu});
        storages_of_cpu_.insert({cpu.unsafeGetStorageImpl(), device});
        return cpu;
    }

    at::Tensor to_device(const at::Tensor& tensor) {
        if (!tensor.defined() || tensor.device().type() != at::kCPU) {
            return tensor;
        }
        for (auto& [cpu, device] : tensors_) {
            if (cpu.is_same(tensor)) {
                return device;
            }
        }
        TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "hosted devices have no tensors of layout ", tensor.layout());
        if (foreign_.count(tensor.storage().unsafeGetStorageImpl()) != 0) {
            return tensor;
        }
        at::Tensor device = at::detail::make_tensor<c10::TensorImpl>(
            device_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
        device.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        mark(device, tensor);
        return device;
    }

    c10::Storage device_storage(const c10::Storage& cpu) {
        auto found = storages_of_cpu_.find(cpu.unsafeGetStorageImpl());
        if (found != storages_of_cpu_.end()) {
            return found->second;
        }
        const size_t bytes = cpu.nbytes();
        c10::Storage device(c10::Storage::use_byte_size_t(), bytes, taken_over(*cpu.unsafeGetStorageImpl()), &allocator, true);
        storages_of_cpu_.insert({cpu.unsafeGetStorageImpl(), device});
        kept_.push_back(cpu);
        return device;
    }

    c10::DataPtr taken_over(c10::StorageImpl& cpu) {
        const c10::Device device(kHosted, index);
        const size_t bytes = cpu.nbytes();
        c10::DataPtr data = cpu.set_data_ptr(c10::DataPtr(nullptr, at::kCPU));
        if (data.get() == nullptr || cpu.allocator() == &inside) {
            void* const block = data.get();
            const auto deleter = data.get_deleter();
            return {block, data.release_context(), deleter, device};
        }
        c10::DataPtr copy = take(bytes, index, device);
        std::memcpy(copy.get(), data.get(), bytes);
        return copy;
    }

    std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // the CPU's, the device's
    std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_of_storages_;
    std::unordered_map<c10::StorageImpl*, c10::Storage> storages_of_cpu_;
    std::unordered_map<c10::StorageImpl*, at::Tensor> foreign_;  // the CPU's own
    std::vector<c10::Storage> kept_;
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    std::lock_guard<std::recursive_mutex> lock(operators_mutex);
    at::AutoDispatchBelowADInplaceOrView below;
    const size_t arguments = op.schema().arguments().size();
    torch::jit::Stack operands(stack->end() - arguments, stack->end());
    stack->resize(stack->size() - arguments);
    torch::jit::Stack given = operands;  // what the device's storages are held by
    Call call(operands);
    for (auto& value : operands) {
        value = call.to_cpu(value);
    }
    auto* drawn = op.hasTag(at::Tag::nondeterministic_seeded) ? default_generator(call.index).get<HostedGenerator>()->own.get() : nullptr;
    auto& of_cpu = *at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
    c10::Allocator* original = c10::GetCPUAllocator();
    const auto begin = [&] {
        inside.index = call.index;
        c10::SetCPUAllocator(&inside);
        if (drawn != nullptr) {
            exchange(of_cpu, *drawn);
        }
    };
    const auto end = [&] {
        c10::SetCPUAllocator(original);
        if (drawn != nullptr) {
            exchange(of_cpu, *drawn);
        }
    };
    begin();
    try {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &operands);
    } catch (...) {
        end();
        throw;
    }
    end();
    call.settle();
    for (const auto& value : operands) {
        stack->push_back(call.to_device(value));
    }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack); }

c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) { run(named("aten::convolution"), stack); }

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    auto position = stack->end() - 7;  // stride
    const at::Tensor weight = (position - 1)->toTensor();
    const bool transposed = (position + 3)->toBool();
    const int64_t groups = (position + 5)->toInt();
    stack->insert(position, c10::List<int64_t>({transposed ? weight.size(1) * groups : weight.size(0)}));
    run(named("aten::convolution_backward"), stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&fallback>());
    m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Autocast: what multiplies matrices does so in low precision.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
}

// --- what the Python module asks for -----------------------------------------------------------------------------------

void set_total(int64_t index, int64_t bytes) {
    std::lock_guard<std::mutex> lock(pools_mutex);
    pools.at(index).total = bytes;
}

TORCH_LIBRARY(hosted, m) {
    m.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(index); });
    m.def("set_total(int index, int bytes) -> ()", &set_total);
}

const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(new HostedHooks());
    return true;
}();

}  // namespace
