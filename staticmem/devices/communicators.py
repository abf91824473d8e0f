"""What a communicator of NCCL takes on each device: its channels' buffers, beside PyTorch's allocator.

It depends on the links, the number of channels and of peers, and on the version; nothing here was measured. One
communicator is counted, as data parallelism needs it.
"""

from __future__ import annotations

from staticmem.units import MIB, Band

# low: 484 MiB of a process with a communicator on an RTX 3090 over PCIe (github.com/NVIDIA/nccl/pull/2366), less the
#   256 MiB of its context (profiles/pytorch.yaml).
# expected: 688 MB a communicator of three or four A100 over NVLink, 544 MB of two (github.com/NVIDIA/nccl/issues/964).
# high: "about 1.6GB" with one communicator (github.com/NVIDIA/nccl/issues/864).
NCCL = Band(228 * MIB, 688 * MIB, 1638 * MIB)
