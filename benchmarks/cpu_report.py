"""Makes docs/results/cpu.md from path-speed.json, scoring.json and scoring-first.json beside it, and from
path-speed-idle.json and scoring-idle.json, which were measured with nothing else running.

python benchmarks/cpu_report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bcnet.utils.provenance import origin

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PATH_GOAL, SCORING_GOAL, GOAL_OF = 1.03, 3.0, "digits_cnn, a search"

HEAD = """# Speed on a CPU

Made by `benchmarks/cpu_report.py` from [path-speed.json](path-speed.json) (`benchmarks/path_speed.py`) and
[scoring.json](scoring.json) (`benchmarks/scoring.py`). One thread. The machine was shared and busy, with loads up to
{load:.0f} on its two cores, so times are the processor's, the ways of a row take turns in one process, and ratios are
medians of the rounds' ratios. Other work still takes cache and memory bandwidth away, and shows in these times. The
idle machine that the goals name was not to be had then; [later it was](#on-an-idle-machine). What is said to have been
tried was timed on the same day and machine, and has no file.
"""

PATHS = """
## A path against the plain network of its widths

Batch {batch}, channels last, random widths, the right side. A step is forward pass, loss and backward pass, gradients
added to those there are; the optimizer and zeroing gradients, which the paths of a step share, are left out on both
sides. Both forward passes use the statistics of the batch. Goal: {goal}.

"""
PATH_HEAD = """\
| network | work | path ms | plain ms | ratio (quartiles) | ratio by the clock | rounds | |
| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |
"""

PATHS_TRIED = """
What a path costs beyond the plain network's arithmetic is Python's: checking widths, finding its slices and adding
their gradients, some tenths of a millisecond whatever the batch, so it shows where networks are tiny. By the clock both
ways also wait for other work, which may be why those ratios are nearer to 1.

- Kept: the index of every slice is remembered for the widths it depends on, running statistics, which no path reads,
  are not sliced, and leaves are the views themselves. Before, the step of digits_cnn took 1.061 and its forward pass
  1.067 times the plain network's, those of cluttered_cnn 1.057 and 1.081 (the same script and day, 150 and 60 rounds).
- No better: leaves whose gradients are views of the supernet's, so that autograd adds to them itself. It also
  warns of gradients that do not lie as their parameters do.
"""

SCORING = """
## Scoring 100 configurations

The first 100 that a search within the budget asks for, generation by generation, or 100 random ones within it, twenty
at a time. Goal: {goal:g} times on digits_cnn.

"""
SCORING_HEAD = """\
| network, budget | asked for by | images | one by one | sharing prefixes | times faster (each round) | by least | |
| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |
"""

SCORING_TRIED = """
Times are medians of the rounds. *By least* is the ratio of the least times, the measure of the figure before, by which
the search on digits_cnn is {least:.2f} times faster; the verdict is that of the median.

Scores differ from those found one by one by at most {difference:.0e}, relative. The version before, timed on the search
on digits_cnn by the least of five rounds of either way, was {first:.2f} times faster
([scoring-first.json](scoring-first.json)), and 2.66 and 2.68 times when it was run in turn with the present one.

- **The narrower the budget, the less sharing is worth.** A shared layer runs at the widest of what is not chosen yet,
  far wider than configurations of 12 % of the FLOPs are. Channels computed group by group, when the first configuration
  that has them is asked for, may cure that, and are not written.
- Kept: a group of channels of a 1x1 convolution is added to the running sum by one matrix product, in place; how many
  levels to share is reckoned for all samples at once (20 ms before, 2 ms now); outputs are judged 64 at a time.
- No better: no running sums, only for 1x1 or only for 3x3 convolutions; batch norm in place; sharing one level less or
  more; prefixes copied to memory of their own, in huge pages or not.
- Slower: nothing kept between generations (1.5 times the time), or only the first levels (1.1 times).
- The first evaluator of a process took 1.2 s where later ones took 0.9: the system first has to hand out the 300 MiB
  that are kept. The rounds above come after a search, or after rounds, that had this memory already.

## Small spaces

A space of no more configurations than a search may evaluate is scored as a whole, whether evolution, neighbours of the
best so far (what recipes take where nothing else is said) or chance would have searched it
(`bcnet.search.driver.search`).
"""


def path_rows(rows: dict[str, Any]) -> str:
    lines = []
    for name, row in rows.items():
        for work in ("step", "forward"):
            w = row[work]
            verdict = "reached" if w["ratio"] <= PATH_GOAL else "missed"
            quartiles = "–".join(f"{q:.3f}" for q in w["quartiles"])
            lines.append(
                f"| {name} | {work} | {w['path_ms']:.2f} | {w['plain_ms']:.2f} | {w['ratio']:.3f} ({quartiles}) | "
                f"{w['ratio_wall']:.3f} | {w['rounds']} | {verdict} |\n"
            )
    return "".join(lines)


def paths(rows: dict[str, Any]) -> str:
    (batch,) = {row["batch"] for row in rows.values()}
    return PATHS.format(batch=batch, goal=PATH_GOAL) + PATH_HEAD + path_rows(rows) + PATHS_TRIED


def scoring_rows(rows: dict[str, Any]) -> str:
    lines = []
    for name, row in rows.items():
        verdict = "" if name != GOAL_OF else "reached" if row["times_faster"] >= SCORING_GOAL else "missed"
        each = ", ".join(f"{ratio:.2f}" for ratio in row["times_faster_each_round"])
        alone, shared = (sorted(row["seconds"][way]) for way in ("one by one", "sharing prefixes"))
        lines.append(
            f"| {row['network']}, {row['budget'].replace('=', ' ')} | {row['asked_by']} | {row['images']} | "
            f"{alone[len(alone) // 2]:.2f} s | {shared[len(shared) // 2]:.2f} s | {row['times_faster']:.2f} ({each}) | "
            f"{row['times_faster_least_of_rounds']:.2f} | {verdict} |\n"
        )
    return "".join(lines)


def scoring(rows: dict[str, Any], first: dict[str, Any]) -> str:
    difference = max(row["largest_difference"] for row in rows.values())
    tried = SCORING_TRIED.format(
        difference=difference,
        first=first["times_faster"],
        least=rows[GOAL_OF]["times_faster_least_of_rounds"],
    )
    return SCORING.format(goal=SCORING_GOAL) + SCORING_HEAD + scoring_rows(rows) + tried


def costs(found: dict[str, Any]) -> str:
    """The time to cost a whole space, and what the page does not show."""
    lines = [
        f"| {space} | {name} | {row['median']:.2f} | {row['worst']:.1f} |\n"
        for space in ("mobilenet", "resnet")
        for name, row in found[space].items()
    ]
    return COSTS.format_map(found) + "".join(lines) + NOT_SHOWN


def sources(rows: dict[str, Any]) -> str:
    found = {name: row["provenance"] for name, row in rows.items()}
    return "".join(f"- {name}: {origin(facts)}: `{facts['command']}`\n" for name, facts in found.items())


IDLE = """
## On an idle machine

The same measurements once more, with nothing else running, each row once and as it came. Written down before: these
rows decide whether the goals are reached, whatever they say, and the tables above stay.

**A path**: at first the goal was missed on the tiny networks: a step took 1.069 and 1.066, a forward pass 1.045 and
1.045 of the plain network's (commit b614f83), by more than on the busy machine: arithmetic takes less time here,
and Python's part weighs more. Where time went was then looked at part by part, which had not been done: right after
a convolution Python's own code and data are out of the caches, and checking the widths, 6 µs in a loop of its own,
took 150 to 180. Widths that are candidates are looked up since (1.052 and 1.049), and slices of parameters and of
gradients are remembered. The table is of that code, each row once. Runs before it, while it was written, had 1.022
to 1.032 for the steps, and without slices that stay leaves 1.041 and 1.046, so the goal is reached by little (figures
in this paragraph but for the first have no file). MobileNetV2's forward pass was at 1.031 before.

**Scoring** is as it was (its rows are of commit b614f83), and misses the goal.

"""
ALLOCATOR = """
## Memory that is kept

Trainings and scorers tell glibc to keep freed memory (`bcnet/training/allocator.py`), a setting of the whole
process. What that saves in a step of plain training with SGD, each figure of a process of its own, five pairs by
turns ([allocator.json](allocator.json), `benchmarks/allocator.py`; {origin}; one thread, little else running):

| network, batch | as it is, ms | kept, ms | times faster (each pair) |
| --- | ---: | ---: | ---: |
{rows}

It pays, so it stays; an earlier page had timed it at 8 images only (0.99 and 1.02). Memory is not given back to the
system before the process ends. The table does not show several threads, other C libraries, or machines with huge
pages.
"""
COSTS = """
## Costs of all widths

All 16,384 widths of a Channel-Bench space at once, by the costs of the traced network, in milliseconds: the median of
50 runs and the worst of them, on one core of a machine with other work ([cost.json](cost.json), `benchmarks/cost.py`;
{date}, {machine}, commit {commit:.12}).

| space | cost | median | worst |
| --- | --- | ---: | ---: |
"""
NOT_SHOWN = """
**What this does not show**: several threads, other processors, and networks or budgets other than
those named; each row is one process on one day, so its rounds say nothing of other days.
"""


def allocator(found: dict[str, Any]) -> str:
    lines = []
    for name, row in found.items():
        if "times_faster" in row:
            own = {way: sorted(one["own_ms"] for one in row[way])[len(row[way]) // 2] for way in ("plain", "tuned")}
            each = ", ".join(f"{ratio:.2f}" for ratio in row["each"])
            lines.append(f"| {name} | {own['plain']:.1f} | {own['tuned']:.1f} | {row['times_faster']:.2f} ({each}) |")
    return ALLOCATOR.format(origin=origin(found["provenance"]), rows="\n".join(lines))


def main() -> None:
    path, score, first, idle_path, idle_score = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("path-speed", "scoring", "scoring-first", "path-speed-idle", "scoring-idle")
    )
    load = max(row["load"] for row in [*path.values(), *score.values()])
    page = HEAD.format(load=load) + paths(path) + scoring(score, first)
    page += IDLE + PATH_HEAD + path_rows(idle_path) + "\n" + SCORING_HEAD + scoring_rows(idle_score)
    page += allocator(json.loads((RESULTS / "allocator.json").read_text()))
    page += costs(json.loads((RESULTS / "cost.json").read_text()))
    page += "\n## Where the figures come from\n\n" + sources(path) + sources(score)
    page += "\nOn the idle machine:\n\n" + sources(idle_path) + sources(idle_score)
    (RESULTS / "cpu.md").write_text(page)


if __name__ == "__main__":
    main()
