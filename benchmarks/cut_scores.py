"""What ranks networks cut from a trained one, within one budget? A table of fine-tuned networks, on a CPU.

    python benchmarks/cut_scores.py tune --cifar FOLDER --part choose|check
    python benchmarks/cut_scores.py score --cifar FOLDER --part choose|check
    python benchmarks/cut_scores.py page

``tune`` cuts and fine-tunes the networks of a table as a user would; ``score`` scores the same networks before that, in
every way. What is computed is written down in docs/results/cut-scores.md. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fine_tuning_rate import BATCH, TAUGHT, Case, figures
from numpy.typing import NDArray
from rows import RESULTS, append, command_line, put, read
from scipy.stats import kendalltau

from bcnet.data.source import Batch
from bcnet.search import LogWidthModel
from bcnet.search.constraints import Constraints
from bcnet.search.criteria import allot
from bcnet.search.strategies.neighbours import near
from bcnet.space.importance import importance, kinds
from bcnet.space.network import NetworkSpace
from bcnet.space.widths import Widths
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.optim import Optimisation
from bcnet.training.reconstruction import inherited
from bcnet.training.retraining import Retraining, retrain
from bcnet.utils.provenance import provenance

Floats = NDArray[np.float64]
PAGE = RESULTS / "cut-scores.md"
PARTS = {"choose": ("mobilenet", 41, "flops=15%", 40), "check": ("chain", 42, "flops=25%", 24)}
"""Network, seed of its training, budget, and how many networks of the table."""
FULL = 0.98
"""The share of the budget that every network uses at the least."""
EPOCHS, RATE = 6, 0.05
PART = 125
"""Held-out images that are measured together."""
STEPS = (0, 10, 30, 100)
HEALING_RATES = (0.08, 0.02, 0.005, 0.00125)
MEASURES = {"loss": "loss", "score": "accuracy", "distil": "loss against the teacher"}
IMAGES = (250, 1000, 2000)
CHOSEN = 1000
"""Held-out images of a run's search in the same place: half of the 2,000."""
BOOTSTRAPS = 2000


class Table:
    """A trained network, the configurations of the table, and what is known of them."""

    def __init__(self, part: str, cifar: Path, cache: Path):
        self.part = part
        name, seed, self.budget, self.count = PARTS[part]
        self.case = Case(name, seed, self.budget, BATCH, cifar, cache)
        self.space: NetworkSpace = self.case.space
        self.keep = importance(self.space, self.case.given, "l2")

    @cached_property
    def widths(self) -> dict[str, Widths]:
        """Half of them what rules give and what lies near that, half random; all use the budget."""
        within = Constraints(self.space, self.space.costs, [self.budget])
        rng = np.random.default_rng(0)
        rules = {"uniform": self.case.widths, "balanced": LogWidthModel.balanced(self.space).best(within)}
        for criterion in ("l2", "lamp"):
            scores = importance(self.space, self.case.given, criterion)
            for scope in ("global", "isomorphic"):
                rules[f"{criterion}-{scope}"] = allot(within, scores, scope, kinds(self.space))  # type: ignore[arg-type]
        filled = within.fill(np.stack(list(rules.values())), rng)
        found = dict(zip(rules, filled, strict=True))
        good = np.stack([found[name] for name in found if name != "balanced"])
        found |= {f"near-{n}": row for n, row in enumerate(near(within, good, self.count // 2 - len(found), rng), 1)}
        drawn = within.sample_full(rng, 4 * self.count)
        drawn = drawn[within.used(drawn) >= FULL][: self.count - len(found)]
        return found | {f"random-{n}": row for n, row in enumerate(drawn, 1)}

    @cached_property
    def training(self) -> list[Batch]:
        """Of one epoch: what healing and batch norm's statistics take."""
        return list(self.case.data.train.batches(0))

    @cached_property
    def held(self) -> list[Batch]:
        return [
            pair for x, y in self.case.data.val.batches(0) for pair in zip(x.split(PART), y.split(PART), strict=True)
        ]

    def tuned(self, widths: Widths) -> dict[str, Any]:
        """As a user's: the important channels, reconstructed, fine-tuned with the given network as the teacher."""
        torch.manual_seed(0)
        net = inherited(self.space, self.case.given, widths, self.keep, self.training[:8])
        how = Optimisation(epochs=EPOCHS, lr=RATE, warmup=0.5, weight_decay=5e-4, head=64.0)
        retrain(net, self.case.data.train, Retraining(how, TAUGHT, seed=0), teacher=self.case.given)
        return {"held": figures(net, self.case.data.val), "test": figures(net, self.case.data.test)}

    def scored(self, steps: int, reconstruct: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """For each network, by every measure, the scores on all parts of the held-out images, after ``steps`` at the
        rate that heals uniform widths best."""
        scorer = CutScorer(
            *(self.space, self.case.given, self.keep, self.training, self.held), teacher=self.case.given,
            healing=Healing(steps=0, optimisation=Optimisation(epochs=1, weight_decay=5e-4), distillation=TAUGHT),
            reconstruct=reconstruct,
        )  # fmt: skip
        rate = self._rate(scorer, steps) if steps else None
        if rate is not None:
            scorer.heal_by(steps, rate)
        for name, widths in self.widths.items():
            start = time.process_time()
            parts = {by: scorer.parts(widths, by)[0].round(5).tolist() for by in MEASURES}
            yield name, {"rate": rate, "parts": parts, "seconds": round(time.process_time() - start, 3)}

    def _rate(self, scorer: CutScorer, steps: int) -> float:
        losses = []
        for rate in HEALING_RATES:
            scorer.heal_by(steps, rate)
            losses.append(-float(scorer.parts(self.case.widths, "loss").mean()))
        return HEALING_RATES[int(np.nanargmin(losses))]


def tune(given: argparse.Namespace) -> None:
    table = Table(given.part, given.cifar, given.cache)
    done = {row["name"] for row in read(given.out) if row["part"] == table.part and row["kind"] == "tuned"}
    shared = {"given": figures(table.case.given, table.case.data.test)}
    for name, widths in table.widths.items():
        if name not in done:
            start = time.process_time()
            costs = {cost: int(table.space.costs[cost](widths)[0]) for cost in ("flops", "params")}
            row = {"widths": widths.tolist(), "costs": costs, **table.tuned(widths), **shared}
            _keep(given, table, "tuned", name, row | {"seconds": round(time.process_time() - start, 1)})


def score(given: argparse.Namespace) -> None:
    table = Table(given.part, given.cifar, given.cache)
    rows = [row for row in read(given.out) if row["part"] == table.part and row["kind"] == "scored"]
    for reconstruct in (True, False):
        for steps in STEPS:
            done = [row for row in rows if (row["steps"], row["reconstruct"]) == (steps, reconstruct)]
            if len(done) == len(table.widths):
                continue
            for name, row in table.scored(steps, reconstruct):
                if name not in {one["name"] for one in done}:
                    _keep(given, table, "scored", name, {"steps": steps, "reconstruct": reconstruct, **row})


def _keep(given: argparse.Namespace, table: Table, kind: str, name: str, row: dict[str, Any]) -> None:
    row = {"part": table.part, "kind": kind, "name": name, **row, "made": provenance()}
    append(given.out, row)
    told = {key: row[key] for key in ("steps", "reconstruct", "rate", "test", "seconds") if key in row}
    print(table.part, kind, name, told, flush=True)


@dataclass(frozen=True)
class Opinion:
    """What one way of scoring says of every network (n,), higher is better, and its seconds for one."""

    words: str
    values: Floats
    seconds: float


def opinions(part: str, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[Opinion]:
    tuned = {row["name"]: row for row in rows if row["kind"] == "tuned"}
    widths = np.array([tuned[name]["widths"] for name in names])
    for cost in ("flops", "params"):
        yield Opinion(cost, np.array([tuned[name]["costs"][cost] for name in names], dtype=float), 0.0)
    yield Opinion("sum of logarithms", np.log(widths).sum(1), 0.0)
    scored: dict[tuple[int, bool], dict[str, Any]] = {}
    for row in rows:
        if row["kind"] == "scored":
            scored.setdefault((row["steps"], row["reconstruct"]), {})[row["name"]] = row
    for (steps, reconstruct), found in scored.items():
        if not set(names) <= set(found):
            continue
        seconds = float(np.median([found[name]["seconds"] for name in names]))
        about = ("the cut" if steps == 0 else f"{steps} steps") + ("" if reconstruct else ", no `reconstruct`")
        full = reconstruct and steps in (0, 30)  # the others by loss and all images of a search alone
        for by, words in MEASURES.items() if full else [("loss", "loss")]:
            for images in IMAGES if by == "loss" and full else [CHOSEN]:
                values = np.array([np.mean(found[name]["parts"][by][: images // PART]) for name in names])
                yield Opinion(f"{about}; {words} on {images:,} images", values, seconds)


def page(rows: Sequence[dict[str, Any]], part: str) -> str:
    """Opinions of the networks of one part beside what became of them."""
    mine = [row for row in rows if row["part"] == part]
    tuned = {row["name"]: row for row in mine if row["kind"] == "tuned"}
    names = list(tuned)
    if not names:
        return "Not measured yet."
    loss = np.array([tuned[name]["test"]["loss"] for name in names])
    accuracy = np.array([tuned[name]["test"]["accuracy"] for name in names])
    held = Opinion(
        "the fine-tuned network itself, held-out loss", -np.array([tuned[n]["held"]["loss"] for n in names]), 0
    )
    said = list(opinions(part, mine, names))
    best = max(said, key=lambda one: _kendall(one.values, -loss))
    lines = ["| opinion | Kendall, test loss (95 %) | below the best | accuracy | its favourite | its best five | s |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    lines += [_row(one, None if one is best or one is held else best, loss, accuracy) for one in [*said, held]]
    given = tuned[names[0]]["given"]["accuracy"]
    lines += ["", f"{len(names)} networks; the given one has {given:.2f} %. Test accuracy: uniform "]
    lines[-1] += f"{tuned['uniform']['test']['accuracy']:.2f}, the mean {accuracy.mean():.2f}, the best "
    lines[-1] += f"{accuracy.max():.2f} ({names[int(accuracy.argmax())]})."
    return "\n".join(lines)


def _row(one: Opinion, best: Opinion | None, loss: Floats, accuracy: Floats) -> str:
    """How ``one`` agrees with what came out, and how much less than the ``best`` does."""

    def agrees(values: Floats, at: Any = slice(None)) -> float:
        return _kendall(values[at], -loss[at])

    order = np.argsort(-one.values, kind="stable")
    low, high = _interval(lambda at: agrees(one.values, at), len(loss))
    below = ""
    if best is not None:
        least, most = _interval(lambda at: agrees(best.values, at) - agrees(one.values, at), len(loss))
        below = f"{least:+.2f} to {most:+.2f}"
    cells = [f"{agrees(one.values):.2f} ({low:.2f} to {high:.2f})", below, f"{_kendall(one.values, accuracy):.2f}"]
    cells += [f"{accuracy[order[0]]:.2f}", f"{accuracy[order[:5]].mean():.2f}", f"{one.seconds:.1f}"]
    return f"| {one.words} | {' | '.join(cells)} |"


def write_page(given: argparse.Namespace) -> None:
    rows = read(given.out)
    put(PAGE, {part: page(rows, part) for part in PARTS})


def _kendall(a: Floats, b: Floats) -> float:
    return float(kendalltau(a, b).statistic)


def _interval(measure: Callable[[NDArray[np.int64]], float], count: int) -> tuple[float, float]:
    """Of what is measured on the networks numbered ``at`` (n,), by drawing them anew."""
    rng = np.random.default_rng(0)
    drawn = [measure(at) for at in rng.integers(0, count, (BOOTSTRAPS, count))]
    return float(np.nanquantile(drawn, 0.025)), float(np.nanquantile(drawn, 0.975))


def main() -> None:
    ways = {"tune": tune, "score": score, "page": write_page}
    command_line(__doc__, "cut-scores", ways, {"--part": {"choices": list(PARTS), "default": "choose"}})


if __name__ == "__main__":
    main()
