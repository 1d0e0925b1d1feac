"""Faults in runs on an object store: lost answers, silence taken for absence, writes that are not exclusive."""

from tests.mutants.mutant import Mutant

STORAGE = "tests/data/test_storage.py"

STORAGE_FAULTS = (
    Mutant("store-lost-answer-is-a-lost-lease", "ObjectStore.create",
        "return self.read(path) == content",
        "return False",
        (f"{STORAGE}::test_an_answer_that_is_lost_is_the_writer_s_own",)),
    Mutant("store-leases-overwrite", "ObjectStore.create",
        'self._try(self._filesystem.pipe_file, path, content, mode="create")',
        "self._try(self._filesystem.pipe_file, path, content)",
        (f"{STORAGE}::test_of_many_that_create_an_object_one_does",)),
    Mutant("store-data-overwritten", "ObjectStore.upload",
        'options = {"mode": "create"} if exclusively else {}',
        "options: dict[str, str] = {}",
        (f"{STORAGE}::test_one_attempt_s_data_is_published",)),
    Mutant("store-uploads-of-other-runs-are-aborted", "ObjectStore.abort_uploads",
        '            if upload["Key"].startswith(f"{prefix}/"):\n',
        "            if prefix:\n",
        (f"{STORAGE}::test_a_complete_run_leaves_nothing_of_replicas_that_were_killed",)),
    Mutant("store-silence-is-absence", "ShardRecord.read",
        ("            return parse_fields(ShardRecord, path.read_bytes())\n"
         "        except StoreError:\n"
         "            raise\n"),
        "            return parse_fields(ShardRecord, path.read_bytes())\n",
        (f"{STORAGE}::test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one",)),
    Mutant("store-late-copy-of-a-log-stays", "StoredPartLog._try_to_copy",
        "if self._is_complete():",
        "if False:",
        (f"{STORAGE}::test_a_copy_of_a_log_that_comes_too_late_is_removed",)),
    Mutant("store-changed-prompts-are-the-old-ones", "_digest",
        "told = [(str(file), info.st_size, info.version or info.st_mtime) for file, info in files.items()]",
        "told = [str(file) for file in files]",
        (f"{STORAGE}::test_prompts_are_fetched_once",)),
)
