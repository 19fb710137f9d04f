"""Planted bugs of the pool that engines share; see `mutants.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.simple_kv_offload.admission import CopiedLately
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SharedSegment
from vllm.v1.simple_kv_offload.rank_parts import RankParts
from vllm.v1.simple_kv_offload.shared_pool import SharedPool, SlotState
from vllm.v1.simple_kv_offload.transfer import Contents, StoreTable


def _replaced(
    owner: type, name: str, make: Callable[[Any], Any]
) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def _holds_of_others_are_ignored(original: Any) -> Any:
    """A slot that another engine reads or fills is taken."""

    def adopt(self: Any, block: Any, record: Any, moved: Any) -> None:
        original(self, block, record._replace(held_elsewhere=False), moved)

    return adopt


def _found_before_the_bytes_are_there(original: Any) -> Any:
    """What is announced may be hit by the others at once."""

    def write(self: Any, slot: int, state: Any, keys: Any, companions: Any = ()) -> None:
        original(self, slot, SlotState.FINDABLE if state is SlotState.STAGED else state, keys, companions)

    return write


def _stale_view(original: Any) -> Any:
    """What the others did since the first turn is not looked at."""

    def take_changes(self: Any) -> Any:
        return original(self) if self._seen is None else ()

    return take_changes


def _reset_of_another_is_missed(original: Any) -> Any:
    """A store from before another engine's reset is published after it."""

    def commit(self: Any, block: Any, key: Any, num_tokens: Any, info: Any) -> None:
        _, keys = self._staged.get(block.block_id, (0, ()))
        self._staged[block.block_id] = (self._table_epoch, keys)
        original(self, block, key, num_tokens, info)

    return commit


def _withdrawal_is_not_told(original: Any) -> Any:
    """What this engine drops, since it must not be trusted, can still be found by the others."""

    def evict(self: Any, block: Any) -> bool:
        known = dict(self._dirty)
        dropped = original(self, block)
        self._dirty = known
        return bool(dropped)

    return evict


def _half_a_slot_of_the_dead_is_found(original: Any) -> Any:
    """What a dead engine was filling counts as filled."""

    def drop_holds(self: Any, index: int) -> None:
        for slot in range(1, self.num_slots):
            if self._words[self._at(slot) + 2] >> index & 1 and self._words[self._at(slot)] & 3 == 1:
                self._set_state(self._at(slot), SlotState.FINDABLE)
        original(self, index)

    return drop_holds


def _wrong_part(_: Any) -> Any:
    """A rank finds its bytes where the first rank that it knows of has them."""

    def row(self: Any, slot: int, group: int, companions: Any = ()) -> int:
        del self, group, companions
        return slot

    return row


def _nobody_writes(_: Any) -> Any:
    """Each of the ranks with the same bytes leaves them to another."""

    def writes(self: Any, slot: int, group: int) -> bool:
        del slot
        return bool(self.replicas[group] == 1)

    return writes


def _all_write(_: Any) -> Any:
    """Ranks with the same bytes write them on top of each other."""
    return lambda self, slot, group: True


def _last_report_is_not_waited_for(original: Any) -> Any:
    """A store is done when one rank is still to report, which may be the one that writes."""

    def init(self: Any, expected_reports: int) -> None:
        original(self, max(1, expected_reports - 1))

    return init


def _groups_are_not_told_apart(original: Any) -> Any:
    """The ranks are told of the same group for all blocks of a store."""

    def groups(self: Any, default: int) -> list[int]:
        return [default] * len(original(self, default))

    return groups


def _parts_of_the_context_count_as_copies(original: Any) -> Any:
    """Ranks that split the context are taken for ranks with the same bytes."""

    def tp_shard(self: Any, rank: int, tp_size: int, dcp_size: int) -> int:
        del dcp_size
        return int(original(self, rank, tp_size, 1))

    return tp_shard


def _copies_are_made_again_over_what_others_have(original: Any) -> Any:
    """A lazy engine copies again and again what another one evicts, whose copies it evicts for that."""
    return lambda self, keys, now, span, limit: set()


def _companions_are_free(original: Any) -> Any:
    """Of a block that somebody reads or fills, others take all slots but the first."""

    def write(self: Any, slot: int, has_new_content: bool) -> None:
        original(self, slot, has_new_content)
        if self.wide.first_of(slot) != slot:
            self._table.write_hold(slot, False, self._stamps[slot])

    return write


def _lost_piece_goes_unnoticed(_: Any) -> Any:
    """A block of which a companion was taken for something else is still found."""

    def vacate(self: Any, slots: Any) -> None:
        for slot in slots:
            self.num_evicted += self._forget_keys(slot)

    return vacate


def _lost_piece_is_not_told(original: Any) -> Any:
    """The others go on finding it."""

    def vacate(self: Any, slots: Any) -> None:
        known = dict(self._dirty)
        original(self, slots)
        self._dirty = known

    return vacate


def _old_content_of_companions_stays(original: Any) -> Any:
    """What was in the further slots of a new block is still found by the others."""

    def get_blocks_for(self: Any, keys: Any) -> Any:
        taken = original(self, keys)
        for block in taken:
            for slot in self.wide.companions(block.block_id):
                self._dirty[slot] = False
        return taken

    return get_blocks_for


def _companions_in_another_order(original: Any) -> Any:
    """An engine reads the pieces of what another one stored from each other's places."""
    return lambda self, at: original(self, at)[::-1]


SHARED_POOL_MUTANTS = {
    "companions are free": _replaced(SharedPool, "_write", _companions_are_free),
    "lost piece goes unnoticed": _replaced(SharedPool, "_vacate", _lost_piece_goes_unnoticed),
    "lost piece is not told": _replaced(SharedPool, "_vacate", _lost_piece_is_not_told),
    "old content of companions stays": _replaced(
        SharedPool, "get_blocks_for", _old_content_of_companions_stays
    ),
    "companions in another order": _replaced(SharedSegment, "_read_companions", _companions_in_another_order),
    "copies are made again over what others have": _replaced(
        CopiedLately, "among", _copies_are_made_again_over_what_others_have
    ),
    "parts of the context count as copies": _replaced(
        AttentionSpec, "tp_shard", _parts_of_the_context_count_as_copies
    ),
    "wrong part of a slot": _replaced(RankParts, "row", _wrong_part),
    "shared content written by nobody": _replaced(RankParts, "writes", _nobody_writes),
    "shared content written by all": _replaced(RankParts, "writes", _all_write),
    "last report is not waited for": _replaced(StoreTable, "__init__", _last_report_is_not_waited_for),
    "groups of a store are not told apart": _replaced(Contents, "groups", _groups_are_not_told_apart),
    "holds of others are ignored": _replaced(SharedPool, "_adopt", _holds_of_others_are_ignored),
    "found before the bytes are there": _replaced(
        SharedSegment, "write_content", _found_before_the_bytes_are_there
    ),
    "stale view": _replaced(SharedSegment, "take_changes", _stale_view),
    "reset of another is missed": _replaced(SharedPool, "commit_staged", _reset_of_another_is_missed),
    "withdrawal is not told to the others": _replaced(
        SharedPool, "_maybe_evict_cached_block", _withdrawal_is_not_told
    ),
    "half a slot of the dead is found": _replaced(
        SharedSegment, "_drop_holds", _half_a_slot_of_the_dead_is_found
    ),
}
