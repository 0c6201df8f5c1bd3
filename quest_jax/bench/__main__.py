"""``python -m quest_jax.bench``: prints the tables of :mod:`quest_jax.bench.decode`."""

import argparse

import jax
from rich.console import Console

from quest_jax.bench.decode import attention_table, model_table


def main() -> None:
    """Parses the arguments and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m quest_jax.bench", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="context lengths, tokens")
    parser.add_argument("--budget", type=int, default=1024, help="tokens that Quest reads")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each candidate, interleaved")
    args = parser.parse_args()
    if min(args.lengths) < 512 or any(length % 512 for length in args.lengths):
        parser.error(f"--lengths: expected multiples of 512, got {args.lengths}")
    if args.budget < 16 or args.rounds < 1:
        parser.error("expected --budget of at least 16 and --rounds of at least 1")
    console = Console()
    console.print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; medians of {args.rounds} interleaved runs")
    console.print(attention_table(args.lengths, args.budget, args.rounds))
    console.print(model_table(args.lengths, args.budget, args.rounds))


if __name__ == "__main__":
    main()
