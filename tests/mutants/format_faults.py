"""Faults in the forms of input and output that other programs have."""

from tests.mutants.mutant import Mutant

CSV = "tests/data/test_csv_prompts.py"
REFUSALS = "tests/data/test_refusals.py"
CHAT = "tests/job/test_chat_format.py"
BATCHES = "tests/data/test_batches.py"
BATCH_INPUT = "tests/job/test_batch_input.py"
THINKING = "tests/constraints/test_thinking.py"
RULES = "tests/job/test_constraints.py::"
TURNS = "tests/job/test_turns.py::"
TOKENS = "tests/job/test_tokens.py"
FOLLOWING = (
    "tests/engine/test_meanwhile.py::test_a_request_that_follows_from_the_last_completion_is_still_served"
)

FORMAT_FAULTS = (
    Mutant(
        name="csv-makes-numbers-of-leading-zeros",
        file="data/csv_files.py",
        old='(r"^-?(0|[1-9][0-9]{0,17})$", pa.int64())',
        new='(r"^-?([0-9]{1,18})$", pa.int64())',
        tests=(CSV,),
    ),
    Mutant(
        name="csv-takes-a-file-cut-inside-a-field",
        file="data/csv_files.py",
        old="if num_quotes % 2:",
        new="if num_quotes < 0:",
        tests=(REFUSALS,),
    ),
    Mutant(
        name="csv-counts-rows-from-the-header",
        file="data/csv_files.py",
        old="int(found[1]) - 2",
        new="int(found[1]) - 1",
        tests=(REFUSALS,),
    ),
    Mutant(
        name="system-prompt-beside-a-rows-own",
        file="config/chat.py",
        old='if self.system_prompt is None or (messages and messages[0]["role"] in SYSTEM_ROLES):',
        new="if self.system_prompt is None:",
        tests=(CHAT,),
    ),
    Mutant(
        name="system-prompt-left-out-of-the-manifest",
        file="job/fingerprint.py",
        old="        **config.chat_fingerprint,\n",
        new="",
        tests=(CHAT,),
    ),
    Mutant(
        name="batch-ignores-what-it-does-not-know",
        file="data/batches.py",
        old="if name not in OPTIONS and name not in IGNORED and name not in READ:",
        new="if False:",
        tests=(BATCHES,),
    ),
    Mutant(
        name="batch-takes-a-custom-id-twice",
        file="data/batches.py",
        old='    known.add(row["custom_id"])\n',
        new="",
        tests=(BATCHES,),
    ),
    Mutant(
        name="batch-takes-chats-and-texts-together",
        file="data/batches.py",
        old='if row["url"] != batch.url:',
        new="if False:",
        tests=(BATCHES,),
    ),
    Mutant(
        name="batch-options-do-not-reach-rows",
        file="job/batch_input.py",
        old="if batch.options:",
        new="if False:",
        tests=(BATCH_INPUT,),
    ),
    Mutant(
        name="batch-gives-tools-to-a-template-without-them",
        file="job/tokens.py",
        old="if reserved or unread:",
        new="if reserved:",
        tests=(BATCH_INPUT,),
    ),
    Mutant(
        name="batch-results-mix-samples-of-requests",
        file="job/openai_results.py",
        old='key=lambda row: row["row_id"]):',
        new='key=lambda row: row["row_id"] // 2):',
        tests=(BATCH_INPUT,),
    ),
    Mutant(
        name="batch-results-have-end-tokens",
        file="job/openai_results.py",
        old="and places and places[-1].token.is_special:",
        new="and False:",
        tests=(BATCH_INPUT,),
    ),
    Mutant(
        name="batch-results-without-log-probabilities",
        file="job/openai_results.py",
        old='texts, ids, row["logprobs"], row["top_logprob_ids"]',
        new='texts, ids, [0.0 for _ in row["logprobs"]], row["top_logprob_ids"]',
        tests=(BATCH_INPUT,),
    ),
    Mutant(
        name="thinking-has-its-markers",
        file="constraints/thinking.py",
        old="completion_ids[: end - len(self.end_ids)]",
        new="completion_ids[:end]",
        tests=(THINKING,),
    ),
    Mutant(
        name="thinking-that-a-prompt-has-begun-is-an-answer",
        file="constraints/thinking.py",
        old="begin < 0 and _last(prompt_ids, self.begin_ids) < 0:",
        new="begin < 0:",
        tests=(THINKING,),
    ),
    Mutant(
        name="thinking-columns-are-not-written",
        file="job/row_results.py",
        old="({} if thinking is None else thinking.of(completion))",
        new="{}",
        tests=(RULES + "test_a_budget_of_thinking",),
    ),
    Mutant(
        name="batch-results-count-characters-of-single-tokens",
        file="job/token_texts.py",
        old="if text.endswith(NOT_A_CHARACTER) and num_waiting < MAX_WAITING and not is_last:",
        new="if False:",
        tests=("tests/engine/test_detokenizer.py::test_texts_of_tokens_are_together_the_completion",),
    ),
    Mutant(
        name="stop-of-a-row-beside-its-constraint",
        file="job/row_options.py",
        old='if own.get("stop"):',
        new="if False:",
        tests=("tests/job/test_row_options.py::test_a_stop_string_of_a_row_with_a_constraint_is_refused",),
    ),
    Mutant(
        name="batch-given-to-a-benchmark",
        file="benchmark/setting.py",
        old='    prompts.check_no_batch("a benchmark")\n',
        new="",
        tests=(BATCH_INPUT + "::test_jobs_without_options_of_rows_refuse_a_batch[benchmark]",),
    ),
    Mutant(
        name="batch-given-to-tuning",
        file="tuning/run.py",
        old='    prompts.check_no_batch("tuning")\n',
        new="",
        tests=(BATCH_INPUT + "::test_jobs_without_options_of_rows_refuse_a_batch[tune]",),
    ),
    Mutant(
        name="batch-results-show-the-stop-string",
        file="job/openai_results.py",
        old="if place.offset + place.num_characters > end:",
        new="if False:",
        tests=(BATCH_INPUT + "::test_the_texts_of_tokens_are_together_the_completion",),
    ),
    Mutant(
        name="tokens-of-batch-results-as-where-a-text-begins",
        file="job/openai_results.py",
        old="texts = TokenTexts(self._detokenizer, self._ids_before(row), ids)",
        new="texts = TokenTexts(self._detokenizer, [], ids)",
        tests=(BATCH_INPUT + "::test_the_texts_of_tokens_are_together_the_completion",),
    ),
    Mutant(
        name="thinking-and-answer-as-where-a-text-begins",
        file="job/output_columns.py",
        old="self._detokenizer.until_stop(before_ids, token_ids, stop)",
        new="self._detokenizer.until_stop([], token_ids, stop)",
        tests=(TOKENS,),
    ),
    Mutant(
        name="words-of-options-as-where-a-text-begins",
        file="job/tokens.py",
        old="        for found in (own, whole[len(before_ids) :] if is_kept else own):\n",
        new="        for found in (own,):\n",
        tests=(TOKENS,),
    ),
    Mutant(
        name="second-bos-told-of-prompts-that-hold-one",
        file="data/prompts.py",
        old="value.startswith(text.encode())",
        new="text.encode() in value",
        tests=(TOKENS,),
    ),
    Mutant(
        name="turns-before-a-bad-one-are-lost",
        file="data/prompts.py",
        old='"content": self.turn(row, 0)}',
        new='"content": [self.turn(row, index) for index in range(self.num_turns(row))][0]}',
        tests=(TURNS + "test_every_turn_is_the_answer_to_the_conversation_before_it",),
    ),
    Mutant(
        name="turns-without-the-answers-before-them",
        file="job/row_requests.py",
        old='messages += [{"role": "user", "content": text}, answer]',
        new='messages += [{"role": "user", "content": text}]',
        tests=(TURNS + "test_every_turn_is_the_answer_to_the_conversation_before_it",),
    ),
    Mutant(
        name="turns-after-all-other-rows-have-ended",
        file="engine/engine.py",
        old="if not (self.scheduler.running or self.scheduler.waiting):",
        new="if False:",
        tests=(FOLLOWING,),
    ),
    Mutant(
        name="turns-share-their-random-numbers",
        file="sampling/keys.py",
        old="    if turn:\n",
        new="    if False:\n",
        tests=(TURNS + "test_turns_have_random_streams_of_their_own",),
    ),
    Mutant(
        name="turns-repeat-the-thinking",
        file="job/row_requests.py",
        old='answer["content"] = found["completion_answer"]',
        new="pass",
        tests=(TURNS + "test_the_thinking_of_earlier_turns_is_not_repeated",),
    ),
    Mutant(
        name="turns-count-the-last-alone",
        file="job/row_results.py",
        old='"num_completion_tokens": sum(len(turn.token_ids) for turn in turns),',
        new='"num_completion_tokens": len(turns[-1].token_ids) if turns else 0,',
        tests=(TURNS + "test_every_turn_is_the_answer_to_the_conversation_before_it",),
    ),
    Mutant(
        name="turns-lose-those-before-an-error",
        file="job/row_requests.py",
        old="return with_turns(error_result(result.row_id, result.sample_index, text, reason), done)",
        new="return error_result(result.row_id, result.sample_index, text, reason)",
        tests=(TURNS + "test_the_thinking_of_earlier_turns_is_not_repeated",),
    ),
    # What a person is told.
    Mutant(
        name="a-broken-disk-is-a-broken-file",
        file="data/streams.py",
        old="        if error.errno is None:\n            raise\n",
        new="        raise\n",
        tests=(REFUSALS,),
    ),
    Mutant(
        name="damaged-text-of-an-option-is-a-traceback",
        file="data/prompts.py",
        old="        except (UnicodeDecodeError, JsonError) as error:\n            row, reason",
        new="        except JsonError as error:\n            row, reason",
        tests=(REFUSALS, "tests/job/test_input_refusals.py"),
    ),
    Mutant(
        name="messages-in-views-of-lists-are-none",
        file="data/text.py",
        old="    return any(test(kind) for test, _, _ in LISTS)\n",
        new="    return any(test(kind) for test, _, _ in LISTS[:3])\n",
        tests=("tests/data/test_sound_files.py",),
    ),
)
