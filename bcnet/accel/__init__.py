"""Fast ways to do what the packages above do slowly: GPU kernels, the fused step, whole spaces at once."""

from bcnet.accel.enumeration.shared import SharedEvaluator
from bcnet.accel.fused_step import Choice, choose_engine, open_cut_scorer, open_evaluator, plain_step

__all__ = ["Choice", "SharedEvaluator", "choose_engine", "open_cut_scorer", "open_evaluator", "plain_step"]
