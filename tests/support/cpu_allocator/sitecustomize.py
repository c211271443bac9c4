"""What a torch for CPUs lacks and SGLang's registration of weights asks for: the allocator's blocks.

SGLang registers those blocks of `torch.cuda.memory.memory_snapshot()` at which a parameter begins;
without a GPU that call does not exist, and a server with a weight table does not start. In the
processes of such a server, whose PYTHONPATH names this folder, it tells the memory of every
parameter, each as a block; on a GPU the allocator says the same. SGLang itself is unchanged.
"""

from __future__ import annotations

import gc
import importlib.abc
import sys

MODULE = "sglang.srt.model_executor.model_runner"


class _BeforeRunner(importlib.abc.MetaPathFinder):
    """Finds nothing; sees when torch is there and the runner is about to be imported."""

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
