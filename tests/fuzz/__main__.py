"""Fuzz one decoder for as long as you like, with atheris (``pip install -e .[fuzz]``).

python -m tests.fuzz                                     which there are
python -m tests.fuzz TARGET [libFuzzer's options]        such as -max_total_time=600 or -runs=1000000
python -m tests.fuzz TARGET FILE                         one input again, such as crash-… that a run has left
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

_OWN: Final = ["actors", "configs", "supervisors", "transport"]


def _fuzz(atheris: Any, name: str, options: list[str]) -> None:
    """Until an option says that it is enough, or something is found; ends the process."""
    with atheris.instrument_imports(include=_OWN):
        from tests.fuzz.targets import check, targets
    target: Target = targets()[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        atheris.Setup([sys.argv[0], *options, corpus], lambda data: check(target, data))
        atheris.Fuzz()


def main(args: list[str]) -> int:
    """Run; libFuzzer ends the process by itself."""
    if len(args) > 1 and not Path(args[1]).is_file():
        try:
            import atheris
        except ImportError:
            print("atheris is not installed: pip install -e .[fuzz]", file=sys.stderr)
            return 2
        _fuzz(atheris, args[0], args[1:])
        return 0
    from tests.fuzz.targets import check, targets

    if len(args) == 2 and args[0] in targets():
        check(targets()[args[0]], Path(args[1]).read_bytes())
        return 0
    print("\n".join(sorted(targets())))
    return 2 if args else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
