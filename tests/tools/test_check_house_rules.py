"""The check of house rules finds uses of our private names in tests, and errors that a docstring does not name."""

from __future__ import annotations

import pytest

from tools.check_house_rules import private_uses, unlisted_errors


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("rank._sent", "_sent"),
        ("rank.link()._sent.clear()", "_sent"),
        ("rank._sent = 1", "_sent"),
        ("self.rank._sent", "_sent"),
        ("from windlass.net import _sent", "_sent"),
        ("import windlass.net\nwindlass.net._sent()", "_sent"),
        ("patch.setattr(rank, '_sent', 1)", "_sent"),
        ("patch.setattr('windlass.net._sent', 1)", "_sent"),
        ("getattr(rank, '_sent', None)", "_sent"),
    ],
)
def test_a_private_name_of_another_module_is_found(line: str, name: str) -> None:
    assert [found for _, found in private_uses(line)] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._neg_view(x)",
        "from torch._C import _find\n_find()",
        "import os\nos._exit(1)",
        "report._replace(failed=True)",
        "self._table\nsuper()._table",
        "class Rank:\n    def _send(self): ...\nRank()._send()",
        "rank.__class__",
        "patch.setattr(rank, 'sent', 1)",
    ],
)
def test_other_names_are_allowed(text: str) -> None:
    assert private_uses(text) == []


@pytest.mark.parametrize(
    "body",
    [
        "raise ConfigError('x')",
        "if x:\n        raise ConfigError",
        "try:\n        f()\n    except KeyError as error:\n        raise ConfigError('x') from error",
        "with f():\n        for y in x:\n            raise ConfigError('x')",
        "try:\n        raise ConfigError('x')\n    except KeyError:\n        pass",
    ],
)
def test_an_error_that_the_docstring_does_not_name_is_found(body: str) -> None:
    source = f'def read(x):\n    """Read."""\n    {body}\n'
    assert [found[1:] for found in unlisted_errors(source)] == [("read", "ConfigError")]


@pytest.mark.parametrize(
    ("docstring", "body"),
    [
        ("Read.\n\n    Raises:\n        ConfigError: x is wrong.\n    ", "raise ConfigError('x')"),
        ("Read.\n\n    Raises:\n        ValueError: x is wrong.\n    ", "raise ConfigError('x')"),
        ("See `Reader.read`.", "raise ConfigError('x')"),
        ("Read. For the errors, see `Reader.read`.", "raise ConfigError('x')"),
        ("Read.", "raise NotImplementedError"),
        ("Read.", "raise error"),
        ("Read.", "try:\n        raise ConfigError('x')\n    except ConfigError:\n        pass"),
        (
            "Read.",
            "try:\n        raise ConfigError('x')\n    except (KeyError, ValueError):\n        pass",
        ),
        ("Read.", "try:\n        raise ConfigError('x')\n    except:\n        pass"),
        ("Read.", "def inner():\n        raise ConfigError('x')"),
    ],
)
def test_named_errors_and_errors_that_stay_inside_are_accepted(docstring: str, body: str) -> None:
    assert unlisted_errors(f'def read(x):\n    """{docstring}"""\n    {body}\n') == []


def test_private_functions_name_their_errors_too() -> None:
    source = 'def _read(x):\n    """Read."""\n    raise ConfigError("x")\n'
    assert [found[1:] for found in unlisted_errors(source)] == [("_read", "ConfigError")]


def test_a_reference_to_another_subject_does_not_name_errors() -> None:
    source = 'def read(x):\n    """Read a row; see `Row`."""\n    raise ConfigError("x")\n'
    assert [found[1:] for found in unlisted_errors(source)] == [("read", "ConfigError")]
