// Moves of the search over sequences: each asks for edits of the timeline.
#pragma once

#include <optional>

#include "edits.hpp"

namespace lowtide {

// Nodes that stand at the same place of a repeated block, see `lowtide.solve.model.classes`.
struct Classes {
    Indices number;  // by node
    Ragged members;  // class -> nodes, ascending
};

class Moves {
public:
    Moves(Timeline& line, const Classes& classes, Random& random)
        : line_(line), graph_(line.graph()), classes_(classes), random_(random), edits_(line, random) {}

    // Takes back the last move if it was rejected, then carries out a random one; false where it came to nothing. `relieving`:
    // every third one frees something at the peak. `tight`: runs of recomputes move together, too, which is of little use where
    // there is room.
    bool next(bool rejected, Number coin, bool relieving, bool tight);

    Edits& edits() { return edits_; }

private:
    struct Read {
        Index slot;     // of the step
        Index node;     // what the step reads, that could be recomputed
    };

    bool propose(bool tight);  // whether what is asked for needs no closure
    void insert_before_use();
    void insert_in_group();
    void remove_one();
    void remove_run();
    void remove_in_group();
    void shift();
    void shift_run();
    void step_down();
    void relieve_peak();
    Index random_recompute();
    std::optional<Read> random_read();
    Index random_neighbour(Index node, Index slot, Index& at);
    Index chunk_start(Index slot) const;
    Indices group_around(Index node);
    Index below(Index bound) { return static_cast<Index>(random_.below(bound)); }

    Timeline& line_;
    const Graph& graph_;
    const Classes& classes_;
    Random& random_;
    Edits edits_;
};

}  // namespace lowtide
