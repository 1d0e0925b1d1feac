"""The demo pair, trained for a moment: what a complete folder holds, and when it is built again."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist.lab.demo import pair
from specdist.lab.demo.config import PairConfig
from specdist.lab.demo.pair import NUM_PROMPTS, Document, load_documents, train_demo

STRANGE_TEXT = "héllo  wörld\n\n\tif x:  # 日本 \N{SNOWMAN}\n"
Parts = tuple[list[Document], list[Document]]


@pytest.fixture(scope="module")
def documents() -> Parts:
    training, held_out = load_documents()
    return training[:40], held_out


@pytest.fixture(scope="module")
def folder(documents: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a pair that has been built."""
    output = tmp_path_factory.mktemp("demo") / "pair"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "load_documents", lambda: documents)
        assert "built in" in train_demo(PairConfig(output=str(output), max_seconds=1.0))[0]
    return output


def test_models_load_and_share_one_tokenizer(folder: Path) -> None:
    target_tokenizer, draft_tokenizer = (
        AutoTokenizer.from_pretrained(folder / role) for role in ("target", "draft")
    )
    assert target_tokenizer.get_vocab() == draft_tokenizer.get_vocab()
    assert target_tokenizer.eos_token_id == draft_tokenizer.eos_token_id is not None
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(folder / role)
        assert model.config.vocab_size == len(target_tokenizer)
        assert model.config.eos_token_id == target_tokenizer.eos_token_id


def test_tokenizer_keeps_any_text_and_has_a_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    assert tokenizer.decode(tokenizer(STRANGE_TEXT)["input_ids"]) == STRANGE_TEXT
    messages = [{"role": "user", "content": "Why?"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "user: Why?\n\nassistant:"


def test_prompts_have_their_columns_and_clearly_different_lengths(folder: Path, documents: Parts) -> None:
    with pa.memory_map(str(folder / "prompts.arrow")) as source:
        prompts = pa.ipc.open_file(source).read_all()
    assert [(field.name, str(field.type)) for field in prompts.schema] == [
        ("id", "int64"), ("prompt", "string"), ("reference", "string")
    ]  # fmt: skip
    assert prompts["id"].to_pylist() == list(range(NUM_PROMPTS))
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    num_tokens = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts["prompt"].to_pylist()]
    assert min(num_tokens) < 32 < 160 < max(num_tokens) < 600
    held_out = ["\n\n".join(document) for document in documents[1]]
    for row in prompts.to_pylist():
        assert any(row["prompt"] + row["reference"] in text for text in held_out)


def test_a_complete_pair_is_reused_and_another_or_a_killed_one_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[PairConfig] = []
    monkeypatch.setattr(pair, "_build", lambda config, output: built.append(config))
    config = PairConfig(output=str(folder), max_seconds=1.0)
    assert "complete already" in train_demo(config)[0] and not built
    other = PairConfig(output=str(folder), max_seconds=2.0)
    for number in (1, 1):
        assert train_demo(other)[0] and len(built) == number
    monkeypatch.setattr(pair.platform, "python_version", lambda: "3.99")
    train_demo(other)
    assert len(built) == 2
    monkeypatch.setattr(pair, "_build", _killed)
    with pytest.raises(KeyboardInterrupt):
        train_demo(config)
    assert not (folder / pair.RECORD).exists()
    monkeypatch.setattr(pair, "_build", lambda config, output: built.append(config))
    train_demo(config)
    assert len(built) == 3 and json.loads((folder / pair.RECORD).read_text())["max_seconds"] == 1.0


def _killed(*_: object) -> None:
    raise KeyboardInterrupt
