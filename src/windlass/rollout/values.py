"""Plain values in messages: numbers, and values that users give, which msgpack must be able to encode."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError, ProtocolError

LARGEST_INTEGER = (1 << 63) - 1
"""Largest integer in a message. msgpack cannot encode much larger integers, and a message that cannot be encoded
would block all later messages."""
MAX_VALUE_NBYTES = 16 << 20
"""Largest size of a workflow's return value or arguments."""
MAX_VALUE_ITEMS = 1 << 17
"""Largest number of items in a workflow's return value or arguments, including nested items. This limits the
memory after decoding: an empty list takes 1 byte in a message and 64 bytes in memory."""
SMALL_VALUE_NBYTES = 4096
"""Size up to which `check_value` decodes a value without counting its items first."""


class _Integers(msgspec.Struct, array_like=True, gc=False):
    """Plain integers. msgspec checks 128 of them in 1 us (an EPYC core), and Python code in 3 to 4 us.

    With the tuple's type in place of a struct, msgspec would compute the hash of the type in each call, which takes 0.5 us.
    """

    values: tuple[Annotated[int, msgspec.Meta(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)], ...]


class _Numbers(msgspec.Struct, array_like=True, gc=False):
    """Plain numbers; see `_Integers`."""

    values: tuple[float, ...]


@runtime_checkable
class ArrayLike(Protocol):
    """Array, tensor or scalar of NumPy, torch or a similar library."""

    @property
    def ndim(self) -> int:
        """Number of dimensions; 0 for a scalar."""
        ...

    def item(self) -> Any:
        """Return the only element as a Python number."""
        ...

    def tolist(self) -> Any:
        """Return the elements as Python numbers, in nested lists."""
        ...


def as_number(what: str, value: object) -> float:
    """Return a number, or the only element of an array or tensor, as a Python float.

    Raises:
        ConfigError: the value is not one number; the message begins with `what`.
    """
    refusal = f"{what} must be one number, got {_short(value)}"
    try:
        plain: Any = value.item() if isinstance(value, ArrayLike) else value
        found = float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(refusal) from error
    # `float` accepts text such as "1.5". Refuse text, because it is probably a mistake of the caller.
    if isinstance(plain, str | bytes):
        raise ConfigError(refusal)
    return found


def plain_number(what: str, value: object) -> float:
    """Return a number as a Python float, see `as_number`; refuse NaN and infinity.

    Raises:
        ConfigError: the value is not a finite number; the message begins with `what`.
    """
    found = as_number(what, value)
    if not math.isfinite(found):
        raise ConfigError(f"{what} must be finite, got {_short(value)}")
    return found


def plain_numbers(what: str, values: object) -> tuple[float, ...]:
    """Return a sequence, array or tensor as finite Python numbers.

    Raises:
        ConfigError: a value is not a finite number; the message begins with `what`.
    """
    try:
        numbers = msgspec.convert((values,), _Numbers).values
    except msgspec.ValidationError:
        numbers = None
    # A sum is finite only if all its terms are finite. A sum of finite numbers may overflow; then look at each number.
    if numbers is not None and math.isfinite(sum(numbers)):
        return numbers
    found = _listed(what, values, "numbers")
    return tuple([plain_number(f"{what}[{index}]", value) for index, value in enumerate(found)])


def plain_integers(what: str, values: object) -> tuple[int, ...]:
    """Return a sequence, array or tensor of integers as Python integers.

    Raises:
        ConfigError: a value is not an integer of at most 63 bits; the message begins with `what`.
    """
    try:
        return msgspec.convert((values,), _Integers).values
    except msgspec.ValidationError:
        found = _listed(what, values, "integers")
    try:
        # `operator.index` returns booleans unchanged, and msgpack would send them as booleans. So call `int`, too.
        plain = tuple([int(operator.index(each)) for each in found])
    except (TypeError, RuntimeError) as error:
        raise ConfigError(f"{what} must be integers, got {_short(values)}") from error
    if plain and not (min(plain) >= -LARGEST_INTEGER and max(plain) <= LARGEST_INTEGER):
        raise ConfigError(f"{what} must be integers of at most 63 bits, got {_short(values)}")
    return plain


def plain_booleans(what: str, values: object) -> tuple[bool, ...]:
    """Return a sequence, array or tensor of booleans as Python booleans; 0 and 1 are accepted.

    Raises:
        ConfigError: a value is not a boolean; the message begins with `what`.
    """
    if type(values) is tuple and set(map(type, values)) <= {bool}:
        return values
    found = _listed(what, values, "booleans")
    try:
        plain = [int(operator.index(each)) for each in found]
    except (TypeError, RuntimeError) as error:
        raise ConfigError(f"{what} must be booleans, got {_short(values)}") from error
    if not {*plain} <= {0, 1}:
        raise ConfigError(f"{what} must be booleans, got {_short(values)}")
    return tuple(map(bool, plain))


def _listed(what: str, values: object, kind: str) -> list[Any]:
    """Return the values of a sequence, array or tensor as a list; raise `ConfigError` for text and other types."""
    if isinstance(values, ArrayLike):
        values = values.tolist()
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return list(values)
    raise ConfigError(f"{what} must be a sequence of {kind}, got {_short(values)}")


def _short(value: object) -> str:
    """Return the `repr` of a value, with at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain_value(value: object) -> object:
    """Return a NumPy or torch value as a Python value.

    Raises:
        TypeError: the value is of another type.
    """
    if isinstance(value, ArrayLike):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a number, text, bytes, a list, a map or None")


def encode_value(
    what: str,
    value: object,
    *,
    plain: Callable[[object], object] = plain_value,
    max_nbytes: int = MAX_VALUE_NBYTES,
) -> bytes:
    """Encode a msgpack-plain value; arrays and tensors become lists, and NumPy or torch scalars become numbers.

    Args:
        what: beginning of the error message.
        value: value to encode.
        plain: function that converts values that msgspec cannot encode. It raises TypeError for other values.
        max_nbytes: largest size of the encoded value.

    Raises:
        ConfigError: the value is not msgpack-plain, or `check_value` refuses the encoded value.
    """
    encoded = encode_plain(what, value, plain)
    try:
        check_value(what, encoded, max_nbytes)
    except ProtocolError as error:
        raise ConfigError(str(error)) from error
    return encoded


def encode_plain(
    what: str, value: object, plain: Callable[[object], object] = plain_value
) -> bytes:
    """Encode a value of any size for a file of the job. For arguments see `encode_value`.

    Raises:
        ConfigError: the value is not msgpack-plain.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{what}: must be msgpack-plain, got {type(value).__name__}: {error}"
        ) from error


def plain_map(what: str, values: object) -> dict[str, object]:
    """Return a mapping with text keys and msgpack-plain values in the form that a peer gets after decoding.

    Raises:
        ConfigError: a key is not text, or a value is not msgpack-plain; the message begins with `what`.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{what} must be a mapping with text keys, got {_short(values)}")
    plain: dict[str, object] = msgspec.msgpack.decode(encode_value(what, dict(values)))
    return plain


def check_value(what: str, value: bytes, max_nbytes: int = MAX_VALUE_NBYTES) -> None:
    """Check that `value` is valid msgpack, so that decoding it later cannot fail.

    A value of more than `SMALL_VALUE_NBYTES` bytes may contain at most `MAX_VALUE_ITEMS` items.

    Raises:
        ProtocolError: `value` is not msgpack, has more than `max_nbytes` bytes, or contains too many items. The error
            message begins with `what`.
    """
    if len(value) > max_nbytes:
        raise ProtocolError(f"{what} must have at most {max_nbytes} bytes, got {len(value)}")
    if len(value) > SMALL_VALUE_NBYTES and not _has_few_items(value):
        raise ProtocolError(
            f"{what} must contain at most {MAX_VALUE_ITEMS} values, got more in {len(value)} bytes"
        )
    try:
        msgspec.msgpack.decode(value)
    except DECODE_ERRORS as error:
        raise ProtocolError(
            f"{what} must be valid msgpack, got {len(value)} bytes: {error}"
        ) from error


_LENGTH_NBYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of an encoded bin, ext or str value -> size in bytes of the length field that follows."""
_PAYLOAD_NBYTES = bytes(
    [0] * 160  # small integers, headers of small maps and arrays
    + [*range(32)]  # short strings
    + [0] * 7  # nil, booleans, bin
    + [1] * 3  # ext: its type
    + [4, 8, 1, 2, 4, 8, 1, 2, 4, 8]  # floats, integers
    + [2, 3, 5, 9, 17]  # ext of fixed lengths, with its type
    + [0] * 3  # str
    + [2, 4, 2, 4]  # headers of arrays and maps
    + [0] * 32  # small negative integers
)
"""First byte of an encoded value -> number of bytes that follow it. This number excludes a length field and the bytes
that the field counts. It also excludes the items of an array or map, because each item counts as a separate value."""


def _has_few_items(value: bytes) -> bool:
    """Return whether an encoded value has at most `MAX_VALUE_ITEMS` items; read only the items' headers."""
    at = num_items = 0
    while at < len(value):
        num_items += 1
        if num_items > MAX_VALUE_ITEMS:
            return False
        code = value[at]
        after = at + 1 + _LENGTH_NBYTES.get(code, 0)
        at = after + int.from_bytes(value[at + 1 : after]) + _PAYLOAD_NBYTES[code]
    return True
