"""What a slim network is worth with weights inherited from the trained one: cut, healed for some steps, and measured.

``steps=0`` measures the bare cut with batch norm recalibrated; some steps of fine-tuning tell damage that heals from
damage that stays. The batches are kept on the device, and all networks see the same ones in the same order, so that
scores differ by what the networks are and not by what they saw. The teacher's answers are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from bcnet.data.source import Batch
from bcnet.errors import BcnetError
from bcnet.space.importance import Keep, importance
from bcnet.space.network import NetworkSpace
from bcnet.space.state import duplicate
from bcnet.space.widths import Floats, Widths
from bcnet.training import distributed
from bcnet.training.loop import step_seed
from bcnet.training.optim import Optimisation, make_optimizer, set_rate
from bcnet.training.recalibration import recalibrate
from bcnet.training.reconstruction import Inheritance
from bcnet.training.retraining import Distillation
from bcnet.training.task import Task
from bcnet.utils.modes import evaluation_mode
from bcnet.utils.safe_gradients import safe_gradients
from bcnet.utils.settings import Count, Natural, checked

PARTS = 4
"""The fewest parts that held-out images are measured in, so that the noise of scores is known."""


@checked
class Healing:
    """``steps`` of fine-tuning after the cut, the whole schedule of ``optimisation`` drawn together over them; batch
    norm then takes its statistics from ``calibration`` training batches. ``by`` is what a network is ranked by: the
    held-out ``loss``, the task's ``score``, or ``distil``, the loss against the teacher."""

    steps: Natural = 0
    optimisation: Optimisation = field(default_factory=lambda: Optimisation(epochs=1, lr=0.02))
    distillation: Distillation = field(default_factory=Distillation)
    calibration: Count = 8
    by: Literal["loss", "score", "distil"] = "loss"
    seed: Natural = 0


@dataclass(frozen=True)
class _Held:
    """Batches on the device, and the teacher's output for each (None without a teacher)."""

    batches: list[Batch]
    taught: list[Any]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Any]]:
        return ((x, y, t) for (x, y), t in zip(self.batches, self.taught, strict=True))


class CutScorer:
    """Scores widths by the network that is left when ``network`` is cut to them: ``score(widths)``, higher is better.

    ``keep`` says which channels stay (a criterion, or scores of one's own), and with ``reconstruct`` layers make up for
    the others (:mod:`bcnet.training.reconstruction`); ``train`` are the batches for fine-tuning and for batch norm's
    statistics, ``val`` those to measure on. Scores are fixed by all of these and the seed, on a CPU bit for bit; the
    network and torch's random state are left alone. Several processes share the widths among them and must be given the
    same batches.
    """

    def __init__(
        self,
        space: NetworkSpace,
        network: nn.Module,
        keep: Keep,
        train: Iterable[Batch],
        val: Iterable[Batch],
        task: Task | None = None,
        *,
        teacher: nn.Module | None = None,
        healing: Healing | None = None,
        reconstruct: bool = False,
    ):
        self.space, self.task, self.healing = space, task or Task.classification(), healing or Healing()
        self.device = next(network.parameters()).device
        # Where networks are built, so that no copy crosses devices tensor by tensor.
        self.source = duplicate(network).to(next(space.model.parameters()).device)
        self.keep = importance(space, self.source, keep) if isinstance(keep, str) else keep
        self.by = self.healing.by
        self._train, self._val = self._held(train, teacher), self._held(_in_parts(val), teacher)
        self._inherit = Inheritance(space, self.source, self._calibration if reconstruct else [])
        self._sizes = np.array([len(x) for x, _ in self._val.batches], dtype=float)
        self.evaluations = 0
        self._known: dict[bytes, Floats] = {}
        self._check(network, teacher)

    def score(self, widths: ArrayLike) -> float:
        """The score of one width vector (L,): its negative loss on ``val``, or the task's score there."""
        return float(self.score_many(np.asarray(widths)[None])[0])

    def score_many(self, widths: ArrayLike) -> Floats:
        """The scores of width vectors (n, L): (n,). Each is computed once."""
        return np.array([np.average(values, weights=self._sizes) for values in self.parts(widths)])

    def parts(self, widths: ArrayLike, by: str | None = None) -> Floats:
        """The scores of width vectors (n, L) on each part of the held-out images, by ``by``: (n, parts)."""
        rows = np.atleast_2d(self.space.check(widths))
        new = list({row.tobytes(): row for row in rows if row.tobytes() not in self._known}.values())
        rank, world = distributed.world()
        found = np.zeros((len(new), len(self._sizes), len(_MEASURES)))
        for number in range(rank, len(new), world):
            found[number] = self._measured(new[number])
        found = distributed.add_up(found, self.device)
        self._known |= {row.tobytes(): values for row, values in zip(new, found, strict=True)}
        self.evaluations += len(new)
        column = _MEASURES.index(by or self.by)
        return np.array([self._known[row.tobytes()][:, column] for row in rows])

    def _measured(self, widths: Widths) -> Floats:
        """The result of :meth:`_measure` for the network at ``widths`` (L,)."""
        return self._measure(self.network(widths))

    def heal_by(self, steps: int, lr: float) -> None:
        """Fine-tune for ``steps`` at the rate ``lr`` from now on; scores from before are forgotten."""
        optimisation = replace(self.healing.optimisation, lr=lr)
        self.healing = replace(self.healing, steps=steps, optimisation=optimisation)
        self._known.clear()

    def network(self, widths: ArrayLike) -> nn.Module:
        """The network at ``widths`` (L,) as it is scored: cut, fine-tuned for some steps, batch norm recalibrated."""
        with _fixed_random_state(self.device, self.healing.seed):
            network = self._inherit(widths, self.keep).to(self.device)
        if self.device.type == "cuda":
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.healing.steps:
            self._heal(network)
        recalibrate(network, self._calibration, bf16=self.healing.optimisation.bf16)
        return network.eval()

    @property
    def _calibration(self) -> list[Batch]:
        return self._train.batches[: self.healing.calibration]

    def _heal(self, network: nn.Module) -> None:
        def learn(x: Tensor, y: Tensor, taught: Any) -> None:
            network.zero_grad(set_to_none=True)
            with self._autocast(), safe_gradients(self.device):
                output = network(x)
                self._loss(output, y, taught).backward()

        self._fine_tune(network.train(), learn)

    def _fine_tune(self, network: nn.Module, learn: Callable[[Tensor, Tensor, Any], None]) -> None:
        """The steps of fine-tuning; ``learn`` sets the gradients of ``network`` to those of a batch."""
        settings, steps = self.healing.optimisation, self.healing.steps
        optimizer = make_optimizer(network, settings)
        batches = list(self._train)
        rng = np.random.default_rng(self.healing.seed)
        order = np.concatenate([rng.permutation(len(batches)) for _ in range(-(-steps // len(batches)))])
        for step, number in enumerate(order[:steps].tolist()):
            set_rate(optimizer, settings.rate(step, steps / settings.epochs))
            with _fixed_random_state(self.device, step_seed(self.healing.seed, step)):
                learn(*batches[number])
            if settings.clip:
                torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
            optimizer.step()

    def _loss(self, output: Any, y: Tensor, taught: Any) -> Tensor:
        if taught is None:
            return self.task.loss(output, y)
        return self.healing.distillation.loss(self.task, output, y, taught)

    @torch.no_grad()
    def _measure(self, network: Callable[[Tensor], Any]) -> Floats:
        """Each of :data:`_MEASURES` of a network on every part, the mean over its images: higher is better."""
        found = []
        for x, y, taught in self._val:
            with self._autocast():
                output = network(x)
            distil = None if taught is None or self.task.distil is None else self.task.distil(output, taught)
            score, loss = self.task.score(output, y).double().mean(), self.task.loss(output, y).double()
            found.append(torch.stack([score, -loss, -loss if distil is None else -distil.double()]))
        measured: Floats = torch.stack(found).cpu().numpy()
        return measured

    @torch.no_grad()
    def _held(self, given: Iterable[Batch], teacher: nn.Module | None) -> _Held:
        batches = []
        for x, y in given:
            x, y = x.to(self.device), y.to(self.device)
            last = x.dim() == 4 and self.device.type == "cuda"
            batches.append((x.contiguous(memory_format=torch.channels_last) if last else x, y))
        if not batches:
            raise BcnetError("scores of cut networks need training and validation batches, but there is none of one")
        return _Held(batches, [None] * len(batches) if teacher is None else self._answers(teacher, batches))

    def _answers(self, teacher: nn.Module, batches: list[Batch]) -> list[Any]:
        with evaluation_mode(teacher.to(self.device)), self._autocast():
            return [teacher(x) for x, _ in batches]

    def _check(self, network: nn.Module, teacher: nn.Module | None) -> None:
        """The network and the teacher on one batch: a sentence now, not in the middle of a search."""
        if teacher is None:
            if self.healing.by == "distil":
                raise BcnetError("scores by distil need a teacher: give the trained network, or score by loss")
        elif self.task.distil is None:
            raise BcnetError("a teacher needs a task with a `distil` loss: give it, or leave the teacher out")
        x, y, taught = next(iter(self._val))
        if teacher is not None:
            try:
                self.task.check(taught, y)
            except BcnetError as error:
                raise BcnetError(f"the teacher does not suit the task: {error}") from error
        self.task.check(self._answers(network, [(x, y)])[0], y)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.healing.optimisation.bf16)


_MEASURES = ("score", "loss", "distil")


def _in_parts(batches: Iterable[Batch]) -> list[Batch]:
    """The batches, in smaller ones where there are fewer than :data:`PARTS`."""
    given = list(batches)
    each = -(-PARTS // max(len(given), 1))
    return [pair for x, y in given for pair in zip(x.chunk(each), y.chunk(each), strict=True)]


@contextmanager
def _fixed_random_state(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers (dropout) drawn from ``seed`` inside, torch's own state untouched outside."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        yield
