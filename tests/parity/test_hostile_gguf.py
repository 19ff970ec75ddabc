"""GGUF files that mean harm: one clear line, in bounded time and memory, whatever they hold."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFValueType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.errors import ExitCode, UsageError
from parity.models import resolve_model
from parity.models.facts import read_facts
from parity.models.gguf import KEPT_ITEMS, SCALAR_FORMATS, read_header
from parity.models.slice import LayerRange, slice_model
from parity.models.tiny import BUILDERS


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def number(kind: Kind, value: float) -> bytes:
    return struct.pack("<I", kind) + struct.pack(SCALAR_FORMATS[kind], value)


def u32(value: int) -> bytes:
    return number(Kind.UINT32, value)


def string(value: str | bytes) -> bytes:
    return struct.pack("<I", Kind.STRING) + text(value)


def array(kind: Kind, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IIQ", Kind.ARRAY, kind, count) + items


GOOD = {
    "general.architecture": string("llama"),
    "llama.block_count": u32(2),
    "llama.context_length": u32(64),
    "llama.embedding_length": u32(32),
    "llama.attention.head_count": u32(4),
}
EMBEDDING = (b"token_embd.weight", (32, 8), 0, 0)


def gguf(
    fields: dict[str | bytes, bytes],
    tensors: list[tuple[bytes, tuple[int, ...], int, int]] | None = None,
    *,
    counts: tuple[int, int] | None = None,
    data_bytes: int = 32 * 8 * 4,
) -> bytes:
    """A GGUF file made by hand; ``counts`` lies about the number of tensors and fields."""
    entries = [EMBEDDING] if tensors is None else tensors
    body = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(entries), len(fields))))
    body += b"".join(text(key) + value for key, value in fields.items())
    for name, shape, kind, offset in entries:
        body += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return body + bytes(-len(body) % 32) + bytes(data_bytes)


def good(**changes: bytes) -> dict[str | bytes, bytes]:
    return GOOD | {key.replace("__", "."): value for key, value in changes.items()}


def gemma2(**changes: bytes) -> dict[str | bytes, bytes]:
    fields = {str(key).replace("llama.", "gemma2."): value for key, value in GOOD.items()}
    return fields | {"general.architecture": string("gemma2")} | changes


NESTED = b"".join(struct.pack("<IQ", Kind.ARRAY, 1) for _ in range(100_000))
PATTERN = "gemma2.attention.sliding_window_pattern"
HOSTILE = {
    "nested arrays": (gguf(good(x=struct.pack("<I", Kind.ARRAY) + NESTED)), "array of arrays"),
    "array of 2^60 bytes": (gguf(good(x=array(Kind.UINT8, 1 << 60))), "truncated"),
    "array of 2^60 strings": (gguf(good(x=array(Kind.STRING, 1 << 60, text("a") * 9))), "truncated"),
    "array of 2^60 arrays": (gguf(good(x=array(Kind.ARRAY, 1 << 60))), "array of arrays"),
    "string of 2^63 bytes": (gguf(good(x=struct.pack("<IQ", Kind.STRING, 1 << 63))), "truncated"),
    "2^63 fields": (gguf(GOOD, counts=(1, 1 << 63)), "a count of 9223372036854775808 fields"),
    "2^63 tensors": (gguf(GOOD, counts=(1 << 63, 5)), "a count of 9223372036854775808 tensors"),
    "alignment 0": (gguf(good(general__alignment=u32(0))), "general.alignment is 0"),
    "alignment 33": (gguf(good(general__alignment=u32(33))), "general.alignment is 33"),
    "alignment as text": (gguf(good(general__alignment=string("32"))), "general.alignment is '32'"),
    "alignment true": (gguf(good(general__alignment=number(Kind.BOOL, 1))), "general.alignment is True"),
    "architecture a number": (gguf(good(general__architecture=u32(1))), "no general.architecture"),
    "architecture a list": (
        gguf(good(general__architecture=array(Kind.UINT8, 2, b"ab"))),
        "no general.architecture",
    ),
    "long architecture": (gguf(good(general__architecture=string("A" * 100_000))), "is not supported"),
    "architecture with braces": (gguf(good(general__architecture=string("{0.x}"))), "'{0.x}' is not supp"),
    "unknown value type": (gguf(good(x=struct.pack("<I", 99))), "unknown type 99"),
    "key twice": (gguf(GOOD | {b"llama.block_count": u32(2)}), "'llama.block_count' is given twice"),
    "key that is no text": (gguf(GOOD | {b"\xff\xfe": u32(1)}), "not UTF-8"),
    "block_count 0": (gguf(good(llama__block_count=u32(0))), "block_count is 0, not a whole number from 1"),
    "block_count huge": (gguf(good(llama__block_count=u32(0xFFFFFFFF))), "block_count is 4294967295"),
    "block_count as text": (gguf(good(llama__block_count=string("2"))), "block_count is '2'"),
    "block_count long text": (gguf(good(llama__block_count=string("2" * 99_999))), "block_count is '222"),
    "block_count nan": (gguf(good(llama__block_count=number(Kind.FLOAT64, float("nan")))), "is nan"),
    "block_count 2.0": (gguf(good(llama__block_count=number(Kind.FLOAT32, 2.0))), "is 2.0"),
    "block_count true": (gguf(good(llama__block_count=number(Kind.BOOL, 1))), "is True"),
    "block_count a list": (gguf(good(llama__block_count=array(Kind.UINT32, 1, b"\2\0\0\0"))), "is [2]"),
    "all blocks predict": (gguf(good(llama__nextn_predict_layers=u32(2))), "nextn_predict_layers is 2"),
    "no heads": (gguf(good(llama__attention__head_count=u32(0))), "no layer has an attention head"),
    "heads below 0": (
        gguf(good(llama__attention__head_count=number(Kind.INT32, -4))),
        "head_count is -4",
    ),
    "heads of one layer": (
        gguf(good(llama__attention__head_count_kv=array(Kind.UINT32, 1, b"\2\0\0\0"))),
        "head_count_kv has 1 values for 2 layers",
    ),
    "heads a long list": (
        gguf(
            good(llama__attention__head_count_kv=array(Kind.UINT8, KEPT_ITEMS + 1, b"\1" * (KEPT_ITEMS + 1)))
        ),
        "head_count_kv is a long array",
    ),
    "heads that are text": (
        gguf(good(llama__attention__head_count_kv=array(Kind.STRING, 2, text("a") * 2))),
        "head_count_kv is a long array",
    ),
    "key length as text": (gguf(good(llama__attention__key_length=string("8"))), "key_length is '8'"),
    "window pattern too short": (gguf(gemma2(**{PATTERN: array(Kind.BOOL, 1, b"\1")})), "1 values for 2"),
    "window pattern of numbers": (gguf(gemma2(**{PATTERN: array(Kind.UINT8, 2, b"\1\7")})), "booleans"),
    "window pattern text": (gguf(gemma2(**{PATTERN: string("yes")})), "pattern is 'yes'"),
    "tensor of 2^31 dimensions": (
        gguf(GOOD, [(b"t", (), 0, 0)]).replace(text(b"t") + bytes(4), text(b"t") + b"\0\0\0\x80"),
        "2147483648 dimensions",
    ),
    "tensor of no dimension": (gguf(GOOD, [(b"t", (), 0, 0)]), "0 dimensions"),
    "tensor of no rows": (gguf(GOOD, [(b"t", (32, 0), 0, 0)]), "has the shape (32, 0)"),
    "tensor of broken blocks": (gguf(GOOD, [(b"t", (33, 1), 2, 0)]), "Q4_0 has the shape (33, 1)"),
    "tensor of 2^190 values": (gguf(GOOD, [(b"t", (1 << 63,) * 3, 0, 0)]), "truncated"),
    "tensor far behind the end": (gguf(GOOD, [(b"t", (32, 8), 0, 2**64 - 32)]), "truncated"),
    "tensor twice": (gguf(GOOD, [EMBEDDING, EMBEDDING]), "names a tensor twice"),
    "tensor of unknown type": (gguf(GOOD, [(b"t", (32, 8), 99, 0)]), "unknown type 99"),
    "embedding of one dimension": (gguf(GOOD, [(b"token_embd.weight", (32,), 0, 0)]), "has the shape (32,)"),
    "no embedding": (gguf(GOOD, []), "no token_embd.weight"),
}


def test_the_file_that_is_changed_here_is_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(gguf(GOOD))
    facts = read_facts(tmp_path / "good.gguf")
    assert (facts.n_layer, facts.n_vocab, facts.n_key_values) == (2, 8, (32, 32))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_one_short_line(name: str, tmp_path: Path) -> None:
    data, said = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_facts(path)
    line = caught.value.line
    assert said in line and str(path) in line
    assert "\n" not in line and len(line) < 400 + len(str(path))


def test_command_ends_on_every_hostile_file_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """One process for all, with 60 CPU seconds and 2 GiB of addresses."""
    for place, (data, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{place}.gguf").write_bytes(data)
    sparse = tmp_path / "sparse.gguf"  # whole by its size: 2^33 bytes of array, then 2^30 empty strings
    head = gguf(good(x=array(Kind.UINT8, 1 << 33)), counts=(1, 9))[: -32 * 8 * 4]
    with open(sparse, "wb") as file:
        file.write(head)
        file.truncate(1 << 34)
    strings = tmp_path / "strings.gguf"
    with open(strings, "wb") as file:
        file.write(gguf(good(x=array(Kind.STRING, 1 << 30)), [], data_bytes=0))
        file.truncate(1 << 34)
    program = (
        "import sys; from parity.cli import main\n"
        "codes = []\n"
        "for path in sys.argv[1:]:\n"
        "    try: main(['slice', path, '--layers', '0:1', '--out', path + '.out'])\n"
        "    except SystemExit as ended: codes.append(ended.code)\n"
        "print(set(codes), len(codes))"
    )
    paths = sorted(map(str, tmp_path.glob("*.gguf")))
    done = subprocess.run(
        [sys.executable, "-c", program, *paths],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: (
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60)),
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
        ),
    )
    assert done.stdout == f"{{{ExitCode.USAGE:d}}} {len(paths)}\n", done.stdout + done.stderr[-2000:]
    told = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(told) == len(paths) and all(line.startswith("parity: ") for line in told)


def test_per_layer_list_that_is_too_short_is_not_sliced(tmp_path: Path) -> None:
    fields = good(llama__feed_forward_length=array(Kind.UINT32, 1, b"\2\0\0\0"))
    (tmp_path / "x.gguf").write_bytes(gguf(fields))
    with pytest.raises(UsageError, match="feed_forward_length has 1 values for 2 layers"):
        slice_model(tmp_path / "x.gguf", LayerRange(start=1, stop=2), tmp_path / "out.gguf")


@pytest.mark.parametrize("family", BUILDERS)
def test_damaged_header_is_read_or_refused(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes are changed, put in or cut out anywhere in the header; only a ``UsageError`` may come of it."""
    source = resolve_model(family).path
    data = source.read_bytes()
    n_header_bytes = min(tensor.start for tensor in read_header(source).tensors)
    target = tmp_path_factory.mktemp("damaged") / "x.gguf"
    refused = 0

    @given(
        place=st.integers(0, n_header_bytes),
        gone=st.integers(0, 12),
        put=st.binary(max_size=12) | st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value)),
    )
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def damage(place: int, gone: int, put: bytes) -> None:
        nonlocal refused
        target.write_bytes(data[:place] + put + data[place + gone :])
        try:
            facts = read_facts(target)
        except UsageError as error:
            refused += 1
            assert "\n" not in error.line and len(error.line) < 1000
        else:
            assert len(facts.layers) == facts.n_layer <= 512

    damage()
    assert refused > 50
