"""Whether the front end finds the modules of connectors and specs from outside, before a core starts.  Layer L7.

Owns where a configuration can name such a module. Must not load one, which takes as long as the core's own start.
A core is started with `python -m` and finds what lies in the current folder; a console script does not.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping

from vllm.config import KVTransferConfig


def check_outside_modules(transfer_config: KVTransferConfig | None) -> None:
    """``ValueError`` naming the setting, its value and the remedy if a module cannot be found from this process."""
    if transfer_config is None:
        return
    extra = transfer_config.kv_connector_extra_config
    for setting, module in _named(transfer_config.kv_connector_module_path, extra):
        package = module.partition(".")[0]
        if package and package not in sys.modules and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{setting}={module!r}: no module named {package!r} is found. Its folder must be in PYTHONPATH "
                "(the current one is not searched unless PYTHONPATH names it: PYTHONPATH=.), or the module installed"
            )


# The values come from the user's JSON, so anything may be in them; what is no name of a module is for the core to tell.
def _named(connector_module: object, extra: object) -> Iterator[tuple[str, str]]:
    if isinstance(connector_module, str):
        yield "kv_connector_module_path", connector_module
    if not isinstance(extra, Mapping):
        return
    if isinstance(spec_module := extra.get("spec_module_path"), str):
        yield "spec_module_path", spec_module
    children = extra.get("connectors")
    for child in children if isinstance(children, list) else ():
        if isinstance(child, Mapping):
            yield from _named(child.get("kv_connector_module_path"), child.get("kv_connector_extra_config"))
