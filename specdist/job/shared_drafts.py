"""Where the drafts of a launch are, and how a target group reaches one of them.

A draft publishes its address in the launch's key-value store: a Unix socket for its own machine, which only
the same user can use, and TCP for others. Whoever cannot read the store cannot connect: a greeting has a
token that stands beside the address. It also has all that both sides must agree on.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.data.heartbeat import Process
from specdist.engine.sockets import Kind, Link, LinkError, Message
from specdist.job.model_plan import ModelPlan
from specdist.job.topology import Topology, launch_store

BACKLOG = 64
CONNECT_S = 5.0
POLL_S = 0.1
# In the options that both sides must have alike.
TERMS = (
    "policy",
    "acceptance",
    "overlap",
    "num_branches",
    "draft_window",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "suppress_tokens",
    "min_new_tokens",
    "row_options",
    "dtype",
    "verify",
)


def terms_of(config: GenerateConfig, models: ModelPlan, max_draft_tokens: int) -> dict[str, Any]:
    """What a target group and its draft must agree on, by name; as JSON has it."""
    found = {name: getattr(config, name) for name in TERMS} | config.policy_options | {
        "draft": models.draft.name if models.draft else None,
        "head": models.head.info.weights_sha256 if models.head else None,
        "is_constrained": config.is_constrained,
        "vocab_size": models.vocab_size,
        "max_seq_len": models.max_seq_len,
        "max_draft_tokens": max_draft_tokens,
        "trace": config.is_traced,
        "stop_token_ids": sorted(models.target.stop_token_ids()),
    }  # fmt: skip
    values: dict[str, Any] = json.loads(json.dumps(found))
    return values


class Listeners:
    """A draft's sockets, and its address."""

    def __init__(self, *, spans_machines: bool) -> None:
        """``spans_machines``: the launch has ranks on several."""
        local = socket.socket(socket.AF_UNIX)
        local.bind("")  # the system chooses a name that needs no file
        self.sockets = [local]
        self.token = secrets.token_hex(16)
        self._address: dict[str, Any] = {
            "machine": Process.current().machine,
            "name": local.getsockname().hex(),
            "token": self.token,
        }
        if spans_machines:
            remote = socket.socket(socket.AF_INET)
            remote.bind((_own_host(), 0))
            self._address |= dict(zip(("host", "port"), remote.getsockname(), strict=True))
            self.sockets.append(remote)
        for each in self.sockets:
            each.listen(BACKLOG)

    def publish(self, topology: Topology, **values: Any) -> None:
        """From now on the groups may connect. ``values``: beside the address."""
        assert topology.part is not None
        launch_store().set(_address_key(topology.part.index), json.dumps(self._address | values))


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user; of TCP the token must do."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.geteuid()


def check_greeting(values: Mapping[str, Any], token: str, terms: Mapping[str, Any]) -> None:
    """Raises ValueError with the reason of a refusal."""
    if not hmac.compare_digest(str(values.get("token")), token):
        raise ValueError("its token is not that of this launch")
    theirs = values.get("terms")
    theirs = theirs if isinstance(theirs, dict) else {}
    for name in sorted({*terms, *theirs}):
        if terms.get(name) != theirs.get(name):
            raise ValueError(
                f"{name} is {theirs.get(name)!r} for the target group and {terms.get(name)!r} for the draft: "
                "both must run with the same options and files"
            )


class DraftDirectory:
    """The drafts of the launch, for one target group."""

    def __init__(self, topology: Topology, *, timeout_s: float) -> None:
        """``timeout_s``: of every message, see ``--draft_timeout``."""
        assert topology.part is not None
        self._group = topology.part.index
        self._num_drafts = topology.num_drafts
        self._timeout_s = timeout_s
        self.own_draft = self._group % self._num_drafts
        self._machine = Process.current().machine
        self._store = launch_store()

    def num_pages(self, wait_s: float) -> int | None:
        """Pages of the cache that a draft has for each group; None if none is ready in time."""
        deadline = time.monotonic() + wait_s
        while True:
            if addresses := self._addresses():
                return min(int(address["num_pages"]) for address in addresses)
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    def dial(self, greeting: Mapping[str, Any], *, own_alone: bool = False) -> tuple[Link, dict[str, Any]]:
        """A link to the first draft that welcomes the group, its own one first or ``own_alone``, and the
        welcome. Raises LinkError."""
        reason = "no draft has told its address"
        for address in self._addresses():
            if own_alone and address["draft"] != self.own_draft:
                continue
            found, reason = self._try(address, greeting)
            if found is not None:
                return found
        raise LinkError(reason)

    def _try(
        self, address: Mapping[str, Any], greeting: Mapping[str, Any]
    ) -> tuple[tuple[Link, dict[str, Any]] | None, str]:
        """The link and the welcome, or the reason why not."""
        try:
            return self._greet(address, greeting), ""
        except (OSError, LinkError) as error:
            return None, str(error)

    def _greet(self, address: Mapping[str, Any], greeting: Mapping[str, Any]) -> tuple[Link, dict[str, Any]]:
        is_near = address["machine"] == self._machine and self._machine
        connection = socket.socket(socket.AF_UNIX if is_near else socket.AF_INET)
        try:
            connection.settimeout(CONNECT_S)
            if is_near:
                connection.connect(bytes.fromhex(address["name"]))
            elif "port" in address:
                connection.connect((address["host"], address["port"]))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                raise LinkError("the draft is on another machine, and listens on its own only")
            link = Link(connection, timeout_s=self._timeout_s)
            link.draft = int(address["draft"])
            values = dict(greeting) | {"group": self._group, "token": address["token"]}
            link.send(Message.of_values(Kind.GREETING, values))
            answer = link.receive()
            if answer.kind is not Kind.WELCOME:
                raise LinkError(f"the draft refuses: {answer.text}")
        except BaseException:
            connection.close()
            raise
        return link, answer.values

    def _addresses(self) -> list[dict[str, Any]]:
        """Those that are known, the group's own draft first."""
        found = []
        try:
            for offset in range(self._num_drafts):
                draft = (self._group + offset) % self._num_drafts
                key = _address_key(draft)
                if self._store.check([key]):
                    found.append(json.loads(self._store.get(key)) | {"draft": draft})
        except (RuntimeError, dist.DistError) as error:
            raise LinkError(f"the launch's store does not answer: {error}") from error
        return found


def _address_key(draft: int) -> str:
    return f"draft-{draft}/address"


def _own_host() -> str:
    """The address by which the launch's other machines reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])
