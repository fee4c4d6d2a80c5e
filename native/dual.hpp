// Bounds of covering programs from dual solutions: a primal-dual first-order method, and a safe evaluation. What it solves,
// and by whom the method is, stands in `lowtide.solve.bounds.dual`.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

using Floats = std::span<const double>;
using Column = std::vector<double>;

// One direction of a sparse matrix: the entries of a row, or of a column.
struct Sparse {
    std::vector<Index> start;
    std::vector<Index> index;
    Column value;

    Index rows() const { return static_cast<Index>(start.size()) - 1; }
};

// A by rows and by columns.
struct Matrix {
    Sparse rows;
    Sparse columns;

    Matrix(Indices start, Indices index, Floats value, Index columns);
};

// Costs, right sides, and the bounds of the columns.
struct Covering {
    Floats cost;
    Floats right;
    Floats lower;
    Floats upper;
};

struct Dual {
    double bound;   // safe
    Column x;       // a nearly optimal solution
    Column y;       // the best multipliers seen
    double weight;  // the last primal weight
};

Dual ascend(const Matrix& matrix, const Covering& program, Column x, Column y, double first_weight, Number iterations);

}  // namespace lowtide
