"""Expert parallelism on paper: expected loads, a link model, measured local layers."""

from .plan import LINKS, ExpertLayer, LayerPlan, Link, plan_layer

__all__ = ["LINKS", "ExpertLayer", "LayerPlan", "Link", "plan_layer"]
