#include "sweep.hpp"

#include <algorithm>

namespace lowtide {
namespace {

// A storage is live from each compute of its base to the last use before the next compute of that base. Walking
// backwards, a read makes a storage live, a compute of its base ends that.
class Sweep {
public:
    explicit Sweep(const Graph& graph)
        : graph_(graph), live_(graph.storages()), needed_(graph.view_count()), saved_(graph.nodes + 1) {}

    // Takes one step back; false where it is a recompute that nobody uses, which drops out.
    bool back(Index node, bool again) {
        if (again) {
            if (!used(node)) return false;
            recompute_ns_ += graph_.time_ns[node];
            if (graph_.random[node] && !saved_[node]) {
                saved_[node] = true;
                resident_ += graph_.rng_state_bytes;
            }
        }
        for (Index view : graph_.needs[node]) needed_[view] = true;
        const bool over = overwrites(node, again);
        read(node);
        Number step = resident_ + graph_.workspace_bytes[node];
        if (over) step -= graph_.storage_bytes[graph_.first_own(node)];
        peak_ = std::max(peak_, step + allocate(node, again));
        if (!again && saved_[node]) {
            saved_[node] = false;
            resident_ -= graph_.rng_state_bytes;
        }
        return true;
    }

    Number recompute_ns() const { return recompute_ns_; }
    Number peak() const { return peak_; }

private:
    bool used(Index node) const {
        return std::ranges::any_of(graph_.owns[node], [&](Index own) { return live_[own] && !graph_.held[own]; });
    }

    // What a node reads last it may write over; not where its result was handed to the caller and is there already.
    bool overwrites(Index node, bool again) const {
        return std::ranges::any_of(graph_.overs[node], [&](Index storage) {
            return !live_[storage] && !(again && graph_.held[graph_.first_own(node)]);
        });
    }

    void read(Index node) {
        for (Index storage : graph_.reads[node]) {
            if (live_[storage]) continue;
            live_[storage] = true;
            resident_ += graph_.storage_bytes[storage];
        }
    }

    // Ends the lives of what the node allocates; the bytes of those that nobody reads, which are there for the step only.
    Number allocate(Index node, bool again) {
        Number unread = 0;
        for (Index storage : graph_.owns[node]) {
            if (!live_[storage] || (again && graph_.held[storage])) {
                unread += graph_.storage_bytes[storage];
                continue;
            }
            live_[storage] = false;
            resident_ -= graph_.storage_bytes[storage];
            form_views(storage);
        }
        return unread;
    }

    void form_views(Index storage) {
        for (Index view : graph_.views[storage]) {
            if (!needed_[view]) continue;
            needed_[view] = false;
            recompute_ns_ += graph_.view_time_ns[view];
        }
    }

    const Graph& graph_;
    std::vector<std::uint8_t> live_;    // by storage
    std::vector<std::uint8_t> needed_;  // by view
    std::vector<std::uint8_t> saved_;   // by node: its generator's state is kept
    Number resident_ = 0;
    Number peak_ = 0;
    Number recompute_ns_ = 0;
};

}  // namespace

Candidate sweep(const Graph& graph, Indices source) {
    Sweep sweep(graph);
    std::vector<Index> kept;
    kept.reserve(source.size());
    for (auto code = source.rbegin(); code != source.rend(); ++code) {
        if (sweep.back(node_of(*code), *code < 0)) kept.push_back(*code);
    }
    std::ranges::reverse(kept);
    return {std::move(kept), sweep.recompute_ns(), sweep.peak()};
}

}  // namespace lowtide
