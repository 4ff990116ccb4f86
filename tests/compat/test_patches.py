"""The stored series do to each release's real source what the overlays do; a broken one is noticed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from lifecycle import register

from sglang_hisparse_plugin.overlays import OVERLAYS
from sglang_hisparse_plugin.patching import patchfile, proof, series
from sglang_hisparse_plugin.patching.patchfile import Patch, blob_id

from .conftest import OLD

Source = Callable[[str], Path]

NEWEST = "0.5.23"
SCRIPTS = Path(__file__).parents[1] / "lifecycle" / "regressions"
OF_TWO_RANKS = "empty-on-one"  # in tests/lifecycle/ranks.py

STORED = series.stored()
PATCHES = [
    pytest.param(release, patch, id=f"{release}-{patch.id}")
    for release in STORED
    for patch in series.read(STORED[release])
]
OVERLAY = {overlay.id: overlay for overlay in OVERLAYS}


def test_the_oldest_and_the_newest_release_have_a_series() -> None:
    assert [*STORED] == [OLD, "0.5.23"]


@pytest.mark.parametrize("release", STORED)
def test_a_series_equals_the_overlays(release: str, source: Source) -> None:
    assert proof.mismatches(series.read(STORED[release]), OVERLAYS, source(release)) == []


@pytest.mark.parametrize(("release", "patch"), PATCHES)
def test_the_header_says_where_the_patch_stands(release: str, patch: Patch) -> None:
    overlay = OVERLAY[patch.id]
    assert re.fullmatch(r"no|not-needed|https://\S+", patch.fields["Forwarded"])
    assert re.fullmatch(
        r"none reported|https://github\.com/\S+/\d+(, https://github\.com/\S+/\d+)*", patch.fields["Bug"]
    )
    assert date.fromisoformat(patch.fields["Last-Update"]) <= date.today()
    assert overlay.id in patch.fields["Origin"]
    assert patch.fields.get("Applied-Upstream") == overlay.fixed_since
    assert set(re.findall(r"#(\d+)", overlay.origin)) <= set(re.findall(r"\d+", patch.fields["Bug"]))


@pytest.mark.parametrize(
    ("release", "patch"), [p for p in PATCHES if NEWEST in p.id or "Scenarios" in p.values[1].fields]
)
def test_a_maintainer_can_see_what_it_repairs(release: str, patch: Patch) -> None:
    """Its scenarios find something on the unchanged release; tests/lifecycle has it that they find nothing patched."""
    assert patch.fields.get("Reproduction") == f"make reproduce PATCH={release}/{patch.id}"
    for name in patch.fields["Scenarios"].split(", "):
        played = name == OF_TWO_RANKS or (SCRIPTS / f"{name}.txt").is_file()
        assert played or register.evidence(release, "plain", name), name


@pytest.mark.parametrize(("release", "patch"), PATCHES)
def test_nothing_is_quoted_but_changed_lines(release: str, patch: Patch) -> None:
    hunks = [hunk for file in patch.files for hunk in file]
    assert not any(hunk.section_header for hunk in hunks)
    assert not any(line.is_context for hunk in hunks for line in hunk)


@pytest.mark.parametrize("release", STORED)
@pytest.mark.parametrize("command", [["git", "apply"], ["patch", "-p1", "--fuzz=0", "-i"]], ids=["git", "patch"])
def test_git_and_patch_make_the_same_of_the_export(
    release: str, command: list[str], source: Source, copied: Source, tmp_path: Path
) -> None:
    tree, expected = copied(release), {}
    for step in series.steps(series.read(STORED[release]), source(release)):
        (tmp_path / "one.patch").write_text(patchfile.with_context(step.patch, step.changes))
        subprocess.run([*command, tmp_path / "one.patch"], cwd=tree, check=True, capture_output=True)
        expected |= {change.path: change.after for change in step.changes}
    assert {path: (tree / path).read_text() for path in expected} == expected


@pytest.mark.parametrize("release", STORED)
def test_a_series_does_not_apply_to_the_next_release(release: str, source: Source) -> None:
    other = "0.5.11" if release == OLD else "0.5.20"
    with pytest.raises(patchfile.Drift, match=r"sglang/srt/\S+\.py:\d+: expected .*, found "):
        list(series.steps(series.read(STORED[release]), source(other)))


# One changed line in each patch, as a slip of the keyboard would; the blob ids are made to fit, so that only the probe
# of the overlay can tell.
SLIPS = [
    (OLD, "tp-ready", "self.tp_world_size == 1 and", "self.tp_world_size > 1 and"),
    (OLD, "pp-layer", "layer_id -= self", "layer_id += self"),
    (OLD, "finish-unbuffered", "if current_cap > 0:", "if current_cap >= 0:"),
    (OLD, "retract-once", "is None or req.finished():", "is None:"),
    (OLD, "direct-flag", "+        req.hisparse_staging = False", "+        req.hisparse_staging = True"),
    (OLD, "retract-order", "coordinator.retract_req(req)\ndiff", "coordinator.retract_req(idx)\ndiff"),
    (OLD, "pause-staged", "coordinator.ack_staging_queue", "coordinator.ack_queue"),
    (OLD, "staging-abort", "coordinator.ack_staging_queue", "coordinator.ack_queue"),
    (OLD, "pd-retract", "and self.hisparse_coordinator is None", "and self.hisparse_coordinator"),
    (OLD, "quick-finish", "coordinator.request_finished(req)", "coordinator.retract_req(req)"),
    (OLD, "batch-full", "batch_is_full = False", "batch_is_full = True"),
    (OLD, "slot-count", "or self.enable_hisparse:", "or self.enable_hicache:"),
    (OLD, "idle-staging", "has_ongoing_staging()", "has_ongoing_stagings()"),
    (OLD, "mixed-chunk", "and not self.enable_hisparse", "and self.enable_hisparse"),
    (OLD, "prefill-estimate", "prefix_lens=prefix_lens_cpu", "prefix_lens=seq_lens_cpu"),
    (OLD, "decode-memory", "coordinator.pools_without_room(", "coordinator.pools_with_room("),
    (OLD, "staging-memory", "coordinator.staged_without_room(", "coordinator.staged_with_room("),
    (OLD, "admission-memory", "if not admission.has_room(", "if not admission.has_rooms("),
    (OLD, "length-limit", "allocator.size_full", "allocator.size"),
    (OLD, "prealloc-memory", "self._hold_back_without_room() if", "self._hold_back_with_room() if"),
    (OLD, "index-upload", ").to(self.device, non_blocking=True)", ").to(self.device)"),
    (OLD, "logprob-ids", "[r.token_ids_logprob for", "[r.token_ids_logprobs for"),
    (OLD, "logprob-none", "logprobs.new_empty(0)", "logprobs.new_zeros(0)"),
    (OLD, "multimodal-batch", "batch.multimodal_inputs", "batch.multimodal_input"),
    ("0.5.23", "tp-ready", "self.tp_world_size == 1 and", "self.tp_world_size > 1 and"),
    ("0.5.23", "pp-layer", "layer_id -= self", "layer_id += self"),
    ("0.5.23", "pause-staged", "coordinator.ack_staging_queue", "coordinator.ack_queue"),
    ("0.5.23", "staging-abort", "coordinator.ack_staging_queue", "coordinator.ack_queue"),
    (
        "0.5.23",
        "pd-retract",
        "+    return isinstance(pool, (DeepSeekV4TokenToKVPool, HiSparseDSA",
        "+    return isinstance(pool, (DeepSeekV4TokenToKVPool, SparseDSA",
    ),
    (
        "0.5.23",
        "replayed-token",
        "+            if req.pd_rebootstrap_forced",
        "+            if req.pd_rebootstrap_forced_s",
    ),
    ("0.5.23", "rebootstrap-room", "req.renew_bootstrap()", "req.renew_bootstraps()"),
    ("0.5.23", "rebootstrap-adapter", "if req.lora_id is not None", "if req.lora_path is not None"),
    ("0.5.23", "checksum-drop", "coordinator.request_finished(req)", "coordinator.retract_req(req)"),
    ("0.5.23", "chunked-abort", "coordinator.request_finished(req)", "coordinator.retract_req(req)"),
    ("0.5.23", "decode-memory", "coordinator.pools_without_room(", "coordinator.pools_with_room("),
    ("0.5.23", "staging-memory", "coordinator.staged_without_room(", "coordinator.staged_with_room("),
    ("0.5.23", "admission-memory", "if not admission.has_room(", "if not admission.has_rooms("),
    (
        "0.5.23",
        "length-limit",
        "+            kv_capacity = self.model_runner.token_to_kv_pool_allocator.size_full",
        "+            kv_capacity = self.model_runner.token_to_kv_pool_allocator.size",
    ),
    ("0.5.23", "prealloc-memory", "self._hold_back_without_room() if", "self._hold_back_with_room() if"),
    ("0.5.23", "held-abort", "prealloc_queue.held_rebootstrap_reqs", "prealloc_queue.retracted_queue"),
    ("0.5.23", "logprob-ids", "[r.logprob.token_ids_logprob for", "[r.logprob.token_ids_logprobs for"),
    ("0.5.23", "multimodal-batch", "batch.multimodal_inputs", "batch.multimodal_input"),
]


def test_every_patch_has_a_slip() -> None:
    assert [slip[:2] for slip in SLIPS] == [(r, patch.id) for r in STORED for patch in series.read(STORED[r])]


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: "-".join(slip[:2]))
def test_a_slip_is_caught_by_the_probe(slip: tuple[str, str, str, str], edited: Source, source: Source) -> None:
    release, name, old, new = slip
    folder = edited(release)
    patch = folder / f"{name}.patch"
    assert patch.read_text().count(old) == 1
    patch.write_text(patch.read_text().replace(old, new))
    refit(folder, source(release))
    found = proof.mismatches(
        series.read(folder), [OVERLAY[name]], source(release)
    )  # of all it takes twenty times as long
    assert [line for line in found if line.startswith(f"{name}: the probe of {name} should say Fixed, says ")], found


def test_a_slip_is_caught_by_the_blob_id_too(edited: Source, source: Source) -> None:
    folder = edited(OLD)
    patch = folder / "direct-flag.patch"
    patch.write_text(patch.read_text().replace("+        req.hisparse_staging", "+        req.staging_hisparse"))
    found = proof.mismatches(series.read(folder), OVERLAYS, source(OLD))
    assert [line for line in found if "direct-flag: sglang/srt/managers/hisparse_coordinator.py: the result" in line]


def test_a_patch_left_out_is_caught(edited: Source, source: Source) -> None:
    folder = edited(OLD)
    *others, last = (folder / "series").read_text().splitlines()
    (folder / last).unlink()
    (folder / "series").write_text("\n".join(others) + "\n")
    assert len(proof.mismatches(series.read(folder), OVERLAYS, source(OLD))) == 1


def test_a_wrong_order_is_caught(edited: Source, source: Source) -> None:
    folder = edited(OLD)
    names = (folder / "series").read_text().splitlines()
    (folder / "series").write_text("\n".join([names[0], names[2], names[1], *names[3:]]) + "\n")
    refit(folder, source(OLD))
    line = proof.mismatches(series.read(folder), OVERLAYS, source(OLD))[0]
    assert line.startswith("the series is tp-ready, finish-unbuffered, pp-layer")


def refit(folder: Path, tree: Path) -> None:
    """Write the blob ids of a series anew, for the texts its patches make now."""
    work = folder.parent / "refit"
    shutil.rmtree(work, ignore_errors=True)
    for path in {file.path for patch in series.read(folder) for file in patch.files}:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / path, work / path)
    for name in (folder / "series").read_text().split():
        patch, text = patchfile.parse("", (folder / name).read_text()), (folder / name).read_text()
        before = {file.path: blob_id((work / file.path).read_text()) for file in patch.files}
        subprocess.run(["git", "apply", "--unidiff-zero", folder / name], cwd=work, check=True)
        for path, blob in before.items():
            after = blob_id((work / path).read_text())
            text = re.sub(rf"(a/{path} b/{path}\nindex )\S+", rf"\g<1>{blob}..{after}", text)
        (folder / name).write_text(text)
