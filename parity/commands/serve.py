"""``parity serve``: the reference scheduler behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import click

from parity.errors import ExitCode, UsageError
from parity.serve.options import engine_options, settings_from, telemetry_option
from parity.telemetry import step_log


@click.command()
@engine_options
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; loopback by default."
)
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one."
)
@click.option(
    "--api-key",
    envvar="SAMEBYTES_API_KEY",
    default="",
    help="Key that clients must send; also from the "
    "environment variable SAMEBYTES_API_KEY, which other users of the machine cannot see.",
)
@click.option(
    "--served-model-name", default=None, help="Name in requests and answers; default: MODEL as given."
)
@click.option(
    "--max-body-bytes", default=4 << 20, show_default=True, type=click.IntRange(1), help="Larger: 413."
)
@click.option(
    "--default-max-tokens",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="Output tokens of a request that does not say.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of a request that does not say.")
@click.option(
    "--drain-timeout",
    default=60,
    show_default=True,
    type=click.IntRange(1),
    metavar="SECONDS",
    help="After SIGTERM, cancel what still runs after so long.",
)
@click.option(
    "--contain",
    "contained",
    is_flag=True,
    help="Run the engine in a process of its own: a model that ends it does not end the server. Sessions in "
    "flight are computed again, and the third time in a row they end with an error.",
)
@telemetry_option
def command(
    model: str,
    host: str,
    port: int,
    api_key: str,
    served_model_name: str | None,
    max_body_bytes: int,
    default_max_tokens: int,
    seed: int,
    drain_timeout: int,
    telemetry_path: Path | None,
    **options: Any,
) -> ExitCode:
    """Serve MODEL at /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics, as
    /openapi.json describes them.

    A queue that is full answers 429 with Retry-After; SIGTERM finishes what runs and exits.
    """
    from parity.serve.app import AppSettings, Endpoint
    from parity.serve.served_model import open_served
    from parity.serve.server import ServerSettings, bind_socket, run_server, socket_url

    settings = settings_from(model, options)
    server = ServerSettings(host=host, port=port, drain_timeout_s=drain_timeout)
    if not api_key.isascii():
        raise UsageError(
            "the API key is not ASCII",
            where="--api-key or SAMEBYTES_API_KEY",
            why="it is sent in an HTTP header",
        )
    bound = bind_socket(server)
    served = open_served(settings)
    app = AppSettings(
        model_name=served_model_name or model,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        default_max_tokens=default_max_tokens,
        default_seed=seed,
    )
    endpoint = Endpoint(served, app)
    if not api_key and not _is_loopback(host):
        click.echo(
            f"parity serve: listening on {host} without an API key: everybody who reaches it may use it",
            err=True,
        )
    bound.listen()  # who reads the address may connect at once
    shards = f" in {settings.shards} shards" if settings.shards > 1 else ""
    template = "the model's chat template" if endpoint.prompts.has_own_template else "the plain chat template"
    click.echo(
        f"parity serve: {app.model_name} at {socket_url(bound)}/v1, {settings.layout.value}, "
        f"numerics {served.profile.name!r}, {settings.pool_cells} cells{shards}, "
        f"{settings.max_num_seqs} at once, {template}"
    )
    with step_log(telemetry_path) as served.note_step:
        run_server(endpoint, server, bound)
    served.close()
    click.echo("parity serve: drained")
    return ExitCode.PASS


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
