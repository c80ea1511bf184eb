"""The commands that reproduce a study, its data and each of its runs, or a suite.

Paths are relative to the folder that the study was started in, if it is below that, or else to the folder
that holds it. So a page can be passed on without naming the folders of the machine it was made on.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.compare.folder import Study, StudyFolder
from headgate.compare.jobs import Job
from headgate.compare.suite_plan import SuitePlan
from headgate.compare.variants import Variant
from headgate.data.shards import read_manifest
from headgate.data.tasks.contract import TASKS
from headgate.measure.costs import CostPlan
from headgate.registry import FROM_FILE, MECHANISMS


def reproduction(folder: StudyFolder, study: Study, jobs: Sequence[Job]) -> dict[str, Any]:
    """The words of each command by name: `prepare`, None if the data is gone; `compare`; and `runs`, a
    list."""
    relative = _relative_to(folder.path)
    names = [_written(variant, relative) for variant in study.variants[1:] if not variant.control]
    data, out = relative(study.data.folder), relative(folder.path)
    recipe = relative(study.recipe) if Path(study.recipe).is_file() else study.recipe
    words = ["headgate", "compare", *names, "--recipe", recipe, "--data", data]
    seeds = ",".join(map(str, study.looks or (study.seeds,)))
    words += ["--seeds", seeds, "--out", out, *study.settings]
    if not any(variant.control for variant in study.variants):
        words.append("--no-controls")
    if study.tune:
        words += ["--tune", str(study.tune)] + (["--space", study.space] if study.space else [])
        words += ["--tuning-seeds", str(study.tuning_seeds)] if study.tuning_seeds > 1 else []
        words += [] if study.published else ["--no-published"]
    if study.ladder:
        words += ["--ladder", ",".join(f"{multiple:g}" for multiple in study.ladder)]
        words += ["--ladder-variants", *study.ladder_variants] if study.ladder_variants else []
    if study.budget != "tokens":
        words += ["--budget", study.budget]
    if study.threads != 1:
        words += ["--threads", str(study.threads)]
    if study.cost.lengths:
        words += ["--lengths", ",".join(map(str, study.cost.lengths))]
    if study.cost.seconds != CostPlan().seconds:
        words += ["--cost-seconds", str(study.cost.seconds)]
    if folder.claims_path.is_file():
        words += ["--claims", relative(folder.claims_path)]
    request, prepare = prepare_request(study), None
    if request is not None:
        source = str(request["source"])
        source = relative(source) if Path(source).exists() else source
        prepare = ["headgate", "prepare", source, data, *_prepare_options(request)]
    runs = [_run_command(job, folder.path, data, relative) for job in jobs]
    return {"prepare": prepare, "compare": words, "runs": runs}


def _run_command(job: Job, folder: Path, data: str, relative: Callable[[str | Path], str]) -> list[str]:
    words = ["headgate"]
    words += [relative(word) if word.startswith(str(folder)) else word for word in job.command(folder, data)]
    for file in dict.fromkeys(_own_file(spec.name) for spec in job.variant.mechanism):
        words += [] if file is None else ["--mechanism-file", relative(file)]
    return words


def suite_command(folder: Path, plan: SuitePlan) -> list[str] | None:
    """None for a suite from a version that did not record what it was asked for."""
    if not plan.words:
        return None
    relative = _relative_to(folder)
    words = ["headgate", "suite", *(_written(variant, relative) for variant in plan.variants[1:])]
    words += [
        "--tasks",
        " ".join(plan.words.values()),
        "--rates",
        ",".join(f"{rate:g}" for rate in plan.rates),
    ]
    words += ["--tuning-seeds", str(plan.tuning_seeds), "--seeds", str(plan.seeds)]
    return [*words, "--out", relative(folder), *plan.settings]


def prepare_request(study: Study) -> Mapping[str, Any] | None:
    """What `headgate prepare` was asked for, if the data is still there."""
    folder = Path(study.data.folder)
    manifest = read_manifest(folder) if folder.is_dir() else None
    return None if manifest is None else manifest.request


def _relative_to(study: Path) -> Callable[[str | Path], str]:
    here, home = Path.cwd(), study.resolve()
    start = here if home.is_relative_to(here) and home != here else home.parent
    return lambda path: os.path.relpath(Path(path).resolve(), start)


def _prepare_options(request: Mapping[str, Any]) -> list[str]:
    """The options of `headgate prepare` that are not its defaults."""
    is_task = request["tokenizer"] in TASKS.names()
    words = [] if is_task else ["--tokenizer", str(request["tokenizer"])]
    splits = "/".join(map(str, request.get("splits", (80, 10, 10))))
    options = {"--text-column": request.get("text_column", "text"), "--splits": splits}
    options |= {"--max-tokens": request.get("max_tokens"), "--end-of-text": request.get("end_of_text")}
    options |= {"--separator": request.get("separator")}
    for option, value in options.items():
        if value not in (None, "text", "80/10/10"):
            words += [option, str(value)]
    return words + ["--dedup"] * bool(request.get("dedup"))


def _written(variant: Variant, relative: Callable[[str | Path], str]) -> str:
    """The variant as written on the command line, with the file of its mechanism if it is in one."""
    plain, whole = [], []
    for n, spec in enumerate(variant.mechanism):
        stated = {**spec.options, **(variant.settings if n == 0 else {})}
        options = ",".join(f"{key}={json.dumps(value)}" for key, value in stated.items())
        words = variant.ablation or options.replace(chr(34), "")
        plain.append(f"{spec.name}:{words}" if words else spec.name)
        file = _own_file(spec.name)
        whole.append(plain[-1] if file is None else f"{os.path.join('.', relative(file))}:{plain[-1]}")
    text = "+".join(whole)
    return text if variant.label == "+".join(plain) else f"{text}@{variant.label}"


def _own_file(name: str) -> str | None:
    """The file of a mechanism that is not installed."""
    module = MECHANISMS.get(name).__module__
    return sys.modules[module].__file__ if module.startswith(FROM_FILE) else None
