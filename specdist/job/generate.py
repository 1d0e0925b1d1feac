"""The main job: prompts in, a run folder out. ``specdist generate`` calls :func:`run_generation`."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.data.leases.opening import remove_leftovers
from specdist.data.run.manifest import UP_TO_ROUNDING
from specdist.data.stats.regression import NS_PER_S
from specdist.data.store.storage import local_folder
from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.stopping import StopRules
from specdist.job.costs.corrections import Corrections
from specdist.job.costs.measuring import costs_text
from specdist.job.models.model_plan import ModelPlan, plan_models_and_options
from specdist.job.preview import first_rows, of_all, prompt_line, row_text
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.entry import log_to_file, on_rank0, rank0_first, run_rank
from specdist.job.ranks.signals import EXIT_STOPPED, StopRequest
from specdist.job.ranks.topology import Topology, broadcast_from_rank0
from specdist.job.recording.assignments import Assignment, assign_from_rank0, follow_assignments
from specdist.job.recording.check import record_check
from specdist.job.recording.recording import Recorder
from specdist.job.recording.uploads import ShardWriter
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import Replica, build_replica
from specdist.job.rows.output_columns import ThinkingColumns, column_options
from specdist.job.rows.rollout_rows import rollout_rows
from specdist.job.rows.row_requests import RowRequests, prompt_encoder
from specdist.job.run.manifest import frozen_models, reproducibility
from specdist.job.run.opening import ranks_to_fork, run_batch_options
from specdist.job.run.preflight import (
    NUM_HALVINGS,
    ROWS_TOO_LARGE,
    RunPlan,
    RunRows,
    check_rows,
    freeze_costs,
    plan_run,
)
from specdist.job.run.workload import Workload
from specdist.job.texts.tokens import added_token_warnings, end_token_warnings, load_tokenizer
from specdist.job.totals.card import last_name, write_card
from specdist.job.totals.closing import closing_lines, exactness
from specdist.job.totals.hub import push_to_hub
from specdist.job.totals.progress import Progress
from specdist.job.totals.report import cut_line, frozen_costs, is_often_cut, total_stats, totals_document
from specdist.job.totals.status import error_kinds
from specdist.models.files.generation import OPTIONS, unused_settings
from specdist.utils.documents import print_document
from specdist.utils.errors import USAGE_ERROR
from specdist.utils.host import process_start_s

# Of every prompt that stands for others, its last tokens are kept.
NUM_TEXT_TOKENS = 128
PLACEMENTS = {"own": "has a rank of its own", "shared": "shares rank 0 with the target"}

logger = logging.getLogger(__name__)


def run_generation(config: GenerateConfig, given: Collection[str] = ()) -> int:
    """Run one rank of the job, or fork them; rank 0's last line on stdout is a JSON document.

    ``given``: the options that ``--generation_config model`` must not change.

    Returns the exit code: 0 when the run is complete, ``EXIT_STOPPED`` when it was stopped before.
    """
    if num_ranks := ranks_to_fork(config):
        from specdist.job.ranks.launch import fork_ranks

        if (code := fork_ranks(num_ranks)) is not None:
            return code
    return run_rank(config, config, partial(generate_on_ranks, given=given), can_start_over=True)


def generate_on_ranks(
    asked: GenerateConfig,
    topology: Topology,
    stop: StopRequest,
    activity: Activity,
    *,
    given: Collection[str] = (),
) -> int:
    """Generate every row that is not finished, and report the totals; returns the exit code."""
    own_options = broadcast_from_rank0(topology, on_rank0(topology, partial(run_batch_options, asked)))
    asked = replace(asked, **own_options)
    config, models = rank0_first(topology, partial(plan_models_and_options, asked, given))
    if config.preview is not None:
        return _preview(config, topology, models, activity)
    run = on_rank0(topology, partial(plan_run, config, models, topology))
    try:
        code = _generate_planned(config, topology, models, run, stop, activity)
        if run is not None and _conclude(config, run, topology):
            code = USAGE_ERROR
        return broadcast_from_rank0(topology, code)
    finally:
        if run is not None:
            run.membership.leave()


def _preview(config: GenerateConfig, topology: Topology, models: ModelPlan, activity: Activity) -> int:
    """Generate and print the first rows; returns the exit code. Raises :class:`UserError`."""
    run, work = on_rank0(topology, partial(check_rows, config, models)), None
    if run is not None:
        for warning in _warnings(config, models, run):
            logger.warning(warning)
        work = promised_work(config, models, run)
    work = broadcast_from_rank0(topology, work)
    plan = ReplicaPlan(config=config, models=models, topology=topology, workload=work)
    replica = build_replica(plan, activity=activity)
    activity.begin("generating", has_progress=True)
    if run is None:
        replica.serve()
    else:
        num_rows = min(config.preview or 0, run.prompts.num_rows)
        rows, stats = first_rows(num_rows, *_requests(config, models, run), replica)
    if replica.costs is None:
        replica.use_costs()
    if run is not None:
        document = {"rows": [json.loads(row.to_json()) for row in rows], **stats.summary(topology.world_size)}
        print_document(document, *map(row_text, rows), of_all(stats, plan, replica), sep="\n\n")
    return 0


def _generate_planned(
    config: GenerateConfig,
    topology: Topology,
    models: ModelPlan,
    run: RunPlan | None,
    stop: StopRequest,
    activity: Activity,
) -> int:
    """``run`` is None on all ranks except rank 0."""
    membership = None if run is None else run.membership
    log_to_file(local_folder(config.output, config.cache_dir), topology, membership, activity)
    work = None
    if run is not None:
        for warning in _warnings(config, models, run):
            logger.warning(warning)
        if run.pending_shards:
            work = run.folder.manifest.info, promised_work(config, models, run)
    work = broadcast_from_rank0(topology, work)
    if work is None:
        if run is not None:
            logger.info("%s is complete: nothing to do", config.output)
        return 0
    info, workload = work
    models = frozen_models(config, models, info)
    plan = ReplicaPlan(
        config=config,
        models=models,
        topology=topology,
        workload=workload,
        num_halvings=info.get(NUM_HALVINGS, 0),
    )
    frozen = agree = None
    if run is not None:
        frozen, agree = frozen_costs(run.folder), partial(freeze_costs, run)
    replica = build_replica(plan, frozen, agree, activity)
    if run is not None and (advice := replica.advice) is not None:
        logger.warning("%s", advice)
    activity.begin("generating", has_progress=True)
    if run is None:
        is_complete = follow_assignments(topology, replica, stop)
    else:
        is_complete = generate_rows(config, models, run, replica, topology, stop, frozen is not None)
    return 0 if is_complete else EXIT_STOPPED


def _warnings(config: GenerateConfig, models: ModelPlan, run: RunRows) -> list[str]:
    """What a run's options, its target and its prompts give reason to say before it begins."""
    used = {name: getattr(config, name) for name in OPTIONS}
    unused = unused_settings(models.target, used if config.generation_config == "none" else None)
    end_ids, tokenizer = models.target.stop_token_ids(), load_tokenizer(models.target)
    found = [*config.warnings(), *([unused] if unused else [])]
    found += end_token_warnings(tokenizer, end_ids, config.stop or [])
    if run.pending_shards and not run.prompts.is_chat:
        found += added_token_warnings(tokenizer, run.prompts.num_rows, run.prompts.num_beginning_with)
    return found


def promised_work(config: GenerateConfig, models: ModelPlan, run: RunRows) -> Workload:
    """What the prompts promise: some stand for all. Without costs to measure, the number of
    sequences alone."""
    num_completions = run.shards.num_completions
    if not config.needs_costs:
        return Workload(num_rows=num_completions)
    sampled = list(prompt_encoder(config, models, run.folder).sampled_prompts(run.prompts))
    lengths = [len(prompt_ids) + config.max_new_tokens // 2 for prompt_ids in sampled]
    texts = (token_id for ids in sampled for token_id in ids[-NUM_TEXT_TOKENS:])
    return Workload(
        num_rows=num_completions,
        num_context_tokens=int(statistics.median(lengths or [0])),
        text_ids=tuple(texts) if models.has_experts else (),
    )


def stays_frozen(config: GenerateConfig, topology: Topology, models: ModelPlan) -> bool:
    """Whether the first costs decide to the end: asynchronous blocks end where they say, and
    where a seed fixes the tokens a restart has the same bytes."""
    return config.is_asynchronous and reproducibility(config, topology, models) == "tokens"


def start_lines(
    config: GenerateConfig, run: RunPlan, replica: Replica, topology: Topology, *, has_kept_costs: bool
) -> list[str]:
    """For people: what runs, whether it is exact, what is known of times, and what is to do."""
    draft = f", draft {last_name(config.draft)}" if config.uses_draft else ""
    ranks = f"{topology.world_size} {'rank' if topology.world_size == 1 else 'ranks'}"
    placed = f"; the draft {PLACEMENTS[topology.draft_placement]}" if topology.draft_placement else ""
    if ahead := replica.ahead.num_ahead:
        placed += f", up to {ahead} tokens and {replica.ahead.num_branches} branches ahead"
    info, fixed = run.folder.manifest.info, "that alone"
    if info["reproducibility"] == "tokens":
        fixed = "the tokens, up to rounding" if info[UP_TO_ROUNDING] else "the tokens"
    return [
        f"models      target {last_name(config.target)}{draft}; {ranks} on {topology.device.type}{placed}",
        f"promise     {exactness(run.folder.manifest)}; --seed {config.seed} fixes {fixed}",
        f"costs       {costs_text(replica.costs, are_kept=has_kept_costs)}",
        f"work        {len(run.pending_shards)} of {run.shards.num_shards} shards to do, at most "
        f"{replica.num_slots} sequences at a time, {replica.num_pages * PAGE_SIZE:,} tokens of cache",
    ]


def _requests(config: GenerateConfig, models: ModelPlan, run: RunRows) -> tuple[RowRequests, StopRules]:
    """The requests of rows, and where their completions end."""
    encoder = prompt_encoder(config, models, run.folder)
    end_ids, strings = models.target.stop_token_ids(), tuple(config.stop or ())
    markers, info = models.constraints.markers, {} if run.folder is None else run.folder.manifest.info
    options: dict[str, Any] = {
        "prompts": run.prompts,
        "encoder": encoder,
        "num_samples": config.num_samples,
        "constraints": models.constraints,
        "row_options": run.row_options,
        "thinking": ThinkingColumns(markers, encoder.detokenizer, strings) if markers else None,
        "too_large": {tuple(row) for row in info.get(ROWS_TOO_LARGE, [])},
    }
    # A preview calls no function.
    judged = None if config.preview is not None else rollout_rows(config, options)
    rows = judged or RowRequests(**options)
    return rows, StopRules(encoder.detokenizer, end_ids, strings, config.stop_repeats)


def generate_rows(
    config: GenerateConfig,
    models: ModelPlan,
    run: RunPlan,
    replica: Replica,
    topology: Topology,
    stop: StopRequest,
    has_kept_costs: bool = False,
) -> bool:
    """Generate and record every row that is not finished, on rank 0, while the other ranks follow its
    assignments. Returns whether the run is complete; otherwise it was stopped."""
    rows, stop_rules = _requests(config, models, run)
    is_exact = record_check(config, run, replica.loading_check, replica.choices)
    for line in start_lines(config, run, replica, topology, has_kept_costs=has_kept_costs):
        logger.info(line)
    begun = (found for row in range(run.prompts.num_rows) for found in rows.begin(row, [0], 0))
    if (first := next((found for found in begun if isinstance(found, Request)), None)) is not None:
        logger.info(prompt_line(first, stop_rules.detokenizer))
    progress = Progress(run.shards.num_completions, 0)
    began_ns = round(process_start_s() * NS_PER_S)
    corrections = None
    if replica.costs is not None and config.uses_draft_model and not stays_frozen(config, topology, models):
        fixes_tokens = reproducibility(config, topology, models) == "tokens"
        corrections = Corrections(run, replica.costs, at_any_time=fixes_tokens)
    stats_recorder = StatsRecorder(began_ns, None if corrections is None else corrections.ratios)
    writer = ShardWriter(
        run, is_traced=config.is_traced, is_exact=is_exact, column_options=column_options(config)
    )
    recorder = Recorder(run, rows, stats_recorder, progress=progress, writer=writer, corrections=corrections)

    def should_stop() -> bool:
        recorder.tick()
        return stop.is_made

    run.membership.heartbeat.begin()
    stop.defer_signals()
    try:
        for assignment in assign_from_rank0(topology, recorder, stop):
            if assignment is Assignment.WORK:
                engine = replica.engine(recorder.requests(), stop_rules, stats_recorder)
                for completion in engine.run(should_stop):
                    recorder.record(completion)
            elif assignment is Assignment.COSTS:
                recorder.change_costs(replica.use_costs)
    finally:
        recorder.close()
        progress.close()
    return recorder.is_run_complete


def _conclude(config: GenerateConfig, run: RunPlan, topology: Topology) -> bool:
    """Report the totals of the finished shards; write the card of a complete run. Returns whether all its
    rows are errors for one reason."""
    folder = run.folder
    total = total_stats(folder)
    if is_often_cut(total.num_cut_completions, total.num_completions):
        settings = folder.manifest.fingerprint
        logger.warning(cut_line(total.num_cut_completions, total.num_completions, settings))
    for line in closing_lines(folder, total, num_devices=topology.world_size):
        logger.info(line)
    is_complete = not run.pending_shards
    if is_complete:
        write_card(folder)
        remove_leftovers(folder)
        if config.push_to_hub is not None:
            push_to_hub(folder, run.membership, config.push_to_hub)
    document = totals_document(folder, total, num_devices=topology.world_size, is_complete=is_complete)
    print_document(document)
    has_turns = config.turns_column is not None or config.rollout is not None
    if not is_complete or total.num_completions or has_turns:
        return False
    kinds = error_kinds(folder, range(run.shards.num_shards))
    reason, count = kinds.most_common(1)[0]
    logger.error("no row has a completion: of %d errors %d are: %s", kinds.total(), count, reason)
    return len(kinds) == 1
