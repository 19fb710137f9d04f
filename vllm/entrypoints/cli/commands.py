"""The commands of `vllm`: which there are, and running one.  Layer: L8.

Loads only the chosen command's module, and no model library, so that help comes at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, cast

from vllm.config.error_text import error_text
from vllm.entrypoints.common.startup import cli_env_setup
from vllm.exceptions import VLLMError
from vllm.logger import init_logger
from vllm.utils.process_end import raise_at_interrupt
from vllm.utils.registry import resolve_object
from vllm.v1.engine.exceptions import EngineStartError
from vllm.version import __version__

logger = init_logger(__name__)

Command = Callable[[list[str]], int]

COMMANDS: Final = {
    "serve": ("vllm.entrypoints.cli.serve:main", "Start the HTTP server."),
    "chat": ("vllm.entrypoints.cli.client:chat", "Talk to a running server."),
    "complete": ("vllm.entrypoints.cli.client:complete", "Let a running server continue texts."),
    "bench": ("vllm.entrypoints.cli.bench:main", "Measure latency, throughput or a running server."),
    "collect-env": ("vllm.entrypoints.cli.collect_env:main", "Print a report about this machine."),
    "run-batch": ("vllm.entrypoints.cli.run_batch:main", "Answer a file of requests."),
}
NOT_OFFERED: Final = ("launch", "preload", "snapshot", "download-kernels")


def usage() -> str:
    """The help page."""
    lines = ["usage: vllm [-h] [-v] COMMAND …", "", "commands:"]
    lines += [f"  {name:<12} {doc}" for name, (_, doc) in COMMANDS.items()]
    return "\n".join([*lines, "", "`vllm COMMAND --help` explains a command."])


def run(args: list[str]) -> int:
    """Run a command line; the exit status. Errors that the user can mend are one line, not a stack trace."""
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("-v", "--version"):
        print(__version__)
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        reason = "is not offered by this build" if name in NOT_OFFERED else "is no command"
        print(f"vllm: {name!r} {reason}\n\n{usage()}", file=sys.stderr)
        return 2
    cli_env_setup()
    command = cast(Command, resolve_object(COMMANDS[name][0]))
    if name != "serve":  # which has much more to load, and says itself when it holds something
        raise_at_interrupt()
    try:
        return command(rest)
    except BrokenPipeError:
        raise  # `main` knows whether the reader of the output has gone, which no error tells of
    except (ValueError, TypeError, OSError, ImportError, VLLMError) as error:
        return _fail(name, error, error_text(error))
    except EngineStartError as error:
        return _fail(name, error, str(error))
    except KeyboardInterrupt:
        return 130


def _fail(name: str, error: Exception, text: str) -> int:
    logger.debug("vllm %s failed", name, exc_info=error)
    print(f"vllm {name}: error: {text}", file=sys.stderr)
    return 1
