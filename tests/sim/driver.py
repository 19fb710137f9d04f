"""Takes one enabled action at random per tick, checks everything after it, then lets the run come to rest.

A run is a pure function of commit and seed. `replay` takes a recorded list of actions instead of drawing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.sim.checkers import check_after, check_all
from tests.sim.checkers_end import check_rest
from tests.sim.failure import SimFailure, require
from tests.sim.run import Run
from tests.sim.worlds import draw_params
from vllm.utils.checks import InvariantError
from vllm.v1.core.sched.interface import PauseState

Action = tuple[str, int]
"""(name, place in the original list)"""


@dataclass
class Result:
    """How a run went."""

    seed: int
    actions: list[Action] = field(default_factory=list)
    ticks: int = 0
    failure: SimFailure | None = None
    marks: Counter[str] = field(default_factory=Counter)
    requests: int = 0


def run_seed(seed: int, ticks: int) -> Result:
    """A run of that many random actions."""
    return _run(seed, ticks, None)


def replay(seed: int, actions: Sequence[Action]) -> Result:
    """The same world with these actions only."""
    return _run(seed, len(actions), actions)


def _run(seed: int, ticks: int, actions: Sequence[Action] | None) -> Result:
    result = Result(seed)
    try:
        run = Run(draw_params(seed))
    except InvariantError as error:
        result.failure = SimFailure("CRASH", f"the world cannot be built: {error}")
        return result
    try:
        chooser = run.streams.stream("driver")
        for tick in range(ticks):
            if actions is None:
                weights = run.enabled()
                names = sorted(weights)
                name = chooser.choices(names, [weights[n] for n in names])[0]
                action = (name, tick)
            else:
                action = actions[tick]
            result.actions.append(action)
            run.act(*action, is_enabled=actions is None)
            check_after(run, action[0])
            result.ticks += 1
        result.marks = run.marks.counts
        result.requests = len(run.truths)
        drain(run)
        check_rest(run)
    except SimFailure as failure:
        result.failure = failure
    finally:
        run.close()
    return result


def drain(run: Run) -> None:
    """I10: without arrivals and faults, everything ends within a bound, even if another engine never comes to rest."""
    run.draining = True
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    work = sum(len(t.prompt) + t.max_tokens for t in run.live())
    bound = 60 + 6 * work
    rounds = 0
    while run.scheduler.has_requests() or run.steps or run.worker.copying():
        rounds += 1
        place = 1_000_000 + 4 * rounds
        run.worker.finish_copies(are_requests_there=run.scheduler.has_unfinished_requests())
        run.act("compile", place)
        run.insist()
        if len(run.steps) < run.params.depth and run.has_work:
            run.act("schedule", place)
        if any(not step.executed for step in run.steps):
            run.act("execute", place + 1)
        if run.steps and (len(run.steps) >= run.params.depth or not run.scheduler.has_unfinished_requests()):
            while any(not step.executed for step in run.steps):
                run.act("execute", place + 2)
            run.act("finish", place + 3)
        check_all(run)
        left = sorted(t.request_id for t in run.live())
        require(rounds < bound, "I10", f"not at rest after {rounds} rounds; unfinished: {left}")
