"""A pool runs out: the youngest goes back to the queue, who can never fit is refused, and the scheduler goes on."""

from __future__ import annotations

from .scenarios import decoded, finish, scenario
from .world import World

# --- in decode ---


@scenario
def host_full(w: World) -> None:
    """The host pool is full when two decode: the younger is retracted, both answer in the end."""
    w.submit("stays", prompt=110, output=80)
    w.submit("victim", prompt=120, output=70)
    w.run_until(lambda: decoded(w, 3, "stays", "victim"))
    w.pools.hold_memory("host", keep=0)
    w.run_until(lambda: w.waiting("victim") or w.waiting("stays"), limit=80)
    w.expect(w.waiting("victim") == 1 and w.decoding("stays"), "not exactly the younger was retracted")
    w.pools.release_memory()
    w.run_until(lambda: w.ends("stays") and w.ends("victim"), limit=400)
    finish(w)


@scenario
def host_full_alone(w: World) -> None:
    """The host pool is full for the only request: it is aborted and told why; the next is served."""
    w.submit("last", prompt=120, output=200)
    w.run_until(lambda: decoded(w, 3, "last"))
    w.pools.hold_memory("host", keep=0)
    w.run_until(lambda: w.ends("last"), limit=80)
    expect_refused(w, "last", "host pool")
    w.pools.release_memory()
    w.run(2)
    w.expect_at_rest()
    w.submit("next", prompt=100, output=5)
    w.run_until(lambda: w.ends("next"))
    finish(w, "next")


@scenario
def host_full_staged(w: World) -> None:
    """The host pool is full for one that decodes, and another is staging: that one is younger."""
    w.submit("decodes", prompt=120, output=90)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    w.submit("staged", prompt=200, output=12)
    w.run_until(lambda: w.staging("staged"))
    w.hold_staging()
    w.pools.hold_memory("host", keep=0)
    w.run_until(lambda: w.waiting("staged"), limit=80)
    w.expect(w.decoding("decodes"), "the older was not the one to go on")
    w.pools.release_memory()
    w.run_until(lambda: w.ends("decodes") and w.ends("staged"))
    finish(w)


@scenario
def device_full(w: World) -> None:
    """The device pool has a page left when the hot buffers of two would grow by two each: the younger is retracted."""
    w.submit("stays", prompt=50, output=60)
    w.submit("victim", prompt=52, output=50)
    w.run_until(lambda: decoded(w, 3, "stays", "victim"))
    w.pools.hold_memory("device", keep=1)
    w.run_until(lambda: w.waiting("victim") or w.waiting("stays"), limit=40)
    w.expect(w.waiting("victim") == 1 and w.decoding("stays"), "not exactly the younger was retracted")
    w.pools.release_memory()
    w.run_until(lambda: w.ends("stays") and w.ends("victim"))
    finish(w)


@scenario
def device_full_for_nothing(w: World) -> None:
    """The device pool is full, and so are the hot buffers: nobody needs any of it, and nobody is retracted."""
    w.submit("a", prompt=190, output=80)
    w.submit("b", prompt=180, output=80)
    w.run_until(lambda: decoded(w, 3, "a", "b"))
    w.pools.hold_memory("device", keep=0)
    w.run_until(lambda: w.waiting("a") or w.waiting("b") or (w.ends("a") and w.ends("b")), limit=100)
    w.expect(not w.waiting("a") and not w.waiting("b"), "a request was retracted though it needed nothing")
    w.pools.release_memory()
    finish(w)


# --- at admission and in staging ---


@scenario
def host_full_at_staging(w: World) -> None:
    """The host pool fills up while a prompt is prefilled: it goes back to the queue, beside one that decodes."""
    w.submit("decodes", prompt=110, output=150)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    w.submit("late", prompt=600, output=12)
    w.run_until(lambda: w.scheduler.chunked_req is not None)
    w.pools.hold_memory("host", keep=4)
    w.run_until(lambda: w.waiting("late"), limit=10)
    w.expect(w.waiting("late") == 1 and w.decoding("decodes"), "not exactly the prompt went back to the queue")
    w.run(2)
    w.pools.release_memory()
    w.run_until(lambda: w.ends("decodes") and w.ends("late"), limit=300)
    finish(w)


@scenario
def device_full_after_staging(w: World) -> None:
    """The device pool has no page for a hot buffer when its transfer has ended: the request goes back to the queue."""
    late_without_buffer(w, prompt=120, keep=0)


def late_without_buffer(w: World, prompt: int, keep: int) -> None:
    """A transfer ends while the device pool has `keep` pages: its `prompt` goes back to the queue, and both answer."""
    w.submit("decodes", prompt=200, output=60)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    w.submit("late", prompt, output=12)
    w.run_until(lambda: w.staging("late"))
    w.hold_staging()
    w.pools.hold_memory("device", keep=keep)
    w.release_staging()
    w.run_until(lambda: w.waiting("late"), limit=10)
    w.expect(w.waiting("late") == 1 and w.decoding("decodes"), "not exactly the prompt went back to the queue")
    w.pools.release_memory()
    w.run_until(lambda: w.ends("decodes") and w.ends("late"))
    finish(w)


@scenario
def last_pages(w: World) -> None:
    """Two prompts take eight of the nine pages that the device pool has: together or one by one, both answer."""
    w.pools.hold_memory("device", keep=9)
    for rid, prompt in (("a", 256), ("b", 200)):
        req = w.submit(rid, prompt, output=8)
        req.sampling_params.ignore_eos = False  # SGLang's admission is stricter with those who ignore it
    w.run_until(lambda: w.ends("a") and w.ends("b"))
    w.pools.release_memory()
    finish(w)


@scenario
def host_small(w: World) -> None:
    """The host pool holds two of four prompts: the others wait for their turn, and all are answered."""
    w.pools.hold_memory("host", keep=10)
    for i in range(4):
        w.submit(f"r{i}", prompt=250, output=20)
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests), limit=300)
    w.pools.release_memory()
    finish(w)


@scenario
def never_fits(w: World) -> None:
    """The host pool can hold one prompt of two: the other is refused and told why, the first is answered."""
    w.pools.hold_memory("host", keep=6)
    w.submit("large", prompt=600, output=8)
    w.submit("small", prompt=200, output=8)
    w.run_until(lambda: w.ends("large") and w.ends("small"), limit=100)
    expect_refused(w, "large", "host pool")
    w.pools.release_memory()
    finish(w, "small")


@scenario
def long_answer(w: World) -> None:
    """Prompt and answer together are longer than the device pool; the logical and the host pool hold them."""
    w.submit("long", prompt=600, output=500)
    w.run_until(lambda: w.ends("long"), limit=600)
    finish(w)


@scenario
def long_request(w: World) -> None:
    """Taken in as from a client: prompt and answer are longer than the device pool, and nothing is cut off."""
    w.arrive("long", prompt=600, output=500)
    w.run_until(lambda: w.ends("long"), limit=600)
    w.expect(len(w.requests["long"].output_ids) == 500, "the answer was cut off")
    finish(w)


# --- parts of stories ---


def expect_refused(w: World, rid: str, why: str) -> None:
    """The request has ended once, by an abort that says `why`, with a code that SGLang makes an HTTP error of."""
    w.expect(w.ends(rid) == ["abort"], f"{rid} ended as {w.ends(rid)}, not as aborted once")
    codes = [reason.get("status_code") for reason in w.reasons(rid)]
    w.expect({*codes} <= {400, 500, 503}, f"{rid} was aborted with {codes}, of which SGLang makes 200")
    said = [reason.get("message", "") for reason in w.reasons(rid)]
    w.expect(any(why in text for text in said), f"{rid} was aborted with {said}, which does not say why")
