"""The headline: short however many variants there are, and no share of next to nothing."""

from typing import Any

from headgate.compare.tables import conditions, headline


def study(*verdicts: str, relative: float | None = 0.05) -> dict[str, Any]:
    def variant(number: int, verdict: str) -> dict[str, Any]:
        return {"label": f"v{number}", "difference": {"verdict": verdict, "mean": 0.25, "relative": relative}}

    others = [variant(number, verdict) for number, verdict in enumerate(verdicts)]
    return {"variants": [{"label": "full", "difference": None, "parameters": 1_250_000}, *others]}


def test_few_variants_are_all_named() -> None:
    words = headline(study("better", "no difference shown", "worse", "no difference shown", "not tested"))
    assert words == (
        "V0 (+5.0% loss) is better than full; v2 (+5.0% loss) is worse than full; v1 and v3 are not shown to "
        "differ from full; v4 could not be tested: that takes two seeds of both."
    )


def test_of_many_the_first_are_named_and_the_rest_counted() -> None:
    words = headline(study(*["worse"] * 9, *["no difference shown"] * 19))
    assert words == (
        "V0 (+5.0% loss), v1 (+5.0% loss), v2 (+5.0% loss) and 6 others are worse than full; 19 others are "
        "not shown to differ from full."
    )
    assert headline(study(*["no difference shown"] * 28)) == "28 variants are not shown to differ from full."


def test_no_share_of_a_loss_next_to_nothing() -> None:
    assert headline(study("worse", relative=1029.3)) == "V0 (+0.2500 loss) is worse than full."
    assert headline(study("worse", relative=None)) == "V0 (+0.2500 loss) is worse than full."


def test_the_conditions_name_the_recipe() -> None:
    results = study() | {"recipe": "some/recipe.json", "budget": "tokens", "seeds": 5, "tokens_per_run": 4096}
    results["config"] = {"train": {"context": 1024}}
    assert conditions(results) == (
        "Recipe recipe.json, 1.25M parameters, context 1,024, 4,096 training tokens a run, 5 seeds, "
        "at equal tokens"
    )
