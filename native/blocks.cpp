#include "blocks.hpp"

#include <algorithm>
#include <optional>

namespace lowtide {
namespace {

class Measuring {
public:
    Measuring(const Graph& graph, const BlockSpan& span) : graph_(graph), span_(span), live_(graph.storages()) {}

    Measures run(Indices codes) {
        resident_ = revive(span_.late);
        const Number backward_peak = walk_codes(codes);
        const Number rerun = rerun_ns(live_);
        const Number saved = resident_ + revive(span_.leaves);
        resident_ = saved;
        return {saved, walk_forward(), backward_peak, rerun, extra_ns_};
    }

private:
    bool counts(Index storage, Index before) const {
        const Index owner = graph_.storage_node[storage];
        return span_.low <= owner && owner < before && span_.counted[storage];
    }

    // Makes the block's chosen storages live; the bytes that this adds.
    Number revive(Flags chosen) {
        Number added = 0;
        for (Index node = span_.low; node < span_.high; ++node) {
            for (Index storage : graph_.owns[node]) {
                if (!span_.counted[storage] || !chosen[storage] || live_[storage]) continue;
                live_[storage] = true;
                added += graph_.storage_bytes[storage];
            }
        }
        return added;
    }

    // Reads of the storages that nodes before `before` own.
    void read(Index node, Index before) {
        for (Index storage : graph_.reads[node]) {
            if (live_[storage] || !counts(storage, before)) continue;
            live_[storage] = true;
            resident_ += graph_.storage_bytes[storage];
        }
    }

    bool used(Index node, const Marks& wanted) const {
        return std::ranges::any_of(graph_.owns[node], [&](Index storage) { return wanted[storage] != 0; });
    }

    // The peak of the codes; leaves behind what is live before them and the time of the recomputes that are used.
    Number walk_codes(Indices codes) {
        Number peak = 0;
        Index following = span_.last;
        for (auto code = codes.rbegin(); code != codes.rend(); ++code) {
            const Index node = node_of(*code);
            if (*code < 0) {
                if (!used(node, live_)) continue;
                extra_ns_ += graph_.time_ns[node];
            }
            read(node, span_.high);
            if (*code >= 0) {
                peak = std::max(peak, resident_ + span_.during[node]);
                following = node;
                continue;
            }
            const Number here = resident_ + graph_.workspace_bytes[node] + span_.before[following];
            peak = std::max(peak, here + allocate(node, true));
        }
        return peak;
    }

    // The peak of the block's forward nodes.
    Number walk_forward() {
        Number peak = resident_;
        for (Index node = span_.high - 1; node >= span_.low; --node) {
            read(node, node);
            const Number here = resident_ + graph_.workspace_bytes[node];
            peak = std::max(peak, here + allocate(node, false));
        }
        return peak;
    }

    // Ends the lives of what the node allocates; the bytes of those that nobody reads (`all`: not only those that count).
    Number allocate(Index node, bool all) {
        Number unread = 0;
        for (Index storage : graph_.owns[node]) {
            if (live_[storage]) {
                live_[storage] = false;
                resident_ -= graph_.storage_bytes[storage];
            } else if (all || span_.counted[storage]) {
                unread += graph_.storage_bytes[storage];
            }
        }
        return unread;
    }

    // Time of the block's forward nodes that are needed for the storages in `wanted`.
    Number rerun_ns(Marks wanted) const {
        Number time = 0;
        for (Index node = span_.high - 1; node >= span_.low; --node) {
            if (!graph_.recomputable[node] || !used(node, wanted)) continue;
            time += graph_.time_ns[node];
            for (Index storage : graph_.reads[node]) {
                if (counts(storage, node)) wanted[storage] = true;
            }
        }
        return time;
    }

    const Graph& graph_;
    const BlockSpan& span_;
    Marks live_;  // by storage
    Number resident_ = 0;
    Number extra_ns_ = 0;
};

// The saved set of `shrinking_sets` while it shrinks.
class Shrinking {
public:
    Shrinking(const Graph& graph, const BlockSpan& span, double weight)
        : graph_(graph), span_(span), weight_(weight), kept_(graph.nodes + 1), reading_(graph.nodes + 1) {
        for (Index node = span.low; node < span.high; ++node) kept_[node] = graph.recomputable[node];
        for (Index node = span.first; node < span.last; ++node) {
            for (Index storage : graph.reads[node]) reading_[graph.storage_node[storage]] = true;
        }
    }

    std::vector<Marks> run() {
        std::vector<Marks> rows{kept_};
        current_ = measure();
        while (const auto best = best_loss()) {
            kept_[best->node] = false;
            current_ = measure();
            rows.push_back(kept_);
        }
        return rows;
    }

private:
    // What it costs to keep one node less: the lower, the better, ranks first; of equals the one that saves more.
    struct Loss {
        Index node;
        int rank;
        double score;
        double gain;

        bool better_than(const Loss& other) const {
            if (rank != other.rank) return rank < other.rank;
            if (score != other.score) return score < other.score;
            return gain > other.gain;
        }
    };

    Measures measure() const { return measure_option(graph_, span_, lazy_codes(graph_, span_, kept_, true)); }

    std::optional<Loss> best_loss() {
        std::optional<Loss> best;
        for (Index node = span_.low; node < span_.high; ++node) {
            if (!kept_[node]) continue;
            const Loss loss = loss_of(node);
            if (!best || loss.better_than(*best)) best = loss;
        }
        return best;
    }

    Loss loss_of(Index node) {
        kept_[node] = false;
        const Measures found = measure();
        kept_[node] = true;
        const double time = static_cast<double>(found.extra_ns - current_.extra_ns);
        const double peak_gain = static_cast<double>(current_.backward_peak_bytes - found.backward_peak_bytes);
        const double gain = static_cast<double>(current_.saved_bytes - found.saved_bytes) + weight_ * peak_gain;
        const double score = gain > 0 ? time / gain : time;
        const bool for_nobody = !reading_[node] && gain == 0 && time == 0;  // only the block's own forward nodes read it
        return {node, for_nobody ? 0 : gain > 0 ? 1 : 2, score, gain};
    }

    const Graph& graph_;
    const BlockSpan& span_;
    double weight_;
    Marks kept_;     // by node
    Marks reading_;  // by node: a backward node of the block reads it
    Measures current_{};
};

// The codes of `lazy_codes` while they are written.
class Lazy {
public:
    Lazy(const Graph& graph, const BlockSpan& span, const Marks& kept, bool retain)
        : graph_(graph), span_(span), retain_(retain), have_(kept), wanted_(graph.nodes + 1) {}

    std::vector<Index> run() {
        for (Index node = span_.first; node < span_.last; ++node) {
            recompute_for(node);
            codes_.push_back(node);
        }
        return std::move(codes_);
    }

private:
    // Marks the block's nodes whose results the node reads and nobody has; the last of them, -1 without one.
    Index want_inputs(Index node) {
        Index top = -1;
        for (Index storage : graph_.reads[node]) {
            const Index owner = graph_.storage_node[storage];
            if (owner < span_.low || owner >= span_.high || !span_.counted[storage] || have_[owner]) continue;
            wanted_[owner] = true;
            top = std::max(top, owner);
        }
        return top;
    }

    void recompute_for(Index node) {
        const Index top = want_inputs(node);
        if (top < 0) return;
        const Marks direct = retain_ ? Marks() : wanted_;
        for (Index owner = top; owner >= span_.low; --owner) {
            if (wanted_[owner]) want_inputs(owner);
        }
        for (Index owner = span_.low; owner <= top; ++owner) {
            if (!wanted_[owner]) continue;
            codes_.push_back(~owner);
            have_[owner] = retain_ || direct[owner];
            wanted_[owner] = false;
        }
    }

    const Graph& graph_;
    const BlockSpan& span_;
    bool retain_;
    Marks have_;    // by node
    Marks wanted_;  // by node; nothing between two backward nodes
    std::vector<Index> codes_;
};

}  // namespace

Measures measure_option(const Graph& graph, const BlockSpan& span, Indices codes) {
    return Measuring(graph, span).run(codes);
}

std::vector<Index> undominated(Numbers figures, Index columns) {
    std::vector<Index> kept;
    const auto row = [&](Index index) { return figures.subspan(static_cast<std::size_t>(index) * columns, columns); };
    const auto covers = [&](Index one, Index other) {
        return std::ranges::equal(row(one), row(other), std::ranges::less_equal());
    };
    for (Index index = 0; index < static_cast<Index>(figures.size() / columns); ++index) {
        if (std::ranges::none_of(kept, [&](Index one) { return covers(one, index); })) kept.push_back(index);
    }
    return kept;
}

std::vector<Index> lazy_codes(const Graph& graph, const BlockSpan& span, const Marks& kept, bool retain) {
    return Lazy(graph, span, kept, retain).run();
}

std::vector<Marks> shrinking_sets(const Graph& graph, const BlockSpan& span, double weight) {
    return Shrinking(graph, span, weight).run();
}

}  // namespace lowtide
