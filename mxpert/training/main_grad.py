"""Weight gradients that backward adds to ``weight.main_grad``, by the convention of Megatron-LM.

Its optimisers read `main_grad`. Its DistributedDataParallel marks each parameter with
``grad_added_to_main_grad``, and its hook wants a gradient of the parameter's shape from backward:
it starts the reduction, and adds ``param.grad`` unless the mark is True.

Source:
    megatron.core.tensor_parallel.layers and transformer_engine.pytorch's linear modules, with
    ``gradient_accumulation_fusion``.
"""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of main_grad; 16-bit ones take the float32 gradient with one rounding."""


class MarkedWeight:
    """A weight whose trainer follows the convention. Not a tensor, so that autograd ignores it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @staticmethod
    def of(weight: torch.Tensor) -> MarkedWeight | None:
        """None where no trainer has marked the weight: ``weight.grad`` is left alone then."""
        marked = hasattr(weight, "grad_added_to_main_grad") or hasattr(weight, "__fsdp_param__")
        return MarkedWeight(weight) if marked else None

    def begin(self) -> torch.Tensor | None:
        """The main_grad that takes the gradient now; None if there is none.

        Megatron's FSDP makes it just before its use, and overwrites what an earlier step has left.
        """
        weight = self._weight
        if hasattr(weight, "__fsdp_param__"):
            weight.main_grad = weight.get_main_grad()  # type: ignore[attr-defined]
        main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is not None and getattr(weight, "overwrite_main_grad", False):
            main_grad.zero_()
        return main_grad

    def end(self) -> torch.Tensor:
        """Mark the gradient as added, and return one in its place, which nobody reads.

        It is uninitialised unless ``weight.zero_out_wgrad`` says that the hook adds it.
        """
        weight = self._weight
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
