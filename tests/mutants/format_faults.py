"""Faults in the forms of input and output that other programs have."""

from tests.mutants.mutant import Mutant

CSV = "tests/data/test_csv_prompts.py"
REFUSALS = "tests/data/test_refusals.py"
CHAT = "tests/job/test_chat_format.py"
FORMS = "tests/job/test_template_forms.py"
BATCHES = "tests/data/test_batches.py"
BATCH_INPUT = "tests/job/test_batch_input.py"
THINKING = "tests/sampling/constraints/test_thinking.py"
RULES = "tests/job/test_constraints.py::"
TURNS = "tests/job/test_turns.py::"
TOKENS = "tests/job/test_tokens.py"
FOLLOWING = (
    "tests/engine/test_meanwhile.py::test_a_request_that_follows_from_the_last_completion_is_still_served"
)

FORMAT_FAULTS = (
    Mutant(
        "csv-makes-numbers-of-leading-zeros",
        "TYPES",
        '(r"^-?(0|[1-9][0-9]{0,17})$", pa.int64())',
        '(r"^-?([0-9]{1,18})$", pa.int64())',
        (CSV,),
    ),
    Mutant(
        "csv-takes-a-file-cut-inside-a-field",
        "_text_table",
        "if num_quotes % 2:",
        "if num_quotes < 0:",
        (REFUSALS,),
    ),
    Mutant("csv-counts-rows-from-the-header", "_describe_error", "int(found[1]) - 2", "int(found[1]) - 1", (REFUSALS,)),
    Mutant(
        "system-prompt-beside-a-rows-own",
        "ChatFormat.messages",
        'if self.system_prompt is None or (messages and messages[0]["role"] in SYSTEM_ROLES):',
        "if self.system_prompt is None:",
        (CHAT,),
    ),
    Mutant(
        "system-prompt-left-out-of-the-manifest",
        "run_fingerprint",
        "        **config.chat_fingerprint,\n",
        "",
        (CHAT,),
    ),
    Mutant(
        "content-stays-as-the-file-has-it",
        "TemplateForms._with_content",
        "if not forms or given in forms:",
        "if True:",
        (FORMS,),
    ),
    Mutant(
        "a-list-in-pythons-notation-is-shown-whole",
        "TemplateForms._find_content_forms",
        " and ASIDE not in text",
        "",
        (FORMS,),
    ),
    Mutant(
        "arguments-in-pythons-notation-are-json",
        "TemplateForms._find_call_forms",
        """ and f"'{KEY}'" not in text""",
        "",
        (FORMS,),
    ),
    Mutant(
        "a-role-is-left-out-without-a-word",
        "TemplateForms.left_out",
        'self._content_forms(message["role"]) == ()',
        "False",
        (FORMS,),
    ),
    Mutant(
        "a-template-of-last-turns-is-refused",
        "TemplateForms.shows_end_alone",
        "return bool(found) and not any(found)",
        "return False",
        (FORMS,),
    ),
    Mutant(
        "tools-of-a-column-do-not-reach-the-template",
        "Prompts.with_tools",
        "if tools else messages",
        "if False else messages",
        (FORMS,),
    ),
    Mutant(
        "a-last-message-is-answered-not-continued",
        "PromptEncoder._whole",
        "continues = self._chat_format.continues and",
        "continues = False and",
        (FORMS,),
    ),
    Mutant(
        "batch-ignores-what-it-does-not-know",
        "_asked",
        "if name not in OPTIONS and name not in IGNORED and name not in READ:",
        "if False:",
        (BATCHES,),
    ),
    Mutant(
        "batch-takes-a-custom-id-twice",
        "_check_request",
        '    known.add(row["custom_id"])\n',
        "",
        ("tests/data/test_refusals.py",),
    ),
    Mutant(
        "batch-takes-chats-and-texts-together",
        "read_batch",
        'if row["url"] != batch.url:',
        "if False:",
        ("tests/data/test_refusals.py",),
    ),
    Mutant(
        "batch-options-do-not-reach-rows", "batch_options", "if batch.options:", "if False:", (BATCH_INPUT,)
    ),
    Mutant(
        "batch-gives-tools-to-a-template-without-them",
        "PromptEncoder._own_variables",
        "if reserved or unread:",
        "if reserved:",
        (BATCH_INPUT,),
    ),
    Mutant(
        "batch-results-mix-samples-of-requests",
        "_Results.of",
        'key=lambda row: row["row_id"]):',
        'key=lambda row: row["row_id"] // 2):',
        (BATCH_INPUT,),
    ),
    Mutant(
        "batch-results-have-end-tokens",
        "_Results._of_completion",
        "and places and places[-1].token.is_special:",
        "and False:",
        (BATCH_INPUT,),
    ),
    Mutant(
        "batch-results-without-log-probabilities",
        "_Results._of_completion",
        'texts, ids, row["logprobs"], row["top_logprob_ids"]',
        'texts, ids, [0.0 for _ in row["logprobs"]], row["top_logprob_ids"]',
        (BATCH_INPUT,),
    ),
    Mutant(
        "thinking-has-its-markers",
        "ThinkingMarkers.split",
        "completion_ids[: end - len(self.end_ids)]",
        "completion_ids[:end]",
        (THINKING,),
    ),
    Mutant(
        "thinking-that-a-prompt-has-begun-is-an-answer",
        "ThinkingMarkers.split",
        "begin < 0 and _last(prompt_ids, self.begin_ids) < 0:",
        "begin < 0:",
        (THINKING,),
    ),
    Mutant(
        "thinking-columns-are-not-written",
        "result_of",
        "({} if thinking is None else thinking.of(completion))",
        "{}",
        (RULES + "test_a_budget_of_thinking",),
    ),
    Mutant(
        "batch-results-count-characters-of-single-tokens",
        "TokenTexts.__init__",
        "if text.endswith(NOT_A_CHARACTER) and num_waiting < MAX_WAITING and not is_last:",
        "if False:",
        ("tests/engine/test_detokenizer.py::test_texts_of_tokens_are_together_the_completion",),
    ),
    Mutant(
        "stop-of-a-row-beside-its-constraint",
        "RowOptionReader.check",
        'if own.get("stop"):',
        "if False:",
        ("tests/job/test_input_refusals.py",),
    ),
    Mutant(
        "batch-results-show-the-stop-string",
        "_Results._of_completion",
        "if place.offset + place.num_characters > end:",
        "if False:",
        ("tests/job/test_texts.py",),
    ),
    Mutant(
        "tokens-of-batch-results-as-where-a-text-begins",
        "_Results._of_completion",
        "texts = TokenTexts(self._detokenizer, self._ids_before(row), ids)",
        "texts = TokenTexts(self._detokenizer, [], ids)",
        ("tests/job/test_texts.py",),
    ),
    Mutant(
        "thinking-and-answer-as-where-a-text-begins",
        "ThinkingColumns.of",
        "self._detokenizer.until_stop(before_ids, token_ids, stop)",
        "self._detokenizer.until_stop([], token_ids, stop)",
        (TOKENS,),
    ),
    Mutant(
        "words-of-options-as-where-a-text-begins",
        "ids_within",
        "        for found in (own, whole[len(before_ids) :] if is_kept else own):\n",
        "        for found in (own,):\n",
        (TOKENS,),
    ),
    Mutant(
        "second-bos-told-of-prompts-that-hold-one",
        "Prompts.num_beginning_with",
        "value is not None and value.startswith(text)",
        "value is not None and text in value",
        (TOKENS,),
    ),
    Mutant(
        "turns-before-a-bad-one-are-lost",
        "Prompts.prompt",
        '"content": self.turn(row, 0)}',
        '"content": [self.turn(row, index) for index in range(self.num_turns(row))][0]}',
        (TURNS + "test_every_turn_is_the_answer_to_the_conversation_before_it",),
    ),
    Mutant(
        "turns-without-the-answers-before-them",
        "RowRequests._conversation",
        'messages += [{"role": "user", "content": text}, answer]',
        'messages += [{"role": "user", "content": text}]',
        (TURNS + "test_every_turn_is_the_answer_to_the_conversation_before_it",),
    ),
    Mutant(
        "turns-after-all-other-rows-have-ended",
        "Engine.step",
        "if not (self.scheduler.running or self.scheduler.waiting):",
        "if False:",
        (FOLLOWING,),
    ),
    Mutant(
        "turns-share-their-random-numbers",
        "stream_key",
        "    if turn:\n",
        "    if False:\n",
        (TURNS + "test_turns_have_random_streams_of_their_own",),
    ),
    Mutant(
        "turns-repeat-the-thinking",
        "RowRequests._conversation",
        'answer["content"] = found["completion_answer"]',
        "pass",
        (TURNS + "test_the_thinking_of_earlier_turns_is_not_repeated",),
    ),
    Mutant(
        "turns-count-the-last-alone",
        "with_turns",
        '"num_completion_tokens": sum(len(turn.token_ids) for turn in turns),',
        '"num_completion_tokens": len(turns[-1].token_ids) if turns else 0,',
        (TURNS + "test_every_turn_is_the_answer_to_the_conversation_before_it",),
    ),
    Mutant(
        "turns-lose-those-before-an-error",
        "RowRequests.end",
        "return with_turns(error_result(result.row_id, result.sample_index, text, reason), done)",
        "return error_result(result.row_id, result.sample_index, text, reason)",
        (TURNS + "test_the_thinking_of_earlier_turns_is_not_repeated",),
    ),
    # What a person is told.
    Mutant(
        "a-broken-disk-is-a-broken-file",
        "reading",
        "        if error.errno is None:\n            raise\n",
        "        raise\n",
        (REFUSALS,),
    ),
    Mutant(
        "damaged-json-of-an-option-is-a-traceback",
        "Prompts.values",
        "        except JsonError as error:\n            row, reason",
        "        except UnicodeDecodeError as error:\n            row, reason",
        (REFUSALS, "tests/job/test_input_refusals.py"),
    ),
    Mutant(
        "messages-in-views-of-lists-are-none",
        "is_list",
        "    return any(test(kind) for test in LISTS)\n",
        "    return any(test(kind) for test in LISTS[:3])\n",
        ("tests/data/test_sound_files.py",),
    ),
)
