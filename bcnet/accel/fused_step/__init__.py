"""A faster way to train on CUDA, supernets and plain networks: fused kernels, few launches, paths side by side."""

from bcnet.accel.fused_step.choose import Choice, choose_engine, why_not_fused
from bcnet.accel.fused_step.cut_scorer import FusedCutScorer, open_cut_scorer
from bcnet.accel.fused_step.engine import FusedEngine
from bcnet.accel.fused_step.evaluator import FusedEvaluator, open_evaluator
from bcnet.accel.fused_step.plain import PlainStep, plain_step

__all__ = [
    "Choice",
    "FusedCutScorer",
    "FusedEngine",
    "FusedEvaluator",
    "PlainStep",
    "choose_engine",
    "open_cut_scorer",
    "open_evaluator",
    "plain_step",
    "why_not_fused",
]
