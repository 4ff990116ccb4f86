"""Runs inside a site: does what a scheduler process does before it builds a `Scheduler`, and prints what is patched.

Output: one JSON object, target -> calls that reach the plugin's package when the function at the target is called,
as far as wrappers can be seen from outside.
"""

import functools
import importlib
import importlib.util
import inspect
import json
import sys


def somebody_else():
    """A plugin that wraps by hand, as on releases without a loader."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    original = ScheduleBatch.release_req

    @functools.wraps(original)
    def release_req(*args, **kwargs):
        print("the other plugin saw release_req")
        return original(*args, **kwargs)

    ScheduleBatch.release_req = release_req


if "--wrap-before" in sys.argv:
    somebody_else()
importlib.import_module("sglang.srt.managers.scheduler")  # a spawned process does so to unpickle run_scheduler_process
if "--wrap-after" in sys.argv:
    somebody_else()
if importlib.util.find_spec("sglang.srt.plugins"):
    importlib.import_module("sglang.srt.plugins").load_plugins()


PLUGIN = "sglang_hisparse_plugin"


def ours(function):
    """Whether one wrapper layer closes over a function of the plugin; its CPU stand-ins for kernels do not count."""
    layer = getattr(function, "_self_wrapper", function)
    cells = getattr(layer, "__closure__", None) or ()
    contents = [layer, *(c.cell_contents for c in cells)]
    modules = [c.__module__ or "" for c in contents if inspect.isfunction(c)]
    return any(m.startswith(PLUGIN) and not m.startswith(f"{PLUGIN}.demo") for m in modules)


def layers(function):
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)


found = {}
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] != "sglang" or module is None:
        continue
    for holder_name, holder in [("", module), *inspect.getmembers(module, inspect.isclass)]:
        if holder_name and holder.__module__ != name:
            continue
        for attribute, value in list(vars(holder).items()):
            if (callable(value) or isinstance(value, (classmethod, staticmethod))) and not isinstance(value, type):
                count = sum(ours(layer) for layer in layers(value))
                if count:
                    found[f"{name}:{holder_name + '.' if holder_name else ''}{attribute}"] = count
print("PATCHED " + json.dumps(found))
if "--call" in sys.argv:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = ScheduleBatch.__new__(ScheduleBatch)
    batch.reqs, batch.hisparse_coordinator = [], None
    try:
        batch.release_req(0, 0, None)
    except IndexError:  # upstream's own first statement, reached through all hooks: there is no request 0
        print("upstream's release_req was reached")
