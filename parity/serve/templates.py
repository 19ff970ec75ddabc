"""Chat templates: strangers' programs, run in a sandbox, in a process whose time and memory are bounded."""

from __future__ import annotations

import functools
import resource
import threading
from typing import Any

import jinja2
import jinja2.sandbox

from parity.processes import CallFailed, Worker, WorkerDied
from parity.serve.requests import BadRequest, shown

TEMPLATE_TIMEOUT_S = 5.0
TEMPLATE_MEMORY_BYTES = 1 << 30  # a template can ask for a text of any length
MAX_RENDERED_CHARACTERS = 16 << 20


class TemplateRenderer:
    """A model's own chat template is a stranger's program: it runs in a sandbox, in a process of its own,
    whose time and memory are bounded. Legal from several threads.
    """

    def __init__(self, template: str, *, timeout_s: float = TEMPLATE_TIMEOUT_S) -> None:
        self._template, self._timeout_s = template, timeout_s
        self._worker, self._lock = Worker(), threading.Lock()

    def render(self, messages: list[dict[str, str]], special: dict[str, str]) -> str:
        """The text of a chat. Raises ``BadRequest``."""
        arguments = {"template": self._template, "messages": messages, "special": special}
        try:
            with self._lock:
                if self._worker.pid is None:  # its start is not the template's time
                    self._worker.call("parity.serve.templates:start_here", {})
                answer = self._worker.call(
                    "parity.serve.templates:render_here", arguments, timeout_s=self._timeout_s
                )
        except (WorkerDied, CallFailed) as error:
            raise BadRequest(
                f"the chat template does not come to an end: {shown(error)}", parameter="messages"
            ) from error
        if "refusal" in answer:
            raise BadRequest(
                f"the chat template refuses the messages: {answer['refusal']}", parameter="messages"
            )
        return answer["text"]

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def start_here(arguments: dict[str, Any]) -> None:
    """In the worker: bound its memory."""
    resource.setrlimit(resource.RLIMIT_AS, (TEMPLATE_MEMORY_BYTES, TEMPLATE_MEMORY_BYTES))


def render_here(arguments: dict[str, Any]) -> dict[str, str]:
    """In the worker: render, or say what the template refuses."""
    try:
        text = render(arguments["template"], arguments["messages"], arguments["special"])
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:
        return {"refusal": shown(error)}
    return {"text": text} if len(text) <= MAX_RENDERED_CHARACTERS else {"refusal": "the text is too long"}


def render(template: str, messages: list[dict[str, str]], special: dict[str, str]) -> str:
    """The text of a chat in a sandbox. Raises what a template can raise."""
    return compiled(template).render(messages=messages, add_generation_prompt=True, **special)


@functools.cache
def compiled(template: str) -> jinja2.Template:
    """The template in a sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
