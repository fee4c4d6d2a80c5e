"""Random modules with several results, views among them: a planned one must equal eager to the bit.

    python -m tests.fuzz.modules --seeds 0:2000

prints each seed that fails, why, and the smallest module found that fails in the same way. A seed determines everything: layers
(some used twice, some with tied weights), operators, views of every kind in the middle and among the results, in nested
containers; and the losses, of random results in a random order, see ``tests.fuzz.losses``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.fuzz.operators import COMPUTED, INTEGER, MOST_ELEMENTS, OPERATORS, VIEWS

WORDS, BATCH, LENGTH, WIDTH = 7, 2, 3, 8
_BLOCKS = ("tanh", "linear", "layer norm", "gelu", "attention", "dropout", "add", "convolution", "batch norm")
Variable = tuple[int, int]  # number of a statement, and which of its tensors


@dataclass(frozen=True, slots=True)
class Statement:
    """``kind`` of the operands; ``layer`` names the layer that it calls."""

    number: int
    kind: str
    operands: tuple[Variable, ...] = ()
    options: tuple[Any, ...] = ()
    layer: str = ""

    def __str__(self) -> str:
        operands = [f"v{number}.{part}" for number, part in self.operands]
        given = ", ".join([*([self.layer] if self.layer else []), *operands, *map(str, self.options)])
        return f"v{self.number} = {self.kind}({given})"


@dataclass(frozen=True, slots=True)
class Description:
    """A module and how it is trained; ``shape`` nests the results: a tuple of kinds of containers."""

    seed: int
    dtype: torch.dtype
    autocast: bool
    inputs_want: bool
    budget: int  # percent
    statements: tuple[Statement, ...]
    ties: tuple[tuple[str, str], ...]
    results: tuple[Variable, ...]
    shape: tuple[str, ...]

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.dtype}, autocast {self.autocast}, budget {self.budget}%"
        results = ", ".join(f"v{number}.{part}" for number, part in self.results)
        ties = [f"tied: {one} and {two}" for one, two in self.ties]
        return "\n    ".join([head, *map(str, self.statements), *ties, f"return {results} in {self.shape}"])


@dataclass
class Pair:
    """Two things that a module returns."""

    one: Any
    rest: Any


class RandomModule(nn.Module):
    """Runs statements."""

    def __init__(self, statements: Sequence[Statement], ties: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.free = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.statements = tuple(statements)
        self.results: tuple[Variable, ...] = ()
        self.shape: tuple[str, ...] = ()
        for statement in statements:
            self.make_layer(statement)
        for one, two in ties:
            if one != two and one in self.layers and two in self.layers:
                self.layers[two].weight = self.layers[one].weight

    def make_layer(self, statement: Statement) -> None:
        if statement.layer and statement.layer not in self.layers:
            layer = OPERATORS[statement.kind].layer
            assert layer is not None
            self.layers[statement.layer] = layer(*statement.options)

    def forward(self, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        known: dict[int, list[torch.Tensor]] = {}
        for statement in self.statements:
            known[statement.number] = self.run(statement, known, (ids, x, y))
        return nested([known[number][part] for number, part in self.results], self.shape)

    def run(
        self, statement: Statement, known: dict[int, list[torch.Tensor]], given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The tensors that a statement makes."""
        if statement.kind == "embedding":
            return [self.embedding(given[0])]
        if statement.kind == "argument":
            return [given[statement.options[0]]]
        if statement.kind == "parameter":
            return [self.free]
        operands = [known[number][part] for number, part in statement.operands]
        if statement.kind == "words":
            return [F.linear(operands[0], self.embedding.weight)]
        if statement.layer:
            made = OPERATORS[statement.kind].run(self.layers[statement.layer], *operands)
        else:
            made = OPERATORS[statement.kind].run(*operands, *statement.options)
        return [made] if isinstance(made, torch.Tensor) else list(made)


def nested(tensors: Sequence[torch.Tensor], shape: Sequence[str]) -> Any:
    """The tensors in containers of these kinds, one inside the other."""
    if not shape or len(tensors) < 2:
        return tensors[0] if len(tensors) == 1 else tuple(tensors)
    first, rest = tensors[0], nested(tensors[1:], shape[1:])
    if shape[0] == "dict":
        return {"first": first, "rest": rest}
    if shape[0] == "dataclass":
        return Pair(first, rest)
    return [first, rest] if shape[0] == "list" else (first, rest)


def build(description: Description) -> RandomModule:
    """The module, always with the same parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(description.seed)
        module = RandomModule(description.statements, description.ties).to(description.dtype)
    module.results, module.shape = description.results, description.shape
    return module


def arguments(description: Description, step: int) -> tuple[torch.Tensor, ...]:
    """Of the call in this step."""
    generator = torch.Generator().manual_seed(1000 * description.seed + step)
    ids = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    x, y = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    want = description.inputs_want
    return ids, x.to(description.dtype).requires_grad_(want), y.to(description.dtype)


def surroundings(description: Description) -> contextlib.AbstractContextManager[Any]:
    """In which the module is called."""
    if description.autocast:
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def describe(seed: int) -> Description:
    """The module of a seed."""
    return _Maker(seed).describe()


class _Maker:
    """Grows a module statement by statement; what fails in eager is left out."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.module = RandomModule(())
        self.known: dict[int, list[torch.Tensor]] = {}
        self.statements: list[Statement] = []
        self.views: list[Variable] = []
        self.ties: list[tuple[str, str]] = []

    def describe(self) -> Description:
        rng = self.rng
        dtype = torch.float64 if rng.random() < 0.3 else torch.float32
        autocast = dtype is torch.float32 and rng.random() < 0.2
        description = Description(self.seed, dtype, autocast, rng.random() < 0.5, rng.randint(30, 90), (), (), (), ())
        given = tuple(tensor.detach() for tensor in arguments(description, 0))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), surroundings(description):
            self.module.to(dtype)
            for kind, options in (("embedding", ()), ("argument", (1,)), ("argument", (2,)), ("parameter", ())):
                self._add(Statement(len(self.statements), kind, (), options), given)
            for _ in range(rng.randint(6, 22)):
                self._grow(given, dtype)
        shape = tuple(rng.choice(("tuple", "list", "dict", "dataclass")) for _ in range(rng.randint(0, 3)))
        return dataclasses.replace(
            description,
            statements=tuple(self.statements),
            ties=tuple(self.ties),
            results=self._results(),
            shape=shape,
        )

    def _grow(self, given: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        rng = self.rng
        kinds = VIEWS if rng.random() < 0.4 else INTEGER if rng.random() < 0.04 else COMPUTED
        kind = rng.choice(_BLOCKS) if kinds is COMPUTED and rng.random() < 0.4 else rng.choice(list(kinds))
        operand = self._operand()
        x = self._tensor(operand)
        if rng.random() < 0.04 and x.shape[-1:] == (WIDTH,) and x.is_floating_point():
            self._add(Statement(len(self.statements), "words", (operand,)), given)
            return
        operator = OPERATORS[kind]
        options = operator.choose(rng, x) if x.numel() <= MOST_ELEMENTS or kind in VIEWS else None
        if options is None or x.numel() == 0:
            return
        operands = [operand]
        if operator.operands == 2:
            alike = [v for v in self._variables() if self._tensor(v).shape == x.shape and self._alike(v, x)]
            operands.append(rng.choice(alike))
        layer = self._layer(kind, options) if operator.layer else ""
        self._add(Statement(len(self.statements), kind, tuple(operands), options, layer), given, dtype)

    def _layer(self, kind: str, options: tuple[Any, ...]) -> str:
        """A layer that there is already, or a new one, which may share its weight with one."""
        alike = [s.layer for s in self.statements if s.kind == kind and s.options == options]
        if alike and self.rng.random() < 0.4:
            return self.rng.choice(alike)
        name = f"{kind} {len(self.statements)}"
        if alike and kind != "batch norm" and self.rng.random() < 0.3:
            self.ties.append((alike[0], name) if kind != "scale" else (alike[0], alike[0]))
        return name

    def _add(self, statement: Statement, given: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        try:
            self.module.make_layer(statement)
            if dtype is not None:
                self.module.to(dtype)
            made = self.module.run(statement, self.known, given)
        except (RuntimeError, ValueError, IndexError):
            return
        self.known[statement.number] = made
        self.statements.append(statement)
        if statement.kind in VIEWS:
            self.views += [(statement.number, part) for part in range(len(made))]

    def _variables(self) -> list[Variable]:
        return [(number, part) for number, made in self.known.items() for part in range(len(made))]

    def _tensor(self, variable: Variable) -> torch.Tensor:
        return self.known[variable[0]][variable[1]]

    def _alike(self, variable: Variable, x: torch.Tensor) -> bool:
        return self._tensor(variable).dtype == x.dtype

    def _operand(self) -> Variable:
        """Mostly one of the latest."""
        variables = self._variables()
        return self.rng.choice(variables[-6:] if self.rng.random() < 0.6 else variables)

    def _results(self) -> tuple[Variable, ...]:
        rng = self.rng
        variables = self._variables()
        chosen = [rng.choice(variables[-8:]) for _ in range(rng.randint(1, 3))]
        if self.views:
            chosen += [rng.choice(self.views) for _ in range(rng.randint(1, 4))]
            of = {s.number: s.operands for s in self.statements}
            viewed = [of[number][0] for number, _ in chosen if of[number]]
            chosen += [rng.choice(viewed) for _ in range(rng.randint(0, 2)) if viewed]
        if rng.random() < 0.5:
            chosen.append(rng.choice(variables))
        rng.shuffle(chosen)
        return tuple(chosen)


def seeds_of(text: str) -> range:
    """``"0:2000"`` or ``"17"``."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def smaller(description: Description) -> Iterator[Description]:
    """The same with one result, statement or property less, the largest steps first."""
    for index in range(len(description.results)):
        results = description.results[:index] + description.results[index + 1 :]
        if results:
            yield _used(dataclasses.replace(description, results=results))
    for statement in reversed(description.statements):
        for operand in statement.operands:
            moved = _instead(description, statement.number, operand)
            yield _used(moved)
    if description.shape:
        yield dataclasses.replace(description, shape=())
    if description.ties:
        yield dataclasses.replace(description, ties=())


def _instead(description: Description, number: int, operand: Variable) -> Description:
    """What a statement makes is its operand."""

    def other(variable: Variable) -> Variable:
        return operand if variable[0] == number else variable

    kept = [s for s in description.statements if s.number != number]
    statements = tuple(dataclasses.replace(s, operands=tuple(map(other, s.operands))) for s in kept)
    return dataclasses.replace(description, statements=statements, results=tuple(map(other, description.results)))


def _used(description: Description) -> Description:
    """Without the statements that no result depends on."""
    needed = {number for number, _ in description.results}
    for statement in reversed(description.statements):
        if statement.number in needed:
            needed.update(number for number, _ in statement.operands)
    return dataclasses.replace(description, statements=tuple(s for s in description.statements if s.number in needed))


def main() -> int:
    from tests.fuzz.losses import Outcome, compare, smallest  # they build on this file

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.modules", description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=range(200), help="FIRST:LAST, or one")
    parser.add_argument("--whole", action="store_true", help="do not look for a smaller module that fails")
    arguments = parser.parse_args()
    counts: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
    for seed in arguments.seeds:
        description = describe(seed)
        found = compare(description)
        counts[found.outcome] += 1
        if found.outcome is Outcome.DIFFERS or found.outcome is Outcome.REFUSED:
            print(f"seed {seed} {found.outcome.value}: {found.why}", flush=True)
        if found.outcome is Outcome.DIFFERS and not arguments.whole:
            print(f"  smallest: {smallest(description)}", flush=True)
        if (seed + 1) % 20 == 0:
            print(f"up to {seed}: {_summary(counts)}", file=sys.stderr, flush=True)
    print(_summary(counts))
    return int(counts[Outcome.DIFFERS] > 0)


def _summary(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{number} {outcome.value}" for outcome, number in counts.items())


if __name__ == "__main__":
    sys.exit(main())
