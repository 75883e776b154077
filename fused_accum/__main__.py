"""`python -m fused_accum`: the report, `selftest` and `estimate`. See `--help` for exit codes."""

from __future__ import annotations

import argparse
import sys

from . import estimate, report

_EXIT_CODES = """\
exit codes of the report and of selftest:
  0  a native backend works; selftest: and all that work agree with the reference
  1  only the reference backend works (plain torch, slower); selftest: or a backend disagrees
  2  torch is missing, broken or too old
"""


def count(text: str) -> float:
    """'7e9', '124M', '7B' -> a number of parameters."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    number = float(text[:-1]) * unit if unit else float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m fused_accum",
        description="Which backends work here, why the others do not, and the remedy.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--json", action="store_true", help="print JSON")
    commands = top.add_subparsers(dest="command", title="other commands")

    commands.add_parser("selftest", help="compare every working backend with the reference on this machine")

    bytes_ = commands.add_parser("estimate", help="bytes held and moved, by mode, beside torch.optim.AdamW")
    bytes_.add_argument("--params", type=count, required=True, help="number of parameters: 7e9, 124M, 7B")
    bytes_.add_argument("--param-dtype", choices=estimate.SIZES, default="fp32", help="and of .grad")
    bytes_.add_argument("--accum-dtype", choices=("fp32", "bf16"), default="fp32", help="of the buffer")
    bytes_.add_argument(
        "--state-dtype",
        choices=("fp32", "bf16", "param"),
        default="fp32",
        help="of the moments; param: the parameter's, as torch",
    )
    bytes_.add_argument("--n-microbatches", type=int, default=8, metavar="N", help="per window (default 8)")
    bytes_.add_argument("--amsgrad", action="store_true")
    bytes_.add_argument("--master-weights", choices=("fp32", "split"), help="of bf16 and (fp32) fp16 parameters")
    bytes_.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.command == "estimate":
        return run_estimate(arguments)
    facts = report.collect()
    if arguments.command == "selftest":
        if facts["exit_code"] == report.NO_TORCH:
            print(facts["torch_problem"], file=sys.stderr)
            return report.NO_TORCH
        from . import selftest  # needs torch

        return selftest.main()
    print(report.as_json(facts) if arguments.json else report.as_text(facts))
    return facts["exit_code"]


def run_estimate(arguments: argparse.Namespace) -> int:
    state = None if arguments.state_dtype == "param" else arguments.state_dtype
    if arguments.n_microbatches < 1:
        parser().error(f"--n-microbatches is {arguments.n_microbatches}; a window has at least 1")
    try:
        rows = estimate.modes(
            arguments.param_dtype, arguments.accum_dtype, state, arguments.n_microbatches, arguments.amsgrad,
            arguments.master_weights,
        )  # fmt: skip
    except ValueError as error:
        parser().error(str(error))
    render = estimate.as_json if arguments.json else estimate.as_text
    print(render(rows, arguments.params))
    return 0


if __name__ == "__main__":
    sys.exit(main())
