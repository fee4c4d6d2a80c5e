// What the block programs run most: one block's backward sequence, its measures, and a line of ever smaller saved sets.
// Terms are those of `lowtide.solve.blocks.chain`.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

// A block owns the forward nodes low to high - 1 and the backward nodes first to last - 1.
struct BlockSpan {
    Index low;
    Index high;
    Index first;
    Index last;
    Flags counted;   // storage
    Flags leaves;    // storage: read by a later block
    Flags late;      // storage: read by a backward node after `last`
    Numbers before;  // node -> bytes of other storages right before it, in the backward pass
    Numbers during;  // node -> the same while it runs, its results and workspace included
};

struct Measures {
    Number saved_bytes;
    Number forward_peak_bytes;
    Number backward_peak_bytes;
    Number rerun_ns;
    Number extra_ns;
};

// By node or by storage. Not std::vector<bool>, whose elements are bits.
using Marks = std::vector<std::uint8_t>;

// Walks the codes, then the block's forward nodes, backwards.
Measures measure_option(const Graph& graph, const BlockSpan& span, Indices codes);

// Of rows of `columns` figures, sorted, those that no row before them equals or undercuts in every column.
std::vector<Index> undominated(Numbers figures, Index columns);

// The block's backward nodes, each preceded by recomputes of what it reads and nobody has. `kept` (by node) tells whose
// results are there from the forward pass. With `retain` everything recomputed stays for later readers, else only what the
// backward node itself reads does.
std::vector<Index> lazy_codes(const Graph& graph, const BlockSpan& span, const Marks& kept, bool retain);

// Rows of `kept`: all, then without the node whose loss costs least time per byte saved, and so on. Bytes saved count
// `weight` times the backward peak on top. Quadratic in the block's nodes, times its codes.
std::vector<Marks> shrinking_sets(const Graph& graph, const BlockSpan& span, double weight);

}  // namespace lowtide
