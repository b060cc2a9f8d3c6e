"""Bad arguments, configs, weights and prompts, many at a time: `python tests/hostile`, or `make test-hostile`.

A case passes if the command ends by itself in time, with exit code 0 or 2, after one sentence at most; without a
traceback, without executing what a file holds, without writing outside of its folder, and without leaving a file behind
that is not whole. Cases are drawn from a seed; `--only KIND --verbose` shows those of one kind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hostile.judge import run_all
from hostile.kinds import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=14, help="of every kind")
    parser.add_argument("--only", help="one kind")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print every command and what it said")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    args = parser.parse_args()
    kinds = [(attacked, name) for attacked, found in KINDS.items() for name in found if args.only in (None, name)]
    if args.list or not kinds:
        print("\n".join(f"{attacked}: {name}" for attacked, name in kinds or [("unknown kind", args.only)]))
        return 0 if kinds else 2
    cases = [(attacked, name, n) for n in range(args.cases) for attacked, name in kinds]
    with tempfile.TemporaryDirectory(prefix="nextscale-hostile-") as folder:
        return run_all(cases, args.seed, Path(folder), args.processes, args.verbose)


if __name__ == "__main__":
    sys.exit(main())
