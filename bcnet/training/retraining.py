"""Training a plain network from scratch, optionally taught by another, and what it is worth afterwards.

The same code trains what a search found and what it is compared with: the full network, uniform scaling, and the
paper's ``random`` (many networks trained for a short while, the best of them to the end).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bcnet.data.source import Data, Source
from bcnet.errors import BcnetError, NotFinite, first_line
from bcnet.space.widths import Floats
from bcnet.training import checkpoint, distributed
from bcnet.training.cuda_graph import CudaGraphStep
from bcnet.training.loop import History, Loop, Progress, out_of_memory
from bcnet.training.optim import Optimisation
from bcnet.training.task import Task
from bcnet.utils.modes import evaluation_mode
from bcnet.utils.settings import Count, Natural, NotNegative, Positive, Share, checked

OnProgress = Callable[[Progress], None]
Step = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Any, Tensor, Any], Tensor]
"""A loss of a network's output, the targets and the teacher's output (None without a teacher)."""
FastStep = Callable[[nn.Module, Tensor, Loss, nn.Module | None], Step | None]
"""Makes a faster step for a network, from an example batch, the loss and the teacher; None where there is none."""

CLEAR = 3.0
"""Standard errors above what other inputs' targets give, from which on a network is taken to have learnt something."""
DRAWS = 8
"""How many targets of other inputs an output is held against: with one, half of the noise was theirs, and a network
with 54 % of 100 images in four classes was said to have learnt nothing."""
MOST_TARGETS = 256
"""The most targets of other inputs that outputs are held against."""


@checked
class Distillation:
    """Learning from a teacher."""

    alpha: Annotated[Share, "the teacher's share of the loss"] = 0.5
    temperature: Annotated[Positive, "how soft its answers are made"] = 1.0

    @property
    def weight(self) -> float:
        """What both losses are multiplied by in all: the sum divided by it is their mean."""
        return 1 - self.alpha + self.alpha * self.temperature**2

    def loss(self, task: Task, output: Any, target: Tensor, teacher: Any) -> Tensor:
        """Both losses together; the square of the temperature keeps the teacher's gradients at their size. Outputs may
        be tensors or dictionaries, lists and tuples of them."""
        if task.distil is None:
            raise BcnetError("distillation needs a task with a `distil` loss: give it, or leave distillation out")
        t = self.temperature
        soft, hard = (tree_map_only(Tensor, lambda part: part / t, answer) for answer in (output, teacher))
        taught = task.distil(soft, hard) * t**2
        return (1 - self.alpha) * task.loss(output, target) + self.alpha * taught


@checked
class RandomBaseline:
    """The paper's baseline ``random``: of several networks that are trained for a short while, the best to the end."""

    networks: Annotated[Count, "how many are tried"] = 20
    epochs: Annotated[Count, "epochs that each is trained for at first"] = 50


@checked
class Retraining:
    """How a plain network is trained.

    ``engine``: ``auto`` records a step on a GPU once and replays it (:mod:`bcnet.training.cuda_graph`), ``plain`` runs
    every step as it is, for networks whose Python code does something else from step to step.
    """

    optimisation: Optimisation = field(default_factory=Optimisation)
    distillation: Distillation | None = None
    seed: Natural = 0
    checkpoint_minutes: NotNegative = 5.0
    channels_last: bool = True
    engine: Literal["auto", "plain"] = "auto"


def retrain(
    network: nn.Module,
    source: Source,
    config: Retraining,
    task: Task | None = None,
    *,
    teacher: nn.Module | None = None,
    folder: str | Path | None = None,
    progress: OnProgress | None = None,
    fast: FastStep | None = None,
) -> History:
    """Train ``network`` in place; with ``folder``, checkpoints go there and a stopped training goes on. ``fast`` may
    take the place of autograd where it can."""
    loop = Retrainer(network, source, config, task, teacher, folder, fast)
    loop.run(progress)
    loop.finish()
    return loop.history


def train_random(
    build: Callable[[int], nn.Module],
    baseline: RandomBaseline,
    data: Data,
    config: Retraining,
    task: Task | None = None,
    *,
    teacher: nn.Module | None = None,
    folder: Path,
    progress: Callable[[int, Progress], None] | None = None,
) -> tuple[int, nn.Module, list[float], History]:
    """The paper's ``random``: networks ``build(0)``, ``build(1)``, ... are trained for a short while, the best of
    them on validation to the end.

    Returns which one it was, it itself, the scores of all after the short while, and its history. Its last part goes
    on in the same epoch of the schedule, on the whole training set where there is one.
    """
    scores = []
    for number in range(baseline.networks):
        network = build(number)
        loop = Retrainer(network, data.train, config, task, teacher, folder / f"{number:03d}")
        loop.run(_numbered(progress, number), baseline.epochs)
        scores.append(evaluate(network, data.val, loop.task, bf16=config.optimisation.bf16)["score"])
    best = max(range(len(scores)), key=lambda n: scores[n])
    network = build(best)
    loop = Retrainer(network, data.whole or data.train, config, task, teacher, folder / "best")
    if not checkpoint.exists(folder / "best"):
        loop.restore(folder / f"{best:03d}")
        loop.step = baseline.epochs * loop.per_epoch
    loop.run(_numbered(progress, best))
    loop.finish()
    return best, network, scores, loop.history


def _numbered(progress: Callable[[int, Progress], None] | None, number: int) -> OnProgress | None:
    return None if progress is None else lambda state: progress(number, state)


@torch.no_grad()
def evaluate(network: nn.Module, source: Source, task: Task | None = None, *, bf16: bool = False) -> dict[str, float]:
    """Mean ``score`` and ``loss`` of a network over all batches, the task's further scores by name, and the ``count``
    of samples; a :class:`BcnetError` where there are none, or where a mean is not finite."""
    task = task or Task.classification()
    names = ["score", "loss", *(name for name, _ in task.extra)]
    total, count = torch.zeros(len(names), dtype=torch.float64), 0
    with evaluation_mode(network):
        for x, y, output in _answers(network, source, bf16):
            measures = [task.score(output, y).double().sum(), task.loss(output, y).double() * len(x)]
            measures += [extra(output, y).double().sum() for _, extra in task.extra]
            total += torch.stack([m.cpu() for m in measures])
            count += len(x)
    if not count:
        raise BcnetError("there is nothing to evaluate on: the data gave no batches")
    found = dict(zip(names, (total / count).tolist(), strict=True))
    for name, value in found.items():
        if not math.isfinite(value):
            raise NotFinite(
                f"the {name} of the network on {count} samples is {value}: the data or the weights hold values that "
                "are no numbers, or the task gives some"
            )
    return {**found, "count": count}


@torch.no_grad()
def sample_scores(network: nn.Module, source: Source, task: Task, *, bf16: bool = False) -> Floats:
    """The score of every sample of ``source``, (n,): what two networks are compared by on the same images."""
    with evaluation_mode(network):
        found = [task.score(output, y).double().cpu() for _, y, output in _answers(network, source, bf16)]
    scores: Floats = torch.cat(found).numpy()
    return scores


def learnt(network: nn.Module, source: Source, task: Task | None = None, *, bf16: bool = False) -> bool:
    """Whether a network has learnt anything at all: its outputs score clearly better with the targets of their own
    inputs than with those of others (:func:`standing`).

    So this holds for any task, and a network that says the same of every input has not, however often it is right.
    """
    return standing(network, source, task, bf16=bf16) > CLEAR


@torch.no_grad()
def standing(network: nn.Module, source: Source, task: Task | None = None, *, bf16: bool = False) -> float:
    """By how many standard errors outputs score better with the targets of their own inputs than with those of others,
    drawn from all of ``source``: below zero where they score worse, as if a higher score were not the better one."""
    task = task or Task.classification()
    others = _some_targets(source, next(network.parameters()).device)
    rng = np.random.default_rng(0)
    gains: list[Tensor] = []
    with evaluation_mode(network):
        for _, y, output in _answers(network, source, bf16):
            chance = torch.stack([task.score(output, other).double() for other in _others(y, others, rng)]).mean(0)
            gains.append((task.score(output, y).double() - chance).cpu())
    gain = torch.cat(gains)
    sampled = 1 / len(others) if others is not None and len(others) < len(gain) else 1 / (DRAWS * len(gain))
    error = float(gain.std()) * (1 / len(gain) + sampled) ** 0.5 if len(gain) > 1 else float("inf")
    mean = float(gain.mean())
    if error == 0:  # all alike
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / error


def _others(y: Tensor, others: Tensor | None, rng: np.random.Generator) -> list[Tensor]:
    """Targets of other inputs for a batch with targets ``y``, drawn several times."""
    if others is None:
        return [y.roll(shift, 0) for shift in range(1, 1 + min(DRAWS, max(1, len(y) - 1)))]
    return [others[torch.from_numpy(rng.integers(len(others), size=len(y)))] for _ in range(DRAWS)]


def _some_targets(source: Source, device: torch.device) -> Tensor | None:
    """All labels of ``source``, or some larger targets from every part of it, whose order may be by class; None where
    they have different shapes."""
    each = -(-MOST_TARGETS // len(source))
    some = [y if y.dim() == 1 else y[:: max(1, len(y) // each)][:each] for _, y in source.batches(0, 0, device)]
    return torch.cat(some) if len({y.shape[1:] for y in some}) == 1 else None


def _answers(network: nn.Module, source: Source, bf16: bool) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """The batches of ``source``, each with the output of ``network`` for it."""
    device = next(network.parameters()).device
    for x, y in source.batches(0, 0, device):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            output = _output(network, x)
        yield x, y, output


def _output(network: nn.Module, x: Tensor) -> Any:
    """``network(x)``, in halves where memory ends: in evaluation mode parts of a batch do not know of each other."""
    try:
        return network(x)
    except RuntimeError as error:
        if not out_of_memory(error) or len(x) == 1:
            raise
    torch.cuda.empty_cache()
    return torch.cat([_output(network, half) for half in x.chunk(2)])


class Retrainer(Loop):
    """The training of ``network`` in place, to be run in parts: ``run(progress, epochs)``, then ``finish()``."""

    config: Retraining

    def __init__(
        self,
        network: nn.Module,
        source: Source,
        config: Retraining,
        task: Task | None = None,
        teacher: nn.Module | None = None,
        folder: str | Path | None = None,
        fast: FastStep | None = None,
    ):
        super().__init__(network, source, config, folder)
        self.task = task or Task.classification(self.optimisation.label_smoothing)
        taught = config.distillation is not None
        self.teacher = teacher.to(self.device).eval() if teacher is not None and taught else None
        if config.distillation is not None and teacher is None:
            raise BcnetError("distillation needs a teacher: give the trained full network")
        self.unit = 1.0 if config.distillation is None else config.distillation.weight
        record = config.engine == "auto" and self.device.type == "cuda" and distributed.world()[1] == 1
        self.recorded = CudaGraphStep(self._run, network) if record else None
        self._untried = fast if config.engine == "auto" and self.optimisation.bf16 else None
        self._fast: Step | None = None

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        if self.parts > 1:
            self.recorded = self._fast = self._untried = None  # memory is short, and a recorded step holds its own
        if self._untried is not None:
            self._fast, self._untried = self._untried(self.net, x, self._loss, self.teacher), None
        if self._fast is not None:
            try:
                return self._fast(x, y)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                self._give_up_the_fast_step(error)
        return self._run(x, y) if self.recorded is None else self.recorded(x, y)

    def _give_up_the_fast_step(self, error: RuntimeError) -> None:
        """Its kernels may be made for the first step only, and fail there; gradients that it held are let go."""
        warnings.warn(f"training goes on by autograd, not by the fused step: {first_line(error)}", stacklevel=4)
        self._fast = None
        self.optimizer.zero_grad(set_to_none=True)

    def _run(self, x: Tensor, y: Tensor) -> Tensor:
        """Forwards and backwards, kernel by kernel."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part, target, share in self.split(x, y):
            with self.autocast(), distributed.shared_batch_norm():
                output = self.net(part)
                with torch.no_grad():
                    taught = None if self.teacher is None else self.teacher(part)
                loss = self._loss(output, target, taught)
            (loss * share).backward()
            losses.append(loss.detach().float() * share)
        return torch.stack(losses).sum(0, keepdim=True)

    def _loss(self, output: Any, target: Tensor, taught: Any) -> Tensor:
        if self.config.distillation is None or taught is None:
            return self.task.loss(output, target)
        return self.config.distillation.loss(self.task, output, target, taught)

    def averaged(self) -> list[Any]:
        """Weights and the batch-norm statistics that belong to them."""
        return [*self.net.parameters(), *(b for b in self.net.buffers() if b.is_floating_point())]

    def identity(self) -> Any:
        return [[name, list(tensor.shape)] for name, tensor in self.net.state_dict().items()]
