"""What the plugin would do to this SGLang, and which other plugins reach for the same functions."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from ... import config, installation
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, note, warning
from .python import GROUP

MOST_FILES, MOST_BYTES = 300, 1 << 20  # read of another plugin's package


def gather(subject: Subject) -> Facts:
    from ...overlays import OVERLAYS
    from ...patching import engine  # needs wrapt, which may be missing
    from ...patching.outcome import Applied
    from ...plugin import LABELS

    launch = subject.launch
    flags = {name: launch.get(f"plugin_{name}") for name in ("mode", "skip", "log_interval", "trace")}
    settings = config.read([overlay.id for overlay in OVERLAYS], **flags)
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "watches", "") != "sglang"]
    tree = installation.find(subject.sglang_path).tree
    plan = engine.plan(OVERLAYS, tree, settings.skip)
    applied = [overlay for overlay in OVERLAYS if isinstance(plan[overlay.id], Applied)]
    return {
        "mode": settings.mode,
        "skip": sorted(settings.skip),
        "allowed": config.allowed_by_sglang(),
        "overlays": {name: {"outcome": LABELS[type(o)], **vars(o)} for name, o in plan.items()},
        "targets": {hook.target: overlay.id for overlay in applied for hook in overlay.hooks(tree)},
    }


def judge(examined: Examined) -> Iterator[Finding]:
    facts = examined.facts("overlays")
    needed = [name for name, entry in facts["overlays"].items() if entry["outcome"] == "applied"]
    if facts["mode"] == "off" and needed:
        yield warning(
            f"the plugin is switched off, so this SGLang runs with its defects: {', '.join(needed)}",
            f"use --hisparse-plugin auto, and unset {config.MODE_VARIABLE}",
        )
        return
    if not facts["allowed"] and needed:
        yield warning(
            f"{config.PLUGINS_VARIABLE} is set and does not name {config.PLUGIN_NAME}: SGLang will not load the plugin",
            f"add {config.PLUGIN_NAME} to {config.PLUGINS_VARIABLE}, or unset it",
        )
    level = error if facts["mode"] == "strict" else warning
    for name, entry in facts["overlays"].items():
        if entry["outcome"] == "refused":
            left_out = _left_out(name, facts)
            yield level(
                f"overlay {name} is refused. {entry['reason']} ({entry['evidence']})",
                f"take {', '.join(sorted(left_out))} out of --hisparse-plugin-skip (or {config.SKIP_VARIABLE})"
                if left_out
                else "use a release from the support matrix, or a newer plugin; "
                f"--hisparse-plugin-skip {name} accepts it",
            )


def _left_out(name: str, facts: Facts) -> set[str]:
    """Overlays left out on request for which another is refused, be it by way of a third."""
    found: set[str] = set()
    seen, ahead = {name}, [name]
    while ahead:
        named = set(re.findall(r"[\w-]+", facts["overlays"][ahead.pop()].get("evidence", ""))) & {*facts["overlays"]}
        found |= named & {*facts.get("skip", ())}
        ahead += named - seen
        seen |= named
    return found


def applied(examined: Examined, name: str) -> bool:
    """Whether the plugin would apply an overlay."""
    facts = examined.facts("overlays")
    runs = facts.get("mode") != "off" and facts.get("allowed", True)
    return bool(runs and facts.get("overlays", {}).get(name, {}).get("outcome") == "applied")


def failed(examined: Examined, failure: str) -> Iterator[Finding]:
    if failure.startswith("NotInstalled") or examined.facts("python").get("missing"):
        return  # said where it was looked for
    kind, _, what = failure.partition(": ")
    settings: list[type[Exception]] = [config.ConfigError, *config.ConfigError.__subclasses__()]
    if kind in {wrong.__name__ for wrong in settings}:
        yield error(f"{what}; the server will not start", "correct the flag or the environment variable")
    else:
        yield warning(
            f"the overlays could not be planned: {failure}",
            "reinstall SGLang if its files are damaged; else report this with `sglang-hisparse status`",
        )


def shown(facts: Facts) -> str:
    outcomes = [entry["outcome"] for entry in facts["overlays"].values()]
    counts = ", ".join(f"{outcomes.count(label)} {label}" for label in ("applied", "skipped", "refused"))
    return f"{counts}; mode {facts['mode']}"


def gather_others(_subject: Subject) -> Facts:
    try:
        points = list(importlib.metadata.entry_points(group=GROUP))
    except Exception:  # a damaged entry_points.txt: said by the probe of Python
        points = []
    named = {e.name: e.value.partition(":")[0] for e in points if e.name != config.PLUGIN_NAME}
    named.update(_started_by_pth())
    return {"plugins": {name: {"module": module, **_read(module)} for name, module in sorted(named.items())}}


def _started_by_pth() -> dict[str, str]:
    """Modules that .pth files import in every process and that have to do with SGLang, by the file's name."""
    found = {}
    for folder in {*site.getsitepackages(), site.getusersitepackages()}:
        for path in sorted(Path(folder).glob("*.pth")):
            try:
                text = path.read_text("utf-8", errors="replace")[:MOST_BYTES]
            except OSError:
                continue
            lines = [line for line in text.splitlines() if line.startswith(("import ", "import\t"))]
            if path.stem == "sglang_hisparse_plugin" or not any("sglang" in line for line in lines):
                continue
            modules = re.findall(r"(?:__import__\(['\"]|import_module\(['\"]|\bimport\s+)([\w.]+)", " ; ".join(lines))
            foreign = [m for m in modules if m.partition(".")[0] not in {*sys.stdlib_module_names, "sglang"}]
            if foreign:
                found[path.name] = foreign[0]
    return found


def _read(module: str) -> Facts:
    """Names in a package's source that may be targets of hooks, found without importing it."""
    mentions: set[str] = set()
    replaces, unread = False, 0
    for path in _files(module):
        try:
            tree = ast.parse(path.read_bytes()[:MOST_BYTES])
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            unread += 1
            continue
        names = _imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                mentions.add(node.value.replace(":", ".").strip("."))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                mentions.add(_expanded(ast.unparse(node), names))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) == 3:
                owner, name = node.args[:2]
                if isinstance(name, ast.Constant):
                    mentions.add(_expanded(f"{ast.unparse(owner)}.{name.value!s}", names))
            elif isinstance(node, ast.Attribute) and node.attr == "REPLACE":
                replaces = True
    dotted = {text for text in mentions if re.fullmatch(r"\w+(\.\w+)+", text)}
    return {"mentions": sorted(dotted)[:2000], "replaces": replaces, "unread": unread}


def _imported(tree: ast.Module) -> dict[str, str]:
    """What the names of a file's imports stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _expanded(dotted: str, names: Mapping[str, str]) -> str:
    first, point, rest = dotted.partition(".")
    return names.get(first, first) + point + rest


def _files(module: str) -> list[Path]:
    spec = PathFinder.find_spec(module.partition(".")[0])
    if spec is None:
        return []
    folders = list(spec.submodule_search_locations or ())
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    return (files or [Path(spec.origin)] if spec.origin else files)[:MOST_FILES]


def judge_others(examined: Examined) -> Iterator[Finding]:
    targets: dict[str, str] = examined.facts("overlays").get("targets", {})
    for name, plugin in examined.facts("other plugins")["plugins"].items():
        shared = sorted({target for target in targets if _named(target, plugin["mentions"])})
        if shared:
            hurt = "may take the place of ours" if plugin["replaces"] else "runs around ours or inside it"
            yield warning(
                f"plugin {name} ({plugin['module']}) hooks what the plugin repairs, and {hurt}: {', '.join(shared)}",
                "start with --hisparse-plugin strict, which stops the server if a repair is not in place; or name only "
                f"the plugins you need in {config.PLUGINS_VARIABLE}",
            )
        elif plugin["unread"]:
            yield note(
                f"plugin {name} has {plugin['unread']} files that could not be read for hooks",
                "start with --hisparse-plugin strict, which checks at start what is in place",
            )


def _named(target: str, mentions: Iterable[str]) -> bool:
    """Whether one of `mentions` is the end of the dotted `target`, its owner included."""
    dotted = "." + target.replace(":", ".")
    return any(dotted.endswith("." + text) for text in mentions)


def shown_others(facts: Facts) -> str:
    return ", ".join(f"{name} ({plugin['module']})" for name, plugin in facts["plugins"].items()) or "none"


PROBES = (
    Probe("overlays", gather, judge, shown, limit_s=60, failed=failed),
    Probe("other plugins", gather_others, judge_others, shown_others),
)
