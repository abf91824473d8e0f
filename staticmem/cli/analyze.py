"""`staticmem analyze MODEL`: the memory of one step."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from staticmem.cli.values import dimension, one_of, positive, resolution
from staticmem.errors import UsageError

FORMATS = ("table", "json")
UNITS = ("binary", "decimal", "bytes")

DESCRIPTION = """\
The peak memory of one training or inference step: how much, when, and what is alive then.
MODEL is an ONNX file or an archive of torch.export (.pt2); its content decides. '-' reads it from stdin.
"""

EPILOG = """\
examples:
  staticmem analyze model.pt2 --batch 32 --optimizer adam
      one training step; without --optimizer, inference
  staticmem analyze model.onnx --batch 8 --resolution 512 --mode infer
      inference on images of 512 x 512
  staticmem analyze bert.onnx --batch 16 --dim seq=384 --optimizer adamw --amp bf16
      open dimensions by name, mixed precision
  staticmem analyze model.pt2 --optimizer adam -o report.json
      the report as JSON, to a file
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "analyze",
        help="the peak memory of a training or inference step",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("model", metavar="MODEL", help="an .onnx or .pt2 file, or - for stdin")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("-b", "--batch", type=positive("--batch"), metavar="N", help="batch size (axis 0 of the inputs)")
    sizes.add_argument("--resolution", type=resolution, metavar="N|HxW", help="height and width of image inputs")
    sizes.add_argument(
        "--dim", type=dimension, action="append", default=[], metavar="NAME=N",
        help="size of an open dimension; repeatable",
    )  # fmt: skip
    step = parser.add_argument_group("the step")
    step.add_argument("--optimizer", metavar="NAME", help="sgd, adam, adamw, rmsprop, adagrad; makes it training")
    step.add_argument(
        "--optimizer-impl", default="foreach", metavar="IMPL", help="foreach (default, as on CUDA), fused, for-loop"
    )
    step.add_argument("--momentum", type=float, default=0.0, metavar="M", help="momentum of sgd (default 0)")
    step.add_argument("--mode", metavar="MODE", help="train or infer (default: train if an optimizer is given)")
    step.add_argument(
        "--loss", default="auto", metavar="LOSS",
        help="auto (default, by the output's shape), cross-entropy, mse, mean, none",
    )  # fmt: skip
    step.add_argument("--dtype", metavar="TYPE", help="cast the whole model: fp32, fp16, bf16")
    step.add_argument("--amp", metavar="TYPE", help="mixed precision as torch.autocast: fp16, bf16, none")
    step.add_argument(
        "--sdpa", default="auto", metavar="KERNEL",
        help="attention kernel: auto (default, as PyTorch chooses on an sm_90 GPU), cudnn, flash, efficient, math",
    )  # fmt: skip
    step.add_argument(
        "--unfold-batchnorm", action="store_true",
        help="put a batch norm behind every convolution with a bias, for files whose norms were folded",
    )  # fmt: skip
    step.add_argument(
        "--inplace-activations", default="auto", metavar="POLICY",
        help="what ran in place, where the file does not say (ONNX): auto (default), none, all",
    )  # fmt: skip
    step.add_argument(
        "--method", type=one_of("--method", ("liveness", "textbook")), default="liveness", metavar="METHOD",
        help="liveness (default); textbook shows the textbook estimate beside it",
    )  # fmt: skip
    device = parser.add_argument_group("the device")
    device.add_argument(
        "--gpu", metavar="NAME|SIZE",
        help="a card (h100-sxm-80gb, rtx-4090, 24GB): adds allocated, reserved and device memory, and whether it fits",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "-f", "--format", type=one_of("--format", FORMATS), metavar="FORMAT", help="table (default) or json"
    )
    output.add_argument("-o", "--output", metavar="FILE", help="write to a file; its suffix gives the format")
    output.add_argument("--force", action="store_true", help="overwrite the output file")
    output.add_argument(
        "--units", type=one_of("--units", UNITS), default="binary", metavar="UNITS",
        help="binary (default, GiB), decimal (GB), bytes",
    )  # fmt: skip
    output.add_argument("--top", type=positive("--top"), default=10, metavar="N", help="how many tensors to list")
    output.add_argument("--explain-peak", action="store_true", help="everything alive at the peak, by module")
    output.add_argument(
        "--color", type=one_of("--color", ("auto", "always", "never")), default="auto", metavar="WHEN",
        help="auto (default), always, never",
    )  # fmt: skip
    output.add_argument("-q", "--quiet", action="store_true", help="only the last line of the table")
    output.add_argument("-v", "--verbose", action="store_true", help="more of what was decided on the way")
    output.add_argument("--strict", action="store_true", help="exit 1 if an op is unknown")
    output.add_argument("--debug", action="store_true", help="show a traceback on errors")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where --strict found an unknown op."""
    from staticmem.analysis import analyze
    from staticmem.cli.output import check_target, emit
    from staticmem.cli.source import model_path

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    kind = _format(args)
    with model_path(args.model) as path:
        report = analyze(
            path,
            batch=args.batch,
            resolution=args.resolution,
            dims=_dims(args.dim),
            mode=args.mode,
            optimizer=args.optimizer,
            optimizer_impl=args.optimizer_impl,
            momentum=args.momentum,
            loss=args.loss,
            dtype=args.dtype,
            amp=args.amp,
            sdpa=args.sdpa,
            unfold_batchnorm=args.unfold_batchnorm,
            inplace_activations=args.inplace_activations,
            method=args.method,
            gpu=args.gpu,
            top=sys.maxsize if args.explain_peak and kind == "json" else args.top,
        )
    emit(report, kind, args)
    unknown = report.coverage.unknown
    if args.strict and unknown:
        names = ", ".join(row.op for row in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        sys.stderr.write(f"strict: unknown ops: {names}\n")
        return 1
    return 0


def _format(args: argparse.Namespace) -> str:
    """The format that was asked for, else that of the output file's suffix, else the table."""
    if args.format is not None:
        return str(args.format)
    if args.output in (None, "-"):
        return "table"
    suffix = args.output.rsplit(".", 1)[-1].lower() if "." in args.output else ""
    kinds = {"json": "json", "txt": "table"}
    if suffix not in kinds:
        raise UsageError(
            f"no format for '{args.output}'",
            "The suffix of the output file gives the format: .json or .txt.",
            "Name the file so, or add --format table or --format json.",
            code="SM141",
        )
    return kinds[suffix]


def _dims(pairs: list[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in pairs:
        if found.setdefault(name, size) != size:
            raise UsageError(
                f"--dim {name} is given twice",
                f"Once as {found[name]} and once as {size}.",
                "Give one size for it.",
                code="SM113",
            )
    return found
