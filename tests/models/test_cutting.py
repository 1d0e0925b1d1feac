"""A rank's shard of the output head."""

import pytest
import torch
from torch import nn

from specdist.models.cpu.linear import MIN_WEIGHTS, OneDnnLinears
from specdist.models.loading.conversions import Piece
from specdist.models.recurrent.cuts import cut_of
from specdist.models.sharding.cutting import VocabParallelHead, find_head, shard_head
from specdist.sampling.vocab_parallel import vocab_ranges
from specdist.utils.errors import UserError
from tests.models.families import VOCAB_SIZE, tiny_model


def filled(whole: nn.Linear, ids: range) -> VocabParallelHead:
    """A slice with its weights, cut as the loader cuts them."""
    head = VocabParallelHead(whole, ids).to_empty(device="cpu")
    for name, parameter in head.named_parameters():
        stored = whole.get_parameter(name).detach()
        (piece,) = Piece.whole(name, stored.shape).on_rank(cut_of(head, name))
        assert piece.shape == parameter.shape
        parameter.data.copy_(piece.of(stored))
    return head


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_shards_of_a_head_together_are_the_whole_without_its_padding(has_bias: bool) -> None:
    whole = nn.Linear(8, VOCAB_SIZE, bias=has_bias)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    parts = [filled(whole, ids)(hidden) for ids in vocab_ranges(VOCAB_SIZE - 5, 4)]
    # A product of another width may be summed in another order.
    torch.testing.assert_close(torch.cat(parts, dim=1), whole(hidden)[:, :-5], atol=1e-6, rtol=1e-6)


def test_a_shard_of_a_head_goes_through_onednn_like_a_whole_one() -> None:
    """It is not a plain ``nn.Linear``, and a head is the largest layer of all."""
    head = filled(nn.Linear(8, MIN_WEIGHTS // 4), range(MIN_WEIGHTS // 8))
    OneDnnLinears(head)
    assert ("forward" in vars(head)) == torch.backends.mkldnn.is_available()


def test_a_head_that_is_not_a_linear_layer_is_refused() -> None:
    model = tiny_model("llama")
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    name, head = find_head(model)
    assert name == "lm_head"
    with pytest.raises(UserError, match=r"output head is a Sequential.*--tp_size 1"):
        shard_head(model, name, head, range(3))
