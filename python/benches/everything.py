"""P3: what dumping everything adds to a training step, beside what peers add for the same tensors.

    make bench-step          # a small transformer on CPU; each tool in a process of its own

Inputs, outputs and gradients of both, of every module without children: backtape's `tape.record` and
mindstudio-probe's `tensor` write them, mindstudio-probe's `statistics` and nvdlfw-inspect's
`LogTensorStats` write numbers about them; `copy` only copies them, which is the floor of what can be
taken from a job whose tensors may change. Each process alternates blocks of steps without the tool
and with it; a block ends when what it wrote is on disk (backtape), or written (peers). Prints the
median over the blocks of the time of a step over that of a step without, and the bytes of a step.
TrainCheck is not here: it rewrites the program before it runs, so it has no step without it.
"""

import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", 7))
STEPS = 3
TOOLS = ("copy", "backtape", "msprobe-tensor", "msprobe-statistics", "nvdlfw-inspect")


class Backtape:
    """Every tensor that the hooks see, in the tape of the step."""

    def __init__(self, model, directory):
        import backtape

        self.backtape, self.directory, self.tape, self.step = backtape, directory, None, 0
        tensors_of(model, lambda name, tensor: self.tape and self.tape.record(name, tensor))

    def begin(self):
        options = {"steps": "0-1000000", "strict": True, "queue_bytes": 4 << 30, "place_proof": False}
        self.recorder = self.backtape.Recorder(dir=self.directory / str(self.step), **options)

    @contextlib.contextmanager
    def recording(self):
        with self.recorder.step(self.step) as self.tape:
            yield
        self.tape, self.step = None, self.step + 1

    def end(self):
        summary = self.recorder.close()
        assert not summary.omissions and not summary.faults, summary


class Copy:
    """The floor: the same tensors copied into memory that was written before, and forgotten."""

    def __init__(self, model, directory):
        self.into, self.active = {}, False
        tensors_of(model, self.copy)

    def copy(self, name, tensor):
        if self.active:
            kept = self.into.get(name)
            if kept is None:
                kept = self.into[name] = tensor.clone()
            kept.copy_(tensor)

    def begin(self):
        pass

    @contextlib.contextmanager
    def recording(self):
        self.active = True
        yield
        self.active = False

    def end(self):
        pass


class Msprobe:
    """mindstudio-probe's debugger, by modules."""

    def __init__(self, model, directory, task):
        from msprobe.pytorch import PrecisionDebugger

        own = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        config = {"task": task, "dump_path": str(directory), "rank": [], "step": [], "level": "L0", task: own}
        path = directory / "config.json"
        path.write_text(json.dumps(config))
        self.model, self.debugger = model, PrecisionDebugger(config_path=str(path))

    def begin(self):
        pass

    @contextlib.contextmanager
    def recording(self):
        self.debugger.start(model=self.model)
        yield
        self.debugger.stop()
        self.debugger.step()

    def end(self):
        pass


class Inspect:
    """nvdlfw-inspect's statistics, called from hooks."""

    def __init__(self, model, directory):
        import nvdlfw_inspect.api as api

        stats = {"enabled": True, "tensors": ["tensor"], "stats": ["min", "max", "mean", "std", "l2_norm"], "freq": 1}
        layers = {"layers": {"layer_name_regex_pattern": ".*"}, "enabled": True, "base": {"LogTensorStats": stats}}
        config = directory / "config.yaml"
        config.write_text(json.dumps({"all": layers}))  # JSON is YAML.
        api.initialize(config_file=str(config), feature_dirs=[], log_dir=str(directory))
        self.api, self.active = api, False
        tensors_of(model, self.log)

    def log(self, name, tensor):
        if self.active:
            self.api.log_tensor_stats(layer_name=name, tensor_name="tensor", tensor=tensor, skip_reduction=True)

    def begin(self):
        pass

    @contextlib.contextmanager
    def recording(self):
        self.active = True
        yield
        self.active = False
        self.api.step()

    def end(self):
        pass


def tensors_of(model, take):
    """Calls `take(name, tensor)` for input, output and their gradients of every leaf module."""

    def passed(kind, name):
        def hook(_, before, after):
            for word, of in (("before", before), ("after", after)):
                of = of if isinstance(of, tuple) else (of,)
                for i, tensor in enumerate(of):
                    if tensor is not None:
                        take(f"{kind}.{name}.{word}.{i}", tensor.detach())

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(passed("forward", name))
            module.register_full_backward_hook(passed("backward", name))


def model_and_batch(torch):
    """A transformer of four layers on 2,048 tokens, from activations on."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = torch.nn.Sequential(layers, torch.nn.Linear(256, 8448))
    x = torch.randn(8, 256, 256, requires_grad=True)
    labels = torch.randint(0, 8448, (8 * 256,))
    return model, x, labels


def measure(tool):
    """Prints the ratios of the blocks and the bytes of a step, as JSON."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    model, x, labels = model_and_batch(torch)
    plain = copy.deepcopy(model)

    def step(of):
        torch.nn.functional.cross_entropy(of(x).flatten(0, 1), labels).backward()
        of.zero_grad()

    with tempfile.TemporaryDirectory(prefix="backtape-bench-") as directory:
        directory = Path(directory)
        kinds = {"copy": Copy, "backtape": Backtape, "nvdlfw-inspect": Inspect}
        task = {"task": tool.removeprefix("msprobe-")} if tool.startswith("msprobe") else {}
        of = kinds.get(tool, Msprobe)(model, directory, **task)
        ratios = []
        for number in range(ROUNDS + 1):
            begin = time.perf_counter()
            for _ in range(STEPS):
                step(plain)
            off = time.perf_counter() - begin
            begin = time.perf_counter()
            of.begin()
            for _ in range(STEPS):
                with of.recording():
                    step(model)
            blocked = time.perf_counter() - begin
            of.end()
            whole = time.perf_counter() - begin
            if number:  # The first block warms up.
                ratios.append((blocked / off, whole / off))
        files = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {"ratios": ratios, "bytes": files / (STEPS * (ROUNDS + 1))}


def main():
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return 0
    print(f"{ROUNDS} blocks of {STEPS} steps; a step's time over that of one without, medians")
    added = {}
    for tool in TOOLS:
        done = subprocess.run([sys.executable, __file__, tool], capture_output=True, text=True, timeout=1800)
        if done.returncode:
            print(f"{tool:<20} did not run: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        blocked, whole = (statistics.median(column) for column in zip(*found["ratios"]))
        added[tool] = (blocked - 1, whole - 1)
        print(f"{tool:<20} {blocked:6.2f}x   {whole:6.2f}x with its writing done   {found['bytes'] / 2**20:7.1f} MiB a step")
    for tool in ("backtape", "copy"):
        if {tool, "msprobe-tensor"} <= set(added):
            blocked, whole = (peer / own for peer, own in zip(added["msprobe-tensor"], added[tool]))
            print(f"added by mindstudio-probe's tensor over {tool}: {blocked:.1f}x until the job goes on, "
                  f"{whole:.1f}x with all written   target 8x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
