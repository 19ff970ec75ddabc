"""Which adapter reaches a server."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace

from parity.endpoint.http_access import EndpointAccess, HttpAccess
from parity.endpoint.llama_server import LlamaServerSystem
from parity.endpoint.openai_api import OpenAiSystem
from parity.endpoint.sglang_api import SglangSystem
from parity.endpoint.system import SystemUnderTest
from parity.errors import UsageError
from parity.run.under_test import check_offers, load_factory

KINDS = ("auto", "openai", "llama-server", "sglang")
OFFERS = ("open", "generate", "tokenize", "counters", "close")


async def connect(target: str, access: EndpointAccess, *, kind: str = "auto") -> SystemUnderTest:
    """An adapter for ``target``: a URL, or ``package.module:factory`` that takes URL and model (both may be
    empty) and makes a ``SystemUnderTest``. ``auto`` asks a llama-server and an SGLang by their own
    interfaces, all others by OpenAI's. Raises ``UsageError``.
    """
    if names_factory(target):
        return await _from_factory(target, access)
    if kind == "auto":
        kind = "openai" if access.chat else await _find_kind(access)
    if kind == "llama-server":
        return LlamaServerSystem(access)
    if kind == "sglang":
        return SglangSystem(access)
    return OpenAiSystem(access)


def names_factory(target: str) -> bool:
    """Is it ``package.module:factory``, and no address?"""
    module, colon, name = target.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


async def _find_kind(access: EndpointAccess) -> str:
    http = HttpAccess(replace(access, extra_body={}))
    try:
        props, info = await asyncio.gather(http.look_json("/props"), http.look_json("/get_model_info"))
    finally:
        await http.close()
    if "total_slots" in props:
        return "llama-server"
    return "sglang" if "is_generation" in info else "openai"


async def _from_factory(target: str, access: EndpointAccess) -> SystemUnderTest:
    try:
        made = load_factory(target)(access)
        made = await made if inspect.isawaitable(made) else made
    except UsageError:
        raise
    except Exception as error:  # a user's code: whatever it raises, it gave nothing to test
        raise UsageError(f"{target} cannot make one", why=f"{type(error).__name__}: {error}") from error
    check_offers(made, OFFERS, specification=target)
    return made
