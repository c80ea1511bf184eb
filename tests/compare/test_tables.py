"""The headline: short however many variants there are, and no share of next to nothing."""

from typing import Any

from headgate.compare.tables import _fitting, conditions, headline, verdicts


def study(*verdicts: str, relative: float | None = 0.05) -> dict[str, Any]:
    def variant(number: int, verdict: str) -> dict[str, Any]:
        difference = {"verdict": verdict, "mean": 0.25, "relative": relative, "detectable": 0.0213}
        row = {"label": f"v{number}", "control": False, "published": None}
        return row | {"difference": difference | {"documents": 40}}

    others = [variant(number, verdict) for number, verdict in enumerate(verdicts)]
    control = variant(99, "worse") | {"control": True}
    baseline = {"label": "full", "control": False, "difference": None, "parameters": 1_250_000}
    return {"tuned": False, "tuning": None, "variants": [baseline, *others, control]}


def test_few_variants_are_all_named() -> None:
    words = verdicts(study("better", "no difference shown", "worse", "no difference shown", "not tested"))
    assert words == (
        "Untuned: v0 (+5.0% loss) is better than full; v2 (+5.0% loss) is worse than full; v1 and v3 are "
        "not shown to differ from full (differences of 0.021 nats or more would have been seen); v4 could "
        "not be tested: that takes two seeds of both."
    )


def test_of_many_the_first_are_named_and_the_rest_counted() -> None:
    words = verdicts(study(*["worse"] * 9, *["no difference shown"] * 19))
    assert words == (
        "Untuned: v0 (+5.0% loss), v1 (+5.0% loss), v2 (+5.0% loss) and 6 others are worse than full; 19 "
        "others are not shown to differ from full (differences of 0.021 nats or more would have been seen)."
    )
    assert verdicts(study(*["no difference shown"] * 28)).startswith(
        "Untuned: 28 variants are not shown to differ"
    )
    assert verdicts(study("same by construction")) == "Untuned: v0 is the same as full by construction."


def test_no_share_of_a_loss_next_to_nothing() -> None:
    assert verdicts(study("worse", relative=1029.3)) == "Untuned: v0 (+0.2500 loss) is worse than full."
    assert verdicts(study("worse", relative=None)) == "Untuned: v0 (+0.2500 loss) is worse than full."


def test_the_conditions_name_the_recipe() -> None:
    results = study() | {
        "recipe": "some/recipe.json",
        "budget": "tokens",
        "seeds": 5,
        "looks": [],
        "extended": [],
        "tokens_per_run": 4096,
        "costs": None,
        "circumstances": {"machines": []},
    }
    results["config"] = {"train": {"context": 1024}}
    assert conditions(results) == (
        "Recipe recipe.json, 1.25M parameters, context 1,024, 4,096 training tokens per run, 5 seeds, "
        "40 documents, at equal tokens, untuned"
    )
    assert "up to 5 seeds, planned looks after 3 and 5, 40" in conditions(results | {"looks": [3, 5]})
    assert "5 seeds, extended from 3 after its results were known" in conditions(results | {"extended": [3]})


def test_a_study_that_cannot_tell_says_so_first() -> None:
    checks = [{"what": "no attention", "passed": False, "words": "full is not shown to beat no attention"}]
    sight = {"can_tell": False, "checks": checks, "detectable": 0.1, "advice": "To change that: add seeds."}
    words = headline({"tuned": False, "sight": sight, "verdicts": "V0 is better than full."})
    assert words == (
        "This untuned study cannot tell: full is not shown to beat no attention. To change that: add seeds."
    )
    assert headline({"sight": sight | {"can_tell": None}, "verdicts": "As it is."}) == "As it is."


def test_a_tuned_study_gives_both_verdicts() -> None:
    results = study("no difference shown", "worse") | {"tuned": True, "tuning": {"trials": 8}}
    for variant in results["variants"]:
        verdict = variant["difference"] and variant["difference"] | {"verdict": "better"}
        variant["published"] = {"difference": verdict, "loss": {}}
    words = verdicts(results)
    assert words.startswith("Tuned alike: v1 (+5.0% loss) is worse than full; v0 is not shown to differ")
    assert words.endswith("As published, untuned: v0 (+5.0% loss) and v1 (+5.0% loss) are better than full.")


def test_a_narrow_terminal_gets_the_columns_that_matter() -> None:
    columns = ["variant", "loss, untuned", "difference", "p", "verdict, untuned", "speed", "parameters"]
    widths = [14, 15, 17, 5, 19, 5, 9]
    assert _fitting(columns, widths, 200) == list(range(7))
    assert [columns[n] for n in _fitting(columns, widths, 80)] == [
        "variant", "loss, untuned", "difference", "verdict, untuned", "speed",
    ]  # fmt: skip
    assert _fitting(columns, widths, 5) == [0]  # a name at least, however it wraps
