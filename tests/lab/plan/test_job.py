"""``jobs/plan.py`` from its options to what it prints and writes."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from specdist.cli import plan
from specdist.config.generate import parse_arguments, parse_generate_config
from specdist.lab.plan.job import planner_of, run_plan
from specdist.lab.plan.options import PlanConfig
from specdist.utils.errors import UserError
from tests.job.launching import run_here
from tests.models.families import tiny_model

PAIR = ["--target", "70b", "--draft", "1b", "--gpu", "h100-sxm"]
ALONE = ["--target", "7b", "--gpu", "h100-sxm"]
TWO_GPUS = ["--gpus_per_node", "2", "--acceptance", "0.8", "--num_prompts", "64"]


@functools.cache
def planned(*arguments: str) -> tuple[str, dict]:
    return run_plan(parse_arguments(PlanConfig, list(arguments)), "python jobs/plan.py ...")


def test_the_job_ends_with_its_document(tmp_path: Path) -> None:
    options = {"target": "70b", "draft": "1b", "gpu": "h100-sxm", "gpus_per_node": 5, "acceptance": 0.8}
    path = tmp_path / "plan.yaml"
    done = run_here(plan, **options, num_prompts=8, output_config=path)
    assert done.code == 0, done.stderr
    document = done.totals
    recommended = document["recommended"]
    assert recommended["mode"] == "branches"
    assert "=>  draft GPU, branches" in done.stdout
    assert f"--num_processes {recommended['num_processes']} jobs/generate.py" in done.stdout
    # The main job accepts what it wrote.
    config = parse_generate_config(["--config", str(path), "--prompts", "p.jsonl", "--output", "out"])
    assert config.tp_size == recommended["tp_size"] == 4
    assert (config.policy, config.overlap, config.num_branches) == ("goodput", "auto", None)
    fits = {(item["mode"], item["tp_size"]): item["fits"] for item in document["memory"]}
    assert fits["target only", 1] is False and fits["target only", 2] is True
    assert config.num_world_ranks == recommended["num_processes"]
    assert not config.warnings()


def helping(text: str, *arguments: str) -> dict[str, tuple[str, float]]:
    """Options that a text names as helpful, with their values and tokens/s, which a planner with each has."""
    found = {}
    for name, value, rate in re.findall(r"^- --(\w+) (\S+): ([\d,]+) tokens/s", text, re.MULTILINE):
        planner = planner_of(parse_arguments(PlanConfig, [*arguments, f"--{name}", value]))
        best = planner.best_plans()[0].tokens_per_s
        assert round(best) == int(rate.replace(",", "")), name
        found[name] = (value, best)
    return found


@pytest.mark.parametrize(
    ("site", "options"),
    [
        # Neither 8 bits nor shorter prompts help where the weights alone are too many.
        ("--gpu rtx-4090", ["gpus_per_node 8", "gpu h200"]),
        ("--gpu h100-sxm --gpus_per_node 2 --prompt_tokens 60000",
         ["cache_dtype float8", "target_quantization float8", "gpus_per_node 4", "gpu h100-nvl",
          "prompt_tokens 30000"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_options_with_which_it_does(site: str, options: list[str]) -> None:
    target = ["--target", "70b", *site.split()]
    with pytest.raises(UserError, match=r"--target 70b does not fit \d x (.*\n)*.*  lacks \d") as refused:
        planned(*target)
    found = helping(str(refused.value), *target)
    assert [f"{name} {value}" for name, (value, _) in found.items()] == options


def test_where_memory_ends_options_are_named_that_give_more() -> None:
    """And those alone: experts cannot be quantised."""
    small = ["--target", "8b", "--gpu", "l4"]
    text, document = planned(*small)
    found = helping(text, *small)
    assert {*found} == {"cache_dtype", "target_quantization", "gpus_per_node"}
    for name, (value, rate) in found.items():
        num_gpus = int(value) if name == "gpus_per_node" else 1
        assert rate >= 1.05 * num_gpus * document["recommended"]["tokens_per_s"]
    assert "no more sequences" not in planned(*small, "--max_num_seqs", "8")[0]
    text, _ = planned("--target", "openai/gpt-oss-120b", "--gpu", "h100-sxm")
    assert "no more sequences" in text and "--target_quantization" not in text


def test_parts_of_the_memory_add_up_and_what_there_is_not_has_words() -> None:
    text, _ = planned(*PAIR, *TWO_GPUS)
    assert ": 79.6 = weights + buffers (" in text
    table, plans = (part.splitlines() for part in text.split("\n\n")[1:3])
    for line in table[2:]:
        *parts, _, most, note = re.split(r"  +", line)[-7:]
        if note == "fits":
            assert sum(map(float, parts)) == pytest.approx(79.6) and int(most) > 0
        else:
            assert parts[-1] == most == "-" and re.fullmatch(r"lacks [\d.]+ GiB", note)
    (words,) = (line.split() for line in plans if "branches" in line)
    assert " ".join(words).startswith("draft GPU, branches: needs 3 GPUs -") and {*words[6:]} == {"-"}
    # The last three lines say what the columns are.
    assert [line.partition(":")[0] for line in plans[-3:]] == ["tp", "batch", "time"]


def test_a_price_is_that_of_all_gpus_of_a_node() -> None:
    """Four of the target, one of the draft, and one without work."""
    site = ["--gpus_per_node", "6", "--acceptance", "0.8", "--num_prompts", "8", "--gpu_price", "2.5"]
    plan = planned(*PAIR, *site)[1]["recommended"]
    price = 6 * 2.5 / 3600 / plan["tokens_per_s"] * 1e6
    assert plan["num_gpus"] == 5 and plan["price_per_million_tokens"] == pytest.approx(price)


def test_a_target_alone_from_a_folder(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    model = ["--target", str(tmp_path), "--gpu", "l4"]
    _, document = planned(*model, "--prompt_tokens", "20", "--output_tokens", "10")
    assert [plan["mode"] for plan in document["plans"]] == ["target only"]
    assert document["launch"]["commands"][0].startswith("python jobs/generate.py")
    with pytest.raises(UserError, match=r"--prompt_tokens 512 .* supports 256: lower one"):
        planned(*model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PAIR], "--acceptance is missing"),
        ([*PAIR, "--acceptance", "1.5"], r"--acceptance 1.5 must be in \[0, 1\]"),
        ([*PAIR, "--acceptance", "0.5", "--caught", "1"], r"--caught 1.0 must be in \[0, 1\)"),
        ([*ALONE, "--acceptance", "0.5"], "has no effect without --draft"),
        ([*PAIR, "--acceptance", "0.5", "--top_p", "0"], r"--top_p 0.0 must be in \(0, 1\]; 1 keeps every"),
        ([*ALONE, "--draft", "ngram", "--draft_quantization", "int8", "--acceptance", "0.3"],
         "int8 is for a draft model, and --draft ngram has none"),
        ([*ALONE, "--draft", "eagle3", "--draft_quantization", "int8", "--acceptance", "0.3"],
         "int8 is for a draft model of its own, and --draft eagle3 reads the target's states"),
        ([*ALONE, "--nodes", "0"], "--nodes 0 must be at least 1"),
        (["--target", "no/folder", "--gpu", "l4"], "--target no/folder has no readable configuration"),
        # At once: no name of the hub is a number of parameters.
        (["--target", "0.6b", "--gpu", "l4"], "--target 0.6b has no readable .* no such shape"),
        (["--target", "7b", "--gpu", "abacus"], "--gpu abacus is not in the table"),
    ],
)  # fmt: skip
def test_refusals_name_the_option(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message):
        planned(*arguments)


def test_eight_bits_halve_the_memory_and_the_plan_runs_with_them(tmp_path: Path) -> None:
    """A 70B target in 8 bits on two GPUs of 80 GB, where 16 bits leave room for a fraction of the rows."""
    site, path = TWO_GPUS, tmp_path / "plan.yaml"
    _, plain = planned(*PAIR, *site)
    text, quantized = planned(
        *PAIR, *site, "--target_quantization", "float8", "--draft_quantization", "int8",
        "--output_config", str(path),
    )  # fmt: skip
    _, narrow = planned(*PAIR, *site, "--target_quantization", "float8", "--cache_dtype", "float8")

    def share(document: dict) -> dict:
        """Of a GPU that shares the target with another."""
        (found,) = [
            each for each in document["memory"] if (each["mode"], each["tp_size"]) == ("target only", 2)
        ]
        return found["target"]

    # The head and the embedding, 0.5B numbers, stay as they are.
    assert share(quantized)["weight_bytes"] == pytest.approx(share(plain)["weight_bytes"] / 2, rel=0.02)
    assert share(quantized)["most_rows"] > 3 * share(plain)["most_rows"]
    # A scale of each head takes a 64th of its numbers.
    gain = share(narrow)["most_rows"] / share(quantized)["most_rows"]
    assert gain == pytest.approx(256 / 130, rel=0.03)
    rates = [document["recommended"]["tokens_per_s"] for document in (plain, quantized, narrow)]
    # 221 tokens in bfloat16, times 0.88 / 0.35 / 2.
    assert "reading the weights for up to about 278 tokens" in text
    # Products of FP8 are slower as they were measured, and more sequences make up for it.
    assert 0.85 < rates[1] / rates[0] < 1.15 and rates[2] >= rates[1]
    assert narrow["options"]["cache_dtype"] == "float8" and "cache_dtype" not in plain["options"]
    config = parse_generate_config(["--config", str(path), "--prompts", "p.jsonl", "--output", "out"])
    assert config.target_quantization == "float8"


def test_a_plan_says_what_nobody_has_confirmed() -> None:
    """Sums over GPUs, and a GPU that nothing was measured on; FP8 and experts by what there is."""

    def rests_on(*arguments: str) -> dict[str, str]:
        text, document = planned(*arguments)
        assert all(f"- {basis}: " in text for basis, found in document["rests_on"].items() if found)
        return {basis: "; ".join(found) for basis, found in document["rests_on"].items()}

    few = ["--gpus_per_node", "4", "--acceptance", "0.8", "--max_num_seqs", "8"]
    found = rests_on(*PAIR, *few, "--draft_quantization", "float8")
    unconfirmed = found["assumed, confirmed by nobody"]
    assert "sums over" in unconfirmed and "acceptance of 0.8" in unconfirmed and "peaks" not in unconfirmed
    assert "float8 products (one matrix on one H200, taken for the h100-sxm)" in found["measured"]
    assert "peaks" in found["assumed, near published figures"] and "experts" not in str(found)
    alone = rests_on("--target", "openai/gpt-oss-120b", "--gpu", "h200")
    assert "experts (TensorRT-LLM's" in alone["fitted to published figures"]
    unconfirmed = alone["assumed, confirmed by nobody"]
    assert "uniformly" in unconfirmed and "sums" not in unconfirmed and "acceptance" not in unconfirmed
    other = rests_on("--target", "1b", "--gpu", "l40s", "--target_quantization", "float8")
    assert "peaks" in other["assumed, confirmed by nobody"]


def test_how_tokens_are_drawn_is_paid_for_and_run(tmp_path: Path) -> None:
    """With top-p also in memory: whole logits of all tokens are on rank 0."""
    site = ["--gpus_per_node", "4", "--acceptance", "0.8", "--max_num_seqs", "32", "--num_prompts", "64"]
    path, found = tmp_path / "plan.yaml", []
    for chosen in ([], ["--temperature", "0.7", "--top_p", "0.9"]):
        _, document = planned(*PAIR, *site, *chosen, "--output_config", str(path))
        fits = {(each["mode"], each["tp_size"]): each["target"]["most_rows"] for each in document["memory"]}
        found.append((document["recommended"]["tokens_per_s"], fits["colocated", 4]))
        config = parse_generate_config(["--config", str(path), "--prompts", "p.jsonl", "--output", "out"])
        assert (config.temperature, config.top_p) == ((0.7, 0.9) if chosen else (1.0, 1.0))
    assert 0.9 * found[0][0] < found[1][0] < found[0][0] and found[1][1] < found[0][1]


def test_a_draft_that_reads_states_takes_turns_and_its_bytes_are_counted(tmp_path: Path) -> None:
    """In the published form, for the 8B shape: three states of 4,096 numbers of two bytes for every token."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "draft_vocab_size": 32000,
        "max_position_embeddings": 64, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--target", "8b", "--draft", str(tmp_path), "--gpu", "h100-sxm", "--acceptance", "0.75"]
    sizes = ["--prompt_tokens", "512", "--output_tokens", "256", "--num_prompts", "256"]
    text, document = planned(*options, *sizes, "--gpus_per_node", "2")
    plans = {plan["mode"]: plan for plan in document["plans"]}
    assert set(plans) == {"target only", "colocated", "synchronous"}
    assert plans["target only"]["state_bytes_per_round"] == 0
    for mode in ("colocated", "synchronous"):
        plan = plans[mode]
        num_tokens = plan["num_rows"] * plan["tokens_per_round"] * (1 + 512 / 256)
        assert plan["state_bytes_per_round"] == pytest.approx(num_tokens * 3 * 4096 * 2)
    assert "states MiB/round" in text
    # A draft of the target's shape is the same without a folder.
    text, named = planned(*options[:3], "eagle3", *options[4:], *sizes, "--gpus_per_node", "2")
    assert named["plans"] == document["plans"] and "Replace 8b and eagle3 by models of your own" in text


def test_drafts_without_files_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup takes no memory, and 0.2 ms and 4.5 ns for every token."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = ["--gpu", "h100-sxm", "--acceptance", "0.4", "--max_num_seqs", "1", "--prompt_tokens", "8000"]
    plain, found = planned("--target", "8b", "--draft", "ngram", *options)[1]["plans"]
    tokens = sum(0.4**count for count in range(found["num_draft_tokens"] + 1))
    assert found["tokens_per_round"] == pytest.approx(tokens)
    assert found["memory"]["target"]["weight_bytes"] == plain["memory"]["target"]["weight_bytes"]
    host_s = found["round_s"] * (1 - found["target_share"])
    assert host_s == pytest.approx(0.5e-3 + 3e-6 + 0.2e-3 + 4.5e-9 * 8128, rel=0.01)
    _, document = planned("--target", "Qwen/Qwen3.5-35B-A3B", "--draft", "mtp", *options)
    assert document["num_parameters"]["draft"] < 0.06 * document["num_parameters"]["target"]
