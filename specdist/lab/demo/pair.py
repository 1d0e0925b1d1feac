"""The demo pair: a tokenizer, a small target, a smaller draft and prompts, built in a minute and a half.

A folder is complete when it has a completion record, which is written last. A record of other options, source
text or ``LAYOUT_VERSION`` is ignored, and the pair is built again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from specdist.data.store.files import write_json
from specdist.lab.demo.config import PairConfig
from specdist.lab.demo.text import Corpus, Document, load_corpus
from specdist.lab.demo.training import LearningRates, TrainingResult, greedy_agreement, initialize, train
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1  # raise it when a change of the code makes earlier folders unfit
RECORD_NAME = "complete.json"
BUILDING_NAME = ".building"
EOS_TOKEN = "<|endoftext|>"
MAX_POSITIONS = 1024
NUM_PROMPT_TOKENS = (12, 120, 24, 200, 48, 16, 160, 32, 90, 64)
NUM_REFERENCE_TOKENS = 64
PROMPTS_SCHEMA = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("reference", pa.string())])
TARGET_RATES = LearningRates(embedding=5e-2, head=1e-2, layers=2e-3)
DRAFT_RATES = LearningRates(embedding=1e-1, head=1.6e-2, layers=4e-3)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class PairRecord:
    """The completion record; ``key`` is a digest of everything that the pair depends on."""

    key: str
    target: TrainingResult
    draft: TrainingResult
    greedy_agreement: float
    wall_s: float


def train_demo(config: PairConfig) -> tuple[str, None]:
    """Run the job; the text to print."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("specdist").setLevel(logging.INFO)
    disable_progress_bar()
    record, is_new = build_pair(config, load_corpus())
    return (
        f"demo pair in {config.output}: {'built' if is_new else 'complete already, built'} in "
        f"{record.wall_s:.0f} s; held-out loss {record.target.held_out_loss:.2f} (target), "
        f"{record.draft.held_out_loss:.2f} (draft); they agree on {record.greedy_agreement:.0%} of the "
        "target's greedy tokens"
    ), None


def build_pair(config: PairConfig, corpus: Corpus) -> tuple[PairRecord, bool]:
    """Build the pair in ``config.output``, unless it is complete there; the flag tells whether it was built.

    Everything is made in a folder next to the final names, and moved when it is complete.
    """
    output = Path(config.output)
    key = _key(config, corpus)
    found = read_record(output)
    if found is not None and found.key == key:
        return found, False
    building = output / BUILDING_NAME
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    record = _build(config, corpus, key, building)
    (output / RECORD_NAME).unlink(missing_ok=True)  # until all is in place, the folder is not complete
    for path in sorted(building.iterdir()):
        final = output / path.name
        if final.is_dir():
            shutil.rmtree(final)
        path.replace(final)
    building.rmdir()
    write_json(output / RECORD_NAME, dataclasses.asdict(record))
    return record, True


def read_record(output: Path) -> PairRecord | None:
    """The completion record of ``output``; None if the folder is not complete."""
    path = output / RECORD_NAME
    if not path.is_file():
        return None
    values: dict[str, Any] = json.loads(path.read_text())
    target, draft = (TrainingResult(**values.pop(role)) for role in ("target", "draft"))
    return PairRecord(**values, target=target, draft=draft)


def train_tokenizer(documents: tuple[Document, ...], num_vocab_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which decodes to the same text; one token both ends a text and pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_vocab_tokens,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _build(config: PairConfig, corpus: Corpus, key: str, folder: Path) -> PairRecord:
    start = time.monotonic()
    num_bytes = sum(len(document.text.encode()) for document in corpus.training)
    logger.info(f"text: {len(corpus.training)} documents, {num_bytes / 1e6:.1f} MB, to train on")
    tokenizer = train_tokenizer(corpus.training, config.num_vocab_tokens)
    training_ids = _packed_ids(corpus.training, tokenizer)
    held_out_ids = _packed_ids(corpus.held_out, tokenizer)
    prompts = _cut_prompts(corpus.held_out, tokenizer, config.num_prompts)
    logger.info(f"tokenizer: {len(tokenizer)} tokens, {len(training_ids)} tokens of text")

    target = _new_llama(tokenizer, config.target_layers, config.target_hidden_size, num_heads=8)
    initialize(target, config.seed)
    target_result = train(
        target, training_ids, held_out_ids,
        rates=TARGET_RATES, max_steps=config.target_steps, max_seconds=config.target_seconds,
        seed=config.seed, label="target",
    )  # fmt: skip
    draft = _new_llama(tokenizer, config.draft_layers, config.draft_hidden_size, num_heads=4)
    initialize(draft, config.seed)
    draft_result = train(
        draft, training_ids, held_out_ids,
        rates=DRAFT_RATES, max_steps=config.draft_steps, max_seconds=config.draft_seconds,
        seed=config.seed, label="draft", teacher=target,
    )  # fmt: skip

    for role, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    with pa.ipc.new_file(str(folder / "prompts.arrow"), prompts.schema) as writer:
        writer.write_table(prompts)
    agreement = greedy_agreement(target, draft, held_out_ids)
    return PairRecord(key, target_result, draft_result, agreement, time.monotonic() - start)


def _key(config: PairConfig, corpus: Corpus) -> str:
    options = {name: value for name, value in dataclasses.asdict(config).items() if name != "output"}
    content = json.dumps([LAYOUT_VERSION, options, corpus.fingerprint], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _packed_ids(documents: tuple[Document, ...], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All documents as one stream of token ids, each ended by EOS."""
    encoded = tokenizer([document.text for document in documents], verbose=False)["input_ids"]
    return torch.tensor([token_id for ids in encoded for token_id in [*ids, tokenizer.eos_token_id]])


def _new_llama(
    tokenizer: PreTrainedTokenizerFast, num_layers: int, hidden_size: int, num_heads: int
) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    )


def _cut_prompts(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, num_prompts: int
) -> pa.Table:
    """``num_prompts`` prompts and the texts that followed them, taken evenly from ``documents``, without
    overlaps.

    Raises :class:`UserError` if the documents are too short for so many.
    """
    pairs = [pair for document in documents for pair in _cut(document, tokenizer)]
    if len(pairs) < num_prompts:
        raise UserError(
            f"--num_prompts {num_prompts} is more than the {len(pairs)} available from the held-out "
            "documents of this Python's standard library: lower it, or use a Python with its complete "
            "standard library"
        )
    chosen = [pairs[index * len(pairs) // num_prompts] for index in range(num_prompts)]
    prompts, references = zip(*chosen, strict=True)
    return pa.table([range(num_prompts), prompts, references], schema=PROMPTS_SCHEMA)


def _cut(document: Document, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, str]]:
    """Prompts that begin with a section, of lengths that take turns, and the texts that follow them."""
    text = document.text
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    token_starts = [start for start, _ in encoded["offset_mapping"]]
    section_start, used_until, num_cut = 0, 0, 0
    for section in document.sections:
        if section_start >= used_until:
            num_prompt_tokens = NUM_PROMPT_TOKENS[num_cut % len(NUM_PROMPT_TOKENS)]
            prompt_end = _word_end(text, token_starts, section_start, num_prompt_tokens)
            end = prompt_end and _word_end(text, token_starts, prompt_end, NUM_REFERENCE_TOKENS)
            if not end:
                return
            yield text[section_start:prompt_end], text[prompt_end:end]
            used_until = end
            num_cut += 1
        section_start += len(section) + len("\n\n")


def _word_end(text: str, token_starts: list[int], position: int, num_tokens: int) -> int | None:
    """The first end of a word ``num_tokens`` or more after ``position``; None if the text ends before it.

    A text cut inside a word would be encoded as other tokens.
    """
    index = bisect_left(token_starts, position) + num_tokens
    while index < len(token_starts) and not text[token_starts[index]].isspace():
        index += 1
    return token_starts[index] if index < len(token_starts) else None
