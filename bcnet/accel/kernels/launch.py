"""Launching Triton kernels without Triton's own bookkeeping, which costs more time than many of them run.

Triton looks at every argument of every launch to find the binary that suits it. The kernels here do not specialise
on sizes and their pointers are aligned, so a binary is known by its compile-time constants and by the types of its
pointers, which are always the same.

A network asks for some tens of binaries, and a compiler takes about a second for each. It works for the most part
outside of Python, so threads compile them side by side: :func:`noting` finds out which a step will ask for, by a dry
run, and :func:`compile_all` compiles them before its first.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.errors import TritonError

from bcnet.errors import first_line

INTERPRETED = triton.knobs.runtime.interpret  # by Triton's interpreter, which multiplies no bfloat16 matrices
DIRECT = triton.__version__.startswith("3.6.") and not INTERPRETED
"""Whether this Triton's launcher is known; others are called the ordinary way, which is slower."""


class Request(NamedTuple):
    """What a launch asked for, with types in place of tensors."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    warps: int

    def key(self, device: int) -> Any:
        return self.constants, self.warps, device

    def compile(self) -> Any:
        """By Triton, on the current device; nothing is launched."""
        function = self.kernel.function
        return function.warmup(*self.arguments, *self.constants, grid=self.grid, num_warps=self.warps)


_noted: list[Request] | None = None


@contextmanager
def noting() -> Iterator[list[Request]]:
    """While entered, kernels are not launched, only what they would compile is noted."""
    global _noted
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


def compile_all(requests: Collection[Request], device: int) -> int:
    """Compile side by side what is not yet known on a GPU; how many were compiled."""
    new = {(r.kernel, r.key(device)): r for r in requests if not r.kernel.knows(r.key(device))}
    if not new:
        return 0
    for request in new.values():
        request.kernel.function.device_caches[device]  # made here, as threads would make one each
    threads = min(len(new), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        compiled = list(pool.map(Request.compile, new.values()))
        if DIRECT:  # one launcher serves all binaries of a function, and a C compiler makes it
            functions = {kernel: binary for (kernel, _), binary in zip(new, compiled, strict=True)}
            list(pool.map(_binary, functions.values()))
    for (kernel, key), binary in zip(new, compiled, strict=True):
        kernel.keep(key, binary)
    return len(new)


class Kernel:
    """A jitted function, compiled on its first launch with new constants."""

    def __init__(self, function: Any):
        self.function = function
        self._binaries: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def knows(self, key: Any) -> bool:
        return key in self._binaries

    def keep(self, key: Any, compiled: Any) -> None:
        if DIRECT:
            self._binaries[key] = _binary(compiled)

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int = 4,
    ) -> None:
        """Launch on the current device and stream; ``constants`` follow the arguments."""
        if _noted is not None:
            types = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
            _noted.append(Request(self, grid, types, constants, warps))
            return
        if not DIRECT:
            self._compiled(grid, (*arguments, *constants), warps)
            return
        device = torch._C._cuda_getDevice()
        key = (constants, warps, device)
        binary = self._binaries.get(key)
        if binary is None:
            self.keep(key, self._compiled(grid, (*arguments, *constants), warps))
        else:
            launch, fixed = binary
            launch(*grid, torch._C._cuda_getCurrentRawStream(device), *fixed, *arguments, *constants)

    def _compiled(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], warps: int) -> Any:
        """Launch Triton's way. That a kernel does not compile, or asks for more than the GPU has, is a RuntimeError."""
        try:
            return self.function[grid](*arguments, num_warps=warps)
        except TritonError as error:
            name, why = self.function.__name__, first_line(error)
            raise RuntimeError(f"the kernel {name} does not compile here: {why:.120}") from error


def _binary(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """The launcher in C of a compiled kernel, and what it takes between the stream and the kernel's arguments."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise RuntimeError(f"the kernel {compiled.name} asks for scratch memory")
    modes = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    no_scratch, no_hooks = (None, None), (None, None, None)
    return launcher.launch, (compiled.function, *modes, *no_scratch, compiled.packed_metadata, *no_hooks)
