#include "dual.hpp"

#include <algorithm>
#include <cmath>

namespace lowtide {
namespace {

constexpr Number period = 40;          // iterations between looks at the progress
constexpr double weight_range = 30.0;  // how far the primal weight may move; without limit it degenerates at optima
constexpr double margin = 1e-12;       // relative to the sum of the magnitudes: far above what rounding can do

Sparse transposed(const Sparse& rows, Index columns) {
    Sparse out{std::vector<Index>(columns + 1), std::vector<Index>(rows.index.size()), Column(rows.index.size())};
    for (Index column : rows.index) ++out.start[column + 1];
    for (Index column = 0; column < columns; ++column) out.start[column + 1] += out.start[column];
    std::vector<Index> next(out.start.begin(), out.start.end() - 1);
    for (Index row = 0; row < rows.rows(); ++row) {
        for (Index i = rows.start[row]; i < rows.start[row + 1]; ++i) {
            const Index place = next[rows.index[i]]++;
            out.index[place] = row;
            out.value[place] = rows.value[i];
        }
    }
    return out;
}

void multiply(const Sparse& matrix, const Column& x, Column& out) {
    for (Index row = 0; row < matrix.rows(); ++row) {
        double total = 0.0;
        for (Index i = matrix.start[row]; i < matrix.start[row + 1]; ++i) total += matrix.value[i] * x[matrix.index[i]];
        out[row] = total;
    }
}

// 1 / the sum of magnitudes of each row.
Column steps(const Sparse& matrix) {
    Column out(matrix.rows(), 1.0);
    for (Index row = 0; row < matrix.rows(); ++row) {
        double total = 0.0;
        for (Index i = matrix.start[row]; i < matrix.start[row + 1]; ++i) total += std::abs(matrix.value[i]);
        if (total > 0) out[row] = 1.0 / total;
    }
    return out;
}

double distance(const Column& a, const Column& b) {
    double total = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) total += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(total);
}

void add(const Column& values, Column& sum) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
}

Column divided(const Column& sum, double count) {
    Column out(sum);
    for (double& value : out) value /= count;
    return out;
}

class Ascent {
public:
    Ascent(const Matrix& matrix, const Covering& program, Column x, Column y, double first_weight)
        : matrix_(matrix),
          program_(program),
          first_weight_(first_weight),
          weight_(first_weight),
          x_step_(steps(matrix.columns)),
          y_step_(steps(matrix.rows)),
          x_(std::move(x)),
          y_(std::move(y)),
          ax_(y_.size()),
          aty_(x_.size()),
          ax_before_(y_.size()),
          x_sum_(x_.size()),
          y_sum_(y_.size()),
          x_from_(x_),
          y_from_(y_) {
        multiply(matrix.rows, x_, ax_);
        multiply(matrix.columns, y_, aty_);
    }

    Dual run(Number iterations) {
        best_ = {safe_bound(y_), x_, y_, weight_};
        error_at_restart_ = error_before_ = error(best_.bound, x_, ax_);
        for (Number iteration = 1; iteration <= iterations; ++iteration) {
            step();
            ++since_;
            const bool looks = iteration % period == 0 || iteration == iterations;
            if (looks && !look(0.36 * static_cast<double>(iteration))) break;
        }
        best_.weight = weight_;
        return std::move(best_);
    }

private:
    // One iteration of the primal-dual hybrid gradient method.
    void step() {
        for (std::size_t column = 0; column < x_.size(); ++column) {
            const double slope = program_.cost[column] - aty_[column];
            const double moved = x_[column] - x_step_[column] / weight_ * slope;
            x_[column] = std::min(std::max(moved, program_.lower[column]), program_.upper[column]);
        }
        std::swap(ax_, ax_before_);
        multiply(matrix_.rows, x_, ax_);
        for (std::size_t row = 0; row < y_.size(); ++row) {
            const double missed = program_.right[row] - 2 * ax_[row] + ax_before_[row];
            y_[row] = std::max(y_[row] + y_step_[row] * weight_ * missed, 0.0);
        }
        multiply(matrix_.columns, y_, aty_);
        add(x_, x_sum_);
        add(y_, y_sum_);
    }

    // Keeps the best of the point at hand and the mean since the last restart, and begins again from the better of the two
    // where that pays, at the latest after `most_steps`; false at the optimum.
    bool look(double most_steps) {
        const Column x_mean = divided(x_sum_, static_cast<double>(since_));
        const Column y_mean = divided(y_sum_, static_cast<double>(since_));
        Column ax_mean(y_.size());
        multiply(matrix_.rows, x_mean, ax_mean);
        const double here = safe_bound(y_);
        const double mean = safe_bound(y_mean);
        keep(here, y_);
        keep(mean, y_mean);
        const double error_here = error(here, x_, ax_);
        const double error_mean = error(mean, x_mean, ax_mean);
        const double least = std::min(error_here, error_mean);
        best_.x = error_here <= error_mean ? x_ : x_mean;
        const bool less = least <= 0.8 * error_at_restart_ && least > error_before_;
        if (least <= 0.2 * error_at_restart_ || less || static_cast<double>(since_) >= most_steps) {
            if (error_mean < error_here) {
                x_ = x_mean;
                y_ = y_mean;
                ax_ = ax_mean;
                multiply(matrix_.columns, y_, aty_);
            }
            restart();
            error_at_restart_ = least;
            if (least < 1e-8) return false;
        }
        error_before_ = least;
        return true;
    }

    void keep(double bound, const Column& y) {
        if (bound <= best_.bound) return;
        best_.bound = bound;
        best_.y = y;
    }

    // Begins again from the point at hand, with the primal weight that the way to it suggests.
    void restart() {
        const double moved_x = distance(x_, x_from_);
        const double moved_y = distance(y_, y_from_);
        if (moved_x > 1e-10 && moved_y > 1e-10) {
            const double suggested = std::sqrt(moved_y / moved_x * weight_);
            weight_ = std::min(std::max(suggested, first_weight_ / weight_range), first_weight_ * weight_range);
        }
        x_from_ = x_;
        y_from_ = y_;
        std::ranges::fill(x_sum_, 0.0);
        std::ranges::fill(y_sum_, 0.0);
        since_ = 0;
    }

    // The bound that `y` proves, rounding errors taken off.
    double safe_bound(const Column& y) const {
        double total = 0.0, size = 1.0;
        for (std::size_t row = 0; row < y.size(); ++row) {
            total += program_.right[row] * y[row];
            size += std::abs(program_.right[row] * y[row]);
        }
        const Sparse& columns = matrix_.columns;
        for (Index column = 0; column < columns.rows(); ++column) {
            double reduced = program_.cost[column];
            for (Index i = columns.start[column]; i < columns.start[column + 1]; ++i) {
                const double part = columns.value[i] * y[columns.index[i]];
                reduced -= part;
                size += std::abs(part);
            }
            total += reduced * (reduced > 0 ? program_.lower[column] : program_.upper[column]);
        }
        return total - margin * size;
    }

    // How far from optimal: rows missed and the gap between the two objectives.
    double error(double bound, const Column& x, const Column& ax) const {
        double gap = -bound, missed = 0.0;
        for (std::size_t column = 0; column < x.size(); ++column) gap += program_.cost[column] * x[column];
        for (std::size_t row = 0; row < ax.size(); ++row) {
            const double short_of = std::max(program_.right[row] - ax[row], 0.0);
            missed += short_of * short_of;
        }
        return std::sqrt(weight_ * weight_ * missed + gap * gap);
    }

    const Matrix& matrix_;
    const Covering& program_;
    double first_weight_;
    double weight_;
    Column x_step_, y_step_;
    Column x_, y_;            // the point at hand
    Column ax_, aty_;         // its products with A
    Column ax_before_;        // A x of the step before
    Column x_sum_, y_sum_;    // since the last restart
    Column x_from_, y_from_;  // the point of that restart
    Number since_ = 0;        // iterations since then
    double error_at_restart_ = 0;
    double error_before_ = 0;
    Dual best_;
};

}  // namespace

Matrix::Matrix(Indices start, Indices index, Floats value, Index columns)
    : rows{{start.begin(), start.end()}, {index.begin(), index.end()}, {value.begin(), value.end()}},
      columns(transposed(rows, columns)) {}

Dual ascend(const Matrix& matrix, const Covering& program, Column x, Column y, double first_weight, Number iterations) {
    return Ascent(matrix, program, std::move(x), std::move(y), first_weight).run(iterations);
}

}  // namespace lowtide
