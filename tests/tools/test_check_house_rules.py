"""The check of house rules finds uses of our private names in tests, and no others."""

from __future__ import annotations

import pytest

from tools.check_house_rules import private_uses


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
