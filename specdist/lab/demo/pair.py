"""The demo pair: a tokenizer, a small target, a smaller draft and prompts, built in a minute and a half from
text that every Python installation carries, the docstrings of its standard library.

A folder is complete when it has a record, which is written last. It is built again for other options, or with
another Python, whose text is another. B windows of L tokens, N tokens, V vocabulary.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import logging
import math
import platform
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from specdist.data.store.files import write_json
from specdist.lab.demo.config import PairConfig
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)

RECORD = "complete.json"
LAYOUT_VERSION = 2  # raise it when a change of the code makes earlier folders unfit
NUM_VOCAB_TOKENS, MAX_POSITIONS = 2048, 1024
WINDOW_TOKENS, WINDOWS_PER_STEP = 256, 4
NUM_WARMUP_STEPS = 20
PROGRESS_EVERY_S = 10.0
EMBEDDING_STD = 0.5
# Layers, hidden size and heads of a model.
TARGET, DRAFT = (3, 256, 8), (1, 128, 4)
# Most steps of its training, and share of the time; peak learning rates of its embedding and its head, whose
# rows are each used rarely, and of its layers.
TARGET_TRAINING, DRAFT_TRAINING = (500, 0.72, (5e-2, 1e-2, 2e-3)), (300, 0.28, (1e-1, 1.6e-2, 4e-3))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Modules are parsed and never imported. Installed packages are not the standard library; the others hold
# tests, generated tables or boilerplate.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
)
HELD_OUT_ONE_IN = 8
NUM_PROMPTS = 96
NUM_PROMPT_WORDS = (8, 72, 14, 110, 28, 10, 90, 18, 50, 36)
NUM_REFERENCE_WORDS = 36
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The docstrings of one module, each under the name of its object.
Document = tuple[str, ...]


def load_documents(stdlib: Path | None = None) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and held-out ones, one in eight by the hash of their content. Raises
    :class:`UserError` if there is no text."""
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[Document], list[Document]] = ([], [])
    for path in sorted(stdlib.rglob("*.py")):
        sections = _sections(path) if SKIPPED_FOLDERS.isdisjoint(path.relative_to(stdlib).parts) else ()
        if sections:
            digest = hashlib.sha256("".join(sections).encode()).digest()
            parts[digest[0] % HELD_OUT_ONE_IN == 0].append(sections)
    if not all(parts):
        raise UserError(
            f"the standard library folder {stdlib} contains no Python sources to read docstrings from: use a "
            "Python whose standard library is installed as .py files (not a zip or a minimal package)"
        )
    return parts


def cut_prompts(documents: Sequence[Document]) -> tuple[list[str], list[str]]:
    """Prompts of lengths that take turns, each from the beginning of a docstring on, and the texts that
    followed them: ``NUM_PROMPTS``, or all that there are, evenly from all documents."""
    found: list[tuple[str, str]] = []
    for document in documents:
        text, section_begin, used_until = "\n\n".join(document), 0, 0
        for section in document:
            num_words = NUM_PROMPT_WORDS[len(found) % len(NUM_PROMPT_WORDS)]
            words = re.compile(r"\S+").finditer(text, section_begin)
            ends = [word.end() for word in islice(words, num_words + NUM_REFERENCE_WORDS)]
            if section_begin >= used_until and len(ends) == num_words + NUM_REFERENCE_WORDS:
                end, used_until = ends[num_words - 1], ends[-1]
                found.append((text[section_begin:end], text[end:used_until]))
            section_begin += len(section) + len("\n\n")
    num = min(NUM_PROMPTS, len(found))
    chosen = [found[index * len(found) // num] for index in range(num)]
    return [prompt for prompt, _ in chosen], [reference for _, reference in chosen]


def _sections(path: Path) -> Document:
    """The docstrings of a module; none if it is in another Python's syntax, as some distributions have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sources of the library itself warn about their escape sequences
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ()
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    texts = [(getattr(node, "name", ""), ast.get_docstring(node)) for node in nodes]
    return tuple(f"{name}:\n{text}" if name else text for name, text in texts if text)


def train_demo(config: PairConfig) -> tuple[str, None]:
    """Run the job; the text to print."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("specdist").setLevel(logging.INFO)
    disable_progress_bar()
    output = Path(config.output)
    options = dataclasses.asdict(config) | {"output": LAYOUT_VERSION, "python": platform.python_version()}
    record, start = output / RECORD, time.monotonic()
    if record.is_file() and json.loads(record.read_text()) == options:
        return f"demo pair in {output}: complete already", None
    record.unlink(missing_ok=True)
    _build(config, output)
    write_json(record, options)
    return f"demo pair in {output}: built in {time.monotonic() - start:.0f} s", None


def _build(config: PairConfig, output: Path) -> None:
    training, held_out = load_documents()
    tokenizer = _train_tokenizer(training)
    texts = ["\n\n".join(document) + tokenizer.eos_token for document in training]
    ids = torch.tensor([token_id for ids in tokenizer(texts, verbose=False)["input_ids"] for token_id in ids])
    logger.info(f"text: {len(training)} documents, {len(ids)} tokens of {len(tokenizer)} kinds")
    target, draft = (_new_llama(tokenizer, *shape) for shape in (TARGET, DRAFT))
    _train(target, ids, config.max_seconds, TARGET_TRAINING)
    _train(draft, ids, config.max_seconds, DRAFT_TRAINING, teacher=target)
    for role, model in (("target", target), ("draft", draft)):
        model.save_pretrained(output / role)
        tokenizer.save_pretrained(output / role)
    prompts, references = cut_prompts(held_out)
    table = pa.table({"id": range(len(prompts)), "prompt": prompts, "reference": references})
    with pa.ipc.new_file(str(output / "prompts.arrow"), table.schema) as writer:
        writer.write_table(table)


def _train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which decodes to the same text; one token both ends a text and pads."""
    end, tokenizer = "<|endoftext|>", ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        map("\n\n".join, documents), NUM_VOCAB_TOKENS, special_tokens=[end], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()), eos_token=end, pad_token=end,
        model_max_length=MAX_POSITIONS, chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _new_llama(
    tokenizer: PreTrainedTokenizerFast, num_layers: int, hidden_size: int, num_heads: int
) -> LlamaForCausalLM:
    """Layers begin as the identity and the head at zero, so that a few hundred steps go a long way."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads // 2,
        max_position_embeddings=MAX_POSITIONS, bos_token_id=None, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            torch.nn.init.zeros_(weight)
        elif weight.ndim == 2:
            std = EMBEDDING_STD if "embed_tokens" in name else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, std=std, generator=generator)
    return model


def _train(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    max_seconds: float,
    training: tuple[int, float, Sequence[float]],
    teacher: LlamaForCausalLM | None = None,
) -> None:
    """Train with AdamW on the text, or to have a ``teacher``'s distribution. The cosine schedule follows the
    limit that is nearer to its end: of steps, or of time on a slow machine."""
    max_steps, share, rates = training
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layers = [weight for weight in model.parameters() if weight is not embedding and weight is not head]
    groups = [{"params": weights} for weights in ([embedding], [head], layers)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
    generator, start, next_report = torch.Generator().manual_seed(0), time.monotonic(), PROGRESS_EVERY_S
    for step in range(max_steps):
        elapsed = time.monotonic() - start
        progress = max(step / max_steps, elapsed / (share * max_seconds))
        if progress >= 1:
            break
        scale = min(1.0, (step + 1) / NUM_WARMUP_STEPS) * (0.51 + 0.49 * math.cos(math.pi * progress))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        starts_B1 = torch.randint(len(ids) - WINDOW_TOKENS, (WINDOWS_PER_STEP, 1), generator=generator)
        loss = _loss(model, ids[starts_B1 + torch.arange(WINDOW_TOKENS)], teacher)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if elapsed >= next_report:
            role = "draft" if teacher else "target"
            logger.info(f"{role}: {elapsed:.0f} s, step {step + 1}/{max_steps}, loss {loss.item():.3f}")
            next_report += PROGRESS_EVERY_S


def _loss(model: LlamaForCausalLM, ids_BL: torch.Tensor, teacher: LlamaForCausalLM | None) -> torch.Tensor:
    """The loss in nats: cross-entropy of the text, or divergence from the teacher's distribution."""
    logits_BLV = model(ids_BL, use_cache=False).logits
    if teacher is None:
        return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten())
    with torch.no_grad():
        taught_NV = teacher(ids_BL, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
    found_NV = logits_BLV.log_softmax(-1).flatten(0, 1)
    return F.kl_div(found_NV, taught_NV, log_target=True, reduction="batchmean")
