"""docs/results/coverage.md from the rows of coverage.json and the text in coverage_page.md."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
TOOLS = {"bcnet": "bcnet", "torch-pruning": "Torch-Pruning", "fastnas": "FastNAS"}
KINDS = {
    "wrong": "wrong without a word",
    "raw": "raw error",
    "refused": "refused in a sentence",
    "late": "out of time",
}

TEXT = (Path(__file__).parent / "coverage_page.md").read_text()


def speed(found: dict[str, Any]) -> str:
    """How long tracing takes beside an earlier bcnet, in one run."""
    seconds, rows, commits = found["median_seconds"], found["rows"], found["commits"]
    differ = [f"{key} of `{row['model']}`" for row in rows for key, same in row["same"].items() if not same]
    return (
        f"{len(rows)} networks drawn at random and traced in turn at {commits['before'][:12]} and at "
        f"{commits['now'][:12]} took {found['median_ratio']:.2f} times as long at the latter (median of ratios; median "
        f"seconds {seconds['before']:.1f} and {seconds['now']:.1f}). Variables, costs, what is fixed and the graph are "
        f"the same for all{', except: ' if differ else ''}{', '.join(differ)}."
    )


def learnt(rows: list[Row]) -> str:
    """How many networks were asked whether their supernets learn as they do, and what came out."""
    found = Counter(str(row["gradients"]).partition(":")[0] for row in rows if "gradients" in row)
    wrong = sum(any(f["at"] == "gradients" for f in row["failures"]) for row in rows)
    asked, refused = sum(found.values()) + wrong, sum("variables" not in row for row in rows)
    missing = len(rows) - asked - refused
    old = f" and {missing} have not been measured since that check exists" if missing else ""
    return (
        f"Gradients of a supernet's path were compared with those of the network built from it on {asked} of the "
        f"{len(rows)} networks ({refused} cannot be traced{old}): {found['equal']} are equal, {found['told']} differ "
        f"and `trace` says so, {wrong} differ without a word, and {found['not comparable']} have none in evaluation "
        "mode that could be computed and are finite."
    )


def present(rows: list[Row]) -> str:
    """How long tracing takes now: the networks that were drawn at random to be measured again."""
    drawn = random.Random(17).sample(rows, min(60, len(rows)))
    commits = ", ".join(sorted({row["commit"][:12] for row in drawn}))
    return f"For bcnet, on {len(drawn)} networks drawn at random and measured again at {commits}: {seconds(drawn)}."


def on_later(rows: dict[str, list[Row]]) -> str:
    """What the other tools do on the networks that were added later."""
    told = [f"{TOOLS[tool]} passes {share(found, passes)}" for tool, found in rows.items() if tool != "bcnet"]
    return f"Of the {len(rows['bcnet'])} networks added later {' and '.join(told)}."


def markdown(results: dict[str, Any]) -> str:
    """The page for people."""
    rows = {tool: [r for r in results["rows"] if r["tool"] == tool] for tool in TOOLS}
    ours = rows["bcnet"]
    comparable = {r["model"] for r in ours if r.get("sliced") == "equal" and not r.get("mixing")}
    for tool in ("torch-pruning", "fastnas"):
        rows[tool] = [judged(row, comparable) for row in rows[tool]]
    added = {tool: [r for r in found if r.get("fresh")] for tool, found in rows.items()}
    rows = {tool: [r for r in found if not r.get("fresh")] for tool, found in rows.items()}
    ours, later = rows["bcnet"], added["bcnet"]
    traced = [r for r in ours if "seconds" in r]
    unseen = [r["model"] for r in ours if r["unseen"]]
    zoos = Counter(name.partition(":")[0] for name in unseen)
    results_of = Path(__file__).parents[1] / "docs" / "results"
    beside, since = (json.loads((results_of / f"coverage-speed{n}.json").read_text()) for n in ("", "-gradients"))
    return TEXT.format(
        speed=speed(beside),
        gradients_speed=speed(since),
        gradients=learnt([*ours, *later]),
        on_later=on_later(added),
        chosen=chosen(rows, added),
        present=present(ours),
        command=results["command"],
        date=results["date"],
        machine=results["machine"],
        versions=", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        commits=", ".join(commit[:12] for commit in results["commits"]),
        models=len(ours),
        unseen=len(unseen),
        seen=len(ours) - len(unseen),
        earlier=results["earlier"],
        zoos=", ".join(f"{n} of {zoo}" for zoo, n in zoos.items()),
        first=first(ours),
        later=len(later),
        fresh=fresh(later),
        summary=summary(rows),
        incomparable=sum(1 for r in ours if r.get("sliced", "").startswith("not comparable")),
        rivals=" ".join(compared(tool, rows) for tool in list(rows)[1:]),
        export=sum(r["export_seconds"] for r in traced) / max(1e-9, sum(r["seconds"] for r in traced)),
        seconds="; ".join(f"{TOOLS[tool]} {seconds(rows[tool])}" for tool in TOOLS),
        limits=", ".join(f"{TOOLS[name]} {limit} s" for name, limit in results["limits_in_seconds"].items()),
        patience=results["limits_in_seconds"]["torch-pruning"],
        failures=failures(ours + later),
        mended=failures([r | {"failures": r["first"]["failures"]} for r in ours + later if passes(r)]),
        weak=weak(ours + later),
        graphs=graphs(ours + later),
        fixed=fixed(ours + later),
        torch_pruning=failures(rows["torch-pruning"] + added["torch-pruning"]),
        fastnas=failures(rows["fastnas"] + added["fastnas"]),
    )


def judged(row: Row, comparable: set[str]) -> Row:
    """The row of another tool, wrong where its network should be the original with zeros and is not."""
    if row.get("sliced") != "differs" or row["model"] not in comparable:
        return row
    wrong = {"at": "sliced is zeroed", "kind": "wrong", "error": "it differs from the original with zeros"}
    return row | {"failures": [*row["failures"], wrong]}


def first(rows: list[Row]) -> str:
    """How many networks passed when this run first met them, beside how many do now."""
    new = [r for r in rows if r["model"].startswith("spandrel:")]
    again = sum(not r["first"]["failures"] and r["commit"] != r["first"]["commit"] for r in rows)
    return (
        f"**When this run first met them, {share(rows, at_once)} passed; after the cures that this led to, "
        f"{share(rows, passes)} do.** Of the networks of spandrel {share(new, at_once)} passed at first sight. A "
        f"network that failed was measured again at a later commit; so were {again} of those that had passed: where a "
        "cure touched them, drawn at random, or those with the oldest rows."
    )


def at_once(row: Row) -> bool:
    return not row["first"]["failures"]


def fresh(rows: list[Row]) -> str:
    """What became of the networks that were added when all others had been cured."""
    written = [r for r in rows if r["model"].startswith("fresh:")]
    others = [r for r in rows if r not in written]
    wrong = sum(any(f["kind"] == "wrong" for f in r["first"]["failures"]) for r in rows)
    packages = ", ".join(dict.fromkeys(r["model"].partition(":")[0] for r in others))
    return (
        "**Networks that bcnet had never met** (`benchmarks/coverage_fresh.txt`, listed before it was run on any): of "
        f"those written by hand (`coverage_fresh*.py`) {share(written, at_once)} passed when first met and "
        f"{share(written, passes)} after cures; of those of {packages} {share(others, at_once)} when first met and "
        f"{share(others, passes)} after cures. Wrong without a word: {wrong}. Whoever wrote those by hand knew the "
        "code of bcnet, but not how these networks would fare. They are not in the table below."
    )


def compared(tool: str, rows: dict[str, list[Row]]) -> str:
    """On how many networks a tool was measured, and what bcnet does on the same ones."""
    same = {r["model"] for r in rows[tool]}
    ours = share([r for r in rows["bcnet"] if r["model"] in same], passes)
    return f"{TOOLS[tool]} passes {share(rows[tool], passes)}, and bcnet {ours} of the same networks."


def chosen(rows: dict[str, list[Row]], added: dict[str, list[Row]]) -> str:
    """How the networks were chosen where a tool was not measured on all."""
    if all(len(found) == len(some["bcnet"]) for some in (rows, added) for found in some.values()):
        return ""
    return (
        " Where a tool was not measured on all, these are the hand-written networks with odd parts, then networks that "
        "bcnet traces quickly, and then others drawn at random: the shares hold for these networks only."
    )


def passes(row: Row) -> bool:
    return not row["failures"]


def kind(row: Row) -> str | None:
    """The worst way in which a network failed."""
    return next((k for k in KINDS if any(f["kind"] == k for f in row["failures"])), None)


def summary(rows: dict[str, list[Row]]) -> str:
    shown = [tool for tool in TOOLS if rows[tool]]
    lines = [f"| | {' | '.join(TOOLS[t] for t in shown)} |", f"| --- |{' ---: |' * len(shown)}"]

    def line(title: str, of: Callable[[Row], bool], holds: Callable[[Row], bool]) -> None:
        cells = [share([r for r in rows[t] if of(r)], holds) for t in shown]
        lines.append(f"| {title} | {' | '.join(cells)} |")

    line("**chosen by rule: passes**", lambda r: r["unseen"], passes)
    for name, told in KINDS.items():
        line(f"… {told}", lambda r: r["unseen"], lambda r, name=name: kind(r) == name)
    line("… passes and is not weak", lambda r: r["unseen"], lambda r: passes(r) and not r.get("weak", False))
    for zoo in dict.fromkeys(r["model"].partition(":")[0] for r in rows["bcnet"] if r["unseen"]):
        line(f"{zoo}: passes", lambda r, zoo=zoo: r["unseen"] and r["model"].startswith(f"{zoo}:"), passes)
    line("tracing was written with: passes", lambda r: not r["unseen"], passes)
    line("all: passes", lambda r: True, passes)
    return "\n".join(lines)


def share(rows: list[Row], holds: Callable[[Row], bool]) -> str:
    count = sum(1 for row in rows if holds(row))
    digits = int(0 < count < len(rows) and not 0.005 <= count / len(rows) < 0.995)  # 413 of 415 are not 100 %
    return f"{count} of {len(rows)} ({count / len(rows):.{digits}%})" if rows else "–"


def seconds(rows: list[Row]) -> str:
    taken = [row["seconds"] for row in rows if "seconds" in row]
    slow = sum(1 for s in taken if s > 15)
    return f"median {median(taken):.1f}, worst {max(taken):.1f}, above 15 s {slow}" if taken else "–"


def failures(rows: list[Row]) -> str:
    """Failures by class of error, the worst kinds and the largest classes first."""
    classes: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for row in rows:
        for failure in row["failures"]:
            at = re.sub(r" at \w+ widths$", "", failure["at"])
            key = (failure["kind"], at, error_class(failure["error"]))
            found = classes.setdefault(key, [])
            if row["model"] not in [model for model, _ in found]:
                found.append((row["model"], failure["error"]))
    ordered = sorted(classes.items(), key=lambda item: (list(KINDS).index(item[0][0]), -len(item[1])))
    lines = ["| kind | check | networks | for example, because |", "| --- | --- | ---: | --- |"]
    for (how, at, _), found in ordered:
        model, error = min(found, key=lambda pair: not pair[0].startswith("own:"))
        names = ", ".join(f"`{m}`" for m, _ in found[:4] if m != model)
        more = f"; also {names}" + (" …" if len(found) > 4 else "") if names else ""
        lines.append(f"| {KINDS[how]} | {at} | {len(found)} | `{model}`: {cell(error)}{more} |")
    return "\n".join(lines) if classes else "Nowhere."


def error_class(text: str) -> str:
    """An error without the names and numbers of one network."""
    for pattern, instead in (
        (r"'[^']*'", "'…'"),
        (r"\w+(\.\w+)+", "…"),
        (r"\[[-\d, ]*\]", "[…]"),
        (r"\d[\d,.e+-]*", "#"),
        (r"(capture|graph of) \w+", r"\1 …"),
        (r"^\w+( takes #)", r"…\1"),
        (r"\b(left|right|random|smallest) ", ""),
    ):
        text = re.sub(pattern, instead, text)
    return text[:120]


def weak(rows: list[Row]) -> str:
    lines = [
        f"| `{r['model']}` | {r['reducible']:.2f} | {r['variables']} | {cell(reasons(r))} |"
        for r in sorted(rows, key=lambda r: r.get("reducible", 1.0))
        if r.get("weak")
    ]
    head = ["| network | reducible share of FLOPs | variables | fixed because |", "| --- | ---: | ---: | --- |"]
    return "\n".join([*head, *lines]) if lines else "None."


def graphs(rows: list[Row]) -> str:
    built = [row for row in rows if row.get("own_class") is False]
    own = sum(1 for row in rows if row.get("own_class"))
    lines = []
    for row in built:
        because = row.get("graph_because", "")
        lines.append(f"| `{row['model']}` | {cell(because[because.find('(') + 1 : because.rfind('), so')])} |")
    table = "\n".join(["| network | what its class says |", "| --- | --- |", *lines])
    return f"{len(built)} of {len(built) + own}.\n\n{table}"


def fixed(rows: list[Row]) -> str:
    told = [(row, reasons(row)) for row in rows]
    lines = [f"| `{row['model']}` | {row['variables']} | {cell(why)} |" for row, why in told if why]
    head = ["| network | variables | fixed because |", "| --- | ---: | --- |"]
    return "\n".join([*head, *lines]) if lines else "None."


def reasons(row: Row) -> str:
    kept: Iterable[tuple[str, str]] = row.get("fixed", [])
    counts = Counter(reason(why) for _, why in kept if "the network's output" not in why)
    return "; ".join(f"{why} ({n})" for why, n in counts.most_common(4))


def reason(why: str) -> str:
    """A reason without the layer that it names."""
    layer, separator, rest = why.partition(": ")
    if separator:
        return rest
    return why.partition(" ")[2] if "." in layer.partition(" ")[0] else why


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:300]
