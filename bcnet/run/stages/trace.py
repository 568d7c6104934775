"""Finding the width variables, and whether network, data and budgets suit each other."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from torch import Tensor

from bcnet.errors import BcnetError, first_line
from bcnet.run.memory import check_batch
from bcnet.run.session import Run, needed_latency
from bcnet.training.loop import out_of_memory


def trace_network(run: Run) -> None:
    """Find the width variables, and check that network, data and budgets suit each other."""
    if run.recipe.start == "trained":
        _check_weights(run)
    _check_output(run)
    _measure_layers(run)
    space, constraints = run.space, run.constraints
    feasibility = constraints.check()
    _check_targets(run)
    _tell_loose_budgets(run)
    variables = [
        {"name": v.name, "candidates": v.candidates, "layers": v.layers, "unit": v.unit} for v in space.variables
    ]
    run.write(
        "trace",
        {
            "model": run.original.spec,
            "fingerprint": run.fingerprint,
            "input": list(run.original.input_shape),
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


def _check_targets(run: Run) -> None:
    known: dict[tuple[str, float], str] = {}
    for target in run.recipe.targets:
        within = run.within([target])
        within.check()
        budget = within.budgets[0]
        other = known.setdefault((budget.name, budget.limit), target)
        if other != target:
            raise BcnetError(f"the targets {other} and {target} are the same budget: keep one of them")


def _measure_layers(run: Run) -> None:
    """Measure the table of latencies once, where a budget needs it, so that a resumed search sees the same costs."""
    if run.done("latency") or (table := needed_latency(run.space, run.full, run.recipe, run.listener)) is None:
        return
    run.write("latency", {"table": json.loads(table.to_json())})
    facts = table.facts
    run.listener.note(
        f"latency was measured layer by layer on {facts['device']}, batch: {facts['batch']}, "
        f"threads: {facts['threads']}; predictions of other networks near the budget are off by {table.error:.0%} "
        "on average"
    )


def _check_weights(run: Run) -> None:
    for name, tensor in run.original.model.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise BcnetError(
                f"the network as given holds numbers that are not finite in {name}: give weights that were trained "
                "well, or a network that is not trained yet"
            )


@torch.no_grad()
def _check_output(run: Run) -> None:
    """Run two real inputs of every part, so that what cannot work is said before hours of training."""
    for source in (run.data.val, run.data.test, run.data.train):
        if source is None:
            continue
        x, y = next(iter(source.batches(0, 0, run.device)))
        try:
            output = run.original.model.eval()(x[:2])
        except Exception as error:  # the network's own code may raise anything
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise
            reason = first_line(error)
            raise BcnetError(f"the network does not run on inputs of shape {tuple(x.shape[1:])}: {reason}") from error
        run.task.check(output, y[:2])
        check_batch(run.original.model, x, training=source is run.data.train)
    _tell_size(run, x)


def _tell_size(run: Run, x: Tensor) -> None:
    """Costs are those of the example, whatever the size of the images."""
    costed, learnt = ("x".join(map(str, shape[2:])) for shape in (run.original.example.shape, x.shape))
    if costed != learnt:
        run.listener.note(
            f"the example is {costed}, but training inputs {learnt}: FLOPs, memory and latency are those of the example"
        )


def _tell_loose_budgets(run: Run) -> None:
    for budgets in [[target] for target in run.recipe.targets] or [list(run.recipe.budgets)]:
        if run.recipe.widen == 1 and run.within(budgets).feasible(run.full[None])[0]:
            run.listener.note(f"the network as given is within {', '.join(budgets)} already, so nothing has to go")
