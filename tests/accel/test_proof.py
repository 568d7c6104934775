"""Kernels that are wrong on a device are found out before they train anything."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import reference_kernels as reference
import torch

from bcnet.accel.fused_step import proof

CPU = torch.device("cpu")


def with_half(name: str) -> ModuleType:
    """The reference, but for a kernel whose results are half of what they should be."""
    kernels = ModuleType("kernels")
    vars(kernels).update({key: value for key, value in vars(reference).items() if not key.startswith("__")})
    right = getattr(reference, name)

    def wrong(*args: Any, **settings: Any) -> Any:
        result = right(*args, **settings)
        result.base.mul_(0.5)
        return result

    setattr(kernels, name, wrong)
    return kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_kernels_are_let_through(dtype: torch.dtype) -> None:
    assert proof.why_wrong(CPU, reference, dtype) == ""


@pytest.mark.parametrize("name", ["depthwise_backward", "conv1x1_backward", "norm_gradient", "depthwise_forward"])
def test_a_wrong_kernel_is_named_by_what_it_spoils(name: str) -> None:
    why = proof.why_wrong(CPU, with_half(name))
    assert why.startswith("its kernels are wrong on this GPU (the gradient of ")


def test_kernels_that_do_not_run_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> str:
        raise ValueError("ptxas: too many registers\nand more")  # Triton's errors are no RuntimeErrors

    monkeypatch.setattr(proof, "why_wrong", fails)
    proof.why_no_kernels.cache_clear()
    assert proof.why_no_kernels(CPU) == "its kernels do not run here: ptxas: too many registers"
    proof.why_no_kernels.cache_clear()


def test_a_kernel_that_does_not_compile_is_an_error_that_is_caught() -> None:
    """Triton's errors are no RuntimeErrors, which is what whoever tries the fused step is ready for."""
    errors = pytest.importorskip("triton.errors", reason="Triton comes with torch for CUDA only")
    from bcnet.accel.kernels.launch import Kernel

    class Function:
        __name__ = "wide"

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                raise errors.TritonError("out of resource: shared memory\nand more")

            return launch

    with pytest.raises(RuntimeError, match=r"^the kernel wide does not compile here: out of resource: shared memory$"):
        Kernel(Function())((1, 1, 1), (), ())
