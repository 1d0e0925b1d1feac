"""Faults in statistics, and in how rows and shards reach the disk."""

from tests.mutants.mutant import Mutant

LEDGER = "tests/engine/test_stats_recorder.py"
STATS = "tests/stats/test_shard.py"
CONVERTED = "tests/data/test_converted.py"
FILES = "tests/data/test_files.py"
PUBLISHING = "tests/data/test_publishing.py"
PARTS = "tests/data/test_parts.py"
CLAIMS = "tests/data/test_claims.py"
TRACING = "tests/engine/test_tracing.py::test_tracing_changes_nothing_and_agrees_with_the_statistics[none-greedy-fixed]"
LAYOUT = "tests/data/test_layout.py"
RUN_FOLDER = "tests/data/test_run_folder.py"

ROOFLINE = "tests/planning/test_roofline.py"
COUNTS = "tests/gpu/test_counts.py::test_the_last_line_has_what_is_counted_and_it_is_no_worse"

DATA_FAULTS = (
    # Plans, and what they reckon with.
    Mutant(
        name="planner-forgets-kernels-outside-of-layers",
        file="planning/counted.py",
        old="return num_layers * self.kernels_per_layer + self.kernels_outside_of_layers",
        new="return num_layers * self.kernels_per_layer",
        tests=(ROOFLINE,),
    ),
    Mutant(
        name="planner-pays-for-one-layers-tensors",
        file="planning/roofline.py",
        old="            num_layers\n            * self.counts.tensors_per_layer\n",
        new="            self.counts.tensors_per_layer\n",
        tests=(ROOFLINE,),
    ),
    Mutant(
        name="attention-copies-cache",
        file="models/kernel.py",
        old="            key_pages,\n            value_pages,\n            segments.block_table_SP,\n",
        new="            key_pages.clone(),\n            value_pages,\n            segments.block_table_SP,\n",
        tests=(COUNTS,),
    ),
    # Statistics.
    Mutant(
        name="target-passes-not-counted-for-fit-of-times",
        file="engine/stats_recorder.py",
        old="            self._now.num_target_passes + (pass_time is not None),\n",
        new="            self._now.num_target_passes,\n",
        tests=(LEDGER,),
    ),
    Mutant(
        name="fit-leaves-out-drafts-time",
        file="engine/stats_recorder.py",
        old="self._now.decoding_ns + target.verify + reply.times.draft",
        new="self._now.decoding_ns + target.verify",
        tests=(LEDGER,),
    ),
    Mutant(
        name="fit-counts-passes-before-row-began",
        file="engine/stats_recorder.py",
        old="num_target_passes=self._now.num_target_passes - mark.num_target_passes,",
        new="num_target_passes=self._now.num_target_passes,",
        tests=(LEDGER,),
    ),
    Mutant(
        name="shards-completion-counts-no-prompt-tokens",
        file="engine/stats_recorder.py",
        old="        stats.num_prompt_tokens += sequence.num_prompt_tokens\n",
        new="",
        tests=(LEDGER,),
    ),
    Mutant(
        name="all-drafted-tokens-count-as-accepted",
        file="stats/shard.py",
        old="self.num_accepted_tokens += num_accepted",
        new="self.num_accepted_tokens += num_drafted",
        tests=(STATS,),
    ),
    Mutant(
        name="acceptance-by-position-counts-what-drafted",
        file="stats/shard.py",
        old="for position in range(num_accepted):",
        new="for position in range(num_drafted):",
        tests=(STATS,),
    ),
    Mutant(
        name="hit-counts-all-tokens-of-chain-as-drafted-ahead",
        file="stats/shard.py",
        old="self.num_ahead_tokens += 1 if outcome.is_hit else outcome.num_tokens",
        new="self.num_ahead_tokens += outcome.num_tokens",
        tests=(STATS,),
    ),
    Mutant(
        name="rank-of-branch-counts-from-0",
        file="stats/shard.py",
        old="_add_to(self.num_branch_hits_per_rank, outcome.branch_rank - 1, 1)",
        new="_add_to(self.num_branch_hits_per_rank, outcome.branch_rank, 1)",
        tests=(STATS,),
    ),
    Mutant(
        name="trusted-tokens-count-as-judged",
        file="stats/shard.py",
        old="num_accepted = self.num_accepted_tokens - self.num_trusted_tokens + self.num_ahead_hits",
        new="num_accepted = self.num_accepted_tokens + self.num_ahead_hits",
        tests=(STATS,),
    ),
    Mutant(
        name="peak-memory-of-two-shards-added-up",
        file="stats/shard.py",
        old="mine.target, mine.draft = max(mine.target, theirs.target), max(mine.draft, theirs.draft)",
        new="mine.target, mine.draft = mine.target + theirs.target, mine.draft + theirs.draft",
        tests=(STATS,),
    ),
    Mutant(
        name="proportional-parts-lose-their-remainders",
        file="stats/shard.py",
        old="        parts[key], given = upto - given, upto\n",
        new="        parts[key] = amount * weight // total\n",
        tests=(STATS,),
    ),
    Mutant(
        name="trace-calls-one-token-more-judged",
        file="engine/engine.py",
        old="num_verified = min(num_kept + (stop.reason is None), num_drafted)",
        new="num_verified = num_drafted",
        tests=(TRACING,),
    ),
    # Files.
    Mutant(
        name="file-gets-name-before-on-disk",
        file="data/files.py",
        old="            file.flush()\n            os.fsync(file.fileno())\n",
        new="            file.flush()\n",
        tests=(FILES,),
        is_dangerous=True,
    ),
    Mutant(
        name="rename-not-made-durable",
        file="data/files.py",
        old="            temporary.unlink(missing_ok=True)\n            raise\n    fsync_folder(path.parent)\n",
        new="            temporary.unlink(missing_ok=True)\n            raise\n",
        tests=(FILES,),
    ),
    Mutant(
        name="file-tidied-away-ends-paused-replica",
        file="data/files.py",
        old="        except FileNotFoundError:\n            continue\n",
        new="",
        tests=(FILES,),
    ),
    Mutant(
        name="publishing-overwrites-what-there",
        file="data/files.py",
        old="        os.link(temporary, path)\n",
        new="        temporary.replace(path)\n",
        tests=(FILES,),
    ),
    Mutant(
        name="link-whose-answer-lost-counts-as-failed",
        file="data/files.py",
        old="        if not path.exists() or not temporary.samefile(path):\n            return False\n",
        new="        return False\n",
        tests=(FILES,),
    ),
    Mutant(
        name="seal-not-compared",
        file="data/files.py",
        old="    if values.get(SEAL) != _seal_of(rest):\n",
        new="    if SEAL not in values:\n",
        tests=(FILES, RUN_FOLDER),
    ),
    Mutant(
        name="shards-digest-of-first-piece",
        file="data/files.py",
        old="        while block := file.read(READ_BYTES):\n            digest.update(block)\n",
        new="        digest.update(file.read(READ_BYTES))\n",
        tests=(FILES,),
    ),
    # Shards.
    Mutant(
        name="shard-complete-before-statistics",
        file="data/publishing.py",
        old="        self.publish_stats()\n        self.publish_trace()\n        self.publish_record()\n",
        new="        self.publish_record()\n        self.publish_stats()\n        self.publish_trace()\n",
        tests=(PUBLISHING,),
    ),
    Mutant(
        name="shard-of-another-size-counts-as-complete",
        file="data/publishing.py",
        old="self.data.stat().st_size == record.num_bytes",
        new="self.data.is_file()",
        tests=(PUBLISHING, RUN_FOLDER),
    ),
    Mutant(
        name="attempt-won-told-by-size-alone",
        file="data/publishing.py",
        old="                if record.sha256 == digest:\n",
        new="                if digest:\n",
        tests=(PUBLISHING,),
    ),
    Mutant(
        name="attempts-names-not-durable-when-data-published",
        file="data/publishing.py",
        old="        for folder in {path.parent for path in paths.all()}:\n            fsync_folder(folder)\n",
        new="",
        tests=(PUBLISHING,),
    ),
    Mutant(
        name="who-finds-anothers-data-overwrites-it",
        file="data/publishing.py",
        old="            return publish(own, data) if decision is None else publish_decided(own, data, decision)\n",
        new="            return self.replace_data()\n",
        tests=(PUBLISHING,),
    ),
    # Rows of unfinished shards.
    Mutant(
        name="lines-checksum-not-compared",
        file="data/parts.py",
        old="if match is None or int(match[1], 16) != zlib.crc32(match[2]):",
        new="if match is None:",
        tests=(PARTS,),
    ),
    Mutant(
        name="of-two-results-for-sample-last-counts",
        file="data/parts.py",
        old="                    results.setdefault((result.row_id, result.sample_index), result)\n",
        new="                    results[result.row_id, result.sample_index] = result\n",
        tests=(PARTS,),
    ),
    Mutant(
        name="torn-line-stays-in-front-of-next",
        file="data/parts.py",
        old="            self._file.truncate(self._num_bytes)\n            fsync_folder(path.parent)\n",
        new="            fsync_folder(path.parent)\n",
        tests=(PARTS,),
    ),
    Mutant(
        name="rows-of-another-shard-taken",
        file="data/parts.py",
        old="if rows is None or result.row_id in rows:",
        new="if True:",
        tests=(PARTS,),
    ),
    Mutant(
        name="appended-rows-never-made-durable",
        file="data/parts.py",
        old="if self._clock() - self._synced_at >= SYNC_INTERVAL_S:",
        new="if False:",
        tests=(PARTS,),
    ),
    Mutant(
        name="row-waits-for-the-disk",
        file="data/parts.py",
        old="        self._syncing.start()\n",
        new="        self._syncing.start()\n        self._syncing.join()\n",
        tests=(PARTS,),
    ),
    Mutant(
        name="failed-sync-is-not-told",
        file="data/parts.py",
        old="            self._sync_error = error\n",
        new="            pass\n",
        tests=(PARTS,),
    ),
    # Claims.
    Mutant(
        name="slow-looks-never-tell-silence",
        file="data/heartbeat.py",
        old="last.num_far = now, last.num_far + 1",
        new="last.num_far = now, 0",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="one-pause-is-silence",
        file="data/heartbeat.py",
        old="MAX_FAR_LOOKS = 4",
        new="MAX_FAR_LOOKS = 1",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="old-look-at-claims-wins-claim",
        file="data/claims.py",
        old="        if not self.is_held(claim) or (latest",
        new="        if (latest",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="claim-taken-from-who-holds-it",
        file="data/claims.py",
        old="if holding.replica is None or self._watch.is_gone(holding.replica):",
        new="if True:",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="converted-rows-before-types-widened-are-lost",
        file="data/converted.py",
        old="for batch in _batches(pieces[:-1]):",
        new="for batch in _batches(pieces[-2:-1]):",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="converted-rows-of-a-file-that-has-changed",
        file="data/converted.py",
        old=", [asdict(stamp) for stamp in stamps]])",
        new=", [stamp.path for stamp in stamps]])",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="converted-files-read-again-for-their-digest",
        file="data/prompts.py",
        old="    watched.know([*found.stamps] or known)\n",
        new="",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="heartbeat-read-more-often-than-it-beats",
        file="data/heartbeat.py",
        old="is_read = last is None or",
        new="is_read = True or",
        tests=("tests/data/test_claims.py::test_a_heartbeat_is_read_no_more_often_than_it_beats",),
    ),
    Mutant(
        name="holder-of-claim-never-read-again",
        file="data/claims.py",
        old="if holder is not None and num_looks < MAX_LOOKS and",
        new="if holder is not None and",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="all-waiting-replicas-watch-all-claims",
        file="data/shard_choice.py",
        old="heapq.nsmallest(num_watched, claimed",
        new="heapq.nsmallest(len(claimed), claimed",
        tests=("tests/data/test_shard_choice.py",),
    ),
    Mutant(
        name="replicas-that-wait-look-as-often-as-few-do",
        file="data/membership.py",
        old="        return min(poll_s, MAX_SILENCE_SHARE",
        new="        return min(self._poll_s, MAX_SILENCE_SHARE",
        tests=("tests/scale/test_scale.py",),
    ),
    Mutant(
        name="waiting-replicas-always-watch-the-same-claims",
        file="data/shard_choice.py",
        old='zlib.crc32(f"{replica} {period}".encode()) | 1',
        new="1",
        tests=("tests/data/test_shard_choice.py",),
    ),
    Mutant(
        name="all-replicas-try-first-shard",
        file="data/shard_choice.py",
        old="    random.shuffle(window)",
        new="",
        tests=("tests/data/test_shard_choice.py",),
    ),
    Mutant(
        name="who-takes-claim-removes-it",
        file="data/claims.py",
        old="other.generation < claim.generation:\n                self._remove(other)",
        new="other.generation <= claim.generation:\n                self._remove(other)",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="lowest-claim-in-force",
        file="data/claims.py",
        old="in_order = sorted(found, key=lambda claim: claim.generation)",
        new="in_order = sorted(found, key=lambda claim: -claim.generation)",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="total-outlives-a-deleted-shard",
        file="data/run_folder.py",
        old="if group in totalled and self._is_whole(group, files):",
        new="if group in totalled:",
        tests=(LAYOUT,),
    ),
    Mutant(
        name="total-of-one-shard-too-few",
        file="job/totals.py",
        old="if folder.recorded_in(group).issuperset(shards):",
        new="if folder.recorded_in(group).issuperset(shards[:-1]):",
        tests=(LAYOUT,),
    ),
    Mutant(
        name="claims-of-long-numbers-are-not-seen",
        file="data/claims.py",
        old=r"(?:-\d{5,}){0,2}",
        new=r"(?:-\d{5}){0,2}",
        tests=(LAYOUT,),
    ),
)
