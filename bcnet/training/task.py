"""What a network is trained for: a loss to minimise and a score to compare networks by.

The default is classification. Any other task works with a loss and a score of its own::

    Task(loss=torch.nn.functional.mse_loss, score=lambda output, target: -(output - target).square().flatten(1).mean(1))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcnet.errors import BcnetError, first_line


def cross_entropy(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(output.float(), target, label_smoothing=smoothing)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest logit is the label's: shape (n,)."""
    return (output.argmax(1) == target).float()


def top5(output: Tensor, target: Tensor) -> Tensor:
    """1 where the label is among the five largest logits: shape (n,)."""
    return (output.topk(min(5, output.shape[1]), 1).indices == target[:, None]).any(1).float()


@dataclass(frozen=True)
class _Negated:
    """A score of which lower is better, negated."""

    score: Callable[[Any, Any], Tensor]

    def __call__(self, output: Any, target: Any) -> Tensor:
        return -self.score(output, target)


@dataclass(frozen=True)
class Task:
    """What a network learns and is judged by.

    ``loss(output, target)`` is a mean over the batch; ``score(output, target)`` is a value per example
    (n,), of which higher is better unless said otherwise; ``extra`` are further scores by name;
    ``distil(output, teacher's output)`` is the loss of learning from a teacher; ``fits(output, target)`` raises where a
    network does not suit the task.

    ``name`` and ``unit`` are what reports call the score; a ``unit`` of ``%`` says that scores are shares. With
    ``higher_is_better=False`` the score is negated wherever networks are compared, and shown as it is.
    """

    loss: Callable[[Any, Any], Tensor]
    score: Callable[[Any, Any], Tensor]
    extra: tuple[tuple[str, Callable[[Any, Any], Tensor]], ...] = ()
    distil: Callable[[Any, Any], Tensor] | None = None
    fits: Callable[[Any, Any], None] | None = None
    name: str = "score"
    unit: str = ""
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not self.higher_is_better and not isinstance(self.score, _Negated):
            object.__setattr__(self, "score", _Negated(self.score))

    @property
    def metric(self) -> dict[str, Any]:
        """What the score is called, as JSON."""
        return {"name": self.name, "unit": self.unit, "higher_is_better": self.higher_is_better}

    @staticmethod
    def classification(smoothing: float = 0.0, classes: int | None = None) -> Task:
        """Cross entropy with label smoothing, top-1 accuracy, and top-5 besides; of ``classes`` classes if known."""

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(output, target, smoothing)

        def fits(output: Any, target: Any) -> None:
            check_logits(output, target, classes)

        return Task(loss, correct, (("top5", top5),), soft_cross_entropy, fits, "accuracy", "%")

    def check(self, output: Any, target: Any) -> None:
        """Raise a :class:`BcnetError` if this task cannot be learnt from such outputs and targets of one batch."""
        if self.fits is not None:
            self.fits(output, target)
        loss = _mean("loss", self.loss, output, target)
        if self.distil is not None:
            _mean("distil", self.distil, output, output)
        for name, score in (("score", self.score), *self.extra):
            found = _tried(name, score, output, target)
            if not isinstance(found, Tensor) or found.shape != target.shape[:1]:
                wanted = f"one value for each of {len(target)} examples"
                raise BcnetError(f"the task's {name} gives {_form(found)}, but it must be {wanted}")
            if isinstance(output, Tensor) and not _apart(score, found, output, target):
                raise BcnetError(
                    f"the task's {name} of an example depends on the others of its batch, with "
                    f"{_shapes(output, target)}: each must be scored for itself"
                )
        if isinstance(output, Tensor) and output.shape != target.shape and _blind(self.loss, loss, output, target):
            raise BcnetError(
                "the task's loss holds every output against every target, as torch broadcasts "
                f"{_shapes(output, target)}: make them alike, as by targets[:, None]"
            )


def check_logits(output: Any, target: Any, classes: int | None = None) -> None:
    """Raise a :class:`BcnetError` if outputs are not logits (n, classes), or targets are not labels (n,) for them."""
    way_out = "give a Task with a loss and a score of your own"
    if not isinstance(output, Tensor) or output.dim() != 2:
        raise BcnetError(f"the network gives {_form(output)}, but classification needs logits (n, classes): {way_out}")
    if target.dtype not in (torch.int64, torch.uint8) or target.dim() != 1:
        raise BcnetError(
            f"the targets are {_form(target)}, but classification needs labels (n,) of int64: "
            f"{_as_labels(target, output)}{way_out}"
        )
    if output.shape[1] == 1:
        raise BcnetError(f"the network gives one value, but classification needs a logit for every class: {way_out}")
    logits = output.shape[1]
    if classes is not None and logits != classes:
        raise BcnetError(
            f"the network gives {logits} logits, but the data has {classes} classes: change its last layer"
        )
    low, high = int(target.min()), int(target.max())
    if low < 0 or high >= logits:
        raise BcnetError(f"the network gives {logits} logits, but there is a label {low if low < 0 else high}")


def _as_labels(target: Tensor, output: Tensor) -> str:
    """How such targets become labels, if they can."""
    if target.shape == output.shape:
        return "make them targets.argmax(1), or "
    if target.dim() == 1 or target.shape[1:] == (1,):
        return f"make them targets{'[:, 0]' * (target.dim() - 1)}.long(), or "
    return ""


def _mean(name: str, function: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Tensor:
    """The value of a loss, if it is a single number."""
    found = _tried(name, function, output, target)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise BcnetError(f"the task's {name} gives {_form(found)}, but it must be one number, the mean over the batch")
    return found


def _apart(score: Callable[[Any, Any], Tensor], found: Tensor, output: Tensor, target: Tensor) -> bool:
    """Whether the first example alone has the score that it has among the others."""
    if len(output) < 2 or len(output) != len(target):
        return True
    try:
        alone = score(output[:1], target[:1])
    except (RuntimeError, TypeError, ValueError, IndexError):
        return True  # a score may need more than one example at a time
    return alone.shape != (1,) or torch.allclose(
        alone.double(), found[:1].double(), rtol=1e-3, atol=1e-6, equal_nan=True
    )


def _blind(loss: Callable[[Any, Any], Tensor], found: Tensor, output: Tensor, target: Tensor) -> bool:
    """Whether a loss of values does not tell which target belongs to which output, as where torch broadcasts (n, 1) and
    (n,) to (n, n)."""
    values = output.is_floating_point() and target.is_floating_point() and output.numel() == target.numel()
    if not values or torch.equal(target, target.flip(0)) or torch.allclose(output, output.flip(0)):
        return False
    return torch.allclose(loss(output, target.flip(0)), found, rtol=1e-6, atol=0.0)


def _shapes(output: Tensor, target: Tensor) -> str:
    return f"outputs {tuple(output.shape)} and targets {tuple(target.shape)}"


def _tried(name: str, function: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
    try:
        return function(output, target)
    except torch.OutOfMemoryError:
        raise  # not the task's fault: the caller then takes smaller batches
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        cause = first_line(error)
        raise BcnetError(
            f"the task's {name} fails on outputs {_form(output)} and targets {_form(target)}: {cause}"
        ) from error


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def soft_cross_entropy(output: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy against a teacher's soft labels, as slimmable networks distil in place."""
    return torch.sum(-teacher.float().softmax(1) * output.float().log_softmax(1), 1).mean()
