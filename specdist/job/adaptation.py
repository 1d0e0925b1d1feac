"""A draft that learns on the way, in a run: what it allows, and the draft that is kept beside the run.

``draft_adapted/`` is a folder that ``--draft`` takes. Its weights are replaced as one file, which also says
what they were made of and when, so that a kill leaves the former ones or the new ones. The replicas of a run
share the folder: it keeps the draft that has learned most, with which all of them go on after a relaunch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specdist.config.generate import GenerateConfig
from specdist.data import RunFolder
from specdist.data.files import write_atomically
from specdist.data.layout import ADAPTED
from specdist.data.segments import SEGMENTS, draft_fields, segments_of
from specdist.data.storage import storage_path
from specdist.job.model_plan import ModelPlan
from specdist.job.topology import Topology
from specdist.learning.adaptation import BYTES_PER_WEIGHT, Adaptation, AdaptSettings, Served, Switch, copy_of
from specdist.models.checkpoint import SMALL_FILE_SUFFIXES, Checkpoint
from specdist.models.quantized import quantization_of
from specdist.models.replacing import parameters_of, replace_weights
from specdist.models.reserve import gib
from specdist.models.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError

WEIGHTS_NAME, ABOUT = "model.safetensors", "adapted"
# Of a file of safetensors.
MOST_HEADER_BYTES = 10**8
# As of jobs/distill.py, for weights that are this wide.
USUAL_RATE, USUAL_WIDTH = 5e-5, 2048

logger = logging.getLogger(__name__)


def check_adaptation(config: GenerateConfig, models: ModelPlan, topology: Topology) -> None:
    """Raises :class:`UserError` where ``--adapt_draft`` is not possible."""
    if not config.adapt_draft:
        return
    if models.draft is None:
        raise UserError(
            "--adapt_draft trains a draft model while it waits, and this run has none: name one with "
            "--draft, without --policy none; or leave it out"
        )
    given = {
        "num_targets and --num_drafts": config.shares_drafts,
        "trace": config.is_traced,
        "head": config.head is not None,
        "draft_quantization": config.draft_quantization is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"--adapt_draft changes the draft on the way: {_REASONS[name]}")
    if topology.is_colocated:
        raise UserError(
            "--adapt_draft learns while a draft on a rank of its own waits, and here the draft shares the "
            f"target's rank 0: launch with --num_processes {config.tp_size + 1}, or leave it out"
        )
    _check_draft(config, models.draft)


_REASONS = {
    "num_targets and --num_drafts": "a draft that target groups share (--num_targets, --num_drafts) waits "
    "for none of them alone; launch a replica for each target, or leave it out",
    "trace": "a --trace is of one draft, for replays of its policies; leave one of them out",
    "head": "--head was trained for the draft as it is, and would misjudge another; leave one of them out, "
    "or choose a policy without a head",
    "draft_quantization": "weights of --draft_quantization cannot be trained; leave one of them out",
}


def _check_draft(config: GenerateConfig, draft: Checkpoint) -> None:
    what = f"--adapt_draft with --draft {draft.name}"
    if draft.is_eagle:
        raise UserError(
            f"{what}, an EAGLE-3 draft, which learns from the target's states: leave it out, or train the "
            "draft before the run with jobs/distill.py --kind eagle3"
        )
    if draft.is_self or quantization_of(draft) is not None:
        raise UserError(
            f"{what}: the target's own weights, or quantised ones, cannot be trained: leave it out, or name "
            "the folder of a plain draft model"
        )
    most, num_weights = config.adapt_bytes(), _num_weights(draft)
    if most is not None and num_weights * BYTES_PER_WEIGHT > most:
        needed = gib(num_weights * BYTES_PER_WEIGHT)
        raise UserError(
            f"--adapt_memory {config.adapt_memory} is less than the {needed} GiB that learning "
            f"takes with --draft {draft.name} ({BYTES_PER_WEIGHT} bytes for each of its "
            f"{num_weights} weights): raise it, or leave --adapt_draft out"
        )


def _num_weights(draft: Checkpoint) -> int:
    """At most; tied weights count twice if they are stored twice."""
    stored = sum(path.stat().st_size for path in draft.weight_files)
    return int(stored // draft.torch_dtype("auto").itemsize)


class Keeper:
    """On the draft's rank: the draft that learns, and its folder."""

    def __init__(
        self,
        config: GenerateConfig,
        draft: Checkpoint,
        runner: ModelRunner,
        settings: SamplingSettings,
        vocab_size: int,
    ) -> None:
        """Puts the draft that an earlier start of the run has kept into the runner's weights. Raises
        :class:`UserError` for a draft that cannot learn."""
        self._runner, self._draft = runner, draft
        self._output = storage_path(config.output, option="output", spool=config.spool)
        self._base = hashlib.sha256(
            json.dumps(
                [draft.fingerprint(), draft.adapter and draft.adapter.fingerprint()], sort_keys=True
            ).encode()
        ).hexdigest()
        self._thread: threading.Thread | None = None
        self.switches: list[dict[str, Any]] = []
        # Steps of learning that are in the weights with which this start began.
        self._num_steps_before = 0
        self._go_on()
        own = parameters_of(runner)
        hidden_size = int(runner.model.config.get_text_config().hidden_size)
        self.learner = Adaptation(
            copy_of(runner.model, own, runner.device),
            AdaptSettings(
                sampling=settings,
                vocab_size=vocab_size,
                rate=config.adapt_rate or USUAL_RATE * USUAL_WIDTH / hidden_size,
                batch_tokens=config.adapt_batch,
                buffer_tokens=config.adapt_buffer,
                interval=config.adapt_interval,
                margin=config.adapt_margin,
                seed=config.seed,
            ),
            Served(weights=own, replace=partial(replace_weights, runner)),
            self,
        )

    def may_switch(self) -> bool:
        """Whether the draft before is kept: it is read while it serves."""
        return self._thread is None or not self._thread.is_alive()

    def on_switch(self, switch: Switch) -> None:
        """Keep the new draft, in a thread of its own."""
        judgement = switch.judgement
        self.switches.append(
            {
                "unix_s": round(time.time()),
                "num_steps": switch.num_steps,
                "agreement_before": round(judgement.of_draft, 4),
                "agreement_after": round(judgement.of_copy, 4),
                "num_judged_tokens": judgement.num_tokens,
            }
        )
        logger.info(
            "after %d steps of learning another draft takes over: of %d tokens it drafts %.3f, %.3f before",
            switch.num_steps, judgement.num_tokens, judgement.of_copy, judgement.of_draft,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._keep, name="keeping the draft")
        self._thread.start()

    def close(self) -> list[dict[str, Any]]:
        """All switches of the run, once they are kept."""
        if self._thread is not None:
            self._thread.join()
        return self.switches

    def _keep(self) -> None:
        """Unless another replica of this run has kept a draft that has learned more."""
        folder, path = self._output / ADAPTED, self._output / ADAPTED / WEIGHTS_NAME
        try:
            self.switches[-1]["complete_shards"] = len(RunFolder(self._output).recorded_shards())
            num_steps = self._num_steps_before + self.switches[-1]["num_steps"]
            kept = self._kept(path)
            if kept.get("num_steps", 0) > num_steps:
                logger.info("%s keeps the draft of another replica, which has learned more", folder)
                return
            self._write_small_files(folder)
            own = self._runner.model.named_parameters()
            weights = {name: each.detach().cpu().contiguous() for name, each in own}
            others = [switch for switch in kept.get("switches", []) if switch not in self.switches]
            switches = sorted([*others, *self.switches], key=lambda switch: switch["unix_s"])
            about = {"base": self._base, "num_steps": num_steps, "switches": switches}
            content = save(weights, {"format": "pt", ABOUT: json.dumps(about)})
            write_atomically(path, lambda file: file.write(content))
        except OSError as error:
            logger.warning("%s cannot be written, a relaunch begins with an older draft: %s", folder, error)

    def _kept(self, path: Path) -> dict[str, Any]:
        """What the weights there say of themselves; nothing if they are damaged, or made of another draft."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError), path.open("rb") as file:
            about = about_weights(file)
            return about if about["base"] == self._base else {}
        return {}

    def _write_small_files(self, folder: Path) -> None:
        """The configuration and the tokenizer."""
        if (folder / WEIGHTS_NAME).is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._draft.folder.iterdir()):
            if path.suffix in SMALL_FILE_SUFFIXES and not path.name.endswith(".index.json"):
                content = path.read_bytes()
                write_atomically(folder / path.name, partial(_write, content))

    def _go_on(self) -> None:
        """With the weights that were kept, if they were made of this draft."""
        path = self._output / ADAPTED / WEIGHTS_NAME
        if not path.is_file():
            return
        try:
            content = path.read_bytes()
            about = about_weights(io.BytesIO(content))
            weights: Mapping[str, Tensor] = load(content)
            if about["base"] != self._base:
                logger.info("%s was made of another draft: beginning with --draft", path.parent)
                return
            replace_weights(self._runner, weights)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read ({error!r}): delete {path.parent} to begin with --draft again"
            ) from error
        self.switches, self._num_steps_before = about["switches"], about.get("num_steps", 0)
        logger.info("going on with the draft in %s", path.parent)


def _write(content: bytes, file: Any) -> None:
    file.write(content)


def about_weights(file: IO[bytes]) -> dict[str, Any]:
    """What the weights were made of, and when. Raises ValueError or KeyError for other files."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(size, MOST_HEADER_BYTES)))
    about: dict[str, Any] = json.loads(header["__metadata__"][ABOUT])
    return about


def keeper_of(
    config: GenerateConfig,
    models: ModelPlan,
    draft: ModelRunner | None,
    settings: SamplingSettings,
) -> Keeper | None:
    """On the draft's rank of a run with ``--adapt_draft``."""
    if not config.adapt_draft or draft is None or models.draft is None:
        return None
    return Keeper(config, models.draft, draft, settings, models.vocab_size)


def note_segments(folder: RunFolder, switches: list[dict[str, Any]]) -> None:
    """Let the manifest list the drafts that have followed the first: on rank 0."""
    segments = segments_of(folder.manifest)
    known = [segment.get("learned") for segment in segments]
    found = [
        {
            "draft": ADAPTED,
            "fingerprint": draft_fields(folder.manifest),
            "complete_shards": switch.get("complete_shards", 0),
            "learned": switch,
        }
        for switch in switches
        if switch not in known
    ]
    if found:
        folder.freeze(SEGMENTS, [*segments, *found])
