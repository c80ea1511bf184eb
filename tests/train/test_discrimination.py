"""The tasks tell mechanisms apart, in the shortest form that shows it: seconds of training.

docs/findings/tasks.md has the whole of it.
"""

from dataclasses import replace
from pathlib import Path

from headgate import config
from headgate.data.tasks import parse_task
from headgate.data.tasks.writing import prepare_task
from headgate.recipes import get_recipe
from headgate.train.evaluate import evaluate_run
from headgate.train.loop import train

BATCH = 32


def accuracies(source: str, steps: int, home: Path, models: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """What models of the recipe `task` with these settings reach on the test split."""
    source = f"{source},samples={steps * BATCH},held_out=200"
    task = parse_task(source)
    assert task is not None
    prepare_task(task, source, home / "data")
    found = {}
    for name, settings in models.items():
        base = config.override(get_recipe("task"), [f"model.vocab_size={task.vocab_size}", *settings])
        schedule = replace(
            base.train, context=task.context, steps=steps, batch_size=BATCH, evaluate_every=steps
        )
        train(replace(base, train=schedule), home / "data", home / name)
        found[name] = evaluate_run(home / name, split="test")["answers"]["accuracy"]
    return found


def test_one_layer_looks_a_pair_up_only_with_shifted_keys(tmp_path: Path) -> None:
    one = "model.n_layers=1"
    models = {"full": (one,), "shifted": (one, "model.mechanism=shifted")}
    found = accuracies("mqar:length=32,pairs=4,keys=8,values=8,filler=4", 130, tmp_path, models)
    assert found["full"] < 0.35  # a guess among the four values that came would be 0.25
    assert found["shifted"] > 0.95


def test_a_window_is_at_chance_beyond_its_reach_and_like_full_within(tmp_path: Path) -> None:
    """Each answer stands eleven tokens back; two layers with a window of 4 see eight."""
    models: dict[str, tuple[str, ...]] = {"full": ()}
    models |= {str(window): (f"model.mechanism=local:window={window}",) for window in (4, 16)}
    found = accuracies("compress:tokens=11,alphabet=8", 130, tmp_path, models)
    assert found["full"] > 0.95
    assert found["16"] > 0.95
    assert abs(found["4"] - 1 / 8) < 0.03
