"""A proof that the kernels compute on this GPU what they should, made before they train anything.

A compiler or a driver may turn a kernel that is right elsewhere into one that is wrong, and a network trained with
wrong gradients looks much like a bad network (seen on an H200: a gradient by 92 % wrong that Triton's interpreter had
right). So a small network with a layer of every kind takes one step, and its gradients are compared with autograd's.
That they were right is noted beside the binaries in Triton's cache: the proof is made once for each GPU and version.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional

from bcnet.accel.fused_step.ahead import compile_ahead
from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.errors import first_line
from bcnet.space.network import trace
from bcnet.supernet.supernet import Supernet
from bcnet.utils.random_state import kept_random_state

SLACK = 2.0, 0.05
"""How far a gradient may be from float32's: this many times as far as autocast's, and a little more."""
IMAGES, SIZE, CLASSES = 64, 15, 10


class _Example(nn.Module):
    """Dense, 1x1 and depthwise convolutions that keep, halve and nearly halve the size, norms with and without
    activation, an addition; packing rounds the widths up, and they are few, as others have binaries of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _block(3, 30, 3)
        self.first = nn.Sequential(_block(30, 60, 1), _block(60, 60, 3, groups=60), _block(60, 30, 1, act=False))
        self.second = nn.Sequential(_block(30, 60, 1), _block(60, 60, 3, 2, groups=60), _block(60, 30, 1, act=False))
        self.last = nn.Sequential(_block(30, 60, 3), _block(60, 60, 3, 2, groups=60))
        self.head = nn.Linear(60, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.last(self.second(x + self.first(x)))
        return self.head(x.mean((2, 3)))


def _block(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), *([nn.ReLU6()] if act else []))


@cache
def why_no_kernels(device: torch.device) -> str:
    """Why the kernels are not used on ``device``, in half a sentence: they do not run, or they are wrong."""
    try:
        note = _note(device)
        if note is not None and note.exists():
            return ""
        why = why_wrong(device)
        if note is not None and not why:
            with contextlib.suppress(OSError):  # a folder that cannot be written to
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()
        return why
    except Exception as error:  # a compiler's errors are of many kinds, and none should end a run
        return f"its kernels do not run here: {first_line(error):.120}"


def _note(device: torch.device) -> Path | None:
    """The file that says that these kernels were right on this GPU, with these versions; None where there are none."""
    if device.type != "cuda":
        return None
    import triton

    rooms = (Path(__file__).parent, Path(__file__).parents[1] / "kernels")
    sources = [path.read_bytes() for room in rooms for path in sorted(room.glob("*.py"))]
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()
    where = torch.cuda.get_device_name(device), driver, torch.__version__, torch.version.cuda, triton.__version__
    digest = hashlib.sha256(b"".join([repr(where).encode(), *sources])).hexdigest()
    return Path(triton.knobs.cache.dir) / f"bcnet-proven-{digest[:32]}"


def why_wrong(device: torch.device, kernels: ModuleType | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
    """Half a sentence that names a weight whose gradient is wrong on ``device``; empty if none is."""
    with kept_random_state():
        torch.manual_seed(0)
        network = _Example().train()
        x, y = torch.randn(IMAGES, 3, SIZE, SIZE), torch.randint(CLASSES, (IMAGES,))
    net = Supernet(trace(copy.deepcopy(network), x[:2], check=False), "ua").to(device).train()
    net.load_state_dict(network.state_dict(), strict=False)  # the counters of batches are not its own
    x, y, network = x.to(device), y.to(device), network.to(device)
    exact, half = (_gradients(network, x, y, bf16) for bf16 in (False, True))
    engine = FusedEngine(net, kernels, dtype)
    compile_ahead(engine, x, [net.space.max])
    engine.zero()
    engine.step(x, y, [(net.space.max, "left")])
    times, more = SLACK
    for name, parameter in net.named_parameters():
        given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        size = exact[name].norm().clamp_min(1e-6)
        away, allowed = ((one - exact[name]).norm() / size for one in (given.float(), half[name]))
        if not bool(away <= times * allowed + more):
            return f"its kernels are wrong on this GPU (the gradient of {name} by {float(away):.0%})"
    return ""


def _gradients(network: nn.Module, x: Tensor, y: Tensor, bf16: bool) -> dict[str, Tensor]:
    """The gradients that autograd finds, the network left as it was."""
    twin = copy.deepcopy(network)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        loss = functional.cross_entropy(twin(x).float(), y)
    loss.backward()
    return {name: p.grad.float() for name, p in twin.named_parameters() if p.grad is not None}
