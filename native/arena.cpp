#include "arena.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace lowtide {

// Reserved memory. Descriptors are never freed, so that any thread may look whether an address lies in one.
struct Block {
    std::atomic<std::uintptr_t> begin = 0;
    std::atomic<std::uintptr_t> end = 0;          // 0 where the descriptor is free
    std::map<std::int64_t, std::int64_t> alive;  // from the offsets of what lies in it to where that ends
    Source* source = nullptr;
    bool retired = false;

    std::int64_t bytes() const { return static_cast<std::int64_t>(end - begin); }
};

namespace {

constexpr std::int64_t alignment = 64;  // of PyTorch's own CPU allocator: kernels may choose their way by it
constexpr std::size_t most_blocks = 256;   // at a time
constexpr std::size_t most_allocations = 96;  // of one operator that are told apart
constexpr int most_lessons = 4;            // runs of an operator after which it stays outside

struct Registry {
    std::mutex mutex;
    std::array<Block, most_blocks> blocks;
    std::atomic<std::size_t> used = 0;  // no descriptor from here on was ever in use
};

// Never freed: tensors may outlive whatever else there is. A process that is forked must not find it locked.
Registry& registry() {
    static Registry* const one = [] {
        auto* made = new Registry();
#if !defined(_WIN32)
        pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                       [] { registry().mutex.unlock(); });
#endif
        return made;
    }();
    return *one;
}

std::int64_t padded(std::int64_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
}

// Memory that is no block's any more: to be given back when the registry is not locked, since its source may wait for others.
struct Given {
    Source* source = nullptr;
    void* memory = nullptr;
    std::int64_t bytes = 0;

    void give() const {
        if (memory != nullptr) source->give(memory, bytes);
    }
};

// Those below are called with the registry locked.

Given free_block(Block& block) {
    const Given given{block.source, reinterpret_cast<void*>(block.begin.load()), block.bytes()};
    block.end = 0;
    block.begin = 0;
    return given;
}

Given retire(Block* block) {
    if (block == nullptr) return {};
    block->retired = true;
    return block->alive.empty() ? free_block(*block) : Given{};
}

// Null where there are as many as there can be.
Block* new_block(void* memory, std::int64_t bytes, Source& source) {
    auto& blocks = registry().blocks;
    const auto free = std::ranges::find_if(blocks, [](const Block& block) { return block.end == 0; });
    if (free == blocks.end()) return nullptr;
    free->source = &source;
    free->retired = false;
    free->begin = reinterpret_cast<std::uintptr_t>(memory);
    free->end = free->begin + static_cast<std::uintptr_t>(bytes);
    const auto position = static_cast<std::size_t>(free - blocks.begin());
    registry().used = std::max(registry().used.load(), position + 1);
    return &*free;
}

// The bytes at `offset`, null where something lies in them.
void* claim(Block& block, std::int64_t offset, std::int64_t bytes) {
    const std::int64_t end = offset + padded(bytes);
    if (offset < 0 || end > block.bytes()) return nullptr;
    const auto after = block.alive.lower_bound(offset);
    if (after != block.alive.end() && after->first < end) return nullptr;
    if (after != block.alive.begin() && std::prev(after)->second > offset) return nullptr;
    block.alive.emplace_hint(after, offset, end);
    block.source->fill(end - offset);
    return reinterpret_cast<void*>(block.begin + static_cast<std::uintptr_t>(offset));
}

// The lowest free bytes that are none of `others`.
void* claim_any(Block& block, std::span<const Place> others, std::int64_t bytes) {
    const std::int64_t size = padded(bytes);
    std::int64_t offset = 0;
    auto next = block.alive.begin();
    while (offset + size <= block.bytes()) {
        for (; next != block.alive.end() && next->first < offset + size; ++next) offset = std::max(offset, next->second);
        const auto other = std::ranges::find_if(others, [&](const Place& each) {
            return each.offset < offset + size && offset < each.offset + padded(each.bytes);
        });
        if (other == others.end()) return claim(block, offset, bytes);
        offset = other->offset + padded(other->bytes);
    }
    return nullptr;
}

// What the running thread is at: which operator of which table, and what it has allocated in it so far. `seen` and `made` are
// kept while the operator is new.
struct Seen {
    std::uintptr_t block;
    std::int64_t bytes;
    std::int32_t until;  // how many there were when it was freed
    bool alive() const { return until < 0; }
};

struct Position {
    AddressTable* table = nullptr;
    std::int32_t operator_index = 0;
    std::int32_t count = 0;
    bool learning = false;
    std::array<Seen, most_allocations> seen{};
    std::size_t made_count = 0;
    std::array<std::uintptr_t, most_allocations> made{};
};
thread_local constinit Position now;

std::span<Seen> seen_by_now() {
    return std::span(now.seen).first(std::min<std::size_t>(static_cast<std::size_t>(now.count), most_allocations));
}

// The offset of the first unused place of so many bytes; below 0 where there is none.
std::int64_t take_place(std::span<const Place> places, std::vector<bool>& used, std::int64_t bytes) {
    for (std::size_t i = 0; i < places.size(); ++i) {
        if (used[i] || places[i].bytes != bytes) continue;
        used[i] = true;
        return places[i].offset;
    }
    return -1;
}

// What an operator uses inside: bytes from its allocation `first` on until there are `until`.
struct Span {
    std::int32_t first;
    std::int32_t until;
    std::int64_t bytes;
    std::int64_t offset;  // below 0 where it has none
};

// Offsets within so many bytes, the largest first, each as low as it goes; those that do not fit get none.
void pack(std::span<Span> spans, std::int64_t room) {
    std::vector<Span*> order;
    for (Span& each : spans) order.push_back(&each);
    std::ranges::stable_sort(order, std::greater{}, [](const Span* each) { return each->bytes; });
    for (Span* each : order) {
        std::int64_t offset = 0;
        for (bool moved = true; moved;) {
            moved = false;
            for (const Span& other : spans) {
                const bool together = other.offset >= 0 && other.first < each->until && each->first < other.until;
                if (!together || other.offset >= offset + each->bytes || offset >= other.offset + other.bytes) continue;
                offset = other.offset + other.bytes;
                moved = true;
            }
        }
        if (offset + each->bytes <= room) each->offset = offset;
    }
}

}  // namespace

Arena::~Arena() {
    std::unique_lock lock(registry().mutex);
    const Given given = retire(block_);
    lock.unlock();
    given.give();
}

bool Arena::reserve(std::int64_t bytes) {
    bytes = padded(bytes);
    if (bytes <= this->bytes()) return true;
    void* memory = source_.take(bytes);
    if (memory == nullptr) return false;
    std::unique_lock lock(registry().mutex);
    Block* larger = new_block(memory, bytes, source_);
    const Given given = larger == nullptr ? Given{&source_, memory, bytes} : retire(std::exchange(block_, larger));
    lock.unlock();
    given.give();
    return larger != nullptr;
}

std::int64_t Arena::bytes() const {
    const std::scoped_lock lock(registry().mutex);
    return block_ == nullptr ? 0 : block_->bytes();
}

ArenaCounts Arena::counts() const {
    const std::scoped_lock lock(registry().mutex);
    return counts_;
}

AddressTable::AddressTable(std::shared_ptr<Arena> arena, std::vector<OperatorPlaces> places) : arena_(std::move(arena)) {
    operators_.reserve(places.size());
    const auto reach = [this](const Place& place) { extent_ = std::max(extent_, place.offset + padded(place.bytes)); };
    for (OperatorPlaces& each : places) {
        std::ranges::for_each(each.tensors, reach);
        std::ranges::for_each(each.second_copies, reach);
        reach(each.workspace);
        operators_.push_back({std::move(each), {}, false, 0});
    }
}

AddressTable::~AddressTable() {
    if (now.table == this) now.table = nullptr;
}

bool AddressTable::reserve() {
    return arena_->reserve(extent_);
}

void AddressTable::begin(std::int32_t operator_index) {
    end();
    if (operator_index < 0 || static_cast<std::size_t>(operator_index) >= operators_.size()) return;
    const std::scoped_lock lock(registry().mutex);
    const Operator& next = operators_[static_cast<std::size_t>(operator_index)];
    now.table = this;
    now.operator_index = operator_index;
    now.count = 0;
    now.made_count = 0;
    now.learning = !next.known && next.lessons < most_lessons;
}

void AddressTable::end() {
    if (now.table != nullptr && now.learning) now.table->learn(now.operator_index);
    now.table = nullptr;
    now.learning = false;
}

bool AddressTable::is_learning() {
    return now.learning;
}

void AddressTable::made(std::span<const std::uintptr_t> addresses) {
    if (!now.learning) return;
    now.made_count = std::min(addresses.size(), now.made.size());
    std::copy_n(addresses.begin(), now.made_count, now.made.begin());
}

// What the operator has just allocated is what it will allocate from now on. A tensor's place is known by its address or else by
// its size; what is gone when the operator ends was a second copy or a workspace.
void AddressTable::learn(std::int32_t operator_index) {
    const std::scoped_lock lock(registry().mutex);
    Operator& of = operators_[static_cast<std::size_t>(operator_index)];
    const std::span<const std::uintptr_t> made = std::span(now.made).first(now.made_count);
    std::vector<bool> tensors(of.places.tensors.size()), copies(of.places.second_copies.size());
    const auto offset_of = [&](const Seen& each) -> std::int64_t {
        if (!each.alive()) return take_place(of.places.second_copies, copies, each.bytes);
        const auto named = static_cast<std::size_t>(std::ranges::find(made, each.block) - made.begin());
        if (named < tensors.size() && !tensors[named] && of.places.tensors[named].bytes == each.bytes) {
            tensors[named] = true;
            return of.places.tensors[named].offset;
        }
        return take_place(of.places.tensors, tensors, each.bytes);
    };
    const std::span<const Seen> seen = seen_by_now();
    std::vector<Span> passing;
    of.expected.clear();
    for (std::size_t i = 0; i < seen.size(); ++i) {
        of.expected.push_back({seen[i].bytes, offset_of(seen[i]), !seen[i].alive(), {}});
        const auto first = static_cast<std::int32_t>(i);
        if (!seen[i].alive() && of.expected[i].offset < 0) passing.push_back({first, seen[i].until, padded(seen[i].bytes), -1});
    }
    pack(passing, padded(of.places.workspace.bytes));
    for (const Span& each : passing) {
        Expected& own = of.expected[static_cast<std::size_t>(each.first)];
        if (each.offset < 0) own.meanwhile.push_back(of.places.workspace);
        for (std::int32_t later = each.first + 1; later < std::min(each.until, static_cast<std::int32_t>(seen.size())); ++later) {
            const Expected& other = of.expected[static_cast<std::size_t>(later)];
            if (other.offset >= 0 && !other.passing) own.meanwhile.push_back({other.offset, other.bytes});
        }
    }
    for (const Span& each : passing) {
        if (each.offset < 0) continue;
        of.expected[static_cast<std::size_t>(each.first)].offset = of.places.workspace.offset + each.offset;
    }
    of.known = true;
    ++of.lessons;
}

void* AddressTable::take(Operator& of, std::int32_t number, std::int64_t bytes) {
    Block* block = arena_->block_;
    if (block == nullptr || !of.known) return nullptr;
    const auto position = static_cast<std::size_t>(number);
    if (position >= most_allocations) return nullptr;
    if (position >= of.expected.size() || of.expected[position].bytes != bytes) {
        of.known = false;  // it is seen again, when it runs next
        ++arena_->counts_.unexpected;
        return nullptr;
    }
    const Expected& each = of.expected[position];
    if (each.offset < 0 && !each.passing) return nullptr;
    void* found = claim(*block, each.offset, bytes);
    if (found == nullptr && each.passing) found = claim_any(*block, each.meanwhile, bytes);
    ArenaCounts& counts = arena_->counts_;
    ++(found != nullptr ? counts.placed : each.passing ? counts.crowded : counts.taken);
    return found;
}

// Wherever there is room, for an operator of which nothing is known yet. What a library may keep is of no known size.
void* AddressTable::take_any(const Operator& of, std::int64_t bytes) {
    Block* block = arena_->block_;
    const auto is_so_large = [bytes](const Place& place) { return place.bytes == bytes; };
    const bool known = bytes <= of.places.workspace.bytes || std::ranges::any_of(of.places.tensors, is_so_large) ||
                       std::ranges::any_of(of.places.second_copies, is_so_large);
    if (block == nullptr || (arena_->source().libraries_keep() && !known)) return nullptr;
    void* found = claim_any(*block, {}, bytes);
    if (found != nullptr) note_allocated(arena_->source().allocator(), found, bytes);
    return found;
}

ArenaPlace placed(const void* allocator, std::int64_t bytes) {
    if (now.table == nullptr || bytes <= 0 || !now.table->is_of(allocator)) return {};
    AddressTable& table = *now.table;
    const std::scoped_lock lock(registry().mutex);
    auto& of = table.operators_[static_cast<std::size_t>(now.operator_index)];
    void* block = now.learning ? table.take_any(of, bytes) : table.take(of, now.count++, bytes);
    return {block, &table.arena_->source()};
}

void note_allocated(const void* allocator, const void* block, std::int64_t bytes) {
    if (!now.learning || block == nullptr || !now.table->is_of(allocator)) return;
    if (static_cast<std::size_t>(now.count) < most_allocations) {
        now.seen[static_cast<std::size_t>(now.count)] = {reinterpret_cast<std::uintptr_t>(block), bytes, -1};
    }
    ++now.count;
}

void note_freed(const void* block) {
    if (!now.learning) return;
    const auto address = reinterpret_cast<std::uintptr_t>(block);
    for (Seen& each : seen_by_now()) {
        if (each.alive() && each.block == address) each.until = now.count;
    }
}

bool lies_in_arena(const void* block) {
    const auto address = reinterpret_cast<std::uintptr_t>(block);
    const Registry& known = registry();
    const auto used = std::span(known.blocks).first(known.used);
    return std::ranges::any_of(used, [&](const Block& each) {
        return address < each.end && each.begin != 0 && each.begin <= address;  // in that order: `begin` is written first
    });
}

bool give_back(const void* block) {
    const auto address = reinterpret_cast<std::uintptr_t>(block);
    std::unique_lock lock(registry().mutex);
    for (Block& each : std::span(registry().blocks).first(registry().used)) {
        if (address < each.begin || address >= each.end) continue;
        const auto found = each.alive.find(static_cast<std::int64_t>(address - each.begin));
        if (found == each.alive.end()) return false;
        each.source->fill(found->first - found->second);
        each.alive.erase(found);
        const Given given = each.retired && each.alive.empty() ? free_block(each) : Given{};
        lock.unlock();
        given.give();
        return true;
    }
    return false;
}

}  // namespace lowtide
