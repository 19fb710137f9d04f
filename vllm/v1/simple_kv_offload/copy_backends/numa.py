"""Spreads host memory over the nodes of a machine on which not all memory is equally near to every core.

Owns the calls into the system. It must not know what the memory is for. Layer L6.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from vllm.logger import init_logger

logger = init_logger(__name__)

# Numbers of the system calls (mbind, get_mempolicy); the C library has no functions for them.
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_POLICY_DEFAULT = 0
_POLICY_INTERLEAVE = 3
_ASK_ALLOWED_NODES = 4
_ARGUMENTS_MAX = 6
NODES_WITH_PROCESSORS = Path("/sys/devices/system/node/has_cpu")
_NODES_MAX = 1024
_Mask = ctypes.c_ulong * (_NODES_MAX // (8 * ctypes.sizeof(ctypes.c_ulong)))

SystemCall = Callable[..., int]


def spread_over_nodes(address: int, num_bytes: int, nodes_min: int = 2) -> int:
    """Let the pages of memory that nobody has touched yet come from all nodes that this process may use, in turn.

    Only of nodes with processors: one without is the memory of a GPU, or memory that is far from all of them.

    Else a page comes from the node of the thread that touches it first: one copy thread would fill one node, and all
    copies would share the bandwidth of that. ``address`` begins a page. Returns the nodes; 0 if nothing was done: there
    are fewer than ``nodes_min``, the user has chosen a policy (`numactl`), or the system does not let us.
    """
    call = _system_call()
    if call is None or num_bytes <= 0:
        return 0
    mbind, get_mempolicy = _CALLS[platform.machine()]
    policy, allowed = ctypes.c_int(-1), _Mask()
    if call(get_mempolicy, ctypes.addressof(policy), 0, 0, 0, 0) or policy.value != _POLICY_DEFAULT:
        return 0
    mask = ctypes.addressof(allowed)
    if call(get_mempolicy, 0, mask, _NODES_MAX + 1, 0, _ASK_ALLOWED_NODES):
        return 0
    _leave_out_nodes_without_processors(allowed)
    num_nodes = sum(word.bit_count() for word in allowed)
    if num_nodes < nodes_min:
        return 0
    if call(mbind, address, num_bytes, _POLICY_INTERLEAVE, mask, _NODES_MAX + 1, 0):
        # Containers may forbid it; the memory is as usable as before.
        logger.warning_once(
            "KV offload: host memory is not spread over the %d memory nodes: %s",
            num_nodes,
            os.strerror(ctypes.get_errno()),
        )
        return 0
    return num_nodes


def _leave_out_nodes_without_processors(allowed: ctypes.Array[ctypes.c_ulong]) -> None:
    """Take their bits out of the mask, unless the system does not say which they are, or no node would be left."""
    try:
        nodes = _parse_nodes(NODES_WITH_PROCESSORS.read_text())
    except (OSError, ValueError):  # no such file without sysfs, as in some containers
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    near = [
        word & sum(1 << node - place * bits for node in nodes if node // bits == place)
        for place, word in enumerate(allowed)
    ]
    if any(near):
        allowed[:] = near


def _parse_nodes(text: str) -> set[int]:
    """The numbers in a list like ``0-1,4``. ``ValueError`` if it is none."""
    nodes: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes


def _system_call() -> SystemCall | None:
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long] * (1 + _ARGUMENTS_MAX)
    return lambda number, *arguments: int(
        function(number, *arguments, *(0 for _ in range(_ARGUMENTS_MAX - len(arguments))))
    )
