"""The server's own settings: network, endpoints, logging of requests. Layer: L8."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from vllm.config.setting import Flag, config, setting
from vllm.entrypoints.chat_utils import ContentFormatOption

DEFAULT_PORT = 8000
PORT_MIN, PORT_MAX = 1024, 65535


@config
class BaseFrontendArgs:
    """Settings that hold for every way of serving."""

    lora_modules: list[Any] | None = setting(
        default=None,
        doc="Adapters as name=path or JSON; adapters are not part of this build.",
        flag=Flag(hidden=True),
    )
    chat_template: str | None = setting(default=None, doc="File or text of the chat template to use.")
    chat_template_content_format: ContentFormatOption = setting(
        default="auto",
        doc="Whether templates get contents as text (string) or as parts (openai); auto looks.",
    )
    trust_request_chat_template: bool = setting(
        default=False, doc="Let requests bring their own chat template."
    )
    trust_request_mm_kwargs: bool = setting(default=False, doc="Not supported: this engine serves text only.")
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        default=None, doc="Variables for every chat template, as JSON."
    )
    response_role: str = setting(default="assistant", doc="Role of generated messages.")
    return_tokens_as_token_ids: bool = setting(
        default=False, doc="Show tokens in log probabilities as token_id:N."
    )
    enable_auto_tool_choice: bool = setting(
        default=False, doc="Let the model choose tools; needs --tool-call-parser."
    )
    tool_call_parser: str | None = setting(
        default=None, doc="Parser of the model's tool calls: hermes, llama3_json."
    )
    tool_parser_plugin: str = setting(default="", doc="Python file that adds tool parsers.")
    tool_server: str | None = setting(default=None, doc="Not supported: there is no built-in tool execution.")
    exclude_tools_when_tool_choice_none: bool = setting(
        default=False, doc="Do not show tools to the model when tool_choice is none."
    )
    enable_prompt_tokens_details: bool = setting(default=False, doc="Report cached prompt tokens in usage.")
    enable_force_include_usage: bool = setting(
        default=False, doc="End every stream with a usage chunk, asked for or not."
    )
    enable_per_request_metrics: bool = setting(default=False, doc="Report times in replies with one choice.")
    enable_tokenizer_info_endpoint: bool = setting(default=False, doc="Serve GET /tokenizer_info.")
    enable_log_requests: bool = setting(default=False, doc="Log every request.")
    enable_log_outputs: bool = setting(
        default=False, doc="Log what is generated; needs --enable-log-requests."
    )
    enable_log_deltas: bool = setting(
        default=True, doc="With --enable-log-outputs, log the pieces of streams too."
    )
    max_log_len: Annotated[int, Field(ge=0)] | None = setting(
        default=None, doc="Most characters and token ids of a logged prompt."
    )
    log_error_stack: bool = setting(
        default=False,
        doc="Log the stack of every error reply of status 500 and above; on in dev mode.",
        flag=Flag(unset=True),
    )
    tokens_only: bool = setting(default=False, doc="Token ids in and out; no tokenizer is loaded.")
    enable_scale_out: bool = setting(default=False, doc="Not supported: one server runs one engine.")


@config
class FrontendArgs(BaseFrontendArgs):
    """Settings of the HTTP server."""

    host: str | None = setting(default=None, doc="Address to listen on; all when not given.")
    port: Annotated[int, Field(ge=PORT_MIN, le=PORT_MAX)] = setting(
        default=DEFAULT_PORT, doc="Port, 1024 to 65535."
    )
    uds: str | None = setting(default=None, doc="Unix socket to listen on instead of host and port.")
    root_path: str | None = setting(default=None, doc="Path prefix that a proxy in front strips.")
    api_key: list[str] | None = setting(default=None, doc="Accepted keys; VLLM_API_KEY when not given.")
    middleware: list[str] = setting(
        default_factory=list,
        doc="Import path of an ASGI middleware class or function; may be repeated.",
        flag=Flag(hidden=True),
    )
    enable_server_load_tracking: bool = setting(default=False, doc="Count requests in flight for GET /load.")
    enable_request_id_headers: bool = setting(default=False, doc="Send X-Request-Id back.")
    disable_fastapi_docs: bool = setting(default=False, doc="No /docs, /redoc and /openapi.json.")
    enable_offline_docs: bool = setting(
        default=False, doc="Not supported: the docs page needs its usual files."
    )
    uvicorn_log_level: str = setting(default="info", doc="Level of the HTTP library's log.")
    disable_uvicorn_access_log: bool = setting(default=False, doc="No line per HTTP request.")
    disable_access_log_for_endpoints: str | None = setting(
        default=None, doc="Comma list of paths without access log lines."
    )
    sse_keep_alive_interval: Annotated[float, Field(ge=0)] = setting(
        default=0.0, doc="Seconds of silence after which a stream gets a comment line; 0 is off."
    )
    allowed_origins: Any = setting(default_factory=list, doc="CORS origins, as JSON.", flag=Flag(hidden=True))
    allowed_methods: Any = setting(
        default_factory=lambda: ["*"], doc="CORS methods, as JSON.", flag=Flag(hidden=True)
    )
    allowed_headers: Any = setting(
        default_factory=lambda: ["*"], doc="CORS headers, as JSON.", flag=Flag(hidden=True)
    )
    allow_credentials: bool = setting(default=False, doc="CORS credentials.")
    h11_max_header_count: Annotated[int, Field(ge=1)] = setting(default=256, doc="Most headers of a request.")
    ssl_keyfile: str | None = setting(default=None, doc="TLS key file.")
    ssl_certfile: str | None = setting(default=None, doc="TLS certificate file.")
    ssl_ca_certs: str | None = setting(default=None, doc="TLS CA file.")
    ssl_ciphers: str | None = setting(default=None, doc="TLS ciphers.")
    ssl_cert_reqs: int = setting(default=0, doc="Whether clients need certificates, as in the ssl module.")
    enable_ssl_refresh: bool = setting(
        default=False, doc="Not supported: restart the server to change certificates."
    )
