"""Commands for whole comparisons: compare, ablate, suite and report; status and cancel while they run."""

import sys
from pathlib import Path

from headgate.cli.shelves import check_names
from headgate.errors import HeadgateError
from headgate.options import EngineOptions, StudyOptions, SuiteOptions


def compare(
    names: tuple[str, ...] = (),
    /,
    *,
    data: str,
    out: str,
    override: tuple[str, ...] = (),
    options: StudyOptions = StudyOptions(),  # noqa: B008 - frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
) -> None:
    """Train mechanisms under equal conditions over several seeds, measure their cost, and write a report.

    Args:
        names: Mechanisms, such as dynamic-sparse, sparse-geometric:gate=log, local+full or ./mine.py:mine; a
            label of your own may follow after @. An option with a dot changes the recipe for this variant
            alone, as in full:train.first_context=512@growing. Default: the four papers' mechanisms. The
            baseline, full attention, is always added.
        data: A folder written by `headgate prepare`.
        out: The study folder. Run the same command again to resume; more names or seeds extend the study.
        override: Change a setting of the recipe, as in train.steps=100; can also be given as a bare word.

    Examples:
        headgate compare --data data --out study
        headgate compare local:window=64 dynamic-sparse --data data --out study
        headgate compare ./mine.py:mine --data data --out mine train.steps=4000
    """
    check_names(names, options.recipe)
    from headgate.compare.study import run_study

    complete = run_study(names, data, out, override, options, engine)
    if not options.dry_run:
        _show_study(out, complete=complete)


def ablate(
    name: str,
    /,
    *,
    data: str,
    out: str,
    override: tuple[str, ...] = (),
    options: StudyOptions = StudyOptions(),  # noqa: B008 - frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
) -> None:
    """Compare a mechanism with each of its ablations and the baseline, as `headgate compare` does.

    Args:
        name: The mechanism; its options, if any, apply to every ablation too.
        data: A folder written by `headgate prepare`.
        out: The study folder. Run the same command again to resume.
        override: Change a setting of the recipe, as in train.steps=100; can also be given as a bare word.
    """
    check_names([name], options.recipe)
    from headgate.compare.study import run_study
    from headgate.compare.variants import with_ablations

    complete = run_study(with_ablations(name), data, out, override, options, engine)
    if not options.dry_run:
        _show_study(out, complete=complete)


def status(folder: str, /, *, json: bool = False, watch: float | None = None) -> None:
    """Show how far a study has come: what runs where, what is left, and what failed.

    Args:
        folder: The study folder, local or shared with a cluster.
        json: Print everything as JSON.
        watch: Print it again at this interval in seconds, until nothing is left to do.
    """
    from headgate.compare.status import print_status, status_dict, study_status, watch_status

    if json:
        from json import dumps

        print(dumps(status_dict(study_status(folder)), indent=2))
    elif watch is None:
        print_status(study_status(folder))
    else:
        watch_status(folder, watch)


def cancel(folder: str, /, *, ray_address: str = "auto") -> None:
    """Stop the runs of a study wherever they are; `headgate compare` resumes them.

    Args:
        folder: The study folder.
        ray_address: Where the Ray cluster is, if runs are on one.
    """
    from headgate.compare.status import cancel_study

    stopped = cancel_study(folder, ray_address)
    print(f"stopping {len(stopped)} runs" if stopped else "nothing was running or queued")


def report(folder: str, /, *, against: str | None = None, publish: str | None = None) -> None:
    """Rewrite the page and tables of a study or suite from what its folder holds.

    Args:
        folder: The study folder, or one written by --publish, or a results.json, from which alone the page is
            then made; or the folder of a suite, or one written by --publish.
        against: The label of a variant; also print a table that compares every other variant with it.
        publish: Also write files small enough to commit into this folder: the results without each run's
            curve, and the page's figures as SVG.
    """
    from headgate.compare.folder import StudyFolder
    from headgate.compare.results import write_results
    from headgate.files import named

    is_suite = any((Path(folder) / name).is_file() for name in ("plan.json", "suite.json"))
    if is_suite and against is not None:
        raise HeadgateError(f"--against {against} is for studies, but this is a suite; leave it out")
    if publish is not None:
        named(publish, "--publish")
    if is_suite:
        _show_suite(folder)
    else:
        if not Path(folder).is_file() and StudyFolder(folder).begun:
            write_results(folder)
        _show_study(folder, against=against)
    if publish is not None:
        from headgate.report.publish import publish_study, publish_suite

        written = (publish_suite if is_suite else publish_study)(folder, publish)
        print(f"{len(written)} files are in {publish}")


def _show_study(folder: str, *, complete: bool = True, against: str | None = None) -> None:
    """Make the page of a study's results and print them; exit with 1 if a run failed."""
    from headgate.compare.documents import LOSSES, read_losses
    from headgate.compare.results import differences_to
    from headgate.compare.tables import print_against, print_results
    from headgate.report.page import write_page
    from headgate.report.reading import read_results
    from headgate.report.verdict import answer_sentence

    results = read_results(folder)
    differences = None
    if against is not None:
        beside = Path(folder) if Path(folder).is_dir() else Path(folder).parent
        differences = differences_to(against, results, read_losses(beside / LOSSES))
    page = write_page(folder)
    print_results(results, answer_sentence(results))
    if against is not None and differences is not None:
        print()
        print_against(against, differences)
    print(f"\nthe page is {page}; results.json and results.md beside it have the numbers")
    if not complete:
        sys.exit(1)


def suite(
    names: tuple[str, ...] = (),
    /,
    *,
    out: str,
    override: tuple[str, ...] = (),
    options: SuiteOptions = SuiteOptions(),  # noqa: B008 - frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
) -> None:
    """Try mechanisms on small synthetic tasks, each at the best of a few learning rates, and score them.

    Args:
        names: Mechanisms, written as for compare. Default: every registered one. The baseline, full
            attention, is always added.
        out: The folder of the suite. Run the same command again to resume; more names, tasks or seeds extend
            it.
        override: Change a setting of the recipe `task`, as in model.d_model=128; can also be given as a bare
            word.
    """
    check_names(names)
    from headgate.compare.suite import run_suite

    complete = run_suite(names, out, override, options, engine)
    _show_suite(out)
    if not complete:
        sys.exit(1)


def _show_suite(folder: str) -> None:
    """Rewrite the tables and page of a suite, and print its scores. For one without its runs, only the
    page."""
    from headgate.compare.suite_results import write_suite
    from headgate.compare.suite_tables import print_suite
    from headgate.report.reading import read_suite
    from headgate.report.suite_page import suite_sentence, write_suite_page

    whole = (Path(folder) / "plan.json").is_file()
    results = write_suite(folder) if whole else read_suite(folder)
    page = write_suite_page(folder)
    print_suite(results, suite_sentence(results))
    print(f"\nthe page is {page}; suite.json and suite.md beside it have the numbers")
