"""Building a table: every network of a small space, or a sample within a budget, trained from scratch by several seeds.

A job is one (widths, seed). Jobs run in worker processes, on this machine (several share one GPU: small networks
leave most of it idle) or, with Ray, on many. Each result is a line of ``results.jsonl``, written as it comes, so a
build that was stopped anywhere goes on; a worker that dies is replaced and its job done again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from bcnet.bench.results import Results
from bcnet.bench.spaces import get_space
from bcnet.bench.table import ChannelBench
from bcnet.errors import BcnetError
from bcnet.search.constraints import parse_budget
from bcnet.space.widths import Floats, Widths
from bcnet.training.optim import Optimisation
from bcnet.utils.files import write_file
from bcnet.utils.progress import Listener
from bcnet.utils.settings import Count, Natural, checked

TABLE_OPTIMISATION = Optimisation(epochs=60, lr=0.1, nesterov=False, weight_decay=5e-4)
"""How the released tables were trained, with batches of 256, crops and flips."""

LIVES = 5
"""How often dying workers are replaced before the build gives up."""
NEAR, DRAWS = 0.98, 50
"""The least share of its budget that a drawn network uses, and how many times ten thousand are drawn for that."""


@checked
class BuildConfig:
    """What to train: ``model`` and ``data`` as the command line names them, the candidates, and how.

    ``networks`` of any space, drawn at random among those that cost 98 to 100 % of the budget ``within``, stand for
    all of them where it is not 0.
    """

    model: str
    data: str
    groups: Count = 4
    base: Count = 1
    ignore: tuple[str, ...] = ()
    seeds: Count = 3
    batch: Count = 256
    optimisation: Optimisation = field(default_factory=lambda: TABLE_OPTIMISATION)
    workers: Count = 1
    executor: Literal["processes", "ray"] = "processes"
    device: str = "cpu"
    networks: Natural = 0
    within: str = ""

    @model_validator(mode="after")
    def _fits_together(self) -> BuildConfig:
        if bool(self.networks) != bool(self.within):
            raise BcnetError("networks are drawn within a budget: give both, as in --networks 100 --within flops=50%")
        return self

    def identity(self) -> dict[str, Any]:
        """The settings that decide the results; where they are computed does not matter."""
        found = asdict(self)
        for name in ("workers", "executor", "device", *(() if self.networks else ("networks", "within"))):
            del found[name]
        identity: dict[str, Any] = json.loads(json.dumps(found))
        return identity


Job = tuple[int, int]
"""Index of the widths in the table's order, and the seed."""


def build_table(config: BuildConfig, folder: str | Path, listener: Listener | None = None) -> ChannelBench:
    """Train all networks and write ``table.json`` in the released schema into ``folder``; goes on where it stopped.

    Accuracies are those of the best epoch on the test set, as in the released tables; ``results.jsonl`` also
    holds those of the last epoch.
    """
    space = _space(config)
    finished = ChannelBench(space, _train_all(config, Path(folder), listener)[0])
    finished.save(Path(folder) / "table.json")
    return finished


def build_sample(config: BuildConfig, folder: str | Path, listener: Listener | None = None) -> dict[str, Any]:
    """Train the networks drawn within ``config.within`` and write ``networks.json`` into ``folder``: the names of the
    variables, widths (n, L), costs (n,) each, and accuracies (n, seeds) of the best epoch and of the last."""
    space = _space(config)
    best, last = _train_all(config, Path(folder), listener)
    widths = _rows(config, space)
    found = {
        "format": "bcnet.networks",
        "version": 1,
        "config": config.identity(),
        "variables": list(space.names),
        "widths": widths.tolist(),
        "costs": {name: cost(widths).tolist() for name, cost in space.costs.items()},
        "best": best.tolist(),
        "last": last.tolist(),
    }
    write_file(Path(folder) / "networks.json", (json.dumps(found) + "\n").encode())
    return found


def _train_all(config: BuildConfig, place: Path, listener: Listener | None) -> tuple[Floats, Floats]:
    """Accuracies (n, seeds) of the best epochs and of the last; every result is on disk as soon as it is known."""
    count = len(_rows(config, _space(config)))
    results = open_results(place, config)
    jobs = [(i, s) for i in range(count) for s in range(config.seeds)]
    done = {job for job, _ in results.known}
    run = _over_ray if config.executor == "ray" else _over_processes
    for (widths, seed), row in run(config, [job for job in jobs if job not in done]):
        results.add({"widths": widths, "seed": seed, **row})
        (listener or Listener()).step("training networks", len(results.known), len(jobs), {})
    rows = dict(results.known)
    best, last = (np.array([rows[job][key] for job in jobs]).reshape(count, -1) for key in ("best", "last"))
    return best, last


def _rows(config: BuildConfig, space: Any) -> Widths:
    """The configurations to train (n, L): all, in the table's order, or a sample of those near the budget."""
    if not config.networks:
        return get_space(space).all_widths()
    budget = parse_budget(config.within, space.costs, space)
    rng = np.random.default_rng(0)
    found = np.empty((0, len(space)), dtype=np.int64)
    for _ in range(DRAWS):
        drawn = space.sample(rng, 10_000)
        share = space.costs[budget.name](drawn) / budget.limit
        met = np.concatenate([found, drawn[(share >= NEAR) & (share <= 1)]])
        found = met[np.sort(np.unique(met, axis=0, return_index=True)[1])]
        if len(found) >= config.networks:
            return found[: config.networks]
    raise BcnetError(
        f"only {len(found)} of the networks met use {NEAR:.0%} to 100% of {budget.text} in {10_000 * DRAWS:,} draws: "
        "ask for fewer networks, or for another budget"
    )


def open_results(folder: Path, config: BuildConfig) -> Results[tuple[Job, dict[str, float]]]:
    """What is known of a build so far: jobs and their accuracies."""
    head = {"format": "bcnet.build", "version": 1, "config": config.identity()}
    return Results(folder / "results.jsonl", _read, head)


def _read(row: Any) -> tuple[Job, dict[str, float]]:
    found = {"best": float(row["best"]), "last": float(row.get("last", "nan"))}
    if not 0 <= found["best"] <= 100:
        raise ValueError
    return (int(row["widths"]), int(row["seed"])), found


def _over_processes(config: BuildConfig, todo: list[Job]) -> Iterator[tuple[Job, dict[str, float]]]:
    """Run jobs in worker processes; a broken pool is replaced, and what it had not finished is run again."""
    left = list(todo)
    for _ in range(LIVES):
        done: set[Job] = set()
        try:
            with ProcessPoolExecutor(config.workers, mp_context=get_context("spawn")) as pool:
                waiting: dict[Future[dict[str, float]], Job] = {pool.submit(train_one, config, j): j for j in left}
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        job = waiting.pop(future)
                        row = future.result()
                        done.add(job)
                        yield job, row
        except BrokenProcessPool:
            left = [job for job in left if job not in done]
            continue
        return
    raise BcnetError(f"workers died {LIVES} times, the last time with {len(left)} jobs left: is there enough memory?")


def _over_ray(config: BuildConfig, todo: list[Job]) -> Iterator[tuple[Job, dict[str, float]]]:
    try:
        import ray
    except ImportError:
        raise BcnetError('spreading over machines needs ray: pip install "bcnet[ray]"') from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    share = {"num_gpus": 1 / config.workers} if config.device.startswith("cuda") else {"num_cpus": 1}
    remote = ray.remote(max_retries=LIVES, **share)(train_one)
    waiting = {remote.remote(config, job): job for job in todo}
    while waiting:
        ready, _ = ray.wait(list(waiting))
        for reference in ready:
            yield waiting.pop(reference), ray.get(reference)


def _space(config: BuildConfig) -> Any:
    from bcnet.models.load import load_model

    loaded = load_model(config.model)
    return loaded.space(groups=config.groups, base=config.base, ignore=config.ignore)


@cache
def _prepared(config: BuildConfig) -> tuple[Any, Any, Widths]:
    """Space, data and configurations of a worker, loaded once."""
    from bcnet.data import LoadOptions, load_data

    data = load_data(config.data, device=config.device, options=LoadOptions(batch_size=config.batch))
    space = _space(config)
    return space, data, _rows(config, space)


def train_one(config: BuildConfig, job: Job) -> dict[str, float]:
    """Train one network from scratch; accuracy in percent of its best and its last epoch on the test set."""
    space, data, rows = _prepared(config)
    return train_widths(config, space, data, rows[job[0]], job[1])


def train_widths(config: BuildConfig, space: Any, data: Any, widths: Widths, seed: int) -> dict[str, float]:
    """Train the network at ``widths`` (L,), candidates or not, as the others of a table are."""
    import torch

    from bcnet.training.retraining import Retraining, evaluate, retrain

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = space.build(widths).to(config.device)
    source, bf16 = data.whole or data.train, config.optimisation.bf16
    scores: list[float] = []

    def score_epochs(state: Any) -> None:
        if state.step % len(source) == 0:
            scores.append(100 * evaluate(network, data.test, bf16=bf16)["score"])

    retrain(network, source, Retraining(config.optimisation, seed=seed), progress=score_epochs)
    return {"best": max(scores), "last": scores[-1]}
