"""Engines: what carries out the stacks of a sweep. All give the same results; they differ in where and how fast."""

from fedlaw.experiments.engines.base import Engine, Outcome, create, run_stack

__all__ = ["Engine", "Outcome", "create", "run_stack"]
