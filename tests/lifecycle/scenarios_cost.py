"""What a decode step costs the scheduler."""

from __future__ import annotations

from .scenarios import decoded, finish, scenario
from .watch import Watch
from .world import World


@scenario
def step_without_waiting(w: World) -> None:
    """Whoever comes and goes, no step waits for the pass under way, and each is told its requests' slots in order."""
    watch = Watch(w)
    w.submit("grows", prompt=110, output=40)
    w.submit("victim", prompt=250, output=30)
    w.submit("gone", prompt=60, output=30)
    w.run_until(lambda: decoded(w, 3, "grows", "victim", "gone"))
    w.abort("gone")
    w.submit("late", prompt=300, output=20)
    w.run_until(lambda: w.staging("late"))
    w.hold_staging()
    w.run(3)
    w.release_staging()
    w.run_until(lambda: decoded(w, 3, "late"))
    w.pools.hold_memory("logical", keep=0)
    w.run_until(lambda: any(w.waiting(rid) for rid in w.requests), limit=80)
    w.pools.release_memory()
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests), limit=300)
    w.expect(watch.steps > 30, f"only {watch.steps} steps were watched")
    finish(w, "grows", "victim", "late")
