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
keys = st.integers(0, NUM_KEYS - 1).map(key_of)
places = st.integers(0, 9)


class SharedPoolMachine(RuleBasedStateMachine):
    """Three engines. The model: what each slot holds, who holds it, and since which reset it is being filled."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "segment"
        self.all = [self.attach() for _ in range(3)]
        self.content: dict[int, BlockHashWithGroupId] = {}
        self.resets = 0
        self.staged_at: dict[int, int] = {}

    def attach(self) -> MiniEngine:
        return MiniEngine(self.path, shape())

    @rule(who=engines, key=keys)
    def stage(self, who: int, key: BlockHashWithGroupId) -> None:
        engine = self.all[who]
        known = set(self.content.values())
        known |= {
            k for e in self.all for s, k in e.stores if self.staged_at[s.blocks[0].block_id] == self.resets
        }
        known |= {k for _, k in engine.stores}
        held = self.held()
        went = engine.stage(key)
        assert went == (key not in known and len(held) < 8)
        if went:
            slot = engine.stores[-1][0].blocks[0].block_id
            assert slot not in held
            self.content.pop(slot, None)
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

    @rule(who=engines, key=keys)
    def read(self, who: int, key: BlockHashWithGroupId) -> None:
        assert self.all[who].read(key) == (key in self.content.values())

    @precondition(lambda self: any(e.reads for e in self.all))
    @rule(who=engines, place=places)
    def end_read(self, who: int, place: int) -> None:
        engine = self.all[who]
        if engine.reads:
            engine.end_read(place % len(engine.reads))

    @rule(who=engines, slot=st.integers(1, 8))
    def evict(self, who: int, slot: int) -> None:
        self.all[who].evict(slot)
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

    @rule(who=engines, key=keys, stores=st.integers(0, 40), begins=st.booleans())
    def die_in_the_middle(self, who: int, key: BlockHashWithGroupId, stores: int, begins: bool) -> None:
        """What was being done may have happened or not; nothing else may have changed."""
        engine, held = self.all[who], self.held()
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
        gone = self.content.keys() - found.keys()
        assert len(gone) <= begins, "only the slot being taken may have lost its content"
        assert not gone & held
        self.content = found

    def held(self) -> set[int]:
        return {
            lease.blocks[0].block_id for engine in self.all for lease, _ in (*engine.stores, *engine.reads)
        }

    @invariant()
    def all_see_the_same(self) -> None:
        held = self.held()
        orders = []
        for engine in self.all:
            assert engine.view() == (self.content, held)
            orders.append(engine.order())
            for lease, key in engine.reads:
                engine.check(lease.blocks[0].block_id, key)
        assert orders[0] == orders[1] == orders[2]

    def teardown(self) -> None:
        for engine in self.all:
            engine.die()
        self.folder.cleanup()


TestSharedPool = SharedPoolMachine.TestCase
TestSharedPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
