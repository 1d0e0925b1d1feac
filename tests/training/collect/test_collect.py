"""What is collected agrees with transformers on the same texts and follows the right distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from specdist.cli import collect as main
from specdist.models.heads.examples import PREFIX_KINDS
from specdist.training.collect import writers
from specdist.training.collect.texts import Text, verifier_texts
from tests.job.launching import read_output, run_here
from tests.job.pair import Pair, windowed_target, write_arrow
from tests.training.collect.conftest import FILTERED
from tests.training.collect.plain import HALF_TOLERANCE, PlainPair, hidden_of


def examples_of(data: pa.Table, row_id: int, kind: str = "target") -> pa.Table:
    is_asked = pc.and_(pc.equal(data["row_id"], row_id), pc.equal(data["prefix_kind"].cast("string"), kind))
    return data.filter(is_asked)


def sequences(output: Path, plain: PlainPair) -> dict[int, tuple[list[int], list[int]]]:
    """Prompt and response of every row, as token ids."""
    rows = read_output(output / "responses").to_pylist()
    return {
        row["row_id"]: (plain.tokenizer(row["prompt"])["input_ids"], row["completion_ids"]) for row in rows
    }


def check_acceptance(output: Path, plain: PlainPair) -> int:
    """Compare every example of every row with plain forwards; returns their number."""
    data = read_output(output)
    num_checked = 0
    for row_id, (prompt_ids, response_ids) in sequences(output, plain).items():
        examples = examples_of(data, row_id)
        plain.check_distributions(examples, prompt_ids + response_ids)
        places = examples["position"].to_numpy()
        mixed = np.array(prompt_ids + response_ids)
        mixed[places] = examples["token_id"].to_numpy()
        hidden = plain.hidden(mixed.tolist())[places]
        np.testing.assert_allclose(hidden_of(examples), hidden, **HALF_TOLERANCE)
        num_checked += len(examples)
    assert num_checked == len(data)
    return num_checked


def test_acceptance_examples_are_those_of_plain_forwards(acceptance: Path, pair: Pair) -> None:
    """min(1, P/Q) after the target's own tokens; hidden states in the sequence that mixes both."""
    assert check_acceptance(acceptance, PlainPair(pair, **FILTERED)) > 300


def of_itself(model: Path, folder: Path, **options: Any) -> Path:
    """A collection whose draft is the target: every token is accepted."""
    run = {"target": model, "draft": model, "limit": 4, "kind": "acceptance", "output": folder / "data"}
    assert run_here(main, **options | run).code == 0
    acceptance = read_output(folder / "data")["acceptance"].to_numpy()
    assert len(acceptance) > 20 and acceptance.min() > 0.99
    return folder / "data"


def test_quantised_models_are_those_of_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    kinds = {"draft_quantization": "int8", "target_quantization": "int8", "max_new_tokens": 12}
    output = of_itself(options["target"], tmp_path, **options | kinds)
    fingerprint = json.loads((output / "manifest.json").read_text())["fingerprint"]
    assert fingerprint["target_quantization"] == fingerprint["draft_quantization"] == "int8"


def test_a_target_whose_layers_have_windows_runs_texts_that_are_longer(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Its cache then holds whole texts."""
    of_itself(windowed_target(tmp_path / "model"), tmp_path, **options | {"max_new_tokens": 40})


def test_tokens_are_mixed_and_drawn_from_the_draft(pair: Pair, acceptance: Path) -> None:
    """85 of 100 places have a drafted token, and the tokens have the draft's distribution.

    Their log-probability is compared with its mean under the distribution, in standard deviations: with this
    seed 0.9.
    """
    plain = PlainPair(pair, **FILTERED)
    data = read_output(acceptance)
    rows = sequences(acceptance, plain)
    num_places = sum(len(response_ids) for _, response_ids in rows.values())
    assert len(data) / num_places == pytest.approx(0.85, abs=0.05)
    found, means, variances = [], [], []
    for row_id, (prompt_ids, response_ids) in rows.items():
        examples = examples_of(data, row_id)
        distributions = plain.distributions(plain.draft, prompt_ids + response_ids)[
            examples["position"].to_numpy().copy() - 1
        ]
        found += np.log(examples["probability"].to_numpy()).tolist()
        logs = distributions.log().where(distributions > 0, 0.0)
        means += (distributions * logs).sum(1).tolist()
        variances += ((distributions * logs**2).sum(1) - (distributions * logs).sum(1) ** 2).tolist()
    assert abs(sum(found) - sum(means)) < 3.5 * sum(variances) ** 0.5


def test_verifier_examples_are_those_of_plain_forwards(
    pair: Pair, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four kinds, equally many of each, after the texts that were written, with the states that the
    tokens were drawn from."""
    texts: list[Text] = []

    def noted(*arguments: Any, **named: Any) -> list[Text]:
        found = verifier_texts(*arguments, **named)
        texts.extend(found)
        return found

    monkeypatch.setattr(writers, "verifier_texts", noted)
    output = tmp_path / "data"
    chosen = {"kind": "verifier", "limit": 3, "output": output}
    assert run_here(main, **options, **chosen).code == 0
    plain, data = PlainPair(pair, **FILTERED), read_output(output)
    assert len({text.row_id for text in texts}) == 3 and len(texts) == 12
    for text in texts:
        examples = examples_of(data, text.row_id, text.kind)
        assert examples["position"].to_pylist() == text.places_N.tolist()
        plain.check_distributions(examples, text.token_ids)
        expected = plain.hidden(text.token_ids)[text.places_N - 1]
        np.testing.assert_allclose(hidden_of(examples), expected, **HALF_TOLERANCE)


def test_there_are_equally_many_examples_of_the_four_kinds(verifier: Path) -> None:
    for path in (verifier / "stats").glob("*.json"):
        shard = json.loads(path.read_text())
        counts = shard["num_examples_per_prefix_kind"]
        assert set(counts) == set(PREFIX_KINDS) and len({*counts.values()} - {0}) == 1
        assert sum(counts.values()) == shard["num_examples"]


def test_rows_that_cannot_be_used_give_no_examples(
    options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    prompts = write_arrow(tmp_path / "p.arrow", {"prompt": ["a lazy dog", None, "a " * 500, "seven wizards"]})
    changed = options | {"prompts": prompts, "rows_per_shard": 1}
    for kind in ("acceptance", "verifier"):
        output = tmp_path / kind
        totals = run_here(main, **changed, kind=kind, output=output).totals
        assert totals["num_rows"] == 4
        data = read_output(output)
        assert set(data["row_id"].to_pylist()) == {0, 3}
