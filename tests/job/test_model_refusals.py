"""Models that cannot work are refused by name before loading: damaged, unsupported or mismatched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdist.job.models.model_plan import plan_models
from specdist.utils.errors import UserError
from tests.job.launching import Ended, parse, read_output, refused, run_here
from tests.job.pair import NUM_VOCAB_TOKENS, Pair, random_llama, save, train_tokenizer, write_arrow


@pytest.fixture
def broken(pair: Pair, tmp_path: Path) -> Path:
    """A copy of the target, to be damaged."""
    folder = tmp_path / "broken"
    shutil.copytree(pair.target, folder)
    return folder


def test_other_tokenizers_are_refused_with_the_first_token_that_differs(
    options: dict[str, Any], no_models: None, tmp_path: Path
) -> None:
    """A draft of another family would propose ids that mean something else."""
    tokenizer = train_tokenizer(extra_text="zebra " * 100)
    draft = save(tmp_path / "draft", random_llama(), tokenizer)
    ids, known = tokenizer.get_vocab(), train_tokenizer().get_vocab()
    tokens, known_tokens = ({id_: token for token, id_ in v.items()} for v in (ids, known))
    first = next(id_ for id_ in sorted(tokens) if tokens[id_] != known_tokens[id_])
    refused(
        run_here(**(options | {"draft": draft}), output=tmp_path / "run"),
        f"--draft {draft}",
        f"token {first} is {known_tokens[first]!r} for the target and {tokens[first]!r} for the draft",
    )


def with_tokens(*tokens: str) -> PreTrainedTokenizerFast:
    """The pair's tokenizer with more tokens at the end."""
    tokenizer = train_tokenizer()
    assert len(tokenizer) == NUM_VOCAB_TOKENS
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


def test_a_draft_may_end_otherwise_and_have_other_tokens_at_the_end(
    pair: Pair, options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path
) -> None:
    """A base model drafts for a chat model: which tokens end a text is the target's to say."""
    wanted = read_output(greedy[0])["completion_ids"]
    base = with_tokens("<unused>", "<unknown>")
    base.eos_token, base.bos_token = "the", "a"
    longer = save(tmp_path / "longer", random_llama(vocab_size=NUM_VOCAB_TOKENS + 2), base)
    model = LlamaForCausalLM.from_pretrained(pair.draft)
    model.config.eos_token_id = base.eos_token_id
    shorter = save(tmp_path / "shorter", model, train_tokenizer())
    chat = LlamaForCausalLM.from_pretrained(pair.target)
    target = save(tmp_path / "chat", chat, with_tokens("<|im_start|>"))  # the model has no such token
    for changes in ({"draft": longer}, {"draft": shorter, "target": target}):
        ended = run_here(**(options | changes), output=tmp_path / f"run-{changes['draft'].name}")
        assert ended.code == 0, ended.stderr
        assert read_output(tmp_path / f"run-{changes['draft'].name}")["completion_ids"] == wanted


def test_a_token_that_the_draft_has_no_logits_for_is_refused(
    options: dict[str, Any], no_models: None, tmp_path: Path
) -> None:
    """The target could generate it. Padding may be missing from one model."""
    draft = save(tmp_path / "draft", random_llama(vocab_size=319), train_tokenizer())
    refused(
        run_here(**(options | {"draft": draft}), output=tmp_path / "run"),
        "has token 319", f"--draft {draft} has logits of only 319 ids",
    )  # fmt: skip


def test_a_token_of_the_tokenizer_alone_is_an_error_of_the_rows_that_have_it(
    pair: Pair, options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path
) -> None:
    """Fine-tunes add a pad token without an embedding for it: other rows run."""
    tokenizer = with_tokens("<pad>")
    tokenizer.pad_token = "<pad>"
    target = save(tmp_path / "target", LlamaForCausalLM.from_pretrained(pair.target), tokenizer)
    known = read_output(greedy[0])
    prompts = [known["prompt"][0].as_py(), "the <pad>"]
    path = write_arrow(tmp_path / "prompts.arrow", {"prompt": prompts})
    output = tmp_path / "run"
    changes = {"target": target, "draft": None, "prompts": path, "bad_words": ["<pad>"], "min_new_tokens": 1}
    assert run_here(**(options | changes), output=output).code == 0
    found = read_output(output)
    assert found["completion_ids"][0] == known["completion_ids"][0]
    assert found["finish_reason"].to_pylist()[1] == "error"
    assert "token 320 ('<pad>'), which the tokenizer has and the model has not" in found["error"][1].as_py()


def lose_weights(folder: Path) -> list[str]:
    (folder / "model-00002-of-00003.safetensors").unlink()
    return ["lacks model-00002-of-00003.safetensors", "model.safetensors.index.json", "fetch it again"]


def damage_end_token(folder: Path) -> list[str]:
    (folder / "generation_config.json").write_text('{"eos_token_id": "<|end|>"}')
    return ["generation_config.json cannot be used", "eos_token_id is '<|end|>', neither a token id nor"]


def widen_config(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 97}))
    return ["is of shape [64, 96] in the files, but config.json asks for [64, 97]", "fetch both again"]


@pytest.mark.parametrize("damage", [lose_weights, damage_end_token, widen_config])
def test_an_unusable_model_folder_is_refused(
    options: dict[str, Any],
    no_models: None,
    broken: Path,
    tmp_path: Path,
    damage: Callable[[Path], list[str]],
) -> None:
    """Downloads break off; every case is reported with the file's name, not with a library's traceback."""
    fragments = damage(broken)
    ended = run_here(**(options | {"target": broken, "draft": None}), output=tmp_path / "run")
    refused(ended, f"--target {broken}", *fragments)


@pytest.mark.parametrize(
    ("family", "settings", "tp_size", "fragments"),
    [
        ("bloom", {}, 1, ["family bloom", "attention registry", "cannot run it", "choose a model"]),
        ("t5", {}, 1, ["family t5", "not a causal language model"]),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            ["--tp_size 2", "heads (6)", "heads (3)"],
        ),
    ],
)
def test_a_family_that_cannot_run_is_refused_by_name(
    options: dict[str, Any],
    broken: Path,
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    tp_size: int,
    fragments: list[str],
) -> None:
    """Bloom would answer wrongly without an error."""
    AutoConfig.for_model(family, vocab_size=320, **settings).save_pretrained(broken)
    config = parse(**(options | {"target": broken, "draft": None}), tp_size=tp_size, output="unused")
    with pytest.raises(UserError) as error:
        plan_models(config)
    for fragment in [f"--target {broken}", *fragments]:
        assert fragment in str(error.value)
