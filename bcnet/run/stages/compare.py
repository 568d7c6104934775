"""After training: all networks side by side, the export and the report."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.stats import t as student_t
from torch import nn

from bcnet.latency.compare import compare_backend
from bcnet.report.words import NOT_LEARNT
from bcnet.run.export import export_run
from bcnet.run.report import write_report, write_tradeoff
from bcnet.run.session import Run
from bcnet.run.stages.budgets import SLACK, limit_ms
from bcnet.run.stages.retrain import trainings
from bcnet.training.retraining import sample_scores


def compare(run: Run) -> None:
    """Measure the latency of all networks side by side, and put them into one table."""
    trained = run.read("retrain")
    names = trained["networks"]
    networks = {name: run.network(name) for name in names}
    latency = compare_backend(networks, run.original.example, run.recipe.latency)
    leads = _leads(run, networks, trained["chosen"])
    rows = []
    for name in names:
        result = run.read(f"retrain/{name}")
        kept = {k: v for k, v in result.items() if k not in ("version", "history", "tried", "seconds", "val")}
        predicted = result["costs"].get("latency")
        each = trainings(run, name)
        means = {key: float(np.mean([one[key] for one in each])) for key in ("score", "loss")}
        measured = {**means, "trainings": len(each), "latency_ms": latency[name], "lead": leads[name]}
        rows.append(kept | measured | ({} if predicted is None else {"predicted_ms": predicted / 1e6}))
    chosen = next(row for row in rows if row["name"] == trained["chosen"])
    if not chosen["learnt"]:
        run.listener.note(f"the slim network has not learnt anything. {NOT_LEARNT}")
    facts = {"scored_on": rows[0]["scored_on"], "metric": run.task.metric, "chosen": trained["chosen"]}
    facts |= {"timed_by": _timed_by(run), "budgets": _budgets(run, rows, chosen)}
    run.write("compare", {**facts, "networks": rows})


def _timed_by(run: Run) -> str:
    config = run.recipe.latency
    on_cpu = config.backend == "onnxruntime" or run.device.type == "cpu"
    on = f"CPU, threads: {config.threads or torch.get_num_threads()}" if on_cpu else str(run.device)
    return f"{config.backend}, {on}, {'one input' if config.batch == 1 else f'{config.batch} inputs at once'}"


def _budgets(run: Run, rows: list[dict[str, Any]], chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """What each budget allows, what the network that ships takes, and whether that holds; latency as it is measured."""
    full = next((row["latency_ms"] for row in rows if row["name"] == "full"), None)
    if full is None and (checked := run.read("search").get("latency")):
        full = checked["full_ms"]
    found = []
    for budget in run.constraints.budgets:
        allowed, taken, by, slack = budget.limit, float(chosen["costs"][budget.name]), "counted", 1.0
        if budget.name == "latency" and full is not None:
            allowed, taken = 1e6 * limit_ms(run, budget, full), 1e6 * chosen["latency_ms"]
            by, slack = "measured", SLACK
        kept = {"text": budget.text, "name": budget.name, "allowed": allowed, "taken": taken, "by": by}
        found.append({**kept, "met": taken <= slack * allowed})
    return found


def _leads(run: Run, networks: dict[str, nn.Module], chosen: str) -> dict[str, dict[str, float]]:
    """How far the network that ships is ahead of each, and the standard error of that: over the same images, and over
    trainings where networks were trained more than once."""
    images, bf16 = run.data.test or run.judged, run.recipe.retrain.bf16
    scores = {name: sample_scores(network, images, run.task, bf16=bf16) for name, network in networks.items()}
    trained = {name: [one["score"] for one in trainings(run, name)] for name in networks}
    found = {}
    for name, values in scores.items():
        ahead = scores[chosen] - values
        error = float(ahead.std() / len(ahead) ** 0.5)
        if name != chosen and len(trained[name]) > 1:
            error = float(np.hypot(error, _training_error(trained[chosen], trained[name])))
        found[name] = {"mean": float(np.mean(trained[chosen]) - np.mean(trained[name])), "error": error}
    return found


def _training_error(ours: list[float], theirs: list[float]) -> float:
    """The standard error of the difference of two means over trainings, larger where there are few (Student's t)."""
    spread = sum(float(np.var(scores, ddof=1)) / len(scores) for scores in (ours, theirs)) ** 0.5
    return spread * float(student_t.ppf(0.975, len(ours) + len(theirs) - 2)) / 1.96


def export_network(run: Run) -> None:
    """Write the slim network in a form to ship."""
    written = export_run(run)
    run.write("export", written, files=[f"export/{file}" for file in written["files"]])


def report_run(run: Run) -> None:
    """Write the page a person looks at."""
    path = write_tradeoff(run) if run.recipe.targets else write_report(run)
    name = path.relative_to(run.folder).as_posix()
    run.write("report", {"path": name}, files=[name])
