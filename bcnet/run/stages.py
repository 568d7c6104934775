"""The stages of a run, each a function of what the run folder holds already.

A stage reads everything from the folder, even what the stage before it just had in its hands: so it cannot matter
whether the run was stopped in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from bcnet.accel import SharedEvaluator, choose_engine
from bcnet.errors import BcnetError
from bcnet.latency.compare import compare_latency
from bcnet.run.export import export_run
from bcnet.run.recipe import Compared
from bcnet.run.report import write_report
from bcnet.run.session import Run, needed_latency
from bcnet.search import LogWidthModel, SearchProgress, Trial, TrialStore, search
from bcnet.search import LossLog as Recorded
from bcnet.space.cost import QuadraticCost
from bcnet.supernet.loss_log import LossLog
from bcnet.supernet.training import SupernetTraining, train_supernet
from bcnet.training import distributed
from bcnet.training.loop import Progress, out_of_memory
from bcnet.training.retraining import Retraining, evaluate, retrain, train_random

CHECKPOINTS = "checkpoints"


def trace_network(run: Run) -> None:
    """Find the width variables, and check that network, data and budgets suit each other."""
    _check_output(run)
    _measure_layers(run)
    space, constraints = run.space, run.constraints
    feasibility = constraints.check()
    variables = [
        {"name": v.name, "candidates": v.candidates, "layers": v.layers, "unit": v.unit} for v in space.variables
    ]
    run.write(
        "trace",
        {
            "model": run.source.spec,
            "input": list(run.source.input_shape),
            "classes": run.data.classes,
            "variables": variables,
            "size": str(space.size),
            "fixed": [{"layer": layer, "reason": reason} for layer, reason in space.fixed],
            "own_class": space.own_class,
            "budgets": [asdict(b) for b in constraints.budgets],
            "feasibility": feasibility.to_dict(),
            "widths": {
                "full": run.full.tolist(),
                "uniform": constraints.uniform().tolist(),
                "smallest": space.min.tolist(),
            },
            "costs": {"full": run.cost_of(run.full), "smallest": run.cost_of(space.min)},
        },
    )


def _measure_layers(run: Run) -> None:
    """Measure the table of latencies once, where a budget needs it, so that a resumed search sees the same costs."""
    if run.done("latency") or (table := needed_latency(run.space, run.recipe)) is None:
        return
    run.write("latency", {"table": json.loads(table.to_json())})
    facts = table.facts
    run.listener.note(
        f"latency was measured layer by layer on {facts['device']}, batch: {facts['batch']}, "
        f"threads: {facts['threads']}; predictions of other networks are off by {table.error:.0%} on average"
    )


@torch.no_grad()
def _check_output(run: Run) -> None:
    """Run two real inputs, so that what cannot work is said before hours of training."""
    x, y = next(iter(run.data.val.batches(0, 0, run.device)))
    try:
        output = run.source.model.eval()(x[:2])
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:160]
        raise BcnetError(f"the network does not run on inputs of shape {tuple(x.shape[1:])}: {reason}") from error
    run.task.check(output, y[:2])


def train(run: Run) -> None:
    """Train the supernet."""
    r, start = run.recipe, time.monotonic()
    net = run.fresh_supernet()
    config = SupernetTraining(
        sampling=r.paths.sampling,
        optimisation=r.supernet,
        seed=r.seed,
        backward=r.backward,
        checkpoint_minutes=r.checkpoint_minutes,
        channels_last=r.channels_last,
    )
    own = run.task_given is not None and r.paths.sampling.sandwich
    engine, words = choose_engine(net, r.engine, bf16=r.supernet.bf16, own_distillation=own)
    folder = run.path(CHECKPOINTS, "train")
    trained = train_supernet(net, run.data.train, config, run.task_given, folder, _told(run, "train"), engine)
    tensors = {f"net.{k}": t for k, t in net.state_dict().items()}
    tensors |= {f"log.{k}": t for k, t in trained.log.tensors().items()}
    result = {
        "method": r.method,
        "principle": r.paths.principle,
        "engine": words,
        "sampling": asdict(r.paths.sampling),
        "steps": r.supernet.epochs * len(run.data.train),
        "paths": len(trained.log),
        "history": [{"epoch": e, "loss": loss, "rate": rate} for e, loss, rate in trained.history],
        "seconds": time.monotonic() - start,
    }
    run.write("train", result, tensors)
    run.remove(f"{CHECKPOINTS}/train")  # what is done needs no checkpoint


def _told(run: Run, name: str) -> Callable[[Progress], None]:
    last = 0.0

    def tell(state: Progress) -> None:
        nonlocal last
        # Reading the loss waits for the device, so not every step does.
        figures = {}
        if time.monotonic() - last > 0.5 or state.step == state.steps:
            last = time.monotonic()
            figures = {"loss": state.loss, "rate": state.rate, "images": float(state.images)}
        run.listener.step(name, state.step, state.steps, figures)

    return tell


def find(run: Run) -> None:
    """Search, from the prior of the training losses."""
    r, start = run.recipe, time.monotonic()
    evaluator, scores = _evaluator(run)
    initial, notes = _prior(run)
    with _open_store(run) as store:
        result = search(
            run.space,
            evaluator,
            run.constraints.budgets,
            run.costs,
            replace(r.search, seed=r.seed),
            initial=initial,
            store=store,
            progress=lambda state: _tell_search(run, state),
        )
    notes += result.notes
    if result.best is None:
        raise BcnetError(f"the search found no widths within {', '.join(r.budgets)}: {'; '.join(notes)}")
    run.write(
        "search",
        {
            "best": result.best.to_dict(),
            "front": [trial.to_dict() for trial in result.front],
            "evaluations": len(result.trials),
            "hits": result.hits,
            "prior": None if result.prior is None else result.prior.to_dict(),
            "ranked_by": r.rank_by,
            "log_width": None if result.log_width is None else result.log_width.to_dict(),
            "supernet": scores,
            "notes": notes,
            "seconds": time.monotonic() - start,
        },
    )


def _open_store(run: Run) -> TrialStore:
    """The trials of the run; of several processes, the first alone writes them, and the others begin with a copy."""

    def stored() -> list[Trial]:
        with TrialStore(run.path("trials.sqlite")) as store:
            return list(store.trials())

    trials = distributed.decide(stored) if distributed.world()[1] > 1 else []
    if distributed.main_process():
        return TrialStore(run.path("trials.sqlite"))
    store = TrialStore()
    store.add(trials)
    return store


def _tell_search(run: Run, state: SearchProgress) -> None:
    figures: dict[str, float] = {"generation": state.generation, "hits": state.hits}
    if state.best is not None and state.best.score is not None:
        best = state.best.score
        figures |= {"best": best} if run.recipe.rank_by == "score" else {"lowest loss": -best}
    run.listener.step("search", state.evaluations, state.most_evaluations, figures)


def _evaluator(run: Run) -> tuple[SharedEvaluator, dict[str, float]]:
    """What scores widths, and the scores of full and uniform widths; its batches shrink until the largest fits."""
    net = run.supernet()
    for parts in (1, 2, 4, 8, 16, 32, 64):
        batches = [part for batch in _scoring_batches(run) for part in _chunks(batch, parts)]
        try:
            evaluator = SharedEvaluator(
                net, batches, run.task, _recalibration(run), run.recipe.supernet.bf16, run.recipe.rank_by
            )
            evaluator.score(run.space.max)
            named = {"full": run.full, "uniform": run.constraints.uniform()}
            return evaluator, {name: evaluator.score(widths) for name, widths in named.items()}
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            torch.cuda.empty_cache()
            run.listener.note(f"a scoring batch does not fit into the memory of {run.device}: it is halved")
    raise BcnetError(f"no scoring batch fits into the memory of {run.device}: lower loading.eval_batch_size")


def _scoring_batches(run: Run) -> list[tuple[Tensor, Tensor]]:
    """The validation images; small batches of a loader are put together, since batch norm needs their statistics."""
    batches = list(run.data.val.batches(0, 0, run.device))
    most = run.recipe.loading.eval_batch_size
    together = len({(x.shape[1:], y.shape[1:]) for x, y in batches}) == 1
    if len(batches) == 1 or 2 * len(batches[0][0]) > most or not together:
        return batches
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    parts = -(-len(x) // most)
    return list(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True))


def _chunks(batch: tuple[Tensor, Tensor], parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True)


def _recalibration(run: Run) -> list[tuple[Tensor, Tensor]]:
    wanted = min(run.recipe.recalibrate, len(run.data.train))
    batches = run.data.train.batches(0, 0, run.device)
    return [next(batches) for _ in range(wanted)]


def _prior(run: Run) -> tuple[Recorded | None, list[str]]:
    """The best losses of training, for the first population; None, with the reason, where they are of no use."""
    r = run.recipe
    if r.prior is None or r.search.strategy != "evolution":
        return None, []
    if not any(isinstance(run.costs[b.name], QuadraticCost) for b in run.constraints.budgets):
        return None, ["no budget is one of FLOPs or parameters, so the search began at random, without the prior"]
    kept = {k.removeprefix("log."): t for k, t in run.tensors("train").items() if k.startswith("log.")}
    log = LossLog.from_tensors(kept)
    widths, losses = log.best(r.prior.best, after=int(r.prior.after * run.read("train")["steps"]))
    return Recorded(run.space, widths, losses), []


def retrain_all(run: Run) -> None:
    """Train what was found, and what it is compared with, from scratch; each is a result of its own."""
    names: list[str] = [name for name in get_args(Compared) if name in run.recipe.compare]
    if run.recipe.distillation is not None and "full" not in names:
        names.insert(0, "full")
    for name in [*names, "found"]:
        retrain_one(run, name)
    run.write("retrain", {"networks": [*names, "found"]})


def retrain_one(run: Run, name: str, widths: list[int] | None = None) -> None:
    """Train ``full``, ``uniform``, ``balanced``, ``random`` or ``found`` from scratch, or ``widths`` under a name of
    their own, unless that is done; the teacher, where there is one, must be."""
    if run.done(f"retrain/{name}"):
        return
    if name == "random":
        _retrain_random(run)
    elif name == "found":
        _retrain_widths(run, name, run.read("search")["best"]["widths"])
    elif name == "balanced":
        _retrain_widths(run, name, LogWidthModel.balanced(run.space).best(run.constraints).tolist())
    else:
        _retrain_widths(run, name, widths or run.read("trace")["widths"][name])


def _retraining(run: Run, name: str) -> Retraining:
    r = run.recipe
    taught = None if name == "full" else r.distillation
    return Retraining(
        optimisation=r.retrain,
        distillation=taught,
        seed=r.seed,
        checkpoint_minutes=r.checkpoint_minutes,
        channels_last=r.channels_last,
        engine="plain" if r.engine == "plain" else "auto",
    )


def _retrain_widths(run: Run, name: str, widths: list[int]) -> None:
    start, config = time.monotonic(), _retraining(run, name)
    network = run.fresh(widths)
    history = retrain(
        network,
        run.data.whole or run.data.train,
        config,
        run.task_given,
        teacher=None if config.distillation is None else run.network("full"),
        folder=run.path(CHECKPOINTS, name),
        progress=_told(run, name),
    )
    _keep(run, name, network, {"widths": widths, "history": _rows(history), "seconds": time.monotonic() - start})


def _retrain_random(run: Run) -> None:
    r, start = run.recipe, time.monotonic()
    config = replace(_retraining(run, "random"), distillation=None)
    rng = np.random.default_rng([r.seed, 20])
    drawn = run.constraints.sample(rng, r.random.networks)[0].tolist()
    best, network, scores, history = train_random(
        lambda number: run.fresh(drawn[number]),
        r.random,
        run.data,
        config,
        run.task_given,
        folder=run.path(CHECKPOINTS, "random"),
        progress=lambda number, state: _told(run, f"random {number + 1} of {len(drawn)}")(state),
    )
    tried = [{"widths": w, "score": s} for w, s in zip(drawn, scores, strict=True)]
    result = {"widths": drawn[best], "tried": tried, "history": _rows(history), "seconds": time.monotonic() - start}
    _keep(run, "random", network, result)


def _rows(history: list[tuple[int, float, float]]) -> list[dict[str, float]]:
    return [{"epoch": epoch, "loss": loss, "rate": rate} for epoch, loss, rate in history]


def _keep(run: Run, name: str, network: nn.Module, result: dict[str, Any]) -> None:
    """Store a trained network with its scores, on test images where there are any, else on validation."""
    network.eval()
    on = "test" if run.data.test is not None else "val"
    measured = evaluate(network, run.data.test or run.data.val, run.task, bf16=run.recipe.retrain.bf16)
    costs = run.cost_of(result["widths"])
    run.write(
        f"retrain/{name}", {"name": name, "scored_on": on, **measured, "costs": costs, **result}, network.state_dict()
    )
    run.remove(f"{CHECKPOINTS}/{name}")


def compare(run: Run) -> None:
    """Measure the latency of all networks side by side, and put them into one table."""
    names = run.read("retrain")["networks"]
    networks = {name: run.network(name) for name in names}
    latency = compare_latency(networks, run.source.example)
    rows = []
    for name in names:
        result = run.read(f"retrain/{name}")
        kept = {k: v for k, v in result.items() if k not in ("version", "history", "tried", "seconds")}
        predicted = result["costs"].get("latency")
        rows.append(
            kept | {"latency_ms": latency[name]} | ({} if predicted is None else {"predicted_ms": predicted / 1e6})
        )
    run.write("compare", {"scored_on": rows[0]["scored_on"], "networks": rows})


def export(run: Run) -> None:
    """Write the slim network in a form to ship."""
    run.write("export", export_run(run))


def report(run: Run) -> None:
    """Write the page a person looks at."""
    path = write_report(run)
    run.write("report", {"path": str(path.relative_to(run.folder))})
