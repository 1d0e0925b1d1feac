"""Which files of a folder with several models are read: those that transformers reads."""

import itertools
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from specdist.models.files.weight_files import INDEX_SUFFIX, SAFETENSORS_NAME, find_weight_files
from specdist.utils.errors import UserError

SHARD, INDEX = "model-00001-of-00001.safetensors", f"{SAFETENSORS_NAME}{INDEX_SUFFIX}"
OTHERS = ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin")


def placed(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        if name.endswith(".bin"):
            torch.save({"x": torch.zeros(1)}, folder / name)
        elif name.endswith(".json"):
            (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": {"x": SHARD}}))
        else:
            save_file({"x": torch.zeros(1)}, folder / name, {"format": "pt"})
    return folder


def test_of_several_models_in_a_folder_transformers_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stale index, or Mistral's own file, would give the tokens of another model, or a refusal; what is
    left out is said."""
    caplog.set_level(logging.INFO)
    safe = [("model.safetensors",), (SHARD, INDEX), ("model.safetensors", SHARD, INDEX)]
    beside = [each for number in range(4) for each in itertools.combinations(OTHERS, number)]
    for number, names in enumerate(own + more for own in safe for more in beside):
        folder = placed(tmp_path / str(number), *dict.fromkeys(names))
        theirs, _ = _get_resolved_checkpoint_files(str(folder), None, None, None, None, False)
        caplog.clear()
        assert [*map(str, find_weight_files("--target", "it", folder))] == theirs, names
        left_out = {name for name in names if name.endswith(".safetensors")} - {Path(theirs[0]).name}
        assert all(name in caplog.text for name in left_out) and bool(left_out) == bool(caplog.text)
    named = placed(tmp_path / "named", "a.safetensors", "model.safetensors")
    found = find_weight_files("--target", "it", named, first="a.safetensors")
    assert found == (named / "a.safetensors",)


def test_files_without_an_index_that_may_be_of_two_models_are_refused(tmp_path: Path) -> None:
    """Of tensors that two of them hold, the last one counted without a word."""
    with pytest.raises(UserError, match=r"a.safetensors and b.safetensors both hold x, and no index"):
        find_weight_files("--target", "it", placed(tmp_path / "2", "a.safetensors", "b.safetensors"))
    with pytest.raises(UserError, match=r"no \*.safetensors files but Mistral's own"):
        find_weight_files("--target", "it", placed(tmp_path / "m", OTHERS[0]))
    with pytest.raises(UserError, match=r"pickled \*.bin files, load it once with transformers"):
        find_weight_files("--target", "it", placed(tmp_path / "p", OTHERS[2]))
