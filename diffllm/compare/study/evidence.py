"""The ended runs of a study, from which its verdict is computed."""

from dataclasses import dataclass
from pathlib import Path

from diffllm.compare.arms.run import load_run
from diffllm.compare.study.arms import StudyArm, StudyRun, read_run, value_of
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import (
    RATES,
    ChosenRate,
    choose_from,
    deciding_runs,
    is_ended,
    rate_losses,
)
from diffllm.compare.study.study_hash import planned_digests, study_hash
from diffllm.config.similar import SimilarConfigs
from diffllm.data.progress import track


@dataclass(frozen=True)
class Evidence:
    """Measured values of a study's ended runs; all dictionaries have run names as keys."""

    runs: dict[str, StudyRun]
    """The ended runs that the rules compare."""
    rates: dict[str, float]
    """Final losses of the ended runs in the learning rate grid; infinite for diverged runs."""
    rate_marks: dict[str, str]
    """`run.study` in the saved configs of the learning rate grid: study hash, stage and arm."""
    digests: dict[str, str]
    """`config_digest` of all runs that the rules compare, in the order of the study.

    The planned config is used for runs that have not ended, the saved config for ended runs.
    """

    def hash_of(self, study: Study) -> str:
        return study_hash(study, self.digests)

    def choices(self, study: Study) -> list[ChosenRate]:
        return [choose_from(study, arm, self.rates) for arm in study.arms] if study.lr else []

    def arms(self, study: Study, choices: list[ChosenRate]) -> list[StudyArm]:
        rates = {choice.arm: choice.lr for choice in choices}
        arms = [StudyArm(name, rates.get(name)) for name in study.arms]
        for arm in arms:
            for seed in study.seeds:
                names = [run.name for run in deciding_runs(study, arm.name, seed, arm.lr)]
                runs = [self.runs[name] for name in names if name in self.runs]
                arm.missing += [name for name in names if name not in self.runs]
                arm.runs += runs
                if len(runs) == len(names):
                    arm.values[seed] = value_of(runs, study)
        return arms


def read_evidence(study: Study, out: Path) -> Evidence:
    """Read the ended runs of a study from the directory `out`.

    Raises CheckpointError if a run is damaged, and ConfigError if a run lacks the study's metric.
    """
    rates = rate_losses(out) if study.lr else {}
    places = sorted(filter(Path.is_dir, (out / RATES).glob("*"))) if study.lr else []
    configs = SimilarConfigs()
    marks = {
        f"{RATES}/{path.name}": configs.load(path).run.study or ""
        for path in places
        if (path / "config.yaml").is_file()
    }
    chosen = {arm: choose_from(study, arm, rates).lr if study.lr else None for arm in study.arms}
    runs: dict[str, StudyRun] = {}
    digests: dict[str, str] = {}
    with track("reading runs", len(study.arms) * len(study.seeds)) as advance:
        for arm, lr in chosen.items():
            for seed in study.seeds:
                for planned in deciding_runs(study, arm, seed, lr):
                    if is_ended(out / planned.name):
                        run = load_run(out / planned.name, configs.load)
                        digests = digests or planned_digests(study)
                        digest = digests[planned.name]
                        runs[planned.name] = read_run(run, study, planned, digest)
                advance(1)
    digests |= {name: run.digest for name, run in runs.items()}
    return Evidence(runs, rates, marks, digests)
