#include "memory_paths.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "bits.hpp"

namespace lowtide {
namespace {

constexpr Number kNever = Number{1} << 62;

template <int Words>
struct State {
    Index first = 0;    // the next first compute
    Bits<Words> live;   // storages
    Bits<Words> views;  // that are formed
    Bits<Words> kept;   // nodes whose generator states are saved

    bool operator==(const State&) const = default;
    // Whether the other, of the same frontier, has all that this one has.
    bool within(const State& other) const {
        return live.within(other.live) && views.within(other.views) && kept.within(other.kept);
    }
};

struct Hash {
    template <int Words>
    std::size_t operator()(const State<Words>& state) const {
        const Word mixed = state.live.hash() * 31 + state.views.hash() * 17 + state.kept.hash();
        return static_cast<std::size_t>(mixed ^ mixed >> 32) + static_cast<std::size_t>(state.first) * 0x9E3779B1;
    }
};

struct Item {  // what may be given up for room: a storage, or the generator state of a node
    Number bytes;
    Index storage;
    Index node;
};

template <int Words>
struct Entry {
    Number order;
    Number cost;
    Number ticket;
    const State<Words>* state;
    Index trail;  // the settled state before it, -1 for none
    Index node;   // computed since

    bool operator>(const Entry& other) const {
        return std::tie(order, cost, ticket) > std::tie(other.order, other.cost, other.ticket);
    }
};

template <int Words>
class Paths {
public:
    Paths(const Graph& graph, const PathQuestion& question);
    std::optional<MemoryPath> search();

private:
    using Bits = lowtide::Bits<Words>;
    using State = lowtide::State<Words>;
    using Entry = lowtide::Entry<Words>;

    bool settle(const State& state, Number cost);
    Number rest(const State& state) const;
    bool fits() const;
    void leave(const State& state, Number cost);
    void compute(const State& state, Number cost, Index node, const Bits& kept);
    void give_up(std::size_t index, Number missing);
    void arrive();
    std::vector<Index> nodes(Index step) const;
    bool exhausted() const {
        return edges_ > question_.edges || comparisons_ > question_.comparisons
            || static_cast<Number>(trail_.size()) > question_.states;
    }

    const Graph& graph_;
    const PathQuestion question_;
    std::vector<Bits> reads_, owns_, needs_, views_;  // by node, the last by storage
    std::vector<Bits> useful_, random_;               // by stage
    std::vector<Bits> wanted_;                        // by stage: storages of before that first computes read from there on
    Bits held_, handed_;
    std::vector<Number> own_bytes_;

    std::unordered_map<State, Number, Hash> known_;  // what was met, in how much time
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
    std::vector<std::vector<std::pair<const State*, Number>>> settled_;  // by frontier
    std::vector<std::pair<Index, Index>> trail_;      // settled step -> step before, node
    Number edges_ = 0, comparisons_ = 0, tickets_ = 0;

    // Of the edge that is looked along.
    std::vector<Item> items_;
    std::vector<Number> rest_;  // bytes of the items from each on
    std::vector<Index> given_;  // which of them are given up
    const State* from_ = nullptr;
    Number cost_ = 0;
    Index node_ = -1, written_ = -1;
    const Bits* keeping_ = nullptr;
};

template <int Words>
Paths<Words>::Paths(const Graph& graph, const PathQuestion& question)
    : graph_(graph), question_(question) {
    const Index nodes = graph.nodes, storages = graph.storages();
    for (Index node = 0; node <= nodes; ++node) {
        reads_.emplace_back(graph.reads[node]);
        owns_.emplace_back(graph.owns[node]);
        needs_.emplace_back(graph.needs[node]);
        Number bytes = 0;
        for (Index storage : graph.owns[node]) bytes += graph.storage_bytes[storage];
        own_bytes_.push_back(bytes);
    }
    for (Index storage = 0; storage < storages; ++storage) {
        views_.emplace_back(graph.views[storage]);
        if (graph.held[storage]) held_.add(storage);
        if (graph.handed[storage]) handed_.add(storage);
    }
    for (Index stage = 0; stage < nodes + 2; ++stage) {
        Bits useful, random;
        for (Index storage = 0; storage < storages; ++storage) {
            if (question_.storage_until[storage] >= stage) useful.add(storage);
        }
        for (Index node = 0; node < nodes; ++node) {
            if (graph.random[node] && question_.node_until[node] >= stage) random.add(node);
        }
        useful_.push_back(useful);
        random_.push_back(random);
    }
    wanted_.resize(nodes + 2);
    for (Index stage = nodes; stage >= 0; --stage) {
        wanted_[stage] = wanted_[stage + 1];
        wanted_[stage] |= reads_[stage];
        wanted_[stage].drop(owns_[stage]);
    }
    settled_.resize(nodes + 2);
}

template <int Words>
std::optional<MemoryPath> Paths<Words>::search() {
    if (!fits()) return MemoryPath{};
    const auto first = known_.emplace(State{}, Number{0}).first;
    queue_.push({0, 0, tickets_++, &first->first, -1, -1});
    while (!queue_.empty()) {
        const Entry entry = queue_.top();
        queue_.pop();
        if (entry.state->first > graph_.nodes) {
            return MemoryPath{true, nodes(entry.trail), entry.cost};
        }
        if (!question_.any_path && known_.find(*entry.state)->second < entry.cost) continue;
        if (!settle(*entry.state, entry.cost)) continue;
        trail_.emplace_back(entry.trail, entry.node);
        leave(*entry.state, entry.cost);
        if (exhausted()) return std::nullopt;
    }
    return MemoryPath{};
}

// False where a settled state of the same frontier has everything that this one has, in no more time; this one itself, too.
template <int Words>
bool Paths<Words>::settle(const State& state, Number cost) {
    std::vector<std::pair<const State*, Number>>& known = settled_[state.first];
    for (const auto& [other, reached] : known) {
        ++comparisons_;
        if ((question_.any_path || reached <= cost) && state.within(*other)) return false;
    }
    known.emplace_back(&state, cost);
    return true;
}

// What is left to do at least: whatever is read from here on and is gone has to be computed again, and so on for what that
// reads. `kNever` where something of it cannot be.
template <int Words>
Number Paths<Words>::rest(const State& state) const {
    Number total = 0;
    Bits nodes, missing = wanted_[state.first];
    missing.drop(state.live);
    Bits seen = missing;
    while (!missing.empty()) {
        Bits read;
        bool never = false;
        missing.each([&](Index storage) {
            const Index node = graph_.storage_node[storage];
            if (nodes.has(node)) return;
            nodes.add(node);
            total += graph_.time_ns[node];
            read |= reads_[node];
            never = never || !graph_.recomputable[node] || (graph_.random[node] && !state.kept.has(node));
        });
        if (never) return kNever;
        read.drop(state.live);
        read.drop(seen);
        seen |= read;
        missing = read;
    }
    return total;
}

// Whether no operator takes more than the room by itself.
template <int Words>
bool Paths<Words>::fits() const {
    for (Index node = 0; node <= graph_.nodes; ++node) {
        Bits there = reads_[node];
        there |= owns_[node];
        Number bytes = graph_.workspace_bytes[node], over = 0;
        there.each([&](Index storage) { bytes += graph_.storage_bytes[storage]; });
        for (Index storage : graph_.overs[node]) over = std::max(over, graph_.storage_bytes[storage]);
        if (bytes - over > question_.room) return false;
    }
    return true;
}

template <int Words>
void Paths<Words>::leave(const State& state, Number cost) {
    for (Index node = 0; node <= state.first && !exhausted(); ++node) {
        if (!reads_[node].within(state.live)) continue;
        if (node == state.first) {
            compute(state, cost, node, state.kept);
            if (random_[node].has(node)) {
                Bits kept = state.kept;
                kept.add(node);
                compute(state, cost, node, kept);
            }
            continue;
        }
        const bool wanted = graph_.recomputable[node] && question_.node_until[node] >= state.first
                         && !owns_[node].within(state.live);
        if (wanted && (!graph_.random[node] || state.kept.has(node))) compute(state, cost, node, state.kept);
    }
}

template <int Words>
void Paths<Words>::compute(const State& state, Number cost, Index node, const Bits& kept) {
    from_ = &state, node_ = node, keeping_ = &kept;
    cost_ = cost + (node == state.first ? 0 : graph_.time_ns[node]);
    needs_[node].each([&](Index view) { cost_ += state.views.has(view) ? 0 : graph_.view_time_ns[view]; });
    const bool boundary_passed = state.first > graph_.boundary;
    Number over = own_bytes_[node] + graph_.workspace_bytes[node] - question_.room + kept.count() * graph_.rng_state_bytes;
    items_.clear();
    state.live.each([&](Index storage) {
        over += graph_.storage_bytes[storage];
        const bool stays = boundary_passed ? handed_.has(storage) : held_.has(storage);
        if (!stays && !reads_[node].has(storage)) items_.push_back({graph_.storage_bytes[storage], storage, -1});
    });
    kept.each([&](Index other) {
        if (other != node) items_.push_back({graph_.rng_state_bytes, -1, other});
    });
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.bytes > b.bytes; });
    rest_.assign(items_.size() + 1, 0);
    for (std::size_t i = items_.size(); i > 0; --i) rest_[i - 1] = rest_[i] + items_[i - 1].bytes;
    written_ = -1;
    give_up(0, over);
    if (state.live.meets(owns_[node])) return;
    for (Index storage : graph_.overs[node]) {
        if (boundary_passed ? handed_.has(storage) : held_.has(storage)) continue;
        written_ = storage;
        give_up(0, over - graph_.storage_bytes[storage]);
    }
}

// Every set of items from an index on that gives the missing bytes, and of which no part would do: they are sorted.
template <int Words>
void Paths<Words>::give_up(std::size_t index, Number missing) {
    if (missing <= 0) return arrive();
    for (; index < items_.size() && rest_[index] >= missing && !exhausted(); ++index) {
        given_.push_back(static_cast<Index>(index));
        give_up(index + 1, missing - items_[index].bytes);
        given_.pop_back();
    }
}

template <int Words>
void Paths<Words>::arrive() {
    ++edges_;
    State after{*from_};
    after.kept = *keeping_;
    const Index following = from_->first + (node_ == from_->first ? 1 : 0);
    const auto lose = [&](Index storage) {
        after.live.drop(storage);
        views_[storage].each([&](Index view) { after.views.drop(view); });
    };
    for (Index index : given_) {
        const Item& item = items_[index];
        if (item.storage >= 0) lose(item.storage);
        else after.kept.drop(item.node);
    }
    after.first = following;
    after.views |= needs_[node_];
    if (written_ >= 0) lose(written_);
    after.live |= owns_[node_];
    const Bits& useful = useful_[std::min(following, graph_.nodes)];
    const Bits before = after.live;
    before.each([&](Index storage) {
        if (!useful.has(storage) && !handed_.has(storage)) lose(storage);
    });
    after.kept &= random_[following];
    const Number rest = this->rest(after);
    if (rest == kNever || cost_ + rest >= question_.below_ns) return;
    const auto [place, fresh] = known_.try_emplace(std::move(after), cost_);
    if (!fresh) {
        if (question_.any_path || place->second <= cost_) return;
        place->second = cost_;
    }
    const Number order = question_.any_path ? -Number{following} : cost_ + rest;
    queue_.push({order, cost_, tickets_++, &place->first, static_cast<Index>(trail_.size()) - 1, node_});
}

template <int Words>
std::vector<Index> Paths<Words>::nodes(Index step) const {
    std::vector<Index> found;
    for (; step > 0; step = trail_[step].first) found.push_back(trail_[step].second);
    std::reverse(found.begin(), found.end());
    return found;
}

}  // namespace

std::optional<MemoryPath> memory_path(const Graph& graph, const PathQuestion& question) {
    const Index most = std::max({graph.nodes + 1, graph.storages(), graph.view_count()});
    if (most <= kWordBits) return Paths<1>(graph, question).search();
    if (most <= 4 * kWordBits) return Paths<4>(graph, question).search();
    if (most <= 32 * kWordBits) return Paths<32>(graph, question).search();
    return std::nullopt;
}

}  // namespace lowtide
