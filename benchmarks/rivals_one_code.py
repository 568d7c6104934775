"""Slim networks of bcnet and of others, from one given network, trained by one code: what rivals_fifth.py compares.

What is bcnet's own: recipe, search, finalists, how they are cut, which images race, who goes on. The steps of training
are those of paths.py for all, several networks side by side; lessons (batches with the teacher's answers) are made once
for a seed and charged to every network in full.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from channels import Cutter
from parts import Batch, Images, Widths, provenance, space_of
from paths import Class, Lessons, Maker, State
from paths import Path as Student
from rivals import budget_flops
from rivals_base import load_base
from side_by_side import Training
from torch.nn import functional

from bcnet.data.options import LoadOptions
from bcnet.data.source import Data, LoaderSource
from bcnet.models.load import LoadedModel
from bcnet.run.pipeline import run_stages
from bcnet.run.recipe import PYTHON, Recipe
from bcnet.run.session import Run, facts
from bcnet.run.stages.configurations import finalists
from bcnet.training.race import PARTS, SETTLING, Finalist, Racing
from bcnet.training.retraining import Retraining
from bcnet.utils.random_state import kept_random_state

Row = dict[str, Any]
FINALIST = "bcnet-"


class Comparison:
    """One given network, the lessons of every seed, and paths that learn from them."""

    def __init__(self, args: argparse.Namespace, images: Images):
        self.args, self.images = args, images
        self.device = images.test[0][0].device
        model = load_base(args.out / "base", args.network, args.quick)
        self.cutter = Cutter(model, space_of(model, images))
        self.scores = self.cutter.importance()
        self.maker = Maker(self.cutter, images)
        dtype = "fp32" if args.quick else "bf16"
        self.training = Training(epochs=1, batch=args.batch, dtype=dtype)
        self._lessons: dict[int, Lessons] = {}
        self._class: Class | None = None
        self._runs: dict[str, Run] = {}

    def teacher(self) -> torch.nn.Module:
        return load_base(self.args.out / "base", self.args.network, self.args.quick).to(self.device)

    def taught_by(self, seed: int, epochs: int, lr: float) -> tuple[Class, float]:
        """The paths with the lessons of ``seed`` and a schedule, and the seconds that the lessons take."""
        training = replace(self.training, epochs=epochs, lr=lr, seed=seed, warmup=min(0.5, epochs / 4))
        if seed not in self._lessons:
            self._lessons[seed] = Lessons(self.images, training, self.teacher())
        lessons = self._lessons[seed]
        new = [number for number in range(epochs) if number not in lessons.seconds]
        for number in new:
            self._wait()
            begun = time.perf_counter()
            lessons.epoch(number)
            self._wait()
            lessons.seconds[number] = time.perf_counter() - begun
        if self._class is None:
            self._class = Class(self.cutter.space, training, lessons, self.args.at_once)
        self._class.training, self._class.lessons = training, lessons
        return self._class, sum(lessons.seconds[number] for number in range(epochs))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run_of(self, budget: str) -> Run:
        """bcnet's own run for a budget, with the given network and the images of all."""
        if budget not in self._runs:
            folder = self.args.out / f"run-{_plain(budget)}"
            recipe = Recipe.parse(
                {
                    **{"model": PYTHON, "data": PYTHON, "seed": 0, "compare": ["uniform"]},
                    **{"budgets": [f"flops={budget_flops(budget, self.cutter):.0f}"], **self.args.recipe},
                }
            )
            if not (folder / "run.json").exists():
                Run.create(folder, recipe, facts(sys.argv, recipe, str(self.device)))
            run = Run(folder, str(self.device))
            example = self.images.test[0][0][:2].float()
            model = load_base(self.args.out / "base", self.args.network, self.args.quick).to(self.device)
            shape: Any = tuple(example.shape[1:])
            options = LoadOptions(batch_size=self.args.batch, crop=self.images.crop, flip=True, channels_last=True)
            train = self.images.training.train(options, 1000, self.images.index)
            run.give(
                LoadedModel(PYTHON, model, example, shape, 10),
                Data("CIFAR-10", train, LoaderSource(self.images.val, classes=10), classes=10, shape=shape),
                None,
            )
            self._runs[budget] = run
        return self._runs[budget]

    def search(self, budget: str) -> None:
        """Write what bcnet's search proposes, by its own stages."""
        file = self.args.out / f"bcnet-{_plain(budget)}.json"
        if file.exists():
            return
        begun, run = time.perf_counter(), self.run_of(budget)
        with run.lock():
            run_stages(run, until="search")
        found = run.read("search")
        race = run.recipe.race
        assert race is not None
        raced = dict(list(finalists(run).items())[: race.finalists])
        about = {"finalists": raced, "seconds": time.perf_counter() - begun}
        kept = {key: found[key] for key in ("evaluations", "rules", "reference", "notes") if key in found}
        content = {**about, **kept, "search_seconds": found["seconds"], "provenance": provenance(self.args.device)}
        file.write_text(json.dumps(content) + "\n")
        print(f"search {budget}: {content['seconds']:.1f} s", found["best"]["score"], found["notes"], flush=True)

    def bcnet(self, budget: str, epochs: int, lr: float, seed: int) -> Row:
        """The race of bcnet's finalists, of whom the winner is trained to the end."""
        proposed = json.loads((self.args.out / f"bcnet-{_plain(budget)}.json").read_text())
        run = self.run_of(budget)
        together, lesson_seconds = self.taught_by(seed, epochs, lr)
        begun = time.perf_counter()
        judged = list(run.judged.batches(0, 0, self.device))
        race = run.recipe.race
        assert race is not None
        racing = Racing(race, run.data, Retraining(), by=run.recipe.rank_by)
        entries = [Finalist(name, lambda: torch.nn.Identity()) for name in proposed["finalists"]]
        states = [self._inherited(run, widths) for widths in proposed["finalists"].values()]
        made = time.perf_counter()
        paths = dict(zip(proposed["finalists"], together.load(states), strict=True))
        alive, rounds, milestones = list(entries), list[Row](), race.milestones(epochs)
        for epoch in range(epochs):
            students = [paths[entry.name] for entry in alive]
            together.epoch(students, epoch)
            if epoch + 1 in milestones and len(alive) > 1:
                with together.settled(students, together.training.rate(epoch + 1), SETTLING):
                    for entry, student in zip(alive, students, strict=True):
                        entry.rounds.append(judge(student, judged))
                        rounds.append({"epochs": epoch + 1, "name": entry.name, **entry.rounds[-1]})
                alive = racing.stay(alive, last=epoch + 1 == milestones[-1])
        won = paths[alive[0].name]
        self._wait()
        end = time.perf_counter()
        row = self._row("bcnet", budget, won.own, won, epochs, lr, seed)
        seconds = {"making_seconds": made - begun, "tuning_seconds": end - made, "lesson_seconds": lesson_seconds}
        return {**row, "winner": alive[0].name, "race": rounds, "plan_seconds": proposed["seconds"], **seconds}

    @kept_random_state()
    def _inherited(self, run: Run, widths: list[int]) -> tuple[Widths, State]:
        return np.array(widths), run.inherited(widths).state_dict()

    def rivals(self, budget: str, epochs: int, lr: float, seed: int, methods: Sequence[str]) -> list[Row]:
        """Others' networks, trained side by side."""
        planned = {method: self._plan(method, budget, seed) for method in methods}
        found = {method: entry for method, entry in planned.items() if entry is not None}
        if not found:
            return []
        together, lesson_seconds = self.taught_by(seed, epochs, lr)
        begun = time.perf_counter()
        networks = [self._cut(method, entry, budget) for method, entry in found.items()]
        made = time.perf_counter()
        paths = together.load(networks)
        for epoch in range(epochs):
            together.epoch(paths, epoch)
        self._wait()
        end = time.perf_counter()
        each = {"making_seconds": (made - begun) / len(found), "tuning_seconds": (end - made) / len(found)}
        return [
            {
                **self._row(method, budget, widths, path, epochs, lr, seed),
                **each,
                **{"plan_seconds": entry["seconds"], "lesson_seconds": lesson_seconds},
            }
            for (method, entry), (widths, _), path in zip(found.items(), networks, paths, strict=True)
        ]

    def _cut(self, method: str, entry: Row, budget: str) -> tuple[Widths, State]:
        """The network that a method's entry describes; bcnet's own make up for what they lose."""
        if method.startswith(FINALIST):
            return self._inherited(self.run_of(budget), entry["widths"])
        kept = entry.get("kept") or self.cutter.best(self.cutter.space.check(entry["widths"]), self.scores)
        return np.array([len(stay) for stay in kept]), self.maker(kept, False)

    def _plan(self, method: str, budget: str, seed: int) -> Row | None:
        """The entry of a method in its plan, where it has ended; that of bcnet-NAME is one of its finalists."""
        if method.startswith(FINALIST):
            file = self.args.out / f"bcnet-{_plain(budget)}.json"
            proposed = json.loads(file.read_text()) if file.exists() else {"finalists": {}}
            widths = proposed["finalists"].get(method.removeprefix(FINALIST))
            return None if widths is None else {"widths": widths, "seconds": proposed["seconds"]}
        name = f"random-{seed % 3}" if method == "random" else method
        file = self.args.out / f"plan-{method}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        entry: Row | None = found.get(self.args.network, {}).get(budget, {}).get(name)
        return entry

    def _row(self, method: str, budget: str, widths: Widths, path: Student, epochs: int, lr: float, seed: int) -> Row:
        return {
            **key(self.args, budget, epochs, lr, seed, method),
            **{"widths": widths.tolist(), "flops": self.cutter.flops(widths), "params": self.cutter.params(widths)},
            **{"val": path.evaluate(self.images.val), "test": path.evaluate(self.images.test), "rounds": []},
        }


def _plain(budget: str) -> str:
    return budget.replace("%", "pc")


def judge(student: Student, batches: Sequence[Batch]) -> Row:
    """Loss of a network on all batches, and in ``parts`` of some images at a time, as bcnet's race measures it."""
    logits, labels = student.logits(batches), torch.cat([y for _, y in batches])
    pairs = zip(logits.chunk(PARTS), labels.chunk(PARTS), strict=True)
    parts = [float(functional.cross_entropy(part, label)) for part, label in pairs]
    return {"loss": float(functional.cross_entropy(logits, labels)), "parts": parts}


def key(args: argparse.Namespace, budget: str, epochs: int, lr: float, seed: int, method: str) -> Row:
    """What tells rows apart."""
    recipe = {"epochs": epochs, "lr": lr, "batch": args.batch, "taught": 0.9, "temperature": 4.0, "weight_decay": 5e-4}
    return {"network": args.network, "budget": budget, "seed": seed, "method": method, "recipe": recipe}
