"""What a scheduler is asked for: GPUs and memory of the host, as a Pod, a TrainJob of Kubeflow or directives of Slurm.

Memory is requested as expected, and limited to what is enough with the confidence of the report (`HostInfo`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from staticmem.errors import UsageError
from staticmem.report.model import SHARED_BATCHES, HostInfo
from staticmem.report.text import printable
from staticmem.units import format_bytes

MIB = 1 << 20
SHARED_MEMORY = 64 * MIB  # /dev/shm of a container, without a volume there (containerd, pkg/oci/mounts.go)


@dataclass(frozen=True)
class Job:
    """A process on each of `host.processes` GPUs of one node. `answer` is the report's on the GPU."""

    host: HostInfo
    card: str
    answer: str


def job_of(host: HostInfo | None, card: str, answer: str) -> Job:
    """Raises:
    UsageError: the report has no memory of the host.
    """
    if host is None:
        why = "A scheduler is asked for memory of the host."
        raise UsageError("this report has no figures of the host", why, "Ask for them with --host.", "SM447")
    return Job(host, card, answer)


def pod(job: Job) -> str:
    """A Pod (core/v1), whose image is left to fill in."""
    lines = ["apiVersion: v1", "kind: Pod", "metadata:", "  name: staticmem", "spec:", "  restartPolicy: Never"]
    lines += ["  containers:", "    - name: train", "      image: IMAGE", "      resources:", *_resources(job, 8)]
    return _text(job, [*_of_cluster(job), *lines])


def train_job(job: Job) -> str:
    """A TrainJob (trainer.kubeflow.org/v1alpha1), whose runtime is left to be named."""
    lines = ["apiVersion: trainer.kubeflow.org/v1alpha1", "kind: TrainJob", "metadata:", "  name: staticmem", "spec:"]
    lines += ["  runtimeRef:", "    name: torch-distributed", "  trainer:", "    numNodes: 1"]
    lines += [f"    numProcPerNode: {job.host.processes}", "    resourcesPerNode:", *_resources(job, 6)]
    return _text(job, [*_of_cluster(job), *lines])


def slurm(job: Job) -> str:
    """The head of a batch script. `--mem` is of a node, and a step that takes more is killed."""
    host = job.host
    body = [
        "#!/bin/bash",
        *_comments(job),
        "# The type of the GPU is the cluster's word (sinfo -o %G): --gres=gpu:TYPE:N",
    ]
    body += ["#SBATCH --nodes=1", f"#SBATCH --ntasks-per-node={host.processes}", f"#SBATCH --gres=gpu:{host.processes}"]
    return "\n".join([*body, f"#SBATCH --mem={_mib(host.limit_bytes)}M", ""])


def _text(job: Job, lines: list[str]) -> str:
    return "\n".join([*_comments(job), *lines, ""])


def _comments(job: Job) -> Iterator[str]:
    host = job.host
    yield f"# GPU: {printable(job.answer)}"
    chance = f"{100 * host.confidence:g} % confidence"
    expected, most = format_bytes(host.node_bytes), format_bytes(host.limit_bytes)
    yield f"# Host: {expected} expected, {most} are enough with {chance} (staticmem; docs/how-to/schedulers.md)"
    if host.mapped_bytes:
        mapped = format_bytes(host.mapped_bytes)
        yield f"# {mapped} of a mapped file count too, and are taken back where memory is short"


def _of_cluster(job: Job) -> Iterator[str]:
    """What nobody but the cluster knows."""
    card = printable(job.card)
    yield f"# No nodeSelector: labels of nodes with {card} are the cluster's (kubectl get nodes --show-labels)"
    batches = job.host.parts.get(SHARED_BATCHES, 0) * job.host.processes
    if batches > SHARED_MEMORY:
        shared = format_bytes(batches)
        yield f"# Workers need {shared} of /dev/shm, which has 64 MiB without an emptyDir of medium Memory"


def _resources(job: Job, indent: int) -> list[str]:
    """GPUs are limits alone, which are requests too; memory has both."""
    host = job.host
    lines = ["requests:", f"  memory: {_mib(host.node_bytes)}Mi", "limits:", f"  memory: {_mib(host.limit_bytes)}Mi"]
    return [f"{' ' * indent}{line}" for line in [*lines, f"  nvidia.com/gpu: {host.processes}"]]


def _mib(nbytes: int) -> int:
    return -(-nbytes // MIB)
