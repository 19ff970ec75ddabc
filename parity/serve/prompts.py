"""Prompts and chats as token ids: a GGUF's own chat template in a sandbox, or a plain one."""

from __future__ import annotations

from typing import Any

from parity.serve.requests import ROLES, BadRequest, is_token, shown
from parity.serve.served_model import ServedModel
from parity.serve.templates import TemplateRenderer, render

# Used when a model has no template: each message is a line that names its speaker, and the answer is the next
# line.
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}
{% endfor -%}
assistant:"""


class Prompts:
    """Tokenises for one model. Raises ``BadRequest`` for what cannot be a prompt."""

    def __init__(self, served: ServedModel) -> None:
        self._model = model = served.model
        template = served.chat_template
        self.has_own_template = template is not None
        self._renderer = None if template is None else TemplateRenderer(template)
        self._special = {
            "bos_token": model.special_text(model.bos_token),
            "eos_token": model.special_text(model.eos_token),
        }

    def close(self) -> None:
        """End the process that renders, if there is one."""
        if self._renderer is not None:
            self._renderer.close()

    def completion(self, data: dict[str, Any]) -> list[int]:
        """``prompt`` as a text, a list of token ids, or a list that holds exactly one of these."""
        prompt = data.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._model.tokenize(prompt)
        if isinstance(prompt, list) and all(is_token(item) for item in prompt):
            return prompt
        raise BadRequest(
            "prompt is neither a text nor a list of token ids; several prompts need several requests",
            parameter="prompt",
        )

    def chat(self, data: dict[str, Any]) -> list[int]:
        """``messages`` through the chat template; text parts of a message are joined."""
        messages = data.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages is not a non-empty list", parameter="messages")
        chat = [_message(item) for item in messages]
        if self._renderer is None:
            text = render(PLAIN_TEMPLATE, chat, self._special)
        else:
            text = self._renderer.render(chat, self._special)
        bos = self._special["bos_token"]
        return self._model.tokenize(text, add_special=not (bos and text.startswith(bos)))


def _message(item: Any) -> dict[str, str]:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        raise BadRequest(f"a message needs a role, one of {', '.join(ROLES)}", parameter="messages")
    for name, value in item.items():
        if name not in ("role", "content") and value is not None:
            raise BadRequest(f"{shown(name)} of a message is not supported", parameter="messages")
    content = item.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise BadRequest("only text parts are supported in a message", parameter="messages")
        content = "".join(parts)
    if not isinstance(content, str):
        raise BadRequest(
            "a message's content is neither a text nor a list of text parts", parameter="messages"
        )
    return {"role": item["role"], "content": content}
