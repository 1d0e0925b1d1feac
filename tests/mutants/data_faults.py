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
    # Converted prompts.
    Mutant(
        name="converted-rows-before-types-widened-are-lost",
        file="data/converted.py",
        old="for batch in _batches(pieces[:-1]):",
        new="for batch in _batches(pieces[-2:-1]):",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="types-of-a-converted-csv-column-by-its-last-piece",
        file="data/csv_files.py",
        old="            kind for kind in self._types.get(name, range(len(TYPES)))\n",
        new="            kind for kind in range(len(TYPES))\n",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="options-of-converted-requests-by-the-last-one",
        file="data/batches.py",
        old="batch.options += own.keys() - set(batch.options)",
        new="batch.options = [*own] or batch.options",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="what-converted-requests-ask-for-is-forgotten",
        file="data/batches.py",
        old='        self.batch = Batch(**told | {"reasons": dict(told["reasons"])})',
        new="        self.batch = Batch()",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="converted-rows-of-a-file-that-has-changed",
        file="data/converted.py",
        old="*source.options, [asdict(stamp) for stamp in stamps]])",
        new="*source.options, [stamp.path for stamp in stamps]])",
        tests=(CONVERTED,),
    ),
    Mutant(
        name="converted-files-read-again-for-their-digest",
        file="data/prompts.py",
        old="    watched.know([*found.stamps] or known)\n",
        new="",
        tests=(CONVERTED,),
    ),
    # Objects of the input.
    Mutant(
        name="objects-with-other-key-order-share-a-struct",
        file="data/json_columns.py",
        old="shape = True, tuple(value)",
        new="shape = True, tuple(sorted(value))",
        tests=(JSON_COLUMNS,),
    ),
    Mutant(
        name="structs-before-objects-differed-lose-their-text",
        file="data/json_columns.py",
        old="schema.field(field.name).type == pa.json_() != field.type:",
        new="schema.field(field.name).type == pa.json_() != field.type and not number:",
        tests=(JSON_COLUMNS,),
    ),
    Mutant(
        name="nulls-of-structs-are-given-to-templates",
        file="data/input_rows.py",
        old="found = self.read(row, row + 1, columns)\n        return {name: values_of(found.column(name), drops_absent=True)[0] for name in columns}",
        new="found = self.read(row, row + 1, columns)\n        return {name: values_of(found.column(name))[0] for name in columns}",
        tests=(JSON_COLUMNS,),
    ),
    Mutant(
        name="nulls-of-a-message-that-were-meant-are-dropped",
        file="data/messages.py",
        old="if value is not None or key not in OPTIONAL}",
        new="if value is not None}",
        tests=(JSON_COLUMNS,),
    ),
    Mutant(
        name="json-in-merged-lines-is-text",
        file="data/merging.py",
        old="for row in rows_of(batch))",
        new="for row in batch.to_pylist())",
        tests=(JSON_COLUMNS,),
    ),
    Mutant(
        name="text-of-yaml-is-what-yaml-makes-of-it",
        file="config/arguments.py",
        old="return item.value if item.tag in PLAIN_TAGS else read.value(item)",
        new="return read.value(item)",
        tests=("tests/config/test_generate.py",),
    ),
    Mutant(
        name="a-template-is-told-the-time-of-each-row",
        file="job/tokens.py",
        old="chat_template=with_clock(template, self._chat_format.now),",
        new="chat_template=template,",
        tests=(CHAT_FORMAT,),
    ),
    Mutant(
        name="each-start-has-a-clock-of-its-own",
        file="job/row_requests.py",
        old="    if folder is not None:\n",
        new="    if folder is None:\n",
        tests=(CHAT_FORMAT,),
    ),
    # Totals, merging, figures.
    Mutant(
        name="total-outlives-a-deleted-shard",
        file="data/opening.py",
        old="if group in totalled and _is_whole(folder, group, files):",
        new="if group in totalled:",
        tests=(LAYOUT,),
    ),
    Mutant(
        name="total-of-one-shard-too-few",
        file="job/totals.py",
        old="is_whole = recorded.issuperset(shards)",
        new="is_whole = recorded.issuperset(shards[:-1])",
        tests=(LAYOUT,),
    ),
    Mutant(
        name="subtotal-of-shards-not-asked-for",
        file="job/totals.py",
        old="return total if shards.issuperset(total.shards) else Total()",
        new="return Total() if shards.isdisjoint(total.shards) else total",
        tests=(LAYOUT,),
    ),
    Mutant(
        name="subtotal-outlives-a-deleted-shard",
        file="data/opening.py",
        old="for group in folder.subtotalled_groups():\n        folder",
        new="for group in set[str]():\n        folder",
        tests=(LAYOUT,),
    ),
    Mutant(
        name="merged-without-its-checksum",
        file="data/reading.py",
        old="if record is None or (record.num_bytes, record.sha256) != found:\n            raise damaged(paths)",
        new="if record is None:\n            raise damaged(paths)",
        tests=(MERGING,),
    ),
    Mutant(
        name="merged-rows-of-a-neighbouring-shard",
        file="data/merging.py",
        old="        and np.isin(starts, begins).all()\n",
        new="",
        tests=(MERGING,),
    ),
    Mutant(
        name="read-ahead-out-of-order",
        file="data/storage.py",
        old="                    yield waiting.popleft().result()\n            while",
        new="                    yield waiting.pop().result()\n            while",
        tests=(MERGING,),
    ),
    Mutant(
        name="figures-outlive-a-deleted-shard",
        file="data/opening.py",
        old="for group in folder.figured_groups() - totalled:",
        new="for group in set[str]():",
        tests=(FIGURES,),
    ),
    Mutant(
        name="complete-by-figures-without-statistics",
        file="data/figures.py",
        old="& recorded & with_stats",
        new="& recorded",
        tests=(FIGURES,),
    ),
    Mutant(
        name="complete-by-figures-of-other-data",
        file="data/figures.py",
        old="if sizes.get(shard) == size}",
        new="if shard in sizes}",
        tests=(FIGURES,),
    ),
    Mutant(
        name="figures-of-another-replica",
        file="data/figures.py",
        old="[to[part.columns[REPLICA]] for to, part in zip(renamed, parts, strict=True)]",
        new="[part.columns[REPLICA] for part in parts]",
        tests=(FIGURES,),
    ),
)
