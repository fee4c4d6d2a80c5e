"""A child-sum TreeLSTM that reads Python functions as syntax trees and tells which module they are from.

The trees are those of Python's own ``ast``; the recursion of the model is the recursion over the tree, so no two steps
run the same operators. Every tree is read several times at once, each time under another dropout mask, and the losses
are averaged. Kai Sheng Tai et al., ACL 2015, arXiv 1503.00075, section 3.1; Hiroshi Inoue, arXiv 1905.09788.
"""

from __future__ import annotations

import ast
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from examples.dynamic.program import Program, library_text, seeded

_MODULES = ("heapq", "textwrap", "queue", "bisect", "shlex", "string")
_SMALLEST, _LARGEST = 10, 160  # nodes in one tree
_NODES = 100  # in one batch of trees, at least
_READINGS = 12
_WIDTH = 32
_LEARNING_RATE = 3e-3

_KINDS = {
    name: kind
    for kind, name in enumerate(
        sorted(name for name, value in vars(ast).items() if isinstance(value, type) and issubclass(value, ast.AST))
    )
}
_State = tuple[torch.Tensor, torch.Tensor]


class TreeLSTM(nn.Module):
    """``forward(node)``: hidden and cell state of a syntax tree, each (readings, width)."""

    kinds: torch.Tensor

    def __init__(self, width: int, readings: int) -> None:
        super().__init__()
        self.readings = readings
        self.register_buffer("kinds", torch.arange(len(_KINDS)))
        self.embedding = nn.Embedding(len(_KINDS), width)
        self.dropout = nn.Dropout(0.1)
        self.input = nn.Linear(width, 4 * width)
        self.gates = nn.Linear(width, 3 * width, bias=False)
        self.forget = nn.Linear(width, width, bias=False)

    def forward(self, node: ast.AST) -> _State:
        children = [self(child) for child in ast.iter_child_nodes(node)]
        kind = _KINDS[type(node).__name__]
        label = self.input(self.dropout(self.embedding(self.kinds[kind]).expand(self.readings, -1)))
        gates, forget = label.split([3 * self.embedding.embedding_dim, self.embedding.embedding_dim], dim=1)
        if not children:
            return _cell(gates, None)
        hidden, cells = (torch.stack(states) for states in zip(*children, strict=True))
        kept = torch.sigmoid(forget + self.forget(hidden)) * cells
        return _cell(gates + self.gates(hidden.sum(dim=0)), kept.sum(dim=0))


def _cell(gates: torch.Tensor, kept: torch.Tensor | None) -> _State:
    enter, leave, update = gates.chunk(3, dim=1)
    cell = torch.sigmoid(enter) * torch.tanh(update)
    if kept is not None:
        cell = cell + kept
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def make(size: int = 1, seed: int = 0) -> Program:
    """``size`` times 12 readings of the trees of a step."""
    with seeded(seed):
        model, head = TreeLSTM(_WIDTH, _READINGS * size), nn.Linear(_WIDTH, len(_MODULES))
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=_LEARNING_RATE)
    batches = _batches()

    def step(index: int) -> tuple[torch.Tensor, ...]:
        trees, labels = batches[index % len(batches)]
        optimizer.zero_grad()
        roots = torch.stack([model(tree)[0] for tree in trees])
        loss = F.cross_entropy(head(roots).flatten(0, 1), labels.repeat_interleave(model.readings))
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Program("treelstm", (model, head), (optimizer,), step)


def _batches() -> list[tuple[list[ast.AST], torch.Tensor]]:
    """Functions of all modules in turn, cut into batches."""
    functions = [_functions(source) for source in library_text(*_MODULES)]
    mixed = [
        (tree, label, count)
        for row in itertools.zip_longest(*functions)
        for label, entry in enumerate(row)
        if entry is not None
        for tree, count in [entry]
    ]
    batches, trees, labels, total = [], list[ast.AST](), list[int](), 0
    for tree, label, count in mixed:
        trees.append(tree)
        labels.append(label)
        total += count
        if total >= _NODES:
            batches.append((trees, torch.tensor(labels)))
            trees, labels, total = [], [], 0
    return batches


def _functions(source: str) -> list[tuple[ast.AST, int]]:
    """The functions of one module that are neither tiny nor huge, with their numbers of nodes."""
    trees = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    counted = [(tree, sum(1 for _ in ast.walk(tree))) for tree in trees]
    return [(tree, count) for tree, count in counted if _SMALLEST <= count <= _LARGEST]
