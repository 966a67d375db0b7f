"""Choosing a kernel: device facts, the registry of backends, tuned tables."""

from ..target import detect_target
from .calls import CallCache, launch, without_grad
from .registry import (
    Explanation,
    Resolution,
    explain_problem,
    override,
    register_backend,
    resolve,
    resolve_cached,
)

__all__ = [
    "CallCache",
    "Explanation",
    "Resolution",
    "detect_target",
    "explain_problem",
    "launch",
    "override",
    "register_backend",
    "resolve",
    "resolve_cached",
    "without_grad",
]
