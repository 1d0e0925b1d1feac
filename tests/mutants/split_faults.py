"""Faults in the sharing of the last shards, and in the order in which rows begin."""

from tests.mutants.mutant import Mutant

SPLITS = "tests/job/test_splits.py"
NO_ROW_TWICE = f"{SPLITS}::test_replicas_without_a_shard_take_rows_of_others_and_no_row_twice"
LOST_CLAIMS = f"{SPLITS}::test_rows_of_splits_whose_claims_are_gone_are_the_shards_again"
SURVIVE = f"{SPLITS}::test_rows_survive_whatever_becomes_of_the_replicas"
FOLDERS = "tests/data/test_claim_folders.py"
OF_QUEUE = (
    "tests/data/test_shard_queue.py::"
    "test_a_split_is_one_replicas_at_a_time_and_its_rows_are_read_by_whoever_has_the_shard"
)

SPLIT_FAULTS = (
    Mutant(
        name="split-row-generated-twice",
        file="job/recording.py",
        old="work.pending = deque(row for row in work.pending if row not in offered)",
        new="work.pending = deque(work.pending)",
        tests=(NO_ROW_TWICE,),
    ),
    Mutant(
        name="split-row-lost-with-its-claim",
        file="job/recording.py",
        old="work.pending.extend(missing)",
        new="work.pending.extend(missing[1:])",
        tests=(LOST_CLAIMS,),
    ),
    Mutant(
        name="split-taken-as-finished-before-it-is",
        file="job/recording.py",
        old="missing = [row for row in rows if not self._is_finished(work.log, row)]",
        new="missing: list[int] = []",
        tests=(LOST_CLAIMS,),
    ),
    Mutant(
        name="work-of-splits-not-counted",
        file="job/recording.py",
        old="            counted.add(Stats.from_json(found))\n",
        new="            Stats.from_json(found)\n",
        tests=(NO_ROW_TWICE,),
    ),
    Mutant(
        name="new-holder-of-a-shard-generates-rows-of-its-splits",
        file="data/run_folder.py",
        old="beside = [log.path for log in logs if log.split != split]",
        new="beside: list[Path] = []",
        tests=(OF_QUEUE,),
    ),
    Mutant(
        name="claims-of-splits-outlive-their-shard",
        file="data/claims.py",
        old='files = self._names(level, f"shard-{shard:05d}.", f"split-{shard:05d}-")',
        new='files = self._names(level, f"shard-{shard:05d}.")',
        tests=(OF_QUEUE,),
    ),
    Mutant(
        name="split-offered-of-a-lost-shard",
        file="data/shard_queue.py",
        old="            if not self._claims.is_held(claimed.claim):\n                self._claims.forget(offered.name)",
        new="            if False:\n                self._claims.forget(offered.name)",
        tests=(
            "tests/data/test_shard_queue.py::test_a_split_of_a_shard_that_was_lost_meanwhile_is_not_offered",
        ),
    ),
    Mutant(
        name="released-split-without-its-rows",
        file="data/shard_queue.py",
        old="self._claims.release(claimed.claim, claimed.rows)",
        new="self._claims.release(claimed.claim)",
        tests=(OF_QUEUE,),
    ),
    Mutant(
        name="shortest-rows-first",
        file="job/lengths.py",
        old="return sorted(rows, key=self._expected, reverse=True)",
        new="return sorted(rows, key=self._expected)",
        tests=(f"{SPLITS}::test_finished_samples_tell_the_length_of_a_rows_others",),
    ),
    Mutant(
        name="shard-is-taken-from-holder-that-began-meanwhile",
        file="data/shard_queue.py",
        old="        if above and self._claims.is_claimed(name):\n",
        new="        if False:\n",
        tests=("tests/data/test_shard_queue.py",),
    ),
    Mutant(
        name="claims-in-numbered-folders-are-not-seen",
        file="data/claim_folders.py",
        old='return found | {level: _names_in(folder / level) for level in filter(is_level, found[""])}',
        new="return found",
        tests=(FOLDERS,),
    ),
    Mutant(
        name="claim-fails-where-its-numbered-folder-was-removed",
        file="data/claims.py",
        old="                path.parent.mkdir(exist_ok=True)\n",
        new="                raise\n",
        tests=(FOLDERS,),
    ),
    Mutant(
        name="claims-of-an-older-run-in-numbered-folders",
        file="data/layout.py",
        old='return "" if size is None else f"{shard // size:05d}"\n\n    def shards_of',
        new='return f"{shard // (size or 4000):05d}"\n\n    def shards_of',
        tests=(FOLDERS,),
    ),
    Mutant(
        name="heartbeats-in-a-full-folder",
        file="data/claim_folders.py",
        old="if _num_beats(beat_folder(folder, name)) < MAX_REPLICAS_PER_FOLDER)",
        new="if _num_beats(beat_folder(folder, name)) >= 0)",
        tests=(FOLDERS,),
    ),
    Mutant(
        name="listings-of-numbered-folders-cost-nothing",
        file="data/claims.py",
        old="len(names) + NAMES_PER_LISTING * (len(found) - 1)",
        new="len(names)",
        tests=(FOLDERS,),
    ),
)
