"""The HTTP server: builds the app round an engine, runs it, and ends both together. Layer: L8."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, cast

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.routing import Route
from uvicorn.config import create_ssl_context

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.common.cli_args import refuse_unsupported, resolve_model, validate_parsed_serve_args
from vllm.entrypoints.openai import dev_routes, routes, token_routes, unsupported_routes
from vllm.entrypoints.openai.bodies import body_bytes_default
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.descriptors import AcceptFailures, raise_descriptor_limit
from vllm.entrypoints.openai.errors import (
    ErrorLog,
    exception_handler,
    http_exception_handler,
    validation_exception_handler,
)
from vllm.entrypoints.openai.kv_cache import routes as cache_routes
from vllm.entrypoints.openai.load_report import LoadReportMiddleware
from vllm.entrypoints.openai.middleware import (
    AuthMiddleware,
    HttpMetrics,
    HttpMetricsMiddleware,
    LastReplyMiddleware,
    LimitsMiddleware,
    LoadMiddleware,
    RequestIdMiddleware,
    UnreadBodyMiddleware,
)
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.render import OnlineRenderer, TemplateSettings
from vllm.entrypoints.openai.state import ServingState
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.exceptions import VLLMError
from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.utils.ids import random_uuid
from vllm.utils.process_end import raise_at_interrupt
from vllm.utils.registry import resolve_object
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

logger = init_logger(__name__)

# Seconds between two looks at the engine's health.
HEALTH_INTERVAL_S = 0.5
# For the replies of requests that were ended by a shutdown to reach their clients; an idle server waits for none of it.
LAST_REPLIES_S = 10
_DEVELOPMENT_ROUTERS: Final = [dev_routes.router, cache_routes.page_router]


# --- the app ----------------------------------------------------------------------------------------------------


def build_app(args: argparse.Namespace, engine_client: Any) -> FastAPI:
    """The app that serves `engine_client` as the flags say."""
    docs: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None}
    app = FastAPI(
        title="vllm",
        root_path=args.root_path or "",
        **(docs if args.disable_fastapi_docs else {}),
        lifespan=_lifespan,
    )
    app.state.serving = build_state(args, engine_client)
    wanted = args.log_error_stack
    ErrorLog.every_stack = envs.VLLM_SERVER_DEV_MODE if wanted is None else wanted
    routers = _routers(args)
    for router in routers:
        app.include_router(router)
    hidden = [] if envs.VLLM_SERVER_DEV_MODE else _DEVELOPMENT_ROUTERS
    app.state.development_paths = frozenset(path for router in hidden for path in _paths(router))
    app.add_exception_handler(RequestValidationError, validation_exception_handler)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, http_exception_handler)  # type: ignore[arg-type]
    for kind in (VLLMError, EngineDeadError, Exception):
        app.add_exception_handler(kind, exception_handler)
    _add_middleware(app, args, [path for router in routers for path in _paths(router)])
    return app


def _routers(args: argparse.Namespace) -> list[APIRouter]:
    """The routers that the flags ask for."""
    routers = [routes.router, token_routes.router, cache_routes.router]
    if args.enable_tokenizer_info_endpoint:
        routers.append(routes.tokenizer_router)
    if envs.VLLM_SERVER_DEV_MODE:
        logger.warning(
            "Development routes are served (VLLM_SERVER_DEV_MODE=1): never expose this server to others"
        )
        routers += _DEVELOPMENT_ROUTERS
    return [*routers, unsupported_routes.router]


def _paths(router: APIRouter) -> Iterator[str]:
    for route in router.routes:
        if isinstance(route, Route):
            yield route.path


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.serving.renderer.close()


def build_state(args: argparse.Namespace, engine_client: Any) -> ServingState:
    """The endpoint objects of one server."""
    model_config = engine_client.vllm_config.model_config
    templates = TemplateSettings(
        chat_template=load_chat_template(args.chat_template),
        content_format=args.chat_template_content_format,
        trust_request_template=args.trust_request_chat_template,
        default_kwargs=args.default_chat_template_kwargs or {},
    )
    renderer = OnlineRenderer(model_config, engine_client.tokenizer, templates)
    models = OpenAIServingModels(engine_client, _model_paths(model_config))
    request_logger = RequestLogger(max_log_len=args.max_log_len) if args.enable_log_requests else None
    common = {
        "online_renderer": renderer,
        "request_logger": request_logger,
        "return_tokens_as_token_ids": args.return_tokens_as_token_ids,
        "enable_prompt_tokens_details": args.enable_prompt_tokens_details,
        "enable_force_include_usage": args.enable_force_include_usage,
        "enable_per_request_metrics": args.enable_per_request_metrics,
        "enable_log_outputs": args.enable_log_outputs,
        "enable_log_deltas": args.enable_log_deltas,
        "sse_keep_alive_interval": args.sse_keep_alive_interval,
    }
    chat = OpenAIServingChat(
        engine_client,
        models,
        args.response_role,
        chat_template_content_format=args.chat_template_content_format,
        enable_auto_tools=args.enable_auto_tool_choice,
        tool_parser=args.tool_call_parser,
        exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
        reasoning_parser=engine_client.vllm_config.structured_outputs_config.reasoning_parser,
        **common,
    )
    return ServingState(
        engine_client=engine_client,
        models=models,
        renderer=renderer,
        completion=OpenAIServingCompletion(engine_client, models, **common),
        chat=chat,
        tracks_load=args.enable_server_load_tracking,
        keep_alive_s=args.sse_keep_alive_interval,
    )


def _model_paths(model_config: Any) -> list[BaseModelPath]:
    served = model_config.served_model_name
    names = served if isinstance(served, list) else [served or model_config.model]
    return [BaseModelPath(name, model_config.model) for name in names]


def _add_middleware(app: FastAPI, args: argparse.Namespace, paths: Sequence[str]) -> None:
    """The layer that is added last is the outermost."""
    app.add_middleware(LoadReportMiddleware)
    keys = [key for key in args.api_key or [envs.VLLM_API_KEY] if key]
    if keys:
        app.add_middleware(AuthMiddleware, keys=keys, root_path=args.root_path or "")
    app.add_middleware(
        LimitsMiddleware,
        body_bytes_max=_body_bytes_max(
            app.state.serving.engine_client.vllm_config.model_config.max_model_len
        ),
        headers_max=args.h11_max_header_count,
    )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )
    if args.enable_server_load_tracking:
        app.add_middleware(LoadMiddleware, load=app.state.serving.load)
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware, new_id=random_uuid)
    app.add_middleware(UnreadBodyMiddleware)
    app.add_middleware(LastReplyMiddleware)
    app.add_middleware(HttpMetricsMiddleware, metrics=HttpMetrics(paths))
    for path in args.middleware:
        _add_custom_middleware(app, path)


def _body_bytes_max(max_model_len: int | None) -> int:
    """What was set, else what a model of this length can make use of."""
    name = "VLLM_HTTP_MAX_REQUEST_BODY_SIZE"
    if envs.is_set(name) or max_model_len is None:
        return envs.VLLM_HTTP_MAX_REQUEST_BODY_SIZE
    return body_bytes_default(max_model_len)


def _add_custom_middleware(app: FastAPI, path: str) -> None:
    """Add a middleware named by `--middleware`. Raises ValueError if it is neither a class nor a coroutine function."""
    middleware = _imported(path)
    if isinstance(middleware, type):
        # Whether the class is an ASGI application shows when it is built.
        app.add_middleware(cast(Any, middleware))
    elif inspect.iscoroutinefunction(middleware):
        app.middleware("http")(middleware)
    else:
        raise ValueError(f"--middleware {path!r} is neither a class nor a coroutine function")


def _imported(path: str) -> object:
    try:
        return resolve_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--middleware {path!r} cannot be imported: {error}") from error


# --- running it -------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """An HTTP server that leaves signals to `serve_app`, so that it ends with a clean exit status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _QuietPaths(logging.Filter):
    """Drops access log lines of some paths."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = set(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        return str(arguments[2]).partition("?")[0] not in self.paths


def bind_socket(args: argparse.Namespace) -> socket.socket:
    """The listening socket, bound before the model loads so that a taken port is reported at once."""
    if args.uds:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if _is_left_behind(args.uds):
                os.unlink(args.uds)
            server.bind(args.uds)
            server.listen()  # at once, so that nobody takes the file for one that was left behind
        except OSError as error:
            server.close()
            raise ValueError(f"cannot listen on {args.uds}: {error.strerror}") from error
        return server
    family = socket.AF_INET6 if args.host and ":" in args.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((args.host or "", args.port))
    except OSError as error:
        server.close()
        raise ValueError(f"cannot listen on {args.host or '*'}:{args.port}: {error.strerror}") from error
    return server


def _is_left_behind(path: str) -> bool:
    """Whether this is the socket of a server that was killed: nobody listens, but the name is taken."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def close_socket(args: argparse.Namespace, sock: socket.socket) -> None:
    """Close the listening socket and remove its file."""
    sock.close()
    if args.uds:
        with contextlib.suppress(OSError):
            os.unlink(args.uds)


async def serve_app(args: argparse.Namespace, app: FastAPI, sock: socket.socket) -> int:
    """Serve until a signal or the engine's death; the exit status."""
    engine = app.state.serving.engine_client
    config = uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=int(engine.vllm_config.shutdown_timeout) + LAST_REPLIES_S,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        **({"ssl_ciphers": args.ssl_ciphers} if args.ssl_ciphers else {}),
    )
    if args.disable_access_log_for_endpoints:
        quiet = [path.strip() for path in args.disable_access_log_for_endpoints.split(",")]
        logging.getLogger("uvicorn.access").addFilter(_QuietPaths(quiet))
    asyncio.get_running_loop().set_exception_handler(AcceptFailures())
    server = Server(config)
    tasks = [asyncio.create_task(_watch(server, engine, _address(args)))]
    errored: list[bool] = []

    def on_stop() -> None:
        errored.append(engine.errored)  # what Ctrl-C does to the engine's process from now on is no failure
        tasks.append(asyncio.create_task(_end_requests(engine)))

    _stop_on_signals(server, on_stop)
    try:
        await server.serve(sockets=[sock])
    finally:
        for task in tasks:
            task.cancel()
    return 1 if (errored or [engine.errored])[0] else 0


def _address(args: argparse.Namespace) -> str:
    if args.uds:
        return f"unix:{args.uds}"
    return f"{'https' if args.ssl_certfile else 'http'}://{args.host or '0.0.0.0'}:{args.port}"


def _stop_on_signals(server: Server, on_stop: Callable[[], None]) -> None:
    """The first signal lets requests end, the second one does not wait."""

    def stop() -> None:
        if not server.should_exit:
            on_stop()
        server.force_exit = server.should_exit
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def _end_requests(engine: Any) -> None:
    """Requests go on for the shutdown timeout and then end with what they have, so that every client gets a whole reply."""
    await asyncio.sleep(engine.vllm_config.shutdown_timeout)
    with contextlib.suppress(EngineDeadError):
        await engine.pause_generation("abort", clear_cache=False)


async def _what_is_served(engine: Any) -> str:
    """Model, caches and event addresses, for the line that says that the server is ready."""
    config = engine.vllm_config
    parts = [f"model {_model_paths(config.model_config)[0].name}"]
    cache, replicas = config.cache_config, config.parallel_config.data_parallel_size
    each = f" (at least) in each of {replicas} replicas" if replicas > 1 else ""
    if cache.kv_cache_size_tokens:
        parts.append(f"KV cache of {cache.kv_cache_size_tokens} tokens{each}")
    if cache.simple_cpu_offload_num_blocks:
        parts.append(f"host tier of {cache.simple_cpu_offload_num_blocks} blocks{each}")
    for source in (await engine.get_kv_event_sources()).values():
        parts.append(f"KV events on {source['endpoint']}")
        if source["replay_endpoint"]:
            parts.append(f"replay on {source['replay_endpoint']}")
    return ", ".join(parts)


async def _watch(server: Server, engine: Any, address: str) -> None:
    """Say when the server is ready; end it when the engine is dead."""
    while not server.started:
        await asyncio.sleep(0.01)
    logger.info("Server ready: listening on %s (%s)", address, await _what_is_served(engine))
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_S)
        if engine.errored and not envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            logger.error("The engine is dead; the server ends")
            server.should_exit = True
            return


def prepare(args: argparse.Namespace) -> None:
    """Check the flags and fill in the model. Raises ValueError or TypeError naming what cannot work."""
    resolve_model(args)
    validate_parsed_serve_args(args)
    refuse_unsupported(args)
    for path in args.middleware:
        _imported(path)
    _check_tls(args)


def _check_tls(args: argparse.Namespace) -> None:
    """Read the certificate as the server will. Raises ValueError naming the files."""
    if not args.ssl_certfile:
        return
    try:
        create_ssl_context(
            keyfile=args.ssl_keyfile,
            certfile=args.ssl_certfile,
            password=None,
            ssl_version=uvicorn.config.SSL_PROTOCOL_VERSION,
            cert_reqs=args.ssl_cert_reqs,
            ca_certs=args.ssl_ca_certs,
            ciphers=args.ssl_ciphers,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"TLS cannot work with --ssl-certfile {args.ssl_certfile!r}, --ssl-keyfile {args.ssl_keyfile!r}, "
            f"--ssl-ca-certs {args.ssl_ca_certs!r}, --ssl-ciphers {args.ssl_ciphers!r} and --ssl-cert-reqs "
            f"{args.ssl_cert_reqs}: {error}"
        ) from error


def run_server(args: argparse.Namespace) -> int:
    """Start engine and server, and serve until told to stop; the exit status.

    Raises ValueError or TypeError for flags that cannot work, before anything heavy starts.
    """
    prepare(args)
    raise_descriptor_limit()
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    sock = bind_socket(args)
    # Until the server handles signals itself, each of them must still end the engine's process.
    signal.signal(signal.SIGTERM, _raise_exit)
    raise_at_interrupt()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(close_socket, args, sock)
        engine = AsyncLLM.from_vllm_config(
            vllm_config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=False,
            disable_log_stats=args.disable_log_stats,
        )
        cleanup.callback(engine.shutdown)
        return asyncio.run(serve_app(args, build_app(args, engine), sock))


def _raise_exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)
