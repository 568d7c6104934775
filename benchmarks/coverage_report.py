"""docs/results/coverage.md from the rows of coverage.json."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

Row = dict[str, Any]
NOT_COUPLED = ("starting", "creating the model", "tracing and coupling", "building the dependency graph")

TEXT = """\
# Any CNN: what bcnet and Torch-Pruning can resize

Made from [coverage.json](coverage.json) by `{command}` on {date}: {machine}; {versions}.
Every row there names the commit it was measured at.

{models} networks with random weights: of every family of timm's CNN modules the smallest variant, and all CNNs among
torchvision's classification models (`benchmarks/coverage_models.txt`). bcnet *works* where it finds
something to vary and the network, built at its smallest, random and largest widths, runs forward and backward, has
exactly the FLOPs that torch's counter sees and exactly the parameters its costs say, and at full width with the
original weights gives the original's output. Torch-Pruning (`BasePruner`, group magnitude, ratio 0.5, the classifier
left alone, no hints for single models) *works* where the pruned network has fewer parameters and as many classes and
runs forward and backward. Each has a limit of processor time per model ({limits}); a model out of time does not work,
and is also counted apart.

{summary}

Seconds are processor time on one thread for the analysis alone: for bcnet `trace`, of which `torch.export` takes
{export:.0%}; for Torch-Pruning the making of its pruner. Coupling itself, without the export, takes bcnet at most
{coupling:.1f} s.

## Where bcnet fails

{failures}

## Built from the graph

The network's own class does not run at other widths (sizes are written into its forward), so bcnet builds plain layers
from its exported graph.

{graphs}

## Layers that keep their width

Besides the network's output, which never varies. Reasons as bcnet gives them, with how many layers they hold for.

{fixed}

## Where Torch-Pruning fails

{others}
"""


def markdown(results: dict[str, Any]) -> str:
    """The page for people."""
    ours = [r for r in results["rows"] if r["tool"] == "bcnet"]
    theirs = [r for r in results["rows"] if r["tool"] == "torch-pruning"]
    traced = [r for r in ours if "seconds" in r]
    return TEXT.format(
        command=results["command"],
        date=results["date"],
        machine=results["machine"],
        versions=", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        models=len(ours),
        limits=", ".join(f"{name} {seconds} s" for name, seconds in results["limits_in_seconds"].items()),
        summary=_summary(ours, theirs),
        export=sum(r["export_seconds"] for r in traced) / max(1e-9, sum(r["seconds"] for r in traced)),
        coupling=max((r["seconds"] - r["export_seconds"] for r in traced), default=0.0),
        failures=_failures(ours),
        graphs=_graphs(ours),
        fixed=_fixed(ours),
        others=_failures(theirs),
    )


def _summary(ours: list[Row], theirs: list[Row]) -> str:
    lines = ["| | bcnet | Torch-Pruning |", "| --- | ---: | ---: |"]
    for source in ("timm", "torchvision"):
        mine, other = ([r for r in rows if r["model"].startswith(f"{source}:")] for rows in (ours, theirs))
        lines += [
            f"| {source}: models | {len(mine)} | {len(other)} |",
            f"| {source}: coupled | {_share(mine, _coupled)} | {_share(other, _coupled)} |",
            f"| {source}: works end to end | {_share(mine, _works)} | {_share(other, _works)} |",
            f"| {source}: out of time | {_share(mine, _late)} | {_share(other, _late)} |",
        ]
    return "\n".join([*lines, f"| seconds, median (worst) | {_seconds(ours)} | {_seconds(theirs)} |"])


def _coupled(row: Row) -> bool:
    return row["failed_at"] not in NOT_COUPLED


def _works(row: Row) -> bool:
    return row["failed_at"] is None


def _late(row: Row) -> bool:
    return bool(row.get("timed_out"))


def _share(rows: list[Row], holds: Any) -> str:
    count = sum(1 for row in rows if holds(row))
    return f"{count} ({count / max(1, len(rows)):.1%})"


def _seconds(rows: list[Row]) -> str:
    taken = [row["seconds"] for row in rows if "seconds" in row]
    return f"{median(taken):.1f} ({max(taken):.1f})" if taken else "–"


def _failures(rows: list[Row]) -> str:
    failed = [row for row in rows if not _works(row)]
    lines = [f"| `{row['model']}` | {row['failed_at']} | {_cell(row['error'])} |" for row in failed]
    return "\n".join(["| model | failed at | because |", "| --- | --- | --- |", *lines]) if lines else "Nowhere."


def _graphs(rows: list[Row]) -> str:
    graphs = [row for row in rows if row.get("own_class") is False]
    own = sum(1 for row in rows if row.get("own_class"))
    lines = []
    for row in graphs:
        because = row["graph_because"]
        why = because[because.find("(") + 1 : because.rfind("), so")]
        lines.append(f"| `{row['model']}` | {_cell(why)} |")
    table = "\n".join(["| model | what its class says |", "| --- | --- |", *lines])
    return f"{len(graphs)} of {len(graphs) + own}.\n\n{table}"


def _fixed(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        reasons = Counter(_reason(why) for _, why in row.get("fixed", []) if why != "it is the network's output")
        if reasons:
            told = "; ".join(f"{why} ({n})" for why, n in reasons.most_common())
            lines.append(f"| `{row['model']}` | {row['variables']} | {_cell(told)} |")
    head = ["| model | variables | fixed because |", "| --- | ---: | --- |"]
    return "\n".join([*head, *lines]) if lines else "None."


def _reason(why: str) -> str:
    """A reason without the layer that it names."""
    layer, separator, rest = why.partition(": ")
    if separator:
        return rest
    return why.partition(" ")[2] if "." in layer.partition(" ")[0] else why


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
