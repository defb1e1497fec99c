"""The `fedlaw` command: a mistake is one line on stderr and exit code 2, never a traceback (unless --debug)."""

from __future__ import annotations

import os
import sqlite3
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command with `arguments` (those of the process, if None) and exit.

    Exit codes: 0 done, 1 code of one's own broke down, 2 a mistake of the user's, 130 interrupted; a line on stderr
    says what it was.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _call(given)
        sys.exit(code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has gone: not a mistake
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except sqlite3.DatabaseError as error:
        if debug:
            raise
        _fail(
            f"--store: the results file is damaged or in use ({error}); restore a copy or name another file"
        )
    except (ValueError, OSError, ImportError) as error:
        if debug:
            raise
        _fail(str(error) or type(error).__name__)
    except Exception as error:  # somebody's own model, data set, rule or attack, most likely
        if debug:
            raise
        _fail(f"{type(error).__name__}: {error} (--debug shows where)", 1)


def _call(arguments: list[str]) -> int:
    try:
        from fedlaw.cli_app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "fedlaw":
            raise
        raise ImportError(f"the command needs {error.name!r}: pip install 'fedlaw[lab]'") from None
    try:
        code = app(args=arguments, prog_name="fedlaw", standalone_mode=False, obj=arguments)
    except Exception as error:
        # The command-line library's own: a usage error, or Ctrl-C outside of a run.
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return 2
        if hasattr(error, "format_message"):
            message = error.format_message().replace("Value error, ", "").rstrip(".")
            raise ValueError(f"{message}; see `fedlaw --help`") from error
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from None
        raise
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"fedlaw: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"fedlaw: note: {' '.join(str(message).split())}", file=file or sys.stderr)


if __name__ == "__main__":
    main()
