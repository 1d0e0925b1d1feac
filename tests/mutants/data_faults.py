"""Faults in how rows and shards reach the disk."""

from tests.mutants.mutant import Mutant

CONVERTED = "tests/data/test_converted.py"
JSON_COLUMNS = "tests/data/test_json_columns.py"
CHAT_FORMAT = "tests/job/test_chat_format.py"
FILES = "tests/data/test_files.py"
PUBLISHING = "tests/data/test_publishing.py"
PARTS = "tests/data/test_parts.py"
LAYOUT = "tests/data/test_layout.py"
FIGURES = "tests/data/test_shard_figures.py"
MERGING = "tests/data/test_merging.py"
RUN_FOLDER = "tests/data/test_run_folder.py"


DATA_FAULTS = (
    # Files.
    Mutant(
        "file-gets-name-before-on-disk",
        "write_durably",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.flush()\n",
        (FILES,),
        is_dangerous=True,
    ),
    Mutant(
        "rename-not-made-durable",
        "write_atomically",
        "            temporary.unlink(missing_ok=True)\n            raise\n    fsync_folder(path.parent)\n",
        "            temporary.unlink(missing_ok=True)\n            raise\n",
        (FILES,),
    ),
    Mutant(
        "file-tidied-away-ends-paused-replica",
        "write_atomically",
        "        except FileNotFoundError:\n            continue\n",
        "",
        (FILES,),
    ),
    Mutant(
        "publishing-overwrites-what-there",
        "publish",
        "        os.link(temporary, path)\n",
        "        temporary.replace(path)\n",
        (FILES,),
    ),
    Mutant(
        "link-whose-answer-lost-counts-as-failed",
        "publish",
        "        if not path.exists() or not temporary.samefile(path):\n            return False\n",
        "        return False\n",
        (FILES,),
    ),
    Mutant(
        "seal-not-compared",
        "unsealed",
        "    if values.get(SEAL) != _seal_of(rest):\n",
        "    if SEAL not in values:\n",
        (FILES, RUN_FOLDER),
    ),
    Mutant(
        "shards-digest-of-first-piece",
        "sha256_of",
        "        while block := file.read(READ_BYTES):\n            digest.update(block)\n",
        "        digest.update(file.read(READ_BYTES))\n",
        (FILES,),
    ),
    # Shards.
    Mutant(
        "shard-complete-before-statistics",
        "Attempt.finish",
        "        self.publish_stats()\n        self.publish_trace()\n        self.publish_record()\n",
        "        self.publish_record()\n        self.publish_stats()\n        self.publish_trace()\n",
        (PUBLISHING,),
    ),
    Mutant(
        "shard-of-another-size-counts-as-complete",
        "ShardPaths.is_complete",
        "self.data.stat().st_size == record.num_bytes",
        "self.data.is_file()",
        (PUBLISHING, RUN_FOLDER),
    ),
    Mutant(
        "attempt-won-told-by-size-alone",
        "Attempt.that_won",
        "                if record.sha256 == digest:\n",
        "                if digest:\n",
        (PUBLISHING,),
    ),
    Mutant(
        "attempts-names-not-durable-when-data-published",
        "Attempt._write",
        "        for folder in {path.parent for path in paths.all()}:\n            fsync_folder(folder)\n",
        "",
        (PUBLISHING,),
    ),
    Mutant(
        "who-finds-anothers-data-overwrites-it",
        "Attempt.publish_data",
        "            return publish(own, data) if decision is None else _publish_decided(own, data, decision)\n",
        "            return self.replace_data()\n",
        (PUBLISHING,),
    ),
    # Rows of unfinished shards.
    Mutant(
        "lines-checksum-not-compared",
        "_load",
        "if match is None or int(match[1], 16) != zlib.crc32(match[2]):",
        "if match is None:",
        (PARTS,),
    ),
    Mutant(
        "of-two-results-for-sample-last-counts",
        "_load",
        "                    results.setdefault((result.row_id, result.sample_index), result)\n",
        "                    results[result.row_id, result.sample_index] = result\n",
        (PARTS,),
    ),
    Mutant(
        "torn-line-stays-in-front-of-next",
        "PartLog.__init__",
        "            self._file.truncate(self._num_bytes)\n            fsync_folder(path.parent)\n",
        "            fsync_folder(path.parent)\n",
        (PARTS,),
    ),
    Mutant(
        "rows-of-another-shard-taken",
        "_load",
        "if rows is None or result.row_id in rows:",
        "if True:",
        (PARTS,),
    ),
    Mutant(
        "appended-rows-never-made-durable",
        "PartLog.append",
        "if self._clock() - self._synced_at >= SYNC_INTERVAL_S:",
        "if False:",
        (PARTS,),
    ),
    Mutant(
        "row-waits-for-the-disk",
        "PartLog.begin_sync",
        "        self._syncing.start()\n",
        "        self._syncing.start()\n        self._syncing.join()\n",
        (PARTS,),
    ),
    Mutant(
        "failed-sync-is-not-told",
        "PartLog._sync",
        "            self._sync_error = error\n",
        "            pass\n",
        (PARTS,),
    ),
    # Converted prompts.
    Mutant(
        "converted-rows-before-types-widened-are-lost",
        "_convert",
        "for batch in _batches(pieces[:-1]):",
        "for batch in _batches(pieces[-2:-1]):",
        (CONVERTED,),
    ),
    Mutant(
        "types-of-a-converted-csv-column-by-its-last-piece",
        "CsvRows._see",
        "            kind for kind in self._types.get(name, range(len(TYPES)))\n",
        "            kind for kind in range(len(TYPES))\n",
        (CONVERTED,),
    ),
    Mutant(
        "options-of-converted-requests-by-the-last-one",
        "BatchRows._read",
        "batch.options += own.keys() - set(batch.options)",
        "batch.options = [*own] or batch.options",
        (CONVERTED,),
    ),
    Mutant(
        "what-converted-requests-ask-for-is-forgotten",
        "BatchRows.tell",
        '        self.batch = Batch(**told | {"reasons": dict(told["reasons"])})',
        "        self.batch = Batch()",
        (CONVERTED,),
    ),
    Mutant(
        "a-column-that-a-csv-file-has-twice-is-no-refusal",
        "as_schema",
        "    if table.schema.equals(schema):\n        return table\n",
        "",
        (CONVERTED + "::test_a_column_that_a_large_csv_file_has_twice_is_refused",),
    ),
    Mutant(
        "converted-rows-of-a-file-that-has-changed",
        "converted._converted",
        "if not (about.exists() and WatchedFiles(files).are(_digested(about))):",
        "if not about.exists():",
        (CONVERTED,),
    ),
    Mutant(
        "converted-files-read-again-for-their-digest",
        "open_prompts",
        "    watched.know(found.stamps)\n",
        "",
        (CONVERTED,),
    ),
    # Objects of the input.
    Mutant(
        "objects-with-other-key-order-share-a-struct",
        "Shapes.see",
        "shape = True, tuple(value)",
        "shape = True, tuple(sorted(value))",
        (JSON_COLUMNS,),
    ),
    Mutant(
        "structs-before-objects-differed-lose-their-text",
        "as_schema",
        "schema.field(field.name).type == pa.json_() != field.type:",
        "schema.field(field.name).type == pa.json_() != field.type and not number:",
        (JSON_COLUMNS,),
    ),
    Mutant(
        "nulls-of-structs-are-given-to-templates",
        "InputRows.row",
        "found = self.read(row, row + 1, columns)\n        return {name: values_of(found.column(name), drops_absent=True)[0] for name in columns}",
        "found = self.read(row, row + 1, columns)\n        return {name: values_of(found.column(name))[0] for name in columns}",
        (JSON_COLUMNS,),
    ),
    Mutant(
        "nulls-of-a-message-that-were-meant-are-dropped",
        "chat_message",
        "if value is not None or key not in OPTIONAL}",
        "if value is not None}",
        (JSON_COLUMNS,),
    ),
    Mutant(
        "json-in-merged-lines-is-text",
        "_write_jsonl",
        "for row in rows_of(batch))",
        "for row in batch.to_pylist())",
        (JSON_COLUMNS,),
    ),
    Mutant(
        "the-file-of-a-run-that-did-not-use-an-option-is-refused",
        "OptionParser.arguments_from_yaml",
        "read.value(node) in (None, self.removed[name].unused):",
        "read.value(node) in (None, False):",
        ("tests/config/test_removed.py",),
    ),
    Mutant(
        "the-open-end-of-a-range-is-in-it",
        "within",
        "(below is None or value < below)",
        "(below is None or value <= below)",
        ("tests/config/test_rules.py",),
    ),
    Mutant(
        "columns-of-turns-and-of-messages-are-both-taken",
        "TurnOptions",
        "lambda o: o.messages_column != o.turns_column",
        "lambda o: False",
        ("tests/config/test_rules.py",),
    ),
    Mutant(
        "an-option-with-the-value-0-is-not-given",
        "_is_given",
        "return value is not None and value is not False",
        "return bool(value)",
        ("tests/config/test_rules.py",),
    ),
    Mutant(
        "text-of-yaml-is-what-yaml-makes-of-it",
        "OptionParser._written",
        "return item.value if item.tag in PLAIN_TAGS else read.value(item)",
        "return read.value(item)",
        ("tests/config/test_generate.py",),
    ),
    Mutant(
        "a-template-is-told-the-time-of-each-row",
        "PromptEncoder.rendered",
        "chat_template=with_clock(template, self._chat_format.now),",
        "chat_template=template,",
        (CHAT_FORMAT,),
    ),
    Mutant(
        "each-start-has-a-clock-of-its-own",
        "prompt_encoder",
        "    if folder is not None:\n",
        "    if folder is None:\n",
        (CHAT_FORMAT,),
    ),
    # Totals, merging, figures.
    Mutant(
        "total-outlives-a-deleted-shard",
        "_tidy",
        "if group in totalled and _is_whole(folder, group, files):",
        "if group in totalled:",
        (LAYOUT,),
    ),
    Mutant(
        "total-of-one-shard-too-few",
        "write_total",
        "is_whole = recorded.issuperset(shards)",
        "is_whole = recorded.issuperset(shards[:-1])",
        (LAYOUT,),
    ),
    Mutant(
        "subtotal-of-shards-not-asked-for",
        "_of_group",
        "return total if shards.issuperset(total.shards) else Total()",
        "return Total() if shards.isdisjoint(total.shards) else total",
        (LAYOUT,),
    ),
    Mutant(
        "subtotal-outlives-a-deleted-shard",
        "_tidy",
        "for group in folder.groups_with(SUBTOTAL):\n        folder",
        "for group in set[str]():\n        folder",
        (LAYOUT,),
    ),
    Mutant(
        "merged-without-its-checksum",
        "verified_shard",
        "if record is None or (record.num_bytes, record.sha256) != found:\n            raise damaged(paths)",
        "if record is None:\n            raise damaged(paths)",
        (MERGING,),
    ),
    Mutant(
        "merged-rows-of-a-neighbouring-shard",
        "_is_planned",
        "        and np.isin(starts, begins).all()\n",
        "",
        (MERGING,),
    ),
    Mutant(
        "read-ahead-out-of-order",
        "read_ahead",
        "                    yield waiting.popleft().result()\n            while",
        "                    yield waiting.pop().result()\n            while",
        (MERGING,),
    ),
    Mutant(
        "figures-outlive-a-deleted-shard",
        "_tidy",
        "for group in folder.groups_with(FIGURES) - totalled:",
        "for group in set[str]():",
        (FIGURES,),
    ),
    Mutant(
        "complete-by-figures-without-statistics",
        "surely_complete",
        "& recorded & with_stats",
        "& recorded",
        (FIGURES,),
    ),
    Mutant(
        "complete-by-figures-of-other-data",
        "surely_complete",
        "if sizes.get(shard) == size}",
        "if shard in sizes}",
        (FIGURES,),
    ),
    Mutant(
        "figures-of-another-replica",
        "ShardFigures.joined",
        "[to[part.columns[REPLICA]] for to, part in zip(renamed, parts, strict=True)]",
        "[part.columns[REPLICA] for part in parts]",
        (FIGURES,),
    ),
)
