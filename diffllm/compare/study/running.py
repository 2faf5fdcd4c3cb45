"""Run a study: check the study before its start, and start its runs in stages."""

import shlex
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from diffllm.compare.arms.comparability import Comparand, differences
from diffllm.compare.arms.sentences import exact_note
from diffllm.compare.study.costs import spending_problems
from diffllm.compare.study.declared_differences import settings_of, undeclared
from diffllm.compare.study.file import Rule, Study, better
from diffllm.compare.study.planned_runs import (
    RATES,
    Planned,
    config_of_planned,
    errors_of_arm,
    first_runs,
    start_words,
    strayed,
    terms_of,
)
from diffllm.compare.study.rates import choose_rates, next_runs, rate_runs
from diffllm.compare.study.removed_rules import margin_note, replacement_of
from diffllm.compare.study.size_trends import check_trends, unequal_pairs
from diffllm.compare.study.study_hash import planned_digests, study_hash
from diffllm.compare.sweep.cluster import ClusterLauncher, ranks_of_runs
from diffllm.compare.sweep.command import (
    Place,
    join_ranks,
    launch_values,
    print_outcomes,
    print_upload,
    run_here,
)
from diffllm.compare.sweep.job import Ending, Job
from diffllm.compare.sweep.runs import flops_of_step
from diffllm.compare.sweep.sweep_directory import SweepDirectory
from diffllm.config.changes import what_differs
from diffllm.config.loading import configs_of
from diffllm.config.matching import totals
from diffllm.config.saved import load_run_config, plugin_changes
from diffllm.config.words import typed_override
from diffllm.core.console import track
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo, to_stderr
from diffllm.core.run_files import RunFile
from diffllm.distributed.launcher import stopped_status
from diffllm.distributed.world import World
from diffllm.metrics.wandb_config import check_wandb
from diffllm.statistics.gap_tests import MOST_ALPHA
from diffllm.statistics.smallest_p import seeds_for_p, smallest_p
from diffllm.training.memory import check_memory


def run_study(
    study: Study, out: Path, launcher: list[str], added: list[str]
) -> tuple[int, dict[str, Any] | None]:
    """Run all runs of a study that have not ended; resume runs that have started.

    The grid of learning rates, if the study has a grid, runs before the compared runs. If the study
    cannot run, raise ConfigError without starting runs or changing files.

    Args:
        out: directory of the study's runs.
        launcher: the overrides hydra/launcher=... and hydra.launcher.*.
        added: plugins and --config-dir options for the command lines of the runs.

    Returns:
        The exit status and, on rank 0, the values that --json prints. The status is 0 if every run
        has ended and every arm has a learning rate. If signal n stopped the study, the status is
        128 + n. Otherwise it is 1.
    """
    world = join_ranks()

    def begin() -> Place:
        cluster = ClusterLauncher.of(launcher, world.size, typed_override("run.sweep", out.name))
        check_study_runs(study, out, *ranks_of_runs(cluster, world.size))
        directory = SweepDirectory(out, "study")
        directory.hold()
        return directory, cluster

    # Every rank must call this. The other ranks wait for rank 0, and receive an error of its check.
    _, place = world.broadcast_and_keep("study", lambda: (None, begin()))
    signal_number, unfinished, endings = run_stages(study, world, place, added)
    if place is None:
        return 0, None
    print_upload(out)
    directory, _ = place
    content = launch_values(directory, directory.record["runs"], endings, signal_number)
    if signal_number:
        return stopped_status(signal_number), content
    status = 1 if unfinished else print_end(study, out, added)
    return status, content


def run_stages(
    study: Study, world: World, place: Place | None, added: list[str]
) -> tuple[int, int, dict[str, Ending]]:
    """Run the stages of a study one after another, until a run of a stage does not end.

    Every rank must call this function. `place` is None on ranks other than 0, and `added` is as in
    `run_study`.

    Returns:
        The number of the received signal (0 for none), the number of unfinished runs in the last
        stage, and the endings by run name; only on rank 0.
    """
    signal_number = unfinished = 0
    all_endings: dict[str, Ending] = {}

    def stage_jobs() -> list[dict[str, Any]]:
        assert place
        return [] if unfinished or signal_number else next_jobs(study, place[0], added)

    for stage in count():
        # Every rank must call this; rank 0 chooses the jobs. The empty list after the last stage
        # also ends the loops of the other ranks.
        job_fields = world.broadcast_from_rank0(f"stage/{stage}", stage_jobs)
        if not job_fields:
            break
        jobs = [Job(**fields) for fields in job_fields]
        if place is None:
            run_here(jobs, world)
            continue
        directory, cluster = place
        echo(f"{directory.path}: {len(jobs)} runs remain in this stage", flush=True)
        if cluster:
            signal_number, endings = cluster.run(jobs, directory)
        else:
            signal_number, endings = run_here(jobs, world)
        unfinished = print_outcomes(jobs, endings, directory)
        all_endings |= endings
    return signal_number, unfinished, all_endings


def print_end(study: Study, out: Path, added: list[str]) -> int:
    """Print the command of the verdict; return 1 if an arm diverged at every learning rate."""
    choices = choose_rates(study, rate_runs(out))
    diverged = [choice for choice in choices if choice.lr is None]
    for choice in diverged:
        rates = ", ".join(f"{lr:g}" for lr in choice.losses)
        echo(f"arm {choice.arm} diverged at every learning rate ({rates}): it has no deciding run")
    ended = "all other runs" if diverged else "all runs"
    words = ["diffllm", "study", "verdict", str(study.path), f"out={out}", *added]
    echo(f"{ended} of {out} have ended: {shlex.join(words)}")
    return 1 if diverged else 0


def next_jobs(study: Study, directory: SweepDirectory, added: list[str]) -> list[dict[str, Any]]:
    """Return the runs that remain in the current stage as jobs, and record their overrides."""
    out = directory.path
    runs = next_runs(study, out)
    digest = study_hash(study, planned_digests(study)) if runs else ""
    jobs = []
    with track("checking runs", len(runs)) as advance:
        for number, planned in enumerate(runs, start=1):
            words = start_words(planned, out, digest)
            directory.record["runs"][planned.name] = words
            cfg = config_of_planned(planned)
            job = Job(
                number,
                len(runs),
                planned.name,
                path=str(out / planned.name),
                steps=cfg.steps,
                flops_of_step=flops_of_step(cfg),
                words=[*added, *words],
                finished=False,
                group=group_of(planned, study),
                tags=(out.name, study.path.stem),
            )
            jobs.append(vars(job))
            advance(1)
    directory.record["keys"] = []
    directory.write()
    return jobs


def group_of(planned: Planned, study: Study) -> str:
    """Return the group of a run in wandb: the arm, with the learning rate if the arm has several.

    In a study with `lr`, the runs of the grid have several, and the compared runs have one.
    """
    if planned.stage == RATES or study.lr_sweep:
        return f"{planned.arm} lr={planned.lr:g}"
    return planned.arm


def check_study_runs(study: Study, out: Path, world_size: int, ranks_here: int = 0) -> None:
    """Raise ConfigError if the design, a planned config or an existing run in `out` is invalid.

    Also raise ConfigError if a planned run cannot fit into memory. `world_size` is the number of
    processes per run. For `ranks_here`, see `check_memory`.
    """
    begun = SweepDirectory(out, "study").record["runs"]
    if not begun:
        check_design(study)
    first = first_runs(study)
    # `configs_of` can name the values of parallel.context that fit all arms.
    loaded = configs_of([partial(config_of_planned, planned) for planned in first])
    configs = {planned.arm: cfg for planned, cfg in zip(first, loaded, strict=True)}
    check_trends(study, configs)
    for arm, cfg in configs.items():
        with errors_of_arm(arm):
            cfg.check_world(world_size)
            check_wandb(cfg.wandb)
    if study.profile and not isinstance(study.budget, str):
        study.budget.check_settings(study.profile, configs)
    remaining = next_runs(study, out)
    problems = planned_problems(study)
    if problems:
        text = f"{study.path}: the verdict would be not comparable: {'; '.join(problems)}"
        # A begun study resumes with a warning, because older versions accepted more designs.
        if not begun:
            raise ConfigError(text)
        if remaining:
            to_stderr(f"warning: {text}")
    for name in begun:
        changes = plugin_changes(out / name)
        if changes:
            raise ConfigError(
                f"the run {out / name} was started with {what_differs(changes)}; choose another "
                "out=DIR"
            )
    # The memory of a run depends on its arm, but not on its seed or learning rate.
    for arm in dict.fromkeys(planned.arm for planned in remaining):
        with errors_of_arm(arm):
            check_memory(configs[arm], world_size, ranks_here)
    for planned in remaining:
        path = out / planned.name
        if (path / RunFile.CONFIG).is_file():
            problem = strayed(path, load_run_config(path), planned)
            if problem:
                raise ConfigError(
                    f"{path} differs from the study ({problem}); choose another out=DIR"
                )


def check_design(study: Study) -> None:
    """Raise ConfigError if a rule is removed, has an unsuitable alpha or metric, or too few seeds.

    docs/studies.md lists the conditions under "Refused designs". Studies that already have runs
    are not checked, because older versions of diffllm accepted more designs.
    """
    for key, rule in study.named_rules:
        for advice in (replacement_of(study, rule), margin_note(rule)):
            if advice:
                raise ConfigError(f"{key}: {advice}")
        if rule.alpha > MOST_ALPHA:
            raise ConfigError(f"{key}.alpha={rule.alpha:g} must be at most {MOST_ALPHA:g}")
        if rule.kind == "log_rank":
            if better(study.metric) < 0:
                raise ConfigError(
                    f"{key}: kind={rule.kind} needs a metric that rises during training, but "
                    f"metric={study.metric} falls; use kind=difference"
                )
            check_smallest_p(study, key, rule)
        if study.power and rule.alpha != study.rule.alpha:
            raise ConfigError(
                f"{key}.alpha={rule.alpha:g} must equal rule.alpha={study.rule.alpha:g}, because "
                "the power of the study is computed for one alpha; use the same alpha in all rules"
            )


def check_smallest_p(study: Study, key: str, rule: Rule) -> None:
    """Raise ConfigError if the smallest possible p of a log-rank rule is not below alpha.

    The smallest possible p is first multiplied by the number of log-rank rules (Holm's correction).
    `key` is the rule's key in the study file, such as "also[0]".
    """
    n = len(study.seeds)
    rules = sum(other.kind == "log_rank" for other in study.rules)
    # In the best case all other rules have smaller p-values. Holm's largest factor for a log-rank
    # rule is then the number of these rules.
    least = smallest_p("log_rank", n, n)
    adjusted = least * rules
    if adjusted < rule.alpha:
        return
    seeds = seeds_for_p("log_rank", rule.alpha, rules)
    fix = f"{seeds} seeds or more" if seeds else "a larger alpha"
    if rules > 1:
        fix += ", or fewer rules with kind=log_rank"
    holm = f" ({least:.2g} before Holm's correction for {rules} rules)" if rules > 1 else ""
    raise ConfigError(
        f"{key}.alpha={rule.alpha:g} must be above {min(1, adjusted):.2g}{holm}, the smallest p "
        f"of kind=log_rank with {n} seeds per arm; use {fix}"
    )


def design_notes(study: Study) -> list[str]:
    """Return a warning for each alpha that is too small for exact tests with the study's seeds."""
    alphas = [rule.alpha for rule in study.rules if rule.kind != "log_rank"]
    notes = []
    for alpha in sorted(set(alphas)):
        note = exact_note(len(study.seeds), len(alphas), alpha, sides=1)
        if note:
            notes.append(note)
    return notes


def planned_problems(study: Study) -> list[str]:
    """Return the reasons why the planned runs cannot be compared.

    The first and the last seed are necessary, because a constant model.init_seed can equal one.
    """
    comparands = []
    for planned in (*first_runs(study), *first_runs(study, study.seeds[-1])):
        cfg = config_of_planned(planned)
        values: dict[str, Any] = dict(settings_of(cfg, study.sets_rates))
        sizes = totals(cfg.model, cfg.visible_keys)
        # The names of these facts in run.json, as in the comparison of ended runs.
        values["parameters"] = sizes["params"]
        values["flops_per_token"] = sizes["flops"]
        comparands.append(Comparand(planned.arm, planned.seed, values))
    problems = undeclared(differences(comparands, terms_of(study)))
    return problems + spending_problems(study) + unequal_pairs(study, comparands)
