"""The demo pair at tiny sizes: what a complete folder holds, and when it is built again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist.lab.demo import pair
from specdist.lab.demo.config import PairConfig
from specdist.lab.demo.pair import build_pair
from specdist.lab.demo.text import Corpus, load_corpus
from specdist.utils.errors import UserError

STRANGE_TEXT = "héllo  wörld\n\n\tif x:  # 日本 \N{SNOWMAN}\n"
NUM_PROMPTS = 96


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    whole = load_corpus()
    return Corpus(training=whole.training[:40], held_out=whole.held_out)


@pytest.fixture(scope="module")
def tiny(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    """The options of a pair that has been built."""
    config = PairConfig(
        output=str(tmp_path_factory.mktemp("demo") / "pair"),
        target_steps=3,
        draft_steps=3,
        num_vocab_tokens=400,
        target_layers=1,
        target_hidden_size=32,
        draft_hidden_size=16,
        num_prompts=NUM_PROMPTS,
    )
    assert build_pair(config, corpus)[1]
    return config


def test_models_load_and_share_one_tokenizer(tiny: PairConfig) -> None:
    folders = [Path(tiny.output) / role for role in ("target", "draft")]
    target_tokenizer, draft_tokenizer = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    assert target_tokenizer.get_vocab() == draft_tokenizer.get_vocab()
    assert target_tokenizer.eos_token_id == draft_tokenizer.eos_token_id is not None
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.vocab_size == len(target_tokenizer)
        assert model.config.eos_token_id == target_tokenizer.eos_token_id


def test_tokenizer_keeps_any_text_and_has_a_chat_template(tiny: PairConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(tiny.output) / "target")
    assert tokenizer.decode(tokenizer(STRANGE_TEXT)["input_ids"]) == STRANGE_TEXT
    messages = [{"role": "user", "content": "Why?"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "user: Why?\n\nassistant:"


def test_prompts_have_their_columns_and_clearly_different_lengths(tiny: PairConfig, corpus: Corpus) -> None:
    with pa.memory_map(str(Path(tiny.output) / "prompts.arrow")) as source:
        prompts = pa.ipc.open_file(source).read_all()
    assert [(field.name, str(field.type)) for field in prompts.schema] == [
        ("id", "int64"),
        ("prompt", "string"),
        ("reference", "string"),
    ]
    assert prompts["id"].to_pylist() == list(range(NUM_PROMPTS))
    tokenizer = AutoTokenizer.from_pretrained(Path(tiny.output) / "target")
    num_tokens = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts["prompt"].to_pylist()]
    assert min(num_tokens) < 24 < 160 < max(num_tokens)
    held_out = [document.text for document in corpus.held_out]
    for row in prompts.to_pylist():
        assert any(row["prompt"] + row["reference"] in text for text in held_out)


def test_a_complete_pair_is_reused(tiny: PairConfig, corpus: Corpus) -> None:
    weights = Path(tiny.output) / "target" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    record, is_new = build_pair(tiny, corpus)
    assert not is_new
    assert weights.stat().st_mtime_ns == before
    assert record == pair.read_record(Path(tiny.output))


def test_a_killed_build_is_repeated(
    tiny: PairConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(tiny, output=str(tmp_path))
    with monkeypatch.context() as patch:
        # Everything is there except the completion record.
        patch.setattr(pair, "write_json", _killed)
        with pytest.raises(KeyboardInterrupt):
            build_pair(config, corpus)
    assert (tmp_path / "target").is_dir()
    with monkeypatch.context() as patch:
        patch.setattr(pair, "greedy_agreement", _killed)
        with pytest.raises(KeyboardInterrupt):
            build_pair(config, corpus)
    assert pair.read_record(tmp_path) is None
    assert build_pair(config, corpus)[1]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"target", "draft", "prompts.arrow", pair.RECORD_NAME}


def test_other_settings_or_another_text_are_another_pair(tiny: PairConfig, corpus: Corpus) -> None:
    other_text = dataclasses.replace(corpus, training=corpus.training[1:])
    assert build_pair(dataclasses.replace(tiny, seed=1), corpus)[1]
    assert build_pair(tiny, other_text)[1]
    assert build_pair(tiny, corpus)[1]


def test_options_out_of_range_and_too_many_prompts_are_refused(
    tiny: PairConfig, corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--target_hidden_size 100 must be a multiple of 16"):
        dataclasses.replace(tiny, target_hidden_size=100)
    with pytest.raises(UserError, match="--num_prompts 100000 is more than"):
        build_pair(dataclasses.replace(tiny, output=str(tmp_path), num_prompts=100_000), corpus)


def _killed(*_: object) -> None:
    raise KeyboardInterrupt
