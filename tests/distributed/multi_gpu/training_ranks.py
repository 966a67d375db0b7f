"""What the processes of test_training_multi_gpu.py do: tests/distributed's scenarios over NCCL."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.distributed import training_scenarios as scenarios


def on_gpus(scenario: Callable[[], None]) -> Callable[[], None]:
    """A scenario on this rank's GPU."""

    def run() -> None:
        if scenarios.HERE.group is None:
            device = torch.device("cuda", dist.get_rank())
            torch.cuda.set_device(device)
            scenarios.HERE.device = device
            scenarios.HERE.group = dist.new_group(backend="nccl")
        scenario()
        torch.cuda.synchronize()

    return run


gather_equals_one_rank_in_float64 = on_gpus(scenarios.gather_equals_one_rank_in_float64)
all_to_all_equals_one_rank_in_float64 = on_gpus(scenarios.all_to_all_equals_one_rank_in_float64)
one_rank_gets_every_token = on_gpus(scenarios.one_rank_gets_every_token)
unused_slots_are_not_read = on_gpus(scenarios.unused_slots_are_not_read)
float32_keeps_the_contract = on_gpus(scenarios.float32_keeps_the_contract)
bf16_and_mxfp8_keep_their_floors = on_gpus(scenarios.bf16_and_mxfp8_keep_their_floors)
mxfp8_wire_gives_the_same_results = on_gpus(scenarios.mxfp8_wire_gives_the_same_results)
the_comparison_sees_planted_errors = on_gpus(scenarios.the_comparison_sees_planted_errors)
first_weights_are_a_slice = on_gpus(scenarios.first_weights_are_a_slice)
repeats_checkpoints_and_main_grad_give_the_same_bits = on_gpus(
    scenarios.repeats_checkpoints_and_main_grad_give_the_same_bits
)
