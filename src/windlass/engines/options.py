"""Rules for an engine's options and settings. An update would write wrong weights if the engine broke a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from windlass.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """Allowed values of an engine's option or setting, for an engine that gets updates.

    Attributes:
        option: option of the command line; empty if only a configuration file or a default sets the value.
        allowed: values that work with updates, the usual value first. If this is empty, the option must not be
            given.
        why: reason why other values are refused.
        settings: names of the same setting in the running engine's configuration object.
        aliases: other spellings of `option`.
        key: name of the entry to check in the option's value, a JSON object; empty to check the whole value.
        transports: names of the engine's transports with which every value is allowed.
    """

    option: str
    allowed: tuple[object, ...]
    why: str
    settings: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    key: str = ""
    transports: tuple[str, ...] = ()

    def refusal_of(self, text: str) -> str:
        """Return why the option must not have the value `text`; empty if the value is allowed."""
        texts = [str(v) for v in self.allowed if v not in (None, "") and not isinstance(v, bool)]
        if self.key:
            text = _value_in(text, self.key)
        if text in texts:
            return ""
        if not texts:
            return f"must not be given: {self.why}"
        of_key = f"have the {self.key}" if self.key else "be"
        return f"must {of_key} {' or '.join(texts)}, got {text!r}: {self.why}"


def _value_in(text: str, key: str) -> str:
    """Return the value of a key in a JSON object; empty if the text is not an object or lacks the key."""
    with suppress(msgspec.MsgspecError):
        return str(msgspec.json.decode(text, type=dict[str, Any]).get(key, ""))
    return ""


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (option, value) for each option of a command line. Underscores in an option become dashes.

    The value is the text after `=`, or else the next word, even if the option takes no value.
    """
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option.startswith("-"):
            yield option.replace("_", "-"), value if equals else following


def refuse_options(words: Sequence[str], rules: Iterable[Rule], transport: str = "") -> None:
    """Check the words of an engine's command line. `transport` is the name of the engine's transport.

    Raises:
        ConfigError: an option breaks a rule; the message names the option and the reason.
    """
    rules = [rule for rule in rules if transport not in rule.transports]
    by_option = {option: rule for rule in rules for option in (rule.option, *rule.aliases)}
    for option, value in options_of(words):
        rule = by_option.get(option)
        if rule and (refusal := rule.refusal_of(value)):
            raise ConfigError(f"{option} {refusal}")


def refuse_settings(
    engine: str, rules: Iterable[Rule], setting: Callable[[str], object], transport: str = ""
) -> None:
    """Check the settings of a running engine. They come from the engine's options, files or defaults.

    `setting` returns the value of a setting by name. It raises LookupError if the engine's release has no setting of
    that name; the setting is then not checked. `transport` is the name of the engine's transport.

    Raises:
        ConfigError: a setting breaks a rule; the message names the setting and the reason.
    """
    for rule in rules:
        for place in () if transport in rule.transports else rule.settings:
            try:
                found = setting(place)
            except LookupError:
                continue
            if found not in rule.allowed:
                allowed = " or ".join(v for v in rule.allowed if v and isinstance(v, str))
                raise ConfigError(
                    f"{engine}: {place} must be {allowed or rule.allowed[0]}, got {found}: {rule.why}"
                )
