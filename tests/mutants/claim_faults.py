"""Faults in who may work on what: claims, heartbeats, replicas that join, wait and leave."""

from tests.mutants.mutant import Mutant

CHOICE = "tests/data/test_shard_choice.py"
CLAIMS = "tests/data/test_claims.py"
LAYOUT = "tests/data/test_layout.py"
MEMBERSHIP = "tests/data/test_membership.py"

CLAIM_FAULTS = (
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
        old="        if found[-1:] != [claim] or (latest",
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
        name="a-replica-joins-while-another-holds-the-setup",
        file="data/membership.py",
        old="            and holding.replica is None\n",
        new="",
        tests=(MEMBERSHIP,),
    ),
    Mutant(
        name="a-replica-joins-though-another-took-the-setup-meanwhile",
        file="data/membership.py",
        old="            and is_needless()\n            and self.claims.is_held(latest)\n",
        new="            and is_needless()\n",
        tests=(MEMBERSHIP,),
    ),
    Mutant(
        name="replicas-that-join-wait-one-behind-another",
        file="data/membership.py",
        old="if is_needless is not None and self.is_settled(is_needless):",
        new="if False:",
        tests=("tests/job/test_preflight.py",),
    ),
    Mutant(
        name="a-claim-is-watched-no-longer-though-its-holder-is-silent",
        file="data/shard_queue.py",
        old="if name not in chosen and self._is_suspect(name)",
        new="if False",
        tests=("tests/data/test_shard_queue.py",),
    ),
    Mutant(
        name="all-replicas-change-the-claims-that-they-watch-at-once",
        file="data/shard_choice.py",
        old=" + _crc32(replica) / 2**32)",
        new=")",
        tests=(CHOICE,),
    ),
    Mutant(
        name="heartbeats-of-vanished-machines-stay",
        file="data/membership.py",
        old="or (is_alive is None and age_s > SILENCES_KEPT * beat.silent_after_s)",
        new="",
        tests=(MEMBERSHIP,),
    ),
    Mutant(
        name="heartbeats-of-holders-of-claims-are-removed",
        file="data/membership.py",
        old="vanished - self._holders() if vanished else ():",
        new="vanished:",
        tests=(MEMBERSHIP,),
    ),
    Mutant(
        name="heartbeat-read-more-often-than-it-beats",
        file="data/heartbeat.py",
        old="is_read = last is None or",
        new="is_read = True or",
        tests=(CLAIMS + "::test_a_heartbeat_is_read_no_more_often_than_it_beats",),
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
        old="num_watched = max(MIN_WATCHED, WATCHERS_PER_CLAIM * len(claimed) // max(1, num_waiting))",
        new="num_watched = len(claimed)",
        tests=(CHOICE,),
    ),
    Mutant(
        name="replicas-that-wait-look-as-often-as-few-do",
        file="data/membership.py",
        old="        return min(poll_s, MAX_SILENCE_SHARE",
        new="        return min(self._poll_s, MAX_SILENCE_SHARE",
        tests=(MEMBERSHIP,),
    ),
    Mutant(
        name="replicas-that-read-much-look-as-often",
        file="data/membership.py",
        old="max(1.0, min(num_replicas / REPLICAS_PER_POLL, MAX_POLLS), num_reads * POLLS_PER_READ)",
        new="min(max(1.0, num_replicas / REPLICAS_PER_POLL, num_reads * POLLS_PER_READ), MAX_POLLS)",
        tests=(MEMBERSHIP,),
    ),
    Mutant(
        name="looks-too-seldom-to-see-silence",
        file="data/membership.py",
        old="MAX_SILENCE_SHARE = 0.4",
        new="MAX_SILENCE_SHARE = 0.6",
        tests=(MEMBERSHIP,),
    ),
    Mutant(
        name="waiting-replicas-always-watch-the-same-claims",
        file="data/shard_choice.py",
        old='zlib.crc32(f"{replica} {period}".encode()) | 1',
        new="1",
        tests=(CHOICE,),
    ),
    Mutant(
        name="all-replicas-try-first-shard",
        file="data/shard_choice.py",
        old="other = random.randrange(index, len(window))",
        new="other = index",
        tests=(CHOICE,),
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
        old="in_order = sorted(claims, key=lambda claim: claim.generation)",
        new="in_order = sorted(claims, key=lambda claim: -claim.generation)",
        tests=(CLAIMS,),
    ),
    Mutant(
        name="claims-of-long-numbers-are-not-seen",
        file="data/claims.py",
        old=r"(?:-\d{5,}){0,2}",
        new=r"(?:-\d{5}){0,2}",
        tests=(LAYOUT,),
    ),
)
