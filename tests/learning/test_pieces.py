"""A pass in pieces is the model's own, forward and backward; weights are replaced in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdist.learning.adaptation import copy_of
from specdist.learning.pieces import PiecewiseModel, finished, largest_difference
from specdist.models.flat import FlatBatch
from specdist.models.replacing import parameters_of, replace_weights
from specdist.models.runner import Acceleration
from tests.engine.harness import CPU, PAGE_SIZE, paged_runner
from tests.models.families import FAMILIES, VOCAB_SIZE, tiny_model

KNOWN = [name for name in FAMILIES if name != "gpt_neo"]


@pytest.mark.parametrize("family", KNOWN)
def test_two_chunks_give_the_logits_of_the_whole(family: str) -> None:
    model = tiny_model(family)
    model = copy_of(model, dict(model.named_parameters()), CPU).eval()
    assert largest_difference(model, VOCAB_SIZE) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_gradients_of_a_chunk_are_autograds(family: str) -> None:
    """Of all weights but the input embeddings'."""
    model = tiny_model(family).float()
    model.set_attn_implementation("sdpa")
    ids_T = torch.arange(20) * 7 % VOCAB_SIZE
    piecewise = PiecewiseModel(model)

    def losses(hidden_TE: Tensor):  # type: ignore[no-untyped-def]
        for begin in range(0, 19, 8):
            part_ME, next_M = hidden_TE[begin : min(begin + 8, 19)], ids_T[begin + 1 : begin + 9]
            yield F.cross_entropy(piecewise.logits(part_ME), next_M, reduction="sum")

    total = finished(piecewise.train(ids_T, piecewise.new_cache(), losses))
    own = dict(model.named_parameters())
    found = {name: weight.grad.clone() for name, weight in own.items() if weight.grad is not None}
    model.zero_grad()
    whole = F.cross_entropy(model(ids_T[None]).logits[0, :-1], ids_T[1:], reduction="sum")
    whole.backward()
    assert total == pytest.approx(float(whole.detach()), rel=1e-5)
    embeddings = model.get_input_embeddings().weight
    assert {name for name in own if own[name] is not embeddings} == set(found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, own[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_runner_s_new_weights_are_another_model_s(is_compiled: bool) -> None:
    """Whatever was made of the old ones."""
    first, second = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    runners = [paged_runner(each, Acceleration(is_compiled=is_compiled)) for each in (first, second)]
    batch = FlatBatch(torch.arange(12).numpy() + 3, torch.zeros(12).long().numpy(), torch.arange(12).numpy())
    for runner in runners:
        runner.allocate(num_pages=8, page_size=PAGE_SIZE, num_slots=1, max_seq_len=32)
        runner.pages.pages[0, :8] = range(8)
    replace_weights(runners[0], dict(second.named_parameters()))
    logits = [runner.forward(batch, range(12)) for runner in runners]
    assert torch.equal(*logits)
    assert all(
        torch.equal(each, second.get_parameter(name)) for name, each in parameters_of(runners[0]).items()
    )
