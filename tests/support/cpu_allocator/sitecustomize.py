"""The one part that a torch for CPUs lacks for SGLang's registration of weights: the allocator's blocks.

SGLang registers the blocks of `torch.cuda.memory.memory_snapshot()` at which a parameter begins. Without a GPU this call
fails, and a server with a weight table does not start. In processes with this folder on PYTHONPATH, the call returns the
memory of every parameter as a block, as the allocator of a GPU does. SGLang itself is unchanged.
"""

from __future__ import annotations

import gc
import importlib.abc
import sys

MODULE = "sglang.srt.model_executor.model_runner"


class _BeforeRunner(importlib.abc.MetaPathFinder):
    """Finder that finds nothing. It replaces torch's call when SGLang imports its runner, after torch."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> None:
        if fullname == MODULE:
            import torch

            torch.cuda.memory.memory_snapshot = _snapshot


def _snapshot(*_: object, **__: object) -> list[dict[str, object]]:
    import torch

    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, torch.nn.Parameter) and one.numel()
    }
    return [
        {"blocks": [{"address": address, "size": nbytes, "state": "active_allocated"}]}
        for address, nbytes in sorted(storages.items())
    ]


sys.meta_path.insert(0, _BeforeRunner())
