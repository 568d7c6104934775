"""Launching Triton kernels without Triton's own bookkeeping, which costs more time than many of them run.

Triton looks at every argument of every launch to find the binary that suits it. The kernels here do not specialise
on sizes and their pointers are aligned, so a binary is known by its compile-time constants and by the types of its
pointers, which are always the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.errors import TritonError

from bcnet.errors import first_line

DIRECT = triton.__version__.startswith("3.6.") and not triton.knobs.runtime.interpret
"""Whether this Triton's launcher is known; others are called the ordinary way, which is slower."""


class Kernel:
    """A jitted function, compiled on its first launch with new constants."""

    def __init__(self, function: Any):
        self._function = function
        self._binaries: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int = 4,
        registers: int | None = None,
    ) -> None:
        """Launch on the current device and stream; ``constants`` follow the arguments. A thread takes at most
        ``registers``."""
        options = {"num_warps": warps} if registers is None else {"num_warps": warps, "maxnreg": registers}
        if not DIRECT:
            self._compiled(grid, (*arguments, *constants), options)
            return
        device = torch._C._cuda_getDevice()
        key = (constants, warps, registers, device)
        binary = self._binaries.get(key)
        if binary is None:
            self._binaries[key] = _binary(self._compiled(grid, (*arguments, *constants), options))
        else:
            launch, fixed = binary
            launch(*grid, torch._C._cuda_getCurrentRawStream(device), *fixed, *arguments, *constants)

    def _compiled(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: dict[str, int]) -> Any:
        """Launch Triton's way. That a kernel does not compile, or asks for more than the GPU has, is a RuntimeError."""
        try:
            return self._function[grid](*arguments, **options)
        except TritonError as error:
            name, why = self._function.__name__, first_line(error)
            raise RuntimeError(f"the kernel {name} does not compile here: {why:.120}") from error


def _binary(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """The launcher in C of a compiled kernel, and what it takes between the stream and the kernel's arguments."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise RuntimeError(f"the kernel {compiled.name} asks for scratch memory")
    modes = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    no_scratch, no_hooks = (None, None), (None, None, None)
    return launcher.launch, (compiled.function, *modes, *no_scratch, compiled.packed_metadata, *no_hooks)
