"""Sampling parameters of a request."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import msgspec

from windlass.errors import ConfigError

NUM_SEEDS = 1 << 31
"""Number of seeds; every engine accepts seeds in [0, `NUM_SEEDS`)."""
_LARGEST_BIAS = 100.0
_T = TypeVar("_T")
_REGEX_SIGNS = re.compile(r"([\\^$.|?*+()\[\]{}])")


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 1."""
    return is_integer(value) and value >= 1


def is_number(value: object) -> bool:
    """Return whether a value is a Python integer or float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, with SGLang's names.

    Attributes:
        max_new_tokens: maximum number of generated tokens, at least 1.
        temperature: temperature, >= 0 and finite; 0 is greedy.
        top_p: probability of the nucleus, in (0, 1].
        top_k: number of tokens to sample from; -1 for all tokens. If `top_p` is also set, vLLM and the embedded engine
            apply it after `top_k` to the renormalised distribution; SGLang applies both to the same distribution.
        min_p: in [0, 1]. Tokens are sampled only if their probability is at least this share of the largest one.
        repetition_penalty: > 0. A value above 1 makes tokens of the prompt and of the answer less probable.
        frequency_penalty, presence_penalty: in [-2, 2]. Subtracted from the logit of a token: the first one for each time
            that the answer contains the token, the second one once. If an update aborts the answer, the answer is
            generated again from the prompt, because an engine counts only the tokens that it generated in one request.
        logit_bias: token id -> number in [-100, 100] that is added to the token's logit.
        sampling_seed: seed of the answer, in [0, 2**31); None for a random one. In a group, sample i has this seed plus i.
            SGLang needs `--enable-deterministic-inference`.
        priority: priority of the request; 0 if the engine does not schedule by priority. vLLM (`--scheduling-policy priority`)
            handles lower numbers first. SGLang (`--enable-priority-scheduling`) handles higher numbers first.
        min_new_tokens: number of tokens before which no end token or stop token is sampled.
        stop: generation ends after any of these texts. The engine needs a tokenizer. SGLang and the embedded engine also end
            if the answer has fewer than `min_new_tokens` tokens; vLLM then continues.
        json_schema, regex, ebnf, choice: JSON schema as text, regular expression, grammar in EBNF, or texts, one of which the
            answer must match. Only one of them, and only with vLLM and SGLang. If an update aborts the answer, the
            answer is generated again from the prompt.
        stop_token_ids: ids of tokens after which generation ends.
        ignore_eos: whether to continue after the model's end token.
        adapter: name of the served LoRA adapter; empty for the base model.

    Raises:
        ConfigError: a value is out of range or has a wrong type, or several of `json_schema`, `regex`, `ebnf` and `choice`
            are given.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    sampling_seed: int | None = None
    priority: int = 0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    regex: str = ""
    ebnf: str = ""
    choice: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            # Defaults need no check. A worker decodes these parameters for each attempt, and most fields have their default.
            if value is default:
                continue
            for is_met, rule in _RULES[name]:
                if not is_met(value):
                    raise ConfigError(f"sampling: {name} must be {rule}, got {value!r}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"sampling: min_new_tokens must be <= max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens!r}"
            )
        structures = [name for name in _STRUCTURES if getattr(self, name)]
        if len(structures) > 1:
            first, second = structures[:2]
            raise ConfigError(
                f"sampling: {second} must be empty if {first} is set, got {getattr(self, second)!r}"
            )

    @property
    def has_structure(self) -> bool:
        """Whether answers must match a JSON schema, a regular expression, a grammar or one of several texts."""
        return bool(self.json_schema or self.regex or self.ebnf or self.choice)

    @property
    def needs_whole_answer(self) -> bool:
        """Whether an engine must generate the whole answer in one request, because it looks at the tokens of the request."""
        return self.has_structure or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def expression(self) -> str:
        """Regular expression that answers must match: `regex`, or an expression for `choice`."""
        return self.regex or "|".join(_REGEX_SIGNS.sub(r"\\\1", text) for text in self.choice)

    def seeded(self, offset: int) -> SamplingParams:
        """Return these parameters with `offset` added to the seed. Without a seed, return them unchanged."""
        if self.sampling_seed is None or not offset:
            return self
        seed = (self.sampling_seed + offset) % NUM_SEEDS
        return msgspec.structs.replace(self, sampling_seed=seed)


def _is_seed(value: object) -> bool:
    """Return whether a value is a seed or None."""
    return value is None or (type(value) is int and 0 <= value < NUM_SEEDS)


def _is_bias(bias: object) -> bool:
    """Return whether a value maps token ids to numbers in the range of `logit_bias`."""
    return isinstance(bias, Mapping) and all(
        type(token) is int and token >= 0 and is_number(value) and abs(value) <= _LARGEST_BIAS
        for token, value in bias.items()
    )


def _are_all(values: object, kind: type[_T]) -> TypeGuard[Sequence[_T]]:
    """Return whether `values` is a tuple or list of values of this type."""
    return isinstance(values, tuple | list) and all(isinstance(each, kind) for each in values)


def _are_texts(values: object) -> bool:
    """Return whether `values` is a tuple or list of texts that are not empty."""
    return _are_all(values, str) and all(values)


_Rule = tuple[Callable[[Any], bool], str]
"""Function that returns whether a value meets the rule, and the text of the rule."""
_NUMBER: _Rule = (is_number, "a Python int or float")
_TEXT: _Rule = (lambda value: isinstance(value, str), "text")
_TEXTS: _Rule = (_are_texts, "a tuple of texts, none of them empty")
_PENALTY: _Rule = (lambda value: -2 <= value <= 2, "in [-2, 2]")
_RULES: Mapping[str, tuple[_Rule, ...]] = {
    "max_new_tokens": ((is_integer, "an integer >= 1"), (is_count, ">= 1")),
    "temperature": (_NUMBER, (lambda value: 0 <= value < math.inf, ">= 0 and finite")),
    "top_p": (_NUMBER, (lambda value: 0 < value <= 1, "in (0, 1]")),
    "top_k": ((lambda value: value == -1 or is_count(value), ">= 1, or -1 for all"),),
    "min_p": (_NUMBER, (lambda value: 0 <= value <= 1, "in [0, 1]")),
    "repetition_penalty": (_NUMBER, (lambda value: 0 < value < math.inf, "> 0 and finite")),
    "frequency_penalty": (_NUMBER, _PENALTY),
    "presence_penalty": (_NUMBER, _PENALTY),
    "logit_bias": ((_is_bias, "a mapping from token ids to numbers in [-100, 100]"),),
    "sampling_seed": ((_is_seed, f"an integer in [0, {NUM_SEEDS}), or None"),),
    "priority": ((lambda value: type(value) is int, "an integer"),),
    "min_new_tokens": ((is_integer, "an integer >= 0"), (lambda value: value >= 0, ">= 0")),
    "stop": (_TEXTS,),
    "json_schema": (_TEXT,),
    "regex": (_TEXT,),
    "ebnf": (_TEXT,),
    "choice": (_TEXTS,),
    "stop_token_ids": ((lambda value: _are_all(value, int), "a tuple of integers"),),
    "ignore_eos": ((lambda value: isinstance(value, bool), "true or false"),),
    "adapter": (_TEXT,),
}
"""Field -> its rules. A field must meet its first rule before the second one is asked."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_STRUCTURES = ("json_schema", "regex", "ebnf", "choice")
