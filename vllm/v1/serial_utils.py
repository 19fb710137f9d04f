"""Public facade of the message codec.  Layer L7; re-exports only."""

from vllm.v1.engine.serial import MsgpackDecoder, MsgpackEncoder

__all__ = ["MsgpackDecoder", "MsgpackEncoder"]
