// The compact graph as the kernels see it: views of the arrays of `lowtide.solve.model.compact.CompactGraph`, where every
// column is explained. Nothing here owns memory; the Python object outlives the call.
#pragma once

#include <cstdint>
#include <span>

namespace lowtide {

using Index = std::int32_t;    // of nodes, storages, views, slots; -1 for none
using Number = std::int64_t;   // bytes and nanoseconds
using Indices = std::span<const Index>;
using Numbers = std::span<const Number>;
using Flags = std::span<const bool>;

// A ragged table: the entries of row i are entries[start[i]] up to entries[start[i + 1] - 1].
struct Ragged {
    Indices start;
    Indices entries;

    Index size(Index row) const { return start[row + 1] - start[row]; }
    Indices operator[](Index row) const { return entries.subspan(start[row], size(row)); }
};

struct Graph {
    Index nodes;  // one more row, for the end of the program, stands behind them
    Index boundary;
    Number rng_state_bytes;
    Numbers time_ns;
    Numbers workspace_bytes;
    Flags recomputable;
    Flags random;
    Ragged reads;    // node -> storages
    Indices read_node;
    Indices gaps;
    Ragged owns;     // node -> storages
    Ragged needs;    // node -> views
    Ragged overs;    // node -> storages that it may write over
    Ragged views;    // storage -> views
    Numbers view_time_ns;
    Indices view_storage;
    Ragged needers;  // view -> nodes
    Numbers storage_bytes;
    Indices storage_node;
    Ragged uses;     // storage -> nodes
    Flags handed;
    Flags held;
    Flags overwritten;

    Index storages() const { return static_cast<Index>(storage_node.size()); }
    Index view_count() const { return static_cast<Index>(view_time_ns.size()); }

    // The first storage that the node allocates; nodes that overwrite or are recomputed have one.
    Index first_own(Index node) const { return owns.entries[owns.start[node]]; }
};

// Sequences are encoded: a first compute of a node is its number, a recompute the complement of it.
inline Index node_of(Index code) { return code >= 0 ? code : ~code; }

}  // namespace lowtide
