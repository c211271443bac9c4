"""What a load by vLLM's reload leaves where, of which vLLM itself leaves more behind."""

from __future__ import annotations

import torch

from windlass.engines.vllm.rank import reloading


class Absorbed(torch.nn.Module):
    """Latent attention in float8: what it computes from a weight is no parameter, and made anew by every load."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 6))
        self.load(1.0)

    def load(self, value: float) -> None:
        made = torch.full((4, 6), value)
        self.keys, self.values = made[:, :4].T, made[:, 2:]


def test_what_attention_makes_anew_stays_where_graphs_know_it() -> None:
    model = torch.nn.Sequential(Absorbed())
    (attention,) = model.children()
    assert isinstance(attention, Absorbed)
    keys, values = attention.keys, attention.values
    with reloading(model):
        attention.load(2.0)
    assert attention.keys is keys
    assert attention.values is values
    assert (torch.cat([keys.T, values], 1) == 2.0).all()


def test_what_a_load_makes_in_another_shape_is_the_new_one() -> None:
    model = Absorbed()
    with reloading(model):
        model.keys = other = torch.zeros(3)
    assert model.keys is other
