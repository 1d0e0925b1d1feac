"""Faults in random numbers, distributions, acceptance, the residual, and the vocabulary's slices."""

from tests.mutants.mutant import Mutant

DISTRIBUTION = "tests/engine/test_distribution.py::"
IN_TURNS = DISTRIBUTION + "test_drafting_in_turns_follows_the_target_s_distribution[3-plain]"
FILTERED = DISTRIBUTION + "test_drafting_in_turns_follows_the_target_s_distribution[3-filtered]"
COUPLED = DISTRIBUTION + "test_drafting_in_turns_follows_the_target_s_distribution[3-coupled]"
AHEAD = DISTRIBUTION + "test_drafting_ahead_follows_the_target_s_distribution[4-0-plain]"
# Every token is one drafted ahead.
ONE_AHEAD = DISTRIBUTION + "test_drafting_ahead_follows_the_target_s_distribution[1-0-plain]"
BRANCHES = DISTRIBUTION + "test_drafting_ahead_follows_the_target_s_distribution[4-3-plain]"
ENUMERATION = "tests/sampling/test_enumeration.py"
SLICES = "tests/sampling/test_vocab_parallel.py"
RANDOM = "tests/sampling/test_random.py"
IN_SLICES = DISTRIBUTION + "test_a_vocabulary_parallel_target_follows_its_distribution"

SAMPLING_FAULTS = (
    # One random number for two purposes: every pair of draft draw, acceptance and recovered token.
    Mutant(
        name="recovered-token-drawn-with-number-rejected-candidate",
        file="sampling/rejection_sampler.py",
        old="keys_W.uniforms(Purpose.NEXT_TOKEN)",
        new="keys_W.uniforms(Purpose.ACCEPT)",
        tests=(IN_TURNS,),
        is_dangerous=True,
    ),
    Mutant(
        name="recovered-token-drawn-with-number-drew-candidate",
        file="sampling/rejection_sampler.py",
        old="keys_W.uniforms(Purpose.NEXT_TOKEN)",
        new="keys_W.uniforms(Purpose.DRAFT)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="candidate-judged-with-number-drew-it",
        file="engine/verify.py",
        old="keys_C.uniforms(Purpose.ACCEPT)",
        new="keys_C.uniforms(Purpose.DRAFT)",
        tests=(IN_TURNS,),
        is_dangerous=True,
    ),
    Mutant(
        name="token-drafted-ahead-judged-with-number-drew-it",
        file="sampling/rejection_sampler.py",
        old="keys_C.uniforms(Purpose.ACCEPT)",
        new="keys_C.uniforms(Purpose.DRAFT)",
        tests=(AHEAD,),
    ),
    Mutant(
        name="candidate-judged-with-number-of-recovered-token",
        file="engine/verify.py",
        old="keys_C.uniforms(Purpose.ACCEPT)",
        new="keys_C.uniforms(Purpose.NEXT_TOKEN)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="candidate-drawn-with-number-judges-it",
        file="engine/draft_loop.py",
        old="keys.uniforms(Purpose.DRAFT)",
        new="keys.uniforms(Purpose.ACCEPT)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="token-drafted-ahead-verified-without-drafts-probability",
        file="engine/first_ahead.py",
        old="verify_candidates(target_probabilities_W, draft_probabilities_W, keys_W)",
        new="verify_candidates(target_probabilities_W, draft_probabilities_W * 0 + 1, keys_W)",
        tests=(AHEAD,),
    ),
    Mutant(
        name="tokens-drafted-ahead-all-verified-with-one-number",
        file="engine/first_ahead.py",
        old="keys_W = state.random_keys(slots_W, positions_W)",
        new="keys_W = state.random_keys(slots_W, positions_W * 0)",
        tests=(ONE_AHEAD,),
    ),
    Mutant(
        name="all-purposes-share-one-number",
        file="sampling/random.py",
        old="(num_misses_N << PURPOSE_BITS) | int(purpose)",
        new="(num_misses_N << PURPOSE_BITS)",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="number-does-not-depend-on-position",
        file="sampling/random.py",
        old="(positions_N << (MISS_BITS + PURPOSE_BITS)) | ",
        new="(positions_N * 0) | ",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="number-does-not-depend-on-attempt",
        file="sampling/random.py",
        old="| (num_misses_N << PURPOSE_BITS) |",
        new="| (num_misses_N * 0) |",
        tests=(RANDOM,),
    ),
    Mutant(
        name="all-candidates-of-block-judged-with-one-number",
        file="engine/verify.py",
        old="positions_N=verify_input.positions_N[index_C],",
        new="positions_N=verify_input.positions_N[index_C] * 0,",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="all-rows-judge-with-numbers-of-one-stream",
        file="engine/blocks.py",
        old="(each.slot, each.stream_key, len(each.token_ids))",
        new="(each.slot, 0, len(each.token_ids))",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="streams-of-two-slots-mixed-up",
        file="engine/verify.py",
        old="stream_keys_N=stream_keys.repeat(",
        new="stream_keys_N=stream_keys[np.arange(len(sequences)) // 2].repeat(",
        tests=("tests/engine/test_row_identity.py",),
    ),
    Mutant(
        name="all-samples-of-prompt-one-stream",
        file="sampling/keys.py",
        old="for part in (row_id, sample_index):",
        new="for part in (row_id,):",
        tests=(RANDOM, IN_TURNS),
    ),
    Mutant(
        name="seed-left-out-of-stream",
        file="sampling/keys.py",
        old="_mix(seed + GOLDEN_GAMMA)",
        new="_mix(GOLDEN_GAMMA)",
        tests=(RANDOM,),
    ),
    Mutant(
        name="all-positions-share-coupled-noise",
        file="sampling/coupling.py",
        old="hash_words(stream_keys_N, positions_N, torch.zeros_like(positions_N), Purpose.COUPLE)",
        new="hash_words(stream_keys_N, positions_N * 0, torch.zeros_like(positions_N), Purpose.COUPLE)",
        tests=(COUPLED,),
        is_dangerous=True,
    ),
    Mutant(
        name="every-slice-of-vocabulary-coupled-noise-of-first",
        file="sampling/coupling.py",
        old="torch.arange(ids.start + 1, ids.stop + 1, device=words_N.device)",
        new="torch.arange(1, len(ids) + 1, device=words_N.device)",
        tests=(SLICES,),
    ),
    Mutant(
        name="coupled-noise-not-exponential",
        file="sampling/coupling.py",
        old="return -torch.log(open_unit_interval(mix(words_N[:, None] + steps_V)))",
        new="return open_unit_interval(mix(words_N[:, None] + steps_V))",
        tests=(COUPLED,),
    ),
    # Acceptance.
    Mutant(
        name="candidate-impossible-for-target-accepted-by-number-0",
        file="sampling/rejection_sampler.py",
        old="return uniforms_C * draft_C < target_C",
        new="return uniforms_C * draft_C <= target_C",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="acceptance-leaves-out-drafts-probability",
        file="sampling/rejection_sampler.py",
        old="return uniforms_C * draft_C < target_C",
        new="return uniforms_C < target_C",
        tests=(ENUMERATION, IN_TURNS),
    ),
    Mutant(
        name="candidate-after-rejected-one-kept",
        file="sampling/rejection_sampler.py",
        old="first_R = rejections[rejections.searchsorted(starts_R)]",
        new="first_R = starts_R + np.add.reduceat(np.append(accepted_C, False), starts_R)",
        tests=(ENUMERATION, IN_TURNS),
    ),
    Mutant(
        name="candidate-judged-by-probability-of-another-token",
        file="engine/blocks.py",
        old="index_C = self.logits_indices_N[self.target_logits_indices_C] + 1",
        new="index_C = self.logits_indices_N[self.target_logits_indices_C]",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="candidate-judged-by-what-follows-it",
        file="engine/local_target.py",
        old="asked.target_logits_indices_C, asked.candidate_ids_C",
        new="asked.target_logits_indices_C + 1, asked.candidate_ids_C",
        tests=(IN_TURNS,),
    ),
    # The residual.
    Mutant(
        name="recovered-token-drawn-from-targets-whole-distribution",
        file="sampling/rejection_sampler.py",
        old="mass_WV = (target_W.probabilities_NV - draft_W.probabilities_NV).clamp_(min=0)",
        new="mass_WV = target_W.probabilities_NV.clone()",
        tests=(IN_TURNS,),
        is_dangerous=True,
    ),
    Mutant(
        name="residual-not-normalised",
        file="sampling/rejection_sampler.py",
        old="torch.where(total_W1 > 0, mass_WV / total_W1, target_W.probabilities_NV)",
        new="torch.where(total_W1 > 0, mass_WV, target_W.probabilities_NV)",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="residual-filtered-again",
        file="sampling/rejection_sampler.py",
        old="    total_W1 = mass_WV.sum(dim=1, keepdim=True)\n",
        new="    mass_WV = mass_WV.where(mass_WV >= mass_WV.topk(3).values[:, -1:], 0)\n"
        "    total_W1 = mass_WV.sum(dim=1, keepdim=True)\n",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="residual-of-another-rows-draft",
        file="engine/draft_worker.py",
        old="np.where(is_rejected_R[drawn], positions_W, NOWHERE)))",
        new="np.where(is_rejected_R[drawn], positions_W, NOWHERE)).roll(1, 0))",
        tests=(IN_TURNS,),
    ),
    Mutant(
        name="residual-of-draft-one-position-later",
        file="engine/draft_worker.py",
        old="np.where(is_rejected_R[drawn], positions_W, NOWHERE)",
        new="np.where(is_rejected_R[drawn], positions_W + 1, NOWHERE)",
        tests=(IN_TURNS,),
    ),
    # Which distribution.
    Mutant(
        name="draft-reports-probabilities-before-temperature-and-filters",
        file="sampling/draft_draws.py",
        old="distributions_N.probabilities_of(drawn_N), features_3N",
        new="logits_NV.softmax(dim=1).gather(1, drawn_N[:, None])[:, 0].double(), features_3N",
        tests=(FILTERED,),
        is_dangerous=True,
    ),
    Mutant(
        name="draft-keeps-scores-from-before-temperature-and-filters",
        file="sampling/branch_estimates.py",
        old="return DraftDistributions(distributions, distributions.probabilities_NV, distributions)",
        new="return DraftDistributions(distributions, logits_NV.float().softmax(dim=1), distributions)",
        tests=(FILTERED,),
    ),
    Mutant(
        name="temperature-0-probabilities-of-temperature-1",
        file="sampling/distributions.py",
        old="        return OneHot.of_largest(logits_NV)\n    if filters",
        new="        return Dense(logits_NV.float().softmax(dim=1))\n    if filters",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="top-p-leaves-out-token-at-edge",
        file="sampling/filters.py",
        old="outside_NV = ascending_NV.softmax(dim=1).cumsum(dim=1) <= 1 - top_p",
        new="outside_NV = ascending_NV.softmax(dim=1).cumsum(dim=1) <= 1.01 - top_p",
        tests=(ENUMERATION, FILTERED),
    ),
    Mutant(
        name="top-p-keeps-token-whose-tail-exactly-rest",
        file="sampling/filters.py",
        old="cumsum(dim=1) <= 1 - top_p",
        new="cumsum(dim=1) < 1 - top_p",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="top-p-may-leave-no-token",
        file="sampling/filters.py",
        old="        outside_NV[:, -1] = False\n",
        new="",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="top-p-drops-what-ties-with-last-keeps",
        file="sampling/filters.py",
        old="scores_NV.masked_fill(scores_NV < least_N1, -torch.inf)",
        new="scores_NV.masked_fill((scores_NV <= least_N1) & (least_N1 < scores_NV.amax(1, keepdim=True)), -torch.inf)",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="top-k-drops-what-ties-with-last-keeps",
        file="sampling/filters.py",
        old="scores_NV.masked_fill(scores_NV < kth_N1, -torch.inf)",
        new="scores_NV.masked_fill(scores_NV <= kth_N1, -torch.inf)",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="top-k-of-1-filters-nothing",
        file="sampling/filters.py",
        old="    if 0 < top_k < scores_NV.shape[1]:\n",
        new="    if 1 < top_k < scores_NV.shape[1]:\n",
        tests=(ENUMERATION,),
    ),
    Mutant(
        name="number-0-draws-token-without-probability",
        file="sampling/distributions.py",
        old="torch.searchsorted(cumulative_NV, thresholds_N1, right=True)",
        new="torch.searchsorted(cumulative_NV, thresholds_N1, right=False)",
        tests=(ENUMERATION,),
    ),
    # Slices of the vocabulary.
    Mutant(
        name="candidates-place-in-slice-id",
        file="sampling/vocab_parallel.py",
        old="places_C = token_ids_C - ids.start",
        new="places_C = token_ids_C",
        tests=(SLICES,),
    ),
    Mutant(
        name="slices-likeliest-token-lacks-slices-offset",
        file="sampling/vocab_parallel.py",
        old="return Winners(winners_N + ids.start, _picked(logits_Nv, winners_N)",
        new="return Winners(winners_N, _picked(logits_Nv, winners_N)",
        tests=(SLICES,),
    ),
    Mutant(
        name="slices-compare-their-races-without-their-waiting-times",
        file="sampling/vocab_parallel.py",
        old=".to(torch.float64) - _picked(waiting_Nv, winners_N).log()",
        new=".to(torch.float64)",
        tests=(SLICES,),
    ),
    Mutant(
        name="candidate-normalised-by-first-slice-alone",
        file="sampling/vocab_parallel.py",
        old="normalisers_SN.logsumexp(dim=0)[index_C]",
        new="normalisers_SN[0][index_C]",
        tests=(SLICES,),
    ),
    Mutant(
        name="wider-slices-come-last",
        file="sampling/vocab_parallel.py",
        old="width * (index + 1) + min(index + 1, num_wider)",
        new="width * (index + 1) + max(0, index + 1 - num_slices + num_wider)",
        tests=(SLICES,),
    ),
    Mutant(
        name="decision-fetched-from-another-place-of-other-slices",
        file="engine/vocab_parallel.py",
        old="self._gather_rows(logits_Nv[index_N[index_N != NO_NEXT_TOKEN].to(logits_Nv.device)])",
        new="self._gather_rows(logits_Nv[index_N[index_N != NO_NEXT_TOKEN].flip(0).to(logits_Nv.device)])",
        tests=(IN_SLICES + "[plain]",),
    ),
    Mutant(
        name="each-slice-has-top-k-of-its-own",
        file="engine/vocab_parallel.py",
        old="top_SNK = self._collectives.gather_everywhere(top_scores(scores_Nv, top_k))",
        new="top_SNK = top_scores(scores_Nv, top_k)[None]",
        tests=(IN_SLICES + "[top-k]",),
    ),
    Mutant(
        name="slices-forget-temperature",
        file="engine/vocab_parallel.py",
        old="scores_Nv = tempered(logits_Nv, self._settings.temperature)",
        new="scores_Nv = logits_Nv.float()",
        tests=(IN_SLICES + "[top-k]",),
    ),
)
