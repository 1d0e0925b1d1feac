"""What drafters give beside a small model: ``python -m tests.lab.emulation.drafter_rates``.

The engine in virtual time with the default policy; the draft on the target's rank 0, or on a GPU of its own,
which counts. Drafters are as wide as the target, as published ones are: an EAGLE-3 layer with 32,000 tokens
of its own, a DFlash of five layers with blocks of 16, the MTP head of a checkpoint that has one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from specdist.config.groups import MTP
from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.lab.plan.shapes import named_config
from specdist.utils.table import Table
from tests.lab.emulation.placements import per_gpu

RESULTS = Path(__file__).parents[3] / "jobs/benchmarks/drafters-h100.json"
BATCH_SIZES = (1, 8, 32, 128)
ACCEPTANCES = (0.7, 0.8)
PLACES = {"colocated": "shared", "auto": "own GPU"}
TAKES_TURNS = {"colocated": "colocated", "auto": "synchronous"}
GIVEN: dict[str, Any] = {"emulate": "h100-sxm", "prompt_tokens": 1000, "output_tokens": 500}
DRAFT_VOCABULARY, BLOCK_SIZE, BLOCK_LAYERS = 32000, 16, 5
# transformers' defaults of the family are those of Qwen3.5-35B-A3B.
HYBRID = "Qwen/Qwen3.5-35B-A3B"
# Of each target: its GPUs, and a small model beside the drafters.
TARGETS: dict[str, tuple[int, str | None]] = {
    "70b": (4, "1b"),
    "Qwen/Qwen3-30B-A3B": (2, "0.5b"),
    HYBRID: (2, None),
}


def write_config(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def write_drafters(target: Any, folder: Path) -> dict[str, str]:
    """Folders with the configurations of drafters for such a target, by kinds."""
    sizes = {
        name: getattr(target, name, None)
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    layers = {name: size for name, size in sizes.items() if size} | {
        "intermediate_size": 3 * target.hidden_size, "max_position_embeddings": 40960,
    }  # fmt: skip
    num_layers, num_own = target.num_hidden_layers, min(DRAFT_VOCABULARY, target.vocab_size)
    eagle3 = layers | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": num_own, "dtype": "bfloat16",
    }  # fmt: skip
    dflash = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "dtype": "bfloat16",
        "block_size": BLOCK_SIZE, "mask_token_id": 0, "draft_vocab_size": num_own,
        "aux_hidden_state_layer_ids": [1 + index * (num_layers - 3) // 4 for index in range(5)],
        "transformer_layer_config": layers | {"model_type": "qwen3", "num_hidden_layers": BLOCK_LAYERS},
    }  # fmt: skip
    return {
        "EAGLE-3": write_config(folder / "eagle3", eagle3),
        "DFlash": write_config(folder / "dflash", dflash),
    }


def pairs(folder: Path) -> list[tuple[str, str, str, str]]:
    """Names of targets and drafts, and what the emulation opens for them."""
    found = []
    for target, (_, small) in TARGETS.items():
        if small is not None:
            drafts = {small: small} | write_drafters(named_config(target), folder / Path(target).name)
            found += [(target, target, name, draft) for name, draft in drafts.items()]
            continue
        config = AutoConfig.for_model("qwen3_5_moe_text").to_dict()
        more = {"architectures": ["Qwen3_5MoeForCausalLM"], "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
        found.append((target, write_config(folder / "hybrid", config | more), MTP, MTP))
    return found


def measure() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        alone: dict[tuple[str, int], float] = {}
        for target, opened, name, draft in pairs(Path(folder)):
            tp_size, small = TARGETS[target]
            for batch_size in BATCH_SIZES:
                case = target, batch_size
                given = {**GIVEN, "target": opened, "draft": draft, "tp_size": tp_size}
                if case not in alone:
                    alone[case] = per_gpu("target_only", batch_size, **given)
                for acceptance in ACCEPTANCES:
                    for mode in PLACES:
                        run = mode if name == small else TAKES_TURNS[mode]
                        times = per_gpu(run, batch_size, **given, acceptance=acceptance) / alone[case]
                        found.append(
                            {"target": target, "draft": name, "acceptance": acceptance, "mode": mode,
                             "batch_size": batch_size, "plain": round(alone[case], 1),
                             "times": round(times, 3)}
                        )  # fmt: skip
                        sys.stderr.write(f"{found[-1]}\n")
    return found


def markdown() -> str:
    """Times the target alone, per GPU."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["found"]
    rates = {
        tuple(one[name] for name in ("target", "draft", "acceptance", "mode", "batch_size")): one
        for one in found
    }
    rows = []
    for target, draft, acceptance in dict.fromkeys(key[:3] for key in rates):
        row = {"target": Path(target).name, "draft": draft, "acceptance": f"{acceptance:g}"}
        for mode, place in PLACES.items():
            cells = (rates[target, draft, acceptance, mode, batch]["times"] for batch in BATCH_SIZES)
            row[f"{place}, at {' / '.join(map(str, BATCH_SIZES))}"] = " / ".join(
                f"{cell:.2f}" for cell in cells
            )
        rows.append(row)
    return Table.of(rows).markdown()


def main() -> None:
    command = "python -m tests.lab.emulation.drafter_rates"
    write_json(RESULTS, {"command": command, "date": now_utc(), "given": GIVEN, "found": measure()})


if __name__ == "__main__":
    main()
