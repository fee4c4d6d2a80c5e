#include "anneal.hpp"

#include <algorithm>
#include <cmath>

namespace lowtide {
namespace {

constexpr Number coins = 3;       // chances of the closure: never, half, always
constexpr Number period = 64;     // iterations between steps of temperature and pressure
constexpr Number draws = 1 << 30;
constexpr double high = 8.0;      // times the first pressure: that of a sequence that is over the budget and stays there

Index most_repeats(const Graph& graph, Indices codes) {
    std::vector<Index> computes(graph.nodes + 1);
    for (Index code : codes) ++computes[node_of(code)];
    return std::ranges::max(computes);
}

class Annealing {
public:
    Annealing(const Graph& graph, const Classes& classes, Indices first, const AnnealSettings& settings, Random random)
        : settings_(settings),
          random_(random),
          line_(graph, static_cast<Index>(first.size()), most_repeats(graph, first) + 6),
          moves_(line_, classes, random_),
          most_cramped_(std::max(8, graph.nodes >> 8)),
          budget_(settings.budget_bytes),
          pressure_(settings.pressure),
          temperature_(settings.hot) {
        line_.load(first);
        share_ = 4.0 / line_.profile().blocks();
        now_ns_ = line_.recompute_ns();
        measure_excess();
    }

    Candidate run() {
        const double rounds = static_cast<double>(std::max<Number>(settings_.iterations / period, 1));
        const double cooling = std::pow(settings_.cold / settings_.hot, 1.0 / rounds);
        bool fresh = true;  // the current sequence has not been looked at
        bool accepted = true;
        for (Number iteration = 0; iteration < settings_.iterations; ++iteration) {
            if (fresh && excess_.largest == 0 && meets_target()) break;
            if (iteration % period == period - 1) cool(cooling);
            const Number coin = random_.below(coins) * 128;
            const bool moved = moves_.next(!accepted, coin, relieving(), tight());
            accepted = moved && accept();
            fresh = accepted;
        }
        return std::move(best_);
    }

private:
    bool lowering() const { return settings_.lower > 0; }

    // Whether moves are wanted that free something at the peak: where others have not brought it down for a while.
    bool relieving() const { return lowering() || pressure_ > settings_.pressure * high; }

    // Whether the budget is so small that what fits is to be kept, or cannot be kept.
    bool tight() const { return relieving() || settings_.rate == 1; }

    double cost_of(Number time_ns, const Excess& excess) const {
        const double over = static_cast<double>(excess.largest) + share_ * static_cast<double>(excess.total);
        return settings_.time_weight * static_cast<double>(time_ns) + pressure_ * over;
    }

    void measure_excess() {
        excess_ = line_.profile().excess(budget_);
        cost_ = cost_of(now_ns_, excess_);
    }

    // Takes the current sequence, which fits, where it is the best; whether that is enough.
    bool meets_target() {
        const Number peak = line_.profile().peak();
        const bool better = lowering() ? peak < best_.peak_bytes : now_ns_ < best_.recompute_ns;
        if (!best_.codes.empty() && !better) return false;
        best_ = {line_.codes(), now_ns_, peak};
        if (lowering() ? peak <= settings_.target_bytes : now_ns_ <= settings_.target_ns) return true;
        if (lowering()) {
            budget_ = peak - std::max<Number>(1, static_cast<Number>(static_cast<double>(peak) * settings_.lower));
            measure_excess();
        }
        return false;
    }

    void cool(double cooling) {
        temperature_ *= cooling;
        pressure_ = excess_.largest > 0 ? std::min(pressure_ * settings_.rate, settings_.pressure * 100.0)
                                        : std::max(pressure_ / settings_.rate, settings_.pressure / 100.0);
        cost_ = cost_of(now_ns_, excess_);
    }

    // Whether the sequence that the move made becomes the current one.
    bool accept() {
        const Excess excess = line_.profile().excess(budget_);
        const double trial = cost_of(line_.recompute_ns(), excess);
        const double draw = static_cast<double>(random_.below(draws) + 1) / static_cast<double>(draws);
        if (!(trial <= cost_ - temperature_ * std::log(draw))) return false;
        now_ns_ = line_.recompute_ns();
        excess_ = excess;
        cost_ = trial;
        if (moves_.edits().cramped() > most_cramped_) {
            moves_.edits().spread_anew();
            measure_excess();
        }
        return true;
    }

    const AnnealSettings& settings_;
    Random random_;
    Timeline line_;
    Moves moves_;
    Index most_cramped_;  // spreading the steps anew takes time in proportion to their number
    Number budget_;
    double pressure_;
    double temperature_;
    double share_ = 0;
    Number now_ns_ = 0;  // of the current sequence; the timeline may hold a rejected one
    Excess excess_{0, 0};
    double cost_ = 0;
    Candidate best_;
};

}  // namespace

Candidate anneal(const Graph& graph, const Classes& classes, Indices first, const AnnealSettings& settings, Random random) {
    return Annealing(graph, classes, first, settings, random).run();
}

}  // namespace lowtide
