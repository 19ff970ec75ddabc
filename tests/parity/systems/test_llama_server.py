"""llama-server by its options; what is not here is one line that says how to get it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from parity.errors import UsageError
from parity.models import resolve_model
from parity.store import REPOSITORY
from parity.systems.llama_server import (
    LlamaServerBuild,
    LlamaServerFacts,
    LlamaServerOptions,
    describe_llama_server,
    llama_server_facts,
    llama_server_program,
    open_llama_server,
)
from parity.systems.server_faults import FAULTS
from parity.systems.server_process import ServerDied

PATCH = REPOSITORY / ".ci/llama_server/faults.patch"


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("llama").path


def test_options_name_each_value_once(tmp_path: Path) -> None:
    options = LlamaServerOptions(model=tmp_path / "m.gguf", n_slots=3, kv_unified=True, swa_full=True)
    words = options.arguments()
    assert words[words.index("--parallel") + 1] == "3"
    assert words[words.index("--port") + 1] == "0"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert {"--kv-unified", "--swa-full"} <= set(words)
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert "--no-kv-unified" in LlamaServerOptions(model=tmp_path).arguments()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_slots": 0}, "n_slots must be at least 1: it is 0"),
        ({"flash_attention": "maybe"}, "flash_attention is on, off or auto: it is 'maybe'"),
    ],
)
def test_wrong_options_are_refused(wrong: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        LlamaServerOptions(model=tmp_path, **wrong)


@pytest.mark.parametrize(
    ("build", "variable", "todo"),
    [
        (LlamaServerBuild.STOCK, "SAMEBYTES_LLAMA_SERVER", "make llama-server"),
        (LlamaServerBuild.FAULTS, "SAMEBYTES_LLAMA_SERVER_FAULTS", "make llama-server FAULTS=1"),
    ],
)
def test_program_that_is_not_here_says_how_to_get_it(
    build: LlamaServerBuild, variable: str, todo: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))  # a folder is no program
    with pytest.raises(UsageError, match=rf"in {variable}: .* is not a program; {re.escape(todo)}$"):
        llama_server_program(build)
    monkeypatch.delenv(variable)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=rf"{re.escape(str(tmp_path))}; {re.escape(todo)}$"):
        llama_server_program(build)


def test_builds_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.touch(mode=0o755)
    monkeypatch.setenv("SAMEBYTES_LLAMA_SERVER", str(program))
    empty = describe_llama_server(LlamaServerBuild.STOCK)
    assert empty == "llama-server sha256:e3b0c44298fc"
    program.write_bytes(b"x")
    assert describe_llama_server(LlamaServerBuild.STOCK) != empty
    assert re.fullmatch(r"xllamacpp \d+\.\d+\.\d+", describe_llama_server(LlamaServerBuild.WHEEL))


def test_fault_needs_the_build_that_has_it(tmp_path: Path) -> None:
    options = LlamaServerOptions(model=tmp_path)
    with pytest.raises(UsageError, match="a fault needs the build with faults"):
        open_llama_server(options, fault="key_hidden")
    with pytest.raises(UsageError, match="no fault 'key_seen'; choose prefix_one_long, "):
        open_llama_server(options, build=LlamaServerBuild.FAULTS, fault="key_seen")


def test_table_of_faults_is_that_of_the_patch() -> None:
    added = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith("+")]
    names = [match[1] for line in added if (match := re.fullmatch(r'    "(\w+)",', line))]
    assert names == [fault.name for fault in FAULTS]
    used = set(re.findall(r'server_fault\("(\w+)"\)', "\n".join(added)))
    assert used == set(names)
    assert len(names) >= 15


def test_newer_server_from_a_wheel_says_what_it_is(model: Path) -> None:
    options = LlamaServerOptions(model=model, n_slots=4, n_ctx=1024)
    with open_llama_server(options, build=LlamaServerBuild.WHEEL) as server:
        facts = llama_server_facts(server.url)
        assert facts == LlamaServerFacts(build=facts.build, model_path=str(model), n_slots=4, n_ctx_slot=256)
        metrics = httpx.get(f"{server.url}/metrics", trust_env=False)
        assert "llamacpp:n_decode_total" in metrics.text


def test_server_that_answers_many_requests_says_more_than_a_pipe_holds(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    body = {"n_predict": 2, "temperature": 0.0, "return_tokens": True}
    with (
        open_llama_server(LlamaServerOptions(model=model), build=LlamaServerBuild.WHEEL, log=log) as server,
        httpx.Client(base_url=server.url, timeout=30.0, trust_env=False) as client,
    ):
        answers = [
            client.post("/completion", json={**body, "prompt": [97 + number % 26, 98]}).json()["tokens"]
            for number in range(150)
        ]
    assert all(len(tokens) == 2 for tokens in answers)
    assert len({tuple(tokens) for tokens in answers}) > 10
    assert log.stat().st_size > 65536


def test_server_from_a_wheel_refuses_an_option_that_it_does_not_know(model: Path) -> None:
    options = LlamaServerOptions(model=model, kv_type="q2_k")
    with pytest.raises(ServerDied, match=r"exited with 2: .*--cache-type-k.*q2_k") as death:
        open_llama_server(options, build=LlamaServerBuild.WHEEL)
    assert death.value.code == 2


def test_model_that_is_not_there_ends_the_server(tmp_path: Path) -> None:
    options = LlamaServerOptions(model=tmp_path / "none.gguf")
    with pytest.raises(ServerDied):
        open_llama_server(options, build=LlamaServerBuild.WHEEL)
