"""Fast ways to do what the rooms above do slowly: GPU kernels, the fused step, whole spaces at once."""

from bcnet.accel.enumeration.shared import SharedEvaluator
from bcnet.accel.fused_step import Choice, choose_engine, plain_step

__all__ = ["Choice", "SharedEvaluator", "choose_engine", "plain_step"]
