"""The page on kills, soak and fuzz, from what kill.py, soak.py and fuzz.py wrote.

python benchmarks/robustness_report.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bcnet.utils.provenance import origin

PLACE = Path("docs/results")
KILLS = ("kill.json", "kill-2.json", "kill-3.json", "kill-4.json")
FILES = ("attacks.json", *KILLS, "soak.json", "soak-search.json", "fuzz.json")
"""Attacks and their tests, kills of one process and of two, soak of the store and of a search, and fuzz."""


def kills(passes: list[dict[str, Any]]) -> list[str]:
    """Stops by their way, and by the stage they fell into."""
    rows = [{**row, "processes": each["processes"]} for each in passes for row in each["kills"]]
    count = Counter((row["way"], row["processes"]) for row in rows)
    stages = Counter(row["at"].rpartition("/")[2] for row in rows)
    same = sum(row["same"] for row in rows)
    places = ", ".join(f"{stage} {number}" for stage, number in stages.most_common())
    took = [f"{each['uninterrupted_s']:g} s" for each in passes]
    return [
        "## Killed runs",
        "",
        f"{len(rows)} stops of {sum(each['runs'] for each in passes)} runs at random moments, up to two in each run, "
        f"the second while it resumes; {same} of {len(rows)} in runs that ended with the weights, widths and scores of "
        "the uninterrupted run, bit for bit.",
        "",
        "| stopped by | one process | two processes |",
        "| --- | ---: | ---: |",
        *(f"| {way} | {count[way, 1]} | {count[way, 2]} |" for way in sorted({row["way"] for row in rows})),
        "",
        "The run: an untrained network of two convolutions on digits, trained first; a supernet from its weights; "
        f"{len(passes[0]['recipe']['targets'])} targets, each with a search, a race and networks of its own; a "
        f"checkpoint after every step. First result that was missing when it was stopped: {places} (end: a paused run "
        "is looked at after it went on).",
        "",
        "While a run is paused by SIGSTOP and has its folder locked, a second one is started in the same folder and "
        "must be refused. The disk is full from a random moment on (every flush fails), and must be named. Where one "
        "of two processes is killed, the other must end by itself, unless both had not met yet.",
        "",
        f"Uninterrupted, the run took {', '.join(took)} in the passes below, on a machine that did other work, too.",
        *_from(*passes),
        "",
        "Found by earlier passes of two processes, and cured: each process looked for itself whether a stage was "
        "done, so that one that came late saw what the other had just made, left that stage out and waited for ever "
        "(two passes ended so, after 17 and 3 stops, on a machine with four times as much work as cores). An earlier "
        "pass was ended by hand after 28 of its 30 stops: a process waited for one that was killed before both had "
        "met. Launchers end such a process, and since then the test does, too.",
        "",
        "What this does not show: power cuts, network file systems, GPUs, larger networks. Folders lay in memory, not "
        "on a disk, and processes were forked from one that had imported everything, so no stop fell into imports.",
        "",
    ]


def soak(data: dict[str, Any]) -> list[str]:
    grown = max(data["memory_grown_bytes"]) / 2**20
    return [
        "## Soak",
        "",
        f"{data['trials']:,} trials stored one by one by {data['processes']} processes in one file, "
        f"{data['trials_per_second']:,} a second, while another process read all of them {data['looks_while_writing']} "
        f"times. In the end every trial was there once, with its digest: {'yes' if data['all_there_once'] else 'no'}. "
        f"From its first quarter on, the memory of a process grew by {grown:.2f} MiB at most. Reading all trials back "
        f"took {data['read_back_seconds']:g} s, the file has {data['file_bytes'] / 2**20:.1f} MiB.",
        *_from(data),
        "",
        "What this does not show: trials cost nothing to score here, and it is the store alone that is tested.",
        "",
    ]


def soak_search(data: dict[str, Any]) -> list[str]:
    grown, own = max(data["memory_of_scorers_grown_bytes"]) / 2**20, data["memory_of_search_bytes"]
    once, alike = ("yes" if data[key] else "no" for key in ("all_there_once", "as_by_one_process"))
    each, start, end = data["memory_of_search_bytes_per_trial"], own[0] / 2**20, own[-1] / 2**20
    return [
        f"A whole search of {data['trials']:,} trials (`bcnet.search.search`, evolution in generations of 1,000), "
        f"scored by {data['processes']} processes of Ray and stored as they came: {data['seconds']:g} s with scores "
        f"that cost nothing. Every trial was there once: {once}; they were those of a search in one process: {alike}. "
        f"The processes that score grew by {grown:.2f} MiB at most from their first quarter on. The search keeps "
        f"every trial, {each} bytes each: it had {start:.0f} MiB after a twentieth of the trials and {end:.0f} MiB in "
        "the end.",
        *_from(data),
        "",
        "What this does not show: a search is one process that asks and writes; a second search on the same store is "
        "refused with a sentence.",
        "",
    ]


def fuzz(data: dict[str, Any]) -> list[str]:
    rows = data["formats"]
    total, failures = sum(row["mutants"] for row in rows), sum(len(row["failures"]) for row in rows)
    table = [
        f"| {row['format']} | {row['mutants']:,} | {row['refused']:,} | {row['same']:,} | {row['other']:,} "
        f"| {row['slowest_s']:.2f} | {len(row['failures'])} |"
        for row in rows
    ]
    return [
        "## Mutated files",
        "",
        f"{total:,} mutants of {len(rows)} formats, {failures} failures. A failure is anything but a sentence "
        "(`BcnetError`) or a result, a read that takes 10 s of a core or a minute in all, more than 6 GiB of memory "
        "and, where a file has a digest, a result other than the original's. There are 10,000 of each.",
        "",
        "| format | mutants | refused | read as written | read as something else | slowest, s of a core | failures |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *table,
        "",
        "Mutants that were equal to the original are counted, but in no other column. *Read as something else* is "
        "what a valid file of other content is: one without digests, or whose digests were put right after the change.",
        *_from(*({**row["by"], "command": row["by"]["command"].partition(" --only")[0]} for row in rows)),
        "",
        "What this does not show: mutations are random and have no model of a format, so faults that need several "
        "changes to fit together are unlikely to be found.",
        "",
        "Found by earlier passes of this table, and cured: half of a surrogate pair in a result stopped the report "
        "with a traceback; a text that SQLite cannot decode was named as an obstacle, not as damage, so that resuming "
        "did not mend it; a text for a figure of a latency table and a column of a parquet file whose name is no UTF-8 "
        "were tracebacks; a unit of 4,000 digits was printed in full.",
        "",
    ]


def attacks(parts: dict[str, dict[str, list[str]]]) -> list[str]:
    """What broke under attack, by its kind, and the tests that fail if it does again."""
    lines = ["## Attacks, and the tests that keep their cures", ""]
    for part, rows in parts.items():
        kept = [f"| {what} | {'<br>'.join(f'`{test}`' for test in tests)} |" for what, tests in rows.items()]
        lines += [f"| {part.lower()} | tests |", "| --- | --- |", *kept, ""]
    return [
        *lines,
        "Gone through by hand once more for this table. A table or a space of the benchmark that was a pipe made "
        "`bcnet bench stats` wait for ever, and so did resuming a run whose `report.html` was one: both are cured. "
        "What this does not show: tests keep what somebody thought of.",
        "",
    ]


def _from(*sources: dict[str, Any]) -> list[str]:
    told = dict.fromkeys(f"`{source['command']}` ({origin(source)})" for source in sources)
    return ["", "From " + "; ".join(told) + "."]


def main() -> None:
    attacked, *passes, soaked, searched, fuzzed = (json.loads((PLACE / file).read_text()) for file in FILES)
    lines = [
        "# Robustness",
        "",
        "Made by `python benchmarks/robustness_report.py` from "
        + ", ".join(f"[{file}]({file})" for file in FILES)
        + ". `SECURITY.md` says what is promised.",
        "",
        *attacks(attacked),
        *kills(passes),
        *soak(soaked),
        *soak_search(searched),
        *fuzz(fuzzed),
    ]
    (PLACE / "robustness.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
