"""Studies: what is trained, what a crash and an interruption do, what grows, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from study_examples import CLAIM, LABEL, asked, write_recipe
from waiting import HANG, wait_until

from headgate import config
from headgate.compare import commands as commands_module
from headgate.compare import results as results_module
from headgate.compare import study as study_module
from headgate.compare.controls import with_controls
from headgate.compare.documents import LOSSES, read_losses
from headgate.compare.jobs import failure
from headgate.compare.results import differences_to, study_results
from headgate.compare.study import run_study
from headgate.compare.suite import run_suite
from headgate.compare.tables import print_against
from headgate.compare.variants import Variant, parse_variants, with_ablations
from headgate.config import Config
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.measure.costs import crossover, step_seconds
from headgate.mechanisms.contract import on_shelf
from headgate.options import StudyOptions
from headgate.report.reading import read_results
from headgate.train.evaluate import read_document_losses
from headgate.train.folder import last_step, read_metrics


def test_variants_are_written_in_words(micro: Config) -> None:
    model = micro.model
    assert [v.label for v in parse_variants([], model)] == ["full", *on_shelf("papers")]
    plain, labelled, ablation, pattern = parse_variants(
        ["sparse-geometric:gate=log@log <b>", "dynamic-sparse:no-gate", "local:window=3+full"], model
    )
    assert plain.mechanism == (MechanismSpec("full"),)
    assert (labelled.label, labelled.mechanism[0].options) == ("log <b>", {"gate": "log"})
    assert (ablation.ablation, ablation.mechanism[0].options) == ("no-gate", {"gate": "open"})
    assert [spec.name for spec in pattern.mechanism] == ["local", "full"]
    assert Variant.parse("dynamic-sparse:gate=open").ablation == "no-gate"
    assert parse_variants(["local", "full@plain"], model)[0].label == "plain"
    assert with_ablations("head-gated") == (
        "head-gated", "head-gated:no-gate", "head-gated:local-only", "head-gated:global-only"
    )  # fmt: skip


def test_a_variant_has_settings_of_its_own(data: Path, micro: Config, tmp_path: Path) -> None:
    """Here three that train on long and short sequences: on as many tokens, and judged by the same ones."""
    names = [
        "full:train.first_context=6@growing",
        "full:train.context=12,train.batch_size=2@short",
        "near-far:window=4,model.rope_theta=50",
    ]
    options = StudyOptions(
        recipe=str(write_recipe(micro, tmp_path)), seeds="2", tune=2, cost=False, controls=False,
        space="train.first_context=[6,24]", ladder="0.5,2", ladder_variants=("growing", "short"),
    )  # fmt: skip
    out = tmp_path / "study"
    assert run_study(names, data, out, ["train.steps=8"], options)
    rows = {row["label"]: row for row in read_results(out)["variants"]}
    growing, short, own_base = (rows[label] for label in list(rows)[1:])
    assert list(rows)[3] == "near-far:window=4,model.rope_theta=50"
    assert [row["steps"] for row in rows.values()] == [8, 8, 32, 8]
    assert {run["tokens"] for row in rows.values() for run in row["runs"]} == {8 * 96}
    assert {run["judged_tokens"] for row in rows.values() for run in row["runs"]} == {
        rows["full"]["runs"][0]["judged_tokens"]
    }
    assert short["difference"]["documents"] == growing["difference"]["documents"] > 2
    assert growing["settings"] == {"train.first_context": 6}  # it is not tuned over what it sets itself
    assert short["settings"]["train.context"] == 12
    assert own_base["own_options"] == {"window": 4}
    assert [at["multiple"] for at in growing["trend"]] == [0.5, 1, 2]
    assert short["trend"][1]["price"]["tokens"] == short["price"]["tokens"]
    tried = {one["label"]: one["trials"] for one in read_results(out)["tuning"]["variants"]}
    assert all(any(trial["losses"][0] for trial in trials) for trials in tried.values())
    assert [len(trials) for trials in tried.values()] == [2, 1, 2, 2]  # growing sets all that is tuned
    trained = config.load(Config, out / own_base["runs"][0]["folder"] / "config.json")
    assert trained.model.rope_theta == 50
    ladder = config.load(Config, next(out.glob("ladder/2/*/growing/seed-0/config.json")))
    assert (ladder.train.steps, ladder.train.first_context) == (16, 6)
    command = read_results(out)["commands"]["compare"]
    assert [Variant.parse(word).meaning for word in command[2:5]] == [Variant.parse(n).meaning for n in names]
    assert run_study(names, data, out, ["train.steps=8"], options)
    with pytest.raises(HeadgateError, match=r"'growing' meaning .* train.first_context=6, not .*=12"):
        run_study(["full:train.first_context=12@growing"], data, out, ["train.steps=8"], options)


def test_a_variant_with_settings_is_no_control_and_meets_no_claim(micro: Config) -> None:
    alone = "local:window=0,train.learning_rate=0.1@slow"
    assert len(with_controls(parse_variants([alone], micro.model), micro)) == 4
    assert Variant.parse("dynamic-sparse:no-gate").ablation == "no-gate"
    assert Variant.parse("dynamic-sparse:no-gate,train.betas=[0.9,0.9]").ablation is None
    assert Variant.parse("local:train.betas=[0.9,0.9]").words == ("train.betas=[0.9, 0.9]",)
    assert Variant.parse("local:train.batch_size=2").own_pace
    assert not Variant.parse("local:train.learning_rate=0.1,model.rope_theta=50").own_pace


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "full:train.steps=5",
            "sets train.steps, which is the study's budget, the same for all; leave it out",
        ),
        ("full:model.mechanism=local", "sets model.mechanism, which is what it is named by"),
        ("local:train.contxt=5", "unknown key 'train.contxt'; did you mean 'context'"),
        ("local:train.context=900000", "too few for a window of 900000"),
    ],
)
def test_settings_that_a_variant_cannot_have_are_refused(
    name: str, message: str, data: Path, micro: Config, tmp_path: Path
) -> None:
    options = StudyOptions(recipe=str(write_recipe(micro, tmp_path)))
    with pytest.raises(HeadgateError) as error:
        run_study([name], data, tmp_path / "study", [], options)
    assert message in str(error.value)
    assert not (tmp_path / "study").exists()
    with pytest.raises(HeadgateError):
        run_suite([name], tmp_path / "suite")
    assert not (tmp_path / "suite").exists()


def test_folders_of_variants_are_safe_and_their_own() -> None:
    folders = [
        Variant(label, ()).folder for label in ("a b", "a/b", "../a", "a-b", "<i>", "full", "..", "a+b")
    ]
    assert len(set(folders)) == len(folders)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._=+-") for name in folders)
    assert all(name.strip(".") for name in folders)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["dynamic-spares"], "unknown mechanism 'dynamic-spares'; did you mean 'dynamic-sparse'?"),
        (["local:windw=3"], "local has no option 'windw'; did you mean 'window'?"),
        (["dynamic-sparse:nogate"], "dynamic-sparse has no ablation 'nogate'; did you mean 'no-gate'?"),
        (["local", "local"], "variant 'local' is named twice"),
        (["local@"], "variant 'local@' has an empty label"),
    ],
)
def test_bad_names_are_refused(names: list[str], message: str, micro: Config) -> None:
    with pytest.raises(HeadgateError) as error:
        parse_variants(names, micro.model)
    assert message in str(error.value)


def test_a_mechanism_without_ablations_cannot_be_ablated() -> None:
    with pytest.raises(HeadgateError, match="full has no ablations"):
        with_ablations("full")


def test_every_run_is_trained_and_in_the_results(study: Path) -> None:
    results = json.loads((study / "results.json").read_text())
    assert [v["label"] for v in results["variants"]] == ["full", "dynamic-sparse", "<b>log</b> & co"]
    for variant in results["variants"]:
        losses = [run["loss"] for run in variant["runs"]]
        for run in variant["runs"]:
            lines = [line for line in read_metrics(study / run["folder"]) if "validation" in line]
            kept = read_document_losses(study / run["folder"])
            assert kept is not None
            assert run["loss"] == pytest.approx(kept.loss.sum() / kept.tokens.sum())
            assert (run["documents"], run["judged_tokens"]) == (len(kept.loss), kept.tokens.sum())
            assert [p["loss"] for p in run["curve"]] == [line["validation"]["loss"] for line in lines]
        assert variant["loss"]["mean"] == pytest.approx(sum(losses) / 2)
        ends = [run["curve"][-1]["loss"] for run in variant["runs"]]
        assert variant["curve"][-1]["mean"] == pytest.approx(sum(ends) / 2)
        assert variant["memory"]["ratio"] > 0
        assert variant["speed"]["low"] <= variant["speed"]["ratio"] <= variant["speed"]["high"]
    full, sparse, _ = results["variants"]
    pairs = [ours["loss"] - theirs["loss"] for ours, theirs in zip(sparse["runs"], full["runs"], strict=True)]
    assert sparse["difference"]["mean"] == pytest.approx(sum(pairs) / 2)
    assert sparse["difference"]["documents"] == sparse["runs"][0]["documents"] > 2
    assert [v["tokens_per_second"] / full["tokens_per_second"] for v in results["variants"]] == pytest.approx(
        [v["speed"]["ratio"] for v in results["variants"]]
    )
    assert full["difference"] is None
    assert full["speed"]["ratio"] == 1.0
    assert len(sparse["gates"]["heads"]) == 2
    assert len(sparse["gates"]["heads"][0]["by_head"]) == 2
    assert full["gates"] is None
    table = (study / "results.md").read_text()
    assert table.count("\n| ") == 4
    assert r"\<b\>log\</b\> \& co are not shown" in table, "a label is text in Markdown too"
    assert "<b>" not in table


def test_variants_share_data_and_weights(study: Path) -> None:
    """Before any update, the training loss is that of the shared weights on the shared batch."""
    first = {}
    for name in ("full", "dynamic-sparse"):
        first[name] = [read_metrics(study / "runs" / name / f"seed-{seed}")[0]["loss"] for seed in (0, 1)]
    assert first["full"][0] != first["full"][1]
    assert first["full"] == pytest.approx(first["dynamic-sparse"], abs=0.02)


def test_costs_are_those_of_the_mechanisms(study: Path) -> None:
    costs = json.loads((study / "costs.json").read_text())
    by = {(cost["label"], cost["length"]): cost for cost in costs["costs"]}
    assert {length for _, length in by} == {24, 96}
    # fp32 keys and values of 1 head of 8 in 2 layers; the window of 6 keeps 6 keys for the next query.
    assert by["full", 96]["cache_bytes"] == 96 * 2 * 2 * 8 * 4
    assert by["dynamic-sparse", 96]["cache_bytes"] == 6 * 2 * 2 * 8 * 4
    assert all(cost["peak_bytes"] > 0 and cost["training"]["seconds"] > 0 for cost in costs["costs"])
    assert by["full", 24]["sequences"] == 4
    assert by["full", 96]["sequences"] == 1


def test_a_finished_study_trains_nothing_again(study: Path, micro: Config, data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*/metrics.jsonl")}
    costs = (study / "costs.json").read_text()
    assert len(before) == 6
    assert run_study(*asked(study, data))
    assert {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*/metrics.jsonl")} == before
    assert (study / "costs.json").read_text() == costs


def begun(study: Path, out: Path, left: list[str]) -> Path:
    """A copy of the study in which these runs have yet to begin."""
    shutil.copytree(study, out)
    for name in left:
        shutil.rmtree(out / "runs" / name)
    for name in ("results.json", "results.md"):
        (out / name).unlink()
    return out


def test_interrupted_and_resumed_it_is_the_same(
    study: Path, micro: Config, data: Path, tmp_path: Path
) -> None:
    out = begun(study, tmp_path / "study", left=["full/seed-1", "dynamic-sparse/seed-0"])
    names, _, _, settings, options = asked(out, data)
    words = ["compare", *names, "--recipe", options.recipe, "--data", str(data), "--out", str(out)]
    words += [
        "--seeds",
        options.seeds,
        "--lengths",
        options.lengths,
        "--cost-seconds",
        str(options.cost_seconds),
    ]
    words += ["--claims", options.claims, "--no-controls", "--jobs", "1", *settings]
    process = subprocess.Popen(
        [sys.executable, "-m", "headgate", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wait_until(
        lambda: any(last_step(out / "runs" / run) for run in ("full/seed-1", "dynamic-sparse/seed-0")),
        process,
    )
    process.send_signal(signal.SIGSTOP)  # it starts no further run before it is told to stop
    with pytest.raises(HeadgateError, match="is being compared by another process; wait for it or stop it"):
        run_study(names, data, out, settings, options)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 130, errors
    assert "the same command resumes them" in errors
    assert "Traceback" not in errors
    assert len(list(out.glob("runs/*/*/summary.json"))) < 6
    assert run_study(names, data, out, settings, options)
    assert settled(study_results(out), out) == settled(study_results(study), study)


def settled(results: dict[str, Any], folder: Path) -> Any:
    """The results without what the machine has a say in, and without where they lie."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in results_module.MEASURED}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return json.loads(json.dumps(strip(results)).replace(str(folder), "STUDY"))


def test_a_crash_is_reported_and_the_rest_goes_on(study: Path, data: Path, tmp_path: Path) -> None:
    out = begun(study, tmp_path / "study", left=["full/seed-1", "dynamic-sparse/seed-1"])
    broken = out / "runs/dynamic-sparse/seed-1"
    names, _, _, settings, options = asked(out, data)
    broken.mkdir()
    (broken / "notes.txt").write_text("in the way")
    assert not run_study(names, data, out, settings, options)
    results = read_results(out)
    assert [run["state"] for run in results["variants"][0]["runs"]] == ["finished", "finished"]
    assert [run["state"] for run in results["variants"][1]["runs"]] == ["finished", "failed"]
    reason = results["variants"][1]["runs"][1]["reason"]
    assert "holds 'notes.txt' but no config.json" in reason
    assert results["variants"][1]["difference"]["verdict"] == "not tested"
    assert "1 of 2 seeds failed" in (out / "results.md").read_text()

    (broken / "notes.txt").unlink()
    options = StudyOptions(**{**vars(options), "cost": False})
    assert run_study([*names, "local"], data, out, settings, options)  # repaired, and with one more
    results = study_results(out)
    assert [[run["state"] for run in v["runs"]] for v in results["variants"]] == [["finished"] * 2] * 4


def test_a_study_is_not_mixed_with_another(study: Path, micro: Config, data: Path, tmp_path: Path) -> None:
    names, _, _, settings, options = asked(study, data)
    for other_settings, other_options, message in [
        ((*settings, "train.steps=9"), options, "train.steps=8, not 9"),
        (settings, StudyOptions(**{**vars(options), "budget": "seconds"}), "budget=tokens, not seconds"),
    ]:
        with pytest.raises(HeadgateError, match="is a study with") as error:
            run_study(names, data, study, other_settings, other_options)
        assert message in str(error.value)
    with pytest.raises(HeadgateError, match="'dynamic-sparse' meaning"):
        run_study(["local@dynamic-sparse"], data, study, settings, options)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(HeadgateError, match=r"is in use but has no study\.json"):
        run_study(names, data, tmp_path, settings, options)
    with pytest.raises(HeadgateError, match=r"has no study\.json"):
        study_results(tmp_path)


def test_what_no_run_could_train_on_is_refused_before_the_first(
    data: Path, micro: Config, tmp_path: Path
) -> None:
    names, _, out, settings, _ = asked(tmp_path / "out", data)
    options = StudyOptions(recipe=str(write_recipe(micro, tmp_path)))  # the shared one may not be there yet
    for setting, message in [
        ("model.vocab_size=9", "model.vocab_size=9 is too small for the data"),
        ("train.context=99999999", "99999999"),
    ]:
        with pytest.raises(HeadgateError, match=message):
            run_study(names, data, out, [*settings, setting], options)
        assert not out.exists()
    with pytest.raises(HeadgateError, match="cost_seconds=0 is no time to measure"):
        StudyOptions(cost_seconds=0)


def test_the_page_names_the_commands_that_make_it_again() -> None:
    options = commands_module._prepare_options
    text = {"tokenizer": "bpe:9", "text_column": "text", "splits": [80, 10, 10], "dedup": False}
    assert options(text | {"max_tokens": None, "end_of_text": None}) == ["--tokenizer", "bpe:9"]
    asked_for = {
        "text_column": "body",
        "splits": [8, 1, 1],
        "dedup": True,
        "max_tokens": 7,
        "end_of_text": "!",
    }
    assert options(text | asked_for | {"end_of_text": "!"}) == [
        "--tokenizer", "bpe:9", "--text-column", "body", "--splits", "8/1/1",
        "--max-tokens", "7", "--end-of-text", "!", "--dedup",
    ]  # fmt: skip
    assert options({"tokenizer": "recall", "splits": [80, 10, 10], "keys": 8}) == []


def test_any_variant_can_be_what_others_are_compared_with(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = study_results(study)
    found = differences_to("dynamic-sparse", results)
    assert list(found) == ["full", LABEL]
    forward = results["variants"][1]["difference"]
    assert found["full"].mean == pytest.approx(-forward["mean"])
    print_against("dynamic-sparse", found)
    assert f"{found['full'].mean:+.4f}" in capsys.readouterr().out
    kept = read_losses(study / LOSSES)
    as_judged = differences_to("full", results, kept)
    for row in results["variants"][1:]:
        assert asdict(as_judged[row["label"]]) == row["difference"]
    over_both = differences_to("dynamic-sparse", results, kept)["full"]
    assert over_both.documents is not None
    assert found["full"].documents is None
    assert (over_both.mean, over_both.low) == pytest.approx((-forward["mean"], -forward["high"]))
    with pytest.raises(HeadgateError, match="no variant 'dynamic'; did you mean 'dynamic-sparse'"):
        differences_to("dynamic", results)


def test_own_claims_stay_with_the_study(study: Path, tmp_path: Path) -> None:
    def papers(results: dict[str, Any]) -> list[str]:
        return list(dict.fromkeys(row["claim"]["paper"] for row in results["claims"]))

    assert papers(read_results(study)) == ["dynamic-sparse", "sparse-geometric", "mine"]
    (row,) = (row for row in study_results(study)["claims"] if row["claim"]["paper"] == "mine")
    assert (row["claim"]["row"], row["label"]) == (CLAIM["row"], LABEL)
    assert (
        "| mine | \\<i\\>Ours\\</i\\> | loss | 4.90 ± 0.01 against 5.00" in (study / "papers.md").read_text()
    )
    command = read_results(study)["commands"]["compare"]
    assert command[command.index("--claims") + 1] == f"{study.name}/claims.json"


def test_bad_claims_are_refused_before_anything_is_trained(data: Path, micro: Config, tmp_path: Path) -> None:
    names, _, out, settings, _ = asked(tmp_path / "out", data)
    options = StudyOptions(recipe=str(write_recipe(micro, tmp_path)))
    for claims, message in [(CLAIM | {"variant": "locl"}, "did you mean 'local'"), ({}, "is missing")]:
        path = tmp_path / "bad.json"
        path.write_text(json.dumps({"paper": "mine", "claims": [claims]}))
        with pytest.raises(HeadgateError, match=message):
            run_study(names, data, out, settings, StudyOptions(**{**vars(options), "claims": str(path)}))
        assert not out.exists()


def test_equal_seconds_give_slower_variants_fewer_steps(
    data: Path, micro: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = step_seconds(
        {name: Variant.parse(name).config(micro) for name in ("full", "sparse-geometric")}, 1
    )
    assert list(measured) == ["full", "sparse-geometric"]
    assert min(measured.values()) > 0
    monkeypatch.setattr(study_module, "step_seconds", lambda *_: {"full": 0.5, "sparse-geometric": 1.6})
    out = tmp_path / "study"
    options = StudyOptions(
        recipe=str(write_recipe(micro, tmp_path)), seeds="1", cost=False, budget="seconds", controls=False
    )
    assert run_study(["sparse-geometric"], data, out, ["train.steps=16", "train.context=48"], options)
    results = read_results(out)
    steps = {v["label"]: v["steps"] for v in results["variants"]}
    assert steps == {"full": 16, "sparse-geometric": 5}
    assert results["variants"][1]["runs"][0]["tokens"] == steps["sparse-geometric"] * 4 * 48
    assert "at equal seconds" in results["conditions"]


@pytest.mark.parametrize(
    ("ratio", "low", "high", "between"),
    [(0.75, 0.7, 0.8, [4, 8]), (2.0, 1.9, 2.1, [8])],
)
def test_at_equal_seconds_speeds_count_by_their_ratio(
    study: Path, tmp_path: Path, ratio: float, low: float, high: float, between: list[int]
) -> None:
    """Seconds of different rounds of measuring are not compared."""
    out = tmp_path / "study"
    shutil.copytree(study, out)
    costs = json.loads((out / "costs.json").read_text())
    context = json.loads((out / "config.json").read_text())["train"]["context"]
    for cost in costs["costs"]:
        if cost["label"] == LABEL and cost["length"] == context:
            cost["training"] = {"seconds": 1e3, "ratio": ratio, "low": low, "high": high}
    costs.pop("digest")  # as one who edits it by hand would
    (out / "costs.json").write_text(json.dumps(costs))
    variant = next(v for v in study_results(out)["variants"] if v["label"] == LABEL)
    points = [point for run in variant["runs"] for point in run["curve"] if point["step"] in between]
    expected = sum(point["loss"] for point in points) / len(points)
    assert variant["equal_seconds"]["loss"]["mean"] == pytest.approx(expected)


def test_a_loss_reached_before_the_first_evaluation_says_nothing_of_when() -> None:
    def run(*losses: float) -> dict[str, Any]:
        curve = [{"tokens": 100 * (n + 1), "loss": loss} for n, loss in enumerate(losses)]
        return {
            "state": "finished",
            "seed": 0,
            "loss": losses[-1],
            "tokens": 100 * len(losses),
            "curve": curve,
        }

    def converged(*losses: float) -> dict[str, Any]:
        found = results_module._convergence([run(*losses)], [run(6.0, 5.0)], 1.0, 1.0)
        assert found is not None
        return found

    assert converged(5.5, 4.5)["relative"] == pytest.approx(-0.25)
    assert (converged(4.9, 4.5)["relative"], converged(4.9, 4.5)["early"]) == (None, 1)
    assert (converged(5.9, 5.5)["relative"], converged(5.9, 5.5)["reached"]) == (None, 0)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("step 3\nheadgate: no room\n\n", "no room"),
        ("step 3\nSegmentation fault\n", "Segmentation fault"),
        ("headgate (rank 2): no room\nTraceback:\n=====\nheadgate FAILED\n  rank 0\n=====\n", "no room"),
        ("", "it wrote nothing"),
    ],
)
def test_why_a_run_failed(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert failure(tmp_path / "log") == reason


def test_crossovers_are_found_by_measuring() -> None:
    asked_for = []

    def measure(length: int) -> float:
        asked_for.append(length)
        return length / 1000

    wins_at, not_at = crossover({256: 0.3, 1024: 1.02, 4096: 4.1}, measure)
    assert wins_at is not None
    assert not_at is not None
    assert not_at <= 1000 <= wins_at <= 1.25 * not_at
    assert asked_for
    assert crossover({256: 0.3, 1024: 0.9}, measure) == (None, 1024)
    assert crossover({256: 1.3, 1024: 1.9}, measure) == (256, None)
    assert crossover({256: 1.3, 1024: 0.9, 2048: 1.1, 4096: 2}, lambda length: 2.0)[1] == 1024


def test_a_killed_study_takes_its_runs_with_it(data: Path, micro: Config, tmp_path: Path) -> None:
    out = tmp_path / "study"
    words = ["compare", "local", "--recipe", str(write_recipe(micro, tmp_path)), "--data", str(data)]
    words += [
        "--out",
        str(out),
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--no-cost",
        "--no-controls",
        "train.steps=100000",
    ]
    process = subprocess.Popen([sys.executable, "-m", "headgate", *words], stderr=subprocess.DEVNULL)
    run = out / "runs/full/seed-0"
    wait_until(lambda: last_step(run) >= 2, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.is_file():
        pytest.skip("this system does not tell a process's children; not run")
    (child,) = map(int, children.read_text().split())
    process.kill()
    process.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{child}"))
    assert list(run.glob("checkpoints/step-*"))  # it saved before it ended
