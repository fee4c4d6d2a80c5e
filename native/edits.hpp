// What a move of the search does to the timeline, edit by edit.
//
// A move asks for edits. Each insertion may bring its lazy closure, recomputes of what it reads and is gone by then; each
// edit may leave recomputes without use, which are removed as well; all of them are in a journal, from which a rejected
// move is taken back.
#pragma once

#include <optional>
#include <vector>

#include "random.hpp"
#include "timeline.hpp"

namespace lowtide {

class Edits {
public:
    Edits(Timeline& line, Random& random) : line_(line), random_(random) {}

    // Request a recompute just before the step in the slot, or the removal of the recompute in it. What is asked for last
    // is done first.
    void ask_insert(Index node, Index slot) { ask({node, slot, true}); }
    void ask_remove(Index slot) { ask({line_.node_at(slot), slot, false}); }

    // Does what was asked for; whether anything changed. `coin` of 256 is the chance of each recompute of the closure.
    bool carry_out(Number coin);
    // The last edits stay.
    void accept() { journal_.clear(); }
    // The last edits are undone.
    void take_back();

    // How often there was no free slot; spreading the steps anew helps.
    Index cramped() const { return cramped_; }
    void spread_anew();

private:
    struct Edit {
        Index node;
        Index slot;
        bool inserts;
    };
    struct Recompute {
        Index node;
        Index slot;
    };
    static constexpr std::size_t most_edits = 4096;  // of one move

    void ask(const Edit& edit);
    void apply(const Edit& edit);
    void note(Index node, Index slot);
    void note_neighbours(const Edit& edit);
    std::optional<Edit> next(Number coin);
    std::optional<Edit> next_of_closure(Number coin);
    std::optional<Edit> next_asked(Number coin);
    std::optional<Edit> next_useless();
    Index closure_node() const;
    Index waiting_for(Index slot) const;

    Timeline& line_;
    Random& random_;
    std::vector<Edit> journal_;
    std::vector<Edit> asked_;
    std::vector<Recompute> pending_;  // those that may have lost their last use
    // The last insertion with its closure stands in slots front_ to back_; nodes before low_ may still come. -1: none.
    Index front_ = -1;
    Index back_ = -1;
    Index low_ = -1;
    Index cramped_ = 0;
};

}  // namespace lowtide
