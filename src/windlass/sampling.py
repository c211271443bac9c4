"""Sampling parameters of a request."""

from __future__ import annotations

import msgspec

from windlass.config import check_numbers
from windlass.errors import ConfigError


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> bool:
    """Return whether a value is a Python integer or float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, with SGLang's names.

    Attributes:
        max_new_tokens: maximum number of generated tokens, at least 1.
        temperature: temperature; 0 is greedy.
        top_p: probability of the nucleus, in (0, 1].
        top_k: number of tokens to sample from; -1 for all tokens. If `top_p` is also set, vLLM and the embedded engine
            apply it after `top_k` to the renormalised distribution; SGLang applies both to the same distribution.
        stop_token_ids: ids of tokens after which generation ends.
        ignore_eos: whether to continue after the model's end token.
        adapter: name of the served LoRA adapter; empty for the base model.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        check_numbers(self, {"max_new_tokens": 1}, where="sampling: ")
        for name in ("temperature", "top_p"):
            if not is_number(value := getattr(self, name)):
                raise ConfigError(f"sampling: {name} must be a number of Python, got {value!r}")
        if not self.temperature >= 0:
            raise ConfigError(f"sampling: temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling: top_p must be in (0, 1], got {self.top_p}")
        if not is_count(self.top_k) and (isinstance(self.top_k, bool) or self.top_k != -1):
            raise ConfigError(f"sampling: top_k must be >= 1, or -1 for all, got {self.top_k!r}")
        stops: object = self.stop_token_ids
        if not isinstance(stops, tuple | list) or not all(isinstance(s, int) for s in stops):
            raise ConfigError(
                f"sampling: stop_token_ids must be a tuple of integers, got {stops!r}"
            )
        for name, kind, words in (("ignore_eos", bool, "true or false"), ("adapter", str, "text")):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"sampling: {name} must be {words}, got {value!r}")
