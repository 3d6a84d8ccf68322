"""`tokentight serve`: the OpenAI-compatible service."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from tokentight.engine.config import ConfigError, EngineConfig
from tokentight.server.config import ServerConfig, ServerConfigError

_ENGINE = EngineConfig(model="MODEL")
_SERVER = ServerConfig()

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(text: str) -> int:
    """A number of bytes, as `4GiB` or `500000000`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size; give one like 4GiB, 500MB or 1073741824")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A directory of safetensors, a GGUF file, a hub id, or the alias smollm2-135m.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 opens it to the network.")
    ] = _SERVER.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = (
        _SERVER.port
    ),
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model in requests; repeat it for several.  [default: MODEL]",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TOKENTIGHT_API_KEY",
            help="Key that clients must send as bearer token; repeat it for several. /health, "
            "/ready, /version and /metrics stay open. Prefer the variable: anybody here can read a "
            "command line.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="How weights are stored in memory: auto (as in the checkpoint, quantised ones as "
            "float32), float32 or bfloat16."
        ),
    ] = _ENGINE.dtype,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Context length: tokens of prompt and output together.  [default: the model's]",
            show_default=False,
        ),
    ] = _ENGINE.max_model_len,
    pipeline_parallel_size: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel-size",
            "-pp",
            help="Stages the model's layers are split over, each a process of its own.",
        ),
    ] = _ENGINE.pipeline_parallel_size,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests computed at the same time.")
    ] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens computed in one step; longer prompts are chunked.")
    ] = _ENGINE.max_num_batched_tokens,
    max_queued_requests: Annotated[
        int,
        typer.Option(help="Requests that may wait beyond --max-num-seqs; more are answered 429."),
    ] = _ENGINE.max_queued_requests,
    block_size: Annotated[
        int, typer.Option(help="Positions in a KV block, a multiple of 16.")
    ] = _ENGINE.block_size,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV of equal prompt prefixes.")
    ] = _ENGINE.enable_prefix_caching,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for KV over all stages, like 4GiB.  [default: a share of what is free]",
            show_default=False,
        ),
    ] = None,
    kernels: Annotated[
        str,
        typer.Option(help="auto (native where a compiler is found), native or reference."),
    ] = _ENGINE.kernels,
    num_threads: Annotated[
        int | None,
        typer.Option(help="CPU threads over all stages.  [default: all]", show_default=False),
    ] = _ENGINE.num_threads,
    device: Annotated[
        str, typer.Option(help="Where the reference kernels run: cpu, cuda, cuda:1.")
    ] = _ENGINE.device,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes requests that bring no seed repeatable in the order they arrive.",
            show_default=False,
        ),
    ] = _ENGINE.seed,
    max_body_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Largest request body; a larger one is answered 413."),
    ] = str(_SERVER.max_body_bytes),
    client_timeout: Annotated[
        float,
        typer.Option(help="Seconds after which a client that neither reads nor sends is given up."),
    ] = _SERVER.client_timeout_s,
    drain_timeout: Annotated[
        float,
        typer.Option(help="Seconds that open requests have to finish after the signal to stop."),
    ] = _SERVER.drain_timeout_s,
) -> None:
    """
    Serve a model over an OpenAI-compatible HTTP API.

    The answer to a request does not depend on what else is being served: same tokens, same
    logprobs, bit for bit.

    Examples:

        tokentight serve smollm2-135m

        tokentight serve ./Qwen3-8B -pp 2 --max-model-len 8192 --host 0.0.0.0 --port 8080

        curl localhost:8000/v1/completions -H 'Content-Type: application/json'
        -d '{"prompt": "The sea is", "max_tokens": 20, "temperature": 0}'

    /ready answers 200 once the model is loaded. SIGTERM (or Ctrl-C) lets open requests finish and
    refuses new ones; a second one ends at once.
    """
    try:
        engine_config = EngineConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]  # checked by EngineConfig
            max_model_len=max_model_len,
            pipeline_parallel_size=pipeline_parallel_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queued_requests=max_queued_requests,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory=None if kv_cache_memory is None else _bytes(kv_cache_memory),
            kernels=kernels,  # type: ignore[arg-type]  # checked by EngineConfig
            num_threads=num_threads,
            device=device,
            seed=seed,
        )
        server_config = ServerConfig(
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or ()),
            api_keys=tuple(api_key or ()),
            max_body_bytes=_bytes(max_body_size),
            client_timeout_s=client_timeout,
            drain_timeout_s=drain_timeout,
        )
    except (ConfigError, ServerConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    from tokentight.server.run import serve as run_server

    raise typer.Exit(run_server(engine_config, server_config))
