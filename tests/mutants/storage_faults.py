"""Faults in runs on an object store: lost answers, silence taken for absence, writes that are not exclusive."""

from tests.mutants.mutant import Mutant

STORAGE = "tests/data/test_storage.py"

STORAGE_FAULTS = (
    Mutant(
        name="store-lost-answer-is-a-lost-claim",
        file="data/object_store.py",
        old="return self.read(path) == content",
        new="return False",
        tests=(f"{STORAGE}::test_an_answer_that_is_lost_is_the_writer_s_own",),
    ),
    Mutant(
        name="store-claims-overwrite",
        file="data/object_store.py",
        old='self._try(self._filesystem.pipe_file, path, content, mode="create")',
        new="self._try(self._filesystem.pipe_file, path, content)",
        tests=(f"{STORAGE}::test_of_many_that_create_an_object_one_does",),
    ),
    Mutant(
        name="store-data-overwritten",
        file="data/object_store.py",
        old='options = {"mode": "create"} if exclusively else {}',
        new="options: dict[str, str] = {}",
        tests=(f"{STORAGE}::test_one_attempt_s_data_is_published",),
    ),
    Mutant(
        name="store-without-conditions-late-data-wins",
        file="data/decisions.py",
        old="    is_chosen = _decide(decision, own.name)\n",
        new="    decision.unlink(missing_ok=True)\n    is_chosen = _decide(decision, own.name)\n",
        tests=(f"{STORAGE}::test_without_conditional_writes_a_shard_has_the_data_of_one_attempt",),
    ),
    Mutant(
        name="store-without-conditions-chosen-data-is-lost",
        file="data/publishing.py",
        old="            go_on(paths.data, paths.decision)\n",
        new="            pass\n",
        tests=(f"{STORAGE}::test_without_conditional_writes_a_shard_has_the_data_of_one_attempt",),
    ),
    Mutant(
        name="store-probes-make-folder-another-s",
        file="data/opening.py",
        old=' or entry.name.startswith(f"{PROBE}.")',
        new="",
        tests=(f"{STORAGE}::test_replicas_that_try_out_a_new_folder_are_not_in_each_other_s_way",),
    ),
    Mutant(
        name="store-uploads-of-other-runs-are-aborted",
        file="data/object_store.py",
        old='            if upload["Key"].startswith(f"{prefix}/"):\n',
        new="            if prefix:\n",
        tests=(f"{STORAGE}::test_a_complete_run_leaves_nothing_of_replicas_that_were_killed",),
    ),
    Mutant(
        name="store-late-copies-stay",
        file="data/leftovers.py",
        old="            for name in path.store.below(parts.key):\n",
        new="            for name in ():\n",
        tests=(f"{STORAGE}::test_a_complete_run_leaves_nothing_of_replicas_that_were_killed",),
    ),
    Mutant(
        name="store-rows-of-a-run-begun-anew-are-removed",
        file="data/leftovers.py",
        old='if folder.manifest.info.get(RUN_TAG, "") == folder.run_tag:',
        new="if folder.manifest.info:",
        tests=(f"{STORAGE}::test_a_run_begun_anew_keeps_its_rows_when_a_replica_of_the_old_one_ends",),
    ),
    Mutant(
        name="store-silence-is-absence",
        file="data/publishing.py",
        old="""            return parse_fields(ShardRecord, path.read_bytes())
        except StoreError:
            raise
""",
        new="""            return parse_fields(ShardRecord, path.read_bytes())
""",
        tests=(f"{STORAGE}::test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one",),
    ),
    Mutant(
        name="store-late-copy-of-a-log-stays",
        file="data/stored_parts.py",
        old="if self._is_complete():",
        new="if False:",
        tests=(f"{STORAGE}::test_a_copy_of_a_log_that_comes_too_late_is_removed",),
    ),
    Mutant(
        name="store-changed-prompts-are-the-old-ones",
        file="data/fetching.py",
        old="told = [(str(file), info.st_size, info.version or info.st_mtime) for file, info in files.items()]",
        new="told = [str(file) for file in files]",
        tests=(f"{STORAGE}::test_prompts_are_fetched_once",),
    ),
)
