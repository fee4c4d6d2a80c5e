#include "greedy.hpp"

#include <algorithm>
#include <limits>

namespace lowtide {
namespace {

constexpr int longest_walk = 64;  // nodes that are looked at for the time of a rebuild

class Greedy {
public:
    Greedy(const Graph& graph, Number budget, Number most_steps)
        : graph_(graph),
          budget_(budget),
          most_steps_(most_steps),
          live_(graph.storages()),
          pins_(graph.storages()),
          seen_(graph.nodes + 1),
          elapsed_(graph.nodes + 2) {
        for (Index node = 0; node <= graph.nodes; ++node) elapsed_[node + 1] = elapsed_[node] + graph.time_ns[node];
    }

    std::vector<Index> run() {
        for (at_ = 0; at_ <= graph_.nodes; ++at_) {
            const std::size_t begun = codes_.size();
            if (!compute(at_)) return {};
            for (Index storage : graph_.reads[at_]) drop(storage);
            for (std::size_t position = begun; position < codes_.size(); ++position) {
                for (Index storage : graph_.owns[node_of(codes_[position])]) drop(storage);
            }
        }
        return std::move(codes_);
    }

private:
    // Computes the node, before it whatever it reads and is gone; false where that takes too many steps.
    bool compute(Index node) {
        std::vector<Index> waiting{node};
        pin_inputs(node, 1);
        while (!waiting.empty()) {
            const Index top = waiting.back();
            const Index missing = missing_input(top);
            if (missing >= 0) {
                waiting.push_back(missing);
                pin_inputs(missing, 1);
                continue;
            }
            if (std::ssize(codes_) == most_steps_) return false;
            run_step(top, waiting.size() > 1);
            pin_inputs(top, -1);
            waiting.pop_back();
        }
        return true;
    }

    void run_step(Index node, bool again) {
        const Index over = overwritten(node);
        Number need = graph_.workspace_bytes[node] + fresh_bytes(node);
        if (over >= 0) need -= graph_.storage_bytes[over];
        while (resident_ + need > budget_) {
            const Index victim = choose_victim();
            if (victim < 0) break;
            free(victim);
        }
        codes_.push_back(again ? ~node : node);
        resident_ += fresh_bytes(node);
        for (Index storage : graph_.owns[node]) live_[storage] = true;
        if (over >= 0) free(over);
    }

    void free(Index storage) {
        live_[storage] = false;
        resident_ -= graph_.storage_bytes[storage];
    }

    // The first node after the present one that reads the storage in the program as written, -1 without one.
    Index next_use(Index storage) const {
        const Indices uses = graph_.uses[storage];
        const auto found = std::ranges::upper_bound(uses, at_);
        return found == uses.end() ? -1 : *found;
    }

    // The live storage that is cheapest to rebuild per byte and time until its next use, -1 without one.
    Index choose_victim() {
        Index best = -1;
        double best_score = std::numeric_limits<double>::infinity();
        for (Index storage = 0; storage < graph_.storages(); ++storage) {
            const Index base = graph_.storage_node[storage];
            if (!live_[storage] || pins_[storage] > 0 || graph_.storage_bytes[storage] == 0) continue;
            if (!graph_.recomputable[base] || graph_.held[storage]) continue;
            const Index use = next_use(storage);
            if (use < 0) return storage;
            const double wait = static_cast<double>(elapsed_[use] - elapsed_[at_] + 1);
            const double bytes = static_cast<double>(graph_.storage_bytes[storage]);
            const double score = static_cast<double>(rebuild_ns(base)) / (bytes * wait);
            if (score < best_score) {
                best = storage;
                best_score = score;
            }
        }
        return best;
    }

    // Time to compute the node again, with whatever it reads and is gone, as far as the walk goes.
    Number rebuild_ns(Index node) {
        ++stamp_;
        seen_[node] = stamp_;
        walk_.assign(1, node);
        Number total = 0;
        for (int walked = 0; !walk_.empty() && walked < longest_walk; ++walked) {
            const Index here = walk_.back();
            walk_.pop_back();
            total += graph_.time_ns[here];
            for (Index storage : graph_.reads[here]) {
                const Index base = graph_.storage_node[storage];
                if (live_[storage] || seen_[base] == stamp_) continue;
                seen_[base] = stamp_;
                walk_.push_back(base);
            }
        }
        return total;
    }

    // The storage that the node writes over because nothing reads it any more, -1 without one.
    Index overwritten(Index node) const {
        for (Index storage : graph_.overs[node]) {
            const bool free = pins_[storage] == 1 && next_use(storage) < 0;
            if (free && graph_.recomputable[graph_.storage_node[storage]]) return storage;
        }
        return -1;
    }

    // Let go of a storage that nothing after the present node reads.
    void drop(Index storage) {
        if (!live_[storage] || graph_.held[storage] || !graph_.recomputable[graph_.storage_node[storage]]) return;
        if (next_use(storage) < 0) free(storage);
    }

    // Keep what the node reads from being evicted, or (with -1) no longer.
    void pin_inputs(Index node, int change) {
        for (Index storage : graph_.reads[node]) pins_[storage] += change;
    }

    // The latest of the nodes whose results the node reads and nobody has, -1 without one.
    Index missing_input(Index node) const {
        Index missing = -1;
        for (Index storage : graph_.reads[node]) {
            if (!live_[storage]) missing = std::max(missing, graph_.storage_node[storage]);
        }
        return missing;
    }

    // Bytes of the storages that the node allocates and that are not there.
    Number fresh_bytes(Index node) const {
        Number total = 0;
        for (Index storage : graph_.owns[node]) total += live_[storage] ? 0 : graph_.storage_bytes[storage];
        return total;
    }

    const Graph& graph_;
    Number budget_;
    Number most_steps_;
    Index at_ = 0;  // the node whose first compute is being made
    Number resident_ = 0;
    std::vector<std::uint8_t> live_;  // by storage
    std::vector<int> pins_;           // by storage: how many waiting computes read it
    std::vector<int> seen_;           // by node: the last walk that met it
    int stamp_ = 0;
    std::vector<Index> walk_;
    std::vector<Number> elapsed_;     // before each node of the program as written
    std::vector<Index> codes_;
};

}  // namespace

std::vector<Index> greedy_sequence(const Graph& graph, Number budget, Number most_steps) {
    return Greedy(graph, budget, most_steps).run();
}

}  // namespace lowtide
