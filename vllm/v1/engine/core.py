"""Public facade of the engine core.  Layer L7; re-exports only."""

from vllm.v1.engine.core_loop import EngineCore, EngineShutdownState
from vllm.v1.engine.core_proc import EngineCoreProc

__all__ = ["EngineCore", "EngineCoreProc", "EngineShutdownState"]
