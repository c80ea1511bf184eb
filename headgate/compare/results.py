"""A study folder in numbers: what its runs reached, what the differences show, what each variant costs.

`study_results` needs only the folder, finished or not. The page and the terminal show what results.json
holds.

Seconds come from costs.json, not from the runs, which share the machine: a variant's tokens per second are
the baseline's times its relative speed, everywhere. Without costs.json they are the runs' own, unless these
were spread over different devices: then nothing is said about seconds.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from headgate import config, files
from headgate.compare import statistics
from headgate.compare.claims import judge_papers
from headgate.compare.commands import prepare_request, reproduction
from headgate.compare.controls import sight
from headgate.compare.documents import LOSSES, write_documents, write_losses
from headgate.compare.folder import PUBLISHED, TUNED, Study, StudyFolder, Winners, on_ladder
from headgate.compare.jobs import Job, failure
from headgate.compare.judging import family, judge_variants, judged_loss, losses_by_label
from headgate.compare.price import prices
from headgate.compare.statistics import NAMED, Losses, compare_losses
from headgate.compare.tables import claims_markdown, conditions, devices, headline, markdown, verdicts
from headgate.compare.tuning import Tuner, tuning_results
from headgate.compare.variants import Variant
from headgate.config import Config
from headgate.errors import HeadgateError, suggestion
from headgate.measure.costs import Cost, Costs
from headgate.mechanisms.contract import MECHANISMS, description
from headgate.train.folder import RunFolder, read_evaluations
from headgate.version import __version__

MEASURED = (
    "seconds",
    "tokens_per_second",
    "memory_peak",
    "equal_seconds",
    "costs",
    "speed",
    "memory",
    "price",
    "claims",
)
"""Keys whose values depend on the machine; all others are the same however often a study is interrupted."""


def write_results(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write results.json, results.md as a table, documents.json and losses.safetensors if the runs kept the
    losses of documents, and papers.md if the study measured what a paper claims."""
    results, folder = study_results(out), Path(out)
    study, base = StudyFolder(out).read()
    # A task's documents are all alike: each is a sequence of the same kind.
    jobs = main_jobs(StudyFolder(out), study, base)
    jobs = [] if results["variants"][0]["answers"] else jobs
    write_documents(folder / "documents.json", jobs, study.data)
    write_losses(folder / LOSSES, losses_by_label(jobs))
    files.write_sealed(folder / "results.json", results)
    files.write_text(folder / "results.md", markdown(results))
    if results["claims"]:
        files.write_text(folder / "papers.md", claims_markdown(results))
    else:
        (folder / "papers.md").unlink(missing_ok=True)
    return results


def study_results(out: str | os.PathLike[str]) -> dict[str, Any]:
    folder = StudyFolder(out)
    study, base = folder.read()
    costs = folder.read_costs()
    tuner = Tuner(folder, study, base, None, None) if study.tune else None
    tuned = tuner.tune() if tuner is not None else {}
    winners = {label: one.winner for label, one in tuned.items()} if tuner and tuner.complete else None
    kind = PUBLISHED if winners is None else TUNED
    jobs = folder.jobs(study, base, study.seeds, winners)
    labels = [variant.label for variant in study.variants]
    runs = {label: [_run(job, folder.path) for job in jobs if job.variant.label == label] for label in labels}
    if study.looks:  # seeds that a decided variant was not trained with do not count as missing
        runs = {label: [run for run in mine if run["state"] != "not run"] for label, mine in runs.items()}
    circumstances = _circumstances(jobs)
    comparable = costs is not None or len(devices(circumstances["machines"])) <= 1
    own_pace = {variant.label for variant in study.variants if variant.own_pace}
    # Costs are of the recipe's steps; where some train by others, the runs' own speeds are compared.
    of_steps = None if own_pace else costs
    seconds = {
        label: _seconds_per_token(label, runs[label], of_steps, base) if comparable else math.nan
        for label in labels
    }
    losses = losses_by_label(jobs)
    judged = judge_variants(study, losses, study.looked.get(kind, 0))
    published = _published(folder, study, base) if winners is not None and study.published else {}
    at_equal_seconds = _at_equal_seconds(runs, seconds, labels)
    by_seconds = judge_variants(study, {label: Losses(found) for label, found in at_equal_seconds.items()})
    baseline = labels[0]
    variants: list[dict[str, Any]] = []
    for variant in study.variants:
        label = variant.label
        difference = judged.get(label)
        row = {
            "label": label,
            "mechanism": "+".join(spec.name for spec in variant.mechanism),
            "ablation": variant.ablation,
            "control": variant.control,
            "family": None if label == baseline else family(variant),
            "own_options": {} if variant.ablation else _own_options(variant),
            "options": variant.options(variant.config(base).model),
            "steps": study.steps_of(variant, base),
            "settings": {**({} if winners is None else winners[label].settings), **variant.settings},
            "published": published.get(label),
            "runs": runs[label],
            "loss": asdict(statistics.interval(list(losses[label].by_seed.values()))),
            "difference": None if difference is None else asdict(difference),
            "equal_seconds": {
                "loss": asdict(statistics.interval(list(at_equal_seconds[label].values()))),
                "difference": asdict(by_seconds[label]) if label in by_seconds else None,
            },
            "convergence": _convergence(runs[label], runs[baseline], seconds[label], seconds[baseline]),
            "curve": _curve(runs[label], runs[baseline], seconds[label]),
            "by_position": _by_position(runs[label]),
            "answers": _answers(runs[label]),
            "gates": _gates(runs[label]),
            **_summary(jobs, label),
            **_speed_and_memory(label, None if label in own_pace else costs, base),
        }
        variants.append(row)
    results: dict[str, Any] = {
        "headgate": __version__,
        "recipe": study.recipe,
        "settings": list(study.settings),
        "config": config.to_dict(base),
        "data": _data(study),
        "budget": study.budget,
        "seeds": study.seeds,
        "looks": list(study.looks),
        "looked": study.looked.get(kind, 0),
        "tuned": winners is not None,
        "tuning": None if tuner is None else tuning_results(tuner, tuned),
        "extended": list(study.extended),
        "threads": study.threads,
        "baseline": baseline,
        "tokens_per_run": base.train.tokens,
        "variants": variants,
        "costs": None if costs is None else config.to_dict(costs),
        **judge_papers(folder.papers(), study.variants, variants),
        "mechanisms": _mechanisms(study.variants),
        "commands": reproduction(folder, study, jobs),
        "circumstances": circumstances,
    }
    results["ladder"] = _ladder(folder, study, base, winners, judged, variants)
    results["sight"] = sight(study.variants, base, variants)
    results["verdicts"] = verdicts(results)
    results["headline"], results["conditions"] = headline(results), conditions(results)
    collected: dict[str, Any] = files.finite(results)
    return collected


def main_jobs(folder: StudyFolder, study: Study, base: Config) -> list[Job]:
    """The judged runs that the results are about: tuned, if the study was tuned."""
    return folder.jobs(study, base, study.seeds, main_winners(folder, study, base))


def main_winners(folder: StudyFolder, study: Study, base: Config) -> Winners | None:
    """What won the tuning; None if there was none, or if it is not complete."""
    if not study.tune:
        return None
    tuner = Tuner(folder, study, base, None, None)
    tuned = tuner.tune()
    return {label: one.winner for label, one in tuned.items()} if tuner.complete else None


def _published(folder: StudyFolder, study: Study, base: Config) -> dict[str, dict[str, Any]]:
    """The verdict on each variant as published, beside that on the tuned one, by label."""
    losses = losses_by_label(folder.jobs(study, base, study.seeds))
    judged = judge_variants(study, losses, study.looked.get(PUBLISHED, 0))
    return {
        label: {
            "loss": asdict(statistics.interval(list(of.by_seed.values()))),
            "difference": asdict(judged[label]) if label in judged else None,
        }
        for label, of in losses.items()
    }


def _ladder(
    folder: StudyFolder,
    study: Study,
    base: Config,
    winners: Winners | None,
    judged: Mapping[str, statistics.Difference],
    rows: Sequence[dict[str, Any]],
) -> list[dict[str, Any]] | None:
    """The baseline's loss at each budget; every row gets its price and, if trained, its own trend."""
    for row in rows:
        row |= {"price": None, "trend": None}
    if not study.ladder:
        return None
    losses = {m: losses_by_label(jobs) for m, jobs in folder.ladder(study, base, winners).items()}
    baseline = study.variants[0].label
    of_baseline = {m: list(found[baseline].by_seed.values()) for m, found in losses.items()}
    if all(len(seeds) >= 2 and all(map(math.isfinite, seeds)) for seeds in of_baseline.values()):
        worth = prices(of_baseline, judged, {row["label"]: row["speed"] for row in rows})
        for row in rows[1:]:
            row["price"] = worth[row["label"]]
    chosen = on_ladder(study)
    if len(chosen) > 1:
        of_chosen = replace(study, looks=(), variants=chosen)
        compared = {m: judge_variants(of_chosen, found) for m, found in losses.items()}
        labels = {variant.label for variant in chosen}
        worth_at = {m: prices(of_baseline, found, {}, at=m) for m, found in compared.items()}
        for row in rows[1:]:
            if row["label"] not in labels:
                continue
            row["trend"] = [
                {
                    "multiple": m,
                    "difference": asdict(found[row["label"]]),
                    "price": worth_at[m][row["label"]],
                }
                for m, found in compared.items()
            ]
    return [
        {"multiple": m, "tokens": base.train.tokens * m, **asdict(statistics.interval(seeds))}
        for m, seeds in of_baseline.items()
    ]


def differences_to(
    label: str, results: Mapping[str, Any], kept: Mapping[str, Losses] | None = None
) -> dict[str, statistics.Difference]:
    """Every other variant compared with this one instead of the baseline, by label: over seeds and documents
    if the losses of documents were kept (`documents.read_losses`), else over the seeds alone."""
    alone = {variant["label"]: Losses(_losses(variant["runs"])) for variant in results["variants"]}
    if label not in alone:
        raise HeadgateError(f"the study has no variant {label!r}; {suggestion(label, alone)}")
    kept = kept or {}
    losses = {
        name: kept[name] if name in kept and kept[name].by_seed.keys() == mine.by_seed.keys() else mine
        for name, mine in alone.items()
    }
    families = {variant["label"]: variant["family"] or NAMED for variant in results["variants"]}
    reference = losses.pop(label)
    return compare_losses(reference, losses, families=families)


def _run(job: Job, study_folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = {"seed": job.seed, "folder": str(job.folder.relative_to(study_folder))}
    lines = read_evaluations(job.folder)
    curve = [
        {
            "step": line["step"],
            "tokens": line["tokens"],
            "seconds": line["seconds"],
            "loss": line["validation"]["loss"],
        }
        for line in lines
    ]
    if job.finished:
        summary = RunFolder(job.folder).read_summary()
        loss, documents = judged_loss(job)
        run |= {
            "state": "finished",
            "loss": loss if math.isfinite(loss) else None,
            "documents": None if documents is None else len(documents.loss),
            "judged_tokens": summary["final"]["tokens"] if documents is None else int(documents.tokens.sum()),
            "tokens": summary["tokens"],
            "tokens_per_second": summary["tokens_per_second"],
            "memory_peak": summary["memory_peak"],
            "bits_per_byte": summary["final"]["bits_per_byte"],
            "by_position": summary["final"]["by_position"],
            "answers": summary["final"]["answers"],
            "skipped": summary["skipped"],
            "curve": curve,
            "gates": [{"tokens": line["tokens"], "layers": line["gates"]} for line in lines],
        }
    elif job.failed:
        run |= {"state": "failed", "reason": failure(job.log), "curve": curve}
    else:
        run["state"] = "not run"
    return run


def _losses(runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By seed; a finished run whose loss is not finite has diverged."""
    return {
        run["seed"]: math.inf if run["loss"] is None else run["loss"]
        for run in runs
        if run["state"] == "finished"
    }


def _points(run: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(point["tokens"], math.inf if point["loss"] is None else point["loss"]) for point in run["curve"]]


def _seconds_per_token(
    label: str, runs: Sequence[Mapping[str, Any]], costs: Costs | None, base: Config
) -> float:
    measured = _tokens_per_second(label, costs, base)
    if measured is not None:
        return 1 / measured
    speeds = [run["tokens_per_second"] for run in runs if run["state"] == "finished"]
    return 1 / fmean(speeds) if speeds else math.nan


def _at_equal_seconds(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], seconds: Mapping[str, float], labels: Sequence[str]
) -> dict[str, dict[int, float]]:
    """The loss after as many seconds as the baseline's run takes, by label and seed.

    A slower variant is read there midway, with its learning rate still high; a faster one has finished.
    """
    totals = {run["seed"]: run["tokens"] for run in runs[labels[0]] if run["state"] == "finished"}
    found: dict[str, dict[int, float]] = {label: {} for label in labels}
    for label in labels:
        for run in runs[label]:
            tokens = totals.get(run["seed"], math.nan) * seconds[labels[0]] / seconds[label]
            points = _points(run) if run["state"] == "finished" else []
            if not points or math.isnan(tokens):
                continue
            value = points[-1][1] if tokens >= points[-1][0] else statistics.value_at(points, tokens)
            if value is not None:
                found[label][run["seed"]] = value
    return found


def _convergence(
    runs: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    seconds: float,
    baseline_seconds: float,
) -> dict[str, Any] | None:
    """Tokens and seconds to the loss of the baseline's last evaluation on the same seed, relative to the
    baseline's; None if a seed was `early`, that is, there by its first evaluation."""
    ends = {
        run["seed"]: {"tokens": run["tokens"], "loss": _points(run)[-1][1]}
        for run in baseline
        if run["state"] == "finished" and run["loss"] is not None and run["curve"]
    }
    shared = [run for run in runs if run["state"] == "finished" and run["seed"] in ends]
    if not shared:
        return None
    shares = []
    early = 0
    for run in shared:
        end, points = ends[run["seed"]], _points(run)
        tokens = statistics.reaches(points, end["loss"])
        if tokens is not None:
            shares.append(tokens / end["tokens"])
            early += tokens == points[0][0]
    found: dict[str, Any] = {"reached": len(shares), "of": len(shared), "early": early}
    found |= dict.fromkeys(("relative", "low", "high", "tokens", "seconds"))
    if len(shares) == len(shared) and not early:
        of_tokens = statistics.interval([share - 1 for share in shares])
        found |= {"relative": of_tokens.mean, "low": of_tokens.low, "high": of_tokens.high}
        found["tokens"] = fmean(shares) * fmean(end["tokens"] for end in ends.values())
        found["seconds"] = {
            "relative": fmean(shares) * seconds / baseline_seconds - 1,
            "total": found["tokens"] * seconds,
        }
    return found


def _curve(
    runs: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    """At each evaluation, over the seeds: the mean validation loss and the mean difference to the baseline's
    at the same tokens, with their intervals."""
    finished = [run for run in runs if run["state"] == "finished"]
    theirs = {
        (run["seed"], tokens): loss
        for run in baseline
        if run["state"] == "finished"
        for tokens, loss in _points(run)
    }
    curve = []
    for points in zip(*(_points(run) for run in finished), strict=False):
        tokens = points[0][0]
        pairs = [
            (loss, theirs[run["seed"], tokens])
            for run, (_, loss) in zip(finished, points, strict=True)
            if (run["seed"], tokens) in theirs
        ]
        difference = statistics.interval([ours - other for ours, other in pairs])
        curve.append(
            {
                "tokens": tokens,
                "seconds": tokens * seconds,
                **asdict(statistics.interval([loss for _, loss in points])),
                "difference": asdict(difference),
            }
        )
    return curve


def _by_position(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    finished = [run["by_position"] for run in runs if run["state"] == "finished"]
    found = []
    for bins in zip(*finished, strict=True):
        losses = [math.inf if place["loss"] is None else place["loss"] for place in bins]
        place = {"first": bins[0]["first"], "end": bins[0]["end"]}
        found.append({**place, **asdict(statistics.interval(losses))})
    return found


def _answers(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """For data with answers: the share of right ones over the seeds, overall and by distance."""
    finished = [run["answers"] for run in runs if run["state"] == "finished"]
    if not finished or finished[0] is None:
        return None
    by_distance = []
    for bins in zip(*(answers["by_distance"] for answers in finished), strict=True):
        shares = _share([place["accuracy"] for place in bins])
        by_distance.append({"first": bins[0]["first"], "end": bins[0]["end"], **shares})
    return {"accuracy": _share([answers["accuracy"] for answers in finished]), "by_distance": by_distance}


def _share(values: Sequence[float]) -> dict[str, Any]:
    """The mean of shares with its interval, cut off at 0 and 1."""
    around = asdict(statistics.interval(values))
    ends = {end: min(1.0, max(0.0, around[end])) for end in ("low", "high") if around[end] is not None}
    return around | ends


def _gates(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Means over the seeds: for each head at the end, and for each layer at each evaluation."""
    finished = [run["gates"] for run in runs if run["state"] == "finished"]
    if not finished or not finished[0] or not finished[0][-1]["layers"]:
        return None
    layers = [gate["layer"] for gate in finished[0][-1]["layers"]]
    heads = []
    for n, layer in enumerate(layers):
        each = zip(*(gates[-1]["layers"][n]["by_head"] for gates in finished), strict=True)
        heads.append({"layer": layer, "by_head": [_mean(values) for values in each]})
    moved = []
    for at in zip(*finished, strict=False):
        for n, layer in enumerate(layers):
            mean = _mean([evaluation["layers"][n]["mean"] for evaluation in at])
            moved.append({"tokens": at[0]["tokens"], "layer": layer, "mean": mean})
    return {"heads": heads, "moved": moved}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _summary(jobs: Sequence[Job], label: str) -> dict[str, Any]:
    """What is the same for every seed of a variant."""
    for job in jobs:
        if job.variant.label == label and job.finished:
            summary = RunFolder(job.folder).read_summary()
            names = ("parameters", "mechanism_parameters", "flops_per_token", "sparsity", "kernel_paths")
            return {name: summary[name] for name in names}
    return {"parameters": None, "mechanism_parameters": None, "flops_per_token": None, "sparsity": None}


def _cost(label: str, costs: Costs | None, base: Config) -> Cost | None:
    """At the training context."""
    mine = costs.of(label) if costs else ()
    return next((cost for cost in mine if cost.length == base.train.context), None)


def _tokens_per_second(label: str, costs: Costs | None, base: Config) -> float | None:
    """In training: the baseline's, times the relative speed."""
    own = _cost(label, costs, base)
    if own is None or costs is None:
        return None
    reference = _cost(costs.costs[0].label, costs, base)
    assert reference is not None  # every length is measured for the baseline, whose costs come first
    return reference.tokens_per_second * own.training.ratio


def _speed_and_memory(label: str, costs: Costs | None, base: Config) -> dict[str, Any]:
    """At the training context."""
    cost = _cost(label, costs, base)
    if cost is None:
        return {"tokens_per_second": None, "speed": None, "memory": None}
    return {
        "tokens_per_second": _tokens_per_second(label, costs, base),
        "speed": {"ratio": cost.training.ratio, "low": cost.training.low, "high": cost.training.high},
        "memory": {"ratio": cost.peak_ratio, "bytes": cost.peak_bytes},
    }


def _own_options(variant: Variant) -> dict[str, Any]:
    return {key: value for spec in variant.mechanism for key, value in spec.options.items()}


def _data(study: Study) -> dict[str, Any]:
    request = prepare_request(study)
    return asdict(study.data) | {"request": None if request is None else dict(request)}


def _mechanisms(variants: Sequence[Variant]) -> list[dict[str, str]]:
    """Names and descriptions of the mechanisms compared, including their formulas."""
    names = dict.fromkeys(spec.name for variant in variants for spec in variant.mechanism)
    return [{"name": name, "description": description(MECHANISMS.get(name))} for name in names]


def _circumstances(jobs: Sequence[Job]) -> dict[str, Any]:
    """The versions and machines of the runs, each listed once."""
    found: dict[str, list[dict[str, Any]]] = {"versions": [], "machines": []}
    for job in jobs:
        if job.finished:
            summary = RunFolder(job.folder).read_summary()
            for values, value in zip(found.values(), (summary["versions"], summary["machine"]), strict=True):
                if value not in values:
                    values.append(value)
    return found
