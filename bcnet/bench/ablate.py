"""The paper's ablations of a recipe: one part is changed at a time, several seeds each, with intervals.

A variant is a recipe with some changes. Variants that differ in their search alone share a supernet, which is a run of
its own in FOLDER/supernets; what each finds is looked up in a table of networks trained alone or trained as the recipe
says, and becomes a line of FOLDER/results.jsonl, so that a stopped ablation goes on where it was. A variant that cannot
hold the budget has a line that says so, and the others go on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bcnet.bench.results import Results
from bcnet.bench.table import ChannelBench
from bcnet.errors import BcnetError
from bcnet.run.pipeline import run_stages
from bcnet.run.recipe import Prior, Recipe
from bcnet.run.session import Run, command_line, facts
from bcnet.run.stages.scoring import open_scorer
from bcnet.run.stages.search import path_losses
from bcnet.search import search
from bcnet.supernet.paths import METHODS
from bcnet.training.retraining import Retraining, evaluate, retrain
from bcnet.utils.files import digest
from bcnet.utils.progress import Listener, training_steps
from bcnet.utils.provenance import provenance

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """One setting of one ablation: what it changes in the recipe's supernet, and in its search."""

    ablation: str
    name: str
    supernet: Changes = field(default_factory=dict)
    search: Changes = field(default_factory=dict)
    prior: Prior | None = field(default_factory=lambda: Prior(best=None))


NO_COMPLEMENT = {"draws": 2, "complement": False}
SUPERNETS: dict[str, Changes] = {
    "ua": {"method": "ua"},
    "bc, no complement": {"method": "bc", "sampling": NO_COMPLEMENT},
    "bc": {"method": "bc"},
    "bcv2": {"method": "bcv2"},
}
SEARCHES: dict[str, tuple[Changes, Prior | None]] = {
    "greedy": ({"strategy": "greedy"}, None),
    "evolution": ({}, None),
    "evolution, prior": ({}, Prior(best=None)),
}


def variants(recipe: Recipe, wanted: Sequence[str] = ()) -> list[Variant]:
    """All variants of the ablations ``wanted`` (of all where empty), about ``recipe``."""
    groups, base, count = recipe.groups, recipe.base, recipe.search.evaluations
    finer = sorted({max(groups // 2, 2), groups, 2 * groups})
    found = [
        *(
            Variant("supernet and search", f"{net}, {how}", changes, *searched)
            for net, changes in SUPERNETS.items()
            for how, searched in SEARCHES.items()
        ),
        *(Variant("groups", str(k), {"groups": k, "base": max(1, round(base * k / groups))}) for k in finer),
        *(Variant("base width", str(b), {"base": b}) for b in sorted({1, base, max(groups // 4, 1), groups // 2})),
        Variant("complement", "with"),
        Variant("complement", "without", {"sampling": NO_COMPLEMENT}),
        Variant("sides", "both in a step"),
        Variant("sides", "alternating", {"sampling": {"sides": "alternate"}}),
        Variant("prior", "none", prior=None),
        Variant("prior", "100 best widths", prior=Prior(best=100)),
        Variant("prior", "whole log"),
        Variant("prior", "prior only", search={"strategy": "prior"}),
        *(
            Variant("evaluations", str(n), search={"evaluations": n})
            for n in (max(count // 4, 2), max(count // 2, 2), count, 2 * count)
        ),
    ]
    known = list(dict.fromkeys(v.ablation for v in found))
    if unknown := [name for name in wanted if name not in known]:
        raise BcnetError(f"there is no ablation {unknown[0]!r:.40}: there are {', '.join(known)}")
    return [v for v in found if not wanted or v.ablation in wanted]


class Ablation:
    """All variants of a recipe, each with several seeds; ``table`` tells accuracies where networks are not trained."""

    def __init__(
        self,
        recipe: Recipe,
        folder: str | Path,
        table: ChannelBench | None = None,
        device: str | None = None,
        listener: Listener | None = None,
    ):
        if recipe.start != "scratch":
            raise BcnetError("ablations are of supernets trained from scratch: give a recipe with start: scratch")
        self.recipe, self.folder, self.table = recipe, Path(folder), table
        self.device, self.listener = device, listener or Listener()
        self._runs: dict[str, Run] = {}

    def work(self, chosen: Sequence[Variant], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Lines (variant, seed) with the accuracy in percent of what was found, or the ``failure`` to hold the budget;
        those that are known are not repeated, nor are settings that two ablations share."""
        results = Results(self.folder / "results.jsonl", _read)
        done = {row["key"]: row for row in results.known}
        jobs = [(v, s) for v in chosen for s in seeds]
        rows = []
        for number, (variant, seed) in enumerate(jobs, 1):
            key = self._key(variant, seed)
            if key not in done:
                done[key] = {"key": key, **self._one(variant, seed), **provenance(self.device or "cpu")}
                results.add(done[key])
            rows.append({**done[key], "ablation": variant.ablation, "variant": variant.name, "seed": seed})
            self.listener.step("ablations", number, len(jobs), {})
        return rows

    def _key(self, variant: Variant, seed: int) -> str:
        """What tells one result from another, whichever ablation asks for it."""
        told = [self._changed(variant, seed).to_dict(), None if self.table is None else self.table.sha256]
        return digest(json.dumps(told, sort_keys=True).encode())[:16]

    def _changed(self, variant: Variant, seed: int) -> Recipe:
        """The recipe of a variant."""
        whole: dict[str, Any] = dict(variant.supernet)
        if "sampling" in whole:
            usual = METHODS[whole.get("method", self.recipe.method)].sampling
            whole["sampling"] = {**asdict(usual), **whole["sampling"]}
        settings = {**self.recipe.to_dict()["search"], "choose": "score", **variant.search}
        prior = None if variant.prior is None else asdict(variant.prior)
        return self.recipe.changed(**whole, search=settings, prior=prior, seed=seed)

    def _one(self, variant: Variant, seed: int) -> dict[str, Any]:
        """Search in the supernet of a variant, and learn how good what was found is; or why nothing can be found."""
        recipe = self._changed(variant, seed)
        run = self._opened(recipe)
        try:
            self._train_supernet(run)
        except BcnetError as error:
            if _can_hold(run):
                raise
            return {"failure": str(error)}
        scorer = open_scorer(run)
        strategy = recipe.search.strategy
        initial = path_losses(run, recipe.prior) if recipe.prior and strategy in ("evolution", "prior") else None
        config = replace(recipe.search, seed=seed)
        found = search(run.space, scorer, run.constraints.budgets, run.costs, config, initial=initial)
        if found.best is None:
            said = f"nothing within {', '.join(recipe.budgets)} got a score in {len(found.trials)} evaluations"
            return {"failure": "; ".join([said, *found.notes])}
        widths = np.array(found.best.widths)
        accuracy = self._trained(run, recipe, widths) if self.table is None else float(self.table.query(widths).mean)
        figures = {"widths": widths.tolist(), "costs": run.cost_of(widths), "evaluations": len(found.trials)}
        return {**figures, "score": found.best.score, "accuracy": accuracy}

    def _opened(self, recipe: Recipe) -> Run:
        """The run whose supernet has the recipe's settings; searches share it."""
        same = recipe.changed(search=self.recipe.to_dict()["search"], prior=None)
        name = digest(same.to_yaml().encode())[:12]
        if name not in self._runs:
            self._runs = {}  # one supernet in memory at a time
            run = Run(self.folder / "supernets" / name, self.device)
            with run.lock():
                if not run.done("run"):
                    Run.create(run.folder, same, facts(command_line(), same, str(run.device)))
                run.listener = self.listener
            self._runs[name] = run
        return self._runs[name]

    def _train_supernet(self, run: Run) -> None:
        with run.lock():
            run_stages(run, "train")

    def _trained(self, run: Run, recipe: Recipe, widths: Any) -> float:
        """Accuracy in percent, on the test images where there are some, after training from scratch."""
        torch.manual_seed(recipe.seed)
        network = run.fresh(widths)
        config = Retraining(recipe.retrain, seed=recipe.seed, channels_last=recipe.channels_last)
        retrain(network, run.final_training, config, progress=training_steps(self.listener, "network"))
        source = run.data.test if run.data.test is not None else run.data.val
        return 100 * evaluate(network, source, run.task, bf16=recipe.retrain.bf16)["score"]


def _read(row: Any) -> dict[str, Any]:
    return {**row, "key": str(row["key"])}


def _can_hold(run: Run) -> bool:
    """Whether the narrowest network of a run is within its budgets."""
    return bool(run.constraints.feasible(run.space.min[None])[0])


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean accuracy of every variant over the seeds that found something, with half the width of a 95 % interval
    (Student's t), and the ``failure`` of a seed that did not."""
    from scipy.stats import t

    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["ablation"], row["variant"]), []).append(row)
    found = []
    for (ablation, variant), mine in groups.items():
        values = [row["accuracy"] for row in mine if "accuracy" in row]
        failures = [row["failure"] for row in mine if "failure" in row]
        n = len(values)
        half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else None
        told = {"mean": float(np.mean(values)) if values else None, "half": half, "by_seed": values}
        why = {"failed": len(failures), "failure": failures[0]} if failures else {}
        found.append({"ablation": ablation, "variant": variant, **told, **why})
    return found


def chart(found: Sequence[Mapping[str, Any]]) -> str:
    """Every variant as a dot with its interval, one below the other, as an SVG image; without a dot where it found
    nothing within the budget."""
    known = [row for row in found if row["mean"] is not None]
    lows = [row["mean"] - (row["half"] or 0) for row in known] or [0.0]
    highs = [row["mean"] + (row["half"] or 0) for row in known] or [0.0]
    low, high = min(lows), max(max(highs), min(lows) + 1e-6)
    lines, y, before = [], 20.0, ""
    for row in found:
        if row["ablation"] != before:
            y, before = y + 22, row["ablation"]
            lines.append(f'<text x="10" y="{y + 4:.0f}" font-weight="bold">{before}</text>')
        y += 18
        if row["mean"] is None:
            lines.append(f'<text x="230" y="{y + 4:.0f}" text-anchor="end">{row["variant"]}</text>')
            lines.append(f'<text x="240" y="{y + 4:.0f}">cannot hold the budget</text>')
            continue
        x, half = 240 + 420 * (row["mean"] - low) / (high - low), 420 * (row["half"] or 0) / (high - low)
        lines.append(f'<text x="230" y="{y + 4:.0f}" text-anchor="end">{row["variant"]}</text>')
        lines.append(
            f'<path d="M{x - half:.1f} {y}H{x + half:.1f}" stroke="#3b6ea5"/><circle cx="{x:.1f}" cy="{y}" r="4"/>'
        )
        lines.append(f'<text x="672" y="{y + 4:.0f}">{row["mean"]:.2f}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 730 {y + 30:.0f}" '
        f'font-family="sans-serif" font-size="12"><rect width="730" height="{y + 30:.0f}" fill="white"/>'
        f'<text x="240" y="22">accuracy, {low:.2f} to {high:.2f} %</text>'
        f'<g fill="#1f2933">{"".join(lines)}</g></svg>\n'
    )
