"""A `torch.nn.Module` for tensors that a framework passes by name, without the model."""

from __future__ import annotations

from typing import final

import torch

__all__ = ["TensorModule"]


@final
class TensorModule(torch.nn.Module):
    """Module with given tensors as parameters, under the dotted names of the original model. No tensor is copied."""

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Register a tensor as the parameter `name`, or replace the data of the existing parameter."""
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
