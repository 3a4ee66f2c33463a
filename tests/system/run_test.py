# SPDX-License-Identifier: Apache-2.0
"""Runs one system test, lists them, or writes the image of a case for a look by hand.

    run_test.py --list
    run_test.py NAME
    run_test.py --write CASE LAYOUT
"""

import importlib
import pathlib
import sys
import traceback

sys.dont_write_bytecode = True  # the sources may be read-only, and stay clean

HERE = pathlib.Path(__file__).resolve().parent
for folder in (HERE, HERE / "cases", HERE.parent / "hostile"):
    sys.path.insert(0, str(folder))

import harness  # noqa: E402
import image_case  # noqa: E402

SKIPPED = 77  # SKIP_RETURN_CODE in CMakeLists.txt


def load_tests():
    for folder in (HERE, HERE / "cases", HERE.parent / "hostile"):
        for path in sorted(folder.glob("*_tests.py")):
            importlib.import_module(path.stem)


def run(name):
    try:
        with harness.Workspace() as workspace:
            harness.TESTS[name](workspace)
            workspace.check_nothing_left()
    except harness.Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    except harness.Failure as failure:
        print(f"{name}: {failure}")
        return 1
    except Exception:  # pylint: disable=broad-except
        traceback.print_exc()
        return 1
    return 0


def main(arguments):
    load_tests()
    if arguments == ["--list"]:
        print("\n".join(harness.TESTS))
        return 0
    if len(arguments) == 3 and arguments[0] == "--write":
        image_case.write(arguments[1], arguments[2])
        return 0
    if len(arguments) == 1 and arguments[0] in harness.TESTS:
        return run(arguments[0])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
