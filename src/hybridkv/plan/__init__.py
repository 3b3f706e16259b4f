"""What a model needs in memory, computed from its layer specs. No torch."""

from hybridkv.plan.layout import PageLayout, PartView, Row
from hybridkv.plan.plan import GroupPlan, Plan, PlanOptions, make_plan
from hybridkv.plan.uniform import UniformPlan, uniform_pack_sizes, uniform_plan

__all__ = [
    "GroupPlan",
    "PageLayout",
    "PartView",
    "Plan",
    "PlanOptions",
    "Row",
    "UniformPlan",
    "make_plan",
    "uniform_pack_sizes",
    "uniform_plan",
]
