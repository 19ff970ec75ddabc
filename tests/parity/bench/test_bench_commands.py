"""The commands around benchmarks as a user runs them: small real runs on the tiny llama, and exit codes."""

from __future__ import annotations

import json
import pstats
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from parity.bench.cutover import at_least
from parity.bench.peers import LAYOUTS, free_port, llama_server_command, running_server, workload_of
from parity.bench.workload import Lengths
from parity.commands import cutover
from parity.commands.bench import command as bench_command
from parity.commands.cutover import command as cutover_command
from parity.commands.peers import command as peers_command
from parity.commands.serve import command as serve_command
from parity.errors import ExitCode, UsageError
from parity.models import resolve_model
from parity.models.facts import read_facts
from parity.models.families import load_family
from parity.records import Verdict
from parity.serve.served_model import EngineSettings, sequence_count
from parity.telemetry import Totals, plot_steps, read_steps
from scheduler.limits import Layout
from tests.parity.systems.small_servers import small_server

SETTINGS = EngineSettings(model="llama", n_threads=1, max_num_seqs=8, pool_cells=2000)
ENGINE = ["llama", "--threads", "1", "--n-ctx", "2000", "--max-num-seqs", "4"]


CURVE = ["--max-concurrency", "1", "--max-concurrency", "2"]


def run(command: Any, *arguments: str) -> ExitCode:
    return command.main([str(argument) for argument in arguments], standalone_mode=False)


def test_bench_command_writes_rows_and_refuses_nonsense(tmp_path: Path) -> None:
    common = ["llama", "--threads", "1", "--n-ctx", "2000", "--num-prompts", "4", "--random-output-len", "4"]
    saved = ["--save-result", "--result-dir", str(tmp_path)]
    code = bench_command.main([*common, "--max-concurrency", "2", *saved], standalone_mode=False)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert int(code) == 0 and rows[0]["completed"] == 4 and (tmp_path / "rows.csv").exists()
    for wrong in (
        ["--percentile-metrics", "speed"],
        ["--metric-percentiles", "0"],
        ["--mix", "all"],
        ["--policy", "no_such"],
        ["--base-url", "http://127.0.0.1:9"],
    ):
        with pytest.raises(UsageError):
            bench_command.main([*common, *wrong], standalone_mode=False)


def test_bench_in_which_a_request_failed_says_so_and_does_not_exit_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prompts of 90 to 270 tokens for a pool of 200 cells: some can never be served."""
    pool = ["llama", "--threads", "1", "--n-ctx", "200", "--max-concurrency", "1", "--num-prompts", "8"]
    work = ["--random-input-len", "180", "--random-output-len", "2", "--random-range-ratio", "0.5"]
    assert run(bench_command, *pool, *work) is ExitCode.FAIL
    text = capsys.readouterr().out
    assert "of 8 requests failed, the first with: " in text and "concurrency 1" in text
    assert run(bench_command, *pool, *work, "--allow-failures") is ExitCode.PASS
    hopeless = [*pool[:-1], "1", "--random-input-len", "300", "--allow-failures"]
    assert run(bench_command, *hopeless) is ExitCode.UNKNOWN


def test_bench_writes_telemetry_that_is_read_back(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    work = ["--num-prompts", "4", "--random-input-len", "10", "--random-output-len", "5"]
    assert run(bench_command, *ENGINE, *work, *CURVE, "--telemetry", steps) is ExitCode.PASS
    totals = Totals(read_steps(steps)).as_dict()
    assert totals["finished"] == 2 * 4 and totals["prefill_tokens"] == 2 * 4 * 10  # at both concurrencies
    assert totals["decode_tokens"] == 2 * 4 * (5 - 1) and totals["step_ms"] >= totals["engine_ms"] > 0
    assert plot_steps(read_steps(steps), kind="png")
    with pytest.raises(UsageError, match="not seen from outside"):
        run(bench_command, "llama", "--base-url", "http://127.0.0.1:9", "--telemetry", steps)
    with pytest.raises(UsageError, match="telemetry cannot be written"):
        run(bench_command, *ENGINE, "--telemetry", tmp_path / "no" / "folder")


# -- ceiling


def test_more_lanes_than_the_state_budget_affords_cost_one_line_that_names_it() -> None:
    """Three ids of a hybrid are spare: what holds nothing, padding, a prefix."""
    budget = ["--state-budget", 7 * read_facts(resolve_model("falcon_h1").path).slot_bytes()]
    engine = ["falcon_h1", "--threads", "1", "--n-ctx", "500", *budget, "--max-num-seqs"]
    work = ["--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "3", "--max-concurrency"]
    refusal = "5 sessions at once in --max-num-seqs: .* // .* bytes a slot.*; use at most 4"
    at_once = {
        serve_command: ["--port", "0"],
        bench_command: ["--max-concurrency", "5"],
        cutover_command: ["--check-sessions", "0", "--curve", "5", "--target", "5"],
    }
    for command, more in at_once.items():
        with pytest.raises(UsageError, match=refusal) as refused:
            run(command, *engine, "5", *more)
        assert "recurrent slots of falcon_h1 allow 4" in refused.value.line
    assert run(bench_command, *engine, "4", *work, "4") is ExitCode.PASS


@pytest.mark.parametrize(
    ("change", "most", "binding"),
    [
        ({"model": "llama"}, 254, "sequence ids"),
        ({"model": "gemma2"}, 126, "sequence ids"),
        ({"model": "falcon_h1"}, 253, "recurrent slots"),
        ({"model": "falcon_h1", "layout": Layout.STREAMS}, 255, "recurrent slots"),
        ({"model": "gemma2", "layout": Layout.STREAMS}, 256, "sequence ids"),
        ({"model": "llama", "pool_cells": 20}, 20, "attention cells"),
    ],
)
def test_ceiling_is_the_smallest_component_and_named(
    change: dict[str, int | Layout | str], most: int, binding: str
) -> None:
    settings = EngineSettings(**change)
    family, facts = load_family(settings.model), read_facts(resolve_model(settings.model).path)
    assert sequence_count(replace(settings, max_num_seqs=most), family, facts) >= most
    with pytest.raises(UsageError, match=f"the {binding} of .* allow {most}"):
        sequence_count(replace(settings, max_num_seqs=most + 1), family, facts)


def test_state_budget_bounds_the_ids_of_a_hybrid_and_of_nobody_else() -> None:
    def ids(model: str, slots: int | None) -> int:
        facts = read_facts(resolve_model(model).path)
        budget = None if slots is None else slots * max(facts.slot_bytes(), 1)
        settings = EngineSettings(model=model, max_num_seqs=4, state_budget_bytes=budget)
        return sequence_count(settings, load_family(model), facts)

    assert (ids("qwen3next", None), ids("qwen3next", 10)) == (3 * 4 + 8, 10 - 1)
    assert ids("llama", None) == ids("llama", 10)


# -- cutover

SMALL_GATE = ["--target", "2", "--num-prompts", "4", "--curve-prompts", "2", "--pairs", "1"]


def test_cutover_prints_a_verdict_per_model_and_exits_with_the_worst(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    code = run(cutover_command, *ENGINE, *SMALL_GATE, "--curve", "2", "--check-sessions", "4", "--json", out)
    found = json.loads(out.read_text())
    verdicts = [Verdict(row["verdict"]) for row in found["rows"]]
    assert code == Verdict.merge(verdicts).exit_code and found["verdicts"] == {
        "llama": Verdict.merge(verdicts).value
    }
    assert found["rows"][0]["claim"] == "correctness" and verdicts[0] is Verdict.PASS
    assert code != ExitCode.PASS and len(verdicts) == 12  # four requests carry no p99, so a row is unknown


def test_model_that_is_not_correct_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def suite(family: str, layout: Layout, **_: object) -> SimpleNamespace:
        verdict = Verdict.FAIL if family == "llama" else Verdict.PASS
        return SimpleNamespace(verdict=verdict, bit_identical=3, sessions=4, reason="")

    measured = at_least("gemma2", "throughput", 3.0, 2.0)
    monkeypatch.setattr(cutover, "run_suite", suite)
    monkeypatch.setattr(cutover, "Cutover", lambda settings, *_: SimpleNamespace(rows=lambda: [measured]))
    out = tmp_path / "rows.json"
    assert run(cutover_command, "gemma2", "--json", out) is ExitCode.PASS
    assert run(cutover_command, "gemma2", "llama", "--json", out) is ExitCode.FAIL
    found = json.loads(out.read_text())
    assert found["verdicts"] == {"gemma2": "pass", "llama": "fail"}
    rows = [(row["model"], row["claim"]) for row in found["rows"]]
    assert rows == [("gemma2", "correctness"), ("gemma2", "throughput"), ("llama", "correctness")]
    assert "llama: may not cut over (fail)" in capsys.readouterr().out
    code = run(cutover_command, "gemma2", "--check-sessions", "0")
    assert code is ExitCode.UNKNOWN  # fast, and not shown to be right


def test_profile_of_the_steps_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.prof"
    work = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "4", "--profile", out]
    assert run(bench_command, *ENGINE, *work, "--max-concurrency", "2") is ExitCode.PASS
    functions = {name for _, _, name in pstats.Stats(str(out)).stats}
    assert {"decode", "plan_iteration", "begin"} <= functions
    assert "read_header" not in functions  # loading is no step
    printed = capsys.readouterr().out
    assert "Ordered by: internal time" in printed and "decode" in printed


def test_bench_foretells_its_steps_by_the_cost_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "4", "--shards", "auto"]
    assert run(bench_command, *ENGINE, *work, "--max-concurrency", "4") is ExitCode.PASS
    [said] = [line for line in capsys.readouterr().out.splitlines() if "foretold" in line]
    assert re.search(r"a step of 4 rows over \d+ cells in \d+ shards: .* ms foretold, .* ms measured", said)


# -- peers


def test_llama_server_gets_the_same_model_threads_context_and_slots() -> None:
    command = llama_server_command(Path("llama-server"), SETTINGS, 1234)
    pairs = dict(zip(command[1::2], command[2::2], strict=False))
    assert (pairs["-t"], pairs["-c"], pairs["-np"], pairs["--port"]) == ("1", "2000", "8", "1234")
    assert pairs["-m"].endswith(".gguf")
    assert workload_of(32, 64, 3, 0).lengths == Lengths(input_len=32, output_len=64)


def test_peer_that_says_much_is_not_blocked_by_a_pipe_that_nobody_reads() -> None:
    port = free_port()
    with running_server(small_server(port=port, noise=10_000), f"http://127.0.0.1:{port}") as url:
        for _ in range(20):
            assert httpx.get(url, timeout=10.0, trust_env=False).text == "ok"


def test_peer_that_ends_while_starting_says_why() -> None:
    command = small_server(before="sys.exit('no such model')")
    with pytest.raises(UsageError, match=r"server ended while starting in .*exited with 1: no such model"):
        with running_server(command, "http://127.0.0.1:1"):
            pass


STAND_IN = """#!{python}
import os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
os.execv(sys.executable, [sys.executable, "-m", "parity.cli", "serve", given["-m"], "--port", given["--port"],
                          "--n-ctx", given["-c"], "--max-num-seqs", given["-np"], "--threads", given["-t"],
                          "--served-model-name", "llama"])
"""


def test_price_of_exactness_has_a_row_per_layout_concurrency_and_prompt(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    work = ["--concurrency", "1,2", "--input-lens", "8,16", "--output-len", "2", "--pairs", "1"]
    assert run(peers_command, *ENGINE, *work, "--against", "layouts", "--json", out) is ExitCode.PASS
    rows = json.loads(out.read_text())
    assert [(row["peer"], row["input_len"], row["concurrency"]) for row in rows] == [
        (peer, length, n)
        for peer in LAYOUTS
        if peer != "one pool"  # ours are
        for length in (8, 16)
        for n in (1, 2)
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ours_tokens_per_s"] / row["peer_tokens_per_s"])


def test_shards_are_compared_with_one_pool_and_tell_what_prefixes_saved(tmp_path: Path) -> None:
    """Eight prompts at concurrency 4 share 24 of 32 tokens: those who enter before it is resident share
    nothing, and in two shards it is computed twice.
    """
    out = tmp_path / "rows.json"
    work = ["--concurrency", "4", "--input-lens", "32", "--output-len", "4", "--pairs", "1"]
    shards = ["--shards", "2", "--peer-layout", "one pool", "--prefix", "shared"]
    assert run(peers_command, *ENGINE, *work, *shards, "--against", "layouts", "--json", out) is ExitCode.PASS
    [row] = json.loads(out.read_text())
    ours, peer = map(int, re.findall(r"\d+", row["note"]))
    assert row["peer"] == "one pool" and 0 < ours <= peer <= 7 * 24


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--against", "layouts", "--peer-layout", "one pool"], "ours are one pool"),
        (["--peer-layout", "stock, flash attention"], "it would change nothing"),
    ],
)
def test_layout_that_would_say_nothing_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(peers_command, *ENGINE, *given)


def test_rows_that_time_does_not_allow_are_unknown_and_the_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    work = ["--concurrency", "1,2", "--input-lens", "8", "--output-len", "2", "--pairs", "1"]
    assert run(peers_command, *ENGINE, *work, "--minutes", "0.0001", "--json", out) is ExitCode.UNKNOWN
    assert len(json.loads(out.read_text())) < 2


@pytest.mark.parametrize("option", ["--concurrency", "--input-lens"])
def test_number_that_is_none_is_reported_under_its_own_option(option: str) -> None:
    with pytest.raises(UsageError, match=f"'1,x' in {option}"):
        run(peers_command, *ENGINE, option, "1,x")


def test_servers_are_compared_side_by_side_and_ended(tmp_path: Path) -> None:
    """A stand-in that takes llama-server's flags is started, measured beside ours and stopped."""
    binary, log, out = tmp_path / "llama-server", tmp_path / "log", tmp_path / "rows.json"
    binary.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    binary.chmod(0o755)
    work = ["--concurrency", "2", "--input-lens", "16", "--output-len", "4", "--pairs", "1"]
    engine = ["llama", "--threads", "1", "--n-ctx", "2000", "--max-num-seqs", "4"]
    given = [*engine, *work, "--against", "server", "--llama-server", str(binary), "--json", str(out)]
    assert int(peers_command.main(given, standalone_mode=False)) == 0
    [row] = json.loads(out.read_text())
    assert row["peer"] == "llama-server" and row["note"] == "over HTTP"
    assert row["ratio"] == pytest.approx(row["ours_tokens_per_s"] / row["peer_tokens_per_s"])
    assert not [p for p in psutil.Process().children(recursive=True) if "serve" in p.cmdline()]
    [line] = log.read_text().splitlines()
    assert " -c 2000 -np 4 " in line


def test_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    given = ["llama", "--threads", "1", "--n-ctx", "2000", "--against", "server", "--output-len", "2"]
    with pytest.raises(UsageError, match="llama-server"):
        peers_command.main([*given, "--llama-server", str(tmp_path / "llama-server")], standalone_mode=False)
    with pytest.raises(UsageError, match="needs one of"):
        peers_command.main(given, standalone_mode=False)
