"""Describe WHERE bytes are: boxes, manifests, names of parameters. No torch, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.layout.box import Box as Box
    from windlass.layout.dtypes import DType as DType
    from windlass.layout.manifest import ManifestBuilder as ManifestBuilder
    from windlass.layout.manifest import ParameterSpec as ParameterSpec
    from windlass.layout.manifest import Role as Role
    from windlass.layout.manifest import Shard as Shard
    from windlass.layout.manifest import ShardManifest as ShardManifest
    from windlass.layout.manifest import TensorSpec as TensorSpec
    from windlass.layout.naming.rules import Cut as Cut
    from windlass.layout.naming.rules import Family as Family
    from windlass.layout.naming.rules import Rule as Rule
    from windlass.layout.naming.stacked import TORCHTITAN_EXPERTS as TORCHTITAN_EXPERTS
    from windlass.layout.naming.stacked import TRANSFORMERS_EXPERTS as TRANSFORMERS_EXPERTS
    from windlass.layout.naming.stacked import StackedRule as StackedRule
    from windlass.layout.naming.tables import FAMILIES as FAMILIES
    from windlass.layout.quantization import QuantizedTensor as QuantizedTensor

if not TYPE_CHECKING:
    # Hidden from type checkers, so that they still report unknown names.
    __all__, __getattr__, __dir__ = public(__name__)
