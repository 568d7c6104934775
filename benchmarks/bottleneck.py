"""Does the bottleneck model know what a configuration will score, and does a search by it find better networks?

    python benchmarks/bottleneck.py agree
    python benchmarks/bottleneck.py judge --cifar FOLDER
    python benchmarks/bottleneck.py page

``agree`` predicts scores of earlier searches that the models were not fitted to; ``judge`` searches for networks that
had no part in choosing the model, with it and with the linear one before it. What is computed is written down in
docs/results/bottleneck.md, and ``page`` puts the tables there. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cut_scores import HEALING_RATES, PART
from fine_tuning_rate import BATCH, TAUGHT, Case, figures
from intervals import interval
from linear_neighbours import linear, linear_neighbours
from numpy.typing import NDArray
from rows import RESULTS, append, command_line, put, read
from scipy.stats import kendalltau

from bcnet.search import LogWidthModel, SearchConfig
from bcnet.search.constraints import Constraints
from bcnet.search.criteria import allot
from bcnet.search.predictors.bottleneck import BottleneckModel
from bcnet.search.strategies.base import Strategy
from bcnet.search.strategies.neighbours import near, neighbours
from bcnet.space.importance import importance, kinds
from bcnet.space.widths import Widths
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.optim import Optimisation
from bcnet.training.reconstruction import inherited
from bcnet.training.retraining import Retraining, retrain
from bcnet.utils.provenance import provenance

Floats = NDArray[np.float64]
PAGE = RESULTS / "bottleneck.md"
EARLIER = {
    "MobileNetV2, 44M, neighbours (second comparison)": ("rivals-2-searches.json", "neighbours 44M"),
    "MobileNetV2, 44M, evolution (second)": ("rivals-2-searches.json", "evolution 44M"),
    "VGG19, 25 % (third)": ("rivals-3-ours.json", "25%"),
    "VGG19, 50 % (third)": ("rivals-3-ours.json", "50%"),
    "VGG19, 25 % (fourth)": ("rivals-4-ours.json", "25%"),
    "VGG19, 50 % (fourth)": ("rivals-4-ours.json", "50%"),
    "MobileNetV2, 44M (fifth; its scores are those of guessing)": ("rivals-5-searches.json", "44M"),
    "MobileNetV2, 146M (fifth)": ("rivals-5-searches.json", "146M"),
}
FOLDS, REPEATS = 6, 5
FRESH = (
    ("chain", 61, "flops=25%"),
    ("resnet", 63, "flops=15%"),
    ("mobilenet", 65, "flops=25%"),
    ("chain", 62, "flops=25%"),
    ("resnet", 64, "flops=15%"),
)
"""Networks that had no part in choosing the model, with a seed and a budget each."""
STEPS, EVALUATIONS, POPULATION = 30, 72, 12
EPOCHS, RATE, SEEDS = 6, 0.05, (0, 1)
STRATEGIES: dict[str, Callable[..., Strategy]] = {"linear": linear_neighbours, "bottleneck": neighbours}


def trials(file: str, name: str) -> tuple[Widths, Floats]:
    """Distinct configurations (n, L) of an earlier search, and their losses (n,)."""
    found = json.loads((RESULTS / file).read_text())[name]
    rows = found.get("facts", found)["trials"]
    best: dict[tuple[int, ...], float] = {}
    for row in rows:
        best[tuple(row["widths"])] = row["loss"] if "loss" in row else -row["score"]
    return np.array(list(best)), np.array(list(best.values()))


def _linear(widths: Widths, losses: Floats, asked: Widths) -> Floats:
    return -linear(widths, -np.log(losses), asked, better_half=False)


def _log_width(widths: Widths, losses: Floats, asked: Widths) -> Floats:
    return -LogWidthModel.fit(widths, -np.log(losses), np.ones(widths.shape[1])).predict(asked)


def _bottleneck(widths: Widths, losses: Floats, asked: Widths) -> Floats:
    share = np.full(widths.shape[1], 1 / widths.shape[1])  # what layers cost is not told: scores alone
    return -BottleneckModel.fit(widths, -losses, share).predict(asked)


MODELS = {"linear in logarithms": _linear, "log-width model": _log_width, "bottleneck model": _bottleneck}


def agreement(widths: Widths, losses: Floats) -> dict[str, dict[str, float]]:
    """Kendall of what each model expects with the scores that it did not see: of folds drawn at random, and of the
    second half of the search when only the first is known."""
    half = len(losses) // 2
    found = {}
    for name, model in MODELS.items():
        folds = []
        for repeat in range(REPEATS):
            order = np.random.default_rng(repeat).permutation(len(losses))
            expected = np.empty(len(losses))
            for part in np.array_split(order, FOLDS):
                seen = np.setdiff1d(order, part)
                expected[part] = model(widths[seen], losses[seen], widths[part])
            folds.append(float(kendalltau(expected, losses).statistic))
        ahead = kendalltau(model(widths[:half], losses[:half], widths[half:]), losses[half:]).statistic
        found[name] = {"folds": round(float(np.mean(folds)), 3), "ahead": round(float(ahead), 3)}
    return found


def agree(_: argparse.Namespace) -> None:
    rows = {words: agreement(*trials(*where)) | {"count": len(trials(*where)[1])} for words, where in EARLIER.items()}
    found = {"provenance": provenance(), "agreement": rows}
    (RESULTS / "bottleneck.json").write_text(json.dumps(found, indent=1) + "\n")


class Searched:
    """A trained network of its own, searched by both strategies from the same first configurations."""

    def __init__(self, name: str, seed: int, budget: str, cifar: Path, cache: Path):
        self.case = Case(name, seed, budget, BATCH, cifar, cache)
        self.space, self.given = self.case.space, self.case.given
        self.within = Constraints(self.space, self.space.costs, [budget])
        self.keep = importance(self.space, self.given, "l2")
        self.training = list(self.case.data.train.batches(0))
        held = [p for x, y in self.case.data.val.batches(0) for p in zip(x.split(PART), y.split(PART), strict=True)]
        self.seen, self.unseen = held[: len(held) // 2], held[len(held) // 2 :]

    def scorer(self, images: Any) -> CutScorer:
        return CutScorer(
            *(self.space, self.given, self.keep, self.training, images), teacher=self.given,
            healing=Healing(steps=0, optimisation=Optimisation(epochs=1, weight_decay=5e-4), distillation=TAUGHT),
            reconstruct=True,
        )  # fmt: skip

    def rate(self) -> float:
        """The rate that heals uniform widths best, on the images of the search."""
        scorer, losses = self.scorer(self.seen), []
        for rate in HEALING_RATES:
            scorer.heal_by(STEPS, rate)
            losses.append(-float(scorer.parts(self.case.widths, "loss").mean()))
        return HEALING_RATES[int(np.nanargmin(losses))]

    def first(self) -> Widths:
        """What rules give, and others near it, as a run begins."""
        rng = np.random.default_rng(30)
        rules = [self.case.widths, LogWidthModel.balanced(self.space).best(self.within)]
        for criterion in ("l2", "lamp"):
            scores = importance(self.space, self.given, criterion)
            rules.append(allot(self.within, scores, "global", kinds(self.space)))
        known = self.within.fill(self.space.floor(np.stack(rules)), rng)
        return np.unique(np.concatenate([known, near(self.within, known, POPULATION - len(known), rng)]), axis=0)

    def search(self, strategy: str, rate: float) -> dict[str, Any]:
        scorer, unseen = self.scorer(self.seen), self.scorer(self.unseen)
        for one in (scorer, unseen):
            one.heal_by(STEPS, rate)
        known: dict[tuple[int, ...], float] = {}
        begun, choosing = time.process_time(), 0.0
        source = STRATEGIES[strategy](self.within, SearchConfig(population=POPULATION, seed=0), self.first())
        rows = next(source)
        for _ in range(EVALUATIONS):  # every generation but the first has something new
            for row in rows:
                if tuple(row.tolist()) not in known and len(known) < EVALUATIONS:
                    known[tuple(row.tolist())] = float(scorer.parts(row, "loss").mean())
            if len(known) == EVALUATIONS:
                break
            asked = time.process_time()
            rows = source.send(np.array([known[tuple(row.tolist())] for row in rows]))
            choosing += time.process_time() - asked
        best = np.array(max(known, key=lambda row: known[row]))
        return {
            "widths": best.tolist(), "losses": [round(-loss, 4) for loss in known.values()],
            "seen": round(-max(known.values()), 4), "unseen": round(-float(unseen.parts(best, "loss").mean()), 4),
            "seconds": {"all": round(time.process_time() - begun, 1), "choosing": round(choosing, 2)},
        }  # fmt: skip

    def tuned(self, widths: list[int], seed: int) -> dict[str, float]:
        torch.manual_seed(seed)
        self.case.data.train.seed = seed  # type: ignore[attr-defined]
        net = inherited(self.space, self.given, np.array(widths), self.keep, self.training[:8])
        how = Optimisation(epochs=EPOCHS, lr=RATE, warmup=0.5, weight_decay=5e-4, head=64.0)
        retrain(net, self.case.data.train, Retraining(how, TAUGHT, seed=seed), teacher=self.given)
        return figures(net, self.case.data.test)


def judge(given: argparse.Namespace) -> None:
    done = {(row["network"], row["seed"], row["way"]) for row in read(given.out)}
    for name, seed, budget in FRESH:
        wanted = [way for way in ("uniform", *STRATEGIES) if (name, seed, way) not in done]
        if not wanted:
            continue
        one = Searched(name, seed, budget, given.cifar, given.cache)
        rate, whole = one.rate(), figures(one.given, one.case.data.test)
        for way in wanted:
            row = {"widths": one.case.widths.tolist()} if way == "uniform" else one.search(way, rate)
            row |= {"test": [one.tuned(row["widths"], seed) for seed in SEEDS], "given": whole, "rate": rate}
            about = {"network": name, "seed": seed, "budget": budget, "way": way}
            append(given.out, {**about, **row, "made": provenance()})
            print(name, seed, way, row.get("seen"), row.get("unseen"), row["test"], flush=True)


def agreement_table(found: dict[str, Any]) -> str:
    lines = ["| search | scores | " + " | ".join(MODELS) + " |", "| --- | ---: |" + " ---: |" * len(MODELS)]
    for words, row in found["agreement"].items():
        cells = [f"{row[name]['folds']:.2f} / {row[name]['ahead']:.2f}" for name in MODELS]
        lines.append(f"| {words} | {row['count']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def judge_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Not measured yet."
    found = {(row["network"], row["seed"], row["way"]): row for row in rows}
    lines = ["| network | loss found, linear | bottleneck | on unseen images, linear | bottleneck | "
             "test accuracy, uniform | linear | bottleneck |"]  # fmt: skip
    lines.append("| --- |" + " ---: |" * 7)
    gaps: dict[str, list[float]] = {"seen": [], "unseen": [], "accuracy": [], "uniform": []}
    for name, seed, budget in FRESH:
        if any((name, seed, way) not in found for way in ("uniform", *STRATEGIES)):
            continue
        ways = [found[name, seed, way] for way in ("uniform", *STRATEGIES)]
        accuracy = [float(np.mean([one["accuracy"] for one in way["test"]])) for way in ways]
        cells = [f"{way[part]:.3f}" for part in ("seen", "unseen") for way in ways[1:]]
        cells += [f"{value:.2f}" for value in accuracy]
        lines.append(f"| {name}, {seed}, {budget.removeprefix('flops=')} | {' | '.join(cells)} |")
        for part in ("seen", "unseen"):
            gaps[part].append(ways[2][part] - ways[1][part])
        gaps["accuracy"].append(accuracy[2] - accuracy[1])
        gaps["uniform"].append(accuracy[2] - accuracy[0])
    told = (
        f"Bottleneck minus linear over the networks: loss found {interval(gaps['seen'], '+', 3)}, on unseen images "
        f"{interval(gaps['unseen'], '+', 3)}, test accuracy {interval(gaps['accuracy'], '+')}. Bottleneck minus "
        f"uniform: test accuracy {interval(gaps['uniform'], '+')}."
    )
    return "\n".join([*lines, "", told])


def page(given: argparse.Namespace) -> None:
    agreement = json.loads((RESULTS / "bottleneck.json").read_text())
    put(PAGE, {"agree": agreement_table(agreement), "judge": judge_table(read(given.out))})


def main() -> None:
    ways = {"agree": agree, "judge": judge, "page": page}
    command_line(__doc__, "bottleneck", ways, without_data=("agree", "page"))


if __name__ == "__main__":
    main()
