"""Cut networks as paths of one traced network, so that the fused step trains and measures them at any widths.

A path takes the first channels of every variable; the weights of a cut network are written there. Kernels like their
channels in eights, so a path is as wide as the next multiple, and the channels that no network has are zero: nothing
reads them and no gradient reaches them, so they stay zero. Several networks train side by side on streams of their
own, on batches and answers of the teacher that are made once and stay on the device.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from channels import Cutter, Kept
from parts import Batch, Images, NetworkSpace, Widths, space_of
from side_by_side import Restored, Sgd, Shared, Teacher, Training, loss_of
from torch import Tensor, nn
from torch.nn import functional
from without_gpu import reference

from bcnet.accel.fused_step import FusedEngine
from bcnet.space.importance import importance
from bcnet.space.resize import selected, sliced
from bcnet.supernet.supernet import Supernet
from bcnet.training.reconstruction import Inheritance

State = dict[str, Tensor]
EIGHT = 8


Lesson = tuple[Tensor, Tensor, Tensor | None]


class Lessons:
    """The augmented batches of a seed, with what the teacher says of each (None without one), made epoch by epoch and
    kept unless told otherwise."""

    def __init__(self, images: Images, training: Training, teacher: nn.Module | None, keep: bool = True):
        self._batches = images.train(training.batch, training.seed, training.cutout)
        self.per_epoch = images.batches(training.batch)
        first = next(iter(self._batches(0)))[0]
        self._teacher = None if teacher is None else Teacher(teacher, first, training.dtype)
        self._keep, self._made = keep, dict[int, list[Lesson]]()
        self.seconds: dict[int, float] = {}

    def epoch(self, number: int) -> list[Lesson]:
        if number not in self._made:
            if not self._keep:
                self._made.clear()
            self._made[number] = [self._lesson(*batch) for batch in self._batches(number)]
        return self._made[number]

    def _lesson(self, x: Tensor, y: Tensor) -> Lesson:
        return _compact(x), y.clone(), None if self._teacher is None else self._teacher(x).clone()

    def first(self, count: int) -> list[Lesson]:
        """The first lessons of all."""
        epochs = range(-(-count // self.per_epoch))
        return [lesson for number in epochs for lesson in self.epoch(number)][:count]


def _compact(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16 if x.is_cuda else x.dtype, memory_format=torch.channels_last, copy=True)


class Path:
    """One network in training or under examination: the path of ``space`` at its widths."""

    def __init__(self, space: NetworkSpace, training: Training, shared: Shared):
        device = shared.x.device
        self.space, self.training, self.shared = space, training, shared
        self.net = Supernet(space, "ua").to(device).train()
        kernels: ModuleType | None = None if device.type == "cuda" else reference
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.engine = FusedEngine(self.net, kernels=kernels, dtype=dtype, track=True)
        self.sgd = Sgd(self.net, training, shared.lr)
        self.total = torch.zeros((), device=device)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.own = self.widths = space.max
        self.whole = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}

    @torch.no_grad()
    def load(self, widths: Widths, state: State) -> None:
        """Take the weights of a network of these widths, and forget what was learnt."""
        if not np.array_equal(widths, self.own):
            self.graph = None
        self.own, self.widths = widths, np.minimum(-(-widths // EIGHT) * EIGHT, self.space.max)
        torch._foreach_zero_([*self.whole.values(), *self.sgd.buffers, self.total])
        for name, place in self._places():
            place.copy_(state[name])

    @torch.no_grad()
    def state(self) -> State:
        """The weights of the network, as a plain one has them."""
        return {name: place.detach().clone() for name, place in self._places()}

    def _places(self) -> Iterator[tuple[str, Tensor]]:
        """Where the network has its weights."""
        units, total, axes = self.space.units(self.own), self.net.total_units, self.space.coupling.axes
        for name, tensor in self.whole.items():
            yield name, sliced(tensor, axes[name], units, total, "left") if name in axes else tensor

    def learn(self) -> None:
        """One step, kernel by kernel."""
        self.engine.zero()
        losses = self.engine.step(self.shared.x, self.shared.y, [(self.widths, "left")], loss=self._loss)
        self.sgd.step()
        self.total.add_(losses[0])

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels, self.shared.logits, self.training)

    def record(self) -> None:
        """Turn the step into a CUDA graph; nothing that was learnt is changed by it."""
        with Restored([*self.whole.values(), *self.sgd.buffers, self.total]), torch.cuda.stream(self.stream):
            self.learn()  # kernels are compiled, libraries set themselves up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.learn()
            torch.cuda.synchronize()
        self.graph = graph

    def step(self) -> None:
        if self.graph is None:
            self.learn()
        else:
            self.graph.replay()

    @torch.no_grad()
    def logits(self, batches: Sequence[Batch], by_batch: bool = False) -> Tensor:
        """What the network says of all images, by running statistics or by those of each batch: (n, classes)."""
        statistics = "batch" if by_batch else "running"
        return torch.cat([self.engine.logits(x, self.widths, statistics=statistics) for x, _ in batches])

    def evaluate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Accuracy in per cent and loss (cross entropy)."""
        logits, labels = self.logits(batches), torch.cat([y for _, y in batches])
        right = float((logits.argmax(1) == labels).float().mean())
        return {"accuracy": 100 * right, "loss": float(functional.cross_entropy(logits, labels))}


class Class:
    """Paths that train side by side on the same lessons."""

    def __init__(self, space: NetworkSpace, training: Training, lessons: Lessons, count: int):
        x, y, answers = lessons.first(1)[0]
        self.lessons, self.training = lessons, training
        self.shared = Shared((x, y), answers)
        self.shared.load((x, y), answers, 0.0)
        self.paths = [Path(space, training, self.shared) for _ in range(count)]

    def load(self, networks: Sequence[tuple[Widths, State]], record: bool = True) -> list[Path]:
        """The paths that the networks take."""
        busy = self.paths[: len(networks)]
        for path, network in zip(busy, networks, strict=True):
            path.load(*network)
            if record and path.stream is not None:
                path.record()
        return busy

    def teach(self, paths: Sequence[Path], lesson: Lesson, rate: float) -> None:
        """One step of all paths."""
        x, y, answers = lesson
        self._join(paths)
        self.shared.load((x, y), answers, rate)
        for path in paths:
            if path.stream is None:
                path.step()
            else:
                path.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(path.stream):
                    path.step()

    def epoch(self, paths: Sequence[Path], number: int) -> None:
        """One epoch of the schedule."""
        for done, lesson in enumerate(self.lessons.epoch(number)):
            self.teach(paths, lesson, self.training.rate(number + done / self.lessons.per_epoch))
        self._join(paths)

    def heal(self, paths: Sequence[Path], steps: int, lr: float) -> None:
        """Some steps with a rate that falls to zero, after a first tenth in which it rises."""
        for done, lesson in enumerate(self.lessons.first(steps)):
            rise, fall = (done + 1) / max(1, steps // 10), (steps - done) / steps
            self.teach(paths, lesson, lr * min(1.0, rise) * fall)
        self._join(paths)

    @contextmanager
    def settled(self, paths: Sequence[Path], lr: float, steps: int) -> Iterator[None]:
        """For a while, ``paths`` after some steps more in which their rate falls to zero; then as they were."""
        with Restored([t for path in paths for t in (*path.whole.values(), *path.sgd.buffers, path.total)]):
            for done, lesson in enumerate(self.lessons.first(steps)):
                self.teach(paths, lesson, lr * (1 + math.cos(math.pi * done / steps)) / 2)
            self._join(paths)
            yield

    def _join(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.stream is not None:
                torch.cuda.current_stream().wait_stream(path.stream)


def order_of(cutter: Cutter, scores: Sequence[Tensor]) -> State:
    """The full network with the channels of every variable in the order of their scores, the highest first."""
    kept = [torch.argsort(score, descending=True, stable=True).numpy() for score in scores]
    axes, total = cutter.space.coupling.axes, [len(k) for k in kept]
    state = {**dict(cutter.model.named_parameters()), **dict(cutter.model.named_buffers())}
    return {
        name: selected(t.detach(), axes[name], kept, total) if name in axes else t.detach() for name, t in state.items()
    }


def first_of(space: NetworkSpace, state: State, widths: Widths) -> State:
    """The part of such a network that is cut to ``widths``."""
    units, total, axes = space.units(widths), space.units(space.max), space.coupling.axes
    return {n: sliced(t, axes[n], units, total, "left") if n in axes else t for n, t in state.items()}


class Maker:
    """States of cut networks, by the channels that stay; where asked for, layers make up for the others by least
    squares (:mod:`bcnet.training.reconstruction`). Each is made once."""

    def __init__(self, cutter: Cutter, images: Images):
        device = images.test[0][0].device
        model, space = copy.deepcopy(cutter.model).to(device), space_of(copy.deepcopy(cutter.model), images)
        assert space.own_class  # known before the model moves: it is checked with inputs that do not
        space.model.to(device)
        some = [(x.float(), y) for (x, y), _ in zip(images.train(256, 2000)(0), range(4), strict=False)]
        self._ways = {
            made_up_for: Inheritance(space, model, some if made_up_for else []) for made_up_for in (False, True)
        }
        self._made: dict[str, State] = {}

    def __call__(self, kept: Kept, reconstruct: bool) -> State:
        key = json.dumps([kept, reconstruct])
        if key not in self._made:
            widths = np.array([len(stay) for stay in kept])
            network = self._ways[reconstruct](widths, [np.array(stay) for stay in kept])
            self._made[key] = network.state_dict()
        return self._made[key]


def recut(path: Path, widths: Widths) -> State:
    """The channels of the largest L2 norms of what a path has become."""
    space, total = path.space, path.net.total_units
    order = [np.argsort(-score, kind="stable") for score in importance(space, path.net, "l2")]
    axes = space.coupling.axes
    everything = {n: selected(t.detach(), axes[n], order, total) if n in axes else t for n, t in path.whole.items()}
    return first_of(space, everything, widths)
