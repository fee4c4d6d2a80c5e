// Memory that is held from step to step, in which the tensors of a planned step have their places. What it is for stands in
// `lowtide.memory.arena`. Allocations are told apart by the operator that runs and by their number in it, which a table learns
// when the operator first runs; a place is given away only while nothing lies in it, so whatever a step does, nothing is
// written over. All of it may be called from every thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "source.hpp"

namespace lowtide {

struct Block;

// What has gone to its place and what has not, since the arena began: the places of `taken` were not free, for `crowded`, which an
// operator uses inside, there was no room at all, and `unexpected` were not those that the operator allocated when it ran first.
struct ArenaCounts {
    std::int64_t placed = 0;
    std::int64_t taken = 0;
    std::int64_t crowded = 0;
    std::int64_t unexpected = 0;
};

// One block of memory, or none yet. What it has handed out stays valid after it: the block goes with the last of that.
class Arena {
public:
    explicit Arena(Source& source) : source_(source) {}
    Arena(const Arena&) = delete;
    ~Arena();

    // Makes the block at least so large; false where there is no memory for it. What lies in the one before stays there.
    bool reserve(std::int64_t bytes);
    std::int64_t bytes() const;
    ArenaCounts counts() const;
    Source& source() const { return source_; }

private:
    friend class AddressTable;

    Source& source_;
    Block* block_ = nullptr;
    ArenaCounts counts_;
};

struct Place {
    std::int64_t offset;  // below 0: outside of the arena
    std::int64_t bytes;
};

// Where the allocations of an operator go: the tensors that it makes, those that it makes a second time and drops, and what it
// uses inside.
struct OperatorPlaces {
    std::vector<Place> tensors;
    std::vector<Place> second_copies;
    Place workspace;
};

// The places of a step, operator by operator. When an operator runs first, what it allocates goes wherever there is room, while it
// is seen which of its allocations are what.
class AddressTable {
public:
    AddressTable(std::shared_ptr<Arena> arena, std::vector<OperatorPlaces> places);
    AddressTable(const AddressTable&) = delete;
    ~AddressTable();

    // Makes the block large enough for all places; false where there is no memory for it.
    bool reserve();

    // What the running thread allocates from now on is of this operator, and, after `end`, of none.
    void begin(std::int32_t operator_index);
    static void end();
    // Whether the running thread's operator runs for the first time.
    static bool is_learning();
    // For such a one: the addresses of the tensors that it made, in the order of their places; 0 for one that is not known.
    static void made(std::span<const std::uintptr_t> addresses);

private:
    friend struct ArenaPlace placed(const void* allocator, std::int64_t bytes);
    friend void note_allocated(const void* allocator, const void* block, std::int64_t bytes);

    struct Expected {
        std::int64_t bytes;
        std::int64_t offset;           // below 0 where it has no place
        bool passing;                  // gone when the operator ends, so that it may lie wherever there is room
        std::vector<Place> meanwhile;  // what else the operator allocates while it is there
    };
    struct Operator {
        OperatorPlaces places;
        std::vector<Expected> expected;
        bool known = false;
        int lessons = 0;
    };

    void learn(std::int32_t operator_index);
    void* take(Operator& of, std::int32_t number, std::int64_t bytes);
    void* take_any(const Operator& of, std::int64_t bytes);
    bool is_of(const void* allocator) const { return arena_->source().allocator() == allocator; }

    std::shared_ptr<Arena> arena_;
    std::vector<Operator> operators_;
    std::int64_t extent_ = 0;
};

struct ArenaPlace {
    void* block = nullptr;
    Source* source = nullptr;
};

// The place of what the running thread allocates next from an allocator, null where it has none.
ArenaPlace placed(const void* allocator, std::int64_t bytes);
// The running thread has allocated or freed a block outside.
void note_allocated(const void* allocator, const void* block, std::int64_t bytes);
void note_freed(const void* block);
// Whether a block lies in an arena, as of a block that is alive.
bool lies_in_arena(const void* block);
// Gives a block's place back; false for one that lies in no arena.
bool give_back(const void* block);

}  // namespace lowtide
