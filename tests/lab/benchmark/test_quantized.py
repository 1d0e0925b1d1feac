"""A benchmark of quantised models: every method and the draft in its own process run the same weights."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from specdist.config.arguments import parse_arguments
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.methods import Generated, Specdist
from specdist.lab.benchmark.pair import DraftOrder, fixed_length
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.utils.errors import UserError
from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.benchmark.conftest import TINY
from tests.lab.benchmark.passes import measure_floors
from tests.lab.benchmark.setting import ComparedSetting, set_up_comparison
from tests.lab.benchmark.test_config import SYNTHETIC, TRAINED
from tests.lab.draft_rank import DraftSource

KINDS = {"target": "int8", "draft": "int4"}


@pytest.fixture(scope="module")
def quantized(setting: ComparedSetting) -> ComparedSetting:
    folder = setting.pair.target_checkpoint.folder.parents[1]
    return set_up_comparison(
        ComparisonConfig(
            output="unused", synthetic="tiny", epsilon=0.1, synthetic_folder=str(folder), num_prompts=5,
            max_prompt_tokens=10, max_new_tokens=24, num_draft_tokens=3, batch_sizes=[3], device="cpu",
            target_quantization="int8", draft_quantization="int4",
        )
    )  # fmt: skip


def kinds_of(model: nn.Module) -> set[str]:
    return {layer.form.numbers for layer in model.modules() if isinstance(layer, QuantizedLinear)}


def generated(setting: ComparedSetting, length: int) -> Generated:
    method = Specdist(setting.paged, DraftOrder(num_slots=3, choice=fixed_length(length)))
    method.prepare()
    return method.generate(setting.rows)


def test_both_models_are_quantised_and_the_result_says_so(
    setting: ComparedSetting, quantized: ComparedSetting
) -> None:
    pair = quantized.pair
    assert (kinds_of(pair.target), kinds_of(pair.draft)) == ({"int8"}, {"int4"})
    assert quantized.models.target.endswith(" in int8") and quantized.models.draft.endswith(" in int4")
    # As many as before: a quantised layer's numbers count.
    plain = setting.models
    assert quantized.models.num_target_parameters == plain.num_target_parameters
    assert plain.num_target_parameters == sum(weight.numel() for weight in setting.pair.target.parameters())


def test_the_tokens_are_the_quantised_targets(setting: ComparedSetting, quantized: ComparedSetting) -> None:
    found = generated(quantized, 3)
    assert found.completions == generated(quantized, 1).completions != generated(setting, 3).completions
    assert found.stats is not None and found.stats.num_accepted_tokens > 0


def test_the_drafts_process_loads_the_same_weights(
    quantized: ComparedSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[DraftSource] = []
    monkeypatch.setattr(
        "tests.lab.benchmark.setting.DraftRank", lambda source, device: sources.append(source)
    )
    quantized.start_draft_rank()
    [source] = sources
    server = dataclasses.replace(source, num_threads=1).open()
    assert kinds_of(server._runner.model) == {"int4"}  # type: ignore[attr-defined]


def test_lower_bounds_read_the_quantised_bytes(quantized: ComparedSetting) -> None:
    [target, _] = measure_floors(
        quantized.paged, batch_sizes=[1], num_context_tokens=8, num_draft_tokens=3, num_passes=1, seed=0
    )
    hidden, inner = TINY.hidden_size, TINY.intermediate_size
    cut = TINY.num_layers * (3 * hidden * hidden + 3 * hidden * inner)
    scales = TINY.num_layers * (2 * hidden + hidden + 2 * inner + hidden)
    whole = hidden * TINY.vocab_size + (2 * TINY.num_layers + 1) * hidden
    cache = 2 * (8 + 4) * TINY.num_layers * hidden // 2
    assert target.num_bytes == cut + 4 * (scales + whole + cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TRAINED, "--draft", "self:int2"], "--draft 'self:int2' is not a kind"),
        ([*TRAINED, "--draft", "self:int4", "--draft_quantization", "int8"], "self:int4 says how"),
        ([*SYNTHETIC, "--draft", "self:int4"], "leave out --target and --draft"),
        ([*TRAINED, "--draft", "self:int4", "--peers", "vllm"], "--peers vllm would run the models as"),
        (
            [*SYNTHETIC, "--target_quantization", "int8", "--peers", "vllm"],
            "--peers vllm would run the models",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_arguments(BenchmarkConfig, arguments)


def test_the_target_may_draft_for_itself() -> None:
    config = parse_arguments(BenchmarkConfig, [*TRAINED, "--draft", "self:int4"])
    assert config.draft == "self:int4" and config.draft_quantization is None
