"""Any order of stores, look-ups, evictions, resets and deaths: every engine of a pool sees the same, and it is right."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.helpers.shared_engines import Killed, MiniEngine, key_of, shape
from vllm.v1.core.block_hash import BlockHashWithGroupId

NUM_KEYS = 6
engines = st.integers(0, 2)
numbers = st.integers(0, NUM_KEYS - 1)
places = st.integers(0, 9)


class SharedPoolMachine(RuleBasedStateMachine):
    """Three engines. The model: what each block holds, which slots are its, who holds it, and since which reset it is
    being filled."""

    size = shape()
    widths: tuple[int, ...] = ()
    """Slots of a block by group; empty: one, of the only group."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "segment"
        self.all = [self.attach() for _ in range(3)]
        self.content: dict[int, BlockHashWithGroupId] = {}
        self.resets = 0
        self.staged_at: dict[int, int] = {}
        self.slots: dict[int, tuple[int, ...]] = {}  # by first slot, of what was taken last with it

    def attach(self) -> MiniEngine:
        return MiniEngine(self.path, self.size, widths=self.widths)

    def key(self, number: int) -> BlockHashWithGroupId:
        return key_of(number, number % max(1, len(self.widths)))

    @rule(who=engines, number=numbers)
    def stage(self, who: int, number: int) -> None:
        engine, key = self.all[who], self.key(number)
        known = set(self.content.values())
        known |= {
            k for e in self.all for s, k in e.stores if self.staged_at[s.blocks[0].block_id] == self.resets
        }
        known |= {k for _, k in engine.stores}
        held = self.held()
        went = engine.stage(key)
        width = engine.pool.wide.width(key)
        assert went == (key not in known and len(held) + width < self.size.num_slots)
        if went:
            slot = engine.stores[-1][0].blocks[0].block_id
            taken = engine.slots_of(slot)
            assert len(set(taken)) == width
            assert not held & set(taken)
            for first in [first for first in self.content if set(self.slots[first]) & set(taken)]:
                del self.content[first]
            self.slots[slot] = taken
            self.staged_at[slot] = self.resets

    @precondition(lambda self: any(e.stores for e in self.all))
    @rule(who=engines, place=places, ok=st.booleans())
    def finish(self, who: int, place: int, ok: bool) -> None:
        engine = self.all[who]
        if not engine.stores:
            return
        index = place % len(engine.stores)
        lease, key = engine.stores[index]
        slot = lease.blocks[0].block_id
        engine.finish(index, ok=ok)
        if ok and self.staged_at.pop(slot) == self.resets:
            self.content[slot] = key

    @rule(who=engines, number=numbers)
    def read(self, who: int, number: int) -> None:
        key = self.key(number)
        assert self.all[who].read(key) == (key in self.content.values())

    @precondition(lambda self: any(e.reads for e in self.all))
    @rule(who=engines, place=places)
    def end_read(self, who: int, place: int) -> None:
        engine = self.all[who]
        if engine.reads:
            engine.end_read(place % len(engine.reads))

    @rule(who=engines, slot=st.integers(1, 11))
    def evict(self, who: int, slot: int) -> None:
        slot = min(slot, self.size.num_slots - 1)
        self.all[who].evict(slot)  # of a slot that is not the first of its block it is nothing
        self.content.pop(slot, None)

    @rule(who=engines)
    def reset(self, who: int) -> None:
        self.all[who].reset()
        self.content.clear()
        self.resets += 1

    @rule(who=engines)
    def die_and_start_anew(self, who: int) -> None:
        self.all[who].die()
        self.all[who] = self.attach()

    @rule(who=engines)
    def leave_and_come_back(self, who: int) -> None:
        self.all[who].segment.close()
        self.all[who] = self.attach()

    @rule(who=engines, number=numbers, stores=st.integers(0, 40), begins=st.booleans())
    def die_in_the_middle(self, who: int, number: int, stores: int, begins: bool) -> None:
        """What was being done may have happened or not; nothing else may have changed."""
        engine, key, held = self.all[who], self.key(number), self.held()
        filling = {} if begins else {lease.blocks[0].block_id: own for lease, own in engine.stores[:1]}
        fresh = {slot: own for slot, own in filling.items() if self.staged_at[slot] == self.resets}
        engine.kill_after(stores)
        try:
            if begins:
                engine.stage(key)
            elif engine.stores:
                engine.finish(0)
            else:
                engine.read(key)
        except Killed:
            pass
        engine.die()
        self.all[who] = self.attach()
        found, _ = self.all[who].view()
        assert found.items() <= (self.content | fresh).items()
        for slot, now in found.items():
            self.all[who].check(slot, now)
        for first in found:
            assert self.all[who].slots_of(first) == self.slots[first]
        gone = self.content.keys() - found.keys()
        width = engine.pool.wide.width(key)
        assert len(gone) <= begins * width, "only the slots being taken may have lost their content"
        assert not any(held & set(self.slots[first]) for first in gone)
        self.content = found

    def held(self) -> set[int]:
        firsts = {
            lease.blocks[0].block_id for engine in self.all for lease, _ in (*engine.stores, *engine.reads)
        }
        return {slot for first in firsts for slot in self.slots[first]}

    @invariant()
    def all_see_the_same(self) -> None:
        held = self.held()
        orders = []
        for engine in self.all:
            assert engine.view() == (self.content, held)
            assert all(engine.slots_of(first) == self.slots[first] for first in self.content)
            orders.append(engine.order())
            for lease, key in engine.reads:
                engine.check(lease.blocks[0].block_id, key)
        assert orders[0] == orders[1] == orders[2]

    def teardown(self) -> None:
        for engine in self.all:
            engine.die()
        self.folder.cleanup()


class WideBlocksMachine(SharedPoolMachine):
    """Blocks of every second key take three slots."""

    size = shape(12, max_width=3)
    widths = (1, 3)


TestSharedPool = SharedPoolMachine.TestCase
TestWideBlocks = WideBlocksMachine.TestCase
TestSharedPool.settings = TestWideBlocks.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
