"""MTP heads in published files: every tensor is read where it belongs, and the target leaves them unread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from specdist.lab.plan.hardware import GPUS
from specdist.lab.plan.memory import fit
from specdist.models.batch.flat import FlatBatch
from specdist.models.draft_models.declaration import Placement
from specdist.models.draft_models.mtp import MTP
from specdist.models.drafters.files import open_mtp
from specdist.models.drafters.runner import DrafterRunner, check_drafter, load_drafter
from specdist.models.families.adapters import use_paged_attention
from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.loading.loading import load_whole
from specdist.models.loading.places import check_weights
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.sizes.sizes import size_of
from specdist.utils.errors import UserError
from tests.engine.harness import page_bytes
from tests.engine.mtp import FAMILIES, mtp_head, mtp_target, save_head, write_code
from tests.models.quantized_checkpoints import LAYOUTS, write
from tests.models.test_quantized import DEEPSEEK

CPU = torch.device("cpu")
HERE = Placement(torch.float32, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_files_give_the_head_and_the_target(family: str, tmp_path: Path) -> None:
    target = mtp_target(family, 96)
    head = mtp_head(target)
    target.save_pretrained(tmp_path)
    save_head(head, family, target.config.num_hidden_layers, tmp_path)
    is_foreign = family == "mimo"
    if is_foreign:
        write_code(tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path), trust_remote_code=is_foreign)
    check_weights(checkpoint, 1)
    loaded = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    for name, weight in target.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=0, atol=0)
    draft = open_mtp(checkpoint, "mtp")
    check_drafter(draft, checkpoint)
    runner = load_drafter(draft, checkpoint, HERE)
    found, expected = runner.model.state_dict(), head.state_dict()
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)
    size = size_of(draft, 4)
    assert size.num_parameters == sum(weight.numel() for weight in head.parameters())
    assert (size.num_read_numbers, size.num_state_numbers) == (128, 128)
    assert page_bytes(runner, 16) + 16 * 128 * 4 == 16 * size.cache_bytes_per_token(1)


def test_a_target_without_a_head_is_refused(tmp_path: Path) -> None:
    mtp_target("glm4_moe", 96).save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="holds no multi-token prediction head in its files"):
        open_mtp(open_checkpoint("--target", str(tmp_path / "bare")), "mtp")
    mtp_target("qwen3", 96).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="of the family qwen3, and"):
        open_mtp(open_checkpoint("--target", str(tmp_path / "other")), "mtp")


@pytest.mark.parametrize("projection_is_quantized", [False, True])
def test_a_quantised_head_says_what_its_plain_numbers_say(
    projection_is_quantized: bool, tmp_path: Path
) -> None:
    """In blocks of float8, experts and latent attention with it; published projections are plain, or not.
    Rounding moves little probability, and reading one layer's scales for another's moves most of it."""
    target = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).float().eval()
    head = mtp_head(target)
    target.save_pretrained(tmp_path)
    save_head(head, "deepseek_v3", 2, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    projection = weights.pop("model.layers.2.eh_proj.weight")
    plain = {"model.layers.2.eh_proj.weight": projection}
    save_file(weights | (plain if projection_is_quantized else {}), path)
    write(tmp_path, *LAYOUTS["FP8 in blocks (fp8)"])
    save_file(load_file(path) | ({} if projection_is_quantized else plain), path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    draft = open_mtp(checkpoint, "mtp")
    check_drafter(draft, checkpoint)
    runner = load_drafter(draft, checkpoint, HERE)
    quantized = {name for name, each in runner.model.named_modules() if isinstance(each, QuantizedLinear)}
    assert {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp.shared_experts.up_proj"} <= quantized
    assert ("mtp.eh_proj" in quantized) == projection_is_quantized
    use_paged_attention(head)
    distributions = [distribution(each) for each in (runner, DrafterRunner(head, CPU, MTP))]
    moved = (distributions[0] - distributions[1]).abs().sum(dim=1) / 2
    assert 0 < moved.median() < 0.02  # of a token at a border between experts more


def distribution(runner: DrafterRunner) -> Tensor:
    """[T, V]: after ten tokens with random states before them."""
    num_tokens = 10
    runner.allocate(num_pages=4, page_size=4, num_slots=1, max_seq_len=16)
    runner.pages.pages[0, :4] = np.arange(4)
    slots, positions = np.zeros(num_tokens, np.int64), np.arange(num_tokens)
    states = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1))
    runner.receive(slots, positions, states)
    batch = FlatBatch(2 + positions[1:], slots[1:], positions[1:])
    return runner.forward(batch, np.arange(num_tokens - 1)).softmax(dim=-1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_beside_its_model_has_the_same_embedding(is_tied: bool, tmp_path: Path) -> None:
    """And output head: they are in memory once, and the planner counts them once."""
    target = mtp_target("glm4_moe", 96, tie_word_embeddings=is_tied)
    target.save_pretrained(tmp_path)
    save_head(mtp_head(target), "glm4_moe", target.config.num_hidden_layers, tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    draft = open_mtp(checkpoint, "mtp")
    loaded = load_whole(checkpoint, dtype=torch.float32, device=CPU)
    runner = load_drafter(draft, checkpoint, Placement(torch.float32, CPU, beside=loaded))
    assert runner.model.get_input_embeddings() is loaded.get_input_embeddings()
    assert runner.model.get_output_embeddings() is loaded.get_output_embeddings()
    held = {id(each): each.nbytes for model in (loaded, runner.model) for each in model.parameters()}
    sizes = [size_of(each, 4) for each in (checkpoint, draft)]
    planned = fit(*sizes, GPUS["h100-sxm"], "colocated", tp_size=1, row_tokens=64).target.weight_bytes
    assert planned == sum(held.values())
    # The embedding is whole on every rank, and a rank of two has half of the head.
    whole, cut = (sizes[1].weight_bytes(1) - sizes[1].shared_bytes(tp_size) for tp_size in (1, 2))
    table = loaded.get_input_embeddings().weight.nbytes
    assert cut - whole == table


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_transformers_reads_the_same_files_and_says_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the families whose heads it has: of a text's tokens, and of one that the head has drafted."""
    target = mtp_target(family, 96)
    num_layers, length = target.config.num_hidden_layers, 12
    target.save_pretrained(tmp_path)
    save_head(mtp_head(target), family, num_layers, tmp_path)
    # It looks for the layer after the last one of published models.
    pattern = rf"model\.layers\.{num_layers}.*"
    monkeypatch.setattr(type(target), "_keys_to_ignore_on_load_unexpected", [pattern])
    whole = type(target).from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    theirs = MtpModel.from_pretrained(whole).float().eval()
    checkpoint = open_checkpoint("--target", str(tmp_path))
    own = load_drafter(open_mtp(checkpoint, "mtp"), checkpoint, HERE)
    own.allocate(num_pages=4, page_size=4, num_slots=1, max_seq_len=16)
    own.pages.pages[0, :4] = np.arange(4)
    tokens = torch.randint(2, 96, (length + 1,), generator=torch.Generator().manual_seed(0))
    slots, positions = np.zeros(length + 1, np.int64), np.arange(length + 1)
    with torch.inference_mode():
        states = whole.get_decoder()(tokens[None, :length]).last_hidden_state
        own.receive(slots[:length], positions[:length], states[0])
        for first, end in ((1, length), (length, length + 1)):
            batch = FlatBatch(tokens.numpy()[first:end], slots[first:end], positions[first:end])
            found = own.forward(batch, np.arange(end - first))
            read = states[:, : end - 1]
            said = theirs.forward_layer(
                0, read, torch.arange(end - 1)[None], None, input_ids=tokens[None, 1:end]
            )
            expected = theirs._project_to_logits(said)[0, first - 1 :]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            # Of the last token the head's own output stands for the target's state.
            states = torch.cat([states[:, : length - 1], said[:, -1:]], dim=1)
