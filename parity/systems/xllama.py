"""The llama-server in the package xllamacpp as a process of its own: ``python -m
parity.systems.xllama OPTIONS``.

The package runs llama.cpp's server inside a Python process and has no command line; this takes those
of llama-server's options that ``LlamaServerOptions`` writes, by the same names, and rejects others.
The only importer of xllamacpp.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import xllamacpp

FLASH_ATTENTION = {
    "on": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "auto": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO,
}
KV_TYPES = {
    name: getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")
    for name in ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0")
}


def make_parser() -> argparse.ArgumentParser:
    """Options by llama-server's names; abbreviations are no options."""
    parser = argparse.ArgumentParser(prog="parity.systems.xllama", allow_abbrev=False)
    parser.add_argument("--model", "-m", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parallel", "-np", type=int, default=4)
    parser.add_argument("--ctx-size", "-c", type=int, default=0)
    parser.add_argument("--threads", "-t", type=int, default=1)
    parser.add_argument("--threads-batch", "-tb", type=int, default=1)
    parser.add_argument("--batch-size", "-b", type=int, default=2048)
    parser.add_argument("--ubatch-size", "-ub", type=int, default=512)
    parser.add_argument("--flash-attn", "-fa", choices=FLASH_ATTENTION, default="auto")
    parser.add_argument("--cache-type-k", "-ctk", choices=KV_TYPES, default="f16")
    parser.add_argument("--cache-type-v", "-ctv", choices=KV_TYPES, default="f16")
    parser.add_argument("--cache-ram", type=int, default=8192)
    parser.add_argument("--ctx-checkpoints", type=int, default=32)
    parser.add_argument("--kv-unified", "-kvu", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--swa-full", action="store_true")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True)
    return parser


def make_params(options: argparse.Namespace) -> xllamacpp.CommonParams:
    """llama.cpp's parameters of the options."""
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx_size
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads_batch
    params.n_batch = options.batch_size
    params.n_ubatch = options.ubatch_size
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]
    params.cache_type_k = KV_TYPES[options.cache_type_k]
    params.cache_type_v = KV_TYPES[options.cache_type_v]
    params.cache_ram_mib = options.cache_ram
    params.n_ctx_checkpoints = options.ctx_checkpoints
    params.kv_unified = options.kv_unified
    params.swa_full = options.swa_full
    params.endpoint_metrics = options.metrics
    params.endpoint_slots = options.slots
    return params


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = xllamacpp.Server(make_params(make_parser().parse_args(arguments)))
    print(f"listening on {server.listening_address}", flush=True)
    while not ended.wait(3600):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
