"""A run as what a scheduler is asked for."""

from __future__ import annotations

from staticmem.report import schedulers
from staticmem.report.formats import Format
from staticmem.report.formats.run import verdict_lines
from staticmem.report.run import RunReport
from staticmem.report.text import PLAIN, View


def _job(run: RunReport, view: View) -> schedulers.Job:
    return schedulers.job_of(run.host, run.card, " ".join(verdict_lines(run, view)))


def pod(run: RunReport, view: View = PLAIN) -> str:
    return schedulers.pod(_job(run, view))


def train_job(run: RunReport, view: View = PLAIN) -> str:
    return schedulers.train_job(_job(run, view))


def slurm(run: RunReport, view: View = PLAIN) -> str:
    return schedulers.slurm(_job(run, view))


FORMATS = (
    Format("k8s", "pod.yaml", pod, shows="host"),
    Format("trainjob", "trainjob.yaml", train_job, shows="host"),
    Format("slurm", "sbatch", slurm, shows="host"),
)
