"""Trainers of other people, recorded as they stand: `run.py [--sources DIRECTORY] [TRAINER ...]` prints the table of
docs/trainers.md.

Each is run on the CPU with a tiny model that is drawn at random, twice under `backtape run`: as it is, which the
replay must agree with, and with a fault planted in torch (planted.py), whose stage and cause the replay must name.
Libraries are those of the environment. Of trainers that no package has DIRECTORY holds the sources:

    nanoGPT         github.com/karpathy/nanoGPT
    minGPT          github.com/karpathy/minGPT
    transformers    github.com/huggingface/transformers, of which examples/pytorch/language-modeling is needed

What is not installed, or not there, is left out of the table. Exit status 1: some trainer did not do as it must.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import backtape

HERE = Path(__file__).resolve().parent
JOBS = HERE / "jobs"
LAUNCHED = HERE.parents[1] / "python/tests_frameworks/launched_job.py"
STEP = 1
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
}  # fmt: skip
HEAD = """\
| trainer | versions | judged of the run as it is | lines changed | its verdict | fault | what is told of it |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Trainer:
    """One row of the table. In its words {out} is a new folder, {asset} what jobs/saved.py wrote, {source} the
    sources and {recipes} the recipes of torchtune."""

    name: str
    packages: tuple[str, ...]  # whose versions the table gives, and without which it is left out
    script: str  # a script and its words, or -m and a module
    fault: str
    told: tuple[str, str]  # the stage and the cause that the replay names
    source: str = ""  # the folder of --sources that has it
    is_run_there: bool = False  # whether it reads files of its own by relative paths
    ranks: int = 0  # that torchrun starts; 0: it is run without torchrun
    variables: dict[str, str] = field(default_factory=dict)

    def is_there(self, sources: Path | None) -> bool:
        """Whether its packages are installed, and its sources given."""
        has_source = not self.source or (sources is not None and (sources / self.source).is_dir())
        return has_source and all(importlib.util.find_spec(name) for name in self.packages)

    @property
    def versions(self) -> str:
        """Of its packages."""
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in self.packages)


CLIPPED = ("clip", "clip-recorded-not-applied")
UNCLEARED = ("accumulate", "not-cleared")
UNCORRECTED = ("update", "bias-correction-missing")
DECAYED = ("update", "decay-other")
SCALED = ("dq", "upstream-factor")
ROUNDED = ("dq", "gemm-low-precision")

CLM = (
    "{source}/examples/pytorch/language-modeling/run_clm.py --config_name {asset}/model --tokenizer_name {asset}/model "
    "--train_file {asset}/text.txt --do_train --max_steps 3 --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --block_size 32 --output_dir {out} --report_to none --use_cpu --save_strategy no"
)
NANOGPT = (
    "{source}/train.py --dataset={asset}/nanogpt --device=cpu --compile=False --dtype=bfloat16 --n_layer=2 --n_head=4 "
    "--n_embd=32 --block_size=16 --batch_size=4 --gradient_accumulation_steps=4 --max_iters=2 --warmup_iters=1 "
    "--eval_iters=1 --grad_clip=0.1 --out_dir={out}"
)
TITAN = (
    "-m torchtitan.train --module llama3 --config llama3_debugmodel --hf-assets-path {asset}/model "
    "--dataloader.dataset-path {asset}/rows --training.steps 3 --training.seq-len 64 --training.local-batch-size 2 "
    "--training.global-batch-size 4 --training.disable-cuda-graphs --dump-folder {out}"
)
TUNE = f"{{recipes}}/full_finetune_single_device.py --config {JOBS}/torchtune.yaml asset={{asset}} output_dir={{out}}"
# It asks for a GPU, and compiles attention, whose backward pass is not compiled for a CPU.
ON_CPU = {"BACKTAPE_ON_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
TRANSFORMERS, TRL, PEFT = ("transformers",), ("trl", "transformers"), ("peft", "trl", "transformers")

TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer("transformers Trainer", TRANSFORMERS, f"{JOBS}/hf.py trainer {{out}}", "decay", DECAYED),
        Trainer("transformers run_clm.py", TRANSFORMERS, CLM, "head-bf16", ROUNDED, "transformers"),
        Trainer("trl SFTTrainer", TRL, f"{JOBS}/hf.py sft {{out}}", "clip", CLIPPED),
        Trainer("trl SFTTrainer, LoRA", PEFT, f"{JOBS}/hf.py lora {{out}}", "not-cleared", UNCLEARED),
        Trainer("trl DPOTrainer", TRL, f"{JOBS}/hf.py dpo {{out}}", "clip", CLIPPED),
        Trainer("trl GRPOTrainer", TRL, f"{JOBS}/hf.py grpo {{out}}", "no-correction", UNCORRECTED),
        Trainer("trl RewardTrainer", TRL, f"{JOBS}/hf.py reward {{out}}", "not-cleared", UNCLEARED),
        Trainer("Lightning", ("lightning",), f"{JOBS}/lightning_job.py", "head-scaled", SCALED),
        Trainer("Accelerate", ("accelerate",), f"{LAUNCHED} accelerate", "clip", CLIPPED, ranks=2),
        Trainer("DeepSpeed ZeRO 2", ("deepspeed",), f"{LAUNCHED} deepspeed 2", "decay", DECAYED, ranks=2),
        Trainer("nanoGPT", ("torch",), NANOGPT, "head-scaled", SCALED, "nanoGPT", is_run_there=True),
        Trainer(
            "minGPT", ("torch",), "{source}/projects/adder/adder.py --trainer.max_iters=3", "decay", DECAYED, "minGPT",
            variables={"PYTHONPATH": "{source}"},
        ),
        Trainer("torchtitan", ("torchtitan",), TITAN, "no-correction", UNCORRECTED, ranks=1, variables=ON_CPU),
        Trainer(
            "torchtune", ("torchtune", "torchao"), TUNE, "decay", DECAYED, variables={"PYTHONPATH": str(JOBS)}
        ),
    )
}  # fmt: skip


def recorded(trainer: Trainer, fault: str | None, directory: Path, folders: dict[str, str]) -> backtape.Report:
    """The replay's report on a trainer that was run under `backtape run`. Raises RuntimeError where it fails."""
    out = directory / "out"
    out.mkdir(parents=True)
    filled = {"out": str(out), **folders}
    words = [word.format(**filled) for word in trainer.script.split()]
    added = {name: value.format(**filled) for name, value in trainer.variables.items()}
    if "PYTHONPATH" in added:
        added["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), added["PYTHONPATH"])))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trainer.ranks)]
    # As it is, it is run by its own words alone, unless it has to be told of a CPU.
    planted = [f"{HERE}/planted.py", fault or "none"] if fault or "BACKTAPE_ON_CPU" in added else []
    command = [sys.executable, *(torchrun if trainer.ranks else []), *planted, *words]
    options = ["--steps", str(STEP), "--dir", str(directory / "dump"), "--"]
    done = subprocess.run(
        [sys.executable, "-m", "backtape", "run", *options, *command], capture_output=True, text=True, timeout=1200,
        cwd=folders["source"] if trainer.is_run_there else directory, env=os.environ | ENVIRONMENT | added,
    )  # fmt: skip
    if done.returncode != 0 or not (directory / "dump/run.json").exists():
        said = f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        raise RuntimeError(f"{trainer.name} ended with {done.returncode}:\n{said}")
    return backtape.replay(directory / "dump", step=STEP)


def reports(trainer: Trainer, directory: Path, sources: Path | None, assets: Path) -> list[backtape.Report]:
    """The reports on a trainer as it is, and with its fault."""
    recipes = importlib.util.find_spec("recipes")
    folders = {
        "asset": str(assets), "source": str((sources or Path()).resolve() / trainer.source),
        "recipes": str(Path(recipes.origin).parent) if recipes and recipes.origin else "",
    }  # fmt: skip
    found = []
    for fault in (None, trainer.fault):
        inside = directory / trainer.name.replace(" ", "-") / (fault or "clean")
        found.append(recorded(trainer, fault, inside, folders))
        (inside / "report.txt").write_text(str(found[-1]))
    return found


def told(report: backtape.Report) -> tuple[str, str]:
    """The first stage that diverges, and the cause that is named for it."""
    heads = [stage["name"] for stage in report.json["stages"] if stage["status"] == "fail"]
    if heads:
        named = [cause["id"] for cause in report.json["causes"] if cause["standing"] == "named"]
        return heads[0], named[0] if named else "unknown"
    steps = (report.json["algebra"] or {}).get("diverged", [])
    if not steps:
        return "", ""
    return steps[0]["stage"], (steps[0].get("reading") or {}).get("cause", "unknown")


def judged(report: backtape.Report) -> str:
    """The stages that agree: those of the head, and those of the step."""
    stages = report.json["stages"]
    heads = [one["name"] for one in stages if one["status"] == "pass" and one.get("error") is not None]
    steps = [one["stage"] for one in (report.json["algebra"] or {}).get("stages", []) if one["agreed"]]
    return f"{', '.join(heads) or 'no head'}; {', '.join(steps)}"


def assets_in(directory: Path) -> Path:
    """What trainers read by paths, written into a directory."""
    subprocess.run([sys.executable, f"{JOBS}/saved.py", str(directory)], check=True, capture_output=True)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description="Records trainers of other people as they stand.")
    parser.add_argument("--sources", type=Path, help="a directory with nanoGPT, minGPT and transformers")
    parser.add_argument("--keep", type=Path, help="a new directory in which dumps and reports stay")
    parser.add_argument("names", nargs="*", help="which trainers, as the table names them; all by default")
    options = parser.parse_args()
    wrong = 0
    print(HEAD)
    with tempfile.TemporaryDirectory() as scratch:
        place = (options.keep or Path(scratch)).resolve()
        assets = assets_in(place / "assets")
        for trainer in (TRAINERS[name] for name in options.names or TRAINERS):
            if not trainer.is_there(options.sources):
                print(f"left out, as it is not here: {trainer.name}", file=sys.stderr)
                continue
            try:
                clean, faulty = reports(trainer, place, options.sources, assets)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                wrong += 1
                continue
            stage, cause = told(faulty)
            verdict = clean.verdict if clean.verdict == "agreed" else f"**{clean.verdict}** {': '.join(told(clean))}"
            said = f"{stage}: `{cause}`" if stage else "not told"
            cells = (trainer.name, trainer.versions, judged(clean), "0", verdict, trainer.fault, said)
            print("|", " | ".join(cells), "|", flush=True)
            wrong += clean.verdict != "agreed" or (stage, cause) != trainer.told
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
