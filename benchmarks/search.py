"""Measures the search: regret on the released tables, the prior's program, the prior population, overhead.

    python benchmarks/search.py --table DIR [regret|held-out|program|population|overhead ...] [--only NAME ...]
    python benchmarks/search.py --table DIR supernets noisy --only FILE ...  (scores.npz that `bcnet bench rank` wrote)

Writes docs/results/search.json, part by part, so that parts can be measured one at a time; then
benchmarks/search_report.py writes docs/results/search.md and the plots from it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # all times are of one core

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from log_width_report import gains_alone
from numpy.typing import NDArray

from bcnet.bench.table import ChannelBench
from bcnet.errors import BcnetError
from bcnet.models import MODELS, build
from bcnet.search import (
    Constraints,
    LogWidthModel,
    PathLosses,
    SearchConfig,
    SearchResult,
    TrialStore,
    potential_errors,
    prior_population,
    search,
)
from bcnet.search.predictors.surrogate import Surrogate
from bcnet.search.prior.problem import PriorProblem
from bcnet.space.cost import QuadraticCost
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.widths import Widths, WidthSpace, WidthVariable, candidates
from bcnet.utils.provenance import provenance

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "search.json"
SPACES, BUDGETS = ("mobilenet", "resnet"), (25, 50, 75)
SEEDS, EVALUATIONS = 20, 2000
SUPERNET_SEEDS, SUPERNET_EVALUATIONS = 5, 240
NOISY_EVALUATIONS, NOISE = 60, 2.0
POINTS = (40, 80, 120, 160, 200, 280, 400, 560, 800, 1120, 1600, 2000)
CONFIGS = {
    "evolution": SearchConfig(),
    "random": SearchConfig(strategy="random"),
    "greedy": SearchConfig(strategy="greedy"),
    "uniform": SearchConfig(strategy="uniform"),
    "NSGA-II, as in the paper": SearchConfig.paper(),
    "+ only feasible widths": SearchConfig(pool=1, hill_climbs=0),
    "+ surrogate picks offspring": SearchConfig(hill_climbs=0, explore=0.0, front_share=0.0),
    "+ climbing on the surrogate": SearchConfig(explore=0.0, front_share=0.0),
    "+ exploring its doubt": SearchConfig(front_share=0.0),
}
"""The last five are the way from the paper's search to ours; "evolution" adds a share for the Pareto front."""
FIXED = ("greedy", "uniform")  # the same for every seed
HELD_OUT = ("evolution", "random", "NSGA-II, as in the paper")
FREE_SCORES = 10_000
ZOO = ("vgg", "mobilenetv2", "resnet", "efficientnet", "proxyless")


class Mean:
    """Scores by the mean of some training runs of a table."""

    def __init__(self, table: ChannelBench, runs: tuple[int, ...] = (0, 1, 2)):
        self._space, self.values = table.space, table.acc[:, runs].mean(axis=1)

    def score_many(self, widths: Widths) -> NDArray[np.float64]:
        return self.values[self._space.index(widths)]


def denoised(table: ChannelBench) -> NDArray[np.float64]:
    """The table's means, smoothed: the least-squares fit of an additive and pairwise model, (n,)."""
    index = table.space.encode(table.widths)
    model = Surrogate(table.space.counts)
    model.add(index, table.mean)
    model.fit(np.random.default_rng(0), explore=0.0)
    return model.predict(index)


def found_after(result: SearchResult, count: int) -> tuple[int, ...] | None:
    """The widths of the best score within the budget among the first ``count`` trials."""
    scored = [t for t in result.trials[:count] if t.feasible and t.score is not None]
    return max(scored, key=lambda t: (t.score, -t.number)).widths if scored else None


def hypervolume(cost: NDArray[np.float64], error: NDArray[np.float64], corner: tuple[float, float]) -> float:
    """The area between points (n,) and (n,), both to be small, and the worst ``corner`` (cost, error)."""
    area, lowest = 0.0, corner[1]
    for i in np.argsort(cost, kind="stable"):
        if error[i] < lowest and cost[i] < corner[0]:
            area += (lowest - error[i]) * (corner[0] - cost[i])
            lowest = error[i]
    return area


def regret_case(folder: Path, space: str, percent: int, name: str) -> dict[str, Any]:
    """All seeds of one strategy on one table under one budget."""
    table = ChannelBench.load(space, folder)
    smooth, scorer = denoised(table), Mean(table)
    flops = table.costs["flops"]
    limit = percent / 100 * flops.max()
    inside = flops <= limit
    corner = float(limit), float(np.quantile(100 - table.mean[inside], 0.95))
    area = hypervolume(flops[inside], 100 - table.mean[inside], corner)
    rows: dict[str, list[Any]] = {"regret": [], "denoised": [], "front": []}
    for seed in range(1 if name in FIXED else SEEDS):
        config = replace(CONFIGS[name], seed=seed, evaluations=EVALUATIONS)
        result = search(table.space, scorer, [f"flops={percent}%"], config=config)
        found = [found_after(result, count) for count in POINTS]
        index = [None if widths is None else int(table.space.index(np.array(widths))) for widths in found]
        for kind, values in (("regret", table.mean), ("denoised", smooth)):
            top = values[inside].max()
            rows[kind].append([None if i is None else float(top - values[i]) for i in index])
        met = [(t.costs["flops"], 100 - t.score) for t in result.trials if t.feasible and t.score is not None]
        shares = [hypervolume(*np.array(met[:count]).T, corner) / area for count in (400, 2000)]
        rows["front"].append(shares)
    return {"space": space, "percent": percent, "name": name, "evaluations": len(result.trials), **rows}


def regret(folder: Path, only: list[str]) -> dict[str, Any]:
    return {"points": POINTS, "seeds": SEEDS, "cases": _cases(regret_case, folder, only or list(CONFIGS))}


def held_out_case(folder: Path, space: str, percent: int, name: str) -> dict[str, Any]:
    """Search by two training runs, judge by the third: luck in the former does not count."""
    table = ChannelBench.load(space, folder)
    judge = table.acc[:, 2]
    inside = table.costs["flops"] <= percent / 100 * table.costs["flops"].max()
    scores = []
    for seed in range(SEEDS):
        config = replace(CONFIGS[name], seed=seed, evaluations=400)
        result = search(table.space, Mean(table, (0, 1)), [f"flops={percent}%"], config=config)
        scores.append(float(judge[table.space.index(np.array(found_after(result, 400)))]))
    return {"space": space, "percent": percent, "name": name, "accuracy": scores, "mean": float(judge[inside].mean())}


def held_out(folder: Path, only: list[str]) -> dict[str, Any]:
    return {"cases": _cases(held_out_case, folder, only or list(HELD_OUT))}


def supernets_case(
    folder: Path, file: str, percent: int, evaluations: int = SUPERNET_EVALUATIONS, noise: float = 0.0
) -> dict[str, Any]:
    """Search by a supernet's accuracy and by its loss, take the best score or the model's choice, judge by the table.

    ``noise`` is added to all scores, in standard deviations of theirs.
    """
    name = re.sub("-(images|on_test|score_batch)[^-]*", "", Path(file).stem)
    table = ChannelBench.load(name.split("-")[0], folder)
    space, stored = table.space, np.load(file)
    at = space.index(space.all_widths())
    if not np.allclose(table.mean[at], stored["truth"]):
        raise BcnetError(f"{file} was made with another table")
    flops = table.costs["flops"]
    inside = flops <= percent / 100 * flops.max()
    judges = {"regret": table.mean, "denoised": denoised(table)}
    constraints = Constraints(space, space.costs, [f"flops={percent}%"])
    unsearched = {
        "uniform": space.decode(constraints.uniform_index()),
        "balanced": LogWidthModel.balanced(space).best(constraints),
    }
    found: dict[str, list[Any]] = {name: [widths] for name, widths in unsearched.items()}
    for by, sign in (("accuracy", 1), ("loss", -1)):
        scores = np.empty(len(at))
        scores[at] = sign * stored[f"held_out_{by}"].mean(0)
        scores += noise * scores.std() * np.random.default_rng(0).normal(size=len(scores))

        def score(widths: Widths, scores: NDArray[np.float64] = scores) -> float:
            return float(scores[space.index(widths)])

        for seed in range(SUPERNET_SEEDS):
            config = SearchConfig(seed=seed, evaluations=evaluations, choose="log-width")
            result = search(space, score, [f"flops={percent}%"], config=config)
            assert result.best is not None
            found.setdefault(by, []).append(found_after(result, evaluations - 1))  # before the model's
            found.setdefault(f"{by}, law", []).append(result.best.widths)
    rows = {
        kind: {how: (v[inside].max() - v[space.index(np.array(widths))]).tolist() for how, widths in found.items()}
        for kind, v in judges.items()
    }
    return {"space": space.name, "percent": percent, "name": name, **rows}


def supernets(folder: Path, only: list[str]) -> dict[str, Any]:
    cases = _measured(supernets_case, product([folder], only, BUDGETS))
    law = {}
    for space in SPACES:
        table = ChannelBench.load(space, folder)
        balanced = table.correlate(LogWidthModel.balanced(table.space).predict(table.widths))
        law[space] = {**alone(table), "balanced": balanced["kendall"], "ceiling": table.ceiling()["kendall"]}
    return {"evaluations": SUPERNET_EVALUATIONS, "seeds": SUPERNET_SEEDS, "law": law, "cases": cases}


def alone(table: ChannelBench) -> dict[str, Any]:
    """The log-width model of networks trained alone, its gains not shrunk: Kendall, and points gained by each width."""
    logs, gains = gains_alone(table.widths, table.mean)
    variables = [[v.name, len(v.layers), gain] for v, gain in zip(table.space.variables, gains.tolist(), strict=True)]
    return {"fitted": table.correlate(logs @ gains)["kendall"], "variables": variables}


def noisy(folder: Path, only: list[str]) -> dict[str, Any]:
    """Supernets that tell little, in few evaluations."""
    cases = _measured(supernets_case, product([folder], only, BUDGETS, [NOISY_EVALUATIONS], [NOISE]))
    return {"evaluations": NOISY_EVALUATIONS, "noise": NOISE, "seeds": SUPERNET_SEEDS, "cases": cases}


def _cases(measure: Callable[..., dict[str, Any]], folder: Path, names: list[str]) -> list[dict[str, Any]]:
    return _measured(measure, product([folder], SPACES, BUDGETS, names))


def _measured(measure: Callable[..., dict[str, Any]], jobs: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(measure, *zip(*jobs, strict=True)))


def random_network(rng: np.random.Generator) -> tuple[WidthSpace, QuadraticCost]:
    """A chain of 5 to 30 widths with 4 to 20 candidates; two in three have shortcuts (hubs that meet the next
    five), one in three has widths that meet themselves."""
    count, groups, kind = int(rng.integers(5, 31)), int(rng.integers(4, 21)), int(rng.integers(3))
    space = WidthSpace([WidthVariable(f"v{i}", candidates(8 * int(rng.integers(2, 65)), groups)) for i in range(count)])
    Q = np.diag(rng.uniform(1, 10, count - 1), 1)
    if kind > 0:
        for hub in range(0, count, 6):
            Q[hub, hub + 2 : hub + 6] += rng.uniform(1, 10, len(Q[hub, hub + 2 : hub + 6]))
    if kind == 2:
        Q[np.diag_indices(count)] = rng.uniform(1, 5, count) * (rng.random(count) < 0.2)
    return space, QuadraticCost(float(rng.uniform(0, 1000)), rng.uniform(0, 30, count), Q)


def _errors(space: WidthSpace, rng: np.random.Generator, kind: str) -> list[NDArray[np.float64]]:
    """Potential errors: like training losses (1 to 1.3, falling with width, noisy), or unordered in 0..1."""
    counts = [len(v.candidates) for v in space.variables]
    if kind == "unordered":
        return [rng.random(k) for k in counts]
    return [1 + 0.3 * np.sort(rng.random(k))[::-1] + rng.normal(0, 0.05, k) for k in counts]


def solved(space: WidthSpace, cost: QuadraticCost, share: float, errors: list[NDArray[np.float64]]) -> dict[str, float]:
    """The program with the budget at ``share`` of the way from the smallest to the largest network."""
    low, high = (float(cost(widths)[0]) for widths in (space.min, space.max))
    start = time.process_time()
    solution = PriorProblem(space, errors, [(cost, low + share * (high - low))]).solve()
    seconds = time.process_time() - start
    return {"objective": solution.objective, "bound": solution.bound, "gap": solution.gap, "seconds": seconds}


def program(folder: Path, only: list[str]) -> dict[str, Any]:
    """The prior's program against its proven bound: random networks, and the zoo."""
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {}
    for kind in ("losses", "unordered"):
        networks = [random_network(rng) for _ in range(200)]
        result[kind] = [solved(*one, float(rng.uniform(0.05, 0.9)), _errors(one[0], rng, kind)) for one in networks]
    result["zoo"] = []
    for name in only or [m for m in MODELS if m.startswith(ZOO)]:
        space = zoo_space(name)
        cost = space.costs["flops"]
        assert isinstance(cost, QuadraticCost)
        for kind, share in product(("losses", "unordered"), (0.25, 0.5, 0.75)):
            row = solved(space, cost, share, _errors(space, rng, kind))
            result["zoo"].append({"model": name, "variables": len(space), "errors": kind, "share": share, **row})
    return result


def zoo_space(name: str) -> NetworkSpace:
    example = torch.zeros(1, *MODELS[name].input_shape)
    return trace(build(name).eval(), example, groups=20)


def population(folder: Path, only: list[str]) -> dict[str, Any]:
    """Populations of 40 from the prior and at random, all budgets and tables, by their accuracy in the table.

    The prior knows 1,000 random widths by one training run each, with noise of half a point on top;
    "paper" uses the 100 best of them alone.
    """
    rows = []
    tables = {space: ChannelBench.load(space, folder) for space in SPACES}
    for space, percent, seed in product(SPACES, BUDGETS, range(SEEDS)):
        table, rng = tables[space], np.random.default_rng([seed, 9])
        constraints = Constraints(table.space, table.space.costs, [f"flops={percent}%"])
        index = rng.integers(0, len(table), 1000)
        losses = 100 - table.acc[index, rng.integers(0, 3, 1000)] + rng.normal(0, 0.5, 1000)
        recorded = PathLosses(table.widths[index], losses)
        prior, report = prior_population(constraints, potential_errors(table.space, recorded), 40, rng)
        paper = prior_population(constraints, potential_errors(table.space, recorded, top=100), 40, rng)[0]
        populations = {"prior": prior, "paper": paper, "random": constraints.sample(rng, 40)[0]}
        accuracies = {k: table.mean[table.space.index(widths)].tolist() for k, widths in populations.items()}
        rows.append({"space": space, "percent": percent, "seed": seed, **accuracies, "report": report.to_dict()})
    return {"rows": rows}


def overhead(folder: Path, only: list[str]) -> dict[str, Any]:
    """Seconds of one core that 10,000 evaluations take when scoring takes none; trials stored on disk."""
    rows = []
    for model in ("mobilenetv2_imagenet", "resnet50_imagenet"):
        space = zoo_space(model)
        scale = np.sqrt(space.max)
        for name in ("evolution", "NSGA-II, as in the paper"):
            with tempfile.TemporaryDirectory() as place, TrialStore(Path(place) / "trials.sqlite") as store:
                config = replace(CONFIGS[name], evaluations=FREE_SCORES)
                spent = 0.0

                def score(widths: Widths, scale: NDArray[np.float64] = scale) -> float:
                    nonlocal spent
                    start = time.process_time()
                    value = float((np.sqrt(widths) / scale).sum())
                    spent += time.process_time() - start
                    return value

                start = time.process_time()
                result = search(space, score, ["flops=50%"], config=config, store=store)
                seconds = time.process_time() - start - spent
            rows.append({"model": model, "name": name, "evaluations": len(result.trials), "seconds": seconds})
    return {"rows": rows}


PARTS: dict[str, Callable[[Path, list[str]], dict[str, Any]]] = {
    "regret": regret,
    "held-out": held_out,
    "program": program,
    "population": population,
    "overhead": overhead,
    "supernets": supernets,
    "noisy": noisy,
}
OF_FILES = ("supernets", "noisy")


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """New cases beside old ones of other names; anything else is replaced."""
    if "cases" not in old:
        return new
    measured = {(c["space"], c["percent"], c["name"]) for c in new["cases"]}
    kept = [c for c in old["cases"] if (c["space"], c["percent"], c["name"]) not in measured]
    return {**new, "cases": kept + new["cases"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all but those of files where left out")
    parser.add_argument("--table", type=Path, required=True, help="the folder of the released tables")
    parser.add_argument("--only", nargs="*", default=[], help="strategies (regret, held-out), models or files")
    options = parser.parse_args()
    data = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in options.parts or [name for name in PARTS if name not in OF_FILES]:
        start = time.perf_counter()
        found = merged(data.get(part, {}), PARTS[part](options.table, options.only))
        facts = provenance(packages=("numpy", "scipy", "pymoo"))
        data[part] = {**found, "provenance": facts, "wall_seconds": round(time.perf_counter() - start, 1)}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        print(part, f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
