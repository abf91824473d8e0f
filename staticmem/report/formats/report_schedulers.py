"""A step as what a scheduler is asked for."""

from __future__ import annotations

from staticmem.report import schedulers
from staticmem.report.formats import Format
from staticmem.report.model import Report
from staticmem.report.text import PLAIN, View
from staticmem.report.verdict import verdict


def _job(report: Report, view: View) -> schedulers.Job:
    card = report.device.name if report.device is not None else "the GPU"
    return schedulers.job_of(report.host, card, verdict(report, view))


def pod(report: Report, view: View = PLAIN) -> str:
    return schedulers.pod(_job(report, view))


def train_job(report: Report, view: View = PLAIN) -> str:
    return schedulers.train_job(_job(report, view))


def slurm(report: Report, view: View = PLAIN) -> str:
    return schedulers.slurm(_job(report, view))


FORMATS = (
    Format("k8s", "pod.yaml", pod, shows="host"),
    Format("trainjob", "trainjob.yaml", train_job, shows="host"),
    Format("slurm", "sbatch", slurm, shows="host"),
)
