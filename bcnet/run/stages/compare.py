"""After training: all networks side by side, the export and the report."""

from __future__ import annotations

from torch import nn

from bcnet.latency.compare import compare_latency
from bcnet.report.words import NOT_LEARNT
from bcnet.run.export import export_run
from bcnet.run.report import write_report, write_tradeoff
from bcnet.run.session import Run
from bcnet.training.retraining import sample_scores


def compare(run: Run) -> None:
    """Measure the latency of all networks side by side, and put them into one table."""
    trained = run.read("retrain")
    names = trained["networks"]
    networks = {name: run.network(name) for name in names}
    latency = compare_latency(networks, run.source.example)
    leads = _leads(run, networks, trained["chosen"])
    rows = []
    for name in names:
        result = run.read(f"retrain/{name}")
        kept = {k: v for k, v in result.items() if k not in ("version", "history", "tried", "seconds", "val")}
        predicted = result["costs"].get("latency")
        measured = {"latency_ms": latency[name], "lead": leads[name]}
        rows.append(kept | measured | ({} if predicted is None else {"predicted_ms": predicted / 1e6}))
    chosen = next(row for row in rows if row["name"] == trained["chosen"])
    if not chosen["learnt"]:
        run.listener.note(f"the slim network has not learnt anything. {NOT_LEARNT}")
    facts = {"scored_on": rows[0]["scored_on"], "metric": run.task.metric, "chosen": trained["chosen"]}
    run.write("compare", {**facts, "networks": rows})


def _leads(run: Run, networks: dict[str, nn.Module], chosen: str) -> dict[str, dict[str, float]]:
    """How far the network that ships is ahead of each, and the standard error of that, over the same images."""
    images, bf16 = run.data.test or run.data.val, run.recipe.retrain.bf16
    scores = {name: sample_scores(network, images, run.task, bf16=bf16) for name, network in networks.items()}
    ahead = {name: scores[chosen] - values for name, values in scores.items()}
    return {name: {"mean": float(d.mean()), "error": float(d.std() / len(d) ** 0.5)} for name, d in ahead.items()}


def export(run: Run) -> None:
    """Write the slim network in a form to ship."""
    written = export_run(run)
    run.write("export", written, files=[f"export/{file}" for file in written["files"]])


def report(run: Run) -> None:
    """Write the page a person looks at."""
    path = write_tradeoff(run) if run.recipe.targets else write_report(run)
    name = path.relative_to(run.folder).as_posix()
    run.write("report", {"path": name}, files=[name])
