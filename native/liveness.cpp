#include "liveness.hpp"

#include <algorithm>

namespace lowtide {
namespace {

class Closure {
public:
    Closure(const Graph& graph, Number room, Numbers until)
        : graph_(graph), room_(room), until_(until), slots_(graph.nodes + 2) {
        found_.open.resize(static_cast<std::size_t>(graph.nodes) * slots_);
        found_.certain.resize(static_cast<std::size_t>(graph.storages()) * slots_);
        for (Index node = 0; node < graph.nodes; ++node) {
            if (!graph.recomputable[node]) continue;
            for (Number slot = node + 1; slot <= until[node]; ++slot) open(node, slot) = 1;
        }
    }

    Liveness run(int rounds) {
        while (rounds-- > 0 && close()) {
        }
        found_.instant_bytes = instant_bytes();
        return std::move(found_);
    }

private:
    std::uint8_t& open(Index node, Number slot) { return found_.open[static_cast<std::size_t>(node) * slots_ + slot]; }
    std::uint8_t& certain(Index storage, Number slot) {
        return found_.certain[static_cast<std::size_t>(storage) * slots_ + slot];
    }

    // One round: mark what is certain, close the slots in which a recompute does not fit; whether any was closed.
    bool close() {
        mark_certain();
        const std::vector<Number> certain_bytes = slot_bytes();
        bool closed = false;
        for (Index node = 0; node < graph_.nodes; ++node) {
            const Number own = own_bytes(node);
            for (Number slot = node + 1; slot <= until_[node]; ++slot) {
                if (!open(node, slot)) continue;
                Number step = own + certain_bytes[slot];
                for (Index storage : graph_.reads[node]) {
                    if (!certain(storage, slot)) step += graph_.storage_bytes[storage];
                }
                if (step <= room_) continue;
                open(node, slot) = 0;
                closed = true;
            }
        }
        return closed;
    }

    // A storage is live from the last slot open to its node until the instant that reads it.
    void mark_certain() {
        for (Index storage = 0; storage < graph_.storages(); ++storage) {
            if (!graph_.held[storage]) continue;
            for (Index slot = graph_.storage_node[storage] + 1; slot <= graph_.nodes; ++slot) certain(storage, slot) = 1;
        }
        for (Index instant = 0; instant <= graph_.nodes; ++instant) {
            for (Index storage : graph_.reads[instant]) {
                const Index base = graph_.storage_node[storage];
                for (Index slot = instant; slot > base && !open(base, slot); --slot) certain(storage, slot) = 1;
            }
        }
    }

    std::vector<Number> slot_bytes() {
        std::vector<Number> bytes(slots_);
        for (Index storage = 0; storage < graph_.storages(); ++storage) {
            for (Index slot = graph_.storage_node[storage] + 1; slot <= graph_.nodes; ++slot) {
                if (certain(storage, slot)) bytes[slot] += graph_.storage_bytes[storage];
            }
        }
        return bytes;
    }

    // Workspace and results.
    Number own_bytes(Index node) const {
        Number bytes = graph_.workspace_bytes[node];
        for (Index storage : graph_.owns[node]) bytes += graph_.storage_bytes[storage];
        return bytes;
    }

    std::vector<Number> instant_bytes() {
        std::vector<Number> bytes;
        for (Index node = 0; node <= graph_.nodes; ++node) {
            Number here = own_bytes(node);
            for (Index storage : graph_.reads[node]) {
                if (!certain(storage, node + 1) && !graph_.held[storage]) here += graph_.storage_bytes[storage];
            }
            for (Index storage = 0; storage < graph_.storages(); ++storage) {
                const bool there = certain(storage, node + 1) || graph_.held[storage];
                if (graph_.storage_node[storage] < node && there) here += graph_.storage_bytes[storage];
            }
            bytes.push_back(here);
        }
        return bytes;
    }

    const Graph& graph_;
    Number room_;
    Numbers until_;
    Index slots_;
    Liveness found_;
};

}  // namespace

Liveness close_slots(const Graph& graph, Number room, Numbers until, int rounds) {
    return Closure(graph, room, until).run(rounds);
}

}  // namespace lowtide
