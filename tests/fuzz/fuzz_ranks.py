"""The functions of training on several ranks, on one rank."""

from __future__ import annotations

import torch
from fuzz_target import Target

from mxpert.distributed import ExpertParallel
from mxpert.training import (
    MXGroupedLinear,
    clip_grad_norm_,
    full_state_dict,
    local_expert_parameters,
    prepare_for_ddp,
)

EXPERT_PARALLEL = ExpertParallel(num_experts=3, top_k=2, hidden_size=32, max_tokens=64)

RANKS = [
    Target(
        "local_expert_parameters",
        local_expert_parameters,
        lambda r: dict(model=MXGroupedLinear(2, 32, 32, group_ids=[1])),
    ),
    Target(
        "prepare_for_ddp",
        prepare_for_ddp,
        lambda r: dict(model=torch.nn.Linear(2, 2), data_parallel_group=None),
    ),
    Target(
        "clip_grad_norm_",
        clip_grad_norm_,
        lambda r: dict(parameters=torch.nn.Linear(2, 2), max_norm=1.0, expert_parallel_group=None),
    ),
    Target(
        "full_state_dict",
        full_state_dict,
        lambda r: dict(model=MXGroupedLinear(3, 32, 32, group_ids=[0, 1, 2]), ep=EXPERT_PARALLEL),
    ),
]
