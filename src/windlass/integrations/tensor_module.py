"""A module of the tensors that a framework hands over, under the names that it gives them."""

from __future__ import annotations

from typing import final

import torch

__all__ = ["TensorModule"]


@final
class TensorModule(torch.nn.Module):
    """Holds tensors under dotted names, as the model whose tensors they are would; copies nothing."""

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Hold a tensor, in the place of the one before."""
        path, _, leaf = name.rpartition(".")
        module: torch.nn.Module = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        held = module._parameters.get(leaf)
        if held is None:
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            held.data = tensor
