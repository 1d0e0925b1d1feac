"""The head's arithmetic, its file, and the drafts that it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdist.models.files.checkpoint import open_checkpoint
from specdist.models.heads.examples import bytes_per_example
from specdist.models.heads.head import TokenHead, identify_draft, load_head, save_weights
from specdist.models.heads.info import DraftIdentity, HeadInfo, HeadKind, read_head_info
from specdist.utils.errors import UserError
from tests.job.pair import Pair
from tests.readme import documentation

HIDDEN_SIZE = 6
DRAFT = DraftIdentity(
    name="small", revision="a1b2", architecture="llama", hidden_size=HIDDEN_SIZE, fingerprint="abc"
)


def written(folder: Path, kind: HeadKind = "acceptance", *, depth: int = 2) -> tuple[TokenHead, Path]:
    torch.manual_seed(depth)
    head = TokenHead(HIDDEN_SIZE, depth)
    folder.mkdir(parents=True)
    info = HeadInfo(
        kind=kind,
        depth=depth,
        hidden_size=HIDDEN_SIZE,
        draft=DRAFT,
        weights_sha256=save_weights(head, folder),
        max_ratio=1.2 if kind == "verifier" else None,
        metrics={"auc": 0.8},
    )
    info.write(folder)
    return head, folder


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_logits_are_those_of_the_formula(depth: int) -> None:
    """x + SiLU(Wx + b), once per layer of its depth, then one linear layer."""
    torch.manual_seed(0)
    head = TokenHead(HIDDEN_SIZE, depth)
    hidden = torch.randn(5, HIDDEN_SIZE)
    expected = hidden
    for layer in head.residuals:
        inner = expected @ layer.weight.T + layer.bias
        expected = expected + inner * torch.sigmoid(inner)
    expected = expected @ head.output.weight[0] + head.output.bias
    found = head(hidden)
    assert found.shape == (5,)
    torch.testing.assert_close(found, expected)
    assert len(list(head.parameters())) == 2 * (depth + 1)
    assert head(hidden.bfloat16()).dtype == torch.float32
    assert head(hidden[:0]).shape == (0,)


def test_features_enter_as_an_addition_to_the_hidden_state() -> None:
    """As entropy and logarithms of the probabilities, which are bounded below."""
    torch.manual_seed(0)
    plain, head = TokenHead(HIDDEN_SIZE, 2), TokenHead(HIDDEN_SIZE, 2, uses_features=True)
    assert head.uses_features and not plain.uses_features
    plain.load_state_dict({name: value for name, value in head.state_dict().items() if "entry" not in name})
    hidden = torch.randn(4, HIDDEN_SIZE)
    features = torch.tensor([[1.5, 0.2, 3.0, 0.0], [0.3, 0.9, 0.0, 1.0], [0.4, 0.9, 0.1, 1.0]]).double()
    logs = torch.log(torch.tensor([[0.3, 0.9, 1e-6, 1.0], [0.4, 0.9, 0.1, 1.0]]))
    assert head.entry is not None
    added = torch.cat([features[:1].float(), logs]).T @ head.entry.weight.T + head.entry.bias
    torch.testing.assert_close(head(hidden, features), plain(hidden + added))
    assert torch.equal(plain(hidden, features), plain(hidden))


def test_the_drawing_state_and_the_features_each_add_their_part() -> None:
    """Known one after the other, where a token is drawn after the pass."""
    torch.manual_seed(0)
    head = TokenHead(HIDDEN_SIZE, 0, uses_features=True, hidden_state="drawing")
    plain = TokenHead(HIDDEN_SIZE, 0, hidden_state="drawing")
    hidden, features = torch.randn(4, HIDDEN_SIZE), torch.rand(3, 4)
    torch.testing.assert_close(head(hidden) + head.logits_of_draws(features), head(hidden, features))
    assert not torch.equal(head(hidden), head(hidden, features))
    assert torch.equal(plain.logits_of_draws(features), torch.zeros(4))


def test_a_head_of_an_older_version_reads_its_own_state(tmp_path: Path) -> None:
    _, folder = written(tmp_path / "head", "verifier", depth=0)
    document = json.loads((folder / "head.json").read_text())
    del document["hidden_state"]
    (folder / "head.json").write_text(json.dumps(document | {"format_version": 1}))
    assert read_head_info(folder).hidden_state == "own"
    assert not load_head(folder, kind="verifier", draft=DRAFT).reads_drawing_state
    (folder / "head.json").write_text(json.dumps(document | {"hidden_state": "drawing"}))
    assert load_head(folder, kind="verifier", draft=DRAFT).reads_drawing_state


@pytest.mark.parametrize("depth", [0, 3])
def test_a_head_survives_its_file(depth: int, tmp_path: Path) -> None:
    head, folder = written(tmp_path / "head", depth=depth)
    loaded = load_head(folder, kind="acceptance", draft=DRAFT)
    hidden = torch.randn(7, HIDDEN_SIZE)
    assert torch.equal(loaded(hidden), head(hidden))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    half = load_head(folder, kind="acceptance", draft=DRAFT).to(torch.bfloat16)
    assert half(hidden).dtype == torch.bfloat16
    info = read_head_info(folder)
    assert (info.depth, info.draft, info.metrics) == (depth, DRAFT, {"auc": 0.8})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 8}, "hidden_size 6 .*small.* has 8"),
        ({"architecture": "qwen2"}, "architecture llama .* has qwen2"),
        (
            {"fingerprint": "abd"},
            "was trained for small at revision a1b2, and --draft small has other weights",
        ),
    ],
)
def test_a_head_of_another_draft_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    _, folder = written(tmp_path / "head")
    other = DraftIdentity(**{**vars(DRAFT), **changes})
    with pytest.raises(UserError, match=message):
        load_head(folder, kind="acceptance", draft=other)


def test_a_head_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    _, acceptance = written(tmp_path / "acceptance")
    _, verifier = written(tmp_path / "verifier", "verifier", depth=0)
    assert read_head_info(verifier).max_ratio == 1.2
    with pytest.raises(UserError, match="for --policy specdecpp, but --policy sprinter reads"):
        load_head(acceptance, kind="verifier", draft=DRAFT)
    with pytest.raises(UserError, match=r"train one with jobs/train_head\.py --kind acceptance"):
        load_head(verifier, kind="acceptance", draft=DRAFT)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Weights that do not match the JSON, missing weights, invalid JSON, or JSON of a newer version."""
    _, folder = written(tmp_path / "head")
    _, other = written(tmp_path / "other", depth=1)
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    shutil.copy(other / "head.safetensors", mixed)
    with pytest.raises(UserError, match="its SHA-256 is not that of the JSON beside it"):
        load_head(mixed, kind="acceptance", draft=DRAFT)
    (mixed / "head.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be used"):
        load_head(mixed, kind="acceptance", draft=DRAFT)
    with pytest.raises(UserError, match="is not a head"):
        read_head_info(tmp_path)
    document = json.loads((folder / "head.json").read_text())
    for changes, message in (
        ({"format_version": 3}, "written by a newer specdist"),
        ({"kind": "value"}, "kind is 'value', but it should be 'acceptance' or 'verifier'"),
        ({"draft": {"name": "small"}}, "is not a head"),
    ):
        (folder / "head.json").write_text(json.dumps(document | changes))
        with pytest.raises(UserError, match=message):
            read_head_info(folder)


def fingerprint(folder: Path) -> str:
    return identify_draft(open_checkpoint("--draft", str(folder))).fingerprint


def test_the_identity_depends_on_every_weight_and_nothing_else(pair: Pair, tmp_path: Path) -> None:
    """A fine-tuned copy may differ in few layers only; a copy under another name is the same draft."""
    copied = shutil.copytree(pair.draft, tmp_path / "copied")
    (copied / "notes.txt").write_text("not a weight")
    (copied / "generation_config.json").write_text("{}")
    (copied / "model.safetensors").rename(copied / "weights.safetensors")
    assert fingerprint(copied) == fingerprint(pair.draft)
    weights = load_file(pair.draft / "model.safetensors")
    changed = shutil.copytree(pair.draft, tmp_path / "changed")
    for name, tensor in weights.items():
        save_file({**weights, name: tensor + 1e-3}, changed / "model.safetensors", metadata={"format": "pt"})
        assert fingerprint(changed) != fingerprint(pair.draft), name


def test_a_large_file_is_sampled_from_end_to_end(tmp_path: Path, pair: Pair) -> None:
    """A quarter of 4 MiB of weights is read: a change of a whole tensor is noticed wherever it is."""
    folder = shutil.copytree(pair.draft, tmp_path / "draft")
    weights = {f"layer.{index}": torch.full((2**14,), float(index)) for index in range(64)}

    def fingerprint_with(changed: dict[str, torch.Tensor]) -> str:
        save_file(weights | changed, folder / "model.safetensors")
        return fingerprint(folder)

    first = fingerprint_with({})
    assert fingerprint_with({}) == first
    for index in (0, 1, 30, 62, 63):
        assert fingerprint_with({f"layer.{index}": torch.zeros(2**14) - 1}) != first


def test_the_identity_of_a_draft_is_that_of_its_folder(pair: Pair, tmp_path: Path) -> None:
    identity = identify_draft(open_checkpoint("--draft", str(pair.draft)))
    assert (identity.hidden_size, identity.architecture, identity.revision) == (64, "llama", None)
    assert identity.name == str(pair.draft)
    snapshot = shutil.copytree(pair.draft, tmp_path / "models--a--b" / "snapshots" / "0123abc")
    assert identify_draft(open_checkpoint("--draft", str(snapshot))).revision == "0123abc"


def test_the_storage_of_examples_is_what_the_readme_says() -> None:
    text = " ".join(documentation().split())
    found = re.search(r"million of them take ([\d.]+) GB for a draft with a hidden size of ([\d,]+);", text)
    assert found is not None
    stored = bytes_per_example(int(found[2].replace(",", "")), "float16") / 1000
    assert float(found[1]) == pytest.approx(stored, abs=0.005)
