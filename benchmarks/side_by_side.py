"""Train several networks side by side on the same augmented batches, all taught by one teacher.

The batches and the teacher's logits are made once for all students. On a GPU each student's step (forward, backward
and update) is one CUDA graph on a stream of its own, so that the small kernels of several networks overlap; the teacher
works on the next batch meanwhile. Elsewhere, and after a notice where recording fails, steps run one after the other.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from parts import Batch, Images
from torch import Tensor, nn
from torch.nn import functional

WARM_UP = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE = {"bf16": 1.0, "fp16": 1024.0, "fp32": 1.0}
"""What losses are multiplied by on the way back, lest small gradients vanish."""


@dataclass(frozen=True)
class Training:
    """How every student is trained; ``taught`` is the teacher's share of the loss, nothing without a teacher."""

    epochs: int = 16
    lr: float = 0.05
    batch: int = 256
    warmup: float = 0.5
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_all: bool = False
    taught: float = 0.9
    temperature: float = 4.0
    cutout: int = 0
    seed: int = 0
    dtype: str = "bf16"

    def rate(self, done: float) -> float:
        """The learning rate after ``done`` epochs: a linear warm-up, then half a cosine down to zero."""
        if done < self.warmup:
            return self.lr * (done + 1e-3) / self.warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - self.warmup) / (self.epochs - self.warmup))))


class Sgd:
    """SGD with Nesterov momentum whose learning rate is a tensor, so that a recorded step can follow a schedule."""

    def __init__(self, model: nn.Module, training: Training, lr: Tensor):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.decayed = [p for p in self.parameters if training.decay_all or p.ndim > 1]
        self.buffers = [torch.zeros_like(p) for p in self.parameters]
        self.training, self.lr = training, lr

    def forget(self) -> None:
        """No gradients, as a step expects."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters]
        if SCALE[self.training.dtype] != 1.0:
            torch._foreach_mul_(gradients, 1 / SCALE[self.training.dtype])
        torch._foreach_add_([p.grad for p in self.decayed], self.decayed, alpha=self.training.weight_decay)
        torch._foreach_mul_(self.buffers, self.training.momentum)
        torch._foreach_add_(self.buffers, gradients)
        torch._foreach_add_(gradients, self.buffers, alpha=self.training.momentum)
        torch._foreach_mul_(gradients, self.lr)
        torch._foreach_sub_(self.parameters, gradients)


class Shared:
    """What all students of a step read: images, labels, the teacher's logits, the learning rate."""

    def __init__(self, example: Batch, logits: Tensor | None):
        x, y = example
        self.x, self.y = torch.empty_like(x), torch.empty_like(y)
        self.logits = None if logits is None else torch.empty_like(logits)
        self.lr = torch.zeros((), device=x.device)

    def load(self, batch: Batch, logits: Tensor | None, rate: float) -> None:
        self.x.copy_(batch[0])
        self.y.copy_(batch[1])
        if self.logits is not None and logits is not None:
            self.logits.copy_(logits)
        self.lr.fill_(rate)


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    if device.type != "cuda" or dtype == "fp32":
        return nullcontext()
    return torch.autocast("cuda", DTYPES[dtype], cache_enabled=False)


def loss_of(student: Tensor, labels: Tensor, teacher: Tensor | None, training: Training) -> Tensor:
    """(1 - a) cross entropy + a T^2 KL(teacher || student at temperature T)."""
    logits = student.float()
    labelled = functional.cross_entropy(logits, labels)
    if teacher is None or training.taught == 0:
        return labelled
    t = training.temperature
    soft = functional.log_softmax(teacher.float() / t, 1)
    taught = functional.kl_div(functional.log_softmax(logits / t, 1), soft, reduction="batchmean", log_target=True)
    return (1 - training.taught) * labelled + training.taught * t * t * taught


class Student:
    """A network in training. ``total`` adds up the losses of its steps."""

    def __init__(self, model: nn.Module, training: Training, shared: Shared):
        self.device = shared.x.device
        self.model = model.to(self.device, memory_format=torch.channels_last).train()
        self.training, self.shared = training, shared
        self.sgd = Sgd(self.model, training, shared.lr)
        self.total = torch.zeros((), device=self.device)
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.sgd.forget()

    def learn(self) -> None:
        """One step, kernel by kernel."""
        with autocast(self.device, self.training.dtype):
            output = self.model(self.shared.x)
        loss = loss_of(output, self.shared.y, self.shared.logits, self.training)
        (loss * SCALE[self.training.dtype]).backward()
        self.sgd.step()
        self.total.add_(loss.detach())

    def record(self) -> None:
        """Turn the step into a CUDA graph; nothing the student has learnt is changed by it."""
        with self.unchanged(), torch.cuda.stream(self.stream):
            torch.cuda.synchronize()
            for _ in range(WARM_UP):
                self.learn()
                self.sgd.forget()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                    self.learn()
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(f"steps are launched kernel by kernel, not as a CUDA graph: {reason}", stacklevel=2)
                self.sgd.forget()
            else:
                self.graph = graph
            torch.cuda.synchronize()

    def unchanged(self) -> Restored:
        """A context at whose end the student is as it was before."""
        return Restored([*self.model.state_dict().values(), *self.sgd.buffers, self.total])

    def step(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.learn()
            self.sgd.forget()


class Restored:
    """Tensors that have their old values again on leaving."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = list(tensors)

    def __enter__(self) -> None:
        self.old = [t.detach().clone() for t in self.tensors]

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        for tensor, old in zip(self.tensors, self.old, strict=True):
            tensor.copy_(old)


class Teacher:
    """A trained network's logits for batches of one shape, from a CUDA graph where there is a GPU."""

    def __init__(self, model: nn.Module, example: Tensor, dtype: str):
        self.model = model.to(example.device, memory_format=torch.channels_last).eval()
        self.dtype, self.x = dtype, torch.empty_like(example).copy_(example)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = self._forward()
        if example.is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._forward()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.logits = self._forward()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        with autocast(self.x.device, self.dtype):
            return self.model(self.x).float()

    def __call__(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        if self.graph is None:
            return self._forward()
        self.graph.replay()
        return self.logits


class SideBySide:
    """Students that train together: ``models`` are changed in place."""

    def __init__(self, models: Sequence[nn.Module], images: Images, training: Training, teacher: nn.Module | None):
        self.images, self.training = images, training
        self._epoch = images.train(training.batch, training.seed, training.cutout)
        self.steps = images.batches(training.batch)
        example = next(iter(self._epoch(0)))
        self.teacher = None if teacher is None else Teacher(teacher, example[0], training.dtype)
        logits = None if self.teacher is None else self.teacher(example[0])
        self.shared = Shared(example, logits)
        self.shared.load(example, logits, 0.0)
        self.students = [Student(model, training, self.shared) for model in models]
        if example[0].is_cuda:
            for student in self.students:
                student.record()

    def run(self, after_epoch: Callable[[int], object] | None = None) -> None:
        """Train for all epochs; ``after_epoch`` is told how many are done."""
        done, epoch = 0, 0
        while epoch < self.training.epochs:  # which after_epoch may change
            for batch in self._epoch(epoch):
                self._step(batch, self.training.rate(done / self.steps))
                done += 1
            self._join()
            epoch += 1
            if after_epoch is not None:
                after_epoch(epoch)

    def heal(self, steps: int) -> None:
        """Train for some steps with a rate that falls to zero, after a first tenth in which it rises."""
        batches = itertools.islice(itertools.chain.from_iterable(map(self._epoch, itertools.count())), steps)
        for done, batch in enumerate(batches):
            rise, fall = (done + 1) / max(1, steps // 10), (steps - done) / steps
            self._step(batch, self.training.lr * min(1.0, rise) * fall)
        self._join()

    def seconds_a_step(self, steps: int = 20) -> float:
        """What a step of all students costs; none of them is changed."""
        with self.unchanged():
            self.heal(3)
            self.wait()
            start = time.perf_counter()
            self.heal(steps)
            self.wait()
            return (time.perf_counter() - start) / steps

    def unchanged(self) -> ExitStack:
        """A context at whose end all students are as they were before."""
        stack = ExitStack()
        for student in self.students:
            stack.enter_context(student.unchanged())
        return stack

    def _step(self, batch: Batch, rate: float) -> None:
        # The teacher works on this batch while the students still do on the last.
        logits = None if self.teacher is None else self.teacher(batch[0])
        self._join()
        self.shared.load(batch, logits, rate)
        for student in self.students:
            if student.stream is None:
                student.step()
            else:
                student.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(student.stream):
                    student.step()

    def _join(self) -> None:
        for student in self.students:
            if student.stream is not None:
                torch.cuda.current_stream().wait_stream(student.stream)

    def close(self) -> None:
        """Give the memory of the recorded steps back."""
        for student in self.students:
            student.graph = None
            student.sgd.forget()

    def wait(self) -> None:
        if self.shared.x.is_cuda:
            torch.cuda.synchronize()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], dtype: str = "bf16") -> dict[str, float]:
    """Accuracy in per cent and loss (cross entropy) with the running statistics of batch norm."""
    was = model.training
    model.eval()
    right, lost, count = torch.zeros(()), torch.zeros(()), 0
    for x, y in batches:
        with autocast(x.device, dtype):
            logits = model(x).float()
        right = (logits.argmax(1) == y).sum() + right.to(x.device)
        lost = functional.cross_entropy(logits, y, reduction="sum") + lost.to(x.device)
        count += len(y)
    model.train(was)
    return {"accuracy": 100 * float(right) / count, "loss": float(lost) / count}
