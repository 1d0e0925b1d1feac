"""Faults in how rows and shards reach the disk."""

from tests.mutants.mutant import Mutant

COLUMNS = "tests/data/test_columns.py"
CONVERTED = "tests/data/test_converted.py"
JSON_COLUMNS = "tests/data/test_json_columns.py"
CHAT_FORMAT = "tests/job/test_chat_format.py"
FILES = "tests/data/test_files.py"
PUBLISHING = "tests/data/test_publishing.py"
PARTS = "tests/data/test_parts.py"
MERGING = "tests/data/test_merging.py"
RUN_FOLDER = "tests/data/test_run_folder.py"


DATA_FAULTS = (
    # Files.
    Mutant("file-gets-name-before-on-disk", "write_durably",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.flush()\n",
        (FILES,), is_dangerous=True),
    Mutant("file-tidied-away-ends-paused-replica", "write_atomically",
        "        except FileNotFoundError:\n            continue\n",
        "",
        (FILES,)),
    Mutant("link-whose-answer-lost-counts-as-failed", "publish",
        "        if not path.exists() or not temporary.samefile(path):\n            return False\n",
        "        return False\n",
        (FILES,)),
    Mutant("seal-not-compared", "unsealed",
        "    if values.get(SEAL) != _seal_of(rest):\n",
        "    if SEAL not in values:\n",
        (FILES, RUN_FOLDER)),
    # Shards.
    Mutant("shard-complete-before-statistics", "Attempt.finish",
        "        self.publish_stats()\n        self.publish_trace()\n        self.publish_record()\n",
        "        self.publish_record()\n        self.publish_stats()\n        self.publish_trace()\n",
        (PUBLISHING,)),
    Mutant("shard-of-another-size-counts-as-complete", "ShardPaths.is_complete",
        "self.data.stat().st_size == record.num_bytes",
        "self.data.is_file()",
        (PUBLISHING, RUN_FOLDER)),
    Mutant("attempt-won-told-by-size-alone", "Attempt.that_won",
        "                if record.sha256 == digest:\n",
        "                if digest:\n",
        (PUBLISHING,)),
    Mutant("who-finds-anothers-data-overwrites-it", "Attempt.publish_data",
        "            return publish(self._own(self._paths.data), self._paths.data)\n",
        "            return self.replace_data()\n",
        (PUBLISHING,)),
    # Rows of unfinished shards.
    Mutant("lines-checksum-not-compared", "_load",
        "if match is None or int(match[1], 16) != zlib.crc32(match[2]):",
        "if match is None:",
        (PARTS,)),
    Mutant("of-two-results-for-sample-last-counts", "_load",
        "                    results.setdefault((result.row_id, result.sample_index), result)\n",
        "                    results[result.row_id, result.sample_index] = result\n",
        (PARTS,)),
    Mutant("torn-line-stays-in-front-of-next", "PartLog.__init__",
        "            self._file.truncate(self._num_bytes)\n            fsync_folder(path.parent)\n",
        "            fsync_folder(path.parent)\n",
        (PARTS,)),
    Mutant("rows-of-another-shard-taken", "_load",
        "if rows is None or result.row_id in rows:",
        "if True:",
        (PARTS,)),
    Mutant("failed-sync-is-not-told", "PartLog._sync",
        "            self._sync_error = error\n",
        "            pass\n",
        (PARTS,)),
    # Converted prompts.
    # Two of something.
    Mutant("files-of-several-splits-are-one-input", "inputs.check_split",
        "    if found and not set.intersection(*found):\n",
        "    if found and not set.union(*found):\n",
        (COLUMNS,)),
    Mutant("keys-in-another-order-are-another-type", "columns._is_same",
        "    if pa.types.is_struct(first) and pa.types.is_struct(other):\n",
        "    if first == other and pa.types.is_struct(first):\n",
        (COLUMNS,)),
    # Objects of the input.
    Mutant("objects-with-other-key-order-share-a-struct", "Shapes.see",
        "shape = True, tuple(value)",
        "shape = True, tuple(sorted(value))",
        (JSON_COLUMNS,)),
    Mutant("nulls-of-a-message-that-were-meant-are-dropped", "chat_message",
        "if value is not None or key not in OPTIONAL}",
        "if value is not None}",
        (JSON_COLUMNS,)),
    Mutant("json-in-merged-lines-is-text", "_write_jsonl",
        "for row in rows_of(batch))",
        "for row in batch.to_pylist())",
        (JSON_COLUMNS,)),
    Mutant("text-of-yaml-is-what-yaml-makes-of-it", "OptionParser._written",
        "return item.value if item.tag in PLAIN_TAGS else read.value(item)",
        "return read.value(item)",
        ("tests/config/test_generate.py",)),
    Mutant("a-template-is-told-the-time-of-each-row", "PromptEncoder._applied",
        "chat_template=with_clock(template, self._chat_format.now),",
        "chat_template=template,",
        (CHAT_FORMAT,)),
    Mutant("each-start-has-a-clock-of-its-own", "prompt_encoder",
        "    if folder is not None and CLOCK in folder.manifest.info:\n",
        "    if False:\n",
        (CHAT_FORMAT,)),
    # Merging.
    Mutant("merged-rows-of-a-neighbouring-shard", "_is_planned",
        "np.array_equal(row_ids[begins], np.arange(*plan.bounds(shard)))",
        "len(begins) == len(range(*plan.bounds(shard)))",
        (MERGING,)),
)
