"""A real server over the tiny llama, on a thread of the test process; and the real OpenAI client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from parity.serve.app import AppSettings
from parity.serve.served_model import EngineSettings, ServedModel, open_served
from parity.serve.server import serving

SETTINGS = EngineSettings(model="llama", n_threads=1, max_num_seqs=64, pool_cells=8000)


@pytest.fixture(scope="package")
def served() -> Iterator[ServedModel]:
    """The tiny llama, loaded once."""
    model = open_served(SETTINGS)
    yield model
    model.close()


@pytest.fixture(scope="package")
def url(served: ServedModel) -> Iterator[str]:
    """A running server's address."""
    with serving(served, AppSettings(model_name="llama")) as address:
        yield address


@pytest.fixture
def start() -> Iterator[Callable[..., str]]:
    """Starts a server of its own with other engine or HTTP settings;
    everything is drained at the test's end.
    """
    with ExitStack() as stack:

        def run(*, app: AppSettings | None = None, change: Any = None, **engine: Any) -> str:
            model = open_served(EngineSettings(**{"model": "llama", "n_threads": 1, **engine}))
            stack.callback(model.close)
            if change is not None:
                change(model)
            return stack.enter_context(serving(model, app or AppSettings(model_name="llama")))

        yield run


def client_of(url: str, **options: Any) -> openai.OpenAI:
    """The OpenAI client library, without retries: a refusal must be seen."""
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=options.pop("api_key", "none"), max_retries=0, **options
    )


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as made:
        yield made
