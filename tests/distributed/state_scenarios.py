"""What ranks do with the state of a whole model; each function runs on all of them at once.

The judge is the model that one process builds in the same random state.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mxpert.distributed import ExpertParallel
from mxpert.testing.numerics import is_exact
from mxpert.training import full_state_dict, prepare_for_ddp
from tests.distributed.training_scenarios import Net, parallel

State = dict[str, torch.Tensor]


def meshes() -> tuple[DeviceMesh, ExpertParallel]:
    """Two ranks of expert parallelism, each on every second process."""
    sizes = 2, dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ep", "dp"))
    return mesh, parallel(mesh["ep"])


def sharded(net: Net, mesh: DeviceMesh) -> Net:
    """FSDP2 over both dimensions: experts over "dp", the rest over all processes."""
    for experts in (net.moe.gate_up_proj, net.moe.down_proj):
        fully_shard(experts, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh)
    assert all(isinstance(value, DTensor) for value in net.parameters())
    return net


def changed(state: State) -> State:
    return {name: -value - index for index, (name, value) in enumerate(state.items())}


def check_equal(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert type(value) is torch.Tensor, name
        assert is_exact(value, wanted[name]), name


def shards_are_gathered() -> None:
    mesh, ep = meshes()
    net = sharded(Net(ep), mesh)
    wanted = Net(None).state_dict()
    check_equal(full_state_dict(net, ep), wanted)
    on_cpu = full_state_dict(net, ep, cpu_offload=True)
    check_equal(on_cpu, wanted if dist.get_rank() == 0 else {})


def a_whole_state_loads_into_shards() -> None:
    mesh, ep = meshes()
    net = sharded(Net(ep), mesh)
    wanted = changed(full_state_dict(net, ep))
    options = StateDictOptions(full_state_dict=True)
    assert not any(set_model_state_dict(net, copy.copy(wanted), options=options))
    check_equal(full_state_dict(net, ep), wanted)
    own = dict(net.state_dict())  # shards of this rank's experts load as they are
    other = sharded(Net(ep), mesh)
    assert not any(other.load_state_dict(own))
    check_equal(full_state_dict(other, ep), wanted)


def it_loads_into_any_number_of_ranks() -> None:
    mesh, ep = meshes()
    state = changed(full_state_dict(sharded(Net(ep), mesh), ep))
    one = Net(None)
    assert not any(one.load_state_dict(state))
    check_equal(dict(one.state_dict()), state)
    everyone = parallel()
    assert everyone.size == dist.get_world_size() > ep.size
    many = Net(everyone)
    assert not any(many.load_state_dict(state))
    held = many.moe.down_proj.weight
    assert is_exact(held, state["moe.down_proj.weight"][list(everyone.local_experts)])
    check_equal(full_state_dict(many, everyone), state)


def ddp_keeps_its_names() -> None:
    mesh, ep = meshes()
    net = Net(ep)
    prepare_for_ddp(net, mesh["dp"].get_group())
    wanted = {f"module.{name}": value for name, value in Net(None).state_dict().items()}
    check_equal(full_state_dict(DistributedDataParallel(net), ep), wanted)


def what_does_not_fit_is_refused() -> None:
    _, ep = meshes()
    net = Net(ep)
    for model, given, options, error, text in (
        (None, ep, {}, TypeError, "model — need a Module"),
        (net, None, {}, TypeError, "ep — need an ExpertParallel"),
        (net, ep, {"cpu_offload": "yes"}, TypeError, "cpu_offload — need True or False"),
        (net, parallel(), {}, ValueError, r"gate_up_proj — need an .* experts \[(0, 1, 2|3, 4)\]"),
    ):
        with pytest.raises(error, match=text):
            full_state_dict(model, given, **options)  # type: ignore[arg-type]

    class Renamed(torch.nn.Module):
        """A wrapper whose state dict leaves out its own level, as activation checkpointing's."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.state_dict(*args, **kwargs)

    with pytest.raises(ValueError, match=r"inner\.moe\.gate_up_proj — need the state dict to name"):
        full_state_dict(Renamed(net), ep)
