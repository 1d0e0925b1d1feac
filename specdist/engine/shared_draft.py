"""A draft that several target groups share, as one group's rank 0 sees it.

The link to it may break at any time: the draft is killed, stopped, or too slow. Then the group forgets what
was drafted, opens its sequences again, and decodes alone until a draft answers. Where the seed fixes the
tokens by the draft's blocks (class ``tokens`` under rejection) it begins its sequences again instead, and
waits.

Another draft than the group's own may serve it meanwhile. When its own one answers again, the group turns to
it, as if its link had broken: so a draft that is started again has its share of the groups again.

In all cases the tokens follow the target's distribution. With the draft its distributions Q are lost, and so
is the residual after a rejection. So the last block counts for no sequence, whatever its outcome was, also
not for one that it has ended: to keep these and to draw the others again would prefer completions that end
early.
That a link breaks does not depend on the tokens.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from specdist.engine.faults import DraftChanged, DraftOutOfMemory
from specdist.engine.interfaces import Proposer
from specdist.engine.no_draft import NoDraft
from specdist.engine.packing import pack, unpack
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.reports import Traffic
from specdist.engine.sockets import Kind, Link, LinkError, Message
from specdist.engine.timeline import Timeline
from specdist.sampling.distributions import Dense

RETRY_S = 0.25

logger = logging.getLogger(__name__)


class LinkedDraft:
    """The proposer over a link; raises LinkError if it breaks."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._replied_ns = 0

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        before = self._traffic()
        if self._replied_ns:
            request = dataclasses.replace(request, away_ns=time.monotonic_ns() - self._replied_ns)
        with clock.phase("transfer"):
            message = _packed(Kind.REQUEST, request)
            self._link.send(message)
        request.meanwhile()
        answer = self._link.receive()
        if answer.kind is Kind.OUT_OF_MEMORY:
            raise DraftOutOfMemory(answer.text)
        if answer.kind is not Kind.REPLY:
            raise LinkError(f"the draft sent {answer.kind.name}, not a reply")
        with clock.phase("transfer"):
            reply = unpack(ProposalReply, list(answer.arrays), traffic=self._traffic() - before)
        self._replied_ns = time.monotonic_ns()
        return reply

    def tell(self, request: ProposalRequest) -> None:
        """A round in which the draft was not asked; there is no reply."""
        self._link.send(_packed(Kind.NEWS, request))

    def _traffic(self) -> Traffic:
        return Traffic(self._link.num_messages, self._link.num_bytes)

    def close(self) -> None:
        self._link.close()


def _packed(kind: Kind, request: ProposalRequest) -> Message:
    matrix: np.ndarray | None = None
    if request.next_distributions_W is not None:
        assert isinstance(request.next_distributions_W, Dense)
        matrix = request.next_distributions_W.probabilities_NV.float().cpu().numpy()
    return Message(kind, pack(request), matrix)


class Dialer:
    """Looks for a draft in a thread of its own, so that one that does not answer holds up nobody."""

    def __init__(
        self, dial: Callable[[], Link], *, retry_s: float = RETRY_S, says: str = "no draft yet"
    ) -> None:
        """``dial``: returns a link whose greeting was accepted, or raises LinkError or OSError. ``says``: in
        the log, before the reason."""
        self._dial = dial
        self._retry_s = retry_s
        self._says = says
        self._found: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._refusal = ""

    def start(self) -> None:
        """Look for one; :meth:`take` returns it."""
        threading.Thread(target=self._run, name="dialer", daemon=True).start()

    def take(self, timeout_s: float = 0.0) -> Link | None:
        """The link that was found, if one is found in time."""
        try:
            return self._found.get(timeout=timeout_s) if timeout_s > 0 else self._found.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        self._is_closed.set()
        if (link := self.take()) is not None:
            link.close()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                link = self._dial()
            except (LinkError, OSError) as error:
                if str(error) != self._refusal:
                    self._refusal = str(error)
                    logger.warning("%s: %s", self._says, error)
                self._is_closed.wait(self._retry_s)
                continue
            if self._is_closed.is_set():
                link.close()
            else:
                self._found.put(link)
            return


class SharedDraft:
    """The proposer of a target group whose draft serves others, too."""

    def __init__(
        self,
        dialer: Dialer,
        new_draft: Callable[[Link], Proposer],
        *,
        decodes_alone: bool,
        repeats_blocks: bool,
        first_wait_s: float,
        longest_wait_s: float,
        on_loss: Callable[[], None] = lambda: None,
        own_draft: int = 0,
        new_own_dialer: Callable[[], Dialer] | None = None,
    ) -> None:
        """
        Args:
            new_draft: the proposer over a new link.
            on_loss: called when a link breaks.
            decodes_alone: whether the group goes on without a draft; if not, it waits for one.
            repeats_blocks: whether a preempted sequence's tokens depend on the draft repeating its block.
            first_wait_s: how long a group that may go on alone waits for its draft at the beginning.
            longest_wait_s: how long one that may not waits, before it fails.
            own_draft: the number of the group's own draft; ``new_own_dialer``: looks for that one, while
                another serves the group.
        """
        self._dialer = dialer
        self._new_draft = new_draft
        self._decodes_alone = decodes_alone
        self._repeats_blocks = repeats_blocks
        self._longest_wait_s = longest_wait_s
        self._on_loss = on_loss
        self._wait_s = first_wait_s if decodes_alone else longest_wait_s
        self._own_draft = own_draft
        self._new_own_dialer = new_own_dialer
        self._own_dialer: Dialer | None = None
        self._draft: Proposer | None = None
        # Whether sequences run that the next draft knows nothing of.
        self._is_alone = False
        dialer.start()

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        must_wait = self._repeats_blocks and bool(request.num_redraft_R.any())
        wait_s = self._longest_wait_s if must_wait else self._wait_s
        if self._draft is None and (link := self._dialer.take(wait_s)) is not None:
            self._begin(link)
            if self._is_alone:
                self._is_alone = False
                raise DraftChanged("a draft answers: speculating again", starts_over=False)
        if self._own_dialer is not None and (link := self._own_dialer.take()) is not None:
            assert self._draft is not None
            self._draft.close()
            self._begin(link)
            raise DraftChanged("the group's own draft answers again", starts_over=not self._decodes_alone)
        if self._draft is None and (must_wait or not self._decodes_alone):
            raise RuntimeError(
                f"no draft has answered for {wait_s:.0f} s (--rank_timeout), and the tokens of this run "
                "depend on one"
            )
        if self._draft is None:
            self._is_alone, self._wait_s = True, 0.0
            return NoDraft().propose(request, clock)
        try:
            return self._draft.propose(request, clock)
        except LinkError as error:
            self._draft.close()
            self._draft = None
            self._stop_looking()
            self._on_loss()
            self._dialer.start()
            self._wait_s = 0.0 if self._decodes_alone else self._wait_s
            goes_on = "decoding alone" if self._decodes_alone else "its sequences begin again"
            raise DraftChanged(
                f"the draft is lost ({error}): {goes_on} until one answers",
                starts_over=not self._decodes_alone,
            ) from error

    def _begin(self, link: Link) -> None:
        """With a draft that knows nothing of the group's sequences."""
        self._stop_looking()
        self._draft = self._new_draft(link)
        if link.draft != self._own_draft and self._new_own_dialer is not None:
            self._own_dialer = self._new_own_dialer()
            self._own_dialer.start()

    def _stop_looking(self) -> None:
        """For the group's own draft."""
        if self._own_dialer is not None:
            self._own_dialer.close()
            self._own_dialer = None

    def close(self) -> None:
        self._dialer.close()
        self._stop_looking()
        if self._draft is not None:
            self._draft.close()
