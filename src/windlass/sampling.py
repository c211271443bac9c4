"""Sampling parameters of a request."""

from __future__ import annotations

import math

import msgspec

from windlass.config import check_numbers
from windlass.errors import ConfigError


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> bool:
    """Return whether a value is a Python integer or float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_all(values: object, kind: type) -> bool:
    """Return whether `values` is a tuple or list of values of this type."""
    return isinstance(values, tuple | list) and all(isinstance(each, kind) for each in values)


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, with SGLang's names.

    Attributes:
        max_new_tokens: maximum number of generated tokens, at least 1.
        temperature: temperature; 0 is greedy.
        top_p: probability of the nucleus, in (0, 1].
        top_k: number of tokens to sample from; -1 for all tokens. If `top_p` is also set, vLLM and the embedded engine
            apply it after `top_k` to the renormalised distribution; SGLang applies both to the same distribution.
        min_p: in [0, 1]. Tokens are sampled only if their probability is at least this share of the largest one.
        repetition_penalty: > 0. A value above 1 makes tokens of the prompt and of the answer less probable.
        min_new_tokens: number of tokens before which no end token or stop token is sampled.
        stop: generation ends after any of these texts. The engine needs a tokenizer.
        json_schema, regex: JSON schema as text, or regular expression, that the answer must match. Only one of them, and
            only with vLLM and SGLang. If an update aborts the answer, the answer is generated again from the prompt.
        stop_token_ids: ids of tokens after which generation ends.
        ignore_eos: whether to continue after the model's end token.
        adapter: name of the served LoRA adapter; empty for the base model.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    regex: str = ""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        check_numbers(self, {"max_new_tokens": 1, "min_new_tokens": 0}, where="sampling: ")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not is_number(value := getattr(self, name)):
                raise ConfigError(f"sampling: {name} must be a number of Python, got {value!r}")
        is_all = self.top_k == -1 and not isinstance(self.top_k, bool)
        rules = {
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (is_count(self.top_k) or is_all, ">= 1, or -1 for all"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "> 0 and finite"),
            "min_new_tokens": (
                self.min_new_tokens <= self.max_new_tokens,
                f"<= max_new_tokens={self.max_new_tokens}",
            ),
            "stop": (
                _are_all(self.stop, str) and all(self.stop),
                "a tuple of texts, none of them empty",
            ),
            "stop_token_ids": (_are_all(self.stop_token_ids, int), "a tuple of integers"),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "true or false"),
            "adapter": (isinstance(self.adapter, str), "text"),
            "json_schema": (isinstance(self.json_schema, str), "text"),
            "regex": (isinstance(self.regex, str), "text"),
        }
        for name, (is_met, rule) in rules.items():
            if not is_met:
                raise ConfigError(f"sampling: {name} must be {rule}, got {getattr(self, name)!r}")
        if self.json_schema and self.regex:
            raise ConfigError(f"sampling: regex must be empty with json_schema, got {self.regex!r}")

    @property
    def has_structure(self) -> bool:
        """Whether answers must match a JSON schema or a regular expression."""
        return bool(self.json_schema or self.regex)
