"""What is cut how, read off transformers' plans."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.recurrent.cuts import PlannedCut
from specdist.models.sharding.tp_layers import own_ranges, place_cut_layers
from specdist.models.sharding.tp_plan import check_heads, largest_size, planned_cuts
from specdist.utils.errors import UserError
from tests.models.all_families import build


def styles(family: str, layer: str) -> dict[str, PlannedCut]:
    """Those of one layer, by their names in it."""
    with torch.device("meta"):
        cuts = planned_cuts(build(family))
    return {name.removeprefix(layer): cut for name, cut in cuts.items() if name.startswith(layer)}


def test_values_of_another_width_than_keys_have_as_many_heads() -> None:
    """Counted by the width of keys, ranks had other heads of values than of keys, or were refused."""
    for layer, num_kv_heads in enumerate((2, 4)):
        found = styles("mimo_v2_flash", f"model.layers.{layer}.self_attn.")
        assert found["k_proj"] == found["v_proj"] == PlannedCut("colwise", (), True, num_kv_heads)


@pytest.mark.parametrize(
    ("family", "changes", "tp_size", "largest"),
    [
        ("llama", {}, 16, 8),
        ("llama", {}, 8, 1),  # if it does not fit, that is not why
        ("mimo_v2_flash", {}, 3, 2),
        ("bamba", {}, 16, 4),
        ("bamba", {"mamba_n_groups": 2}, 4, 2),
        ("mixtral", {"intermediate_size": 98}, 4, 2),
        ("mamba", {}, 3, 2),  # its channels are cut anywhere
    ],
)
def test_the_size_that_a_refusal_names_is_one_that_fits(
    tmp_path: Path, family: str, changes: dict[str, int], tp_size: int, largest: int
) -> None:
    """It was always 1, also where half the ranks would do."""
    build(family, **changes).save_pretrained(tmp_path)
    checkpoint = open_checkpoint("--target", str(tmp_path))
    assert largest_size(checkpoint, tp_size) == largest
    if tp_size == 16:
        with pytest.raises(UserError, match=rf"heads \(8\) .*: use --tp_size {largest}$"):
            check_heads(checkpoint, tp_size)


def test_attention_of_any_name_is_cut_between_heads() -> None:
    for family in ("llama", "longcat_flash", "gpt_neox", "gpt2"):
        found = {
            name: cut.is_of_heads
            for name, cut in styles(family, "").items()
            if "layers.0." in name or "h.0." in name
        }
        assert found and found == {name: "att" in name for name in found}, family


def test_what_a_plan_leaves_out_is_cut_before_the_output_projection() -> None:
    found = styles("glm4_moe_lite", "model.layers.1.")
    assert found["mlp.shared_experts.down_proj"].style == "rowwise"
    assert found["mlp.shared_experts.gate_proj"].style == "colwise"
    assert not {"mlp.gate", "mlp.experts.0.down_proj", "self_attn.q_a_proj"} & {*found}
    assert styles("gpt_oss", "model.layers.1.")["self_attn.sinks"].style == "colwise"
    # Attention over images keeps out of it.
    assert not styles("mistral3", "model.vision_tower.")


@pytest.mark.parametrize(
    ("num_ranks", "keys"),
    [(1, [(64, 96)]), (2, [(64, 80), (80, 96)]), (4, [(64, 80), (64, 80), (80, 96), (80, 96)])],
)
def test_ranks_share_key_value_heads_that_are_fewer(num_ranks: int, keys: list[tuple[int, int]]) -> None:
    """Of 4 heads of 16 numbers, and 2 of keys and of values: the ranks with a query's keys are its own."""
    cut = PlannedCut("packed_colwise", (64, 32, 32), True, 2)
    for rank, (begin, end) in enumerate(keys):
        size = 64 // num_ranks
        queries = range(rank * size, (rank + 1) * size)
        assert own_ranges(cut, 128, rank, num_ranks) == (
            queries,
            range(begin, end),
            range(begin + 32, end + 32),
        )
    with pytest.raises(ValueError, match="3 ranks do not divide"):
        own_ranges(cut, 128, 0, 3)


def test_what_cannot_be_cut_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as styles that a later transformers may have."""
    with torch.device("meta"):
        model = build("llama")
    model._tp_plan["model.layers.*.mlp.up_proj"] = "spiral"
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj, a Linear, by 'spiral'"):
        place_cut_layers(model, planned_cuts(model), None)
