"""`python -m staticmem`.

Python puts the current folder first on the path, where models lie. What is imported from here on is looked for
elsewhere; a few modules of Python's own were imported before (`staticmem ...` and `python -P` have no such entry).
"""

import os
import sys


def leave_current_folder() -> None:
    """Takes the entry that `-m` made from the path; the folder of a checkout that is not installed goes last."""
    try:
        current = os.getcwd()
    except OSError:  # it was removed, and so there is no entry
        return
    if getattr(sys.flags, "safe_path", False) or sys.path[0] not in ("", current):
        return
    del sys.path[0]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root not in sys.path:
        sys.path.append(root)


if __name__ == "__main__":
    leave_current_folder()
    from staticmem.cli.main import main

    sys.exit(main())
