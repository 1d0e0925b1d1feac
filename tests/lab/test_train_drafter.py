"""Drafters that are trained here: they learn, and an engine accepts of their files what the training says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdist import SamplingOptions, SpeculativeLLM
from specdist.models.drafters.drafters import check_drafter
from specdist.models.files.checkpoint import open_checkpoint
from tests.job.pair import NUM_VOCAB_TOKENS, random_llama, save, train_tokenizer
from tests.lab.drafter_kinds import KINDS, Kind
from tests.lab.train_drafter import Text, loss_of, train

NUM_DRAFTED, NUM_PROMPT = 3, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_llama(num_hidden_layers=6, initializer_range=0.12)
    return save(tmp_path_factory.mktemp("trained") / "target", model, train_tokenizer())


@torch.inference_mode()
def num_accepted(kind: Kind, token_ids: list[int]) -> int:
    """Of a greedy completion, where all places have the drafts that the training makes of them at once."""
    ids = torch.tensor([token_ids])
    read = kind.target.model(ids, output_hidden_states=True)
    states = read.last_hidden_state
    if kind.state_layers is not None:
        states = torch.cat([read.hidden_states[layer] for layer in kind.state_layers], dim=-1)
    places = torch.arange(1, len(token_ids) - 1)
    drafted = kind.model.get_output_embeddings()(kind.hidden(ids, states, places[None]))[0].argmax(dim=-1)
    index = places[:, None] + 1 + torch.arange(NUM_DRAFTED)
    right = (drafted == ids[0, index.clamp(max=len(token_ids) - 1)]) & (index < len(token_ids))
    num_right = [0, *right.long().cumprod(dim=-1).sum(dim=-1).tolist(), 0]
    # The first token comes with the prompt's pass, without a draft; the last one is the target's.
    found, place = 0, NUM_PROMPT
    while place < len(token_ids) - 1:
        accepted = min(num_right[place], len(token_ids) - 2 - place)
        found += accepted
        place += accepted + 1
    return found


@pytest.mark.parametrize("name", KINDS)
def test_an_engine_accepts_what_the_training_says(name: str, target: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
    prompts = torch.randint(5, NUM_VOCAB_TOKENS, (12, NUM_PROMPT))
    said = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False
    )
    texts = [Text(NUM_PROMPT, ids) for ids in said.tolist()]
    kind = KINDS[name](model, NUM_DRAFTED)
    losses = []
    for num_steps in (80, 0):
        torch.manual_seed(1)
        losses.append(loss_of(kind, texts).item())
        train(kind, [list(texts)], num_steps)
    assert losses[1] < losses[0] - 0.1
    kind.save(tmp_path)
    own, draft = (str(tmp_path), "mtp") if name == "mtp" else (str(target), str(tmp_path))
    if name != "mtp":
        check_drafter(open_checkpoint("--draft", draft), open_checkpoint("--target", own))
    llm = SpeculativeLLM(
        own, draft, policy="fixed", num_draft_tokens=NUM_DRAFTED, device="cpu", dtype="float32",
        trust_remote_code=True,
    )  # fmt: skip
    sampling = SamplingOptions(temperature=0, max_new_tokens=24)
    results = llm.generate(prompts.tolist(), sampling, use_tqdm=False)
    assert [result.token_ids for result in results] == said[:, NUM_PROMPT:].tolist()
    expected = [num_accepted(kind, text.token_ids) for text in texts]
    found = [result.num_accepted_draft_tokens for result in results]
    assert found == expected and sum(found) > 2 * len(texts)
